"""The command sweep: many schemes on the same tensors, size against error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from polyquant.cli import output
from polyquant.cli.options import Checkpoint, Exclude, Include, Json
from polyquant.formats import open_checkpoint
from polyquant.models.sweep import Measured, choose_tensors
from polyquant.models.sweep import sweep as run_sweep
from polyquant.quality import sqnr_db
from polyquant.report import Point, front, save_csv, save_plot
from polyquant.scheme import QuantScheme, presets
from polyquant.scheme import scheme as as_scheme


def sweep(
    path: Checkpoint,
    schemes: Annotated[
        str,
        typer.Option(help="Presets or text forms, separated by commas; all presets by default."),
    ] = "",
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the points as CSV.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the Pareto plot (needs matplotlib)."),
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="At most this many tensors, evenly spread over the file."),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Try many schemes on the same tensors: size against error.

    A star marks the schemes that no other beats on both.

    Example: `polyquant sweep model.safetensors --schemes nf4,mxfp4,q4s-32 --png sweep.png`
    """
    chosen = _schemes(schemes)
    with open_checkpoint(path) as checkpoint, output.progress(in_bytes=False, quiet=as_json) as bar:
        tensors = choose_tensors(checkpoint, include or (), exclude or (), limit)
        task = bar.add_task("", total=len(tensors) * len(chosen))

        def on_step(scheme: str, tensor: str) -> None:
            bar.update(task, description=f"{scheme}  {tensor}", advance=1)

        measured = run_sweep(checkpoint, tensors, chosen, on_step)
    points = [_point(item) for item in measured if item.refused is None]
    if csv is not None:
        save_csv(points, csv)
    if png is not None and points:
        save_plot(points, png, f"{path.name}: {output.count(len(tensors), 'tensor')}")
    if as_json:
        output.print_json(_json(path, tensors, measured, front(points)))
    else:
        _print_points(measured, points, tensors, [p for p in (csv, png) if p is not None])


def _schemes(text: str) -> dict[str, QuantScheme]:
    """The schemes by the name that was asked for; presets that mean the same count once."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names:
        return {name: as_scheme(name) for name in names}
    first = {made: name for name, made in reversed(presets().items())}
    return {name: made for name, made in presets().items() if first[made] == name}


def _point(item: Measured) -> Point:
    return Point(
        item.name, item.scheme, item.bits_per_element, item.relative_error, item.size_bytes
    )


def _json(
    path: Path, tensors: Sequence[str], measured: Sequence[Measured], best: Sequence[Point]
) -> dict[str, Any]:
    names = {point.name for point in best}
    points = [asdict(item) | {"on_front": item.name in names} for item in measured]
    return {"path": str(path), "tensors": list(tensors), "points": points}


def _print_points(
    measured: Sequence[Measured],
    points: Sequence[Point],
    tensors: Sequence[str],
    written: Sequence[Path],
) -> None:
    best = {point.name for point in front(points)}
    table = output.table(["Scheme", "Text form", ""], ["Bits", "Rel. error", "SQNR dB"])
    for point in sorted(points, key=lambda p: (p.bits_per_element, p.relative_error)):
        table.add_row(
            escape(point.name),
            f"[dim]{escape(point.scheme)}[/]" if point.scheme != point.name else "",
            "[green]*[/]" if point.name in best else "",
            f"{point.bits_per_element:.2f}",
            output.error_text(point.relative_error),
            output.decibel_text(sqnr_db(point.relative_error)),
        )
    console = output.out()
    console.print(table)
    console.print(f"\n{output.count(len(tensors), 'tensor')}; * no other is better on both.")
    for item in measured:
        if item.refused is not None:
            console.print(f"{item.name}: {item.refused}", markup=False, highlight=False)
    for path in written:
        console.print(f"Wrote {path}", markup=False, highlight=False, soft_wrap=True)
