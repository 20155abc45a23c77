"""Kernels for NVIDIA GPUs in CUDA C++, the same that torch launches: the table of them.

What they are made of is imported when they run. Where JAX sees no GPU the question is about
another machine's, and is answered for one that has everything.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import jax

from polyquant.backends import nvidia
from polyquant.backends.native.compiled import missing
from polyquant.backends.nvidia import schemes
from polyquant.kernel import Kernel, Problem
from polyquant.scheme import QuantScheme

#: Compute capability of the oldest GPUs that have bf16 and cp.async (Ampere), and e4m3 (Ada).
_OLDEST, _WITH_E4M3 = (8, 0), (8, 9)
_HOPPER = (9, 0)
#: What brings JAX and the compiler of one version of CUDA.
_INSTALL = "pip install 'polyquant[cuda13]', or [cuda12] for a driver of CUDA 12"


def capability_of(device: Any) -> tuple[int, int]:
    """The compute capability of one of JAX's GPUs."""
    major, _, minor = str(device.compute_capability).partition(".")
    return int(major), int(minor or 0)


@cache
def _lacking() -> str | None:
    """What this machine lacks, asked once."""
    found = [device for device in jax.devices() if device.platform == "gpu"]
    if not found:
        return None
    for device in found:
        if "NVIDIA" not in device.device_kind:
            return f"it is for NVIDIA's GPUs, and one here is {device.device_kind}"
        if capability_of(device) < _OLDEST:
            return (
                f"it needs compute capability {_OLDEST}, and a GPU here has {capability_of(device)}"
            )
    if len({capability_of(device) for device in found}) > 1:
        return "the GPUs here differ in compute capability, and it is compiled for one"
    reason = nvidia.why_no_compiler()
    return missing() or (reason and f"{reason}: {_INSTALL}")


@cache
def _below(least: tuple[int, int]) -> tuple[int, int] | None:
    """The compute capability of the GPUs here, where it is another than asked for."""
    for device in jax.devices():
        if device.platform == "gpu":
            found = capability_of(device)
            return found if found < least or least == _HOPPER != found else None
    return None


def _why_not(problem: Problem) -> str | None:
    if problem.device_kind != "gpu":
        return f"it is for GPUs, not {problem.device_kind}"
    reason = schemes.why_not(problem)
    if reason is not None:
        return reason
    if not problem.m or not problem.n or not problem.k:
        return "an extent is zero, or not known"
    if problem.transformed and jax.device_count() > 1:
        return "XLA may split traced operands over the GPUs here, and it cannot split this kernel"
    reason = _lacking()
    if reason is not None:
        return reason
    least = _HOPPER if problem.m > schemes.MOST_BY_MMA else _OLDEST
    if isinstance(problem.b, QuantScheme) and schemes.converts_fp8(problem.b):
        least = max(least, _WITH_E4M3)
    found = _below(least)
    if found is None:
        return None
    return f"for this it needs compute capability {least}, and the GPUs here have {found}"


def _run(x: Any, weight: Any, kind: Any) -> Any:
    return import_module(f"{__name__}.product").matmul(x, weight, kind)


KERNELS = (Kernel("jax.nvrtc.mma", "matmul", _why_not, _run),)
