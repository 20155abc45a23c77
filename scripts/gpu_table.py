"""The table of an NVIDIA GPU, from benchmarks/results/cuda.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markdown import table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "cuda.json"
SHAPE = (8192, 8192)
SHORT = (1, 4, 16, 64)


def short() -> str:
    """The README's: few rows of x at one shape."""
    return made(SHORT)


def section() -> str:
    """Every number of rows that was measured."""
    return made((1, 4, 8, 16, 32, 64, 128, 256))


def made(rows_of_x: tuple[int, ...]) -> str:
    """Times and speed-ups over cuBLAS, with where and when they were measured."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    at = {
        (row["scheme"], row["m"]): row for row in found["products"] if (row["n"], row["k"]) == SHAPE
    }
    schemes = list(dict.fromkeys(scheme for scheme, _ in at))
    versions = found["versions"]
    text = (
        f"us (speed-up over `F.linear` in bf16) of bf16 activations by a weight of {SHAPE[0]} x "
        f"{SHAPE[1]}. {found['gpu']}, {found['date']}, torch {versions['torch']}. cuBLAS was timed "
        "in other runs of the same day, which lie within 5 % of their median."
    )
    head = ["scheme", *(f"{m} row{'s' * (m > 1)}" for m in rows_of_x)]
    cublas = ["bf16 (cuBLAS)", *(_time(found["cublas_us"].get(str(m))) for m in rows_of_x)]
    lines = [[f"`{s}`", *(_cell(at[s, m]) for m in rows_of_x)] for s in schemes]
    return f"{text}\n\n{table(head, [cublas, *lines])}\n"


def _time(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us:.1f}"


def _cell(row: dict[str, Any]) -> str:
    speedup = "" if row.get("speedup") is None else f" ({row['speedup']:.2f})"
    return f"{row['us']:.1f}{speedup}"
