"""Arguments that a library's function means otherwise than the operation: changed into its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Any

from polyquant.arrays import namespace
from polyquant.calls import Arguments, Before
from polyquant.errors import InvalidArgument, InvalidAxes, ShapeMismatch


def fixed(**more: Any) -> Before:
    """Arguments that the function always means."""
    return lambda called, given: given | more


def ranked(left: Sequence[int], right: Sequence[int]) -> Before:
    """A product whose operands have those numbers of axes and no others. Raises ShapeMismatch."""

    def before(called: str, given: Arguments) -> Arguments:
        sides = (("left", given.get("a"), left), ("right", given.get("b"), right))
        shapes = [tuple(getattr(operand, "shape", ())) for _, operand, _ in sides]
        for (side, operand, ranks), shape in zip(sides, shapes, strict=True):
            if hasattr(operand, "shape") and len(shape) not in ranks:
                axes = " or ".join(map(str, ranks)) if len(ranks) < 3 else "1 or more"
                reason = f"its {side} operand has {axes} axes here; matmul takes any number"
                raise ShapeMismatch(op=called, left=shapes[0], right=shapes[1], reason=reason)
        return given

    return before


def flattened(called: str, given: Arguments) -> Arguments:
    """An axis of None means all of them as one."""
    if given.get("axis", 0) is not None:
        return given
    name = "q" if "q" in given else "x"
    return given | {name: given[name].reshape((-1,)), "axis": 0}


def joined(called: str, given: Arguments) -> Arguments:
    """An axis of None joins the tensors, each of them in one line."""
    if given.get("axis", 0) is not None:
        return given
    return {"tensors": [tensor.reshape((-1,)) for tensor in given["tensors"]], "axis": 0}


def counted(called: str, given: Arguments) -> Arguments:
    """How often each entry comes, as numbers and not an array; an axis of None means all as one."""
    repeats = given["repeats"]
    given = given | {"repeats": repeats.tolist() if hasattr(repeats, "tolist") else repeats}
    return flattened(called, given)


def cuts(*, equal: bool = False) -> Before:
    """Sections, or indices to cut at, as the sizes of the pieces. Raises InvalidArgument."""

    def before(called: str, given: Arguments) -> Arguments:
        q, axis = given["q"], whole(f"The axis of {called}", given.get("axis", 0))
        if not -q.ndim <= axis < q.ndim:
            raise InvalidAxes(got=axis, rank=q.ndim, shape=tuple(q.shape))
        length = q.shape[axis]
        asked = given["cuts"]
        sizes = _sections(called, asked, length, equal=equal) if _is_one(asked) else None
        sizes = _between(called, asked, length) if sizes is None else sizes
        return {"q": q, "sizes": sizes, "axis": axis}

    return before


def whole(name: str, number: Any) -> int:
    """A whole number of any kind. Raises InvalidArgument."""
    try:
        return index(number)
    except TypeError as error:
        raise InvalidArgument(name=name, wanted="a whole number", got=number) from error


def _is_one(thing: Any) -> bool:
    return not isinstance(thing, list | tuple) and getattr(thing, "ndim", 0) == 0


def _sections(called: str, asked: Any, length: int, *, equal: bool) -> list[int]:
    name = f"The number of sections of {called}"
    count = whole(name, asked)
    if count < 1 or (equal and length % count):
        wanted = f"1 or more, and a divisor of the axis' {length} places" if equal else "1 or more"
        raise InvalidArgument(name=name, wanted=wanted, got=count)
    small, larger = divmod(length, count)
    return [small + 1] * larger + [small] * (count - larger)


def _between(called: str, asked: Any, length: int) -> list[int]:
    places = [whole(f"A place where {called} cuts", place) for place in asked]
    inside = [min(max(p + length if p < 0 else p, 0), length) for p in places]
    if inside != sorted(inside):
        name = f"The places where {called} cuts"
        raise InvalidArgument(name=name, wanted="in ascending order", got=places)
    return [stop - start for start, stop in pairwise([0, *inside, length])]


def along(called: str, given: Arguments) -> Arguments:
    """Tensor and indices broadcast against each other, save along the axis. Raises ShapeMismatch.

    (The operation, like torch.gather, takes fewer indices than places and broadcasts nothing.)
    """
    given = flattened(called, given)
    q, indices, axis = given["q"], given["indices"], whole(f"The axis of {called}", given["axis"])
    if not hasattr(indices, "shape"):
        return given
    left, right = tuple(q.shape), tuple(indices.shape)
    if len(left) != len(right):
        reason = "the indices need as many axes as the tensor"
        raise ShapeMismatch(op=called, left=left, right=right, reason=reason)
    for place, (x, y) in enumerate(zip(left, right, strict=True)):
        if place == axis % len(left) or x == y:
            continue
        if 1 not in (x, y):
            reason = f"the extents {x} and {y} do not broadcast"
            raise ShapeMismatch(op=called, left=left, right=right, reason=reason)
        if x == 1:
            q = q.expand((*q.shape[:place], y, *q.shape[place + 1 :]))
        else:
            wide = (*indices.shape[:place], x, *indices.shape[place + 1 :])
            indices = namespace(indices).broadcast_to(indices, wide)
    return {"q": q, "indices": indices, "axis": axis}


def only_axis(called: str, given: Arguments) -> Arguments:
    """An axis of None is the only one there is. Raises InvalidArgument where there are more."""
    x, axis = given["x"], given["axis"]
    if axis is None and x.ndim != 1:
        wanted = f"given for a tensor of {x.ndim} axes"
        raise InvalidArgument(name=f"The axis of {called}", wanted=wanted, got=axis)
    return given | {"axis": 0 if axis is None else axis}
