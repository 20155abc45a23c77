"""Any library that follows the Python array API standard and has no backend of its own.

Its arrays run the definition. The first part of the device's name is the library's module.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from polyquant.arrays import Backend, HostArray
from polyquant.errors import UnknownDevice


def make_backend(name: str) -> Backend:
    """The backend of the library whose top-level module is ``name``."""

    def canonical_device(device: str) -> str:
        if device != name:
            raise UnknownDevice(device=device, reason=f"{name} has one device here", known=name)
        return name

    def from_host(array: HostArray, device: str) -> Any:
        xp = import_module(name)
        known = getattr(xp, str(array.dtype), None)
        return xp.asarray(array if known is not None else array.astype(np.float32))

    return Backend(
        name=name,
        is_array=lambda x: hasattr(x, "__array_namespace__"),
        check=lambda x, role: None,
        is_traced=lambda x: False,
        device_of=lambda x: name,
        canonical_device=canonical_device,
        devices=lambda: (name,),
        to_host=lambda x: np.from_dlpack(x),
        from_host=from_host,
        move=lambda x, device: x,
        facts=lambda x: None,
        kernels={"cpu": ("polyquant.backends.definition",)},
    )
