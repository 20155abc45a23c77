"""Between arrays and quantized tensors: quantize and dequantize, every argument checked here."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable
from functools import cache
from typing import Any

import numpy as np

from polyquant import calibrate, standard
from polyquant.arrays import Array, Backend, backend_of, dtype, held_dtypes, known, namespace
from polyquant.dispatch import choose, facts_of, is_transformed, one_operand_problem
from polyquant.errors import (
    DeadBlocksWarning,
    InvalidArgument,
    ScaleArgument,
    UnsupportedDtype,
)
from polyquant.inputs import (
    check_float,
    check_nested_tables,
    check_signs,
    check_values,
    holds_negatives,
    plain,
    stored_params,
    table_beside,
)
from polyquant.kernel import Kernel
from polyquant.ops.compiled import compiled, is_compiling
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme
from polyquant.standard import Params
from polyquant.values import QuantMode, ScaleDtype, grid, scale_grid


def quantize(
    x: Array,
    scheme: QuantScheme | str,
    *,
    calibration: str = "minmax",
    scales: Any = None,
    offsets: Any = None,
    table: Any = None,
    nonfinite: str | None = None,
    kernel: str | None = None,
) -> QTensor:
    """Quantize a float array on its own library and device.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape and layout. The codes are stored in
            the order of its axes, so that blocks run along its last ones. Not changed, and
            detached from any autodiff graph.
        scheme: a QuantScheme, a preset's name or a text form.
        calibration: "minmax", "absmean", "mse", "percentile" ("percentile:99.5"), "signed_max" or
            "mx_floor".
        scales: your own scales instead: ideal or stored ones on ``scheme.scale_shape(x.shape)``
            (a number where that is one), rounded up to the scale type. With two levels, a pair of
            block scales and tensor scale, or ideal scales alone. They may be negative under the
            calibration "signed_max"; any other than it and "minmax" is refused beside them.
        offsets: your own offsets, of the same shape; computed from the values where left out.
        table: the entries of a "custom" lookup table (numbers, a NumPy array, or an array beside
            ``x``), or "kmeans" to fit one to ``x``.
        nonfinite: "raise", or "saturate": infinities go to the ends of the range and NaN to 0.
            Left out, the former; of a traced ``x``, which has no values to look at, the latter.
        kernel: a kernel's name, to use that one or raise.

    Raises:
        NotFloat, AlreadyQuantized, NonFiniteInput, NegativeInput, BlockRank, CalibrationRefused,
        ScaleShape, InvalidScale, TableMissing, TableLength, TableSuperfluous, BackendMismatch, ...
    """
    options = (calibration, scales, offsets, table, nonfinite, kernel)
    if not is_compiling():
        key = (facts_of(x), scheme) if _is_usual(scheme, options) else (None,)
        kept = _looked_at().get(key)
        if kept:
            return _by_plan(x, *kept)
        owner = check_float("x", x)
        x = plain(x, owner)
        if owner.name != "torch" or not owner.is_transformed(x):
            result = quantize_plain(x, scheme, *options)
            if kept is None and key[0] is not None:
                _remember(key, x, result, owner)
            return result
    made: QTensor = compiled().quantize(x, scheme, *options)
    return made


def quantize_plain(
    x: Array,
    scheme: QuantScheme | str,
    calibration: str = "minmax",
    scales: Any = None,
    offsets: Any = None,
    table: Any = None,
    nonfinite: str | None = None,
    kernel: str | None = None,
) -> QTensor:
    """``quantize`` of an array that nothing watches, by the kernels for plain ones."""
    made = as_scheme(scheme)
    owner = check_float("x", x)
    check_kernel_name(kernel)
    made.scale_shape(x.shape)  # raises BlockRank
    is_name = isinstance(nonfinite, str) and nonfinite in ("raise", "saturate")
    if nonfinite is not None and not is_name:
        raise InvalidArgument(name="nonfinite", wanted="'raise' or 'saturate'", got=nonfinite)
    name, argument = (calibration, None)
    if scales is None:
        name, argument = calibrate.check(calibration, made)
    elif not isinstance(name, str) or name not in ("minmax", "signed_max"):
        wanted = "'minmax', or 'signed_max' for scales with a sign, beside scales= of your own"
        raise InvalidArgument(name="calibration", wanted=wanted, got=calibration)
    check_nested_tables(made, name)
    is_watched = owner.name == "jax" and owner.is_transformed(x)
    facts = (x, owner.device_of(x), str(made))
    problem = one_operand_problem("quantize", *facts, transformed=is_watched)
    chosen = choose(owner.name, problem, kernel)
    is_plain = name == "minmax" and scales is None and not isinstance(table, str)
    looks = is_plain and nonfinite != "saturate" and _looks(chosen, x, owner)
    policy = "raise" if looks else check_values(x, nonfinite, owner)
    result: QTensor
    with np.errstate(all="ignore"):
        entries = table_beside(x, made, table, policy)
        if name != "signed_max":  # whose scales have the sign
            check_signs(x, made, entries, owner)
        given = None
        if scales is not None:
            given = stored_params(x, made, scales, offsets, entries, policy, name)
        elif offsets is not None:
            raise ScaleArgument(
                scheme=str(made), what="offsets", reason="offsets= goes with scales= of your own"
            )
        if looks:
            result, may_be_dead = by_ranges(chosen, x, made, entries, owner)
            if not may_be_dead:
                return result
        else:
            method = name if argument is None else f"{name}:{argument}"
            options = {"params": given, "table": entries, "nonfinite": policy}
            result = chosen.run(x, made, method, **options)
        _warn_of_dead_blocks(x, result, policy)
    return result


#: What quantizes an array that was checked: a kernel, the scheme, and whose the array is.
_Plan = tuple[Kernel, QuantScheme, Backend]
_MOST_PLANS = 4096


def _is_usual(scheme: Any, options: tuple[Any, ...]) -> bool:
    is_named = isinstance(scheme, str | QuantScheme) and isinstance(options[0], str)
    return is_named and options[0] == "minmax" and all(each is None for each in options[1:])


@cache
def _looked_at() -> dict[Hashable, _Plan | tuple[()]]:
    """Arrays whose numbers a kernel looks at, by their facts and a scheme; others (). A cache."""
    return {}


def _remember(key: Hashable, x: Array, made: QTensor, owner: Backend) -> None:
    """Keep which kernel quantizes arrays of such facts, if all that is asked of them it sees."""
    problem = one_operand_problem("quantize", x, owner.device_of(x), str(made.scheme))
    kernel = choose(owner.name, problem)
    if len(_looked_at()) >= _MOST_PLANS:
        _looked_at().clear()
    sees_all = kernel.looks is not None and holds_negatives(made.scheme, None)
    _looked_at()[key] = (kernel, made.scheme, owner) if sees_all else ()


def _by_plan(x: Array, kernel: Kernel, scheme: QuantScheme, owner: Backend) -> QTensor:
    q, may_be_dead = by_ranges(kernel, x, scheme, standard.named_constant(x, scheme), owner)
    if may_be_dead:
        _warn_of_dead_blocks(x, q, "raise")
    return q


def by_ranges(
    kernel: Kernel, x: Array, scheme: QuantScheme, table: Array | None, owner: Backend
) -> tuple[QTensor, bool]:
    """``x`` by "minmax", and whether a block may be dead. Raises NonFiniteInput."""
    if not _looks(kernel, x, owner):
        policy = check_values(x, None, owner)
        with np.errstate(all="ignore"):
            given = {"params": None, "table": table, "nonfinite": policy}
            return kernel.run(x, scheme, "minmax", **given), True
    q, seen = (kernel.looks or kernel.run)(x, scheme, "minmax", table=table)
    if not seen.is_finite:
        check_values(x, None, owner)  # raises, and says where
    return q, seen.may_be_dead


def _looks(kernel: Kernel, x: Array, owner: Backend) -> bool:
    """Whether a kernel sees by itself that values are finite."""
    return kernel.looks is not None and not owner.is_traced(x)


def _warn_of_dead_blocks(x: Array, q: QTensor, nonfinite: str) -> None:
    """Warn where blocks became zero because no scale of their type is small enough."""
    scheme, kind = q.scheme, q.scheme.scale
    narrow = kind in (ScaleDtype.F16, ScaleDtype.UE4M3)
    if not narrow or scheme.tensor_scale is not None or scheme.offset is not None:
        return
    if backend_of(x).is_traced(x):
        return
    xp = namespace(x)
    smallest = float(scale_grid(ScaleDtype(str(kind)))[1])
    if not known(xp.any(q.scales == (smallest if kind is ScaleDtype.F16 else 1))):  # as stored
        return
    scale = standard.divisor(scheme, Params(q.scales, None, None, q.table)).value
    _, alpha = standard.value_range(x, scheme, nonfinite=nonfinite)
    dead = (scale == smallest) & (alpha > 0) & (alpha < 0.5 * smallest * _first_step(q))
    count = int(xp.sum(xp.astype(dead, xp.int32)))
    if count:
        text = (
            f"{count} of the {math.prod(scale.shape)} blocks hold only values too small for the "
            f"{kind} scales of {scheme}, of which {smallest:.3g} is the smallest: they are zero "
            "now. Use a tensor scale, as nvfp4 has, or f32 scales."
        )
        warnings.warn(text, DeadBlocksWarning, stacklevel=4)  # who called quantize


def _first_step(q: QTensor) -> float:
    """The smallest magnitude above zero that a code stands for."""
    if q.scheme.mode is QuantMode.LOOKUP:
        entries = np.abs(backend_of(q.data).to_host(q.table))
        return float(entries[entries > 0].min())
    return float(grid(q.scheme.value)[1]) if q.scheme.value.is_float else 1.0


def check_kernel_name(kernel: Any) -> None:
    """Refuse a kernel= that is no name. Raises InvalidArgument."""
    if kernel is not None and not isinstance(kernel, str):
        raise InvalidArgument(name="kernel", wanted="a kernel's name, or None", got=kernel)


# -- dequantize -------------------------------------------------------------------------------


def dequantize(q: QTensor, kind: Any = None) -> Array:
    """The values of ``q`` as an array: see QTensor.dequantize."""
    if is_compiling():
        return compiled().dequantize(q, kind)
    native = None if kind is None else float_dtype(q.data, kind, "The result of dequantize")
    return decode(q, native, transformed=is_transformed(backend_of(q.data), q))


def decode(q: QTensor, native: Any, *, transformed: bool = False) -> Array:
    """The values in a dtype of the library (None: float32), by default with a plain kernel."""
    owner = backend_of(q.data)
    problem = one_operand_problem("dequantize", q, q.device, transformed=transformed)
    with np.errstate(all="ignore"):
        return choose(owner.name, problem).run(q, native)


def decode_rows(rows: Array, weight: QTensor, native: Any) -> Array:
    """The values of a weight at checked indices along its first axis, in a dtype of the library."""
    owner = backend_of(weight.data)
    watched = is_transformed(owner, weight)
    problem = one_operand_problem("embedding", weight, weight.device, transformed=watched)
    found = choose(owner.name, problem).run(rows, weight, native)
    if isinstance(found, QTensor):
        return decode(found, native, transformed=is_transformed(owner, found))
    return found


def float_dtype(like: Array, kind: Any, what: str) -> Any:
    """The library's own dtype for a name or dtype. Raises UnsupportedDtype."""
    name = kind if isinstance(kind, str) else getattr(kind, "name", None)
    if not isinstance(name, str):
        is_type = isinstance(kind, type)
        name = np.dtype(kind).name if is_type else str(kind).rpartition(".")[2]
    held = held_dtypes(namespace(like))
    if name not in held:
        raise UnsupportedDtype(what=what, dtype=name, known=", ".join(held))
    return dtype(namespace(like), name)
