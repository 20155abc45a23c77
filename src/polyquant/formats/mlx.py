"""MLX: affine integers of 1 to 8 bits, mxfp4, mxfp8 and nvfp4; and transformers' "metal".

``weight`` uint32 holds one stream of bits a row, lowest first; ``scales`` and ``biases``, one a
group. ``global_scale`` of nvfp4 is the tensor's largest magnitude. Which modules have other bits,
the config says by their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from polyquant.errors import CorruptData
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.qtensor import QTensor, from_parts
from polyquant.scheme import QuantScheme

NAME = "mlx"
_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_GROUP_SIZES = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}.items()


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    if probe.container is None:
        return "it is not a safetensors file"
    is_mlx = "quantization" in probe.config and probe.method is None
    if is_mlx or probe.method == "metal" or probe.format == NAME:
        return None
    return "its config has no quantization of MLX's"


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index; the config gives bits, group_size and mode.

    Raises InvalidHeader, UnsupportedDtype.
    """
    source = Source(probe, NAME)
    return open_layers(probe, source, _layers(source))


def _layers(source: Source) -> Iterator[Layer]:
    for base in source.names(".scales"):
        if f"{base}.weight" in source and source.raw(f"{base}.weight").dtype == "U32":
            yield _layer(source, base)


def _layer(source: Source, base: str) -> Layer:
    facts = _facts(source, base)
    mode = facts.get("mode", "affine")
    if mode not in _MODES:
        raise source.refuse(base, f"mode {mode}", _MODES)
    size = dict(_GROUP_SIZES).get(mode) or source.number("group_size", facts)
    bits = {"mxfp4": 4, "nvfp4": 4, "mxfp8": 8}.get(mode) or source.number("bits", facts)
    if not 1 <= bits <= 8 or size < 1:
        raise source.refuse(base, f"{bits} bits in groups of {size}", range(1, 9))
    raw = source.raw(f"{base}.weight")
    if not raw.shape or raw.shape[-1] * 32 % bits:
        raise source.fail(f"tensor {raw.name!r} of {raw.shape} words holds no whole codes")
    shape = (*raw.shape[:-1], raw.shape[-1] * 32 // bits)
    grid = (*raw.shape[:-1], -(-shape[-1] // size))
    uses = [f"{base}.weight", f"{base}.scales"]
    if mode == "affine":
        scale = source.scale(f"{base}.scales", grid)
        biases = f"{base}.biases" if f"{base}.biases" in source else f"{base}.qbiases"
        source.expect(biases, (source.raw(f"{base}.scales").dtype,), grid)
        uses.append(biases)
        scheme = QuantScheme(f"u{bits}", block=size, scale=scale, offset=f"bias:{scale}")
    else:
        source.expect(f"{base}.scales", ("U8",), grid)
        scheme = _float_scheme(source, base, mode, uses)
    read = partial(_read, source, tuple(uses), scheme, shape)
    return Layer(f"{base}.weight", shape, scheme, tuple(uses), read)


def _float_scheme(source: Source, base: str, mode: str, uses: list[str]) -> QuantScheme:
    whole = f"{base}.global_scale"
    if mode == "nvfp4" and whole in source:
        source.expect(whole, ("F32",), ())
        uses.append(whole)
        return QuantScheme("e2m1", block=16, scale="ue4m3", tensor_scale="f32", role="absmax")
    value, block, scale = {
        "mxfp4": ("e2m1", 32, "ue8m0"),
        "mxfp8": ("e4m3", 32, "ue8m0"),
        "nvfp4": ("e2m1", 16, "ue4m3"),
    }[mode]
    return QuantScheme(value, block=block, scale=scale)


def _facts(source: Source, base: str) -> Mapping[str, Any]:
    """The config's general facts, and over them those of the module."""
    own = source.config.get(base)
    return {**source.config, **own} if isinstance(own, Mapping) else source.config


def _read(
    source: Source, uses: tuple[str, ...], scheme: QuantScheme, shape: tuple[int, ...]
) -> QTensor:
    words = source.read(uses[0])
    parts = {"data": words.view(np.uint8), "scales": source.read(uses[1])}
    if scheme.scale == "ue4m3" and (parts["scales"] >= 0x80).any():
        raise CorruptData(what=f"Tensor {uses[1]!r}", reason="it has negative scales")
    if scheme.offset is not None:
        parts["offsets"] = source.read(uses[2])
    if scheme.tensor_scale is not None:
        parts["tensor_scale"] = source.read(uses[2])
    return from_parts(parts, scheme, shape, device="numpy")
