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
from polyquant.data import host_dtype, parts, stored_shape
from polyquant.qtensor import QTensor, from_parts
from polyquant.scheme import QuantScheme
from polyquant.tables import named_table


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
    made = {}
    for part in parts(scheme, stored_shape(shape, order)):
        prefix, _, kind = part.name.rpartition(".")
        dotted = f"{prefix}." if prefix else ""
        if kind == "data":
            fields = numbers[f"{dotted}codes"]
            lines = math.prod(part.shape[:-1])
            length = fields.size // lines if lines else 0
            fields = fields.reshape(*part.shape[:-1], length)
            made[part.name] = pack(np, fields, part.scheme.value, part.scheme.store)
        elif kind == "table" and part.name not in numbers:
            made[part.name] = named_table(str(part.scheme.table))
        else:
            array = numbers[part.name].reshape(part.shape)
            made[part.name] = np.ascontiguousarray(array, host_dtype(part.dtype))
    return from_parts(made, scheme, shape, axes=order, device="numpy")


def numbers_of(q: QTensor) -> dict[str, HostArray]:
    """The inverse: the numbers of a tensor on NumPy, in stored order."""
    return dict(_walk(q, ""))


def _walk(q: QTensor, prefix: str) -> Iterator[tuple[str, HostArray]]:
    stored = q.stored_shape
    length = stored[-1] if stored else 1
    fields = unpack(np, q.data, length, q.scheme.value, q.scheme.store)
    yield f"{prefix}codes", fields.reshape(stored)
    for name in ("scales", "tensor_scale", "offsets", "table"):
        part = getattr(q, name)
        if isinstance(part, QTensor):
            yield from _walk(part, f"{prefix}{name}.")
        elif part is not None:
            yield f"{prefix}{name}", part
