"""The Pallas kernels of GPUs: within the bound, step by step without a GPU; and lowered for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyquant as pq
import ptx
from polyquant.dispatch import explain_problem
from polyquant.kernel import Problem

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

from polyquant.backends.jax import pallas  # noqa: E402
from polyquant.backends.jax.pallas import mma, product  # noqa: E402
from polyquant.backends.jax.pallas.product import Tiles  # noqa: E402

INTERPRETED = jax.default_backend() != "gpu"


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, NumPy runs the PTX."""
    if INTERPRETED:
        monkeypatch.setattr(mma.plgpu, "elementwise_inline_asm", ptx.elementwise_inline_asm)


#: Every kind of code, scale, zero point and block that is taken.
SCHEMES = (
    "q4s/32:f16",
    "q4f/row:f32",
    "q8s/row:f32",
    "q8f/tensor:f32",
    "u8/64:bf16",
    "q2s/64:f16",
    "u1/32:f32",
    "u4/32:f16-zero:u4",
    "u2/row:f32-zero:u2",
    "u8/2x64:f32-zero:u8",
    "u4[nf4]/64:f32",
    "u2[custom]/48:bf16",
    "nf4-double",
    "e2m1/32:ue8m0",
    "e2m1/16:ue4m3/tensor:f32",
    "e4m3/128x128:f32",
    "e4m3/row:f32",
    "e5m2/32:ue8m0",
)
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
FEW, LEFT, RIGHT = (
    Tiles(rows=8, line=64, slices=2),
    Tiles(rows=16, line=64, slices=2, dots=True),
    Tiles(rows=16, line=32, dots=True, left=False),
)


def weight(name: str, n: int, k: int) -> Any:
    scheme = pq.scheme(name)
    values = np.random.default_rng(n * k).normal(size=(n, k)).astype(np.float32)
    if scheme.bits == 1 or (scheme.value.startswith("u") and scheme.offset is None):
        values = np.abs(values) if scheme.table is None else values
    table = np.linspace(-1.0, 0.7, 2**scheme.bits) if scheme.table == "custom" else None
    return pq.quantize(values, scheme, table=table).to("jax").mT


def floats(m: int, k: int, dtype: str) -> Any:
    return jnp.asarray(np.random.default_rng(m).normal(size=(m, k)).astype(np.float32), dtype)


def check(y: Any, x: Any, q: Any) -> None:
    """Raise where a product is outside of the bound of docs/numerics.md."""
    values = np.asarray(q.dequantize(), np.float64)
    left = np.asarray(x.astype(jnp.float32), np.float64)
    wanted, unit = left @ values, UNIT[str(x.dtype)]
    bound = 8 * np.sqrt(x.shape[-1]) * unit * (np.abs(left) @ np.abs(values))
    assert y.shape == wanted.shape and y.dtype == x.dtype
    assert np.all(np.abs(np.asarray(y, np.float64) - wanted) <= bound + unit * np.abs(wanted))


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_keeps_the_bound(name: str) -> None:
    q = weight(name, 21, 100)
    for dtype, m, tiles in (("float32", 2, FEW), ("bfloat16", 5, LEFT)):
        x = floats(m, 100, dtype)
        check(product.matmul(x, q, x.dtype, tiles=tiles, interpret=INTERPRETED), x, q)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 40, 7), (17, 9, 64), (3, 33, 600)])
def test_every_extent_keeps_the_bound(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    q = weight("u4/32:f16-zero:u4", n, k)
    for dtype, tiles in zip(UNIT, (None, RIGHT, None), strict=True):
        x = floats(m, k, dtype)
        check(product.matmul(x, q, x.dtype, tiles=tiles, interpret=INTERPRETED), x, q)


#: Codes, blocks and scales of the kernel for bfloat16, with how it is cut and extents.
LANES = (
    ("q4s/32:f16", (5, 21, 256), mma.Tiles(2, 2, 1)),
    ("q4f/row:f32", (1, 16, 64), mma.Tiles(1, 1, 1)),
    ("q8s/row:f32", (3, 33, 608), mma.Tiles(1, 2, 2)),
    ("q8f/64:bf16", (9, 40, 320), mma.Tiles(1, 2, 2)),
    ("u8/2x64:f32-zero:u8", (5, 21, 256), mma.Tiles(2, 2, 1)),
    ("q2s/64:f16", (1, 40, 1280), mma.Tiles(2, 2, 1)),
    ("u2/row:f32-zero:u2", (5, 21, 256), mma.Tiles(2, 2, 1)),
    ("u1/256:f32", (2, 5, 512), mma.Tiles(1, 1, 2)),
    ("u4/32:f16-zero:u4", (16, 9, 320), mma.Tiles(2, 2, 2)),
    ("u4/row:f32-zero:u4", (5, 40, 192), mma.Tiles(2, 1, 4)),
    ("nf4", (64, 40, 320), mma.Tiles(2, 1, 4)),
    ("nf4-double", (5, 21, 256), mma.Tiles(2, 2, 1)),
    ("u4[custom]/128:bf16", (5, 21, 256), mma.Tiles(2, 2, 1)),
    ("mxfp4", (5, 21, 256), mma.Tiles(2, 2, 1)),
    ("q2f/64:ue4m3/tensor:f32", (5, 21, 256), mma.Tiles(2, 2, 1)),
    ("e4m3/128x128:f32", (5, 140, 384), mma.Tiles(2, 2, 4)),
    ("mxfp8-e5m2", (5, 21, 256), mma.Tiles(2, 2, 1)),
    ("nvfp4", (5, 21, 256), mma.Tiles(2, 2, 1)),
    # A thread's rows of 16.
    ("q8s/row:f32", (9, 40, 320), mma.Tiles(2, 2, 2, 16)),
    ("e4m3/row:f32", (5, 70, 256), mma.Tiles(4, 2, 1, 16)),
    ("u4/row:f32-zero:u4", (5, 40, 256), mma.Tiles(2, 1, 2, 16)),
    ("q8s/128:f16", (1, 20, 640), mma.Tiles(1, 1, 4, 8)),
)


@pytest.mark.parametrize(
    ("name", "extents", "tiles"), LANES, ids=[f"{i}-{row[0]}" for i, row in enumerate(LANES)]
)
def test_lane_by_lane_no_code_is_rounded(name: str, extents: Any, tiles: mma.Tiles) -> None:
    m, n, k = extents
    q, x = weight(name, n, k), floats(m, k, "bfloat16")
    assert mma.why_not(q.scheme, x.dtype, q.data.shape[-1]) is None
    y = product.matmul(x, q, jnp.float32, tiles=tiles, interpret=INTERPRETED)
    values = np.asarray(q.dequantize(), np.float64)
    error = 2.0**-20 if q.table is None else 2.0**-9  # entries of a table are rounded
    left = np.asarray(x, np.float64)
    assert np.all(np.abs(y - left @ values) <= error * (np.abs(left) @ np.abs(values)))


@pytest.mark.parametrize("name", ["q4s/32:f16", "nf4", "u4/32:f16-zero:u4", "q4s/192:f16"])
def test_scales_of_numbers_round_them_within_the_bound(name: str) -> None:
    q, x = weight(name, 24, 640), floats(2, 640, "bfloat16")
    tiles = mma.Tiles(width=16)
    check(product.matmul(x, q, x.dtype, tiles=tiles, interpret=INTERPRETED), x, q)


def test_by_itself_it_is_cut_as_rows_and_codes_ask_for() -> None:
    x = floats(33, 256, "bfloat16")
    for name, by_lanes in (("q4s/32:f16", 32), ("q2s/64:f16", 16), ("e4m3/row:f32", 32)):
        q = weight(name, 24, 256)
        for m in (3, 16, 17, 32, 33):
            assert isinstance(product.cut_for(x[:m], q), mma.Tiles) == (m <= by_lanes)
        assert isinstance(product.cut_for(x[:1], q), mma.Tiles) == (q.scheme.bits < 8)
    check(product.matmul(x[:17], q, x.dtype, interpret=INTERPRETED), x[:17], q)
    assert not isinstance(product.cut_for(x.astype("float16"), q), mma.Tiles)


def test_what_is_not_a_number_stays_so_lane_by_lane() -> None:
    q = weight("mxfp8", 20, 64)
    broken = q._replace(data=q.data.at[2, 5].set(0x7F), scales=q.scales.at[17, 1].set(255))
    y = np.asarray(
        product.matmul(floats(3, 64, "bfloat16"), broken, jnp.float32, interpret=INTERPRETED)
    )
    assert (np.isnan(y) == np.isin(np.arange(20), [2, 17])).all()
    nothing = pq.quantize(np.full((8, 64), 0.0, np.float32), "u4/32:f16-zero:u4").to("jax").mT
    assert not np.any(
        product.matmul(floats(3, 64, "bfloat16"), nothing, jnp.float32, interpret=INTERPRETED)
    )


NOT_BY_LANES = (
    ("q4s/32:f16", "float16", 32, "not float16"),
    ("u8[dynamic8]/64:f32", "bfloat16", 32, "no decoder"),
    ("q4s/32:f16", "bfloat16", 48, "whole 32 bytes"),
    ("q4s/16:f16", "bfloat16", 32, "have short scales"),
    ("u4/32:f16-zero:u8", "bfloat16", 32, "zero points of 8 bits"),
    ("q8s/16:f16", "bfloat16", 32, "have short scales"),
)


@pytest.mark.parametrize(("scheme", "dtype", "line", "reason"), NOT_BY_LANES)
def test_what_is_not_taken_lane_by_lane(scheme: str, dtype: str, line: int, reason: str) -> None:
    assert reason in (mma.why_not(pq.scheme(scheme), dtype, line) or "")


def test_axes_before_the_last_are_rows_and_a_vector_is_one() -> None:
    q = weight("mxfp4", 8, 64)
    x = floats(6, 64, "float32")
    whole = product.matmul(x, q, x.dtype, tiles=FEW, interpret=INTERPRETED)
    stacked = product.matmul(x.reshape(2, 3, 64), q, x.dtype, tiles=FEW, interpret=INTERPRETED)
    assert np.array_equal(stacked.reshape(6, 8), whole)
    vector = product.matmul(x[0], q, jnp.bfloat16, tiles=FEW, interpret=INTERPRETED)
    assert vector.shape == (8,) and vector.dtype == jnp.bfloat16


def test_zeros_are_exact_and_numbers_that_are_none_stay_so() -> None:
    nothing = pq.quantize(np.full((8, 64), 0.0, np.float32), "u4/32:f16-zero:u4").to("jax").mT
    x = floats(3, 64, "bfloat16")
    assert not np.any(product.matmul(x, nothing, x.dtype, tiles=LEFT, interpret=INTERPRETED))
    q = weight("e4m3/32:ue8m0", 8, 64)
    broken = q._replace(data=q.data.at[2, 5].set(0x7F), scales=q.scales.at[4, 1].set(255))
    y = np.asarray(
        product.matmul(floats(1, 64, "float32"), broken, jnp.float32, interpret=INTERPRETED)
    )
    assert np.isnan(y).nonzero()[1].tolist() == [2, 4]


def test_a_scale_of_the_smallest_power_of_two_is_exact() -> None:
    q = weight("mxfp4", 8, 64)
    # 2^-127, which is subnormal in float32; twos, so that no value is.
    q = q._replace(scales=jnp.zeros_like(q.scales), data=jnp.full_like(q.data, 0x4C))
    x = floats(2, 64, "float32") * 2.0**20
    check(product.matmul(x, q, x.dtype, tiles=FEW, interpret=INTERPRETED), x, q)


def test_under_jit_and_vmap() -> None:
    q = weight("q4s", 16, 64)
    x = jnp.stack([floats(2, 64, "float32"), floats(3, 64, "float32")[1:]])

    @jax.jit
    def one(x: Any, q: Any) -> Any:
        return product.matmul(x, q, x.dtype, tiles=FEW, interpret=INTERPRETED)

    each = jax.vmap(one, (0, None))(x, q)
    for made, rows in zip(each, x, strict=True):
        assert np.array_equal(made, one(rows, q))
        check(made, rows, q)


IS_LOWERED = jax.__version_info__ < (0, 11) or jax.default_backend() == "gpu"


@pytest.mark.skipif(not IS_LOWERED, reason="JAX from 0.11 on lowers for the GPU at hand alone")
@pytest.mark.parametrize("name", SCHEMES)
def test_it_is_lowered_for_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the PTX itself
    q = jax.eval_shape(lambda: weight(name, 384, 512))
    cases = [(m, dtype) for m in (1, 5, 64) for dtype in UNIT if m < 64 or dtype != "float32"]
    for m, dtype in cases:
        x = jax.ShapeDtypeStruct((m, 512), dtype)
        traced = jax.jit(lambda x, q: product.matmul(x, q, x.dtype)).trace(x, q)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "triton" in text


@pytest.mark.skipif(not IS_LOWERED, reason="JAX from 0.11 on lowers for the GPU at hand alone")
def test_what_was_traced_for_a_gpu_runs_elsewhere_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q, x = weight("q4s/32:f16", 24, 64), floats(3, 64, "bfloat16")
    traced = jax.jit(lambda x, q: pallas.KERNELS[0].run(x, q, x.dtype)).trace(x, q)
    if INTERPRETED:
        check(traced.lower(lowering_platforms=("cpu",)).compile()(x, q), x, q)
    assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def problem(scheme: str, **facts: Any) -> Problem:
    given = {"a": "bfloat16", "layout": (None, (1, 0)), "m": 16, "n": 4096, "k": 4096, "step": 32}
    return Problem("matmul", "gpu", b=pq.scheme(scheme), **given | facts)


REFUSED = (
    (problem("q4s", a=pq.scheme("q8s")), "multiplies a float"),
    (problem("q4s", a="float64"), "not float64"),
    (problem("q4s", layout=(None, (0, 1))), "stored (out, in)"),
    (problem("q4s", m=128), "up to 64 rows"),
    (problem("q4s", a="float32", m=32), "up to 16 rows"),
    (problem("q4s", k=0), "extent is zero"),
    (problem("q8s", n=1 << 18, k=1 << 16), "2 GiB"),
    (problem("q3s/32:f16"), "3 bits"),
    (problem("e3m2/32:ue8m0"), "6 bits"),
    (problem("q4s/32:f16@native"), "packed codes"),
    (problem("u4/32:f16+bias:f16"), "zero points beside integers"),
    (problem("u4/32:f16-zero:f16"), "zero points beside integers"),
    (problem("q4s/4:f16"), "whole 4 bytes"),
    (problem("u4[nf4]/64:f32~flat"), "does not know"),
)


@pytest.mark.parametrize(("facts", "reason"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_it_does_not_take_has_a_reason(facts: Problem, reason: str) -> None:
    assert reason in (pallas.KERNELS[0].why_not(facts) or "")


@pytest.mark.parametrize("name", SCHEMES)
def test_it_is_chosen_on_a_gpu_where_cuda_is_not(name: str) -> None:
    assert pallas.KERNELS[0].why_not(problem(name)) is None
    found = explain_problem("jax", problem(name))
    assert found.kernel in ("jax.nvrtc.mma", "jax.pallas.matmul"), found
    missed = [kernel for kernel, _ in found.reasons if kernel != "jax.nvrtc.mma"]
    assert missed == ["jax.transforms.matmul"]
    assert explain_problem("jax", problem(name)._replace(device_kind="tpu")).kernel is None
