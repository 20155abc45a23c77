"""Two checkpoints, tensor by tensor: the same bits, the same values, or how far apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from polyquant.arrays import HostArray
from polyquant.files.checkpoint import Checkpoint
from polyquant.models.norms import difference
from polyquant.qtensor import QTensor


class Verdict(StrEnum):
    """What comparing one tensor found."""

    EQUAL_BITS = "equal bits"
    EQUAL_VALUES = "equal values"
    DIFFERENT = "different"
    SHAPES = "shapes differ"
    ONLY_FIRST = "only in first"
    ONLY_SECOND = "only in second"


@dataclass(frozen=True)
class Comparison:
    """One tensor of two checkpoints.

    ``relative_error`` is ``|a - b| / |a|`` of the (dequantized) values and ``max_error`` the
    largest ``|a - b|``; NaN where values cannot be compared.
    """

    name: str
    verdict: Verdict
    relative_error: float = math.nan
    max_error: float = math.nan

    def is_within(self, tolerance: float) -> bool:
        """Whether the tensors are equal, or differ by no more than a relative error."""
        return self.relative_error <= tolerance  # False for NaN: nothing to compare


def compare(first: Checkpoint, second: Checkpoint) -> Iterator[Comparison]:
    """Compare the tensors of two checkpoints by name, in the order of the first."""
    here, there = list(first), list(second)
    others = set(there)
    for name in here:
        if name not in others:
            yield Comparison(name, Verdict.ONLY_FIRST)
        else:
            yield compare_tensors(name, first[name], second[name])
            first.release()
            second.release()
    known = set(here)
    yield from (Comparison(name, Verdict.ONLY_SECOND) for name in there if name not in known)


def compare_tensors(name: str, a: Any, b: Any) -> Comparison:
    """Compare two NumPy arrays or QTensors on "numpy"."""
    if tuple(a.shape) != tuple(b.shape):
        return Comparison(name, Verdict.SHAPES)
    if _same_bits(a, b):
        return Comparison(name, Verdict.EQUAL_BITS, 0.0, 0.0)
    relative_error, max_error = difference(_values(a), _values(b))
    verdict = Verdict.EQUAL_VALUES if relative_error == 0 else Verdict.DIFFERENT
    return Comparison(name, verdict, relative_error, max_error)


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, QTensor) or isinstance(b, QTensor):
        both = isinstance(a, QTensor) and isinstance(b, QTensor)
        return both and bool(a.scheme == b.scheme and a.to_data() == b.to_data())
    if a.dtype != b.dtype:
        return False
    left, right = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return bool(np.array_equal(left, right))


def _values(x: Any) -> HostArray:
    values: HostArray = x.dequantize() if isinstance(x, QTensor) else x
    return values
