"""Which devices the tests run on, the option --require, and the Hypothesis profiles.

A test that takes ``device`` runs once for every usable device; ``other_device`` leaves out NumPy.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

import interpreted  # noqa: F401  (before anything imports Triton)
from devices import DEVICES, MISSING
from polyquant.backends.native.compiled import missing as uncompiled

_QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
settings.register_profile(
    "ci", max_examples=300, deadline=None, derandomize=True, suppress_health_check=_QUIET
)
settings.register_profile(
    "nightly", max_examples=5000, deadline=None, print_blob=True, suppress_health_check=_QUIET
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        default="",
        metavar="BACKENDS",
        help="comma-separated backends that must be usable, e.g. numpy,native,torch,jax",
    )


def pytest_configure(config: pytest.Config) -> None:
    wanted = [name for name in config.getoption("--require").split(",") if name]
    usable = {device.partition(":")[0] for device in DEVICES}
    reasons = dict(MISSING)
    if (why := uncompiled()) is None:
        usable.add("native")
    else:
        reasons["native"] = why
    for name in wanted:
        if name not in usable:
            reason = reasons.get(name, "there is no such backend")
            raise pytest.UsageError(f"--require {name}: {reason}")


def pytest_report_header() -> list[str]:
    missing = [f"polyquant backend {name}: {reason}" for name, reason in MISSING.items()]
    return [f"polyquant devices: {', '.join(DEVICES)}", *missing]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", DEVICES)
    if "other_device" in metafunc.fixturenames:
        metafunc.parametrize("other_device", [d for d in DEVICES if d != "numpy"])
