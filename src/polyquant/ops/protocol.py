"""Functions of the array libraries called on a QTensor, as operations: the tables of ``backends``.

``backends/<library>/functions.py`` says which operation a function is, and how its arguments are
called (see ``calls``). Here the arguments are bound, and whatever an operation has not is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from polyquant.arrays import BACKENDS, find_backend
from polyquant.calls import Arguments, Call, Functions, Overloads
from polyquant.errors import InvalidArgument, InvalidIndex, UnsupportedFunction
from polyquant.methods import operations
from polyquant.ops.compiled import compiled, is_compiling
from polyquant.qtensor import QTensor

#: What every library has, where no function has a name like the one that was asked for.
_SOME = ("add", "matmul", "reshape", "sort", "sum")
_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class _Plan(NamedTuple):
    """A call with its operations looked up.

    From ``least`` to ``most`` arguments by position are the operation's own: the quick way.
    """

    call: Call
    run: Callable[..., Any]
    also: Callable[..., Any] | None
    required: tuple[str, ...]
    least: int
    most: int


def array_function(
    library: str,
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    method: str = "__call__",
) -> Any:
    """A function of an array library called with a QTensor among its arguments.

    ``method`` is that of a ufunc. Raises UnsupportedFunction, InvalidArgument (no tensor of
    the library, or a change in place), InvalidIndex, and what the operation raises.
    """
    if is_compiling():
        return compiled().array_function(function, args, kwargs or {})
    plan = plans(library).get(function)
    if (
        isinstance(plan, _Plan)
        and plan.least <= len(args) <= plan.most
        and not kwargs
        and args[0].__class__ is not QTensor
        and method == "__call__"
    ):
        return plan.run(*args)
    return _called(library, function, plan, args, kwargs or _NO_KEYWORDS, method)


class _Choice(NamedTuple):
    """The plans of a function that is one of several calls."""

    plans: tuple[_Plan, ...]
    choose: Callable[[Sequence[Any], Mapping[str, Any]], int]


@cache
def functions(library: str) -> Functions:
    """Function -> the operation that it is, for a library with a protocol for its functions."""
    found: Functions = _module(library).FUNCTIONS
    return found


def _module(library: str) -> Any:
    return import_module(f"{BACKENDS[library]}.functions")


@cache
def plans(library: str) -> Mapping[Any, _Plan | _Choice]:
    """Function -> its call with the operations looked up, or its calls."""
    found: dict[Any, _Plan | _Choice] = {}
    for function, called in functions(library).items():
        if isinstance(called, Overloads):
            found[function] = _Choice(tuple(map(_planned, called.forms)), called.choose)
        else:
            found[function] = _planned(called)
    return MappingProxyType(found)


def _planned(call: Call) -> _Plan:
    run = getattr(operations(), call.op)
    also = getattr(operations(), call.also) if call.also else None
    own = inspect.signature(run).parameters.values()
    required = tuple(p.name for p in own if p.default is inspect.Parameter.empty)
    as_it_is = not (call.before or call.also or call.after) and len(required) > 1
    most = _shared(call, own) if as_it_is else 0
    return _Plan(call, run, also, required, len(required), most)


def _shared(call: Call, own: Iterable[inspect.Parameter]) -> int:
    """How many parameters a function and its operation begin with alike."""
    theirs = ((parameter.rule, parameter.ours) for parameter in call.parameters)
    ours = (("", p.name) for p in own if p.kind is p.POSITIONAL_OR_KEYWORD)
    pairs = zip(theirs, ours, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# -- the long way -----------------------------------------------------------------------------


def _called(
    library: str,
    function: Any,
    plan: _Plan | _Choice | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    method: str,
) -> Any:
    if plan is None:
        return _fact(library, function, args, kwargs)
    if isinstance(plan, _Choice):
        plan = plan.plans[plan.choose(args, kwargs)]
    call = plan.call
    if method != "__call__":
        raise UnsupportedFunction(function=f"{call.called}.{method}", known=f"{call.called} itself")
    _check_library(library, call.called, args, kwargs)
    given = _bind(call, args, kwargs)
    if "q" in given and not isinstance(given["q"], QTensor):
        wanted = "a QTensor, and not an array with a QTensor among the other arguments"
        got = type(given["q"]).__name__
        raise InvalidArgument(name=f"The operand of {call.called}", wanted=wanted, got=got)
    if call.before is not None:
        given = call.before(call.called, given)
    missing = [name for name in plan.required if name not in given]
    if missing:
        theirs = {p.ours: p.theirs for p in reversed(call.parameters)}
        _refuse(call, f"without {', '.join(theirs.get(name, name) for name in missing)}")
    result = plan.run(**given)
    if plan.also is not None:
        result = (result, plan.also(**given))
    return result if call.after is None else call.after(result)


def _bind(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments by the operation's names. Raises UnsupportedFunction."""
    if len(args) > len(call.parameters):
        _refuse(call, f"with {len(args)} arguments")
    pairs = list(zip(call.parameters, args, strict=False))
    for name, item in kwargs.items():
        if name not in call.keywords:
            _refuse(call, f"with {name}=")
        pairs.append((call.keywords[name], item))
    given = {p.ours.removeprefix("~"): p.default for p in call.parameters if p.rule == "="}
    for parameter, item in pairs:
        if parameter.rule == "!":
            if not _is_default(item, parameter.default):
                _refuse(call, f"with {parameter.theirs}=")
        elif parameter.rule != "?":
            given[parameter.ours.removeprefix("~")] = item
    return given


def _is_default(item: Any, default: Any) -> bool:
    return item is default or (isinstance(item, int | float | str) and item == default)


def _refuse(call: Call, what: str) -> NoReturn:
    names = dict.fromkeys(p.theirs for p in call.parameters if p.rule not in ("!", "?"))
    known = f"{call.called}({', '.join(names)})"
    raise UnsupportedFunction(function=f"{call.called} {what}", known=known)


def _fact(library: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The answer of a function that asks for the shape or the like; others are refused."""
    fact = _module(library).FACTS.get(function)
    if fact is not None and len(args) == 1 and not kwargs:
        return getattr(args[0], fact)
    called = _module(library).name_of(function)
    quantized = next((x for x in _operands(args, kwargs) if isinstance(x, QTensor)), None)
    if called.endswith("__getitem__"):
        reason = "an index is of integers or booleans, which quantized numbers are not"
        raise InvalidIndex(index=quantized, shape=tuple(args[0].shape), reason=reason)
    if called.endswith("_") and not called.endswith("__"):
        # Not a TypeError, after which Python would add `x += q` up in a new tensor.
        wanted = "plain, such as q.dequantize(), where it changes a tensor in place"
        raise InvalidArgument(name=f"What comes to {called}", wanted=wanted, got=quantized)
    names = sorted({call.called.rpartition(".")[2] for call in calls(library)})
    near = get_close_matches(called.rpartition(".")[2], names) or _SOME
    known = f"the operations of pq.ops as functions of {library}, such as {', '.join(near)}"
    raise UnsupportedFunction(function=called, known=known)


def _check_library(
    library: str, called: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """A library's function needs one of its own tensors; NumPy's take those of any library."""
    if library == "numpy":
        return
    for x in _operands(args, kwargs):
        owner = find_backend(x.data if isinstance(x, QTensor) else x)
        if owner is not None and owner.name == library:
            return
    wanted = f"a tensor of {library}; q.to(...) brings one there"
    got = next(x for x in _operands(args, kwargs) if isinstance(x, QTensor))
    raise InvalidArgument(name=f"The operand of {called}", wanted=wanted, got=got)


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments, and what is in those that are lists or tuples."""
    for item in (*args, *kwargs.values()):
        yield from item if isinstance(item, list | tuple) else (item,)


def calls(library: str) -> Iterator[Call]:
    """Every call of a library's table."""
    for found in functions(library).values():
        yield from found.forms if isinstance(found, Overloads) else (found,)
