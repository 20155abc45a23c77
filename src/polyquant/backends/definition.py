"""The definition as the last kernel of every backend: it runs everything, on any library.

Reads the canonical bytes, decodes them to float32 (float64 beside a float64 operand) and lets the
library multiply. The caller guarantees shapes, devices, indices and finite input.
"""

from __future__ import annotations

from typing import Any

from polyquant import calibrate, standard, views
from polyquant.arrays import Array
from polyquant.kernel import Kernel, Problem
from polyquant.qtensor import QTensor


def _always(problem: Problem) -> str | None:
    return None


def _embedding(rows: Array, weight: QTensor, kind: Any) -> QTensor:
    """The rows of a weight, still quantized: a kernel of "dequantize" decodes them."""
    return views.take(weight, rows, 0)


KERNELS = (
    Kernel("definition.matmul", "matmul", _always, standard.matmul, takes_extras=True),
    Kernel("definition.quantize", "quantize", _always, calibrate.quantize, takes_extras=True),
    Kernel("definition.dequantize", "dequantize", _always, standard.dequantize, takes_extras=True),
    Kernel("definition.embedding", "embedding", _always, _embedding, takes_extras=True),
)
