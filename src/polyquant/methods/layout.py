"""Layout methods: exact views of the same numbers in other places."""

from __future__ import annotations


class LayoutMethods:
    """Reshape, permute, slice, gather, ...: see views/."""

    __slots__ = ()
