"""The definition: the same bits on every library, and the bits that the contract asks for."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import oracle
import polyquant as pq
from devices import (
    DEVICES,
    assert_same_bits,
    assert_same_parts,
    host,
    host_parts,
    needs,
    put,
)
from polyquant.arrays import namespace
from strategies import TORCH_LAYOUTS, Case, cases, host_dtype, lay_out, lay_out_torch, share

HAS_JAX = any(device.startswith("jax") for device in DEVICES)
DTYPES = ("float16", "bfloat16", "float32", "float64")

# Awkward values are too small for some scale types, and are meant to be.
pytestmark = pytest.mark.filterwarnings("ignore::polyquant.errors.DeadBlocksWarning")


def custom_table(scheme: pq.QuantScheme) -> Any:
    return np.linspace(-1.5, 2, 2**scheme.bits) if scheme.table == "custom" else None


# -- every library, the same bits -------------------------------------------------------------


@pytest.mark.parametrize("library", [d for d in DEVICES if not d.startswith(("numpy", "jax"))])
@settings(max_examples=share(1.0))
@given(case=cases())
def test_libraries_agree_bit_for_bit(library: str, case: Case) -> None:
    wanted = pq.quantize(lay_out(case.values, case.layout), case.scheme, table=case.table)
    there = _on(library, case)
    got = pq.quantize(there, case.scheme, table=case.table)
    assert_same_parts(got, wanted)
    for dtype in DTYPES:
        if hasattr(namespace(there), dtype):
            assert_same_bits(host(got.dequantize(dtype)), wanted.dequantize(dtype), dtype)
    assert_same_bits(host(got.codes()), wanted.codes(), "codes")


def _on(device: str, case: Case) -> Any:
    if device.startswith("torch") and case.layout in TORCH_LAYOUTS:
        return lay_out_torch(case.values, case.layout).to(device.partition(":")[2])
    return put(lay_out(case.values, case.layout), device)


@settings(max_examples=share(0.25))
@given(case=cases(limit=700))
def test_layouts_and_widening_do_not_matter(case: Case) -> None:
    wanted = pq.quantize(case.values.astype(np.float32), case.scheme, table=case.table)
    got = pq.quantize(lay_out(case.values, case.layout), case.scheme, table=case.table)
    assert_same_parts(got, wanted)


# -- JAX, eager and under jit -----------------------------------------------------------------

#: Shapes that jax compiles for: one with short blocks and one of whole ones.
JAX_SHAPES = ((3, 70), (4, 2, 64))


@cache
def jitted(scheme: pq.QuantScheme) -> Any:
    """Quantize and dequantize under one jit: (parts by name, values)."""
    import jax

    def both(x: Any, table: Any) -> Any:
        q = pq.quantize(x, scheme, table=table)
        return q.parts(), q.dequantize()

    return jax.jit(both)


def under_jit(values: Any, scheme: pq.QuantScheme, table: Any = None) -> Any:
    import jax.numpy as jnp

    table = None if table is None else jnp.asarray(table, dtype=jnp.float32)
    return jitted(scheme)(put(values, "jax"), table)


def assert_jit_agrees(values: Any, scheme: pq.QuantScheme, table: Any = None) -> None:
    wanted = pq.quantize(values, scheme, table=table)
    parts, back = under_jit(values, scheme, table)
    for name, part in host_parts(wanted).items():
        assert_same_bits(host(parts[name]), part, f"{scheme} {name} under jit")
    assert_same_bits(host(back), wanted.dequantize(), f"{scheme} values under jit")


def nasty(shape: tuple[int, ...], dtype: str, seed: int, scheme: pq.QuantScheme) -> Any:
    """Random numbers of every magnitude, with zero and constant blocks among them."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * np.ldexp(1.0, rng.integers(-8, 8, shape))
    flat = values.reshape(-1)
    flat[: flat.size // 8] = 0.0
    flat[flat.size // 8 : flat.size // 6] = -0.0
    if dtype in ("float32", "bfloat16"):
        flat[flat.size // 2 :] *= np.ldexp(1.0, rng.integers(-132, 110, flat.size - flat.size // 2))
    if scheme.mode is pq.QuantMode.SYMMETRIC and not scheme.value.is_signed:
        values = np.abs(values)
    return values.astype(host_dtype(dtype))


MORE = (
    "q8s/tensor:f32",
    "q3f/4x8:ue8m0",
    "q5s/row:bf16@native",
    "q6f/16:ue4m3/tensor:f32@packed_native",
    "u6/16:f16+bias:f16",
    "u4/32:f32+bias:f32",
    "u4/32:f16-zero:u4",
    "u3/32:f16-zero:f16",
    "u8/row:f32",
    "u3[custom]/16:bf16",
    "u4/32:(u6/8:f16)+bias:(q6s/8:f16)",
)


@needs("jax")
@pytest.mark.parametrize("name", [*pq.presets(), *MORE])
def test_jax_agrees_under_jit(name: str) -> None:
    scheme = pq.scheme(name)
    for dtype in ("float32", "bfloat16"):
        for seed in range(3):
            values = nasty(JAX_SHAPES[0], dtype, seed, scheme)
            assert_jit_agrees(values, scheme, custom_table(scheme))


@needs("jax")
@pytest.mark.parametrize("name", ["q3f/4x8:ue8m0", "u4/32:f32+bias:f32"])  # more in test_kernels
def test_jax_agrees_eagerly(name: str) -> None:
    scheme = pq.scheme(name)
    values, table = nasty(JAX_SHAPES[0], "float32", 7, scheme), custom_table(scheme)
    wanted = pq.quantize(values, scheme, table=table)
    got = pq.quantize(put(values, "jax"), scheme, table=table)
    assert_same_parts(got, wanted)
    assert_same_bits(host(got.dequantize()), wanted.dequantize(), "values")


@needs("jax")
@settings(max_examples=share(0.05, nightly=1.0))  # each compiles anew: 2 s an example
@given(case=cases(limit=400))
def test_jax_agrees_on_random_schemes(case: Case) -> None:
    values = lay_out(case.values, case.layout)
    if values.dtype == np.float64:  # JAX has none unless told to
        values = values.astype(np.float32)
    wanted = pq.quantize(values, case.scheme, table=case.table)
    got = pq.quantize(put(values, "jax"), case.scheme, table=case.table)
    assert_same_parts(got, wanted)
    assert_same_bits(host(got.dequantize()), wanted.dequantize(), "values")
    assert_jit_agrees(values, case.scheme, case.table)
    _forget_compiled()


def _forget_compiled() -> None:
    """What jax compiled for random cases serves few others, and in the end fills the memory."""
    import jax

    if jitted.cache_info().currsize > 40:
        jitted.cache_clear()
        jax.clear_caches()


# -- the page itself --------------------------------------------------------------------------


def assert_oracle_agrees(values: Any, scheme: pq.QuantScheme, table: Any = None) -> None:
    wanted = oracle.quantize(values, scheme, table)
    got = pq.quantize(values, scheme, table=table)
    assert_parts_of(got, wanted, str(scheme))
    assert_same_bits(got.dequantize(), wanted.values, f"{scheme} values")


def assert_parts_of(got: pq.QTensor, wanted: oracle.Oracle, where: str) -> None:
    mask = 2**got.scheme.bits - 1
    codes = (got.codes().astype(np.int16) & mask).astype(np.uint8)
    assert_same_bits(codes, wanted.codes, f"{where} codes")
    for name in ("scales", "offsets"):
        part, asked = getattr(got, name), getattr(wanted, name)
        if isinstance(part, pq.QTensor):
            assert_parts_of(part, asked, f"{where} {name}")
        elif part is not None:
            assert_same_bits(part, asked, f"{where} {name}")
    if got.tensor_scale is not None:
        assert got.tensor_scale == wanted.tensor_scale


@settings(max_examples=share(1.0))
@given(case=cases(limit=200))
def test_every_scheme_follows_the_page(case: Case) -> None:
    assert_oracle_agrees(case.values, case.scheme, case.table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*pq.presets(), *MORE])
def test_presets_follow_the_page(name: str, dtype: str) -> None:
    scheme = pq.scheme(name)
    assert_oracle_agrees(nasty((3, 70), dtype, 1, scheme), scheme, custom_table(scheme))


# -- lookups at their edges -------------------------------------------------------------------

#: (table, values in one block): a middle at zero with products below float32's normal numbers,
#: middles that are subnormal themselves, and equal entries, of which the lowest code counts.
EDGES = (
    ([-1.0, 1.0], [1e30, 1e-10, -1e-10, 2e-9]),
    ([0.0, 1.2e-38, -1.2e-38, 3.0], [3.0, 1.2e-38, -1.2e-38, 0.0]),
    ([2.0, -1.0, 0.0, 2.0], [2.0, 1.9, 1.1, -1.0]),
    ([2.0, 1.0, 1.0, 1.0, -0.0, 0.0, 1.0, 0.5], [2.0, 1.2, 0.9, 0.1]),
)


@pytest.mark.parametrize(("table", "values"), EDGES)
def test_lookups_at_their_edges(device: str, table: list[float], values: list[float]) -> None:
    x = np.asarray(values, np.float32)
    scheme = pq.scheme(f"u{len(table).bit_length() - 1}[custom]/4:f32")
    entries = np.asarray(table, np.float32)
    wanted = oracle.quantize(x, scheme, entries)
    got = pq.quantize(put(x, device), scheme, table=entries)
    assert_same_bits(host(got.codes()), wanted.codes, "codes")
    assert_same_bits(host(got.dequantize()), wanted.values, "values")
    if HAS_JAX and device.startswith("jax"):
        parts, back = under_jit(x, scheme, entries)
        assert_same_bits(host(parts["data"]), host(got.data), "codes under jit")
        assert_same_bits(host(back), wanted.values, "values under jit")
