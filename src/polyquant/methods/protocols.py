"""The protocols of NumPy and torch, which hand their functions over to the operations."""

from __future__ import annotations

from typing import Any

from polyquant.errors import HostCopyRefused, InvalidArgument
from polyquant.methods.door import operations


class Protocols:
    """``np.asarray(q)``, ``np.matmul(x, q)``, ``torch.matmul(x, q)``."""

    __slots__ = ()

    def __array__(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            wanted = "True or None: the values of a quantized tensor are always made anew"
            raise InvalidArgument(name="copy", wanted=wanted, got=copy)
        if not self.device.startswith(("numpy", "torch:cpu", "jax:cpu")):
            raise HostCopyRefused(device=self.device)
        return self.to("numpy").dequantize(None if dtype is None else str(dtype))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return operations().array_function(self, ufunc, inputs, kwargs, method=method)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return operations().array_function(self, func, args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and len(args) == 2:  # `x @ q`, the quick way
            first = args[1] if isinstance(args[1], cls) else args[0]
            if isinstance(first, cls):
                return operations().array_function(first, func, args, {})
        flat = [*args, *(kwargs or {}).values()]
        inner = [item for group in flat if isinstance(group, list | tuple) for item in group]
        first = next(item for item in (*flat, *inner) if isinstance(item, cls))
        return operations().array_function(first, func, args, kwargs or {})
