"""Tables as encode.cu searches them: edges and the codes around them, kept on a device."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from polyquant.scheme import QuantScheme
from polyquant.tables import CUSTOM, Steps, named_table, steps
from polyquant.values import TINY

#: Intervals of a table, and their bytes with copies.
_MOST_INTERVALS, _TABLE_BYTES = 257, 10240


class Intervals(NamedTuple):
    """A table as encode.cu searches it: (count, 2) edges and codes; intervals 1 / by wide, the
    middle one about zero.
    """

    steps: torch.Tensor
    by: float
    copies: int


def intervals(scheme: QuantScheme, table: torch.Tensor | None, device: torch.device) -> Intervals:
    if scheme.table != CUSTOM or table is None:
        return _named_intervals(str(scheme.table), device)
    return _searched(table.cpu().numpy(), device)


@lru_cache(maxsize=64)
def _named_intervals(name: str, device: torch.device) -> Intervals:
    table = named_table(name)
    return _searched(table, device)


def _searched(table: Any, device: torch.device) -> Intervals:
    """The widest intervals that hold one edge at most; else (``by`` 0) the edges, to be halved."""
    found = steps(table)
    edges = _edges(found)
    reach = float(np.abs(table).max())
    for by in 2.0 ** np.arange(-100, 100):
        most = math.ceil(reach * by) + 1
        if 2 * most + 1 > _MOST_INTERVALS:
            break
        middle = np.arange(-most, most + 1)
        near = 0.5 + most * 2.0**-20  # a number's place is rounded
        first = np.searchsorted(edges, (middle - near) / by, side="left")
        last = np.searchsorted(edges, (middle + near) / by, side="right")
        if (last - first).max() <= 1:
            has_edge = last > first
            here = np.append(edges, np.float32(np.inf))[np.where(has_edge, first, len(edges))]
            codes = found.codes.astype(np.uint32)
            around = codes[first] | codes[np.minimum(first + 1, len(codes) - 1)] << 8
            copies = max(1, min(16, 1 << (_TABLE_BYTES // 8 // len(middle)).bit_length() - 1))
            return Intervals(_pairs(here, around, device), float(by), copies)
    return Intervals(_halved(table, device), 0.0, 1)


@lru_cache(maxsize=64)
def halved(name: str, device: torch.device) -> torch.Tensor:
    """A named table's edges and codes, to be searched by halves."""
    return _halved(named_table(name), device)


def _halved(table: Any, device: torch.device) -> torch.Tensor:
    found, count = steps(table), len(table)
    here, codes = np.full(count, np.inf, np.float32), np.zeros(count, np.uint32)
    here[: len(found.midpoints)], codes[: len(found.codes)] = _edges(found), found.codes
    return _pairs(here, codes, device)


def _edges(found: Steps) -> Any:
    """An edge at zero stands just below the normal numbers, as numbers below them are zeros."""
    below = np.nextafter(np.float32(TINY), np.float32(0))
    return np.where(found.midpoints == 0, below, found.midpoints).astype(np.float32)


def _pairs(edges: Any, codes: Any, device: torch.device) -> torch.Tensor:
    words = np.stack([edges.astype(np.float32).view(np.int32), codes.astype(np.int32)], axis=1)
    return torch.from_numpy(words).to(device)
