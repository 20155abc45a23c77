"""torch's functions and tensor methods on quantized tensors: which operation each is (``calls``).

Of the methods only those are here that a plain tensor can be asked for with a QTensor beside it.
Under torch.compile and autograd the operations stand for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from polyquant.calls import Arguments, Overloads, Row, call, table
from polyquant.calls.adapt import along, counted, cuts, fixed, flattened, ranked
from polyquant.errors import InvalidArgument, ShapeMismatch, UnsupportedFunction


def _all_or_some(called: str, given: Arguments) -> Arguments:
    """No axes at all mean all of them."""
    axis = given.get("axis")
    if not isinstance(axis, Sequence):
        return given
    return given | {"axis": tuple(axis) or None}


def _of_extent_one(called: str, given: Arguments) -> Arguments:
    """Axes of any other extent than 1 stay."""
    q, axis = given["q"], given.get("axis")
    if axis is None:
        return given
    axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    stay = [a for a in axes if -q.ndim <= a < q.ndim and q.shape[a] != 1]
    return given | {"axis": tuple(a for a in axes if a not in stay)}


def _in_one(called: str, given: Arguments) -> Arguments:
    """Adjacent axes as one."""
    q, start, end = given["q"], given["start"], given["end"]
    if q.ndim == 0:
        return {"q": q, "shape": (1,)}
    first, last = start % q.ndim, end % q.ndim
    if not -q.ndim <= start < q.ndim or not -q.ndim <= end < q.ndim or first > last:
        wanted = f"axes of {q.ndim} in ascending order"
        raise InvalidArgument(name=f"The axes of {called}", wanted=wanted, got=(start, end))
    size = 1
    for extent in q.shape[first : last + 1]:
        size *= extent
    return {"q": q, "shape": (*q.shape[:first], size, *q.shape[last + 1 :])}


def _matrix(called: str, given: Arguments) -> Arguments:
    """All axes in reverse order, which are two at most."""
    shape = tuple(given["q"].shape)
    if len(shape) > 2:
        wanted = "a tensor of 2 axes or fewer; .mT exchanges the last two of any"
        raise InvalidArgument(name=f"The operand of {called}", wanted=wanted, got=shape)
    return given


def _in_line(called: str, given: Arguments) -> Arguments:
    """Indices in one line, one of them as a line of one."""
    indices = given["indices"]
    if getattr(indices, "ndim", 1) > 1:
        shapes = {"left": tuple(given["q"].shape), "right": tuple(indices.shape)}
        raise ShapeMismatch(op=called, **shapes, reason="the indices must have one axis")
    return given | {"indices": indices.reshape(-1)}


def _along_or_flat(called: str, given: Arguments) -> Arguments:
    """Without an axis, tensor and indices are each in one line."""
    if given["axis"] is None:
        given = given | {"indices": given["indices"].reshape(-1)}
    return along(called, given)


def _from_anywhere(called: str, given: Arguments) -> Arguments:
    """Indices of the tensor in one line."""
    return flattened(called, given | {"axis": None})


def _added(called: str, given: Arguments) -> Arguments:
    """Numbers are added to what is there: the first of them where there are more than indices."""
    shape = getattr(given.get("indices"), "shape", ())
    if shape and getattr(given.get("values"), "ndim", 0) == len(shape):
        given = given | {"values": given["values"][tuple(slice(extent) for extent in shape)]}
    return given | {"reduce": "add"}


def _scattered(called: str, given: Arguments) -> Arguments:
    """Numbers replace what is there, or are added to it."""
    reduce = given.pop("how", None)
    if reduce not in (None, "add"):
        function, known = f"{called} with reduce={reduce!r}", "reduce=None and reduce='add'"
        raise UnsupportedFunction(function=function, known=known)
    return _added(called, given) | {"reduce": reduce or "set"}


def _extremum(name: str, pair: Any) -> Overloads:
    """torch.max and torch.min: of all numbers, along an axis with places, or of two tensors."""
    forms = (
        call(name, "x:input out!"),
        call(name, "x:input axis:dim keepdims:keepdim out!", also=f"arg{name}", after=pair),
        call(f"{name}imum", _PAIR),
    )

    def choose(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        if "other" in kwargs or (len(args) > 1 and not isinstance(args[1], int)):
            return 2
        return int(len(args) > 1 or "dim" in kwargs or "axis" in kwargs)

    return Overloads(forms, choose)


def _methods(names: str) -> str:
    """The names of functions, and of the tensor methods that are called the same."""
    return " ".join(f"{name} Tensor.{name}" for name in names.split())


_REDUCED = "x:input axis:dim keepdims:keepdim dtype! out!"
_SORTED = "x:input axis:dim descending stable? out!"
_PAIR = "a:input b:other out!"
_MIRRORED = "b:input a:other"

#: Functions of one operand -> the operation.
_UNARY = (
    ("neg negative", "neg"),
    ("abs absolute", "abs"),
    ("sign", "sign"),
    ("reciprocal", "recip"),
    ("square", "square"),
    ("sqrt", "sqrt"),
    ("exp", "exp"),
    ("log", "log"),
    ("log1p special.log1p", "log1p"),
    ("erf special.erf", "erf"),
    ("sin", "sin"),
    ("cos", "cos"),
    ("tan", "tan"),
    ("sinh", "sinh"),
    ("cosh", "cosh"),
    ("tanh", "tanh"),
    ("floor", "floor"),
    ("ceil", "ceil"),
)
#: Functions of two operands, which are methods too -> the operation.
_BINARY = (
    ("mul multiply", "mul"),
    ("floor_divide", "floor_divide"),
    ("remainder", "remainder"),
    ("maximum", "maximum"),
    ("minimum", "minimum"),
    ("eq", "equal"),
    ("ne not_equal", "not_equal"),
    ("lt less", "less"),
    ("le less_equal", "less_equal"),
    ("gt greater", "greater"),
    ("ge greater_equal", "greater_equal"),
)

ROWS: tuple[Row, ...] = (
    *((names, call(op, "x:input out!")) for names, op in _UNARY),
    *((_methods(names), call(op, _PAIR)) for names, op in _BINARY),
    (_methods("add"), call("add", f"{_PAIR} alpha!1")),
    (_methods("sub subtract"), call("sub", f"{_PAIR} alpha!1")),
    (_methods("div divide true_divide"), call("div", f"{_PAIR} rounding_mode!")),
    ("pow Tensor.pow Tensor.__pow__", call("pow", "a:input b:exponent out!")),
    # -- operators that are functions of their own
    ("rsub", call("sub", f"{_MIRRORED} alpha!1")),
    ("Tensor.__rsub__", call("sub", _MIRRORED)),
    ("Tensor.__rdiv__", call("div", _MIRRORED)),
    ("Tensor.__floordiv__", call("floor_divide", "a:self b:other")),
    ("Tensor.__rfloordiv__", call("floor_divide", _MIRRORED)),
    ("Tensor.__rmod__", call("remainder", _MIRRORED)),
    ("Tensor.__rpow__", call("pow", _MIRRORED)),
    # -- products
    ("matmul linalg.matmul Tensor.matmul Tensor.__matmul__", call("matmul", _PAIR)),
    ("Tensor.__rmatmul__", call("matmul", _MIRRORED)),
    (_methods("mm"), call("matmul", "a:input b:mat2 out!", ranked((2,), (2,)))),
    (_methods("mv"), call("matmul", "a:input b:vec out!", ranked((2,), (1,)))),
    (_methods("dot"), call("matmul", "a:input b:tensor out!", ranked((1,), (1,)))),
    (_methods("bmm"), call("matmul", "a:input b:mat2 out!", ranked((3,), (3,)))),
    ("nn.functional.linear", call("linear", "x:input weight bias")),
    # Codes have no gradients, whose scaling and padding the options are of.
    (
        "nn.functional.embedding",
        call(
            "embedding",
            "indices:input weight padding_idx? max_norm! norm_type? scale_grad_by_freq? sparse?",
        ),
    ),
    ("conv2d", call("conv2d", "x:input weight bias stride padding dilation groups")),
    # -- reductions
    ("sum", call("sum", _REDUCED, _all_or_some)),
    ("mean", call("mean", _REDUCED, _all_or_some)),
    ("prod", call("prod", _REDUCED)),
    ("amax", call("max", "x:input axis:dim keepdims:keepdim out!", _all_or_some)),
    ("amin", call("min", "x:input axis:dim keepdims:keepdim out!", _all_or_some)),
    (_methods("max"), _extremum("max", torch.return_types.max)),
    (_methods("min"), _extremum("min", torch.return_types.min)),
    ("any", call("any", "x:input axis:dim keepdims:keepdim out!")),
    ("all", call("all", "x:input axis:dim keepdims:keepdim out!")),
    ("argmax", call("argmax", "x:input axis:dim keepdims:keepdim out!")),
    ("argmin", call("argmin", "x:input axis:dim keepdims:keepdim out!")),
    # -- along an axis; a stable order will do where any is asked for
    ("cumsum", call("cumsum", "x:input axis:dim dtype! out!")),
    ("cumprod", call("cumprod", "x:input axis:dim dtype! out!")),
    ("sort", call("sort", _SORTED, also="argsort", after=torch.return_types.sort)),
    ("argsort", call("argsort", _SORTED)),
    (
        "topk",
        call(
            "topk",
            "x:input k axis:dim largest!True sorted? out!",
            after=torch.return_types.topk,
        ),
    ),
    # -- number by number
    (_methods("clamp clip"), call("clamp", "x:input min max out!")),
    (_methods("clamp_min"), call("clamp", "x:input min out!")),
    (_methods("clamp_max"), call("clamp", "x:input max out!")),
    ("round special.round", call("round", "x:input decimals!0 out!")),
    ("where", call("where", "mask:condition a:input b:other out!")),
    ("Tensor.where", call("where", "a:self mask:condition b:other")),
    (_methods("masked_fill"), call("mask_fill", "x:input mask value")),
    (
        _methods("scatter"),
        call(
            "scatter",
            "x:input axis:dim indices:index values:src values:value ~how:reduce out!",
            _scattered,
        ),
    ),
    (
        _methods("scatter_add"),
        call("scatter", "x:input axis:dim indices:index values:src out!", _added),
    ),
    # -- layout
    ("reshape", call("reshape", "q:input shape")),
    ("ravel", call("reshape", "q:input", fixed(shape=(-1,)))),
    ("flatten", call("reshape", "q:input ~start:start_dim=0 ~end:end_dim=-1", _in_one)),
    ("permute", call("permute", "q:input axes:dims")),
    ("transpose swapdims", call("swapaxes", "q:input axis1:dim0 axis2:dim1")),
    ("swapaxes", call("swapaxes", "q:input axis1:axis0 axis2:axis1")),
    ("t", call("transpose", "q:input", _matrix)),
    ("movedim moveaxis", call("moveaxis", "q:input source destination")),
    ("squeeze", call("squeeze", "q:input axis:dim", _of_extent_one)),
    ("unsqueeze", call("unsqueeze", "q:input axis:dim")),
    ("flip", call("flip", "q:input axis:dims")),
    ("broadcast_to", call("expand", "q:input shape:size")),
    ("tile", call("tile", "q:input reps:dims")),
    (
        "repeat_interleave",
        call("repeat", "q:input repeats axis:dim=None output_size?", counted),
    ),
    ("narrow", call("narrow", "q:input axis:dim start length")),
    ("select", call("take", "q:input axis:dim indices:index")),
    ("index_select", call("take", "q:input axis:dim indices:index out!", _in_line)),
    ("take", call("take", "q:input indices:index out!", _from_anywhere)),
    ("gather", call("gather", "q:input axis:dim indices:index sparse_grad? out!")),
    ("take_along_dim", call("gather", "q:input indices axis:dim=None out!", _along_or_flat)),
    ("chunk", call("chunk", "q:input chunks axis:dim")),
    ("split", call("split", "q:tensor sizes:split_size_or_sections axis:dim")),
    (
        "tensor_split",
        call(
            "split",
            "q:input ~cuts:sections axis:dim ~cuts:indices ~cuts:tensor_indices_or_sections",
            cuts(),
        ),
    ),
    ("cat concat concatenate", call("concat", "tensors axis:dim out!")),
    ("stack", call("stack", "tensors axis:dim out!")),
)

#: NumPy's names of some parameters, which torch takes in every function.
_ALIASES = MappingProxyType(
    {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
)
FUNCTIONS = table(torch, ROWS, _ALIASES)
#: Functions that ask for a fact -> the attribute.
FACTS: Mapping[Any, str] = MappingProxyType({torch.numel: "size"})


def name_of(function: Any) -> str:
    """The name of any function or method, for messages."""
    resolved = torch.overrides.resolve_name(function)  # None for what is no tensor's own function
    return resolved or f"{getattr(function, '__module__', None) or 'torch'}.{function.__name__}"
