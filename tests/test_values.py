"""Value types and scale types against other tools: ml_dtypes' numbers and casts, brute force."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import polyquant as pq
from polyquant import standard
from polyquant.tables import NAMED, named_table, steps
from polyquant.values import decode_table, grid, scale_grid, thresholds

MINIFLOATS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def around(numbers: Any) -> Any:
    """The numbers, the float32 just below and above each, and all of these negated."""
    numbers = np.asarray(numbers, np.float32)
    low, high = np.float32(-np.inf), np.float32(np.inf)
    near = np.concatenate([numbers, np.nextafter(numbers, low), np.nextafter(numbers, high)])
    return np.concatenate([near, -near])


@pytest.mark.parametrize("name", MINIFLOATS)
def test_every_minifloat_code_is_what_ml_dtypes_says(name: str) -> None:
    value = pq.QuantValue(name)
    codes = np.arange(2**value.bits, dtype=np.uint8)
    wanted = codes.view(MINIFLOATS[name]).astype(np.float32)
    got = decode_table(value)
    np.testing.assert_array_equal(got, wanted)
    finite = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(wanted[finite]))


@pytest.mark.parametrize("name", MINIFLOATS)
def test_minifloats_round_as_ml_dtypes_casts(name: str) -> None:
    """Every midpoint, every number and their neighbours, each in a block of its own scale 1."""
    value = pq.QuantValue(name)
    numbers = grid(value).astype(np.float64)
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = around(np.concatenate([numbers, middles]).astype(np.float32))
    x = x[np.abs(x) <= numbers[-1]]
    x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)
    q = pq.quantize(x, f"{name}/tensor:f32", scales=1.0)
    wanted = x.astype(MINIFLOATS[name])
    np.testing.assert_array_equal(q.codes(), wanted.view(np.uint8))


@pytest.mark.parametrize("name", MINIFLOATS)
def test_minifloats_saturate(name: str) -> None:
    top = pq.QuantValue(name).range[1]
    x = np.asarray([top * 1.01, -top * 4, 1e30, -1e30], np.float32)
    back = pq.quantize(x, f"{name}/tensor:f32", scales=1.0).dequantize()
    np.testing.assert_array_equal(back, [top, -top, top, -top])


@pytest.mark.parametrize("name", MINIFLOATS)
def test_thresholds_ascend_one_for_each_step(name: str) -> None:
    edges = thresholds(pq.QuantValue(name))
    assert len(edges) == len(grid(pq.QuantValue(name))) - 1
    assert (np.diff(edges) > 0).all()


def test_ranges() -> None:
    """The table of the numerical contract's section 1."""
    wanted = {
        "q8f": (-128, 127),
        "q8s": (-127, 127),
        "q5f": (-16, 15),
        "q5s": (-15, 15),
        "q4f": (-8, 7),
        "q4s": (-7, 7),
        "q2f": (-2, 1),
        "q2s": (-1, 1),
        "q1f": (-1, 0),
        "u1": (0, 1),
        "u8": (0, 255),
        "e4m3": (-448, 448),
        "e5m2": (-57344, 57344),
        "e3m2": (-28, 28),
        "e2m3": (-7.5, 7.5),
        "e2m1": (-6, 6),
    }
    assert {name: pq.QuantValue(name).range for name in wanted} == wanted


def test_bits_of_every_value() -> None:
    for value in pq.QuantValue:
        digits = [int(c) for c in value if c.isdigit()]
        assert value.bits == (1 + sum(digits) if value.is_float else digits[0])


# -- scale types ------------------------------------------------------------------------------

_NARROW = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "ue4m3": ml_dtypes.float8_e4m3fn}


def brute_force_up(x: np.float32, kind: str) -> float:
    """The smallest number of the type not below x, by looking at all of them."""
    if kind == "ue8m0":
        return min((2.0**e for e in range(-127, 128) if 2.0**e >= x), default=2.0**127)
    dtype = np.dtype(_NARROW[kind])
    raw = np.arange(2 ** (8 * dtype.itemsize - 1), dtype=f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):  # the NaNs among them
        numbers = raw.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    above = numbers[numbers >= x]
    return float(above.min()) if above.size else float(numbers.max())


@pytest.mark.parametrize("kind", ["f16", "bf16", "ue8m0", "ue4m3"])
def test_scales_round_up_to_the_next_number(kind: str) -> None:
    rng = np.random.default_rng(0)
    numbers = scale_grid(pq.ScaleDtype(kind))
    picked = rng.choice(numbers, 60)
    x = np.abs(around(np.concatenate([picked, rng.lognormal(0, 20, 60), [3e38, 65504, 448, 0]])))
    x = x[(x == 0) | ((x >= np.finfo(np.float32).tiny) & np.isfinite(x))]
    got = standard.round_up(x, pq.ScaleDtype(kind))
    if kind == "ue8m0":
        got = 2.0 ** (got.astype(np.float64) - 127)
    elif kind == "ue4m3":
        got = got.view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(got.astype(np.float64), [brute_force_up(v, kind) for v in x])


def test_bf16_scales_above_its_maximum_saturate() -> None:
    top = np.float32(3.4028235e38)
    assert standard.round_up(np.asarray([top]), pq.ScaleDtype.BF16)[0] == np.float32(3.3895314e38)


# -- tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_named_tables_are_sound(name: str) -> None:
    table = named_table(name)
    assert table.dtype == np.float32
    assert table.size == 2 ** (table.size.bit_length() - 1)
    assert np.isfinite(table).all()
    assert not table.flags.writeable


def test_nf4_is_symmetric_normal_quantiles() -> None:
    """QLoRA's construction: ends at one, zero exact, the positive half 8 steps, the negative 7."""
    table = named_table("nf4")
    assert (np.diff(table) > 0).all()
    assert (table[0], table[7], table[15]) == (-1.0, 0.0, 1.0)


def test_steps_take_the_lower_entry_on_ties_and_the_lowest_code_of_equals() -> None:
    found = steps(np.asarray([2.0, -1.0, 0.0, 2.0], np.float32))
    np.testing.assert_array_equal(found.midpoints, [-0.5, 1.0])
    np.testing.assert_array_equal(found.codes, [1, 2, 0])
