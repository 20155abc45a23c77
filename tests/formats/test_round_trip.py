"""What is saved is what is loaded: every scheme, dtype, library and order of axes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import polyquant as pq
from polyquant.errors import UnsupportedDtype
from polyquant.files.info import ARRAY_DTYPES
from strategies import cases, lay_out, share

EXTRA = (
    "u4/32:f16+bias:f16",
    "u4/128:f16-zero:u4",
    "u3/7:bf16-zero:f32",
    "u2/16:(u4/16:f16)+bias:(q6s/16:f16)",
    "q6s/16:(q8s/tensor:f32)",
    "e5m2/4x5:ue4m3/tensor:f32@native",
    "q3f/row:f32@packed_native",
    "u5[custom]/16:f16",
    "q1f/tensor:bf16",
)
SCHEMES = (*pq.presets(), *EXTRA)


def quantized(scheme: str, *shape: int) -> pq.QTensor:
    x = np.random.default_rng(len(scheme)).standard_normal(shape).astype(np.float32)
    return pq.quantize(x, scheme, table="kmeans" if "custom" in scheme else None)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme: str, tmp_path: Path) -> None:
    q = quantized(scheme, 3, 5, 37)
    orders = {f"w{order}": q.permute(order) for order in itertools.permutations(range(3))}
    pq.save(tmp_path / "w.safetensors", orders)
    found = pq.load(tmp_path / "w.safetensors")
    assert list(found) == list(orders)
    for name, tensor in orders.items():
        assert found[name].to_data() == tensor.to_data()
        assert found[name].axes == tensor.axes
        assert found[name].dequantize().tobytes() == tensor.dequantize().tobytes()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_library(scheme: str, device: str, tmp_path: Path) -> None:
    q = quantized(scheme, 6, 33).T
    pq.save(tmp_path / "here.safetensors", {"w": q.to(device)})
    pq.save(tmp_path / "numpy.safetensors", {"w": q})
    here, there = ((tmp_path / f"{n}.safetensors").read_bytes() for n in ("here", "numpy"))
    assert here == there
    found = pq.load(tmp_path / "here.safetensors", device)["w"]
    assert found.device == q.to(device).device
    assert found.to_data() == q.to_data()


@settings(max_examples=share(0.3))
@given(case=cases(limit=500))
def test_any_case(case: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    q = pq.quantize(lay_out(case.values, case.layout), case.scheme, table=case.table)
    path = tmp_path_factory.mktemp("any") / "w.safetensors"
    pq.save(path, {"w": q, "w2": q.T})
    found = pq.load(path)
    assert found["w"].to_data() == q.to_data()
    assert found["w2"].to_data() == q.T.to_data()


SHAPES = ((1,), (0,), (0, 3), (3, 0), (2, 3, 0, 5))
SMALL = ("q4s/32:f16", "nf4-double", "u4/8:f16-zero:u4", "q8s/tensor:f32")


@pytest.mark.parametrize(
    ("scheme", "shape"), [*itertools.product(SMALL, SHAPES), ("q8s/tensor:f32", ())]
)
def test_small_and_empty_shapes(scheme: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    q = pq.quantize(np.ones(shape, np.float32), scheme)
    pq.save(tmp_path / "w.safetensors", {"w": q, "x": np.ones(shape, np.float16)})
    found = pq.load(tmp_path / "w.safetensors")
    assert found["w"].to_data() == q.to_data()
    assert found["x"].shape == shape


def number_array(name: str, *shape: int) -> np.ndarray[Any, Any]:
    raw = np.random.default_rng(1).integers(0, 2 if name == "bool" else 256, 1000, np.uint8)
    kind = ARRAY_DTYPES[name].host
    size = int(np.prod(shape)) * kind.itemsize
    return raw[:size].view(kind).reshape(shape)


@pytest.mark.parametrize("name", ARRAY_DTYPES)
def test_every_dtype(name: str, device: str, tmp_path: Path, bits: Any) -> None:
    array = number_array(name, 3, 5)
    scalar = number_array(name)
    path = tmp_path / "x.safetensors"
    pq.save(path, {"x": array, "scalar": scalar, "empty": array[:0]})
    assert bits(pq.load(path)["x"]) == bits(array)
    try:
        found = pq.load(path, device)
    except UnsupportedDtype:
        is_bare = device == "array_api_strict"
        assert name not in ("float32", "uint8", "int32", "bool")
        assert is_bare or name not in ("float16", "bfloat16", "float8_e4m3fn")
        return
    assert bits(found["x"]) == bits(array)
    assert bits(found["scalar"]) == bits(scalar)
    pq.save(tmp_path / "again.safetensors", found)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_jax_narrows_nothing_unasked(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    pq.save(tmp_path / "x.safetensors", {"x": np.array([2**40], np.int64)})
    with pytest.raises(UnsupportedDtype, match=r"jax.*int64.*jax_enable_x64"):
        pq.load(tmp_path / "x.safetensors", "jax")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=">i4").reshape(4, 6),
        np.arange(24, dtype=np.float32).reshape(4, 6).T,
        np.arange(24, dtype=np.float32).reshape(4, 6)[::-2, ::3],
        np.broadcast_to(np.float16(3), (4, 5)),
        np.float64(2.5),
        np.arange(6).astype(ml_dtypes.bfloat16)[::-1],
    ],
)
def test_every_layout(array: Any, tmp_path: Path) -> None:
    pq.save(tmp_path / "x.safetensors", {"x": array})
    found = pq.load(tmp_path / "x.safetensors")["x"]
    np.testing.assert_array_equal(found, array)
    assert found.dtype.name == array.dtype.name


def test_torch_views(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.complex(torch.arange(6.0), torch.ones(6)).reshape(2, 3)
    made = {
        "conj": x.conj().T,
        "neg": x.conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "float8": torch.ones(3, 4).to(torch.float8_e4m3fn).T,
    }
    pq.save(tmp_path / "x.safetensors", made)
    found = pq.load(tmp_path / "x.safetensors", "torch")
    assert torch.equal(found["conj"], x.conj().T.resolve_conj())
    assert torch.equal(found["neg"], -torch.ones(2, 3))
    assert torch.equal(found["parameter"], torch.ones(2, 3))
    assert torch.equal(found["float8"].view(torch.uint8), made["float8"].view(torch.uint8))


def test_loaded_arrays_are_ones_own(saved: Path) -> None:
    found = pq.load(saved)["plain"]
    found += 1
    again = pq.load(saved)["plain"]
    assert found[0] == again[0] + 1


def test_metadata_is_kept(saved: Path) -> None:
    with pq.open_checkpoint(saved) as checkpoint:
        assert checkpoint.metadata == {"author": "a test"}


def test_nothing_at_all(tmp_path: Path) -> None:
    pq.save(tmp_path / "none.safetensors", {})
    assert pq.load(tmp_path / "none.safetensors") == {}


def test_the_same_bytes_each_time(tmp_path: Path, saved: Path) -> None:
    with pq.open_checkpoint(saved) as checkpoint:
        pq.save(tmp_path / "copy.safetensors", checkpoint, metadata=checkpoint.metadata)
    assert (tmp_path / "copy.safetensors").read_bytes() == saved.read_bytes()
