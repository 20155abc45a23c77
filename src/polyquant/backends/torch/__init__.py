"""PyTorch: devices ``torch:cpu``, ``torch:cuda:N`` and whatever else torch itself names."""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import torch

from polyquant.arrays import Backend, HostArray
from polyquant.errors import UnknownDevice


def _device_of(array: torch.Tensor) -> str:
    return _device_name(array.device)


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return f"torch:{device}"


def _is_traced(array: torch.Tensor) -> bool:
    """Whether values cannot be looked at: under torch.compile, or on the meta device."""
    return bool(torch.compiler.is_compiling()) or array.device.type == "meta"


def _canonical_device(device: str) -> str:
    _, _, rest = device.partition(":")
    kind, _, index = (rest or "cpu").partition(":")
    if kind in ("cpu", "meta") and index in ("", "0"):
        return f"torch:{kind}"
    full = f"torch:{kind}:{index or 0}"
    if full not in _devices():
        reason = "torch does not see it on this machine"
        raise UnknownDevice(device=device, reason=reason, known=", ".join(_devices()))
    return full


def _devices() -> tuple[str, ...]:
    found = ["torch:cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        found += [f"torch:{kind}:{i}" for i in range(torch.accelerator.device_count())]
    return tuple(found)


def _to_host(array: torch.Tensor) -> HostArray:
    host = array.detach().cpu()
    if host.dtype is torch.bfloat16:
        bits: HostArray = host.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    plain: HostArray = host.numpy()
    return plain


def _from_host(array: HostArray, device: str) -> torch.Tensor:
    """A tensor of a host array: on the CPU it shares the memory, unless that is read-only."""
    is_bfloat16 = array.dtype == ml_dtypes.bfloat16
    plain = array.view(np.int16) if is_bfloat16 else array
    if not plain.flags.writeable or any(step < 0 for step in plain.strides):
        plain = plain.copy()
    made = torch.from_numpy(plain)
    made = made.view(torch.bfloat16) if is_bfloat16 else made
    return made.to(device.partition(":")[2]) if device else made


BACKEND = Backend(
    name="torch",
    is_array=lambda x: isinstance(x, torch.Tensor),
    is_traced=_is_traced,
    device_of=_device_of,
    canonical_device=_canonical_device,
    devices=_devices,
    to_host=_to_host,
    from_host=_from_host,
    move=lambda x, device: x.to(device.partition(":")[2]),
    kernels={"cpu": ("polyquant.backends.definition",), "*": ("polyquant.backends.definition",)},
)

#: torch functions that have a form for quantized tensors -> the operation.
_FUNCTIONS = MappingProxyType(
    {
        torch.matmul: "matmul",
        torch.mm: "matmul",
        torch.mv: "matmul",
        torch.bmm: "matmul",
        torch.Tensor.matmul: "matmul",
        torch.Tensor.mm: "matmul",
        torch.Tensor.mv: "matmul",
        torch.Tensor.bmm: "matmul",
        torch.Tensor.__matmul__: "matmul",
        torch.Tensor.__rmatmul__: "rmatmul",
        torch.nn.functional.linear: "linear",
    }
)


def array_function(function: Any) -> str | None:
    """The name of the operation that a torch function asks for, if there is one."""
    return _FUNCTIONS.get(function)
