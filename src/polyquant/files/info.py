"""What a file says about one tensor, and the dtypes that files hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from polyquant.arrays import Array, backend_of, dtype_name
from polyquant.data import check_description, data_size_bytes, stored_shape
from polyquant.errors import UnsupportedArray, UnsupportedDtype
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme


class FileDtype(NamedTuple):
    """A dtype of the safetensors container: its code there, its array name, its width."""

    code: str
    name: str
    bits: int

    @property
    def host(self) -> np.dtype[Any]:
        """The little-endian NumPy dtype. Only for those in ``ARRAY_DTYPES``."""
        extra = getattr(ml_dtypes, self.name, None)
        return np.dtype(self.name).newbyteorder("<") if extra is None else np.dtype(extra)


#: Code in the file -> dtype: every one that the container knows, so that sizes can be checked.
FILE_DTYPES: Mapping[str, FileDtype] = MappingProxyType(
    {
        code: FileDtype(code, name, bits)
        for code, name, bits in (
            ("BOOL", "bool", 8),
            ("U8", "uint8", 8),
            ("I8", "int8", 8),
            ("U16", "uint16", 16),
            ("I16", "int16", 16),
            ("U32", "uint32", 32),
            ("I32", "int32", 32),
            ("U64", "uint64", 64),
            ("I64", "int64", 64),
            ("F16", "float16", 16),
            ("BF16", "bfloat16", 16),
            ("F32", "float32", 32),
            ("F64", "float64", 64),
            ("C64", "complex64", 64),
            ("F8_E4M3", "float8_e4m3fn", 8),
            ("F8_E5M2", "float8_e5m2", 8),
            ("F8_E8M0", "float8_e8m0fnu", 8),
            ("F8_E4M3FNUZ", "float8_e4m3fnuz", 8),
            ("F8_E5M2FNUZ", "float8_e5m2fnuz", 8),
            ("F6_E2M3", "float6_e2m3fn", 6),
            ("F6_E3M2", "float6_e3m2fn", 6),
            ("F4", "float4_e2m1fn", 4),
        )
    }
)
#: Array name -> dtype, for those that an array of whole bytes an element can hold.
ARRAY_DTYPES: Mapping[str, FileDtype] = MappingProxyType(
    {dtype.name: dtype for dtype in FILE_DTYPES.values() if dtype.bits >= 8}
)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file, known without its bytes.

    ``shape`` is logical and logical axis ``i`` is stored axis ``axes[i]``; ``nbytes`` counts
    everything that the file stores of it. A float tensor has a ``dtype`` (an array name such as
    "bfloat16") and no ``scheme``; a quantized one the reverse.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    scheme: QuantScheme | None
    nbytes: int
    axes: tuple[int, ...]

    @property
    def bits_per_element(self) -> float:
        """Stored bits, scales and all, over the number of elements (0 of an empty tensor)."""
        size = math.prod(self.shape)
        return 8 * self.nbytes / size if size else 0.0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the order of the stored axes."""
        return stored_shape(self.shape, self.axes)

    @classmethod
    def plain(cls, name: str, shape: Sequence[int], dtype: str) -> TensorInfo:
        """Plan an array of a dtype ("float32", "bfloat16", ...). Raises UnsupportedDtype."""
        facts = array_dtype(dtype, f"Tensor {name!r} of a file")
        nbytes = math.prod(shape) * facts.bits // 8
        return cls(name, tuple(shape), dtype, None, nbytes, tuple(range(len(shape))))

    @classmethod
    def quantized(
        cls,
        name: str,
        shape: Sequence[int],
        scheme: QuantScheme,
        axes: Sequence[int] | None = None,
    ) -> TensorInfo:
        """Plan a quantized tensor not yet made. Raises InvalidAxes, InvalidArgument, BlockRank."""
        order = tuple(range(len(shape))) if axes is None else tuple(axes)
        check_description(scheme, shape, order)
        nbytes = data_size_bytes(scheme, stored_shape(shape, order))
        return cls(name, tuple(shape), None, scheme, nbytes, order)

    @classmethod
    def of(cls, name: str, tensor: Array | QTensor) -> TensorInfo:
        """What a file would say of it. Raises NotAnArray, UnsupportedArray, UnsupportedDtype."""
        if isinstance(tensor, QTensor):
            return cls.quantized(name, tensor.shape, tensor.scheme, tensor.axes)
        owner = backend_of(tensor, f"Tensor {name!r} of a file")
        if owner.is_traced(tensor):
            fix = "Save outside of the traced function, or make it on a device that holds values"
            got = "traced, or on no device, and so has none"
            raise UnsupportedArray(role=f"Tensor {name!r} of a file", got=got, fix=fix)
        return cls.plain(name, tuple(tensor.shape), dtype_name(tensor))


def array_dtype(name: str, what: str) -> FileDtype:
    """The file dtype of an array dtype's name. Raises UnsupportedDtype."""
    if name not in ARRAY_DTYPES:
        raise UnsupportedDtype(what=what, dtype=name, known=", ".join(ARRAY_DTYPES))
    return ARRAY_DTYPES[name]
