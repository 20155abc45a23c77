"""DeepSeek's FP8: squares of e4m3 under float scales, and its experts in MXFP4.

The same method of vLLM and of fbgemm has one ``weight_scale``, for the tensor or for each row.

``weight_scale_inv`` multiplies, whatever its name says. Blocks at the edges are partial: their size
is ``weight_block_size`` of the config, never the weight's shape over the grid's. Stacks of experts
are ``NAME`` and ``NAME_scale_inv`` of three axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from polyquant.codec import unpack
from polyquant.files.assemble import assemble
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.facts import Facts
from polyquant.files.layers import FLOAT_SCALES, Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import QuantStore

NAME = "fp8"
FACTS = Facts(
    tool="DeepSeek, transformers",
    reads=(
        "e4m3 in squares, ragged too, by row or tensor, under float or E8M0 scales; MXFP4 experts; "
        "stacks of experts"
    ),
    exact="bit-equal",
)
_CODES = ("F8_E4M3", "I8", "U8")
_METHODS = (NAME, "fbgemm_fp8")


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return probe.why_not_declared(NAME, *_METHODS)


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index; the config gives weight_block_size. Raises InvalidHeader."""
    source = Source(probe, NAME)
    return open_layers(probe, source, _layers(source))


def _layers(source: Source) -> Iterator[Layer]:
    for weight in source.arrays():
        dtype = source.raw(weight).dtype
        if dtype not in _CODES:
            continue
        module, found = weight.removesuffix(".weight"), [f"{weight}_scale_inv"]
        if module != weight:
            found += [f"{weight}_scale", f"{module}.scale", f"{module}.qscale_weight"]
        scales = [scale for scale in found if scale in source]
        if dtype == "F8_E4M3" and not scales:
            raise source.fail(f"tensor {weight!r} has no scales; known names: {', '.join(found)}")
        if len(scales) == 1:
            yield _layer(source, weight, scales[0])


def _layer(source: Source, weight: str, scale_name: str) -> Layer:
    raw = source.raw(weight)
    if len(raw.shape) not in (2, 3):
        raise source.refuse(weight, f"a weight of {len(raw.shape)} axes", ("2", "3, of experts"))
    *experts, rows, columns = raw.shape
    is_plain = scale_name.endswith(".weight_scale")
    scales = source.raw(scale_name)
    scale = scales.dtype.lower() if scales.dtype in FLOAT_SCALES else "ue8m0"
    if raw.dtype != "F8_E4M3":  # two e2m1 codes a byte
        columns *= 2
        scheme = QuantScheme("e2m1", block=32, scale=scale)
    elif scales.shape in ((), (1,)) or (is_plain and math.prod(scales.shape) == 1):
        scheme = QuantScheme("e4m3", block=None, scale=scale)
    elif is_plain:
        scheme = QuantScheme("e4m3", block=-1, scale=scale)
    else:
        scheme = QuantScheme("e4m3", block=_block_size(source), scale=scale)
    shape = (*experts, rows, columns)
    is_line = scheme.block == (-1,) and scales.shape == (rows,)
    grid = scales.shape if scheme.block is None or is_line else scheme.scale_shape(shape)
    source.expect(scale_name, (*FLOAT_SCALES, "F8_E8M0", "U8"), grid)
    read = partial(_read, source, weight, scale_name, scheme, shape)
    return Layer(weight, shape, scheme, (weight, scale_name), read)


def _block_size(source: Source) -> tuple[int, int]:
    found = source.config.get("weight_block_size")
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int for n in found):
        raise source.fail(f"weight_block_size of its config is {found!r}, no pair of extents")
    if min(found) < 1:
        raise source.fail(f"weight_block_size of its config is {found!r}")
    return found[0], found[1]


def _read(
    source: Source, weight: str, scale_name: str, scheme: QuantScheme, shape: tuple[int, ...]
) -> QTensor:
    data, scales = source.read(weight).view(np.uint8), source.read(scale_name)
    if scheme.bits == 4:
        data = unpack(np, data, shape[-1], scheme.value, QuantStore.PACKED_NATIVE)
    if scheme.scale == "ue8m0":
        scales = scales.view(np.uint8)
    return assemble(scheme, shape, {"codes": data, "scales": scales})
