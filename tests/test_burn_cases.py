"""Numeric cases of Burn, whose semantics polyquant follows: numbers only, from its public tests.

The full set is read where it lies beside the repository; a few of each operation, in
golden/burn_cases.json, always run. What has no counterpart here, and what differs on purpose, is
listed with its reason in burn_cases.py, and those lists are checked too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import burn_cases
from burn_cases import NOT_OURS, OPS, OTHERWISE, is_ours, must_raise
from burn_ops import WITH_GRADIENTS
from burn_storage import TIES, WITHOUT_ARRAYS
from burn_terms import Case
from devices import DEVICES
from polyquant.errors import PolyquantError

SHARED = Path(__file__).parents[2] / "shared" / "cases" / "burn"
GOLDEN: list[Case] = json.loads(
    (Path(__file__).parent / "golden" / "burn_cases.json").read_text("utf-8")
)
CASES = burn_cases.load(SHARED) if SHARED.is_dir() else []

needs_shared = pytest.mark.skipif(
    not CASES, reason="the full set of cases does not lie beside the repository"
)
#: Where cases run: NumPy and torch. That all libraries agree to the bit is another test's business,
#: so jax, which compiles anew for every shape, runs a few.
PLACES = tuple(d for d in DEVICES if d in ("numpy", "torch:cpu"))
JAX_TOO = frozenset(
    {
        "add-broadcast",
        "grad-through-mixed-matmul",
        "gather-2d-d0",
        "packed-slice-with-step-cols",
        "e2m1-all-codes-two-level",
        "layout-two-level-ue4m3",
        "pack-i8-5-padded",
        "packed-block8-Q4S",
        "roundup-tight-UE4M3",
    }
)


def _places(case: Case, *, jax_too: bool) -> tuple[str, ...]:
    if case["op"] in WITHOUT_ARRAYS:
        return PLACES[:1]
    also = [d for d in DEVICES if d.startswith("jax") and jax_too and case["id"] in JAX_TOO]
    places = (*PLACES, *also)
    return tuple(d for d in places if d != "numpy" or case["op"] not in WITH_GRADIENTS)


def _runs(cases: list[Case], *, jax_too: bool = True) -> list[Any]:
    """A case a place; once where no array is involved."""
    return [
        pytest.param(case, place, id=f"{case['id']}-{place}")
        for case in cases
        if is_ours(case)
        for place in _places(case, jax_too=jax_too)
    ]


def _check(case: Case, place: str) -> None:
    if must_raise(case):
        with pytest.raises(PolyquantError):
            burn_cases.run(case, place)
    else:
        burn_cases.run(case, place)


@pytest.mark.parametrize(("case", "place"), _runs(GOLDEN, jax_too=not CASES))
def test_golden_case(case: Case, place: str) -> None:
    _check(case, place)


@needs_shared
@pytest.mark.parametrize(("case", "place"), _runs(CASES))
def test_case(case: Case, place: str) -> None:
    _check(case, place)


@needs_shared
def test_every_case_is_run_or_listed() -> None:
    ids = [case["id"] for case in CASES]
    assert len(ids) == len(set(ids))
    assert {case["op"] for case in CASES if is_ours(case)} == set(OPS)
    listed = [case for case in CASES if not is_ours(case)]
    run = {param.values[0]["id"] for param in _runs(CASES)}
    assert len(run) + len(listed) == len(CASES)


@needs_shared
def test_lists_have_no_stale_entries() -> None:
    known = {case["id"]: case for case in CASES}
    ops = {case["op"] for case in CASES}
    assert set(NOT_OURS) <= set(known) | ops
    for name, (changes, reason) in OTHERWISE.items():
        assert reason
        assert any(known[name].get(key) != value for key, value in changes.items())
    assert set(OPS) >= WITHOUT_ARRAYS
    assert set(known) >= JAX_TOO
    assert TIES & set(known)


@needs_shared
def test_golden_cases_are_those_of_the_full_set() -> None:
    known = {case["id"]: case for case in CASES}
    for case in GOLDEN:
        assert is_ours(case)
        assert case == known[case["id"]]
