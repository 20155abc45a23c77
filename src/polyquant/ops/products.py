"""Products of matrices: every argument is checked once, then the best kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

from polyquant.arrays import Array, backend_of, find_backend, namespace
from polyquant.dispatch import (
    as_right_operand,
    check_one_device,
    check_product,
    check_real,
    choose,
    device_among,
    facts_of,
    is_transformed,
    matmul_problem,
    one_operand_problem,
)
from polyquant.errors import ShapeMismatch
from polyquant.inputs import check_float
from polyquant.ops.compiled import compiled, is_compiling
from polyquant.ops.conversion import by_ranges, check_kernel_name, float_dtype, quantize_plain
from polyquant.ops.propagation import propagates, quantized_again
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme
from polyquant.values import ScaleDtype

#: What runs a product that was checked, and the last argument of that.
_Plan = tuple[Callable[..., Array], Any]
#: A model has a few hundred products; one that makes new shapes for ever must not fill memory.
_MOST_PLANS = 4096


def matmul(a: Any, b: Any, *, out_dtype: Any = None, kernel: str | None = None) -> Array:
    """The matrix product of two operands, either or both of them quantized.

    Batched and broadcast like NumPy's ``matmul``. The result has the float operand's dtype, float32
    if both are quantized; accumulation is in float32 or better.

    Args:
        out_dtype: another dtype of the result. Values of two quantized operands may then enter the
            multiplier in it, if that is what a kernel is quick with (bfloat16 on a GPU).

    Raises:
        BackendMismatch, DeviceMismatch, ShapeMismatch, NotFloat, NotAnArray, UnsupportedDtype,
        NoKernel, KernelRefused: all before any work.
    """
    if is_compiling():
        return compiled().matmul(a, b, out_dtype, kernel)
    plan = None
    is_known = kernel is None and (out_dtype is None or isinstance(out_dtype, Hashable))
    if is_known:
        key: tuple[Hashable, ...] = (facts_of(a), facts_of(b))
        if a.__class__ is QTensor is b.__class__:  # no array among them says what watches the call
            key = (*key, facts_of(a.data))
        if out_dtype is not None:
            key = (*key, out_dtype)
        plan = plans().get(key)
    if plan is None:
        plan = _plan_product(a, b, out_dtype, kernel)
        if is_known:
            _remember(key, plan)
    result = plan[0](a, b, plan[1])
    return quantized_again(result, (a, b)) if propagates() else result


def _plan_product(a: Any, b: Any, out_dtype: Any, kernel: str | None) -> _Plan:
    """Every check of a product, then the kernel that runs it and the dtype of its result."""
    owner = check_one_device("matmul", (("a", a), ("b", b)))
    check_kernel_name(kernel)
    device = device_among(owner, a, b)
    native = _result_dtype(a, b, out_dtype)
    problem = matmul_problem(a, b, device, native, transformed=is_transformed(owner, a, b))
    return choose(owner.name, problem, kernel).run, native


@cache
def plans() -> dict[Hashable, _Plan]:
    """Products checked before, by the facts of their operands: a cache, so it may be emptied."""
    return {}


def _remember(key: tuple[Hashable, ...], plan: _Plan) -> None:
    if None in key:
        return
    if len(plans()) >= _MOST_PLANS:
        plans().clear()
    plans()[key] = plan


def _result_dtype(a: Any, b: Any, asked: Any) -> Any:
    floats = [x for x in (a, b) if not isinstance(x, QTensor)]
    for x in floats:
        check_real("an operand of a product", x, integers=False)
    like = floats[0] if floats else a.data
    if asked is not None:
        return float_dtype(like, asked, "out_dtype")
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
    if is_compiling():
        return compiled().linear(x, weight, bias, activations)
    key: tuple[Hashable, ...] = (
        "linear",
        facts_of(x),
        facts_of(weight),
        bias is not None and facts_of(bias),
        activations is not None and as_scheme(activations),
    )
    if x.__class__ is QTensor is weight.__class__:
        key = (*key, facts_of(x.data))
    plan = plans().get(key)
    if plan is None:
        plan = _plan_linear(x, weight, bias, activations)
        _remember(key, plan)
    result = plan[0](x, weight, bias, plan[1])
    return quantized_again(result, (x, weight)) if propagates() else result


def _plan_linear(x: Any, weight: Any, bias: Any, activations: Any) -> _Plan:
    """Every check of ``linear``, then what runs it, and the last argument of that."""
    check_linear(x, weight, bias)
    owner = backend_of(x.data if isinstance(x, QTensor) else x)
    device = device_among(owner, x, weight)
    given = (x, weight) if bias is None else (x, weight, bias)
    is_watched = is_transformed(owner, *given)
    if activations is not None and not is_watched:
        return _plan_activations(x, weight, bias, as_scheme(activations))
    native = _result_dtype(x, weight, None)
    problem = matmul_problem(x, weight.mT, device, native, transformed=is_watched)
    if is_watched:
        return choose(owner.name, problem._replace(op="linear")).run, activations
    run = choose(owner.name, problem).run
    if bias is None:
        return lambda x, weight, bias, native: run(x, weight.mT, native), native
    if bias.dtype == native == wide_of(bias, native) and owner.name != "jax":
        return lambda x, weight, bias, native: run(x, weight.mT, native) + bias, native
    return multiply_and_add, None


def _plan_activations(x: Any, weight: Any, bias: Any, scheme: QuantScheme) -> _Plan:
    """``linear`` of plain operands that quantizes ``x`` first."""
    left = quantize_plain(x, scheme)  # every check of it
    simple = scheme.value.is_signed and scheme.scale is ScaleDtype.F32 and scheme.table is None
    if bias is not None or not simple:
        return multiply_and_add, scheme
    owner = backend_of(x)
    device = owner.device_of(x)
    kernel = choose(owner.name, one_operand_problem("quantize", x, device, str(scheme)))
    native = _result_dtype(x, weight, None)
    product = choose(owner.name, matmul_problem(left, weight.mT, device, native))

    def quantize_and_multiply(x: Any, weight: Any, bias: Any, native: Any) -> Array:
        if product.rounds is not None:
            result = product.rounds(x, scheme, weight.mT, native)
            if result is not None:
                return result
        # Of all that quantize asks, only whether x is finite depends on its numbers.
        left, _ = by_ranges(kernel, x, scheme, None, owner)
        return product.run(left, weight.mT, native)

    return quantize_and_multiply, native


def check_linear(x: Any, weight: Any, bias: Any) -> None:
    """Refuse operands that linear cannot take: devices, shapes, dtypes."""
    roles = [("x", x), ("weight", weight)]
    check_one_device("linear", roles if bias is None else [*roles, ("bias", bias)])
    check_product("linear", x.shape, as_right_operand(x, weight).shape)
    for role, side in roles:
        if not isinstance(side, QTensor):
            check_real(role, side, integers=False)
    if bias is None:
        return
    if tuple(bias.shape) != (weight.shape[0],):
        reason = f"the bias must be of shape ({weight.shape[0]},)"
        shapes = (tuple(weight.shape), tuple(bias.shape))
        raise ShapeMismatch(op="linear", left=shapes[0], right=shapes[1], reason=reason)
    check_float("bias", bias)


def multiply_and_add(x: Any, weight: Any, bias: Any, activations: Any) -> Array:
    """``linear`` of operands that were checked, by the kernels for plain ones."""
    transposed = weight.mT
    native = _result_dtype(x, transposed, None)
    left = x if activations is None else quantize_plain(x, activations)
    if bias is None:
        return multiply(left, transposed, native)
    xp, wide = namespace(bias), wide_of(bias, native)
    total = _kernel_for(left, transposed, native)(left, transposed, wide)
    # JAX can be set to refuse arrays of fewer axes beside others.
    row = xp.reshape(xp.astype(bias, wide, copy=False), (1,) * (total.ndim - 1) + (-1,))
    return xp.astype(total + row, native, copy=False)


def wide_of(array: Array, kind: Any) -> Any:
    """The dtype in which numbers of a dtype are summed, in the library of an array."""
    xp = namespace(array)
    return xp.float64 if kind == xp.float64 else xp.float32


def check_operands(a: Any, b: Any) -> None:
    """Refuse operands that have no product: devices, shapes, dtypes."""
    check_one_device("matmul", (("a", a), ("b", b)))
    check_product("matmul", a.shape, b.shape)
    for side in (a, b):
        if not isinstance(side, QTensor):
            check_real("an operand of a product", side, integers=False)


def multiply(a: Any, b: Any, native: Any) -> Array:
    """The product of two operands that were checked, by the kernels for plain ones."""
    return _kernel_for(a, b, native)(a, b, native)


def _kernel_for(a: Any, b: Any, native: Any) -> Callable[..., Array]:
    """What multiplies two operands that were checked, where the result is rounded to ``native``."""
    owner = backend_of(a.data if isinstance(a, QTensor) else a)
    problem = matmul_problem(a, b, device_among(owner, a, b), native)
    return choose(owner.name, problem).run


def operator_matmul(a: Any, b: Any) -> Any:
    """``a @ b`` with a QTensor on one side; leaves strangers to Python."""
    for side in (a, b):
        if not isinstance(side, QTensor) and find_backend(side) is None:
            return NotImplemented
    return matmul(a, b)
