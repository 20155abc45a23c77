"""Products by kernels that JAX cannot look into, which are linear in their float rows all the same.

Derivatives never ask: they are those of ``derivatives``. But a rule of somebody else's, or
jax.linear_transpose, may turn a product around, and JAX then asks the operation itself.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """``kernel.run(x, weight, kind)``, linear in ``x`` to JAX. Shapes are those of ``matmul``."""
    leaves, structure = jax.tree.flatten(weight)
    facts = {"structure": structure, "kernel": kernel, "kind": kind, "stacks": ()}
    made: Array = _product_p.bind(x, *leaves, **facts)
    return made


def _run(x: Array, *leaves: Array, structure: Any, kernel: Kernel, kind: Any, stacks: Any) -> Array:
    def run(x: Array, *leaves: Array) -> Any:
        return kernel.run(x, jax.tree.unflatten(structure, leaves), kind)

    made: Array = _each(run, stacks)(x, *leaves)
    return made


def _each(run: Callable[..., Any], stacks: Any) -> Callable[..., Any]:
    """``run`` of each product of stacks, whose leaves have these axes, the outermost stack's first;
    what comes before the leaves has its stacks' axes first."""
    for axes in reversed(stacks):
        run = jax.vmap(run, in_axes=(0, *axes))
    return run


def _result(x: Any, *leaves: Any, **facts: Any) -> Any:
    made = jax.eval_shape(lambda *args: _run(*args, **facts), x, *leaves)
    return x.update(shape=made.shape, dtype=made.dtype, weak_type=False)


def _turned(
    of_result: Array, x: Any, *leaves: Array, structure: Any, stacks: Any, **_: Any
) -> list[Any]:
    """The change of ``x``: that of the result times the decoded weight."""
    plain = jax.ShapeDtypeStruct(x.aval.shape[len(stacks) :], x.aval.dtype)

    def run(of_result: Array, *leaves: Array) -> Any:
        values = standard.dequantize(jax.tree.unflatten(structure, leaves), jnp.float32)
        turned = jax.linear_transpose(lambda x: matmul(x.astype(jnp.float32), values), plain)
        return turned(of_result.astype(jnp.float32))[0]

    return [_each(run, stacks)(of_result, *leaves), *(None for _ in leaves)]


def _mapped(
    args: Any, axes: Any, *, structure: Any, stacks: Any, **facts: Any
) -> tuple[Array, int]:
    """More rows; or a stack of products, of which the kernel's own parts make what they can."""
    (x, *leaves), (of_x, *of_leaves) = args, axes
    if of_x is None:
        sizes = [leaf.shape[i] for leaf, i in zip(leaves, of_leaves, strict=True) if i is not None]
        x, of_x = jnp.broadcast_to(x, (sizes[0], *x.shape)), 0
    is_one = not stacks and all(axis is None for axis in of_leaves)
    if not is_one or jax.tree.unflatten(structure, leaves).ndim > 2:  # axes of x may be a batch's
        stacks = (tuple(of_leaves), *stacks)
    facts |= {"structure": structure, "stacks": stacks}
    return _product_p.bind(jnp.moveaxis(x, of_x, 0), *leaves, **facts), 0


_product_p.def_impl(_run)
_product_p.def_abstract_eval(_result)
ad.primitive_transposes[_product_p] = _turned
batching.primitive_batchers[_product_p] = _mapped
mlir.register_lowering(_product_p, mlir.lower_fun(_run, multiple_results=False))
