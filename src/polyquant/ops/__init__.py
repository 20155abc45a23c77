"""The operations on quantized tensors: ``pq.ops.<name>``."""

from polyquant import views
from polyquant.ops import compute, convolution, places
from polyquant.ops.compute import *  # noqa: F403  (the compute ops are listed once, there)
from polyquant.ops.conversion import dequantize, quantize
from polyquant.ops.convolution import *  # noqa: F403
from polyquant.ops.operators import operator, single
from polyquant.ops.places import *  # noqa: F403
from polyquant.ops.products import linear, matmul, operator_matmul
from polyquant.ops.propagation import propagation
from polyquant.ops.protocol import array_function
from polyquant.views import *  # noqa: F403  (the layout ops are listed once, there)

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
__all__ += convolution.__all__
__all__ += places.__all__
__all__ += views.__all__
