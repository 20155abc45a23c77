"""Plain safetensors: arrays by name, in one file or in those that an index names."""

from __future__ import annotations

from functools import partial

from polyquant.errors import UnknownFormat
from polyquant.files.checkpoint import Checkpoint, Entry
from polyquant.files.container import RawTensor
from polyquant.files.info import FILE_DTYPES, TensorInfo
from polyquant.files.probe import Probe

NAME = "safetensors"


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format."""
    return "it is not a safetensors file" if probe.container is None else None


def open_checkpoint(probe: Probe) -> Checkpoint:
    """Open a file or an index; every array is a tensor of its own."""
    container = probe.container
    if container is None:
        raise UnknownFormat(path=probe.file, reason=str(why_not(probe)), known=NAME)
    entries = {
        name: Entry(_info(file.tensors[name]), partial(file.read, name))
        for name, file in container.places.items()
    }
    metadata = container.metadata
    return Checkpoint(probe.path, NAME, metadata, entries, release=container.release)


def _info(tensor: RawTensor) -> TensorInfo:
    axes = tuple(range(len(tensor.shape)))
    dtype = FILE_DTYPES[tensor.dtype].name
    return TensorInfo(tensor.name, tensor.shape, dtype, None, tensor.stop - tensor.start, axes)
