"""Measuring which tiles are quickest on the GPU at hand, and keeping the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from polyquant import standard
from polyquant.backends.nvidia import cache
from polyquant.backends.nvidia.schemes import kind_of_few
from polyquant.backends.nvidia.tiles import (
    MOST_OF_ONE_WAY,
    Row,
    Tiles,
    candidates,
    own_path,
    table,
    tiles_of,
)
from polyquant.backends.torch.cuda import encode, mma
from polyquant.qtensor import QTensor
from polyquant.scheme import scheme as as_scheme

#: One scheme for each way of decoding that has a speed of its own.
SCHEMES = ("q4s-32", "nf4", "mxfp4", "q8s-row", "fp8-row", "q2s/64:f16", "q3s/64:f16")
SHAPES = (
    (4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (8192, 28672),
)  # fmt: skip
ROWS_OF_X = (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
#: Bytes of the copies of a weight, so that none is found in a cache, and replays of each graph.
_COPIES_BYTES, _REPLAYS = 240e6, 7
#: What takes up to so many times as long as the quickest way may be quicker for another shape.
_WORTH_KEEPING = 1.5


def tune(
    device: str,
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    path: Path | None = None,
) -> Path:
    """Measure every candidate on random weights; returns the file that holds the quickest."""
    place = torch.device(device.partition(":")[2])
    name = torch.cuda.get_device_name(place)
    rows = []
    with torch.cuda.device(place):
        for scheme in schemes:
            for n, k in shapes:
                rows += _measured(scheme, n, k, place)
    path = path or own_path(name)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    cache.write(path, f'{{"gpu": {json.dumps(name)}, "rows": [\n  {lines}\n]}}\n'.encode())
    table.cache_clear()
    tiles_of.cache_clear()
    return path


def _measured(scheme: str, n: int, k: int, place: torch.device) -> list[Row]:
    made = as_scheme(scheme)
    weights = [weight.mT for weight in copies(scheme, n, k, place)]
    _compile(weights[0], place)
    rows = []
    for columns in ROWS_OF_X:
        x = torch.randn(columns, k, device=place).to(torch.bfloat16)
        y = torch.empty(columns, n, device=place, dtype=torch.bfloat16)

        def time_us(tiles: Tiles, x: Any = x, y: Any = y) -> float:
            calls = [lambda w=w: mma.multiply(x, w, y, tiles) for w in weights]
            return graph_us(calls, _REPLAYS)

        timed = sorted((time_us(tiles), tiles) for tiles in candidates(made.bits, columns))
        most_us = timed[0][0] * (_WORTH_KEEPING if columns > MOST_OF_ONE_WAY else 1)
        kind = kind_of_few(made, columns)
        number = 0 if kind is None else kind.number
        rows += [
            Row(number, made.bits, n, k, columns, tiles, round(us, 2))
            for us, tiles in timed
            if us <= most_us
        ]
    return rows


def _compile(weight: QTensor, place: torch.device) -> None:
    """Every candidate, side by side: the compiler is what takes longest."""
    k, n = weight.shape

    def run(columns: int, tiles: Tiles) -> None:
        with torch.cuda.device(place):
            x = torch.zeros(columns, k, device=place, dtype=torch.bfloat16)
            mma.multiply(x, weight, torch.empty(columns, n, device=place, dtype=x.dtype), tiles)

    with ThreadPoolExecutor() as pool:
        for columns in ROWS_OF_X:
            for tiles in candidates(weight.scheme.bits, columns):
                pool.submit(run, columns, tiles)


def copies(scheme: str, n: int, k: int, place: torch.device) -> list[QTensor]:
    """A random weight under a scheme, as often as it takes to be read from memory each time."""
    w = torch.randn(n, k, device=place)
    made = as_scheme(scheme)
    entries = standard.named_constant(w, made)
    q = encode.quantize(w, made, "minmax", table=entries)
    count = min(24, max(4, -(-int(_COPIES_BYTES) // q.nbytes)))
    return [q, *(q._map(lambda a: a.clone(), q.device) for _ in range(count - 1))]


def graph_us(calls: Sequence[Any], replays: int) -> float:
    """Microseconds of a call: the median of replays of a graph that holds all of them."""
    return replayed_us([captured(calls)], replays)[0] / len(calls)


def captured(calls: Sequence[Any]) -> torch.cuda.CUDAGraph:
    """A graph of calls. Each runs once before, as it does before a graph is made of a model."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def replayed_us(graphs: Sequence[torch.cuda.CUDAGraph], replays: int) -> list[float]:
    """Microseconds of each graph: medians of replays in turns, so that all see the same clock."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays):
        for graph, its in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            its.append(begin.elapsed_time(end) * 1e3)
    return [median(its) for its in times]
