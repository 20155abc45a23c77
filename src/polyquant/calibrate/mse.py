"""The calibration "mse": the clip of each block's range that gives the least squared error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from polyquant.arrays import Array, HostArray, backend_of, constant
from polyquant.blocks import Rows
from polyquant.calibrate.host import F64, block_runs, fixed_sum, lines, on_host
from polyquant.calibrate.ranges import minmax_refuses
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.standard import (
    Divisor,
    Params,
    as_stored,
    decode,
    divide,
    divisor,
    encode,
    ideal_scale,
    minmax,
    multiplier,
    offset_numbers,
    params_of,
    store_offsets,
    value_range,
)

#: Shares of the full range that are tried. A power-of-two scale only has the first and 1/2; below
#: about 0.3 no scheme of two bits or more gains (measured on normal and on Laplace data).
SHARES = np.linspace(1.0, 0.28125, 24, dtype=np.float32)

#: The sum of squared errors of every block (float64), from host values, scheme, stored parameters
#: and the rule for NaN and infinities.
SquaredError = Callable[[HostArray, QuantScheme, Params, str], F64]


def refuses(scheme: QuantScheme) -> str | None:
    """Whatever minmax cannot split, this cannot either."""
    return minmax_refuses(scheme)


def mse(
    x: Array,
    scheme: QuantScheme,
    table: Array | None,
    nonfinite: str,
    argument: float | None,
    *,
    squared_error: SquaredError | None = None,
) -> Params:
    """Try 24 clips of each block's range and keep the best; of equals the largest (SHARES).

    The errors are summed in float64 on the host in a fixed order. Where scales are quantized
    themselves, a share is judged with the unquantized scale. Never worse than minmax, block by
    block, where a block's scale is its own.
    """
    host = on_host(x, "calibration 'mse'")
    host_table = None if table is None else backend_of(table).to_host(table)
    low, high = value_range(host, scheme, nonfinite=nonfinite)
    judged = _judged(scheme)
    first = minmax(host, judged, host_table, nonfinite=nonfinite)
    error = np.full(low.shape, np.inf)
    share = np.ones(low.shape, np.float32)
    for candidate in SHARES:
        tried = _params(judged, low * candidate, high * candidate, host_table, first)
        got = (squared_error or _squared_error)(host, judged, tried, nonfinite)
        better = got < error
        share, error = np.where(better, candidate, share), np.minimum(got, error)
    best = _params(judged, low * share, high * share, host_table, first)
    if judged is not scheme:
        ideal = ideal_scale(scheme, low * share, high * share, host_table)
        best = params_of(scheme, ideal, low * share, host_table)
    return _there(x, best, table)


def _judged(scheme: QuantScheme) -> QuantScheme:
    """The scheme with plain scales and offsets: what one block can be judged by alone."""
    if isinstance(scheme.scale, QuantScheme):
        scheme = scheme.per_block(scheme.block or (-1,), "f32") if scheme.block else scheme
    if scheme.offset is not None and isinstance(scheme.offset.dtype, QuantScheme):
        scheme = scheme.with_offset(f"{scheme.offset.kind}:f32")
    return scheme


def _params(
    scheme: QuantScheme, low: HostArray, high: HostArray, table: HostArray | None, first: Params
) -> Params:
    """Parameters of a range, with minmax's tensor scale where there are two levels."""
    ideal = ideal_scale(scheme, low, high, table)
    if first.tensor_scale is None or isinstance(scheme.scale, QuantScheme):
        return params_of(scheme, ideal, low, table)
    scales = as_stored(divide(ideal, multiplier(first.tensor_scale, scheme)), scheme.scale)
    made = Params(scales, first.tensor_scale, None, table)
    return made._replace(offsets=store_offsets(scheme, low, divisor(scheme, made), table))


def _squared_error(x: HostArray, scheme: QuantScheme, params: Params, nonfinite: str) -> F64:
    scale = divisor(scheme, params)
    offsets = None if params.offsets is None else offset_numbers(params.offsets)
    shape = scheme.scale_shape(x.shape)
    total = np.zeros(shape or (1,))
    for run, values in block_runs(x, scheme, nonfinite=nonfinite):
        real = ~np.isnan(values)
        clean = np.where(real, values, np.float32(0))
        back = _round_trip(clean, scheme, scale, offsets, params.table, run)
        error = np.where(real, back.astype(np.float64) - clean, 0.0)
        line = lines(error)
        total[run.grid_rows] += fixed_sum(line * line)
    return total.reshape(shape)


def _round_trip(
    x: HostArray,
    scheme: QuantScheme,
    scale: Divisor,
    offsets: HostArray | None,
    table: HostArray | None,
    run: Rows,
) -> HostArray:
    fields = encode(x, scheme, scale, offsets, table, run)
    values: HostArray = decode(fields, scheme, scale, offsets, table, run)
    return values


def _there(x: Array, params: Params, table: Array | None) -> Params:
    """Host parameters beside ``x``; the table stays the caller's."""

    def move(part: HostArray | QTensor | None) -> Array | None:
        if part is None:
            return None
        if isinstance(part, QTensor):
            return part.to(backend_of(x).device_of(x))
        return constant(x, np.asarray(part))

    moved = [move(part) for part in params[:3]]
    return Params(moved[0], moved[1], moved[2], table)
