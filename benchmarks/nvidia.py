"""Products, quantizing and dequantizing on an NVIDIA GPU, beside cuBLAS and what else torch brings.

Times are medians of replays of a CUDA graph that holds one call for each of several copies of the
weight (at least 240 MB, so that weights come from memory), divided by the number of calls; random
normal data. Speed-up is over ``F.linear`` in bf16 (cuBLAS), whose graph takes turns with ours, as
those of other libraries do (a GPU's clock moves by some percent); the floor is the time that the
weight's bytes take at the read bandwidth measured in the same run.

Where ``humming-kernels``, ``bitsandbytes`` and ``gemlite`` are installed, their kernels are timed
beside ours.

    python benchmarks/nvidia.py [--out benchmarks/results/cuda.json] [--quick]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import rivals_cuda
import torch
from machine import versions
from rivals_cuda import copies_of

import polyquant as pq
from polyquant.backends.torch.cuda.tune import captured, graph_us, replayed_us
from polyquant.dispatch import kernels

PLACE = torch.device("cuda:0")
OURS, CUBLAS, REPLAYS = "ours", "cublas", 7
SHAPES = ((8192, 8192), (4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672))
ROWS_OF_X = (1, 2, 4, 16, 64, 128, 256, 512, 2048, 4096)
#: Measured at every shape; those of WITH_BARS and the other presets at the first one.
SCHEMES = (
    "q4s-32",
    "u4/32:f16-zero:u4",
    "nf4",
    "mxfp4",
    "nvfp4",
    "q8s-row",
    "fp8-row",
    "q2s/64:f16",
)
WITH_BARS = ("q8s-32", "mxfp8", "q3s/64:f16")
#: Quantized and dequantized besides SCHEMES; and looked up, as tables of EMBEDDING.
CONVERTED = (
    "q8s-32", "q8s-tensor", "fp8-128x128", "q4s/2x16:f16", "mxfp6-e3m2", "mxfp8", "q3s/64:f16",
    "u4/64:f16+bias:f16", "nf4-double", "u4/32:(u6/8:f16)+bias:(q6s/8:f16)",
)  # fmt: skip
LOOKED_UP = ("q4s-32", "u4/32:f16-zero:u4", "nf4", "nf4-double", "mxfp4", "q8s-row")
EMBEDDING, INDICES = (128256, 4096), (1, 64, 4096)
PAIRS = (
    ("fp8-tensor", "fp8-tensor"),
    ("fp8-row", "fp8-row"),
    ("e4m3/1x128:f32", "fp8-128x128"),
    ("q8s-row", "q8s-row"),
    ("q8s-row", "q4s-row"),
    ("fp8-row", "q4s/128:f16"),
    ("fp8-row", "mxfp4"),
    ("q8s-32", "q4s-32"),
    ("q8s-row", "nf4"),
    ("nvfp4", "nvfp4"),
)
#: Speed-ups over cuBLAS bf16 at the first shape that were set beforehand, by rows of x.
BARS: dict[tuple[str, ...], dict[int, float]] = {
    ("q4s-32", "u4/32:f16-zero:u4"): {1: 2.7, 4: 2.3, 16: 1.95, 64: 1.5, 256: 1.0, 4096: 1.0},
    ("nf4", "mxfp4", "nvfp4"): {1: 2.4, 4: 2.1, 16: 1.8, 64: 1.4, 256: 0.95, 4096: 0.97},
    ("q8s-row", "q8s-32", "fp8-row", "mxfp8"): {
        1: 1.75, 4: 1.7, 16: 1.6, 64: 1.4, 256: 1.0, 4096: 1.0,
    },
    ("q2s/64:f16", "q3s/64:f16"): {1: 3.0, 4: 2.5, 16: 2.0, 64: 1.4, 256: 0.9, 4096: 0.95},
    ("fp8-tensor x fp8-tensor", "fp8-row x fp8-row", "e4m3/1x128:f32 x fp8-128x128"): {
        1: 1.8, 4: 1.8, 16: 1.75, 64: 1.7, 256: 1.8, 4096: 1.8,
    },
    ("q8s-row x q8s-row",): {1: 1.7, 4: 1.65, 16: 1.6, 64: 1.6, 256: 1.4, 4096: 1.25},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--quick", action="store_true", help="the first shape, fewer schemes")
    arguments = parser.parse_args()
    begin = time.monotonic()
    made: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(PLACE),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions() | {"cuda": torch.version.cuda, "triton": triton_version()},
        "ceilings": measure_ceilings(),
        "host_us": measure_host(),
        "products": [],
        "rivals_failed": {},
    }
    first, *further = SHAPES
    made["products"] += measure_products(*first, (*SCHEMES, *WITH_BARS), made)
    write(made, arguments.out, begin)
    made["both_quantized"] = measure_pairs(*first, made)
    write(made, arguments.out, begin)
    made["conversions"] = [measure_conversions(each) for each in (*SCHEMES, *CONVERTED)]
    made["embeddings"] = measure_embeddings()
    write(made, arguments.out, begin)
    report(made)
    if arguments.quick:
        return
    for shape in further:
        made["products"] += measure_products(*shape, SCHEMES, made)
        write(made, arguments.out, begin)
    known = {pq.scheme(s) for s in (*SCHEMES, *WITH_BARS)}
    presets = [name for name in pq.presets() if pq.scheme(name) not in known]
    made["products"] += measure_products(*first, presets, made)
    write(made, arguments.out, begin)


def write(made: dict[str, Any], path: Path | None, begin: float) -> None:
    """What has been measured so far."""
    made["bars"] = bars([*made["products"], *made.get("both_quantized", ())])
    print(f"{len(made['products'])} products, {time.monotonic() - begin:.0f} s", flush=True)
    if path is not None:
        lines = json.dumps(made, separators=(",", ":")).replace('},{"', '},\n{"')
        path.write_text(lines + "\n", encoding="utf-8")


def triton_version() -> str:
    import triton

    return str(triton.__version__)


def time_us(calls: Sequence[Callable[[], Any]]) -> float:
    return round(graph_us(calls, REPLAYS), 2)


def measure_ceilings() -> dict[str, float]:
    """Read (a sum) and copy bandwidth, GB/s, over 2 GB, and an empty kernel in a graph, us.

    What copies is a kernel (it turns signs around): a graph's own copy of memory is slower.
    """
    x = torch.randn(1 << 28, device=PLACE)
    y = torch.empty_like(x)
    rows = x.view(1 << 14, -1)
    tiny = torch.zeros(1, device=PLACE)
    return {
        "read_gb_s": round(x.nbytes / time_us([lambda: rows.sum(1)] * 3) / 1e3),
        "copy_gb_s": round(2 * x.nbytes / time_us([lambda: torch.neg(x, out=y)] * 3) / 1e3),
        "empty_us": time_us([lambda: tiny.add_(1)] * 50),
    }


def inputs(k: int) -> dict[int, torch.Tensor]:
    return {m: torch.randn(m, k, device=PLACE).to(torch.bfloat16) for m in ROWS_OF_X}


def measured(
    scheme: str,
    sizes: tuple[int, int, int],
    calls: dict[str, Sequence[Callable[[], Any]]],
    made: dict[str, Any],
) -> dict[str, Any]:
    """A row of the results: our product (the first of ``calls``), cuBLAS's, and what is beside."""
    graphs = {}
    for name, each in calls.items():
        try:
            graphs[name] = captured(each)
        except rivals_cuda.FAILURES as error:
            if name in (OURS, CUBLAS):
                raise
            made["rivals_failed"][f"{name} {scheme} {sizes}"] = rivals_cuda.words(error)
    times = zip(graphs, replayed_us(list(graphs.values()), REPLAYS), strict=True)
    found = {name: round(us / len(calls[name]), 2) for name, us in times}
    us, cublas_us = found.pop(OURS), found.pop(CUBLAS)
    row = dict(zip("nkm", sizes, strict=True)) | {"us": us, "cublas_us": cublas_us}
    row = {"scheme": scheme, **row, "speedup": round(cublas_us / us, 2)}
    return row | ({"rivals_us": found} if found else {})


def measure_products(
    n: int, k: int, schemes: Sequence[str], made: dict[str, Any]
) -> list[dict[str, Any]]:
    """Every scheme beside cuBLAS, and at the first shape beside its rivals."""
    read_gb_s = made["ceilings"]["read_gb_s"]
    xs, rows, linear = inputs(k), [], bf16_calls(n, k)
    for scheme in schemes:
        weights = [q.mT for q in copies(scheme, n, k)]
        side_by_side(partial(pq.matmul, b=weights[0]), xs.values())
        is_first, rivals = (n, k) == SHAPES[0], {}
        if is_first:
            rivals = rivals_cuda.products(scheme, n, k, made["rivals_failed"])
        for m, x in xs.items():
            calls = {OURS: [partial(pq.matmul, x, w) for w in weights], CUBLAS: linear(x)}
            for name, (products, worth) in rivals.items():
                if m in worth:
                    calls[name] = [partial(product, x) for product in products]
            row = measured(scheme, (n, k, m), calls, made)
            size = weights[0].nbytes
            row["mbytes"] = round(size / 1e6, 1)
            row["floor_us"] = round(size / read_gb_s / 1e3, 2)
            row["of_read_percent"] = round(100 * size / row["us"] / 1e3 / read_gb_s, 1)
            row["kernel"] = pq.explain("matmul", x, weights[0]).kernel
            rows.append(row)
    return rows


def bf16_calls(n: int, k: int) -> Callable[[torch.Tensor], list[Callable[[], Any]]]:
    """``F.linear`` of a tensor by each of several weights in bf16."""
    floats = [
        torch.randn(n, k, device=PLACE).to(torch.bfloat16) for _ in range(copies_of(2 * n * k))
    ]
    return lambda x: [partial(torch.nn.functional.linear, x, w) for w in floats]


def side_by_side(call: Callable[[Any], Any], each: Iterable[Any]) -> None:
    """Call once with each, so that kernels are compiled at the same time."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(call, each))


def copies(scheme: str, n: int, k: int) -> list[pq.QTensor]:
    """A random weight, as often as it takes to be read from memory each time."""
    q = pq.quantize(torch.randn(n, k, device=PLACE), scheme)
    return [q, *(q._map(lambda a: a.clone(), q.device) for _ in range(copies_of(q.nbytes) - 1))]


def measure_pairs(n: int, k: int, made: dict[str, Any]) -> list[dict[str, Any]]:
    """Both operands quantized, the activations beforehand; torch's own products beside them."""
    xs, rows, linear = inputs(k), [], bf16_calls(n, k)
    product = partial(pq.matmul, out_dtype="bfloat16")
    for left, right in PAIRS:
        weights = [q.mT for q in copies(right, n, k)]
        entering = {m: pq.quantize(x, left) for m, x in xs.items()}
        side_by_side(partial(product, b=weights[0]), entering.values())
        for m, a in entering.items():
            calls = {OURS: [partial(product, a, w) for w in weights], CUBLAS: linear(xs[m])}
            calls |= rivals_cuda.of_pair(left, a, weights)
            row = measured(f"{left} x {right}", (n, k, m), calls, made)
            kernel = pq.explain("matmul", a, weights[0], out_dtype="bfloat16").kernel
            rows.append(row | {"kernel": kernel})
    return rows


def measure_conversions(scheme: str) -> dict[str, Any]:
    """Quantizing and dequantizing 8192 x 8192: GB/s of what is read and written, ``x`` once.

    ``call_*_us``: a call of ``pq.quantize``, which looks for NaN and waits.
    """
    n, k = SHAPES[0]
    found: dict[str, Any] = {"scheme": scheme}
    for kind in ("float32", "bfloat16"):
        xs = [torch.randn(n, k, device=PLACE).to(getattr(torch, kind)) for _ in range(3)]
        q = pq.quantize(xs[0], scheme)
        moved = q.nbytes + xs[0].nbytes
        us = time_us([lambda: q.dequantize(kind)] * 3)  # noqa: B023
        found[f"dequantize_{kind}_gb_s"] = round(moved / us / 1e3)
        kernel = "torch.nvrtc.quantize"
        if pq.supports("torch:cuda:0", scheme, "quantize").kernel == kernel:
            from polyquant.backends.torch.cuda import encode

            table = q.table
            made = pq.scheme(scheme)
            us = time_us([lambda x=x: encode.quantize(x, made, "minmax", table=table) for x in xs])  # noqa: B023
            found[f"quantize_{kind}_gb_s"] = round(moved / us / 1e3)
        found[f"call_{kind}_us"] = wall_us(lambda: pq.quantize(xs[0], scheme), 30)  # noqa: B023
    return found


def wall_us(call: Callable[[], Any], rounds: int) -> float:
    """The median of what a call takes that waits for the GPU."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return round(median(times) * 1e6, 1)


def measure_embeddings() -> list[dict[str, Any]]:
    """Rows of a table looked up in bf16, other ones each time; beside ``F.embedding`` in bf16."""
    table = torch.randn(EMBEDDING, device=PLACE).to(torch.bfloat16)
    lists = {
        n: [torch.randint(0, len(table), (n,), device=PLACE) for _ in range(20)] for n in INDICES
    }
    lookup = torch.nn.functional.embedding
    bf16_us = {n: time_us([lambda i=i: lookup(i, table) for i in ids]) for n, ids in lists.items()}
    kernel = {k.name: k for k in kernels("torch", "cuda")}["torch.triton.embedding"]
    rows = []
    for scheme in LOOKED_UP:
        q = pq.quantize(table, scheme)
        for n, ids in lists.items():
            us = time_us([lambda i=i: kernel.run(i, q, torch.bfloat16) for i in ids])  # noqa: B023
            moved = n * (q.nbytes / len(table) + table[0].nbytes)
            row = {"scheme": scheme, "indices": n, "us": us, "bf16_us": bf16_us[n]}
            rows.append(row | {"gb_s": round(moved / us / 1e3)})
    return rows


def measure_host() -> dict[str, float]:
    """What a call costs the processor, us: medians of calls that the GPU never makes wait.

    They take turns, after five seconds of them: a processor that slept takes up to twice as long.
    """
    x = torch.randn(1, 1024, device=PLACE).to(torch.bfloat16)
    w = torch.randn(1024, 1024, device=PLACE)
    q, wb = pq.quantize(w, "q4s-32").mT, w.to(torch.bfloat16)
    calls = {
        "F.linear": lambda: torch.nn.functional.linear(x, wb),
        "pq.matmul": lambda: pq.matmul(x, q),
        "x @ q": lambda: x @ q,
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + 5
    while time.perf_counter() < end:
        for call in calls.values():
            call()
    for _ in range(300):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: round(median(each) * 1e6, 1) for name, each in times.items()}


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each bar, and whether the figure meets it."""
    first = [row for row in rows if (row["n"], row["k"]) == SHAPES[0]]
    at = {(row["scheme"], row["m"]): row["speedup"] for row in first}
    return [
        {"scheme": s, "m": m, "bar": bar, "speedup": at[s, m], "met": at[s, m] >= bar}
        for names, wanted in BARS.items()
        for s in names
        for m, bar in wanted.items()
        if (s, m) in at
    ]  # fmt: skip


def report(made: dict[str, Any]) -> None:
    n, k = SHAPES[0]
    print(f"{made['gpu']}, {n} x {k}, us (speed-up)", made["host_us"])
    for scheme in dict.fromkeys(
        row["scheme"] for row in [*made["products"], *made["both_quantized"]]
    ):
        rows = [r for r in [*made["products"], *made["both_quantized"]] if r["scheme"] == scheme]
        cells = [
            f"{r['m']}: {r['us']:.1f} ({r['speedup']:.2f}) {r.get('rivals_us', '')}"
            for r in rows
            if (r["n"], r["k"]) == (n, k)
        ]
        print(f"  {scheme}: " + "  ".join(cells))
    for row in made["conversions"]:
        print("  ", row)
    for row in made["embeddings"]:
        print("  ", row)
    met = sum(bar["met"] for bar in made["bars"])
    print(f"bars met: {met} of {len(made['bars'])}")


if __name__ == "__main__":
    main()
