"""Open bugs of other libraries or of ours: one predicate each, deleted by the fix.

A conformance result that an issue covers is an expected failure; one that it covers and that
passes is an error, so that the entry does not outlive the bug.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from polyquant.conform import Result


class Issue(NamedTuple):
    """What is wrong, and the results of which device it explains."""

    reason: str
    covers: Callable[[str, Result], bool]


ISSUES: tuple[Issue, ...] = ()


def reason_for(device: str, result: Result) -> str | None:
    """Why a result is known to fail, or None."""
    return next((issue.reason for issue in ISSUES if issue.covers(device, result)), None)
