"""Dequantizing by one Triton kernel for every scheme, bit for bit what the definition gives.

A program decodes a tile of segments: runs of a line's values that (nearly always) share a scale.
The caller guarantees shapes; the arithmetic is that of ``standard.decode``, step by step, each
rounded once: the kernels are compiled without contraction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from polyquant.codec import line_size_bytes
from polyquant.qtensor import QTensor
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.values import QuantMode, QuantStore, QuantValue, ScaleDtype

TINY = tl.constexpr(2.0**-126)
#: Elements of a tile, and the longest segment: 32 a thread, in 16-byte stores.
_TILE, _SEGMENT = 4096, 256
#: Elements that keep a GPU busy in whole tiles: of fewer the tiles are smaller.
_FILLS = 1 << 20

# How codes and stored numbers are decoded: constants of the kernels below.
SIGNED, UNSIGNED, MINIFLOAT, LOOKUP = (tl.constexpr(i) for i in range(4))
FLOAT, UE8M0, UE4M3 = (tl.constexpr(i) for i in range(3))
NO_OFFSET, ZERO_POINT, BIAS = (tl.constexpr(i) for i in range(3))


# -- pieces of kernels ------------------------------------------------------------------------


@triton.jit
def flush(x):
    """Numbers below the smallest normal float32 as a zero of their sign."""
    return tl.where(tl.abs(x) >= TINY, x, x * 0.0)


@triton.jit
def times(a, b, FLUSHES: tl.constexpr, FTZ: tl.constexpr):
    """A product, rounded once, then flushed; FTZ: as the processor does it."""
    product = a * b
    if FTZ and FLUSHES:
        FLUSH: tl.constexpr = "mul.rn.ftz.f32 $0, $1, 0f3F800000;"
        return tl.inline_asm_elementwise(FLUSH, "=f,f", [product], tl.float32, True, 1)
    return flush(product) if FLUSHES else product


@triton.jit
def plus(a, b, FLUSHES: tl.constexpr, FTZ: tl.constexpr):
    """A sum of what is flushed, flushed: below 2^-126 it is exact."""
    if FTZ and FLUSHES:
        ADD: tl.constexpr = "add.rn.ftz.f32 $0, $1, $2;"
        return tl.inline_asm_elementwise(ADD, "=f,f,f", [a, b], tl.float32, True, 1)
    return flush(a + b) if FLUSHES else a + b


@triton.jit
def minifloat(code, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """The number of a minifloat's code (int32), NaN and infinity where the type has them.

    Exponent and mantissa, in place, are the number times a power of two, subnormal ones too.
    """
    EXPONENT: tl.constexpr = BITS - 1 - MANTISSA
    SHIFT: tl.constexpr = 23 - MANTISSA
    TO_F32: tl.constexpr = 127 - (2 ** (EXPONENT - 1) - 1)
    rest = code & (2 ** (BITS - 1) - 1)
    UP: tl.constexpr = 2.0**TO_F32
    sign = (code >> (BITS - 1)) << 31
    number = ((rest << SHIFT) | sign).to(tl.float32, bitcast=True) * UP
    if BITS == 8:
        if MANTISSA == 3:
            number = tl.where(rest == 0x7F, float("nan"), number)
        else:
            number = tl.where(rest == 0x7C, number * float("inf"), number)
            number = tl.where(rest > 0x7C, float("nan"), number)
    return number


@triton.jit
def stored_number(raw, KIND: tl.constexpr):
    """A stored scale as float32: of UE8M0's byte 0 twice its number, which is not normal."""
    if KIND == UE8M0:
        byte = raw.to(tl.int32)
        number = (tl.maximum(byte, 1) << 23).to(tl.float32, bitcast=True)
        return tl.where(byte == 255, float("nan"), number)
    if KIND == UE4M3:
        return minifloat(raw.to(tl.int32), 8, 3)
    return flush(raw.to(tl.float32))


@triton.jit
def number_of(field, table_ptr, KIND: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Fields (rows, n) as float32: integers by 2^23 + field, whose lowest bits they are."""
    if KIND == LOOKUP:
        if BITS != 4:
            return flush(tl.load(table_ptr + field))
        # From shared memory, which is quicker; measured of 16 entries.
        table = flush(tl.load(table_ptr + tl.arange(0, 2**BITS)))
        SIZE: tl.constexpr = field.shape[0] * field.shape[1]
        return tl.reshape(tl.gather(table, tl.reshape(field, (SIZE,)), 0), field.shape)
    if KIND == MINIFLOAT:
        return minifloat(field, BITS, MANTISSA)
    SIGN: tl.constexpr = 2 ** (BITS - 1) if KIND == SIGNED else 0
    whole = ((field ^ SIGN) | 0x4B000000).to(tl.float32, bitcast=True)
    return whole - (8388608.0 + SIGN)


@triton.jit
def field_of(words, at, end, PLACE: tl.constexpr, BITS: tl.constexpr):
    """Field PLACE of 32, which are BITS words from word ``at`` on."""
    WORD: tl.constexpr = PLACE * BITS // 32
    SHIFT: tl.constexpr = PLACE * BITS % 32
    found = tl.load(words + WORD, mask=at + WORD < end, other=0).to(tl.uint32) >> SHIFT
    if SHIFT + BITS > 32:
        more = tl.load(words + WORD + 1, mask=at + WORD + 1 < end, other=0).to(tl.uint32)
        found = found | (more << (32 - SHIFT))
    return (found & (2**BITS - 1)).to(tl.int32)


@triton.jit
def woven(words, at, end, FIRST: tl.constexpr, STEP: tl.constexpr, BITS: tl.constexpr):
    """Every STEP-th field from FIRST on of 32, side by side."""
    if STEP == 32:
        return field_of(words, at, end, FIRST, BITS)
    else:
        even = woven(words, at, end, FIRST, STEP * 2, BITS)
        return tl.join(even, woven(words, at, end, FIRST + STEP, STEP * 2, BITS))


@triton.jit
def across_words(codes_ptr, line, first, inside, stride, BITS: tl.constexpr, SEGMENT: tl.constexpr):
    """Fields that lie across words, 32 of a lane."""
    at = (first // 32 * BITS)[:, None] + (tl.arange(0, SEGMENT // 32) * BITS)[None, :]
    words = codes_ptr.to(tl.pointer_type(tl.int32)) + (line * (stride // 4))[:, None] + at
    end = tl.where(inside, stride // 4, 0)[:, None]
    return tl.reshape(woven(words, at, end, 0, 1, BITS), (line.shape[0], SEGMENT))


@triton.jit
def words_of(codes_ptr, line, first, inside, stride, BITS: tl.constexpr, SEGMENT: tl.constexpr):
    """Fields of segments (rows, SEGMENT) from whole words that start at value ``first``."""
    if 32 % BITS != 0:
        return across_words(codes_ptr, line, first, inside, stride, BITS, SEGMENT)
    else:
        PER_WORD: tl.constexpr = 32 // BITS
        WORDS: tl.constexpr = SEGMENT // PER_WORD
        at = (first // PER_WORD)[:, None] + tl.arange(0, WORDS)[None, :]
        words = codes_ptr.to(tl.pointer_type(tl.int32)) + (line * (stride // 4))[:, None] + at
        found = tl.load(words, mask=inside[:, None] & (at < stride // 4), other=0)
        shifts = tl.arange(0, PER_WORD) * BITS
        fields = (found[:, :, None] >> shifts[None, None, :]) & (2**BITS - 1)
        return tl.reshape(fields, (line.shape[0], SEGMENT))


@triton.jit
def bytes_of(codes_ptr, line, at, mask, stride, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """Fields at places ``at`` of lines, from the one or two bytes that hold each."""
    if NATIVE:
        return tl.load(codes_ptr + line * stride + at, mask=mask, other=0).to(tl.int32) & (
            2**BITS - 1
        )
    bit = at.to(tl.int64) * BITS
    byte, shift = bit >> 3, (bit & 7).to(tl.int32)
    found = tl.load(codes_ptr + line * stride + byte, mask=mask, other=0).to(tl.int32)
    if 8 % BITS != 0:
        crosses = mask & (shift + BITS > 8)
        more = tl.load(codes_ptr + line * stride + byte + 1, mask=crosses, other=0)
        found = found | (more.to(tl.int32) << 8)
    return (found >> shift) & (2**BITS - 1)


@triton.jit
def fp8_of(codes_ptr, line, at, mask, stride, MANTISSA: tl.constexpr):
    """Minifloats of 8 bits at places ``at`` of lines, as the processor converts them."""
    byte = tl.load(codes_ptr + line * stride + at, mask=mask, other=0)
    KIND: tl.constexpr = tl.float8e4nv if MANTISSA == 3 else tl.float8e5
    return byte.to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def stored_at(
    ptr, line, at, count, mask, scales_ptr, table_ptr, stride, extent, scales,
    KIND: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Scales or offsets at places of lines of their grid. INNER: how they are quantized, in blocks
    of its lines (as ``_Inner`` says), or None.
    """
    if INNER is None:
        return stored_number(tl.load(ptr + line * count + at, mask=mask, other=0), KIND)
    else:
        field = bytes_of(ptr, line, at, mask, stride, INNER[1], INNER[3])
        values = number_of(field, table_ptr, INNER[0], INNER[1], INNER[2])
        raw = tl.load(scales_ptr + line * scales + at // extent, mask=mask, other=0)
        if INNER[4] == UE8M0:
            values = values * tl.where(raw.to(tl.int32) == 0, 0.5, 1.0)
        return flush(values * stored_number(raw, INNER[4]))


@triton.jit
def values_at(
    codes_ptr, table_ptr, line, first, at, inside, mask, stride,
    KIND: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, NATIVE: tl.constexpr,
    BY_WORDS: tl.constexpr, FP8: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """The numbers of codes at places ``at`` of lines, segments from value ``first`` on."""
    if FP8:
        return fp8_of(codes_ptr, line[:, None], at, mask, stride, MANTISSA)
    else:
        if BY_WORDS:
            field = words_of(codes_ptr, line, first, inside, stride, BITS, SEGMENT)
        else:
            field = bytes_of(codes_ptr, line[:, None], at, mask, stride, BITS, NATIVE)
        return number_of(field, table_ptr, KIND, BITS, MANTISSA)


@triton.jit
def grid_line(line, h1, h2, e0, e1, e2, c1, c2, WHOLE_LINES: tl.constexpr):
    """The line of the grid that lines of the tensor belong to: leading axes (., h1, h2)."""
    if WHOLE_LINES:
        return line
    inner = line // h2
    return ((inner // h1 // e0) * c1 + inner % h1 // e1) * c2 + line % h2 // e2


@triton.jit
def line_of(rows_ptr, line, lines_a_row, inside):
    """The line of the tensor that a line of the result is."""
    if rows_ptr is None:
        return line
    else:
        row = tl.load(rows_ptr + line // lines_a_row, mask=inside, other=0)
        return row * lines_a_row + line % lines_a_row


@triton.jit
def blocks_at(first, at, extent, count, inside, mask, SCALES: tl.constexpr):
    """The blocks of segments, or of each value, and which of them there are."""
    if SCALES == 0:
        return at // extent, mask
    else:
        block = (first // extent)[:, None] + tl.arange(0, SCALES)[None, :]
        return block, inside[:, None] & (block < count)


@triton.jit
def spread(numbers, ROWS: tl.constexpr, SCALES: tl.constexpr, SEGMENT: tl.constexpr):
    """Numbers of the blocks of segments (ROWS, SCALES), each as often as its block has values."""
    if SCALES > 1:  # else one for each segment, or one for each value
        wide = tl.broadcast_to(numbers[:, :, None], (ROWS, SCALES, SEGMENT // SCALES))
        numbers = tl.reshape(wide, (ROWS, SEGMENT))
    return numbers


@triton.jit(
    # What they are divided by changes nothing that is worth another half second of the compiler.
    do_not_specialize=("segments", "lines_a_row", "h1", "h2", "e0", "e1", "e2", "c1", "c2")
)
def decode_kernel(
    codes_ptr, scales_ptr, tensor_scale_ptr, offsets_ptr, table_ptr, out_ptr, rows_ptr,
    segments, segments_a_line, lines_a_row, length, stride, extent, count,
    h1, h2, e0, e1, e2, c1, c2,
    scale_scales_ptr, scale_table_ptr, scale_stride, scale_extent, scale_count,
    offset_scales_ptr, offset_table_ptr, offset_stride, offset_extent, offset_count,
    KIND: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, NATIVE: tl.constexpr,
    BY_WORDS: tl.constexpr, FP8: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr,
    HAS_TENSOR_SCALE: tl.constexpr, FLUSHES: tl.constexpr, WHOLE_LINES: tl.constexpr,
    ONE_SCALE: tl.constexpr, OWN_GRID: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr,
    SEGMENT: tl.constexpr, INNER_SCALE: tl.constexpr, INNER_OFFSET: tl.constexpr,
    FTZ: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS segments of SEGMENT values: codes in, float values out, in stored order.

    SCALES: blocks of a segment, which it holds whole; 0 where blocks end anywhere. ``rows_ptr``:
    the rows (first axis) of the tensor that those of the result are. OWN_GRID: the grid is one of
    the result's lines. FP8: codes that the processor converts. INNER_*: how scales and offsets are
    quantized, of which the pointers' are codes then. EARLY: it begins before the one before ends.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    segment = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = segment < segments
    line = segment // segments_a_line
    first = (segment - line * segments_a_line) * SEGMENT
    at = first[:, None] + tl.arange(0, SEGMENT)[None, :]
    mask = inside[:, None] & (at < length)
    source = line_of(rows_ptr, line, lines_a_row, inside)
    where = source.to(tl.int64)
    values = values_at(
        codes_ptr, table_ptr, where, first, at, inside, mask, stride,
        KIND, BITS, MANTISSA, NATIVE, BY_WORDS, FP8, SEGMENT,
    )  # fmt: skip
    grid = (where * 0)[:, None]  # lines of the grid
    if OWN_GRID:
        grid = line.to(tl.int64)[:, None]
    elif not ONE_SCALE:
        there = grid_line(source, h1, h2, e0, e1, e2, c1, c2, WHOLE_LINES)
        grid = there.to(tl.int64)[:, None]
    block, seen = blocks_at(first, at, extent, count, inside, mask, SCALES)
    scale = stored_at(
        scales_ptr, grid, block, count, seen, scale_scales_ptr, scale_table_ptr,
        scale_stride, scale_extent, scale_count, SCALE, INNER_SCALE,
    )  # fmt: skip
    if HAS_TENSOR_SCALE:
        scale = flush(scale * tl.load(tensor_scale_ptr))
    if OFFSET != NO_OFFSET:
        offset = stored_at(
            offsets_ptr, grid, block, count, seen, offset_scales_ptr, offset_table_ptr,
            offset_stride, offset_extent, offset_count, FLOAT, INNER_OFFSET,
        )  # fmt: skip
        offset = spread(offset, ROWS, SCALES, SEGMENT)
        if OFFSET == ZERO_POINT:
            values = values - offset
    if SCALE == UE8M0:
        raw = tl.load(scales_ptr + grid * count + block, mask=seen, other=0)
        half = tl.where(raw.to(tl.int32) == 0, 0.5, 1.0)
        values = values * spread(half, ROWS, SCALES, SEGMENT)
    values = times(values, spread(scale, ROWS, SCALES, SEGMENT), FLUSHES, FTZ)
    if OFFSET == BIAS:
        values = plus(values, offset, FLUSHES, FTZ)
    out = out_ptr + line.to(tl.int64)[:, None] * length + at
    tl.store(out, values.to(out_ptr.dtype.element_ty), mask=mask)


# -- calls ------------------------------------------------------------------------------------


def dequantize(q: QTensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The values of ``q`` in logical order, float32 or rounded once to ``dtype``."""
    if dtype is torch.float64:  # holds what float32 does: no variant of its own to compile
        return dequantize(q, None).to(dtype)
    laid = q.stored_shape or (1,)
    out = torch.empty(laid, dtype=dtype or torch.float32, device=q.data.device)
    if out.numel():
        grids = [_grid(part) for part in (q.scales, q.offsets)]
        _decode(q, grids, out, laid, None)
    made: torch.Tensor = q.to_logical(out.reshape(q.stored_shape))
    return made


def embedding(rows: torch.Tensor, q: QTensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The values of ``q``, stored in logical order, at rows (int64) of its first axis."""
    at, laid = rows.reshape(-1), q.shape
    out = torch.empty((len(at), *laid[1:]), dtype=dtype or torch.float32, device=q.data.device)
    parts = (q.scales, q.offsets)
    # Of scales that are decoded before, those of the rows are, where each row has its own.
    own_grid = any(isinstance(part, QTensor) and not _inner(part) for part in parts)
    own_grid = own_grid and math.prod(q.scheme.block_extents(laid)[1:-1]) == 1
    if out.numel():
        height = q.scheme.block_extents(laid)[0]
        blocks = at if height == 1 else at // height
        grids = [_rows_of(part, blocks) if own_grid else _grid(part) for part in parts]
        _decode(q, grids, out, laid, at, own_grid=own_grid)
    return out.reshape(*rows.shape, *laid[1:])


def _rows_of(part: Any, rows: torch.Tensor) -> torch.Tensor | None:
    """Rows of a grid, decoded if it is quantized."""
    if part is None:
        return None
    return embedding(rows, part, None) if isinstance(part, QTensor) else part[rows]


def _decode(
    q: QTensor,
    grids: list[Any],
    out: torch.Tensor,
    laid: tuple[int, ...],
    rows: torch.Tensor | None,
    *,
    own_grid: bool = False,
) -> None:
    data = q.data.contiguous()
    taken = None if rows is None else len(rows)
    call = _call(q.scheme, laid, data.data_ptr() % 4 == 0, taken)
    scale, offset = (_inner(part) or _OUTER for part in grids)
    codes = [part.data if isinstance(part, QTensor) else part for part in grids]
    early = _begins_early(data.device)
    decode_kernel[call.grid](
        data,
        codes[0],
        q.tensor_scale,
        codes[1],
        q.table,
        out,
        rows,
        *call.numbers,
        *scale.arguments,
        *offset.arguments,
        **dict(call.constants),
        FP8=q.scheme.value.is_float and q.scheme.bits == 8 and _converts_fp8(data.device),
        OWN_GRID=own_grid,
        INNER_SCALE=scale.how,
        INNER_OFFSET=offset.how,
        FTZ=data.is_cuda,
        EARLY=early,
        num_warps=4,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if early else {}),
    )


class _Inner(NamedTuple):
    """What the kernel is told of scales or offsets that are quantized: arrays, and numbers of a
    line; kind, bits, mantissa, whether a code takes a byte, and the kind of its scales.
    """

    arguments: tuple[Any, ...]
    how: tuple[int, int, int, bool, int] | None


_OUTER = _Inner((None, None, 0, 1, 0), None)


def _inner(part: Any) -> _Inner | None:
    """None of what is not quantized, and of what must be decoded before."""
    if not isinstance(part, QTensor) or part.axes != tuple(range(len(part.shape))):
        return None
    made, laid = part.scheme, part.stored_shape
    is_plain = made.offset is None and made.tensor_scale is None and made.block is not None
    if not is_plain or isinstance(made.scale, QuantScheme):
        return None
    extents = made.block_extents(laid)
    is_contiguous = part.data.is_contiguous() and part.scales.is_contiguous()
    if math.prod(extents[:-1]) != 1 or not is_contiguous:
        return None
    is_native = made.store is QuantStore.NATIVE
    mantissa = int(made.value[3]) if made.value.is_float else 0
    how = (kind_of(made), made.bits, mantissa, is_native, scale_kind(made))
    stride = line_size_bytes(laid[-1], made.bits, made.store)
    numbers = (stride, extents[-1], made.scale_shape(laid)[-1])
    return _Inner((part.scales, part.table, *numbers), how)


def _grid(part: Any) -> Any:
    """Scales or offsets as the kernel takes them."""
    return part if _inner(part) else grid_of(part)


def grid_of(part: Any) -> torch.Tensor | None:
    """Scales or offsets as one run of numbers; quantized ones are decoded first."""
    if part is None:
        return None
    return dequantize(part, None) if isinstance(part, QTensor) else part.contiguous()


@lru_cache(maxsize=64)
def _converts_fp8(device: torch.device) -> bool:
    """Whether the processor converts minifloats of 8 bits (so does Triton's interpreter)."""
    return device.type != "cuda" or bool(torch.cuda.get_device_capability(device) >= (8, 9))


@lru_cache(maxsize=64)
def _begins_early(device: torch.device) -> bool:
    """Whether a kernel may begin before the one before it on the stream has ended."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (9, 0))


class _Call(NamedTuple):
    """What the kernel is told of one scheme and shape, besides the arrays."""

    grid: tuple[int]
    numbers: tuple[int, ...]
    constants: tuple[tuple[str, Any], ...]


@lru_cache(maxsize=4096)
def _call(scheme: QuantScheme, laid: tuple[int, ...], is_aligned: bool, taken: int | None) -> _Call:
    extents, counts = scheme.block_extents(laid) or (1,), scheme.scale_shape(laid) or (1,)
    length, extent, count = laid[-1], extents[-1], counts[-1]
    lines = math.prod(laid[:-1] if taken is None else (taken, *laid[1:-1]))
    # Of few elements it is no matter, so all of them are one variant to compile.
    whole = _SEGMENT if lines * length < _FILLS else triton.next_power_of_2(length)
    segment, scales = _segments(min(_SEGMENT, whole), extent, count)
    bits, is_native = scheme.bits, scheme.store is QuantStore.NATIVE
    stride = line_size_bytes(length, bits, scheme.store)
    by_words = is_aligned and stride % 4 == 0 and (bits == 8 or not is_native)
    by_words = by_words and segment % (32 // bits if 8 % bits == 0 else 32) == 0
    a_line = -(-length // segment)
    a_row = math.prod(laid[1:-1])
    segments = lines * a_line
    tile = _TILE if segments * segment >= _FILLS else _TILE // 4
    rows = max(1, tile // segment)
    axes = leading(laid[:-1], extents[:-1], counts[:-1])
    heights, steps, blocks = zip(*axes, strict=True)
    constants = {
        "KIND": kind_of(scheme),
        "BITS": bits,
        "MANTISSA": int(scheme.value[3]) if scheme.value.is_float else 0,
        "NATIVE": is_native,
        "BY_WORDS": by_words,
        "ONE_SCALE": math.prod(counts) == 1,
        "SCALE": scale_kind(scheme),
        "OFFSET": offset_kind(scheme),
        "HAS_TENSOR_SCALE": scheme.tensor_scale is not None,
        "FLUSHES": _may_be_subnormal(scheme),
        "WHOLE_LINES": all(step == 1 for step in steps),
        "SCALES": scales,
        "ROWS": rows,
        "SEGMENT": segment,
    }
    numbers = (segments, a_line, a_row, length, stride, extent, count)
    numbers += (*heights[1:], *steps, *blocks[1:])
    return _Call((-(-segments // rows),), numbers, tuple(constants.items()))


def _segments(whole: int, extent: int, count: int) -> tuple[int, int]:
    """How many values of a line a row of a tile takes, and the whole blocks in it (0: none)."""
    if count == 1 or extent % whole == 0:
        return whole, 1
    if whole % extent == 0:
        return whole, whole // extent
    divisor = extent & -extent
    return (divisor, 1) if divisor >= 8 else (whole, 0)


def leading(
    shape: Sequence[int], extents: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Leading axes (height, extent, count), three of them; neighbours without blocks are one."""
    found: list[tuple[int, int, int]] = []
    for axis in zip(shape, extents, counts, strict=True):
        if found and axis[1] == 1 == found[-1][1]:
            found[-1] = (found[-1][0] * axis[0], 1, found[-1][2] * axis[2])
        elif found and axis[2] == 1 == found[-1][2]:
            height = found[-1][0] * axis[0]
            found[-1] = (height, height, 1)
        else:
            found.append(axis)
    return [(1, 1, 1)] * (3 - len(found)) + found


def kind_of(scheme: QuantScheme) -> int:
    """The constant of ``number_of`` for a scheme's codes."""
    if scheme.mode is QuantMode.LOOKUP:
        return int(LOOKUP.value)
    if scheme.value.is_float:
        return int(MINIFLOAT.value)
    return int((SIGNED if scheme.value.is_signed else UNSIGNED).value)


def scale_kind(scheme: QuantScheme) -> int:
    """The constant of ``stored_number`` for a scheme's scales."""
    kinds = {ScaleDtype.UE8M0: UE8M0, ScaleDtype.UE4M3: UE4M3}
    found = FLOAT if isinstance(scheme.scale, QuantScheme) else kinds.get(scheme.scale, FLOAT)
    return int(found.value)


def offset_kind(scheme: QuantScheme) -> int:
    """NO_OFFSET, ZERO_POINT or BIAS."""
    if scheme.offset is None:
        return int(NO_OFFSET.value)
    return int((BIAS if scheme.offset.kind is OffsetKind.BIAS else ZERO_POINT).value)


def _may_be_subnormal(scheme: QuantScheme) -> bool:
    """Whether values can be below 2^-126: not where all numbers are multiples of, say, 2^-64."""
    offset = None if scheme.offset is None else scheme.offset.dtype
    is_coarse = _is_coarse(scheme.scale) and (offset is None or _is_coarse(offset))
    return not is_coarse or scheme.tensor_scale is not None or scheme.mode is QuantMode.LOOKUP


def _is_coarse(stored: Any) -> bool:
    """Whether stored numbers, or integers times such, are multiples of 2^-24."""
    if isinstance(stored, QuantScheme):
        plain = stored.mode is not QuantMode.LOOKUP and not stored.value.is_float
        plain = plain and stored.offset is None and stored.tensor_scale is None
        return plain and _is_coarse(stored.scale)
    return stored in (ScaleDtype.F16, ScaleDtype.UE4M3) or isinstance(stored, QuantValue)
