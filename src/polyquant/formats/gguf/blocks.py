"""ggml's block types: what the bytes of a block hold, as the numbers of a scheme, and back.

A tensor's row is a line of blocks. A type says which fields a block has (in the order of its
bytes), the scheme that says the same, and two functions between the two. Their arrays have one row
a block; ``codes`` are unsigned fields of the scheme's value type, so a stored ``q`` that means
``q - 8`` is the two's complement ``q ^ 8``.

Source: ``ggml-common.h`` and ``ggml-quants.c`` of llama.cpp, whose names the types have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from polyquant.arrays import HostArray
from polyquant.errors import CorruptData
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme

#: Arrays by name: fields of blocks, or numbers of a scheme.
Arrays = dict[str, HostArray]


@dataclass(frozen=True)
class BlockType:
    """One type: ``elements`` values a block, stored as ``fields`` (name, dtype, count)."""

    name: str
    elements: int
    fields: tuple[tuple[str, str, int], ...]
    text: str
    unpack: Callable[[Any], Arrays]
    pack: Callable[[Arrays], Arrays]

    @cached_property
    def scheme(self) -> QuantScheme:
        """What its values are."""
        return as_scheme(self.text)

    def dtype(self, order: str) -> np.dtype[Any]:
        """A block as a NumPy record, little- ("<") or big-endian (">")."""
        return np.dtype([(name, f"{order}{kind}", (count,)) for name, kind, count in self.fields])

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of a block."""
        return self.dtype("<").itemsize


# -- bits -------------------------------------------------------------------------------------


def low_high(data: HostArray) -> HostArray:
    """Nibbles of ``(..., n)`` bytes as ``(..., 2n)``: all low ones, then all high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def nibbles(fields: HostArray) -> HostArray:
    """Undo ``low_high``."""
    half = fields.shape[-1] // 2
    made: HostArray = fields[..., :half] | fields[..., half:] << 4
    return made


def planes(data: HostArray, bits: int, run: int) -> HostArray:
    """Fields of which each byte holds ``8 / bits``, ``run`` elements apart, as ``(blocks, n)``."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = data.reshape(len(data), -1, 1, run)
    made: HostArray = ((runs >> shifts) & (2**bits - 1)).reshape(len(data), -1)
    return made


def unplanes(fields: HostArray, bits: int, run: int) -> HostArray:
    """Undo ``planes``."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = fields.reshape(len(fields), -1, 8 // bits, run)
    made: HostArray = np.bitwise_or.reduce(runs << shifts, axis=2).reshape(len(fields), -1)
    return made


def negated(numbers: HostArray) -> HostArray:
    """Floats of 16 bits with the other sign; it is a bit, so nothing is lost, NaN included."""
    return (numbers.astype("<f2").view(np.uint16) ^ 0x8000).view(np.float16)


# -- blocks of 32 -----------------------------------------------------------------------------


def _nibble_type(name: str, text: str, flip: int, *more: tuple[str, str, int]) -> BlockType:
    """A type of 32 nibbles under a float16 scale (and what else ``more`` stores plainly)."""
    names = {"d": "scales", "m": "offsets"}
    plain = [("d", "f2", 1), *more]

    def unpack(b: Any) -> Arrays:
        found = {names[field]: b[field] for field, _, _ in plain}
        return found | {"codes": low_high(b["qs"]) ^ flip}

    def pack(n: Arrays) -> Arrays:
        found = {field: n[names[field]] for field, _, _ in plain}
        return found | {"qs": nibbles(n["codes"] ^ flip)}

    return BlockType(name, 32, (*plain, ("qs", "u1", 16)), text, unpack, pack)


def _fifth_bits(b: Any) -> HostArray:
    return np.unpackbits(b["qh"], axis=1, bitorder="little") << 4


def _five_bit_type(name: str, text: str, flip: int, *more: tuple[str, str, int]) -> BlockType:
    """The same with a fifth bit of every code in four bytes of their own."""
    four = _nibble_type(name, text, 0, *more)

    def unpack(b: Any) -> Arrays:
        found = four.unpack(b)
        return found | {"codes": (found["codes"] | _fifth_bits(b)) ^ flip}

    def pack(n: Arrays) -> Arrays:
        codes = n["codes"] ^ flip
        high = np.packbits(codes >> 4, axis=1, bitorder="little")
        return four.pack(n | {"codes": codes & 15}) | {"qh": high}

    fields = (*four.fields[:-1], ("qh", "u1", 4), four.fields[-1])
    return BlockType(name, 32, fields, text, unpack, pack)


_M = ("m", "f2", 1)


def _unpack_q8_0(b: Any) -> Arrays:
    return {"scales": b["d"], "codes": b["qs"]}


def _pack_q8_0(n: Arrays) -> Arrays:
    return {"d": n["scales"], "qs": n["codes"]}


# -- blocks of 256: k-quants ------------------------------------------------------------------


def _scales_and_minimums(data: HostArray) -> tuple[HostArray, HostArray]:
    """Q4_K's twelve bytes: eight 6-bit scales and eight 6-bit minimums."""
    a, b, c = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1)
    return scales, np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1)


def _twelve_bytes(scales: HostArray, minimums: HostArray) -> HostArray:
    """Undo ``_scales_and_minimums``."""
    a = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    b = minimums[:, :4] | (minimums[:, 4:] >> 4 << 6)
    return np.concatenate([a, b, (scales[:, 4:] & 15) | (minimums[:, 4:] & 15) << 4], axis=1)


def _with_minimums(scales: HostArray, minimums: HostArray, b: Any, codes: HostArray) -> Arrays:
    """A minimum is subtracted: a bias under the negated ``dmin``."""
    return {
        "codes": codes,
        "scales.codes": scales,
        "scales.scales": b["d"],
        "offsets.codes": minimums,
        "offsets.scales": negated(b["dmin"]),
    }


def _unpack_q2_k(b: Any) -> Arrays:
    both = b["scales"]
    return _with_minimums(both & 15, both >> 4, b, planes(b["qs"], 2, 32))


def _pack_q2_k(n: Arrays) -> Arrays:
    return {
        "scales": n["scales.codes"] | n["offsets.codes"] << 4,
        "qs": unplanes(n["codes"], 2, 32),
        "d": n["scales.scales"],
        "dmin": negated(n["offsets.scales"]),
    }


def _unpack_q3_k(b: Any) -> Arrays:
    low, high = low_high(b["scales"][:, :8]), planes(b["scales"][:, 8:], 2, 4)
    codes = planes(b["qs"], 2, 32) | planes(b["hmask"], 1, 32) << 2
    return {
        "codes": codes ^ 4,
        "scales.codes": (low | high << 4) ^ 32,
        "scales.scales": b["d"],
    }


def _pack_q3_k(n: Arrays) -> Arrays:
    scales, codes = n["scales.codes"] ^ 32, n["codes"] ^ 4
    both = [nibbles(scales & 15), unplanes(scales >> 4, 2, 4)]
    return {
        "hmask": unplanes(codes >> 2, 1, 32),
        "qs": unplanes(codes & 3, 2, 32),
        "scales": np.concatenate(both, axis=1),
        "d": n["scales.scales"],
    }


def _unpack_q4_k(b: Any) -> Arrays:
    return _with_minimums(*_scales_and_minimums(b["scales"]), b, planes(b["qs"], 4, 32))


def _pack_q4_k(n: Arrays) -> Arrays:
    return {
        "d": n["scales.scales"],
        "dmin": negated(n["offsets.scales"]),
        "scales": _twelve_bytes(n["scales.codes"], n["offsets.codes"]),
        "qs": unplanes(n["codes"] & 15, 4, 32),
    }


def _unpack_q5_k(b: Any) -> Arrays:
    found = _unpack_q4_k(b)
    return found | {"codes": found["codes"] | planes(b["qh"], 1, 32) << 4}


def _pack_q5_k(n: Arrays) -> Arrays:
    return _pack_q4_k(n) | {"qh": unplanes(n["codes"] >> 4, 1, 32)}


def _unpack_q6_k(b: Any) -> Arrays:
    codes = planes(b["ql"], 4, 64) | planes(b["qh"], 2, 32) << 4
    return {"codes": codes ^ 32, "scales.codes": b["scales"], "scales.scales": b["d"]}


def _pack_q6_k(n: Arrays) -> Arrays:
    codes = n["codes"] ^ 32
    return {
        "ql": unplanes(codes & 15, 4, 64),
        "qh": unplanes(codes >> 4, 2, 32),
        "scales": n["scales.codes"],
        "d": n["scales.scales"],
    }


# -- tables, ternary, signs -------------------------------------------------------------------


def _unpack_iq4_xs(b: Any) -> Arrays:
    low = b["scales_l"]
    low = np.stack([low & 15, low >> 4], axis=-1).reshape(len(low), -1)
    high = (b["scales_h"] >> np.arange(0, 16, 2)).astype(np.uint8) & 3
    runs = low_high(b["qs"].reshape(len(low), 8, 16))
    return {
        "codes": runs.reshape(len(low), -1),
        "scales.codes": (low | high << 4) ^ 32,
        "scales.scales": b["d"],
    }


def _pack_iq4_xs(n: Arrays) -> Arrays:
    scales = n["scales.codes"] ^ 32
    high = (scales >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    return {
        "d": n["scales.scales"],
        "scales_h": np.bitwise_or.reduce(high, axis=1)[:, None],
        "scales_l": (scales[:, ::2] & 15) | (scales[:, 1::2] & 15) << 4,
        "qs": nibbles(n["codes"].reshape(len(scales), 8, 32)).reshape(len(scales), -1),
    }


#: Digits of a byte of TQ1_0: multiplied by a power of three, the byte's carry is the digit.
_POWERS = np.asarray([1, 3, 9, 27, 81], np.uint8)[:, None]


def _trits(data: HostArray, digits: int) -> HostArray:
    """``digits`` base-3 digits a byte, digit by digit."""
    turned = data[:, None, :] * _POWERS[:digits]  # modulo 256
    return (turned.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(data), -1)


def _trit_bytes(fields: HostArray, digits: int) -> HostArray:
    """Undo ``_trits``, with the bytes that ggml's quantizer writes."""
    weights = np.asarray([81, 27, 9, 3, 1], np.uint16)[:digits, None]
    whole = (fields.reshape(len(fields), digits, -1) * weights).sum(axis=1)
    made: HostArray = ((whole * 256 + 242) // 243).astype(np.uint8)
    return made


def _unpack_tq1_0(b: Any) -> Arrays:
    qs = b["qs"]
    runs = [_trits(qs[:, :32], 5), _trits(qs[:, 32:], 5), _trits(b["qh"], 4)]
    return {"codes": np.concatenate(runs, axis=1), "scales": b["d"]}


def _pack_tq1_0(n: Arrays) -> Arrays:
    codes = n["codes"]
    if (codes > 2).any():
        reason = "it has a fourth code, and three are packed in base 3"
        raise CorruptData(what="A tensor to be written as TQ1_0", reason=reason)
    runs = [_trit_bytes(codes[:, :160], 5), _trit_bytes(codes[:, 160:240], 5)]
    return {
        "qs": np.concatenate(runs, axis=1),
        "qh": _trit_bytes(codes[:, 240:], 4),
        "d": n["scales"],
    }


def _plane_type(
    name: str, text: str, bits: int, run: int, *fields: tuple[str, str, int]
) -> BlockType:
    """A type of a float16 scale and of bytes in which fields lie ``run`` elements apart."""

    def unpack(b: Any) -> Arrays:
        return {"codes": planes(b["qs"], bits, run), "scales": b["d"]}

    def pack(n: Arrays) -> Arrays:
        return {"qs": unplanes(n["codes"], bits, run), "d": n["scales"]}

    count = next(count for field, _, count in fields if field == "qs")
    return BlockType(name, count * 8 // bits, fields, text, unpack, pack)


# -- microscaling -----------------------------------------------------------------------------


def _unpack_mxfp4(b: Any) -> Arrays:
    return {"codes": low_high(b["qs"]), "scales": b["e"]}


def _pack_mxfp4(n: Arrays) -> Arrays:
    return {"qs": nibbles(n["codes"]), "e": n["scales"]}


def _unpack_nvfp4(b: Any) -> Arrays:
    codes = low_high(b["qs"].reshape(len(b), 4, 8)).reshape(len(b), -1)
    scales = b["d"]  # ggml ignores the sign, and takes 0x7F for zero
    if (scales == 0xFF).any():
        raise CorruptData(what="An NVFP4 tensor", reason="it has scales of 0xFF, which are NaN")
    return {"codes": codes, "scales": np.where(scales == 0x7F, 0, scales & 0x7F).astype(np.uint8)}


def _pack_nvfp4(n: Arrays) -> Arrays:
    codes = n["codes"].reshape(len(n["codes"]), 4, 16)
    return {"qs": nibbles(codes).reshape(len(codes), -1), "d": n["scales"]}


_HALF = ("d", "f2", 1)
_ALL = (
    _nibble_type("Q4_0", "q4f/32:f16", 8),
    _nibble_type("Q4_1", "u4/32:f16+bias:f16", 0, _M),
    _five_bit_type("Q5_0", "q5f/32:f16", 16),
    _five_bit_type("Q5_1", "u5/32:f16+bias:f16", 0, _M),
    BlockType("Q8_0", 32, (_HALF, ("qs", "u1", 32)), "q8f/32:f16", _unpack_q8_0, _pack_q8_0),
    BlockType(
        "Q2_K",
        256,
        (("scales", "u1", 16), ("qs", "u1", 64), _HALF, ("dmin", "f2", 1)),
        "u2/16:(u4/16:f16)+bias:(u4/16:f16)",
        _unpack_q2_k,
        _pack_q2_k,
    ),
    BlockType(
        "Q3_K",
        256,
        (("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), _HALF),
        "q3f/16:(q6f/16:f16)",
        _unpack_q3_k,
        _pack_q3_k,
    ),
    BlockType(
        "Q4_K",
        256,
        (_HALF, ("dmin", "f2", 1), ("scales", "u1", 12), ("qs", "u1", 128)),
        "u4/32:(u6/8:f16)+bias:(u6/8:f16)",
        _unpack_q4_k,
        _pack_q4_k,
    ),
    BlockType(
        "Q5_K",
        256,
        (_HALF, ("dmin", "f2", 1), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)),
        "u5/32:(u6/8:f16)+bias:(u6/8:f16)",
        _unpack_q5_k,
        _pack_q5_k,
    ),
    BlockType(
        "Q6_K",
        256,
        (("ql", "u1", 128), ("qh", "u1", 64), ("scales", "u1", 16), _HALF),
        "q6f/16:(q8f/16:f16)",
        _unpack_q6_k,
        _pack_q6_k,
    ),
    _nibble_type("IQ4_NL", "u4[iq4_nl]/32:f16", 0),
    BlockType(
        "IQ4_XS",
        256,
        (_HALF, ("scales_h", "u2", 1), ("scales_l", "u1", 4), ("qs", "u1", 128)),
        "u4[iq4_nl]/32:(q6f/8:f16)",
        _unpack_iq4_xs,
        _pack_iq4_xs,
    ),
    _plane_type("TQ2_0", "u2[ternary]/256:f16", 2, 32, ("qs", "u1", 64), _HALF),
    BlockType(
        "TQ1_0",
        256,
        (("qs", "u1", 48), ("qh", "u1", 4), _HALF),
        "u2[ternary]/256:f16",
        _unpack_tq1_0,
        _pack_tq1_0,
    ),
    _plane_type("Q1_0", "u1[sign]/128:f16", 1, 1, _HALF, ("qs", "u1", 16)),
    _plane_type("Q2_0", "u2[ternary]/64:f16", 2, 1, _HALF, ("qs", "u1", 16)),
    BlockType(
        "MXFP4",
        32,
        (("e", "u1", 1), ("qs", "u1", 16)),
        "e2m1/32:ue8m0",
        _unpack_mxfp4,
        _pack_mxfp4,
    ),
    BlockType(
        "NVFP4",
        64,
        (("d", "u1", 4), ("qs", "u1", 32)),
        "e2m1/16:ue4m3",
        _unpack_nvfp4,
        _pack_nvfp4,
    ),
)
#: Name -> type, of those whose codes stand for single values.
BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType({t.name: t for t in _ALL})
