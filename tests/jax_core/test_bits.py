"""Under jit XLA fuses and contracts; the bits stay those of NumPy, for every preset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import assert_same_bits, assert_same_parts, host

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

#: Odd ones; more are in test_standard.
SHAPES = ((5,), (129, 7), (2, 3, 31))
#: Products and sums that would be contracted into one rounding, were nothing between them.
CONTRACTED = ("u4/32:f32+bias:f32", "u8/16:f32+bias:f32", "u4[nf4]/32:f32+bias:f32")
KINDS = ("float32", "bfloat16")


def awkward(shape: tuple[int, ...], scheme: pq.QuantScheme, seed: int) -> Any:
    """Numbers of every magnitude, zeros of both signs and subnormal numbers among them."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * np.ldexp(1.0, rng.integers(-40, 40, shape))
    flat = values.reshape(-1)
    flat[::7], flat[3::11], flat[5::13] = 0.0, -0.0, 1e-40
    signed = scheme.value.is_signed or scheme.mode is not pq.QuantMode.SYMMETRIC
    return (values if signed else np.abs(values)).astype(np.float32)


@pytest.mark.parametrize("name", [*pq.presets(), *CONTRACTED])
@pytest.mark.filterwarnings("ignore::polyquant.errors.DeadBlocksWarning")
def test_quantize_and_dequantize_under_jit(name: str) -> None:
    scheme = pq.scheme(name)
    fitting = [s for s in SHAPES if scheme.block is None or len(scheme.block) <= len(s)]
    inputs = [awkward(shape, scheme, seed) for seed, shape in enumerate(fitting)]

    @jax.jit
    def everything(inputs: list[Any]) -> Any:
        made = [pq.quantize(x, scheme) for x in inputs]
        return made, [[q.dequantize(kind) for kind in KINDS] for q in made]

    made, values = everything([jnp.asarray(x) for x in inputs])
    for x, q, decoded in zip(inputs, made, values, strict=True):
        wanted = pq.quantize(x, scheme)
        assert_same_parts(q, wanted)
        for kind, got in zip(KINDS, decoded, strict=True):
            assert_same_bits(host(got), wanted.dequantize(kind), f"{name} {x.shape} {kind}")


def test_many_random_numbers_under_jit_and_vmap() -> None:
    """Enough that one product in a million which rounded otherwise would show."""
    x = np.random.default_rng(5).normal(size=(64, 128, 128)).astype(np.float32)
    for name in ("q8s/32:f32", "u8/16:f32+bias:f32", "nvfp4"):
        wanted = pq.quantize(x, name)
        got = jax.jit(lambda x, s=name: pq.quantize(x, s))(x)
        assert_same_parts(got, wanted)
        assert_same_bits(host(jax.jit(lambda q: q.dequantize())(got)), wanted.dequantize(), name)
        each = jax.jit(jax.vmap(lambda x, s=name: pq.quantize(x, s).dequantize()))(x)
        one = pq.quantize(x[17], name).dequantize()
        assert_same_bits(host(each[17]), one, f"{name} under vmap")
