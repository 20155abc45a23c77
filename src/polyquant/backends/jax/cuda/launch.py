"""CUDA kernels in XLA's programs: a custom call whose attributes say what is launched.

The handler is compiled (native/cuda_launch.cpp). A program names a kernel by a digest of what it
is compiled of: machine code stays in the process that traced it, and no other can run instead.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np

from polyquant.backends.jax import handlers
from polyquant.backends.jax.cuda import capability_of
from polyquant.backends.nvidia import SOURCES, Gpu
from polyquant.backends.nvidia.planning import Code, Doubly, Operands, Plan, Tiled

_TARGET = "polyquant_cuda_launch"
#: What plans are made for where JAX sees no GPU: they are lowered, and cannot run.
_ABSENT = Gpu("NVIDIA H200", (9, 0), 227 << 10, 132)
_BYTES_OF_BF16 = 2


@cache
def gpu_here() -> Gpu:
    """What plans ask of the GPUs that JAX sees, which are of one kind."""
    found = next((device for device in jax.devices() if device.platform == "gpu"), None)
    if found is None:
        return _ABSENT
    from polyquant.backends.nvidia.compiling import gpu_of

    return gpu_of(found.local_hardware_id, found.device_kind, capability_of(found))


def _native() -> Any:
    """The compiled part, known to XLA as the handler of these calls."""
    return handlers.native(_TARGET, "cuda_launch", "CUDA", ("initialize", "execute"))


@lru_cache(maxsize=4096)
def _kernel(code: Code, capability: tuple[int, int], argument: int) -> str:
    """The digest of a kernel, which is compiled and kept where there is a GPU to run it."""
    said = repr((code, capability, argument)).encode()
    files = ((SOURCES / each).read_bytes() for each in code.sources)
    digest = hashlib.sha256(b"\0".join((said, *files))).hexdigest()
    if gpu_here() is not _ABSENT:
        from polyquant.backends.nvidia.compiling import compiled

        cubin = compiled(code.sources, code.options, capability, code.before)
        _native().keep_cuda_kernel(digest, cubin, "matmul", argument)
    return digest


def launch(
    plan: Plan,
    operands: Operands,
    arrays: dict[str, Any],
    extents: tuple[int, int, int],
    out: jax.ShapeDtypeStruct,
) -> Any:
    """The result of a product's kernel. ``arrays``: by the names of the argument's addresses, x and
    those that there are; ``extents``: of x, products of the batch first."""
    argument: ctypes.Structure = operands
    begin, names, mapped = 0, [*arrays, "y"], {}
    if plan.map_rows:
        mapped["x"] = (extents, plan.map_rows)
    if plan.map_lines:  # pairs of codes
        mapped["codes"] = ((1, operands.n, operands.code_line // _BYTES_OF_BF16), plan.map_lines)
    kind = Doubly if plan.map_lines else Tiled
    if mapped:
        rooms = ((ctypes.c_uint8 * 128)() for _ in mapped)
        argument, begin = kind(*rooms, operands, *plan.blocks), kind.operands.offset
    maps = [
        (getattr(kind, name).offset, names.index(name), *_tiles(*given))
        for name, given in mapped.items()
    ]
    places = [
        (begin + getattr(Operands, name).offset, number)
        for number, name in enumerate(names)
        if name not in mapped
    ]
    size = ctypes.sizeof(argument)
    capability = gpu_here().capability
    call = jax.ffi.ffi_call(_TARGET, out)
    return call(
        *arrays.values(),
        kernel=_kernel(plan.code, capability, size),
        launch=_numbers((*plan.grid, *plan.cluster, plan.threads, plan.shared_bytes)),
        argument=np.frombuffer(bytes(argument), np.int64),
        places=_numbers([each for pair in places for each in pair]),
        maps=_numbers([each for numbers in maps for each in numbers]),
    )


def _tiles(extents: tuple[int, int, int], rows: int) -> tuple[int, ...]:
    """How tiles of so many rows are copied of an array of bf16: its extents from the last on, bytes
    between lines of the others, and the rows."""
    line = _BYTES_OF_BF16 * extents[2]
    return *reversed(extents), line, line * extents[1], rows


def _numbers(given: Sequence[int]) -> Any:
    return np.array(given, np.int64)
