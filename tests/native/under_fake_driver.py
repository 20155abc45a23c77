"""Launches with fake_driver.cpp in the place of libcuda.so.1; prints what it was asked."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np

from fake_xla import Array, Attributes, Buffer, Buffers, Caller, Frame, P, Text, handler
from polyquant.backends.native.compiled import compiled


class Note(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("loaded", "prepared", "shared", "entered", "launches")),
        ("config", ctypes.c_uint * 7),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_int),
        ("cluster", ctypes.c_uint * 3),
        ("argument", ctypes.c_uint8 * 512),
        *((name, ctypes.c_int) for name in ("map_type", "map_rank", "map_swizzle")),
        ("map_address", ctypes.c_uint64),
        ("map_extents", ctypes.c_uint64 * 3),
        ("map_strides", ctypes.c_uint64 * 2),
        ("map_box", ctypes.c_uint * 3),
    )


driver = ctypes.CDLL("libcuda.so.1")
driver.noted.restype = ctypes.POINTER(Note)
run = handler()


def call(stage: int = 3, **given: Any) -> str | None:
    """What the handler says of a call on stream 77 with operands at 48 and 32, a result at 64."""
    caller = Caller(77)
    attributes = {
        "kernel": "digest",
        "launch": np.array([5, 6, 8, 1, 1, 8, 256, 4096]),
        "argument": np.array([1, 7, 2, 9]),
        "places": np.array([0, 2, 16, 1]),
        "maps": np.zeros(0, np.int64),
    } | given
    buffers = [Buffer(48, None, 11, place, 1, None) for place in (48, 32, 64)]
    places = [(P * 2)(*map(ctypes.addressof, buffers[:2])), (P * 1)(ctypes.addressof(buffers[2]))]
    types = (ctypes.c_int * 2)(1, 1)
    names = [Text(name.encode(), len(name)) for name in sorted(attributes)]
    values = [
        Text(value.encode(), len(value))
        if isinstance(value, str)
        else Array(5, value.size, value.ctypes.data)
        for _, value in sorted(attributes.items())
    ]
    kinds = (ctypes.c_int * 5)(*(4 if isinstance(value, Text) else 1 for value in values))
    lists = [(P * 5)(*map(ctypes.addressof, each)) for each in (names, values)]
    frame = Frame(ctypes.sizeof(Frame), None, ctypes.addressof(caller.api), None, stage)
    frame.operands = Buffers(40, None, 2, ctypes.addressof(types), ctypes.addressof(places[0]))
    frame.results = Buffers(40, None, 1, ctypes.addressof(types), ctypes.addressof(places[1]))
    frame.attributes = Attributes(
        48, None, 5, ctypes.addressof(kinds), *map(ctypes.addressof, lists)
    )
    failed = run(ctypes.addressof(frame))
    return caller.said[0] if failed else None


def words(begin: int, count: int) -> list[int]:
    return np.frombuffer(bytes(note.argument), np.int64)[begin : begin + count].tolist()


note = driver.noted().contents
found: dict[str, Any] = {}
said = call() or ""
found["unknown"] = [
    "not known in this process" * ("not known in this process" in said),
    note.loaded,
]
compiled().keep_cuda_kernel("digest", b"cubin", "matmul", 32)
compiled().keep_cuda_kernel("digest", b"another", "matmul", 32)  # the first one stays
found["ready"] = [call(2), note.loaded, note.prepared, note.shared, note.launches]
call()
found["launched"] = [list(note.config), note.stream, note.attributes, list(note.cluster)]
found["launched"].append(note.entered)
found["argument"] = words(0, 4)
compiled().keep_cuda_kernel("mapped", b"cubin", "matmul", 160)
argument = np.array([0] * 17 + [9, 0, 0])
tiles = np.array([0, 0, 320, 30, 2, 640, 19200, 24])
call(kernel="mapped", argument=argument, places=np.array([144, 1]), maps=tiles)
found["mapped"] = [note.map_type, note.map_rank, note.map_swizzle, note.map_address]
found["mapped"] += [list(note.map_extents), list(note.map_strides), list(note.map_box)]
found["in_place"] = [note.argument[127], words(17, 1)[0]]
compiled().keep_cuda_kernel("twice", b"cubin", "matmul", 288)
tiles = np.concatenate([tiles, np.array([128, 1, 64, 9, 1, 128, 1152, 16])])
argument = np.array([0] * 32 + [0, 9, 0, 0])
call(kernel="twice", argument=argument, places=np.array([256, 2]), maps=tiles)
found["twice"] = [note.map_address, list(note.map_extents), list(note.map_box)]
found["twice"] += [note.argument[127], note.argument[255], words(32, 2)]
call(launch=np.array([5, 6, 1, 1, 1, 1, 256, 4096]))
found["single"] = [note.attributes, note.launches]
call(launch=np.array([5, 6, 8, *[1 << 30] * 3, 256, 4096]))  # whose product is 2^90
found["huge"] = [note.attributes, list(note.cluster)]
found["refused"] = call(launch=np.array([13, 6, 1, 1, 1, 1, 256, 4096]))
found["size"] = call(argument=np.zeros(5, np.int64))
compiled().keep_cuda_kernel("broken", b"no code", "matmul", 32)
found["broken"] = call(kernel="broken")
sys.stdout.write(json.dumps(found))
