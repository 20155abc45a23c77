"""The same numbers under a scheme that every kernel knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyquant.errors import LayoutRefused
from polyquant.qtensor import QTensor, from_fields
from polyquant.scheme import Offset, QuantScheme
from polyquant.standard import dequantize, divisor, multiplier, params_in
from polyquant.values import ScaleDtype, ScaleRole
from polyquant.views.arguments import check_tensor
from polyquant.views.moving import ungrouped, unviewed


def canonical(q: QTensor) -> QTensor:
    """Exactly the same numbers without ``scheme.extras``: what a kernel that declined can take.

    Cost: nothing for a plain tensor. Blocks that cross the ends of rows become blocks of their
    largest common divisor with a row; a group map gives every element of the last axis a scale;
    scales that divide, and quantized scales of a table with a bias, become float32.

    Raises LayoutRefused where no plain scheme rounds alike (a scale that is a maximum, or a bias
    beside the table of the codes).
    """
    check_tensor("canonical", q)
    if q.scheme.is_plain:
        return q
    q = _multiplied(ungrouped(unviewed(q)))
    q = plain_scales(q, only=lambda grid: not grid.scheme.is_plain)
    if not q.scheme.is_plain:
        reason = f"no plain scheme rounds as {q.scheme.extras[0]} does"
        fix = "Use q.dequantize(), or quantize that again"
        raise LayoutRefused(scheme=str(q.scheme), shape=q.shape, reason=reason, fix=fix)
    return q


def plain_scales(q: QTensor, *, only: Callable[[QTensor], bool] = lambda grid: True) -> QTensor:
    """The same numbers with float32 in place of scales and offsets that are quantized, or some."""

    def plain(grid: Any) -> Any:
        return dequantize(grid, None) if isinstance(grid, QTensor) and only(grid) else grid

    scales, offsets = plain(q.scales), plain(q.offsets)
    if scales is q.scales and offsets is q.offsets:
        return q
    s, offset = q.scheme, q.scheme.offset
    if offsets is not q.offsets and offset is not None:
        offset = Offset(offset.kind, ScaleDtype.F32)
    s = s._with(scale=s.scale if scales is q.scales else ScaleDtype.F32, offset=offset)
    return q._replace(scheme=s, scales=scales, offsets=offsets)


def _multiplied(q: QTensor) -> QTensor:
    """The same numbers under scales that multiply, where those round alike."""
    s = q.scheme
    if s.role is ScaleRole.MULTIPLIER or (s.role is ScaleRole.ABSMAX and s.tensor_scale is None):
        return q
    made: QuantScheme = s.with_role(ScaleRole.MULTIPLIER)
    tensor_scale, scales = q.tensor_scale, q.scales
    if s.role is ScaleRole.ABSMAX:
        tensor_scale = multiplier(tensor_scale, s)
    else:  # a division a block
        made, tensor_scale = made._with(scale=ScaleDtype.F32, tensor_scale=None), None
        scales = divisor(s, params_in(q)).value
    parts = (q.data, scales, tensor_scale, q.offsets, q.table)
    return from_fields(made, q.shape, *parts, q.axes, q.device)
