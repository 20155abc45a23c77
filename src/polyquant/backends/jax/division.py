"""Quotients of float32 that are correctly rounded on every platform, and products in full float32.

XLA's own division is true on the CPU. On GPUs and TPUs it is off by a unit in the last place now
and then, which moves scales. There the significands are divided as integers, which nothing rounds,
contracts or flushes: three digits of 8 bits give 24 bits and what remains decides the rounding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any

_SIGN, _EXPONENT = np.uint32(1 << 31), np.uint32(0xFF << 23)
_FRACTION, _ONE = np.uint32(0x7FFFFF), np.uint32(0x800000)
_BIAS = 127


def divide(a: Array, b: Any) -> Array:
    """``a / b`` of float32, rounded once. Subnormal operands count as zeros, as they do everywhere.

    Where it will run is known of arrays; traced code has both ways, of which one is compiled.
    """
    b = a * 0.0 + b  # XLA would make a product with the reciprocal of a broadcast divisor
    if a.dtype != jnp.float32:
        return a / b
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return jax.lax.platform_dependent(a, b, cpu=jnp.divide, default=quotient)
    on_cpu = next(iter(a.devices())).platform == "cpu"
    return a / b if on_cpu else _compiled(a, b)


def quotient(a: Array, b: Array) -> Array:
    """``a / b`` of float32 by integers, for arrays of one shape; NaN and infinities as IEEE 754."""
    of_a, of_b = (jax.lax.bitcast_convert_type(x, jnp.uint32) for x in (a, b))
    sign = (of_a ^ of_b) & _SIGN
    exponents = [((x & _EXPONENT) >> 23).astype(jnp.int32) for x in (of_a, of_b)]
    rest, divisor = ((x & _FRACTION) | _ONE for x in (of_a, of_b))
    is_less = rest < divisor
    rest = jnp.where(is_less, rest << 1, rest) - divisor  # the first digit is 1
    digits = jnp.ones_like(rest)
    for _ in range(3):
        rest = rest << 8  # below 2^32, since it is below a divisor of 24 bits
        digit = rest // divisor
        rest = rest - digit * divisor
        digits = (digits << 8) | digit
    exponent = exponents[0] - exponents[1] + _BIAS - is_less.astype(jnp.int32)
    found = sign | _rounded(digits, rest != 0, exponent)
    return jnp.where(
        _is_plain(exponents), jax.lax.bitcast_convert_type(found, jnp.float32), _special(a, b, sign)
    )


_compiled = jax.jit(quotient)


def _rounded(digits: Array, is_more: Array, exponent: Array) -> Array:
    """The bits of ``digits * 2^(exponent - 151)``, digits of 25 bits, to nearest even.

    ``is_more``: what was cut off is not 0. Below the normal numbers more bits are cut off.
    """
    shift = jnp.clip(1 - exponent, 0, 25).astype(jnp.uint32) + 1
    kept, half = digits >> shift, jnp.ones_like(digits) << (shift - 1)
    cut = digits & ((half << 1) - 1)
    is_odd = (kept & 1) == 1
    up = (cut > half) | ((cut == half) & (is_more | is_odd))
    whole = kept + up.astype(jnp.uint32)  # a carry goes on into the exponent
    high = jnp.clip(exponent - 1, 0, 255).astype(jnp.uint32) << 23
    return jnp.where(exponent >= 255, _EXPONENT, jnp.minimum(high + whole, _EXPONENT))


def _is_plain(exponents: Any) -> Array:
    """Whether both operands are neither zero nor infinite nor NaN."""
    return (exponents[0] > 0) & (exponents[0] < 255) & (exponents[1] > 0) & (exponents[1] < 255)


def _special(a: Array, b: Array, sign: Array) -> Array:
    """Quotients of which an operand is zero, infinite or NaN."""
    tiny = np.finfo(np.float32).tiny
    a_is_zero, b_is_zero = jnp.abs(a) < tiny, jnp.abs(b) < tiny
    is_nan = jnp.isnan(a) | jnp.isnan(b)
    is_nan = is_nan | (a_is_zero & b_is_zero) | (jnp.isinf(a) & jnp.isinf(b))
    size = jnp.where(jnp.isinf(a) | b_is_zero, _EXPONENT, jnp.uint32(0))
    size = jnp.where(is_nan, _EXPONENT | _FRACTION, size)
    return jax.lax.bitcast_convert_type(sign | size, jnp.float32)


#: ``matmul`` in float32, where GPUs would take TF32 and TPUs bfloat16.
matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
