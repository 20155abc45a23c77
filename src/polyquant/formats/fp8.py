"""DeepSeek's FP8: squares of e4m3 under float scales, and its experts in MXFP4.

The same method of vLLM and of fbgemm has one ``weight_scale``, for the tensor or for each row.

``weight_scale_inv`` multiplies, whatever its name says. Blocks at the edges are partial: their size
is ``weight_block_size`` of the config, never the weight's shape over the grid's.
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
        "e4m3 in squares, ragged too, by row or tensor, under float or E8M0 scales; MXFP4 experts"
    ),
    exact="bit-equal",
)
_METHODS = (NAME, "fbgemm_fp8")


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return probe.why_not_declared(NAME, *_METHODS)


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index; the config gives weight_block_size. Raises InvalidHeader."""
    source = Source(probe, NAME)
    return open_layers(probe, source, _layers(source))


def _layers(source: Source) -> Iterator[Layer]:
    for name in source.names(".weight"):
        weight = f"{name}.weight"
        found = [f"{weight}_scale_inv", f"{weight}_scale", f"{name}.scale", f"{name}.qscale_weight"]
        scales = [scale for scale in found if scale in source]
        dtype = source.raw(weight).dtype
        if dtype == "F8_E4M3" and not scales:
            raise source.fail(f"tensor {weight!r} has no scales; known names: {', '.join(found)}")
        if len(scales) == 1 and dtype in ("F8_E4M3", "I8", "U8"):
            yield _layer(source, weight, scales[0])


def _layer(source: Source, weight: str, scale_name: str) -> Layer:
    raw = source.expect(weight, ("F8_E4M3", "I8", "U8"), (None, None))
    rows, columns = raw.shape
    scales = source.raw(scale_name)
    scale = dict(FLOAT_SCALES).get(scales.dtype, "ue8m0")
    if raw.dtype == "F8_E4M3" and scale_name.endswith(".weight_scale"):
        grid = scales.shape
        if grid not in ((), (1,), (rows,), (rows, 1), (1, 1)):
            raise source.fail(f"tensor {scale_name!r} of {grid} is no scale of {rows} rows")
        block = None if math.prod(grid) == 1 else -1
        scheme = QuantScheme("e4m3", block=block, scale=scale)
    elif raw.dtype == "F8_E4M3":
        high, wide = _block_size(source)
        grid = (-(-rows // high), -(-columns // wide))
        scheme = QuantScheme("e4m3", block=(high, wide), scale=scale)
    else:  # two e2m1 codes a byte
        columns *= 2
        grid = (rows, -(-columns // 32))
        scheme = QuantScheme("e2m1", block=32, scale=scale)
    source.expect(scale_name, ("F32", "BF16", "F16", "F8_E8M0", "U8"), grid)
    read = partial(_read, source, weight, scale_name, scheme, (rows, columns))
    return Layer(weight, (rows, columns), scheme, (weight, scale_name), read)


def _block_size(source: Source) -> tuple[int, int]:
    found = source.config.get("weight_block_size")
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int for n in found):
        raise source.fail(f"weight_block_size of its config is {found!r}, no pair of extents")
    if min(found) < 1:
        raise source.fail(f"weight_block_size of its config is {found!r}")
    return found[0], found[1]


def _read(
    source: Source, weight: str, scale_name: str, scheme: QuantScheme, shape: tuple[int, int]
) -> QTensor:
    data, scales = source.read(weight).view(np.uint8), source.read(scale_name)
    if scheme.bits == 4:
        data = unpack(np, data, shape[1], scheme.value, QuantStore.PACKED_NATIVE)
    if scheme.scale == "ue8m0":
        scales = scales.view(np.uint8)
    return assemble(scheme, shape, {"codes": data, "scales": scales})
