"""Arithmetic that is the same under every compiler, and what the role of a stored scale means."""

from __future__ import annotations

from polyquant.arrays import Array, namespace
from polyquant.scheme import QuantScheme
from polyquant.values import TINY, ScaleDtype, ScaleRole


def flush(x: Array) -> Array:
    """Numbers below the smallest normal float32 as a zero of their sign.

    The select also keeps a product from being contracted into a later sum. (A product with a 0/1
    mask would not do: XLA makes that a select with +0 and loses the sign.)
    """
    xp = namespace(x)
    return xp.where(xp.abs(x) >= TINY, x, x * 0.0)


def divide(a: Array, b: Array | float) -> Array:
    """``a / b`` as a true division under every compiler: the divisor is made elementwise."""
    return a / (a * 0.0 + b)


def as_role(scale: Array, scheme: QuantScheme) -> Array:
    """What is stored so that the outermost scale acts as ``scale`` (float32)."""
    if scheme.role is ScaleRole.MULTIPLIER:
        return scale
    if scheme.role is ScaleRole.ABSMAX:
        return flush(scale * reach(scheme))
    xp = namespace(scale)
    least = xp.where(scale < TINY, TINY * xp.ones_like(scale), scale)  # a block of zeros
    return divide(xp.ones_like(scale), least)


def multiplier(tensor_scale: Array, scheme: QuantScheme) -> Array:
    """The number by which a stored tensor scale multiplies."""
    if scheme.role is ScaleRole.MULTIPLIER:
        return tensor_scale
    if scheme.role is ScaleRole.ABSMAX:
        return flush(divide(tensor_scale, reach(scheme)))
    return flush(divide(namespace(tensor_scale).ones_like(tensor_scale), tensor_scale))


def reach(scheme: QuantScheme) -> float:
    """The largest number that codes, times block scales where there are two levels, reach."""
    two = scheme.tensor_scale is not None and isinstance(scheme.scale, ScaleDtype)
    return scheme.value.half_range * (ScaleDtype(str(scheme.scale)).max if two else 1.0)
