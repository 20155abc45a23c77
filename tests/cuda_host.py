"""CUDA C++ on the CPU: in NVRTC's place the compiler of the host, and cuda_host.h for the rest.

Its ``load`` and ``launch`` are those of ``polyquant.backends.torch.cuda.nvrtc``. ``ptx.cuh``, which
is in the processor's own language, is in cuda_host.h in plain C++.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CUDA = HERE.parent / "src/polyquant/backends/nvidia"
COMPILER = next((found for name in (os.environ.get("CXX"), "c++", "g++", "clang++")
                 if name and (found := shutil.which(name))), None)  # fmt: skip
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@cache
def load(
    sources: tuple[str, ...], name: str, options: tuple[str, ...], threads: int, *rest: Any
) -> Any:
    """The kernel ``name``, to be called with the address of its argument and a number of blocks."""
    text = [f"#define {option.replace('=', ' ', 1)}" for option in options]
    text += [f'#include "{HERE / "cuda_host.h"}"']
    text += [f'#include "{CUDA / source}"' for source in sources if source != "ptx.cuh"]
    call = f"launch<decltype(&{name}), Operands>({name}, operands, blocks, {threads})"
    text += [f'extern "C" bool run(const void* operands, u32 blocks) {{ return {call}; }}\n']
    folder = Path(_temporary().name)
    library = folder / f"{len(list(folder.iterdir()))}.so"
    flags = ("-std=c++17", "-O0", "-w", "-ffp-contract=off", "-shared", "-fPIC", "-x", "c++")
    command = (str(COMPILER), *flags, "-", "-o", str(library))
    subprocess.run(command, input="\n".join(text).encode(), check=True)
    function = ctypes.CDLL(str(library)).run
    function.restype = ctypes.c_bool
    return function


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuda_host")


def launch(function: Any, grid: tuple[int, int, int], argument: ctypes.Structure, **_: Any) -> None:
    """Run it; all threads of a block must come to every exchange between them."""
    assert function(ctypes.byref(argument), grid[0]), "threads diverge at an exchange"
