"""NVIDIA ModelOpt: FP8, MXFP8, MXFP4, NVFP4, INT4-AWQ and INT8 as it exports them.

``weight_scale`` multiplies, and in NVFP4 ``weight_scale_2`` too (compressed-tensors' global scale
is its reciprocal). INT4-AWQ has two output rows in a byte, and ``pre_quant_scale``, which
multiplies the activations and stays an array of its own.

Stacks of experts (Llama 4, gpt-oss) are ``[experts, in, out]`` and have no ``.weight`` in their
names; they are read under FP8 and NVFP4, whose blocks run along the middle axis, two codes a byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    reads=(
        "FP8 (tensor, row, square), MXFP8, MXFP4, NVFP4, INT4-AWQ, INT8, mixed; stacked experts in "
        "FP8 and NVFP4"
    ),
    exact="bit-equal",
)
SCALE, EXPERTS_SCALE = ".weight_scale", "_weight_scale"


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return probe.why_not_declared(NAME)


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index. Raises InvalidHeader, UnsupportedDtype."""
    source = Source(probe, NAME)
    beside = probe.other_file("hf_quant_config.json") or {}  # says more than config.json does
    facts: dict[str, Any] = {}
    for config in (beside, source.config):
        inner = config.get("quantization")
        facts |= inner if isinstance(inner, Mapping) else config
    return open_layers(probe, source, _layers(source, facts))


def _layers(source: Source, facts: Mapping[str, Any]) -> Iterator[Layer]:
    for base in source.names(SCALE):
        if f"{base}.weight" in source:
            algorithm, own = _of_layer(source, facts, base)
            yield _ALGORITHMS[algorithm](source, base, _group_size(source, own))
    for name in source.names(EXPERTS_SCALE):
        if name in source:
            algorithm, own = _of_layer(source, facts, name)
            yield _experts(source, name, algorithm, _group_size(source, own))


def _of_layer(source: Source, facts: Mapping[str, Any], base: str) -> tuple[str, Mapping[str, Any]]:
    """The algorithm of a layer, and the facts that hold for it: its own where precisions are mixed.

    Raises UnsupportedDtype, InvalidHeader.
    """
    own: Any = facts
    if facts.get("quant_algo") == "MIXED_PRECISION":
        layers = facts.get("quantized_layers")
        layers = layers if isinstance(layers, Mapping) else {}
        own = layers.get(base, layers.get(base.rpartition(".")[0]))  # experts: of their module
        if not isinstance(own, Mapping):
            raise source.fail(f"quantized_layers of its config say nothing of {base!r}")
    algorithm = str(own.get("quant_algo", "")).upper()
    if algorithm not in _ALGORITHMS:
        raise source.refuse(base, f"the quant_algo {algorithm}", _ALGORITHMS)
    return algorithm, own


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
    scheme = _nvfp4_scheme(group_size)
    source.expect(f"{base}{SCALE}", ("F8_E4M3",), scheme.scale_shape((rows, 2 * half)))
    second = source.one_number(f"{base}{SCALE}_2")
    return _layer(source, base, (rows, 2 * half), scheme, second)


def _nvfp4_scheme(group_size: int | None) -> QuantScheme:
    return QuantScheme("e2m1", block=group_size or 16, scale="ue4m3", tensor_scale="f32")


def _int8(source: Source, base: str, group_size: int | None) -> Layer:
    rows, columns = source.expect(f"{base}.weight", ("I8",), (None, None)).shape
    scale = source.scale(f"{base}{SCALE}", (rows,))
    return _layer(source, base, (rows, columns), QuantScheme("q8f", block=-1, scale=scale))


def _int4(source: Source, base: str, group_size: int | None) -> Layer:
    half, columns = source.expect(f"{base}.weight", ("U8",), (None, None)).shape
    size = group_size or 128
    scale = source.scale(f"{base}{SCALE}", (2 * half, -(-columns // size)))
    return _layer(source, base, (2 * half, columns), QuantScheme("q4f", block=size, scale=scale))


# -- stacks of experts ------------------------------------------------------------------------


def _experts(source: Source, name: str, algorithm: str, group_size: int | None) -> Layer:
    """Weights of several experts: all of one scale, or in blocks along the middle axis."""
    scale = f"{name}{EXPERTS_SCALE}"
    if algorithm == "FP8":
        experts, rows, columns = source.expect(name, ("F8_E4M3",), (None,) * 3).shape
        scheme = QuantScheme("e4m3", block=None, scale="f32")
        uses, axes = [name, source.one_number(scale)], (0, 1, 2)
    elif algorithm in _NVFP4_OF_EXPERTS:
        experts, half, columns = source.expect(name, ("U8",), (None,) * 3).shape
        rows, scheme = 2 * half, _nvfp4_scheme(group_size)
        grid = scheme.scale_shape((experts, columns, rows))
        source.expect(scale, ("F8_E4M3",), (experts, grid[2], columns))
        uses, axes = [name, scale, source.one_number(f"{scale}_2")], (0, 2, 1)
    else:
        raise source.refuse(name, f"stacked experts in {algorithm}", ("FP8", *_NVFP4_OF_EXPERTS))
    shape = (experts, rows, columns)
    read = partial(_read_experts, source, uses, scheme, shape, axes)
    return Layer(name, shape, scheme, tuple(uses), read, axes=axes)


def _read_experts(
    source: Source,
    uses: Sequence[str],
    scheme: QuantScheme,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
) -> QTensor:
    data = source.read(uses[0]).view(np.uint8)
    if scheme.bits == 8:
        numbers = {"codes": data, "scales": source.read(uses[1])}
    else:
        lines = np.ascontiguousarray(data.transpose(axes))
        numbers = {
            "codes": unpack(np, lines, shape[1], scheme.value, QuantStore.PACKED_NATIVE),
            "scales": source.read(uses[1]).view(np.uint8).transpose(axes),
            "tensor_scale": source.read(uses[2]),
        }
    return assemble(scheme, shape, numbers, axes=axes)


#: W4A8_NVFP4_FP8 has no stacks that are known to be right: its exporter blocks the other axis.
_NVFP4_OF_EXPERTS = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4")
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
        "W4A16_NVFP4": _nvfp4,
        "W4A8_NVFP4_FP8": _nvfp4,
        "W8A16": _int8,
        "W8A8_SQ_PER_CHANNEL": _int8,
        "W4A16_AWQ": _int4,
        "W4A8_AWQ": _int4,
    }
)
