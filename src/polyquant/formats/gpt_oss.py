"""gpt-oss: stacks of experts in MXFP4, as Hugging Face and as OpenAI name them.

``NAME_blocks`` uint8 ``[experts, out, in / 32, 16]``, two codes a byte, the low nibble first, and
``NAME_scales`` uint8 ``[experts, out, in / 32]``. Tensors keep that orientation: ``[experts, out,
in]``. The rows of gate and up stand in turn.
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
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.qtensor import QTensor
from polyquant.scheme import scheme as as_scheme
from polyquant.values import QuantStore, QuantValue

NAME = "gpt-oss"
FACTS = Facts(
    tool="OpenAI, transformers",
    reads="stacks of experts in MXFP4",
    exact="bit-equal",
)
_SUFFIXES = (("_blocks", "_scales"), (".blocks", ".scales"))


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return probe.why_not_declared(NAME, "mxfp4")


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index. Raises InvalidHeader."""
    source = Source(probe, NAME)
    return open_layers(probe, source, _layers(source))


def _layers(source: Source) -> Iterator[Layer]:
    scheme = as_scheme("mxfp4")
    for blocks_suffix, scales_suffix in _SUFFIXES:
        for base in source.names(blocks_suffix):
            blocks, scales = f"{base}{blocks_suffix}", f"{base}{scales_suffix}"
            raw = source.raw(blocks)
            if raw.dtype != "U8" or len(raw.shape) < 3 or raw.shape[-1] != 16:
                raise source.fail(f"tensor {blocks!r} is no stack of blocks of 16 bytes")
            source.expect(scales, ("U8",), raw.shape[:-1])
            shape = (*raw.shape[:-2], raw.shape[-2] * 32)
            read = partial(_read, source, blocks, scales, shape)
            yield Layer(base, shape, scheme, (blocks, scales), read)


def _read(source: Source, blocks: str, scales: str, shape: tuple[int, ...]) -> QTensor:
    lines = source.read(blocks).reshape(math.prod(shape[:-1]), -1)
    codes = unpack(np, lines, shape[-1], QuantValue.E2M1, QuantStore.PACKED_NATIVE)
    return assemble(as_scheme("mxfp4"), shape, {"codes": codes, "scales": source.read(scales)})
