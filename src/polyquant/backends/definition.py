"""The definition as the last kernel of every backend: it runs everything, on any library.

Reads the canonical bytes, decodes them to float32 (float64 beside a float64 operand) and lets the
library multiply. The caller guarantees shapes, devices and finite input.
"""

from __future__ import annotations

from polyquant import calibrate, standard
from polyquant.kernel import Kernel, Problem


def _always(problem: Problem) -> str | None:
    return None


KERNELS = (
    Kernel("definition.matmul", "matmul", _always, standard.matmul, takes_extras=True),
    Kernel("definition.quantize", "quantize", _always, calibrate.quantize, takes_extras=True),
    Kernel("definition.dequantize", "dequantize", _always, standard.dequantize, takes_extras=True),
)
