"""The door to the operations, which are built on the tensor and so are imported late."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


@cache
def operations() -> ModuleType:
    """The package of operations."""
    from polyquant import ops

    return ops
