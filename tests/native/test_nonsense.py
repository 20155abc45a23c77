"""The compiled module, called directly with nonsense, raises and never crashes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from native_cases import weight
from polyquant.backends.native.compiled import compiled
from polyquant.backends.native.weights import matrix_of

PROGRAM = Path(__file__).parent.parent / "native_nonsense.py"
CALLS = 1000


@pytest.mark.parametrize("seed", range(3))
def test_nonsense_is_refused(seed: int) -> None:
    """In a process of its own, whose end says whether it crashed."""
    command = [sys.executable, str(PROGRAM), str(seed), str(CALLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    refused = int(done.stdout.split()[2])
    assert CALLS / 2 < refused < CALLS, "nearly all is refused, or nothing is"


def test_what_does_not_fit_is_named() -> None:
    q = weight("q4s", (8, 64))
    x, out = np.ones((3, 64), np.float32), np.empty((3, 8), np.float32)
    matmul = matrix_of(q).matmul
    for given, text in (
        ((x[:, 1:], out, True, 0, 8, 1), "x does not fit"),
        ((x, out[:, 1:], True, 0, 8, 1), "output does not fit"),
        ((x, out, True, 1, 8, 1), "no such lines"),
        ((x, out, True, -1, 8, 1), "no such lines"),
        ((x, out, True, 2**62, 2**62, 1), "no such lines"),
        ((x.astype(np.float64), out, True, 0, 8, 1), "float32, float16 or bfloat16"),
        ((x, np.empty((8, 3), np.float32).T, True, 0, 8, 1), "rows must be contiguous"),
        ((x[0], out, True, 0, 8, 1), "two axes"),
    ):
        with pytest.raises(ValueError, match=text):
            matmul(*given)
    out.flags.writeable = False
    with pytest.raises(TypeError):
        matmul(x, out, True, 0, 8, 1)
    for count in (0, -1, 1025):
        with pytest.raises(ValueError, match="1 to 1024"):
            compiled().set_num_threads(count)
    with pytest.raises(ValueError, match="no instruction set"):
        compiled().set_target("sse9")
