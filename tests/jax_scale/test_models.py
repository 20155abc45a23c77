"""quantize_tree and dequantize_tree on what JAX users have: dicts, states and modules."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import host

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy


def _imported(name: str) -> Any:
    pytest.importorskip(name.partition(".")[0], reason=f"{name} is not installed")
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def nnx() -> Any:
    return _imported("flax.nnx")


@pytest.fixture(scope="module")
def eqx() -> Any:
    return _imported("equinox")


def _block(nnx: Any) -> Any:
    """A module with a list of layers, a norm, random numbers, a tied weight and a name."""

    class Block(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.layers = nnx.List([nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)])
            self.norm = nnx.LayerNorm(32, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.tied = self.layers[0].kernel
            self.name = "block"

        def __call__(self, x: Any) -> Any:
            return self.norm(self.layers[1](nnx.relu(self.layers[0](x))))

    return Block(nnx.Rngs(0))


def _quantized_names(tree: Any) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=pq.is_quantized)
    joined = ((jax.tree_util.keystr(p, simple=True, separator="."), leaf) for p, leaf in paths)
    return [name.removesuffix(".value") for name, leaf in joined if pq.is_quantized(leaf)]


def test_a_module_of_nnx(nnx: Any) -> None:
    module = _block(nnx)
    kernel = module.layers[0].kernel.get_value()
    made = pq.quantize_tree(module, "nf4")
    assert _quantized_names(made) == ["layers.0.kernel", "layers.1.kernel", "tied"]
    assert type(made) is type(module) and made.name == "block"
    assert isinstance(made.layers[0].kernel, nnx.Param)
    assert made.layers[0].kernel.get_value().to_data() == pq.quantize(kernel, "nf4").to_data()
    assert made.layers[0].kernel.get_value().data is made.tied.get_value().data  # tied as before
    assert made.layers[0].bias.get_value() is module.layers[0].bias.get_value()
    assert module.layers[0].kernel.get_value() is kernel

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32), dtype=np.float32))
    wanted = pq.dequantize_tree(made)(x)
    assert _quantized_names(pq.dequantize_tree(made)) == []
    for compile_ in (jax.jit, nnx.jit):
        found = compile_(lambda module, x: pq.dequantize_tree(module)(x))(made, x)
        np.testing.assert_allclose(host(found), host(wanted), rtol=1e-5, atol=1e-5)
    assert float(abs(wanted - module(x)).max()) > 1e-3


def test_a_layer_that_knows_no_qtensors_says_what_to_do(nnx: Any) -> None:
    made = pq.quantize_tree(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), "q4s/8:f16")
    for compile_ in (jax.jit, nnx.jit):
        with pytest.raises(pq.errors.UnsupportedArray, match=r"pq\.dequantize_tree\(model\)"):
            compile_(lambda module, x: module(x))(made, jnp.ones((2, 32)))


def test_patterns_name_weights_of_nnx_as_its_paths_do(nnx: Any) -> None:
    module = _block(nnx)
    made = pq.quantize_tree(module, "q4s/8:f16", include=["layers.*", "norm.scale"])
    assert _quantized_names(made) == ["layers.0.kernel", "layers.1.kernel", "norm.scale"]
    made = pq.quantize_tree(module, "q4s/8:f16", exclude=["layers.1.*", "tied"])
    assert _quantized_names(made) == ["layers.0.kernel"]
    with pytest.raises(pq.errors.NothingMatches, match=r"layers\.0\.weight"):
        pq.quantize_tree(module, "q4s/8:f16", include="layers.0.weight")


def test_states_of_nnx_are_quantized_and_put_back(nnx: Any) -> None:
    module = _block(nnx)
    state = nnx.state(module, nnx.Param)
    made = pq.quantize_tree(state, "q8s/row:f32", include="layers.*")
    assert type(made) is type(state) and _quantized_names(state) == []
    assert _quantized_names(made) == ["layers.0.kernel", "layers.1.kernel"]
    nnx.update(module, made)
    kernel = module.layers[1].kernel.get_value()
    assert pq.is_quantized(kernel) and kernel.shape == (64, 32)
    graph, again = nnx.split(module)
    assert pq.is_quantized(nnx.merge(graph, again).layers[1].kernel.get_value())
    pure = pq.quantize_tree(nnx.to_pure_dict(nnx.state(_block(nnx))), "q8s/row:f32")
    assert pq.is_quantized(pure["layers"][0]["kernel"])


def test_modules_are_saved_by_name_and_filled_again(nnx: Any, eqx: Any, tmp_path: Path) -> None:
    path = tmp_path / "module.safetensors"
    mlp = pq.quantize_tree(eqx.nn.MLP(32, 8, 64, 2, key=jax.random.key(0)), "nf4")
    params = pq.quantize_tree(nnx.state(_block(nnx), nnx.Param), "nf4")
    empty = eqx.filter_eval_shape(lambda: eqx.nn.MLP(32, 8, 64, 2, key=jax.random.key(0)))
    for tree, template in ((mlp, empty), (params, nnx.state(_block(nnx), nnx.Param))):
        pq.save(path, pq.flatten_tree(tree))
        found = pq.unflatten_tree(template, pq.load(path, "jax:cpu:0"))
        assert _quantized_names(found) == _quantized_names(tree)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True)
        assert all(a is b or host(a).tobytes() == host(b).tobytes() for a, b in pairs)


def test_modules_of_equinox_run_as_they_are(eqx: Any) -> None:
    module = eqx.nn.MLP(32, 8, 64, 2, key=jax.random.key(0))
    made = pq.quantize_tree(module, "q4s/8:f16", exclude="layers.2.*")
    assert _quantized_names(made) == ["layers.0.weight", "layers.1.weight"]
    assert made.activation is module.activation  # a leaf that is no array
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32), dtype=np.float32))
    found = eqx.filter_jit(lambda module, x: jax.vmap(module)(x))(made, x)
    wanted = jax.vmap(pq.dequantize_tree(made))(x)
    np.testing.assert_allclose(host(found), host(wanted), rtol=1e-5, atol=1e-5)


def test_only_what_is_trained_of_an_equinox_module_has_gradients(eqx: Any) -> None:
    module = pq.quantize_tree(eqx.nn.MLP(32, 8, 64, 2, key=jax.random.key(0)), "q4s/8:f16")
    trained, frozen = eqx.partition(module, lambda x: x is not None and getattr(x, "ndim", 0) == 1)

    def loss(trained: Any, x: Any) -> Any:
        return (jax.vmap(eqx.combine(trained, frozen))(x) ** 2).sum()

    found = eqx.filter_grad(loss)(trained, jnp.ones((4, 32)))
    assert float(abs(found.layers[0].bias).max()) > 0


def test_plain_dicts_under_jit_and_grad() -> None:
    rng = np.random.default_rng(0)
    params = {
        "layers": [{"w": jnp.asarray(rng.normal(size=(16, 32)), jnp.float32)} for _ in range(2)],
        "scale": jnp.ones(16),
    }
    made = pq.quantize_tree(params, "q8s/row:f32", include="layers.*.w")

    def loss(x: Any, params: Any) -> Any:
        return sum((x @ layer["w"].T * params["scale"]).sum() for layer in params["layers"])

    x = jnp.ones((2, 32))
    found = jax.jit(jax.grad(loss))(x, made)
    wanted = jax.grad(loss)(x, pq.dequantize_tree(made))
    np.testing.assert_allclose(host(found), host(wanted), rtol=1e-5, atol=1e-4)


def test_leaves_that_are_no_arrays_are_refused_outside_of_modules() -> None:
    with pytest.raises(pq.errors.UnsupportedTree, match=r"^w is of type object"):
        pq.quantize_tree({"w": object()}, "nf4")
    with pytest.raises(pq.errors.UnsupportedTree, match="The tree is of type builtin_function"):
        pq.dequantize_tree(len)


def test_dequantizing_a_tree_takes_a_dtype() -> None:
    made = pq.quantize_tree({"w": np.ones((4, 64), np.float32), "n": 3}, "nf4")
    found = pq.dequantize_tree(made, "float16")
    assert found["w"].dtype == np.float16 and found["n"] == 3
    with pytest.raises(pq.errors.UnsupportedDtype):
        pq.dequantize_tree(made, "int8")
