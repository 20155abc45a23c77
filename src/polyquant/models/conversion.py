"""Converting a checkpoint to another format: first a plan, then one tensor at a time.

A tensor is kept exactly where the target can hold it, if need be under another name of the same
numbers (another store, full codes in place of symmetric ones, axes in order). What it cannot hold
is requantized only where that was asked for, and the loss is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyquant import calibrate
from polyquant.arrays import HostArray
from polyquant.errors import NotExact
from polyquant.files.assemble import assemble, numbers_of
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.info import TensorInfo
from polyquant.models.selection import selected
from polyquant.models.targets import Target
from polyquant.qtensor import QTensor
from polyquant.quality import Quality, measure
from polyquant.scheme import QuantScheme
from polyquant.views.moving import in_order

#: Tensors that an error names.
_EXAMPLES = 3


@dataclass(frozen=True)
class Conversion:
    """What happens to one tensor: it becomes ``result``, with a loss where ``is_lossy``."""

    source: TensorInfo
    result: TensorInfo
    is_lossy: bool = False

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def elements(self) -> int:
        return math.prod(self.source.shape)


@dataclass(frozen=True)
class Converted:
    """One tensor that was converted; ``quality`` where it was requantized."""

    conversion: Conversion
    quality: Quality | None = None


def plan(
    checkpoint: Checkpoint,
    target: Target,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    requantize: bool = False,
    calibration: str = "minmax",
) -> list[Conversion]:
    """What becomes of every tensor, without reading any.

    Raises NotExact where a tensor would lose something and ``requantize`` was not given, or where
    the target can hold it in no way; NothingMatches, CalibrationRefused.
    """
    chosen: set[str] = set()
    if target.scheme is not None:
        calibrate.check(calibration, target.scheme)
        chosen = {info.name for info in selected(checkpoint, include, exclude)}
    made, refused = [], []
    for name in checkpoint:
        info = checkpoint.info(name)
        found = _conversion(info, target, is_chosen=name in chosen or info.scheme is not None)
        if isinstance(found, str):
            refused.append((name, found))
        elif found.is_lossy and not requantize:
            refused.append((name, f"it would become {found.result.scheme}"))
        else:
            made.append(found)
    if refused:
        raise NotExact(
            count=len(refused),
            total=len(checkpoint),
            target=target.format,
            examples="; ".join(f"{n!r}: {reason}" for n, reason in refused[:_EXAMPLES]),
            fix=_fix(target, requantize=requantize),
        )
    return made


def _fix(target: Target, *, requantize: bool) -> str:
    if target.scheme is None:
        return f"Name what weights shall become, as in --to {target.format}:VARIANT --requantize"
    if requantize:
        return "Leave these tensors out, or choose another variant"
    return "Pass --requantize to accept the loss, which is then shown for each tensor"


def _conversion(info: TensorInfo, target: Target, *, is_chosen: bool) -> Conversion | str:
    """How a tensor is held, or why it is not."""
    exact = _exact(info, target)
    if target.scheme is None or not is_chosen:
        return exact
    if info.scheme == target.scheme and isinstance(exact, Conversion):
        return exact
    try:
        wanted = TensorInfo.quantized(info.name, info.shape, target.scheme)
        wanted_reason = target.why_not_hold(wanted)
    except ValueError as error:  # a block or a view that does not fit the shape
        wanted_reason = str(error)
    if wanted_reason is None:
        return Conversion(info, wanted, is_lossy=True)
    return exact  # a norm or a table of another shape stays as it is, if it can


def _exact(info: TensorInfo, target: Target) -> Conversion | str:
    """How the target holds a tensor exactly, or why it cannot."""
    reason = None
    for candidate in _forms(info):
        found = target.why_not_hold(candidate)
        if found is None:
            return Conversion(info, candidate)
        reason = reason or found
    return reason or "it has no form there"


def _forms(info: TensorInfo) -> Iterator[TensorInfo]:
    """The descriptions under which a tensor is the same numbers, its own first."""
    if info.scheme is None:
        yield info
        return
    name, shape, scheme = info.name, info.shape, info.scheme
    yield TensorInfo.quantized(name, shape, scheme, info.axes)
    if info.axes != tuple(range(len(shape))):
        return  # moving the axes changes blocks; known only once there is a tensor
    plain = scheme.with_store("packed_u32")
    value = str(scheme.value)
    if value[0] == "q" and value[-1] == "s":  # a symmetric code is a full one
        yield TensorInfo.quantized(name, shape, plain.with_value(f"{value[:-1]}f"))
    yield TensorInfo.quantized(name, shape, plain)
    if scheme.value == "e2m1":
        yield TensorInfo.quantized(name, shape, scheme.with_store("packed_native"))


def convert(
    checkpoint: Checkpoint,
    target: Target,
    steps: Sequence[Conversion],
    write: Callable[[str, Any], None],
    *,
    calibration: str = "minmax",
    on_done: Callable[[Converted], None] = lambda done: None,
) -> list[Converted]:
    """Carry out steps, handing each tensor to ``write``; ``on_done`` hears of each."""
    finished = []
    for step in steps:
        tensor = checkpoint[step.name]
        made, quality = _converted(tensor, step, target, calibration)
        write(step.name, made)
        del tensor, made
        checkpoint.release()
        finished.append(Converted(step, quality))
        on_done(finished[-1])
    return finished


def _converted(
    tensor: Any, step: Conversion, target: Target, calibration: str
) -> tuple[Any, Quality | None]:
    scheme = step.result.scheme
    if scheme is None:
        return tensor, None
    if step.is_lossy:
        values: HostArray = tensor.dequantize() if isinstance(tensor, QTensor) else tensor
        made = target.quantize(values, scheme, calibration)
        return made, measure(values, made)
    return _as(tensor, scheme), None


def _as(q: QTensor, scheme: QuantScheme) -> QTensor:
    """The same numbers under a scheme that means the same."""
    if q.scheme == scheme:
        return q
    return assemble(scheme, q.shape, numbers_of(in_order(q)))


def totals(steps: Sequence[Conversion], finished: Sequence[Converted]) -> Mapping[str, Any]:
    """Counts and sizes of a conversion."""
    worst = [done.quality.relative_error for done in finished if done.quality is not None]
    return {
        "tensors": len(steps),
        "exact": sum(not step.is_lossy for step in steps),
        "requantized": sum(step.is_lossy for step in steps),
        "size_before_bytes": sum(step.source.nbytes for step in steps),
        "size_after_bytes": sum(step.result.nbytes for step in steps),
        "worst_relative_error": max(worst, default=0.0),
    }
