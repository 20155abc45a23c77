"""Kernels for NVIDIA GPUs in Pallas: the table of them, and what they take.

What they are made of is imported when they run. A GPU that is missing is no reason: the question
is then about another machine's, and is answered for one that has everything.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import jax

from polyquant import standard
from polyquant.kernel import Kernel, Problem
from polyquant.scheme import OffsetKind, QuantScheme
from polyquant.values import QuantMode, QuantStore, QuantValue, ScaleDtype

#: Compute capability of the oldest GPUs that have bf16 and tf32 (Ampere), and e4m3 (Ada).
_OLDEST, _WITH_E4M3 = 8.0, 8.9
#: Rows of x above which decoding the weight first is quicker (see docs/cuda.md), and those of
#: float32, which is summed without tensor cores.
_MOST_ROWS = MappingProxyType({"bfloat16": 64, "float16": 64, "float32": 16})
#: Bytes of a weight that offsets of 32 bits reach.
_MOST_BYTES = 1 << 31
#: No fewer than the slices of k (8 by default), whose sums lie beside each other.
_MOST_SLICES = 64
_MINIFLOATS = (QuantValue.E2M1, QuantValue.E4M3, QuantValue.E5M2)
#: Those that the GPU converts from e4m3, in one kernel or the other.
_THROUGH_E4M3 = (QuantValue.E2M1, QuantValue.E4M3)


@cache
def _lacking(least: float) -> str | None:
    """What the GPUs here lack, asked once."""
    found = [device for device in jax.devices() if device.platform == "gpu"]
    for device in found:
        if "NVIDIA" not in device.device_kind:
            return f"it is for NVIDIA's GPUs, and one here is {device.device_kind}"
        if float(device.compute_capability) < least:
            return f"a GPU here is of compute capability {device.compute_capability}, below {least}"
    return None


def _why_not(problem: Problem) -> str | None:
    scheme = problem.b
    if not isinstance(scheme, QuantScheme) or isinstance(problem.a, QuantScheme):
        return "it multiplies a float by a quantized weight"
    if problem.device_kind != "gpu":
        return f"it is for GPUs, not {problem.device_kind}"
    if problem.a not in _MOST_ROWS:
        return f"it takes bfloat16, float16 and float32, not {problem.a}"
    if problem.layout[1] != (1, 0):
        return "it takes a weight of two axes, stored (out, in)"
    if not problem.m or not problem.n or not problem.k:
        return "an extent is zero, or not known"
    most = _MOST_ROWS[problem.a]
    if problem.m > most:
        return f"it is for up to {most} rows of {problem.a}; for more, decode the weight first"
    if problem.n * problem.k * scheme.bits // 8 > _MOST_BYTES:
        return "its offsets are of 32 bits, and the weight may be larger than 2 GiB"
    if problem.m * problem.n * _MOST_SLICES > _MOST_BYTES:
        return "its offsets are of 32 bits, and the result may be too large for them"
    if problem.transformed and jax.device_count() > 1:
        return "XLA may split traced operands over the GPUs here, and it cannot split this kernel"
    through_e4m3 = scheme.value in _THROUGH_E4M3 or scheme.scale is ScaleDtype.UE4M3
    return _why_not_scheme(scheme) or _lacking(_WITH_E4M3 if through_e4m3 else _OLDEST)


def _why_not_scheme(scheme: QuantScheme) -> str | None:
    is_lookup = scheme.mode is QuantMode.LOOKUP
    if scheme.bits not in (1, 2, 4, 8):
        return f"codes of {scheme.bits} bits lie across bytes"
    if not is_lookup and scheme.value.is_float and scheme.value not in _MINIFLOATS:
        return f"it has no decoder for {scheme.value}"
    if scheme.store is QuantStore.NATIVE and scheme.bits < 8:
        return "it takes packed codes, not one a byte"
    if scheme.offset is not None:
        is_integer = isinstance(scheme.offset.dtype, QuantValue)
        if scheme.offset.kind is OffsetKind.BIAS or not is_integer or scheme.value.is_float:
            return "of offsets it takes integer zero points beside integers"
    if scheme.block is None:
        return None
    if len(scheme.block) > 2:
        return "its blocks must have two axes at most"
    if scheme.block[-1] != -1 and scheme.block[-1] * scheme.bits % 32:
        return "blocks along the input axis must be of whole 4 bytes"
    return None


def _run(x: Any, weight: Any, kind: Any) -> Any:
    """Traced code may yet be compiled for another platform than that of JAX's default device."""
    run = partial(import_module(f"{__name__}.product").matmul, kind=kind)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((x, weight))):
        return run(x, weight)
    elsewhere = partial(standard.matmul, kind=kind)
    return jax.lax.platform_dependent(x, weight, cuda=run, default=elsewhere)


KERNELS = (Kernel("jax.pallas.matmul", "matmul", _why_not, _run),)
