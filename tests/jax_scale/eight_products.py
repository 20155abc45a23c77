"""Products with weights that are split over eight devices; test_eight.py runs this file there."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyquant as pq
from polyquant.jax import shard, shardings

SCHEMES = (
    "q8s/row:f32",
    "q4s/32:f16",
    "q3s/32:f32",
    "nf4",
    "mxfp4",
    "nvfp4",
    "e4m3/32:f32",
    "u4/32:f16+bias:f16",
    "u4/32:f16-zero:u4",
    "u4[nf4]/16:(u8[dynamic8u]/4:f32)",
)
OUT, IN, BATCH = 64, 512, 6


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))


def operands(scheme: str) -> tuple[Any, pq.QTensor]:
    """Activations (BATCH, IN), and a weight (OUT, IN) of that scheme."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, IN), dtype=np.float32)
    return x, pq.quantize(rng.standard_normal((OUT, IN), dtype=np.float32), scheme)


def assert_within_the_bound(found: Any, x: Any, q: pq.QTensor) -> None:
    """The bound of the numerical contract, against float64 and the same dequantized weight."""
    a, b = x.astype(np.float64), q.dequantize().astype(np.float64).T
    wanted = a @ b
    bound = 8 * np.sqrt(IN) * 2.0**-24 * (abs(a) @ abs(b)) + abs(wanted) * 2.0**-24
    assert (abs(np.asarray(found, np.float64) - wanted) <= bound).all()


def collectives(compiled: Any) -> list[tuple[str, str]]:
    """The collective operations of a compiled program: kind and type of the result."""
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    pattern = rf"= (\S+|\(.*?\)) ({kinds})(?:-start)?\("
    return [(kind, made) for made, kind in re.findall(pattern, compiled.as_text())]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_split_by_outputs_needs_no_communication(scheme: str, mesh: Mesh) -> None:
    x, q = operands(scheme)
    weight = shard(q, NamedSharding(mesh, P("model")))
    entering = jax.device_put(x, NamedSharding(mesh, P()))
    compiled = jax.jit(lambda x, q: x @ q.T).lower(entering, weight).compile()
    assert collectives(compiled) == []
    found = compiled(entering, weight)
    assert found.sharding.spec == P(None, "model")
    assert_within_the_bound(found, x, q)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_split_by_inputs_needs_one_sum_of_the_results(scheme: str, mesh: Mesh) -> None:
    x, q = operands(scheme)
    weight = shard(q, NamedSharding(mesh, P(None, "model")))
    entering = jax.device_put(x, NamedSharding(mesh, P(None, "model")))
    compiled = jax.jit(lambda x, q: x @ q.T).lower(entering, weight).compile()
    found = collectives(compiled)
    assert [kind for kind, _ in found] == ["all-reduce"]
    assert found[0][1].startswith(f"f32[{BATCH},{OUT}]")
    assert_within_the_bound(compiled(entering, weight), x, q)


def test_a_weight_that_is_gathered_shows_in_the_program(mesh: Mesh) -> None:
    """What the tests above look for is there to be found."""
    weight = shard(operands("nf4")[1], NamedSharding(mesh, P("model")))
    whole = jax.jit(lambda q: q.dequantize(), out_shardings=NamedSharding(mesh, P()))
    found = collectives(whole.lower(weight).compile())
    assert [kind for kind, _ in found] == ["all-gather"]


def test_two_layers_are_split_by_outputs_then_by_inputs(mesh: Mesh) -> None:
    x, first = operands("nf4")
    second = pq.quantize(first.dequantize().T.copy(), "q4s/8:f16")
    up, down = (
        shard(q, NamedSharding(mesh, spec))
        for q, spec in ((first, P("model")), (second, P(None, "model")))
    )

    @jax.jit
    def layers(x: Any, up: pq.QTensor, down: pq.QTensor) -> Any:
        return pq.linear(jax.nn.relu(pq.linear(x, up)), down, jnp.ones(IN))

    entering = jax.device_put(x, NamedSharding(mesh, P()))
    compiled = layers.lower(entering, up, down).compile()
    assert [kind for kind, _ in collectives(compiled)] == ["all-reduce"]
    inner = np.maximum(x @ first.dequantize().T, 0)
    wanted = inner @ second.dequantize().T + 1
    np.testing.assert_allclose(compiled(entering, up, down), wanted, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_in_shard_map(scheme: str, mesh: Mesh) -> None:
    x, q = operands(scheme)
    by_outputs, by_inputs = P("model"), P(None, "model")
    for by_input, spec, x_spec in ((False, by_outputs, P()), (True, by_inputs, by_inputs)):
        where = NamedSharding(mesh, spec)
        weight = shard(q, where)
        specs = jax.tree.map(lambda s: s.spec, shardings(q, where))

        def product(x: Any, weight: pq.QTensor, by_input: bool = by_input) -> Any:
            assert weight.shape == ((OUT, IN // 8) if by_input else (OUT // 8, IN))
            made = x @ weight.T
            return jax.lax.psum(made, "model") if by_input else made

        out = P() if by_input else P(None, "model")
        mapped = jax.shard_map(product, mesh=mesh, in_specs=(x_spec, specs), out_specs=out)
        compiled = jax.jit(mapped).lower(x, weight).compile()
        kinds = [kind for kind, _ in collectives(compiled)]
        assert kinds == (["all-reduce"] if by_input else [])
        assert_within_the_bound(compiled(x, weight), x, q)


def test_specs_that_give_a_shard_the_scales_of_others_are_refused(mesh: Mesh) -> None:
    x, q = operands("q4s/32:f16")
    by_inputs = P(None, "model")
    specs = jax.tree.map(lambda _: by_inputs, q)
    for name in ("scales", "data"):
        wrong = specs._replace(**{name: P()})
        of_x = by_inputs if name == "scales" else P()  # of shards of the weight's own extents
        for run in (lambda x, w: x @ w.T, lambda x, w: w.dequantize()):
            mapped = jax.shard_map(run, mesh=mesh, in_specs=(of_x, wrong), out_specs=P())
            with pytest.raises(pq.errors.InvalidTensor, match="scales of a q4s/32:f16 tensor"):
                jax.jit(mapped)(x, q)


#: Inside of blocks, where each shard has as many scales as it has blocks; and of a line's padding.
CUT = (
    ("q4s/32:f32@packed_native", (8, 240), P(None, "model"), "an edge at 30 lies inside a block"),
    ("q8s/32x32:f32@native", (240, 64), P("model"), "an edge at 30 lies inside a block"),
    ("q4s/row:f32@packed_native", (8, 31), P(None, "model"), "31 elements are no multiple of"),
)


@pytest.mark.parametrize(("scheme", "shape", "spec", "wanted"), CUT)
def test_specs_that_cut_blocks_are_refused_though_numbers_of_scales_agree(
    scheme: str, shape: tuple[int, ...], spec: P, wanted: str, mesh: Mesh
) -> None:
    q = pq.quantize(np.ones(shape, np.float32), scheme)
    specs = jax.tree.map(lambda part: P() if part.shape == (8, 1) else spec, q)
    uses = (
        lambda w: w.dequantize(),
        lambda w: w @ jnp.ones(w.shape[1]),
        lambda w: w.codes(),
        lambda w: w[:1].codes(),
        lambda w: w.T.dequantize(),
        lambda w: pq.ops.embedding(jnp.zeros(2, int), w),
        lambda w: pq.ops.sum(w),
        lambda w: jax.lax.scan(lambda c, _: (c, c.codes()), w, None, length=2)[1],
        lambda w: jax.vmap(lambda w: w.codes())(jax.tree.map(lambda part: part[None], w)),
    )
    for use in uses:
        mapped = jax.shard_map(use, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
        for run in (mapped, jax.jit(mapped)):
            with pytest.raises(pq.errors.InvalidTensor, match=wanted):
                run(q)


#: Specs of codes and of a part beside them, over a mesh of two axes of one length.
APART = (
    ("scales", P("a"), P("b")),
    ("scales", P(("a", "b")), P(("b", "a"))),
    ("scales", P("a", "b"), P("b", "a")),
    ("scales", P(None, "a"), P(None, "b")),
    ("offsets", P("a"), P("b")),
    ("groups", P("a", "b"), P("a")),
)


@pytest.mark.parametrize(("name", "of_codes", "of_part"), APART, ids=str)
def test_specs_that_give_a_shard_another_devices_part_are_refused(
    name: str, of_codes: P, of_part: P
) -> None:
    """Every shard has the shape that it should."""
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    q = pq.quantize(np.ones((64, 64), np.float32), "u4/8:f16-zero:u4")
    if name == "groups":
        parts = q.parts() | {"groups": np.arange(64, dtype=np.int32) // 8}
        scheme = pq.scheme("u4/8:f16-zero:u4~grouped")
        q = pq.qtensor.from_parts(parts, scheme, q.shape, device="numpy")
    right = jax.tree.map(lambda s: s.spec, shardings(q, NamedSharding(mesh, of_codes)))
    of_stack = jax.tree.map(lambda spec: P(None, *spec), right)
    wrong = right._replace(**{name: of_part})
    wrong_stack = of_stack._replace(**{name: P(None, *of_part)})
    for one, specs in ((q, wrong), (jax.tree.map(lambda x: x[None], q), wrong_stack)):
        use = jax.shard_map(lambda w: w.codes(), mesh=mesh, in_specs=(specs,), out_specs=P("a"))
        with pytest.raises(pq.errors.InvalidTensor, match=rf"{name} of .* split .* as its codes"):
            use(one)


@pytest.mark.parametrize(
    "scheme", ["q8s/row:f32", "q4s/32:f16", "nf4", "mxfp4", "u4/32:f16-zero:u4"]
)
@pytest.mark.parametrize("spec", [P("model"), P(None, "model")], ids=str)
def test_quantizing_where_the_weight_lies_gives_the_same_bits(
    scheme: str, spec: P, mesh: Mesh
) -> None:
    x = operands("nf4")[1].dequantize()
    placed = jax.device_put(x, NamedSharding(mesh, spec))
    made = jax.jit(lambda x: pq.quantize(x, scheme), out_shardings=None)
    compiled = made.lower(placed).compile()
    assert "all-gather" not in dict(collectives(compiled))
    q = compiled(placed)
    assert q.to_data() == pq.quantize(x, scheme).to_data()
    assert q.device == "jax:cpu:0-7" and q.data.sharding.spec == spec


@pytest.mark.parametrize("scheme", ["nf4", "nvfp4", "q8s/tensor:f32"])
def test_a_scan_over_stacked_layers_that_are_split(scheme: str, mesh: Mesh) -> None:
    rng = np.random.default_rng(0)
    ups, downs = (
        [pq.quantize(rng.normal(size=shape).astype(np.float32), scheme) for _ in range(3)]
        for shape in ((OUT, IN), (IN, OUT))
    )
    by_outputs = NamedSharding(mesh, P(None, "model"))
    by_inputs = NamedSharding(mesh, P(None, None, "model"))
    up, down = (jax.tree.map(lambda *parts: jnp.stack(parts), *t) for t in (ups, downs))
    up, down = shard(up, by_outputs), shard(down, by_inputs, reblock=True)
    assert up.shape == (3, OUT, IN) and up.data.sharding.spec == P(None, "model", None)

    def layer(x: Any, weights: tuple[pq.QTensor, pq.QTensor]) -> tuple[Any, None]:
        up, down = weights
        return x + jax.nn.relu(x @ up.T) @ down.T / IN, None

    def run(x: Any, *weights: pq.QTensor) -> Any:
        return jax.lax.scan(layer, x, weights)[0]

    x = rng.standard_normal((BATCH, IN), dtype=np.float32)
    entering = jax.device_put(x, NamedSharding(mesh, P()))
    compiled = jax.jit(run).lower(entering, up, down).compile()
    assert [kind for kind, _ in collectives(compiled)] == ["all-reduce"]
    wanted = x
    for u, d in zip(ups, downs, strict=True):
        wanted = wanted + np.maximum(wanted @ u.dequantize().T, 0) @ d.dequantize().T / IN
    np.testing.assert_allclose(compiled(entering, up, down), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("by_input", [False, True])
@pytest.mark.parametrize("kind", ["flat", "grouped"])
def test_products_with_blocks_across_rows_and_with_group_maps(
    kind: str, by_input: bool, mesh: Mesh
) -> None:
    x, q = operands("u4[nf4]/64:f32~flat" if kind == "flat" else "u4/32:f16-zero:u4")
    if kind == "grouped":
        groups = np.random.default_rng(1).permutation(np.arange(IN) // 32).astype(np.int32)
        scheme = pq.scheme("u4/32:f16-zero:u4~grouped")
        parts = q.parts() | {"groups": groups}
        q = pq.qtensor.from_parts(parts, scheme, q.shape, device="numpy")
    elif by_input:
        q = q.canonical()  # such blocks are split by rows alone
    by_outputs, by_inputs = P("model"), P(None, "model")
    where = NamedSharding(mesh, by_inputs if by_input else by_outputs)
    weight, x_spec = shard(q, where), by_inputs if by_input else P()
    entering = jax.device_put(x, NamedSharding(mesh, x_spec))
    compiled = jax.jit(lambda x, q: x @ q.T).lower(entering, weight).compile()
    assert "all-gather" not in dict(collectives(compiled))
    assert_within_the_bound(compiled(entering, weight), x, q)

    def product(x: Any, weight: pq.QTensor) -> Any:
        assert weight.shape == ((OUT, IN // 8) if by_input else (OUT // 8, IN))
        return jax.lax.psum(x @ weight.T, "model") if by_input else x @ weight.T

    specs = jax.tree.map(lambda s: s.spec, shardings(q, where))
    out = P() if by_input else P(None, "model")
    mapped = jax.shard_map(product, mesh=mesh, in_specs=(x_spec, specs), out_specs=out)
    assert_within_the_bound(jax.jit(mapped)(x, weight), x, q)


@pytest.mark.parametrize("scheme", ["q4s/32:f16", "nf4"])
def test_a_gradient_by_a_weight_split_by_outputs_is_one_sum(scheme: str, mesh: Mesh) -> None:
    x, q = operands(scheme)
    weight = shard(q, NamedSharding(mesh, P("model")))
    entering = jax.device_put(x, NamedSharding(mesh, P()))
    gradient = jax.jit(jax.grad(lambda x, q: (x @ q.T).sum()))
    compiled = gradient.lower(entering, weight).compile()
    assert collectives(compiled) == [("all-reduce", f"f32[{BATCH},{IN}]{{1,0}}")]
    wanted = np.broadcast_to(q.dequantize().sum(axis=0), x.shape)
    np.testing.assert_allclose(compiled(entering, weight), wanted, rtol=1e-5, atol=1e-4)


def test_activations_are_quantized_where_they_lie(mesh: Mesh) -> None:
    x, q = operands("q8s/row:f32")
    weight = shard(q, NamedSharding(mesh, P(None, "model")))
    entering = jax.device_put(x, NamedSharding(mesh, P(None, "model")))
    linear = jax.jit(lambda x, q: pq.linear(x, q, activations="q8s/row:f32"))
    compiled = linear.lower(entering, weight).compile()
    found = sorted(made for _, made in collectives(compiled))
    assert found == [f"f32[{BATCH},1]{{1,0}}", f"f32[{BATCH},{OUT}]{{1,0}}"]  # maxima, and sums
    rounded = pq.quantize(x, "q8s/row:f32").dequantize()
    assert_within_the_bound(compiled(entering, weight), rounded, q)
