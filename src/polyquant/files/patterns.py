"""Regular expressions from files that may be hostile, matched without ever going back.

Python's own matcher tries one way after another, which a pattern like ``(a*)*b`` turns into for
ever. Here the set of all places that can be reached moves through the pattern, as the bits of an
integer, so that each part of it sees a place once a turn; and the turns are counted. Python's
parser reads the pattern. What would need more than places is refused: backreferences, looking
behind, atomic groups, flags.
"""

from __future__ import annotations

import re
import re._parser  # type: ignore[import-not-found]  # which typeshed does not know
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

#: Longer patterns, and those that take more turns, are refused: some milliseconds for each.
LENGTH_LIMIT, TURNS_LIMIT = 4096, 50_000


class _Run:
    """A text that a pattern moves through."""

    def __init__(self, text: str) -> None:
        self.text, self.turns, self.places = text, TURNS_LIMIT, _places(text)

    def of_class(self, holds: Callable[[str], bool]) -> int:
        """The places before a character of a class."""
        return _united(places for c, places in self.places.items() if holds(c))

    def turn(self) -> None:
        self.turns -= 1
        if self.turns < 0:
            raise re.error("it takes too long")


@lru_cache
def _places(text: str) -> Mapping[str, int]:
    """Of every character the places before it."""
    made: dict[str, int] = {}
    for place, c in enumerate(text):
        made[c] = made.get(c, 0) | 1 << place
    return MappingProxyType(made)


#: From the places before a part of a pattern to those after it.
_Move = Callable[[_Run, int], int]


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern matches the beginning of a text, as ``re.match`` says it.

    Raises re.error for what is no pattern, one that is not read, and one that takes too long.
    """
    return _moved(_compiled(pattern), _Run(text), 1) != 0


def found(pattern: str, text: str) -> int | None:
    """The first place where a pattern matches, as ``re.search`` says it. Raises re.error."""
    move, run = _compiled(pattern), _Run(text)
    return next((at for at in range(len(text) + 1) if _moved(move, run, 1 << at)), None)


def _moved(move: _Move, run: _Run, places: int) -> int:
    try:
        return move(run, places)
    except RecursionError:
        raise re.error("it is nested too deeply") from None


@lru_cache
def _compiled(pattern: str) -> _Move:
    if len(pattern) > LENGTH_LIMIT:
        raise re.error(f"it has {len(pattern)} characters, and {LENGTH_LIMIT} are allowed")
    try:
        with warnings.catch_warnings(action="ignore"):  # of sets that will mean something else
            parsed = re._parser.parse(pattern)
        if parsed.state.flags & ~re.UNICODE.value:
            raise re.error("flags are not read")
        return _sequence(parsed)
    except (OverflowError, RecursionError) as error:
        raise re.error(str(error)) from None


def _sequence(parts: Iterable[tuple[Any, Any]]) -> _Move:
    return _sequence_of([_part(str(kind), argument) for kind, argument in parts])


def _sequence_of(moves: Sequence[_Move]) -> _Move:
    def move(run: _Run, places: int) -> int:
        for one in moves:
            run.turn()
            places = one(run, places)
            if not places:
                break
        return places

    return move


def _part(kind: str, argument: Any) -> _Move:
    if kind == "LITERAL":
        c = chr(argument)
        return lambda run, places: (places & run.places.get(c, 0)) << 1
    if kind in _CLASSES:
        holds = cache(_CLASSES[kind](argument))
        return lambda run, places: (places & run.of_class(holds)) << 1
    if kind == "AT" and str(argument) in _EDGES:
        edge = _EDGES[str(argument)]
        return lambda run, places: places & edge(run)
    if kind == "BRANCH":
        ways = [_sequence(way) for way in argument[1]]
        return lambda run, places: _united(way(run, places) for way in ways)
    if kind == "SUBPATTERN" and argument[1:3] == (0, 0):
        return _sequence(argument[3])
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        low, high, parts = int(argument[0]), int(argument[1]), list(argument[2])
        if high == int(re._parser.MAXREPEAT) and len(parts) == 1 and str(parts[0][0]) in _CLASSES:
            holds = cache(_CLASSES[str(parts[0][0])](parts[0][1]))
            return _sequence_of([_repeated(low, low, _sequence(parts)), _runs(holds)])
        return _repeated(low, high, _sequence(parts))
    if kind in ("ASSERT", "ASSERT_NOT") and argument[0] == 1:
        return _ahead(_sequence(argument[1]), wanted=kind == "ASSERT")
    raise re.error(f"{kind.lower()} is not read")


def _united(sets: Iterable[int]) -> int:
    whole = 0
    for places in sets:
        whole |= places
    return whole


def _repeated(low: int, high: int, body: _Move) -> _Move:
    def move(run: _Run, places: int) -> int:
        for _ in range(low):
            before, places = places, body(run, places)
            if places in (0, before):
                break
        whole = new = places
        for _ in range(high - low):
            new = body(run, new) & ~whole
            if not new:
                break
            whole |= new
        return whole

    return move


def _runs(holds: Callable[[str], bool]) -> _Move:
    """Any number of characters of a class: a carry runs through all that stand side by side."""

    def move(run: _Run, places: int) -> int:
        whole = run.of_class(holds)
        return places | ((whole + (places & whole)) ^ whole)

    return move


def _ahead(body: _Move, *, wanted: bool) -> _Move:
    def move(run: _Run, places: int) -> int:
        each = (1 << at for at in range(places.bit_length()) if places >> at & 1)
        return _united(place for place in each if (body(run, place) != 0) is wanted)

    return move


# -- characters and edges ---------------------------------------------------------------------


def _is_word(c: str) -> bool:
    return c.isalnum() or c == "_"


_CATEGORIES: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {"DIGIT": str.isdecimal, "SPACE": str.isspace, "WORD": _is_word}
)


def _of_set(items: list[tuple[Any, Any]]) -> Callable[[str], bool]:
    tests = [_of_item(str(kind), argument) for kind, argument in items if str(kind) != "NEGATE"]
    is_negated = len(tests) < len(items)
    return lambda c: any(test(c) for test in tests) is not is_negated


def _of_item(kind: str, argument: Any) -> Callable[[str], bool]:
    if kind == "CATEGORY":
        name = str(argument).removeprefix("CATEGORY_")
        holds, is_not = _CATEGORIES[name.removeprefix("NOT_")], name.startswith("NOT_")
        return lambda c: holds(c) is not is_not
    low, high = argument if kind == "RANGE" else (argument, argument)
    return lambda c: low <= ord(c) <= high


_CLASSES: Mapping[str, Callable[[Any], Callable[[str], bool]]] = MappingProxyType(
    {
        "LITERAL": lambda code: lambda c: ord(c) == code,  # repeated
        "NOT_LITERAL": lambda code: lambda c: ord(c) != code,
        "ANY": lambda _: lambda c: c != "\n",
        "IN": _of_set,
    }
)


def _end(run: _Run) -> int:
    """The end, and the place before a line's end there."""
    last = 1 << len(run.text)
    return last | last >> 1 if run.text.endswith("\n") else last


def _boundaries(run: _Run) -> int:
    words = run.of_class(_is_word)
    return words ^ words << 1


_EDGES: Mapping[str, Callable[[_Run], int]] = MappingProxyType(
    {
        "AT_BEGINNING": lambda run: 1,
        "AT_BEGINNING_STRING": lambda run: 1,
        "AT_END": _end,
        "AT_END_STRING": lambda run: 1 << len(run.text),
        "AT_BOUNDARY": _boundaries,
        "AT_NON_BOUNDARY": lambda run: ~_boundaries(run),
    }
)
