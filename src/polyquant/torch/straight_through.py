"""Training with quantized numbers: fake_quantize, whose rounding gradients pass by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyquant import ops
from polyquant.errors import InvalidArgument
from polyquant.scheme import QuantScheme
from polyquant.torch import library  # noqa: F401  (registers the op)
from polyquant.torch.operands import operand_of


def fake_quantize(
    x: Tensor,
    scheme: QuantScheme | str,
    *,
    scales: Any = None,
    offsets: Any = None,
    table: Any = None,
    calibration: str = "minmax",
    gradient_scale: float = 1.0,
) -> Tensor:
    """``pq.quantize(x, ...).dequantize(x.dtype)``, with gradients as if nothing were rounded.

    The gradient of ``x`` passes where ``x`` lies within the range that its block can hold, the ends
    included, and is 0 outside. Scales that are calibrated from ``x`` count as constants.

    Args:
        x, scheme, calibration: as in pq.quantize, which also says what is refused.
        scales: your own, on ``scheme.scale_shape(x.shape)``. A tracked tensor has the gradient of
            learned step sizes (LSQ, arXiv:1902.08153), with ``v = x / scale`` and summed over every
            block: ``code - v`` inside of the range, ``code`` at its end outside.
        offsets: your own, beside scales. Tracked ones have a gradient outside of the range alone
            (LSQ+, arXiv:2004.09576).
        table: of a custom lookup; a tracked one has ``scale`` summed over the values of each entry.
        gradient_scale: a factor for the gradient of ``scales``. The paper takes
            ``1 / sqrt(n * q)``, for blocks of n values and the highest code q.
    """
    if isinstance(scales, tuple) and any(isinstance(s, Tensor) and s.requires_grad for s in scales):
        wanted = "one tensor of ideal scales, where gradients are tracked, not a pair"
        raise InvalidArgument(name="scales", wanted=wanted, got="a pair")
    given = [_untracked(each) for each in (scales, offsets, table)]
    q = ops.quantize(
        x, scheme, calibration=calibration, scales=given[0], offsets=given[1], table=given[2]
    )
    learned = [each if isinstance(each, Tensor) else None for each in (scales, offsets, table)]
    made: Tensor = torch.ops.polyquant.straight_through(
        x, *operand_of(q).arguments(), *learned, float(gradient_scale)
    )
    return made


def _untracked(given: Any) -> Any:
    return given.detach() if isinstance(given, Tensor) else given
