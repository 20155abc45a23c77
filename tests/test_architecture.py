"""The shape of the source, as ARCHITECTURE.md draws it: who imports whom, what may not be there."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest

import polyquant

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "polyquant"
FILES = sorted(SOURCE.rglob("*.py"))

#: From the bottom up; what stands on one line are siblings. A room is a file or a folder of the
#: package; "polyquant" is its __init__, the public face.
LAYERS = (
    ("errors",),
    ("values", "arrays"),
    ("tables", "presets", "calls"),
    ("fields",),
    ("grammar",),
    ("scheme",),
    ("codec", "blocks", "arithmetic"),
    ("data", "methods"),
    ("qtensor",),
    ("standard", "kernel"),
    ("views",),
    ("calibrate",),
    ("backends",),
    ("dispatch",),
    ("inputs",),
    ("ops",),
    ("files",),
    ("formats", "quality", "tree", "conform"),
    ("models", "report", "torch", "jax"),
    ("polyquant",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

#: (file, room) of the imports that go up, each with its reason beside it.
DOORS = {
    # The tensor's methods and operators are operations, which are built on the tensor.
    ("methods/door.py", "ops"),
    # torch.compile reads operations of its own, which are built on these.
    ("ops/compiled.py", "torch"),
}

#: Library -> the folders that may name it in an import: its backend, and its users' own door.
LIBRARIES = {
    "torch": ("backends/torch/", "torch/"),
    "jax": ("backends/jax/", "jax/"),
    "jaxlib": ("backends/jax/",),
    "triton": ("backends/torch/cuda/",),
    "cuda": ("backends/nvidia/", "backends/torch/cuda/"),
    "matplotlib": ("report/",),
}

#: Folders whose parts are siblings, and what all of a folder's parts may stand on.
FOLDERS_OF_SIBLINGS = MappingProxyType(
    {"backends": ("definition", "native", "nvidia"), "formats": ()}
)

VAGUE = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}
FILE_LINES = 600
FUNCTION_LINES = 60


def _name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def _room(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "polyquant" if first == "__init__" else first


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(path: Path) -> Iterator[tuple[str, ...]]:
    """The dotted names that a file imports, also inside functions, split at the dots."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno} imports relatively"
            module = tuple((node.module or "").split("."))
            for alias in node.names:
                yield (*module, alias.name)


def _own_imports(path: Path) -> Iterator[tuple[str, ...]]:
    """What a file imports of this package: the room, then what is below it."""
    for name in _imports(path):
        if name[0] == "polyquant":
            yield name[1:] if len(name) > 1 and name[1] in LEVEL else ("polyquant", *name[1:])


@pytest.fixture(params=FILES, ids=_name)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


# -- layers -----------------------------------------------------------------------------------


def test_every_file_has_a_room_and_every_room_a_file() -> None:
    assert {_room(path) for path in FILES} == set(LEVEL)


def test_imports_go_down(path: Path) -> None:
    room = _room(path)
    for other, *_ in _own_imports(path):
        if other == room or (_name(path), other) in DOORS:
            continue
        assert LEVEL[other] < LEVEL[room], f"{_name(path)} ({room}) imports {other}"


def test_doors_are_used_and_late() -> None:
    for name, room in DOORS:
        at_import = [
            node.module
            for node in _tree(SOURCE / name).body
            if isinstance(node, ast.ImportFrom) and node.module
        ]
        assert f"polyquant.{room}" not in at_import
        assert room in {found[0] for found in _own_imports(SOURCE / name)}


@pytest.mark.parametrize("folder", FOLDERS_OF_SIBLINGS)
def test_parts_of_a_folder_do_not_import_each_other(folder: str) -> None:
    for path in sorted((SOURCE / folder).rglob("*.py")):
        part = path.relative_to(SOURCE / folder).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for room, *below in _own_imports(path):
            if room == folder and below:
                allowed = (part, *FOLDERS_OF_SIBLINGS[folder])
                assert below[0] in allowed, f"{_name(path)} imports {folder}.{below[0]}"


def test_each_library_has_one_room(path: Path) -> None:
    for name in _imports(path):
        if name[0] in LIBRARIES:
            assert _name(path).startswith(LIBRARIES[name[0]]), f"{_name(path)} imports {name[0]}"


def test_importing_loads_no_other_library() -> None:
    code = "import polyquant, sys; print(sorted({'torch', 'jax', 'matplotlib'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# -- what may not be there --------------------------------------------------------------------


def test_no_vague_names(path: Path) -> None:
    assert not VAGUE & {part.removesuffix(".py") for part in path.relative_to(SOURCE).parts}


def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = _lines_without_docstring(node)
            assert size <= FUNCTION_LINES, f"{_name(path)}:{node.lineno} {node.name}: {size} lines"


def _lines_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    has_docstring = ast.get_docstring(node, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def test_no_mutable_module_globals(path: Path) -> None:
    mutable = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    constructors = {"dict", "list", "set", "defaultdict", "OrderedDict", "deque", "bytearray"}
    for node in _tree(path).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            continue
        value = node.value
        called = value.func if isinstance(value, ast.Call) else None
        is_constructor = isinstance(called, ast.Name) and called.id in constructors
        assert not isinstance(value, mutable) and not is_constructor, (
            f"{_name(path)}:{node.lineno} is mutable; use MappingProxyType, a tuple or a frozenset"
        )


def test_no_assert_no_print_no_broad_except(path: Path) -> None:
    for node in ast.walk(_tree(path)):
        where = f"{_name(path)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), f"{where} asserts; raise an error of the catalogue"
        assert not isinstance(node, ast.Global), f"{where} has a global statement"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{where} catches everything"
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
            assert not caught & {"Exception", "BaseException"}, f"{where} catches everything"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{where} prints"


# -- the public face --------------------------------------------------------------------------


def _public() -> list[typing.Any]:
    things = [getattr(polyquant, name) for name in polyquant.__all__]
    return [thing for thing in things if inspect.isfunction(thing) or inspect.isclass(thing)]


@pytest.mark.parametrize("thing", _public(), ids=lambda thing: thing.__name__)
def test_public_things_are_documented_and_annotated(thing: typing.Any) -> None:
    own = [thing]
    if inspect.isclass(thing):
        own += [
            member
            for name, member in vars(thing).items()
            if inspect.isfunction(member) and not name.startswith("_")
        ]
    for item in own:
        assert (item.__doc__ or "").strip(), f"{item.__qualname__} has no docstring"
        if inspect.isfunction(item):
            parameters = list(inspect.signature(item).parameters)
            wanted = {*parameters, "return"} - {"self", "cls"}
            missing = wanted - set(item.__annotations__)
            assert not missing, f"{item.__qualname__} does not annotate {sorted(missing)}"


def test_all_is_sorted_and_complete() -> None:
    assert list(polyquant.__all__) == sorted(polyquant.__all__)
    for name in polyquant.__all__:
        assert hasattr(polyquant, name)


# -- the repository ---------------------------------------------------------------------------


def _tracked() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    paths = [ROOT / name for name in found.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_tracked_files_name_no_path_of_one_machine() -> None:
    machine = re.compile(rb"(?<![\w.~-])/(?:work|tmp|root|home|mnt|Users)/\w")
    hits = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _tracked()
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if machine.search(line)
    ]
    assert not hits
