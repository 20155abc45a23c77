"""Files of tensors: one module per format, and the table that recognises them.

A format is a module with ``why_not(probe)``, which says in words why a path is not of it (or
returns None), and ``open_checkpoint(probe)``. A format is recognised by what a file declares, its
magic or its name; never by the shapes of what it holds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any

from polyquant.arrays import Array, backend_of_device
from polyquant.errors import InvalidArgument, UnknownFormat, UnknownName
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.host import owned, to_device
from polyquant.files.info import TensorInfo
from polyquant.files.probe import Probe
from polyquant.formats.polyquant.writer import Writer
from polyquant.formats.safetensors import part_of_quantized
from polyquant.qtensor import QTensor

__all__ = ["FORMATS", "Checkpoint", "TensorInfo", "Writer", "load", "open_checkpoint", "save"]

#: Format -> its module, the most particular first. A new format is one line here and one file.
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "polyquant": "polyquant.formats.polyquant",
        "gguf": "polyquant.formats.gguf",
        "burnpack": "polyquant.formats.burnpack",
        "npz": "polyquant.formats.npz",
        "bitsandbytes": "polyquant.formats.bitsandbytes",
        "gptq": "polyquant.formats.gptq",
        "awq": "polyquant.formats.awq",
        "compressed-tensors": "polyquant.formats.compressed_tensors",
        "gpt-oss": "polyquant.formats.gpt_oss",
        "modelopt": "polyquant.formats.modelopt",
        "fp8": "polyquant.formats.fp8",
        "mlx": "polyquant.formats.mlx",
        "hqq": "polyquant.formats.hqq",
        "quanto": "polyquant.formats.quanto",
        "torchao": "polyquant.formats.torchao",
        "bitnet": "polyquant.formats.bitnet",
        "gemma": "polyquant.formats.gemma",
        "safetensors": "polyquant.formats.safetensors",
    }
)


#: Formats that can be written -> the module with ``why_not_hold``, ``open_writer``, ``VARIANTS``.
#: polyquant's own form has the class Writer.
WRITERS: Mapping[str, str] = MappingProxyType(
    {
        "gguf": "polyquant.formats.gguf.writer",
        "burnpack": "polyquant.formats.burnpack",
        "bitsandbytes": "polyquant.formats.bitsandbytes",
        "gptq": "polyquant.formats.gptq",
        "compressed-tensors": "polyquant.formats.compressed_tensors",
        "mlx": "polyquant.formats.mlx",
    }
)

#: Formats that a file's own bytes decide, whatever a config beside it says; and the one that takes
#: what no other does.
_SELF_DESCRIBING, _LAST = frozenset(("polyquant", "gguf", "burnpack", "npz")), "safetensors"


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Open a file, an index of files, or a model folder; reads headers only.

    Args:
        path: a file, a ``.safetensors.index.json``, or a folder that holds one of those.
        format: a name in ``FORMATS``; None to recognise it by what the file declares.
        config: the model's config, the part of it that is about quantization, or its path; None
            for what the file itself or the config.json beside it says. ``shapes`` in it tells two
            formats the shapes of weights that their files leave out, ``i2_s`` a layout of GGUF.

    Raises:
        UnreadableFile, UnknownFormat, UnknownName (of ``format``), InvalidHeader, UnknownScheme,
        UnsupportedVersion, UnsupportedDtype, InvalidArgument.
    """
    if format is not None and not (isinstance(format, str) and format in FORMATS):
        near = get_close_matches(str(format), FORMATS, n=1, cutoff=0.0)
        known = ", ".join(FORMATS)
        raise UnknownName(what="format", got=format, known=known, nearest=near[0])
    probe = Probe(path, config, format)
    found = _format_of(probe)
    opened: Checkpoint = import_module(FORMATS[found]).open_checkpoint(probe)
    part = None if found in (*_SELF_DESCRIBING, _LAST) else part_of_quantized(probe)
    if part in opened and not any(opened.schemes().values()):
        reason = (
            f"{found} finds nothing quantized in it, and {part!r} is a part of some such weight"
        )
        raise UnknownFormat(path=probe.path, reason=reason, known=", ".join(FORMATS))
    return opened


def _format_of(probe: Probe) -> str:
    """The one format that a path declares. Raises UnknownFormat for none, and for several."""
    found, reasons = [], []
    for name in FORMATS if probe.format is None else (probe.format,):
        reason = import_module(FORMATS[name]).why_not(probe)
        if reason is None and (name in _SELF_DESCRIBING or probe.format):
            return name
        found += [name] if reason is None else []
        reasons += [] if reason is None else [f"not {name}: {reason}"]
    if len(found) > 1 and found[-1] == _LAST:
        found.pop()
    if len(found) == 1:
        return found[0]
    reason = "; ".join(reasons)
    if found:
        reason = f"what it declares fits {' and '.join(found)}; format= says which it is"
    raise UnknownFormat(path=probe.path, reason=reason, known=", ".join(FORMATS))


def load(path: str | os.PathLike[str], device: str = "numpy") -> dict[str, Array | QTensor]:
    """All tensors of a file, index or folder on a device, in memory of their own.

    Raises what ``open_checkpoint`` and ``Checkpoint.read`` raise.
    """
    _, device = backend_of_device(device)
    with open_checkpoint(path) as checkpoint:
        made = {}
        for name in checkpoint:
            host = owned(checkpoint.read(name))
            is_quantized = isinstance(host, QTensor)
            made[name] = host.to(device) if is_quantized else to_device(host, device)
        return made


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Array | QTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_size_bytes: int | None = None,
) -> None:
    """Save arrays of any library and quantized tensors in any order of axes, as safetensors.

    The file is written beside ``path`` and renamed, so a reader sees the old one or the new one.

    Args:
        path: a name that ends in ".safetensors".
        tensors: name -> array or QTensor.
        metadata: texts to keep beside the tensors.
        shard_size_bytes: None for one file; else ``name-00001-of-0000N.safetensors`` of at most
            that many bytes of tensors each, and ``name.safetensors.index.json``.

    Raises:
        InvalidName, InvalidArgument, NotAnArray, UnsupportedDtype: before anything is written.
        WriteFailed: the old file is intact.
    """
    if not isinstance(tensors, Mapping):
        raise InvalidArgument(name="tensors", wanted="a mapping of names", got=type(tensors))
    plan = [TensorInfo.of(name, tensor) for name, tensor in tensors.items()]
    with Writer(path, plan, metadata=metadata, shard_size_bytes=shard_size_bytes) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
