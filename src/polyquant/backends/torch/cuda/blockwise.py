"""Products of two quantized operands of many rows, by one Triton kernel.

Codes enter the tensor cores as int8 (sums are exact int32) or e4m3; those of other widths are
widened to them first, which is exact. Scales of whole lines are taken out of the sums. Else a step
along k lies within a block of both operands, so that its sums are multiplied by one scale of each
and added up in float32. Of e4m3 at most 128 products are added in the tensor cores' own
accumulator, which holds some 14 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from polyquant.backends.torch.cuda import decode
from polyquant.backends.torch.cuda.paired import codes_of, product_by
from polyquant.qtensor import QTensor

#: Rows of tiles whose tiles share columns in the cache.
_GROUP = 8


@triton.jit
def scale_of(at, inside, KIND: tl.constexpr):
    """Stored scales as float32; the one of UE8M0 that is not normal too."""
    raw = tl.load(at, mask=inside, other=0)
    number = decode.stored_number(raw, KIND)
    if KIND == decode.UE8M0:
        number = number * tl.where(raw.to(tl.int32) == 0, 0.5, 1.0)
    return number


@triton.jit
def product_kernel(
    a_desc, b_desc, a_scales, b_scales, a_whole, b_whole, out_ptr, m, n, down, along,
    a_height, b_height, a_count, b_count,
    A_STEPS: tl.constexpr, B_STEPS: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    IS_INT: tl.constexpr, UNIFORM: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of one product; tiles of GROUP rows of tiles share columns in the cache.

    ``down``, ``along``: elements between rows and columns of the result. A_STEPS, B_STEPS: steps
    along k of a block; 0: lines have one scale. UNIFORM: so have all columns of a tile, each step.
    """
    pid, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    group = pid // (GROUP * tiles_n)
    size = tl.minimum(tiles_m - group * GROUP, GROUP)
    rest = pid % (GROUP * tiles_n)
    first_m, first_n = (group * GROUP + rest % size) * TILE_M, rest // size * TILE_N
    row, column = first_m + tl.arange(0, TILE_M), first_n + tl.arange(0, TILE_N)
    a_at = a_scales + row // a_height * a_count
    b_at = b_scales + (first_n // b_height if UNIFORM else column // b_height) * b_count
    b_inside = True if UNIFORM else column < n
    PART: tl.constexpr = tl.int32 if IS_INT else tl.float32
    sums = tl.zeros((TILE_M, TILE_N), dtype=PART if A_STEPS + B_STEPS == 0 else tl.float32)
    for i in range(STEPS):
        a = a_desc.load([first_m, i * STEP])
        b = b_desc.load([first_n, i * STEP])
        if IS_INT and A_STEPS + B_STEPS == 0:
            sums = tl.dot(a, b.T, sums, out_dtype=PART)
        else:
            if A_STEPS:
                left = scale_of(a_at + i // A_STEPS, row < m, A_SCALE)
            if B_STEPS:
                right = scale_of(b_at + i // B_STEPS, b_inside, B_SCALE)
            part = tl.dot(a, b.T, out_dtype=PART)
            if A_STEPS and B_STEPS:
                scale = (left * right)[:, None] if UNIFORM else left[:, None] * right[None, :]
                sums += part.to(tl.float32) * scale
            elif A_STEPS:
                sums += part.to(tl.float32) * left[:, None]
            elif B_STEPS:
                sums += part.to(tl.float32) * (right if UNIFORM else right[None, :])
            else:
                sums += part
    y = sums.to(tl.float32)
    if not A_STEPS:
        y = y * scale_of(a_at, row < m, A_SCALE)[:, None]
    if not B_STEPS:
        right = scale_of(b_at, b_inside, B_SCALE)
        y = y * (right if UNIFORM else right[None, :])
    if a_whole is not None:
        y = y * tl.load(a_whole)
    if b_whole is not None:
        y = y * tl.load(b_whole)
    at = row.to(tl.int64)[:, None] * down + column.to(tl.int64)[None, :] * along
    inside = (row < m)[:, None] & (column < n)[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


class Tiles(NamedTuple):
    """Rows and columns of a program's tile and values of a step along k; warps, and the steps that
    are loaded ahead. ``turned``: the transpose is computed, so that the weight has the rows."""

    m: int
    n: int
    step: int
    warps: int
    stages: int
    turned: bool = False


#: The quickest tiles of those measured on 8192 x 8192 (H200), by rows up to which they are: where
#: lines have one scale, and where blocks along k do.
_BY_LINES = (
    (16, Tiles(64, 16, 256, 4, 5, True)),
    (32, Tiles(64, 32, 256, 4, 5, True)),
    (64, Tiles(64, 64, 256, 4, 5)),
    (128, Tiles(128, 64, 256, 8, 4)),
    (256, Tiles(64, 128, 128, 4, 4, True)),
)
_IN_BLOCKS = (
    (16, Tiles(64, 16, 128, 4, 8, True)),
    (32, Tiles(64, 32, 128, 4, 6, True)),
    (64, Tiles(64, 32, 128, 4, 8)),
    (128, Tiles(64, 128, 128, 4, 6)),
    (512, Tiles(64, 128, 128, 4, 4)),
)


def tiles_for(m: int, *, is_exact: bool, by_lines: bool, is_uniform: bool) -> Tiles:
    """How a product is cut. ``is_exact``: sums stay in the tensor cores over all of k."""
    few = next((t for most, t in (_BY_LINES if by_lines else _IN_BLOCKS) if m <= most), None)
    if few is not None:
        return few
    if is_exact:
        return Tiles(128, 256, 128, 8, 4)
    return Tiles(128, 128, 128, 8, 4) if is_uniform or by_lines else Tiles(64, 128, 128, 4, 4)


def multiply(a: QTensor, b: QTensor, out: torch.Tensor, tiles: Tiles | None) -> None:
    """``out = a @ b`` by the given tiles, or those of ``tiles_for``."""
    is_int = not (a.scheme.value.is_float or b.scheme.value.is_float)
    kind = torch.int8 if is_int else torch.float8_e4m3fn
    blocks = [_blocks(side) for side in (a, b)]
    by_lines = all(each.a_line == 1 for each in blocks)
    if tiles is None:
        is_uniform = blocks[1].height % 128 == 0 or blocks[1].a_line == 1
        of = {"is_exact": is_int and by_lines, "by_lines": by_lines, "is_uniform": is_uniform}
        tiles = tiles_for(out.shape[0], **of)
    if tiles.turned:
        a, b, out, blocks = b, a, out.mT, blocks[::-1]
    (m, n), k = out.shape, a.shape[0] if tiles.turned else a.shape[1]
    step = min([tiles.step, *(each.extent & -each.extent for each in blocks if each.a_line > 1)])
    descriptors = (
        TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [lines, step])
        for codes, lines in zip((codes_of(a, kind), codes_of(b, kind)), tiles[:2], strict=True)
    )
    product_kernel[(-(-m // tiles.m) * -(-n // tiles.n),)](
        *descriptors,
        a.scales.contiguous(),
        b.scales.contiguous(),
        a.tensor_scale,
        b.tensor_scale,
        out,
        m,
        n,
        *out.stride(),
        *(each.height for each in blocks),
        *(each.a_line for each in blocks),
        A_STEPS=blocks[0].extent // step if blocks[0].a_line > 1 else 0,
        B_STEPS=blocks[1].extent // step if blocks[1].a_line > 1 else 0,
        A_SCALE=decode.scale_kind(a.scheme),
        B_SCALE=decode.scale_kind(b.scheme),
        IS_INT=is_int,
        UNIFORM=blocks[1].height % tiles.n == 0 or blocks[1].height >= n,
        STEPS=-(-k // step),
        STEP=step,
        TILE_M=tiles.m,
        TILE_N=tiles.n,
        GROUP=_GROUP,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


matmul = product_by(multiply)


class _Blocks(NamedTuple):
    """Lines of a block, blocks of a line, and the values of one."""

    height: int
    a_line: int
    extent: int


def _blocks(q: QTensor) -> _Blocks:
    lines, k = q.stored_shape
    height, extent = q.scheme.block_extents((lines, k))
    counts = q.scheme.scale_shape((lines, k))
    return _Blocks(height if counts[0] > 1 else lines, counts[1], extent)
