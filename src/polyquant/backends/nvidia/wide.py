"""Products of two quantized operands of many rows: what is compiled of ``wide.cu`` and launched.

A library plans a product, compiles what the plan names, fills the argument with the addresses of
its arrays and with their tensor maps, and launches. ``pairing.py`` of a library says what it takes.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import NamedTuple

from polyquant.backends.nvidia import Gpu
from polyquant.backends.nvidia.planning import OUT, Code
from polyquant.backends.nvidia.schemes import SIZES, block_of, kind_of, type_number
from polyquant.codec import line_size_bytes
from polyquant.scheme import QuantScheme
from polyquant.values import ScaleDtype

#: Values of a block that are fewer than a copy's.
SHORT = (32, 64)
#: Values of k of a copy, bytes of a line of 8-bit codes in it: what the 128-byte swizzle spans.
STEP = 128
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
    ``nt``: tiles of 8 columns that one multiplies at once, ``parts`` times one after the other.
    ``kc, mc``: blocks of threads of a cluster, along k and of neighbouring rows. ``stages``: copies
    of 128 values of k under way. ``blocks``: blocks of threads that a multiprocessor has room for,
    so that the next kernel begins beside this one.
    """

    lw: int
    rw: int
    nt: int
    kc: int
    mc: int
    stages: int
    blocks: int = 1
    parts: int = 1

    @property
    def rows(self) -> int:
        return 64 * self.lw

    @property
    def columns(self) -> int:
        return 8 * self.nt * self.parts * self.rw


class Wide(ctypes.Structure):
    """The argument of wide.cu's kernel: its size is whole 64 bytes. ``left, right`` are tensor maps
    (CUtensorMap) of the codes of both."""

    _fields_ = (
        *((name, ctypes.c_uint8 * 128) for name in ("left", "right")),
        *((name, ctypes.c_void_p) for name in ("left_scales", "right_scales")),
        *((name, ctypes.c_void_p) for name in ("left_whole", "right_whole", "y")),
        *((name, ctypes.c_int64) for name in ("left_stride", "right_stride")),
        *((name, ctypes.c_int) for name in ("m", "n", "steps", "left_height", "right_height")),
        *((name, ctypes.c_int) for name in ("tiles_m", "tiles_n", "early")),
        ("rest", ctypes.c_uint8 * 40),
    )


class Side(NamedTuple):
    """An operand: the type of its scales; values of a block (0: a scale a line); bytes of a line of
    codes and of scales; lines of a block."""

    kind: int
    block: int
    line: int
    scale_line: int
    height: int


def side_of(scheme: QuantScheme, lines: int, k: int) -> Side:
    kind, counts = type_number(scheme.scale), scheme.scale_shape((lines, k))
    height = scheme.block_extents((lines, k))[0] if counts[0] > 1 else lines
    line = line_size_bytes(k, scheme.bits, scheme.store)
    return Side(kind, block_of(scheme, k, by_n=False), line, counts[1] * SIZES[kind], height)


class Plan(NamedTuple):
    """What one shape of product runs. ``is_turned``: the weight is the left operand. ``boxes``:
    lines of a copy of the left and the right one. ``numbers``: the argument's."""

    code: Code
    threads: int
    shared_bytes: int
    grid: tuple[int, int, int]
    bits: int
    is_turned: bool
    boxes: tuple[int, int]
    numbers: dict[str, int]


@lru_cache(maxsize=4096)
def plan(
    schemes: tuple[QuantScheme, QuantScheme],
    sizes: tuple[int, int, int],
    out: str,
    gpu: Gpu,
    cut: Cut | None,
    *,
    has_words: bool = True,
) -> Plan:
    """``has_words``: whether scales of the weight begin at whole 4 bytes."""
    m, k, n = sizes
    kind = kind_of(schemes[1])
    bits, number, mantissa = (kind.bits, kind.number, kind.mantissa) if kind else (8, 0, 0)
    sides = side_of(schemes[0], m, k), side_of(schemes[1], n, k)
    # A row's scales are at hand, a column's only after all of k.
    is_turned, is_int = bits < 8 or sides[1].block in SHORT, not schemes[0].value.is_float
    left, right = sides[::-1] if is_turned else sides
    lines, columns = (n, m) if is_turned else (m, n)
    closed = min(STEP, left.block or STEP, right.block or STEP)
    if cut is None:
        folds = mantissa == 1 and left.kind == type_number(ScaleDtype.UE8M0)
        at_once = 0 if is_int and not left.block and not right.block else STEP if folds else closed
        of = (lines, columns, k), bits, gpu
        cut = cut_for(*of, is_int=is_int, is_turned=is_turned, closed=at_once)
    options = {
        **{"F16": 1, "INTEGER": int(is_int), "PLANES": 1, "BATCHED": 0, "RT": 1, "CHUNK": STEP},
        **{"BITS": bits, "KIND": number, "MANTISSA": mantissa, "OUT": OUT[out], "WIDE": 1},
        **{"BLOCK": 0, "SCALE": 0, "OFFSET": 0, "OFFSET_TYPE": 0, "X_ROWS": 8},
        **{"WN": 4 * cut.lw * cut.rw, "WK": 1, "CODE_PIECE": 16, "SCALE_PIECE": 4},
        **{"OFFSET_PIECE": 1, "CLOSED": closed, "TURNED": int(is_turned)},
        **{"LEFT_BLOCK": left.block, "LEFT_SCALE": left.kind},
        "WORDS": int(has_words and left.block == 32 and left.scale_line % 4 == 0),
        **{"RIGHT_BLOCK": right.block, "RIGHT_SCALE": right.kind},
        **{name.upper(): each for name, each in cut._asdict().items()},
    }
    flags = tuple(f"{name}={each}" for name, each in options.items())
    shared = _shared_bytes(cut, bits, is_turned=is_turned)
    threads = _GROUP * (cut.lw * cut.rw + 1)
    before = _wgmma(8 * cut.nt, is_int=is_int, in_registers=bits < 8 or cut.parts > 1)
    code = Code(("codes.cuh", "wide.cu"), flags, before)
    tiles_m = math.ceil(lines / (cut.rows * cut.mc)) * cut.mc
    tiles_n = math.ceil(columns / cut.columns)
    clusters, cluster = tiles_m // cut.mc * tiles_n, cut.kc * cut.mc
    if cut.kc == 1:  # as many as run at once: each takes one tile after the other
        clusters = min(clusters, gpu.processors * cut.blocks // cluster)
    numbers = {
        **{"m": lines, "n": columns, "steps": math.ceil(k / STEP)},
        **{"left_height": left.height, "left_stride": left.scale_line},
        **{"right_height": right.height, "right_stride": right.scale_line},
        **{"tiles_m": tiles_m, "tiles_n": tiles_n},
    }
    boxes = cut.rows, cut.columns // cut.mc
    grid = (clusters, 1, cluster)
    return Plan(code, threads, shared, grid, bits, is_turned, boxes, numbers)


def _shared_bytes(cut: Cut, bits: int, *, is_turned: bool) -> int:
    """Shared memory of a block of threads: see the constants of wide.cu."""
    stages = cut.stages * (cut.rows * STEP * bits // 8 + cut.columns * STEP)
    if cut.kc == 1:
        return 1024 + stages + 4 * cut.lw * cut.rw * _OUT_BYTES[is_turned]
    rows, columns = cut.rows, cut.columns
    return 1024 + max(stages, 4 * (columns * (rows + 4) if is_turned else rows * (columns + 8)))


def cut_for(
    sizes: tuple[int, int, int],
    bits: int,
    gpu: Gpu,
    *,
    is_int: bool,
    is_turned: bool,
    closed: int,
) -> Cut:
    """How a product is cut: near the quickest of those measured (8192 x 8192, H200).

    ``sizes``: lines of the left and of the right operand, k. ``closed``: after so many values of k
    sums are added up in float32, by instructions. 0: they stay in the tensor cores over all of k,
    so that registers hold twice as many of them.
    """
    lines, columns, k = sizes
    lw, rw, parts = 2, 1, 1
    is_short = 0 < closed < STEP
    is_large = 4 * math.ceil(lines / 128) * math.ceil(columns / 256) >= 3 * gpu.processors
    if not is_short and (columns > 128 if is_turned else lines > 128 and is_large):
        nt, parts = (8, 4) if closed else (32, 1)
    elif is_turned:
        nt = next(nt for nt in (2, 4, 8, 16) if 8 * nt >= min(columns, 128))
    elif lines <= 128:
        lw, nt = math.ceil(lines / 64), 16 if lines <= 16 else 8
    else:
        nt = 16
    if is_short and bits == 8 and nt == 16:
        if is_large:
            lw = 3
        elif is_int:
            nt, rw = 8, 2
    tiles = math.ceil(lines / (64 * lw)) * math.ceil(columns / (8 * nt * parts * rw))
    most = min(gpu.processors // tiles, k // (8 * STEP))  # blocks of threads that share k
    cut = Cut(lw, rw, nt, 4 if most >= 4 else max(1, most // 2 * 2), 1, _MOST_STAGES, 1, parts)
    while _shared_bytes(cut, bits, is_turned=is_turned) > gpu.shared_bytes - _BARRIERS_BYTES:
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
