"""A small saved checkpoint, and what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import polyquant as pq


def values(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def tensors() -> dict[str, Any]:
    """Two levels, a nested scheme in another order of axes, and a plain array."""
    return {
        "two": pq.quantize(values(2, 17), "nvfp4"),
        "nested": pq.quantize(values(3, 20), "u4[nf4]/8:(u8[dynamic8u]/4:f32)").T,
        "plain": values(3).astype(ml_dtypes.bfloat16),
    }


@pytest.fixture
def saved(tmp_path: Path, tensors: dict[str, Any]) -> Path:
    path = tmp_path / "small.safetensors"
    pq.save(path, tensors, metadata={"author": "a test"})
    return path


def bits(tensor: Any) -> Any:
    """What must be equal of two tensors of any library: bytes, shape, dtype or scheme, axes."""
    if isinstance(tensor, pq.QTensor):
        return tensor.to_data()
    from polyquant.files.host import to_host

    host = to_host(tensor)
    return host.dtype.newbyteorder("="), host.shape, host.tobytes()


@pytest.fixture(name="bits")
def bits_fixture() -> Any:
    return bits
