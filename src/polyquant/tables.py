"""Lookup tables: the named ones, their checks, and how a value finds its nearest entry."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polyquant.errors import TableInvalid, TableLength, TableMismatch
from polyquant.values import F32, TINY

#: The name that a scheme uses for a table that belongs to the tensor alone.
CUSTOM = "custom"

# QLoRA, arXiv:2305.14314, appendix E, as float32.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# bitsandbytes' FP4: sign bit, then magnitudes in its own order (not those of e2m1).
_FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
# "NF4 isn't information theoretically optimal", arXiv:2306.06965, block size 64.
_AF4 = (
    -1.0,
    -0.69441008,
    -0.51243739,
    -0.3736951,
    -0.25607552,
    -0.14982478,
    -0.04934812,
    0.0,
    0.04273164,
    0.12934483,
    0.21961274,
    0.31675666,
    0.42563882,
    0.55496234,
    0.72424863,
    1.0,
)
# ggml's IQ4_NL (int8 entries).
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


#: ggml's vector types: what a level of a grid stands for; then the same with the other sign (IQ2,
#: IQ3) or the other shift (IQ1). Grids of 3 levels have one that no code uses.
_IQ2 = (1.0, 3.125, 5.375, 5.375)
_IQ3 = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5)
_IQ1 = (-0.875, 0.125, 1.125, 1.125, -1.125, -0.125, 0.875, 0.875)


def _both_signs(numbers: tuple[float, ...]) -> F32:
    return np.asarray([*numbers, *(-n for n in numbers)], dtype=np.float32)


def _dynamic(*, signed: bool) -> F32:
    """The 8-bit dynamic tree map of arXiv:2110.02861: a decimal exponent, then linear fractions."""
    numbers: list[float] = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        edges = _even_steps(count)
        middles = (edges[:-1] + edges[1:]) / np.float32(2.0)
        decade = [float(np.float32(10.0 ** (exponent - 6)) * m) for m in middles]
        numbers += decade + ([-x for x in decade] if signed else [])
    return np.sort(np.asarray(numbers, dtype=np.float32))


def _even_steps(count: int) -> F32:
    """``count`` even steps from 0.1 to 1, to the bit as torch.linspace has them (files hold those).

    torch walks up from the start in the first half and down from the end in the second, with a
    float32 step and one rounding a point; float64 holds the unrounded product and sum.
    """
    start, end = np.float32(0.1), np.float32(1.0)
    step = np.float64((end - start) / np.float32(count))
    index = np.arange(count + 1)
    up, down = start + step * index, end - step * (count - index)
    return np.where(index < (count + 1) // 2, up, down).astype(np.float32)


def _fp4() -> F32:
    positive = np.asarray(_FP4_MAGNITUDES, dtype=np.float32) / np.float32(12.0)
    return np.concatenate([positive, 0.0 - positive])  # code 8 is +0, not -0, in its files


#: Name of a table -> the function that makes it. A new table is one line here.
NAMED: MappingProxyType[str, Callable[[], F32]] = MappingProxyType(
    {
        "nf4": lambda: np.asarray(_NF4, dtype=np.float32),
        "fp4": _fp4,
        "af4": lambda: np.asarray(_AF4, dtype=np.float32),
        "iq4_nl": lambda: np.asarray(_IQ4_NL, dtype=np.float32),
        "iq1": lambda: np.asarray(_IQ1, dtype=np.float32),
        "iq2": lambda: _both_signs(_IQ2),
        "iq3": lambda: _both_signs(_IQ3),
        "iq3_s": lambda: _both_signs(tuple(range(1, 16, 2))),
        "odd8": lambda: np.arange(1, 16, 2, dtype=np.float32),
        "odd16": lambda: np.arange(1, 32, 2, dtype=np.float32),
        "ternary": lambda: np.arange(-1, 3, dtype=np.float32),
        "signed4": lambda: np.arange(-8, 8, dtype=np.float32),  # beside a bias; alone it is q4f
        "sign": lambda: np.asarray([-1.0, 1.0], dtype=np.float32),
        "dynamic8": lambda: _dynamic(signed=True),
        "dynamic8u": lambda: _dynamic(signed=False),
    }
)


@cache
def named_table(name: str) -> F32:
    """The entries of a named table: float32, ``(2**bits,)``, read-only."""
    table = NAMED[name]()
    table.flags.writeable = False
    return table


def table_bits(name: str) -> int:
    """The width of the codes that index a named table."""
    return int(named_table(name).size).bit_length() - 1


class Steps(NamedTuple):
    """How a number finds its code: ``codes[count of midpoints strictly below it]``."""

    midpoints: F32
    codes: npt.NDArray[np.uint8]


def steps(table: F32) -> Steps:
    """Sort a table, drop repeated entries (the lowest code keeps the number) and take midpoints."""
    numbers, first = np.unique(table, return_index=True)
    middle = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
    middle[np.abs(middle) < TINY] = 0.0
    return Steps(middle, first.astype(np.uint8))


def check_table(table: Any, name: str, bits: int) -> F32:
    """A user's or a file's table as float32, or the error that says what is wrong with it.

    Raises TableLength, TableInvalid (NaN, infinity, or nothing but zeros) and TableMismatch (the
    scheme names a table with other entries).
    """
    entries = np.asarray(table, dtype=np.float32)
    if entries.shape != (2**bits,):
        raise TableLength(wanted=2**bits, bits=bits, got=entries.shape)
    if not np.isfinite(entries).all():
        where = int(np.flatnonzero(~np.isfinite(entries))[0])
        raise TableInvalid(reason=f"entry {where} is {entries[where]}; every entry must be finite")
    entries = np.where(np.abs(entries) < TINY, np.copysign(np.float32(0), entries), entries)
    if not entries.any():
        raise TableInvalid(reason="all its entries are zero, so no value but zero can be stored")
    if name != CUSTOM and entries.tobytes() != named_table(name).tobytes():
        bits_differ = entries.view(np.uint32) != named_table(name).view(np.uint32)
        differs = int(bits_differ.sum())
        raise TableMismatch(table=name, differing=differs, length=2**bits)
    return entries
