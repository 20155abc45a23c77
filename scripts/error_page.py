"""docs/errors.md: every error of the catalogue, and what is said of the faults known from Burn."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import markdown

from polyquant.errors import CATALOGUE, record

FAULTS = Path(__file__).with_name("burn_faults.toml")


def page() -> str:
    """The page."""
    parts = [
        "# Errors",
        "Every error is a class of `polyquant.errors` with a stable slug, which ends its message "
        "in brackets. It carries its facts (`error.facts`) and inherits a builtin, so that "
        "`except ValueError` catches what it should. `polyquant explain SLUG` prints the whole "
        "record: what triggers it, how to mend it, and code before and after.",
    ]
    for slug, cls in CATALOGUE.items():
        found = record(slug)
        parts += [
            f"## {slug}",
            f"`{cls.__name__}({found['errorType']})`. {found['documentation']}",
            f"```text\n{cls.message}\n```",
        ]
    return markdown.page(parts + _faults())


def _faults() -> list[str]:
    """The faults of Burn by area, with the answer to each."""
    faults: dict[str, dict[str, Any]] = tomllib.loads(FAULTS.read_text(encoding="utf-8"))
    count = sum(len(fault["rows"]) for fault in faults.values())
    parts = [
        "## Faults known from another library, and what is said here",
        f"In {count} places Burn, whose schemes polyquant shares, meets a fault with a panic, an "
        "assertion or nothing. The tables list all of them, those of one fault together: the "
        "fault; its answer here, which is an error, that it works, or why it cannot arise; and the "
        "places, numbered in each crate of Burn and cubecl. `tests/test_burn_faults.py` raises "
        "every error and checks what works.",
    ]
    for area in dict.fromkeys(fault["area"] for fault in faults.values()):
        rows = [
            [fault["fault"], _answer(fault), ", ".join(fault["rows"])]
            for fault in faults.values()
            if fault["area"] == area
        ]
        parts += [f"### {area}", markdown.table(["fault", "answer here", "in"], rows)]
    return parts


def _answer(fault: dict[str, Any]) -> str:
    if "works" in fault:
        return f"Works: {fault['works']}."
    if "cannot" in fault:
        return f"Cannot arise: {fault['cannot']}."
    slugs = " or ".join(f"[{slug}](#{slug})" for slug in fault["slugs"])
    return f"{slugs}. {fault['note']}." if "note" in fault else slugs
