"""Schemes: text and JSON forms, builders, presets, and refusals that name the nearest valid one."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyquant as pq
from polyquant import errors
from strategies import schemes, share


@settings(max_examples=share(1.0))
@given(scheme=schemes(quantizable=False))
def test_forms_round_trip(scheme: pq.QuantScheme) -> None:
    assert pq.scheme(str(scheme)) == scheme
    assert str(pq.scheme(str(scheme))) == str(scheme)
    assert pq.QuantScheme.from_json(scheme.to_json()) == scheme
    assert pq.QuantScheme.from_json(json.dumps(scheme.to_json())) == scheme
    assert eval(repr(scheme), {"QuantScheme": pq.scheme}) == scheme
    for same in (pickle.loads(pickle.dumps(scheme)), copy.deepcopy(scheme)):
        assert same == scheme
        assert hash(same) == hash(scheme)


@settings(max_examples=share(0.3))
@given(first=schemes(quantizable=False), second=schemes(quantizable=False))
def test_equal_means_equal_text(first: pq.QuantScheme, second: pq.QuantScheme) -> None:
    assert (first == second) == (str(first) == str(second))


@settings(max_examples=share(0.5))
@given(text=st.text(alphabet="q4su8e2m1[]nf/:32x*tensorrow+-biazp_@()", max_size=30))
def test_any_text_is_a_scheme_or_a_named_error(text: str) -> None:
    try:
        made = pq.scheme(text)
    except errors.PolyquantError as error:
        assert error.slug in str(error)
    else:
        assert pq.scheme(str(made)) == made


def test_presets_are_their_texts() -> None:
    presets = pq.presets()
    wanted = {
        "int8": "q8s/row:f32",
        "mxfp4": "e2m1/32:ue8m0",
        "nvfp4": "e2m1/16:ue4m3/tensor:f32",
        "nf4": "u4[nf4]/64:f32",
        "nf4-double": "u4[nf4]/64:(u8[dynamic8u]/256:f32)",
        "fp8-128x128": "e4m3/128x128:f32",
        "q4s-32": "q4s/32:f16",
        "ternary": "q2s/tensor:f32",
    }
    assert {name: str(presets[name]) for name in wanted} == wanted
    for name, scheme in presets.items():
        assert pq.scheme(name) == scheme == pq.scheme(str(scheme))


def test_a_value_alone_has_the_defaults() -> None:
    assert pq.scheme("q4s") == pq.QuantScheme("q4s") == pq.QuantScheme()
    assert str(pq.QuantScheme()) == "q4s/32:f16"


def test_the_default_store_is_not_written() -> None:
    assert str(pq.QuantScheme(store="native")) == "q4s/32:f16@native"
    assert str(pq.QuantScheme(store="packed_u32")) == "q4s/32:f16"


def test_builders() -> None:
    start = pq.QuantScheme("q4s", block=None, scale="f32")
    made = start.per_block((16,), "ue4m3").per_tensor("f32").with_value("e2m1")
    assert made == pq.scheme("nvfp4")
    assert start.with_store("native").store is pq.QuantStore.NATIVE
    assert str(pq.scheme("u4").with_offset("bias:f16")) == "u4/32:f16+bias:f16"
    assert pq.scheme("u4/32:f16+bias:f16").with_offset(None) == pq.scheme("u4")
    assert pq.scheme("u4/32:f16+bias:f16").with_mode("symmetric") == pq.scheme("u4")
    assert pq.scheme("nf4").with_mode("symmetric") == pq.scheme("u4/64:f32")
    assert pq.scheme("nf4").with_value("u3").table == "custom"
    assert pq.scheme("q4s").with_mode("lookup") == pq.scheme("u4[custom]/32:f16")


def test_facts() -> None:
    nvfp4 = pq.scheme("nvfp4")
    assert (nvfp4.bits, nvfp4.num_levels, nvfp4.mode) == (4, 2, pq.QuantMode.SYMMETRIC)
    assert pq.scheme("nf4").mode is pq.QuantMode.LOOKUP
    assert pq.scheme("u4-zero:u4").mode is pq.QuantMode.AFFINE
    assert pq.scheme("q4s/4x32:f16").scale_shape((3, 9, 70)) == (3, 3, 3)
    assert pq.scheme("int8").scale_shape((3, 70)) == (3, 1)
    assert pq.scheme("q8s-tensor").scale_shape((3, 70)) == (1, 1)
    assert pq.scheme("q4s").scale_shape((0, 40)) == (0, 2)


def test_what_kernels_decline_by() -> None:
    assert pq.scheme("nf4-double").is_plain
    extras = {
        "e2m1/16:ue4m3/tensor:divisor.f32": "divisor",
        "q8s/row:absmax.f32": "absmax",
        "u4[nf4]/64:f32~flat": "flat",
        "u4/*x1:f16-zero:f16~64x*": r"64x*",
        "u4[nf4]/64:(u8[dynamic8u]/256:f32+bias:f32)": "a bias beside a table",
    }
    for text, word in extras.items():
        scheme = pq.scheme(text)
        assert str(scheme) == text
        assert not scheme.is_plain and word in " ".join(scheme.extras)


def test_views() -> None:
    flat = pq.scheme("u4[nf4]/64:f32~flat")
    assert flat.laid((33, 50)) == (1650,)
    assert flat.scale_shape((33, 50)) == (26,)
    strided = pq.scheme("u4/*x1:f16-zero:f16~64x*")
    assert (strided.laid((24, 256)), strided.scale_shape((24, 256))) == ((64, 96), (1, 96))
    with pytest.raises(errors.ShapeMismatch, match="does not divide"):
        strided.laid((3, 7))
    for view in ((2, 3), (-1, -1), ()):
        with pytest.raises(errors.InvalidBlock):
            pq.QuantScheme(view=view)


def test_leading_ones_of_a_block_are_dropped() -> None:
    assert pq.QuantScheme(block=(1, 1, 32)) == pq.QuantScheme(block=(32,)) == pq.QuantScheme()
    assert str(pq.QuantScheme(block=(1, -1))) == "q4s/row:f16"


def test_immutable() -> None:
    with pytest.raises(AttributeError):
        pq.scheme("q4s").value = "q8s"  # type: ignore[misc,assignment]


# -- refusals ---------------------------------------------------------------------------------

INVALID: tuple[dict[str, Any], ...] = (
    {"value": "q4s", "offset": "bias:f16"},
    {"value": "e2m1", "offset": "zero_point:f16"},
    {"value": "u4", "mode": "affine"},
    {"value": "u4[nf4]", "offset": "zero_point:f16"},
    {"value": "q4s", "scale": "ue8m0", "role": "divisor"},
    {"value": "q4s", "scale": pq.QuantScheme("u8"), "role": "absmax"},
    {"value": "u4", "offset": "bias:f16", "role": "absmax"},
    {"value": "q4s", "scale": pq.QuantScheme("u8", view=-1)},
    {"value": "e2m1", "mode": "lookup"},
    {"value": "u3[nf4]"},
    {"value": "u4", "offset": "bias:u4"},
    {"value": "u4", "offset": "zero_point:q4s"},
    {"value": "u4", "offset": "bias:ue8m0"},
    {"value": "u4", "offset": ("zero_point", pq.QuantScheme("u4"))},
    {"value": "q4s", "block": None, "tensor_scale": "f32"},
    {"value": "q4s", "scale": "ue4m3", "tensor_scale": "f16"},
    {"value": "q4s", "scale": "ue8m0", "tensor_scale": "f32"},
    {"value": "q4s", "scale": pq.QuantScheme("u8"), "tensor_scale": "f32"},
)


@pytest.mark.parametrize("given_", INVALID, ids=[" ".join(map(str, g.values())) for g in INVALID])
def test_invalid_combinations_name_a_valid_one(given_: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidScheme) as caught:
        pq.QuantScheme(**given_)
    nearest = caught.value.facts["nearest"]
    assert str(pq.scheme(nearest)) == nearest


@settings(max_examples=share(0.5))
@given(
    value=st.sampled_from([*pq.QuantValue, "u4[nf4]", "u3[nf4]", "u4[custom]", "e2m1[custom]"]),
    mode=st.sampled_from(list(pq.QuantMode)),
    block=st.sampled_from([None, (32,), (2, 16), (-1,)]),
    scale=st.sampled_from([*pq.ScaleDtype, pq.QuantScheme("u8"), pq.scheme("u4[nf4]/8:f16")]),
    tensor_scale=st.sampled_from([None, None, *pq.ScaleDtype]),
    offset=st.sampled_from([None, None, "bias:f16", "zero_point:u4", "bias:u4", "bias:ue8m0"]),
    role=st.sampled_from(["multiplier", "divisor", "absmax"]),
    view=st.sampled_from([None, -1, (4, -1)]),
)
def test_every_combination_is_valid_or_names_a_valid_one(**given_: Any) -> None:
    try:
        made = pq.QuantScheme(**given_)
    except errors.InvalidScheme as error:
        made = pq.scheme(error.facts["nearest"])
    assert pq.scheme(str(made)) == made


@pytest.mark.parametrize(
    ("made", "what", "nearest"),
    [
        (lambda: pq.QuantScheme("q4"), "value type", "q4s"),
        (lambda: pq.QuantScheme("u4[nf5]"), "table", "nf4"),
        (lambda: pq.QuantScheme(mode="symetric"), "mode", "symmetric"),
        (lambda: pq.QuantScheme(scale="fp16"), "scale type", "f16"),
        (lambda: pq.QuantScheme(store="packed_u16"), "store", "packed_u32"),
        (lambda: pq.QuantScheme("u4", offset="zeropoint:u4"), "kind of offset", "zero_point"),
    ],
)
def test_unknown_names_get_the_nearest(made: Any, what: str, nearest: str) -> None:
    with pytest.raises(errors.UnknownName) as caught:
        made()
    assert caught.value.facts["what"] == what
    assert caught.value.facts["nearest"].startswith(nearest[:2])
    assert repr(caught.value.facts["nearest"]) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nf5", "Did you mean 'nf4'"),
        ("nvpf4", "Did you mean 'nvfp4'"),
        ("q4s/", "at position 4 it needs a block"),
        ("q4s/32", "':' and a scale type"),
        ("q4s/32:", "a type, or a scheme in parentheses"),
        ("q4s/32:f16 ", "the end"),
        ("q4s/32:(u8/16:f16", "')'"),
        ("q4s/32:f16@", "a store"),
        ("", "a value type"),
        ("q4s/32x:f16", "':' and a scale type"),
    ],
)
def test_grammar_errors_name_the_place(text: str, says: str) -> None:
    with pytest.raises(errors.UnknownScheme) as caught:
        pq.scheme(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("block", [0, (0,), (-2,), (16, 0), (), (1.5,), (True,), "32"])
def test_blocks_that_cannot_be(block: Any) -> None:
    with pytest.raises(errors.InvalidBlock):
        pq.QuantScheme(block=block)


def test_a_block_with_more_axes_than_the_tensor() -> None:
    with pytest.raises(errors.BlockRank) as caught:
        pq.scheme("fp8-128x128").scale_shape((8,))
    assert "128x128 has 2 axes" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"version": 2}, errors.UnsupportedVersion),
        ({"more": 1}, errors.UnknownScheme),
        ({"value": "q9s"}, errors.UnknownName),
        ({"mode": "lookup"}, errors.PolyquantError),
        ({"block": [0]}, errors.InvalidBlock),
        ({"offset": {"kind": "bias"}}, errors.UnknownScheme),
        ({"role": "multiplier"}, errors.UnknownScheme),
        ({"view": [4]}, errors.InvalidBlock),
    ],
)
def test_json_that_cannot_be(change: dict[str, Any], error: type[Exception]) -> None:
    form = pq.scheme("q4s").to_json() | change
    with pytest.raises(error):
        pq.QuantScheme.from_json(form)


@pytest.mark.parametrize("form", ["{", "[]", "1", [], {}])
def test_json_that_is_none(form: Any) -> None:
    with pytest.raises(errors.UnknownScheme):
        pq.QuantScheme.from_json(form)
