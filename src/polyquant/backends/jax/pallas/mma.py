"""Products of few bfloat16 rows with a quantized weight on tensor cores, lane by lane.

Triton brings what enters its dot to shared memory, so decoded numbers would go there and back. Here
every array is (threads, width), a thread has a row of it, and a warp multiplies by
``mma.m16n8k16`` itself: the codes are the rows of its left operand, decoded in the registers that
they were loaded to (``codes``), and the rows of x, as they lie, are the columns of the right one.
That a thread has a whole row is what Triton makes of arrays that are loaded by neighbours.

A warp takes ``16 * tiles`` rows of the weight, and a quad of lanes shares a row. A *run* is what a
quad loads of a line at once, ``width`` bytes a lane, and makes of it are as many numbers a lane as
one or more rows of ``width``, its *parts*. Warps lie side by side along k; their sums are added in
order at the end.

A block's scale multiplies the block's sum, where a run lies in one block or a lane has a word of
each of two: then no code is rounded. Else, and from 17 rows of x on, scales multiply the numbers,
and both are rounded to bfloat16. Sums are float32.

``why_not`` says what the caller guarantees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from polyquant import standard
from polyquant.backends.jax.pallas.codes import MINUS_ZERO, Codes, Lines, codes_of, fma, paired
from polyquant.errors import KernelRefused
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import QuantValue, ScaleDtype

Array = Any
#: Numbers that are decoded at once, and the alignment of lines that it takes.
OCTET, RUN = 8, 32
#: Types of scales that bfloat16 holds exactly.
_FEW_BITS = (ScaleDtype.UE8M0, ScaleDtype.UE4M3, ScaleDtype.BF16)
#: Rows of x up to which it is less work to scale sums than numbers.
_FEW_ROWS = 16


class Tiles(NamedTuple):
    """How a product is cut: times 16 rows of the weight a warp, warps side by side along k, runs
    that a warp takes at a time, numbers in a thread's row."""

    tiles: int = 2
    warps: int = 8
    runs: int = 2
    width: int = 8

    @property
    def run(self) -> int:
        """Bytes of a line that a quad takes at a time."""
        return 4 * self.width


# -- PTX --------------------------------------------------------------------------------------


def _ptx(write: Callable[..., Lines], result: Any, **given: Array) -> Array:
    """What PTX makes of a thread's rows: ``write(result, **given)`` gets the names of registers."""
    shape = next(iter(given.values())).shape
    kinds = [jnp.dtype(result), *(jnp.dtype(x.dtype) for x in given.values())]
    names: list[Lines] = []
    constraints: Lines = []
    for i, kind in enumerate(kinds):
        count, first = shape[1] * kind.itemsize // 4, len(constraints)
        names.append([f"${j}" for j in range(first, first + count)])
        constraints += [("" if i else "=") + ("f" if kind == jnp.float32 else "r")] * count
    lines = write(names[0], **dict(zip(given, names[1:], strict=True)))
    made = plgpu.elementwise_inline_asm(
        "{ " + " ".join(lines) + " }",
        args=list(given.values()),
        constraints=",".join(constraints),
        pack=shape[1],
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, result)],
    )
    return made[0]


# -- products -----------------------------------------------------------------------------------

_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def _multiply(tiles: int, scales: list[int] | None, out: Lines, **given: Lines) -> Lines:
    """Sums of rows of some tiles, which follow each other; ``scales``: places of those of all rows
    of the weight, which multiply what is summed here."""
    width = len(out)
    lines = [f".reg .f32 d<{width}>;"]
    spare = width // (4 * tiles)  # sums of a tile: they are taken in turn
    for i, start in enumerate(given["sums"] if scales is None else ["0f00000000"] * width):
        lines += [f"mov.f32 d{i}, {start};"]
    pairs = [(name[1:], i) for name in given if name[0] == "x" for i in range(0, width // 2, 2)]
    for k, (part, i) in enumerate(pairs):
        b = given[f"x{part}"]
        for r in range(tiles):
            low, high = given[f"w{part}_{2 * r}"], given[f"w{part}_{2 * r + 1}"]
            first = 4 * (r + tiles * (k % spare))
            d = ", ".join(f"d{first + i}" for i in range(4))
            a = f"{low[i]}, {high[i]}, {low[i + 1]}, {high[i + 1]}"
            lines += [f"{_MMA} {{{d}}}, {{{a}}}, {{{b[i]}, {b[i + 1]}}}, {{{d}}};"]
    for i, to in enumerate(out):
        if scales is None:
            lines += [f"mov.f32 {to}, d{i};"]
        else:
            place = scales[2 * (i // 4 % tiles) + i // 2 % 2]
            scale = given[f"by{place // width}"][place % width]
            lines += [f"fma.rn.f32 {to}, d{i}, {scale}, {given['sums'][i]};"]
    return lines


# -- the kernel ---------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What a kernel is specialised by. Extents: of x, of the weight, of a line in bytes; columns of
    the grid of scales (1: none along k), bytes and rows of a block; steps of the loop; whether
    scales multiply numbers, which rounds them, and not sums."""

    tiles: Tiles
    codes: Codes
    scale: Any
    m: int
    n: int
    k: int
    line: int
    columns: int
    block: int
    block_rows: int
    steps: int
    scales_first: bool
    parts: tuple[str, ...]

    @property
    def is_split(self) -> bool:
        """Whether a run has two blocks whose sums are scaled, so that of each a lane has a word."""
        return self.columns > 1 and self.block < self.tiles.run and not self.scales_first

    @property
    def blocks(self) -> int:
        """How many blocks of a row's run have scales of their own, for a lane."""
        return 2 if self.is_split else 1

    @property
    def stored(self) -> int:
        """How many scales and zero points a lane has of a row in what a warp takes at a time."""
        return 1 if self.columns == 1 else self.tiles.runs * self.blocks

    def place(self, row: int, run: int, part: int) -> int:
        """Where those of a part of a run are."""
        block = part * self.blocks // self.codes.parts
        return row * self.stored + (0 if self.columns == 1 else run * self.blocks + block)


class _Here(NamedTuple):
    """Where a thread is: its first row of the weight, the others being 8 apart, what its warp
    takes first, its place in a quad and its quad; and the places in a row of 8."""

    first: Array
    unit: Array
    t: Array
    g: Array
    e: Array

    def start(self, plan: _Plan, i: Any) -> Array:
        """The first byte of the line that a warp takes in a step."""
        return (self.unit + i * plan.tiles.warps) * (plan.tiles.runs * plan.tiles.run)

    def within(self, plan: _Plan, run: int) -> Array:
        """The first byte of a lane's in a run, from there."""
        return self.t * (4 if plan.is_split else plan.tiles.width) + run * plan.tiles.run


def _over(x: Array, by: int) -> Array:
    """Of numbers that are not negative, as Triton understands it best."""
    return lax.div(x, jnp.full_like(x, by))


def _modulo(x: Array, by: int) -> Array:
    return lax.rem(x, jnp.full_like(x, by))


def _body(plan: _Plan, *refs: Any) -> None:
    given = dict(zip((*plan.parts, "y"), refs, strict=True))
    tiles = plan.tiles
    thread = jnp.arange(32 * tiles.warps, dtype=jnp.int32)
    g, t = _modulo(_over(thread, 4), 8), _modulo(thread, 4)
    first = pl.program_id(0) * (16 * tiles.tiles) + g
    here = _Here(first, _over(thread, 32), t, g, jnp.arange(tiles.width, dtype=jnp.int32))
    table = _table(given["table"], thread, tiles.width) if plan.codes.is_table else None
    grids = {name: given[name] for name in ("scales", "zeros") if name in given}
    if plan.columns == 1:
        del grids["scales"]

    def stored(i: Any) -> tuple[Any, Any]:
        codes = [_codes(plan, given["codes"], here, i, run) for run in range(tiles.runs)]
        return codes, {name: _grid(plan, ref, here, i) for name, ref in grids.items()}

    first_ones, tree = jax.tree.flatten(stored(0))
    kinds = [x.dtype for x in first_ones]

    def step(i: Any, state: Any) -> Any:
        """What the step before has loaded; the next is loaded while this is multiplied."""
        sums, held = state
        columns = range(len(sums))
        x = [
            [_rows_of_x(plan, given["x"], here, i, run, column) for column in columns]
            for run in range(tiles.runs)
        ]
        following = jax.tree.leaves(stored(jnp.minimum(i + 1, plan.steps - 1)))
        codes, grid = tree.unflatten(_taken(held, kinds))
        beside = _prepared(plan, grid)
        for run, words in enumerate(codes):
            sums = _summed(plan, run, words, x[run], table, beside, sums)
        return sums, _held(following)

    sums: Any = (jnp.zeros((len(thread), tiles.width), jnp.float32),) * -(-plan.m // 8)
    sums, _ = lax.fori_loop(0, plan.steps, step, (sums, _held(first_ones)))
    for column, part in enumerate(sums):
        _put(plan, given, part, column)


def _table(ref: Any, thread: Array, width: int) -> Array:
    """Four registers of the low bytes of 16 entries in bfloat16, and four of the high ones."""
    place = _modulo(jnp.arange(width, dtype=jnp.int32), OCTET)[None, :]
    place = jnp.broadcast_to(place, (len(thread), width))

    def entry(i: Array) -> Array:
        x = ref[i]
        x = jnp.where(jnp.abs(x) < 2.0**-126, 0.0, x).astype(jnp.bfloat16)
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)

    found = jnp.zeros_like(place)
    for i in range(4):
        found = found | (
            ((entry(_modulo(place, 4) * 4 + i) >> (_over(place, 4) * 8)) & 0xFF) << (8 * i)
        )
    return found


def _load(plan: _Plan, ref: Any, index: Array, byte: Array) -> Array:
    """Zeros where a byte lies past the end of the line."""
    tiles = plan.tiles
    if plan.steps * tiles.warps * tiles.runs * tiles.run == plan.line:
        return plgpu.load(ref.at[index])
    inside = jnp.broadcast_to(byte < plan.line, index.shape)
    return plgpu.load(ref.at[index], mask=inside, other=0)


def _codes(plan: _Plan, ref: Any, here: _Here, i: Any, run: int) -> list[Array]:
    """Those of a run of every row of a thread."""
    byte, e = here.start(plan, i) + here.within(plan, run), here.e
    if plan.is_split:
        e = _over(e, 4) * 16 + _modulo(e, 4)
    rows = [jnp.minimum(here.first + 8 * r, plan.n - 1) for r in range(2 * plan.tiles.tiles)]
    at = [(row * plan.line + byte)[:, None] + e for row in rows]
    return [_load(plan, ref, index, byte[:, None]) for index in at]


def _rows_of_x(plan: _Plan, ref: Any, here: _Here, i: Any, run: int, column: int) -> list[Array]:
    """What meets the parts of a run, of a thread's row of eight."""
    parts, byte = plan.codes.parts, here.start(plan, i) + here.within(plan, run)
    row = jnp.minimum(here.g + 8 * column, plan.m - 1) * plan.k + byte * parts
    made = []
    for part in range(parts):
        k = part * plan.tiles.width
        if plan.is_split:
            each = parts // 2
            k = part // each * (16 * parts) + part % each * OCTET
        made.append(_load(plan, ref, (row + k)[:, None] + here.e[None, :], byte[:, None]))
    return made


def _grid(plan: _Plan, ref: Any, here: _Here, i: Any) -> list[Array]:
    """What is stored for a thread's rows and their blocks, in rows; see ``_Plan.place``."""
    tiles, e, made = plan.tiles, here.e[None, :], []
    apart, lane = tiles.run // plan.blocks, here.t[:, None] * tiles.width
    unit = (here.unit + i * tiles.warps)[:, None] * plan.stored
    for first in range(0, 2 * tiles.tiles * plan.stored, tiles.width):
        row, block = _over(first + e, plan.stored), _modulo(first + e, plan.stored)
        byte = here.start(plan, i)[:, None] + block * apart
        if plan.scales_first:
            byte = byte + lane
        column: Any = 0
        if plan.columns > 1:  # where they are neighbours, Triton is to see it
            is_next = plan.block == apart and not plan.scales_first
            column = unit + block if is_next else _over(byte, plan.block)
        line = _over(jnp.minimum(here.first[:, None] + 8 * row, plan.n - 1), plan.block_rows)
        made.append(_load(plan, ref, line * plan.columns + column, byte))
    return made


def _bins(kinds: list[Any], width: int) -> list[list[int]]:
    """Which arrays of those dtypes lie side by side in a row of registers."""
    bins: list[list[int]] = []
    room = 0
    for i, kind in enumerate(kinds):
        size = width * kind.itemsize // 4
        if size > room:
            bins.append([])
            room = width
        bins[-1].append(i)
        room -= size
    return bins


def _held(parts: list[Array]) -> list[Array]:
    """Rows of short numbers as rows of registers, which a loop carries as they are."""

    def join(out: Lines, **given: Lines) -> Lines:
        registers = [name for names in given.values() for name in names]
        registers += ["0"] * (len(out) - len(registers))
        return [f"mov.b32 {to}, {name};" for to, name in zip(out, registers, strict=True)]

    bins = _bins([x.dtype for x in parts], parts[0].shape[1])
    return [_ptx(join, jnp.int32, **{f"part{i}": parts[i] for i in each}) for each in bins]


def _taken(held: list[Array], kinds: list[Any]) -> list[Array]:
    """What ``_held`` was given."""
    width, made = held[0].shape[1], []
    for each, array in zip(_bins(kinds, width), held, strict=True):
        first = 0
        for i in each:

            def part(out: Lines, held: Lines, first: int = first) -> Lines:
                return [f"mov.b32 {to}, {held[first + j]};" for j, to in enumerate(out)]

            kind = jnp.int8 if kinds[i] == jnp.uint8 else kinds[i]  # PTX gives none without a sign
            made.append(_ptx(part, kind, held=array))
            first += width * kinds[i].itemsize // 4
    return made


def _prepared(plan: _Plan, grid: dict[str, list[Array]]) -> dict[str, list[Array]]:
    """Stored scales and zero points as what they enter PTX as."""
    made = dict(grid)
    if "scales" in grid:
        numbers = [_number(x, plan.scale) for x in grid["scales"]]
        made["scales"] = [_twice(x) for x in numbers] if plan.scales_first else numbers
    if "zeros" in grid:
        made["zeros"] = [_less(x, plan.codes.bits) for x in grid["zeros"]]
    return made


def _summed(
    plan: _Plan, run: int, words: list[Array], x: Any, table: Any, beside: Any, sums: Any
) -> tuple[Array, ...]:
    """The sums with a run."""
    parts = [
        [_decoded(plan, (row, run, part), line, table, beside) for row, line in enumerate(words)]
        for part in range(plan.codes.parts)
    ]
    scales = None if plan.scales_first else beside.get("scales")
    made = []
    for total, rows in zip(sums, x, strict=True):
        paired = [_with_pairs(plan.codes, row) for row in rows]
        made.append(_run(plan, run, parts, paired, scales, total))
    return tuple(made)


def _decoded(
    plan: _Plan, where: tuple[int, int, int], words: Array, table: Any, beside: Any
) -> Array:
    """Numbers, by row of the thread, run and part of that; scaled, where that comes first."""
    width, (place, part) = plan.tiles.width, (plan.place(*where), where[2])
    given = {"codes": words}
    if table is not None:
        given["table"] = table
    for name in ("zeros", "scales"):
        if name in beside and (name == "zeros" or plan.scales_first):
            given[name] = beside[name][place // width]

    def write(out: Lines, codes: Lines, **more: Lines) -> Lines:
        options: dict[str, Any] = {"table": more["table"]} if "table" in more else {}
        if "zeros" in more:
            options["minus"] = more["zeros"][place % width]
        lines: Lines = []
        for i in range(width // OCTET):
            octet, four = part * (width // OCTET) + i, out[4 * i : 4 * i + 4]
            lines += ["{", *plan.codes.decode(octet, four, codes, **options), "}"]
        if "scales" in more:
            scale = more["scales"][place % width]
            lines += [fma(to, to, scale, MINUS_ZERO) for to in out]
        return lines

    return _ptx(write, jnp.bfloat16, **given)


def _with_pairs(codes: Codes, x: Array) -> Array:
    return x if codes.apart == 1 else _ptx(partial(paired, codes.apart), jnp.bfloat16, x=x)


def _run(
    plan: _Plan, run: int, parts: list[list[Array]], x: list[Array], scales: Any, sums: Array
) -> Array:
    """The sums with a run; those of a block at a time where it has scales."""
    tiles, each = plan.tiles, len(parts) // plan.blocks
    for first in range(0, len(parts), each):
        args = {}
        for i in range(each):
            args[f"x{i}"] = x[first + i]
            args |= {f"w{i}_{row}": part for row, part in enumerate(parts[first + i])}
        places = None
        if scales is not None:
            places = [plan.place(row, run, first) for row in range(2 * tiles.tiles)]
            which = sorted({place // tiles.width for place in places})
            args |= {f"by{i}": scales[i] for i in which}
        sums = _ptx(partial(_multiply, tiles.tiles, places), jnp.float32, sums=sums, **args)
    return sums


def _twice(x: Array) -> Array:
    """Numbers rounded to bfloat16, in both halves of a register."""
    half = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32)
    return half * 0x10001


def _less(zeros: Array, bits: int) -> Array:
    """What takes zero points away from codes, and 128 with them: twice, as bfloat16."""
    wide = (zeros.astype(jnp.int32) & 0xFF).astype(jnp.float32)
    return _twice(-(wide + (128.0 if bits < 8 else 0.0)))


def _number(stored: Array, kind: Any) -> Array:
    """Stored scales as float32."""
    if kind is ScaleDtype.UE8M0:
        bits = stored.astype(jnp.int32) & 0xFF
        more = jnp.where(((bits + 1) & 0xFE) == 0, 0x400000, 0)  # 0 is 2^-127, 255 is NaN
        return lax.bitcast_convert_type((bits << 23) | more, jnp.float32)
    if kind is ScaleDtype.UE4M3:
        return lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(jnp.float32)
    return stored.astype(jnp.float32)


def _put(plan: _Plan, given: dict[str, Any], sums: Array, column: int) -> None:
    """Adds the warps' sums, in order, and writes those of 8 rows of x."""
    tiles = plan.tiles
    total = jnp.sum(sums.reshape(tiles.warps, 32, tiles.width), axis=0)
    lane, i = (jnp.arange(count, dtype=jnp.int32) for count in (32, 4 * tiles.tiles))
    if tiles.width > 4 * tiles.tiles:
        total = jnp.sum(total.reshape(32, -1, 4 * tiles.tiles), axis=1)
    row = _over(lane, 4)[:, None] + (_over(i, 4) * 16 + _modulo(_over(i, 2), 2) * 8)[None, :]
    row = row + pl.program_id(0) * (16 * tiles.tiles)
    of_x = (_modulo(lane, 4) * 2)[:, None] + (_modulo(i, 2) + 8 * column)[None, :]
    if plan.columns == 1:
        here = _over(jnp.minimum(row, plan.n - 1), plan.block_rows)
        total = total * _number(given["scales"][here], plan.scale)
    if "tensor_scale" in given:
        total = total * given["tensor_scale"][0]
    inside = (row < plan.n) & (of_x < plan.m)
    y, at = given["y"], of_x * plan.n + row
    at = jnp.where(inside, at, plan.m * plan.n)  # no place of another number
    plgpu.store(y.at[at], total.astype(y.dtype), mask=inside)


# -- around it ----------------------------------------------------------------------------------


def why_not(scheme: QuantScheme, dtype: Any, line: int) -> str | None:
    """Why a weight cannot be taken, with rows of a dtype and lines of so many bytes."""
    if str(dtype) != "bfloat16":
        return f"it takes bfloat16, not {dtype}"
    if codes_of(scheme) is None:
        return f"it has no decoder for {scheme}"
    zero = None if scheme.offset is None else scheme.offset.dtype
    if isinstance(zero, QuantValue) and scheme.bits < 8 <= zero.bits:
        return "zero points of 8 bits are exact beside codes of 8 bits alone"
    if line % RUN:
        return "lines must be of whole 32 bytes"
    if scheme.block is not None and scheme.block[-1] != -1:
        size = scheme.block[-1] * scheme.bits // 8
        halves = size == 16 and scheme.bits <= 4
        exact = size in (8, 16) and scheme.scale in _FEW_BITS
        if size % RUN and not halves and not exact:
            return "blocks must be of whole 32 bytes; or of 16, with 4 bits; or have short scales"
    return None


def default_tiles(m: int, scheme: QuantScheme) -> Tiles:
    """Those that were quickest at 8192 x 8192 on an H200 (benchmarks/results/jax_gpu.json)."""
    is_short = scheme.block is not None and 0 < scheme.block[-1] * scheme.bits < 8 * 16
    if is_short or scheme.bits < 4:
        return Tiles(runs=2 if m <= 16 else 1)
    if m > 8 and (scheme.bits < 8 or m > 16):
        return Tiles(tiles=4, runs=1, width=16)
    return Tiles(runs=1 if scheme.bits < 8 else 2, width=16)


def matmul(x: Array, weight: QTensor, kind: Any, *, tiles: Tiles, interpret: bool = False) -> Array:
    """``x @ weight``, summed in float32: x (m, k), weight (k, n) stored (n, k); see ``why_not``."""
    scheme, (k, n), m = weight.scheme, weight.shape, x.shape[0]
    codes = codes_of(scheme)
    if codes is None:
        refused, reason = f"a product by {scheme}", "it has no decoder for its codes"
        raise KernelRefused(kernel="jax.pallas.matmul", problem=refused, reason=reason)
    data, scales, scale = weight.data, weight.scales, scheme.scale
    if isinstance(scales, QTensor):
        scales, scale = standard.dequantize(scales, None), ScaleDtype.F32
    line, columns = data.shape[-1], scales.shape[-1]
    wide = line * 8 // codes.bits
    block_rows, block = scheme.block_extents((n, k)) if scheme.block is not None else (n, k)
    if wide != k:
        x = jnp.pad(x, ((0, 0), (0, wide - k)))
    parts = {"x": x.reshape(-1), "codes": data.reshape(-1), "scales": scales.reshape(-1)}
    if codes.is_table:
        parts["table"] = weight.table
    if weight.offsets is not None:
        parts["zeros"] = weight.offsets.reshape(-1)
    if weight.tensor_scale is not None:
        parts["tensor_scale"] = weight.tensor_scale.reshape(1)
    size = block * codes.bits // 8
    splits = tiles.width == OCTET and size == 16 and codes.bits <= 4
    is_whole = size % tiles.run == 0 or splits
    plan = _Plan(
        tiles, codes, scale, m, n, wide, line, columns, size, block_rows,
        -(-line // (tiles.warps * tiles.runs * tiles.run)),
        columns > 1 and (m > _FEW_ROWS or not is_whole), tuple(parts),
    )  # fmt: skip
    return pl.pallas_call(
        partial(_body, plan),
        out_shape=jax.ShapeDtypeStruct((m * n,), kind),
        grid=(pl.cdiv(n, 16 * tiles.tiles),),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=1),
        interpret=interpret,
        name=f"polyquant_{scheme.value}",
    )(*parts.values()).reshape(m, n)
