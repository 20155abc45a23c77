"""What the tables of faults are made of: where a case runs, and what it does there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import polyquant as pq
from devices import DEVICES, put

F32 = np.float32
X = np.linspace(-1, 1, 128, dtype=F32).reshape(4, 32)
TWO_LEVELS = "q4s/16:ue4m3/tensor:f32"

#: Where a case runs: wherever arrays are, or where what it needs is.
EVERYWHERE = ("numpy", "torch:cpu", "jax:cpu:0")
HOST, TORCH, JAX = (EVERYWHERE[i : i + 1] for i in range(3))


class Here(NamedTuple):
    """A device, a folder to write to, and tensors made from ``X`` on that device."""

    device: str
    folder: Path

    @property
    def elsewhere(self) -> str:
        """A device of another library: the first that is usable."""
        others = [place for place in EVERYWHERE if place in DEVICES and place != self.device]
        return others[0] if others else pytest.skip("no second library is installed")

    @property
    def x(self) -> Any:
        return put(X, self.device)

    @property
    def tracked(self) -> Any:
        """``x``, tracked by torch's autograd."""
        return self.x.requires_grad_()

    @property
    def q(self) -> pq.QTensor:
        return self.quantized("q4s/16:f16")

    def quantized(self, scheme: str) -> pq.QTensor:
        return pq.quantize(self.x, scheme)

    def given(self, scales: Any, scheme: str = TWO_LEVELS) -> pq.QTensor:
        """``x`` quantized with scales of the caller's own."""
        return pq.quantize(self.x, scheme, scales=scales)

    def rebuilt(self, **changes: Any) -> pq.QTensor:
        """A tensor built from the parts of one of two levels, some of them replaced."""
        q = self.quantized(TWO_LEVELS)
        parts = {"data": q.data, "scales": q.scales, "tensor_scale": q.tensor_scale} | changes
        return pq.QTensor(q.scheme, q.shape, device=q.device, **parts)

    def ones(self, *shape: int) -> Any:
        return put(np.ones(shape, F32), self.device)

    def load(self, content: bytes, name: str = "a.safetensors") -> Any:
        """What reading a file of that content gives."""
        path = self.folder / name
        path.write_bytes(content)
        return pq.load(path)


class Raises(NamedTuple):
    """A call that meets the fault, and what the error's text says.

    ``mend`` is empty where what was wanted says what to do.
    """

    slug: str
    meet: Callable[[Here], Any]
    wanted: str
    came: str
    mend: str = ""
    places: tuple[str, ...] = EVERYWHERE


class Works(NamedTuple):
    """A check that what is a fault elsewhere gives the right result here."""

    check: Callable[[Here], None]
    places: tuple[str, ...] = HOST + TORCH


#: The cases of each fault, by its name in scripts/burn_faults.toml.
Table = dict[str, tuple[Raises | Works, ...]]
