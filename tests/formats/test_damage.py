"""Files that were damaged: a catalogue error, or what was written; never anything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import polyquant as pq
from polyquant.errors import PolyquantError
from strategies import share


def outcome(path: Path, bits: Any) -> Any:
    """The bits of everything that a path holds, or None after an error of the catalogue."""
    try:
        with pq.open_checkpoint(path) as checkpoint:
            metadata = dict(checkpoint.metadata)
            found = {name: bits(checkpoint[name]) for name in checkpoint}
        return metadata, found
    except PolyquantError as error:
        assert str(error).endswith(f"[{error.slug}]")
        return None


def flip_each_byte(path: Path, pattern: int) -> Iterator[int]:
    """Yield at each byte of a file with that byte, and only that one, changed."""
    whole = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for at, byte in enumerate(whole):
            for value in (byte ^ pattern, byte):
                file.seek(at)
                file.write(bytes([value]))
                if value != byte:
                    yield at


@pytest.mark.parametrize("pattern", [0xFF, 0x01, 0x20])
def test_every_flipped_byte_is_noticed(saved: Path, bits: Any, pattern: int) -> None:
    wanted = outcome(saved, bits)
    assert wanted is not None
    harmless = []
    for at in flip_each_byte(saved, pattern):
        found = outcome(saved, bits)
        assert found in (None, wanted), f"byte {at} changed what was read"
        if found is not None:
            harmless.append(at)
    assert not harmless


@pytest.mark.parametrize(
    "name", ["small.safetensors.index.json", "small-00002-of-00003.safetensors"]
)
@pytest.mark.parametrize("pattern", [0xFF, 0x01, 0x20])
def test_every_flipped_byte_of_shards_is_noticed(
    tmp_path: Path, tensors: dict[str, Any], bits: Any, pattern: int, name: str
) -> None:
    index = tmp_path / "small.safetensors.index.json"
    pq.save(tmp_path / "small.safetensors", tensors, shard_size_bytes=40)
    target, wanted = tmp_path / name, outcome(index, bits)
    assert wanted is not None
    for at in flip_each_byte(target, pattern):
        assert outcome(index, bits) in (None, wanted), f"byte {at} changed what was read"


def test_every_truncation_is_noticed(saved: Path, bits: Any) -> None:
    whole = saved.read_bytes()
    for length in range(len(whole)):
        saved.write_bytes(whole[:length])
        assert outcome(saved, bits) is None, f"{length} of {len(whole)} bytes were enough"


@pytest.mark.parametrize("extra", [b"\0", b"x" * 8, b"\0" * 4096])
def test_an_overlong_file_is_noticed(saved: Path, bits: Any, extra: bytes) -> None:
    saved.write_bytes(saved.read_bytes() + extra)
    assert outcome(saved, bits) is None


@pytest.mark.parametrize("pack", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("pattern", [0xFF, 0x01, 0x20, 0x80])
def test_every_flipped_byte_of_npz(tmp_path: Path, bits: Any, pattern: int, pack: Any) -> None:
    path = tmp_path / "x.npz"
    pack(path, a=np.arange(5, dtype=np.float32), b=np.array([True, False]))
    wanted = outcome(path, bits)
    assert wanted is not None
    for at in flip_each_byte(path, pattern):
        assert outcome(path, bits) in (None, wanted), f"byte {at} changed what was read"


def test_every_truncation_of_npz(tmp_path: Path, bits: Any) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.arange(5, dtype=np.float32), b=np.array([True, False]))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert outcome(path, bits) is None


@settings(max_examples=share(1.0))
@example(data=b"", suffix=".npz")
@example(data=b"PK\x05\x06" + bytes(18), suffix=".npz")
@example(data=(2).to_bytes(8, "little") + b"{}", suffix=".safetensors")
@example(data=(8).to_bytes(8, "little") + b"[[[[]]]]", suffix=".safetensors")
@given(
    data=st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=200).map(lambda b: len(b).to_bytes(8, "little") + b),
        st.text(max_size=100).map(lambda t: f'{{"weight_map":{{{t}}}}}'.encode(errors="replace")),
    ),
    suffix=st.sampled_from([".safetensors", ".npz", ".safetensors.index.json", ".bin"]),
)
def test_random_bytes_never_crash_a_reader(
    data: bytes, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("random") / f"x{suffix}"
    path.write_bytes(data)
    outcome(path, lambda tensor: tensor)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    pq.save(folder / "x.safetensors", {"x": pq.quantize(x, "nf4-double"), "y": x})
    np.savez_compressed(folder / "x.npz", x=x, y=x[0])
    return {p.suffix: p.read_bytes() for p in folder.iterdir()}


@settings(max_examples=share(1.0))
@given(data=st.data(), suffix=st.sampled_from([".safetensors", ".npz"]))
def test_random_edits_never_crash_a_reader(
    data: st.DataObject,
    suffix: str,
    whole: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    edited = bytearray(whole[suffix])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(edited)))
        length = data.draw(st.integers(0, 6))
        edited[at : at + length] = data.draw(st.binary(max_size=6))
    path = tmp_path_factory.mktemp("edited") / f"x{suffix}"
    path.write_bytes(edited)
    outcome(path, lambda tensor: tensor)
