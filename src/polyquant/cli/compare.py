"""The command compare: two checkpoints, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from polyquant.cli import output
from polyquant.cli.options import Json, config_of
from polyquant.models.comparison import Comparison, Verdict
from polyquant.models.comparison import compare as compare_all
from polyquant.models.resumable import Source
from polyquant.quality import sqnr_db

_FORMAT, _CONFIG = "{0}'s format, where it does not say.", "{0}'s config, where it lies elsewhere."
_FormatA = Annotated[str | None, typer.Option(metavar="NAME", help=_FORMAT.format("A"))]
_FormatB = Annotated[str | None, typer.Option(metavar="NAME", help=_FORMAT.format("B"))]
_ConfigA = Annotated[str | None, typer.Option(metavar="PATH|JSON", help=_CONFIG.format("A"))]
_ConfigB = Annotated[str | None, typer.Option(metavar="PATH|JSON", help=_CONFIG.format("B"))]

#: Exit code when the checkpoints differ by more than the tolerance.
DIFFERENT = 1


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.", show_default=False)],
    second: Annotated[
        Path, typer.Argument(metavar="B", help="Another, of any format.", show_default=False)
    ],
    tolerance: Annotated[
        float,
        typer.Option(min=0.0, help="The largest relative error of a tensor that is no difference."),
    ] = 0.0,
    format_a: _FormatA = None,
    config_a: _ConfigA = None,
    format_b: _FormatB = None,
    config_b: _ConfigB = None,
    *,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints by tensor name: bits, then values.

    Exits with 1 where a tensor is missing or differs by more than the tolerance.

    Example: `polyquant compare model.safetensors model-int8.safetensors --tolerance 0.01`
    """
    sources = (
        Source(first, format_a, config_of(config_a)),
        Source(second, format_b, config_of(config_b)),
    )
    results = _run(*sources, quiet=as_json)
    beyond = [result for result in results if not result.is_within(tolerance)]
    if as_json:
        output.print_json(
            {
                "first": str(first),
                "second": str(second),
                "tolerance": tolerance,
                "differ": len(beyond),
                "tensors": [_result_json(result, tolerance) for result in results],
            }
        )
    else:
        _print_results(results, beyond, tolerance)
    if beyond:
        raise typer.Exit(DIFFERENT)


def _run(first: Source, second: Source, *, quiet: bool) -> list[Comparison]:
    results = []
    with (
        first.open() as left,
        second.open() as right,
        output.progress(in_bytes=False, quiet=quiet) as bar,
    ):
        task = bar.add_task("", total=len(left))
        for result in compare_all(left, right):
            results.append(result)
            bar.update(task, description=result.name, advance=1)
    return results


def _sqnr(result: Comparison) -> float:
    error = result.relative_error
    return error if error != error else sqnr_db(error)  # NaN stays NaN


def _result_json(result: Comparison, tolerance: float) -> dict[str, Any]:
    return {
        "name": result.name,
        "verdict": str(result.verdict),
        "within_tolerance": result.is_within(tolerance),
        "relative_error": result.relative_error,
        "sqnr_db": _sqnr(result),
        "max_error": result.max_error,
    }


def _print_results(results: list[Comparison], beyond: list[Comparison], tolerance: float) -> None:
    table = output.table(["Tensor", "Verdict"], ["Rel. error", "SQNR dB", "Max error"])
    for result in results:
        color = "red" if result in beyond else "green"
        is_equal = result.verdict in (Verdict.EQUAL_BITS, Verdict.EQUAL_VALUES)
        table.add_row(
            output.Name(result.name),
            f"[{color}]{result.verdict}[/]",
            output.error_text(result.relative_error),
            "-" if is_equal else output.decibel_text(_sqnr(result)),
            output.error_text(result.max_error),
        )
    console = output.out()
    console.print(table)
    verdicts = Counter(result.verdict for result in results)
    summary = ", ".join(f"{number:,} {verdict}" for verdict, number in verdicts.items())
    console.print(f"\n{output.count(len(results), 'tensor')}: {summary}.", highlight=False)
    if beyond:
        console.print(f"[red]{len(beyond):,} beyond the tolerance of {tolerance:g}.[/]")
