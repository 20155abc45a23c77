"""NumPy: the reference backend. One device, ``numpy``."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from polyquant.arrays import Backend, HostArray
from polyquant.errors import UnknownDevice, UnsupportedArray


def _canonical_device(device: str) -> str:
    if device not in ("numpy", "numpy:cpu"):
        raise UnknownDevice(device=device, reason="NumPy has only one device", known="numpy")
    return "numpy"


def _check(array: Any, role: str) -> None:
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        got = "a masked array, whose mask would be lost"
        raise UnsupportedArray(role=role, got=got, fix="Fill it first, e.g. with .filled(0)")


def _facts(array: Any) -> Hashable:
    is_array = isinstance(array, np.ndarray | np.generic)
    return (array.__class__, array.dtype, array.shape) if is_array else None


def _from_host(array: HostArray, device: str) -> HostArray:
    return array


BACKEND = Backend(
    name="numpy",
    is_array=lambda x: isinstance(x, np.ndarray | np.generic),
    check=_check,
    is_traced=lambda x: False,
    device_of=lambda x: "numpy",
    canonical_device=_canonical_device,
    devices=lambda: ("numpy",),
    to_host=lambda x: np.asarray(x),
    from_host=_from_host,
    move=_from_host,
    facts=_facts,
    kernels={"cpu": ("polyquant.backends.native.kernels", "polyquant.backends.definition")},
    functions={"clip": np.clip},
)
