"""What is true of a format: a row of the page of formats, kept beside its code."""

from __future__ import annotations

from typing import NamedTuple


class Facts(NamedTuple):
    """One format: whose it is, and what of it is read, how exactly, and what is written.

    ``exact``: how values compare with those that the tool itself decodes. ``writes`` and ``bytes``:
    what is written, and whether tensors are read and written back to the same bytes; empty where
    nothing is written. ``checked``: the tool, with its version, that reads our files in a test.
    """

    tool: str
    reads: str
    exact: str
    writes: str = ""
    bytes: str = ""
    checked: str = ""
