"""Threads of the compiled kernels: results do not depend on them, whoever else has some."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import needs
from native_cases import floats, weight
from polyquant.backends.native import compiled as module

TEXTS = (
    "q4s",
    "q5s/32:f16",
    "u4/32:f16+bias:f16",
    "q3s/7:f16",
    "u4/16:(u6/8:f16)+bias:(q6s/8:f16)",
)


def everything() -> list[np.ndarray[Any, Any]]:
    """Products of both orders, values and codes: large enough to be shared out."""
    made = []
    for text in TEXTS:
        for shape in ((333, 300), (1000, 130), (257, 2500)):
            q = weight(text, shape)
            made.append(q.dequantize())
            for m in (1, 3, 40):
                made.append(pq.matmul(floats((m, shape[1])), q.mT, kernel="native.matmul"))
                made.append(pq.matmul(floats((m, shape[0])), q, kernel="native.matmul"))
            for x in (floats(shape), floats(shape[::-1]).T):
                made.extend(pq.quantize(x, q.scheme).parts().values())
    return [np.asarray(part) for part in made]


def same(left: list[Any], right: list[Any]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(a.tobytes() == b.tobytes() and a.shape == b.shape for a, b in pairs)


def test_results_do_not_depend_on_the_number_of_threads(target: str, threads: None) -> None:
    pq.set_num_threads(1)
    wanted = everything()
    assert same(everything(), wanted), "the second time"
    for count in (2, 3, 7):
        pq.set_num_threads(count)
        assert same(everything(), wanted), f"{count} threads"


def test_two_python_threads_at_once(target: str, threads: None) -> None:
    pq.set_num_threads(2)
    wanted = everything()
    with ThreadPoolExecutor(3) as callers:
        for found in callers.map(lambda _: everything(), range(6)):
            assert same(found, wanted)


def test_errors_of_set_num_threads(threads: None) -> None:
    for bad in (0, -1, 1025, 10**30, 1.0, "2", None, True):
        with pytest.raises(pq.errors.InvalidArgument, match="1 to 1024"):
            pq.set_num_threads(bad)  # type: ignore[arg-type]
    for good in (1, 2, 1024):
        pq.set_num_threads(good)
        assert module.num_threads() == good


@pytest.mark.parametrize("text", ["0", "-1", "1025", "two", "1.5", "²", "٣", "1 2", "9" * 30])
def test_a_bad_setting_of_the_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PQ_NUM_THREADS", text)
    with pytest.raises(pq.errors.InvalidArgument, match="PQ_NUM_THREADS"):
        module._threads_asked()


@pytest.mark.parametrize(("text", "count"), [("3", 3), (" 2 ", 2), ("1024", 1024), ("", None)])
def test_a_setting_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, count: int | None
) -> None:
    monkeypatch.setenv("PQ_NUM_THREADS", text)
    assert module._threads_asked() == count


# -- how many threads there are, in a process of its own ---------------------------------------

COUNTING = """
import os, sys
import numpy as np
import polyquant as pq

def tasks():
    return len(os.listdir("/proc/self/task"))

rng = np.random.default_rng(0)
few = rng.normal(size=(128, 256)).astype(np.float32)  # too few to share out
q = pq.concat([pq.quantize(few, "q4s")] * 8)
x = rng.normal(size=(8, 256)).astype(np.float32)
before = tasks()
"""


def counted(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COUNTING + code],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_environment_is_read_once_and_overridden() -> None:
    code = """
x @ q.mT
first = tasks() - before
pq.set_num_threads(5)
x @ q.mT
print(first, tasks() - before)
"""
    assert counted(code, PQ_NUM_THREADS="3") == "2 4"
    assert counted(code, PQ_NUM_THREADS="1") == "0 4"


def test_a_forked_process_has_threads_of_its_own() -> None:
    """In a process of its own: JAX warns of every fork."""
    code = """
import multiprocessing, warnings
from polyquant.backends.native.compiled import compiled

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of every fork
context = multiprocessing.get_context("fork")

def work():
    return (x @ q.mT).tobytes() + q.dequantize().tobytes()

def child(queue, depth):
    before = tasks()
    made = work()
    if depth:
        other = context.Process(target=child, args=(queue, depth - 1))
        other.start()
        other.join()
    queue.put((made, tasks() - before >= 2))

for target in compiled().targets():
    compiled().set_target(target)
    wanted, queue = work(), context.Queue()
    children = [context.Process(target=child, args=(queue, 1)) for _ in range(2)]
    for one in children:
        one.start()
    for _ in range(4):
        assert queue.get(timeout=60) == (wanted, True), target
    for one in children:
        one.join(60)
        assert one.exitcode == 0
    assert work() == wanted
print("done")
"""
    assert counted(code, PQ_NUM_THREADS="3") == "done"


def test_a_bad_environment_is_an_error_of_the_first_product() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNTING],
        env=os.environ | {"PQ_NUM_THREADS": "lots"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "PQ_NUM_THREADS" in done.stderr


@needs("torch")
def test_torchs_own_setting_counts_for_its_tensors() -> None:
    code = """
import torch
there, xs, wide = q.to("torch:cpu"), torch.ones(8, 256), torch.ones(1024, 256)
torch.set_num_threads(1)
before = tasks()
xs @ there.mT
there.dequantize()
pq.quantize(wide, "q4s")
torchs = tasks() - before
x @ q.mT
ours = tasks() - before
torch.set_num_threads(6)
xs @ there.mT
print(torchs, ours, tasks() - before >= 5)
"""
    assert counted(code, PQ_NUM_THREADS="3") == "0 2 True"
