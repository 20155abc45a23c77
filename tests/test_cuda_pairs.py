"""Products of two quantized operands on NVIDIA GPUs: which kernel, and within which bound.

Triton's kernels run under its interpreter where there is no GPU.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

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


def _chosen(values: tuple[str, str], m: int, result: str = "") -> str | None:
    left, right = map(as_scheme, values)
    problem = Problem("matmul", "cuda", left, right, ((0, 1), (1, 0)), m, 4096, 4096, result=result)
    return explain_problem("torch", problem).kernel


def test_what_the_sanitizer_sees_is_taken() -> None:
    from cuda_products import PAIRS

    for m, left, right, name in PAIRS:
        sides = as_scheme(left), as_scheme(right)
        problem = Problem("matmul", "cuda", *sides, ((0, 1), (1, 0)), m, 256, 1024)
        assert _kernel(name).why_not(problem) is None, (left, right, name)


def _kernel(name: str) -> Any:
    found = import_module("polyquant.backends.torch.cuda.kernels").KERNELS
    return next(kernel for kernel in found if kernel.name == name)


def _operand(scheme: str, shape: tuple[int, int]) -> Any:
    return conform._input(as_scheme(scheme), shape, "normal", "float32").reference()


def _error(y: Any, a: Any, b: Any, dtype: str, entering: str | None) -> str:
    host = pq.arrays.backend("torch").to_host(y)
    values = a.dequantize("float64"), b.dequantize("float64").T
    return conform.product_error(host, *values, dtype, entering or "float32")


@pytest.mark.parametrize(
    ("values", "kernel"),
    [
        (("q8s-row", "q8s-row"), "torch.nvrtc.int8"),
        (("fp8-row", "fp8-tensor"), "torch.cublas.fp8"),
        (("q8s-32", "q8s-row"), "torch.nvrtc.int8"),
        (("q8s-row", "q8s/64:f16"), "torch.nvrtc.int8"),
        (("fp8-row", "e4m3/32:f16"), "torch.nvrtc.fp8"),
        (("fp8-row", "mxfp8"), "torch.cublas.bf16"),
        (("q8s-32", "q8s-32"), "torch.nvrtc.pairs"),
        (("q8s/96:f16", "q8s-row"), "torch.triton.int8"),
        (("q8s-row", "q4s-32"), "torch.nvrtc.int8"),
        (("q8s-row", "q4s-row"), "torch.nvrtc.int8"),
        (("q8s-row", "q2s-row"), "torch.triton.int8"),
        (("e4m3/1x128:f32", "fp8-128x128"), "torch.nvrtc.fp8"),
        (("e4m3/1x128:f32", "e4m3/1x128:f32"), "torch.triton.fp8"),
        (("fp8-row", "q4s/128:f16"), "torch.nvrtc.fp8"),
        (("fp8-row", "mxfp4"), "torch.nvrtc.fp8"),
        (("mxfp8", "mxfp4"), "torch.cublas.bf16"),
        (("fp8-row", "nvfp4"), "torch.cublas.bf16"),
        (("fp8-row", "q8s-row"), "torch.cublas.bf16"),
        (("q4s-row", "q8s-row"), "torch.triton.int8"),
    ],
)
def test_which_kernel_multiplies_two_quantized(values: tuple[str, str], kernel: str) -> None:
    assert _chosen(values, 256) == kernel


@pytest.mark.parametrize(
    ("m", "k", "left", "kernel"),
    [
        (256, 512, "e4m3/1x128:f32", "torch.cublas.fp8"),
        (128, 512, "e4m3/1x128:f32", "torch.nvrtc.fp8"),
        (256, 256, "e4m3/1x128:f32", "torch.nvrtc.fp8"),
        (256, 512, "e4m3/1x128:f16", "torch.nvrtc.fp8"),
        (256, 512, "e4m3/128x128:f32", "torch.nvrtc.fp8"),
        (256, 512, "fp8-row", "torch.nvrtc.fp8"),
    ],
)
def test_which_blocks_of_fp8_are_for_cublas(m: int, k: int, left: str, kernel: str) -> None:
    sides = as_scheme(left), as_scheme("fp8-128x128")
    problem = Problem("matmul", "cuda", *sides, ((0, 1), (1, 0)), m, 4096, 512, step=k)
    reason = _kernel("torch.cublas.fp8").why_not(problem) or ""
    if reason.startswith("blocks need"):
        pytest.skip(reason)
    assert explain_problem("torch", problem).kernel == kernel


@needs_gpu
@pytest.mark.parametrize(
    "shape", [(256, 256, 512), (129, 264, 512), (131, 17, 1536), (300, 520, 4096)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_blocks_of_fp8_by_cublas(shape: tuple[int, int, int], dtype: str) -> None:
    m, n, k = shape
    a, b = _operand("e4m3/1x128:f32", (m, k)), _operand("fp8-128x128", (n, k))
    left, right = a.to("torch:cuda:0"), b.to("torch:cuda:0").mT
    y = pq.matmul(left, right, kernel="torch.cublas.fp8", out_dtype=dtype)
    assert y.is_contiguous()
    assert not _error(y, a, b, dtype, "float16")
    assert torch.equal(y, pq.matmul(left, right, kernel="torch.cublas.fp8", out_dtype=dtype))


@pytest.mark.parametrize(
    ("values", "kernel"),
    [
        (("q8s-row", "q8s-row"), "torch.nvrtc.int8"),
        (("fp8-row", "fp8-tensor"), "torch.nvrtc.fp8"),
        (("q8s-row", "q4s-row"), "torch.nvrtc.int8"),
        (("q8s-row", "q2s-row"), "torch.nvrtc.pairs"),
        (("q8s-row", "q8s-32"), "torch.nvrtc.int8"),
        (("q8s-32", "q8s-32"), "torch.nvrtc.pairs"),
        (("q8s-32", "q4s/128:f16"), "torch.nvrtc.pairs"),
        (("mxfp8", "mxfp4"), "torch.nvrtc.pairs"),
        (("fp8-row", "q8s-row"), "torch.nvrtc.pairs"),
        (("q4s-row", "q8s-row"), "torch.triton.int8"),
        (("fp8-row", "nvfp4"), "torch.triton.cublas"),
        (("q8s/96:f16", "q8s-row"), "torch.triton.int8"),
    ],
)
def test_which_kernel_multiplies_few_quantized_rows(values: tuple[str, str], kernel: str) -> None:
    assert _chosen(values, 64) == kernel


@pytest.mark.parametrize(
    ("m", "values", "kernel"),
    [
        (1, ("q8s-row", "u4/32:f16-zero:u4"), "torch.nvrtc.rows_bf16"),
        (300, ("nvfp4", "nvfp4"), "torch.nvrtc.rows_bf16"),
        (300, ("q8s-row", "u4/32:f16+bias:f16"), "torch.triton.cublas_bf16"),
        (300, ("q8s-row", "q8s-row"), "torch.nvrtc.int8"),
        (16, ("q8s-32", "q4s-32"), "torch.nvrtc.pairs"),
        (64, ("q8s-32", "q4s-32"), "torch.nvrtc.rows_bf16"),
        (16, ("mxfp8", "mxfp4"), "torch.nvrtc.rows_bf16"),
        (64, ("fp8-row", "mxfp4"), "torch.nvrtc.fp8"),
        (64, ("q4s-row", "q4s-row"), "torch.nvrtc.rows_bf16"),
        (1024, ("q4s-row", "q4s-row"), "torch.triton.int8"),
        (256, ("fp8-row", "fp8-row"), "torch.cublas.fp8"),
        (1 << 18, ("nf4", "nf4"), "torch.triton.cublas_bf16"),
    ],
)
def test_which_kernel_multiplies_two_quantized_to_bfloat16(
    m: int, values: tuple[str, str], kernel: str
) -> None:
    assert _chosen(values, m, "bfloat16") == kernel
    assert "bf16" not in kernel or _chosen(values, m, "float16") != kernel


@needs_gpu
@pytest.mark.parametrize(
    ("values", "kernels"),
    [
        (("nf4", "nf4-double"), ("rows_bf16", "rows_f32", "cublas_bf16")),
        (("nvfp4", "nvfp4"), ("rows_bf16", "rows_f32", "cublas_bf16")),
        (("q8s-row", "u4/32:f16-zero:u4"), ("rows_bf16", "rows_f32", "cublas_bf16")),
        (("mxfp6-e2m3", "u4/32:f16+bias:f16"), ("rows_bf16", "rows_f32", "cublas_bf16")),
        (("u4/32:(u6/8:f16)", "q4s/5:f16"), ("cublas_bf16",)),
    ],
)
def test_products_of_values_of_two_quantized(
    values: tuple[str, str], kernels: tuple[str, ...]
) -> None:
    for m, n, k in ((1, 70, 256), (16, 33, 200), (64, 257, 1056)):
        a, b = map(_operand, values, ((m, k), (n, k)))
        left, right = a.to(DEVICE), b.to(DEVICE).mT
        for name in kernels if m < 64 else kernels[-1:]:
            owner = "torch.triton" if "cublas" in name else "torch.nvrtc"
            dtype = "bfloat16" if "bf16" in name else "float32"
            y = pq.matmul(left, right, out_dtype=dtype, kernel=f"{owner}.{name}")
            assert not _error(y, a, b, dtype, dtype), (name, m, n, k)
        assert not _error(pq.matmul(left, right), a, b, "float32", None)


@needs_gpu
def test_linear_of_quantized_activations_and_a_bias() -> None:
    """The result's dtype says how values enter, not that of the sum with the bias."""
    w = _operand("nf4", (70, 256))
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(70, device="cuda", dtype=torch.bfloat16)
    a = pq.quantize(x, "q8s-row")
    y = pq.linear(x, w.to(DEVICE), bias, activations="q8s-row")
    host = pq.arrays.backend("torch").to_host(y.double())
    wanted = a.to("numpy").dequantize("float64") @ w.dequantize("float64").T
    wanted += bias.double().cpu().numpy()
    assert np.abs(host - wanted).max() < 2.0**-6 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("values", "kernel"),
    [
        (("e4m3/1x128:f32", "fp8-128x128"), "torch.nvrtc.fp8"),
        (("fp8-row", "fp8-row"), "torch.nvrtc.pairs"),
        (("q8s-row", "q4s-row"), "torch.nvrtc.pairs"),
        (("fp8-row", "nvfp4"), "torch.nvrtc.rows_f32"),
        (("q4s-32", "q4s-32"), "torch.nvrtc.rows_f32"),
        (("q4s-row", "q8s-row"), "torch.triton.int8"),
    ],
)
def test_which_kernel_multiplies_sixteen_quantized_rows(
    values: tuple[str, str], kernel: str
) -> None:
    assert _chosen(values, 16) == kernel


PAIRS = (
    ("q8s-row", "q4s-row"), ("q8s-32", "q4s-32"), ("q8s/64:f32", "q4s/32:f16"),
    ("q8s-row", "q2s/64:f16"), ("fp8-row", "fp8-row"), ("mxfp8", "mxfp4"), ("fp8-row", "mxfp4"),
    ("e4m3/1x128:f32", "fp8-128x128"), ("fp8-row", "q4s/128:f16"), ("e2m1/32:f32", "q4s/64:ue8m0"),
)  # fmt: skip


@needs_triton
@pytest.mark.parametrize("pair", PAIRS, ids=" x ".join)
def test_products_of_two_quantized_by_blocks(pair: tuple[str, str]) -> None:
    torch.manual_seed(7)
    for m, n, k in ((5, 70, 256), (17, 33, 200), (70, 40, 96), (129, 130, 352)):
        a, b = map(_operand, pair, ((m, k), (n, k)))
        kernel = _kernel("torch.triton.fp8" if a.scheme.value.is_float else "torch.triton.int8")
        y = kernel.run(a.to(DEVICE), b.to(DEVICE).mT, torch.float32)
        assert not _error(y, a, b, "float32", kernel.entering)


FEW = (
    *PAIRS[:-1], ("q8s-row", "q8s-row"), ("q8f/tensor:f32", "q8f/row:f16"), ("q8s-row", "q8s-32"),
    ("q8s/256:f32", "q4f/512:f16"), ("q8s-32", "q2f/1024:bf16"), ("q8s/row:f32@native", "q8s-row"),
    ("q8s/16x64:ue8m0", "q4s/128x128:f32"), ("fp8-tensor", "fp8-tensor"), ("fp8-row", "q8s-row"),
    ("fp8-row", "q2s/64:f16"), ("fp8-128x128", "fp8-row"), ("mxfp8", "mxfp8"),
    ("e4m3/32:ue4m3/tensor:f32", "e2m1/64:ue4m3/tensor:f32"),
)  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("pair", FEW, ids=" x ".join)
def test_products_of_few_quantized_rows(pair: tuple[str, str]) -> None:
    from polyquant.backends.torch.cuda import pairs

    torch.manual_seed(11)
    for n, k in ((70, 256), (33, 200), (1, 32), (257, 4112)):
        b = _operand(pair[1], (n, k))
        weight = b.to(DEVICE).mT
        for m in (1, 7, 16, 40, 70):
            a = _operand(pair[0], (m, k))
            y = pairs.matmul(a.to(DEVICE), weight, torch.float32)
            assert not _error(y, a, b, "float32", None), (n, k, m)
            assert torch.equal(y, pairs.matmul(a.to(DEVICE), weight, torch.float32))


MANY = (
    ("q8s-row", "q8s-row"), ("q8f/tensor:f32", "q8f/row:f16"), ("q8s/1x128:f32", "q8s/128x256:f16"),
    ("q8s-row", "q4s-row"), ("q8f-row", "q4f/64:bf16"), ("q8s/tensor:f32", "q4s-32"),
    ("q8s-row", "q4f/256:ue8m0"), ("q8s-row", "q4s/16x64:f32"), ("fp8-row", "fp8-row"),
    ("fp8-tensor", "fp8-tensor"), ("e4m3/1x128:f32", "fp8-128x128"), ("fp8-128x128", "fp8-row"),
    ("fp8-row", "q4s/128:f16"), ("fp8-row", "q4f/32:f16"), ("fp8-tensor", "mxfp4"),
    ("fp8-row", "e2m1/64:ue8m0"), ("fp8-row", "e2m1/128:ue8m0"),
    ("e4m3/row:ue4m3/tensor:f32", "e2m1/32:ue4m3/tensor:f32"), ("q8s-32", "q8s-row"),
    ("q8s-row", "q8s-32"), ("fp8-row", "e4m3/32:f16"), ("e4m3/64:f32", "fp8-tensor"),
    ("q8f/tensor:f32", "q8s/4x32:f16"), ("e4m3/row:f32", "e4m3/64:ue4m3/tensor:f32"),
)  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("pair", MANY, ids=" x ".join)
def test_products_of_many_quantized_rows(pair: tuple[str, str]) -> None:
    from polyquant.backends.torch.cuda import wide

    torch.manual_seed(17)
    is_float = as_scheme(pair[0]).value.is_float
    entering = "float16" if is_float else None
    for n, k in ((70, 256), (33, 200), (1, 32), (257, 4112)):
        b = _operand(pair[1], (n, k))
        weight = b.to(DEVICE).mT
        for m in (1, 40, 130, 300):
            a = _operand(pair[0], (m, k))
            rows = a.to(DEVICE)
            for dtype in (torch.float32, torch.bfloat16)[: 1 + (n == 257)]:
                y = wide.matmul(rows, weight, dtype)
                name = str(dtype).removeprefix("torch.")
                assert not _error(y, a, b, name, entering), (n, k, m, dtype)
                assert torch.equal(y, wide.matmul(rows, weight, dtype)), (n, k, m, dtype)


@pytest.mark.parametrize("pair", MANY, ids=" x ".join)
def test_plans_of_many_rows_fit_a_multiprocessor(pair: tuple[str, str]) -> None:
    from polyquant.backends.nvidia import Gpu
    from polyquant.backends.nvidia.wide import plan

    gpu = Gpu("NVIDIA H200", (9, 0), 232448, 132)
    schemes = as_scheme(pair[0]), as_scheme(pair[1])
    for m in (1, 17, 64, 65, 128, 129, 256, 512, 4096):
        for n, k in ((1, 32), (70, 256), (257, 4112), (1024, 1024), (4096, 4096), (8192, 8192)):
            made = plan(schemes, (m, k, n), "bfloat16", gpu, None)
            options = dict(each.split("=") for each in made.code.options)
            stages = int(options["STAGES"])
            is_exact = [options[x] for x in ("INTEGER", "LEFT_BLOCK", "RIGHT_BLOCK")] == [
                "1",
                "0",
                "0",
            ]
            assert options["PARTS"] == "1" or not is_exact
            assert stages >= 2 and made.shared_bytes + 16 * stages <= gpu.shared_bytes
            assert made.threads <= 1024 and max(made.boxes) <= 256 and made.grid[2] <= 8


@needs_gpu
def test_each_way_to_cut_a_product_of_many_rows() -> None:
    from polyquant.backends.torch.cuda import wide

    torch.manual_seed(19)
    # lw, rw, nt, kc, mc, stages, blocks, parts
    cuts = [(2, 1, 16, 1, 2, 4), (1, 2, 8, 2, 1, 3), (1, 1, 8, 4, 1, 6, 2), (3, 1, 2, 1, 1, 2)]
    in_parts = [(2, 1, 8, 2, 1, 3, 1, 4), (1, 1, 8, 1, 1, 4, 1, 2)]
    for pair in (MANY[0], MANY[3], MANY[10], MANY[12], MANY[14]):
        a, b = _operand(pair[0], (200, 1040)), _operand(pair[1], (300, 1040))
        rows, weight = a.to(DEVICE), b.to(DEVICE).mT
        is_exact = not a.scheme.value.is_float
        for each in cuts if is_exact else cuts + in_parts:
            for _ in range(2):  # the second begins before what precedes it has ended
                y = torch.full((200, 300), float("nan"), device="cuda")
                wide.multiply(rows, weight, y, wide.Cut(*each))
                entering = None if is_exact else "float16"
                assert not _error(y, a, b, "float32", entering), (pair, each)


@needs_gpu
def test_powers_of_two_far_apart_and_rows_of_nan() -> None:
    from polyquant.backends.torch.cuda import wide

    generator = np.random.default_rng(23)
    steps = 2.0 ** generator.integers(-40, 40, (130, 512 // 32))
    values = generator.standard_normal((130, 512)) * np.repeat(steps, 32, axis=1)
    b = pq.quantize(values.astype("float32"), "mxfp4")
    a = _operand("fp8-row", (40, 512))
    codes = a.data.copy()
    codes[7] = 0x7F
    y = wide.matmul(a._replace(data=codes).to(DEVICE), b.to(DEVICE).mT, torch.float32)
    assert y[7].isnan().all()
    others = [i for i in range(40) if i != 7]
    rows = a.dequantize("float64")[others], b.dequantize("float64").T
    host = pq.arrays.backend("torch").to_host(y[others])
    assert not conform.product_error(host, *rows, "float32", "float16")


@needs_gpu
@pytest.mark.parametrize("pair", [MANY[0], MANY[3], MANY[12]], ids=" x ".join)
def test_parts_of_lines_of_many_rows(pair: tuple[str, str]) -> None:
    """Rows of a larger tensor, and codes at addresses that copies of tiles cannot begin at."""
    from polyquant.backends.torch.cuda import wide

    a, b = _operand(pair[0], (100, 384)), _operand(pair[1], (90, 384))
    rows, weight = a.to(DEVICE), b.to(DEVICE)
    expected = wide.matmul(rows, weight.mT, torch.float32)
    assert torch.equal(
        wide.matmul(rows[30:77], weight[5:60].mT, torch.float32), expected[30:77, 5:60]
    )
    shifted = []
    for q in (rows, weight):
        room = torch.empty(q.data.numel() * q.data.itemsize + 4, dtype=torch.uint8, device="cuda")
        room[4:] = q.data.view(torch.uint8).reshape(-1)
        codes = room[4:].reshape(q.data.view(torch.uint8).shape).view(q.data.dtype)
        shifted.append(q._replace(data=codes))
    assert torch.equal(wide.matmul(shifted[0], shifted[1].mT, torch.float32), expected)


BY_CUBLAS = (
    ("fp8-row", "fp8-row", "torch.cublas.fp8"), ("fp8-tensor", "fp8-tensor", "torch.cublas.fp8"),
    ("fp8-row", "fp8-tensor", "torch.cublas.fp8"), ("fp8-row", "mxfp4", "torch.cublas.bf16"),
    ("mxfp8", "mxfp6-e3m2", "torch.cublas.bf16"), ("fp8-row", "q8s-row", "torch.cublas.bf16"),
    ("u8/row:f16", "q3s/64:ue8m0", "torch.cublas.bf16"), ("nf4", "nvfp4", "torch.cublas.bf16"),
    ("q8s-row", "u4/32:f16-zero:u4", "torch.cublas.bf16"),
    ("nf4-double", "fp8-row", "torch.cublas.bf16"),
)  # fmt: skip


@needs_gpu
@pytest.mark.parametrize(("left", "right", "kernel"), BY_CUBLAS)
def test_products_of_two_quantized_by_cublas(left: str, right: str, kernel: str) -> None:
    torch.manual_seed(13)
    for m, n, k in ((300, 70, 256), (170, 33, 200), (140, 40, 96), (300, 130, 352), (257, 16, 31)):
        a, b = _operand(left, (m, k)), _operand(right, (n, k))
        for dtype in ("float32", "bfloat16"):
            y = pq.matmul(a.to(DEVICE), b.to(DEVICE).mT, kernel=kernel, out_dtype=dtype)
            assert not _error(y, a, b, dtype, _kernel(kernel).entering), (m, n, k)


@needs_triton
@pytest.mark.parametrize("pair", [("q8s-row", "nf4"), ("nvfp4", "u4/8:f16-zero:u4")])
def test_three_numbers_of_bf16_are_float32(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six products of them, or three, in tiles of the weight's lines."""
    planes = import_module("polyquant.backends.torch.cuda.planes")
    if not IS_GPU:  # what cuBLAS does of two arrays in bf16

        def wide(a: Any, b: Any, out_dtype: Any) -> Any:
            assert a.dtype == b.dtype == torch.bfloat16
            return (a.double() @ b.double()).to(out_dtype)

        monkeypatch.setattr(torch, "mm", wide)
        monkeypatch.setattr(torch, "addmm", lambda c, *ab, out_dtype: c + wide(*ab, out_dtype))
    monkeypatch.setattr(planes, "MOST_BYTES", 4000)
    for m, n, k in ((9, 33, 96), (5, 7, 104)):
        a, b = map(_operand, pair, ((m, k), (n, k)))
        y = planes.matmul(a.to(DEVICE), b.to(DEVICE).mT, torch.float32)
        assert not _error(y, a, b, "float32", None)


@needs_gpu
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_integers_by_integers_are_exact(bits: int) -> None:
    from polyquant.backends.torch.cuda import pairs

    k = 4096
    generator = np.random.default_rng(12)
    left = generator.integers(-128, 128, (40, k))
    right = generator.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (100, k))
    a, b = (
        pq.quantize(values.astype("float32"), scheme, scales=np.ones((len(values), 1), "float32"))
        for values, scheme in ((left, "q8f/row:f32"), (right, f"q{bits}f/row:f32"))
    )
    expected = torch.from_numpy((left @ right.T).astype("float32")).cuda()
    # rt, wn, wk, kc, stages, chunk, blocks, direct
    cuts = [(2, 2, 4, 1, 2, 256), (4, 1, 8, 1, 3, 256), (1, 4, 2, 4, 2, 256), (2, 1, 2, 2, 2, 512)]
    direct = [(1, 1, 8, 1, 1, 128, 1, True), (2, 1, 4, 1, 2, 256, 1, True)] if bits == 8 else []
    for m in (1, 8, 40):
        rows, weight = a.to(DEVICE)[:m], b.to(DEVICE).mT
        for rt, *more in (*cuts, *direct):
            cut = pairs.Cut(rt, min(2, -(-m // 8)), *more)
            for _ in range(2):  # the second begins before what precedes it has ended
                y = torch.full((m, 100), float("nan"), device="cuda")
                pairs.multiply(rows, weight, y, cut)
                assert torch.equal(y, expected[:m]), cut
