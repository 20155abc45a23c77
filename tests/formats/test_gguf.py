"""GGUF: every type decodes to ggml's own values and is written back to the same bytes."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from peers import assert_same, decoded, fixture, names
from polyquant.errors import (
    CorruptData,
    InvalidHeader,
    InvalidName,
    UnsupportedDtype,
    UnsupportedVersion,
)
from polyquant.formats.gguf.container import open_gguf
from polyquant.formats.gguf.types import ARRAY_TYPES, BLOCKS, TYPE_IDS
from polyquant.formats.gguf.writer import open_writer

needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="no gguf package")
#: Bytes that ggml itself never writes: signs of NVFP4's scales, other bytes of the same trits.
NOT_CANONICAL = ("blk.0.nvfp4.weight", "blk.0.tq1_0.weight")


def copy(source: Path, out: Path) -> Path:
    with pq.open_checkpoint(source) as ck:
        plan = [ck.info(name) for name in ck]
        with open_writer(out, plan, ck.metadata) as writer:
            for name in ck:
                writer.write(name, ck[name])
    return out


@pytest.mark.parametrize("name", names("gguf"))
def test_values_are_those_of_ggml(name: str) -> None:
    made = fixture(name)
    with pq.open_checkpoint(made.path) as ck:
        assert ck.format == "gguf"
        for tensor, wanted in made.expected().items():
            if tensor.endswith("_times_scale"):  # what a model makes of two tensors
                scale = ck[tensor.replace(".weight_times_scale", ".scale")]
                got = decoded(ck[tensor.removesuffix("_times_scale")]) * scale
                np.testing.assert_array_equal(got, wanted)
            else:
                assert_same(ck[tensor], wanted)


@pytest.mark.parametrize("name", names("gguf"))
def test_files_are_written_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    source = fixture(name).path
    made = copy(source, tmp_path / "out.gguf")
    old, new = open_gguf(source), open_gguf(made)
    assert old.infos == new.infos
    if name != "gguf/random_codes":
        assert made.read_bytes() == source.read_bytes()
    with pq.open_checkpoint(source) as ck, pq.open_checkpoint(made) as again:
        assert dict(ck.metadata) == dict(again.metadata)
        for tensor in ck:
            if isinstance(ck[tensor], pq.QTensor):
                assert again[tensor].to_data() == ck[tensor].to_data()
            size = ck.info(tensor).nbytes
            run = [
                f.buffer[f.infos[tensor].start : f.infos[tensor].start + size] for f in (old, new)
            ]
            assert run[0] == run[1] or tensor in NOT_CANONICAL


def test_every_type_is_under_test() -> None:
    made = fixture("gguf/random_codes") if names("gguf")[0] != "" else pytest.skip("no fixtures")
    with pq.open_checkpoint(made.path) as ck:
        tested = {info.type_id for info in open_gguf(made.path).infos.values()}
        younger = {"Q2_0"}  # than these files: test_llama_cpp.py has it
        assert tested == {TYPE_IDS[name] for name in BLOCKS.keys() - younger}
        assert set(ck.schemes().values()) == {
            BLOCKS[name].scheme for name in BLOCKS.keys() - younger
        }


# -- files of our own -------------------------------------------------------------------------


def string(text: str, order: str = "<") -> bytes:
    return struct.pack(f"{order}Q", len(text)) + text.encode()


def small(order: str = "<", version: int = 3) -> bytes:
    """A file with a key of every type, an array of numbers and a Q8_0 tensor."""
    keys = [
        string("general.architecture", order)
        + struct.pack(f"{order}I", 8)
        + string("llama", order),
        string("a.u8", order) + struct.pack(f"{order}IB", 0, 200),
        string("a.i8", order) + struct.pack(f"{order}Ib", 1, -3),
        string("a.u16", order) + struct.pack(f"{order}IH", 2, 60000),
        string("a.i16", order) + struct.pack(f"{order}Ih", 3, -300),
        string("a.u32", order) + struct.pack(f"{order}II", 4, 2**31),
        string("a.i32", order) + struct.pack(f"{order}Ii", 5, -5),
        string("a.f32", order) + struct.pack(f"{order}If", 6, 1e-5),
        string("a.bool", order) + struct.pack(f"{order}I?", 7, True),
        string("a.texts", order)
        + struct.pack(f"{order}IIQ", 9, 8, 2)
        + string("x", order)
        + string("", order),
        string("a.nested", order)
        + struct.pack(f"{order}IIQ", 9, 9, 1)
        + struct.pack(f"{order}IQ2i", 5, 2, 7, -7),
        string("a.u64", order) + struct.pack(f"{order}IQ", 10, 2**63),
        string("a.i64", order) + struct.pack(f"{order}Iq", 11, -(2**40)),
        string("a.f64", order) + struct.pack(f"{order}Id", 12, 0.1),
    ]
    infos = [
        string("x", order) + struct.pack(f"{order}I2QIQ", 2, 3, 2, 0, 0),
        string("q", order) + struct.pack(f"{order}I1QIQ", 1, 64, 8, 32),
    ]
    head = b"GGUF" + struct.pack(f"{order}IQQ", version, len(infos), len(keys))
    head += b"".join(keys) + b"".join(infos)
    head += bytes(-len(head) % 32)
    x = struct.pack(f"{order}6f", *range(6))
    q = b"".join(struct.pack(f"{order}e32b", 0.5 + n, *range(-16, 16)) for n in range(2))
    return head + x + bytes(8) + q + bytes(-len(q) % 32)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("version", [2, 3])
def test_both_byte_orders(order: str, version: int, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(small(order, version))
    with pq.open_checkpoint(path) as ck:
        np.testing.assert_array_equal(ck["x"], np.arange(6, dtype=np.float32).reshape(2, 3))
        wanted = np.concatenate([np.arange(-16, 16) * 0.5, np.arange(-16, 16) * 1.5])
        np.testing.assert_array_equal(ck["q"].dequantize(), wanted.astype(np.float32))
        assert ck.metadata["general.architecture"] == "llama"
        assert json.loads(ck.metadata["a.nested"]) == [[7, -7]]
        assert json.loads(ck.metadata["a.f32"]) == np.float32(1e-5)
        assert ck.info("q").bits_per_element == 8.5
    assert copy(path, tmp_path / "y.gguf").read_bytes() == path.read_bytes()


def test_a_file_of_arrays_and_schemes(tmp_path: Path) -> None:
    """Without a GGUF to come from: keys are strings, types are the first that fit."""
    tensors = {
        "w": pq.quantize(np.ones((2, 64), np.float32), "q4f/32:f16"),
        "k": pq.quantize(np.ones((2, 256), np.float32), BLOCKS["Q4_K"].scheme),
        "b": np.arange(3, dtype=np.int64),
    }
    plan = [pq.formats.TensorInfo.of(name, tensor) for name, tensor in tensors.items()]
    with open_writer(tmp_path / "x.gguf", plan, {"note": "a text"}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    with pq.open_checkpoint(tmp_path / "x.gguf") as ck:
        assert ck.metadata["note"] == "a text"
        np.testing.assert_array_equal(ck["b"], tensors["b"])
        for name in ("w", "k"):
            assert ck[name].to_data() == tensors[name].to_data()


@pytest.mark.parametrize(
    ("shape", "scheme"), [((2, 33), "q4f/32:f16"), ((2, 64), "q4s/32:f16"), ((1,) * 5, None)]
)
def test_tensors_that_no_type_holds(shape: Any, scheme: Any, tmp_path: Path) -> None:
    x: Any = np.ones(shape, np.float32)
    plan = [pq.formats.TensorInfo.of("x", x if scheme is None else pq.quantize(x, scheme))]
    with pytest.raises(UnsupportedDtype, match=r"x\.gguf"):
        open_writer(tmp_path / "x.gguf", plan)


def test_keys_that_are_not_of_their_type(tmp_path: Path) -> None:
    metadata = {"n": "three", "gguf": json.dumps({"types": {"n": "u32"}})}
    with pytest.raises(InvalidName, match="u32"):
        open_writer(tmp_path / "x.gguf", [], metadata)


def test_a_model_in_parts(tmp_path: Path) -> None:
    tensors = {
        f"t{i}": pq.quantize(np.full((2, 64), i + 1.0, np.float32), "q8f/32:f16") for i in range(3)
    }
    for i, (name, tensor) in enumerate(tensors.items()):
        keys = {"general.name": "x", "split.no": str(i), "split.count": "3"}
        keys["gguf"] = json.dumps({"types": {"split.no": "u16", "split.count": "u16"}})
        path = tmp_path / f"m-0000{i + 1}-of-00003.gguf"
        plan = [pq.formats.TensorInfo.of(name, tensor)]
        with open_writer(path, plan, keys) as writer:
            writer.write(name, tensor)
    for path in (tmp_path, tmp_path / "m-00001-of-00003.gguf", tmp_path / "m-00002-of-00003.gguf"):
        with pq.open_checkpoint(path) as ck:
            assert list(ck) == list(tensors) and ck.metadata["general.name"] == "x"
            assert "split.no" not in ck.metadata
            for name, tensor in tensors.items():
                assert ck[name].to_data() == tensor.to_data()
    whole = copy(tmp_path, tmp_path / "whole.gguf")
    assert set(open_gguf(whole).infos) == set(tensors)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(InvalidHeader, match="missing, the first 'm-00002"):
        pq.open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


@needs_gguf
@pytest.mark.parametrize("name", names("gguf"))
def test_the_gguf_package_reads_what_we_write(name: str, tmp_path: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    made = fixture(name)
    path = copy(made.path, tmp_path / "x.gguf")
    found = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert list(found) == list(pq.open_checkpoint(path))
    for tensor, wanted in made.expected().items():
        kind = found[tensor].tensor_type if tensor in found else None
        if kind is not None and kind.name != "Q1_0":  # which the package cannot decode
            got = dequantize(found[tensor].data, kind).reshape(wanted.shape)
            np.testing.assert_array_equal(got.astype(np.float32), wanted)


# -- bad files --------------------------------------------------------------------------------


def info(name: str = "t", extents: Any = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, offset)


def file_of(*infos: bytes, keys: Any = (), data: int = 256, **counts: int) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ", 3, counts.get("tensors", len(infos)), counts.get("keys", len(keys))
    )
    head += b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


HOSTILE = {
    "no tensor fits": file_of(info(extents=(2**60,))),
    "2^60 elements": file_of(info(extents=(2**30, 2**30))),
    "past the end": file_of(info(extents=(1024,))),
    "an offset past the end": file_of(info(offset=2**63)),
    "an odd offset": file_of(info(offset=7)),
    "overlap": file_of(info("a"), info("b", offset=32)),
    "a name twice": file_of(info("a"), info("a", offset=128)),
    "no name": file_of(info("")),
    "five axes": file_of(info(extents=(1,) * 5)),
    "rows that no block divides": file_of(info(extents=(33,), kind=2)),
    "too many tensors": file_of(info(), tensors=2**60),
    "a long name": b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 2**62) + bytes(64),
    "a key twice": file_of(keys=[string("k") + struct.pack("<IB", 0, 1)] * 2),
    "a type of key": file_of(keys=[string("k") + struct.pack("<IB", 13, 1)]),
    "a boolean of 2": file_of(keys=[string("k") + struct.pack("<IB", 7, 2)]),
    "a long array": file_of(keys=[string("k") + struct.pack("<IIQ", 9, 4, 2**61)]),
    "many texts": file_of(keys=[string("k") + struct.pack("<IIQ", 9, 8, 2**61)]),
    "deep arrays": file_of(
        keys=[string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9]
    ),
    "an alignment of 0": file_of(keys=[string("general.alignment") + struct.pack("<II", 4, 0)]),
    "a huge alignment": file_of(keys=[string("general.alignment") + struct.pack("<II", 4, 2**31)]),
    "an alignment that is a text": file_of(
        keys=[string("general.alignment") + struct.pack("<I", 8) + string("32")]
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers(what: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(HOSTILE[what])
    with pytest.raises(InvalidHeader, match=r"x\.gguf"):
        pq.open_checkpoint(tmp_path / "x.gguf")


def test_sparse_terabytes_are_not_walked_through(tmp_path: Path) -> None:
    texts = [
        string("k") + struct.pack("<IIQ", 9, 8, 2**36),
        string("k") + struct.pack("<IQ", 8, 2**39),
    ]
    for key in texts:
        with open(tmp_path / "x.gguf", "wb") as file:
            file.write(file_of(keys=[key]))
            file.truncate(2**40)
        with pytest.raises(InvalidHeader, match="100000000"):
            pq.open_checkpoint(tmp_path / "x.gguf")


def test_every_length_at_which_a_file_may_end(tmp_path: Path) -> None:
    whole, path = small(), tmp_path / "x.gguf"
    needed = len(whole) - (-68 % 32)  # the last padding may be missing
    for length in range(8, needed):
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidHeader):
            pq.open_checkpoint(path)
    path.write_bytes(whole[:needed])
    assert len(pq.open_checkpoint(path)) == 2


def test_versions_and_types_that_are_not_known(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for version in (1, 4):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        with pytest.raises(UnsupportedVersion):
            pq.open_checkpoint(path)
    for kind in (4, 36, 99):
        path.write_bytes(file_of(info(kind=kind)))
        with pytest.raises(UnsupportedDtype, match="'t'"):
            pq.open_checkpoint(path)


def test_scales_that_are_not_a_number(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(file_of(info(extents=(64,), kind=TYPE_IDS["NVFP4"]), data=0) + b"\xff" * 36)
    with pytest.raises(CorruptData, match="0xFF"):
        pq.open_checkpoint(path)["t"]


def test_arrays_of_every_dtype(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    tensors: dict[str, Any] = {k: np.arange(3).astype(d) for k, d in ARRAY_TYPES.items()}
    plan = [pq.formats.TensorInfo.of(name, tensor) for name, tensor in tensors.items()]
    with open_writer(path, plan) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    with pq.open_checkpoint(path) as ck:
        for name, tensor in tensors.items():
            assert ck[name].dtype == tensor.dtype and ck[name].tobytes() == tensor.tobytes()
