"""What a checkpoint can be converted to: formats that are written, and their variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polyquant.arrays import HostArray
from polyquant.errors import InvalidArgument, UnknownName
from polyquant.files.container import INDEX_SUFFIX
from polyquant.files.info import TensorInfo
from polyquant.formats import WRITERS
from polyquant.ops import quantize
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme

#: polyquant's own form, under both of its names.
OWN = ("safetensors", "polyquant")
_SUFFIXES: Mapping[str, str] = MappingProxyType({"gguf": ".gguf", "burnpack": ".bpk"})


@dataclass(frozen=True)
class Target:
    """A format to write, and the scheme that weights shall have there (None: the one they have)."""

    format: str
    scheme: QuantScheme | None

    @property
    def is_own(self) -> bool:
        return self.format in OWN

    def why_not_hold(self, info: TensorInfo) -> str | None:
        """Why the format cannot hold a tensor exactly, or None."""
        if self.is_own:
            return None
        reason: str | None = import_module(WRITERS[self.format]).why_not_hold(info)
        return reason

    def quantize(self, values: HostArray, scheme: QuantScheme, calibration: str) -> QTensor:
        """Values under a scheme, by the format's own rule where it has one."""
        module = None if self.is_own else import_module(WRITERS[self.format])
        rule: Callable[..., QTensor] = getattr(module, "quantized", quantize)
        return rule(values, scheme, calibration=calibration)

    def open_writer(
        self,
        path: Path,
        plan: Sequence[TensorInfo],
        metadata: Mapping[str, str],
        whole: Sequence[TensorInfo] | None = None,
    ) -> Any:
        """The writer of a file of the format. Not for polyquant's own form.

        ``whole``: the tensors of all shards, of which the file is one.
        """
        made: Callable[..., Any] = import_module(WRITERS[self.format]).open_writer
        return made(path, plan, metadata) if whole is None else made(path, plan, metadata, whole)

    def check_path(self, out: Path) -> None:
        """Raise InvalidArgument for a name that the format's readers would not look for."""
        suffix = _SUFFIXES.get(self.format)
        names = (suffix,) if suffix else (".safetensors", INDEX_SUFFIX)
        if not out.name.endswith(names) or out.name in names:
            wanted = f"a name that ends in {' or '.join(names)}"
            raise InvalidArgument(name="OUT", wanted=wanted, got=str(out))


def target_of(text: str) -> Target:
    """The target of ``FORMAT`` or ``FORMAT:VARIANT``. Raises UnknownName, UnknownScheme."""
    format, colon, variant = text.partition(":")
    known = [*OWN, *WRITERS]
    if format not in known:
        near = get_close_matches(format, known, n=1, cutoff=0.0)[0]
        raise UnknownName(what="format to write", got=format, known=", ".join(known), nearest=near)
    if not colon:
        return Target(format, None)
    if format in OWN:
        return Target(format, as_scheme(variant))
    variants = variants_of(format)
    if variant not in variants:
        nearest = get_close_matches(variant, variants, n=1, cutoff=0.0)
        raise UnknownName(
            what=f"variant of {format}",
            got=variant,
            known=", ".join(variants) or "none",
            nearest=nearest[0] if nearest else format,
        )
    return Target(format, as_scheme(variants[variant]))


def variants_of(format: str) -> Mapping[str, str]:
    """The variants of a format: name -> text of the scheme."""
    found: Mapping[str, str] = getattr(import_module(WRITERS[format]), "VARIANTS", {})
    return found
