"""Dequantizing by compiled kernels: bit for bit what the definition gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings

import polyquant as pq
from devices import assert_same_bits
from native_cases import BFLOAT16, FEW, SCHEMES, fits, nasty_weight, values, weight
from polyquant.backends.native import products
from polyquant.conform import checks, summary

SHAPES = ((3, 33), (5, 64), (17, 130), (2, 3, 70), (1, 1), (40,), (7, 1100), (9, 513))


def check(q: pq.QTensor, kind: object = None) -> None:
    wanted = values(q, kind)
    with np.errstate(all="ignore"):
        got = products.dequantize(q, None if kind is None else np.dtype(kind))
    assert_same_bits(got, wanted, f"{q.scheme} {q.shape}")


def test_every_target_conforms(target: str) -> None:
    quick = settings.get_current_profile_name() != "nightly"
    found = summary(checks("numpy", quick=quick))
    assert not found.failures, f"\n{found}"


@pytest.mark.parametrize("text", SCHEMES)
def test_values_are_the_definitions(target: str, text: str) -> None:
    for shape in SHAPES:
        if fits(text, shape):
            check(weight(text, shape))
            check(nasty_weight(text, shape))


@pytest.mark.parametrize("text", FEW)
def test_values_of_every_extent(target: str, text: str) -> None:
    for extent in range(1, 71):
        check(weight(text, (3, extent)))
        check(nasty_weight(text, (extent, 33)))


@pytest.mark.parametrize("kind", [np.float16, BFLOAT16, np.float64])
def test_values_of_other_dtypes_round_once(target: str, kind: type) -> None:
    for text in FEW:
        check(weight(text, (5, 70)), kind)
        check(nasty_weight(text, (5, 71)), kind)


def test_the_smallest_scale_of_all_is_no_float32(target: str) -> None:
    """UE8M0's byte 0 is 2^-127: numbers of at least 2 are normal, lower ones count as zero."""
    for text in ("q8s/32:ue8m0", "mxfp4", "mxfp8", "q5f/9:ue8m0", "q4s/8:ue8m0"):
        q = weight(text, (4, 100))
        parts = q.parts() | {"scales": np.zeros_like(q.scales)}
        zeros = pq.qtensor.from_parts(parts, q.scheme, q.shape, device="numpy")
        check(zeros)
        assert np.abs(products.dequantize(zeros, None)).max() >= 2.0**-126


def test_views_are_read_where_they_lie(target: str) -> None:
    """Lines far apart, a part of the lines, turned and permuted axes."""
    q = weight("q4s", (6, 8, 70))
    for view in (q[1:5], q[2], q[:, 3], q.mT, q.permute((2, 0, 1)), q[:, ::2], q[::-1]):
        check(view)


def test_all_codes_of_all_values(target: str) -> None:
    for value in pq.QuantValue:
        codes = np.arange(2**value.bits)
        text = f"{value}/{len(codes)}:f32@native" if value.bits == 8 else f"{value}/*:f32"
        q = weight(text, (2, max(len(codes), 32)))
        parts = q.parts() | {"data": _all_fields(value.bits, q.data.shape)}
        check(pq.qtensor.from_parts(parts, q.scheme, q.shape, device="numpy"))


def _all_fields(bits: int, shape: tuple[int, ...]) -> np.ndarray:
    if bits == 8:
        return np.broadcast_to(np.arange(256, dtype=np.uint8), shape).copy()
    rng = np.random.default_rng(bits)
    return rng.integers(0, 256, shape, np.uint8)
