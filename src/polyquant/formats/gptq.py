"""GPTQ: integers of 2 to 8 bits packed along the input, zero points along the output.

``qweight`` int32 ``[in * bits / 32, out]``, ``qzeros`` int32 ``[groups, out * bits / 32]``,
``scales`` ``[groups, out]``, ``g_idx`` int32 ``[in]``. Version 1 of the format stores zero points
less one, as whole words less one in each field, so that a field of zero borrows from its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from polyquant.arrays import HostArray
from polyquant.codec import pack, unpack
from polyquant.errors import CorruptData, UnsupportedDtype
from polyquant.files.assemble import assemble, numbers_of
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.facts import Facts
from polyquant.files.info import TensorInfo
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import CONFIG, Probe
from polyquant.files.stored import (
    StoredArray,
    base_of,
    check_held,
    open_stored_writer,
    plain_why_not,
    scale_code,
)
from polyquant.files.writing import PlannedWriter, Stored, kept_origin
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import QuantStore, QuantValue

NAME = "gptq"
FACTS = Facts(
    tool="GPTQModel, AutoGPTQ",
    reads="2 to 8 bits, zero points of versions 1 and 2, act-order, split planes",
    exact="bit-equal to float32",
    writes="2, 3, 4 and 8 bits; version 2, and what was read of version 1 as that",
    bytes="yes, but for split planes",
    checked="by hand, from the published layout; files of GPTQModel come back byte for byte",
)
#: Names of the format in configs -> whether zero points are stored less one.
_VERSIONS: Mapping[Any, bool] = MappingProxyType(
    {None: True, "gptq": True, "gptq_v2": False, "gptq_p": False}
)
#: One in each field of a word.
_ONES: Mapping[int, int] = MappingProxyType({2: 0x55555555, 4: 0x11111111, 8: 0x01010101})
#: Widths of the planes that 32 fields are split into, lowest bits first.
_PLANES: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
)


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return probe.why_not_declared(NAME)


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index; the config gives bits and group_size.

    Raises InvalidHeader, UnsupportedDtype.
    """
    source = Source(probe, NAME)
    return open_layers(probe, source, _layers(source))


def _layers(source: Source) -> Iterator[Layer]:
    config = source.config
    version = config.get("checkpoint_format", config.get("format"))
    is_known = version is None or (isinstance(version, str) and version in _VERSIONS)
    if not is_known:
        raise source.refuse("the config", version, [v for v in _VERSIONS if v])
    for base in source.names(".qweight"):
        facts = _facts(source, base)
        bits, group_size = source.number("bits", facts), source.number("group_size", facts)
        if not 2 <= bits <= 8 or not (group_size == -1 or group_size > 0):
            raise source.refuse(base, f"{bits} bits in groups of {group_size}", range(2, 9))
        yield _layer(source, base, bits, group_size, str(version or NAME))


def _facts(source: Source, base: str) -> Mapping[str, Any]:
    """The config's general facts, and over them those of the first pattern that a module matches.

    ``dynamic`` maps patterns to facts; one that begins with ``-:`` names modules that are not
    quantized, and so have no ``qweight``.
    """
    dynamic = source.config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise source.fail("dynamic of its config is no object")
    for pattern, own in dynamic.items():
        if pattern.startswith("-:") or not isinstance(own, Mapping):
            continue
        if source.matches(pattern.removeprefix("+:"), base):
            return {**source.config, **own}
    return source.config


def _layer(source: Source, base: str, bits: int, group_size: int, version: str) -> Layer:
    packed = source.expect(f"{base}.qweight", ("I32",), (None, None))
    words, rows = packed.shape
    if words * 32 % bits or not words:
        raise source.fail(f"tensor {packed.name!r} has {words} words, no whole {bits}-bit codes")
    columns = words * 32 // bits
    size = columns if group_size == -1 else group_size
    groups = -(-columns // size)
    scale = source.scale(f"{base}.scales", (groups, rows))
    source.expect(f"{base}.qzeros", ("I32",), (groups, -(-rows * bits // 32)))
    uses = [f"{base}.{part}" for part in ("qweight", "qzeros", "scales")]
    is_grouped = False
    if f"{base}.g_idx" in source:
        source.expect(f"{base}.g_idx", ("I32",), (columns,))
        uses.append(f"{base}.g_idx")
        # Without act-order it says nothing new; it is small, so it is looked at.
        is_grouped = bool((source.read(f"{base}.g_idx") != np.arange(columns) // size).any())
    scheme = QuantScheme(
        f"u{bits}", block=size, scale=scale, offset=f"zero_point:u{bits}", grouped=is_grouped
    )
    read = partial(_read, source, base, scheme, (rows, columns), version)
    return Layer(f"{base}.weight", (rows, columns), scheme, tuple(uses), read)


def _read(
    source: Source, base: str, scheme: QuantScheme, shape: tuple[int, int], version: str
) -> QTensor:
    bits = scheme.bits
    words = source.read(f"{base}.qweight").view(np.uint32).T
    zero_words = source.read(f"{base}.qzeros").view(np.uint32)
    if _VERSIONS[version] and bits in _ONES:
        zero_words = zero_words + np.uint32(_ONES[bits])  # modulo 2^32
    zeros = fields(zero_words, bits, shape[0], version)
    if _VERSIONS[version] and bits not in _ONES:
        zeros = (zeros + 1) & (2**bits - 1)
    numbers: dict[str, HostArray] = {
        "codes": fields(words, bits, shape[1], version),
        "scales": source.read(f"{base}.scales").T,
        "offsets": zeros.T,
    }
    if scheme.grouped:
        groups = source.read(f"{base}.g_idx")
        if groups.min() < 0 or groups.max() >= numbers["scales"].shape[1]:
            raise CorruptData(what=f"Tensor '{base}.g_idx'", reason="it names groups without scale")
        numbers["groups"] = groups
    return assemble(scheme, shape, numbers)


def fields(words: HostArray, bits: int, length: int, version: str) -> HostArray:
    """Fields of ``(lines, words)`` uint32, lowest bits first: a stream, or split planes."""
    words = np.ascontiguousarray(words)
    if bits not in _PLANES or (bits == 3 and version != "gptq_p"):
        stream = words.view(np.uint8)
        made: HostArray = unpack(np, stream, length, QuantValue(f"u{bits}"), QuantStore.PACKED_U32)
        return made
    runs, at, whole = words.reshape(len(words), -1, bits), 0, 0
    for shift, width in zip((0, *np.cumsum(_PLANES[bits])), _PLANES[bits], strict=False):
        plane = np.ascontiguousarray(runs[..., at : at + width]).view(np.uint8)
        value = QuantValue(f"u{width}")
        found = unpack(np, plane, 32, value, QuantStore.PACKED_U32)
        whole = whole | found << np.uint8(shift)
        at += width
    planes: HostArray = np.asarray(whole).reshape(len(words), -1)[:, :length]
    return planes


# -- writing ----------------------------------------------------------------------------------

#: Variant -> the scheme that its weights have.
VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "4bit": "u4/128:f16-zero:u4",
        "8bit": "u8/128:f16-zero:u8",
        "3bit": "u3/128:f16-zero:u3",
        "2bit": "u2/64:f16-zero:u2",
    }
)
_WRITABLE_BITS = (2, 3, 4, 8)


def why_not_hold(info: TensorInfo) -> str | None:
    """Why GPTQ cannot hold a tensor's values exactly, or None.

    A symmetric code is held as an unsigned one under the zero point in the middle.
    """
    scheme = info.scheme
    if scheme is None:
        return plain_why_not(info)
    if 0 in info.shape:
        return "it has no elements"
    if not info.name.endswith(".weight") or len(info.shape) != 2:
        return "it is not the weight of a linear layer"
    if info.axes != (0, 1):
        return "its axes are stored in another order"
    is_whole = scheme.offset is None or scheme.offset == ("zero_point", f"u{scheme.bits}")
    is_integer = scheme.mode in ("affine", "symmetric") and not scheme.value.is_float
    is_signed = scheme.value.is_signed or scheme.offset is not None
    plain = scheme._with(grouped=False)
    if not (is_whole and is_integer and is_signed and plain.is_plain):
        return f"GPTQ has no {scheme}"
    if scheme.tensor_scale is not None or scheme.scale not in ("f16", "bf16", "f32"):
        return f"its scales are floats alone, not {scheme.scale}"
    if scheme.block is None or len(scheme.block) != 1 or scheme.bits not in _WRITABLE_BITS:
        return f"it has no {scheme.bits} bits in blocks of {scheme.block}"
    if info.shape[1] * scheme.bits % 32:
        return f"{info.shape[1]} codes of {scheme.bits} bits fill no whole words"
    return None


def open_writer(
    path: Path,
    plan: Sequence[TensorInfo],
    metadata: Mapping[str, str] = MappingProxyType({}),
    whole: Sequence[TensorInfo] | None = None,
) -> PlannedWriter:
    """The writer of a file of a model of the tensors ``whole``.

    In version 2 of the format, or in version 1 where metadata say that it came from one.

    Raises UnsupportedDtype (also where layers differ in bits or group size), InvalidName.
    """
    whole = plan if whole is None else whole
    check_held(whole, why_not_hold, NAME)
    quantized = [info for info in whole if info.scheme is not None]
    facts = {(info.scheme.bits, info.scheme.block) for info in quantized if info.scheme}
    if len(facts) > 1:
        what = f"The layers of {path}, which have bits and blocks of {sorted(map(str, facts))},"
        raise UnsupportedDtype(what=what, dtype=NAME, known="one number of bits, one group size")
    bits, block = next(iter(facts), (4, (128,)))
    version = _version(kept_origin(metadata, CONFIG))
    config = {
        "quant_method": NAME,
        "bits": bits,
        "group_size": None if block is None else block[0],
        "desc_act": any(info.scheme.grouped for info in quantized if info.scheme),
        "sym": all(info.scheme.offset is None for info in quantized if info.scheme),
        "checkpoint_format": version,
        "pack_dtype": "int32",
    }
    return open_stored_writer(
        path,
        plan,
        layout=_layout,
        encode=partial(_encode, is_less_one=_VERSIONS[version]),
        metadata={**metadata, "format": "pt"},
        config=config,
    )


def _version(config: Mapping[str, Any]) -> str:
    """The version to write, after the config of the file that tensors came from, if any."""
    said = config.get("checkpoint_format", config.get("format", "gptq"))
    return NAME if said == NAME == str(config.get("quant_method")).lower() else "gptq_v2"


def _layout(info: TensorInfo) -> list[StoredArray]:
    scheme, base = info.scheme, base_of(info)
    if scheme is None:
        return []
    rows, columns = info.shape
    groups = scheme.scale_shape(info.shape)[1]
    return [
        StoredArray(f"{base}.qweight", "I32", (columns * scheme.bits // 32, rows)),
        StoredArray(f"{base}.qzeros", "I32", (groups, -(-rows * scheme.bits // 32))),
        StoredArray(f"{base}.scales", scale_code(scheme.scale), (groups, rows)),
        StoredArray(f"{base}.g_idx", "I32", (columns,)),
    ]


def _encode(info: TensorInfo, q: QTensor, *, is_less_one: bool) -> Iterator[Stored]:
    base, bits, numbers = base_of(info), q.scheme.bits, numbers_of(q)
    codes, zeros = numbers["codes"], numbers.get("offsets")
    if zeros is None:
        middle = np.uint8(1 << (bits - 1))
        codes, zeros = codes ^ middle, np.full(numbers["scales"].shape, middle)
    size = q.scheme.block_extents(q.shape)[1]
    groups = numbers.get("groups", np.arange(q.shape[1]) // size)
    yield f"{base}.qweight", words_of(codes, bits).T
    yield f"{base}.qzeros", (_less_one if is_less_one else words_of)(zeros.T, bits)
    yield f"{base}.scales", numbers["scales"].T
    yield f"{base}.g_idx", groups.astype(np.int32)


def _less_one(zeros: HostArray, bits: int) -> HostArray:
    """Zero points as version 1 stores them, whose 3 bits alone borrow from no neighbour."""
    if bits not in _ONES:
        return words_of(zeros - 1 & 2**bits - 1, bits)
    words = words_of(zeros, bits).view(np.uint32) - np.uint32(_ONES[bits])  # modulo 2^32
    made: HostArray = words.view("<i4")
    return made


def words_of(codes: HostArray, bits: int) -> HostArray:
    """Fields along the last axis as int32 words, lowest bits first."""
    made = pack(np, np.ascontiguousarray(codes), QuantValue(f"u{bits}"), QuantStore.PACKED_U32)
    words: HostArray = np.ascontiguousarray(made).view("<i4")
    return words
