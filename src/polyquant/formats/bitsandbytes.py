"""bitsandbytes: NF4 and FP4 with plain or doubly quantized maxima, and int8 rows.

Codes lie in the order of the flattened weight, the first of two in the high nibble, and blocks run
on across the ends of rows. ``quant_state.bitsandbytes__nf4`` is JSON as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from polyquant.arrays import HostArray
from polyquant.errors import CorruptData
from polyquant.files.assemble import assemble
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.container import is_shape
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.files.strict_json import parse_object
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.tables import CUSTOM, NAMED, named_table, table_bits

NAME = "bitsandbytes"
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
    return Layer(name, shape, scheme, tuple(uses), read)


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
    per_row, rest = divmod(shape[-1], block) if shape else (0, 1)
    inner = _nested_block(per_row) if not rest else None
    is_flat = bool(rest) or (is_nested and inner is None)
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


def _nested_block(per_row: int) -> tuple[int, ...] | None:
    """The block on the grid of maxima that holds 256 neighbours of the flat order, or None."""
    if per_row % _NESTED_BLOCK == 0:
        return (_NESTED_BLOCK,)
    return (_NESTED_BLOCK // per_row, -1) if per_row and _NESTED_BLOCK % per_row == 0 else None


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
