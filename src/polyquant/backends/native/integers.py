"""Products of two quantized operands whose codes are integers.

Sums of 32 products of codes are exact (int32); each is multiplied by its two scales and added up in
float32. Tables of 16 entries are integers too, times a power of two: of a byte e2m1's and ggml's
IQ4_NL, of 32 bits NF4 and AF4, as four bytes whose products are added up exactly.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from polyquant.arrays import Array, namespace
from polyquant.backends.native import products
from polyquant.backends.native.compiled import compiled
from polyquant.backends.native.weights import matrix_of, plain, threads_for
from polyquant.qtensor import QTensor
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.tables import CUSTOM, named_table
from polyquant.values import F32, QuantMode, QuantStore, QuantValue, decode_table

_UNIT = 32  # codes that share a scale, at least
_LARGEST_BYTE, _LARGEST = 127, 2**31 - 2**16  # the upper of two halves may be rounded up


def matmul(a: QTensor, b: QTensor, kind: Any) -> Array:
    """``a @ b`` rounded to ``kind``: lines of both along k, ``b`` a matrix."""
    rows = a.shape[:-1]
    out, is_wider = products.empty(a.data, (*rows, b.shape[1]), kind)
    into = plain(out if out.ndim == 2 else out.reshape((prod(rows), b.shape[1])))
    weight = matrix_of(b)
    done = prod(b.shape) and weight.matmul_codes(
        matrix_of(a), _bytes(b.scheme), into, threads_for(out)
    )
    if not done:  # nothing to add up, a scale beyond its range, or no faster than float32
        return products.matmul(a, b, kind)
    return namespace(out).astype(out, kind) if is_wider else out


# -- which schemes ----------------------------------------------------------------------------


def refuses_left(scheme: QuantScheme) -> str | None:
    """Why the codes of the left operand are no integers of a byte."""
    is_integer = scheme.mode is QuantMode.SYMMETRIC and not scheme.value.is_float
    if not is_integer or not scheme.value.is_signed:
        return f"the codes of {scheme} are not signed integers alone"
    return _refuses_blocks(scheme)


def refuses_right(scheme: QuantScheme) -> str | None:
    """Why the codes of the right operand are no integers of a byte."""
    if scheme.offset is not None:
        zero = scheme.offset.kind is OffsetKind.ZERO_POINT and scheme.offset.dtype
        if not isinstance(zero, QuantValue) or scheme.value.is_signed:
            return f"the values of {scheme} are no integers of a byte times a scale"
    elif _numbers(scheme) is not None and _table(scheme) is None:
        return f"the numbers of {scheme} are no integers of a byte or of packed codes and 32 bits"
    return _refuses_blocks(scheme)


def _refuses_blocks(scheme: QuantScheme) -> str | None:
    last = -1 if scheme.block is None else scheme.block[-1] if scheme.block else -1
    if last != -1 and last % _UNIT:
        return f"its blocks of {last} are no multiple of {_UNIT} codes"
    return None


def _numbers(scheme: QuantScheme) -> F32 | None:
    """What codes stand for where they are no integers: none where only the tensor says it."""
    if scheme.mode is QuantMode.LOOKUP:
        is_named = scheme.table not in (None, CUSTOM)
        return named_table(str(scheme.table)) if is_named else np.full(1, np.nan, np.float32)
    return decode_table(scheme.value) if scheme.value.is_float else None


def _table(scheme: QuantScheme) -> tuple[list[int], float] | None:
    """16 numbers as bytes plus 128, or as four tables (see native/weight.h), and their factor."""
    numbers = _numbers(scheme)
    if numbers is None or scheme.bits > 4 or not np.isfinite(numbers).all():
        return None
    power = next(p for p in range(150) if not (np.ldexp(np.float64(numbers), p) % 1).any())
    whole = np.ldexp(np.float64(numbers), power)
    if np.abs(whole).max() <= _LARGEST_BYTE:
        return (np.resize(whole, 16) + 128).astype(int).tolist(), 0.5**power
    if scheme.bits != 4 or scheme.store is QuantStore.NATIVE or np.abs(whole).max() > _LARGEST:
        return None
    biased = (whole.astype(np.int64) + 0x80008000) >> np.array([[0], [8], [16], [24]])
    return (biased & 255).ravel().tolist(), 0.5**power


@lru_cache(maxsize=256)
def _bytes(scheme: QuantScheme) -> Any:
    """How the codes of a scheme become bytes."""
    table, value = _table(scheme), scheme.value
    stored = 8 if scheme.store is QuantStore.NATIVE else value.bits
    mask = 2**value.bits - 1
    if table is not None:
        return compiled().Bytes(stored, mask, 0, table[0], 128, table[1], False)
    sign = 2 ** (value.bits - 1) if value.is_signed else 0
    return compiled().Bytes(stored, mask, sign, [], sign, 1.0, scheme.offset is not None)
