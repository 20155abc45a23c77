"""The libraries' own operators and functions on quantized tensors, and gradients through them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import host, needs, put
from polyquant import errors

M, N, K = 5, 16, 64


def floats(shape: tuple[int, ...], device: str = "numpy", seed: int = 0) -> Any:
    return put(np.random.default_rng(seed).normal(size=shape).astype(np.float32), device)


def weight(device: str = "numpy", scheme: str = "q4s") -> pq.QTensor:
    return pq.quantize(floats((N, K), seed=1), scheme).to(device)


def assert_close(got: Any, wanted: Any) -> None:
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def expected(x: Any, q: pq.QTensor) -> Any:
    values = x if isinstance(x, np.ndarray) else host(x)
    return values.astype(np.float64) @ host(q.to("numpy").dequantize("float64")).T


def test_operators(device: str) -> None:
    x, q = floats((M, K), device), weight(device)
    if device != "array_api_strict":  # whose arrays refuse every stranger on their right
        assert_close(host(x @ q.T), expected(x, q))
    assert_close(host(q @ floats((K, M), device)), expected(host(floats((K, M), device)).T, q).T)
    assert_close(host(q @ q.T), expected(q.to("numpy").dequantize(), q))
    assert pq.device_of(q @ q.T) == device


def test_linear(device: str) -> None:
    x, q, bias = floats((2, M, K), device), weight(device), floats((N,), device)
    assert_close(host(pq.linear(x, q)), expected(x, q))
    assert_close(host(pq.linear(x, q, bias)), expected(x, q) + host(bias))
    rounded = pq.quantize(x, "q8s/row:f32")
    with_activations = pq.linear(x, q, activations="q8s/row:f32")
    np.testing.assert_array_equal(host(with_activations), host(pq.matmul(rounded, q.T)))


@pytest.mark.parametrize(
    ("x", "w", "bias"),
    [((M, K + 1), (N, K), None), ((M, K), (1, N, K), None), ((M, K), (N, K), (K,))],
)
def test_linear_refuses_shapes(x: Any, w: Any, bias: Any) -> None:
    with pytest.raises(errors.ShapeMismatch):
        pq.linear(floats(x), pq.quantize(floats(w), "q4s"), None if bias is None else floats(bias))


@pytest.mark.parametrize(
    ("a", "b"),
    [((M, K), (K + 1, N)), ((M, K), ()), ((2, M, K), (3, K, N)), ((K + 1,), (K,))],
)
def test_products_refuse_shapes(a: Any, b: Any) -> None:
    with pytest.raises(errors.ShapeMismatch):
        pq.matmul(floats(a), pq.quantize(np.asarray(floats(b)), "q8s-tensor"))


@pytest.mark.parametrize("other", ["text", [1.0, 2.0], object()])
def test_strangers_are_left_to_python(other: Any) -> None:
    with pytest.raises(TypeError):
        weight() @ other
    with pytest.raises(TypeError):
        other @ weight()


@pytest.mark.parametrize("other", [np.ones((M, K), np.int32), np.ones((M, K), bool)])
def test_products_take_floats_only(other: Any) -> None:
    with pytest.raises(errors.NotFloat):
        pq.matmul(other, weight().T)


# -- NumPy ------------------------------------------------------------------------------------


def test_numpy_functions() -> None:
    x, q = floats((M, K)), weight()
    wanted = pq.matmul(x, q.T)
    for got in (np.matmul(x, q.T), np.dot(x, q.T), x @ q.T, x.__matmul__(q.T)):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(np.matmul(q, x.T), pq.matmul(q, x.T))


@pytest.mark.parametrize(
    "call",
    [
        lambda q: np.median(q),
        lambda q: np.isnan(q),
        lambda q: np.bitwise_and(np.ones(1, np.int32), q),
        lambda q: np.add.reduce(q),
        lambda q: np.vstack([q, q]),
        lambda q: np.matmul(q, q.T, out=np.zeros((N, N), np.float32)),
    ],
)
def test_other_numpy_functions_are_refused(call: Any) -> None:
    with pytest.raises(errors.UnsupportedFunction, match="no form for quantized tensors"):
        call(weight())


# -- torch ------------------------------------------------------------------------------------


@needs("torch")
def test_torch_functions() -> None:
    import torch
    from torch.nn import functional

    x, q, bias = floats((M, K), "torch:cpu"), weight("torch:cpu"), floats((N,), "torch:cpu")
    wanted = host(pq.matmul(x, q.T))
    for got in (torch.matmul(x, q.T), torch.mm(x, q.T), x @ q.T, x.matmul(q.T), x.mm(q.T)):
        np.testing.assert_array_equal(host(got), wanted)
    assert_close(host(torch.mv(q, x[0])), wanted[0])
    np.testing.assert_array_equal(host(functional.linear(x, q)), wanted)
    np.testing.assert_array_equal(host(functional.linear(x, q, bias)), host(pq.linear(x, q, bias)))
    np.testing.assert_array_equal(
        host(functional.linear(x, q, bias=bias)), host(pq.linear(x, q, bias))
    )
    batch = pq.quantize(floats((2, K, N), "torch:cpu"), "q8s/row:f32")
    y = torch.bmm(floats((2, M, K), "torch:cpu"), batch)
    assert tuple(y.shape) == (2, M, N)


@needs("torch")
@pytest.mark.parametrize(
    "call",
    [
        lambda torch, q: torch.std(q),
        lambda torch, q: torch.relu(q),
        lambda torch, q: torch.nn.functional.softmax(q, dim=-1),
        lambda torch, q: torch.hstack([torch.ones(1, K), q]),
        lambda torch, q: torch.equal(torch.ones(N, K), q),
    ],
)
def test_other_torch_functions_are_refused(call: Any) -> None:
    import torch

    with pytest.raises(errors.UnsupportedFunction, match="torch"):
        call(torch, weight("torch:cpu"))


@needs("torch")
@pytest.mark.parametrize("scheme", ["q4s", "nf4", "nvfp4", "u4/32:f16-zero:u4"])
@pytest.mark.parametrize("side", ["left", "right", "linear"])
def test_gradients_reach_the_float_operand(scheme: str, side: str) -> None:
    import torch

    q = weight("torch:cpu", scheme)
    x = floats((K, M) if side == "right" else (M, K), "torch:cpu")
    gradients = []
    for w in (q, q.dequantize()):
        leaf = x.clone().requires_grad_()
        if side == "linear":
            y = torch.nn.functional.linear(leaf, w)
        else:
            y = leaf @ w.mT if side == "left" else w @ leaf
        (y * torch.linspace(0, 1, y.numel()).reshape(y.shape)).sum().backward()
        gradients.append(host(leaf.grad))
    assert_close(gradients[0], gradients[1])


@needs("torch")
def test_quantizing_detaches() -> None:
    x = floats((M, K), "torch:cpu").requires_grad_()
    q = pq.quantize(x, "q4s")
    assert not any(part.requires_grad for part in q.parts().values())
    assert not q.dequantize().requires_grad


# -- JAX --------------------------------------------------------------------------------------


@needs("jax")
def test_jax_arrays() -> None:
    import jax

    x, q = floats((M, K), "jax"), weight("jax")
    assert isinstance(x @ q.T, jax.Array)
    np.testing.assert_array_equal(host(x @ q.T), host(pq.matmul(x, q.T)))
    assert_close(host(jax.jit(lambda a: a @ q.T)(x)), expected(x, q))


@needs("jax")
def test_jax_gradients_reach_the_float_operand() -> None:
    import jax

    x, q = floats((M, K), "jax"), weight("jax")
    values = q.dequantize()
    got = jax.grad(lambda a: ((a @ q.T) ** 2).sum())(x)
    plain = partial(jax.numpy.matmul, precision="highest")  # GPUs would take TF32
    assert_close(host(got), host(jax.grad(lambda a: (plain(a, values.T) ** 2).sum())(x)))
