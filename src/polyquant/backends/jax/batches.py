"""Products by kernels that take rows, under every batch: other axes of a weight, and those of vmap.

A kernel here multiplies x (batch, m, k) by a weight whose axes but the last two are that batch. In
a program it is a custom call of XLA's, which ``jax.export`` takes no promises of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from polyquant.qtensor import QTensor

Array = Any
ByRows = Callable[[Array, QTensor, Any], Array]


@partial(jax.jit, static_argnames=("by_rows", "kind"))
def matmul(by_rows: ByRows, x: Array, weight: QTensor, kind: Any) -> Array:
    """``x @ weight``, accumulated in float32: x (..., m, k) or (k,), weight (..., k, n).

    The weight's last two axes are stored last, in either order; its other axes are those of ``x``
    or are broadcast against. ``kind``: the dtype of the result.
    """
    k, n = weight.shape[-2:]
    batch = weight.shape[:-2]
    rows = x[None] if x.ndim == 1 else x
    whole = np.broadcast_shapes(rows.shape[:-2], batch)
    if 0 in batch:  # no weight, and no number of rows of each
        return jnp.zeros((*whole, *x.shape[-2:-1], n), kind)
    of_weight = (1,) * (len(whole) - len(batch)) + batch
    own = [i for i, extent in enumerate(of_weight) if extent > 1]
    order = [*own, *(i for i in range(len(whole)) if i not in own)]  # what is no batch is rows
    if own:
        rows = jnp.broadcast_to(rows, (*whole, *rows.shape[-2:]))
        rows = jnp.transpose(rows, (*order, len(whole), len(whole) + 1))
    y = _product(by_rows, rows.reshape(math.prod(batch), -1, k), weight, jnp.dtype(kind))
    if own:
        y = y.reshape(*(whole[i] for i in order), x.shape[-2] if x.ndim > 1 else 1, n)
        y = jnp.transpose(y, (*(order.index(i) for i in range(len(whole))), -2, -1))
    return y.reshape(*whole, *(x.shape[-2:-1] if x.ndim > 1 else ()), n)


def _product(by_rows: ByRows, x: Array, weight: QTensor, kind: Any) -> Array:
    """x (batch, m, k) by a weight whose other axes are that batch; any of them under vmap."""
    run = jax.custom_batching.custom_vmap(lambda x, weight: by_rows(x, weight, kind))
    run.def_vmap(partial(_mapped, partial(_product, by_rows, kind=kind)))
    made: Array = run(x, weight)
    return made


def _mapped(
    product: Callable[..., Array], size: int, is_batched: Any, x: Array, weight: QTensor
) -> tuple[Array, bool]:
    """Rows of one weight lie side by side; several weights are a batch, where they can be one."""
    by_x, by_weight = is_batched
    if not any(jax.tree.leaves(by_weight)):
        rows = jnp.moveaxis(x, 0, 1)  # (batch, size, m, k)
        y = product(rows.reshape(rows.shape[0], -1, rows.shape[-1]), weight)
        return jnp.moveaxis(y.reshape(*rows.shape[:-1], y.shape[-1]), 1, 0), True
    rows = x if by_x else jnp.broadcast_to(x, (size, *x.shape))
    if _is_batch(weight, by_weight):
        y = product(rows.reshape(-1, *rows.shape[2:]), weight)
        return y.reshape(*rows.shape[:-1], y.shape[-1]), True
    each = jax.tree.map(
        lambda leaf, mine: leaf if mine else jnp.broadcast_to(leaf, (size, *leaf.shape)),
        weight,
        by_weight,
    )
    return lax.map(lambda pair: product(*pair), (rows, each)), True


def _is_batch(weight: QTensor, by_weight: QTensor) -> bool:
    """Whether stacked weights are one whose first axis is the stack's: a kernel takes one table."""
    if weight.scheme.block is None or isinstance(weight.scales, QTensor):
        return False
    of_each = (by_weight.data, by_weight.scales, by_weight.offsets)
    of_all = (by_weight.tensor_scale, by_weight.table)
    return all(mine is not False for mine in of_each) and True not in of_all


def as_batch(product: ByRows, x: Array, weight: QTensor, kind: Any) -> Array:
    """Rows (batch, m, k) by a product that takes the weight's other axes as they are."""
    y = product(x.reshape(*weight.shape[:-2], *x.shape[-2:]), weight, kind)
    return y.reshape(*x.shape[:2], weight.shape[-1])


def in_programs(name: str, platform: str, call: ByRows, elsewhere: ByRows) -> ByRows:
    """``call`` in programs for a platform, ``elsewhere`` in those for others and in exported ones.

    Which of them it is, is known when a program is lowered.
    """
    product = Primitive(name)

    def by_rows(x: Array, weight: QTensor, kind: Any) -> Array:
        leaves, structure = jax.tree.flatten(weight)
        made: Array = product.bind(x, *leaves, structure=structure, kind=kind)
        return made

    def result(x: Any, *leaves: Any, structure: Any, kind: Any) -> Any:
        n = jax.tree.unflatten(structure, leaves).shape[-1]
        return x.update(shape=(*x.shape[:2], n), dtype=jnp.dtype(kind), weak_type=False)

    def lowered(run: ByRows, ctx: Any, *operands: Any, **known: Any) -> Any:
        told = getattr(ctx.module_context, "lowering_parameters", None)
        chosen = elsewhere if getattr(told, "for_export", False) else run

        def of(x: Array, *leaves: Array, structure: Any, kind: Any) -> Array:
            return chosen(x, jax.tree.unflatten(structure, leaves), kind)

        return mlir.lower_fun(of, multiple_results=False)(ctx, *operands, **known)

    def at_once(x: Array, *leaves: Array, structure: Any, kind: Any) -> Array:
        """Outside of programs, as jax.disable_jit has it."""
        return elsewhere(x, jax.tree.unflatten(structure, leaves), kind)

    product.def_impl(at_once)
    product.def_abstract_eval(result)
    mlir.register_lowering(product, partial(lowered, elsewhere))
    mlir.register_lowering(product, partial(lowered, call), platform=platform)
    return by_rows
