"""Compute methods as NumPy's arrays have them, and Python's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyquant.arrays import Array
from polyquant.methods.door import operations

_Axes = int | tuple[int, ...] | None
_Operator = Callable[[Any, Any], Any]


def _pair(op: str) -> tuple[_Operator, _Operator]:
    """A Python operator and its reflected form."""

    def forward(self: Any, other: Any) -> Any:
        return operations().operator(op, self, other)

    def reflected(self: Any, other: Any) -> Any:
        return operations().operator(op, other, self)

    return forward, reflected


def _comparison(op: str) -> Callable[[Any, object], Any]:
    return _pair(op)[0]


class ComputeMethods:
    """Arithmetic, comparisons, reductions, products: each is the op of ``pq.ops``."""

    __slots__ = ()

    __add__, __radd__ = _pair("add")
    __sub__, __rsub__ = _pair("sub")
    __mul__, __rmul__ = _pair("mul")
    __truediv__, __rtruediv__ = _pair("div")
    __floordiv__, __rfloordiv__ = _pair("floor_divide")
    __mod__, __rmod__ = _pair("remainder")
    __pow__, __rpow__ = _pair("pow")
    __eq__ = _comparison("equal")
    __ne__ = _comparison("not_equal")
    __lt__ = _comparison("less")
    __le__ = _comparison("less_equal")
    __gt__ = _comparison("greater")
    __ge__ = _comparison("greater_equal")
    __hash__ = object.__hash__  # by identity: == is number by number

    def __matmul__(self, other: Any) -> Any:
        return operations().operator_matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return operations().operator_matmul(other, self)

    def __neg__(self) -> Any:
        return operations().neg(self)

    def __pos__(self: Any) -> Any:
        return self

    def __abs__(self) -> Any:
        return operations().abs(self)

    def __contains__(self, item: Any) -> bool:
        found = self == item
        return found if isinstance(found, bool) else bool(operations().any(found))

    # -- one element --------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(operations().single(self, "bool()"))

    def __float__(self) -> float:
        return float(operations().single(self, "float()"))

    def __int__(self) -> int:
        return int(operations().single(self, "int()"))

    def item(self) -> float:
        """The number of a tensor of one element. Raises InvalidArgument for any other."""
        return float(operations().single(self, "item()"))

    # -- reductions ---------------------------------------------------------------------------

    def sum(self, axis: _Axes = None, *, keepdims: bool = False) -> Array:
        """The sum over axes."""
        return operations().sum(self, axis=axis, keepdims=keepdims)

    def mean(self, axis: _Axes = None, *, keepdims: bool = False) -> Array:
        """The arithmetic mean over axes."""
        return operations().mean(self, axis=axis, keepdims=keepdims)

    def prod(self, axis: _Axes = None, *, keepdims: bool = False) -> Array:
        """The product over axes."""
        return operations().prod(self, axis=axis, keepdims=keepdims)

    def max(self, axis: _Axes = None, *, keepdims: bool = False) -> Array:
        """The largest number over axes."""
        return operations().max(self, axis=axis, keepdims=keepdims)

    def min(self, axis: _Axes = None, *, keepdims: bool = False) -> Array:
        """The smallest number over axes."""
        return operations().min(self, axis=axis, keepdims=keepdims)

    def any(self, axis: _Axes = None, *, keepdims: bool = False) -> Array:
        """Whether a number over the axes is not zero, bool."""
        return operations().any(self, axis=axis, keepdims=keepdims)

    def all(self, axis: _Axes = None, *, keepdims: bool = False) -> Array:
        """Whether no number over the axes is zero, bool."""
        return operations().all(self, axis=axis, keepdims=keepdims)

    def argmax(self, axis: int | None = None, *, keepdims: bool = False) -> Array:
        """Where the largest number is along an axis (None: in one line), int."""
        return operations().argmax(self, axis=axis, keepdims=keepdims)

    def argmin(self, axis: int | None = None, *, keepdims: bool = False) -> Array:
        """Where the smallest number is along an axis (None: in one line), int."""
        return operations().argmin(self, axis=axis, keepdims=keepdims)

    # -- of the same shape --------------------------------------------------------------------

    def clip(self, min: Any = None, max: Any = None) -> Array:
        """The numbers, none below ``min`` or above ``max``: ``pq.ops.clamp``."""
        return operations().clamp(self, min, max)

    def round(self) -> Array:
        """The nearest whole numbers, ties to the even one."""
        return operations().round(self)

    def cumsum(self, axis: int | None = None) -> Array:
        """The sum of all numbers so far along an axis; None: of the tensor in one line."""
        return operations().cumsum(self, axis)

    def cumprod(self, axis: int | None = None) -> Array:
        """The product of all numbers so far along an axis; None: of the tensor in one line."""
        return operations().cumprod(self, axis)

    def sort(self, axis: int = -1, *, descending: bool = False) -> Array:
        """The numbers in order along an axis: returned, since a QTensor does not change."""
        return operations().sort(self, axis=axis, descending=descending)

    def argsort(self, axis: int = -1, *, descending: bool = False) -> Array:
        """Where the numbers in order lie along an axis, int; equal ones in their order."""
        return operations().argsort(self, axis=axis, descending=descending)
