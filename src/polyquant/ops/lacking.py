"""What the array API standard lacks, written in its terms, or for the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from polyquant.arrays import Array, Backend, HostArray


def running(xp: Any, better: Callable[[Array, Array], Array], x: Array, axis: int) -> Array:
    """The best number so far along an axis, by doubling: after a step of s each sees 2 s before."""
    reach, length = 1, x.shape[axis]
    lead = (slice(None),) * axis
    while reach < length:
        earlier, later = x[(*lead, slice(None, -reach))], x[(*lead, slice(reach, None))]
        kept = x[(*lead, slice(None, reach))]
        x = xp.concat([kept, better(earlier, later)], axis=axis)
        reach *= 2
    return x


# -- on the host ------------------------------------------------------------------------------


def host_function(owner: Backend, name: str) -> Callable[..., Array]:
    """A function for arrays of a library that has none of its own: NumPy computes it."""
    function = _HOST[name]

    def through_host(x: Array, *rest: Any) -> Array:
        return owner.from_host(function(owner.to_host(x), *rest), owner.device_of(x))

    return through_host


def _erf(x: HostArray) -> HostArray:
    """The error function in float64, rounded once."""
    exact: HostArray = np.vectorize(math.erf, otypes=[np.float64])(x)
    return exact.astype(x.dtype)


_HOST: Mapping[str, Callable[..., HostArray]] = MappingProxyType({"erf": _erf})
