"""JAX: devices ``jax:cpu:N``, ``jax:gpu:N``, ... ; arrays under a tracer count as traced."""

from __future__ import annotations

import re
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from polyquant.arrays import READ, Backend, HostArray
from polyquant.backends.jax import division, pytree
from polyquant.errors import UnknownDevice, UnsupportedArray


def _is_traced(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer)


def _facts(array: Any) -> Hashable:
    if _is_traced(array) or not isinstance(array, jax.Array):
        return None
    return array.__class__, array.dtype, array.shape, array.device


def _name(device: Any) -> str:
    return f"jax:{device.platform}:{device.id}"


def _default() -> str:
    """Where JAX puts what has no device: as jax.default_device says, else on its first."""
    chosen = jax.config.jax_default_device  # None, a device, or a platform's name
    if chosen is None or isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    return _name(chosen)


def _device_of(array: Any) -> str:
    """The device that holds an array; of one over several, all of them, as "jax:cpu:0-7".

    A tracer counts as on the default device.
    """
    if isinstance(array, jax.core.Tracer):
        return _default()
    found = array.devices()
    if len(found) == 1:
        return _name(next(iter(found)))
    mesh = getattr(array.sharding, "mesh", None)  # JAX tells meshes in another order apart
    ordered = sorted(found, key=lambda d: d.id) if mesh is None else list(mesh.devices.flat)
    return f"jax:{ordered[0].platform}:{_runs([device.id for device in ordered])}"


def _runs(ids: list[int]) -> str:
    """Numbers in order, those that count up as a run: "0-3,6"."""
    starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1] + 1]
    ends = [*(i - 1 for i in starts[1:]), len(ids) - 1]
    pairs = ((ids[a], ids[b]) for a, b in zip(starts, ends, strict=True))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _canonical_device(device: str) -> str:
    _, _, rest = device.partition(":")
    kind, _, index = rest.partition(":")
    if not kind:
        return _default()
    several = "," in index or "-" in index
    names = [f"jax:{kind}:{i}" for i in (_ids(index) if several else (index or 0,))]
    if len(set(names)) < len(names) or not names or not set(names) <= set(_devices()):
        reason = "jax does not see it on this machine"
        raise UnknownDevice(device=device, reason=reason, known=", ".join(_devices()))
    return f"jax:{kind}:{_runs(_ids(index))}" if several else names[0]


def _ids(text: str) -> list[int]:
    """The numbers of "0-3,6"; none where it is not of that form."""
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        return []
    ends = (part.partition("-") for part in text.split(","))
    return [i for a, _, b in ends for i in range(int(a), int(b or a) + 1)]


def _devices() -> tuple[str, ...]:
    return tuple(_found())


def _found() -> dict[str, Any]:
    """JAX's devices by name: the default platform's first, then the CPU's."""
    found = jax.devices()
    with suppress(RuntimeError):  # JAX_PLATFORMS can leave the CPU out
        found = [*found, *jax.devices("cpu")]
    return {_name(device): device for device in found}


def _to_host(array: Any) -> HostArray:
    if isinstance(array, jax.core.Tracer):
        got = "traced (as under jax.jit), and has no values yet"
        raise UnsupportedArray(role=READ, got=got, fix="Do this outside of the traced function")
    return np.asarray(array)


def _from_host(array: HostArray, device: str) -> Any:
    with jax.debug_nans(False):  # minifloats have codes for NaN, and so have tables of them
        return _move(array, device) if device else jax.numpy.asarray(array)


def _move(array: Any, device: str) -> Any:
    """An array on a device, or a copy of it on each of several."""
    found = _found()
    if device in found:
        return jax.device_put(array, found[device])
    kind, _, index = device.removeprefix("jax:").partition(":")
    mesh = _mesh_of([found[f"jax:{kind}:{i}"] for i in _ids(index)])
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def _beside(array: HostArray, like: Any) -> Any:
    """A host array beside another: of one over several devices a copy on each, of the same mesh."""
    mesh = getattr(like.sharding, "mesh", None)
    if mesh is None or len(like.sharding.device_set) == 1:
        return _from_host(array, _device_of(like))
    with jax.debug_nans(False):
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.device_put(array, everywhere)


def _mesh_of(devices: list[Any]) -> Any:
    """The mesh that jax.set_mesh made the current one, if it is of these; else one of its own."""
    with suppress(AttributeError, ValueError):  # older versions, and traced code, do not say
        current = jax.sharding.get_mesh()
        if not current.empty and list(current.devices.flat) == devices:
            axes = jax.sharding.get_abstract_mesh()  # which auto_axes may have changed
            return jax.sharding.Mesh(current.devices, axes.axis_names, axis_types=axes.axis_types)
    return jax.sharding.Mesh(devices, ("copies",))


def _adopted(array: Any) -> Any:
    """A tensor of torch's on a GPU. Those of the CPU share memory as host arrays do."""
    is_host = array.device.type == "cpu"
    return None if is_host else jax.dlpack.from_dlpack(array.detach().contiguous())


def _total(x: Any, dtype: Any) -> Any:
    """The sum, which may be NaN: that is what is asked."""
    with jax.debug_nans(False):
        return jax.numpy.sum(x, dtype=dtype)


def _put(line: Any, positions: Any, values: Any, add: bool) -> Any:
    return line.at[positions].add(values) if add else line.at[positions].set(values)


def _is_transformed(array: Any) -> bool:
    """Whether JAX itself must see what is done: it traces the array, or splits it over devices."""
    if not isinstance(array, jax.Array):  # a shape, or an array of another library
        return False
    return _is_traced(array) or len(array.sharding.device_set) > 1


_TRANSFORMS = "polyquant.jax.transforms"

BACKEND = Backend(
    name="jax",
    is_array=lambda x: isinstance(x, jax.Array),
    check=lambda x, role: None,
    is_traced=_is_traced,
    is_transformed=_is_transformed,
    is_placed=lambda array: not _is_traced(array),
    detach=jax.lax.stop_gradient,
    device_of=_device_of,
    canonical_device=_canonical_device,
    devices=_devices,
    to_host=_to_host,
    from_host=_from_host,
    move=_move,
    facts=_facts,
    kernels={
        "cpu": (
            _TRANSFORMS,
            "polyquant.jax.host",
            "polyquant.jax.ffi",
            "polyquant.backends.definition",
        ),
        "gpu": (
            _TRANSFORMS,
            "polyquant.backends.jax.cuda",
            "polyquant.backends.jax.accelerators",
        ),
        "*": (_TRANSFORMS, "polyquant.backends.jax.accelerators"),
    },
    functions={
        "erf": jax.scipy.special.erf,
        "beside": _beside,
        "put_at": _put,
        "total": _total,
        "quotient": division.divide,
        "matmul": division.matmul,
    },
    any_rank=True,
    adopted=_adopted,
)


pytree.register()
