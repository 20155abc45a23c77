"""Products by compiled kernels: within a fifth of the contract's bound, whatever the operands."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import needs
from native_cases import (
    BFLOAT16,
    FEW,
    SCHEMES,
    check_product,
    floats,
    nasty_weight,
    quantized,
    values,
    weight,
)
from polyquant.backends.native import kernels, products
from polyquant.backends.native.compiled import compiled
from polyquant.backends.native.weights import matrix_of, plain
from polyquant.qtensor import from_parts
from polyquant.tables import named_table

KERNEL = "native.matmul"
KINDS = (np.float32, np.float16, BFLOAT16)


def check(x: Any, q: pq.QTensor, where: str = "") -> np.ndarray[Any, Any]:
    y: np.ndarray[Any, Any] = pq.matmul(x, q, kernel=KERNEL)
    check_product(y, x, q, f"{q.scheme} {x.shape} @ {q.shape} {where}")
    return y


def both_orders(text: str, n: int, k: int) -> tuple[pq.QTensor, pq.QTensor]:
    """A (k, n) weight stored by lines along k, and by lines along n."""
    return weight(text, (n, k)).mT, weight(text, (k, n))


# -- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SCHEMES)
def test_every_scheme(target: str, text: str) -> None:
    for (n, k), m in product(((33, 70), (70, 256), (5, 600), (600, 40)), (1, 3, 20)):
        for q in both_orders(text, n, k):
            check(floats((m, k)), q)


@pytest.mark.parametrize("text", FEW)
def test_every_number_of_rows(target: str, text: str) -> None:
    for q in both_orders(text, 37, 96):
        x = floats((70, 96))
        for m in range(1, 71):
            check(x[:m], q)


@pytest.mark.parametrize("text", FEW)
def test_every_width_and_depth(target: str, text: str) -> None:
    for extent in range(1, 71):
        for q in (*both_orders(text, extent, 40), *both_orders(text, 9, extent)):
            for m in (1, 2, 9):
                check(floats((m, q.shape[0])), q)


@pytest.mark.parametrize("m", [1, 4, 30, 600])
def test_extents_around_what_is_held_at_once(target: str, m: int) -> None:
    """Segments of 512, panels of 96 lines and 256 of k, 512 columns, 512 rows."""
    for n, k in ((97, 257), (1, 1025), (513, 31), (192, 512)):
        for q in both_orders("q4s", n, k):
            check(floats((m, k)), q)


def test_a_line_of_more_scales_than_are_held_at_once(target: str) -> None:
    for text in ("q4s/16:f16", "q8s/8:f32"):
        for q in both_orders(text, 2, 16 * 2048 + 48):
            check(floats((2, q.shape[0])), q)


def test_nothing(target: str) -> None:
    for text in FEW:
        for m, n, k in ((0, 5, 64), (3, 0, 64), (3, 5, 0), (1, 5, 0), (0, 0, 0)):
            for q in (quantized(floats((n, k)), text).mT, quantized(floats((k, n)), text)):
                y = pq.matmul(np.ones((m, k), np.float32), q)
                np.testing.assert_array_equal(y, np.zeros((m, n), np.float32))


def test_nothing_called_directly(target: str) -> None:
    """What has no elements has no table either."""
    for text in FEW:
        for m, n, k in ((0, 5, 64), (3, 0, 64), (3, 5, 0), (1, 5, 0), (30, 5, 0)):
            q = quantized(floats((n, k)), text).mT
            y = products.matmul(np.ones((m, k), np.float32), q, np.float32)
            np.testing.assert_array_equal(y, np.zeros((m, n), np.float32))


# -- shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 40), (2, 40, 5)),
        ((1, 3, 40), (4, 40, 5)),
        ((3, 40), (4, 40, 5)),
        ((2, 1, 3, 40), (3, 40, 5)),
        ((2, 3, 40), (40, 5)),
        ((40,), (4, 40, 5)),
        ((40,), (40, 5)),
        ((0, 3, 40), (1, 40, 5)),
    ],
)
def test_batches_and_vectors(target: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    for text in ("q4s", "q5s/7:f16", "nf4"):
        check(floats(a), weight(text, b))
        check(floats(a), weight(text, (*b[:-2], b[-1], b[-2])).mT)


def test_a_quantized_left_operand(target: str) -> None:
    for q in both_orders("q4s", 33, 70):
        for shape in ((33, 6), (33,), (2, 33, 6)):
            x = floats(shape)
            y = pq.matmul(q, x, kernel=KERNEL)
            turned = x if x.ndim == 1 else x.swapaxes(-1, -2)
            got = y if x.ndim == 1 else y.swapaxes(-1, -2)
            check_product(got, turned, q.mT, f"q @ {shape}")


def test_both_quantized(target: str) -> None:
    left, right = weight("q8s-32", (7, 70)), weight("nf4", (70, 33))
    check_product(pq.matmul(left, right, kernel=KERNEL), left.dequantize(), right)


# -- products of integer codes ----------------------------------------------------------------

OF_CODES = 0.5  # of the bound: the values of both operands are rounded besides
LEFT = ("q8s/32:f32", "q8f-row", "q8s/64:f16", "q4s", "q3s/96:f32", "q8s-tensor", "q4s@native")
RIGHT = (
    *("q4s", "nf4", "mxfp4", "iq4_nl", "q8s-32", "q2s-32", "q3s/32:f16", "u4/64:f16-zero:u4"),
    *("q5s/*:f32", "q6s/64:bf16", "ternary", "u2/32:f16-zero:u2", "q4s-tensor", "q8s/96:f32"),
    *("u4[af4]/128:f16", "u4[nf4]/32:bf16@native", "fp4"),
)


@pytest.mark.parametrize("text", RIGHT)
def test_products_of_codes(target: str, text: str) -> None:
    for left, m in product(LEFT, (1, 2, 3, 4, 7, 12, 17, 40)):
        for n, k in ((37, 96), (5, 65), (100, 300), (1, 1)):
            a, q = weight(left, (m, k)), weight(text, (n, k)).mT
            check_product(pq.matmul(a, q), values(a), q, f"{left} {text} {(m, n, k)}", OF_CODES)


@pytest.mark.parametrize("text", ["q4s", "q8s-32", "iq4_nl", "nf4", "u4/64:f16-zero:u4"])
def test_products_of_codes_of_every_extent(target: str, text: str) -> None:
    for extent in range(1, 71):
        extents = (extent, 9, 64), (3, extent, 64), (3, 9, extent), (20, 9, extent)
        for m, n, k in (*extents, (13, extent, 3 * extent)):
            a, q = weight("q8s-32", (m, k)), weight(text, (n, k)).mT
            check_product(pq.matmul(a, q), values(a), q, f"{text} {(m, n, k)}", OF_CODES)


@pytest.mark.parametrize("text", ["iq4_nl", "mxfp4", "q4s"])
def test_products_of_one_code_are_exact(target: str, text: str) -> None:
    """One code of x by one of a weight, whose scales are powers of two, is the weight's value."""
    shape = pq.scheme(text).scale_shape((16, 64))
    q = pq.quantize(floats((16, 64)), text, scales=np.ones(shape, np.float32))
    one = pq.quantize(np.eye(4, 64, dtype=np.float32), "q8s/32:f32", scales=np.ones((4, 2), "f4"))
    np.testing.assert_array_equal(pq.matmul(one, q.mT), q.dequantize()[:, :4].T)


@pytest.mark.parametrize("table", ["nf4", "af4", "fp4"])
def test_lines_of_one_code(target: str, table: str) -> None:
    """Entries in two or three bytes: a line of one code is as far off as that entry."""
    entries = named_table(table)
    for k in (1, 64, 1824, 2048, 4096, 8192):
        lines = np.repeat(entries[:, None], k, axis=1)
        q = pq.quantize(lines, f"u4[{table}]/*:f32", scales=np.ones((16, 1), np.float32)).mT
        for m in (1, 3, 10, 20):
            a = weight("q8s/32:f32", (m, k))
            check_product(pq.matmul(a, q), values(a), q, f"{table} {(m, k)}", OF_CODES)


def test_lines_that_share_their_bytes(target: str) -> None:
    q = weight("q4s", (1, 64))
    parts = {"data": np.broadcast_to(q.data, (5, 32)), "scales": np.repeat(q.scales, 5, axis=0)}
    shared = from_parts(parts, q.scheme, (5, 64), device="numpy").mT
    assert shared.data.strides[0] == 0
    for m in (1, 3, 20):
        a = weight("q8s-32", (m, 64))
        check_product(pq.matmul(a, shared), values(a), shared, part=OF_CODES)
        check(floats((m, 64)), shared)


def test_codes_with_scales_of_every_size(target: str) -> None:
    """Scales that are huge, zero or 2^-127 are left to float32."""
    for left, right in product(
        ("q8s/32:f16", "q8s/32:ue8m0"), ("q4s", "q4s/32:ue8m0", "q8s-32", "u4[nf4]/32:ue8m0")
    ):
        for m in (1, 4, 20):
            a, q = nasty_weight(left, (m, 130)), nasty_weight(right, (19, 130)).mT
            if "ue8m0" not in right and left != "q8s/32:ue8m0":
                check_product(pq.matmul(a, q), values(a), q, f"{left} {right} {m}", OF_CODES)
                continue
            with np.errstate(all="ignore"):
                y, wanted = pq.matmul(a, q), values(a).astype(np.float64) @ values(q)
            fits = np.abs(values(a).astype(np.float64)) @ np.abs(values(q)) < 1e38
            assert np.isfinite(y[fits]).all() and np.isfinite(wanted[fits]).all()


ROUNDED = ("q8s/32:f32", "q8s/row:f32", "q8f/64:f32", "q5s/96:f32@native", "q4s/row:f32")


@pytest.mark.parametrize(
    "text", ["q4s", "nf4", "mxfp4", "q8s-32", "u4/64:f16-zero:u4", "q6s/64:f32"]
)
def test_floats_that_a_product_of_codes_quantizes(target: str, text: str) -> None:
    """Bit for bit the product of what quantize gives, whatever lies between the numbers of x."""
    (entry,) = (kernel for kernel in kernels.KERNELS if kernel.rounds is not None)
    for left, m, k, kind in product(ROUNDED, (1, 3, 4, 21), (64, 300), KINDS):
        q, x = weight(text, (37, k)).mT, floats((2 * m, k), kind=kind)
        for rows in (x[:m], x[::2], x[::-2], np.asfortranarray(x)[:m], x.reshape(2, m, k)):
            wanted = pq.matmul(pq.quantize(rows, left), q, out_dtype=kind)
            np.testing.assert_array_equal(pq.linear(rows, q.mT, activations=left), wanted)
            y = entry.rounds(rows, pq.scheme(left), q, rows.dtype)
            uses_codes = target == "avx512" or (m <= 4 and text != "nf4")
            assert y is not None or not uses_codes
            if y is not None:
                np.testing.assert_array_equal(y, wanted)


def test_floats_that_no_product_of_codes_quantizes(target: str) -> None:
    """What is no number is refused as by quantize, and other schemes and dtypes go its way."""
    q = weight("q4s", (37, 64)).mT
    for bad in (np.nan, np.inf, -np.inf):
        x = floats((3, 64))
        pq.linear(x, q.mT, activations="q8s/32:f32")
        x[2, 63] = bad
        with pytest.raises(pq.errors.NonFiniteInput):
            pq.linear(x, q.mT, activations="q8s/32:f32")
    for x in (
        floats((0, 64)),
        floats((64,)),
        floats((3, 64)).astype(np.float64),
        floats((2, 0, 64)),
    ):
        for left in (
            "q8s/32:f32",
            "q8s/32:f16",
            "q8s/5:f32",
            "q8s/2x32:f32",
            "fp8-row",
            "q8s-tensor",
        ):
            if x.ndim == 2 or "2x" not in left:
                wanted = pq.matmul(pq.quantize(x, left), q, out_dtype=x.dtype)
                for _ in range(2):  # the second by what the first left
                    found = pq.linear(x, q.mT, activations=left)
                    np.testing.assert_array_equal(found, wanted, strict=True)


# -- activations ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_misalignment(target: str, kind: Any) -> None:
    for q, m in product(both_orders("q4s", 19, 83), (1, 4, 21)):
        x = floats((m, 83), kind=kind)
        wanted = check(x, q)
        for offset in range(1, 64):
            room = np.zeros(x.nbytes + 64, np.uint8)
            moved = room[offset : offset + x.nbytes].view(kind).reshape(x.shape)
            moved[...] = x
            np.testing.assert_array_equal(pq.matmul(moved, q, kernel=KERNEL), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_every_stride(target: str, kind: Any) -> None:
    for q, m in product(both_orders("nf4", 19, 83), (1, 4, 21)):
        wide = floats((3 * m, 3 * 83), kind=kind)
        read_only = wide[:m, :83].copy()
        read_only.flags.writeable = False
        for x in (
            *(wide[::3, ::3], wide[:m, :83], wide[m - 1 :: -1, :83], wide[:m, 82::-1]),
            *(wide[m - 1 :: -1, 82::-1], np.asfortranarray(wide[:m, :83]), wide[:83, :m].T),
            *(np.broadcast_to(wide[:1, :83], (m, 83)), np.broadcast_to(wide[:m, :1], (m, 83))),
            *(np.broadcast_to(wide[0, 0], (m, 83)), read_only),
        ):
            if x.shape == (m, 83):
                check(x, q, f"strides {x.strides}")


def test_foreign_byte_orders(target: str) -> None:
    for q, m in product(both_orders("q4s", 19, 83), (1, 21)):
        for kind in (np.float32, np.float16):
            x = floats((m, 83), kind=kind)
            swapped = x.astype(x.dtype.newbyteorder())
            np.testing.assert_array_equal(pq.matmul(swapped, q, kernel=KERNEL), check(x, q))


def test_values_that_are_no_numbers_stay_so(target: str) -> None:
    for q, m in product(both_orders("q4s", 19, 83), (1, 4, 21)):
        x = floats((m, 83))
        x[0, 5], x[-1, 80] = np.nan, np.inf
        with np.errstate(all="ignore"):
            y, wanted = pq.matmul(x, q, kernel=KERNEL), x @ q.dequantize()
        np.testing.assert_array_equal(np.isfinite(y), np.isfinite(wanted))


def test_the_widest_numbers_of_narrow_results(target: str) -> None:
    """float16 and bfloat16 round to nearest, to infinity beyond their range."""
    q = weight("q8s-32", (33, 70)).mT
    for kind, m in product((np.float16, BFLOAT16), (1, 20)):
        for size in (1e-7, 1e-5, 1e3, 1.5e4):
            x = (floats((m, 70)) * np.float32(size)).astype(kind)
            with np.errstate(all="ignore"):
                y = pq.matmul(x, q, kernel=KERNEL).astype(np.float32)
                exact = x.astype(np.float64) @ q.dequantize("float64")
                near = [(exact * by).astype(kind).astype(np.float32) for by in (0.9999, 1.0001)]
            low, high = np.minimum(*near), np.maximum(*near)
            assert ((low <= y) & (y <= high)).all()


def test_rows_of_the_output_may_lie_apart(target: str) -> None:
    for q, m in product(both_orders("q4s", 19, 83), (1, 4, 21)):
        x = floats((m, 83))
        for kind in KINDS:
            wide = np.full((m, 60), 7, kind)
            out, along_k = wide[:, 5:24], q.axes != (0, 1)
            lines = 19 if along_k else 83
            matrix_of(q).matmul(x, plain(out), along_k, 0, lines, 0)
            check_product(out, x, q)
            assert (wide[:, :5] == 7).all() and (wide[:, 24:] == 7).all()


# -- torch ------------------------------------------------------------------------------------


@needs("torch")
def test_torch_tensors_of_every_layout(target: str) -> None:
    import torch

    q = weight("q4s", (19, 83))
    there = q.to("torch:cpu")
    wide = torch.from_numpy(floats((50, 249)))
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        for m in (1, 4, 21):
            part = wide[:m, :83].to(kind)
            for x in (
                *(part, part.flip(1), wide.to(kind)[:m, ::3], wide[:m].to(kind).expand(m, 249)),
                *(part.T.contiguous().T, part[:, :1].expand(m, 83), part[:1].expand(m, 83)),
                *(torch.complex(wide, wide).conj().imag[:m, :83].to(kind), -part),
            ):
                if x.shape == (m, 83):
                    y = pq.matmul(x, there.mT, kernel=KERNEL)
                    rounded = np.float16 if kind == torch.float16 else np.float32
                    assert y.dtype == kind
                    host = y.float().numpy().astype(rounded)
                    if kind == torch.bfloat16:
                        host = host.astype(BFLOAT16)
                    check_product(host, x.float().resolve_neg().numpy(), q.mT)


@needs("torch")
def test_negated_views_of_torch_are_negated(target: str) -> None:
    import torch

    imaginary = torch.complex(torch.ones(3, 64), torch.ones(3, 64)).conj().imag
    assert imaginary.is_neg()
    q = weight("q4s", (5, 64)).to("torch:cpu")
    y = pq.matmul(imaginary, q.mT, kernel=KERNEL)
    torch.testing.assert_close(y, -torch.ones(3, 64) @ q.dequantize().T)


# -- more than 2^31 elements ------------------------------------------------------------------

FAR = 2**27  # lines: of 32 bytes, 4 GiB of codes


@pytest.fixture
def sparse(tmp_path: Any) -> Any:
    """Makes arrays of zeros that take no memory where nobody writes."""

    def make(name: str, kind: Any, shape: tuple[int, ...]) -> Any:
        return np.memmap(tmp_path / name, kind, "w+", shape=shape)

    return make


@pytest.mark.parametrize("block", [2, 32])
def test_lines_beyond_2_31_elements(target: str, sparse: Any, block: int) -> None:
    """The last lines of a weight of 2^33: codes, and with short blocks scales, beyond 2^31."""
    text = f"q4s/{block}:ue8m0"
    q = weight(text, (3, 64))
    data, scales = sparse("data", np.uint8, (FAR + 3, 32)), None
    scales = sparse("scales", np.uint8, (FAR + 3, 64 // block))
    data[FAR:], scales[FAR:] = q.data, q.scales
    far = _matrix(q, data, scales, (FAR + 3, 64))
    for m in (1, 4, 21):
        out = np.empty((m, 3), np.float32)
        far.matmul(floats((m, 64)), out, True, FAR, 3, 1)
        check_product(out, floats((m, 64)), q.mT)
        out = np.empty((m, 64), np.float32)
        far.matmul(floats((m, 3)), out, False, FAR, 3, 1)
        check_product(out, floats((m, 3)), q)


def _matrix(q: pq.QTensor, data: Any, scales: Any, shape: tuple[int, int]) -> Any:
    numbers = np.array([*range(8), *range(-8, 0)], np.float32)
    block = [1, q.shape[1] // q.scales.shape[1]]
    return compiled().Matrix(
        data=data,
        shape=shape,
        block=block,
        bits=4,
        value_bits=4,
        kind=0,
        is_signed=True,
        minifloat=(),
        table=numbers,
        scales=scales,
        scale_number=3,
        tensor_scale=None,
        offsets=None,
        offset_number=0,
        offset_kind=0,
    )


def test_activations_and_results_beyond_2_31_elements(target: str, sparse: Any) -> None:
    """Rows, or columns, that lie 2^31 elements apart."""
    apart = 2**31 + 24
    q = weight("q4s", (5, 3)).mT
    room, results = (sparse(name, np.float16, (3 * apart,)) for name in ("x", "y"))
    for x in (room.reshape(3, apart)[:, :3], room.reshape(3, apart)[:, :3].T):
        x[...] = floats((3, 3), kind=np.float16)
        y = results.reshape(3, apart)[:, :5]
        matrix_of(q).matmul(x, y, True, 0, 5, 1)
        check_product(np.array(y), np.array(x), q)
