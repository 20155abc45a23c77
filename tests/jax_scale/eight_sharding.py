"""Quantized tensors over eight devices. test_eight.py runs this file where there are so many."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyquant as pq
from polyquant import errors
from polyquant.jax import shard, shardings

#: Kinds of scheme: every mode, store, offset and nesting, packed bits of every width.
SCHEMES = (
    "q8s/row:f32",
    "q4s/32:f16",
    "q4s/tensor:f32",
    "q3s/32:f32",
    "q5f/16:bf16@packed_native",
    "q8f/8x16:f32@native",
    "nf4",
    "u2[custom]/16:f16",
    "mxfp4",
    "nvfp4",
    "e4m3/1x32:ue8m0",
    "u4/32:f16+bias:f16",
    "u4/32:f16-zero:u4",
    "u4/32:f16-zero:f16",
    "u4[nf4]/16:(u8[dynamic8u]/4:f32)",
    "u4/16:(u6/4:f16@native)+bias:(u6/4:f16@native)",
    "q8s/32:divisor.f32",
)
ROWS, COLUMNS = 64, 256


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def weight(shape: tuple[int, ...] = (ROWS, COLUMNS), seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def quantized(scheme: str, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> pq.QTensor:
    """A tensor of that scheme on the first device."""
    x, table = weight(shape), None
    if "custom" in scheme:
        table = np.linspace(-1, 1, 4, dtype=np.float32)
    if "ue4m3" not in scheme and "u6" in scheme:
        x = x - x.min()  # so that the biases, which have no sign, are of one
    return pq.quantize(x, scheme, table=table).to("jax:cpu:0")


def whole(array: Any) -> Any:
    return np.asarray(array)


def local(q: pq.QTensor, sharding: NamedSharding, device: Any) -> tuple[pq.QTensor, Any]:
    """What one device holds, as a tensor of its own that is checked, and where it lies in all."""
    index = sharding.devices_indices_map(q.shape)[device]
    shape = tuple(len(range(n)[i]) for n, i in zip(q.shape, index, strict=True))
    found = {
        name: next(np.asarray(s.data) for s in part.addressable_shards if s.device == device)
        for name, part in q.parts().items()
    }
    made = pq.qtensor.from_parts(found, q.scheme, shape, axes=q.axes, device="numpy")
    return made, index


# -- codes, scales and offsets stay together ----------------------------------------------------


@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P("data", "model"), P()], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_each_device_holds_is_its_part_of_the_tensor(scheme: str, spec: P, mesh: Mesh) -> None:
    q, where = quantized(scheme), NamedSharding(mesh, spec)
    values = whole(q.dequantize())
    for tensor, wanted in ((q, values), (q.T, values.T)):
        placed = shard(tensor, where)
        assert placed.to_data() == tensor.to_data()
        assert placed.device == "jax:cpu:0-7" == pq.device_of(placed)
        for device in jax.devices():
            part, index = local(placed, where, device)
            np.testing.assert_array_equal(part.dequantize(), wanted[index])


@pytest.mark.parametrize("scheme", ["e5m2/tensor:f32", "nvfp4"])
def test_tables_of_the_definition_are_of_the_mesh_of_what_they_decode(
    scheme: str, mesh: Mesh
) -> None:
    """Outside of jit, where XLA splits an operation after the mesh of one of its operands."""
    q = quantized(scheme)
    placed = shard(q, NamedSharding(mesh, P("data")))
    np.testing.assert_array_equal(whole(placed.dequantize()), whole(q.dequantize()))
    x = jax.device_put(weight(), NamedSharding(mesh, P(None, "data")))
    assert pq.quantize(x, scheme).to_data() == q.to_data()


def test_an_order_of_axes_that_is_no_transpose_is_followed(mesh: Mesh) -> None:
    q = quantized("q4s/32:f16", (8, 4, 64)).permute(2, 0, 1)
    where = NamedSharding(mesh, P("data", None, "model"))
    placed = shard(q, where)
    assert placed.data.sharding.spec == P(None, "model", "data")
    part, index = local(placed, where, jax.devices()[5])
    np.testing.assert_array_equal(part.dequantize(), whole(q.dequantize())[index])


def test_blocks_that_run_across_rows_are_split_by_rows(mesh: Mesh) -> None:
    q = quantized("u4[nf4]/64:(u8[dynamic8u]/16:f32)~flat")
    where = NamedSharding(mesh, P("model"))
    placed = shard(q, where)
    assert placed.data.sharding.spec == placed.scales.data.sharding.spec == P("model")
    part, index = local(placed, where, jax.devices()[2])
    np.testing.assert_array_equal(part.dequantize(), whole(q.dequantize())[index])
    with pytest.raises(pq.errors.ShardingRefused, match="only rows can be split"):
        shard(q, NamedSharding(mesh, P(None, "model")))
    again = shard(q, NamedSharding(mesh, P(None, "model")), reblock=True)
    np.testing.assert_array_equal(whole(again.dequantize()), whole(q.dequantize()))


def test_a_map_of_groups_is_split_and_its_scales_are_not(mesh: Mesh) -> None:
    groups = np.random.default_rng(1).permutation(np.arange(COLUMNS) // 32).astype(np.int32)
    plain = quantized("u4/32:f16-zero:u4")
    scheme = pq.scheme("u4/32:f16-zero:u4~grouped")
    parts = plain.parts() | {"groups": jnp.asarray(groups)}
    q = pq.qtensor.from_parts(parts, scheme, plain.shape, device="jax:cpu:0")
    for spec, on_grid in ((P(None, "model"), P(None, None)), (P("model"), P("model", None))):
        placed = shard(q, NamedSharding(mesh, spec))
        assert placed.scales.sharding.spec == placed.offsets.sharding.spec == on_grid
        assert placed.to_data() == q.to_data()
        np.testing.assert_array_equal(whole(placed.dequantize()), whole(q.dequantize()))


def test_trees_of_arrays_and_tensors_are_placed_together(mesh: Mesh) -> None:
    by_rows, copies = NamedSharding(mesh, P("model")), NamedSharding(mesh, P())
    tree = {"w": pq.quantize(weight(), "nf4"), "b": np.arange(8.0, dtype=np.float32)}  # of NumPy
    placed = shard(tree, {"w": by_rows, "b": copies})
    assert placed["w"].device == pq.device_of(placed["b"]) == "jax:cpu:0-7"
    assert placed["w"].to_data() == tree["w"].to_data()
    assert placed["w"].data.sharding.spec == P("model", None)
    everywhere = shard(tree, copies)
    assert everywhere["w"].data.sharding.is_fully_replicated
    made = shardings(tree, by_rows)
    assert made["b"] == by_rows and made["w"].table.spec == P()


def test_under_a_tracer_shardings_are_constraints(mesh: Mesh) -> None:
    where, copies = NamedSharding(mesh, P("data", "model")), NamedSharding(mesh, P())
    q = shard(quantized("u4/32:f16-zero:u4"), copies)
    made = jax.jit(lambda q: shard(q, where))(q)
    assert made.to_data() == q.to_data()
    assert made.data.sharding.spec == made.offsets.sharding.spec == P("data", "model")
    given = jax.jit(lambda q: q, out_shardings=shardings(q, where))(q)
    assert given.data.sharding.spec == P("data", "model")
    with pytest.raises(pq.errors.ShardingRefused):
        jax.jit(lambda q: shard(q, where))(shard(quantized("q4s/32:f16", (8, 96)), copies))


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "shape", "spec", "wanted"),
    [
        (
            "q4s/32:f16",
            (8, 96),
            P(None, "model"),
            "Axis 1 of a q4s/32:f16 tensor of shape (8, 96) cannot be split into 4 shards: an edge "
            "at 24 lies inside a block of 32. Split it into 3, or, where smaller blocks or words "
            "would do, pass reblock=True. [sharding-refused]",
        ),
        (
            "q4s/row:f16",
            (8, 16),
            P(None, "model"),
            "at 4 codes of 4 bits lies inside a packed word ",
        ),
        ("q4s/row:f16", (8, 16), P(None, "model"), "Split it into 2, or,"),
        (
            "q4s/32:f16",
            (6, 32),
            P("model"),
            "no multiple of 4. Split it into 3 or 6,",
        ),
        ("q8f/8x16:f32@native", (24, 64), P("model"), "an edge at 6 lies inside a block of 8"),
        (
            "u4[nf4]/16:(u8[dynamic8u]/16:f32)",
            (8, 256),
            P(None, ("data", "model")),
            "of its quantized scales (u8[dynamic8u]/16:f32), an edge at 2 codes of 8 bits lies "
            "inside a packed word of 32. Split it into 4,",
        ),
    ],
)
def test_edges_inside_blocks_and_words_are_refused(
    scheme: str, shape: tuple[int, ...], spec: P, wanted: str, mesh: Mesh
) -> None:
    q = quantized(scheme, shape)
    for call in (shard, shardings):
        with pytest.raises(pq.errors.ShardingRefused) as caught:
            call(q, NamedSharding(mesh, spec))
        assert wanted in str(caught.value)
    with pytest.raises(pq.errors.ShardingRefused, match=rf"Axis {1 - caught.value.facts['axis']} "):
        shard(q.T, NamedSharding(mesh, P(*reversed((*spec, None)[:2]))))


@pytest.mark.parametrize(
    ("scheme", "shape", "spec", "wanted"),
    [
        ("q4s/32:f16", (8, 96), P(None, "model"), "q4s/8:f16"),
        ("q4s/row:f16", (8, 16), P(None, "model"), "q4s/row:f16@packed_native"),
        ("q8f/8x16:f32@native", (24, 64), P("model"), "q8f/2x16:f32@native"),
        ("q4s/32:f16", (8, 80), P(None, "model"), "q4s/4:f16@packed_native"),
        ("u4/32:f16-zero:u4", (8, 96), P("data", "model"), "u4/8:f16-zero:u4"),
        ("nf4", (8, 256), P(None, ("data", "model")), "u4[nf4]/32:f32"),
        ("nvfp4", (2, 32), P(None, "model"), "e2m1/8:ue4m3/tensor:f32"),
        ("u4[nf4]/16:(u8[dynamic8u]/8:f32)", (8, 64), P(None, "model"), "u4[nf4]/16:f32"),
        ("u4/16:(u6/4:f16)+bias:(u6/4:f16)", (8, 64), P(None, "model"), "u4/16:f32+bias:f32"),
        ("q4s/32:f16", (8, 256), P(None, "model"), "q4s/32:f16"),
    ],
)
def test_reblocked_tensors_hold_the_same_numbers(
    scheme: str, shape: tuple[int, ...], spec: P, wanted: str, mesh: Mesh
) -> None:
    q, where = quantized(scheme, shape), NamedSharding(mesh, spec)
    made = shard(q, where, reblock=True)
    assert str(made.scheme) == wanted
    assert_same_numbers(made, q)
    part, index = local(made, where, jax.devices()[7])
    np.testing.assert_array_equal(part.dequantize(), whole(q.dequantize())[index])
    turned = shard(q.T, NamedSharding(mesh, P(*reversed((*spec, None)[:2]))), reblock=True)
    assert_same_numbers(turned, q.T)


def assert_same_numbers(made: pq.QTensor, q: pq.QTensor) -> None:
    assert whole(made.dequantize()).tobytes() == whole(q.dequantize()).tobytes()


def test_what_no_smaller_block_mends_stays_refused(mesh: Mesh) -> None:
    for scheme, shape in (("q4s/32:f16", (8, 98)), ("q3s/row:f32", (8, 12))):
        with pytest.raises(pq.errors.ShardingRefused):
            shard(quantized(scheme, shape), NamedSharding(mesh, P(None, "model")), reblock=True)


def test_what_is_no_sharding_of_the_tensor_is_refused(mesh: Mesh) -> None:
    q = quantized("nf4")
    for junk, wanted in (
        (None, "a jax.sharding.NamedSharding"),
        (P("model"), "a jax.sharding.NamedSharding"),
        (NamedSharding(mesh, P(None, None, "model")), "at most 2 entries"),
        (NamedSharding(mesh, P(P.UNCONSTRAINED)), "how it is split"),
    ):
        with pytest.raises(pq.errors.InvalidArgument, match=wanted):
            shard(q, junk)
    for junk in (None, {"v": NamedSharding(mesh, P())}, {"w": None}, {"w": P()}, [1], "model"):
        with pytest.raises(pq.errors.InvalidArgument, match=r"a jax\.sharding\.NamedSharding"):
            shard({"w": q}, junk)
    with pytest.raises(pq.errors.InvalidArgument, match="arrays and QTensors"):
        shard({"w": "text"}, NamedSharding(mesh, P()))
    for elsewhere in (q.to("torch:cpu"), q.to("torch:cpu").dequantize()):
        with pytest.raises(pq.errors.InvalidArgument, match=r"q\.to\('jax'\)"):
            shard(elsewhere, NamedSharding(mesh, P()))


# -- devices ------------------------------------------------------------------------------------


def test_several_devices_have_one_name_in_the_order_of_the_mesh() -> None:
    names = {
        "jax:cpu:0-7": jax.devices(),
        "jax:cpu:0-3": jax.devices()[:4],
        "jax:cpu:0,2,4-6": [jax.devices()[i] for i in (0, 2, 4, 5, 6)],
        "jax:cpu:4-7,0-3": [*jax.devices()[4:], *jax.devices()[:4]],
        "jax:cpu:3": [jax.devices()[3]],
    }
    q = quantized("nf4")
    for name, devices in names.items():
        where = NamedSharding(Mesh(np.array(devices), ("all",)), P())
        assert pq.device_of(jax.device_put(jnp.ones(8), where)) == name
        moved = q.to(name)
        assert moved.device == pq.device_of(moved.data) == name
        assert moved.data.sharding.device_set == set(devices)
        assert moved.to("jax:cpu:0").to_data() == pq.from_data(q.to_data(), name).to_data()
    for wrong in (
        "jax:cpu:0-8",
        "jax:cpu:1-0",
        "jax:cpu:0,0",
        "jax:cpu:0-",
        "jax:cpu:-",
        "jax:cpu:,",
    ):
        with pytest.raises(pq.errors.UnknownDevice):
            q.to(wrong)


def test_an_array_elsewhere_is_refused_and_the_fix_works(mesh: Mesh) -> None:
    q, x = quantized("nf4"), jax.device_put(jnp.ones((2, COLUMNS)), jax.devices()[0])
    placed = shard(q, NamedSharding(mesh, P("model")))
    with pytest.raises(pq.errors.DeviceMismatch, match=r"call b\.to\('jax:cpu:0'\)"):
        x @ placed.T
    there = jax.device_put(x, NamedSharding(mesh, P()))
    with pytest.raises(pq.errors.DeviceMismatch, match=r"call b\.to\('jax:cpu:0-7'\)"):
        there @ q.T
    wanted = whole(x @ q.T)
    for found in (x @ placed.to("jax:cpu:0").T, there @ q.to("jax:cpu:0-7").T, there @ placed.T):
        np.testing.assert_allclose(whole(found), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("chosen", [lambda: jax.devices()[3], lambda: "cpu"])
def test_what_has_no_device_counts_as_on_the_default_one(chosen: Any) -> None:
    found, x = [], np.ones((2, COLUMNS), np.float32)

    @jax.jit
    def run(x: Any) -> Any:
        found.append(pq.device_of(x))
        return pq.quantize(x, "nf4")

    with jax.default_device(chosen()):
        made, moved = run(x), pq.quantize(x, "nf4").to("jax")
        lies = pq.device_of(jnp.ones(1))
    assert [made.device, moved.device, *found] == [lies] * 3


def test_a_call_that_cannot_be_split_stays_out_of_programs_here(mesh: Mesh) -> None:
    """One device has it (jax_core/test_ffi.py)."""
    x, q = np.ones((4, 64), np.float32), pq.quantize(np.ones((64, 64), np.float32), "q4s-32")
    operands = jax.device_put((x, q.to("jax")), jax.devices()[0])
    assert "polyquant_product" not in jax.jit(lambda x, q: x @ q.T).lower(*operands).as_text()
    with pytest.raises(errors.KernelRefused, match="may split traced operands"):
        jax.jit(lambda x, q: pq.matmul(x, q.T, kernel="jax.ffi.matmul"))(*operands)
