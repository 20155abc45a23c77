"""Functions of array libraries as rows of a table: which operation each is, argument by argument.

A row's parameters are a text: the library's own, in their order, one word each.

=================  ==============================================================================
``axis``           the operation's parameter, which the library calls the same
``axis:dim``       the operation's name for it, then the library's
``axis:dim=None``  the same; passed as None where the caller leaves it out
``dtype!``         one that the operation has not: only None may come; ``alpha!1``: only 1
``kind?``          whatever comes is left out: it cannot change the result
``~cuts:sections`` for the row's ``before``, which puts the operation's own in its place
=================  ==============================================================================
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

Arguments = dict[str, Any]
#: Changes the arguments of a function into those of an operation; is told the function's name.
Before = Callable[[str, Arguments], Arguments]

#: The operation's name, the library's, a rule, and what the rule is about.
_WORD = re.compile(r"(~?\w+)(?::(\w+))?(?:([!?=])(\S*))?")


class Parameter(NamedTuple):
    """A parameter of a library's function: see the text form above."""

    theirs: str
    ours: str
    rule: str
    default: Any


@dataclass(frozen=True, eq=False)
class Call:
    """What a library's own function computes.

    Attributes:
        op: the operation, a name of ``polyquant.ops``.
        parameters: the function's, in order.
        before: changes the arguments first, where the library means something else by them.
        also: an operation with the same arguments, whose result is the second of a pair.
        after: changes the result.
        called: the function's name, for messages.
        keywords: the parameters by every name that the library takes for them.
    """

    op: str
    parameters: tuple[Parameter, ...]
    before: Before | None = None
    also: str = ""
    after: Callable[[Any], Any] | None = None
    called: str = ""
    keywords: Mapping[str, Parameter] = field(default_factory=lambda: MappingProxyType({}))


class Overloads(NamedTuple):
    """A function that is one of several calls, by the arguments that come."""

    forms: tuple[Call, ...]
    choose: Callable[[Sequence[Any], Mapping[str, Any]], int]


Functions = Mapping[Any, Call | Overloads]
#: One or more functions of a library by name, and what they are.
Row = tuple[str, Call | Overloads]


def call(
    op: str,
    parameters: str,
    before: Before | None = None,
    *,
    also: str = "",
    after: Callable[[Any], Any] | None = None,
) -> Call:
    """A Call from the text of its parameters."""
    return Call(op, tuple(map(_parameter, parameters.split())), before, also, after)


def table(library: Any, rows: Sequence[Row], aliases: Mapping[str, str]) -> Functions:
    """Function -> what it is, for those of the names that this version of the library has.

    ``aliases``: other names of parameters that the library takes in any function -> its own.
    """
    found: dict[Any, Call | Overloads] = {}
    for names, row in rows:
        for name in names.split():
            try:
                function = attrgetter(name)(library)
            except AttributeError:  # an older or a newer one has it not
                continue
            called = f"{library.__name__}.{name}"
            if isinstance(row, Call):
                found[function] = _named(row, called, aliases)
            else:
                forms = tuple(_named(form, called, aliases) for form in row.forms)
                found[function] = Overloads(forms, row.choose)
    return MappingProxyType(found)


def _named(row: Call, called: str, aliases: Mapping[str, str]) -> Call:
    own = {parameter.theirs: parameter for parameter in row.parameters}
    others = {alias: own[theirs] for alias, theirs in aliases.items() if theirs in own}
    return replace(row, called=called, keywords=MappingProxyType(others | own))


def _parameter(word: str) -> Parameter:
    _, ours, theirs, rule, default, _ = _WORD.split(word)
    name = theirs or ours.removeprefix("~")
    return Parameter(name, ours, rule or "", literal_eval(default or "None"))
