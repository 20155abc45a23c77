"""CUDA C++ for NVIDIA GPUs, for whichever library asks: sources, how they are compiled, and plans.

No file here imports an array library: dtypes go by polyquant's names.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

#: Where the sources lie.
SOURCES = Path(__file__).parent


class Gpu(NamedTuple):
    """What is asked of a GPU: its name and compute capability, the bytes of shared memory that a
    block of threads can have, and its multiprocessors."""

    name: str
    capability: tuple[int, int]
    shared_bytes: int
    processors: int


def why_no_compiler() -> str | None:
    """Why NVRTC cannot be loaded, or compiles for newer drivers than this machine's."""
    if find_spec("cuda") is None or find_spec("cuda.bindings.nvrtc") is None:
        return "cuda-bindings is not installed"
    from cuda.bindings import driver, nvrtc

    try:
        (_, *of_compiler), (_, of_driver) = nvrtc.nvrtcVersion(), driver.cuDriverGetVersion()
    except RuntimeError as error:
        said = (str(error).splitlines() or ["no reason given"])[0]
        return f"NVRTC or the driver is not found ({said})"
    made, here = of_compiler[0], of_driver // 1000
    if made > here:
        return f"its compiler is CUDA {made}'s, and the driver here CUDA {here}'s"
    return None
