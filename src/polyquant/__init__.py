"""polyquant: one quantized tensor for every Python array library.

import polyquant as pq
q = pq.quantize(weight, "nf4")      # NumPy, torch, JAX: the same codes and scales, bit for bit
y = x @ q.T                         # dispatched to the best kernel that can
"""

from polyquant import errors, ops
from polyquant.backends.native.compiled import num_threads, set_num_threads
from polyquant.data import TensorData
from polyquant.dispatch import (
    device_of,
    devices,
    explain,
    is_quantized,
    same_backend,
    supports,
    tune,
)
from polyquant.formats import Checkpoint, load, open_checkpoint, save
from polyquant.ops import concat, linear, matmul, propagation, quantize, stack
from polyquant.qtensor import QTensor, from_data
from polyquant.quality import Quality, measure
from polyquant.scheme import Offset, QuantScheme, presets, scheme
from polyquant.tree import dequantize_tree, flatten_tree, quantize_tree, unflatten_tree
from polyquant.values import QuantMode, QuantStore, QuantValue, ScaleDtype

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "Offset",
    "QTensor",
    "Quality",
    "QuantMode",
    "QuantScheme",
    "QuantStore",
    "QuantValue",
    "ScaleDtype",
    "TensorData",
    "concat",
    "dequantize_tree",
    "device_of",
    "devices",
    "errors",
    "explain",
    "flatten_tree",
    "from_data",
    "is_quantized",
    "linear",
    "load",
    "matmul",
    "measure",
    "num_threads",
    "open_checkpoint",
    "ops",
    "presets",
    "propagation",
    "quantize",
    "quantize_tree",
    "same_backend",
    "save",
    "scheme",
    "set_num_threads",
    "stack",
    "supports",
    "tune",
    "unflatten_tree",
]
