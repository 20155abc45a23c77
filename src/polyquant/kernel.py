"""What a kernel is, and the facts that it is chosen by.

A kernel module ends with ``KERNELS = (Kernel(...), ...)``. ``why_not`` answers in words why a
kernel cannot run a problem, or None when it can; dispatch, ``explain``, ``supports``, the generated
support table and the skips of tests all ask that one function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyquant.scheme import QuantScheme


class Problem(NamedTuple):
    """The facts of one call: hashable, printable, no arrays.

    ``a`` and ``b`` are a scheme for a quantized operand and a dtype name for a float one; ``b`` is
    None where there is one operand. ``layout`` holds each quantized operand's axis order, or None.
    ``m, n, k`` are the extents of a product, rounded up to powers of two; 0 without meaning.
    ``transformed`` says that a library's transformation watches the operands (autograd, a tracer,
    vmap), which must see the op as one. ``step`` is the largest power of two, up to 512, that
    divides the summed extent: what lines of codes are aligned to; 0 where it is not known.
    ``result`` is the dtype to which a product of two quantized operands is rounded, where that is
    not float32.
    """

    op: str
    device_kind: str
    a: QuantScheme | str
    b: QuantScheme | str | None = None
    layout: tuple[tuple[int, ...] | None, ...] = ()
    m: int = 0
    n: int = 0
    k: int = 0
    option: str = ""
    transformed: bool = False
    step: int = 0
    result: str = ""

    def __str__(self) -> str:
        operands = f"{self.a}" if self.b is None else f"{self.a} x {self.b}"
        size = f", m<={self.m} n<={self.n} k<={self.k}" if self.op == "matmul" else ""
        option = "".join(f", {each}" for each in (self.option, self.result) if each)
        watched = ", transformed" if self.transformed else ""
        return f"{self.op} of {operands} on {self.device_kind}{size}{option}{watched}"


class Seen(NamedTuple):
    """What a kernel saw of the values that it quantized by their ranges."""

    is_finite: bool
    may_be_dead: bool
    """Whether a block may be zero because no scale of its type is small enough."""


@dataclass(frozen=True)
class Kernel:
    """One way to compute one op: its dotted name, when it cannot run, and how it runs.

    ``run`` takes the op's operands and keywords; a kernel of "quantize" takes the array, the
    scheme and the calibration. ``declines`` is the kernel's own answer. Schemes with ``extras`` are
    declined for it, unless it says that it ``takes_extras``. ``entering``: a dtype as precise as
    its multiplier and sums, where that is not the float operand's. ``looks``, of "quantize":
    ``run`` of values that nobody looked at, under "minmax" and "raise"; it returns ``Seen`` too.
    ``rounds``, of "matmul": ``run`` of a float left operand, which it quantizes by itself to the
    scheme that comes second; None where it cannot, or the values are not finite.
    """

    name: str
    op: str
    declines: Callable[[Problem], str | None]
    run: Callable[..., Any]
    takes_extras: bool = False
    entering: str | None = None
    looks: Callable[..., Any] | None = None
    rounds: Callable[..., Any] | None = None

    def why_not(self, problem: Problem) -> str | None:
        """Why it cannot run a problem, or None when it can."""
        if not self.takes_extras:
            for scheme in (problem.a, problem.b):
                if isinstance(scheme, QuantScheme) and scheme.extras:
                    return f"it does not know {scheme.extras[0]}"
        return self.declines(problem)


def bucket(extent: int) -> int:
    """An extent rounded up to a power of two, so that few problems stand for many shapes.

    0 for one that a tracer does not know.
    """
    if not isinstance(extent, int):
        return 0
    return 1 << (extent - 1).bit_length() if extent > 0 else 0
