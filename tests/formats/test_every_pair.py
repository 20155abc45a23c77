"""Files of every tool converted to every format: read back as that, with the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from peers import FOLDERS, decoded, fixture, names
from polyquant.errors import NonFiniteInput, NotExact
from polyquant.models import resumable
from polyquant.models.conversion import plan
from polyquant.models.targets import OWN, target_of

#: What weights become where a format does not hold them as they are.
TARGETS = {
    "safetensors": "x.safetensors",
    "mlx:8bit": "x.safetensors",
    "gptq:8bit": "x.safetensors",
    "bitsandbytes:nf4-double": "x.safetensors",
    "compressed-tensors:w8a16": "x.safetensors",
    "gguf:Q8_0": "x.gguf",
    "burnpack:q8s": "x.bpk",
}
#: Largest relative error of a weight that is quantized once more.
BOUND = 0.15


def largest(folder: str) -> Any:
    found = names(folder)
    if not isinstance(found[0], str):
        return pytest.param("", marks=pytest.mark.skip(reason="no files of other tools"))
    return max(found, key=lambda name: fixture(name).path.stat().st_size)


@pytest.mark.parametrize("name", [largest(folder) for folder in FOLDERS])
@pytest.mark.parametrize("to", TARGETS)
def test_every_pair(to: str, name: str, tmp_path: Path) -> None:
    made, target, out = fixture(name), target_of(to), tmp_path / TARGETS[to]
    config = None if made.format == "gguf" and "bitnet" not in name else made.config
    source = resumable.Source(made.path, made.format if "axis_last" in name else None, config)
    with source.open() as ck:
        try:
            steps = plan(ck, target, requantize=not target.is_own)
            done = resumable.run(source, target, out, steps)
        except (NotExact, NonFiniteInput) as error:
            assert not target.is_own and not out.exists(), error
            return
        exact = {item.conversion.name for item in done if item.quality is None}
        with pq.open_checkpoint(out) as again:
            assert again.format == ("polyquant" if target.format in OWN else target.format)
            assert set(again) == set(ck)
            for tensor in ck:
                was, now = decoded(ck[tensor]), decoded(again[tensor])
                if tensor in exact:
                    np.testing.assert_array_equal(now, was)
                else:
                    assert np.linalg.norm(now - was) <= BOUND * np.linalg.norm(was)
