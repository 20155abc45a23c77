"""How a product is cut for ``mma.cu``: a table, measured, that ``pq.tune`` can replace."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """The tile sizes of mma.cu.

    ``rt, nt``: tiles of 16 rows of the weight and of 8 rows of x that a warp holds. ``wn, wk``:
    warps of a block of threads beside each other, and along k; ``kc``: blocks
    of threads of a cluster, along k. ``stages, chunk``: how many copies
    are under way, and of how many values of k each. ``prefetch``: whether whole lines are asked for
    at once.
    """

    rt: int
    nt: int
    wn: int
    wk: int
    kc: int
    stages: int
    chunk: int
    prefetch: int = 0

    def smaller(self) -> Tiles:
        """The same with less shared memory; itself where there is nothing left to give up."""
        if self.stages > 2:
            return self._replace(stages=self.stages - 1)
        if self.chunk > 64:
            return self._replace(chunk=self.chunk // 2)
        return self._replace(wk=max(1, self.wk // 2))


def tiles_of(bits: int, columns: int, n: int, k: int) -> Tiles:
    """The tiles for a weight of n lines of k codes and so many rows of x, planes counted."""
    nt = min(8, -(-columns // 8))
    chunk = 256 if bits <= 4 else 128
    if nt == 1:
        return Tiles(1, 1, 1, 8, 1, 3, chunk)
    if nt <= 2:
        return Tiles(2, nt, 2, 4, 1, 3, chunk)
    return Tiles(2, nt, 4, 2, 2, 3, chunk)
