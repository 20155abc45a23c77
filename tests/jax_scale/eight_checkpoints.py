"""Trees with QTensors in checkpoints, in one piece and over eight devices; see test_eight.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyquant as pq
from polyquant.jax import shard, shardings

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))


@pytest.fixture(scope="module")
def tree() -> Any:
    x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    made = {
        "layers": [{"w": pq.quantize(x, "nf4")}, {"w": pq.quantize(x, "nvfp4").T}],
        "double": pq.quantize(x, "u4[nf4]/16:(u8[dynamic8u]/16:f32)"),
        "affine": pq.quantize(x, "u4/32:bf16-zero:u4"),
        "three": pq.quantize(x[:3, :70], "q3s/32:f16"),
        "scale": np.ones(3, np.float32),
    }
    return jax.device_put(made)


def where(tree: Any, mesh: Mesh) -> Any:
    """Everything split over the devices, but for what is too small."""
    split, whole = NamedSharding(mesh, P("model")), NamedSharding(mesh, P())
    small = {"three": whole, "scale": whole}
    return jax.tree.map(lambda _: split, tree, is_leaf=pq.is_quantized) | small


def abstract(tree: Any, places: Any = None) -> Any:
    """The tree with the shape and dtype of every stored array, and where it is to lie."""
    shapes = jax.eval_shape(lambda tree: tree, tree)
    if places is None:
        return shapes
    return jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place),
        shapes,
        shardings(tree, places),
    )


def assert_same(found: Any, wanted: Any) -> None:
    """Equal trees, to the bit."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


# -- Orbax --------------------------------------------------------------------------------------


def test_orbax_gives_back_every_bit(tree: Any, tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", tree)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "tree", abstract(tree))
        plain = checkpointer.restore(tmp_path / "tree", strict=False)
    assert_same(found, tree)
    assert found["layers"][1]["w"].to_data() == tree["layers"][1]["w"].to_data()
    assert {k for k, v in plain["affine"].items() if v is not None} == {"data", "scales", "offsets"}


def test_orbax_restores_where_it_is_told(tree: Any, mesh: Mesh, tmp_path: Path) -> None:
    places = where(tree, mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "whole", tree)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "whole", abstract(tree, places))
        assert_same(found, tree)
        weight = found["layers"][0]["w"]
        assert weight.device == "jax:cpu:0-7" and weight.shape == (64, 256)
        assert weight.data.sharding.spec == weight.scales.sharding.spec == P("model", None)
        assert found["double"].scales.data.addressable_shards[3].data.shape == (8, 16)

        checkpointer.save(tmp_path / "split", found)  # and from there on one device
        checkpointer.wait_until_finished()
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        single = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=one), abstract(tree)
        )
        again = checkpointer.restore(tmp_path / "split", single)
    assert_same(again, tree)
    assert again["affine"].device == "jax:cpu:0"


def test_a_tree_to_restore_into_needs_no_weights(mesh: Mesh, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    places = NamedSharding(mesh, P("model"))

    def quantized(params: Any) -> Any:
        return pq.quantize_tree(params, "nf4")

    shapes = {"w": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    empty = jax.eval_shape(quantized, shapes)
    wanted = jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place),
        empty,
        shardings(empty, places),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", quantized({"w": jnp.asarray(x)}))
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "tree", wanted)
    assert found["w"].to_data() == pq.quantize(x, "nf4").to_data()
    assert found["w"].scales.sharding.spec == P("model", None)


def test_orbax_keeps_steps_of_training(tree: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in range(2):
            changed = tree | {"scale": tree["scale"] + step}
            manager.save(step, args=ocp.args.StandardSave(changed))
        manager.wait_until_finished()
        found = manager.restore(1, args=ocp.args.StandardRestore(abstract(tree)))
    assert_same(found, tree | {"scale": tree["scale"] + 1})


# -- polyquant's own files ----------------------------------------------------------------------


def test_our_files_hold_trees_by_name(tree: Any, mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "tree.safetensors"
    for saved in (tree, shard(tree, where(tree, mesh))):
        named = pq.flatten_tree(saved)
        assert {"layers.0.w", "layers.1.w", "double"} < set(named)
        pq.save(path, named)
        for device in ("jax:cpu:0", "jax:cpu:0-7"):
            found = pq.unflatten_tree(tree, pq.load(path, device))
            assert_same(found, tree)
            assert found["layers"][1]["w"].device == device == pq.device_of(found["scale"])
            assert found["layers"][1]["w"].axes == (1, 0)
    split = shard(pq.unflatten_tree(tree, pq.load(path)), where(tree, mesh))  # from the host
    assert_same(split, tree)
    assert split["double"].data.sharding.spec == P("model", None)


def test_a_tree_of_shapes_is_filled(tree: Any, tmp_path: Path) -> None:
    path = tmp_path / "tree.safetensors"
    pq.save(path, pq.flatten_tree(tree))
    assert_same(pq.unflatten_tree(abstract(tree), pq.load(path, "jax:cpu:0")), tree)


def test_trees_and_names_that_do_not_fit_are_refused(tree: Any) -> None:
    named = pq.flatten_tree(tree)
    with pytest.raises(pq.errors.InvalidName, match="two leaves"):
        pq.flatten_tree({"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)})
    with pytest.raises(pq.errors.TensorNotFound, match=r"no tensor 'scale'\. The nearest"):
        pq.unflatten_tree(tree, {k: v for k, v in named.items() if k != "scale"})
    with pytest.raises(pq.errors.InvalidArgument, match="names of the tree's arrays"):
        pq.unflatten_tree(tree, named | {"more": jnp.ones(2)})
    with pytest.raises(pq.errors.ShapeMismatch, match="double has the first shape"):
        pq.unflatten_tree(tree, named | {"double": named["double"].T})
