"""The code of the pages runs, its output is what they show, and their links lead somewhere.

The python blocks of a page run one after another in one namespace, in an empty folder. A block of
``output`` after one is what it prints, to the letter.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)#\s]+)")


class Block(NamedTuple):
    """A block of code: its line in the page, its text, and what it must print (None: anything)."""

    line: int
    code: str
    output: str | None


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    blocks = []
    for fence, after in zip_longest(fences, fences[1:]):
        if fence[1] == "python":
            line = text.count("\n", 0, fence.start()) + 2
            is_shown = after is not None and after[1] == "output"
            blocks.append(Block(line, fence[2], after[2] if is_shown and after else None))
    return blocks


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p)], ids=_name)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in _blocks(page):
        # Empty lines before the code make a traceback show the line of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.output is not None:
            assert printed.getvalue() == block.output, f"{_name(page)}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{_name(page)} links to {target}"


def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_commands_of_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"\bmake ([a-z]+)\b", _code(page)):
            assert target in targets, f"{_name(page)} runs make {target}"


def _code(page: Path) -> str:
    """Everything in a page that is set as code."""
    text = page.read_text(encoding="utf-8")
    return "\n".join(
        [*re.findall(r"`([^`\n]+)`", text), *(fence[2] for fence in FENCE.finditer(text))]
    )
