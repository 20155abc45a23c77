"""The command inspect: what a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from polyquant.cli import output
from polyquant.cli.options import Checkpoint, Config, Format, Json, config_of
from polyquant.files.info import TensorInfo
from polyquant.formats import open_checkpoint

#: Characters of a metadata text that are shown.
_BRIEF = 120


def inspect(
    path: Checkpoint, format: Format = None, config: Config = None, *, as_json: Json = False
) -> None:
    """Show what a checkpoint holds: tensors, schemes, sizes, metadata.

    Reads the headers alone, so it is quick on any size.

    Example: `polyquant inspect model-nf4.safetensors`
    """
    with open_checkpoint(path, format=format, config=config_of(config)) as checkpoint:
        infos = [checkpoint.info(name) for name in checkpoint]
    if as_json:
        output.print_json(
            {
                "path": str(path),
                "format": str(checkpoint.format),
                "metadata": dict(checkpoint.metadata),
                "tensors": [_info_json(info) for info in infos],
                "totals": _totals(infos),
            }
        )
        return
    _print_tensors(infos)
    _print_totals(infos)
    _print_metadata(str(checkpoint.format), dict(checkpoint.metadata))


def _kind(info: TensorInfo) -> str:
    return str(info.dtype if info.scheme is None else info.scheme)


def _info_json(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "shape": list(info.shape),
        "dtype": info.dtype,
        "scheme": None if info.scheme is None else str(info.scheme),
        "size_bytes": info.nbytes,
        "bits_per_element": info.bits_per_element,
    }


def _bits(size_bytes: int, elements: int) -> float:
    return 8 * size_bytes / elements if elements else 0.0


def _totals(infos: Sequence[TensorInfo]) -> list[dict[str, Any]]:
    """Tensors, elements and bytes by dtype or scheme, the largest first."""
    kinds = dict.fromkeys(_kind(info) for info in infos)
    rows = []
    for kind in kinds:
        group = [info for info in infos if _kind(info) == kind]
        rows.append(
            {
                "kind": kind,
                "tensors": len(group),
                "elements": sum(math.prod(info.shape) for info in group),
                "size_bytes": sum(info.nbytes for info in group),
            }
        )
    return sorted(rows, key=lambda row: -int(str(row["size_bytes"])))


def _print_tensors(infos: Sequence[TensorInfo]) -> None:
    table = output.table(["Tensor", "Shape", "Kind"], ["Size", "Bits"])
    for info in infos:
        table.add_row(
            output.Name(info.name),
            output.shape_text(info.shape),
            escape(_kind(info)),
            output.size(info.nbytes),
            f"{info.bits_per_element:.2f}",
        )
    output.out().print(table)


def _print_totals(infos: Sequence[TensorInfo]) -> None:
    table = output.table(["Kind"], ["Tensors", "Elements", "Size", "Bits"])
    rows = _totals(infos)
    for row in rows:
        table.add_row(
            escape(row["kind"]),
            f"{row['tensors']:,}",
            f"{row['elements']:,}",
            output.size(row["size_bytes"]),
            f"{_bits(row['size_bytes'], row['elements']):.2f}",
        )
    table.add_section()
    elements = sum(row["elements"] for row in rows)
    size_bytes = sum(row["size_bytes"] for row in rows)
    table.add_row(
        "all",
        f"{len(infos):,}",
        f"{elements:,}",
        output.size(size_bytes),
        f"{_bits(size_bytes, elements):.2f}",
        style="bold",
    )
    console = output.out()
    console.print()
    console.print(table)


def _print_metadata(format_name: str, metadata: dict[str, Any]) -> None:
    console = output.out()
    console.print(f"\nFormat: {format_name}", markup=False, highlight=False)
    for key, value in metadata.items():
        if key == format_name:  # what its writer needs; nobody reads it
            continue
        console.print(f"{key}: {_brief(value)}", markup=False, highlight=False, soft_wrap=True)


def _brief(value: object) -> str:
    """A text on one line, its end cut off where it is long: tokenizers have megabytes."""
    text = str(value)
    start = text[:_BRIEF].replace("\n", "\\n")
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in start)
    return shown if len(text) <= _BRIEF else f"{shown}... ({len(text):,} characters)"
