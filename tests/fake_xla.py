"""XLA's side of its FFI, in ctypes: call frames, errors and a stream, for tests of the handler."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np

from polyquant.backends.native.compiled import compiled

#: Attributes of a call with one operand and one result.
GOOD = {
    "kernel": "0" * 64,
    "launch": np.array([2, 1, 1, 1, 1, 1, 128, 0]),
    "argument": np.zeros(5, np.int64),
    "places": np.array([0, 0, 8, 1]),
    "maps": np.zeros(0, np.int64),
}

P = ctypes.c_void_p


class Text(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_size_t))


class Array(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int), ("size", ctypes.c_size_t), ("data", P))


class Buffer(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extensions", P), ("dtype", ctypes.c_int),
                ("data", P), ("rank", ctypes.c_int64), ("dims", P))  # fmt: skip


class Buffers(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extensions", P), ("count", ctypes.c_int64),
                ("types", P), ("each", P))  # fmt: skip


class Attributes(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extensions", P), ("count", ctypes.c_int64),
                ("types", P), ("names", P), ("each", P))  # fmt: skip


class Version(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extensions", P), ("major", ctypes.c_int),
                ("minor", ctypes.c_int))  # fmt: skip


class Api(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extensions", P), ("version", Version),
                ("internal", P), ("create_error", P), ("message", P), ("destroy", P),
                ("register", P), ("get_stream", P))  # fmt: skip


class Frame(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extensions", P), ("api", P), ("context", P),
                ("stage", ctypes.c_int), ("operands", Buffers), ("results", Buffers),
                ("attributes", Attributes), ("future", P))  # fmt: skip


class ErrorArgs(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extensions", P), ("message", ctypes.c_char_p),
                ("code", ctypes.c_int))  # fmt: skip


class StreamArgs(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("extensions", P), ("context", P), ("stream", P))


def handler(name: str = "cuda_launch") -> Any:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = P, (ctypes.py_object, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(P, P)(pointer(getattr(compiled(), name)(), None))


class Caller:
    """It makes errors, and has a stream."""

    def __init__(self, stream: int | None = None) -> None:
        self.where = stream
        self.said: list[str] = []
        self.create = ctypes.CFUNCTYPE(P, ctypes.POINTER(ErrorArgs))(self._create)
        self.stream = ctypes.CFUNCTYPE(P, ctypes.POINTER(StreamArgs))(self._stream)
        self.api = Api(ctypes.sizeof(Api), None, Version(24, None, 0, 3))
        self.api.create_error = ctypes.cast(self.create, P)
        self.api.get_stream = ctypes.cast(self.stream, P)
        self.kept: list[Any] = []

    def _create(self, args: Any) -> int:
        self.said.append(args.contents.message.decode())
        return len(self.said)

    def _stream(self, args: Any) -> int:
        args.contents.stream = self.where
        return 0

    def buffers(self, chance: random.Random, count: int) -> Buffers:
        each = [Buffer(48, None, 11, 16 * chance.randrange(1, 99), 1, None) for _ in range(count)]
        places = (P * max(1, count))(*(ctypes.addressof(b) for b in each))
        if count and chance.random() < 0.1:
            places[chance.randrange(count)] = None
        types = (ctypes.c_int * max(1, count))(*(chance.choice((1, 1, 1, 7)) for _ in each))
        self.kept += [each, places, types]
        parts = [ctypes.addressof(a) if chance.random() < 0.95 else None for a in (types, places)]
        return Buffers(40, None, chance.choice((count, count, count, -5)), *parts)

    def attributes(self, chance: random.Random, given: dict[str, Any]) -> Attributes:
        names, values, types = [], [], []
        for name, value in sorted(given.items()):
            if isinstance(value, str):
                values.append(Text(value.encode(), len(value)))
            else:
                self.kept.append(value)
                dtype = 5 if chance.random() < 0.98 else 4
                data = value.ctypes.data if chance.random() < 0.98 or not value.size else None
                values.append(Array(dtype, value.size, data))
            names.append(Text(name.encode(), len(name)))
            types.append((4 if isinstance(value, str) else 1) if chance.random() < 0.98 else 9)
        of_names = (P * len(names))(*(ctypes.addressof(n) for n in names))
        of_values = (P * len(names))(*(ctypes.addressof(v) for v in values))
        of_types = (ctypes.c_int * len(names))(*types)
        self.kept += [names, values, of_names, of_values, of_types]
        places = map(ctypes.addressof, (of_types, of_names, of_values))
        return Attributes(48, None, len(names), *places)
