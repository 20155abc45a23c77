"""Plain safetensors: arrays by name, in one file or in those that an index names."""

from __future__ import annotations

from functools import partial

from polyquant.errors import UnknownFormat
from polyquant.files.checkpoint import Checkpoint, Entry
from polyquant.files.container import RawTensor
from polyquant.files.facts import Facts
from polyquant.files.info import FILE_DTYPES, TensorInfo
from polyquant.files.probe import Probe

NAME = "safetensors"
FACTS = Facts(
    tool="safetensors",
    reads="plain arrays",
    exact="yes",
    writes="arrays, in every format above that is safetensors",
    bytes="yes",
    checked="safetensors 0.8",
)


#: Endings of names by which other tools store quantized weights.
_QUANTIZED = (
    *(
        ".qweight",
        ".qzeros",
        ".weight_packed",
        ".weight_scale",
        ".weight_scale_inv",
        ".weight_scale_2",
    ),
    *("_blocks", ".W_q", "._data._data", "._weight_qdata", ".weight.absmax", ".SCB"),
    ".weight_g_idx",
)


def why_not(probe: Probe) -> str | None:
    """Why a path is not of this format.

    Arrays that are plainly parts of quantized weights, or a config that speaks of quantization, are
    not read as if they were the weights; ``format="safetensors"`` asks for the arrays all the same.
    """
    if probe.container is None:
        return "it is not a safetensors file"
    if probe.format == NAME:
        return None
    ask = 'format="safetensors" reads its arrays as they are'
    if probe.method is not None:
        return f"its config has the quant_method {probe.method!r}; {ask}"
    found = part_of_quantized(probe)
    if found is None:
        return None
    return (
        f"{found!r} looks like a part of a quantized weight, and no config says of which format; "
        f"pass config= (or put the model's config.json beside it), or format=; {ask}"
    )


def part_of_quantized(probe: Probe) -> str | None:
    """The name of an array that is plainly a part of a quantized weight, if there is one."""
    if probe.container is None:
        return None
    is_mlx = any(file.metadata.get("format") == "mlx" for file in probe.container.files)
    endings = (*_QUANTIZED, ".scales") if is_mlx else _QUANTIZED
    return next((n for n in probe.container.places if n.endswith(endings)), None)


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
