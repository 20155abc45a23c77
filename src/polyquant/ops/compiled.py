"""The door to what torch.compile reads instead of an operation.

It reads Python, and knows torch's ops, not how a kernel is chosen. What it reads is built on the
operations, and so is imported late.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def is_compiling() -> bool:
    """Whether this very call is being read by torch.compile (or a strict torch.export), not run."""
    compiler = sys.modules.get("torch.compiler")
    return compiler is not None and compiler.is_dynamo_compiling()


def compiled() -> ModuleType:
    """The operations as they read them."""
    from polyquant.torch import compiled

    return compiled
