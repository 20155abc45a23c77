"""The door to the operations, which are built on the tensor and so are imported late."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def operations() -> ModuleType:
    """The package of operations. (No cache around it: torch.compile warns of those.)"""
    found = sys.modules.get("polyquant.ops")
    if found is None:
        from polyquant import ops

        found = ops
    return found
