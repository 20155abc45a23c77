"""The kernels of NVIDIA GPUs, best first. What they are made of is imported when they run.

A package or a GPU that is missing is a reason. Where torch sees no GPU at all the question is
about another machine's, and is answered for one that has everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from polyquant.kernel import Kernel, Problem
from polyquant.scheme import QuantScheme

_HERE = "polyquant.backends.torch.cuda"
#: Compute capability of the oldest GPU that kernels are written for (bf16, cp.async): Ampere.
_OLDEST = (8, 0)


def _needs(*packages: str) -> Callable[[], str | None]:
    """What this machine lacks of packages and GPUs, asked once."""

    @cache
    def lacking() -> str | None:
        if not torch.cuda.is_available():
            return None
        for package in packages:
            if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
                return f"{package} is not installed"
        if torch.version.cuda is None:
            return "torch is built for GPUs of another maker"
        found = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
        if found < _OLDEST:
            return f"a GPU here is of compute capability {found}, and it needs {_OLDEST} or newer"
        return None

    return lacking


_lacks_triton = _needs("triton")
_lacks_nvrtc = _needs("triton", "cuda.bindings.nvrtc")


def _module(name: str) -> Any:
    return import_module(f"{_HERE}.{name}")


# -- what each takes --------------------------------------------------------------------------


def _why_not_scheme(scheme: Any) -> str | None:
    """Why Triton's decoder cannot read a scheme; a float operand (a dtype's name) it need not."""
    if not isinstance(scheme, QuantScheme):
        return None
    if scheme.block is not None and len(scheme.block) > 3:
        return "its blocks have more than three axes"
    return None


def _why_not_dequantize(problem: Problem) -> str | None:
    return _lacks_triton() or _why_not_scheme(problem.a)


def _why_not_cublas(problem: Problem) -> str | None:
    if "float64" in (problem.a, problem.b):
        return "it multiplies in float32 at most, and an operand is float64"
    return _lacks_triton() or _why_not_scheme(problem.a) or _why_not_scheme(problem.b)


def _why_not_mma(problem: Problem) -> str | None:
    found: str | None = _module("schemes").why_not(problem)
    return _lacks_nvrtc() or _why_not_scheme(problem.b) or found


# -- how each runs ----------------------------------------------------------------------------


def _dequantize(q: Any, dtype: Any) -> Any:
    return _module("decode").dequantize(q, dtype)


def _cublas(a: Any, b: Any, dtype: Any) -> Any:
    return _module("products").matmul(a, b, dtype)


def _mma(a: Any, b: Any, dtype: Any) -> Any:
    return _module("mma").matmul(a, b, dtype)


KERNELS = (
    Kernel("torch.nvrtc.mma", "matmul", _why_not_mma, _mma),
    Kernel("torch.triton.cublas", "matmul", _why_not_cublas, _cublas),
    Kernel("torch.triton.dequantize", "dequantize", _why_not_dequantize, _dequantize),
)
