"""Products of two quantized operands whose codes cuBLAS multiplies as they are: int8, and fp8.

Both are scaled by lines along k or as a whole, so that scales are taken out of the sums: int8 in
exact int32, e4m3 in the tensor cores' own accumulator (some 14 bits, added up in float32).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from polyquant.backends.torch.cuda import decode
from polyquant.qtensor import QTensor
from polyquant.values import ScaleDtype

#: cuBLAS wants lines of whole 16 bytes, and more than 16 of them on the left for int8.
_STEP, _LEAST_ROWS = 16, 17
#: From so many rows on cuBLAS is quicker with a scale a row than with none and scaling afterwards.
_ROWS = 256


@triton.jit
def scale_kernel(
    sums_ptr, a_ptr, b_ptr, a_whole_ptr, b_whole_ptr, out_ptr, n, stride, a_step, b_step,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums (m, stride >= n) times the scales of their row and column."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < n
    sums = tl.load(sums_ptr + row * stride + at, mask=inside, other=0).to(tl.float32)
    left = decode.stored_number(tl.load(a_ptr + row * a_step), A_KIND)
    right = decode.stored_number(tl.load(b_ptr + at * b_step, mask=inside, other=0), B_KIND)
    if a_whole_ptr is not None:
        left = left * tl.load(a_whole_ptr)
    if b_whole_ptr is not None:
        right = right * tl.load(b_whole_ptr)
    y = sums * left * right
    tl.store(out_ptr + row * n + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def matmul_int8(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b`` with exact int32 sums; ``a`` (m, k), ``b`` (k, n) stored (n, k)."""
    if not a.size or not b.size:
        return _nothing(a, b, dtype)
    left, right = _codes(a, torch.int8, _LEAST_ROWS), _codes(b, torch.int8, _STEP)
    return _scaled(torch._int_mm(left, right.mT), a, b, dtype)


def matmul_fp8(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b`` of e4m3 codes, added up in float32; ``a`` (m, k), ``b`` (k, n) stored (n, k)."""
    if not a.size or not b.size:
        return _nothing(a, b, dtype)
    left, right = (_codes(side, torch.float8_e4m3fn, _STEP) for side in (a, b))
    plain = all(
        side.scheme.scale is ScaleDtype.F32 and side.tensor_scale is None for side in (a, b)
    )
    whole = [side.scheme.block is None for side in (a, b)]
    narrow = dtype is torch.bfloat16 and a.shape[0] >= _ROWS and not any(whole)
    if plain and left.shape[0] == a.shape[0] and right.shape[0] == b.shape[1]:
        if all(whole):  # cuBLAS scales by itself
            scales = a.scales.reshape(()), b.scales.reshape(())
            return torch._scaled_mm(left, right.mT, *scales, out_dtype=dtype)
        if narrow:
            return torch._scaled_mm(left, right.mT, a.scales, b.scales.mT, out_dtype=dtype)
    one = torch.ones((), dtype=torch.float32, device=left.device)
    sums = torch._scaled_mm(left, right.mT, one, one, out_dtype=torch.float32)
    return _scaled(sums, a, b, dtype)


def _codes(q: QTensor, dtype: torch.dtype, least: int) -> torch.Tensor:
    """Codes stored (lines, k) as numbers of 8 bits; zeros fill up what cuBLAS does not take."""
    lines, k = q.data.shape[0], q.stored_shape[1]
    data = q.data
    more = max(0, least - lines) if least == _LEAST_ROWS else -lines % least
    more = 0 if q.axes == (0, 1) and least == _STEP else more  # of the left any number will do
    if more or k % _STEP or not data.is_contiguous() or data.data_ptr() % 16:
        data = torch.nn.functional.pad(data[:, :k], (0, -k % _STEP, 0, more)).contiguous()
    return data.view(dtype)


def _scaled(sums: torch.Tensor, a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    m, n = a.shape[0], b.shape[1]
    out = torch.empty((m, n), dtype=dtype, device=sums.device)
    scale_kernel[(m, -(-n // 1024))](
        sums,
        a.scales.contiguous(),
        b.scales.contiguous(),
        a.tensor_scale,
        b.tensor_scale,
        out,
        n,
        sums.stride(0),
        int(a.scales.shape[0] > 1),
        int(b.scales.shape[0] > 1),
        A_KIND=decode.scale_kind(a.scheme),
        B_KIND=decode.scale_kind(b.scheme),
        TILE=1024,
    )
    return out


def _nothing(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((a.shape[0], b.shape[1]), dtype=dtype, device=a.data.device)
