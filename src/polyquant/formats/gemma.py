"""Gemma's quantized checkpoints as transformers reads them: 2, 4 or 8 bits.

``weight`` with one ``weight_scale`` a row, and ``embedding_quantized`` with some scales a row in
``embedding_scale``. Codes of 2 and 4 bits are packed with the lowest bits first, offset-binary;
those of 8 bits are int8. Bits of single modules stand in ``module_quant_configs``, by patterns.
Rows that fill no whole byte are told by ``config={"shapes": {"module.weight": [out, in]}}``.
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
    reads="linear layers and embeddings of 2, 4 and 8 bits",
    exact="bit-equal",
)
#: (codes, scales) of linear layers and of embeddings.
_PAIRS = ((".weight", ".weight_scale"), (".embedding_quantized", ".embedding_scale"))
_DEFAULT_BITS = 4


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return probe.why_not_declared(NAME)


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index; the config gives num_bits. Raises InvalidHeader."""
    source = Source(probe, NAME)
    return open_layers(probe, source, _layers(source, source.shapes(probe)))


def _layers(source: Source, shapes: Mapping[str, Any]) -> Iterator[Layer]:
    for codes, scales in _PAIRS:
        for base in source.names(scales):
            is_there = f"{base}{codes}" in source
            if is_there and source.raw(f"{base}{codes}").dtype in ("U8", "I8"):
                yield _layer(source, base, f"{base}{codes}", f"{base}{scales}", shapes)


def _layer(source: Source, base: str, codes: str, scales: str, shapes: Mapping[str, Any]) -> Layer:
    bits, name = _bits(source, base), f"{base}.weight"
    rows, size = source.expect(codes, ("I8",) if bits == 8 else ("U8",), (None, None)).shape
    given = shapes.get(name, [rows, size * 8 // bits])
    if not isinstance(given, list) or len(given) != 2 or given[0] != rows:
        raise source.fail(f"the shape {given!r} given for {name!r} has not its {rows} rows")
    columns = given[1]
    if type(columns) is not int or -(-columns * bits // 8) != size:
        raise source.fail(f"{columns!r} columns do not take the {size} bytes of {codes!r}")
    scale = source.scale(scales, (rows, None))
    per_row = source.raw(scales).shape[1]
    if not per_row or columns % per_row:
        raise source.fail(f"{per_row} scales of {scales!r} do not divide {columns} columns")
    scheme = QuantScheme(f"q{bits}f", block=-1 if per_row == 1 else columns // per_row, scale=scale)
    read = partial(_read, source, codes, scales, scheme, (rows, columns))
    return Layer(name, (rows, columns), scheme, (codes, scales), read)


def _bits(source: Source, base: str) -> int:
    """The bits of a module: of the first pattern found in its name, else those of all."""
    facts: Mapping[str, Any] = {"num_bits": _DEFAULT_BITS, **source.config}
    modules = source.config.get("module_quant_configs") or {}
    if not isinstance(modules, Mapping):
        raise source.fail("module_quant_configs of its config is no object")
    places = {pattern: source.found(pattern, base) for pattern in modules}
    found = [(place, modules[pattern]) for pattern, place in places.items() if place is not None]
    if found:
        own = min(found, key=lambda pair: pair[0])[1]
        facts = {**facts, **own} if isinstance(own, Mapping) else facts
    bits = source.number("num_bits", facts)
    if bits not in (2, 4, 8):
        raise source.refuse(base, f"{bits} bits", (2, 4, 8))
    return bits


def _read(
    source: Source, codes: str, scales: str, scheme: QuantScheme, shape: tuple[int, int]
) -> QTensor:
    stored = source.read(codes).view(np.uint8)
    if scheme.bits < 8:
        stored = unpack(np, stored, shape[1], scheme.value, QuantStore.PACKED_NATIVE)
        stored = stored ^ (1 << (scheme.bits - 1))
    return assemble(scheme, shape, {"codes": stored, "scales": source.read(scales)})
