"""JSON from files that may be hostile: one object, no key twice, finite numbers, valid text."""

from __future__ import annotations

import json
from typing import Any

from polyquant.errors import InvalidHeader


def parse_object(text: bytes | str, path: object, what: str) -> dict[str, Any]:
    """The object that ``text`` (UTF-8) holds. ``what`` names it in the error.

    Raises InvalidHeader for anything else, nesting too deep for the parser included.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        made = json.loads(decoded, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeError, too many digits
        reason = f"{what} is not valid JSON ({error})"
        raise InvalidHeader(path=path, reason=reason) from None
    if not isinstance(made, dict):
        raise InvalidHeader(path=path, reason=f"{what} is not a JSON object")
    return made


def canonical(form: object) -> str:
    """The one text of a JSON form: sorted keys, no spaces, ASCII. Checksums are taken of it."""
    return json.dumps(form, sort_keys=True, separators=(",", ":"))


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice")
    for key, value in pairs:
        key.encode("utf-8")  # a lone surrogate, which JSON can spell, is no text
        if isinstance(value, str):
            value.encode("utf-8")
    return made


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
