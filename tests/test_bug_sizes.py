"""Faults of other quantized-tensor libraries: B, sizes that are not nice.

Each test names the number of its case, the input and the right answer, and runs the whole kind:
other schemes, dtypes, operations, layouts and libraries.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import polyquant as pq
from bugs import (
    F32,
    assert_product,
    assert_view,
    bound,
    check_computations,
    check_moves,
    every_kind,
    everywhere,
    noise,
    relative_error,
    tensor,
)
from computations import COMPUTATIONS, ELSEWHERE, compare
from devices import assert_same_bits, host, needs, put
from polyquant import ops, standard
from polyquant.blocks import CHUNK, blocks_of, row_runs
from polyquant.codec import pack, unpack
from polyquant.data import data_size_bytes
from polyquant.errors import BlockRank, DataLength, InvalidArgument
from polyquant.qtensor import validate


@everywhere
@pytest.mark.parametrize("columns", [32, 96, 1, 3, 31, 33, 100, 127])
@pytest.mark.parametrize("kind", ["u4/32:f16+bias:f16", "q4s/32:f16", "q8s/32:f32", "e4m3/32:f16"])
def test_11_product_over_few_columns(kind: str, columns: int, place: str) -> None:
    """11: x (1, 1024) @ W (1024, N), 4-bit codes, scale 0.1, bias 0, groups of 32 along N.

    Right: x @ dequantize(W), every column of it, for N below, at and beside a tile.
    """
    rng, scheme = np.random.default_rng(3), pq.scheme(kind)
    x = noise(1, 1024)
    codes = rng.integers(0, 2 ** min(scheme.bits, 4), size=(1024, columns))
    offsets = np.float16(0) if scheme.offset else None
    w = tensor(kind, codes, 0.1, place, offsets)
    values = host(w.dequantize())
    if scheme.offset:
        assert_same_bits(values, codes.astype(F32) * host(w.scales).astype(F32)[:, :1])
    assert_product(put(x, place) @ w, x, values)


@every_kind
@everywhere
def test_11_products_of_every_width(kind: str, place: str) -> None:
    """11, the kind: every scheme, on either side, whole and cut out of a wider weight."""
    wide = pq.quantize(put(noise(96, 100), place), kind)
    x = noise(2, 96)
    for columns in (1, 3, 31, 32, 33, 96, 100):
        made = pq.quantize(put(noise(96, columns), place), kind)
        for w in (made, wide[:, :columns], wide[:, 100 - columns :]):
            values = host(w.dequantize())
            assert values.shape == (96, columns)
            assert_product(put(x, place) @ w, x, values)
            assert_product(w.T @ put(x.T, place), np.ascontiguousarray(values.T), x.T)
            assert_product(pq.linear(put(x, place), w.T), x, values)


@every_kind
@everywhere
def test_13_last_block_partly_filled(kind: str, place: str) -> None:
    """13: 100 values in blocks of 64. Right: the last scale covers the 36 real ones; same shape."""
    scheme = pq.scheme(kind)
    rank = len(scheme.block or ()) or 1
    for length in (1, 5, 33, 100):
        _check_short_block(scheme, (3,) * (rank - 1) + (length,), place)


def _check_short_block(scheme: pq.QuantScheme, shape: tuple[int, ...], place: str) -> None:
    x, length = noise(*shape), shape[-1]
    q = pq.quantize(put(x, place), scheme)
    back = host(q.dequantize())
    assert back.shape == shape and np.isfinite(back).all()
    for part in q.parts().values():
        assert np.isfinite(host(part).astype(F32)).all()
    # A block cut short is the block of its values alone.
    extents = scheme.block_extents(shape)
    start = (length - 1) // extents[-1] * extents[-1]
    if scheme.tensor_scale is None and not isinstance(scheme.scale, pq.QuantScheme):
        alone = pq.quantize(put(np.ascontiguousarray(x[..., start:]), place), scheme)
        assert_same_bits(host(alone.scales), np.ascontiguousarray(host(q.scales)[..., -1:]))
        assert_same_bits(host(alone.dequantize()), np.ascontiguousarray(back[..., start:]))


def test_13_one_hundred_values() -> None:
    """13, as met: the two absmax of 100 values in blocks of 64 are max |x| of 64 and of 36."""
    x = noise(100)
    q = pq.quantize(x, "u8[dynamic8]/64:f32")
    assert q.scales.tolist() == [np.abs(x[:64]).max(), np.abs(x[64:]).max()]


@every_kind
@everywhere
def test_13_operations_of_short_blocks(kind: str, place: str) -> None:
    """13, the kind: views and computations of lines whose last block is short; pieces put together.

    Right: what each is of the decoded values, and no number from past a line's end.
    """
    for seed, shape in enumerate(((3, 100), (2, 5), (5, 33))):
        q = pq.quantize(put(noise(*shape), place), kind)
        check_moves(q, [seed])
    check_computations(q, kind, place)
    q = pq.quantize(put(noise(2, 100), place), kind)
    values = host(q.dequantize())
    pieces = q.split(36, 1)
    assert [piece.shape[1] for piece in pieces] == [36, 36, 28]
    assert_view(ops.concat(pieces, 1), values)
    assert_view(ops.concat(pieces[::-1], 1)[:, 28:], np.hstack([values[:, 36:72], values[:, :36]]))


@everywhere
def test_15_block_comes_from_the_scheme(place: str) -> None:
    """15: 1000 rows, 128x128 blocks, 8 rows of scales.

    Right: the block stays 128, not ceil(1000 / 8) = 125, so that the last has 104 rows.
    """
    scheme = pq.scheme("fp8-128x128")
    assert scheme.scale_shape((1000, 256)) == (8, 2)
    assert scheme.block_extents((1000, 256)) == (128, 128)
    codes = np.full((1000, 256), 0x38)  # e4m3's 1.0
    grid = np.arange(1, 17, dtype=F32).reshape(8, 2)
    values = host(tensor(str(scheme), codes, grid, place).dequantize())
    rows, columns = np.arange(1000) // 128, np.arange(256) // 128
    assert_same_bits(values, np.ascontiguousarray(grid[rows][:, columns]))
    assert (rows == 7).sum() == 104


@everywhere
def test_15_blocks_of_views(place: str) -> None:
    """15, the kind: views of 1000 rows know their blocks too, whole, cut, turned or regrouped."""
    codes, grid = np.full((1000, 256), 0x38), np.arange(1, 17, dtype=F32).reshape(8, 2)
    q = tensor("fp8-128x128", codes, grid, place)
    values = grid[np.arange(1000) // 128][:, np.arange(256) // 128]
    for key in (slice(900), slice(128, 1000), slice(896, None), slice(None, 897)):
        assert_view(q[key], values[key], str(key))
        assert q[key].scheme.block == (128, 128)
    assert_view(q[100:], values[100:])
    assert_view(q.T[128:, :900], values.T[128:, :900])
    assert q.T[128:, :900].scheme.block == (128, 128)
    assert_view(q.reshape((10, 100, 256)), values.reshape(10, 100, 256))
    assert_view(q.reshape((1000, 2, 128)), values.reshape(1000, 2, 128))
    assert_view(q.flip(0), values[::-1])
    assert_view(ops.concat([q, q]), np.concatenate([values, values]))
    x = noise(1, 1000)
    assert_product(put(x, place) @ q, x, values)


@everywhere
@pytest.mark.parametrize("shape", [(576, 300), (284, 200), (130, 129), (128, 1), (1, 385)])
@pytest.mark.parametrize("kind", ["e4m3/128x128:f32", "q8s/128x128:f16", "q4s/128x128:f32"])
def test_16_two_dimensional_blocks_that_do_not_divide(
    kind: str, shape: tuple[int, int], place: str
) -> None:
    """16: 576 and 4544 rows in blocks of 128x128. Right: ceil(576 / 128) = 5 rows of scales."""
    x = noise(*shape)
    q = pq.quantize(put(x, place), kind)
    counts = tuple(math.ceil(d / 128) for d in shape)
    assert tuple(q.scales.shape) == counts
    assert host(q.dequantize()).shape == shape
    assert relative_error(x, q) < (0.2 if kind.startswith("q4") else 0.05)
    top = q.scheme.value.half_range
    for i, j in np.ndindex(counts):
        block = x[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        scale = F32(host(q.scales)[i, j])  # rounded up by less than 2^-10 in f16
        np.testing.assert_allclose(scale * top, np.abs(block).max(), rtol=2.0**-10)


def test_16_as_met() -> None:
    """16: the grid of 576x2048, and of 4544 rows, without the work."""
    scheme = pq.scheme("fp8-128x128")
    assert scheme.scale_shape((576, 2048)) == (5, 16)
    assert scheme.scale_shape((4544, 4544)) == (36, 36)


@everywhere
@pytest.mark.parametrize("shape", [(37, 45), (33, 16), (1, 40), (40, 1), (5, 5)])
@pytest.mark.parametrize("kind", ["e5m2/4x4:f32", "q4s/16x16:f16", "u4/16x8:f16-zero:u4"])
def test_16_operations_of_blocks_that_do_not_divide(
    kind: str, shape: tuple[int, int], place: str
) -> None:
    """16, the kind: views, computations and products of rectangles with short edges."""
    q = pq.quantize(put(noise(*shape), place), kind)
    for seed, side in enumerate((q, q.T)):
        check_moves(side, [seed])
        check_computations(side, kind, place)
        x = noise(3, side.shape[0])
        assert_product(put(x, place) @ side, x, host(side.dequantize()))


@everywhere
@pytest.mark.parametrize("store", ["packed_u32", "packed_native", "native"])
@pytest.mark.parametrize("value", ["e2m1", "q4s", "q2f", "q3s", "q5f", "e3m2", "u1", "u7", "q6s"])
def test_18_odd_columns(value: str, store: str, place: str) -> None:
    """18: 3x5 FP4. Right: every line is padded by itself, and the true width is remembered."""
    for columns in (1, 3, 5, 9, 31, 33):
        _check_odd_columns(pq.QuantValue(value), columns, store, place)


def _check_odd_columns(kind: pq.QuantValue, columns: int, store: str, place: str) -> None:
    fields = np.random.default_rng(4).integers(0, 2**kind.bits, (3, columns)).astype(np.uint8)
    there = put(fields, place)
    xp = standard.namespace(there)
    data = pack(xp, there, kind, pq.QuantStore(store))
    bytes_a_line = {
        "native": columns,
        "packed_native": math.ceil(columns * kind.bits / 8),
        "packed_u32": 4 * math.ceil(columns * kind.bits / 32),
    }[store]
    assert tuple(data.shape) == (3, bytes_a_line)
    back = unpack(xp, data, columns, kind, pq.QuantStore(store))
    assert_same_bits(host(back), fields)
    q = pq.quantize(put(np.abs(noise(3, columns)), place), f"{kind}/32:f16@{store}")
    assert q.shape == host(q.dequantize()).shape == (3, columns)


@everywhere
@pytest.mark.parametrize("store", ["packed_u32", "packed_native", "native"])
@pytest.mark.parametrize("value", ["e2m1", "q4s", "q2f", "q3s", "e3m2", "u1", "u7"])
def test_18_operations_of_odd_columns(value: str, store: str, place: str) -> None:
    """18, the kind: views that begin and end inside a byte, and products of odd columns."""
    q = pq.quantize(put(np.abs(noise(3, 5)), place), f"{value}/2:f16@{store}")
    values = host(q.dequantize())
    for start, stop in itertools.combinations(range(6), 2):
        assert_view(q[:, start:stop], values[:, start:stop], f"[{start}:{stop}]")
    assert_view(q[:, 1:4].flip(1), values[:, 3:0:-1])
    check_moves(q, [0])
    if value == "e2m1":
        compare(q, place)
    x = noise(2, 3)
    assert_product(put(x, place) @ q, x, values)
    assert_product(put(noise(2, 5), place) @ q.T, noise(2, 5), np.ascontiguousarray(values.T))


@everywhere
@pytest.mark.parametrize("rows", [2, 3, 7])
@pytest.mark.parametrize("kind", ["q4s/32:f32", "q2s/32:f16", "mxfp4", "nvfp4", "nf4"])
def test_20_two_rows_at_four_bits(kind: str, rows: int, place: str) -> None:
    """20: ones(m, 1024) times a weight in blocks of 32. Right: m rows of the m=1 result.

    Within the bound of a product: a library may add the numbers of a row in another order.
    """
    w = pq.quantize(put(noise(256, 256), place), kind)
    values = host(w.dequantize())
    one = host(put(np.ones((1, 256), F32), place) @ w)
    many = host(put(np.ones((rows, 256), F32), place) @ w)
    limit = bound(np.ones((1, 256), F32), values)
    assert (np.abs(many - one) <= 2 * limit).all()
    assert_product(many, np.ones((rows, 256), F32), values)


@everywhere
@pytest.mark.parametrize("kind", ["q4s/32:f32", "q2s/32:f16", "mxfp4", "nf4", "u4/32:f16-zero:u4"])
def test_20_rows_of_quantized_activations(kind: str, place: str) -> None:
    """20, the kind: one row, two or more of a quantized left operand, as views of one tensor."""
    w = pq.quantize(put(noise(64, 48), place), kind)
    a = pq.quantize(put(noise(7, 64), place), "q8s/32:f16")
    left, right = host(a.dequantize()), host(w.dequantize())
    for rows in (1, 2, 3, 7):
        assert_product(a[:rows] @ w, left[:rows], right)
        assert_product(a[7 - rows :] @ w, left[7 - rows :], right)
    same = a[:1].expand((5, 64)) @ w
    assert_product(same, np.repeat(left[:1], 5, 0), right)


EMPTY = ((0, 8), (8, 0), (0, 0), (2, 0, 8), (0,))


@every_kind
@everywhere
def test_21_empty_tensors(kind: str, place: str) -> None:
    """21: shape (0, 8) quantized and back. Right: (0, 8); its bytes travel too."""
    for shape in EMPTY:
        x = put(np.zeros(shape, F32), place)
        if len(shape) < len(pq.scheme(kind).block or ()):
            with pytest.raises(BlockRank):
                pq.quantize(x, kind)
            continue
        q = pq.quantize(x, kind)
        assert q.shape == host(q.dequantize()).shape == host(q.codes()).shape == shape
        back = pq.from_data(q.to_data(), place)
        assert back.to_data() == q.to_data()
        assert q.size == 0 and q.bits_per_element == 0.0


@everywhere
@pytest.mark.parametrize(
    "kind", ["q8s/row:f32", "q4s/32:f16", "mxfp4", "nf4", "u4/32:f16+bias:f16"]
)
def test_21_products_of_empty_operands(kind: str, place: str) -> None:
    """21: (0, K) x (K, N) is (0, N), empty; K = 0 gives zeros, or the bias."""
    w = pq.quantize(put(noise(64, 32), place), kind)
    assert host(put(np.zeros((0, 64), F32), place) @ w).shape == (0, 32)
    none = pq.quantize(put(np.zeros((0, 32), F32), place), kind)
    assert_same_bits(host(put(np.zeros((3, 0), F32), place) @ none), np.zeros((3, 32), F32))
    bias = noise(32)
    flat = pq.quantize(put(np.zeros((32, 0), F32), place), kind)
    got = host(pq.linear(put(np.zeros((3, 0), F32), place), flat, put(bias, place)))
    assert_same_bits(got, np.stack([bias] * 3))


@every_kind
@everywhere
def test_21_operations_of_empty_tensors(kind: str, place: str) -> None:
    """21, the kind: every view and every computation of tensors without elements.

    Right: what NumPy gives of an empty array; a choice among no numbers is refused by name.
    """
    for seed, shape in enumerate(EMPTY):
        if len(shape) < len(pq.scheme(kind).block or ()):
            continue
        q = pq.quantize(put(np.zeros(shape, F32), place), kind)
        if shape != (0, 0):
            check_moves(q, [seed])
        check_computations(q, kind, place)
        for over in ("max", "min", "argmax", "argmin", "max_abs"):
            with pytest.raises(InvalidArgument, match=over):
                getattr(ops, over)(q)
        assert host(ops.sum(q)) == 0 and host(ops.prod(q)) == 1
        assert host(ops.all(q)) and not host(ops.any(q))
    rows = pq.quantize(put(noise(4, 8), place), kind)
    assert_view(rows[4:], np.zeros((0, 8), F32))
    assert_view(ops.concat([rows, rows[:0]]), host(rows.dequantize()))
    assert_view(rows[:, 8:].reshape((0, 3)), np.zeros((0, 3), F32))


@everywhere
def test_21_empty_convolutions(place: str) -> None:
    """21, the kind: no images, no channels out, and no channels in, which leaves the bias."""
    bias = put(np.asarray([1, 2], F32), place)
    for images, filters, wanted in (
        ((0, 3, 5, 5), (2, 3, 3, 3), (0, 2, 3, 3)),
        ((2, 3, 5, 5), (0, 3, 3, 3), (2, 0, 3, 3)),
        ((2, 0, 5, 5), (2, 0, 3, 3), (2, 2, 3, 3)),
    ):
        weight = pq.quantize(put(np.ones(filters, F32), place), "q8s/tensor:f32")
        x = put(np.ones(images, F32), place)
        got = host(ops.conv2d(x, weight, bias if filters[0] else None))
        assert got.shape == wanted
        if images[1] == 0:
            assert_same_bits(got, np.broadcast_to(F32([[[1]], [[2]]]), wanted).copy())


def test_21_every_operation_is_among_them() -> None:
    """21, the kind: no computation is left out above."""
    rows = {name for name in ops.__all__ if hasattr(getattr(ops, name), "row")}
    assert rows == set(COMPUTATIONS) | ELSEWHERE


BIG = (2**31 - 65536, 2**31, 2**31 + 65536)


@pytest.mark.parametrize("size", BIG)
@pytest.mark.parametrize(
    "kind", ["q8s/tensor:f32", "q4s/32:f16", "q3s/7:f32", "nvfp4", "nf4-double"]
)
def test_22_sizes_of_two_to_the_31st(kind: str, size: int) -> None:
    """22: around 2^31 values. Right: they work; sizes are Python's integers, which have no limit.

    Here the arithmetic that finds blocks, runs and bytes, without the memory.
    """
    scheme = pq.scheme(kind)
    for shape in ((size,), (size // 64, 64), (2, size)):
        grid = scheme.scale_shape(shape)
        extents = scheme.block_extents(shape)
        assert all((n - 1) * e < d <= n * e for n, e, d in zip(grid, extents, shape, strict=True))
        codes = math.prod(shape[:-1]) * math.ceil(shape[-1] * scheme.bits / 32) * 4
        assert data_size_bytes(scheme, shape) > codes
    # Runs cover every row and every row of the grid once, in order.
    blocks = blocks_of(scheme, (size // 64, 64))
    runs = list(row_runs(blocks, whole=False))
    assert [r.rows.start for r in runs[1:]] == [r.rows.stop for r in runs[:-1]]
    assert (runs[0].rows.start, runs[-1].rows.stop) == (0, size // 64)
    if blocks.counts[0] > 1:
        assert (runs[0].grid_rows.start, runs[-1].grid_rows.stop) == (0, blocks.counts[0])
    with pytest.raises(DataLength, match=str(data_size_bytes(scheme, (size,)))):
        pq.TensorData(b"", (size,), scheme, (0,))


@needs("torch")
@pytest.mark.parametrize("size", BIG)
@pytest.mark.parametrize("kind", ["q8s/tensor:f32", "q4s/32:f16", "nf4", "nvfp4"])
def test_22_shapes_past_two_to_the_31st(kind: str, size: int) -> None:
    """22: the whole of quantize and dequantize on torch's meta device, which holds no memory."""
    import torch

    x = torch.empty(size, device="meta")
    q = pq.quantize(x, kind)
    assert q.shape == (size,)
    assert q.data.shape[0] == math.ceil(size * q.scheme.bits / 32) * 4
    assert tuple(q.scales.shape) == q.scheme.scale_shape((size,))
    assert tuple(q.dequantize().shape) == (size,)


def test_22_a_broadcast_source_is_not_copied_whole() -> None:
    """22: 2^27 values faked with a stride of 0, in runs of rows that bound the memory."""
    x = np.broadcast_to(noise(1, 1 << 14), (1 << 13, 1 << 14))
    runs = list(row_runs(blocks_of(pq.scheme("q4s/32:f16"), x.shape), whole=False))
    assert len(runs) == x.size // CHUNK
    part = pq.quantize(x[:64], "q4s/32:f16")
    assert (part.data == part.data[:1]).all()


@needs("torch")
@pytest.mark.parametrize("size", BIG)
@pytest.mark.parametrize("kind", ["q8s/tensor:f32", "q4s/32:f16", "u4/32:f16-zero:u4"])
def test_22_views_past_two_to_the_31st(kind: str, size: int) -> None:
    """22: views on the meta device, which holds no memory: the arithmetic of places alone."""
    import torch

    q = pq.quantize(torch.empty((size // 64, 64), device="meta"), kind)
    for got, shape in (
        (q.reshape((size,)), (size,)),
        (q.reshape((64, -1)), (64, size // 64)),
        (q.T, (64, size // 64)),
        (q[-5:], (5, 64)),
        (q[::-1], (size // 64, 64)),
        (q[size // 64 - 3, 10], ()),
        (q.narrow(0, size // 64 - 2, 2), (2, 64)),
        (q.expand((3, -1, -1)), (3, size // 64, 64)),
        (ops.concat([q, q]), (size // 32, 64)),
        (q.chunk(2)[1], (size // 128, 64)),
    ):
        validate(got)
        assert got.shape == tuple(got.dequantize().shape) == shape


@everywhere
@pytest.mark.parametrize("kind", ["q8s/tensor:f32", "q4s/32:f16", "u4/32:f16-zero:u4"])
def test_22_places_past_two_to_the_31st(kind: str, place: str) -> None:
    """22: real values faked past 2^31 with a stride of 0; parts of them from the far end.

    Right: the values there, not those of a place that wrapped around 32 bits.
    """
    q = pq.quantize(put(noise(1, 4096), place), kind)
    values = host(q.dequantize())
    rows, far = 2**20, 2**19 + 3
    tall = q.expand((rows, 4096))
    assert tall.size == 2**32
    assert_view(tall[far : far + 2], np.repeat(values, 2, 0))
    assert_view(tall[-1, 3:9], values[0, 3:9])
    assert_view(tall.narrow(0, rows - 3, 3), np.repeat(values, 3, 0))
    assert_view(tall[far::7][:3, ::-1], np.repeat(values, 3, 0)[:, ::-1])
    assert_view(tall.T[5, far : far + 4], np.repeat(values[0, 5], 4))
    assert_view(tall.take(np.asarray([far, -1, 2**19]), 0), np.repeat(values, 3, 0))
    x = noise(2, 4096)
    assert_product(put(x, place) @ tall[far : far + 3].T, x, np.repeat(values, 3, 0).T)
