"""Products by cuBLAS of two quantized operands whose numbers enter it exactly.

Scales of lines along k, or of the whole tensor, are taken out of the sums: of e4m3 in the tensor
cores' own accumulator (some 14 bits, added up in float32), of whatever else bf16 holds in float32.
There powers of two may scale shorter blocks: bf16 holds those products too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from polyquant.backends.torch.cuda import decode
from polyquant.backends.torch.cuda.pairing import by_powers, in_fp8_blocks
from polyquant.qtensor import QTensor
from polyquant.values import ScaleDtype

#: cuBLAS and descriptors of tiles want lines of whole 16 bytes.
_STEP = 16
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


def matmul_fp8(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b`` of e4m3 codes, added up in float32; ``a`` (m, k), ``b`` (k, n) stored (n, k)."""
    if not a.size or not b.size:
        return nothing(a, b, dtype)
    if in_fp8_blocks(a.scheme, b.scheme):
        return _matmul_in_blocks(a, b, dtype)
    left = codes_of(a, torch.float8_e4m3fn)
    right = codes_of(b, torch.float8_e4m3fn, -b.shape[1] % _STEP)
    plain = all(
        side.scheme.scale is ScaleDtype.F32 and side.tensor_scale is None for side in (a, b)
    )
    whole = [side.scheme.block is None for side in (a, b)]
    narrow = dtype is torch.bfloat16 and a.shape[0] >= _ROWS and not any(whole)
    if plain and right.shape[0] == b.shape[1]:
        if all(whole):  # cuBLAS scales by itself
            scales = a.scales.reshape(()), b.scales.reshape(())
            return torch._scaled_mm(left, right.mT, *scales, out_dtype=dtype)
        if narrow:
            return torch._scaled_mm(left, right.mT, a.scales, b.scales.mT, out_dtype=dtype)
    one = torch.ones((), dtype=torch.float32, device=left.device)
    sums = torch._scaled_mm(left, right.mT, one, one, out_dtype=torch.float32)
    return _scaled(sums, a, b, dtype)


def _matmul_in_blocks(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """The same in blocks of 1 x 128 by 128 x 128, by whose scales cuBLAS multiplies sums of 128.

    It wants whole fours of rows, whose scales lie column by column, and whole 16 of columns.
    """
    m, n = a.shape[0], b.shape[1]
    left = codes_of(a, torch.float8_e4m3fn, -m % 4)
    right = codes_of(b, torch.float8_e4m3fn, -n % _STEP)
    scales = torch.nn.functional.pad(a.scales, (0, 0, 0, -m % 4)) if m % 4 else a.scales
    of_rows = scales.mT.contiguous().mT
    of_columns = b.scales.contiguous().mT
    y = torch._scaled_mm(left, right.mT, of_rows, of_columns, out_dtype=dtype)
    return y if y.shape == (m, n) else y[:m, :n].contiguous()


def matmul_bf16(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b`` of numbers that bf16 holds; ``a`` (m, k), ``b`` (k, n) stored (n, k)."""
    if not a.size or not b.size:
        return nothing(a, b, dtype)
    plain = [_unscaled(side) for side in (a, b)]
    kept = [by_powers(side.scheme) for side in (a, b)]
    left, right = (
        _lines(decode.dequantize(side if keeps else codes, torch.bfloat16), side.axes)
        for side, codes, keeps in zip((a, b), plain, kept, strict=True)
    )
    sums = torch.mm(left, right.mT, out_dtype=torch.float32)
    return _scaled(sums, plain[0] if kept[0] else a, plain[1] if kept[1] else b, dtype)


def codes_of(q: QTensor, dtype: torch.dtype, more: int = 0) -> torch.Tensor:
    """Codes as stored, (lines, k), as int8 or e4m3, which hold them exactly.

    Zeros fill up lines to whole 16 bytes; ``more`` lines of zeros follow.
    """
    k = q.stored_shape[1]
    codes = q.data if q.scheme.bits == 8 else _lines(decode.dequantize(_unscaled(q), dtype), q.axes)
    missing = -k % _STEP
    if more or codes.shape[1] != k + missing or not codes.is_contiguous() or codes.data_ptr() % 16:
        codes = codes.view(torch.uint8)[:, :k]
        codes = torch.nn.functional.pad(codes, (0, missing, 0, more)).contiguous()
    return codes.view(dtype)


def _lines(values: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Values in the order in which they are stored."""
    return values if axes == (0, 1) else values.mT


def _unscaled(q: QTensor) -> QTensor:
    """The codes of ``q`` as a tensor of their own numbers."""
    one = torch.ones((1,) * q.ndim, dtype=torch.float32, device=q.data.device)
    scheme = q.scheme._with(block=None, scale=ScaleDtype.F32, tensor_scale=None)
    return q._replace(scheme=scheme, scales=one, tensor_scale=None)


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


def product_by(
    multiply: Callable[[QTensor, QTensor, torch.Tensor, None], None],
) -> Callable[[QTensor, QTensor, torch.dtype], torch.Tensor]:
    """``a @ b`` rounded to a dtype, by a function that fills its array: ``a`` (m, k), ``b`` (k, n)
    stored (n, k)."""

    def matmul(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
        if not a.size or not b.size:
            return nothing(a, b, dtype)
        y = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.data.device)
        multiply(a, b, y, None)
        return y

    return matmul


def nothing(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """The product of operands one of which has no elements."""
    return torch.zeros((a.shape[0], b.shape[1]), dtype=dtype, device=a.data.device)
