"""Runs Burn's cases of operations: each a line of one table, called as it is called here.

A view is a QTensor again, whose values are bit for bit those of the same view of the decoded
values. What computes gives arrays; under propagation a quantized tensor, where Burn's would be.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import polyquant as pq
from burn_terms import (
    F32,
    Case,
    Host,
    assert_close,
    assert_f32,
    scale_numbers,
    scheme_of,
    values_of,
)
from devices import assert_same_bits, assert_same_parts, host, put
from polyquant import ops
from polyquant.errors import NonFiniteInput

#: What a view leaves as it was in a scheme. (Blocks may become smaller.)
_KEPT = ("value", "mode", "table", "store", "offset")

#: What an operation gives: floats that propagation quantizes anew; floats that are values of the
#: operand, so that they keep its numbers; floats always; truths or places, always plain.
FLOW, PICKED, FLOAT, PLAIN = "flow", "picked", "float", "plain"


class View(NamedTuple):
    """A layout operation of a QTensor, and the same of an array."""

    ours: Callable[[pq.QTensor, Case], Any]
    numpy: Callable[[Host, Case], Any]


class Compute(NamedTuple):
    """An operation that computes, and what it gives."""

    ours: Callable[[pq.QTensor, Case], Any]
    gives: str = FLOW


# -- operands ---------------------------------------------------------------------------------

_DTYPES = MappingProxyType({"quantized": F32, "float": F32, "int": np.int64, "bool": np.bool_})


def operand(given: Any, device: str) -> Any:
    """A described operand as an array or a QTensor of the device; anything else as it is."""
    if isinstance(given, list):
        return [operand(item, device) for item in given]
    if not isinstance(given, dict) or "kind" not in given:
        return given
    array = np.asarray(given["data"], _DTYPES[given["kind"]]).reshape(given["shape"])
    there = put(array, device)
    quantized = given["kind"] == "quantized"
    return pq.quantize(there, scheme_of(given["scheme"])) if quantized else there


def operands(case: Case, device: str) -> tuple[pq.QTensor, Case]:
    """The quantized input, turned as the case says, and the other operands beside it."""
    args = {name: operand(given, device) for name, given in case["args"].items()}
    q = pq.quantize(put(values_of(case), device), scheme_of(case["scheme"]))
    if "reshape" in args:
        q = q.reshape(args["reshape"])
    if args.get("transpose_first") or args.get("transpose_lhs"):
        q = q.mT
    if args.get("transpose_rhs"):
        args["rhs"] = args["rhs"].mT
    return q, args


def _decoded(args: Any) -> Any:
    """The operands of a case with the values of the quantized ones, on the host."""
    if isinstance(args, dict):
        return {name: _decoded(given) for name, given in args.items()}
    if isinstance(args, list):
        return [_decoded(item) for item in args]
    if isinstance(args, pq.QTensor):
        return host(args.dequantize())
    return host(args) if hasattr(args, "shape") else args


def _key(slices: Sequence[Sequence[int | None]]) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in slices)


def _rows(args: Case) -> tuple[Any, ...]:
    """The key that takes ``indices`` along ``dim``."""
    return (*[slice(None)] * args["dim"], args["indices"])


# -- how each is called -----------------------------------------------------------------------


def _reshaped(x: Any, args: Case) -> Any:
    for shape in args.get("shapes", [args.get("shape")]):
        x = x.reshape(tuple(shape))
    return x


def _expanded(x: Host, args: Case) -> Host:
    shape = list(args["shape"])
    for axis in range(-1, -1 - x.ndim, -1):
        shape[axis] = x.shape[axis] if shape[axis] == -1 else shape[axis]
    return np.broadcast_to(x, shape)


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(np.cumsum(sizes)[:-1])


def _pieces(x: Host, args: Case) -> list[Host]:
    """Pieces of one size, the last of what is left, as torch and Burn cut them."""
    extent = x.shape[args["dim"]]
    size = args["size"] if "size" in args else -(-extent // args["chunks"])
    return np.split(x, range(size, extent, size), args["dim"])


def _tiled(x: Any, args: Case) -> tuple[int, ...]:
    return tuple(args["times"] if axis == args["dim"] else 1 for axis in range(x.ndim))


VIEWS: MappingProxyType[str, View] = MappingProxyType(
    {
        "cat": View(
            lambda q, a: ops.concat([q, *a["others"]], a["dim"]),
            lambda x, a: np.concatenate([x, *a["others"]], a["dim"]),
        ),
        "chunk": View(lambda q, a: q.chunk(a["chunks"], a["dim"]), _pieces),
        "expand": View(lambda q, a: q.expand(a["shape"]), _expanded),
        "flip": View(
            lambda q, a: q.flip(tuple(a["axes"])), lambda x, a: np.flip(x, tuple(a["axes"]))
        ),
        "gather": View(
            lambda q, a: q.gather(a["indices"], a["dim"]),
            lambda x, a: np.take_along_axis(x, a["indices"], a["dim"]),
        ),
        "mask_select": View(lambda q, a: q[a["mask"]], lambda x, a: x[a["mask"]]),
        "narrow": View(
            lambda q, a: q.narrow(a["dim"], a["start"], a["length"]),
            lambda x, a: np.take(x, range(a["start"], a["start"] + a["length"]), a["dim"]),
        ),
        "permute": View(lambda q, a: q.permute(a["axes"]), lambda x, a: x.transpose(a["axes"])),
        "repeat_dim": View(
            lambda q, a: q.tile(_tiled(q, a)), lambda x, a: np.tile(x, _tiled(x, a))
        ),
        "reshape": View(_reshaped, _reshaped),
        "select": View(
            lambda q, a: q.take(a["indices"], a["dim"]),
            lambda x, a: np.take(x, a["indices"], a["dim"]),
        ),
        "slice": View(lambda q, a: q[_key(a["slices"])], lambda x, a: x[_key(a["slices"])]),
        "split": View(lambda q, a: q.split(a["size"], a["dim"]), _pieces),
        "split_with_sizes": View(
            lambda q, a: q.split(a["sizes"], a["dim"]),
            lambda x, a: np.split(x, _starts(a["sizes"]), a["dim"]),
        ),
        "stack": View(
            lambda q, a: ops.stack([q, *a["others"]], a["dim"]),
            lambda x, a: np.stack([x, *a["others"]], a["dim"]),
        ),
        "swap_dims": View(
            lambda q, a: q.swapaxes(a["dim0"], a["dim1"]),
            lambda x, a: np.swapaxes(x, a["dim0"], a["dim1"]),
        ),
        "transpose": View(lambda q, a: q.mT, lambda x, a: np.swapaxes(x, -2, -1)),
    }
)


def _unary(name: str) -> Compute:
    return Compute(lambda q, a: getattr(ops, name)(q))


def _binary(name: str, other: str = "rhs", gives: str = FLOW) -> Compute:
    return Compute(lambda q, a: getattr(ops, name)(q, a[other]), gives)


def _whole(name: str, gives: str = FLOW) -> Compute:
    return Compute(lambda q, a: getattr(ops, name)(q), gives)


def _along(name: str, gives: str = FLOW) -> Compute:
    return Compute(lambda q, a: getattr(ops, name)(q, axis=a["dim"], keepdims=True), gives)


def _extreme_with_place(name: str) -> Compute:
    values, places = (_along(kind).ours for kind in (name, f"arg{name}"))
    return Compute(lambda q, a: (values(q, a), places(q, a)), PICKED)


def _sorted(name: str) -> Callable[[pq.QTensor, Case], Any]:
    return lambda q, a: getattr(ops, name)(q, axis=a["dim"], descending=a["descending"])


def _assigned(q: Any, key: Any, values: Any, how: str) -> Any:
    return ops.assign(q, key, values, reduce=how)


_UNARY = (
    *("ceil", "cos", "cosh", "erf", "exp", "floor", "log", "log1p", "neg", "recip", "round"),
    *("sin", "sinh", "sqrt", "tan", "tanh"),
)
_COMPARISONS = MappingProxyType(
    {
        "equal": "equal",
        "not_equal": "not_equal",
        "greater": "greater",
        "greater_equal": "greater_equal",
        "lower": "less",
        "lower_equal": "less_equal",
    }
)
_ARITHMETIC = MappingProxyType(
    {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "remainder": "remainder"}
    | {"powf": "pow"}
)

COMPUTE: MappingProxyType[str, Compute] = MappingProxyType(
    {name: _unary(name) for name in _UNARY}
    | {name: _binary(ours) for name, ours in _ARITHMETIC.items()}
    | {f"{name}_scalar": _binary(ours, "scalar") for name, ours in _ARITHMETIC.items()}
    | {name: _binary(ours, "rhs", PLAIN) for name, ours in _COMPARISONS.items()}
    | {
        f"{name}_scalar": _binary(_COMPARISONS[name], "scalar", PLAIN)
        for name in ("equal", "not_equal", "lower", "lower_equal")
    }
    | {name: _whole(name) for name in ("mean", "prod")}
    | {f"{name}_dim": _along(name) for name in ("mean", "prod", "sum")}
    | {name: _whole(name, PLAIN) for name in ("all", "any")}
    | {f"{name}_dim": _along(name, PLAIN) for name in ("all", "any")}
    | {name: _along(name, PLAIN) for name in ("argmax", "argmin")}
    | {f"{name}_dim": _along(name, PICKED) for name in ("max", "min")}
    | {f"{name}_dim_with_indices": _extreme_with_place(name) for name in ("max", "min")}
    | {
        "abs": Compute(lambda q, a: ops.abs(q), PICKED),
        "argsort": Compute(_sorted("argsort"), PLAIN),
        "clamp": Compute(lambda q, a: ops.clamp(q, a["min"], a["max"])),
        "clamp_max": Compute(lambda q, a: ops.clamp(q, max=a["max"])),
        "clamp_min": Compute(lambda q, a: ops.clamp(q, min=a["min"])),
        "mask_fill": Compute(lambda q, a: ops.mask_fill(q, a["mask"], a["value"]), FLOAT),
        "mask_where": Compute(lambda q, a: ops.where(a["mask"], a["source"], q), FLOAT),
        "max_pair": _binary("maximum"),
        "min_pair": _binary("minimum"),
        "quantize_dynamic+mul_scalar": _binary("mul", "scalar"),
        "scatter_add": Compute(
            lambda q, a: ops.scatter(q, a["dim"], a["indices"], a["values"], reduce="add"), FLOAT
        ),
        "select_assign_add": Compute(
            lambda q, a: _assigned(q, _rows(a), a["values"], "add"), FLOAT
        ),
        "slice+add": Compute(lambda q, a: ops.add(q[_key(a["first"])], q[_key(a["second"])])),
        "slice_assign": Compute(
            lambda q, a: _assigned(q, _key(a["slices"]), a["value"], "set"), FLOAT
        ),
        "sort": Compute(_sorted("sort"), PICKED),
        "sort_with_indices": Compute(
            lambda q, a: (_sorted("sort")(q, a), _sorted("argsort")(q, a)), PICKED
        ),
        "topk": Compute(lambda q, a: ops.topk(q, a["k"], axis=a["dim"])[0], PICKED),
        "topk_with_indices": Compute(lambda q, a: ops.topk(q, a["k"], axis=a["dim"]), PICKED),
    }
)

#: Python's own spelling of some of them.
OPERATORS: MappingProxyType[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
    | {"remainder": operator.mod, "powf": operator.pow}
    | {"equal": operator.eq, "not_equal": operator.ne}
    | {"greater": operator.gt, "greater_equal": operator.ge}
    | {"lower": operator.lt, "lower_equal": operator.le}
)


# -- running one ------------------------------------------------------------------------------


def view(name: str, case: Case, device: str) -> None:
    """A QTensor, of exactly the values; and the same whether results propagate or not."""
    q, args = operands(case, device)
    got, wanted = VIEWS[name].ours(q, args), VIEWS[name].numpy(*_decoded([q, args]))
    expected = case["expected"]
    if expected == {"same_as": "input"}:
        expected = values_of(case)
    many = isinstance(expected[0] if len(expected) else None, list)
    for part, values, numbers, shape in zip(
        got if many else [got],
        wanted if many else [wanted],
        expected if many else [expected],
        case["expected_shape"] if many else [case["expected_shape"]],
        strict=True,
    ):
        assert isinstance(part, pq.QTensor)
        assert list(part.shape) == shape
        assert all(getattr(part.scheme, name) == getattr(q.scheme, name) for name in _KEPT)
        assert_close(host(part.dequantize()), case, numbers)
        assert_same_bits(host(part.dequantize()), np.ascontiguousarray(values))


@np.errstate(all="ignore")  # NumPy warns of infinities
def compute(name: str, case: Case, device: str) -> None:
    """Arrays within the case's tolerance; what propagation makes of them; the operator's form."""
    op, (q, args) = COMPUTE[name], operands(case, device)
    got = op.ours(q, args)
    _check(got, case)
    if op.gives == FLOW and not np.isfinite(host(got)).all():
        with pq.propagation("propagate"), pytest.raises(NonFiniteInput):
            op.ours(q, args)
        return
    with pq.propagation("propagate"):
        again = op.ours(q, args)
    values, propagated = (x[0] if "expected_indices" in case else x for x in (got, again))
    if op.gives in (FLOAT, PLAIN):
        assert_same_bits(host(propagated), host(values))
    else:
        assert isinstance(propagated, pq.QTensor)
        assert propagated.scheme == q.scheme
    if op.gives == PICKED:
        _check(again, case)
        assert_same_bits(host(propagated.dequantize()), host(values))
    elif op.gives == FLOW:
        assert_same_parts(propagated, pq.quantize(values, q.scheme))
    spelt = OPERATORS.get(name.removesuffix("_scalar"))
    if spelt is not None:
        other = args["scalar" if name.endswith("_scalar") else "rhs"]
        assert_same_bits(host(spelt(q, other)), host(values))


def _check(got: Any, case: Case) -> None:
    """Kind, shape and numbers of a result, and places where the case states them."""
    if "expected_indices" in case:
        got, places = got
        assert host(places).dtype.kind == "i"
        assert host(places).reshape(-1).tolist() == case["expected_indices"]
    found = host(got.dequantize() if isinstance(got, pq.QTensor) else got)
    kinds = {"float": "f", "int": "i", "bool": "b"}
    assert found.dtype.kind == kinds[case["expected_kind"]]
    if found.dtype.kind == "f":
        assert found.dtype == F32
    # Burn's whole reductions have one axis, of length 1; here they have none.
    assert list(found.shape) == case["expected_shape"] or case["expected_shape"] == [1]
    assert_close(found, case)


# -- products and gradients -------------------------------------------------------------------


def matmul(case: Case, device: str) -> None:
    args = case["args"]
    left = put(values_of(case), device)
    if args["lhs_kind"] == "quantized":
        left = pq.quantize(left, scheme_of(case["scheme"]))
    right = operand(args["rhs"], device)
    y = pq.matmul(left, right)
    _check_product(y, case, args)
    derived = case.get("derived", {})
    if "weight_values" in derived:
        assert host(right.codes()).reshape(-1).tolist() == derived["weight_values"]
        assert_f32(scale_numbers(right), derived["weight_scale"])
    # Propagated, it is quantized anew by the scheme of the left operand that has one.
    scheme = (left if isinstance(left, pq.QTensor) else right).scheme
    with pq.propagation("propagate"):
        again = pq.matmul(left, right)
        scaled = ops.div(again, args.get("scalar", 1.0))
    assert_same_parts(again, pq.quantize(y, scheme))
    wanted = host(again.dequantize()) / F32(args.get("scalar", 1.0))
    assert_same_parts(scaled, pq.quantize(put(wanted, device), scheme))


def _check_product(y: Any, case: Case, args: Case) -> None:
    scaled = host(y / args.get("scalar", 1.0))
    assert list(scaled.shape) == case["expected_shape"]
    assert scaled.dtype == F32
    assert_close(scaled, case)


def autodiff(case: Case, device: str) -> None:
    """The gradients of the float operands beside a quantized weight, which has none."""
    args, names = case["args"], case["args"]["tracked"]
    w = pq.quantize(put(values_of(case), device), scheme_of(case["scheme"]))

    def loss(*tracked: Any) -> Any:
        given = dict(zip(names, tracked, strict=True))
        if "a" in given:
            return (given["x"] @ (w.dequantize() + given["a"] @ given["b"])).sum()
        return (given["x"] @ w).sum()

    gradients = _gradients(loss, [operand(args[name], device) for name in names], device)
    for name, gradient in zip(names, gradients, strict=True):
        assert_close(host(gradient), case, case["expected"][f"grad_{name}"])


def _gradients(loss: Callable[..., Any], tracked: list[Any], device: str) -> Sequence[Any]:
    if device.startswith("jax"):
        import jax

        return jax.grad(loss, tuple(range(len(tracked))))(*tracked)
    import torch

    return torch.autograd.grad(loss(*(x.requires_grad_() for x in tracked)), tracked)


#: Operation of a case -> what runs it.
OPS: MappingProxyType[str, Callable[[Case, str], None]] = MappingProxyType(
    {name: partial(view, name) for name in VIEWS}
    | {name: partial(compute, name) for name in COMPUTE}
    | {"autodiff": autodiff, "matmul": matmul, "matmul+div_scalar": matmul}
)

#: Operations that need a library with gradients.
WITH_GRADIENTS = frozenset({"autodiff"})
