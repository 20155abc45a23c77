"""Converting checkpoints: exactly where the target can hold them, else only when asked to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import polyquant as pq
from peers import decoded, fixture, names
from polyquant.cli.app import app
from polyquant.errors import (
    InvalidArgument,
    InvalidName,
    NotExact,
    UnknownName,
    UnsupportedDtype,
    WriteFailed,
)
from polyquant.formats import WRITERS, TensorInfo, Writer
from polyquant.models import resumable
from polyquant.models.conversion import plan
from polyquant.models.targets import target_of, variants_of

VALUES = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)


def convert(source: Path, out: Path, to: str, **options: Any) -> list[Any]:
    opened, target = resumable.Source(source, options.pop("format", None)), target_of(to)
    if "config" in options:
        opened = resumable.Source(source, opened.format, options.pop("config"))
    asked = {"requantize": options.pop("requantize", False)}
    with opened.open() as checkpoint:
        steps = plan(checkpoint, target, **asked)
    return resumable.run(opened, target, out, steps, **options)


def saved(path: Path, **schemes: str) -> Path:
    tensors: dict[str, Any] = {
        f"{name}.weight": pq.quantize(VALUES * (i + 1), scheme)
        for i, (name, scheme) in enumerate(schemes.items())
    }
    pq.save(path, tensors | {"norm": VALUES[0]}, metadata={"by": "a test"})
    return path


def assert_same_values(first: Path, second: Path) -> None:
    with pq.open_checkpoint(first) as a, pq.open_checkpoint(second) as b:
        assert set(a) == set(b)
        for name in a:
            np.testing.assert_array_equal(decoded(a[name]), decoded(b[name]))


EXACT = [
    ("gguf", "q4f/32:f16"),
    ("gguf", "q4s/32:f16"),  # symmetric codes are full ones
    ("gguf", "q8f/32:f16@native"),
    ("gguf", "u4/32:(u6/8:f16)+bias:(u6/8:f16)"),
    ("gguf", "e2m1/32:ue8m0@packed_native"),
    ("mlx", "u4/32:f16+bias:f16"),
    ("mlx", "e2m1/32:ue8m0"),
    ("gptq", "q4s/128:f16"),
    ("gptq", "u8/64:f16-zero:u8"),
    ("compressed-tensors", "q4s/128:bf16"),
    ("compressed-tensors", "u4/64:f16-zero:u4"),
    ("bitsandbytes", "nf4"),
    ("burnpack", "q8s/32:f16"),
    ("burnpack", "nvfp4"),
]


@pytest.mark.parametrize(("format", "scheme"), EXACT)
def test_there_and_back(format: str, scheme: str, tmp_path: Path) -> None:
    suffix = {"gguf": "gguf", "burnpack": "bpk"}.get(format, "safetensors")
    source = saved(tmp_path / "a.safetensors", l=scheme)
    there = tmp_path / f"there.{suffix}"
    done = convert(source, there, format)
    assert all(each.quality is None for each in done)
    with pq.open_checkpoint(there) as ck:
        assert ck.format == format
    assert_same_values(source, there)
    convert(there, tmp_path / "back.safetensors", "safetensors")
    assert_same_values(source, tmp_path / "back.safetensors")
    with pq.open_checkpoint(tmp_path / "back.safetensors") as ck:
        assert ck.metadata["by"] == "a test"


def test_gguf_by_way_of_safetensors_is_the_same_file(tmp_path: Path) -> None:
    name = names("gguf")[0]
    if name == "":
        pytest.skip("no fixtures")
    for name in ("gguf/mixed_q4_k_m", "gguf/iq2_xs", "gguf/tq1_0", "gguf/nvfp4_with_scale_tensor"):
        source = fixture(name).path
        convert(source, tmp_path / "x.safetensors", "safetensors")
        convert(tmp_path / "x.safetensors", tmp_path / "x.gguf", "gguf")
        assert (tmp_path / "x.gguf").read_bytes() == source.read_bytes()


CHAINS = [
    ("gptq/w4_g128_sym_v1", "compressed-tensors"),
    ("gptq/w4_g32_desc_act_v1", "compressed-tensors"),
    ("awq/gemm_g32_no_zero_point", "gptq"),
    ("compressed-tensors/pack_w4_g32_asym", "gptq"),
    ("compressed-tensors/mxfp4_a16", "mlx"),
    ("gpt-oss-mxfp4/experts", "gguf"),
    ("modelopt/mxfp4", "compressed-tensors"),
    ("gguf/q4_1", "mlx"),
    ("gguf/mxfp4", "compressed-tensors"),
    ("bitsandbytes/nf4_bs64_nested", "safetensors"),
]


@pytest.mark.parametrize(("name", "format"), CHAINS)
def test_between_other_tools_without_loss(name: str, format: str, tmp_path: Path) -> None:
    if names("gguf")[0] == "":
        pytest.skip("no fixtures")
    made = fixture(name)
    out = tmp_path / ("x.gguf" if format == "gguf" else "x.safetensors")
    convert(made.path, out, format, config=made.config)
    with made.open() as a, pq.open_checkpoint(out) as b:
        for tensor in a:
            np.testing.assert_array_equal(decoded(a[tensor]), decoded(b[tensor]))


# -- loss -------------------------------------------------------------------------------------


def test_loss_is_refused_and_told(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "a.safetensors", l="nf4"), tmp_path / "x.gguf"
    with pytest.raises(NotExact, match=r"1 of 2 .*'l.weight'.*gguf:VARIANT --requantize"):
        convert(source, out, "gguf")
    with pytest.raises(NotExact, match="Pass --requantize"):
        convert(source, out, "gguf:Q4_0")
    assert not out.exists()
    done = convert(source, out, "gguf:Q4_0", requantize=True)
    loss = {each.conversion.name: each.quality for each in done}
    assert loss["norm"] is None and 0.05 < loss["l.weight"].relative_error < 0.15
    with pq.open_checkpoint(out) as ck:
        assert str(ck.info("l.weight").scheme) == "q4f/32:f16"


@pytest.mark.parametrize("format", WRITERS)
def test_every_variant_can_be_made(format: str, tmp_path: Path) -> None:
    pq.save(tmp_path / "a.safetensors", {"l.weight": VALUES, "norm": VALUES[0]})
    suffix = {"gguf": "gguf", "burnpack": "bpk"}.get(format, "safetensors")
    for variant, text in variants_of(format).items():
        out = tmp_path / f"x.{suffix}"
        done = convert(tmp_path / "a.safetensors", out, f"{format}:{variant}", requantize=True)
        with pq.open_checkpoint(out) as ck:
            assert ck.info("l.weight").scheme is not None, text
            error = np.linalg.norm(decoded(ck["l.weight"]) - VALUES) / np.linalg.norm(VALUES)
            assert done[0].quality is not None
            assert error == pytest.approx(done[0].quality.relative_error, rel=1e-3)


def test_targets_that_do_not_exist() -> None:
    for text in ("awq", "ggml", "gguf:Q9", "gptq:", ""):
        with pytest.raises(UnknownName):
            target_of(text)


@pytest.mark.parametrize(
    ("to", "name"), [("gguf", "x.safetensors"), ("mlx", "x.gguf"), ("burnpack", "x.bpk.index")]
)
def test_names_that_a_format_does_not_have(to: str, name: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a.safetensors", l="e2m1/32:ue8m0")
    with pytest.raises(InvalidArgument, match="ends in"):
        convert(source, tmp_path / name, to)
    with pytest.raises(InvalidArgument, match="another file"):
        convert(source, source, "safetensors")


@pytest.mark.parametrize("to", ["gguf", "burnpack", "mlx", "safetensors"])
@pytest.mark.parametrize("bad", ["a name", "a text"])
def test_what_is_no_text_is_refused(to: str, bad: str, tmp_path: Path) -> None:
    target, half = target_of(to), "\udcff"
    plan = [TensorInfo.plain(half if bad == "a name" else "x", (1,), "float32")]
    metadata = {"k": half} if bad == "a text" else {}
    if (to, bad) == ("gguf", "a text"):
        return  # which holds any bytes there
    open_writer = Writer if target.is_own else target.open_writer
    with pytest.raises(InvalidName):
        open_writer(tmp_path / "x.safetensors", plan, metadata=metadata)


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "a.safetensors", l="q4f/32:f16")

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise WriteFailed(path="x", reason="the disk is full", kept="Nothing")

    monkeypatch.setattr(resumable, "convert", broken)
    with pytest.raises(WriteFailed):
        convert(source, tmp_path / "x.gguf", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


# -- shards -----------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    tensors = {f"l{i}.weight": pq.quantize(VALUES * (i + 1), "q4f/32:f16") for i in range(4)}
    pq.save(folder / "m.safetensors", tensors, shard_size_bytes=10_000, metadata={"by": "a test"})
    (folder / "config.json").write_text(json.dumps({"model_type": "x"}))
    return folder


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("to", ["safetensors", "gptq"])
def test_shards_in_parallel(sharded: Path, tmp_path: Path, to: str, jobs: int) -> None:
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "n.safetensors.index.json"
    done = convert(sharded, out, to, jobs=jobs)
    assert sorted(each.conversion.name for each in done) == [f"l{i}.weight" for i in range(4)]
    files = sorted(path.name for path in out.parent.iterdir())
    shards = [f"n-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    config = ["config.json"] if to == "gptq" else []
    assert files == sorted([*config, *shards, out.name])
    assert_same_values(sharded, out.parent)
    if config:
        found = json.loads((out.parent / "config.json").read_text())
        assert found["model_type"] == "x"
        assert found["quantization_config"]["quant_method"] == "gptq"


def test_shards_of_other_schemes_have_one_config(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        f"l{i}.weight": pq.quantize(VALUES, scheme)
        for i, scheme in enumerate(("q4f/32:f16", "q8f/32:f16", "e2m1/32:ue8m0"))
    }
    for folder in ("in", "out"):
        (tmp_path / folder).mkdir()
    pq.save(tmp_path / "in" / "m.safetensors", tensors | {"n": VALUES}, shard_size_bytes=9000)
    out = tmp_path / "out" / "n.safetensors.index.json"
    convert(tmp_path / "in", out, "compressed-tensors", jobs=2)
    assert_same_values(tmp_path / "in", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert [g["targets"] for g in config["config_groups"].values()] == [["l0"], ["l1"], ["l2"]]
    (tmp_path / "out" / "config.json").unlink()  # every shard has it too
    assert_same_values(tmp_path / "in", tmp_path / "out")
    tensors = {name: tensors[name] for name in ("l0.weight", "l1.weight")}
    pq.save(tmp_path / "two.safetensors", tensors, shard_size_bytes=9000)
    with pytest.raises(UnsupportedDtype, match="one number of bits"):
        convert(tmp_path / "two.safetensors", tmp_path / "x.safetensors.index.json", "gptq")


@pytest.mark.parametrize("to", ["safetensors", "gptq"])
def test_a_stopped_conversion_goes_on(
    sharded: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    out, real, seen = tmp_path / "out" / "n.safetensors.index.json", resumable.run_job, []

    def counted(job: Any, on_done: Any) -> Any:
        seen.append(job.number[0])
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(job, on_done)

    monkeypatch.setattr(resumable, "run_job", counted)
    with pytest.raises(KeyboardInterrupt):
        convert(sharded, out, to)
    assert not out.exists() and out.with_name(f"{out.name}.progress").is_file()
    heard: list[str] = []
    convert(sharded, out, to, on_done=lambda done: heard.append(done.conversion.name))
    assert seen == [1, 2, 3, 3, 4]
    assert len(heard) == 4
    assert_same_values(sharded, out.parent)
    assert not out.with_name(f"{out.name}.progress").exists()


@pytest.mark.parametrize("change", ["none", "a shard of the source", "a shard cut short"])
def test_what_was_done_counts_while_it_is_as_it_was(
    sharded: Path, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    out, real, seen = tmp_path / "out" / "n.safetensors.index.json", resumable.run_job, []

    def counted(job: Any, on_done: Any) -> Any:
        seen.append(job.number[0])
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(job, on_done)

    monkeypatch.setattr(resumable, "run_job", counted)
    with pytest.raises(KeyboardInterrupt):
        convert(sharded, out, "mlx:4bit", requantize=True)
    if change == "a shard of the source":
        os.utime(sharded / "m-00004-of-00004.safetensors", ns=(0, 0))
    if change == "a shard cut short":
        shard = out.with_name("n-00001-of-00004.safetensors")
        shard.write_bytes(shard.read_bytes()[:-1])
    finished = convert(sharded, out, "mlx:4bit", requantize=True)
    assert seen[2:] == ([2, 3, 4] if change == "none" else [1, 2, 3, 4])
    assert [done.conversion.name for done in finished] == [f"l{i}.weight" for i in range(4)]
    assert all(done.quality and 0 < done.quality.relative_error < 0.2 for done in finished)


@pytest.mark.parametrize(
    "to", ["gguf:Q4_0", "mlx:4bit", "bitsandbytes:nf4", "gptq:4bit", "compressed-tensors:w4a16"]
)
@pytest.mark.parametrize("columns", [0, 128])
def test_what_is_small_or_empty_is_read_back(to: str, columns: int, tmp_path: Path) -> None:
    """An empty weight, alone and beside others: with it alone nothing is quantized."""
    tensors = {"e.weight": np.zeros((0, 128), np.float32), "s": np.ones((), np.float32)}
    if columns:
        tensors["w.weight"] = np.ones((8, columns), np.float32)
    pq.save(tmp_path / "a.safetensors", tensors)
    out = tmp_path / ("x.gguf" if to.startswith("gguf") else "x.safetensors")
    convert(tmp_path / "a.safetensors", out, to, requantize=True)
    with pq.open_checkpoint(out) as ck:
        assert {n: ck[n].shape for n in ck} == {n: x.shape for n, x in tensors.items()}


def test_after_a_failure_no_further_shard_is_begun(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four, two run at a time: the first fails while the second runs, and those are all."""
    both, begun = threading.Barrier(2), []

    def run(job: Any) -> Any:
        begun.append(job.number[0])
        both.wait(20)
        if job.number[0] == 1:
            raise OSError("the disk is full")
        time.sleep(0.2)
        return resumable.Outcome([], {}, 0)

    threads: Any = lambda count, mp_context: ThreadPoolExecutor(count)  # noqa: E731
    monkeypatch.setattr(resumable, "ProcessPoolExecutor", threads)
    monkeypatch.setattr(resumable, "run_job", run)
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="full"):
        convert(sharded, tmp_path / "out" / "n.safetensors.index.json", "safetensors", jobs=2)
    assert sorted(begun) == [1, 2]


def test_no_part_of_the_input_is_overwritten(tmp_path: Path) -> None:
    parts = [tmp_path / f"p-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        pq.save(tmp_path / "a.safetensors", {part.stem: VALUES})
        convert(tmp_path / "a.safetensors", part, "gguf")
    with pytest.raises(InvalidArgument, match="one of its files"):
        convert(parts[0], parts[1], "gguf")


def test_progress_of_another_plan_does_not_count(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "n.safetensors.index.json"
    progress = out.with_name(f"{out.name}.progress")
    for text in ("{", "[]", '{"plan": "x", "done": {"n-00001-of-00004.safetensors": {}}}'):
        progress.write_text(text)
        convert(sharded, out, "safetensors")
        assert_same_values(sharded, out.parent)


# -- the command ------------------------------------------------------------------------------


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "a.safetensors", l="q4s/32:f16"), tmp_path / "x.gguf"
    dry = run("convert", source, out, "--to", "gguf", "--dry-run")
    assert dry.exit_code == 0 and "nothing was written" in dry.stdout and not out.exists()
    made = run("convert", source, out, "--to", "gguf", "--json")
    form = json.loads(made.stdout)
    assert form["totals"]["exact"] == 2 and form["input_format"] == "polyquant"
    assert form["tensors"][0]["to"] == "q4f/32:f16" and form["tensors"][0]["exact"]
    shown = run("inspect", out)
    assert shown.exit_code == 0 and "Format: gguf" in shown.stdout and "q4f/32:f16" in shown.stdout
    lossy = run("convert", source, tmp_path / "y.gguf", "--to", "gguf:Q8_0")
    assert lossy.exit_code == 2
    lossy = run("convert", source, tmp_path / "y.gguf", "--to", "gguf:Q8_0", "--requantize")
    assert lossy.exit_code == 0 and "1 requantized" in lossy.stdout


def test_the_example(tmp_path: Path) -> None:
    """examples/checkpoint.py on a small file of our own."""
    pq.save(tmp_path / "a.safetensors", {"blk.0.ffn_down.weight": VALUES, "norm": VALUES[0]})
    convert(tmp_path / "a.safetensors", tmp_path / "x.gguf", "gguf:Q4_K", requantize=True)
    script = Path(__file__).parents[1] / "examples" / "checkpoint.py"
    command = [sys.executable, str(script), str(tmp_path / "x.gguf")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the same file, byte for byte" in found.stdout
    assert found.stdout.rstrip().endswith(".")


def test_ctrl_c_in_the_middle_of_shards(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(resumable, "run_job", stopped)
    made = run("convert", sharded, tmp_path / "n.safetensors.index.json", "--to", "gptq")
    assert made.exit_code == 130 and "goes on with the shards" in made.stderr
    monkeypatch.setattr(resumable, "convert", stopped)
    made = run("convert", sharded, tmp_path / "n.safetensors", "--to", "gptq")
    assert made.exit_code == 130 and "Nothing was written" in made.stderr


def test_a_config_on_the_command_line(tmp_path: Path) -> None:
    if names("gptq")[0] == "":
        pytest.skip("no fixtures")
    made = fixture("gptq/w4_g64_asym_v2")
    config = json.dumps(made.config)
    shown = run("inspect", made.path, "--config", config, "--json")
    assert json.loads(shown.stdout)["format"] == "gptq"
    for text in ("{", '{"a":' * 100_000):
        assert "or JSON" in run("inspect", made.path, "--config", text).stderr
    assert run("inspect", made.path).exit_code == 2
    assert run("inspect", made.path, "--format", "safetensors").exit_code == 0
