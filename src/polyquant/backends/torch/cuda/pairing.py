"""Which pairs of quantized operands each kernel multiplies: two axes, both codes as they lie."""

from __future__ import annotations

from collections.abc import Sequence

from polyquant.backends.nvidia.schemes import why_not_codes
from polyquant.backends.nvidia.wide import SHORT, STEP
from polyquant.kernel import Problem
from polyquant.scheme import QuantScheme
from polyquant.values import QuantMode, QuantStore, QuantValue, ScaleDtype

#: How two operands lie that are stored with the axis that is summed last.
_BY_K = ((0, 1), (1, 0))
_NOT_BY_K = "both operands must be of two axes, stored with the axis that is summed last"
#: What holds codes exactly: int8 and e4m3. Integers of 8 bits, and what e4m3 is multiplied by.
AS_INT8 = tuple(v for v in QuantValue if not v.is_float and v.is_signed and v.bits in (2, 4, 8))
AS_E4M3 = (QuantValue.E4M3, QuantValue.E2M1, *(v for v in AS_INT8 if v.bits <= 4))
_BYTES = tuple(v for v in AS_INT8 if v.bits == 8)
_BESIDE_E4M3 = (QuantValue.E4M3, QuantValue.E2M1, *AS_INT8)
#: Values along k whose products cannot exceed int32.
_MOST_K = 1 << 16
#: Values of a block from which on codes are multiplied at full speed.
_LEAST_BLOCK = 128
#: Rows up to which other kernels are quicker than cuBLAS: of codes under one scale, and else.
_FEW_WHOLE, _FEW_FP8 = 64, 128
_QUICKER_IN_BF16 = f"blocks of fewer than {_LEAST_BLOCK} under powers of two are quicker in bf16"
#: Rows up to which values dequantized to float32 are quicker than three numbers of bf16 for each.
_FEW_IN_PLANES = 128
#: Blocks of x and of the weight that cuBLAS scales, and what k must be whole times of for it.
_FP8_BLOCKS, _FP8_BLOCKS_K = ((1, 128), (128, 128)), 512
#: Rows above which other kernels are quicker than pairs.cu: wide.cu, or blockwise.py for codes of
#: 8 bits, which need no widening; blockwise.py or cuBLAS; none. wide.cu is sooner for e4m3 in
#: blocks, later for integers in short ones.
_MOST_BYTES, _MOST_PAIRED, _MOST_ALONE = 16, 128, 1 << 20
_MOST_CLOSED, _MOST_SHORT = 8, 32
#: Rows up to which bfloat16 is quicker than codes of fewer than 8 bits that are widened before.
_MOST_WIDENED = 512


def by_powers(scheme: QuantScheme) -> bool:
    """Whether numbers are codes times powers of two: exact in bf16, as the codes are."""
    return scheme.scale is ScaleDtype.UE8M0


def why_not_fp8(problem: Problem) -> str | None:
    """Why cuBLAS cannot multiply e4m3 codes as they are, or is slower; None where neither."""
    schemes = [each for each in (problem.a, problem.b) if isinstance(each, QuantScheme)]
    if [scheme.value for scheme in schemes] != 2 * [QuantValue.E4M3]:
        return "both operands must hold e4m3"
    in_lines = False
    for scheme in schemes:
        if scheme.mode is not QuantMode.SYMMETRIC or isinstance(scheme.scale, QuantScheme):
            return f"it does not take the scales out of the sums of {scheme}"
        if scheme.scale is ScaleDtype.UE8M0:
            return "a ue8m0 scale of 2^-127 is not a float32"
        in_lines |= scheme.block is not None
    if problem.layout != _BY_K:
        return _NOT_BY_K
    if reason := _why_not_fp8_blocks(schemes, problem.step):
        return reason
    few = _FEW_FP8 if in_lines else _FEW_WHOLE
    return f"up to {few} rows other kernels are quicker" if problem.m <= few else None


def in_fp8_blocks(left: object, right: object) -> bool:
    """Whether both are quantized, in the blocks that cuBLAS knows."""
    if not isinstance(left, QuantScheme) or not isinstance(right, QuantScheme):
        return False
    return (_block_of(left), _block_of(right)) == _FP8_BLOCKS


def _why_not_fp8_blocks(schemes: Sequence[QuantScheme], step: int) -> str | None:
    if not in_fp8_blocks(*schemes):
        if all(scheme.block in (None, (-1,)) for scheme in schemes):
            return None
        return "scales must be of whole lines along k or tensors, or of 1 x 128 by 128 x 128"
    if any(each.scale is not ScaleDtype.F32 or each.tensor_scale for each in schemes):
        return "blocks must have one scale each, in float32"
    if step % _FP8_BLOCKS_K or not step:
        return f"in blocks k must be whole {_FP8_BLOCKS_K}"
    return None


def why_not_bf16(problem: Problem) -> str | None:
    """Why cuBLAS does not multiply, in bf16, numbers of which some are three; or None."""
    if problem.layout != _BY_K:
        return _NOT_BY_K
    if not isinstance(problem.a, QuantScheme) or not isinstance(problem.b, QuantScheme):
        return "both operands must be quantized"
    if problem.m <= _FEW_IN_PLANES and not _are_held(problem):
        return f"up to {_FEW_IN_PLANES} rows of numbers that bf16 does not hold float32 is quicker"
    return None


def is_held(scheme: QuantScheme) -> bool:
    """Whether bf16 holds what is multiplied, scales of lines along k apart."""
    if scheme.mode is not QuantMode.SYMMETRIC or isinstance(scheme.scale, QuantScheme):
        return False
    if by_powers(scheme):
        return scheme.tensor_scale is None
    return scheme.block is None or scheme.block == (-1,)


def _are_held(problem: Problem) -> bool:
    sides = (problem.a, problem.b)
    return all(isinstance(side, QuantScheme) and is_held(side) for side in sides)


def why_not_blockwise(problem: Problem, values: tuple[QuantValue, ...]) -> str | None:
    """Why ``blockwise.py`` cannot multiply codes of ``values``, or None."""
    if problem.layout != _BY_K:
        return _NOT_BY_K
    for scheme in (problem.a, problem.b):
        if not isinstance(scheme, QuantScheme) or scheme.value not in values:
            return f"both operands must hold one of {', '.join(values)}"
        if scheme.mode is not QuantMode.SYMMETRIC or scheme.offset is not None:
            return f"it takes symmetric codes without offsets, not {scheme}"
        if isinstance(scheme.scale, QuantScheme):
            return f"it takes scales that are numbers, not {scheme.scale}"
        block = scheme.block
        if block is not None and (len(block) > 2 or (block[-1] != -1 and block[-1] % 32)):
            return "its blocks must be of whole 32 values along the axis that is summed"
        if _in_short_blocks(scheme) and _are_held(problem):
            return _QUICKER_IN_BF16
    if values == AS_INT8 and problem.k > _MOST_K:
        return f"sums of more than {_MOST_K} products may not fit int32"
    return None


def why_not_wide(problem: Problem, *, is_int: bool) -> str | None:
    """Why ``wide.cu`` cannot multiply integers, or e4m3 by what it holds; or None."""
    left, right = problem.a, problem.b
    if not isinstance(left, QuantScheme) or not isinstance(right, QuantScheme):
        return "it multiplies two quantized operands"
    if problem.layout != _BY_K:
        return _NOT_BY_K
    first = _BYTES if is_int else (QuantValue.E4M3,)
    second = tuple(v for v in (AS_INT8 if is_int else AS_E4M3) if v.bits > 2)
    if left.value not in first or right.value not in second:
        return f"it multiplies {' or '.join(first)} by one of {', '.join(second)}"
    if reason := _why_not_plain(left, right) or _why_not_wide_blocks(left, right):
        return reason
    is_short = right.bits == 8 and any(map(_in_short_blocks, (left, right)))
    if is_short and _are_held(problem):
        return _QUICKER_IN_BF16
    if problem.step and problem.step * right.bits % 128:
        return "lines of codes must be whole 16 bytes"
    if right.bits < 8 and right.store is QuantStore.NATIVE:
        return "codes of 4 bits must lie two in a byte"
    if is_int and problem.k > _MOST_K:
        return f"sums of more than {_MOST_K} products may not fit int32"
    return None


def _why_not_plain(*schemes: QuantScheme) -> str | None:
    """Why codes are not numbers that one number scales."""
    for scheme in schemes:
        if scheme.mode is not QuantMode.SYMMETRIC or scheme.offset is not None:
            return f"it takes symmetric codes without offsets, not {scheme}"
        if isinstance(scheme.scale, QuantScheme):
            return f"it takes scales that are numbers, not {scheme.scale}"
    return None


def _why_not_wide_blocks(left: QuantScheme, right: QuantScheme) -> str | None:
    """Which scales ``wide.cu`` does not find: a row's are in registers, a column's are at hand
    after all of k, or one for all columns of a tile before."""
    extent, (height, right_extent) = _block_of(left)[1], _block_of(right)
    if _are_long(extent, right_extent) and right.bits == 8:
        if right_extent != -1 and height != -1 and height % 128:
            return "a weight of 8 bits in blocks must have one of whole 128 lines"
        return None
    if not all(_are_long(each) or each in SHORT for each in (extent, right_extent)):
        return "its blocks must be of 32, 64 or whole 128 values along k"
    if right.bits == 8 and right_extent == -1:
        return None
    return None if extent == -1 else "beside such a weight x must have a scale a line, or one"


def _are_long(*extents: int) -> bool:
    return all(extent == -1 or extent % STEP == 0 for extent in extents)


def _block_of(scheme: QuantScheme) -> tuple[int, int]:
    """Lines of a block, and its values along k; -1: all of them."""
    if scheme.block is None:
        return -1, -1
    height, extent = (1, *scheme.block)[-2:]
    return height, extent


def why_not_pairs(problem: Problem, *, has_wgmma: bool = True) -> str | None:
    """Why ``pairs.cu`` cannot multiply two quantized operands, or None."""
    left, right = problem.a, problem.b
    if not isinstance(left, QuantScheme) or not isinstance(right, QuantScheme):
        return "it multiplies two quantized operands"
    if problem.layout != _BY_K:
        return _NOT_BY_K
    if left.value not in (*_BYTES, QuantValue.E4M3):
        return f"the left operand must hold q8s, q8f or e4m3, not {left.value}"
    values = _BESIDE_E4M3 if left.value.is_float else AS_INT8
    if right.value not in values:
        return f"beside {'e4m3' if left.value.is_float else 'int8'} it takes {', '.join(values)}"
    if reason := _why_not_plain(left, right):
        return reason
    for block in (left.block, right.block):
        if block is not None and (len(block) > 2 or _cuts(block[-1])):
            return "its blocks must be a power of two from 32 on along the axis that is summed"
    if not left.value.is_float and problem.k > _MOST_K:
        return f"sums of more than {_MOST_K} products may not fit int32"
    is_long = not any(map(_in_short_blocks, (left, right)))
    widened = is_long and right.value in (AS_E4M3 if left.value.is_float else AS_INT8)
    most = _MOST_PAIRED if widened or _are_held(problem) else _MOST_ALONE
    most = _MOST_BYTES if widened and right.bits == 8 else most
    is_int = not left.value.is_float
    if has_wgmma and why_not_wide(problem, is_int=is_int) is None:
        in_blocks = any(_block_of(scheme)[1] != -1 for scheme in (left, right))
        few = (
            _MOST_CLOSED if in_blocks and right.value.is_float and right.bits == 8 else _MOST_BYTES
        )
        most = few if is_long or not (is_int or right.bits == 8) else _MOST_SHORT
    if problem.m > most:
        return f"it is for up to {most} rows by codes of {right.bits} bits in such blocks"
    return why_not_codes(right, problem.step)


def are_quicker(problem: Problem, *, has_wgmma: bool = True) -> bool:
    """Whether codes as they lie are multiplied sooner than rows of bfloat16 that the left ones
    become (8192 x 8192, H200)."""
    left, right, m = problem.a, problem.b, problem.m
    if not isinstance(left, QuantScheme) or not isinstance(right, QuantScheme):
        return False
    is_int, is_short = not left.value.is_float, any(map(_in_short_blocks, (left, right)))
    in_blocks = any(_block_of(each)[1] != -1 for each in (left, right))
    if why_not_fp8(problem) is None:
        return True
    if why_not_pairs(problem, has_wgmma=has_wgmma) is None:
        few = _MOST_SHORT if right.bits == 8 else _MOST_BYTES
        return (m <= few or not in_blocks) if is_int else m <= _MOST_BYTES and not is_short
    if has_wgmma and why_not_wide(problem, is_int=is_int) is None:
        is_exact = right.value is QuantValue.E2M1 and by_powers(right)
        return not is_short or (is_exact and m > _MOST_SHORT)
    if in_blocks or not _is_for_triton(problem):
        return False
    return m > (_MOST_SHORT if right.bits == 8 else _MOST_WIDENED)


def most_rows_f32(problem: Problem) -> int:
    """Rows up to which rows of float32, that the left codes become, are quicker than what comes
    after: Triton's kernel, which need not widen 8 bits, or cuBLAS."""
    if not isinstance(problem.b, QuantScheme):
        return 0
    if _is_for_triton(problem):
        return 0 if problem.b.bits == 8 else _MOST_BYTES
    is_table = problem.b.mode is QuantMode.LOOKUP
    return _MOST_BYTES if is_table or _are_held(problem) else _MOST_SHORT


def _is_for_triton(problem: Problem) -> bool:
    return any(why_not_blockwise(problem, each) is None for each in (AS_INT8, AS_E4M3))


def _in_short_blocks(scheme: QuantScheme) -> bool:
    return scheme.block is not None and -1 < scheme.block[-1] < _LEAST_BLOCK


def _cuts(extent: int) -> bool:
    return extent != -1 and (extent < 32 or extent & (extent - 1) != 0)
