"""The kernels for operands that JAX traces: under jit, grad, vmap, scan and all the others.

They are the kernels for plain operands with derivatives (``derivatives``). A stack of tensors, as
vmap returns one, is decoded tensor by tensor.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from polyquant.jax.derivatives import product, values
from polyquant.kernel import Kernel, Problem
from polyquant.qtensor import QTensor
from polyquant.scheme import scheme

Array = Any


def _why_not(problem: Problem) -> str | None:
    if problem.transformed:
        return None
    return "the operands are plain: nothing to trace"


def _decode(q: QTensor, kind: Any) -> Array:
    return values(q, kind or jnp.float32)


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
)
