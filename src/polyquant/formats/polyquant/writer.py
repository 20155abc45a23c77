"""Writing polyquant's own form, one tensor at a time, in memory for one tensor.

All sizes follow from the plan, so each tensor's place in the file is known before any tensor
exists; the header, whose checksums have a fixed width, is written last.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from polyquant.arrays import Array
from polyquant.errors import (
    InvalidArgument,
    InvalidName,
    PolyquantError,
    TensorNotFound,
    WriteFailed,
)
from polyquant.files.checkpoint import nearest
from polyquant.files.container import HEADER_LIMIT_BYTES, INDEX_SUFFIX, read_index
from polyquant.files.host import little_endian_bytes, to_host
from polyquant.files.info import FILE_DTYPES, TensorInfo
from polyquant.files.probe import as_path
from polyquant.files.replace import Replacement
from polyquant.files.writing import Place, PlannedWriter, check_metadata, check_text
from polyquant.formats.polyquant import manifest
from polyquant.formats.polyquant.manifest import PENDING, file_parts
from polyquant.qtensor import QTensor

_SUFFIX = ".safetensors"
_UNTOUCHED = "What was there before is untouched"


class Writer:
    """A file of planned tensors, written in any order, that takes its place when all are there.

    ::

        plan = [TensorInfo.quantized("w", (4096, 4096), pq.scheme("nf4"))]
        with Writer("model.safetensors", plan) as writer:
            writer.write("w", pq.quantize(w, "nf4"))

    On a clean exit the files are brought to the disk and renamed; on an error they are removed, and
    what was there before is untouched.

    Args:
        path: a name that ends in ".safetensors".
        plan: what will be written: a TensorInfo for each tensor.
        metadata: texts to keep beside the tensors.
        shard_size_bytes: None for one file; else files of at most that many bytes of tensors (a
            larger tensor has a file of its own), and an index.
        shards: instead, the names that each file shall hold, every planned one once; and an index.

    Raises:
        InvalidName, InvalidArgument: before anything is written.
        WriteFailed: on entering, writing or leaving.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        plan: Sequence[TensorInfo],
        *,
        metadata: Mapping[str, str] | None = None,
        shard_size_bytes: int | None = None,
        shards: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.path = _check_path(path)
        self._metadata = _check_metadata(metadata)
        self._plan = tuple(plan)
        _check_names(self._plan)
        self._is_sharded = shard_size_bytes is not None or shards is not None
        groups = _groups(self._plan, shard_size_bytes)
        if shards is not None:
            groups = _given_groups(self._plan, shards)
        names = self._shard_names(len(groups))
        self._shards = [
            _Shard(self.path.with_name(name), group, (i + 1, len(groups)), self._metadata)
            for i, (name, group) in enumerate(zip(names, groups, strict=True))
        ]
        self._shard_of = {info.name: shard for shard in self._shards for info in shard.infos}
        self._infos = {info.name: info for info in self._plan}
        self._checksums: dict[str, str] = {}
        self._files: dict[str, Replacement] = {}

    def write(self, name: str, tensor: Array | QTensor) -> None:
        """Write one planned tensor, of any library.

        Raises TensorNotFound (not planned), InvalidName (written before), InvalidArgument (not as
        planned), NotAnArray, UnsupportedDtype, WriteFailed.
        """
        if name not in self._infos:
            raise TensorNotFound(path=self.path, name=name, nearest=nearest(name, self._infos))
        if name in self._checksums:
            raise InvalidName(name=name, reason="it has been written already")
        info, got = self._infos[name], TensorInfo.of(name, tensor)
        if got != info:
            argument = f"Tensor {name!r}"
            raise InvalidArgument(name=argument, wanted=f"as planned, {info}", got=got)
        shard = self._shard_of[name]
        if shard.path.name not in self._files:
            reason = "the writer is not open; use it in a with statement"
            raise WriteFailed(path=self.path, reason=reason, kept=_UNTOUCHED)
        host = tensor.to("numpy").parts() if isinstance(tensor, QTensor) else {"": to_host(tensor)}
        parts = file_parts(info)
        runs = [little_endian_bytes(host[part.part], FILE_DTYPES[part.dtype]) for part in parts]
        for part, run in zip(parts, runs, strict=True):
            self._files[shard.path.name].write_at(shard.places[part.name].start, run.data)
        self._checksums[name] = manifest.checksum(info, runs)

    def __enter__(self) -> Writer:
        paths = [shard.path for shard in self._shards]
        if os.path.isdir(self.path):
            reason = "there is a folder of that name"
            raise WriteFailed(path=self.path, reason=reason, kept=_UNTOUCHED)
        with ExitStack() as undo:
            undo.callback(self._discard)
            for path in [*paths, self._index_path()] if self._is_sharded else paths:
                self._files[path.name] = Replacement(path)
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._discard()

    def _finish(self) -> None:
        missing = [name for name in self._infos if name not in self._checksums]
        if missing:
            some = ", ".join(map(repr, missing[:5]))
            reason = f"{len(missing)} of {len(self._infos)} planned tensors are missing: {some}"
            raise WriteFailed(path=self.path, reason=reason, kept=_UNTOUCHED)
        checkpoint = manifest.checksum_of_form(self._checksums)
        for shard in self._shards:
            header = shard.header(self._checksums, checkpoint)
            self._files[shard.path.name].write_at(0, memoryview(header))
        if self._is_sharded:
            index = self._index_path()
            self._files[index.name].write_at(0, memoryview(self._index()))
        for file in self._files.values():
            file.flush()
        self._put_in_place()

    def _put_in_place(self) -> None:
        """Rename all, the index last; then remove what of an earlier save is out of date."""
        outdated = self._outdated()
        for count, file in enumerate(self._files.values()):
            try:
                file.put_in_place()
            except WriteFailed as error:
                if not count:
                    raise
                kept = f"{count} of {len(self._files)} files are already new; save again"
                raise WriteFailed(
                    path=file.path, reason=error.facts["reason"], kept=kept
                ) from error
        for old in outdated:
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                reason = f"{old.name}, of an earlier save, cannot be removed ({error.strerror})"
                kept = "The new files are complete and in place; remove that one"
                raise WriteFailed(path=self.path, reason=reason, kept=kept) from error

    def _outdated(self) -> list[Path]:
        """What an earlier save to this path left and this one does not replace.

        That is the single file or the index, and of the old index those files that are named as
        shards of this path.
        """
        index = self._index_path()
        try:
            listed = set(read_index(index).values()) if os.path.exists(index) else set()
        except PolyquantError:  # no index of ours
            listed = set()
        stem = re.escape(self.path.name.removesuffix(_SUFFIX))
        shards = [name for name in listed if re.fullmatch(rf"{stem}-\d+-of-\d+{_SUFFIX}", name)]
        names = [self.path.name, index.name, *sorted(shards)]
        found = [self.path.with_name(name) for name in names if name not in self._files]
        return [path for path in found if os.path.lexists(path)]

    def _discard(self) -> None:
        for file in self._files.values():
            file.discard()
        self._files.clear()

    def _shard_names(self, count: int) -> list[str]:
        if not self._is_sharded:
            return [self.path.name]
        stem = self.path.name.removesuffix(_SUFFIX)
        return [f"{stem}-{i + 1:05}-of-{count:05}{_SUFFIX}" for i in range(count)]

    def _index_path(self) -> Path:
        return self.path.with_name(self.path.name.removesuffix(_SUFFIX) + INDEX_SUFFIX)

    def _index(self) -> bytes:
        """The index as Hugging Face's libraries write and read it."""
        total = sum(info.nbytes for info in self._plan)
        weight_map = {name: shard.path.name for shard in self._shards for name in shard.places}
        form = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(form, indent=2) + "\n").encode()


# -- one file ---------------------------------------------------------------------------------


class _Place(NamedTuple):
    start: int
    entry: dict[str, Any]


class _Shard:
    """The layout of one file: where each array goes, and the header.

    Arrays of wide elements come first, so that every array is aligned to its elements.
    """

    def __init__(
        self,
        path: Path,
        infos: Sequence[TensorInfo],
        number: tuple[int, int],
        metadata: Mapping[str, str],
    ) -> None:
        self.path, self.infos = path, tuple(infos)
        self._number, self._metadata = number, metadata
        parts = [part for info in infos for part in file_parts(info)]
        parts.sort(key=lambda part: -FILE_DTYPES[part.dtype].bits)
        self._entries: dict[str, dict[str, Any]] = {}
        at = 0
        for part in parts:
            offsets = (at, at + part.nbytes)
            self._entries[part.name] = {
                "dtype": part.dtype,
                "shape": part.shape,
                "data_offsets": offsets,
            }
            at += part.nbytes
        pending = dict.fromkeys((info.name for info in infos), PENDING)
        base = len(self.header(pending, PENDING))
        if base > HEADER_LIMIT_BYTES:
            reason = f"the header of {len(infos)} tensors would have {base} bytes"
            kept = f"Readers take {HEADER_LIMIT_BYTES}; save in shards. {_UNTOUCHED}"
            raise WriteFailed(path=path, reason=reason, kept=kept)
        self.places = {
            name: _Place(base + entry["data_offsets"][0], entry)
            for name, entry in self._entries.items()
        }

    def header(self, checksums: Mapping[str, str], checkpoint: str) -> bytes:
        """The length and the JSON, padded with spaces to a multiple of 8 bytes."""
        metadata = manifest.to_metadata(
            self.infos, self._number, self._metadata, checksums, checkpoint
        )
        form = {"__metadata__": metadata} | self._entries
        text = json.dumps(form, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


class ShardFile(PlannedWriter):
    """One file of several that are written apart: its checksum of all of them is still pending.

    ``header`` makes the bytes that go to the file's beginning once all checksums are known.
    """

    def __init__(
        self,
        path: Path,
        plan: Sequence[TensorInfo],
        number: tuple[int, int],
        metadata: Mapping[str, str],
    ) -> None:
        _check_names(plan)
        shard = _Shard(path, plan, number, _check_metadata(metadata))
        places = {
            part.name: Place(shard.places[part.name].start, part.nbytes)
            for info in plan
            for part in file_parts(info)
        }
        self.header = shard.header
        self.checksums: dict[str, str] = {}
        head = shard.header(dict.fromkeys((info.name for info in plan), PENDING), PENDING)
        super().__init__(path, plan, head=head, places=places, encode=self._encoded)

    def _encoded(self, info: TensorInfo, tensor: Any) -> Iterator[tuple[str, Any]]:
        host = tensor.parts() if isinstance(tensor, QTensor) else {"": tensor}
        parts = file_parts(info)
        runs = [little_endian_bytes(host[part.part], FILE_DTYPES[part.dtype]) for part in parts]
        self.checksums[info.name] = manifest.checksum(info, runs)
        yield from zip((part.name for part in parts), runs, strict=True)


def _groups(plan: Sequence[TensorInfo], size_bytes: int | None) -> list[list[TensorInfo]]:
    if size_bytes is None:
        return [list(plan)]
    if isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or size_bytes < 1:
        wanted = "a whole number of at least 1, or None for one file"
        raise InvalidArgument(name="shard_size_bytes", wanted=wanted, got=size_bytes)
    if not plan:
        raise InvalidArgument(name="tensors", wanted="at least one tensor a shard", got="none")
    groups: list[list[TensorInfo]] = [[]]
    filled = 0
    for info in plan:
        if groups[-1] and filled + info.nbytes > size_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(info)
        filled += info.nbytes
    return groups


def _given_groups(
    plan: Sequence[TensorInfo], shards: Sequence[Sequence[str]]
) -> list[list[TensorInfo]]:
    infos = {info.name: info for info in plan}
    names = [name for shard in shards for name in shard]
    if sorted(names) != sorted(infos) or not all(shards) or not shards:
        wanted = "lists of names, none empty, that hold every planned name once"
        raise InvalidArgument(name="shards", wanted=wanted, got=shards)
    return [[infos[name] for name in shard] for shard in shards]


# -- the door ---------------------------------------------------------------------------------


def _check_path(path: str | os.PathLike[str]) -> Path:
    made = as_path(path)
    if not made.name.endswith(_SUFFIX) or made.name == _SUFFIX:
        raise InvalidArgument(name="path", wanted=f"a name that ends in {_SUFFIX}", got=str(path))
    return made


def _check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if metadata is not None and not isinstance(metadata, Mapping):
        wanted = "a mapping of texts, or None"
        raise InvalidArgument(name="metadata", wanted=wanted, got=metadata)
    found = dict(metadata or {})
    for key in found:
        if key in manifest.RESERVED:
            raise InvalidName(name=key, reason="polyquant keeps that metadata key for itself")
    check_metadata(found)
    return found


def _check_names(plan: Iterable[TensorInfo]) -> None:
    owners: dict[str, str] = {}
    for info in plan:
        check_text(info.name, info.name, "a tensor's name")
        if info.name in ("", "__metadata__"):
            raise InvalidName(name=info.name, reason="a tensor cannot have that name")
        for part in file_parts(info):
            if part.name in owners:
                reason = f"{part.name!r} would be an array of both {owners[part.name]!r} and it"
                raise InvalidName(name=info.name, reason=reason)
            owners[part.name] = info.name
