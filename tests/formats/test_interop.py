"""The safetensors library reads what is written here, and what it writes is read here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import polyquant as pq
from devices import needs
from polyquant.files.info import ARRAY_DTYPES, FILE_DTYPES

#: What the safetensors library itself takes on NumPy, which has no float8.
ON_NUMPY = tuple(name for name in ARRAY_DTYPES if not name.startswith("float8"))


def array_of(name: str) -> np.ndarray[Any, Any]:
    raw = np.random.default_rng(0).integers(0, 2, (3, 40), np.uint8)
    return raw.view(ARRAY_DTYPES[name].host)


def assert_same(found: Any, wanted: Any) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", ON_NUMPY)
def test_the_library_reads_every_dtype(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    wanted = {"x": array_of(name), "scalar": array_of(name)[0, 0], "empty": array_of(name)[:0]}
    pq.save(path, wanted, metadata={"key": "text"})
    for item, array in load_file(path).items():
        assert_same(array, np.asarray(wanted[item]))
    with safe_open(path, "np") as file:
        assert file.metadata()["key"] == "text"


@pytest.mark.parametrize("name", ON_NUMPY)
def test_the_library_writes_every_dtype(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": array_of(name), "empty": array_of(name)[:0]}, path, metadata={"format": "np"})
    with pq.open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.metadata == {"format": "np"}
        assert checkpoint.info("x").dtype == name
        assert checkpoint.info("x").scheme is None
        assert checkpoint.info("x").nbytes == 120
        assert_same(checkpoint["x"], array_of(name))
        assert_same(checkpoint["empty"], array_of(name)[:0])


@needs("torch")
@pytest.mark.parametrize("name", ARRAY_DTYPES)
def test_torch_both_ways(name: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    made = torch.from_numpy(array_of(name).view(np.uint8)).view(getattr(torch, name))
    mixed = {"x": made, "bf16": torch.ones(3, dtype=torch.bfloat16), "flag": torch.tensor(True)}
    save_file(mixed, tmp_path / "theirs.safetensors")
    pq.save(tmp_path / "ours.safetensors", mixed)
    for item, tensor in mixed.items():
        theirs = load_file(tmp_path / "ours.safetensors")[item]
        ours = pq.load(tmp_path / "theirs.safetensors", "torch")[item]
        for found in (theirs, ours):
            assert found.dtype is tensor.dtype
            assert found.shape == tensor.shape
            as_bytes = found.reshape(-1).view(torch.uint8)
            assert torch.equal(as_bytes, tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("scheme", ["nf4-double", "nvfp4", "u4/8:bf16-zero:u4", "mxfp4", "q4s-row"])
def test_the_library_sees_the_parts(scheme: str, tmp_path: Path) -> None:
    q = pq.quantize(np.linspace(-1, 1, 90, dtype=np.float32).reshape(2, 45), scheme)
    pq.save(tmp_path / "w.safetensors", {"w": q})
    found = load_file(tmp_path / "w.safetensors")
    for part, array in q.parts().items():
        assert_same(found.pop(f"w.{part}".removesuffix(".data")), array)
    assert not found


def test_the_names_of_the_parts(tmp_path: Path) -> None:
    q = pq.quantize(
        np.ones((2, 9), np.float32), "u4[custom]/4:(u8[dynamic8u]/4:f32)", table="kmeans"
    )
    pq.save(tmp_path / "w.safetensors", {"w": q})
    with safe_open(tmp_path / "w.safetensors", "np") as file:
        names = ["w", "w.scales", "w.scales.scales", "w.scales.table", "w.table"]
        assert sorted(file.keys()) == names
        assert file.metadata()["format"] == "polyquant"
        manifest = json.loads(file.metadata()["polyquant"])
    assert manifest["tensors"]["w"]["scheme"] == q.scheme.to_json()
    assert manifest["tensors"]["w"]["shape"] == [2, 9]
    assert manifest["tensors"]["w"]["axes"] == [0, 1]


def test_arrays_are_aligned(tmp_path: Path) -> None:
    odd = {"a": np.ones(3, np.uint8), "b": np.ones(2, np.float64), "c": np.ones(1, np.int16)}
    odd["q"] = pq.quantize(np.ones(5, np.float32), "q3f/2:f16@packed_native")
    odd["d"] = np.ones(3, ml_dtypes.bfloat16)
    pq.save(tmp_path / "x.safetensors", odd)
    with pq.open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        for name in ("b", "c", "d"):
            address = checkpoint[name].ctypes.data
            assert address % checkpoint[name].itemsize == 0
            assert not checkpoint[name].flags.owndata


def test_misaligned_arrays_of_others_are_copied(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    data = b"\x07" + np.array([1.5, -2.0], "<f4").tobytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    with pq.open_checkpoint(path) as checkpoint:
        assert checkpoint["b"].flags.aligned
        assert checkpoint["b"].tolist() == [1.5, -2.0]


def test_sub_byte_dtypes_are_listed_and_refused_when_read(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pq.open_checkpoint(path) as checkpoint:
        assert checkpoint.info("x").dtype == FILE_DTYPES["F4"].name
        assert checkpoint.info("x").bits_per_element == 4
        with pytest.raises(pq.errors.UnsupportedDtype, match="float4_e2m1fn"):
            checkpoint["x"]
