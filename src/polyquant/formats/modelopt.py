"""NVIDIA ModelOpt: FP8, MXFP8, MXFP4, NVFP4 and INT4-AWQ as it exports them.

``weight_scale`` multiplies, and in NVFP4 ``weight_scale_2`` too (compressed-tensors' global scale
is its reciprocal). INT4-AWQ has two output rows in a byte, and ``pre_quant_scale``, which
multiplies the activations and stays an array of its own.
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
from polyquant.files.assemble import assemble
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.facts import Facts
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import QuantStore, QuantValue

NAME = "modelopt"
FACTS = Facts(
    tool="NVIDIA ModelOpt",
    reads="FP8 (tensor, row, square), MXFP8, MXFP4, NVFP4, INT4-AWQ",
    exact="bit-equal",
)
SCALE = ".weight_scale"


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return probe.why_not_declared(NAME)


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index. Raises InvalidHeader, UnsupportedDtype."""
    source = Source(probe, NAME)
    return open_layers(probe, source, _layers(source))


def _layers(source: Source) -> Iterator[Layer]:
    config = source.config
    inner = config.get("quantization")
    facts: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    algorithm = str(facts.get("quant_algo", "")).upper()
    if algorithm not in _ALGORITHMS:
        raise source.refuse("the config", f"the quant_algo {algorithm}", _ALGORITHMS)
    for base in source.names(SCALE):
        if f"{base}.weight" in source:
            yield _ALGORITHMS[algorithm](source, base, _group_size(source, facts))


def _group_size(source: Source, facts: Mapping[str, Any]) -> int | None:
    """The group size of the config, wherever it stands."""
    sizes = [facts.get("group_size")]
    groups = facts.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        sizes.append(weights.get("group_size") if isinstance(weights, Mapping) else None)
    given = [size for size in sizes if size is not None]
    if not all(type(size) is int and size > 0 for size in given) or len(set(given)) > 1:
        raise source.fail(f"its config has no one group_size, but {given}")
    found = set(given)
    return next(iter(found), None)


def _layer(
    source: Source, base: str, shape: tuple[int, int], scheme: QuantScheme, *more: str
) -> Layer:
    uses = (f"{base}.weight", f"{base}{SCALE}", *more)
    read = partial(_read, source, base, scheme, shape)
    return Layer(f"{base}.weight", shape, scheme, uses, read)


def _read(source: Source, base: str, scheme: QuantScheme, shape: tuple[int, int]) -> QTensor:
    data = source.read(f"{base}.weight").view(np.uint8)
    scales = source.read(f"{base}{SCALE}")
    numbers: dict[str, HostArray] = {"scales": scales}
    if scheme.bits == 8:
        numbers["codes"] = data
    elif scheme.value is QuantValue.Q4F:  # two rows a byte
        numbers["codes"] = np.stack([data & 15, data >> 4], axis=1)
    else:
        numbers["codes"] = unpack(np, data, shape[1], scheme.value, QuantStore.PACKED_NATIVE)
    if scheme.scale in ("ue8m0", "ue4m3"):
        numbers["scales"] = scales.view(np.uint8)
    if scheme.tensor_scale is not None:
        numbers["tensor_scale"] = source.read(f"{base}.weight_scale_2")
    return assemble(scheme, shape, numbers)


def _fp8(source: Source, base: str, group_size: int | None) -> Layer:
    raw = source.expect(f"{base}.weight", ("F8_E4M3",), (None, None))
    rows, columns = raw.shape
    grid = source.raw(f"{base}{SCALE}").shape
    scale = source.scale(f"{base}{SCALE}", grid)
    if math.prod(grid) == 1:
        scheme = QuantScheme("e4m3", block=None, scale=scale)
    elif grid in ((rows,), (rows, 1)):
        scheme = QuantScheme("e4m3", block=-1, scale=scale)
    else:
        known = ["one scale", "one scale a row"]
        raise source.refuse(base, f"FP8 with scales of {grid}", known)
    return _layer(source, base, (rows, columns), scheme)


def _fp8_blocks(source: Source, base: str, group_size: int | None) -> Layer:
    rows, columns = source.expect(f"{base}.weight", ("F8_E4M3",), (None, None)).shape
    size = group_size or 128
    grid = (-(-rows // size), -(-columns // size))
    found = source.raw(f"{base}{SCALE}").shape
    shape = found if found == (grid[0], 1, grid[1], 1) else grid
    scheme = QuantScheme("e4m3", block=(size, size), scale=source.scale(f"{base}{SCALE}", shape))
    return _layer(source, base, (rows, columns), scheme)


def _mxfp8(source: Source, base: str, group_size: int | None) -> Layer:
    rows, columns = source.expect(f"{base}.weight", ("F8_E4M3",), (None, None)).shape
    source.expect(f"{base}{SCALE}", ("U8", "F8_E8M0"), (rows, -(-columns // 32)))
    return _layer(source, base, (rows, columns), QuantScheme("e4m3", block=32, scale="ue8m0"))


def _mxfp4(source: Source, base: str, group_size: int | None) -> Layer:
    rows, half = source.expect(f"{base}.weight", ("U8",), (None, None)).shape
    source.expect(f"{base}{SCALE}", ("U8", "F8_E8M0"), (rows, -(-half // 16)))
    return _layer(source, base, (rows, 2 * half), QuantScheme("e2m1", block=32, scale="ue8m0"))


def _nvfp4(source: Source, base: str, group_size: int | None) -> Layer:
    rows, half = source.expect(f"{base}.weight", ("U8",), (None, None)).shape
    source.expect(f"{base}{SCALE}", ("F8_E4M3",), (rows, -(-half // 8)))
    second = f"{base}.weight_scale_2"
    if math.prod(source.expect(second, ("F32",), source.raw(second).shape).shape) != 1:
        raise source.fail(f"tensor {second!r} is not one number")
    scheme = QuantScheme("e2m1", block=16, scale="ue4m3", tensor_scale="f32")
    return _layer(source, base, (rows, 2 * half), scheme, second)


def _int4(source: Source, base: str, group_size: int | None) -> Layer:
    half, columns = source.expect(f"{base}.weight", ("U8",), (None, None)).shape
    size = group_size or 128
    scale = source.scale(f"{base}{SCALE}", (2 * half, -(-columns // size)))
    return _layer(source, base, (2 * half, columns), QuantScheme("q4f", block=size, scale=scale))


_ALGORITHMS: Mapping[str, Callable[[Source, str, int | None], Layer]] = MappingProxyType(
    {
        "FP8": _fp8,
        "FP8_PER_CHANNEL_PER_TOKEN": _fp8,
        "FP8_PB_WO": _fp8_blocks,
        "MXFP8": _mxfp8,
        "MXFP4": _mxfp4,
        "W4A8_MXFP4_FP8": _mxfp4,
        "NVFP4": _nvfp4,
        "NVFP4_AWQ": _nvfp4,
        "W4A16_AWQ": _int4,
        "W4A8_AWQ": _int4,
    }
)
