"""Products by kernels that JAX cannot look into, which are linear in their float rows all the same.

Derivatives never ask: they are those of ``derivatives``. But a rule of somebody else's, or
jax.linear_transpose, may turn a product around, and JAX then asks the operation itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from polyquant import standard
from polyquant.backends.jax.division import matmul
from polyquant.kernel import Kernel
from polyquant.qtensor import QTensor

Array = Any

_product_p = Primitive("polyquant_product")


def product_by(kernel: Kernel, x: Array, weight: QTensor, kind: Any) -> Array:
    """``kernel.run(x, weight, kind)`` for x (..., k) and weight (k, n), linear in ``x`` to JAX."""
    leaves, structure = jax.tree.flatten(weight)
    made: Array = _product_p.bind(x, *leaves, structure=structure, kernel=kernel, kind=kind)
    return made


def _run(x: Array, *leaves: Array, structure: Any, kernel: Kernel, kind: Any) -> Array:
    made: Array = kernel.run(x, jax.tree.unflatten(structure, leaves), kind)
    return made


def _result(x: Any, *leaves: Any, **facts: Any) -> Any:
    made = jax.eval_shape(lambda *args: _run(*args, **facts), x, *leaves)
    return x.update(shape=made.shape, dtype=made.dtype, weak_type=False)


def _turned(of_result: Array, x: Any, *leaves: Array, structure: Any, **_: Any) -> list[Any]:
    """The change of ``x``: that of the result times the decoded weight."""
    weight = jax.tree.unflatten(structure, leaves)
    wide = jnp.promote_types(x.aval.dtype, jnp.float32)
    values = standard.dequantize(weight, wide)
    change = matmul(of_result.astype(wide), values.T).astype(x.aval.dtype)
    return [change, *(None for _ in leaves)]


def _mapped(args: Any, axes: Any, **facts: Any) -> tuple[Array, int]:
    """More rows; or, of several weights, whatever the kernel's own parts do."""
    if all(axis is None for axis in axes[1:]):
        x = jnp.moveaxis(args[0], axes[0], 0)
        return _product_p.bind(x, *args[1:], **facts), 0
    return jax.vmap(lambda *each: _run(*each, **facts), in_axes=axes)(*args), 0


_product_p.def_impl(_run)
_product_p.def_abstract_eval(_result)
ad.primitive_transposes[_product_p] = _turned
batching.primitive_batchers[_product_p] = _mapped
mlir.register_lowering(_product_p, mlir.lower_fun(_run, multiple_results=False))
