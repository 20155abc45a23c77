"""Which schemes ``mma.cu`` takes, and the numbers that it knows them by."""

from __future__ import annotations

from typing import NamedTuple

from polyquant.kernel import Problem
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.values import QuantMode, QuantStore, QuantValue, ScaleDtype

#: The numbers of mma.cu's enums.
_SIGNED, _UNSIGNED, _MINIFLOAT, _E4M3, _E5M2, LOOKUP = range(6)
_NO_OFFSET, _INTEGER_ZERO, _FLOAT_ZERO, _BIAS = range(4)
#: How scales and offsets are stored, in the order of their numbers, and the bytes of one.
_TYPES = ("f32", "f16", "bf16", "ue8m0", "ue4m3", "u8")
SIZES = (4, 2, 2, 1, 1, 1)
#: A block longer than any axis: one scale a row that has an offset, or is read chunk by chunk.
_WHOLE_ROW = 1 << 30
#: Offsets that take the sum of x over a block.
SUMMING = (_FLOAT_ZERO, _BIAS)
#: Rows of x above which dequantizing the weight for cuBLAS is quicker (8192 x 8192, H200): by
#: mma.cu, by mma_n.cu, and by wgmma.cu, which takes bf16 (no more were measured); of 5 to 7 bits,
#: which take longest to become numbers; of offsets that are floats; and of tables in three parts.
MOST_BY_MMA, _MOST_BY_N, _MOST_BY_WGMMA, _MOST_OF_SLOW = 64, 64, 8192, 1024
_MOST_SUMMING, _MOST_IN_PARTS = 32, 16
#: Bytes of a dequantized operand above which it is made and multiplied in tiles.
MOST_BYTES = 256 << 20
_ENTERING = ("bfloat16", "float16", "float32")


def why_not(problem: Problem) -> str | None:
    """Why the kernel cannot run a product, or None."""
    scheme = problem.b
    if not isinstance(scheme, QuantScheme) or isinstance(problem.a, QuantScheme):
        return "it multiplies a float by a quantized weight"
    if problem.a not in _ENTERING:
        return f"it takes bfloat16, float16 and float32, not {problem.a}"
    axes = problem.layout[1] or ()
    rank = len(axes)
    if rank < 2 or axes[:-2] != tuple(range(rank - 2)):
        return "it takes a weight whose last two axes are stored last"
    if scheme.block is not None and len(scheme.block) > 2:
        return "its blocks must have two axes at most"
    by_n = axes[-1] == rank - 1
    most = most_rows(problem.a, scheme, by_n=by_n)
    if problem.m > most:
        return f"it is for up to {most} rows of {problem.a} by {scheme}; more are quicker by cuBLAS"
    if by_n:
        return _why_not_by_n(problem.a, scheme)
    return why_not_codes(scheme, problem.step) or _why_not_blocks(scheme)


def most_rows(entering: str, scheme: QuantScheme, *, by_n: bool) -> int:
    """Rows of x that a product takes. ``by_n``: whether the weight is stored (in, out)."""
    if by_n:
        return _MOST_BY_N
    if entering == "float32" and scheme.mode is QuantMode.LOOKUP:
        return _MOST_IN_PARTS
    if offset_of(scheme) in SUMMING:
        return _MOST_SUMMING
    if not enters_wgmma(entering, scheme):
        return MOST_BY_MMA
    kind = kind_of(scheme)
    bits = 0 if kind is None else kind.bits
    return _MOST_OF_SLOW if 4 < bits < 8 else _MOST_BY_WGMMA


def enters_wgmma(entering: str, scheme: QuantScheme) -> bool:
    """Whether the rounded weight may enter with ``x``: as bfloat16, or as float16 whose range holds
    the scales of blocks and codes times them (a tensor scale leaves them their whole range)."""
    if entering == "bfloat16":
        return True
    is_whole = (scheme.block is None or scheme.block[-1] == -1) and scheme.offset is None
    held = scheme.scale in (ScaleDtype.F16, ScaleDtype.UE4M3)
    if scheme.tensor_scale is not None:
        is_small = scheme.bits <= 4 and scheme.mode is not QuantMode.LOOKUP
        held = scheme.scale is ScaleDtype.UE4M3 and is_small
    return entering == "float16" and (held or is_whole)


def _why_not_by_n(entering: QuantScheme | str, scheme: QuantScheme) -> str | None:
    """Why ``mma_n.cu`` cannot read a weight stored (in, out), or None."""
    if entering != "bfloat16":
        return f"a weight stored (in, out) is multiplied with bfloat16, not {entering}"
    kind = kind_of(scheme)
    if kind is None or kind.bits not in (4, 8) or scheme.store is not QuantStore.PACKED_U32:
        return "of a weight stored (in, out) it takes codes of 4 and 8 bits in 32-bit words"
    offset = offset_of(scheme)
    if offset != _NO_OFFSET and (offset != _INTEGER_ZERO or kind.bits != 4):
        return "of a weight stored (in, out) it takes integer zero points beside 4 bits"
    if scheme.block is not None and scheme.block[-1] != -1 and scheme.block[-1] % 8:
        return "blocks of a weight stored (in, out) must be of whole 8 values of a line"
    return None


def why_not_codes(scheme: QuantScheme, step: int) -> str | None:
    if kind_of(scheme) is None:
        return f"it has no decoder for {scheme.value} codes in the mode and store of {scheme}"
    if scheme.store is not QuantStore.PACKED_U32:
        line_bits = step * (8 if scheme.store is QuantStore.NATIVE else scheme.bits)
        if line_bits % 32:
            return "lines of codes must be whole 32-bit words"
    is_integer = scheme.offset is not None and isinstance(scheme.offset.dtype, QuantValue)
    if is_integer and scheme.value.is_signed and scheme.bits == 7:
        return "7-bit codes less an integer zero point do not fit bf16's significand"
    return None


def _why_not_blocks(scheme: QuantScheme) -> str | None:
    if scheme.block is None or scheme.block[-1] == -1:
        return None
    extent = scheme.block[-1]
    if extent < 16 or extent & (extent - 1):
        return "its blocks must be a power of two from 16 on along the input axis"
    return None


def converts_fp8(scheme: QuantScheme) -> bool:
    """Whether decoding needs the e4m3 conversion of compute capability 8.9."""
    return scheme.value is QuantValue.E4M3 or scheme.scale is ScaleDtype.UE4M3


class CodeKind(NamedTuple):
    """How codes are decoded: the number of mma.cu, the width of a field, bits of the mantissa."""

    number: int
    bits: int
    mantissa: int = 0


def kind_of(scheme: QuantScheme) -> CodeKind | None:
    value, is_native = scheme.value, scheme.store is QuantStore.NATIVE
    if scheme.mode is QuantMode.LOOKUP:
        return CodeKind(LOOKUP, 4) if scheme.bits == 4 and not is_native else None
    if value in (QuantValue.E4M3, QuantValue.E5M2):
        return CodeKind(_E4M3 if value is QuantValue.E4M3 else _E5M2, 8)
    if value is QuantValue.E2M1:  # looked up in a table of the kernel's own
        return None if is_native else CodeKind(LOOKUP, 4, 1)
    if value.is_float:
        return None if is_native else CodeKind(_MINIFLOAT, value.bits, int(value[3]))
    return CodeKind(_SIGNED if value.is_signed else _UNSIGNED, 8 if is_native else value.bits)


def kind_of_few(scheme: QuantScheme, columns: int) -> CodeKind | None:
    """How mma.cu decodes for so many rows of x (planes counted): e2m1 by its bits, by a table of
    pairs for 9 to 16 rows, and for fewer under e4m3, which is more work than a power of two."""
    kind, is_costly = kind_of(scheme), columns > 8 or scheme.scale is ScaleDtype.UE4M3
    if kind is None or kind.mantissa != 1 or (is_costly and columns <= 16):
        return kind
    return kind._replace(number=_MINIFLOAT)


def block_of(scheme: QuantScheme, k: int, *, by_n: bool) -> int:
    """Values of a line that share a scale; 0 where a whole row does, and the loop reads nothing."""
    whole = scheme.block is None or scheme.block[-1] == -1
    if not whole and scheme.block is not None:
        return int(scheme.block[-1])
    return _WHOLE_ROW if by_n or scheme.offset is not None else 0


def offset_of(scheme: QuantScheme) -> int:
    if scheme.offset is None:
        return _NO_OFFSET
    if scheme.offset.kind is OffsetKind.BIAS:
        return _BIAS
    return _INTEGER_ZERO if isinstance(scheme.offset.dtype, QuantValue) else _FLOAT_ZERO


def type_number(kind: ScaleDtype | QuantValue | QuantScheme) -> int:
    """The number of a stored type; quantized numbers are decoded to float32 first."""
    if isinstance(kind, QuantScheme):
        return 0
    return _TYPES.index("u8" if isinstance(kind, QuantValue) else str(kind))
