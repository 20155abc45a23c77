"""Weights over eight devices of a mesh with explicit axes, JAX's default; see test_eight.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyquant as pq
import polyquant.jax as pqj
from devices import assert_same_bits, assert_same_parts, host
from polyquant.jax.explicit import auto_axes

if auto_axes is None:
    pytest.skip("this JAX has no jax.sharding.auto_axes", allow_module_level=True)

SCHEMES = (
    "q8s/row:f32",
    "q4s/32:f16",
    "nf4",
    "nvfp4",
    "u4/32:f16+bias:f16",
    "u4[nf4]/16:(u8[dynamic8u]/4:f32)",
)
OUT, IN, BATCH = 64, 512, 6
BY_OUTPUTS, BY_INPUTS = P("model"), P(None, "model")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((8,), ("model",), axis_types=(AxisType.Explicit,))


@pytest.fixture(params=[False, True], ids=["", "set_mesh"])
def context(request: pytest.FixtureRequest, mesh: Mesh) -> Iterator[bool]:
    with jax.set_mesh(mesh) if request.param else contextlib.nullcontext():
        yield request.param


def floats(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def spec_of(array: Any) -> P:
    """How its type says that an array is split."""
    return jax.typeof(array).sharding.spec


@pytest.mark.parametrize("scheme", SCHEMES)
def test_types_of_results_follow_from_those_of_operands(
    scheme: str, mesh: Mesh, context: bool
) -> None:
    q, x = pq.quantize(floats(OUT, IN), scheme), floats(BATCH, IN)
    for spec, of_x in ((BY_OUTPUTS, P()), (BY_INPUTS, BY_INPUTS), (BY_INPUTS, P())):
        weight = pqj.shard(q, NamedSharding(mesh, spec))
        rows = jax.device_put(x, NamedSharding(mesh, of_x))
        assert weight.to_data() == q.to_data()
        for run in (lambda f: f, jax.jit):
            decoded = run(lambda q: q.dequantize())(weight)
            assert_same_bits(host(decoded), q.dequantize(), scheme)
            assert spec_of(decoded) == P(*spec, *(None,) * (2 - len(spec)))
            turned = run(lambda q: q.T.dequantize())(weight)
            assert spec_of(turned) == P(*reversed(spec_of(decoded)))
            made = run(lambda x, q: x @ q.T)(rows, weight)
            assert spec_of(made) == (P(None, "model") if spec == BY_OUTPUTS else P(None, None))
            np.testing.assert_allclose(made, x @ q.T, rtol=1e-4, atol=1e-3)
            one = run(lambda x, q: q @ x[0])(rows, weight)
            assert spec_of(one) == P("model" if spec == BY_OUTPUTS else None)


@pytest.mark.parametrize("spec", [BY_OUTPUTS, BY_INPUTS], ids=str)
def test_nothing_is_gathered(spec: P, mesh: Mesh) -> None:
    q = pqj.shard(pq.quantize(floats(OUT, IN), "nf4"), NamedSharding(mesh, spec))
    x = jax.device_put(floats(BATCH, IN), NamedSharding(mesh, P(None, *spec[1:])))
    text = jax.jit(lambda x, q: x @ q.T).lower(x, q).compile().as_text()
    assert "all-gather" not in text
    assert ("all-reduce" in text) == (spec == BY_INPUTS)


@pytest.mark.parametrize("scheme", [*SCHEMES, "u4/32:f16-zero:u4", "u3[custom]/16:f32"])
def test_quantizing_gives_the_bits_and_the_split_of_its_input(
    scheme: str, mesh: Mesh, context: bool
) -> None:
    x = floats(OUT, IN)
    table = np.linspace(-1, 1, 8, dtype=np.float32) if "custom" in scheme else None
    wanted = pq.quantize(x, scheme, table=table)
    there = jax.device_put(x, NamedSharding(mesh, BY_OUTPUTS))
    for run in (lambda f: f, jax.jit):
        made = run(lambda x: pq.quantize(x, scheme, table=table))(there)
        assert_same_parts(made, wanted)
        assert spec_of(made.data) == P("model", None)
    with pytest.raises(pq.errors.ShardingRefused, match="inside a block"):
        pq.quantize(jax.device_put(x[:, :64], NamedSharding(mesh, BY_INPUTS)), "q4s/32:f16")


def test_derivatives_scans_and_rows(mesh: Mesh) -> None:
    q = pq.quantize(floats(OUT, IN), "q4s/32:f32")
    x = floats(BATCH, IN)
    with jax.set_mesh(mesh):
        weight = pqj.shard(q, NamedSharding(mesh, BY_OUTPUTS))
        rows = jax.device_put(x, NamedSharding(mesh, P()))
        of_x, of_q = jax.jit(jax.grad(lambda x, q: (x @ q.T).sum(), (0, 1), allow_int=True))(
            rows, weight
        )
        assert spec_of(of_x) == P(None, None) and spec_of(of_q.scales) == P("model", None)
        np.testing.assert_allclose(of_x[0], q.dequantize().sum(0), rtol=1e-4, atol=1e-3)
        sums = x.sum(0).reshape(-1, 32) * np.ones((OUT, 1, 1), np.float32)
        codes = q.codes().astype(np.float32).reshape(OUT, -1, 32)
        np.testing.assert_allclose(of_q.scales, (sums * codes).sum(-1), rtol=1e-4, atol=1e-2)

        def body(x: Any, q: Any) -> Any:
            return jnp.tanh(x @ q.T) @ q, None

        two = pqj.stack([weight, weight])
        done = jax.jit(lambda x, s: jax.lax.scan(body, x, s)[0])(rows, two)
        plain = x
        for _ in range(2):
            plain = np.tanh(plain @ q.dequantize().T) @ q.dequantize()
        np.testing.assert_allclose(done, plain, rtol=1e-3, atol=1e-2)
        assert spec_of(two.dequantize()) == P(None, "model", None)
        mapped = jax.vmap(lambda x, q: x @ q.T, (None, 0))(rows, two)
        assert spec_of(mapped) == P(None, None, "model")

        ids = jax.device_put(np.asarray([3, 63]), NamedSharding(mesh, P()))
        taken = pq.ops.embedding(ids, weight)
        assert spec_of(taken) == P(None, None)
        assert_same_bits(host(taken), q.dequantize()[[3, 63]])
        bent = jax.jit(jax.grad(lambda x: pqj.fake_quantize(x, "q4s/32:f32").sum()))(
            jax.device_put(floats(OUT, IN), NamedSharding(mesh, BY_OUTPUTS))
        )
        assert spec_of(bent) == P("model", None) and (host(bent) == 1).all()
        moved = jax.jit(lambda q: pqj.shard(q, NamedSharding(mesh, BY_INPUTS)))(weight)
        assert moved.to_data() == q.to_data() and spec_of(moved.data) == P(None, "model")
        everywhere = q.to("jax:cpu:0-7")
        assert spec_of(rows @ everywhere.T) == P(None, None)


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("is_stack", [False, True])
def test_types_that_give_a_shard_another_devices_scales_are_refused(
    is_traced: bool, is_stack: bool
) -> None:
    """In shard_map alone, which takes what each device has: elsewhere JAX moves what it must."""
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds, devices=jax.devices()[:4])
    q = pq.quantize(floats(64, 64), "q4s/8:f16")

    def placed(part: Any, axis: str) -> Any:
        part, spec = (part[None], P(None, axis)) if is_stack else (part, P(axis))
        return jax.device_put(part, NamedSharding(mesh, spec))

    split = jax.tree.unflatten(jax.tree.structure(q), [placed(q.data, "a"), placed(q.scales, "b")])
    use = jax.shard_map(lambda w: w.dequantize(), mesh=mesh, out_specs=P(), check_vma=False)
    with pytest.raises(pq.errors.InvalidTensor, match=r"scales of .* split .* as its codes are"):
        (jax.jit(use) if is_traced else use)(split)
    if not is_stack:
        assert_same_bits(jax.jit(lambda w: w.dequantize())(split), q.dequantize())
