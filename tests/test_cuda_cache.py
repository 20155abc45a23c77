"""Compiled kernels are kept on disk, and what is kept is never a wrong one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polyquant.backends.nvidia import cache

MADE = bytes(range(256)) * 300


class _Maker:
    """Counts how often something had to be made."""

    def __init__(self, made: bytes = MADE) -> None:
        self.made, self.count = made, 0

    def __call__(self) -> bytes:
        self.count += 1
        return self.made


def _never() -> bytes:
    raise AssertionError("it is kept already")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PQ_CACHE", str(tmp_path / "a" / "cache"))
    return tmp_path / "a" / "cache"


def test_a_kernel_is_made_once(folder: Path) -> None:
    make = _Maker()
    assert cache.kept((b"flags", b"source"), make) == MADE
    assert cache.kept((b"flags", b"source"), _never) == MADE
    assert make.count == 1
    assert [each.is_file() for each in (folder / "kernels").iterdir()] == [True]


def test_other_parts_are_another_kernel() -> None:
    for number, parts in enumerate(((b"ab", b"c"), (b"a", b"bc"), (b"a\0b", b"c"), (b"abc",))):
        made = bytes([number]) * 9
        assert cache.kept(parts, _Maker(made)) == made
    assert cache.kept((b"ab", b"c"), _never) == bytes(9)


@pytest.mark.parametrize("harm", ["empty", "cut off", "changed", "digest only"])
def test_what_was_harmed_is_made_again(folder: Path, harm: str) -> None:
    cache.kept((b"x",), _Maker())
    (path,) = (folder / "kernels").iterdir()
    stored = path.read_bytes()
    ends = {"empty": b"", "cut off": stored[:-1], "changed": stored[:-1] + b"?"}
    path.write_bytes(ends.get(harm, stored[:32]))
    make = _Maker()
    assert cache.kept((b"x",), make) == MADE
    assert make.count == 1
    assert cache.kept((b"x",), _never) == MADE


def test_a_folder_that_cannot_be_made_costs_time_and_nothing_else(folder: Path) -> None:
    folder.parent.write_text("a file where the folder should be")
    make = _Maker()
    assert [cache.kept((b"x",), make) for _ in range(2)] == [MADE, MADE]
    assert make.count == 2


def test_the_folder_may_be_named_by_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PQ_CACHE", "~/kernels")
    assert cache.folder() == tmp_path / "kernels"


def test_what_is_stopped_while_it_writes_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(old: str, new: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        cache.kept((b"x",), _Maker())
    assert not list((folder / "kernels").iterdir())


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PQ_CACHE")
    monkeypatch.setattr(Path, "home", homeless)
    assert cache.kept((b"x",), _Maker()) == MADE


def test_a_compiler_that_fails_leaves_nothing(folder: Path) -> None:
    def fail() -> bytes:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        cache.kept((b"x",), fail)
    assert not list(folder.rglob("*"))


def test_many_at_once_leave_whole_files(folder: Path) -> None:
    def one(number: int) -> bytes:
        return cache.kept((b"%d" % (number % 3),), _Maker(bytes([number % 3]) * 70_000))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(60)))
    assert found == [bytes([number % 3]) * 70_000 for number in range(60)]
    assert len(list((folder / "kernels").iterdir())) == 3
