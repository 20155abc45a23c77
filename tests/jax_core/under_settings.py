"""What test_settings.py runs in a process of its own, where settings of JAX hold from the start.

    python under_settings.py FLAG=VALUE...

Quantizes, decodes, multiplies and differentiates, eagerly and under jit, and compares with NumPy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

for flag in sys.argv[1:]:
    name, _, value = flag.partition("=")
    jax.config.update(name, {"True": True, "False": False}.get(value, value))
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax.numpy as jnp  # noqa: E402

import polyquant as pq  # noqa: E402
import polyquant.jax as pqj  # noqa: E402
from devices import assert_same_bits, assert_same_parts, host  # noqa: E402

WIDE = bool(jax.config.jax_enable_x64)
SCHEMES = (
    "nvfp4",
    "u3[custom]/16:f32",
    "u4/32:(u6/8:f16)+bias:(q6s/8:f16)",
)


def awkward(seed: int, shape: tuple[int, ...]) -> Any:
    """Numbers of many magnitudes, with zero blocks, a short last block and infinities."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * np.ldexp(1.0, rng.integers(-30, 30, shape))
    values[0, :40] = 0.0
    values[1, 5], values[2, 7] = np.inf, -np.inf
    return values.astype("float64" if WIDE else "float32")


def check_products(products: list[Any], entering: list[Any], q: Any) -> None:
    """Within the rounding of each product's dtype of those in float64.

    float64 itself has the contract's bound: sums in another order are no nearer to each other.
    """
    values = q.dequantize("float64")
    for got, x in zip(products, entering, strict=True):
        wide = x.astype(np.float64)
        unit = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23}.get(str(x.dtype), 2**-52)
        unit *= 4 * np.sqrt(x.shape[-1]) if unit == 2**-52 else 1.0
        error = np.abs(host(got).astype(np.float64) - wide @ values.T)
        assert got.dtype == x.dtype
        assert (error <= unit * (np.abs(wide) @ np.abs(values).T)).all(), x.dtype


def check(scheme: str, *, eagerly: bool) -> None:
    s = pq.scheme(scheme)

    def both(run: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The result under jit and, where that is asked for (it compiles op by op), without."""
        return [jax.jit(run)(*arguments), *([run(*arguments)] if eagerly else [])]

    values, x = awkward(1, (6, 70)), np.random.default_rng(2).normal(size=(5, 70))
    table = np.linspace(-1.5, 2.0, 8).astype(np.float32) if s.table == "custom" else None
    wanted = pq.quantize(values, s, table=table, nonfinite="saturate")
    there = None if table is None else jnp.asarray(table)
    kinds = ("float16", "bfloat16", "float32", *(("float64",) if WIDE else ()))

    def there_and_back(v: Any) -> Any:
        q = pq.quantize(v, s, table=there, nonfinite="saturate")
        return q, [q.dequantize(kind) for kind in kinds]

    for q, decoded in both(there_and_back, jnp.asarray(values)):
        assert_same_parts(q, wanted)
        for kind, got in zip(kinds, decoded, strict=True):
            assert_same_bits(host(got), wanted.dequantize(kind), f"{scheme} {kind}")
    small = pq.quantize(np.random.default_rng(3).normal(size=(8, 70)), s, table=table)
    q, x = small.to("jax"), jnp.asarray(x)
    for products in both(lambda x, q: [x.astype(kind) @ q.mT for kind in kinds], x, q):
        check_products(products, [host(x.astype(kind)) for kind in kinds], small)

    def loss(x: Any, q: Any) -> Any:
        bent = 0.0 if s.table == "custom" else pqj.fake_quantize(x, s).sum()
        return (pq.linear(x, q, jnp.ones(8, x.dtype)) ** 2).mean() + bent

    for of_x, of_q in both(jax.grad(loss, (0, 1), allow_int=True), x, q):
        assert np.isfinite(host(of_x)).all() and of_x.dtype == x.dtype and of_q.shape == q.shape
    stack = jax.tree.map(lambda part: jnp.stack([part, part]), q)
    out, _ = jax.jit(
        lambda x, s: jax.lax.scan(lambda c, q: (c + (x @ q.mT).mean(), None), 0.0 * x[0, 0], s)
    )(x, stack)
    assert np.isfinite(host(out))


for each in SCHEMES:
    check(each, eagerly=each == "u3[custom]/16:f32")
q = pq.quantize(jnp.ones((4, 32)), "q4s")
assert pq.ops.sum(q * 2.0 + q).shape == () and q[1:3].shape == (2, 32)
try:
    q.dequantize("float64")
except pq.errors.UnsupportedDtype:
    assert not WIDE
else:
    assert WIDE
sys.stdout.write(f"{len(SCHEMES)} schemes, x64 {WIDE}\n")
