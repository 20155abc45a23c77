"""The compiled kernels of the CPU for JAX's arrays: whole ones, on one CPU, outside of any tracing.

They read the memory that holds the arrays, with nothing copied; only results are. In traced code
XLA calls those of products (``ffi``), and fuses, splits and exports the definition of all else.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from polyquant.arrays import HostArray, backend_of
from polyquant.backends.native.kernels import KERNELS as NATIVE
from polyquant.kernel import Kernel
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.standard import Params

Array = Any


def _seen(x: Any) -> Any:
    """An operand as NumPy sees its memory; of a QTensor it is kept, as what was prepared."""
    if not isinstance(x, QTensor):
        return np.asarray(x)
    if x._prepared is None:
        object.__setattr__(x, "_prepared", x._map(np.asarray, "numpy"))
    return x._prepared


def _back(made: HostArray, like: Any) -> Array:
    """A result on the device of an operand."""
    array = like.data if isinstance(like, QTensor) else like
    return jax.device_put(made, next(iter(array.devices())))


def _product(native: Kernel) -> Any:
    def run(a: Any, b: Any, kind: Any) -> Array:
        return _back(native.run(_seen(a), _seen(b), np.dtype(kind)), a)

    return run


def _decode(native: Kernel) -> Any:
    def run(q: QTensor, kind: Any) -> Array:
        return _back(native.run(_seen(q), None if kind is None else np.dtype(kind)), q)

    return run


def _encode(native: Kernel) -> Any:
    def run(
        x: Array,
        scheme: QuantScheme,
        calibration: str,
        *,
        params: Params | None = None,
        table: Array | None = None,
        nonfinite: str = "raise",
    ) -> QTensor:
        given = None if params is None else Params(*(_part(part) for part in params))
        entries = None if table is None else np.asarray(table)
        options = {"params": given, "table": entries, "nonfinite": nonfinite}
        made: QTensor = native.run(np.asarray(x), scheme, calibration, **options)
        owner = backend_of(x)
        device = owner.device_of(x)
        return made._map(lambda part: owner.from_host(part, device), device)

    return run


def _part(part: Any) -> Any:
    return None if part is None else _seen(part)


_WAYS = MappingProxyType({"matmul": _product, "dequantize": _decode, "quantize": _encode})
KERNELS = tuple(
    Kernel(f"jax.{k.name}", k.op, k.declines, _WAYS[k.op](k), k.takes_extras, k.entering)
    for k in NATIVE
)
