"""Many schemes on the same tensors: bits per element against error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polyquant.arrays import HostArray
from polyquant.errors import PolyquantError
from polyquant.files.checkpoint import Checkpoint
from polyquant.models.norms import squared_norm
from polyquant.models.selection import selected
from polyquant.ops import quantize
from polyquant.quality import measure, relative
from polyquant.scheme import QuantScheme


@dataclass(frozen=True)
class Measured:
    """One scheme over all tensors of a sweep.

    relative_error: ``|x - y| / |x|`` over all elements of all tensors (Frobenius norms).
    refused: why the scheme could not be measured; the numbers are then NaN.
    """

    name: str
    scheme: str
    bits_per_element: float
    relative_error: float
    size_bytes: int
    refused: str | None = None


@dataclass
class _Sum:
    """What adds up over tensors for one scheme."""

    squared_error: float = 0.0
    size_bytes: int = 0
    refused: str | None = None


def choose_tensors(
    checkpoint: Checkpoint,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    limit: int | None = None,
) -> list[str]:
    """The tensors to sweep over; with a limit, that many, evenly spread over the file.

    Raises NothingMatches.
    """
    names = [info.name for info in selected(checkpoint, include, exclude)]
    if limit is None or limit >= len(names):
        return names
    return [names[i * len(names) // limit] for i in range(limit)]


def sweep(
    checkpoint: Checkpoint,
    names: Sequence[str],
    schemes: Mapping[str, QuantScheme],
    on_step: Callable[[str, str], None] = lambda scheme, tensor: None,
) -> list[Measured]:
    """Quantize every tensor with every scheme; each tensor is read once.

    ``on_step`` hears of each scheme and tensor before it is measured. A scheme that refuses a
    tensor (its block has too many axes, say) gets the reason.
    """
    sums = {name: _Sum() for name in schemes}
    elements, squared = 0, 0.0
    for tensor in names:
        x = checkpoint[tensor]
        x_squared = squared_norm(x)
        elements, squared = elements + x.size, squared + x_squared
        for name, scheme in schemes.items():
            on_step(name, tensor)
            if sums[name].refused is None:
                _add(sums[name], x, x_squared, scheme)
        checkpoint.release()
    return [_point(name, schemes[name], sums[name], elements, squared) for name in schemes]


def _add(total: _Sum, x: HostArray, x_squared: float, scheme: QuantScheme) -> None:
    try:
        q = quantize(x, scheme)
    except PolyquantError as error:
        total.refused = str(error)
        return
    total.size_bytes += q.nbytes
    total.squared_error += measure(x, q).relative_error ** 2 * x_squared


def _point(name: str, scheme: QuantScheme, total: _Sum, elements: int, squared: float) -> Measured:
    if total.refused is not None:
        return Measured(name, str(scheme), math.nan, math.nan, 0, total.refused)
    bits = 8 * total.size_bytes / elements if elements else 0.0
    error = relative(total.squared_error, squared)
    return Measured(name, str(scheme), bits, error, total.size_bytes)
