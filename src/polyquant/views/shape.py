"""The same elements under other axes: reshape, permute, squeeze, expand and their kin."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from polyquant.errors import InvalidArgument, InvalidAxes, ShapeMismatch
from polyquant.qtensor import QTensor
from polyquant.views.arguments import axes_of, axis_of, check_tensor, several
from polyquant.views.moves import Flat, Run, Shape
from polyquant.views.moving import along, permuted


def reshape(q: QTensor, shape: Any) -> QTensor:
    """The same elements in the same order under another shape; one extent may be -1.

    Cost: a view where the packed lines stay, or are cut and joined at whole bytes; else a copy of
    the codes. Where an edge of the new shape cuts a block, blocks become smaller, and every new
    block has a scale. Axes that are joined while stored in another order are first put in order.

    Raises ShapeMismatch, InvalidArgument, LayoutRefused (two levels of scales and no axes).
    """
    check_tensor("reshape", q)
    wanted = _target(q, shape)
    if wanted == q.shape:
        return q
    if q.size <= 1:
        return along(q, 0, Flat(q.shape, wanted))
    for axis in reversed(_axes_of_one(q.shape)):
        q = along(q, axis, Flat((1,), ()))
    axis = 0
    for inner, outer in _groups(q.shape, tuple(n for n in wanted if n != 1)):
        q = along(q, axis, Flat(inner, outer))
        axis += len(outer)
    for axis in _axes_of_one(wanted):
        q = along(q, axis, Flat((), (1,)))
    return q


def permute(q: QTensor, axes: Any) -> QTensor:
    """The axes in another order: always a view, whose stored arrays are those of ``q``.

    Raises InvalidAxes.
    """
    check_tensor("permute", q, stacks=True)
    order = axes_of(q, axes)
    if len(order) != q.ndim:
        raise InvalidAxes(got=order, rank=q.ndim, shape=q.shape)
    return permuted(q, order)


def transpose(q: QTensor, axes: Any = None) -> QTensor:
    """``permute``, or all axes in reverse order: a view. Raises InvalidAxes."""
    check_tensor("transpose", q, stacks=True)
    return permute(q, tuple(reversed(range(q.ndim))) if axes is None else axes)


def swapaxes(q: QTensor, axis1: int, axis2: int) -> QTensor:
    """Two axes exchanged: a view. Raises InvalidAxes."""
    check_tensor("swapaxes", q, stacks=True)
    first, second = axis_of(q, axis1), axis_of(q, axis2)
    order = list(range(q.ndim))
    order[first], order[second] = second, first
    return permuted(q, order)


def moveaxis(q: QTensor, source: Any, destination: Any) -> QTensor:
    """Axes moved to other places, the rest in order: a view. Raises InvalidAxes."""
    check_tensor("moveaxis", q, stacks=True)
    here, there = axes_of(q, source), axes_of(q, destination)
    if len(here) != len(there):
        raise InvalidAxes(got=(source, destination), rank=q.ndim, shape=q.shape)
    order = [axis for axis in range(q.ndim) if axis not in here]
    for to, axis in sorted(zip(there, here, strict=True)):
        order.insert(to, axis)
    return permuted(q, order)


def squeeze(q: QTensor, axis: Any = None) -> QTensor:
    """Without axes of extent 1: those named, or all of them.

    Cost: a view, unless it is the packed axis that goes; then the codes are packed anew.

    Raises InvalidAxes, InvalidArgument (another extent), LayoutRefused (as reshape).
    """
    check_tensor("squeeze", q)
    gone = _axes_of_one(q.shape) if axis is None else axes_of(q, axis)
    if any(q.shape[a] != 1 for a in gone):
        wanted = f"axes of extent 1 of a tensor of shape {q.shape}"
        raise InvalidArgument(name="axis", wanted=wanted, got=axis)
    if len(gone) == q.ndim:
        return reshape(q, ())
    for a in sorted(gone, reverse=True):
        q = along(q, a, Flat((1,), ()))
    return q


def unsqueeze(q: QTensor, axis: int) -> QTensor:
    """With a new axis of extent 1 at ``axis``: always a view. Raises InvalidAxes."""
    check_tensor("unsqueeze", q)
    return along(q, axis_of(q, axis, new=1), Flat((), (1,)))


def expand(q: QTensor, shape: Any) -> QTensor:
    """Broadcast to a shape: new leading axes, and axes of extent 1 repeated; -1 keeps an extent.

    Cost: a view in NumPy and torch (stride 0), unless the packed axis is repeated; scales are
    repeated as codes are.

    Raises ShapeMismatch, InvalidArgument.
    """
    check_tensor("expand", q)
    given = several("shape", shape, least=-1)
    new = len(given) - q.ndim
    old = (*(1,) * new, *q.shape)
    wanted = tuple(o if n == -1 else n for o, n in zip(old, given, strict=new >= 0))
    if new < 0 or -1 in given[:new]:
        reason = "a new axis needs an extent" if new > 0 else "broadcasting takes no axis away"
        raise ShapeMismatch(op="expand", left=q.shape, right=given, reason=reason)
    if any(o not in (1, n) for o, n in zip(old, wanted, strict=True)):
        reason = "only an axis of extent 1 can be repeated"
        raise ShapeMismatch(op="expand", left=q.shape, right=given, reason=reason)
    for _ in range(new):
        q = unsqueeze(q, 0)
    for axis, extent in enumerate(wanted):
        if q.shape[axis] != extent:
            q = along(q, axis, Run(1, 0, 0 if extent > 1 else 1, extent))
    return q


def flip(q: QTensor, axis: Any = None) -> QTensor:
    """The order of the elements reversed along the named axes, or along all.

    Cost: a copy of the codes (a view in NumPy, unless the packed axis is flipped). An axis that
    its blocks do not divide gets smaller ones: 70 by 32 becomes 70 by 2.

    Raises InvalidAxes.
    """
    check_tensor("flip", q)
    for a in range(q.ndim) if axis is None else axes_of(q, axis):
        if q.shape[a] > 1:
            q = along(q, a, Run(q.shape[a], q.shape[a] - 1, -1, q.shape[a]))
    return q


def _target(q: QTensor, shape: Any) -> Shape:
    """The shape that a reshape asks for, its -1 replaced."""
    given = several("shape", shape, least=-1)
    known = math.prod(n for n in given if n != -1)
    free = given.count(-1)
    fits = known == q.size if not free else free == 1 and known > 0 and q.size % known == 0
    if not fits:
        reason = f"the first has {q.size} elements" + ("" if free < 2 else "; one -1 is allowed")
        raise ShapeMismatch(op="reshape", left=q.shape, right=given, reason=reason)
    return tuple(q.size // known if n == -1 else n for n in given)


def _axes_of_one(shape: Shape) -> Shape:
    return tuple(axis for axis, extent in enumerate(shape) if extent == 1)


def _groups(old: Shape, new: Shape) -> Iterator[tuple[Shape, Shape]]:
    """The smallest groups of axes with equal products; no extent is 0 or 1."""
    i = j = 0
    while i < len(old):
        first, second = i + 1, j + 1
        while (left := math.prod(old[i:first])) != (right := math.prod(new[j:second])):
            first, second = (first + 1, second) if left < right else (first, second + 1)
        yield old[i:first], new[j:second]
        i, j = first, second
