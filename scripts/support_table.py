"""Which kernel runs what: the short table of the README, and docs/support.md in full.

Asked of the kernel tables by backend and kind of device, so that the answer is the same on every
machine, whatever hardware it has.
"""

from __future__ import annotations

from collections.abc import Callable

import markdown
from markdown import table

from polyquant.dispatch import explain_problem
from polyquant.kernel import Problem, bucket
from polyquant.scheme import QuantScheme, parse, presets

#: (backend, kind of device) of every column.
COLUMNS = (("numpy", "cpu"), ("torch", "cpu"), ("torch", "cuda"), ("jax", "cpu"), ("jax", "gpu"))
EXTENT = 4096
ACTIVATIONS = "q8s/row:f32"

MakeProblem = Callable[[QuantScheme, str], Problem]


def product(left: str | QuantScheme, rows: int) -> MakeProblem:
    """The problem of ``x @ q.mT`` with ``x`` of so many rows."""

    def make(scheme: QuantScheme, kind: str) -> Problem:
        layout = (None if isinstance(left, str) else (0, 1), (1, 0))
        sizes = (bucket(rows), bucket(EXTENT), bucket(EXTENT))
        return Problem("matmul", kind, left, scheme, layout, *sizes)

    return make


def unary(op: str) -> MakeProblem:
    """The problem of quantize, dequantize or embedding."""

    def make(scheme: QuantScheme, kind: str) -> Problem:
        if op == "quantize":
            return Problem(op, kind, "float32", None, (None,), option=str(scheme))
        return Problem(op, kind, scheme, None, ((0, 1),))

    return make


def sections() -> dict[str, MakeProblem]:
    """Title -> the problem that a section of the page asks about."""
    return {
        "Product of one float32 row with a quantized weight": product("float32", 1),
        "Product of 256 float32 rows with a quantized weight": product("float32", 256),
        "Product of 256 bfloat16 rows with a quantized weight": product("bfloat16", 256),
        f"Product of 256 rows in {ACTIVATIONS} with a quantized weight": product(
            parse(ACTIVATIONS), 256
        ),
        "Quantize": unary("quantize"),
        "Dequantize": unary("dequantize"),
        "Rows of a table looked up (embedding)": unary("embedding"),
    }


def grouped(make: MakeProblem) -> str:
    """A table of presets by devices; presets that every device treats alike share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, scheme in presets().items():
        kernels = tuple(_cell(make(scheme, kind), backend) for backend, kind in COLUMNS)
        groups.setdefault(kernels, []).append(name)
    everything = len(groups) == 1
    rows = [
        ["every preset" if everything else ", ".join(f"`{n}`" for n in names), *kernels]
        for kernels, names in groups.items()
    ]
    head = ["scheme", *(column(*place) for place in COLUMNS)]
    return table(head, rows)


def column(backend: str, kind: str) -> str:
    """A device without its number: NumPy has only one."""
    return backend if backend == "numpy" else f"{backend}:{kind}"


def _cell(problem: Problem, backend: str) -> str:
    kernel = explain_problem(backend, problem).kernel
    return "no" if kernel is None else f"`{kernel}`"


def short() -> str:
    """The table of the README: one float32 row by a quantized weight."""
    return grouped(product("float32", 1)) + "\n"


def page() -> str:
    """docs/support.md."""
    parts = [
        "# What runs where",
        "The kernel that runs each operation, by scheme and device; `no` where none can. Weights "
        f"are {EXTENT} x {EXTENT}, stored with their input axis last. A kernel is asked for its "
        "reason by `pq.explain(op, ...)` and `pq.supports(device, scheme, op)`; both run nothing. "
        "`definition.*` is the plain definition: every scheme, every shape, every order of axes.",
    ]
    for title, make in sections().items():
        parts += [f"## {title}", grouped(make)]
    refusals = sorted(set(_refusals()))
    if refusals:
        parts += ["## Why not", table(["device", "kernel", "reason"], refusals)]
    return markdown.page(parts)


def _refusals() -> list[tuple[str, str, str]]:
    return [
        (column(backend, kind), f"`{kernel}`", reason)
        for make in sections().values()
        for scheme in presets().values()
        for backend, kind in COLUMNS
        for kernel, reason in explain_problem(backend, make(scheme, kind)).reasons
    ]
