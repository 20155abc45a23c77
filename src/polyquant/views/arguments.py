"""What callers hand to layout operations, checked: tensors, axes, extents and indices."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int
from typing import Any, NamedTuple

import numpy as np

from polyquant.arrays import Array, backend_of_device, describe, dtype_name, find_backend, namespace
from polyquant.data import is_whole
from polyquant.errors import (
    BackendMismatch,
    DeviceMismatch,
    InvalidArgument,
    InvalidAxes,
    InvalidIndex,
    LayoutRefused,
)
from polyquant.qtensor import QTensor, checked
from polyquant.views.moves import Run, Shape


class Picks(NamedTuple):
    """An index array: int64 on the host, or an array of the tensor's library where it is traced."""

    values: Any
    is_traced: bool


def check_tensor(op: str, q: Any, *, stacks: bool = False) -> None:
    """Raises InvalidArgument for anything but a QTensor, LayoutRefused for a stack, save if taken.

    Each tensor in a stack has a table or a tensor scale of its own, which no result could hold.
    """
    if not isinstance(q, QTensor):
        wanted = f"a QTensor (of an array take {op} of its own library)"
        raise InvalidArgument(name=f"the operand of {op}", wanted=wanted, got=type(q).__name__)
    if not stacks and q.is_stack:
        reason = "it is a stack, whose tensors have stored arrays of their own"
        fix = "Use jax.vmap, or take one tensor with jax.tree.map(lambda part: part[i], q)"
        raise LayoutRefused(scheme=str(q.scheme), shape=q.shape, reason=reason, fix=fix)
    checked(q)


def axis_of(q: QTensor, axis: Any, *, new: int = 0) -> int:
    """An axis counted from 0; ``new`` axes are about to be added. Raises InvalidAxes."""
    rank = q.ndim + new
    if not is_whole(axis) or not -rank <= axis < rank:
        raise InvalidAxes(got=axis, rank=rank, shape=q.shape)
    return int(axis) % rank


def axes_of(q: QTensor, axes: Any) -> Shape:
    """One axis or several, counted from 0, no two the same. Raises InvalidAxes."""
    given = axes if isinstance(axes, Sequence) and not isinstance(axes, str) else (axes,)
    found = tuple(axis_of(q, axis) for axis in given)
    if len(set(found)) != len(found):
        raise InvalidAxes(got=tuple(given), rank=q.ndim, shape=q.shape)
    return found


def whole(name: str, number: Any, least: int = 0) -> int:
    """A whole number of at least ``least``. Raises InvalidArgument."""
    if not is_whole(number) or number < least:
        raise InvalidArgument(name=name, wanted=f"a whole number of at least {least}", got=number)
    return int(number)


def several(name: str, numbers: Any, least: int = 0) -> Shape:
    """One whole number or several. Raises InvalidArgument."""
    single = not isinstance(numbers, Sequence) or isinstance(numbers, str)
    return tuple(whole(name, n, least) for n in ((numbers,) if single else numbers))


def run_of(q: QTensor, extent: int, cut: slice) -> Run:
    """The run that a slice takes of an axis. Raises InvalidIndex."""
    try:
        start, stop, step = cut.indices(extent)
    except TypeError as error:  # a bound that is no whole number, or that a tracer hides
        raise InvalidIndex(index=cut, shape=q.shape, reason="its ends are not integers") from error
    except ValueError as error:
        raise InvalidIndex(index=cut, shape=q.shape, reason="its step is 0") from error
    count = len(range(start, stop, step))
    return Run(extent, start if count else 0, step if count > 1 else 1, count)


def place(q: QTensor, number: Any, axis: int) -> int:
    """An index along an axis, counted from 0. Raises InvalidIndex."""
    extent = q.shape[axis]
    if not -extent <= number < extent:
        _refuse_place(q, number, axis)
    return as_int(number) % extent


def index_array(q: QTensor, given: Any) -> Array:
    """A list or an array as an index array: of integers or booleans, and beside ``q``.

    Raises InvalidIndex, BackendMismatch, DeviceMismatch.
    """
    array = given
    if isinstance(given, list | tuple | range):
        try:
            array = np.asarray(given)
        except (ValueError, TypeError) as error:
            reason = "its lists are not of the same length, or hold no numbers"
            raise InvalidIndex(index=given, shape=q.shape, reason=reason) from error
        array = array.astype(np.int64) if not array.size else array
    owner = find_backend(array)
    if owner is None:
        reason = "an index is an integer, a slice, None, ..., a list, or an array of integers"
        raise InvalidIndex(index=given, shape=q.shape, reason=f"{reason} or booleans")
    if owner.name != "numpy" and not owner.is_traced(array):
        _check_beside(q, array)
    if not dtype_name(array).startswith(("bool", "int", "uint")):
        reason = f"its dtype is {dtype_name(array)}, and an index is of integers or booleans"
        raise InvalidIndex(index=given, shape=q.shape, reason=reason)
    return array


def picks(q: QTensor, array: Array, axis: int) -> Picks:
    """An array of integers along an axis, counted from 0. Raises InvalidIndex."""
    owner, extent = find_backend(array), q.shape[axis]
    if owner is not None and owner.is_traced(array):
        xp = namespace(array)
        wide = array if array.dtype == xp.int64 else xp.astype(array, xp.int32)
        return Picks(xp.where(wide < 0, wide + extent, wide), True)
    values = on_host(array)
    outside = (values < -extent) | (values >= extent)
    if outside.any():
        _refuse_place(q, values[outside].reshape(-1)[0], axis)
    values = values.astype(np.int64)
    return Picks(np.where(values < 0, values + extent, values), False)


def on_host(array: Array) -> np.ndarray[Any, Any]:
    """The values of an index array. Raises UnsupportedArray where a tracer hides them."""
    owner = find_backend(array)
    return np.asarray(array if owner is None else owner.to_host(array))


def is_mask(array: Array) -> bool:
    """Whether an index array is of booleans."""
    return dtype_name(array).startswith("bool")


def _refuse_place(q: QTensor, number: Any, axis: int) -> None:
    extent = q.shape[axis]
    reason = f"axis {axis} has the indices {-extent} to {extent - 1}" if extent else "is empty"
    raise InvalidIndex(index=int(number), shape=q.shape, reason=reason)


def _check_beside(q: QTensor, array: Array) -> None:
    owner, _ = backend_of_device(q.device)
    found = find_backend(array)
    if found is None or (found is owner and found.device_of(array) == q.device):
        return
    error = DeviceMismatch if found is owner else BackendMismatch
    raise error(
        op="An index",
        left_role="the tensor",
        left=f"a {q.scheme} tensor of shape {q.shape} on {q.device}",
        right_role="the index",
        right=describe(array),
        fix=f"move the index to {q.device}, or pass a list or a NumPy array",
    )
