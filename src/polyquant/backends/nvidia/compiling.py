"""CUDA C++ compiled at run time for a GPU, by NVRTC."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

from cuda.bindings import driver, nvrtc

from polyquant.backends.nvidia import SOURCES, Gpu, cache
from polyquant.errors import BackendMissing


@lru_cache(maxsize=512)
def compiled(
    sources: tuple[str, ...],
    options: tuple[str, ...],
    capability: tuple[int, int],
    before: str = "",
) -> bytes:
    """Source files of this folder as machine code (a cubin), compiled with ``-D`` options, now or
    in an earlier process.

    ``before`` is more source, which stands before them. Raises BackendMissing with the compiler's
    words where it fails.
    """
    source = sources[-1]
    text = b"".join([before.encode(), *((SOURCES / each).read_bytes() for each in sources)])
    own = "a" if capability == (9, 0) else ""  # Hopper's own instructions, wgmma among them
    target = f"--gpu-architecture=sm_{capability[0]}{capability[1]}{own}"
    flags = [target, "--std=c++17", "-default-device", *(f"-D{each}" for each in options)]
    major, minor = _version()
    parts = (b"NVRTC %d.%d" % (major, minor), *(flag.encode() for flag in flags), text)
    return cache.kept(parts, lambda: _compile(text, source, flags))


@lru_cache(maxsize=1)
def _version() -> tuple[int, int]:
    status, major, minor = nvrtc.nvrtcVersion()
    answer_of((status,))
    return major, minor


def _compile(text: bytes, source: str, flags: list[str]) -> bytes:
    program = answer_of(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []))
    try:
        given = [flag.encode() for flag in flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * answer_of(nvrtc.nvrtcGetProgramLogSize(program))
            answer_of(nvrtc.nvrtcGetProgramLog(program, log))
            # The log is a C string, and may quote what is no text.
            fail(f"{source} {' '.join(flags)}: {log.rstrip(bytes(1)).decode(errors='replace')}")
        cubin: bytes = b" " * answer_of(nvrtc.nvrtcGetCUBINSize(program))
        answer_of(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def gpu_of(device: int, name: str, capability: tuple[int, int]) -> Gpu:
    """What plans ask of a GPU, by its number in this process."""
    place, kinds = answer_of(driver.cuDeviceGet(device)), driver.CUdevice_attribute
    asked = (
        kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    )
    found = (int(answer_of(driver.cuDeviceGetAttribute(kind, place))) for kind in asked)
    return Gpu(name, capability, *found)


def answer_of(answer: tuple[Any, ...]) -> Any:
    """What a call answered besides its status. Raises BackendMissing for any but success."""
    status, *found = answer
    if status.value != 0:
        fail(str(status))
    return found[0] if found else None


def fail(reason: str) -> NoReturn:
    """Raises BackendMissing."""
    fix = "Name another kernel of pq.explain's list meanwhile, and report this"
    raise BackendMissing(backend="NVRTC", reason=reason, fix=fix)
