"""Whether results are quantized again: the mode, and how a result follows an operand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from polyquant import views
from polyquant.arrays import namespace
from polyquant.errors import BlockRank, InvalidArgument, LayoutRefused
from polyquant.ops.conversion import quantize
from polyquant.qtensor import QTensor
from polyquant.tables import CUSTOM

#: Mode -> whether compute ops quantize their float results again.
_MODES = (("inhibit", False), ("propagate", True))
_PROPAGATES: ContextVar[bool] = ContextVar("polyquant.propagation", default=False)

#: Whether compute ops quantize their float results again, here and now.
propagates = _PROPAGATES.get


def propagation(mode: str) -> AbstractContextManager[None]:
    """A context in which compute ops do, or do not, quantize their float results again.

    Args:
        mode: "propagate": a float result becomes a QTensor with the scheme (and custom table) of
            the first quantized operand, calibrated by minmax, its blocks along its own last axes.
            max, min, sort and topk keep their exact numbers where the scheme can. "inhibit", the
            default: float results are arrays.

    Comparisons, ``any``, ``all`` and ``arg...`` give bool and int always; where, mask_fill, scatter
    and assign give arrays, and so does any element-wise op of a QTensor and an array. (A product or
    convolution of the two is quantized.) The mode is of the thread or task that entered it.

    Raises InvalidArgument. Under "propagate" an op also raises what quantizing its result raises:
    BlockRank (fewer axes than the block), NegativeInput, NonFiniteInput.
    """
    flag = dict(_MODES).get(mode) if isinstance(mode, str) else None
    if flag is None:
        wanted = " or ".join(repr(name) for name, _ in _MODES)
        raise InvalidArgument(name="the mode of propagation", wanted=wanted, got=mode)
    return _within(flag)


@contextmanager
def _within(flag: bool) -> Iterator[None]:
    token = _PROPAGATES.set(flag)
    try:
        yield
    finally:
        _PROPAGATES.reset(token)


def gathered(q: Any, indices: Any, axis: int | None, *, keepdims: bool = True) -> QTensor | None:
    """The codes of ``q`` at some indices along an axis (None: in one line), not quantized again.

    None where ``q`` is no QTensor, or where its scheme has other blocks then.
    """
    if not isinstance(q, QTensor):
        return None
    try:
        if axis is None:
            line = views.gather(
                views.reshape(q, (-1,)), namespace(indices).reshape(indices, (1,)), 0
            )
            found = views.reshape(line, (1,) * q.ndim if keepdims else ())
        else:
            found = views.gather(q, indices, axis)
            found = found if keepdims else views.squeeze(found, axis)
    except (LayoutRefused, BlockRank):
        return None
    return found if found.scheme == q.scheme else None


def quantized_again(result: Any, operands: Sequence[Any]) -> Any:
    """A float result with the scheme and custom table of the first QTensor among the operands."""
    like = next((x for x in operands if isinstance(x, QTensor)), None)
    if like is None:
        return result
    return quantize(result, like.scheme, table=like.table if like.scheme.table == CUSTOM else None)
