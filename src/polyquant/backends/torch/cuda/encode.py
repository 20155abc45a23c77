"""Quantizing in one pass by Triton: "minmax" finds the scales, and the values are still at hand.

A program takes a tile of whole blocks, finds each block's largest magnitude, its stored scale and
its codes, and packs them into words: bit for bit what ``standard.quantize`` gives. For symmetric
and looked-up values in blocks along the last axis; with parameters given, it only encodes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from polyquant import calibrate, standard
from polyquant.backends.torch.cuda.decode import (
    TINY,
    UE4M3,
    UE8M0,
    flush,
    minifloat,
)
from polyquant.codec import line_size_bytes
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.standard import Params, divide
from polyquant.tables import CUSTOM, named_table, steps
from polyquant.values import QuantMode, ScaleDtype

_TILE = 4096
#: The longest block that a program holds at once.
_LONGEST = 16384
INTEGER, MINIFLOAT, LOOKUP = (tl.constexpr(i) for i in range(3))
F32, F16, BF16 = (tl.constexpr(i) for i in range(3, 6))
OF_BLOCK, OF_TENSOR, OF_LINE = (tl.constexpr(i) for i in range(3))
F32_MAX = tl.constexpr(3.4028234663852886e38)
#: A divisor above this has a subnormal reciprocal: it and its numbers are scaled by 2^-24 first.
BIG, DOWN = tl.constexpr(2.0**126), tl.constexpr(2.0**-24)
#: Added and taken away it rounds numbers below 2^22 to whole ones, ties to even.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def up_to_f16(x):
    """The smallest float16 not below x >= 0, at most its largest."""
    near = tl.minimum(x, 65504.0).to(tl.float16)
    bits = near.to(tl.int16, bitcast=True) + (near.to(tl.float32) < x).to(tl.int16)
    return tl.minimum(bits, 0x7BFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def up_to_bf16(x):
    """The smallest bfloat16 not below x >= 0, at most its largest."""
    bits = (x.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    return tl.minimum(bits, 0x7F7F).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def up_to_ue8m0(x):
    """The byte of the next power of two; 0 for zero."""
    return tl.minimum((x.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23, 254)


@triton.jit
def up_to_ue4m3(x):
    """The byte of the smallest e4m3 number not below x >= 0, at most 448."""
    limited = tl.minimum(x, 448.0)
    normal = ((limited.to(tl.int32, bitcast=True) + 0xFFFFF) >> 20) - (120 << 3)
    small = tl.minimum(limited, 0.015625) * 512.0  # below 2^-6 in steps of 2^-9
    whole = small.to(tl.int32)
    whole += (whole.to(tl.float32) < small).to(tl.int32)
    return tl.minimum(tl.where(limited < 0.015625, whole, normal), 0x7E)


@triton.jit
def to_minifloat(t, BITS: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr):
    """Codes of the nearest numbers of a minifloat, ties to even, saturated at TOP."""
    BIAS: tl.constexpr = 2 ** (BITS - 2 - MANTISSA) - 1
    bits = t.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(t), TOP)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, 1 - BIAS)
    up = ((127 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)  # 1 / step
    steps_up = (size * up + ROUNDER) - ROUNDER
    code = ((exponent + BIAS - 1) << MANTISSA) + steps_up.to(tl.int32)
    return code | (((bits >> 31) & 1) << (BITS - 1))


@triton.jit
def to_entry(t, middle_ptr, codes_ptr, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """Codes of the nearest entries of a table: by how many midpoints lie strictly below."""
    low = tl.zeros_like(t).to(tl.int32)
    for level in tl.static_range(LEVELS):
        half = 2 ** (LEVELS - 1 - level)
        probe = low + (half - 1)
        inside = probe < COUNT
        middle = tl.load(middle_ptr + tl.minimum(probe, COUNT - 1))
        low += tl.where(inside & (middle < t), half, 0)
    return tl.load(codes_ptr + low).to(tl.int32)


@triton.jit
def rounded_up(ideal, SCALE: tl.constexpr):
    """Ideal scales as stored ones: the smallest not below."""
    if SCALE == UE8M0:
        raw = up_to_ue8m0(ideal)
    elif SCALE == UE4M3:
        raw = up_to_ue4m3(ideal)
    elif SCALE == F16:
        raw = up_to_f16(ideal)
    elif SCALE == BF16:
        raw = up_to_bf16(ideal)
    else:
        raw = tl.minimum(ideal, F32_MAX)
    return raw


@triton.jit
def scaled(x, raw, tensor_scale_ptr, SCALE: tl.constexpr, HAS_TENSOR_SCALE: tl.constexpr):
    """Blocks (rows, values) over their divisors: one reciprocal a block, one product a value."""
    before = tl.full(raw.shape, 1.0, tl.float32)
    if SCALE == UE8M0:
        byte = raw.to(tl.int32)
        scale = (tl.maximum(byte, 1) << 23).to(tl.float32, bitcast=True)
        before = tl.where(byte == 0, 2.0, 1.0)
    elif SCALE == UE4M3:
        scale = minifloat(raw.to(tl.int32), 8, 3)
    else:
        scale = flush(raw.to(tl.float32))
    if HAS_TENSOR_SCALE:
        scale = flush(scale * tl.load(tensor_scale_ptr))
    is_big = tl.abs(scale) > BIG
    before = tl.where(is_big, before * DOWN, before)
    scale = tl.where(is_big, scale * DOWN, scale)
    is_empty = scale == 0.0
    reciprocal = tl.where(is_empty, 0.0, tl.div_rn(1.0, tl.where(is_empty, 1.0, scale)))
    return (x * before[:, None]) * reciprocal[:, None]


@triton.jit
def encode_kernel(
    x_ptr, codes_ptr, scales_ptr, tensor_scale_ptr, middle_ptr, entries_ptr, blocks, count, length,
    extent, stride, half_range, low, high,
    KIND: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr,
    SCALE: tl.constexpr, HAS_TENSOR_SCALE: tl.constexpr, CALIBRATES: tl.constexpr,
    SATURATES: tl.constexpr, COUNT: tl.constexpr, LEVELS: tl.constexpr, PLACE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS blocks of at most BLOCK values: values in, stored scales and packed codes out."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    line = block // count
    first = ((block - line * count) * extent).to(tl.int32)
    offset = tl.arange(0, BLOCK)[None, :]
    at = first[:, None] + offset
    inside = (block < blocks)[:, None] & (at < length) & (offset < extent)
    x = tl.load(x_ptr + line[:, None] * length + at, mask=inside, other=0.0).to(tl.float32)
    seen = x
    if SATURATES:
        seen = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        x = tl.minimum(tl.maximum(tl.where(x != x, 0.0, x), -F32_MAX), F32_MAX)
    x = flush(x)
    place = block
    if PLACE == OF_TENSOR:
        place = tl.zeros_like(block)
    elif PLACE == OF_LINE:
        place = line
    if CALIBRATES:
        ideal = flush(tl.div_rn(tl.max(tl.abs(flush(seen)), axis=1), half_range))
        if HAS_TENSOR_SCALE:
            whole = tl.load(tensor_scale_ptr)
            ideal = tl.div_rn(ideal, whole)
        ideal = flush(ideal)
        raw = rounded_up(ideal, SCALE)
        tl.store(scales_ptr + place, raw.to(scales_ptr.dtype.element_ty), mask=block < blocks)
    else:
        raw = tl.load(scales_ptr + place, mask=block < blocks, other=0)
    t = scaled(x, raw, tensor_scale_ptr, SCALE, HAS_TENSOR_SCALE)
    if KIND == LOOKUP:
        code = to_entry(flush(t), middle_ptr, entries_ptr, COUNT, LEVELS)
    elif KIND == MINIFLOAT:
        code = to_minifloat(t, BITS, MANTISSA, TOP)
    else:
        limited = tl.minimum(tl.maximum(t, -1024.0), 1024.0)
        whole_number = (limited + ROUNDER) - ROUNDER
        code = tl.minimum(tl.maximum(whole_number, low), high).to(tl.int32) & (2**BITS - 1)
    code = tl.where(inside, code, 0)
    PER_WORD: tl.constexpr = 32 // BITS
    shifts = tl.arange(0, PER_WORD) * BITS
    parts = tl.reshape(code, (ROWS, BLOCK // PER_WORD, PER_WORD)) << shifts[None, None, :]
    words = tl.sum(parts, axis=2)
    word = tl.arange(0, BLOCK // PER_WORD)[None, :]
    kept = (block < blocks)[:, None] & (first[:, None] // PER_WORD + word < stride // 4)
    kept &= word * PER_WORD < extent
    out = codes_ptr.to(tl.pointer_type(tl.int32)) + line[:, None] * (stride // 4)
    tl.store(out + first[:, None] // PER_WORD + word, words, mask=kept)


# -- calls ------------------------------------------------------------------------------------


def quantize(
    x: torch.Tensor,
    scheme: QuantScheme,
    calibration: str,
    *,
    params: Params | None = None,
    table: torch.Tensor | None = None,
    nonfinite: str = "raise",
) -> QTensor:
    """Quantize ``x`` (stored order); whatever else calibrates gives the parameters first."""
    name, argument = calibrate.check(calibration, scheme)
    shape = tuple(x.shape)
    values = (x.to(torch.float32) if x.dtype is torch.float64 else x).contiguous()
    grid = scheme.scale_shape(shape)
    stride = line_size_bytes(shape[-1] if shape else 1, scheme.bits, scheme.store)
    data = torch.empty((*shape[:-1], stride), dtype=torch.uint8, device=x.device)
    calibrates = params is None and name == "minmax" and scheme.table != CUSTOM
    saturates = nonfinite == "saturate"
    if params is None and not calibrates:
        params = calibrate.METHODS[name][0](x, scheme, table, nonfinite, argument)
    elif params is None:
        whole = _tensor_scale(values, scheme, saturates)
        if _in_tile(scheme, shape[-1] if shape else 1):
            storage = getattr(torch, scheme.scale.storage)  # type: ignore[union-attr]
            scales = torch.zeros(grid, dtype=storage, device=x.device)
        else:
            scales, calibrates = _long_scales(values, scheme, grid, saturates), False
        params = Params(scales, whole, None, table)
    if data.numel():
        _encode(values, scheme, params, data, calibrates, saturates)
    return QTensor(
        scheme,
        shape,
        data,
        params.scales,
        tensor_scale=params.tensor_scale,
        table=params.table,
        device=f"torch:{x.device}",
    )


def _tensor_scale(x: torch.Tensor, scheme: QuantScheme, saturates: bool) -> torch.Tensor | None:
    """The second level's scale: the largest ideal scale over the largest stored one."""
    if scheme.tensor_scale is None or not isinstance(scheme.scale, ScaleDtype):
        return None
    top = _ideal(_largest(x, None, saturates), scheme)
    return divide(top, scheme.scale.max).clamp(TINY.value, F32_MAX.value)


def _long_scales(
    x: torch.Tensor, scheme: QuantScheme, grid: tuple[int, ...], saturates: bool
) -> torch.Tensor:
    """The stored scales of blocks that are too long for a tile: lines, or the whole tensor."""
    axis = None if scheme.block is None else -1
    ideal = _ideal(_largest(x, axis, saturates), scheme).reshape(grid)
    scales: torch.Tensor = standard.store_scales(ideal, scheme)[0]
    return scales


def _largest(x: torch.Tensor, axis: int | None, saturates: bool) -> torch.Tensor:
    size = x.abs()
    if saturates:
        size = torch.where(torch.isfinite(size), size, 0)
    if not size.numel():
        shape = () if axis is None else size.shape[:-1]
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    found = size.amax() if axis is None else size.amax(axis)
    return found.to(torch.float32)


def _ideal(alpha: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    made: torch.Tensor = standard.flush(divide(standard.flush(alpha), _half_range(scheme)))
    return made


def _half_range(scheme: QuantScheme) -> float:
    if scheme.mode is QuantMode.LOOKUP:
        named = scheme.table != CUSTOM  # a table of the tensor's own comes with its scales
        return float(abs(named_table(str(scheme.table))).max()) if named else 1.0
    return scheme.value.half_range


def _encode(
    x: torch.Tensor,
    scheme: QuantScheme,
    params: Params,
    data: torch.Tensor,
    calibrates: bool,
    saturates: bool,
) -> None:
    call = _call(scheme, tuple(x.shape) or (1,), calibrates, saturates)
    middle = entries = None
    count = levels = 0
    if scheme.mode is QuantMode.LOOKUP:
        middle, entries = _steps(scheme, params.table, x.device)
        count = middle.numel()
        levels = count.bit_length()
    encode_kernel[call.grid](
        x,
        data,
        params.scales.contiguous(),
        params.tensor_scale,
        middle,
        entries,
        *call.numbers,
        **dict(call.constants),
        COUNT=count,
        LEVELS=levels,
        num_warps=8,
        enable_fp_fusion=False,
    )


def _steps(
    scheme: QuantScheme, table: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    if scheme.table != CUSTOM or table is None:
        return _named_steps(str(scheme.table), device)
    middle, codes = steps(table.cpu().numpy())
    return torch.from_numpy(middle).to(device), torch.from_numpy(codes).to(device)


@lru_cache(maxsize=64)
def _named_steps(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    middle, codes = steps(named_table(name))
    return torch.from_numpy(middle).to(device), torch.from_numpy(codes).to(device)


class _Call(NamedTuple):
    """What the kernel is told of one scheme and shape, besides the arrays."""

    grid: tuple[int]
    numbers: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]


@lru_cache(maxsize=4096)
def _call(scheme: QuantScheme, shape: tuple[int, ...], calibrates: bool, saturates: bool) -> _Call:
    length = shape[-1]
    extent, place = _segments(scheme, length)
    count = -(-length // extent)
    blocks = math.prod(shape[:-1]) * count
    per_word = 32 // scheme.bits
    block = max(triton.next_power_of_2(extent), per_word)
    rows = max(1, _TILE // block)
    value = scheme.value
    kind = LOOKUP if scheme.mode is QuantMode.LOOKUP else MINIFLOAT if value.is_float else INTEGER
    kinds = {"f32": F32, "f16": F16, "bf16": BF16, "ue8m0": UE8M0, "ue4m3": UE4M3}
    constants = {
        "KIND": kind.value,
        "BITS": scheme.bits,
        "MANTISSA": int(value[3]) if value.is_float else 0,
        "TOP": value.range[1],
        "SCALE": kinds[str(scheme.scale)].value,
        "HAS_TENSOR_SCALE": scheme.tensor_scale is not None,
        "CALIBRATES": calibrates,
        "SATURATES": saturates,
        "PLACE": place.value,
        "ROWS": rows,
        "BLOCK": block,
    }
    stride = line_size_bytes(length, scheme.bits, scheme.store)
    low, high = value.range
    numbers = (blocks, count, length, extent, stride, _half_range(scheme), low, high)
    return _Call((-(-blocks // rows),), numbers, tuple(constants.items()))


def _in_tile(scheme: QuantScheme, length: int) -> bool:
    """Whether a program sees whole blocks, and so can calibrate."""
    return _segments(scheme, length)[1] is OF_BLOCK


def _segments(scheme: QuantScheme, length: int) -> tuple[int, tl.constexpr]:
    """Values that a row of a tile takes, and whose scale it has."""
    if scheme.block is None:
        return min(length, 1024), OF_TENSOR
    extent = length if scheme.block[-1] == -1 else min(scheme.block[-1], length)
    return (extent, OF_BLOCK) if extent <= _LONGEST else (1024, OF_LINE)
