"""Products of few rows of 8-bit codes with a quantized weight, both as they are stored.

Integers by integers are summed exactly in int32; e4m3 by whatever float16 holds, in float32.
``pairs.cuh`` says how, ``pairs.cu`` and ``direct.cu`` by which way codes come. Here is what they
are compiled with, and their launch; ``pairing.py`` says what they take.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import NamedTuple

import torch

from polyquant.backends.nvidia.planning import TABLE_BYTES, step_of
from polyquant.backends.nvidia.schemes import LOOKUP, SIZES, kind_of
from polyquant.backends.nvidia.tiles import less
from polyquant.backends.nvidia.wide import Side, side_of
from polyquant.backends.torch.cuda import nvrtc
from polyquant.backends.torch.cuda.mma import OUT, keep, launches_of
from polyquant.backends.torch.cuda.paired import product_by
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme


class Cut(NamedTuple):
    """How a product is cut.

    ``rt, nt``: tiles of 16 rows of the weight and of 8 rows of x that a warp holds. ``wn, wk``:
    warps of a block of threads beside each other, and along k; ``kc``: blocks of threads of a
    cluster, along k. ``stages, chunk``: how many copies are under way, and of how many values of k
    each. ``blocks``: blocks of threads that a multiprocessor must have registers for. ``direct``:
    by direct.cu, whose wn and kc are 1.
    """

    rt: int
    nt: int
    wn: int
    wk: int
    kc: int
    stages: int
    chunk: int
    blocks: int = 1
    direct: int = 0

    def smaller(self) -> Cut:
        """The same with less shared memory; itself where there is nothing left to give up."""
        return self._replace(**less(self.stages, self.chunk, self.wk))


class _Pair(ctypes.Structure):
    """The argument of pairs.cu's kernel; of two of a kind that of x is first."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "x_scales", "scales")),
        *((name, ctypes.c_void_p) for name in ("x_whole", "whole", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "code_stride")),
        *((name, ctypes.c_int64) for name in ("x_scale_stride", "scale_stride")),
        *((name, ctypes.c_int) for name in ("m", "n", "chunks", "x_line", "code_line")),
        *((name, ctypes.c_int) for name in ("x_scale_line", "scale_line")),
        *((name, ctypes.c_int) for name in ("x_block_rows", "block_rows")),
    )


def multiply(a: QTensor, b: QTensor, y: torch.Tensor, cut: Cut | None) -> None:
    """``y = a @ b``, cut as given or as ``direct_for`` or ``cut_for`` say."""
    x, x_scales = _lines(a.data), a.scales.contiguous()
    x_stride, place = x.stride(0), (y.dtype, y.device.index or 0)
    steps = step_of(x.data_ptr() | x_stride), step_of(x_scales.data_ptr())
    key = (a.scheme, a.shape, steps, place, cut)
    known = launches_of(b)
    launch = known.get(key)
    if launch is None:
        launch = _launch_of(a, b, steps, place, cut)
        keep(known, key, launch)
    argument = _Pair.from_buffer_copy(launch.argument)
    argument.x, argument.x_scales, argument.y = x.data_ptr(), x_scales.data_ptr(), y.data_ptr()
    argument.x_whole = None if a.tensor_scale is None else a.tensor_scale.data_ptr()
    argument.x_stride, argument.x_scale_stride = x_stride, x_scales.stride(0) * x_scales.itemsize
    nvrtc.launch(launch.plan.function, launch.plan.grid, argument, waited=launch.waited)


matmul = product_by(multiply)


class _Launch(NamedTuple):
    """What is known of a product before ``a`` and ``y`` are: the argument without them, and the
    arrays that it points into. ``of_weight``: these are the weight's own, so it may be kept.
    ``waited``: see ``nvrtc.launch``."""

    plan: _Plan
    argument: _Pair
    arrays: tuple[torch.Tensor, ...]
    of_weight: bool
    waited: set[int]


def _launch_of(
    a: QTensor,
    b: QTensor,
    x_steps: tuple[int, int],
    place: tuple[torch.dtype, int],
    cut: Cut | None,
) -> _Launch:
    codes, scales = _lines(b.data), b.scales.contiguous()
    strides = codes.stride(0), scales.stride(0) * scales.itemsize
    steps = (
        x_steps[0],
        step_of(codes.data_ptr() | strides[0]),
        x_steps[1],
        step_of(scales.data_ptr()),
    )
    plan = _plan((a.scheme, b.scheme), (*a.shape, b.shape[1]), steps, place, cut)
    arrays = (0, codes, 0, scales, 0, b.tensor_scale, 0)
    pointers = (0 if isinstance(each, int | None) else each.data_ptr() for each in arrays)
    argument = _Pair(*pointers, 0, strides[0], 0, strides[1], *plan.numbers)
    of_weight = codes.data_ptr() == b.data.data_ptr() and scales is b.scales
    return _Launch(plan, argument, (codes, scales), of_weight, set())


def _lines(codes: torch.Tensor) -> torch.Tensor:
    """Codes as bytes, lines of whole 4 bytes at addresses of whole 4: mostly as they are."""
    codes = codes.view(torch.uint8)
    missing = -codes.shape[1] % 4
    if missing:
        return torch.nn.functional.pad(codes, (0, missing))
    if codes.stride(1) == 1 and (codes.data_ptr() | codes.stride(0)) % 4 == 0:
        return codes
    return codes.clone(memory_format=torch.contiguous_format)


class _Plan(NamedTuple):
    """What one shape of product runs; ``numbers``: the argument's from ``m`` on."""

    function: nvrtc.Function
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]


@lru_cache(maxsize=4096)
def _plan(
    schemes: tuple[QuantScheme, QuantScheme],
    sizes: tuple[int, int, int],
    steps: tuple[int, int, int, int],
    place: tuple[torch.dtype, int],
    cut: Cut | None,
) -> _Plan:
    """``steps``: the alignment of codes of x and of the weight, and of the scales of both."""
    (m, k, n), (dtype, device) = sizes, place
    x, w = side_of(schemes[0], m, k), side_of(schemes[1], n, k)
    kind = kind_of(schemes[1])
    bits, number, mantissa = (kind.bits, kind.number, kind.mantissa) if kind else (8, 0, 0)
    x_step, step = min(steps[0], step_of(x.line)), min(steps[1], step_of(w.line))
    is_int, blocks = not schemes[0].value.is_float, (x.block, w.block)
    if cut is None and bits == 8 and x_step == step == 16 and not any(b % 64 for b in blocks):
        in_blocks = any(blocks)
        cut = direct_for(m, is_exact=is_int and not in_blocks, in_blocks=in_blocks)
    if cut is None:
        shorter = min((each for each in blocks if each), default=0)
        cut = cut_for(bits, m, is_int=is_int, is_table=number == LOOKUP, block=shorter)
    gpu = nvrtc.gpu_of(device)
    if gpu.capability < (9, 0):
        cut = cut._replace(kc=1)  # clusters came with it
    most = gpu.shared_bytes - (TABLE_BYTES if number == LOOKUP else 0)
    x_rows = 1 if m == 1 else 8 * cut.nt
    while True:
        copied = tuple(_scale_bytes(side, cut.chunk) for side in (x, w))
        shared = _shared_bytes(cut, bits, x_rows, copied)
        if shared <= most or cut == cut.smaller():
            break
        cut = cut.smaller()
    shared += TABLE_BYTES if number == LOOKUP else 0
    options = {
        **{"F16": 1, "INTEGER": int(is_int), "PLANES": 1, "BATCHED": 0},
        **{"BITS": bits, "KIND": number, "MANTISSA": mantissa, "OUT": OUT[dtype], "WIDE": 0},
        **{"X_BLOCK": x.block, "BLOCK": w.block, "X_SCALE": x.kind, "SCALE": w.kind},
        **{"OFFSET": 0, "OFFSET_TYPE": 0, "OFFSET_PIECE": 1, "X_ROWS": x_rows},
        "X_PIECE": x_step,  # what lies past a line is never read
        "CODE_PIECE": step,
        "X_SCALE_PIECE": min(steps[2], step_of(copied[0] | x.scale_line)),
        "SCALE_PIECE": min(steps[3], step_of(copied[1] | w.scale_line)),
        **{name.upper(): each for name, each in cut._asdict().items() if name != "direct"},
    }
    flags = tuple(f"{name}={each}" for name, each in options.items())
    files = ("codes.cuh", "pairs.cuh", "direct.cu" if cut.direct else "pairs.cu")
    function = nvrtc.load(files, "matmul", flags, 32 * cut.wn * cut.wk, shared, device)
    grid = (math.ceil(n / (16 * cut.rt * cut.wn)), math.ceil(m / (8 * cut.nt)), cut.kc)
    lines = (x.line, w.line, x.scale_line, w.scale_line, x.height, w.height)
    return _Plan(function, grid, (m, n, math.ceil(k / cut.chunk), *lines))


def _scale_bytes(side: Side, chunk: int) -> int:
    """Bytes of a line's scales that are copied with a chunk."""
    return SIZES[side.kind] * max(1, chunk // side.block) if side.block else 0


def _shared_bytes(cut: Cut, bits: int, x_rows: int, copied: tuple[int, ...]) -> int:
    """Shared memory of a block of threads without a table: see the constants of pairs.cu."""
    x_scales, scales = (-(-each // 16) * 16 for each in copied)
    rows = 16 * cut.rt
    stage = cut.wn * rows * (cut.chunk * bits // 8 + 16 + scales)
    stage += x_rows * (cut.chunk + (16 if bits == 8 else 32) + x_scales)
    copies = 0 if cut.direct else cut.wk * cut.stages * stage
    return max(copies, cut.wk * 8 * cut.nt * (rows * cut.wn + 4) * 4)


def cut_for(bits: int, m: int, *, is_int: bool, is_table: bool, block: int) -> Cut:
    """How pairs.cu cuts a product: near the quickest of those measured (8192 x 8192, H200).

    ``is_table``: codes of the weight are looked up. ``block``: the shorter one of both operands.
    """
    nt = min(8, -(-m // 8))
    few = nt <= 2
    if bits == 8:
        pipe = Cut(2, nt, 2, 4, 2, 2, 128, 2) if nt == 1 else Cut(2, nt, 2, 4, 1, 3, 128)
        return pipe if few else Cut(2, nt, 4, 2, 2, 3, 128)
    if is_table and few:
        return Cut(2, nt, 4, 3 - nt, 2, 3, 256, nt)
    if not is_int and few:
        return Cut(2, nt, 2, 2, 1, 2, 512, 2)
    if not is_int:
        return Cut(2, nt, 2, 4, 1, 2, 256)
    if nt > 4 and 0 < block < 128:
        return Cut(1, nt, 8, 1, 2, 4, 256)
    if nt == 1:
        return Cut(2, nt, 2, 2, 1, 4, 256, 2) if bits == 4 else Cut(2, nt, 2, 4, 1, 2, 1024)
    return Cut(2, nt, 4, 1, 2, 4, 256, 2) if 2 < nt <= 4 else Cut(2, nt, 4, 2, 2, 3, 256)


def direct_for(m: int, *, is_exact: bool, in_blocks: bool) -> Cut | None:
    """How direct.cu does, or None where copies through shared memory are quicker."""
    nt = -(-m // 8)
    if nt > 2:
        return None
    if is_exact:
        few = nt == 1
        return Cut(2, 1, 1, 8, 1, 1, 256, 1, True) if few else Cut(1, 2, 1, 4, 1, 1, 256, 4, True)
    if nt == 1 and not in_blocks:
        return Cut(1, 1, 1, 8, 1, 1, 128, 4, True)
    return Cut(2, nt, 1, 8, 1, 1, 128, 2, True)
