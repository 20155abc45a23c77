"""What traced code cannot do, and operands that do not belong together: told before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import needs
from polyquant import errors

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

import polyquant.jax as pqj  # noqa: E402

X = jnp.ones((5, 32))
#: Where JAX puts what has no device.
HERE = pq.device_of(X)


def weight() -> Any:
    return pq.quantize(X, "q4s")


LOOKS: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "nonfinite": (
        errors.InvalidArgument,
        "nonfinite must be 'saturate', or left out: x is traced",
        lambda x: pq.quantize(x, "q4s", nonfinite="raise"),
    ),
    "kmeans": (
        errors.TracedCalibration,
        r"Quantize outside it, or pass scales= computed before",
        lambda x: pq.quantize(x, "u4[custom]/32:f16", table="kmeans"),
    ),
    "mse": (
        errors.TracedCalibration,
        "looks at the values",
        lambda x: pqj.fake_quantize(x, "q4s", calibration="mse"),
    ),
    "percentile": (
        errors.TracedCalibration,
        "looks at the values",
        lambda x: pq.quantize(x, "q4s", calibration="percentile"),
    ),
    "the host": (errors.UnsupportedArray, r"as under jax\.jit", lambda x: weight_of(x).to("numpy")),
    "bytes": (errors.UnsupportedArray, r"as under jax\.jit", lambda x: weight_of(x).to_data()),
    "numbers": (errors.UnsupportedArray, r"as under jax\.jit", lambda x: np.asarray(weight_of(x))),
}


def weight_of(x: Any) -> Any:
    return pq.quantize(x, "q4s")


@pytest.mark.parametrize("what", LOOKS)
def test_requests_that_need_values_say_what_to_do(what: str) -> None:
    error, text, run = LOOKS[what]
    for transform in (jax.jit, jax.vmap, jax.checkpoint):
        with pytest.raises(error, match=text):
            transform(lambda x: (run(x), x)[1])(X)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
def test_another_library_in_traced_code_is_named_with_its_role(transform: Any) -> None:
    host = weight().to("numpy")
    with pytest.raises(errors.BackendMismatch) as found:
        transform(lambda x: pq.matmul(x, host.T))(X)
    text = str(found.value)
    assert "a is a float32 array of shape" in text and "that jax traces; b is a q4s" in text
    assert "on numpy" in text and f"call b.to({HERE!r})" in text
    with pytest.raises(errors.BackendMismatch, match=r"weight is a q4s.* that jax traces"):
        jax.jit(lambda q: pq.linear(np.ones((5, 32), np.float32), q))(weight())
    with pytest.raises(errors.BackendMismatch, match=r"bias is a float32 array .* on numpy"):
        jax.jit(lambda x: pq.linear(x, weight(), np.ones(5, np.float32)))(X)


@needs("torch")
def test_a_tensor_of_torch_in_traced_code() -> None:
    there = weight().to("torch:cpu")
    with pytest.raises(errors.BackendMismatch, match="on torch:cpu"):
        jax.jit(lambda x: x @ there.T)(X)


def test_a_tracer_belongs_to_the_device_that_it_meets() -> None:
    """It has none of its own: what is closed over may lie on any."""
    q = weight()
    assert jax.jit(lambda x: x @ q.T)(X).shape == (5, 5)
    elsewhere = q._replace(device=f"{HERE}9")  # which no machine has: only its name is another
    with pytest.raises(errors.DeviceMismatch, match=r"call b\.to"):
        X @ elsewhere.T
    assert jax.jit(lambda x: x @ elsewhere.T)(X).shape == (5, 5)


def test_integers_and_shapes_are_refused_under_tracing_too() -> None:
    q = weight()
    with pytest.raises(errors.NotFloat):
        jax.jit(lambda x: x @ q.T)(X.astype("int32"))
    with pytest.raises(errors.ShapeMismatch, match="inner extents differ"):
        jax.jit(lambda x: x @ q)(X)
    with pytest.raises(errors.NotFloat):
        jax.jit(lambda x: pqj.fake_quantize(x, "q4s"))(X.astype("int32"))
    with pytest.raises(errors.AlreadyQuantized):
        pqj.fake_quantize(q, "q4s")


def test_stacks_along_another_axis_than_the_first_are_refused() -> None:
    x = jnp.ones((3, 8, 64))
    made = jax.vmap(lambda v: pq.quantize(v, "nf4"), out_axes=1)(x)
    with pytest.raises(errors.InvalidTensor, match=r"table .* stacked along the first axis"):
        made.dequantize()


@pytest.mark.parametrize("scheme", ["q8s-32", "q4s/32:f16", "q8s-row"])
def test_stacks_that_look_like_one_tensor_of_other_extents_are_refused(scheme: str) -> None:
    x = jnp.ones((64, 64, 64))
    made = jax.vmap(lambda v: pq.quantize(v, scheme), out_axes=2)(x)
    with pytest.raises(errors.InvalidTensor):
        made.dequantize()


def test_what_is_traced_is_not_what_the_message_moves() -> None:
    """It has no values: the operand that has some is brought to it."""
    x, host = np.ones((5, 32), np.float32), weight().to("numpy")
    with pytest.raises(errors.BackendMismatch, match=f"bring a to {HERE!r} with"):
        jax.jit(lambda q: pq.matmul(x, q.T))(weight())
    with pytest.raises(errors.BackendMismatch, match=rf"call a\.to\({HERE!r}\)"):
        jax.jit(lambda q: pq.matmul(host, q.T))(weight())


def test_arrays_that_are_not_of_jax_are_refused_by_name() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"an array of JAX.*numpy\.ndarray"):
        pqj.fake_quantize(np.ones((5, 32), np.float32), "q4s")
    shapes = jax.eval_shape(lambda q: q, weight())
    with pytest.raises(errors.NotAnArray, match="ShapeDtypeStruct"):
        X @ shapes.T
