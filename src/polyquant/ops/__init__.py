"""The operations on quantized tensors: ``pq.ops.<name>``."""

from polyquant.ops.conversion import dequantize, quantize
from polyquant.ops.products import linear, matmul, operator_matmul
from polyquant.ops.protocol import array_function

__all__ = [
    "array_function",
    "dequantize",
    "linear",
    "matmul",
    "operator_matmul",
    "quantize",
]
