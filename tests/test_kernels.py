"""Every kernel of every device against the definition, and proof that the check can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

import polyquant as pq
from devices import host, put
from known_issues import reason_for
from polyquant import arrays, dispatch
from polyquant.conform import Result, checks, product_error, summary
from polyquant.qtensor import from_parts


def test_every_kernel_conforms(device: str) -> None:
    quick = settings.get_current_profile_name() != "nightly"
    results = list(checks(device, quick=quick))
    found = summary(results)
    known = [r for r in results if reason_for(device, r)]
    assert not [r for r in known if r.passed], "fixed: delete the entry of known_issues.py"
    unknown = [r for r in found.failures if r not in known]
    assert not unknown, f"\n{summary(unknown)}"
    assert {"quantize", "dequantize", "transfer", "layout", "matmul"} == found.counts.keys()


def test_results_are_the_same_each_time() -> None:
    first, second = (list(_few(checks("numpy", quick=True))) for _ in range(2))
    assert first == second


def _few(results: Any) -> Any:
    return (result for result, _ in zip(results, range(60), strict=False))


def test_summary_counts_by_section() -> None:
    good = Result("matmul", "q4s/32:f16", "x w", True, "", "a")
    bad = good._replace(passed=False, detail="off")
    other = good._replace(name="quantize")
    found = summary([good, bad, other])
    assert found.counts == {"matmul": (1, 1), "quantize": (1, 0)}
    assert found.failures == (bad,)
    assert str(found).splitlines()[0] == "matmul: 1 passed, 1 failed"
    assert "off" in str(found)


# -- the check can fail -----------------------------------------------------------------------

M, N, K = 5, 16, 96


def operands(kind: str, scheme: str) -> tuple[Any, pq.QTensor]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(M, K)).astype(np.float32)
    weight = rng.normal(size=(N, K)).astype(np.float32)
    return put(x.astype(kind), "numpy"), pq.quantize(weight, scheme)


def _swap_nibbles(x: Any, q: pq.QTensor) -> Any:
    data = q.data.copy()
    data[3, 0] = (data[3, 0] >> 4) | (data[3, 0] << 4)
    return x, from_parts(q.parts() | {"data": data}, q.scheme, q.shape, device="numpy").dequantize()


def _drop_last(x: Any, q: pq.QTensor) -> Any:
    return x[:, :-1], q.dequantize()[:, :-1]


def _scale_of_the_next_block(x: Any, q: pq.QTensor) -> Any:
    moved = {"scales": np.roll(q.scales, 1, axis=-1)}
    return x, from_parts(q.parts() | moved, q.scheme, q.shape, device="numpy").dequantize()


def _rows_shifted(x: Any, q: pq.QTensor) -> Any:
    return x, np.roll(q.dequantize(), 1, axis=0)


def _one_code_off(x: Any, q: pq.QTensor) -> Any:
    data = q.data.copy()
    data[2, 7] ^= 1
    return x, from_parts(q.parts() | {"data": data}, q.scheme, q.shape, device="numpy").dequantize()


MUTATIONS: tuple[Callable[[Any, pq.QTensor], Any], ...] = (
    _swap_nibbles,
    _drop_last,
    _scale_of_the_next_block,
    _rows_shifted,
    _one_code_off,
)


def product(x: Any, weight: Any, kind: str) -> Any:
    return (x.astype(np.float32) @ weight.T).astype(kind)


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_wrong_product_is_caught(mutate: Callable[[Any, pq.QTensor], Any], kind: str) -> None:
    x, q = operands(kind, "q4s/32:f16@packed_native")
    exact = x.astype(np.float64), q.dequantize("float64").T
    assert product_error(product(x, q.dequantize(), kind), *exact, kind, "float32") == ""
    assert product_error(host(pq.matmul(x, q.T)), *exact, kind, "float32") == ""
    wrong = product(*mutate(x, q), kind)
    assert "beyond the bound" in product_error(wrong, *exact, kind, "float32")


def test_a_reduced_precision_product_is_caught() -> None:
    """Multiplying float32 operands as float16 or bfloat16 (as TF32 would) is not float32."""
    x, q = operands("float32", "q8s/32:f16")
    exact = x.astype(np.float64), q.dequantize("float64").T
    narrow = x.astype(np.float16).astype(np.float32)
    wrong = product(narrow, q.dequantize("float16").astype(np.float32), "float32")
    assert "beyond the bound" in product_error(wrong, *exact, "float32", "float32")


def test_nan_shape_and_dtype_are_caught() -> None:
    x, q = operands("float32", "q4s")
    exact = x.astype(np.float64), q.dequantize("float64").T
    y = product(x, q.dequantize(), "float32")
    spoiled = y.copy()
    spoiled[1, 1] = np.nan
    assert "beyond the bound" in product_error(spoiled, *exact, "float32", "float32")
    assert "(16, 5)" in product_error(np.ascontiguousarray(y.T), *exact, "float32", "float32")
    assert "float64" in product_error(y.astype(np.float64), *exact, "float32", "float32")


def test_correct_products_are_far_below_the_bound() -> None:
    """A tenth of the bound holds for the definition, so the bound is not what passes it."""
    x, q = operands("float32", "q4s")
    a, b = x.astype(np.float64), q.dequantize("float64").T
    error = np.abs(host(pq.matmul(x, q.T)) - a @ b)
    bound = 8 * np.sqrt(K) * 2.0**-24 * (np.abs(a) @ np.abs(b))
    assert (error <= bound / 10).all()


# -- products beyond the suite ----------------------------------------------------------------


def test_products_of_nothing(device: str) -> None:
    empty = pq.quantize(put(np.zeros((4, 0), np.float32), device), "q4s/32:f32")
    x = put(np.ones((3, 0), np.float32), device)
    np.testing.assert_array_equal(host(pq.matmul(x, empty.T)), np.zeros((3, 4)))
    none = pq.quantize(put(np.zeros((0, 8), np.float32), device), "q4s/32:f32")
    assert host(pq.matmul(put(np.ones((3, 8), np.float32), device), none.T)).shape == (3, 0)


@pytest.mark.parametrize(
    ("a", "b"), [((2, 3, 32), (2, 32, 5)), ((1, 3, 32), (4, 32, 5)), ((32,), (32,))]
)
def test_batches_broadcast_like_numpys(device: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    left, right = (rng.normal(size=shape).astype(np.float32) for shape in (a, b))
    q = pq.quantize(right, "q8s/1:f32")
    y = host(pq.matmul(put(left, device), q.to(device)))
    wanted = np.matmul(left.astype(np.float64), q.dequantize("float64"))
    assert y.shape == wanted.shape
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out", ["float16", "float32", "float64"])
def test_the_results_dtype(out: str) -> None:
    x, q = operands("float32", "q4s")
    assert pq.matmul(x, q.T, out_dtype=out).dtype == np.dtype(out)
    assert pq.matmul(q, q.T).dtype == np.float32
    assert pq.matmul(x.astype(out), q.T).dtype == np.dtype(out)


def test_a_device_that_declines_everything_does_not_conform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XLA on accelerators declines, with the reason: a run without kernels is no good verdict."""
    pytest.importorskip("jax", reason="jax is not installed")
    jax_kernels = {"*": ("polyquant.backends.jax.accelerators",)}
    owner = replace(arrays.backend("jax"), kernels=jax_kernels)
    monkeypatch.setattr(arrays, "backend", lambda name: owner)
    monkeypatch.setattr(dispatch, "backend", lambda name: owner)
    dispatch.kernels.cache_clear()
    dispatch.choose.cache_clear()
    try:
        with pytest.raises(pq.errors.NoKernel, match="divides approximately"):
            next(iter(checks("jax:cpu:0", quick=True)))
        assert not dispatch.devices()[0].usable
    finally:
        dispatch.kernels.cache_clear()
        dispatch.choose.cache_clear()
