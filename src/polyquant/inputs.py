"""What the caller hands to quantize, checked: values, table, scales, offsets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polyquant import calibrate, standard
from polyquant.arrays import (
    Array,
    Backend,
    HostArray,
    backend_of,
    constant,
    dtype_name,
    find_backend,
    known,
    namespace,
)
from polyquant.backends.native.quantizing import all_finite
from polyquant.blocks import row_slices
from polyquant.calibrate.kmeans import fit_table
from polyquant.dispatch import check_one_device, check_real
from polyquant.errors import (
    AlreadyQuantized,
    CalibrationRefused,
    InvalidArgument,
    InvalidScale,
    NegativeInput,
    NonFiniteInput,
    ScaleArgument,
    ScaleShape,
    TableLength,
    TableMissing,
    TableSuperfluous,
)
from polyquant.qtensor import QTensor
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.standard import Params
from polyquant.tables import CUSTOM, check_table, named_table
from polyquant.values import TINY, QuantMode, QuantValue, ScaleDtype


def check_float(role: str, x: Any) -> Backend:
    """The backend of a float array. Raises AlreadyQuantized, NotAnArray, NotFloat."""
    if isinstance(x, QTensor):
        raise AlreadyQuantized(role=role, scheme=str(x.scheme))
    owner = backend_of(x, role)
    check_real(role, x, integers=False)
    return owner


def check_nested_tables(scheme: QuantScheme, calibration: str) -> None:
    """Refuse quantized scales or offsets with a table of their own: table= is for the codes."""
    nested = (scheme.scale, None if scheme.offset is None else scheme.offset.dtype)
    for what, inner in zip(("scales", "offsets"), nested, strict=True):
        if isinstance(inner, QuantScheme) and inner.table == CUSTOM:
            reason = f"its {what} look up a table of their own, which none can be given for"
            fix = f"Name a table for the {what}, e.g. dynamic8u"
            facts = {"calibration": calibration, "scheme": str(scheme)}
            raise CalibrationRefused(**facts, reason=reason, fix=fix)


def plain(x: Array, owner: Backend) -> Array:
    """Without autodiff, and without NumPy's subclasses and scalars."""
    if owner.name == "numpy":
        return np.asarray(x)
    return owner.detach(x)


def check_values(x: Array, asked: str | None, owner: Backend) -> str:
    """Refuse NaN and infinity; returns the rule that then holds.

    Where values cannot be looked at it is "saturate", unless another was asked for.
    """
    if owner.is_traced(x):
        if asked == "raise":
            wanted = "'saturate', or left out: x is traced, and has no values to look at"
            raise InvalidArgument(name="nonfinite", wanted=wanted, got=asked)
        return "saturate"
    nonfinite = asked or "raise"
    if nonfinite == "saturate":
        return nonfinite
    if all_finite(x, owner):
        return nonfinite
    xp = namespace(x)
    is_wide = dtype_name(x) == "float64"  # beyond float32's range counts as infinite
    with np.errstate(all="ignore"):
        # Terms of a finite sum are finite: one pass, and one question to the device.
        total = owner.functions.get("total", xp.sum)
        if not is_wide and known(xp.isfinite(total(x, dtype=xp.float32))):
            return nonfinite
        for rows in row_slices(x.shape):
            part = xp.astype(x[rows], xp.float32) if is_wide else x[rows]
            finite = known(xp.all(xp.isfinite(part)))
            if finite is None:
                return "saturate"
            if not finite:
                _refuse_nonfinite(owner.to_host(x))
    return nonfinite


def check_signs(x: Array, scheme: QuantScheme, table: Array | None, owner: Backend) -> None:
    """Refuse negative numbers, where they can be seen, for a scheme that has no codes for them."""
    if owner.is_traced(x) or holds_negatives(scheme, table):
        return
    xp = namespace(x)
    if math.prod(x.shape) and known(xp.min(x) > -TINY):
        return
    for rows in row_slices(x.shape):
        part = xp.astype(x[rows], xp.float32)
        if known(xp.any(part <= -TINY)):  # a subnormal counts as zero
            _refuse_negative(owner.to_host(x), scheme)


def holds_negatives(scheme: QuantScheme, table: Array | None) -> bool:
    """Whether negative values have codes: by a sign, a table or an offset that can be negative."""
    if scheme.mode is QuantMode.LOOKUP:
        if table is None or scheme.table != CUSTOM:
            return bool(named_table(str(scheme.table)).min() < 0)
        return known(namespace(table).any(table < 0)) is not False
    if scheme.offset is None:
        return scheme.value.is_signed
    kind, stored = scheme.offset
    if kind is OffsetKind.BIAS and isinstance(stored, QuantScheme):
        return standard.subtracts(scheme) or holds_negatives(stored, None)
    return True


def _refuse_nonfinite(x: HostArray) -> None:
    bad = ~np.isfinite(x.astype(np.float32))
    raise NonFiniteInput(shape=x.shape, **_first(bad, x))


def _refuse_negative(x: HostArray, scheme: QuantScheme) -> None:
    signed = scheme.with_mode("symmetric").with_value(f"q{max(scheme.bits, 2)}s")
    nearest = str(scheme.with_offset("bias:f16") if scheme.offset else signed)
    facts = _first(x.astype(np.float32) <= -TINY, x)
    raise NegativeInput(scheme=str(scheme), shape=x.shape, nearest=nearest, **facts)


def _first(bad: Any, values: Any) -> dict[str, Any]:
    """Count, first index and value of what is bad."""
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    value = float(str(values[index]))  # the shortest text of its own dtype: 0.1, not 0.1000000015
    return {"count": int(bad.sum()), "index": index, "value": value}


def table_beside(x: Array, scheme: QuantScheme, table: Any, nonfinite: str) -> Array | None:
    """The entries beside ``x``: the named table, the user's, or one fitted to ``x``."""
    if scheme.mode is not QuantMode.LOOKUP:
        if table is not None:
            nearest = str(QuantScheme(f"u{scheme.bits}[{CUSTOM}]", block=scheme.block, scale="f32"))
            reason = f"its mode is {scheme.mode}, not lookup"
            raise TableSuperfluous(scheme=str(scheme), reason=reason, nearest=nearest)
        return None
    if scheme.table != CUSTOM:
        if table is not None:
            nearest = str(scheme.with_value(f"{scheme.value}[{CUSTOM}]"))
            reason = f"it names the table {scheme.table!r}"
            raise TableSuperfluous(scheme=str(scheme), reason=reason, nearest=nearest)
        return standard.named_constant(x, scheme)
    if table is None:
        raise TableMissing(scheme=str(scheme), wanted=2**scheme.bits)
    if isinstance(table, str):
        if table != "kmeans":
            raise InvalidArgument(name="table", wanted="numbers, or 'kmeans'", got=table)
        return constant(x, fit_table(x, scheme, nonfinite))
    source = None if find_backend(table) is None else backend_of(table, "table")
    if source is None:
        return constant(x, check_table(_host_numbers(table, "table"), CUSTOM, scheme.bits))
    if source.name != "numpy":  # host numbers serve any library
        check_one_device("quantize", [("x", x), ("table", table)])
    check_real("table", table, integers=True)
    if source.is_traced(table):
        if tuple(table.shape) != (2**scheme.bits,):
            raise TableLength(wanted=2**scheme.bits, bits=scheme.bits, got=tuple(table.shape))
        return table
    return constant(x, check_table(source.to_host(table), CUSTOM, scheme.bits))


# -- scales of the caller's own ---------------------------------------------------------------


def stored_params(
    x: Array,
    scheme: QuantScheme,
    scales: Any,
    offsets: Any,
    table: Array | None,
    nonfinite: str,
    calibration: str,
) -> Params:
    """Stored parameters from the caller's scales (and offsets)."""
    pair = isinstance(scales, tuple)
    if pair and (scheme.tensor_scale is None or len(scales) != 2):
        reason = "only a scheme of two levels takes a pair, (block scales, tensor scale)"
        raise ScaleArgument(scheme=str(scheme), what="scales", reason=reason)
    if not pair or scheme.grouped:  # two levels of which the rule is unknown need the pair
        calibrate.check("minmax", scheme)
    signed = calibration == "signed_max"
    ideal = _grid_argument(x, scheme, scales[0] if pair else scales, "scales", signed=signed)
    if pair:
        tensor_scale = _tensor_scale_argument(x, scheme, scales[1])
        made = Params(standard.as_stored(ideal, _plain_scale(scheme)), tensor_scale, None, table)
    else:
        stored, tensor_scale = standard.store_scales(ideal, scheme)
        made = Params(stored, tensor_scale, None, table)
    if scheme.offset is None:
        if offsets is not None:
            raise ScaleArgument(scheme=str(scheme), what="offsets", reason="it has no offset")
        return made
    if offsets is None:
        low, _ = standard.value_range(x, scheme, nonfinite=nonfinite)
        return made._replace(
            offsets=standard.store_offsets(scheme, low, standard.divisor(scheme, made), table)
        )
    return made._replace(offsets=_offsets_argument(x, scheme, offsets))


def _plain_scale(scheme: QuantScheme) -> ScaleDtype:
    return ScaleDtype(str(scheme.scale))


def _grid_argument(x: Array, scheme: QuantScheme, given: Any, what: str, *, signed: bool) -> Array:
    """Scales or offsets of the caller's as float32 on the grid, beside ``x``."""
    wanted = scheme.scale_shape(x.shape)
    owner = find_backend(given)
    if owner is None:
        given = constant(x, _host_numbers(given, what))
    else:
        check_one_device("quantize", [("x", x), (what, given)])
        check_real(what, given, integers=what == "offsets")
    xp = namespace(given)
    shape = tuple(given.shape)
    if shape != wanted and not (math.prod(shape) == 1 == math.prod(wanted)):
        facts = {"what": what, "scheme": str(scheme), "shape": tuple(x.shape)}
        raise ScaleShape(**facts, wanted=wanted, got=shape)
    numbers = standard.flush(xp.reshape(xp.astype(given, xp.float32), wanted))
    if not backend_of(numbers).is_traced(numbers):
        _check_numbers(numbers, what, signed=signed)
    return numbers


def _host_numbers(given: Any, what: str) -> HostArray:
    """Plain numbers (one, a list, whatever NumPy makes an array of) as a float32 host array."""
    if isinstance(given, QTensor):
        raise AlreadyQuantized(role=what, scheme=str(given.scheme))
    try:
        found = np.asarray(given)
    except ValueError:  # lists of unequal lengths
        found = np.asarray(None)
    if found.dtype.kind not in "fiu":
        wanted = "real numbers: one, or a list or an array of them"
        raise InvalidArgument(name=what, wanted=wanted, got=given)
    return found.astype(np.float32)


def _check_numbers(numbers: Array, what: str, *, signed: bool) -> None:
    xp = namespace(numbers)
    good = xp.isfinite(numbers)
    if not signed:
        good = good & (numbers >= 0)
    if not bool(xp.all(good)):
        to_host = backend_of(numbers).to_host
        wanted = "finite" if signed else "finite and not negative"
        raise InvalidScale(what=what, wanted=wanted, **_first(~to_host(good), to_host(numbers)))


def _tensor_scale_argument(x: Array, scheme: QuantScheme, given: Any) -> Array:
    owner = find_backend(given)
    if owner is not None:
        check_one_device("quantize", [("x", x), ("tensor scale", given)])
        check_real("the tensor scale", given, integers=False)
    number = given if owner is not None else constant(x, _host_numbers(given, "tensor scale"))
    if math.prod(number.shape) != 1:
        facts = {"what": "the tensor scale", "scheme": str(scheme), "shape": tuple(x.shape)}
        raise ScaleShape(**facts, wanted=(), got=tuple(number.shape))
    xp = namespace(number)
    number = standard.flush(xp.reshape(xp.astype(number, xp.float32), ()))
    if not backend_of(number).is_traced(number):
        _check_numbers(number, "tensor scales", signed=False)
    return number


def _offsets_argument(x: Array, scheme: QuantScheme, given: Any) -> Array:
    numbers = _grid_argument(x, scheme, given, "offsets", signed=True)
    stored = None if scheme.offset is None else scheme.offset.dtype
    xp = namespace(numbers)
    if isinstance(stored, QuantScheme):
        kept = -numbers if standard.subtracts(scheme) else numbers
        check_signs(kept, stored, None, backend_of(numbers))
        return standard.quantize_offsets(numbers, scheme, stored)
    if isinstance(stored, QuantValue):
        top = min(2**stored.bits, 2**scheme.bits) - 1
        good = (numbers == xp.round(numbers)) & (numbers >= 0) & (numbers <= top)
        if not backend_of(numbers).is_traced(numbers) and not bool(xp.all(good)):
            to_host = backend_of(numbers).to_host
            wanted = f"whole numbers from 0 to {top}"
            facts = _first(~to_host(good), to_host(numbers))
            raise InvalidScale(what="offsets", wanted=wanted, **facts)
        return xp.astype(numbers, xp.uint8)
    storage = ScaleDtype(str(stored))
    return standard.nearest(numbers, storage)
