"""The kernels for operands that JAX traces: under jit, grad, vmap, scan and all the others.

They are the kernels for plain operands with derivatives (``derivatives``). A stack of tensors, as
vmap returns one, is decoded tensor by tensor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from polyquant.dispatch import choose, device_of, one_operand_problem
from polyquant.jax.derivatives import BELOW, product, values
from polyquant.jax.explicit import entries_of, explicit_mesh, split, typed
from polyquant.jax.sharding import shardings
from polyquant.kernel import Kernel, Problem
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme, scheme
from polyquant.standard import Params
from polyquant.views import take

Array = Any


def _why_not(problem: Problem) -> str | None:
    if problem.transformed:
        return None
    return "the operands are plain: nothing to trace"


def _decode(q: QTensor, kind: Any) -> Array:
    return values(q, kind or jnp.float32)


def _encode(
    x: Array,
    scheme: QuantScheme,
    calibration: str,
    *,
    params: Params | None = None,
    table: Array | None = None,
    nonfinite: str = "raise",
) -> QTensor:
    problem = one_operand_problem("quantize", x, device_of(x) or "", str(scheme), transformed=True)
    run = partial(choose("jax", problem, below=BELOW).run, nonfinite=nonfinite)
    mesh = explicit_mesh(x)
    if mesh is None:
        made: QTensor = run(x, scheme, calibration, params=params, table=table)
        return made
    given = {"params": params, "table": table}
    if not isinstance(x, jax.core.Tracer):  # these are copies on devices that no mesh joins yet
        given = jax.device_put(given, split(x.sharding.mesh, ()))
    # Under jit the definition's own tables lie nowhere yet, so they may be of any mesh.
    whole = jax.jit(lambda x, given: run(x, scheme, calibration, **given))
    plain = jax.ShapeDtypeStruct(x.shape, x.dtype)
    wanted = shardings(jax.eval_shape(whole, plain, given), split(mesh, entries_of(x)))
    made = typed(whole, mesh, wanted)(x, given)
    return made


def _look_up(rows: Array, weight: QTensor, kind: Any) -> Any:
    mesh = explicit_mesh(rows, weight)
    if mesh is None:
        problem = one_operand_problem("embedding", weight, weight.device, transformed=True)
        return choose("jax", problem, below=BELOW).run(rows, weight, kind)
    wanted = split(mesh, (*entries_of(rows), *entries_of(weight)[1:]))
    run = typed(lambda i, q: values(take(q, i, 0), kind or jnp.float32), mesh, wanted)
    return run(rows, weight)


def _multiply_and_add(x: Any, weight: Any, bias: Array | None, activations: Any) -> Array:
    """``x @ weight.mT + bias`` in the dtype of ``x`` (of the weight, where ``x`` is quantized)."""
    floats = [side for side in (x, weight) if not isinstance(side, QTensor)]
    kind = jnp.result_type(*floats) if floats else jnp.float32
    first = None if activations is None else scheme(activations)
    if bias is None:
        return product(x, weight.mT, kind, first)
    wide = jnp.promote_types(kind, jnp.float32)
    total = product(x, weight.mT, wide, first)
    return (total + jnp.broadcast_to(bias.astype(wide), total.shape)).astype(kind)


KERNELS = (
    Kernel("jax.transforms.matmul", "matmul", _why_not, product, takes_extras=True),
    Kernel("jax.transforms.linear", "linear", _why_not, _multiply_and_add, takes_extras=True),
    Kernel("jax.transforms.dequantize", "dequantize", _why_not, _decode, takes_extras=True),
    Kernel("jax.transforms.quantize", "quantize", _why_not, _encode, takes_extras=True),
    Kernel("jax.transforms.embedding", "embedding", _why_not, _look_up, takes_extras=True),
)
