"""Derivatives: as torch's on the same numbers, numerically right where smooth, of every order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import host, needs

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

M, N, K = 5, 16, 96
#: Every kind of code, scale, offset, table, order of axes and extra that has a derivative.
SCHEMES = (
    "q4s/32:f32",
    "q8s/row:f32",
    "q4s/tensor:f32",
    "q6f/16:f16",
    "e2m1/16:ue4m3/tensor:f32",
    "u4[nf4]/64:f32",
    "u3[custom]/16:f32",
    "u4/32:f32+bias:f32",
    "u4/32:f32-zero:f32",
    "u4/32:f32-zero:u4",
    "u4[nf4]/32:(u8[dynamic8u]/2:f32)",
    "u4/32:(u6/8:f32)+bias:(q6s/8:f32)",
    "u4[nf4]/64:f32~flat",
)


def weight(name: str, shape: tuple[int, ...] = (N, K)) -> Any:
    scheme = pq.scheme(name)
    values = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    table = np.linspace(-1.0, 1.0, 2**scheme.bits) if scheme.table == "custom" else None
    return pq.quantize(values, scheme, table=table)


def floats(*shape: int, seed: int = 4, dtype: str = "float32") -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def split(q: Any) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]:
    """The leaves of floats by name, and what puts them back."""
    named = jax.tree_util.tree_flatten_with_path(q)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in named]
    leaves = dict(zip(names, (leaf for _, leaf in named), strict=True))
    learned = {k: v for k, v in leaves.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    def back(numbers: dict[str, Any]) -> Any:
        whole = leaves | numbers
        return jax.tree.unflatten(jax.tree.structure(q), [whole[name] for name in names])

    return learned, back


#: Op by op, which compiles each; the others under jit alone.
EAGERLY = ("u4/32:f32+bias:f32", "e2m1/16:ue4m3/tensor:f32")
#: What is differentiated: functions of a float operand and a weight.
RUNS: dict[str, Callable[[Any, Any], Any]] = {
    "right": lambda x, w: x @ w.mT,
    "left": lambda x, w: w @ x.mT,
    "decoded": lambda x, w: w.dequantize() * x[0],
    "vector": lambda x, w: w @ x[0],
    "linear": lambda x, w: pq.linear(x, w),
}
CASES = [(name, run) for name in SCHEMES for run in ("right", "decoded")]
CASES += [("u4/32:f32+bias:f32", run) for run in ("left", "vector", "linear")]


@needs("torch")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_gradients_are_those_of_torch(name: str, kind: str) -> None:
    import torch

    run, w, x = RUNS[kind], weight(name), floats(M, K)
    learned, back = split(w.to("jax"))
    there = w.to("torch:cpu")
    tracked = [torch.tensor(x), *(there.parts()[part] for part in learned)]
    for leaf in tracked:
        leaf.requires_grad_()
    out = run(tracked[0], there)
    factor = floats(*out.shape, seed=9)
    wanted = torch.autograd.grad((out * torch.tensor(factor)).sum(), tracked)

    def loss(x: Any, numbers: Any) -> Any:
        return (run(x, back(numbers)) * factor).sum()

    grad = jax.grad(loss, (0, 1))
    for derive in (jax.jit(grad), grad) if name in EAGERLY else (jax.jit(grad),):
        of_x, of_parts = derive(jnp.asarray(x), learned)
        for part, got, want in zip(
            ("x", *learned), (of_x, *map(of_parts.get, learned)), wanted, strict=True
        ):
            size = float(want.abs().max()) or 1.0
            # Sums of all values cancel more than those of blocks do.
            tolerance = 2e-3 if want.dtype == torch.float16 else 2e-5 if want.ndim > 1 else 5e-4
            error = np.abs(host(got).astype(np.float64) - host(want).astype(np.float64)).max()
            assert error <= tolerance * size, part


@pytest.mark.parametrize(
    ("name", "order"), [("q4s/8:f32", 2), ("u4/8:f32+bias:f32", 1), ("u3[custom]/8:f32", 1)]
)
def test_numerical_derivatives_forward_and_backward(name: str, order: int) -> None:
    learned, back = split(weight(name, (2, 16)).to("jax"))
    x = jnp.asarray(floats(3, 16)) / 6
    run = jax.jit(lambda x, n: pq.linear(x, back(n)))
    check_grads(run, (x, learned), order=order, eps=1e-2, rtol=2e-2)


def test_second_derivatives_are_those_of_the_formula() -> None:
    learned, back = split(weight("u4/8:f32+bias:f32", (2, 16)).to("jax"))
    x, codes = jnp.asarray(floats(3, 16)), back(learned).codes().astype("float32")

    def values(n: Any) -> Any:
        return codes * jnp.repeat(n["scales"], 8, 1) + jnp.repeat(n["offsets"], 8, 1)

    def bent(n: Any, decode: Any) -> Any:  # with "highest", since GPUs would take TF32
        return (jnp.tanh(jnp.matmul(x, decode(n).T, precision="highest") / 9) ** 2).sum()

    def curved(decode: Any) -> Any:
        return jax.jit(jax.hessian(lambda n: bent(n, decode)))(learned)

    got, wanted = curved(lambda n: back(n).dequantize()), curved(values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, wanted)
    got = jax.jit(jax.hessian(lambda n: (jnp.tanh(x @ back(n).T / 9) ** 2).sum()))(learned)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, wanted)


def test_gradients_come_in_the_dtypes_of_their_arrays() -> None:
    learned, back = split(weight("q4s/32:f16").to("jax"))
    for dtype in ("float16", "bfloat16", "float32"):
        x = jnp.asarray(floats(M, K)).astype(dtype)
        of_x, of_parts = jax.grad(lambda x, n: (x @ back(n).mT).sum(), (0, 1))(x, learned)
        assert (of_x.dtype, of_parts["scales"].dtype) == (dtype, "float16")
        assert (x @ back(learned).mT).dtype == dtype


def test_a_tensor_itself_is_differentiated_where_integers_may_be() -> None:
    q, x = weight("u4[nf4]/64:f32").to("jax"), jnp.asarray(floats(M, K))
    found = jax.grad(lambda q: (x @ q.mT).sum(), allow_int=True)(q)
    assert found.data.dtype == jax.dtypes.float0
    assert found.scales.shape == q.scales.shape and float(abs(found.table).max()) > 0


@pytest.mark.parametrize("name", ["q4s/32:f16", "u4[nf4]/64:f32", "e2m1/16:ue4m3/tensor:f32"])
def test_the_decoded_weight_is_not_kept_for_the_backward_pass(name: str) -> None:
    q, x = weight(name).to("jax"), jnp.asarray(floats(M, K))
    learned, back = split(q)
    for run in (lambda x, n: x @ back(n).mT, lambda x, n: pq.linear(x, back(n))):
        of_x = jax.vjp(lambda x, run=run: run(x, learned), x)[1]
        both = jax.vjp(run, x, learned)[1]
        for saved, allowed in ((of_x, q.nbytes), (both, q.nbytes + x.nbytes)):
            kept = [leaf for leaf in jax.tree.leaves(saved) if leaf.ndim > 1]
            assert sum(leaf.nbytes for leaf in kept) <= allowed
            assert not [leaf for leaf in kept if leaf.shape == (N, K)]


def test_zeros_have_derivatives_like_other_numbers() -> None:
    learned, back = split(weight("u4/32:f32+bias:f32", (4, 32)).to("jax"))
    zeros = jax.tree.map(jnp.zeros_like, learned)
    codes = back(learned).codes().astype("float32")
    found = jax.grad(lambda n: back(n).dequantize().sum())(zeros)
    np.testing.assert_array_equal(host(found["scales"])[:, 0], host(codes).sum(1))
    np.testing.assert_array_equal(host(found["offsets"]), np.full((4, 1), 32.0))


def test_quantizing_detaches() -> None:
    x = jnp.asarray(floats(4, 32))
    found = jax.grad(lambda x: pq.quantize(x, "q4s/32:f32").dequantize().sum() + x.sum())(x)
    np.testing.assert_array_equal(found, jnp.ones_like(x))
    learned, back = split(weight("q4s/32:f32", (4, 32)).to("jax"))
    found = jax.grad(lambda n: back(n).detach().dequantize().sum())(learned)
    assert not host(found["scales"]).any()


def test_activations_that_are_quantized_pass_the_gradient_by() -> None:
    q, x = weight("q8s/row:f32").to("jax"), jnp.asarray(floats(M, K))
    learned, back = split(q)
    factor = jnp.asarray(floats(M, N, seed=6))

    def loss(x: Any, n: Any) -> Any:
        return (pq.linear(x, back(n), activations="q8s/row:f32") * factor).sum()

    of_x, of_parts = jax.grad(loss, (0, 1))(x, learned)
    through = host(factor) @ host(q.dequantize())
    np.testing.assert_allclose(of_x, through, rtol=1e-5, atol=1e-5)
    entered = pq.quantize(x, "q8s/row:f32").dequantize()
    wanted = jax.grad(lambda n: ((entered @ back(n).mT) * factor).sum())(learned)
    np.testing.assert_allclose(of_parts["scales"], wanted["scales"], rtol=1e-5, atol=1e-4)
