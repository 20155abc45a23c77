"""What quantized linear layers cost and save in a real model, all-MiniLM-L6-v2.

Cosines are between the embeddings of a sentence in the quantized and in the float32 model. The time
is that of a forward pass over one batch, in turn with the float32 model's; the first row is the
float32 model against itself, which shows how far two measurements of one thing differ.

    python benchmarks/minilm.py [--sentences 256] [--out benchmarks/results/minilm.json]
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from machine import write_results
from quantize import medians_s

from polyquant.torch import QLinear, quantize_

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from encoder import Batch, embed, evenly, load_encoder, sentences, tokenize  # noqa: E402

SCHEMES = ("q8s-row", "q4s-32", "nf4", "mxfp4", "nvfp4")
FLOAT = "float32"
BATCH = 32
LEAST_ROUNDS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "minilm.json")
    arguments = parser.parse_args()
    model, tokenizer = load_encoder()
    texts = [sentence.text for sentence in evenly(sentences(), arguments.sentences)]
    batches = [tokenize(tokenizer, texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
    print(f"{'scheme':<8} {'bits':>5} {'linear':>8} {'model':>8}  cosine: mean, min   ms / f32")
    rows = []
    with torch.no_grad():
        for scheme in (FLOAT, *SCHEMES):
            row = measure(model, scheme, batches)
            rows.append(row)
            print(
                f"{scheme:<8} {row['bits_per_element']:>5.2f} {row['linear_bytes'] / 1e6:>5.1f} MB "
                f"{row['model_bytes'] / 1e6:>5.1f} MB  {row['cosine_mean']:.4f}, "
                f"{row['cosine_min']:.4f}  {row['ours_ms']:.0f} / {row['f32_ms']:.0f} "
                f"({row['ratio']:.2f}x)"
            )
    write_results(arguments.out, rows)


def measure(model: torch.nn.Module, scheme: str, batches: list[Batch]) -> dict[str, Any]:
    """One scheme on every linear layer: embeddings against the float32 model's, bytes and time."""
    ours = copy.deepcopy(model)
    if scheme != FLOAT:
        quantize_(ours, scheme)
    cosines = torch.cat([(embed(ours, b) * embed(model, b)).sum(dim=-1) for b in batches])
    ours_s, f32_s = medians_s(
        lambda: ours(**batches[0]), lambda: model(**batches[0]), least=LEAST_ROUNDS
    )
    linear_bytes, elements = linear_weights(ours)
    return {
        "scheme": scheme,
        "bits_per_element": 8 * linear_bytes / elements,
        "linear_bytes": linear_bytes,
        "model_bytes": sum(t.nbytes for t in ours.state_dict().values()),
        "sentences": len(cosines),
        "cosine_mean": float(cosines.mean()),
        "cosine_min": float(cosines.min()),
        "batch": list(batches[0]["input_ids"].shape),
        "ours_ms": ours_s * 1e3,
        "f32_ms": f32_s * 1e3,
        "ratio": ours_s / f32_s,
    }


def linear_weights(model: torch.nn.Module) -> tuple[int, int]:
    """The bytes that the weights of the linear layers take, and how many numbers those hold."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear | QLinear)]
    weights = [m.weight.qtensor if isinstance(m, QLinear) else m.weight for m in layers]
    return sum(w.nbytes for w in weights), sum(m.in_features * m.out_features for m in layers)


if __name__ == "__main__":
    main()
