"""Moves of a tensor's axes: the codes, and with them the scales and offsets of every level."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from polyquant.arrays import Array, namespace
from polyquant.blocks import Blocks
from polyquant.data import check_axes
from polyquant.errors import LayoutRefused
from polyquant.qtensor import QTensor, from_fields
from polyquant.scheme import Offset, QuantScheme
from polyquant.values import ScaleDtype
from polyquant.views.codes import fields, moved_codes, packed
from polyquant.views.moves import Flat, Move, Shape, Table, changes_nothing, cut, reblock, simplest


def permuted(q: QTensor, order: Sequence[int]) -> QTensor:
    """The same stored arrays, with the logical axes in another order."""
    check_axes(order, q.shape)
    return _relabelled(q, tuple(q.axes[axis] for axis in order))


def along(q: QTensor, axis: int, move: Move) -> QTensor:
    """Apply a move to the logical axes from ``axis`` on; the others stay where they are."""
    if changes_nothing(move):
        return q
    q = unviewed(q)
    count = len(move.inner)
    at = q.axes[axis] if axis < q.ndim else max(q.ndim - 1, 0)  # a new axis is never the packed one
    if q.axes[axis : axis + count] != tuple(range(at, at + count)):
        q, at = in_order(q), axis
    made = _moved(q, at, move)
    shift = len(move.outer) - count
    axes = [a if a < at else a + shift for a in q.axes]
    axes[axis : axis + count] = range(at, at + len(move.outer))
    return _relabelled(made, tuple(axes))


def in_order(q: QTensor) -> QTensor:
    """The same tensor with its codes stored in logical order: moves the codes if they are not."""
    if q.axes == tuple(range(q.ndim)):
        return q
    q = ungrouped(unviewed(q))
    xp, axes, last = namespace(q.data), q.axes, q.ndim - 1
    if axes[last] == last:
        data = xp.permute_dims(q.data, axes)
    else:
        data = packed(xp.permute_dims(fields(q), axes), q.scheme)

    def turned(grid: Any) -> Any:
        if isinstance(grid, QTensor):
            return in_order(permuted(grid, axes))
        return None if grid is None else xp.permute_dims(grid, axes)

    tokens = block_tokens(q.scheme, q.ndim)
    block = None if tokens is None else tuple(tokens[axis] for axis in axes)
    return remade(q, q.shape, data, block, turned(q.scales), turned(q.offsets))


def unviewed(q: QTensor) -> QTensor:
    """The same numbers and order of axes under blocks of the tensor itself, not of a view."""
    if q.scheme.view is None:
        return q
    stored, laid = q.stored_shape, q.scheme.laid(q.stored_shape)
    parts = (q.data, q.scales, q.tensor_scale, q.offsets, q.table)
    order = tuple(range(len(laid)))
    inner = from_fields(_without_view(q.scheme), laid, *parts, order, q.device)
    return _relabelled(_moved(inner, 0, Flat(laid, stored)), q.axes)


def ungrouped(q: QTensor) -> QTensor:
    """The same numbers and order of axes with a scale for each element along the last axis."""
    if q.groups is None:
        return q
    xp, block = namespace(q.data), block_tokens(q.scheme, q.ndim)
    grids = [None if g is None else xp.take(g, q.groups, axis=-1) for g in (q.scales, q.offsets)]
    s = q.scheme
    scheme = _scheme_of(s, (*(block or ())[:-1], 1), s.scale, s.offset)
    parts = (q.data, grids[0], q.tensor_scale, grids[1], q.table)
    return from_fields(scheme, q.shape, *parts, q.axes, q.device)


def _without_view(s: QuantScheme) -> QuantScheme:
    return _scheme_of(s, s.block, s.scale, s.offset)


def smaller_blocks(q: QTensor, axis: int, extent: int) -> QTensor:
    """The same numbers under blocks that are ``extent`` long along a stored axis.

    ``extent`` divides that of the blocks so far, whose scales and offsets are repeated.
    """
    shape, tokens = q.stored_shape, block_tokens(q.scheme, q.ndim) or ()
    old = cut(tokens[axis], shape[axis])
    first = np.arange(0, shape[axis], extent) // old
    on_grid = simplest((-(-shape[axis] // old),), first)
    scales, offsets = (moved_grid(grid, axis, on_grid) for grid in (q.scales, q.offsets))
    block = (*tokens[:axis], extent, *tokens[axis + 1 :])
    return _relabelled(remade(q, shape, q.data, block, scales, offsets), q.axes)


def stored_like(q: QTensor, axes: Shape) -> QTensor:
    """The same tensor with its axes stored in that order."""
    if q.axes == axes:
        return q
    backwards = sorted(range(q.ndim), key=lambda axis: axes[axis])
    return permuted(in_order(permuted(q, backwards)), axes)


def moved_grid(grid: Any, at: int, move: Move) -> Any:
    """Scales or offsets, as an array or a tensor, with the axes from ``at`` on moved."""
    if isinstance(grid, QTensor):
        return _moved(grid, at, move)
    return None if grid is None else move.of(grid, at)


def block_tokens(scheme: QuantScheme, rank: int) -> Shape | None:
    """What the scheme writes for each stored axis (-1: whole), or None for the whole tensor."""
    block = scheme.block
    return None if block is None else (1,) * (rank - len(block)) + block


def remade(
    q: QTensor, shape: Shape, data: Array, block: Shape | None, scales: Any, offsets: Any
) -> QTensor:
    """``q`` with other codes, blocks, scales and offsets, in stored order."""
    scheme = _scheme_with(q.scheme, block, scales, offsets)
    order = tuple(range(len(shape)))
    parts = (data, scales, q.tensor_scale, offsets, q.table)
    return from_fields(scheme, shape, *parts, order, q.device, q.groups)


def _moved(q: QTensor, at: int, move: Move) -> QTensor:
    """Apply a move to the stored axes from ``at`` on; the result is in stored order."""
    shape, end = q.stored_shape, at + len(move.inner)
    if end == len(shape):
        q = ungrouped(q)
    made = (*shape[:at], *move.outer, *shape[end:])
    tokens = block_tokens(q.scheme, len(shape))
    block: Shape | None = None
    on_grid: Move = Flat((1,) * len(move.inner), (1,) * len(move.outer))
    if tokens is not None:
        here = (shape[at:end], tuple(map(cut, tokens[at:end], shape[at:end])))
        blocks = Blocks(*here, q.scheme.scale_shape(shape)[at:end])
        if isinstance(move, Table) and move.is_traced:
            _check_traced(q, blocks)
        inner, on_grid = reblock(blocks, tokens[at:end], move)
        block = (*tokens[:at], *inner, *tokens[end:]) or _no_axes_left(q)
    data = moved_codes(q, at, move)
    scales, offsets = (moved_grid(grid, at, on_grid) for grid in (q.scales, q.offsets))
    return remade(q, made, data, block, scales, offsets)


def _check_traced(q: QTensor, blocks: Blocks) -> None:
    """Refuse an index without values where blocks depend on it. Raises LayoutRefused."""
    if any(n > 1 for n in blocks.counts) and any(extent > 1 for extent in blocks.extents):
        reason = "the new blocks depend on the values of the index, which a tracer hides"
        fix = "Index q.dequantize(), an axis without blocks, or with an index known before"
        raise LayoutRefused(scheme=str(q.scheme), shape=q.shape, reason=reason, fix=fix)


def _no_axes_left(q: QTensor) -> Shape | None:
    """The block of a tensor without axes. Raises LayoutRefused where two levels need one."""
    if q.scheme.tensor_scale is not None:
        reason = "a single number has no blocks, and a scheme with a tensor scale needs them"
        fix = "Keep an axis, e.g. q[0:1], or take the number from q.dequantize()"
        raise LayoutRefused(scheme=str(q.scheme), shape=q.shape, reason=reason, fix=fix)
    return None


def _relabelled(q: QTensor, axes: Shape) -> QTensor:
    """``q`` with another order of its stored axes: logical axis ``i`` is stored ``axes[i]``."""
    stored = q.stored_shape
    parts = (q.data, q.scales, q.tensor_scale, q.offsets, q.table)
    shape = tuple(stored[a] for a in axes)
    return from_fields(q.scheme, shape, *parts, axes, q.device, q.groups)


def _scheme_with(s: QuantScheme, block: Shape | None, scales: Any, offsets: Any) -> QuantScheme:
    """The scheme with another block, and with the schemes that quantized scales have now."""
    if s.grouped:  # moved along other axes than the map's
        return s._with(block=block)
    scale = scales.scheme if isinstance(scales, QTensor) else s.scale
    offset = s.offset
    if offset is not None and isinstance(offsets, QTensor):
        offset = Offset(offset.kind, offsets.scheme)
    return _scheme_of(s, block, scale, offset)


@lru_cache(maxsize=512)
def _scheme_of(
    s: QuantScheme, block: Shape | None, scale: ScaleDtype | QuantScheme, offset: Offset | None
) -> QuantScheme:
    return QuantScheme(
        f"{s.value}[{s.table}]" if s.table else s.value,
        mode=s.mode,
        block=block,
        scale=scale,
        tensor_scale=s.tensor_scale,
        offset=offset,
        store=s.store,
        role=s.role,
    )
