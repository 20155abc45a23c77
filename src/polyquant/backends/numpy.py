"""NumPy: the reference backend. One device, ``numpy``."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyquant.arrays import Backend, HostArray
from polyquant.errors import UnknownDevice


def _canonical_device(device: str) -> str:
    if device not in ("numpy", "numpy:cpu"):
        raise UnknownDevice(device=device, reason="NumPy has only one device", known="numpy")
    return "numpy"


def _from_host(array: HostArray, device: str) -> HostArray:
    return array


BACKEND = Backend(
    name="numpy",
    is_array=lambda x: isinstance(x, np.ndarray | np.generic),
    is_traced=lambda x: False,
    device_of=lambda x: "numpy",
    canonical_device=_canonical_device,
    devices=lambda: ("numpy",),
    to_host=lambda x: np.asarray(x),
    from_host=_from_host,
    move=_from_host,
    kernels={"cpu": ("polyquant.backends.definition",)},
)


def array_function(function: Any) -> str | None:
    """The name of the operation that a NumPy function or ufunc asks for, if there is one."""
    return "matmul" if function in (np.matmul, np.dot) else None
