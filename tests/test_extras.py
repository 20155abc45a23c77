"""What schemes of files add: roles of scales, views, group maps, biases beside a table."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import host
from polyquant import errors
from polyquant.files.assemble import assemble, numbers_of

Host = np.ndarray[Any, Any]


def grouped(text: str = "u4/32:f16-zero:u4~grouped", seed: int = 0) -> tuple[pq.QTensor, Host]:
    """A grouped tensor of 6 x 128, and its values by a plain loop over the columns."""
    rng = np.random.default_rng(seed)
    scheme = pq.scheme(text)
    groups = (rng.permutation(128) // 32).astype(np.int32)
    codes = rng.integers(0, 16, (6, 128)).astype(np.uint8)
    scales = rng.normal(size=(6, 4)).astype(np.float16)
    numbers = {"codes": codes, "scales": scales, "groups": groups}
    offsets = None
    if scheme.offset is not None:
        offsets = rng.integers(0, 16, (6, 4)).astype(np.uint8)
        numbers["offsets"] = offsets
    q = assemble(scheme, (6, 128), numbers)
    values = np.zeros((6, 128), np.float32)
    for j in range(128):
        zero = offsets[:, groups[j]].astype(np.float32) if offsets is not None else 0
        number = codes[:, j].astype(np.float32)
        if offsets is None:
            number = np.where(codes[:, j] > 7, number - 16, number)
        values[:, j] = (number - zero) * scales[:, groups[j]].astype(np.float32)
    return q, values


@pytest.mark.parametrize("text", ["u4/32:f16-zero:u4~grouped", "q4f/32:f16~grouped"])
def test_grouped_values_on_every_library(text: str, device: str) -> None:
    q, values = grouped(text)
    there = q.to(device)
    np.testing.assert_array_equal(host(there.dequantize()), values)
    assert there.to("numpy").to_data() == q.to_data()
    assert pq.from_data(q.to_data(), device).to_data() == q.to_data()
    assert not q.scheme.is_plain


VIEWS = {
    "turned": lambda a: a.T,
    "rows": lambda a: a[2:5],
    "columns": lambda a: a[:, ::3],
    "a column": lambda a: a[:, 5],
    "other rows": lambda a: a.reshape((2, 3, 128)),
    "other lines": lambda a: a.reshape((3, 256)),
    "turned rows": lambda a: a.T[3:9],
    "a new axis": lambda a: a[..., None],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_grouped_tensors_are_exact(view: str) -> None:
    q, values = grouped()
    np.testing.assert_array_equal(VIEWS[view](q).dequantize(), VIEWS[view](values))


def test_grouped_tensors_joined_saved_and_pickled(tmp_path: Any) -> None:
    (q, a), (other, b) = grouped(), grouped(seed=1)
    np.testing.assert_array_equal(pq.concat([q, other]).dequantize(), np.concatenate([a, b]))
    assert pickle.loads(pickle.dumps(q)).to_data() == q.to_data()
    pq.save(tmp_path / "x.safetensors", {"q": q, "t": q.T})
    found = pq.load(tmp_path / "x.safetensors")
    assert found["q"].to_data() == q.to_data() and found["t"].to_data() == q.T.to_data()
    x = np.random.default_rng(2).normal(size=(3, 128)).astype(np.float32)
    np.testing.assert_allclose(x @ q.T, x @ a.T, rtol=1e-5, atol=1e-4)


def test_numbers_and_back() -> None:
    q, _ = grouped()
    again = assemble(q.scheme, q.shape, numbers_of(q))
    assert again.to_data() == q.to_data()


def test_maps_that_cannot_be() -> None:
    q, _ = grouped()
    numbers = numbers_of(q)
    with pytest.raises(errors.InvalidTensor, match="groups"):
        assemble(q.scheme, q.shape, numbers | {"groups": numbers["groups"].astype(np.int32)[:5]})
    made = assemble(q.scheme, q.shape, numbers | {"groups": np.full(128, 4, np.int32)})
    with pytest.raises(errors.CorruptData, match="no group"):
        pq.from_data(made.to_data())
    with pytest.raises(errors.CalibrationRefused, match="which element"):
        pq.quantize(np.ones((4, 64), np.float32), q.scheme)
    for change in ({"block": None}, {"view": -1}, {"scale": pq.QuantScheme("u8", scale="f32")}):
        with pytest.raises(errors.InvalidScheme):
            q.scheme._with(**change)
    with pytest.raises(errors.InvalidArgument, match="grouped"):
        pq.QuantScheme(grouped=1)  # type: ignore[arg-type]


# -- roles ------------------------------------------------------------------------------------


def test_a_stored_number_acts_as_its_role_says() -> None:
    one = np.asarray([[3.0]], np.float32)
    q = assemble(
        pq.scheme("q8s/row:absmax.f32"), (1, 2), {"codes": np.uint8([127, 64]), "scales": one}
    )
    by_hand = np.float32([127, 64]) * np.float32(3) * (np.float32(1) / np.float32(127))
    np.testing.assert_array_equal(q.dequantize()[0], by_hand)
    q = assemble(
        pq.scheme("q8s/row:divisor.f32"), (1, 2), {"codes": np.uint8([127, 64]), "scales": one}
    )
    by_hand = np.float32([127, 64]) * (np.float32(1) / np.float32(3))
    np.testing.assert_array_equal(q.dequantize()[0], by_hand)
    two = pq.scheme("e2m1/16:ue4m3/tensor:divisor.f32")
    numbers = {"codes": np.uint8([7] * 16), "scales": np.uint8([[0x38]]), "tensor_scale": one}
    q = assemble(two, (1, 16), numbers)
    assert q.dequantize()[0, 0] == np.float32(6) * (np.float32(1) / np.float32(3))
    q = assemble(two.with_role("absmax"), (1, 16), numbers)
    assert q.dequantize()[0, 0] == np.float32(6) * (np.float32(3) / np.float32(2688))


def test_kernels_decline_what_they_do_not_know() -> None:
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    q = pq.quantize(x, "q8s/row:absmax.f32")
    found = pq.explain("matmul", x, q.T)
    assert "definition.matmul" in str(found)
    np.testing.assert_allclose(x @ q.T, x @ q.dequantize().T, rtol=1e-5, atol=1e-5)


# -- the plain form ---------------------------------------------------------------------------

PLAIN = {
    "u4[nf4]/64:f32~flat": "u4[nf4]/16:f32",
    "u4/*x1:f16-zero:f16~16x*": None,
    "q8s/row:divisor.f32": "q8s/row:f32",
    "q2s/tensor:divisor.bf16": "q2s/tensor:f32",
    "e2m1/16:ue4m3/tensor:divisor.f32": "e2m1/16:f32",
    "e2m1/16:ue4m3/tensor:absmax.f32": "e2m1/16:ue4m3/tensor:f32",
    "u4[nf4]/16:(u8[dynamic8]/8:f32+bias:f32)": "u4[nf4]/16:f32",
    "q4s/32:f16": "q4s/32:f16",
}


@pytest.mark.parametrize("text", PLAIN)
def test_the_plain_form_is_the_same_numbers(text: str, device: str) -> None:
    x = np.random.default_rng(0).normal(size=(8, 48)).astype(np.float32)
    q = pq.quantize(x, text).to(device).T
    made = q.canonical()
    assert made.scheme.is_plain and (PLAIN[text] is None or str(made.scheme) == PLAIN[text])
    np.testing.assert_array_equal(host(made.dequantize()), host(q.dequantize()))
    assert pq.ops.canonical(made) is made


def test_the_plain_form_of_a_grouped_tensor() -> None:
    q, values = grouped()
    assert str(q.canonical().scheme) == "u4/1:f16-zero:u4"
    np.testing.assert_array_equal(q.canonical().dequantize(), values)


@pytest.mark.parametrize("text", ["q8s/row:absmax.f32", "u4[nf4]/16:f32+bias:f32"])
def test_what_has_no_plain_form(text: str) -> None:
    q = pq.quantize(np.random.default_rng(0).normal(size=(8, 48)).astype(np.float32), text)
    with pytest.raises(errors.LayoutRefused, match="no plain scheme rounds"):
        q.canonical()


# -- views ------------------------------------------------------------------------------------


def test_blocks_that_run_on_across_rows() -> None:
    x = np.random.default_rng(0).normal(size=(33, 50)).astype(np.float32)
    q = pq.quantize(x, "u4[nf4]/64:f32~flat")
    flat = pq.quantize(x.reshape(-1), "u4[nf4]/64:f32")
    np.testing.assert_array_equal(q.dequantize().reshape(-1), flat.dequantize())
    assert q.to_data().bytes == flat.to_data().bytes
    assert q.codes().shape == (33, 50)
    row = q[7]
    np.testing.assert_array_equal(row.dequantize(), q.dequantize()[7])
    assert row.scheme.view is None and row.scheme.block == (2,)


def test_a_view_that_does_not_fit() -> None:
    with pytest.raises(errors.ShapeMismatch, match="does not divide"):
        pq.quantize(np.ones((3, 7), np.float32), "u4/*x1:f16-zero:f16~64x*")
