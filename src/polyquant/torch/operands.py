"""Operands in the form that custom ops take: stored arrays, a scheme's text, a shape, axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyquant.data import stored_shape
from polyquant.qtensor import QTensor, from_fields
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme
from polyquant.torch.gradients import part_gradients
from polyquant.values import QuantMode, ScaleDtype

_NOTHING = nullcontext()


class Operand(NamedTuple):
    """One operand of an op. A float array is a list of itself with the scheme ""."""

    parts: Sequence[Tensor]
    scheme: str = ""
    shape: Sequence[int] = ()
    axes: Sequence[int] = ()

    @property
    def extents(self) -> Sequence[int]:
        """The logical shape."""
        return self.shape if self.scheme else self.parts[0].shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the order in which codes are stored."""
        return stored_shape(self.shape, self.axes)

    @property
    def mT(self) -> Operand:
        """The last two axes exchanged."""
        if not self.scheme:
            return Operand([self.parts[0].mT])
        shape, axes = ([*s[:-2], s[-1], s[-2]] for s in (self.shape, self.axes))
        return self._replace(shape=shape, axes=axes)

    def tensor(self) -> Any:
        """The array, or the QTensor of these parts."""
        if not self.scheme:
            return self.parts[0]
        return tensor_of(self.parts, as_scheme(self.scheme), self.shape, self.axes)

    def arguments(self) -> tuple[list[Tensor], str, list[int], list[int]]:
        """These fields as an op takes them."""
        return list(self.parts), self.scheme, list(self.shape), list(self.axes)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The values as a float array, by the op that decodes."""
        if not self.scheme:
            return self.parts[0].to(dtype)
        made: Tensor = torch.ops.polyquant.dequantize(*self.arguments(), dtype)
        return made

    def gradients(self, of_values: Tensor | None, needed: Sequence[bool]) -> tuple[Any, ...]:
        """What a backward returns for this operand's four arguments."""
        found: list[Tensor | None] = [None] * len(self.parts)
        wanted = [i for i, is_needed in enumerate(needed) if is_needed]
        if of_values is None or not wanted:
            return found, None, None, None
        if not self.scheme:
            return [of_values], None, None, None
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            op = torch.ops.polyquant.dequantize_backward
            made = op(of_values, *self.arguments(), wanted)
        else:  # not an op, so that it has derivatives of its own
            with exact(of_values):
                made = part_gradients(self.tensor(), of_values, wanted)
        for i, gradient in zip(wanted, made, strict=True):
            found[i] = gradient
        return found, None, None, None


def operand_of(x: Tensor | QTensor) -> Operand:
    """A tensor or a QTensor in the form that the ops take."""
    if isinstance(x, QTensor):
        return Operand(parts_of(x), str(x.scheme), list(x.shape), list(x.axes))
    return Operand([x])


def parts_of(q: QTensor) -> list[Tensor]:
    """The stored arrays of ``q`` in the order of its bytes."""
    found = []
    for part in (q.data, q.scales, q.tensor_scale, q.offsets, q.table, q.groups):
        if isinstance(part, QTensor):
            found += parts_of(part)
        elif part is not None:
            found.append(part)
    return found


def tensor_of(
    parts: Sequence[Tensor], scheme: QuantScheme, shape: Sequence[int], axes: Sequence[int]
) -> QTensor:
    """The QTensor of stored arrays, or of their bytes, in order: the inverse of ``parts_of``."""
    device = f"torch:{parts[0].device}"
    return _assemble(iter(parts), scheme, tuple(shape), tuple(axes), device)


def _assemble(
    parts: Iterator[Tensor],
    scheme: QuantScheme,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    device: str,
) -> QTensor:
    grid = scheme.scale_shape(stored_shape(shape, axes))

    def numbers(kind: Any) -> Any:
        if isinstance(kind, QuantScheme):
            return _assemble(parts, kind, grid, tuple(range(len(grid))), device)
        return (
            typed(next(parts), kind.storage, grid) if isinstance(kind, ScaleDtype) else next(parts)
        )

    data, scales = next(parts), numbers(scheme.scale)
    tensor_scale = None if scheme.tensor_scale is None else typed(next(parts), "float32", ())
    offsets = None if scheme.offset is None else numbers(scheme.offset.dtype)
    is_lookup = scheme.mode is QuantMode.LOOKUP
    table = typed(next(parts), "float32", (2**scheme.bits,)) if is_lookup else None
    groups = typed(next(parts), "int32", (-1,)) if scheme.grouped else None
    return from_fields(
        *(scheme, shape, data, scales, tensor_scale, offsets, table, axes, device, groups)
    )


def typed(part: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
    """A stored array as it is, or as a view of its bytes."""
    wanted: torch.dtype = getattr(torch, dtype)
    if part.dtype == wanted:
        return part
    if part.storage_offset() % wanted.itemsize or not part.is_contiguous():
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(wanted).reshape(tuple(shape))


def bytes_of(part: Tensor) -> Tensor:
    """A stored array as its bytes: uint8, with the last axis longer, at least one axis."""
    if part.dtype == torch.uint8:
        return part
    whole = part.contiguous()
    return (whole.reshape(1) if whole.ndim == 0 else whole).view(torch.uint8)


def exact(x: Tensor) -> AbstractContextManager[Any]:
    """Without autocast, which would round what enters a product."""
    kind = x.device.type
    is_on = torch.is_autocast_enabled(kind)
    found: AbstractContextManager[Any] = torch.autocast(kind, enabled=False) if is_on else _NOTHING
    return found


# -- products ---------------------------------------------------------------------------------


def product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """``a @ b`` by an op that autograd knows, rounded to ``dtype``."""
    if a.scheme or b.scheme:
        made: Tensor = torch.ops.polyquant.matmul(*a.arguments(), *b.arguments(), dtype)
        return made
    left, right = a.parts[0], b.parts[0]
    wide = torch.float64 if torch.float64 in (left.dtype, right.dtype) else torch.float32
    with exact(left):
        return torch.matmul(left.to(wide), right.to(wide)).to(dtype)


def product_shape(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The shape of a product; extents may be symbolic."""
    columns = b[-1:] if len(b) > 1 else ()
    return (*torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2])), *a[-2:-1], *columns)


def left_gradient(grad: Tensor, a: Sequence[int], b: Operand, dtype: torch.dtype) -> Tensor:
    """The gradient of ``a`` (its extents) in ``a @ b``."""
    if len(b.extents) == 1:
        return (grad.unsqueeze(-1) * b.values(grad.dtype)).to(dtype)
    rows = grad.unsqueeze(-2) if len(a) == 1 else grad
    return product(Operand([rows]), b.mT, dtype).sum_to_size(tuple(a))


def right_gradient(grad: Tensor, a: Operand, b: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The gradient of ``b`` (its extents) in ``a @ b``."""
    if len(a.extents) == 1:
        values = a.values(grad.dtype)
        found = values * grad if len(b) == 1 else values.unsqueeze(-1) * grad.unsqueeze(-2)
        return found.to(dtype)
    if len(b) == 1:
        found = product(a.mT, Operand([grad.unsqueeze(-1)]), dtype).squeeze(-1)
        return found.sum_to_size(tuple(b))
    return product(a.mT, Operand([grad]), dtype).sum_to_size(tuple(b))
