"""How much a quantized tensor differs from its source."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from polyquant.arrays import Array, HostArray, backend_of
from polyquant.blocks import Blocks, Rows, blocks_of, split
from polyquant.dispatch import check_one_device, check_real
from polyquant.errors import AlreadyQuantized, InvalidArgument, ShapeMismatch
from polyquant.qtensor import QTensor
from polyquant.standard import decoded_runs, divisor, offset_numbers, params_in
from polyquant.values import QuantMode


@dataclass(frozen=True)
class Quality:
    """The difference between a source ``x`` and its quantized form ``y`` (sums in float64).

    relative_error: ``|x - y| / |x|``, Frobenius norms; 0 where both are zero.
    sqnr_db: ``20 log10(1 / relative_error)``; infinite where ``x == y``.
    max_error: the largest ``|x - y|``.
    clip_rate: the share of elements beyond what their block can hold.
    dead_blocks: blocks with a nonzero source and nothing but zeros after quantizing.
    bits_per_element: stored bits, scales and all, per element.
    """

    relative_error: float
    sqnr_db: float
    max_error: float
    clip_rate: float
    dead_blocks: int
    bits_per_element: float

    def to_json(self) -> dict[str, Any]:
        """Plain numbers by name."""
        return asdict(self)


def measure(x: Array, q: QTensor) -> Quality:
    """Compare a float array with its quantized form, some rows at a time on the host.

    ``x`` has the shape of ``q`` and lies on its device; where it is not finite, errors are NaN or
    infinite. Raises InvalidArgument (``q`` is no QTensor), AlreadyQuantized (``x`` is one),
    NotFloat, ShapeMismatch, BackendMismatch, DeviceMismatch, NotAnArray, UnsupportedArray.
    """
    if not isinstance(q, QTensor):
        raise InvalidArgument(name="q", wanted="a QTensor", got=q)
    if isinstance(x, QTensor):
        raise AlreadyQuantized(role="x", scheme=str(x.scheme))
    check_one_device("measure", [("x", x), ("q", q)])
    check_real("x", x, integers=False)
    if tuple(x.shape) != q.shape:
        reason = "a source has the shape of its quantized form"
        raise ShapeMismatch(op="measure", left=tuple(x.shape), right=q.shape, reason=reason)
    host_q = q.to("numpy")
    source = np.transpose(backend_of(x).to_host(x), np.argsort(q.axes))
    blocks = blocks_of(q.scheme, q.stored_shape)
    source = source.reshape(blocks.shape)
    low, high = _reach(host_q, blocks)
    totals = _Totals(blocks)
    with np.errstate(all="ignore"):
        for run, values in decoded_runs(host_q):
            totals.add(source[run.rows], values, low, high, run)
    return totals.quality(q)


def relative(squared_error: float, squared: float) -> float:
    """The relative error of two sums of squares: 0 where there is no error at all."""
    if squared_error == 0:
        return 0.0
    return math.sqrt(squared_error / squared) if squared else math.inf


def sqnr_db(relative_error: float) -> float:
    """``20 log10(1 / relative_error)``: infinite where nothing was lost."""
    return -20 * math.log10(relative_error) if relative_error else math.inf


class _Totals:
    """What is summed over the runs of a tensor."""

    def __init__(self, blocks: Blocks) -> None:
        self.squared_error = self.squared = self.max_error = 0.0
        self.clipped = 0
        self.has_source = np.zeros(blocks.counts, dtype=bool)
        self.has_values = np.zeros(blocks.counts, dtype=bool)

    def add(self, x: HostArray, y: HostArray, low: HostArray, high: HostArray, run: Rows) -> None:
        wide = x.astype(np.float64)
        error = np.abs(wide - y)
        self.squared_error += float(np.square(error).sum())
        self.squared += float(np.square(wide).sum())
        self.max_error = float(np.maximum(self.max_error, error.max(initial=0.0)))  # NaN stays
        blocked = split(np, wide, run.blocks, np.nan)
        ends = tuple(n for count in run.blocks.counts for n in (count, 1))
        bottom, top = (edge[run.grid_rows].reshape(ends) for edge in (low, high))
        slack = 1e-6 * np.maximum(np.abs(bottom), np.abs(top))  # the scale's own rounding
        self.clipped += int(((blocked < bottom - slack) | (blocked > top + slack)).sum())
        inner = tuple(range(1, blocked.ndim, 2))
        self.has_source[run.grid_rows] |= (np.nan_to_num(blocked) != 0).any(axis=inner)
        values = split(np, y, run.blocks)
        self.has_values[run.grid_rows] |= (values != 0).any(axis=inner)

    def quality(self, q: QTensor) -> Quality:
        error = relative(self.squared_error, self.squared)
        return Quality(
            relative_error=error,
            sqnr_db=sqnr_db(error),
            max_error=self.max_error,
            clip_rate=self.clipped / q.size if q.size else 0.0,
            dead_blocks=int((self.has_source & ~self.has_values).sum()),
            bits_per_element=q.bits_per_element,
        )


def _reach(q: QTensor, blocks: Blocks) -> tuple[HostArray, HostArray]:
    """The lowest and highest number that each block can hold, on the grid."""
    scale = divisor(q.scheme, params_in(q))
    value = scale.whole
    low, high = q.scheme.value.range
    if q.scheme.mode is QuantMode.LOOKUP:
        low, high = float(q.table.min()), float(q.table.max())  # type: ignore[union-attr]
    offset: Any = 0.0 if q.offsets is None else offset_numbers(q.offsets)
    is_bias = q.scheme.offset is not None and q.scheme.offset.kind == "bias"
    ends = [low * value + offset, high * value + offset]
    if not is_bias:
        ends = [(low - offset) * value, (high - offset) * value]
    bottom, top = np.minimum(*ends), np.maximum(*ends)  # a negative scale turns them round
    if q.groups is not None:
        bottom, top = bottom[..., q.groups], top[..., q.groups]
    return bottom.reshape(blocks.counts), top.reshape(blocks.counts)
