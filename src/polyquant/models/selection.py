"""Which tensors of a checkpoint are weights to quantize."""

from __future__ import annotations

from collections.abc import Sequence

from polyquant.arrays import FLOAT_DTYPES
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.info import TensorInfo
from polyquant.tree import select_weights


def is_float(info: TensorInfo) -> bool:
    """Whether a tensor holds plain floats that can be quantized."""
    return info.scheme is None and info.dtype in FLOAT_DTYPES


def selected(
    checkpoint: Checkpoint, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> list[TensorInfo]:
    """The tensors to quantize, in the order of the file: see polyquant.quantize_tree.

    Raises NothingMatches for a pattern that matches no name of the checkpoint.
    """
    infos = {name: checkpoint.info(name) for name in checkpoint}
    ranks = {name: len(info.shape) if is_float(info) else None for name, info in infos.items()}
    return [infos[name] for name in select_weights(ranks, include, exclude)]


def why_kept(info: TensorInfo) -> str:
    """Why a tensor that was not selected stays as it is, in a word or two."""
    if info.scheme is not None:
        return "quantized already"
    if not is_float(info):
        return str(info.dtype)
    rank = len(info.shape)
    return "excluded" if rank >= 2 else "1 axis" if rank else "scalar"
