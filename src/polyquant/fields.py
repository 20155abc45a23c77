"""The fields of a scheme that need no other scheme: what came, as what it means, or refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from enum import StrEnum
from numbers import Integral
from typing import Any, TypeVar

from polyquant.errors import InvalidArgument, InvalidBlock, UnknownName
from polyquant.tables import CUSTOM, NAMED
from polyquant.values import QuantValue, is_known

#: A value type, and the table that it may name.
HEAD = re.compile(r"(?P<value>[a-z0-9]+)(?:\[(?P<table>\w+)\])?")
_LONGEST_EXTENT = 2**63 - 1
_E = TypeVar("_E", bound=StrEnum)


def member(enum: type[_E], name: Any, what: str) -> _E:
    """A member of an enum, or of its name. Raises UnknownName."""
    if is_known(enum, name):
        return enum(name)
    near = get_close_matches(str(name), list(enum), n=1, cutoff=0.0)
    raise UnknownName(what=what, got=name, known=", ".join(enum), nearest=str(near[0]))


def value_and_table(value: QuantValue | str) -> tuple[QuantValue, str | None]:
    """``u4[nf4]`` as a value type and a table. Raises UnknownName."""
    head = HEAD.fullmatch(value) if isinstance(value, str) else None
    name, table = (head["value"], head["table"]) if head else (value, None)
    if table is not None and table != CUSTOM and table not in NAMED:
        known = [*NAMED, CUSTOM]
        near = get_close_matches(table, known, n=1, cutoff=0.0)
        raise UnknownName(what="table", got=table, known=", ".join(known), nearest=near[0])
    return member(QuantValue, name, "value type"), table


def block_extents(block: Any, *, leading_ones: bool = False) -> tuple[int, ...] | None:
    """The extents of a block, or None: the whole tensor. Raises InvalidBlock."""
    if block is None:
        return None
    several = isinstance(block, Sequence) and not isinstance(block, str | bytes)
    given = tuple(block) if several else (block,)
    for extent in given:
        whole = isinstance(extent, Integral) and not isinstance(extent, bool)
        if not whole or not (extent == -1 or 1 <= extent <= _LONGEST_EXTENT):
            raise InvalidBlock(block=block, extent=extent)
    extents = tuple(int(extent) for extent in given)
    while len(extents) > 1 and extents[0] == 1 and not leading_ones:
        extents = extents[1:]
    if not extents:
        raise InvalidBlock(block=block, extent="nothing")
    return extents


def block_text(block: tuple[int, ...] | None) -> str:
    """``tensor``, ``row``, or extents."""
    if block is None:
        return "tensor"
    return "row" if block == (-1,) else "x".join("*" if b == -1 else str(b) for b in block)


def block_of(text: str) -> tuple[int, ...] | None:
    """Undo ``block_text``."""
    if text == "tensor":
        return None
    return (-1,) if text == "row" else tuple(-1 if e == "*" else int(e) for e in text.split("x"))


def view_extents(view: Any) -> tuple[int, ...] | None:
    """The extents of a view: None, or numbers of which exactly one is -1 (what is left)."""
    if view is None:
        return None
    extents = block_extents(view, leading_ones=True)
    if extents is None or extents.count(-1) != 1:
        raise InvalidBlock(block=view, extent="not exactly one -1")
    return extents


def view_text(view: tuple[int, ...]) -> str:
    """``flat``, or extents as of a block."""
    return "flat" if view == (-1,) else "x".join("*" if b == -1 else str(b) for b in view)


def view_of(text: str) -> tuple[int, ...]:
    """Undo ``view_text``."""
    return (-1,) if text == "flat" else tuple(-1 if e == "*" else int(e) for e in text.split("x"))


def flag(given: Any, name: str) -> bool:
    """A truth value. Raises InvalidArgument."""
    if not isinstance(given, bool):
        raise InvalidArgument(name=name, wanted="True or False", got=given)
    return given
