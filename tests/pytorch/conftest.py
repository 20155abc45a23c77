"""Tests of polyquant.torch, which need torch: without it there is nothing to collect."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]
