"""What polyquant is measured against on the CPU: each rival is one function, and optional.

A function takes a float32 weight (out, in), a number of copies and a number of threads, and gives
the weight in the rival's form (``weights.Prepared``). One that is not installed raises ``Missing``
with how it is: none of them is among polyquant's extras, and none is compiled when it is installed.

    pip install torch --index-url https://download.pytorch.org/whl/cpu
    pip install --no-deps bitsandbytes 'mlx[cpu]' mlx-cpu libggml-python ik-llama-cpp-python gguf
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import rival_ggml
from weights import Array, Missing, Prepared, aligned

Rival = Callable[[Array, int, int], Prepared]

# -- float32 ----------------------------------------------------------------------------------


def numpy_f32(weight: Array, copies: int, threads: int) -> Prepared:
    """NumPy's product of float32, which is that of OpenBLAS."""
    kept = [aligned(weight) for _ in range(copies)]
    return Prepared(
        "numpy f32", weight.nbytes, copies, lambda x: x, lambda i, x: x @ kept[i].T, weight
    )


def torch_f32(weight: Array, copies: int, threads: int) -> Prepared:
    """torch's product of float32."""
    torch = _torch(threads)
    kept = [torch.from_numpy(aligned(weight)) for _ in range(copies)]
    linear = torch.nn.functional.linear
    return Prepared(
        "torch f32",
        weight.nbytes,
        copies,
        torch.from_numpy,
        lambda i, x: linear(x, kept[i]),
        weight,
    )


# -- torch's packed weights --------------------------------------------------------------------


def torch_int4(weight: Array, copies: int, threads: int) -> Prepared:
    """torch's packed 4-bit weight, groups of 32 along k with a scale and a zero in bfloat16."""
    torch, aten = _torch(threads), _torch(threads).ops.aten
    _needs(aten, "_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu")
    n, k = weight.shape
    groups = torch.from_numpy(weight).reshape(n, k // 32, 32)
    scales = groups.abs().amax(-1).div(7).to(torch.bfloat16)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int32)
    values = codes.float() * scales.float()[..., None]
    packed = aten._convert_weight_to_int4pack_for_cpu((codes + 8).reshape(n, k), 2)
    pairs = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous()
    kept = [(packed.clone(), pairs.clone()) for _ in range(copies)]
    multiply = aten._weight_int4pack_mm_for_cpu
    return Prepared(
        "torch int4pack",
        packed.nbytes + pairs.nbytes,
        copies,
        lambda x: torch.from_numpy(x).to(torch.bfloat16),
        lambda i, x: multiply(x, kept[i][0], 32, kept[i][1]),
        values.reshape(n, k).numpy(),
        leave=_to_numpy,
        takes="bfloat16",
    )


def torch_int8(weight: Array, copies: int, threads: int) -> Prepared:
    """torch's 8-bit weight with a scale a row in bfloat16."""
    torch, aten = _torch(threads), _torch(threads).ops.aten
    _needs(aten, "_weight_int8pack_mm")
    codes, scales = _int8_rows(torch.from_numpy(weight))
    scales = scales.to(torch.bfloat16)
    kept = [(codes.clone(), scales.clone()) for _ in range(copies)]
    multiply = aten._weight_int8pack_mm
    return Prepared(
        "torch int8pack",
        codes.nbytes + scales.nbytes,
        copies,
        lambda x: torch.from_numpy(x).to(torch.bfloat16),
        lambda i, x: multiply(x, *kept[i]),
        (codes.float() * scales.float()[:, None]).numpy(),
        leave=_to_numpy,
        takes="bfloat16",
    )


def torch_dynamic(weight: Array, copies: int, threads: int) -> Prepared:
    """torch's dynamic product of 8-bit integers: activations are quantized per tensor (fbgemm)."""
    torch = _torch(threads)
    _needs(torch.ops.quantized, "linear_prepack", "linear_dynamic")
    codes, scales = _int8_rows(torch.from_numpy(weight))
    zeros = torch.zeros(len(codes), dtype=torch.int64)
    with warnings.catch_warnings():  # torch means to remove these tensors some day
        warnings.simplefilter("ignore")
        made = torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0)
        kept = [torch.ops.quantized.linear_prepack(made, None) for _ in range(copies)]
    multiply = torch.ops.quantized.linear_dynamic
    return Prepared(
        "torch dynamic int8",
        codes.nbytes + 4 * len(scales),
        copies,
        torch.from_numpy,
        lambda i, x: multiply(x, kept[i], True),
        made.dequantize().numpy(),
        takes="8 bits",
    )


def _int8_rows(weight: Any) -> tuple[Any, Any]:
    """Codes and scales of a weight that is quantized row by row."""
    torch = _torch(0)
    scales = weight.abs().amax(-1) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


def _torch(threads: int) -> Any:
    try:
        import torch
    except ImportError as error:
        raise Missing("pip install torch") from error
    if threads:
        torch.set_num_threads(threads)
    return torch


def _needs(namespace: Any, *names: str) -> None:
    for name in names:
        if not hasattr(namespace, name):
            raise Missing(f"this torch has no {name}")


def _to_numpy(x: Any) -> Array:
    found: Array = x.float().numpy()
    return found


# -- bitsandbytes and MLX ----------------------------------------------------------------------


def bitsandbytes_nf4(weight: Array, copies: int, threads: int) -> Prepared:
    """bitsandbytes' NF4 on the CPU, blocks of 64."""
    torch = _torch(threads)
    try:
        import bitsandbytes
    except ImportError as error:
        raise Missing("pip install --no-deps bitsandbytes") from error
    functional = bitsandbytes.functional
    made = [
        functional.quantize_4bit(torch.from_numpy(weight), blocksize=64, quant_type="nf4")
        for _ in range(copies)
    ]
    values = functional.dequantize_4bit(*made[0]).numpy().reshape(weight.shape)
    multiply = bitsandbytes.matmul_4bit
    return Prepared(
        "bitsandbytes nf4",
        made[0][0].nbytes + made[0][1].absmax.nbytes,
        copies,
        torch.from_numpy,
        lambda i, x: multiply(x, made[i][0].t(), quant_state=made[i][1]),
        values,
    )


def mlx(weight: Array, copies: int, threads: int, *, bits: int, group: int = 32) -> Prepared:
    """MLX on the CPU: integers in groups with a scale and a bias each, multiplied by one thread.

    Where more are asked for it is left out: once MLX has computed in a process, two threads of
    others there no longer run side by side (seen on Linux with two processors; why is not known).
    """
    if threads > 1:
        raise Missing("one thread only, and it keeps others' threads from running side by side")
    try:
        import mlx.core as mx
    except ImportError as error:
        raise Missing("pip install --no-deps mlx mlx-cpu") from error
    mx.set_default_device(mx.cpu)
    options = {"group_size": group, "bits": bits}
    parts = mx.quantize(mx.array(weight), **options)
    mx.eval(parts)
    copied = [[mx.array(np.array(part)) for part in parts] for _ in range(copies)]
    mx.eval(copied)

    def product(i: int, x: Any) -> Any:
        made = mx.quantized_matmul(x, *copied[i], transpose=True, **options)
        mx.eval(made)
        return made

    return Prepared(
        f"mlx {bits} bit",
        sum(part.nbytes for part in parts),
        copies,
        mx.array,
        product,
        np.array(mx.dequantize(*parts, **options)),
        leave=np.array,
    )


# -- all of them -------------------------------------------------------------------------------


def _ggml(kinds: Sequence[str]) -> dict[str, Rival]:
    """Each type of ggml and of its fork, as it is stored and repacked."""
    return {
        f"{library} {kind}{' repacked' * repacked}": _of_ggml(library, kind, repacked)
        for library in ("ggml", "ik")
        for kind in kinds
        for repacked in (False, True)
    }


def _of_ggml(library: str, kind: str, repacked: bool) -> Rival:
    def rival(weight: Array, copies: int, threads: int) -> Prepared:
        return rival_ggml.prepare(library, kind, weight, copies, threads, repacked=repacked)

    return rival


#: Name -> how its weights are prepared.
RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        "numpy f32": numpy_f32,
        "torch f32": torch_f32,
        "torch int4pack": torch_int4,
        "torch int8pack": torch_int8,
        "torch dynamic int8": torch_dynamic,
        "bitsandbytes nf4": bitsandbytes_nf4,
        **{f"mlx {bits} bit": partial(mlx, bits=bits) for bits in (2, 3, 4, 5, 6, 8)},
        **_ggml(tuple(rival_ggml.TYPES)),
    }
)
