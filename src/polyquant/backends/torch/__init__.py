"""PyTorch: devices ``torch:cpu``, ``torch:cuda:N`` and whatever else torch itself names."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.utils.dlpack import to_dlpack

from polyquant.arrays import READ, Backend, HostArray
from polyquant.errors import UnknownDevice, UnsupportedArray
from polyquant.tables import named_table


def _device_of(array: torch.Tensor) -> str:
    return _device_name(array.device)


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return f"torch:{device}"


def _check(array: torch.Tensor, role: str) -> None:
    if array.layout is torch.strided and not array.is_nested:
        return
    got = "a nested tensor" if array.is_nested else f"a tensor of layout {array.layout}"
    fix = "torch.nested.to_padded_tensor" if array.is_nested else ".to_dense()"
    raise UnsupportedArray(role=role, got=got, fix=f"Convert it first, with {fix}")


def _check_readable(array: torch.Tensor) -> None:
    if array.device.type == "meta":
        fix = "Make it on a device that holds values, such as torch:cpu"
        raise UnsupportedArray(role=READ, got="on torch's meta device, which has none", fix=fix)


def _is_traced(array: torch.Tensor) -> bool:
    """Whether values cannot be looked at: compiled, on the meta device, put into a CUDA graph."""
    if torch.compiler.is_compiling() or array.device.type == "meta":
        return True
    is_cuda = array.is_cuda and torch.cuda.is_initialized()
    return bool(is_cuda and torch.cuda.is_current_stream_capturing())


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
    _check_readable(array)
    # Of a conjugate or a negative view torch computes the values only when it is told to.
    host = array.detach().resolve_conj().resolve_neg().cpu()
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


def _move(array: torch.Tensor, device: str) -> torch.Tensor:
    _check_readable(array)
    return array.to(device.partition(":")[2])


def _facts(array: Any) -> Hashable:
    if (  # _is_watched, without a call
        _functorch()
        or _dispatch_modes()
        or _is_autocast_enabled()
        or _forward_mode._current_level >= 0
        or _tracing_state() is not None
    ):
        return None
    if not isinstance(array, _Tensor) or array.layout is not _STRIDED or array.is_nested:
        return None
    is_tracked = array.requires_grad and _is_grad_enabled()
    return array.__class__, array.dtype, array.shape, array.device, is_tracked


# Asked at every product, so their names are looked up once. Torch has no public question for most:
# is torch.func (vmap, grad, ...), a dispatch mode (a tracer, a counter), a dual level, or
# torch.jit.trace on?
_functorch = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_autocast_enabled = torch._C._is_any_autocast_enabled
_forward_mode = torch.autograd.forward_ad
_tracing_state = torch._C._get_tracing_state
_is_grad_enabled = torch.is_grad_enabled
_Tensor, _STRIDED = torch.Tensor, torch.strided


def _is_watched() -> bool:
    """Whether something of torch's stands between a call and its kernel, here and now."""
    modes = _functorch() or _dispatch_modes() or _is_autocast_enabled()
    return bool(modes or _forward_mode._current_level >= 0 or _tracing_state() is not None)


def _is_transformed(array: torch.Tensor) -> bool:
    """Whether an op must be seen as one: autograd, a tracer, vmap, autocast, a tensor subclass."""
    if array.requires_grad and _is_grad_enabled():
        return True
    if torch.compiler.is_compiling() or _is_watched():
        return True
    # A subclass that handles each op by itself, such as a fake or a distributed tensor.
    return bool(torch._C._dispatch_keys(array).has(torch._C.DispatchKey.Python))


def _clip(x: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
    """Within bounds, each a number, a tensor or None; torch itself wants both of one kind."""
    x = x if low is None else torch.clamp(x, min=low)
    return x if high is None else torch.clamp(x, max=high)


def _put(
    line: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, add: bool
) -> torch.Tensor:
    return line.index_put((positions,), values, accumulate=add)


def _named_table(name: str, like: torch.Tensor) -> torch.Tensor:
    """A named table beside ``like``; a GPU's is made there of one that was copied once."""
    if like.is_cuda and not _is_watched():
        return _kept_table(name, like.device).clone()
    return _from_host(named_table(name).copy(), _device_of(like))


@lru_cache(maxsize=256)
def _kept_table(name: str, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(named_table(name).copy()).to(device)


_TRANSFORMS, _DEFINITION = "polyquant.torch.transforms", "polyquant.backends.definition"
_KERNELS = MappingProxyType(
    {
        "cpu": (_TRANSFORMS, "polyquant.backends.native.kernels", _DEFINITION),
        "cuda": (_TRANSFORMS, "polyquant.backends.torch.cuda.kernels", _DEFINITION),
        "*": (_TRANSFORMS, _DEFINITION),
    }
)

BACKEND = Backend(
    name="torch",
    is_array=lambda x: isinstance(x, torch.Tensor),
    check=_check,
    is_traced=_is_traced,
    device_of=_device_of,
    canonical_device=_canonical_device,
    devices=_devices,
    to_host=_to_host,
    from_host=_from_host,
    move=_move,
    facts=_facts,
    is_transformed=_is_transformed,
    detach=torch.Tensor.detach,
    kernels=_KERNELS,
    num_threads=torch.get_num_threads,
    exported=to_dlpack,
    adopted=torch.from_dlpack,
    functions={
        "erf": torch.special.erf,
        "clip": _clip,
        "put_at": _put,
        "named_table": _named_table,
    },
)
