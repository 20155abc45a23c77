"""JAX: devices ``jax:cpu:N``, ``jax:gpu:N``, ... ; arrays under a tracer count as traced."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from polyquant.arrays import READ, Backend, HostArray
from polyquant.errors import UnknownDevice, UnsupportedArray
from polyquant.qtensor import QTensor, from_fields


def _is_traced(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer)


def _facts(array: Any) -> Hashable:
    if _is_traced(array) or not isinstance(array, jax.Array):
        return None
    return array.__class__, array.dtype, array.shape, array.device


def _name(device: Any) -> str:
    return f"jax:{device.platform}:{device.id}"


def _device_of(array: Any) -> str:
    """The device that holds an array. A tracer counts as on the default device."""
    if isinstance(array, jax.core.Tracer):
        return _name(jax.devices()[0])
    return _name(next(iter(array.devices())))


def _canonical_device(device: str) -> str:
    _, _, rest = device.partition(":")
    kind, _, index = rest.partition(":")
    full = f"jax:{kind}:{index or 0}" if kind else _devices()[0]
    if full not in _devices():
        reason = "jax does not see it on this machine"
        raise UnknownDevice(device=device, reason=reason, known=", ".join(_devices()))
    return full


def _devices() -> tuple[str, ...]:
    return tuple(_found())


def _found() -> dict[str, Any]:
    """JAX's devices by name: the default platform's first, then the CPU's, which it always has."""
    return {_name(device): device for device in (*jax.devices(), *jax.devices("cpu"))}


def _to_host(array: Any) -> HostArray:
    if isinstance(array, jax.core.Tracer):
        got = "traced (as under jax.jit), and has no values yet"
        raise UnsupportedArray(role=READ, got=got, fix="Do this outside of the traced function")
    return np.asarray(array)


def _from_host(array: HostArray, device: str) -> Any:
    made = jax.numpy.asarray(array)
    return _move(made, device) if device else made


def _move(array: Any, device: str) -> Any:
    return jax.device_put(array, _found()[device])


def _put(line: Any, positions: Any, values: Any, add: bool) -> Any:
    return line.at[positions].add(values) if add else line.at[positions].set(values)


BACKEND = Backend(
    name="jax",
    is_array=lambda x: isinstance(x, jax.Array),
    check=lambda x, role: None,
    is_traced=_is_traced,
    device_of=_device_of,
    canonical_device=_canonical_device,
    devices=_devices,
    to_host=_to_host,
    from_host=_from_host,
    move=_move,
    facts=_facts,
    kernels={
        "cpu": ("polyquant.backends.definition",),
        "*": ("polyquant.backends.jax.accelerators",),
    },
    functions={"erf": jax.scipy.special.erf, "put_at": _put},
    any_rank=True,
)


def _flatten(q: QTensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    arrays = (q.data, q.scales, q.tensor_scale, q.offsets, q.table, q.groups)
    return arrays, (q.scheme, q.shape, q.axes, q.device)


def _unflatten(static: tuple[Any, ...], arrays: tuple[Any, ...]) -> QTensor:
    """JAX also passes placeholders instead of arrays, so nothing is validated here."""
    scheme, shape, axes, device = static
    *parts, groups = arrays
    return from_fields(scheme, shape, *parts, axes, device, groups)


# A QTensor passes through jit, scan and tree functions; JAX wants to be told once.
jax.tree_util.register_pytree_node(QTensor, _flatten, _unflatten)
