"""How much memory ``polyquant quantize`` takes: a checkpoint far larger than it may hold.

Makes a checkpoint of normal numbers (one run of them, repeated), quantizes it with the command in
a process of its own, and prints the sizes, the peak memory and the time. Linux only: memory is
read from /proc while the command runs. Everything that is written is deleted again.

    python benchmarks/memory.py --gigabytes 4 --tensor-megabytes 128 --scheme nf4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Numbers drawn at random; the file repeats them.
RUN = 1 << 22
#: Columns of every tensor.
COLUMNS = 4096
#: Seconds between two looks at the memory of the command.
LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class Peak:
    """The most that a process held, in bytes, and how long it ran.

    anonymous: memory of its own. resident: all of it, mapped pages of the input among it.
    """

    anonymous: int
    resident: int
    seconds: float


def write_checkpoint(path: Path, names: Sequence[str], rows: int, columns: int) -> None:
    """A safetensors file of float32 tensors ``(rows, columns)``, written in small pieces."""
    size = rows * columns * 4
    header = {
        name: {"dtype": "F32", "shape": [rows, columns], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    run = memoryview(np.random.default_rng(0).standard_normal(RUN, dtype=np.float32)).cast("B")
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = len(names) * size
        while left:
            left -= file.write(run[: min(left, len(run))])


def write_shards(folder: Path, shards: int, names: Sequence[str], rows: int, columns: int) -> Path:
    """The same in several files under an index; returns the path of the index."""
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        inside = names[shard::shards]
        write_checkpoint(folder / file_name, inside, rows, columns)
        weight_map |= dict.fromkeys(inside, file_name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def run_and_watch(command: list[str]) -> Peak:
    """Run a command and look at its memory until it ends. Raises CalledProcessError."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    anonymous = resident = 0
    while process.poll() is None:
        facts = _status(process.pid)
        anonymous = max(anonymous, facts.get("RssAnon", 0))
        resident = max(resident, facts.get("VmHWM", 0))
        time.sleep(LOOK_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Peak(anonymous, resident, time.perf_counter() - start)


def _status(pid: int) -> dict[str, int]:
    """The memory lines of /proc/PID/status, in bytes; empty once the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {pair[0].rstrip(":"): int(pair[1]) * 1024 for pair in pairs}


def measure(gigabytes: float, tensor_megabytes: int, shards: int, scheme: str) -> dict[str, Any]:
    """Make a checkpoint, quantize it, and return sizes in bytes, the peak and the time."""
    rows, columns = tensor_megabytes * 1_000_000 // (4 * COLUMNS), COLUMNS
    names = [f"layers.{i}.weight" for i in range(round(gigabytes * 1e3 / tensor_megabytes))]
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "model.safetensors", Path(folder) / "out.safetensors"
        if shards > 1:
            source = write_shards(Path(folder), shards, names, rows, columns)
            out = Path(folder) / "out.safetensors.index.json"
        else:
            write_checkpoint(source, names, rows, columns)
        command = [sys.executable, "-c", "from polyquant.cli import main; main()"]
        peak = run_and_watch([*command, "quantize", str(source), str(out), "--scheme", scheme])
        outputs = [path.stat().st_size for path in Path(folder).glob("out*.safetensors")]
    largest = rows * columns * 4
    return {
        "scheme": scheme,
        "file_bytes": largest * len(names),
        "shards": shards,
        "largest_tensor_bytes": largest,
        "output_bytes": sum(outputs),
        "peak_anonymous_bytes": peak.anonymous,
        "peak_resident_bytes": peak.resident,
        "seconds": peak.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--tensor-megabytes", type=int, default=128)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--scheme", default="nf4")
    arguments = parser.parse_args()
    found = measure(
        arguments.gigabytes, arguments.tensor_megabytes, arguments.shards, arguments.scheme
    )
    for name, value in found.items():
        if name.endswith("_bytes"):
            text = f"{value / 1e6:>10,.0f} MB"
        else:
            text = f"{value:>10.1f} s" if name == "seconds" else f"{value:>10}"
        print(f"{name.removesuffix('_bytes').replace('_', ' '):<16} {text}")


if __name__ == "__main__":
    main()
