"""What the array API standard lacks: in its terms where that will do, else for the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from polyquant.arrays import Array, Backend, HostArray, place


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


def flat_positions(xp: Any, indices: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Where in the line of all numbers of ``shape`` each of ``indices`` points, along an axis.

    ``indices`` are of the library's default integers (JAX's are of 32 bits); negative ones count
    from the end. Along every other axis a number lies where its index does.
    """
    found = xp.where(indices < 0, indices + shape[axis], indices) * math.prod(shape[axis + 1 :])
    for other, extent in enumerate(indices.shape):
        if other != axis:
            steps = xp.arange(extent, dtype=indices.dtype, **place(indices))
            ones = (1,) * (len(shape) - other - 1)
            found = found + xp.reshape(steps, (extent, *ones)) * math.prod(shape[other + 1 :])
    return found


# -- on the host ------------------------------------------------------------------------------


def host_function(owner: Backend, name: str) -> Callable[..., Array]:
    """A function for arrays of a library that has none of its own: NumPy computes it."""
    function = _HOST[name]

    def through_host(x: Array, *rest: Any) -> Array:
        there = [owner.to_host(item) if owner.is_array(item) else item for item in (x, *rest)]
        return owner.from_host(function(*there), owner.device_of(x))

    return through_host


def _erf(x: HostArray) -> HostArray:
    """The error function in float64, rounded once."""
    exact: HostArray = np.vectorize(math.erf, otypes=[np.float64])(x)
    return exact.astype(x.dtype)


def _put(x: HostArray, positions: HostArray, values: HostArray, add: bool) -> HostArray:
    """A copy of a line of numbers with others at some positions, or added to what is there."""
    made = np.array(x)
    if add:
        np.add.at(made, positions, values)
    else:
        made[positions] = values
    return made


_HOST: Mapping[str, Callable[..., HostArray]] = MappingProxyType({"erf": _erf, "put_at": _put})
