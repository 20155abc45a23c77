"""Codes in other places: bytes where bytes will do, else fields unpacked, moved and packed."""

from __future__ import annotations

from collections.abc import Sequence

from polyquant.arrays import Array, namespace
from polyquant.codec import line_size_bytes, pack, unpack
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.values import QuantStore
from polyquant.views.moves import Flat, Move, Run, Shape


def moved_codes(q: QTensor, at: int, move: Move) -> Array:
    """``q.data`` with the stored axes from ``at`` on moved.

    A view (or what the library makes of one) where the packed axis stays, where each code is a
    byte, where a run begins and ends at whole bytes, and where lines without padding are cut or
    joined; else a copy.
    """
    scheme, shape = q.scheme, q.stored_shape
    end = at + len(move.inner)
    if end < len(shape):
        return move.of(q.data, at)
    made = (*shape[:at], *move.outer)
    old, new = _line(shape), _line(made)
    if isinstance(move, Flat) and (old == new or (_is_full(old, scheme) and _is_full(new, scheme))):
        size = line_size_bytes(new, scheme.bits, scheme.store)
        return namespace(q.data).reshape(q.data, (*made[:-1], size))
    if isinstance(move, Run):
        whole_bytes = _bytes_of_run(move, scheme)
        if whole_bytes is not None:
            return q.data[..., whole_bytes]
    return packed(move.of(fields(q), at), scheme)


def fields(q: QTensor) -> Array:
    """The codes in stored order, one byte each: unsigned fields, or bytes as a native store has."""
    if _is_bytes(q.scheme):
        return namespace(q.data).reshape(q.data, q.stored_shape)
    line, scheme = _line(q.stored_shape), q.scheme
    found = unpack(namespace(q.data), q.data, line, scheme.value, scheme.store)
    return namespace(q.data).reshape(found, q.stored_shape)


def packed(codes: Array, scheme: QuantScheme) -> Array:
    """Undo ``fields``. Padding is zero."""
    xp = namespace(codes)
    lines = codes if codes.shape else xp.reshape(codes, (1,))
    return lines if _is_bytes(scheme) else pack(xp, lines, scheme.value, scheme.store)


def joined_codes(tensors: Sequence[QTensor], at: int) -> Array:
    """The data of tensors of one scheme but for its blocks, joined along a stored axis."""
    xp, scheme, last = namespace(tensors[0].data), tensors[0].scheme, tensors[0].ndim - 1
    inner = [q.stored_shape[at] for q in tensors[:-1]]
    if at < last or all(_is_full(length, scheme) for length in inner):
        return xp.concat([q.data for q in tensors], axis=at)
    return packed(xp.concat([fields(q) for q in tensors], axis=at), scheme)


def _line(shape: Shape) -> int:
    return shape[-1] if shape else 1


def _is_bytes(scheme: QuantScheme) -> bool:
    """Whether the data is an array of codes, a byte each."""
    packed_bytes = scheme.bits == 8 and scheme.store is QuantStore.PACKED_NATIVE
    return scheme.store is QuantStore.NATIVE or packed_bytes


def _is_full(length: int, scheme: QuantScheme) -> bool:
    """Whether a line of that length has no padding."""
    if _is_bytes(scheme):
        return True
    return length * scheme.bits == 8 * line_size_bytes(length, scheme.bits, scheme.store)


def _bytes_of_run(run: Run, scheme: QuantScheme) -> slice | None:
    """The bytes of every line that are the whole result of a run, if there are such."""
    if run.step != 1 or _is_bytes(scheme):
        return None
    first, rest = divmod(run.start * scheme.bits, 8)
    size = line_size_bytes(run.count, scheme.bits, scheme.store)
    is_end = run.start + run.count == run.extent  # after which comes nothing but zeros
    fits = first + size <= line_size_bytes(run.extent, scheme.bits, scheme.store)
    ends_well = is_end or _is_full(run.count, scheme)
    return slice(first, first + size) if rest == 0 and fits and ends_well else None
