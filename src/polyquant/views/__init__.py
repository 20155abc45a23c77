"""Layout operations: the same numbers in other places, exactly, and still quantized.

Codes are only moved and scales only copied, so ``op(q).dequantize()`` is ``op(q.dequantize())`` to
the bit. What the scheme cannot hold is refused.
"""

from polyquant.views.indexing import index
from polyquant.views.joining import concat, stack
from polyquant.views.plain import canonical
from polyquant.views.select import chunk, gather, narrow, repeat, select, split, take, tile
from polyquant.views.shape import (
    expand,
    flip,
    moveaxis,
    permute,
    reshape,
    squeeze,
    swapaxes,
    transpose,
    unsqueeze,
)

__all__ = [
    "canonical",
    "chunk",
    "concat",
    "expand",
    "flip",
    "gather",
    "index",
    "moveaxis",
    "narrow",
    "permute",
    "repeat",
    "reshape",
    "select",
    "split",
    "squeeze",
    "stack",
    "swapaxes",
    "take",
    "tile",
    "transpose",
    "unsqueeze",
]
