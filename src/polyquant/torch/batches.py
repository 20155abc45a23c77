"""torch.vmap over the ops: a batch of float operands is a leading axis, which products have anyway.

Where that is not so (batched scales or tables; a quantization of ``x`` that could see the batch),
the op runs once for each of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from polyquant.torch.operands import Operand, product


def _looped(name: str) -> Callable[..., Any]:
    """One call for each of the batch."""

    def rule(info: Any, dims: Any, *arguments: Any) -> Any:
        op = getattr(torch.ops.polyquant, name)
        runs = [
            op(*(_one(x, dim, i) for x, dim in zip(arguments, dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(runs[0], Tensor):
            return torch.stack(runs), 0
        made = [torch.stack(each) for each in zip(*runs, strict=True)]
        return made, [0] * len(made)

    return rule


def _one(x: Any, dim: Any, i: int) -> Any:
    """An argument of one of the batch."""
    if isinstance(x, list | tuple) and isinstance(dim, list | tuple):
        return [_one(each, axis, i) for each, axis in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, i)


def _is_batched(dims: Any) -> bool:
    return any(dim is not None for dim in dims)


def _matmul(info: Any, dims: Any, *arguments: Any) -> Any:
    a, b, dtype = Operand(*arguments[:4]), Operand(*arguments[4:8]), arguments[8]
    if (a.scheme and _is_batched(dims[0])) or (b.scheme and _is_batched(dims[4])):
        return _looped("matmul")(info, dims, *arguments)
    is_left = not a.scheme
    x, other = (a, b) if is_left else (b, a)
    batch = x.parts[0].movedim((dims[0] if is_left else dims[4])[0], 0)
    is_vector = batch.ndim == 2
    if is_vector:
        batch = batch.unsqueeze(-2 if is_left else -1)
    missing = len(other.shape) - (batch.ndim - 1)
    if missing > 0:
        batch = batch.reshape(batch.shape[0], *[1] * missing, *batch.shape[1:])
    made = product(*((Operand([batch]), b) if is_left else (a, Operand([batch]))), dtype)
    if is_vector:
        made = made.squeeze(-1 if len(other.shape) == 1 or not is_left else -2)
    return made, 0


def _linear(info: Any, dims: Any, *arguments: Any) -> Any:
    x, *weight, bias, activations = arguments
    of_x, of_parts, of_bias = dims[0], dims[1], dims[5]
    if activations or of_x is None or of_bias is not None or _is_batched(of_parts):
        return _looped("linear")(info, dims, *arguments)
    return torch.ops.polyquant.linear(x.movedim(of_x, 0), *weight, bias, activations), 0


def _embedding(info: Any, dims: Any, indices: Any, *arguments: Any) -> Any:
    if dims[0] is None or _is_batched(dims[1]):
        return _looped("embedding")(info, dims, indices, *arguments)
    return torch.ops.polyquant.embedding(indices.movedim(dims[0], 0), *arguments), 0


#: Op -> its rule.
RULES = MappingProxyType(
    {
        "matmul": _matmul,
        "linear": _linear,
        "embedding": _embedding,
        "dequantize": _looped("dequantize"),
        "dequantize_backward": _looped("dequantize_backward"),
        "quantize": _looped("quantize"),
    }
)
