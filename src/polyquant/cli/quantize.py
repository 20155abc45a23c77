"""The command quantize: a checkpoint in, a quantized one out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from polyquant.cli import output
from polyquant.cli.options import Calibration, Exclude, Include, Json, Out, Scheme, Source
from polyquant.files.checkpoint import Checkpoint
from polyquant.formats import open_checkpoint
from polyquant.models.checkpoint import Done, Step, plan, quantize_checkpoint, total_error
from polyquant.quality import sqnr_db
from polyquant.scheme import scheme as as_scheme


def quantize(
    source: Source,
    out: Out,
    scheme: Scheme = "nf4",
    include: Include = None,
    exclude: Exclude = None,
    calibration: Calibration = "minmax",
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Quantize a checkpoint, one tensor at a time, in little memory.

    Float tensors with two axes or more are quantized, or those of them that --include selects; one
    with fewer axes only where its whole name is given. The rest is kept.

    Example: `polyquant quantize model.safetensors model-nf4.safetensors --exclude '*embed*'`
    """
    with open_checkpoint(source) as checkpoint:
        patterns = (include or (), exclude or ())
        steps = plan(checkpoint, as_scheme(scheme), *patterns, calibration=calibration)
        finished = [] if dry_run else _run(checkpoint, out, steps, calibration, quiet=as_json)
    if as_json:
        qualities = {done.step.name: done for done in finished}
        output.print_json(
            {
                "input": str(source),
                "output": str(out),
                "scheme": str(as_scheme(scheme)),
                "calibration": calibration,
                "dry_run": dry_run,
                "tensors": [_step_json(step, qualities.get(step.name)) for step in steps],
                "totals": _totals(steps, finished),
            }
        )
    elif dry_run:
        _print_plan(steps, scheme)
    else:
        _print_result(finished, steps, out)


def _run(
    checkpoint: Checkpoint, out: Path, steps: Sequence[Step], calibration: str, *, quiet: bool
) -> list[Done]:
    total = sum(step.source.nbytes for step in steps)
    with output.progress(in_bytes=True, quiet=quiet) as bar:
        task = bar.add_task("", total=total)

        def on_done(done: Done) -> None:
            bar.update(task, description=done.step.name, advance=done.step.source.nbytes)

        return quantize_checkpoint(checkpoint, out, steps, calibration=calibration, on_done=on_done)


def _step_json(step: Step, done: Done | None) -> dict[str, Any]:
    quality = None if done is None or done.quality is None else done.quality.to_json()
    return {
        "name": step.name,
        "shape": list(step.source.shape),
        "dtype": step.source.dtype,
        "scheme": None if step.result.scheme is None else str(step.result.scheme),
        "kept": step.kept,
        "size_before_bytes": step.source.nbytes,
        "size_after_bytes": step.result.nbytes,
        "quality": quality,
    }


def _totals(steps: Sequence[Step], finished: Sequence[Done]) -> dict[str, Any]:
    quantized = [step for step in steps if step.scheme is not None]
    elements = sum(step.elements for step in quantized)
    error = total_error(finished) if finished else None
    return {
        "tensors": len(steps),
        "quantized": len(quantized),
        "size_before_bytes": sum(step.source.nbytes for step in steps),
        "size_after_bytes": sum(step.result.nbytes for step in steps),
        "bits_per_element": 8 * sum(s.result.nbytes for s in quantized) / elements
        if elements
        else None,
        "relative_error": error,
        "sqnr_db": None if error is None else sqnr_db(error),
    }


# -- for people -------------------------------------------------------------------------------


def _print_plan(steps: Sequence[Step], scheme: str) -> None:
    table = output.table(["Tensor", "Shape", "Becomes"], ["Before", "After"])
    for step in steps:
        becomes = f"[dim]kept ({escape(step.kept)})[/]" if step.kept else escape(scheme)
        table.add_row(
            output.Name(step.name),
            output.shape_text(step.source.shape),
            becomes,
            output.size(step.source.nbytes),
            output.size(step.result.nbytes),
        )
    console = output.out()
    console.print(table)
    console.print(f"\nA plan: nothing was written. {_size_line(steps)}", highlight=False)


def _print_result(finished: Sequence[Done], steps: Sequence[Step], out: Path) -> None:
    table = output.table(["Tensor", "Shape"], ["Before", "After", "Bits", "Rel. error", "SQNR dB"])
    for done in finished:
        if done.quality is None:
            continue
        table.add_row(
            output.Name(done.step.name),
            output.shape_text(done.step.source.shape),
            output.size(done.step.source.nbytes),
            output.size(done.step.result.nbytes),
            f"{done.quality.bits_per_element:.2f}",
            output.error_text(done.quality.relative_error),
            output.decibel_text(done.quality.sqnr_db),
        )
    console = output.out()
    console.print(table)
    console.print(f"\n{_size_line(steps)}", highlight=False)
    totals = _totals(steps, finished)
    if totals["quantized"]:
        console.print(
            f"Quantized part: {totals['bits_per_element'] or 0:.2f} bits per element, relative "
            f"error {output.error_text(totals['relative_error'])}, "
            f"SQNR {output.decibel_text(totals['sqnr_db'])} dB.",
            highlight=False,
        )
    kept = [step for step in steps if step.kept]
    if kept:
        kept_size = output.size(sum(step.source.nbytes for step in kept))
        text = f"{output.count(len(kept), 'tensor')} kept as they were ({kept_size})."
        console.print(text, highlight=False)
    console.print(f"Wrote {out}", markup=False, highlight=False, soft_wrap=True)


def _size_line(steps: Sequence[Step]) -> str:
    before = sum(step.source.nbytes for step in steps)
    after = sum(step.result.nbytes for step in steps)
    ratio = f", {before / after:.2f} times smaller" if 0 < after < before else ""
    quantized = sum(step.scheme is not None for step in steps)
    return (
        f"{quantized} of {output.count(len(steps), 'tensor')} quantized: "
        f"[bold]{output.size(before)} -> {output.size(after)}[/]{ratio}."
    )
