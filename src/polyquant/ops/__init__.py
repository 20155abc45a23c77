"""The operations on quantized tensors: ``pq.ops.<name>``."""

from polyquant.ops import compute
from polyquant.ops.compute import *  # noqa: F403  (the compute ops are listed once, there)
from polyquant.ops.conversion import dequantize, quantize
from polyquant.ops.operators import operator, single
from polyquant.ops.products import linear, matmul, operator_matmul
from polyquant.ops.propagation import propagation
from polyquant.ops.protocol import array_function

__all__ = [
    "array_function",
    "dequantize",
    "linear",
    "matmul",
    "operator",
    "operator_matmul",
    "propagation",
    "quantize",
    "single",
]
__all__ += compute.__all__
