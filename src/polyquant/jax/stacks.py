"""Stacks: tensors side by side in one QTensor, for jax.lax.scan and jax.vmap over layers."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from polyquant.dispatch import check_one_device
from polyquant.errors import InvalidArgument
from polyquant.qtensor import QTensor


def stack(tensors: Sequence[QTensor]) -> QTensor:
    """Tensors of one scheme and shape as a stack, in which each keeps stored arrays of its own.

    Every stored array, tables and tensor scales too, is stacked along a new leading axis, as
    ``jax.lax.scan`` takes its ``xs`` and ``jax.vmap`` its operands; within them each tensor is
    itself again. (``pq.stack`` makes a tensor of one more axis, which has one table.) The stack's
    ``dequantize()``, products and tree functions work; layout operations refuse it.

    Raises InvalidArgument, BackendMismatch, DeviceMismatch.
    """
    found = list(tensors) if isinstance(tensors, Sequence) else []
    if not found or not all(isinstance(q, QTensor) for q in found):
        wanted = "a sequence of one QTensor or more"
        raise InvalidArgument(name="tensors", wanted=wanted, got=tensors)
    check_one_device("stack", [(f"tensors[{i}]", q) for i, q in enumerate(found)])
    first = found[0]
    for q in found[1:]:
        if (q.scheme, q.shape, q.axes) != (first.scheme, first.shape, first.axes):
            wanted = f"tensors of one scheme, shape and order of axes, as the first is: {first!r}"
            raise InvalidArgument(name="tensors", wanted=wanted, got=q)
    made: QTensor = jax.tree.map(lambda *parts: jnp.stack(parts), *found)
    return made
