"""The compiled kernels of the CPU, for the arrays of every library that lie in its memory.

They read the canonical bytes where they are: nothing is copied or laid out anew. What is compiled
is in native/; without it these kernels say so, and the definition runs.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from functools import cache, lru_cache
from importlib import import_module
from itertools import pairwise
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from polyquant.arrays import Array, find_backend, namespace
from polyquant.errors import BackendMissing, InvalidArgument
from polyquant.kernel import Kernel, Problem
from polyquant.qtensor import QTensor
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.tables import CUSTOM, named_table
from polyquant.values import F32, QuantMode, QuantStore, QuantValue, ScaleDtype, decode_table

_NATIVE = "polyquant._native"
_MOST_AXES = 8
_MOST_THREADS = 1024
# The order of the enumerations in native/weight.h.
_TABLE16, _INTEGER, _MINIFLOAT, _TABLE256 = range(4)
_NUMBERS = (ScaleDtype.F32, ScaleDtype.F16, ScaleDtype.BF16, ScaleDtype.UE8M0, ScaleDtype.UE4M3)
_U8 = len(_NUMBERS)
_NESTED = _U8 + 1
_OFFSETS = (None, OffsetKind.ZERO_POINT, OffsetKind.BIAS)


@cache
def compiled() -> Any:
    """The compiled module. Raises ImportError where it was not built."""
    module = import_module(_NATIVE)
    count = _threads_asked() or len(os.sched_getaffinity(0))
    module.set_num_threads(min(count, _MOST_THREADS))
    return module


@cache
def _missing() -> str | None:
    try:
        compiled()
    except ImportError as error:
        return (
            f"the compiled part is not installed ({error}); "
            "install polyquant where there is a C++17 compiler"
        )
    return None


# -- what it can run --------------------------------------------------------------------------


def _why_not(problem: Problem) -> str | None:
    missing = _missing()
    if missing is not None:
        return missing
    if problem.transformed:
        return "a transformation of the library watches the operands"
    for side in (problem.a, problem.b):
        if side == "float64":
            return "it computes in float32, and a float64 operand asks for more"
    if any(axes is not None and len(axes) > _MOST_AXES for axes in problem.layout):
        return f"it takes tensors of up to {_MOST_AXES} axes"
    return None


def _why_not_product(problem: Problem) -> str | None:
    for axes in problem.layout:
        if axes is not None and axes[:-2] != tuple(range(len(axes) - 2)):
            return "the axes of its matrices are not the last two of the stored ones"
    return _why_not(problem)


# -- the stored weight ------------------------------------------------------------------------


def matrix_of(q: QTensor) -> Any:
    """The compiled view of a tensor's stored arrays, made once."""
    if q._prepared is None:
        object.__setattr__(q, "_prepared", _matrix(q))
    return q._prepared


def _matrix(q: QTensor) -> Any:
    scheme, shape = q.scheme, q.stored_shape or (1,)
    kind, table = _kind(scheme, q.table)
    offset = None if scheme.offset is None else scheme.offset.kind
    stored_offset = None if scheme.offset is None else scheme.offset.dtype
    return compiled().Matrix(
        data=_plain(_lines(q.data)),
        shape=shape,
        block=scheme.block_extents(shape),
        bits=8 if scheme.store is QuantStore.NATIVE else scheme.bits,
        value_bits=scheme.bits,
        kind=kind,
        is_signed=scheme.value.is_signed,
        minifloat=_minifloat(scheme.value) if kind == _MINIFLOAT else (),
        table=table,
        scales=_grid(q.scales),
        scale_number=_number(scheme.scale),
        tensor_scale=None if q.tensor_scale is None else _grid(q.tensor_scale),
        offsets=None if q.offsets is None else _grid(q.offsets),
        offset_number=_number(stored_offset),
        offset_kind=_OFFSETS.index(offset),
    )


def _kind(scheme: QuantScheme, table: Array | None) -> tuple[int, Any]:
    """How a code becomes a number, and the table of the numbers where there is one."""
    is_small = scheme.bits <= 4
    if scheme.mode is QuantMode.LOOKUP:
        named = None if scheme.table in (None, CUSTOM) else named_table(str(scheme.table))
        entries = _plain(_in_order(table)) if named is None else named.copy()
        return (_TABLE16 if is_small else _TABLE256), entries
    if is_small:
        return _TABLE16, _numbers(scheme.value).copy()
    return (_MINIFLOAT if scheme.value.is_float else _INTEGER), None


@cache
def _numbers(value: QuantValue) -> F32:
    """The numbers of all codes of a narrow value."""
    if value.is_float:
        return decode_table(value)
    codes = np.arange(2**value.bits)
    sign = 2 ** (value.bits - 1)
    return ((codes ^ sign) - sign if value.is_signed else codes).astype(np.float32)


def _minifloat(value: QuantValue) -> tuple[int, ...]:
    """Masks and shifts that bring a minifloat's bits to float16's places (see native/weight.h)."""
    exponent_bits, mantissa_bits = int(value[1]), int(value[3])
    sign = 2 ** (value.bits - 1)
    power = 2 ** (15 - (2 ** (exponent_bits - 1) - 1))
    nan = sign - 1 if value is QuantValue.E4M3 else 0
    return sign, sign - 1, 16 - value.bits, 10 - mantissa_bits, power, nan


def _number(kind: ScaleDtype | QuantValue | QuantScheme | None) -> int:
    if isinstance(kind, ScaleDtype):
        return _NUMBERS.index(kind)
    return _NESTED if isinstance(kind, QuantScheme) else _U8


def _grid(part: Array | QTensor) -> Any:
    return matrix_of(part) if isinstance(part, QTensor) else _plain(_in_order(part))


def _in_order(array: Array) -> Array:
    """A small array's numbers side by side: a copy, of a view that has them apart."""
    if isinstance(array, np.ndarray | np.generic):
        return np.ascontiguousarray(array).reshape(array.shape)
    return array.contiguous()


def _lines(data: Array) -> Array:
    """Codes whose lines lie equally far apart, as they do but in a view of some of them."""
    strides = data.strides if isinstance(data, np.ndarray) else data.stride()
    lines = [(n, step) for n, step in zip(data.shape[:-1], strides, strict=False) if n != 1]
    even = all(outer == n * step for (_, outer), (n, step) in pairwise(lines))
    even = even and all(step >= 0 for _, step in lines) and strides[-1] == 1
    return data if even else _in_order(data)


def _plain(array: Array) -> Any:
    """An array as the compiled part takes it: NumPy's bfloat16 by its bits, nothing tracked."""
    if isinstance(array, np.ndarray):
        return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
    if getattr(array, "requires_grad", False):
        array = array.detach()
    return array.resolve_neg() if getattr(array, "is_neg", bool)() else array


# -- running ----------------------------------------------------------------------------------


def dequantize(q: QTensor, kind: Any) -> Array:
    """The values of ``q`` in logical order, float32 where ``kind`` is None."""
    wanted = namespace(q.data).float32 if kind is None else kind
    out, is_wider = _empty(q.data, q.stored_shape, wanted)
    matrix_of(q).decode(_plain(out), _threads(out))
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
    rows = x.shape[:-1]
    if q.ndim > 2:
        return _batched(x, q, kind)
    columns = q.shape[1:]
    count, depth = prod(rows), q.shape[0]
    flat = _plain_input(x if x.ndim == 2 else x.reshape((count, depth)))
    out, is_wider = _empty(x, (*rows, *columns), kind)
    along_k = q.axes != (0, 1)
    into = out if out.ndim == 2 and x.ndim == 2 else out.reshape((count, prod(columns)))
    lines = (prod(columns)) if along_k else depth
    matrix_of(q).matmul(flat, _plain(into), along_k, 0, lines, _threads(out))
    return namespace(out).astype(out, kind) if is_wider else out


def _batched(x: Array, q: QTensor, kind: Any) -> Array:
    """A product for each matrix of a batch, broadcast like NumPy's."""
    (depth, columns), batch = q.shape[-2:], q.shape[:-2]
    rows = x if x.ndim > 1 else x.reshape((1, depth))
    shape = np.broadcast_shapes(rows.shape[:-2], batch)
    height = rows.shape[-2]
    out, is_wider = _empty(x, (*shape, height, columns), kind)
    along_k = q.axes[-1] == q.ndim - 2
    lines = columns if along_k else depth
    matrix, threads = matrix_of(q), _threads(out)
    which = np.broadcast_to(np.arange(prod(batch)).reshape(batch), shape)
    for at in np.ndindex(*shape):
        skipped = len(shape) - (rows.ndim - 2)
        own = tuple(
            i if extent > 1 else 0 for i, extent in zip(at[skipped:], rows.shape, strict=False)
        )
        first = int(which[at]) * lines
        matrix.matmul(_plain_input(rows[own]), _plain(out[at]), along_k, first, lines, threads)
    made = namespace(out).astype(out, kind) if is_wider else out
    return made if x.ndim > 1 else made.reshape((*shape, columns))


def _empty(like: Array, shape: Sequence[int], kind: Any) -> tuple[Array, bool]:
    """A new array beside ``like``; float32 where float64 is asked for, and whether it is."""
    is_wider = _is_float64(kind)
    if isinstance(like, np.ndarray | np.generic):
        return np.empty(shape, np.float32 if is_wider else kind), is_wider
    return like.new_empty(shape, dtype=namespace(like).float32 if is_wider else kind), is_wider


@lru_cache(maxsize=64)
def _is_float64(kind: Hashable) -> bool:
    return (getattr(kind, "__name__", None) or str(kind)).endswith("float64")


def _plain_input(x: Array) -> Any:
    """Activations as the compiled part takes them: any strides, but whole, native numbers."""
    if isinstance(x, np.ndarray) and not (x.flags.aligned and x.dtype.isnative):
        x = x.astype(x.dtype.newbyteorder("="), order="C")
    return _plain(x)


def _threads(like: Array) -> int:
    """How many threads to use: the array's library may have a setting of its own (0: ours)."""
    if isinstance(like, np.ndarray):
        return 0
    owner = find_backend(like)
    return owner.num_threads() if owner is not None else 0


# -- threads ----------------------------------------------------------------------------------


def set_num_threads(count: int) -> None:
    """Use up to ``count`` threads for a product on the CPU: 1 to 1024, for the whole process.

    Without it, ``PQ_NUM_THREADS`` of the environment counts, else the processors that this process
    may use. torch tensors keep to ``torch.set_num_threads``. Results do not depend on it. Raises
    InvalidArgument, and BackendMissing where the compiled part is not installed.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_THREADS:
        raise InvalidArgument(name="count", wanted=f"1 to {_MOST_THREADS} threads", got=count)
    _compiled_or_error().set_num_threads(count)


def num_threads() -> int:
    """How many threads a product on the CPU may use (1 without the compiled part)."""
    return 1 if _missing() else int(compiled().num_threads())


def _compiled_or_error() -> Any:
    missing = _missing()
    if missing is not None:
        fix = "Run: pip install --force-reinstall polyquant, where there is a C++17 compiler"
        raise BackendMissing(backend="native", reason=missing, fix=fix)
    return compiled()


def _threads_asked() -> int | None:
    text = os.environ.get("PQ_NUM_THREADS", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MOST_THREADS):
        wanted = f"1 to {_MOST_THREADS}, or nothing"
        raise InvalidArgument(name="PQ_NUM_THREADS", wanted=wanted, got=text)
    return int(text)


KERNELS = (
    Kernel("native.matmul", "matmul", _why_not_product, matmul),
    Kernel("native.dequantize", "dequantize", _why_not, dequantize),
)
