"""Products by cuBLAS of two quantized operands that hold e4m3.

Scales of lines along k, or of the whole tensor, are taken out of the sums, which the tensor cores'
own accumulator holds (some 14 bits, added up in float32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from polyquant.backends.torch.cuda import decode
from polyquant.backends.torch.cuda.pairing import in_fp8_blocks
from polyquant.qtensor import QTensor
from polyquant.values import ScaleDtype

#: cuBLAS and descriptors of tiles want lines of whole 16 bytes.
_STEP = 16
#: From so many rows on cuBLAS is quicker with a scale a row than with none and scaling afterwards.
_ROWS = 256


@triton.jit
def scale_kernel(
    sums_ptr, a_ptr, b_ptr, a_whole_ptr, b_whole_ptr, out_ptr,
    n, stride, out_stride, a_step, b_step,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums (m, stride >= n) times the scales of their row and column, where there are any."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < n
    sums = tl.load(sums_ptr + row * stride + at, mask=inside, other=0).to(tl.float32)
    left, right = 1.0, 1.0
    if a_ptr is not None:
        left = decode.stored_number(tl.load(a_ptr + row * a_step), A_KIND)
    if b_ptr is not None:
        right = decode.stored_number(tl.load(b_ptr + at * b_step, mask=inside, other=0), B_KIND)
    if a_whole_ptr is not None:
        left = left * tl.load(a_whole_ptr)
    if b_whole_ptr is not None:
        right = right * tl.load(b_whole_ptr)
    y = sums * left * right
    tl.store(out_ptr + row * out_stride + at, y.to(out_ptr.dtype.element_ty), mask=inside)


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
    y = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=sums.device)
    put_scaled(sums, a, b, y)
    return y


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


def codes_of(q: QTensor, dtype: torch.dtype, more: int = 0) -> torch.Tensor:
    """Codes as stored, (lines, k), as int8 or e4m3, which hold them exactly.

    Zeros fill up lines to whole 16 bytes; ``more`` lines of zeros follow.
    """
    k = q.stored_shape[1]
    codes = (
        q.data if q.scheme.bits == 8 else lines_of(decode.dequantize(unscaled(q), dtype), q.axes)
    )
    missing = -k % _STEP
    if more or codes.shape[1] != k + missing or not codes.is_contiguous() or codes.data_ptr() % 16:
        codes = codes.view(torch.uint8)[:, :k]
        codes = torch.nn.functional.pad(codes, (0, missing, 0, more)).contiguous()
    return codes.view(dtype)


def lines_of(values: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Values in the order in which they are stored."""
    return values if axes == (0, 1) else values.mT


def unscaled(q: QTensor) -> QTensor:
    """The codes of ``q`` as a tensor of their own numbers."""
    one = torch.ones((1,) * q.ndim, dtype=torch.float32, device=q.data.device)
    scheme = q.scheme._with(block=None, scale=ScaleDtype.F32, tensor_scale=None)
    return q._replace(scheme=scheme, scales=one, tensor_scale=None)


def put_scaled(sums: torch.Tensor, a: QTensor | None, b: QTensor | None, y: torch.Tensor) -> None:
    """Sums, more columns than ``y`` or as many, times the scales of the lines of a and b."""
    m, n = y.shape
    sides = [_Scales() if side is None else _scales_of(side) for side in (a, b)]
    scale_kernel[(m, -(-n // 1024))](
        sums,
        *(side.numbers for side in sides),
        *(side.whole for side in sides),
        y,
        n,
        sums.stride(0),
        y.stride(0),
        *(side.step for side in sides),
        A_KIND=sides[0].kind,
        B_KIND=sides[1].kind,
        TILE=1024,
    )


class _Scales(NamedTuple):
    """Those of lines along k: numbers, how they are stored, one apart or none; and that of all."""

    numbers: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    step: int = 0
    kind: int = 0


def _scales_of(q: QTensor) -> _Scales:
    numbers, kind = q.scales.contiguous(), decode.scale_kind(q.scheme)
    return _Scales(numbers, q.tensor_scale, int(q.scales.shape[0] > 1), kind)


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
