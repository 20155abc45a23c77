"""BitNet b1.58 as transformers stores it: ternary weights, four rows a byte.

Row ``r`` lies in byte row ``r mod (out / 4)``, bits ``2 * (r // (out / 4))``. ``weight_scale``
divides in modules of the class bitlinear and multiplies in those of autobitlinear. Weights are
padded to four rows; ``config={"shapes": {"module.weight": [out, in]}}`` tells how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from polyquant.arrays import HostArray
from polyquant.errors import CorruptData
from polyquant.files.assemble import assemble
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.facts import Facts
from polyquant.files.layers import Layer, Source, open_layers
from polyquant.files.probe import Probe
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme

NAME = "bitnet"
FACTS = Facts(
    tool="transformers BitNet",
    reads="bitlinear and autobitlinear",
    exact="bit-equal",
)
_ROLES: Mapping[str, str] = MappingProxyType(
    {"bitlinear": "divisor", "autobitlinear": "multiplier"}
)


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return probe.why_not_declared(NAME)


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index; the config gives linear_class. Raises InvalidHeader."""
    source = Source(probe, NAME)
    return open_layers(probe, source, _layers(source, source.shapes(probe)))


def _layers(source: Source, shapes: Mapping[str, object]) -> Iterator[Layer]:
    kind = str(source.config.get("linear_class", "bitlinear")).lower()
    if kind not in _ROLES:
        raise source.refuse("the config", f"the linear_class {kind}", _ROLES)
    for base in source.names(".weight_scale"):
        weight = f"{base}.weight"
        if weight not in source or source.raw(weight).dtype != "U8":
            continue
        quarter, columns = source.expect(weight, ("U8",), (None, None)).shape
        scale_name = f"{base}.weight_scale"
        shape = source.raw(scale_name).shape
        scale = source.scale(scale_name, shape)
        if math.prod(shape) != 1:
            raise source.fail(f"tensor {scale_name!r} is not one number")
        given = shapes.get(weight, [4 * quarter, columns])
        rows = given[0] if isinstance(given, list) and given else 0
        if given != [rows, columns] or type(rows) is not int or -(-rows // 4) != quarter:
            raise source.fail(f"the shape {given!r} given for {weight!r} has not its rows")
        scheme = QuantScheme("q2s", block=None, scale=scale, role=_ROLES[kind])
        read = partial(_read, source, base, scheme, (rows, columns))
        yield Layer(weight, (rows, columns), scheme, (weight, scale_name), read)


def _read(source: Source, base: str, scheme: QuantScheme, shape: tuple[int, int]) -> QTensor:
    packed = source.read(f"{base}.weight")
    parts = [packed >> shift & 3 for shift in range(0, 8, 2)]
    stored: HostArray = np.concatenate(parts, axis=0)[: shape[0]]
    if (stored == 3).any():
        raise CorruptData(what=f"Tensor '{base}.weight'", reason="a code is not ternary")
    codes = stored - 1 & 3  # -1, 0, 1 in two's complement
    return assemble(scheme, shape, {"codes": codes, "scales": source.read(f"{base}.weight_scale")})
