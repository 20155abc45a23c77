"""Faults of other quantized-tensor libraries: A, views, strides and layouts.

Each test names the number of its case, the input and the right answer, and runs the whole kind:
other schemes, dtypes, operations, layouts and libraries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import polyquant as pq
from bugs import (
    F32,
    JAX,
    KINDS,
    PLACES,
    Host,
    assert_product,
    assert_view,
    bound,
    check_computations,
    check_moves,
    every_kind,
    everywhere,
    noise,
    relative_error,
    transposed,
)
from devices import assert_same_bits, assert_same_parts, host, needs, put
from polyquant import ops
from polyquant.errors import ShapeMismatch
from strategies import lay_out, lay_out_torch


@pytest.mark.parametrize(
    ("kind", "place"),
    [*itertools.product(KINDS, PLACES), *(("q4s/32:f16", place) for place in JAX)],
)
def test_01_transposed_source(kind: str, place: str) -> None:
    """1: 64x32 golden-ratio values, transposed without a copy, then quantized.

    Right: the very codes, scales and values of the contiguous copy.
    """
    i = np.arange(2048, dtype=np.float64)
    x = (((i * 0.6180339887) % 1 - 0.5) * 0.12).astype(F32).reshape(64, 32)
    view = transposed(put(x, place))
    copy = put(np.ascontiguousarray(x.T), place)
    q, wanted = pq.quantize(view, kind), pq.quantize(copy, kind)
    assert_same_parts(q, wanted)
    assert_same_bits(host(q.dequantize()), host(wanted.dequantize()))
    assert relative_error(np.ascontiguousarray(x.T), q) < (0.01 if "8" in kind[:2] else 0.6)


LAYOUTS = (
    ("transposed", "float32"),
    ("transposed", "bfloat16"),
    ("strided", "float32"),
    ("strided", "float16"),
    ("reversed", "float64"),
    ("broadcast", "float32"),
    ("broadcast", "float16"),
    ("read_only", "bfloat16"),
    ("fortran", "float64"),
)


@every_kind
@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_01_any_layout_and_dtype(kind: str, layout: str, dtype: str) -> None:
    """1 and 3, the kind: every NumPy layout and float dtype quantizes as its contiguous copy."""
    x = noise(32, 64).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    view = lay_out(x, layout)
    assert_same_parts(pq.quantize(view, kind), pq.quantize(np.array(view, order="C"), kind))


@needs("torch")
@every_kind
@pytest.mark.parametrize("layout", ["transposed", "strided", "broadcast"])
def test_01_torch_layouts(kind: str, layout: str) -> None:
    """1 and 3, the kind: torch's strided views quantize as their contiguous copies."""
    view = lay_out_torch(noise(32, 64), layout)
    assert not view.is_contiguous()
    assert_same_parts(pq.quantize(view, kind), pq.quantize(view.contiguous(), kind))


@every_kind
@everywhere
def test_02_transpose_then_dequantize(kind: str, place: str) -> None:
    """2: transpose a quantized tensor once and twice. Right: dequantize(q.T) is dequantize(q).T."""
    q = pq.quantize(put(noise(48, 96), place), kind)
    values = host(q.dequantize())
    assert_same_bits(np.ascontiguousarray(host(q.T.dequantize())), np.ascontiguousarray(values.T))
    assert_same_bits(host(q.T.T.dequantize()), values)
    assert_same_bits(
        np.ascontiguousarray(host(q.T.codes())), np.ascontiguousarray(host(q.codes()).T)
    )


@everywhere
@pytest.mark.parametrize("axes", [(0, 2, 1), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
@pytest.mark.parametrize("kind", ["q4s/32:f16", "q8s/2x16:f32", "u4/16:f16-zero:u4", "nf4"])
def test_02_permute_of_three_axes(kind: str, axes: tuple[int, ...], place: str) -> None:
    """2, the kind: any permutation, and its bytes, are exact and move nothing."""
    q = pq.quantize(put(noise(3, 6, 64), place), kind)
    turned = q.permute(axes)
    wanted = np.ascontiguousarray(host(q.dequantize()).transpose(axes))
    assert_same_bits(np.ascontiguousarray(host(turned.dequantize())), wanted)
    assert turned.data is q.data
    back = pq.from_data(turned.to_data(), "numpy")
    assert back.shape == turned.shape
    assert_same_bits(np.ascontiguousarray(back.dequantize()), wanted)


@every_kind
@everywhere
def test_02_operations_of_turned_tensors(kind: str, place: str) -> None:
    """2, the kind: every view and every computation of a tensor whose axes were exchanged."""
    q = pq.quantize(put(noise(4, 6, 32), place), kind)
    check_moves(q.permute(2, 0, 1), [2])
    check_moves(q.mT, [3])
    check_computations(q.permute(2, 0, 1), kind, place)


@every_kind
@everywhere
def test_02_products_of_turned_tensors(kind: str, place: str) -> None:
    """2, the kind: on either side of a product, both sides at once, and in a linear layer."""
    q = pq.quantize(put(noise(3, 24, 32), place), kind)
    for axes in ((0, 2, 1), (2, 0, 1), (1, 2, 0), (2, 1, 0)):
        turned = q.permute(axes)
        values = host(turned.dequantize())
        x, y = noise(2, turned.shape[1]), noise(turned.shape[2], 2)
        assert_product(pq.matmul(put(x, place), turned), x, values)
        assert_product(pq.matmul(turned, put(y, place)), values, y)
        both = pq.matmul(turned, turned.mT)
        assert_product(both, values, np.swapaxes(values, -1, -2))
    weight = q[0]
    x = noise(5, 24)
    got = pq.linear(put(x, place), weight.T)
    assert_product(got, x, np.ascontiguousarray(host(weight.dequantize())))


@everywhere
@pytest.mark.parametrize("kind", ["q8s/64:f32", "u8[dynamic8]/64:f32", "q4s/64:f16", "e4m3/64:f32"])
def test_03_strided_rows(kind: str, place: str) -> None:
    """3: every second row of 64x128, blocks of 64. Right: codes and scales of the copied rows."""
    x = noise(64, 128)
    q = pq.quantize(put(x, place)[::2, :], kind)
    assert_same_parts(q, pq.quantize(put(np.ascontiguousarray(x[::2]), place), kind))
    if kind != "e4m3/64:f32":
        top = {"q8s": 127, "u8[": 1, "q4s": 7}[kind[:3]]
        alpha = np.abs(x[::2]).reshape(32, 2, 64).max(-1)
        np.testing.assert_allclose(host(q.scales).astype(F32) * F32(top), alpha, rtol=1e-3)


STEPS = (slice(None, None, 2), slice(None, None, -1), slice(1, None, 3), slice(-2, 3, -2))


@every_kind
@everywhere
def test_03_strided_tensors(kind: str, place: str) -> None:
    """3, the kind: a quantized tensor in steps along either axis or both; then what it computes."""
    x = noise(16, 64)
    q = pq.quantize(put(x, place), kind)
    values = host(q.dequantize())
    for rows, columns in itertools.product(STEPS, (slice(None), *STEPS)):
        assert_view(q[rows, columns], values[rows, columns], f"[{rows}, {columns}]")
        if columns == slice(None) and keeps_rows(q.scheme):
            alone = pq.quantize(put(np.ascontiguousarray(x[rows]), place), kind)
            assert_same_numbers(q[rows], alone)
    strided = q[1::2, ::-3]
    check_moves(strided, [4])
    check_computations(strided, kind, place)
    y = noise(strided.shape[1], 3)
    assert_product(strided @ put(y, place), host(strided.dequantize()), y)


def keeps_rows(scheme: pq.QuantScheme) -> bool:
    """Whether a row is quantized by itself, as if there were no others."""
    in_rows = scheme.block is not None and all(extent == 1 for extent in scheme.block[:-1])
    return in_rows and scheme.tensor_scale is None and not isinstance(scheme.scale, pq.QuantScheme)


def assert_same_numbers(got: pq.QTensor, wanted: pq.QTensor) -> None:
    """The same scheme, codes, scales and offsets, in logical order."""
    assert got.scheme == wanted.scheme
    assert_same_bits(host(got.codes()), np.array(host(wanted.codes()), order="C"), "codes")
    for name in ("scales", "offsets"):
        left, right = getattr(got, name), getattr(wanted, name)
        if right is not None:
            left, right = (host(q.to_logical(g)) for q, g in ((got, left), (wanted, right)))
            assert_same_bits(np.array(left, order="C"), np.array(right, order="C"), name)


@everywhere
@pytest.mark.parametrize(
    "kind", ["u4[nf4]/256:f32", "q4s/256:f16", "q8s/256:f32", "e2m1/256:ue8m0"]
)
def test_05_slice_of_source(kind: str, place: str) -> None:
    """5: rows 10 to 14 of (4, 3, 38, 256), a block a row.

    Right: the slice quantizes to the slices of data and scales, and looked-up scales are max |x|.
    """
    x = noise(4, 3, 38, 256)
    whole = pq.quantize(put(x, place), kind)
    part = pq.quantize(put(x, place)[:, :, 10:15, :], kind)
    assert_same_bits(host(part.data), np.ascontiguousarray(host(whole.data)[:, :, 10:15]))
    assert_same_bits(host(part.scales), np.ascontiguousarray(host(whole.scales)[:, :, 10:15]))
    assert part.data.shape[:3] == (4, 3, 5)
    if "nf4" in kind:
        assert part.data.shape[-1] == 128
        alpha = np.abs(x[:, :, 10:15]).max(-1, keepdims=True)
        assert_same_bits(host(part.scales), alpha)


#: Operations that leave the last axis alone: of a QTensor, and of its source.
ABOVE_THE_ROWS: tuple[tuple[Callable[[pq.QTensor], pq.QTensor], Callable[[Host], Host]], ...] = (
    (lambda q: q[:, :, 10:15, :], lambda x: x[:, :, 10:15]),
    (lambda q: q[1], lambda x: x[1]),
    (lambda q: q[:, -1, ::3], lambda x: x[:, -1, ::3]),
    (lambda q: q[..., [3, 3, 0], :], lambda x: x[..., [3, 3, 0], :]),
    (lambda q: q[None, :, 2], lambda x: x[None, :, 2]),
    (lambda q: q.narrow(2, 10, 5), lambda x: x[:, :, 10:15]),
    (lambda q: q.select(2, np.asarray([5, -1])), lambda x: x[:, :, [5, -1]]),
    (lambda q: q.take(np.asarray([[1, 0]]), 1), lambda x: x[:, [[1, 0]]]),
    (lambda q: q.flip(2), lambda x: np.flip(x, 2)),
    (lambda q: q.flip((0, 1)), lambda x: np.flip(x, (0, 1))),
    (lambda q: q.chunk(4, 2)[3], lambda x: x[:, :, 12:]),
    (lambda q: q.split([7, 1, 8], 2)[1], lambda x: x[:, :, 7:8]),
    (lambda q: q.reshape((6, 16, 64)), lambda x: x.reshape(6, 16, 64)),
    (lambda q: q.reshape((2, -1, 64)), lambda x: x.reshape(2, 48, 64)),
    (lambda q: q.unsqueeze(0), lambda x: x[None]),
    (lambda q: q[:, :1].squeeze(1), lambda x: x[:, 0]),
    (lambda q: q.permute(2, 0, 1, 3), lambda x: x.transpose(2, 0, 1, 3)),
    (lambda q: q.swapaxes(0, 1), lambda x: x.swapaxes(0, 1)),
    (lambda q: q[:1].expand((5, 3, 16, 64)), lambda x: np.broadcast_to(x[:1], (5, 3, 16, 64))),
    (lambda q: q.repeat(2, 1), lambda x: np.repeat(x, 2, 1)),
    (lambda q: q.tile((2, 1, 1, 1)), lambda x: np.tile(x, (2, 1, 1, 1))),
    (lambda q: ops.concat([q, q[:, :, :3]], 2), lambda x: np.concatenate([x, x[:, :, :3]], 2)),
    (lambda q: ops.stack([q, q], 1), lambda x: np.stack([x, x], 1)),
    (lambda q: q[:, :, ::-1].permute(1, 2, 0, 3)[2, 5:], lambda x: x[:, 2, 10::-1].swapaxes(0, 1)),
)


@every_kind
@everywhere
def test_05_views_above_the_rows(kind: str, place: str) -> None:
    """5, the kind: whatever leaves the rows whole commutes with quantizing, and keeps the scheme.

    Right: codes, scales and offsets of the quantized view are those of the view of the source.
    """
    x = noise(2, 3, 16, 64)
    q = pq.quantize(put(x, place), kind)
    values = host(q.dequantize())
    for number, (ours, theirs) in enumerate(ABOVE_THE_ROWS):
        got = ours(q)
        assert_view(got, theirs(values), f"number {number}")
        if keeps_rows(q.scheme):
            source = np.ascontiguousarray(theirs(x))
            assert_same_numbers(got, pq.quantize(put(source, place), kind))


@everywhere
@pytest.mark.parametrize("kind", ["u8/32:f16+bias:f16", "u4/16:f16-zero:u4", "q4s/32:f16", "nf4"])
def test_06_slice_of_stored_parts(kind: str, place: str) -> None:
    """6: 8-bit affine of (2, 256, 32); data, scales and biases sliced to the first 16 rows.

    Right: a tensor of the slices decodes to the slice of the decoded whole.
    """
    q = pq.quantize(put(noise(2, 256, 64), place), kind)
    part = pq.QTensor(
        q.scheme,
        (2, 16, 64),
        q.data[:, :16],
        q.scales[:, :16],
        offsets=None if q.offsets is None else q.offsets[:, :16],
        table=q.table,
        device=q.device,
    )
    wanted = np.ascontiguousarray(host(q.dequantize())[:, :16])
    assert_same_bits(host(part.dequantize()), wanted)


@every_kind
@everywhere
def test_06_every_view(kind: str, place: str) -> None:
    """6: (2, 64, 32) sliced to [:, :16, :]; and every other view, whole blocks or not.

    Right: the decoded view is the view of the decoded tensor, to the bit.
    """
    q = pq.quantize(put(noise(2, 64, 32), place), kind)
    assert_view(q[:, :16, :], host(q.dequantize())[:, :16, :])
    check_moves(pq.quantize(put(noise(3, 8, 48), place), kind), range(2))


@everywhere
@every_kind
def test_09_batches_and_vectors(kind: str, place: str) -> None:
    """9, the kind: a vector, a row, a batch of rows, and a batch of weights agree."""
    weights = pq.quantize(put(noise(2, 32, 48), place), kind)
    values, x = host(weights.dequantize()), noise(2, 3, 32)
    assert_product(put(x, place) @ weights, x, values)
    assert_product(put(x, place) @ weights[1], x, values[1])
    single = pq.matmul(put(x[0, 0], place), weights[0])
    assert tuple(single.shape) == (48,)
    limit = float(bound(x[:1, 0], values[0]).max())
    row = host(pq.matmul(put(x[0, :1], place), weights[0]))[0]
    np.testing.assert_allclose(host(single), row, rtol=0, atol=2 * limit)
    assert_product(pq.linear(put(x, place), weights[1].T), x, values[1])
    for refused in (
        lambda: pq.linear(put(x, place), weights[1]),
        lambda: put(x[0, 0], place) @ weights[1].T,
        lambda: put(x, place) @ weights.mT,
    ):
        with pytest.raises(ShapeMismatch, match=r"32.*48|48.*32"):
            refused()


@everywhere
@pytest.mark.parametrize("kind", ["q8s/32:f32", "q4s/32:f16", "e4m3/32:f32", "u4/16:f16+bias:f16"])
def test_09_weight_given_as_in_out(kind: str, place: str) -> None:
    """9: a vector of length K and a weight of shape (K, N), K != N.

    Right: x @ W of length N, as the 1xK matrix gives; x @ W.T is refused, with both shapes named.
    """
    x, w = noise(64), noise(64, 96, seed=2)
    q = pq.quantize(put(w, place), kind)
    values = host(q.dequantize())
    y, row = put(x, place) @ q, put(x[None], place) @ q
    assert tuple(y.shape) == (96,)
    assert_product(row, x[None], values)
    np.testing.assert_allclose(host(y), host(row)[0], rtol=0, atol=float(bound(x, values).max()))
    for refused in (lambda: put(x, place) @ q.T, lambda: pq.linear(put(x[None], place), q)):
        with pytest.raises(ShapeMismatch, match=r"64.*96|96.*64"):
            refused()


@everywhere
@pytest.mark.parametrize("kind", ["q4s/32:f16", "q2s/32:f32", "q4s/row:f32", "e2m1/32:ue8m0"])
def test_10_reshape_of_sub_byte_values(kind: str, place: str) -> None:
    """10: 32x64 of 4- and 2-bit values reshaped to 4x8x64, which keeps the packed rows.

    Right: the very tensor that the reshaped source quantizes to, and no byte of it is copied.
    """
    x = noise(32, 64)
    flat, cube = (pq.quantize(put(a, place), kind) for a in (x, x.reshape(4, 8, 64)))
    got = flat.reshape((4, 8, 64))
    assert got.scheme == flat.scheme
    assert_same_parts(got, cube)
    assert_view(got, host(flat.dequantize()).reshape(4, 8, 64))
    assert_view(got.reshape((32, 64)), host(flat.dequantize()))
    if place == "numpy":
        assert np.shares_memory(got.data, flat.data)


#: From, and to: rows kept, merged, cut at blocks' edges and within blocks, flat, and odd ones.
RESHAPES = (
    ((32, 64), (4, 8, 64)),
    ((32, 64), (32, 2, 32)),
    ((32, 64), (64, 32)),
    ((32, 64), (2048,)),
    ((32, 64), (8, 256)),
    ((2, 32), (4, 16)),
    ((2, 32), (2, 32, 1)),
    ((2, 32), (1, 2, 1, 32)),
    ((4, 32), (2, 64)),
    ((2, 48), (3, 32)),
    ((96,), (2, 48)),
    ((3, 32), (32, 3)),
    ((5, 7), (7, 5)),
    ((5, 7), (35, 1)),
    ((2, 3, 30), (6, 5, 6)),
    ((2, 3, 30), (4, 45)),
)


@every_kind
@everywhere
def test_10_any_reshape(kind: str, place: str) -> None:
    """10: rows of 32 in blocks of 32 cut to rows of 16, and every other reshape.

    The list asks for a refusal where a row's end cuts a block. Here it is exact instead: the blocks
    become as small as the cut needs, each with the scale of the block that it came from. So every
    reshape is reshape(dequantize(q)), to the bit, and there and back again too.
    """
    rank = len(pq.scheme(kind).block or ())
    for before, after in RESHAPES:
        if len(before) < rank:
            continue
        q = pq.quantize(put(noise(*before), place), kind)
        values = host(q.dequantize())
        got = q.reshape(after)
        assert_view(got, values.reshape(after), f"{before} to {after}")
        assert_view(got.reshape(before), values, f"{before} to {after} and back")
        turned = q.permute(tuple(reversed(range(q.ndim))))
        assert_view(turned.reshape(after), values.T.reshape(after), f"{before}, turned, to {after}")


@everywhere
def test_10_as_met(place: str) -> None:
    """10: rows of 32, a block each, cut to rows of 16.

    Right: the codes as they were, and no scale that was not there.
    """
    q = pq.quantize(put(noise(2, 32), place), "q4s/32:f32")
    got = q.reshape((4, 16))
    assert got.scheme.block_extents(got.shape) in ((1, 16), (2, 16))
    assert set(host(got.scales).reshape(-1)) == set(host(q.scales).reshape(-1))
    assert_same_bits(host(got.codes()), host(q.codes()).reshape(4, 16))
