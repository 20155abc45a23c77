"""What a cached call costs besides its kernel, in microseconds.

For NumPy and torch: ``pq.matmul(x, q)``, ``pq.linear(x, w)``, ``x @ q``, and the library's own
protocol that the last one goes through, alone. The remembered kernel is replaced by one that does
nothing, and each timed call comes right after the real one and after READ_MB of memory were read,
as the kernel of a real weight reads it: so neither Python's objects nor its code are in the
processor's nearest caches. Without that ("in a row") the same calls cost half. The calls are timed
in turn, round by round, in processor time of the one thread that runs, so that other work on the
machine does not count; a cost is the median over the rounds of what a call took more than an empty
one.

    python benchmarks/dispatch.py [--out benchmarks/results/dispatch.json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import write_results

import polyquant as pq
from polyquant.dispatch import choose, matmul_problem
from polyquant.ops.products import plans

ROUNDS = 1000
#: The codes and scales of a weight of 4096 x 4096 at 4 bits are 9.4 MB, its result and x far less.
READ_MB = 10
#: What dispatch may add to a call (launching a Triton kernel costs about 23 us on the host).
TARGET_US = 5.0
SCHEME = "q8s/row:f32"
SHAPE = (8, 8)


class Stranger:
    """An operand that answers the libraries' protocols at once: what they cost by themselves."""

    def __array_ufunc__(self, *given: Any, **keywords: Any) -> Any:
        return None

    @classmethod
    def __torch_function__(cls, *given: Any, **keywords: Any) -> Any:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    rows = [measure(device, arguments.rounds) for device in ("numpy", "torch:cpu")]
    print(f"us a call besides its kernel: after {READ_MB} MB / in a row (target {TARGET_US})")
    for row in rows:
        pairs = zip(row["after_kernel_us"].items(), row["in_a_row_us"].values(), strict=True)
        found = "  ".join(f"{name} {cold:.1f} / {warm:.1f}" for (name, cold), warm in pairs)
        print(f"{row['device']:<10} {found}")
    write_results(arguments.out or Path(__file__).parent / "results" / "dispatch.json", rows)


def measure(device: str, rounds: int) -> dict[str, Any]:
    """What each way to a kernel costs on one device."""
    x, q = operands(device)
    chosen = choose(device.partition(":")[0], matmul_problem(x, q, q.device))
    weight, stranger, kind = q.mT, Stranger(), x.dtype
    calls: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "pq.matmul": lambda: pq.matmul(x, q),
        "pq.linear": lambda: pq.linear(x, weight),
        "x @ q": lambda: x @ q,
        "protocol": lambda: x @ stranger,
    }
    for call in calls.values():
        call()
    for key, (_, last) in tuple(plans().items()):
        plans()[key] = (lambda *operands: None), last
    memory = np.ones(READ_MB * 2**18, np.float32)

    def kernel() -> None:
        chosen.run(x, q, kind)
        memory.sum()

    cold, warm = costs_us(calls, rounds, kernel), costs_us(calls, rounds, lambda: None)
    plans().clear()
    return {
        "device": device,
        "scheme": SCHEME,
        "shape": list(SHAPE),
        "kernel": chosen.name,
        "read_mb": READ_MB,
        "after_kernel_us": cold,
        "in_a_row_us": warm,
    }


def costs_us(
    calls: dict[str, Callable[[], Any]], rounds: int, before: Callable[[], None]
) -> dict[str, float]:
    """The median over the rounds of what each call took more than the first, after ``before``."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            before()
            start = time.thread_time_ns()
            call()
            times[name].append((time.thread_time_ns() - start) / 1000)
    empty, *named = times
    return {name: median_difference(times[name], times[empty]) for name in named}


def operands(device: str) -> tuple[Any, pq.QTensor]:
    """A small float array and a quantized weight, on one device."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(SHAPE, dtype=np.float32)
    q = pq.quantize(rng.standard_normal(SHAPE, dtype=np.float32), SCHEME).to(device)
    if device == "numpy":
        return x, q
    import torch

    return torch.from_numpy(x), q


def median_difference(longer: list[float], shorter: list[float]) -> float:
    """The median over the rounds of what one call took more than another."""
    return statistics.median(x - y for x, y in zip(longer, shorter, strict=True))


if __name__ == "__main__":
    main()
