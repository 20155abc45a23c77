"""Writing a file whose every byte has its place before the first is written.

A format plans: the head (header included) and where each stored array goes. Tensors then come in
any order, one in memory at a time, and the file takes its place when all have come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from polyquant.arrays import Array
from polyquant.errors import InvalidArgument, InvalidName, TensorNotFound, WriteFailed
from polyquant.files.checkpoint import nearest
from polyquant.files.host import to_host
from polyquant.files.info import TensorInfo
from polyquant.files.replace import Replacement
from polyquant.qtensor import QTensor

#: A stored array: its name among the places, and its bytes as an array of any dtype.
Stored = tuple[str, Any]


class Place(NamedTuple):
    """Where a stored array goes: from ``start``, ``nbytes`` long."""

    start: int
    nbytes: int


class PlannedWriter:
    """A file that is being written, as a context manager; on an error nothing changes.

    Args:
        path: the file.
        plan: every tensor that will come.
        head: the first bytes.
        places: name of a stored array -> its place. What lies between is zero.
        encode: a tensor (NumPy's, or a QTensor on NumPy) -> its stored arrays.
        alignment: the file's length is a multiple of it.
        extra: stored arrays that belong to no tensor of the plan.
    """

    def __init__(
        self,
        path: Path,
        plan: Sequence[TensorInfo],
        *,
        head: bytes,
        places: Mapping[str, Place],
        encode: Callable[[TensorInfo, Any], Iterable[Stored]],
        alignment: int = 1,
        extra: Iterable[Stored] = (),
    ) -> None:
        self.path = path
        self._infos = {info.name: info for info in plan}
        self._head, self._places, self._encode = head, dict(places), encode
        self._alignment, self._extra = alignment, tuple(extra)
        self._written: set[str] = set()
        self._file: Replacement | None = None
        #: The quantization config that belongs into a config.json beside the file; or nothing.
        self.config: dict[str, Any] = {}

    def write(self, name: str, tensor: Array | QTensor) -> None:
        """Write one planned tensor, of any library.

        Raises TensorNotFound (not planned), InvalidName (written before), InvalidArgument (not as
        planned), WriteFailed, and what the format raises for numbers that it cannot hold.
        """
        if name not in self._infos:
            raise TensorNotFound(path=self.path, name=name, nearest=nearest(name, self._infos))
        if name in self._written:
            raise InvalidName(name=name, reason="it has been written already")
        info = self._infos[name]
        got = TensorInfo.of(name, tensor)
        if (got.shape, got.dtype, got.scheme) != (info.shape, info.dtype, info.scheme):
            wanted = f"as planned, {info}"
            raise InvalidArgument(name=f"Tensor {name!r}", wanted=wanted, got=got)
        host = tensor.to("numpy") if isinstance(tensor, QTensor) else to_host(tensor)
        for stored, array in self._encode(info, host):
            self._put(stored, array)
        self._written.add(name)

    def _put(self, stored: str, array: Any) -> None:
        place, raw = self._places[stored], np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if raw.nbytes != place.nbytes:
            wanted = f"{place.nbytes} bytes, as planned"
            raise InvalidArgument(name=f"Array {stored!r}", wanted=wanted, got=raw.nbytes)
        self._open_file().write_at(place.start, raw.data)

    def _open_file(self) -> Replacement:
        if self._file is None:
            reason = "the writer is not open; use it in a with statement"
            kept = "What was there before is untouched"
            raise WriteFailed(path=self.path, reason=reason, kept=kept)
        return self._file

    def __enter__(self) -> PlannedWriter:
        self._file = Replacement(self.path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        file = self._open_file()
        try:
            if kind is None:
                self._finish(file)
        finally:
            file.discard()
            self._file = None

    def _finish(self, file: Replacement) -> None:
        missing = [name for name in self._infos if name not in self._written]
        if missing:
            some = ", ".join(map(repr, missing[:5]))
            reason = f"{len(missing)} of {len(self._infos)} planned tensors are missing: {some}"
            kept = "What was there before is untouched"
            raise WriteFailed(path=self.path, reason=reason, kept=kept)
        for stored, array in self._extra:
            self._put(stored, array)
        file.write_at(0, memoryview(self._head))
        end = max([len(self._head), *(p.start + p.nbytes for p in self._places.values())])
        padding = -end % self._alignment
        if padding:
            file.write_at(end, memoryview(bytes(padding)))
        file.flush()
        file.put_in_place()


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise InvalidName for what no file of texts holds."""
    for key, text in metadata.items():
        check_text(key, key, "a metadata key")
        check_text(key, text, "the metadata under it")


def check_text(name: Any, text: Any, what: str) -> None:
    """Raise InvalidName for what is no text, or has half a character."""
    if not isinstance(text, str):
        raise InvalidName(name=name, reason=f"{what} is of type {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidName(name=name, reason=f"{what} is not valid Unicode ({error})") from None


def kept_origin(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    """What a format kept for itself in the metadata: objects by name; nothing where it is no such.

    Metadata may come from a file, so nothing in them is taken for granted.
    """
    try:
        found = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def member_of(origin: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object among those, or an empty one."""
    found = origin.get(name)
    return found if isinstance(found, dict) else {}


def laid_out(sizes: Iterable[tuple[str, int]], start: int, alignment: int = 1) -> dict[str, Place]:
    """One after the other from ``start``, each at a multiple of ``alignment`` after it."""
    places, at = {}, 0
    for name, nbytes in sizes:
        at = -(-at // alignment) * alignment
        places[name] = Place(start + at, nbytes)
        at += nbytes
    return places
