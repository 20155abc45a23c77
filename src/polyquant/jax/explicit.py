"""Meshes with explicit axes, where the type of an array says how it is split over devices.

JAX infers such types operation by operation, and refuses most of what decoding is made of. So what
decodes runs as a whole with automatic axes, and its result gets the type that JAX infers for plain
operands that are split as these are. Of an axis that a product sums over, and that both operands
are split along, the partial sums are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from polyquant.qtensor import QTensor

Array = Any
_Entries = tuple[Any, ...]

#: What runs a function with other axes than explicit ones; None where JAX is too old for it.
auto_axes: Any = getattr(jax.sharding, "auto_axes", None)


def explicit_mesh(*operands: Any) -> Any:
    """The mesh of an operand whose type names explicit axes of one; None where there is none."""
    for x in operands:
        mesh = jax.typeof(x.data if isinstance(x, QTensor) else x).sharding.mesh
        if AxisType.Explicit in (mesh.axis_types or ()):
            return mesh
    return None


def split(mesh: Any, entries: _Entries) -> NamedSharding:
    """The sharding of an array of a mesh whose axes are split so."""
    return NamedSharding(mesh, PartitionSpec(*entries))


def typed(run: Callable[..., Any], mesh: Any, wanted: Any) -> Callable[..., Any]:
    """``run`` with automatic axes; ``wanted`` has the sharding of its result, or of every leaf."""
    made: Callable[..., Any] = auto_axes(run, axes=mesh.explicit_axes, out_sharding=wanted)
    return made


def entries_of(x: Any) -> _Entries:
    """How the logical axes of an array or a QTensor are split."""
    array = x.data if isinstance(x, QTensor) else x
    given = tuple(jax.typeof(array).sharding.spec)
    given = (*given, *(None,) * (array.ndim - len(given)))
    if not isinstance(x, QTensor):
        return given
    if x.scheme.view is not None:  # split by rows alone: its first axis is what lines run along
        more = array.ndim - len(x.scheme.view)
        given = (*given[: more + 1], *(None,) * (x.ndim - more - 1))
    return tuple(given[axis] for axis in x.axes)


def split_of_product(a: Any, b: Any, mesh: Any) -> NamedSharding:
    """How JAX splits a product of operands that are split so, but not along what is summed."""

    def plain(x: Any, summed: int) -> Any:
        entries = list(entries_of(x))
        entries[summed] = None
        return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=split(mesh, tuple(entries)))

    operands = plain(a, -1), plain(b, -1 if b.ndim == 1 else -2)
    with jax.sharding.use_abstract_mesh(mesh):
        made = jax.eval_shape(jnp.matmul, *operands)
    return split(mesh, tuple(made.sharding.spec))
