"""The kernels for operands that torch watches: tracked, traced or batched. They call custom ops.

Autograd, torch.func, tracers and tensor subclasses then see one op and its rules (``library``),
not the arithmetic of the definition. Autocast does not reach into an op: operands enter as given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyquant.kernel import Kernel, Problem
from polyquant.ops import quantize
from polyquant.qtensor import QTensor
from polyquant.torch import library  # noqa: F401  (registers the ops)
from polyquant.torch.operands import operand_of, product


def _why_not(problem: Problem) -> str | None:
    if problem.transformed:
        return None
    return "the operands are plain: nothing to differentiate, trace or batch"


def multiply(a: Any, b: Any, dtype: torch.dtype) -> Tensor:
    """``a @ b``, rounded to ``dtype``."""
    return product(operand_of(a), operand_of(b), dtype)


def decode(q: QTensor, dtype: torch.dtype | None) -> Tensor:
    """The values of ``q``, by default float32."""
    return operand_of(q).values(dtype or torch.float32)


def multiply_and_add(x: Any, weight: Any, bias: Tensor | None, activations: Any) -> Tensor:
    """``x @ weight.mT + bias`` in the dtype of ``x`` (of the weight, where ``x`` is quantized)."""
    if isinstance(weight, QTensor) and not isinstance(x, QTensor):
        text = "" if activations is None else str(activations)
        made: Tensor = torch.ops.polyquant.linear(x, *operand_of(weight).arguments(), bias, text)
        return made
    kinds = [side.dtype for side in (x, weight) if not isinstance(side, QTensor)]
    native = torch.promote_types(*kinds) if len(kinds) == 2 else (*kinds, torch.float32)[0]
    left = operand_of(x if activations is None else quantize(x, activations))
    if bias is None:
        return product(left, operand_of(weight).mT, native)
    wide = torch.promote_types(native, torch.float32)
    return (product(left, operand_of(weight).mT, wide) + bias.to(wide)).to(native)


KERNELS = (
    Kernel("torch.transforms.matmul", "matmul", _why_not, multiply, takes_extras=True),
    Kernel("torch.transforms.linear", "linear", _why_not, multiply_and_add, takes_extras=True),
    Kernel("torch.transforms.dequantize", "dequantize", _why_not, decode, takes_extras=True),
)
