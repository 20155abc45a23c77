"""NumPy's ``.npz``: a zip of ``.npy`` members, read one at a time, never unpickled."""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyquant.arrays import HostArray
from polyquant.errors import InvalidHeader, PolyquantError, UnreadableFile, UnsupportedDtype
from polyquant.files.checkpoint import Checkpoint, Entry
from polyquant.files.container import check_booleans, is_shape
from polyquant.files.facts import Facts
from polyquant.files.info import ARRAY_DTYPES, TensorInfo
from polyquant.files.probe import Probe

NAME = "npz"
FACTS = Facts(
    tool="NumPy",
    reads="arrays of numbers",
    exact="yes",
)

#: NumPy's own limit on the text of a member's header.
_HEADER_LIMIT_BYTES = 10_000
#: Deflate packs at most 1032 bytes into one, so a member that claims more is a lie.
_DEFLATE_RATIO = 1032
_MAGIC = b"\x93NUMPY"
#: Of a zip: its end without the comment, "see elsewhere" for a count, the flag of a UTF-8 name.
_END_SIZE_BYTES, _MANY, _UTF8_NAME = 22, 0xFFFF, 0x800
_NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8)")
#: The text that NumPy writes, ``{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }``, with
#: the fields in any order. Read by this pattern, for an evaluated text could be anything.
_HEADER = re.compile(
    r"\s*\{(?:\s*'(?:"
    r"descr'\s*:\s*'(?P<descr>[^'\\]*)'"
    r"|fortran_order'\s*:\s*(?P<order>True|False)"
    r"|shape'\s*:\s*\((?P<shape>\s*(?:[0-9]{1,19}\s*,\s*)*(?:[0-9]{1,19}\s*)?)\)"
    r")\s*(?:,|(?=\}))){3}\s*\}\s*"
)


class _Member(NamedTuple):
    """One ``.npy``: dtype, shape, order, and where its numbers start."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    start: int


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    is_zip_of_arrays = probe.head[:4] == b"PK\x03\x04" and b".npy" in probe.head
    if is_zip_of_arrays or probe.file.suffix == ".npz":
        return None
    return "it is neither named .npz nor a zip file of .npy members"


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file: reads the directory and each member's header.

    Raises UnreadableFile, InvalidHeader, UnsupportedDtype (objects, texts, records).
    """
    with _reading(probe.file), ExitStack() as undo:
        archive = undo.enter_context(zipfile.ZipFile(probe.file))
        entries = dict(_entries(archive, probe.file))
        undo.pop_all()
    return Checkpoint(probe.path, NAME, {}, entries, archive.close)


def _entries(archive: zipfile.ZipFile, path: Path) -> Iterator[tuple[str, Entry]]:
    _check_count(archive, path)
    seen: set[str] = set()
    for zipped in archive.infolist():
        name = zipped.filename.removesuffix(".npy")
        is_named = zipped.filename.isascii() or zipped.flag_bits & _UTF8_NAME
        if name in seen or not zipped.filename.endswith(".npy") or not is_named:
            reason = f"member {zipped.filename!r} stands there twice, or is no .npy"
            raise InvalidHeader(path=path, reason=reason)
        seen.add(name)
        member = _open_member(archive, zipped, path)
        nbytes = math.prod(member.shape) * member.dtype.itemsize
        axes = tuple(range(len(member.shape)))
        info = TensorInfo(name, member.shape, member.dtype.name, None, nbytes, axes)
        yield name, Entry(info, partial(_read, archive, zipped, member, path))


def _check_count(archive: zipfile.ZipFile, path: Path) -> None:
    """The directory's entries are as many as the zip's end says; zipfile itself does not look."""
    with _reading(path), open(path, "rb") as file:
        file.seek(-_END_SIZE_BYTES - len(archive.comment), 2)
        end = file.read(_END_SIZE_BYTES)
    count, found = int.from_bytes(end[10:12], "little"), len(archive.infolist())
    if end[:4] != b"PK\x05\x06" or count not in (found, _MANY):
        raise InvalidHeader(path=path, reason=f"its directory has {found} entries of {count}")


def _open_member(archive: zipfile.ZipFile, zipped: zipfile.ZipInfo, path: Path) -> _Member:
    """The header of a member, checked against the sizes of the zip's directory."""
    most = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _DEFLATE_RATIO}.get(zipped.compress_type)
    if most is None or zipped.flag_bits & 1 or zipped.file_size > zipped.compress_size * most:
        reason = f"member {zipped.filename!r} is encrypted, or packed as NumPy packs nothing"
        raise InvalidHeader(path=path, reason=reason)
    with _reading(path), archive.open(zipped) as stream:
        head = stream.read(8)
        width = {1: 2, 2: 4, 3: 4}.get(head[6]) if len(head) == 8 else None
        if head[:6] != _MAGIC or width is None:
            raise InvalidHeader(path=path, reason=f"member {zipped.filename!r} is no .npy")
        length = int.from_bytes(stream.read(width), "little")
        if length > _HEADER_LIMIT_BYTES:
            reason = f"the header of member {zipped.filename!r} claims {length} bytes"
            raise InvalidHeader(path=path, reason=reason)
        text = stream.read(length).decode("utf-8" if head[6] == 3 else "latin-1")
    member = _parse(text, 8 + width + length, zipped.filename, path)
    wanted = member.start + math.prod(member.shape) * member.dtype.itemsize
    if wanted != zipped.file_size:
        reason = f"member {zipped.filename!r} should have {wanted} bytes, not {zipped.file_size}"
        raise InvalidHeader(path=path, reason=reason)
    return member


def _parse(text: str, start: int, name: str, path: Path) -> _Member:
    found = _HEADER.fullmatch(text)
    if found is None or None in found.groups():
        reason = f"member {name!r} has no header of an array of numbers"
        raise InvalidHeader(path=path, reason=reason)
    shape = [int(extent) for extent in found["shape"].split(",") if extent.strip()]
    if not is_shape(shape):
        raise InvalidHeader(path=path, reason=f"member {name!r} has no valid shape: {shape}")
    dtype = _dtype(found["descr"], f"Member {name!r} of {path}")
    return _Member(dtype, tuple(shape), found["order"] == "True", start)


def _dtype(description: str, what: str) -> np.dtype[Any]:
    """The dtype of NumPy's description, such as "<f4". Objects, texts and times are refused."""
    made = np.dtype(description) if _NUMBERS.fullmatch(description) else None
    if made is None or made.name not in ARRAY_DTYPES:
        known = ", ".join(ARRAY_DTYPES)
        raise UnsupportedDtype(what=what, dtype=repr(description[:40]), known=known)
    return made


def _read(
    archive: zipfile.ZipFile, zipped: zipfile.ZipInfo, member: _Member, path: Path
) -> HostArray:
    """A member's array. The zip's checksum is compared as its end is reached."""
    with _reading(path), archive.open(zipped) as stream:
        data = stream.read()
    if len(data) != zipped.file_size:
        reason = f"member {zipped.filename!r} ends after {len(data)} of {zipped.file_size} bytes"
        raise InvalidHeader(path=path, reason=reason)
    flat = np.frombuffer(data, np.uint8, offset=member.start)
    check_booleans(flat, member.dtype, f"Member {zipped.filename!r} of {path}")
    native: HostArray = flat.view(member.dtype).astype(member.dtype.newbyteorder("="))
    return native.reshape(member.shape, order="F" if member.is_fortran else "C")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Everything that a damaged zip makes the standard library raise, as one error."""
    try:
        yield
    except PolyquantError:
        raise
    except OSError as error:
        raise UnreadableFile(path=path, reason=error.strerror or str(error)) from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,  # a zip feature that Python lacks
        RuntimeError,  # encrypted
        ValueError,
        KeyError,
        OverflowError,
        struct.error,
    ) as error:
        reason = f"the zip is damaged ({type(error).__name__}: {error})"
        raise InvalidHeader(path=path, reason=reason) from error
