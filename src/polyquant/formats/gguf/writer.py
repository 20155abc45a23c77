"""Writing GGUF: types that hold the numbers of a scheme exactly, and the keys of a file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from polyquant.arrays import HostArray
from polyquant.errors import InvalidName, UnsupportedDtype
from polyquant.files.assemble import numbers_of
from polyquant.files.info import TensorInfo
from polyquant.files.writing import (
    PlannedWriter,
    Stored,
    check_text,
    kept_origin,
    laid_out,
    member_of,
)
from polyquant.formats.gguf.blocks import BLOCK_TYPES
from polyquant.formats.gguf.container import (
    ALIGNMENT_LIMIT,
    ARRAY,
    AXES_LIMIT,
    DEFAULT_ALIGNMENT,
    MAGIC,
    NAME_LIMIT_BYTES,
    STRING,
    VALUE_TYPES,
    VERSIONS,
)
from polyquant.formats.gguf.types import ARRAY_TYPES, BLOCKS, TYPE_IDS
from polyquant.qtensor import QTensor

_TYPE_IDS_OF_KEYS: Mapping[str, int] = MappingProxyType(
    {name: type_id for type_id, (name, _) in VALUE_TYPES.items()}
)
_TYPES_OF_DTYPES: Mapping[str, str] = MappingProxyType(
    {np.dtype(dtype).name: name for name, dtype in ARRAY_TYPES.items()}
)


#: Variant -> the scheme that its weights have. Ternary weights are trained, not rounded, and
#: vectors need a search; both are only carried over.
VARIANTS: Mapping[str, str] = MappingProxyType(
    {b.name: b.text for b in BLOCK_TYPES.values() if "ternary" not in b.text}
)


def type_of(info: TensorInfo, given: str | None = None) -> str | None:
    """The type that holds a tensor exactly, or None. ``given`` wins where several do."""
    if info.scheme is None:
        return _TYPES_OF_DTYPES.get(str(info.dtype))
    fitting = [name for name, block in BLOCKS.items() if block.scheme == info.scheme]
    return given if given in fitting else next(iter(fitting), None)


def why_not_hold(info: TensorInfo) -> str | None:
    """Why no type of ggml holds a tensor exactly, or None."""
    kind = type_of(info)
    if kind is None:
        return f"no type of ggml is {info.dtype or info.scheme}"
    if len(info.shape) > AXES_LIMIT:
        return f"it has {len(info.shape)} axes, and ggml knows {AXES_LIMIT}"
    if kind in ARRAY_TYPES:
        return None
    if info.axes != tuple(range(len(info.shape))):
        return f"its axes are stored in the order {info.axes}"
    length = info.shape[-1] if info.shape else 1
    if length % BLOCKS[kind].elements:
        return f"its rows of {length} are no multiple of {kind}'s {BLOCKS[kind].elements}"
    return None


def open_writer(
    path: Path, plan: Sequence[TensorInfo], metadata: Mapping[str, str] = MappingProxyType({})
) -> PlannedWriter:
    """The writer of a file. ``metadata`` as a GGUF checkpoint has it; other texts are strings.

    Raises UnsupportedDtype for a tensor that no type holds, InvalidName for a key that is no text
    of its type.
    """
    origin = kept_origin(metadata, "gguf")
    order = ">" if origin.get("order") == "big" else "<"
    version = origin.get("version")
    keys = {key: text for key, text in metadata.items() if key != "gguf"}
    alignment = _alignment(keys.get("general.alignment", str(DEFAULT_ALIGNMENT)))
    head = bytearray(MAGIC)
    head += struct.pack(f"{order}I", version if version in VERSIONS else VERSIONS[-1])
    head += struct.pack(f"{order}QQ", len(plan), len(keys))
    types = member_of(origin, "types")
    for key, text in keys.items():
        usual = "u32" if key == "general.alignment" else "string"
        head += _key(key, str(types.get(key, usual)), text, order)
    kinds = {info.name: _kind(info, origin, path) for info in plan}
    sizes = [(info.name, _size_bytes(info, kinds[info.name])) for info in plan]
    offsets = laid_out(sizes, 0, alignment)
    for info in plan:
        extents = struct.pack(f"{order}{len(info.shape)}Q", *reversed(info.shape))
        head += _name(info.name, order) + struct.pack(f"{order}I", len(info.shape)) + extents
        type_id = TYPE_IDS[kinds[info.name]]
        head += struct.pack(f"{order}IQ", type_id, offsets[info.name].start)
    head += bytes(-len(head) % alignment)
    places = laid_out(sizes, len(head), alignment)

    def encode(info: TensorInfo, tensor: HostArray | QTensor) -> Iterator[Stored]:
        yield info.name, _encoded(tensor, kinds[info.name], order)

    return PlannedWriter(
        path, plan, head=bytes(head), places=places, encode=encode, alignment=alignment
    )


def _alignment(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= ALIGNMENT_LIMIT):
        reason = f"an alignment is 1 to {ALIGNMENT_LIMIT}, not {text[:20]!r}"
        raise InvalidName(name="general.alignment", reason=reason)
    return int(text)


def _kind(info: TensorInfo, origin: Mapping[str, Any], path: Path) -> str:
    reason = why_not_hold(info)
    given = member_of(origin, "tensors").get(info.name)
    kind = type_of(info, given if isinstance(given, str) else None)
    if reason is not None or kind is None:
        what = f"Tensor {info.name!r} of {path} ({reason})"
        known = ", ".join([*ARRAY_TYPES, *BLOCKS])
        raise UnsupportedDtype(what=what, dtype=str(info.dtype or info.scheme), known=known)
    return kind


def _size_bytes(info: TensorInfo, kind: str) -> int:
    elements = math.prod(info.shape)
    if kind in ARRAY_TYPES:
        return elements * np.dtype(ARRAY_TYPES[kind]).itemsize
    return elements // BLOCKS[kind].elements * BLOCKS[kind].size_bytes


def _encoded(tensor: HostArray | QTensor, kind: str, order: str) -> HostArray:
    """The stored bytes of a tensor."""
    if not isinstance(tensor, QTensor):
        raw = np.ascontiguousarray(tensor)
        return raw.view(f"<u{raw.itemsize}").astype(f"{order}u{raw.itemsize}")
    block = BLOCKS[kind]
    count = tensor.size // block.elements
    made = np.zeros(count, block.dtype(order))
    if not count:
        return made
    numbers = {
        name: array.reshape(count, -1)
        for name, array in numbers_of(tensor).items()
        if not name.endswith("table")
    }
    for name, array in block.pack(numbers).items():
        made[name] = array.reshape(made[name].shape)
    return made


# -- keys -------------------------------------------------------------------------------------


def _string(text: str, order: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack(f"{order}Q", len(raw)) + raw


def _name(name: str, order: str) -> bytes:
    """The name of a key or a tensor, such as readers take."""
    check_text(name, name, "a name")
    if not 1 <= len(name) <= NAME_LIMIT_BYTES:
        raise InvalidName(name=name[:40], reason="a name has 1 to 2^16 characters")
    return _string(name, order)


def _key(key: str, type_text: str, text: str, order: str) -> bytes:
    """A key with its value, from the text that it has as metadata."""
    head, *rest = type_text.split(":")
    try:
        value = text if head == "string" else json.loads(text)
        made = _typed(value, [head, *rest], order)
    except (ValueError, TypeError, KeyError, struct.error, OverflowError) as error:
        raise InvalidName(name=key, reason=f"{text[:40]!r} is no {type_text} ({error})") from None
    return _name(key, order) + struct.pack(f"{order}I", _TYPE_IDS_OF_KEYS[head]) + made


def _typed(value: Any, types: Sequence[str], order: str) -> bytes:
    type_id = _TYPE_IDS_OF_KEYS[types[0]]
    if type_id == STRING:
        return _string(value, order)
    if type_id != ARRAY:
        return struct.pack(order + VALUE_TYPES[type_id][1], value)
    inner = types[1:] or ["u8"]
    head = struct.pack(f"{order}IQ", _TYPE_IDS_OF_KEYS[inner[0]], len(value))
    code = VALUE_TYPES[_TYPE_IDS_OF_KEYS[inner[0]]][1]
    if code:
        return head + struct.pack(f"{order}{len(value)}{code}", *value)
    return head + b"".join(_typed(item, inner, order) for item in value)
