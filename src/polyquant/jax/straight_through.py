"""Training with quantized numbers: fake_quantize, whose rounding derivatives pass by."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from polyquant import ops
from polyquant.blocks import merge
from polyquant.blocks import split as side_by_side
from polyquant.errors import InvalidArgument
from polyquant.inputs import check_float
from polyquant.jax.derivatives import Decoded, decoded, given, values
from polyquant.jax.explicit import entries_of, explicit_mesh, split, typed
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.standard import flush

Array = Any

#: Four units in the last place of float32, by which a calibrated scale may fall short.
_SLACK = 2.0**-21


def fake_quantize(
    x: Array,
    scheme: QuantScheme | str,
    *,
    scales: Any = None,
    offsets: Any = None,
    table: Any = None,
    calibration: str = "minmax",
    gradient_scale: float = 1.0,
) -> Array:
    """``pq.quantize(x, ...).dequantize(x.dtype)``, with derivatives as if nothing were rounded.

    The gradient of ``x`` passes where ``x`` lies within the range that its block can hold, the ends
    included, and is 0 outside. Scales that are calibrated from ``x`` count as constants. With
    ``v = n * D + bias`` and ``n = code - zero``::

        dv = dx + (n - (x - bias) / D) * dD     inside of the range
        dv = n * dD + dbias, or - D * dzero     outside

    Args:
        x, scheme, calibration: as in pq.quantize, which also says what is refused.
        scales: your own, on ``scheme.scale_shape(x.shape)``, which learn (LSQ, arXiv:1902.08153).
        offsets: your own, beside scales; they learn from what lies outside (LSQ+,
            arXiv:2004.09576).
        table: of a custom lookup; every entry learns from the values that it stands for.
        gradient_scale: a factor for the gradient of ``scales``. The paper takes
            ``1 / sqrt(n * q)``, for blocks of n values and the highest code q.
    """
    check_float("x", x)
    if not isinstance(x, jax.Array):
        wanted = "an array of JAX (jax.numpy.asarray makes one)"
        raise InvalidArgument(name="x", wanted=wanted, got=type(x))
    mesh = explicit_mesh(x)
    if mesh is not None:
        options: Any = {"calibration": calibration, "gradient_scale": gradient_scale}
        inner: Any = partial(fake_quantize, scheme=scheme, **options)
        run = typed(lambda x, given: inner(x, **given), mesh, split(mesh, entries_of(x)))
        found: Array = run(x, {"scales": scales, "offsets": offsets, "table": table})
        return found
    named = {"scales": scales, "offsets": offsets, "table": table}
    learned = {name: each for name, each in named.items() if isinstance(each, jax.Array)}
    fixed = {name: each for name, each in named.items() if name not in learned}

    def quantized(x: Array, learned: dict[str, Array]) -> QTensor:
        detached = jax.lax.stop_gradient(learned)
        return ops.quantize(x, scheme, calibration=calibration, **fixed, **detached)

    def derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (x, learned), (of_x, of_learned) = primals, tangents
        q = quantized(x, learned)
        changes = {name: given(change) for name, change in of_learned.items()}
        run = jax.checkpoint(lambda: _change(q, x, given(of_x), changes, gradient_scale))
        return values(q, x.dtype), run().astype(x.dtype)

    rounded = jax.custom_jvp(lambda x, learned: values(quantized(x, learned), x.dtype))
    rounded.defjvp(derivative, symbolic_zeros=True)
    made: Array = rounded(x, learned)
    return made


def _change(
    q: QTensor, x: Array, of_x: Array | None, changes: dict[str, Array | None], factor: float
) -> Array:
    """``dv``, where ``x`` was quantized to ``q``. See ``fake_quantize``."""
    here, shape = decoded(q), q.scheme.scale_shape(q.shape)
    exact, inside = _within(here, x)
    total = jnp.zeros_like(here.numbers)
    if of_x is not None:
        wide = of_x.astype(total.dtype).reshape(here.blocks.shape)
        total = total + inside * side_by_side(jnp, wide, here.blocks)
    of_scales, of_offsets = (_on_grid(changes.get(name), shape) for name in ("scales", "offsets"))
    if of_scales is not None:
        steps = here.numbers - inside * exact
        total = total + steps * here.spread(of_scales * factor)
    if of_offsets is not None:
        slope = -here.divisor if here.bias is None else 1.0
        total = total + ~inside * slope * here.spread(of_offsets)
    of_table = changes.get("table")
    if of_table is not None:
        total = total + here.divisor * jnp.take(of_table, here.codes.astype(jnp.int32))
    made: Array = merge(jnp, total, here.blocks).reshape(x.shape)
    return made


def _within(here: Decoded, x: Array) -> tuple[Array, Array]:
    """``(x - bias) / D``, and whether ``x`` is in the range of its block."""
    wide = flush(x.astype(here.numbers.dtype)).reshape(here.blocks.shape)
    x = side_by_side(jnp, wide, here.blocks)
    bias = 0.0 if here.bias is None else here.bias
    ends = [number * here.divisor + bias for number in here.ends]
    low, high = jnp.minimum(*ends), jnp.maximum(*ends)
    slack = _SLACK * jnp.maximum(jnp.abs(low), jnp.abs(high))
    is_zero = here.divisor == 0
    exact = jnp.where(is_zero, 0.0, (x - bias) / jnp.where(is_zero, 1.0, here.divisor))
    return exact, (x >= low - slack) & (x <= high + slack)


def _on_grid(change: Array | None, shape: tuple[int, ...]) -> Array | None:
    return None if change is None else change.astype(jnp.float32).reshape(shape)
