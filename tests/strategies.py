"""Hypothesis strategies: random valid schemes, and every array that a user may hold."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import assume, settings
from hypothesis import strategies as st

import polyquant as pq
from polyquant.tables import NAMED, table_bits

Host = np.ndarray[Any, Any]

DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = ("contiguous", "transposed", "strided", "reversed", "broadcast", "read_only")
#: Layouts that torch has; it has no negative strides, and "strided" is made by as_strided.
TORCH_LAYOUTS = ("contiguous", "transposed", "strided", "broadcast")

SIGNED = tuple(v for v in pq.QuantValue if v.is_signed)
UNSIGNED = tuple(v for v in pq.QuantValue if not v.is_signed)
SCALES = tuple(pq.ScaleDtype)
FLOAT_SCALES = ("f32", "f16", "bf16")
STORES = tuple(pq.QuantStore)
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 16, 32, 33, -1)

#: Numbers at which arithmetic turns: zeros, ties, the ends of f16 and f32, subnormals of both.
NASTY = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, 3.5, -2.5, 0.25, 127.0, -128.0, 1 / 3),
    *(65504.0, 65520.0, 2.0**-14, 2.0**-24, 2.0**-25, 448.0, 464.0, 2.0**-133, 2.0**-149),
    *(2.0**-126, -(2.0**-126), 2.0**-127, -1e-40, 1e-38, -3e-38, 5e-37, 127 * 2.0**-126),
    *(3.4028234e38, -3.4028234e38, 1.7e38, 2.0**127, 2.0**126, -(2.0**126), 1e30, -1e30, 1e-30),
)


def share(part: float, *, nightly: float | None = None) -> int:
    """A share of the profile's number of examples, at least 10; another one in a nightly run."""
    if nightly is not None and settings.get_current_profile_name() == "nightly":
        part = nightly
    return max(10, int(settings.default.max_examples * part))  # type: ignore[union-attr]


# -- schemes ----------------------------------------------------------------------------------


def blocks() -> st.SearchStrategy[tuple[int, ...] | None]:
    """Rank 1 to 3, whole axes, or None for the whole tensor."""
    ranks = st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=3).map(tuple)
    return st.one_of(st.tuples(st.sampled_from(EXTENTS)), ranks, st.none())


@st.composite
def heads(draw: st.DrawFn) -> dict[str, Any]:
    """A value type, and a table or an offset where it can have one."""
    kind = draw(st.sampled_from(["signed", "signed", "unsigned", "named", "custom", "affine"]))
    if kind == "signed":
        return {"value": draw(st.sampled_from(SIGNED))}
    if kind == "unsigned":
        return {"value": draw(st.sampled_from(UNSIGNED))}
    if kind == "named":
        table = draw(st.sampled_from(sorted(NAMED)))
        bias = draw(st.sampled_from([None, None, "bias:f32", "bias:f16"]))
        return {"value": f"u{table_bits(table)}[{table}]", "offset": bias}
    if kind == "custom":
        return {"value": f"u{draw(st.integers(1, 8))}[custom]"}
    return {"value": draw(st.sampled_from(UNSIGNED)), "offset": draw(offsets())}


@st.composite
def offsets(draw: st.DrawFn) -> Any:
    """A bias or a zero point, as a float, an integer or (a bias) a scheme."""
    kind = draw(st.sampled_from(["bias", "zero_point"]))
    if kind == "zero_point" and draw(st.booleans()):
        return f"zero_point:u{draw(st.integers(1, 8))}"
    if kind == "bias" and draw(st.integers(0, 4)) == 0:
        if draw(st.booleans()):
            block, scale = draw(st.sampled_from((2, 8, -1))), draw(st.sampled_from(FLOAT_SCALES))
            return (
                "bias",
                pq.QuantScheme(draw(st.sampled_from(("u4", "u6"))), block=block, scale=scale),
            )
        return ("bias", draw(grid_schemes(signed=True)))
    return f"{kind}:{draw(st.sampled_from(FLOAT_SCALES))}"


@st.composite
def grid_schemes(draw: st.DrawFn, *, signed: bool = False) -> pq.QuantScheme:
    """A scheme for scales or offsets: it brings no table of its own."""
    values = [*map(str, SIGNED), "u4[nf4]", "u8[dynamic8]"]
    if not signed:
        values += [*map(str, UNSIGNED), "u8[dynamic8u]"]
    value = draw(st.sampled_from(values))
    offset = None
    if value in UNSIGNED and draw(st.booleans()):
        offset = draw(st.sampled_from(["bias:f16", "zero_point:u8", "zero_point:f32"]))
    block = draw(st.one_of(st.none(), st.tuples(st.sampled_from((1, 2, 3, 16, 256, -1)))))
    scale = draw(st.sampled_from(SCALES))
    levels = None
    if block is not None and scale in ("f16", "ue4m3") and "[" not in value and not offset:
        levels = draw(st.sampled_from([None, "f32"]))
    store = draw(st.sampled_from(STORES))
    return pq.QuantScheme(
        value, block=block, scale=scale, tensor_scale=levels, offset=offset, store=store
    )


@st.composite
def schemes(draw: st.DrawFn, *, quantizable: bool = True) -> pq.QuantScheme:
    """A random valid scheme; ``quantizable`` leaves out those that need scales of the caller's."""
    block = draw(blocks())
    scale: Any = draw(st.one_of(st.sampled_from(SCALES), st.sampled_from(SCALES), grid_schemes()))
    two_levels = block is not None and scale in ("f16", "ue4m3") and draw(st.booleans())
    if not quantizable and block is not None and scale in ("f32", "bf16"):
        two_levels = draw(st.booleans())
    head = draw(heads())
    role = "multiplier"
    if two_levels or scale in FLOAT_SCALES:
        is_symmetric = "[" not in head["value"] and head.get("offset") is None
        roles = [*["multiplier"] * 3, "divisor", *(["absmax"] if is_symmetric else [])]
        role = draw(st.sampled_from(roles))
    return pq.QuantScheme(
        **head,
        block=block,
        scale=scale,
        tensor_scale="f32" if two_levels else None,
        store=draw(st.sampled_from(STORES)),
        role=role,
        view=draw(views(block)),
    )


def views(block: tuple[int, ...] | None) -> st.SearchStrategy[tuple[int, ...] | None]:
    """No view, most often; else one of an extent that divides any tensor, and as many axes."""
    if block is not None and len(block) > 2:
        return st.none()
    made = [(-1,)] if block is None or len(block) == 1 else []
    return st.sampled_from([None, None, None, *made, (1, -1), (-1, 1)])


def rank_needed(scheme: pq.QuantScheme) -> int:
    """The fewest axes that a tensor of the scheme has."""
    inner = [scheme.scale, scheme.offset.dtype if scheme.offset is not None else None]
    own = 0 if scheme.block is None else len(scheme.block)
    return max([own, *(rank_needed(s) for s in inner if isinstance(s, pq.QuantScheme))])


# -- arrays -----------------------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn, min_rank: int = 0, *, limit: int = 3000) -> tuple[int, ...]:
    """Rank up to 4, extents 0, 1 and odd ones among them."""
    rank = draw(st.integers(min_rank, 4))
    extents = st.sampled_from((1, 0, 2, 3, 5, 7, 8, 16, 17, 31, 33, 64, 70))
    shape = tuple(draw(extents) for _ in range(rank))
    assume(math.prod(shape) <= limit)
    return shape


def host_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@st.composite
def numbers(draw: st.DrawFn, shape: tuple[int, ...], kind: str) -> Host:
    """Finite numbers of a dtype: random ones, patterns of nasty ones, or both."""
    size = math.prod(shape)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    how = draw(st.sampled_from(["pattern", "normal", "mixed", "wide", "ties", "constant"]))
    if how == "pattern":
        picked = draw(st.lists(st.sampled_from(NASTY), min_size=1, max_size=12))
        values = np.resize(np.asarray(picked), size)
    elif how == "normal":
        values = rng.normal(size=size) * draw(st.sampled_from([1.0, 1e-3, 1e4, 1e-38]))
    elif how == "mixed":
        values = np.where(rng.random(size) < 0.3, rng.choice(NASTY, size), rng.normal(size=size))
    elif how == "wide":
        values = np.ldexp(rng.normal(size=size), rng.integers(-140, 127, size))
    elif how == "ties":
        values = rng.integers(-300, 300, size) / 2
    else:
        values = np.full(size, draw(st.sampled_from(NASTY)))
    dtype = host_dtype(kind)
    top = float(ml_dtypes.finfo(ml_dtypes.bfloat16 if kind == "bfloat16" else dtype).max)
    top = min(top, float(np.finfo(np.float32).max))
    with np.errstate(all="ignore"):
        return np.array(np.clip(values, -top, top).astype(dtype)).reshape(shape)


def lay_out(values: Host, layout: str) -> Host:
    """A NumPy view that holds ``values`` (of "broadcast": their first row, repeated)."""
    if layout == "transposed":
        return np.array(values, order="F")  # also called Fortran order
    if layout == "strided" and values.ndim:
        wide = np.zeros((*values.shape[:-1], 2 * values.shape[-1] + 1), values.dtype)
        wide[..., 1::2] = values
        return wide[..., 1::2]
    if layout == "reversed":
        return np.flip(np.flip(values).copy())
    if layout == "broadcast" and values.ndim:
        return np.broadcast_to(values[:1].copy(), values.shape)
    made = values.copy()
    made.flags.writeable = layout != "read_only"
    return made


def lay_out_torch(values: Host, layout: str) -> Any:
    """The same for torch: transposed, as_strided, expand."""
    from polyquant.arrays import backend

    def tensor(array: Host) -> Any:
        return backend("torch").from_host(np.array(array), "")

    if layout == "transposed":
        return tensor(values.T.copy()).permute(tuple(reversed(range(values.ndim))))
    if layout == "strided" and values.ndim:
        shape = (*values.shape[:-1], 2 * values.shape[-1] + 1)
        wide = np.zeros(shape, values.dtype)
        wide[..., 1::2] = values
        steps = [s // wide.itemsize for s in wide.strides]
        return tensor(wide).as_strided(values.shape, [*steps[:-1], 2], 1)
    if layout == "broadcast" and values.ndim and values.shape[0]:
        return tensor(values[:1]).expand(values.shape)
    return tensor(values)


class Case(NamedTuple):
    """What is quantized: a scheme, values on the host, a layout, and a table where one is due."""

    scheme: pq.QuantScheme
    values: Host
    layout: str
    table: Host | None


@st.composite
def tables(draw: st.DrawFn, bits: int) -> Host:
    """A custom table: any order, repeats allowed, not all zero."""
    pool = st.one_of(
        st.integers(-20, 20).map(float),
        st.floats(-8, 8, width=32, allow_subnormal=False),
        st.sampled_from([0.0, -0.0, 1e-30, 1e30, 0.5]),
    )
    if bits > 4:
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        entries = rng.normal(size=2**bits)
    else:
        entries = np.asarray(draw(st.lists(pool, min_size=2**bits, max_size=2**bits)))
    entries = entries.astype(np.float32)
    assume(bool((np.abs(entries) >= 2.0**-126).any()))
    return entries


@st.composite
def cases(draw: st.DrawFn, *, limit: int = 3000) -> Case:
    """A scheme with values that it can hold."""
    scheme = draw(schemes())
    shape = draw(shapes(rank_needed(scheme), limit=limit))
    values = draw(numbers(shape, draw(st.sampled_from(DTYPES))))
    table = draw(tables(scheme.bits)) if scheme.table == "custom" else None
    entries = NAMED[scheme.table]() if scheme.table in NAMED else table
    one_sided = not scheme.value.is_signed if entries is None else not (entries < 0).any()
    if one_sided and scheme.mode is not pq.QuantMode.AFFINE:
        values = np.array(np.abs(values))
    layout = draw(st.sampled_from(LAYOUTS))
    if layout == "broadcast" and values.ndim and values.shape[0]:
        values = np.broadcast_to(values[:1].copy(), values.shape).copy()
    return Case(scheme, values, layout, table)
