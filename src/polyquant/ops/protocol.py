"""Functions of the array libraries called on a QTensor, as operations."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from polyquant.arrays import BACKENDS, Call
from polyquant.dispatch import check_one_device
from polyquant.errors import ShapeMismatch, UnsupportedFunction
from polyquant.ops.products import linear, matmul
from polyquant.qtensor import QTensor

_PROTOCOL = "matmul, @, torch.nn.functional.linear"


def array_function(
    q: QTensor,
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    method: str = "__call__",
) -> Any:
    """A function of an array library called on a QTensor. Raises UnsupportedFunction."""
    call = _operation(function, q.device) if method == "__call__" else None
    if call is None:
        raise UnsupportedFunction(function=_called(function), known=_PROTOCOL)
    if call.op == "matmul" and not call.ranks and len(args) == 2 and not kwargs:  # the quick way
        return matmul(*args)
    options = {name: item for name, item in kwargs.items() if name != "out" or item is not None}
    given = dict(zip(call.parameters, args, strict=False)) | options
    unknown = sorted(set(given) - set(call.parameters))
    if unknown or len(args) > len(call.parameters):
        more = f"with {', '.join(unknown)}=" if unknown else f"of {len(args)} operands"
        raise UnsupportedFunction(function=f"{_called(function)} {more}", known=_PROTOCOL)
    if call.op == "linear":
        return linear(given["input"], given["weight"], given.get("bias"))
    left, right = (given[name] for name in call.parameters)
    _check_ranks(_called(function), call, left, right)
    return matmul(right, left) if call.op == "rmatmul" else matmul(left, right)


def _called(function: Any) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}.{getattr(function, '__name__', function)}"


def _check_ranks(called: str, call: Call, left: Any, right: Any) -> None:
    """Refuse operands that the library's function itself would refuse, or multiply otherwise."""
    if not call.ranks:
        return
    check_one_device(called, (("the left operand", left), ("the right operand", right)))
    shapes = (tuple(left.shape), tuple(right.shape))
    for side, shape, ranks in zip(("left", "right"), shapes, call.ranks, strict=True):
        if len(shape) not in ranks:
            axes = " or ".join(map(str, ranks)) if len(ranks) < 3 else "1 or more"
            reason = f"its {side} operand has {axes} axes here; matmul takes any number"
            raise ShapeMismatch(op=called, left=shapes[0], right=shapes[1], reason=reason)


@lru_cache(maxsize=1024)
def _operation(function: Hashable, device: str) -> Call | None:
    """What a function of NumPy or of the device's own library computes, where that is known."""
    for name in dict.fromkeys(("numpy", device.partition(":")[0])):
        if name in BACKENDS:
            found: Call | None = import_module(BACKENDS[name]).array_function(function)
            if found is not None:
                return found
    return None
