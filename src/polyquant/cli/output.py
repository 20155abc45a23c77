"""What the commands print: tables for people on a terminal, JSON for programs."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

#: Width of what goes to a file or a pipe, where nothing has to fit on a screen.
_UNBOUNDED = 1000
#: Tables are made for at least this width. On a narrower screen the terminal breaks their lines,
#: which loses nothing, while columns of no width would.
_NARROWEST = 60
#: A name is never cut shorter than this.
_NAME_MIN = 14


def out() -> Console:
    """The console of results."""
    return _console(stderr=False)


def err() -> Console:
    """The console of progress and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(stderr=stderr, width=_UNBOUNDED)
    if console.width < _NARROWEST:
        return Console(stderr=stderr, width=_NARROWEST)
    return console


def print_json(form: Any) -> None:
    """Print strict JSON on stdout: numbers that JSON lacks (NaN, infinity) become null."""
    sys.stdout.write(json.dumps(_finite(form), indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _finite(form: Any) -> Any:
    if isinstance(form, float):
        return form if math.isfinite(form) else None
    if isinstance(form, dict):
        return {str(key): _finite(item) for key, item in form.items()}
    if isinstance(form, list | tuple):
        return [_finite(item) for item in form]
    return form


# -- words and numbers ------------------------------------------------------------------------


def size(size_bytes: float) -> str:
    """A size in decimal units with three digits: "812 B", "11.7 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5 or unit == "GB":
            break
        size_bytes /= 1000
    digits = 0 if unit == "B" or size_bytes >= 99.95 else 1 if size_bytes >= 9.995 else 2
    return f"{size_bytes:.{digits}f} {unit}"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as "30522 x 384"; "scalar" where there are no axes."""
    return " x ".join(map(str, shape)) or "scalar"


def error_text(relative_error: float) -> str:
    """A relative error with three digits: "0.0910", "3.80e-05", "0" where there is none."""
    if math.isnan(relative_error):
        return "-"
    return f"{relative_error:#.3g}" if relative_error else "0"


def decibel_text(number: float) -> str:
    """A ratio in decibels; "exact" where nothing was lost."""
    if math.isnan(number):
        return "-"
    return f"{number:.1f}" if math.isfinite(number) else "exact" if number > 0 else "-inf"


def count(number: int, noun: str) -> str:
    """ "1 tensor", "3 tensors"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# -- tables -----------------------------------------------------------------------------------


class Name:
    """A tensor's name that gives way where the table is too wide."""

    def __init__(self, name: str) -> None:
        self.text = name if name.isprintable() else ascii(name)[1:-1]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self.text), _NAME_MIN), len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(shortened(self.text, options.max_width), no_wrap=True)


def shortened(name: str, width: int) -> str:
    """A dotted name in a width: "e.l.0.a.self.query.weight", and cut in its middle after that.

    Parts become their first letter from the left on, as far as needed; the last one never does.
    """
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if len(name) <= width:
            return name
        parts[at] = part if part.isdigit() else part[:1]
        name = ".".join(parts)
    if len(name) <= width:
        return name
    tail = max(1, (width - 1) * 3 // 5)
    return f"{name[: max(0, width - 1 - tail)]}…{name[-tail:]}"


def table(names: Iterable[str], numbers: Iterable[str] = (), *, after: Iterable[str] = ()) -> Table:
    """A table whose columns are texts, then numbers (right-aligned), then texts again.

    Only the first column gives way when the screen is narrow.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for at, heading in enumerate(names):
        made.add_column(heading, no_wrap=at > 0)
    for heading in numbers:
        made.add_column(heading, justify="right", no_wrap=True)
    for heading in after:
        made.add_column(heading, overflow="fold")
    return made


class _ShortName(ProgressColumn):
    """The tensor at work, in a fixed width."""

    def render(self, task: Any) -> Text:
        return Text(f"{shortened(task.description, 28):<28}")


def progress(*, in_bytes: bool, quiet: bool) -> Progress:
    """A progress bar on stderr, shown on a terminal only."""
    console = err()
    amount = DownloadColumn() if in_bytes else TextColumn("{task.completed}/{task.total}")
    return Progress(
        _ShortName(),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        amount,
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
