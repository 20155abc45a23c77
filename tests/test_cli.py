"""The command polyquant: every command, its JSON, its exit codes, and what errors look like."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import polyquant as pq
from polyquant import conform
from polyquant.cli import app, output, system
from polyquant.conform import Result
from polyquant.errors import CATALOGUE
from polyquant.models import checkpoint as quantizing
from polyquant.models.comparison import Verdict

COMMAND = (sys.executable, "-c", "from polyquant.cli import main; main()")
ROOT = Path(__file__).parents[1]


def run(*arguments: Any, code: int = 0) -> Any:
    """Run a command in this process and check its exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def run_json(*arguments: Any, code: int = 0) -> Any:
    result = run(*arguments, "--json", code=code)
    assert result.stderr == ""
    return json.loads(result.stdout, parse_constant=pytest.fail)


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed).standard_normal
    return {
        "embed.weight": draw((50, 64), dtype=np.float32),
        "layers.0.weight": draw((32, 64), dtype=np.float32),
        "layers.0.bias": draw(32, dtype=np.float32),
        "layers.1.weight": draw((16, 32), dtype=np.float32).astype(np.float16),
        "step": np.array(7, dtype=np.int64),
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path, metadata={"format": "pt", "maker": "me"})
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """An index with two files, whose tensors alternate."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    weight_map = {}
    for shard in range(2):
        name = f"model-0000{shard + 1}-of-00002.safetensors"
        inside = dict(list(tensors().items())[shard::2])
        save_file(inside, folder / name)
        weight_map |= dict.fromkeys(inside, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- quantize ---------------------------------------------------------------------------------


def test_quantize_is_pq_quantize_for_every_tensor(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    run("quantize", model, out, "--scheme", "q4s-32", "--calibration", "mse")
    got, given = pq.load(out), tensors()
    assert set(got) == set(given)
    for name in ("embed.weight", "layers.0.weight", "layers.1.weight"):
        assert (
            got[name].to_data() == pq.quantize(given[name], "q4s-32", calibration="mse").to_data()
        )
    for name in ("layers.0.bias", "step"):
        assert got[name].dtype == given[name].dtype
        np.testing.assert_array_equal(got[name], given[name])
    with pq.open_checkpoint(out) as checkpoint:
        assert checkpoint.metadata["maker"] == "me"


def test_quantize_reports_quality_and_sizes(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    form = run_json("quantize", model, out, "--scheme", "nf4")
    by_name = {item["name"]: item for item in form["tensors"]}
    given = tensors()["embed.weight"]
    wanted = pq.measure(given, pq.quantize(given, "nf4"))
    assert by_name["embed.weight"]["quality"] == wanted.to_json()
    assert by_name["embed.weight"]["scheme"] == "u4[nf4]/64:f32"
    assert by_name["layers.0.bias"]["quality"] is None
    assert by_name["layers.0.bias"]["kept"] == "1 axis"
    totals = form["totals"]
    assert (totals["tensors"], totals["quantized"]) == (5, 3)
    assert totals["size_before_bytes"] == sum(x.nbytes for x in tensors().values())
    assert totals["size_after_bytes"] < totals["size_before_bytes"] / 4
    text = run("quantize", model, out, "--scheme", "nf4").stdout
    assert "embed.weight" in text and "2 tensors kept as they were" in text


def test_total_error_is_over_all_elements(model: Path, tmp_path: Path) -> None:
    form = run_json("quantize", model, tmp_path / "out.safetensors", "--scheme", "q2s-32")
    weights = {name: x.astype(np.float64) for name, x in tensors().items() if x.ndim == 2}
    errors = {n: x - pq.quantize(x, "q2s-32").dequantize() for n, x in weights.items()}
    norms = [np.sqrt(sum(np.sum(x**2) for x in part.values())) for part in (errors, weights)]
    assert form["totals"]["relative_error"] == pytest.approx(norms[0] / norms[1], rel=1e-6)


def test_dry_run_writes_nothing_and_tells_the_real_sizes(model: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    out = tmp_path / "out.safetensors"
    planned = run_json("quantize", model, out, "--dry-run")
    text = run("quantize", model, out, "--dry-run").stdout
    assert "nothing was written" in text and "kept (1 axis)" in text
    assert files(tmp_path) == before
    made = run_json("quantize", model, out)
    sizes = [[item["size_after_bytes"] for item in form["tensors"]] for form in (planned, made)]
    assert sizes[0] == sizes[1]


def test_patterns(model: Path, tmp_path: Path) -> None:
    def quantized(*options: str) -> set[str]:
        form = run_json("quantize", model, tmp_path / "out.safetensors", "--dry-run", *options)
        return {item["name"] for item in form["tensors"] if item["scheme"]}

    weights = {"embed.weight", "layers.0.weight", "layers.1.weight"}
    assert quantized() == weights
    assert quantized("--exclude", "embed*") == weights - {"embed.weight"}
    assert quantized("--include", "layers.0.*") == {"layers.0.weight"}
    assert quantized("--include", "layers.0.bias") == {"layers.0.bias"}
    assert quantized("--include", "layers.*", "--exclude", "*.bias", "--exclude", "*.1.*") == {
        "layers.0.weight"
    }
    assert (
        "nothing-matches"
        in run(
            "quantize", model, tmp_path / "out.safetensors", "--include", "decoder.*", code=2
        ).stderr
    )


def test_what_is_quantized_already_is_kept(model: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    run("quantize", model, first, "--include", "embed*")
    form = run_json("quantize", first, second, "--scheme", "q8s-32")
    kept = {item["name"]: item["kept"] for item in form["tensors"]}
    assert kept["embed.weight"] == "quantized already"
    assert pq.load(second)["embed.weight"].to_data() == pq.load(first)["embed.weight"].to_data()
    assert str(pq.load(second)["layers.0.weight"].scheme) == "q8s/32:f16"


def test_a_sharded_checkpoint_keeps_its_shards(sharded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    run("quantize", sharded, folder / "small.safetensors.index.json")
    shards = [f"small-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert files(folder) == {*shards, "small.safetensors.index.json"}
    with pq.open_checkpoint(folder / shards[0]) as first, pq.open_checkpoint(folder) as whole:
        assert set(first) == set(list(tensors())[0::2])
        assert set(whole) == set(tensors())
    run("quantize", sharded, tmp_path / "one.safetensors")
    run("compare", folder, tmp_path / "one.safetensors")


def test_npz_is_read_too(tmp_path: Path) -> None:
    source, out = tmp_path / "model.npz", tmp_path / "out.safetensors"
    np.savez(source, **tensors())
    run("quantize", source, out)
    assert pq.is_quantized(pq.load(out)["embed.weight"])


@pytest.mark.parametrize("name", ["out.bin", "out"])
def test_out_must_be_safetensors(model: Path, tmp_path: Path, name: str) -> None:
    assert "invalid-argument" in run("quantize", model, tmp_path / name, code=2).stderr
    assert files(tmp_path) == {"model.safetensors"}


def test_out_may_not_be_in(model: Path, sharded: Path, tmp_path: Path) -> None:
    before = model.read_bytes()
    assert "another file" in run("quantize", model, model, code=2).stderr
    assert model.read_bytes() == before
    assert "another file" in run("quantize", sharded, sharded, code=2).stderr
    assert "another file" in run("quantize", sharded.parent, sharded, code=2).stderr
    index = model.with_name("model.safetensors.index.json")  # would replace model.safetensors
    assert "another file" in run("quantize", model, index, code=2).stderr
    assert files(tmp_path) == {"model.safetensors", "sharded"}


@pytest.mark.parametrize("kind", ["one file", "shards"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, pq.errors.NonFiniteInput])
def test_a_stop_leaves_no_file(
    model: Path, sharded: Path, tmp_path: Path, monkeypatch: Any, kind: str, error: Any
) -> None:
    calls = []

    def stop(x: Any, scheme: Any, **keywords: Any) -> Any:
        calls.append(x)
        if len(calls) == 2:
            is_ours = issubclass(error, pq.errors.PolyquantError)
            facts = {"shape": (1,), "count": 1, "index": (0,), "value": 0.0}
            raise error(**facts) if is_ours else error
        return pq.quantize(x, scheme, **keywords)

    monkeypatch.setattr(quantizing, "quantize", stop)
    source, suffix = (model, "") if kind == "one file" else (sharded, ".index.json")
    folder = tmp_path / "out"
    folder.mkdir()
    out = folder / f"out.safetensors{suffix}"
    code = {KeyboardInterrupt: 130, MemoryError: 1}.get(error, 2)
    run("quantize", source, out, code=code)
    assert len(calls) == 2 and files(folder) == set()


# -- inspect ----------------------------------------------------------------------------------


def test_inspect(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    run("quantize", model, out)
    form = run_json("inspect", out)
    by_name = {item["name"]: item for item in form["tensors"]}
    assert by_name["embed.weight"]["scheme"] == "u4[nf4]/64:f32"
    assert by_name["embed.weight"]["dtype"] is None
    assert by_name["embed.weight"]["shape"] == [50, 64]
    assert by_name["step"]["dtype"] == "int64"
    assert form["metadata"] == {"maker": "me"}
    assert sum(item["tensors"] for item in form["totals"]) == len(tensors())
    text = run("inspect", out).stdout
    for word in ("embed.weight", "50 x 64", "u4[nf4]/64:f32", "int64", "scalar", "maker: me"):
        assert word in text


def test_inspect_a_missing_file_and_a_damaged_one(tmp_path: Path) -> None:
    assert "unreadable-file" in run("inspect", tmp_path / "no.safetensors", code=2).stderr
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"\xff" * 64)
    assert "invalid-header" in run("inspect", damaged, code=2).stderr


def test_an_empty_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    save_file({}, path)
    assert run_json("inspect", path)["tensors"] == []
    run("inspect", path)
    assert run_json("quantize", path, tmp_path / "out.safetensors")["totals"]["tensors"] == 0
    run("quantize", path, tmp_path / "out.safetensors")


# -- compare ----------------------------------------------------------------------------------


def test_compare_equal(model: Path) -> None:
    form = run_json("compare", model, model)
    assert {item["verdict"] for item in form["tensors"]} == {"equal bits"}
    assert form["differ"] == 0
    assert "5 equal bits" in run("compare", model, model).stdout


def test_compare_values_and_tolerance(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    run("quantize", model, out, "--scheme", "q8s-32")
    form = run_json("compare", model, out, code=1)
    by_name = {item["name"]: item for item in form["tensors"]}
    x = tensors()["embed.weight"]
    wanted = pq.measure(x, pq.quantize(x, "q8s-32"))
    assert by_name["embed.weight"]["verdict"] == "different"
    assert by_name["embed.weight"]["relative_error"] == pytest.approx(wanted.relative_error)
    assert by_name["embed.weight"]["sqnr_db"] == pytest.approx(wanted.sqnr_db)
    assert by_name["embed.weight"]["max_error"] == pytest.approx(wanted.max_error)
    assert by_name["step"]["verdict"] == "equal bits" and by_name["step"]["sqnr_db"] is None
    run("compare", model, out, "--tolerance", "0.02")
    assert (
        "beyond the tolerance" in run("compare", model, out, "--tolerance", "0.001", code=1).stdout
    )


def test_compare_missing_and_shapes(model: Path, tmp_path: Path) -> None:
    other = tensors()
    other["extra"] = other.pop("step")
    other["layers.0.bias"] = other["layers.0.bias"][:5]
    save_file(other, tmp_path / "other.safetensors")
    form = run_json("compare", model, tmp_path / "other.safetensors", "--tolerance", "9", code=1)
    verdicts = {item["name"]: item["verdict"] for item in form["tensors"]}
    assert verdicts["step"] == "only in first" and verdicts["extra"] == "only in second"
    assert verdicts["layers.0.bias"] == "shapes differ"
    assert form["differ"] == 3
    run("compare", model, tmp_path / "other.safetensors", code=1)


def test_compare_same_values_in_other_bits(model: Path, tmp_path: Path) -> None:
    x = pq.quantize(tensors()["embed.weight"], "q4s-32")
    pq.save(tmp_path / "a.safetensors", {"w": x, "z": np.zeros(4, np.float32)})
    pq.save(tmp_path / "b.safetensors", {"w": x.dequantize(), "z": -np.zeros(4, np.float32)})
    form = run_json("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert {item["verdict"] for item in form["tensors"]} == {Verdict.EQUAL_VALUES}


def test_compare_files_that_need_to_be_told(tmp_path: Path) -> None:
    """A file of bare GPTQ arrays with its config elsewhere, and the same as plain arrays."""
    ones = {"l.qweight": np.full((4, 32), 0x11111111, np.int32)}
    ones |= {"l.qzeros": np.zeros((1, 4), np.int32), "l.scales": np.ones((1, 32), np.float32)}
    save_file(ones, tmp_path / "a.safetensors")
    save_file({"l.weight": np.ones((32, 32), np.float32)}, tmp_path / "b.safetensors")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    (tmp_path / "config.txt").write_text(json.dumps(config))
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    told = ("--format-b", "safetensors")
    for said in (json.dumps(config), tmp_path / "config.txt"):
        form = run_json("compare", *paths, "--config-a", said, *told)
        assert [item["verdict"] for item in form["tensors"]] == [Verdict.EQUAL_VALUES]
    form = run_json("compare", *reversed(paths), "--config-b", json.dumps(config))
    assert form["differ"] == 0


def test_compare_nan_is_a_difference(tmp_path: Path) -> None:
    for name, value in (("a", np.nan), ("b", 1.0)):
        save_file({"w": np.full(3, value, np.float32)}, tmp_path / f"{name}.safetensors")
    paths = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    form = run_json("compare", *paths, "--tolerance", "5", code=1)
    assert form["tensors"][0]["relative_error"] is None
    run("compare", paths[0], paths[0])


# -- sweep ------------------------------------------------------------------------------------


def test_sweep(model: Path, tmp_path: Path) -> None:
    table = tmp_path / "sweep.csv"
    form = run_json("sweep", model, "--schemes", "q8s-32, nf4,q2s/32:f16", "--csv", table)
    points = {item["name"]: item for item in form["points"]}
    assert list(points) == ["q8s-32", "nf4", "q2s/32:f16"]
    assert points["q8s-32"]["relative_error"] < points["nf4"]["relative_error"]
    assert points["q8s-32"]["bits_per_element"] == pytest.approx(8.5)
    assert form["tensors"] == ["embed.weight", "layers.0.weight", "layers.1.weight"]
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == list(points)
    assert all(float(r["relative_error"]) == points[r["name"]]["relative_error"] for r in rows)
    assert "q2s/32:f16" in run("sweep", model, "--schemes", "nf4,q2s/32:f16").stdout


def test_sweep_over_all_presets(model: Path) -> None:
    form = run_json("sweep", model, "--limit", "1")
    assert form["tensors"] == ["embed.weight"]
    schemes = [item["scheme"] for item in form["points"]]
    assert len(schemes) == len(set(schemes)) == len(set(map(str, pq.presets().values())))
    best = [item for item in form["points"] if item["on_front"]]
    for item in form["points"]:
        beats = [
            b["bits_per_element"] <= item["bits_per_element"]
            and b["relative_error"] <= item["relative_error"]
            for b in best
        ]
        assert any(beats)


def test_sweep_goes_on_where_a_scheme_refuses(model: Path) -> None:
    arguments = ("sweep", model, "--schemes", "u4/32:f16,q4s-32")
    refused, measured = run_json(*arguments)["points"]
    assert "negative-input" in refused["refused"] and refused["relative_error"] is None
    assert measured["refused"] is None
    assert "negative" in run(*arguments).stdout


def test_sweep_draws_a_plot(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "sweep.png"
    run("sweep", model, "--schemes", "nf4,q4s-32,q8s-32", "--png", plot)
    content = plot.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    assert files(tmp_path) == {"model.safetensors", "sweep.png"}


def test_sweep_without_matplotlib_says_what_to_install(
    model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("sweep", model, "--schemes", "nf4", "--png", tmp_path / "a.png", code=2)
    assert "pip install 'polyquant[report]'" in result.stderr
    assert files(tmp_path) == {"model.safetensors"}


def test_sweep_into_a_folder_that_is_not_there(model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "a.csv"
    assert (
        "write-failed" in run("sweep", model, "--schemes", "nf4", "--csv", missing, code=2).stderr
    )


# -- devices, explain, conform ----------------------------------------------------------------


def test_devices() -> None:
    form = run_json("devices")
    assert {k: form[0][k] for k in ("name", "usable")} == {"name": "numpy", "usable": True}
    assert "numpy" in run("devices").stdout


def test_explain_lists_and_shows() -> None:
    assert [item["slug"] for item in run_json("explain")] == sorted(CATALOGUE)
    assert all(slug in run("explain").stdout for slug in ("block-rank", "unknown-slug"))
    form = run_json("explain", "backend-mismatch")
    assert form["slug"] == "backend-mismatch" and form["errorType"] == "TypeError"
    assert "What to do" in run("explain", "backend-mismatch").stdout
    assert "Did you mean 'backend-mismatch'" in run("explain", "backend-mismatc", code=2).stderr


def _result(**changes: Any) -> Result:
    good = Result("dequantize", "q4s/32:f16", "normal (3, 70)", True, "", "numpy.definition")
    return good._replace(**changes)


def _fake_conform(monkeypatch: Any, *results: Result) -> list[Any]:
    seen: list[Any] = []

    def checks(
        device: str, *, quick: bool = False, schemes: Any = (), jobs: int = 1
    ) -> Iterator[Result]:
        seen.append((device, quick, list(schemes)))
        yield from results

    monkeypatch.setattr(system, "checks", checks)
    return seen


def test_conform_takes_blocks_of_many_axes() -> None:
    for more in (["--quick"], []):
        text = run("conform", "--device", "numpy", "--scheme", "q4s/2x2x2x8:f16", *more).stdout
        assert "conforms" in text


def test_conform_exits_with_its_verdict(monkeypatch: Any) -> None:
    seen = _fake_conform(monkeypatch, _result(), _result(what="quantize"))
    form = run_json("conform", "--device", "torch:cpu", "--quick")
    assert (form["checks"], form["failed"]) == (2, 0)
    assert form["results"][0]["kernel"] == "numpy.definition"
    run("conform", "--scheme", "nf4", "--scheme", "q3s/16:f16")
    assert seen == [("torch:cpu", True, []), ("numpy", False, ["nf4", "q3s/16:f16"])]
    assert "conforms: 2 of 2 checks" in run("conform").stdout
    _fake_conform(monkeypatch, _result(), _result(passed=False, detail="3 codes differ"))
    text = run("conform", code=1).stdout
    assert "does not conform: 1 of 2 checks" in text and "3 codes differ" in text
    assert "dequantize, numpy.definition: normal (3, 70) as q4s/32:f16" in text
    assert run_json("conform", code=1)["failed"] == 1


def test_conform_quick_on_numpy() -> None:
    form = run_json("conform", "--quick")
    assert form["checks"] > 50 and form["failed"] == 0
    form = run_json("conform", "--quick", "--scheme", "nf4", "--scheme", "q5f/2x3x4:f16")
    assert {r["scheme"] for r in form["results"]} == {"u4[nf4]/64:f32", "q5f/2x3x4:f16"}
    assert form["failed"] == 0
    more = ("--quick", "--scheme", "nf4", "--scheme", "q5f/2x3x4:f16", "--jobs", "2")
    assert run_json("conform", *more) == form
    assert "unknown-scheme" in run("conform", "--scheme", "nf5", code=2).stderr
    assert run("conform", "--device", "torch:gpu", code=2).stdout == ""


@pytest.mark.parametrize("jobs", [0, -1, 2.5, "2"])
def test_conform_wants_a_number_of_jobs(jobs: Any) -> None:
    with pytest.raises(pq.errors.InvalidArgument, match="jobs must be at least 1"):
        next(conform.checks("numpy", jobs=jobs))


def test_who_stops_conform_waits_for_no_more_than_began(monkeypatch: Any) -> None:
    asked: list[Future[list[Result]]] = []

    class Pool(nullcontext[Any]):
        def __init__(self, jobs: int, context: Any) -> None:
            super().__init__(self)
            assert jobs == 2

        def submit(self, *_: Any) -> Future[list[Result]]:
            asked.append(Future())
            return asked[-1]

    monkeypatch.setattr(conform, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(Future, "result", lambda self: [_result()])
    found = conform.checks("numpy", schemes=("q4s", "nf4"), jobs=9)
    next(found)
    found.close()
    assert len(asked) == 2 and all(each.cancelled() for each in asked)


# -- errors, help, exit codes -----------------------------------------------------------------


def test_errors_name_their_slug_and_have_no_traceback(model: Path, tmp_path: Path) -> None:
    wrong = ("quantize", model, tmp_path / "out.safetensors", "--scheme", "nf5")
    result = run(*wrong, code=2)
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert "'nf5' is not a scheme" in result.stderr
    assert "polyquant explain unknown-scheme" in result.stderr
    assert run(*wrong, "--json", code=2).stdout == ""
    debugged = run("--debug", *wrong, code=2)
    assert "Traceback (most recent call last)" in debugged.stderr
    assert "polyquant explain unknown-scheme" in debugged.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("quantise",),
        ("quantize",),
        ("inspect", "a", "b"),
        ("compare", "a", "b", "--tolerance", "-1"),
        ("sweep", "a", "--limit", "0"),
        ("quantize", "a", "b", "--no-such-option"),
    ],
)
def test_wrong_calls_exit_with_2(arguments: tuple[str, ...]) -> None:
    run(*arguments, code=2)


@pytest.mark.parametrize(
    "command", ["quantize", "inspect", "compare", "sweep", "devices", "explain", "conform"]
)
def test_help_has_an_example(command: str) -> None:
    assert f"Example: polyquant {command}" in " ".join(run(command, "--help").stdout.split())
    assert command in run("--help").stdout


def test_version() -> None:
    assert run("--version").stdout == f"polyquant {pq.__version__}\n"


# -- in a process of its own ------------------------------------------------------------------


def _process(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_process_json_and_exit_codes(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    good = _process("quantize", model, out, "--json")
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["output"] == str(out)
    assert _process("compare", model, out, "--json").returncode == 1
    bad = _process("inspect", tmp_path / "missing.safetensors")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "unreadable-file" in bad.stderr and "Traceback" not in bad.stderr


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    save_file({f"layers.{i}.weight": np.zeros((2, 2), np.float32) for i in range(5000)}, path)
    for option, first in (("--json", "{"), ("", "Tensor")):
        command = " ".join(f"'{part}'" for part in (*COMMAND, "inspect", path))
        found = subprocess.run(
            ["bash", "-c", f"{command} {option} | head -1"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.startswith(first) and found.stdout.count("\n") == 1
        assert found.stderr == ""


def _memory_benchmark() -> Any:
    path = ROOT / "benchmarks" / "memory.py"
    spec = importlib.util.spec_from_file_location("memory_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_memory_follows_the_largest_tensor_and_not_the_file() -> None:
    measure = _memory_benchmark().measure
    found = measure(gigabytes=0.32, tensor_megabytes=8, shards=2, scheme="q4s-32")
    least = measure(gigabytes=0.008, tensor_megabytes=8, shards=1, scheme="q4s-32")
    assert found["file_bytes"] > 300e6
    for kind in ("peak_anonymous_bytes", "peak_resident_bytes"):
        assert found[kind] - least[kind] < 0.1 * found["file_bytes"], kind
    assert found["peak_anonymous_bytes"] < 0.5 * found["file_bytes"]


@pytest.mark.skipif(sys.platform != "linux", reason="sends SIGINT to a process")
def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    names = [f"layers.{i}.weight" for i in range(60)]
    _memory_benchmark().write_checkpoint(source, names, 64, 256)
    # What a shell starts in the background ignores SIGINT, and so does what that starts.
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    slowly = (  # so that it cannot end before it is stopped
        "import time, polyquant.models.checkpoint as c; run = c.quantize; "
        "c.quantize = lambda *a, **k: time.sleep(0.1) or run(*a, **k); "
    )
    python, flag, code = COMMAND
    command = [
        python,
        flag,
        listening + slowly + code,
        "quantize",
        str(source),
        str(tmp_path / "out.safetensors"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while files(tmp_path) == {source.name} and time.monotonic() < deadline:
        time.sleep(0.01)  # until it has begun to write
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopped" in errors and "Traceback" not in errors
    assert files(tmp_path) == {source.name}


# -- words and numbers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (1234, "1.23 kB"),
        (11_720_448, "11.7 MB"),
        (999_600, "1.00 MB"),
        (123_456_789, "123 MB"),
        (4_000_000_000, "4.00 GB"),
        (7_000_000_000_000, "7000 GB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert output.size(size_bytes) == text


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (45, "encoder.layer.10.attention.self.query.weight"),
        (36, "e.l.10.attention.self.query.weight"),
        (20, "e.l.10.a.s.q.weight"),
        (12, "e.l.1…weight"),
    ],
)
def test_names_give_way_from_the_left(width: int, text: str) -> None:
    assert output.shortened("encoder.layer.10.attention.self.query.weight", width) == text


def test_files_of_the_original_are_untouched(model: Path, tmp_path: Path) -> None:
    run("quantize", model, tmp_path / "out.safetensors")
    for name, x in tensors().items():
        np.testing.assert_array_equal(load_file(model)[name], x)
