"""polyquant's own form: safetensors with a manifest of schemes and checksums in the metadata."""

from __future__ import annotations

from functools import partial

from polyquant.arrays import HostArray
from polyquant.data import check_numbers
from polyquant.errors import ChecksumMismatch, InvalidHeader, UnknownFormat
from polyquant.files.checkpoint import Checkpoint, Entry
from polyquant.files.container import Container, MappedFile
from polyquant.files.facts import Facts
from polyquant.files.info import TensorInfo
from polyquant.files.probe import Probe
from polyquant.formats.polyquant import manifest
from polyquant.formats.polyquant.manifest import Manifest, checksum_of_form, file_parts
from polyquant.qtensor import QTensor, from_parts

NAME = "polyquant"
FACTS = Facts(
    tool="polyquant",
    reads="every scheme, with checksums",
    exact="yes",
    writes="every scheme",
    bytes="yes",
    checked="safetensors 0.8 (the arrays)",
)


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this form. Raises InvalidHeader where half of it says that it is."""
    if probe.container is None:
        return "it is not a safetensors file"
    marked = {manifest.is_marked(f.metadata, f.path) for f in probe.container.files}
    if len(marked) > 1:
        reason = "some of its files were written by polyquant and some were not"
        raise InvalidHeader(path=probe.file, reason=reason)
    return None if marked == {True} else "its metadata hold no manifest of polyquant"


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index. Raises InvalidHeader, UnsupportedVersion, and a scheme's errors."""
    container = probe.container
    if container is None:
        raise UnknownFormat(path=probe.file, reason="it is not safetensors", known=NAME)
    manifests = [manifest.parse(file.metadata, file.path) for file in container.files]
    _check_shards(container, manifests)
    entries: dict[str, Entry] = {}
    for file, found in zip(container.files, manifests, strict=True):
        _check_parts(file, found)
        for info in found.tensors:
            if info.name in entries:
                reason = f"tensor {info.name!r} stands in two of its files"
                raise InvalidHeader(path=container.path, reason=reason)
            entries[info.name] = Entry(info, partial(_read, file, info, found.checksums[info.name]))
    metadata = manifests[0].metadata
    return Checkpoint(probe.path, NAME, metadata, entries, release=container.release)


def _check_shards(container: Container, manifests: list[Manifest]) -> None:
    """All shards of one save, each once; a file alone need not be the only one of its save."""

    def refuse(reason: str) -> InvalidHeader:
        return InvalidHeader(path=container.path, reason=reason)

    count = manifests[0].shard[1]
    is_whole = len(manifests) == count
    if len(manifests) > 1 or is_whole:
        if sorted(m.shard for m in manifests) != [(i + 1, count) for i in range(count)]:
            raise refuse(f"its files are not the {count} that were saved together")
        sums: dict[str, str] = {}
        for found in manifests:
            sums |= found.checksums
        if any(m.checkpoint != checksum_of_form(sums) for m in manifests):
            raise refuse("its checksums are not those that were saved together")
        if any(m.metadata != manifests[0].metadata for m in manifests):
            raise refuse("its files have different metadata")
    for file in container.files:
        if any(container.places[name] is not file for name in file.tensors):
            raise refuse(f"the index does not place the tensors of {file.path.name!r} in it")


def _check_parts(file: MappedFile, found: Manifest) -> None:
    """The header holds exactly the arrays that the manifest asks for."""
    parts = [part for info in found.tensors for part in file_parts(info)]
    wanted = {part.name: (part.dtype, part.shape) for part in parts}
    got = {tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors.values()}
    if wanted != got or len(parts) != len(wanted):
        differs = [n for n in (*wanted, *got) if wanted.get(n) != got.get(n)] or ["two tensors"]
        reason = f"header and manifest disagree about {differs[0]!r}"
        raise InvalidHeader(path=file.path, reason=reason)


def _read(file: MappedFile, info: TensorInfo, wanted: str) -> HostArray | QTensor:
    parts = file_parts(info)
    got = manifest.checksum(info, (file.raw_bytes(part.name) for part in parts))
    if got != wanted:
        raise ChecksumMismatch(name=info.name, path=file.path, got=got, wanted=wanted)
    if info.scheme is None:
        return file.read(info.name)
    arrays = {part.part: file.read(part.name) for part in parts}
    check_numbers(arrays, info.scheme, info.stored_shape)
    return from_parts(arrays, info.scheme, info.shape, axes=info.axes, device="numpy")
