"""Which files a quantized checkpoint goes to: one, or the shards that its source has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from polyquant.errors import InvalidArgument
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.container import INDEX_SUFFIX
from polyquant.files.info import TensorInfo
from polyquant.files.probe import Probe
from polyquant.formats import Writer
from polyquant.formats.gguf import parts_of
from polyquant.formats.polyquant.manifest import RESERVED

_SUFFIX = ".safetensors"


def open_writer(source: Checkpoint, out: Path, plan: Sequence[TensorInfo]) -> Writer:
    """The writer of ``plan`` to ``out``, with the metadata of the source.

    ``out`` ends in ``.safetensors`` (one file), or in ``.safetensors.index.json``: then tensors
    that shared a file in the source share one again. Raises InvalidArgument for another ending and
    where ``out`` would replace a file of the source, and what Writer raises.
    """
    metadata = {key: text for key, text in source.metadata.items() if key not in RESERVED}
    probe = Probe(source.path)
    if out.name.endswith(INDEX_SUFFIX):
        path = out.with_name(out.name.removesuffix(".index.json"))
        shards = _shards(probe, [info.name for info in plan])
        check_apart(probe, [out, path, *_shard_paths(path, len(shards))])
        return Writer(path, plan, metadata=metadata, shards=shards)
    if not out.name.endswith(_SUFFIX):
        wanted = f"a name that ends in {_SUFFIX}, or in {INDEX_SUFFIX} to keep the shards"
        raise InvalidArgument(name="OUT", wanted=wanted, got=str(out))
    check_apart(probe, [out])
    return Writer(out, plan, metadata=metadata)


def shards_of(path: Path, names: Sequence[str]) -> list[list[str]]:
    """The names that each file of a checkpoint holds. A name that is no array's own goes with the
    file of its first part."""
    return _shards(Probe(path), names)


def _shards(probe: Probe, names: Sequence[str]) -> list[list[str]]:
    """The names that each file of the source holds, in the order of the files' names."""
    if probe.container is None:
        return [list(names)]
    places = {name: file.path.name for name, file in probe.container.places.items()}
    parts = _places_of_stems(places)
    last = min(places.values(), default="")
    place_of = {
        name: places.get(name) or parts.get(name) or parts.get(name.removesuffix(".weight"), last)
        for name in names
    }
    files = sorted({place_of[name] for name in names})
    return [[name for name in names if place_of[name] == file] for file in files]


def _places_of_stems(places: Mapping[str, str]) -> dict[str, str]:
    """By all that a name begins with, up to a dot or a line: the file of the first such array. Of
    a tensor that other tools store as several arrays, that is the file of its first part."""
    found: dict[str, str] = {}
    for array, place in places.items():
        for end in (at for at, character in enumerate(array) if character in "._"):
            found.setdefault(array[:end], place)
    return found


def _shard_paths(path: Path, count: int) -> list[Path]:
    stem = path.name.removesuffix(_SUFFIX)
    return [path.with_name(f"{stem}-{i + 1:05}-of-{count:05}{_SUFFIX}") for i in range(count)]


def files_of(probe: Probe) -> list[Path]:
    """All files of a checkpoint: an index and what it names, the parts of a GGUF, or the one."""
    container = probe.container
    if container is not None:
        return [*dict.fromkeys([probe.file, *(file.path for file in container.files)])]
    return parts_of(probe.file)


def check_apart(probe: Probe, written: Iterable[Path]) -> None:
    """Refuse to replace a file that is being read."""
    inputs = {path.resolve() for path in files_of(probe)}
    for path in written:
        if path.resolve() in inputs:
            wanted = f"another file than the input ({path.name} is one of its files)"
            raise InvalidArgument(name="OUT", wanted=wanted, got=str(path))
