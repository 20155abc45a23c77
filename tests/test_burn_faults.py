"""The faults of Burn: each has an error here, or works, or cannot arise; none is left out.

The catalogue of faults is read where it lies beside the repository.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from burn_faults import ANSWERS, EVERYWHERE, Here, Raises, Works
from devices import DEVICES
from polyquant.errors import CATALOGUE, PolyquantError

ROOT = Path(__file__).parents[1]
FAULTS: dict[str, dict[str, Any]] = tomllib.loads(
    (ROOT / "scripts" / "burn_faults.toml").read_text("utf-8")
)
SHARED = ROOT.parent / "shared" / "cases" / "burn" / "error_catalogue.json"
PLACES = tuple(place for place in EVERYWHERE if place in DEVICES)


def _cases(kind: type[Raises] | type[Works]) -> list[Any]:
    return [
        pytest.param(case, place, id=f"{name}-{number}-{place}")
        for name, cases in ANSWERS.items()
        for number, case in enumerate(cases)
        for place in PLACES
        if isinstance(case, kind) and place in case.places
    ]


@pytest.mark.parametrize(("case", "place"), _cases(Raises))
def test_a_fault_meets_its_error(case: Raises, place: str, tmp_path: Path) -> None:
    with pytest.raises(PolyquantError) as caught:
        case.meet(Here(place, tmp_path))
    assert caught.value.slug == case.slug
    for said in (case.wanted, case.came, case.mend):
        assert said in str(caught.value)


@pytest.mark.parametrize(("case", "place"), _cases(Works))
def test_a_fault_of_burn_works_here(case: Works, place: str, tmp_path: Path) -> None:
    case.check(Here(place, tmp_path))


# -- the list -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_has_one_answer_that_is_shown(name: str) -> None:
    fault, cases = FAULTS[name], ANSWERS.get(name, ())
    answers = {"slugs", "works", "cannot"} & set(fault)
    assert len(answers) == 1
    assert set(fault) - answers - {"note"} == {"area", "rows", "fault"}
    assert all(fault.values())
    raised = {case.slug for case in cases if isinstance(case, Raises)}
    assert raised == set(fault.get("slugs", ()))
    assert raised <= set(CATALOGUE)
    assert bool(cases) is ("cannot" not in fault)


def test_no_answer_lacks_a_fault() -> None:
    assert set(ANSWERS) <= set(FAULTS)
    assert len({fault["fault"] for fault in FAULTS.values()}) == len(FAULTS)


def test_every_row_stands_in_one_fault() -> None:
    rows = Counter(row for fault in FAULTS.values() for row in fault["rows"])
    assert [row for row, times in rows.items() if times > 1] == []


@pytest.mark.skipif(not SHARED.is_file(), reason="the catalogue does not lie beside the repository")
def test_the_rows_are_those_of_the_catalogue() -> None:
    known = [row["id"] for row in json.loads(SHARED.read_text("utf-8"))]
    listed = [row for fault in FAULTS.values() for row in fault["rows"]]
    assert sorted(listed) == sorted(known)
