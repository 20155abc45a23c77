"""Quantizing a whole checkpoint: first a plan, then one tensor at a time.

A tensor is read from the mapped file, quantized, measured, written and forgotten, so that memory
holds the largest tensor and what quantizing it needs, whatever the size of the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyquant import calibrate
from polyquant.errors import InvalidArgument
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.info import TensorInfo
from polyquant.models.norms import squared_norm
from polyquant.models.selection import selected, why_kept
from polyquant.models.shards import open_writer
from polyquant.ops import quantize
from polyquant.quality import Quality, measure, relative
from polyquant.scheme import QuantScheme
from polyquant.tables import CUSTOM


@dataclass(frozen=True)
class Step:
    """What happens to one tensor: it gets ``scheme``, or is kept (None) for the reason given."""

    source: TensorInfo
    scheme: QuantScheme | None
    kept: str | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def result(self) -> TensorInfo:
        """The tensor as it will be written."""
        scheme = self.scheme or self.source.scheme
        if scheme is None:
            return self.source
        axes = self.source.axes if self.scheme is None else None
        return TensorInfo.quantized(self.name, self.source.shape, scheme, axes)

    @property
    def elements(self) -> int:
        return math.prod(self.source.shape)


@dataclass(frozen=True)
class Done:
    """One step that was carried out; ``quality`` and ``squared`` (|x|^2) where it quantized."""

    step: Step
    quality: Quality | None = None
    squared: float = 0.0


def plan(
    checkpoint: Checkpoint,
    scheme: QuantScheme,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    calibration: str = "minmax",
) -> list[Step]:
    """What quantizing does to every tensor, without reading any of them.

    Raises NothingMatches, BlockRank for a tensor that the scheme's block does not fit, and
    CalibrationRefused, UnknownName.
    """
    calibrate.check(calibration, scheme)
    if scheme.table == CUSTOM:
        wanted = "a scheme whose table has a name: one file has no one custom table"
        raise InvalidArgument(name="scheme", wanted=wanted, got=str(scheme))
    chosen = {info.name for info in selected(checkpoint, include, exclude)}
    steps = []
    for name in checkpoint:
        info = checkpoint.info(name)
        if name in chosen:
            scheme.scale_shape(info.shape)  # raises BlockRank
            steps.append(Step(info, scheme))
        else:
            steps.append(Step(info, None, why_kept(info)))
    return steps


def quantize_checkpoint(
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    steps: Sequence[Step],
    *,
    calibration: str = "minmax",
    on_done: Callable[[Done], None] = lambda done: None,
) -> list[Done]:
    """Carry out a plan; ``on_done`` hears of each tensor once it is written.

    ``out`` ends in ``.safetensors`` (one file) or ``.safetensors.index.json`` (the shards of the
    source). It appears when all is written; on any error what was there before stays. Raises
    InvalidArgument, WriteFailed, and what quantize raises.
    """
    finished = []
    with open_writer(checkpoint, Path(out), [step.result for step in steps]) as writer:
        for step in steps:
            x = checkpoint[step.name]
            done = Done(step)
            if step.scheme is None:
                writer.write(step.name, x)
            else:
                q = quantize(x, step.scheme, calibration=calibration)
                writer.write(step.name, q)
                done = Done(step, measure(x, q), squared_norm(x))
            checkpoint.release()
            finished.append(done)
            on_done(done)
    return finished


def total_error(finished: Sequence[Done]) -> float:
    """The relative error over all quantized tensors together."""
    measured = [(done.quality.relative_error, done.squared) for done in finished if done.quality]
    squared_error = sum(error**2 * squared for error, squared in measured if squared)
    return relative(squared_error, sum(squared for _, squared in measured))
