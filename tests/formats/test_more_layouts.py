"""Layouts that no file of another tool shows here: made by hand, as their sources have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import polyquant as pq
from polyquant.errors import InvalidHeader, UnsupportedDtype

RNG = np.random.default_rng(0)
BF16 = ml_dtypes.bfloat16


def low_first(codes: Any) -> Any:
    """Two codes a byte along the last axis, the even one in the low nibble."""
    return (codes[..., ::2] & 15 | codes[..., 1::2] << 4).astype(np.uint8)


# -- torchao ----------------------------------------------------------------------------------


def int4_file(path: Path, kind: str = "Int4Tensor", *, zero: float = 1.0, **change: Any) -> Any:
    """A file with an Int4Tensor of 2 matrices of 6 x 64 in groups of 32; its values."""
    codes = RNG.integers(-8, 8, (2, 6, 64), np.int8)
    scales, zeros = (RNG.normal(size=(2, 2, 6)).astype(BF16) for _ in range(2))
    zeros = (zeros * BF16(zero)).astype(BF16)
    arrays = {
        "m._weight_qdata": low_first(codes).view(np.int8),
        "m._weight_scale": scales,
        "m._weight_zero_point": zeros,
        "m._weight_act_pre_scale": np.ones(64, BF16),
    }
    facts = {"block_size": [1, 1, 32], "shape": [2, 6, 64]} | change
    form = {"_type": kind, "_data": facts, "_tensor_data_names": ["qdata", "scale", "zero_point"]}
    metadata = {"tensor_names": json.dumps(["m.weight"]), "m.weight": json.dumps(form)}
    save_file(arrays, path, metadata)
    wide = (np.repeat(a.astype(np.float32).swapaxes(1, 2), 32, axis=-1) for a in (scales, zeros))
    scale, shift = wide
    return codes * scale + shift


def test_int4_of_torchao(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for zero, scheme in ((1.0, "u4[signed4]/32:bf16+bias:bf16"), (0.0, "q4f/32:bf16")):
        wanted = int4_file(path, zero=zero)
        with pq.open_checkpoint(path) as ck:
            assert ck.format == "torchao" and set(ck) == {"m.weight", "m._weight_act_pre_scale"}
            assert str(ck.info("m.weight").scheme) == scheme
            np.testing.assert_array_equal(ck["m.weight"].dequantize(), wanted)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"shape": [2, 6, 63]}, "its codes"),
        ({"shape": None}, "its codes"),
        ({"block_size": [1, 1, 16]}, "must be F32 or F16 or BF16 of 2x4x6"),
        ({"block_size": [1, 32]}, "block_size"),
    ],
)
def test_int4_of_torchao_that_lies(change: Any, match: str, tmp_path: Path) -> None:
    int4_file(tmp_path / "x.safetensors", **change)
    with pytest.raises(InvalidHeader, match=match):
        pq.open_checkpoint(tmp_path / "x.safetensors")


@pytest.mark.parametrize("kind", ["Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor"])
def test_layouts_of_single_devices(kind: str, tmp_path: Path) -> None:
    int4_file(tmp_path / "x.safetensors", kind)
    with pytest.raises(UnsupportedDtype, match=f"{kind}.*save it as an Int4Tensor"):
        pq.open_checkpoint(tmp_path / "x.safetensors")
