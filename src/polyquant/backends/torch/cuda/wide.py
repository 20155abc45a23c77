"""Products of two quantized operands of many rows, by Hopper's wgmma of 8-bit codes.

``wide.cu`` says how. Here is what it is compiled with, and its launch; ``pairing.py`` says what it
takes.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from polyquant.backends.nvidia import Gpu
from polyquant.backends.nvidia.schemes import kind_of
from polyquant.backends.torch.cuda import nvrtc
from polyquant.backends.torch.cuda.mma import OUT, keep, launches_of
from polyquant.backends.torch.cuda.pairs import side_of
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme

#: Values of k of a copy, bytes of a line of 8-bit codes in it: what the 128-byte swizzle spans.
_STEP = 128
#: Bytes through which a warp's rows of the result go, of a tile turned round or not.
_OUT_BYTES = (16 * 80, 32 * 48)
#: Copies under way at most, and what their barriers take of shared memory besides: two each.
_MOST_STAGES = 12
_BARRIERS_BYTES = 16 * _MOST_STAGES
#: Threads of four warps, which multiply together; as many more copy.
_GROUP = 128


class Cut(NamedTuple):
    """How a product is cut.

    ``lw, rw``: groups of four warps along the rows and the columns of a tile, each of 64 rows;
    ``nt``: tiles of 8 columns that one holds. ``kc, mc``: blocks of threads of a cluster, along k
    and of neighbouring rows. ``stages``: copies of 128 values of k under way. ``blocks``: blocks of
    threads that a multiprocessor has room for, so that the next kernel begins beside this one.
    """

    lw: int
    rw: int
    nt: int
    kc: int
    mc: int
    stages: int
    blocks: int = 1

    @property
    def rows(self) -> int:
        return 64 * self.lw

    @property
    def columns(self) -> int:
        return 8 * self.nt * self.rw


class _Wide(ctypes.Structure):
    """The argument of wide.cu's kernel: its size is whole 64 bytes."""

    _fields_ = (
        *((name, ctypes.c_uint8 * 128) for name in ("left", "right")),
        *((name, ctypes.c_void_p) for name in ("left_scales", "right_scales")),
        *((name, ctypes.c_void_p) for name in ("left_whole", "right_whole", "y")),
        *((name, ctypes.c_int64) for name in ("left_stride", "right_stride")),
        *((name, ctypes.c_int) for name in ("m", "n", "steps", "left_height", "right_height")),
        *((name, ctypes.c_int) for name in ("tiles_m", "tiles_n", "early")),
        ("rest", ctypes.c_uint8 * 40),
    )


def matmul(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b``, rounded to ``dtype``; ``a`` (m, k), ``b`` (k, n) stored (n, k)."""
    y = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.data.device)
    if not a.shape[1]:
        y.zero_()
    elif y.numel():
        multiply(a, b, y, None)
    return y


def multiply(a: QTensor, b: QTensor, y: torch.Tensor, cut: Cut | None) -> None:
    """``y = a @ b``, cut as given or as ``cut_for`` says."""
    x, scales, place = _lines(a.data), a.scales.contiguous(), (y.dtype, y.device.index or 0)
    key = (a.scheme, a.shape, place, cut)
    known = launches_of(b)
    launch = known.get(key)
    is_known = launch is not None
    if launch is None:
        launch = _launch_of(a, b, place, cut)
        keep(known, key, launch)
    plan = launch.plan
    argument = _Wide.from_buffer_copy(launch.argument)
    side = "right" if plan.is_turned else "left"
    box = _map_of(x, a.shape[1], _STEP, plan.boxes[plan.is_turned])
    setattr(argument, side, box)
    setattr(argument, f"{side}_scales", scales.data_ptr())
    if a.tensor_scale is not None:
        setattr(argument, f"{side}_whole", a.tensor_scale.data_ptr())
    argument.y, argument.early = y.data_ptr(), int(is_known)
    nvrtc.launch(plan.function, plan.grid, argument, early=is_known)


class _Launch(NamedTuple):
    """What is known of a product before ``a`` and ``y`` are: the argument without them, and the
    arrays that it points into. ``of_weight``: these are the weight's own, so it may be kept."""

    plan: _Plan
    argument: _Wide
    arrays: tuple[torch.Tensor, ...]
    of_weight: bool


def _launch_of(a: QTensor, b: QTensor, place: tuple[torch.dtype, int], cut: Cut | None) -> _Launch:
    codes, scales = _lines(b.data), b.scales.contiguous()
    plan = _plan((a.scheme, b.scheme), (*a.shape, b.shape[1]), place, cut)
    line, width = -(-a.shape[1] * plan.bits // 8), _STEP * plan.bits // 8
    side = "left" if plan.is_turned else "right"
    argument = _Wide(**plan.numbers)
    setattr(argument, side, _map_of(codes, line, width, plan.boxes[not plan.is_turned]))
    setattr(argument, f"{side}_scales", scales.data_ptr())
    if b.tensor_scale is not None:
        setattr(argument, f"{side}_whole", b.tensor_scale.data_ptr())
    of_weight = codes.data_ptr() == b.data.data_ptr() and scales is b.scales
    return _Launch(plan, argument, (codes, scales), of_weight)


def _map_of(codes: torch.Tensor, line: int, width: int, rows: int) -> Any:
    return nvrtc.tiles_of_lines(
        codes.data_ptr(), (codes.shape[0], line), codes.stride(0), (rows, width)
    )


def _lines(codes: torch.Tensor) -> torch.Tensor:
    """Codes as bytes, lines of whole 16 bytes at addresses of whole 16: mostly as they are."""
    codes = codes.view(torch.uint8)
    if codes.stride(1) == 1 and (codes.data_ptr() | codes.stride(0)) % 16 == 0:
        return codes
    missing = -codes.shape[1] % 16
    if missing:
        return torch.nn.functional.pad(codes, (0, missing))
    return codes.clone(memory_format=torch.contiguous_format)


class _Plan(NamedTuple):
    """What one shape of product runs. ``is_turned``: the weight is the left operand. ``boxes``:
    lines of a copy of the left and the right one. ``numbers``: the argument's."""

    function: nvrtc.Function
    grid: tuple[int, int, int]
    bits: int
    is_turned: bool
    boxes: tuple[int, int]
    numbers: dict[str, int]


@lru_cache(maxsize=4096)
def _plan(
    schemes: tuple[QuantScheme, QuantScheme],
    sizes: tuple[int, int, int],
    place: tuple[torch.dtype, int],
    cut: Cut | None,
) -> _Plan:
    (m, k, n), (dtype, device) = sizes, place
    kind = kind_of(schemes[1])
    bits, number, mantissa = (kind.bits, kind.number, kind.mantissa) if kind else (8, 0, 0)
    is_turned, is_int = bits < 8, not schemes[0].value.is_float
    sides = side_of(schemes[0], m, k), side_of(schemes[1], n, k)
    left, right = sides[::-1] if is_turned else sides
    lines, columns = (n, m) if is_turned else (m, n)
    by_lines = not left.block and not right.block
    gpu = nvrtc.gpu_of(device)
    if cut is None:
        cut = cut_for((lines, columns, k), bits, gpu, is_exact=is_int and by_lines)
    options = {
        **{"F16": 1, "INTEGER": int(is_int), "PLANES": 1, "BATCHED": 0, "RT": 1, "CHUNK": _STEP},
        **{"BITS": bits, "KIND": number, "MANTISSA": mantissa, "OUT": OUT[dtype], "WIDE": 1},
        **{"BLOCK": 0, "SCALE": 0, "OFFSET": 0, "OFFSET_TYPE": 0, "X_ROWS": 8},
        **{"WN": 4 * cut.lw * cut.rw, "WK": 1, "CODE_PIECE": 16, "SCALE_PIECE": 4},
        **{"OFFSET_PIECE": 1, "CLOSED": min(_STEP, left.block or _STEP, right.block or _STEP)},
        **{"LEFT_BLOCK": left.block, "LEFT_SCALE": left.kind},
        **{"RIGHT_BLOCK": right.block, "RIGHT_SCALE": right.kind},
        **{name.upper(): each for name, each in cut._asdict().items()},
    }
    flags = tuple(f"{name}={each}" for name, each in options.items())
    shared = _shared_bytes(cut, bits, is_turned=is_turned)
    threads = _GROUP * (cut.lw * cut.rw + 1)
    before = _wgmma(8 * cut.nt, is_int=is_int, in_registers=is_turned)
    files = ("codes.cuh", "wide.cu")
    function = nvrtc.load(files, "matmul", flags, threads, shared, device, before)
    tiles_m = math.ceil(lines / (cut.rows * cut.mc)) * cut.mc
    tiles_n = math.ceil(columns / cut.columns)
    clusters, cluster = tiles_m // cut.mc * tiles_n, cut.kc * cut.mc
    if cut.kc == 1:  # as many as run at once: each takes one tile after the other
        clusters = min(clusters, gpu.processors * cut.blocks // cluster)
    numbers = {
        **{"m": lines, "n": columns, "steps": math.ceil(k / _STEP)},
        **{"left_height": left.height, "left_stride": left.scale_line},
        **{"right_height": right.height, "right_stride": right.scale_line},
        **{"tiles_m": tiles_m, "tiles_n": tiles_n},
    }
    boxes = cut.rows, cut.columns // cut.mc
    return _Plan(function, (clusters, 1, cluster), bits, is_turned, boxes, numbers)


def _shared_bytes(cut: Cut, bits: int, *, is_turned: bool) -> int:
    """Shared memory of a block of threads: see the constants of wide.cu."""
    stages = cut.stages * (cut.rows * _STEP * bits // 8 + cut.columns * _STEP)
    if cut.kc == 1:
        return 1024 + stages + 4 * cut.lw * cut.rw * _OUT_BYTES[is_turned]
    rows, columns = cut.rows, cut.columns
    return 1024 + max(stages, 4 * (columns * (rows + 4) if is_turned else rows * (columns + 8)))


def cut_for(sizes: tuple[int, int, int], bits: int, gpu: Gpu, *, is_exact: bool) -> Cut:
    """How a product is cut: near the quickest of those measured (8192 x 8192, H200).

    ``sizes``: lines of the left and of the right operand, k. ``is_exact``: sums stay in the tensor
    cores over all of k, so that registers hold twice as many of them.
    """
    lines, columns, k = sizes
    if bits < 8:
        lw, nt = 2, next(nt for nt in (2, 4, 8, 16) if 8 * nt >= min(columns, 128))
    elif lines <= 128:
        lw, nt = math.ceil(lines / 64), 8
    else:
        fills = 4 * math.ceil(lines / 128) * math.ceil(columns / 256) >= 3 * gpu.processors
        lw, nt = 2, 32 if is_exact and fills else 16
    tiles = math.ceil(lines / (64 * lw)) * math.ceil(columns / (8 * nt))
    most = min(gpu.processors // tiles, k // (8 * _STEP))  # blocks of threads that share k
    cut = Cut(lw, 1, nt, 4 if most >= 4 else max(1, most // 2 * 2), 1, _MOST_STAGES)
    while _shared_bytes(cut, bits, is_turned=bits < 8) > gpu.shared_bytes - _BARRIERS_BYTES:
        cut = cut._replace(stages=cut.stages - 1)
    return cut


def _wgmma(columns: int, *, is_int: bool, in_registers: bool) -> str:
    """The function that multiplies 32 values of k: PTX names each of its registers."""
    count, width = columns // 2, 4 if in_registers else 1
    kind, register, types, ends = (
        ("int", "r", "s32.s8.s8", "") if is_int else ("float", "f", "f32.e4m3.e4m3", ", 1, 1")
    )
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+{register}"(d[{i // 4}][{i % 4}])' for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(width))
    left = f"{{{left}}}" if in_registers else left
    given = ", ".join(f'"r"(a[{i}])' for i in range(4)) if in_registers else '"l"(a)'
    first = "const unsigned* a" if in_registers else "unsigned long long a"
    return f"""
__device__ __forceinline__ void wgmma({kind} (*d)[4], {first}, unsigned long long b, int more) {{
  asm volatile("{{.reg .pred more; setp.ne.b32 more, %{count + width + 1}, 0;"
               " wgmma.mma_async.sync.aligned.m64n{columns}k32.{types}"
               " {{{sums}}}, {left}, %{count + width}, more{ends};}}"
               : {outputs}
               : {given}, "l"(b), "r"(more));
}}
"""
