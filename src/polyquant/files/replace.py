"""A file that replaces another in one step, or leaves it as it was."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polyquant.errors import WriteFailed

#: Linux writes at most 2^31 - 4096 bytes a call; a smaller run also shows an interrupt sooner.
_RUN_BYTES = 2**28


class Replacement:
    """A temporary file beside ``path``: written anywhere, then put in place, or discarded.

    A link is followed, so that what it points to is replaced and the link stays. All methods raise
    WriteFailed, after which the old file is as it was and the temporary one is gone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._failing():
            target = Path(os.path.realpath(path))
            self._existed = os.path.lexists(target)
            self._check_target(target)
            made = target.with_name(f".polyquant-{secrets.token_hex(8)}.tmp")
            self._descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self._target, self._temporary = target, made
        with self._failing():
            if self._existed:
                os.fchmod(self._descriptor, stat.S_IMODE(os.stat(target).st_mode))

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset."""
        with self._failing():
            while data:
                written = os.pwrite(self._descriptor, data[:_RUN_BYTES], offset)
                data, offset = data[written:], offset + written

    def flush(self) -> None:
        """Bring everything to the disk and close."""
        with self._failing():
            os.fsync(self._descriptor)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def put_in_place(self) -> None:
        """Rename over the old file, after ``flush``."""
        with self._failing():
            os.replace(self._temporary, self._target)
        with suppress(OSError):  # the new file is there; this makes the rename itself durable
            folder = os.open(self._target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def discard(self) -> None:
        """Remove the temporary file, if it is still there."""
        if getattr(self, "_descriptor", -1) >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):
                os.close(descriptor)
        if hasattr(self, "_temporary"):
            with suppress(OSError):
                os.unlink(self._temporary)

    def _check_target(self, target: Path) -> None:
        if self._existed and not stat.S_ISREG(os.lstat(target).st_mode):
            what = "a folder" if target.is_dir() else "not a regular file"
            raise WriteFailed(path=self.path, reason=f"there is {what} of that name", kept=_KEPT)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            self.discard()
            if isinstance(error, WriteFailed):
                raise
            kept = _KEPT if getattr(self, "_existed", False) else "Nothing was left behind"
            reason = getattr(error, "strerror", None) or str(error)
            raise WriteFailed(path=self.path, reason=reason, kept=kept) from error


_KEPT = "What was there before is untouched"
