"""The commands about this machine and about errors: devices, explain, conform."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from polyquant.cli import output
from polyquant.cli.options import Json
from polyquant.conform import Result, checks
from polyquant.dispatch import devices as list_devices
from polyquant.errors import CATALOGUE, record

#: Exit code when a check of conform fails.
FAILED = 1
#: How many failed checks are shown in full.
_SHOWN = 20


def devices(*, as_json: Json = False) -> None:
    """List what is usable here, and what is missing for the rest.

    Example: `polyquant devices`
    """
    found = list_devices()
    if as_json:
        output.print_json([asdict(info) for info in found])
        return
    table = output.table(["Device", ""], after=["Note"])
    for info in found:
        mark = "[green]usable[/]" if info.usable else "[yellow]missing[/]"
        note = info.note.removeprefix("usable, ").removeprefix("not usable: ")
        table.add_row(escape(info.name), mark, escape(note[:1].upper() + note[1:]))
    output.out().print(table)


def explain(
    slug: Annotated[
        str | None,
        typer.Argument(help="The error's slug; without one, all are listed.", show_default=False),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Explain an error: what it means, when it comes, how to mend it.

    Example: `polyquant explain backend-mismatch`
    """
    if slug is None:
        _list_errors(as_json=as_json)
        return
    entry = record(slug)
    if as_json:
        output.print_json(entry)
    else:
        _print_record(output.out(), entry)


def _list_errors(*, as_json: bool) -> None:
    summaries = {slug: _summary(cls) for slug, cls in sorted(CATALOGUE.items())}
    if as_json:
        output.print_json([{"slug": slug, "summary": text} for slug, text in summaries.items()])
        return
    table = output.table(["Slug"], after=["What it means"])
    for slug, text in summaries.items():
        table.add_row(slug, escape(text))
    output.out().print(table)


def _summary(cls: type) -> str:
    return (cls.__doc__ or "").partition("\n")[0]


#: The fields of a record in the order in which a reader needs them, with their headings.
_HEADINGS = MappingProxyType(
    {
        "documentation": "What it means",
        "errorMessage": "Its text",
        "triggerScenarios": "When it comes",
        "commonSituations": "Common situations",
        "solutions": "What to do",
        "exampleFix": "Example",
        "validationCode": "A check that avoids it",
        "typeGuard": "In one expression",
        "tryCatchPattern": "Catching it",
        "handlingStrategy": "Handling it",
        "preventionTips": "Prevention",
    }
)
_CODE = frozenset({"exampleFix", "validationCode", "typeGuard", "tryCatchPattern"})


def _print_record(console: Console, entry: dict[str, Any]) -> None:
    is_a = f"polyquant.errors.{entry['errorClass'].rpartition('.')[2]}, a {entry['errorType']}"
    console.print(f"[bold]{entry['slug']}[/]  [dim]{is_a}[/]", highlight=False)
    for field, heading in _HEADINGS.items():
        if entry.get(field):
            console.print(f"\n[bold cyan]{heading}[/]")
            _print_field(console, entry[field], is_code=field in _CODE)
    console.print(f"\n[dim]Tags: {', '.join(entry['tags'])}[/]", highlight=False)


def _print_field(console: Console, content: Any, *, is_code: bool) -> None:
    if isinstance(content, dict):
        for name, text in content.items():
            console.print(f"  [dim]{str(name).capitalize()}:[/]")
            _print_field(console, text, is_code=is_code)
    elif isinstance(content, list):
        for item in content:
            grid = Table.grid(padding=(0, 1))
            grid.add_row("  -", Text(str(item)))
            console.print(grid)
    elif is_code:
        code = Syntax("", "python", theme="ansi_dark").highlight(str(content).strip("\n"))
        code.rstrip()
        console.print(Padding(code, (0, 0, 0, 4), expand=False))
    else:
        console.print(Padding(Text(str(content)), (0, 0, 0, 2), expand=False))


def conform(
    device: Annotated[
        str, typer.Option(help="The device to check, such as torch:cuda:0.")
    ] = "numpy",
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and schemes.")] = False,
    scheme: Annotated[
        list[str] | None,
        typer.Option(help="A scheme to check in place of the suite's own; may be repeated."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the schemes.")] = 1,
    as_json: Json = False,
) -> None:
    """Check a device against the numerical contract.

    The same codes, the same values, and products within their bound.

    Exits with 1 when a check fails.

    Example: `polyquant conform --device torch:cpu --quick`
    """
    results: list[Result] = []
    with output.progress(in_bytes=False, quiet=as_json) as bar:
        task = bar.add_task(f"checking {device}", total=None)
        for result in checks(device, quick=quick, schemes=scheme or (), jobs=jobs):
            results.append(result)
            bar.update(task, description=f"{result.name} {result.scheme}", completed=len(results))
    failed = [result for result in results if not result.passed]
    if as_json:
        output.print_json(
            {
                "device": device,
                "checks": len(results),
                "failed": len(failed),
                "results": [result._asdict() for result in results],
            }
        )
    else:
        _print_results(device, results, failed)
    if failed:
        raise typer.Exit(FAILED)


def _print_results(device: str, results: Sequence[Result], failed: Sequence[Result]) -> None:
    console = output.out()
    groups = Counter((result.name, result.kernel) for result in results)
    bad = Counter((result.name, result.kernel) for result in failed)
    table = output.table(["Checks of", "Kernel"], ["Passed", "Failed"])
    for group, total in groups.items():
        number = f"[red]{bad[group]:,}[/]" if bad[group] else "0"
        table.add_row(*map(escape, group), f"{total - bad[group]:,}", number)
    console.print(table)
    for result in failed[:_SHOWN]:
        place = f"{result.name}, {result.kernel or 'no kernel'}: {result.what} as {result.scheme}"
        console.print(f"\n[bold red]Failed[/] {escape(place)}", highlight=False)
        console.print(f"  {result.detail}", markup=False, highlight=False)
    if len(failed) > _SHOWN:
        console.print(f"\nand {len(failed) - _SHOWN:,} more; --json has them all.")
    verdict = "[red]does not conform[/]" if failed else "[green]conforms[/]"
    console.print(
        f"\n{escape(device)} {verdict}: {len(results) - len(failed):,} of "
        f"{output.count(len(results), 'check')} passed.",
        highlight=False,
    )
