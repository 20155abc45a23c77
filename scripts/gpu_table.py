"""The tables of an NVIDIA GPU, from benchmarks/results/cuda.json (by benchmarks/nvidia.py)."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from markdown import table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SHAPE = (8192, 8192)
SHORT_ROWS = (1, 4, 16, 64, 256)
SHORT_SCHEMES = ("q4s-32", "nf4", "mxfp4", "q8s-row", "fp8-row", "q2s/64:f16")


def short() -> str:
    """The README's: few rows of x, some schemes and their rivals, at one shape."""
    found = _results("cuda")
    rows = [row for row in _products(found) if row["scheme"] in SHORT_SCHEMES]
    return f"{_where(found)}\n\n{_times(rows, SHORT_ROWS)}\n"


def section() -> str:
    """Everything at that shape, both operands quantized, other shapes, and which goals are met."""
    found = _results("cuda")
    all_rows = tuple(dict.fromkeys(row["m"] for row in found["products"]))
    met = sum(bar["met"] for bar in found["bars"])
    moved = ", ".join(f"{k.removesuffix('_gb_s')} {v}" for k, v in found["ceilings"].items())
    parts = [
        _where(found),
        _times(_products(found), all_rows),
        "Both operands quantized beforehand (torch's own products of the same codes below ours):",
        _times(found["both_quantized"], all_rows, with_bf16=False),
        *_shapes(found),
        f"Goals set beforehand, as speed-ups over bf16: {met} of {len(found['bars'])} are met.",
        _bars(found["bars"]),
        f"GB/s read and written of 8192 x 8192 (GB/s of the whole GPU: {moved}):",
        _conversions(found["conversions"]),
        *_embeddings(found.get("embeddings", [])),
        "What a call costs the processor, us: "
        + ", ".join(f"`{name}` {time}" for name, time in found["host_us"].items())
        + ".",
        *found.get("notes", ()),
    ]
    return "\n\n".join(parts) + "\n"


def _results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _products(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in found["products"] if (row["n"], row["k"]) == SHAPE]


def _where(found: dict[str, Any]) -> str:
    return (
        f"us (speed-up over `F.linear` in bf16) of bf16 activations by a weight of {SHAPE[0]} x "
        f"{SHAPE[1]}. {found['gpu']}, {found['date']}, torch {found['versions']['torch']}."
    )


def _times(
    rows: list[dict[str, Any]], rows_of_x: tuple[int, ...], *, with_bf16: bool = True
) -> str:
    at = {(row["scheme"], row["m"]): row for row in rows}
    head = ["scheme", *(f"{m} row{'s' * (m > 1)}" for m in rows_of_x)]
    lines = []
    if with_bf16:
        bf16 = [median(row["cublas_us"] for row in rows if row["m"] == m) for m in rows_of_x]
        lines.append(["bf16 (cuBLAS), median", *(f"{us:.1f}" for us in bf16)])
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        of_scheme = [at.get((scheme, m), {}) for m in rows_of_x]
        lines.append([f"`{scheme}`", *(_cell(r.get("us"), r.get("cublas_us")) for r in of_scheme)])
        for rival in dict.fromkeys(name for r in of_scheme for name in r.get("rivals_us", {})):
            times = [(r.get("rivals_us", {}).get(rival), r.get("cublas_us")) for r in of_scheme]
            lines.append([f"{rival}, `{scheme}`", *(_cell(*each) for each in times)])
    return table(head, lines)


def _cell(time_us: float | None, cublas_us: float | None) -> str:
    if time_us is None:
        return ""
    return f"{time_us:.1f}" + (f" ({cublas_us / time_us:.2f})" if cublas_us else "")


def _shapes(found: dict[str, Any]) -> tuple[str, ...]:
    others = [row for row in found["products"] if (row["n"], row["k"]) != SHAPE]
    if not others:
        return ()
    at = {(row["scheme"], row["n"], row["k"], row["m"]): row for row in others}
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in others))
    lines = []
    for scheme in dict.fromkeys(row["scheme"] for row in others):
        cells = []
        for n, k in shapes:
            pair = [at[scheme, n, k, m] for m in (1, 16) if (scheme, n, k, m) in at]
            cells.append(" / ".join(_cell(r["us"], r.get("cublas_us")) for r in pair))
        lines.append([f"`{scheme}`", *cells])
    head = ["scheme", *(f"{n} x {k}" for n, k in shapes)]
    return "Other shapes (out x in), us of one row and 16:", table(head, lines)


def _bars(bars: list[dict[str, Any]]) -> str:
    rows_of_x = sorted({bar["m"] for bar in bars})
    at = {(bar["scheme"], bar["m"]): bar for bar in bars}
    lines = []
    for scheme in dict.fromkeys(bar["scheme"] for bar in bars):
        of_scheme = [at.get((scheme, m)) for m in rows_of_x]
        cells = [
            "" if bar is None else f"{bar['speedup']} / {bar['bar']}{' met' if bar['met'] else ''}"
            for bar in of_scheme
        ]
        lines.append([f"`{scheme}`", *cells])
    return table(["speed-up / goal", *(str(m) for m in rows_of_x)], lines)


def _embeddings(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    if not rows:
        return ()
    at = {(row["scheme"], row["indices"]): row for row in rows}
    counts = list(dict.fromkeys(row["indices"] for row in rows))
    bf16 = {row["indices"]: row["bf16_us"] for row in rows}
    lines = [["bf16 (`F.embedding`)", *(f"{bf16[n]:.1f}" for n in counts)]]
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        cells = [_cell(at[scheme, n]["us"], at[scheme, n]["bf16_us"]) for n in counts]
        lines.append([f"`{scheme}`", *cells])
    head = ["us (speed-up)", *(f"{n} of 128256 rows of 4096" for n in counts)]
    return "Rows of a table looked up, in bf16:", table(head, lines)


def _conversions(rows: list[dict[str, Any]]) -> str:
    names = [
        f"{op}_{kind}_gb_s" for op in ("dequantize", "quantize") for kind in ("float32", "bfloat16")
    ]
    head = ["scheme", *(name.removesuffix("_gb_s").replace("_", ", ") for name in names)]
    lines = [[f"`{row['scheme']}`", *(str(row.get(name, "")) for name in names)] for row in rows]
    return table(head, lines)
