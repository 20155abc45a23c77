"""The definition under XLA on GPUs and TPUs, where it runs once it was seen to keep the contract.

Measured on an H200 with jax 0.11: XLA's float32 division there is not correctly rounded, which
moves scales by a unit in the last place, and its float32 products use TF32, some 90 times the
bound. ``division`` mends both: it divides as integers, and asks products for full precision. Until
``polyquant conform`` has passed on a kind of device, refusing beats answers that differ from every
other device's.
"""

from __future__ import annotations

from polyquant.backends import definition
from polyquant.kernel import Kernel, Problem

#: Kinds of devices on which ``polyquant conform --device jax:KIND:0`` has passed ("gpu", "tpu").
CONFORMING: frozenset[str] = frozenset()


def _why_not(problem: Problem) -> str | None:
    if problem.device_kind in CONFORMING:
        return None
    return (
        f"polyquant conform has not passed with XLA on {problem.device_kind}, which divides "
        "approximately and multiplies in TF32 unless told otherwise; use jax:cpu or torch:cuda"
    )


KERNELS = tuple(
    Kernel(k.name, k.op, _why_not, k.run, takes_extras=k.takes_extras) for k in definition.KERNELS
)
