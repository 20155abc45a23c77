"""Compile a quantized model as one graph, and run that graph on batches of several sizes.

The model is all-MiniLM-L6-v2 with nf4 layers. With ``fullgraph=True`` nothing falls back to Python,
and once the graph is made, compiling another is an error. Every result is compared with that of the
model itself.

    python examples/compile.py [--backend inductor]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from encoder import Batch, embed, evenly, load_encoder, sentences, tokenize

from polyquant.torch import quantize_

SCHEME = "nf4"
SIZES = (2, 3, 8, 16)
#: How far numbers of an embedding of length 1 may differ, as sums run in another order.
TOLERANCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default=best_backend(), help="of torch.compile")
    backend = parser.parse_args().backend
    model, tokenizer = load_encoder()
    quantize_(model, SCHEME)
    texts = [sentence.text for sentence in evenly(sentences(), sum(SIZES))]
    batches = [tokenize(tokenizer, texts[sum(SIZES[:i]) :][:n]) for i, n in enumerate(SIZES)]
    print(f"{SCHEME} model, compiled by {backend}", flush=True)

    compiled = torch.compile(embed, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        worst = [compare(compiled, model, batches[0])]
        with torch.compiler.set_stance("fail_on_recompile"):
            worst += [compare(compiled, model, batch) for batch in batches[1:]]
    if max(worst) > TOLERANCE:
        print(f"Failed: embeddings differ by {max(worst):.1e}.")
        return 1
    print(
        f"One graph served batches of {', '.join(map(str, SIZES))} sentences, "
        f"and no number differs by more than {max(worst):.1e}."
    )
    return 0


def compare(compiled: Callable[..., torch.Tensor], model: torch.nn.Module, batch: Batch) -> float:
    """The largest difference between the embeddings of the compiled model and its own."""
    start = time.perf_counter()
    found = compiled(model, batch)
    took_s = time.perf_counter() - start
    worst = float((found - embed(model, batch)).abs().max())
    sentences, tokens = batch["input_ids"].shape
    print(f"{sentences:2} sentences of {tokens} tokens: {took_s:5.2f} s, {worst:.1e}", flush=True)
    return worst


def best_backend() -> str:
    """inductor where there are a C++ compiler and Python's headers, which it needs."""
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
    return "inductor" if headers and compiler else "aot_eager"


if __name__ == "__main__":
    sys.exit(main())
