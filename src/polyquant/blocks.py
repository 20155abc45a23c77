"""How a tensor falls into blocks: the grid, runs of whole rows, and blocks side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from polyquant.arrays import Array, place
from polyquant.scheme import QuantScheme

#: Elements worked on at a time where values can be looked at: bounds memory, and fits the cache.
CHUNK = 1 << 19


class Blocks(NamedTuple):
    """How a stored shape falls into blocks: the block's extents and the number along each axis."""

    shape: tuple[int, ...]
    extents: tuple[int, ...]
    counts: tuple[int, ...]


class Rows(NamedTuple):
    """A run of rows (first stored axis) of whole blocks, and the rows of the grid they have."""

    rows: slice
    grid_rows: slice
    blocks: Blocks


def blocks_of(scheme: QuantScheme, shape: Sequence[int]) -> Blocks:
    """The blocks of a scheme on a stored shape (or the view of it that the scheme has).

    A shape without axes counts as one element.
    """
    counts, extents = scheme.scale_shape(shape), scheme.block_extents(shape)
    if scheme.grouped:  # along the last axis every element finds its own scale
        counts, extents = (*counts[:-1], shape[-1]), (*extents[:-1], 1)
    return Blocks(scheme.laid(shape) or (1,), extents or (1,), counts or (1,))


def row_runs(blocks: Blocks, *, whole: bool) -> Iterator[Rows]:
    """Cut a tensor into runs of rows of about CHUNK elements (or leave it whole)."""
    if whole:  # whose extents may be symbols
        yield Rows(slice(None), slice(None), blocks)
        return
    height, extent = blocks.shape[0], blocks.extents[0]
    step = height
    if math.prod(blocks.shape) > CHUNK:
        step = max(1, CHUNK // max(1, math.prod(blocks.shape[1:])))
        if blocks.counts[0] > 1:
            step = max(1, step // extent) * extent
    for start in range(0, height, step) if height else (0,):
        stop = min(start + step, height)
        if blocks.counts[0] > 1:
            first, last = start // extent, math.ceil(stop / extent)
        else:
            first, last = 0, blocks.counts[0]
        shape = (stop - start, *blocks.shape[1:])
        extents = (max(1, min(extent, stop - start)), *blocks.extents[1:])
        counts = (last - first, *blocks.counts[1:])
        yield Rows(slice(start, stop), slice(first, last), Blocks(shape, extents, counts))


def row_slices(shape: Sequence[int]) -> Iterator[Any]:
    """Indices that cut an array of that shape into rows of about CHUNK elements."""
    if not shape:
        yield ...
        return
    step = max(1, CHUNK // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])), ...)


def split(xp: Any, x: Array, blocks: Blocks, fill: float = 0.0) -> Array:
    """View ``x`` as ``(n0, b0, n1, b1, ...)``: block counts and extents side by side.

    Short last blocks are filled up with ``fill``.
    """
    for axis, (extent, count) in enumerate(zip(blocks.extents, blocks.counts, strict=True)):
        missing = extent * count - x.shape[axis]
        if missing > 0:
            shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
            more = xp.full(shape, fill, dtype=x.dtype, **place(x))
            x = xp.concat([x, more], axis=axis)
    pairs = zip(blocks.counts, blocks.extents, strict=True)
    return xp.reshape(x, tuple(n for pair in pairs for n in pair))


def merge(xp: Any, x: Array, blocks: Blocks) -> Array:
    """Undo ``split``."""
    full = tuple(n * b for n, b in zip(blocks.counts, blocks.extents, strict=True))
    x = xp.reshape(x, full)
    return x if full == blocks.shape else x[tuple(slice(0, d) for d in blocks.shape)]


def spread(xp: Any, values: Array, blocks: Blocks) -> Array:
    """View a grid as ``(n0, 1, n1, 1, ...)``, which broadcasts against ``split``."""
    return xp.reshape(values, tuple(n for count in blocks.counts for n in (count, 1)))
