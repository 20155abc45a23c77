"""The operations as torch.compile and torch.export read them: custom ops, and little besides.

What runs here is read, not run: it may ask for shapes, dtypes and schemes, never for numbers, and
it must be Python that torch.compile knows. Checks are made where the ops are faked (``library``).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from polyquant.backends.torch.functions import FUNCTIONS, name_of
from polyquant.calls import Call
from polyquant.errors import InvalidArgument, UnsupportedFunction
from polyquant.qtensor import QTensor
from polyquant.scheme import Offset, OffsetKind, QuantScheme
from polyquant.scheme import scheme as as_scheme
from polyquant.torch import transforms
from polyquant.torch.operands import operand_of, tensor_of
from polyquant.values import QuantMode, QuantStore, QuantValue, ScaleDtype, ScaleRole

_OPS = ("matmul", "linear", "embedding")
_KNOWN = f"{', '.join(_OPS)}, q.dequantize(), pq.quantize, QLinear and QEmbedding"


def _scheme_of(text: str) -> QuantScheme:
    """The scheme of a text. torch.compile can call the methods of an object that it saw made."""
    made = QuantScheme.__new__(QuantScheme)
    for name, kind, found in _fields_of(text):
        object.__setattr__(made, name, _value_of(kind, found))
    return made


@torch.compiler.assume_constant_result
def _fields_of(text: str) -> tuple[tuple[str, str, Any], ...]:
    """Name, kind and plain value of every field of a scheme."""
    scheme = as_scheme(text)
    names = [field.name for field in fields(scheme)]
    return tuple((name, *_plain(getattr(scheme, name))) for name in names)


def _plain(value: Any) -> tuple[str, Any]:
    if isinstance(value, Offset):
        return "Offset", (str(value.kind), *_plain(value.dtype))
    if isinstance(value, QuantScheme):
        return "QuantScheme", str(value)
    return (type(value).__name__, str(value)) if isinstance(value, StrEnum) else ("", value)


def _value_of(kind: str, plain: Any) -> Any:
    if kind == "QuantScheme":
        return _scheme_of(plain)
    if kind == "Offset":
        name, kind_of_dtype, dtype = plain
        return Offset(_MEMBERS["OffsetKind"][name], _value_of(kind_of_dtype, dtype))
    return _MEMBERS[kind][plain] if kind else plain


#: Members by enum and name: torch.compile cannot call an enum under every Python.
_MEMBERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        kind.__name__: MappingProxyType({str(member): member for member in kind})
        for kind in (QuantValue, QuantMode, QuantStore, ScaleDtype, ScaleRole, OffsetKind)
    }
)


def array_function(function: Any, args: Any, kwargs: Any) -> Any:
    """A function of torch's that was called with a QTensor: products and embedding."""
    op, names = _operation_of(function)
    given = dict(zip(names, args, strict=False))
    given.update(kwargs)
    if op == "linear":
        return linear(given["input"], given["weight"], given.get("bias"), None)
    if op == "embedding":
        weight = operand_of(given["weight"]).arguments()
        return torch.ops.polyquant.embedding(given["input"], *weight, torch.float32)
    left, right = given[names[0]], given[names[1]]
    if op == "rmatmul":
        left, right = right, left
    elif function is torch.Tensor.matmul and isinstance(right, QTensor):
        _check_order(left.shape, right.shape)
    return matmul(left, right, None, None)


def _check_order(x: Any, q: Any) -> None:
    """Refuse ``x @ q`` where ``q @ x`` is a product too: torch.compile hands both over alike."""
    rows = x[-2] if len(x) > 1 else x[-1]
    if q[-1] == rows:
        function = f"In compiled code `@` between shapes {tuple(x)} and {tuple(q)}, of which"
        function += " torch.compile does not say which stands on the left,"
        raise UnsupportedFunction(function=function, known="pq.matmul(a, b), torch.matmul(a, b)")


@torch.compiler.assume_constant_result
def _operation_of(function: Any) -> tuple[str, tuple[str, ...]]:
    """The operation that a function of torch's is, and the names of its parameters."""
    # Python's operator is seen as such, where a QTensor stands on its left.
    call = FUNCTIONS.get(torch.matmul if function is operator.matmul else function)
    if not isinstance(call, Call) or call.op not in _OPS:
        raise UnsupportedFunction(function=f"In compiled code {name_of(function)}", known=_KNOWN)
    names = [parameter.theirs for parameter in call.parameters if parameter.rule != "!"]
    is_mirrored = call.op == "matmul" and call.parameters[0].ours == "b"
    return "rmatmul" if is_mirrored else call.op, tuple(names)


def matmul(a: Any, b: Any, out_dtype: Any, kernel: Any) -> Tensor:
    """pq.matmul."""
    _check_kernel(kernel)
    return transforms.multiply(a, b, _native(out_dtype) or _result_dtype(a, b))


def linear(x: Any, weight: Any, bias: Any, activations: Any) -> Tensor:
    """pq.linear."""
    return transforms.multiply_and_add(x, weight, bias, activations)


def dequantize(q: QTensor, kind: Any) -> Tensor:
    """QTensor.dequantize."""
    return transforms.decode(q, _native(kind))


def quantize(
    x: Any,
    scheme: QuantScheme | str,
    calibration: str,
    scales: Any,
    offsets: Any,
    table: Any,
    nonfinite: str | None,
    kernel: Any,
) -> QTensor:
    """pq.quantize."""
    _check_kernel(kernel)
    made = scheme if isinstance(scheme, QuantScheme) else _scheme_of(scheme)
    block, whole = scales if isinstance(scales, tuple) else (scales, None)
    fitted = table if isinstance(table, str) else ""
    numbers = [_beside(x, given) for given in (block, whole, offsets, None if fitted else table)]
    parts = torch.ops.polyquant.quantize(
        x.detach(), str(made), calibration, *numbers, fitted, nonfinite or ""
    )
    return tensor_of(parts, made, x.shape, range(x.ndim))


def _check_kernel(kernel: Any) -> None:
    if kernel is not None:
        raise InvalidArgument(name="kernel", wanted="None in compiled code", got=kernel)


def _beside(x: Tensor, given: Any) -> Tensor | None:
    if given is None or isinstance(given, Tensor):
        return given
    return torch.as_tensor(given, dtype=torch.float32, device=x.device)


def _native(kind: Any) -> torch.dtype | None:
    return getattr(torch, kind) if isinstance(kind, str) else kind


def _result_dtype(a: Any, b: Any) -> torch.dtype:
    kinds = [side.dtype for side in (a, b) if not isinstance(side, QTensor)]
    return torch.promote_types(*kinds) if len(kinds) == 2 else (*kinds, torch.float32)[0]
