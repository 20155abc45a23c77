"""The operations as PyTorch sees them: custom ops that autograd, compile, export and vmap know.

A quantized operand goes in as the list of its stored arrays, the text of its scheme, its shape and
its order of axes, so that every scheme flows through the same ops. Backward passes are made of
these ops again: they keep the parts and decode once more, never the dequantized weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyquant.data import parts as stored_parts
from polyquant.dispatch import check_one_device
from polyquant.errors import LayoutRefused, UnsupportedFunction
from polyquant.ops.conversion import decode, decode_rows, quantize_plain
from polyquant.ops.operands import index_beside
from polyquant.ops.products import check_linear, check_operands, multiply, multiply_and_add
from polyquant.scheme import scheme as as_scheme
from polyquant.torch import batches
from polyquant.torch.gradients import part_gradients, straight_through
from polyquant.torch.operands import (
    Operand,
    exact,
    left_gradient,
    parts_of,
    product,
    product_shape,
    right_gradient,
)
from polyquant.torch.registration import register, register_batches

# Every op is three or four functions and one line of ``register``: what it computes, what it looks
# like (_like_...), what its derivative keeps (_keep_...), and the derivative (_back_...).

# -- dequantize -------------------------------------------------------------------------------


def _dequantize(
    parts: Sequence[Tensor],
    scheme: str,
    shape: Sequence[int],
    axes: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """The values of a quantized tensor."""
    made: Tensor = decode(Operand(parts, scheme, shape, axes).tensor(), dtype)
    return made


def _like_values(parts: Any, scheme: Any, shape: Any, axes: Any, dtype: Any) -> Tensor:
    stored = Operand(parts, scheme, shape, axes).stored_shape
    made: Tensor = parts[0].new_empty(stored, dtype=dtype).permute(tuple(axes))
    return made


def _keep_parts(ctx: Any, arguments: Any, result: Any) -> None:
    parts, *ctx.description, _ = arguments
    ctx.save_for_backward(*parts)


def _back_dequantize(ctx: Any, grad: Tensor) -> Any:
    q = Operand(ctx.saved_tensors, *ctx.description)
    return *q.gradients(grad, ctx.needs[0]), None


register("dequantize", _dequantize, _like_values, _keep_parts, _back_dequantize)


def _dequantize_backward(
    grad: Tensor,
    parts: Sequence[Tensor],
    scheme: str,
    shape: Sequence[int],
    axes: Sequence[int],
    wanted: Sequence[int],
) -> list[Tensor]:
    """Gradients of the parts ``wanted`` (by index) from that of the values, in compiled code."""
    return part_gradients(Operand(parts, scheme, shape, axes).tensor(), grad, wanted)


def _like_parts(grad: Any, parts: Any, scheme: Any, shape: Any, axes: Any, wanted: Any) -> Any:
    return [torch.empty_like(parts[i]) for i in wanted]


def _keep_nothing(ctx: Any, arguments: Any, result: Any) -> None:
    return None


def _back_refused(ctx: Any, grads: Any) -> Any:
    known = "first derivatives in compiled code; second ones of scales, offsets and tables outside"
    raise UnsupportedFunction(function="The second derivative of dequantize", known=known)


register("dequantize_backward", _dequantize_backward, _like_parts, _keep_nothing, _back_refused)

# -- products ---------------------------------------------------------------------------------


def _matmul(
    a: Sequence[Tensor],
    a_scheme: str,
    a_shape: Sequence[int],
    a_axes: Sequence[int],
    b: Sequence[Tensor],
    b_scheme: str,
    b_shape: Sequence[int],
    b_axes: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """``a @ b``, rounded to ``dtype``. A float operand is a list of itself with the scheme ""."""
    left = Operand(a, a_scheme, a_shape, a_axes).tensor()
    right = Operand(b, b_scheme, b_shape, b_axes).tensor()
    check_operands(left, right)
    with exact(a[0]):
        made: Tensor = multiply(left, right, dtype).contiguous()
        return made


def _like_product(
    a: Any, a1: Any, a2: Any, a3: Any, b: Any, b1: Any, b2: Any, b3: Any, dtype: Any
) -> Tensor:
    left, right = Operand(a, a1, a2, a3), Operand(b, b1, b2, b3)
    check_operands(left.tensor(), right.tensor())
    made: Tensor = a[0].new_empty(product_shape(left.extents, right.extents), dtype=dtype)
    return made


def _keep_operands(ctx: Any, arguments: Any, result: Any) -> None:
    a, b = Operand(*arguments[:4]), Operand(*arguments[4:8])
    ctx.descriptions = a[1:], b[1:]
    ctx.extents = tuple(a.extents), tuple(b.extents)
    ctx.dtypes = [x.parts[0].dtype if not x.scheme else torch.float32 for x in (a, b)]
    # A float operand is needed for the gradient of the other one alone.
    kept = [x.parts if x.scheme or _is_tracked(y.parts) else [] for x, y in ((a, b), (b, a))]
    ctx.count = len(kept[0])
    ctx.save_for_backward(*kept[0], *kept[1])


def _is_tracked(parts: Sequence[Tensor]) -> bool:
    return any(part.requires_grad for part in parts)


def _back_matmul(ctx: Any, grad: Tensor) -> Any:
    saved = ctx.saved_tensors
    a = Operand(saved[: ctx.count], *ctx.descriptions[0])
    b = Operand(saved[ctx.count :], *ctx.descriptions[1])
    needs_a, needs_b = ctx.needs[0], ctx.needs[4]
    of_a = of_b = None
    if any(needs_a):
        of_a = left_gradient(grad, ctx.extents[0], b, _gradient_dtype(ctx.dtypes[0], grad))
    if any(needs_b):
        of_b = right_gradient(grad, a, ctx.extents[1], _gradient_dtype(ctx.dtypes[1], grad))
    return *a.gradients(of_a, needs_a), *b.gradients(of_b, needs_b), None


def _gradient_dtype(dtype: torch.dtype, grad: Tensor) -> torch.dtype:
    """A float operand's own dtype (float32 stands for a quantized one); float64 stays so."""
    return torch.float64 if grad.dtype == torch.float64 else dtype


register("matmul", _matmul, _like_product, _keep_operands, _back_matmul)


def _linear(
    x: Tensor,
    parts: Sequence[Tensor],
    scheme: str,
    shape: Sequence[int],
    axes: Sequence[int],
    bias: Tensor | None,
    activations: str,
) -> Tensor:
    """``x @ weight.mT + bias`` in the dtype of ``x``; ``activations`` is a scheme or ""."""
    weight = Operand(parts, scheme, shape, axes).tensor()
    check_linear(x, weight, bias)
    with exact(x):
        made: Tensor = multiply_and_add(x.detach(), weight, bias, activations or None)
        return made.detach().contiguous()


def _like_linear(
    x: Any, parts: Any, scheme: Any, shape: Any, axes: Any, bias: Any, activations: Any
) -> Tensor:
    check_linear(x, Operand(parts, scheme, shape, axes).tensor(), bias)
    made: Tensor = x.new_empty((*x.shape[:-1], shape[0]))
    return made


def _keep_linear(ctx: Any, arguments: Any, result: Any) -> None:
    x, parts, *ctx.description, bias, ctx.activations = arguments
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(*parts, *([x] if _is_tracked(parts) else []))


def _back_linear(ctx: Any, grad: Tensor) -> Any:
    needs_x, needs_parts, needs_bias = (ctx.needs[i] for i in (0, 1, 5))
    count = len(needs_parts)
    weight = Operand(ctx.saved_tensors[:count], *ctx.description)
    wide = _gradient_dtype(torch.float32, grad)
    of_x = of_weight = of_bias = None
    if needs_x:
        of_x = product(Operand([grad]), weight, ctx.x_dtype)
    lines = grad.reshape(-1, grad.shape[-1])
    if any(needs_parts):
        entering = _entering(ctx.saved_tensors[count], ctx.activations)
        of_weight = product(Operand([lines.mT]), entering, wide)
    if needs_bias:
        of_bias = lines.sum(0, dtype=wide).to(ctx.bias_dtype)
    return of_x, *weight.gradients(of_weight, needs_parts), of_bias, None


def _entering(x: Tensor, activations: str) -> Operand:
    """What entered the product, as lines: ``x``, or what was quantized of it."""
    lines = x.reshape(-1, x.shape[-1])
    if not activations:
        return Operand([lines])
    parts = torch.ops.polyquant.quantize(x.detach(), activations, *MINMAX)
    values = Operand(parts, activations, x.shape, range(x.ndim)).values(x.dtype)
    return Operand([values.reshape(lines.shape)])


register("linear", _linear, _like_linear, _keep_linear, _back_linear)

# -- quantize and look up ---------------------------------------------------------------------

#: The options of the op "quantize" by default.
MINMAX = ("minmax", None, None, None, None, "", "")


def _quantize(
    x: Tensor,
    scheme: str,
    calibration: str,
    scales: Tensor | None,
    tensor_scale: Tensor | None,
    offsets: Tensor | None,
    table: Tensor | None,
    fitted: str,
    nonfinite: str,
) -> list[Tensor]:
    """The stored arrays of ``x`` quantized. ``fitted`` is "kmeans" or "". Nothing is tracked.

    ``nonfinite`` may be "": "raise", but where values cannot be looked at "saturate".
    """
    given = scales if tensor_scale is None else (scales, tensor_scale)
    options = (calibration, given, offsets, fitted or table, nonfinite or None)
    with exact(x):
        q = quantize_plain(x.detach(), scheme, *options)
    return [_new(part, (x, scales, tensor_scale, offsets, table)) for part in parts_of(q)]


def _new(part: Tensor, given: Sequence[Tensor | None]) -> Tensor:
    """A result that shares no memory with what was given, and is not tracked."""
    places = {x.untyped_storage().data_ptr() for x in given if x is not None}
    part = part.detach()
    return torch.clone(part) if part.untyped_storage().data_ptr() in places else part


def _like_quantized(x: Any, scheme: Any, *options: Any) -> Any:
    return [
        x.new_empty(part.shape, dtype=getattr(torch, part.dtype))
        for part in stored_parts(as_scheme(scheme), tuple(x.shape))
    ]


def _keep_untracked(ctx: Any, arguments: Any, result: Any) -> None:
    ctx.mark_non_differentiable(*result)


def _back_nothing(ctx: Any, *grads: Any) -> Any:
    return (None,) * 9


register("quantize", _quantize, _like_quantized, _keep_untracked, _back_nothing)


def _straight_through(
    x: Tensor,
    parts: Sequence[Tensor],
    scheme: str,
    shape: Sequence[int],
    axes: Sequence[int],
    scales: Tensor | None,
    offsets: Tensor | None,
    table: Tensor | None,
    factor: float,
) -> Tensor:
    """The values of ``parts``, which ``x`` was quantized to; the rest is there for gradients."""
    return _dequantize(parts, scheme, shape, axes, x.dtype).contiguous()


def _like_input(x: Any, *others: Any) -> Tensor:
    made: Tensor = x.new_empty(x.shape)
    return made


def _keep_input(ctx: Any, arguments: Any, result: Any) -> None:
    x, parts, *ctx.description, scales, offsets, table, ctx.factor = arguments
    ctx.like = [
        None if each is None else (each.shape, each.dtype) for each in (scales, offsets, table)
    ]
    ctx.save_for_backward(x.detach(), *parts)


def _back_straight_through(ctx: Any, grad: Tensor) -> Any:
    x, *parts = ctx.saved_tensors
    q = Operand(parts, *ctx.description)
    of_x, *others = torch.ops.polyquant.straight_through_backward(grad, x, *q.arguments())
    others[0] = others[0] * ctx.factor
    found = [
        None if like is None else gradient.reshape(like[0]).to(like[1])
        for gradient, like in zip(others, ctx.like, strict=True)
    ]
    return of_x, None, None, None, None, *found, None


register("straight_through", _straight_through, _like_input, _keep_input, _back_straight_through)


def _straight_through_backward(
    grad: Tensor,
    x: Tensor,
    parts: Sequence[Tensor],
    scheme: str,
    shape: Sequence[int],
    axes: Sequence[int],
) -> list[Tensor]:
    """Gradients of ``x`` and, on the grid, of scales and offsets; of the table."""
    return list(straight_through(Operand(parts, scheme, shape, axes).tensor(), x, grad))


def _like_straight(grad: Any, x: Any, parts: Any, scheme: Any, shape: Any, axes: Any) -> Any:
    made = as_scheme(scheme)
    wide = torch.promote_types(grad.dtype, torch.float32)
    grid = made.scale_shape(tuple(shape))
    sizes = (grid, grid, (2**made.bits,))
    return [x.new_empty(x.shape), *(x.new_empty(size, dtype=wide) for size in sizes)]


register(
    "straight_through_backward",
    _straight_through_backward,
    _like_straight,
    _keep_nothing,
    _back_refused,
)


def _embedding(
    indices: Tensor,
    parts: Sequence[Tensor],
    scheme: str,
    shape: Sequence[int],
    axes: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Rows of a quantized (rows, columns) table, dequantized to ``dtype``."""
    weight = Operand(parts, scheme, shape, axes).tensor()
    rows = index_beside(weight, indices, 0, least=0)
    try:
        made: Tensor = decode_rows(rows, weight, dtype)
    except LayoutRefused:  # blocks that no choice of rows leaves whole
        made = decode(weight, dtype)[rows]
    return made.contiguous()


def _like_rows(indices: Any, parts: Any, scheme: Any, shape: Any, axes: Any, dtype: Any) -> Tensor:
    weight = Operand(parts, scheme, shape, axes).tensor()
    check_one_device("embedding", (("indices", indices), ("weight", weight)))
    made: Tensor = parts[0].new_empty((*indices.shape, shape[1]), dtype=dtype)
    return made


def _keep_embedding(ctx: Any, arguments: Any, result: Any) -> None:
    indices, parts, *ctx.description, _ = arguments
    ctx.save_for_backward(indices, *parts)


def _back_embedding(ctx: Any, grad: Tensor) -> Any:
    indices, *parts = ctx.saved_tensors
    weight = Operand(parts, *ctx.description)
    of_weight = None
    if any(ctx.needs[1]):
        lines = grad.reshape(-1, grad.shape[-1]).to(_gradient_dtype(torch.float32, grad))
        zeros = lines.new_zeros(tuple(weight.shape))
        of_weight = zeros.index_add(0, indices.reshape(-1), lines)
    return None, *weight.gradients(of_weight, ctx.needs[1]), None


register("embedding", _embedding, _like_rows, _keep_embedding, _back_embedding)

for _name, _rule in batches.RULES.items():
    register_batches(_name, _rule)
