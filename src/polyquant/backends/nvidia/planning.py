"""Products of float rows with a quantized weight on tensor cores: what is compiled and launched.

``mma.cu`` says how for the fewest rows and for exact weights, ``wgmma.cu`` for more rows of bf16,
``mma_n.cu`` for a weight stored (in, out). ``schemes.py`` says what they take.

A library asks for ``tiles_for`` a product, plans it, compiles what the plan names, fills the
argument with the addresses of its arrays, and launches.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from polyquant.backends.nvidia import Gpu
from polyquant.backends.nvidia.schemes import (
    LOOKUP,
    SIZES,
    SUMMING,
    block_of,
    enters_wgmma,
    kind_of,
    kind_of_few,
    offset_of,
)
from polyquant.backends.nvidia.tiles import Tiles, columns_of, tiles_of
from polyquant.codec import line_size_bytes
from polyquant.scheme import QuantScheme

#: The numbers of the dtypes of results.
OUT = MappingProxyType({"float32": 0, "float16": 1, "bfloat16": 2})
#: float32 enters as three bf16 numbers that add up to it, each a row of its own.
PLANES = MappingProxyType({"float32": 3, "float16": 1, "bfloat16": 1})
#: Rows of x that a block of threads takes at least, whatever the tiles: planes must not be parted.
TOGETHER = 64
#: A table's pairs of entries, 32 times: see LUT_STEP in codes.cuh.
TABLE_BYTES = 256 * 32 * 4
#: What the axes y and z of a grid have room for.
_MOST_Y = 65_535
#: ``Tiles.wide`` of bytes.cu, and the shared memory of a multiprocessor that has it.
_BYTES, _HOPPER = 2, 233_472
#: Tiles of 64 values of k of x that wgmma.cu holds at least.
_X_LEAST = 4


class Operands(ctypes.Structure):
    """The argument of mma.cu's kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "offsets")),
        *((name, ctypes.c_void_p) for name in ("tensor_scale", "table", "y")),
        *((name, ctypes.c_int64) for name in ("code_stride", "scale_stride", "offset_stride")),
        *((f"{name}_batch", ctypes.c_int64) for name in ("x", "code", "scale", "offset")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "xk", "chunks", "code_line")),
        *((name, ctypes.c_int) for name in ("scale_line", "offset_line", "block_rows", "m_tiles")),
    )


class Tiled(ctypes.Structure):
    """The argument of wgmma.cu's kernel: its size is whole 64 bytes. ``x`` is a CUtensorMap."""

    _fields_ = (
        ("x", ctypes.c_uint8 * 128),
        ("operands", Operands),
        ("across", ctypes.c_int),
        ("all", ctypes.c_int),
        ("rest", ctypes.c_uint8 * (-(ctypes.sizeof(Operands) + 8) % 64)),
    )


class Doubly(ctypes.Structure):
    """The argument of bytes.cu's kernel: CUtensorMaps of ``x`` and of codes."""

    _fields_ = (Tiled._fields_[0], ("codes", ctypes.c_uint8 * 128), *Tiled._fields_[1:])


class Lines(NamedTuple):
    """Lines of stored numbers: their type's number, and bytes between them and between products of
    a batch."""

    kind: int
    stride: int
    batch: int


def lines_of(kind: int, shape: Sequence[int], batch: int) -> Lines:
    """Those of scales or offsets that lie one after the other; ``kind``: their type's number."""
    lines, per_line = shape[-2:] if len(shape) > 1 else (1, math.prod(shape))
    of_each = math.prod(shape) > lines * per_line or batch == 1
    size = SIZES[kind] * per_line
    return Lines(kind, size if lines > 1 else 0, size * lines if of_each else 0)


def step_of(bits: int) -> int:
    """The largest power of two, up to 16, that divides a number."""
    return min(16, bits & -bits) if bits else 16


# -- tiles ------------------------------------------------------------------------------------


def tiles_for(
    scheme: QuantScheme,
    sizes: tuple[int, int, int],
    entering: str,
    gpu: Gpu,
    given: Tiles | None = None,
    *,
    by_n: bool,
) -> Tiles:
    """The tiles given, or those of the table, as far as the product allows.

    ``sizes``: m, n, k. ``entering``: the dtype of x. ``by_n``: whether the weight is stored
    (in, out).
    """
    m, n, k = sizes
    columns = m * PLANES[entering]
    kind = kind_of_few(scheme, columns)
    bits, number = (scheme.bits, 0) if kind is None else (kind.bits, kind.number)
    if by_n:
        decoded = kind_of(scheme)
        has_table = decoded is not None and decoded.number == LOOKUP
        return given or columns_of(bits, m, n, gpu.capability, has_table=has_table)
    tiles = given
    if tiles is None:
        most_wide = _BYTES if scheme.offset is None else 1
        tiles = tiles_of(number, bits, columns, n, k, gpu.name, gpu.processors, most_wide)
        tiles = _for_blocks(tiles, scheme)
    return _fitting(tiles, scheme, entering, gpu)


def _for_blocks(tiles: Tiles, scheme: QuantScheme) -> Tiles:
    """The table's tiles, measured with scales of rows: wgmma.cu copies 8 bits in blocks in
    fewer, longer pieces (mxfp8, 8192 x 8192 by 64 rows: 29.4 us, not 31.6)."""
    in_blocks = scheme.block is not None and scheme.block[-1] > 0
    if tiles.wide == 1 and tiles.wn == 8 and tiles.chunk == 128 and scheme.bits == 8 and in_blocks:
        return tiles._replace(stages=2, chunk=256)
    return tiles


def _fitting(tiles: Tiles, scheme: QuantScheme, entering: str, gpu: Gpu) -> Tiles:
    """The tiles, or such as the scheme, the dtype of ``x`` and the GPU allow.

    wgmma.cu is for Hopper, rounds weights to 16 bits and does not sum x; clusters came with Hopper.
    The planes of a row of float32 lie in one tile.
    """
    is_hopper = gpu.capability == (9, 0)
    takes = enters_wgmma(entering, scheme) and offset_of(scheme) not in SUMMING and is_hopper
    if tiles.wide and not takes:
        tiles = Tiles(2, min(tiles.nt, 8), 4, 2, 1, 2, 128)
    if gpu.capability < (9, 0):
        tiles = tiles._replace(kc=1)
    return tiles


# -- what is compiled -------------------------------------------------------------------------


class Code(NamedTuple):
    """What the kernel ``matmul`` is compiled of: files of this folder, ``-D`` options, and source
    that stands before the files."""

    sources: tuple[str, ...]
    options: tuple[str, ...]
    before: str


class Plan(NamedTuple):
    """A launch without addresses.

    ``threads, shared_bytes``: of a block of threads. ``grid``: its last extent is that of a
    cluster. ``blocks``: of wgmma.cu, those beside each other, and all. ``numbers``: the argument's
    from ``chunks`` on. ``map_rows``: rows of a tile of x that wgmma.cu and bytes.cu copy; else 0.
    ``map_lines``: lines of a tile of codes that bytes.cu copies; else 0.
    """

    code: Code
    threads: int
    shared_bytes: int
    grid: tuple[int, int, int]
    blocks: tuple[int, int]
    numbers: tuple[int, ...]
    map_rows: int
    map_lines: int

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Blocks of threads of a cluster."""
        return 1, 1, self.grid[2]


class Shapes(NamedTuple):
    """The weight's stored shape, whether its last axis is n, products of the batch, and rows of x
    with planes counted."""

    stored: tuple[int, ...]
    by_n: bool
    batch: int
    columns: int


class Grids(NamedTuple):
    """The types of scales and offsets, by number, and to what codes, scales and offsets are
    aligned: powers of two up to 16."""

    scale: int
    offset: int
    steps: tuple[int, int, int]


@lru_cache(maxsize=4096)
def plan(
    scheme: QuantScheme,
    shapes: Shapes,
    dtypes: tuple[str, str],
    grids: Grids,
    tiles: Tiles,
    gpu: Gpu,
) -> Plan:
    """What one shape of product runs. ``dtypes``: of x and of the result."""
    (stored, by_n, batch, columns), (entering, out) = shapes, dtypes
    kind = kind_of(scheme) if by_n or tiles.wide else kind_of_few(scheme, columns)
    number, bits = (0, scheme.bits) if kind is None else (kind.number, kind.bits)
    block = block_of(scheme, stored[-1], by_n=by_n)
    most = gpu.shared_bytes - (TABLE_BYTES if number == LOOKUP else 0)
    tiles = tiles if _takes_bytes(scheme, shapes, grids, tiles) else tiles.by_one_map()
    x_rows = 1 if columns == 1 and not by_n else 8 * tiles.nt
    while True:
        sizes = tuple(SIZES[each] * _copied(tiles, block, by_n=by_n) for each in grids[:2])
        given = (tiles, bits, (sizes[0], sizes[1] if scheme.offset is not None else 0))
        shared = _n_bytes(*given) if by_n else _shared_bytes(*given, x_rows)
        if shared <= most or tiles == tiles.smaller():
            break
        tiles = tiles.smaller()
    grid, extents = _extents(scheme, shapes, grids, tiles)
    is_crowded = grid[1] > _MOST_Y
    line_step = step_of(8 * tiles.wn * bits if by_n else tiles.chunk * bits // 8)
    table = _table_bytes(tiles, shared, gpu, is_few=not by_n) if number == LOOKUP else 0
    numbers = {
        "F16": int(entering == "float16"),
        "BITS": bits,
        "KIND": number,
        "MANTISSA": kind.mantissa if kind is not None else 0,
        "BLOCK": block,
        "SCALE": grids.scale,
        "OFFSET": offset_of(scheme),
        "OFFSET_TYPE": grids.offset,
        "CODE_PIECE": min(grids.steps[0], line_step),
        "SCALE_PIECE": min(grids.steps[1], step_of(sizes[0])),
        "OFFSET_PIECE": min(grids.steps[2], step_of(sizes[1])),
        "X_ROWS": x_rows,
        "LUT_STEP": max(table, TABLE_BYTES) // 256,
        "PLANES": PLANES[entering],
        "OUT": OUT[out],
        "BATCHED": 2 if is_crowded else int(batch > 1),
        **{name.upper(): each for name, each in tiles._asdict().items()},
    }
    before, sources = "", ["codes.cuh", "few.cuh", "mma_n.cu" if by_n else "mma.cu"]
    if tiles.wide:
        numbers["X_STAGES"], shared = _stages_of_x(tiles, most, shared)
        before, sources = _wgmma(8 * tiles.nt, entering), ["codes.cuh", "wgmma.cuh"]
        sources.append("bytes.cu" if tiles.wide == _BYTES else "wgmma.cu")
    shared = max(shared + table, _least_bytes(tiles, gpu) if x_rows == 1 else 0)
    options = tuple(f"{name}={each}" for name, each in numbers.items())
    code = Code(tuple(sources), options, before)
    blocks = grid[0], grid[0] * grid[1]
    if tiles.by_warps:  # as many as run at once: each takes one tile after the other
        grid = (min(blocks[1], gpu.processors * tiles.blocks), 1, 1)
    elif is_crowded:
        grid = (blocks[1], 1, tiles.kc) if tiles.wide else (grid[1], grid[0], tiles.kc)
    maps = (8 * tiles.nt if tiles.wide else 0), (16 * tiles.wn if tiles.wide == _BYTES else 0)
    return Plan(code, _threads(tiles), shared, grid, blocks, extents, *maps)


def _threads(tiles: Tiles) -> int:
    """Threads of a block: those of wgmma.cu's last four warps copy x."""
    return 32 * (tiles.wn * tiles.wk + 4 * (tiles.wide > 0))


def _extents(
    scheme: QuantScheme, shapes: Shapes, grids: Grids, tiles: Tiles
) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Blocks of threads, and the argument's numbers from ``chunks`` on: see ``plan``."""
    stored, by_n, batch, columns = shapes
    n, k = (stored[-1], stored[-2]) if by_n else stored[-2:]
    m_tiles = math.ceil(columns / (8 * tiles.nt))
    grid = (math.ceil(n / (16 * tiles.rt * tiles.wn)), m_tiles * batch, tiles.kc)
    counts = scheme.scale_shape(stored)[-2:]
    lines = tuple(counts[1] * SIZES[each] for each in grids[:2])
    height = scheme.block_extents(stored)[-2] if counts[0] > 1 else stored[-2]
    code_line = line_size_bytes(stored[-1], scheme.bits, scheme.store)
    return grid, (math.ceil(k / tiles.chunk), code_line, *lines, height, m_tiles)


def argument_of(
    made: Plan, shapes: Shapes, pointers: Sequence[int], lines: Sequence[Lines]
) -> Operands:
    """The kernel's argument without the addresses of x and of the result.

    ``pointers``: of codes, scales, offsets, tensor scale and table; ``lines``: of the first three.
    """
    stored, by_n, _, rows = shapes
    n, k = (stored[-1], stored[-2]) if by_n else stored[-2:]
    xk = -(-k // 8) * 8
    strides, batches = (each.stride for each in lines), (each.batch for each in lines)
    return Operands(
        0, *pointers, 0, *strides, rows * xk * 2, *batches, rows, n, k, xk, *made.numbers
    )


def _takes_bytes(scheme: QuantScheme, shapes: Shapes, grids: Grids, tiles: Tiles) -> bool:
    """Whether bytes.cu multiplies: see its first lines."""
    stored, by_n, batch, _ = shapes
    kind, size = kind_of(scheme), SIZES[grids.scale]
    if scheme.bits != 8 or scheme.offset is not None or kind is None or kind.number == LOOKUP:
        return False
    of_chunk = size * _copied(tiles, block_of(scheme, stored[-1], by_n=by_n), by_n=by_n)
    line = size * scheme.scale_shape(stored)[-1]
    are_whole = not of_chunk or (grids.steps[1] >= min(16, of_chunk) and line % of_chunk == 0)
    fits = _bytes_shared(tiles, _x_stages(tiles)) <= _room(tiles)
    is_cut = tiles.wk * tiles.kc > 1 and tiles.chunk == 128
    return batch == 1 and grids.steps[0] == 16 and are_whole and fits and is_cut


def _stages_of_x(tiles: Tiles, most: int, shared: int) -> tuple[int, int]:
    """How many tiles of x wgmma.cu holds (bytes.cu: chunks), and all shared memory of a block."""
    if tiles.wide == _BYTES:
        return _x_stages(tiles), shared
    each = (most + 1024) // tiles.blocks - 1024  # of a block of threads, which takes 1024 more
    more = (each - shared) // (tiles.wk * _x_tile(tiles))
    stages = max(_X_LEAST, min(8, _X_LEAST + more))
    return stages, shared + (stages - _X_LEAST) * tiles.wk * _x_tile(tiles)


def _x_stages(tiles: Tiles) -> int:
    """Chunks of x that bytes.cu holds."""
    if tiles.wk > 2:  # one warp copies both
        return tiles.stages
    return next((n for n in (4, 3) if _bytes_shared(tiles, n) <= _room(tiles)), 2)


def _room(tiles: Tiles) -> int:
    """Shared memory that a block of threads of bytes.cu may have: 1024 bytes are the system's."""
    return _HOPPER // tiles.blocks - 1024


def _bytes_shared(tiles: Tiles, x_stages: int) -> int:
    """Shared memory of a block of threads of bytes.cu: tiles and barriers, or sums."""
    warps = tiles.wn * tiles.wk
    chunks = tiles.stages * tiles.wn * 2048 + x_stages * 2 * _x_tile(tiles)
    rings = tiles.wk * (chunks + 16 * (tiles.stages + x_stages)) + 16 * warps
    return max(rings, warps * (512 * tiles.nt + 8 * 256) if tiles.wk > 1 else 0)


def _table_bytes(tiles: Tiles, shared: int, gpu: Gpu, *, is_few: bool) -> int:
    """A table's pairs, twice as far apart where mma.cu's blocks of threads leave room: a code is
    a byte of the address then."""
    room = (gpu.shared_bytes + 1024) // tiles.blocks - 1024
    is_roomy = is_few and not tiles.wide and shared + 2 * TABLE_BYTES <= room
    return TABLE_BYTES * (2 if is_roomy else 1)


def _least_bytes(tiles: Tiles, gpu: Gpu) -> int:
    """Where several blocks of threads share a multiprocessor: what keeps another one off. More are
    shared out unevenly while the kernel before ends (8192 x 8192, q2s/64:f16: 11.8 us, not 8.9)."""
    shares = tiles.blocks > 1 and not tiles.wide
    return (gpu.shared_bytes + 1024) // (tiles.blocks + 1) - 1008 if shares else 0


def _n_bytes(tiles: Tiles, bits: int, numbers: tuple[int, int]) -> int:
    """Shared memory of a block of threads of mma_n.cu without a table. ``numbers``: bytes of a
    line's scales and offsets, whether they are copied or not."""
    stage = tiles.chunk * (tiles.wn * 8 * bits + sum(numbers))
    stage += 8 * tiles.nt * (2 * tiles.chunk + 32)
    sums = tiles.wk * 8 * tiles.nt * (64 * tiles.wn + 4) * 4
    return max(tiles.wk * tiles.stages * stage, sums)


def _copied(tiles: Tiles, block: int, *, by_n: bool) -> int:
    """Scales of a line that are copied together: a chunk's, or of mma_n.cu those of a block of
    threads' columns."""
    return 0 if block == 0 else max(1, (64 * tiles.wn if by_n else tiles.chunk) // block)


def _shared_bytes(tiles: Tiles, bits: int, numbers: tuple[int, int], x_rows: int) -> int:
    """Shared memory of a block of threads without a table: see the constants of the kernels."""
    if tiles.wide == _BYTES:
        return _bytes_shared(tiles, _x_stages(tiles))
    rows = 16 * tiles.rt
    line = tiles.chunk * bits // 8
    line += 16 if tiles.wide or bits == 4 or (bits < 8 and line // 16 % 2 == 0) else 32
    line += sum(-(-each // 16) * 16 for each in numbers)
    if tiles.wide:  # barriers, and the fewest tiles of x: their number is chosen later
        warps, least = tiles.wn * tiles.wk, tiles.wk * (_X_LEAST * _x_tile(tiles) + 128)
        of_warp = tiles.stages * rows * line
        if tiles.kc > 1 and tiles.wk == 1:  # sums of the cluster's other blocks, and two barriers
            of_warp = max(of_warp, (tiles.kc - 1) * -(-tiles.nt // tiles.kc) * 512) + 16
        sums = 0 if tiles.wk == 1 else warps * (512 * tiles.nt + 8 * 256)
        return max(warps * of_warp + least, sums)
    sums = tiles.wk * 8 * tiles.nt * (rows * tiles.wn + 4) * 4
    zeros, copies = (tiles.chunk * 2, tiles.wn if tiles.rt > 1 else 1) if x_rows == 1 else (0, 1)
    stage = tiles.wn * rows * line + copies * x_rows * (tiles.chunk * 2 + 64)
    return max(tiles.wk * tiles.stages * stage, sums) + zeros


def _x_tile(tiles: Tiles) -> int:
    """Bytes of 64 values of the rows of x that a block of threads of wgmma.cu multiplies."""
    return 8 * tiles.nt * 128


def _wgmma(columns: int, entering: str) -> str:
    """The function that multiplies 16 values of k: PTX names each of its registers."""
    kind = "f16" if entering == "float16" else "bf16"
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i // 4}][{i % 4}])' for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(4))
    return f"""
__device__ __forceinline__ void wgmma(float (*d)[4], const unsigned* a, unsigned long long x) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
               " {{{sums}}}, {{{left}}}, %{count + 4}, 1, 1, 1, 0;"
               : {outputs}
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}}
"""
