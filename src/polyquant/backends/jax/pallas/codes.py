"""Codes of 1 to 8 bits as pairs of bfloat16, in PTX: in the registers that they were loaded to.

An octet is 8 numbers that are neighbours along k, four registers of two. A sum does not care about
its order, so the pairs are those that codes fall into by themselves, and x is paired to match.
Every code enters exactly; entries of a table are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from polyquant.scheme import QuantScheme
from polyquant.values import QuantMode, QuantValue

Lines = list[str]
#: 1.0, -1.0, -0.0 and 2^126 as bfloat16; 128.0, of which the last bit is a one.
ONE, MINUS_ONE, MINUS_ZERO, UP, MAGIC = 0x3F80, 0xBF80, 0x8000, 0x7E80, 0x4300


def both(half: int) -> int:
    return half << 16 | half


def _shifted(to: str, word: str, right: int) -> str:
    return f"{'shr' if right >= 0 else 'shl'}.b32 {to}, {word}, {abs(right)};"


def _narrow(
    bits: int, sign: int, octet: int, out: Lines, codes: Lines, minus: int | str | None = None
) -> Lines:
    """Integers of less than 8 bits, in the lowest bits of 128.0: the pairs (i, i + 4)."""
    lines = [".reg .b32 f, g;"]
    if bits == 4:
        lines += [f"mov.b32 f, {codes[octet]};"]
    elif bits == 2:
        lines += [f"prmt.b32 f, {codes[octet // 2]}, 0, {(0x4140, 0x4342)[octet % 2]};"]
    else:
        lines += [f"prmt.b32 f, {codes[octet // 4]}, 0, {0x4440 + octet % 4};"]
        lines += ["shl.b32 g, f, 12; or.b32 f, f, g;"]
    mask, base = both((1 << bits) - 1), both(MAGIC ^ sign)
    minus = minus or (MAGIC + sign) | 0x8000
    for i, to in enumerate(out):
        lines += [_shifted("g", "f", bits * i), f"lop3.b32 g, g, {mask}, {base}, 0x6A;"]
        lines += [fma(to, "g", ONE, minus)]
    return lines


def fma(to: str, a: str, factor: int | str, plus: int | str) -> str:
    """``a * factor + plus`` of pairs; numbers stand for both halves of a register."""
    given = [("one", factor), ("more", plus)]
    named = [x if isinstance(x, str) else name for name, x in given]
    lines = [f".reg .b32 {n}; mov.b32 {n}, {both(x)};" for n, x in given if isinstance(x, int)]
    return f"{{ {' '.join(lines)} fma.rn.bf16x2 {to}, {a}, {', '.join(named)}; }}"


def _bytes(signed: bool, octet: int, out: Lines, codes: Lines, minus: str | None = None) -> Lines:
    """Integers of a byte: the lowest 7 bits as above, less or more the highest: (i, i + 2)."""
    lines = [".reg .b32 f, low, high;"]
    for i, to in enumerate(out):
        lines += [_shifted("f", codes[2 * octet + i // 2], 8 * (i % 2))]
        lines += [f"lop3.b32 low, f, {both(0x7F)}, {both(MAGIC)}, 0xEA;"]
        lines += [f"lop3.b32 high, f, {both(0x80)}, {both(MAGIC)}, 0xEA;"]  # 128 or 256
        if signed:
            lines += [fma(to, "high", MINUS_ONE, "low")]
        else:
            lines += [fma("low", "low", ONE, 0xC380), fma(to, "low", ONE, "high")]
        if minus is not None:
            lines += [fma(to, to, ONE, minus)]
    return lines


def _looked_up(octet: int, out: Lines, codes: Lines, table: Lines) -> Lines:
    """Entries of 16, chosen byte by byte: four codes are a selector of ``prmt``. Neighbours."""
    lines = [".reg .b32 low, high, p, q, s, t;", f"shr.b32 q, {codes[octet]}, 1;"]
    lines += [f"lop3.b32 q, q, {0x44444444}, {0x32103210}, 0xEA;"]  # which half of the table
    lines += [f"and.b32 s, {codes[octet]}, {0x77777777};"]
    for half in range(2):
        if half:
            lines += ["shr.b32 q, q, 16; shr.b32 s, s, 16;"]
        for to, part in (("low", table[:4]), ("high", table[4:])):
            lines += [f"prmt.b32 p, {part[0]}, {part[1]}, s; prmt.b32 t, {part[2]}, {part[3]}, s;"]
            lines += [f"prmt.b32 {to}, p, t, q;"]
        lines += [f"prmt.b32 {out[2 * half]}, low, high, {0x5140};"]
        lines += [f"prmt.b32 {out[2 * half + 1]}, low, high, {0x7362};"]
    return lines


def _e2m1(octet: int, out: Lines, codes: Lines) -> Lines:
    """Exponent and mantissa in place are the number times 2^-126, subnormals too."""
    lines = [".reg .b32 f, g;"]
    for i, to in enumerate(out):
        lines += [_shifted("f", codes[octet], 4 * i - 6), _shifted("g", codes[octet], 4 * i - 12)]
        lines += [f"and.b32 f, f, {both(0x1C0)}; lop3.b32 f, g, {both(0x8000)}, f, 0xEA;"]
        lines += [fma(to, "f", UP, MINUS_ZERO)]
    return lines


def _wide(is_e4m3: bool, octet: int, out: Lines, codes: Lines) -> Lines:
    """Minifloats of a byte as float16, which holds them all. Neighbours."""
    lines = [".reg .b32 f; .reg .b16 l, h; .reg .f32 x, y;"]
    for i, to in enumerate(out):
        word = codes[2 * octet + i // 2]
        if is_e4m3:
            lines += [f"mov.b32 {{l, h}}, {word};", f"cvt.rn.f16x2.e4m3x2 f, {'lh'[i % 2]};"]
        else:
            lines += [f"prmt.b32 f, {word}, 0, {(0x1404, 0x3424)[i % 2]};"]
        lines += ["mov.b32 {l, h}, f; cvt.f32.f16 x, l; cvt.f32.f16 y, h;"]
        lines += [f"cvt.rn.bf16x2.f32 {to}, y, x;"]
    return lines


class Codes(NamedTuple):
    """How octets are decoded, and how far apart the numbers of a pair are."""

    bits: int
    decode: Callable[..., Lines]
    apart: int
    is_table: bool = False

    @property
    def parts(self) -> int:
        """How many numbers a byte holds, and so how many rows of them a row of bytes makes."""
        return 8 // self.bits


def codes_of(scheme: QuantScheme) -> Codes | None:
    """How a scheme's codes are decoded, or None where there is no way."""
    value, bits = scheme.value, scheme.bits
    if scheme.mode is QuantMode.LOOKUP:
        return Codes(4, _looked_up, 1, is_table=True) if bits == 4 else None
    if value is QuantValue.E2M1:
        return Codes(4, _e2m1, 4)
    if value in (QuantValue.E4M3, QuantValue.E5M2):
        return Codes(8, partial(_wide, value is QuantValue.E4M3), 1)
    if value.is_float or bits not in (1, 2, 4, 8):
        return None
    if bits == 8:
        return Codes(8, partial(_bytes, value.is_signed), 2)
    return Codes(bits, partial(_narrow, bits, 1 << (bits - 1) if value.is_signed else 0), 4)


def paired(apart: int, out: Lines, x: Lines) -> Lines:
    """Neighbours as pairs of numbers that are so far apart, within octets."""
    step = apart // 2
    places = [
        (first + i + j, half)
        for first in range(0, len(x), 4)
        for i in range(0, 4, 2 * step)
        for j in range(step)
        for half in range(2)
    ]
    return [
        f"prmt.b32 {to}, {x[i]}, {x[i + step]}, {(0x5410, 0x7632)[half]};"
        for to, (i, half) in zip(out, places, strict=True)
    ]
