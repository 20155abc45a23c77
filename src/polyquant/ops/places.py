"""Ops that find places, or take or change the numbers at them: sort, topk, scatter, embedding, ...

What compute.py says of operands, dtypes and propagation holds here too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polyquant import views
from polyquant.arrays import (
    Array,
    HostArray,
    backend_of,
    constant,
    find_backend,
    namespace,
)
from polyquant.data import is_whole
from polyquant.dispatch import check_one_device
from polyquant.errors import InvalidArgument, InvalidIndex, ShapeMismatch
from polyquant.ops.conversion import decode_rows
from polyquant.ops.lacking import flat_positions
from polyquant.ops.operands import (
    Operands,
    check_array,
    check_flag,
    enter,
    fits_into,
    index_beside,
    one_axis,
)
from polyquant.ops.propagation import propagates
from polyquant.ops.table import Kind, as_result, finish, picked, row
from polyquant.qtensor import QTensor

__all__ = ["argsort", "argtopk", "assign", "embedding", "scatter", "sort", "topk"]

# -- in order ---------------------------------------------------------------------------------


@row(Kind.VALUES)
def sort(x: Any, *, axis: int = -1, descending: bool = False) -> Array:
    """The numbers in order along an axis, from the smallest (``descending``: the largest) on."""
    entered = enter("sort", (("x", x),))
    along = one_axis(axis, x.shape)
    values, order = _in_order(entered, along, descending)
    return picked(entered, values, order, along)


@row(Kind.INDEX)
def argsort(x: Any, *, axis: int = -1, descending: bool = False) -> Array:
    """Where the numbers in order lie along an axis, int; equal numbers in their own order."""
    entered = enter("argsort", (("x", x),))
    return _in_order(entered, one_axis(axis, x.shape), descending)[1]


@row(Kind.VALUES)
def topk(x: Any, k: int, *, axis: int = -1) -> tuple[Array, Array]:
    """The ``k`` largest numbers along an axis, the largest first, and where they lie (int).

    Raises InvalidArgument for a ``k`` that is not from 0 to the extent of the axis.
    """
    entered = enter("topk", (("x", x),))
    values, order, along = _largest(entered, k, one_axis(axis, x.shape))
    return picked(entered, values, order, along), order


@row(Kind.INDEX)
def argtopk(x: Any, k: int, *, axis: int = -1) -> Array:
    """Where the ``k`` largest numbers along an axis lie, the largest first, int."""
    return _largest(enter("argtopk", (("x", x),)), k, one_axis(axis, x.shape))[1]


def _in_order(entered: Operands, axis: int, descending: Any) -> tuple[Array, Array]:
    """The values, and where they lie in order."""
    check_flag("descending", descending)
    (values,) = entered.values()
    order = entered.xp.argsort(values, axis=axis, descending=descending, stable=True)
    return values, order


def _largest(entered: Operands, k: Any, axis: int) -> tuple[Array, Array, int]:
    """The values, where the k largest lie, and the axis."""
    extent = entered.given[0].shape[axis]
    if not is_whole(k) or not 0 <= k <= extent:
        raise InvalidArgument(name="k", wanted=f"a whole number from 0 to {extent}", got=k)
    values, order = _in_order(entered, axis, True)
    return values, order[(*(slice(None),) * axis, slice(0, int(k)), ...)], axis


# -- put in -----------------------------------------------------------------------------------


@row(Kind.ARRAY)
def scatter(x: Any, axis: int, indices: Any, values: Any, *, reduce: str = "add") -> Array:
    """A copy of ``x`` with values put, or added, at indices along an axis.

    Args:
        indices: integers; of the rank of ``x`` and, but along the axis, of extents no larger. Along
            the other axes a value stays where it is. Negative ones count from the end.
        values: an operand that broadcasts to the shape of ``indices``.
        reduce: "add"; or "set", where of several values for one place the library keeps one.

    Raises InvalidIndex for indices of another dtype or out of range, InvalidArgument.
    """
    entered, add = _entered("scatter", x, values, reduce)
    along, shape = one_axis(axis, x.shape), tuple(x.shape)
    places = index_beside(x, indices, along)
    others = [pair for at, pair in enumerate(zip(shape, places.shape, strict=False)) if at != along]
    if len(places.shape) != len(shape) or any(there > here for here, there in others):
        reason = "the indices have as many axes as the tensor, none longer but the indexed one"
        facts = {"left": shape, "right": tuple(places.shape)}
        raise ShapeMismatch(op="scatter", **facts, reason=reason)
    fits_into("scatter", places, values)
    return _put(entered, flat_positions(namespace(places), places, shape, along), add=add)


@row(Kind.ARRAY)
def assign(x: Any, key: Any, values: Any, *, reduce: str = "set") -> Array:
    """A copy of ``x`` after ``x[key] = values``, or after ``x[key] += values``.

    Args:
        key: whatever indexes an array of the library (and steps backwards in any).
        values: an operand that broadcasts to the shape of ``x[key]``.
        reduce: "set", where of several values for one place the library keeps one; or "add",
            where each is added.

    Raises InvalidIndex, InvalidArgument.
    """
    entered, add = _entered("assign", x, values, reduce)
    positions = _positions(entered, tuple(x.shape), key)
    fits_into("assign", positions, values)
    return _put(entered, positions, add=add)


def _entered(op: str, x: Any, values: Any, reduce: Any) -> tuple[Operands, bool]:
    """The operands, checked, and whether values are added."""
    entered = enter(op, (("x", x), ("values", values)))
    check_array("x", x)
    if not isinstance(reduce, str) or reduce not in ("add", "set"):
        raise InvalidArgument(name="reduce", wanted="'add' or 'set'", got=reduce)
    return entered, reduce == "add"


def _put(entered: Operands, positions: Array, *, add: bool) -> Any:
    """The first operand with the second at some positions in its line of numbers."""
    xp, (x, values) = entered.xp, entered.arrays()
    line, at = xp.reshape(x, (-1,)), xp.reshape(positions, (-1,))
    spread = xp.reshape(xp.broadcast_to(values, positions.shape), (-1,))
    return as_result(
        entered, xp.reshape(entered.function("put_at")(line, at, spread, add), x.shape)
    )


def _positions(entered: Operands, shape: tuple[int, ...], key: Any) -> Array:
    """Where in the line of all numbers ``x[key]`` lies, as an array beside ``x``."""
    owner, items = entered.owner, key if isinstance(key, tuple) else (key,)
    arrays = [item for item in items if find_backend(item) is not None]
    if any(owner.is_array(item) and owner.is_traced(item) for item in arrays):
        return entered.xp.reshape(entered.xp.arange(math.prod(shape)), shape)[key]
    for item in arrays:
        if backend_of(item).name != "numpy":
            check_one_device("indexing", (("x", entered.given[0]), ("the index", item)))
    found = tuple(owner.to_host(item) if owner.is_array(item) else item for item in items)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    try:
        if owner.name == "torch":  # which takes integers before arrays, and so keeps other axes
            numbers, found = _without_integers(numbers, found)
        return constant(entered.like, np.asarray(numbers[found]))
    except (IndexError, TypeError, ValueError) as error:
        raise InvalidIndex(index=key, shape=shape, reason=str(error)) from error


def _without_integers(
    numbers: HostArray, key: tuple[Any, ...]
) -> tuple[HostArray, tuple[Any, ...]]:
    """What is left of an array and a key when the integers of the key were taken."""
    first: list[Any] = []
    for item in key:
        is_mask = (
            np.asarray(item).dtype == np.bool_ if isinstance(item, list | np.ndarray) else False
        )
        axes = np.ndim(item) if is_mask else 0 if item is None else 1
        first += [item] if is_whole(item) or item is Ellipsis else [slice(None)] * axes
    return numbers[tuple(first)], tuple(item for item in key if not is_whole(item))


# -- looked up --------------------------------------------------------------------------------


@row(Kind.VALUES)
def embedding(indices: Any, weight: Any) -> Array:
    """The rows of ``weight`` at ``indices`` (integers of any shape), decoding no others.

    Of shape ``indices.shape + weight.shape[1:]``. Raises InvalidIndex for an index that is not
    from 0 to the number of rows - 1.
    """
    entered = enter("embedding", (("weight", weight),))
    one_axis(0, weight.shape)
    rows = index_beside(weight, indices, 0, least=0)
    if isinstance(weight, QTensor):
        if not propagates():
            return finish(entered, decode_rows(rows, weight, None))
        found = views.take(weight, rows, 0)
        is_same = found.scheme == weight.scheme
        return found if is_same else finish(entered, found.dequantize())
    (values,) = entered.values()
    found = entered.xp.take(values, entered.xp.reshape(rows, (-1,)), axis=0)
    return entered.xp.reshape(found, (*rows.shape, *weight.shape[1:]))
