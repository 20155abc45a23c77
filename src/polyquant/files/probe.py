"""A path and what can be seen of it before it is read: what formats are recognised by."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from polyquant.errors import InvalidArgument, PolyquantError, UnknownFormat, UnreadableFile
from polyquant.files.container import (
    INDEX_SUFFIX,
    Container,
    open_container,
    open_regular,
    read_small,
)
from polyquant.files.strict_json import parse_object

#: What a model folder is looked through for, best first: a name, or the only file of a suffix.
_NAMES = ("model.safetensors", f"model{INDEX_SUFFIX}")
_SUFFIXES = (INDEX_SUFFIX, ".safetensors", ".gguf", ".bpk", ".npz")


#: The name of what a config says of quantization, in configs and in metadata.
CONFIG = "quantization_config"

#: Files in which tools keep what a config.json could say -> the quant_method that they mean.
_OWN_CONFIGS: Mapping[str, str] = MappingProxyType(
    {
        "quantize_config.json": "gptq",
        "quant_config.json": "awq",
        "hf_quant_config.json": "modelopt",
    }
)


class Probe:
    """A file of tensors (of a model folder: the one that holds its tensors) and its config.

    ``format`` is the one that the caller names, if any.

    Raises UnreadableFile, UnknownFormat (a folder that holds no file of tensors, or several),
    InvalidArgument.
    """

    def __init__(
        self, path: str | os.PathLike[str], config: Any = None, format: str | None = None
    ) -> None:
        self.path, self.format = as_path(path), format
        self.file = self._file()
        self._config = config
        if not (config is None or isinstance(config, Mapping | str | os.PathLike)):
            wanted = "a mapping, or the path of a config.json"
            raise InvalidArgument(name="config", wanted=wanted, got=config)

    @cached_property
    def head(self) -> bytes:
        """The first bytes, at most 256."""
        with open_regular(self.file) as file:
            return file.read(256)

    @cached_property
    def container(self) -> Container | None:
        """The safetensors container, if the name or the first bytes say that it is one.

        Raises InvalidHeader where it is one and damaged.
        """
        named = self.file.name.endswith((".safetensors", INDEX_SUFFIX))
        return open_container(self.file) if named or self.head[8:9] == b"{" else None

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The model's config: the one passed, or config.json beside the file, or nothing."""
        if isinstance(self._config, Mapping):
            return self._config
        beside = self.file.parent / "config.json"
        if self._config is None and not beside.is_file():
            return {}
        path = beside if self._config is None else as_path(self._config)
        return parse_object(read_small(path), path, "the config")

    @property
    def is_configured(self) -> bool:
        """Whether the caller passed a config."""
        return self._config is not None

    @cached_property
    def quantization(self) -> Mapping[str, Any]:
        """What the config says of quantization; nothing where it says nothing.

        That is what the metadata of the file itself hold, as files written here do; or
        ``quantization_config`` (or MLX's ``quantization``) of a model's config; or, where one was
        passed that has neither, the whole; or what tools write to files of their own beside the
        tensors. A config that was passed comes before all of them.
        """
        inside = None if self.container is None else self.container.metadata.get(CONFIG)
        if inside is not None and self._config is None:
            return parse_object(inside, self.file, "its quantization config")
        config = self.config
        for key in (CONFIG, "quantization"):
            found = config.get(key)
            if isinstance(found, Mapping) and found:
                return found
        if self._config is not None and set(config) - {"quantization_config"}:
            return config
        for name, method in _OWN_CONFIGS.items():
            beside = self.file.parent / name
            if beside.is_file():
                found = parse_object(read_small(beside), beside, "the config")
                return {"quant_method": method} | found
        return {}

    @property
    def method(self) -> str | None:
        """The ``quant_method`` of the config, in small letters."""
        found = self.quantization.get("quant_method")
        return found.lower() if isinstance(found, str) else None

    def why_not_declared(self, name: str, *methods: str) -> str | None:
        """Why this is no safetensors file that ``format=`` or a quant_method says is ``name``."""
        if self.container is None:
            return "it is not a safetensors file"
        if self.format == name or self.method in (methods or (name,)):
            return None
        return f"its config has the quant_method {self.method!r}"

    def other_file(self, name: str) -> Mapping[str, Any] | None:
        """The JSON object of a file beside the tensors, if there is one of that name."""
        beside = self.file.parent / name
        return parse_object(read_small(beside), beside, name) if beside.is_file() else None

    def _file(self) -> Path:
        try:
            if self.path.is_dir():
                return self._file_of_folder()
            index = self.path.with_name(f"{self.path.name}.index.json")
            if not self.path.exists() and index.name.endswith(INDEX_SUFFIX) and index.is_file():
                return index  # saved in several files under this name
            os.stat(self.path)
        except PolyquantError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or str(error)
            raise UnreadableFile(path=self.path, reason=reason) from error
        return self.path

    def _file_of_folder(self) -> Path:
        names = sorted(os.listdir(self.path))
        for name in _NAMES:
            if name in names:
                return self.path / name
        for suffix in _SUFFIXES:
            found = [n for n in names if n.endswith(suffix) and not n.startswith(".")]
            found = [n for n in found if _is_first(n)] or found
            found = [n for n in found if n.removesuffix(".index.json") not in names] or found
            if len(found) == 1:
                return self.path / found[0]
            if found:
                reason = f"the folder holds several: {', '.join(found[:5])}; name one of them"
                raise UnknownFormat(path=self.path, reason=reason, known=", ".join(_SUFFIXES))
        reason = "the folder holds no file of tensors"
        raise UnknownFormat(path=self.path, reason=reason, known=", ".join(_SUFFIXES))


def _is_first(name: str) -> bool:
    """Whether a name is not that of a later part of a GGUF file in parts."""
    part = re.search(r"-(\d{5})-of-\d{5}\.gguf$", name)
    return part is None or part[1] == "00001"


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path of a text or path object. Raises InvalidArgument."""
    try:
        made = Path(path)
    except TypeError:
        made = None
    if made is None or path == "":  # Path("") would be the folder that we happen to be in
        raise InvalidArgument(name="path", wanted="a text or a path object", got=path)
    return made
