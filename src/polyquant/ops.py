"""The operations: every argument is checked here, once, and then the best kernel runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from polyquant import calibrate, standard
from polyquant.arrays import (
    BACKENDS,
    Array,
    Call,
    backend_of,
    dtype,
    find_backend,
    held_dtypes,
    known,
    namespace,
)
from polyquant.dispatch import (
    as_right_operand,
    check_one_device,
    check_product,
    check_real,
    choose,
    facts_of,
    matmul_problem,
    one_operand_problem,
)
from polyquant.errors import (
    DeadBlocksWarning,
    InvalidArgument,
    ScaleArgument,
    ShapeMismatch,
    UnsupportedDtype,
    UnsupportedFunction,
)
from polyquant.inputs import (
    check_float,
    check_nested_tables,
    check_signs,
    check_values,
    plain,
    stored_params,
    table_beside,
)
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme
from polyquant.standard import Params
from polyquant.values import QuantMode, ScaleDtype, grid, scale_grid

_Plan = tuple[Callable[..., Array], Any]
#: A model has a few hundred products; one that makes new shapes for ever must not fill memory.
_MOST_PLANS = 4096
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
    owner = check_float("x", x)
    _check_kernel(kernel)
    x = plain(x, owner)
    made.scale_shape(x.shape)  # raises BlockRank
    if not isinstance(nonfinite, str) or nonfinite not in ("raise", "saturate"):
        raise InvalidArgument(name="nonfinite", wanted="'raise' or 'saturate'", got=nonfinite)
    name, argument = (calibration, None)
    if scales is None:
        name, argument = calibrate.check(calibration, made)
    elif not isinstance(name, str) or name not in ("minmax", "signed_max"):
        wanted = "'minmax', or 'signed_max' for scales with a sign, beside scales= of your own"
        raise InvalidArgument(name="calibration", wanted=wanted, got=calibration)
    check_nested_tables(made, name)
    policy = check_values(x, nonfinite, owner)
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


def _check_kernel(kernel: Any) -> None:
    if kernel is not None and not isinstance(kernel, str):
        raise InvalidArgument(name="kernel", wanted="a kernel's name, or None", got=kernel)


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
    if out_dtype is not None or kernel is not None:
        run, native = _plan_product(a, b, out_dtype, kernel)
        return run(a, b, native)
    key = (facts_of(a), facts_of(b))
    plan = _plans().get(key)
    if plan is None:
        plan = _plan_product(a, b, None, None)
        if None not in key:
            _remember(key, plan)
    return plan[0](a, b, plan[1])


def _plan_product(a: Any, b: Any, out_dtype: Any, kernel: str | None) -> _Plan:
    """Every check of a product, then the kernel that runs it and the dtype of its result."""
    owner = check_one_device("matmul", (("a", a), ("b", b)))
    _check_kernel(kernel)
    device = a.device if isinstance(a, QTensor) else owner.device_of(a)
    native = _result_dtype(a, b, out_dtype)
    return choose(owner.name, matmul_problem(a, b, device), kernel).run, native


@cache
def _plans() -> dict[Hashable, _Plan]:
    """Products checked before, by the facts of their operands: a cache, so it may be emptied."""
    return {}


def _remember(key: Hashable, plan: _Plan) -> None:
    if len(_plans()) >= _MOST_PLANS:
        _plans().clear()
    _plans()[key] = plan


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
    check_float("bias", bias)
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
    call = _operation(function, q.device) if method == "__call__" else None
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
def _operation(function: Hashable, device: str) -> Call | None:
    """What a function of NumPy or of the device's own library computes, where that is known."""
    for name in dict.fromkeys(("numpy", device.partition(":")[0])):
        if name in BACKENDS:
            found: Call | None = import_module(BACKENDS[name]).array_function(function)
            if found is not None:
                return found
    return None
