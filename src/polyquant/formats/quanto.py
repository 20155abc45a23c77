"""optimum-quanto: 8-bit codes by row or tensor, and groups of 2 and 4 bits with a shift.

``quantization_map.json`` beside the tensors names the quantized modules. Groups of 2 and 4 bits are
rows of ``weight.reshape(-1, group)`` (or columns, of axis -1), packed by parts of the rows, the
first part in the lowest bits. Files do not hold the weight's own shape: without ``config={"shapes":
{"module.weight": [out, in]}}`` such a tensor has the shape of its groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from polyquant.arrays import HostArray
from polyquant.files.assemble import assemble
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.container import is_shape
from polyquant.files.facts import Facts
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme

NAME = "quanto"
FACTS = Facts(
    tool="optimum-quanto",
    reads="2, 4 and 8 bits, float8, both axes",
    exact="bit-equal; step by step in bfloat16",
)
_MAPS = ("quantization_map.json", "quanto_qmap.json")
_GROUPED, _PLAIN = "._data._data", "._data"


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    if probe.container is None:
        return "it is not a safetensors file"
    has_map = any((probe.file.parent / name).is_file() for name in _MAPS)
    if has_map or NAME in (probe.method, probe.format):
        return None
    return f"no {_MAPS[0]} lies beside it, and its config has the quant_method {probe.method!r}"


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index. Raises InvalidHeader, UnsupportedDtype."""
    source = Source(probe, NAME)
    maps = [found for name in _MAPS if (found := probe.other_file(name)) is not None]
    return open_layers(
        probe, source, _layers(source, maps[0] if maps else {}, source.shapes(probe))
    )


def _layers(source: Source, types: Mapping[str, Any], shapes: Mapping[str, Any]) -> Iterator[Layer]:
    for name in source.names(_GROUPED):
        yield _grouped(source, name, _bits(source, types, name), shapes.get(name))
    for name in source.names(_PLAIN):
        if f"{name}{_PLAIN}" in source and f"{name}._scale" in source and not name.endswith(_PLAIN):
            yield _eight_bits(source, name)


def _bits(source: Source, types: Mapping[str, Any], name: str) -> int:
    """2 or 4: what the map says of the module, or the config's ``weights`` of all."""
    entry = types.get(name.removesuffix(".weight"))
    said = entry.get("weights") if isinstance(entry, Mapping) else source.config.get("weights")
    found = {"qint2": 2, "qint4": 4, "int2": 2, "int4": 4}.get(str(said))
    if found is None:
        wanted = "its quantization_map.json, or weights in its config, must say qint2 or qint4"
        raise source.fail(f"{wanted} of {name!r}, and says {said!r}")
    return found


# -- 8 bits -----------------------------------------------------------------------------------


def _eight_bits(source: Source, name: str) -> Layer:
    raw = source.raw(f"{name}{_PLAIN}")
    value = {"I8": "q8f", "F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}.get(raw.dtype)
    if value is None:
        raise source.refuse(name, f"codes of {raw.dtype}", ("I8", "F8_E4M3", "F8_E5M2"))
    grid = source.raw(f"{name}._scale").shape
    scale = source.scale(f"{name}._scale", grid)
    ones = (1,) * (len(raw.shape) - 1)
    blocks: dict[tuple[int, ...], tuple[int, ...] | None] = {}
    if raw.shape:
        blocks[(*ones, raw.shape[-1])] = (*(-1 for _ in ones), 1)
        blocks[(raw.shape[0], *ones)] = (1, *(-1 for _ in ones))
    block = None if math.prod(grid) == 1 else blocks.get(grid, ())
    if block == ():
        raise source.fail(f"'{name}._scale' of {grid} is no scale a row or column of {raw.shape}")
    scheme = QuantScheme(value, block=block, scale=scale)
    uses = (f"{name}{_PLAIN}", f"{name}._scale")
    return Layer(
        name, raw.shape, scheme, uses, partial(_read_plain, source, name, scheme, raw.shape)
    )


def _read_plain(source: Source, name: str, scheme: QuantScheme, shape: tuple[int, ...]) -> QTensor:
    codes = source.read(f"{name}{_PLAIN}").view(np.uint8)
    return assemble(scheme, shape, {"codes": codes, "scales": source.read(f"{name}._scale")})


# -- groups of 2 and 4 bits -------------------------------------------------------------------


def _grouped(source: Source, name: str, bits: int, given: Any) -> Layer:
    packed = source.expect(f"{name}{_GROUPED}", ("U8",), (None, None))
    grid = source.raw(f"{name}._scale").shape
    scale = source.scale(f"{name}._scale", grid)
    shift = source.expect(f"{name}._shift", ("F32", "F16", "BF16", "U8", "I8"), grid)
    if len(grid) != 2 or 1 not in grid:
        raise source.fail(f"'{name}._scale' of {grid} is no scale a group")
    is_last = grid[0] == 1 and grid[1] > 1  # axis -1: groups are columns
    rows = packed.shape[0] * (8 // bits)
    matrix = (rows, packed.shape[1]) if is_last else (grid[0], packed.shape[1])
    if matrix[0] > rows or rows - matrix[0] >= 8 // bits or (is_last and grid[1] != matrix[1]):
        raise source.fail(f"'{name}{_GROUPED}' of {packed.shape} packs no {matrix} codes")
    shape = _shape(source, name, given, matrix, is_last=is_last)
    offset = f"zero_point:u{bits}" if shift.dtype in ("U8", "I8") else f"bias:{scale}"
    if offset.startswith("bias") and source.scale(shift.name, grid) != scale:
        raise source.fail(f"'{name}._shift' and '{name}._scale' have different dtypes")
    size = matrix[0] if is_last else matrix[1]
    block: Any = (size, 1) if is_last else size
    view = None if is_last or shape[-1] % size == 0 else -1
    scheme = QuantScheme(f"u{bits}", block=block, scale=scale, offset=offset, view=view)
    uses = (f"{name}{_GROUPED}", f"{name}._scale", f"{name}._shift")
    read = partial(_read_grouped, source, name, scheme, shape, matrix, is_last=is_last)
    return Layer(name, shape, scheme, uses, read)


def _shape(
    source: Source, name: str, given: Any, matrix: tuple[int, int], *, is_last: bool
) -> tuple[int, ...]:
    if given is None:
        if is_last:
            reason = f'of the groups of {name!r} only config={{"shapes": ...}} tells the shape'
            raise source.fail(reason)
        return matrix
    if not is_shape(given) or math.prod(given) != math.prod(matrix) or not given:
        raise source.fail(f"the shape {given!r} given for {name!r} has not {matrix} weights")
    shape = tuple(given)
    if is_last and (len(shape) != 2 or shape[0] % matrix[0]):
        raise source.fail(f"groups of {matrix[0]} rows do not divide {name!r} of {shape}")
    return shape


def _read_grouped(
    source: Source,
    name: str,
    scheme: QuantScheme,
    shape: tuple[int, ...],
    matrix: tuple[int, int],
    *,
    is_last: bool,
) -> QTensor:
    bits, packed = scheme.bits, source.read(f"{name}{_GROUPED}")
    parts = [packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
    codes: HostArray = np.concatenate(parts, axis=0)[: matrix[0]]
    scales, shifts = source.read(f"{name}._scale"), source.read(f"{name}._shift")
    if scheme.offset is not None and scheme.offset.kind == "bias":
        shifts = -shifts  # a shift is subtracted
    if is_last:
        # (group, in, groups) flattened: the weight is (groups, group, in).
        size, columns = matrix[0], shape[1]
        codes = codes.reshape(size, columns, -1).transpose(2, 0, 1)
        scales, shifts = (a.reshape(columns, -1).T for a in (scales, shifts))
    numbers = {"codes": codes, "scales": scales, "offsets": shifts}
    return assemble(scheme, shape, numbers)
