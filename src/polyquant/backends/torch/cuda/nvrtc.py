"""Kernels in CUDA C++ loaded on torch's devices, and launched on its stream."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver

from polyquant.backends.native.compiled import compiled as compiled_part
from polyquant.backends.nvidia import Gpu
from polyquant.backends.nvidia.compiling import answer_of, compiled, fail


class Function(NamedTuple):
    """A kernel loaded on one device: its handle, and the threads and shared memory of a block.
    ``can_be_early``: the GPU can begin it while the kernel before it still runs."""

    handle: int
    threads: int
    shared_bytes: int
    device: int
    can_be_early: bool


@lru_cache(maxsize=512)
def load(
    sources: tuple[str, ...],
    name: str,
    options: tuple[str, ...],
    threads: int,
    shared_bytes: int,
    device: int,
    before: str = "",
) -> Function:
    """The kernel ``name`` of source files of ``backends.nvidia``, compiled with ``-D`` options.

    ``before`` is more source, which stands before them.

    Raises BackendMissing with the compiler's words where it fails.
    """
    capability = torch.cuda.get_device_capability(device)
    cubin = compiled(sources, options, capability, before)
    with torch.cuda.device(device), _also_in_a_graph():
        _enter(device)
        module = answer_of(driver.cuModuleLoadData(cubin))
        handle = answer_of(driver.cuModuleGetFunction(module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        answer_of(driver.cuFuncSetAttribute(handle, attribute, shared_bytes))
    return Function(int(handle), threads, shared_bytes, device, capability >= (9, 0))


@contextmanager
def _also_in_a_graph() -> Iterator[None]:
    """Loading is allowed while this thread, or another one, puts launches into a CUDA graph."""
    exchange = driver.cuThreadExchangeStreamCaptureMode
    before = answer_of(exchange(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        answer_of(exchange(before))


@lru_cache(maxsize=64)
def gpu_of(device: int) -> Gpu:
    """What plans ask of a device."""
    found = torch.cuda.get_device_properties(device)
    capability = torch.cuda.get_device_capability(device)
    shared, processors = found.shared_memory_per_block_optin, found.multi_processor_count
    return Gpu(found.name, capability, shared, processors)


def launch(
    function: Function,
    grid: tuple[int, int, int],
    argument: ctypes.Structure,
    waited: set[int] | None = None,
) -> None:
    """Run a kernel of one by-value argument on the current stream. Raises BackendMissing.

    A grid's last extent is that of a cluster. ``waited``: the kernel reads a weight before it waits
    for the one before it, and these are the streams on which a product of it waited for all that
    came before; on others this one does. The argument's field ``early`` says which it was.
    """
    handle, threads, shared, device, early = function
    stream = _stream_of(device)
    if waited is None:
        early = False
    elif not _is_complete(waited, stream):
        early = argument.early = False
    else:
        argument.early = True
    given = (handle, ctypes.addressof(argument), *grid, threads, shared, stream, early)
    status = _enqueue(*given)
    if not status:
        return
    if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        _enter(device)
        status = _enqueue(*given)
    if status:
        fail(str(driver.CUresult(status)))


def _is_complete(waited: set[int], stream: int) -> bool:
    """Whether nothing on a stream writes a weight any more; notes that a product of it waits now.

    A graph follows what was multiplied before it was captured.
    """
    if stream in waited:
        return True
    if torch.cuda.is_current_stream_capturing():
        return bool(waited)
    waited.add(stream)
    return False


#: Through the driver's Python binding a launch takes five times as long.
_enqueue = compiled_part().enqueue_cuda
#: The handle of torch's current stream of a device. (``torch.cuda.current_stream`` takes ten times
#: as long, and a launch asks each time.)
_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)


@lru_cache(maxsize=4096)
def tiles_of_array(
    address: int, shape: tuple[int, int, int], strides: tuple[int, int], rows: int
) -> Any:
    """How a kernel copies tiles of 64 values of ``rows`` lines of a bf16 array by itself (a
    CUtensorMap, 128 bytes, with the 128-byte swizzle).

    ``strides``: of the first two axes in elements, whole eights; that of the last is 1.
    """
    steps, box = (2 * strides[1], 2 * strides[0]), (64, rows, 1)
    kind = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    return _tensor_map(kind, address, shape[::-1], steps, box)


@lru_cache(maxsize=4096)
def tiles_of_lines(address: int, shape: tuple[int, int], stride: int, tile: tuple[int, int]) -> Any:
    """How a kernel copies tiles of lines of bytes by itself (a CUtensorMap, 128 bytes), with the
    swizzle of a tile's width.

    ``shape``: lines, and bytes of each; ``stride``: bytes between them, whole 16. ``tile``: lines
    and bytes of one, of 32, 64 or 128.
    """
    kind = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8
    return _tensor_map(kind, address, shape[::-1], (stride,), tile[::-1], f"{tile[1]}B")


def _tensor_map(
    kind: Any,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: str = "128B",
) -> Any:
    """The last axis first; ``strides`` in bytes, of all axes but that."""
    given = (
        kind,
        len(shape),
        address,
        [driver.cuuint64_t(extent) for extent in shape],
        [driver.cuuint64_t(each) for each in strides],
        [driver.cuuint32_t(each) for each in box],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    answer = driver.cuTensorMapEncodeTiled(*given)
    if answer[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        _enter(torch.cuda.current_device())
        answer = driver.cuTensorMapEncodeTiled(*given)
    made = answer_of(answer)
    return (ctypes.c_uint8 * 128).from_buffer_copy(ctypes.string_at(made.getPtr(), 128))


@cache
def _context(device: int) -> Any:
    """A device's primary context, which torch uses too; it is kept for as long as the process."""
    return answer_of(driver.cuDevicePrimaryCtxRetain(device))


def _enter(device: int) -> None:
    """Make the context current: a thread that has only asked torch so far has none."""
    answer_of(driver.cuCtxSetCurrent(_context(device)))
