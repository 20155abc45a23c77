"""Tests of the compiled kernels run once for every instruction set that the processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polyquant.backends.native.compiled import compiled, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = missing()
    for item in items:
        if why is not None and "tests/native/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        names = ["none"] if missing() else compiled().targets()
        metafunc.parametrize("target", names, indirect=True)


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set in use while the test runs."""
    before = compiled().target()
    compiled().set_target(request.param)
    yield request.param
    compiled().set_target(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = compiled().num_threads()
    yield
    compiled().set_num_threads(before)
