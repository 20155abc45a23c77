"""A QTensor under every transformation of JAX: argument, result, carry and closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import assert_same_bits, host
from polyquant import errors

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

import polyquant.jax as pqj  # noqa: E402

#: Scales alone, two levels, a table under a view, scales and biases that are quantized.
SCHEMES = ("q4s/32:f16", "nvfp4", "u4[nf4]/64:f32~flat", "u4/32:(u6/8:f16)+bias:(q6s/8:f16)")
LAYERS, N, K = 3, 32, 32
#: What exports must be told of the kernels of GPUs; on the CPU there is nothing to be told.
KERNELS_OF_GPUS = ("__gpu$xla.gpu.triton", "polyquant_cuda_launch")
UNCHECKED: dict[str, Any] = {
    "disabled_checks": [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in KERNELS_OF_GPUS
        if jax.default_backend() == "gpu"
    ]
}


def weight(name: str, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).normal(size=(N, K)).astype(np.float32) / 6
    return pq.quantize(values, name).to("jax")


def x_of(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(7).normal(size=shape).astype(np.float32))


def close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(host(got), host(wanted), rtol=2e-5, atol=2e-5)


def layer(x: Any, q: Any) -> Any:
    return jnp.tanh(x @ q.mT)


def formula(x: Any, q: Any) -> Any:
    """What ``layer`` is, of decoded values. (GPUs would multiply in TF32 if they were let.)"""
    return jnp.tanh(jnp.matmul(x, q.dequantize().T, precision="highest"))


@pytest.fixture(params=SCHEMES)
def layers(request: pytest.FixtureRequest) -> list[Any]:
    return [weight(request.param, seed) for seed in range(LAYERS)]


def test_jit_takes_returns_and_closes_over(layers: list[Any]) -> None:
    q, x = layers[0], x_of(5, K)
    close(jax.jit(layer)(x, q), layer(x, q))
    close(jax.jit(lambda x: layer(x, q))(x), layer(x, q))
    assert jax.jit(lambda q: q)(q).to_data() == q.to_data()
    pair = jax.jit(lambda tree: {"again": tree["w"].mT, "x": tree["x"]})({"w": q, "x": x})
    assert pair["again"].to_data() == q.mT.to_data()


def test_scan_over_a_stack_and_with_a_carry(layers: list[Any]) -> None:
    x, stack = x_of(5, K), pqj.stack(layers)
    wanted = x
    for q in layers:
        wanted = layer(wanted, q)
    got, copies = jax.jit(lambda x, s: lax.scan(lambda x, q: (layer(x, q), q), x, s))(x, stack)
    close(got, wanted)
    for number, q in enumerate(layers):
        assert jax.tree.map(lambda part, n=number: part[n], copies).to_data() == q.to_data()

    def carried(q: Any, x: Any) -> Any:
        return q, layer(x, q)

    q, rows = lax.scan(carried, layers[0], x_of(4, 2, K))
    assert q.to_data() == layers[0].to_data()
    close(rows, layer(x_of(4, 2, K), layers[0]))


def test_vmap_over_stacks_activations_and_both(layers: list[Any]) -> None:
    stack, x = pqj.stack(layers), x_of(LAYERS, 5, K)
    each = jnp.stack([layer(x[i], q) for i, q in enumerate(layers)])
    close(jax.jit(jax.vmap(layer))(x, stack), each)
    shared = jnp.stack([layer(x[0], q) for q in layers])
    two = jax.tree.map(lambda part: jnp.stack([part, part]), stack)

    @jax.jit
    def more(x: Any, stack: Any, two: Any) -> Any:
        return (
            jax.vmap(layer, in_axes=(None, 0))(x[0], stack),
            jax.vmap(layer, in_axes=(0, None))(x, layers[0]),
            jax.vmap(lambda row: layers[0] @ row)(x[0]),
            jax.vmap(jax.vmap(layer, (None, 0)), (None, 0))(x[0], two)[1],
        )

    found = more(x, stack, two)
    for got, wanted in zip(
        found, (shared, layer(x, layers[0]), x[0] @ layers[0].mT, shared), strict=True
    ):
        close(got, wanted)


def test_vmap_returns_stacks(layers: list[Any]) -> None:
    values = jnp.stack([q.dequantize() for q in layers])
    scheme = layers[0].scheme
    made = jax.jit(jax.vmap(lambda x: pq.quantize(x, scheme)))(values)
    assert made.shape == values.shape
    for number, q in enumerate(layers):
        one = jax.tree.map(lambda part, n=number: part[n], made)
        assert one.to_data() == pq.quantize(q.dequantize(), scheme).to_data()


def test_a_stack_is_decoded_and_multiplied_as_one(layers: list[Any]) -> None:
    stack, x = pqj.stack(layers), x_of(5, K)
    values = np.stack([host(q.dequantize()) for q in layers])
    assert_same_bits(host(stack.dequantize()), values)
    assert_same_bits(host(jax.jit(lambda s: s.dequantize())(stack)), values)
    assert_same_bits(host(stack.T.dequantize()), values.T)
    close(x @ stack.mT, jnp.stack([x @ q.mT for q in layers]))
    close(pq.ops.sum(stack), values.sum())
    assert repr(stack).startswith(f"QTensor({str(stack.scheme)!r}, shape=(3, 32, 32)")
    assert stack.nbytes == sum(q.nbytes for q in layers)
    one = jax.tree.map(lambda part: part[:1], stack)
    assert host(one.dequantize()).tobytes() == values[:1].tobytes()


def test_what_a_stack_refuses() -> None:
    stack = pqj.stack([weight("nf4", seed) for seed in range(2)])
    for use in (lambda s: s[0], lambda s: s.reshape(-1), lambda s: pq.concat([s, s])):
        with pytest.raises(errors.LayoutRefused, match="it is a stack, whose tensors"):
            use(stack)
    with pytest.raises(errors.LayoutRefused, match="Bring it to JAX"):
        jax.device_get(stack).dequantize()
    for wrong in ([], [1], 3, [weight("nf4"), weight("q4s")], [weight("nf4"), weight("nf4").T]):
        with pytest.raises(errors.InvalidArgument, match="tensors"):
            pqj.stack(wrong)
    with pytest.raises(errors.BackendMismatch, match=r"tensors\[1\]"):
        pqj.stack([weight("nf4"), weight("nf4").to("numpy")])


def test_cond_switch_while_and_fori(layers: list[Any]) -> None:
    a, b, x = layers[0], layers[1], x_of(5, K)
    pick = jax.jit(lambda flag, a, b: lax.cond(flag, lambda: a, lambda: b))
    assert pick(True, a, b).to_data() == a.to_data()
    assert pick(False, a, b).to_data() == b.to_data()
    chosen = lax.switch(1, [lambda x: layer(x, a), lambda x: layer(x, b)], x)
    close(chosen, layer(x, b))
    done = lax.fori_loop(0, 2, lambda _, state: (layer(*state), state[1]), (x, a))
    close(done[0], layer(layer(x, a), a))
    done = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, layer(*s[1:]), s[2]), (0, x, a))
    close(done[1], layer(layer(x, a), a))


def test_grad_and_checkpoint_under_scan(layers: list[Any]) -> None:
    x, stack = x_of(5, K), pqj.stack(layers)

    def loss(x: Any, body: Callable[[Any, Any], Any]) -> Any:
        return lax.scan(lambda x, q: (body(x, q), None), x, stack)[0].sum()

    def plain(x: Any) -> Any:
        for q in layers:
            x = formula(x, q)
        return x.sum()

    value, wanted = jax.value_and_grad(plain)(x)
    for body in (layer, jax.checkpoint(layer)):
        got_value, got = jax.jit(jax.value_and_grad(lambda x, b=body: loss(x, b)))(x)
        close(got_value, value)
        close(got, wanted)
    close(
        jax.jvp(lambda x: layer(x, layers[0]), (x,), (x,))[1],
        jax.jvp(lambda x: formula(x, layers[0]), (x,), (x,))[1],
    )


def test_shapes_alone_and_donation(layers: list[Any]) -> None:
    q, x = layers[0], x_of(5, K)
    shapes = jax.eval_shape(lambda x, q: (layer(x, q), q.mT), x, q)
    assert (shapes[0].shape, shapes[1].shape, shapes[1].axes) == ((5, N), (K, N), (1, 0))
    assert jax.eval_shape(layer, x, shapes[1].mT).shape == (5, N)
    spare = jax.tree.map(jnp.copy, q)
    kept = jax.jit(lambda q: q, donate_argnums=0)(spare)
    assert kept.to_data() == q.to_data()
    assert spare.data.is_deleted()
    assert "QTensor" in repr(spare)


def test_export_and_back(layers: list[Any]) -> None:
    q, x = layers[0], x_of(5, K)
    exported = jax.export.export(jax.jit(lambda x, q: (layer(x, q), q)), **UNCHECKED)(x, q)
    again = jax.export.deserialize(exported.serialize())
    y, back = again.call(x, q)
    close(y, layer(x, q))
    assert back.to_data() == q.to_data()


def test_export_with_a_symbolic_extent() -> None:
    q = weight("nf4")
    rows = jax.export.symbolic_shape("rows, 32")
    shape = jax.ShapeDtypeStruct(rows, jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: layer(x, q)), **UNCHECKED)(shape)
    for count in (1, 9):
        close(exported.call(x_of(count, K)), layer(x_of(count, K), q))


@pytest.mark.parametrize("name", ["q4s/32:f16", "nvfp4", "u4/32:f16-zero:u4"])
def test_weights_and_activations_may_have_symbolic_extents(name: str) -> None:
    count, rows = jax.export.symbolic_shape("count, rows")
    of = weight(name)
    shapes = jax.tree.map(
        lambda part: jax.ShapeDtypeStruct((count, *part.shape[1:])[: part.ndim], part.dtype), of
    )
    x = jax.ShapeDtypeStruct((rows, K), jnp.float32)

    def run(x: Any, q: Any) -> Any:
        made = pq.quantize(x, name)
        return pq.linear(x, q, activations="q8s/row:f32"), q.dequantize(), made, q

    exported = jax.export.export(jax.jit(run), **UNCHECKED)(x, shapes)
    again = jax.export.deserialize(exported.serialize())
    q, x = pq.quantize(x_of(48, K), name), x_of(7, K)
    y, values, made, back = again.call(x, q)
    close(y, pq.linear(x, q, activations="q8s/row:f32"))
    assert_same_bits(host(values), host(q.dequantize()))
    assert made.to_data() == pq.quantize(x, name).to_data()
    assert back.to_data() == q.to_data()


def test_only_other_structures_are_traced_anew() -> None:
    traces = []

    @jax.jit
    def run(x: Any, q: Any) -> Any:
        traces.append(q)
        return layer(x, q)

    x = x_of(5, K)
    for seed in range(3):
        run(x, weight("nf4", seed))
    run(x + 1, weight("nf4", 9))
    run(x, jax.jit(lambda q: q)(weight("nf4", 1)))
    run(x, jax.tree.map(lambda part: part[0], pqj.stack([weight("nf4")])))
    assert len(traces) == 1
    run(x, weight("q4s"))
    run(x, weight("nf4").mT)
    assert len(traces) == 3


def test_eager_and_traced_products_do_not_share_a_plan() -> None:
    """A product is remembered by its operands' facts, which a tracer within them must not have."""
    x, q = x_of(5, K), weight("u4/32:f32+bias:f32")
    wanted = x @ q.mT
    close(jax.jit(lambda q: x @ q.mT)(q), wanted)
    close(x @ q.mT, wanted)
    with_scales = jax.grad(lambda s: (x @ q._replace(scales=s).mT).sum())(q.scales)
    assert with_scales.shape == q.scales.shape
    close(x @ q.mT, wanted)


def test_fake_quantize_is_quantizing_there_and_back() -> None:
    x = x_of(6, 70)
    for scheme in ("q4s/32:f16", "nvfp4", "nf4"):
        wanted = host(pq.quantize(x, scheme).dequantize())
        got, passed = jax.jit(
            jax.value_and_grad(lambda x, s=scheme: pqj.fake_quantize(x, s).sum())
        )(x)
        close(got, wanted.sum())
        np.testing.assert_array_equal(passed, jnp.ones_like(x))  # minmax covers every value
        values = jax.jit(lambda x, s=scheme: pqj.fake_quantize(x, s))(x)
        assert_same_bits(host(values), wanted)
    half = pqj.fake_quantize(x.astype(jnp.bfloat16), "q4s/32:f16")
    assert half.dtype == jnp.bfloat16
    close(
        jax.vmap(lambda x: pqj.fake_quantize(x, "q4s/32:f16"))(jnp.stack([x, x]))[1],
        pqj.fake_quantize(x, "q4s/32:f16"),
    )


CLIPPED = (
    ("q4s/16:f32", True, False, None),
    ("u4/16:f32+bias:f32", True, True, None),
    ("u4/16:f32-zero:f32", True, True, None),
    ("u3[custom]/16:f32", True, False, np.linspace(-1.0, 1.5, 8, dtype=np.float32)),
)


@pytest.mark.parametrize(("scheme", "scales", "offsets", "table"), CLIPPED)
def test_fake_quantize_learns_as_torch_does(
    scheme: str, scales: bool, offsets: bool, table: Any
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from polyquant.torch import fake_quantize

    x, factor = host(x_of(4, 32)), host(x_of(4, 32))[::-1].copy()
    grid = pq.scheme(scheme).scale_shape(x.shape)
    numbers: dict[str, Any] = {"x": x}
    if scales:
        numbers["scales"] = np.full(grid, 0.11, np.float32)
    if offsets:
        numbers["offsets"] = np.full(grid, 3.0 if "zero" in scheme else -0.8, np.float32)
    if table is not None:
        numbers["table"] = table
    tracked = {name: torch.tensor(each, requires_grad=True) for name, each in numbers.items()}
    rest = {name: each for name, each in tracked.items() if name != "x"}
    made = fake_quantize(tracked["x"], scheme, gradient_scale=0.5, **rest)
    wanted = torch.autograd.grad((made * torch.tensor(factor)).sum(), list(tracked.values()))

    def loss(given: Any) -> Any:
        rest = {name: each for name, each in given.items() if name != "x"}
        return (pqj.fake_quantize(given["x"], scheme, gradient_scale=0.5, **rest) * factor).sum()

    arrays = {name: jnp.asarray(each) for name, each in numbers.items()}
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss))):
        got = grad(arrays)
        for name, want in zip(tracked, wanted, strict=True):
            close(got[name], want)
    assert float(abs(got["x"]).min()) == 0 < float(abs(got["scales"]).max())
