"""The compute ops: each is its signature, its docstring and how the libraries compute it.

Operands are QTensors, arrays of the same device, and Python's or NumPy's numbers. Results are
arrays of the operands' library: in the dtype of the float arrays among the operands, float32 where
there are none (integers and booleans count as float32), unless a docstring says bool or int. Under
``pq.propagation("propagate")`` float results are quantized again, but for those of where,
mask_fill, scatter and assign: what they do not replace stays as it is. NumPy warns of log(0) and
the like as it does for its own arrays; ``np.errstate`` holds.

All raise NotAnArray, NotFloat, BackendMismatch, DeviceMismatch, ShapeMismatch and InvalidAxes
before any work.
"""

from __future__ import annotations

import operator
from typing import Any

from polyquant.arrays import Array
from polyquant.ops.lacking import running
from polyquant.ops.operands import (
    Axes,
    Operands,
    broadcast,
    check_array,
    check_mask,
    enter,
    fits_into,
)
from polyquant.ops.table import (
    Kind,
    as_result,
    binary,
    check_not_empty,
    cumulative,
    finish,
    reduction,
    row,
    unary,
)

__all__ = [
    "abs",
    "add",
    "all",
    "any",
    "argmax",
    "argmin",
    "ceil",
    "clamp",
    "cos",
    "cosh",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "div",
    "equal",
    "erf",
    "exp",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "log",
    "log1p",
    "mask_fill",
    "max",
    "max_abs",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mul",
    "neg",
    "not_equal",
    "pow",
    "prod",
    "recip",
    "remainder",
    "round",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "sub",
    "sum",
    "tan",
    "tanh",
    "where",
]

# The ops below take these by name, so they come first.


def _reciprocal(x: Array) -> Array:
    return 1.0 / x


def _max_abs(entered: Operands, x: Array, *, axis: Axes, keepdims: bool) -> Array:
    check_not_empty("max_abs", x.shape, axis)
    magnitudes: Array = entered.xp.abs(x)
    return entered.xp.max(magnitudes, axis=axis, keepdims=keepdims)


def _cumulative_sum(entered: Operands, x: Array, axis: int) -> Array:
    return entered.xp.cumulative_sum(x, axis=axis)


def _cumulative_prod(entered: Operands, x: Array, axis: int) -> Array:
    return entered.xp.cumulative_prod(x, axis=axis)


def _cummax(entered: Operands, x: Array, axis: int) -> Array:
    return running(entered.xp, entered.xp.maximum, x, axis)


def _cummin(entered: Operands, x: Array, axis: int) -> Array:
    return running(entered.xp, entered.xp.minimum, x, axis)


# -- two operands -----------------------------------------------------------------------------


@binary(operator.add)
def add(a: Any, b: Any) -> Array:
    """The sum ``a + b``."""


@binary(operator.sub)
def sub(a: Any, b: Any) -> Array:
    """The difference ``a - b``."""


@binary(operator.mul)
def mul(a: Any, b: Any) -> Array:
    """The product ``a * b``, number by number."""


@binary(operator.truediv)
def div(a: Any, b: Any) -> Array:
    """The quotient ``a / b``."""


@binary(operator.floordiv)
def floor_divide(a: Any, b: Any) -> Array:
    """The quotient ``a // b``, rounded down."""


@binary(operator.mod)
def remainder(a: Any, b: Any) -> Array:
    """The remainder ``a % b``, with the sign of ``b``."""


@binary(operator.pow)
def pow(a: Any, b: Any) -> Array:
    """The power ``a ** b``."""


@binary()
def maximum(a: Any, b: Any) -> Array:
    """The larger of two numbers."""


@binary()
def minimum(a: Any, b: Any) -> Array:
    """The smaller of two numbers."""


# -- comparisons ------------------------------------------------------------------------------


@binary(operator.eq, kind=Kind.BOOL)
def equal(a: Any, b: Any) -> Array:
    """Whether ``a == b``, bool."""


@binary(operator.ne, kind=Kind.BOOL)
def not_equal(a: Any, b: Any) -> Array:
    """Whether ``a != b``, bool."""


@binary(operator.lt, kind=Kind.BOOL)
def less(a: Any, b: Any) -> Array:
    """Whether ``a < b``, bool."""


@binary(operator.le, kind=Kind.BOOL)
def less_equal(a: Any, b: Any) -> Array:
    """Whether ``a <= b``, bool."""


@binary(operator.gt, kind=Kind.BOOL)
def greater(a: Any, b: Any) -> Array:
    """Whether ``a > b``, bool."""


@binary(operator.ge, kind=Kind.BOOL)
def greater_equal(a: Any, b: Any) -> Array:
    """Whether ``a >= b``, bool."""


# -- one operand ------------------------------------------------------------------------------


@unary(operator.neg)
def neg(x: Any) -> Array:
    """The number with the other sign, ``-x``."""


@unary(operator.abs)
def abs(x: Any) -> Array:
    """The magnitude."""


@unary()
def sign(x: Any) -> Array:
    """-1, 0 or 1, as the number's sign is."""


@unary(_reciprocal)
def recip(x: Any) -> Array:
    """The reciprocal ``1 / x``."""


@unary()
def sqrt(x: Any) -> Array:
    """The square root."""


@unary()
def square(x: Any) -> Array:
    """The number times itself."""


@unary()
def exp(x: Any) -> Array:
    """e to the power ``x``."""


@unary()
def log(x: Any) -> Array:
    """The natural logarithm."""


@unary()
def log1p(x: Any) -> Array:
    """The natural logarithm of ``1 + x``, exact near zero."""


@unary()
def erf(x: Any) -> Array:
    """The error function."""


@unary()
def sin(x: Any) -> Array:
    """The sine."""


@unary()
def cos(x: Any) -> Array:
    """The cosine."""


@unary()
def tan(x: Any) -> Array:
    """The tangent."""


@unary()
def sinh(x: Any) -> Array:
    """The hyperbolic sine."""


@unary()
def cosh(x: Any) -> Array:
    """The hyperbolic cosine."""


@unary()
def tanh(x: Any) -> Array:
    """The hyperbolic tangent."""


@unary()
def floor(x: Any) -> Array:
    """The largest whole number not above ``x``."""


@unary()
def ceil(x: Any) -> Array:
    """The smallest whole number not below ``x``."""


@unary()
def round(x: Any) -> Array:
    """The nearest whole number, ties to the even one."""


# -- over axes --------------------------------------------------------------------------------


@reduction()
def sum(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """The sum over axes."""


@reduction()
def mean(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """The arithmetic mean over axes."""


@reduction()
def prod(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """The product over axes."""


@reduction(Kind.VALUES)
def max(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """The largest number over axes."""


@reduction(Kind.VALUES)
def min(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """The smallest number over axes."""


@reduction(run=_max_abs)
def max_abs(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """The largest magnitude over axes."""


@reduction(Kind.BOOL)
def any(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """Whether a number over the axes is not zero, bool."""


@reduction(Kind.BOOL)
def all(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """Whether no number over the axes is zero, bool."""


@reduction(Kind.INDEX)
def argmax(x: Any, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """Where the largest number is along an axis (None: in one line), int."""


@reduction(Kind.INDEX)
def argmin(x: Any, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """Where the smallest number is along an axis (None: in one line), int."""


# -- along an axis ----------------------------------------------------------------------------


@cumulative(_cumulative_sum)
def cumsum(x: Any, axis: int | None) -> Array:
    """The sum of all numbers so far along an axis; None: of the tensor in one line."""


@cumulative(_cumulative_prod)
def cumprod(x: Any, axis: int | None) -> Array:
    """The product of all numbers so far along an axis; None: in one line."""


@cumulative(_cummax)
def cummax(x: Any, axis: int | None) -> Array:
    """The largest number so far along an axis; None: in one line."""


@cumulative(_cummin)
def cummin(x: Any, axis: int | None) -> Array:
    """The smallest number so far along an axis; None: in one line."""


# -- bounds and masks -------------------------------------------------------------------------


@row(Kind.FLOAT)
def clamp(x: Any, min: Any = None, max: Any = None) -> Array:
    """The numbers, none below ``min`` or above ``max`` (which are operands too, or None)."""
    roles = (("x", x), ("min", min), ("max", max))
    entered = enter("clamp", roles)
    broadcast("clamp", *(operand for _, operand in roles))
    values, low, high = entered.arrays()
    if low is not None or high is not None:
        values = entered.function("clip")(values, low, high)
    return finish(entered, values)


@row(Kind.ARRAY)
def where(mask: Any, a: Any, b: Any) -> Array:
    """The numbers of ``a`` where ``mask`` (an array of booleans) is true, else those of ``b``."""
    roles = (("a", a), ("b", b))
    check_mask("where", mask)
    entered = enter("where", roles, beside=(("mask", mask),))
    broadcast("where", mask, a, b)
    result = entered.xp.where(mask, *entered.arrays())
    return as_result(entered, result)


@row(Kind.ARRAY)
def mask_fill(x: Any, mask: Any, value: Any) -> Array:
    """``x``, with ``value`` where ``mask`` (an array of booleans) is true; both fit into ``x``."""
    roles = (("x", x), ("value", value))
    check_array("x", x)
    check_mask("mask_fill", mask)
    entered = enter("mask_fill", roles, beside=(("mask", mask),))
    fits_into("mask_fill", x, mask, value)
    kept, filled = entered.arrays()
    return as_result(entered, entered.xp.where(mask, filled, kept))
