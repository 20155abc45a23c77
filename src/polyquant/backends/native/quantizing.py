"""From arrays to quantized tensors, bit for bit as the definition has it.

Where each block lies in one line and its scale is a number of its own, one pass over a line finds
the scales and writes the codes. Elsewhere one pass finds the ranges of the blocks, the definition
makes stored scales of them, and a second pass writes the codes.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from polyquant import calibrate, standard
from polyquant.arrays import Array, Backend, HostArray, backend_of, device_kind, dtype_name
from polyquant.backends.native.compiled import compiled, missing
from polyquant.backends.native.weights import (
    number_of,
    numbers_of,
    plain,
    plain_input,
    threads_for,
)
from polyquant.calibrate.host import F64
from polyquant.calibrate.mse import mse
from polyquant.calibrate.ranges import absmean
from polyquant.codec import line_size_bytes
from polyquant.qtensor import QTensor, from_fields
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.scheme import scheme as as_scheme
from polyquant.standard import Params
from polyquant.tables import CUSTOM, named_table, steps
from polyquant.values import QuantMode, QuantStore, QuantValue, ScaleDtype, host_float

_LONGEST_BLOCK = 1 << 16  # numbers held at a time
_INTEGER, _MINIFLOAT, _TABLE = range(3)  # Code in native/encode.h
_OFFSETS = (None, OffsetKind.ZERO_POINT, OffsetKind.BIAS)


def quantize(
    x: Array,
    scheme: QuantScheme,
    calibration: str,
    *,
    params: Params | None = None,
    table: Array | None = None,
    nonfinite: str = "raise",
) -> QTensor:
    """Quantize ``x`` (stored order): calibrate unless ``params`` are given, then encode."""
    shape = tuple(x.shape)
    if not prod(shape):  # nothing to write
        return calibrate.quantize(
            x, scheme, calibration, params=params, table=table, nonfinite=nonfinite
        )
    owner = backend_of(x)
    coder, entries = _coder_of(scheme, table, owner)
    is_minmax = params is None and calibration == "minmax"
    if is_minmax and nonfinite == "raise" and _layout(scheme, shape).takes_one_pass:
        data, scales = _in_one_pass(x, scheme, coder, entries)
        params = Params(_back(scales, owner, x), None, None, table)
    else:
        if is_minmax:
            params = _minmax(x, scheme, entries, nonfinite, owner, table)
        elif params is None:
            params = _calibrated(x, scheme, calibration, table, nonfinite)
        data = _encoded(x, scheme, coder, _on_host(params, owner), nonfinite)
    axes = tuple(range(x.ndim))
    grids = (params.scales, params.tensor_scale, params.offsets, params.table)
    return from_fields(scheme, shape, _back(data, owner, x), *grids, axes, owner.device_of(x))


@lru_cache(maxsize=256)
def rounding(scheme: QuantScheme, length: int) -> tuple[Any, int, float] | None:
    """A coder, block and range by which a product quantizes rows of a length; None if it cannot."""
    layout = _layout(scheme, (1, length))
    is_integer = scheme.mode is QuantMode.SYMMETRIC and not scheme.value.is_float
    if not is_integer or not layout.takes_one_pass or scheme.scale is not ScaleDtype.F32:
        return None
    return _coder(scheme), layout.block[-1], layout.half_range


def all_finite(x: Array, owner: Backend) -> bool | None:
    """Whether every number is finite; None where the compiled part cannot say."""
    if missing() is not None or dtype_name(x) == "float64":
        return None
    is_here = device_kind(owner.device_of(x)) == "cpu" and hasattr(x, "reshape")
    if owner.name == "jax" and is_here and not owner.is_transformed(x):
        x = owner.to_host(x)  # the same memory
    elif not is_here or owner.name not in ("numpy", "torch"):
        return None
    return bool(compiled().all_finite(_lines(x), threads_for(x)))


# -- scales -----------------------------------------------------------------------------------


def _in_one_pass(
    x: Array, scheme: QuantScheme, coder: Any, entries: HostArray | None
) -> tuple[HostArray, HostArray]:
    layout = _layout(scheme, tuple(x.shape))
    data, scales = np.empty(layout.data, np.uint8), np.empty(layout.grid, layout.scale)
    spread = layout.half_range if entries is None else float(np.abs(entries).max())
    how = (layout.shape, layout.block, number_of(scheme.scale), spread, threads_for(x))
    coder.quantize(_lines(x), data, plain(scales), *how)
    return data, scales


def _minmax(
    x: Array,
    scheme: QuantScheme,
    entries: HostArray | None,
    nonfinite: str,
    owner: Backend,
    table: Array | None,
) -> Params:
    """The definition's parameters of the ranges of the blocks."""
    layout = _layout(scheme, tuple(x.shape))
    high = np.empty(layout.grid, np.float32)
    low = None if scheme.offset is None else np.empty(layout.grid, np.float32)
    how = (low, high, nonfinite == "saturate", threads_for(x))
    compiled().ranges(_lines(x), layout.shape, layout.block, *how)
    if low is None:
        bottom, top = -high, high
    else:
        # Empty blocks, and zeros of either sign, as the definition has them.
        bottom = np.where(np.isfinite(low), low, np.float32(0))
        top = np.where(np.isfinite(high), high, np.float32(0))
        bottom, top = standard.widen(scheme, bottom, top)
    ideal = standard.ideal_scale(scheme, bottom, top, entries)
    found = standard.params_of(scheme, ideal, bottom, entries)
    moved = [_there(part, owner, x) for part in found[:3]]
    return Params(moved[0], moved[1], moved[2], table)


def _calibrated(
    x: Array, scheme: QuantScheme, calibration: str, table: Array | None, nonfinite: str
) -> Params:
    """The definition's calibration, with the sums over blocks that lie in one line made here."""
    name, argument = calibrate.check(calibration, scheme)
    given = (x, scheme, table, nonfinite, argument)
    if (
        dtype_name(x) != "float64"
        and not scheme.extras
        and _layout(scheme, tuple(x.shape)).is_in_lines
    ):
        if name == "mse":
            return mse(*given, squared_error=_squared_error)
        if name == "absmean":
            return absmean(*given, magnitudes=_magnitudes)
    return calibrate.METHODS[name][0](*given)


def _squared_error(x: HostArray, scheme: QuantScheme, params: Params, nonfinite: str) -> F64:
    coder, entries = _coder_of(scheme, params.table, backend_of(x))
    numbers = np.resize(numbers_of(scheme.value) if entries is None else entries, 256)
    return _block_sums(x, scheme, coder, nonfinite, numbers.astype(np.float32), params)


def _magnitudes(x: HostArray, scheme: QuantScheme, nonfinite: str) -> F64:
    # The codes do not matter, so that any coder will do.
    return _block_sums(x, scheme, _coder(as_scheme("q8s")), nonfinite, None, None)


def _block_sums(
    x: HostArray,
    scheme: QuantScheme,
    coder: Any,
    nonfinite: str,
    numbers: Any,
    params: Params | None,
) -> F64:
    layout = _layout(scheme, tuple(x.shape))
    out = np.empty(layout.grid)
    grids = (None, None, None) if params is None else _grids(scheme, params)
    how = (numbers, *grids, nonfinite == "saturate", threads_for(x))
    coder.block_sums(_lines(x), out, layout.shape, layout.block, *how)
    return out


def _there(part: Any, owner: Backend, x: Array) -> Any:
    if part is None:
        return None
    device = owner.device_of(x)
    return (
        part.to(device) if isinstance(part, QTensor) else owner.from_host(np.asarray(part), device)
    )


def _on_host(params: Params, owner: Backend) -> Params:
    def host(part: Any) -> Any:
        if part is None:
            return None
        return part.to("numpy") if isinstance(part, QTensor) else owner.to_host(part)

    return Params(*(host(part) for part in params))


# -- codes ------------------------------------------------------------------------------------


def _encoded(
    x: Array, scheme: QuantScheme, coder: Any, params: Params, nonfinite: str
) -> HostArray:
    layout = _layout(scheme, tuple(x.shape))
    data = np.empty(layout.data, np.uint8)
    how = (*_grids(scheme, params), nonfinite == "saturate", threads_for(x))
    coder.encode(_lines(x), data, layout.shape, layout.block, *how)
    return data


def _grids(scheme: QuantScheme, params: Params) -> tuple[Any, Any, Any]:
    """The divisors of all blocks, their halves (see standard.Divisor) and the offsets."""
    scale = standard.divisor(scheme, params)
    offsets = None if params.offsets is None else standard.offset_numbers(params.offsets)
    return _flat(scale.value), _flat(scale.half), _flat(offsets)


def _flat(grid: Any) -> Any:
    return None if grid is None else np.ascontiguousarray(grid, np.float32).reshape(-1)


def _coder_of(
    scheme: QuantScheme, table: Array | None, owner: Backend
) -> tuple[Any, HostArray | None]:
    """What writes the codes of a scheme, and the entries of its table."""
    if scheme.mode is not QuantMode.LOOKUP or table is None:
        return _coder(scheme), None
    if scheme.table != CUSTOM:
        return _coder(scheme), named_table(str(scheme.table))
    host = owner.to_host(table)
    return _new_coder(scheme, host), host


@lru_cache(maxsize=256)
def _coder(scheme: QuantScheme) -> Any:
    is_lookup = scheme.mode is QuantMode.LOOKUP
    return _new_coder(scheme, named_table(str(scheme.table)) if is_lookup else None)


def _new_coder(scheme: QuantScheme, entries: HostArray | None) -> Any:
    value = scheme.value
    is_native = scheme.store is QuantStore.NATIVE
    found = None if entries is None else steps(entries)
    code = _TABLE if found else _MINIFLOAT if value.is_float else _INTEGER
    exponent_bits, mantissa_bits = (int(value[1]), int(value[3])) if value.is_float else (1, 0)
    offset = scheme.offset
    return compiled().Coder(
        code=code,
        value_bits=value.bits,
        store_bits=8 if is_native else value.bits,
        extends_sign=is_native and code == _INTEGER and value.is_signed and value.bits < 8,
        low=value.range[0],
        high=value.range[1],
        mantissa_bits=mantissa_bits,
        bias=2 ** (exponent_bits - 1) - 1,
        midpoints=found.midpoints.tolist() if found else [],
        codes=found.codes.tolist() if found else [],
        offset_kind=_OFFSETS.index(None if offset is None else offset.kind),
        rounds_first=offset is not None and isinstance(offset.dtype, QuantValue),
    )


# -- shapes -----------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """What follows from a scheme and the shape of what is quantized."""

    shape: tuple[int, ...]  # at least one axis
    block: tuple[int, ...]
    data: tuple[int, ...]
    grid: tuple[int, ...]
    scale: Any  # NumPy's dtype of the scales, where they are numbers
    half_range: float  # of the value type
    is_in_lines: bool  # each block lies in one line, and is not too long to hold
    takes_one_pass: bool


@lru_cache(maxsize=1024)
def _layout(scheme: QuantScheme, shape: tuple[int, ...]) -> _Layout:
    block = scheme.block_extents(shape) or (1,)
    size = line_size_bytes(shape[-1] if shape else 1, scheme.bits, scheme.store)
    in_lines = all(extent == 1 for extent in block[:-1]) and block[-1] <= _LONGEST_BLOCK
    kind = scheme.scale
    is_number = isinstance(kind, ScaleDtype)
    is_plain = is_number and scheme.offset is None and scheme.tensor_scale is None
    return _Layout(
        shape or (1,),
        block,
        (*shape[:-1], size),
        scheme.scale_shape(shape),
        stored_dtype(kind) if isinstance(kind, ScaleDtype) else None,
        scheme.value.half_range,
        in_lines,
        in_lines and is_plain,
    )


def stored_dtype(kind: ScaleDtype) -> Any:
    """NumPy's dtype of stored scales."""
    return np.dtype(np.uint8) if kind.storage == "uint8" else host_float(kind)


def _lines(x: Array) -> Any:
    """A row for every line: a view where the leading axes allow it."""
    if x.ndim != 2:
        length = x.shape[-1] if x.ndim else 1
        x = x.reshape((prod(x.shape[:-1]) if x.ndim else 1, length))
    return plain_input(x)


def _back(array: HostArray, owner: Backend, x: Array) -> Array:
    return owner.from_host(array, owner.device_of(x))
