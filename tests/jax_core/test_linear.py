"""Products by kernels that JAX cannot look into: what transformations ask of one operation."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import host
from polyquant import standard
from polyquant.kernel import Kernel

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

from polyquant.jax.linear import product_by  # noqa: E402

#: The definition in the place of a kernel: what is asked here is the operation around it.
KERNEL = Kernel("test", "matmul", lambda problem: None, standard.matmul)
ROWS, N, K = 3, 16, 64


def operands() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(ROWS, K)), rng.normal(size=(N, K))
    q = pq.quantize(weight.astype(np.float32), "nf4").to("jax")
    return jnp.asarray(x, jnp.float32), q, host(q.dequantize()).T


def product(x: Any, q: Any) -> Any:
    return product_by(KERNEL, x, q.T, jnp.dtype("float32"))


def close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(host(got), wanted, rtol=2e-5, atol=2e-5)


def test_it_is_linear_to_every_transformation() -> None:
    x, q, values = operands()
    wanted, ones = host(x) @ values, np.ones((ROWS, N), np.float32)
    for run in (product, jax.jit(product)):
        close(run(x, q), wanted)
        close(run(x[0], q), wanted[0])
        (back,) = jax.linear_transpose(lambda x, run=run: run(x, q), x)(jnp.asarray(ones))
        close(back, ones @ values.T)
    close(jax.jit(lambda x: jax.lax.map(lambda row: product(row, q), x))(x), wanted)
    assert jax.eval_shape(product, x, q).shape == (ROWS, N)


def test_it_is_mapped_over_rows_weights_and_both() -> None:
    x, q, values = operands()
    two = jax.tree.map(lambda part: jnp.stack([part, part]), q)
    wanted = host(x) @ values
    close(jax.vmap(lambda row: product(row, q), in_axes=1, out_axes=1)(x.T), wanted.T)
    close(jax.vmap(product, (None, 0))(x, two)[1], wanted)
    close(jax.vmap(product)(jnp.stack([x, 2 * x]), two)[1], 2 * wanted)
    turned = jax.linear_transpose(jax.vmap(lambda row: product(row, q)), x)
    close(turned(jnp.ones((ROWS, N)))[0], np.ones((ROWS, N), np.float32) @ values.T)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_products_in_rules_of_others_are_turned_around(kind: str) -> None:
    """As a function's own tangent rule has them, or jax.linear_transpose: on GPUs by kernels."""
    x, q, values = operands()
    x = x.astype(kind)

    @jax.custom_jvp
    def run(x: Any) -> Any:
        return x @ q.T

    run.defjvp(lambda primals, changes: (run(*primals), changes[0] @ q.T))
    wanted = np.broadcast_to(values.sum(1), x.shape)
    rtol = 1e-5 if kind == "float32" else 2e-2
    for derive in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        found = derive(lambda x: run(x).astype("float32").sum())(x)
        np.testing.assert_allclose(host(found).astype("float32"), wanted, rtol=rtol, atol=4 * rtol)
    found = jax.linear_transpose(lambda x: x @ q.T, x)(jnp.ones((ROWS, N), kind))[0]
    np.testing.assert_allclose(host(found).astype("float32"), wanted, rtol=rtol, atol=4 * rtol)


SHAPES = (((3, 64), (2, 64, 16)), ((2, 3, 64), (2, 64, 16)), ((64,), (2, 64, 16)),
          ((5, 1, 3, 64), (2, 64, 16)))  # fmt: skip


@pytest.mark.parametrize(("of_x", "of_weight"), SHAPES, ids=str)
def test_products_with_several_weights_are_turned_around(of_x: Any, of_weight: Any) -> None:
    rng = np.random.default_rng(0)
    q = pq.quantize(rng.normal(size=of_weight).astype(np.float32).mT, "q4s").to("jax").mT
    x = jnp.asarray(rng.normal(size=(7, *of_x)), jnp.float32)
    values = host(q.dequantize())

    def run(x: Any) -> Any:
        return product_by(KERNEL, x, q, jnp.dtype("float32"))

    wanted = [np.matmul(rows, values) for rows in host(x)]
    close(jax.vmap(run)(x), wanted)
    close(jax.jit(jax.vmap(jax.vmap(run)))(x[None]), [wanted])
    ones = jnp.ones((7, *wanted[0].shape))
    (back,) = jax.linear_transpose(jax.vmap(run), x)(ones)
    exact = partial(jnp.matmul, b=values, precision="highest")
    (plain,) = jax.linear_transpose(jax.vmap(exact), x)(ones)
    close(back, host(plain))
