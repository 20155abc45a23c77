"""Arrays of any library: which backend owns one, and the few things that libraries do differently.

Everything else is written against the Python array API standard, through array-api-compat. A
library is recognised by the class of the array, so none is ever imported to find out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace

from polyquant.errors import BackendMissing, NotAnArray, UnknownDevice

Array = Any
HostArray = npt.NDArray[Any]

#: The role, in messages, of an array whose values are read on the host.
READ = "A tensor to be read on the host"

#: Dtypes that quantize takes and dequantize gives.
FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Backend:
    """One array library: what it answers in its own way. See backends/ for each.

    ``check`` takes an array and its role, and raises UnsupportedArray where the array holds no
    plain values (a mask, a sparse layout); so does ``to_host`` where there are none to be read.
    ``facts`` is all that dispatch may ask of an array, to remember an answer by; None where it is
    not to be remembered, or where this is no array. ``kernels`` maps a kind of device ("cpu",
    "cuda") to the modules that serve it, best first. ``functions`` are the library's own where the
    array API has none (see ops/lacking.py); what is not there runs on the host. ``is_transformed``
    says whether autograd, a tracer or vmap watches what is done with an array, here and now.
    ``is_placed`` says whether an array is on a device that is known: a tracer may not be.
    ``detach`` takes an array out of autodiff. ``num_threads`` is the library's own setting for
    products on the CPU, 0 where it has none; ``exported`` gives an array of the CPU to
    compiled code (by DLPack or the buffer protocol).
    ``any_rank`` says that take and searchsorted have indices of any rank, beyond the standard:
    flattening them would bring the shards of an array together. ``adopted`` gives an array of
    another library as one of this, on the device where it lies, without a copy (by DLPack); None
    where a host array shares the memory as well.
    """

    name: str
    is_array: Callable[[Any], bool]
    check: Callable[[Array, str], None]
    is_traced: Callable[[Array], bool]
    device_of: Callable[[Array], str]
    canonical_device: Callable[[str], str]
    devices: Callable[[], tuple[str, ...]]
    to_host: Callable[[Array], HostArray]
    from_host: Callable[[HostArray, str], Array]
    move: Callable[[Array, str], Array]
    facts: Callable[[Array], Hashable]
    kernels: Mapping[str, tuple[str, ...]]
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    is_transformed: Callable[[Array], bool] = lambda array: False
    is_placed: Callable[[Array], bool] = lambda array: True
    detach: Callable[[Array], Array] = lambda array: array
    num_threads: Callable[[], int] = lambda: 0
    exported: Callable[[Array], Any] = lambda array: array
    any_rank: bool = False
    adopted: Callable[[Array], Array | None] | None = None


#: Backend -> its module. A new backend is one line here and one file.
BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "numpy": "polyquant.backends.numpy",
        "torch": "polyquant.backends.torch",
        "jax": "polyquant.backends.jax",
    }
)
#: Top-level module of an array's class -> backend.
_OWNERS = MappingProxyType({"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax"})
#: What serves the arrays of a library that has no line above but follows the standard.
_STANDARD = "polyquant.backends.standard"


@cache
def backend(name: str) -> Backend:
    """The backend of that name. Raises UnknownDevice, or BackendMissing when it cannot be used."""
    if name not in BACKENDS:
        raise UnknownDevice(
            device=name, reason="it begins with no backend's name", known=", ".join(BACKENDS)
        )
    try:
        module = import_module(BACKENDS[name])
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # absent, or broken
        raise BackendMissing(
            backend=name, reason=str(error), fix=f"Run: pip install 'polyquant[{name}]'"
        ) from error
    found: Backend = module.BACKEND
    return found


def backend_of(array: Array, role: str = "The operand") -> Backend:
    """The backend whose array this is. Raises NotAnArray, UnsupportedArray."""
    found = find_backend(array)
    if found is None:
        raise NotAnArray(role=role, got=describe(array))
    found.check(array, role)
    return found


def find_backend(array: Any) -> Backend | None:
    """The backend whose array this is, or None."""
    candidate = backend_of_class(array.__class__)
    return candidate if candidate is not None and candidate.is_array(array) else None


@lru_cache(maxsize=1024)
def backend_of_class(cls: Hashable) -> Backend | None:
    """The backend of the library that a class is of; not all its classes are of arrays."""
    name = _owner(cls)
    if name is None:
        return None
    return backend(name) if name in BACKENDS else _standard(name)


def _owner(cls: Hashable) -> str | None:
    """The library of an array class: the first of its bases that a known library defines."""
    if not isinstance(cls, type):
        return None
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        if root in _OWNERS:
            return _OWNERS[root]
    if hasattr(cls, "__array_namespace__"):
        return cls.__module__.partition(".")[0]
    return None


@cache
def _standard(name: str) -> Backend:
    made: Backend = import_module(_STANDARD).make_backend(name)
    return made


def backend_of_device(device: str) -> tuple[Backend, str]:
    """The backend of a device text such as "torch:cuda:0", and the device's full name.

    Raises UnknownDevice or BackendMissing.
    """
    if not isinstance(device, str):
        raise UnknownDevice(
            device=device,
            reason="a device is a text such as 'torch:cpu'",
            known=", ".join(BACKENDS),
        )
    name = device.partition(":")[0]
    is_standard = name not in BACKENDS and hasattr(sys.modules.get(name), "__array_api_version__")
    found = _standard(name) if is_standard else backend(name)
    return found, found.canonical_device(device)


def are_one_place(first: str, second: str) -> bool:
    """Whether devices of two libraries have the same memory: "torch:cuda:1" and "jax:gpu:1"."""
    return _memory(first) == _memory(second)


def _memory(device: str) -> tuple[str, str]:
    kind, _, index = device.partition(":")[2].partition(":")
    return {"cuda": "gpu", "": "cpu"}.get(kind, kind), index or "0"


@lru_cache(maxsize=256)
def device_kind(device: str) -> str:
    """ "cuda" for "torch:cuda:0", "cpu" for "numpy": what a table of kernels is keyed by."""
    parts = device.split(":")
    return parts[1] if len(parts) > 1 else "cpu"


def namespace(array: Array) -> Any:
    """The array API namespace of an array."""
    return array_namespace(array)


def dtype_name(array: Array) -> str:
    """The name of an array's dtype without its library: "float32", "bfloat16", "uint8"."""
    return name_of_dtype(array.dtype)


@lru_cache(maxsize=256, typed=True)  # NumPy takes 8 us to spell a dtype out
def name_of_dtype(kind: Hashable) -> str:
    """The same of a dtype, or of the type of a scalar, which NumPy and JAX take for one."""
    name = getattr(kind, "name", None) or getattr(kind, "__name__", None)
    return name if isinstance(name, str) else str(kind).rpartition(".")[2]


def dtype(xp: Any, name: str) -> Any:
    """A namespace's dtype of that name.

    NumPy's bfloat16 is ml_dtypes'. A namespace without the 16-bit floats (a bare standard one)
    holds their numbers, which stay on the 16-bit grid, in float32.
    """
    found = getattr(xp, name, None)
    if found is not None:
        return found
    return np.dtype(ml_dtypes.bfloat16) if _is_numpy(xp) and name == "bfloat16" else xp.float32


def held_dtypes(xp: Any) -> tuple[str, ...]:
    """Those of FLOAT_DTYPES that a namespace really has: JAX has float64 only when told to."""
    info = getattr(xp, "__array_namespace_info__", None)
    has_f64 = info is None or "float64" in info().dtypes(kind="real floating")
    return tuple(
        name
        for name in FLOAT_DTYPES
        if (hasattr(xp, name) or _is_numpy(xp)) and (name != "float64" or has_f64)
    )


def _is_numpy(xp: Any) -> bool:
    return bool(xp.__name__.rpartition(".")[2] == "numpy" and "jax" not in xp.__name__)


def place(like: Array) -> dict[str, Any]:
    """The keywords that make a new array beside ``like``. Only torch needs to be told where."""
    return {"device": like.device} if hasattr(like, "to") and hasattr(like, "device") else {}


def constant(like: Array, values: HostArray) -> Array:
    """A small host table as an array beside ``like``: same library, same device."""
    owner = backend_of(like)
    if not owner.is_placed(like):
        return owner.from_host(values, "")
    own = owner.functions.get("beside")
    return own(values, like) if own else owner.from_host(values, owner.device_of(like))


def known(flag: Array) -> bool | None:
    """The truth of an array of one element, or None where a tracer hides it.

    Inside ``jax.jit`` what is computed of known arrays is hidden too, so results are asked.
    """
    return None if backend_of(flag).is_traced(flag) else bool(flag)


def describe(thing: Any) -> str:
    """An operand in words for messages: device, dtype and shape, or its type."""
    owner = find_backend(thing)
    if owner is None:
        module, name = type(thing).__module__, type(thing).__qualname__
        return f"of type {name}" if module == "builtins" else f"of type {module}.{name}"
    is_placed = owner.is_placed(thing)
    where = f"on {owner.device_of(thing)}" if is_placed else f"that {owner.name} traces"
    return f"a {dtype_name(thing)} array of shape {tuple(thing.shape)} {where}"
