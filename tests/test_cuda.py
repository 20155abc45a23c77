"""The kernels of NVIDIA GPUs: on a GPU where there is one, else Triton's under its interpreter.

Without Triton what is left is their table: what they take, and what they say of the rest.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuda_host
import polyquant as pq
from polyquant import conform
from polyquant.dispatch import explain_problem
from polyquant.kernel import Problem
from polyquant.scheme import scheme as as_scheme

torch = pytest.importorskip("torch")

IS_GPU = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
needs_gpu = pytest.mark.skipif(not IS_GPU, reason="torch sees no GPU")
DEVICE = "torch:cuda:0" if IS_GPU else "torch:cpu"

SCHEMES = (*pq.presets(), *conform._FURTHER)
SHAPES = ((3, 70), (33,), (2, 3, 40), (1, 1), (4, 128), (0, 8), (4, 0))
DTYPES = ("float32", "float16", "bfloat16") if IS_GPU else ("float32", "float16")


def _problem(op: str, scheme: str, **facts: Any) -> Problem:
    if op == "quantize":
        return Problem(op, "cuda", "float32", option=str(as_scheme(scheme)))
    if op in ("dequantize", "embedding"):
        return Problem(op, "cuda", as_scheme(scheme), **facts)
    left = facts.pop("left", "bfloat16")
    layout = facts.pop("layout", (None, (1, 0)))
    sizes = facts.pop("sizes", (1, 4096, 4096))
    return Problem(op, "cuda", left, as_scheme(scheme), layout, *sizes, **facts)


def _kernel(name: str) -> Any:
    found = import_module("polyquant.backends.torch.cuda.kernels").KERNELS
    return next(kernel for kernel in found if kernel.name == name)


def _inputs(scheme: str, kinds: tuple[str, ...]) -> list[Any]:
    made = as_scheme(scheme)
    shapes = [s for s in SHAPES if len(s) >= (0 if made.block is None else len(made.block))]
    found = [conform._input(made, shapes[0], kind, "float32") for kind in kinds]
    return found + [conform._input(made, shape, "normal", "float32") for shape in shapes[1:]]


# -- the table --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        (_problem("matmul", "q4s"), "torch.nvrtc.mma"),
        (_problem("matmul", "nf4"), "torch.nvrtc.mma"),
        (_problem("matmul", "nvfp4", left="float16"), "torch.nvrtc.mma"),
        (_problem("matmul", "q4s", left="float16", sizes=(4096, 64, 64)), "torch.nvrtc.mma"),
        (_problem("matmul", "int8", left="float16", sizes=(4096, 64, 64)), "torch.nvrtc.mma"),
        (_problem("matmul", "nf4", left="float16", sizes=(65, 64, 64)), "torch.triton.cublas"),
        (_problem("matmul", "nvfp4", left="float16", sizes=(65, 64, 64)), "torch.nvrtc.mma"),
        # Under a tensor scale: f16's scales, and 448 times the largest code, are beyond float16.
        *(
            (_problem("matmul", each, left="float16", sizes=(65, 64, 64)), "torch.triton.cublas")
            for each in (
                "e2m1/16:f16/tensor:f32",
                "e4m3/32:ue4m3/tensor:f32",
                "u8/32:ue4m3/tensor:f32",
            )
        ),
        (_problem("matmul", "q4s", left="float32"), "torch.nvrtc.mma"),
        (_problem("matmul", "q4s", left="float64"), "definition.matmul"),
        (_problem("matmul", "nf4", left="float32"), "torch.nvrtc.mma"),
        (_problem("matmul", "q4s", sizes=(8192, 4096, 4096)), "torch.nvrtc.mma"),
        (_problem("matmul", "q4s", sizes=(8193, 4096, 4096)), "torch.triton.cublas"),
        (_problem("matmul", "q8s-row", sizes=(4096, 4096, 4096)), "torch.nvrtc.mma"),
        (_problem("matmul", "q8s-32", sizes=(4096, 4096, 4096)), "torch.nvrtc.mma"),
        (_problem("matmul", "mxfp6-e3m2", sizes=(1025, 4096, 4096)), "torch.triton.cublas"),
        (_problem("matmul", "u4/32:f16+bias:f16", sizes=(32, 4096, 4096)), "torch.nvrtc.mma"),
        (_problem("matmul", "u4/32:f16+bias:f16", sizes=(33, 4096, 4096)), "torch.triton.cublas"),
        (_problem("matmul", "nf4", left="float32", sizes=(17, 64, 64)), "torch.triton.cublas"),
        (_problem("matmul", "q4s/7:f16"), "torch.triton.cublas"),
        (_problem("matmul", "q4s", layout=(None, (0, 1))), "torch.nvrtc.mma"),
        (_problem("matmul", "q4s", layout=(None, (0, 2, 1))), "torch.nvrtc.mma"),
        (_problem("matmul", "q3s", layout=(None, (0, 1))), "torch.triton.cublas"),
        (_problem("matmul", "q4s/32x1:f16", layout=(None, (0, 1))), "torch.triton.cublas"),
        (_problem("matmul", "q4s", layout=(None, (1, 0, 2))), "torch.triton.cublas"),
        (_problem("matmul", "q8s/row:f32@native", step=4), "torch.nvrtc.mma"),
        (_problem("matmul", "q8s/row:f32@native", step=2), "torch.triton.cublas"),
        (_problem("quantize", "nvfp4"), "torch.nvrtc.quantize"),
        (_problem("quantize", "q3s/32:f16@native"), "torch.nvrtc.quantize"),
        (_problem("quantize", "q4s/7:f16"), "definition.quantize"),
        (_problem("embedding", "nf4-double"), "torch.triton.embedding"),
        (_problem("embedding", "nf4", layout=((1, 0),)), "definition.embedding"),
        (_problem("dequantize", "q5f/2x3x4:f16"), "torch.triton.dequantize"),
    ],
    ids=str,
)
def test_which_kernel_is_chosen(problem: Problem, kernel: str) -> None:
    assert explain_problem("torch", problem).kernel == kernel


def test_what_is_declined_has_a_reason() -> None:
    found = explain_problem("torch", _problem("matmul", "q4s/7:f16"))
    assert "power of two" in dict(found.reasons)["torch.nvrtc.mma"]


def test_what_has_no_tiles_is_not_tuned() -> None:
    with pytest.raises(pq.errors.InvalidArgument, match="tiles to measure"):
        pq.tune("torch:cpu")


@needs_triton
def test_two_threads_do_not_allow_each_other_tf32() -> None:
    products = import_module("polyquant.backends.torch.cuda.products")

    def work(_: int) -> list[str]:
        found = []
        for _ in range(100):
            with products._precise():
                time.sleep(1e-4)
                found.append(torch.get_float32_matmul_precision())
        return found

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with ThreadPoolExecutor(2) as pool:
            assert {one for found in pool.map(work, range(2)) for one in found} == {"highest"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "text", ['{"rows": [[0, 4,', '{"rows": [[0, 4, 8, 8, 1, [1], 2.0]]}', "[]"]
)
def test_tiles_of_another_version_are_refused(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from polyquant.backends.nvidia.tiles import own_path, table

    monkeypatch.setenv("PQ_CACHE", str(tmp_path))
    own_path("A GPU").write_text(text)
    with pytest.raises(pq.errors.UnreadableFile, match=r"pq\.tune"):
        table("A GPU")


def test_tiles_come_from_the_nearest_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = import_module("polyquant.backends.nvidia.tiles")
    one = tiles.Row(0, 4, 4096, 4096, 1, tiles.Tiles(1, 1, 2, 4, 1, 2, 512), 5.0)
    rows = (
        one,
        one._replace(n=8192, k=8192, tiles=one.tiles._replace(rt=2)),
        one._replace(kind=5, tiles=one.tiles._replace(stages=3)),
        one._replace(columns=64, tiles=tiles.Tiles(1, 8, 8, 1, 2, 2, 256, wide=1)),
    )
    monkeypatch.setattr(tiles, "table", lambda device: rows)
    monkeypatch.setattr(tiles, "tiles_of", tiles.tiles_of.__wrapped__)
    assert tiles.tiles_of(0, 4, 1, 4096, 5120, "", 132) == one.tiles
    assert tiles.tiles_of(0, 4, 1, 10240, 8192, "", 132).rt == 2
    assert tiles.tiles_of(5, 4, 1, 8192, 8192, "", 132).stages == 3
    assert tiles.tiles_of(0, 4, 20, 4096, 4096, "", 132).nt == 3
    assert tiles.tiles_of(0, 4, 900, 4096, 4096, "", 132).wide == 1


def test_more_rows_are_cut_by_what_each_way_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = import_module("polyquant.backends.nvidia.tiles")
    whole = tiles.Tiles(1, 32, 8, 1, 1, 3, 256, wide=1)  # tiles of 128 x 256
    halves = whole._replace(nt=16, wn=4, wk=2)  # of 64 x 128
    one = tiles.Row(0, 4, 4096, 4096, 256, whole, 40.0)
    rows = (one, one._replace(tiles=halves, time_us=17.0))
    monkeypatch.setattr(tiles, "table", lambda gpu: rows)

    def found(columns: int, n: int, k: int) -> Any:
        return tiles.tiles_of.__wrapped__(0, 4, columns, n, k, "", 132)

    assert found(256, 4096, 4096) == halves
    assert found(256, 16384, 4096) == whole  # one round, and four
    assert found(200, 4096, 14336) == halves  # two tiles of 104, of whole 32
    assert found(520, 4096, 4096) == whole._replace(nt=24)
    assert found(300, 16384, 4096) == whole._replace(nt=20)  # two tiles that are no larger


def test_the_committed_table_has_tiles_for_every_number_of_rows() -> None:
    tiles = import_module("polyquant.backends.nvidia.tiles")
    found = json.loads(tiles.COMMITTED.read_text(encoding="utf-8"))
    rows = [tiles.row_of(row) for row in found["rows"]]
    assert {row.columns for row in rows} >= {1, 8, 64, 256}
    assert {row.bits for row in rows} >= {2, 3, 4, 8}
    for row in rows:
        assert row.tiles.rt == 1 or not row.tiles.wide
        needed = min(32, -(-row.columns // 8))
        assert row.tiles.nt == needed or (row.columns > 128 and row.tiles.nt == 16)
    ways = Counter(row[:5] for row in rows)
    assert all(count == 1 for (*_, columns), count in ways.items() if columns <= 32)


# -- bit for bit ------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequantize(scheme: str) -> None:
    kernel = _kernel("torch.triton.dequantize")
    assert kernel.why_not(_problem("dequantize", scheme)) is None
    for given in _inputs(scheme, ("normal", "wide", "blockwise")):
        wanted = given.reference()
        q = wanted.to(DEVICE)
        for kind in DTYPES:
            with np.errstate(all="ignore"):
                values = kernel.run(q, getattr(torch, kind))
                expected = wanted.dequantize(kind)
            host = pq.arrays.backend("torch").to_host(values)
            assert not conform._differ(host, expected, f"{given.what} to {kind}")


#: On the CPU every variant of the kernel takes the compiler some time.
ENCODED = SCHEMES if IS_GPU else (
    "q4s-32", "q8s-tensor", "q8f-row", "fp8-128x128", "nvfp4", "nf4", "nf4-double", "iq4_nl",
    "mxfp6-e3m2", "mxfp8-e5m2", "q1f/32:f16", "q5f/32:f16", "q4s/16:bf16", "u8[dynamic8]/64:f32",
    "u4/32:f16-zero:u4", "u3/32:ue8m0-zero:bf16", "u5/32:f32+bias:f32", "u1[custom]/8:f16",
    "q3s/16:f16@native", "u4/32:(u6/8:f16)+bias:(q6s/8:f16)", "e4m3/16:ue4m3@packed_native",
)  # fmt: skip


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel of quantize; without a GPU it is compiled for the CPU."""
    kernel = _kernel("torch.nvrtc.quantize")
    if not IS_GPU:
        package = import_module("polyquant.backends.torch.cuda")
        monkeypatch.setattr(package, "nvrtc", cuda_host, raising=False)
        monkeypatch.setitem(sys.modules, f"{package.__name__}.nvrtc", cuda_host)
        monkeypatch.setattr(import_module(f"{package.__name__}.encode"), "nvrtc", cuda_host)
    return kernel


@needs_triton
@cuda_host.needs_compiler
@pytest.mark.parametrize("scheme", ENCODED)
@pytest.mark.parametrize("nonfinite", ["raise", "saturate"])
def test_quantize(scheme: str, nonfinite: str, encoder: Any) -> None:
    reason = encoder.why_not(_problem("quantize", scheme))
    if reason is not None:
        assert "whole bytes" in reason
        return
    made, saturates = as_scheme(scheme), nonfinite == "saturate"
    shapes = [s for s in (*SHAPES, (2, 1024)) if len(s) >= len(made.block or ())]
    if not IS_GPU:
        shapes = [(3, 70)] if saturates else [(3, 70), (4, 128), (0, 8)]
    narrow = ("float16", "bfloat16") if IS_GPU else (("float16", "bfloat16")[len(scheme) % 2],)
    with np.errstate(all="ignore"):
        given = [conform._input(made, shape, "normal", "float32") for shape in shapes]
        for dtype in ("float32", *narrow)[: 1 if saturates and not IS_GPU else None]:
            given += [conform._input(made, shapes[0], kind, dtype) for kind in conform._MAKERS]
    for each in given:
        values = np.array(each.values)
        if saturates and values.size > 3:
            values.reshape(-1)[:3] = np.nan, np.inf, 1.0
        try:
            with np.errstate(all="ignore"):
                wanted = pq.quantize(values, made, table=each.table, nonfinite=nonfinite)
        except pq.errors.NonFiniteInput:  # beyond float16
            continue
        x = torch.from_numpy(values.view("V2").view("i2") if values.itemsize == 2 else values)
        x = x.view(getattr(torch, values.dtype.name)).to(DEVICE.partition(":")[2])
        table = wanted.to(DEVICE).table
        with np.errstate(all="ignore"):
            got = encoder.run(x, made, "minmax", table=table, nonfinite=nonfinite)
        assert not conform._parts_differ(got, wanted), each.what


@needs_triton
@cuda_host.needs_compiler
@pytest.mark.parametrize("scheme", ["fp8-128x128", "q4s/2x16:f16", "u4/4x32:f16-zero:u4"])
def test_blocks_of_several_lines_in_one_pass(scheme: str, encoder: Any) -> None:
    made = as_scheme(scheme)
    for shape in ((2, 150, 300), (128, 256)):
        given = conform._input(made, shape, "normal", "float32")
        with np.errstate(all="ignore"):
            wanted = pq.quantize(given.values, made)
        x = torch.from_numpy(np.array(given.values)).to(DEVICE.partition(":")[2])
        assert not conform._parts_differ(encoder.run(x, made, "minmax"), wanted), shape


@needs_triton
@cuda_host.needs_compiler
@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp6-e3m2", "mxfp8"])
@pytest.mark.parametrize("order", ["mixed", "sorted"])
def test_every_bf16_under_powers_of_two(scheme: str, order: str, encoder: Any) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[torch.isfinite(x.float())]
    generator = torch.Generator().manual_seed(5)
    shuffled = torch.randperm(len(x), generator=generator)
    at = shuffled if order == "mixed" else torch.sort(x.float().abs()).indices
    x = x[at[: len(x) // 64 * 64]].reshape(-1, 64)
    with np.errstate(all="ignore"):
        wanted = pq.quantize(x.float().numpy(), scheme)
    got = encoder.run(x.to(DEVICE.partition(":")[2]), as_scheme(scheme), "minmax")
    assert not conform._parts_differ(got, wanted)


@needs_triton
@cuda_host.needs_compiler
@pytest.mark.parametrize(
    ("scheme", "shape"),
    [("u4/32:(u6/8:f16)+bias:(q6s/8:f16)", (2, 512)), ("u4/32:(u6/8:f16)+bias:f16", (3, 320)),
     ("nf4-double", (2, 64 * 300)), ("nf4-double", (2, 448)), ("q4s/16:(q8s/32:f16)", (2, 1024)),
     ("q3s/32:(u4[nf4]/16:f32@native)", (2, 512)), ("q4s/64:(u3/8:bf16)", (64 * 80,)),
     ("u4/32:(u6/8:f16)+bias:(u6/8:f16)", (2, 512))],
)  # fmt: skip
def test_quantized_scales_in_one_pass(scheme: str, shape: tuple[int, ...], encoder: Any) -> None:
    made = as_scheme(scheme)
    generator = torch.Generator().manual_seed(28)
    for kind in (torch.float32, torch.bfloat16):
        x = torch.randn(shape, generator=generator).to(kind)
        x[..., :40], x[..., 70:140] = 0.0, x[..., 70:140].abs() + 1
        with np.errstate(all="ignore"):
            wanted = pq.quantize(x.float().numpy(), made)
        device = DEVICE.partition(":")[2]
        got = encoder.run(x.to(device), made, "minmax", table=wanted.to(DEVICE).table)
        assert not conform._parts_differ(got, wanted), kind


@needs_triton
@cuda_host.needs_compiler
@pytest.mark.parametrize(
    "scheme",
    ["q4s-32", "nvfp4", "fp8-128x128", "u4/32:f16+bias:f16", "q8s-tensor", "q4s/16:(q8s/32:f16)",
     "q4s/*x1:f16", "u4[custom]/8:f32", "q8s/2x3x8:f16"],
)  # fmt: skip
def test_what_kernels_see_of_values(scheme: str, encoder: Any) -> None:
    made = as_scheme(scheme)
    given = conform._input(made, (2, 5, 40), "normal", "float32")
    table = None if given.table is None else torch.from_numpy(given.table)
    table = table if table is None else table.to(DEVICE.partition(":")[2])
    kinds = (torch.float32, torch.bfloat16) if IS_GPU else (torch.bfloat16,)
    for kind in kinds:
        x = torch.from_numpy(np.array(given.values)).to(DEVICE.partition(":")[2], kind)
        q, seen = encoder.looks(x, made, "minmax", table=table)
        assert seen.is_finite
        expected = encoder.run(x, made, "minmax", table=table)
        assert not conform._parts_differ(q.to("numpy"), expected.to("numpy"))
        for bad in (float("nan"), float("inf"), -float("inf")):
            for at in ((0, 0, 0), (1, 4, 39), (1, 2, 17)):
                broken = x.clone()
                broken[at] = bad
                assert not encoder.looks(broken, made, "minmax", table=table)[1].is_finite


@needs_triton
@cuda_host.needs_compiler
def test_scales_that_may_be_too_large_for_their_block_are_seen(encoder: Any) -> None:
    x = torch.ones(2, 64, device=DEVICE.partition(":")[2])
    assert not encoder.looks(x, as_scheme("q4s-32"), "minmax")[1].may_be_dead
    x[1, :32] = 1e-9
    assert encoder.looks(x, as_scheme("q4s-32"), "minmax")[1].may_be_dead
    assert not encoder.looks(x, as_scheme("mxfp4"), "minmax")[1].may_be_dead


@needs_gpu
@pytest.mark.parametrize(
    "scheme", ["q4s-32", "q8s-row", "nvfp4", "fp8-128x128", "u4/64:f16-zero:u4"]
)
def test_quantizing_large_tensors(scheme: str, encoder: Any) -> None:
    torch.manual_seed(14)
    for shape in ((300, 4096), (3, 40000), (2, 70, 640), (1, 100000), (513, 1000)):
        x = torch.randn(shape, device="cuda").to(torch.bfloat16)
        x[..., 5], x[0, ...] = 0.0, x[0, ...] * 1000
        got = encoder.run(x, as_scheme(scheme), "minmax")
        with np.errstate(all="ignore"):
            wanted = pq.quantize(x.float().cpu().numpy(), scheme)
        assert not conform._parts_differ(got, wanted), shape


#: Blocks of several lines of a row, whose scales are decoded whole.
NESTED = ("q4s/2x32:(u8/8:f16)", "q4s/2x2x32:(u8/8:f16)")


@needs_triton
@pytest.mark.parametrize("scheme", [*SCHEMES, *NESTED])
def test_embedding(scheme: str) -> None:
    kernel, made = _kernel("torch.triton.embedding"), as_scheme(scheme)
    for shape in ((70, 40), (5, 3, 24)):
        if made.block is not None and len(made.block) > len(shape):
            continue
        wanted = conform._input(made, shape, "normal", "float32").reference()
        q = wanted.to(DEVICE)
        rows = torch.tensor([[4, 0], [3, 3], [1, shape[0] - 1]]).to(q.data.device)
        with np.errstate(all="ignore"):
            values, expected = kernel.run(rows, q, None), wanted.dequantize()
        host = pq.arrays.backend("torch").to_host(values)
        assert not conform._differ(host, expected[rows.cpu().numpy()], "the values")
        assert kernel.run(rows[:0], q, torch.float16).shape == (0, 2, *shape[1:])


@needs_gpu
def test_looking_up_rows_on_the_gpu() -> None:
    q = pq.quantize(torch.randn(1000, 256, device="cuda"), "nf4")
    rows = torch.randint(0, 1000, (7, 9), device="cuda")
    assert pq.explain("embedding", rows, q).kernel == "torch.triton.embedding"
    expected = q.dequantize()[rows]
    assert torch.equal(pq.ops.embedding(rows, q), expected)
    assert torch.equal(torch.nn.functional.embedding(rows, q), expected)
    with pytest.raises(pq.errors.InvalidIndex):
        pq.ops.embedding(rows + 1000, q)


@needs_triton
def test_float32_is_the_sum_of_its_planes() -> None:
    module = import_module("polyquant.backends.torch.cuda.planes")
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    x = (x * torch.logspace(-20, 20, 70)).to(DEVICE.partition(":")[2])
    x[0, 0], x[1, 1] = float("inf"), 3.4e38
    with np.errstate(all="ignore"):
        planes = module.split_planes(x).float()
    assert planes.shape == (9, 72)
    high, middle, low = planes[:, :70].reshape(3, 3, 70).unbind(1)
    assert torch.equal((low + middle) + high, x)
    assert not planes[:, 70:].any()


# -- products on a GPU ------------------------------------------------------------------------

PRODUCTS = (
    "q4s", "q4s/16:f32", "q4f/256:f16", "q8s", "int8", "fp8-row", "fp8-128x128", "mxfp4", "mxfp8",
    "mxfp8-e5m2", "mxfp6-e3m2", "nvfp4", "nf4", "nf4-double", "ternary", "q2s/64:f16",
    "q3s/64:f16", "q5s/32:bf16", "q6s/32:f16", "q7s/32:f16", "q1f/32:f16", "u4/32:f16-zero:u4",
    "u8/row:f32-zero:u8", "u4/32:f16+bias:f16", "u4/32:f16-zero:f16", "u3/32:ue8m0-zero:bf16",
    "q8s/row:f32@native", "q4s/16:ue4m3", "q3s/row:f32", "u5/32:f16-zero:u5",
    "u4/16:f16-zero:u4", "e2m1/16:f16", "e2m1/64:ue4m3",
)  # fmt: skip


def _operands(scheme: str, n: int, k: int) -> tuple[Any, Any]:
    """A weight on the GPU, and its values as float64."""
    made = as_scheme(scheme)
    q = conform._input(made, (n, k), "normal", "float32").reference()
    return q.to(DEVICE), torch.from_numpy(q.dequantize("float64")).cuda()


def _error(y: Any, x: Any, values: Any) -> str:
    kind = str(x.dtype).removeprefix("torch.")
    host = pq.arrays.backend("torch").to_host(y)
    return conform.product_error(host, x.double().cpu().numpy(), values.T.cpu().numpy(), kind, kind)


@needs_gpu
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scheme", PRODUCTS)
def test_products_of_few_rows(scheme: str, kind: str) -> None:
    torch.manual_seed(1)
    for n, k in ((64, 512), (33, 96), (257, 1056), (1, 32)):
        q, values = _operands(scheme, n, k)
        for m in (1, 2, 5, 9, 33, 130):
            x = torch.randn(m, k, device="cuda").to(getattr(torch, kind))
            try:
                y = pq.matmul(x, q.mT, kernel="torch.nvrtc.mma")
            except pq.errors.KernelRefused as refused:
                assert refused.facts["reason"]
                continue
            assert not _error(y, x, values)
            assert torch.equal(y, pq.matmul(x, q.mT, kernel="torch.nvrtc.mma"))


@needs_gpu
def test_every_number_of_rows() -> None:
    torch.manual_seed(2)
    for scheme, kind in (("q4s", "bfloat16"), ("fp8-row", "bfloat16"), ("q8s-32", "float16")):
        q, values = _operands(scheme, 100, 352)
        for m in range(301):
            x = torch.randn(m, 352, device="cuda", dtype=getattr(torch, kind))
            y = pq.matmul(x, q.mT)
            assert y.shape == (m, 100)
            assert m == 0 or not _error(y, x, values)


@needs_gpu
@pytest.mark.parametrize("left", ["bfloat16", "q8s-row", "nf4"])
def test_results_in_float64(left: str) -> None:
    q, _ = _operands("q4s", 40, 96)
    x = torch.randn(5, 96, device="cuda", dtype=torch.bfloat16)
    a = x if left == "bfloat16" else pq.quantize(x, left)
    wide = pq.matmul(a, q.mT, out_dtype="float64")
    assert torch.equal(wide, pq.matmul(a, q.mT, out_dtype="float32").double())


@needs_gpu
@pytest.mark.parametrize("m", [1, 7, 16, 40, 64, 128, 200])
@pytest.mark.parametrize(
    "scheme", ["q4s", "nf4", "nvfp4", "q8s-32", "fp8-row", "u4/32:f16-zero:u4", "q3s/64:f16"]
)
def test_every_way_to_cut_a_product(scheme: str, m: int) -> None:
    """Tiles that the table may choose, on extents that are no multiples of any."""
    from polyquant.backends.nvidia import tiles
    from polyquant.backends.torch.cuda import mma

    torch.manual_seed(8)
    for n, k in ((300, 1056), (64, 4096)):
        q, values = _operands(scheme, n, k)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        for chosen in tiles.candidates(q.scheme.bits, m):
            y = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
            mma.multiply(x, q.mT, y, chosen)
            assert not _error(y, x, values), chosen


@needs_gpu
@pytest.mark.parametrize("m", [5, 16, 64, 512])
@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4"])
def test_every_code_under_every_power_of_two(scheme: str, m: int) -> None:
    """An identity's rows give the weight's values, rounded to bfloat16; NaN spoils its line.

    (The definition's numbers below the normal ones are zeros, a product's need not be.)
    """

    def flushed(y: Any) -> Any:
        return torch.where(y.abs() < 2.0**-126, 0, y)

    q, _ = _operands(scheme, 256, 512)
    data, scales = q.data.view(torch.uint8), q.scales.view(torch.uint8)
    data[:] = torch.arange(data.numel(), device="cuda").reshape(data.shape) * 7 % 256
    if scheme.startswith("mxfp8"):
        data[(data & 0x7F) >= (0x7F if scheme == "mxfp8" else 0x7C)] = 0x40
    scales[:] = torch.arange(256, device="cuda").clamp(max=238)[:, None]
    x = torch.eye(m, 512, device="cuda", dtype=torch.bfloat16)
    values = torch.from_numpy(np.asarray(q.to("numpy").dequantize("float64")))
    want = values.mT[:m].to(torch.bfloat16).float().cuda()
    y = pq.matmul(x, q.mT, out_dtype="float32", kernel="torch.nvrtc.mma")
    assert torch.equal(flushed(y), want)
    scales[[0, 77, 130], [1, 15, 0]] = 255
    rows = [0, 77, 130]
    if scheme.startswith("mxfp8"):
        data[[3, 200], [0, 301]] = 0x7F
        data[[131, 255], [5, 511]] = 0xFF
        rows += [3, 131, 200, 255]
    want[:, rows] = float("nan")
    y = pq.matmul(x, q.mT, out_dtype="float32", kernel="torch.nvrtc.mma")
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(flushed(y).nan_to_num(), want.nan_to_num())


@needs_gpu
@pytest.mark.parametrize("scheme", ["q4s", "nf4", "q8s-row"])
def test_more_tiles_than_run_at_once(scheme: str) -> None:
    torch.manual_seed(12)
    q, values = _operands(scheme, 4100, 352)
    x = torch.randn(1111, 352, device="cuda", dtype=torch.bfloat16)
    assert not _error(pq.matmul(x, q.mT, kernel="torch.nvrtc.mma"), x, values)
    y = pq.matmul(x, q.mT, out_dtype="float32", kernel="torch.nvrtc.mma")
    assert torch.equal(y.to(torch.bfloat16), pq.matmul(x, q.mT, kernel="torch.nvrtc.mma"))


BY_N = (
    "q4s", "q4s/8:f16", "q4s/32x8:f16", "q4s/16x16:ue4m3", "q8s-32", "q8s-row", "fp8-row",
    "fp8-128x128", "mxfp4", "mxfp8-e5m2", "nvfp4", "nf4", "u4/32:f16-zero:u4", "q4s/tensor:f32",
    "q4s/24:f16", "u4/128:f16-zero:u4", "u4/64:f16-zero:u4", "q8s/row:f16", "q8s/512:f32",
)  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("scheme", BY_N)
def test_weights_stored_in_out(scheme: str) -> None:
    torch.manual_seed(9)
    for k, n in ((64, 512), (33, 96), (257, 1056), (1, 8), (520, 264)):
        q, values = _operands(scheme, k, n)
        for m in (1, 2, 9, 17, 32, 57):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            y = pq.matmul(x, q, kernel="torch.nvrtc.mma")
            assert not _error(y, x, values.T)
            assert torch.equal(y, pq.matmul(x, q, kernel="torch.nvrtc.mma"))


@needs_gpu
@pytest.mark.parametrize("order", ["in, out", "out, in"])
@pytest.mark.parametrize("scheme", ["q4s", "q8s-row", "nf4", "q4s/tensor:f32", "u4/32:f16-zero:u4"])
def test_batches_of_weights(scheme: str, order: str) -> None:
    torch.manual_seed(10)
    made = conform._input(as_scheme(scheme), (3, 96, 160), "normal", "float32").reference()
    q, values = made.to(DEVICE), torch.from_numpy(made.dequantize("float64"))
    weight, values = (q, values) if order == "in, out" else (q.mT, values.mT)
    k = weight.shape[-2]
    for m in (1, 5, 40, 100):
        for lead in ((3,), (1,), ()):
            x = torch.randn(*lead, m, k, device="cuda", dtype=torch.bfloat16)
            y = pq.matmul(x, weight)
            left, right = x.double().cpu().numpy(), values.numpy()
            assert y.shape == (3, m, weight.shape[-1])
            host = pq.arrays.backend("torch").to_host(y)
            assert not conform.product_error(host, left, right, "bfloat16", "bfloat16")


@pytest.mark.parametrize("by_n", [False, True])
@pytest.mark.parametrize(("batch", "m"), [(65_535, 8), (65_536, 8), (200_000, 3), (40_000, 100)])
def test_plans_of_many_products_fit_a_grid(batch: int, m: int, by_n: bool) -> None:
    from polyquant.backends.nvidia import Gpu, planning

    gpu, scheme = Gpu("NVIDIA H200", (9, 0), 232448, 132), as_scheme("q4s-32")
    for entering in ("bfloat16", "float32") if m < 64 else ("bfloat16",):
        rows = m * planning.PLANES[entering]
        tiles = planning.tiles_for(scheme, (m, 96, 64), entering, gpu, by_n=by_n)
        shapes = planning.Shapes((batch, 96, 64), by_n, batch, rows)
        made = planning.plan(
            scheme, shapes, (entering, entering), planning.Grids(0, 0, (16, 16, 1)), tiles, gpu
        )
        all_tiles = -(-rows // (8 * tiles.nt)) * batch
        assert made.grid[1] <= 65_535 and made.blocks[1] == made.blocks[0] * all_tiles
        assert tiles.by_warps or made.grid[0] * made.grid[1] == made.blocks[1]


@needs_gpu
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("order", ["in, out", "out, in"])
def test_more_products_than_an_axis_of_a_grid_has_room_for(order: str, kind: str) -> None:
    torch.manual_seed(12)
    q = pq.quantize(torch.randn(66_000, 32, 64, device="cuda"), "q4s-32")
    weight = q if order == "in, out" else q.mT
    x = torch.randn(66_000, 3, weight.shape[1], device="cuda", dtype=getattr(torch, kind))
    y = pq.matmul(x, weight)
    for i in (0, 1, 7, 65_534, 65_535, 65_536, 65_999):
        assert not _error(y[i], x[i], weight[i].dequantize("float64").mT)


@needs_gpu
def test_a_thread_that_has_no_context() -> None:
    q, values = _operands("q4s", 96, 160)
    for m in (3, 40):
        x = torch.randn(m, 160, device="cuda", dtype=torch.bfloat16)
        with ThreadPoolExecutor(1) as pool:
            y = pool.submit(pq.matmul, x, q.mT).result()
        assert not _error(y, x, values)


@needs_gpu
def test_what_lies_past_the_lines_of_a_view_is_not_multiplied() -> None:
    torch.manual_seed(15)
    whole = pq.quantize(torch.randn(96, 320, device="cuda"), "fp8-row")
    whole.data.view(torch.uint8)[:, 132:] = 0x7F  # NaN
    part = whole[:, :132]
    values = torch.from_numpy(part.to("numpy").dequantize("float64")).cuda()
    for m in (1, 9, 40):
        x = torch.randn(m, 132, device="cuda", dtype=torch.bfloat16)
        assert not _error(pq.matmul(x, part.mT), x, values), m


@needs_gpu
@pytest.mark.parametrize("view", ["misaligned", "strided", "transposed", "broadcast", "vector"])
def test_activations_of_any_layout(view: str) -> None:
    torch.manual_seed(3)
    q, values = _operands("q4s", 48, 70)
    base = torch.randn(6, 141, device="cuda", dtype=torch.bfloat16)
    x = {
        "misaligned": base[1:, 1:71],
        "strided": base[:, :140:2],
        "transposed": base[:, :70].clone().mT.contiguous().mT,
        "broadcast": base[:1, :70].expand(4, 70),
        "vector": base[2, 3:73],
    }[view]
    lines = x if x.ndim == 2 else x[None]
    y = pq.matmul(x, q.mT)
    assert not _error(y if x.ndim == 2 else y[None], lines, values)


@needs_gpu
def test_scales_that_the_product_before_made() -> None:
    """A product may begin before the kernel before it has ended, but not read what that writes."""
    torch.manual_seed(11)
    first = pq.quantize(torch.rand(128, 8192, device="cuda"), "q4s-32")
    codes = pq.quantize(torch.randn(256, 4096, device="cuda"), "q4s/32:f32")
    for rows in (1, 40):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        for i in range(10):
            given = torch.full((256, 8192), 0.5 + i, device="cuda", dtype=torch.bfloat16)
            scales = pq.matmul(given, first.mT, out_dtype="float32")
            arrays = {"data": codes.data, "scales": scales}
            q = pq.qtensor.from_parts(arrays, codes.scheme, codes.shape, device=codes.device)
            y = pq.matmul(x, q.mT)
            torch.cuda.synchronize()
            assert torch.equal(y, pq.matmul(x, q.mT)), (rows, i)


@needs_gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_in_a_graph_and_compiled() -> None:
    torch.manual_seed(4)
    q, values = _operands("nf4", 64, 128)
    x = torch.randn(2, 128, device="cuda", dtype=torch.bfloat16)
    expected = pq.matmul(x, q.mT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = pq.matmul(x, q.mT)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert not _error(y, x, values)
    assert not torch.equal(y, expected)
    compiled = torch.compile(lambda a: pq.matmul(a, q.mT) + 1)
    assert torch.allclose(compiled(x), y + 1)


@needs_gpu
def test_products_of_large_weights_are_made_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    products = import_module("polyquant.backends.torch.cuda.products")
    monkeypatch.setattr(products, "MOST_BYTES", 20_000)
    torch.manual_seed(5)
    q, values = _operands("q8s/2x16:f16", 129, 160)
    x = torch.randn(80, 160, device="cuda")
    assert not _error(pq.matmul(x, q.mT, kernel="torch.triton.cublas"), x, values)
    x = torch.randn(80, 129, device="cuda")
    assert not _error(pq.matmul(x, q, kernel="torch.triton.cublas"), x, values.T)
