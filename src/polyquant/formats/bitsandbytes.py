"""bitsandbytes: NF4 and FP4 with plain or doubly quantized maxima, and int8 rows.

Codes lie in the order of the flattened weight, the first of two in the high nibble, and blocks run
on across the ends of rows. ``quant_state.bitsandbytes__nf4`` is JSON as bytes.
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

from polyquant.arrays import Array, HostArray
from polyquant.errors import CorruptData
from polyquant.files.assemble import assemble, numbers_of
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.container import is_shape
from polyquant.files.facts import Facts
from polyquant.files.info import FILE_DTYPES, TensorInfo
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.files.stored import (
    StoredArray,
    base_of,
    check_held,
    open_stored_writer,
    plain_modules,
    plain_why_not,
)
from polyquant.files.strict_json import parse_object
from polyquant.files.writing import PlannedWriter, kept_origin, member_of
from polyquant.ops import quantize
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.tables import CUSTOM, NAMED, named_table, table_bits
from polyquant.values import ScaleDtype

NAME = "bitsandbytes"
FACTS = Facts(
    tool="bitsandbytes",
    reads="NF4, FP4, doubly quantized or not, any packed dtype; int8 rows",
    exact="bit-equal",
    writes="the same",
    bytes="yes",
    checked="bitsandbytes 0.50.2, transformers 5.24",
)
_STATE = ".quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")
#: The quantized maxima have maxima of their own, one for so many.
_NESTED_BLOCK = 256
#: Dtypes of the packed bytes: as they are, or viewed as a float (bnb_4bit_quant_storage).
_STORAGE = ("U8", "I8", "BF16", "F16", "F32")


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    if probe.container is None:
        return "it is not a safetensors file"
    declared = any(_STATE in name for name in probe.container.places)
    if declared or probe.method == NAME or probe.format == NAME:
        return None
    return "neither its config nor its names speak of bitsandbytes"


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index. Raises InvalidHeader, UnsupportedDtype."""
    source = Source(probe, NAME)
    return open_layers(probe, source, [*_four_bit_layers(source), *_int8_layers(source)])


# -- int8 -------------------------------------------------------------------------------------


def _int8_layers(source: Source) -> Iterator[Layer]:
    scheme = QuantScheme("q8s", block=-1, scale="f32", role="absmax")
    for base in source.names(".SCB"):
        weight = source.expect(f"{base}.weight", ("I8",), (None, None))
        source.expect(f"{base}.SCB", ("F32",), (weight.shape[0],))
        uses = [f"{base}.weight", f"{base}.SCB"]
        layout = f"{base}.weight_format"
        if layout in source:
            source.expect(layout, ("U8",), ())
            if source.read(layout) != 0:
                raise source.refuse(base, "a tiled layout of int8", ["row-major int8"])
            uses.append(layout)
        read = partial(_read_int8, source, base, scheme, weight.shape)
        yield Layer(f"{base}.weight", weight.shape, scheme, tuple(uses), read)


def _read_int8(source: Source, base: str, scheme: QuantScheme, shape: tuple[int, ...]) -> QTensor:
    codes = source.read(f"{base}.weight").view(np.uint8)
    return assemble(scheme, shape, {"codes": codes, "scales": source.read(f"{base}.SCB")})


# -- 4 bits -----------------------------------------------------------------------------------


def _four_bit_layers(source: Source) -> Iterator[Layer]:
    for kind in _TYPES:
        for name in source.names(f"{_STATE}{kind}"):
            yield _four_bit_layer(source, name, f"{name}{_STATE}{kind}")


def _four_bit_layer(source: Source, name: str, state_name: str) -> Layer:
    source.expect(state_name, ("U8",), (None,))
    state = parse_object(bytes(source.raw_bytes(state_name)), source.path, state_name)
    shape, block = state.get("shape"), state.get("blocksize")
    if not isinstance(shape, list) or not is_shape(shape) or type(block) is not int or block < 1:
        raise source.fail(f"{state_name!r} has no valid shape or blocksize")
    shape = tuple(shape)
    size: int = math.prod(shape)
    packed = source.raw(name)
    if packed.dtype not in _STORAGE or packed.stop - packed.start != _padded(size, packed.dtype):
        raise source.fail(f"tensor {name!r} has not the {-(-size // 2)} bytes of {size} codes")
    source.expect(f"{name}.quant_map", ("F32",), (16,))
    blocks = -(-size // block)
    uses = [name, f"{name}.absmax", f"{name}.quant_map", state_name]
    is_nested = "nested_blocksize" in state
    if is_nested:
        if state["nested_blocksize"] != _NESTED_BLOCK or not _is_float(state.get("nested_offset")):
            raise source.fail(f"{state_name!r} has no nested_offset, or nests by another block")
        source.expect(f"{name}.absmax", ("U8",), (blocks,))
        source.expect(f"{name}.nested_absmax", ("F32",), (-(-blocks // _NESTED_BLOCK),))
        source.expect(f"{name}.nested_quant_map", ("F32",), (256,))
        uses[2:2] = [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
    else:
        source.expect(f"{name}.absmax", ("F32",), (blocks,))
    scheme = _scheme(source, name, shape, block, is_nested=is_nested)
    read = partial(_read_four_bit, source, name, scheme, shape, state)
    text = bytes(source.raw_bytes(state_name)).decode()
    return Layer(name, shape, scheme, tuple(uses), read, {"state": text, "storage": packed.dtype})


def _padded(size: int, dtype: str) -> int:
    """Bytes of so many codes, filled up to whole elements of the storage."""
    width = {"BF16": 2, "F16": 2, "F32": 4}.get(dtype, 1)
    whole = (size + 1) // 2
    return -(-whole // width) * width


def _is_float(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool)


def _scheme(
    source: Source, name: str, shape: tuple[int, ...], block: int, *, is_nested: bool
) -> QuantScheme:
    """Plain blocks of rows where no block crosses a row's end, else blocks of the flat tensor."""
    is_cut = not shape or shape[-1] % block != 0
    inner = None if is_cut else _nested_block(shape, block)
    is_flat = is_cut or (is_nested and inner is None)
    scale: Any = "f32"
    if is_nested:
        scale = QuantScheme(
            f"u8[{_table(source.read(f'{name}.nested_quant_map'), 8)}]",
            block=_NESTED_BLOCK if inner is None or is_flat else inner,
            scale="f32",
            offset="bias:f32",
        )
    table = _table(source.read(f"{name}.quant_map"), 4)
    view = -1 if is_flat else None
    return QuantScheme(f"u4[{table}]", block=block, scale=scale, view=view)


def _nested_block(shape: tuple[int, ...], block: int) -> tuple[int, ...] | None:
    """The block on the grid of maxima that holds 256 neighbours of the flat order, or None."""
    per_row = shape[-1] // block
    if len(shape) == 1 or per_row % _NESTED_BLOCK == 0:
        return (_NESTED_BLOCK,)
    rows, rest = divmod(_NESTED_BLOCK, per_row)
    return None if rest or (len(shape) > 2 and shape[-2] % rows) else (rows, -1)


def _table(entries: HostArray, bits: int) -> str:
    """The name of the table with these entries, to the bit; "custom" if none has."""
    raw = entries.tobytes()
    found = (n for n in NAMED if table_bits(n) == bits and named_table(n).tobytes() == raw)
    return next(found, CUSTOM)


def _read_four_bit(
    source: Source, name: str, scheme: QuantScheme, shape: tuple[int, ...], state: dict[str, Any]
) -> QTensor:
    size = math.prod(shape)
    packed = np.frombuffer(source.raw_bytes(name), np.uint8)
    codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[:size]
    numbers = {"codes": codes, "table": source.read(f"{name}.quant_map")}
    absmax = source.read(f"{name}.absmax")
    if isinstance(scheme.scale, QuantScheme):
        outer = source.read(f"{name}.nested_absmax")
        offset = np.float32(state["nested_offset"])
        if not np.isfinite(offset):
            raise CorruptData(what=f"Tensor {name!r}", reason="its nested_offset is infinite")
        numbers |= {
            "scales.codes": absmax,
            "scales.scales": outer,
            "scales.offsets": np.full(outer.shape, offset),
            "scales.table": source.read(f"{name}.nested_quant_map"),
        }
    else:
        numbers["scales"] = absmax
    return assemble(scheme, shape, numbers)


# -- writing ----------------------------------------------------------------------------------

#: Variant -> the scheme that its weights have.
VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "nf4": "u4[nf4]/64:f32",
        "nf4-double": "u4[nf4]/64:(u8[dynamic8]/256:f32+bias:f32)~flat",
        "fp4": "u4[fp4]/64:f32",
        "int8": "q8s/row:absmax.f32",
    }
)


def quantized(values: Array, scheme: QuantScheme, *, calibration: str = "minmax") -> QTensor:
    """Quantize as bitsandbytes does: quantized maxima are off by one mean, and codes ignore that.

    Raises what ``quantize`` raises.
    """
    inner = scheme.scale
    if not isinstance(inner, QuantScheme):
        return quantize(values, scheme, calibration=calibration)
    plain = scheme._with(scale=ScaleDtype.F32)
    numbers = numbers_of(quantize(values, plain, calibration=calibration).to("numpy"))
    maxima = numbers["scales"]
    mean = maxima.mean(dtype=np.float64).astype(np.float32)
    outer = numbers_of(quantize(maxima - mean, inner._with(offset=None)))
    numbers |= {f"scales.{name}": array for name, array in outer.items()}
    numbers["scales.offsets"] = np.full(outer["scales"].shape, mean)
    return assemble(scheme, values.shape, numbers)


def why_not_hold(info: TensorInfo) -> str | None:
    """Why bitsandbytes cannot hold a tensor exactly, or None."""
    scheme = info.scheme
    if scheme is None:
        return plain_why_not(info)
    if 0 in info.shape:
        return "it has no elements"
    if info.axes != tuple(range(len(info.shape))) or not info.shape:
        return "its axes are stored in another order"
    if str(scheme) == VARIANTS["int8"]:
        return None if info.name.endswith(".weight") else "it is not the weight of a module"
    if scheme.table not in _TYPES or scheme.bits != 4 or scheme.offset is not None:
        return f"bitsandbytes has no {scheme}"
    is_flat = scheme.view == (-1,)
    if (scheme.view is not None and not is_flat) or scheme.block is None or len(scheme.block) != 1:
        return f"its blocks are runs of the flat weight, not {scheme.block}"
    block = scheme.block[0]
    if block == -1 or (not is_flat and info.shape[-1] % block):
        return f"blocks of {block} are cut at the ends of rows of {info.shape[-1]}"
    return _why_not_scales(scheme, info)


def _why_not_scales(scheme: QuantScheme, info: TensorInfo) -> str | None:
    if scheme.scale == "f32":
        return None
    inner = scheme.scale
    nested = _nested_block(info.shape, (scheme.block or (1,))[0])
    right = (_NESTED_BLOCK,) if scheme.view is not None else nested
    fits = (
        isinstance(inner, QuantScheme)
        and inner.bits == 8
        and inner.table is not None
        and inner.scale == "f32"
        and inner.offset == ("bias", "f32")
        and inner.block == right
    )
    return None if fits else f"its maxima are f32 or 8-bit ones of 256, not {scheme.scale}"


def open_writer(
    path: Path,
    plan: Sequence[TensorInfo],
    metadata: Mapping[str, str] = MappingProxyType({}),
    whole: Sequence[TensorInfo] | None = None,
) -> PlannedWriter:
    """The writer of a file, of a model of the tensors ``whole``.

    What was read from one keeps its ``quant_state`` to the byte.

    Raises UnsupportedDtype, InvalidName, and CorruptData when a tensor comes whose offsets differ.
    """
    whole = plan if whole is None else whole
    check_held(whole, why_not_hold, NAME)
    origin = kept_origin(metadata, NAME)
    kinds = {info.scheme.table for info in whole if info.scheme is not None}
    is_int8 = kinds == {None}
    nested = any(isinstance(i.scheme.scale, QuantScheme) for i in whole if i.scheme is not None)
    config: dict[str, Any] = {"quant_method": NAME}
    config |= {"load_in_8bit": is_int8, "load_in_4bit": not is_int8}
    config["llm_int8_skip_modules"] = plain_modules(whole) or None
    if not is_int8:
        config |= {
            "bnb_4bit_quant_type": next(iter(sorted(k for k in kinds if k)), "nf4"),
            "bnb_4bit_use_double_quant": nested,
            "bnb_4bit_compute_dtype": "float32",
            "bnb_4bit_quant_storage": "uint8",
        }
    kept = {key: text for key, text in metadata.items() if key != NAME}
    return open_stored_writer(
        path,
        plan,
        layout=lambda info: [array for array, _ in _stored(info, origin, None)],
        encode=lambda info, q: [(a.name, values) for a, values in _stored(info, origin, q)],
        metadata={**kept, "format": "pt"},
        config=config,
    )


def _stored(
    info: TensorInfo, origin: Mapping[str, Any], q: QTensor | None
) -> Iterator[tuple[StoredArray, Any]]:
    """The arrays of a tensor; their values once there is one."""
    scheme, name = info.scheme, info.name
    if scheme is None:
        return
    numbers = {} if q is None else numbers_of(q)
    if scheme.table is None:
        base = base_of(info)
        codes = None if q is None else numbers["codes"]
        yield StoredArray(name, "I8", info.shape), codes
        yield StoredArray(f"{base}.SCB", "F32", info.shape[:1]), numbers.get("scales")
        yield StoredArray(f"{base}.weight_format", "U8", ()), np.zeros((), np.uint8)
        return
    own = member_of(origin, name)
    size, block = math.prod(info.shape), (scheme.block or (1,))[0]
    storage = own["storage"] if own.get("storage") in _STORAGE else "U8"
    width = FILE_DTYPES[storage].bits // 8
    packed = None if q is None else _packed(numbers, _padded(size, storage))
    yield StoredArray(name, storage, (_padded(size, storage) // width, 1)), packed
    blocks = -(-size // block)
    yield StoredArray(f"{name}.quant_map", "F32", (16,)), numbers.get("table")
    offset = 0.0
    if isinstance(scheme.scale, QuantScheme):
        outer = (-(-blocks // _NESTED_BLOCK),)
        yield StoredArray(f"{name}.absmax", "U8", (blocks,)), numbers.get("scales.codes")
        yield StoredArray(f"{name}.nested_absmax", "F32", outer), numbers.get("scales.scales")
        table = numbers.get("scales.table")
        yield StoredArray(f"{name}.nested_quant_map", "F32", (256,)), table
        if q is not None:
            offset = _one_offset(name, numbers["scales.offsets"])
    else:
        yield StoredArray(f"{name}.absmax", "F32", (blocks,)), numbers.get("scales")
    text = _state(info, scheme, block, offset, own.get("state"), measured=q is None)
    state = StoredArray(f"{name}{_STATE}{scheme.table}", "U8", (len(text),))
    yield state, np.frombuffer(text, np.uint8)


def _packed(numbers: Mapping[str, HostArray], nbytes: int) -> HostArray:
    codes = numbers["codes"].reshape(-1)
    flat = np.zeros(2 * nbytes, np.uint8)
    flat[: codes.size] = codes
    if codes.size % 2:
        flat[codes.size] = np.abs(numbers["table"]).argmin()  # as bitsandbytes fills the last byte
    made: HostArray = flat[::2] << 4 | flat[1::2]
    return made


def _one_offset(name: str, offsets: HostArray) -> float:
    if offsets.size and (offsets != offsets.flat[0]).any():
        reason = "its maxima have several offsets, and bitsandbytes holds one"
        raise CorruptData(what=f"Tensor {name!r}", reason=reason)
    return float(offsets.flat[0]) if offsets.size else 0.0


#: Characters of the longest number that float32 holds.
_OFFSET_WIDTH = len("-1.17549435e-38")


def _state(
    info: TensorInfo,
    scheme: QuantScheme,
    block: int,
    offset: float,
    kept: object,
    *,
    measured: bool,
) -> bytes:
    """The JSON of the quant_state: the kept one where it says the same, else one of its length.

    What comes may be another tensor than the kept one says, with another offset; so a text is kept
    only where there is room for any.
    """
    facts: dict[str, Any] = {
        "quant_type": scheme.table,
        "blocksize": block,
        "dtype": "float32",
        "shape": list(info.shape),
    }
    found = kept_origin({"state": kept}, "state") if isinstance(kept, str) else {}
    own: Any = found.pop("nested_offset", 0.0)
    if isinstance(scheme.scale, QuantScheme):
        facts |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32"}
    text = json.dumps(facts, separators=(",", ":"))
    width = len(text)
    if isinstance(scheme.scale, QuantScheme):
        head = f'{text[:-1]},"nested_offset":'
        text, width = f"{head}{np.float32(offset)!s}}}", len(head) + _OFFSET_WIDTH + 1
    is_same = _is_float(own) and found == facts | {"dtype": found.get("dtype")}
    if is_same and len(str(kept)) >= width:
        if measured or np.float32(own) == offset:
            return str(kept).encode()
        width = len(str(kept).encode())
    return text.ljust(width).encode()
