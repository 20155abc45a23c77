"""Into how many equal parts an axis of a tensor can be split, so that each decodes by itself."""

from __future__ import annotations

from collections.abc import Sequence

from polyquant.codec import line_size_bytes
from polyquant.scheme import QuantScheme
from polyquant.values import QuantStore


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
