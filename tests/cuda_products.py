"""One small call of each kernel of NVIDIA GPUs, and of each way to cut a product that it has.

    python tests/cuda_products.py

runs them all under compute-sanitizer's memcheck and racecheck, which must find nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import polyquant as pq
from polyquant import conform
from polyquant.scheme import scheme as as_scheme

MMA = "torch.nvrtc.mma"
#: Rows of x in bf16, a weight (out, in), and its kernel.
_ROWS = {
    "mma.cu": ((1, 9, 31), "q4s-32", MMA),
    "mma.cu, table": ((1, 2, 16), "nf4", MMA),
    "mma.cu, zeros": ((1, 20), "u4/32:f16-zero:u4", MMA),
    "mma.cu, biases": ((9,), "u4/32:f16+bias:f16", MMA),
    "mma.cu, across bytes": ((1,), "q3s/64:f16", MMA),
    "mma.cu, powers of two": ((1, 16), "mxfp4", MMA),
    "mma.cu, scales of e4m3": ((1, 9), "nvfp4", MMA),
    "wgmma.cu": ((50, 130, 300), "q4s-32", MMA),
    "wgmma.cu, table": ((200,), "nf4", MMA),
    "wgmma.cu, 8 bits": ((64,), "q8s-32", MMA),
    "wgmma.cu, powers of two": ((64,), "mxfp8", MMA),
    "bytes.cu": ((64,), "fp8-row", MMA),
    "cublas": ((300,), "q4s-32", "torch.triton.cublas"),
}
#: Rows of x, its scheme, that of a weight (out, in), and the kernel.
PAIRS = (
    (8, "q8s-row", "q8s-row", "torch.nvrtc.pairs"),
    (16, "fp8-row", "fp8-row", "torch.nvrtc.pairs"),
    (8, "q8s-32", "q4s-32", "torch.nvrtc.pairs"),
    (1, "q8s-tensor", "q2s/64:f16", "torch.nvrtc.pairs"),
    (5, "mxfp8", "mxfp4", "torch.nvrtc.pairs"),
    (33, "q8s-32", "q8s-32", "torch.nvrtc.pairs"),
    (130, "q8s-row", "q8s-row", "torch.nvrtc.int8"),
    (40, "q8s-row", "q4s-row", "torch.nvrtc.int8"),
    (70, "q8s-row", "q4s/128:f16", "torch.nvrtc.int8"),
    (70, "q8s/128:f32", "q8s/128x128:f32", "torch.nvrtc.int8"),
    (70, "q8s-32", "q8s-row", "torch.nvrtc.int8"),
    (70, "q8s-row", "q8s-32", "torch.nvrtc.int8"),
    (130, "fp8-row", "fp8-row", "torch.nvrtc.fp8"),
    (70, "e4m3/1x128:f32", "fp8-128x128", "torch.nvrtc.fp8"),
    (40, "fp8-row", "mxfp4", "torch.nvrtc.fp8"),
    (70, "fp8-row", "q4s/128:f16", "torch.nvrtc.fp8"),
    (8, "q8s-row", "q8s-row", "torch.triton.int8"),
    (8, "e4m3/1x128:f32", "fp8-128x128", "torch.triton.fp8"),
    (130, "fp8-row", "fp8-row", "torch.cublas.fp8"),
    (8, "fp8-row", "mxfp4", "torch.cublas.bf16"),
    (8, "fp8-row", "nf4", "torch.nvrtc.rows_f32"),
)
#: x (bf16, or its scheme), a weight, and cuts whose blocks of threads share k in clusters, share an
#: operand, or have several parts.
_CUTS = (
    ("", "q4s-32", ((1, 8, 4, 1, 2, 3, 256, 1), (1, 8, 4, 2, 2, 2, 256, 1))),
    ("", "mxfp8", ((1, 8, 8, 2, 2, 3, 128, 2), (1, 8, 4, 2, 1, 6, 128, 2))),
    ("q8s-row", "q8s-row", ((1, 1, 16, 4, 1, 4), (2, 1, 8, 1, 2, 6), (2, 1, 16, 2, 2, 3))),
    ("q8s/128:f32", "q8s/128x128:f32", ((2, 1, 8, 1, 1, 4, 1, 4), (1, 1, 8, 2, 1, 4, 1, 2))),
)


def floats(*shape: int, seed: int = 1, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=made).to(kind)


def quantized(scheme: str, *shape: int) -> Any:
    given = conform._input(as_scheme(scheme), shape, "normal", "float32")
    return given.reference().to("torch:cuda:0")


def products() -> dict[str, Callable[[], torch.Tensor]]:
    """One call a kernel and a way to cut it."""
    n, k = 257, 1056
    found: dict[str, tuple[Any, Any, str]] = {}
    for name, (counts, scheme, kernel) in _ROWS.items():
        right = quantized(scheme, n, k).mT
        found |= {f"{name} {m}": (floats(m, k), right, kernel) for m in counts}
        if "wgmma" in name and "table" not in name and "powers" not in name:
            half = floats(counts[0], k, kind=torch.float16)
            found[f"{name} {counts[0]} of float16"] = (half, right, kernel)
    for scheme in ("q4s-32", "u4/64:f16-zero:u4", "q8s-row"):
        in_out = quantized(scheme, k, 264)
        found |= {f"mma_n.cu {scheme} {m}": (floats(m, k), in_out, MMA) for m in (1, 20)}
    for m, left, scheme, kernel in PAIRS:
        right = quantized(scheme, 256, 1024).mT
        found[f"{m} {left} x {scheme} {kernel}"] = (quantized(left, m, 1024), right, kernel)
    return {
        name: lambda a=a, b=b, kernel=kernel: pq.matmul(a, b, kernel=kernel)
        for name, (a, b, kernel) in found.items()
    } | _cut_otherwise()


def _cut_otherwise() -> dict[str, Callable[[], torch.Tensor]]:
    """Products cut as the tables of tiles cut none that is so small."""
    mma, wide = (import_module(f"polyquant.backends.torch.cuda.{name}") for name in ("mma", "wide"))
    tiles = import_module("polyquant.backends.nvidia.tiles").Tiles
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for left, scheme, cuts in _CUTS:
        module, kind = (wide, wide.Cut) if left else (mma, tiles)
        x = quantized(left, 200, 1024) if left else floats(64, 1024)
        call = partial(_cut, module, x, quantized(scheme, 320, 1024).mT)
        found |= {f"{left} x {scheme} {each}": partial(call, kind(*each)) for each in cuts}
    return found


def _cut(module: Any, left: Any, right: Any, cut: Any) -> torch.Tensor:
    y = torch.empty(left.shape[0], right.shape[1], dtype=torch.bfloat16, device="cuda")
    module.multiply(left, right, y, cut)
    return y


def conversions() -> dict[str, Callable[[], torch.Tensor]]:
    """One call of what quantizes, dequantizes and looks rows up."""
    x, q = floats(300, 1056), quantized("nf4-double", 300, 1056)
    rows = torch.randint(0, 300, (50,), device="cuda")
    schemes = (
        "q4s-32",
        "q8s-row",
        "nvfp4",
        "fp8-128x128",
        "q8s-tensor",
        "nf4-double",
        "u4/32:(u6/8:f16)+bias:(q6s/8:f16)",
        "mxfp6-e3m2",
    )
    found: dict[str, Callable[[], torch.Tensor]] = {
        f"quantize {scheme}": lambda scheme=scheme: pq.quantize(x, scheme).data
        for scheme in schemes
    }
    return found | {
        "dequantize": lambda: q.dequantize("bfloat16"),
        "embedding": lambda: pq.ops.embedding(rows, q),
    }


def _once() -> None:
    for name, call in (products() | conversions()).items():
        for _ in range(
            2
        ):  # the second product of a weight begins while the kernel before still runs
            call()
        torch.cuda.synchronize()
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()


def _under(tool: str) -> int:
    """The exit status of all of it under one of compute-sanitizer's tools."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # What cuda-bindings asks the driver for and does not get is no error; torch has kernels too.
    of_tool = ["--tool", tool, "--error-exitcode", "1", "--report-api-errors", "no"]
    ours = ["--kernel-name-exclude", "kns=at6native", sys.executable, __file__, "--once"]
    src = str(Path(__file__).parents[1] / "src")
    path = os.pathsep.join(filter(None, (src, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [found, *of_tool, *ours], env=os.environ | {"PYTHONPATH": path}
    ).returncode


if __name__ == "__main__":
    if "--once" in sys.argv:
        _once()
    else:
        sys.exit(max([_under(tool) for tool in ("memcheck", "racecheck")]))
