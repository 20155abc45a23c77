"""The operations: every argument is checked here, once, and then the best kernel runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from polyquant import calibrate, standard
from polyquant.arrays import (
    BACKENDS,
    Array,
    Backend,
    Call,
    HostArray,
    backend_of,
    constant,
    dtype,
    dtype_name,
    find_backend,
    held_dtypes,
    known,
    namespace,
)
from polyquant.blocks import row_slices
from polyquant.calibrate.kmeans import fit_table
from polyquant.dispatch import (
    as_right_operand,
    check_one_device,
    check_product,
    check_real,
    choose,
    matmul_problem,
    one_operand_problem,
)
from polyquant.errors import (
    AlreadyQuantized,
    CalibrationRefused,
    DeadBlocksWarning,
    InvalidArgument,
    InvalidScale,
    NegativeInput,
    NonFiniteInput,
    ScaleArgument,
    ScaleShape,
    ShapeMismatch,
    TableLength,
    TableMissing,
    TableSuperfluous,
    UnsupportedDtype,
    UnsupportedFunction,
)
from polyquant.qtensor import QTensor
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.scheme import scheme as as_scheme
from polyquant.standard import Params
from polyquant.tables import CUSTOM, check_table, named_table
from polyquant.values import TINY, QuantMode, QuantValue, ScaleDtype, grid, scale_grid

_PROTOCOL = "matmul, @, torch.nn.functional.linear"


# -- quantize ---------------------------------------------------------------------------------


def quantize(
    x: Array,
    scheme: QuantScheme | str,
    *,
    calibration: str = "minmax",
    scales: Any = None,
    offsets: Any = None,
    table: Any = None,
    nonfinite: str = "raise",
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
            Under a tracer, which cannot look, always the latter.
        kernel: a kernel's name, to use that one or raise.

    Raises:
        NotFloat, AlreadyQuantized, NonFiniteInput, NegativeInput, BlockRank, CalibrationRefused,
        ScaleShape, InvalidScale, TableMissing, TableLength, TableSuperfluous, BackendMismatch, ...
    """
    made = as_scheme(scheme)
    owner = _check_float("x", x)
    _check_kernel(kernel)
    x = _plain(x, owner)
    made.scale_shape(x.shape)  # raises BlockRank
    if not isinstance(nonfinite, str) or nonfinite not in ("raise", "saturate"):
        raise InvalidArgument(name="nonfinite", wanted="'raise' or 'saturate'", got=nonfinite)
    name, argument = (calibration, None)
    if scales is None:
        name, argument = calibrate.check(calibration, made)
    elif not isinstance(name, str) or name not in ("minmax", "signed_max"):
        wanted = "'minmax', or 'signed_max' for scales with a sign, beside scales= of your own"
        raise InvalidArgument(name="calibration", wanted=wanted, got=calibration)
    _check_nested_tables(made, name)
    policy = _check_values(x, nonfinite, owner)
    with np.errstate(all="ignore"):
        entries = _table(x, made, table, policy)
        if name != "signed_max":  # whose scales have the sign
            _check_signs(x, made, entries, owner)
        given = None
        if scales is not None:
            given = _given(x, made, scales, offsets, entries, policy, name)
        elif offsets is not None:
            raise ScaleArgument(
                scheme=str(made), what="offsets", reason="offsets= goes with scales= of your own"
            )
        problem = one_operand_problem("quantize", x, owner.device_of(x), str(made))
        chosen = choose(owner.name, problem, kernel)
        method = name if argument is None else f"{name}:{argument}"
        result: QTensor = chosen.run(x, made, method, params=given, table=entries, nonfinite=policy)
        _warn_of_dead_blocks(x, result, policy)
    return result


def _warn_of_dead_blocks(x: Array, q: QTensor, nonfinite: str) -> None:
    """Warn where blocks became zero because no scale of their type is small enough."""
    scheme, kind = q.scheme, q.scheme.scale
    narrow = kind in (ScaleDtype.F16, ScaleDtype.UE4M3)
    if not narrow or scheme.tensor_scale is not None or scheme.offset is not None:
        return
    if backend_of(x).is_traced(x):
        return
    xp = namespace(x)
    scale = standard.divisor(scheme, Params(q.scales, None, None, q.table)).value
    smallest = float(scale_grid(ScaleDtype(str(kind)))[1])
    if not known(xp.any(scale == smallest)):
        return
    _, alpha = standard.value_range(x, scheme, nonfinite=nonfinite)
    dead = (scale == smallest) & (alpha > 0) & (alpha < 0.5 * smallest * _first_step(q))
    count = int(xp.sum(xp.astype(dead, xp.int32)))
    if count:
        text = (
            f"{count} of the {math.prod(scale.shape)} blocks hold only values too small for the "
            f"{kind} scales of {scheme}, of which {smallest:.3g} is the smallest: they are zero "
            "now. Use a tensor scale, as nvfp4 has, or f32 scales."
        )
        warnings.warn(text, DeadBlocksWarning, stacklevel=3)


def _first_step(q: QTensor) -> float:
    """The smallest magnitude above zero that a code stands for."""
    if q.scheme.mode is QuantMode.LOOKUP:
        entries = np.abs(backend_of(q.data).to_host(q.table))
        return float(entries[entries > 0].min())
    return float(grid(q.scheme.value)[1]) if q.scheme.value.is_float else 1.0


def _check_float(role: str, x: Any) -> Backend:
    if isinstance(x, QTensor):
        raise AlreadyQuantized(role=role, scheme=str(x.scheme))
    owner = backend_of(x, role)
    check_real(role, x, integers=False)
    return owner


def _check_kernel(kernel: Any) -> None:
    if kernel is not None and not isinstance(kernel, str):
        raise InvalidArgument(name="kernel", wanted="a kernel's name, or None", got=kernel)


def _check_nested_tables(scheme: QuantScheme, calibration: str) -> None:
    """Refuse quantized scales or offsets with a table of their own: table= is for the codes."""
    nested = (scheme.scale, None if scheme.offset is None else scheme.offset.dtype)
    for what, inner in zip(("scales", "offsets"), nested, strict=True):
        if isinstance(inner, QuantScheme) and inner.table == CUSTOM:
            reason = f"its {what} look up a table of their own, which none can be given for"
            fix = f"Name a table for the {what}, e.g. dynamic8u"
            facts = {"calibration": calibration, "scheme": str(scheme)}
            raise CalibrationRefused(**facts, reason=reason, fix=fix)


def _plain(x: Array, owner: Backend) -> Array:
    """Without autodiff, and without NumPy's subclasses and scalars."""
    if owner.name == "numpy":
        return np.asarray(x)
    return x.detach() if hasattr(x, "detach") else x


def _check_values(x: Array, nonfinite: str, owner: Backend) -> str:
    """Refuse NaN and infinity; returns the rule that then holds."""
    if owner.is_traced(x):
        return "saturate"
    xp = namespace(x)
    is_wide = dtype_name(x) == "float64"  # beyond float32's range counts as infinite
    with np.errstate(all="ignore"):
        for rows in row_slices(x.shape):
            part = xp.astype(x[rows], xp.float32) if is_wide else x[rows]
            finite = known(xp.all(xp.isfinite(part)))
            if finite is None:
                return "saturate"
            if nonfinite == "raise" and not finite:
                _refuse_nonfinite(owner.to_host(x))
    return nonfinite


def _check_signs(x: Array, scheme: QuantScheme, table: Array | None, owner: Backend) -> None:
    """Refuse negative numbers, where they can be seen, for a scheme that has no codes for them."""
    if owner.is_traced(x) or _holds_negatives(scheme, table):
        return
    xp = namespace(x)
    for rows in row_slices(x.shape):
        part = xp.astype(x[rows], xp.float32)
        if known(xp.any(part <= -TINY)):  # a subnormal counts as zero
            _refuse_negative(owner.to_host(x), scheme)


def _holds_negatives(scheme: QuantScheme, table: Array | None) -> bool:
    """Whether negative values have codes: by a sign, a table or an offset that can be negative."""
    if scheme.mode is QuantMode.LOOKUP:
        if table is None:
            return bool(named_table(str(scheme.table)).min() < 0)
        return known(namespace(table).any(table < 0)) is not False
    if scheme.offset is None:
        return scheme.value.is_signed
    kind, stored = scheme.offset
    if kind is OffsetKind.BIAS and isinstance(stored, QuantScheme):
        return _holds_negatives(stored, None)
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


def _table(x: Array, scheme: QuantScheme, table: Any, nonfinite: str) -> Array | None:
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


def _given(
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
    refused = calibrate.check  # two levels of which the rule is unknown need the pair
    if not pair:
        refused("minmax", scheme)
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
            offsets=standard.store_offsets(scheme, low, standard.divisor(scheme, made))
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
        return quantize(numbers, stored)
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


# -- dequantize -------------------------------------------------------------------------------


def dequantize(q: QTensor, kind: Any = None) -> Array:
    """The values of ``q`` as an array: see QTensor.dequantize."""
    owner = backend_of(q.data)
    problem = one_operand_problem("dequantize", q, q.device)
    native = None if kind is None else _float_dtype(q.data, kind, "The result of dequantize")
    with np.errstate(all="ignore"):
        return choose(owner.name, problem).run(q, native)


def _float_dtype(like: Array, kind: Any, what: str) -> Any:
    """The library's own dtype for a name or dtype. Raises UnsupportedDtype."""
    name = kind if isinstance(kind, str) else getattr(kind, "name", None)
    if not isinstance(name, str):
        is_type = isinstance(kind, type)
        name = np.dtype(kind).name if is_type else str(kind).rpartition(".")[2]
    held = held_dtypes(namespace(like))
    if name not in held:
        raise UnsupportedDtype(what=what, dtype=name, known=", ".join(held))
    return dtype(namespace(like), name)


# -- products ---------------------------------------------------------------------------------


def matmul(a: Any, b: Any, *, out_dtype: Any = None, kernel: str | None = None) -> Array:
    """The matrix product of two operands, either or both of them quantized.

    Batched and broadcast like NumPy's ``matmul``. The result has the float operand's dtype, float32
    if both are quantized; accumulation is in float32 or better.

    Raises:
        BackendMismatch, DeviceMismatch, ShapeMismatch, NotFloat, NotAnArray, UnsupportedDtype,
        NoKernel, KernelRefused: all before any work.
    """
    owner = check_one_device("matmul", (("a", a), ("b", b)))
    _check_kernel(kernel)
    device = a.device if isinstance(a, QTensor) else owner.device_of(a)
    native = _result_dtype(a, b, out_dtype)
    chosen = choose(owner.name, matmul_problem(a, b, device), kernel)
    return chosen.run(a, b, native)


def _result_dtype(a: Any, b: Any, asked: Any) -> Any:
    floats = [x for x in (a, b) if not isinstance(x, QTensor)]
    for x in floats:
        check_real("an operand of a product", x, integers=False)
    like = floats[0] if floats else a.data
    if asked is not None:
        return _float_dtype(like, asked, "out_dtype")
    if not floats:
        return namespace(like).float32
    if len(floats) == 1:
        return like.dtype
    return namespace(like).result_type(*floats)


def linear(x: Any, weight: Any, bias: Any = None, *, activations: Any = None) -> Array:
    """``x @ weight.mT + bias``, with ``weight`` of shape (out, in) and ``bias`` of shape (out,).

    Args:
        activations: a scheme to quantize ``x`` with first; the product is then of two quantized
            operands. Without it ``x`` enters as it is.

    The result has the dtype of ``x`` (float32 if ``x`` is quantized). Raises what matmul raises.
    """
    roles = [("x", x), ("weight", weight)]
    check_one_device("linear", roles if bias is None else [*roles, ("bias", bias)])
    transposed = as_right_operand(x, weight)
    check_product("linear", x.shape, transposed.shape)
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        reason = f"the bias must be of shape ({weight.shape[0]},)"
        shapes = (tuple(weight.shape), tuple(bias.shape))
        raise ShapeMismatch(op="linear", left=shapes[0], right=shapes[1], reason=reason)
    native = _result_dtype(x, transposed, None)
    left = x if activations is None else quantize(x, activations)
    if bias is None:
        return matmul(left, transposed, out_dtype=native)
    _check_float("bias", bias)
    xp = namespace(bias)
    wide = xp.float64 if native == xp.float64 else xp.float32
    return xp.astype(matmul(left, transposed, out_dtype=wide) + xp.astype(bias, wide), native)


def same_backend(a: Any, b: Any) -> bool:
    """Whether two operands belong to one array library."""
    first, second = (backend_of(x.data if isinstance(x, QTensor) else x) for x in (a, b))
    return first is second


def is_quantized(a: Any) -> bool:
    """Whether ``a`` is a QTensor."""
    return isinstance(a, QTensor)


# -- the libraries' protocols -----------------------------------------------------------------


def operator_matmul(a: Any, b: Any) -> Any:
    """``a @ b`` with a QTensor on one side; leaves strangers to Python."""
    for side in (a, b):
        if not isinstance(side, QTensor) and find_backend(side) is None:
            return NotImplemented
    return matmul(a, b)


def array_function(
    q: QTensor,
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    method: str = "__call__",
) -> Any:
    """A function of an array library called on a QTensor. Raises UnsupportedFunction."""
    library = q.device.partition(":")[0]
    call = _operation(function, library) if method == "__call__" else None
    if call is None:
        raise UnsupportedFunction(function=_called(function), known=_PROTOCOL)
    if call.op == "matmul" and not call.ranks and len(args) == 2 and not kwargs:  # the quick way
        return matmul(*args)
    options = {name: item for name, item in kwargs.items() if name != "out" or item is not None}
    given = dict(zip(call.parameters, args, strict=False)) | options
    unknown = sorted(set(given) - set(call.parameters))
    if unknown or len(args) > len(call.parameters):
        more = f"with {', '.join(unknown)}=" if unknown else f"of {len(args)} operands"
        raise UnsupportedFunction(function=f"{_called(function)} {more}", known=_PROTOCOL)
    if call.op == "linear":
        return linear(given["input"], given["weight"], given.get("bias"))
    left, right = (given[name] for name in call.parameters)
    _check_ranks(_called(function), call, left, right)
    return matmul(right, left) if call.op == "rmatmul" else matmul(left, right)


def _called(function: Any) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}.{getattr(function, '__name__', function)}"


def _check_ranks(called: str, call: Call, left: Any, right: Any) -> None:
    """Refuse operands that the library's function itself would refuse, or multiply otherwise."""
    if not call.ranks:
        return
    check_one_device(called, (("the left operand", left), ("the right operand", right)))
    shapes = (tuple(left.shape), tuple(right.shape))
    for side, shape, ranks in zip(("left", "right"), shapes, call.ranks, strict=True):
        if len(shape) not in ranks:
            axes = " or ".join(map(str, ranks)) if len(ranks) < 3 else "1 or more"
            reason = f"its {side} operand has {axes} axes here; matmul takes any number"
            raise ShapeMismatch(op=called, left=shapes[0], right=shapes[1], reason=reason)


@lru_cache(maxsize=1024)
def _operation(function: Hashable, library: str) -> Call | None:
    """What a function of NumPy or of the tensor's own library computes, where that is known."""
    for name in dict.fromkeys(("numpy", library)):
        if name in BACKENDS:
            found: Call | None = import_module(BACKENDS[name]).array_function(function)
            if found is not None:
                return found
    return None
