"""NumPy's functions and ufuncs on quantized tensors: which operation each is (see ``calls``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from polyquant.calls import Arguments, Row, call, table
from polyquant.calls.adapt import (
    along,
    counted,
    cuts,
    fixed,
    flattened,
    joined,
    only_axis,
    ranked,
    whole,
)
from polyquant.errors import InvalidAxes

#: What every ufunc takes after its operands; NumPy itself drops out=None.
_UFUNC = "out! where!True casting!'same_kind' order!'K' dtype! subok!True signature!"
_REDUCTION = "x:a axis dtype! out! keepdims initial! where!True"
_EXTREMUM = "x:a axis out! keepdims initial! where!True"
_TRUTH = "x:a axis out! keepdims where!True"
_CUMULATIVE = "x axis=None dtype! out! include_initial!False"
_JOIN = "axis out! dtype! casting!'same_kind'"


def _new_axes(called: str, given: Arguments) -> Arguments:
    """Axes of extent 1 at those places of the result. Raises InvalidAxes."""
    q, asked = given["q"], given["axis"]
    given_axes = asked if isinstance(asked, list | tuple) else (asked,)
    axes = [whole(f"The axis of {called}", axis) for axis in given_axes]
    rank = q.ndim + len(axes)
    places = {axis % rank for axis in axes if -rank <= axis < rank}
    if len(places) != len(axes):
        raise InvalidAxes(got=asked, rank=rank, shape=q.shape)
    return {"q": q, "key": tuple(None if n in places else slice(None) for n in range(rank))}


#: ufuncs of one and of two operands -> the operation.
_UNARY = (
    ("negative", "neg"),
    ("absolute", "abs"),
    ("sign", "sign"),
    ("reciprocal", "recip"),
    ("square", "square"),
    ("sqrt", "sqrt"),
    ("exp", "exp"),
    ("log", "log"),
    ("log1p", "log1p"),
    ("sin", "sin"),
    ("cos", "cos"),
    ("tan", "tan"),
    ("sinh", "sinh"),
    ("cosh", "cosh"),
    ("tanh", "tanh"),
    ("floor", "floor"),
    ("ceil", "ceil"),
    ("rint", "round"),
)
_BINARY = (
    ("add", "add"),
    ("subtract", "sub"),
    ("multiply", "mul"),
    ("divide", "div"),
    ("floor_divide", "floor_divide"),
    ("remainder", "remainder"),
    ("power", "pow"),
    ("maximum", "maximum"),
    ("minimum", "minimum"),
    ("equal", "equal"),
    ("not_equal", "not_equal"),
    ("less", "less"),
    ("less_equal", "less_equal"),
    ("greater", "greater"),
    ("greater_equal", "greater_equal"),
)

ROWS: tuple[Row, ...] = (
    *((name, call(op, f"x {_UFUNC}")) for name, op in _UNARY),
    *((name, call(op, f"a:x1 b:x2 {_UFUNC}")) for name, op in _BINARY),
    # -- products
    ("matmul", call("matmul", f"a:x1 b:x2 axes! axis! keepdims!False {_UFUNC}")),
    ("linalg.matmul", call("matmul", "a:x1 b:x2")),
    # Batches of a right operand lie elsewhere in the result of dot than in that of matmul.
    ("dot", call("matmul", "a b out!", ranked(range(1, 65), (1, 2)))),
    # -- reductions
    ("sum", call("sum", _REDUCTION)),
    ("prod", call("prod", _REDUCTION)),
    ("mean", call("mean", "x:a axis dtype! out! keepdims where!True")),
    ("max amax", call("max", _EXTREMUM)),
    ("min amin", call("min", _EXTREMUM)),
    ("any", call("any", _TRUTH)),
    ("all", call("all", _TRUTH)),
    ("argmax", call("argmax", "x:a axis out! keepdims")),
    ("argmin", call("argmin", "x:a axis out! keepdims")),
    # -- along an axis; whatever way of sorting is asked for, a stable one will do
    ("cumsum", call("cumsum", "x:a axis=None dtype! out!")),
    ("cumprod", call("cumprod", "x:a axis=None dtype! out!")),
    ("cumulative_sum", call("cumsum", _CUMULATIVE, only_axis)),
    (
        "cumulative_prod",
        call("cumprod", _CUMULATIVE, only_axis),
    ),
    ("sort", call("sort", "x:a axis kind? order! stable?", flattened)),
    ("argsort", call("argsort", "x:a axis kind? order! stable?", flattened)),
    # -- number by number
    ("clip", call("clamp", f"x:a min:a_min max:a_max out! min max {_UFUNC}")),
    ("round around", call("round", "x:a decimals!0 out!")),
    ("where", call("where", "mask:condition a:x b:y")),
    # -- layout
    ("reshape", call("reshape", "q:a shape order!'C' copy!")),
    ("ravel", call("reshape", "q:a order!'C'", fixed(shape=(-1,)))),
    ("transpose", call("transpose", "q:a axes")),
    ("matrix_transpose", call("swapaxes", "q:x", fixed(axis1=-1, axis2=-2))),
    ("linalg.matrix_transpose", call("swapaxes", "q:x", fixed(axis1=-1, axis2=-2))),
    ("swapaxes", call("swapaxes", "q:a axis1 axis2")),
    ("moveaxis", call("moveaxis", "q:a source destination")),
    ("squeeze", call("squeeze", "q:a axis")),
    ("expand_dims", call("index", "q:a ~axis", _new_axes)),
    ("flip", call("flip", "q:m axis")),
    ("broadcast_to", call("expand", "q:array shape subok?")),
    ("repeat", call("repeat", "q:a repeats axis=None", counted)),
    ("tile", call("tile", "q:A reps")),
    ("take", call("take", "q:a indices axis=None out! mode!'raise'", flattened)),
    ("take_along_axis", call("gather", "q:arr indices axis=-1", along)),
    ("split", call("split", "q:ary ~cuts:indices_or_sections axis", cuts(equal=True), after=list)),
    ("array_split", call("split", "q:ary ~cuts:indices_or_sections axis", cuts(), after=list)),
    ("concatenate", call("concat", f"tensors:arrays {_JOIN}", joined)),
    ("stack", call("stack", f"tensors:arrays {_JOIN}")),
)

FUNCTIONS = table(np, ROWS, aliases={})
#: Functions that ask for a fact -> the attribute.
FACTS: Mapping[Any, str] = MappingProxyType(
    {np.shape: "shape", np.ndim: "ndim", np.size: "size"},
)


def name_of(function: Any) -> str:
    """The name of any function, for messages."""
    return f"{getattr(function, '__module__', None) or 'numpy'}.{function.__name__}"
