"""A QTensor as a pytree: what is static, what follows from the leaves, what passes through."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import host

jax = pytest.importorskip("jax", reason="jax is not installed")

#: Where JAX puts what has no device.
HERE = pq.device_of(jax.numpy.zeros(()))
SCHEMES = (
    *pq.presets(),
    "q3f/4x8:ue8m0",
    "q5s/row:bf16@native",
    "q8s/tensor:f32",
    "u3[custom]/16:bf16",
    "u4/32:(u6/8:f16)+bias:(q6s/8:f16)",
    "u4[nf4]/64:f32~flat",
)


def make(name: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    scheme = pq.scheme(name)
    values = np.abs(np.random.default_rng(seed).normal(size=shape)).astype(np.float32)
    table = np.linspace(-1, 1, 2**scheme.bits) if scheme.table == "custom" else None
    return pq.quantize(values, scheme, table=table).to("jax")


def stacked(*tensors: Any) -> Any:
    return jax.tree.map(lambda *parts: jax.numpy.stack(parts), *tensors)


@pytest.mark.parametrize("name", SCHEMES)
def test_leaves_and_structure_make_the_tensor_again(name: str) -> None:
    few = [(), (7,)] if pq.scheme(name).block is None else []
    for shape in (*few, (3, 70), (4, 2, 64), (5, 0)):
        q = make(name, shape)
        for t in (q, q.T):
            leaves, structure = jax.tree.flatten(t)
            again = jax.tree.unflatten(structure, leaves)
            assert (again.shape, again.axes, again.device) == (t.shape, t.axes, HERE)
            assert again.to_data() == t.to_data()
            assert [host(leaf).tobytes() for leaf in leaves] == [
                host(part).tobytes() for part in t.parts().values()
            ]


@pytest.mark.parametrize("name", SCHEMES)
def test_shape_follows_from_the_leaves(name: str) -> None:
    """A stack has one structure with the tensors in it, and each comes out of it again."""
    q = make(name, (6, 70))
    for t in (q, q.T):
        three = stacked(t, t, t)
        assert three.shape == (3, *t.shape)
        assert jax.tree.structure(three) == jax.tree.structure(t)
        assert jax.tree.map(lambda leaf: leaf[1], three).to_data() == t.to_data()
        shapes = jax.eval_shape(lambda a: a, three)
        assert shapes.shape == three.shape


def test_leaves_have_the_names_of_the_stored_arrays() -> None:
    for name in ("nvfp4", "u4/32:(u6/8:f16)+bias:(q6s/8:f16)"):
        q = make(name, (4, 64))
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(q)[0]]
        found = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
        assert found == list(q.parts())


@pytest.mark.parametrize("mark", [None, 7, object(), "text", ()])
def test_placeholders_pass_and_are_shown(mark: Any) -> None:
    for name in ("nf4", "nvfp4"):
        q = make(name, (3, 70)).T
        holed = jax.tree.map(lambda _: mark, q)
        assert holed.shape == q.shape
        assert "shape=(70, 3)" in repr(holed)
        assert "QTensor" in repr(jax.tree.structure(q))
        leaves = jax.tree.leaves(q)
        put_back = jax.tree.unflatten(jax.tree.structure(q), leaves)
        assert put_back.to_data() == q.to_data()


def test_structures_are_equal_exactly_where_one_trace_serves() -> None:
    structure = jax.tree.structure
    q = make("q4s/32:f16", (4, 64))
    assert structure(q) == structure(make("q4s/32:f16", (4, 64), seed=1))
    assert hash(structure(q)) == hash(structure(make("q4s/32:f16", (4, 64), seed=1)))
    assert structure(q) == structure(q.to("numpy"))  # where it is does not count
    assert structure(q) != structure(q.T)
    assert structure(q) != structure(make("q4f/32:f16", (4, 64)))
    assert structure(q) != structure(make("q4s/32:f16", (4, 61)))


def test_the_device_is_that_of_the_leaves() -> None:
    q = make("nf4", (3, 70)).to("numpy")
    moved = jax.device_put(q)
    assert (q.device, moved.device) == ("numpy", HERE)
    assert jax.device_get(moved).device == "numpy"
    assert jax.device_get(moved).to_data() == q.to_data()


def test_jax_may_have_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with JAX_PLATFORMS=cuda: there is the default platform alone."""
    devices = jax.devices()

    def found(platform: str | None = None) -> Any:
        if platform == "cpu":
            raise RuntimeError("Unknown backend cpu. Available backends are ['cuda']")
        return devices

    monkeypatch.setattr(jax, "devices", found)
    q = make("nf4", (4, 64))
    assert q.to("numpy").to("jax").to_data() == q.to_data()


def test_leaves_that_jax_wraps_are_its_arrays() -> None:
    """custom_jvp and custom_vjp hand over NumPy's arrays in a class of JAX's own."""
    q, x = make("nf4", (4, 64)), jax.numpy.ones((2, 64))
    seen = []

    @jax.custom_jvp
    def run(x: Any, q: Any) -> Any:
        seen.append(q)
        return x @ q.mT

    run.defjvp(lambda primals, changes: (run(*primals), changes[0] @ primals[1].mT))
    np.testing.assert_allclose(run(x, q.to("numpy")), x @ q.mT, rtol=1e-6)
    passed = jax.grad(lambda x: run(x, q.to("numpy")).sum())(x)
    wanted = np.ones((2, 4), np.float32) @ np.asarray(q.dequantize())
    np.testing.assert_allclose(passed, wanted, rtol=1e-5)
    assert all(isinstance(each.table, jax.Array) for each in seen)


#: Everything that reads what is stored. (The last two say so by themselves.)
USES: dict[str, Callable[[Any], Any]] = {
    "decode": lambda q: q.dequantize(),
    "codes": lambda q: q.codes(),
    "view": lambda q: q[1:],
    "transpose": lambda q: q.T,
    "join": lambda q: pq.concat([q, q]),
    "compute": lambda q: pq.ops.sum(q),
    "operator": lambda q: q + 1.0,
    "rows": lambda q: pq.ops.embedding(np.zeros(2, np.int32), q),
    "product": lambda q: q @ jax.numpy.ones(q.shape[-1]),
    "product of the host's": lambda q: q @ np.ones(q.shape[-1], np.float32),
    "linear": lambda q: pq.linear(jax.numpy.ones((2, q.shape[-1])), q),
    "pickle": pickle.dumps,
    "detach": lambda q: q.detach(),
    "move": lambda q: q.to("torch:cpu"),
    "bytes": lambda q: q.to_data(),
}
#: What a function over the leaves may make of a tensor.
WRONG: dict[str, Callable[[Any], Any]] = {
    "rows of the codes alone": lambda part: part[:2] if part.dtype == np.uint8 else part,
    "columns of scales": lambda part: part if part.dtype == np.uint8 else part[..., :1],
    "floats": lambda part: part.astype(np.float32),
    "one more axis": lambda part: part[..., None],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("what", WRONG)
def test_leaves_that_make_no_tensor_are_refused_at_every_first_use(what: str, use: str) -> None:
    q = make("q4s/32:f32", (4, 96))
    for given in (q.to("numpy"), q):
        if given is q and use == "product of the host's":
            continue
        if given is not q and use in ("product", "linear"):
            continue
        wrong = jax.tree.map(WRONG[what], given)
        assert "QTensor" in repr(wrong)
        with pytest.raises(pq.errors.InvalidTensor):
            USES[use](wrong)
        jax.tree.map(lambda part: part, wrong)  # a container of arrays may hold anything


def test_what_was_put_together_again_travels_like_what_was_made() -> None:
    for name in ("nf4", "q4s/32:f16"):
        q = make(name, (4, 64))
        for again in (jax.tree.map(lambda part: part, q), jax.device_get(q)):
            assert pickle.loads(pickle.dumps(again)).to_data() == q.to_data()
            assert copy.deepcopy(again).to_data() == q.to_data()
        two = stacked(q, q)
        assert jax.tree.map(lambda part: part[1], pickle.loads(pickle.dumps(two))).codes().any()
