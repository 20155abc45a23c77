"""The compiled part as the handler of XLA's custom calls."""

from __future__ import annotations

import re
import threading
from functools import cache
from pathlib import Path
from typing import Any

import jax

from polyquant.backends.native.compiled import compiled

_ONE_AT_A_TIME = threading.Lock()


def native(target: str, function: str, platform: str, stages: tuple[str, ...]) -> Any:
    """The compiled part, whose handler is known to XLA by a name; it is registered once."""
    with _ONE_AT_A_TIME:
        return _registered(target, function, platform, stages)


@cache
def _registered(target: str, function: str, platform: str, stages: tuple[str, ...]) -> Any:
    found = compiled()
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    told = re.search(r"XLA_FFI_API_MINOR (\d+)", header.read_text(encoding="utf-8"))
    make = getattr(found, function)
    handler = make() if told is None else make(int(told[1]))
    handlers = dict.fromkeys(stages, handler)
    jax.ffi.register_ffi_target(target, handlers, platform=platform, api_version=1)
    return found
