"""The definition: quantize, dequantize and matmul, written once for every array library.

This is the executable form of the numerical contract. It uses only the Python array API standard,
so it is the NumPy reference, the fallback of every other library, and what kernels are tested
against. Three habits keep it bit-identical under compilers that reorder or contract arithmetic:

- what must be a true division divides by an elementwise array (``divide``): XLA turns a division
  by a constant or a broadcast into a product with a reciprocal;
- where a sum follows an inexact product, ``flush`` stands between them, so that the two cannot
  become one fused multiply-add;
- numbers are rounded to narrow types by counting the grid points below them, not by casts or bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from polyquant.arithmetic import as_role
from polyquant.arithmetic import divide as divide
from polyquant.arithmetic import flush as flush
from polyquant.arithmetic import multiplier as multiplier
from polyquant.arithmetic import multiplier_slope as multiplier_slope
from polyquant.arithmetic import reach as reach
from polyquant.arithmetic import subtracts as subtracts
from polyquant.arrays import Array, backend_of, constant, dtype, known, namespace, place
from polyquant.blocks import Rows, blocks_of, merge, row_runs, split, spread
from polyquant.codec import pack, unpack
from polyquant.qtensor import QTensor, from_fields
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.tables import CUSTOM, named_table, steps
from polyquant.values import (
    TINY,
    QuantMode,
    QuantValue,
    ScaleDtype,
    ScaleRole,
    decode_table,
    scale_grid,
    scale_thresholds,
    thresholds,
)

#: Up to this many edges, comparing with each is quicker than a binary search (NumPy: 15 edges, 5x).
_FEW_EDGES = 31

_F32_MAX = float(np.finfo(np.float32).max)
#: A divisor above this has a subnormal reciprocal, so it and its numbers are scaled down first.
_BIG = 2.0**126
_DOWN = 2.0**-24


def reduce_blocks(x: Array, scheme: QuantScheme, kind: str, *, nonfinite: str) -> Array:
    """The maximum magnitude ("max_abs"), minimum ("min") or maximum ("max") of every block.

    ``x`` of any float dtype in stored order; returns float32 on the scale grid. With
    ``nonfinite="saturate"`` NaN and infinities do not count.
    """
    xp = namespace(x)
    blocks, grid_shape = blocks_of(scheme, x.shape), scheme.scale_shape(x.shape)
    x = xp.reshape(x, blocks.shape)
    fill = {"max_abs": 0.0, "min": math.inf, "max": -math.inf}[kind]
    found = []
    for run in row_runs(blocks, whole=_traced(x)):
        part = finite_f32(x[run.rows, ...], nonfinite=nonfinite, for_range=True)
        part = split(xp, xp.abs(part) if kind == "max_abs" else part, run.blocks, fill)
        axes = tuple(range(1, 2 * len(blocks.shape), 2))
        found.append((xp.min if kind == "min" else xp.max)(part, axis=axes))
    if len(found) > 1 and blocks.counts[0] > 1:
        result = xp.concat(found, axis=0)
    else:
        result = found[0]
        for other in found[1:]:
            result = (xp.minimum if kind == "min" else xp.maximum)(result, other)
    result = xp.where(xp.isfinite(result), result, 0.0 * xp.ones_like(result))  # empty blocks
    return xp.reshape(result, grid_shape)


def finite_f32(x: Array, *, nonfinite: str, for_range: bool) -> Array:
    """Widen or round ``x`` to float32, subnormals to zero; NaN and infinities as asked.

    "raise": as they are (the caller has checked). "saturate": NaN is 0, and an infinity is 0 when
    looking for a block's range, else the largest float32.
    """
    xp = namespace(x)
    x = xp.astype(x, xp.float32)
    if nonfinite == "saturate":
        zero = xp.zeros_like(x)
        if for_range:
            x = xp.where(xp.isfinite(x), x, zero)
        else:
            x = xp.clip(xp.where(xp.isnan(x), zero, x), -_F32_MAX, _F32_MAX)
    return flush(x)


# -- scales -----------------------------------------------------------------------------------


class Params(NamedTuple):
    """The stored parameters of a tensor: what a QTensor holds besides its codes."""

    scales: Array
    tensor_scale: Array | None
    offsets: Array | None
    table: Array | None
    groups: Array | None = None


def params_in(q: QTensor) -> Params:
    """The stored parameters of a tensor."""
    return Params(q.scales, q.tensor_scale, q.offsets, q.table, q.groups)


class Divisor(NamedTuple):
    """What decoded codes are multiplied by: ``value * half`` per block, float32 on the grid.

    ``half`` is None except for UE8M0, whose 2^-127 is not a normal float32: there ``value`` is
    2^-126 and ``half`` 0.5. ``after`` is a constant that the product is multiplied by in turn, of
    scales that are a maximum. ``groups`` says which column of the grid an element takes.
    """

    value: Array
    half: Array | None
    after: float | None = None
    groups: Array | None = None

    @property
    def whole(self) -> Array:
        """The three as one number a block."""
        number = self.value if self.half is None else self.value * self.half
        return number if self.after is None else flush(number * self.after)


def round_up(x: Array, kind: ScaleDtype) -> Array:
    """The smallest number of a scale type not below ``x >= 0`` (float32), saturating.

    Returns float32, or uint8 bytes for the 8-bit types.
    """
    xp = namespace(x)
    x = flush(x)
    if kind is ScaleDtype.F32:
        return xp.clip(x, 0.0, _F32_MAX)
    numbers = scale_grid(kind)
    index = _count_below(x, numbers)
    index = xp.clip(index, 0, len(numbers) - 1)
    if kind.storage == "uint8":
        return xp.astype(index, xp.uint8)
    return _take(index, numbers)


def store_scales(ideal: Array, scheme: QuantScheme) -> tuple[Array, Array | None]:
    """Round ideal scales (float32 grid) up to the scheme's scale type: (scales, tensor scale).

    Negative scales (calibration signed_max) are rounded away from zero. Quantized scales are
    quantized by this page themselves.
    """
    xp = namespace(ideal)
    if isinstance(scheme.scale, QuantScheme):
        return quantize_grid(ideal, scheme.scale), None
    tensor_scale = None
    if scheme.tensor_scale is not None:
        top = xp.max(ideal) if math.prod(ideal.shape) else xp.sum(ideal)
        tensor_scale = xp.clip(divide(top, scheme.scale.max), TINY, _F32_MAX)
        tensor_scale = as_role(tensor_scale, scheme)
        ideal = divide(ideal, multiplier(tensor_scale, scheme))
        return as_stored(ideal, scheme.scale), tensor_scale
    if scheme.role is ScaleRole.DIVISOR:
        return nearest(as_role(ideal, scheme), scheme.scale), None
    return as_stored(as_role(ideal, scheme), scheme.scale), None


def as_stored(ideal: Array, kind: ScaleDtype) -> Array:
    """Scales rounded up in magnitude, in the storage dtype of their type."""
    xp = namespace(ideal)
    if kind.storage == "uint8":
        return round_up(ideal, kind)
    rounded = round_up(xp.abs(ideal), kind)
    signed = xp.where(ideal < 0, -rounded, rounded)
    return xp.astype(signed, dtype(xp, kind.storage))


def divisor(scheme: QuantScheme, params: Params) -> Divisor:
    """What decoded codes are multiplied by, from what is stored."""
    return _divisor(scheme, params)._replace(groups=params.groups)


def _divisor(scheme: QuantScheme, params: Params) -> Divisor:
    """The effective divisor of every block from the stored scales."""
    scales = params.scales
    if isinstance(scales, QTensor):
        return Divisor(flush(dequantize(scales, None)), None)
    xp = namespace(scales)
    if scheme.scale is ScaleDtype.UE8M0:
        numbers = np.concatenate([[TINY], scale_grid(ScaleDtype.UE8M0)[1:], [np.nan]])
        numbers = numbers.astype(np.float32)
        is_zero = scales == 0
        if known(xp.any(is_zero)) is False:
            return Divisor(_take(scales, numbers), None)
        ones = xp.ones(scales.shape, dtype=xp.float32, **place(scales))
        return Divisor(_take(scales, numbers), xp.where(is_zero, 0.5 * ones, ones))
    if scheme.scale is ScaleDtype.UE4M3:
        value = _take(scales, decode_table(QuantValue.E4M3))
    else:
        value = flush(xp.astype(scales, xp.float32))
    if params.tensor_scale is not None:
        if scheme.role is ScaleRole.DIVISOR:  # one rounding, not that of a reciprocal too
            value = flush(divide(value, params.tensor_scale))
        else:
            value = flush(value * multiplier(params.tensor_scale, scheme))
    elif scheme.role is ScaleRole.DIVISOR:
        value = flush(divide(xp.ones_like(value), value))
    elif scheme.role is ScaleRole.ABSMAX:
        return Divisor(value, None, float(np.float32(1) / np.float32(reach(scheme))))
    return Divisor(value, None)


def ideal_scale(scheme: QuantScheme, low: Array, high: Array, table: Array | None) -> Array:
    """The scale that covers ``low..high`` (float32 grids), before any rounding."""
    xp = namespace(low)
    if scheme.mode is QuantMode.AFFINE:
        width = xp.clip(high - low, 0.0, _F32_MAX)  # the ends can be further apart than float32 is
        return flush(divide(width, float(2**scheme.bits - 1)))
    if scheme.offset is not None:  # a bias under a table: its ends are the range's
        width = xp.clip(high - low, 0.0, _F32_MAX)
        return flush(divide(width, _span(table)))
    alpha = xp.maximum(xp.abs(low), xp.abs(high))
    if scheme.mode is QuantMode.LOOKUP:
        return flush(divide(alpha, xp.max(xp.abs(table))))
    return flush(divide(alpha, scheme.value.half_range))


def _span(table: Array) -> Array:
    """The largest minus the smallest entry; 1 where all are one."""
    xp = namespace(table)
    span = xp.max(table) - xp.min(table)
    return xp.where(span > 0, span, xp.ones_like(span))


def store_offsets(
    scheme: QuantScheme, low: Array, scale: Divisor, table: Array | None
) -> Array | None:
    """The stored offsets for blocks whose lowest value is ``low``: to nearest, saturated."""
    if scheme.offset is None:
        return None
    kind, stored = scheme.offset
    xp = namespace(low)
    if kind is OffsetKind.BIAS:
        number = low
        if table is not None and scheme.mode is QuantMode.LOOKUP:
            number = flush(low - flush(scale.value * xp.min(table)))
    else:
        empty = scale.value == 0
        number = divide(-low, xp.where(empty, xp.ones_like(scale.value), scale.value))
        if scale.half is not None:  # value * half would be subnormal, and its product is exact
            number = number * divide(xp.ones_like(scale.half), scale.half)
        number = xp.where(empty, xp.zeros_like(number), flush(number))
    # Of 0 and -0 libraries pick either as the minimum, so a zero offset is +0 by definition.
    number = xp.where(number == 0, xp.zeros_like(number), number)
    if isinstance(stored, QuantScheme):
        return quantize_offsets(number, scheme, stored)
    if isinstance(stored, QuantValue):
        top = min(2**stored.bits, 2**scheme.bits) - 1
        return xp.astype(xp.clip(xp.round(number), 0, top), xp.uint8)
    return nearest(number, stored)


def quantize_offsets(numbers: Array, scheme: QuantScheme, stored: QuantScheme) -> QTensor:
    """Biases (finite float32 on their grid) as a QTensor of their own."""
    if not subtracts(scheme):
        return quantize_grid(numbers, stored)
    made = quantize_grid(-numbers, stored)
    return made._replace(scales=-made.scales)


def nearest(x: Array, kind: ScaleDtype) -> Array:
    """Numbers rounded to nearest even onto a float scale type, saturating, in its storage dtype."""
    xp = namespace(x)
    limited = xp.clip(x, -kind.max, kind.max)
    if kind is not ScaleDtype.F32:
        index = _count_below(xp.abs(limited), scale_thresholds(kind))
        magnitude = _take(index, scale_grid(kind))
        limited = xp.where(limited < 0, -magnitude, magnitude)
    return xp.astype(limited, dtype(xp, kind.storage))


def params_of(scheme: QuantScheme, ideal: Array, low: Array | None, table: Array | None) -> Params:
    """The stored parameters for ideal scales and, where there is an offset, the lowest values."""
    scales, tensor_scale = store_scales(ideal, scheme)
    made = Params(scales, tensor_scale, None, table)
    if scheme.offset is None or low is None:
        return made
    return made._replace(offsets=store_offsets(scheme, low, divisor(scheme, made), table))


def minmax(x: Array, scheme: QuantScheme, table: Array | None, *, nonfinite: str) -> Params:
    """The parameters that cover every value of every block: the default calibration."""
    low, high = value_range(x, scheme, nonfinite=nonfinite)
    return params_of(scheme, ideal_scale(scheme, low, high, table), low, table)


def value_range(x: Array, scheme: QuantScheme, *, nonfinite: str) -> tuple[Array, Array]:
    """Lowest and highest value of every block; ``-alpha, alpha`` where only magnitude counts.

    A zero point must be able to stand for 0, so its range is widened to hold it.
    """
    if scheme.offset is None:
        alpha = reduce_blocks(x, scheme, "max_abs", nonfinite=nonfinite)
        return -alpha, alpha
    low = reduce_blocks(x, scheme, "min", nonfinite=nonfinite)
    high = reduce_blocks(x, scheme, "max", nonfinite=nonfinite)
    return widen(scheme, low, high)


def widen(scheme: QuantScheme, low: Array, high: Array) -> tuple[Array, Array]:
    """``low..high`` widened to hold 0 where the scheme has a zero point, or biases up to 0."""
    xp = namespace(low)
    if subtracts(scheme):
        return xp.minimum(low, xp.zeros_like(low)), high
    if scheme.offset is None or scheme.offset.kind is OffsetKind.BIAS:
        return low, high
    return xp.minimum(low, xp.zeros_like(low)), xp.maximum(high, xp.zeros_like(high))


def quantize_grid(numbers: Array, scheme: QuantScheme) -> QTensor:
    """Scales or offsets (finite float32 on their grid) as a QTensor of their own, by minmax."""
    params = minmax(numbers, scheme, named_constant(numbers, scheme), nonfinite="raise")
    return quantize(numbers, scheme, params, nonfinite="raise")


def named_constant(like: Array, scheme: QuantScheme) -> Array | None:
    """The named table of a scheme as an array beside ``like``, or None."""
    if scheme.table is None or scheme.table == CUSTOM:
        return None
    kept = backend_of(like).functions.get("named_table")
    return kept(scheme.table, like) if kept else constant(like, named_table(scheme.table).copy())


# -- codes ------------------------------------------------------------------------------------


def quantize(x: Array, scheme: QuantScheme, params: Params, *, nonfinite: str) -> QTensor:
    """Encode ``x`` (any float dtype) with stored parameters on its own library and device.

    ``t = x * (1 / divisor)``, rounded to the nearest code. The axes are stored as they come.
    """
    xp = namespace(x)
    blocks = blocks_of(scheme, x.shape)
    flat = xp.reshape(x, blocks.shape)
    scale = divisor(scheme, params)
    offsets = None if params.offsets is None else offset_numbers(params.offsets)
    runs = []
    for run in row_runs(blocks, whole=_traced(x)):
        part = finite_f32(flat[run.rows, ...], nonfinite=nonfinite, for_range=False)
        fields = encode(split(xp, part, run.blocks), scheme, scale, offsets, params.table, run)
        fields = merge(xp, fields, run.blocks)
        whole_lines = len(blocks.shape) > 1
        runs.append(pack(xp, fields, scheme.value, scheme.store) if whole_lines else fields)
    data = _join(xp, runs)
    if len(blocks.shape) == 1:
        data = pack(xp, data, scheme.value, scheme.store)
    axes, device = tuple(range(len(x.shape))), backend_of(x).device_of(x)
    parts = (params.scales, params.tensor_scale, params.offsets, params.table)
    return from_fields(scheme, tuple(x.shape), data, *parts, axes, device)


def offset_numbers(offsets: Array) -> Array:
    """Stored offsets as float32 numbers on the grid."""
    if isinstance(offsets, QTensor):
        return dequantize(offsets, None)
    xp = namespace(offsets)
    return flush(xp.astype(offsets, xp.float32))


def encode(
    x: Array,
    scheme: QuantScheme,
    scale: Divisor,
    offsets: Array | None,
    table: Array | None,
    run: Rows,
) -> Array:
    """Codes of split values as unsigned fields (uint8)."""
    xp = namespace(x)
    zero = None
    if scheme.offset is not None and offsets is not None:
        here = spread(xp, _grid_rows(xp, offsets, run, scale.groups), run.blocks)
        if scheme.offset.kind is OffsetKind.BIAS:
            x = flush(x - here)
        else:
            zero = here
    t = _scaled(xp, x, scale, run)
    if table is not None and scheme.mode is QuantMode.LOOKUP:
        return _encode_lookup(xp, t, scheme, table)
    if scheme.value.is_float:
        sign = xp.astype(xp.signbit(t), xp.uint8) << (scheme.bits - 1)
        index = _count_below(xp.abs(t), thresholds(scheme.value))
        return xp.astype(index, xp.uint8) | sign
    if zero is None:
        codes = xp.round(t)
    elif isinstance(scheme.offset and scheme.offset.dtype, QuantValue):
        codes = xp.round(t) + zero
    else:
        codes = xp.round(flush(t) + zero)
    codes = xp.clip(codes, *scheme.value.range)
    return xp.astype(xp.astype(codes, xp.int16) & (2**scheme.bits - 1), xp.uint8)


def _scaled(xp: Any, x: Array, scale: Divisor, run: Rows) -> Array:
    """``x / divisor`` as the contract has it: one reciprocal per block, one product per value."""
    value = _grid_rows(xp, scale.value, run, scale.groups)
    if scale.after is not None:
        value = flush(value * scale.after)
    big = xp.abs(value) > _BIG
    before = None
    if known(xp.any(big)) is not False:
        ones = xp.ones_like(value)
        before = xp.where(big, _DOWN * ones, ones)
        value = value * before
    if scale.half is not None:
        up = divide(xp.ones_like(value), _grid_rows(xp, scale.half, run))
        before = up if before is None else before * up
    empty = value == 0
    ones = xp.ones_like(value)
    reciprocal = xp.where(empty, xp.zeros_like(value), divide(ones, xp.where(empty, ones, value)))
    if before is not None:
        x = x * spread(xp, before, run.blocks)
    return x * spread(xp, reciprocal, run.blocks)


def _encode_lookup(xp: Any, t: Array, scheme: QuantScheme, table: Array) -> Array:
    if scheme.table == CUSTOM and _traced(table):
        return _encode_traced_table(xp, t, table)
    is_custom = scheme.table == CUSTOM
    host = backend_of(table).to_host(table) if is_custom else named_table(str(scheme.table))
    middle, codes = steps(host)
    if not middle.all():  # a step at zero sees whether a library flushed a subnormal product
        t = flush(t)
    return _take(_count_below(t, middle), codes)


def _encode_traced_table(xp: Any, t: Array, table: Array) -> Array:
    """The nearest entry of a table that cannot be looked at: sort it where it is."""
    table = flush(table)
    order = xp.argsort(table, stable=True)
    numbers = xp.take(table, order)
    middle = flush(numbers[:-1] * 0.5 + numbers[1:] * 0.5)
    flat = xp.reshape(flush(t), (-1,))
    index = xp.searchsorted(middle, flat, side="left")
    # Of equal entries the lowest code, which the stable order puts first.
    index = xp.searchsorted(numbers, xp.take(numbers, index), side="left")
    return xp.astype(xp.reshape(xp.take(order, index), t.shape), xp.uint8)


# -- values -----------------------------------------------------------------------------------


def dequantize(q: QTensor, kind: Any) -> Array:
    """``decode(code) * divisor (+ bias)`` in float32, then one rounding to the dtype asked for.

    ``kind``: a dtype of the library, or None for float32. In logical order.
    """
    xp = namespace(q.data)
    runs = [values if kind is None else xp.astype(values, kind) for _, values in decoded_runs(q)]
    return q.to_logical(xp.reshape(_join(xp, runs), q.stored_shape))


def decoded_runs(q: QTensor) -> Iterator[tuple[Rows, Array]]:
    """Run by run of rows, in stored order: where it lies, and its values (float32)."""
    xp, blocks = namespace(q.data), blocks_of(q.scheme, q.stored_shape)
    scale = divisor(q.scheme, params_in(q))
    offsets = None if q.offsets is None else offset_numbers(q.offsets)
    data = xp.reshape(q.data, (*blocks.shape[:-1], q.data.shape[-1]))
    length, value, store = blocks.shape[-1], q.scheme.value, q.scheme.store
    one_line = unpack(xp, data, length, value, store) if len(blocks.shape) == 1 else None
    for run in row_runs(blocks, whole=_traced(q.data)):
        if one_line is None:
            fields = unpack(xp, data[run.rows, ...], length, value, store)
        else:
            fields = one_line[run.rows]
        fields = split(xp, fields, run.blocks)
        values = decode(fields, q.scheme, scale, offsets, q.table, run)
        yield run, merge(xp, values, run.blocks)


def decode(
    fields: Array,
    scheme: QuantScheme,
    scale: Divisor,
    offsets: Array | None,
    table: Array | None,
    run: Rows,
) -> Array:
    """Values (float32) of split fields: the inverse of ``encode``."""
    xp = namespace(fields)
    values = _numbers(fields, scheme, table)
    groups = scale.groups
    zero = None if offsets is None else spread(xp, _grid_rows(xp, offsets, run, groups), run.blocks)
    is_bias = scheme.offset is not None and scheme.offset.kind is OffsetKind.BIAS
    if zero is not None and not is_bias:
        values = values - zero
    if scale.half is not None:
        values = values * spread(xp, _grid_rows(xp, scale.half, run), run.blocks)
    values = flush(values * spread(xp, _grid_rows(xp, scale.value, run, groups), run.blocks))
    if scale.after is not None:
        values = flush(values * scale.after)
    return flush(values + zero) if zero is not None and is_bias else values


def _numbers(fields: Array, scheme: QuantScheme, table: Array | None) -> Array:
    """Unsigned fields (uint8) as the float32 numbers that they stand for, before any scale."""
    xp = namespace(fields)
    if scheme.mode is QuantMode.LOOKUP and table is not None:
        return _take_array(fields, flush(table))
    if scheme.value.is_float:
        return _take(fields, decode_table(scheme.value))
    if not scheme.value.is_signed:
        return xp.astype(fields, xp.float32)
    sign = 2 ** (scheme.bits - 1)
    return xp.astype((xp.astype(fields, xp.int16) ^ sign) - sign, xp.float32)


# -- products ---------------------------------------------------------------------------------


def matmul(a: Array, b: Array, kind: Any) -> Array:
    """The product of the dequantized operands, accumulated in float32 (float64 for float64).

    ``kind``: the library's dtype of the result.
    """
    first = a if not isinstance(a, QTensor) else b
    xp = namespace(a.data if isinstance(first, QTensor) else first)
    wide = xp.float64 if any(_is_f64(xp, side) for side in (a, b)) else xp.float32

    def entering(side: Array) -> Array:
        return dequantize(side, wide) if isinstance(side, QTensor) else xp.astype(side, wide)

    left = entering(a)
    multiply = backend_of(left).functions.get("matmul", xp.matmul)
    return xp.astype(multiply(left, entering(b)), kind)


def _is_f64(xp: Any, side: Array) -> bool:
    return not isinstance(side, QTensor) and bool(side.dtype == xp.float64)


# -- small pieces -----------------------------------------------------------------------------


def _join(xp: Any, runs: list[Array]) -> Array:
    return runs[0] if len(runs) == 1 else xp.concat(runs, axis=0)


def _traced(x: Array) -> bool:
    return backend_of(x).is_traced(x)


def _grid_rows(xp: Any, values: Array, run: Rows, groups: Array | None = None) -> Array:
    """The grid's rows that a run of the tensor's rows has; of its columns those of the groups."""
    shape = (*values.shape,) or (1,)
    if groups is not None and len(shape) == 1:  # the rows are the elements
        return xp.take(values, groups[run.rows], axis=0)
    rows = xp.reshape(values, shape)[run.grid_rows, ...]
    return rows if groups is None else xp.take(rows, groups, axis=-1)


def _count_below(x: Array, edges: np.ndarray[Any, Any]) -> Array:
    """For every ``x`` how many of the ascending ``edges`` lie strictly below it."""
    xp = namespace(x)
    if len(edges) <= _FEW_EDGES:
        count = xp.zeros(x.shape, dtype=xp.uint8, **place(x))
        for edge in edges:
            count = count + xp.astype(x > float(edge), xp.uint8)
        return count
    found = xp.searchsorted(constant(x, edges.copy()), _indices(x), side="left")
    return xp.reshape(found, x.shape)


def _take(index: Array, numbers: np.ndarray[Any, Any]) -> Array:
    return _take_array(index, constant(index, numbers.copy()))


def _take_array(index: Array, numbers: Array) -> Array:
    xp = namespace(index)
    return xp.reshape(xp.take(numbers, xp.astype(_indices(index), xp.int32)), index.shape)


def _indices(x: Array) -> Array:
    """``x`` as take and searchsorted want it: flat, where the library has no more than that."""
    return x if backend_of(x).any_rank else namespace(x).reshape(x, (-1,))
