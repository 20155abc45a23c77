"""The gradient of dequantizing: from that of the values to those of scales, offsets and table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from polyquant import standard
from polyquant.arrays import namespace
from polyquant.blocks import Blocks, Rows, blocks_of, split, spread
from polyquant.codec import unpack
from polyquant.qtensor import QTensor
from polyquant.scheme import OffsetKind
from polyquant.standard import Divisor, Params


def part_gradients(q: QTensor, grad: Tensor, wanted: Sequence[int]) -> list[Tensor]:
    """Gradients of the stored arrays ``wanted`` (by their place in the bytes), in their dtypes.

    ``grad`` is that of the values ``v = (code - zero) * D + bias``, with ``D`` the scale, or the
    block's times the tensor's. Sums over every block, and over all values of a code::

        dD = sum(grad * (code - zero))     dzero = -sum(grad * D)
        dbias = sum(grad)                  dtable[code] = sum(grad * D)

    That the definition makes subnormal numbers zero counts for nothing here: a scale, a bias or an
    entry that is 0 has a gradient like any other.
    """
    parts = q.parts()
    names = list(parts)
    found = dict(_gradients(q, grad, frozenset(names[i] for i in wanted), ""))
    return [found[names[i]].to(parts[names[i]].dtype) for i in wanted]


def _gradients(
    q: QTensor, grad: Tensor, wanted: frozenset[str], prefix: str
) -> Iterator[tuple[str, Tensor]]:
    """Name and gradient of every array of ``q`` that is wanted."""
    here = _decoded(q)
    g = split(here.xp, grad.permute(_inverse(q.axes)).reshape(here.blocks.shape), here.blocks)

    def is_wanted(name: str) -> bool:
        return any(each.startswith(prefix + name) for each in wanted)

    def of_grid(name: str, part: Any, found: Tensor) -> Iterator[tuple[str, Tensor]]:
        if isinstance(part, QTensor):
            yield from _gradients(part, found, wanted, f"{prefix}{name}.")
        else:
            yield prefix + name, found

    if is_wanted("scales") or is_wanted("tensor_scale"):
        of_divisor = _block_sums(g * here.numbers, q)
        if q.tensor_scale is None:
            yield from of_grid("scales", q.scales, of_divisor)
        else:
            levels = standard.divisor(q.scheme, Params(q.scales, None, None, None)).value
            yield from of_grid("scales", q.scales, of_divisor * q.tensor_scale)
            yield f"{prefix}tensor_scale", (of_divisor * levels).sum()
    if q.scheme.offset is not None and is_wanted("offsets"):
        is_bias = q.scheme.offset.kind is OffsetKind.BIAS
        yield from of_grid(
            "offsets", q.offsets, _block_sums(g if is_bias else -g * here.divisor, q)
        )
    if q.table is not None and is_wanted("table"):
        of_codes = (g * here.divisor).reshape(-1)
        entries = of_codes.new_zeros(q.table.shape)
        yield f"{prefix}table", entries.index_add(0, here.codes.reshape(-1).int(), of_codes)


class _Decoded(NamedTuple):
    """A tensor side by side with its blocks: codes, ``code - zero``, and the divisor."""

    xp: Any
    blocks: Blocks
    codes: Tensor
    numbers: Tensor
    divisor: Tensor


def _decoded(q: QTensor) -> _Decoded:
    xp, blocks = namespace(q.data), blocks_of(q.scheme, q.stored_shape)
    everything = Rows(slice(None), slice(None), blocks)
    data = q.data.reshape(*blocks.shape[:-1], q.data.shape[-1])
    codes = unpack(xp, data, blocks.shape[-1], q.scheme.value, q.scheme.store)
    codes = split(xp, codes, blocks)
    scale = standard.divisor(q.scheme, Params(q.scales, q.tensor_scale, q.offsets, q.table))
    whole = scale.value if scale.half is None else scale.value * scale.half
    offsets = None if q.offsets is None else standard.offset_numbers(q.offsets)
    if q.scheme.offset is not None and q.scheme.offset.kind is OffsetKind.BIAS:
        offsets = None if offsets is None else offsets * 0.0
    one = Divisor(whole * 0.0 + 1.0, None)
    numbers = standard.decode(codes, q.scheme, one, offsets, q.table, everything)
    return _Decoded(xp, blocks, codes, numbers, spread(xp, whole, blocks))


def _block_sums(values: Tensor, q: QTensor) -> Tensor:
    """Sums of split values over their blocks, on the scale grid."""
    sums = values.sum(tuple(range(1, values.ndim, 2)))
    return sums.reshape(q.scheme.scale_shape(q.stored_shape))


def _inverse(axes: Sequence[int]) -> list[int]:
    order = [0] * len(axes)
    for logical, axis in enumerate(axes):
        order[axis] = logical
    return order
