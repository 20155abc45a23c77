"""Opening reads headers only; a tensor is read when it is asked for."""

from __future__ import annotations

import json
import os
import pickle
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import ChecksumMismatch, TensorNotFound, UnreadableFile


def read_so_far() -> int:
    """Bytes that this process asked the system to read, and pages that it had to fetch."""
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar: ")[1].split()[0])


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """A terabyte of zeros that the disk does not hold, and one small tensor behind it."""
    size = 2**40
    header = {
        "huge": {"dtype": "F32", "shape": [2**19, 2**19], "data_offsets": [0, size]},
        "small": {"dtype": "F32", "shape": [2], "data_offsets": [size, size + 8]},
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.seek(8 + len(raw) + size)
        file.write(np.array([1.5, 2.5], "<f4").tobytes())
    return path


def test_a_terabyte_is_opened_at_once(huge: Path) -> None:
    before, memory = read_so_far(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pq.open_checkpoint(huge) as checkpoint:
        assert checkpoint.info("huge").nbytes == 2**40
        assert checkpoint["small"].tolist() == [1.5, 2.5]
        view = checkpoint["huge"]
        assert view.shape == (2**19, 2**19)
        assert view[3, 5] == 0
    assert read_so_far() - before < 2**20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2**16  # KiB


def test_opening_does_not_look_at_the_bytes(saved: Path) -> None:
    whole = bytearray(saved.read_bytes())
    whole[-1] ^= 1
    saved.write_bytes(whole)
    damaged = 0
    with pq.open_checkpoint(saved) as checkpoint:
        assert len(checkpoint.schemes()) == len(checkpoint) == 3
        for name in checkpoint:
            try:
                checkpoint[name]
            except ChecksumMismatch as error:
                assert error.facts["name"] == name
                damaged += 1
    assert damaged == 1


def test_a_checkpoint_is_a_mapping(saved: Path, tensors: dict[str, Any]) -> None:
    with pq.open_checkpoint(saved) as checkpoint:
        assert isinstance(checkpoint, Mapping)
        assert list(checkpoint.keys()) == list(checkpoint) == list(tensors)
        assert "two" in checkpoint and "three" not in checkpoint
        assert checkpoint.get("three") is None
        assert checkpoint.schemes()["two"] == pq.scheme("nvfp4")
        assert checkpoint.schemes()["plain"] is None
        assert checkpoint.path == saved
        assert "3 tensors" in repr(checkpoint)


def test_infos(saved: Path, tensors: dict[str, Any]) -> None:
    with pq.open_checkpoint(saved) as checkpoint:
        for name, tensor in tensors.items():
            info = checkpoint.info(name)
            assert info == pq.formats.TensorInfo.of(name, tensor)
            assert info.shape == tensor.shape
            assert info.nbytes == tensor.nbytes
        assert checkpoint.info("nested").axes == (1, 0)
        assert checkpoint.info("two").bits_per_element == tensors["two"].bits_per_element
        assert checkpoint.info("plain").bits_per_element == 16
        assert pickle.loads(pickle.dumps(checkpoint.info("two"))) == checkpoint.info("two")


def test_names_that_are_absent(saved: Path) -> None:
    with pq.open_checkpoint(saved) as checkpoint:
        for ask in (checkpoint.__getitem__, checkpoint.info, checkpoint.read):
            with pytest.raises(TensorNotFound, match="'nested'"):
                ask("nestde")


def test_views_outlive_the_checkpoint_and_are_read_only(saved: Path, tensors: Any) -> None:
    with pq.open_checkpoint(saved) as checkpoint:
        plain, two = checkpoint["plain"], checkpoint["two"]
        assert not plain.flags.writeable and not plain.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            plain[0] = 1
    checkpoint.close()
    assert plain.tobytes() == tensors["plain"].tobytes()
    assert two.to_data() == tensors["two"].to_data()


def test_pages_that_are_given_back_are_read_again(saved: Path, tensors: Any, bits: Any) -> None:
    with pq.open_checkpoint(saved) as checkpoint:
        found = {name: checkpoint[name] for name in checkpoint}
        checkpoint.release()
        assert {n: bits(t) for n, t in found.items()} == {n: bits(tensors[n]) for n in tensors}


def test_a_closed_checkpoint_says_so(saved: Path) -> None:
    with pq.open_checkpoint(saved) as checkpoint:
        pass
    assert "two" in checkpoint
    with pytest.raises(UnreadableFile, match="closed"):
        checkpoint["two"]


def test_a_reader_keeps_its_file_when_it_is_replaced(saved: Path, tensors: Any, bits: Any) -> None:
    with pq.open_checkpoint(saved) as checkpoint:
        pq.save(saved, {"other": np.ones(100_000)})
        assert {n: bits(checkpoint[n]) for n in checkpoint} == {
            n: bits(tensors[n]) for n in tensors
        }
    assert list(pq.load(saved)) == ["other"]


def test_a_file_can_replace_itself(saved: Path, tensors: Any, bits: Any) -> None:
    with pq.open_checkpoint(saved) as checkpoint:
        pq.save(saved, checkpoint)
    assert {n: bits(t) for n, t in pq.load(saved).items()} == {n: bits(tensors[n]) for n in tensors}


def test_no_descriptor_stays_open(saved: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        pq.load(saved)
    assert len(os.listdir("/proc/self/fd")) == before


def test_devices(saved: Path, device: str, tensors: Any) -> None:
    with pq.open_checkpoint(saved) as checkpoint:
        found = checkpoint.read("two", device)
        assert found.device == tensors["two"].to(device).device
        assert found.to_data() == tensors["two"].to_data()
        with pytest.raises(pq.errors.UnknownDevice):
            checkpoint.read("two", "abacus")
