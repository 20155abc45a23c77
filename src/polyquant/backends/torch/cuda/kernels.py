"""The kernels of NVIDIA GPUs, best first. What they are made of is imported when they run.

A package or a GPU that is missing is a reason. Where torch sees no GPU at all the question is
about another machine's, and is answered for one that has everything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from polyquant.backends.nvidia import schemes
from polyquant.backends.torch.cuda import pairing
from polyquant.kernel import Kernel, Problem
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme, parse
from polyquant.values import QuantStore

_HERE = "polyquant.backends.torch.cuda"
#: Compute capability of the oldest GPU that kernels are written for (bf16, cp.async): Ampere.
_OLDEST = (8, 0)
_BF16 = "bfloat16"
_NOTHING = nullcontext()
#: Asked at every call: torch's public question takes ten times as long.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _needs(*packages: str, oldest: tuple[int, int] = _OLDEST) -> Callable[[], str | None]:
    """What this machine lacks of packages and GPUs, asked once."""

    @cache
    def lacking() -> str | None:
        if not torch.cuda.is_available():
            return None
        for package in packages:
            if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
                return f"{package} is not installed"
        if torch.version.cuda is None:
            return "torch is built for GPUs of another maker"
        found = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
        if found < oldest:
            return f"a GPU here is of compute capability {found}, and it needs {oldest} or newer"
        return None

    return lacking


@cache
def _lacks_wgmma() -> str | None:
    if not torch.cuda.is_available():
        return None
    for i in range(torch.cuda.device_count()):
        if (found := torch.cuda.get_device_capability(i)) != (9, 0):
            most = schemes.MOST_BY_MMA
            return (
                f"above {most} rows it is for compute capability (9, 0), and a GPU here has {found}"
            )
    return None


@cache
def _lacks_fp8_blocks() -> str | None:
    """Whether torch asks cuBLAS for scales of blocks, as seen with torch 2.11."""
    found = tuple(int(each) for each in torch.__version__.split(".")[:2])
    cuda = tuple(int(each) for each in (torch.version.cuda or "13.0").split(".")[:2])
    if found < (2, 11) or cuda < (12, 9):
        return f"blocks need torch 2.11 for CUDA 12.9 or newer, and this is {torch.__version__}"
    return _lacks_wgmma()


_lacks_triton = _needs("triton")
_lacks_nvrtc = _needs("triton", "cuda.bindings.nvrtc", "polyquant._native")
_lacks_fp8 = _needs("triton", oldest=(8, 9))


@cache
def _module(name: str) -> Any:
    return import_module(f"{_HERE}.{name}")


# -- what each takes --------------------------------------------------------------------------


def _why_not_scheme(scheme: Any) -> str | None:
    """Why Triton's decoder cannot read a scheme; a float operand (a dtype's name) it need not."""
    if not isinstance(scheme, QuantScheme):
        return None
    if scheme.block is not None and len(scheme.block) > 3:
        return "its blocks have more than three axes"
    return None


def _why_not_dequantize(problem: Problem) -> str | None:
    return _lacks_triton() or _why_not_scheme(problem.a)


def _why_not_embedding(problem: Problem) -> str | None:
    if problem.transformed:
        return "a transformation of the library watches the operands"
    axes = problem.layout[0] if problem.layout else (0, 1)
    if axes is None or len(axes) < 2 or axes != tuple(range(len(axes))):
        return "the weight must be stored in the order of its axes, two or more"
    return _why_not_dequantize(problem)


def _why_not_quantize(problem: Problem) -> str | None:
    # What "quantize" is asked of a scheme alone (supports, devices) has no array's dtype.
    scheme = parse(problem.option) if problem.option else problem.a
    if not isinstance(scheme, QuantScheme):
        return _lacks_nvrtc()
    return why_not_encode(scheme) or _lacks_nvrtc()


def why_not_encode(scheme: QuantScheme) -> str | None:
    """Why ``encode.cu`` makes no codes of a scheme, or None."""
    if scheme.extras:
        return f"it does not know {scheme.extras[0]}"
    extent = scheme.block[-1] if scheme.block is not None else -1
    width = 8 if scheme.store is QuantStore.NATIVE else scheme.bits
    if extent != -1 and extent * width % 8:
        return "its blocks must begin at whole bytes"
    return _why_not_scheme(scheme)


def _why_not_cublas(problem: Problem) -> str | None:
    if "float64" in (problem.a, problem.b):
        return "it multiplies in float32 at most, and an operand is float64"
    return _lacks_triton() or _why_not_scheme(problem.a) or _why_not_scheme(problem.b)


def _why_not_pairs(problem: Problem) -> str | None:
    has_wgmma = _lacks_wgmma() is None
    reason = pairing.why_not_pairs(problem, has_wgmma=has_wgmma) or _lacks_nvrtc()
    operands = (problem.a, problem.b)
    made = [each for each in operands if isinstance(each, QuantScheme)]
    if reason is None and any(map(schemes.converts_fp8, made)):
        return _lacks_fp8()
    return reason


def _why_not_wide(problem: Problem, *, is_int: bool) -> str | None:
    reason = pairing.why_not_wide(problem, is_int=is_int) or _lacks_nvrtc()
    return reason or _lacks_wgmma()


def _why_not_wide_int8(problem: Problem) -> str | None:
    return _why_not_wide(problem, is_int=True)


def _why_not_wide_fp8(problem: Problem) -> str | None:
    return _why_not_wide(problem, is_int=False)


def _why_not_fp8(problem: Problem) -> str | None:
    reason = pairing.why_not_fp8(problem) or _lacks_fp8()
    if reason is None and pairing.in_fp8_blocks(problem.a, problem.b):
        return _lacks_fp8_blocks()
    return reason


def _why_not_block_int8(problem: Problem) -> str | None:
    return pairing.why_not_blockwise(problem, pairing.AS_INT8) or _lacks_triton()


def _why_not_block_fp8(problem: Problem) -> str | None:
    return pairing.why_not_blockwise(problem, pairing.AS_E4M3) or _lacks_fp8()


def _why_not_bf16(problem: Problem) -> str | None:
    return pairing.why_not_bf16(problem) or _lacks_triton()


def _why_not_two(problem: Problem, entering: str) -> str | None:
    """Why values of two quantized operands do not enter in a dtype."""
    if not isinstance(problem.a, QuantScheme) or not isinstance(problem.b, QuantScheme):
        return "it multiplies two quantized operands"
    if entering == _BF16 != problem.result:
        return f"it rounds values to bfloat16, and the result is {problem.result or 'float32'}"
    return None


def _why_not_as_rows(problem: Problem, entering: str) -> str | None:
    """Why ``mma.cu`` does not multiply rows that the left one of two quantized operands becomes."""
    if reason := _why_not_two(problem, entering):
        return reason
    if problem.m * problem.k * (2 if entering == _BF16 else 4) > schemes.MOST_BYTES:
        return "the left operand's values may take more than 256 MB"
    rows = problem._replace(a=entering, layout=(None, *problem.layout[1:]))
    return _why_not_scheme(problem.a) or _why_not_mma(rows)


def _why_not_rows_bf16(problem: Problem) -> str | None:
    if pairing.are_quicker(problem, has_wgmma=_lacks_wgmma() is None):
        return "codes as they are are multiplied sooner"
    return _why_not_as_rows(problem, _BF16)


def _why_not_rows_f32(problem: Problem) -> str | None:
    most = pairing.most_rows_f32(problem)
    if problem.m > most:
        few = f"more than {most} rows of two such" if most else "such"
        return f"{few} operands are multiplied sooner by others"
    return _why_not_as_rows(problem, "float32")


def _why_not_cublas_bf16(problem: Problem) -> str | None:
    return _why_not_two(problem, _BF16) or _why_not_cublas(problem)


def _why_not_mma(problem: Problem) -> str | None:
    reason = schemes.why_not(problem) or _lacks_nvrtc()
    if reason is None and problem.m > schemes.MOST_BY_MMA:
        reason = _lacks_wgmma()
    if reason is None and isinstance(problem.b, QuantScheme) and schemes.converts_fp8(problem.b):
        return _lacks_fp8()
    return reason


# -- how each runs ----------------------------------------------------------------------------


def _beside(operand: Any) -> AbstractContextManager[Any]:
    """The GPU of an operand as torch's current one, which launches go to."""
    array = operand.data if isinstance(operand, QTensor) else operand
    return _NOTHING if _is_current(array) else torch.cuda.device(array.device.index)


def _is_current(array: Any) -> bool:
    index = array.device.index
    return index is None or index == _current_device()


def _dequantize(q: Any, dtype: Any) -> Any:
    with _beside(q):
        return _module("decode").dequantize(q, dtype)


def _embedding(rows: Any, q: Any, dtype: Any) -> Any:
    with _beside(q):
        return _module("decode").embedding(rows, q, dtype)


def _quantize(x: Any, scheme: Any, calibration: str, **given: Any) -> Any:
    with _beside(x):
        return _module("encode").quantize(x, scheme, calibration, **given)


def _quantize_and_look(x: Any, scheme: Any, calibration: str, **given: Any) -> Any:
    with _beside(x):
        return _module("encode").quantize_and_look(x, scheme, calibration, **given)


def _product(module: str, name: str) -> Callable[[Any, Any, Any], Any]:
    """A product of that name in a module that is imported when it runs."""

    def run(a: Any, b: Any, dtype: Any) -> Any:
        product = getattr(_module(module), name)
        if dtype is torch.float64:  # none sums in more than float32
            return run(a, b, torch.float32).to(dtype)
        if a.__class__ is torch.Tensor and _is_current(a):  # at every token
            return product(a, b, dtype)
        with _beside(a):
            return product(a, b, dtype)

    return run


def tune(device: str) -> Any:
    """Measure and keep the quickest tiles of a device; returns the file. See ``pq.tune``."""
    return _module("tune").tune(device)


_FP8 = _product("paired", "matmul_fp8")
_BLOCKWISE = _product("blockwise", "matmul")
_WIDE = _product("wide", "matmul")
_ROWS_BF16, _IN_BF16 = _product("mma", "matmul_bf16"), _product("products", "matmul_bf16")
KERNELS = (
    Kernel("torch.nvrtc.mma", "matmul", _why_not_mma, _product("mma", "matmul")),
    Kernel("torch.nvrtc.rows_bf16", "matmul", _why_not_rows_bf16, _ROWS_BF16, entering=_BF16),
    Kernel("torch.nvrtc.pairs", "matmul", _why_not_pairs, _product("pairs", "matmul")),
    Kernel("torch.cublas.fp8", "matmul", _why_not_fp8, _FP8, entering="float16"),
    Kernel("torch.nvrtc.int8", "matmul", _why_not_wide_int8, _WIDE),
    Kernel("torch.nvrtc.fp8", "matmul", _why_not_wide_fp8, _WIDE, entering="float16"),
    Kernel("torch.nvrtc.rows_f32", "matmul", _why_not_rows_f32, _product("mma", "matmul_f32")),
    Kernel("torch.triton.int8", "matmul", _why_not_block_int8, _BLOCKWISE),
    Kernel("torch.triton.fp8", "matmul", _why_not_block_fp8, _BLOCKWISE, entering="float16"),
    Kernel("torch.triton.cublas_bf16", "matmul", _why_not_cublas_bf16, _IN_BF16, entering=_BF16),
    Kernel("torch.cublas.bf16", "matmul", _why_not_bf16, _product("planes", "matmul")),
    Kernel("torch.triton.cublas", "matmul", _why_not_cublas, _product("products", "matmul")),
    Kernel(
        "torch.nvrtc.quantize", "quantize", _why_not_quantize, _quantize, looks=_quantize_and_look
    ),
    Kernel("torch.triton.dequantize", "dequantize", _why_not_dequantize, _dequantize),
    Kernel("torch.triton.embedding", "embedding", _why_not_embedding, _embedding),
)
