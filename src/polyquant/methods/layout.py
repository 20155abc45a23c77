"""Layout methods: exact views of the same numbers in other places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from polyquant.methods.door import operations

if TYPE_CHECKING:
    from polyquant.qtensor import QTensor


class LayoutMethods:
    """Reshape, permute, slice, gather, ...: each gives exactly what it gives of the values.

    What a call costs, what it does to blocks and what it raises: see views/.
    """

    __slots__ = ()

    # -- axes ---------------------------------------------------------------------------------

    def reshape(self, *shape: int | Sequence[int]) -> QTensor:
        """The same elements in the same order: ``reshape(2, -1)`` or ``reshape((2, -1))``."""
        return _call("reshape", self, _one_or_several(shape))

    def permute(self, *axes: int | Sequence[int]) -> QTensor:
        """The axes in another order, ``permute(1, 0)`` or ``permute((1, 0))``: always a view."""
        return _call("permute", self, _one_or_several(axes))

    def transpose(self, *axes: int | Sequence[int] | None) -> QTensor:
        """``permute``; without axes all of them in reverse order. Always a view."""
        return _call("transpose", self, _one_or_several(axes) if axes else None)

    @property
    def T(self) -> QTensor:
        """All axes in reverse order: a view."""
        return _call("transpose", self)

    @property
    def mT(self) -> QTensor:
        """The last two axes exchanged: a view."""
        return _call("swapaxes", self, -1, -2)

    def swapaxes(self, axis1: int, axis2: int) -> QTensor:
        """Two axes exchanged: a view."""
        return _call("swapaxes", self, axis1, axis2)

    def moveaxis(self, source: Any, destination: Any) -> QTensor:
        """Axes moved to other places: a view."""
        return _call("moveaxis", self, source, destination)

    def squeeze(self, axis: Any = None) -> QTensor:
        """Without axes of extent 1: those named, or all."""
        return _call("squeeze", self, axis)

    def unsqueeze(self, axis: int) -> QTensor:
        """With a new axis of extent 1: a view."""
        return _call("unsqueeze", self, axis)

    def expand(self, *shape: int | Sequence[int]) -> QTensor:
        """Broadcast to a shape; -1 keeps an extent."""
        return _call("expand", self, _one_or_several(shape))

    # -- parts --------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> QTensor:
        return _call("index", self, key)

    def __iter__(self) -> Iterator[QTensor]:
        # An explicit iterator: without it Python would ask for q[0], q[1], ... until an error.
        return (self[row] for row in range(len(cast(Any, self))))

    def narrow(self, axis: int, start: int, length: int) -> QTensor:
        """``length`` entries of an axis from ``start`` on."""
        return _call("narrow", self, axis, start, length)

    def chunk(self, chunks: int, axis: int = 0) -> tuple[QTensor, ...]:
        """At most ``chunks`` equal parts along an axis."""
        return cast("tuple[QTensor, ...]", _call("chunk", self, chunks, axis))

    def split(self, sizes: int | Sequence[int], axis: int = 0) -> tuple[QTensor, ...]:
        """Parts of a size, or of several sizes, along an axis."""
        return cast("tuple[QTensor, ...]", _call("split", self, sizes, axis))

    def take(self, indices: Any, axis: int) -> QTensor:
        """The entries of an axis at integer indices."""
        return _call("take", self, indices, axis)

    def select(self, axis: int, indices: Any) -> QTensor:
        """``take`` with its arguments in another order."""
        return _call("select", self, axis, indices)

    def gather(self, indices: Any, axis: int) -> QTensor:
        """Entry by entry along an axis (torch.gather, numpy.take_along_axis)."""
        return _call("gather", self, indices, axis)

    # -- more of the same ---------------------------------------------------------------------

    def flip(self, axis: Any = None) -> QTensor:
        """The order reversed along the named axes, or along all."""
        return _call("flip", self, axis)

    def repeat(self, repeats: int | Sequence[int], axis: int) -> QTensor:
        """Every entry of an axis several times (numpy.repeat)."""
        return _call("repeat", self, repeats, axis)

    def tile(self, reps: int | Sequence[int]) -> QTensor:
        """The whole tensor beside itself several times (numpy.tile)."""
        return _call("tile", self, reps)


def _call(name: str, *args: Any) -> QTensor:
    return cast("QTensor", getattr(operations(), name)(*args))


def _one_or_several(given: tuple[Any, ...]) -> Any:
    """``f(1, 2)`` and ``f((1, 2))`` are the same call."""
    return given[0] if len(given) == 1 else given
