"""QTensor as a pytree of JAX: stored arrays are leaves, and the shape follows from the codes.

Transformations hand over leaves of other shapes than those that a tensor was flattened with: vmap
and scan take an axis away or add one, shard_map cuts one. So what is static says nothing of
extents, and tensors that differ in those alone have equal tree structures, as arrays do. Where the
leaves are is not static either: moving a tensor changes no structure, and traces nothing anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
from jax import export
from jax.sharding import PartitionSpec

from polyquant.arrays import find_backend
from polyquant.backends.jax.splits import astray, why_not_split
from polyquant.codec import line_size_bytes
from polyquant.data import stored_shape
from polyquant.errors import InvalidTensor
from polyquant.qtensor import QTensor, from_fields, validate
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
    serve leaves that have no shape (None, a mark, a sharding); ``whole`` is what is known within
    shard_map of the tensor outside, as long as nobody looked; ``astray`` a part that the types of
    arrays split apart from its codes, which only shard_map does not mend (see ``splits.astray``).
    """

    scheme: QuantScheme
    unused: int
    order: tuple[int, ...]
    is_scalar: bool
    viewed: tuple[int, ...] | None
    shape: tuple[int, ...] = field(compare=False)
    axes: tuple[int, ...] = field(compare=False)
    whole: tuple[int, ...] | None = field(compare=False, default=None)
    astray: tuple[str, Any, Any] | None = field(compare=False, default=None)

    @property
    def uncut(self) -> tuple[int, ...]:
        """The stored shape of the tensor that shard_map may have cut."""
        return stored_shape(self.shape, self.axes) if self.whole is None else self.whole

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
    of: QuantScheme,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    rank: int | None = None,
    whole: tuple[int, ...] | None = None,
    apart: tuple[str, Any, Any] | None = None,
) -> Static:
    """The static part of a tensor of that scheme, shape and order of axes.

    ``rank`` is that of the array of codes, where there is one: a stack of tensors has more axes.
    """
    first = next((i for i, axis in enumerate(axes) if i != axis), len(axes))
    order = tuple(axis - first for axis in axes[first:])
    stored = stored_shape(shape, axes)
    if of.view is not None:
        more = 0 if rank is None else max(0, rank - len(of.view))
        return Static(of, 0, order, False, stored[more:], shape, axes, whole, apart)
    is_scalar = not shape or rank == len(shape) + 1
    length = 1 if is_scalar else stored[-1]
    unused = _capacity(of, line_size_bytes(length, of.bits, of.store)) - length
    return Static(of, unused, order, is_scalar, None, shape, axes, whole, apart)


def _device_of(data: Any) -> str:
    owner = find_backend(data)
    return NOWHERE if owner is None else owner.device_of(data)


def _flatten(q: QTensor) -> tuple[tuple[Any, ...], Static]:
    arrays = (q.data, q.scales, q.tensor_scale, q.offsets, q.table, q.groups)
    lines = getattr(q.data, "shape", None)
    rank = len(lines) if isinstance(lines, tuple) else None
    known = q._unchecked.args[0] if q._unchecked is not None and _in_shard_map() else None
    whole, apart = (None, astray(q)) if known is None else (known.uncut, known.astray)
    if apart is not None and isinstance(q.data, PartitionSpec):
        _refuse_apart(q, apart)
    return arrays, static(q.scheme, q.shape, q.axes, rank, whole, apart)


def _in_shard_map() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _flatten_with_keys(q: QTensor) -> tuple[Any, Static]:
    arrays, described = _flatten(q)
    return tuple(zip(_KEYS, arrays, strict=True)), described


@lru_cache(maxsize=1024)
def _wraps_numpy(cls: type) -> bool:
    """Whether a class is JAX's own for arrays of NumPy, as jax.custom_jvp hands them over."""
    is_array = cls.__module__.partition(".")[0] == "jax" and hasattr(cls, "__array__")
    return is_array and not issubclass(cls, jax.Array | jax.core.Tracer)


def _unflatten(described: Static, arrays: Any) -> QTensor:
    """JAX also passes placeholders instead of arrays: what is used is checked then."""
    *parts, groups = (jax.numpy.asarray(x) if _wraps_numpy(x.__class__) else x for x in arrays)
    shape, axes = described.extents(parts[0])
    made = from_fields(described.scheme, shape, *parts, axes, _device_of(parts[0]), groups)
    object.__setattr__(made, "_unchecked", partial(_is_checked, described))
    return made


# -- tensors made of leaves, checked at their first use -------------------------------------------


def _is_checked(described: Static, q: QTensor) -> bool:
    """Whether ``q`` has arrays to look at, which then are those of a tensor. Raises InvalidTensor.

    Those of a stack are looked at tensor by tensor, where it is decoded.
    """
    if find_backend(q.data) is None or q.data.dtype == jax.dtypes.float0 or q.is_stack:
        return False
    if q.groups is None:
        validate(q)
    else:
        _check_grouped(q)
    if _in_shard_map():
        if described.astray is not None:
            _refuse_apart(q, described.astray)
        _check_shard(q, described.uncut)
    return True


def _check_grouped(q: QTensor) -> None:
    """A shard with a group map has the scales of all groups, so their columns can be any."""
    lines = {"scales": q.scales, "offsets": q.offsets}
    wanted = q.scheme.scale_shape(q.stored_shape)[:-1]
    for name, part in lines.items():
        if part is not None and tuple(part.shape[:-1]) != wanted:
            _refuse(q, name, f"of shape {(*wanted, ...)}", tuple(part.shape))
    if q.groups is not None and tuple(q.groups.shape) != q.stored_shape[-1:]:
        _refuse(q, "groups", f"of shape {q.stored_shape[-1:]}", tuple(q.groups.shape))


def _check_shard(q: QTensor, whole: tuple[int, ...]) -> None:
    """What shard_map cut inside a block can have as many scales as it has blocks, but others'."""
    rank = min(len(whole), q.ndim)  # blocks are of trailing axes; scan and vmap take leading ones
    whole, here = whole[len(whole) - rank :], q.stored_shape[q.ndim - rank :]
    for axis, (extent, piece) in enumerate(zip(whole, here, strict=True)):
        if not 0 < piece < extent or (extent % piece and axis < rank - 1):
            continue  # not cut, or not by shard_map
        reason = why_not_split(q.scheme, whole, axis, extent // piece)
        if reason is None and extent % piece:
            reason = f"{extent} elements are no multiple of {piece}"
        if reason is not None:
            wanted = f"split at edges of blocks and words along stored axis {axis} of {whole}"
            _refuse(q, "data", wanted, f"{piece} of {extent} elements: {reason}")


def _refuse_apart(q: QTensor, apart: tuple[str, Any, Any]) -> None:
    part, split, of_codes = apart
    wanted = f"split over devices as its codes are, {PartitionSpec(*of_codes)}"
    _refuse(q, part, wanted, PartitionSpec(*split))


def _refuse(q: QTensor, part: str, wanted: str, got: Any) -> None:
    raise InvalidTensor(part=part, scheme=str(q.scheme), shape=q.shape, wanted=wanted, got=got)


# -- in files of jax.export -------------------------------------------------------------------


def _as_bytes(described: Static) -> bytes:
    # Extents that are symbols follow from leaves: 0 stands for them.
    known = (
        vars(described)
        | {"scheme": described.scheme.to_json()}
        | dict.fromkeys(("whole", "astray"))
    )
    return json.dumps(known, default=lambda _: 0).encode()


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
