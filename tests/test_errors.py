"""The catalogue of errors: records, raise sites, and texts as a user meets them."""

from __future__ import annotations

import ast
import builtins
import copy
import pickle
import re
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
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
    "invalid-name",
    "invalid-scale",
    "invalid-scheme",
    "invalid-tensor",
    "kernel-refused",
    "negative-input",
    "no-kernel",
    "non-finite-input",
    "not-an-array",
    "not-float",
    "nothing-matches",
    "scale-argument",
    "scale-shape",
    "shape-mismatch",
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
    assert set(found) == {*DERIVED, *WRITTEN}
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


# -- raise sites --------------------------------------------------------------------------------

FILES = sorted(SOURCE.rglob("*.py"))
CLASSES = {cls.__name__: cls for cls in CATALOGUE.values()}

#: (file, what it raises) -> why it is none of the catalogue.
FOREIGN = {
    ("qtensor.py", "TypeError"): "what Python itself raises for len() of an array without axes",
    ("files/strict_json.py", "ValueError"): "what json's hooks raise; caught in the same module",
    ("cli/app.py", "typer.Exit"): "typer's way to set the exit status",
    ("cli/compare.py", "typer.Exit"): "typer's way to set the exit status",
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

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The functions and handlers around a node, innermost first, then the module."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.FunctionDef | ast.ExceptHandler | ast.Module):
                yield node

    def assigned(self, name: str, at: ast.AST) -> ast.expr | None:
        """What a name was last assigned before a place, in the innermost function that does."""
        for scope in self.around(at):
            found = [
                node.value
                for node in ast.walk(scope)
                if isinstance(node, ast.Assign)
                and node.lineno <= at.lineno  # type: ignore[attr-defined]
                and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
            ]
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
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in self.functions:
                function = self.functions[node.func.id]
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

    def returns_error(self, callee: ast.expr) -> bool:
        """Whether a callee is a function of this module that is annotated to make an error."""
        if not isinstance(callee, ast.Name) or callee.id not in self.functions:
            return False
        made = self.functions[callee.id].returns
        return made is not None and ast.unparse(made) in {*CLASSES, "PolyquantError"}

    def where(self, node: ast.AST) -> str:
        return f"{relative(self.path)}:{node.lineno}"  # type: ignore[attr-defined]


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
