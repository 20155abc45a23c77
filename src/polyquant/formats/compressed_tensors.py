"""compressed-tensors, of llm-compressor and vLLM: packed integers, int8, fp8, NVFP4 and MX types.

The config's ``config_groups`` say what the layers of a model are; a layer's arrays say which of its
parts it has. Integers are stored offset-binary: ``code + 2^(bits - 1)``, zero points too.

Of sparse weights (``sparsity_config``) a bitmask says where the stored numbers stand; they are read
with their zeros, quantized or not. Files of marlin-24 are tiled for one kernel and refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from polyquant.arrays import HostArray
from polyquant.codec import pack, unpack
from polyquant.errors import CorruptData
from polyquant.files.assemble import assemble, numbers_of
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.facts import Facts
from polyquant.files.info import FILE_DTYPES, TensorInfo
from polyquant.files.layers import Layer, Made, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.files.stored import (
    StoredArray,
    base_of,
    check_held,
    has_whole_groups,
    open_stored_writer,
    plain_modules,
    plain_why_not,
    scale_code,
)
from polyquant.files.writing import PlannedWriter, Stored
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import QuantStore, QuantValue

NAME = "compressed-tensors"
FACTS = Facts(
    tool="llm-compressor, vLLM",
    reads=(
        "pack-quantized (both packings, act-order), int, float, naive, nvfp4, mxfp4, mxfp6, mxfp8; "
        "sparse-bitmask, sparse-24-bitmask"
    ),
    exact="bit-equal; in bfloat16 after one rounding",
    writes="pack-quantized, nvfp4, mxfp4",
    bytes="yes, but for the packing before 0.11",
    checked="compressed-tensors 0.20.1, transformers 5.24",
)
PACKED, SCALE = ".weight_packed", ".weight_scale"
_BYTES = ("U8", "I8")
_SPARSE = ("sparse-bitmask", "sparse-24-bitmask")
#: (bits, type) of values with E8M0 scales -> (value, packed).
_MX: Mapping[tuple[int, str], tuple[str, bool]] = MappingProxyType(
    {(4, "float"): ("e2m1", True), (6, "float"): ("e2m3", True), (8, "float"): ("e4m3", False)}
)


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return probe.why_not_declared(NAME)


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index. Raises InvalidHeader, UnsupportedDtype."""
    source = Source(probe, NAME)
    return open_layers(probe, source, _layers(source))


def _layers(source: Source) -> Iterator[Layer]:
    source.made |= dict(_sparse(source))
    groups = _groups(source)
    bases = dict.fromkeys([*source.names(PACKED), *source.names(SCALE)])
    for base in bases:
        weights, format = _group_of(source, groups, base)
        if f"{base}{PACKED}" in source:
            kind = weights.get("type")
            yield (_packed_integers if kind == "int" else _packed_floats)(source, base, weights)
        elif f"{base}.weight" in source:
            yield _plain_codes(source, base, weights, format)


# -- the config -------------------------------------------------------------------------------


def _groups(source: Source) -> list[tuple[list[str], Mapping[str, Any], str]]:
    """Of every group: its targets, what its weights are, and its format."""
    config = source.config
    found = config.get("config_groups")
    if not found and _is_sparse(source):
        return []
    if not isinstance(found, Mapping) or not found:
        raise source.fail("its quantization config has no config_groups")
    made = []
    for name, group in found.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        targets = group.get("targets") if isinstance(group, Mapping) else None
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise source.fail(f"group {name!r} of its config has no list of targets")
        if isinstance(weights, Mapping):
            format = group.get("format") or config.get("format")
            if format == "marlin-24":
                raise source.refuse("the config", "marlin-24, tiled for one kernel,", _SPARSE)
            made.append((targets, weights, str(format)))
    if not made:
        raise source.fail("no group of its config has weights")
    return made


def _group_of(
    source: Source, groups: list[tuple[list[str], Mapping[str, Any], str]], base: str
) -> tuple[Mapping[str, Any], str]:
    """The group of a layer: named or matched by a target, else one that targets a class."""
    by_name = [g for g in groups if any(_names(source, target, base) for target in g[0])]
    by_class = [g for g in groups if any(_is_class(target) for target in g[0])]
    found = by_name or by_class
    if len(found) != 1:
        reason = f"{len(found)} groups of its config may mean layer {base!r}, not one"
        raise source.fail(reason)
    return found[0][1], found[0][2]


def _names(source: Source, target: str, base: str) -> bool:
    if target.startswith("re:"):
        return source.matches(target.removeprefix("re:"), base)
    return target == base or base.endswith(f".{target}")


def _is_class(target: str) -> bool:
    """Whether a target is the name of a class, such as Linear, and not of modules."""
    return target.isidentifier() and target[:1].isupper()


def _bits(source: Source, weights: Mapping[str, Any], base: str) -> int:
    bits = weights.get("num_bits")
    if type(bits) is not int or not 1 <= bits <= 8:
        raise source.refuse(base, f"weights of {bits} bits", range(1, 9))
    return bits


def _block(
    source: Source, base: str, shape: tuple[int, int], weights: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """The block of a layer's strategy, and the shape of its stored scales."""
    rows, columns = shape
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "group" if size not in (None, -1) else "tensor"
    if strategy == "tensor":
        return None, (1,)
    if strategy == "channel" or size == -1:
        return (-1,), (rows, 1)
    if strategy in ("group", "tensor_group") and type(size) is int and size > 0:
        return (size,), (rows, -(-columns // size))
    extents = weights.get("block_structure")
    if strategy == "block" and isinstance(extents, list) and len(extents) == 2:
        high, wide = extents
        if type(high) is int and type(wide) is int and min(high, wide) > 0:
            return (high, wide), (-(-rows // high), -(-columns // wide))
    known = ("tensor", "channel", "group", "tensor_group", "block")
    raise source.refuse(base, f"the strategy {strategy} of {size} {extents}", known)


# -- sparse weights ---------------------------------------------------------------------------


def _is_sparse(source: Source) -> bool:
    """Whether the config says that weights are under a bitmask. Raises UnsupportedDtype."""
    config = source.config.get("sparsity_config")
    format = config.get("format") if isinstance(config, Mapping) else None
    if format not in (None, "dense", *_SPARSE):
        raise source.refuse("the config", f"the sparsity_config {format}", ("dense", *_SPARSE))
    return format in _SPARSE


def _sparse(source: Source) -> Iterator[tuple[str, Made]]:
    """Weights of which only the numbers that a bitmask names are stored, row after row."""
    for base in source.names(".bitmask") if _is_sparse(source) else ():
        extents = source.raw(f"{base}.shape").shape
        source.expect(f"{base}.shape", ("I64", "I32"), (2, 1) if len(extents) == 2 else (2,))
        rows, columns = (int(n) for n in source.read(f"{base}.shape").reshape(-1))
        mask = source.expect(f"{base}.bitmask", ("U8",), (None, None))
        if mask.shape != (rows, -(-columns // 8)) or not mask.shape[1]:
            raise source.fail(
                f"tensor {mask.name!r} of {mask.shape} has no bit for {rows, columns}"
            )
        uses = [f"{base}.{part}" for part in ("shape", "bitmask", "compressed", "row_offsets")]
        uses = uses if uses[-1] in source else uses[:-1]
        values = source.raw(f"{base}.compressed")
        if values.dtype not in ("F8_E4M3", "I8", "BF16", "F16", "F32"):
            raise source.refuse(base, f"sparse weights of {values.dtype}", ("F8_E4M3", "BF16"))
        size = rows * columns * FILE_DTYPES[values.dtype].bits // 8
        raw = values._replace(name=f"{base}.weight", shape=(rows, columns), start=0, stop=size)
        yield raw.name, Made(raw, tuple(uses), partial(_read_sparse, source, base, raw.shape))


def _read_sparse(source: Source, base: str, shape: tuple[int, ...]) -> HostArray:
    values = source.read(f"{base}.compressed").reshape(-1)
    bits = np.unpackbits(source.read(f"{base}.bitmask"), axis=1, bitorder="little")
    mask = bits[:, : shape[1]].astype(np.bool_)
    if np.count_nonzero(mask) != values.size:
        reason = f"its bitmask names {np.count_nonzero(mask)} numbers, and {values.size} are stored"
        raise CorruptData(what=f"Tensor '{base}.weight' of {source.path}", reason=reason)
    made = np.zeros(shape, values.dtype)
    made[mask] = values
    return made


# -- packed integers --------------------------------------------------------------------------


def _packed_integers(source: Source, base: str, weights: Mapping[str, Any]) -> Layer:
    bits = _bits(source, weights, base)
    rows, words = source.expect(f"{base}{PACKED}", ("I32",), (None, None)).shape
    shape_name = f"{base}.weight_shape"
    source.expect(shape_name, ("I64", "I32"), (2,))
    shape = (int(source.read(shape_name)[0]), int(source.read(shape_name)[1]))
    columns = shape[1]
    is_dense = words == -(-columns * bits // 32)
    if shape[0] != rows or columns < 1 or not (is_dense or words == _old_words(columns, bits)):
        raise source.fail(f"'{base}{PACKED}' of {rows}x{words} words is no packed {shape}")
    block, grid = _block(source, base, shape, weights)
    found = source.raw(f"{base}{SCALE}").shape
    grid = found if math.prod(found) == math.prod(grid) == 1 else grid
    scale = source.scale(f"{base}{SCALE}", grid)
    uses = [f"{base}{PACKED}", f"{base}{SCALE}", shape_name]
    zero_name, map_name = f"{base}.weight_zero_point", f"{base}.weight_g_idx"
    is_affine = zero_name in source
    if is_affine and block is None:  # one zero point is not packed
        source.expect(zero_name, ("I8",), grid)
        uses.append(zero_name)
    elif is_affine:
        words_of_zeros = {-(-rows * bits // 32), _old_words(rows, bits)}
        zeros = source.expect(zero_name, ("I32",), (None, grid[-1]))
        if zeros.shape[0] not in words_of_zeros:
            raise source.fail(f"tensor {zero_name!r} has no zero point for each of {rows} rows")
        uses.append(zero_name)
    is_grouped = False
    if map_name in source:
        source.expect(map_name, ("I32",), (columns,))
        uses.append(map_name)
        is_grouped = not (source.read(map_name) == -1).any()  # -1: there, and not used
    scheme = QuantScheme(
        f"u{bits}" if is_affine else f"q{bits}f",
        block=block,
        scale=scale,
        offset=f"zero_point:u{bits}" if is_affine else None,
        grouped=is_grouped,
    )
    read = partial(_read_packed_integers, source, base, scheme, shape, is_dense=is_dense)
    return Layer(f"{base}.weight", shape, scheme, tuple(uses), read)


def _old_words(length: int, bits: int) -> int:
    """Words of the packing up to version 0.10: whole fields alone, the rest of a word unused."""
    return -(-length // (32 // bits))


def _read_packed_integers(
    source: Source, base: str, scheme: QuantScheme, shape: tuple[int, int], *, is_dense: bool
) -> QTensor:
    bits, half = scheme.bits, 1 << (scheme.bits - 1)
    codes = _fields(source.read(f"{base}{PACKED}"), bits, shape[1], is_dense=is_dense)
    numbers = {"codes": codes, "scales": source.read(f"{base}{SCALE}")}
    if scheme.offset is None:
        numbers["codes"] = codes ^ half
    elif scheme.block is None:
        zero = source.read(f"{base}.weight_zero_point").astype(np.int16) + half
        if (zero < 0).any() or (zero >= 2 * half).any():
            reason = f"it is beyond {-half} to {half - 1}"
            raise CorruptData(what=f"Tensor '{base}.weight_zero_point'", reason=reason)
        numbers["offsets"] = zero.astype(np.uint8)
    else:
        zeros = np.ascontiguousarray(source.read(f"{base}.weight_zero_point").T)
        # The packing is that of the weight: of few rows both would have as many words.
        numbers["offsets"] = _fields(zeros, bits, shape[0], is_dense=is_dense).T
    if scheme.grouped:
        groups = source.read(f"{base}.weight_g_idx")
        if groups.min() < 0 or groups.max() >= numbers["scales"].shape[1]:
            what = f"Tensor '{base}.weight_g_idx'"
            raise CorruptData(what=what, reason="it names groups without a scale")
        numbers["groups"] = groups
    return assemble(scheme, shape, numbers)


def _fields(words: HostArray, bits: int, length: int, *, is_dense: bool) -> HostArray:
    if is_dense:
        stream = np.ascontiguousarray(words).view(np.uint8)
        dense: HostArray = unpack(np, stream, length, QuantValue(f"u{bits}"), QuantStore.PACKED_U32)
        return dense
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    found = words.view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    made: HostArray = found.reshape(len(words), -1)[:, :length].astype(np.uint8)
    return made


# -- packed minifloats ------------------------------------------------------------------------


def _packed_floats(source: Source, base: str, weights: Mapping[str, Any]) -> Layer:
    bits = _bits(source, weights, base)
    rows, size = source.expect(f"{base}{PACKED}", _BYTES, (None, None)).shape
    shape = (rows, size * 8 // bits)
    scales = source.raw(f"{base}{SCALE}")
    uses = [f"{base}{PACKED}", f"{base}{SCALE}"]
    if scales.dtype == "F8_E4M3" and bits == 4:
        source.expect(f"{base}{SCALE}", ("F8_E4M3",), (rows, -(-shape[1] // 16)))
        uses.append(source.one_number(f"{base}.weight_global_scale"))
        scheme = QuantScheme("e2m1", block=16, scale="ue4m3", tensor_scale="f32", role="divisor")
    else:
        value, is_packed = _MX.get((bits, "float"), ("", False))
        if not is_packed:
            raise source.refuse(base, f"packed floats of {bits} bits", (4, 6))
        source.expect(f"{base}{SCALE}", ("U8", "F8_E8M0"), (rows, -(-shape[1] // 32)))
        scheme = QuantScheme(value, block=32, scale="ue8m0")
    read = partial(_read_packed_floats, source, base, scheme, shape)
    return Layer(f"{base}.weight", shape, scheme, tuple(uses), read)


def _read_packed_floats(
    source: Source, base: str, scheme: QuantScheme, shape: tuple[int, int]
) -> QTensor:
    data = source.read(f"{base}{PACKED}").view(np.uint8)
    numbers = {
        "codes": unpack(np, data, shape[1], scheme.value, QuantStore.PACKED_NATIVE),
        "scales": source.read(f"{base}{SCALE}").view(np.uint8),
    }
    if scheme.tensor_scale is not None:
        numbers["tensor_scale"] = source.read(f"{base}.weight_global_scale")
    return assemble(scheme, shape, numbers)


# -- a byte a code ----------------------------------------------------------------------------


def _plain_codes(source: Source, base: str, weights: Mapping[str, Any], format: str) -> Layer:
    name = f"{base}.weight"
    raw = source.expect(name, ("I8", "F8_E4M3"), (None, None))
    shape = (raw.shape[0], raw.shape[1])
    scales = source.raw(f"{base}{SCALE}")
    uses = [name, f"{base}{SCALE}"]
    if raw.dtype == "F8_E4M3" and scales.dtype in ("U8", "F8_E8M0"):
        source.expect(f"{base}{SCALE}", (scales.dtype,), (shape[0], -(-shape[1] // 32)))
        scheme = QuantScheme("e4m3", block=32, scale="ue8m0")
    else:
        block, grid = _block(source, base, shape, weights)
        grid = scales.shape if math.prod(grid) == math.prod(scales.shape) == 1 else grid
        scale = source.scale(f"{base}{SCALE}", grid)
        zero_name, offset = f"{base}.weight_zero_point", None
        if zero_name in source:
            source.expect(zero_name, ("I8",), grid)
            uses.append(zero_name)
            offset = None if raw.dtype != "I8" else "zero_point:u8"
        value = "e4m3" if raw.dtype != "I8" else "q8f" if offset is None else "u8"
        scheme = QuantScheme(value, block=block, scale=scale, offset=offset)
    read = partial(_read_plain_codes, source, base, scheme, shape)
    return Layer(name, shape, scheme, tuple(uses), read)


def _read_plain_codes(
    source: Source, base: str, scheme: QuantScheme, shape: tuple[int, int]
) -> QTensor:
    scales = source.read(f"{base}{SCALE}")
    numbers = {
        "codes": source.read(f"{base}.weight").view(np.uint8),
        "scales": scales.view(np.uint8) if scheme.scale == "ue8m0" else scales,
    }
    if scheme.offset is not None:  # both shifted by 128, which is a flip of the sign bit
        numbers["codes"] = numbers["codes"] ^ 0x80
        numbers["offsets"] = source.read(f"{base}.weight_zero_point").view(np.uint8) ^ 0x80
    return assemble(scheme, shape, numbers)


# -- writing ----------------------------------------------------------------------------------

#: Variant -> the scheme that its weights have.
VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "w4a16": "q4f/128:bf16",
        "w8a16": "q8f/128:bf16",
        "w4a16-asym": "u4/128:bf16-zero:u4",
        "nvfp4": "e2m1/16:ue4m3/tensor:divisor.f32",
        "mxfp4": "e2m1/32:ue8m0",
    }
)


def why_not_hold(info: TensorInfo) -> str | None:
    """Why compressed-tensors cannot hold a tensor exactly, or None.

    Integers are written pack-quantized, e2m1 as nvfp4-pack-quantized or mxfp4-pack-quantized.
    """
    scheme = info.scheme
    if scheme is None:
        return plain_why_not(info)
    if 0 in info.shape:
        return "it has no elements"
    if not info.name.endswith(".weight") or len(info.shape) != 2 or info.axes != (0, 1):
        return "it is not the weight of a linear layer, its rows stored in order"
    if not has_whole_groups(info):
        return f"groups of {scheme.block} are cut at the ends of rows of {info.shape[1]}"
    if str(scheme.with_store("packed_u32")) in (VARIANTS["nvfp4"], VARIANTS["mxfp4"]):
        return None
    is_zero = scheme.offset == ("zero_point", f"u{scheme.bits}")
    is_full = str(scheme.value) == f"q{scheme.bits}f" and scheme.offset is None
    is_packed = (is_zero or is_full or _is_symmetric(scheme)) and scheme.mode != "lookup"
    if not is_packed or not scheme._with(grouped=False).is_plain or scheme.tensor_scale is not None:
        return f"no packed integers are {scheme}"
    if scheme.scale not in ("f32", "f16", "bf16"):
        return f"their scales are floats, not {scheme.scale}"
    if scheme.block is not None and len(scheme.block) != 1:
        return f"their blocks are groups of columns, not {scheme.block}"
    return None


def _is_symmetric(scheme: QuantScheme) -> bool:
    """Symmetric codes are full ones of which one is not used."""
    return str(scheme.value) == f"q{scheme.bits}s" and scheme.offset is None


def open_writer(
    path: Path,
    plan: Sequence[TensorInfo],
    metadata: Mapping[str, str] = MappingProxyType({}),
    whole: Sequence[TensorInfo] | None = None,
) -> PlannedWriter:
    """The writer of a file, of a model of the tensors ``whole``.

    Its config has a group for each scheme, that names its modules.

    Raises UnsupportedDtype, InvalidName.
    """
    whole = plan if whole is None else whole
    check_held(whole, why_not_hold, NAME)
    groups: dict[str, tuple[dict[str, Any], str, list[str]]] = {}
    for info in whole:
        if info.scheme is not None:
            weights, format = _weights(info.scheme)
            key = json.dumps(weights)
            groups.setdefault(key, (weights, format, []))[2].append(base_of(info))
    formats = sorted({format for _, format, _ in groups.values()})
    config = {
        "quant_method": NAME,
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": plain_modules(whole),
        "config_groups": {
            f"group_{number}": {
                "targets": targets if len(groups) > 1 else ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": format,
            }
            for number, (weights, format, targets) in enumerate(groups.values())
        },
    }
    return open_stored_writer(
        path,
        plan,
        layout=_layout,
        encode=_encode,
        metadata={**metadata, "format": "pt"},
        config=config if groups else {},
    )


def _weights(scheme: QuantScheme) -> tuple[dict[str, Any], str]:
    """The config's arguments of a scheme, and its format."""
    facts: dict[str, Any] = {"num_bits": scheme.bits, "dynamic": False}
    if scheme.value.is_float:
        size = 16 if scheme.tensor_scale is not None else 32
        strategy = "tensor_group" if size == 16 else "group"
        kind = "float8_e4m3fn" if size == 16 else "uint8"
        facts |= {"type": "float", "symmetric": True, "strategy": strategy, "group_size": size}
        format = "nvfp4-pack-quantized" if size == 16 else "mxfp4-pack-quantized"
        return facts | {"scale_dtype": f"torch.{kind}"}, format
    facts |= {"type": "int", "symmetric": scheme.offset is None}
    if scheme.block is None:
        facts |= {"strategy": "tensor", "group_size": None}
    elif scheme.block == (-1,):
        facts |= {"strategy": "channel", "group_size": None}
    else:
        facts |= {"strategy": "group", "group_size": scheme.block[0]}
    return facts | ({"actorder": "group"} if scheme.grouped else {}), "pack-quantized"


def _layout(info: TensorInfo) -> list[StoredArray]:
    scheme, base = info.scheme, base_of(info)
    if scheme is None:
        return []
    (rows, columns), grid = info.shape, scheme.scale_shape(info.shape)
    if scheme.value.is_float:
        code = "F8_E4M3" if scheme.tensor_scale is not None else "U8"
        made = [StoredArray(f"{base}{PACKED}", "U8", (rows, columns // 2))]
        made.append(StoredArray(f"{base}{SCALE}", code, grid))
        whole = StoredArray(f"{base}.weight_global_scale", "F32", (1,))
        return [*made, whole] if scheme.tensor_scale is not None else made
    grid = (1,) if scheme.block is None else grid
    made = [
        StoredArray(f"{base}{PACKED}", "I32", (rows, -(-columns * scheme.bits // 32))),
        StoredArray(f"{base}{SCALE}", scale_code(scheme.scale), grid),
        StoredArray(f"{base}.weight_shape", "I64", (2,)),
    ]
    if scheme.offset is not None and scheme.block is None:
        made.append(StoredArray(f"{base}.weight_zero_point", "I8", grid))
    elif scheme.offset is not None:
        words = (-(-rows * scheme.bits // 32), grid[-1])
        made.append(StoredArray(f"{base}.weight_zero_point", "I32", words))
    if scheme.grouped:
        made.append(StoredArray(f"{base}.weight_g_idx", "I32", (columns,)))
    return made


def _encode(info: TensorInfo, q: QTensor) -> Iterator[Stored]:
    base, scheme, numbers = base_of(info), q.scheme, numbers_of(q)
    codes, value = numbers["codes"], QuantValue(f"u{scheme.bits}")
    yield f"{base}{SCALE}", numbers["scales"]
    if scheme.value.is_float:
        yield f"{base}{PACKED}", pack(np, codes, value, QuantStore.PACKED_NATIVE)
        if scheme.tensor_scale is not None:
            yield f"{base}.weight_global_scale", numbers["tensor_scale"]
        return
    if scheme.offset is None:
        codes = codes ^ np.uint8(1 << (scheme.bits - 1))
    yield f"{base}{PACKED}", pack(np, codes, value, QuantStore.PACKED_U32)
    yield f"{base}.weight_shape", np.asarray(info.shape, "<i8")
    if scheme.offset is not None and scheme.block is None:
        half = 1 << (scheme.bits - 1)
        yield f"{base}.weight_zero_point", (numbers["offsets"] - np.uint8(half)).view(np.int8)
    elif scheme.offset is not None:
        zeros = np.ascontiguousarray(numbers["offsets"].T)
        words = pack(np, zeros, value, QuantStore.PACKED_U32).view("<i4")
        yield f"{base}.weight_zero_point", words.T
    if scheme.grouped:
        yield f"{base}.weight_g_idx", numbers["groups"]
