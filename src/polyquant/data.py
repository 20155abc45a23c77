"""The host form of a quantized tensor: one run of bytes, a shape and a scheme.

``bytes = codes | scales | tensor scale (f32) | offsets | table (f32) | groups (i32)``,
little-endian, no padding in between. Scales that are quantized themselves stand there as their own
such run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar, NamedTuple

import ml_dtypes
import numpy as np

from polyquant.arrays import HostArray
from polyquant.codec import line_size_bytes
from polyquant.errors import CorruptData, DataLength, InvalidArgument, InvalidAxes
from polyquant.scheme import QuantScheme
from polyquant.tables import check_table
from polyquant.values import QuantMode, QuantValue, ScaleDtype


class Part(NamedTuple):
    """One stored array: its dotted name ("data", "scales", "scales.table", ...), dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    scheme: QuantScheme

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * host_dtype(self.dtype).itemsize


def host_dtype(name: str) -> np.dtype[np.generic]:
    """The little-endian NumPy dtype of a storage dtype."""
    found: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    return found if name == "bfloat16" else found.newbyteorder("<")


def parts(scheme: QuantScheme, shape: Sequence[int]) -> Iterator[Part]:
    """The stored arrays of a tensor of that scheme and stored shape, in the order of the bytes."""
    laid = scheme.laid(shape) or (1,)
    lines, length = (laid[:-1], laid[-1]) if shape or scheme.view else ((), 1)
    size = line_size_bytes(length, scheme.bits, scheme.store)
    yield Part("data", "uint8", (*lines, size), scheme)
    grid = scheme.scale_shape(shape)
    yield from _grid_parts("scales", scheme.scale, grid, scheme)
    if scheme.tensor_scale is not None:
        yield Part("tensor_scale", "float32", (), scheme)
    if scheme.offset is not None:
        yield from _grid_parts("offsets", scheme.offset.dtype, grid, scheme)
    if scheme.mode is QuantMode.LOOKUP:
        yield Part("table", "float32", (2**scheme.bits,), scheme)
    if scheme.grouped:
        yield Part("groups", "int32", (length,), scheme)


def _grid_parts(
    name: str,
    dtype: ScaleDtype | QuantValue | QuantScheme,
    grid: tuple[int, ...],
    owner: QuantScheme,
) -> Iterator[Part]:
    if isinstance(dtype, QuantScheme):
        for inner in parts(dtype, grid):
            yield inner._replace(name=f"{name}.{inner.name}")
    elif isinstance(dtype, QuantValue):
        yield Part(name, "uint8", grid, owner)
    else:
        yield Part(name, dtype.storage, grid, owner)


def data_size_bytes(scheme: QuantScheme, shape: Sequence[int]) -> int:
    """The exact length of the bytes of a tensor of that scheme and stored shape."""
    return sum(part.nbytes for part in parts(scheme, shape))


@dataclass(frozen=True)
class TensorData:
    """What is saved, sent and compared: equal tensors have equal ``TensorData``.

    ``shape`` is the logical shape; logical axis ``i`` is stored axis ``axes[i]`` (left out: in
    order), and the bytes are those of the stored order. Raises InvalidArgument, InvalidAxes or
    DataLength when made of parts that disagree.
    """

    bytes: bytes
    shape: tuple[int, ...]
    scheme: QuantScheme
    axes: tuple[int, ...] = ()

    #: NumPy would compare element by element, and with what is no array.
    __array_ufunc__: ClassVar[None] = None

    def __post_init__(self) -> None:
        if isinstance(self.axes, tuple) and not self.axes and isinstance(self.shape, tuple):
            object.__setattr__(self, "axes", tuple(range(len(self.shape))))
        check_description(self.scheme, self.shape, self.axes)
        if not isinstance(self.bytes, bytes | bytearray | memoryview):
            raise InvalidArgument(name="bytes", wanted="bytes", got=self.bytes)
        wanted = data_size_bytes(self.scheme, self.stored_shape)
        if len(self.bytes) != wanted:
            raise DataLength(
                what="TensorData",
                scheme=str(self.scheme),
                shape=self.shape,
                wanted=wanted,
                got=len(self.bytes),
            )

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the order of the stored axes."""
        return stored_shape(self.shape, self.axes)

    def parts(self) -> dict[str, HostArray]:
        """The stored arrays by name, as read-only views of the bytes."""
        found, at, whole = {}, 0, memoryview(self.bytes).toreadonly()
        for part in parts(self.scheme, self.stored_shape):
            run = whole[at : at + part.nbytes]
            found[part.name] = np.frombuffer(run, host_dtype(part.dtype)).reshape(part.shape)
            at += part.nbytes
        return found


def join(arrays: Mapping[str, HostArray], scheme: QuantScheme, shape: Sequence[int]) -> bytes:
    """The bytes of a tensor from its stored arrays."""
    return b"".join(
        np.ascontiguousarray(arrays[part.name], dtype=host_dtype(part.dtype)).tobytes()
        for part in parts(scheme, shape)
    )


def stored_shape(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """The stored shape of a tensor whose logical axis ``i`` is stored axis ``axes[i]``."""
    stored = [0] * len(shape)
    for logical, axis in enumerate(axes):
        stored[axis] = shape[logical]
    return tuple(stored)


def check_axes(axes: Sequence[int], shape: Sequence[int]) -> None:
    """Raise InvalidAxes unless ``axes`` is a permutation of the axes of ``shape``."""
    if not all(is_whole(a) for a in axes) or sorted(axes) != list(range(len(shape))):
        raise InvalidAxes(got=tuple(axes), rank=len(shape), shape=tuple(shape))


def check_description(scheme: QuantScheme, shape: Sequence[int], axes: Sequence[int]) -> None:
    """Raise InvalidArgument or InvalidAxes unless these are a scheme, a shape and its axes."""
    if not isinstance(scheme, QuantScheme):
        raise InvalidArgument(name="scheme", wanted="a QuantScheme", got=scheme)
    for name, numbers in (("shape", shape), ("axes", axes)):
        if not isinstance(numbers, Sequence) or not all(is_whole(n) and n >= 0 for n in numbers):
            wanted = "a tuple of whole numbers of at least 0"
            raise InvalidArgument(name=name, wanted=wanted, got=numbers)
    check_axes(axes, shape)


def is_whole(number: object) -> bool:
    """Whether this is an integer of Python's or NumPy's; a bool is not."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def check_numbers(
    arrays: Mapping[str, HostArray], scheme: QuantScheme, shape: Sequence[int]
) -> None:
    """Raise CorruptData or a table error where stored numbers cannot be what they claim.

    Scales, offsets and tensor scales must be finite; a named table must hold its own entries;
    groups must exist.
    """
    for part in parts(scheme, shape):
        array, kind = arrays[part.name], part.name.rpartition(".")[2]
        if kind == "table":
            check_table(array, str(part.scheme.table), part.scheme.bits)
        elif kind in ("scales", "tensor_scale", "offsets"):
            _check_finite(array, part, kind)
        elif kind == "groups":
            count = part.scheme.scale_shape(shape)[-1]
            bad = (array < 0) | (array >= count)
            if bad.any():
                reason = f"{int(bad.sum())} of its elements are in no group of the {count}"
                raise CorruptData(what=part.name, reason=reason)


def _check_finite(array: HostArray, part: Part, kind: str) -> None:
    if part.dtype == "uint8":
        if kind == "offsets":
            return
        limit = 0xFE if part.scheme.scale is ScaleDtype.UE8M0 else 0x7E
        bad = array > limit
    else:
        bad = ~np.isfinite(array.astype(np.float32))
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        reason = f"{int(bad.sum())} of its numbers are NaN or infinite, the first at {index}"
        raise CorruptData(what=part.name, reason=reason)
