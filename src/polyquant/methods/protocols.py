"""The protocols of NumPy and torch, which hand their functions over to the operations."""

from __future__ import annotations

from typing import Any

from polyquant.arrays import backend_of
from polyquant.errors import HostCopyRefused, InvalidArgument, UnsupportedArray
from polyquant.methods.door import operations

#: Devices whose arrays NumPy reads in place.
_HOSTS = ("numpy", "torch:cpu", "jax:cpu")


class Protocols:
    """``np.asarray(q)``, ``np.sum(q)``, ``x + q``, ``torch.matmul(x, q)``: see ops/protocol.py."""

    __slots__ = ()

    def __array__(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            wanted = "True or None: the values of a quantized tensor are always made anew"
            raise InvalidArgument(name="copy", wanted=wanted, got=copy)
        owner, on_host = backend_of(self.data), self.device.startswith(_HOSTS)
        # What JAX traces may be on any device; torch's meta tensors count as traced, too.
        if owner.is_traced(self.data) and (on_host or owner.name == "jax"):
            got = "traced (as under jax.jit), and has no values yet"
            fix = "Hand over q.dequantize(), or pq.dequantize_tree(model) of a whole model"
            raise UnsupportedArray(role="A QTensor made an array", got=got, fix=fix)
        if not on_host:
            raise HostCopyRefused(device=self.device)
        return self.to("numpy").dequantize(None if dtype is None else str(dtype))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return operations().array_function("numpy", ufunc, inputs, kwargs, method=method)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return operations().array_function("numpy", func, args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operations().array_function("torch", func, args, kwargs)
