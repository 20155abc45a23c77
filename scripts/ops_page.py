"""docs/ops.md: every operation, what it gives, and the functions and operators that reach it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import markdown
from markdown import table

from polyquant import QTensor, ops, views
from polyquant.backends.numpy.functions import ROWS as NUMPY
from polyquant.backends.torch.functions import ROWS as TORCH
from polyquant.calls import Call, Row
from polyquant.ops import compute, convolution, places

#: Operation -> Python's operator, as it is written.
OPERATORS = {
    "add": "q + y",
    "sub": "q - y",
    "mul": "q * y",
    "div": "q / y",
    "floor_divide": "q // y",
    "remainder": "q % y",
    "pow": "q ** y",
    "matmul": "q @ y",
    "neg": "-q",
    "abs": "abs(q)",
    "equal": "q == y",
    "not_equal": "q != y",
    "less": "q < y",
    "less_equal": "q <= y",
    "greater": "q > y",
    "greater_equal": "q >= y",
    "index": "q[key]",
}
#: Operation -> the method that NumPy calls otherwise.
METHODS = {"clamp": "clip"}
GIVES = {
    "float": "floats",
    "values": "its own numbers",
    "array": "floats, never quantized again",
    "bool": "bool",
    "index": "int",
}
COMPUTE = (*compute.__all__, *convolution.__all__, *places.__all__)


def page() -> str:
    """The page."""
    return markdown.page(
        [
            "# Operations",
            "Each is a function `pq.ops.NAME`; `help(pq.ops.NAME)` says what it takes and raises. "
            "The last columns list the functions of NumPy and torch, and of torch's methods those "
            "of the same names, that do the same when a QTensor comes.",
            "## What computes",
            "Operands are QTensors, arrays of the same device, and numbers. Float results have the "
            "dtype of the float arrays among the operands, float32 where there are none. Under "
            '`pq.propagation("propagate")` floats are quantized again with the scheme of the '
            "first quantized operand, and an operation that gives the tensor's own numbers keeps "
            "their codes where the blocks allow.",
            _table([(name, _summary(name), _gives(name)) for name in ("matmul", "linear")]),
            _table([(name, _summary(name), _gives(name)) for name in COMPUTE]),
            "## What moves",
            "The first operand is a QTensor, and so is the result: exactly the numbers that the "
            "same operation gives on `q.dequantize()`.",
            _table([(name, _summary(name), "QTensor") for name in views.__all__]),
        ]
    )


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    head = ["operation", "what it does", "gives", "on a QTensor", "NumPy", "torch"]
    return table(
        head,
        [
            [f"`{name}`", does, gives, _on_tensor(name), _names(NUMPY, name), _names(TORCH, name)]
            for name, does, gives in rows
        ],
    )


def _gives(name: str) -> str:
    row = getattr(getattr(ops, name), "row", None)
    return GIVES["float" if row is None else row.kind]


def _summary(name: str) -> str:
    """The first line of the docstring."""
    op: Callable[..., Any] = getattr(ops, name)
    return (inspect.getdoc(op) or "").partition("\n")[0].replace("``", "`")


def _on_tensor(name: str) -> str:
    method = METHODS.get(name, name)
    found = [OPERATORS[name]] if name in OPERATORS else []
    if callable(getattr(QTensor, method, None)):
        found.append(f"q.{method}")
    return ", ".join(f"`{text}`" for text in found)


def _names(rows: Sequence[Row], name: str) -> str:
    """The functions of a library that reach an operation, but for methods of its tensors."""
    found = [
        function
        for functions, row in rows
        if any(name in (form.op, form.also) for form in _forms(row))
        for function in functions.split()
        if not function.startswith("Tensor.")
    ]
    return ", ".join(f"`{function}`" for function in dict.fromkeys(found))


def _forms(row: Any) -> Sequence[Call]:
    return (row,) if isinstance(row, Call) else row.forms
