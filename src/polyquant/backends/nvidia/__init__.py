"""CUDA C++ for NVIDIA GPUs, for whichever library asks: sources, how they are compiled, and plans.

No file here imports an array library: dtypes go by polyquant's names.
"""

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
