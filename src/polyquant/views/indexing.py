"""``q[key]``: integers, slices, None, Ellipsis, lists, index arrays and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyquant.arrays import constant, find_backend
from polyquant.data import is_whole
from polyquant.errors import InvalidIndex
from polyquant.qtensor import QTensor
from polyquant.views.arguments import (
    Picks,
    check_tensor,
    index_array,
    is_mask,
    on_host,
    picks,
    place,
    run_of,
)
from polyquant.views.moves import Flat, Move, Run, Shape, Table, simplest
from polyquant.views.moving import along, permuted


def index(q: QTensor, key: Any) -> QTensor:
    """``q[key]``, as the tensor's own library indexes its arrays.

    Cost: a slice is a view of the codes where it keeps the packed axis, or ends at whole bytes of
    it; an integer is one where another axis is packed; index arrays and masks copy what they pick.
    Where an edge cuts a block, blocks become smaller along that axis, and every new block has a
    scale: ``q[:, 3:]`` of blocks of 32 has blocks of 1.

    Under a tracer an index array without values may pick along axes whose blocks have extent 1
    (rows, in most schemes) or are whole.

    Raises InvalidIndex, BackendMismatch, DeviceMismatch, LayoutRefused.
    """
    check_tensor("index", q)
    items = _items(q, key)
    if None in items and not any(isinstance(item, Run | Picks) for item in items):
        items.remove(None)  # the new axis first, since two levels of scales need one all along
        items.insert(0, Run(1, 0, 1, 1))
        q = along(q, 0, Flat((), (1,)))
    is_torch = q.device.startswith("torch")
    in_front = _goes_in_front(items, ints_count=not is_torch)
    kept = [item for item in items if isinstance(item, Run | Picks)]
    q = _basic(q, [item for item in items if isinstance(item, Run | Picks | int)])
    given = 0
    if any(isinstance(item, Picks) for item in kept):
        q, given = _picked(q, kept, in_front=in_front)
    at = given if in_front else 0
    is_placed = in_front
    for item in items:
        if item is None:
            q = along(q, at, Flat((), (1,)))
        if item is None or isinstance(item, Run):
            at += 1
        elif isinstance(item, Picks) and not is_placed:
            at, is_placed = at + given, True
    return q


def positions_of(parts: Sequence[Picks], shape: Shape) -> Move:
    """The table of the flat positions in ``shape`` of indices along each of its axes."""
    traced = next((part.values for part in parts if part.is_traced), None)
    total: Any = 0
    for axis, part in enumerate(parts):
        values = part.values
        if traced is not None and not part.is_traced:
            values = constant(traced, values)
        total = total + values * math.prod(shape[axis + 1 :])
    return simplest(shape, total) if traced is None else Table(shape, total, is_traced=True)


def _items(q: QTensor, key: Any) -> list[Any]:
    """The key as None, Run, int or Picks items, one for each axis but for None.

    An Ellipsis without axes stays where NumPy sees it, since it separates index arrays there.
    """
    given = [_plain(q, item) for item in (key if isinstance(key, tuple) else (key,))]
    used = sum(_axes_used(item) for item in given)
    dots = sum(item is Ellipsis for item in given)
    if dots > 1 or used > q.ndim:
        reason = "it has two Ellipses" if dots > 1 else f"it names {used} axes of {q.ndim}"
        raise InvalidIndex(index=key, shape=q.shape, reason=reason)
    found: list[Any] = []
    axis = 0
    for item in given if dots else [*given, Ellipsis]:
        if item is None:
            found.append(None)
        elif item is Ellipsis:
            left = q.ndim - used
            found += [Run(n, 0, 1, n) for n in q.shape[axis : axis + left]]
            if not left and not q.device.startswith("torch"):
                found.append(Ellipsis)
            axis += left
        else:
            found += _along_axis(q, item, axis)
            axis += _axes_used(item)
    return found


def _plain(q: QTensor, item: Any) -> Any:
    """An item as None, Ellipsis, a slice, an int or an index array."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if is_whole(item):
        return int(item)
    array = index_array(q, item) if not isinstance(item, bool | np.bool_) else np.asarray(item)
    if array.shape == () and is_mask(array):
        reason = "a single True or False is no mask; use a slice, or None for a new axis"
        raise InvalidIndex(index=item, shape=q.shape, reason=reason)
    owner = find_backend(array)
    if owner is not None and owner.name == "torch" and str(array.dtype) == "torch.uint8":
        reason = "torch takes an index of uint8 for a mask; convert it to bool or to int64"
        raise InvalidIndex(index=tuple(array.shape), shape=q.shape, reason=reason)
    is_known_number = array.shape == () and owner is not None and not owner.is_traced(array)
    return int(array) if is_known_number else array


def _axes_used(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return len(item.shape) if hasattr(item, "shape") and is_mask(item) else 1


def _along_axis(q: QTensor, item: Any, axis: int) -> list[Any]:
    """A slice, an int or an array as what it takes of the axes from ``axis`` on."""
    if isinstance(item, slice):
        return [run_of(q, q.shape[axis], item)]
    if isinstance(item, int):
        return [place(q, item, axis)]
    if not is_mask(item):
        return [picks(q, item, axis)]
    here = q.shape[axis : axis + len(item.shape)]
    if tuple(item.shape) != here:
        reason = f"a mask of shape {tuple(item.shape)} does not fit axes of shape {here}"
        raise InvalidIndex(index="mask", shape=q.shape, reason=reason)
    return [Picks(values, False) for values in np.nonzero(on_host(item))]


def _goes_in_front(items: Sequence[Any], *, ints_count: bool) -> bool:
    """Whether the axes of index arrays come first, because something stands between the arrays.

    To NumPy and JAX an integer beside an array is an index array too; torch takes it before.
    """
    kinds = (Picks, int) if ints_count else (Picks,)
    if not any(isinstance(item, Picks) for item in items):
        return False
    seen = items if ints_count else [item for item in items if not isinstance(item, int)]
    places = [at for at, item in enumerate(seen) if isinstance(item, kinds)]
    return places[-1] - places[0] >= len(places)


def _basic(q: QTensor, items: Sequence[Any]) -> QTensor:
    """Take the integers and the runs of the axes, the packed one last; index arrays wait.

    So what copies codes or scales does it only for what the other axes leave.
    """
    is_packed = [axis == q.ndim - 1 for axis in q.axes]
    left: list[tuple[bool, Any]] = []
    for axis in reversed(range(len(items))):
        if isinstance(items[axis], int) and not is_packed[axis]:
            q = along(q, axis, simplest((q.shape[axis],), np.asarray(items[axis])))
        else:
            left.insert(0, (is_packed[axis], items[axis]))
    for axis, (_, item) in sorted(enumerate(left), key=lambda pair: pair[1][0]):
        if isinstance(item, int):
            q = along(q, axis, simplest((q.shape[axis],), np.asarray(item)))
        elif isinstance(item, Run):
            q = along(q, axis, item)
    return q


def _picked(q: QTensor, kept: Sequence[Any], *, in_front: bool) -> tuple[QTensor, int]:
    """Apply the index arrays; also how many axes they give."""
    group = [axis for axis, item in enumerate(kept) if isinstance(item, Picks)]
    arrays = [kept[axis] for axis in group]
    try:
        made = np.broadcast_shapes(*(tuple(part.values.shape) for part in arrays))
    except ValueError as error:
        shapes = ", ".join(str(tuple(part.values.shape)) for part in arrays)
        reason = f"index arrays of shapes {shapes} do not broadcast"
        raise InvalidIndex(index="arrays", shape=q.shape, reason=reason) from error
    first = group[0]
    if len(group) > 1:
        others = [axis for axis in range(q.ndim) if axis not in group]
        first = 0 if in_front else first
        q = permuted(q, [*others[:first], *group, *others[first:]])
    inner = q.shape[first : first + len(group)]
    q = along(q, first, positions_of(arrays, inner))
    if in_front and first:
        front = range(first, first + len(made))
        q = permuted(q, [*front, *range(first), *range(first + len(made), q.ndim)])
    return q, len(made)
