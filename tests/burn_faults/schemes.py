"""Faults of schemes, of quantizing and of lookup tables."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant as pq
from burn_faults.terms import F32, HOST, JAX, TORCH, TWO_LEVELS, Here, Raises, Table, Works, X
from devices import assert_same_bits, assert_same_parts, host, put
from polyquant.dispatch import choose
from polyquant.kernel import Problem
from polyquant.values import scale_grid


def block_of_many_axes(here: Here) -> None:
    x = put(np.linspace(-1, 1, 3**6, dtype=F32).reshape((3,) * 6), here.device)
    q = pq.quantize(x, pq.QuantScheme("q8s", block=(2,) * 6))
    assert tuple(q.scales.shape) == (2,) * 6
    assert np.abs(host(q.dequantize()) - host(x)).max() < 0.005


def blocks_of_a_tensor(here: Here) -> None:
    scheme = pq.scheme("q8s/tensor:f32")
    assert scheme.scale_shape((4, 32)) == (1, 1)
    assert scheme.block_extents((4, 32)) == (4, 32)
    assert tuple(pq.quantize(here.x, scheme).scales.shape) == (1, 1)


def partial_blocks(here: Here) -> None:
    """Blocks of 24 on lines of 32: each line as two tensors of 24 and of 8 values."""
    q = here.quantized("q4s/24:f16")
    assert tuple(q.scales.shape) == (4, 2)
    parts = [pq.quantize(here.x[:, run], "q4s/row:f16") for run in (slice(24), slice(24, 32))]
    wanted = np.concatenate([host(part.dequantize()) for part in parts], axis=1)
    assert_same_bits(host(q.dequantize()), wanted)


def no_tensor_scale(here: Here) -> None:
    ideal = np.linspace(0.1, 0.2, 8, dtype=F32).reshape(4, 2)
    q = here.given(put(ideal, here.device))
    assert host(q.tensor_scale) == pytest.approx(0.2 / 448, rel=1e-6)
    stored = scale_grid(pq.ScaleDtype.UE4M3)[host(q.scales)] * host(q.tensor_scale)
    assert (stored >= ideal).all()
    assert (stored <= ideal * 1.125).all()  # one step of ue4m3, an eighth


def untracked_tensor_scale(here: Here) -> None:
    scales = (here.ones(4, 2), here.ones())
    q = pq.quantize(here.tracked, TWO_LEVELS, scales=scales)
    assert_same_parts(q, pq.quantize(here.x, TWO_LEVELS, scales=scales))
    assert not q.dequantize().requires_grad


def wide_scales_of_ones_own(here: Here) -> None:
    q = here.given((here.ones(4, 2), here.ones()), "q4s/16:f32/tensor:f32")
    assert_same_bits(host(q.dequantize()), np.round(X) + F32(0))


def schemes_of_a_backend(here: Here) -> None:
    for value in ("q8f", "q4s", "q2f", "q2s", "e4m3", "e2m1", "u4[nf4]", "u3[custom]"):
        for store in pq.QuantStore:
            scheme = f"{value}/16:f16@{store}"
            table = np.linspace(-1, 1, 8) if "custom" in value else None
            q = pq.quantize(here.x, scheme, table=table)
            wanted = pq.quantize(X, scheme, table=table)
            assert q.to_data() == wanted.to_data()


SCHEMES: Table = {
    "two-levels-of-wide-scales": (
        Raises(
            "invalid-scheme",
            lambda here: pq.QuantScheme("q8s", block=16, scale="ue8m0", tensor_scale="f32"),
            "tensor scale has nothing to do",
            "q8s/16:ue8m0/tensor:f32",
            "nearest valid scheme is 'q8s/16:ue8m0'",
            HOST,
        ),
        *(
            Raises(
                "calibration-refused",
                lambda here, kind=kind: here.quantized(f"q8s/16:{kind}/tensor:f32"),
                "there is no rule",
                f"q8s/16:{kind}/tensor:f32",
                "Pass scales=",
            )
            for kind in ("f32", "bf16")
        ),
        Works(wide_scales_of_ones_own),
    ),
    "tensor-scale-type": (
        Raises(
            "invalid-scheme",
            lambda here: pq.QuantScheme("q8s", block=16, scale="ue4m3", tensor_scale="f16"),
            "always f32",
            "not f16",
            "nearest valid scheme is 'q8s/16:ue4m3/tensor:f32'",
            HOST,
        ),
    ),
    "lookup-of-minifloats": (
        Raises(
            "invalid-scheme",
            lambda here: pq.QuantScheme("e2m1[nf4]"),
            "a lookup code is an index",
            "e2m1[nf4]",
            "nearest valid scheme is 'u4[nf4]",
            HOST,
        ),
    ),
    "block-of-many-axes": (Works(block_of_many_axes),),
    "blocks-of-a-tensor": (Works(blocks_of_a_tensor),),
    "partial-blocks": (Works(partial_blocks),),
    "not-float": (
        Raises(
            "not-float",
            lambda here: pq.quantize(put(np.ones((4, 32), np.int32), here.device), "q8s"),
            "must be a floating-point array",
            "what came is int32",
            "Convert it first",
        ),
    ),
    "nan": (
        Raises(
            "non-finite-input",
            lambda here: pq.quantize(put(np.where(X > 0, X, F32(np.nan)), here.device), "q8s"),
            "Mend them",
            "64 values that are NaN or infinite",
            "nonfinite='saturate'",
        ),
        Raises(
            "invalid-scale",
            lambda here: here.given(put(np.full((4, 2), np.nan, F32), here.device)),
            "finite and not negative",
            "(0, 0): nan",
        ),
    ),
    "negative-scale": (
        Raises(
            "invalid-scale",
            lambda here: here.given(-here.ones(4, 2)),
            "finite and not negative",
            "at 8 of the indices they are not, the first of them (0, 0): -1.0",
        ),
    ),
    "absmean-of-two-levels": (
        Raises(
            "calibration-refused",
            lambda here: pq.quantize(here.x, "nvfp4", calibration="absmean"),
            "has no two-level form",
            "e2m1/16:ue4m3/tensor:f32",
            "Use minmax",
        ),
    ),
    "tensor-scale-of-one-level": (
        Raises(
            "scale-argument",
            lambda here: here.given((here.ones(4, 2), here.ones()), "q4s/16:f16"),
            "only a scheme of two levels takes a pair",
            "Scheme q4s/16:f16 cannot take the scales",
        ),
    ),
    "no-tensor-scale": (Works(no_tensor_scale),),
    "untracked-tensor-scale": (Works(untracked_tensor_scale, TORCH),),
    "tensor-scale-of-many": (
        Raises(
            "scale-shape",
            lambda here: here.given((here.ones(4, 2), here.ones(2))),
            "form a grid of shape ()",
            "the shape that came is (2,)",
        ),
    ),
    "tensor-scale-dtype": (
        Raises(
            "not-float",
            lambda here: here.given((here.ones(4, 2), put(np.int32(1), here.device))),
            "the tensor scale must be a floating-point array",
            "what came is int32",
            "Convert it first",
        ),
        Works(
            lambda here: assert_same_parts(
                here.given((here.ones(4, 2), put(np.float16(0.25), here.device))),
                here.given((here.ones(4, 2), put(np.float32(0.25), here.device))),
            )
        ),
    ),
    "quantized-scales": (
        Raises(
            "already-quantized",
            lambda here: here.given(pq.quantize(here.ones(4, 2), "q8s/2:f16")),
            "scales must be a float array",
            "quantized as q8s/2:f16",
            ".dequantize() first",
        ),
    ),
    "number-of-scales": (
        Raises(
            "scale-shape",
            lambda here: here.given(here.ones(4, 3)),
            "a grid of shape (4, 2)",
            "the shape that came is (4, 3)",
        ),
        Raises(
            "invalid-tensor",
            lambda here: here.rebuilt(scales=here.quantized("q4s/8:ue4m3").scales),
            "must be of shape (4, 2)",
            "what came is (4, 4)",
        ),
    ),
    "schemes-of-a-backend": (Works(schemes_of_a_backend),),
    "kernel-fails": (
        Raises(
            "kernel-refused",
            lambda here: pq.quantize(here.x, "q8s", kernel="triton.quantize"),
            "known: ",
            "kernel='triton.quantize'",
            "never falls back",
        ),
        Raises(
            "no-kernel",
            lambda here: choose("jax", Problem("quantize", "tpu", "float32")),
            "No kernel can run",
            "quantize",
            "",
            JAX,
        ),
    ),
    "no-table": (
        Raises(
            "table-missing",
            lambda here: here.quantized("u4[custom]/16:f16"),
            "with 16 numbers",
            "none came",
            "Pass table=",
        ),
    ),
    "table-of-integers": (
        Raises(
            "table-superfluous",
            lambda here: pq.quantize(here.x, "q4s/16:f16", table=here.ones(16)),
            "its mode is symmetric, not lookup",
            "q4s/16:f16 takes no table=",
            "Leave it out",
        ),
    ),
    "table-length": (
        Raises(
            "table-length",
            lambda here: pq.quantize(here.x, "u4[custom]/16:f16", table=here.ones(15)),
            "4-bit codes has 16 entries",
            "came is (15,)",
        ),
    ),
}
