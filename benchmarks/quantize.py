"""How fast the definition quantizes, dequantizes and multiplies, beside the library's own product.

GB/s count the bytes of the float32 side: what quantize reads and dequantize writes. A product is
``x @ q.mT`` with a weight of SIZE x SIZE, and its rival is the same product of the same library on
the dequantized float32 weight, timed in turn with it. Medians of the rounds. With one thread
(OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1, as `make bench` has it) the clock is that thread's
processor time, which other work on the machine does not lengthen.

    python benchmarks/quantize.py [--size 2048] [--out benchmarks/results/quantize.json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import one_thread, write_results

import polyquant as pq

SCHEMES = ("q8s-row", "q4s-32", "nf4", "mxfp4", "nvfp4")
DEVICES = ("numpy", "torch:cpu")
ROWS = (1, 16, 256)
#: Rounds at most; after LIMIT_S, MIN_ROUNDS are enough.
ROUNDS, MIN_ROUNDS, LIMIT_S = 9, 3, 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    rows = []
    head = "".join(f"  m={m}: ours / f32" for m in ROWS)
    print(f"{'device':<10} {'scheme':<9} {'quantize':>9} {'dequantize':>11}{head} (ms)")
    for device in DEVICES:
        for scheme in SCHEMES:
            row = measure(device, scheme, arguments.size)
            rows.append(row)
            products = "".join(
                f"  {p['ours_ms']:9.2f} /{p['f32_ms']:6.2f}" for p in row["products"]
            )
            print(
                f"{device:<10} {scheme:<9} {row['quantize_gb_s']:>9.2f} "
                f"{row['dequantize_gb_s']:>11.2f}{products}"
            )
    write_results(arguments.out or Path(__file__).parent / "results" / "quantize.json", rows)


def measure(device: str, scheme: str, size: int) -> dict[str, Any]:
    """One scheme on one device: GB/s and the products."""
    rng = np.random.default_rng(0)
    weight = on_device(rng.standard_normal((size, size), dtype=np.float32), device)
    q = pq.quantize(weight, scheme)
    quantize_s, dequantize_s = medians_s(lambda: pq.quantize(weight, scheme), q.dequantize)
    gigabytes = 4 * size * size / 1e9
    plain, transposed = q.dequantize().T, q.mT
    products = []
    for m in ROWS:
        x = on_device(rng.standard_normal((m, size), dtype=np.float32), device)
        ours, f32 = medians_s(lambda x=x: x @ transposed, lambda x=x: x @ plain)
        products.append({"m": m, "ours_ms": ours * 1e3, "f32_ms": f32 * 1e3})
    return {
        "device": device,
        "scheme": scheme,
        "shape": [size, size],
        "bits_per_element": q.bits_per_element,
        "kernel": pq.supports(device, scheme).kernel,
        "quantize_gb_s": gigabytes / quantize_s,
        "dequantize_gb_s": gigabytes / dequantize_s,
        "products": products,
    }


def on_device(array: np.ndarray[Any, Any], device: str) -> Any:
    """A host array as one of the device's library."""
    if device == "numpy":
        return array
    import torch

    return torch.from_numpy(array).to(device.partition(":")[2])


def medians_s(*calls: Callable[[], Any], least: int = MIN_ROUNDS) -> list[float]:
    """The median time of each call, timed in turn, after one round that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    clock = time.thread_time if one_thread() else time.perf_counter
    begin = clock()
    for count in range(ROUNDS + 1):
        if count > least and clock() - begin > LIMIT_S:
            break
        for call, kept in zip(calls, times, strict=True):
            start = clock()
            call()
            if count:
                kept.append(clock() - start)
    return [statistics.median(kept) for kept in times]


if __name__ == "__main__":
    main()
