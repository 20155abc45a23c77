"""Compute operations, each twice: of a QTensor and an array, and of their values in NumPy.

Not the test of each operation, which is test_ops.py: what a tensor of any layout, shape or history
must be able to do.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import polyquant as pq
from devices import host, put
from polyquant import ops, standard

Host = np.ndarray[Any, Any]
F32 = np.float32


class Computation(NamedTuple):
    """Both calls, of the tensor (or its values) and an array of the same shape.

    ``is_exact``: IEEE or a choice, so that every library gives the same number. ``needs_numbers``:
    a choice along the last axis, which an empty one does not have.
    """

    ours: Callable[[Any, Any], Any]
    numpy: Callable[[Host, Host], Any]
    is_exact: bool = True
    needs_numbers: bool = False


def _same(name: str, numpy: str = "", *, is_exact: bool = True) -> Computation:
    """An operation of one operand, which NumPy has too."""
    theirs = getattr(np, numpy or name)
    return Computation(lambda q, y: getattr(ops, name)(q), lambda x, y: theirs(x), is_exact)


def _two(name: str, numpy: str = "") -> Computation:
    theirs = getattr(np, numpy or name)
    return Computation(lambda q, y: getattr(ops, name)(q, y), lambda x, y: theirs(x, y))


def _last(name: str, numpy: str = "", *, is_exact: bool = True) -> Computation:
    """An operation down the last axis."""
    theirs = getattr(np, numpy or name)
    return Computation(
        lambda q, y: getattr(ops, name)(q, axis=-1, keepdims=True),
        lambda x, y: theirs(x, axis=-1, keepdims=True),
        is_exact,
        needs_numbers="max" in name or "min" in name,
    )


def _along(name: str, theirs: Callable[..., Any], *, is_exact: bool = True) -> Computation:
    return Computation(
        lambda q, y: getattr(ops, name)(q, -1), lambda x, y: theirs(x, axis=-1), is_exact
    )


def first_places(y: Any) -> Any:
    """Indices 0, as many as ``y`` has lines along its last axis, beside it."""
    xp = standard.namespace(y)
    return xp.astype(y[..., :1] * 0, xp.int64)


_erf = np.vectorize(math.erf, otypes=[F32])

COMPUTATIONS: MappingProxyType[str, Computation] = MappingProxyType(
    {name: _same(name) for name in ("abs", "sign", "floor", "ceil", "square")}
    | {name: _same(name, is_exact=False) for name in ("exp", "sin", "cos", "tanh", "sinh", "cosh")}
    | {"sqrt": _same("sqrt", is_exact=False)}  # torch's is one unit in the last place off
    | {"neg": _same("neg", "negative"), "round": _same("round", "rint")}
    | {"recip": _same("recip", "reciprocal")}
    | {"add": _two("add"), "sub": _two("sub", "subtract"), "mul": _two("mul", "multiply")}
    | {"div": _two("div", "divide"), "maximum": _two("maximum"), "minimum": _two("minimum")}
    | {name: _two(name) for name in ("equal", "not_equal", "less", "greater")}
    | {"less_equal": _two("less_equal"), "greater_equal": _two("greater_equal")}
    | {name: _last(name) for name in ("max", "min", "argmax", "argmin", "any", "all")}
    | {name: _last(name, is_exact=False) for name in ("sum", "mean", "prod")}
    | {
        "cummax": _along("cummax", np.maximum.accumulate),
        "cummin": _along("cummin", np.minimum.accumulate),
        "cumsum": _along("cumsum", np.cumsum, is_exact=False),
        "cumprod": _along("cumprod", np.cumprod, is_exact=False),
        "erf": Computation(lambda q, y: ops.erf(q), lambda x, y: _erf(x), False),
        "log1p": Computation(
            lambda q, y: ops.log1p(ops.square(q)), lambda x, y: np.log1p(x * x), False
        ),
        "pow": Computation(lambda q, y: ops.pow(q, 2), lambda x, y: x * x, False),
        "clamp": Computation(
            lambda q, y: ops.clamp(q, -0.5, 0.25), lambda x, y: np.clip(x, F32(-0.5), F32(0.25))
        ),
        "where": Computation(
            lambda q, y: ops.where(y > 0, q, y), lambda x, y: np.where(y > 0, x, y)
        ),
        "mask_fill": Computation(
            lambda q, y: ops.mask_fill(q, y > 0, 7.0), lambda x, y: np.where(y > 0, F32(7), x)
        ),
        "sort": Computation(
            lambda q, y: ops.sort(q, descending=True), lambda x, y: -np.sort(-x, axis=-1)
        ),
        "argsort": Computation(
            lambda q, y: ops.argsort(q), lambda x, y: np.argsort(x, axis=-1, stable=True)
        ),
        "topk": Computation(
            lambda q, y: ops.topk(q, min(2, q.shape[-1]))[0],
            lambda x, y: -np.sort(-x, axis=-1)[..., :2],
        ),
        "max_abs": Computation(
            lambda q, y: ops.max_abs(q, axis=-1),
            lambda x, y: np.abs(x).max(axis=-1),
            needs_numbers=True,
        ),
        "log": Computation(
            lambda q, y: ops.log(ops.abs(q)), lambda x, y: np.log(np.abs(x)), is_exact=False
        ),
        "tan": _same("tan", is_exact=False),
        "remainder": Computation(lambda q, y: ops.remainder(q, 2), lambda x, y: np.mod(x, F32(2))),
        "floor_divide": Computation(
            lambda q, y: ops.floor_divide(q, 2), lambda x, y: np.floor_divide(x, F32(2))
        ),
        "argtopk": Computation(
            lambda q, y: ops.argtopk(q, min(1, q.shape[-1])),
            lambda x, y: np.argsort(-x, axis=-1, stable=True)[..., :1],
        ),
        "scatter": Computation(
            lambda q, y: ops.scatter(q, -1, first_places(y), y[..., :1], reduce="add"),
            lambda x, y: np.concatenate([x[..., :1] + y[..., :1], x[..., 1:]], -1),
        ),
        "embedding": Computation(
            lambda q, y: ops.embedding(first_places(y)[: q.shape[0]], q),
            lambda x, y: x[first_places(y)[: x.shape[0]]],
        ),
        "assign": Computation(
            lambda q, y: ops.assign(q, (..., slice(1, None)), y[..., 1:]),
            lambda x, y: np.concatenate([x[..., :1], y[..., 1:]], -1),
        ),
    }
)


#: What needs operands of its own: four axes.
ELSEWHERE = frozenset({"conv2d"})


def compare(q: pq.QTensor, place: str) -> None:
    """Every computation of a tensor of one axis or more, against NumPy's of its values."""
    values = host(q.dequantize())
    other = np.random.default_rng(0).normal(size=values.shape).astype(F32)
    there, empty = put(other, place), not values.shape[-1]
    for name, computation in COMPUTATIONS.items():
        if empty and computation.needs_numbers:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of infinities
            wanted = np.asarray(computation.numpy(values, other))
            got = host(computation.ours(q, there))
        assert got.dtype.kind == wanted.dtype.kind, name
        if got.dtype.kind == "f":
            assert got.dtype == F32, name
        limits = {} if computation.is_exact else {"rtol": 2e-5, "atol": 1e-5}
        np.testing.assert_allclose(got, wanted, **({"rtol": 0} | limits), err_msg=name)
