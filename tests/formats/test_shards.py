"""Checkpoints in several files: written as others read them, read with nothing missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import polyquant as pq
from polyquant.errors import InvalidArgument, InvalidHeader, WriteFailed


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, Any]) -> Path:
    pq.save(tmp_path / "model.safetensors", tensors, metadata={"a": "b"}, shard_size_bytes=60)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def edit_index(folder: Path, **changes: Any) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weight_map(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    return found


def test_the_files(folder: Path, tensors: dict[str, Any]) -> None:
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(folder) == [*shards, "model.safetensors.index.json"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in tensors.values())}
    in_files = {name: shard for shard in shards for name in load_file(folder / shard)}
    assert index["weight_map"] == in_files


@pytest.mark.parametrize("name", ["", "model.safetensors", "model.safetensors.index.json"])
def test_every_way_to_name_them(name: str, folder: Path, tensors: Any, bits: Any) -> None:
    with pq.open_checkpoint(folder / name) as checkpoint:
        assert checkpoint.format == "polyquant"
        assert checkpoint.metadata == {"a": "b"}
        assert list(checkpoint) == list(tensors)
        assert {n: bits(checkpoint[n]) for n in checkpoint} == {
            n: bits(tensors[n]) for n in tensors
        }


def test_one_shard_alone(folder: Path, tensors: dict[str, Any], bits: Any) -> None:
    found = pq.load(folder / "model-00002-of-00003.safetensors")
    assert {n: bits(t) for n, t in found.items()} == {"nested": bits(tensors["nested"])}


@pytest.mark.parametrize("size", [1, 10**9])
def test_other_sizes(size: int, tmp_path: Path, tensors: dict[str, Any], bits: Any) -> None:
    pq.save(tmp_path / "x.safetensors", tensors, shard_size_bytes=size)
    assert len(names(tmp_path)) == (4 if size == 1 else 2)
    found = pq.load(tmp_path)
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in tensors.items()}


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "1GB"])
def test_sizes_that_are_none(size: Any, tmp_path: Path, tensors: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="shard_size_bytes"):
        pq.save(tmp_path / "x.safetensors", tensors, shard_size_bytes=size)
    assert names(tmp_path) == []


def test_a_path_gives_what_was_last_saved_there(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for round, size in enumerate([None, 1, None, 4, 1, None, 1]):
        wanted = {"a": np.full(1, round), "b": np.full(2, round)}
        pq.save(path, wanted, shard_size_bytes=size)
        for place in (path, tmp_path):
            found = pq.load(place)
            assert {n: t.tolist() for n, t in found.items()} == {"a": [round], "b": [round] * 2}


def test_shards_of_an_earlier_save_are_removed_and_nothing_else(folder: Path) -> None:
    other = ("model-00001-of-00009.safetensors", "other.safetensors", "model-1.safetensors")
    for name in other:
        save_file({"x": np.ones(1)}, folder / name)
    pq.save(folder / "model.safetensors", {"a": np.ones(1)}, shard_size_bytes=1)
    index = "model.safetensors.index.json"
    assert names(folder) == sorted([*other, "model-00001-of-00001.safetensors", index])
    pq.save(folder / "model.safetensors", {"a": np.ones(1)})
    assert names(folder) == sorted([*other, "model.safetensors"])


def test_shards_of_two_saves_do_not_mix(folder: Path, tensors: dict[str, Any]) -> None:
    old = (folder / "model-00001-of-00003.safetensors").read_bytes()
    changed = tensors | {"two": pq.quantize(np.ones((2, 17), np.float32), "nvfp4")}
    pq.save(folder / "model.safetensors", changed, metadata={"a": "b"}, shard_size_bytes=60)
    (folder / "model-00001-of-00003.safetensors").write_bytes(old)
    with pytest.raises(InvalidHeader, match="saved together"):
        pq.open_checkpoint(folder)


def test_a_shard_missing(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InvalidHeader, match="model-00002-of-00003"):
        pq.open_checkpoint(folder)


def test_a_shard_unlisted(folder: Path) -> None:
    listed = weight_map(folder)
    edit_index(folder, weight_map={k: v for k, v in listed.items() if "-00002-" not in v})
    with pytest.raises(InvalidHeader, match="3 that were saved together"):
        pq.open_checkpoint(folder)


def test_a_part_unlisted(folder: Path) -> None:
    listed = weight_map(folder)
    del listed["nested.scales"]
    edit_index(folder, weight_map=listed)
    with pytest.raises(InvalidHeader, match=r"nested\.scales"):
        pq.open_checkpoint(folder)


def test_a_tensor_in_another_shard(folder: Path) -> None:
    edit_index(
        folder, weight_map=weight_map(folder) | {"plain": "model-00001-of-00003.safetensors"}
    )
    with pytest.raises(InvalidHeader, match="plain"):
        pq.open_checkpoint(folder)


def test_a_tensor_in_no_shard(folder: Path) -> None:
    edit_index(folder, weight_map=weight_map(folder) | {"x": "model-00001-of-00003.safetensors"})
    with pytest.raises(InvalidHeader, match="'x'"):
        pq.open_checkpoint(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd.safetensors",
        "sub/x.safetensors",
        "sub\\x.safetensors",
        "c:x.safetensors",
        ".hidden.safetensors",
        "..",
        "",
        "x.bin",
        "no\0.safetensors",
        1,
        None,
        ["x.safetensors"],
    ],
)
def test_names_that_lead_out_of_the_folder(name: Any, folder: Path) -> None:
    secret = folder.parent / "secret.safetensors"
    pq.save(secret, {"plain": np.ones(3)})
    edit_index(folder, weight_map=weight_map(folder) | {"plain": name})
    with pytest.raises(InvalidHeader, match="plain name"):
        pq.open_checkpoint(folder)
    secret.unlink()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map":{}}', '{"weight_map":[]}', '{"weight_map":{},"x":1}', "{}" * 9,
     '{"weight_map":{"a":"x.safetensors","a":"x.safetensors"}}', '{"metadata":{}}' + " " * 100],
)  # fmt: skip
def test_indices_that_are_none(text: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InvalidHeader):
        pq.open_checkpoint(folder)


def test_plain_shards_of_others(tmp_path: Path) -> None:
    save_file({"a": np.ones(2)}, tmp_path / "m-1.safetensors", metadata={"format": "pt", "n": "1"})
    save_file({"b": np.zeros(3)}, tmp_path / "m-2.safetensors", metadata={"format": "pt", "n": "2"})
    index = {
        "metadata": {"total_size": 40, "anything": [1]},
        "weight_map": {"b": "m-2.safetensors", "a": "m-1.safetensors"},
    }
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    with pq.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.metadata == {"format": "pt"}
        assert list(checkpoint) == ["b", "a"]
        assert checkpoint["b"].shape == (3,)


def test_shards_of_two_formats(folder: Path) -> None:
    save_file({"plain": np.ones(3)}, folder / "model-00003-of-00003.safetensors")
    with pytest.raises(InvalidHeader, match="some were not"):
        pq.open_checkpoint(folder)


def test_a_failing_shard_leaves_all_as_it_was(
    folder: Path, tensors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "model-00001-of-00004.safetensors").mkdir()
    with pytest.raises(WriteFailed, match="folder"):
        pq.save(
            folder / "model.safetensors",
            tensors | {"more": np.ones(100)},
            shard_size_bytes=60,
        )
    (folder / "model-00001-of-00004.safetensors").rmdir()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_rename_that_fails_half_way_is_told(
    folder: Path, tensors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    real, calls = os.replace, []

    def replace(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr("os.replace", replace)
    changed = tensors | {"plain": np.ones(4, np.float32)}
    with pytest.raises(WriteFailed, match="1 of 4 files are already new; save again"):
        pq.save(folder / "model.safetensors", changed, shard_size_bytes=60)
    assert not [name for name in names(folder) if name.endswith(".tmp")]
    with pytest.raises(InvalidHeader, match="saved together"):
        pq.open_checkpoint(folder)
