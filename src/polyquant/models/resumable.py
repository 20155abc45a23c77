"""Carrying out a conversion: one file, or shards in parallel that a second run goes on with.

Each shard is a file that appears when it is whole. Beside the index lies ``OUT.progress`` until all
are there: which shards of this very plan are done. polyquant's own shards also name the checksums
of all the others, so their headers are written last, in the place that was left for them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from polyquant.errors import InvalidArgument, WriteFailed
from polyquant.files.checkpoint import Checkpoint
from polyquant.files.container import INDEX_SUFFIX
from polyquant.files.info import TensorInfo
from polyquant.files.probe import CONFIG, Probe
from polyquant.files.replace import Replacement
from polyquant.formats import FORMATS, open_checkpoint
from polyquant.formats.polyquant.manifest import RESERVED, checksum_of_form
from polyquant.formats.polyquant.writer import ShardFile
from polyquant.models.conversion import Conversion, Converted, convert
from polyquant.models.shards import check_apart, files_of, open_writer, shards_of
from polyquant.models.targets import Target
from polyquant.quality import Quality

_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Source:
    """How a checkpoint is opened, also in another process."""

    path: Path
    format: str | None = None
    config: Any = None

    def open(self) -> Checkpoint:
        """Open it."""
        return open_checkpoint(self.path, format=self.format, config=self.config)


@dataclass(frozen=True)
class Job:
    """One shard: where it goes, and what is in it."""

    source: Source
    target: Target
    path: Path
    steps: tuple[Conversion, ...]
    number: tuple[int, int]
    metadata: Mapping[str, str]
    calibration: str
    whole: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a shard: its tensors, their checksums in polyquant's own form, its size."""

    finished: list[Converted]
    checksums: Mapping[str, str]
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """What another run needs to know of it."""
        lossy = {d.conversion.name: d.quality.to_json() for d in self.finished if d.quality}
        return {"checksums": self.checksums, "quality": lossy, "size_bytes": self.size_bytes}

    @classmethod
    def from_json(cls, job: Job, form: Mapping[str, Any]) -> Outcome:
        """The inverse. Raises KeyError, TypeError for what is no such form."""
        losses = {name: Quality(**facts) for name, facts in form["quality"].items()}
        finished = [Converted(step, losses.get(step.name)) for step in job.steps]
        return cls(finished, dict(form["checksums"]), form["size_bytes"])


def run(
    source: Source,
    target: Target,
    out: Path,
    steps: Sequence[Conversion],
    *,
    jobs: int = 1,
    calibration: str = "minmax",
    on_done: Callable[[Converted], None] = lambda done: None,
) -> list[Converted]:
    """Convert by a plan. ``out`` appears when all is written.

    Raises InvalidArgument (a name that the format does not have, or a file of the source),
    WriteFailed, and what quantizing raises.
    """
    target.check_path(out)
    if out.name.endswith(INDEX_SUFFIX):
        return _run_shards(source, target, out, steps, jobs, calibration, on_done)
    check_apart(Probe(source.path), [out])
    with source.open() as checkpoint:
        metadata = _kept(checkpoint.metadata, target)
        results = [step.result for step in steps]
        if target.is_own:
            writer: Any = open_writer(checkpoint, out, results)
        else:
            writer = target.open_writer(out, results, metadata)
        with writer:
            finished = convert(
                checkpoint, target, steps, writer.write, calibration=calibration, on_done=on_done
            )
    if not target.is_own:
        write_config(source, out, writer.config)
    return finished


def _kept(metadata: Mapping[str, str], target: Target) -> dict[str, str]:
    """The metadata that go along: to another tool's format not what a third one needs."""
    dropped = set(RESERVED)
    if not target.is_own:
        dropped |= {CONFIG, *(name for name in FORMATS if name != target.format)}
    return {key: text for key, text in metadata.items() if key not in dropped}


# -- shards -----------------------------------------------------------------------------------


def _run_shards(
    source: Source,
    target: Target,
    out: Path,
    steps: Sequence[Conversion],
    jobs: int,
    calibration: str,
    on_done: Callable[[Converted], None],
) -> list[Converted]:
    if jobs < 1:
        raise InvalidArgument(name="jobs", wanted="at least 1", got=jobs)
    todo = _jobs(source, target, out, steps, calibration)
    check_apart(Probe(source.path), [out, *(job.path for job in todo)])
    progress = _Progress(source, out, todo)
    for outcome in progress.done.values():
        for done in outcome.finished:
            on_done(done)
    waiting = [job for job in todo if job.path.name not in progress.done]
    for job, outcome in _outcomes(waiting, jobs, on_done):
        progress.add(job, outcome)
    _write_index(out, todo)
    if target.is_own:
        _write_headers(todo, progress)
    elif todo:
        writer = target.open_writer(out, todo[0].whole, todo[0].metadata)
        write_config(source, out, writer.config)
    progress.remove()
    return [done for job in todo for done in progress.done[job.path.name].finished]


def _jobs(
    source: Source, target: Target, out: Path, steps: Sequence[Conversion], calibration: str
) -> list[Job]:
    by_name = {step.name: step for step in steps}
    groups = shards_of(source.path, list(by_name))
    stem = out.name.removesuffix(INDEX_SUFFIX)
    whole = tuple(step.result for step in steps)
    with source.open() as checkpoint:
        metadata = _kept(checkpoint.metadata, target)
    return [
        Job(
            source,
            target,
            out.with_name(f"{stem}-{number:05}-of-{len(groups):05}{_SUFFIX}"),
            tuple(by_name[name] for name in group),
            (number, len(groups)),
            metadata,
            calibration,
            whole,
        )
        for number, group in enumerate(groups, 1)
    ]


def _outcomes(waiting: list[Job], jobs: int, on_done: Callable[[Converted], None]) -> Any:
    if jobs == 1 or len(waiting) < 2:
        for job in waiting:
            yield job, run_job(job, on_done)
        return
    context = multiprocessing.get_context("spawn")  # libraries with threads do not fork well
    with ProcessPoolExecutor(min(jobs, len(waiting)), mp_context=context) as pool:
        running: dict[Future[Outcome], Job] = {}
        left = iter(waiting)
        while True:
            # No more than can run: what is in the pool's queue is done even after an error.
            running |= {pool.submit(run_job, job): job for job in islice(left, jobs - len(running))}
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, outcome = running.pop(future), future.result()
                for done in outcome.finished:
                    on_done(done)
                yield job, outcome


def run_job(job: Job, on_done: Callable[[Converted], None] = lambda done: None) -> Outcome:
    """Write one shard."""
    results = [step.result for step in job.steps]
    with job.source.open() as checkpoint:
        if job.target.is_own:
            writer: Any = ShardFile(job.path, results, job.number, job.metadata)
        else:
            writer = job.target.open_writer(job.path, results, job.metadata, job.whole)
        with writer:
            finished = convert(
                checkpoint,
                job.target,
                job.steps,
                writer.write,
                calibration=job.calibration,
                on_done=on_done,
            )
    checksums = writer.checksums if job.target.is_own else {}
    return Outcome(finished, checksums, os.stat(job.path).st_size)


def _write_headers(todo: Sequence[Job], progress: _Progress) -> None:
    """Write into every shard the checksum of all."""
    sums: dict[str, str] = {}
    for job in todo:
        sums |= progress.done[job.path.name].checksums
    checkpoint = checksum_of_form(sums)
    for job in todo:
        shard = ShardFile(job.path, [s.result for s in job.steps], job.number, job.metadata)
        header = shard.header(progress.done[job.path.name].checksums, checkpoint)
        try:
            with open(job.path, "r+b") as file:
                file.write(header)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            reason = error.strerror or str(error)
            kept = "Run the same conversion again: it goes on from here"
            raise WriteFailed(path=job.path, reason=reason, kept=kept) from error


def _write_index(out: Path, todo: Sequence[Job]) -> None:
    """The index, by the arrays that each shard holds."""
    weight_map: dict[str, str] = {}
    total = 0
    for job in todo:
        container = Probe(job.path).container
        if container is not None:
            weight_map |= dict.fromkeys(container.places, job.path.name)
            total += sum(t.stop - t.start for f in container.files for t in f.tensors.values())
    form = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _replace(out, (json.dumps(form, indent=2) + "\n").encode())


def _replace(path: Path, data: bytes) -> None:
    file = Replacement(path)
    try:
        file.write_at(0, memoryview(data))
        file.flush()
        file.put_in_place()
    finally:
        file.discard()


class _Progress:
    """Which shards of a plan are done; another plan's are not counted."""

    def __init__(self, source: Source, out: Path, todo: Sequence[Job]) -> None:
        self._path = out.with_name(f"{out.name}.progress")
        facts = [(job.path.name, str(job.target), str(job.steps), job.calibration) for job in todo]
        probe = Probe(source.path, source.config, source.format)
        files = [(str(file), os.stat(file).st_mtime_ns) for file in files_of(probe)]
        told = (files, source.format, str(probe.quantization), [job.metadata for job in todo[:1]])
        self._plan = hashlib.sha256(repr((facts, told)).encode()).hexdigest()
        #: By the name of the shard: those that are there, and as large as they were written.
        self.done: dict[str, Outcome] = {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            noted = found["done"] if found["plan"] == self._plan else {}
            outcomes = {
                j.path: Outcome.from_json(j, noted[j.path.name])
                for j in todo
                if j.path.name in noted
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none of ours
            outcomes = {}
        for path, outcome in outcomes.items():
            if path.is_file() and os.stat(path).st_size == outcome.size_bytes:
                self.done[path.name] = outcome

    def add(self, job: Job, outcome: Outcome) -> None:
        """Note that a shard is done."""
        self.done[job.path.name] = outcome
        noted = {name: each.to_json() for name, each in self.done.items()}
        _replace(self._path, json.dumps({"plan": self._plan, "done": noted}).encode())

    def remove(self) -> None:
        """All is done."""
        self._path.unlink(missing_ok=True)


# -- the config beside ------------------------------------------------------------------------


def write_config(source: Source, out: Path, config: Mapping[str, Any]) -> Path | None:
    """Write config.json beside the output where there is none: the source's, with what the format
    says of quantization. Returns its path. Other tools look for it there.
    """
    path = out.with_name("config.json")
    if not config or os.path.lexists(path):
        return None
    probe = Probe(source.path)
    form = {k: v for k, v in probe.config.items() if k not in (CONFIG, "quantization")}
    form |= {CONFIG: dict(config)}
    if "quant_method" not in config:  # MLX's own name for it
        form["quantization"] = dict(config)
    _replace(path, (json.dumps(form, indent=2) + "\n").encode())
    return path
