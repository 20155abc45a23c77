"""Numbers as bf16: codes that it holds as they are, and float32 as three that add up to it.

Products of two quantized operands by cuBLAS, in float32 as that of their values would be, at the
rate of bf16: of three numbers by three the six products that float32 sees.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from polyquant import views
from polyquant.backends.nvidia.schemes import MOST_BYTES
from polyquant.backends.torch.cuda import decode
from polyquant.backends.torch.cuda.paired import lines_of, nothing, put_scaled, unscaled
from polyquant.backends.torch.cuda.pairing import by_powers, is_held
from polyquant.qtensor import QTensor

#: Lines that cuBLAS likes to have whole times of: with odd ones it takes eight times as long.
_WHOLE = 128


@triton.jit
def split_kernel(x_ptr, out_ptr, k, padded, stride, REVERSED: tl.constexpr, TILE: tl.constexpr):
    """A line of float32 as three lines of bf16 that add up to it, zeros behind."""
    row = tl.program_id(0).to(tl.int64)  # the grid's other axis ends at 65,535
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    rest = tl.load(x_ptr + row * stride + at, mask=at < k, other=0.0)
    is_finite = tl.abs(rest) < float("inf")
    out = out_ptr + row * 3 * padded + at
    for plane in tl.static_range(3):
        bits = rest.to(tl.int32, bitcast=True)
        upper = bits & -65536 if plane < 2 else bits  # the upper half
        if plane == 0:  # a NaN stays one, whatever its payload
            upper = tl.where(rest != rest, 0x7FC00000, upper)
        part = upper.to(tl.float32, bitcast=True)
        rest = tl.where(is_finite, rest - part, 0.0)
        line = 2 - plane if REVERSED else plane
        tl.store(out + line * padded, part.to(tl.bfloat16), mask=at < padded)


def split_planes(x: torch.Tensor, *, is_reversed: bool = False) -> torch.Tensor:
    """Lines (m, k) of float32 as bf16 (3 m, k padded to whole 16 bytes): three that add up to each.

    The upper 8 bits of the significand, the next 8, and the rest: exact where none is subnormal.
    ``is_reversed``: the rest first.
    """
    m, k = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    padded = -(-k // 8) * 8
    out = torch.empty((3 * m, padded), dtype=torch.bfloat16, device=x.device)
    grid = (m, -(-padded // 1024))
    split_kernel[grid](x, out, k, padded, x.stride(0), REVERSED=is_reversed, TILE=1024)
    return out


def matmul(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b``, added up in float32; ``a`` (m, k), ``b`` (k, n) stored (n, k).

    Scales of lines along k, or of the whole tensor, multiply the sums where bf16 holds the codes.
    """
    if not a.size or not b.size:
        return nothing(a, b, dtype)
    (m, k), n = a.shape, b.shape[1]
    y = torch.empty((m, n), dtype=dtype, device=a.data.device)
    left, height = _numbers(a), b.scheme.block_extents((n, k))[0]
    step = MOST_BYTES // (2 * k * (1 if is_held(b.scheme) else 3))
    whole = math.lcm(height, _WHOLE)
    step = n if whole > step else step // whole * whole
    for start in range(0, n, step):
        tile = b if step >= n else views.narrow(b, 1, start, min(step, n - start))
        sums = _sums(left, _numbers(tile, is_reversed=True))
        put_scaled(sums, _of_sums(a), _of_sums(tile), y[:, start : start + step])
    return y


def _of_sums(q: QTensor) -> QTensor | None:
    """``q`` where its scales multiply the sums."""
    return q if is_held(q.scheme) and not by_powers(q.scheme) else None


def _numbers(q: QTensor, *, is_reversed: bool = False) -> torch.Tensor:
    """Lines along k (lines, 1 or 3 numbers of bf16 for each, k padded to whole 16 bytes)."""
    k = q.stored_shape[1]
    if is_held(q.scheme):
        held = decode.dequantize(q if by_powers(q.scheme) else unscaled(q), torch.bfloat16)
        lines = lines_of(held, q.axes)
        return (torch.nn.functional.pad(lines, (0, -k % 8)) if k % 8 else lines)[:, None]
    lines = lines_of(decode.dequantize(q, torch.float32), q.axes)
    return split_planes(lines, is_reversed=is_reversed).reshape(len(lines), 3, -1)


def _sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sums over k of products of numbers, the smallest ones first; the right one's are reversed."""
    (_, of_left, _), (_, of_right, _) = left.shape, right.shape
    total = None
    for order in reversed(range(min(of_left + of_right - 1, 3))):
        first, end = max(0, order - of_right + 1), min(of_left, order + 1)
        there = of_right - 1 - order + first
        x = left[:, first:end].flatten(1)
        w = right[:, there : there + end - first].flatten(1).mT
        if total is None:
            total = torch.mm(x, w, out_dtype=torch.float32)
        else:
            total = torch.addmm(total, x, w, out_dtype=torch.float32)
    return total
