"""Products of few float rows with a quantized weight, on tensor cores: ``mma.cu`` says how.

Here is what it is compiled with, and its launch; ``schemes.py`` says what it takes.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from polyquant.backends.torch.cuda import decode, nvrtc
from polyquant.backends.torch.cuda.schemes import (
    LOOKUP,
    SIZES,
    SUMMING,
    block_of,
    kind_of,
    offset_of,
    type_number,
)
from polyquant.backends.torch.cuda.tiles import Tiles, tiles_of
from polyquant.codec import line_size_bytes
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme

_OUT = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2})
#: Rows of x that a block of threads takes at least, whatever the tiles: planes must not be parted.
_TOGETHER = 64
#: A table's pairs of entries, 32 times: see LUT_BYTES in mma.cu.
_TABLE_BYTES = 256 * 32 * 4
#: float32 enters as three bf16 numbers that add up to it, each a row of its own.
PLANES = MappingProxyType({torch.float32: 3, torch.float16: 1, torch.bfloat16: 1})


class _Operands(ctypes.Structure):
    """The argument of mma.cu's kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "offsets")),
        *((name, ctypes.c_void_p) for name in ("tensor_scale", "table", "y")),
        *((name, ctypes.c_int64) for name in ("code_stride", "scale_stride", "offset_stride")),
        *((name, ctypes.c_int) for name in ("m", "n", "xk", "chunks", "code_line")),
        *((name, ctypes.c_int) for name in ("scale_line", "offset_line", "block_rows")),
    )


class _Grid(NamedTuple):
    """Numbers of the blocks, one grid: the array, its type's number, bytes between its lines."""

    array: torch.Tensor
    kind: int
    stride: int


def matmul(x: torch.Tensor, weight: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``x @ weight`` for a weight (k, n) that is stored (n, k), accumulated in float32."""
    k, n = weight.shape
    lines = x.reshape(-1, k)
    y = torch.empty((lines.shape[0], n), dtype=dtype, device=x.device)
    if k == 0:
        y.zero_()
    elif y.numel():
        planes = PLANES[x.dtype]
        step = _TOGETHER // planes if planes > 1 else lines.shape[0]
        for start in range(0, lines.shape[0], step):
            rows = slice(start, start + step)
            multiply(lines[rows], weight, y[rows], None)
    return y.reshape(*x.shape[:-1], n)


def multiply(x: torch.Tensor, weight: QTensor, y: torch.Tensor, tiles: Tiles | None) -> None:
    """``y = x @ weight`` for lines of ``x``, by tiles of the caller's choice or the table's."""
    m, k = x.shape
    n = weight.shape[1]
    planes = PLANES[x.dtype]
    kind = kind_of(weight.scheme)
    bits = kind.bits if kind is not None else weight.scheme.bits
    if tiles is None:
        number = 0 if kind is None else kind.number
        tiles = tiles_of(number, bits, m * planes, n, k, x.device.index or 0)
    tiles = _fitting(tiles, weight.scheme, m * planes, x.device.index or 0)
    entering = decode.split_planes(x) if planes > 1 else x if tiles.wide else _aligned(x)
    if tiles.wide:
        entering = decode.arrange(entering, natural=kind is not None and kind.is_natural)
    codes = weight.data
    if codes.data_ptr() % 4 or codes.stride(1) != 1:
        codes = codes.clone(memory_format=torch.contiguous_format)
    scales = _grid(weight.scales, weight.scheme.scale)
    offset = weight.scheme.offset
    offsets = None if offset is None else _grid(weight.offsets, offset.dtype)
    plan = _plan(
        weight.scheme,
        (m * planes, n, k, entering.shape[1]),
        (x.dtype, y.dtype, x.device.index or 0),
        (scales.kind, _step_of(scales), 0 if offsets is None else offsets.kind),
        (_step(codes.data_ptr() | codes.stride(0)), 1 if offsets is None else _step_of(offsets)),
        tiles,
    )
    argument = _Operands(
        entering.data_ptr(),
        codes.data_ptr(),
        scales.array.data_ptr(),
        0 if offsets is None else offsets.array.data_ptr(),
        0 if weight.tensor_scale is None else weight.tensor_scale.data_ptr(),
        0 if weight.table is None else weight.table.data_ptr(),
        y.data_ptr(),
        codes.stride(0),
        scales.stride,
        0 if offsets is None else offsets.stride,
        m * planes,
        n,
        entering.shape[1],
        *plan.numbers,
    )
    nvrtc.launch(plan.function, plan.grid, argument, early=plan.early)


@lru_cache(maxsize=4096)
def _fitting(tiles: Tiles, scheme: QuantScheme, columns: int, device: int) -> Tiles:
    """The tiles, or such as the scheme and the GPU allow.

    wgmma.cu is for Hopper and does not sum x; clusters came with Hopper. The planes of a row of
    float32 lie in one tile.
    """
    capability = torch.cuda.get_device_capability(device)
    if tiles.wide and (offset_of(scheme) in SUMMING or capability != (9, 0)):
        tiles = Tiles(2, min(tiles.nt, 8), 4, 2, 1, 2, 128)
    if capability < (9, 0):
        tiles = tiles._replace(kc=1, early=0)
    return tiles


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Lines of whole 16 bytes at addresses of whole 16 bytes: mostly ``x`` itself."""
    missing = -x.shape[1] % 8
    if missing:
        return torch.nn.functional.pad(x, (0, missing))
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _grid(numbers: Any, kind: Any) -> _Grid:
    """Scales or offsets as the kernel reads them; quantized ones are decoded first."""
    if isinstance(numbers, QTensor):
        numbers = decode.dequantize(numbers, None)
    number, array = type_number(kind), numbers.contiguous()
    per_line = array.shape[-1] if array.ndim > 1 and array.shape[-2] > 1 else 0
    return _Grid(array, number, per_line * SIZES[number])


def _step_of(grid: _Grid) -> int:
    return _step(grid.array.data_ptr() | grid.stride)


def _step(bits: int) -> int:
    """The largest power of two, up to 16, that divides a number."""
    return min(16, bits & -bits) if bits else 16


# -- what is compiled -------------------------------------------------------------------------


class _Plan(NamedTuple):
    function: nvrtc.Function
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    early: bool


@lru_cache(maxsize=4096)
def _plan(
    scheme: QuantScheme,
    shape: tuple[int, int, int, int],
    place: tuple[torch.dtype, torch.dtype, int],
    grids: tuple[int, int, int],
    steps: tuple[int, int],
    tiles: Tiles,
) -> _Plan:
    """What one shape of product runs.

    ``shape``: rows of x with planes counted, n, k, extent of x's lines. ``grids``: the types of
    scales and offsets, and the alignment of the former; ``steps``: of the codes and the latter.
    """
    columns, n, k, _ = shape
    entering, out, device = place
    kind = kind_of(scheme)
    number, bits = (0, scheme.bits) if kind is None else (kind.number, kind.bits)
    block = block_of(scheme, k)
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    while True:
        sizes = tuple(SIZES[each] * _per_chunk(tiles, block) for each in (grids[0], grids[2]))
        offset_bytes = sizes[1] if scheme.offset is not None else 0
        x_rows = 1 if columns == 1 else 8 * tiles.nt
        shared = _shared_bytes(tiles, bits, x_rows, (sizes[0], offset_bytes))
        shared += _TABLE_BYTES if number == LOOKUP else 0
        if shared <= most or tiles == tiles.smaller():
            break
        tiles = tiles.smaller()
    numbers = {
        "F16": int(entering is torch.float16),
        "BITS": bits,
        "KIND": number,
        "MANTISSA": kind.mantissa if kind is not None else 0,
        "BLOCK": block,
        "SCALE": grids[0],
        "OFFSET": offset_of(scheme),
        "OFFSET_TYPE": grids[2],
        "CODE_PIECE": min(steps[0], _step(tiles.chunk * bits // 8)),
        "SCALE_PIECE": min(grids[1], _step(sizes[0])),
        "OFFSET_PIECE": min(steps[1], _step(sizes[1])),
        "X_ROWS": x_rows,
        "PLANES": PLANES[entering],
        "OUT": _OUT[out],
        **{name.upper(): each for name, each in tiles._asdict().items()},
    }
    options = tuple(f"{name}={each}" for name, each in numbers.items())
    threads = 32 * tiles.wn * tiles.wk
    if tiles.wide:
        before = _wgmma(8 * tiles.nt, "f16" if entering is torch.float16 else "bf16")
        function = nvrtc.load("wgmma.cu", "matmul", options, threads, shared, device, before)
    else:
        function = nvrtc.load("mma.cu", "matmul", options, threads, shared, device)
    grid = (
        math.ceil(n / (16 * tiles.rt * tiles.wn)),
        math.ceil(columns / (8 * tiles.nt)),
        tiles.kc,
    )
    stored = scheme.scale_shape((n, k))
    lines = tuple(stored[1] * SIZES[each] for each in (grids[0], grids[2]))
    code_line = line_size_bytes(k, scheme.bits, scheme.store)
    rows = scheme.block_extents((n, k))[0] if stored[0] > 1 else 1
    return _Plan(
        function, grid, (math.ceil(k / tiles.chunk), code_line, *lines, rows), bool(tiles.early)
    )


def _per_chunk(tiles: Tiles, block: int) -> int:
    """Scales of a line that are copied with a chunk."""
    return 0 if block == 0 else max(1, tiles.chunk // block)


def _shared_bytes(tiles: Tiles, bits: int, x_rows: int, numbers: tuple[int, int]) -> int:
    """Shared memory of a block of threads without a table: see the constants of the kernels."""
    rows = 16 * tiles.rt
    line = tiles.chunk * bits // 8 + (16 if bits <= 4 else 32)
    line += sum(-(-each // 16) * 16 for each in numbers)
    x_bytes = 8 * tiles.nt * tiles.chunk * 2 if tiles.wide else x_rows * (tiles.chunk * 2 + 64)
    stage = tiles.wn * rows * line + x_bytes
    if tiles.wide:
        stage = -(-stage // 1024) * 1024
    sums = tiles.wk * 8 * tiles.nt * (rows * tiles.wn + 1) * 4
    return max(tiles.wk * tiles.stages * stage, sums) + (1024 if tiles.wide else 0)


def _wgmma(columns: int, kind: str) -> str:
    """The function that multiplies 16 values of k: PTX names each of its registers."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i // 4}][{i % 4}])' for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(4))
    return f"""
__device__ __forceinline__ void wgmma(float (*d)[4], const unsigned* a, unsigned long long x,
                                      int adds) {{
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 5}, 0;"
               " wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
               " {{{sums}}}, {{{left}}}, %{count + 4}, p, 1, 1, 0;}}"
               : {outputs}
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(adds));
}}
"""
