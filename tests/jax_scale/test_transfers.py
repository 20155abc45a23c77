"""QTensors between NumPy, torch and JAX: the same bits, in the same memory where that can be."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import assert_same_parts

jax = pytest.importorskip("jax", reason="jax is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

SCHEMES = (
    *pq.presets(),
    "q3s/32:bf16",
    "u2[custom]/16:f16",
    "u4/32:f16+bias:bf16",
    "u4[nf4]/16:(u8[dynamic8u]/16:f32)~flat",
    "q5s/8:f16@packed_native",
    "q3f/8:f32@native",
)
DEVICES = ("numpy", "torch:cpu", "jax:cpu:0")


def _quantized(name: str, shape: tuple[int, ...] = (6, 70)) -> pq.QTensor:
    scheme = pq.scheme(name)
    x = np.abs(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
    table = np.linspace(-1, 1, 2**scheme.bits) if scheme.table == "custom" else None
    return pq.quantize(x, scheme, table=table)


def _address(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(
        array.data_ptr() if isinstance(array, torch.Tensor) else array.unsafe_buffer_pointer()
    )


def _aligned(q: pq.QTensor) -> pq.QTensor:
    """The same tensor of NumPy, with every stored array at a multiple of 64 bytes."""

    def moved(array: Any) -> Any:
        room = np.empty(array.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        made = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        made[...] = array
        return made

    return q._map(moved, "numpy")


@pytest.mark.parametrize("name", SCHEMES)
def test_every_way_round_keeps_every_bit(name: str) -> None:
    for q in (_quantized(name), _quantized(name).T):
        data = q.to_data()
        for way in itertools.permutations(DEVICES):
            moved = q
            for device in (*way, "numpy"):
                moved = moved.to(device)
                assert (moved.device, moved.scheme, moved.axes) == (device, q.scheme, q.axes)
                assert moved.to_data() == data
            assert_same_parts(moved, q)


@pytest.mark.parametrize("shape", [(), (0, 8), (1,)])
def test_tensors_without_elements_or_axes_travel(shape: tuple[int, ...]) -> None:
    q = _quantized("q8s-tensor", shape)
    assert q.to("jax:cpu:0").to("torch:cpu").to("jax:cpu:0").to_data() == q.to_data()


@pytest.mark.parametrize(
    ("source", "target"), [pair for pair in itertools.permutations(DEVICES, 2)]
)
@pytest.mark.parametrize("name", ["nf4", "q4s/32:bf16", "nvfp4", "nf4-double"])
def test_memory_is_shared(name: str, source: str, target: str) -> None:
    q = _aligned(_quantized(name)).to(source)
    there = q.to(target)
    for part, array in q.parts().items():
        assert _address(there.parts()[part]) == _address(array), part
    assert there.to(source).to_data() == q.to_data()


def test_jax_copies_what_does_not_begin_where_it_wants() -> None:
    q = _aligned(_quantized("q8s/row:f32@native", (4, 64)))
    room = np.empty(q.data.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + 8
    data = room[start : start + q.data.nbytes].reshape(q.data.shape)
    data[...] = q.data
    moved = q._replace(data=data).to("jax:cpu:0")
    assert _address(moved.data) != _address(data)
    assert _address(moved.scales) == _address(q.scales)
    assert moved.to_data() == q.to_data()


def test_donating_shared_memory_does_not_write_to_it() -> None:
    q = _aligned(_quantized("q8s/row:f32@native", (64, 64)))
    before = q.to_data()
    moved = q.to("jax:cpu:0")
    assert _address(moved.data) == _address(q.data)
    changed = jax.jit(lambda q: jax.tree.map(lambda a: a + 1, q), donate_argnums=0)(moved)
    assert changed.to_data() != before
    assert q.to_data() == before


def test_views_that_are_no_runs_of_memory_travel() -> None:
    q = _quantized("q8s/1:f32@native", (8, 64))
    for view in (q[::2], q[::-1], q[:, 8:16], q[:, ::-2]):
        for source in DEVICES:
            there = view.to(source)
            assert {there.to(device).to_data() == view.to_data() for device in DEVICES} == {True}


def test_scales_that_are_tracked_leave_their_gradients_behind() -> None:
    q = _quantized("q4s/32:f32").to("torch:cpu")
    q.scales.requires_grad_()
    assert q.to("jax:cpu:0").to_data() == q.detach().to_data()


def test_what_has_no_values_cannot_leave() -> None:
    q = _quantized("nf4").to("jax:cpu:0")
    for device in ("numpy", "torch:cpu"):
        for transformed in (jax.jit, jax.grad):

            def leaves(x: Any, device: str = device) -> Any:
                entering = pq.QTensor(
                    q.scheme, q.shape, q.data, q.scales * x, table=q.table, device=q.device
                )
                return entering.to(device).scales.sum()

            with pytest.raises(pq.errors.UnsupportedArray, match="traced"):
                transformed(leaves)(jax.numpy.float32(2))
    with pytest.raises(pq.errors.UnsupportedArray, match="meta device"):
        q.to("torch:meta").to("jax:cpu:0")
