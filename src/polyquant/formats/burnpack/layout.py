"""Burn's names: its schemes as ours and back, its dtypes, and the layout of a file.

::

    "NRUB" | u16 version | u32 length | CBOR | zeros to a multiple of 256 | tensors, each at one
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from polyquant.files.info import TensorInfo
from polyquant.scheme import QuantScheme
from polyquant.values import QuantMode, QuantStore, QuantValue, ScaleDtype

MAGIC, VERSION, HEADER_BYTES, ALIGNMENT = b"NRUB", 1, 10, 256
METADATA_LIMIT_BYTES, TENSORS_LIMIT = 100 * 2**20, 100_000
#: The metadata key under which what is neither text nor tensor is kept for writing back.
ORIGIN = "burnpack"

#: Burn's plain dtypes -> those of arrays. Flex32 is float32 in store.
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "Flex32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
    }
)
#: How Burn stores booleans -> the dtype of the array.
BOOLEANS: Mapping[str, str] = MappingProxyType({"Native": "bool", "U8": "bool", "U32": "uint32"})
_VALUES = ("Q8F", "Q8S", "Q4F", "Q4S", "Q2F", "Q2S", "E4M3", "E5M2", "E2M1")
_SCALES = ("F32", "F16", "BF16", "UE8M0", "UE4M3")
_EXTENTS, _LARGEST_EXTENT = 5, 255


#: Variant -> the scheme that its weights have.
VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "q8s": "q8s/32:f16",
        "q4s": "q4s/32:f16",
        "q2s": "q2s/32:f16",
        "nvfp4": "e2m1/16:ue4m3/tensor:f32",
        "mxfp4": "e2m1/32:ue8m0",
    }
)


def scheme_of(form: Any) -> QuantScheme | str:
    """The scheme of a ``QFloat``'s fields, or why there is none."""
    if not isinstance(form, Mapping) or set(form) != {"value", "store", "mode", "tensor", "block"}:
        return "its QFloat has other fields than value, store, mode, tensor and block"
    value, store, block = form["value"], _store(form["store"]), form["block"]
    if value not in _VALUES or store is None:
        return (
            f"no value {value!r} in a store {form['store']!r}, packed along the last axis, is known"
        )
    if form["mode"] != "Symmetric":
        return f"of mode {form['mode']!r} no table is in the file"
    if form["tensor"] not in (None, "F32") or (block is None and form["tensor"] is None):
        return f"it has the tensor scale {form['tensor']!r}"
    given: dict[str, Any] = {"value": value.lower(), "store": store}
    if block is None:
        return QuantScheme(**given, block=None, scale="f32")
    extents = _extents(block)
    if extents is None or block.get("dtype") not in _SCALES:
        return f"it has the block {block!r}"
    scale, whole = block["dtype"].lower(), form["tensor"] and "f32"
    if whole and scale == ScaleDtype.UE8M0:
        return "it has UE8M0 block scales under a tensor scale"
    return QuantScheme(**given, block=extents, scale=scale, tensor_scale=whole)


def _store(form: Any) -> QuantStore | None:
    packed = {"PackedU32": QuantStore.PACKED_U32, "PackedNative": QuantStore.PACKED_NATIVE}
    if form == "Native":
        return QuantStore.NATIVE
    if isinstance(form, Mapping) and len(form) == 1:
        name, axis = next(iter(form.items()))
        return packed.get(name) if type(axis) is int and axis == 0 else None
    return None


def _extents(block: Any) -> tuple[int, ...] | None:
    size = block.get("size") if isinstance(block, Mapping) else None
    if not isinstance(size, Mapping) or set(size) != {"storage", "len"}:
        return None
    storage, length = size["storage"], size["len"]
    if not isinstance(storage, list) or type(length) is not int or not 0 <= length <= _EXTENTS:
        return None
    found = storage[:length]
    if not all(type(n) is int and 1 <= n <= _LARGEST_EXTENT for n in found):
        return None
    return tuple(found) or (1,)


def form_of(scheme: QuantScheme, shape: tuple[int, ...]) -> dict[str, Any] | str:
    """The fields of a ``QFloat`` for a scheme on a stored shape, or why Burn has none."""
    value = str(scheme.value).upper()
    if not scheme.is_plain or scheme.mode is not QuantMode.SYMMETRIC or value not in _VALUES:
        return f"Burn has no {scheme}"
    if isinstance(scheme.scale, QuantScheme):
        return "Burn has no quantized scales"
    is_whole_byte = scheme.bits == 8 or scheme.value is QuantValue.E2M1
    if scheme.store is QuantStore.PACKED_NATIVE and not is_whole_byte:
        return f"Burn packs {value} in words"
    stores = {QuantStore.NATIVE: "Native", QuantStore.PACKED_U32: {"PackedU32": 0}}
    form = {
        "value": value,
        "store": stores.get(scheme.store, {"PackedNative": 0}),
        "mode": "Symmetric",
        "tensor": None,
        "block": None,
    }
    if scheme.block is None:
        if scheme.scale is not ScaleDtype.F32:
            return "Burn's scale of a whole tensor is F32"
        return form | {"tensor": "F32"}
    extents = scheme.block_extents(shape)
    while extents and extents[0] == 1:
        extents = extents[1:]
    if len(extents) > _EXTENTS or any(n > _LARGEST_EXTENT for n in extents):
        return f"Burn's blocks have at most {_EXTENTS} extents of {_LARGEST_EXTENT}, not {extents}"
    storage = [*extents, *[1] * (_EXTENTS - len(extents))]
    size = {"storage": storage, "len": len(extents)}
    tensor = None if scheme.tensor_scale is None else "F32"
    block = {"size": size, "dtype": str(scheme.scale).upper()}
    return form | {"tensor": tensor, "block": block}


def why_not_hold(info: TensorInfo) -> str | None:
    """Why Burn cannot hold a tensor exactly, or None."""
    if info.scheme is None:
        known = {*DTYPES.values(), *BOOLEANS.values()}
        return None if info.dtype in known else f"Burn has no {info.dtype}"
    if info.axes != tuple(range(len(info.shape))):
        return f"its axes are stored in the order {info.axes}"
    found = form_of(info.scheme, info.stored_shape)
    return found if isinstance(found, str) else None
