"""How a tensor can be split over devices, so that each of its parts decodes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from polyquant.codec import line_size_bytes
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import QuantStore

_Entries = tuple[Any, ...]


def why_not_split(scheme: QuantScheme, shape: Sequence[int], axis: int, count: int) -> str | None:
    """Why a stored axis cannot be split into so many equal shards, or None."""
    if count == 1:
        return None
    if shape[axis] % count:
        return f"{shape[axis]} elements are no multiple of {count}"
    laid = scheme.laid(shape)
    if scheme.view is not None:
        if axis != 0 or scheme.view[0] != -1:
            return "its blocks run on across the ends of rows, so that only rows can be split"
        if laid[0] % count:
            return f"the {laid[0]} lines of its blocks are no multiple of {count}"
    piece, bits = laid[axis] // count, scheme.bits
    size = line_size_bytes(piece, bits, scheme.store)
    if axis == len(laid) - 1 and scheme.store is not QuantStore.NATIVE and piece * bits != 8 * size:
        word = 32 if scheme.store is QuantStore.PACKED_U32 else 8
        return f"an edge at {piece} codes of {bits} bits lies inside a packed word of {word}"
    grid, extent = scheme.scale_shape(shape), scheme.block_extents(shape)[axis]
    if grid[axis] == 1 or (scheme.grouped and axis == len(laid) - 1):
        return None  # every shard has the same scales
    if piece % extent:
        return f"an edge at {piece} lies inside a block of {extent}"
    inner = {"scales": scheme.scale, "offsets": scheme.offset and scheme.offset.dtype}
    for name, dtype in inner.items():
        if isinstance(dtype, QuantScheme):
            reason = why_not_split(dtype, grid, axis, count)
            if reason is not None:
                return f"of its quantized {name} ({dtype}), {reason}"
    return None


def astray(q: QTensor) -> tuple[str, _Entries, _Entries] | None:
    """A part that is split over other axes of a mesh than its codes, how it is split, and how they.

    Shards have the right shapes then, and other devices' scales. The leaves of ``q`` are
    PartitionSpecs, or arrays whose types say how they are split; of others nothing is known.
    """
    of_codes = _entries_of(q.data)
    if not any(of_codes):
        return None
    for name, part in (("scales", q.scales), ("offsets", q.offsets)):
        split = _entries_of(part.data if isinstance(part, QTensor) else part)
        if any(map(_differ, of_codes, split)):
            return name, split, of_codes
    split = _entries_of(q.groups)  # of columns; before them may be the axis of a stack
    if split and len(split) == len(of_codes) - 1 and _differ(of_codes[-1], split[-1]):
        return "groups", split, (*split[:-1], of_codes[-1])
    return None


def _entries_of(leaf: Any) -> _Entries:
    if isinstance(leaf, PartitionSpec):
        return tuple(leaf)
    is_traced = isinstance(leaf, jax.core.Tracer)
    where = jax.typeof(leaf).sharding if is_traced else getattr(leaf, "sharding", None)
    if isinstance(where, NamedSharding) and AxisType.Explicit in (where.mesh.axis_types or ()):
        return tuple(where.spec)
    return ()


def _differ(mine: Any, its: Any) -> bool:
    """Whether two splits of one axis are over axes of a mesh of which none are the other's first.

    (Where they are, the parts differ in length, which their shapes show.)
    """
    pair = [x if isinstance(x, tuple) else (x,) for x in (mine, its) if x is not None]
    shorter = min(map(len, pair), default=0)
    return len(pair) == 2 and pair[0][:shorter] != pair[1][:shorter]
