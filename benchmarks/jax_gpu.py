"""Products of few bf16 rows by a quantized weight in JAX on a GPU, beside XLA's own bf16 product.

A time is that of one product in a jitted loop over several copies of the weight (at least 240 MB,
so that weights come from memory), in which each product takes the result of the one before it: the
median of several calls, divided by the products in one. What a kernel needs besides, a permutation
of x and a sum of slices, is in it. Every choice of tiles is first compared with the definition on
the same codes; one that fails, or is not compiled, is recorded with its reason.

    python benchmarks/jax_gpu.py [--out benchmarks/results/jax_gpu.json] [--seconds 80]
    JAX_PLATFORMS=cpu PYTHONPATH=tests python benchmarks/jax_gpu.py --interpret --size 256
        (a trial without a GPU)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import polyquant as pq
from polyquant.backends.jax.pallas import mma, product
from polyquant.backends.jax.pallas.product import Tiles

SCHEMES = ("q4s-32", "nf4", "mxfp4", "nvfp4", "q8s-row", "fp8-row", "q2s/64:f16")
ROWS_OF_X = (1, 4, 16, 32, 64)
Cut = Tiles | mma.Tiles
COPIES_BYTES = 240e6
#: Products in one timed call, about, and calls.
PRODUCTS, CALLS = 128, 7
#: A product that takes longer is not timed again.
HOPELESS_US = 400.0
#: Of so many rows is the weight made, again and again, so that its product is quickly checked.
PERIOD = 1024


def few(rows: int, line: int, warps: int = 4) -> Tiles:
    return Tiles(rows, line, warps=warps)


def dots(rows: int, line: int, slices: int, warps: int = 4, stages: int = 3) -> Tiles:
    return Tiles(rows, line, slices, warps, stages, dots=True)


def candidates(m: int, bits: int, block: int, *, is_table: bool) -> Iterator[Cut | None]:
    """Ways to cut a product, of blocks of so many bytes; None stands for the kernel's own."""
    yield None
    step, stages = 16 * bits, 1 if is_table else 3
    if m == 1:
        yield few(2, 2048)
    elif m > 32:
        yield dots(64, 2 * step if is_table else step, 8, 4, stages)
        yield dots(64, step, 4, 4, stages)._replace(left=False)
    elif m > 16:
        yield from (dots(64, step, 8, 4, stages), mma.Tiles(runs=1))
    else:
        yield from (mma.Tiles(), mma.Tiles(runs=4), mma.Tiles(warps=16, runs=1))
        if block >= 16:
            yield from (mma.Tiles(4, runs=1, width=16), mma.Tiles(width=16))
            yield from (mma.Tiles(4, width=16), mma.Tiles(runs=1, width=16))


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
    begin = time.perf_counter()
    jax.block_until_ready(case.many(x, copies))
    first = (time.perf_counter() - begin) / case.products * 1e6
    if first > HOPELESS_US:
        return first
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        # The second is queued while the first runs, which hides most of the way from Python.
        jax.block_until_ready([case.many(x, copies) for _ in range(2)])
        times.append((time.perf_counter() - begin) / 2 / case.products)
    return median(times) * 1e6


def xla(x: Any, w: Any) -> Any:
    return x @ w.T


def ours(tiles: Cut | None, interpret: bool, x: Any, w: Any) -> Any:
    return product.matmul(x, w.mT, x.dtype, tiles=tiles, interpret=interpret)


def outcome(waiting: Future[Case], x: Any, weight: Weight) -> dict[str, Any]:
    """The time of a case, or why there is none."""
    try:
        case = waiting.result()
        check(case.one(x, weight.copies[0]).astype(jnp.float32), weight)
        return {"us": round(timed_us(case, x, weight.copies), 2)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the other cases run
        return {"failed": f"{type(error).__name__}: {error}"[:600]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=80.0, help="two thirds to compile in")
    parser.add_argument("--size", type=int, default=8192, help="extents of the weight")
    parser.add_argument("--interpret", action="store_true", help="without a GPU: a trial only")
    given = parser.parse_args()
    if given.interpret:
        product.plgpu.elementwise_inline_asm = import_module("ptx").elementwise_inline_asm
    end = time.monotonic() + given.seconds
    device = jax.devices()[0]
    found: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "size": given.size,
        "bf16": {},
        "schemes": {},
    }
    rng = np.random.default_rng(1)
    all_rows = jnp.asarray(rng.standard_normal((64, given.size), dtype=np.float32), jnp.bfloat16)
    for _ in measure(found, all_rows, end, interpret=given.interpret):
        if given.out is not None:
            given.out.write_text(json.dumps(found) + "\n")
    report(found)


def measure(found: dict[str, Any], all_rows: Any, end: float, *, interpret: bool) -> Iterator[None]:
    """Fills in what is found; yields after every case."""
    begin, size = time.monotonic(), all_rows.shape[1]
    period = min(PERIOD, size)
    wide = jax.random.normal(jax.random.key(0), (period, size), jnp.bfloat16) / size**0.5
    tall = jnp.tile(wide, (size // period, 1))
    dense = weight([tall, jnp.roll(tall, period, 0)], wide, all_rows)
    weights: dict[str, Weight] = {}
    for scheme in SCHEMES:
        try:
            weights[scheme] = weight_of(scheme, all_rows)
        except Exception as error:  # noqa: BLE001 - recorded like a case that fails
            found["schemes"][scheme] = {"failed": f"{type(error).__name__}: {error}"[:600]}
    jax.block_until_ready([dense.copies, [w.copies for w in weights.values()]])
    print(f"weights: {time.monotonic() - begin:.0f} s", flush=True)

    # In the order in which they are worth having: XLA, the tiles that come by themselves, others.
    tries = [
        (rank, m, scheme, tiles)
        for m in ROWS_OF_X
        for scheme in weights
        for rank, tiles in enumerate(candidates(m, **_facts(scheme)))
    ]
    tries.sort(key=lambda case: case[0])
    cases: list[tuple[int, str, Cut | None, Weight, Future[Case]]] = []
    with ThreadPoolExecutor(14) as pool:
        for m in ROWS_OF_X:
            waiting = pool.submit(compiled, xla, all_rows[:m], dense.copies)
            cases.append((m, "", None, dense, waiting))
        for _, m, scheme, tiles in tries:
            way, held = partial(ours, tiles, interpret), weights[scheme]
            waiting = pool.submit(compiled, way, all_rows[:m], held.copies)
            cases.append((m, scheme, tiles, held, waiting))
        # Nothing is compiled beside a measurement: the threads would hold up the calls.
        wait([case[-1] for case in cases], timeout=(end - time.monotonic()) * 2 / 3)
        pool.shutdown(cancel_futures=True)
    print(f"compiled: {time.monotonic() - begin:.0f} s", flush=True)
    for m, scheme, tiles, held, waiting in cases:
        late = waiting.cancelled() or time.monotonic() > end
        got = {"failed": "no time left"} if late else outcome(waiting, all_rows[:m], held)
        if scheme:
            way = {} if tiles is None else {"way": tiles.__class__.__module__.rpartition(".")[2]}
            got = {"tiles": "default" if tiles is None else tuple(tiles), **way, **got}
            found["schemes"].setdefault(scheme, {}).setdefault(m, []).append(got)
        else:
            found["bf16"][m] = got
        yield
    print(f"measured: {time.monotonic() - begin:.0f} s", flush=True)


def _facts(scheme: str) -> dict[str, Any]:
    made = pq.scheme(scheme)
    block = 16 if made.block is None or made.block[-1] == -1 else made.block[-1] * made.bits // 8
    return {"bits": made.bits, "is_table": made.table is not None, "block": min(block, 16)}


def report(found: dict[str, Any]) -> None:
    """A line per scheme: us by itself / the best of those tried (speed-up of the best over XLA)."""
    print(f"{found['device']}, jax {found['jax']}, {found['size']} x {found['size']}; us")
    print("rows of x".ljust(12), *(str(m).rjust(26) for m in ROWS_OF_X))
    print(
        "bf16, XLA".ljust(12),
        *(str(found["bf16"][m].get("us", "failed")).rjust(26) for m in ROWS_OF_X),
    )
    failures = [("bf16", m, "", case) for m, case in found["bf16"].items() if "failed" in case]
    for scheme, by_rows in found["schemes"].items():
        if "failed" in by_rows:
            failures.append((scheme, "", "", by_rows))
        cells = []
        for m in ROWS_OF_X:
            cases = by_rows.get(m, [])
            best = min((c for c in cases if "us" in c), key=lambda c: c["us"], default=None)
            failures += [(scheme, m, c["tiles"], c) for c in cases if "failed" in c]
            if best is None:
                cells.append("failed")
                continue
            own, base = cases[0].get("us", "failed"), found["bf16"][m].get("us")
            gain = f" ({base / best['us']:.2f})" if base else ""
            cells.append(f"{own} / {best['us']}{gain}")
        print(scheme.ljust(12), *(cell.rjust(26) for cell in cells))
    for scheme, by_rows in found["schemes"].items():
        for m in ROWS_OF_X:
            made = [c for c in by_rows.get(m, []) if "us" in c]
            print(scheme, m, "  ".join(f"{c['tiles']}: {c['us']}" for c in made))
    for scheme, m, tiles, case in failures:
        print("FAILED", scheme, m, tiles, case["failed"][:200].replace("\n", " "))


if __name__ == "__main__":
    main()
