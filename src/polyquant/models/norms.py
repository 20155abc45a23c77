"""Norms of arrays and of their differences: float64 sums over runs, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from polyquant.arrays import HostArray
from polyquant.quality import relative

#: Elements summed at a time.
_RUN = 1 << 20


def squared_norm(x: HostArray) -> float:
    """The sum of squares."""
    return sum(float(run @ run) for run in _runs(x))


def difference(a: HostArray, b: HostArray) -> tuple[float, float]:
    """``|a - b| / |a|`` (Frobenius norms) and the largest ``|a - b|``, for arrays of one shape.

    The relative error is infinite where only ``a`` is zero, and NaN where either holds a NaN.
    """
    squared_error = squared = largest = 0.0
    for left, right in zip(_runs(a), _runs(b), strict=True):
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.where(left == right, 0.0, np.abs(left - right))  # inf - inf is no error
            squared_error += float(error @ error)
            squared += float(left @ left)
        largest = float(np.fmax(largest, error.max(initial=0.0)))
    return relative(squared_error, squared), largest


def _runs(x: HostArray) -> Iterator[npt.NDArray[np.float64]]:
    flat = x.reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    for start in range(0, flat.size, _RUN):
        yield flat[start : start + _RUN].astype(np.float64)
