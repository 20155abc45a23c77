"""Writing safetensors in which a tensor may be several arrays, as other tools have them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyquant.errors import InvalidName, UnsupportedDtype
from polyquant.files.info import ARRAY_DTYPES, FILE_DTYPES, TensorInfo
from polyquant.files.probe import CONFIG
from polyquant.files.writing import PlannedWriter, Stored, check_metadata, check_text, laid_out


class StoredArray(NamedTuple):
    """One array of a file: its name, dtype code and shape."""

    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * FILE_DTYPES[self.code].bits // 8


def scale_code(kind: object) -> str:
    """The dtype code of a float scale type."""
    return str(kind).upper()


def base_of(info: TensorInfo) -> str:
    """The module of a tensor ``MODULE.weight``. Raises InvalidName for another name."""
    base = info.name.removesuffix(".weight")
    if base == info.name:
        raise InvalidName(name=info.name, reason="a quantized tensor's name must end in .weight")
    return base


def has_whole_groups(info: TensorInfo) -> bool:
    """Whether the groups along the last axis of a quantized tensor divide it."""
    size = (info.scheme.block or (-1,))[-1] if info.scheme is not None else -1
    return size == -1 or info.shape[-1] % size == 0


def plain_modules(plan: Sequence[TensorInfo]) -> list[str]:
    """The modules whose weights are matrices and not quantized: configs name them."""
    return [
        info.name.removesuffix(".weight")
        for info in plan
        if info.scheme is None and len(info.shape) == 2 and info.name.endswith(".weight")
    ]


def check_held(
    plan: Sequence[TensorInfo], why_not_hold: Callable[[TensorInfo], str | None], format: str
) -> None:
    """Refuse what a format cannot hold. Raises UnsupportedDtype."""
    for info in plan:
        reason = why_not_hold(info)
        if reason is not None:
            what = f"Tensor {info.name!r} in {format} ({reason})"
            known = "what the page of formats lists"
            raise UnsupportedDtype(what=what, dtype=str(info.dtype or info.scheme), known=known)


def plain_why_not(info: TensorInfo) -> str | None:
    """Why an array cannot be stored as it is, or None."""
    return None if info.dtype in ARRAY_DTYPES else f"no array of a file is {info.dtype}"


def open_stored_writer(
    path: Path,
    plan: Sequence[TensorInfo],
    *,
    layout: Callable[[TensorInfo], list[StoredArray]],
    encode: Callable[[TensorInfo, Any], Iterable[Stored]],
    metadata: Mapping[str, str],
    config: Mapping[str, Any],
) -> PlannedWriter:
    """The writer of a file: quantized tensors by ``layout`` and ``encode``, arrays as they are.

    The quantization config (of a plan without quantized tensors it may be empty) is kept in the
    metadata, in place of another, so that the file alone can be read back.
    Raises InvalidName where two arrays would have one name, and for names and texts that no header
    holds.
    """
    check_metadata(metadata)
    arrays: dict[str, StoredArray] = {}
    for info in plan:
        check_text(info.name, info.name, "a tensor's name")
        if info.name == "__metadata__":
            raise InvalidName(name=info.name, reason="a tensor cannot have that name")
        for array in layout(info) if info.scheme is not None else [_plain(info)]:
            if array.name in arrays:
                reason = f"the array {array.name!r} would be of another tensor too"
                raise InvalidName(name=info.name, reason=reason)
            arrays[array.name] = array
    ordered = sorted(arrays.values(), key=lambda array: -FILE_DTYPES[array.code].bits)
    sizes = [(array.name, array.nbytes) for array in ordered]
    offsets = laid_out(sizes, 0)
    said = {CONFIG: json.dumps(config)} if config else {}
    header: dict[str, Any] = {
        "__metadata__": {k: v for k, v in metadata.items() if k != CONFIG} | said
    }
    for array in ordered:
        place = offsets[array.name]
        header[array.name] = {
            "dtype": array.code,
            "shape": array.shape,
            "data_offsets": (place.start, place.start + place.nbytes),
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    def encoded(info: TensorInfo, tensor: Any) -> Iterable[Stored]:
        return encode(info, tensor) if info.scheme is not None else [(info.name, tensor)]

    places = laid_out(sizes, len(head))
    writer = PlannedWriter(path, plan, head=head, places=places, encode=encoded)
    writer.config = dict(config)
    return writer


def _plain(info: TensorInfo) -> StoredArray:
    return StoredArray(info.name, ARRAY_DTYPES[str(info.dtype)].code, info.shape)
