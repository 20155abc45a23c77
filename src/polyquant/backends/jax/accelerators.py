"""XLA on GPUs and TPUs: products in the dtype of their rows, and the definition, where it conforms.

Measured on an H200 with jax 0.11: XLA's float32 division there is not correctly rounded, which
moves scales by a unit in the last place, and its float32 products use TF32, some 90 times the
bound. ``division`` mends both: it divides as integers, and asks products for full precision. With
that GPUs conform. On what was never tried, refusing beats answers that differ from every other
device's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from polyquant import standard
from polyquant.backends import definition
from polyquant.kernel import Kernel, Problem
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme

Array = Any
#: Kinds of devices on which ``polyquant conform --device jax:KIND:0`` has passed ("gpu", "tpu").
CONFORMING: frozenset[str] = frozenset({"gpu"})


def _why_not(problem: Problem) -> str | None:
    if problem.device_kind in CONFORMING:
        return None
    return (
        f"polyquant conform has not passed with XLA on {problem.device_kind}, which divides "
        "approximately and multiplies in TF32 unless told otherwise; use jax:cpu or torch:cuda"
    )


def _why_not_narrow(problem: Problem) -> str | None:
    kinds = [side for side in (problem.a, problem.b) if not isinstance(side, QuantScheme)]
    if len(kinds) != 1 or kinds[0] not in ("bfloat16", "float16"):
        return "one operand must be bfloat16 or float16, the other quantized"
    if problem.device_kind != "gpu":
        return f"it was measured on GPUs, not on a {problem.device_kind}"
    return _why_not(problem)


@partial(jax.jit, static_argnums=2)
def narrow(a: Any, b: Any, kind: Any) -> Array:
    """``a @ b``. Decoded values are rounded to bfloat16 beside bfloat16, to TF32 beside float16.

    TF32 has the significand of float16, and room for every scale. Sums are float32.
    """
    is_bf16 = jnp.bfloat16 in [side.dtype for side in (a, b) if not isinstance(side, QTensor)]
    enter, precision = (jnp.bfloat16, None) if is_bf16 else (jnp.float32, "tensorfloat32")

    def entering(side: Any) -> Array:
        return standard.dequantize(side, enter) if isinstance(side, QTensor) else side.astype(enter)

    total = jnp.matmul(
        entering(a), entering(b), precision=precision, preferred_element_type=jnp.float32
    )
    return total.astype(kind)


KERNELS = (
    Kernel("jax.xla.matmul", "matmul", _why_not_narrow, narrow, takes_extras=True),
    *(
        Kernel(k.name, k.op, _why_not, k.run, takes_extras=k.takes_extras)
        for k in definition.KERNELS
    ),
)
