"""The compiled kernels on JAX's arrays of the CPU: which run, on whose memory, with what result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import assert_same_bits, assert_same_parts, host, needs
from polyquant import errors
from polyquant.backends.native.compiled import missing

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

pytestmark = [
    needs("jax"),
    pytest.mark.skipif(missing() is not None, reason=f"not usable: {missing()}"),
]


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Where JAX's default is a GPU, too."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def operands(m: int = 4) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(512, 1024)).astype(np.float32)
    x = rng.normal(size=(m, 1024)).astype(np.float32)
    return jnp.asarray(x), pq.quantize(jnp.asarray(weight), "nf4")


def test_which_kernels_run_eagerly_and_under_tracing() -> None:
    x, q = operands()
    assert pq.explain("matmul", x, q.T).kernel == "jax.native.matmul"
    assert pq.explain("dequantize", q).kernel == "jax.native.dequantize"
    assert pq.explain("quantize", x).kernel == "jax.native.quantize"
    seen = []

    @jax.jit
    def traced(x: Any, q: Any) -> Any:
        seen.append(pq.explain("matmul", x, q.T).kernel)
        return pq.matmul(x, q.T)

    y = traced(x, q)
    assert seen == ["jax.transforms.matmul"]
    np.testing.assert_allclose(y, x @ q.T, rtol=1e-4, atol=1e-4)
    with pytest.raises(errors.KernelRefused, match="a transformation of the library watches"):
        jax.jit(lambda x: pq.matmul(x, q.T, kernel="jax.native.matmul"))(x)


def test_stored_arrays_are_read_where_they_lie_and_large_results_are_not_copied() -> None:
    x, q = operands()
    turned = q.T
    wanted = x @ turned
    for name, part in turned._prepared.parts().items():
        assert part.ctypes.data == q.parts()[name].unsafe_buffer_pointer(), name
    values = q.dequantize()  # 2 MB
    assert isinstance(values, jax.Array)
    base = np.asarray(values)
    assert base.ctypes.data == values.unsafe_buffer_pointer()
    again = x @ turned
    np.testing.assert_array_equal(again, wanted)
    assert_same_bits(host(wanted), np.asarray(x) @ q.to("numpy").T)
    assert_same_bits(base, q.to("numpy").dequantize())


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_results_are_jax_arrays_of_the_float_operands_dtype(kind: str) -> None:
    x, q = operands()
    y = x.astype(kind) @ q.T
    assert isinstance(y, jax.Array) and y.dtype == kind and y.device == x.device
    assert q.dequantize(kind).dtype == kind
    made = pq.quantize(x.astype(kind), "q4s")
    assert made.device == pq.device_of(x)
    assert_same_parts(made, pq.quantize(host(x.astype(kind)), "q4s"))


def test_what_a_kernel_has_read_is_not_overwritten_when_it_is_donated() -> None:
    x, q = operands()
    turned = q.T
    wanted = x @ turned
    add = jax.jit(lambda q: jax.tree.map(lambda part: part + 1, q), donate_argnums=0)
    changed = add(q)
    np.testing.assert_array_equal(x @ turned, wanted)
    np.testing.assert_array_equal(changed.data, turned.data + 1)


def test_an_eager_gradient_runs_the_compiled_kernel_for_its_values() -> None:
    x, q = operands()
    value, found = jax.value_and_grad(lambda x: (x @ q.T).sum())(x)
    np.testing.assert_allclose(value, host(x @ q.T).sum(), rtol=1e-4)
    np.testing.assert_allclose(found[0], host(q.dequantize()).sum(0), rtol=1e-4, atol=1e-4)


def test_inputs_are_checked_as_ever() -> None:
    x = jnp.asarray([[1.0, np.inf] * 16])
    with pytest.raises(errors.NonFiniteInput, match="inf"):
        pq.quantize(x, "q4s")
    assert_same_parts(
        pq.quantize(x, "q4s", nonfinite="saturate"),
        pq.quantize(host(x), "q4s", nonfinite="saturate"),
    )
