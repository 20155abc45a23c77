"""The benchmark sections of the README, from the committed results of benchmarks/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import markdown
from markdown import table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def section() -> str:
    """The tables, each with the machine and the date that it was measured on."""
    quantize, dispatch = _results("quantize.json"), _results("dispatch.json")
    extent = quantize["rows"][0]["shape"][0]
    return markdown.page(
        [
            f"Weights of {extent} x {extent}. {origin(quantize)} GB/s count the float32 side. "
            "`f32` is the same library's product with the dequantized weight, timed in turn.",
            throughput(quantize["rows"]),
            "What a call costs from Python besides its kernel, in us: right after a kernel that "
            f"read {dispatch['rows'][0]['read_mb']} MB / in a row. `x @ q` goes through the "
            "library's own protocol, which is in the last column alone. "
            f"{origin(dispatch)}",
            overhead(dispatch["rows"]),
            *on_the_cpu(),
        ]
    )


#: What the table of products shows of cpu.json: a weight, and what it is multiplied by.
_PRODUCTS = (
    *(("polyquant", scheme, "float32") for scheme in ("q4s-32", "u4/32:f16-zero:u4", "mxfp4")),
    *(("polyquant", scheme, "float32") for scheme in ("nf4", "q8s-32", "fp8-row", "q3s/32:f16")),
    ("polyquant", "u4/32:(u6/8:f16)+bias:(u6/8:f16)", "float32"),
    *(("polyquant", scheme, "q8s/32:f32") for scheme in ("q4s-32", "nf4", "q8s-32")),
)
#: Rivals, each beside the scheme that it is like.
_RIVALS = (
    ("numpy f32", "q4s-32"),
    ("torch f32", "q4s-32"),
    ("torch int4pack", "q4s-32"),
    ("torch int8pack", "q8s-32"),
    ("bitsandbytes nf4", "nf4"),
    ("mlx 4 bit", "q4s-32"),
    ("ggml Q4_0 repacked", "q4s-32"),
    ("ik Q4_0 repacked", "q4s-32"),
    ("ggml IQ4_NL repacked", "iq4_nl"),
    ("ik IQ4_NL repacked", "iq4_nl"),
    ("ggml Q8_0", "q8s-32"),
    ("ik Q8_0 repacked", "q8s-32"),
)


def on_the_cpu() -> list[str]:
    """Products on the CPU beside those of other libraries, once cpu.json is there."""
    if not (RESULTS / "cpu.json").exists():
        return []
    found = _results("cpu.json")
    first = found["products"][0]
    rows = [r for r in found["products"] if (r["n"], r["k"]) == (first["n"], first["k"])]
    threads = " / ".join(str(n) for n in found["threads"])
    memory = " / ".join(f"{speed:.1f}" for speed in found["dram_gb_s"].values())
    builds = "; ".join(f"{name} is built for {sets}" for name, sets in found["rivals"].items())
    text = (
        f"Products with weights of {first['n']} x {first['k']} by `benchmarks/cpu.py`, in ms with "
        f"{threads} threads, and in brackets over NumPy's float32 product of the same run. Weights "
        f"come from memory, which gave {memory} GB/s. polyquant ran with {found['polyquant']}; "
        f"{builds or 'no build of ggml was installed'}. {origin(found)}"
    )
    return [text, products(rows)]


def products(rows: list[dict[str, Any]]) -> str:
    """A line for each weight and what multiplies it: of several layouts, the fastest."""
    extents = list(dict.fromkeys(row["m"] for row in rows))
    lines = []
    for name, scheme, activations in (*_PRODUCTS, *((*pair, None) for pair in _RIVALS)):
        here = [
            row
            for row in rows
            if (row["name"], row["scheme"]) == (name, scheme)
            and (activations or row["activations"]) == row["activations"]
            and row.get("order") != "in,out"
        ]
        if here:
            shown = [f"`{scheme}`" if activations else name, here[0]["activations"]]
            lines.append([*shown, *(_times(rows, here, m) for m in extents)])
    return table(["weight", "activations", *(f"M={m}" for m in extents)], lines)


def _times(rows: list[dict[str, Any]], here: list[dict[str, Any]], m: int) -> str:
    times, ratios = [], []
    for threads in dict.fromkeys(row["threads"] for row in here):
        mine = [row for row in here if (row["threads"], row["m"]) == (threads, m)]
        if not mine:
            times.append("-")
            ratios.append("-")
            continue
        best = min(mine, key=lambda row: row["time_ms"])
        place = {key: best[key] for key in ("threads", "m", "scheme")}
        (f32,) = (
            row["time_ms"]
            for row in rows
            if row["name"] == "numpy f32" and place.items() <= row.items()
        )
        times.append(f"{best['time_ms']:.2f}")
        ratios.append(f"{best['time_ms'] / f32:.2f}")
    if set(times) == {"-"}:
        return "-"
    return f"{' / '.join(times)} ({' / '.join(ratios)})"


def model() -> str:
    """A real model with quantized linear layers beside itself in float32."""
    found = _results("minilm.json")
    first = found["rows"][0]
    batch, tokens = first["batch"]
    text = (
        "Cosines are between the embeddings by the quantized and by the float32 model, of "
        f"{first['sentences']} sentences of Python's reference; the time is that of a batch of "
        f"{batch} sentences, padded to {tokens} tokens. The first row is the float32 model beside "
        f"itself. {origin(found, 'transformers')}"
    )
    return markdown.page([text, fidelity(found["rows"])])


def fidelity(rows: list[dict[str, Any]]) -> str:
    """What each scheme saves and costs; the first row is the float32 model against itself."""
    head = ["scheme", "bits", "linear weights, MB", "model, MB"]
    head += ["cosine: mean", "lowest", "ours / f32, ms", "ratio"]
    return table(
        head,
        [
            [
                f"`{row['scheme']}`",
                f"{row['bits_per_element']:.2f}",
                f"{row['linear_bytes'] / 1e6:.1f}",
                f"{row['model_bytes'] / 1e6:.1f}",
                f"{row['cosine_mean']:.4f}",
                f"{row['cosine_min']:.4f}",
                f"{row['ours_ms']:.0f} / {row['f32_ms']:.0f}",
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ],
    )


def throughput(rows: list[dict[str, Any]]) -> str:
    """Quantize, dequantize, and products beside the library's own in float32."""
    head = ["device", "scheme", "quantize, GB/s", "dequantize, GB/s"]
    head += [f"{p['m']} row{'s' * (p['m'] > 1)}: ours / f32, ms" for p in rows[0]["products"]]
    return table(
        head,
        [
            [
                row["device"],
                f"`{row['scheme']}`",
                f"{row['quantize_gb_s']:.2f}",
                f"{row['dequantize_gb_s']:.2f}",
                *(f"{p['ours_ms']:.1f} / {p['f32_ms']:.1f}" for p in row["products"]),
            ]
            for row in rows
        ],
    )


def overhead(rows: list[dict[str, Any]]) -> str:
    """What dispatch adds to a call."""
    names = list(rows[0]["after_kernel_us"])
    costs = ("after_kernel_us", "in_a_row_us")
    return table(
        ["device", *(name if name == "protocol" else f"`{name}`" for name in names)],
        [
            [row["device"], *(" / ".join(f"{row[at][name]:.1f}" for at in costs) for name in names)]
            for row in rows
        ],
    )


def _results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def origin(found: dict[str, Any], *besides: str) -> str:
    """The machine, the date and the versions (of NumPy, torch and ``besides``) in one sentence."""
    machine, versions = found["machine"], found["versions"]
    packages = [name for name in ("numpy", "torch", *besides) if name in versions]
    named = ", ".join(f"{name} {versions[name]}" for name in packages)
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    return (
        f"Measured on {found['date']}: {machine['cpu']}, {threads}, "
        f"Python {versions['python']}, {named}."
    )
