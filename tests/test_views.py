"""Layout operations: exactly what they give of the values, at the price that they state."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyquant as pq
from devices import DEVICES, assert_same_bits, host, needs, put
from moves import MAKERS, move, seeded
from polyquant import errors, ops
from polyquant.codec import pack, unpack
from polyquant.qtensor import validate
from polyquant.views.moving import in_order
from strategies import Case, cases, share

# Awkward values are too small for some scale types, and are meant to be.
pytestmark = pytest.mark.filterwarnings("ignore::polyquant.errors.DeadBlocksWarning")

#: Two levels, nested scales, both kinds of offset, tables, minifloats, every store.
SCHEMES = (
    "q4s/32:f16",
    "q8s/tensor:f32@native",
    "q3s/2x16:f16@packed_native",
    "nvfp4",
    "nf4-double",
    "u3[custom]/8:bf16",
    "e4m3/row:f32",
    "u4/32:f16-zero:u4",
    "q2s/16:ue8m0",
    "u4/16:(q8s/4:f16/tensor:f32)+bias:(q6s/2:f16)@packed_native",
)


def make(scheme: str = "q4s", shape: tuple[int, ...] = (6, 70), device: str = "numpy") -> Any:
    values = np.random.default_rng(math.prod(shape)).normal(size=shape).astype(np.float32)
    made = pq.scheme(scheme)
    table = np.linspace(-1, 1, 2**made.bits) if made.table == "custom" else None
    return pq.quantize(values, made, table=table).to(device)


def levels(q: Any) -> Iterator[pq.QTensor]:
    """A tensor, and its scales and offsets where they are quantized."""
    if isinstance(q, pq.QTensor):
        yield q
        yield from levels(q.scales)
        yield from levels(q.offsets)


def has_two_levels(q: pq.QTensor) -> bool:
    return any(level.tensor_scale is not None for level in levels(q))


def check(got: pq.QTensor, wanted: Any, where: str = "") -> None:
    """A valid tensor of exactly these values, whose lines end with zeros.

    Its stored arrays are looked at in NumPy: JAX would compile a decoder for every shape.
    """
    validate(got)
    assert got.shape == tuple(wanted.shape), where
    there = got.to("numpy")
    assert_same_bits(there.dequantize(), np.array(host(wanted)), where)
    for level in levels(there):
        value, store = level.scheme.value, level.scheme.store
        line = (level.scheme.laid(level.stored_shape) or (1,))[-1]
        again = pack(np, unpack(np, level.data, line, value, store), value, store)
        assert_same_bits(again, np.array(level.data), f"padding after {where}")


def check_or_refused(q: pq.QTensor, act: Callable[[Any], Any], wanted: Any, where: str) -> None:
    """As ``check``; but two levels of scales need an axis."""
    if not wanted.ndim and has_two_levels(q) and q.ndim:
        with pytest.raises(errors.LayoutRefused, match="needs them"):
            act(q)
    else:
        check(act(q), wanted, where)


# -- every operation, random schemes, shapes, orders of axes and arguments ---------------------


def drawn(data: st.DataObject, case: Case, device: str) -> pq.QTensor:
    """The tensor of a case with its axes in some order."""
    with np.errstate(all="ignore"):
        q = pq.quantize(put(case.values, device), case.scheme, table=case.table)
    return q.permute(data.draw(st.permutations(range(q.ndim)), "axes"))


def check_every_move(data: st.DataObject, case: Case, device: str) -> None:
    q = drawn(data, case, device)
    values, seed = host(q.dequantize()), data.draw(st.integers(0, 2**20), "seed")
    for name in sorted(MAKERS):
        made = move(name, q.shape, seeded(seed))
        if made is not None:
            check_or_refused(q, made.ours, made.numpy(values), f"{q!r}.{made.words}")


@given(data=st.data(), case=cases(limit=400))
@settings(max_examples=share(0.5))
def test_every_operation_is_exact(data: Any, case: Case) -> None:
    check_every_move(data, case, "numpy")


@needs("torch")
@given(data=st.data(), case=cases(limit=400))
@settings(max_examples=share(0.25))
def test_every_operation_is_exact_in_torch(data: Any, case: Case) -> None:
    check_every_move(data, case, "torch:cpu")


def mixed_key(shape: tuple[int, ...], pick: Callable[[int], int], device: str) -> tuple[Any, ...]:
    """Index arrays that broadcast, masks, integers, slices, new axes and an Ellipsis together."""
    key: list[Any] = []
    rank, seen_dots, axis = len(shape), False, 0
    picked = ((3,), (2, 1), (1,), (2, 3))
    while axis < rank:
        extent, kind = shape[axis], pick(8)
        if kind == 0:
            key.append(None)
            continue
        if kind == 1 and not seen_dots:
            seen_dots = True
            key.append(...)
            axis += pick(rank - axis + 1)
            continue
        if kind in (2, 3, 4) and extent:
            size = picked[pick(4)]
            rng = np.random.default_rng(pick(1000))
            indices = rng.integers(-extent, extent, size)
            key.append(put(indices, device) if pick(2) else indices)
        elif kind == 5 and extent:
            key.append(pick(2 * extent) - extent)
        elif kind == 6 and extent >= 2:
            mask = np.zeros(shape[axis : axis + 1 + pick(2)], np.bool_)
            mask.reshape(-1)[: 1 + pick(3)] = True
            mask = np.array(mask[::-1])
            key.append(put(mask, device) if pick(2) else mask)
            axis += mask.ndim - 1
        else:
            start = pick(extent + 1)
            key.append(slice(start, start + pick(extent + 2), 1 + pick(2)))
        axis += 1
    return tuple(key)


def check_key(data: st.DataObject, case: Case, device: str) -> None:
    """As the library itself indexes its arrays, which differ in where index arrays put axes."""
    q = drawn(data, case, device)
    values, seed = q.dequantize(), data.draw(st.integers(0, 2**20), "seed")
    for attempt in range(5):
        key = mixed_key(q.shape, seeded(seed + attempt), device)
        own = tuple(put(k, device) if isinstance(k, np.ndarray) else k for k in key)
        try:
            wanted = values[own]
        except (IndexError, RuntimeError):  # arrays that do not broadcast
            with pytest.raises(errors.InvalidIndex, match="broadcast"):
                q[key]
            continue
        check_or_refused(q, lambda t, key=key: t[key], wanted, f"{q!r}[{key}]")


@given(data=st.data(), case=cases(limit=400))
@settings(max_examples=share(0.4))
def test_mixed_keys_are_the_librarys_own(data: Any, case: Case) -> None:
    check_key(data, case, "numpy")


@needs("torch")
@given(data=st.data(), case=cases(limit=400))
@settings(max_examples=share(0.3))
def test_mixed_keys_are_the_librarys_own_in_torch(data: Any, case: Case) -> None:
    check_key(data, case, "torch:cpu")


# -- views cost no copy of codes ---------------------------------------------------------------

#: Calls on a q4s tensor of shape (32, 64) in blocks of 16 that move no code.
VIEWS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("T", lambda q: q.T),
    ("slice of rows", lambda q: q[3:29:2]),
    ("one row", lambda q: q[7]),
    ("listed rows, evenly spaced", lambda q: q[[3, 5, 7]]),
    ("columns from whole bytes to whole words", lambda q: q[:, 16:48]),
    ("columns to the end", lambda q: q[:, 32:]),
    ("one row, then whole bytes of it", lambda q: q[3][16:48]),
    ("new axis in front", lambda q: q[None]),
    ("new axis in between", lambda q: q[:, None]),
    ("new axis at the end", lambda q: q[..., None]),
    ("squeezed again", lambda q: q[:, None].squeeze(1)),
    ("rows split", lambda q: q.reshape(4, 8, 64)),
    ("lines joined", lambda q: q.reshape(-1)),
    ("lines cut", lambda q: q.reshape(32, 4, 16)),
    ("lines cut and joined", lambda q: q.reshape(64, 32)),
    ("turned, then rows of it", lambda q: q.T[16:48]),
    ("turned, then split", lambda q: q.T.reshape(4, 16, 32)),
    ("chunk", lambda q: q.chunk(3)[1]),
    ("split", lambda q: q.split([5, 27])[1]),
    ("narrow", lambda q: q.narrow(1, 16, 16)),
    ("expanded", lambda q: q[:1].expand(9, 64)),
    ("expanded in front", lambda q: q.expand(3, 32, 64)),
)


@pytest.mark.parametrize("store", ["packed_u32", "packed_native", "native"])
@pytest.mark.parametrize(("what", "act"), VIEWS, ids=[what for what, _ in VIEWS])
def test_a_view_shares_codes_and_scales(what: str, act: Callable[[Any], Any], store: str) -> None:
    q = make(f"q4s/16:f16@{store}", (32, 64))
    got = act(q)
    assert np.shares_memory(got.data, q.data)
    assert np.shares_memory(got.scales, q.scales) or what == "turned, then rows of it"
    check(got, act_on_values(act, q), what)


def act_on_values(act: Callable[[Any], Any], q: pq.QTensor) -> Any:
    """The same call of the values: torch has every method of the list, and NumPy some."""
    torch = pytest.importorskip("torch", reason="the values' own methods are torch's")
    return act(torch.from_numpy(np.array(host(q.dequantize()))))


@needs("torch")
@pytest.mark.parametrize(("what", "act"), VIEWS, ids=[what for what, _ in VIEWS])
def test_a_view_shares_codes_in_torch(what: str, act: Callable[[Any], Any]) -> None:
    q = make("q4s/16:f16", (32, 64), "torch:cpu")
    got = act(q)
    assert got.data.untyped_storage().data_ptr() == q.data.untyped_storage().data_ptr()
    check(got, act(q.dequantize()), what)


def test_what_is_moved_is_copied() -> None:
    q = make("q4s/16:f16", (32, 64))
    for got in (q[:, 1:], q.flip(1), q[[0, 5, 2]], q[:, 0], q.tile(2), q[:, 8:20]):
        assert not np.shares_memory(got.data, q.data)
    native = make("q4s/16:f16@native", (32, 64))
    assert np.shares_memory(native[:, 1::3].data, native.data)  # a byte a code: any slice is one
    assert np.shares_memory(native.flip().data, native.data)


def test_the_same_tensor_is_no_new_one() -> None:
    q = make("q4s/16:f16", (32, 64))
    same = (q[:], q[...], q[0:32], q.reshape(32, -1), q.expand(-1, 64), q.squeeze(), q.tile(1))
    assert all(got is q for got in same)
    assert pq.concat([q]) is q
    assert pq.concat([q[:0], q, q[:, :][:0]]) is q


# -- what becomes of blocks --------------------------------------------------------------------

BLOCKS: tuple[tuple[str, Callable[[Any], Any], str, int], ...] = (
    # of a tensor of shape (6, 70): lines of 36 bytes, three scales of 2 bytes each
    ("q4s/32:f16", lambda q: q[2:4], "q4s/32:f16", 2 * (36 + 6)),
    ("q4s/32:f16", lambda q: q[:, 32:], "q4s/32:f16", 6 * (20 + 4)),
    ("q4s/32:f16", lambda q: q[:, 40:], "q4s/24:f16", 6 * (16 + 4)),  # an edge at 24
    ("q4s/32:f16", lambda q: q[:, 33:60], "q4s/32:f16", 6 * (16 + 2)),  # inside of one block
    ("q4s/32:f16", lambda q: q[:, 3:], "q4s/1:f16", 6 * (36 + 67 * 2)),
    ("q4s/32:f16", lambda q: q[:, ::2], "q4s/16:f16", 6 * (20 + 6)),
    ("q4s/32:f16", lambda q: q.flip(1), "q4s/2:f16", 6 * (36 + 70)),
    ("q4s/35:f16", lambda q: q.flip(1), "q4s/35:f16", 6 * (36 + 4)),
    ("q4s/32:f16", lambda q: q.flip(0), "q4s/32:f16", 6 * (36 + 6)),
    ("q4s/row:f16", lambda q: q[:, 3:9], "q4s/row:f16", 6 * (4 + 2)),
    ("q4s/row:f16", lambda q: q.reshape(6, 7, 10), "q4s/*x*:f16", 6 * (7 * 8 + 2)),
    ("q4s/row:f16", lambda q: q.reshape(-1), "q4s/70:f16", 212 + 12),
    ("q4s/35:f16", lambda q: q.reshape(-1), "q4s/35:f16", 212 + 24),
    ("q4s/32:f16", lambda q: q.reshape(-1), "q4s/2:f16", 212 + 420),
    ("q4s/10:f16", lambda q: q.reshape(6, 14, 5), "q4s/2x5:f16", 84 * 4 + 42 * 2),
    ("q4s/10:f16", lambda q: q.reshape(6, 35, 2), "q4s/5x2:f16", 210 * 4 + 42 * 2),
    ("q4s/3x10:f16", lambda q: q.reshape(2, 3, 70), "q4s/3x10:f16", 6 * 36 + 14 * 2),
    ("q4s/3x10:f16", lambda q: q.T.reshape(7, 10, 6), "q4s/3x1x10:f16", 6 * 7 * 8 + 14 * 2),
    ("q4s/tensor:f32", lambda q: q[1:, 5:], "q4s/tensor:f32", 5 * 36 + 4),
    ("q4s/tensor:f32", lambda q: q.reshape(3, 140)[:, ::-1], "q4s/tensor:f32", 3 * 72 + 4),
    ("q4s/32:f16", lambda q: q.repeat(2, 1), "q4s/32:f16", 6 * (72 + 10)),
    ("q4s/35:f16", lambda q: q.tile((1, 2)), "q4s/35:f16", 6 * (72 + 8)),
    ("q4s/32:f16", lambda q: q.tile(2), "q4s/2:f16", 6 * (72 + 140)),
    ("q4s/32:f16", lambda q: pq.concat([q, q]), "q4s/32:f16", 12 * 42),
    ("q4s/32:f16", lambda q: pq.concat([q[:, :64], q], 1), "q4s/32:f16", 6 * (68 + 10)),
    ("q4s/32:f16", lambda q: pq.concat([q, q], 1), "q4s/2:f16", 6 * (72 + 140)),
    ("q4s/32:f16", lambda q: pq.concat([q[:, :32], q[:, 32:]], 1), "q4s/32:f16", 6 * 42),
    ("q4s/row:f16", lambda q: pq.concat([q, q], 1), "q4s/70:f16", 6 * (72 + 4)),
    ("q4s/tensor:f32", lambda q: pq.concat([q, q[:3]]), "q4s/6x*:f32", 9 * 36 + 8),
    ("q4s/tensor:f32", lambda q: pq.stack([q, q]), "q4s/*x*:f32", 12 * 36 + 8),
    ("q4s/tensor:f32", lambda q: q[1, 2], "q4s/tensor:f32", 4 + 4),
    ("q4s/32:f16", lambda q: q[1, 2], "q4s/tensor:f16", 4 + 2),
    ("q4s/32:f16", lambda q: q[:, [0, 1, 40, 41]], "q4s/2:f16", 6 * (4 + 4)),
    ("q4s/32:f16", lambda q: q[:, 0:0], "q4s/32:f16", 0),
)


@pytest.mark.parametrize(("scheme", "act", "wanted", "size"), BLOCKS)
def test_blocks_stay_unless_an_edge_cuts_them(
    scheme: str, act: Callable[[Any], Any], wanted: str, size: int
) -> None:
    got = act(make(scheme, (6, 70)))
    validate(got)
    assert str(got.scheme) == wanted
    assert got.nbytes == size == len(got.to_data().bytes)


def greatest(ids: Any, axis: int) -> int:
    """By brute force the largest extent of which every edge along an axis is a multiple."""
    lines = np.moveaxis(ids, axis, 0).reshape(ids.shape[axis], -1)
    edges = [i for i in range(1, len(lines)) if (lines[i] != lines[i - 1]).any()]
    return next(e for e in range(len(lines), 0, -1) if all(i % e == 0 for i in edges))


@given(data=st.data())
@settings(max_examples=share(0.5))
def test_new_blocks_are_as_large_as_can_be(data: Any) -> None:
    """Where blocks cannot be kept; the numbers of blocks are found here without the library."""
    extents = st.sampled_from((2, 3, 4, 6, 8, 12, 16))
    shape = tuple(data.draw(st.lists(extents, min_size=1, max_size=3), "shape"))
    block = tuple(data.draw(st.sampled_from((1, 2, 3, 4, 6, 16)), "extent") for _ in shape)
    q = pq.quantize(np.ones(shape, np.float32), pq.QuantScheme("q8s", block=block, scale="f32"))
    grid = np.arange(math.prod(q.scales.shape)).reshape(q.scales.shape)
    ids = grid[np.ix_(*(np.arange(n) // b for n, b in zip(shape, block, strict=True)))]
    made = move("reshape", shape, seeded(data.draw(st.integers(0, 2**20), "seed")))
    assert made is not None
    got, ids = made.ours(q), made.numpy(ids)
    made_extents = got.scheme.block_extents(got.stored_shape)
    for axis, stored in enumerate(got.axes):
        extent, best = made_extents[stored], greatest(ids, axis)
        assert extent == best


# -- joining -----------------------------------------------------------------------------------


@given(data=st.data(), case=cases(limit=300))
@settings(max_examples=share(0.5))
def test_parts_of_any_blocks_and_orders_are_joined(data: Any, case: Case) -> None:
    q = drawn(data, case, data.draw(st.sampled_from(["numpy", "torch:cpu"])))
    if not q.ndim:
        return
    axis = data.draw(st.integers(0, q.ndim - 1), "axis")
    parts = []
    for number in range(data.draw(st.integers(1, 3), "parts")):
        start = data.draw(st.integers(0, q.shape[axis]), f"start {number}")
        part = q.narrow(axis, start, q.shape[axis] - start)
        turned = tuple(data.draw(st.permutations(range(q.ndim)), f"order {number}"))
        back = tuple(np.argsort(turned))
        parts.append(ops.permute(in_order(part.permute(turned)), back))
    whole = pq.concat(parts, axis)
    wanted = np.concatenate([np.array(host(part.dequantize())) for part in parts], axis)
    check(whole, wanted, f"{[repr(part) for part in parts]} along {axis}")
    stacked = pq.stack([parts[0], parts[0].flip()], axis)
    values = np.array(host(parts[0].dequantize()))
    check(stacked, np.stack([values, np.flip(values)], axis), "stack")


def test_parts_of_different_blocks_are_joined() -> None:
    x = np.random.default_rng(5).normal(size=(6, 64)).astype(np.float32)
    parts = [pq.quantize(x, f"q4s/{block}:f16") for block in ("32", "row", "16", "2x8", "tensor")]
    whole = pq.concat(parts, 1)
    assert str(whole.scheme) == "q4s/8:f16"
    check(whole, np.concatenate([part.dequantize() for part in parts], 1))
    assert str(pq.concat([parts[4], parts[3]], 1).scheme) == "q4s/2x8:f16"


def test_a_turned_tensor_is_joined_in_the_order_of_the_first() -> None:
    q = make("q4s/32:f16", (64, 64))
    for parts in ([q.T, q], [q, q.T], [q.T, q.T]):
        whole = pq.concat(parts, 1)
        assert whole.axes == parts[0].axes
        check(whole, np.concatenate([part.dequantize() for part in parts], 1))


def test_three_axes_stored_in_turn() -> None:
    """A rotation of three axes is not its own inverse, as an exchange of two is."""
    q = make("q4s/2x8:f16", (3, 4, 20)).permute(1, 2, 0)
    values, rng = q.dequantize(), np.random.default_rng(4)
    for axis, extent in enumerate(q.shape):
        indices = rng.integers(0, extent, (*q.shape[:axis], 5, *q.shape[axis + 1 :]))
        check(q.gather(indices, axis), np.take_along_axis(values, indices, axis))
        check(q.flip(axis)[1:], np.flip(values, axis)[1:])
        check(q.take([[2, 0]], axis), values.take([[2, 0]], axis))
    check(pq.concat([q, make("q4s/2x8:f16", q.shape)], 1)[:, :20], values)
    check(in_order(q), values)
    assert in_order(q).axes == (0, 1, 2)


def test_split_and_joined_again_is_the_same(device: str) -> None:
    for scheme in SCHEMES if not device.startswith("jax") else SCHEMES[3:5]:
        q = make(scheme, (6, 64), device)
        for axis, sizes in ((0, 2), (1, 32), (1, [32, 0, 32])):
            again = pq.concat(q.split(sizes, axis), axis)
            check(again, make(scheme, (6, 64)).dequantize(), scheme)
            if q.scheme.block in (None, (32,), (8,), (16,)):
                assert_same_bits(np.array(host(again.data)), np.array(host(q.data)), scheme)


# -- every library -----------------------------------------------------------------------------

#: Every operation, one after another, with arguments that all libraries' arrays would take.
CALLS: tuple[tuple[str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    ("slices", lambda q: q[1:, ::2], lambda x: x[1:, ::2]),
    ("backwards", lambda q: q[::-1, ::-3], lambda x: x[::-1, ::-3]),
    ("integers", lambda q: q[-1][3:9], lambda x: x[-1][3:9]),
    ("a list", lambda q: q[:, [3, 1, 2]], lambda x: x[:, [3, 1, 2]]),
    ("a mask", lambda q: q[np.arange(6) % 2 == 0], lambda x: x[np.arange(6) % 2 == 0]),
    ("arrays", lambda q: q[[0, 5], [7, 9]], lambda x: x[[0, 5], [7, 9]]),
    ("new axes", lambda q: q[:, None, ..., None], lambda x: x[:, None, ..., None]),
    ("reshape", lambda q: q.reshape(3, 35, 4), lambda x: x.reshape(3, 35, 4)),
    ("merge of turned", lambda q: q.T.reshape(-1), lambda x: x.T.reshape(-1)),
    ("take", lambda q: q.take([[1, 0]], 1), lambda x: x.take([[1, 0]], 1)),
    ("gather", lambda q: q.gather(GATHERED, 1), lambda x: np.take_along_axis(x, GATHERED, 1)),
    ("flip", lambda q: q.flip(), np.flip),
    ("expand", lambda q: q[:1].expand(2, 3, -1), lambda x: np.broadcast_to(x[:1], (2, 3, 70))),
    ("repeat", lambda q: q.repeat(2, 1), lambda x: x.repeat(2, 1)),
    ("tile", lambda q: q.tile((2, 1)), lambda x: np.tile(x, (2, 1))),
    ("concat", lambda q: pq.concat([q, q[:, :5]], 1), lambda x: np.hstack([x, x[:, :5]])),
    ("stack", lambda q: pq.stack([q, q], -1), lambda x: np.stack([x, x], -1)),
    ("squeeze", lambda q: q[:, :1].squeeze(), lambda x: x[:, 0]),
    ("moveaxis", lambda q: q[None].moveaxis(0, 2), lambda x: np.moveaxis(x[None], 0, 2)),
)
GATHERED = np.random.default_rng(1).integers(0, 70, (6, 9))


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[9]])
def test_every_library(device: str, scheme: str) -> None:
    q = make(scheme, (6, 70), device)
    values = make(scheme, (6, 70)).dequantize()

    def every(q: pq.QTensor) -> list[pq.QTensor]:
        return [ours(q) for _, ours, _ in CALLS]

    if device.startswith("jax"):  # which compiles call by call otherwise
        import jax

        every = jax.jit(every)
    for got, (what, _, numpy) in zip(every(q), CALLS, strict=True):
        check(got, numpy(values), f"{what} of {scheme} on {device}")


def test_index_arrays_of_the_tensors_own_library(device: str) -> None:
    q = make("q4s/32:f16", (6, 70), device)
    values = make("q4s/32:f16", (6, 70)).dequantize()
    index = np.asarray([5, -6, 0], np.int32)
    check(q[put(index, device)], values[index])
    check(q.take(put(index, device), 1), values[:, index])
    check(q[put(values > 0, device)], values[values > 0])


@needs("torch")
def test_index_arrays_of_another_library_are_refused() -> None:
    q = make("q4s/32:f16", (6, 70), "numpy")
    index = put(np.asarray([1, 2]), "torch:cpu")
    for act in (lambda: q[index], lambda: q.take(index, 0), lambda: q[index > 0]):
        with pytest.raises(errors.BackendMismatch, match="move the index to numpy"):
            act()
    other = make("q4s/32:f16", (6, 70), "torch:cpu")
    with pytest.raises(errors.BackendMismatch, match="tensor 1 is on torch:cpu"):
        pq.concat([q, other])
    check(other[np.asarray([1, 2])], other.dequantize()[1:3])  # a NumPy index goes anywhere


# -- under tracers -----------------------------------------------------------------------------


@needs("jax")
@pytest.mark.parametrize("scheme", ["q4s/32:f16", "nvfp4", "nf4-double", SCHEMES[9]])
def test_views_under_jit(scheme: str) -> None:
    import jax

    q = make(scheme, (6, 70), "jax")
    values, ids = make(scheme, (6, 70)).dequantize(), jax.numpy.asarray([4, -6, 4])
    got = jax.jit(lambda t, i: (t[2:5], t.reshape(3, 140), t[i], t.T[:, i], t[i[0]]))(q, ids)
    turned = values[[4, 0, 4]].T
    wanted = (values[2:5], values.reshape(3, 140), values[[4, 0, 4]], turned, values[4])
    for ours, theirs in zip(got, wanted, strict=True):
        check(ours, theirs, scheme)
    halves = jax.jit(lambda t: pq.concat(t.split(3)))(q)
    check(halves, values, scheme)


@needs("jax")
def test_a_traced_index_along_blocks() -> None:
    import jax

    q, ids = make("q4s/32:f16", (6, 70), "jax"), jax.numpy.asarray([4, 69])
    with pytest.raises(errors.LayoutRefused, match="which a tracer hides"):
        jax.jit(lambda t, i: t[:, i])(q, ids)
    with pytest.raises(errors.UnsupportedArray, match="traced"):
        jax.jit(lambda t, i: t[i > 0])(q, ids[:1].repeat(6))
    with pytest.raises(errors.InvalidIndex, match="not integers"):
        jax.jit(lambda t, i: t[i[0] :])(q, ids)
    whole = make("q4s/row:f16", (6, 70), "jax")
    wanted = whole.to("numpy").dequantize()
    check(jax.jit(lambda t, i: t[:, i])(whole, ids), wanted[:, [4, 69]])
    one = make("q4s/tensor:f32", (6, 70), "jax")
    pairs = jax.numpy.asarray(GATHERED)
    wanted = np.take_along_axis(one.to("numpy").dequantize(), GATHERED, 1)
    check(jax.jit(lambda t, i: t.gather(i, 1))(one, pairs), wanted)


@needs("jax")
def test_tensor_scales_hidden_by_a_tracer() -> None:
    import jax

    a, b = (make("nvfp4", (n, 64), "jax") for n in (2, 3))
    with pytest.raises(errors.LayoutRefused, match="hidden by a tracer"):
        jax.jit(lambda s, t: pq.concat([s, t]))(a, b)
    a, b = (make("nf4", (n, 64), "jax") for n in (2, 3))
    joined = jax.jit(lambda s, t: pq.concat([s, t]))(a, b)
    check(joined, np.concatenate([part.to("numpy").dequantize() for part in (a, b)]))


# -- what is refused ---------------------------------------------------------------------------

REFUSED: tuple[tuple[str, Callable[[Any], Any], type[Exception], str], ...] = (
    ("q4s", lambda q: q[6], errors.InvalidIndex, "axis 0 has the indices -6 to 5"),
    ("q4s", lambda q: q[:, -71], errors.InvalidIndex, "axis 1 has the indices -70 to 69"),
    ("q4s", lambda q: q[[0, 6]], errors.InvalidIndex, "6 does not index"),
    ("q4s", lambda q: q.take(-7, 0), errors.InvalidIndex, "-7 does not index"),
    ("q4s", lambda q: q[0, 0, 0], errors.InvalidIndex, "it names 3 axes of 2"),
    ("q4s", lambda q: q[..., ...], errors.InvalidIndex, "two Ellipses"),
    ("q4s", lambda q: q[1.0], errors.InvalidIndex, "an index is an integer"),
    ("q4s", lambda q: q["a"], errors.InvalidIndex, "an index is an integer"),
    ("q4s", lambda q: q[q], errors.InvalidIndex, "an index is an integer"),
    ("q4s", lambda q: q[np.asarray([1.0])], errors.InvalidIndex, "its dtype is float64"),
    ("q4s", lambda q: q[True], errors.InvalidIndex, "a single True or False"),
    ("q4s", lambda q: q[[[1], [2, 3]]], errors.InvalidIndex, "not of the same length"),
    ("q4s", lambda q: q[::0], errors.InvalidIndex, "its step is 0"),
    ("q4s", lambda q: q[0.5:], errors.InvalidIndex, "its ends are not integers"),
    ("q4s", lambda q: q[np.ones(5, np.bool_)], errors.InvalidIndex, r"mask of shape \(5,\)"),
    ("q4s", lambda q: q[np.ones((6, 1), np.bool_)], errors.InvalidIndex, r"axes of shape \(6, 70"),
    ("q4s", lambda q: q[[0, 1], [0, 1, 2]], errors.InvalidIndex, "do not broadcast"),
    ("q4s", lambda q: q.take(np.ones(6, np.bool_), 0), errors.InvalidIndex, "takes a mask"),
    ("q4s", lambda q: q.narrow(0, 4, 3), errors.InvalidIndex, "axis 0 has 6 entries"),
    ("q4s", lambda q: q.narrow(0, 0, -1), errors.InvalidArgument, "length must be"),
    ("q4s", lambda q: q.split(0), errors.InvalidArgument, "sizes must be"),
    ("q4s", lambda q: q.split([1, 2]), errors.InvalidArgument, "sum up to the 6 entries"),
    ("q4s", lambda q: q.chunk(0), errors.InvalidArgument, "chunks must be"),
    ("q4s", lambda q: q.repeat(-1, 0), errors.InvalidArgument, "repeats must be"),
    ("q4s", lambda q: q.repeat([1, 2], 0), errors.InvalidArgument, "one for each of the 6"),
    ("q4s", lambda q: q.tile(1.5), errors.InvalidArgument, "reps must be"),
    ("q4s", lambda q: q.squeeze(0), errors.InvalidArgument, "axes of extent 1"),
    ("q4s", lambda q: q.flip(2), errors.InvalidAxes, "2 does not fit"),
    ("q4s", lambda q: q.flip((0, -2)), errors.InvalidAxes, "named once"),
    ("q4s", lambda q: q.unsqueeze(3), errors.InvalidAxes, "3 does not fit"),
    ("q4s", lambda q: q.permute(0), errors.InvalidAxes, "names all"),
    ("q4s", lambda q: q[0].mT, errors.InvalidAxes, "-2 does not fit"),
    ("q4s", lambda q: q.moveaxis((0, 1), 0), errors.InvalidAxes, "does not fit"),
    ("q4s", lambda q: q.reshape(6, 71), errors.ShapeMismatch, "the first has 420 elements"),
    ("q4s", lambda q: q.reshape(-1, -1), errors.ShapeMismatch, "one -1 is allowed"),
    ("q4s", lambda q: q.reshape(4, -1, 9), errors.ShapeMismatch, "the first has 420 elements"),
    ("q4s", lambda q: q[:0].reshape(0, -1), errors.ShapeMismatch, "the first has 0 elements"),
    ("q4s", lambda q: q.reshape("6"), errors.InvalidArgument, "shape must be"),
    ("q4s", lambda q: q.expand(7, 70), errors.ShapeMismatch, "only an axis of extent 1"),
    ("q4s", lambda q: q.expand(70), errors.ShapeMismatch, "takes no axis away"),
    ("q4s", lambda q: q.expand(-1, 6, 70), errors.ShapeMismatch, "a new axis needs an extent"),
    ("q4s", lambda q: q.gather([[0]] * 6 + [[0]], 1), errors.ShapeMismatch, "7 entries along"),
    ("q4s", lambda q: q.gather([0], 1), errors.ShapeMismatch, "as many axes"),
    ("nvfp4", lambda q: q[0, 0], errors.LayoutRefused, r"e\.g\. q\[0:1\]"),
    ("nvfp4", lambda q: q[:1, :1].reshape(()), errors.LayoutRefused, "needs them"),
    (SCHEMES[9], lambda q: q[0, 0], errors.LayoutRefused, "needs them"),
    ("q4s", lambda q: pq.concat([]), errors.InvalidArgument, "one QTensor or more"),
    ("q4s", lambda q: pq.concat(q), errors.InvalidArgument, "one QTensor or more"),
    ("q4s", lambda q: pq.concat([q, q.dequantize()]), errors.InvalidArgument, "their own library"),
    ("q4s", lambda q: pq.concat([q, q[:, :9]]), errors.ShapeMismatch, "tensor 1 differs"),
    ("q4s", lambda q: pq.concat([q, q[0]]), errors.ShapeMismatch, "tensor 1 differs"),
    ("q4s", lambda q: pq.concat([q], 2), errors.InvalidAxes, "2 does not fit"),
    ("q4s", lambda q: pq.stack([q, q[1:]]), errors.ShapeMismatch, "another shape"),
    ("q4s", lambda q: pq.concat([q, make("q8s")]), errors.LayoutRefused, "value type q8s, not q4s"),
    ("q4s", lambda q: pq.concat([q, make("nf4")]), errors.LayoutRefused, "value type u4, not q4s"),
    ("q4s", lambda q: pq.concat([q, make("q4s/32:f32")]), errors.LayoutRefused, "scale type f32"),
    ("q4s", lambda q: pq.concat([q, make("q4s/32:f16@native")]), errors.LayoutRefused, "store"),
    (
        "u4/8:f16+bias:f16",
        lambda q: pq.concat([q, make("u4/8:f16-zero:f16")]),
        errors.LayoutRefused,
        "kind of offset",
    ),
    (
        "nf4-double",
        lambda q: pq.concat([q, make("u4[nf4]/64:(q8s/256:f32)")]),
        errors.LayoutRefused,
        "scales' value type",
    ),
    (
        "nvfp4",
        lambda q: pq.concat([q, make("nvfp4", (7, 70))]),
        errors.LayoutRefused,
        "another tensor scale",
    ),
    (
        "u3[custom]/8:bf16",
        lambda q: pq.concat([q, other_table()]),
        errors.LayoutRefused,
        "another table",
    ),
    ("q4s", lambda q: ops.reshape(q.dequantize(), (1,)), errors.InvalidArgument, "a QTensor"),
    ("q4s", lambda q: ops.index([1], 0), errors.InvalidArgument, "a QTensor"),
)


def other_table() -> pq.QTensor:
    x = np.ones((6, 70), np.float32)
    return pq.quantize(x, "u3[custom]/8:bf16", table=np.linspace(-2, 1, 8))


@pytest.mark.parametrize(("scheme", "act", "error", "text"), REFUSED)
def test_what_cannot_be_is_refused_by_name(
    scheme: str, act: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        act(make(scheme))


@pytest.mark.parametrize("key", [(0, 3, None), (None, 0, 3), (0, None, 3, None), (0, 3, None, ...)])
def test_a_new_axis_is_enough_for_two_levels(key: Any) -> None:
    q = make("nvfp4")
    check(q[key], q.dequantize()[key])


def test_an_index_error_is_pythons_too() -> None:
    with pytest.raises(IndexError):
        make()[99]


@needs("torch")
def test_a_torch_index_of_bytes_is_neither_mask_nor_integers() -> None:
    q = make(device="torch:cpu")
    with pytest.raises(errors.InvalidIndex, match="convert it to bool or to int64"):
        q[put(np.zeros(6, np.uint8), "torch:cpu")]


def test_equal_tables_of_two_tensors_are_one() -> None:
    x = np.random.default_rng(2).normal(size=(2, 3, 8)).astype(np.float32)
    a, b = (pq.quantize(part, "u3[custom]/8:bf16", table=np.linspace(-2, 1, 8)) for part in x)
    check(pq.concat([a, b]), np.concatenate([a.dequantize(), b.dequantize()]))


# -- rows, and broadcast bytes elsewhere -------------------------------------------------------


def test_rows_one_by_one() -> None:
    q = make("nvfp4", (3, 70))
    rows = list(q)
    assert len(rows) == len(q) == 3
    for row, values in zip(rows, q.dequantize(), strict=True):
        check(row, values)
    with pytest.raises(TypeError, match="without axes"):
        iter(make("q4s/tensor:f32", ()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_broadcast_bytes_are_saved_sent_and_pickled(scheme: str, tmp_path: Path) -> None:
    for device in ("numpy", "torch:cpu"):
        if device not in DEVICES:
            continue
        q = make(scheme, (1, 70), device).expand(5, 70)
        wanted = np.array(host(q.dequantize()))
        data = q.to_data()
        assert data == in_memory(q).to_data()
        pq.save(tmp_path / "q.safetensors", {"q": q})
        others = [pickle.loads(pickle.dumps(q)), copy.deepcopy(q), pq.from_data(data)]
        others += [pq.load(tmp_path / "q.safetensors")["q"], *(q.to(name) for name in DEVICES)]
        for other in others:
            check(other, wanted, scheme)


def in_memory(q: pq.QTensor) -> pq.QTensor:
    """The same tensor with every stored array laid out anew."""
    return pq.from_data(q.to_data())


@pytest.mark.parametrize("scheme", ["q4s/32:f16", "q3s/row:f32", "nf4", "e4m3/16:ue8m0"])
def test_a_view_of_whole_blocks_is_what_would_be_quantized(scheme: str) -> None:
    """Codes, scales and bytes are those of the part, quantized by itself."""
    x = np.random.default_rng(3).normal(size=(4, 3, 38, 64)).astype(np.float32)
    q = pq.quantize(x, scheme)
    for key in ((..., slice(10, 15), slice(None)), (2,), (slice(None), 1), ([3, 0, 1],)):
        part = pq.quantize(np.ascontiguousarray(x[key]), scheme)
        assert q[key].to_data() == part.to_data()
    rows = pq.quantize(x.reshape(12, 38 * 1, 64), scheme)
    assert q.reshape(12, 38, 64).to_data() == rows.to_data()
