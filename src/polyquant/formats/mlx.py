"""MLX: affine integers of 1 to 8 bits, mxfp4, mxfp8 and nvfp4; and transformers' "metal".

``weight`` uint32 holds one stream of bits a row, lowest first; ``scales`` and ``biases``, one a
group. ``global_scale`` of nvfp4 is the tensor's largest magnitude. Which modules have other bits,
the config says by their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from polyquant.data import parts as stored_parts
from polyquant.files.assemble import check_scales
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.container import Container
from polyquant.files.facts import Facts
from polyquant.files.info import TensorInfo
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.files.stored import (
    StoredArray,
    base_of,
    check_held,
    has_whole_groups,
    open_stored_writer,
    plain_why_not,
    scale_code,
)
from polyquant.files.writing import PlannedWriter, Stored
from polyquant.qtensor import QTensor, from_parts
from polyquant.scheme import QuantScheme

NAME = "mlx"
FACTS = Facts(
    tool="MLX, mlx-lm; transformers metal",
    reads=("affine 1 to 8 bits, mxfp4, mxfp8, nvfp4 with and without a global scale"),
    exact="bit-equal to float32",
    writes="the same, but for metal",
    bytes="yes",
    checked="mlx 0.32.4, mlx-lm 0.32.2",
)
_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_GROUP_SIZES = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}.items()


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    if probe.container is None:
        return "it is not a safetensors file"
    declared = "quantization" in probe.config or declares(probe.container)
    is_mlx = declared and probe.method is None and "group_size" in probe.quantization
    if is_mlx or probe.method == "metal" or probe.format == NAME:
        return None
    return "its config has no quantization of MLX's"


def declares(container: Container) -> bool:
    """Whether a file says that MLX wrote it."""
    return any(file.metadata.get("format") == NAME for file in container.files)


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
    for part in stored_parts(scheme, shape):
        if part.name == "scales":
            check_scales(parts["scales"], part)
    if scheme.offset is not None:
        parts["offsets"] = source.read(uses[2])
    if scheme.tensor_scale is not None:
        parts["tensor_scale"] = source.read(uses[2])
    return from_parts(parts, scheme, shape, device="numpy")


# -- writing ----------------------------------------------------------------------------------

#: Variant -> the scheme that its weights have.
VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "4bit": "u4/64:bf16+bias:bf16",
        "8bit": "u8/64:bf16+bias:bf16",
        "6bit": "u6/64:bf16+bias:bf16",
        "3bit": "u3/64:bf16+bias:bf16",
        "2bit": "u2/64:bf16+bias:bf16",
        "mxfp4": "e2m1/32:ue8m0",
        "mxfp8": "e4m3/32:ue8m0",
        "nvfp4": "e2m1/16:ue4m3",
    }
)
_FLOATS: Mapping[str, str] = MappingProxyType(
    {"e2m1/32:ue8m0": "mxfp4", "e4m3/32:ue8m0": "mxfp8", "e2m1/16:ue4m3": "nvfp4"}
    | {"e2m1/16:ue4m3/tensor:absmax.f32": "nvfp4"}
)
_WRITABLE_GROUPS = (32, 64, 128)


def why_not_hold(info: TensorInfo) -> str | None:
    """Why MLX cannot hold a tensor exactly, or None."""
    scheme = info.scheme
    if scheme is None:
        return plain_why_not(info)
    if 0 in info.shape:
        return "it has no elements"
    if not info.name.endswith(".weight") or len(info.shape) < 2:
        return "it is not the weight of a module"
    if info.axes != tuple(range(len(info.shape))):
        return f"its axes are stored in the order {info.axes}"
    if info.shape[-1] * scheme.bits % 32:
        return f"rows of {info.shape[-1]} codes fill no whole words"
    if not has_whole_groups(info):
        return f"groups of {scheme.block} are cut at the ends of rows of {info.shape[-1]}"
    if str(scheme) in _FLOATS:
        return None
    is_affine = scheme.offset is not None and scheme.offset == ("bias", scheme.scale)
    if not scheme.is_plain or not is_affine or scheme.mode != "affine":
        return f"MLX has no {scheme}"
    if scheme.block is None or len(scheme.block) != 1 or scheme.block[0] not in _WRITABLE_GROUPS:
        return f"MLX has groups of {_WRITABLE_GROUPS}, not {scheme.block}"
    return None if scheme.store == "packed_u32" else f"its store is {scheme.store}"


def open_writer(
    path: Path,
    plan: Sequence[TensorInfo],
    metadata: Mapping[str, str] = MappingProxyType({}),
    whole: Sequence[TensorInfo] | None = None,
) -> PlannedWriter:
    """The writer of a file, of a model of the tensors ``whole``.

    Raises UnsupportedDtype, InvalidName.
    """
    whole = plan if whole is None else whole
    check_held(whole, why_not_hold, NAME)
    own = {base_of(info): _module(info) for info in whole if info.scheme is not None}
    usual = Counter(tuple(sorted(facts.items())) for facts in own.values()).most_common(1)
    general: dict[str, Any] = dict(usual[0][0]) if usual else {}
    overrides = {base: facts for base, facts in own.items() if facts != general}
    return open_stored_writer(
        path,
        plan,
        layout=_layout,
        encode=_encode,
        metadata={**metadata, "format": "mlx"},
        config=general | overrides,
    )


def _module(info: TensorInfo) -> dict[str, Any]:
    """What the config says of a module."""
    if info.scheme is None or info.scheme.block is None:
        return {}
    mode = _FLOATS.get(str(info.scheme), "affine")
    return {"group_size": info.scheme.block[0], "bits": info.scheme.bits, "mode": mode}


def _layout(info: TensorInfo) -> list[StoredArray]:
    scheme, base = info.scheme, base_of(info)
    if scheme is None:
        return []
    words = (*info.shape[:-1], info.shape[-1] * scheme.bits // 32)
    grid = scheme.scale_shape(info.shape)
    made = [StoredArray(info.name, "U32", words)]
    if scheme.offset is None:
        made.append(StoredArray(f"{base}.scales", "U8", grid))
        whole = StoredArray(f"{base}.global_scale", "F32", ())
        return [*made, whole] if scheme.tensor_scale is not None else made
    code = scale_code(scheme.scale)
    return [*made, *(StoredArray(f"{base}.{part}", code, grid) for part in ("scales", "biases"))]


def _encode(info: TensorInfo, q: QTensor) -> Iterator[Stored]:
    base = base_of(info)
    yield info.name, q.data
    yield f"{base}.scales", q.scales
    if q.offsets is not None:
        yield f"{base}.biases", q.offsets
    if q.tensor_scale is not None:
        yield f"{base}.global_scale", q.tensor_scale
