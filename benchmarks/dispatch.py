"""What a cached call costs besides its kernel, in microseconds.

For NumPy and torch: ``pq.matmul(x, q)`` and ``x @ q`` against the kernel called directly with the
same operands. The operands are small, so that the kernel's own time does not drown the difference.
The three are timed in turn, round by round, in processor time of the one thread that runs, so that
other work on the machine does not count; an overhead is the median of the rounds' differences.

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

ROUNDS = 1000
CALLS = 5
#: What dispatch may add to a call (launching a Triton kernel costs about 23 us on the host).
TARGET_US = 15.0
SCHEME = "q8s/row:f32"
SHAPE = (8, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    rows = [measure(device, arguments.rounds) for device in ("numpy", "torch:cpu")]
    print(f"{'device':<10} {'kernel':>9} {'pq.matmul':>10} {'x @ q':>9}   overhead (target 15 us)")
    for row in rows:
        print(
            f"{row['device']:<10} {row['kernel_us']:>9.1f} {row['matmul_us']:>10.1f} "
            f"{row['operator_us']:>9.1f}   {row['matmul_overhead_us']:.1f} and "
            f"{row['operator_overhead_us']:.1f} us"
        )
    write_results(arguments.out or Path(__file__).parent / "results" / "dispatch.json", rows)


def measure(device: str, rounds: int) -> dict[str, Any]:
    """Medians of the kernel, ``pq.matmul`` and ``@`` on one device."""
    x, q = operands(device)
    problem = matmul_problem(x, q, q.device)
    chosen = choose(device.partition(":")[0], problem)
    kind = x.dtype
    calls = (lambda: chosen.run(x, q, kind), lambda: pq.matmul(x, q), lambda: x @ q)
    times = rounds_us(calls, rounds)
    kernel, matmul, operator = (statistics.median(each) for each in times)
    return {
        "device": device,
        "scheme": SCHEME,
        "shape": list(SHAPE),
        "kernel": chosen.name,
        "kernel_us": kernel,
        "matmul_us": matmul,
        "operator_us": operator,
        "matmul_overhead_us": median_difference(times[1], times[0]),
        "operator_overhead_us": median_difference(times[2], times[0]),
    }


def operands(device: str) -> tuple[Any, pq.QTensor]:
    """A small float array and a quantized weight, on one device."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(SHAPE, dtype=np.float32)
    q = pq.quantize(rng.standard_normal(SHAPE, dtype=np.float32), SCHEME).to(device)
    if device == "numpy":
        return x, q
    import torch

    return torch.from_numpy(x), q


def rounds_us(calls: tuple[Callable[[], Any], ...], rounds: int) -> list[list[float]]:
    """The time of each call in every round."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, kept in zip(calls, times, strict=True):
            start = time.thread_time_ns()
            for _ in range(CALLS):
                call()
            kept.append((time.thread_time_ns() - start) / CALLS / 1000)
    return times


def median_difference(longer: list[float], shorter: list[float]) -> float:
    """The median over the rounds of what one call took more than another."""
    return statistics.median(x - y for x, y in zip(longer, shorter, strict=True))


if __name__ == "__main__":
    main()
