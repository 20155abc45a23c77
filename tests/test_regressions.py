"""Faults that were found by attack: each test is the smallest input that showed one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import needs, put
from polyquant.errors import (
    AlreadyQuantized,
    InvalidArgument,
    NegativeInput,
    NotFloat,
    ShapeMismatch,
    TensorNotFound,
    UnknownName,
    UnsupportedArray,
    UnsupportedFunction,
)

TINY = 2.0**-126


# -- values -----------------------------------------------------------------------------------


def test_the_zero_point_of_the_smallest_scale(device: str) -> None:
    # The scale is 2^-127, a subnormal float32: -min / scale is 254 by exact exponent arithmetic.
    x = np.asarray([-127 * TINY, 0, TINY / 2, -TINY], np.float32)
    q = pq.quantize(put(x, device), "u8/4:ue8m0-zero:u8").to("numpy")
    assert q.scales.tolist() == [0]
    assert q.offsets.tolist() == [254]
    assert q.codes().tolist() == [0, 254, 254, 252]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_codes_without_a_sign_take_zeros_and_subnormals(dtype: str, device: str) -> None:
    x = np.asarray([0.0, -0.0, -1e-40, 1.0], dtype)
    for scheme in ("u4/4:f32", "u8[dynamic8u]/4:f32"):
        q = pq.quantize(put(x, device), scheme).to("numpy")
        assert q.dequantize().tolist() == [0, 0, 0, 1]


def test_a_table_without_negative_entries_refuses_negative_numbers(device: str) -> None:
    x = put(np.asarray([0.5, -1.0], np.float32), device)
    with pytest.raises(NegativeInput, match=r"first at index \(1,\).*'q8s/2:f32'"):
        pq.quantize(x, "u8[dynamic8u]/2:f32")
    with pytest.raises(NegativeInput):
        pq.quantize(x, "u2[custom]/2:f32", table=[0, 1, 2, 3])
    pq.quantize(x, "u2[custom]/2:f32", table=[0, 1, 2, -3])


def test_a_negative_scale_makes_a_table_without_negative_entries_hold_them() -> None:
    x = np.asarray([-1.0, -3.0], np.float32)
    q = pq.quantize(x, "u2[custom]/2:f32", table=[0, 1, 2, 3], calibration="signed_max")
    assert q.dequantize().tolist() == [-1, -3]


# -- under jax.jit ----------------------------------------------------------------------------


@needs("jax")
def test_weights_that_a_jitted_function_closes_over() -> None:
    # What is computed of known arrays inside jit cannot be looked at either.
    import jax

    w, scheme = jax.numpy.linspace(-1.0, 1.0, 32).reshape(4, 8), "q8s/8:ue8m0"
    q = pq.quantize(w, scheme)
    inside, outside = jax.jit(lambda: (pq.quantize(w, scheme).dequantize(), q.dequantize()))()
    assert inside.tolist() == outside.tolist() == q.dequantize().tolist()


# -- arrays without plain values --------------------------------------------------------------

W = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
Q = pq.quantize(W, "q4s/8:f16")


def test_a_mask_is_never_lost() -> None:
    masked = np.ma.masked_less(W, 0)
    uses: list[Callable[[], object]] = [
        lambda: pq.quantize(masked, "q4s/8:f16"),
        lambda: pq.quantize(W, "q4s/8:f16", scales=masked[:, :1]),
        lambda: pq.quantize(W, "u3[custom]/8:f16", table=masked[0]),
        lambda: pq.quantize_tree({"w": masked}, "q4s/8:f16"),
        lambda: masked @ Q.T,
        lambda: pq.linear(W, Q, masked[0, :2]),
        lambda: pq.measure(masked, Q),
        lambda: pq.save("unused.safetensors", {"w": masked}),
    ]
    for use in uses:
        with pytest.raises(UnsupportedArray, match="whose mask would be lost"):
            use()


@needs("torch")
def test_torch_tensors_that_are_no_plain_arrays() -> None:
    import torch

    dense = torch.ones(2, 8)
    for array in (
        dense.to_sparse(),
        dense.to_mkldnn(),
        torch.nested.nested_tensor([dense], layout=torch.jagged),
    ):
        with pytest.raises(UnsupportedArray, match="Convert it first"):
            pq.quantize(array, "q4s/8:f16")
        with pytest.raises(UnsupportedArray, match="Convert it first"):
            pq.matmul(array, Q.to("torch:cpu").T)


@needs("torch")
def test_a_tensor_without_values_is_not_read() -> None:
    import torch

    x = torch.ones(2, 8, device="meta")
    q = pq.quantize(x, "q4s/8:f16")
    uses: list[Callable[[], object]] = [
        lambda: q.to("torch:cpu"),
        lambda: q.to("numpy"),
        q.to_data,
        lambda: pq.measure(x, q),
        lambda: pq.save("unused.safetensors", {"q": q}),
    ]
    for use in uses:
        with pytest.raises(UnsupportedArray, match="meta device"):
            use()


@needs("jax")
def test_a_tracer_is_not_read() -> None:
    import jax

    uses: list[Callable[[pq.QTensor], object]] = [
        lambda q: q.to("numpy"),
        lambda q: q.to_data(),
        lambda q: np.asarray(q),
        lambda q: pq.measure(q.dequantize(), q),
    ]
    for use in uses:
        with pytest.raises(UnsupportedArray, match=r"as under jax\.jit"):
            jax.jit(lambda x, use=use: use(pq.quantize(x, "q4s/8:f16")))(W)


@needs("torch")
def test_views_that_torch_negates_or_conjugates_later() -> None:
    import torch

    x = torch.conj(torch.full((2, 8), 1 + 2j)).imag
    assert x.is_neg()
    assert pq.quantize(x, "q4s/8:f16", calibration="mse").dequantize()[0, 0] < -1
    assert pq.measure(x, pq.quantize(x, "q4s/8:f32")).max_error < 1e-6


# -- the libraries' functions -----------------------------------------------------------------


def test_dot_is_matmul_only_where_numpy_says_so() -> None:
    a, b = np.ones((2, 3, 8), np.float32), pq.quantize(np.ones((2, 8, 5), np.float32), "q4s/5:f16")
    assert np.dot(a, Q.T).shape == (2, 3, 2)
    assert np.dot(W[0], Q.T).shape == (2,)
    with pytest.raises(ShapeMismatch, match=r"numpy\.dot .* right operand has 1 or 2 axes"):
        np.dot(a, b)  # would be of shape (2, 3, 2, 5), and matmul gives (2, 3, 5)


@needs("torch")
def test_torchs_products_keep_their_ranks_and_names() -> None:
    import torch

    q, x = Q.to("torch:cpu"), torch.ones(3, 8)
    assert torch.mm(x, mat2=q.T).shape == (3, 2)
    assert torch.mv(q, vec=x[0]).shape == (2,)
    assert torch.matmul(x, q.T, out=None).shape == (3, 2)
    for product, left in ((torch.mm, x[None]), (torch.mv, x), (torch.bmm, x)):
        with pytest.raises(ShapeMismatch, match=f"torch.*{product.__name__} cannot"):
            product(left, q.T)
    with pytest.raises(UnsupportedFunction, match=r"torch\.matmul with out= has no form"):
        torch.matmul(x, q.T, out=torch.empty(3, 2))


def test_a_conversion_without_a_copy_is_refused() -> None:
    with pytest.raises(ValueError, match="copy must be True or None"):
        np.asarray(Q, copy=False)
    assert np.array(Q, copy=True).shape == (2, 8)


# -- measure, and arguments at the door -------------------------------------------------------


def test_measure_takes_a_float_array_and_a_tensor() -> None:
    with pytest.raises(AlreadyQuantized, match="x must be a float array"):
        pq.measure(Q, Q)
    with pytest.raises(InvalidArgument, match="q must be a QTensor"):
        pq.measure(W, W)  # type: ignore[arg-type]
    for other in (W.astype(np.complex64), W > 0, W.astype(np.int32)):
        with pytest.raises(NotFloat):
            pq.measure(other, Q)


def test_measure_of_what_is_not_finite_is_not_finite() -> None:
    quality = pq.measure(np.full_like(W, np.nan), Q)
    assert np.isnan([quality.relative_error, quality.sqnr_db, quality.max_error]).all()


def test_a_calibration_beside_scales_is_not_ignored() -> None:
    for calibration in ("mse", "bogus", ["minmax"]):
        with pytest.raises(InvalidArgument, match="calibration must be 'minmax', or 'signed_max'"):
            pq.quantize(W, "q4s/8:f16", scales=[[1], [1]], calibration=calibration)  # type: ignore[arg-type]


def test_arguments_of_files_that_are_of_another_type(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for metadata in (3, 0, "ab", [("a", "b")]):
        with pytest.raises(InvalidArgument, match="metadata must be a mapping"):
            pq.save(path, {"w": W}, metadata=metadata)  # type: ignore[arg-type]
    pq.save(path, {"w": W})
    with pytest.raises(UnknownName):
        pq.open_checkpoint(path, format=["npz"])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="path must be"):
        pq.open_checkpoint("")
    with pq.open_checkpoint(path) as checkpoint:
        with pytest.raises(TensorNotFound):
            checkpoint[["w"]]  # type: ignore[index]
        assert ["w"] not in checkpoint
        assert checkpoint == checkpoint
        assert hash(checkpoint)


@pytest.mark.parametrize("columns", ["1", "20", "59"])
def test_a_narrow_terminal_keeps_the_names(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyquant.cli import output

    monkeypatch.setenv("COLUMNS", columns)
    rows = output.table(["Tensor", "Kind"], ["Size", "Bits"])
    rows.add_row(output.Name("model.layer.0.weight"), "q4s/32:f16", "2.37 kB", "4.62")
    console = output.out()
    with console.capture() as shown:
        console.print(rows)
    assert "weight" in shown.get()
    assert "q4s/32:f16" in shown.get()


@pytest.mark.parametrize("product", [pq.matmul, pq.linear])
def test_a_remembered_product_does_not_let_others_through(product: Any) -> None:
    """A plan is remembered by class, dtype, shape, device and layout, and serves no others."""
    weight = np.ones((4, 4), np.float32)
    q = pq.quantize(weight, "int8")
    assert (product(weight, q) == 4).all()
    with pytest.raises(pq.errors.UnsupportedArray):
        product(np.ma.masked_array(weight, weight > 0), q)
    with pytest.raises(pq.errors.NotFloat):
        product(weight.astype(np.int32), q)
    with pytest.raises(pq.errors.ShapeMismatch):
        product(weight[:, :3], q)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    there = q.to("torch:cpu")
    assert bool((torch.ones(4, 4) @ there == 4).all())
    with pytest.raises(pq.errors.UnsupportedArray):
        product(torch.ones(4, 4).to_sparse(), there)
    with pytest.raises(pq.errors.BackendMismatch):
        product(weight, there)


def test_a_remembered_linear_does_not_let_another_bias_through() -> None:
    x, q = np.ones((4, 4), np.float32), pq.quantize(np.ones((4, 4), np.float32), "int8")
    bias = np.full(4, 0.5, np.float32)
    for _ in range(2):
        assert (pq.linear(x, q) == 4).all()
        assert (pq.linear(x, q, bias) == 4.5).all()
        rounded = pq.linear(x, q, bias.astype(np.float16))
        assert rounded.dtype == np.float32 and (rounded == 4.5).all()
        narrow = pq.linear(x.astype(np.float16), q, bias)
        assert narrow.dtype == np.float16 and (narrow == 4.5).all()
        assert (pq.linear(x, q, bias, activations="int8") == 4.5).all()
        with pytest.raises(pq.errors.ShapeMismatch):
            pq.linear(x, q, bias[:3])
        with pytest.raises(pq.errors.NotFloat):
            pq.linear(x, q, bias.astype(np.int32))
        with pytest.raises(pq.errors.UnknownScheme):
            pq.linear(x, q, activations="int9")


def test_the_transposed_view_is_kept_and_is_no_part_of_a_copy() -> None:
    q = pq.quantize(np.ones((2, 64), np.float32), "q4s")
    assert q.mT is q.mT
    assert q.mT.shape == (64, 2) and q.mT.mT.axes == q.axes
    again = pickle.loads(pickle.dumps(q))
    assert again.to_data() == q.to_data() and again.mT.data is again.data


def test_a_host_form_without_axes_is_in_order() -> None:
    data = pq.quantize(np.ones((2, 64), np.float32), "nf4").to_data()
    again = pq.TensorData(data.bytes, (2, 64), data.scheme)
    assert again == data and again.axes == (0, 1)
    assert pq.from_data(again).to_data() == data
    assert not any(part.flags.writeable for part in data.parts().values())
