"""Quantized tensors from the numbers that other tools store, and those numbers back.

Other formats agree with ours in the codes and scales but pack them otherwise. A format's module
unpacks its bytes to one array a part, by the dotted names of ``QTensor.parts`` with ``codes`` (one
unsigned field a byte) in place of ``data``; this module packs them into a tensor. Arrays have the
shape of the part, or any shape of as many elements in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from polyquant.arrays import HostArray
from polyquant.codec import pack, unpack
from polyquant.data import Part, host_dtype, parts, stored_shape
from polyquant.errors import CorruptData, InvalidTensor
from polyquant.qtensor import QTensor, from_parts
from polyquant.scheme import QuantScheme
from polyquant.tables import named_table
from polyquant.values import ScaleDtype


def assemble(
    scheme: QuantScheme,
    shape: Sequence[int],
    numbers: Mapping[str, HostArray],
    *,
    axes: Sequence[int] | None = None,
) -> QTensor:
    """A tensor (on NumPy) of ``shape`` from its numbers, in stored order.

    A named table may be left out. Raises what QTensor raises for parts that do not fit.
    """
    order = tuple(range(len(shape))) if axes is None else tuple(axes)
    made: dict[str, HostArray] = {}
    for part in parts(scheme, stored_shape(shape, order)):
        prefix, _, kind = part.name.rpartition(".")
        dotted = f"{prefix}." if prefix else ""
        if kind == "data":
            fields = numbers[f"{dotted}codes"]
            lines = math.prod(part.shape[:-1])
            length = fields.size // lines if lines else 0
            _check_size(scheme, shape, part.name, fields, lines * length)
            if not lines:  # whose length no field tells
                made[part.name] = np.zeros(part.shape, np.uint8)
                continue
            fields = fields.reshape(*part.shape[:-1], length)
            made[part.name] = pack(np, fields, part.scheme.value, part.scheme.store)
        elif kind == "table" and part.name not in numbers:
            made[part.name] = named_table(str(part.scheme.table))
        else:
            array = numbers[part.name]
            _check_size(scheme, shape, part.name, array, math.prod(part.shape))
            stored = np.ascontiguousarray(array, host_dtype(part.dtype))
            made[part.name] = stored.reshape(part.shape)  # which a 0-d array has lost
            check_scales(made[part.name], part)
    return from_parts(made, scheme, shape, axes=order, device="numpy")


def check_scales(scales: HostArray, part: Part) -> None:
    """Refuse 8-bit scales that are not a number: no two tools agree on what those mean."""
    if not part.name.endswith("scales") or part.dtype != "uint8":
        return
    limit = 0xFE if part.scheme.scale is ScaleDtype.UE8M0 else 0x7E
    if (scales > limit).any():
        reason = f"{int((scales > limit).sum())} of its {part.scheme.scale} scales are no numbers"
        raise CorruptData(what=part.name, reason=reason)


def _check_size(
    scheme: QuantScheme, shape: Sequence[int], name: str, array: HostArray, wanted: int
) -> None:
    if array.size != wanted:
        facts = {"part": name, "scheme": str(scheme), "shape": tuple(shape)}
        raise InvalidTensor(**facts, wanted=f"{wanted} numbers", got=array.size)


def numbers_of(q: QTensor) -> dict[str, HostArray]:
    """The inverse: the numbers of a tensor on NumPy, in stored order."""
    return dict(_walk(q, ""))


def _walk(q: QTensor, prefix: str) -> Iterator[tuple[str, HostArray]]:
    stored = q.stored_shape
    length = (q.scheme.laid(stored) or (1,))[-1]
    fields = unpack(np, q.data, length, q.scheme.value, q.scheme.store)
    yield f"{prefix}codes", fields.reshape(stored)
    for name in ("scales", "tensor_scale", "offsets", "table", "groups"):
        part = getattr(q, name)
        if isinstance(part, QTensor):
            yield from _walk(part, f"{prefix}{name}.")
        elif part is not None:
            yield f"{prefix}{name}", part
