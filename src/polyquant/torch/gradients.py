"""Gradients of scales, offsets, table and input: of dequantizing, and straight through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from polyquant import standard
from polyquant.arrays import namespace
from polyquant.blocks import Blocks, Rows, blocks_of, merge, split, spread
from polyquant.codec import unpack
from polyquant.qtensor import QTensor
from polyquant.standard import Divisor, Params
from polyquant.values import OffsetKind


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
            slope = standard.multiplier_slope(q.scales, q.scheme)
            yield from of_grid("scales", q.scales, of_divisor * slope)
        else:
            plain = q.scheme.with_role("multiplier")
            levels = standard.divisor(plain, Params(q.scales, None, None, None)).value
            factor = standard.multiplier(q.tensor_scale, q.scheme)
            yield from of_grid("scales", q.scales, of_divisor * factor)
            slope = standard.multiplier_slope(q.tensor_scale, q.scheme)
            yield f"{prefix}tensor_scale", (of_divisor * levels * slope).sum()
    if q.scheme.offset is not None and is_wanted("offsets"):
        is_bias = q.scheme.offset.kind is OffsetKind.BIAS
        yield from of_grid(
            "offsets", q.offsets, _block_sums(g if is_bias else -g * here.divisor, q)
        )
    if q.table is not None and is_wanted("table"):
        yield f"{prefix}table", _of_table(here, g, q)


class StraightThrough(NamedTuple):
    """What ``straight_through`` gives: gradients of the input, and on the grid or of the table."""

    x: Tensor
    scales: Tensor
    offsets: Tensor
    table: Tensor


def straight_through(q: QTensor, x: Tensor, grad: Tensor) -> StraightThrough:
    """Gradients of ``dequantize(quantize(x))``, whose rounding counts for nothing.

    For ``x`` it is 1 inside of the range of its block, ends included (to four units in the last
    place of float32, by which a calibrated scale may fall short of the block's maximum), and 0
    outside. With ``v = n * D + bias`` and ``n = code - zero``, sums over every block::

        dD = sum(grad * (n - (x - bias) / D)) inside + sum(grad * n) outside
        dbias = sum(grad) outside              dzero = -sum(grad * D) outside

    The first is that of learned step sizes (LSQ, arXiv:1902.08153), the second of LSQ+
    (arXiv:2004.09576). ``dtable`` is that of dequantizing.
    """
    here = _decoded(q)
    shape = here.blocks.shape
    g = split(here.xp, grad.reshape(shape), here.blocks)
    values = split(
        here.xp, standard.flush(x.detach().to(here.numbers.dtype)).reshape(shape), here.blocks
    )
    bias = here.bias if here.bias is not None else 0.0
    ends = [number * here.divisor + bias for number in here.ends]
    low, high = here.xp.minimum(*ends), here.xp.maximum(*ends)
    slack = _SLACK * here.xp.maximum(low.abs(), high.abs())
    inside = (values >= low - slack) & (values <= high + slack)
    is_zero = here.divisor == 0
    exact = here.xp.where(is_zero, 0.0, (values - bias) / here.xp.where(is_zero, 1.0, here.divisor))
    steps = here.numbers - inside * exact
    outside = g * ~inside
    is_bias = here.bias is not None
    of_x = merge(here.xp, g * inside, here.blocks).reshape(x.shape)
    return StraightThrough(
        of_x.to(x.dtype).contiguous(),
        _block_sums(g * steps, q),
        _block_sums(outside if is_bias else -outside * here.divisor, q),
        _of_table(here, g, q),
    )


#: Four units in the last place of float32.
_SLACK = 2.0**-21


def _of_table(here: _Decoded, g: Tensor, q: QTensor) -> Tensor:
    """Sums of ``grad * D`` over all values of a code."""
    of_codes = (g * here.divisor).reshape(-1)
    entries = of_codes.new_zeros(2**q.scheme.bits)
    return entries.index_add(0, here.codes.reshape(-1).int(), of_codes)


class _Decoded(NamedTuple):
    """A tensor side by side with its blocks: codes, ``code - zero``, its ends, divisor and bias."""

    xp: Any
    blocks: Blocks
    codes: Tensor
    numbers: Tensor
    ends: tuple[Tensor, Tensor]
    divisor: Tensor
    bias: Tensor | None


def _decoded(q: QTensor) -> _Decoded:
    xp, blocks = namespace(q.data), blocks_of(q.scheme, q.stored_shape)
    data = q.data.reshape(*blocks.shape[:-1], q.data.shape[-1])
    codes = unpack(xp, data, blocks.shape[-1], q.scheme.value, q.scheme.store)
    codes = split(xp, codes, blocks)
    whole = _of_elements(standard.divisor(q.scheme, standard.params_in(q)).whole, q)
    offsets = None
    if q.offsets is not None:
        offsets = _of_elements(standard.offset_numbers(q.offsets), q)
    is_bias = q.scheme.offset is not None and q.scheme.offset.kind is OffsetKind.BIAS
    # Decoded without a scale and without a bias, which are taken from the tensor one by one.
    plain = q.scheme.with_offset(None) if is_bias else q.scheme
    one = Divisor(xp.ones_like(whole), None)
    everything = Rows(slice(None), slice(None), blocks)
    numbers = standard.decode(codes, plain, one, None if is_bias else offsets, q.table, everything)
    spread_offsets = None if offsets is None else spread(xp, offsets, blocks)
    ends = _ends(q, None if is_bias else spread_offsets)
    divisor = spread(xp, whole, blocks)
    return _Decoded(xp, blocks, codes, numbers, ends, divisor, spread_offsets if is_bias else None)


def _ends(q: QTensor, zero: Tensor | None) -> tuple[Any, Any]:
    """The lowest and the highest ``code - zero``."""
    low, high = q.scheme.value.range
    if q.table is not None:
        low, high = q.table.min(), q.table.max()
    return (low, high) if zero is None else (low - zero, high - zero)


def _of_elements(grid: Tensor, q: QTensor) -> Tensor:
    """Numbers on the grid; of a grouped tensor, for every element of the last axis."""
    return grid if q.groups is None else grid.index_select(-1, q.groups)


def _block_sums(values: Tensor, q: QTensor) -> Tensor:
    """Sums of split values over their blocks, on the scale grid."""
    sums = values.sum(tuple(range(1, values.ndim, 2)))
    grid = q.scheme.scale_shape(q.stored_shape)
    if q.groups is None:
        return sums.reshape(grid)
    return sums.new_zeros(grid).index_add(-1, q.groups, sums.reshape(*grid[:-1], -1))


def _inverse(axes: Sequence[int]) -> list[int]:
    order = [0] * len(axes)
    for logical, axis in enumerate(axes):
        order[axis] = logical
    return order
