"""The definition under XLA on GPUs and TPUs: not to the contract yet, so it declines.

Measured on an H200 with jax 0.11: XLA's float32 division there is not correctly rounded, which
moves scales by a unit in the last place, and its float32 products use TF32, some 90 times the
bound. Both have remedies (a corrected quotient, matmul precision "highest"); until they are in and
``polyquant conform`` passes, refusing beats answers that differ from every other device's.
"""

from __future__ import annotations

from polyquant.backends import definition
from polyquant.kernel import Kernel, Problem


def _not_yet(problem: Problem) -> str | None:
    return (
        f"XLA on {problem.device_kind} divides approximately and multiplies in TF32, which breaks "
        "the numerical contract; use jax:cpu or torch:cuda"
    )


KERNELS = tuple(Kernel(k.name, k.op, _not_yet, k.run) for k in definition.KERNELS)
