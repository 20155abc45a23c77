"""CBOR (RFC 8949), as far as Burn writes it: definite lengths, text keys, shortest integers.

Reading checks every length before it is used, and bounds nesting; what it does not know is refused.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from polyquant.errors import InvalidHeader, InvalidName

DEPTH_LIMIT = 32
_UNSIGNED, _NEGATIVE, _TEXT, _ARRAY, _MAP, _SIMPLE = 0, 1, 3, 4, 5, 7
_WIDTHS = (1, 2, 4, 8)
#: Additional information of a simple item -> its value, or the struct code of a float.
_CONSTANTS = ((20, False), (21, True), (22, None))
_FLOATS = ((25, "e"), (26, "f"), (27, "d"))


class Reader:
    """A cursor over bytes."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.place = path, data, 0

    def fail(self, reason: str) -> InvalidHeader:
        return InvalidHeader(path=self.path, reason=f"its CBOR at byte {self.place} {reason}")

    def whole(self) -> Any:
        """The one item that all bytes are."""
        found = self.item(0)
        if self.place != len(self.data):
            raise self.fail("is followed by more than the metadata")
        return found

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.place:
            raise self.fail(f"claims {count} bytes, and {len(self.data) - self.place} are left")
        self.place += count
        return self.data[self.place - count : self.place]

    def item(self, depth: int) -> Any:
        if depth > DEPTH_LIMIT:
            raise self.fail(f"is nested more than {DEPTH_LIMIT} deep")
        head = self.take(1)[0]
        major, info = head >> 5, head & 31
        if major == _SIMPLE:
            return self._simple(info)
        count = self._count(info)
        if major == _UNSIGNED:
            return count
        if major == _NEGATIVE:
            return -1 - count
        if major == _TEXT:
            return self._text(count)
        if major not in (_ARRAY, _MAP):
            raise self.fail(f"is of major type {major}, which Burn does not write")
        if count > len(self.data) - self.place:  # an item takes a byte at least
            raise self.fail(f"claims {count} items in {len(self.data) - self.place} bytes")
        if major == _ARRAY:
            return [self.item(depth + 1) for _ in range(count)]
        return self._map(count, depth)

    def _map(self, count: int, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for _ in range(count):
            key = self.item(depth + 1)
            if not isinstance(key, str) or key in made:
                raise self.fail(f"has the key {key!r} twice, or it is no text")
            made[key] = self.item(depth + 1)
        return made

    def _count(self, info: int) -> int:
        if info < 24:
            return info
        if info > 27:
            raise self.fail("has an indefinite length, which Burn does not write")
        return int.from_bytes(self.take(_WIDTHS[info - 24]), "big")

    def _text(self, count: int) -> str:
        try:
            return bytes(self.take(count)).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("has a text that is not UTF-8") from None

    def _simple(self, info: int) -> Any:
        code = dict(_FLOATS).get(info)
        if code is not None:
            return struct.unpack(f">{code}", self.take(struct.calcsize(code)))[0]
        if info not in dict(_CONSTANTS):
            raise self.fail(f"has the simple value {info}, which Burn does not write")
        return dict(_CONSTANTS)[info]


def encode(item: Any) -> bytes:
    """An item in its shortest form; maps in the order of their keys."""
    if item is None or isinstance(item, bool):
        return bytes([_SIMPLE << 5 | next(i for i, value in _CONSTANTS if value is item)])
    if isinstance(item, int) and -(2**64) <= item < 2**64:
        return _head(_UNSIGNED, item) if item >= 0 else _head(_NEGATIVE, -1 - item)
    if isinstance(item, float):
        return _float(item)
    if isinstance(item, str):
        raw = item.encode()
        return _head(_TEXT, len(raw)) + raw
    if isinstance(item, int):
        raise InvalidName(name=str(item), reason="it takes more than 64 bits")
    if isinstance(item, dict):
        pairs = (encode(key) + encode(value) for key, value in item.items())
        return _head(_MAP, len(item)) + b"".join(pairs)
    return _head(_ARRAY, len(item)) + b"".join(map(encode, item))


def _head(major: int, count: int) -> bytes:
    if count < 24:
        return bytes([major << 5 | count])
    width = next(w for w in _WIDTHS if count < 1 << (8 * w))
    return bytes([major << 5 | 24 + _WIDTHS.index(width)]) + count.to_bytes(width, "big")


def _float(number: float) -> bytes:
    """The shortest of the three widths that holds the number."""
    fitting = (
        bytes([_SIMPLE << 5 | info]) + struct.pack(f">{code}", number)
        for info, code in _FLOATS
        if _fits(code, number)
    )
    return next(fitting)


def _fits(code: str, number: float) -> bool:
    try:
        found: float = struct.unpack(f">{code}", struct.pack(f">{code}", number))[0]
    except OverflowError:  # too large for that width
        return False
    return found == number or number != number
