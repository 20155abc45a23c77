"""A tensor's stored arrays as the compiled part sees them: in place, with nothing copied."""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from polyquant.arrays import Array, Backend, backend_of, find_backend
from polyquant.backends.native.compiled import compiled
from polyquant.qtensor import QTensor
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.tables import CUSTOM, named_table
from polyquant.values import F32, QuantMode, QuantStore, QuantValue, ScaleDtype, decode_table

# The order of the enumerations in native/weight.h.
_TABLE16, _INTEGER, _MINIFLOAT, _TABLE256 = range(4)
_NUMBERS = (ScaleDtype.F32, ScaleDtype.F16, ScaleDtype.BF16, ScaleDtype.UE8M0, ScaleDtype.UE4M3)
_U8 = len(_NUMBERS)
_NESTED = _U8 + 1
_OFFSETS = (None, OffsetKind.ZERO_POINT, OffsetKind.BIAS)


def matrix_of(q: QTensor) -> Any:
    """The compiled view of a tensor's stored arrays, made once."""
    if q._prepared is None:
        object.__setattr__(q, "_prepared", _matrix(q))
    return q._prepared


def _matrix(q: QTensor) -> Any:
    facts = facts_of(q.scheme, q.stored_shape or (1,))
    table = facts.get("table")
    if q.table is not None and table is None:
        table = plain(_in_order(q.table))
    stored = {
        "data": plain(_lines(q.data)),
        "table": table,
        "scales": _grid(q.scales),
        "tensor_scale": None if q.tensor_scale is None else _grid(q.tensor_scale),
        "offsets": None if q.offsets is None else _grid(q.offsets),
    }
    return compiled().Matrix(**(facts | stored))


@lru_cache(maxsize=1024)
def facts_of(scheme: QuantScheme, shape: tuple[int, ...]) -> dict[str, Any]:
    """What the compiled part is told about every tensor of a scheme and a stored shape."""
    kind, table = _kind(scheme)
    offset = None if scheme.offset is None else scheme.offset.kind
    return {
        "shape": shape,
        "block": scheme.block_extents(shape),
        "bits": 8 if scheme.store is QuantStore.NATIVE else scheme.bits,
        "value_bits": scheme.bits,
        "kind": kind,
        "table": table,
        "is_signed": scheme.value.is_signed,
        "minifloat": _minifloat(scheme.value) if kind == _MINIFLOAT else (),
        "scale_number": number_of(scheme.scale),
        "offset_number": number_of(None if scheme.offset is None else scheme.offset.dtype),
        "offset_kind": _OFFSETS.index(offset),
    }


def _kind(scheme: QuantScheme) -> tuple[int, F32 | None]:
    """How a code becomes a number, and the numbers of all codes where the scheme says them."""
    is_small = scheme.bits <= 4
    if scheme.mode is QuantMode.LOOKUP:
        is_named = scheme.table not in (None, CUSTOM)
        entries = named_table(str(scheme.table)).copy() if is_named else None
        return (_TABLE16 if is_small else _TABLE256), entries
    if is_small:
        return _TABLE16, numbers_of(scheme.value).copy()
    return (_MINIFLOAT if scheme.value.is_float else _INTEGER), None


@cache
def numbers_of(value: QuantValue) -> F32:
    """The numbers of all codes of a value."""
    if value.is_float:
        return decode_table(value)
    codes = np.arange(2**value.bits)
    sign = 2 ** (value.bits - 1)
    return ((codes ^ sign) - sign if value.is_signed else codes).astype(np.float32)


def _minifloat(value: QuantValue) -> tuple[int, ...]:
    """Masks and shifts that bring a minifloat's bits to float16's places (see native/weight.h)."""
    exponent_bits, mantissa_bits = int(value[1]), int(value[3])
    sign = 2 ** (value.bits - 1)
    power = 2 ** (15 - (2 ** (exponent_bits - 1) - 1))
    nan = sign - 1 if value is QuantValue.E4M3 else 0
    return sign, sign - 1, 16 - value.bits, 10 - mantissa_bits, power, nan


def number_of(kind: ScaleDtype | QuantValue | QuantScheme | None) -> int:
    if isinstance(kind, ScaleDtype):
        return _NUMBERS.index(kind)
    return _NESTED if isinstance(kind, QuantScheme) else _U8


def _grid(part: Array | QTensor) -> Any:
    return matrix_of(part) if isinstance(part, QTensor) else plain(_in_order(part))


def _in_order(array: Array) -> Array:
    """A small array's numbers side by side: a copy, of a view that has them apart."""
    if isinstance(array, np.ndarray | np.generic):
        return np.ascontiguousarray(array).reshape(array.shape)
    return array.contiguous()


def _lines(data: Array) -> Array:
    """Codes whose lines lie equally far apart, as they do but in a view of some of them."""
    strides = data.strides if isinstance(data, np.ndarray) else data.stride()
    lines = [(n, step) for n, step in zip(data.shape[:-1], strides, strict=False) if n != 1]
    even = all(outer == n * step for (_, outer), (n, step) in pairwise(lines))
    even = even and all(step >= 0 for _, step in lines) and strides[-1] == 1
    return data if even else _in_order(data)


def plain(array: Array, owner: Backend | None = None) -> Any:
    """An array as the compiled part takes it: NumPy's bfloat16 by its bits, nothing tracked."""
    if isinstance(array, np.ndarray):
        return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
    owner = owner or backend_of(array)
    if getattr(array, "requires_grad", False):
        array = array.detach()
    if getattr(array, "is_neg", bool)():
        array = array.resolve_neg()
    return owner.exported(array)


def plain_new(array: Array, owner: Backend) -> Any:
    """The same of an array that was just made."""
    return plain(array) if isinstance(array, np.ndarray) else owner.exported(array)


def plain_input(x: Array, owner: Backend | None = None) -> Any:
    """Activations as the compiled part takes them: any strides, but whole, native numbers."""
    if isinstance(x, np.ndarray) and not (x.flags.aligned and x.dtype.isnative):
        x = x.astype(x.dtype.newbyteorder("="), order="C")
    return plain(x, owner)


def threads_for(like: Array) -> int:
    """How many threads to use: the array's library may have a setting of its own (0: ours)."""
    if isinstance(like, np.ndarray):
        return 0
    owner = find_backend(like)
    return owner.num_threads() if owner is not None else 0
