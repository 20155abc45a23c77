"""Faults of other quantized-tensor libraries: C and D, numbers and codes.

Each test names the number of its case, the input and the right answer, and runs the whole kind:
other schemes, dtypes, layouts and libraries. What is left for later areas is listed at the end;
A and B are in test_bug_layouts.py and test_bug_sizes.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np
import pytest

import polyquant as pq
from bugs import (
    F32,
    JAX,
    PLACES,
    assert_product,
    every_kind,
    everywhere,
    noise,
    relative_error,
    tensor,
    with_jax,
)
from devices import assert_same_bits, assert_same_parts, host, put
from polyquant import standard
from polyquant.errors import (
    BlockRank,
    DataLength,
    NonFiniteInput,
    PolyquantError,
    ShapeMismatch,
)
from polyquant.values import ScaleDtype, scale_grid

# -- C. zero, tiny, huge, non-finite ----------------------------------------------------------


@every_kind
@everywhere
def test_23_zero_tensors_and_zero_rows(kind: str, place: str) -> None:
    """23: zeros(4, 32), and one zero row in a normal tensor. Right: exact zeros, finite scales."""
    x = noise(4, 64)
    x[1:3] = 0  # a whole block of every scheme but the row- and tensor-wide ones
    for source in (np.zeros((4, 64), F32), x):
        q = pq.quantize(put(source, place), kind)
        back = host(q.dequantize())
        for name, part in q.parts().items():
            numbers = host(part)
            if q.scheme.scale is ScaleDtype.UE4M3 and name == "scales":
                numbers = scale_grid(ScaleDtype.UE4M3)[numbers]  # a NaN byte has no number
            assert np.isfinite(numbers.astype(F32)).all(), name
        assert np.isfinite(back).all()
        # A biased code cannot say 0 between its steps, unless the block is nothing but zeros.
        biased = q.scheme.offset is not None and q.scheme.offset.kind == "bias"
        alone = q.scheme.scale_shape(source.shape)[0] == 4 or not source.any()
        if q.scheme.table != "iq4_nl" and (alone or not biased):
            assert (back[1:3] == 0).all()
        y = host(put(np.ones((1, 4), F32), place) @ q)
        assert np.isfinite(y).all()


def test_23_iq4_nl_has_no_zero() -> None:
    """23, the exception: IQ4_NL's table holds no 0, so only a zero block decodes to exact zeros."""
    assert not (pq.quantize(np.zeros((2, 32), F32), "iq4_nl").dequantize() != 0).any()


SUBNORMALS = (1e-39, 1e-40, 1.4e-45, 1.1754942e-38)


@every_kind
@everywhere
def test_24_subnormal_blocks(kind: str, place: str) -> None:
    """24: 32 values of 1e-39, 8 bits, f16 scale, so that 1/d overflows. Right: all 0."""
    for tiny in SUBNORMALS:
        q = pq.quantize(put(np.full((2, 32), tiny, F32), place), kind)
        assert (host(q.dequantize()) == 0).all()
        if not q.scheme.value.is_float and q.scheme.value.is_signed:
            assert (host(q.codes()) == 0).all()


@every_kind
@everywhere
@pytest.mark.parametrize("tiny", [1.18e-38, 1e-37, 1e-30])
def test_24_smallest_normal_blocks(kind: str, tiny: float, place: str) -> None:
    """24, the kind: blocks whose scale is about the smallest normal. Right: never undefined."""
    x = np.full((2, 32), tiny, F32) * np.linspace(-1, 1, 32, dtype=F32)
    q = pq.quantize(put(x, place), kind)
    back = host(q.dequantize())
    assert np.isfinite(back).all()
    assert (np.abs(back) <= 2.0**-8).all()
    if q.scheme.scale in ("f32", "bf16") and q.scheme.value == "q8s" and tiny > 1e-36:
        assert np.abs(back - x).max() <= tiny / 200


@everywhere
def test_26_nvfp4_of_small_values(place: str) -> None:
    """26: uniform(2, 16) / 1e5 in NVFP4.

    Right: with a tensor scale of alpha / (448 * 6) the largest block's stored scale is 448 and the
    error is that of ordinary e2m1, whatever the magnitude; without it every scale is the type's
    smallest and all values are lost, which a warning says and measure counts.
    """
    x = np.random.default_rng(5).uniform(size=(2, 16)).astype(F32)
    errors = []
    for factor in (1.0, 1e-5, 1e-20, 1e20):
        q = pq.quantize(put(x * F32(factor), place), "nvfp4")
        scales = scale_grid(ScaleDtype.UE4M3)[host(q.scales)]
        assert scales.max() == 448 and scales.min() > 300
        errors.append(relative_error(x * F32(factor), q))
    np.testing.assert_allclose(errors, errors[0], rtol=0.02)
    assert 0.03 < errors[0] < 0.12
    text = "2 of the 2 blocks hold only values"
    with pytest.warns(pq.errors.DeadBlocksWarning, match=text) as warned:
        lost = pq.quantize(put(x * F32(1e-5), place), "e2m1/16:ue4m3")
    assert warned[0].filename == __file__
    assert (host(lost.scales) == 1).all() and (host(lost.dequantize()) == 0).all()
    assert pq.measure(x * F32(1e-5), lost.to("numpy")).dead_blocks == 2


@everywhere
def test_27_scales_above_448_saturate(place: str) -> None:
    """27: block scales 448, 464, 465, 480, 1e4 in e4m3. Right: 448 (0x7E), never NaN (0x7F)."""
    wanted = np.asarray([448, 464, 465, 480, 1e4, 447.9, 1e30], F32)
    stored = host(standard.as_stored(put(wanted, place), ScaleDtype.UE4M3))
    assert stored.tolist() == [0x7E] * 7
    x = np.ones((7, 16), F32) * wanted[:, None]
    q = pq.quantize(put(x, place), "e2m1/16:ue4m3", scales=put(wanted[:, None], place))
    assert host(q.scales).reshape(-1).tolist() == [0x7E] * 7
    assert np.isfinite(host(q.dequantize())).all()
    # Values past the range of the largest scale clip to its end, 6 * 448.
    assert host(q.dequantize()).max() == 6 * 448


@pytest.mark.parametrize(
    ("dtype", "top"), [("f16", 65504.0), ("bf16", ScaleDtype.BF16.max), ("ue8m0", 2.0**127)]
)
@everywhere
def test_27_other_scale_types_saturate(dtype: str, top: float, place: str) -> None:
    """27, the kind: no scale type overflows to infinity or NaN."""
    ideal = put(np.asarray([top, 3.4028235e38], F32), place)
    stored = host(standard.as_stored(ideal, ScaleDtype(dtype)))
    numbers = scale_grid(ScaleDtype(dtype))[stored] if dtype == "ue8m0" else stored.astype(F32)
    assert (numbers == top).all()
    x = np.full((1, 32), 3.4028235e38, F32)
    assert np.isfinite(host(pq.quantize(put(x, place), f"q2s/32:{dtype}").dequantize())).all()


@everywhere
@pytest.mark.parametrize("scale", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("offset", ["+bias:", "-zero:"])
def test_28_small_groups_keep_their_scale(offset: str, scale: str, place: str) -> None:
    """28: 64 groups of 32 from N(0, 0.01), 4-bit affine, bf16 scales.

    Right: no coarse floor, so a relative error of about 0.08 (a floor of 2^-7 gives 0.227).
    """
    x = noise(64, 32, std=0.01)
    stored = "u4" if offset == "-zero:" else scale
    q = pq.quantize(put(x, place), f"u4/32:{scale}{offset}{stored}")
    assert 0.06 < relative_error(x, q) < 0.1
    assert (host(q.scales).astype(F32) < 2.0**-7).all()


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_29_block_sums_do_not_overflow(dtype: str, place: str) -> None:
    """29: 32 activations of 3000, whose sum 96000 is beyond f16. Right: finite, offsets or not."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    x = np.full((1, 32), 3000, kind)
    a = pq.quantize(put(x, place), "q8s/32:f16")
    w = pq.quantize(put(noise(4, 32) * 0.01 + 1, place), "u4/32:f16+bias:f16")
    left, right = host(a.dequantize()), host(w.dequantize())
    y = pq.matmul(a, w.T)
    assert_product(y, left, np.ascontiguousarray(right.T))
    assert host(y).min() > 90000
    inside = pq.linear(put(x.astype(F32), place), w, activations="q8s/32:f16")
    assert_product(inside, left, np.ascontiguousarray(right.T))


@everywhere
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("zero", ["u4", "f16", "f32"])
def test_30_zero_point_before_the_scale(zero: str, dtype: str, place: str) -> None:
    """30: code 15, zero point 15, scale 5000 in f16, so that q*s - z*s is infinite. Right: 0."""
    storage = {"u4": "uint8", "f16": "float16", "f32": "float32"}[zero]
    q = tensor(f"u4/32:f16-zero:{zero}", np.full((2, 32), 15), 5000, place, np.asarray(15, storage))
    back = host(q.dequantize(dtype)).astype(F32)
    assert (back == 0).all() and not np.signbit(back).any()
    ones = put(np.ones((1, 2), F32), place)
    assert (host(pq.matmul(ones, q, out_dtype=dtype)).astype(F32) == 0).all()


@everywhere
def test_30_integer_sums_meet_both_scales(place: str) -> None:
    """30, beside: an integer sum of 1016 with scales 127 and 8e-6, where 1016 * 127 is beyond f16.

    Right: about 1.03, in float16 too.
    """
    a = tensor("q8s/tensor:f16", np.ones((1, 8)), 127, place)
    b = tensor("q8s/tensor:f32", np.full((8, 1), 127), 8e-6, place)
    for dtype in ("float16", "bfloat16", "float32"):
        got = float(host(pq.matmul(a, b, out_dtype=dtype)).item())
        assert abs(got - 1016 * 127 * 8e-6) < 0.004


POISON = (math.nan, math.inf, -math.inf)


@every_kind
@everywhere
def test_32_nonfinite_input_is_refused(kind: str, place: str) -> None:
    """32: infinity or NaN in the input. Right: an error that counts them and names the first."""
    dtypes = ("float32", "float16", ml_dtypes.bfloat16, "float64")
    for bad, dtype in itertools.product(POISON, dtypes):
        x = noise(4, 32).astype(dtype)
        x[2, 5] = x[3, 1] = bad
        with pytest.raises(NonFiniteInput, match=r"2 values.*\(2, 5\)"):
            pq.quantize(put(x, place), kind)


@with_jax
def test_32_infinity_saturates_when_asked(place: str) -> None:
    """32: +inf, -inf and NaN, scale 1, zero point 133, 8 bits. Right: codes 255, 0 and the zero."""
    x = put(np.asarray([math.inf, -math.inf, math.nan, 1.0], F32), place)
    q = pq.quantize(x, "u8/tensor:f32-zero:u8", scales=1.0, offsets=133.0, nonfinite="saturate")
    assert host(q.codes()).tolist() == [255, 0, 133, 134]
    assert host(q.dequantize()).tolist() == [122.0, -133.0, 0.0, 1.0]


@every_kind
@everywhere
def test_32_saturation_does_not_poison_the_block(kind: str, place: str) -> None:
    """32, the kind: beside infinities and NaN the scale is that of the finite values."""
    x = noise(4, 64)
    spoiled = x.copy()
    x[1, 3:6] = 0
    spoiled[1, 3:6] = POISON
    q = pq.quantize(put(spoiled, place), kind, nonfinite="saturate")
    clean = pq.quantize(put(x, place), kind)
    assert_same_parts(q, clean, skip=("data",))
    got, wanted = host(q.dequantize()), host(clean.dequantize())
    assert np.isfinite(got).all()
    assert got[1, 4] == got.max() or got[1, 4] > wanted[1, 4]
    assert got[1, 5] < wanted[1, 5] and got[1, 3] == wanted[1, 3]
    got[1, 3:6] = wanted[1, 3:6] = 0
    assert_same_bits(got, wanted)


# -- D. rounding, range, codes ----------------------------------------------------------------


@everywhere
def test_33_ties_of_e2m1(place: str) -> None:
    """33: 0.25 0.75 1.25 1.75 2.5 3.5 5 7. Right: 0 1 1 2 2 4 4 6 (half to even, saturating)."""
    x = np.asarray([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0], F32)
    both = np.concatenate([x, -x])
    q = pq.quantize(put(both, place), "e2m1/tensor:f32", scales=1.0)
    wanted = np.asarray([0, 1, 1, 2, 2, 4, 4, 6], F32)
    assert_same_bits(host(q.dequantize()), np.concatenate([wanted, -wanted]))


@everywhere
@pytest.mark.parametrize("value", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_33_ties_of_every_minifloat(value: str, place: str) -> None:
    """33, the kind: at and beside every midpoint the code is that of a nearest-even cast."""
    kind = getattr(ml_dtypes, {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}.get(value, ""), None)
    kind = kind or getattr(ml_dtypes, f"float{'4' if value == 'e2m1' else '6'}_{value}fn")
    numbers = np.arange(2 ** pq.QuantValue(value).bits // 2, dtype=np.uint8).view(kind).astype(F32)
    numbers = numbers[np.isfinite(numbers)]
    middle = (numbers[:-1] + numbers[1:]) / 2
    x = np.concatenate(
        [numbers, middle, np.nextafter(middle, F32(9e9)), np.nextafter(middle, F32(0))]
    )
    x = np.concatenate([x, -x])
    q = pq.quantize(put(x, place), f"{value}/tensor:f32", scales=1.0)
    assert_same_bits(host(q.dequantize()), x.astype(kind).astype(F32))


@everywhere
@pytest.mark.parametrize("value", ["q8s", "q4f", "q2s", "u8", "u4"])
def test_33_ties_of_integers(value: str, place: str) -> None:
    """33, the kind: integers round half to even, and saturate."""
    low, high = pq.QuantValue(value).range
    x = np.arange(low - 1, high + 1.5, 0.5, dtype=F32)
    x = x[x >= 0] if low == 0 else x
    q = pq.quantize(put(x, place), f"{value}/tensor:f32", scales=1.0)
    assert_same_bits(host(q.dequantize()), np.clip(np.rint(x), low, high) + F32(0))


@everywhere
@pytest.mark.parametrize(("kind", "emax"), [("e2m1", 2), ("e4m3", 8), ("e5m2", 15), ("e2m3", 2)])
def test_33_exponent_comes_from_the_bits(kind: str, emax: int, place: str) -> None:
    """33: a block's maximum of bits 0x3FFFFFFF, just below 2.

    Right: its exponent byte is 127; by way of bf16 it would round to 2, byte 128. The next number,
    2 itself, has 128.
    """
    for bits, byte in ((0x3FFFFFFF, 127), (0x40000000, 128), (0x3F800000, 127), (0x3F7FFFFF, 126)):
        x = np.zeros((1, 32), F32)
        x[0, 7] = np.asarray(bits, np.uint32).view(F32)
        q = pq.quantize(put(x, place), f"{kind}/32:ue8m0", calibration="mx_floor")
        assert host(q.scales).item() == byte - emax
        # Rounded up instead: the smallest power of two not below alpha / max.
        q = pq.quantize(put(x, place), f"{kind}/32:ue8m0")
        ideal = float(x.max()) / pq.QuantValue(kind).half_range
        assert host(q.scales).item() == 127 + math.ceil(math.log2(ideal))


@everywhere
def test_33_floor_and_ceiling_exponents(place: str) -> None:
    """33: a block with maximum 960 and the value 957 in e4m3. Right: mx_floor 896, minmax 960."""
    x = np.zeros((1, 32), F32)
    x[0, :2] = 960, 957
    for calibration, wanted in (("mx_floor", 896), ("minmax", 960)):
        q = pq.quantize(put(x, place), "mxfp8", calibration=calibration)
        assert host(q.dequantize())[0, 1] == wanted


@everywhere
@pytest.mark.parametrize("scale", ["f16", "bf16", "ue4m3", "ue8m0"])
@pytest.mark.parametrize("value", ["q8s", "q4s", "e4m3", "u4[nf4]"])
def test_34_scales_round_up(value: str, scale: str, place: str) -> None:
    """34: 64x64 N(0, 1), 8 bits, blocks of 16, ue4m3 scales.

    Right: no stored scale is below the one asked for, so the block's maximum is never clipped
    (relative error 0.0051 rather than 0.0127), and every library stores the same bytes.
    """
    x = noise(64, 64)
    q = pq.quantize(put(x, place), f"{value}/16:{scale}")
    exact = pq.quantize(x, f"{value}/16:f32")
    stored = host(q.scales)
    is_byte = ScaleDtype(scale).storage == "uint8"
    numbers = scale_grid(ScaleDtype(scale))[stored] if is_byte else stored.astype(F32)
    assert (numbers >= exact.scales).all()
    assert_same_parts(q, pq.quantize(x, f"{value}/16:{scale}"))
    if (value, scale) == ("q8s", "ue4m3"):
        assert relative_error(x, q) < 0.0053
    if scale != "ue8m0":  # at most an eighth above, or one step of ue4m3 where that is more
        assert (numbers <= np.maximum(exact.scales * F32(1.126), exact.scales + F32(2.0**-9))).all()


A35 = [[-47, -123, -10, 92], [-96, -38, 82, 40], [70, -60, -66, -127], [-46, -91, 109, 101]]
B35 = [[124, 8, -74, 32], [-40, 4, -50, -84], [103, -84, 88, -66], [24, 115, 123, 54]]
C35 = [
    [270, 10552, 20064, 14456],
    [-978, -3208, 21140, -3132],
    [1234, -8741, -23609, 4778],
    [11587, 1727, 29969, 4432],
]


@with_jax
def test_35_integer_products_are_exact(place: str) -> None:
    """35d: a 4x4 product of 8-bit integers, whose sums pass int16. Right: the exact integers."""
    a, b = (tensor("q8s/tensor:f32", codes, 1, place) for codes in (A35, B35))
    assert host(pq.matmul(a, b)).tolist() == C35
    assert host(a.dequantize() @ b).tolist() == C35
    assert host(a @ b.dequantize()).tolist() == C35
    flipped = host(pq.matmul(b.T, a.T))
    assert flipped.tolist() == np.transpose(C35).tolist()


@everywhere
@pytest.mark.parametrize("k", [2, 3, 16, 1000])
def test_35_lowest_codes_multiply(k: int, place: str) -> None:
    """35a: products of -128 by -128, two in one 16-bit lane. Right: +32768 for two, k * 16384."""
    a = tensor("q8f/tensor:f32", np.full((1, k), -128), 1, place)
    b = tensor("q8f/tensor:f32", np.full((k, 1), -128), 1, place)
    assert host(pq.matmul(a, b)).item() == k * 16384


@everywhere
@pytest.mark.parametrize("value", ["q8f", "q8s", "q4f", "q3s", "q2f", "u8", "u3"])
@pytest.mark.parametrize("store", ["native", "packed_u32", "packed_native"])
def test_35_codes_saturate_rather_than_wrap(value: str, store: str, place: str) -> None:
    """35c: a value that rounds to 128. Right: it stores 127, not -128; likewise at every width."""
    low, high = pq.QuantValue(value).range
    x = [high + 0.5, high + 1, high + 100, 1e30] + [low - 0.5, low - 1, -1e30] * (low < 0)
    kind = f"{value}/tensor:f32@{store}"
    q = pq.quantize(put(np.asarray(x, F32), place), kind, scales=1.0)
    assert host(q.codes()).tolist() == [high] * 4 + [low] * 3 * (low < 0)


@everywhere
def test_36a_one_sided_ranges(place: str) -> None:
    """36a: -22..-15, 8 bits with a zero point.

    Right: the range is widened to hold 0, so the values come back, not all -7 (a clamped zero).
    """
    x = np.arange(-22, -14, dtype=F32)
    wanted = [-22.00, -20.96, -20.02, -18.98, -18.03, -17.00, -15.96, -15.01]
    q = pq.quantize(put(x, place), "u8/8:f32-zero:u8")
    np.testing.assert_allclose(host(q.dequantize()), wanted, atol=0.006)
    flipped = pq.quantize(put(-x, place), "u8/8:f32-zero:u8")
    np.testing.assert_allclose(host(flipped.dequantize()), -x, atol=22 / 255 / 2 + 1e-6)
    # A bias needs no zero in the range: all 255 steps fall between the ends.
    biased = pq.quantize(put(x, place), "u8/8:f32+bias:f32")
    np.testing.assert_allclose(host(biased.dequantize()), x, atol=7 / 255 / 2 + 1e-5)
    assert host(biased.dequantize())[[0]].tolist() == [-22.0]


@everywhere
def test_36c_idempotence(place: str) -> None:
    """36c: -0.8..0.7 in steps of 0.1, quantized again.

    Right: full-range q4f with signed_max returns every value; q4s, whose scale is max / 7, keeps
    -0.8 and moves 0.7 to 0.686, and then stays.
    """
    x = (np.arange(-8, 8) / 10).astype(F32)
    full = pq.quantize(put(x, place), "q4f/16:f32", calibration="signed_max")
    assert host(full.codes()).tolist() == list(range(-8, 8))
    np.testing.assert_allclose(host(full.dequantize()), x, rtol=1e-6)
    sym = pq.quantize(put(x, place), "q4s/16:f32")
    back = host(sym.dequantize())
    np.testing.assert_allclose(back[[0, -1]], [-0.8, 0.6857143], rtol=1e-6)
    assert_same_bits(host(pq.quantize(put(back, place), "q4s/16:f32").codes()), host(sym.codes()))


#: Schemes whose output quantizes to the same codes again. A scale rounded up by more than half a
#: step of the end code (bf16 under 8 bits, or any narrow scale under minmax) does not.
STABLE = (
    *(
        (f"{value}/32:{scale}", "signed_max")
        for value, scale in itertools.product(("q8f", "q4f", "q2f"), ("f32", "f16", "bf16"))
        if (value, scale) != ("q8f", "bf16")
    ),
    *((f"{value}/32:f32", "minmax") for value in ("q8s", "q4s", "q2s", "e4m3", "e2m1")),
    ("u4[nf4]/64:f32", "minmax"),
    ("mxfp4", "mx_floor"),
    ("mxfp8", "mx_floor"),
)


@everywhere
@pytest.mark.parametrize(("kind", "calibration"), STABLE)
def test_36c_codes_of_its_own_output(kind: str, calibration: str, place: str) -> None:
    """36c, the kind: quantizing a scheme's own output gives the same codes."""
    first = pq.quantize(put(noise(8, 64), place), kind, calibration=calibration)
    again = pq.quantize(first.dequantize(), kind, calibration=calibration)
    assert_same_bits(host(again.codes()), host(first.codes()))
    np.testing.assert_allclose(host(again.dequantize()), host(first.dequantize()), rtol=3e-7)


@everywhere
@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2"])
def test_36c_values_of_powers_of_two(kind: str, place: str) -> None:
    """36c, the kind: with power-of-two scales rounded up the exponent may fall, the values stay."""
    values = pq.quantize(put(noise(8, 64), place), kind).dequantize()
    assert_same_bits(host(pq.quantize(values, kind).dequantize()), host(values))


@everywhere
def test_36g_size_of_the_bytes(place: str) -> None:
    """36g: a 512x512 weight, 8 bits, one scale. Right: 262148 bytes, not 1048576."""
    q = pq.quantize(put(noise(512, 512), place), "q8s/tensor:f32")
    assert len(q.to_data().bytes) == q.nbytes == 512 * 512 + 4
    small = pq.quantize(put(noise(512, 512), place), "q4s/32:f16")
    assert len(small.to_data().bytes) == 512 * 512 // 2 + 512 * 16 * 2


@pytest.mark.parametrize("target", PLACES + JAX)
@everywhere
@pytest.mark.parametrize(
    "kind", ["nf4", "fp4", "u4[custom]/64:f32", "u8[dynamic8]/256:f32", "nf4-double"]
)
def test_36i_table_travels(kind: str, place: str, target: str) -> None:
    """36i: rand(2, 3) to bytes and back on another device. Right: the table goes with it."""
    x = np.random.default_rng(6).random((2, 3)).astype(F32)
    table = np.linspace(-1, 1, 16, dtype=F32) ** 3 if "custom" in kind else None
    q = pq.quantize(put(x, place), kind, table=table)
    there = pq.from_data(q.to_data(), target)
    assert there.device == q.to(target).device
    assert_same_parts(there, q)
    assert_same_bits(host(there.dequantize()), host(q.dequantize()))
    assert_same_bits(host(q.to(target).to(place).dequantize()), host(q.dequantize()))
    wrong = dataclasses.replace(q.to_data(), scheme=pq.scheme("q8s/tensor:f32"), bytes=b"\0" * 12)
    with pytest.raises(DataLength):
        dataclasses.replace(wrong, bytes=q.to_data().bytes)


def test_no_case_ends_in_a_raw_error() -> None:
    """What the cases above refuse is refused by the catalogue."""
    for refused in (BlockRank, DataLength, NonFiniteInput, ShapeMismatch):
        assert issubclass(refused, PolyquantError)


# -- what is left for later areas -------------------------------------------------------------

#: Case -> what of it is left, and where it belongs.
LATER = MappingProxyType(
    {
        "11, 20": "tiles of compiled kernels: each kernel's own conformance",
        "27": "the report of how many scales were clipped: pq.measure has a clip rate of values",
        "36d": "GPTQ's stored zero points, version 1 against 2: the reader of that format",
        "36g": "the size of the file: saving",
    }
)


def test_every_number_is_covered_or_listed() -> None:
    """The numbers of the list, against the names of the tests of the three files."""
    numbers = {1, 2, 3, 5, 6, 9, 10, 11, 13, 15, 16, 18, 20, 21, 22, 23, 24, 26, 27, 28, 29, 30}
    numbers |= {32, 33, 34, 35, 36}
    files = Path(__file__).parent.glob("test_bug_*.py")
    texts = "".join(path.read_text("utf-8") for path in files)
    tested = set(re.findall(r"^def test_0?(\d+)", texts, re.MULTILINE))
    assert set(map(int, tested)) == numbers
    assert all(LATER.values())
