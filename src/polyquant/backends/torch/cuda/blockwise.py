"""Products of two quantized operands whose scales belong to blocks along k, by one Triton kernel.

Codes enter the tensor cores as they are where those take them, else as a wider type that holds them
exactly: int8 (sums are exact int32) or e4m3. A step along k lies within a block of both operands,
so that its sums are multiplied by one scale of each and added up in float32. Of e4m3 at most 128
products are added in the tensor cores' own accumulator, which holds some 14 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from polyquant.backends.torch.cuda import decode
from polyquant.codec import line_size_bytes
from polyquant.qtensor import QTensor

#: Programs that keep a GPU busy, and rows up to which k is cut into slices for that.
_PROGRAMS, _FEW = 264, 64
#: The longest step along k.
_STEP = 128


@triton.jit
def entering_codes(
    codes_ptr, line, first, inside, stride,
    KIND: tl.constexpr, BITS: tl.constexpr, IS_INT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Codes (lines, STEP) from value ``first`` on, as int8 or e4m3; zeros past the ends."""
    PER_BYTE: tl.constexpr = 8 // BITS
    at = first // PER_BYTE + tl.arange(0, STEP // PER_BYTE)
    mask = inside[:, None] & (at < stride)[None, :]
    raw = tl.load(codes_ptr + line[:, None] * stride + at[None, :], mask=mask, other=0)
    KIND_OF_CODES: tl.constexpr = tl.int8 if IS_INT else tl.float8e4nv
    if BITS == 8:
        # A line may end in padding, which is zero bits, and zero bits are the number zero.
        codes = raw.to(KIND_OF_CODES, bitcast=True)
    else:
        ROWS: tl.constexpr = line.shape[0]
        byte = raw.to(tl.int32)
        if BITS == 4:
            pairs = tl.join(byte & 15, byte >> 4)
        else:
            even = tl.join(byte & 3, (byte >> 4) & 3)
            odd = tl.join((byte >> 2) & 3, byte >> 6)
            pairs = tl.join(even, odd)
        field = tl.reshape(pairs, (ROWS, STEP))
        codes = decode.number_of(field, codes_ptr, KIND, BITS, 1).to(KIND_OF_CODES)
    return codes


@triton.jit
def blockwise_kernel(
    a_ptr, b_ptr, a_scales, b_scales, out_ptr, m, n, k,
    a_stride, b_stride, a_height, b_height, a_count, b_count, a_extent, b_extent,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, A_BITS: tl.constexpr, B_BITS: tl.constexpr,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, IS_INT: tl.constexpr, BY_LINES: tl.constexpr,
    STEPS: tl.constexpr, STEP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """STEPS steps of a tile of one product: (slices, m, n), not yet times the tensor scales."""
    tile_n, tile_m, slice_ = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (tile_m * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    column = (tile_n * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    a_scale_at = a_scales + row // a_height * a_count
    b_scale_at = b_scales + column // b_height * b_count
    sums = tl.zeros((TILE_M, TILE_N), dtype=tl.int32 if IS_INT and BY_LINES else tl.float32)
    for i in range(STEPS):
        first = (slice_ * STEPS + i) * STEP
        a = entering_codes(a_ptr, row, first, row < m, a_stride, A_KIND, A_BITS, IS_INT, STEP)
        b = entering_codes(b_ptr, column, first, column < n, b_stride, B_KIND, B_BITS, IS_INT, STEP)
        if IS_INT and BY_LINES:
            sums = tl.dot(a, tl.trans(b), sums, out_dtype=tl.int32)
        else:
            part = tl.dot(a, tl.trans(b), out_dtype=tl.int32 if IS_INT else tl.float32)
            if BY_LINES:
                sums += part
            else:
                inside = first < k
                left = tl.load(a_scale_at + first // a_extent, mask=(row < m) & inside, other=0)
                right = tl.load(b_scale_at + first // b_extent, mask=(column < n) & inside, other=0)
                left, right = decode_scale(left, A_SCALE), decode_scale(right, B_SCALE)
                sums += part.to(tl.float32) * (left[:, None] * right[None, :])
    result = sums.to(tl.float32)
    if BY_LINES:
        left = tl.load(a_scale_at, mask=row < m, other=0)
        right = tl.load(b_scale_at, mask=column < n, other=0)
        left, right = decode_scale(left, A_SCALE), decode_scale(right, B_SCALE)
        result = result * left[:, None] * right[None, :]
    at = (slice_ * m + row)[:, None] * n + column[None, :]
    inside_out = (row < m)[:, None] & (column < n)[None, :]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside_out)


@triton.jit
def decode_scale(raw, KIND: tl.constexpr):
    """A stored scale as float32; the one of UE8M0 that is not normal too."""
    number = decode.stored_number(raw, KIND)
    if KIND == decode.UE8M0:
        number = number * tl.where(raw.to(tl.int32) == 0, 0.5, 1.0)
    return number


class _Side(NamedTuple):
    """What the kernel is told of an operand: bytes of a line; lines of a block; blocks of a line,
    and the values of one."""

    stride: int
    height: int
    blocks: int
    extent: int


def matmul(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b``, rounded to ``dtype``; ``a`` (m, k), ``b`` (k, n) stored (n, k)."""
    (m, k), n = a.shape, b.shape[1]
    if not m or not n or not k:
        return torch.zeros((m, n), dtype=dtype, device=a.data.device)
    left, right = _side(a), _side(b)
    by_lines = left.blocks == right.blocks == 1
    extents = [side.extent & -side.extent for side in (left, right) if side.blocks > 1]
    step = min([_STEP, *extents])
    tile_m = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 else 128
    tile_n = 64 if m <= _FEW else 128
    tiles, steps = (-(-n // tile_n), -(-m // tile_m)), -(-k // step)
    slices = 1 if m > _FEW else max(1, min(steps, _PROGRAMS // tiles[0]))
    a_slice = -(-steps // slices)
    slices = -(-steps // a_slice)
    scaled = a.tensor_scale is not None or b.tensor_scale is not None
    kind = dtype if slices == 1 and not scaled else torch.float32
    out = torch.empty((slices, m, n), dtype=kind, device=a.data.device)
    blockwise_kernel[(*tiles, slices)](
        a.data.contiguous().view(torch.uint8),
        b.data.contiguous().view(torch.uint8),
        a.scales.contiguous(),
        b.scales.contiguous(),
        out,
        m,
        n,
        k,
        *(number for pair in zip(left, right, strict=True) for number in pair),
        A_KIND=decode.kind_of(a.scheme),
        B_KIND=decode.kind_of(b.scheme),
        A_BITS=a.scheme.bits,
        B_BITS=b.scheme.bits,
        A_SCALE=decode.scale_kind(a.scheme),
        B_SCALE=decode.scale_kind(b.scheme),
        IS_INT=not (a.scheme.value.is_float or b.scheme.value.is_float),
        BY_LINES=by_lines,
        STEPS=a_slice,
        STEP=step,
        TILE_M=tile_m,
        TILE_N=tile_n,
        num_warps=8 if tile_m == 128 else 4,
        num_stages=3,
    )
    y = out[0] if slices == 1 else out.sum(0)
    for side in (a, b):
        y = y if side.tensor_scale is None else y * side.tensor_scale
    return y.to(dtype)


def _side(q: QTensor) -> _Side:
    lines, k = q.stored_shape
    height, extent = q.scheme.block_extents((lines, k))
    counts = q.scheme.scale_shape((lines, k))
    stride = line_size_bytes(k, q.scheme.bits, q.scheme.store)
    return _Side(stride, height if counts[0] > 1 else lines, counts[1], extent)
