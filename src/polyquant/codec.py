"""Packing: fields of 1 to 8 bits to bytes and back, for the three stores.

Field ``i`` of a line occupies bits ``[i*bits, (i+1)*bits)`` of a little-endian bit stream. Each
line is padded to whole 32-bit words (packed_u32) or bytes (packed_native); native keeps a byte a
code, sign-extended where the value is a signed integer.
"""

from __future__ import annotations

import math
from typing import Any

from polyquant.arrays import Array, place
from polyquant.values import QuantStore, QuantValue


def line_size_bytes(length: int, bits: int, store: QuantStore) -> int:
    """Bytes of a line of ``length`` codes."""
    if store is QuantStore.NATIVE:
        return length
    if store is QuantStore.PACKED_NATIVE:
        return -(-length * bits // 8)
    return -(-length * bits // 32) * 4


def pack(xp: Any, fields: Array, value: QuantValue, store: QuantStore) -> Array:
    """Pack unsigned fields ``(..., length)`` into bytes ``(..., line_size_bytes)``, all uint8."""
    bits, length = value.bits, fields.shape[-1]
    if store is QuantStore.NATIVE:
        return _extend_sign(fields, value)
    group, group_bytes = _group(bits)
    groups = -(-length // group)
    size = line_size_bytes(length, bits, store)
    fields = _pad_last(xp, fields, groups * group)
    if bits == 8:
        return _pad_last(xp, fields, size)
    lanes = xp.reshape(fields, (*fields.shape[:-1], groups, group))
    made = []
    for byte in range(group_bytes):
        total = None
        for lane in range(group):
            shift = lane * bits - byte * 8
            if -bits < shift < 8:
                part = lanes[..., lane]
                part = part << shift if shift >= 0 else part >> -shift
                total = part if total is None else total | part
        made.append(total)
    data = made[0] if group_bytes == 1 else xp.stack(made, axis=-1)
    data = xp.reshape(data, (*fields.shape[:-1], groups * group_bytes))
    return _pad_last(xp, data, size)[..., :size]


def unpack(xp: Any, data: Array, length: int, value: QuantValue, store: QuantStore) -> Array:
    """Unpack bytes ``(..., line_size_bytes)`` into unsigned fields ``(..., length)``, uint8."""
    bits, mask = value.bits, 2**value.bits - 1
    if store is QuantStore.NATIVE:
        return data & mask if bits < 8 else data
    if bits == 8:
        return data[..., :length]
    group, group_bytes = _group(bits)
    groups = -(-length // group)
    data = _pad_last(xp, data, max(groups * group_bytes, data.shape[-1]))
    lanes = data[..., : groups * group_bytes]
    lanes = xp.reshape(lanes, (*data.shape[:-1], groups, group_bytes))
    made = []
    for lane in range(group):
        first, shift = divmod(lane * bits, 8)
        field = lanes[..., first] >> shift if shift else lanes[..., first]
        if shift + bits > 8:
            field = field | (lanes[..., first + 1] << (8 - shift))
        made.append(field & mask)
    fields = xp.reshape(xp.stack(made, axis=-1), (*data.shape[:-1], groups * group))
    return fields[..., :length]


def _group(bits: int) -> tuple[int, int]:
    """The smallest number of codes that fills whole bytes, and those bytes."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _pad_last(xp: Any, array: Array, length: int) -> Array:
    missing = length - array.shape[-1]
    if missing <= 0:
        return array
    zeros = xp.zeros((*array.shape[:-1], missing), dtype=array.dtype, **place(array))
    return xp.concat([array, zeros], axis=-1)


def _extend_sign(fields: Array, value: QuantValue) -> Array:
    if value.is_float or not value.is_signed or value.bits == 8:
        return fields
    sign = 2 ** (value.bits - 1)
    return (fields ^ sign) - sign
