"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A checkpoint: safetensors, a sharded index, a model folder, or npz.",
        show_default=False,
    ),
]
