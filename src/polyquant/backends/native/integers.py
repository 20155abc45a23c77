"""Products of two quantized operands whose codes are integers.

Sums of 32 products of codes are exact (int32); each is multiplied by its two scales and added up in
float32. Tables of 16 entries are integers too, times a power of two (e2m1's and ggml's IQ4_NL), or
sums of bytes times powers, each with exact sums of its own: of three bytes, as near as float32, and
of two along lines so long that the contract's bound is at least twice what an entry may be off.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from polyquant.arrays import Array, backend_of, backend_of_class, namespace
from polyquant.backends.native import products
from polyquant.backends.native.compiled import compiled
from polyquant.backends.native.quantizing import rounding
from polyquant.backends.native.weights import (
    matrix_of,
    plain,
    plain_input,
    plain_new,
    threads_for,
)
from polyquant.calibrate.host import F64
from polyquant.qtensor import QTensor
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.tables import CUSTOM, named_table
from polyquant.values import F32, QuantMode, QuantStore, QuantValue, decode_table

_UNIT = 32  # codes that share a scale, at least
_LARGEST = 127  # of a byte
#: Factor and second power with which two bytes an entry are nearest to a table (found by a search).
_TWO_BYTES = MappingProxyType(
    {"nf4": (124.60923, 0.0438965298), "af4": (127.02388, 0.0332584009), "fp4": (96.0, 1 / 64)}
)


def matmul(a: QTensor, b: QTensor, kind: Any) -> Array:
    """``a @ b`` rounded to ``kind``: lines of both along k, ``b`` a matrix."""
    rows = a.shape[:-1]
    out, is_wider = products.empty(a.data, (*rows, b.shape[1]), kind)
    into = plain(out if out.ndim == 2 else out.reshape((prod(rows), b.shape[1])))
    weight = matrix_of(b)
    done = prod(b.shape) and weight.matmul_codes(
        matrix_of(a), _bytes(b.scheme, b.shape[0]), into, threads_for(out)
    )
    if not done:  # nothing to add up, a scale beyond its range, or no faster than float32
        return products.matmul(a, b, kind)
    return namespace(out).astype(out, kind) if is_wider else out


def of_floats(x: Array, scheme: QuantScheme, b: QTensor, kind: Any) -> Array | None:
    """``x``, quantized to ``scheme``, times ``b``: the bits of ``matmul`` without a tensor made.

    None where ``x`` is not finite, and where that way is not open.
    """
    how = rounding(scheme, b.shape[0]) if prod(b.shape) and x.ndim else None
    if how is None:
        return None
    rows, owner = x.shape[:-1], backend_of_class(x.__class__) or backend_of(x)
    out, is_wider = products.empty(x, (*rows, b.shape[1]), kind)
    if is_wider:
        return None
    flat, into = x, out
    if x.ndim != 2:
        flat = x.reshape((prod(rows), b.shape[0]))
        into = out.reshape((prod(rows), b.shape[1]))
    coder, block, spread = how
    side = (matrix_of(b), _bytes(b.scheme, b.shape[0]), plain_new(into, owner))
    done = coder.matmul(plain_input(flat, owner), block, spread, *side, owner.num_threads())
    return out if done else None


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
    elif _numbers(scheme) is not None and not _tables(scheme):
        return f"the numbers of {scheme} are no integers of a byte and no table of packed codes"
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


class _Table(NamedTuple):
    """Numbers as bytes: entries for each power, and the shortest line that they are good for."""

    entries: list[int]
    powers: tuple[float, ...]
    factor: float
    least: float


@cache
def _tables(scheme: QuantScheme) -> tuple[_Table, ...]:
    """The numbers of a scheme in one, two or three bytes each; the last is good for any line."""
    numbers = _numbers(scheme)
    if numbers is None or scheme.bits > 4 or not np.isfinite(numbers).all():
        return ()
    entries = np.resize(numbers, 16).astype(np.float64)
    power = next(p for p in range(150) if not (np.ldexp(entries, p) % 1).any())
    if np.abs(np.ldexp(entries, power)).max() <= _LARGEST:
        return (_split(entries, 2.0**power, (1.0,)),)
    if scheme.bits != 4 or scheme.store is QuantStore.NATIVE:
        return ()
    factors = np.linspace(0.5, 1, 4096) * _LARGEST / np.abs(entries).max()
    whole = factors[:, None] * entries[entries != 0] * 2**16
    errors = np.abs((np.rint(whole) - whole) / whole).max(axis=1)
    three = _split(entries, factors[errors.argmin()], (1.0, 2.0**-8, 2.0**-16))
    found = _TWO_BYTES.get(str(scheme.table))
    return (three,) if found is None else (_split(entries, found[0], (1.0, found[1])), three)


def _split(numbers: F64, factor: float, powers: tuple[float, ...]) -> _Table:
    """Each number as that sum of bytes times powers which is nearest, whatever the first byte."""
    first = np.arange(-_LARGEST, _LARGEST + 1.0)
    rest = numbers[:, None] * factor - first
    parts = [np.broadcast_to(first, rest.shape)]
    for power in map(np.float32, powers[1:]):
        parts.append(np.clip(np.rint(rest / power), -_LARGEST - 1, _LARGEST))
        rest = rest - parts[-1] * power
    best = np.arange(len(numbers)), np.abs(rest).argmin(axis=1)
    error = np.abs(rest[best] / np.where(numbers, numbers * factor, 1)).max()
    entries = np.stack([part[best] for part in parts]) + _LARGEST + 1
    # The bound of a line of k is 8 * sqrt(k) * 2^-24.
    return _Table(entries.astype(int).ravel().tolist(), powers, 1 / factor, (error * 2**22) ** 2)


@lru_cache(maxsize=256)
def _bytes(scheme: QuantScheme, length: int) -> Any:
    """How the codes of a scheme become bytes, for lines of a length."""
    tables, value = _tables(scheme), scheme.value
    stored = 8 if scheme.store is QuantStore.NATIVE else value.bits
    mask = 2**value.bits - 1
    if tables:
        made = next((table for table in tables if table.least <= length), tables[-1])
        how = (made.entries, made.powers, _LARGEST + 1, made.factor, False)
        return compiled().Bytes(stored, mask, 0, *how)
    sign = 2 ** (value.bits - 1) if value.is_signed else 0
    return compiled().Bytes(stored, mask, sign, [], [], sign, 1.0, scheme.offset is not None)
