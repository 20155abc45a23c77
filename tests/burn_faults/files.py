"""Faults of files, raised with files of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import polyquant as pq
from burn_faults.terms import HOST, TORCH, Here, Raises, Table, Works
from polyquant.formats import TensorInfo, Writer


def _file(header: Any, data: bytes = b"1234") -> bytes:
    """A safetensors file of a header (JSON, or its text) and its bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _entry(shape: list[int], start: int, stop: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def _saved(here: Here) -> bytes:
    """A file of ours."""
    path = here.folder / "saved.safetensors"
    pq.save(path, {"w": here.q})
    return path.read_bytes()


def _later(here: Here) -> bytes:
    return _saved(here).replace(rb"{\"version\":1,\"shard\"", rb"{\"version\":9,\"shard\"")


def _write(here: Here, names: str, tensor: Any) -> None:
    """Write a tensor under each name, planned as that of ``here``."""
    plan = [TensorInfo.of(name, here.q) for name in names]
    with Writer(here.folder / "w.safetensors", plan) as writer:
        for name in names:
            writer.write(name, tensor)


def _pickled(here: Here) -> Any:
    import torch

    path = here.folder / "model.pt"
    torch.save({"w": here.x}, path)
    return pq.load(path)


def save_as_safetensors(here: Here) -> None:
    path = here.folder / "q.safetensors"
    for scheme in pq.presets().values():
        q = pq.quantize(here.x, scheme)
        pq.save(path, {"w": q})
        assert pq.load(path)["w"].to_data() == q.to_data()


def _bad_file(wanted: str, came: str, make: Callable[[Here], bytes]) -> Raises:
    """A file of ours that is refused when it is opened."""
    slug = "invalid-header"
    return Raises(slug, lambda here: here.load(make(here)), wanted, came, _AGAIN, HOST)


_AGAIN = "Fetch or write the file again"
_TWICE = b'{"w":%a,"w":%a}' % (_entry([2], 0, 2), _entry([2], 2, 4))

FILES: Table = {
    "save-as-safetensors": (Works(save_as_safetensors),),
    "pickled-checkpoints": (
        Raises(
            "unknown-format",
            _pickled,
            "Readable: polyquant",
            "model.pt",
            "it is not a safetensors file",
            TORCH,
        ),
    ),
    "short-header": (
        _bad_file("a header alone takes 8", "the file has 0 bytes", lambda here: b""),
        _bad_file("a header alone takes 8", "the file has 7 bytes", lambda here: b"1234567"),
    ),
    "wrong-magic": (
        Raises(
            "unknown-format",
            lambda here: here.load(b"BURN" + bytes(100), "a.bpk"),
            "Readable: polyquant",
            "a.bpk",
            "it is not a safetensors file",
            HOST,
        ),
        _bad_file("at most 100000000", "is given as", lambda here: b"NRUBNRUB" + bytes(100)),
    ),
    "truncated-header": (
        _bad_file("it should have", "the file ends after 52", lambda here: _saved(here)[:60]),
    ),
    "descending-offsets": (
        _bad_file(
            "pair of ascending numbers", "[4, 0]", lambda here: _file({"w": _entry([4], 4, 0)})
        ),
    ),
    "tensor-size": (
        _bad_file(
            "less than 2^52 elements",
            "[1125899906842624, 4]",
            lambda here: _file({"w": _entry([2**50, 4], 0, 2**52)}),
        ),
    ),
    "later-version": (
        Raises(
            "unsupported-version",
            lambda here: here.load(_later(here)),
            "reads version 1",
            "has version 9",
            "Upgrade polyquant",
            HOST,
        ),
    ),
    "header-size": (
        _bad_file(
            "at most 100000000",
            "is given as 100000001 bytes",
            lambda here: (10**8 + 1).to_bytes(8, "little") + b"{}",
        ),
    ),
    "truncated-tensors": (
        _bad_file("tensors have 80 bytes", "the file has 79", lambda here: _saved(here)[:-1]),
    ),
    "two-tensors-of-a-name": (
        Raises(
            "invalid-name",
            lambda here: _write(here, "ww", here.q),
            "cannot be saved",
            "would be an array of both 'w' and it",
            places=HOST,
        ),
        _bad_file(
            "valid JSON", "the key 'w' stands twice", lambda here: _file(_TWICE.replace(b"'", b'"'))
        ),
    ),
    "length-of-a-tensor": (
        _bad_file(
            "takes 16 bytes as F32 of shape [4]",
            "and has 4",
            lambda here: _file({"w": _entry([4], 0, 4, "F32")}),
        ),
    ),
    "not-as-planned": (
        Raises(
            "invalid-argument",
            lambda here: _write(here, "w", pq.quantize(here.ones(4, 64), "q4s/16:f16")),
            "as planned, TensorInfo(name='w', shape=(4, 32)",
            "what came is TensorInfo(name='w', shape=(4, 64)",
        ),
    ),
}
