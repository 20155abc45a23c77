"""CUDA C++ for NVIDIA GPUs, compiled at run time for whichever library asks: the sources."""

from pathlib import Path

#: Where the sources lie.
SOURCES = Path(__file__).parent
