"""The GGUF container (versions 2 and 3, both byte orders), its header read and its bytes mapped.

::

    "GGUF" | u32 version | u64 tensors | u64 keys | keys | infos | padding | data
    key  = string name, u32 type, value          string = u64 length, UTF-8
    info = string name, u32 axes, u64 extents[axes], u32 type, u64 offset in the data

Extents stand in reverse: the first is the contiguous axis. Data and offsets are multiples of the
key ``general.alignment``. A big-endian file is one whose version reads as such; its numbers are
big-endian everywhere, in blocks too. Source: ``docs/gguf.md`` of ggml.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from polyquant.errors import InvalidHeader, UnsupportedVersion
from polyquant.files.container import (
    ELEMENTS_LIMIT,
    HEADER_LIMIT_BYTES,
    map_file,
    release_pages,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
#: ggml's own limits on axes; and ours on names and on arrays in arrays, which no file comes near.
AXES_LIMIT, NAME_LIMIT_BYTES, DEPTH_LIMIT = 4, 2**16, 4
ALIGNMENT_LIMIT = 2**20

#: Type id -> (name, struct code); strings and arrays have no code.
VALUE_TYPES: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        0: ("u8", "B"),
        1: ("i8", "b"),
        2: ("u16", "H"),
        3: ("i16", "h"),
        4: ("u32", "I"),
        5: ("i32", "i"),
        6: ("f32", "f"),
        7: ("bool", "?"),
        8: ("string", ""),
        9: ("array", ""),
        10: ("u64", "Q"),
        11: ("i64", "q"),
        12: ("f64", "d"),
    }
)
STRING, ARRAY, BOOL = 8, 9, 7


class Info(NamedTuple):
    """One tensor: its shape (the contiguous axis last), ggml's type id, and where it starts."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int


@dataclass(frozen=True)
class Gguf:
    """A file: version, byte order ("<" or ">"), keys, tensors. ``data`` is where the data start."""

    path: Path
    version: int
    order: str
    alignment: int
    keys: Mapping[str, Value]
    infos: Mapping[str, Info]
    data: int
    buffer: mmap.mmap

    def release(self) -> None:
        """Give the mapped pages back to the system."""
        release_pages(self.buffer)


@dataclass(frozen=True)
class Value:
    """A key's value: its type, and its bytes, which are read when asked for."""

    type_id: int
    start: int
    stop: int
    _reader: Reader = field(repr=False, compare=False)

    @property
    def type_text(self) -> str:
        """ "u32", "string", "array:string", "array:array:i32"."""
        reader, names = self._reader.at(self.start), [VALUE_TYPES[self.type_id][0]]
        type_id = self.type_id
        while type_id == ARRAY:
            type_id = reader.number("I", "a type")
            names.append(VALUE_TYPES[type_id][0])
            if type_id == ARRAY and not reader.number("Q", "a count"):
                break
        return ":".join(names)

    def read(self) -> Any:
        """The value: an int, float, bool, str (odd bytes as lone surrogates), or a list."""
        return self._reader.at(self.start).value(self.type_id)

    @property
    def text(self) -> str:
        """The value as text: a string itself, anything else as JSON."""
        found = self.read()
        return found if isinstance(found, str) else json.dumps(found)


class Reader:
    """A cursor over the header: every length is checked before it is used."""

    def __init__(self, path: Path, buffer: mmap.mmap, size: int, order: str, start: int) -> None:
        self.path, self.buffer, self.size, self.order = path, buffer, size, order
        self.place = start
        self.where = "the header"

    def at(self, start: int) -> Reader:
        """A cursor at another place of the same file."""
        return Reader(self.path, self.buffer, self.size, self.order, start)

    def fail(self, reason: str) -> InvalidHeader:
        return InvalidHeader(path=self.path, reason=f"{self.where} {reason}")

    def take(self, count: int, what: str) -> int:
        """Step over bytes that must be there; returns where they start."""
        start = self.place
        if count > self.size - start:
            left = self.size - start
            limit = ", as a header may have" if self.size == HEADER_LIMIT_BYTES else ""
            reason = f"needs {count} bytes for {what} at {start}, and {left} are left"
            raise self.fail(f"{reason} of {self.size}{limit}")
        self.place = start + count
        return start

    def number(self, code: str, what: str) -> Any:
        start = self.take(struct.calcsize(f"={code}"), what)
        return struct.unpack_from(self.order + code, self.buffer, start)[0]

    def string(self, what: str) -> str:
        length = self.number("Q", f"the length of {what}")
        start = self.take(length, what)
        return self.buffer[start : start + length].decode("utf-8", "surrogateescape")

    def name(self, what: str) -> str:
        found = self.string(what)
        if not found or len(found) > NAME_LIMIT_BYTES:
            raise self.fail(f"has {what} that is empty or too long")
        try:
            found.encode("utf-8")
        except UnicodeEncodeError:
            raise self.fail(f"has {what} that is not UTF-8") from None
        return found

    def value_type(self) -> int:
        type_id: int = self.number("I", "a type")
        if type_id not in VALUE_TYPES:
            raise self.fail(f"has a value of type {type_id}; known are 0 to {max(VALUE_TYPES)}")
        return type_id

    def value(self, type_id: int) -> Any:
        if type_id == STRING:
            return self.string("a text")
        if type_id != ARRAY:
            return self.number(VALUE_TYPES[type_id][1], "a value")
        inner, count = self.value_type(), self.number("Q", "a count")
        if inner in (STRING, ARRAY):
            return [self.value(inner) for _ in range(count)]
        code = VALUE_TYPES[inner][1]
        start = self.take(count * struct.calcsize(f"={code}"), "an array")
        return list(struct.unpack_from(f"{self.order}{count}{code}", self.buffer, start))

    def skip(self, type_id: int, depth: int = 0) -> None:
        """Step over a value, checking all of it."""
        if type_id == STRING:
            self.take(self.number("Q", "the length of a text"), "a text")
        elif type_id != ARRAY:
            start = self.take(struct.calcsize(f"={VALUE_TYPES[type_id][1]}"), "a value")
            if type_id == BOOL and self.buffer[start] > 1:
                raise self.fail(f"has a boolean that is {self.buffer[start]}")
        else:
            self._skip_array(depth + 1)

    def _skip_array(self, depth: int) -> None:
        if depth > DEPTH_LIMIT:
            raise self.fail(f"has arrays in arrays, more than {DEPTH_LIMIT} deep")
        inner, count = self.value_type(), self.number("Q", "a count")
        if inner in (STRING, ARRAY):
            least = 8 if inner == STRING else 12
            if count > (self.size - self.place) // least:
                raise self.fail(
                    f"claims an array of {count} items, more than {self.size} bytes hold"
                )
            for _ in range(count):
                self.skip(inner, depth)
            return
        width = struct.calcsize(f"={VALUE_TYPES[inner][1]}")
        start = self.take(count * width, "an array")
        if inner == BOOL and any(byte > 1 for byte in self.buffer[start : self.place]):
            raise self.fail("has an array of booleans that are neither 0 nor 1")


def open_gguf(path: Path) -> Gguf:
    """Map a file and read its header. Raises UnreadableFile, InvalidHeader, UnsupportedVersion."""
    size, buffer = map_file(path)
    size = min(size, HEADER_LIMIT_BYTES)  # a sparse file has terabytes to be lost in
    reader = Reader(path, buffer, size, "<", 4)
    version = reader.number("I", "the version")
    if version & 0xFFFF == 0:  # a small number in the other byte order
        reader.order, reader.place = ">", 4
        version = reader.number("I", "the version")
    if version not in VERSIONS:
        raise UnsupportedVersion(what=f"GGUF layout of {path}", got=version, known=VERSIONS)
    tensors, keys = reader.number("Q", "a count"), reader.number("Q", "a count")
    # The shortest key takes 13 bytes, the shortest info 32: no loop runs longer than the file.
    if keys > size // 13 or tensors > size // 32:
        raise reader.fail(f"claims {tensors} tensors and {keys} keys in {size} bytes")
    values = dict(_keys(reader, keys))
    alignment = _alignment(reader, values)
    infos = list(_infos(reader, tensors))
    data = -(-reader.place // alignment) * alignment
    placed: dict[str, Info] = {}
    for info in infos:
        reader.where = f"tensor {info.name!r}"
        if info.name in placed:
            raise reader.fail("stands there twice")
        if info.start % alignment:
            raise reader.fail(f"starts at {info.start}, no multiple of the alignment {alignment}")
        placed[info.name] = info._replace(start=data + info.start)
    return Gguf(path, version, reader.order, alignment, values, placed, data, buffer)


def _keys(reader: Reader, count: int) -> Iterator[tuple[str, Value]]:
    seen: set[str] = set()
    for number in range(count):
        reader.where = f"key {number}"
        name = reader.name("a name")
        reader.where = f"key {name!r}"
        if name in seen:
            raise reader.fail("stands there twice")
        seen.add(name)
        type_id, start = reader.value_type(), reader.place
        reader.skip(type_id)
        yield name, Value(type_id, start, reader.place, reader)


def _alignment(reader: Reader, values: Mapping[str, Value]) -> int:
    found = values.get("general.alignment")
    alignment = DEFAULT_ALIGNMENT if found is None else found.read()
    if type(alignment) is not int or not 1 <= alignment <= ALIGNMENT_LIMIT:
        reader.where = "key 'general.alignment'"
        raise reader.fail(f"must be 1 to {ALIGNMENT_LIMIT}")
    return alignment


def _infos(reader: Reader, count: int) -> Iterator[Info]:
    for number in range(count):
        reader.where = f"tensor {number}"
        name = reader.name("a name")
        reader.where = f"tensor {name!r}"
        axes = reader.number("I", "the number of axes")
        if axes > AXES_LIMIT:
            raise reader.fail(f"has {axes} axes, and ggml knows {AXES_LIMIT}")
        extents = [reader.number("Q", "an extent") for _ in range(axes)]
        elements: int = math.prod(max(extent, 1) for extent in extents)
        if elements >= ELEMENTS_LIMIT:
            raise reader.fail(f"has 2^52 elements or more: {extents}")
        type_id, start = reader.number("I", "a type"), reader.number("Q", "an offset")
        yield Info(name, tuple(reversed(extents)), type_id, start)
