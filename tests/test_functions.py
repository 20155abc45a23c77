"""The functions of NumPy and torch on quantized tensors: each row of both tables, and refusals.

Every function is called on a QTensor and on its dequantized array, by position and by keyword: the
results must be of the same kind, dtype, shape and bits.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import assert_same_bits, host, needs, put
from polyquant import errors, ops
from polyquant.calls import Call, Overloads
from polyquant.ops import protocol

SCHEME = "q4s/2:f32"


class A(StrEnum):
    """What an example's argument stands for."""

    Q = "a quantized tensor of shape (4, 6)"
    D = "the same, no two numbers of which are equal"
    P = "another one"
    T = "a quantized tensor of shape (6, 4)"
    V = "a quantized tensor of shape (6,)"
    ROW = "a quantized tensor of shape (1, 6)"
    B = "a quantized tensor of shape (2, 4, 6)"
    C = "a quantized tensor of shape (2, 6, 4)"
    IMAGES = "a quantized tensor of shape (1, 2, 5, 5)"
    FILTERS = "a quantized tensor of shape (3, 2, 3, 3)"
    X = "a float array of shape (4, 6)"
    XV = "a float array of shape (6,)"
    XB = "a float array of shape (2, 4, 6)"
    BIAS = "a float array of shape (4,)"
    KERNEL_BIAS = "a float array of shape (3,)"
    MASK = "a bool array of shape (4, 6)"
    PLACES = "the whole numbers 2, 0, 3, 2"
    PLACE = "the whole number 2 as an array without axes"
    ALONG = "whole numbers below 4 of shape (4, 6)"
    FEW = "whole numbers below 4 of shape (4, 1)"
    NUMBER = "a quantized tensor without axes"


_QUANTIZED = MappingProxyType(
    {
        A.Q: (4, 6),
        A.P: (4, 6),
        A.T: (6, 4),
        A.V: (6,),
        A.ROW: (1, 6),
        A.B: (2, 4, 6),
        A.C: (2, 6, 4),
        A.IMAGES: (1, 2, 5, 5),
        A.FILTERS: (3, 2, 3, 3),
    }
)
_FLOATS = MappingProxyType(
    {A.X: (4, 6), A.XV: (6,), A.XB: (2, 4, 6), A.BIAS: (4,), A.KERNEL_BIAS: (3,)}
)

Example = tuple[Any, ...]
_TWO: tuple[Example, ...] = ((A.Q, A.P), (A.Q, A.X), (A.X, A.Q), (A.B, A.Q))
_REDUCED: tuple[Example, ...] = ((A.Q,), (A.Q, 1), (A.B, (0, 2)))
#: torch's functions of two operands that are methods too.
_PAIRED = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder maximum minimum "
    "eq ne not_equal lt less le less_equal gt greater ge greater_equal pow"
)


def each(names: str, *examples: Example, prefix: str = "") -> dict[str, tuple[Example, ...]]:
    """The same examples for several functions."""
    return {prefix + name: examples for name in names.split()}


#: NumPy's name -> examples of its arguments, by position; a dict at the end holds keywords.
NUMPY: Mapping[str, tuple[Example, ...]] = MappingProxyType(
    each(
        "negative absolute sign reciprocal square sqrt exp log log1p sin cos tan sinh cosh tanh "
        "floor ceil rint",
        (A.Q,),
        (A.B,),
    )
    | each(
        "add subtract multiply divide floor_divide remainder power maximum minimum equal "
        "not_equal less less_equal greater greater_equal",
        *_TWO,
        (A.Q, 1.5),
        (2, A.Q),
    )
    | {
        "matmul": ((A.X, A.T), (A.Q, A.T), (A.B, A.C)),
        "linalg.matmul": ((A.X, A.T), (A.Q, A.T), (A.B, A.C)),
        "dot": ((A.X, A.T), (A.Q, A.XV), (A.XB, A.T)),
        "sum": (*_REDUCED, (A.Q, 0, {"keepdims": True})),
        "prod": (*_REDUCED, (A.Q, 0, {"keepdims": True})),
        "mean": (*_REDUCED, (A.Q, 0, {"keepdims": True})),
        "max": (*_REDUCED, (A.Q, 0, None, True)),
        "amax": (*_REDUCED, (A.Q, 0, None, True)),
        "min": (*_REDUCED, (A.Q, 0, None, True)),
        "amin": (*_REDUCED, (A.Q, 0, None, True)),
        "any": (*_REDUCED, (A.Q, 0, None, True)),
        "all": (*_REDUCED, (A.Q, 0, None, True)),
        "argmax": ((A.Q,), (A.Q, 1), (A.Q, 0, {"keepdims": True})),
        "argmin": ((A.Q,), (A.Q, 1), (A.Q, 0, {"keepdims": True})),
        "cumsum": ((A.Q,), (A.Q, 1), (A.B, -2)),
        "cumprod": ((A.Q,), (A.Q, 1), (A.B, -2)),
        "cumulative_sum": ((A.V,), (A.Q, {"axis": 1})),
        "cumulative_prod": ((A.V,), (A.Q, {"axis": 1})),
        "sort": ((A.Q,), (A.Q, 0), (A.Q, None), (A.Q, 1, "mergesort"), (A.Q, {"stable": True})),
        "argsort": ((A.Q, {"stable": True}), (A.Q, 0, "stable"), (A.Q, None, "stable")),
        "clip": (
            (A.Q, -0.5, 0.5),
            (A.Q, None, 0.5),
            (A.Q, {"min": 0.0}),
            (A.Q, {"min": -0.25, "max": 0.25}),
            (A.Q, A.X, None),
        ),
        "round": ((A.Q,), (A.Q, 0)),
        "around": ((A.Q,), (A.Q, 0)),
        "where": ((A.MASK, A.Q, A.P), (A.MASK, A.X, A.Q), (A.MASK, A.Q, 0.5)),
        "reshape": ((A.Q, (3, 8)), (A.Q, -1), (A.B, (2, -1), "C")),
        "ravel": ((A.Q,), (A.Q, "C")),
        "transpose": ((A.Q,), (A.B, (2, 0, 1))),
        "matrix_transpose": ((A.B,),),
        "linalg.matrix_transpose": ((A.B,),),
        "swapaxes": ((A.B, 0, -1),),
        "moveaxis": ((A.B, 0, -1), (A.B, (0, 1), (2, 0))),
        "squeeze": ((A.ROW,), (A.ROW, 0)),
        "expand_dims": ((A.Q, 0), (A.Q, -1), (A.Q, (0, -1)), (A.Q, ())),
        "flip": ((A.Q,), (A.Q, 1), (A.B, (0, 2))),
        "broadcast_to": ((A.Q, (3, 4, 6)), (A.ROW, (4, 6))),
        "repeat": ((A.Q, 2), (A.Q, 2, 1), (A.Q, [1, 0, 2, 3], 0), (A.Q, A.PLACES, 0)),
        "tile": ((A.Q, 2), (A.Q, (2, 1, 3))),
        "take": ((A.Q, A.PLACES), (A.Q, A.PLACES, 0), (A.Q, 2, 1)),
        "take_along_axis": ((A.Q, A.ALONG, 0), (A.Q, A.FEW, 1), (A.ROW, A.FEW, 1)),
        "split": ((A.Q, 2), (A.Q, 3, 1), (A.Q, [1, 4], -1), (A.Q, [2, 9])),
        "array_split": ((A.Q, 3), (A.Q, 4, 1), (A.Q, [1, -1], 1)),
        "concatenate": (([A.Q, A.P],), ((A.Q, A.P), 1), ([A.Q, A.V], None)),
        "stack": (([A.Q, A.P],), ((A.Q, A.P), -1)),
    }
)

#: torch's name -> examples; a method is called as a function of the plain tensor.
TORCH: Mapping[str, tuple[Example, ...]] = MappingProxyType(
    each(
        "neg negative abs absolute sign reciprocal square sqrt exp log log1p special.log1p erf "
        "special.erf sin cos tan sinh cosh tanh floor ceil round special.round",
        (A.Q,),
        (A.B,),
    )
    | each(f"{_PAIRED} rsub", *_TWO)
    | each(
        f"{_PAIRED} __pow__ __rsub__ __rdiv__ __floordiv__ __rfloordiv__ __rmod__ __rpow__",
        (A.X, A.Q),
        (A.XB, A.Q),
        prefix="Tensor.",
    )
    | {
        "matmul": ((A.X, A.T), (A.Q, A.T), (A.B, A.C)),
        "linalg.matmul": ((A.X, A.T), (A.Q, A.T), (A.B, A.C)),
        "Tensor.matmul": ((A.X, A.T), (A.XB, A.C)),
        "Tensor.__matmul__": ((A.X, A.T),),
        "Tensor.__rmatmul__": ((A.X, A.T),),
        "mm": ((A.X, A.T), (A.Q, A.T)),
        "Tensor.mm": ((A.X, A.T),),
        "mv": ((A.Q, A.XV), (A.X, A.V)),
        "Tensor.mv": ((A.X, A.V),),
        "dot": ((A.V, A.XV), (A.V, A.V)),
        "Tensor.dot": ((A.XV, A.V),),
        "bmm": ((A.XB, A.C), (A.B, A.C)),
        "Tensor.bmm": ((A.XB, A.C),),
        "nn.functional.linear": ((A.XB, A.Q), (A.X, A.P, A.BIAS), (A.B, A.Q)),
        "nn.functional.embedding": ((A.PLACES, A.Q), (A.ALONG, A.Q, 1)),
        "conv2d": (
            (A.IMAGES, A.FILTERS),
            (A.IMAGES, A.FILTERS, A.KERNEL_BIAS, 2, 1),
            (A.IMAGES, A.FILTERS, None, (1, 2), (0, 1), 2, 1),
        ),
        "sum": (
            *_REDUCED,
            (A.B, [0, 2], True),
            (A.Q, ()),
            ({"a": A.Q, "axis": 1, "keepdims": True},),
        ),
        "mean": (*_REDUCED, (A.B, [0, 2], True), (A.Q, ())),
        "prod": ((A.Q,), (A.Q, 1), (A.Q, 0, True)),
        "amax": (*_REDUCED, (A.B, [0, 2], True), (A.Q, ())),
        "amin": (*_REDUCED, (A.B, [0, 2], True), (A.Q, ())),
        "max": ((A.Q,), (A.Q, 1), (A.Q, 0, True), (A.Q, A.P), (A.X, A.Q), (A.Q, {"axis": 1})),
        "min": ((A.Q,), (A.Q, 1), (A.Q, 0, True), (A.Q, A.P), (A.X, A.Q), (A.Q, {"axis": 1})),
        "Tensor.max": ((A.X, A.Q),),
        "Tensor.min": ((A.X, A.Q),),
        "any": (*_REDUCED, (A.Q, 0, True)),
        "all": (*_REDUCED, (A.Q, 0, True)),
        "argmax": ((A.Q,), (A.Q, 1), (A.Q, 0, True), (A.Q, None)),
        "argmin": ((A.Q,), (A.Q, 1), (A.Q, 0, True), (A.Q, None)),
        "cumsum": ((A.Q, 1), (A.B, -2)),
        "cumprod": ((A.Q, 1), (A.B, -2)),
        "sort": ((A.Q, {"stable": True}), (A.D, 0, True), (A.D,)),
        "argsort": ((A.Q, {"stable": True}), (A.D, 0, True), (A.D,)),
        "topk": ((A.D, 2), (A.D, 3, 0), (A.D, 2, -2, True, True)),
        "clamp": ((A.Q, -0.5, 0.5), (A.Q, None, 0.5), (A.Q, {"min": 0.0}), (A.Q, A.X)),
        "clip": ((A.Q, -0.5, 0.5), (A.Q, None, 0.5), (A.Q, {"min": 0.0}), (A.Q, A.X)),
        "Tensor.clamp": ((A.X, A.Q), (A.X, None, A.Q)),
        "Tensor.clip": ((A.X, A.Q), (A.X, None, A.Q)),
        "clamp_min": ((A.Q, 0.25), (A.Q, A.X)),
        "clamp_max": ((A.Q, 0.25), (A.Q, A.X)),
        "Tensor.clamp_min": ((A.X, A.Q),),
        "Tensor.clamp_max": ((A.X, A.Q),),
        "where": ((A.MASK, A.Q, A.P), (A.MASK, A.X, A.Q), (A.MASK, A.Q, 0.5)),
        "Tensor.where": ((A.X, A.MASK, A.Q),),
        "masked_fill": ((A.Q, A.MASK, 0.5),),
        "Tensor.masked_fill": ((A.X, A.MASK, A.NUMBER),),
        "scatter": (
            (A.Q, 0, A.ALONG, A.X),
            (A.X, 0, A.ALONG, A.Q),
            (A.Q, 0, A.FEW, {"value": 0.5}),
            (A.Q, 0, A.FEW, {"value": 0.5, "reduce": "add"}),
        ),
        "Tensor.scatter": ((A.X, 0, A.ALONG, A.Q),),
        "scatter_add": ((A.Q, 0, A.ALONG, A.X), (A.X, 0, A.ALONG, A.Q), (A.Q, 1, A.FEW, A.P)),
        "Tensor.scatter_add": ((A.X, 0, A.ALONG, A.Q),),
        "reshape": ((A.Q, (3, 8)), (A.Q, (-1,)), (A.B, [2, -1])),
        "ravel": ((A.B,),),
        "flatten": ((A.B,), (A.B, 1), (A.B, -3, -2)),
        "permute": ((A.B, (2, 0, 1)),),
        "transpose": ((A.B, 0, -1),),
        "swapdims": ((A.B, 0, -1),),
        "swapaxes": ((A.B, 0, -1),),
        "t": ((A.Q,), (A.V,)),
        "movedim": ((A.B, 0, -1), (A.B, (0, 1), (2, 0))),
        "moveaxis": ((A.B, 0, -1), (A.B, (0, 1), (2, 0))),
        "squeeze": ((A.ROW,), (A.ROW, 0), (A.ROW, 1), (A.IMAGES, (0, 1))),
        "unsqueeze": ((A.Q, 0), (A.Q, -1)),
        "flip": ((A.Q, (1,)), (A.B, [0, 2])),
        "broadcast_to": ((A.Q, (3, 4, 6)), (A.ROW, (4, -1))),
        "tile": ((A.Q, (2,)), (A.Q, (2, 1, 3))),
        "repeat_interleave": ((A.Q, 2), (A.Q, 2, 1), (A.Q, A.PLACES, 0)),
        "narrow": ((A.Q, 1, 2, 3),),
        "select": ((A.B, 1, 2), (A.B, -1, -2), (A.B, 1, A.PLACE)),
        "index_select": ((A.Q, 0, A.PLACES), (A.Q, 1, A.PLACE)),
        "take": ((A.Q, A.PLACES), (A.Q, A.ALONG)),
        "gather": ((A.Q, 0, A.ALONG), (A.Q, 1, A.FEW)),
        "take_along_dim": ((A.Q, A.ALONG, 0), (A.ROW, A.FEW, 1), (A.Q, A.ALONG)),
        "chunk": ((A.Q, 3), (A.Q, 4, 1)),
        "split": ((A.Q, 3), (A.Q, [1, 3, 2], 1)),
        "tensor_split": ((A.Q, 3), (A.Q, 4, 1), (A.Q, {"indices": (1, -1), "dim": 1})),
        "cat": (([A.Q, A.P],), ((A.Q, A.P), 1)),
        "concat": (([A.Q, A.P],), ((A.Q, A.P), 1)),
        "concatenate": (([A.Q, A.P],), ((A.Q, A.P), 1)),
        "stack": (([A.Q, A.P],), ((A.Q, A.P), -1)),
    }
)
#: Operations that sum in an order of their own, and a function that multiplies by a rounded
#: reciprocal where the operation divides; everything else has the bits of the library's function.
_CLOSE = ("matmul", "linear", "conv2d", "torch.Tensor.__rdiv__")
_LIBRARIES = {"numpy": NUMPY, "torch": TORCH}


@cache
def arguments(device: str) -> Mapping[A, Any]:
    """What every A stands for, on a device; the numbers have ties, zeros and both signs."""
    rng = np.random.default_rng(3)
    made: dict[A, Any] = {}
    for name, shape in _QUANTIZED.items():
        values = rng.integers(-6, 7, shape).astype(np.float32) / 4
        made[name] = pq.quantize(values, SCHEME).to(device)
    distinct = rng.permutation(24).reshape(4, 6).astype(np.float32)
    made[A.D] = pq.quantize(distinct, "q8s/row:f32").to(device)
    for name, shape in _FLOATS.items():
        made[name] = put(rng.integers(-6, 7, shape).astype(np.float32) / 4 + 0.125, device)
    made[A.MASK] = put(rng.random((4, 6)) < 0.5, device)
    made[A.PLACES] = put(np.array([2, 0, 3, 2]), device)
    made[A.PLACE] = put(np.array(2), device)
    made[A.ALONG] = put(rng.integers(0, 4, (4, 6)), device)
    made[A.FEW] = put(rng.integers(0, 4, (4, 1)), device)
    made[A.NUMBER] = made[A.Q][1, 2]
    return made


def filled(thing: Any, made: Mapping[A, Any], *, dequantized: bool) -> Any:
    """An example's argument with each A replaced."""
    if isinstance(thing, A):
        found = made[thing]
        return found.dequantize() if dequantized and isinstance(found, pq.QTensor) else found
    if isinstance(thing, list | tuple):
        return type(thing)(filled(item, made, dequantized=dequantized) for item in thing)
    return thing


def of_library(name: str) -> Any:
    """A library, or one of its functions by dotted name."""
    root, _, rest = name.partition(".")
    library = pytest.importorskip(root)
    return attrgetter(rest)(library) if rest else library


def rows(library: str) -> Iterator[Any]:
    for name in _LIBRARIES[library]:
        marks = () if library == "numpy" else (needs("torch"),)
        yield pytest.param(f"{library}.{name}", marks=marks, id=f"{library}.{name}")


def row_of(name: str, args: Example, kwargs: Mapping[str, Any]) -> Call:
    """The call of the table that an example is."""
    found = protocol.functions(name.partition(".")[0])[of_library(name)]
    return found.forms[found.choose(args, kwargs)] if isinstance(found, Overloads) else found


def assert_same(got: Any, wanted: Any, row: Call) -> None:
    """The same kind, dtype, shape and bits; what is wanted as an array may come quantized."""
    if isinstance(wanted, list | tuple):
        assert type(got) is type(wanted)
        assert len(got) == len(wanted)
        for mine, theirs in zip(got, wanted, strict=True):
            assert_same(mine, theirs, row)
        return
    if isinstance(got, pq.QTensor):
        got = got.dequantize()
    assert type(got) is type(wanted)
    assert tuple(got.shape) == tuple(wanted.shape)
    got, wanted = host(got), host(wanted)
    if row.op in _CLOSE or row.called in _CLOSE:
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    else:
        assert_same_bits(got, wanted, row.called)


def examples(name: str) -> Iterator[tuple[Example, dict[str, Any]]]:
    library, _, inner = name.partition(".")
    for example in _LIBRARIES[library][inner]:
        last = example[-1]
        yield (example[:-1], last) if isinstance(last, dict) else (example, {})


def check(name: str, args: Example, kwargs: Mapping[str, Any], row: Call) -> None:
    function = of_library(name)
    made = arguments("numpy" if name.startswith("numpy") else "torch:cpu")
    with np.errstate(all="ignore"):
        results = [
            function(
                *filled(args, made, dequantized=dequantized),
                **{k: filled(v, made, dequantized=dequantized) for k, v in kwargs.items()},
            )
            for dequantized in (False, True)
        ]
    assert_same(*results, row)


@pytest.mark.parametrize("name", [*rows("numpy"), *rows("torch")])
def test_functions_by_position(name: str) -> None:
    for args, kwargs in examples(name):
        check(name, args, kwargs, row_of(name, args, kwargs))


@pytest.mark.parametrize("name", [*rows("numpy"), *rows("torch")])
def test_functions_by_keyword(name: str) -> None:
    for args, kwargs in examples(name):
        row = row_of(name, args, kwargs)
        first = positional_only(name)
        named = {p.theirs: arg for p, arg in list(zip(row.parameters, args, strict=False))[first:]}
        check(name, args[:first], kwargs | named, row)


def positional_only(name: str) -> int:
    """How many parameters a function takes by position alone."""
    function = of_library(name)
    if ".__" in name or isinstance(function, np.ufunc):
        return 2
    if name.startswith("torch"):
        return int(".Tensor." in name)
    with suppress(ValueError):
        parameters = inspect.signature(function).parameters.values()
        return sum(p.kind is p.POSITIONAL_ONLY for p in parameters)
    return 3  # functions of NumPy that are written in C, before it gave their signatures


# -- the tables -------------------------------------------------------------------------------


LIBRARY = pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=needs("torch"))])


@LIBRARY
def test_every_row_has_an_example(library: str) -> None:
    tested = {of_library(f"{library}.{name}") for name in _LIBRARIES[library]}
    left_out = [c.called for c in protocol.calls(library) if of_library(c.called) not in tested]
    assert not left_out
    assert tested == set(protocol.functions(library))


@needs("torch")
@pytest.mark.parametrize("name", ["torch.max", "torch.min"])
def test_every_overload_has_an_example(name: str) -> None:
    found = protocol.functions("torch")[of_library(name)]
    assert isinstance(found, Overloads)
    assert {found.choose(*example) for example in examples(name)} == set(range(len(found.forms)))


@LIBRARY
def test_every_name_of_the_tables_exists(library: str) -> None:
    for names, _ in import_module(f"polyquant.backends.{library}.functions").ROWS:
        for name in names.split():
            assert callable(of_library(f"{library}.{name}"))


@LIBRARY
def test_every_row_is_an_operation_with_its_parameters(library: str) -> None:
    for row in protocol.calls(library):
        for op in filter(None, (row.op, row.also)):
            assert op in ops.__all__, f"{row.called}: there is no operation {op}"
            own = inspect.signature(getattr(ops, op)).parameters
            passed = {p.ours for p in row.parameters if p.rule in ("", "=") and p.ours[0] != "~"}
            changed = row.before is not None and op == "index"  # whose key is made of the axis
            assert changed or passed <= set(own), f"{row.called}: {op} has no {passed - set(own)}"


# -- what is refused --------------------------------------------------------------------------

#: A call that is refused -> its class, and how its text begins.
_REFUSED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "np.median(q)": ("UnsupportedFunction", "numpy.median has no form for quantized tensors."),
        "np.isnan(q)": ("UnsupportedFunction", "numpy.isnan has no form"),
        "np.sum(q, dtype=np.float64)": (
            "UnsupportedFunction",
            "numpy.sum with dtype= has no form for quantized tensors. Supported on a QTensor: "
            "numpy.sum(a, axis, keepdims).",
        ),
        "np.sum(q, initial=1)": ("UnsupportedFunction", "numpy.sum with initial= has no form"),
        "np.sum(q, where=mask)": ("UnsupportedFunction", "numpy.sum with where= has no form"),
        "np.add(q, x, where=mask)": ("UnsupportedFunction", "numpy.add with where= has no form"),
        "np.add(q, x, out=x)": ("UnsupportedFunction", "numpy.add with out= has no form"),
        "np.add(q, x, dtype='f8')": ("UnsupportedFunction", "numpy.add with dtype= has no form"),
        "np.add.reduce(q)": (
            "UnsupportedFunction",
            "numpy.add.reduce has no form for quantized tensors. Supported on a QTensor: "
            "numpy.add itself.",
        ),
        "np.add.outer(x, q)": ("UnsupportedFunction", "numpy.add.outer has no form"),
        "np.add.at(x, 0, q)": ("UnsupportedFunction", "numpy.add.at has no form"),
        "np.maximum.accumulate(q)": ("UnsupportedFunction", "numpy.maximum.accumulate has no form"),
        "x.__iadd__(q)": ("UnsupportedFunction", "numpy.add with out= has no form"),
        "np.where(q)": ("UnsupportedFunction", "numpy.where without x, y has no form"),
        "np.round(q, 2)": ("UnsupportedFunction", "numpy.round with decimals= has no form"),
        "np.reshape(q, -1, order='F')": ("UnsupportedFunction", "numpy.reshape with order= has"),
        "np.take(q, [0], axis=0, mode='clip')": ("UnsupportedFunction", "numpy.take with mode="),
        "np.size(q, 0)": ("UnsupportedFunction", "numpy.size has no form"),
        "np.split(q, 3)": (
            "InvalidArgument",
            "The number of sections of numpy.split must be 1 or more, and a divisor of the axis' 4 "
            "places; what came is 3.",
        ),
        "np.array_split(q, 0)": ("InvalidArgument", "The number of sections of numpy.array_split"),
        "np.split(q, [3, 1])": ("InvalidArgument", "The places where numpy.split cuts must be in"),
        "np.split(q, 1.5)": ("InvalidArgument", "The number of sections of numpy.split must be a"),
        "np.split(q, 2, 5)": ("InvalidAxes", ""),
        "np.expand_dims(q, 1.5)": ("InvalidArgument", "The axis of numpy.expand_dims must be a wh"),
        "np.repeat(x, q)": ("UnsupportedDtype", ""),
        "np.split(x, q)": ("InvalidArgument", "The operand of numpy.split must be a QTensor, and"),
        "torch.gather(y, 0, t)": ("InvalidArgument", "The operand of torch.gather must be a QTens"),
        "np.cumulative_sum(q)": ("InvalidArgument", "The axis of numpy.cumulative_sum must be giv"),
        "np.expand_dims(q, (0, 0))": ("InvalidAxes", ""),
        "np.expand_dims(q, 5)": ("InvalidAxes", ""),
        "np.take_along_axis(q, np.zeros((4, 6, 1), int), 0)": ("ShapeMismatch", "numpy.take_along"),
        "np.take_along_axis(q, np.zeros((3, 6), int), 1)": ("ShapeMismatch", "numpy.take_along_ax"),
        "np.concatenate([q, x])": ("InvalidArgument", ""),
        "np.add(q, np.ones(5, np.float32))": ("ShapeMismatch", "add cannot combine"),
        "np.exp(q, q)": ("UnsupportedFunction", "numpy.exp with out= has no form"),
        "torch.std(t)": ("UnsupportedFunction", "torch.std has no form"),
        "torch.equal(t, y)": ("UnsupportedFunction", "torch.equal has no form"),
        "torch.nn.functional.relu(t)": ("UnsupportedFunction", "torch.nn.functional.relu has no"),
        "y.copy_(t)": (
            "InvalidArgument",
            "What comes to torch.Tensor.copy_ must be plain, such as",
        ),
        "y.add_(t)": ("InvalidArgument", "What comes to torch.Tensor.add_ must be plain, such as"),
        "y.__iadd__(t)": ("InvalidArgument", "What comes to torch.Tensor.add_ must be plain, such"),
        "y.__setitem__(0, t)": ("UnsupportedFunction", "torch.Tensor.__setitem__ has no form"),
        "y[t]": ("InvalidIndex", "QTensor('q4s/2:f32', shape=(4, 6), device='torch:cpu'"),
        "y[0, t]": ("InvalidIndex", "QTensor('q4s/2:f32', shape=(4, 6), device='torch:cpu'"),
        "torch.add(t, y, alpha=2)": ("UnsupportedFunction", "torch.add with alpha= has no form"),
        "torch.div(t, y, rounding_mode='floor')": (
            "UnsupportedFunction",
            "torch.div with rounding_mode= has no form for quantized tensors. Supported on a "
            "QTensor: torch.div(input, other).",
        ),
        "torch.add(t, y, out=y)": ("UnsupportedFunction", "torch.add with out= has no form"),
        "torch.sum(t, dtype=torch.float64)": ("UnsupportedFunction", "torch.sum with dtype= has"),
        "torch.round(t, decimals=1)": ("UnsupportedFunction", "torch.round with decimals= has no"),
        "torch.topk(t, 1, largest=False)": ("UnsupportedFunction", "torch.topk with largest= has"),
        "torch.where(t)": ("UnsupportedFunction", "torch.where without input, other has no form"),
        "torch.scatter(t, 0, long, value=2.0, reduce='multiply')": (
            "UnsupportedFunction",
            "torch.scatter with reduce='multiply' has no form",
        ),
        "torch.nn.functional.embedding(long, t, max_norm=1.0)": (
            "UnsupportedFunction",
            "torch.nn.functional.embedding with max_norm= has no form",
        ),
        "torch.t(t[None])": (
            "InvalidArgument",
            "The operand of torch.t must be a tensor of 2 axes",
        ),
        "torch.flatten(t, 1, 0)": (
            "InvalidArgument",
            "The axes of torch.flatten must be axes of 2",
        ),
        "torch.index_select(t, 0, long)": ("ShapeMismatch", "torch.index_select cannot combine"),
        "torch.mm(y, t[0])": ("ShapeMismatch", "torch.mm cannot combine"),
        "torch.cat([y, t])": ("InvalidArgument", ""),
        "torch.exp(q)": ("InvalidArgument", "The operand of torch.exp must be a tensor of torch"),
        "torch.cat([q, q])": (
            "InvalidArgument",
            "The operand of torch.cat must be a tensor of tor",
        ),
        "torch.add(y, q)": ("BackendMismatch", "add needs both operands in one library."),
        "y + q": ("BackendMismatch", "add needs both operands in one library."),
        "q + y": ("BackendMismatch", "add needs both operands in one library."),
        "x + t": ("BackendMismatch", "add needs both operands in one library."),
        "np.add(x, t)": ("BackendMismatch", "add needs both operands in one library."),
    }
)


@pytest.mark.parametrize("text", _REFUSED)
def test_refusals(text: str) -> None:
    made = arguments("numpy")
    names = {"np": np, "q": made[A.Q], "x": made[A.X], "mask": made[A.MASK]}
    if "torch" in text or re.search(r"\b[ty]\b", text):
        names["torch"] = pytest.importorskip("torch", reason="torch is not installed")
        made = arguments("torch:cpu")
        names |= {"t": made[A.Q], "y": made[A.X], "long": made[A.ALONG]}
    cls, begins = _REFUSED[text]
    with pytest.raises(getattr(errors, cls)) as caught:
        eval(text, names)
    assert type(caught.value).__name__ == cls
    assert str(caught.value).startswith(begins)


def test_a_refusal_names_what_there_is_and_the_way_out() -> None:
    q = arguments("numpy")[A.Q]
    for call, such_as in (
        (np.median, "mean, min"),
        (np.linalg.svd, "add, matmul, reshape, sort, sum"),
    ):
        with pytest.raises(errors.UnsupportedFunction) as caught:
            call(q)
        assert str(caught.value).endswith(
            "has no form for quantized tensors. Supported on a QTensor: the operations of pq.ops "
            f"as functions of numpy, such as {such_as}. Otherwise call it on q.dequantize(). "
            "[unsupported-function]"
        )


def test_numpy_arrays_are_not_indexed_with_quantized_numbers() -> None:
    made = arguments("numpy")
    with pytest.raises(IndexError, match="integer"):
        made[A.X][made[A.Q]]


# -- facts, other libraries, operators --------------------------------------------------------


def test_facts() -> None:
    q = arguments("numpy")[A.B]
    assert (np.shape(q), np.ndim(q), np.size(q)) == ((2, 4, 6), 3, 48)


@needs("torch")
def test_facts_for_torch() -> None:
    import torch

    q = arguments("torch:cpu")[A.B]
    assert torch.numel(q) == 48
    assert not torch.is_tensor(q)


@needs("torch")
def test_numpys_functions_compute_with_the_tensors_own_library() -> None:
    import torch

    q = arguments("torch:cpu")[A.Q]
    assert torch.equal(np.exp(q), torch.exp(q))
    assert torch.equal(np.sum(q, axis=1), torch.sum(q, dim=1))
    assert torch.equal(np.float64(2.0) * q, q * 2.0)


#: Device -> whether its arrays leave a QTensor on their right to the QTensor.
_REFLECTS = MappingProxyType({"array_api_strict": False})


@pytest.mark.parametrize(
    "name",
    ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge"],
)
def test_operators(name: str, device: str) -> None:
    made = arguments(device)
    q, x, apply = made[A.Q], made[A.X], getattr(operator, name)
    values = q.dequantize()
    with np.errstate(all="ignore"):
        pairs = [
            (apply(q, x), apply(values, x)),
            (apply(q, made[A.P]), apply(values, made[A.P].dequantize())),
        ]
        if _REFLECTS.get(device, True):
            pairs.append((apply(x, q), apply(x, values)))
        pairs.append((apply(q, 1.5), apply(values, 1.5)))
        if device != "array_api_strict":
            pairs.append((apply(2, q), apply(2, values)))
    for got, wanted in pairs:
        assert type(got) is type(wanted)
        assert_same_bits(host(got), host(wanted), name)


@needs("jax")
def test_jax_has_operators_and_no_protocol() -> None:
    import jax

    made = arguments("jax")
    q, x = made[A.Q], made[A.X]
    wanted = host(x + q.dequantize())
    assert_same_bits(host(jax.jit(lambda a: a + q)(x)), wanted)
    for call in (lambda: jax.numpy.add(x, q), lambda: jax.numpy.sum(q)):
        with pytest.raises(TypeError, match="requires ndarray or scalar"):
            call()


@needs("torch")
def test_gradients_reach_the_float_operand_of_functions() -> None:
    import torch

    made = arguments("torch:cpu")
    q = made[A.Q]
    calls: list[Any] = [
        lambda x, w: x * w,
        lambda x, w: w / x,
        lambda x, w: torch.where(w > 0, x, w),
        lambda x, w: torch.maximum(w, x),
        lambda x, w: torch.add(w, x),
        lambda x, w: x.sub(w),
    ]
    for call in calls:
        found = []
        for w in (q, q.dequantize()):
            leaf = made[A.X].clone().requires_grad_()
            call(leaf, w).square().sum().backward()
            found.append(leaf.grad)
        assert torch.equal(*found)


@needs("torch")
def test_products_take_the_quick_way() -> None:
    import torch

    for function in (torch.Tensor.matmul, torch.matmul, torch.add, torch.Tensor.mul):
        plan = protocol.plans("torch")[function]
        assert isinstance(plan, protocol._Plan)
        assert plan.least == plan.most == 2
