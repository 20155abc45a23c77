"""The command line itself: global options, the table of commands, and what errors look like.

Exit codes: 0 all well, 1 a difference or a failed check, 2 a wrong call or an error of the
catalogue, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from polyquant import __version__
from polyquant.cli import compare, convert, inspect, quantize, sweep, system
from polyquant.cli.options import STOPPED
from polyquant.cli.output import err
from polyquant.errors import PolyquantError

#: Exit code of a wrong call or an error of the catalogue.
REFUSED = 2


class Commands(TyperGroup):
    """The group of all commands, which turns an error into its message, its slug and a code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolyquantError as error:
            if ctx.params.get("debug"):
                err().print(traceback.format_exc(), markup=False, highlight=False, soft_wrap=True)
            _show(error)
            raise typer.Exit(REFUSED) from error
        except KeyboardInterrupt:
            err().print("Stopped. Nothing was written.")
            raise typer.Exit(STOPPED) from None
        except BrokenPipeError:  # the reader (head, less) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None


def _show(error: PolyquantError) -> None:
    text = str(error).removesuffix(f" [{error.slug}]")
    console = err()
    console.print(f"[bold red]Error[/] [dim]{error.slug}[/]", highlight=False)
    is_file = not console.is_terminal  # where a line may be as long as it is
    console.print(text, markup=False, highlight=False, soft_wrap=is_file)
    console.print(f"More: polyquant explain {error.slug}", style="dim", highlight=False)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Quantized tensors for every Python array library.",
    epilog="Exit codes: 0 all well, 1 a difference or a failed check, 2 a wrong call or an error.",
)

for _command in (
    quantize.quantize,
    convert.convert,
    inspect.inspect,
    compare.compare,
    sweep.sweep,
    system.devices,
    system.explain,
    system.conform,
):
    app.command()(_command)


def _version(*, asked: bool) -> None:
    if asked:
        typer.echo(f"polyquant {__version__}")
        raise typer.Exit


@app.callback()
def _globals(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error too.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and stop.",
            is_eager=True,
            callback=lambda value: _version(asked=value),
        ),
    ] = False,
) -> None:
    """Quantized tensors for every Python array library."""


def main() -> None:
    """The entry point of the command ``polyquant``."""
    app(prog_name="polyquant")
