"""The text form of schemes, read: a grammar of one rule a method (see ``scheme.py``)."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from polyquant.errors import UnknownScheme
from polyquant.fields import HEAD, block_of, view_of
from polyquant.presets import PRESETS
from polyquant.values import OffsetKind, QuantValue, ScaleRole, is_known

Fields = dict[str, Any]

#: Schemes in one another. Formats use two (scales that are quantized); more is a hostile text.
DEEPEST = 4
SEE = "The presets are listed by pq.presets()"

_ATOM = re.compile(r"[a-z0-9]+")
_BLOCK = re.compile(r"tensor|row|(?:[0-9]{1,19}|\*)(?:x(?:[0-9]{1,19}|\*))*")
_VIEW = re.compile(r"flat|(?:[0-9]{1,19}|\*)(?:x(?:[0-9]{1,19}|\*))*")


def read(text: str) -> Fields:
    """What a text form says, by the constructor's names; an inner scheme is a dict of its own.

    Raises UnknownScheme with the place, or the nearest name.
    """
    if not isinstance(text, str):
        raise UnknownScheme(got=text, reason=f"its type is {type(text).__name__}, not str", fix=SEE)
    reader = _Reader(text)
    made = reader.scheme()
    if reader.rest:
        reader.fail("the end")
    return made


class _Reader:
    """A cursor over a text form: each method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def fail(self, wanted: str) -> Any:
        names = [*PRESETS, *QuantValue]
        near = get_close_matches(self.text, names, n=1, cutoff=0.5)
        fix = f"Did you mean {near[0]!r}? {SEE}" if near else SEE
        reason = f"at position {self.at} it needs {wanted}, got {self.rest[:12]!r}"
        raise UnknownScheme(got=self.text, reason=reason, fix=fix)

    def take(self, literal: str) -> bool:
        found = self.rest.startswith(literal)
        self.at += len(literal) if found else 0
        return found

    def match(self, pattern: re.Pattern[str], wanted: str) -> re.Match[str]:
        found = pattern.match(self.text, self.at)
        if found is None:
            self.fail(wanted)
        self.at = found.end()  # type: ignore[union-attr]  # fail always raises
        return found  # type: ignore[return-value]

    def scheme(self) -> Fields:
        start = self.at
        head = self.match(HEAD, "a value type")
        if not is_known(QuantValue, head["value"]):
            self.at = start
            self.fail(f"a value type ({', '.join(QuantValue)})")
        given: Fields = {"value": head[0]}
        if self.take("/"):
            given["block"] = block_of(self.match(_BLOCK, "a block such as 32, 128x128, row")[0])
            if not self.take(":"):
                self.fail("':' and a scale type")
            given["role"], given["scale"] = self.role(), self.dtype()
            if given["role"] == "multiplier" and self.take("/tensor:"):
                given["role"], given["tensor_scale"] = self.role(), self.dtype()
        if self.take("+bias:"):
            given["offset"] = (OffsetKind.BIAS, self.dtype())
        elif self.take("-zero:"):
            given["offset"] = (OffsetKind.ZERO_POINT, self.dtype())
        if self.take("~grouped"):
            given["grouped"] = True
        elif self.take("~"):
            given["view"] = view_of(self.match(_VIEW, "a view such as flat or 64x*")[0])
        if self.take("@"):
            given["store"] = self.match(re.compile(r"\w+"), "a store")[0]
        return given

    def role(self) -> str:
        found = (role for role in ScaleRole if self.take(f"{role}."))
        return next(found, ScaleRole.MULTIPLIER)

    def dtype(self) -> str | Fields:
        if not self.take("("):
            return self.match(_ATOM, "a type, or a scheme in parentheses")[0]
        self.depth += 1
        if self.depth >= DEEPEST:
            self.fail(f"at most {DEEPEST} schemes in one another")
        inner = self.scheme()
        if not self.take(")"):
            self.fail("')'")
        self.depth -= 1
        return inner
