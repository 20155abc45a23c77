"""Writing: planned, in memory for one tensor, and never at the cost of what was there."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from polyquant.errors import (
    InvalidArgument,
    InvalidName,
    NotAnArray,
    TensorNotFound,
    UnsupportedArray,
    UnsupportedDtype,
    WriteFailed,
)
from polyquant.formats import TensorInfo, Writer

ONE = np.ones(3, np.float32)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- plans ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [*pq.presets(), "u4/8:f16-zero:u4", "u2/16:(u4/16:f16)"])
@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_a_plan_needs_no_tensor(scheme: str, axes: tuple[int, int], tmp_path: Path) -> None:
    q = pq.quantize(np.ones((5, 40), np.float32), scheme)
    q = q if axes == (0, 1) else q.T
    info = TensorInfo.quantized("w", q.shape, q.scheme, axes)
    assert info == TensorInfo.of("w", q)
    assert info.nbytes == q.nbytes
    with Writer(tmp_path / "a.safetensors", [info]) as writer:
        writer.write("w", q)
    pq.save(tmp_path / "b.safetensors", {"w": q})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("shard_size_bytes", [None, 50])
def test_any_order_gives_the_same_file(
    shard_size_bytes: int | None, tmp_path: Path, tensors: dict[str, Any]
) -> None:
    plan = [TensorInfo.of(name, tensor) for name, tensor in tensors.items()]
    made = []
    for folder, order in (("a", list(tensors)), ("b", list(reversed(tensors)))):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "x.safetensors"
        with Writer(path, plan, shard_size_bytes=shard_size_bytes) as writer:
            for name in order:
                writer.write(name, tensors[name])
        made.append([(p.name, p.read_bytes()) for p in sorted(path.parent.iterdir())])
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "shards", [[], [["a"]], [["a"], ["b"], []], [["a", "b"], ["b"]], [["a"], ["b"], ["c"]]]
)
def test_shards_that_are_not_the_plan(shards: Any, tmp_path: Path) -> None:
    plan = [TensorInfo.of(name, ONE) for name in "ab"]
    with pytest.raises(InvalidArgument, match="shards"):
        Writer(tmp_path / "x.safetensors", plan, shards=shards)


def test_shards_of_ones_own_choice(tmp_path: Path) -> None:
    plan = [TensorInfo.of(name, ONE) for name in "abc"]
    with Writer(tmp_path / "x.safetensors", plan, shards=[["c"], ["b", "a"]]) as writer:
        for name in "abc":
            writer.write(name, ONE)
    assert list(pq.load(tmp_path / "x-00002-of-00002.safetensors")) == ["b", "a"]
    assert sorted(pq.load(tmp_path)) == ["a", "b", "c"]


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Sixteen tensors of 16 MB are written, one at a time, with far less than all in memory."""
    code = f"""
import resource, numpy as np, polyquant as pq
from polyquant.formats import TensorInfo, Writer
plan = [TensorInfo.plain(f"w{{i}}", (4_000_000,), "float32") for i in range(16)]
with Writer({str(tmp_path / "x.safetensors")!r}, plan) as writer:
    writer.write("w0", np.full(4_000_000, 0, np.float32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(1, 16):
        writer.write(f"w{{i}}", np.full(4_000_000, i, np.float32))
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64_000
with pq.open_checkpoint({str(tmp_path / "x.safetensors")!r}) as checkpoint:
    assert [float(checkpoint[name][-1]) for name in checkpoint] == list(range(16))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_does_not_follow_the_plan(tmp_path: Path) -> None:
    plan = [TensorInfo.of("a", ONE), TensorInfo.quantized("q", (4, 4), pq.scheme("q4s-row"))]
    missing = pytest.raises(WriteFailed, match="1 of 2 planned tensors are missing: 'q'")
    with missing, Writer(tmp_path / "x.safetensors", plan) as writer:
        with pytest.raises(TensorNotFound, match="'a'"):
            writer.write("b", ONE)
        for wrong in (ONE[:2], ONE.astype(np.float16), pq.quantize(ONE, "q8s-row")):
            with pytest.raises(InvalidArgument, match="as planned"):
                writer.write("a", wrong)
        writer.write("a", ONE)
        with pytest.raises(InvalidName, match="already"):
            writer.write("a", ONE)
    assert names(tmp_path) == []


def test_a_writer_that_is_not_open(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "x.safetensors", [TensorInfo.of("a", ONE)])
    assert names(tmp_path) == []
    with pytest.raises(WriteFailed, match="with statement"):
        writer.write("a", ONE)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_inside_leaves_what_was_there(error: type[BaseException], saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(error), Writer(saved, [TensorInfo.of("a", ONE)]) as writer:
        writer.write("a", ONE)
        raise error
    assert names(saved.parent) == [saved.name]
    assert saved.read_bytes() == before


# -- names ------------------------------------------------------------------------------------

Q = pq.quantize(np.ones((2, 8), np.float32), "u4[nf4]/4:(u8[dynamic8u]/4:f32)")


@pytest.mark.parametrize(
    "made",
    [
        {"": ONE},
        {"__metadata__": ONE},
        {1: ONE},
        {None: ONE},
        {b"x": ONE},
        {"\ud800": ONE},
        {"w": Q, "w.scales": ONE},
        {"w.scales.table": ONE, "w": Q},
        {"w.table": ONE, "w": Q},
        {"w": Q, "w.scales.scales": Q},
    ],
)
def test_names_that_a_file_cannot_hold(made: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidName):
        pq.save(tmp_path / "x.safetensors", made)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["w.offsets", "w.data", "w.", ".w", "w/x", "w\nx", "W", "ü", "\U0001f600", " ", "\0"]
)
def test_names_that_only_look_odd(name: str, tmp_path: Path) -> None:
    pq.save(tmp_path / "x.safetensors", {"w": Q, name: Q, f"{name}2": ONE})
    found = pq.load(tmp_path / "x.safetensors")
    assert list(found) == ["w", name, f"{name}2"]
    assert found[name].to_data() == Q.to_data()


@pytest.mark.parametrize(
    "metadata",
    [{"polyquant": "x"}, {"format": "pt"}, {1: "x"}, {"x": 1}, {"x": None}, {"\ud800": "x"}],
)
def test_metadata_that_a_file_cannot_hold(metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidName):
        pq.save(tmp_path / "x.safetensors", {"a": ONE}, metadata=metadata)
    assert names(tmp_path) == []


@pytest.mark.parametrize("tensor", [None, 1.5, [1.0], "text", object(), b"bytes"])
def test_what_is_no_array(tensor: Any, tmp_path: Path) -> None:
    with pytest.raises(NotAnArray, match="'x'"):
        pq.save(tmp_path / "x.safetensors", {"x": tensor})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.ones(3, np.complex128),
        np.ones(3, np.longdouble),
        np.ones(3, "M8[s]"),
        np.zeros(3, "f4,f4"),
    ],
)
def test_arrays_that_a_file_cannot_hold(array: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedDtype, match="'x'"):
        pq.save(tmp_path / "x.safetensors", {"x": array})
    assert names(tmp_path) == []


def test_torch_tensors_without_plain_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.ones(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(UnsupportedArray, match="'x'"):
            pq.save(tmp_path / "x.safetensors", {"x": tensor})


def test_arrays_under_a_tracer(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")

    def save(x: Any) -> Any:
        pq.save(tmp_path / "x.safetensors", {"x": x})
        return x

    with pytest.raises(UnsupportedArray, match="'x'"):
        jax.jit(save)(jax.numpy.ones(3))


@pytest.mark.parametrize(
    "path", ["x", "x.npz", "x.safetensors.index.json", ".safetensors", "", 3, None]
)
def test_paths_that_are_no_safetensors(path: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="path"):
        pq.save(tmp_path / path if isinstance(path, str) else path, {"a": ONE})


@pytest.mark.parametrize("tensors", [[("a", ONE)], ONE, None])
def test_tensors_that_are_no_mapping(tensors: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="tensors"):
        pq.save(tmp_path / "x.safetensors", tensors)


# -- failures of the system -------------------------------------------------------------------


def fail_after(monkeypatch: pytest.MonkeyPatch, size_bytes: int, number: int) -> None:
    """Let files take so many bytes, and then fail as the system does: short writes first."""
    room = [size_bytes]

    class Full(FileIO):
        def write(self, data: Any) -> int:
            taken = min(len(data), room[0])
            if not taken and len(data):
                raise OSError(number, os.strerror(number))
            room[0] -= taken
            return super().write(data[:taken]) or 0

    monkeypatch.setattr("polyquant.files.replace.FileIO", Full)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("room", [0, 1, 100, 1000])
@pytest.mark.parametrize("shard_size_bytes", [None, 50])
def test_a_full_disk(
    saved: Path,
    tensors: Any,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    number: int,
    shard_size_bytes: int | None,
) -> None:
    before = saved.read_bytes()
    fail_after(monkeypatch, room, number)
    with pytest.raises(WriteFailed) as found:
        pq.save(saved, tensors | {"big": np.ones(1000)}, shard_size_bytes=shard_size_bytes)
    assert os.strerror(number) in str(found.value)
    assert found.value.facts["kept"]
    assert names(saved.parent) == [saved.name]
    assert saved.read_bytes() == before


def test_short_writes_are_continued(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    monkeypatch.setattr("polyquant.files.replace._RUN_BYTES", 7)
    pq.save(saved, pq.load(saved), metadata={"author": "a test"})
    assert saved.read_bytes() == before


def test_a_swallowed_failure_is_not_forgotten(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    fail_after(monkeypatch, 4, errno.ENOSPC)
    with pytest.raises(WriteFailed, match="missing"), Writer(saved, [TensorInfo.of("a", ONE)]) as w:
        for _ in range(2):
            with pytest.raises(WriteFailed):
                w.write("a", ONE)
    assert saved.read_bytes() == before
    assert names(saved.parent) == [saved.name]


@pytest.mark.parametrize("call", ["os.fsync", "os.replace", "os.chmod"])
def test_other_calls_that_fail(saved: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(call, fail)
    with pytest.raises(
        WriteFailed, match=r"Input/output error\. What was there before is untouched"
    ):
        pq.save(saved, {"a": ONE})
    assert saved.read_bytes() == before
    assert names(saved.parent) == [saved.name]


def test_a_limit_of_the_system(saved: Path) -> None:
    """The real thing: the system stops the file at 64 KiB."""
    before = saved.read_bytes()
    code = f"""
import resource, numpy as np, polyquant as pq
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    pq.save({str(saved)!r}, {{"big": np.ones(100_000)}})
except pq.errors.WriteFailed as error:
    assert "File too large" in str(error) and "untouched" in str(error), error
else:
    raise SystemExit("it was written")
pq.save({str(saved.with_name("small2.safetensors"))!r}, {{"small": np.ones(10)}})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert saved.read_bytes() == before
    assert names(saved.parent) == [saved.name, "small2.safetensors"]


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(WriteFailed, match="No such file or directory"):
        pq.save(tmp_path / "absent" / "x.safetensors", {"a": ONE})


def test_a_file_for_a_folder(saved: Path) -> None:
    with pytest.raises(WriteFailed, match="Not a directory"):
        pq.save(saved / "x.safetensors", {"a": ONE})


@pytest.mark.parametrize("shard_size_bytes", [None, 1])
def test_a_folder_for_a_file(tmp_path: Path, shard_size_bytes: int | None) -> None:
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(WriteFailed, match="folder of that name"):
        pq.save(tmp_path / "x.safetensors", {"a": ONE}, shard_size_bytes=shard_size_bytes)
    assert names(tmp_path) == ["x.safetensors"]


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(WriteFailed, match="not a regular file"):
        pq.save(tmp_path / "x.safetensors", {"a": ONE})
    assert stat.S_ISFIFO(os.stat(tmp_path / "x.safetensors").st_mode)


@pytest.mark.parametrize("name", ["no\0name.safetensors", "x" * 300 + ".safetensors"])
def test_names_that_the_system_refuses(name: str, tmp_path: Path) -> None:
    with pytest.raises(WriteFailed):
        pq.save(tmp_path / name, {"a": ONE})
    assert names(tmp_path) == []


def test_the_longest_name_that_the_system_takes(tmp_path: Path) -> None:
    name = "x" * (255 - len(".safetensors")) + ".safetensors"
    pq.save(tmp_path / name, {"a": ONE})
    assert list(pq.load(tmp_path / name)) == ["a"]


def test_a_folder_without_permission(tmp_path: Path) -> None:
    """Root may write anywhere, so the test drops to another user where it must."""
    saved = tmp_path / "x.safetensors"
    pq.save(saved, {"a": ONE})
    before = saved.read_bytes()
    tmp_path.chmod(0o555)
    code = f"""
import os, numpy as np, polyquant as pq
ones = np.ones(3)
if os.geteuid() == 0:
    os.chdir({str(tmp_path)!r})
    os.seteuid(65534)
try:
    pq.save("x.safetensors", {{"a": ones}})
except pq.errors.WriteFailed as error:
    assert "Permission denied" in str(error), error
else:
    raise SystemExit("it was written")
"""
    try:
        subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    finally:
        tmp_path.chmod(0o755)
    assert names(tmp_path) == [saved.name]
    assert saved.read_bytes() == before


# -- links and modes --------------------------------------------------------------------------


def test_a_link_is_followed(saved: Path) -> None:
    (saved.parent / "there").mkdir()
    target = saved.rename(saved.parent / "there" / "target.safetensors")
    saved.symlink_to(target)
    pq.save(saved, {"a": ONE})
    assert saved.is_symlink() and not target.is_symlink()
    assert list(pq.load(target)) == ["a"]
    assert names(target.parent) == [target.name]


def test_a_link_to_nothing_yet(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").symlink_to(tmp_path / "y.safetensors")
    pq.save(tmp_path / "x.safetensors", {"a": ONE})
    assert (tmp_path / "x.safetensors").is_symlink()
    assert list(pq.load(tmp_path / "y.safetensors")) == ["a"]


def test_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").symlink_to(tmp_path / "x.safetensors")
    with pytest.raises(WriteFailed):
        pq.save(tmp_path / "x.safetensors", {"a": ONE})
    assert names(tmp_path) == ["x.safetensors"]


def test_modes(tmp_path: Path) -> None:
    path, mask = tmp_path / "x.safetensors", os.umask(0o027)
    try:
        pq.save(path, {"a": ONE})
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        pq.save(path, {"a": ONE})
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(mask)
