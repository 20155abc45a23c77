"""float32 as three bf16 numbers that add up to it, by a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def split_kernel(x_ptr, out_ptr, k, padded, stride, TILE: tl.constexpr):
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
        tl.store(out + plane * padded, part.to(tl.bfloat16), mask=at < padded)


def split_planes(x: torch.Tensor) -> torch.Tensor:
    """Lines (m, k) of float32 as bf16 (3 m, k padded to whole 16 bytes): three that add up to each.

    The upper 8 bits of the significand, the next 8, and the rest: exact where none is subnormal.
    """
    m, k = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    padded = -(-k // 8) * 8
    out = torch.empty((3 * m, padded), dtype=torch.bfloat16, device=x.device)
    split_kernel[(m, -(-padded // 1024))](x, out, k, padded, x.stride(0), TILE=1024)
    return out
