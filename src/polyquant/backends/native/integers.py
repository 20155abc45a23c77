"""Products of two quantized operands whose codes are integers.

Sums of 32 products of codes are exact (int32); each is multiplied by its two scales and added up in
float32. Two of the tables of 16 entries are integers too: e2m1's (halved) and ggml's IQ4_NL.
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
    elif _entries(scheme) is None and (scheme.mode is QuantMode.LOOKUP or scheme.value.is_float):
        return f"the numbers of {scheme} are no integers of a byte"
    return _refuses_blocks(scheme)


def _refuses_blocks(scheme: QuantScheme) -> str | None:
    last = -1 if scheme.block is None else scheme.block[-1] if scheme.block else -1
    if last != -1 and last % _UNIT:
        return f"its blocks of {last} are no multiple of {_UNIT} codes"
    return None


def _entries(scheme: QuantScheme) -> F32 | None:
    """The numbers of a table of up to 16 entries that are whole, after doubling for e2m1."""
    if scheme.bits > 4:
        return None
    if scheme.mode is QuantMode.LOOKUP:
        if scheme.table in (None, CUSTOM):
            return None
        numbers = named_table(str(scheme.table))
    elif scheme.value.is_float:
        numbers = decode_table(scheme.value) * np.float32(2)
    else:
        return None
    is_whole = bool((numbers == np.round(numbers)).all() and np.abs(numbers).max() <= 127)
    return numbers if is_whole else None


@lru_cache(maxsize=256)
def _bytes(scheme: QuantScheme) -> Any:
    """How the codes of a scheme become bytes."""
    entries, value = _entries(scheme), scheme.value
    stored = 8 if scheme.store is QuantStore.NATIVE else value.bits
    mask = 2**value.bits - 1
    if entries is not None:
        table = (np.resize(entries, 16) + 128).astype(int).tolist()
        factor = 0.5 if scheme.mode is not QuantMode.LOOKUP else 1.0
        return compiled().Bytes(stored, mask, 0, table, 128, factor, False)
    sign = 2 ** (value.bits - 1) if value.is_signed else 0
    return compiled().Bytes(stored, mask, sign, [], sign, 1.0, scheme.offset is not None)
