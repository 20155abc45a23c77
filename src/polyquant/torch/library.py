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
from torch.library import custom_op

from polyquant.data import parts as stored_parts
from polyquant.ops.conversion import decode, quantize_plain
from polyquant.ops.products import check_linear, check_operands, multiply, multiply_and_add
from polyquant.scheme import scheme as as_scheme
from polyquant.torch.gradients import part_gradients
from polyquant.torch.operands import (
    Operand,
    exact,
    left_gradient,
    parts_of,
    product,
    product_shape,
    right_gradient,
)

# -- dequantize -------------------------------------------------------------------------------


@custom_op("polyquant::dequantize", mutates_args=())
def dequantize(
    parts: Sequence[Tensor],
    scheme: str,
    shape: Sequence[int],
    axes: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """The values of a quantized tensor."""
    return decode(Operand(parts, scheme, shape, axes).tensor(), dtype)


@dequantize.register_fake
def _(parts: Any, scheme: Any, shape: Any, axes: Any, dtype: Any) -> Tensor:
    stored = Operand(parts, scheme, shape, axes).stored_shape
    made: Tensor = parts[0].new_empty(stored, dtype=dtype).permute(tuple(axes))
    return made


def _keep_parts(ctx: Any, inputs: Any, output: Any) -> None:
    parts, *ctx.description, _ = inputs
    ctx.save_for_backward(*parts)


def _dequantize_backward(ctx: Any, grad: Tensor) -> Any:
    weight = Operand(ctx.saved_tensors, *ctx.description)
    return *weight.gradients(grad, ctx.needs_input_grad[0]), None


dequantize.register_autograd(_dequantize_backward, setup_context=_keep_parts)


@custom_op("polyquant::dequantize_backward", mutates_args=())
def dequantize_backward(
    grad: Tensor,
    parts: Sequence[Tensor],
    scheme: str,
    shape: Sequence[int],
    axes: Sequence[int],
    wanted: Sequence[int],
) -> list[Tensor]:
    """Gradients of the parts ``wanted`` (by index) from that of the values."""
    return part_gradients(Operand(parts, scheme, shape, axes).tensor(), grad, wanted)


@dequantize_backward.register_fake
def _(grad: Any, parts: Any, scheme: Any, shape: Any, axes: Any, wanted: Any) -> Any:
    return [torch.empty_like(parts[i]) for i in wanted]


# -- products ---------------------------------------------------------------------------------


@custom_op("polyquant::matmul", mutates_args=())
def matmul(
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


@matmul.register_fake
def _(a: Any, a1: Any, a2: Any, a3: Any, b: Any, b1: Any, b2: Any, b3: Any, dtype: Any) -> Tensor:
    left, right = Operand(a, a1, a2, a3), Operand(b, b1, b2, b3)
    check_operands(left.tensor(), right.tensor())
    made: Tensor = a[0].new_empty(product_shape(left.extents, right.extents), dtype=dtype)
    return made


def _keep_operands(ctx: Any, inputs: Any, output: Any) -> None:
    a, b = Operand(*inputs[:4]), Operand(*inputs[4:8])
    ctx.descriptions = a[1:], b[1:]
    ctx.extents = a.extents, b.extents
    ctx.dtypes = [x.parts[0].dtype if not x.scheme else torch.float32 for x in (a, b)]
    # A float operand is needed for the gradient of the other one alone.
    kept = [x.parts if x.scheme or _is_tracked(y) else [] for x, y in ((a, b), (b, a))]
    ctx.count = len(kept[0])
    ctx.save_for_backward(*kept[0], *kept[1])


def _is_tracked(x: Operand) -> bool:
    return any(part.requires_grad for part in x.parts)


def _matmul_backward(ctx: Any, grad: Tensor) -> Any:
    saved = ctx.saved_tensors
    a = Operand(saved[: ctx.count], *ctx.descriptions[0])
    b = Operand(saved[ctx.count :], *ctx.descriptions[1])
    needs_a, needs_b = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
    of_a = of_b = None
    if any(needs_a):
        of_a = left_gradient(grad, ctx.extents[0], b, _gradient_dtype(ctx.dtypes[0], grad))
    if any(needs_b):
        of_b = right_gradient(grad, a, ctx.extents[1], _gradient_dtype(ctx.dtypes[1], grad))
    return *a.gradients(of_a, needs_a), *b.gradients(of_b, needs_b), None


def _gradient_dtype(dtype: torch.dtype, grad: Tensor) -> torch.dtype:
    """A float operand's own dtype (float32 stands for a quantized one); float64 stays so."""
    return torch.float64 if grad.dtype == torch.float64 else dtype


matmul.register_autograd(_matmul_backward, setup_context=_keep_operands)


@custom_op("polyquant::linear", mutates_args=())
def linear(
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
        made: Tensor = multiply_and_add(x.detach(), weight, bias, activations or None).contiguous()
        return made


@linear.register_fake
def _(
    x: Any, parts: Any, scheme: Any, shape: Any, axes: Any, bias: Any, activations: Any
) -> Tensor:
    check_linear(x, Operand(parts, scheme, shape, axes).tensor(), bias)
    made: Tensor = x.new_empty((*x.shape[:-1], shape[0]))
    return made


def _keep_linear(ctx: Any, inputs: Any, output: Any) -> None:
    x, parts, *ctx.description, bias, ctx.activations = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.x_dtype = x.dtype
    is_tracked = any(part.requires_grad for part in parts)
    ctx.save_for_backward(*parts, *([x] if is_tracked else []))


def _linear_backward(ctx: Any, grad: Tensor) -> Any:
    needs_x, needs_parts, needs_bias = (ctx.needs_input_grad[i] for i in (0, 1, 5))
    count = len(needs_parts)
    weight = Operand(ctx.saved_tensors[:count], *ctx.description)
    of_x = of_weight = of_bias = None
    if needs_x:
        of_x = product(Operand([grad]), weight, ctx.x_dtype)
    lines = grad.reshape(-1, grad.shape[-1])
    if any(needs_parts):
        entering = _entering(ctx.saved_tensors[count], ctx.activations)
        dtype = _gradient_dtype(torch.float32, grad)
        of_weight = product(Operand([lines.mT]), entering, dtype)
    if needs_bias:
        wide = _gradient_dtype(torch.float32, grad)
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


#: The options of the op "quantize" by default.
MINMAX = ("minmax", None, None, None, None, "", "raise")

linear.register_autograd(_linear_backward, setup_context=_keep_linear)


# -- quantize and look up ---------------------------------------------------------------------


@custom_op("polyquant::quantize", mutates_args=())
def quantize(
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
    """The stored arrays of ``x`` quantized. ``fitted`` is "kmeans" or "". Nothing is tracked."""
    given = scales if tensor_scale is None else (scales, tensor_scale)
    options = (calibration, given, offsets, fitted or table, nonfinite)
    with exact(x):
        q = quantize_plain(x.detach(), scheme, *options)
    return [_new(part, (x, scales, tensor_scale, offsets, table)) for part in parts_of(q)]


def _new(part: Tensor, given: Sequence[Tensor | None]) -> Tensor:
    """A result that shares no memory with what was given, which ops may not return."""
    places = {x.untyped_storage().data_ptr() for x in given if x is not None}
    return torch.clone(part) if part.untyped_storage().data_ptr() in places else part


@quantize.register_fake
def _(x: Any, scheme: Any, *options: Any) -> Any:
    return [
        x.new_empty(part.shape, dtype=getattr(torch, part.dtype))
        for part in stored_parts(as_scheme(scheme), tuple(x.shape))
    ]


def _track_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.mark_non_differentiable(*output)


def _no_gradient(ctx: Any, grads: Any) -> Any:
    return (None,) * 9


quantize.register_autograd(_no_gradient, setup_context=_track_nothing)


@custom_op("polyquant::embedding", mutates_args=())
def embedding(
    indices: Tensor,
    parts: Sequence[Tensor],
    scheme: str,
    shape: Sequence[int],
    axes: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Rows of a quantized (rows, columns) table, dequantized to ``dtype``."""
    weight = Operand(parts, scheme, shape, axes).tensor()
    return decode(weight, dtype)[indices].contiguous()


@embedding.register_fake
def _(indices: Any, parts: Any, scheme: Any, shape: Any, axes: Any, dtype: Any) -> Tensor:
    made: Tensor = parts[0].new_empty((*indices.shape, shape[1]), dtype=dtype)
    return made


def _keep_embedding(ctx: Any, inputs: Any, output: Any) -> None:
    indices, parts, *ctx.description, _ = inputs
    ctx.save_for_backward(indices, *parts)


def _embedding_backward(ctx: Any, grad: Tensor) -> Any:
    indices, *parts = ctx.saved_tensors
    weight = Operand(parts, *ctx.description)
    of_weight = None
    if any(ctx.needs_input_grad[1]):
        dtype = _gradient_dtype(torch.float32, grad)
        lines = grad.reshape(-1, grad.shape[-1]).to(dtype)
        zeros = lines.new_zeros(tuple(weight.shape))
        of_weight = zeros.index_add(0, indices.reshape(-1), lines)
    return None, *weight.gradients(of_weight, ctx.needs_input_grad[1]), None


embedding.register_autograd(_embedding_backward, setup_context=_keep_embedding)


# -- torch.vmap -------------------------------------------------------------------------------


def _looped(op: Any) -> Any:
    """One call for each of the batch: for what has no quicker rule, such as batched parts."""

    def rule(info: Any, dims: Any, *arguments: Any) -> Any:
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
    if isinstance(dim, list | tuple) and isinstance(x, list | tuple):
        return [_one(each, axis, i) for each, axis in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, i)


def _is_batched(dims: Any) -> bool:
    return any(dim is not None for dim in dims)


def _matmul_batched(info: Any, dims: Any, *arguments: Any) -> Any:
    """A batch of float operands becomes a leading axis, which a product has anyway."""
    a, b, dtype = Operand(*arguments[:4]), Operand(*arguments[4:8]), arguments[8]
    if (a.scheme and _is_batched(dims[0])) or (b.scheme and _is_batched(dims[4])):
        return _looped(torch.ops.polyquant.matmul)(info, dims, *arguments)
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


def _linear_batched(info: Any, dims: Any, *arguments: Any) -> Any:
    """A batch of ``x`` becomes a leading axis. Not where its quantization could see the axis."""
    x, *weight, bias, activations = arguments
    of_x, of_parts, of_bias = dims[0], dims[1], dims[5]
    if activations or of_x is None or of_bias is not None or _is_batched(of_parts):
        return _looped(torch.ops.polyquant.linear)(info, dims, *arguments)
    return torch.ops.polyquant.linear(x.movedim(of_x, 0), *weight, bias, activations), 0


def _embedding_batched(info: Any, dims: Any, indices: Any, *arguments: Any) -> Any:
    if dims[0] is None or _is_batched(dims[1]):
        return _looped(torch.ops.polyquant.embedding)(info, dims, indices, *arguments)
    return torch.ops.polyquant.embedding(indices.movedim(dims[0], 0), *arguments), 0


matmul.register_vmap(_matmul_batched)
linear.register_vmap(_linear_batched)
embedding.register_vmap(_embedding_batched)
dequantize.register_vmap(_looped(torch.ops.polyquant.dequantize))
dequantize_backward.register_vmap(_looped(torch.ops.polyquant.dequantize_backward))
quantize.register_vmap(_looped(torch.ops.polyquant.quantize))
