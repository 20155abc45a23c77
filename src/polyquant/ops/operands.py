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
    dtype_name,
    find_backend,
    namespace,
    place,
)
from polyquant.data import is_whole
from polyquant.dispatch import check_one_device, check_real
from polyquant.errors import InvalidAxes, ShapeMismatch
from polyquant.ops.conversion import dequantize
from polyquant.ops.lacking import host_function
from polyquant.qtensor import QTensor

Roles = Sequence[tuple[str, Any]]
#: Axes of a reduction: one, several, or None for all.
Axes = int | tuple[int, ...] | None


class Operands(NamedTuple):
    """What an op computes with: float arrays of one dtype, plain numbers, and None as it came.

    ``kind`` is the dtype of a float result; ``has_floats`` whether an array came in it.
    """

    owner: Backend
    xp: Any
    kind: Any
    has_floats: bool
    values: tuple[Any, ...]
    like: Array

    def function(self, name: str) -> Callable[..., Any]:
        """The library's own function, or the array API's, or the one for the host."""
        own = self.owner.functions.get(name) or getattr(self.xp, name, None)
        return own or host_function(self.owner, name)

    def array(self, value: Any) -> Array:
        """A number as an array without axes beside the others; an array as it is."""
        if isinstance(value, int | float):
            return self.xp.asarray(value, dtype=self.kind, **place(self.like))
        return value


def enter(op: str, roles: Roles) -> Operands:
    """Check and unpack the operands, which are (name, QTensor, array, number or None).

    The dtype is that of the float arrays among them (of several: float64 if one is, else float32),
    float32 where there are none. Raises NotAnArray, NotFloat, BackendMismatch, DeviceMismatch.
    """
    arrays = [(role, x) for role, x in roles if x is not None and not is_number(x)]
    owner = check_one_device(op, arrays or roles)
    floats = {}
    for role, x in arrays:
        if isinstance(x, QTensor):
            continue
        name = dtype_name(x)
        if name != "bool":
            check_real(role, x, integers=True)
        if name in FLOAT_DTYPES:
            floats[name] = x.dtype
    like = arrays[0][1].data if isinstance(arrays[0][1], QTensor) else arrays[0][1]
    xp = namespace(like)
    kind = xp.float32
    if len(floats) == 1:
        kind = next(iter(floats.values()))
    elif "float64" in floats:
        kind = xp.float64
    values = tuple(_entering(x, xp, kind, owner) for _, x in roles)
    has_floats = any(not isinstance(x, QTensor) for _, x in arrays)
    return Operands(owner, xp, kind, has_floats, values, like)


def _entering(x: Any, xp: Any, kind: Any, owner: Backend) -> Any:
    if x is None:
        return None
    if isinstance(x, QTensor):
        return dequantize(x, None if kind == xp.float32 else kind)
    if is_number(x):
        plain = x.item() if isinstance(x, np.generic) else x
        return int(plain) if isinstance(plain, bool) else plain
    x = np.asarray(x) if owner.name == "numpy" else x  # a subclass may compute otherwise
    return xp.astype(x, kind, copy=False)


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


def one_axis(axis: Any, shape: Sequence[int]) -> int:
    """An axis counted from the front. Raises InvalidAxes."""
    rank = len(shape)
    if not is_whole(axis) or not -rank <= axis < rank:
        raise InvalidAxes(got=axis, rank=rank, shape=tuple(shape))
    return int(axis) % rank


def which_axes(axis: Any, shape: Sequence[int]) -> Axes:
    """The axes of a reduction counted from the front. Raises InvalidAxes."""
    if axis is None:
        return None
    if not isinstance(axis, tuple | list):
        return one_axis(axis, shape)
    axes = tuple(one_axis(a, shape) for a in axis)
    if len(set(axes)) != len(axes):
        raise InvalidAxes(got=tuple(axis), rank=len(shape), shape=tuple(shape))
    return axes
