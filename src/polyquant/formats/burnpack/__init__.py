"""Burn's ``.bpk``: tensors and quantized tensors of the Rust framework, read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from polyquant.arrays import HostArray
from polyquant.data import TensorData, data_size_bytes, join
from polyquant.errors import InvalidHeader, UnsupportedDtype, UnsupportedVersion
from polyquant.files.checkpoint import Checkpoint, Entry
from polyquant.files.container import check_booleans, is_shape, map_file, release_pages
from polyquant.files.facts import Facts
from polyquant.files.info import ARRAY_DTYPES, TensorInfo
from polyquant.files.probe import Probe
from polyquant.files.writing import (
    PlannedWriter,
    Stored,
    check_metadata,
    check_text,
    kept_origin,
    laid_out,
    member_of,
)
from polyquant.formats.burnpack import cbor
from polyquant.formats.burnpack.layout import (
    ALIGNMENT,
    BOOLEANS,
    DTYPES,
    HEADER_BYTES,
    MAGIC,
    METADATA_LIMIT_BYTES,
    ORIGIN,
    TENSORS_LIMIT,
    VARIANTS,
    VERSION,
    form_of,
    scheme_of,
    why_not_hold,
)
from polyquant.qtensor import QTensor, from_data

__all__ = ["NAME", "VARIANTS", "open_checkpoint", "open_writer", "why_not", "why_not_hold"]

NAME = "burnpack"
FACTS = Facts(
    tool="Burn",
    reads="all symmetric schemes packed along the last axis, all dtypes",
    exact="bit-equal (to the specification)",
    writes="the same",
    bytes="yes",
    checked="cbor2 (the metadata)",
)
_KNOWN = ", ".join([*DTYPES, "Bool", "symmetric QFloat"])


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return None if probe.head[:4] == MAGIC else "it does not begin with NRUB"


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file. Raises InvalidHeader, UnsupportedVersion, UnsupportedDtype."""
    path = probe.file
    size, buffer = map_file(path)
    if size < HEADER_BYTES:
        raise InvalidHeader(path=path, reason=f"its {size} bytes are less than a header")
    version = int.from_bytes(buffer[4:6], "little")
    if version != VERSION:
        raise UnsupportedVersion(what=f"burnpack layout of {path}", got=version, known=VERSION)
    length = int.from_bytes(buffer[6:10], "little")
    if length > METADATA_LIMIT_BYTES or length > size - HEADER_BYTES:
        raise InvalidHeader(path=path, reason=f"its metadata of {length} bytes pass its end")
    text = memoryview(buffer)[HEADER_BYTES : HEADER_BYTES + length]
    form = cbor.Reader(path, text).whole()
    start = -(-(HEADER_BYTES + length) // ALIGNMENT) * ALIGNMENT
    tensors = _member(form, "tensors", path)
    if len(tensors) > TENSORS_LIMIT:
        raise InvalidHeader(path=path, reason=f"it has {len(tensors)} tensors")
    placed = [_place(name, entry, path) for name, entry in tensors.items()]
    _check_places(placed, size - start, path)
    entries = {}
    for begin, _, name in sorted(placed):
        entries[name] = _entry(path, buffer, start + begin, name, tensors[name])
    return Checkpoint(
        probe.path, NAME, _metadata(form, path), entries, release=partial(release_pages, buffer)
    )


def _member(form: Any, name: str, path: Path) -> dict[str, Any]:
    found = form.get(name, {}) if isinstance(form, dict) else None
    if not isinstance(found, dict):
        raise InvalidHeader(path=path, reason=f"its {name} are no map")
    return found


def _metadata(form: dict[str, Any], path: Path) -> dict[str, str]:
    """The texts, and under ``burnpack`` what is neither text nor tensor."""
    texts, scalars = (_member(form, name, path) for name in ("metadata", "scalars"))
    if not all(isinstance(text, str) for text in texts.values()):
        raise InvalidHeader(path=path, reason="its metadata are not texts")
    tensors = _member(form, "tensors", path)
    ids = {name: t["param_id"] for name, t in tensors.items() if "param_id" in t}
    kinds = {name: t["dtype"] for name, t in tensors.items() if not _is_quantized(t["dtype"])}
    origin = {"param_ids": ids, "scalars": scalars, "dtypes": kinds}
    return {key: text for key, text in texts.items() if key != ORIGIN} | {
        ORIGIN: json.dumps(origin)
    }


def _is_quantized(dtype: Any) -> bool:
    return isinstance(dtype, dict) and "QFloat" in dtype


def _place(name: str, entry: Any, path: Path) -> tuple[int, int, str]:
    fields = set(entry) if isinstance(entry, dict) else set()
    if fields - {"param_id"} != {"dtype", "shape", "data_offsets"} or not name:
        raise InvalidHeader(path=path, reason=f"the entry of {name!r} has the fields {fields}")
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or not all(type(n) is int and n >= 0 for n in offsets):
        raise InvalidHeader(path=path, reason=f"{name!r} has data_offsets that are no numbers")
    if len(offsets) != 2 or offsets[0] > offsets[1] or not is_shape(entry["shape"]):
        raise InvalidHeader(path=path, reason=f"{name!r} has no valid data_offsets and shape")
    return offsets[0], offsets[1], name


def _check_places(placed: list[tuple[int, int, str]], size: int, path: Path) -> None:
    """Every tensor lies in the data, and no two share a byte."""
    end, last = 0, ""
    for start, stop, name in sorted(placed):
        if stop > size and start < stop:
            raise InvalidHeader(path=path, reason=f"{name!r} ends at {stop}, the data at {size}")
        if start < end and start < stop:
            raise InvalidHeader(path=path, reason=f"tensors {last!r} and {name!r} overlap")
        end, last = max(end, stop), name


def _entry(path: Path, buffer: Any, start: int, name: str, entry: dict[str, Any]) -> Entry:
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    nbytes = entry["data_offsets"][1] - entry["data_offsets"][0]
    axes = tuple(range(len(shape)))
    if _is_quantized(dtype):
        scheme = scheme_of(dtype["QFloat"])
        if isinstance(scheme, str):
            what = f"Tensor {name!r} of {path} ({scheme})"
            raise UnsupportedDtype(what=what, dtype=str(dtype)[:200], known=_KNOWN)
        wanted = data_size_bytes(scheme, shape)
        info = TensorInfo(name, shape, None, scheme, nbytes, axes)
        read: Any = partial(_read_quantized, buffer, start, info)
    else:
        kind = _array_dtype(dtype)
        if kind is None:
            what = f"Tensor {name!r} of {path}"
            raise UnsupportedDtype(what=what, dtype=str(dtype)[:200], known=_KNOWN)
        info = TensorInfo.plain(name, shape, kind)
        wanted = info.nbytes
        read = partial(_read_array, path, buffer, start, info)
    if wanted != nbytes:
        reason = f"{name!r} of {shape} has {nbytes} bytes, and needs {wanted}"
        raise InvalidHeader(path=path, reason=reason)
    return Entry(info, read)


def _array_dtype(dtype: Any) -> str | None:
    if isinstance(dtype, str):
        return DTYPES.get(dtype)
    store = dtype.get("Bool") if isinstance(dtype, dict) and len(dtype) == 1 else None
    return BOOLEANS.get(store) if isinstance(store, str) else None


def _read_array(path: Path, buffer: Any, start: int, info: TensorInfo) -> HostArray:
    raw = np.frombuffer(memoryview(buffer)[start : start + info.nbytes], np.uint8)
    kind = ARRAY_DTYPES[str(info.dtype)].host
    check_booleans(raw, kind, f"Tensor {info.name!r} of {path}")
    made = raw.view(kind).reshape(info.shape)
    return made if made.flags.aligned else made.copy()


def _read_quantized(buffer: Any, start: int, info: TensorInfo) -> QTensor:
    raw = memoryview(buffer)[start : start + info.nbytes]
    if info.scheme is None:
        raise InvalidHeader(path=info.name, reason="it has no scheme")
    return from_data(TensorData(raw, info.shape, info.scheme))  # type: ignore[arg-type]


# -- writing ----------------------------------------------------------------------------------


def open_writer(
    path: Path, plan: Sequence[TensorInfo], metadata: Mapping[str, str] = MappingProxyType({})
) -> PlannedWriter:
    """The writer of a file.

    Raises UnsupportedDtype for a tensor that Burn cannot hold, InvalidName for what is no text.
    """
    check_metadata(metadata)
    origin = kept_origin(metadata, ORIGIN)
    for info in plan:
        check_text(info.name, info.name, "a tensor's name")
        reason = why_not_hold(info)
        if reason is not None:
            what = f"Tensor {info.name!r} of {path} ({reason})"
            raise UnsupportedDtype(what=what, dtype=str(info.dtype or info.scheme), known=_KNOWN)
    sizes = [(info.name, _size_bytes(info)) for info in plan]
    offsets = laid_out(sizes, 0, ALIGNMENT)
    tensors = {}
    for info in sorted(plan, key=lambda info: info.name.encode()):
        place = offsets[info.name]
        entry: dict[str, Any] = {"dtype": _dtype_form(info, origin), "shape": list(info.shape)}
        entry["data_offsets"] = [place.start, place.start + place.nbytes]
        param_id = member_of(origin, "param_ids").get(info.name)
        is_id = type(param_id) is int and 0 <= param_id < 2**64
        tensors[info.name] = entry | ({"param_id": param_id} if is_id else {})
    form: dict[str, Any] = {"tensors": tensors}
    texts = {key: text for key, text in metadata.items() if key != ORIGIN}
    form |= {"metadata": texts} if texts else {}
    scalars = member_of(origin, "scalars")
    form |= {"scalars": scalars} if scalars else {}
    text = cbor.encode(form)
    head = MAGIC + VERSION.to_bytes(2, "little") + len(text).to_bytes(4, "little") + text
    head += bytes(-len(head) % ALIGNMENT)
    places = laid_out(sizes, len(head), ALIGNMENT)
    return PlannedWriter(path, plan, head=head, places=places, encode=_encoded)


def _size_bytes(info: TensorInfo) -> int:
    if info.scheme is not None:
        return data_size_bytes(info.scheme, info.stored_shape)
    return math.prod(info.shape) * ARRAY_DTYPES[str(info.dtype)].bits // 8


def _dtype_form(info: TensorInfo, origin: Mapping[str, Any]) -> Any:
    if info.scheme is not None:
        return {"QFloat": form_of(info.scheme, info.stored_shape)}
    kept = member_of(origin, "dtypes").get(info.name)
    if _array_dtype(kept) == info.dtype:
        return kept
    if info.dtype == "bool":
        return {"Bool": "Native"}
    return next(name for name, dtype in DTYPES.items() if dtype == info.dtype)


def _encoded(info: TensorInfo, tensor: Any) -> Iterator[Stored]:
    if isinstance(tensor, QTensor):
        whole = join(tensor.parts(), tensor.scheme, tensor.stored_shape)
        yield info.name, np.frombuffer(whole, np.uint8)
    else:
        yield info.name, tensor
