"""Pages and tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def page(parts: Sequence[str]) -> str:
    """Paragraphs, headings and tables, an empty line between them."""
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a bar inside a cell is escaped."""
    return "\n".join(_line(cells) for cells in (head, ["---"] * len(head), *rows))


def _line(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
