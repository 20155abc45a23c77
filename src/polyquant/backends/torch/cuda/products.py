"""Products by cuBLAS of operands that Triton dequantizes first, tile by tile where they are large.

For every scheme, rank and order of axes. A quantized operand enters in the dtype of the float one;
two of them in float32, or in bfloat16 where the result is; sums are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

from polyquant import views
from polyquant.backends.nvidia.schemes import MOST_BYTES
from polyquant.backends.torch.cuda import decode
from polyquant.qtensor import QTensor

_TURN = RLock()


def matmul(a: Any, b: Any, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b``, either or both quantized, rounded to ``dtype``."""
    floats = [side for side in (a, b) if not isinstance(side, QTensor)]
    return _matmul(a, b, dtype, floats[0].dtype if floats else torch.float32)


def matmul_bf16(a: QTensor, b: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """The same of two quantized operands whose values enter in bfloat16."""
    return _matmul(a, b, dtype, torch.bfloat16)


def _matmul(a: Any, b: Any, dtype: torch.dtype, entering: torch.dtype) -> torch.Tensor:
    with _precise():
        if isinstance(b, QTensor) and b.ndim == 2 and _is_large(b, entering):
            left = decode.dequantize(a, entering) if isinstance(a, QTensor) else a
            return _by_tiles(left, b, dtype)
        if isinstance(a, QTensor) and a.ndim == 2 and _is_large(a, entering):
            right = decode.dequantize(b, entering) if isinstance(b, QTensor) else b
            if right.ndim == 2:
                return _by_tiles(right.mT, a.mT, dtype).mT
        left, right = (
            decode.dequantize(s, entering) if isinstance(s, QTensor) else s for s in (a, b)
        )
        return _multiply(left, right, dtype)


def _is_large(q: QTensor, entering: torch.dtype) -> bool:
    return q.size * int(entering.itemsize) > MOST_BYTES


@contextmanager
def _precise() -> Iterator[None]:
    """float32 products without TF32, whatever the program asked of torch for its own.

    That is one setting of all threads: another one of ours would end it too early, or keep it.
    """
    with _TURN:
        asked = torch.get_float32_matmul_precision()
        if asked == "highest":
            yield
            return
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(asked)


def _by_tiles(x: torch.Tensor, weight: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """``x @ weight`` in tiles of whole lines of codes: columns of the result, or terms of it."""
    lines = weight.stored_shape[0]
    step = max(1, MOST_BYTES // (weight.stored_shape[1] * x.dtype.itemsize))
    height = weight.scheme.block_extents(weight.stored_shape)[0]
    step = lines if height > step else step // height * height
    along = weight.axes.index(0)
    if along == 1:
        y = torch.empty((*x.shape[:-1], lines), dtype=dtype, device=x.device)
        for start in range(0, lines, step):
            part = slice(start, min(start + step, lines))
            tile = views.narrow(weight, 1, start, part.stop - start)
            y[..., part] = _multiply(x, decode.dequantize(tile, x.dtype), dtype)
        return y
    total = torch.zeros((*x.shape[:-1], weight.shape[1]), dtype=torch.float32, device=x.device)
    for start in range(0, lines, step):
        size = min(step, lines - start)
        tile = decode.dequantize(views.narrow(weight, 0, start, size), x.dtype)
        total += _multiply(x[..., start : start + size], tile, torch.float32)
    return total.to(dtype)


def _multiply(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b`` rounded once to ``dtype``."""
    if dtype == a.dtype:
        return torch.matmul(a, b)
    if b.ndim == 2 and a.dtype.itemsize == 2 and dtype == torch.float32 and a.is_cuda:
        lines = torch.mm(a.reshape(-1, a.shape[-1]), b, out_dtype=dtype)
        return lines.reshape(*a.shape[:-1], b.shape[-1])
    return torch.matmul(a.to(torch.float32), b.to(torch.float32)).to(dtype)
