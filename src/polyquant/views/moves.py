"""Where elements go: moves of some adjacent axes, and the blocks that survive them.

A move takes ``inner`` axes and gives ``outer`` ones. Every layout operation is a few of them, and
each answers the same three questions: where the edges of blocks lie along the axes that it gives
(``common``), what the same move is on the grid of scales (``on_grid``), and what it makes of an
array (``of``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from polyquant.arrays import Array, constant, namespace
from polyquant.blocks import Blocks

Shape = tuple[int, ...]
Numbers = npt.NDArray[np.int64]


class Move(Protocol):
    """What a layout operation does to some adjacent axes."""

    @property
    def inner(self) -> Shape:
        """The extents of the axes that it takes."""

    @property
    def outer(self) -> Shape:
        """The extents of the axes that it gives."""

    def common(self, blocks: Blocks) -> list[int]:
        """Along every outer axis the greatest common divisor of the indices at which another
        block begins; 0 where none does."""

    def on_grid(self, blocks: Blocks, extents: Shape) -> Move:
        """The move from the grid of ``blocks`` to that of blocks of ``extents`` on outer axes."""

    def of(self, array: Array, axis: int) -> Array:
        """The array with its axes from ``axis`` on moved: a view where the library allows."""


@dataclass(frozen=True)
class Run:
    """One axis: element ``i`` of the result is element ``start + i * step``; step 0 repeats one."""

    extent: int
    start: int
    step: int
    count: int

    @property
    def inner(self) -> Shape:
        return (self.extent,)

    @property
    def outer(self) -> Shape:
        return (self.count,)

    def common(self, blocks: Blocks) -> list[int]:
        starts = np.arange(1, blocks.counts[0]) * blocks.extents[0]
        if self.step > 0:
            edges = -((self.start - starts) // self.step)
        elif self.step < 0:
            edges = (self.start - starts) // -self.step + 1
        else:
            edges = starts[:0]
        return [_divisor(edges[(edges > 0) & (edges < self.count)])]

    def on_grid(self, blocks: Blocks, extents: Shape) -> Move:
        stride, extent = self.step * extents[0], blocks.extents[0]
        count = _ceil(self.count, extents[0])
        if stride % extent == 0:
            return Run(blocks.counts[0], self.start // extent, stride // extent, count)
        return simplest(blocks.counts, (self.start + stride * np.arange(count)) // extent)

    def of(self, array: Array, axis: int) -> Array:
        before = (slice(None),) * axis
        if not self.count:
            return array[(*before, slice(0, 0), ...)]
        ends = (self.start, self.start + self.step * (self.count - 1))
        found = array[(*before, slice(min(ends), max(ends) + 1, abs(self.step) or 1), ...)]
        if self.step > 0:
            return found
        xp = namespace(array)
        if self.step < 0:
            return xp.flip(found, axis=axis)
        return xp.broadcast_to(found, (*array.shape[:axis], self.count, *array.shape[axis + 1 :]))


@dataclass(frozen=True)
class Flat:
    """The same elements in the same flat order, under another shape."""

    inner: Shape
    outer: Shape

    def common(self, blocks: Blocks) -> list[int]:
        core, outer, units = _peeled(blocks, self.outer)
        if all(extent == 1 for extent in core.extents):  # every element left is a block
            found = [int(n > 1) for n in outer]
        else:
            left = np.arange(math.prod(outer)).reshape(outer)
            found = Table(core.shape, left).common(core)
        found += [0] * (len(self.outer) - len(outer))
        return [unit * n for unit, n in zip(units, found, strict=True)]

    def on_grid(self, blocks: Blocks, extents: Shape) -> Move:
        counts = tuple(_ceil(n, e) for n, e in zip(self.outer, extents, strict=True))
        if math.prod(counts) == math.prod(blocks.counts) and _are_runs(blocks):
            return Flat(blocks.counts, counts)  # as many runs, so they are the same ones
        first = np.zeros((), np.int64)
        for n, extent, stride in zip(self.outer, extents, _strides(self.outer), strict=True):
            first = first[..., None] + np.arange(0, n, extent) * stride
        return simplest(blocks.counts, _block_ids(first, blocks))

    def of(self, array: Array, axis: int) -> Array:
        after = array.shape[axis + len(self.inner) :]
        return namespace(array).reshape(array, (*array.shape[:axis], *self.outer, *after))


@dataclass(frozen=True)
class Table:
    """Any elements in any shape, by their flat positions: on the host, unless they are traced."""

    inner: Shape
    positions: Any
    is_traced: bool = False

    @property
    def outer(self) -> Shape:
        return tuple(self.positions.shape)

    def common(self, blocks: Blocks) -> list[int]:
        ids = _block_ids(self.positions, blocks)
        found = []
        for axis in range(ids.ndim if ids.size else 0):
            lines = np.moveaxis(ids, axis, 0).reshape(ids.shape[axis], -1)
            found.append(_divisor(np.flatnonzero((lines[1:] != lines[:-1]).any(axis=1)) + 1))
        return found or [0] * ids.ndim

    def on_grid(self, blocks: Blocks, extents: Shape) -> Move:
        first = self.positions[tuple(slice(None, None, extent) for extent in extents)]
        return simplest(blocks.counts, _block_ids(first, blocks))

    def of(self, array: Array, axis: int) -> Array:
        xp, count = namespace(array), len(self.inner)
        before, after = array.shape[:axis], array.shape[axis + count :]
        if count != 1:
            array = xp.reshape(array, (*before, math.prod(self.inner), *after))
        if self.outer == () and not self.is_traced:
            return array[(*(slice(None),) * axis, int(self.positions), ...)]
        index = self.positions if self.is_traced else constant(array, self.positions)
        flat = xp.reshape(index, (-1,))
        if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
            found = array[(*(slice(None),) * axis, flat)]  # its take would copy all of the array
        else:
            found = xp.take(array, flat, axis=axis)
        return xp.reshape(found, (*before, *self.outer, *after))


def changes_nothing(move: Move) -> bool:
    """Whether everything stays where it is."""
    if isinstance(move, Run):
        return move == Run(move.extent, 0, 1, move.extent)
    return isinstance(move, Flat) and move.inner == move.outer


def simplest(inner: Shape, positions: Numbers) -> Move:
    """The move that takes those flat positions: in order, evenly spaced, or one by one."""
    size, flat = positions.size, positions.reshape(-1)
    if size == math.prod(inner) and np.array_equal(flat, np.arange(size)):
        return Flat(inner, positions.shape)
    if len(inner) == positions.ndim == 1 and size:
        start, step = int(flat[0]), int(flat[1] - flat[0]) if size > 1 else 1
        if np.array_equal(flat, start + step * np.arange(size)):
            return Run(inner[0], start, step, size)
    return Table(inner, positions)


def reblock(blocks: Blocks, tokens: Shape, move: Move) -> tuple[Shape, Move]:
    """The block's extents along the axes that a move makes, and the same move on the grid.

    ``tokens`` are the extents that the scheme writes along the inner axes (-1: the whole axis).
    They are kept where no edge cuts a block, unless the axes are others; else the extent is the
    largest that every edge is a multiple of, so that each new block lies inside one old block.
    """
    outer = move.outer
    are_others = isinstance(move, Flat) or len(tokens) != len(outer)
    kept: tuple[int | None, ...] = (None,) * len(outer) if are_others else tokens
    if all(count <= 1 for count in blocks.counts):
        whole = -1 if tokens and set(tokens) == {-1} else None
        kept = tuple(whole if token is None else token for token in kept)
        made = tuple(map(extent_for, kept, (0,) * len(outer), outer))
        grid = tuple(_ceil(n, cut(t, n)) for t, n in zip(made, outer, strict=True))
        return made, simplest(blocks.counts, np.zeros(grid, np.int64))
    if all(extent == 1 for extent in blocks.extents):
        return (1,) * len(outer), move
    made = tuple(map(extent_for, kept, move.common(blocks), outer))
    return made, move.on_grid(blocks, tuple(map(cut, made, outer)))


def extent_for(token: int | None, common: int, extent: int) -> int:
    """What a scheme writes for an axis whose edges are multiples of ``common`` (0: no edges)."""
    if token == -1 and common == 0:
        return -1
    if token is not None and token > 0 and common % token == 0:
        return token
    return common or max(extent, 1)


def cut(token: int, extent: int) -> int:
    """The extent of the blocks along an axis, at least 1."""
    return max(1, extent if token == -1 else min(token, extent))


def _ceil(extent: int, block: int) -> int:
    return -(-extent // block)


def _strides(shape: Shape) -> list[int]:
    """Flat strides; of an axis beside an empty one 1, so that nothing is divided by zero."""
    return [max(1, math.prod(shape[axis + 1 :])) for axis in range(len(shape))]


def _block_ids(positions: Numbers, blocks: Blocks) -> Numbers:
    """The flat index on the grid of the block that holds each flat position."""
    if len(blocks.shape) == 1:
        return positions // blocks.extents[0]
    if not positions.size:
        return positions
    found = np.zeros_like(positions)
    for axis, stride in enumerate(_strides(blocks.shape)):
        index = positions // stride % blocks.shape[axis] // blocks.extents[axis]
        found = found * blocks.counts[axis] + index
    return found


def _divisor(edges: Numbers) -> int:
    return int(np.gcd.reduce(edges)) if len(edges) else 0


def _are_runs(blocks: Blocks) -> bool:
    """Whether every block is a run of the flat order."""
    last = max([0, *(axis for axis, count in enumerate(blocks.counts) if count > 1)])
    return all(extent == 1 for extent in blocks.extents[:last])


def _peeled(blocks: Blocks, outer: Shape) -> tuple[Blocks, Shape, list[int]]:
    """A flat order in units of the longest runs that stay together: blocks, outer shape, units.

    ``g`` neighbours along the last inner axis that lie in one block, and are neighbours along the
    last outer axis too, count as one; an axis that is used up gives way to the one before it. So
    what is left to look at is about as large as the grid of scales, not as the tensor.
    """
    shape, extents, made = list(blocks.shape), list(blocks.extents), list(outer)
    units = [1] * len(outer)
    while shape and made:
        g = math.gcd(shape[-1], extents[-1], made[-1])
        units[len(made) - 1] *= g
        shape[-1], extents[-1], made[-1] = shape[-1] // g, extents[-1] // g, made[-1] // g
        if shape[-1] == 1:
            del shape[-1], extents[-1]
        elif made[-1] == 1:
            del made[-1]
        elif g == 1:
            break
    counts = tuple(_ceil(n, e) for n, e in zip(shape, extents, strict=True))
    return Blocks(tuple(shape), tuple(extents), counts), tuple(made), units
