"""Arithmetic that is the same under every compiler, and what stored scales and offsets mean."""

from __future__ import annotations

from polyquant.arrays import Array, find_backend, namespace
from polyquant.scheme import QuantScheme
from polyquant.values import TINY, OffsetKind, QuantMode, ScaleDtype, ScaleRole


def flush(x: Array) -> Array:
    """Numbers below the smallest normal float32 as a zero of their sign.

    The select also keeps a product from being contracted into a later sum. (A product with a 0/1
    mask would not do: XLA makes that a select with +0 and loses the sign.)
    """
    xp = namespace(x)
    return xp.where(xp.abs(x) >= TINY, x, x * 0.0)


def divide(a: Array, b: Array | float) -> Array:
    """``a / b`` as a true division under every compiler: the divisor is made elementwise.

    A library that rounds twice somewhere has a ``quotient`` of its own.
    """
    owner = find_backend(a)
    own = None if owner is None else owner.functions.get("quotient")
    return a / (a * 0.0 + b) if own is None else own(a, b)


def as_role(scale: Array, scheme: QuantScheme) -> Array:
    """What is stored so that the outermost scale acts as ``scale`` (float32)."""
    if scheme.role is ScaleRole.MULTIPLIER:
        return scale
    if scheme.role is ScaleRole.ABSMAX:
        return flush(scale * reach(scheme))
    xp = namespace(scale)
    # A block of zeros has a scale of 0; and a reciprocal below the normal numbers would be 0.
    return divide(xp.ones_like(scale), xp.clip(scale, TINY, 1.0 / TINY))


def multiplier(tensor_scale: Array, scheme: QuantScheme) -> Array:
    """The number by which a stored tensor scale multiplies."""
    if scheme.role is ScaleRole.MULTIPLIER:
        return tensor_scale
    if scheme.role is ScaleRole.ABSMAX:
        return flush(divide(tensor_scale, reach(scheme)))
    return flush(divide(namespace(tensor_scale).ones_like(tensor_scale), tensor_scale))


def multiplier_slope(stored: Array, scheme: QuantScheme) -> Array | float:
    """The derivative of that number by the stored one: by a scale where there is one level."""
    if scheme.role is ScaleRole.MULTIPLIER:
        return 1.0
    if scheme.role is ScaleRole.ABSMAX:
        return 1.0 / reach(scheme)
    xp = namespace(stored)
    wide = xp.astype(stored, xp.float32)
    return -1.0 / (wide * wide)


def reach(scheme: QuantScheme) -> float:
    """The largest number that codes, times block scales where there are two levels, reach."""
    two = scheme.tensor_scale is not None and isinstance(scheme.scale, ScaleDtype)
    return scheme.value.half_range * (ScaleDtype(str(scheme.scale)).max if two else 1.0)


def subtracts(scheme: QuantScheme) -> bool:
    """Whether its biases are unsigned codes under negative scales: minimums that are subtracted.

    So are those of ggml's k-quants. They can be 0 at most.
    """
    if scheme.offset is None or scheme.offset.kind is not OffsetKind.BIAS:
        return False
    stored = scheme.offset.dtype
    return (
        isinstance(stored, QuantScheme)
        and stored.mode is QuantMode.SYMMETRIC
        and not stored.value.is_signed
        and stored.scale in (ScaleDtype.F32, ScaleDtype.F16, ScaleDtype.BF16)
        and stored.tensor_scale is None
        and stored.role is ScaleRole.MULTIPLIER
    )
