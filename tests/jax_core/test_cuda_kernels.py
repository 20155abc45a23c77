"""CUDA C++ in JAX: what is planned and lowered, without a GPU; with one, products within bounds."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from polyquant import conform, dispatch, standard
from polyquant.dispatch import explain_problem
from polyquant.kernel import Problem
from polyquant.scheme import scheme as as_scheme

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

from polyquant.backends.jax import batches, cuda  # noqa: E402
from polyquant.backends.jax.cuda import launch, product  # noqa: E402
from polyquant.jax.linear import product_by  # noqa: E402

KERNEL = cuda.KERNELS[0]
IS_GPU = jax.default_backend() == "gpu" and cuda._lacking() is None
needs_gpu = pytest.mark.skipif(not IS_GPU, reason="JAX sees no GPU that runs them")

#: Every kind of code, scale, offset and block.
SCHEMES = (
    "q4s", "q4s/16:f32", "q4f/256:f16", "q8s", "int8", "fp8-row", "fp8-128x128", "mxfp4", "mxfp8",
    "mxfp8-e5m2", "mxfp6-e3m2", "nvfp4", "nf4", "nf4-double", "ternary", "q2s/64:f16",
    "q3s/64:f16", "q5s/32:bf16", "q6s/32:f16", "q7s/32:f16", "q1f/32:f16", "u4/32:f16-zero:u4",
    "u8/row:f32-zero:u8", "u4/32:f16+bias:f16", "u4/32:f16-zero:f16", "u3/32:ue8m0-zero:bf16",
    "q8s/row:f32@native",
)  # fmt: skip
#: Those that a weight stored (in, out) can have.
BY_N = (
    "q4s", "q4s/8:f16", "q4s/32x8:f16", "q8s-row", "fp8-128x128", "nvfp4", "nf4",
    "u4/32:f16-zero:u4", "q4s/tensor:f32",
)  # fmt: skip


def weight(scheme: str, *shape: int) -> Any:
    made = conform._input(as_scheme(scheme), shape, "normal", "float32").reference()
    return made.to("jax")


def floats(*shape: int, dtype: str = "bfloat16") -> Any:
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.normal(size=shape).astype(np.float32), dtype)


def problem(scheme: str, **facts: Any) -> Problem:
    given = {"a": "bfloat16", "layout": (None, (1, 0)), "m": 16, "n": 4096, "k": 4096, "step": 32}
    return Problem("matmul", "gpu", b=pq.scheme(scheme), **given | facts)


def error(y: Any, x: Any, q: Any) -> str:
    """What is wrong with a product, by the bound of docs/numerics.md."""
    values = np.asarray(q.dequantize(), np.float64)
    kind = str(x.dtype)
    left = np.asarray(x.astype(jnp.float32), np.float64)
    host = pq.arrays.backend("jax").to_host(y)
    return conform.product_error(host, left, values, kind, str(y.dtype))


# -- what is taken ----------------------------------------------------------------------------

REFUSED = (
    (problem("q4s", a=pq.scheme("q8s")), "multiplies a float"),
    (problem("q4s", a="float64"), "not float64"),
    (problem("q4s", m=8193), "up to 8192 rows"),
    (problem("u4[nf4]/64:f32", a="float16", m=128), "up to 64 rows"),
    (problem("u8[dynamic8]/64:f32"), "no decoder"),
    (problem("q4s", k=0), "extent is zero"),
    (problem("q4s/7:f16"), "power of two"),
    (problem("q3s", layout=(None, (0, 1))), "4 and 8 bits"),
    (problem("q8s/row:f32@native", step=2), "32-bit words"),
    (problem("u4[nf4]/64:f32~flat"), "does not know"),
)


@pytest.mark.parametrize(("facts", "reason"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_it_does_not_take_has_a_reason(facts: Problem, reason: str) -> None:
    assert reason in (KERNEL.why_not(facts) or "")
    assert KERNEL.name in dict(explain_problem("jax", facts).reasons)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_the_first_choice_on_a_gpu(scheme: str) -> None:
    if KERNEL.why_not(problem(scheme)) is None:
        assert explain_problem("jax", problem(scheme)).kernel == "jax.nvrtc.mma"
    assert explain_problem("jax", problem(scheme)._replace(device_kind="tpu")).kernel is None


class Gpu:
    """What is asked of one of JAX's devices."""

    platform = "gpu"

    def __init__(self, kind: str, capability: str) -> None:
        self.device_kind, self.compute_capability = kind, capability


class Answers:
    """NVRTC and the driver of other versions of CUDA, or what they raise where they are not."""

    def __init__(self, compiler: int, driver: int | Exception) -> None:
        self.nvrtc = self.driver = self
        self.versions = compiler, driver

    def nvrtcVersion(self) -> tuple[int, int, int]:
        return 0, self.versions[0], 1

    def cuDriverGetVersion(self) -> tuple[int, int]:
        if isinstance(self.versions[1], Exception):
            raise self.versions[1]
        return 0, 1000 * self.versions[1] + 80


def install(monkeypatch: pytest.MonkeyPatch, answers: Answers | None) -> None:
    """Put them in the place of cuda-bindings, or take that away."""
    monkeypatch.setattr(cuda.nvidia, "find_spec", lambda name: answers)
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, answers)


MACHINES = (
    ([Gpu("Radeon", "gfx90a")], {}, "NVIDIA's"),
    ([Gpu("NVIDIA T4", "7.5")], {}, "(8, 0), and a GPU here has (7, 5)"),
    ([Gpu("NVIDIA A", "8.0"), Gpu("NVIDIA H", "9.0")], {}, "differ in compute capability"),
    ([Gpu("NVIDIA A100", "8.0")], {"b": pq.scheme("fp8-row")}, "(8, 9)"),
    ([Gpu("NVIDIA A100", "8.0")], {"m": 128}, "(9, 0)"),
    ([Gpu("NVIDIA B200", "10.0")], {"m": 128}, "(9, 0)"),
    ([Gpu("NVIDIA B200", "10.0")], {"b": pq.scheme("fp8-row")}, ""),
)


@pytest.mark.parametrize(("devices", "facts", "reason"), MACHINES, ids=[m[2] for m in MACHINES])
def test_what_a_machine_lacks(
    devices: list[Gpu], facts: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: devices)
    install(monkeypatch, Answers(13, 13))
    for name in ("_lacking", "_below"):
        monkeypatch.setattr(cuda, name, getattr(cuda, name).__wrapped__)
    found = KERNEL.why_not(problem("q4s")._replace(**facts))
    assert reason in (found or "") and (found is None) == (not reason)


INSTALLED = (
    (None, "cuda-bindings is not installed: pip install"),
    (Answers(13, 12), "its compiler is CUDA 13's, and the driver here CUDA 12's: pip install"),
    (Answers(13, RuntimeError("no libcuda.so.1\nlooked in ...")), "(no libcuda.so.1): pip"),
    (Answers(12, 13), ""),
)


@pytest.mark.parametrize(("answers", "reason"), INSTALLED, ids=[text for _, text in INSTALLED])
def test_a_compiler_that_is_missing_is_a_reason(
    answers: Answers | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [Gpu("NVIDIA H200", "9.0")])
    install(monkeypatch, answers)
    monkeypatch.setattr(cuda, "_lacking", cuda._lacking.__wrapped__)
    found = KERNEL.why_not(problem("q4s"))
    assert reason in (found or "") and (found is None) == (not reason)
    jaxs = dispatch.backend("jax"), "jax:gpu:0"
    monkeypatch.setattr(dispatch, "backend_of_device", lambda device: jaxs)
    note = dispatch._device_info("jax:gpu:0").note  # as pq.devices() has it
    assert "jax.xla.matmul" in note
    assert f"not with {KERNEL.name}: {found}" in note if reason else KERNEL.name in note


# -- what is lowered --------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The attributes of the custom calls that are made; no kernel is compiled."""
    made: list[dict[str, Any]] = []
    call = jax.ffi.ffi_call

    def noted(target: str, out: Any) -> Any:
        def run(*arrays: Any, **attributes: Any) -> Any:
            made.append({"arrays": [*arrays, out], **attributes})
            return call(target, out)(*arrays, **attributes)

        return run

    monkeypatch.setattr(jax.ffi, "ffi_call", noted)
    monkeypatch.setattr(launch, "gpu_here", lambda: launch._ABSENT)
    monkeypatch.setattr(product, "gpu_here", lambda: launch._ABSENT)
    launch._kernel.cache_clear()
    jax.clear_caches()
    yield made
    launch._kernel.cache_clear()
    jax.clear_caches()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_lowered_for_cuda(scheme: str, launched: list[dict[str, Any]]) -> None:
    q = jax.eval_shape(lambda: weight(scheme, 384, 500).mT)
    for dtype, m in (("bfloat16", 1), ("bfloat16", 300), ("float16", 5), ("float32", 40)):
        if KERNEL.why_not(problem(scheme, a=dtype, m=m, step=4)) is not None:
            continue
        x = jax.ShapeDtypeStruct((m, 500), dtype)
        traced = jax.jit(lambda x, q: KERNEL.run(x, q, x.dtype)).trace(x, q)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "custom_call @polyquant_cuda_launch" in text
    assert launched
    for call in launched:
        _check_call(call)


def _check_call(call: dict[str, Any]) -> None:
    """Every buffer has a place of its own, inside of the argument."""
    size = call["argument"].nbytes
    places = call["places"].reshape(-1, 2)
    maps = call["maps"].reshape(-1, 8)
    numbers = [*places[:, 1], *maps[:, 1]]
    assert sorted(numbers) == list(range(len(call["arrays"])))
    assert len(set(places[:, 0])) == len(places)
    assert ((places[:, 0] >= 0) & (places[:, 0] <= size - 8) & (places[:, 0] % 8 == 0)).all()
    assert not call["argument"].view(np.int64)[places[:, 0] // 8].any()
    grid, cluster, threads, shared = np.split(call["launch"][:8], (3, 6, 7))
    assert (grid > 0).all() and (grid % cluster == 0).all()
    assert threads % 32 == 0 and threads <= 1024 and shared <= launch._ABSENT.shared_bytes
    for _, number, *numbers in maps.tolist():
        *batch, rows, line = call["arrays"][number].shape  # of bf16, or bytes of codes
        k = line if number == 0 else line // 2
        assert numbers[:5] == [k, rows, *(batch or [1]), 2 * k, 2 * k * rows]


@pytest.mark.parametrize(("scheme", "maps"), [("q8s-row", 2), ("mxfp8", 2), ("q4s", 1)])
def test_tiles_of_8_bits_are_copied_as_those_of_x(
    scheme: str, maps: int, launched: list[dict[str, Any]]
) -> None:
    q = jax.eval_shape(lambda: weight(scheme, 384, 512).mT)
    x = jax.ShapeDtypeStruct((100, 512), "bfloat16")
    jax.jit(lambda x, q: KERNEL.run(x, q, x.dtype)).trace(x, q).lower(lowering_platforms=("cuda",))
    (call,) = launched
    assert call["maps"].size == 8 * maps
    _check_call(call)


def test_what_was_traced_for_a_gpu_runs_elsewhere_too(launched: list[dict[str, Any]]) -> None:
    q, x = weight("q4s", 24, 64).mT, floats(3, 64)
    traced = jax.jit(lambda x, q: KERNEL.run(x, q, x.dtype)).trace(x, q)
    assert "polyquant_cuda_launch" in traced.lower(lowering_platforms=("cuda",)).as_text()
    if jax.default_backend() == "cpu":
        y = traced.lower(lowering_platforms=("cpu",)).compile()(x, q)
        assert not error(y, x, q)


def test_a_program_names_a_kernel_by_what_it_is_compiled_of(
    launched: list[dict[str, Any]],
) -> None:
    q, x = weight("q4s", 24, 64).mT, floats(3, 64)
    for dtype in ("bfloat16", "float32", "bfloat16"):
        run = partial(batches.matmul.__wrapped__, product._by_rows, kind=jnp.dtype(dtype))
        jax.jit(run).trace(x, q).lower(lowering_platforms=("cuda",))
    first, second, third = (call["kernel"] for call in launched)
    assert first == third != second
    assert len(first) == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_exported_program_is_decoded_by_xla(dtype: str, launched: list[dict[str, Any]]) -> None:
    """It may run in another process, which knows of no kernel; XLA promises no calls either."""
    q, x = weight("nf4", 24, 64).mT, floats(3, 64, dtype=dtype)
    run = jax.jit(lambda x, q: product_by(KERNEL, x, q, x.dtype))
    exported = jax.export.export(run, platforms=("cpu", "cuda"))(x, q)
    assert "polyquant_cuda_launch" not in exported.mlir_module() and not launched
    again = jax.export.deserialize(exported.serialize())
    assert not error(again.call(x, q), x, q)


# -- around the launch ------------------------------------------------------------------------


def test_float32_is_the_sum_of_its_planes() -> None:
    x = np.array(floats(1, 3, 72, dtype="float32"))
    x *= np.logspace(-20, 20, 72, dtype=np.float32)
    x[0, 0, 0], x[0, 1, 1] = np.inf, 3.4e38
    planes = np.asarray(product.split_planes(jnp.asarray(x)), np.float32).reshape(1, 3, 3, 72)
    high, middle, low = np.moveaxis(planes, 2, 0)
    assert np.array_equal((low + middle) + high, x)
    broken = product.split_planes(jnp.asarray([[[np.nan, -np.nan]]], jnp.float32))
    assert np.isnan(np.asarray(broken, np.float32)[0, 0]).all()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the definition in the kernel's place."""

    def run(x: Any, q: Any, kind: Any) -> Any:
        y = standard.matmul(x.reshape(*q.shape[:-2], *x.shape[-2:]), q, kind)
        return y.reshape(*x.shape[:2], -1)

    if not IS_GPU:
        monkeypatch.setattr(product, "_launched", run)
        monkeypatch.setattr(product, "_in_programs", product._by_call)
        jax.clear_caches()


BATCHES = (
    ((5, 96), (96, 40)),
    ((96,), (96, 40)),
    ((2, 3, 5, 96), (96, 40)),
    ((3, 5, 96), (3, 96, 40)),
    ((1, 5, 96), (3, 96, 40)),
    ((96,), (3, 96, 40)),
    ((2, 3, 5, 96), (3, 96, 40)),
    ((2, 4, 1, 96), (2, 1, 96, 40)),
    ((7, 2, 3, 5, 96), (2, 1, 96, 40)),
)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("order", ["in, out", "out, in"])
@pytest.mark.parametrize("shapes", BATCHES, ids=str)
def test_axes_before_the_last_two(shapes: Any, order: str) -> None:
    of_x, (*batch, k, n) = shapes
    made = weight("q4s/32:f16", *batch, *((k, n) if order == "in, out" else (n, k)))
    q, x = made if order == "in, out" else made.mT, floats(*of_x)
    y = product.matmul(x, q, x.dtype)
    assert y.shape == np.matmul(np.zeros(of_x), np.zeros((*batch, k, n))).shape
    assert not error(y, x, q)


@pytest.mark.usefixtures("emulated")
def test_float32_is_cut_where_its_planes_stay_together() -> None:
    q, x = weight("q4s/32:f16", 40, 96).mT, floats(50, 96, dtype="float32")
    assert not error(product.matmul(x, q, x.dtype), x, q)
    assert not error(product.matmul(x[None], q, x.dtype), x[None], q)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("scheme", ["u4/32:f16-zero:u4", "nf4", "q4s/tensor:f32", "nvfp4"])
def test_transformations(scheme: str) -> None:
    def run(x: Any, q: Any) -> Any:
        return product.matmul(x, q, x.dtype)

    layers = [weight(scheme, n, 96).mT for n in (40, 40, 40)]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    x = floats(3, 5, 96)
    singly = [run(rows, q) for rows, q in zip(x, layers, strict=True)]
    for each, rows, q in zip(singly, x, layers, strict=True):
        assert not error(each, rows, q)
    for y in (
        jax.vmap(run)(x, stacked),
        jax.jit(jax.vmap(run))(x, stacked),
        jax.lax.scan(lambda _, each: (None, run(*each)), None, (x, stacked))[1],
    ):
        assert np.array_equal(y, jnp.stack(singly))
    by_one = jax.vmap(run, (0, None))(x, layers[0])
    for rows, y in zip(x, by_one, strict=True):
        assert not error(y, rows, layers[0])
    all_of_one = jax.vmap(run, (None, 0))(x[0], stacked)
    assert np.array_equal(all_of_one[0], singly[0])


@pytest.mark.usefixtures("emulated")
def test_products_of_a_stack_are_turned_around() -> None:
    q, x = weight("nf4", 40, 96).mT, floats(5, 96)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), q)

    def run(x: Any, q: Any) -> Any:
        return product_by(KERNEL, x, q, x.dtype)

    def run_all(x: Any) -> Any:
        return jax.vmap(jax.vmap(run, (0, None)), (None, 0))(x, stacked)

    (back,) = jax.linear_transpose(run_all, x)(jnp.ones((2, 5, 40), x.dtype))
    wanted = 2 * np.broadcast_to(np.asarray(q.dequantize()).sum(1), x.shape)
    np.testing.assert_allclose(np.asarray(back, np.float32), wanted, rtol=0.02, atol=0.1)


ROWS = (("float32", 64, 4), ("float32", 65, 0), ("float16", 65, 1), ("bfloat16", 8193, 0),
        ("bfloat16", 65, 1), ("bfloat16", 0, 0))  # fmt: skip


@pytest.mark.parametrize(("dtype", "rows", "calls"), ROWS)
def test_rows_that_vmap_brings(
    dtype: str, rows: int, calls: int, launched: list[dict[str, Any]]
) -> None:
    """Those that the kernel is not for are XLA's."""
    q = jax.eval_shape(lambda: weight("q4s", 40, 96).mT)
    run = jax.jit(jax.vmap(lambda x, q: KERNEL.run(x, q, x.dtype), (0, None)))
    traced = run.trace(jax.ShapeDtypeStruct((rows, 1, 96), dtype), q)
    assert jax.tree.leaves(traced.out_info)[0].shape == (rows, 1, 40)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @polyquant_cuda_launch") == calls


@needs_gpu
def test_derivatives_and_donation() -> None:
    q, x = weight("q4s", 40, 96).mT, floats(5, 96)

    def loss(x: Any) -> Any:
        return jnp.sum(pq.matmul(x, q).astype(jnp.float32) ** 2)

    assert pq.explain("matmul", x, q).kernel == "jax.nvrtc.mma"
    y = pq.matmul(x, q).astype(jnp.float32)
    wanted = 2 * y @ q.dequantize().T
    got = jax.jit(jax.grad(loss))(x).astype(jnp.float32)
    np.testing.assert_allclose(got, wanted, rtol=0.05, atol=0.05 * float(jnp.abs(wanted).max()))
    square = weight("q4s", 96, 96).mT
    first = pq.matmul(x, square)
    step = jax.jit(lambda x, q: pq.matmul(x, q), donate_argnums=0)
    assert np.array_equal(step(x + 0, square), first)


@needs_gpu
def test_a_program_of_many_products() -> None:
    """XLA records those in a CUDA graph, and runs it again with arrays that lie elsewhere."""
    layers = [weight("q4s", 96, 96).mT for _ in range(4)] * 3

    def run(x: Any, layers: Any) -> list[Any]:
        return [x := pq.matmul(x, q) / 8 for q in layers]

    together = jax.jit(run)
    for seed in range(4):
        for m in (3, 40):
            x = floats(m, 96) + seed
            wanted = run(x, layers)
            for y, each in zip(together(x, layers), wanted, strict=True):
                assert np.array_equal(y, each)
            moved = [jax.tree.map(lambda leaf: leaf + 0, q) for q in layers]
            assert np.array_equal(together(x + 0, moved)[-1], wanted[-1])


@needs_gpu
def test_the_operation_before_may_write_the_weight() -> None:
    q, x = weight("q8s-row", 512, 4096).mT, floats(4, 4096)

    @jax.jit
    def run(x: Any, q: Any) -> Any:
        turned = q._replace(data=jnp.flip(q.data, 0), scales=jnp.flip(q.scales, 0))
        return pq.matmul(x, turned)

    wanted = pq.matmul(x, q)[:, ::-1]
    for _ in range(20):
        assert np.array_equal(run(x, q), wanted)


# -- products on a GPU ------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_keeps_the_bound(scheme: str, kind: str) -> None:
    n, k = 132, 1056
    q = weight(scheme, n, k).mT
    for m in (1, 9, 256) if kind == "bfloat16" else (9,):  # what is compiled anew takes its time
        reason = KERNEL.why_not(problem(scheme, a=kind, m=m))
        if reason is None:
            x = floats(m, k, dtype=kind)
            y = KERNEL.run(x, q, x.dtype)
            assert not error(y, x, q), m
            assert np.array_equal(y, jax.jit(lambda x, q: KERNEL.run(x, q, x.dtype))(x, q)), m


@needs_gpu
@pytest.mark.parametrize("scheme", BY_N)
def test_weights_stored_in_out(scheme: str) -> None:
    for k, n in ((257, 1056), (520, 264)):
        q = weight(scheme, k, n)
        for m in (1, 17, 32):
            x = floats(m, k)
            assert not error(KERNEL.run(x, q, x.dtype), x, q), m


@needs_gpu
def test_every_number_of_rows() -> None:
    q = weight("q4s", 100, 352).mT
    for m in range(1, 71):
        x = floats(m, 352)
        assert not error(KERNEL.run(x, q, x.dtype), x, q), m
