"""What every result is stored with: the machine, the date and the versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("polyquant", "numpy", "torch", "jax", "ml_dtypes", "transformers")


def write_results(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows as JSON, with what they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {
        "machine": describe(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **versions()},
        "rows": rows,
    }
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"Written: {path}")


def describe() -> dict[str, Any]:
    """The processor as the system names it, and how many cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = 1 if one_thread() else cores
    return {"cpu": cpu_model(), "cores": cores, "threads": threads, "system": platform.system()}


def one_thread() -> bool:
    """Whether NumPy's products and torch have been told to use one thread."""
    return all(os.environ.get(name) == "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"))


def cpu_model() -> str:
    """The processor's model name: from /proc/cpuinfo where there is one."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


#: Instruction sets that kernels of quantized products choose by.
_SETS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16")


def cpu_flags() -> str:
    """Those of the processor's instruction sets that matter here: from /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine()
    lines = info.read_text(encoding="utf-8").splitlines()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    found = flags.partition(":")[2].split()
    return " ".join(name for name in (*_SETS, "asimddp", "i8mm") if name in found)


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The installed versions of packages, by default of those that every figure depends on."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
