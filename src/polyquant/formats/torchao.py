"""torchao: flattened tensor subclasses in safetensors, described by JSON in its metadata.

The metadata map ``MODULE.weight`` to ``{"_type", "_data", "_tensor_data_names"}``, and its arrays
are named ``MODULE._weight_FIELD``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from polyquant.arrays import HostArray
from polyquant.codec import unpack
from polyquant.errors import CorruptData
from polyquant.files.assemble import assemble
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.facts import Facts
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.files.strict_json import parse_object
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import QuantStore, QuantValue

NAME = "torchao"
FACTS = Facts(
    tool="torchao",
    reads=(
        "Int4Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor, MXTensor, NVFP4Tensor, "
        "swizzled too; not the int4 layouts of single devices"
    ),
    exact="bit-equal; in bfloat16 within its rounding",
)
_NAMES = "tensor_names"
#: Extents of the tiles of swizzled scales.
_TILE = (128, 4)


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    if probe.container is None:
        return "it is not a safetensors file"
    declared = any(
        _NAMES in f.metadata and any('"_type"' in t for t in f.metadata.values())
        for f in probe.container.files
    )
    if declared or probe.format == NAME:
        return None
    if probe.method == NAME:
        return "its config says torchao, but its metadata describe no tensors of torchao"
    return "its metadata describe no tensors of torchao"


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index. Raises InvalidHeader, UnsupportedDtype."""
    source = Source(probe, NAME)
    return open_layers(probe, source, _layers(source))


def _layers(source: Source) -> Iterator[Layer]:
    for file in source.container.files:
        for name, text in file.metadata.items():
            if name == _NAMES:
                source.described.add(name)
            if name == _NAMES or not text.lstrip().startswith("{"):
                continue
            form = parse_object(text, source.path, f"the metadata of {name!r}")
            kind, facts = form.get("_type"), form.get("_data")
            source.described |= {name} if "_type" in form else set()
            if kind is None or kind == "Tensor":
                continue
            if not isinstance(kind, str) or kind not in _TYPES:
                whose = _OF_DEVICES.get(str(kind), "")
                raise source.refuse(name, f"a {kind}{whose}", _TYPES)
            if not isinstance(facts, Mapping):
                raise source.fail(f"the metadata of {name!r} have no object _data")
            yield _TYPES[kind](source, name, facts)


def _field(name: str, field: str) -> str:
    module, dot, leaf = name.rpartition(".")
    return f"{module}{dot}_{leaf}_{field}"


def _block(source: Source, name: str, facts: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
    """The block of a tensor as a scheme has it, and its grid."""
    found = facts.get("block_size")
    if not isinstance(found, list) or len(found) != len(shape):
        raise source.fail(f"the block_size of {name!r} is {found!r}, for a shape of {shape}")
    if not all(type(n) is int and n > 0 for n in found):
        raise source.fail(f"the block_size of {name!r} is {found!r}")
    grid = tuple(-(-d // b) for d, b in zip(shape, found, strict=True))
    return tuple(-1 if b >= d else b for b, d in zip(found, shape, strict=True)), grid


def _layer(
    source: Source, name: str, shape: tuple[int, ...], scheme: QuantScheme, fields: Any, **more: Any
) -> Layer:
    uses = tuple(_field(name, field) for field in fields)
    return Layer(name, shape, scheme, uses, partial(_read, source, name, scheme, shape, **more))


def _integers(source: Source, name: str, facts: Mapping[str, Any]) -> Layer:
    """Int8Tensor, and IntxUnpackedToInt8Tensor with its fewer bits in whole bytes."""
    raw = source.raw(_field(name, "qdata"))
    if raw.dtype != "I8":
        raise source.refuse(name, f"codes of {raw.dtype}", ["I8"])
    target = facts.get("target_dtype", {})
    text = str(target.get("_data")) if isinstance(target, Mapping) and target else "int8"
    if text not in {f"int{bits}" for bits in range(1, 9)}:
        raise source.refuse(name, f"the target_dtype {text}", ["int1 to int8"])
    bits = int(text[3:])
    block, grid = _block(source, name, facts, raw.shape)
    scale = source.scale(_field(name, "scale"), grid)
    fields, zeros = ["qdata", "scale"], _field(name, "zero_point")
    offset = None
    if zeros in source:
        found = source.expect(zeros, ("I8", "F32", "F16", "BF16"), grid)
        fields.append("zero_point")
        offset = f"zero_point:u{bits}"
        if found.dtype != "I8":
            raise source.refuse(name, "float zero points", ["int8 zero points"])
        if not source.read(zeros).any():  # symmetric: always stored, always zero
            offset = None
    value = f"q{bits}f" if offset is None else f"u{bits}"
    scheme = QuantScheme(value, block=block, scale=scale, offset=offset)
    return _layer(source, name, raw.shape, scheme, fields)


def _int4(source: Source, name: str, facts: Mapping[str, Any]) -> Layer:
    """Signed nibbles; the zero point, of the scale's dtype, is added after the scale.

    Scales and zero points have the axis of groups before that of rows.
    """
    raw = source.raw(_field(name, "qdata"))
    if raw.dtype not in ("I8", "U8") or len(raw.shape) < 2:
        raise source.refuse(name, f"int4 in {raw.dtype} of {raw.shape}", ["two codes in an int8"])
    shape = (*raw.shape[:-1], 2 * raw.shape[-1])
    if facts.get("shape") != list(shape):
        raise source.fail(f"the shape of {name!r} is {facts.get('shape')!r}, and its codes {shape}")
    block, grid = _block(source, name, facts, shape)
    stored = (*grid[:-2], grid[-1], grid[-2])
    scale, zeros = source.scale(_field(name, "scale"), stored), _field(name, "zero_point")
    if source.scale(zeros, stored) != scale:
        raise source.fail(f"the zero points and the scales of {name!r} have different dtypes")
    if np.frombuffer(source.raw_bytes(zeros), np.uint8).any():
        scheme = QuantScheme("u4[signed4]", block=block, scale=scale, offset=f"bias:{scale}")
    else:  # which it always has, for activations in fp8
        scheme = QuantScheme("q4f", block=block, scale=scale)
    uses = tuple(_field(name, field) for field in ("qdata", "scale", "zero_point"))
    return Layer(name, shape, scheme, uses, partial(_read_int4, source, name, scheme, shape))


def _read_int4(source: Source, name: str, scheme: QuantScheme, shape: tuple[int, ...]) -> QTensor:
    packed = source.read(_field(name, "qdata")).view(np.uint8)
    codes = unpack(np, packed, shape[-1], QuantValue.U4, QuantStore.PACKED_NATIVE)
    scales, zeros = (
        np.swapaxes(source.read(_field(name, field)), -1, -2) for field in ("scale", "zero_point")
    )
    numbers = {"codes": codes, "scales": scales}
    if scheme.offset is not None:
        numbers |= {"codes": codes ^ 8, "offsets": zeros}
    return assemble(scheme, shape, numbers)


def _float8(source: Source, name: str, facts: Mapping[str, Any]) -> Layer:
    raw = source.raw(_field(name, "qdata"))
    value = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}.get(raw.dtype)
    if value is None:
        raise source.refuse(name, f"codes of {raw.dtype}", ("F8_E4M3", "F8_E5M2"))
    block, grid = _block(source, name, facts, raw.shape)
    scheme = QuantScheme(value, block=block, scale=source.scale(_field(name, "scale"), grid))
    return _layer(source, name, raw.shape, scheme, ("qdata", "scale"))


def _micro(source: Source, name: str, facts: Mapping[str, Any]) -> Layer:
    raw = source.raw(_field(name, "qdata"))
    element = facts.get("elem_dtype", {})
    text = str(element.get("_data")) if isinstance(element, Mapping) else ""
    value = {"float4_e2m1fn_x2": "e2m1", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}.get(text)
    if value is None or facts.get("block_size") != 32 or not raw.shape:
        variant = f"{text} in blocks of {facts.get('block_size')}"
        raise source.refuse(name, variant, ["fp4 and fp8 in blocks of 32"])
    per_byte = 2 if value == "e2m1" else 1
    shape = (*raw.shape[:-1], raw.shape[-1] * per_byte)
    scheme = QuantScheme(value, block=32, scale="ue8m0")
    swizzled = _check_scales(source, name, facts, scheme.scale_shape(shape), ("F8_E8M0", "U8"))
    return _layer(source, name, shape, scheme, ("qdata", "scale"), swizzled=swizzled)


def _nvfp4(source: Source, name: str, facts: Mapping[str, Any]) -> Layer:
    raw = source.raw(_field(name, "qdata"))
    if raw.dtype != "U8" or facts.get("block_size") != 16 or not raw.shape:
        variant = f"NVFP4 of {raw.dtype} in blocks of {facts.get('block_size')}"
        raise source.refuse(name, variant, ["bytes in blocks of 16"])
    shape = (*raw.shape[:-1], 2 * raw.shape[-1])
    fields = ["qdata", "scale"]
    whole = _field(name, "per_tensor_scale")
    tensor_scale = None
    if whole in source:
        source.one_number(whole)
        tensor_scale = "f32"
        fields.append("per_tensor_scale")
    scheme = QuantScheme("e2m1", block=16, scale="ue4m3", tensor_scale=tensor_scale)
    swizzled = _check_scales(source, name, facts, scheme.scale_shape(shape), ("F8_E4M3",))
    return _layer(source, name, shape, scheme, fields, swizzled=swizzled)


def _check_scales(
    source: Source,
    name: str,
    facts: Mapping[str, Any],
    grid: tuple[int, ...],
    dtypes: tuple[str, ...],
) -> bool:
    """Whether the scales of a grid lie in tiles; their number is checked."""
    swizzled = facts.get("is_swizzled_scales", False)
    if swizzled is not True and swizzled is not False:
        raise source.fail(f"is_swizzled_scales of {name!r} is {swizzled!r}")
    scales = source.raw(_field(name, "scale"))
    wanted = math.prod(grid)
    if swizzled:
        if len(grid) != 2:
            raise source.refuse(name, f"swizzled scales of {len(grid)} axes", ["two axes"])
        wanted = math.prod(-(-n // t) * t for n, t in zip(grid, _TILE, strict=True))
    if scales.dtype not in dtypes or math.prod(scales.shape) != wanted:
        raise source.fail(f"tensor {scales.name!r} has not {wanted} scales of {dtypes[0]}")
    return bool(swizzled)


def unswizzled(scales: HostArray, grid: tuple[int, ...]) -> HostArray:
    """Scales in row-major order, of those in tiles of 128 x 4 that are stored as 32 x 16."""
    high, wide = (-(-n // t) for n, t in zip(grid, _TILE, strict=True))
    tiles = scales.reshape(high, wide, 32, 4, 4)  # row r of a tile is (r % 32, r // 32)
    whole = tiles.transpose(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)
    return np.ascontiguousarray(whole[: grid[0], : grid[1]])


def _read(
    source: Source,
    name: str,
    scheme: QuantScheme,
    shape: tuple[int, ...],
    *,
    swizzled: bool = False,
) -> QTensor:
    data, scales = (source.read(_field(name, field)) for field in ("qdata", "scale"))
    codes = data.view(np.uint8)
    if scheme.bits == 4 and scheme.value.is_float:
        codes = unpack(np, codes, shape[-1], scheme.value, QuantStore.PACKED_NATIVE)
    numbers: dict[str, HostArray] = {"codes": codes, "scales": scales}
    if scheme.scale in ("ue8m0", "ue4m3"):
        numbers["scales"] = scales.view(np.uint8)
    if swizzled:
        numbers["scales"] = unswizzled(numbers["scales"], scheme.scale_shape(shape))
    if scheme.tensor_scale is not None:
        numbers["tensor_scale"] = source.read(_field(name, "per_tensor_scale"))
    if data.dtype == np.int8:
        half = 2 ** (scheme.bits - 1)
        _check_range(name, data, half)
        if scheme.offset is None:
            numbers["codes"] = codes & (2**scheme.bits - 1)
        else:  # both moved up by half the range
            zeros = source.read(_field(name, "zero_point"))
            _check_range(name, zeros, half)
            numbers["codes"] = (data.astype(np.int16) + half).astype(np.uint8)
            numbers["offsets"] = (zeros.astype(np.int16) + half).astype(np.uint8)
    return assemble(scheme, shape, numbers)


def _check_range(name: str, codes: HostArray, half: int) -> None:
    if codes.size and (codes.min() < -half or codes.max() >= half):
        reason = f"it has codes beyond {-half} to {half - 1}"
        raise CorruptData(what=f"Tensor {name!r}", reason=reason)


_TYPES: Mapping[str, Callable[[Source, str, Mapping[str, Any]], Layer]] = MappingProxyType(
    {
        "Int4Tensor": _int4,
        "Int8Tensor": _integers,
        "IntxUnpackedToInt8Tensor": _integers,
        "Float8Tensor": _float8,
        "MXTensor": _micro,
        "NVFP4Tensor": _nvfp4,
    }
)
#: Layouts of which no other device knows what they hold -> whose they are.
_OF_DEVICES: Mapping[str, str] = MappingProxyType(
    {
        "Int4TilePackedTo4dTensor": " in tiles of NVIDIA's tensor cores; save it as an Int4Tensor",
        "Int4PlainInt32Tensor": " packed for Intel's or Ascend's devices; save it as an Int4Tensor",
    }
)
