"""The manifest of polyquant's own files: JSON in the metadata of a safetensors header.

::

    "format": "polyquant"            the second marker: one without the other is damage
    "polyquant": {"version": 1, "shard": [1, 1], "checkpoint": SUM, "header": SUM,
                  "tensors": {
                      name: {"scheme": {...}, "shape": [...], "axes": [...], "checksum": SUM},
                      name: {"dtype": "F32", "shape": [...], "checksum": SUM}}}

SUM is "crc32:" and 8 hexadecimal digits: of a tensor, over its canonical description and then its
bytes; "checkpoint" over the checksums of all tensors of all shards, so that shards of different
saves are told apart; "header" over the rest of the manifest and the user's metadata.
"""

from __future__ import annotations

import json
import reprlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from polyquant.data import check_axes, parts, stored_shape
from polyquant.errors import InvalidHeader, UnsupportedVersion
from polyquant.files.container import is_shape
from polyquant.files.info import ARRAY_DTYPES, FILE_DTYPES, TensorInfo
from polyquant.files.strict_json import canonical, parse_object
from polyquant.scheme import QuantScheme

#: Version of the layout. A change of what a field or a part means raises it.
VERSION = 1
KEY, FORMAT_KEY, FORMAT = "polyquant", "format", "polyquant"
RESERVED = frozenset({KEY, FORMAT_KEY})
#: Stands for a checksum until the bytes are known: as wide as every checksum.
PENDING = "crc32:00000000"

_FIELDS = frozenset({"version", "shard", "checkpoint", "header", "tensors"})
_QUANTIZED_FIELDS = frozenset({"scheme", "shape", "axes", "checksum"})
_PLAIN_FIELDS = frozenset({"dtype", "shape", "checksum"})


class FilePart(NamedTuple):
    """One stored array of a tensor: its name in the file and in the tensor, dtype code, shape."""

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """What one file says of itself."""

    shard: tuple[int, int]
    metadata: Mapping[str, str]
    checkpoint: str
    tensors: tuple[TensorInfo, ...]
    checksums: Mapping[str, str]


def file_parts(info: TensorInfo) -> list[FilePart]:
    """The arrays of a tensor as a file names them: codes ``name``, the rest ``name.scales`` ..."""
    if info.scheme is None:
        dtype = ARRAY_DTYPES[str(info.dtype)].code
        return [FilePart(info.name, "", dtype, info.shape, info.nbytes)]
    found = _parts(info.scheme, info.stored_shape)
    return [part._replace(name=f"{info.name}{part.name}") for part in found]


@lru_cache(maxsize=1024)  # a model has many tensors of few schemes and shapes
def _parts(scheme: QuantScheme, shape: tuple[int, ...]) -> tuple[FilePart, ...]:
    """The arrays of a tensor, named by what follows the tensor's name."""
    return tuple(
        FilePart(
            f".{part.name}".removesuffix(".data"),
            part.name,
            ARRAY_DTYPES[part.dtype].code,
            part.shape,
            part.nbytes,
        )
        for part in parts(scheme, shape)
    )


@lru_cache(maxsize=256)
def _scheme(text: str) -> QuantScheme:
    return QuantScheme.from_json(text)


# -- checksums --------------------------------------------------------------------------------


def checksum(info: TensorInfo, data: Iterable[Any]) -> str:
    """The checksum of a tensor: over its description, then the bytes of its parts in order."""
    form = {
        "name": info.name,
        "scheme": None if info.scheme is None else info.scheme.to_json(),
        "shape": info.shape,
        "axes": info.axes,
        "parts": [(part.name, part.dtype, part.shape) for part in file_parts(info)],
    }
    total = zlib.crc32(canonical(form).encode())
    for run in data:
        total = zlib.crc32(run, total)
    return _sum_text(total)


def checksum_of_form(form: object) -> str:
    """The checksum of a JSON form, such as all tensors' checksums by name."""
    return _sum_text(zlib.crc32(canonical(form).encode()))


def _sum_text(total: int) -> str:
    return f"crc32:{total:08x}"


# -- writing ----------------------------------------------------------------------------------


def to_metadata(
    infos: Sequence[TensorInfo],
    shard: tuple[int, int],
    metadata: Mapping[str, str],
    checksums: Mapping[str, str],
    checkpoint: str,
) -> dict[str, str]:
    """A header's metadata. Its length does not depend on the checksums."""
    form: dict[str, Any] = {
        "version": VERSION,
        "shard": shard,
        "checkpoint": checkpoint,
        "tensors": {i.name: _to_json(i) | {"checksum": checksums[i.name]} for i in infos},
    }
    form["header"] = checksum_of_form([form, metadata])
    return {FORMAT_KEY: FORMAT, KEY: json.dumps(form, separators=(",", ":"))} | dict(metadata)


def _to_json(info: TensorInfo) -> dict[str, Any]:
    if info.scheme is None:
        return {"dtype": ARRAY_DTYPES[str(info.dtype)].code, "shape": info.shape}
    return {"scheme": info.scheme.to_json(), "shape": info.shape, "axes": info.axes}


# -- reading ----------------------------------------------------------------------------------


def is_marked(metadata: Mapping[str, str], path: Path) -> bool:
    """Whether a header is of polyquant's form. Raises InvalidHeader with one marker of the two."""
    found = KEY in metadata, metadata.get(FORMAT_KEY) == FORMAT
    if any(found) and not all(found):
        reason = f"it has one of polyquant's two markers ({KEY!r} and {FORMAT_KEY!r}) and not both"
        raise InvalidHeader(path=path, reason=reason)
    return all(found)


def parse(metadata: Mapping[str, str], path: Path) -> Manifest:
    """The manifest of a marked header. Raises InvalidHeader, UnsupportedVersion, UnknownScheme."""
    form = parse_object(metadata[KEY], path, "the manifest")
    version = form.get("version")
    if type(version) is not int or version != VERSION:
        raise UnsupportedVersion(what=f"layout of {path}", got=version, known=VERSION)
    if set(form) != _FIELDS or not isinstance(form["tensors"], dict):
        raise InvalidHeader(path=path, reason=f"a manifest has exactly {sorted(_FIELDS)}")
    own = {key: item for key, item in metadata.items() if key not in RESERVED}
    if form.pop("header") != checksum_of_form([form, own]):
        raise InvalidHeader(path=path, reason="it does not have the checksum that was written")
    shard = form["shard"]
    if not is_shape(shard) or len(shard) != 2 or not 1 <= shard[0] <= shard[1]:
        raise InvalidHeader(path=path, reason=f"there is no shard {reprlib.repr(shard)}")
    infos = tuple(_info(name, entry, path) for name, entry in form["tensors"].items())
    sums = {name: str(entry["checksum"]) for name, entry in form["tensors"].items()}
    return Manifest((shard[0], shard[1]), own, str(form["checkpoint"]), infos, sums)


def _info(name: str, entry: Any, path: Path) -> TensorInfo:
    fields = set(entry) if isinstance(entry, dict) else set()
    if fields not in (_QUANTIZED_FIELDS, _PLAIN_FIELDS) or not is_shape(entry["shape"]):
        raise InvalidHeader(path=path, reason=f"the manifest's entry of {name!r} is malformed")
    if "dtype" in entry:
        dtype = FILE_DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            raise InvalidHeader(path=path, reason=f"{name!r} has no known dtype in the manifest")
        return TensorInfo.plain(name, entry["shape"], dtype.name)
    axes = entry["axes"]
    if not isinstance(axes, list) or any(type(axis) is not int for axis in axes):
        raise InvalidHeader(path=path, reason=f"the axes of {name!r} are no list of numbers")
    shape = tuple(entry["shape"])
    check_axes(axes, shape)
    stored = stored_shape(shape, axes)
    scheme = _scheme(canonical(entry["scheme"]))
    nbytes = sum(part.nbytes for part in _parts(scheme, stored))
    return TensorInfo(name, shape, None, scheme, nbytes, tuple(axes))
