"""NumPy's .npz: what NumPy writes, and what only claims to be it."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import CorruptData, InvalidHeader, UnreadableFile, UnsupportedDtype

ARRAYS = {
    "f4": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "big": np.arange(5, dtype=">i4"),
    "f2": np.ones((2, 0, 3), np.float16),
    "bool": np.array([True, False]),
    "scalar": np.uint8(7),
    "c8": np.array([1 + 2j], np.complex64),
    "a.b/c": np.int64(-1),
    "ü": np.ones(1, np.uint16),
}


@pytest.mark.parametrize("pack", [np.savez, np.savez_compressed])
def test_what_numpy_writes(pack: Any, tmp_path: Path) -> None:
    pack(tmp_path / "x.npz", **ARRAYS)
    with pq.open_checkpoint(tmp_path / "x.npz") as checkpoint:
        assert checkpoint.format == "npz"
        assert list(checkpoint) == list(ARRAYS)
        assert set(checkpoint.schemes().values()) == {None}
        for name, array in ARRAYS.items():
            info = checkpoint.info(name)
            assert (info.shape, info.dtype) == (array.shape, array.dtype.name)
            assert info.nbytes == array.nbytes
            np.testing.assert_array_equal(checkpoint[name], array)
            assert checkpoint[name].dtype == array.dtype.newbyteorder("=")
    with pytest.raises(UnreadableFile, match="closed"):
        checkpoint["f4"]


def test_other_devices_and_folders(tmp_path: Path, device: str) -> None:
    np.savez(tmp_path / "x.npz", x=ARRAYS["f4"])
    found = pq.load(tmp_path, device)["x"]
    assert pq.device_of(found) is not None
    np.testing.assert_array_equal(np.from_dlpack(found), ARRAYS["f4"])


def test_nothing_at_all(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz")
    assert pq.load(tmp_path / "x.npz") == {}


def test_known_by_its_magic(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=ARRAYS["f4"])
    (tmp_path / "x.npz").rename(tmp_path / "x.bin")
    assert list(pq.load(tmp_path / "x.bin")) == ["x"]


class Trap:
    """An object that says when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize(
    "array",
    [
        np.array([Trap()], dtype=object),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.zeros(2, "M8[s]"),
        np.ones(3, np.longdouble),
        np.ones(3, np.complex128),
        np.ones(3, ml_dtypes.bfloat16),
    ],
    ids=lambda array: array.dtype.str,
)
def test_objects_and_texts_are_refused(array: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=array)
    with pytest.raises(UnsupportedDtype, match=r"x\.npy"):
        pq.open_checkpoint(tmp_path / "x.npz")


def test_records_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros(2, "f4,f4"))
    with pytest.raises(InvalidHeader, match=r"x\.npy"):
        pq.open_checkpoint(tmp_path / "x.npz")


def write(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def npy(header: str, data: bytes = b"", version: int = 1, length: int | None = None) -> bytes:
    raw = header.encode("latin-1")
    size = (len(raw) if length is None else length).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + raw + data


def form(descr: str = "'<f4'", order: str = "False", shape: str = "(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


def test_the_forms_of_this_test_are_read(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        found = pq.load(write(tmp_path / "x.npz", x=npy(form(), bytes(8), version)))
        assert found["x"].tolist() == [0, 0]


MEMBERS = {
    "nothing": b"",
    "no magic": b"x" * 100,
    "only magic": b"\x93NUMPY",
    "version 9": npy(form(), bytes(8), 9),
    "a length that lies": npy(form(), bytes(8), 1, 60_000),
    "a length of 4 GB": npy(form(), bytes(8), 2, 2**32 - 1),
    "a pickle": pickle.dumps([1, 2]),
    "code": npy(form(shape="(__import__('os').abort(),)"), bytes(8)),
    "deep": npy("(" * 5000, bytes(8)),
    "a list": npy("[1]", bytes(8)),
    "a field missing": npy("{'descr': '<f4', 'shape': (2,)}", bytes(8)),
    "a field twice": npy("{'descr': '<f4', 'descr': '<f4', 'shape': (2,)}", bytes(8)),
    "a field more": npy(form()[:-1] + "'x': 1}", bytes(8)),
    "an order of 1": npy(form(order="1"), bytes(8)),
    "a shape that is a list": npy(form(shape="[2]"), bytes(8)),
    "a negative shape": npy(form(shape="(-2,)"), bytes(8)),
    "a huge shape": npy(form(shape=f"({2**40},{2**40})"), bytes(8)),
    "an endless number": npy(form(shape=f"({'9' * 5000},)"), bytes(8)),
    "too many axes": npy(form(shape=f"({'1,' * 65})"), bytes(4)),
    "too few bytes": npy(form(shape="(3,)"), bytes(8)),
    "too many bytes": npy(form(shape="(1,)"), bytes(8)),
}


@pytest.mark.parametrize("case", MEMBERS)
def test_members_that_are_no_array(case: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidHeader):
        pq.open_checkpoint(write(tmp_path / "x.npz", x=MEMBERS[case]))


@pytest.mark.parametrize(
    "descr", ["'|O'", "'f'", "'<f3'", "'<U3'", "'|V2'", "'<f16'", "''", "'int'"]
)
def test_dtypes_that_are_none(descr: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedDtype):
        pq.open_checkpoint(write(tmp_path / "x.npz", x=npy(form(descr), bytes(8))))


def test_booleans_that_are_neither(tmp_path: Path) -> None:
    path = write(tmp_path / "x.npz", x=npy(form("'|b1'"), b"\1\2"))
    with pq.open_checkpoint(path) as checkpoint, pytest.raises(CorruptData, match="neither"):
        checkpoint["x"]


def test_names_that_stand_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", npy(form(), bytes(8)))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x.npy", npy(form(), bytes(8)))
    with pytest.raises(InvalidHeader, match="twice"):
        pq.open_checkpoint(tmp_path / "x.npz")


def test_members_that_are_no_npy(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("readme.txt", "text")
    with pytest.raises(InvalidHeader, match=r"readme\.txt"):
        pq.open_checkpoint(tmp_path / "x.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_packings_that_numpy_has_not(method: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as archive:
        archive.writestr("x.npy", npy(form(), bytes(8)))
    with pytest.raises(InvalidHeader, match="packed"):
        pq.open_checkpoint(tmp_path / "x.npz")


def test_a_size_that_no_packing_reaches(tmp_path: Path) -> None:
    """A directory that promises gigabytes of a member of a few bytes: refused before allocating."""
    path = write(tmp_path / "x.npz", x=npy(form(shape="(1000000000,)"), bytes(8)))
    whole = bytearray(path.read_bytes())
    size = 4_000_000_000 + len(npy(form(shape="(1000000000,)")))
    at = whole.index(b"PK\x01\x02") + 24
    whole[at : at + 4] = size.to_bytes(4, "little")
    path.write_bytes(whole)
    with pytest.raises(InvalidHeader, match="packed"):
        pq.open_checkpoint(path)


def test_other_zips_are_not_taken_for_one(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps(1))
    (tmp_path / "model.pt").write_bytes(buffer.getvalue())
    with pytest.raises(pq.errors.UnknownFormat, match=r"not npz.*not safetensors"):
        pq.open_checkpoint(tmp_path / "model.pt")
