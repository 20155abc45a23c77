"""An open file of tensors: names and schemes at once, each tensor when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from polyquant.arrays import Array, HostArray, backend_of_device
from polyquant.errors import TensorNotFound, UnreadableFile
from polyquant.files.host import to_device
from polyquant.files.info import TensorInfo
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme


@dataclass(frozen=True)
class Entry:
    """A tensor that can be read: what is known of it, and how to get it (on NumPy)."""

    info: TensorInfo
    read: Callable[[], HostArray | QTensor]


class Checkpoint(Mapping[str, Any]):
    """A lazy, read-only mapping from names to tensors, and a context manager.

    Opening reads headers only. A tensor is read, and its checksum compared, each time that it is
    asked for. On NumPy a plain tensor may be a read-only view of the file's pages; it stays valid
    after the checkpoint is closed, and when the file is replaced (not when it is truncated).
    """

    def __init__(
        self,
        path: Path,
        format: str,
        metadata: Mapping[str, str],
        entries: Mapping[str, Entry],
        close: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.path, self.format = path, format
        self.metadata: Mapping[str, str] = MappingProxyType(metadata)  # may be read lazily
        self._infos = {name: entry.info for name, entry in entries.items()}
        self._reads = {name: entry.read for name, entry in entries.items()}
        self._close, self._release, self._is_open = close, release, True

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype or scheme, and size of a tensor. Raises TensorNotFound."""
        if name not in self:
            raise TensorNotFound(path=self.path, name=name, nearest=nearest(name, self._infos))
        return self._infos[name]

    def schemes(self) -> dict[str, QuantScheme | None]:
        """Name -> scheme, or None of a plain tensor."""
        return {name: info.scheme for name, info in self._infos.items()}

    def read(self, name: str, device: str = "numpy") -> Array | QTensor:
        """One tensor on a device, bit-identical.

        Raises TensorNotFound, ChecksumMismatch, CorruptData, UnsupportedDtype, UnknownDevice,
        BackendMissing, UnreadableFile.
        """
        _, device = backend_of_device(device)
        self.info(name)
        if not self._is_open:
            raise UnreadableFile(path=self.path, reason="the checkpoint is closed")
        tensor = self._reads[name]()
        return tensor.to(device) if isinstance(tensor, QTensor) else to_device(tensor, device)

    def release(self) -> None:
        """Give the pages of what has been read back to the system; arrays stay valid.

        For who reads tensor after tensor of a large file: the pages count as memory until then.
        """
        if self._release is not None:
            self._release()

    def close(self) -> None:
        """Let go of the file. Names, infos and arrays that were read stay."""
        if self._is_open:
            self._is_open = False
            self._reads.clear()
            if self._close is not None:
                self._close()

    def __getitem__(self, name: str) -> Any:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._infos

    def __eq__(self, other: object) -> bool:
        return self is other  # Mapping's would read and compare every array

    __hash__ = object.__hash__

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, format={self.format!r}, {len(self)} tensors)"


def nearest(name: object, names: Mapping[str, Any]) -> str:
    """The names closest to one that does not exist, as text."""
    found = get_close_matches(str(name), names, n=3, cutoff=0.4) or list(names)[:3]
    return ", ".join(map(repr, found)) or "there are none"
