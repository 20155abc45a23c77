"""quantize_tree: what it takes in, what it leaves alone, and what it refuses."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import polyquant as pq

Pair = namedtuple("Pair", "weight bias")


def _layer(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.standard_normal((4, 64), dtype=np.float32),
        "bias": rng.standard_normal(4, dtype=np.float32),
        "steps": np.arange(3),
    }


def test_weights_are_quantized_and_the_rest_is_the_same_object() -> None:
    tree = {"a": _layer(), "b": [_layer(1)["weight"], 3, None], "c": Pair(**_pair())}
    made = pq.quantize_tree(tree, "nf4")
    for was, now in (
        (tree["a"]["weight"], made["a"]["weight"]),
        (tree["b"][0], made["b"][0]),
        (tree["c"].weight, made["c"].weight),
    ):
        assert now.to_data() == pq.quantize(was, "nf4").to_data()
    assert made["a"]["bias"] is tree["a"]["bias"]
    assert made["a"]["steps"] is tree["a"]["steps"]
    assert isinstance(made["c"], Pair)
    assert made["b"][1:] == [3, None]
    assert isinstance(tree["a"]["weight"], np.ndarray)  # the tree itself is not changed


def _pair() -> dict[str, Any]:
    layer = _layer()
    return {"weight": layer["weight"], "bias": layer["bias"]}


def test_patterns_select_weights_and_whole_names_select_anything() -> None:
    tree = {"a": _layer(), "b": _layer(1)}
    made = pq.quantize_tree(tree, "q8s/4:f32", include=["a.*", "b.bias"], exclude="*.steps")
    assert pq.is_quantized(made["a"]["weight"])
    assert not pq.is_quantized(made["a"]["bias"])  # one axis, matched by a wildcard
    assert pq.is_quantized(made["b"]["bias"])  # named whole
    assert not pq.is_quantized(made["b"]["weight"])


@pytest.mark.parametrize("container", [dict, OrderedDict, MappingProxyType])
def test_mappings_keep_their_names(container: Any) -> None:
    made = pq.quantize_tree(container(_layer()), "nf4")
    assert list(made) == ["weight", "bias", "steps"]
    assert pq.is_quantized(made["weight"])


def test_a_default_factory_survives() -> None:
    made = pq.quantize_tree(defaultdict(list, _layer()), "nf4")
    assert made.default_factory is list
    assert pq.is_quantized(made["weight"])


def test_bad_trees_and_patterns() -> None:
    with pytest.raises(pq.errors.NothingMatches, match=r"\['head\.\*'\] match none of the 3"):
        pq.quantize_tree(_layer(), "nf4", include="head.*")
    with pytest.raises(pq.errors.UnsupportedTree, match=r"^weight is of type object; a tree holds"):
        pq.quantize_tree({"weight": object()}, "nf4")
    for junk in (3, [3], {"a": 1}):
        with pytest.raises(pq.errors.InvalidArgument, match="include must be a glob pattern"):
            pq.quantize_tree(_layer(), "nf4", include=junk)  # type: ignore[arg-type]
    endless: dict[str, Any] = {}
    endless["again"] = [endless]
    with pytest.raises(pq.errors.UnsupportedTree, match=r"^again\.0 is one of the containers"):
        pq.quantize_tree(endless, "nf4")
