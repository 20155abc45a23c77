"""Products of few float rows with a quantized weight, as one Pallas kernel that Triton compiles.

A program computes some rows of a weight stored (out, in) times all rows of x, over one slice of the
input axis; slices are added afterwards, in order. It reads the canonical bytes as they lie, sixteen
at a time where blocks allow. A byte holds ``planes`` codes that are neighbours along k, so x comes
cut into as many planes, and no code changes its place.

- Few rows (``Tiles.dots`` false): codes become exact float32, products are summed in float32, and
  the sum of a chunk takes the block's scale once. A thread keeps its part of x for all its rows.
- More rows: decoded values enter the tensor cores, beside bf16 rounded to bf16, beside f16 to tf32.

``schemes`` (in ``__init__``) says what the caller guarantees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from polyquant import standard
from polyquant.backends.jax.pallas import mma
from polyquant.errors import KernelRefused
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import QuantMode, QuantValue, ScaleDtype

Array = Any
#: Rows of x up to which float32 sums are taken to beat padding to sixteen for the tensor cores: of
#: q4s/32 they are some 4 instructions a value at one row (compiled for sm_90).
FEW_ROWS = 2
#: Programs that fill a large GPU several times over, so that some wait while others compute.
_PROGRAMS = 512
#: 2^23 as float32: below it lie 23 bits for an integer, which then is one subtraction away.
_MAGIC, _MAGIC_BITS = float(1 << 23), 0x4B000000
#: Loops of up to so many steps over one row of x are written out; more need the registers.
_WRITTEN_OUT = 2
#: A line of numbers as the first of two axes, and as the second.
_DOWN: Any = (slice(None), None)
_ACROSS: Any = (None, slice(None))


class Tiles(NamedTuple):
    """How a product is cut: rows of the weight and bytes of a line that a program takes at a time,
    slices of the lines, warps, stages of loads in flight, tensor cores or not, and whether the
    weight is their left operand."""

    rows: int
    line: int
    slices: int = 1
    warps: int = 4
    stages: int = 2
    dots: bool = False
    left: bool = True


class Codes(NamedTuple):
    """How bytes become numbers: ``decode(bytes, plane, zeros, table)``, float32, is the number of
    the plane's code times ``2**exponent(plane)``. ``bits`` of a code. ``looks_up``: from memory."""

    bits: int
    decode: Callable[[Array, int, Array | None, Any], Array]
    exponent: Callable[[int], int]
    looks_up: bool = False

    @property
    def planes(self) -> int:
        return 8 // self.bits


# -- codes ------------------------------------------------------------------------------------


def _four(code: str, results: int, codes: Array, kind: Any) -> Array:
    """PTX that takes four bytes as one register, ``{codes}``, and gives one or four registers."""
    made = plgpu.elementwise_inline_asm(
        "{ .reg .b32 t, u; " + code.replace("{codes}", f"${results}") + " }",
        args=[codes],
        constraints="=r," * results + "r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, kind)],
    )
    return made[0]


def _every_byte(byte: int) -> int:
    return byte * 0x01010101


def _integer(bits: int, sign: int, codes: Array, plane: int, zeros: Any, table: Any) -> Array:
    """An integer in place: its bits become those of a float of 2^23 and more."""
    shift = plane * bits
    flip = sign << shift  # turns two's complement into an offset
    mask = ((1 << bits) - 1) << shift
    # (codes & mask) ^ flip of four, then each below the magic byte
    code = f"lop3.b32 t, {{codes}}, {_every_byte(mask)}, {_every_byte(flip)}, 0x6A; "
    takes = (f"prmt.b32 ${i}, t, {_MAGIC_BITS}, {0x7440 + i};" for i in range(4))
    number = _four(code + " ".join(takes), 4, codes, jnp.int32)
    base = _MAGIC + flip
    if zeros is not None:
        base = base + zeros * float(1 << shift)
    return lax.bitcast_convert_type(number, jnp.float32) - base


def _looked_up(bits: int, codes: Array, plane: int, zeros: Any, table: Any) -> Array:
    return table[(codes.astype(jnp.int32) >> (plane * bits)) & ((1 << bits) - 1)]


def _as_float(bits: Array, kind: Any) -> Array:
    """Integers whose low bits are those of a narrower float, as float32."""
    size = jnp.uint16 if jnp.dtype(kind).itemsize == 2 else jnp.uint8
    return lax.bitcast_convert_type(bits.astype(size), kind).astype(jnp.float32)


def _e2m1(codes: Array, plane: int, zeros: Any, table: Any) -> Array:
    """As e4m3 with the same fields, whose exponents are 6 lower; it has subnormals too."""
    sign, rest = _every_byte(0x80), _every_byte(0x1C)
    moves = f"and.b32 t, {{codes}}, {sign}; shr.b32 u, {{codes}}, 2;"
    if plane == 0:
        moves = f"shl.b32 t, {{codes}}, 4; and.b32 t, t, {sign}; shl.b32 u, {{codes}}, 2;"
    joined = f" lop3.b32 $0, u, {rest}, t, 0xEA;"  # u & rest | t
    return _as_float(_four(moves + joined, 1, codes, jnp.int8), jnp.float8_e4m3fn)


def _e4m3(codes: Array, plane: int, zeros: Any, table: Any) -> Array:
    return _as_float(codes, jnp.float8_e4m3fn)


def _e5m2(codes: Array, plane: int, zeros: Any, table: Any) -> Array:
    return _as_float(codes.astype(jnp.int32) << 8, jnp.float16)


def codes_of(scheme: QuantScheme) -> Codes | None:
    """How a scheme's codes are decoded, or None where there is no way."""
    value, bits = scheme.value, scheme.bits
    if bits not in (1, 2, 4, 8):
        return None
    if scheme.mode is QuantMode.LOOKUP:
        return Codes(bits, partial(_looked_up, bits), lambda plane: 0, looks_up=True)
    minifloats: dict[QuantValue, tuple[Callable[..., Array], int]] = {
        QuantValue.E2M1: (_e2m1, -6),
        QuantValue.E4M3: (_e4m3, 0),
        QuantValue.E5M2: (_e5m2, 0),
    }
    if value in minifloats:
        decode, exponent = minifloats[value]
        return Codes(bits, decode, lambda plane: exponent)
    if value.is_float:
        return None
    sign = 1 << (bits - 1) if value.is_signed else 0
    return Codes(bits, partial(_integer, bits, sign), lambda plane: plane * bits)


def _times(x: Any, stored: Array, kind: Any) -> Array:
    """Numbers (float32) times stored scales."""
    if kind is ScaleDtype.UE8M0:
        bits = stored.astype(jnp.int32)
        number = jnp.where(bits == 255, 0x7FC00000, jnp.maximum(bits, 1) << 23)
        half = jnp.where(bits == 0, 0.5, 1.0)  # 2^-127 is no normal float32
        return x * lax.bitcast_convert_type(number, jnp.float32) * half
    if kind is ScaleDtype.UE4M3:
        return x * _as_float(stored, jnp.float8_e4m3fn)
    return x * stored.astype(jnp.float32)


# -- the kernel -------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What a kernel is specialised by. Extents: of the padded rows of x, of the weight, of a line
    in bytes and of one of x's planes; of the grids of scales and zero points; of a chunk of a line
    and of a block, in bytes; steps of the loop."""

    tiles: Tiles
    codes: Codes
    scale: Any
    m: int
    n: int
    line: int
    plane: int
    columns: int
    zero_columns: int
    chunk: int
    block: int
    block_rows: int
    steps: int
    parts: tuple[str, ...]


def _body(plan: _Plan, *refs: Any) -> None:
    """One program: rows of the weight, and a slice of its lines."""
    given = dict(zip((*plan.parts, "y"), refs, strict=True))
    tiles = plan.tiles
    rows = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    here = jnp.minimum(rows, plan.n - 1)
    first = pl.program_id(1) * (plan.steps * tiles.line)
    step = partial(_dots if tiles.dots else _sums, plan, given, here, first)
    groups = tiles.line // plan.chunk
    if tiles.dots:
        shape = (tiles.rows, plan.m) if tiles.left else (plan.m, tiles.rows)
        state: Any = jnp.zeros(shape, jnp.float32)
    else:
        state = (jnp.zeros((groups, tiles.rows), jnp.float32),) * plan.m
    if plan.m == 1 and plan.steps <= _WRITTEN_OUT and not tiles.dots:
        for i in range(plan.steps):
            state = step(i, state)
    else:
        state = lax.fori_loop(0, plan.steps, step, state)
    whole = _whole(plan, given, here)
    lines = pl.cdiv(plan.n, tiles.rows) * tiles.rows  # y has room for the rows of every program
    at, y = pl.program_id(1) * (plan.m * lines), given["y"]
    if not tiles.dots:
        for i, sums in enumerate(state):
            y[at + i * lines + rows] = (jnp.sum(sums, axis=0) * whole).astype(y.dtype)
        return
    by_row, by_x = (_DOWN, _ACROSS) if tiles.left else (_ACROSS, _DOWN)
    index = (jnp.arange(plan.m, dtype=jnp.int32) * lines)[by_x] + rows[by_row]
    y[at + index] = (state * whole[by_row]).astype(y.dtype)


def _whole(plan: _Plan, given: dict[str, Any], here: Array) -> Array:
    """What a row's sum is multiplied by at the end."""
    whole = jnp.ones(here.shape, jnp.float32)
    if plan.columns == 1:
        whole = _times(whole, given["scales"][here // plan.block_rows], plan.scale)
    if "tensor_scale" in given:
        whole = whole * given["tensor_scale"][0]
    return whole


class _Loaded(NamedTuple):
    """Codes of (rows, chunks, bytes of a chunk), with stored scales and zero points (rows, chunks);
    chunks before rows where threads are to lie along a line, as Triton lays them out by that."""

    codes: Array
    scales: Array | None
    zeros: Array | None


def _load(plan: _Plan, given: dict[str, Any], here: Array, begin: Array) -> _Loaded:
    by_row, by_chunk = (_DOWN, _ACROSS) if plan.tiles.dots else (_ACROSS, _DOWN)
    groups = plan.tiles.line // plan.chunk
    chunks = begin // plan.chunk + jnp.arange(groups, dtype=jnp.int32)
    within = jnp.arange(plan.chunk, dtype=jnp.int32)[None, None, :]
    column = (chunks * plan.chunk)[by_chunk][:, :, None] + within
    index = (here * plan.line)[by_row][:, :, None] + column
    if plan.plane == plan.line:
        codes = plgpu.load(given["codes"].at[index])
    else:
        mask = jnp.broadcast_to(column < plan.line, index.shape)
        codes = plgpu.load(given["codes"].at[index], mask=mask, other=0)

    def grid(name: str, columns: int) -> Array:
        place = jnp.minimum(chunks * plan.chunk // plan.block, columns - 1)
        return given[name][(here // plan.block_rows * columns)[by_row] + place[by_chunk]]

    scales = zeros = None
    if plan.columns > 1:
        scales = grid("scales", plan.columns)
    if "zeros" in given:
        zeros = grid("zeros", plan.zero_columns).astype(jnp.float32)[:, :, None]
    return _Loaded(codes, scales, zeros)


def _sums(
    plan: _Plan, given: dict[str, Any], here: Array, first: Array, i: Any, state: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Sums of products in float32; a chunk's sum is scaled."""
    begin = first + i * plan.tiles.line
    loaded = _load(plan, given, here, begin)
    groups = plan.tiles.line // plan.chunk
    column = jnp.arange(groups, dtype=jnp.int32)[:, None] * plan.chunk
    column = begin + column + jnp.arange(plan.chunk, dtype=jnp.int32)[None, :]
    totals: list[Any] = [None] * plan.m
    for plane in range(plan.codes.planes):
        w = plan.codes.decode(loaded.codes, plane, loaded.zeros, given.get("table"))
        back = math.ldexp(1.0, -plan.codes.exponent(plane))
        for row in range(plan.m):
            x = given["x"][(plane * plan.m + row) * plan.plane + column].astype(jnp.float32)
            part = jnp.sum(w * x[:, None, :], axis=2)
            part = part if back == 1.0 else part * back
            totals[row] = part if totals[row] is None else totals[row] + part
    if loaded.scales is not None:
        totals = [_times(total, loaded.scales, plan.scale) for total in totals]
    return tuple(before + total for before, total in zip(state, totals, strict=True))


def _dots(
    plan: _Plan, given: dict[str, Any], here: Array, first: Array, i: Any, state: Array
) -> Array:
    """Dots of decoded values, a plane at a time."""
    tiles = plan.tiles
    begin = first + i * tiles.line
    loaded = _load(plan, given, here, begin)
    column = begin + jnp.arange(tiles.line, dtype=jnp.int32)
    of_x = jnp.arange(plan.m, dtype=jnp.int32) * plan.plane
    for plane in range(plan.codes.planes):
        x = given["x"][plane * (plan.m * plan.plane) + of_x[:, None] + column[None, :]]
        w = plan.codes.decode(loaded.codes, plane, loaded.zeros, given.get("table"))
        back = math.ldexp(1.0, -plan.codes.exponent(plane))
        if loaded.scales is not None:
            w = w * _times(back, loaded.scales, plan.scale)[:, :, None]
        elif back != 1.0:
            w = w * back
        w = w.astype(x.dtype).reshape(tiles.rows, tiles.line)
        a, b = (w, x) if tiles.left else (x, w)
        dims = (((1,), (1,)), ((), ()))
        state = state + lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
    return state


# -- around it --------------------------------------------------------------------------------


def default_tiles(m: int, n: int, line: int, codes: Codes) -> Tiles:
    """The tiles of a product of m rows of x with a weight of n lines of so many bytes.

    They were measured at 8192 x 8192 (benchmarks/results/jax_gpu.json).
    """
    if m <= FEW_ROWS:
        return Tiles(rows=2 if codes.looks_up or codes.bits == 8 else 4, line=2048)
    rows, step = 64, 16 * codes.bits
    # Of few rows the weight is better the right operand; entries looked up are the other way round.
    left = (m > 16) != codes.looks_up
    most = max(1, min(_PROGRAMS * rows // n, line // (2 * step), 8 if left else 4))
    slices = 1 << (most.bit_length() - 1)
    stages = 1 if codes.looks_up else 3  # entries looked up must not wait in shared memory
    return Tiles(rows, step, slices, stages=stages, dots=True, left=left)


def cut_for(rows: Array, weight: QTensor) -> Tiles | mma.Tiles:
    """How a product of rows (m, k) is cut where nothing is asked for; which says by which kernel.

    ``mma`` is the quickest way of up to 32 rows, or 16 of shorter codes; but a line of whole bytes
    is read best by whole warps, as those do that sum one row (benchmarks/results/jax_gpu.json).
    """
    m, bits, line = rows.shape[0], weight.scheme.bits, weight.data.shape[-1]
    by_lanes = m <= (16 if bits < 4 else 32) and not (m <= FEW_ROWS and bits == 8)
    if by_lanes and mma.why_not(weight.scheme, rows.dtype, line) is None:
        return mma.default_tiles(m, weight.scheme)
    few = m <= FEW_ROWS or rows.dtype == jnp.float32
    return default_tiles(1 if few else m, weight.shape[1], line, _known(weight.scheme))


def _known(scheme: QuantScheme) -> Codes:
    codes = codes_of(scheme)
    if codes is None:
        refused, reason = f"a product by {scheme}", "it has no decoder for its codes"
        raise KernelRefused(kernel="jax.pallas.matmul", problem=refused, reason=reason)
    return codes


def matmul(
    x: Array,
    weight: QTensor,
    kind: Any,
    *,
    tiles: Tiles | mma.Tiles | None = None,
    interpret: bool = False,
) -> Array:
    """``x @ weight``, summed in float32: x (..., k) or (k,), weight (k, n) stored (n, k).

    ``kind``: the dtype of the result. ``tiles``: also says which way is taken. ``interpret``: run
    without a GPU, step by step.
    """
    k, n = weight.shape
    rows = x.reshape(-1, k)
    tiles = cut_for(rows, weight) if tiles is None else tiles
    if isinstance(tiles, mma.Tiles):
        y = mma.matmul(rows, weight, kind, tiles=tiles, interpret=interpret)
        return y.reshape(*x.shape[:-1], n)
    codes = _known(weight.scheme)
    parts, plan = _planned(rows.shape[0], weight, codes, tiles)
    parts["x"] = _planes(rows, plan)
    programs = pl.cdiv(n, tiles.rows)
    lines = programs * tiles.rows
    out = jnp.float32 if tiles.slices > 1 else kind
    made = pl.pallas_call(
        partial(_body, plan),
        out_shape=jax.ShapeDtypeStruct((tiles.slices * plan.m * lines,), out),
        grid=(programs, tiles.slices),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name=f"polyquant_{weight.scheme.value}",
    )(*(parts[name] for name in plan.parts))
    y = made.reshape(tiles.slices, plan.m, lines)[:, : rows.shape[0], :n]
    total = y[0]
    for i in range(1, tiles.slices):
        total = total + y[i]
    return total.astype(kind).reshape(*x.shape[:-1], n)


def _planned(m: int, weight: QTensor, codes: Codes, tiles: Tiles) -> tuple[dict[str, Array], _Plan]:
    """The stored arrays, flat, and what the kernel is specialised by."""
    scheme, (k, n) = weight.scheme, weight.shape
    data, scales, kind = weight.data, weight.scales, scheme.scale
    if isinstance(scales, QTensor):
        scales, kind = standard.dequantize(scales, None), ScaleDtype.F32
    columns, zero_columns = scales.shape[-1], 1
    block_rows, block = scheme.block_extents((n, k)) if scheme.block is not None else (n, k)
    block = block * codes.bits // 8 if columns > 1 else data.shape[-1]
    parts = {"x": None, "codes": data.reshape(-1), "scales": scales.reshape(-1)}
    if weight.offsets is not None:
        parts["zeros"], zero_columns = weight.offsets.reshape(-1), weight.offsets.shape[-1]
    if scheme.mode is QuantMode.LOOKUP:
        parts["table"] = standard.flush(weight.table)
    if weight.tensor_scale is not None:
        parts["tensor_scale"] = weight.tensor_scale.reshape(1)
    chunk = math.gcd(block, 16) if columns > 1 or zero_columns > 1 else 16
    steps = max(1, -(-data.shape[-1] // (tiles.line * tiles.slices)))
    padded = max(16, 1 << (m - 1).bit_length()) if tiles.dots else m
    plane = steps * tiles.line * tiles.slices
    plan = _Plan(
        tiles, codes, kind, padded, n, data.shape[-1], plane, columns, zero_columns,
        chunk, block, block_rows, steps, tuple(parts),
    )  # fmt: skip
    return parts, plan


def _planes(rows: Array, plan: _Plan) -> Array:
    """The rows of x cut into planes: code ``plane`` of byte ``i`` meets ``[plane, row, i]``."""
    m, k = rows.shape
    if plan.tiles.dots and rows.dtype == jnp.float16:
        rows = rows.astype(jnp.float32)  # tf32 holds float16 exactly, and has room for the weight
    whole = jnp.pad(rows, ((0, plan.m - m), (0, plan.plane * plan.codes.planes - k)))
    cut = whole.reshape(plan.m, plan.plane, plan.codes.planes)
    return jnp.transpose(cut, (2, 0, 1)).reshape(-1)
