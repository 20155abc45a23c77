"""The tensor: its invariants, its exact views, its forms, and memory shared between libraries."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyquant as pq
from devices import DEVICES, assert_same_bits, assert_same_parts, host, needs, put
from polyquant import errors
from polyquant.data import parts as stored_parts
from polyquant.qtensor import from_parts
from strategies import Case, cases, share

# Awkward values are too small for some scale types, and are meant to be.
pytestmark = pytest.mark.filterwarnings("ignore::polyquant.errors.DeadBlocksWarning")


def make(scheme: str = "q4s", shape: tuple[int, ...] = (3, 70), device: str = "numpy") -> Any:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    made = pq.scheme(scheme)
    table = np.linspace(-1, 1, 2**made.bits) if made.table == "custom" else None
    return pq.quantize(put(values, device), made, table=table)


# -- invariants -------------------------------------------------------------------------------

RICH = "u4/32:f16-zero:u4"
BROKEN: tuple[tuple[str, str, Any], ...] = (
    ("q4s", "data", lambda q: {"data": q.data.astype(np.int8)}),
    ("q4s", "data", lambda q: {"data": q.data[:, :-1]}),
    ("q4s", "data", lambda q: {"data": q.data.reshape(-1)}),
    ("q4s", "data", lambda q: {"data": q.data.tolist()}),
    ("q4s", "data", lambda q: {"data": None}),
    ("q4s", "scales", lambda q: {"scales": q.scales.astype(np.float32)}),
    ("q4s", "scales", lambda q: {"scales": q.scales[:, :-1]}),
    ("mxfp4", "scales", lambda q: {"scales": q.scales.astype(np.float32)}),
    ("nf4-double", "scales.data", lambda q: {"scales": q.scales.dequantize()}),
    ("nf4-double", "scales", lambda q: {"scales": make("u8[dynamic8]/1:f16", (3, 2))}),
    ("nf4-double", "scales", lambda q: {"scales": make("u8[dynamic8]/256:f32", (3, 2))}),
    ("nf4-double", "scales", lambda q: {"scales": q.scales.permute(1, 0).permute(0, 1)}),
    ("nvfp4", "tensor_scale", lambda q: {"tensor_scale": None}),
    ("nvfp4", "tensor_scale", lambda q: {"tensor_scale": q.tensor_scale.reshape(1)}),
    ("q4s", "tensor_scale", lambda q: {"tensor_scale": np.ones((), np.float32)}),
    (RICH, "offsets", lambda q: {"offsets": None}),
    (RICH, "offsets", lambda q: {"offsets": q.offsets.astype(np.float16)}),
    ("q4s", "offsets", lambda q: {"offsets": q.scales}),
    ("nf4", "table", lambda q: {"table": None}),
    ("nf4", "table", lambda q: {"table": q.table[:8]}),
    ("nf4", "table", lambda q: {"table": q.table.astype(np.float64)}),
    ("q4s", "table", lambda q: {"table": np.ones(16, np.float32)}),
)


def rebuilt(q: pq.QTensor, **changes: Any) -> pq.QTensor:
    names = (
        "scheme",
        "shape",
        "data",
        "scales",
        "tensor_scale",
        "offsets",
        "table",
        "axes",
        "device",
    )
    fields = {name: getattr(q, name) for name in names} | changes
    first = [fields.pop(name) for name in ("scheme", "shape", "data", "scales")]
    return pq.QTensor(*first, **fields)


@pytest.mark.parametrize(("scheme", "part", "change"), BROKEN)
def test_a_broken_invariant_names_the_part(scheme: str, part: str, change: Any) -> None:
    q = make(scheme)
    assert_same_parts(rebuilt(q), q)
    with pytest.raises(errors.InvalidTensor) as caught:
        rebuilt(q, **change(q))
    assert caught.value.facts["part"] == part
    assert str(q.scheme) in str(caught.value)


@pytest.mark.parametrize("axes", [(0,), (0, 0), (1, 2), (0, 1, 2)])
def test_axes_must_be_a_permutation(axes: tuple[int, ...]) -> None:
    with pytest.raises(errors.InvalidAxes):
        rebuilt(make(), axes=axes)


@needs("torch")
def test_parts_of_another_library_are_refused() -> None:
    q = make()
    with pytest.raises(errors.InvalidTensor, match="an array on numpy"):
        rebuilt(q, scales=put(q.scales, "torch:cpu"))


# -- facts ------------------------------------------------------------------------------------


def test_facts() -> None:
    q = make("q4s", (3, 70))
    assert (q.ndim, q.size, len(q), q.shape, q.device) == (2, 210, 3, (3, 70), "numpy")
    assert q.nbytes == 3 * 36 + 2 * 9  # nine words of eight codes a line, three f16 scales
    assert q.bits_per_element == pytest.approx(8 * 126 / 210)
    assert repr(q) == (
        "QTensor('q4s/32:f16', shape=(3, 70), device='numpy', 126 bytes, 4.80 bits/element)"
    )
    assert "axes=(1, 0)" in repr(q.T)
    assert make("q4s", (0, 8)).bits_per_element == 0.0


@settings(max_examples=share(0.2))
@given(case=cases(limit=500))
def test_sizes_are_those_of_the_parts(case: Case) -> None:
    q = pq.quantize(case.values, case.scheme, table=case.table)
    assert q.nbytes == sum(part.nbytes for part in q.parts().values())
    assert q.nbytes == len(q.to_data().bytes)
    assert [part.name for part in stored_parts(q.scheme, q.shape)] == list(q.parts())


def test_len_of_a_scalar() -> None:
    with pytest.raises(TypeError, match="without axes"):
        len(make("q8s-tensor", ()))


def test_codes_in_their_dtypes() -> None:
    assert make("q4s").codes().dtype == np.int8
    assert make("nf4").codes().dtype == make("e4m3").codes().dtype == np.uint8
    codes = pq.quantize(np.asarray([7, -7, 3, 0], np.float32), "q4s/4:f32").codes()
    np.testing.assert_array_equal(codes, [7, -7, 3, 0])


@pytest.mark.parametrize("name", ["scheme", "data", "shape", "anything"])
def test_immutable(name: str) -> None:
    q = make()
    with pytest.raises(errors.Immutable, match=name):
        setattr(q, name, None)
    with pytest.raises(errors.Immutable):
        delattr(q, name)


# -- views ------------------------------------------------------------------------------------


@settings(max_examples=share(0.3))
@given(case=cases(limit=500), data=st.data())
def test_permutations_are_exact_views(case: Case, data: st.DataObject) -> None:
    q = pq.quantize(case.values, case.scheme, table=case.table)
    axes = tuple(data.draw(st.permutations(range(q.ndim))))
    view = q.permute(axes)
    assert view.shape == tuple(q.shape[a] for a in axes)
    assert_same_bits(view.dequantize(), np.transpose(q.dequantize(), axes))
    assert_same_bits(view.codes(), np.transpose(q.codes(), axes))
    assert np.shares_memory(view.data, q.data) or not q.data.size
    back = view.permute(tuple(np.argsort(axes)))
    assert back.to_data() == q.to_data()
    if q.ndim >= 2:
        assert_same_bits(q.T.dequantize(), q.dequantize().T)
        assert_same_bits(q.mT.dequantize(), np.swapaxes(q.dequantize(), -1, -2))


def test_transposes_on_every_device(device: str) -> None:
    q = make("u4/2x8:f16+bias:f16", (2, 3, 40), device)
    wanted = host(q.dequantize())
    assert_same_bits(host(q.T.dequantize()), wanted.T)
    assert_same_bits(host(q.mT.dequantize()), np.swapaxes(wanted, 1, 2))
    assert_same_bits(host(q.permute(2, 0, 1).dequantize()), np.transpose(wanted, (2, 0, 1)))


@pytest.mark.parametrize("axes", [(0,), (0, 0), (0, 2), (0, 1, 2)])
def test_permute_refuses_what_is_no_permutation(axes: tuple[int, ...]) -> None:
    with pytest.raises(errors.InvalidAxes):
        make().permute(axes)


# -- other forms ------------------------------------------------------------------------------


@settings(max_examples=share(0.3))
@given(case=cases(limit=500))
def test_host_forms_round_trip(case: Case) -> None:
    q = pq.quantize(case.values, case.scheme, table=case.table)
    data = q.to_data()
    back = pq.from_data(data)
    assert_same_parts(back, q)
    assert back.to_data() == data
    for same in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q), copy.copy(q)):
        assert same.to_data() == data
    turned = q.T.to_data()
    assert pq.from_data(turned).to_data() == turned


@pytest.mark.parametrize("scheme", ["q4s", "nvfp4", "nf4-double", RICH, "u3[custom]/16:bf16"])
def test_every_device_and_back(device: str, scheme: str) -> None:
    q = make(scheme)
    there = q.to(device)
    assert there.device == device
    assert_same_parts(there, q)
    assert_same_parts(there.to("numpy"), q)
    assert there.to_data() == q.to_data()
    assert_same_parts(pq.from_data(q.to_data(), device), q)
    for second in DEVICES:
        assert there.to(second).to_data() == q.to_data()


@needs("torch")
def test_numpy_and_torch_share_memory() -> None:
    q = make("nf4-double")
    there = q.to("torch:cpu")
    back = there.to("numpy")
    for name, part in q.parts().items():
        assert np.shares_memory(part, host(there.parts()[name])), name
        assert np.shares_memory(part, back.parts()[name]), name
    assert q.to("numpy") is q


@needs("torch")
def test_pickle_and_copy_of_a_torch_tensor() -> None:
    q = make("nf4-double", device="torch:cpu")
    for same in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q)):
        assert same.device == "torch:cpu"
        assert same.to_data() == q.to_data()


def test_array_protocol() -> None:
    q = make()
    assert_same_bits(np.asarray(q), q.dequantize())
    assert np.asarray(q, dtype=np.float64).dtype == np.float64
    assert_same_bits(np.asarray(q.T), q.dequantize().T)


def test_no_silent_copy_from_elsewhere(device: str) -> None:
    """NumPy sees what lies in the host's memory; one of unknown whereabouts is refused."""
    q = make().to(device)
    if device.startswith(("numpy", "torch:cpu", "jax:cpu")):
        assert_same_bits(np.asarray(q), make().dequantize())
    else:
        with pytest.raises(errors.HostCopyRefused, match=device):
            np.asarray(q)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dequantize_rounds_once(dtype: str) -> None:
    q = make()
    assert_same_bits(q.dequantize(dtype), q.dequantize().astype(q.dequantize(dtype).dtype))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "complex64", np.int32])
def test_dequantize_to_floats_only(dtype: Any) -> None:
    with pytest.raises(errors.UnsupportedDtype):
        make().dequantize(dtype)


def test_host_form_of_a_wrong_length() -> None:
    data = make().to_data()
    with pytest.raises(errors.DataLength):
        pq.TensorData(data.bytes + b"\0", data.shape, data.scheme, data.axes)


@pytest.mark.parametrize(
    ("scheme", "part", "number"),
    [("q4s", "scales", np.nan), ("q4s", "scales", np.inf), ("nvfp4", "tensor_scale", np.nan)],
)
def test_host_forms_with_impossible_scales(scheme: str, part: str, number: float) -> None:
    arrays = make(scheme).parts()
    arrays[part] = np.full_like(arrays[part], number)
    q = from_parts(arrays, pq.scheme(scheme), (3, 70), device="numpy")
    with pytest.raises(errors.CorruptData, match=part):
        pq.from_data(q.to_data())


def test_a_named_table_with_other_entries() -> None:
    q = make("nf4")
    arrays = q.parts() | {"table": q.table * np.float32(2)}
    data = from_parts(arrays, q.scheme, q.shape, device="numpy").to_data()
    with pytest.raises(errors.TableMismatch):
        pq.from_data(data)


@needs("jax")
def test_a_tensor_passes_through_jit() -> None:
    import jax

    q = make("nvfp4", device="jax")
    values = jax.jit(lambda t: t.dequantize())(q)
    assert_same_bits(host(values), host(q.dequantize()))
    assert jax.jit(lambda t: t.T)(q).to_data() == q.T.to_data()
