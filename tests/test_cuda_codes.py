"""Codes as pairs of numbers, as few.cuh has them: on the CPU, every code at every place."""

from __future__ import annotations

import ctypes
import subprocess
from typing import Any

import numpy as np
import pytest

import cuda_host

SIGNED, UNSIGNED, MINIFLOAT = range(3)
#: Kind, bits, bits of the mantissa.
KINDS = (
    *((kind, bits, 0) for kind in (SIGNED, UNSIGNED) for bits in range(1, 9)),
    (MINIFLOAT, 4, 1),
    (MINIFLOAT, 6, 2),
    (MINIFLOAT, 6, 3),
)

#: What the processor's own instructions do, and what few.cuh leaves to codes.cuh.
BEFORE = """
#include <cmath>
#include <cstdint>
#include <cstring>
typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
#define __device__
#define __forceinline__ inline
struct uint2 { u32 x, y; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline u32 __funnelshift_r(u32 low, u32 high, int s) { return ((u64)high << 32 | low) >> (s & 31); }
inline u32 __byte_perm(u32 a, u32 b, u32 which) {
  u32 d = 0;
  const u64 all = (u64)b << 32 | a;
  for (int i = 0; i < 4; i++) d |= (u32)(u8)(all >> (which >> 4 * i & 7) * 8) << 8 * i;
  return d;
}
inline u32 and_xor(u32 a, u32 mask, u32 b) { return (a & mask) ^ b; }
inline u32 merge(u32 a, u32 b, u32 mask) { return (a & mask) | (b & ~mask); }
enum { SIGNED, UNSIGNED, MINIFLOAT, E4M3, E5M2, LOOKUP };
enum { NO_OFFSET, INTEGER_ZERO };
constexpr u32 both(u32 half) { return half << 16 | half; }
template <bool HALF> double number_of(u16 bits) {
  constexpr int M = HALF ? 10 : 7, BIAS = HALF ? 15 : 127;
  const int exponent = (bits & 0x7FFF) >> M, mantissa = bits & (1 << M) - 1;
  const double whole = mantissa + (exponent ? 1 << M : 0);
  const double size = ldexp(whole, (exponent ? exponent : 1) - BIAS - M);
  return bits >> 15 ? -size : size;
}
template <bool HALF> u16 bits_of(double x) {  // x must be one of the type: else NaN
  constexpr int M = HALF ? 10 : 7, BIAS = HALF ? 15 : 127;
  const int exponent = x == 0 ? 1 - BIAS : fmax(ilogb(x), 1 - BIAS);
  const double size = ldexp(fabs(x), M - exponent);
  if (size != floor(size) || exponent > BIAS) return 0x7FFF;
  return (int)size + (exponent + BIAS - 1 << M) | (std::signbit(x) ? 0x8000 : 0);
}
"""
#: One kind of code; the sources between are those of codes.cuh that few.cuh builds upon.
EACH = """
namespace kind_%(name)s {
enum { F16 = %(f16)d, KIND = %(kind)d, BITS = %(bits)d, MANTISSA = %(mantissa)d };
enum { OFFSET = NO_OFFSET };
inline u32 fma2(u32 a, u32 b, u32 c) {
  u32 d = 0;
  for (int i = 0; i < 32; i += 16) {
    const double x = number_of<F16>(a >> i) * number_of<F16>(b >> i) + number_of<F16>(c >> i);
    d |= (u32)bits_of<F16>(x) << i;
  }
  return d;
}
%(codes)s
inline void decode(const u8*, int, u32, u32, u32, float, const u32*, u32*) {}
%(few)s
}
extern "C" float %(name)s(const u8* line, int zero, u32* a) {
  using namespace kind_%(name)s;
  const u32 plain = KIND == MINIFLOAT ? both(POWER) : MINUS_SIGN;
  const u32 minus = zero < 0 ? plain : minus_zero(both(SIGN + zero));
  for (int t = 0; t < 4; t++) {
    u32 word;
    memcpy(&word, line + 4 * t, 4);
    few(line, t, word, both(SIGN), minus, 0, nullptr, a + 4 * t);
  }
  return UNIT;
}
"""


def _between(text: str, start: str, end: str) -> str:
    return text[text.index(start) : text.index(end)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library of all kinds: a function for each."""
    codes, few = ((cuda_host.CUDA / name).read_text() for name in ("codes.cuh", "few.cuh"))
    parts = (
        _between(codes, "constexpr u32 ONE2", "constexpr u32 both("),
        _between(codes, "constexpr u32 SIGN ", "// What takes MAGIC"),
        _between(codes, "constexpr u32 MASK", "// Two's complement"),
    )
    text = [BEFORE]
    for f16 in (0, 1):
        for kind, bits, mantissa in KINDS:
            facts = {"f16": f16, "kind": kind, "bits": bits, "mantissa": mantissa}
            facts |= {"name": f"of_{f16}{kind}{bits}{mantissa}"}
            text.append(EACH % (facts | {"codes": "".join(parts), "few": few}))
    library = tmp_path_factory.mktemp("codes") / "codes.so"
    command = (str(cuda_host.COMPILER), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-x", "c++")
    subprocess.run((*command, "-", "-o", str(library)), input="\n".join(text).encode(), check=True)
    return ctypes.CDLL(str(library))


def _values(kind: int, bits: int, mantissa: int) -> np.ndarray[Any, Any]:
    """What each code stands for."""
    codes = np.arange(1 << bits)
    if kind != MINIFLOAT:
        return codes - (codes >> bits - 1 << bits) * (kind == SIGNED)
    exponents = codes >> mantissa & (1 << bits - 1 - mantissa) - 1
    whole = codes % (1 << mantissa) + (exponents > 0) * (1 << mantissa)
    bias = (1 << bits - 2 - mantissa) - 1
    sizes = np.ldexp(whole, np.maximum(exponents, 1) - bias - mantissa)
    return sizes * np.where(codes >> bits - 1, -1, 1)


def _numbers(words: np.ndarray[Any, Any], *, is_f16: bool) -> np.ndarray[Any, Any]:
    halves = words.view("u2")
    return halves.view("f2").astype("f4") if is_f16 else (halves.astype("u4") << 16).view("f4")


@cuda_host.needs_compiler
@pytest.mark.parametrize("f16", [0, 1])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_code_at_every_place(kind: tuple[int, int, int], f16: int, compiled: Any) -> None:
    number, bits, mantissa = kind
    run = getattr(compiled, f"of_{f16}{number}{bits}{mantissa}")
    run.restype = ctypes.c_float
    values = _values(*kind)
    fours = (0, 2, 1, 3, 4, 6, 5, 7) if bits > 4 else (0, 4, 1, 5, 2, 6, 3, 7)
    places = np.add.outer(8 * np.arange(4), fours).ravel()
    zeros = [-1] if number == MINIFLOAT else [-1, 0, 1, (1 << bits) - 1]
    if number == SIGNED and bits > 6 and not f16:  # 7 bits are not taken, 8 not in this way
        zeros = [-1]
    out = np.empty(16, "u4")
    for first in range(1 << bits):
        codes = (first + 5 * np.arange(32)) % (1 << bits)
        packed = sum(int(code) << bits * i for i, code in enumerate(codes))
        line = packed.to_bytes(4 * bits, "little")
        for zero in zeros:
            unit = run(line + bytes([0xA5] * 16), zero, out.ctypes.data_as(ctypes.c_void_p))
            got = _numbers(out, is_f16=bool(f16)) * unit
            assert np.array_equal(got, values[codes[places]] - max(zero, 0)), (first, zero)
