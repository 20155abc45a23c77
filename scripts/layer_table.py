"""The layers of ARCHITECTURE.md: those of tests/test_architecture.py, and what each file says."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "polyquant"


def section() -> str:
    """The layers from the bottom up, a line a file: the first line of its docstring."""
    layers = runpy.run_path(str(ROOT / "tests" / "test_architecture.py"))["LAYERS"]
    lines = []
    for level, rooms in enumerate(layers, 1):
        lines.append(f"{level}. {', '.join(f'**{room}**' for room in rooms)}")
        lines += [
            f"    - `{path.relative_to(SOURCE).as_posix()}`: {first_line(path)}"
            for room in rooms
            for path in files(room)
        ]
    return "\n".join(lines) + "\n"


def files(room: str) -> list[Path]:
    """The files of a room, which is a file or a folder; "polyquant" is the package's face."""
    if room == "polyquant":
        return [SOURCE / "__init__.py"]
    alone = SOURCE / f"{room}.py"
    return [alone] if alone.exists() else sorted((SOURCE / room).rglob("*.py"))


def first_line(path: Path) -> str:
    """The first line of a module's docstring."""
    document = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return document.partition("\n")[0].replace("``", "`")
