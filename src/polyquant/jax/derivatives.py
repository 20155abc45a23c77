"""Derivatives of decoding and of products, as JVPs: JAX makes of them every other derivative.

Codes have none. Float operands, scales, offsets and tables have those of the numbers
``v = (code - zero) * D + bias``, with ``D`` the scale, or the block's times the tensor's::

    dv = (code - zero) * dD - D * dzero        or + dbias        + D * dtable[code]

That the definition makes subnormal numbers zero counts for nothing here: a scale, a bias or an
entry that is 0 has a derivative like any other. What a derivative needs of a tensor are its stored
arrays, which it decodes again (``jax.checkpoint``): the decoded weight is never kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyquant import standard
from polyquant.arrays import backend_of, namespace
from polyquant.backends.jax.division import matmul
from polyquant.blocks import Blocks, Rows, blocks_of, merge, spread
from polyquant.blocks import split as side_by_side
from polyquant.codec import unpack
from polyquant.dispatch import (
    check_one_device,
    choose,
    device_among,
    is_transformed,
    matmul_problem,
    one_operand_problem,
)
from polyquant.errors import InvalidTensor
from polyquant.jax.explicit import entries_of, explicit_mesh, split, split_of_product, typed
from polyquant.jax.linear import product_by
from polyquant.ops.conversion import quantize_plain
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.standard import Divisor, Params
from polyquant.values import OffsetKind

Array = Any
#: The kernels that these derivatives belong to stand above those that compute.
BELOW = "jax.transforms"
#: Of kernels that JAX cannot transpose: what they are called.
OPAQUE = ("jax.nvrtc", "jax.ffi")

# -- decoding ---------------------------------------------------------------------------------


def values(q: QTensor, kind: Any) -> Array:
    """The numbers of ``q`` in logical order, in a dtype; of a stack those of every tensor in it."""
    mesh = explicit_mesh(q)
    if mesh is not None:
        numbers: Array = typed(partial(values, kind=kind), mesh, split(mesh, entries_of(q)))(q)
        return numbers
    if q.is_stack:
        _check_stack(q)
        run = partial(values, kind=kind)
        made: Array = jax.vmap(run, out_axes=q.axes.index(0))(q)
        return made
    return _values(q, jnp.dtype(kind))


def _check_stack(q: QTensor) -> None:
    """Raise InvalidTensor where the parts are stacked along other axes than their first."""
    for name, part in q.parts().items():
        if part.shape[:1] != q.data.shape[:1]:
            wanted = f"stacked along the first axis, {q.data.shape[0]} of them (out_axes=0 of vmap)"
            got = tuple(part.shape)
            raise InvalidTensor(
                part=name, scheme=str(q.scheme), shape=q.shape, wanted=wanted, got=got
            )


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _values(q: QTensor, kind: Any) -> Array:
    owner = backend_of(q.data)
    is_watched = is_transformed(owner, q)
    problem = one_operand_problem("dequantize", q, q.device, transformed=is_watched)
    return choose(owner.name, problem, below=BELOW).run(q, kind)


def _values_jvp(kind: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (q,), (change,) = primals, tangents
    made = _values(q, kind)
    moved = jax.checkpoint(lambda: change_of_values(q, change))()
    return made, jnp.zeros_like(made) if moved is None else moved.astype(kind)


_values.defjvp(_values_jvp, symbolic_zeros=True)


def change_of_values(q: QTensor, change: QTensor) -> Array | None:
    """``dv`` in logical order, of the changes of the stored arrays; None where all are zero."""
    of_divisor = _change_of_divisor(q, change)
    of_offsets = None if q.offsets is None else _change_of_grid(q.offsets, change.offsets)
    of_table = None if q.table is None else given(change.table)
    if of_divisor is None and of_offsets is None and of_table is None:
        return None
    here = decoded(q)
    total = jnp.zeros(())
    if of_divisor is not None:
        total = total + here.numbers * here.spread(of_divisor)
    if of_offsets is not None:
        factor = -here.divisor if here.bias is None else 1.0
        total = total + factor * here.spread(of_offsets)
    if of_table is not None:
        total = total + here.divisor * jnp.take(of_table, here.codes.astype(jnp.int32))
    total = jnp.broadcast_to(total, here.numbers.shape)
    return q.to_logical(merge(jnp, total, here.blocks).reshape(q.stored_shape))


def _change_of_divisor(q: QTensor, change: QTensor) -> Array | None:
    """``dD`` on the grid of the blocks."""
    of_scales = _change_of_grid(q.scales, change.scales)
    if q.tensor_scale is None:
        slope = standard.multiplier_slope(q.scales, q.scheme)
        return None if of_scales is None else of_scales * slope
    of_whole = given(change.tensor_scale)
    total = None
    if of_scales is not None:
        total = of_scales * standard.multiplier(q.tensor_scale, q.scheme)
    if of_whole is not None:
        plain = q.scheme.with_role("multiplier")
        levels = standard.divisor(plain, Params(q.scales, None, None, None)).value
        more = levels * (of_whole * standard.multiplier_slope(q.tensor_scale, q.scheme))
        total = more if total is None else total + more
    return total


def _change_of_grid(part: Any, change: Any) -> Array | None:
    """The change of scales' or offsets' numbers, which may be quantized themselves."""
    if isinstance(part, QTensor):
        return change_of_values(part, change)
    found = given(change)
    return None if found is None else found.astype(jnp.float32)


def given(change: Any) -> Array | None:
    """A change that is not zero for certain, as those of integers are."""
    if change is None or isinstance(change, jax.custom_derivatives.SymbolicZero):
        return None
    return None if change.dtype == jax.dtypes.float0 else change


class Decoded(NamedTuple):
    """A tensor side by side with its blocks: codes, ``code - zero``, its ends, divisor and bias."""

    blocks: Blocks
    codes: Array
    numbers: Array
    ends: tuple[Any, Any]
    divisor: Array
    bias: Array | None
    groups: Array | None

    def spread(self, grid: Array) -> Array:
        """Numbers on the grid beside the elements that they are for."""
        return spread(jnp, _of_elements(grid, self.groups), self.blocks)


def decoded(q: QTensor) -> Decoded:
    """The elements of ``q`` without their scales and biases, and those beside them."""
    xp, blocks = namespace(q.data), blocks_of(q.scheme, q.stored_shape)
    data = q.data.reshape(*blocks.shape[:-1], q.data.shape[-1])
    fields = unpack(xp, data, blocks.shape[-1], q.scheme.value, q.scheme.store)
    codes = side_by_side(xp, fields, blocks)
    whole = _of_elements(standard.divisor(q.scheme, standard.params_in(q)).whole, q.groups)
    offsets = None
    if q.offsets is not None:
        offsets = _of_elements(standard.offset_numbers(q.offsets), q.groups)
    is_bias = q.scheme.offset is not None and q.scheme.offset.kind is OffsetKind.BIAS
    plain = q.scheme.with_offset(None) if is_bias else q.scheme
    everything = Rows(slice(None), slice(None), blocks)
    one, zero = Divisor(jnp.ones_like(whole), None), None if is_bias else offsets
    numbers = standard.decode(codes, plain, one, zero, q.table, everything)
    beside = None if offsets is None else spread(xp, offsets, blocks)
    low, high = q.scheme.value.range if q.table is None else (q.table.min(), q.table.max())
    ends = (low, high) if is_bias or beside is None else (low - beside, high - beside)
    divisor = spread(xp, whole, blocks)
    bias = beside if is_bias else None
    return Decoded(blocks, codes, numbers, ends, divisor, bias, q.groups)


def _of_elements(grid: Array, groups: Array | None) -> Array:
    """Numbers on the grid; of a grouped tensor, for every element of the last axis."""
    return grid if groups is None else jnp.take(grid, groups, axis=-1)


# -- products ---------------------------------------------------------------------------------


def product(a: Any, b: Any, kind: Any, activations: QuantScheme | None = None) -> Array:
    """``a @ b`` rounded to a dtype, either quantized; ``a`` is quantized first where asked for.

    The gradient passes by that rounding of ``a``, whose numbers are the factor of that of ``b``.
    """
    mesh = explicit_mesh(a, b)
    if mesh is not None:
        run = partial(product, kind=kind, activations=activations)
        made: Array = typed(run, mesh, split_of_product(a, b, mesh))(a, b)
        return made
    wide = _wide(a, b, kind)
    a, b = (values(x, wide) if isinstance(x, QTensor) and x.is_stack else x for x in (a, b))
    return _product(a, b, jnp.dtype(kind), activations)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _product(a: Any, b: Any, kind: Any, activations: QuantScheme | None) -> Array:
    owner = check_one_device("matmul", (("a", a), ("b", b)))  # what a tracer stood for, too
    left = a if activations is None else quantize_plain(a, activations)
    is_watched = is_transformed(owner, left, b)
    device = device_among(owner, left, b)
    problem = matmul_problem(left, b, device, kind, transformed=is_watched)
    kernel = choose(owner.name, problem, below=BELOW)
    is_of_rows = not isinstance(left, QTensor) and isinstance(b, QTensor)
    if is_watched and is_of_rows and kernel.name.startswith(OPAQUE):
        return product_by(kernel, left, b, kind)
    made: Array = kernel.run(left, b, kind)
    return made


def _product_jvp(
    kind: Any, activations: QuantScheme | None, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    (a, b), (of_a, of_b) = primals, tangents
    made, wide = _product(a, b, kind, activations), _wide(a, b, kind)

    def entering(x: Any) -> Array:
        return values(x, wide) if isinstance(x, QTensor) else x.astype(wide)

    def left() -> Any:
        return a if activations is None else quantize_plain(a, activations)

    terms: list[Callable[[], Array | None]] = [
        lambda: _multiplied(_change(a, of_a), entering, b, is_left=True),
        lambda: _multiplied(_change(b, of_b), entering, left, is_left=False),
    ]
    found = [term for run in terms if (term := jax.checkpoint(run)()) is not None]
    total = sum(found[1:], start=found[0]) if found else jnp.zeros_like(made)
    return made, total.astype(kind)


_product.defjvp(_product_jvp, symbolic_zeros=True)


def _change(x: Any, change: Any) -> Array | None:
    return change_of_values(x, change) if isinstance(x, QTensor) else given(change)


def _multiplied(
    change: Array | None, entering: Callable[[Any], Array], other: Any, *, is_left: bool
) -> Array | None:
    """The product with the other operand (or what makes it) of a change of one."""
    if change is None:
        return None
    factor = entering(other() if callable(other) else other)
    change = change.astype(factor.dtype)
    pair = (change, factor) if is_left else (factor, change)
    made: Array = matmul(*pair)
    return made


def _wide(a: Any, b: Any, kind: Any) -> Any:
    """The dtype in which a product is summed."""
    kinds = [kind, *(x.dtype for x in (a, b) if not isinstance(x, QTensor))]
    return jnp.float64 if jnp.dtype("float64") in map(jnp.dtype, kinds) else jnp.float32
