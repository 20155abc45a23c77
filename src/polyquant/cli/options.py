"""Options and arguments that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from polyquant.errors import InvalidArgument

#: Exit code of a run that was stopped by Ctrl-C (128 + SIGINT).
STOPPED = 130

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Take only tensors whose whole name matches this glob. May be repeated.",
        show_default=False,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Leave out tensors whose whole name matches this glob. May be repeated.",
        show_default=False,
    ),
]
Scheme = Annotated[
    str, typer.Option(help="A preset (nf4, q4s-32, mxfp4, int8, ...) or a text form.")
]
Calibration = Annotated[
    str, typer.Option(help="minmax, mse, percentile:99.9, absmean, signed_max or mx_floor.")
]

Format = Annotated[
    str | None,
    typer.Option("--format", metavar="NAME", help="The input's format, where it does not say."),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="PATH|JSON",
        help="The model's config, where it does not lie beside the input.",
    ),
]

_READABLE = "A checkpoint of any known format: a file, a sharded index, or a model folder."
Checkpoint = Annotated[Path, typer.Argument(metavar="FILE", help=_READABLE, show_default=False)]
Source = Annotated[Path, typer.Argument(metavar="IN", help=_READABLE, show_default=False)]
Out = Annotated[
    Path,
    typer.Argument(
        metavar="OUT",
        help="What to write: NAME.safetensors, or NAME.safetensors.index.json, which keeps the "
        "shards of the input.",
        show_default=False,
    ),
]


def config_of(text: str | None) -> Any:
    """A config: a path, or JSON itself where it begins with a brace."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        wanted = f"a path, or JSON ({error})"
        raise InvalidArgument(name="--config", wanted=wanted, got=text) from error
