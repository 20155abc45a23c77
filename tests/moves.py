"""Layout operations with arguments that fit a shape, each twice: of a QTensor, and of an array.

A maker takes a shape and ``pick``, where ``pick(n)`` is a number from 0 to n - 1: Hypothesis
draws it in one test, a seed gives it in another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import polyquant as pq
from polyquant import ops

Host = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Pick = Callable[[int], int]

#: Results stay below it, so that a chain of them does.
LIMIT = 4000


class Move(NamedTuple):
    """What is called, in words; the call of a QTensor; the same of a NumPy array."""

    words: str
    ours: Callable[[pq.QTensor], pq.QTensor]
    numpy: Callable[[Host], Host]


def seeded(seed: int) -> Pick:
    """Numbers from a seed."""
    rng = np.random.default_rng(seed)
    return lambda n: int(rng.integers(n))


def _axis(shape: Shape, pick: Pick) -> int:
    """An axis, counted from either end."""
    return pick(2 * len(shape)) - len(shape)


def _indices(extent: int, shape: Shape, pick: Pick) -> Host:
    """Places along an axis, from either end; none where it is empty."""
    shape = shape if extent else (*shape[:-1], 0)
    flat = [pick(2 * extent) - extent for _ in range(math.prod(shape))]
    return np.asarray(flat, np.int64).reshape(shape)


# -- axes -------------------------------------------------------------------------------------


def _permute(shape: Shape, pick: Pick) -> Move:
    left, order = list(range(len(shape))), []
    while left:
        order.append(left.pop(pick(len(left))))
    order = [a - len(shape) if pick(2) else a for a in order]
    return Move(f"permute({order})", lambda q: q.permute(order), lambda x: x.transpose(order))


def _transpose(shape: Shape, pick: Pick) -> Move:
    if len(shape) >= 2 and pick(2):
        return Move("mT", lambda q: q.mT, lambda x: np.swapaxes(x, -1, -2))
    return Move("transpose()", lambda q: q.transpose(), np.transpose)


def _swapaxes(shape: Shape, pick: Pick) -> Move:
    a, b = _axis(shape, pick), _axis(shape, pick)
    return Move(f"swapaxes({a}, {b})", lambda q: q.swapaxes(a, b), lambda x: x.swapaxes(a, b))


def _moveaxis(shape: Shape, pick: Pick) -> Move:
    a, b = _axis(shape, pick), _axis(shape, pick)
    return Move(f"moveaxis({a}, {b})", lambda q: q.moveaxis(a, b), lambda x: np.moveaxis(x, a, b))


def _squeeze(shape: Shape, pick: Pick) -> Move:
    ones = [axis for axis, extent in enumerate(shape) if extent == 1]
    if not ones or pick(2):
        return Move("squeeze()", lambda q: q.squeeze(), np.squeeze)
    axis = ones[pick(len(ones))]
    return Move(f"squeeze({axis})", lambda q: q.squeeze(axis), lambda x: x.squeeze(axis))


def _unsqueeze(shape: Shape, pick: Pick) -> Move:
    axis = pick(2 * len(shape) + 2) - len(shape) - 1
    return Move(
        f"unsqueeze({axis})", lambda q: q.unsqueeze(axis), lambda x: np.expand_dims(x, axis)
    )


# -- parts ------------------------------------------------------------------------------------


def _ends(extent: int, pick: Pick) -> slice:
    """A slice whose ends may be open, negative, or past the axis; steps either way."""

    def end() -> int | None:
        return None if not pick(3) else pick(2 * extent + 3) - extent - 1

    return slice(end(), end(), (None, 1, 2, 3, -1, -2)[pick(6)])


def _item(extent: int, pick: Pick) -> Any:
    kind = pick(8)
    if kind == 0 and extent:
        return pick(2 * extent) - extent
    if kind == 1:
        return None
    return _ends(extent, pick)


def _index(shape: Shape, pick: Pick) -> Move:
    """Slices, integers, new axes and an ellipsis, in any mixture."""
    key: list[Any] = []
    for extent in shape:
        key.append(_item(extent, pick))
        if key[-1] is None:
            key.append(_ends(extent, pick))
    if pick(3) == 0:
        cut = pick(len(key) + 1)
        key = [*key[:cut], ...]
    return _keyed(tuple(key))


def _index_list(shape: Shape, pick: Pick) -> Move:
    """One list or mask among slices."""
    axis = pick(len(shape))
    key: list[Any] = [_ends(extent, pick) for extent in shape[:axis]]
    if pick(2):
        mask = np.asarray([bool(pick(2)) for _ in range(shape[axis])], np.bool_)
        key.append(mask)
    else:
        key.append(_indices(shape[axis], (pick(4),), pick))
    return _keyed(tuple(key))


def _index_mask(shape: Shape, pick: Pick) -> Move:
    """A mask of the whole tensor, which leaves one axis."""
    rng = np.random.default_rng(pick(1000))
    return _keyed(rng.random(shape) < 0.3)


def _keyed(key: Any) -> Move:
    return Move(f"[{key}]", lambda q: q[key], lambda x: x[key])


def _narrow(shape: Shape, pick: Pick) -> Move:
    axis = _axis(shape, pick)
    start = pick(shape[axis]) if shape[axis] else 0
    length = pick(shape[axis] - start + 1)
    return Move(
        f"narrow({axis}, {start}, {length})",
        lambda q: q.narrow(axis, start, length),
        lambda x: np.take(x, np.arange(start, start + length), axis),
    )


def _chunk(shape: Shape, pick: Pick) -> Move:
    axis, chunks = _axis(shape, pick), 1 + pick(5)
    size = -(-shape[axis] // chunks)
    at = pick(max(1, -(-shape[axis] // size) if size else 1))
    return Move(
        f"chunk({chunks}, {axis})[{at}]",
        lambda q: q.chunk(chunks, axis)[at],
        lambda x: np.split(x, range(size, shape[axis], size) if size else [], axis)[at],
    )


def _split(shape: Shape, pick: Pick) -> Move:
    axis = _axis(shape, pick)
    if pick(2):
        size = 1 + pick(shape[axis] + 2)
        at = pick(max(1, -(-shape[axis] // size)))
        return Move(
            f"split({size}, {axis})[{at}]",
            lambda q: q.split(size, axis)[at],
            lambda x: np.split(x, range(size, shape[axis], size), axis)[at],
        )
    first = pick(shape[axis] + 1)
    sizes, at = [first, shape[axis] - first], pick(2)
    return Move(
        f"split({sizes}, {axis})[{at}]",
        lambda q: q.split(sizes, axis)[at],
        lambda x: np.split(x, [first], axis)[at],
    )


def _take(shape: Shape, pick: Pick) -> Move:
    axis = _axis(shape, pick)
    most = max(1, LIMIT // max(1, math.prod(shape) // max(1, shape[axis])))
    many = ((pick(4),), (2, 2), (1,), (pick(shape[axis] + 1),))[pick(4)]
    indices = _indices(shape[axis], many if math.prod(many) <= most else (1,), pick)
    if pick(2):
        return Move(
            f"select({axis}, {indices})",
            lambda q: q.select(axis, indices),
            lambda x: np.take(x, indices, axis),
        )
    return Move(
        f"take({indices}, {axis})",
        lambda q: q.take(indices, axis),
        lambda x: np.take(x, indices, axis),
    )


def _gather(shape: Shape, pick: Pick) -> Move:
    axis = pick(len(shape))
    rng = np.random.default_rng(pick(1000))
    many = pick(3) if shape[axis] else 0
    indices = rng.integers(max(1, shape[axis]), size=(*shape[:axis], many, *shape[axis + 1 :]))
    return Move(
        f"gather({indices}, {axis})",
        lambda q: q.gather(indices, axis),
        lambda x: np.take_along_axis(x, indices, axis),
    )


# -- other places, more of them ---------------------------------------------------------------


def _flip(shape: Shape, pick: Pick) -> Move:
    one = _axis(shape, pick) if shape else None
    axes = (None, (), one, tuple(range(len(shape))))[pick(4)]
    return Move(f"flip({axes})", lambda q: q.flip(axes), lambda x: np.flip(x, axes))


def _expand(shape: Shape, pick: Pick) -> Move:
    """New axes in front, and axes of length 1 made longer; -1 where an axis stays as it is."""
    wanted = [3 if extent == 1 and pick(2) else extent for extent in shape]
    if math.prod(wanted) > LIMIT:
        wanted = list(shape)
    asked = [-1 if new == old and pick(2) else new for new, old in zip(wanted, shape, strict=True)]
    if pick(2) and 2 * math.prod(wanted) <= LIMIT:
        wanted, asked = [2, *wanted], [2, *asked]
    return Move(f"expand({asked})", lambda q: q.expand(asked), lambda x: np.broadcast_to(x, wanted))


def _repeat(shape: Shape, pick: Pick) -> Move:
    axis, times = _axis(shape, pick), pick(4)
    times = times if times * math.prod(shape) <= LIMIT else 1
    return Move(
        f"repeat({times}, {axis})",
        lambda q: q.repeat(times, axis),
        lambda x: np.repeat(x, times, axis),
    )


def _tile(shape: Shape, pick: Pick) -> Move:
    times = [1 + pick(2) for _ in range(pick(len(shape) + 2))]
    times = times if math.prod(times) * math.prod(shape) <= LIMIT else [1]
    return Move(f"tile({times})", lambda q: q.tile(times), lambda x: np.tile(x, times))


def _concat(shape: Shape, pick: Pick) -> Move:
    axis = _axis(shape, pick)
    if 2 * math.prod(shape) > LIMIT:
        return _flip(shape, pick)
    part = slice(None, None, -1 - pick(2))
    key = (*[slice(None)] * (axis % len(shape)), part)
    return Move(
        f"concat([q, q[{key}]], {axis})",
        lambda q: ops.concat([q, q[key]], axis),
        lambda x: np.concatenate([x, x[key]], axis),
    )


def _stack(shape: Shape, pick: Pick) -> Move:
    axis = pick(2 * len(shape) + 2) - len(shape) - 1
    if 2 * math.prod(shape) > LIMIT:
        return _flip(shape, pick)
    return Move(
        f"stack([q, q.flip()], {axis})",
        lambda q: ops.stack([q, q.flip()], axis),
        lambda x: np.stack([x, np.flip(x)], axis),
    )


# -- shapes -----------------------------------------------------------------------------------


def _reshape(shape: Shape, pick: Pick) -> Move:
    """Neighbours merged, an axis split at one of its divisors, ones put in, or all of it flat."""
    made = list(shape)
    for _ in range(1 + pick(3)):
        made = _reshaped(made, pick)
    asked = list(made)
    if math.prod(made) and pick(3) == 0 and asked:
        asked[pick(len(asked))] = -1
    return Move(f"reshape({asked})", lambda q: q.reshape(asked), lambda x: x.reshape(made))


def _reshaped(shape: list[int], pick: Pick) -> list[int]:
    kind = pick(5)
    if kind == 0:
        return [math.prod(shape)]
    at = pick(len(shape)) if shape else 0
    if kind == 1 or not shape:
        return [*shape[:at], 1, *shape[at:]]
    if kind == 2 and at + 1 < len(shape):
        return [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]
    divisors = [d for d in range(1, shape[at] + 1) if shape[at] % d == 0] or [1]
    first = divisors[pick(len(divisors))]
    return [*shape[:at], first, shape[at] // first, *shape[at + 1 :]]


#: Operation -> what makes one for a shape.
MAKERS: MappingProxyType[str, Callable[[Shape, Pick], Move]] = MappingProxyType(
    {
        "chunk": _chunk,
        "concat": _concat,
        "expand": _expand,
        "flip": _flip,
        "gather": _gather,
        "index": _index,
        "index_list": _index_list,
        "index_mask": _index_mask,
        "moveaxis": _moveaxis,
        "narrow": _narrow,
        "permute": _permute,
        "repeat": _repeat,
        "reshape": _reshape,
        "split": _split,
        "squeeze": _squeeze,
        "stack": _stack,
        "swapaxes": _swapaxes,
        "take": _take,
        "tile": _tile,
        "transpose": _transpose,
        "unsqueeze": _unsqueeze,
    }
)
#: Those that need an axis to work on.
NEED_AN_AXIS = frozenset(
    {"chunk", "concat", "gather", "index_list", "index_mask", "moveaxis", "narrow", "repeat"}
    | {"split", "swapaxes", "take"}
)


def move(name: str, shape: Shape, pick: Pick) -> Move | None:
    """A move of a name for a shape; None where the operation has nothing to work on."""
    return None if not shape and name in NEED_AN_AXIS else MAKERS[name](shape, pick)
