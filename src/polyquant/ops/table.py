"""What a compute op is: one row of facts, and the way from its operands to its result.

An op is declared in compute.py by its signature and docstring under a decorator of this file, which
makes the function: ``unary``, ``binary``, ``reduction``, ... The declaration is the op's row of the
table; ``row_of`` gives it back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from polyquant.arrays import Array
from polyquant.errors import InvalidArgument
from polyquant.ops.operands import (
    Axes,
    Operands,
    broadcast,
    check_flag,
    enter,
    one_axis,
    which_axes,
)
from polyquant.ops.propagation import gathered, propagates, quantized_again

Declared = TypeVar("Declared", bound=Callable[..., Any])
Run = Callable[..., Array]


class Decorator(Protocol):
    """What takes a declared function and gives one of the same signature."""

    def __call__(self, described: Declared, /) -> Declared: ...


class Kind(StrEnum):
    """What an op gives, and what becomes of it under propagation."""

    FLOAT = "float"  # computed numbers, quantized again
    VALUES = "values"  # numbers of the operand, whose codes are gathered
    ARRAY = "array"  # numbers of the operand with others put in: always an array, so they stay
    BOOL = "bool"
    INDEX = "index"


class Row(NamedTuple):
    """The facts of one op: its name, what it gives, its parameters, and what it does in words."""

    name: str
    kind: Kind
    parameters: tuple[str, ...]
    summary: str


def row(kind: Kind) -> Decorator:
    """Mark a function that is written out as an op of the table."""

    def declare(function: Declared) -> Declared:
        _note(function, function, kind)
        return function

    return declare


def row_of(op: Callable[..., Any]) -> Row:
    """The row of an op."""
    found: Row = op.__dict__["row"]
    return found


def unary(run: Run | None = None) -> Decorator:
    """An op of one operand, number by number: ``run`` on it, or the library's function."""

    def declare(described: Declared) -> Declared:
        name = described.__name__

        @wraps(described)
        def op(x: Any) -> Any:
            entered = enter(name, (("x", x),))
            return finish(entered, (run or entered.function(name))(*entered.arrays()))

        return _note(op, described, Kind.FLOAT)

    return declare


def binary(run: Run | None = None, kind: Kind = Kind.FLOAT) -> Decorator:
    """An op of two operands, number by number, broadcast.

    ``run``: a Python operator, which every library gives its arrays; else the library's function.
    """

    def declare(described: Declared) -> Declared:
        name = described.__name__

        @wraps(described)
        def op(a: Any, b: Any) -> Any:
            entered = enter(name, (("a", a), ("b", b)))
            broadcast(name, a, b)
            if run is not None:
                result = run(*entered.values())
            else:
                result = entered.function(name)(*entered.arrays())
            return result if kind is Kind.BOOL else finish(entered, result)

        return _note(op, described, kind)

    return declare


def reduction(kind: Kind = Kind.FLOAT, *, run: Run | None = None) -> Decorator:
    """An op over some axes or all of them.

    ``run(operands, x, axis=, keepdims=)``; else the library's function, with the same keywords.
    """

    def declare(described: Declared) -> Declared:
        name = described.__name__

        @wraps(described)
        def op(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Any:
            entered = enter(name, (("x", x),))
            axes = which_axes(axis, x.shape, several=kind is not Kind.INDEX)
            check_flag("keepdims", keepdims)
            if kind in (Kind.VALUES, Kind.INDEX):
                check_not_empty(name, x.shape, axes)
            (values,) = entered.values()
            if kind is Kind.VALUES and propagates() and not isinstance(axes, tuple):
                place = entered.function(f"arg{name}")(values, axis=axes, keepdims=True)
                exact = gathered(x, place, axes, keepdims=keepdims)
                if exact is not None:
                    return exact
            reduce = entered.function(name) if run is None else partial(run, entered)
            result = reduce(values, axis=axes, keepdims=keepdims)
            return result if kind in (Kind.BOOL, Kind.INDEX) else finish(entered, result)

        return _note(op, described, kind)

    return declare


def cumulative(run: Callable[..., Array]) -> Decorator:
    """An op along an axis: ``run(operands, x, axis)``; axis None is the tensor in one line."""

    def declare(described: Declared) -> Declared:
        name = described.__name__

        @wraps(described)
        def op(x: Any, axis: int | None) -> Any:
            entered = enter(name, (("x", x),))
            along = 0 if axis is None else one_axis(axis, x.shape)
            (values,) = entered.values()
            values = entered.xp.reshape(values, (-1,)) if axis is None else values
            return finish(entered, run(entered, values, along))

        return _note(op, described, Kind.FLOAT)

    return declare


def finish(entered: Operands, result: Array, *, product: bool = False) -> Any:
    """A float result in its dtype; quantized again where that is asked for.

    ``product``: a float array beside the quantized operand does not keep the result from it.
    """
    result = as_result(entered, result)
    if propagates() and (product or not entered.has_floats):
        return quantized_again(result, entered.given)
    return result


def as_result(entered: Operands, result: Array) -> Array:
    """A float result in its dtype, whatever the mode of propagation."""
    return entered.xp.astype(result, entered.kind, copy=False)


def picked(entered: Operands, values: Array, places: Array, axis: int) -> Any:
    """The numbers at some places along an axis; under propagation their codes, if they can be."""
    if propagates():
        exact = gathered(entered.given[0], places, axis)
        if exact is not None:
            return exact
    return finish(entered, entered.xp.take_along_axis(values, places, axis=axis))


def check_not_empty(op: str, shape: Any, axes: Axes) -> None:
    """Refuse a choice among no numbers. Raises InvalidArgument."""
    over = range(len(shape)) if axes is None else (axes,) if isinstance(axes, int) else axes
    if any(shape[a] == 0 for a in over):
        wanted = f"a tensor with numbers along the axes that {op} goes over"
        raise InvalidArgument(name="x", wanted=wanted, got=tuple(shape))


def _note(op: Any, described: Declared, kind: Kind) -> Declared:
    summary = (inspect.getdoc(described) or "").partition("\n")[0]
    parameters = tuple(inspect.signature(described).parameters)
    op.row = Row(described.__name__, kind, parameters, summary)
    return cast("Declared", op)
