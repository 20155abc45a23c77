"""The quantized tensor: stored arrays of one library, a scheme, and an order of axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from polyquant.arrays import (
    Array,
    are_one_place,
    backend_of,
    backend_of_device,
    dtype,
    dtype_name,
    find_backend,
    namespace,
)
from polyquant.codec import unpack
from polyquant.data import (
    TensorData,
    check_axes,
    check_description,
    check_numbers,
    host_dtype,
    join,
    stored_shape,
)
from polyquant.data import parts as stored_parts
from polyquant.errors import Immutable, InvalidArgument, InvalidTensor
from polyquant.methods import ComputeMethods, LayoutMethods, Protocols, operations
from polyquant.scheme import QuantScheme
from polyquant.values import QuantMode

_FIELDS = (
    "scheme",
    "shape",
    "data",
    "scales",
    "tensor_scale",
    "offsets",
    "table",
    "axes",
    "device",
    "groups",
)


class QTensor(LayoutMethods, ComputeMethods, Protocols):
    """A quantized tensor: ``x[i] ~ decode(code[i]) * scale[block(i)]``, immutable.

    Invariants, which ``validate`` checks line by line:

    1. ``axes`` is a permutation: logical axis ``i`` is stored axis ``axes[i]``. ``stored_shape`` is
       ``shape`` in stored order, and the scheme's blocks are aligned to the stored axes.
    2. ``data`` is uint8 of shape ``laid[:-1] + (line bytes,)``, the packed codes; ``laid`` is
       ``stored_shape``, or the scheme's view of it.
    3. ``scales`` is an array of the scheme's scale type (8-bit types as uint8) on the grid
       ``scheme.scale_shape(stored_shape)``, or a QTensor of the scheme's scale scheme.
    4. ``tensor_scale`` is float32 of shape ``()`` where the scheme has two levels, else None.
    5. ``offsets`` is like ``scales``, with integer zero points as uint8, else None.
    6. ``table`` is float32 of shape ``(2**bits,)`` in mode lookup, else None.
    7. ``groups`` is int32, one for each element of the last stored axis, where the scheme is
       grouped, else None: which of the grid's columns holds its scale and offset.
    8. All of these are arrays of the library, and on the device, that ``device`` names.
    """

    # Three are kept once they were asked for: what products are remembered by, mT, and what a
    # kernel prepared. The last checks a tensor that a library put together: see ``checked``.
    __slots__ = (*_FIELDS, "__weakref__", "_kind", "_prepared", "_turned", "_unchecked")

    scheme: QuantScheme
    shape: tuple[int, ...]
    data: Array
    scales: Array
    tensor_scale: Array | None
    offsets: Array | None
    table: Array | None
    axes: tuple[int, ...]
    device: str
    groups: Array | None
    _kind: object | None
    _turned: QTensor | None
    _prepared: object | None
    _unchecked: Any  # None, or what says whether it could be checked

    def __init__(
        self,
        scheme: QuantScheme,
        shape: Sequence[int],
        data: Array,
        scales: Array,
        *,
        tensor_scale: Array | None = None,
        offsets: Array | None = None,
        table: Array | None = None,
        groups: Array | None = None,
        axes: Sequence[int] | None = None,
        device: str,
    ) -> None:
        given_axes = _in_order(shape) if axes is None else axes
        check_description(scheme, shape, given_axes)  # 1
        if not isinstance(device, str):
            raise InvalidArgument(name="device", wanted="a device's name", got=device)
        grids = (data, scales, tensor_scale, offsets, table)
        given = (scheme, tuple(shape), *grids, tuple(given_axes), device, groups)
        _fill(self, given)
        validate(self)

    # -- facts --------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        total = 1
        for extent in self.shape:
            total *= extent
        return total

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the order in which the codes are stored."""
        return stored_shape(self.shape, self.axes)

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored: codes, scales, offsets, table."""
        if self.is_stack:
            return sum(prod(part.shape) * part.dtype.itemsize for part in self.parts().values())
        return sum(part.nbytes for part in stored_parts(self.scheme, self.stored_shape))

    @property
    def bits_per_element(self) -> float:
        """Stored bits, scales and all, over the number of elements (0 of an empty tensor)."""
        return 8 * self.nbytes / self.size if self.size else 0.0

    @property
    def is_stack(self) -> bool:
        """Whether this is several tensors side by side, each with stored arrays of its own.

        ``jax.vmap`` and ``jax.lax.scan`` take and return such: every array has a leading axis,
        the table and the tensor scale too, which no scheme has.
        """
        scales, offsets, view = self.scales, self.offsets, self.scheme.view
        return (
            _rank(self.table) > 1
            or _rank(self.tensor_scale) > 0
            or _rank(self.groups) > 1
            or _rank(self.data) > (max(1, len(self.shape)) if view is None else len(view))
            or (self.scheme.block is None and getattr(scales, "shape", ())[:1] not in ((), (1,)))
            or (isinstance(scales, QTensor) and scales.is_stack)
            or (isinstance(offsets, QTensor) and offsets.is_stack)
        )

    @property
    def requires_grad(self) -> bool:
        """Whether autograd tracks the scales, the offsets or the table. Codes have no gradient."""
        whole, offsets, table = self.tensor_scale, self.offsets, self.table
        return (  # asked at every product, so without a loop
            getattr(self.scales, "requires_grad", False)
            or (whole is not None and getattr(whole, "requires_grad", False))
            or (offsets is not None and getattr(offsets, "requires_grad", False))
            or (table is not None and getattr(table, "requires_grad", False))
        )

    def __repr__(self) -> str:
        identity = self.axes == tuple(range(self.ndim))
        order = "" if identity else f", axes={self.axes}"
        return (
            f"QTensor({str(self.scheme)!r}, shape={self.shape}, device={self.device!r}{order}, "
            f"{self.nbytes:,} bytes, {self.bits_per_element:.2f} bits/element)"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a QTensor without axes: its number is .dequantize()")
        return self.shape[0]

    # -- parts --------------------------------------------------------------------------------

    def codes(self) -> Array:
        """The codes, one an element, in logical order.

        int8 for signed integers; uint8 for unsigned integers, minifloat bits and table indices.
        """
        checked(self)
        scheme, stored = self.scheme, self.stored_shape
        xp = namespace(self.data)
        length = (scheme.laid(stored) or (1,))[-1]
        fields = unpack(xp, self.data, length, scheme.value, scheme.store)
        if not scheme.value.is_float and scheme.value.is_signed:
            sign = 2 ** (scheme.bits - 1)
            wide = xp.astype(fields, xp.int16)
            fields = xp.astype((wide ^ sign) - sign, xp.int8)
        return self.to_logical(xp.reshape(fields, stored))

    def to_logical(self, array: Array) -> Array:
        """An array in stored order as a view in logical order."""
        if self.axes == tuple(range(self.ndim)):
            return array
        return namespace(array).permute_dims(array, self.axes)

    def parts(self) -> dict[str, Array]:
        """The stored arrays by dotted name ("data", "scales", "scales.table", ...)."""
        return dict(_walk(self, ""))

    # -- other devices, other forms -----------------------------------------------------------

    def to(self, device: str) -> QTensor:
        """The same bits on another device or in another library ("numpy", "torch:cuda:0", ...).

        Memory is shared where the libraries can share it (JAX takes over what begins at a multiple
        of 64 bytes); a copy in another library is not tracked by autograd. Raises UnknownDevice,
        BackendMissing, UnsupportedArray (no values to be read).
        """
        checked(self)
        target, device = backend_of_device(device)
        if device == self.device:
            return self
        source = backend_of(self.data)
        if source is target:
            return self._map(lambda array: target.move(array, device), device)
        wanted = {part.name: part.dtype for part in stored_parts(self.scheme, self.stored_shape)}
        adopted = target.adopted if source.adopted and are_one_place(self.device, device) else None

        def sent(name: str, array: Array) -> Array:
            if adopted is not None and not source.is_traced(array):
                made = adopted(array)
                if made is not None:
                    return made
            # A bare standard library holds 16-bit floats in float32; elsewhere they are themselves.
            host = source.to_host(array).astype(host_dtype(wanted[name]), copy=False)
            return target.from_host(host, device)

        there = {name: sent(name, array) for name, array in self.parts().items()}
        return from_parts(there, self.scheme, self.shape, axes=self.axes, device=device)

    def to_data(self) -> TensorData:
        """The host form, which compares equal for equal tensors of any library."""
        host = self.to("numpy").parts()
        whole = join(host, self.scheme, self.stored_shape)
        return TensorData(whole, self.shape, self.scheme, self.axes)

    def dequantize(self, dtype: Any = None) -> Array:
        """The values as an array of the same library and device, in logical order.

        Args:
            dtype: "float32" (the default), "float16", "bfloat16", "float64" or the library's own.

        Raises UnsupportedDtype.
        """
        return operations().dequantize(self, dtype)

    def detach(self) -> QTensor:
        """The tensor without gradients of its scales, offsets or table. Codes have none."""

        def detached(a: Array) -> Array:  # torch.compile reads this, and no backends
            return a.detach() if hasattr(a, "detach") else backend_of(a).detach(a)

        return self._map(detached, self.device)

    def __setattr__(self, name: str, value: Any) -> None:
        raise Immutable(name=name)

    def __delattr__(self, name: str) -> None:
        raise Immutable(name=name)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise Immutable(name="q[...]")

    def __reduce__(self) -> tuple[Any, ...]:
        checked(self)
        return from_fields, tuple(getattr(self, name) for name in _FIELDS)

    # -- making one from another --------------------------------------------------------------

    def _replace(self, **changes: Any) -> QTensor:
        checked(self)
        return from_fields(*(changes.get(name, getattr(self, name)) for name in _FIELDS))

    def _map(self, move: Any, device: str) -> QTensor:
        def moved(part: Any) -> Any:
            if part is None:
                return None
            return part._map(move, device) if isinstance(part, QTensor) else move(part)

        arrays = ("data", "scales", "tensor_scale", "offsets", "table", "groups")
        changes = {name: moved(getattr(self, name)) for name in arrays}
        return self._replace(**changes, device=device)


def _rank(part: Any) -> int:
    """The number of axes of a stored array; 0 of none, and of what JAX puts in an array's place."""
    rank = getattr(part, "ndim", 0)
    return rank if isinstance(rank, int) else 0


def _in_order(shape: Any) -> tuple[int, ...]:
    return tuple(range(len(shape))) if isinstance(shape, Sequence) else ()


def _fill(q: QTensor, fields: Sequence[Any]) -> None:
    for name, item in zip(_FIELDS, fields, strict=True):
        object.__setattr__(q, name, item)
    object.__setattr__(q, "_kind", None)
    object.__setattr__(q, "_turned", None)
    object.__setattr__(q, "_prepared", None)
    object.__setattr__(q, "_unchecked", None)


def from_fields(*fields: Any) -> QTensor:
    """A QTensor of fields that are known to satisfy the invariants (a view, a copy, a pickle).

    Groups, the last, may be left out.
    """
    made = QTensor.__new__(QTensor)
    _fill(made, fields if len(fields) == len(_FIELDS) else (*fields, None))
    return made


def kind_of(q: QTensor) -> object:
    """One object for all tensors of this scheme, shape, order of axes and device.

    It is hashed by identity, so it is a cheap key to remember an answer by.
    """
    if q._kind is None:
        checked(q)
        object.__setattr__(q, "_kind", _kind(q.scheme, q.shape, q.axes, q.device))
    return q._kind


@lru_cache(maxsize=4096)  # of one that was forgotten, another is made: answers are found anew
def _kind(*facts: Any) -> object:
    return object()


def _walk(q: QTensor, prefix: str) -> Iterator[tuple[str, Array]]:
    for name in ("data", "scales", "tensor_scale", "offsets", "table", "groups"):
        part = getattr(q, name)
        if isinstance(part, QTensor):
            yield from _walk(part, f"{prefix}{name}.")
        elif part is not None:
            yield prefix + name, part


def checked(q: QTensor) -> None:
    """Check, once and before its first use, a tensor that a library put together of its leaves.

    Libraries also put placeholders there, which stay unchecked. Raises InvalidTensor.
    """
    if q._unchecked is not None and q._unchecked(q):
        object.__setattr__(q, "_unchecked", None)


def validate(q: QTensor) -> None:
    """Check the invariants of QTensor's docstring; raises InvalidTensor, InvalidAxes, BlockRank."""
    check_axes(q.axes, q.shape)  # 1
    offset = None if q.scheme.offset is None else q.scheme.offset.dtype
    _validate_nested(q, "scales", q.scales, q.scheme.scale)
    _validate_nested(q, "offsets", q.offsets, offset)
    arrays = q.parts()
    wanted = {part.name: part for part in stored_parts(q.scheme, q.stored_shape)}
    for name in (*wanted, *arrays):  # 2-7
        if name not in arrays or name not in wanted:
            needed = "an array" if name in wanted else "left out: the scheme has none"
            _refuse(q, name, needed, "nothing" if name in wanted else "an array")
        _validate_part(q, name, arrays[name], wanted[name].dtype, wanted[name].shape)


def _validate_nested(q: QTensor, name: str, part: Any, wanted: Any) -> None:
    """A part that is quantized itself has the scheme that is asked for, in stored order."""
    if not isinstance(part, QTensor) or not isinstance(wanted, QuantScheme):
        return  # an array here or a tensor there shows in the names of the parts
    if part.scheme != wanted or part.axes != tuple(range(part.ndim)):
        _refuse(q, name, f"a {wanted} QTensor in stored order", repr(part))


def _validate_part(q: QTensor, name: str, array: Array, kind: str, shape: tuple[int, ...]) -> None:
    owner = find_backend(array)
    if owner is None or (not owner.is_traced(array) and owner.device_of(array) != q.device):  # 8
        got = f"{type(array).__name__}" if owner is None else f"on {owner.device_of(array)}"
        _refuse(q, name, f"an array on {q.device}", got)
    if tuple(array.shape) != shape:
        _refuse(q, name, f"of shape {shape}", tuple(array.shape))
    xp = namespace(array)
    if array.dtype != dtype(xp, kind):
        _refuse(q, name, kind, dtype_name(array))


def _refuse(q: QTensor, part: str, wanted: str, got: Any) -> None:
    raise InvalidTensor(part=part, scheme=str(q.scheme), shape=q.shape, wanted=wanted, got=got)


def from_parts(
    arrays: Mapping[str, Array],
    scheme: QuantScheme,
    shape: Sequence[int],
    *,
    axes: Sequence[int] | None = None,
    device: str,
) -> QTensor:
    """A QTensor from its stored arrays by dotted name. Raises what ``validate`` raises."""

    def nested(name: str, inner: Any, grid: Sequence[int]) -> Any:
        if not isinstance(inner, QuantScheme):
            return arrays.get(name)
        prefix = f"{name}."
        below = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        return from_parts(below, inner, grid, device=device)

    order = tuple(range(len(shape))) if axes is None else tuple(axes)
    check_axes(order, shape)
    grid = scheme.scale_shape(stored_shape(shape, order))
    return QTensor(
        scheme,
        shape,
        arrays.get("data"),
        nested("scales", scheme.scale, grid),
        tensor_scale=arrays.get("tensor_scale"),
        offsets=None if scheme.offset is None else nested("offsets", scheme.offset.dtype, grid),
        table=arrays.get("table") if scheme.mode is QuantMode.LOOKUP else None,
        groups=arrays.get("groups"),
        axes=order,
        device=device,
    )


def from_data(data: TensorData, device: str = "numpy") -> QTensor:
    """The tensor of a host form, on a device.

    Raises CorruptData (NaN or infinite scales), TableMismatch, TableInvalid, UnknownDevice.
    """
    if not isinstance(data, TensorData):
        wanted = "a TensorData, such as q.to_data() gives"
        raise InvalidArgument(name="data", wanted=wanted, got=data)
    target, device = backend_of_device(device)
    arrays = data.parts()
    check_numbers(arrays, data.scheme, data.stored_shape)
    there = {name: target.from_host(array, device) for name, array in arrays.items()}
    return from_parts(there, data.scheme, data.shape, axes=data.axes, device=device)
