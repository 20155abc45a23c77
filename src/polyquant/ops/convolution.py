"""Two-dimensional convolution: slices of the input side by side, then one product of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from polyquant.arrays import Array, backend_of, place
from polyquant.data import is_whole
from polyquant.errors import InvalidArgument, ShapeMismatch
from polyquant.ops.operands import check_array, enter
from polyquant.ops.table import Kind, finish, row

__all__ = ["conv2d"]

_LAYOUT = "x is (N, C, H, W) and the weight (O, C / groups, kernel height, kernel width)"
Pair = tuple[int, int]


class Window(NamedTuple):
    """How the kernel goes over the input: a number for rows and one for columns each."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


@row(Kind.FLOAT)
def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Array:
    """The convolution of ``x`` (N, C, H, W) with ``weight`` (O, C / groups, kh, kw), plus ``bias``.

    Either or both may be quantized; ``bias`` is of shape (O,). Stride, padding (with zeros) and
    dilation are numbers, or pairs for rows and columns. Accumulated in float32 or better.
    """
    roles = (("x", x), ("weight", weight), ("bias", bias))
    for role, operand in roles:
        check_array(role, operand)
    by = window(stride, padding, dilation, groups)
    entered = enter("conv2d", roles, sums=True)
    size = output_size(x.shape, weight.shape, by, bias)
    values, kernel, added = entered.values()
    result = convolve(entered.xp, values, kernel, by, size)
    if added is not None:
        result = result + entered.xp.reshape(added, (-1, 1, 1))
    return finish(entered, result, product=True)


def window(stride: Any, padding: Any, dilation: Any, groups: Any) -> Window:
    """The arguments, checked; a number stands for two. Raises InvalidArgument."""
    if not is_whole(groups) or groups < 1:
        raise InvalidArgument(name="groups", wanted="a whole number of at least 1", got=groups)
    pairs = (
        _pair("stride", stride, 1),
        _pair("padding", padding, 0),
        _pair("dilation", dilation, 1),
    )
    return Window(*pairs, int(groups))


def _pair(name: str, given: Any, least: int) -> Pair:
    both = given if isinstance(given, Sequence) and not isinstance(given, str) else (given, given)
    if len(both) != 2 or not all(is_whole(n) and n >= least for n in both):
        wanted = f"a whole number of at least {least}, or a pair of them (rows, columns)"
        raise InvalidArgument(name=name, wanted=wanted, got=given)
    return int(both[0]), int(both[1])


def output_size(x: Sequence[int], weight: Sequence[int], by: Window, bias: Any) -> Pair:
    """Rows and columns of the result. Raises ShapeMismatch."""
    reason, size = None, (0, 0)
    if len(x) != 4 or len(weight) != 4:
        reason = _LAYOUT
    elif x[1] != weight[1] * by.groups or weight[0] % by.groups:
        reason = f"with groups={by.groups}, {_LAYOUT}, and O is divisible by groups"
    elif bias is not None and tuple(bias.shape) != (weight[0],):
        reason = f"the bias must be of shape ({weight[0]},), not {tuple(bias.shape)}"
    else:
        ends = [n + 2 * p - d * (k - 1) - 1 for n, k, p, d in _rows_and_columns(x, weight, by)]
        size = (ends[0] // by.stride[0] + 1, ends[1] // by.stride[1] + 1)
        if min(ends) < 0 or 0 in weight[2:]:
            reason = "the kernel must have elements and fit into the padded input"
    if reason is not None:
        raise ShapeMismatch(op="conv2d", left=tuple(x), right=tuple(weight), reason=reason)
    return size


def _rows_and_columns(x: Sequence[int], weight: Sequence[int], by: Window) -> Any:
    return zip(x[2:], weight[2:], by.padding, by.dilation, strict=True)


def convolve(xp: Any, x: Array, weight: Array, by: Window, size: Pair) -> Array:
    """The convolution of checked operands of one dtype, which is also that of the sums."""
    (batch, channels), (out, _, height, width) = x.shape[:2], weight.shape
    x = _padded(xp, _padded(xp, x, 2, by.padding[0]), 3, by.padding[1])
    seen = [
        x[
            :,
            :,
            _every(row * by.dilation[0], 0, by, size),
            _every(column * by.dilation[1], 1, by, size),
        ]
        for row in range(height)
        for column in range(width)
    ]
    patches = xp.stack(seen, axis=2)  # (N, C, kernel, rows, columns)
    inner = channels // by.groups * height * width
    patches = xp.reshape(patches, (batch, by.groups, inner, size[0] * size[1]))
    kernels = xp.reshape(weight, (by.groups, out // by.groups, inner))
    multiply = backend_of(x).functions.get("matmul", xp.matmul)
    return xp.reshape(multiply(kernels, patches), (batch, out, *size))


def _every(start: int, axis: int, by: Window, size: Pair) -> slice:
    """What one element of the kernel sees along rows (0) or columns (1)."""
    step = by.stride[axis]
    return slice(start, start + step * (size[axis] - 1) + 1, step)


def _padded(xp: Any, x: Array, axis: int, count: int) -> Array:
    if count == 0:
        return x
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    zeros = xp.zeros(shape, dtype=x.dtype, **place(x))
    return xp.concat([zeros, x, zeros], axis=axis)
