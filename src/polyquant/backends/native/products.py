"""Products and decoded values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from polyquant.arrays import Array, backend_of, backend_of_class, namespace
from polyquant.backends.native.weights import (
    matrix_of,
    plain,
    plain_input,
    plain_new,
    threads_for,
)
from polyquant.qtensor import QTensor


def dequantize(q: QTensor, kind: Any) -> Array:
    """The values of ``q`` in logical order, float32 where ``kind`` is None."""
    wanted = namespace(q.data).float32 if kind is None else kind
    out, is_wider = empty(q.data, q.stored_shape, wanted)
    matrix_of(q).decode(plain(out), threads_for(out))
    return q.to_logical(namespace(out).astype(out, wanted) if is_wider else out)


def matmul(a: Array | QTensor, b: Array | QTensor, kind: Any) -> Array:
    """``a @ b`` rounded to ``kind``, accumulated in float32."""
    if isinstance(b, QTensor):
        left = dequantize(a, None) if isinstance(a, QTensor) else a
        return _product(left, b, kind)
    # q @ x is the transpose of x.mT @ q.mT, and a vector has nothing to transpose.
    x = b if b.ndim == 1 else _turned(b)
    if not isinstance(a, QTensor) or a.ndim == 1 or b.ndim == 1:
        return _product(x, a if a.ndim == 1 else a.mT, kind)
    return _turned(_product(x, a.mT, kind))


def _turned(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _product(x: Array, q: QTensor, kind: Any) -> Array:
    """``x @ q``: NumPy's rules for vectors and batches."""
    if q.ndim > 2:
        return _batched(x, q, kind)
    shape, along_k = q.shape, q.axes != (0, 1)
    owner = backend_of_class(x.__class__) or backend_of(x)
    if x.ndim == 2 == len(shape):  # nothing to reshape, and the rest of a call is soon as long
        into, is_wider = empty(x, (x.shape[0], shape[1]), kind)
        out, flat = into, x
    else:
        (depth, *columns), rows = shape, x.shape[:-1]
        out, is_wider = empty(x, (*rows, *columns), kind)
        into = out.reshape((prod(rows), prod(columns)))
        flat = x if x.ndim == 2 else x.reshape((prod(rows), depth))
    lines = shape[0] if not along_k else shape[1] if len(shape) == 2 else 1
    new, threads = plain_new(into, owner), owner.num_threads()
    matrix_of(q).matmul(plain_input(flat, owner), new, along_k, 0, lines, threads)
    return namespace(out).astype(out, kind) if is_wider else out


def _batched(x: Array, q: QTensor, kind: Any) -> Array:
    """A product for each matrix of a batch, broadcast like NumPy's."""
    (depth, columns), batch = q.shape[-2:], q.shape[:-2]
    rows = x if x.ndim > 1 else x.reshape((1, depth))
    shape = np.broadcast_shapes(rows.shape[:-2], batch)
    height = rows.shape[-2]
    out, is_wider = empty(x, (*shape, height, columns), kind)
    along_k = q.axes[-1] == q.ndim - 2
    lines = columns if along_k else depth
    matrix, threads = matrix_of(q), threads_for(out)
    which = np.broadcast_to(np.arange(prod(batch)).reshape(batch), shape)
    for at in np.ndindex(*shape):
        skipped = len(shape) - (rows.ndim - 2)
        own = tuple(
            i if extent > 1 else 0 for i, extent in zip(at[skipped:], rows.shape, strict=False)
        )
        first = int(which[at]) * lines
        matrix.matmul(plain_input(rows[own]), plain(out[at]), along_k, first, lines, threads)
    made = namespace(out).astype(out, kind) if is_wider else out
    return made if x.ndim > 1 else made.reshape((*shape, columns))


def empty(like: Array, shape: Sequence[int], kind: Any) -> tuple[Array, bool]:
    """A new array beside ``like``, and whether ``kind`` differs from what it holds.

    It is float32 where float64 is asked for, and of the machine's byte order.
    """
    is_wider = _is_float64(kind)
    if isinstance(like, (np.ndarray, np.generic)):
        held = np.dtype(np.float32 if is_wider else kind)
        if held.isnative:
            return _aligned(shape, held), is_wider
        return np.empty(shape, held.newbyteorder("=")), True
    held = namespace(like).float32 if is_wider else kind
    # torch reads extents faster one by one than as a tuple.
    made = like.new_empty(*shape, dtype=held) if shape else like.new_empty((), dtype=held)
    return made, is_wider


def _aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A new array; a large one begins where JAX takes it over without copying."""
    size = prod(shape) * dtype.itemsize
    if size < _LARGE:
        return np.empty(shape, dtype)
    raw = np.empty(size + _LINE, np.uint8)
    first = -raw.ctypes.data % _LINE
    return raw[first : first + size].view(dtype).reshape(shape)


_LARGE, _LINE = 1 << 20, 64  # bytes


@lru_cache(maxsize=64)
def _is_float64(kind: Hashable) -> bool:
    name = getattr(kind, "name", None) or getattr(kind, "__name__", None) or str(kind)
    return str(name).endswith("float64")
