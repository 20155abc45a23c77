"""Products of bf16 rows by a quantized weight in JAX on a GPU, beside XLA's own product in bf16.

A time is that of one product in a jitted loop over several copies of the weight (at least 240 MB,
so that weights come from memory), in which each product takes the result of the one before it: what
calls take that are queued behind another, by the products in one, the median of several. The
product is first compared with the definition on the same codes; one that fails, or is not compiled,
is recorded with its reason. Where torch sees the GPU, its times are those of the same product in a
CUDA graph over as many copies: as torch launches it, and where each kernel begins after the one
before it has ended, as in XLA's programs.

    python benchmarks/jax_gpu.py [--out benchmarks/results/jax_gpu.json] [--seconds 40]
    JAX_PLATFORMS=cpu python benchmarks/jax_gpu.py --size 256        (a trial without a GPU)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import polyquant as pq

SCHEMES = ("q4s-32", "nf4", "mxfp4", "nvfp4", "q8s-row", "fp8-row", "q2s/64:f16")
ROWS_OF_X = (1, 4, 16, 32, 64, 256, 1024, 4096)
COPIES_BYTES = 240e6
#: Products in a call, about; calls more that are queued, which are what is timed; and repeats, as
#: many as fit into so many microseconds.
PRODUCTS, MORE, CALLS, MOST_US = 128, 2, 5, 1e5
#: Of so many rows is the weight made, again and again, so that its product is quickly checked.
PERIOD = 1024
#: Rows that are checked.
CHECKED = 64


class Weight(NamedTuple):
    """Copies of a weight (n, k); what products with its first rows must be, and how nearly."""

    copies: list[Any]
    wanted: Any
    bound: Any


def weight(copies: list[Any], values: Any, x: Any) -> Weight:
    """``bound`` is that of docs/numerics.md for bf16; ``values`` are the first rows' ones."""
    left, right = np.asarray(x, np.float64), np.asarray(values, np.float64).T
    wanted, unit = left @ right, 2.0**-8
    bound = 8 * left.shape[1] ** 0.5 * unit * (np.abs(left) @ np.abs(right))
    return Weight(copies, wanted, bound + unit * np.abs(wanted))


def weight_of(scheme: str, x: Any) -> Weight:
    rng, size = np.random.default_rng(0), x.shape[1]
    period = min(PERIOD, size)
    base = pq.quantize(rng.standard_normal((period, size), dtype=np.float32) / size**0.5, scheme)
    whole = pq.concat([base] * (size // period), axis=0).to("jax")
    count = max(2, int(np.ceil(COPIES_BYTES / whole.nbytes))) if size >= 4096 else 2

    def rolled(leaf: Any, step: int) -> Any:
        return jnp.roll(leaf, step * period, 0) if leaf.ndim > 1 else leaf + 0

    copies = [jax.tree.map(partial(rolled, step=i), whole) for i in range(count)]
    return weight(copies, base.dequantize(), x)


def check(y: Any, weight: Weight) -> None:
    """Raises ValueError where a product is outside of the bound."""
    got = np.asarray(y, np.float64)
    parts = got.reshape(len(got), -1, weight.wanted.shape[1]) - weight.wanted[: len(got), None]
    worst = float(np.max(np.abs(parts) / weight.bound[: len(got), None]))
    if not worst <= 1:
        raise ValueError(f"outside of the bound, {worst:.3g} times")


def loop(multiply: Callable[[Any, Any], Any], times: int, x: Any, copies: list[Any]) -> Any:
    """``times`` rounds over the copies, each product of the result before it."""

    def one_round(_: Any, x: Any) -> Any:
        for weight in copies:
            x = multiply(x, weight)
        return x

    return jax.lax.fori_loop(0, times, one_round, x)


class Case(NamedTuple):
    """A way to multiply, compiled: alone and in the loop; products in a call of that."""

    one: Any
    many: Any
    products: int


def compiled(multiply: Callable[[Any, Any], Any], x: Any, copies: list[Any]) -> Case:
    times = max(1, PRODUCTS // len(copies))
    step = jax.jit(multiply)  # traced and lowered once
    one = step.lower(x, copies[0]).compile()
    many = jax.jit(partial(loop, step, times)).lower(x, copies).compile()
    return Case(one, many, times * len(copies))


def timed_us(case: Case, x: Any, copies: list[Any]) -> float:
    def queued_us(calls: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready([case.many(x, copies) for _ in range(calls)])
        return (time.perf_counter() - begin) * 1e6

    queued_us(1)
    repeats = min(CALLS, max(1, round(MOST_US / queued_us(1))))
    # Queued calls follow each other. The way of the first one from Python is in both terms.
    times = [(queued_us(1 + MORE) - queued_us(1)) / MORE for _ in range(repeats)]
    return median(times) / case.products


def xla(x: Any, w: Any) -> Any:
    return x @ w.T


def ours(x: Any, w: Any) -> Any:
    return pq.matmul(x, w.mT)


def outcome(waiting: Future[Case], x: Any, weight: Weight) -> dict[str, Any]:
    """The time of a case, or why there is none."""
    try:
        case = waiting.result()
        check(case.one(x, weight.copies[0])[:CHECKED].astype(jnp.float32), weight)
        return {"us": round(timed_us(case, x, weight.copies), 2)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the other cases run
        return {"failed": f"{type(error).__name__}: {error}"[:600]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--size", type=int, default=8192, help="extents of the weight")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    found: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "size": given.size,
        "kernel": "",
        "bf16": {},
        "schemes": {scheme: {} for scheme in SCHEMES},
    }
    rng = np.random.default_rng(1)
    values = rng.standard_normal((max(ROWS_OF_X), given.size), dtype=np.float32)
    all_rows = jnp.asarray(values, jnp.bfloat16)
    for _ in measure(found, all_rows, end):
        if given.out is not None:
            given.out.write_text(json.dumps(found) + "\n")
    report(found)


def measure(found: dict[str, Any], all_rows: Any, end: float) -> Iterator[None]:
    """Fills in what is found; yields after every case."""
    begin, size = time.monotonic(), all_rows.shape[1]
    few, period = all_rows[:CHECKED], min(PERIOD, size)
    wide = jax.random.normal(jax.random.key(0), (period, size), jnp.bfloat16) / size**0.5
    tall = jnp.tile(wide, (size // period, 1))
    weights = {"": weight([tall, jnp.roll(tall, period, 0)], wide, few)}
    cases: list[tuple[int, str, Future[Case]]] = []
    with ThreadPoolExecutor(14) as pool:
        for scheme in ("", *SCHEMES):
            if scheme:
                weights[scheme] = weight_of(scheme, few)
            way, copies = ours if scheme else xla, weights[scheme].copies
            for m in ROWS_OF_X:
                cases.append((m, scheme, pool.submit(compiled, way, all_rows[:m], copies)))
        # Nothing is compiled beside a measurement: the threads would hold up the calls.
        wait([case[-1] for case in cases], timeout=(end - time.monotonic()) * 2 / 3)
        pool.shutdown(cancel_futures=True)
    print(f"compiled: {time.monotonic() - begin:.0f} s", flush=True)
    found["kernel"] = str(pq.explain("matmul", few, weights[SCHEMES[0]].copies[0].mT).kernel)
    for m, scheme, waiting in sorted(cases, key=lambda case: ROWS_OF_X.index(case[0])):
        late = waiting.cancelled() or time.monotonic() > end
        got = (
            {"failed": "no time left"} if late else outcome(waiting, all_rows[:m], weights[scheme])
        )
        (found["schemes"][scheme] if scheme else found["bf16"])[m] = got
        yield
    for (scheme, m), times in torch_us(size, end):
        found["schemes"][scheme][m] |= times
        yield
    print(f"measured: {time.monotonic() - begin:.0f} s", flush=True)


def torch_us(size: int, end: float) -> Iterator[tuple[tuple[str, int], dict[str, float]]]:
    """Times of the same kernels under torch, which are compiled already."""
    if find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        return
    from polyquant.backends.torch.cuda import mma, nvrtc, tune

    enqueue = nvrtc._enqueue

    def time_us(calls: list[Any], *, early: bool) -> float:
        def as_asked(*launch: Any) -> int:
            *given, may_be_early = launch
            return int(enqueue(*given, may_be_early and early))

        with mock.patch.object(nvrtc, "_enqueue", as_asked):
            return round(tune.graph_us(calls, CALLS), 2)

    place = torch.device("cuda:0")
    for scheme in SCHEMES:
        copies = [weight.mT for weight in tune.copies(scheme, size, size, place)]
        for m in ROWS_OF_X:
            if time.monotonic() > end:
                return
            x, y = (torch.randn(m, size, device=place).to(torch.bfloat16) for _ in range(2))
            calls = [partial(mma.multiply, x, weight, y, None) for weight in copies]
            ways = {"torch_us": True, "torch_in_turn_us": False}
            yield (scheme, m), {name: time_us(calls, early=early) for name, early in ways.items()}


def report(found: dict[str, Any]) -> None:
    """A line per scheme: us (XLA's bf16, torch's launches and torch's in turn, over ours)."""
    print(f"{found['device']}, jax {found['jax']}, {found['size']} x {found['size']}; us")
    print("rows of x".ljust(12), *(str(m).rjust(26) for m in ROWS_OF_X))
    lines = {"bf16, XLA": found["bf16"], **found["schemes"]}
    for name, by_rows in lines.items():
        cells = []
        for m in ROWS_OF_X:
            case, base = by_rows.get(m, {}), found["bf16"].get(m, {}).get("us")
            own, others = case.get("us"), [case.get("torch_us"), case.get("torch_in_turn_us")]
            bases = [*([] if by_rows is found["bf16"] else [base]), *others]
            notes = [f"{each / own:.2f}" for each in bases if own and each]
            cells.append(f"{own or 'failed'}" + (f" ({'; '.join(notes)})" if notes else ""))
        print(name.ljust(12), *(cell.rjust(26) for cell in cells))
    for name, by_rows in lines.items():
        for m, case in by_rows.items():
            if "failed" in case:
                print("FAILED", name, m, case["failed"][:200].replace("\n", " "))


if __name__ == "__main__":
    main()
