"""The compiled module, and how many threads it uses."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

from polyquant.errors import BackendMissing, InvalidArgument

_NATIVE = "polyquant._native"
_MOST_THREADS = 1024


@cache
def compiled() -> Any:
    """The compiled module. Raises ImportError where it was not built."""
    module = import_module(_NATIVE)
    count = _threads_asked() or _processors()
    module.set_num_threads(min(count, _MOST_THREADS))
    return module


@cache
def missing() -> str | None:
    """Why there is no compiled module, or None where there is one."""
    try:
        compiled()
    except ImportError as error:
        return (
            f"the compiled part is not installed ({error}); "
            "install polyquant where there is a C++17 compiler"
        )
    return None


def set_num_threads(count: int) -> None:
    """Use up to ``count`` threads for a product on the CPU: 1 to 1024, for the whole process.

    Without it, ``PQ_NUM_THREADS`` of the environment counts, else the processors that this process
    may use. torch tensors keep to ``torch.set_num_threads``. Results do not depend on it. Raises
    InvalidArgument, and BackendMissing where the compiled part is not installed.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_THREADS:
        raise InvalidArgument(name="count", wanted=f"1 to {_MOST_THREADS} threads", got=count)
    _compiled_or_error().set_num_threads(count)


def num_threads() -> int:
    """How many threads a product on the CPU may use (1 without the compiled part)."""
    return 1 if missing() else int(compiled().num_threads())


def _compiled_or_error() -> Any:
    why = missing()
    if why is not None:
        fix = "Run: pip install --force-reinstall polyquant, where there is a C++17 compiler"
        raise BackendMissing(backend="native", reason=why, fix=fix)
    return compiled()


def _processors() -> int:
    """How many processors this process may use; macOS knows only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _threads_asked() -> int | None:
    text = os.environ.get("PQ_NUM_THREADS", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MOST_THREADS):
        wanted = f"1 to {_MOST_THREADS}, or nothing"
        raise InvalidArgument(name="PQ_NUM_THREADS", wanted=wanted, got=text)
    return int(text)
