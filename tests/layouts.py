"""Layouts of other tools of which no file is at hand: made by hand, as their sources have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

RNG = np.random.default_rng(0)
BF16 = ml_dtypes.bfloat16


def low_first(codes: Any) -> Any:
    """Two codes a byte along the last axis, the even one in the low nibble."""
    return (codes[..., ::2] & 15 | codes[..., 1::2] << 4).astype(np.uint8)


def int4_file(path: Path, kind: str = "Int4Tensor", *, zero: float = 1.0, **change: Any) -> Any:
    """A file with an Int4Tensor of 2 matrices of 6 x 64 in groups of 32; its values."""
    codes = RNG.integers(-8, 8, (2, 6, 64), np.int8)
    scales, zeros = (RNG.normal(size=(2, 2, 6)).astype(BF16) for _ in range(2))
    zeros = zeros if zero else np.zeros_like(zeros)
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


SPARSE = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "sparsity_config": {"format": "sparse-bitmask"},
    "config_groups": {
        "group_0": {
            "targets": ["b"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        }
    },
}


def sparse_arrays(base: str, dense: Any) -> dict[str, Any]:
    """As compressed-tensors' sparse compressors, up to 0.12, store a matrix."""
    mask = dense != 0
    return {
        f"{base}.shape": np.asarray(dense.shape, np.int64),
        f"{base}.compressed": dense[mask],
        f"{base}.bitmask": np.packbits(mask, axis=1, bitorder="little"),
        f"{base}.row_offsets": np.cumsum(mask.sum(axis=1)) - mask.sum(axis=1),
    }


def as_torch(array: Any) -> Any:
    """A tensor of an array, float8 too."""
    import torch

    if array.dtype != ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(np.ascontiguousarray(array))
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).view(torch.float8_e4m3fn)


def save_all(arrays: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file as save_torch

    save_torch({name: as_torch(array) for name, array in arrays.items()}, path)


def save_sparse(path: Path, **change: Any) -> tuple[Any, Any, Any]:
    dense = (RNG.normal(size=(6, 36)) * (RNG.random((6, 36)) < 0.5)).astype(np.float32)
    codes, scales = dense.astype(ml_dtypes.float8_e4m3fn), RNG.random((6, 1), np.float32)
    made = sparse_arrays("a", dense) | sparse_arrays("b", codes) | {"b.weight_scale": scales}
    save_all(made | change, path)
    return dense, codes, scales


def save_experts(path: Path, **change: Any) -> dict[str, Any]:
    """Experts as ModelOpt 0.47 stores those of Llama 4, ``[experts, in, out]``; their values."""
    codes = RNG.integers(0, 16, (3, 24, 32), np.uint8)  # [experts, out, in]
    scales = (RNG.random((3, 24, 2)) + 0.5).astype(ml_dtypes.float8_e4m3fn)
    wide = RNG.normal(size=(3, 32, 24)).astype(ml_dtypes.float8_e4m3fn)
    made = {
        "m.experts.up": low_first(codes).swapaxes(1, 2),
        "m.experts.up_weight_scale": scales.swapaxes(1, 2),
        "m.experts.up_weight_scale_2": np.asarray(0.3, np.float32),
        "m.experts.up_input_scale": np.asarray(1, np.float32),
        "m.q.weight": wide[0],
        "m.q.weight_scale": np.asarray(0.7, np.float32),
    }
    save_all(made | change, path)
    values = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([values, -values])[codes]
    scale = np.repeat(scales.astype(np.float32) * np.float32(0.3), 16, axis=2)
    return {
        "m.experts.up": (values * scale).swapaxes(1, 2),
        "m.q.weight": wide[0].astype(np.float32) * np.float32(0.7),
    }


MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "m.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "m.q": {"quant_algo": "FP8"},
    },
}
