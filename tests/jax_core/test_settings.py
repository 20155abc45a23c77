"""JAX's own settings: 64 bits, no rank promotion, NaNs that raise. Each from the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed")

SCRIPT = Path(__file__).with_name("under_settings.py")


@pytest.mark.parametrize(
    ("flags", "has_f64"),
    [
        (("jax_enable_x64=True",), True),
        (("jax_numpy_rank_promotion=raise", "jax_debug_nans=True", "jax_enable_x64=False"), False),
    ],
)
def test_all_of_it_works_under(flags: tuple[str, ...], has_f64: bool) -> None:
    command = [sys.executable, "-W", "error", str(SCRIPT), *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.endswith(f"schemes, x64 {has_f64}\n")
