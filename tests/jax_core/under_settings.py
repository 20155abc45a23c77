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
    "q4s/32:f16",
    "nvfp4",
    "mxfp4",
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


def check(scheme: str, *, eagerly: bool) -> None:
    s = pq.scheme(scheme)

    def both(run: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The result under jit and, where that is asked for (it compiles op by op), without."""
        return [jax.jit(run)(*arguments), *([run(*arguments)] if eagerly else [])]

    values, x = awkward(1, (6, 70)), np.random.default_rng(2).normal(size=(5, 70))
    table = np.linspace(-1.5, 2.0, 8).astype(np.float32) if s.table == "custom" else None
    wanted = pq.quantize(values, s, table=table, nonfinite="saturate")
    there = None if table is None else jnp.asarray(table)
    for q in both(
        lambda v: pq.quantize(v, s, table=there, nonfinite="saturate"), jnp.asarray(values)
    ):
        assert_same_parts(q, wanted)
        kinds = ("float16", "bfloat16", "float32", *(("float64",) if WIDE else ()))
        for kind in kinds:
            for got in both(lambda q, kind=kind: q.dequantize(kind), q):
                assert_same_bits(host(got), wanted.dequantize(kind), f"{scheme} {kind}")
    small = pq.quantize(np.random.default_rng(3).normal(size=(8, 70)), s, table=table)
    q = small.to("jax:cpu:0")
    for kind in kinds:
        entering = jnp.asarray(x).astype(kind)
        exact = host(entering).astype(np.float64) @ small.dequantize("float64").T
        for got in both(lambda x, q: x @ q.mT, entering, q):
            assert got.dtype == kind
            size = np.abs(x) @ np.abs(small.dequantize("float64").T)
            unit = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23}.get(kind, 2**-52)
            assert (np.abs(host(got).astype(np.float64) - exact) <= unit * size).all(), kind

    def loss(x: Any, q: Any) -> Any:
        return (pq.linear(x, q, jnp.ones(8, x.dtype)) ** 2).mean()

    for got in both(jax.grad(loss), jnp.asarray(x), q):
        assert np.isfinite(host(got)).all() and got.dtype == jnp.asarray(x).dtype
    for got in both(jax.grad(loss, 1, allow_int=True), jnp.asarray(x), q):
        assert got.shape == q.shape
    if table is None:
        for got in both(jax.grad(lambda x: pqj.fake_quantize(x, s).sum()), jnp.asarray(x)):
            assert got.shape == x.shape
    stack = jax.tree.map(lambda part: jnp.stack([part, part]), q)
    out, _ = jax.jit(
        lambda x, s: jax.lax.scan(lambda c, q: (c + (x @ q.mT).mean(), None), 0.0 * x[0, 0], s)
    )(jnp.asarray(x), stack)
    assert np.isfinite(host(out))


for each in SCHEMES:
    check(each, eagerly=each == SCHEMES[1])
q = pq.quantize(jnp.ones((4, 32)), "q4s")
assert pq.ops.sum(q * 2.0 + q).shape == () and q[1:3].shape == (2, 32)
try:
    q.dequantize("float64")
except pq.errors.UnsupportedDtype:
    assert not WIDE
else:
    assert WIDE
sys.stdout.write(f"{len(SCHEMES)} schemes, x64 {WIDE}\n")
