"""Which format a path is of: by what it declares, its magic or its name."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import polyquant as pq
from polyquant.errors import InvalidArgument, InvalidHeader, UnknownFormat, UnknownName
from polyquant.files.probe import Probe
from polyquant.formats import FORMATS, WRITERS


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_door(name: str) -> None:
    module = import_module(FORMATS[name])
    assert name == module.NAME
    assert module.why_not.__doc__ and module.open_checkpoint.__doc__


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_page_says_of_a_format(name: str) -> None:
    facts = import_module(FORMATS[name]).FACTS
    assert facts.tool and facts.reads and facts.exact
    is_written = name in WRITERS or name in ("polyquant", "safetensors")
    assert bool(facts.writes) == bool(facts.bytes) == bool(facts.checked) == is_written


def test_a_name_does_not_matter_where_the_file_declares(saved: Path, tensors: Any) -> None:
    other = saved.rename(saved.with_name("weights.bin"))
    with pq.open_checkpoint(other) as checkpoint:
        assert checkpoint.format == "polyquant"
        assert list(checkpoint) == list(tensors)


def test_the_raw_arrays_of_ones_own_file(saved: Path) -> None:
    with pq.open_checkpoint(saved, format="safetensors") as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint["nested.scales.table"].shape == (256,)
        assert set(checkpoint.schemes().values()) == {None}


def test_formats_that_a_file_is_not(saved: Path) -> None:
    with pytest.raises(UnknownFormat, match=r"not npz: it is neither"):
        pq.open_checkpoint(saved, format="npz")
    save_file({"x": np.ones(3)}, saved)
    with pytest.raises(UnknownFormat, match=r"no manifest of polyquant"):
        pq.open_checkpoint(saved, format="polyquant")


@pytest.mark.parametrize("name", ["safetensor", "", 3, "gguff"])
def test_formats_that_do_not_exist(name: Any, saved: Path) -> None:
    with pytest.raises(UnknownName, match="format"):
        pq.open_checkpoint(saved, format=name)


@pytest.mark.parametrize("data", [b"", b"GGML", b"hello", b"PK\x03\x04", bytes(100)])
def test_files_of_no_format(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(UnknownFormat, match=r"not polyquant.*not npz.*not safetensors"):
        pq.open_checkpoint(tmp_path / "x")


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "x.safetensors.index.json"])
def test_a_name_that_promises_too_much(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"hello, this is a text and nothing else")
    with pytest.raises(InvalidHeader):
        pq.open_checkpoint(tmp_path / name)


# -- folders ----------------------------------------------------------------------------------


def test_a_folder_with_one_file(saved: Path) -> None:
    (saved.parent / "config.json").write_text("{}")
    (saved.parent / "tokenizer.json").write_text("{}")
    with pq.open_checkpoint(saved.parent) as checkpoint:
        assert checkpoint.path == saved.parent
        assert len(checkpoint) == 3


def test_the_usual_name_wins(saved: Path) -> None:
    pq.save(saved.with_name("model.safetensors"), {"x": np.ones(1)})
    assert list(pq.load(saved.parent)) == ["x"]


def test_folders_that_hold_no_file_or_many(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(UnknownFormat, match="no file of tensors"):
        (tmp_path / "empty").mkdir()
        pq.open_checkpoint(tmp_path / "empty")
    pq.save(saved.with_name("other.safetensors"), {})
    with pytest.raises(UnknownFormat, match=r"several: other\.safetensors, small\.safetensors"):
        pq.open_checkpoint(tmp_path)


def test_a_temporary_file_is_not_taken_for_one(saved: Path) -> None:
    (saved.parent / ".hidden.safetensors").write_bytes(b"")
    assert len(pq.load(saved.parent)) == 3


# -- config -----------------------------------------------------------------------------------


def test_configs(saved: Path, tmp_path: Path) -> None:
    assert Probe(saved).config == {}
    (tmp_path / "config.json").write_text("{}")
    assert Probe(saved).config == {}
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    assert Probe(saved).config == {"a": 1}
    assert Probe(tmp_path).config == {"a": 1}
    (tmp_path / "other.json").write_text(json.dumps({"a": 2}))
    assert Probe(saved, tmp_path / "other.json").config == {"a": 2}
    assert Probe(saved, {"a": 3}).config == {"a": 3}


@pytest.mark.parametrize("config", [3, b"x", ["a"]])
def test_configs_that_are_none(config: Any, saved: Path) -> None:
    with pytest.raises(InvalidArgument, match="config"):
        pq.open_checkpoint(saved, config=config)


@pytest.mark.parametrize("path", [3, None, b"x.safetensors", ["x"]])
def test_paths_that_are_none(path: Any) -> None:
    with pytest.raises(InvalidArgument, match="path"):
        pq.open_checkpoint(path)


@pytest.mark.parametrize("format", ["mlx", "hqq", "bitsandbytes", "torchao", "quanto", "gemma"])
@pytest.mark.parametrize("config", [None, {"quant_method": "bitsandbytes"}])
def test_parts_of_weights_are_not_handed_out_as_arrays(
    format: str, config: Any, tmp_path: Path
) -> None:
    pq.save(tmp_path / "own.safetensors", {"l.qweight": np.zeros((4, 8), np.int32)})
    assert pq.open_checkpoint(tmp_path / "own.safetensors")["l.qweight"].shape == (4, 8)
    header = json.dumps({"l.qweight": {"dtype": "I32", "shape": [1, 1], "data_offsets": [0, 4]}})
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with pytest.raises(UnknownFormat, match=r"'l\.qweight' is a part"):
        pq.open_checkpoint(path, format=None if config else format, config=config)
    assert list(pq.open_checkpoint(path, format="safetensors")) == ["l.qweight"]
