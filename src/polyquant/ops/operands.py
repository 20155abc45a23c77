"""The operands of a compute op: checked at the door, then brought to one dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from polyquant.arrays import (
    FLOAT_DTYPES,
    Array,
    Backend,
    backend_of,
    constant,
    describe,
    dtype_name,
    find_backend,
    known,
    namespace,
    place,
)
from polyquant.data import is_whole
from polyquant.dispatch import check_one_device, check_real
from polyquant.errors import InvalidArgument, InvalidAxes, InvalidIndex, NotAnArray, ShapeMismatch
from polyquant.ops.conversion import dequantize
from polyquant.ops.lacking import host_function
from polyquant.qtensor import QTensor

Roles = Sequence[tuple[str, Any]]
#: Axes of a reduction: one, several, or None for all.
Axes = int | tuple[int, ...] | None


class Operands(NamedTuple):
    """Operands that were checked, and what they compute with.

    ``kind`` is the dtype of a float result, ``wide`` that in which the operands enter;
    ``has_floats`` whether an array is among them that is not quantized.
    """

    owner: Backend
    xp: Any
    kind: Any
    wide: Any
    has_floats: bool
    given: tuple[Any, ...]
    like: Array

    def values(self) -> tuple[Any, ...]:
        """Float arrays of one dtype, Python's numbers, and None as it came. Decodes."""
        return tuple(map(self._value, self.given))

    def arrays(self) -> tuple[Any, ...]:
        """The same with numbers as arrays without axes."""
        return tuple(map(self._array, self.values()))

    def function(self, name: str) -> Callable[..., Any]:
        """The library's own function, or the array API's, or the one for the host."""
        own = self.owner.functions.get(name) or getattr(self.xp, name, None)
        return own or host_function(self.owner, name)

    def _value(self, x: Any) -> Any:
        if x is None:
            return None
        if isinstance(x, QTensor):
            return dequantize(x, None if self.wide == self.xp.float32 else self.wide)
        if is_number(x):
            plain = x.item() if isinstance(x, np.generic) else x
            if isinstance(plain, float):
                return plain
            return int(plain) if abs(plain) < 2**63 else float(plain)  # more torch does not take
        x = np.asarray(x) if self.owner.name == "numpy" else x  # a subclass may compute otherwise
        return self.xp.astype(x, self.wide, copy=False)

    def _array(self, x: Any) -> Any:
        if isinstance(x, int | float):
            return self.xp.asarray(x, dtype=self.wide, **place(self.like))
        return x


def enter(op: str, roles: Roles, *, beside: Roles = (), sums: bool = False) -> Operands:
    """Check the operands, which are (name, QTensor, array, number or None).

    The dtype is that of the float arrays among them (of several: float64 if one is, else float32),
    float32 where there are none. ``sums``: they enter in no narrower a dtype than float32.
    ``beside``: arrays of other dtypes, which must only be on the same device.

    Raises NotAnArray, NotFloat, BackendMismatch, DeviceMismatch.
    """
    arrays = [(role, x) for role, x in roles if x is not None and not is_number(x)]
    owner = check_one_device(op, [*arrays, *beside] or roles)
    floats = {}
    for role, x in arrays:
        if isinstance(x, QTensor):
            continue
        name = dtype_name(x)
        if name != "bool":
            check_real(role, x, integers=True)
        if name in FLOAT_DTYPES:
            floats[name] = x.dtype
    first = (arrays or beside)[0][1]
    like = first.data if isinstance(first, QTensor) else first
    xp = namespace(like)
    kind = xp.float32
    if len(floats) == 1:
        kind = next(iter(floats.values()))
    elif "float64" in floats:
        kind = xp.float64
    wide = xp.float32 if sums and kind != xp.float64 else kind
    has_floats = any(not isinstance(x, QTensor) for _, x in arrays)
    return Operands(owner, xp, kind, wide, has_floats, tuple(x for _, x in roles), like)


def is_number(x: Any) -> bool:
    """Whether this is a real number of Python's or NumPy's, which lies on no device."""
    if isinstance(x, np.generic):
        name = dtype_name(x)
        return name in FLOAT_DTYPES or name.startswith(("int", "uint", "bool"))
    return isinstance(x, int | float)


def is_operand(x: Any) -> bool:
    """Whether an operator can take this; what it cannot is left to Python."""
    if isinstance(x, QTensor) or is_number(x):
        return True
    return not isinstance(x, np.generic) and find_backend(x) is not None


def check_array(role: str, x: Any) -> None:
    """Refuse a number where only an array or a QTensor will do. Raises NotAnArray."""
    if is_number(x):
        raise NotAnArray(role=role, got=describe(x))


def check_mask(op: str, mask: Any) -> None:
    """Refuse what is no array of booleans. Raises NotAnArray, InvalidArgument."""
    if isinstance(mask, QTensor) or (find_backend(mask) and dtype_name(mask) != "bool"):
        got = f"of {mask.scheme}" if isinstance(mask, QTensor) else f"of {dtype_name(mask)}"
        raise InvalidArgument(name=f"the mask of {op}", wanted="an array of booleans", got=got)


def index_beside(x: Any, indices: Any, axis: int, *, least: int | None = None) -> Array:
    """Indices along an axis of ``x`` (a list, a NumPy array or one beside it), beside ``x``.

    ``least``: the lowest index that is allowed; negative ones by default. Values that a tracer
    hides are not looked at. Raises InvalidIndex, BackendMismatch, DeviceMismatch.
    """
    shape, like = tuple(x.shape), x.data if isinstance(x, QTensor) else x
    found = np.asarray(indices) if isinstance(indices, list | tuple | range | int) else indices
    owner = find_backend(found)
    if owner is None or not dtype_name(found).startswith(("int", "uint")):
        reason = f"an index is an array of integers, and this is {describe(found)}"
        raise InvalidIndex(index=type(indices).__name__, shape=shape, reason=reason)
    if owner.name == "numpy":
        found = constant(like, np.asarray(found))
    check_one_device("indexing", (("x", x), ("indices", found)))
    xp, extent = namespace(found), shape[axis]
    low = -extent if least is None else least
    outside = (found < low) | (found >= extent)
    if known(xp.any(outside)):
        to_host = backend_of(found).to_host
        first = int(to_host(found)[to_host(outside)][0])
        reason = f"axis {axis} has the indices {low} to {extent - 1}" if extent else "it is empty"
        raise InvalidIndex(index=first, shape=shape, reason=reason)
    return xp.astype(found, xp.arange(1).dtype, copy=False)  # torch takes no others everywhere


def broadcast(op: str, *operands: Any) -> tuple[int, ...]:
    """The common shape of arrays, QTensors and numbers. Raises ShapeMismatch."""
    common: tuple[int, ...] = ()
    for x in operands:
        shape = tuple(getattr(x, "shape", ()))
        pairs = list(zip_longest(reversed(common), reversed(shape), fillvalue=1))
        for left, right in pairs:
            if left != right and left != 1 and right != 1:
                reason = f"the extents {left} and {right} do not broadcast"
                raise ShapeMismatch(op=op, left=common, right=shape, reason=reason)
        common = tuple(right if left == 1 else left for left, right in reversed(pairs))
    return common


def fits_into(op: str, x: Any, *others: Any) -> None:
    """Refuse operands that do not broadcast to the shape of ``x``. Raises ShapeMismatch."""
    shape, common = tuple(x.shape), broadcast(op, x, *others)
    if common != shape:
        reason = f"together they are of shape {common}, which is not that of the first"
        other = next(tuple(o.shape) for o in others if hasattr(o, "shape"))
        raise ShapeMismatch(op=op, left=shape, right=other, reason=reason)


def one_axis(axis: Any, shape: Sequence[int]) -> int:
    """An axis counted from the front. Raises InvalidAxes."""
    rank = len(shape)
    if not is_whole(axis) or not -rank <= axis < rank:
        raise InvalidAxes(got=axis, rank=rank, shape=tuple(shape))
    return int(axis) % rank


def which_axes(axis: Any, shape: Sequence[int], *, several: bool = True) -> Axes:
    """The axes of a reduction counted from the front. Raises InvalidAxes."""
    if axis is None:
        return None
    if not several or not isinstance(axis, tuple | list):
        return one_axis(axis, shape)
    axes = tuple(one_axis(a, shape) for a in axis)
    if len(set(axes)) != len(axes):
        raise InvalidAxes(got=tuple(axis), rank=len(shape), shape=tuple(shape))
    return axes


def check_flag(name: str, flag: Any) -> None:
    """Refuse what is not True or False. Raises InvalidArgument."""
    if not isinstance(flag, bool):
        raise InvalidArgument(name=name, wanted="True or False", got=flag)
