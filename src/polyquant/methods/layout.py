"""Layout methods: exact views of the same numbers in other places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeVar, cast

from polyquant.methods.door import operations

_Tensor = TypeVar("_Tensor")


class LayoutMethods:
    """Reshape, permute, slice, gather, ...: each gives exactly what it gives of the values.

    What a call costs, what it does to blocks and what it raises: see views/.
    """

    __slots__ = ()

    _turned: Any

    def canonical(self) -> Self:
        """Exactly the same numbers under a scheme without ``extras``, which every kernel knows."""
        return _call(self, "canonical")

    # -- axes ---------------------------------------------------------------------------------

    def reshape(self, *shape: int | Sequence[int]) -> Self:
        """The same elements in the same order: ``reshape(2, -1)`` or ``reshape((2, -1))``."""
        return _call(self, "reshape", _one_or_several(shape))

    def permute(self, *axes: int | Sequence[int]) -> Self:
        """The axes in another order, ``permute(1, 0)`` or ``permute((1, 0))``: always a view."""
        return _call(self, "permute", _one_or_several(axes))

    def transpose(self, *axes: int | Sequence[int] | None) -> Self:
        """``permute``; without axes all of them in reverse order. Always a view."""
        return _call(self, "transpose", _one_or_several(axes) if axes else None)

    @property
    def T(self) -> Self:
        """All axes in reverse order: a view."""
        return _call(self, "transpose")

    @property
    def mT(self) -> Self:
        """The last two axes exchanged: a view, and the same one each time."""
        if self._turned is None:  # `x @ q.mT` asks at every product
            object.__setattr__(self, "_turned", _call(self, "swapaxes", -1, -2))
        return cast(Self, self._turned)

    def swapaxes(self, axis1: int, axis2: int) -> Self:
        """Two axes exchanged: a view."""
        return _call(self, "swapaxes", axis1, axis2)

    def moveaxis(self, source: Any, destination: Any) -> Self:
        """Axes moved to other places: a view."""
        return _call(self, "moveaxis", source, destination)

    def squeeze(self, axis: Any = None) -> Self:
        """Without axes of extent 1: those named, or all."""
        return _call(self, "squeeze", axis)

    def unsqueeze(self, axis: int) -> Self:
        """With a new axis of extent 1: a view."""
        return _call(self, "unsqueeze", axis)

    def expand(self, *shape: int | Sequence[int]) -> Self:
        """Broadcast to a shape; -1 keeps an extent."""
        return _call(self, "expand", _one_or_several(shape))

    # -- parts --------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Self:
        return _call(self, "index", key)

    def __iter__(self) -> Iterator[Self]:
        # An explicit iterator: without it Python would ask for q[0], q[1], ... until an error.
        return (self[row] for row in range(len(cast(Any, self))))

    def narrow(self, axis: int, start: int, length: int) -> Self:
        """``length`` entries of an axis from ``start`` on."""
        return _call(self, "narrow", axis, start, length)

    def chunk(self, chunks: int, axis: int = 0) -> tuple[Self, ...]:
        """At most ``chunks`` equal parts along an axis."""
        return cast(tuple[Self, ...], _call(self, "chunk", chunks, axis))

    def split(self, sizes: int | Sequence[int], axis: int = 0) -> tuple[Self, ...]:
        """Parts of a size, or of several sizes, along an axis."""
        return cast(tuple[Self, ...], _call(self, "split", sizes, axis))

    def take(self, indices: Any, axis: int) -> Self:
        """The entries of an axis at integer indices."""
        return _call(self, "take", indices, axis)

    def select(self, axis: int, indices: Any) -> Self:
        """``take`` with its arguments in another order."""
        return _call(self, "select", axis, indices)

    def gather(self, indices: Any, axis: int) -> Self:
        """Entry by entry along an axis (torch.gather, numpy.take_along_axis)."""
        return _call(self, "gather", indices, axis)

    # -- more of the same ---------------------------------------------------------------------

    def flip(self, axis: Any = None) -> Self:
        """The order reversed along the named axes, or along all."""
        return _call(self, "flip", axis)

    def repeat(self, repeats: int | Sequence[int], axis: int) -> Self:
        """Every entry of an axis several times (numpy.repeat)."""
        return _call(self, "repeat", repeats, axis)

    def tile(self, reps: int | Sequence[int]) -> Self:
        """The whole tensor beside itself several times (numpy.tile)."""
        return _call(self, "tile", reps)


def _call(tensor: _Tensor, name: str, *args: Any) -> _Tensor:
    return cast(_Tensor, getattr(operations(), name)(tensor, *args))


def _one_or_several(given: tuple[Any, ...]) -> Any:
    """``f(1, 2)`` and ``f((1, 2))`` are the same call."""
    return given[0] if len(given) == 1 else given
