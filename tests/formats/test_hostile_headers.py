"""Headers that someone made to break a reader: each is refused, and says why."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import (
    BlockRank,
    CorruptData,
    InvalidAxes,
    InvalidHeader,
    UnknownScheme,
    UnreadableFile,
    UnsupportedVersion,
)
from polyquant.files.strict_json import canonical
from polyquant.formats.polyquant.manifest import checksum_of_form


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


RAW = {
    "no object": b"[]",
    "a number": b"1",
    "nothing": b"",
    "not JSON": b"{'a': 1}",
    "not UTF-8": b'{"\xff": 1}',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "two objects": b"{}{}",
    "a key twice": b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"x":1}',
    "metadata twice": b'{"__metadata__":{},"__metadata__":{}}',
    "a field twice": b'{"x":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "NaN": b'{"x":NaN}',
    "infinity": b'{"x":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,4]}}',
    "a surrogate": b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "deep lists": b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": b'{"x":' * 100_000 + b"1" + b"}" * 100_000,
    "a huge number": b'{"x":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("case", RAW)
def test_headers_that_are_no_header(case: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidHeader):
        pq.open_checkpoint(write(tmp_path / "x.safetensors", RAW[case], bytes(4)))


ENTRIES = {
    "no object": 3,
    "null": None,
    "a field missing": {"dtype": "U8", "shape": [4]},
    "a field more": entry(extra=1),
    "an unknown dtype": entry(dtype="U9"),
    "a dtype that is no text": entry(dtype=8),
    "a dtype that is a list": entry(dtype=["U8"]),
    "a shape that is a number": entry(shape=4),
    "a text for an extent": entry(shape=["4"]),
    "a fraction": entry(shape=[4.0]),
    "true": entry(shape=[True, 4]),
    "a negative extent": entry(shape=[-4]),
    "two negative extents": entry(shape=[-2, -2]),
    "extents that overflow to 4": entry(shape=[2**62 + 1, 4]),
    "an extent beyond 64 bits": entry(shape=[2**64 + 4]),
    "no element, huge extents": entry(shape=[0, 2**62, 2**62], offsets=[0, 0]),
    "too many axes": entry(shape=[1] * 65 + [4]),
    "offsets that are one": entry(offsets=[4]),
    "offsets that are three": entry(offsets=[0, 4, 4]),
    "descending offsets": entry(shape=[0], offsets=[4, 0]),
    "a negative offset": entry(offsets=[-4, 0]),
    "offsets of fractions": entry(offsets=[0.0, 4.0]),
    "offsets of booleans": entry(shape=[1], offsets=[False, True]),
    "beyond the end": entry(shape=[5], offsets=[0, 5]),
    "a gap before": entry(shape=[3], offsets=[1, 4]),
    "bytes left over": entry(shape=[3], offsets=[0, 3]),
    "too few bytes": entry(dtype="F32", shape=[2]),
    "half a byte": entry(dtype="F4", shape=[7]),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_entries_that_cannot_be(case: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidHeader):
        pq.open_checkpoint(write(tmp_path / "x.safetensors", {"x": ENTRIES[case]}, bytes(4)))


@pytest.mark.parametrize(
    ("first", "second"),
    [((0, 3), (2, 4)), ((0, 4), (0, 4)), ((0, 2), (3, 4)), ((0, 4), (1, 3)), ((0, 1), (1, 3))],
)
def test_gaps_and_overlaps(first: Any, second: Any, tmp_path: Path) -> None:
    made = {
        name: entry(shape=[stop - start], offsets=[start, stop])
        for name, (start, stop) in {"a": first, "b": second}.items()
    }
    with pytest.raises(InvalidHeader, match=r"bytes"):
        pq.open_checkpoint(write(tmp_path / "x.safetensors", made, bytes(4)))


def test_entries_in_any_order_are_fine(tmp_path: Path) -> None:
    made = {
        "b": entry(shape=[2], offsets=[2, 4]),
        "empty": entry(shape=[0], offsets=[2, 2]),
        "a": entry(shape=[2], offsets=[0, 2]),
    }
    found = pq.load(write(tmp_path / "x.safetensors", made, b"\1\2\3\4"))
    assert {name: array.tolist() for name, array in found.items()} == {
        "b": [3, 4],
        "empty": [],
        "a": [1, 2],
    }


@pytest.mark.parametrize("length", [3, 2**20, 100_000_001, 2**63, 2**64 - 1])
def test_lengths_that_lie(length: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidHeader):
        pq.open_checkpoint(write(tmp_path / "x.safetensors", b"{}  ", length=length))


def test_metadata_of_nothing(tmp_path: Path) -> None:
    """As MLX writes where it is given none."""
    header = {"__metadata__": None, "x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
    with pq.open_checkpoint(write(tmp_path / "x.safetensors", header)) as ck:
        assert dict(ck.metadata) == {} and ck["x"].shape == (0,)


@pytest.mark.parametrize("metadata", [[], 1, {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_metadata_of_texts_only(metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidHeader, match="__metadata__"):
        pq.open_checkpoint(write(tmp_path / "x.safetensors", {"__metadata__": metadata}))


def test_booleans_that_are_neither(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"x": entry(dtype="BOOL")}, b"\0\1\2\1")
    with pq.open_checkpoint(path) as checkpoint, pytest.raises(CorruptData, match="neither"):
        checkpoint["x"]


@pytest.mark.parametrize("size", range(8))
def test_files_too_short_for_a_length(size: int, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    with pytest.raises(InvalidHeader, match="takes 8"):
        pq.open_checkpoint(tmp_path / "x.safetensors")


# -- manifests --------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Header, manifest and bytes of a good file with one quantized tensor and one plain one."""
    path = tmp_path / "good.safetensors"
    q = pq.quantize(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "q8s/2:f16")
    pq.save(path, {"w": q, "x": np.arange(3, dtype=np.uint8)})
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["polyquant"]), whole[8 + length :]


def forge(path: Path, parts: Any) -> Path:
    """A file with a changed manifest whose own checksum is right."""
    header, manifest, data = parts
    manifest.pop("header", None)
    manifest["header"] = checksum_of_form([manifest, {}])
    header["__metadata__"]["polyquant"] = canonical(manifest)
    return write(path, header, data)


def test_forging_nothing_is_good(parts: Any, tmp_path: Path) -> None:
    assert set(pq.load(forge(tmp_path / "x.safetensors", parts))) == {"w", "x"}


CHANGES: dict[str, tuple[list[str], Any, type[Exception]]] = {
    "no version": (["version"], None, UnsupportedVersion),
    "a later version": (["version"], 2, UnsupportedVersion),
    "version true": (["version"], True, UnsupportedVersion),
    "version as text": (["version"], "1", UnsupportedVersion),
    "a later scheme": (["tensors", "w", "scheme", "version"], 2, UnsupportedVersion),
    "a field more": (["more"], 1, InvalidHeader),
    "shard 0": (["shard"], [0, 1], InvalidHeader),
    "shard 2 of 1": (["shard"], [2, 1], InvalidHeader),
    "shard of texts": (["shard"], ["1", "1"], InvalidHeader),
    "another checkpoint": (["checkpoint"], "crc32:00000000", InvalidHeader),
    "checkpoint as a number": (["checkpoint"], 1, InvalidHeader),
    "tensors as a list": (["tensors"], [], InvalidHeader),
    "a tensor more": (
        ["tensors", "y"],
        {"dtype": "U8", "shape": [], "checksum": ""},
        InvalidHeader,
    ),
    "a tensor that is null": (["tensors", "w"], None, InvalidHeader),
    "a dtype that differs": (["tensors", "x", "dtype"], "I8", InvalidHeader),
    "a dtype unknown": (["tensors", "x", "dtype"], "I9", InvalidHeader),
    "a dtype that is a list": (["tensors", "x", "dtype"], ["U8"], InvalidHeader),
    "a shape that differs": (["tensors", "x", "shape"], [1, 3], InvalidHeader),
    "a shape that is a text": (["tensors", "w", "shape"], "34", InvalidHeader),
    "a negative shape": (["tensors", "w", "shape"], [-3, -4], InvalidHeader),
    "a huge shape": (["tensors", "w", "shape"], [2**40, 2**40], InvalidHeader),
    "another shape": (["tensors", "w", "shape"], [3, 5], InvalidHeader),
    "no axis": (["tensors", "w", "shape"], [], InvalidAxes),
    "a flat shape": (["tensors", "w", "shape"], [12], InvalidAxes),
    "axes twice": (["tensors", "w", "axes"], [0, 0], InvalidAxes),
    "axes out of range": (["tensors", "w", "axes"], [1, 2], InvalidAxes),
    "axes of booleans": (["tensors", "w", "axes"], [False, True], InvalidHeader),
    "axes exchanged": (["tensors", "w", "axes"], [1, 0], InvalidHeader),
    "a scheme as text": (["tensors", "w", "scheme"], "q8s/2:f16", UnknownScheme),
    "a scheme that is null": (["tensors", "w", "scheme"], None, UnknownScheme),
    "another scale": (["tensors", "w", "scheme", "scale"], "f32", InvalidHeader),
    "a block too deep": (["tensors", "w", "scheme", "block"], [2, 2, 2], BlockRank),
    "a value unknown": (["tensors", "w", "scheme", "value"], "q9s", Exception),
    "a mode unknown": (["tensors", "w", "scheme", "mode"], {}, Exception),
    "a field unknown": (["tensors", "w", "scheme", "colour"], "red", UnknownScheme),
}


@pytest.mark.parametrize("case", CHANGES)
def test_manifests_that_cannot_be(case: str, parts: Any, tmp_path: Path) -> None:
    keys, value, error = CHANGES[case]
    place = parts[1]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    wanted = pq.errors.PolyquantError if error is Exception else error
    with pytest.raises(wanted):
        pq.load(forge(tmp_path / "x.safetensors", parts))


def test_a_scheme_nested_without_end(parts: Any, tmp_path: Path) -> None:
    scheme = parts[1]["tensors"]["w"]["scheme"]
    for _ in range(150):
        scheme = scheme | {"scale": scheme}
    parts[1]["tensors"]["w"]["scheme"] = scheme
    with pytest.raises((UnknownScheme, InvalidHeader)):
        pq.load(forge(tmp_path / "x.safetensors", parts))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "null", '{"version":1,"version":1}', "[" * 100_000]
)
def test_manifests_that_are_no_object(text: str, parts: Any, tmp_path: Path) -> None:
    header, _, data = parts
    header["__metadata__"]["polyquant"] = text
    with pytest.raises(InvalidHeader):
        pq.load(write(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("marker", ["polyquant", "format"])
def test_one_marker_without_the_other(marker: str, parts: Any, tmp_path: Path) -> None:
    header, _, data = parts
    del header["__metadata__"][marker]
    with pytest.raises(InvalidHeader, match="markers"):
        pq.load(write(tmp_path / "x.safetensors", header, data))


def test_an_array_that_no_tensor_has(parts: Any, tmp_path: Path) -> None:
    header, manifest, data = parts
    header["y"] = entry(shape=[0], offsets=[len(data), len(data)])
    with pytest.raises(InvalidHeader, match="'y'"):
        pq.load(forge(tmp_path / "x.safetensors", (header, manifest, data)))


def test_a_scale_that_is_nan(parts: Any, tmp_path: Path) -> None:
    """Checksums guard against accidents; numbers are checked besides."""
    q = pq.quantize(np.ones((2, 4), np.float32), "q8s/2:f16")
    scales = np.array(q.scales)
    scales[1, 1] = np.nan
    broken = pq.QTensor(q.scheme, q.shape, q.data, scales, device="numpy")
    pq.save(tmp_path / "x.safetensors", {"w": broken})
    with pq.open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.schemes() == {"w": q.scheme}
        with pytest.raises(CorruptData, match="scales"):
            checkpoint["w"]


# -- what is no file --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["absent.safetensors", "absent", "no\0name", "x" * 300])
def test_paths_that_lead_nowhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile):
        pq.load(tmp_path / name)


@pytest.mark.parametrize("name", ["x.safetensors", "x.gguf", "x.npz", "x"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / name)
    with pytest.raises(UnreadableFile, match="regular"):
        pq.load(tmp_path / name)
