"""A file that replaces another in one step, or leaves it as it was."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
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
        self._file: FileIO | None = None
        self._temporary: Path | None = None
        self._existed = False
        with self._failing():
            self._target = Path(os.path.realpath(path))
            self._existed = os.path.lexists(self._target)
            self._check_target()
            temporary = self._target.with_name(f".polyquant-{secrets.token_hex(8)}.tmp")
            self._file = FileIO(temporary, "xb")
            self._temporary = temporary
            if self._existed:
                os.chmod(temporary, stat.S_IMODE(os.stat(self._target).st_mode))

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset."""
        with self._failing():
            file = self._open_file()
            file.seek(offset)
            while data:
                data = data[file.write(data[:_RUN_BYTES]) :]

    def flush(self) -> None:
        """Bring everything to the disk and close."""
        with self._failing():
            file = self._open_file()
            os.fsync(file.fileno())
            file.close()

    def put_in_place(self) -> None:
        """Rename over the old file, after ``flush``."""
        with self._failing():
            os.replace(self._temporary or "", self._target)
            self._temporary = None
        with suppress(OSError):  # the new file is there; this makes the rename itself durable
            folder = os.open(self._target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def discard(self) -> None:
        """Remove the temporary file, if it is still there."""
        if self._file is not None:
            with suppress(OSError):  # a close may report what a write could not do
                self._file.close()
            self._file = None
        if self._temporary is not None:
            with suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = None

    def _open_file(self) -> FileIO:
        if self._file is None:
            reason = "an earlier write to it failed"
            raise WriteFailed(path=self.path, reason=reason, kept=self._kept())
        return self._file

    def _check_target(self) -> None:
        if self._existed and not stat.S_ISREG(os.lstat(self._target).st_mode):
            what = "a folder" if self._target.is_dir() else "something that is not a regular file"
            reason = f"there is {what} of that name"
            raise WriteFailed(path=self.path, reason=reason, kept=self._kept())

    def _kept(self) -> str:
        if self._existed:
            return "What was there before is untouched"
        return "Nothing was there before, and nothing was left behind"

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Discard and raise WriteFailed where the system refuses (or the path holds a NUL)."""
        try:
            yield
        except WriteFailed:
            self.discard()
            raise
        except (OSError, ValueError) as error:
            self.discard()
            reason = getattr(error, "strerror", None) or str(error)
            raise WriteFailed(path=self.path, reason=reason, kept=self._kept()) from error
