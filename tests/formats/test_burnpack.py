"""Burn's .bpk: the layout byte for byte, every scheme that Burn has, and hostile files."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import InvalidHeader, PolyquantError, UnsupportedDtype, UnsupportedVersion
from polyquant.formats.burnpack import cbor, open_writer
from polyquant.formats.burnpack.layout import form_of, scheme_of

needs_cbor2 = pytest.mark.skipif(importlib.util.find_spec("cbor2") is None, reason="no cbor2")


def write(path: Path, tensors: dict[str, Any], metadata: Any = None) -> Path:
    plan = [pq.formats.TensorInfo.of(name, tensor) for name, tensor in tensors.items()]
    with open_writer(path, plan, metadata or {}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return path


def by_hand() -> bytes:
    """A file with one tensor of two float32, written down byte by byte."""
    text = (
        b"\xa2"  # a map of two
        b"\x67tensors\xa1\x61w\xa4"
        b"\x65dtype\x63F32"
        b"\x65shape\x82\x01\x02"
        b"\x6cdata_offsets\x82\x00\x08"
        b"\x68param_id\x19\x01\x00"  # 256
        b"\x68metadata\xa1\x66format\x68burnpack"
    )
    head = b"NRUB\x01\x00" + struct.pack("<I", len(text)) + text
    return head + bytes(-len(head) % 256) + struct.pack("<2f", 1.5, -2.0)


def test_a_file_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "x.bpk"
    path.write_bytes(by_hand())
    with pq.open_checkpoint(path) as ck:
        assert ck.format == "burnpack"
        np.testing.assert_array_equal(ck["w"], np.float32([[1.5, -2.0]]))
        assert ck.metadata["format"] == "burnpack"
        assert json.loads(ck.metadata["burnpack"])["param_ids"] == {"w": 256}
        again = write(tmp_path / "y.bpk", dict(ck), ck.metadata)
    assert again.read_bytes() == by_hand()


SCHEMES = [
    *("q8s/tensor:f32", "q8f/32:f32", "q8s/16:ue4m3/tensor:f32", "q4s/32:f16", "q4f/2x16:bf16"),
    *("q2s/tensor:f32@native", "q2f/8:f16", "e4m3/tensor:f32@native", "e5m2/32:ue8m0"),
    *("e2m1/32:ue8m0@packed_native", "e2m1/16:ue4m3/tensor:f32", "q8s/1:f32", "q8s/1x1:f16"),
]


@pytest.mark.parametrize("text", SCHEMES)
def test_schemes_and_back(text: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    q = pq.quantize(x, text)
    form = form_of(q.scheme, q.shape)
    assert scheme_of(form) == q.scheme
    path = write(tmp_path / "x.bpk", {"q": q, "x": x})
    with pq.open_checkpoint(path) as ck:
        assert ck["q"].to_data() == q.to_data()
        np.testing.assert_array_equal(ck["x"], x)
        assert write(tmp_path / "y.bpk", dict(ck), ck.metadata).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "text", ["nf4", "u4/32:f16", "q4s/64:(u8/4:f32)", "q3s/32:f16", "q8s/256:f32", "q8s/row:f32"]
)
def test_schemes_that_burn_lacks(text: str, tmp_path: Path) -> None:
    q = pq.quantize(np.ones((2, 512), np.float32), text)
    with pytest.raises(UnsupportedDtype, match="Burn"):
        write(tmp_path / "x.bpk", {"q": q})
    with pytest.raises(UnsupportedDtype, match="order"):
        write(tmp_path / "x.bpk", {"q": pq.quantize(np.ones((2, 32), np.float32), "q8s").T})


def test_arrays_of_every_dtype(tmp_path: Path) -> None:
    kinds = ["float64", "float32", "float16", "int64", "int32", "int16", "int8"]
    kinds += ["uint64", "uint32", "uint16", "uint8", "bool"]
    tensors: dict[str, Any] = {k: np.arange(3).astype(k) for k in kinds}
    tensors["bfloat16"] = np.arange(3).astype(ml_dtypes.bfloat16)
    tensors["empty"] = np.zeros((0, 3), np.float32)
    path = write(tmp_path / "x.bpk", tensors)
    with pq.open_checkpoint(path) as ck:
        assert list(ck) == list(tensors) or set(ck) == set(tensors)
        for name, tensor in tensors.items():
            assert ck[name].dtype == tensor.dtype and ck[name].tobytes() == tensor.tobytes()


def test_what_is_kept_for_writing_back(tmp_path: Path) -> None:
    metadata = {
        "a": "text",
        "burnpack": json.dumps(
            {
                "param_ids": {"w": 2**63},
                "scalars": {"step": {"UInt": 7}, "rate": {"Float": 0.1}, "on": {"Bool": True}},
                "dtypes": {"w": "Flex32", "b": {"Bool": "U8"}},
            }
        ),
    }
    tensors = {"w": np.ones(3, np.float32), "b": np.asarray([True, False])}
    path = write(tmp_path / "x.bpk", tensors, metadata)
    with pq.open_checkpoint(path) as ck:
        assert ck.metadata["a"] == "text"
        assert json.loads(ck.metadata["burnpack"]) == json.loads(metadata["burnpack"])
        assert write(tmp_path / "y.bpk", dict(ck), ck.metadata).read_bytes() == path.read_bytes()


# -- CBOR -------------------------------------------------------------------------------------

ITEMS: tuple[Any, ...] = (
    *(0, 23, 24, 255, 256, 65535, 65536, 2**32, 2**64 - 1, -1, -256, -(2**63), True, False, None),
    *(0.5, 0.1, 1e300, 3.4e38, float("inf"), "", "text", "\u00fc", [1, [2]], {"a": {"b": []}}),
)


@pytest.mark.parametrize("item", ITEMS)
def test_items_and_back(item: Any) -> None:
    assert cbor.Reader(Path("x"), memoryview(cbor.encode(item))).whole() == item


@needs_cbor2
@pytest.mark.parametrize("item", ITEMS)
def test_another_library_agrees(item: Any) -> None:
    import cbor2

    assert cbor2.loads(cbor.encode(item)) == item
    assert cbor2.dumps(item, canonical=True) == cbor.encode(item)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x19\x01",  # a length that is cut
        b"\x9f\xff",  # an indefinite array
        b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff",  # 2^64 items
        b"\xbb\x00\x00\x00\x00\xff\xff\xff\xff",
        b"\x7b\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x81" * 100 + b"\x00",  # deep
        b"\xa2\x61a\x00\x61a\x00",  # a key twice
        b"\xa1\x00\x00",  # a key that is no text
        b"\x61\xff",  # no UTF-8
        b"\xc0\x00",  # a tag
        b"\xf8\x20",
        b"\x00\x00",  # two items
    ],
)
def test_cbor_that_cannot_be(raw: bytes) -> None:
    with pytest.raises(InvalidHeader, match="CBOR"):
        cbor.Reader(Path("x"), memoryview(raw)).whole()


# -- bad files --------------------------------------------------------------------------------


def file_of(tensors: Any, data: int = 512, **more: Any) -> bytes:
    text = cbor.encode({"tensors": tensors, **more})
    head = b"NRUB\x01\x00" + struct.pack("<I", len(text)) + text
    return head + bytes(-len(head) % 256) + bytes(data)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


HOSTILE = {
    "past the end": {"w": entry(data_offsets=[512, 520])},
    "a lie about the size": {"w": entry(shape=[3])},
    "2^60 elements": {"w": entry(shape=[2**30, 2**30])},
    "turned offsets": {"w": entry(data_offsets=[8, 0])},
    "one offset": {"w": entry(data_offsets=[8])},
    "negative": {"w": entry(data_offsets=[-8, 0])},
    "overlap": {"v": entry(), "w": entry(data_offsets=[4, 12])},
    "a field more": {"w": entry(more=1)},
    "no shape": {"w": {"dtype": "F32", "data_offsets": [0, 8]}},
    "no name": {"": entry()},
    "not a map": [1],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers(what: str, tmp_path: Path) -> None:
    (tmp_path / "x.bpk").write_bytes(file_of(HOSTILE[what]))
    with pytest.raises(InvalidHeader, match=r"x\.bpk"):
        pq.open_checkpoint(tmp_path / "x.bpk")


@pytest.mark.parametrize(
    "dtype",
    [
        "F8",
        {"Bool": "U16"},
        {"QFloat": {}},
        {"QFloat": form_of(pq.scheme("q8s"), (2,)) | {"mode": "Lookup"}},  # type: ignore[operator]
        {"QFloat": form_of(pq.scheme("q8s"), (2,)) | {"store": {"PackedU32": 1}}},  # type: ignore[operator]
    ],
)
def test_dtypes_that_are_not_known(dtype: Any, tmp_path: Path) -> None:
    (tmp_path / "x.bpk").write_bytes(file_of({"w": entry(dtype=dtype)}))
    with pytest.raises(UnsupportedDtype, match="'w'"):
        pq.open_checkpoint(tmp_path / "x.bpk")


def test_versions_and_cuts(tmp_path: Path) -> None:
    path, whole = tmp_path / "x.bpk", by_hand()
    path.write_bytes(whole[:4] + b"\x02" + whole[5:])
    with pytest.raises(UnsupportedVersion):
        pq.open_checkpoint(path)
    for length in (*range(8, 120), 256, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(PolyquantError):
            pq.open_checkpoint(path)
