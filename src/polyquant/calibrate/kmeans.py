"""Lookup tables fitted to a tensor: one-dimensional k-means, deterministic."""

from __future__ import annotations

import numpy as np

from polyquant.arrays import Array
from polyquant.calibrate.host import F64, block_runs, lines, on_host
from polyquant.scheme import QuantScheme
from polyquant.standard import reduce_blocks
from polyquant.values import F32

#: Lloyd's steps at most. Sixteen entries on normal data settle to float32 in about forty.
STEPS = 100
#: Values that are looked at, evenly spaced over the sorted tensor, so that fitting stays quick.
SAMPLE = 1 << 20


def fit_table(x: Array, scheme: QuantScheme, nonfinite: str) -> F32:
    """``2**bits`` ascending entries that fit the values of ``x`` over their blocks' magnitudes.

    Every block is divided by its largest magnitude first. The two end entries are the extremes of
    what results, so that calibration minmax puts a block's extreme exactly on an entry; the others
    start at even quantiles and move to the means of their cells (Lloyd), all in float64 on the
    host. Raises TracedCalibration.
    """
    host = on_host(x, "table='kmeans'")
    values = _normalized(host, scheme, nonfinite)
    count = 2**scheme.bits
    if values.size == 0 or values[0] == values[-1]:
        return np.linspace(-1.0, 1.0, count, dtype=np.float32)
    entries = values[np.linspace(0, values.size - 1, count).round().astype(np.int64)]
    sums = np.concatenate([[0.0], np.cumsum(values)])
    for _ in range(STEPS):
        moved = _lloyd(values, sums, entries)
        if np.array_equal(moved.astype(np.float32), entries.astype(np.float32)):
            break
        entries = moved
    return entries.astype(np.float32)


def _normalized(host: Array, scheme: QuantScheme, nonfinite: str) -> F64:
    """The sorted values over their blocks' magnitudes, at most SAMPLE of them."""
    alpha = reduce_blocks(host, scheme, "max_abs", nonfinite=nonfinite)
    alpha = alpha.reshape(alpha.shape or (1,))
    found = []
    for run, values in block_runs(host, scheme, nonfinite=nonfinite):
        top = alpha[run.grid_rows, ...][..., None]
        line = lines(values).astype(np.float64)
        kept = (line / np.where(top > 0, top, 1.0))[~np.isnan(line) & (top > 0)]
        found.append(kept)
    ordered = np.sort(np.concatenate(found)) if found else np.zeros(0)
    if ordered.size <= SAMPLE:
        return ordered
    return ordered[np.linspace(0, ordered.size - 1, SAMPLE).round().astype(np.int64)]


def _lloyd(values: F64, sums: F64, entries: F64) -> F64:
    """One step: every entry but the ends becomes the mean of the values nearest to it."""
    edges = np.searchsorted(values, (entries[:-1] + entries[1:]) / 2, side="right")
    first = np.concatenate([[0], edges])
    last = np.concatenate([edges, [values.size]])
    filled = last > first
    means = (sums[last] - sums[first]) / np.maximum(last - first, 1)
    moved = np.where(filled, means, entries)
    moved[0], moved[-1] = entries[0], entries[-1]
    return np.maximum.accumulate(moved)
