"""Products of float rows with a quantized weight, on tensor cores.

``mma.cu`` says how for the fewest rows and for exact weights, ``wgmma.cu`` for more rows of bf16,
``mma_n.cu`` for a weight stored (in, out).

Here is what it is compiled with, and its launch; ``schemes.py`` says what it takes.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from polyquant.backends.torch.cuda import decode, nvrtc, products
from polyquant.backends.torch.cuda.schemes import (
    LOOKUP,
    SIZES,
    SUMMING,
    block_of,
    kind_of,
    offset_of,
    type_number,
)
from polyquant.backends.torch.cuda.tiles import Tiles, columns_of, tiles_of
from polyquant.codec import line_size_bytes
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme

OUT = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2})
#: Rows of x that a block of threads takes at least, whatever the tiles: planes must not be parted.
_TOGETHER = 64
#: A table's pairs of entries, 32 times: see LUT_BYTES in codes.cuh.
TABLE_BYTES = 256 * 32 * 4
#: float32 enters as three bf16 numbers that add up to it, each a row of its own.
PLANES = MappingProxyType({torch.float32: 3, torch.float16: 1, torch.bfloat16: 1})


class _Operands(ctypes.Structure):
    """The argument of mma.cu's kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "offsets")),
        *((name, ctypes.c_void_p) for name in ("tensor_scale", "table", "y")),
        *((name, ctypes.c_int64) for name in ("code_stride", "scale_stride", "offset_stride")),
        *((f"{name}_batch", ctypes.c_int64) for name in ("x", "code", "scale", "offset")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "xk", "chunks", "code_line")),
        *((name, ctypes.c_int) for name in ("scale_line", "offset_line", "block_rows", "m_tiles")),
    )


class _Tiled(ctypes.Structure):
    """The argument of wgmma.cu's kernel: its size is whole 64 bytes."""

    _fields_ = (
        ("x", ctypes.c_uint8 * 128),
        ("operands", _Operands),
        ("across", ctypes.c_int),
        ("all", ctypes.c_int),
        ("rest", ctypes.c_uint8 * (-(ctypes.sizeof(_Operands) + 8) % 64)),
    )


class _Grid(NamedTuple):
    """Numbers of the blocks, one grid: the array, its type's number, bytes between its lines and
    between products of a batch."""

    array: torch.Tensor
    kind: int
    stride: int
    batch: int


def matmul(x: torch.Tensor, weight: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``x @ weight``, accumulated in float32: x (..., m, k) or (k,), weight (..., k, n).

    The weight's last two axes are stored last, in either order; its other axes are those of ``x``
    or are broadcast against (what that cannot be is dequantized for cuBLAS).
    """
    shape = weight.shape
    (k, n), batch = shape[-2:], shape[:-2]
    if not batch:
        rows = x if x.ndim == 2 else x.reshape(-1, k)
    elif x.ndim > 1 and torch.broadcast_shapes(x.shape[:-2], batch) == batch:
        rows = x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
    else:
        return products.matmul(x, weight, dtype)
    *products_of, m, _ = rows.shape
    y = torch.empty((*products_of, m, n), dtype=dtype, device=x.device)
    planes = PLANES[x.dtype]
    if k == 0:
        y.zero_()
    elif y.numel():
        step = _TOGETHER // planes if planes > 1 else m
        if m <= step:
            multiply(rows, weight, y, None)
        elif batch:
            return products.matmul(x, weight, dtype)
        else:
            for start in range(0, m, step):
                part = slice(start, start + step)
                multiply(rows[part], weight, y[part], None)
    if rows is x:
        return y
    return y.reshape(*(batch if batch else x.shape[:-2]), *x.shape[-2:-1], n)


def multiply(x: torch.Tensor, weight: QTensor, y: torch.Tensor, tiles: Tiles | None) -> None:
    """``y = x @ weight``, x (batch, m, k) or (m, k), by the given tiles or the table's."""
    *batches, m, k = x.shape
    batch = batches[0] if batches else 1
    key = (batch, m, x.dtype, y.dtype, tiles)
    known = launches_of(weight)
    launch = known.get(key)
    is_known = launch is not None
    if launch is None:
        launch = _launch_of(weight, batch, m, (x.dtype, y.dtype, x.device.index or 0), tiles)
        keep(known, key, launch)
    chosen = launch.tiles
    entering = decode.split_planes(x.reshape(-1, k)) if launch.planes > 1 else _aligned(x, chosen)
    argument = _Operands.from_buffer_copy(launch.argument)
    argument.x, argument.y = entering.data_ptr(), y.data_ptr()
    given = _tiled(argument, entering, launch.plan, 8 * chosen.nt) if chosen.wide else argument
    # A kernel copies codes and numbers of its weight before the kernel before it has ended. So that
    # this is not the one that writes them, a weight's first product waits.
    nvrtc.launch(launch.plan.function, launch.plan.grid, given, early=is_known)


class _Launch(NamedTuple):
    """What is known of a product before ``x`` and ``y`` are: the argument without them, and the
    arrays that it points into. ``of_weight``: these are the weight's own, so it may be kept."""

    plan: _Plan
    argument: _Operands
    tiles: Tiles
    planes: int
    arrays: tuple[torch.Tensor | None, ...]
    of_weight: bool


#: Launches that a weight keeps.
_MOST_LAUNCHES = 64


def launches_of(weight: QTensor) -> dict[Any, Any]:
    """Those that were made of a weight."""
    found = weight._prepared
    if found is None:
        found = {}
        object.__setattr__(weight, "_prepared", found)
    return cast("dict[Any, Any]", found)


def keep(known: dict[Any, Any], key: Any, launch: Any) -> None:
    """Keep a launch among those of its weight, if it points into nothing else."""
    if launch.of_weight:
        if len(known) >= _MOST_LAUNCHES:
            known.clear()
        known[key] = launch


def _launch_of(
    weight: QTensor,
    batch: int,
    m: int,
    place: tuple[torch.dtype, torch.dtype, int],
    tiles: Tiles | None,
) -> _Launch:
    """A launch for ``batch`` times ``m`` rows; ``place``: dtypes of x and y, and the device."""
    (k, n), by_n = weight.shape[-2:], weight.axes[-1] == weight.ndim - 1
    planes = PLANES[place[0]]
    tiles = _tiles_for(weight, m, place, tiles)
    codes = weight.data
    in_lines = codes.is_contiguous() or (codes.ndim == 2 and codes.stride(1) == 1)
    if codes.data_ptr() % 4 or not in_lines:
        codes = codes.clone(memory_format=torch.contiguous_format)
    scales = _grid(weight.scales, weight.scheme.scale, batch)
    offset = weight.scheme.offset
    offsets = None if offset is None else _grid(weight.offsets, offset.dtype, batch)
    none = _Grid(codes, 0, 0, 0)
    line = line_size_bytes(weight.stored_shape[-1], weight.scheme.bits, weight.scheme.store)
    plan = _plan(
        weight.scheme,
        (weight.stored_shape, by_n, batch, m * planes),
        place,
        (scales.kind, _step_of_grid(scales), (offsets or none).kind),
        # What lies past a line's end is no zero, and may be NaN.
        (
            step_of(codes.data_ptr() | codes.stride(-2) | line),
            1 if offsets is None else _step_of_grid(offsets),
        ),
        tiles,
    )
    xk = -(-k // 8) * 8
    arrays = (
        codes,
        scales.array,
        None if offsets is None else offsets.array,
        weight.tensor_scale,
        weight.table,
    )
    strides = (codes.stride(-2), scales.stride, (offsets or none).stride)
    each = codes.stride(-2) * codes.shape[-2] if batch > 1 else 0
    batches = (m * planes * xk * 2, each, scales.batch, (offsets or none).batch)
    argument = _Operands(
        0,
        *(0 if array is None else array.data_ptr() for array in arrays),
        0,
        *strides,
        *batches,
        *(m * planes, n, k, xk),
        *plan.numbers,
    )
    own = (weight.data, weight.scales, weight.offsets)
    of_weight = all(mine is its for mine, its in zip(arrays[:3], own, strict=True))
    return _Launch(plan, argument, tiles, planes, arrays, of_weight)


def _tiles_for(
    weight: QTensor, m: int, place: tuple[torch.dtype, torch.dtype, int], given: Tiles | None
) -> Tiles:
    """The tiles given, or those of the table, as far as the product allows."""
    (k, n), kind = weight.shape[-2:], kind_of(weight.scheme)
    bits, number = (weight.scheme.bits, 0) if kind is None else (kind.bits, kind.number)
    entering, _, device = place
    if weight.axes[-1] == weight.ndim - 1:
        return given or columns_of(bits, m, n, torch.cuda.get_device_capability(device))
    tiles = given or tiles_of(number, bits, m * PLANES[entering], n, k, device)
    return _fitting(tiles, weight.scheme, entering, device)


@lru_cache(maxsize=4096)
def _fitting(tiles: Tiles, scheme: QuantScheme, dtype: torch.dtype, device: int) -> Tiles:
    """The tiles, or such as the scheme, the dtype of ``x`` and the GPU allow.

    wgmma.cu is for Hopper, rounds weights to bf16 and does not sum x; clusters came with Hopper.
    The planes of a row of float32 lie in one tile.
    """
    capability = torch.cuda.get_device_capability(device)
    takes = dtype is torch.bfloat16 and offset_of(scheme) not in SUMMING and capability == (9, 0)
    if tiles.wide and not takes:
        tiles = Tiles(2, min(tiles.nt, 8), 4, 2, 1, 2, 128)
    if capability < (9, 0):
        tiles = tiles._replace(kc=1)
    return tiles


#: Tiles of 64 values of k of x that wgmma.cu holds at least.
_X_LEAST = 4


def _aligned(x: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Lines of whole 16 bytes at addresses of whole 16 bytes: mostly ``x`` itself.

    wgmma.cu copies tiles of any lines, the others want them one after the other.
    """
    missing = -x.shape[-1] % 8
    if missing:
        return torch.nn.functional.pad(x, (0, missing))
    in_step = x.is_contiguous() or (tiles.wide and _is_in_lines(x))
    if in_step and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _is_in_lines(x: torch.Tensor) -> bool:
    """Whether elements of a line are neighbours, and lines whole 16 bytes apart."""
    *steps, last = x.stride()
    return last == 1 and all(step > 0 and step % 8 == 0 for step in steps)


def _tiled(operands: _Operands, x: torch.Tensor, plan: _Plan, rows: int) -> _Tiled:
    """The argument of wgmma.cu's kernel for ``x`` (batch, m, k)."""
    *batch, m, k = x.shape
    steps = (m * k, k) if x.is_contiguous() else (m * k, *x.stride())[-3:-1]
    extents = (batch[0] if batch else 1, m, k)
    return _Tiled(nvrtc.tiles_of_array(x.data_ptr(), extents, steps, rows), operands, *plan.blocks)


def _grid(numbers: Any, kind: Any, batch: int) -> _Grid:
    """Scales or offsets as the kernel reads them; quantized ones are decoded first."""
    if isinstance(numbers, QTensor):
        numbers = decode.dequantize(numbers, None)
    number, array = type_number(kind), numbers.contiguous()
    lines, per_line = array.shape[-2:] if array.ndim > 1 else (1, array.numel())
    of_each = array.numel() > lines * per_line or batch == 1
    size = SIZES[number] * per_line
    return _Grid(array, number, size if lines > 1 else 0, size * lines if of_each else 0)


def _step_of_grid(grid: _Grid) -> int:
    return step_of(grid.array.data_ptr() | grid.stride | grid.batch)


def step_of(bits: int) -> int:
    """The largest power of two, up to 16, that divides a number."""
    return min(16, bits & -bits) if bits else 16


# -- what is compiled -------------------------------------------------------------------------


class _Plan(NamedTuple):
    """``blocks``: of wgmma.cu, those beside each other, and all."""

    function: nvrtc.Function
    grid: tuple[int, int, int]
    blocks: tuple[int, int]
    numbers: tuple[int, ...]


@lru_cache(maxsize=4096)
def _plan(
    scheme: QuantScheme,
    product: tuple[tuple[int, ...], bool, int, int],
    place: tuple[torch.dtype, torch.dtype, int],
    grids: tuple[int, int, int],
    steps: tuple[int, int],
    tiles: Tiles,
) -> _Plan:
    """What one shape of product runs.

    ``product``: the weight's stored shape, whether its last axis is n, products of the batch, rows
    of x with planes counted. ``grids``: the types of scales and offsets, and the alignment of the
    former; ``steps``: of the codes and the latter.
    """
    stored, by_n, batch, columns = product
    entering, out, device = place
    kind = kind_of(scheme)
    number, bits = (0, scheme.bits) if kind is None else (kind.number, kind.bits)
    block = block_of(scheme, stored[-1], by_n=by_n)
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    most -= TABLE_BYTES if number == LOOKUP else 0
    x_rows = 1 if columns == 1 and not by_n else 8 * tiles.nt
    while True:
        sizes = tuple(SIZES[each] * _per_chunk(tiles, block) for each in (grids[0], grids[2]))
        of_blocks = (sizes[0], sizes[1] if scheme.offset is not None else 0)
        shared = _n_bytes(tiles, bits) if by_n else _shared_bytes(tiles, bits, x_rows, of_blocks)
        if shared <= most or tiles == tiles.smaller():
            break
        tiles = tiles.smaller()
    line_step = step_of(8 * tiles.wn * bits if by_n else tiles.chunk * bits // 8)
    numbers = {
        "F16": int(entering is torch.float16),
        "BITS": bits,
        "KIND": number,
        "MANTISSA": kind.mantissa if kind is not None else 0,
        "BLOCK": block,
        "SCALE": grids[0],
        "OFFSET": offset_of(scheme),
        "OFFSET_TYPE": grids[2],
        "CODE_PIECE": min(steps[0], line_step),
        "SCALE_PIECE": min(grids[1], step_of(sizes[0])),
        "OFFSET_PIECE": min(steps[1], step_of(sizes[1])),
        "X_ROWS": x_rows,
        "PLANES": PLANES[entering],
        "OUT": OUT[out],
        "BATCHED": int(batch > 1),
        **{name.upper(): each for name, each in tiles._asdict().items()},
    }
    before, source = "", "mma_n.cu" if by_n else "mma.cu"
    if tiles.wide:
        more = (most // tiles.blocks - 1024 - shared) // (tiles.wk * _x_tile(tiles))
        numbers["X_STAGES"] = max(_X_LEAST, min(8, _X_LEAST + more))
        shared += (numbers["X_STAGES"] - _X_LEAST) * tiles.wk * _x_tile(tiles)
        before, source = _wgmma(8 * tiles.nt), "wgmma.cu"
    shared += TABLE_BYTES if number == LOOKUP else 0
    options = tuple(f"{name}={each}" for name, each in numbers.items())
    threads = 32 * (tiles.wn * tiles.wk + 4 * tiles.wide)
    function = nvrtc.load(("codes.cuh", source), "matmul", options, threads, shared, device, before)
    grid, numbers_of_shape = _extents(scheme, product, grids, tiles)
    blocks = grid[0], grid[0] * grid[1]
    if tiles.by_warps:  # as many as run at once: each takes one tile after the other
        at_once = torch.cuda.get_device_properties(device).multi_processor_count * tiles.blocks
        grid = (min(blocks[1], at_once), 1, 1)
    return _Plan(function, grid, blocks, numbers_of_shape)


def _extents(
    scheme: QuantScheme,
    product: tuple[tuple[int, ...], bool, int, int],
    grids: tuple[int, int, int],
    tiles: Tiles,
) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """Blocks of threads, and the argument's numbers from ``chunks`` on: see ``_plan``."""
    stored, by_n, batch, columns = product
    n, k = (stored[-1], stored[-2]) if by_n else stored[-2:]
    m_tiles = math.ceil(columns / (8 * tiles.nt))
    grid = (math.ceil(n / (16 * tiles.rt * tiles.wn)), m_tiles * batch, tiles.kc)
    counts = scheme.scale_shape(stored)[-2:]
    lines = tuple(counts[1] * SIZES[each] for each in (grids[0], grids[2]))
    height = scheme.block_extents(stored)[-2] if counts[0] > 1 else stored[-2]
    code_line = line_size_bytes(stored[-1], scheme.bits, scheme.store)
    return grid, (math.ceil(k / tiles.chunk), code_line, *lines, height, m_tiles)


def _n_bytes(tiles: Tiles, bits: int) -> int:
    """Shared memory of a block of threads of mma_n.cu without a table."""
    stage = tiles.chunk * tiles.wn * 8 * bits + 8 * tiles.nt * (2 * tiles.chunk + 32)
    sums = tiles.wk * 8 * tiles.nt * (64 * tiles.wn + 4) * 4
    return max(tiles.wk * tiles.stages * stage, sums)


def _per_chunk(tiles: Tiles, block: int) -> int:
    """Scales of a line that are copied with a chunk."""
    return 0 if block == 0 else max(1, tiles.chunk // block)


def _shared_bytes(tiles: Tiles, bits: int, x_rows: int, numbers: tuple[int, int]) -> int:
    """Shared memory of a block of threads without a table: see the constants of the kernels."""
    rows = 16 * tiles.rt
    line = tiles.chunk * bits // 8 + (16 if bits <= 4 or tiles.wide else 32)
    line += sum(-(-each // 16) * 16 for each in numbers)
    sums = tiles.wk * 8 * tiles.nt * (rows * tiles.wn + 4) * 4
    if tiles.wide:  # alignment, barriers, and the fewest tiles of x: their number is chosen later
        least = tiles.wk * _X_LEAST * _x_tile(tiles)
        turned = tiles.wn * 32 * 48 if tiles.by_warps else 0
        return 1152 + turned + max(tiles.stages * tiles.wn * tiles.wk * rows * line + least, sums)
    stage = tiles.wn * rows * line + x_rows * (tiles.chunk * 2 + 64)
    return max(tiles.wk * tiles.stages * stage, sums)


def _x_tile(tiles: Tiles) -> int:
    """Bytes of 64 values of the rows of x that a block of threads of wgmma.cu multiplies."""
    return 8 * tiles.nt * 128


def _wgmma(columns: int) -> str:
    """The function that multiplies 16 values of k: PTX names each of its registers."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i // 4}][{i % 4}])' for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(4))
    return f"""
__device__ __forceinline__ void wgmma(float (*d)[4], const unsigned* a, unsigned long long x) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
               " {{{sums}}}, {{{left}}}, %{count + 4}, 1, 1, 1, 0;"
               : {outputs}
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}}
"""
