"""Products of float rows with a quantized weight on tensor cores, by CUDA C++ on JAX's arrays.

``backends/nvidia/planning.py`` says what runs, ``launch.py`` how XLA launches it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polyquant import standard
from polyquant.backends.jax import accelerators, batches
from polyquant.backends.jax.cuda.launch import gpu_here, launch
from polyquant.backends.nvidia import planning
from polyquant.backends.nvidia.planning import Grids, Lines, Shapes, step_of
from polyquant.backends.nvidia.schemes import most_rows, type_number
from polyquant.qtensor import QTensor
from polyquant.values import QuantMode

Array = Any


def matmul(x: Array, weight: QTensor, kind: Any) -> Array:
    """``x @ weight``: see ``batches.matmul``."""
    made: Array = batches.matmul(_by_rows, x, weight, kind)
    return made


def _by_rows(x: Array, weight: QTensor, kind: Any) -> Array:
    """More rows than a kernel is for, which vmap can bring, or none, are XLA's."""
    by_n = weight.axes[-1] == weight.ndim - 1
    most = most_rows(str(x.dtype), weight.scheme, by_n=by_n)
    run = _in_programs if x.size and x.shape[1] <= most else _by_xla
    return run(x, weight, kind)


def _by_xla(x: Array, weight: QTensor, kind: Any) -> Array:
    run = standard.matmul if planning.PLANES[str(x.dtype)] > 1 else accelerators.narrow
    return batches.as_batch(run, x, weight, kind)


def _by_call(x: Array, weight: QTensor, kind: Any) -> Array:
    """As many rows at a time as planes of float32 leave together."""
    planes, m = planning.PLANES[str(x.dtype)], x.shape[1]
    step = planning.TOGETHER // planes if planes > 1 else m
    parts = [_launched(x[:, i : i + step], weight, kind) for i in range(0, m, step)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _launched(x: Array, weight: QTensor, kind: Any) -> Array:
    batch, m, k = x.shape
    scheme, n, by_n = weight.scheme, weight.shape[-1], weight.axes[-1] == weight.ndim - 1
    entering, gpu = str(x.dtype), gpu_here()
    splits = scheme.mode is QuantMode.LOOKUP and entering == "float32"
    out = str(kind) if str(kind) in planning.OUT and not splits else "float32"
    tiles = planning.tiles_for(scheme, (m, n, k), entering, gpu, by_n=by_n)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -k % 8)))
    if entering == "float32":
        x = split_planes(x)
    arrays = {"x": x, "codes": weight.data}
    lines = [Lines(0, weight.data.shape[-1], math.prod(weight.data.shape[-2:]) * (batch > 1))]
    stored: dict[str, tuple[Any, Any]] = {"scales": (weight.scales, scheme.scale)}
    if scheme.offset is not None:
        stored["offsets"] = weight.offsets, scheme.offset.dtype
    for name, (part, dtype) in stored.items():
        arrays[name] = standard.dequantize(part, None) if isinstance(part, QTensor) else part
        lines.append(planning.lines_of(type_number(dtype), arrays[name].shape, batch))
    if weight.tensor_scale is not None:
        arrays["tensor_scale"] = weight.tensor_scale
    if scheme.mode is QuantMode.LOOKUP:
        arrays["table"] = weight.table
    if scheme.offset is None:
        lines.append(Lines(0, 0, 0))
    codes, scales, offsets = (step_of(each.stride | each.batch) for each in lines)
    steps = (codes, scales, 1 if scheme.offset is None else offsets)
    shapes = Shapes(weight.stored_shape, by_n, batch, x.shape[1])
    grids = Grids(lines[1].kind, lines[2].kind, steps)
    plan = planning.plan(scheme, shapes, (entering, out), grids, tiles, gpu)
    argument = planning.argument_of(plan, shapes, (0,) * 5, lines)
    result = jax.ShapeDtypeStruct((batch, m, n), out)
    if not splits:
        return launch(plan, argument, arrays, x.shape, result).astype(kind)
    # Entries of float32 enter as three of bf16 that add up to them, a product for each.
    tables = split_planes(arrays["table"][None, None])[0].astype(jnp.float32)
    parts = [launch(plan, argument, arrays | {"table": t}, x.shape, result) for t in tables]
    return (parts[2] + parts[1] + parts[0]).astype(kind)


def split_planes(x: Array) -> Array:
    """Lines (batch, m, k) of float32 as bf16 (batch, 3 m, k): three that add up to each.

    The upper 8 bits of the significand, the next 8, and the rest: exact where none is subnormal.
    """
    rest, planes, is_finite = x, [], jnp.isfinite(x)
    for plane in range(3):
        bits = lax.bitcast_convert_type(rest, jnp.uint32)
        upper = bits & np.uint32(0xFFFF0000) if plane < 2 else bits
        part = lax.bitcast_convert_type(upper, jnp.float32)
        if plane == 0:
            part = jnp.where(jnp.isnan(x), jnp.nan, part)  # one, whatever its payload
        planes.append(part.astype(jnp.bfloat16))
        rest = jnp.where(is_finite, rest - part, 0.0)
    batch, m, k = x.shape
    return jnp.stack(planes, axis=2).reshape(batch, 3 * m, k)


_in_programs = batches.in_programs("polyquant_nvrtc_product", "cuda", _by_call, _by_xla)
