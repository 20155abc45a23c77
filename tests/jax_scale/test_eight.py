"""Runs the tests of many devices, eight_*.py, in processes that have eight virtual ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed")

HERE = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(HERE.glob("eight_*.py")), ids=lambda path: path.stem)
def test_on_eight_devices(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr
