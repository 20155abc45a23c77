"""Quantizing in one pass by CUDA C++ (encode.cu): values are in registers when scales are known.

"minmax" of blocks that a block of threads holds finds scales and offsets in the kernel; whatever
else calibrates, and whatever else blocks are, gives them first. Bit for bit what ``standard``
gives.
"""

from __future__ import annotations

import math
import threading
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from polyquant import calibrate, standard
from polyquant.backends.torch.cuda import nvrtc
from polyquant.backends.torch.cuda.decode import grid_of, leading
from polyquant.backends.torch.cuda.intervals import halved, intervals
from polyquant.backends.torch.cuda.kernels import why_not_encode
from polyquant.backends.torch.cuda.operands import Divider, Operands
from polyquant.codec import line_size_bytes
from polyquant.kernel import Seen
from polyquant.qtensor import QTensor, from_fields
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.standard import Params
from polyquant.tables import CUSTOM, named_table
from polyquant.values import QuantMode, QuantStore, QuantValue, ScaleDtype

_SOURCES = ("ptx.cuh", "encode.cu")
_INNER_SOURCES = (*_SOURCES, "inner.cu")
_KINDS = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2})
_TYPES = MappingProxyType({"f32": 0, "f16": 1, "bf16": 2, "ue8m0": 3, "ue4m3": 4})
_U8 = 5
#: Bytes of a run of values, which is what a lane takes at once; runs of a lane, and threads.
_RUN_BYTES, RUNS, THREADS = 32, 2, 128
#: The same where threads take a block together.
ROW_RUNS, _MOST_THREADS = 4, 1024
#: Blocks of threads that look for the largest number, and runs of a lane that are loaded at once.
_BLOCKS, _AHEAD = 1056, 8


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
    how = _How(table, nonfinite == "saturate", 0)
    return _quantize(x, scheme, calibration, params, how)


def quantize_and_look(
    x: torch.Tensor,
    scheme: QuantScheme,
    calibration: str,
    *,
    table: torch.Tensor | None = None,
) -> tuple[QTensor, Seen]:
    """The same of values that may not be finite: it waits, and says what the kernels saw."""
    flags = _flags(x.is_cuda)
    flags.values[:] = 0
    q = _quantize(x, scheme, calibration, None, _How(table, False, flags.address))
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()
    is_bad, has_smallest = flags.values.tolist()
    return q, Seen(not is_bad, bool(has_smallest) or scheme.table == CUSTOM)


class _Flags(threading.local):
    """A thread's memory of the host that kernels write to, so that nothing is to be copied back."""

    def __init__(self, is_pinned: bool) -> None:
        array = torch.zeros(2, dtype=torch.int32, pin_memory=is_pinned)
        self.values, self.address = array.numpy(), array.data_ptr()


@cache
def _flags(is_pinned: bool) -> _Flags:
    return _Flags(is_pinned)


class _How(NamedTuple):
    """What all kernels of a call are told: a table, the rule, and where flags are (0: nowhere)."""

    table: torch.Tensor | None
    saturates: bool
    flags: int


def _quantize(
    x: torch.Tensor, scheme: QuantScheme, calibration: str, params: Params | None, how: _How
) -> QTensor:
    values = (x.to(torch.float32) if x.dtype is torch.float64 else x).contiguous()
    values = values.resolve_neg()  # kernels read bytes; a view's sign may be in its flags
    shape = tuple(x.shape)
    stride = line_size_bytes(shape[-1] if shape else 1, scheme.bits, scheme.store)
    data = torch.empty((*shape[:-1], stride), dtype=torch.uint8, device=x.device)
    finds, inner = False, None
    if params is None and calibration == "minmax" and data.numel():
        inner = _inner_call(
            scheme, shape, _KINDS[values.dtype], how.saturates, _aligned(values, data)
        )
    if inner is not None:
        params = _encode_inner(values, scheme, data, how, inner)
    elif params is None and calibration == "minmax" and scheme.table != CUSTOM and data.numel():
        params, finds = _minmax(values, scheme, how)
    if params is None:
        name, argument = calibrate.check(calibration, scheme)
        rule = "saturate" if how.saturates else "raise"
        params = calibrate.METHODS[name][0](x, scheme, how.table, rule, argument)
    if data.numel() and inner is None:
        _encode(values, scheme, params, data, how, finds=finds)
    grids = (params.scales, params.tensor_scale, params.offsets, params.table)
    return from_fields(scheme, shape, data, *grids, tuple(range(x.ndim)), f"torch:{x.device}")


# -- ranges -----------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """How "minmax" goes for one scheme and shape: the kernel that finds ranges ("" where none
    does), the grid, in which dtypes it gives scales and offsets, and whether those are quantized.
    """

    kernel: str
    grid: tuple[int, ...]
    scales: torch.dtype
    offsets: torch.dtype | None
    is_nested: bool


@lru_cache(maxsize=4096)
def _plan(scheme: QuantScheme, shape: tuple[int, ...], kind: int) -> _Plan:
    offset = None if scheme.offset is None else scheme.offset.dtype
    is_nested = isinstance(scheme.scale, QuantScheme) or isinstance(offset, QuantScheme)
    found = "calibrate"
    if scheme.block is None:
        found = "" if is_nested or offset is not None else "largest"
    elif _holds(scheme, shape or (1,), kind):
        found = "encode"
    elif len(scheme.block) != 2 or scheme.block_extents(shape)[-1] > 256:
        found = ""
    if offset is not None and scheme.tensor_scale is not None:
        found = ""
    is_bias = scheme.offset is not None and scheme.offset.kind is OffsetKind.BIAS
    if isinstance(scheme.scale, QuantScheme) and scheme.offset is not None and not is_bias:
        found = ""  # zero points follow from scales as they are stored
    if standard.subtracts(scheme):
        found = ""  # no bias is above zero
    dtypes = _storage(scheme.scale), None if offset is None else _storage(offset)
    return _Plan(found, scheme.scale_shape(shape), *dtypes, is_nested)


def _minmax(x: torch.Tensor, scheme: QuantScheme, how: _How) -> tuple[Params | None, bool]:
    """The parameters (None: no kernel finds them), and whether they come with the codes."""
    plan = _plan(scheme, tuple(x.shape), _KINDS[x.dtype])
    if not plan.kernel:
        return None, False
    params = _empty(x, scheme, plan, how)
    if plan.kernel == "encode":
        if not plan.is_nested:
            return params, True
        _encode(x, scheme, params, None, how, finds=True)
    elif plan.kernel == "largest":
        _largest(x, scheme, params.scales, how)
    else:
        _calibrate(x, scheme, params, how)
    return (_nested(scheme, params) if plan.is_nested else params), False


def _holds(scheme: QuantScheme, shape: tuple[int, ...], kind: int) -> bool:
    """Whether a block of threads, or some lanes of it, hold a block's values."""
    *outer, height, extent = (1, *scheme.block_extents(shape))
    per = _per_run(kind)
    if math.prod(outer) != 1 or (height > 1 and extent < per):
        return False
    return height * -(-extent // per) <= ROW_RUNS * _MOST_THREADS


def _nested(scheme: QuantScheme, params: Params) -> Params:
    """Parameters with those quantized, float32 so far, that the scheme has quantized."""
    scales = _quantized(params.scales, scheme.scale)
    if scheme.offset is None:
        return params._replace(scales=scales)
    return params._replace(scales=scales, offsets=_quantized(params.offsets, scheme.offset.dtype))


def _quantized(numbers: Any, stored: Any) -> Any:
    """Scales or offsets as they are stored."""
    if not isinstance(stored, QuantScheme):
        return numbers
    if why_not_encode(stored) is not None:
        return standard.quantize_grid(numbers, stored)
    return quantize(numbers, stored, "minmax", table=standard.named_constant(numbers, stored))


def _empty(x: torch.Tensor, scheme: QuantScheme, plan: _Plan, how: _How) -> Params:
    """Where a kernel puts scales and offsets; with two levels, the tensor's scale."""
    scales = torch.empty(plan.grid, dtype=plan.scales, device=x.device)
    whole = offsets = None
    if scheme.tensor_scale is not None:
        whole = torch.empty((), dtype=torch.float32, device=x.device)
        _largest(x, scheme, whole, how)
    if plan.offsets is not None:
        offsets = torch.empty(plan.grid, dtype=plan.offsets, device=x.device)
    return Params(scales, whole, offsets, how.table)


def _storage(kind: Any) -> torch.dtype:
    """The dtype in which a kernel gives scales, or offsets: float32 of those that are quantized."""
    if isinstance(kind, QuantScheme):
        return torch.float32
    name = kind.storage if isinstance(kind, ScaleDtype) else "uint8"
    found: torch.dtype = getattr(torch, name)
    return found


def _largest(x: torch.Tensor, scheme: QuantScheme, scale: torch.Tensor, how: _How) -> None:
    """The scale of the whole tensor; of two levels the upper one."""
    kind, size = _KINDS[x.dtype], x.numel()
    work = torch.zeros(2, dtype=torch.int32, device=x.device)
    given = Operands(
        x=x.data_ptr(), scales=scale.data_ptr(), work=work.data_ptr(), seen=how.flags or None,
        range=_range(scheme), length=size, extent=size, count=1,
    )  # fmt: skip
    if scheme.tensor_scale is not None:
        given.scale_max = ScaleDtype(str(scheme.scale)).max
    whole = size % _per_run(kind) == 0 and x.data_ptr() % 16 == 0
    options = _options(scheme, kind=kind, saturates=how.saturates, whole=whole, runs=_AHEAD)
    blocks = min(_BLOCKS, -(-size // (_per_run(kind) * THREADS)))
    _launch("largest", options, x, given, blocks)


def _calibrate(x: torch.Tensor, scheme: QuantScheme, params: Params, how: _How) -> None:
    """The scales and offsets of blocks of so many lines that none holds their values."""
    shape, kind = tuple(x.shape), _KINDS[x.dtype]
    height, extent = scheme.block_extents(shape)[-2:]
    rows, count = scheme.scale_shape(shape)[-2:]
    per, lines = _per_run(kind), math.prod(shape[:-2])
    runs = -(-extent // per)
    group = _power(runs)
    whole = x.data_ptr() % 16 == 0 and shape[-1] % extent == 0 and extent == per * group
    tiles = -(-count * group // THREADS)
    given = Operands(
        range=_range(scheme), blocks=lines * rows * count, count=count, group=runs, tiles=tiles,
        h2=shape[-2], e2=height, c2=rows, length=shape[-1], extent=extent,
    )  # fmt: skip
    _point(given, x, params, how)
    facts: dict[str, Any] = {"group": group, "runs": _AHEAD}
    options = _options(scheme, kind=kind, saturates=how.saturates, whole=whole, **facts)
    _launch("calibrate", options, x, given, lines * rows * tiles)


def _range(scheme: QuantScheme) -> float:
    """What a block's range is divided by to give its scale."""
    if scheme.mode is QuantMode.LOOKUP:
        named = scheme.table != CUSTOM  # a table of the tensor's own comes with its scales
        return float(abs(named_table(str(scheme.table))).max()) if named else 1.0
    return scheme.value.half_range if scheme.offset is None else float(2**scheme.bits - 1)


# -- codes ------------------------------------------------------------------------------------


def _encode(
    x: torch.Tensor,
    scheme: QuantScheme,
    params: Params,
    data: torch.Tensor | None,
    how: _How,
    *,
    finds: bool,
) -> None:
    """Codes, and with ``finds`` scales and offsets; without ``data`` those alone."""
    flags = (finds, data is not None, how.saturates, _aligned(x, data))
    call = _call(scheme, tuple(x.shape) or (1,), _KINDS[x.dtype], *flags)
    options, given = call.options, Operands.from_buffer_copy(call.operands)
    shared = 0
    if scheme.mode is QuantMode.LOOKUP and data is not None:
        more, shared = _search(given, scheme, params.table, x.device)
        options += more
    grids = [grid_of(part) for part in (params.scales, params.offsets)]
    _point(given, x, params._replace(scales=grids[0], offsets=grids[1]), how)
    given.codes = None if data is None else data.data_ptr()
    _launch("encode", options, x, given, call.blocks, call.threads, shared)


def _search(
    given: Operands, scheme: QuantScheme, table: torch.Tensor | None, device: torch.device
) -> tuple[tuple[str, ...], int]:
    """Tells a kernel how to find entries of a table: more options, and bytes of shared memory."""
    found = intervals(scheme, table, device)
    given.steps, given.intervals = found.steps.data_ptr(), found.steps.shape[0]
    # From the first's middle to the last's; 1.5 * 2^23 makes a number's lowest bits whole.
    given.by, given.span = found.by, found.steps.shape[0] - 1
    given.inverse = given.by / given.span
    given.bottom = 1.5 * 2**23 - given.span / 2
    # Of the interval of number 0, less the bits of 1.5 * 2^23, which come with a number.
    given.origin = 8 * found.copies * (given.intervals // 2 - 0x4B400000) % 2**32
    options = (f"COPIES={found.copies}", f"DENSE={int(not found.by)}")
    return options, 8 * given.intervals * found.copies


def _aligned(x: torch.Tensor, data: torch.Tensor | None) -> bool:
    return x.data_ptr() % 16 == 0 and (data is None or data.data_ptr() % 16 == 0)


class _Call(NamedTuple):
    """What the kernel is compiled and told for one scheme and shape, besides the arrays."""

    options: tuple[str, ...]
    threads: int
    blocks: int
    operands: Operands


@lru_cache(maxsize=4096)
def _call(
    scheme: QuantScheme,
    shape: tuple[int, ...],
    kind: int,
    finds: bool,
    codes: bool,
    saturates: bool,
    aligned: bool,
) -> _Call:
    width = 8 if scheme.store is QuantStore.NATIVE else scheme.bits
    length, lines, per = shape[-1], math.prod(shape[:-1]), _per_run(kind)
    stride = line_size_bytes(length, scheme.bits, scheme.store)
    extents, counts = scheme.block_extents(shape), scheme.scale_shape(shape)
    extent, count = extents[-1], counts[-1]
    in_lines = scheme.block is not None and math.prod(extents[:-1]) == 1
    is_full = length * width == 8 * stride
    is_one = is_full and (scheme.block is None or (in_lines and length % extent == 0))
    if is_one:  # the lines are one
        extent = extent if in_lines else extent * lines
        length, stride, lines = length * lines, stride * lines, 1
        count = length // extent
    # The last block of a line takes its padding too.
    size = max(stride - (count - 1) * (extent * width // 8), (count > 1) * extent * width // 8)
    runs = -(-8 * size // (width * per))  # of a block
    is_tall = finds and not in_lines
    height, across = (extents[-2], _power(runs)) if is_tall else (1, 0)
    group, threads, each = _power(runs) * _power(height) if finds else 0, THREADS, RUNS
    if group > 32:
        group, across, each = 0, is_tall * runs, min(ROW_RUNS, -(-runs * height // 32))
        threads = -(-runs * height // (32 * each)) * 32
    tiles = -(-runs * count // (threads * each))
    shift = runs.bit_length() - 1 if runs == _power(runs) else 32
    given = Operands(
        range=_range(scheme), blocks=lines * count, count=count, group=runs, tiles=tiles,
        shift=shift, length=length, extent=extent, stride=stride,
    )  # fmt: skip
    if is_tall:
        given.h2, given.e2, given.c2 = shape[-2], height, counts[-2]
        given.blocks = math.prod(counts)
        given.lines, given.rows = Divider.of(count), Divider.of(counts[-2])
    elif not (is_one or in_lines):
        axes = leading(shape[:-1], extents[:-1], counts[:-1])
        (_, given.e0, _), (given.h1, given.e1, given.c1), (given.h2, given.e2, given.c2) = axes
    blocks = lines * tiles
    if finds:
        blocks = given.blocks if not group else -(-given.blocks * group // (threads * each))
    fits = across == runs if is_tall else group in (0, runs)
    whole = aligned and is_full and extent % per == 0 and fits
    whole = whole and (is_one or ((is_tall or not finds) and length % extent == 0))
    facts: dict[str, Any] = {
        "finds": finds,
        "codes": codes,
        "group": group,
        "across": across,
        "runs": each,
        "threads": threads,
    }
    options = _options(scheme, kind=kind, saturates=saturates, whole=whole, **facts)
    return _Call(options, threads, blocks, given)


# -- scales that are quantized themselves -----------------------------------------------------


@lru_cache(maxsize=4096)
def _inner_call(
    scheme: QuantScheme, shape: tuple[int, ...], kind: int, saturates: bool, aligned: bool
) -> _Call | None:
    """How one kernel finds scales, and offsets, that are quantized, and codes; None: none does."""
    plan = _plan(scheme, shape, kind)
    if plan.kernel != "encode" or not isinstance(scheme.scale, QuantScheme):
        return None
    call = _call(scheme, shape or (1,), kind, True, True, saturates, aligned)
    lanes = call.operands.group
    if not {"WHOLE=1", "ACROSS=0", f"GROUP={lanes}"} <= set(call.options):
        return None
    parts = _inner_schemes(scheme)
    kinds = [_inner_extent(part, plan.grid) for part in parts]
    *outer, count = plan.grid
    extent, group = kinds[0], _power(max(kinds[0], 1))
    unit = min(extent, count)
    if group == extent < count:  # several blocks of scales
        unit *= max(1, THREADS * RUNS // (extent * lanes))
    runs = min(lanes, ROW_RUNS if group > 32 else RUNS)
    threads = -(-unit * lanes // (32 * runs)) * 32
    is_whole = unit >= count or all(unit * part.bits % 8 == 0 for part in parts)
    if not extent or set(kinds) != {extent} or threads > _MOST_THREADS or not is_whole:
        return None
    given = Operands.from_buffer_copy(call.operands)
    given.count, given.unit, given.extents = count, unit, extent
    given.tiles, given.inner_count = -(-count // unit), -(-count // extent)
    facts: dict[str, Any] = {"codes": True, "group": lanes, "runs": runs, "threads": threads}
    options = _options(scheme, kind=kind, saturates=saturates, whole=True, **facts)
    options += (f"INNER_GROUP={group}",)
    for name, i in (("INNER", 0), ("INNER_OFFSET", 1)):
        options += _of_inner(name, parts[i] if i < len(parts) else None)
    for part, place in zip(parts, given.inner, strict=False):
        place.range, (place.low, place.high) = _range(part), part.value.range
        place.stride = line_size_bytes(count, part.bits, part.store)
    return _Call(options, threads, math.prod(outer) * given.tiles, given)


def _inner_schemes(scheme: QuantScheme) -> list[QuantScheme]:
    """Those of scales and offsets that are quantized."""
    kinds = (scheme.scale, None if scheme.offset is None else scheme.offset.dtype)
    return [kind for kind in kinds if isinstance(kind, QuantScheme)]


def _inner_extent(part: QuantScheme, grid: tuple[int, ...]) -> int:
    """How many numbers of a line of the grid a block holds; 0 where the kernel does not do it."""
    is_plain = part.offset is None and part.tensor_scale is None and part.block is not None
    is_plain = is_plain and not (part.extras or part.value.is_float or part.table == CUSTOM)
    if not is_plain or part.scale not in (ScaleDtype.F32, ScaleDtype.F16, ScaleDtype.BF16):
        return 0
    *outer, extent = part.block_extents(grid)
    return extent if math.prod(outer) == 1 else 0


def _of_inner(name: str, part: QuantScheme | None) -> tuple[str, ...]:
    """What the kernel is compiled for besides."""
    if part is None:
        return tuple(f"{name}_{what}={-1 if what == 'KIND' else 1}" for what in _OF_INNER)
    kind = 2 if part.mode is QuantMode.LOOKUP else 0
    width = 8 if part.store is QuantStore.NATIVE else part.bits
    facts = (kind, part.bits, width, _TYPES[str(part.scale)])
    return tuple(f"{name}_{what}={fact}" for what, fact in zip(_OF_INNER, facts, strict=True))


_OF_INNER = ("KIND", "BITS", "WIDTH", "TYPE")


def _encode_inner(
    x: torch.Tensor, scheme: QuantScheme, data: torch.Tensor, how: _How, call: _Call
) -> Params:
    """Codes, and scales and offsets as they are stored, in one pass."""
    grid = scheme.scale_shape(tuple(x.shape))
    options, given, shared = call.options, Operands.from_buffer_copy(call.operands), 0
    if scheme.mode is QuantMode.LOOKUP:
        more, shared = _search(given, scheme, how.table, x.device)
        options = tuple(o for o in options if o.partition("=")[0] not in ("COPIES", "DENSE")) + more
    made = []
    for part, place in zip(_inner_schemes(scheme), given.inner, strict=False):
        codes = torch.empty((*grid[:-1], place.stride), dtype=torch.uint8, device=x.device)
        numbers = torch.empty(part.scale_shape(grid), dtype=_storage(part.scale), device=x.device)
        table = standard.named_constant(numbers, part)
        place.codes, place.scales = codes.data_ptr(), numbers.data_ptr()
        if table is not None:
            edges = halved(str(part.table), x.device)
            place.steps, place.table = edges.data_ptr(), table.data_ptr()
            shared += edges.nbytes
        axes, device = tuple(range(len(grid))), f"torch:{x.device}"
        made.append(from_fields(part, grid, codes, numbers, None, None, table, axes, device))
    offsets: Any = made[1] if len(made) > 1 else None
    if scheme.offset is not None and offsets is None:
        offsets = torch.empty(grid, dtype=_storage(scheme.offset.dtype), device=x.device)
        given.offsets = offsets.data_ptr()
    given.x, given.codes, given.seen = x.data_ptr(), data.data_ptr(), how.flags or None
    _launch("encode_inner", options, x, given, call.blocks, call.threads, shared)
    return Params(made[0], None, offsets, how.table)


def _per_run(kind: int) -> int:
    """Values of a run."""
    return _RUN_BYTES // (2 if kind else 4)


def _power(count: int) -> int:
    """The smallest power of two not below ``count``."""
    return 1 << (count - 1).bit_length()


@lru_cache(maxsize=4096)
def _options(
    scheme: QuantScheme,
    *,
    kind: int,
    saturates: bool,
    whole: bool,
    finds: bool = True,
    codes: bool = False,
    group: int = 1,
    across: int = 0,
    runs: int = 1,
    threads: int = THREADS,
) -> tuple[str, ...]:
    """What a kernel is compiled for."""
    found = _of_scheme(scheme) | {
        "IN": kind, "CODES": codes, "CALIBRATES": finds, "SATURATES": saturates, "WHOLE": whole,
        "GROUP": group, "ACROSS": across, "RUNS": runs, "THREADS": threads,
    }  # fmt: skip
    if not codes or found["KIND"] != 2:  # else the table says
        found |= {"COPIES": 1, "DENSE": 0}
    # By a scale that is not rounded, values end where the table does.
    is_f32 = scheme.scale is ScaleDtype.F32 and scheme.tensor_scale is None
    found["BOUNDED"] = finds and is_f32 and not saturates
    flags = {name: int(flag) for name, flag in found.items() if isinstance(flag, bool)}
    return tuple(f"{name}={value}" for name, value in (found | flags).items())


def _of_scheme(scheme: QuantScheme) -> dict[str, Any]:
    """The scheme's part of what a kernel is compiled for; quantized scales are decoded numbers."""
    value, offset = scheme.value, scheme.offset
    low, high = value.range
    found = {
        "KIND": 2 if scheme.mode is QuantMode.LOOKUP else int(value.is_float),
        "BITS": scheme.bits,
        "BYTE": scheme.store is QuantStore.NATIVE,
        "MANTISSA": int(value[3]) if value.is_float else 0,
        "TOP": f"{high}f",
        "LOW": f"{low}f",
        "HIGH": f"{high}f",
        "SCALE": _TYPES.get(str(scheme.scale), 0),
        "OFFSET": 0,
        "OFFSET_TYPE": 0,
        "OFFSET_TOP": "0.f",
        "TWO_LEVELS": scheme.tensor_scale is not None,
        "POWERS": scheme.scale is ScaleDtype.UE8M0 and scheme.tensor_scale is None,
    }
    if offset is not None and isinstance(offset.dtype, QuantValue):
        top = min(2**offset.dtype.bits, 2**scheme.bits) - 1.0
        found |= {"OFFSET": 1, "OFFSET_TYPE": _U8, "OFFSET_TOP": f"{top}f"}
    elif offset is not None:
        number = 3 if offset.kind is OffsetKind.BIAS else 2
        found |= {"OFFSET": number, "OFFSET_TYPE": _TYPES.get(str(offset.dtype), 0)}
    return found


def _point(given: Operands, x: torch.Tensor, params: Params, how: _How) -> None:
    """Addresses of the arrays that every kernel takes."""
    given.seen = how.flags or None
    arrays = {"x": x, **params._asdict()}
    for name in ("x", "scales", "tensor_scale", "offsets"):
        array = arrays[name]
        setattr(given, name, None if array is None else array.data_ptr())


def _launch(
    name: str,
    options: tuple[str, ...],
    x: torch.Tensor,
    given: Operands,
    blocks: int,
    threads: int = THREADS,
    shared: int = 0,
) -> None:
    sources = _INNER_SOURCES if name == "encode_inner" else _SOURCES
    function = nvrtc.load(sources, name, options, threads, shared, x.device.index or 0)
    nvrtc.launch(function, (blocks, 1, 1), given)
