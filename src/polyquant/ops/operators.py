"""What Python asks of a tensor by itself: its operators, and the number of a tensor of one."""

from __future__ import annotations

from typing import Any

from polyquant.arrays import namespace
from polyquant.errors import InvalidArgument
from polyquant.ops import compute
from polyquant.ops.operands import is_operand
from polyquant.qtensor import QTensor


def operator(name: str, a: Any, b: Any) -> Any:
    """The op of a Python operator; what no operand can be is left to Python."""
    if not is_operand(a) or not is_operand(b):
        return NotImplemented
    return getattr(compute, name)(a, b)


def single(q: QTensor, asked: str) -> Any:
    """The only number of a tensor, as an array without axes. Raises InvalidArgument."""
    if q.size != 1:
        wanted = "of one element (of more, ask pq.ops.any or pq.ops.all)"
        raise InvalidArgument(name=f"the tensor of {asked}", wanted=wanted, got=q.shape)
    values = q.dequantize()
    return namespace(values).reshape(values, ())
