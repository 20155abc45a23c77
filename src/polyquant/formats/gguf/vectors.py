"""ggml's vector types (IQ1, IQ2, IQ3): an index stands for 4 or 8 values at once.

Each value on a grid is one of few, with a sign or a shift of its own, so the same tensor is a
scalar lookup of 3 or 4 bits under the same two levels of scales: exactly the same numbers, in more
bytes. Writing finds the index of each vector again; vectors that are on no grid are refused.

``grids.npz`` holds the grids of ggml (``ggml-common.h``, MIT), as levels: the index of each value
among those that its type has. The tables ``iq1``, ``iq2``, ``iq3``, ``iq3_s`` of ``tables.py`` give
the numbers by ``level`` and, from the middle of the table on, the other sign or shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import numpy as np

from polyquant.arrays import HostArray
from polyquant.errors import CorruptData
from polyquant.formats.gguf.blocks import Arrays, BlockType

_BITS = np.arange(8, dtype=np.uint8)


@cache
def _grid(name: str) -> HostArray:
    """The levels of every index: uint8 ``(entries, values)``."""
    with files("polyquant.formats.gguf").joinpath("grids.npz").open("rb") as file:
        made: HostArray = np.load(file, allow_pickle=False)[name]
    made.flags.writeable = False
    return made


@cache
def _order(name: str) -> tuple[HostArray, HostArray]:
    """The grid's vectors as sorted keys, and the index of each."""
    keys = _keys(_grid(name))
    order = np.argsort(keys)
    return keys[order], order


def _keys(levels: HostArray) -> HostArray:
    """Vectors of levels below 8 as one number each."""
    weights = 8 ** np.arange(levels.shape[-1], dtype=np.int64)
    made: HostArray = (levels.astype(np.int64) * weights).sum(axis=-1)
    return made


def _vectors(name: str, index: HostArray) -> HostArray:
    """The levels of ``(blocks, n)`` indices as ``(blocks, values)``."""
    return _grid(name)[index].reshape(len(index), -1)


def _indices(name: str, levels: HostArray) -> HostArray:
    """Undo ``_vectors``. Raises CorruptData for a vector that the grid lacks."""
    width = _grid(name).shape[1]
    keys, order = _order(name)
    wanted = _keys(levels.reshape(len(levels), -1, width))
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    if (keys[at] != wanted).any():
        reason = f"it has a vector of {width} values that is not on the grid"
        raise CorruptData(what=f"A tensor to be written as {name.upper()}", reason=reason)
    return order[at]


def _sign_bits(data: HostArray) -> HostArray:
    return np.unpackbits(np.ascontiguousarray(data), axis=1, bitorder="little")


def _sign_bytes(signs: HostArray) -> HostArray:
    return np.packbits(signs, axis=1, bitorder="little")


def _even(seven: HostArray) -> HostArray:
    """Seven sign bits as eight: the last makes their number even."""
    seven = seven.astype(np.uint8)
    parity = np.bitwise_xor.reduce((seven[..., None] >> _BITS) & 1, axis=-1)
    made: HostArray = seven | parity << 7
    return made


def _check_even(signs: HostArray) -> None:
    if (_even(signs & 0x7F) != signs).any():
        reason = "it has eight values with an odd number of minus signs"
        raise CorruptData(what="A tensor to be written as IQ2 or IQ3", reason=reason)


def _words(data: HostArray, kind: str) -> HostArray:
    """Bytes of a block as little-endian words."""
    return np.ascontiguousarray(data).view(f"<{kind}")


def _bytes(words: HostArray, kind: str) -> HostArray:
    return np.ascontiguousarray(words.astype(f"<{kind}")).view(np.uint8)


def _scaled(codes: HostArray, scales: HostArray, d: HostArray) -> Arrays:
    return {"codes": codes, "scales.codes": scales.astype(np.uint8), "scales.scales": d}


def _interleaved(low: HostArray, high: HostArray) -> HostArray:
    return np.stack([low, high], axis=-1).reshape(len(low), -1)


# -- IQ2 --------------------------------------------------------------------------------------


def _unpack_iq2_xxs(b: Any) -> Arrays:
    words = _words(b["qs"].astype("<u2"), "u4").reshape(len(b), 8, 2)
    index = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    signs = _even((words[..., 1, None] >> np.arange(0, 28, 7)) & 127).reshape(len(b), -1)
    codes = _vectors("iq2_xxs", index) | _sign_bits(signs) << 2
    return _scaled(codes, words[..., 1] >> 28, b["d"])


def _pack_iq2_xxs(n: Arrays) -> Arrays:
    codes, scales = n["codes"], n["scales.codes"]
    index = _indices("iq2_xxs", codes & 3).astype(np.uint8)
    signs = _sign_bytes(codes >> 2)
    _check_even(signs)
    seven = (signs & 127).reshape(len(codes), 8, 4).astype(np.uint32) << np.arange(0, 28, 7)
    second = np.bitwise_or.reduce(seven, axis=-1) | scales.astype(np.uint32) << 28
    words = np.stack([_words(index, "u4").reshape(len(codes), 8), second], axis=-1)
    return {
        "d": n["scales.scales"],
        "qs": _words(_bytes(words, "u4"), "u2").reshape(len(codes), -1),
    }


def _unpack_iq2_xs(b: Any) -> Arrays:
    words, scales = b["qs"].astype(np.uint16), b["scales"]
    codes = _vectors("iq2_xs", words & 511) | _sign_bits(_even(words >> 9)) << 2
    return _scaled(codes, _interleaved(scales & 15, scales >> 4), b["d"])


def _pack_iq2_xs(n: Arrays) -> Arrays:
    codes, scales = n["codes"], n["scales.codes"]
    signs = _sign_bytes(codes >> 2)
    _check_even(signs)
    words = _indices("iq2_xs", codes & 3) | (signs & 127).astype(np.int64) << 9
    return {
        "d": n["scales.scales"],
        "qs": words.astype(np.uint16),
        "scales": scales[:, ::2] | scales[:, 1::2] << 4,
    }


def _unpack_iq2_s(b: Any) -> Arrays:
    qs, scales = b["qs"], b["scales"]
    high = (b["qh"][..., None] >> np.arange(0, 8, 2)) & 3
    index = qs[:, :32] | high.reshape(len(b), -1).astype(np.uint16) << 8
    codes = _vectors("iq2_s", index) | _sign_bits(qs[:, 32:]) << 2
    return _scaled(codes, _interleaved(scales & 15, scales >> 4), b["d"])


def _pack_iq2_s(n: Arrays) -> Arrays:
    codes, scales = n["codes"], n["scales.codes"]
    index = _indices("iq2_s", codes & 3)
    high = (index >> 8).reshape(len(codes), 8, 4) << np.arange(0, 8, 2)
    return {
        "d": n["scales.scales"],
        "qs": np.concatenate([index & 255, _sign_bytes(codes >> 2)], axis=1).astype(np.uint8),
        "qh": np.bitwise_or.reduce(high, axis=-1).astype(np.uint8),
        "scales": scales[:, ::2] | scales[:, 1::2] << 4,
    }


# -- IQ3 --------------------------------------------------------------------------------------


def _unpack_iq3_xxs(b: Any) -> Arrays:
    words = _words(b["qs"][:, 64:], "u4")
    signs = _even((words[..., None] >> np.arange(0, 28, 7)) & 127).reshape(len(b), -1)
    codes = _vectors("iq3_xxs", b["qs"][:, :64]) | _sign_bits(signs) << 3
    return _scaled(codes, words >> 28, b["d"])


def _pack_iq3_xxs(n: Arrays) -> Arrays:
    codes, scales = n["codes"], n["scales.codes"]
    index = _indices("iq3_xxs", codes & 7).astype(np.uint8)
    signs = _sign_bytes(codes >> 3)
    _check_even(signs)
    seven = (signs & 127).reshape(len(codes), 8, 4).astype(np.uint32) << np.arange(0, 28, 7)
    words = np.bitwise_or.reduce(seven, axis=-1) | scales.astype(np.uint32) << 28
    return {"d": n["scales.scales"], "qs": np.concatenate([index, _bytes(words, "u4")], axis=1)}


def _unpack_iq3_s(b: Any) -> Arrays:
    index = b["qs"] | _sign_bits(b["qh"]).astype(np.uint16) << 8
    codes = _vectors("iq3_s", index) | _sign_bits(b["signs"]) << 3
    return _scaled(codes, _interleaved(b["scales"] & 15, b["scales"] >> 4), b["d"])


def _pack_iq3_s(n: Arrays) -> Arrays:
    codes, scales = n["codes"], n["scales.codes"]
    index = _indices("iq3_s", codes & 7)
    return {
        "d": n["scales.scales"],
        "qs": (index & 255).astype(np.uint8),
        "qh": _sign_bytes((index >> 8).astype(np.uint8)),
        "signs": _sign_bytes(codes >> 3),
        "scales": scales[:, ::2] | scales[:, 1::2] << 4,
    }


# -- IQ1 --------------------------------------------------------------------------------------


def _unpack_iq1_s(b: Any) -> Arrays:
    qh = b["qh"].astype(np.uint16)
    high = (qh[..., None] >> np.arange(0, 12, 3)) & 7
    index = b["qs"] | high.reshape(len(b), -1).astype(np.uint16) << 8
    shift = np.repeat((qh >> 15).astype(np.uint8), 32, axis=1)
    return _scaled(_vectors("iq1_s", index) | shift << 2, qh >> 12 & 7, b["d"])


def _pack_iq1_s(n: Arrays) -> Arrays:
    codes, scales = n["codes"], n["scales.codes"]
    shift = codes[:, ::32] >> 2
    if (np.repeat(shift, 32, axis=1) != codes >> 2).any():
        reason = "its values are shifted both ways within 32"
        raise CorruptData(what="A tensor to be written as IQ1_S", reason=reason)
    index = _indices("iq1_s", codes & 3)
    high = (index >> 8).reshape(len(codes), 8, 4) << np.arange(0, 12, 3)
    qh = np.bitwise_or.reduce(high, axis=-1) | scales.astype(np.int64) << 12
    return {
        "d": n["scales.scales"],
        "qs": (index & 255).astype(np.uint8),
        "qh": (qh | shift.astype(np.int64) << 15).astype(np.uint16),
    }


def _unpack_iq1_m(b: Any) -> Arrays:
    words = b["scales"].astype(np.uint16)
    d = np.bitwise_or.reduce((words >> 12) << np.arange(0, 16, 4, dtype=np.uint16), axis=1)
    scales = (words[..., None] >> np.arange(0, 12, 3)) & 7
    qh = b["qh"]
    halves = _interleaved(qh & 15, qh >> 4)
    index = b["qs"] | (halves & 7).astype(np.uint16) << 8
    shift = np.repeat(halves >> 3, 8, axis=1)
    codes = _vectors("iq1_s", index) | shift << 2
    return _scaled(codes, scales.reshape(len(b), -1), d[:, None].view(np.float16))


def _pack_iq1_m(n: Arrays) -> Arrays:
    codes, scales = n["codes"], n["scales.codes"]
    shift = codes[:, ::8] >> 2
    if (np.repeat(shift, 8, axis=1) != codes >> 2).any():
        reason = "its values are shifted both ways within 8"
        raise CorruptData(what="A tensor to be written as IQ1_M", reason=reason)
    index = _indices("iq1_s", codes & 3)
    halves = (index >> 8 | shift.astype(np.int64) << 3).astype(np.uint8)
    d = n["scales.scales"].astype("<f2").view(np.uint16).astype(np.int64)
    words = scales.reshape(len(codes), 4, 4).astype(np.int64) << np.arange(0, 12, 3)
    top = (d >> np.arange(0, 16, 4) & 15) << 12
    return {
        "qs": (index & 255).astype(np.uint8),
        "qh": halves[:, ::2] | halves[:, 1::2] << 4,
        "scales": (np.bitwise_or.reduce(words, axis=-1) | top).astype(np.uint16),
    }


def _type(name: str, text: str, unpack: Any, pack: Any, *fields: tuple[str, str, int]) -> BlockType:
    return BlockType(name, 256, fields, text, unpack, pack)


_D = ("d", "f2", 1)
_ALL = (
    _type(
        "IQ2_XXS",
        "u3[iq2]/32:(u4[odd16]/8:f16)",
        _unpack_iq2_xxs,
        _pack_iq2_xxs,
        *(_D, ("qs", "u2", 32)),
    ),
    _type(
        "IQ2_XS",
        "u3[iq2]/16:(u4[odd16]/16:f16)",
        _unpack_iq2_xs,
        _pack_iq2_xs,
        *(_D, ("qs", "u2", 32), ("scales", "u1", 8)),
    ),
    _type(
        "IQ2_S",
        "u3[iq2]/16:(u4[odd16]/16:f16)",
        _unpack_iq2_s,
        _pack_iq2_s,
        *(_D, ("qs", "u1", 64), ("qh", "u1", 8), ("scales", "u1", 8)),
    ),
    _type(
        "IQ3_XXS",
        "u4[iq3]/32:(u4[odd16]/8:f16)",
        _unpack_iq3_xxs,
        _pack_iq3_xxs,
        *(_D, ("qs", "u1", 96)),
    ),
    _type(
        "IQ3_S",
        "u4[iq3_s]/32:(u4[odd16]/8:f16)",
        _unpack_iq3_s,
        _pack_iq3_s,
        *(_D, ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)),
    ),
    _type(
        "IQ1_S",
        "u3[iq1]/32:(u3[odd8]/8:f16)",
        _unpack_iq1_s,
        _pack_iq1_s,
        *(_D, ("qs", "u1", 32), ("qh", "u2", 8)),
    ),
    _type(
        "IQ1_M",
        "u3[iq1]/16:(u3[odd8]/16:f16)",
        _unpack_iq1_m,
        _pack_iq1_m,
        *(("qs", "u1", 32), ("qh", "u1", 16), ("scales", "u2", 4)),
    ),
)
#: Name -> type.
VECTOR_TYPES: Mapping[str, BlockType] = MappingProxyType({t.name: t for t in _ALL})
