"""Arrays of any library to host arrays and back, for every dtype that a file holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyquant.arrays import (
    Array,
    Backend,
    HostArray,
    backend_of,
    backend_of_device,
    dtype_name,
    namespace,
)
from polyquant.errors import UnsupportedDtype
from polyquant.files.info import ARRAY_DTYPES, FileDtype
from polyquant.qtensor import QTensor, from_parts


def to_host(array: Array) -> HostArray:
    """An array of any library as a host array of the same bits."""
    owner, name = backend_of(array), dtype_name(array)
    if owner.name != "numpy" and _is_byte_float(name):  # libraries cross as bytes, not as float8
        raw = owner.to_host(array.view(namespace(array).uint8))
        return raw.view(ARRAY_DTYPES[name].host)
    return owner.to_host(array)


def to_device(array: HostArray, device: str) -> Array:
    """A host array as an array of the same bits on a device.

    Raises UnknownDevice, BackendMissing, and UnsupportedDtype where the library has no such dtype
    (or, as JAX by default, would narrow 64-bit numbers).
    """
    target, device = backend_of_device(device)
    if target.name == "numpy":
        return array
    if dtype_name(_made(target, array.reshape(-1)[:0], device)) != array.dtype.name:
        known = f"the dtypes of {target.name} (JAX has 64 bits only with jax_enable_x64)"
        raise UnsupportedDtype(what=f"An array on {device}", dtype=array.dtype.name, known=known)
    return _made(target, array, device)


def _made(target: Backend, array: HostArray, device: str) -> Array:
    """The array there, in whatever dtype the library makes of its own."""
    if not _is_byte_float(array.dtype.name):
        return target.from_host(array, device)
    raw = target.from_host(array.view(np.uint8), device)
    wanted = getattr(namespace(raw), array.dtype.name, None)
    return raw if wanted is None else raw.view(wanted)


def owned(tensor: HostArray | QTensor) -> Any:
    """A copy of a host tensor whose memory is its own and not a file's."""
    if not isinstance(tensor, QTensor):
        return np.array(tensor)
    copies = {name: np.array(part) for name, part in tensor.parts().items()}
    return from_parts(copies, tensor.scheme, tensor.shape, axes=tensor.axes, device=tensor.device)


def little_endian_bytes(array: HostArray, kind: FileDtype) -> HostArray:
    """The bytes of a host array as a file's dtype, row-major: uint8 of one dimension.

    The dtype is the array's own, but of a library that holds 16-bit floats in float32.
    """
    return np.ascontiguousarray(array, dtype=kind.host).reshape(-1).view(np.uint8)


def _is_byte_float(name: str) -> bool:
    return name.startswith("float8") and name in ARRAY_DTYPES
