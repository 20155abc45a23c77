"""Quantized layers in safetensors files of other tools: several arrays that make one tensor.

A format's module finds its layers among a file's names and says what each is; everything else in
the file stays a plain array under its own name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from polyquant.arrays import HostArray
from polyquant.errors import CorruptData, InvalidHeader, UnknownFormat, UnsupportedDtype
from polyquant.files.checkpoint import Checkpoint, Entry
from polyquant.files.container import Container, RawTensor
from polyquant.files.info import FILE_DTYPES, TensorInfo
from polyquant.files.patterns import found, matches
from polyquant.files.probe import CONFIG, Probe
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme

T = TypeVar("T")

#: The dtype codes of scales that are floats; in small letters they are scale types.
FLOAT_SCALES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Layer:
    """One quantized tensor: its name, what it is, the arrays it is made of, and how to read it."""

    name: str
    shape: tuple[int, ...]
    scheme: QuantScheme
    uses: tuple[str, ...]
    read: Callable[[], QTensor]
    #: What of its storage the tensor does not say, to write it back to the same bytes.
    origin: Mapping[str, Any] = field(default_factory=dict)
    #: The order in which its axes are stored; None for their own.
    axes: tuple[int, ...] | None = None


class Made(NamedTuple):
    """An array that is not stored as such: what it is, the arrays that it is made of, and how."""

    raw: RawTensor
    uses: tuple[str, ...]
    read: Callable[[], HostArray]


class Source:
    """The arrays of a safetensors container, checked as they are asked for.

    ``made``: arrays that stand in the place of those which they are made of. ``described``: keys of
    metadata that describe layers, and so mean nothing once these are read.
    """

    def __init__(self, probe: Probe, format: str) -> None:
        if probe.container is None:
            raise UnknownFormat(path=probe.file, reason="it is not safetensors", known=format)
        self.path, self.format = probe.file, format
        self.container: Container = probe.container
        self.config: Mapping[str, Any] = probe.quantization
        self.made: dict[str, Made] = {}
        self.described: set[str] = set()

    def arrays(self) -> Iterator[str]:
        """The names of all arrays. Raises InvalidHeader where a made one has that of another."""
        hidden = {name for made in self.made.values() for name in made.uses}
        for name in self.container.places:
            if name in self.made:
                raise self.fail(f"two tensors would have the name {name!r}")
            if name not in hidden:
                yield name
        yield from self.made

    def shapes(self, probe: Probe) -> Mapping[str, Any]:
        """The config's shapes, where arrays alone do not tell them. Raises InvalidHeader."""
        shapes = probe.config.get("shapes", self.config.get("shapes", {}))
        if not isinstance(shapes, Mapping):
            raise self.fail("the shapes of its config are no object")
        return shapes

    def __contains__(self, name: str) -> bool:
        return name in self.container.places or name in self.made

    def names(self, suffix: str) -> Iterator[str]:
        """What stands before ``suffix`` in the names that end in it."""
        for name in self.container.places:
            if name.endswith(suffix):
                yield name.removesuffix(suffix)

    def raw(self, name: str) -> RawTensor:
        """Dtype and shape of an array. Raises InvalidHeader where it is missing."""
        if name in self.made:
            return self.made[name].raw
        file = self.container.places.get(name)
        if file is None:
            raise self.fail(f"tensor {name!r} is missing")
        return file.tensors[name]

    def expect(self, name: str, dtypes: Sequence[str], shape: Sequence[int | None]) -> RawTensor:
        """The same, of one of these dtypes and this shape (None: any extent)."""
        raw = self.raw(name)
        fits = len(raw.shape) == len(shape) and all(
            want is None or got == want for got, want in zip(raw.shape, shape, strict=True)
        )
        if raw.dtype not in dtypes or not fits:
            wanted = f"{' or '.join(dtypes)} of {_shape_text(shape)}"
            got = f"{raw.dtype} of {_shape_text(raw.shape)}"
            raise self.fail(f"tensor {name!r} must be {wanted} in {self.format}, and is {got}")
        return raw

    def scale(self, name: str, shape: Sequence[int | None]) -> str:
        """The scale type of an array of float scales of this shape."""
        return self.expect(name, FLOAT_SCALES, shape).dtype.lower()

    def one_number(self, name: str) -> str:
        """The name of an array that is one float32, of any rank. Raises InvalidHeader."""
        if math.prod(self.expect(name, ("F32",), self.raw(name).shape).shape) != 1:
            raise self.fail(f"tensor {name!r} is not one number")
        return name

    def read(self, name: str) -> HostArray:
        """An array, mapped."""
        if name in self.made:
            return self.made[name].read()
        return self.container.places[name].read(name)

    def raw_bytes(self, name: str) -> memoryview:
        """The bytes of an array."""
        return self.container.places[name].raw_bytes(name)

    def fail(self, reason: str) -> InvalidHeader:
        """The error for a file that is not what its format says."""
        return InvalidHeader(path=self.path, reason=reason)

    def refuse(self, name: str, what: object, known: Iterable[object]) -> UnsupportedDtype:
        """The error for a variant of the format that is not read."""
        return UnsupportedDtype(
            what=f"Layer {name!r} of {self.path}", dtype=str(what), known=", ".join(map(str, known))
        )

    def matches(self, pattern: str, name: str) -> bool:
        """Whether a pattern of the config matches the beginning of a name. Raises InvalidHeader."""
        return self._found(matches, pattern, name)

    def found(self, pattern: str, name: str) -> int | None:
        """Where a pattern of the config first matches in a name. Raises InvalidHeader."""
        return self._found(found, pattern, name)

    def _found(self, rule: Callable[[str, str], T], pattern: str, name: str) -> T:
        try:
            return rule(pattern, name)
        except re.error as error:
            reason = f"{pattern[:100]!r} of its config is no pattern that is read ({error})"
            raise self.fail(reason) from None

    def number(self, key: str, config: Mapping[str, Any] | None = None) -> int:
        """A whole number of the config. Raises InvalidHeader."""
        found = (self.config if config is None else config).get(key)
        if type(found) is not int:
            reason = f"{key} must be a whole number in its quantization config, and is {found!r}"
            raise self.fail(reason)
        return found


def _shape_text(shape: Sequence[int | None]) -> str:
    return "x".join("*" if n is None else str(n) for n in shape) or "no axes"


def open_layers(probe: Probe, source: Source, layers: Iterable[Layer]) -> Checkpoint:
    """A checkpoint of the layers, and of the arrays that none of them uses.

    Raises InvalidHeader where two tensors would have one name, or a layer has no elements.
    """
    by_use: dict[str, Layer] = {}
    for layer in layers:
        if not math.prod(layer.shape):
            raise source.fail(f"tensor {layer.name!r} of {layer.shape} has no elements")
        for name in layer.uses:
            if name in by_use:
                raise source.fail(f"tensor {name!r} would be of two layers")
            by_use[name] = layer
    entries: dict[str, Entry] = {}
    for name in source.arrays():
        owner = by_use.get(name)
        if owner is None:
            made = Entry(_plain_info(source.raw(name)), partial(source.read, name))
        else:
            made = Entry(_info(source, owner), partial(_read, source, owner))
        held = entries.setdefault(made.info.name, made)
        if held.info != made.info:
            raise source.fail(f"two tensors would have the name {made.info.name!r}")
    metadata = source.container.metadata
    metadata = {key: text for key, text in metadata.items() if key not in source.described}
    if source.config:
        metadata[CONFIG] = json.dumps(source.config)
    origins = {e.name: dict(e.origin) for e in by_use.values() if e.origin}
    if origins:
        metadata[source.format] = json.dumps(origins)
    return Checkpoint(
        probe.path, source.format, metadata, entries, release=source.container.release
    )


def _read(source: Source, layer: Layer) -> QTensor:
    """A layer's tensor; what is corrupt of it is told with its name and its file."""
    try:
        return layer.read()
    except CorruptData as error:
        what = f"Tensor {layer.name!r} of {source.path}"
        reason = f"{error.facts['what']}: {error.facts['reason']}"
        raise CorruptData(what=what, reason=reason) from error


def _plain_info(raw: RawTensor) -> TensorInfo:
    axes = tuple(range(len(raw.shape)))
    dtype = FILE_DTYPES[raw.dtype].name
    return TensorInfo(raw.name, raw.shape, dtype, None, raw.stop - raw.start, axes)


def _info(source: Source, layer: Layer) -> TensorInfo:
    nbytes = sum(raw.stop - raw.start for raw in map(source.raw, layer.uses))
    axes = layer.axes or tuple(range(len(layer.shape)))
    return TensorInfo(layer.name, layer.shape, None, layer.scheme, nbytes, axes)
