"""The measurements of cpu.py, in one process with one number of threads.

Products: the weights of every contender are rotated over at least 100 MB, so that they come from
memory and not from a cache. The contenders of one product take turns within every round, so that
what else the machine does hits them alike; a pause before each lets the threads of the one before
fall asleep, and one call that does not count wakes its own. Times are medians over the rounds, and
ratios are of such medians. With several threads each turn begins once loops of dot products gain
from them what as many cores would give (Yardstick), or after a while anyway. Every result is
compared with the product of the dequantized weight.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import rival_ggml
from rivals import RIVALS
from weights import Array, Missing, Prepared, copies_of

import polyquant as pq

#: A contender is timed this long in a round, and a slower one is called once.
BLOCK_S = 0.02
#: One whose call takes this long is timed in so many rounds altogether, and a rival with no more
#: rows than these.
SLOW_S, SLOW_ROUNDS = 1.0, 1
#: OpenBLAS's threads wait busily for 26 ms after a product, and the next is not to feel them.
PAUSE_S = 0.03
#: How long the loops of a yardstick run, how often until threads gain as much as so many cores
#: would, and what counts as that.
YARDSTICK_S, YARDSTICK_TURNS, WORTH = 0.01, 8, 0.85
#: Rows of a result that are compared with the product of the dequantized weight.
CHECKED = 16
#: Rows that a lookup takes.
LOOKED_UP = 512

Product = Callable[[int], Any]


class Shape(NamedTuple):
    """Extents of a weight: out, in."""

    n: int
    k: int


@dataclass(frozen=True)
class Settings:
    """What is measured: see cpu.py's options."""

    threads: int
    shapes: tuple[Shape, ...]
    rows: tuple[int, ...]
    schemes: tuple[str, ...]
    #: Scheme -> that of the activations, and -> rivals.
    activations: dict[str, str]
    rivals: dict[str, tuple[str, ...]]
    dtypes: tuple[str, ...]
    rounds: int


class Contender(NamedTuple):
    """One way to a product: a call by the number of a copy, and what its result is to be."""

    name: str
    copies: int
    call: Product
    nbytes: int
    wanted: Array
    leave: Callable[[Any], Array]
    about: dict[str, Any]


# -- timing -----------------------------------------------------------------------------------


def medians_s(
    contenders: Sequence[Contender], rounds: int, yardstick: Yardstick
) -> list[tuple[float, float | None]]:
    """The median time of a call of each contender, which take turns, and the threads' gain then."""
    alone = [_seconds(c, 1, 1) for c in contenders]
    times: list[list[float]] = [[] for _ in contenders]
    gains: list[list[float]] = [[] for _ in contenders]
    for count in range(rounds):
        for which in np.roll(np.arange(len(contenders)), count):
            if alone[which] > SLOW_S and count >= SLOW_ROUNDS:
                continue
            calls = max(1, round(BLOCK_S / max(alone[which], 1e-6)))
            time.sleep(PAUSE_S)
            gains[which].extend(yardstick.gain())
            if alone[which] < BLOCK_S:
                contenders[which].call(count % contenders[which].copies)
            times[which].append(_seconds(contenders[which], count * calls + 1, calls))
    return [
        (statistics.median(kept), statistics.median(gain) if gain else None)
        for kept, gain in zip(times, gains, strict=True)
    ]


def _seconds(contender: Contender, first: int, calls: int) -> float:
    call, copies = contender.call, contender.copies
    start = time.perf_counter()
    for i in range(first, first + calls):
        call(i % copies)
    return (time.perf_counter() - start) / calls


class Yardstick:
    """What several threads are worth: processors may share a core, and not at all times.

    The loops are dot products in a cache, one polyquant product with one thread after the other.
    """

    def __init__(self, threads: int) -> None:
        numbers = np.random.default_rng(0).standard_normal((1024, 1024), dtype=np.float32)
        self._weight = pq.quantize(numbers, "q4s-32").mT
        self._x = pq.quantize(numbers[:32], "q8s/32:f32")
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)
        pq.set_num_threads(1)
        self._one = max(self._rate(0) for _ in range(5))
        pq.set_num_threads(threads)

    def gain(self) -> list[float]:
        """Products a second of as many threads over those of one, once it is as many cores'.

        That is waited for a little, and all processors are awake thereafter. Empty for one thread.
        """
        if self._threads == 1:
            return []
        pq.set_num_threads(1)
        for _ in range(YARDSTICK_TURNS):
            found = sum(self._pool.map(self._rate, range(self._threads))) / self._one
            if found > WORTH * self._threads:
                break
        pq.set_num_threads(self._threads)
        return [found]

    def _rate(self, which: int) -> float:
        start, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < YARDSTICK_S:
            pq.matmul(self._x, self._weight)
            count += 1
        return count / passed


def dram_gb_s(threads: int) -> float:
    """What memory gives: the best of several readings of 512 MB, by one product or in pieces."""
    whole = np.ones(2**27, np.float32)
    parts = np.array_split(whole, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            for read in (
                lambda: np.dot(whole, whole),
                lambda: list(pool.map(np.vdot, parts, parts)),
                lambda: list(pool.map(np.max, parts)),
            ):
                start = time.perf_counter()
                read()
                best = max(best, whole.nbytes / (time.perf_counter() - start) / 1e9)
    return best


# -- products ---------------------------------------------------------------------------------


def products(settings: Settings, missing: dict[str, str]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each scheme of each shape; ``missing`` comes to name rivals that are not here."""
    for shape in settings.shapes:
        weight = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        kept: dict[str, Prepared] = {}
        for scheme in settings.schemes:
            rivals = list(_prepared(settings, weight, settings.rivals[scheme], kept, missing))
            yield _of_scheme(settings, shape, scheme, weight, rivals)


def _prepared(
    settings: Settings,
    weight: Array,
    names: Sequence[str],
    kept: dict[str, Prepared],
    missing: dict[str, str],
) -> Iterator[Prepared]:
    """Rivals of a shape; each is prepared once."""
    for name in names:
        if name in missing:
            continue
        if name not in kept:
            bits = 32 if name.endswith("f32") else 4  # a few copies too many of wider codes
            count = copies_of(weight.size * bits // 8)
            try:
                kept[name] = RIVALS[name](weight, count, settings.threads)
            except Missing as error:
                missing[name] = str(error)
                continue
        yield kept[name]


def _of_scheme(
    settings: Settings, shape: Shape, scheme: str, weight: Array, rivals: Sequence[Prepared]
) -> list[dict[str, Any]]:
    q, turned = _quantize(weight, scheme), _quantize(np.ascontiguousarray(weight.T), scheme)
    count = copies_of(q.nbytes)
    ours = _Ours(
        scheme,
        [copy.deepcopy(q) for _ in range(count)],
        [copy.deepcopy(turned) for _ in range(count)],
        q.dequantize().T,
        turned.dequantize(),
        _prepared_for_cpu(q, count),
    )
    rows: list[dict[str, Any]] = []
    yardstick = Yardstick(settings.threads)
    slow: set[str] = set()
    for m in settings.rows:
        x = np.random.default_rng(m).standard_normal((m, shape.k), dtype=np.float32)
        contenders = [*_exact(settings, ours, x), *_quantized(settings, ours, x)]
        contenders += [_of_rival(rival, x) for rival in rivals if rival.name not in slow]
        errors = [_error(contender) for contender in contenders]  # a first call, which may prepare
        times = medians_s(contenders, settings.rounds, yardstick)
        here = {"threads": settings.threads, "n": shape.n, "k": shape.k, "m": m, "scheme": scheme}
        for contender, error, (seconds, gain) in zip(contenders, errors, times, strict=True):
            if seconds > SLOW_S:
                slow.add(contender.name)
            measured = {
                "time_ms": seconds * 1e3,
                "gb_s": contender.nbytes / seconds / 1e9,
                "error": error,
                **({} if gain is None else {"gain": gain}),
            }
            rows.append({**here, "name": contender.name, **contender.about, **measured})
    return rows


def _quantize(weight: Array, scheme: str) -> pq.QTensor:
    """Magnitudes, where a scheme's biases can only be positive (as those of k-quants are here)."""
    made = pq.scheme(scheme)
    nested = made.offset is not None and isinstance(made.offset.dtype, pq.QuantScheme)
    return pq.quantize(np.abs(weight) if nested else weight, scheme)


class _Ours(NamedTuple):
    """Copies of a weight stored (out, in), (in, out) and prepared, and the values of each."""

    scheme: str
    plain: list[pq.QTensor]
    turned: list[pq.QTensor]
    values: Array
    turned_values: Array
    prepared: list[pq.QTensor]


def _prepared_for_cpu(q: pq.QTensor, count: int) -> list[pq.QTensor]:
    """Copies in the order that products of many rows like, where there is one."""
    if not hasattr(q, "prepare"):
        return []
    made = [copy.deepcopy(q) for _ in range(count)]
    try:
        return [each.prepare("cpu") or each for each in made]
    except pq.errors.PolyquantError:
        return []


def _exact(settings: Settings, ours: _Ours, x: Array) -> Iterator[Contender]:
    """Products with activations as they are."""
    for dtype in settings.dtypes:
        given = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        plain = [q.mT for q in ours.plain]
        yield _contender(ours, "out,in", dtype, plain, given, ours.values)
        yield _contender(ours, "in,out", dtype, ours.turned, given, ours.turned_values)
        if ours.prepared:
            prepared = [q.mT for q in ours.prepared]
            yield _contender(ours, "prepared", dtype, prepared, given, ours.values)


def _contender(
    ours: _Ours, order: str, dtype: str, weights: list[pq.QTensor], x: Any, values: Array
) -> Contender:
    about = {
        "order": order,
        "activations": dtype,
        "kernel": pq.explain("matmul", x, weights[0]).kernel,
        "nbytes": weights[0].nbytes,
    }
    wanted = np.asarray(x[:CHECKED], np.float32) @ values
    product = partial(_by_operator, x, weights)
    nbytes = weights[0].nbytes
    return Contender("polyquant", len(weights), product, nbytes, wanted, np.asarray, about)


def _by_operator(x: Any, weights: Sequence[pq.QTensor], which: int) -> Any:
    return x @ weights[which]


def _quantized(settings: Settings, ours: _Ours, x: Array) -> Iterator[Contender]:
    """Products of quantized activations: quantized in the call, and before it."""
    scheme = settings.activations.get(ours.scheme)
    if scheme is None:
        return
    wanted = x[:CHECKED] @ ours.values
    for order, weights in (("out,in", ours.plain), ("prepared", ours.prepared)):
        if not weights:
            continue
        entered = pq.quantize(x, scheme)
        about = {
            "order": order,
            "activations": scheme,
            "kernel": pq.explain("matmul", entered, weights[0].mT).kernel,
            "nbytes": weights[0].nbytes,
        }
        calls: tuple[tuple[str, Product], ...] = (
            (scheme, lambda i, w=weights: pq.linear(x, w[i], activations=scheme)),
            (f"{scheme} before", lambda i, w=weights, e=entered: pq.matmul(e, w[i].mT)),
        )
        for activations, call in calls:
            yield Contender(
                "polyquant",
                len(weights),
                call,
                weights[0].nbytes,
                wanted,
                np.asarray,
                {**about, "activations": activations},
            )


def _of_rival(rival: Prepared, x: Array) -> Contender:
    entered = rival.enter(x)
    wanted = x[:CHECKED] @ rival.values.T
    about = {"activations": rival.takes or "float32", "nbytes": rival.nbytes}
    return Contender(
        rival.name,
        rival.copies,
        lambda i: rival.product(i, entered),
        rival.nbytes,
        wanted,
        rival.leave,
        about,
    )


def _error(contender: Contender) -> float:
    """The relative error of the first rows of a result: sqrt(sum of squares) of each side."""
    found = np.asarray(contender.leave(contender.call(0)), np.float32)[:CHECKED]
    norm = np.linalg.norm(contender.wanted)
    return float(np.linalg.norm(found - contender.wanted) / norm)


# -- quantize, dequantize, look up -------------------------------------------------------------


def rates(settings: Settings) -> Iterator[list[dict[str, Any]]]:
    """GB/s of float32 that each scheme takes or gives, of a weight of the first shape."""
    shape = settings.shapes[0]
    weight = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    yardstick = Yardstick(settings.threads)
    indices = np.random.default_rng(1).integers(0, shape.n, LOOKED_UP)
    for scheme in settings.schemes:
        q = _quantize(weight, scheme)
        looked_up = 4 * LOOKED_UP * shape.k
        calls: tuple[tuple[str, Callable[[int], Any], int], ...] = (
            ("quantize", lambda i, s=scheme: _quantize(weight, s), weight.nbytes),
            ("dequantize", lambda i, q=q: q.dequantize(), weight.nbytes),
            ("lookup", lambda i, q=q: pq.ops.embedding(indices, q), looked_up),
            ("numpy lookup", lambda i: weight[indices], looked_up),
        )
        contenders = [
            Contender(name, 2, call, nbytes, weight, np.asarray, {}) for name, call, nbytes in calls
        ]
        times = medians_s(contenders, settings.rounds, yardstick)
        here = {"threads": settings.threads, "n": shape.n, "k": shape.k, "scheme": scheme}
        yield [
            {**here, "name": c.name, "time_ms": s * 1e3, "gb_s": c.nbytes / s / 1e9}
            for c, (s, _) in zip(contenders, times, strict=True)
        ]


def instructions(target: str | None) -> str:
    """The instruction set of polyquant's compiled part, after choosing it where that is asked."""
    try:
        from polyquant import _native  # type: ignore[attr-defined]
    except ImportError:
        return "none: the definition runs"
    if target:
        _native.set_target(target)
    return str(_native.target())


def rival_instructions() -> dict[str, str]:
    """The instruction sets that each build of ggml uses, of those that are installed."""
    found = {}
    for name in ("ggml", "ik"):
        try:
            found[name] = rival_ggml.instructions(rival_ggml.load(name))
        except Missing:
            continue
    return found


def set_threads(threads: int) -> None:
    """Tell polyquant; the others were told by the environment."""
    if hasattr(pq, "set_num_threads"):
        pq.set_num_threads(threads)
    if os.environ.get("OPENBLAS_NUM_THREADS") != str(threads):
        raise SystemExit("run it through cpu.py, which sets the number of threads")
