"""CUDA C++ compiled at run time for the GPU at hand, and launched on torch's stream."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from cuda.bindings import driver, nvrtc

from polyquant.errors import BackendMissing


class Function(NamedTuple):
    """A kernel loaded on one device: its handle, and the threads and shared memory of a block."""

    handle: Any
    threads: int
    shared_bytes: int


@lru_cache(maxsize=512)
def load(
    source: str, name: str, options: tuple[str, ...], threads: int, shared_bytes: int, device: int
) -> Function:
    """The kernel ``name`` of a source file beside this one, compiled with ``-D`` options.

    Raises BackendMissing with the compiler's words where it fails.
    """
    cubin = _compile(source, options, torch.cuda.get_device_capability(device))
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # a context must be there
        module = _ask(driver.cuModuleLoadData(cubin))
        handle = _ask(driver.cuModuleGetFunction(module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _ask(driver.cuFuncSetAttribute(handle, attribute, shared_bytes))
    return Function(handle, threads, shared_bytes)


@lru_cache(maxsize=512)
def _compile(source: str, options: tuple[str, ...], capability: tuple[int, int]) -> bytes:
    text = (Path(__file__).parent / source).read_bytes()
    target = f"--gpu-architecture=sm_{capability[0]}{capability[1]}"
    flags = [target, "--std=c++17", "-default-device", *(f"-D{each}" for each in options)]
    program = _ask(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _ask(nvrtc.nvrtcGetProgramLogSize(program))
        _ask(nvrtc.nvrtcGetProgramLog(program, log))
        _fail(f"{source} {' '.join(flags)}: {log.decode()}")
    cubin: bytes = b" " * _ask(nvrtc.nvrtcGetCUBINSize(program))
    _ask(nvrtc.nvrtcGetCUBIN(program, cubin))
    _ask(nvrtc.nvrtcDestroyProgram(program))
    return cubin


def launch(function: Function, grid: tuple[int, int], argument: ctypes.Structure) -> None:
    """Run a kernel of one by-value argument on the current stream. Raises BackendMissing."""
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    stream = torch.cuda.current_stream().cuda_stream
    found = driver.cuLaunchKernel(
        function.handle,
        grid[0],
        grid[1],
        1,
        function.threads,
        1,
        1,
        function.shared_bytes,
        stream,
        ctypes.addressof(pointers),
        0,
    )
    if found[0] != 0:
        _ask(found)


def _ask(answer: tuple[Any, ...]) -> Any:
    """What a call answered besides its status. Raises BackendMissing for any but success."""
    status, *found = answer
    if status.value != 0:
        _fail(str(status))
    return found[0] if found else None


def _fail(reason: str) -> NoReturn:
    fix = "Use kernel='torch.triton.cublas' meanwhile, and report this"
    raise BackendMissing(backend="NVRTC", reason=reason, fix=fix)
