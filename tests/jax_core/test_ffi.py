"""The compiled kernels of the CPU in XLA's programs: when, with which bits, and what they leave."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import assert_same_bits, host, needs
from polyquant.backends.native.compiled import missing
from polyquant.presets import PRESETS

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402
from jax.experimental import serialize_executable  # noqa: E402

from polyquant.jax import stack  # noqa: E402

pytestmark = [
    needs("jax"),
    pytest.mark.skipif(missing() is not None, reason=f"not usable: {missing()}"),
]
CALL = "custom_call @polyquant_product"
FURTHER = (
    "q3s/64:bf16",
    "u4/32:f16-zero:u4",
    "u4/32:(u6/8:f16)+bias:(q6s/8:f16)",
    "q8s/row:f32@native",
    "q4s/2x16:f16",
    "e4m3/tensor:f32",
)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def array(*shape: int, seed: int = 0, kind: str = "float32") -> Any:
    made = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jnp.asarray(made, kind)


def by_rows(x: Any, q: Any) -> Any:
    return pq.matmul(x, q.mT)


def by_columns(x: Any, q: Any) -> Any:
    return pq.matmul(x, q)


@pytest.mark.parametrize("scheme", [*PRESETS, *FURTHER])
def test_products_under_jit_have_the_bits_of_eager_ones(scheme: str) -> None:
    q = pq.quantize(array(70, 96), scheme)
    for run, k in ((by_rows, 96), (by_columns, 70)):
        for m in (1, 5, 33):
            x = array(m, k, seed=m)
            compiled = jax.jit(run)
            assert CALL in compiled.lower(x, q).as_text()
            made = compiled(x, q)
            assert_same_bits(host(made), host(run(x, q)))
            assert_same_bits(host(made), run(host(x), q.to("numpy")))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_rows_of_16_bits(kind: str) -> None:
    q = pq.quantize(array(40, 64), "nf4")
    x = array(3, 64, kind=kind)
    made = jax.jit(by_rows)(x, q)
    assert made.dtype == kind
    assert_same_bits(host(made), host(by_rows(x, q)))


def test_results_of_float64_are_widened() -> None:
    q = pq.quantize(array(40, 64), "nf4")
    x = array(3, 64)
    with jax.enable_x64(True):
        run = jax.jit(lambda x: pq.matmul(x, q.mT, out_dtype="float64"))
        assert CALL in run.lower(x).as_text()
        assert run(x).dtype == "float64"
        assert_same_bits(host(run(x)).astype(np.float32), host(by_rows(x, q)))
        wide = jax.jit(by_rows)
        assert CALL not in wide.lower(x.astype("float64"), q).as_text()


@pytest.mark.parametrize("m", [1, 4, 17])
def test_vectors_and_batches(m: int) -> None:
    q = pq.quantize(array(2, 3, 40, 64), "q4s-32")
    one = pq.quantize(array(40, 64), "q4s-32")
    pairs = ((array(64), one), (array(2, m, 64), one), (array(2, 3, m, 64), q),
             (array(m, 64), q), (array(5, 1, 1, m, 64), q), (array(3, m, 64), q))  # fmt: skip
    for x, weight in pairs:
        run = jax.jit(by_rows)
        assert CALL in run.lower(x, weight).as_text()
        wanted = by_rows(host(x), weight.to("numpy"))
        np.testing.assert_allclose(run(x, weight), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["q4s-32", "nf4-double", "nvfp4", "fp8-row"])
def test_under_vmap_and_scan(scheme: str) -> None:
    x, weights = array(2, 5, 64), [pq.quantize(array(48, 64, seed=i), scheme) for i in range(2)]
    stacked = stack(weights)
    wanted = np.stack([by_rows(x[i], weights[i]) for i in range(2)])
    kinds = {
        "both": jax.jit(jax.vmap(by_rows))(x, stacked),
        "weights": jax.jit(jax.vmap(by_rows, (None, 0)))(x[1], stacked),
        "rows": jax.jit(jax.vmap(by_rows, (0, None)))(x, weights[1]),
        "scan": jax.jit(lambda x, q: jax.lax.scan(lambda c, p: (c, by_rows(*p)), 0, (x, q))[1])(
            x, stacked
        ),
    }
    for name, made in kinds.items():
        same = slice(None) if name in ("both", "scan") else slice(1, None)
        np.testing.assert_allclose(made[same], wanted[same], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("shape", [(64,), (64, 3), (2, 64, 3)], ids=str)
def test_a_quantized_left_operand(shape: tuple[int, ...]) -> None:
    x = array(*shape)
    for q in (pq.quantize(array(40, 64), "nf4"), pq.quantize(array(64, 40), "nf4").mT,
              pq.quantize(array(2, 40, 64), "q4s-32")):  # fmt: skip
        run = jax.jit(lambda q, x: pq.matmul(q, x))
        assert CALL in run.lower(q, x).as_text()
        wanted = pq.matmul(q.to("numpy"), host(x))
        np.testing.assert_allclose(run(q, x), wanted, rtol=1e-5, atol=1e-5)
        if len(shape) == 2 == q.ndim:
            (turned,) = jax.linear_transpose(lambda x: pq.matmul(q, x), x)(array(40, 3))  # noqa: B023
            values = host(q.dequantize())
            np.testing.assert_allclose(turned, values.T @ host(array(40, 3)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activations", ["q8s/32:f32", "q8s-row", "e4m3/row:f32"])
def test_two_quantized_operands(activations: str) -> None:
    """The left one is decoded, as where there is no product of integers."""
    x, q = array(5, 64), pq.quantize(array(48, 64), "q4s-32")
    run = jax.jit(lambda x, q: pq.linear(x, q, activations=activations))
    assert CALL in run.lower(x, q).as_text()
    entering = pq.quantize(x, activations)
    wanted = host(entering.dequantize()).astype(float) @ host(q.dequantize()).astype(float).T
    np.testing.assert_allclose(run(x, q), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.jit(by_rows)(entering, q), wanted, rtol=1e-5, atol=1e-5)


def test_without_jit() -> None:
    x, q = array(2, 5, 64), pq.quantize(array(48, 64), "q4s-32")
    with jax.disable_jit():
        made = jax.vmap(lambda x: by_rows(x, q))(x)
    np.testing.assert_allclose(made, by_rows(x, q), rtol=1e-5, atol=1e-5)


def test_derivatives_and_a_transposed_product() -> None:
    q = pq.quantize(array(48, 64), "q4s-32")
    x, values = array(5, 64), host(q.dequantize())
    found = jax.jit(jax.grad(lambda x: by_rows(x, q).sum()))(x)
    np.testing.assert_allclose(found, np.broadcast_to(values.sum(0), x.shape), rtol=1e-4, atol=1e-4)
    (turned,) = jax.linear_transpose(lambda x: by_rows(x, q), x)(array(5, 48))
    np.testing.assert_allclose(turned, host(array(5, 48)) @ values, rtol=1e-4, atol=1e-4)


def test_an_exported_program_has_the_definition_and_needs_nothing() -> None:
    x, q = array(5, 64), pq.quantize(array(48, 64), "q4s-32")
    exported = jax.export.export(jax.jit(by_rows), platforms=("cpu",))(x, q)
    assert CALL not in str(exported.mlir_module())
    again = jax.export.deserialize(exported.serialize()).call(x, q)
    np.testing.assert_allclose(again, by_rows(x, q), rtol=1e-5, atol=1e-5)


def test_an_executable_that_is_loaded_needs_the_import_alone(tmp_path: Path) -> None:
    x, q = array(5, 64), pq.quantize(array(48, 64), "q4s-32")
    compiled = jax.jit(lambda x, q: jnp.sum(by_rows(x, q))).lower(x, q).compile()
    serialized = serialize_executable.serialize(compiled)
    (tmp_path / "program").write_bytes(pickle.dumps((serialized, x, q)))
    load = (
        "import pickle, sys, polyquant.jax; from jax.experimental import serialize_executable as s;"
        "given, x, q = pickle.load(open(sys.argv[1], 'rb'));"
        "print(s.deserialize_and_load(*given)(x, q))"
    )
    command = [sys.executable, "-c", load, str(tmp_path / "program")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not made.returncode, made.stderr[-2000:]
    np.testing.assert_allclose(float(made.stdout), by_rows(x, q).sum(), rtol=1e-5)


def test_other_platforms_get_the_definition() -> None:
    x, q = array(5, 64), pq.quantize(array(48, 64), "q4s-32")
    lowered = jax.jit(by_rows).trace(x, q).lower(lowering_platforms=("tpu",))
    assert CALL not in lowered.as_text()


@pytest.mark.parametrize("shape", [(0, 48, 64), (5, 0, 64), (5, 48, 0)])
def test_empty_operands(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    made = jax.jit(by_rows)(array(m, k), pq.quantize(array(n, k), "q4s-32"))
    assert made.shape == (m, n)
    assert not made.any()


def test_small_numbers_are_what_they_are_outside_of_xla() -> None:
    """XLA's threads make subnormal numbers zero; so do the kernels, but float16 has its own."""
    q = pq.quantize(array(300, 64), "q8s-row")
    for kind, size, is_zero in (("float16", 1e-7, False), ("float32", 1e-39, True)):
        x = jnp.asarray((host(array(40, 64)) * np.float32(size)).astype(kind))
        made = host(jax.jit(lambda x: pq.matmul(x, q.mT, out_dtype="float32"))(x))
        assert made.any() != is_zero
        assert_same_bits(made, pq.matmul(host(x), q.to("numpy").mT, out_dtype="float32"))


def test_many_programs_at_once() -> None:
    weights = [pq.quantize(array(256, 256, seed=i), "nf4") for i in range(4)]
    run = jax.jit(lambda x, q: by_rows(by_rows(x, q), q))
    wanted = [host(run(array(8, 256), q)) for q in weights]

    def work(i: int) -> bool:
        return all(
            np.array_equal(run(array(8, 256), weights[(i + j) % 4]), wanted[(i + j) % 4])
            for j in range(20)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.parametrize(
    ("batch", "rows"),
    [((0,), (0, 3, 128)), ((0,), (128,)), ((0,), (3, 128)), ((0, 2), (1, 2, 3, 128))],
)
def test_products_with_no_weights_are_empty(batch: tuple[int, ...], rows: tuple[int, ...]) -> None:
    weight = pq.quantize(np.zeros((*batch, 96, 128), np.float32), "q4s-32").to("jax:cpu").mT
    x = jnp.ones(rows, jnp.float32)
    y = jax.jit(lambda x, weight: x @ weight)(x, weight)
    assert y.shape == np.matmul(x, np.zeros(weight.shape, np.float32)).shape
    assert jax.jit(jax.grad(lambda x: (x @ weight).sum()))(x).shape == rows
    assert jax.vmap(lambda x: x @ weight)(x[None]).shape == (1, *y.shape)
