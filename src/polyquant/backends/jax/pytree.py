"""QTensor as a pytree of JAX: stored arrays are leaves, and the shape follows from the codes.

Transformations hand over leaves of other shapes than those that a tensor was flattened with: vmap
and scan take an axis away or add one, shard_map cuts one. So what is static says nothing of
extents, and tensors that differ in those alone have equal tree structures, as arrays do. Where the
leaves are is not static either: moving a tensor changes no structure, and traces nothing anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
from jax import export

from polyquant.arrays import find_backend
from polyquant.codec import line_size_bytes
from polyquant.data import stored_shape
from polyquant.qtensor import QTensor, from_fields
from polyquant.scheme import QuantScheme
from polyquant.values import QuantStore

#: The stored arrays: each a leaf, None, or a QTensor with leaves of its own.
PARTS = ("data", "scales", "tensor_scale", "offsets", "table", "groups")
_KEYS = tuple(jax.tree_util.GetAttrKey(name) for name in PARTS)
#: The device of a tensor whose leaves are no arrays.
NOWHERE = "jax"


@dataclass(frozen=True)
class Static:
    """What no leaf says about a tensor: hashable, and equal for tensors of other extents.

    ``unused`` counts the fields at the end of a line of codes that stand for no element. ``order``
    is the order of the axes without those before it that are in place. ``is_scalar``: there are no
    axes; ``viewed``: the stored shape, where the scheme blocks a view of it. ``shape`` and ``axes``
    serve leaves that have no shape (None, a mark, a sharding).
    """

    scheme: QuantScheme
    unused: int
    order: tuple[int, ...]
    is_scalar: bool
    viewed: tuple[int, ...] | None
    shape: tuple[int, ...] = field(compare=False)
    axes: tuple[int, ...] = field(compare=False)

    def extents(self, data: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and order of axes of the tensor whose codes are ``data``."""
        lines = getattr(data, "shape", None)
        if not isinstance(lines, tuple) or not lines:
            return self.shape, self.axes
        if self.viewed is not None:
            stored = self._viewed(self.viewed, lines)
        elif self.is_scalar:
            stored = lines[:-1]
        else:
            stored = (*lines[:-1], _capacity(self.scheme, lines[-1]) - self.unused)
        axes = _with_rank(self.order, len(stored))
        return tuple(stored[axis] for axis in axes), axes

    def _viewed(self, shape: tuple[int, ...], lines: tuple[int, ...]) -> tuple[int, ...]:
        of, laid = self.scheme, self.scheme.laid(shape)
        more = len(lines) - len(laid)
        whole = laid[0] if len(laid) > 1 else line_size_bytes(laid[0], of.bits, of.store)
        if shape and whole:
            # Of lines that run on across rows a shard has a part, and as large a part of the rows.
            shape = (shape[0] * lines[more] // whole, *shape[1:])
        return (*lines[:more], *shape)


def _capacity(of: QuantScheme, size: Any) -> Any:
    """How many codes ``size`` bytes hold."""
    return size if of.store is QuantStore.NATIVE else size * 8 // of.bits


def _with_rank(order: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """An order with axes in place before it, or without the axes that were stored first."""
    while len(order) > rank:
        order = tuple(axis - 1 for axis in order if axis)
    more = rank - len(order)
    return (*range(more), *(axis + more for axis in order))


@lru_cache(maxsize=4096)
def static(
    of: QuantScheme, shape: tuple[int, ...], axes: tuple[int, ...], rank: int | None = None
) -> Static:
    """The static part of a tensor of that scheme, shape and order of axes.

    ``rank`` is that of the array of codes, where there is one: a stack of tensors has more axes.
    """
    first = next((i for i, axis in enumerate(axes) if i != axis), len(axes))
    order = tuple(axis - first for axis in axes[first:])
    stored = stored_shape(shape, axes)
    if of.view is not None:
        more = 0 if rank is None else max(0, rank - len(of.view))
        return Static(of, 0, order, False, stored[more:], shape, axes)
    is_scalar = not shape or rank == len(shape) + 1
    length = 1 if is_scalar else stored[-1]
    unused = _capacity(of, line_size_bytes(length, of.bits, of.store)) - length
    return Static(of, unused, order, is_scalar, None, shape, axes)


def _device_of(data: Any) -> str:
    owner = find_backend(data)
    return NOWHERE if owner is None else owner.device_of(data)


def _flatten(q: QTensor) -> tuple[tuple[Any, ...], Static]:
    arrays = (q.data, q.scales, q.tensor_scale, q.offsets, q.table, q.groups)
    lines = getattr(q.data, "shape", None)
    rank = len(lines) if isinstance(lines, tuple) else None
    return arrays, static(q.scheme, q.shape, q.axes, rank)


def _flatten_with_keys(q: QTensor) -> tuple[Any, Static]:
    arrays, described = _flatten(q)
    return tuple(zip(_KEYS, arrays, strict=True)), described


@lru_cache(maxsize=1024)
def _wraps_numpy(cls: type) -> bool:
    """Whether a class is JAX's own for arrays of NumPy, as jax.custom_jvp hands them over."""
    is_array = cls.__module__.partition(".")[0] == "jax" and hasattr(cls, "__array__")
    return is_array and not issubclass(cls, jax.Array | jax.core.Tracer)


def _unflatten(described: Static, arrays: Any) -> QTensor:
    """JAX also passes placeholders instead of arrays, so nothing is validated here."""
    *parts, groups = (jax.numpy.asarray(x) if _wraps_numpy(x.__class__) else x for x in arrays)
    shape, axes = described.extents(parts[0])
    return from_fields(described.scheme, shape, *parts, axes, _device_of(parts[0]), groups)


# -- in files of jax.export -------------------------------------------------------------------


def _as_bytes(described: Static) -> bytes:
    return json.dumps(vars(described) | {"scheme": described.scheme.to_json()}).encode()


def _from_bytes(form: bytes) -> Static:
    """Raises UnknownScheme, or what a scheme raises."""
    read = json.loads(form)
    named: dict[str, Any] = {
        name: tuple(x) if isinstance(x, list) else x for name, x in read.items()
    }
    return Static(**named | {"scheme": QuantScheme.from_json(read["scheme"])})


def register() -> None:
    """Tell JAX, once, how a QTensor is taken apart and put together."""
    jax.tree_util.register_pytree_with_keys(QTensor, _flatten_with_keys, _unflatten, _flatten)
    export.register_pytree_node_serialization(
        QTensor,
        serialized_name="polyquant.QTensor",
        serialize_auxdata=_as_bytes,
        deserialize_auxdata=_from_bytes,
    )
