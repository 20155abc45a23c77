"""Gemma's quantized checkpoints as transformers reads them: 2, 4 or 8 bits, one scale a row.

``weight`` uint8 ``[out, in * bits / 8]``, the lowest bits first, offset-binary. Bits of single
modules stand in ``module_quant_configs``. Rows that fill no whole byte are told by
``config={"shapes": {"module.weight": [out, in]}}``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from polyquant.codec import unpack
from polyquant.files.assemble import assemble
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.facts import Facts
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import QuantStore

NAME = "gemma"
FACTS = Facts(
    tool="transformers Gemma",
    reads="2, 4 and 8 bits by row",
    exact="bit-equal",
)


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    if probe.container is None:
        return "it is not a safetensors file"
    if NAME in (probe.method, probe.format):
        return None
    return f"its config has the quant_method {probe.method!r}"


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index; the config gives num_bits. Raises InvalidHeader."""
    source = Source(probe, NAME)
    shapes = probe.config.get("shapes", source.config.get("shapes", {}))
    if not isinstance(shapes, Mapping):
        raise source.fail("the shapes of its config are no object")
    return open_layers(probe, source, _layers(source, shapes))


def _layers(source: Source, shapes: Mapping[str, Any]) -> Iterator[Layer]:
    for base in source.names(".weight_scale"):
        weight = f"{base}.weight"
        if weight not in source or source.raw(weight).dtype != "U8":
            continue
        bits = _bits(source, base)
        rows, size = source.expect(weight, ("U8",), (None, None)).shape
        scale = source.scale(f"{base}.weight_scale", (rows, 1))
        columns = size * 8 // bits
        given = shapes.get(weight, [rows, columns])
        if not isinstance(given, list) or len(given) != 2 or given[0] != rows:
            raise source.fail(f"the shape {given!r} given for {weight!r} has not its {rows} rows")
        if type(given[1]) is not int or -(-given[1] * bits // 8) != size:
            raise source.fail(
                f"rows of {weight!r} have {size} bytes, which {given[1]!r} do not take"
            )
        shape = (rows, given[1])
        scheme = QuantScheme(f"q{bits}f", block=-1, scale=scale)
        read = partial(_read, source, base, scheme, shape)
        yield Layer(weight, shape, scheme, (weight, f"{base}.weight_scale"), read)


def _bits(source: Source, base: str) -> int:
    modules = source.config.get("module_quant_configs")
    own = modules.get(base) if isinstance(modules, Mapping) else None
    bits = source.number("num_bits", own if isinstance(own, Mapping) else None)
    if bits not in (2, 4, 8):
        raise source.refuse(base, f"{bits} bits", (2, 4, 8))
    return bits


def _read(source: Source, base: str, scheme: QuantScheme, shape: tuple[int, int]) -> QTensor:
    data = source.read(f"{base}.weight")
    stored = unpack(np, data, shape[1], scheme.value, QuantStore.PACKED_NATIVE)
    codes = stored ^ (1 << (scheme.bits - 1))
    return assemble(scheme, shape, {"codes": codes, "scales": source.read(f"{base}.weight_scale")})
