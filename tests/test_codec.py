"""Packing against the bit stream of the numerical contract's section 5, one bit at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyquant as pq
from devices import host, put
from polyquant.arrays import namespace
from polyquant.codec import line_size_bytes, pack, unpack
from polyquant.values import QuantStore, QuantValue
from strategies import share

WORD_BITS = {QuantStore.PACKED_U32: 32, QuantStore.PACKED_NATIVE: 8}
BY_BITS = [QuantValue(f"u{bits}") for bits in range(1, 9)]


def stream(fields: list[int], bits: int, word_bits: int) -> bytes:
    """Field i in bits [i*bits, (i+1)*bits), lowest first, padded to whole words."""
    size = math.ceil(len(fields) * bits / word_bits) * word_bits
    line = [0] * size
    for i, field in enumerate(fields):
        for j in range(bits):
            line[i * bits + j] = (field >> j) & 1
    return bytes(sum(line[8 * b + j] << j for j in range(8)) for b in range(size // 8))


@st.composite
def lines(draw: st.DrawFn) -> tuple[QuantValue, Any]:
    value = draw(st.sampled_from(list(QuantValue)))
    length = draw(st.integers(0, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (*draw(st.lists(st.integers(0, 3), max_size=2)), length)
    return value, rng.integers(0, 2**value.bits, shape, dtype=np.uint8)


@pytest.mark.parametrize("store", WORD_BITS)
@settings(max_examples=share(0.5))
@given(line=lines())
def test_packed_bytes_are_the_bit_stream(store: QuantStore, line: tuple[QuantValue, Any]) -> None:
    value, fields = line
    got = pack(np, fields, value, store)
    assert got.dtype == np.uint8
    assert got.shape == (*fields.shape[:-1], line_size_bytes(fields.shape[-1], value.bits, store))
    for index in np.ndindex(fields.shape[:-1]):
        wanted = stream([int(f) for f in fields[index]], value.bits, WORD_BITS[store])
        assert got[index].tobytes() == wanted
    np.testing.assert_array_equal(unpack(np, got, fields.shape[-1], value, store), fields)


@settings(max_examples=share(0.2))
@given(line=lines())
def test_native_is_one_sign_extended_byte_a_code(line: tuple[QuantValue, Any]) -> None:
    value, fields = line
    got = pack(np, fields, value, QuantStore.NATIVE)
    assert got.shape == fields.shape
    wide = fields.astype(np.int64)
    if value.is_signed and not value.is_float:
        wide = np.where(wide >= 2 ** (value.bits - 1), wide - 2**value.bits, wide)
    np.testing.assert_array_equal(got, (wide & 0xFF).astype(np.uint8))
    back = unpack(np, got, fields.shape[-1], value, QuantStore.NATIVE)
    np.testing.assert_array_equal(back, fields)


@pytest.mark.parametrize("store", pq.QuantStore)
@pytest.mark.parametrize("value", BY_BITS)
def test_every_library_packs_alike(device: str, value: QuantValue, store: QuantStore) -> None:
    rng = np.random.default_rng(value.bits)
    fields = rng.integers(0, 2**value.bits, (3, 37), dtype=np.uint8)
    wanted = pack(np, fields, value, store)
    there = put(fields, device)
    xp = namespace(there)
    got = pack(xp, there, value, store)
    np.testing.assert_array_equal(host(got), wanted)
    np.testing.assert_array_equal(host(unpack(xp, got, 37, value, store)), fields)


def test_burns_layout_for_four_bits() -> None:
    """Eight nibbles a word, the first in the lowest bits (calculated by hand)."""
    fields = np.arange(1, 9, dtype=np.uint8)
    data = pack(np, fields, QuantValue.U4, QuantStore.PACKED_U32)
    assert int(data.view("<u4")[0]) == 0x87654321


@pytest.mark.parametrize("bits", range(1, 9))
def test_line_sizes(bits: int) -> None:
    for length in (0, 1, 7, 8, 31, 32, 33, 70):
        exact = length * bits
        assert line_size_bytes(length, bits, QuantStore.NATIVE) == length
        assert line_size_bytes(length, bits, QuantStore.PACKED_NATIVE) == -(-exact // 8)
        assert line_size_bytes(length, bits, QuantStore.PACKED_U32) == 4 * -(-exact // 32)
