"""Several tensors as one: concat and stack."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np

from polyquant.arrays import Array, backend_of, namespace
from polyquant.errors import (
    BackendMismatch,
    DeviceMismatch,
    InvalidArgument,
    LayoutRefused,
    ShapeMismatch,
)
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.tables import CUSTOM
from polyquant.views.arguments import axis_of, check_tensor
from polyquant.views.codes import joined_codes
from polyquant.views.moves import Shape, cut, extent_for, simplest
from polyquant.views.moving import (
    block_tokens,
    moved_grid,
    permuted,
    remade,
    stored_like,
    ungrouped,
    unviewed,
)
from polyquant.views.shape import unsqueeze


def concat(tensors: Sequence[QTensor], axis: int = 0) -> QTensor:
    """Tensors of one scheme, but for their blocks, joined along an axis.

    Cost: a copy of the codes. Blocks get the largest extents that fit into those of every part:
    parts whose blocks divide them keep them, a part of 70 by 32 before another makes them 2, and
    scales for whole tensors become one for each part. Tensors stored in another order of axes than
    the first are put in its order.

    Raises InvalidArgument, InvalidAxes, ShapeMismatch, BackendMismatch, DeviceMismatch, and
    LayoutRefused where the parts differ in their scheme, tensor scale or table.
    """
    parts = _checked("concat", tensors)
    first = parts[0]
    axis = axis_of(first, axis)
    for number, part in enumerate(parts[1:], 1):
        others = [s[:axis] + s[axis + 1 :] for s in (first.shape, part.shape)]
        if part.ndim != first.ndim or others[0] != others[1]:
            reason = f"tensor {number} differs from the first in another axis than {axis}"
            shapes = {"left": first.shape, "right": part.shape}
            raise ShapeMismatch(op="concat", **shapes, reason=reason)
        _check_form(first, part, number)
    held = [part for part in parts if part.shape[axis]] or [first]
    if len(held) == 1:
        return held[0]
    axes = held[0].axes
    in_stored_order = sorted(range(first.ndim), key=lambda a: axes[a])
    stored = [permuted(stored_like(part, axes), in_stored_order) for part in held]
    return permuted(_joined(stored, axes[axis]), axes)


def stack(tensors: Sequence[QTensor], axis: int = 0) -> QTensor:
    """Tensors of one shape and scheme, joined along a new axis: see ``concat``."""
    parts = _checked("stack", tensors)
    for number, part in enumerate(parts):
        if part.shape != parts[0].shape:
            reason = f"tensor {number} has another shape than the first"
            shapes = {"left": parts[0].shape, "right": part.shape}
            raise ShapeMismatch(op="stack", **shapes, reason=reason)
    at = axis_of(parts[0], axis, new=1)
    return concat([unsqueeze(part, at) for part in parts], at)


def _checked(op: str, tensors: Any) -> list[QTensor]:
    """The tensors, of one device. Raises InvalidArgument, BackendMismatch, DeviceMismatch."""
    parts = list(tensors) if isinstance(tensors, Sequence) else tensors
    if not isinstance(parts, list) or not parts or not all(isinstance(q, QTensor) for q in parts):
        wanted = f"a list of one QTensor or more ({op} of arrays is that of their own library)"
        raise InvalidArgument(name="tensors", wanted=wanted, got=tensors)
    first = parts[0]
    for number, part in enumerate(parts):
        check_tensor(op, part)
        if part.device != first.device:
            one_library = part.device.partition(":")[0] == first.device.partition(":")[0]
            error = DeviceMismatch if one_library else BackendMismatch
            raise error(
                op=op,
                left_role="tensor 0",
                left=f"on {first.device}",
                right_role=f"tensor {number}",
                right=f"on {part.device}",
                fix=f"call tensors[{number}].to({first.device!r})",
            )
    return [ungrouped(unviewed(part)) for part in parts]


def _joined(parts: Sequence[QTensor], at: int) -> QTensor:
    """Tensors in stored order, none of them empty, joined along an axis."""
    first = parts[0]
    _check_shared(parts)
    block = _shared_block(parts, at)
    scales, offsets = (
        _joined_grids([_on_blocks(q, block, grid) for q, grid in grids], at)
        for grids in ([(q, q.scales) for q in parts], [(q, q.offsets) for q in parts])
    )
    extent = sum(q.shape[at] for q in parts)
    shape = (*first.shape[:at], extent, *first.shape[at + 1 :])
    return remade(first, shape, joined_codes(parts, at), block, scales, offsets)


def _joined_grids(grids: Sequence[Any], at: int) -> Any:
    if grids[0] is None:
        return None
    if isinstance(grids[0], QTensor):
        return _joined(grids, at)
    return namespace(grids[0]).concat(list(grids), axis=at)


def _shared_block(parts: Sequence[QTensor], at: int) -> Shape:
    """The largest blocks of which every edge between and inside of the parts is an edge."""
    rank = parts[0].ndim
    common = [0] * rank
    for q in parts:
        shape = q.shape
        counts, extents = q.scheme.scale_shape(shape), q.scheme.block_extents(shape)
        common = [
            gcd(c, e) if n > 1 else c for c, e, n in zip(common, extents, counts, strict=True)
        ]
    for q in parts[:-1]:
        common[at] = gcd(common[at], q.shape[at])
    tokens = block_tokens(parts[0].scheme, rank) or (-1,) * rank
    return tuple(map(extent_for, tokens, common, parts[0].shape))


def _on_blocks(q: QTensor, block: Shape, grid: Any) -> Any:
    """Scales or offsets of ``q`` on the finer grid of a block whose edges include its own."""
    if grid is None:
        return None
    old = q.scheme.block_extents(q.shape)
    for axis, (extent, token, count) in enumerate(
        zip(q.shape, block, q.scheme.scale_shape(q.shape), strict=True)
    ):
        new = cut(token, extent)
        ids = np.arange(0, extent, new) // old[axis]
        if len(ids) != count:
            grid = moved_grid(grid, axis, simplest((count,), ids))
    return grid


def _check_form(first: QTensor, part: QTensor, number: int) -> None:
    """Refuse parts whose schemes differ in more than blocks. Raises LayoutRefused."""
    ours, theirs = _form(first.scheme), _form(part.scheme)
    differs = [name for name in ours if ours[name] != theirs.get(name)]
    if differs:
        name = differs[0]
        _refuse(first, f"tensor {number} has the {name} {theirs.get(name)}, not {ours[name]}")


def _form(scheme: QuantScheme) -> dict[str, str]:
    """What tensors must share to be joined: a scheme but for its blocks, level by level."""
    form = {
        "value type": str(scheme.value),
        "mode": str(scheme.mode),
        "table": str(scheme.table),
        "tensor scale": str(scheme.tensor_scale),
        "store": str(scheme.store),
        "kind of offset": str(scheme.offset and scheme.offset.kind),
    }
    inner = {"scale": scheme.scale, "offset": scheme.offset and scheme.offset.dtype}
    for name, kind in inner.items():
        is_nested = isinstance(kind, QuantScheme)
        form[f"{name} type"] = "quantized" if is_nested else str(kind)
        if isinstance(kind, QuantScheme):
            form |= {f"{name}s' {key}": item for key, item in _form(kind).items()}
    return form


def _check_shared(parts: Sequence[QTensor]) -> None:
    """Refuse parts that differ in what a tensor has once. Raises LayoutRefused."""
    first = parts[0]
    for number, part in enumerate(parts[1:], 1):
        if not _same(first.tensor_scale, part.tensor_scale, is_known=False):
            _refuse(first, f"tensor {number} has another tensor scale, or one hidden by a tracer")
        if not _same(first.table, part.table, is_known=first.scheme.table != CUSTOM):
            _refuse(first, f"tensor {number} has another table, or one hidden by a tracer")


def _same(a: Array | None, b: Array | None, *, is_known: bool) -> bool:
    """Whether two arrays hold the same bits; under a tracer, whether they are one or are known."""
    if a is b or a is None or b is None:
        return a is b
    owner = backend_of(a)
    if owner.is_traced(a) or owner.is_traced(b):
        return is_known
    return owner.to_host(a).tobytes() == owner.to_host(b).tobytes()


def _refuse(q: QTensor, reason: str) -> None:
    fix = "Join the dequantize() arrays, or join before pq.quantize, which then quantizes once"
    raise LayoutRefused(scheme=str(q.scheme), shape=q.shape, reason=reason, fix=fix)
