"""Files that other tools made, with the values that those tools decode: tests compare with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import safe_open

import polyquant as pq

FIXTURES = Path(__file__).parents[2] / "shared" / "fixtures"
Host = np.ndarray[Any, Any]


class Fixture(NamedTuple):
    """One file of another tool: its path, its config, and what its tool says of it."""

    name: str
    path: Path
    config: Any
    meta: dict[str, Any]

    def expected(self) -> dict[str, Host]:
        """Name -> the values that the other tool decodes (float32)."""
        with safe_open(self.path.parent / "expected.safetensors", framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def fixture(name: str) -> Fixture:
    folder = FIXTURES / name
    meta = json.loads((folder / "meta.json").read_text())
    found = meta.get("config_json") or {"quantization_config": meta.get("quantization_config")}
    return Fixture(name, folder / meta["packed_file"], found, meta)


def names(*formats: str) -> list[Any]:
    """The fixtures of these folders as parameters of a test; one skip where there are none."""
    found = sorted(p.parent for f in formats for p in FIXTURES.glob(f"{f}/*/meta.json"))
    if not found:
        reason = "the files of other tools are not on this machine"
        return [pytest.param("", marks=pytest.mark.skip(reason=reason))]
    return [folder.relative_to(FIXTURES).as_posix() for folder in found]


def decoded(tensor: Any) -> Host:
    """Values as float32."""
    host = tensor.dequantize() if isinstance(tensor, pq.QTensor) else tensor
    return np.asarray(host).astype(np.float32)


def assert_same(tensor: Any, wanted: Host) -> None:
    """Bit-equal but for the sign of zero; subnormal numbers are zero here by contract."""
    if isinstance(tensor, pq.QTensor):
        wanted = np.where(np.abs(wanted) < np.finfo(np.float32).tiny, 0.0, wanted)
    np.testing.assert_array_equal(decoded(tensor), wanted)
