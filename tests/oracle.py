"""An independent oracle: the numerical contract's sections 2 to 4, one number at a time.

Written from the page, not from ``standard.py``, with NumPy float32 scalars and Python loops, and
with ml_dtypes' own casts for the narrow types. Slow; for small arrays only. It covers calibration
minmax for every scheme.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import polyquant as pq

F = np.float32
TINY = 2.0**-126
F32_MAX = float(np.finfo(np.float32).max)
MINIFLOATS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
TOPS = {"e4m3": 448.0, "e5m2": 57344.0, "e3m2": 28.0, "e2m3": 7.5, "e2m1": 6.0}
NARROW = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "ue4m3": ml_dtypes.float8_e4m3fn}


class Oracle(NamedTuple):
    """What the page says of one tensor: codes as unsigned fields, parts as stored, the values."""

    codes: np.ndarray[Any, Any]
    scales: Any  # an array as stored, or an Oracle
    tensor_scale: Any
    offsets: Any
    values: np.ndarray[Any, Any]


def flush(v: Any) -> Any:
    """Subnormal float32 numbers count as zero of their sign."""
    return F(math.copysign(0.0, v)) if abs(v) < TINY else F(v)


def quantize(x: np.ndarray[Any, Any], s: pq.QuantScheme, table: Any = None) -> Oracle:
    """Codes, stored parameters and values of ``x`` under minmax."""
    with np.errstate(all="ignore"):
        return _quantize(x, s, table)


def _quantize(x: np.ndarray[Any, Any], s: pq.QuantScheme, table: Any) -> Oracle:
    if s.table not in (None, "custom"):
        from polyquant.tables import named_table

        table = named_table(s.table)
    x = np.asarray(x).astype(np.float32)
    x = np.asarray([flush(v) for v in x.reshape(-1)], np.float32).reshape(x.shape)
    grid, members = _blocks(x.shape, s)
    found = [[x[i] for i in members[b]] for b in np.ndindex(*grid)]
    lows, highs = zip(*(_range(vs, s) for vs in found), strict=True) if found else ((), ())
    ideal = [_ideal(lo, hi, s, table) for lo, hi in zip(lows, highs, strict=True)]
    scales, tensor_scale, divisors = _scales(ideal, s, grid)
    offsets, numbers = _offsets(lows, divisors, s, grid, table)
    codes, values = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32)
    for at, b in enumerate(np.ndindex(*grid)):
        for i in members[b]:
            codes[i] = _encode(x[i], divisors[at], numbers[at], s, table)
            values[i] = _decode(int(codes[i]), divisors[at], numbers[at], s, table)
    return Oracle(codes, scales, tensor_scale, offsets, values)


def _blocks(shape: Any, s: pq.QuantScheme) -> tuple[Any, dict[Any, list[Any]]]:
    """The grid and, for each of its places, the indices of the block's elements."""
    if s.view is not None:
        size, rest = math.prod(shape), math.prod(e for e in s.view if e != -1)
        laid = tuple(size // rest if e == -1 else e for e in s.view)
        grid, found = _blocks(laid, s._with(view=None))
        places = np.arange(size).reshape(laid)
        return grid, {
            b: [tuple(map(int, np.unravel_index(places[i], shape))) for i in members]
            for b, members in found.items()
        }
    if s.block is None:
        extents = [max(d, 1) for d in shape]
        grid = (1,) * len(shape)
    else:
        full = [1] * (len(shape) - len(s.block)) + list(s.block)
        extents = [max(d, 1) if b == -1 else b for d, b in zip(shape, full, strict=True)]
        grid = tuple(-(-d // b) for d, b in zip(shape, extents, strict=True))
    members: dict[Any, list[Any]] = {b: [] for b in np.ndindex(*grid)}
    for i in itertools.product(*map(range, shape)):
        members[tuple(k // e for k, e in zip(i, extents, strict=True))].append(i)
    return grid, members


def _range(values: list[Any], s: pq.QuantScheme) -> tuple[Any, Any]:
    if s.offset is None:
        alpha = max((abs(v) for v in values), default=F(0))
        return -alpha, alpha
    low, high = min(values, default=F(0)), max(values, default=F(0))
    if _subtracts(s):
        low = min(low, F(0))
    if s.offset.kind == "zero_point":
        low, high = min(low, F(0)), max(high, F(0))
    return low, high


def _subtracts(s: pq.QuantScheme) -> bool:
    """A bias of unsigned codes under a float scale is a minimum, which is subtracted."""
    if (
        s.offset is None
        or s.offset.kind != "bias"
        or not isinstance(s.offset.dtype, pq.QuantScheme)
    ):
        return False
    inner = s.offset.dtype
    is_plain = inner.mode == "symmetric" and inner.tensor_scale is None and inner.is_plain
    return is_plain and str(inner.value)[0] == "u" and inner.scale in ("f32", "f16", "bf16")


def _ideal(low: Any, high: Any, s: pq.QuantScheme, table: Any) -> Any:
    if s.offset is not None and s.mode == "lookup":
        entries = [float(v) for v in table]
        span = F(max(entries)) - F(min(entries))
        return flush(min(high - low, F(F32_MAX)) / (span if span > 0 else F(1)))
    if s.offset is not None:
        return flush(min(high - low, F(F32_MAX)) / F(2**s.bits - 1))
    if s.mode == "lookup":
        return flush(high / F(max(abs(flush(v)) for v in table)))
    return flush(high / F(_half(s)))


def _half(s: pq.QuantScheme) -> float:
    value = str(s.value)
    if value in TOPS:
        return TOPS[value]
    if value[0] == "u":
        return 2**s.bits - 1
    return (2**s.bits - 1) / 2 if value[2] == "f" else 2 ** (s.bits - 1) - 1


# -- scales and offsets -----------------------------------------------------------------------


@cache
def _finite(kind: str) -> tuple[list[float], np.ndarray[Any, Any]]:
    """The numbers >= 0 of a narrow type, ascending, without those that float32 calls subnormal."""
    dtype = np.dtype(NARROW[kind])
    raw = np.arange(2 ** (8 * dtype.itemsize - 1), dtype=f"u{dtype.itemsize}").view(dtype)
    wide = raw.astype(np.float64)
    keep = np.isfinite(wide) & ((wide == 0) | (wide >= TINY))
    return [float(v) for v in wide[keep]], raw[keep]


def _round_up(v: Any, kind: str) -> tuple[Any, float]:
    """What is stored, and the number that it stands for."""
    v = float(flush(v))
    if kind == "f32":
        return F(min(v, F32_MAX)), min(v, F32_MAX)
    if kind == "ue8m0":
        byte = next((b for b in range(255) if 2.0 ** (b - 127) >= v), 254)
        return np.uint8(byte), 2.0 ** (byte - 127)
    wide, stored = _finite(kind)
    at = min(bisect_left(wide, v), len(wide) - 1)
    found = stored[at]
    return (found.view(np.uint8) if kind == "ue4m3" else found), wide[at]


def _scales(ideal: list[Any], s: pq.QuantScheme, grid: Any) -> tuple[Any, Any, list[Any]]:
    """(stored scales, stored tensor scale, divisors); 2^-127 is kept as a Python float."""
    if isinstance(s.scale, pq.QuantScheme):
        inner = _quantize(np.asarray(ideal, np.float32).reshape(grid), s.scale, None)
        return inner, None, [flush(v) for v in inner.values.reshape(-1)]
    tensor_scale = None
    if s.tensor_scale is not None:
        top = {"f16": 65504.0, "ue4m3": 448.0}[s.scale]
        tensor_scale = F(min(max(max(ideal, default=F(0)) / F(top), F(TINY)), F(F32_MAX)))
        by = tensor_scale
        if s.role == "divisor":
            tensor_scale = F(1) / min(tensor_scale, F(1 / TINY))
            by = flush(F(1) / tensor_scale)
        elif s.role == "absmax":
            tensor_scale = flush(tensor_scale * F(_half(s) * top))
            by = flush(tensor_scale / F(_half(s) * top))
        ideal = [v / by for v in ideal]
    elif s.role == "divisor":
        return _divisors(ideal, s, grid)
    elif s.role == "absmax":
        ideal = [flush(v * F(_half(s))) for v in ideal]
    pairs = [_round_up(v, str(s.scale)) for v in ideal]
    storage = pq.ScaleDtype(s.scale).storage
    dtype = np.dtype(ml_dtypes.bfloat16 if storage == "bfloat16" else storage)
    stored = np.asarray([p[0] for p in pairs], dtype).reshape(grid)
    numbers = [p[1] for p in pairs]
    if tensor_scale is not None and s.role == "divisor":
        return stored, tensor_scale, [flush(F(v) / tensor_scale) for v in numbers]
    if tensor_scale is not None:
        return stored, tensor_scale, [flush(F(v) * by) for v in numbers]
    return stored, None, [v if v == 2.0**-127 else F(v) for v in numbers]


def _divisors(ideal: list[Any], s: pq.QuantScheme, grid: Any) -> tuple[Any, None, list[Any]]:
    """Stored reciprocals of one level, to nearest."""
    narrow = np.float32 if s.scale == "f32" else NARROW[str(s.scale)]
    top = float(ml_dtypes.finfo(narrow).max)
    wide = [F(1) / min(max(v, F(TINY)), F(1 / TINY)) for v in ideal]
    stored = np.clip(np.asarray(wide, np.float32), -top, top).astype(narrow)
    numbers = [flush(F(1) / flush(v)) for v in stored.astype(np.float32)]
    return stored.reshape(grid), None, numbers


def _offsets(
    lows: Any, divisors: list[Any], s: pq.QuantScheme, grid: Any, table: Any
) -> tuple[Any, list[Any]]:
    """(stored offsets, the numbers they stand for)."""
    if s.offset is None:
        return None, [None] * len(divisors)
    kind, dtype = s.offset
    ideal = list(lows)
    if kind == "zero_point":
        ideal = [
            F(0) if d == 0 else flush(F(float(-lo) / float(d)))
            for lo, d in zip(lows, divisors, strict=True)
        ]
    if s.mode == "lookup":
        least = F(min(float(v) for v in table))
        pairs = zip(lows, divisors, strict=True)
        ideal = [flush(low - flush(F(float(d) * float(least)))) for low, d in pairs]
    ideal = [F(0) if v == 0 else v for v in ideal]  # of 0 and -0 the minimum may be either
    if _subtracts(s):
        inner = _quantize(np.asarray([-v for v in ideal], np.float32).reshape(grid), dtype, None)
        inner = inner._replace(scales=-inner.scales)
        return inner, [flush(-v) for v in inner.values.reshape(-1)]
    if isinstance(dtype, pq.QuantScheme):
        inner = _quantize(np.asarray(ideal, np.float32).reshape(grid), dtype, None)
        return inner, [flush(v) for v in inner.values.reshape(-1)]
    if isinstance(dtype, pq.QuantValue):
        top = min(2**dtype.bits, 2**s.bits) - 1
        whole = [np.uint8(min(max(np.round(v), 0), top)) for v in ideal]
        return np.asarray(whole, np.uint8).reshape(grid), [F(v) for v in whole]
    narrow = np.float32 if dtype == "f32" else NARROW[dtype]
    top = float(ml_dtypes.finfo(narrow).max)
    clipped = np.clip(np.asarray(ideal, np.float32), -top, top)
    stored = clipped.astype(narrow)
    return stored.reshape(grid), [flush(v) for v in stored.astype(np.float32)]


# -- codes and values -------------------------------------------------------------------------


def _times_reciprocal(x: Any, divisor: Any) -> Any:
    """``x * (1 / divisor)``; a zero divisor gives a zero of the sign of ``x``."""
    if divisor == 0:
        return F(math.copysign(0.0, x))
    if divisor == 2.0**-127 and not isinstance(divisor, np.float32):
        return F(float(x) * 2.0**127)
    if divisor > F(2.0**126):
        divisor, x = divisor * F(2.0**-24), flush(x * F(2.0**-24))
    return flush(x * (F(1) / divisor))


def _encode(x: Any, divisor: Any, offset: Any, s: pq.QuantScheme, table: Any) -> int:
    if s.offset is not None and s.offset.kind == "bias":
        x = flush(x - offset)
    if s.role == "absmax" and s.tensor_scale is None:
        divisor = flush(divisor * (F(1) / F(_half(s))))
    t = _times_reciprocal(x, divisor)
    if s.mode == "lookup":
        return _nearest_entry(t, table)
    value = str(s.value)
    if value in TOPS:
        kept = F(min(max(t, -TOPS[value]), TOPS[value]))
        kept = F(math.copysign(kept, t))
        return int(np.asarray([kept]).astype(MINIFLOATS[value]).view(np.uint8)[0])
    if s.offset is not None and s.offset.kind == "zero_point":
        is_whole = isinstance(s.offset.dtype, pq.QuantValue)
        whole = np.round(t) + offset if is_whole else np.round(t + offset)
        return int(min(max(whole, 0), 2**s.bits - 1))
    half = 2 ** (s.bits - 1)
    low, high = (0, 2**s.bits - 1) if value[0] == "u" else (-half, half - 1)
    low += value[0] == "q" and value[2] == "s"
    return int(min(max(np.round(t), low), high)) & (2**s.bits - 1)


def _nearest_entry(t: Any, table: Any) -> int:
    """A tie takes the lower entry; of equal entries the lowest code."""
    entries = sorted({float(flush(v)) for v in table})
    middles = [flush(F((a + b) / 2)) for a, b in itertools.pairwise(entries)]
    number = entries[sum(1 for m in middles if m < t)]
    return next(code for code, v in enumerate(table) if float(flush(v)) == number)


def _decode(code: int, divisor: Any, offset: Any, s: pq.QuantScheme, table: Any) -> Any:
    value = str(s.value)
    if s.mode == "lookup":
        number = flush(table[code])
    elif value in TOPS:
        number = F(np.asarray([code], np.uint8).view(MINIFLOATS[value])[0])
    elif value[0] == "u":
        number = F(code)
    else:
        number = F(code - 2**s.bits if code >= 2 ** (s.bits - 1) else code)
    if s.offset is not None and s.offset.kind == "zero_point":
        number = number - offset
    product = flush(F(float(number) * float(divisor)))  # exact in float64, then one rounding
    if s.role == "absmax" and s.tensor_scale is None:
        product = flush(product * (F(1) / F(_half(s))))
    if s.offset is not None and s.offset.kind == "bias":
        return flush(product + offset)
    return product
