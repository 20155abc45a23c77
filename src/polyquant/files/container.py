"""The safetensors container, read lazily: strict headers, mapped bytes, one file or many.

A file is ``u64 length | JSON header | bytes``. The header gives each tensor's dtype, shape and
range of bytes; ranges cover the bytes exactly. Several files are one container when an index
(``{"metadata": {}, "weight_map": {tensor: file}}``) says so.
"""

from __future__ import annotations

import math
import mmap
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polyquant.arrays import HostArray
from polyquant.errors import CorruptData, InvalidHeader, PolyquantError, UnreadableFile
from polyquant.files.info import FILE_DTYPES, array_dtype
from polyquant.files.strict_json import parse_object

#: What the safetensors library accepts at most.
HEADER_LIMIT_BYTES = 100_000_000
#: Extents multiply to less than this even where one is zero: exact in a float64 and no overflow in
#: any library. NumPy's limit of axes is 64.
ELEMENTS_LIMIT, RANK_LIMIT = 2**52, 64

INDEX_SUFFIX = ".safetensors.index.json"
_ENTRY_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


class RawTensor(NamedTuple):
    """One tensor of a header: dtype code, shape, and its range in the file's bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class MappedFile:
    """One safetensors file: its header, and its bytes mapped but not read."""

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, RawTensor]
    buffer: mmap.mmap

    def raw_bytes(self, name: str) -> memoryview:
        """The stored bytes of a tensor."""
        tensor = self.tensors[name]
        return memoryview(self.buffer)[tensor.start : tensor.stop]

    def read(self, name: str) -> HostArray:
        """A tensor as a read-only view of the map (a copy where its bytes are not aligned).

        Raises UnsupportedDtype (below 8 bits), CorruptData (a boolean that is neither 0 nor 1).
        """
        tensor = self.tensors[name]
        what = f"Tensor {name!r} of {self.path}"
        kind = array_dtype(FILE_DTYPES[tensor.dtype].name, what).host
        flat = np.frombuffer(self.raw_bytes(name), np.uint8)
        check_booleans(flat, kind, what)
        made = flat.view(kind).reshape(tensor.shape)
        if not made.flags.aligned:
            made = made.copy()
            made.flags.writeable = False
        return made

    def release(self) -> None:
        """Give the mapped pages back to the system. Views of them stay valid, and map them anew."""
        release_pages(self.buffer)


@dataclass(frozen=True)
class Container:
    """One safetensors file, or all those that an index names. ``places``: tensor -> its file."""

    path: Path
    files: tuple[MappedFile, ...]
    places: Mapping[str, MappedFile]

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata on which all files agree."""
        first, *rest = (file.metadata for file in self.files)
        return {k: v for k, v in first.items() if all(other.get(k) == v for other in rest)}

    def release(self) -> None:
        """Give the mapped pages of all files back to the system."""
        for file in self.files:
            file.release()


def open_file(path: Path) -> MappedFile:
    """Map a safetensors file and read its header. Raises UnreadableFile, InvalidHeader."""
    size, buffer = map_file(path)
    length = int.from_bytes(buffer[:8], "little")
    if length > HEADER_LIMIT_BYTES:
        reason = f"its length is given as {length} bytes; at most {HEADER_LIMIT_BYTES} are allowed"
        raise InvalidHeader(path=path, reason=reason)
    if 8 + length > size:
        reason = f"it should have {length} bytes, and the file ends after {size - 8}"
        raise InvalidHeader(path=path, reason=reason)
    header = parse_object(buffer[8 : 8 + length], path, "the header")
    metadata = _metadata(header.pop("__metadata__", {}), path)
    tensors = _tensors(header, size - 8 - length, path)
    placed = {
        t.name: t._replace(start=t.start + 8 + length, stop=t.stop + 8 + length) for t in tensors
    }
    return MappedFile(path, metadata, placed, buffer)


def release_pages(buffer: mmap.mmap) -> None:
    """Give the pages of a mapped file back to the system, where it knows how."""
    if hasattr(mmap, "MADV_DONTNEED"):
        buffer.madvise(mmap.MADV_DONTNEED)


def map_file(path: Path) -> tuple[int, mmap.mmap]:
    """The size of a file, and its bytes mapped. Raises UnreadableFile, InvalidHeader."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            reason = f"the file has {size} bytes, and the length of a header alone takes 8"
            raise InvalidHeader(path=path, reason=reason)
        return size, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """A regular file, open for reading. Raises UnreadableFile, also for what the system refuses."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
            raise UnreadableFile(path=path, reason="it is not a regular file")
        with open(path, "rb") as file:
            yield file
    except PolyquantError:
        raise
    except (OSError, ValueError, OverflowError) as error:  # a NUL in the path; no address space
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadableFile(path=path, reason=reason) from error


def _metadata(found: Any, path: Path) -> dict[str, str]:
    found = {} if found is None else found  # as MLX writes it where there are none
    if not isinstance(found, dict) or any(type(item) is not str for item in found.values()):
        raise InvalidHeader(path=path, reason="its __metadata__ is not an object of texts")
    return found


def _tensors(header: dict[str, Any], data_size: int, path: Path) -> list[RawTensor]:
    """The tensors in the order of their bytes, which they must cover without gap or overlap."""
    found = [_tensor(name, entry, path) for name, entry in header.items()]
    found.sort(key=lambda tensor: (tensor.start, tensor.stop))
    end = 0
    for tensor in found:
        if tensor.start != end:
            reason = f"the bytes of {tensor.name!r} start at {tensor.start}, and should at {end}"
            raise InvalidHeader(path=path, reason=reason)
        end = tensor.stop
    if end != data_size:
        reason = f"its tensors have {end} bytes, and the file has {data_size}"
        raise InvalidHeader(path=path, reason=reason)
    return found


def _tensor(name: str, entry: Any, path: Path) -> RawTensor:
    def refuse(reason: str) -> InvalidHeader:
        return InvalidHeader(path=path, reason=f"the entry of tensor {name!r} {reason}")

    if not isinstance(entry, dict) or set(entry) != _ENTRY_FIELDS:
        raise refuse(f"must have exactly {', '.join(sorted(_ENTRY_FIELDS))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in FILE_DTYPES:
        raise refuse(f"has the dtype {dtype!r}; known: {', '.join(FILE_DTYPES)}")
    if not is_shape(shape):
        limits = f"at most {RANK_LIMIT} extents and less than 2^52 elements"
        raise refuse(f"has a shape that is no list of {limits}: {reprlib.repr(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(
            f"has data_offsets that are no pair of ascending numbers: {reprlib.repr(offsets)}"
        )
    wanted = math.prod(shape) * FILE_DTYPES[dtype].bits
    if wanted != (offsets[1] - offsets[0]) * 8:
        got = offsets[1] - offsets[0]
        raise refuse(f"takes {wanted / 8:g} bytes as {dtype} of shape {shape}, and has {got}")
    return RawTensor(name, dtype, tuple(shape), offsets[0], offsets[1])


def check_booleans(data: HostArray, kind: np.dtype[Any], what: str) -> None:
    """Raise CorruptData for bytes that NumPy and torch would take as neither true nor false."""
    if kind == np.bool_ and (data > 1).any():
        raise CorruptData(what=what, reason="it has booleans that are neither 0 nor 1")


def is_shape(found: Any) -> bool:
    """Whether JSON is a list of extents that every array library can hold."""
    if not _are_sizes(found) or len(found) > RANK_LIMIT:
        return False
    elements: int = math.prod(max(extent, 1) for extent in found)
    return elements < ELEMENTS_LIMIT


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list) and all(type(n) is int and 0 <= n < 2**63 for n in found)


# -- several files ----------------------------------------------------------------------------


def open_container(path: Path) -> Container:
    """The container of a safetensors file, or of an index and its files.

    Raises UnreadableFile, InvalidHeader.
    """
    if path.name.endswith(INDEX_SUFFIX):
        return _open_index(path)
    file = open_file(path)
    return Container(path, (file,), dict.fromkeys(file.tensors, file))


def _open_index(path: Path) -> Container:
    weight_map = read_index(path)
    files: dict[str, MappedFile] = {}
    for name in sorted(set(weight_map.values())):
        try:
            files[name] = open_file(path.parent / name)
        except UnreadableFile as error:
            reason = f"its file {name!r} cannot be read ({error.facts['reason']})"
            raise InvalidHeader(path=path, reason=reason) from error
    for tensor, name in weight_map.items():
        if tensor not in files[name].tensors:
            raise InvalidHeader(path=path, reason=f"tensor {tensor!r} is not in {name!r}")
    for name, file in files.items():
        for tensor in file.tensors:
            if tensor not in weight_map:
                reason = f"tensor {tensor!r} of {name!r} is not listed"
                raise InvalidHeader(path=path, reason=reason)
    places = {tensor: files[name] for tensor, name in weight_map.items()}
    return Container(path, tuple(files.values()), places)


def read_index(path: Path) -> dict[str, str]:
    """Tensor -> plain name of the file beside the index that holds it.

    Raises UnreadableFile, InvalidHeader.
    """
    index = parse_object(read_small(path), path, "the index")
    found = index.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise InvalidHeader(path=path, reason="an index has a weight_map that is not empty")
    for name in found.values():
        if not _is_file_name(name):
            reason = f"{reprlib.repr(name)} is not the plain name of a .safetensors file beside it"
            raise InvalidHeader(path=path, reason=reason)
    return found


def _is_file_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not set(name) & {"/", "\\", "\0", ":"}
        and not name.startswith(".")
    )


def read_small(path: Path) -> bytes:
    """The bytes of a JSON file that stands beside tensors. Raises UnreadableFile, InvalidHeader."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > HEADER_LIMIT_BYTES:
            reason = f"it has {size} bytes, and no such file is as large"
            raise InvalidHeader(path=path, reason=reason)
        return file.read(size)
