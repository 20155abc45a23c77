"""Quantized tensors over many devices: shardings of the logical axes, for every stored array.

Codes, scales, offsets and group maps are cut at the same places, so that every device can decode
what it holds. That needs edges that lie between blocks and between packed words: others are
refused, with the nearest splits that are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from polyquant.arrays import backend_of
from polyquant.backends.jax import BACKEND  # and JAX is told how a QTensor is taken apart
from polyquant.backends.jax.pytree import PARTS
from polyquant.backends.jax.splits import why_not_split
from polyquant.codec import line_size_bytes
from polyquant.errors import InvalidArgument, ShardingRefused
from polyquant.jax.explicit import auto_axes
from polyquant.qtensor import QTensor, from_fields
from polyquant.values import QuantStore
from polyquant.views.moving import smaller_blocks, unviewed
from polyquant.views.plain import plain_scales

_Entries = tuple[Any, ...]


def shard(tree: Any, sharding: Any, *, reblock: bool = False) -> Any:
    """Place arrays and QTensors over the devices of a sharding of their logical axes.

    What ``jax.device_put`` does, for trees that hold QTensors too. Under a tracer it constrains the
    sharding, as ``jax.lax.with_sharding_constraint`` does.

    Args:
        tree: QTensors and arrays, of JAX or NumPy.
        sharding: a NamedSharding for all of them, or a tree with one for each.
        reblock: where an edge would cut a block or a packed word, give the tensor smaller blocks
            with the same scales, lines of bytes in place of words, and float32 scales in place of
            quantized ones that are cut. The numbers stay the same.

    Raises ShardingRefused, InvalidArgument.
    """
    return _each(tree, sharding, lambda leaf, where: _placed(leaf, where, reblock=reblock))


def shardings(tree: Any, sharding: Any) -> Any:
    """The same tree with the NamedSharding of every stored array in its place.

    It is what ``jax.jit`` takes as ``in_shardings`` and ``out_shardings``; its ``.spec`` are the
    ``in_specs`` of ``jax.shard_map``. Arguments and errors as of ``shard``.
    """
    return _each(tree, sharding, _shardings)


def _each(tree: Any, sharding: Any, made: Callable[[Any, NamedSharding], Any]) -> Any:
    def leaf_of(leaf: Any, where: Any) -> Any:
        _check(leaf, where)
        return made(leaf, where)

    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_tensor)
    places = [sharding] * len(leaves)
    if not isinstance(sharding, NamedSharding):
        places, given = jax.tree.flatten(sharding)
        if given != structure:
            wanted = "a jax.sharding.NamedSharding, or a tree with one for each tensor"
            raise InvalidArgument(name="sharding", wanted=wanted, got=sharding)
    return structure.unflatten(map(leaf_of, leaves, places))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, QTensor)


def _check(leaf: Any, where: Any) -> None:
    if not isinstance(where, NamedSharding):
        raise InvalidArgument(name="sharding", wanted="a jax.sharding.NamedSharding", got=where)
    shape = getattr(leaf, "shape", None)
    if shape is None:
        raise InvalidArgument(name="tree", wanted="arrays and QTensors", got=leaf)
    if len(where.spec) > len(shape):
        wanted = f"a PartitionSpec of at most {len(shape)} entries, as the shape {tuple(shape)} has"
        raise InvalidArgument(name="sharding", wanted=wanted, got=where.spec)
    if PartitionSpec.UNCONSTRAINED in where.spec:
        wanted = "a PartitionSpec that says of every axis how it is split"
        raise InvalidArgument(name="sharding", wanted=wanted, got=where.spec)
    if AxisType.Explicit in where.mesh.axis_types and auto_axes is None:
        wanted = (
            "of a mesh whose axes XLA splits by itself, as jax.make_mesh(shape, names, "
            "axis_types=(jax.sharding.AxisType.Auto,) * len(names)) makes it"
        )
        raise InvalidArgument(name="sharding", wanted=wanted, got=where.mesh)


def _placed(leaf: Any, where: NamedSharding, *, reblock: bool) -> Any:
    array = leaf.data if isinstance(leaf, QTensor) else leaf
    if backend_of(array).name not in (BACKEND.name, "numpy"):
        wanted = "arrays of JAX or NumPy; call q.to('jax') first"
        raise InvalidArgument(name="tree", wanted=wanted, got=leaf)
    if not isinstance(leaf, QTensor):
        return _put(leaf, where)
    if reblock:
        leaf = _reblocked(leaf, where)
    return jax.tree.map(_put, leaf, _shardings(leaf, where))


def _put(array: Any, where: NamedSharding) -> Any:
    if isinstance(array, jax.core.Tracer):
        if AxisType.Explicit in where.mesh.axis_types:
            return jax.sharding.reshard(array, where)
        return jax.lax.with_sharding_constraint(array, where)
    return jax.device_put(array, where)


# -- one tensor -------------------------------------------------------------------------------


def _shardings(leaf: Any, where: NamedSharding) -> Any:
    if not isinstance(leaf, QTensor):
        return where
    counts = _stored_counts(leaf, where)
    for axis, count in enumerate(counts):
        reason = why_not_split(leaf.scheme, leaf.stored_shape, axis, count)
        if reason is not None:
            _refuse(leaf, axis, count, reason)
    return _specs(leaf, _stored(leaf, where), where)


def _stored(q: QTensor, where: NamedSharding) -> _Entries:
    """The entries of a spec of logical axes in stored order, one for every axis."""
    full = (*where.spec, *(None,) * (q.ndim - len(where.spec)))
    entries = [None] * q.ndim
    for logical, axis in enumerate(q.axes):
        entries[axis] = full[logical]
    return tuple(entries)


def _stored_counts(q: QTensor, where: NamedSharding) -> tuple[int, ...]:
    """Into how many shards every stored axis is split."""
    return tuple(_count(entry, where) for entry in _stored(q, where))


def _count(entry: Any, where: NamedSharding) -> int:
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(where.mesh.shape[name] for name in names)


def _specs(q: QTensor, entries: _Entries, where: NamedSharding) -> QTensor:
    """``q`` with shardings in place of its stored arrays; ``entries`` are of its stored axes."""
    scheme, shape = q.scheme, q.stored_shape
    laid, grid = scheme.laid(shape), scheme.scale_shape(shape)
    if scheme.view is not None:  # only the first axis is split: see why_not_split
        entries = (entries[0], *(None,) * (len(laid) - 1)) if entries else (None,) * len(laid)
    on_grid = tuple(e if n > 1 else None for e, n in zip(entries, grid, strict=True))
    if scheme.grouped:  # any element may be in any group, so every device has all of them
        on_grid = (*on_grid[:-1], None)

    def of(entries: _Entries) -> NamedSharding:
        return NamedSharding(where.mesh, PartitionSpec(*entries), memory_kind=where.memory_kind)

    def grid_of(part: Any) -> Any:
        return _specs(part, on_grid, where) if isinstance(part, QTensor) else of(on_grid)

    made = {
        "data": of(entries),
        "scales": grid_of(q.scales),
        "tensor_scale": of(()),
        "offsets": grid_of(q.offsets),
        "table": of(()),
        "groups": of(entries[-1:]),
    }
    parts = [None if getattr(q, name) is None else made[name] for name in PARTS]
    *rest, groups = parts
    return from_fields(scheme, q.shape, *rest, q.axes, q.device, groups)


def _refuse(q: QTensor, axis: int, count: int, reason: str) -> None:
    extent = q.stored_shape[axis]
    found = [
        n for n in _divisors(extent) if why_not_split(q.scheme, q.stored_shape, axis, n) is None
    ]
    nearest = [*[n for n in found if n < count][-1:], *[n for n in found if n > count][:1]]
    raise ShardingRefused(
        axis=q.axes.index(axis),
        scheme=str(q.scheme),
        shape=q.shape,
        count=count,
        reason=reason,
        nearest=" or ".join(map(str, nearest)),
    )


def _divisors(extent: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(extent) + 1) if extent % n == 0]
    return sorted({*low, *(extent // n for n in low)})


def _reblocked(q: QTensor, where: NamedSharding) -> QTensor:
    """The same numbers with blocks and lines that the shards' edges do not cut, where there are."""
    counts = _stored_counts(q, where)
    if _fits(q, counts):
        return q
    q = unviewed(q)
    shape = q.stored_shape
    for axis, count in enumerate(counts):
        extent, piece = q.scheme.block_extents(shape)[axis], shape[axis] // count
        if q.scheme.scale_shape(shape)[axis] > 1 and piece % extent and shape[axis] % count == 0:
            q = smaller_blocks(q, axis, math.gcd(extent, piece))
    bits = shape[-1] // counts[-1] * q.scheme.bits
    if q.scheme.store is QuantStore.PACKED_U32 and bits % 32 and not bits % 8:
        scheme = q.scheme.with_store(QuantStore.PACKED_NATIVE)
        size = line_size_bytes(shape[-1], scheme.bits, scheme.store)
        q = q._replace(scheme=scheme, data=q.data[..., :size])
    return q if _fits(q, counts) else plain_scales(q)


def _fits(q: QTensor, counts: Sequence[int]) -> bool:
    shape = q.stored_shape
    return all(why_not_split(q.scheme, shape, axis, n) is None for axis, n in enumerate(counts))
