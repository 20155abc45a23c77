"""The devices that are usable here: those of ``pq.devices()``, and the bare array API standard."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from polyquant.arrays import backend_of_device

_STRICT = "array_api_strict"


def _find() -> tuple[tuple[str, ...], dict[str, str]]:
    usable, missing = [], {}
    for info in pq.devices():
        if info.usable:
            usable.append(info.name)
        else:
            missing[info.name] = info.note
    if find_spec(_STRICT) is None:
        missing[_STRICT] = "not installed"
    else:
        __import__(_STRICT)
        usable.append(_STRICT)
    return tuple(usable), missing


#: Usable devices, and backend -> why it is not usable.
DEVICES, MISSING = _find()


def needs(*backends: str) -> pytest.MarkDecorator:
    """A mark that skips a test where a backend is missing, with the reason."""
    absent = {name: MISSING[name] for name in backends if name in MISSING}
    return pytest.mark.skipif(bool(absent), reason=f"not usable: {absent}")


def put(array: np.ndarray[Any, Any], device: str) -> Any:
    """A host array on a device, as that library holds it."""
    owner, device = backend_of_device(device)
    return owner.from_host(np.array(array), device)


def host(array: Any) -> np.ndarray[Any, Any]:
    """Any library's array as NumPy's."""
    found: np.ndarray[Any, Any] = backend_of_device(pq.device_of(array) or "")[0].to_host(array)
    return found


def host_parts(q: pq.QTensor) -> dict[str, np.ndarray[Any, Any]]:
    """The stored arrays of a tensor of any library, on the host."""
    return {name: host(part) for name, part in q.parts().items()}


def assert_same_bits(got: Any, wanted: Any, where: str = "") -> None:
    """Two host arrays of the same dtype, shape and bytes; every NaN counts as one."""
    assert got.dtype == wanted.dtype, f"{where}: dtype {got.dtype}, not {wanted.dtype}"
    assert got.shape == wanted.shape, f"{where}: shape {got.shape}, not {wanted.shape}"
    if got.tobytes() != wanted.tobytes():
        differs = bits(got) != bits(wanted)
        if differs.any():
            at = int(np.flatnonzero(differs)[0])
            values = got.reshape(-1)[at], wanted.reshape(-1)[at]
            raise AssertionError(f"{where}: at {at} it is {values[0]!r}, not {values[1]!r}")


def bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bits of an array, flat, with one pattern for every NaN (its payload is the machine's)."""
    flat = np.array(array).reshape(-1)
    if np.dtype(flat.dtype).kind not in "iub":
        flat = np.where(np.isnan(flat), np.asarray(np.nan, flat.dtype), flat)
    return flat.view(f"u{flat.dtype.itemsize}")


def assert_same_parts(got: pq.QTensor, wanted: pq.QTensor, skip: Iterable[str] = ()) -> None:
    """Two tensors of any libraries whose stored arrays have the same bits."""
    left, right = host_parts(got), host_parts(wanted)
    assert left.keys() == right.keys()
    for name in left:
        if name not in skip:
            assert_same_bits(as_stored(left[name]), as_stored(right[name]), name)


def as_stored(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers as float32 where a bare standard library holds 16-bit floats so; else unchanged."""
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array
