"""Dispatch: one device for all operands, then the best kernel that says it can."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyquant.arrays import (
    BACKENDS,
    FLOAT_DTYPES,
    Array,
    Backend,
    backend,
    backend_of,
    backend_of_class,
    backend_of_device,
    describe,
    device_kind,
    dtype_name,
    find_backend,
    name_of_dtype,
)
from polyquant.errors import (
    AlreadyQuantized,
    BackendMismatch,
    BackendMissing,
    DeviceMismatch,
    InvalidArgument,
    KernelRefused,
    LayoutRefused,
    NoKernel,
    NotAnArray,
    NotFloat,
    ShapeMismatch,
    UnknownName,
    UnsupportedDtype,
)
from polyquant.kernel import Kernel, Problem, bucket
from polyquant.qtensor import QTensor, checked, kind_of
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme

#: Operations that kernels compute. ("linear" is a product and a sum.)
OPS = ("matmul", "quantize", "dequantize", "embedding")


@dataclass(frozen=True)
class Support:
    """Whether a device can run an op on a scheme: truthy or falsy, with the reason and kernel."""

    ok: bool
    reason: str
    kernel: str | None

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Explanation:
    """Which kernel would run a problem, and why each better one would not."""

    problem: Problem
    kernel: str | None
    reasons: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        chosen = self.kernel or "nothing: there is no kernel for it"
        refused = [f"  not {name}: {reason}" for name, reason in self.reasons]
        return "\n".join([f"{self.problem}", f"  runs {chosen}", *refused])


@dataclass(frozen=True)
class DeviceInfo:
    """One line of ``pq.devices()``: a device that is usable, or a backend that is not and why."""

    name: str
    usable: bool
    note: str

    def __str__(self) -> str:
        return f"{self.name}: {self.note}"


# -- devices ----------------------------------------------------------------------------------


def device_of(operand: Any) -> str | None:
    """The device of an array or QTensor ("torch:cuda:0"); None for plain Python numbers.

    Raises NotAnArray for anything else.
    """
    if isinstance(operand, QTensor):
        return operand.device
    owner = find_backend(operand)
    if owner is not None:
        return owner.device_of(operand)
    if isinstance(operand, int | float | complex):
        return None
    raise NotAnArray(role="the operand", got=describe(operand))


def devices() -> list[DeviceInfo]:
    """Every device that is usable here, and for each other backend what is missing."""
    found = []
    for name in BACKENDS:
        try:
            names = backend(name).devices()
        except BackendMissing as missing:
            note = f"not usable: {missing.facts['reason']}. {missing.facts['fix']}"
            found.append(DeviceInfo(name, False, note))
            continue
        found += [_device_info(device) for device in names]
    return found


def _device_info(device: str) -> DeviceInfo:
    owner, device = backend_of_device(device)
    kind = device_kind(device)
    sample = explain_problem(owner.name, Problem("dequantize", kind, as_scheme("q4s")))
    why = "; ".join(reason for name, reason in sample.reasons if "transforms" not in name)
    if sample.kernel is None:
        return DeviceInfo(device, False, f"not usable: {why or 'it has no kernels'}")
    plain, layout = Problem("", kind, as_scheme("q4s")), (None, (1, 0))
    row = Problem("matmul", kind, "bfloat16", plain.a, layout, 1, 4096, 4096, step=512)
    found = kernels(owner.name, kind)
    running = [k.name for k in found if not k.why_not(row if k.op == "matmul" else plain)]
    fast = [name for name in running if "definition" not in name]
    if not fast:
        note = "usable, with the definition alone: every scheme and op, no fast kernels"
        return DeviceInfo(device, True, f"{note} ({why})" if why else note)
    note = f"usable, with {', '.join(fast)} and the definition"
    for name, reason in explain_problem(owner.name, row).reasons:
        note += f"; not with {name}: {reason}" if "install" in reason else ""
    return DeviceInfo(device, True, note)


def tune(device: str) -> Path:
    """Measure which tile sizes are quickest on a device, and keep the answer for later programs.

    Takes a minute or two of a device that does nothing else. Weights that were multiplied before
    keep the tiles they had. Returns the file, which lies under
    the folder PQ_CACHE or ~/.cache/polyquant. Raises UnknownDevice, BackendMissing, and
    InvalidArgument for a device whose kernels have nothing to measure.
    """
    owner, device = backend_of_device(device)
    table = owner.kernels
    for module in table.get(device_kind(device)) or table["*"]:
        found = getattr(import_module(module), "tune", None)
        if found is not None:
            path: Path = found(device)
            return path
    wanted = "a device whose kernels have tiles to measure (torch:cuda:N)"
    raise InvalidArgument(name="device", wanted=wanted, got=device)


def same_backend(a: Any, b: Any) -> bool:
    """Whether two operands belong to one array library."""
    first, second = (backend_of(x.data if isinstance(x, QTensor) else x) for x in (a, b))
    return first is second


def is_quantized(a: Any) -> bool:
    """Whether ``a`` is a QTensor."""
    return isinstance(a, QTensor)


def check_one_device(op: str, operands: Sequence[tuple[str, Any]]) -> Backend:
    """The backend that all operands share; ``operands`` are (role, array or QTensor).

    Raises NotAnArray, BackendMismatch or DeviceMismatch, naming both operands and what mends it.
    """
    first_role, first = operands[0]
    owner, device = _place(first_role, first)
    for role, other in operands[1:]:
        other_owner, other_device = _place(role, other)
        same_library = other_owner is owner
        if other_device == device or (same_library and not _are_placed(owner, first, other)):
            continue
        error = DeviceMismatch if same_library else BackendMismatch
        facts = {
            "op": op,
            "left_role": first_role,
            "left": _in_words(first),
            "right_role": role,
            "right": _in_words(other),
            "fix": _fix((first_role, first, device), (role, other, other_device)),
        }
        raise error(**facts)
    return owner


def check_real(role: str, x: Array, *, integers: bool) -> None:
    """Refuse an array of other than floats (or integers, where they do). Raises NotFloat."""
    name = dtype_name(x)
    if name in FLOAT_DTYPES or (integers and name.startswith(("int", "uint"))):
        return
    fix = ".to(torch.float32)" if backend_of(x).name == "torch" else ".astype('float32')"
    raise NotFloat(role=role, dtype=name, fix=fix)


def check_product(op: str, left: Sequence[int], right: Sequence[int]) -> None:
    """Refuse shapes that have no matrix product. Raises ShapeMismatch."""
    reason = None
    if not left or not right:
        reason = "a product needs operands of one axis or more"
    else:
        inner = right[-2] if len(right) > 1 else right[-1]
        if left[-1] != inner:
            reason = f"the inner extents differ, {left[-1]} and {inner}"
            if left[-1] == right[-1]:
                reason += "; the second operand's .mT would fit"
        if len(left) > 2 and len(right) > 2:
            for x, y in zip(reversed(left[:-2]), reversed(right[:-2]), strict=False):
                if x != y and 1 not in (x, y):
                    reason = f"the batch extents {x} and {y} do not broadcast"
    if reason is not None:
        raise ShapeMismatch(op=op, left=tuple(left), right=tuple(right), reason=reason)


def _place(role: str, operand: Any) -> tuple[Backend, str]:
    if isinstance(operand, QTensor):
        checked(operand)
        return backend_of(operand.data), operand.device
    owner = backend_of(operand, role)
    return owner, owner.device_of(operand)


def _are_placed(owner: Backend, *operands: Any) -> bool:
    """Whether the devices of operands are known; what a tracer stands for is where the rest is."""
    return all(owner.is_placed(x.data if isinstance(x, QTensor) else x) for x in operands)


def device_among(owner: Backend, *operands: Any) -> str:
    """The device of operands that share one; where none is placed, that of a tracer."""
    x = next((x for x in operands if _are_placed(owner, x)), operands[0])
    return x.device if isinstance(x, QTensor) else owner.device_of(x)


def _in_words(operand: Any) -> str:
    if not isinstance(operand, QTensor):
        return describe(operand)
    text = f"a {operand.scheme} QTensor of shape {operand.shape}"
    owner = backend_of(operand.data)
    is_placed = owner.is_placed(operand.data)
    return f"{text} on {operand.device}" if is_placed else f"{text} that {owner.name} traces"


def _fix(first: tuple[str, Any, str], second: tuple[str, Any, str]) -> str:
    """The one call that mends a mismatch: move a quantized operand to the other's device.

    What is traced has no values to move.
    """
    ways = ((second, first), (first, second))
    movable = [way for way in ways if _are_placed(_place(*way[0][:2])[0], way[0][1])] or ways
    for (role, operand, _), (_, _, target) in movable:
        if isinstance(operand, QTensor):
            return f"call {role}.to({target!r})"
    (role, _, _), (_, _, target) = movable[0]
    return f"bring {role} to {target!r} with its own library"


def facts_of(operand: Any) -> Hashable:
    """What a checked answer about an operand is remembered by; None where none may be."""
    cls = operand.__class__
    if cls is QTensor:
        if operand.data.__class__ is not np.ndarray and _is_watched(operand):
            return None
        return operand._kind or kind_of(operand)
    if cls is np.ndarray:
        return cls, operand.dtype, operand.shape
    owner = backend_of_class(cls)
    return None if owner is None else owner.facts(operand)


def is_transformed(owner: Backend, *operands: Any) -> bool:
    """Whether a transformation of their library watches arrays or stored arrays of QTensors."""
    for x in operands:
        arrays = x.parts().values() if isinstance(x, QTensor) else (x,)
        if any(owner.is_transformed(array) for array in arrays):
            return True
        if isinstance(x, QTensor) and x.is_stack:
            if owner.name != "jax":
                reason = f"it is a stack, which {owner.name} has no functions for"
                fix = "Bring it to JAX with jax.device_put, or take one tensor with jax.tree.map"
                raise LayoutRefused(scheme=str(x.scheme), shape=x.shape, reason=reason, fix=fix)
            return True
    return False


def _is_watched(q: QTensor) -> bool:
    """Whether answers about ``q`` must not be remembered. (The float operand tells of torch's.)"""
    owner = backend_of_class(q.data.__class__)
    return q.requires_grad or (
        owner is not None and owner.name == "jax" and is_transformed(owner, q)
    )


# -- kernels ----------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def kernels(backend_name: str, kind: str) -> tuple[Kernel, ...]:
    """The kernels of one kind of device of a backend, best first."""
    table = _any_backend(backend_name).kernels
    modules = table.get(kind) or table.get("*") or table["cpu"]
    return tuple(kernel for module in modules for kernel in import_module(module).KERNELS)


def _any_backend(name: str) -> Backend:
    if name in BACKENDS:
        return backend(name)
    made: Backend = import_module("polyquant.backends.standard").make_backend(name)
    return made


@lru_cache(maxsize=4096)
def choose(
    backend_name: str, problem: Problem, pinned: str | None = None, *, below: str | None = None
) -> Kernel:
    """The first kernel that does not say why not; ``below`` leaves out those of a name's beginning.

    Raises NoKernel, or KernelRefused if pinned.
    """
    candidates = [
        kernel
        for kernel in kernels(backend_name, problem.device_kind)
        if kernel.op == problem.op and not (below and kernel.name.startswith(below))
    ]
    if pinned is not None:
        return _pinned(candidates, problem, pinned)
    reasons = []
    for kernel in candidates:
        reason = kernel.why_not(problem)
        if reason is None:
            return kernel
        reasons.append(f"  {kernel.name}: {reason}")
    raise NoKernel(problem=str(problem), reasons="\n".join(reasons) or "  (none exists)")


def _pinned(candidates: list[Kernel], problem: Problem, pinned: str) -> Kernel:
    kernel = next((k for k in candidates if k.name == pinned), None)
    known = ", ".join(k.name for k in candidates)
    reason = f"there is none of that name; known: {known}"
    if kernel is not None:
        reason_or_none = kernel.why_not(problem)
        if reason_or_none is None:
            return kernel
        reason = reason_or_none
    raise KernelRefused(kernel=pinned, problem=str(problem), reason=reason)


class Operand(NamedTuple):
    """What the choice of a kernel asks of an operand: scheme or dtype name, shape, axis order."""

    what: QuantScheme | str
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None


def operand_of(x: Any) -> Operand:
    """The facts of an array or a QTensor."""
    if isinstance(x, QTensor):
        return Operand(x.scheme, x.shape, x.axes)
    return Operand(dtype_name(x), tuple(x.shape), None)


@lru_cache(maxsize=4096)
def product_problem(
    a: Operand, b: Operand, device: str, transformed: bool, result: str = ""
) -> Problem:
    """The facts of a product. Raises ShapeMismatch."""
    check_product("matmul", a.shape, b.shape)
    # Beside a matrix all leading axes of ``a`` are rows.
    rows = a.shape[:-1] if len(b.shape) <= 2 else a.shape[-2:-1]
    m = math.prod(rows)
    n = b.shape[-1] if len(b.shape) > 1 else 1
    layout = (a.axes, b.axes)
    sizes = (bucket(m), bucket(n), bucket(a.shape[-1]))
    kind = device_kind(device)
    step = _step(a.shape[-1])
    return Problem("matmul", kind, a.what, b.what, layout, *sizes, "", transformed, step, result)


def _step(extent: int) -> int:
    """The largest power of two, up to 512, that divides an extent; 0 of one that is not known."""
    return math.gcd(extent, 512) if isinstance(extent, int) else 0


def matmul_problem(
    a: Any, b: Any, device: str, kind: Any = None, *, transformed: bool = False
) -> Problem:
    """The facts of a product of two arrays or QTensors, rounded to ``kind``, a dtype of theirs
    (float32 where both are quantized). Raises ShapeMismatch."""
    # A tracer's extents may be symbols, which no cache can hold.
    facts_of_product = product_problem.__wrapped__ if transformed else product_problem
    both = kind is not None and isinstance(a, QTensor) and isinstance(b, QTensor)
    name = name_of_dtype(kind) if both else ""
    result = "" if name == "float32" else name
    return facts_of_product(operand_of(a), operand_of(b), device, transformed, result)


def one_operand_problem(
    op: str, operand: Any, device: str, option: str = "", *, transformed: bool = False
) -> Problem:
    """The facts of quantize, dequantize or embedding."""
    if isinstance(operand, QTensor):
        checked(operand)
    what = operand.scheme if isinstance(operand, QTensor) else dtype_name(operand)
    layout = (operand.axes if isinstance(operand, QTensor) else None,)
    kind = device_kind(device)
    return Problem(op, kind, what, None, layout, option=option, transformed=transformed)


def explain(op: str, *operands: Any, out_dtype: Any = None) -> Explanation:
    """Which kernel would run ``op`` on these operands, and why each other one would not.

    Args:
        out_dtype: of a product of two quantized operands, as ``matmul`` takes it: what it is
            rounded to says how precisely values may enter.

    Runs nothing. Raises UnknownName for an op without kernels, InvalidArgument for too few
    operands, and what the operation itself refuses about devices, shapes and dtypes.
    """
    wanted = {"matmul": 2, "linear": 2, "quantize": 1, "dequantize": 1, "embedding": 2}
    if not isinstance(op, str) or op not in wanted:
        known = ", ".join(wanted)
        raise UnknownName(what="op with kernels", got=op, known=known, nearest="matmul")
    if len(operands) < wanted[op]:
        raise InvalidArgument(
            name="operands", wanted=f"{wanted[op]} or more for {op}", got=len(operands)
        )
    first, *rest = operands[: wanted[op]]
    roles = [(f"operand {i + 1}", operand) for i, operand in enumerate([first, *rest])]
    owner = check_one_device(op, roles)
    for role, operand in roles:
        if not isinstance(operand, QTensor):
            check_real(role, operand, integers=op == "embedding")
    if op == "quantize" and isinstance(first, QTensor):
        raise AlreadyQuantized(role="operand 1", scheme=str(first.scheme))
    if op == "embedding":  # a kernel asks about the weight alone
        first, *rest = rest
    if op in ("dequantize", "embedding") and not isinstance(first, QTensor):
        raise InvalidArgument(name=f"operand {wanted[op]}", wanted="a QTensor", got=first)
    device = device_among(owner, first, *rest)
    watched = is_transformed(owner, first, *rest)
    if not rest:
        problem = one_operand_problem(op, first, device, transformed=watched)
        return explain_problem(owner.name, problem)
    second = as_right_operand(first, rest[0]) if op == "linear" else rest[0]
    check_product(op, first.shape, second.shape)
    if out_dtype is not None:
        is_known = isinstance(out_dtype, Hashable) and name_of_dtype(out_dtype) in FLOAT_DTYPES
        if not is_known:
            known = ", ".join(FLOAT_DTYPES)
            raise UnsupportedDtype(what="out_dtype", dtype=str(out_dtype), known=known)
    problem = matmul_problem(first, second, device, out_dtype, transformed=watched)
    return explain_problem(owner.name, problem)


def as_right_operand(x: Any, weight: Any) -> Any:
    """The weight of ``linear`` as the right operand of a product. Raises ShapeMismatch."""
    if len(weight.shape) != 2:
        shapes = {"left": tuple(x.shape), "right": tuple(weight.shape)}
        raise ShapeMismatch(op="linear", **shapes, reason="a weight has two axes, (out, in)")
    return weight.mT


def explain_problem(backend_name: str, problem: Problem) -> Explanation:
    """``explain`` for facts alone."""
    reasons: list[tuple[str, str]] = []
    for kernel in kernels(backend_name, problem.device_kind):
        if kernel.op != problem.op:
            continue
        reason = kernel.why_not(problem)
        if reason is None:
            return Explanation(problem, kernel.name, tuple(reasons))
        reasons.append((kernel.name, reason))
    return Explanation(problem, None, tuple(reasons))


def supports(
    device: str,
    scheme: QuantScheme | str,
    op: str = "matmul",
    *,
    other: QuantScheme | str = "float32",
    m: int = 1,
    n: int = 4096,
    k: int = 4096,
) -> Support:
    """Whether ``device`` can run ``op`` on ``scheme``, and with which kernel.

    For a product, ``other`` is the left operand: a dtype name or a scheme. Raises UnknownDevice and
    what a scheme raises; a backend that is missing is an answer, not an error.
    """
    made = as_scheme(scheme)
    if not isinstance(op, str) or op not in OPS:
        raise UnknownName(what="op with kernels", got=op, known=", ".join(OPS), nearest="matmul")
    try:
        owner, device = backend_of_device(device)
    except BackendMissing as missing:
        return Support(False, str(missing), None)
    for name, size in (("m", m), ("n", n), ("k", k)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise InvalidArgument(name=name, wanted="a whole number of at least 0", got=size)
    kind = device_kind(device)
    if op == "matmul":
        left = str(other) if str(other) in FLOAT_DTYPES else as_scheme(other)
        sizes = (bucket(m), bucket(n), bucket(k))
        problem = Problem(op, kind, left, made, (None, (1, 0)), *sizes, step=_step(k))
    else:
        problem = Problem(op, kind, made)
    found = explain_problem(owner.name, problem)
    if found.kernel is not None:
        return Support(True, f"{found.kernel} runs it", found.kernel)
    return Support(False, "; ".join(f"{name}: {why}" for name, why in found.reasons), None)
