"""Value types, scale types, modes and stores: what one stored code, or one stored scale, means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

#: The smallest normal float32. Anything smaller in magnitude counts as zero (NUMERICS: several
#: libraries flush subnormals, so the contract does too).
TINY = float(np.finfo(np.float32).tiny)


class QuantValue(StrEnum):
    """The type of one code: integers (``f`` full, ``s`` symmetric, ``u`` unsigned) and minifloats.

    There is no ``q1s``: one symmetric bit could only say zero.
    """

    Q8F = "q8f"
    Q8S = "q8s"
    Q7F = "q7f"
    Q7S = "q7s"
    Q6F = "q6f"
    Q6S = "q6s"
    Q5F = "q5f"
    Q5S = "q5s"
    Q4F = "q4f"
    Q4S = "q4s"
    Q3F = "q3f"
    Q3S = "q3s"
    Q2F = "q2f"
    Q2S = "q2s"
    Q1F = "q1f"
    U8 = "u8"
    U7 = "u7"
    U6 = "u6"
    U5 = "u5"
    U4 = "u4"
    U3 = "u3"
    U2 = "u2"
    U1 = "u1"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E3M2 = "e3m2"
    E2M3 = "e2m3"
    E2M1 = "e2m1"

    @property
    def bits(self) -> int:
        """Bits of one code, 1 to 8."""
        return 1 + sum(map(int, self[1::2])) if self.is_float else int(self[1])

    @property
    def is_float(self) -> bool:
        """Whether the codes are minifloats (sign, exponent, mantissa)."""
        return self[0] == "e"

    @property
    def is_signed(self) -> bool:
        """Whether negative numbers have codes."""
        return self[0] != "u"

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest number that a code stands for, before any scale."""
        if self.is_float:
            top = float(grid(self)[-1])
            return -top, top
        if not self.is_signed:
            return 0.0, float(2**self.bits - 1)
        half = 2 ** (self.bits - 1)
        return float(1 - half if self[2] == "s" else -half), float(half - 1)

    @property
    def half_range(self) -> float:
        """What a block's largest magnitude is divided by to give its scale.

        ``(b - a) / 2`` for signed values; ``b`` for unsigned ones, which only hold one side.
        """
        low, high = self.range
        return (high - low) / 2 if self.is_signed else high


class QuantMode(StrEnum):
    """How a code becomes a number."""

    SYMMETRIC = "symmetric"
    AFFINE = "affine"
    LOOKUP = "lookup"


class QuantStore(StrEnum):
    """Where the bits of a line of codes lie: padded to words, padded to bytes, or a byte a code."""

    PACKED_U32 = "packed_u32"
    PACKED_NATIVE = "packed_native"
    NATIVE = "native"


class OffsetKind(StrEnum):
    """Where an offset acts: before the scale (subtracted) or after it (added)."""

    ZERO_POINT = "zero_point"
    BIAS = "bias"


class ScaleRole(StrEnum):
    """How the stored number of the outermost scale acts.

    It multiplies; or it divides; or it is the largest magnitude, which is divided by the largest
    number that codes (and block scales) reach.
    """

    MULTIPLIER = "multiplier"
    DIVISOR = "divisor"
    ABSMAX = "absmax"


class ScaleDtype(StrEnum):
    """The type of a stored scale."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    UE8M0 = "ue8m0"
    UE4M3 = "ue4m3"

    @property
    def size_bytes(self) -> int:
        return _SCALES[self].size_bytes

    @property
    def storage(self) -> str:
        """The array dtype that holds it: a float dtype, or ``uint8`` for the 8-bit types."""
        return _SCALES[self].storage

    @property
    def max(self) -> float:
        """The largest finite number, where larger scales saturate."""
        return _SCALES[self].max


@dataclass(frozen=True)
class _ScaleFacts:
    storage: str
    size_bytes: int
    max: float


_SCALES = MappingProxyType(
    {
        ScaleDtype.F32: _ScaleFacts("float32", 4, float(np.finfo(np.float32).max)),
        ScaleDtype.F16: _ScaleFacts("float16", 2, 65504.0),
        ScaleDtype.BF16: _ScaleFacts("bfloat16", 2, (2 - 2.0**-7) * 2.0**127),
        ScaleDtype.UE8M0: _ScaleFacts("uint8", 1, 2.0**127),
        ScaleDtype.UE4M3: _ScaleFacts("uint8", 1, 448.0),
    }
)


@cache
def decode_table(value: QuantValue) -> F32:
    """All ``2**bits`` numbers of a minifloat, indexed by code (float32; NaN and inf codes kept).

    Encodings: OCP 8-bit FP (e4m3 "fn": no infinity, NaN at 0x7F and 0xFF; e5m2: IEEE-like) and
    OCP MX v1.0 for the 6- and 4-bit types, which have neither NaN nor infinity.
    """
    ebits, mbits = int(value[1]), int(value[3])
    code = np.arange(2 ** (ebits + mbits), dtype=np.int64)
    exponent, mantissa = code >> mbits, code & (2**mbits - 1)
    bias = 2 ** (ebits - 1) - 1
    normal = np.ldexp(1.0 + mantissa / 2**mbits, exponent - bias)
    subnormal = np.ldexp(mantissa / 2**mbits, 1 - bias)
    positive = np.where(exponent == 0, subnormal, normal)
    if value is QuantValue.E5M2:
        positive[0x7C] = np.inf
        positive[0x7D:] = np.nan
    elif value is QuantValue.E4M3:
        positive[0x7F] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


@cache
def grid(value: QuantValue) -> F32:
    """The finite numbers >= 0 of a minifloat, ascending; the index of each is its code."""
    positive = decode_table(value)[: 2 ** (value.bits - 1)]
    return positive[np.isfinite(positive)]


@cache
def thresholds(value: QuantValue) -> F32:
    """Where rounding to nearest, ties to even, steps from one code of a minifloat to the next.

    The code of ``t >= 0`` is the number of thresholds strictly below ``t``. A midpoint that must
    go up (the code above it is even) is therefore replaced by the float32 just below it.
    """
    numbers = grid(value)
    return _even_thresholds(numbers, np.arange(len(numbers)))


def _even_thresholds(numbers: F32, bits: npt.NDArray[Any]) -> F32:
    middle = numbers[:-1] / np.float32(2) + numbers[1:] / np.float32(2)
    return np.where(bits[1:] % 2 == 0, np.nextafter(middle, np.float32(0)), middle)


@cache
def scale_grid(dtype: ScaleDtype) -> F32:
    """The numbers >= 0 of a scale type other than f32, ascending.

    For the 8-bit types the index of each is its byte. UE8M0's byte 0 is 2^-127, below the
    smallest normal float32; it stands here as 0 so that searches agree where subnormals flush.
    """
    if dtype is ScaleDtype.UE4M3:
        return grid(QuantValue.E4M3)
    if dtype is ScaleDtype.UE8M0:
        return np.concatenate([[0.0], np.ldexp(1.0, np.arange(-126, 128))]).astype(np.float32)
    if dtype is ScaleDtype.F16:
        return np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    # bf16 is the upper half of a float32; its subnormals (bits below 0x80) are float32's.
    bits = np.concatenate([[0], np.arange(0x80, 0x7F80)]).astype(np.uint32) << 16
    return bits.view(np.float32)


@cache
def scale_thresholds(dtype: ScaleDtype) -> F32:
    """``thresholds`` for f16 and bf16, by index into ``scale_grid``."""
    numbers = scale_grid(dtype)
    return _even_thresholds(numbers, numbers.astype(host_float(dtype)).view(np.uint16))


def host_float(dtype: ScaleDtype) -> np.dtype[Any]:
    """The NumPy dtype of a float scale type."""
    return np.dtype(ml_dtypes.bfloat16 if dtype is ScaleDtype.BF16 else dtype.storage)


def is_known(enum: type[StrEnum], name: Any) -> bool:
    """Whether ``name`` is a member of ``enum`` or the text of one."""
    return isinstance(name, str) and name in {member.value for member in enum}
