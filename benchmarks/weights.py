"""Weights of rivals, in as many copies as it takes that none is still in a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Together the copies of a weight are at least this large, so that they come from memory.
ROTATED_BYTES = 100_000_000


class Missing(Exception):
    """Why a rival cannot be measured here, or how it is installed."""


@dataclass(frozen=True)
class Prepared:
    """A weight (out, in) in a rival's form, in several copies.

    ``enter`` brings float32 activations (m, in) to what it takes, which is not timed; ``product``
    multiplies them by one copy; ``leave`` makes a NumPy array of the result. ``values`` are the
    numbers that the weight stands for. ``takes`` says what is multiplied, where it is not the
    activations as they are given.
    """

    name: str
    nbytes: int
    copies: int
    enter: Callable[[Array], Any]
    product: Callable[[int, Any], Any]
    values: Array
    leave: Callable[[Any], Array] = np.asarray
    kept: Any = None
    takes: str = ""


def copies_of(nbytes: int) -> int:
    """How many copies of so many bytes are ROTATED_BYTES, at least two."""
    return max(2, -(-ROTATED_BYTES // max(nbytes, 1)))


def aligned(array: Array) -> Array:
    """A copy whose memory begins at a multiple of 64 bytes."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    made = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made
