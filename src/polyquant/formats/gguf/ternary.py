"""I2_S of Microsoft's fork of llama.cpp (bitnet.cpp): ternary codes, then one scale in 32 bytes.

The type's number does not say how the codes lie, which depends on how the writer was built. So it
is read only with ``config={"i2_s": LAYOUT}``: "x86", which its converter writes, has blocks of 128
flat values in 32 bytes; "x86-rows" (built without ACT_PARALLEL) has four rows in a byte.
"""

from __future__ import annotations

import math

import numpy as np

from polyquant.arrays import HostArray
from polyquant.files.assemble import assemble
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme

TYPE_ID, NAME = 36, "I2_S"
LAYOUTS = ("x86", "x86-rows")
_TAIL_BYTES = 32
_SHIFTS = np.asarray([6, 4, 2, 0], np.uint8)


def scheme() -> QuantScheme:
    """What its values are."""
    return as_scheme("q2s/tensor:f32")


def size_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) // 4 + _TAIL_BYTES


def fits(shape: tuple[int, ...], layout: str) -> bool:
    """Whether a shape is made of whole blocks."""
    if layout == "x86":
        return math.prod(shape) % 128 == 0
    return len(shape) == 2 and shape[0] % 4 == 0


def read(raw: HostArray, shape: tuple[int, ...], layout: str, order: str) -> QTensor:
    """A tensor of its bytes. The fourth code is zero, as in its products."""
    count = math.prod(shape) // 4
    if layout == "x86":
        lanes = raw[:count].reshape(-1, 1, 32) >> _SHIFTS[:, None]
    else:
        lanes = raw[:count].reshape(shape[0] // 4, 1, shape[1]) >> _SHIFTS[:, None]
    stored = lanes & 3
    codes = np.where(stored == 3, 0, stored - 1 & 3).astype(np.uint8)
    scale = raw[count : count + 4].view(f"{order}f4").astype(np.float32)
    return assemble(scheme(), shape, {"codes": codes, "scales": scale})
