"""Blocks on the host: what calibrations by sums share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from polyquant.arrays import Array, HostArray, backend_of
from polyquant.blocks import Rows, blocks_of, row_runs, split
from polyquant.errors import TracedCalibration
from polyquant.scheme import QuantScheme
from polyquant.standard import finite_f32

F64 = npt.NDArray[np.float64]


def on_host(x: Array, what: str) -> HostArray:
    """The values on the host. Raises TracedCalibration under a tracer."""
    owner = backend_of(x)
    if owner.is_traced(x):
        raise TracedCalibration(what=what)
    return owner.to_host(x)


def block_runs(
    x: HostArray, scheme: QuantScheme, *, nonfinite: str, fill: float = np.nan
) -> Iterator[tuple[Rows, HostArray]]:
    """Run by run, the values as ``(n0, b0, n1, b1, ...)`` float32, short blocks filled up."""
    blocks = blocks_of(scheme, x.shape)
    flat = x.reshape(blocks.shape)
    for run in row_runs(blocks, whole=False):
        part = finite_f32(flat[run.rows], nonfinite=nonfinite, for_range=True)
        yield run, split(np, part, run.blocks, fill)


def lines(x: HostArray) -> HostArray:
    """Split values as ``(n0, n1, ..., elements of a block)``, contiguous."""
    rank = x.ndim // 2
    order = (*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))
    moved = np.transpose(x, order)
    size = int(np.prod(moved.shape[rank:]))  # named, since -1 cannot be told for empty arrays
    return np.ascontiguousarray(moved.reshape((*moved.shape[:rank], size)))


def fixed_sum(x: F64) -> F64:
    """The sum along the last axis by halving: an order that depends on the length alone."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = folded if x.shape[-1] % 2 == 0 else np.concatenate([folded, x[..., -1:]], axis=-1)
    return x[..., 0] if x.shape[-1] else np.zeros(x.shape[:-1])
