"""Parts of axes, in any order: narrow, chunk, split, take, gather, repeat, tile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from polyquant.arrays import namespace
from polyquant.errors import InvalidArgument, InvalidIndex, ShapeMismatch
from polyquant.qtensor import QTensor
from polyquant.views.arguments import (
    Picks,
    axis_of,
    check_tensor,
    index_array,
    is_mask,
    picks,
    several,
    whole,
)
from polyquant.views.indexing import positions_of
from polyquant.views.moves import Run, simplest
from polyquant.views.moving import along, permuted
from polyquant.views.shape import unsqueeze


def narrow(q: QTensor, axis: int, start: int, length: int) -> QTensor:
    """``length`` elements of an axis from ``start`` on (counted from the end if negative).

    Cost: that of a slice: see ``index``.

    Raises InvalidAxes, InvalidArgument, InvalidIndex.
    """
    check_tensor("narrow", q)
    axis = axis_of(q, axis)
    extent, length = q.shape[axis], whole("length", length)
    start = whole("start", start, least=-extent)
    first = start + extent if start < 0 else start
    if first + length > extent:
        reason = f"axis {axis} has {extent} entries"
        raise InvalidIndex(index=slice(start, first + length), shape=q.shape, reason=reason)
    return along(q, axis, Run(extent, first if length else 0, 1, length))


def chunk(q: QTensor, chunks: int, axis: int = 0) -> tuple[QTensor, ...]:
    """At most ``chunks`` equal parts along an axis, the last may be short (torch.chunk).

    Cost: that of slices: see ``index``. Raises InvalidAxes, InvalidArgument.
    """
    check_tensor("chunk", q)
    count, extent = whole("chunks", chunks, least=1), q.shape[axis_of(q, axis)]
    return split(q, -(-extent // count) if extent else [0] * count, axis)


def split(q: QTensor, sizes: int | Sequence[int], axis: int = 0) -> tuple[QTensor, ...]:
    """Parts of a size along an axis, the last may be short; or parts of those sizes.

    Cost: that of slices: see ``index``. Raises InvalidAxes, InvalidArgument.
    """
    check_tensor("split", q)
    axis = axis_of(q, axis)
    extent = q.shape[axis]
    if isinstance(sizes, Sequence):
        lengths = several("sizes", sizes)
    else:
        size = whole("sizes", sizes, least=1)
        lengths = tuple(min(size, extent - at) for at in range(0, extent, size)) or (0,)
    if sum(lengths) != extent:
        wanted = f"sizes that sum up to the {extent} entries of axis {axis}"
        raise InvalidArgument(name="sizes", wanted=wanted, got=sizes)
    starts = accumulate(lengths, initial=0)
    return tuple(narrow(q, axis, at, n) for at, n in zip(starts, lengths, strict=False))


def take(q: QTensor, indices: Any, axis: int) -> QTensor:
    """The entries of an axis at integer indices of any rank, whose axes take its place.

    Cost: a copy of the codes that are taken (evenly spaced indices, known beforehand, are a slice).
    Along an axis of blocks each run of indices that stays in a block can share a scale.

    Raises InvalidAxes, InvalidIndex, BackendMismatch, DeviceMismatch, LayoutRefused.
    """
    check_tensor("take", q)
    axis = axis_of(q, axis)
    found = picks(q, _integers(q, indices), axis)
    return along(q, axis, positions_of([found], q.shape[axis : axis + 1]))


def select(q: QTensor, axis: int, indices: Any) -> QTensor:
    """``take`` with its arguments in another order."""
    return take(q, indices, axis)


def gather(q: QTensor, indices: Any, axis: int) -> QTensor:
    """Entry by entry along an axis: ``result[i, j] = q[indices[i, j], j]`` for axis 0.

    ``indices`` has the rank of ``q``. Where its other extents differ from those of ``q``, it is as
    the tensor's library has it: torch.gather takes the first entries of ``q``, and
    numpy.take_along_axis broadcasts.

    Cost: a copy of the codes; blocks as in ``take``, along every axis. Where the index is traced,
    blocks must all be of one element, or one for the whole tensor.

    Raises InvalidAxes, InvalidIndex, ShapeMismatch, BackendMismatch, DeviceMismatch, LayoutRefused.
    """
    check_tensor("gather", q)
    axis = axis_of(q, axis)
    array = _integers(q, indices)
    _check_gather(q, tuple(array.shape), axis)
    # In the order in which the axes are stored, so that no code is moved before it is picked.
    order = sorted(range(q.ndim), key=lambda a: q.axes[a])
    turned = permuted(q, order)
    array = namespace(array).permute_dims(array, tuple(order))
    parts = []
    for other, (n, m) in enumerate(zip(array.shape, turned.shape, strict=True)):
        if order[other] == axis:
            parts.append(picks(turned, array, other))
            continue
        own = np.arange(n if _is_torch(q) else m)
        parts.append(Picks(own.reshape((-1, *(1,) * (q.ndim - 1 - other))), False))
    return permuted(along(turned, 0, positions_of(parts, turned.shape)), q.axes)


def _check_gather(q: QTensor, shape: tuple[int, ...], axis: int) -> None:
    """Raise ShapeMismatch unless indices of that shape fit ``q``."""
    reason = None
    if len(shape) != q.ndim:
        reason = "the indices need as many axes as the tensor"
    for other, (n, m) in enumerate(zip(shape, q.shape, strict=False)):
        fits = n <= m if _is_torch(q) else n == m or 1 in (n, m)
        if other != axis and not fits:
            reason = f"the indices have {n} entries along axis {other}, and the tensor has {m}"
    if reason is not None:
        raise ShapeMismatch(op="gather", left=q.shape, right=shape, reason=reason)


def _is_torch(q: QTensor) -> bool:
    return q.device.startswith("torch")


def repeat(q: QTensor, repeats: int | Sequence[int], axis: int) -> QTensor:
    """Every entry of an axis ``repeats`` times, or each as often as is said for it (np.repeat).

    Cost: a copy of the codes. Blocks as in ``take``.

    Raises InvalidAxes, InvalidArgument.
    """
    check_tensor("repeat", q)
    axis = axis_of(q, axis)
    extent = q.shape[axis]
    given = repeats.tolist() if isinstance(repeats, np.ndarray) else repeats
    counts = several("repeats", given)
    if len(counts) not in (1, extent):
        wanted = f"a number, or one for each of the {extent} entries of axis {axis}"
        raise InvalidArgument(name="repeats", wanted=wanted, got=repeats)
    return along(q, axis, simplest((extent,), np.repeat(np.arange(extent), counts)))


def tile(q: QTensor, reps: int | Sequence[int]) -> QTensor:
    """The whole tensor beside itself, ``reps`` times along each of the last axes (np.tile).

    Cost: a copy of the codes. An axis that its blocks do not divide gets smaller ones.

    Raises InvalidArgument.
    """
    check_tensor("tile", q)
    counts = several("reps", reps)
    while q.ndim < len(counts):
        q = unsqueeze(q, 0)
    for axis, count in enumerate((*(1,) * (q.ndim - len(counts)), *counts)):
        if count != 1:
            extent = q.shape[axis]
            q = along(q, axis, simplest((extent,), np.tile(np.arange(extent), count)))
    return q


def _integers(q: QTensor, indices: Any) -> Any:
    array = index_array(q, indices if not isinstance(indices, int) else np.asarray(indices))
    if is_mask(array):
        reason = "its dtype is bool, and these indices are integers; q[mask] takes a mask"
        raise InvalidIndex(index=tuple(array.shape), shape=q.shape, reason=reason)
    return array
