"""Size against error: the Pareto front of a sweep, its CSV and its plot."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyquant.errors import BackendMissing, WriteFailed

#: The smallest error that a logarithmic axis shows; smaller ones, and none at all, stand on it.
_FLOOR = 1e-9
#: Inches and dots per inch: 1440 x 960 dots.
_SIZE, _DPI = (9.0, 6.0), 160
_FRONT, _OTHER = "#b3261e", "#5f6368"


class Point(NamedTuple):
    """One scheme of a sweep: its name and text form, bits per element, relative error, bytes."""

    name: str
    scheme: str
    bits_per_element: float
    relative_error: float
    size_bytes: int


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats on both bits and error, by growing bits."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bits_per_element, p.relative_error)):
        if not kept or point.relative_error < kept[-1].relative_error:
            kept.append(point)
    return kept


def save_csv(points: Sequence[Point], path: str | os.PathLike[str]) -> None:
    """Write the points as CSV, one line each, numbers in full. Raises WriteFailed."""
    best = {point.name for point in front(points)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*Point._fields, "on_front"])
    writer.writerows([*point, int(point.name in best)] for point in points)
    _write(Path(path), text.getvalue().encode())


def save_plot(points: Sequence[Point], path: str | os.PathLike[str], title: str) -> None:
    """Draw bits per element against relative error as a PNG, the Pareto front as a line.

    Raises BackendMissing without matplotlib, and WriteFailed.
    """
    figure = _figure()
    axes = figure.add_subplot()
    best = front(points)
    axes.set_yscale("log")
    line = [(p.bits_per_element, max(p.relative_error, _FLOOR)) for p in best]
    axes.plot(*zip(*line, strict=True), "-", color=_FRONT, linewidth=1.2, alpha=0.5, zorder=1)
    for point in points:
        color = _FRONT if point in best else _OTHER
        axes.plot(*_place(point), "o", color=color, markersize=4, zorder=2)
    axes.set_xlabel("bits per element, scales and all")
    axes.set_ylabel("relative error")
    axes.set_title(title, loc="left")
    axes.margins(x=0.12, y=0.12)
    axes.grid(which="major", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.draw_without_rendering()  # settles the layout, which the labels' places follow
    _label(axes, points, best)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    _write(Path(path), image.getvalue())


def _place(point: Point) -> tuple[float, float]:
    return point.bits_per_element, max(point.relative_error, _FLOOR)


def _label(axes: Any, points: Sequence[Point], best: Sequence[Point]) -> None:
    """Name every point: the front to the left and down, the others to the right and up.

    A label that would cover another moves on in its direction, and a thin line leads back.
    """
    taken: list[Any] = []
    for point in sorted(points, key=lambda p: (p in best, p.relative_error, p.bits_per_element)):
        is_best = point in best
        side, color = (-1, _FRONT) if is_best else (1, _OTHER)
        text = axes.annotate(
            point.name,
            _place(point),
            xytext=(6 * side, -2),
            textcoords="offset points",
            ha="right" if is_best else "left",
            va="top" if is_best else "baseline",
            fontsize=7,
            color=color,
        )
        moved = 0
        while any(text.get_window_extent().overlaps(other) for other in taken):
            moved += 3
            text.xyann = (9 * side, -2 + moved * side)
        if moved:
            axes.annotate(
                "",
                _place(point),
                xytext=text.xyann,
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": color, "shrinkA": 0},
            )
        taken.append(text.get_window_extent())


def _figure() -> Any:
    """An empty figure that needs no window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendMissing(
            backend="matplotlib",
            reason="plots need it, and it is not installed",
            fix="Run: pip install 'polyquant[report]'",
        ) from error
    return Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")


def _write(path: Path, content: bytes) -> None:
    """Write a file in one step: what was there before stays until all of it is written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        kept = "What was there before is untouched"
        raise WriteFailed(path=str(path), reason=reason, kept=kept) from error
    finally:
        part.unlink(missing_ok=True)
