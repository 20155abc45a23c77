"""Calibrations that set a block's range by a rule: absmean, percentile, signed_max, mx_floor."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from polyquant.arrays import Array, HostArray, constant, namespace
from polyquant.blocks import blocks_of
from polyquant.calibrate.host import F64, block_runs, fixed_sum, lines, on_host
from polyquant.scheme import QuantScheme
from polyquant.standard import (
    Params,
    divide,
    flush,
    ideal_scale,
    params_of,
    reduce_blocks,
    value_range,
    widen,
)
from polyquant.values import F32, ScaleDtype, ScaleRole, scale_grid

#: The default of ``percentile``: one value in a thousand may be clipped.
PERCENTILE = 99.9


def minmax_refuses(scheme: QuantScheme) -> str | None:
    """Two levels need a narrow block scale: f32 and bf16 leave the tensor scale nothing to do."""
    if scheme.tensor_scale is None or scheme.scale in (ScaleDtype.F16, ScaleDtype.UE4M3):
        return None
    return (
        f"its {scheme.scale} block scales reach every magnitude, so there is no rule that splits "
        "a scale between them and the tensor scale"
    )


def absmean_refuses(scheme: QuantScheme) -> str | None:
    """BitNet b1.58's rule is for one level."""
    if scheme.tensor_scale is not None:
        return "the mean magnitude has no two-level form"
    return minmax_refuses(scheme)


def absmean(
    x: Array,
    scheme: QuantScheme,
    table: Array | None,
    nonfinite: str,
    argument: float | None,
    *,
    magnitudes: Callable[[HostArray, QuantScheme, str], F64] | None = None,
) -> Params:
    """The range is -+ the mean magnitude of the block (BitNet b1.58, arXiv:2402.17764).

    Args:
        magnitudes: what sums the magnitudes of every block instead, bit for bit the same.
    """
    host = on_host(x, "calibration 'absmean'")
    total = (magnitudes or _magnitudes)(host, scheme, nonfinite)
    mean = _grid(x, total / np.maximum(_counts(host, scheme), 1))
    low, high = widen(scheme, -mean, mean)
    return params_of(scheme, ideal_scale(scheme, low, high, table), low, table)


def _magnitudes(host: HostArray, scheme: QuantScheme, nonfinite: str) -> F64:
    """The sum of the magnitudes of every block, in a fixed order."""
    shape = scheme.scale_shape(host.shape)
    total = np.zeros(shape or (1,))
    for run, values in block_runs(host, scheme, nonfinite=nonfinite):
        line = lines(values).astype(np.float64)
        total[run.grid_rows] += fixed_sum(np.where(np.isnan(line), 0.0, np.abs(line)))
    return total.reshape(shape)


def _counts(host: HostArray, scheme: QuantScheme) -> F64:
    """How many numbers every block has: a last block may be short."""
    blocks, count = blocks_of(scheme, host.shape), np.ones(())
    for size, extent, number in zip(*blocks, strict=True):
        starts = np.arange(number) * extent
        count = np.multiply.outer(count, np.minimum(starts + extent, size) - starts)
    return np.asarray(count, np.float64).reshape(scheme.scale_shape(host.shape))


def percentile(
    x: Array, scheme: QuantScheme, table: Array | None, nonfinite: str, argument: float | None
) -> Params:
    """The range holds the given percentage of a block's values (nearest rank, no interpolation)."""
    host = on_host(x, "calibration 'percentile'")
    share = (PERCENTILE if argument is None else argument) / 100
    shape = scheme.scale_shape(host.shape)
    low, high = np.zeros(shape or (1,)), np.zeros(shape or (1,))
    for run, line in _whole_lines(host, scheme, nonfinite):
        if scheme.offset is None:
            high[run] = _rank(np.abs(line), share)
            low[run] = -high[run]
        else:
            high[run] = _rank(line, share)
            low[run] = -_rank(-line, share)
    bottom, top = _grid(x, low.reshape(shape)), _grid(x, high.reshape(shape))
    bottom, top = widen(scheme, bottom, top)
    return params_of(scheme, ideal_scale(scheme, bottom, top, table), bottom, table)


def signed_max_refuses(scheme: QuantScheme) -> str | None:
    """The scale takes the extreme value's sign, so it must be able to hold one."""
    if scheme.role is not ScaleRole.MULTIPLIER:
        return f"a {scheme.role} has no sign"
    if scheme.offset is not None:
        return "an offset moves the code that the extreme value should land on"
    if not (scheme.table or scheme.value.is_signed):
        return "an unsigned code has no lowest negative number to put the extreme value on"
    if scheme.scale not in (ScaleDtype.F32, ScaleDtype.F16, ScaleDtype.BF16):
        return f"its {scheme.scale} scales have no sign"
    return None if scheme.tensor_scale is None else "a tensor scale has no sign"


def signed_max(
    x: Array, scheme: QuantScheme, table: Array | None, nonfinite: str, argument: float | None
) -> Params:
    """The block's extreme value lands exactly on the lowest code (ggml's Q4_0 and its kin)."""
    xp = namespace(x)
    low = reduce_blocks(x, scheme, "min", nonfinite=nonfinite)
    high = reduce_blocks(x, scheme, "max", nonfinite=nonfinite)
    extreme = xp.where(-low > high, low, high)
    end = _lowest(scheme, table)
    ideal = flush(divide(extreme, end))
    return params_of(scheme, ideal, None, table)


def mx_floor_refuses(scheme: QuantScheme) -> str | None:
    """The rule gives an exponent."""
    if scheme.scale is not ScaleDtype.UE8M0:
        return f"it gives powers of two, and the scales are {scheme.scale}"
    return None if scheme.offset is None else "it has no form with an offset"


def mx_floor(
    x: Array, scheme: QuantScheme, table: Array | None, nonfinite: str, argument: float | None
) -> Params:
    """The scale is ``2^(floor(log2 alpha) - emax)`` (OCP MX v1.0, section 6.3)."""
    xp = namespace(x)
    _, alpha = value_range(x, scheme, nonfinite=nonfinite)
    emax = math.floor(math.log2(_largest(scheme, table)))
    # Powers of two not above alpha, counted: the exponent of alpha without bits or log2.
    powers = scale_grid(ScaleDtype.UE8M0)[1:]
    flat = xp.reshape(alpha, (-1,))
    found = xp.searchsorted(constant(alpha, powers), flat, side="right")
    index = xp.reshape(found, alpha.shape)  # 0 below 2^-126, else exponent + 127
    byte = xp.clip(xp.astype(index, xp.int32) - emax, 0, 254)
    byte = xp.where(index == 0, xp.zeros_like(byte), byte)
    return Params(xp.astype(byte, xp.uint8), None, None, table)


def _largest(scheme: QuantScheme, table: Array | None) -> float:
    if table is None:
        return scheme.value.range[1]
    return float(np.abs(on_host(table, "a table under calibration 'mx_floor'")).max())


def _lowest(scheme: QuantScheme, table: Array | None) -> float:
    """The number of the code that the extreme value lands on: the table's largest entry, or a."""
    if table is None:
        return scheme.value.range[0]
    entries = on_host(table, "a table under calibration 'signed_max'")
    return float(entries[np.abs(entries).argmax()])


def _grid(like: Array, numbers: F64) -> Array:
    return constant(like, np.asarray(numbers, np.float32))


def _whole_lines(host: HostArray, scheme: QuantScheme, nonfinite: str) -> list[tuple[slice, F32]]:
    """Lines of whole blocks: where a block spans all rows, the runs are joined again."""
    runs = [
        (run.grid_rows, lines(values))
        for run, values in block_runs(host, scheme, nonfinite=nonfinite)
    ]
    if len(runs) > 1 and runs[0][0] == runs[-1][0]:
        return [(runs[0][0], np.concatenate([line for _, line in runs], axis=-1))]
    return runs


def _rank(line: F32, share: float) -> F32:
    """The ``ceil(share * count)``-th smallest of each line's numbers (NaN filling excluded)."""
    if line.shape[-1] == 0:
        return np.zeros(line.shape[:-1], dtype=np.float32)
    ordered = np.sort(line, axis=-1)  # NaN sorts last
    count = (~np.isnan(line)).sum(axis=-1)
    at = np.clip(np.ceil(share * count).astype(np.int64) - 1, 0, None)
    picked: F32 = np.take_along_axis(ordered, at[..., None], axis=-1)[..., 0]
    return np.where(count > 0, picked, np.float32(0))
