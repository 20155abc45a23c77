"""The compiled kernels of the CPU, best first. What is compiled is in native/ of the repository.

They serve the arrays of every library that lie in the memory of the CPU, and read the canonical
bytes where they are. Where the compiled part is missing they say so, and the definition runs.
"""

from __future__ import annotations

from polyquant.backends.native import integers, products, quantizing
from polyquant.backends.native.compiled import missing
from polyquant.kernel import Kernel, Problem
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme

_MOST_AXES = 8


def _why_not(problem: Problem) -> str | None:
    why = missing()
    if why is not None:
        return why
    if problem.transformed:
        return "a transformation of the library watches the operands"
    for side in (problem.a, problem.b):
        if side == "float64":
            return "it computes in float32, and a float64 operand asks for more"
    if any(axes is not None and len(axes) > _MOST_AXES for axes in problem.layout):
        return f"it takes tensors of up to {_MOST_AXES} axes"
    return None


def _why_not_product(problem: Problem) -> str | None:
    if not any(isinstance(side, QuantScheme) for side in (problem.a, problem.b)):
        return "neither operand is quantized"
    for axes in problem.layout:
        if axes is not None and axes[:-2] != tuple(range(len(axes) - 2)):
            return "the axes of its matrices are not the last two of the stored ones"
    return _why_not(problem)


def _why_not_integers(problem: Problem) -> str | None:
    left, right = problem.a, problem.b
    if not isinstance(left, QuantScheme) or not isinstance(right, QuantScheme):
        return "it multiplies two quantized operands"
    axes = problem.layout
    if axes[0] != tuple(range(len(axes[0] or ()))) or axes[1] != (1, 0):
        return "the lines of both operands must lie along k, and the right one be a matrix"
    return integers.refuses_left(left) or integers.refuses_right(right) or _why_not(problem)


def _why_not_quantize(problem: Problem) -> str | None:
    extras = as_scheme(problem.option).extras if problem.option else ()
    return f"it does not know {extras[0]}" if extras else _why_not(problem)


KERNELS = (
    Kernel(
        "native.integers", "matmul", _why_not_integers, integers.matmul, rounds=integers.of_floats
    ),
    Kernel("native.matmul", "matmul", _why_not_product, products.matmul),
    Kernel("native.dequantize", "dequantize", _why_not, products.dequantize),
    Kernel("native.quantize", "quantize", _why_not_quantize, quantizing.quantize),
)
