"""The compute ops, each against the library's own function on the dequantized tensor.

What each op must be is written down here by hand, as a function of NumPy and one of torch: nothing
is taken from the table that the ops are made from.
"""

from __future__ import annotations

import inspect
import math
import operator
import threading
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import polyquant as pq
from devices import DEVICES, assert_same_bits, assert_same_parts, host, needs, put
from polyquant import errors, ops
from polyquant.arrays import dtype_name
from strategies import Case, cases, share

F32 = np.float32
#: The devices of the random tests. JAX compiles every new shape, so it has fixed ones.
CPU = tuple(device for device in ("numpy", "torch:cpu") if device in DEVICES)
on_cpu = pytest.mark.parametrize("place", CPU)
#: Where calls of many shapes are quick: everywhere but on JAX.
eagerly = pytest.mark.parametrize("place", [d for d in DEVICES if not d.startswith("jax")])


class Known(NamedTuple):
    """The function of NumPy and the one of torch that an op is: names, or functions."""

    numpy: Any
    torch: Any


def _erf(x: Any) -> Any:
    wide = [math.erf(float(v)) for v in np.asarray(x).reshape(-1)]
    return np.asarray(wide, np.float64).astype(x.dtype).reshape(x.shape)


UNARY = MappingProxyType(
    {
        "neg": Known("negative", "neg"),
        "abs": Known("absolute", "abs"),
        "sign": Known("sign", "sign"),
        "recip": Known("reciprocal", "reciprocal"),
        "sqrt": Known("sqrt", "sqrt"),
        "square": Known("square", "square"),
        "exp": Known("exp", "exp"),
        "log": Known("log", "log"),
        "log1p": Known("log1p", "log1p"),
        "erf": Known(_erf, "erf"),
        "sin": Known("sin", "sin"),
        "cos": Known("cos", "cos"),
        "tan": Known("tan", "tan"),
        "sinh": Known("sinh", "sinh"),
        "cosh": Known("cosh", "cosh"),
        "tanh": Known("tanh", "tanh"),
        "floor": Known("floor", "floor"),
        "ceil": Known("ceil", "ceil"),
        "round": Known("rint", "round"),
    }
)
BINARY = MappingProxyType(
    {
        "add": Known("add", "add"),
        "sub": Known("subtract", "sub"),
        "mul": Known("multiply", "mul"),
        "div": Known("divide", "div"),
        "floor_divide": Known("floor_divide", "floor_divide"),
        "remainder": Known("remainder", "remainder"),
        "pow": Known("power", "pow"),
        "maximum": Known("maximum", "maximum"),
        "minimum": Known("minimum", "minimum"),
    }
)
COMPARISONS = MappingProxyType(
    {
        "equal": Known("equal", "eq"),
        "not_equal": Known("not_equal", "ne"),
        "less": Known("less", "lt"),
        "less_equal": Known("less_equal", "le"),
        "greater": Known("greater", "gt"),
        "greater_equal": Known("greater_equal", "ge"),
    }
)
REDUCTIONS = MappingProxyType(
    {
        "sum": Known("sum", "sum"),
        "mean": Known("mean", "mean"),
        "prod": Known("prod", "prod"),
        "max": Known("max", "amax"),
        "min": Known("min", "amin"),
        "max_abs": Known(lambda x, **k: np.max(np.abs(x), **k), lambda x, **k: x.abs().amax(**k)),
        "any": Known("any", "any"),
        "all": Known("all", "all"),
    }
)
ARGUMENTS = MappingProxyType(
    {"argmax": Known("argmax", "argmax"), "argmin": Known("argmin", "argmin")}
)
RUNNING = MappingProxyType(
    {
        "cumsum": Known("cumsum", "cumsum"),
        "cumprod": Known("cumprod", "cumprod"),
        "cummax": Known(np.maximum.accumulate, lambda x, axis: x.cummax(axis).values),
        "cummin": Known(np.minimum.accumulate, lambda x, axis: x.cummin(axis).values),
    }
)
#: Ops that have tests of their own below.
OTHERS = frozenset(
    {"clamp", "where", "mask_fill", "sort", "argsort", "topk", "argtopk", "scatter", "assign"}
    | {"embedding", "conv2d"}
)
#: Their zeros may be of either sign: of 0 and -0 a library takes either as the larger.
PICKING = ("max", "min", "maximum", "minimum", "cummax", "cummin", "max_abs")


def theirs(op: str, known: Known, device: str) -> Callable[..., Any]:
    """The library's own function."""
    function = known.torch if device.startswith("torch") else known.numpy
    if not isinstance(function, str):
        return function  # type: ignore[no-any-return]
    return getattr(__import__("torch" if device.startswith("torch") else "numpy"), function)  # type: ignore[no-any-return]


def quietly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call without NumPy's warnings of infinities and of means of nothing."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return function(*args, **options)


def assert_same(got: Any, wanted: Any, op: str = "") -> None:
    """The same library, device, dtype, shape and bits."""
    assert type(wanted) is type(got) or isinstance(wanted, np.generic)
    assert pq.device_of(got) == pq.device_of(wanted)
    left, right = np.asarray(host(got)), np.asarray(host(wanted))
    if op in PICKING:
        left, right = left + left.dtype.type(0), right + right.dtype.type(0)
    assert_same_bits(left, right, op)


# -- random tensors ---------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn, device: str, *, limit: int = 400, min_rank: int = 0) -> pq.QTensor:
    """A tensor of a random scheme and shape, its axes in a random order."""
    case: Case = draw(cases(limit=limit))
    assume(case.values.ndim >= min_rank)
    q = pq.quantize(case.values, case.scheme, table=case.table)
    return q.permute(*draw(st.permutations(range(q.ndim)))).to(device)


@st.composite
def others(draw: st.DrawFn, q: pq.QTensor) -> Any:
    """A second operand: a number, an array that broadcasts, another tensor, or the same one."""
    kind = draw(st.sampled_from(["number", "numpy number", "array", "array", "tensor", "itself"]))
    if kind == "number":
        return draw(st.sampled_from([0, 1, 2, -3, 0.5, -0.0, 0.1, 1e-3, True]))
    if kind == "numpy number":
        return F32(draw(st.sampled_from([0.0, 2.0, -0.25])))
    if kind == "itself":
        return q
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = q.shape[draw(st.integers(0, q.ndim)) :]
    shape = tuple(draw(st.sampled_from([n, 1])) for n in shape)
    values = rng.normal(size=shape).astype(F32)
    if kind == "tensor":
        return pq.quantize(values, "q4s/tensor:f32").to(q.device)
    name = draw(st.sampled_from(["float16", "bfloat16", "float32", "float64", "int32", "bool"]))
    if name == "bool":
        return put(values > 0, q.device)
    if name == "int32":
        return put((4 * values).astype(np.int32), q.device)
    return as_dtype(put(values, q.device), name)


def as_dtype(array: Any, name: str) -> Any:
    if hasattr(array, "numpy"):
        import torch

        return array.to(getattr(torch, name))
    import ml_dtypes

    return array.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def entering(x: Any, name: str) -> Any:
    """An operand as the library's own function takes it."""
    if isinstance(x, pq.QTensor):
        return x.dequantize(name)
    if isinstance(x, np.generic):
        return x.item()
    return as_dtype(x, name) if hasattr(x, "shape") else x


def float_name(*operands: Any) -> str:
    """The dtype of the float array among the operands, or float32."""
    arrays = [x for x in operands if hasattr(x, "dtype") and not isinstance(x, np.generic)]
    names = [dtype_name(x) for x in arrays]
    return next((name for name in names if "float" in name), "float32")


@st.composite
def axes(draw: st.DrawFn, q: pq.QTensor, *, several: bool = True) -> Any:
    """None, one axis from either end, or some axes."""
    if not q.ndim:
        return None
    one = st.integers(-q.ndim, q.ndim - 1)
    if not several:
        return draw(st.one_of(st.none(), one))
    some = st.sets(st.integers(0, q.ndim - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    return draw(st.one_of(st.none(), one, some))


# -- number by number -------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize("op", UNARY)
@given(data=st.data())
@settings(max_examples=share(0.04, nightly=0.1))
def test_unary(op: str, place: str, data: st.DataObject) -> None:
    q = data.draw(tensors(place))
    got = quietly(getattr(ops, op), q)
    assert_same(got, quietly(theirs(op, UNARY[op], place), q.dequantize()), op)


@on_cpu
@pytest.mark.parametrize("op", [*BINARY, *COMPARISONS])
@given(data=st.data())
@settings(max_examples=share(0.06, nightly=0.1))
def test_binary(op: str, place: str, data: st.DataObject) -> None:
    q = data.draw(tensors(place))
    other = data.draw(others(q))
    name = float_name(other)
    known = theirs(op, (BINARY | COMPARISONS)[op], place)
    a, b = entering(q, name), entering(other, name)
    if not hasattr(b, "shape") and (op in ("maximum", "minimum") or place == "numpy"):
        b = as_dtype(put(np.asarray(b), place), "float32")
    got, wanted = quietly(getattr(ops, op), q, other), quietly(known, a, b)
    assert_same(got, wanted, op)
    if hasattr(b, "shape"):  # of a number on the left torch has no function
        assert_same(quietly(getattr(ops, op), other, q), quietly(known, b, a), op)


@on_cpu
@given(data=st.data())
@settings(max_examples=share(0.15, nightly=0.2))
def test_clamp(place: str, data: st.DataObject) -> None:
    q = data.draw(tensors(place))
    low, high = (data.draw(st.one_of(st.none(), others(q))) for _ in range(2))
    names = {float_name(x) for x in (low, high) if "float" in dtype_name_or_none(x)}
    assume(len(names) <= 1)
    name = next(iter(names), "float32")
    wanted = entering(q, name)
    for bound, choose in ((low, "maximum"), (high, "minimum")):
        if bound is not None:
            library = __import__("torch" if place.startswith("torch") else "numpy")
            bound = entering(bound, name)
            if not hasattr(bound, "shape"):
                bound = as_dtype(put(np.asarray(bound), place), name)
            wanted = getattr(library, choose)(wanted, bound)
    assert_same(quietly(ops.clamp, q, low, high), wanted, "maximum")


def dtype_name_or_none(x: Any) -> str:
    is_array = hasattr(x, "dtype") and not isinstance(x, np.generic)
    return dtype_name(x) if is_array else ""


@on_cpu
@given(data=st.data())
@settings(max_examples=share(0.1, nightly=0.2))
def test_where_and_mask_fill(place: str, data: st.DataObject) -> None:
    q = data.draw(tensors(place))
    other = data.draw(others(q))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    mask = rng.random(q.shape) < 0.5
    name = float_name(other)
    a, b = (
        host(x) if hasattr(x, "shape") else x for x in (entering(q, name), entering(other, name))
    )
    b = np.asarray(b, a.dtype)
    there = put(mask, place)
    assert_same_bits(host(ops.where(there, q, other)), np.where(mask, a, b))
    assert_same_bits(host(ops.where(there, other, q)), np.where(mask, b, a))
    assert_same_bits(host(ops.mask_fill(q, there, other)), np.where(mask, b, a))


# -- over axes --------------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize("op", REDUCTIONS)
@given(data=st.data())
@settings(max_examples=share(0.05, nightly=0.1))
def test_reductions(op: str, place: str, data: st.DataObject) -> None:
    q, is_torch = data.draw(tensors(place)), place.startswith("torch")
    axis = data.draw(axes(q, several=not (is_torch and op in ("prod", "any", "all"))))
    keepdims = data.draw(st.booleans())
    x = q.dequantize()
    if op in PICKING:
        over = range(q.ndim) if axis is None else np.atleast_1d(axis)
        assume(all(q.shape[a] for a in over))
    if not is_torch:
        wanted = quietly(theirs(op, REDUCTIONS[op], place), x, axis=axis, keepdims=keepdims)
    elif axis is None:
        options = {"dim": tuple(range(q.ndim))} if op in PICKING else {}
        wanted = theirs(op, REDUCTIONS[op], place)(x, **options)
        wanted = wanted.reshape((1,) * q.ndim) if keepdims else wanted
    else:
        wanted = theirs(op, REDUCTIONS[op], place)(x, dim=axis, keepdim=keepdims)
    got = quietly(getattr(ops, op), q, axis=axis, keepdims=keepdims)
    assert_same(got, wanted, op)
    assert_same(quietly(getattr(ops, op), x, axis=axis, keepdims=keepdims), wanted, op)
    if op != "max_abs":
        assert_same(quietly(getattr(q, op), axis, keepdims=keepdims), wanted, op)


@on_cpu
@pytest.mark.parametrize("op", ARGUMENTS)
@given(data=st.data())
@settings(max_examples=share(0.04, nightly=0.1))
def test_places_of_extremes(op: str, place: str, data: st.DataObject) -> None:
    q = data.draw(tensors(place))
    axis = data.draw(axes(q, several=False))
    assume(q.size)
    got = getattr(ops, op)(q, axis=axis)
    assert_same_bits(host(got), np.asarray(getattr(np, op)(host(q.dequantize()), axis=axis)), op)
    if axis is not None:
        kept = host(getattr(q, op)(axis, keepdims=True))
        assert_same_bits(kept, np.expand_dims(host(got), axis), op)


@on_cpu
@pytest.mark.parametrize("op", RUNNING)
@given(data=st.data())
@settings(max_examples=share(0.05, nightly=0.1))
def test_running(op: str, place: str, data: st.DataObject) -> None:
    q = data.draw(tensors(place))
    axis = data.draw(axes(q, several=False))
    x = q.dequantize().reshape((-1,)) if axis is None else q.dequantize()
    wanted = quietly(theirs(op, RUNNING[op], place), x, axis=axis or 0)
    assert_same(quietly(getattr(ops, op), q, axis), wanted, op)


@on_cpu
@given(data=st.data())
@settings(max_examples=share(0.15, nightly=0.3))
def test_sorting(place: str, data: st.DataObject) -> None:
    q = data.draw(tensors(place, min_rank=1))
    axis = data.draw(st.integers(-q.ndim, q.ndim - 1))
    k = data.draw(st.integers(0, q.shape[axis]))
    x = host(q.dequantize())
    up, down = np.argsort(x, axis, kind="stable"), np.argsort(-x, axis, kind="stable")
    assert_same_bits(host(ops.argsort(q, axis=axis)), up)
    assert_same_bits(host(ops.argsort(q, axis=axis, descending=True)), down)
    assert_same_bits(host(ops.sort(q, axis=axis)), np.take_along_axis(x, up, axis))
    assert_same_bits(host(q.sort(axis, descending=True)), np.take_along_axis(x, down, axis))
    values, places = ops.topk(q, k, axis=axis)
    first = np.take(down, range(k), axis)
    assert_same_bits(host(places), first)
    assert_same_bits(host(ops.argtopk(q, k, axis=axis)), first)
    assert_same_bits(host(values), np.take_along_axis(x, first, axis))


# -- at indices -------------------------------------------------------------------------------


@on_cpu
@given(data=st.data())
@settings(max_examples=share(0.15, nightly=0.3))
def test_scatter(place: str, data: st.DataObject) -> None:
    q = data.draw(tensors(place, min_rank=1))
    axis = data.draw(st.integers(-q.ndim, q.ndim - 1))
    assume(q.shape[axis])
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = [data.draw(st.integers(0, n)) for n in q.shape]
    shape[axis] = data.draw(st.integers(0, 5))
    kind = data.draw(st.sampled_from([np.int64, np.int32]))
    indices = rng.integers(-q.shape[axis], q.shape[axis], shape).astype(kind)
    values = rng.integers(-4, 4, shape).astype(F32)
    added = host(q.dequantize()).astype(np.float64)
    grid = list(np.indices(shape))
    grid[axis] = indices
    np.add.at(added, tuple(grid), values)
    got = ops.scatter(q, axis, put(indices, place), put(values, place))
    np.testing.assert_allclose(host(got), added.astype(F32), rtol=1e-6, atol=0)
    put_in = host(q.dequantize()).copy()
    put_in[tuple(grid)] = 7.0
    assert_same_bits(host(ops.scatter(q, axis, put(indices, place), 7, reduce="set")), put_in)


KEYS: tuple[Any, ...] = (
    *(0, -1, slice(None), slice(1, None), slice(None, None, -1), slice(None, None, 2), ...),
    *((..., 0), (slice(1), None), (0, ..., slice(None, None, -2)), [0, 0, 1], np.array([[1, 0]])),
    *((0, slice(None), [1, 0]), (slice(None), [0, 1], [1, 1]), (slice(None), [0, 1], 1)),
    "a mask",
)


@on_cpu
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_assign(place: str, key: Any) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(F32)
    q = pq.quantize(x, "q4s/2:f16").to(place)
    wanted = host(q.dequantize()).copy()
    if isinstance(key, str):
        key = wanted > 0
    values = np.arange(wanted[key].size, dtype=F32).reshape(wanted[key].shape)
    mixed = isinstance(key, tuple) and isinstance(key[-1], list) and isinstance(key[0], int)
    if mixed and place.startswith("torch"):  # which leaves the picked axis where it is
        values = values.T
        wanted[0][:, key[-1]] = values
    else:
        wanted[key] = values
    given_key = put(key, place) if isinstance(key, np.ndarray) else key
    assert_same_bits(host(ops.assign(q, given_key, put(values, place))), wanted)
    added = host(q.dequantize()).copy()
    np.add.at(added, key, F32(2))
    assert_same_bits(host(ops.assign(q, given_key, 2, reduce="add")), added)
    assert_same_bits(host(q.dequantize()), host(pq.quantize(x, "q4s/2:f16").dequantize()))


@on_cpu
@given(data=st.data())
@settings(max_examples=share(0.1, nightly=0.2))
def test_embedding(place: str, data: st.DataObject) -> None:
    q = data.draw(tensors(place, min_rank=1))
    assume(q.shape[0])
    shape = data.draw(st.sampled_from([(), (3,), (2, 2), (0,), (1, 2, 1)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    kind = data.draw(st.sampled_from([np.int64, np.int32, np.uint8]))
    indices = rng.integers(0, min(q.shape[0], 255), shape).astype(kind)
    try:
        got = ops.embedding(put(indices, place), q)
    except errors.LayoutRefused:  # blocks that no cut can keep
        return
    assert_same_bits(host(got), host(q.dequantize())[indices])
    assert_same_bits(host(ops.embedding(put(indices, place), q.dequantize())), host(got))


@eagerly
def test_embedding_under_propagation_gives_the_codes(place: str) -> None:
    q = weight(place)
    with pq.propagation("propagate"):
        got = ops.embedding(put(np.array([2, 0, 2]), place), q)
    assert got.scheme == q.scheme
    assert_same_bits(host(got.codes()), host(q.codes())[[2, 0, 2]])


# -- convolution ------------------------------------------------------------------------------


@needs("torch")
@on_cpu
@given(data=st.data())
@settings(max_examples=share(0.15, nightly=0.3))
def test_conv2d(place: str, data: st.DataObject) -> None:
    import torch

    pairs = {name: data.draw(window(least)) for name, least in WINDOW.items()}
    groups = data.draw(st.sampled_from([1, 2, 3]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    inner, outer = (groups * data.draw(st.integers(1, 3)) for _ in range(2))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(2)]
    image = [
        d * (k - 1) + 1 + data.draw(st.integers(0, 4))
        for d, k in zip(pairs["dilation"], kernel, strict=True)
    ]
    name = data.draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
    x = as_dtype(put(rng.normal(size=(2, inner, *image)), place), name)
    w = pq.quantize(rng.normal(size=(outer, inner // groups, *kernel)).astype(F32), "q4s/2:f16")
    w, bias = w.to(place), as_dtype(put(rng.normal(size=outer), place), name)
    if data.draw(st.booleans()):
        x, bias = pq.quantize(x, "q8s/4:f32"), None
    got = ops.conv2d(x, w, bias, **pairs, groups=groups)
    result = "float32" if bias is None else name
    assert dtype_name(got) == result

    def exact(*operands: Any) -> Any:
        wide = [None if o is None else torch.tensor(host(o).astype(np.float64)) for o in operands]
        return torch.nn.functional.conv2d(*wide, **pairs, groups=groups).numpy()

    values = x.dequantize() if isinstance(x, pq.QTensor) else x
    wanted = exact(values, w.dequantize(), bias)
    reach = exact(abs(values), abs(w.dequantize()), None if bias is None else abs(bias))
    unit = 2.0**-53 if result == "float64" else 2.0**-24
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(result, unit)
    k = math.prod(kernel) * inner // groups + 1
    bound = 8 * math.sqrt(k) * unit * reach + rounding * np.abs(wanted) + 2.0**-24
    assert got.shape == wanted.shape
    assert (np.abs(host(got).astype(np.float64) - wanted) <= bound).all()


#: Argument of a convolution -> its least number.
WINDOW = MappingProxyType({"stride": 1, "padding": 0, "dilation": 1})


def window(least: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, least + 2), st.integers(least, least + 2))


# -- kinds, dtypes, devices -------------------------------------------------------------------


def weight(device: str, scheme: str = "q4s/4:f16", shape: tuple[int, ...] = (4, 8)) -> pq.QTensor:
    x = np.random.default_rng(1).normal(size=shape).astype(F32)
    return pq.quantize(x, scheme).to(device)


def test_every_op_has_its_test_and_its_docstring() -> None:
    tested = {*UNARY, *BINARY, *COMPARISONS, *REDUCTIONS, *ARGUMENTS, *RUNNING, *OTHERS}
    computing = {name for name in ops.__all__ if hasattr(getattr(ops, name), "row")}
    assert computing == tested
    for name in tested:
        op = getattr(ops, name)
        assert op.__name__ == name and op.row.name == name
        assert inspect.getdoc(op).startswith(op.row.summary)
        assert tuple(inspect.signature(op).parameters) == op.row.parameters


@pytest.mark.parametrize("op", [*UNARY, *BINARY, *COMPARISONS, *REDUCTIONS, *ARGUMENTS, *RUNNING])
def test_kinds_and_devices(op: str, device: str) -> None:
    q = weight(device)
    more: tuple[Any, ...] = ()
    if op in BINARY or op in COMPARISONS:
        more = (q,)
    elif op in RUNNING:
        more = (1,)
    got = quietly(getattr(ops, op), q, *more)
    is_bool = op in COMPARISONS or op in ("any", "all")
    kind = "bool" if is_bool else "int" if op in ARGUMENTS else "float32"
    assert dtype_name(got).startswith(kind)
    assert pq.device_of(got) == q.device
    numpy = quietly(
        getattr(ops, op), q.to("numpy"), *(x.to("numpy") if x is q else x for x in more)
    )
    np.testing.assert_allclose(host(got), numpy, rtol=3e-5, atol=1e-6)


@eagerly
def test_other_ops_run_elsewhere(place: str) -> None:
    q = weight(place)
    x = host(q.dequantize())
    mask, rows = put(x > 0, place), put(np.array([[3, 0]]), place)
    assert_same_bits(host(ops.clamp(q, -0.5, 0.5)), np.clip(x, F32(-0.5), F32(0.5)))
    assert_same_bits(host(ops.clamp(q, put(x[0], place))), np.maximum(x, x[0]))
    assert_same_bits(host(ops.where(mask, q, 1)), np.where(x > 0, x, F32(1)))
    assert_same_bits(host(ops.mask_fill(q, mask, 1)), np.where(x > 0, F32(1), x))
    assert_same_bits(host(ops.sort(q, axis=0)), np.sort(x, axis=0))
    assert_same_bits(host(ops.topk(q, 2)[0]), -np.sort(-x)[:, :2])
    assert_same_bits(host(ops.embedding(rows, q)), x[[[3, 0]]])
    wanted = x.copy()
    wanted[1] = 2
    assert_same_bits(host(ops.assign(q, 1, 2)), wanted)
    wanted = x.copy()
    wanted[[3, 0], [0, 1]] += 1
    assert_same_bits(host(ops.scatter(q, 0, rows, 1)), wanted)
    image = weight(place, shape=(1, 2, 5, 5), scheme="q8s/5:f32")
    kernel = weight(place, shape=(3, 2, 2, 2), scheme="q8s/2:f32")
    got = ops.conv2d(image, kernel, stride=2, padding=1)
    numpy = ops.conv2d(image.to("numpy"), kernel.to("numpy"), stride=2, padding=1)
    np.testing.assert_allclose(host(got), numpy, rtol=1e-5, atol=1e-6)


@on_cpu
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_of_results(place: str, name: str) -> None:
    q = weight(place)
    y = as_dtype(q.dequantize(), name)
    whole, truth = put(np.ones((8,), np.int32), place), put(np.ones((8,), bool), place)
    for got in (ops.add(q, y), ops.sub(y, q), ops.clamp(q, y), ops.where(y > 0, q, y)):
        assert dtype_name(got) == name
    assert dtype_name(ops.mul(y, 2.5)) == dtype_name(ops.sum(y, axis=0)) == name
    assert dtype_name(ops.add(q, whole)) == dtype_name(ops.mul(truth, q)) == "float32"
    assert dtype_name(ops.sum(whole)) == "float32"
    both = {"float16": "float32", "bfloat16": "float32"}.get(name, name)
    other = as_dtype(y, "bfloat16" if name == "float16" else "float16")
    assert dtype_name(ops.add(y, other)) == both


@needs("torch")
def test_float_operands_keep_their_graph() -> None:
    import torch

    q = weight("torch:cpu")
    x = torch.randn(4, 8, requires_grad=True)
    for op in ("mul", "add", "div", "maximum"):
        (gradient,) = torch.autograd.grad(getattr(ops, op)(q, x).sum(), x)
        (wanted,) = torch.autograd.grad(getattr(torch, op)(q.dequantize(), x).sum(), x)
        assert_same(gradient, wanted, op)
    image, kernel = (
        torch.randn(1, 2, 5, 5, requires_grad=True),
        weight("torch:cpu", "q8s/2:f32", (3, 2, 2, 2)),
    )
    (gradient,) = torch.autograd.grad(ops.conv2d(image, kernel, padding=1).sum(), image)
    y = torch.nn.functional.conv2d(image, kernel.dequantize(), padding=1)
    torch.testing.assert_close(gradient, torch.autograd.grad(y.sum(), image)[0])
    (gradient,) = torch.autograd.grad(ops.assign(q, 0, x[0]).sum(), x)
    assert_same(gradient[0], torch.ones(8))


# -- operators --------------------------------------------------------------------------------

ARITHMETIC = MappingProxyType(
    {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "div": operator.truediv,
        "floor_divide": operator.floordiv,
        "remainder": operator.mod,
        "pow": operator.pow,
    }
)
ORDER = MappingProxyType(
    {
        "equal": operator.eq,
        "not_equal": operator.ne,
        "less": operator.lt,
        "less_equal": operator.le,
        "greater": operator.gt,
        "greater_equal": operator.ge,
    }
)


@pytest.mark.parametrize("op", [*ARITHMETIC, *ORDER])
def test_operators(op: str, device: str) -> None:
    q = weight(device)
    x = q.dequantize()
    sign = (ARITHMETIC | ORDER)[op]
    for other in (2, 0.5, True, F32(2)):
        plain = other.item() if isinstance(other, np.generic) else other + 0  # True as 1
        assert_same(quietly(sign, q, other), quietly(sign, x, plain), op)
        if isinstance(other, np.generic) and device != "numpy":
            continue  # NumPy asks first, and of its own tensors only
        left = quietly(sign, other, q)
        assert isinstance(left, type(x) | np.generic)
        flipped = host(quietly(sign, put(np.asarray(plain, F32), device), x))
        assert_same_bits(host(left), flipped, op)
    assert_same(quietly(sign, q, q), quietly(sign, x, x), op)
    assert_same(quietly(sign, q, x), quietly(sign, x, x), op)
    if device != "array_api_strict":  # whose arrays refuse every stranger on their right
        assert_same(quietly(sign, x, q), quietly(sign, x, x), op)


def test_unary_operators_and_methods(device: str) -> None:
    q = weight(device)
    x = q.dequantize()
    assert_same(-q, -x)
    assert +q is q
    assert_same(abs(q), abs(x))
    values = host(x)
    assert_same_bits(host(q.clip(-0.5, 0.5)), np.clip(values, F32(-0.5), F32(0.5)))
    assert_same_bits(host(q.round()), np.rint(values))
    np.testing.assert_array_equal(host(q.argsort(0)), np.argsort(values, 0, kind="stable"))
    np.testing.assert_allclose(host(q.cumsum()), np.cumsum(values), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(host(q.cumprod(1)), np.cumprod(values, 1), rtol=1e-5)


@pytest.mark.parametrize("stranger", ["x", None, [1.0], object(), 1j, np.str_("x")])
def test_strangers_are_left_to_python(device: str, stranger: Any) -> None:
    q = weight(device)
    if not isinstance(stranger, np.generic):
        assert (q == stranger) is False
        assert (stranger == q) is False
        assert (q != stranger) is True
    for sign in (*ARITHMETIC.values(), operator.lt, operator.ge):
        with pytest.raises(TypeError):
            sign(q, stranger)
        if not isinstance(stranger, str):  # "x" % q formats
            with pytest.raises(TypeError):
                sign(stranger, q)


def test_tensors_are_told_apart_by_identity(device: str) -> None:
    q, other = weight(device), weight(device)
    assert hash(q) == hash(q) and {q: 1}[q] == 1
    assert len({q, other}) == 2
    assert [other, q].index(other) == 0


def test_numbers_within(device: str) -> None:
    q = weight(device)
    assert float(host(q.dequantize())[1, 2]) in q
    assert 1e9 not in q and "x" not in q


def test_subclasses_and_large_numbers() -> None:
    class Odd(np.ndarray):
        def __mul__(self, other: Any) -> Any:
            return "something else"

    assert_same(Q * X.view(Odd), X * X)
    for device in CPU:
        q = weight(device)
        assert_same(q + 2**70, q.dequantize() + 2.0**70)


def test_one_element(device: str) -> None:
    one = pq.quantize(np.full((1, 1), -2.5, F32), "q8s/tensor:f32").to(device)
    assert float(one) == one.item() == -2.5
    assert int(one) == -2
    assert bool(one) is True
    assert bool(pq.quantize(np.zeros(1, F32), "q8s/tensor:f32").to(device)) is False
    q = weight(device)
    for call in (bool, float, int, lambda t: t.item()):
        with pytest.raises(errors.InvalidArgument, match=r"of one element .* came is \(4, 8\)"):
            call(q)


# -- propagation ------------------------------------------------------------------------------

FLOWING: MappingProxyType[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "exp": lambda q: ops.exp(q),
        "mul": lambda q: q * 2,
        "radd": lambda q: 1 + q,
        "sum": lambda q: q.sum(0, keepdims=True),
        "cumsum": lambda q: ops.cumsum(q, 1),
        "clamp": lambda q: q.clip(-0.5),
        "max_abs": lambda q: ops.max_abs(q, axis=1, keepdims=True),
        "two": lambda q: ops.maximum(q, q.T.reshape(q.shape)),
        "matmul": lambda q: pq.matmul(q, q.T),
        "operator": lambda q: q @ q.T,
        "matmul with a float": lambda q: pq.matmul(q.dequantize(), q.T),
        "linear": lambda q: pq.linear(q.dequantize(), q),
    }
)


@eagerly
@pytest.mark.parametrize("scheme", ["q4s/4:f16", "q8s/tensor:f32@native", "nf4"])
@pytest.mark.parametrize("name", FLOWING)
def test_propagated_results_are_quantized_again(name: str, scheme: str, place: str) -> None:
    q = weight(place, scheme)
    plain = FLOWING[name](q)
    assert not isinstance(plain, pq.QTensor)
    with pq.propagation("propagate"):
        got = FLOWING[name](q)
    assert_same_parts(got, pq.quantize(plain, scheme))
    assert got.device == place


@eagerly
def test_a_custom_table_is_passed_on(place: str) -> None:
    table = np.linspace(-1, 1, 4).astype(F32) ** 3
    x = np.random.default_rng(0).normal(size=(2, 8)).astype(F32)
    q = pq.quantize(x, "u2[custom]/4:f32", table=table).to(place)
    with pq.propagation("propagate"):
        got = q * 3
    assert_same_parts(got, pq.quantize(q * 3, q.scheme, table=table))


PICKED: MappingProxyType[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "max": lambda x: ops.max(x, axis=0, keepdims=True),
        "min": lambda x: ops.min(x, axis=0),
        "sort": lambda x: ops.sort(x, axis=0),
        "descending": lambda x: ops.sort(x, axis=-1, descending=True),
        "topk": lambda x: ops.topk(x, 3, axis=0)[0],
        "of all": lambda x: ops.max(x),
    }
)


@eagerly
@pytest.mark.parametrize("name", PICKED)
def test_picked_values_keep_their_numbers(name: str, place: str) -> None:
    q = weight(place, "q4s/tensor:f32")
    with pq.propagation("propagate"):
        got = PICKED[name](q)
    assert isinstance(got, pq.QTensor) and got.scheme == q.scheme
    assert_same_bits(host(got.scales).reshape(-1), host(q.scales).reshape(-1))
    assert_same_bits(host(got.dequantize()), host(PICKED[name](q.dequantize())))


@eagerly
def test_picked_values_are_quantized_again_where_blocks_are_cut(place: str) -> None:
    q = weight(place, "q4s/4:f16")
    with pq.propagation("propagate"):
        got, several = ops.sort(q, axis=-1), ops.max(q, axis=(0, 1), keepdims=True)
    assert_same_parts(got, pq.quantize(ops.sort(q.dequantize()), q.scheme))
    assert_same_parts(several, pq.quantize(ops.max(q, keepdims=True), q.scheme))


@eagerly
def test_what_stays_plain(place: str) -> None:
    q = weight(place)
    x, mask = q.dequantize(), put(np.ones((4, 8), bool), place)
    with pq.propagation("propagate"):
        plain = [q < 0, q == q, q.any(), q.all(0), q.argmax(), q.argsort(), ops.topk(q, 2)[1]]
        plain += [q + x, ops.maximum(x, q), ops.clamp(q, x), ops.where(mask, q, 0)]
        plain += [ops.mask_fill(q, mask, 0), ops.assign(q, 0, 1), ops.sum(x), ops.exp(x)]
        plain += [ops.scatter(q, 0, put(np.zeros((1, 1), np.int64), place), 1)]
    assert not any(isinstance(item, pq.QTensor) for item in plain)


def test_results_that_the_scheme_cannot_hold() -> None:
    square, unsigned = weight("numpy", "fp8-128x128"), pq.quantize(np.ones((2, 4), F32), "u4/4:f32")
    with pq.propagation("propagate"):
        with pytest.raises(errors.BlockRank, match=r"shape \(4,\) has 1"):
            square.sum(1)
        with pytest.raises(errors.BlockRank):
            square.max(1)
        with pytest.raises(errors.NegativeInput, match=r"Scheme u4/4:f32 holds no negative"):
            _ = unsigned - 2
        with pytest.raises(errors.NonFiniteInput):
            quietly(ops.log, unsigned - 1)


class Stop(Exception):
    pass


def test_modes_nest_and_end() -> None:
    q = weight("numpy")

    def mode() -> bool:
        return isinstance(q * 2, pq.QTensor)

    assert not mode()
    with pq.propagation("propagate"):
        assert mode()
        with pq.propagation("inhibit"):
            assert not mode()
            with pytest.raises(Stop), pq.propagation("propagate"):
                assert mode()
                raise Stop
            assert not mode()
        assert mode()
    assert not mode()


def test_a_mode_is_of_its_thread() -> None:
    q, seen = weight("numpy"), []
    with pq.propagation("propagate"):
        thread = threading.Thread(target=lambda: seen.append(isinstance(q * 2, pq.QTensor)))
        thread.start()
        thread.join()
        seen.append(isinstance(q * 2, pq.QTensor))
    assert seen == [False, True]


@pytest.mark.parametrize("mode", ["Propagate", "", None, True])
def test_unknown_modes(mode: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="must be 'inhibit' or 'propagate'"):
        pq.propagation(mode)


# -- errors -----------------------------------------------------------------------------------

Q = weight("numpy")
X = Q.dequantize()
MASK = X > 0
IMAGE = np.ones((1, 4, 5, 5), F32)
KERNEL = weight("numpy", "q8s/3:f32", (6, 2, 3, 3))

#: (call, class, how its text goes).
REFUSED: tuple[tuple[Callable[[], Any], type[errors.PolyquantError], str], ...] = (
    (
        lambda: ops.add(Q, X[:, :5]),
        errors.ShapeMismatch,
        r"add cannot combine the shapes \(4, 8\) and \(4, 5\): the extents 8 and 5 do",
    ),
    (lambda: ops.where(MASK, Q, X[:3]), errors.ShapeMismatch, "where cannot combine"),
    (
        lambda: ops.mask_fill(Q, MASK[None], 0),
        errors.ShapeMismatch,
        r"of shape \(1, 4, 8\), which is not that of the first",
    ),
    (lambda: ops.clamp(Q, X[:3]), errors.ShapeMismatch, "clamp cannot combine"),
    (lambda: ops.mask_fill(1.0, MASK, Q), errors.NotAnArray, "x must be an array"),
    (lambda: ops.conv2d(1.0, KERNEL), errors.NotAnArray, "x must be an array"),
    (lambda: ops.conv2d(IMAGE, KERNEL, 1.0), errors.NotAnArray, "bias must be an array"),
    (lambda: ops.exp("x"), errors.NotAnArray, "x must be an array .* of type str"),
    (lambda: ops.exp(2.0), errors.NotAnArray, "of type float"),
    (lambda: ops.add(1, 2), errors.NotAnArray, "a must be an array"),
    (lambda: ops.add(Q, "x"), errors.NotAnArray, "b must be an array"),
    (lambda: ops.mul(Q, X.astype(np.complex64)), errors.NotFloat, "complex64"),
    (
        lambda: Q.sum(2),
        errors.InvalidAxes,
        r"2 does not fit the 2 axes of a tensor of shape \(4, 8\)",
    ),
    (lambda: Q.sum((0, -2)), errors.InvalidAxes, r"\(0, -2\) does not fit"),
    (lambda: Q.mean(0.5), errors.InvalidAxes, "0.5 does not fit"),
    (lambda: Q.argmax((0, 1)), errors.InvalidAxes, r"\(0, 1\) does not fit"),
    (lambda: ops.cumsum(Q, 5), errors.InvalidAxes, "5 does not fit"),
    (lambda: ops.sort(Q, axis=-3), errors.InvalidAxes, "-3 does not fit"),
    (lambda: Q.sum(keepdims=1), errors.InvalidArgument, "keepdims must be True or False"),
    (lambda: Q.sort(descending="no"), errors.InvalidArgument, "descending must be True or False"),
    (
        lambda: pq.quantize(X[:0], "q4s").max(),
        errors.InvalidArgument,
        r"a tensor with numbers along the axes that max goes over; what came is \(0, 8\)",
    ),
    (lambda: pq.quantize(X[:0], "q4s").argmin(0), errors.InvalidArgument, "argmin goes over"),
    (
        lambda: ops.topk(Q, 9),
        errors.InvalidArgument,
        "k must be a whole number from 0 to 8; what came is 9",
    ),
    (lambda: ops.argtopk(Q, 2.0), errors.InvalidArgument, "k must be"),
    (
        lambda: ops.where(X, Q, 0),
        errors.InvalidArgument,
        "the mask of where must be an array of booleans; what came is 'of float32'",
    ),
    (lambda: ops.where(Q, Q, 0), errors.InvalidArgument, "of q4s/4:f16"),
    (lambda: ops.mask_fill(Q, True, 0), errors.NotAnArray, "mask must be an array"),
    (
        lambda: ops.scatter(Q, 0, X, 1),
        errors.InvalidIndex,
        "an index is an array of integers, and this is a float32 array",
    ),
    (
        lambda: ops.scatter(Q, 0, np.array([[4]]), 1),
        errors.InvalidIndex,
        "4 does not index .* axis 0 has the indices -4 to 3",
    ),
    (
        lambda: ops.scatter(Q, 0, np.array([0]), 1),
        errors.ShapeMismatch,
        "as many axes as the tensor",
    ),
    (lambda: ops.scatter(Q, 1, np.zeros((5, 1), int), 1), errors.ShapeMismatch, "none longer"),
    (
        lambda: ops.scatter(Q, 1, np.zeros((4, 1), int), X),
        errors.ShapeMismatch,
        "scatter cannot combine",
    ),
    (
        lambda: ops.scatter(Q, 1, np.zeros((4, 1), int), 1, reduce="mul"),
        errors.InvalidArgument,
        "reduce must be 'add' or 'set'; what came is 'mul'",
    ),
    (lambda: ops.assign(Q, 4, 1), errors.InvalidIndex, "4 does not index"),
    (lambda: ops.assign(Q, "x", 1), errors.InvalidIndex, "'x' does not index"),
    (lambda: ops.assign(Q, (0, 0, 0), 1), errors.InvalidIndex, "too many indices"),
    (
        lambda: ops.assign(Q, 0, X),
        errors.ShapeMismatch,
        r"assign cannot combine the shapes \(8,\) and \(4, 8\)",
    ),
    (lambda: ops.assign(1.0, 0, X), errors.NotAnArray, "x must be an array"),
    (
        lambda: ops.embedding(np.array([0, 4]), Q),
        errors.InvalidIndex,
        "4 does not index .* axis 0 has the indices 0 to 3",
    ),
    (lambda: ops.embedding(np.array([-1]), Q), errors.InvalidIndex, "-1 does not index"),
    (lambda: ops.embedding(np.array([0.0]), Q), errors.InvalidIndex, "an array of integers"),
    (lambda: ops.conv2d(X, KERNEL), errors.ShapeMismatch, r"x is \(N, C, H, W\)"),
    (lambda: ops.conv2d(IMAGE, KERNEL), errors.ShapeMismatch, "with groups=1"),
    (
        lambda: ops.conv2d(IMAGE[:, :2, :2], KERNEL),
        errors.ShapeMismatch,
        "fit into the padded input",
    ),
    (
        lambda: ops.conv2d(IMAGE[:, :2], KERNEL, X[0]),
        errors.ShapeMismatch,
        r"the bias must be of shape \(6,\), not \(8,\)",
    ),
    (
        lambda: ops.conv2d(IMAGE, KERNEL, groups=0),
        errors.InvalidArgument,
        "groups must be a whole number of at least 1",
    ),
    (
        lambda: ops.conv2d(IMAGE, KERNEL, stride=0),
        errors.InvalidArgument,
        "stride must be a whole number of at least 1, or a pair",
    ),
    (lambda: ops.conv2d(IMAGE, KERNEL, padding="same"), errors.InvalidArgument, "padding must be"),
)


@pytest.mark.parametrize("at", range(len(REFUSED)))
def test_refusals(at: int) -> None:
    call, error, text = REFUSED[at]
    with pytest.raises(error, match=text):
        call()


@needs("torch")
@pytest.mark.parametrize("op", [*BINARY, *COMPARISONS])
def test_two_libraries(op: str) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(
        errors.BackendMismatch,
        match=rf"{op} needs both operands in one library. a is a q4s/4:f16 QTensor",
    ):
        getattr(ops, op)(Q, torch.ones(4, 8))
    with pytest.raises(errors.DeviceMismatch, match="on one device"):
        getattr(ops, op)(weight("torch:cpu"), torch.ones(4, 8, device="meta"))


@needs("torch")
def test_two_libraries_elsewhere() -> None:
    torch = pytest.importorskip("torch")
    q = weight("torch:cpu")
    for call in (
        lambda: ops.where(MASK, q, 0),
        lambda: ops.mask_fill(Q, torch.ones(4, 8) > 0, 0),
        lambda: ops.clamp(q, 0, X),
        lambda: ops.scatter(q, 0, torch.zeros(1, 1, dtype=torch.int64), np.ones((1, 1), F32)),
        lambda: ops.scatter(Q, 0, torch.zeros(1, 1, dtype=torch.int64), 1),
        lambda: ops.embedding(torch.zeros(2, dtype=torch.int64), Q),
        lambda: ops.assign(Q, torch.zeros(2, dtype=torch.int64), 1),
        lambda: ops.conv2d(IMAGE, KERNEL.to("torch:cpu")),
    ):
        with pytest.raises(errors.BackendMismatch):
            call()


# -- under jit --------------------------------------------------------------------------------


@needs("jax")
def test_jit() -> None:
    """Every op traces, with the tensor passed or closed over; some run, for NumPy's numbers."""
    import jax

    def operands(device: str) -> tuple[Any, ...]:
        q, rows = weight(device), put(np.array([[3, 0]]), device)
        return q, q.dequantize(), rows, weight(device, "q8s/5:f32", (1, 2, 5, 5))

    def everything(t: Any, a: Any, places: Any, image: Any) -> list[Any]:
        found = [getattr(ops, op)(t) for op in (*UNARY, *REDUCTIONS, *ARGUMENTS)]
        found += [getattr(ops, op)(t, a) for op in (*BINARY, *COMPARISONS)]
        found += [getattr(ops, op)(t, 1) for op in RUNNING]
        found += [ops.clamp(t, -0.5, a), ops.where(a > 0, t, 0), ops.mask_fill(t, a > 0, 1)]
        found += [ops.sort(t), ops.argsort(t), *ops.topk(t, 2), 2 / t, t**2]
        found += [ops.scatter(t, 0, places, 1), ops.assign(t, 0, a[1]), ops.assign(t, places, 1)]
        return [*found, ops.embedding(places, t), ops.conv2d(image, image)]

    shapes = jax.eval_shape(everything, *operands("jax"))
    for shape, same in zip(shapes, quietly(everything, *operands("numpy")), strict=True):
        assert (shape.shape, shape.dtype.kind) == (same.shape, same.dtype.kind)

    q, x, rows, _ = operands("jax")

    def some(t: Any, a: Any, places: Any) -> list[Any]:
        found = [t + a, 2 / t, t**2, t < a, ops.exp(t), ops.erf(t), t.sum(0), t.argmax()]
        found += [ops.cummax(t, 1), ops.clamp(t, -0.5, a), ops.sort(t), *ops.topk(t, 2)]
        return [*found, ops.scatter(t, 0, places, 1), ops.embedding(places, t)]

    wanted = quietly(some, *operands("numpy")[:3])
    for got, same in zip(jax.jit(some)(q, x, rows), wanted, strict=True):
        np.testing.assert_allclose(host(got), same, rtol=3e-5, atol=1e-6)
    np.testing.assert_array_equal(host(jax.jit(lambda a: a * q)(x)), host(x * x))

    def propagated(t: Any) -> Any:
        with pq.propagation("propagate"):
            return t * 2, ops.sort(t, axis=0)

    for got, same in zip(jax.jit(propagated)(q), propagated(weight("numpy")), strict=True):
        assert_same_parts(got, same)
