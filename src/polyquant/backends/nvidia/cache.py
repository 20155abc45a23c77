"""What is kept on disk from one process to the next: compiled kernels, and measured tiles."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """Where it is kept: the folder that PQ_CACHE names, or ``~/.cache/polyquant``."""
    named = os.environ.get("PQ_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "polyquant"


def kept(parts: tuple[bytes, ...], make: Callable[[], bytes]) -> bytes:
    """What ``make`` returned for the same parts in this process or an earlier one.

    A file holds it behind its digest: one that was cut off is made again. A digest is no signature,
    so the folder must be the user's own. Where it can't be used each process makes its own.
    """
    sizes = (b"%d" % len(part) for part in parts)
    name = hashlib.sha256(b"\0".join((*sizes, *parts))).hexdigest()
    with suppress(OSError, RuntimeError):  # there may be no home
        stored = (folder() / "kernels" / name).read_bytes()
        if hashlib.sha256(stored[_DIGEST:]).digest() == stored[:_DIGEST]:
            return stored[_DIGEST:]
    made = make()
    with suppress(OSError, RuntimeError):
        write(folder() / "kernels" / name, hashlib.sha256(made).digest() + made)
    return made


def write(path: Path, stored: bytes) -> None:
    """Whoever reads meanwhile sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(stored)
            file.close()
            os.replace(file.name, path)
        finally:
            with suppress(FileNotFoundError):  # it has its name
                os.unlink(file.name)
