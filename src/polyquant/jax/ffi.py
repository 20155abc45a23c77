"""The compiled kernels of the CPU in XLA's programs: products of floats and a weight.

A product is a custom call of XLA's FFI, which hands the kernels its own memory. XLA can neither
split such a call over devices nor export it, so programs of several devices and exported ones have
the definition in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyquant import standard
from polyquant.backends.jax import batches, handlers
from polyquant.backends.native.compiled import missing
from polyquant.backends.native.weights import facts_of
from polyquant.jax.linear import product_by
from polyquant.kernel import Kernel, Problem
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import F32

Array = Any
_TARGET = "polyquant_product"
_MOST_AXES = 8


def _why_not(problem: Problem) -> str | None:
    why = missing()
    if why is not None:
        return why
    if not problem.transformed:
        return "the operands are plain, and jax.native.matmul reads them where they lie"
    if jax.device_count("cpu") > 1:
        return "XLA may split traced operands over the CPU's devices, and it cannot split a call"
    sides = (problem.a, problem.b)
    if not any(isinstance(side, QuantScheme) for side in sides):
        return "neither operand is quantized"
    if "float64" in sides:
        return "it computes in float32, and a float64 operand asks for more"
    if not problem.m or not problem.n or not problem.k:
        return "an extent is zero, or not known"
    axes = problem.layout[1] or problem.layout[0] or ()
    if not 2 <= len(axes) <= _MOST_AXES or axes[:-2] != tuple(range(len(axes) - 2)):
        return "the weight's matrices must be its last two axes, and those the last stored"
    return None


def _run(a: Any, b: Any, kind: Any) -> Array:
    if isinstance(b, QTensor):
        rows = standard.dequantize(a, jnp.float32) if isinstance(a, QTensor) else a
        made: Array = batches.matmul(_by_rows, rows, b, kind)
        return made
    # q @ x is the transpose of x.mT @ q.mT, and a vector has nothing to transpose.
    rows = b if b.ndim == 1 else b.mT
    run = partial(product_by, KERNELS[0]) if a.ndim == 2 else _run
    turned = run(rows, a.mT, kind)
    return turned if b.ndim == 1 else turned.mT


def _by_rows(x: Array, weight: QTensor, kind: Any) -> Array:
    """x (batch, m, k) by a weight whose other axes are that batch."""
    run = _in_programs if x.size else _by_definition  # vmap may bring no products
    return run(x, weight, kind)


def _by_definition(x: Array, weight: QTensor, kind: Any) -> Array:
    return batches.as_batch(standard.matmul, x, weight, kind)


def register() -> None:
    """Make the handler known to XLA, which programs ask for that were compiled elsewhere, too."""
    if missing() is None:
        handlers.native(_TARGET, "xla_product", "cpu", ("execute",))


def _by_call(x: Array, weight: QTensor, kind: Any) -> Array:
    """The custom call; ``native/xla_product.h`` says what it is told."""
    register()
    out = kind if kind in (jnp.float32, jnp.float16, jnp.bfloat16) else jnp.float32
    arrays = [x]
    along_k = weight.axes[-1] == weight.ndim - 2
    facts = np.array([along_k, *_told(weight, arrays)], np.int64)
    result = jax.ShapeDtypeStruct((*x.shape[:2], weight.shape[-1]), out)
    return jax.ffi.ffi_call(_TARGET, result)(*arrays, facts=facts).astype(kind)


def _told(q: QTensor, arrays: list[Array]) -> Iterator[int]:
    """What the call is told of a weight; its arrays are appended to the operands."""

    def operand(array: Array) -> int:
        arrays.append(array)
        return len(arrays) - 1

    facts = facts_of(q.scheme, q.stored_shape)
    for name in ("shape", "block"):
        yield from (len(facts[name]), *facts[name])
    yield from (int(facts[name]) for name in ("bits", "value_bits", "kind", "is_signed"))
    yield facts["offset_kind"]
    yield from facts["minifloat"] or (0,) * 6
    yield operand(q.data)
    table = facts["table"] if q.table is None else q.table
    yield -1 if table is None else operand(_constant(table))
    yield -1 if q.tensor_scale is None else operand(q.tensor_scale)
    grids = [(facts["scale_number"], q.scales)]
    if q.offsets is not None:
        grids.append((facts["offset_number"], q.offsets))
    for number, part in grids:
        yield number
        yield from _told(part, arrays) if isinstance(part, QTensor) else (operand(part),)


def _constant(table: Array | F32) -> Array:
    with jax.debug_nans(False):  # a table may hold NaN
        return jnp.asarray(table)


_in_programs = batches.in_programs("polyquant_native_product", "cpu", _by_call, _by_definition)

KERNELS = (Kernel("jax.ffi.matmul", "matmul", _why_not, _run),)
