"""Patterns of configs: they mean what Python's do, and take no time whatever they are."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyquant as pq
from polyquant.errors import InvalidHeader
from polyquant.files.patterns import LENGTH_LIMIT, found, matches

TEXTS = ["", "a", "model.layers.10.mlp.up_proj", "model.layers.3.self_attn.q_proj", "aab\n", "_a-b"]
PATTERNS = [
    *(r".*mlp\.(gate|up)_proj$", r"^(?!.*mlp).*proj", r"model.layers.\d+\.", r"[a-m_]+", r"\bup"),
    *(r"(a|b)*$", r"(a*)*b", r".*\.(1\d|[02-9])\..*", r"a{2}b?", r"(?:a{1,2}?|b)+\Z", r"[^.]*\Bl"),
    *(r"(?=m)m.*(?!x)", r"", r"^$", r"\W|\D\S", r".*?layers(\.\w+){2,}", r"(()|a)*b", r"(^|a){3}b"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_those_of_python_do(pattern: str) -> None:
    for text in TEXTS:
        assert matches(pattern, text) == (re.match(pattern, text) is not None), text
        wanted = re.search(pattern, text)
        assert found(pattern, text) == (None if wanted is None else wanted.start()), text


atoms = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", r"\b", "^", "$", "()", "(?=a)"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda ways: f"({'|'.join(ways)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        inner.map(lambda one: f"(?!{one})"),
    ),
    max_leaves=8,
)


@given(patterns, st.text("ab\n-", max_size=6))
def test_any_patterns_mean_what_those_of_python_do(pattern: str, text: str) -> None:
    assert matches(pattern, text) == (re.match(pattern, text) is not None)
    wanted = re.search(pattern, text)
    assert found(pattern, text) == (None if wanted is None else wanted.start())


SLOW = [
    "(a*)*b",
    "(a|aa)+$",
    ".*.*.*.*.*.*.*.*x",
    "(.*)*" * 20 + "x",
    "(?=(a*)*b)a",
    "(a{1000}){1000}",
]


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_would_take_for_ever(pattern: str) -> None:
    start = time.perf_counter()
    assert not matches(pattern, "a" * 200 + "!")
    assert time.perf_counter() - start < 5  # Python's own takes longer than anyone lives


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "missing"),
        ("a" * (LENGTH_LIMIT + 1), "are allowed"),
        ("(" * 2000 + ")" * 2000, "recursion"),
        ("(a)\\1", "groupref"),
        ("(?<=a)b", "assert is not read"),
        ("(?i)a", "flags"),
        ("(?i:a)", "subpattern"),
        ("(?>a)", "atomic"),
        ("a++", "possessive"),
        ("a{99999999999}", "too large"),
        ("((?!(a|b)*x)a)*x", "too long"),
    ],
)
def test_patterns_that_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(re.error, match=reason):
        matches(pattern, "a" * 2000)


CONFIGS: dict[str, Any] = {
    "gptq": {"bits": 4, "group_size": 128, "dynamic": {"(a)\\1": {"bits": 8}}},
    "gemma": {"num_bits": 4, "module_quant_configs": {"(a)\\1": {"num_bits": 8}}},
    "compressed-tensors": {
        "config_groups": {"g": {"targets": ["re:(a)\\1"], "weights": {"num_bits": 4}}}
    },
}


@pytest.mark.parametrize("method", CONFIGS)
def test_configs_with_patterns_that_are_refused(method: str, tmp_path: Any) -> None:
    from safetensors.numpy import save_file

    names = ("l.qweight", "l.weight", "l.weight_scale", "l.weight_packed")
    save_file({name: np.ones((8, 8), "u1") for name in names}, tmp_path / "x.safetensors")
    with pytest.raises(InvalidHeader, match=r"groupref is not read"):
        pq.open_checkpoint(
            tmp_path / "x.safetensors", config=CONFIGS[method] | {"quant_method": method}
        )
