"""HQQ: integers of 1 to 8 bits under float scales and float zero points, in groups of either axis.

A layer's facts are arrays too: ``nbits``, ``axis``, ``shape``, ``packing`` (a text as its bytes),
and so on. Groups are rows (axis 1) or columns (axis 0) of the weight reshaped to two axes, of which
one is the group's size. ``W_q`` packs that matrix by parts of its rows, the first part in the
highest bits. HQQ itself refuses to save quantized scales or zero points as safetensors, so a file
that says it has some is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

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

NAME = "hqq"
FACTS = Facts(
    tool="HQQ",
    reads="1 to 6 and 8 bits, both axes",
    exact="bit-equal; step by step in float16 and bfloat16",
)
_SUFFIX = ".W_q"


class _Packing(NamedTuple):
    """Bits of a field, the bytes of an element, and how far each part is shifted, first to last."""

    bits: int
    element: int
    shifts: tuple[int, ...]


_PACKINGS: Mapping[str, _Packing] = MappingProxyType(
    {
        "8bit_u8": _Packing(8, 1, (0,)),
        "4bit_u8": _Packing(4, 1, (4, 0)),
        "3bit_32": _Packing(3, 4, tuple(range(27, -1, -3))),
        "2bit_u8": _Packing(2, 1, (6, 4, 2, 0)),
        "1bit_u8": _Packing(1, 1, tuple(range(7, -1, -1))),
    }
)


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    if probe.container is None:
        return "it is not a safetensors file"
    names = probe.container.places
    declared = any(n.endswith(_SUFFIX) and f"{n[:-3]}packing" in names for n in names)
    if declared or NAME in (probe.method, probe.format):
        return None
    return "neither its config nor its names speak of HQQ"


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index. Raises InvalidHeader, UnsupportedDtype."""
    source = Source(probe, NAME)
    return open_layers(probe, source, (_layer(source, base) for base in source.names(_SUFFIX)))


def _layer(source: Source, base: str) -> Layer:
    text = bytes(source.raw_bytes(source.expect(f"{base}.packing", ("U8",), (None,)).name))
    packing = _PACKINGS.get(text.decode("latin-1"))
    if packing is None:
        raise source.refuse(base, f"the packing {text[:20]!r}", _PACKINGS)
    for flag in ("quant_scale", "quant_zero"):
        if f"{base}.{flag}" in source and _integer(source, f"{base}.{flag}"):
            raise source.refuse(base, f"quantized scales ({flag})", ["plain scales"])
    bits, axis = _bits(source, f"{base}.nbits"), _integer(source, f"{base}.axis")
    found = source.read(source.expect(f"{base}.shape", ("I64", "I32"), (None,)).name).tolist()
    if not is_shape(found) or axis not in (0, 1) or not 1 <= bits <= packing.bits:
        raise source.fail(f"layer {base!r} of {bits} bits along axis {axis} has shape {found}")
    shape, size = tuple(found), math.prod(found)
    groups = math.prod(source.raw(f"{base}.scale").shape)
    if not groups or size % groups or not size:
        raise source.fail(f"'{base}.scale' has {groups} scales for {size} weights")
    matrix = (groups, size // groups) if axis else (size // groups, groups)
    _check_packed(source, base, packing, matrix)
    grid = (groups, 1) if axis else (1, groups)
    scale = source.scale(f"{base}.scale", grid)
    if source.scale(f"{base}.zero", grid) != scale:
        raise source.fail(f"'{base}.zero' and '{base}.scale' have different dtypes")
    uses = [name for name in source.container.places if name.startswith(f"{base}.")]
    uses = [n for n in uses if n.removeprefix(f"{base}.") in _PARTS]
    scheme = _scheme(bits, scale, shape, size // groups, axis)
    read = partial(_read, source, base, scheme, shape, packing, matrix)
    return Layer(f"{base}.weight", shape, scheme, tuple(uses), read)


def _bits(source: Source, name: str) -> int:
    """Whole bits; 1.58 are stored in two."""
    if source.raw(name).dtype not in ("F16", "BF16", "F32", "F64"):
        return _integer(source, name)
    source.expect(name, ("F16", "BF16", "F32", "F64"), ())
    number = float(source.read(name))
    return 2 if round(number, 2) == 1.58 else int(number) if number in range(9) else 0


def _integer(source: Source, name: str) -> int:
    source.expect(name, ("U8", "I8", "I32", "I64"), ())
    return int(source.read(name))


def _check_packed(source: Source, base: str, packing: _Packing, matrix: tuple[int, int]) -> None:
    rows = -(-matrix[0] // len(packing.shifts))
    raw = source.raw(f"{base}{_SUFFIX}")
    if raw.stop - raw.start != rows * matrix[1] * packing.element:
        raise source.fail(f"tensor {raw.name!r} has not the bytes of {matrix} packed codes")


def _scheme(bits: int, scale: str, shape: tuple[int, ...], size: int, axis: int) -> QuantScheme:
    """Plain blocks where they are blocks of the weight, else of the view with groups on an axis."""
    block: int | tuple[int, ...] = size
    view: int | tuple[int, ...] | None = None if shape[-1] % size == 0 else -1
    if axis == 0:
        block, view = (-1, 1), (size, -1)
        if len(shape) == 2 and shape[0] == size:
            view = None
    return QuantScheme(
        f"u{bits}", block=block, scale=scale, offset=f"zero_point:{scale}", view=view
    )


def _read(
    source: Source,
    base: str,
    scheme: QuantScheme,
    shape: tuple[int, ...],
    packing: _Packing,
    matrix: tuple[int, int],
) -> QTensor:
    kind = np.dtype("<u4" if packing.element == 4 else np.uint8)
    packed = np.frombuffer(source.raw_bytes(f"{base}{_SUFFIX}"), np.uint8).view(kind)
    packed = packed.reshape(-1, matrix[1])
    mask = kind.type(2**packing.bits - 1)
    parts = [(packed >> kind.type(shift) & mask).astype(np.uint8) for shift in packing.shifts]
    codes: HostArray = np.concatenate(parts, axis=0)[: matrix[0]]
    numbers = {
        "codes": codes & (2**scheme.bits - 1),
        "scales": source.read(f"{base}.scale"),
        "offsets": source.read(f"{base}.zero"),
    }
    return assemble(scheme, shape, numbers)


#: What belongs to the weight; a bias, for one, does not.
_PARTS = frozenset(
    (
        *("W_q", "scale", "zero", "nbits", "group_size", "axis", "shape", "packing"),
        *("view_as_float", "compute_dtype", "unpack_view_dtype", "channel_wise", "optimize"),
        *("round_zero", "quant_scale", "quant_zero", "offload_meta", "stores_quant_config"),
        *("encoded_state_dict", "device"),
    )
)
