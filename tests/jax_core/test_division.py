"""Quotients by integers, as they are taken off the CPU, against those of the CPU: bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import assert_same_bits, assert_same_parts, host
from polyquant import arrays, conform, dispatch
from polyquant.arithmetic import divide

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

from polyquant.backends.jax import accelerators, division  # noqa: E402

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is about JAX's CPU")
TINY = np.finfo(np.float32).tiny
_compiled = jax.jit(division.quotient)


def check(a: Any, b: Any) -> None:
    """NumPy's quotient of the same numbers, of which subnormal ones count as zeros."""
    a, b = (np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x) for x in (a, b))
    with np.errstate(all="ignore"):
        wanted = a / b
    assert_same_bits(host(_compiled(a, b)), wanted)


def test_random_bits_and_every_pair_of_special_numbers() -> None:
    rng = np.random.default_rng(0)
    check(*(rng.integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32) for _ in range(2)))
    special = [0.0, np.inf, np.nan, 1.0, 3.0, 127.0, 127.5, 448.0, TINY, 1.5 * TINY, 2.0**-24]
    special += [np.finfo(np.float32).max, 1e-40, 2.0**127, 2.0**126, 1 - 2.0**-24, 1 + 2.0**-23]
    both = np.asarray([*special, *(-x for x in special)], np.float32)
    check(*(x.ravel() for x in np.meshgrid(both, both)))


def test_quotients_about_the_smallest_normal_number_round_as_they_should() -> None:
    rng = np.random.default_rng(1)
    a = np.ldexp(rng.uniform(1, 2, 500_000), rng.integers(-126, -100, 500_000))
    b = np.ldexp(rng.uniform(1, 2, 500_000), rng.integers(-10, 40, 500_000))
    check(a.astype(np.float32), b.astype(np.float32))
    check((1 / a).astype(np.float32), (1 / b).astype(np.float32))  # and about the largest


def test_every_significand_over_the_divisors_of_the_schemes() -> None:
    some = np.arange(1 << 23, 1 << 24, 61, dtype=np.uint32).astype(np.float32)
    for divisor in (6.0, 7.0, 7.5, 15.0, 28.0, 127.0, 127.5, 255.0, 448.0):
        check(some, np.full_like(some, divisor))
    check(np.ones_like(some), some)


def test_the_correction_matters() -> None:
    """A quotient that is off by a unit in the last place is another: the check can fail."""
    a, b = np.float32([1.0, 5.0]), np.float32([3.0, 7.0])
    near = np.nextafter(a / b, np.float32(2))
    with pytest.raises(AssertionError):
        assert_same_bits(host(_compiled(a, b)), near)


def test_which_way_is_compiled_for_which_platform() -> None:
    run = jax.jit(lambda a: divide(a, 3.0))
    for platform, by_integers in (("cpu", False), ("cuda", True), ("tpu", True)):
        exported = jax.export.export(run, platforms=[platform])(jnp.ones(8))
        text = exported.mlir_module()
        assert ("ui32" in text, "stablehlo.divide" in text) == (by_integers, True)
        floats = [line for line in text.splitlines() if "stablehlo.divide" in line]
        assert all(("ui32" in line) is by_integers for line in floats)


@on_cpu
def test_products_ask_for_full_precision() -> None:
    x, q = jnp.ones((2, 32)), pq.quantize(jnp.ones((4, 32)), "q4s")
    run = jax.jit(jax.grad(lambda x: (x @ q.T).sum()))
    traced = jax.jit(lambda x: (x @ q.T, run(x))).trace(x)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) >= 2 and all("HIGHEST, HIGHEST" in line for line in products)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", ["nf4", "q8s/2x16:f16", "u4/32:f16+bias:f16"])
def test_products_in_the_dtype_of_their_rows_keep_its_bound(scheme: str, kind: str) -> None:
    rng, run = np.random.default_rng(4), accelerators.KERNELS[0].run
    q = pq.quantize(rng.normal(size=(40, 96)).astype(np.float32), scheme).to("jax")
    x, values = jnp.asarray(rng.normal(size=(5, 96)), kind), np.asarray(q.dequantize(), np.float64)
    rows = np.asarray(x, np.float64)
    for left, right, a, b in ((x, q.mT, rows, values.T), (q, x.T, values, rows.T)):
        y = host(run(left, right, jnp.dtype(kind)))
        assert not conform.product_error(y, a, b, kind, kind)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """JAX's CPU dressed as an accelerator that conforms: integers divide, as there."""
    monkeypatch.setattr(accelerators, "CONFORMING", frozenset({"cpu"}))
    kernels = {"cpu": ("polyquant.backends.jax.accelerators",)}
    owner = arrays.backend("jax")
    quotient = {"quotient": lambda a, b: division.quotient(a, a * 0.0 + b)}
    monkeypatch.setitem(vars(owner), "functions", {**owner.functions, **quotient})
    monkeypatch.setitem(vars(owner), "kernels", kernels)
    for cache in (dispatch.kernels, dispatch.choose):
        cache.cache_clear()
    yield
    for cache in (dispatch.kernels, dispatch.choose):
        cache.cache_clear()


@on_cpu
@pytest.mark.parametrize("scheme", ["q8s/32:f32", "nvfp4", "nf4", "u4/32:f32+bias:f32", "mxfp4"])
def test_quantizing_by_integer_quotients_gives_the_same_bits(scheme: str, elsewhere: Any) -> None:
    x = np.random.default_rng(2).normal(size=(6, 70)).astype(np.float32)
    x *= np.ldexp(np.float32(1), np.random.default_rng(3).integers(-90, 90, x.shape))
    got = jax.jit(lambda x: pq.quantize(x, scheme))(x)
    assert_same_parts(got, pq.quantize(x, scheme))
    assert_same_bits(host(got.dequantize()), pq.quantize(x, scheme).dequantize())


def test_what_is_not_proven_is_refused_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = next(k for k in accelerators.KERNELS if k.op == "quantize")
    on_gpu, on_tpu = (
        dispatch.one_operand_problem("quantize", jnp.ones(32), f"jax:{kind}:0")
        for kind in ("gpu", "tpu")
    )
    assert kernel.why_not(on_gpu) is None
    assert "has not passed with XLA on tpu" in str(kernel.why_not(on_tpu))
    monkeypatch.setattr(accelerators, "CONFORMING", frozenset({"tpu"}))
    assert kernel.why_not(on_tpu) is None and kernel.why_not(on_gpu) is not None
