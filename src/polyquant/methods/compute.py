"""Compute methods and Python's operators."""

from __future__ import annotations

from typing import Any

from polyquant.methods.door import operations


class ComputeMethods:
    """Arithmetic, reductions, products: see ops/."""

    __slots__ = ()

    def __matmul__(self, other: Any) -> Any:
        return operations().operator_matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return operations().operator_matmul(other, self)
