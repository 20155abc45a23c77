"""Weights for the tests of compiled kernels: every kind of scheme, codes and scales of all bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

import polyquant as pq
from polyquant import standard
from polyquant.qtensor import from_parts
from polyquant.values import QuantStore

#: Presets, every width, nesting, kind of offset, shape of block, store.
SCHEMES = (
    *("q4s", "q8s-32", "q8f-row", "q4s-tensor", "q2s-32", "q2s-row", "nf4", "nf4-double", "mxfp4"),
    *("nvfp4", "mxfp8", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "fp8-row", "fp8-128x128"),
    *("iq4_nl", "fp4", "ternary", "u8[dynamic8]/64:f32", "q1f/32:f16", "u1/32:f16", "q3s/32:f16"),
    *("q5s/32:f16", "q6s/16:f16", "q7f/64:f16", "u4/32:f16+bias:f16", "u4/128:f16-zero:u4"),
    *("u4/64:f32-zero:f16", "u2/16:f16+bias:f16", "u3/64:f16-zero:u3", "u5/32:f16+bias:f16"),
    *("u6/32:f32+bias:f32", "u8/32:f16-zero:u8", "u4/10:bf16+bias:bf16", "u5/48:f16-zero:u5"),
    *("q4s/5:f16", "q4s/7:f32", "q4s/24:f16", "q4s/48:f16", "q8s/1:f32", "q4s/8:ue8m0"),
    *("q3s/2x3:f16", "q5s/3x*:f32", "u4/*x8:f16-zero:bf16", "q4s/16:ue4m3", "q5f/9:ue8m0"),
    *("u4/16:(u6/8:f16)+bias:(q6s/8:f16)", "q6s/16:(q8s/16:f16)"),
    *("q4s@native", "q3s/32:f16@native", "u5/32:f16@native", "e2m3/32:ue8m0@native"),
    *("q4s/32:f16@packed_native", "q2s/64:bf16@packed_native"),
)
#: For what takes long: one of each technique.
FEW = (
    *("q4s", "nf4", "mxfp4", "q8s-32", "fp8-row", "q5s/32:f16", "u4/32:f16+bias:f16", "q3s/7:f16"),
    *("u4/16:(u6/8:f16)+bias:(q6s/8:f16)", "u8[dynamic8]/64:f32", "e2m3/32:ue8m0", "q4s/2x3:f32"),
)


def fits(text: str, shape: tuple[int, ...]) -> bool:
    try:
        pq.scheme(text).scale_shape(shape)
    except pq.errors.BlockRank:
        return False
    return True


def floats(shape: tuple[int, ...], seed: int = 0, kind: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(kind)


@cache
def weight(text: str, shape: tuple[int, ...]) -> pq.QTensor:
    """A quantized normal weight."""
    return quantized(floats(shape), text)


def quantized(x: np.ndarray[Any, Any], text: str) -> pq.QTensor:
    scheme = pq.scheme(text)
    holds_one_sign = scheme.value[0] == "u" and scheme.offset is None and scheme.table is None
    return pq.quantize(abs(x) if holds_one_sign else x, scheme)


@cache
def nasty_weight(text: str, shape: tuple[int, ...]) -> pq.QTensor:
    """Codes of all bits and scales of all finite bits: subnormal, zero, negative, huge."""
    q = weight(text, shape)
    rng = np.random.default_rng(len(text))
    parts = {}
    for name, part in q.parts().items():
        changed = np.array(part)
        if name == "data" and q.scheme.store is not QuantStore.NATIVE:
            changed = rng.integers(0, 256, part.shape, np.uint8)
        elif name == "scales" and part.size:
            changed = _all_bits(part, rng, q.scheme.scale)
        parts[name] = changed
    return from_parts(parts, q.scheme, q.shape, device="numpy")


def _all_bits(part: Any, rng: Any, kind: Any) -> Any:
    flat = np.array(part).reshape(-1)
    some = rng.integers(0, 256, (flat.size, flat.itemsize), np.uint8).view(flat.dtype).reshape(-1)
    if flat.dtype == np.uint8:
        highest = {"ue8m0": 254, "ue4m3": 126}.get(str(kind), 255)
        some = np.where(some > highest, 0, some).astype(np.uint8)
    else:
        with np.errstate(all="ignore"):
            some = np.where(np.isfinite(some), some, flat.dtype.type(1))
    picked = np.where(rng.random(flat.size) < 0.5, some, flat)
    picked[rng.random(flat.size) < 0.2] = 0
    return picked.astype(flat.dtype).reshape(part.shape)


def values(q: pq.QTensor, kind: Any = None) -> np.ndarray[Any, Any]:
    """What the definition says that a tensor holds."""
    with np.errstate(all="ignore"):
        found: np.ndarray[Any, Any] = standard.dequantize(q, kind)
    return found


ROUNDOFF = {np.dtype(np.float32): 2.0**-24, np.dtype(np.float16): 2.0**-11}


def check_product(y: Any, x: Any, q: pq.QTensor, where: str = "", part: float = 0.2) -> None:
    """``y = x @ q`` within a part of the contract's bound, and one rounding of the result."""
    a, b = np.asarray(x).astype(np.float64), values(q).astype(np.float64)
    wanted = np.matmul(a, b)
    y = np.asarray(y)
    assert y.shape == wanted.shape, where
    k = a.shape[-1]
    roundoff = ROUNDOFF.get(y.dtype, 2.0**-8)
    bound = 8 * part * np.sqrt(k) * 2.0**-24 * np.matmul(np.abs(a), np.abs(b))
    bound += roundoff * np.abs(wanted) + (2.0**-24 if y.dtype == np.float16 else 2.0**-126)
    error = np.abs(y.astype(np.float64) - wanted)
    assert (error <= bound).all(), f"{where}: {np.max(error / bound):.3g} times the bound"


BFLOAT16 = ml_dtypes.bfloat16
