"""How a product is cut: a table that was measured, committed beside this file.

``backends/torch/cuda/tune.py`` measures anew; what it saves for a GPU takes the place of the
committed table.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from polyquant.backends.nvidia import cache
from polyquant.errors import UnreadableFile

#: Up to so many rows of x the table holds one way to cut a shape, the quickest.
MOST_OF_ONE_WAY = 32
#: The table as it is committed: measured on the GPU that it names.
COMMITTED = Path(__file__).with_name("tiles.json")


class Tiles(NamedTuple):
    """The tile sizes of mma.cu.

    ``rt, nt``: tiles of 16 rows of the weight and of 8 rows of x that a warp holds. ``wn, wk``:
    warps of a block of threads beside each other, and along k; ``kc``: blocks of threads of a
    cluster, along k. ``stages, chunk``: how many copies are under way, and of how many values of k
    each. ``wide``: 1 wgmma.cu, 2 bytes.cu. ``blocks``: blocks of threads that a multiprocessor must
    have registers for.
    """

    rt: int
    nt: int
    wn: int
    wk: int
    kc: int
    stages: int
    chunk: int
    wide: int = 0
    blocks: int = 1

    @property
    def by_warps(self) -> bool:
        """Whether wgmma.cu's warps put out their own sums, and take one tile after the other."""
        return bool(self.wide) and self.wk * self.kc == 1

    def by_one_map(self) -> Tiles:
        """Such as take a CUtensorMap of ``x`` alone: of wgmma.cu where bytes.cu's are these."""
        return self._replace(wide=1, stages=3, blocks=1) if self.wide > 1 else self

    def smaller(self) -> Tiles:
        """The same with less shared memory; itself where there is nothing left to give up."""
        return self._replace(**less(self.stages, self.chunk, self.wk))


def less(stages: int, chunk: int, wk: int) -> dict[str, int]:
    """The one of these that takes less shared memory next, by its name."""
    if stages > 2:
        return {"stages": stages - 1}
    if chunk > 64:
        return {"chunk": chunk // 2}
    return {"wk": max(1, wk // 2)}


class Row(NamedTuple):
    """A measurement: the kind and bits of codes, extents, rows of x (planes counted), its tiles."""

    kind: int
    bits: int
    n: int
    k: int
    columns: int
    tiles: Tiles
    time_us: float


@lru_cache(maxsize=4096)
def tiles_of(
    kind: int,
    bits: int,
    columns: int,
    n: int,
    k: int,
    gpu: str,
    processors: int,
    most_wide: int = 2,
) -> Tiles:
    """The quickest tiles of the nearest measurements, with as many tiles of x as these rows need.

    The table holds, of a shape, one way to cut up to 32 rows, and several to cut more. Each is
    expected to take as much longer than it did there as it has more to do: see ``_work``.
    ``gpu, processors``: its name and number of multiprocessors. ``most_wide``: of the tiles.
    """
    rows = tuple(row for row in table(gpu) if row.tiles.wide <= most_wide)
    most = next((c for c in sorted({r.columns for r in rows}) if c >= columns), 0)
    most = most or max(r.columns for r in rows)

    def distance(row: Row) -> tuple[int, int, float]:
        far = abs(math.log2(row.n / max(n, 1))) + abs(math.log2(row.k / max(k, 1)))
        return abs(row.bits - bits), int(row.kind != kind), far

    def expected_us(row: Row) -> float:
        there = _work(row.tiles, row.n, row.k, row.columns, processors)
        return row.time_us * _work(row.tiles, n, k, columns, processors) / there

    rows = tuple(row for row in rows if row.columns == most)
    nearest = min(rows, key=distance)
    if most > MOST_OF_ONE_WAY:
        place = nearest[:4]
        nearest = min((row for row in rows if row[:4] == place), key=expected_us)
    return _fitted(nearest.tiles, columns)


def _fitted(tiles: Tiles, columns: int) -> Tiles:
    """With tiles of x no larger than so many rows need: all of them the same."""
    needed = -(-columns // 8)
    down = -(-needed // tiles.nt)
    nt = -(-needed // down)
    if down > 1:  # not one kernel for every number of rows
        nt = min(tiles.nt, -(-nt // 4) * 4)
    return tiles._replace(nt=nt)


def _work(tiles: Tiles, n: int, k: int, columns: int, processors: int) -> int:
    """What a product takes of a block of threads: values of k and of x, times the rounds in which
    multiprocessors take all blocks."""
    nt = _fitted(tiles, columns).nt
    blocks = -(-n // (16 * tiles.rt * tiles.wn)) * -(-columns // (8 * nt)) * tiles.kc
    return -(-blocks // (processors * tiles.blocks)) * nt * max(k, 1)


@lru_cache(maxsize=4096)
def columns_of(bits: int, m: int, n: int, capability: tuple[int, int], *, has_table: bool) -> Tiles:
    """The tiles of mma_n.cu: slices of k so many that the blocks of threads fill a GPU, and as many
    stages as leave room for those of the next product, which begin early."""
    across, nt = -(-n // 256), -(-m // 8)
    kc = next(kc for kc in (8, 4, 2, 1) if kc == 1 or across * kc <= 264)
    stages = max(4, 7 - nt) if bits == 4 and not has_table else 4
    return Tiles(4, min(4, nt), 4, 1, kc if capability >= (9, 0) else 1, stages, 64)


@lru_cache(maxsize=16)
def table(gpu: str) -> tuple[Row, ...]:
    """The rows that a GPU of that name chooses by: its own where one was tuned.

    Raises UnreadableFile where its own are not such as this version writes.
    """
    own = own_path(gpu)
    if not own.exists():
        return _rows(COMMITTED)
    try:
        return _rows(own)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"it holds no tiles of this version ({error}); delete it, or call pq.tune again"
        raise UnreadableFile(path=str(own), reason=reason) from error


def _rows(path: Path) -> tuple[Row, ...]:
    return tuple(row_of(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"])


def row_of(numbers: list[Any]) -> Row:
    """A row as JSON holds it: a list, with its tiles as one."""
    kind, bits, n, k, columns, tiles, time_us = numbers
    return Row(kind, bits, n, k, columns, Tiles(*tiles), time_us)


def own_path(name: str) -> Path:
    """Where the measurements of a GPU of that name are kept."""
    return cache.folder() / f"tiles-{name.replace(' ', '-')}.json"


def candidates(bits: int, columns: int) -> list[Tiles]:
    """What is worth measuring for so many rows of x: the best of some thousand tried once."""
    nt = -(-columns // 8)
    long, short = (512, 256) if bits <= 4 else (256, 128)
    half = short // 2
    if nt == 1:
        shapes = [
            (1, 2, 4, 2, long, 2), (1, 2, 4, 3, short, 2), (2, 1, 8, 2, short, 1),
            (2, 2, 4, 3, short, 1), (2, 2, 2, 3, short, 2), (2, 1, 4, 2, long, 1),
            (1, 2, 2, 3, long, 2), (2, 2, 4, 2, short, 2), (2, 1, 4, 3, short, 2),
            (2, 4, 2, 2, short, 2), (1, 1, 4, 2, long, 4), (2, 1, 4, 2, short, 2),
            (4, 1, 4, 2, short, 1), (1, 1, 4, 2, short, 7), (1, 1, 8, 3, short, 2),
            (1, 1, 8, 2, long, 2), (2, 7, 2, 2, short, 1), (1, 7, 2, 3, short, 1),
            (2, 1, 6, 2, short, 2), (2, 2, 3, 2, short, 2), (2, 1, 7, 2, short, 1),
            (2, 1, 4, 2, short, 4), (2, 1, 4, 3, short, 4), (1, 1, 4, 2, short, 4),
        ]  # fmt: skip
        return [Tiles(r, 1, wn, wk, 1, s, c, 0, b) for r, wn, wk, s, c, b in shapes]
    few = []
    if nt == 2:
        few = [(4, 1, 4, 1, 2, short), (2, 2, 2, 2, 2, short), (2, 2, 4, 1, 2, short),
               (4, 2, 4, 2, 2, short), (2, 4, 2, 2, 3, short), (2, 2, 4, 1, 3, half),
               (2, 4, 2, 1, 2, short), (2, 2, 4, 1, 3, short), (2, 2, 6, 1, 2, short),
               (2, 2, 2, 2, 3, short), (1, 2, 4, 1, 3, short), (1, 7, 2, 1, 4, short),
               (2, 7, 1, 1, 3, short), (1, 4, 4, 1, 2, long)]  # fmt: skip
    elif nt <= 8:
        few = [(2, 2, 4, 1, 2, short), (2, 4, 2, 1, 2, short), (2, 2, 2, 2, 3, half),
               (4, 1, 4, 1, 2, half), (1, 4, 2, 2, 3, half), (2, 4, 2, 2, 2, half),
               (2, 2, 4, 1, 3, half), (2, 8, 1, 4, 3, half), (2, 4, 2, 1, 3, half)]  # fmt: skip
    found = [Tiles(r, nt, wn, wk, kc, s, c) for r, wn, wk, kc, s, c in few]
    if nt == 2:  # two blocks of threads beside each other: the next kernel's first ones, too
        found += [tiles._replace(blocks=2) for tiles in found if tiles.rt == 2]
    return found + _tall(nt, short) + (_by_bytes(nt) if bits == 8 else [])


def _by_bytes(nt: int) -> list[Tiles]:
    """Those of bytes.cu."""
    ways = []
    if 2 < nt <= 8:
        ways = [(4, 3, 1, 3), (8, 2, 2, 2), (8, 2, 2, 3), (8, 2, 1, 3), (4, 2, 2, 4)]
    elif 8 < nt <= 16:
        ways = [(8, 1, 2, 3), (8, 1, 2, 4), (4, 2, 2, 4), (8, 2, 1, 2)]
    elif 16 < nt <= 32:
        ways = [(8, 1, 2, 2)]
    return [Tiles(1, nt, wn, wk, kc, stages, 128, 2) for wn, wk, kc, stages in ways]


def _tall(nt: int, c: int) -> list[Tiles]:
    """Those of wgmma.cu: many rows may also be cut into tiles of 128, of which there are more.

    ``c``: values of k of a chunk.
    """
    if nt <= 2:
        return []
    if nt <= 8:
        ways = [(nt, 4, 4, 1, 2, c, 1), (nt, 4, 4, 1, 2, c // 2, 1), (nt, 4, 2, 1, 4, c, 1),
                (nt, 4, 2, 1, 2, c, 2), (nt, 4, 2, 2, 2, c, 2), (nt, 4, 2, 2, 3, c, 1),
                (nt, 8, 2, 1, 3, c, 1), (nt, 8, 2, 2, 3, c, 1), (nt, 16, 1, 1, 2, c, 1),
                (nt, 16, 1, 1, 3, c, 1)]  # fmt: skip
    elif nt <= 16:
        ways = [(nt, 8, 1, 1, 4, c, 1), (nt, 8, 1, 2, 4, c, 1), (nt, 4, 2, 1, 2, c, 1),
                (nt, 4, 2, 2, 2, c, 1), (nt, 16, 1, 1, 2, c, 1)]  # fmt: skip
    else:
        most = min(nt, 32)
        ways = [(most, 8, 1, 1, 3, c, 1), (most, 8, 1, 2, 3, c, 1), (16, 4, 2, 1, 2, c, 1),
                (16, 8, 1, 1, 4, c, 1), (16, 8, 1, 2, 4, c, 1)]  # fmt: skip
    return [Tiles(1, n, wn, wk, kc, s, chunk, 1, b) for n, wn, wk, kc, s, chunk, b in ways]
