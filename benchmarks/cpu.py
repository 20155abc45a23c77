"""The CPU kernels beside NumPy, torch, bitsandbytes, MLX and ggml: time, GB/s, bars.

For every scheme: products with float activations and a weight stored (out, in), as in x @ q.mT, or
(in, out), as in x @ q; products with activations quantized to 8 bits; quantize, dequantize, lookup.
How it is measured is in cpu_measure.py, and what is measured against (and how that is installed) in
rivals.py and rival_ggml.py; a rival that is missing is named. Each number of threads is a process
of its own. GB/s count the stored weight, and are set against what the same process read of memory.

    python benchmarks/cpu.py                 # everything: about 40 minutes a number of threads
    python benchmarks/cpu.py --quick         # one shape, M = 1 and 16
    python benchmarks/cpu.py --only q4s-32 --threads 1 --target avx2
    python benchmarks/cpu.py --merge some.json more.json    # runs in pieces, as one
    python benchmarks/cpu.py --add --seconds 60 --best      # what the results lack; again for more

With --add every scheme is a process of its own, whose products are in --out before the next begins;
one in which NumPy took unusually long counts as lacking. With --best a bar has one rival: the one
that was the quickest so far. With several threads a product has a gain: what as many loops of dot
products did just before, over what one does (cpu_measure.Yardstick). Where that was little for any
of its contenders, it counts as lacking too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from machine import cpu_flags, describe, versions

import polyquant as pq

SHAPES = ((4096, 4096), (11008, 4096))
ROWS = (1, 4, 16, 128, 512)
THREADS = (1, 2)
ROUNDS = 7
#: Over NumPy's usual time, a product was measured while something else ran.
DISTURBED = 1.4
#: Threads whose gain is a smaller part of their number had less than a core each.
WORTH = 0.7
PACKAGES = ("bitsandbytes", "mlx", "libggml-python", "ik-llama-cpp-python")

#: ggml's k-quants as schemes.
_K_QUANTS = MappingProxyType(
    {
        "Q2_K": "u2/16:(u4/16:f16)+bias:(u4/16:f16)",
        "Q3_K": "q3f/16:(q6f/16:f16)",
        "Q4_K": "u4/32:(u6/8:f16)+bias:(u6/8:f16)",
        "Q5_K": "u5/32:(u6/8:f16)+bias:(u6/8:f16)",
        "Q6_K": "q6f/16:(q8f/16:f16)",
    }
)
#: Besides the presets: zero points, biases, odd widths, and k-quants.
MORE = (
    "u4/32:f16-zero:u4",
    "u4/32:f16+bias:f16",
    "q3s/32:f16",
    "q5s/32:f16",
    "q6s/32:f16",
    *_K_QUANTS.values(),
)
_EIGHT = "q8s/32:f32"
#: Scheme of a weight -> that of the activations of products of two quantized operands.
ACTIVATIONS = MappingProxyType(
    {name: _EIGHT for name in ("q8s-32", "q4s-32", "q2s-32", "nf4", "iq4_nl", "mxfp4")}
    | {"int8": "q8s/row:f32"}
)


def _kinds(*names: str) -> tuple[str, ...]:
    """The types of ggml and of its fork, as they are stored and repacked."""
    forms = ("", " repacked")
    return tuple(
        f"{lib} {kind}{form}" for kind in names for lib in ("ggml", "ik") for form in forms
    )


_PLAIN = "numpy f32"
#: Scheme -> what it is measured beside, besides NumPy's float32 product.
RIVALS_OF = MappingProxyType(
    {
        "q4s-32": ("torch f32", "torch int4pack", "mlx 4 bit", *_kinds("Q4_0")),
        "nf4": ("bitsandbytes nf4", *_kinds("IQ4_NL")),
        "iq4_nl": _kinds("IQ4_NL"),
        "mxfp4": _kinds("MXFP4"),
        "nvfp4": ("ggml NVFP4",),
        "q8s-32": ("torch int8pack", "torch dynamic int8", "mlx 8 bit", *_kinds("Q8_0")),
        "int8": ("torch int8pack", "torch dynamic int8"),
        "q2s-32": ("mlx 2 bit",),
        "q3s/32:f16": ("mlx 3 bit",),
        "q5s/32:f16": ("mlx 5 bit",),
        "q6s/32:f16": ("mlx 6 bit",),
    }
    | {scheme: _kinds(kind) for kind, scheme in _K_QUANTS.items()}
)


# -- bars -------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """What a product may take at most, over the best of some rivals, by the rows of x."""

    rivals: tuple[str, ...]
    limits: tuple[float, ...]


_EXACT = MappingProxyType(
    {
        "4 bits": Bar((_PLAIN,), (0.42, 0.40, 0.75, 0.95, 1.0)),
        "8 bits": Bar((_PLAIN,), (0.50, 0.45, 0.75, 0.95, 1.0)),
        "other": Bar((_PLAIN,), (0.55, 0.55, 0.90, 1.0, 1.05)),
    }
)
_LOOKUP = Bar(_kinds("IQ4_NL"), (0.85, 1.0, 1.0, 1.0, 1.0))
_INTEGER = MappingProxyType(
    {
        "q4s-32": Bar(_kinds("Q4_0"), (0.85, 1.0, 1.0, 1.0, 1.0)),
        "nf4": _LOOKUP,
        "iq4_nl": _LOOKUP,
        "q8s-32": Bar(_kinds("Q8_0"), (0.9,) * len(ROWS)),
    }
)
#: GB/s of float32 with one thread, at least.
_RATES = MappingProxyType(
    {"q4s-32": 5.0, "q4s-row": 5.0, "q8s-32": 5.0, "q8s-row": 5.0, "mxfp4": 5.0, "nf4": 3.0}
)
_DEQUANTIZE = 8.0


def group(scheme: str) -> str:
    """Which bar a scheme has with float activations."""
    made = pq.scheme(scheme)
    is_nested = isinstance(made.scale, pq.QuantScheme)
    return f"{made.bits} bits" if made.bits in (4, 8) and not is_nested else "other"


def judge(rows: Sequence[dict[str, Any]], dram: dict[str, float]) -> None:
    """Add to each row its share of the memory's speed, its ratios, and its bar."""
    times = {(_place(row), row["name"]): row["time_ms"] for row in rows}
    for row in rows:
        row["dram_percent"] = 100 * row["gb_s"] / dram[str(row["threads"])]
        if row["name"] != "polyquant":
            continue
        beside = {name: ms for (place, name), ms in times.items() if place == _place(row)}
        del beside["polyquant"]
        row["ratios"] = {name: row["time_ms"] / ms for name, ms in beside.items()}
        bar = _bar_of(row)
        ratios = [row["ratios"][name] for name in bar.rivals if name in beside] if bar else []
        if bar is None or not ratios or row["m"] not in ROWS:
            continue
        limit, ratio = bar.limits[ROWS.index(row["m"])], max(ratios)
        name = f"{row['activations']} x {_bar_name(row)}, {row['order']}"
        row["bar"] = {"name": name, "limit": limit, "ratio": ratio, "met": ratio <= limit}


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("threads", "n", "k", "m", "scheme"))


def _bar_name(row: dict[str, Any]) -> str:
    return group(row["scheme"]) if _is_exact(row) else row["scheme"]


def _is_exact(row: dict[str, Any]) -> bool:
    return "float" in row["activations"].partition("/")[0]


def _bar_of(row: dict[str, Any]) -> Bar | None:
    if _is_exact(row):
        return _EXACT[group(row["scheme"])]
    return None if row["activations"].endswith("before") else _INTEGER.get(row["scheme"])


def judge_rates(rows: Sequence[dict[str, Any]]) -> None:
    """Add the bars of quantize and dequantize, which are of one thread."""
    for row in rows:
        limits = {"quantize": _RATES.get(row["scheme"]), "dequantize": _DEQUANTIZE}
        limit = limits.get(row["name"])
        if limit is not None and row["threads"] == 1:
            row["bar"] = {"limit": limit, "met": row["gb_s"] >= limit}


# -- what is printed --------------------------------------------------------------------------


def report(found: dict[str, Any]) -> Iterator[str]:
    """The results as lines: a cell is ms, GB/s, % of DRAM, and the ratio that the bar is about."""
    yield f"{found['machine']['cpu']} ({found['machine']['instructions']})"
    yield f"polyquant with {found['polyquant']}; memory read GB/s by threads: " + ", ".join(
        f"{threads}: {speed:.1f}" for threads, speed in found["dram_gb_s"].items()
    )
    yield from (f"{name} is built for {sets}" for name, sets in found["rivals"].items())
    for why in dict.fromkeys(found["missing"].values()):
        names = [name for name, reason in found["missing"].items() if reason == why]
        yield f"not measured: {', '.join(names)}: {why}"
    rows = found["products"]
    for threads, n, k in dict.fromkeys((row["threads"], row["n"], row["k"]) for row in rows):
        here = [r for r in rows if (r["threads"], r["n"], r["k"]) == (threads, n, k)]
        extents = list(dict.fromkeys(row["m"] for row in here))
        yield ""
        yield f"{n} x {k}, {threads} threads: ms, GB/s, % of DRAM, ratio of the bar (! not met)"
        yield f"{'':70}" + "".join(f"{f'M={m}':>27}" for m in extents)
        if gains := _gains(here):
            yield f"{'gain of the threads, as loops of dot products have it':70}" + "".join(
                f"{gains.get(m, ''):>27}" for m in extents
            )
        for label in dict.fromkeys(map(_label, here)):
            cells = {row["m"]: _cell(row) for row in here if _label(row) == label}
            yield f"{' | '.join(filter(None, label)):70}" + "".join(
                f"{cells.get(m, ''):>27}" for m in extents
            )
    yield ""
    yield from _report_rates(found["rates"])
    yield from _report_bars([*rows, *found["rates"]])


def _gains(rows: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Lowest, median and highest gain of the threads for each number of rows."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if "gain" in row:
            found.setdefault(row["m"], []).append(row["gain"])
    return {
        m: f"{min(some):.2f} {statistics.median(some):.2f} {max(some):.2f}"
        for m, some in found.items()
    }


def _label(row: dict[str, Any]) -> tuple[str, ...]:
    kernel = (row.get("kernel") or "").partition(".")[0]
    activations = "" if row["activations"] == "float32" else row["activations"]
    return row["scheme"], row["name"], row.get("order", ""), activations, kernel


def _cell(row: dict[str, Any]) -> str:
    bar = row.get("bar")
    ratio = "" if bar is None else f" {bar['ratio']:5.2f}{' ' if bar['met'] else '!'}"
    return f"{row['time_ms']:.2f} {row['gb_s']:5.1f} {row['dram_percent']:3.0f}%{ratio or ' ' * 7}"


def _report_rates(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    names = list(dict.fromkeys(row["name"] for row in rows))
    yield f"{'GB/s of float32':42}" + "".join(f"{name:>16}" for name in names)
    for threads, scheme in dict.fromkeys((row["threads"], row["scheme"]) for row in rows):
        cells = {
            row["name"]: f"{row['gb_s']:.2f}{'' if row.get('bar', {}).get('met', True) else '!'}"
            for row in rows
            if (row["threads"], row["scheme"]) == (threads, scheme)
        }
        label = f"{scheme}, {threads} threads"
        yield f"{label:42}" + "".join(f"{cells[name]:>16}" for name in names)


def _report_bars(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    judged = [row for row in rows if "bar" in row]
    unmet = [row for row in judged if not row["bar"]["met"]]
    wrong = [row for row in rows if row.get("error", 0) > 0.03]
    yield ""
    yield f"bars met: {len(judged) - len(unmet)} of {len(judged)}; each with its worst ratio:"
    for place, name in dict.fromkeys((_where(row), row["bar"].get("name")) for row in judged):
        these = [r for r in judged if (_where(r), r["bar"].get("name")) == (place, name)]
        if name is not None:
            yield f"{place:28}{name:34}" + "".join(map("{:>24}".format, _worst(these)))
    for row in wrong:
        yield f"WRONG by {row['error']:.3f}: {' | '.join(filter(None, _label(row)))} M={row['m']}"


def _where(row: dict[str, Any]) -> str:
    return f"{row['threads']} threads, {row['n']} x {row['k']}"


def _worst(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for m in dict.fromkeys(row["m"] for row in rows):
        here = [row["bar"] for row in rows if row["m"] == m]
        worst, met = max(bar["ratio"] for bar in here), sum(bar["met"] for bar in here)
        yield f"M={m} {worst:.2f}/{here[0]['limit']:.2f} {met} of {len(here)}"


# -- one process for each number of threads ---------------------------------------------------


def main() -> None:
    arguments = _parsed()
    if arguments.part is not None:
        work(arguments)
        return
    if arguments.merge:
        _write(merged([json.loads(path.read_text()) for path in arguments.merge]), arguments.out)
    elif arguments.add:
        add(arguments)
    else:
        _write(measured(arguments), arguments.out)


def add(arguments: argparse.Namespace) -> None:
    """Measure what the results lack and merge it into them, a process at a time."""
    end = time.monotonic() + arguments.seconds
    lacking: list[str] = []
    for threads, shape, scheme in product(arguments.threads, arguments.shapes, arguments.only):
        exists = arguments.out.exists()
        before = [json.loads(arguments.out.read_text(encoding="utf-8"))] if exists else []
        have = _undisturbed(before)
        m = [m for m in arguments.m if (threads, *shape, m, scheme) not in have]
        has_rates = any(_is_rate_of(row, threads, scheme) for run in before for row in run["rates"])
        if not m:
            continue
        place = f"{scheme} of {shape[0]} x {shape[1]}, {threads} threads, M={m}"
        if time.monotonic() > end:
            lacking.append(place)
            continue
        one = argparse.Namespace(**vars(arguments))
        one.threads, one.shapes, one.only, one.m = [threads], (shape,), [scheme], m
        one.no_rates = has_rates or shape != SHAPES[0]
        if arguments.best:
            one.rivals = _quickest(before, threads, scheme, m)
        run = measured(one)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(_json(merged([*before, run])), encoding="utf-8")
        print(f"measured: {place}", flush=True)
    print("\n".join(f"lacking: {place}" for place in lacking) or "nothing is lacking")


def _undisturbed(runs: Sequence[dict[str, Any]]) -> set[tuple[Any, ...]]:
    """The products of these runs in which NumPy's own took no longer than usual."""
    rows = [row for run in runs for row in run["products"] if row["name"] == _PLAIN]
    times: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        times.setdefault(_place(row)[:-1], []).append(row["time_ms"])
    usual = {place: statistics.median(some) for place, some in times.items()}
    alone = {_place(r) for run in runs for r in run["products"] if _shares_cores(r)}
    fine = {_place(r) for r in rows if r["time_ms"] <= DISTURBED * usual[_place(r)[:-1]]}
    return fine - alone


def _shares_cores(row: dict[str, Any]) -> bool:
    return row["threads"] > 1 and row.get("gain", 0) < WORTH * row["threads"]


def _is_rate_of(row: dict[str, Any], threads: int, scheme: str) -> bool:
    return (row["threads"], row["scheme"]) == (threads, scheme)


def _quickest(
    runs: Sequence[dict[str, Any]], threads: int, scheme: str, extents: Sequence[int]
) -> list[str]:
    """NumPy and, of the other rivals of a scheme's bar, the quickest for each number of rows."""
    bar = _INTEGER.get(scheme)
    found = {_PLAIN: None}
    rows = [r for run in runs for r in run["products"] if bar and r["name"] in bar.rivals]
    for m in extents if rows else ():
        near = min(abs(ROWS.index(r["m"]) - ROWS.index(m)) for r in rows)
        here = [r for r in rows if abs(ROWS.index(r["m"]) - ROWS.index(m)) == near]
        same = [r for r in here if r["threads"] == threads] or here
        found[min(same, key=lambda r: r["time_ms"] / r["n"])["name"]] = None
    return list(found)


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of one run."""
    parts = [_run(arguments, threads) for threads in arguments.threads]
    dram = {str(part["threads"]): part["dram_gb_s"] for part in parts}
    rows = [row for part in parts for row in part["products"]]
    rates = [row for part in parts for row in part["rates"]]
    judge(rows, dram)
    judge_rates(rates)
    installed = {**versions(), **versions(PACKAGES)}
    return {
        "machine": {
            **describe(),
            "threads": max(arguments.threads),
            "instructions": cpu_flags(),
        },
        "threads": arguments.threads,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **installed},
        "polyquant": parts[0]["polyquant"],
        "rivals": parts[0]["rivals"],
        "rounds": arguments.rounds,
        "dram_gb_s": dram,
        "missing": {name: why for part in parts for name, why in part["missing"].items()},
        "products": rows,
        "rates": rates,
    }


def _write(found: dict[str, Any], out: Path) -> None:
    print("\n".join(report(found)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_json(found), encoding="utf-8")
    print(f"Written: {out}")


def merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs on one machine as one, by the last of them; ratios stay those of the run that has both.

    A product (threads, extents, scheme) is taken whole, from the last run that has it.
    """
    found = dict(runs[-1])
    products = {_place(row): run for run in runs for row in run["products"]}
    found["products"] = [
        row for run in runs for row in run["products"] if products[_place(row)] is run
    ]
    schemes = list(dict.fromkeys(row["scheme"] for run in runs for row in run["products"]))
    found["products"].sort(
        key=lambda row: (row["n"], row["threads"], schemes.index(row["scheme"]), row["m"])
    )
    rates = {(*_place(row | {"m": 0}), row["name"]): row for run in runs for row in run["rates"]}
    found["rates"] = list(rates.values())
    for name in ("rivals", "missing"):
        found[name] = {key: value for run in runs for key, value in run[name].items()}
    threads = sorted({row["threads"] for row in found["products"]})
    found["threads"] = threads
    found["machine"] = found["machine"] | {"threads": max(threads)}
    speeds = [(int(n), speed) for run in runs for n, speed in run["dram_gb_s"].items()]
    found["dram_gb_s"] = {str(n): max(s for at, s in speeds if at == n) for n in threads}
    return found


def _run(arguments: argparse.Namespace, threads: int) -> dict[str, Any]:
    """The measurements with a number of threads, by a process that begins with it."""
    names = ("OMP", "OPENBLAS", "MKL", "PQ")
    environment = os.environ | {f"{name}_NUM_THREADS": str(threads) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [sys.executable, __file__, "--part", f"{threads}:{part}", *_as_options(arguments)]
        code = subprocess.run(command, env=environment, check=False).returncode
        if not part.exists():
            raise SystemExit(f"nothing was measured with {threads} threads (exit status {code})")
        if code:
            print(f"with {threads} threads it ended early (exit status {code})", file=sys.stderr)
        found: dict[str, Any] = json.loads(part.read_text(encoding="utf-8"))
    return found


def _as_options(arguments: argparse.Namespace) -> Iterator[str]:
    """What a process that measures is to know, as it is given."""
    yield from ("--shape", *(f"{n}x{k}" for n, k in arguments.shapes))
    yield from ("--m", *map(str, arguments.m))
    for name in ("only", "dtypes", "rivals"):
        if getattr(arguments, name) is not None:
            yield from (f"--{name}", *getattr(arguments, name))
    yield from ("--rounds", str(arguments.rounds))
    if arguments.target:
        yield from ("--target", arguments.target)
    if arguments.no_rates:
        yield "--no-rates"


def work(arguments: argparse.Namespace) -> None:
    """Measure in this process, and write after every scheme."""
    import cpu_measure

    threads, _, path = arguments.part.partition(":")
    settings = cpu_measure.Settings(
        int(threads),
        tuple(cpu_measure.Shape(*shape) for shape in arguments.shapes),
        tuple(arguments.m),
        tuple(arguments.only),
        dict(ACTIVATIONS),
        {
            scheme: tuple(
                name
                for name in (_PLAIN, *RIVALS_OF.get(scheme, ()))
                if arguments.rivals is None or name in arguments.rivals
            )
            for scheme in arguments.only
        },
        tuple(arguments.dtypes),
        arguments.rounds,
    )
    cpu_measure.set_threads(settings.threads)
    part: dict[str, Any] = {"threads": settings.threads, "missing": {}, "products": [], "rates": []}
    part["polyquant"] = cpu_measure.instructions(arguments.target)
    part["rivals"] = cpu_measure.rival_instructions()
    part["dram_gb_s"] = cpu_measure.dram_gb_s(settings.threads)
    for name, found in (
        ("products", cpu_measure.products(settings, part["missing"])),
        ("rates", () if arguments.no_rates else cpu_measure.rates(settings)),
    ):
        for rows in found:
            part[name] += rows
            Path(path).write_text(json.dumps(part), encoding="utf-8")
            print(f"{threads} threads, {name}: {rows[0]['scheme']}", file=sys.stderr, flush=True)
    part["dram_gb_s"] = max(part["dram_gb_s"], cpu_measure.dram_gb_s(settings.threads))
    Path(path).write_text(json.dumps(part), encoding="utf-8")


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = (*pq.presets(), *MORE)
    parser.add_argument("--quick", action="store_true", help="one shape, M = 1 and 16")
    parser.add_argument("--threads", type=int, nargs="+", default=list(THREADS))
    parser.add_argument("--only", nargs="+", default=list(every), metavar="SCHEME")
    parser.add_argument("--m", type=int, nargs="+", default=None)
    parser.add_argument("--shape", nargs="+", default=None, metavar="NxK")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="of the activations")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--target", help="an instruction set of polyquant's, such as avx2")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu.json")
    parser.add_argument("--rivals", nargs="+", help="no others than these", metavar="NAME")
    parser.add_argument("--no-rates", action="store_true", help="products alone")
    parser.add_argument("--add", action="store_true", help="only what the results lack")
    parser.add_argument("--best", action="store_true", help="with --add: one rival a bar")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="JSON", help="join these results")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    found = parser.parse_args()
    found.m = found.m or ((1, 16) if found.quick else ROWS)
    given = [tuple(map(int, text.split("x"))) for text in found.shape or ()]
    found.shapes = given or (SHAPES[:1] if found.quick else SHAPES)
    return found


def _json(found: dict[str, Any]) -> str:
    """One row a line, with four digits: thousands of rows."""

    def short(x: Any) -> Any:
        if isinstance(x, float):
            return float(f"{x:.4g}")
        if isinstance(x, dict):
            return {name: short(item) for name, item in x.items()}
        return x

    tables = ("products", "rates")
    head = json.dumps({k: v for k, v in found.items() if k not in tables}, indent=1)
    body = [
        f' "{name}": [\n'
        + ",\n".join(f"  {json.dumps(short(row))}" for row in found[name])
        + "\n ]"
        for name in tables
    ]
    return head.removesuffix("\n}") + ",\n" + ",\n".join(body) + "\n}\n"


if __name__ == "__main__":
    main()
