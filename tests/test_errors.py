"""The catalogue of errors: records, raise sites, and texts as a user meets them."""

from __future__ import annotations

import ast
import builtins
import copy
import pickle
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import CATALOGUE, PolyquantError, record

SOURCE = Path(pq.__file__).parent

#: Changing a slug is a format change: scripts, searches and links hold them.
SLUGS = [
    "already-quantized",
    "backend-mismatch",
    "backend-missing",
    "block-rank",
    "calibration-refused",
    "checksum-mismatch",
    "corrupt-data",
    "data-length",
    "device-mismatch",
    "host-copy-refused",
    "immutable",
    "invalid-argument",
    "invalid-axes",
    "invalid-block",
    "invalid-header",
    "invalid-index",
    "invalid-name",
    "invalid-scale",
    "invalid-scheme",
    "invalid-tensor",
    "kernel-refused",
    "layout-refused",
    "negative-input",
    "no-kernel",
    "non-finite-input",
    "not-an-array",
    "not-exact",
    "not-float",
    "nothing-matches",
    "scale-argument",
    "scale-shape",
    "shape-mismatch",
    "sharding-refused",
    "state-mismatch",
    "table-invalid",
    "table-length",
    "table-mismatch",
    "table-missing",
    "table-superfluous",
    "tensor-not-found",
    "traced-calibration",
    "unknown-device",
    "unknown-format",
    "unknown-name",
    "unknown-scheme",
    "unknown-slug",
    "unreadable-file",
    "unsupported-array",
    "unsupported-dtype",
    "unsupported-function",
    "unsupported-tree",
    "unsupported-version",
    "write-failed",
]

#: The fields of a record and their types, in the order in which record() has them.
DERIVED = ("slug", "errorMessage", "messagePattern", "errorType", "errorClass")
WRITTEN = {
    "severity": str,
    "documentation": str,
    "triggerScenarios": list,
    "commonSituations": list,
    "solutions": list,
    "exampleFix": dict,
    "handlingStrategy": str,
    "validationCode": str,
    "typeGuard": str,
    "tryCatchPattern": str,
    "preventionTips": list,
    "tags": list,
}


# -- records ----------------------------------------------------------------------------------


def test_slugs_are_complete_unique_and_stable() -> None:
    assert sorted(CATALOGUE) == SLUGS
    classes = [c for c in PolyquantError.__subclasses__() if c.__module__ == "polyquant.errors"]
    assert Counter(c.slug for c in classes) == Counter(SLUGS)
    for slug, cls in CATALOGUE.items():
        words = re.findall("[A-Z][a-z]*", cls.__name__)
        assert slug == "-".join(words).lower()


def test_every_class_has_one_record_and_no_record_lacks_a_class() -> None:
    text = (SOURCE / "errors.toml").read_text(encoding="utf-8")
    assert set(tomllib.loads(text)) == set(CATALOGUE)


@pytest.mark.parametrize("slug", SLUGS)
def test_a_record_has_exactly_the_documented_fields(slug: str) -> None:
    found = record(slug)
    assert list(found) == [*DERIVED, *WRITTEN]
    written = tomllib.loads((SOURCE / "errors.toml").read_text(encoding="utf-8"))[slug]
    assert set(written) == set(WRITTEN)
    for name, kind in WRITTEN.items():
        assert isinstance(found[name], kind), name
        assert found[name], f"{name} is empty"
    assert set(found["exampleFix"]) == {"before", "after"}
    assert found["severity"] in ("error", "fatal")
    assert found["slug"] == slug
    assert found["errorClass"] == f"polyquant.errors.{CATALOGUE[slug].__name__}"
    assert found["errorMessage"] == CATALOGUE[slug].message


@pytest.mark.parametrize("slug", SLUGS)
def test_the_code_of_a_record_parses_and_names_its_error(slug: str) -> None:
    found = record(slug)
    for name in ("typeGuard", "tryCatchPattern", "validationCode"):
        ast.parse(found[name])
    ast.parse(found["typeGuard"], mode="eval")
    assert f"except pq.errors.{CATALOGUE[slug].__name__}" in found["tryCatchPattern"]


def test_no_two_records_share_a_sentence() -> None:
    prose = ("documentation", "handlingStrategy")
    lists = ("triggerScenarios", "commonSituations", "solutions", "preventionTips")
    said: Counter[str] = Counter()
    for slug in SLUGS:
        found = record(slug)
        texts = [found[name] for name in prose] + [item for name in lists for item in found[name]]
        said.update(part for text in texts for part in re.split(r"(?<=[.!?]) ", text))
    assert [text for text, times in said.items() if times > 1] == []


def test_a_record_is_the_callers_own() -> None:
    record("block-rank")["solutions"].clear()
    assert record("block-rank")["solutions"]


def test_record_refuses_what_is_no_slug() -> None:
    for junk in ("BlockRank", "", None, 3, ["block-rank"]):
        with pytest.raises(pq.errors.UnknownSlug):
            record(junk)  # type: ignore[arg-type]


# -- the code of the records runs ---------------------------------------------------------------

#: Records whose code changes the interpreter, and so runs in one of its own.
OWN_PROCESS = {"backend-missing"}


def run(code: str) -> PolyquantError | None:
    """Run the code of a record in a fresh namespace; the error of the catalogue that it raised."""
    try:
        exec(compile(code, "<record>", "exec"), {"__name__": "__record__"})
    except PolyquantError as error:
        return error
    return None


def skip_if_absent(code: str) -> None:
    for library in ("torch", "jax"):
        if re.search(rf"^import {library}\b", code, re.MULTILINE) and find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


def last_line(code: str) -> str:
    """The last line that the code writes when it is run by an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return (done.stderr or "clean").strip().splitlines()[-1]


@pytest.mark.parametrize("slug", SLUGS)
def test_the_example_before_raises_exactly_its_error(
    slug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, cls = record(slug)["exampleFix"]["before"], CATALOGUE[slug]
    skip_if_absent(code)
    monkeypatch.chdir(tmp_path)
    if slug in OWN_PROCESS:
        assert last_line(code).startswith(f"polyquant.errors.{cls.__name__}: ")
        return
    error = run(code)
    assert type(error) is cls
    check_error(error)


@pytest.mark.parametrize("field", ["after", "validationCode"])
@pytest.mark.parametrize("slug", SLUGS)
def test_the_mended_code_runs_clean(
    slug: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = record(slug)
    code = found["exampleFix"]["after"] if field == "after" else found[field]
    skip_if_absent(code)
    monkeypatch.chdir(tmp_path)
    if slug in OWN_PROCESS:
        assert last_line(code) == "clean"
        return
    assert run(code) is None


def check_error(error: PolyquantError) -> None:
    """What holds of every error: its text, its pattern, its parents, and that it travels."""
    text, found = str(error), record(error.slug)
    assert text.endswith(f" [{error.slug}]")
    assert re.fullmatch(found["messagePattern"], text)
    assert set(error.facts) == error.fields()
    assert isinstance(error, getattr(builtins, found["errorType"]))
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == text
        assert repr(again.facts) == repr(error.facts)


@pytest.mark.parametrize("slug", SLUGS)
def test_every_error_travels_and_ends_with_its_slug(slug: str) -> None:
    cls = CATALOGUE[slug]
    check_error(cls(**{name: f"<{name}>\nand (more) [of] it" for name in cls.fields()}))


def test_a_pattern_is_of_its_error_alone() -> None:
    texts = {s: str(c(**dict.fromkeys(c.fields(), "x"))) for s, c in CATALOGUE.items()}
    for slug in SLUGS:
        matches = [s for s in SLUGS if re.fullmatch(record(slug)["messagePattern"], texts[s])]
        assert matches == [slug]


def test_a_fact_that_would_fill_the_screen_is_cut() -> None:
    with pytest.raises(pq.errors.UnknownScheme) as caught:
        pq.scheme("q4s/" + "32x" * 1000)
    assert len(str(caught.value)) < 600
    assert " ... " in str(caught.value)
    assert len(caught.value.facts["got"]) > 3000  # the fact itself is whole


# -- texts, word by word --------------------------------------------------------------------------

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
Q = pq.quantize(X, "q4s")
NOT_FINITE = np.array([[1.0, np.inf], [np.nan, 2.0]], np.float32)
NF4 = pq.scheme("nf4").to_json()

#: What a user does, and the whole text that comes, cut into lines at spaces.
TEXTS: list[tuple[Callable[[], object], tuple[str, ...]]] = [
    (
        lambda: pq.scheme("q4s/32"),
        (
            "'q4s/32' is not a scheme: at position 6 it needs ':' and a scale type, got ''.",
            "Did you mean 'q4s-32'? The presets are listed by pq.presets(). [unknown-scheme]",
        ),
    ),
    (
        lambda: pq.quantize(X, None),  # type: ignore[arg-type]
        (
            "None is not a scheme: its type is NoneType, not str.",
            "The presets are listed by pq.presets(). [unknown-scheme]",
        ),
    ),
    (
        lambda: pq.QuantScheme("q4s", scale="float16"),
        (
            "There is no scale type 'float16'. Known: f32, f16, bf16, ue8m0, ue4m3.",
            "The nearest is 'f16'. [unknown-name]",
        ),
    ),
    (
        lambda: pq.QuantScheme("u4", offset="bias:int4"),
        (
            "There is no offset type 'int4'.",
            "Known: f32, f16, bf16, u8, u7, u6, u5, u4, u3, u2, u1.",
            "The nearest is 'u4'. [unknown-name]",
        ),
    ),
    (
        lambda: pq.QuantScheme("u4", offset="bias"),
        (
            "offset must be a kind and a type, such as 'bias:f16' or 'zero_point:u4';",
            "what came is 'bias'. [invalid-argument]",
        ),
    ),
    (
        lambda: pq.QuantScheme("q4s", offset="bias:f16"),
        (
            "q4s/32:f16+bias:f16 cannot be: affine codes are unsigned, and q4s is not.",
            "The nearest valid scheme is 'u4/32:f16+bias:f16'. [invalid-scheme]",
        ),
    ),
    (
        lambda: pq.QuantScheme("q4s", block=32.0),  # type: ignore[arg-type]
        (
            "Block 32.0 has the extent 32.0; an extent is a whole number from 1 to 2^63 - 1,",
            "or -1 for a whole axis. Pass block=None for one block over the whole tensor.",
            "[invalid-block]",
        ),
    ),
    (
        lambda: pq.quantize(X[0], "fp8-128x128"),
        (
            "A block of 128x128 has 2 axes, and the tensor of shape (32,) has 1.",
            "Use a block of no more axes than the tensor, block=None for one block over all of it,",
            "or reshape the tensor. [block-rank]",
        ),
    ),
    (
        lambda: pq.quantize(X, "u4[custom]/64:f32"),
        (
            "Scheme u4[custom]/64:f32 looks its codes up in a table of the tensor's own,",
            "and none came. Pass table= with 16 numbers, or table='kmeans' to fit one.",
            "[table-missing]",
        ),
    ),
    (
        lambda: pq.quantize(X, "nf4", table=np.ones(16)),
        (
            "Scheme u4[nf4]/64:f32 takes no table=: it names the table 'nf4'.",
            "Leave it out, or use the scheme 'u4[custom]/64:f32'. [table-superfluous]",
        ),
    ),
    (
        lambda: pq.quantize(X, "u4[custom]/64:f32", table=np.ones(15)),
        (
            "A table for 4-bit codes has 16 entries in one dimension;",
            "the shape that came is (15,). [table-length]",
        ),
    ),
    (
        lambda: pq.quantize(NOT_FINITE, "q4s"),
        (
            "The input of shape (2, 2) holds 2 values that are NaN or infinite",
            "(beyond float32's range counts), the first at index (0, 1): inf.",
            "Mend them, or pass nonfinite='saturate'",
            "(infinities go to the ends of the range, NaN to 0). [non-finite-input]",
        ),
    ),
    (
        lambda: pq.quantize(X, "u4/32:f16"),
        (
            "Scheme u4/32:f16 holds no negative numbers, and the input of shape (2, 32) has 32,",
            "the first at index (0, 0): -1.0.",
            "Use a signed value type or an offset, e.g. 'q4s/32:f16'. [negative-input]",
        ),
    ),
    (
        lambda: pq.quantize(np.arange(4), "q4s"),
        (
            "x must be a floating-point array (float16, bfloat16, float32 or float64);",
            "what came is int64. Convert it first, with .astype('float32'). [not-float]",
        ),
    ),
    (
        lambda: pq.quantize([1.0, 2.0], "q4s"),
        (
            "x must be an array of a known library (NumPy, PyTorch, JAX, or any that follows",
            "the Python array API standard) or a QTensor; what came is of type list.",
            "Make it an array first, e.g. with numpy.asarray. [not-an-array]",
        ),
    ),
    (
        lambda: pq.quantize(Q, "nf4"),
        (
            "x must be a float array; what came is already quantized as q4s/32:f16.",
            "Call .dequantize() first, and know that quantizing twice loses twice.",
            "[already-quantized]",
        ),
    ),
    (
        lambda: pq.quantize(X, "int8", scales=np.ones(2)),
        (
            "scales for q8s/row:f32 on shape (2, 32) form a grid of shape (2, 1);",
            "the shape that came is (2,). [scale-shape]",
        ),
    ),
    (
        lambda: pq.quantize(X, "q4s", scales=[[0.1], [-0.1]]),
        (
            "scales must be finite and not negative, and at 1 of the indices they are not,",
            "the first of them (1, 0): -0.1. [invalid-scale]",
        ),
    ),
    (
        lambda: pq.quantize(X, "q4s", scales="0.1"),
        (
            "scales must be real numbers: one, or a list or an array of them;",
            "what came is '0.1'. [invalid-argument]",
        ),
    ),
    (
        lambda: pq.quantize(X, "q4s", scales=np.ones((2, 1)), offsets=np.ones((2, 1))),
        (
            "Scheme q4s/32:f16 cannot take the offsets that came: it has no offset.",
            "[scale-argument]",
        ),
    ),
    (
        lambda: pq.quantize(X, "q4s", calibration="mx_floor"),
        (
            "Calibration 'mx_floor' does not work for q4s/32:f16:",
            "it gives powers of two, and the scales are f16. Use minmax. [calibration-refused]",
        ),
    ),
    (
        lambda: pq.quantize(X, "q4s", calibration="percentile:150"),
        (
            "calibration must be a number above 0 and at most 100, as in 'percentile:99.9';",
            "what came is 'percentile:150'. [invalid-argument]",
        ),
    ),
    (
        lambda: pq.matmul(X, Q),
        (
            "matmul cannot combine the shapes (2, 32) and (2, 32):",
            "the inner extents differ, 32 and 2; the second operand's .mT would fit.",
            "[shape-mismatch]",
        ),
    ),
    (
        lambda: pq.linear(X, Q, np.ones(3, np.float32)),
        (
            "linear cannot combine the shapes (2, 32) and (3,):",
            "the bias must be of shape (2,). [shape-mismatch]",
        ),
    ),
    (
        lambda: np.linalg.svd(Q),  # type: ignore[call-overload]
        (
            "numpy.linalg.svd has no form for quantized tensors.",
            "Supported on a QTensor: the operations of pq.ops as functions of numpy, such as add,",
            "matmul, reshape, sort, sum.",
            "Otherwise call it on q.dequantize(). [unsupported-function]",
        ),
    ),
    (
        lambda: Q.permute(1, 1),
        (
            "(1, 1) does not fit the 2 axes of a tensor of shape (2, 32): axes are counted from 0, "
            "or from -1 at the end, each is named once at most, and a permutation names all.",
            "[invalid-axes]",
        ),
    ),
    (
        lambda: setattr(Q, "scales", None),
        (
            "A QTensor does not change; 'scales' cannot be set.",
            "Make a new one with pq.quantize or q.to. [immutable]",
        ),
    ),
    (
        lambda: Q.dequantize("int8"),
        (
            "The result of dequantize cannot be 'int8'.",
            "Known: float16, bfloat16, float32, float64. [unsupported-dtype]",
        ),
    ),
    (
        lambda: pq.TensorData(b"1234", Q.shape, Q.scheme, Q.axes),
        (
            "TensorData of scheme q4s/32:f16 and shape (2, 32) has exactly 36 bytes; 4 came.",
            "[data-length]",
        ),
    ),
    (
        lambda: pq.QuantScheme.from_json(NF4 | {"version": 99}),
        (
            "This scheme has version 99; this polyquant reads version 1.",
            "Upgrade polyquant to read it. [unsupported-version]",
        ),
    ),
    (
        lambda: pq.errors.record("block-rnak"),
        ("There is no error 'block-rnak'. Did you mean 'block-rank'? [unknown-slug]",),
    ),
    (
        lambda: pq.quantize_tree({"fc": {"weight": X}}, "nf4", include="weight"),
        (
            "Include patterns ['weight'] match none of the 1 tensors.",
            "Names look like: fc.weight. [nothing-matches]",
        ),
    ),
    (
        lambda: pq.quantize_tree({"layers": {1, 2}}, "nf4"),
        (
            "layers is of type set; a tree holds dicts, lists, tuples, pytrees of JAX and arrays.",
            "[unsupported-tree]",
        ),
    ),
]


@pytest.mark.parametrize(
    ("act", "lines"), TEXTS, ids=[lines[-1].rpartition("[")[2][:-1] for _, lines in TEXTS]
)
def test_the_text_of_an_error(act: Callable[[], object], lines: tuple[str, ...]) -> None:
    with pytest.raises(PolyquantError) as caught:
        act()
    assert str(caught.value) == " ".join(lines)
    check_error(caught.value)


def test_the_text_of_operands_in_two_libraries() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(pq.errors.BackendMismatch) as caught:
        pq.matmul(torch.ones(2, 32), Q.T)
    assert str(caught.value) == (
        "matmul needs both operands in one library. "
        "a is a float32 array of shape (2, 32) on torch:cpu; "
        "b is a q4s/32:f16 QTensor of shape (32, 2) on numpy. "
        "Nothing is copied between libraries unasked: call b.to('torch:cpu'). [backend-mismatch]"
    )


def test_the_text_of_operands_on_two_devices() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(pq.errors.DeviceMismatch) as caught:
        pq.linear(torch.ones(2, 32), Q.to("torch:meta"))
    assert str(caught.value) == (
        "linear needs both operands on one device. "
        "x is a float32 array of shape (2, 32) on torch:cpu; "
        "weight is a q4s/32:f16 QTensor of shape (2, 32) on torch:meta. "
        "Nothing is copied between devices unasked: call weight.to('torch:cpu'). [device-mismatch]"
    )


def test_a_bias_that_cannot_be_negative_refuses_negative_values() -> None:
    for scheme in ("u4/32:f16+bias:(u8/32:ue4m3)", "u4/32:f16+bias:(u8[dynamic8u]/8:f32)"):
        with pytest.raises(pq.errors.NegativeInput) as caught:
            pq.quantize(X, scheme)
        assert "e.g. 'u4/32:f16+bias:f16'" in str(caught.value)
        pq.quantize(np.abs(X), scheme)


def test_torch_functions_of_lists_of_tensors_are_refused_by_name() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    q = pq.quantize(torch.ones(2, 32), "q4s")
    with pytest.raises(pq.errors.UnsupportedFunction, match=r"torch\.hstack"):
        torch.hstack([q, q])


def test_a_traced_table_of_another_shape_is_refused() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")

    def quantized(x: Any, table: Any) -> Any:
        return pq.quantize(x, "u4[custom]/32:f16", table=table).dequantize()

    for shape in ((15,), (16, 1)):
        with pytest.raises(pq.errors.TableLength):
            jax.jit(quantized)(jax.numpy.ones((2, 32)), jax.numpy.ones(shape))


# -- junk ---------------------------------------------------------------------------------------

JUNK = (None, True, 3, -1.5, 1j, "", "x", "3", b"x", (), [], {}, {"a": 1}, [[1], [1, 2]], object)
JUNK += (10**400, float("nan"), np.float32(3), np.array(["a"]), np.array(1j), np.array([None]), Q)
ENTRIES = np.linspace(-1, 1, 16)

#: A call with one place for junk. It may work; else it raises an error of the catalogue, no other.
CALLS: dict[str, Callable[[Any], object]] = {
    "quantize x": lambda junk: pq.quantize(junk, "q4s"),
    "quantize scheme": lambda junk: pq.quantize(X, junk),
    "quantize scales": lambda junk: pq.quantize(X, "q4s", scales=junk),
    "quantize scales of two levels": lambda junk: pq.quantize(X, "nvfp4", scales=(junk, junk)),
    "quantize tensor scale": lambda junk: pq.quantize(X, "nvfp4", scales=(np.ones((2, 2)), junk)),
    "quantize offsets": lambda junk: pq.quantize(
        X, "u4/32:f16-zero:u4", scales=np.ones((2, 1)), offsets=junk
    ),
    "quantize table": lambda junk: pq.quantize(X, "u4[custom]/32:f16", table=junk),
    "quantize calibration": lambda junk: pq.quantize(X, "q4s", calibration=junk),
    "quantize nonfinite": lambda junk: pq.quantize(X, "q4s", nonfinite=junk),
    "quantize kernel": lambda junk: pq.quantize(X, "q4s", kernel=junk),
    "scheme": pq.scheme,
    "scheme value": lambda junk: pq.QuantScheme(junk),
    "scheme mode": lambda junk: pq.QuantScheme("q4s", mode=junk),
    "scheme block": lambda junk: pq.QuantScheme("q4s", block=junk),
    "scheme scale": lambda junk: pq.QuantScheme("q4s", scale=junk),
    "scheme tensor scale": lambda junk: pq.QuantScheme("q4s", tensor_scale=junk),
    "scheme offset": lambda junk: pq.QuantScheme("u4", offset=junk),
    "scheme Offset": lambda junk: pq.QuantScheme("u4", offset=pq.Offset(junk, junk)),
    "scheme store": lambda junk: pq.QuantScheme("q4s", store=junk),
    "from_json": pq.QuantScheme.from_json,
    "matmul a": lambda junk: pq.matmul(junk, Q),
    "matmul b": lambda junk: pq.matmul(X, junk),
    "matmul out_dtype": lambda junk: pq.matmul(X, Q.T, out_dtype=junk),
    "matmul kernel": lambda junk: pq.matmul(X, Q.T, kernel=junk),
    "linear x": lambda junk: pq.linear(junk, Q),
    "linear weight": lambda junk: pq.linear(X, junk),
    "linear bias": lambda junk: pq.linear(X, Q, junk),
    "linear activations": lambda junk: pq.linear(X, Q, activations=junk),
    "dequantize": lambda junk: Q.dequantize(junk),
    "to": lambda junk: Q.to(junk),
    "permute": lambda junk: Q.permute(junk),
    "permute two": lambda junk: Q.permute(junk, 0),
    "from_data": lambda junk: pq.from_data(junk),
    "from_data device": lambda junk: pq.from_data(Q.to_data(), junk),
    "TensorData bytes": lambda junk: pq.TensorData(junk, (2, 32), Q.scheme, (0, 1)),
    "TensorData shape": lambda junk: pq.TensorData(b"", junk, Q.scheme, (0, 1)),
    "TensorData scheme": lambda junk: pq.TensorData(b"", (2, 32), junk, (0, 1)),
    "TensorData axes": lambda junk: pq.TensorData(b"", (2, 32), Q.scheme, junk),
    "QTensor scheme": lambda junk: pq.QTensor(junk, Q.shape, Q.data, Q.scales, device="numpy"),
    "QTensor shape": lambda junk: pq.QTensor(Q.scheme, junk, Q.data, Q.scales, device="numpy"),
    "QTensor data": lambda junk: pq.QTensor(Q.scheme, Q.shape, junk, Q.scales, device="numpy"),
    "QTensor scales": lambda junk: pq.QTensor(Q.scheme, Q.shape, Q.data, junk, device="numpy"),
    "QTensor device": lambda junk: pq.QTensor(Q.scheme, Q.shape, Q.data, Q.scales, device=junk),
    "explain op": lambda junk: pq.explain(junk, X, Q),
    "explain matmul": lambda junk: pq.explain("matmul", junk, Q),
    "explain linear": lambda junk: pq.explain("linear", X, junk),
    "explain quantize": lambda junk: pq.explain("quantize", junk),
    "explain nothing": lambda junk: pq.explain("matmul"),
    "supports device": lambda junk: pq.supports(junk, "q4s"),
    "supports scheme": lambda junk: pq.supports("numpy", junk),
    "supports op": lambda junk: pq.supports("numpy", "q4s", junk),
    "supports m": lambda junk: pq.supports("numpy", "q4s", m=junk),
    "device_of": pq.device_of,
    "same_backend": lambda junk: pq.same_backend(junk, Q),
    "record": record,
}
FIELDS = sorted(NF4)
CALLS |= {
    f"from_json {name}": lambda junk, name=name: pq.QuantScheme.from_json(NF4 | {name: junk})
    for name in FIELDS
}


@pytest.mark.parametrize("call", CALLS)
def test_junk_meets_an_error_of_the_catalogue(call: str) -> None:
    for junk in JUNK:
        with suppress(PolyquantError):
            CALLS[call](junk)


@pytest.mark.parametrize(
    "text",
    [
        "q4s/32:(" * 5000,
        "q4s/" + "9" * 5000 + ":f16",
        "[" * 100_000,
        "9" * 5000,
        "{" + '"a":1,' * 9,
    ],
)
def test_a_hostile_text_meets_an_error_of_the_catalogue(text: str) -> None:
    for parse in (pq.scheme, pq.QuantScheme.from_json):
        with pytest.raises(PolyquantError):
            parse(text)


def test_a_hostile_depth_of_schemes_is_refused() -> None:
    form = pq.scheme("q8s/32:f16").to_json()
    for _ in range(900):
        form = form | {"scale": form}
    with pytest.raises(pq.errors.UnknownScheme):
        pq.QuantScheme.from_json(form)
    made = pq.scheme("q8s/32:f16")
    with pytest.raises(pq.errors.InvalidScheme):
        for _ in range(900):
            made = pq.QuantScheme("q8s", scale=made)


# -- raise sites --------------------------------------------------------------------------------

FILES = sorted(SOURCE.rglob("*.py"))
CLASSES = {cls.__name__: cls for cls in CATALOGUE.values()}

#: (file, what it raises) -> why it is none of the catalogue.
FOREIGN = {
    ("qtensor.py", "TypeError"): "what Python itself raises for len() of an array without axes",
    ("files/strict_json.py", "ValueError"): "what json's hooks raise; caught in the same module",
    ("files/patterns.py", "re.error"): "what re raises; files/layers.py says it as InvalidHeader",
    ("cli/app.py", "typer.Exit"): "typer's way to set the exit status",
    ("cli/compare.py", "typer.Exit"): "typer's way to set the exit status",
    ("cli/convert.py", "typer.Exit"): "typer's way to set the exit status",
    ("cli/system.py", "typer.Exit"): "typer's way to set the exit status",
}


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


class Module:
    """A source file, and what its raise sites pass."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.parents = {c: p for p in ast.walk(self.tree) for c in ast.iter_child_nodes(p)}
        self.functions = {
            node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)
        }
        self.assignments: dict[str, list[ast.Assign]] = {}
        for node in ast.walk(self.tree):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Name):
                    self.assignments.setdefault(target.id, []).append(node)  # type: ignore[arg-type]

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The functions and handlers around a node, innermost first, then the module."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.FunctionDef | ast.ExceptHandler | ast.Module):
                yield node

    def assigned(self, name: str, at: ast.expr) -> ast.expr | None:
        """What a name was last assigned before a place, in the innermost function that does."""
        before = [a for a in self.assignments.get(name, ()) if a.lineno <= at.lineno]
        for scope in self.around(at):
            found = [a.value for a in before if scope in self.around(a)]
            if found:
                return found[-1]
        return None

    def classes(self, callee: ast.expr) -> list[type[PolyquantError]] | None:
        """The classes of the catalogue that a callee may be; None where it is something else."""
        if isinstance(callee, ast.IfExp):
            both = (self.classes(callee.body), self.classes(callee.orelse))
            return [*both[0], *both[1]] if both[0] and both[1] else None
        if not isinstance(callee, ast.Name):
            return None
        if callee.id in CLASSES:
            return [CLASSES[callee.id]]
        assigned = self.assigned(callee.id, callee)
        return None if assigned is None else self.classes(assigned)

    def keywords(self, call: ast.Call) -> set[str]:
        """The keywords that a call passes, those behind ** included."""
        found: set[str] = set()
        for keyword in call.keywords:
            found |= {keyword.arg} if keyword.arg else self.keys(keyword.value)
        return found

    def keys(self, node: ast.expr) -> set[str]:
        """The keys of an expression that makes a dict."""
        if isinstance(node, ast.Dict):
            named = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            inner = [v for k, v in zip(node.keys, node.values, strict=True) if k is None]
            return {str(name) for name in named}.union(*map(self.keys, inner))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self.keys(node.left) | self.keys(node.right)
        if isinstance(node, ast.Name):
            assigned = self.assigned(node.id, node)
            if assigned is not None:
                return self.keys(assigned)
        function = self.function(node.func) if isinstance(node, ast.Call) else None
        if function is not None:
            returned = [r.value for r in ast.walk(function) if isinstance(r, ast.Return)]
            return set().union(*(self.keys(value) for value in returned if value))
        if isinstance(node, ast.Attribute) and node.attr == "facts":
            return self.fields_of_caught(node)
        raise LookupError(f"{self.where(node)}: cannot tell the keys of {ast.unparse(node)}")

    def fields_of_caught(self, node: ast.Attribute) -> set[str]:
        """The facts of ``error`` in ``except SomeError as error``, or under an isinstance of it."""
        name = ast.unparse(node.value)
        for scope in self.around(node):
            if isinstance(scope, ast.ExceptHandler) and scope.name == name:
                tests = [scope.type, *(n for n in ast.walk(scope) if isinstance(n, ast.Call))]
                texts = [ast.unparse(t) for t in tests if t is not None]
                for text in texts:
                    cls = re.search(r"\w+$", text.removeprefix(f"isinstance({name}, ").rstrip(")"))
                    if cls and cls[0] in CLASSES:
                        return set(CLASSES[cls[0]].fields())
        raise LookupError(f"{self.where(node)}: cannot tell what {name} is")

    def function(self, callee: ast.expr) -> ast.FunctionDef | None:
        """The function of this module that a callee is, or None."""
        return self.functions.get(callee.id) if isinstance(callee, ast.Name) else None

    def returns_error(self, callee: ast.expr) -> bool:
        """Whether a callee is annotated to make an error: a function of this module, or a method.

        A method may be of another module: only its name is known.
        """
        if isinstance(callee, ast.Attribute):
            return callee.attr in _error_makers()
        function = self.function(callee)
        return function is not None and _makes_an_error(function)

    def where(self, node: ast.AST) -> str:
        name = relative(self.path) if self.path.is_relative_to(SOURCE) else self.path.name
        return f"{name}:{node.lineno}"  # type: ignore[attr-defined]


def _makes_an_error(function: ast.FunctionDef) -> bool:
    made = function.returns
    return made is not None and ast.unparse(made) in {*CLASSES, "PolyquantError"}


@cache
def _error_makers() -> frozenset[str]:
    """The names of all functions and methods that are annotated to make an error."""
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return frozenset(node.name for node in functions if _makes_an_error(node))


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return [Module(path) for path in FILES]


def test_every_error_is_made_with_exactly_the_facts_of_its_text(modules: list[Module]) -> None:
    wrong, made = [], set()
    for module in modules:
        for call in ast.walk(module.tree):
            if not isinstance(call, ast.Call):
                continue
            for cls in module.classes(call.func) or ():
                made.add(cls)
                passed = module.keywords(call)
                if call.args or passed != cls.fields():
                    wrong.append(f"{module.where(call)}: {cls.__name__} of {sorted(passed)}")
    assert wrong == []
    assert sorted(cls.slug for cls in made) == SLUGS, "each class is raised somewhere"


def test_the_walk_sees_what_is_wrong(tmp_path: Path) -> None:
    """The walk itself: a fact too few, too many, behind ** and behind a chosen class."""
    path = tmp_path / "bad.py"
    path.write_text(
        """
def f(g):
    facts = {"op": 1, "left": 2}
    error = ShapeMismatch if g else DeviceMismatch
    raise error(**facts, right=3)

def h():
    raise InvalidAxes(got=1, rank=2, shape=3) from None
"""
    )
    module = Module(path)
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    seen = {tuple(c.slug for c in module.classes(n.func) or ()): module.keywords(n) for n in calls}
    assert seen == {
        ("shape-mismatch", "device-mismatch"): {"op", "left", "right"},
        ("invalid-axes",): {"got", "rank", "shape"},
    }
    with pytest.raises(LookupError):
        module.keys(ast.parse("unknown()", mode="eval").body)


def test_only_errors_of_the_catalogue_are_raised(modules: list[Module]) -> None:
    foreign = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            callee = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if not module.classes(callee) and not module.returns_error(callee):
                foreign[relative(module.path), ast.unparse(callee)] = module.where(node)
    assert {key: where for key, where in foreign.items() if key not in FOREIGN} == {}
    assert set(FOREIGN) <= set(foreign), "an exception to the rule that nothing needs"


def test_no_asserts_and_no_broad_excepts(modules: list[Module]) -> None:
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assert):
                found.append(f"{module.where(node)}: assert")
            if isinstance(node, ast.ExceptHandler):
                names = "" if node.type is None else ast.unparse(node.type)
                if not names or re.search(r"\b(Base)?Exception\b", names):
                    found.append(f"{module.where(node)}: except {names}")
    assert found == []
