"""The command convert: a checkpoint of one format in, one of another out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from polyquant.cli import output
from polyquant.cli.options import (
    STOPPED,
    Calibration,
    Config,
    Exclude,
    Format,
    Include,
    Json,
    Source,
    config_of,
)
from polyquant.files.container import INDEX_SUFFIX
from polyquant.models import resumable
from polyquant.models.conversion import Conversion, Converted, plan, totals
from polyquant.models.targets import Target, target_of

_Out = Annotated[
    Path,
    typer.Argument(
        metavar="OUT",
        help="What to write: NAME.safetensors, NAME.gguf, NAME.bpk, or "
        "NAME.safetensors.index.json, which keeps the shards of the input.",
        show_default=False,
    ),
]
_To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT[:VARIANT]",
        help="gguf, gptq, mlx, bitsandbytes, compressed-tensors, burnpack or safetensors; a "
        "variant says what weights shall become: gguf:Q4_0, mlx:4bit, safetensors:nf4.",
        show_default=False,
    ),
]


def convert(
    source: Source,
    out: _Out,
    to: _To,
    include: Include = None,
    exclude: Exclude = None,
    calibration: Calibration = "minmax",
    format: Format = None,
    config: Config = None,
    *,
    requantize: Annotated[
        bool,
        typer.Option("--requantize", help="Allow loss: quantize again what does not fit exactly."),
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Shards worked on at once.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to another format, exactly where that format can hold it.

    Names of tensors stay as they are. With --requantize the loss of each tensor is shown. Shards
    are done in parallel, and a stopped conversion to shards goes on where it was.

    Example: `polyquant convert model.gguf model.safetensors --to safetensors`
    """
    target = target_of(to)
    opened = resumable.Source(source, format, config_of(config))
    with opened.open() as checkpoint:
        origin = checkpoint.format
        steps = plan(
            checkpoint,
            target,
            include or (),
            exclude or (),
            requantize=requantize,
            calibration=calibration,
        )
    finished: list[Converted] = []
    if not dry_run:
        with _stopping(out):
            finished = _run(opened, target, out, steps, jobs, calibration, quiet=as_json)
    if as_json:
        qualities = {done.conversion.name: done for done in finished}
        output.print_json(
            {
                "input": str(source),
                "input_format": origin,
                "output": str(out),
                "output_format": target.format,
                "dry_run": dry_run,
                "tensors": [_step_json(step, qualities.get(step.name)) for step in steps],
                "totals": dict(totals(steps, finished)),
            }
        )
    else:
        _print(steps, finished, out, dry_run=dry_run)


@contextmanager
def _stopping(out: Path) -> Iterator[None]:
    """Say what is left when shards are stopped by Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        if not out.name.endswith(INDEX_SUFFIX):
            raise
        output.err().print("Stopped. The same command goes on with the shards that are missing.")
        raise typer.Exit(STOPPED) from None


def _run(
    source: resumable.Source,
    target: Target,
    out: Path,
    steps: Sequence[Conversion],
    jobs: int,
    calibration: str,
    *,
    quiet: bool,
) -> list[Converted]:
    total = sum(step.source.nbytes for step in steps)
    with output.progress(in_bytes=True, quiet=quiet) as bar:
        task = bar.add_task("", total=total)

        def on_done(done: Converted) -> None:
            name, size = done.conversion.name, done.conversion.source.nbytes
            bar.update(task, description=name, advance=size)

        return resumable.run(
            source, target, out, steps, jobs=jobs, calibration=calibration, on_done=on_done
        )


def _kind(info: Any) -> str:
    return str(info.dtype if info.scheme is None else info.scheme)


def _step_json(step: Conversion, done: Converted | None) -> dict[str, Any]:
    quality = None if done is None or done.quality is None else done.quality.to_json()
    return {
        "name": step.name,
        "shape": list(step.source.shape),
        "from": _kind(step.source),
        "to": _kind(step.result),
        "exact": not step.is_lossy,
        "size_before_bytes": step.source.nbytes,
        "size_after_bytes": step.result.nbytes,
        "quality": quality,
    }


def _print(
    steps: Sequence[Conversion], finished: Sequence[Converted], out: Path, *, dry_run: bool
) -> None:
    qualities = {done.conversion.name: done.quality for done in finished}
    table = output.table(["Tensor", "Shape", "From", "To"], ["Rel. error", "SQNR dB"])
    for step in steps:
        quality = qualities.get(step.name)
        loss = ("exact", "exact") if not step.is_lossy else ("loss", "")
        if quality is not None:
            loss = (
                output.error_text(quality.relative_error),
                output.decibel_text(quality.sqnr_db),
            )
        table.add_row(
            output.Name(step.name),
            output.shape_text(step.source.shape),
            escape(_kind(step.source)),
            escape(_kind(step.result)),
            *loss,
        )
    console = output.out()
    console.print(table)
    facts = totals(steps, finished)
    console.print(
        f"\n{facts['exact']} of {output.count(len(steps), 'tensor')} exact, "
        f"{facts['requantized']} requantized: {output.size(facts['size_before_bytes'])} -> "
        f"{output.size(facts['size_after_bytes'])}.",
        highlight=False,
    )
    if dry_run:
        console.print("A plan: nothing was written.", highlight=False)
    else:
        console.print(f"Wrote {out}", markup=False, highlight=False, soft_wrap=True)
