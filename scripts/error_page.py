"""docs/errors.md: every error of the catalogue."""

from __future__ import annotations

import markdown

from polyquant.errors import CATALOGUE, record


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
    return markdown.page(parts)
