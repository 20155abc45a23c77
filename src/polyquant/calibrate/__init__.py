"""Calibration: from values to stored scales. One table of methods, one function that quantizes.

A method takes ``(x, scheme, table, nonfinite, argument)`` with ``x`` in stored order and returns
the ``Params`` of the definition. Methods that choose by sums do so in float64 on the host, in a
fixed order, so that every backend chooses alike.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from types import MappingProxyType

from polyquant import standard
from polyquant.arrays import Array
from polyquant.calibrate import mse, ranges
from polyquant.errors import CalibrationRefused, InvalidArgument, UnknownName
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.standard import Params

Method = Callable[[Array, QuantScheme, Array | None, str, float | None], Params]


def _minmax(
    x: Array, scheme: QuantScheme, table: Array | None, nonfinite: str, argument: float | None
) -> Params:
    """The range of the values themselves."""
    return standard.minmax(x, scheme, table, nonfinite=nonfinite)


#: Name -> (method, why it cannot calibrate a scheme). A new method is one line here.
METHODS: MappingProxyType[str, tuple[Method, Callable[[QuantScheme], str | None]]] = (
    MappingProxyType(
        {
            "minmax": (_minmax, ranges.minmax_refuses),
            "absmean": (ranges.absmean, ranges.absmean_refuses),
            "mse": (mse.mse, mse.refuses),
            "percentile": (ranges.percentile, ranges.minmax_refuses),
            "signed_max": (ranges.signed_max, ranges.signed_max_refuses),
            "mx_floor": (ranges.mx_floor, ranges.mx_floor_refuses),
        }
    )
)


def check(calibration: str, scheme: QuantScheme) -> tuple[str, float | None]:
    """The method's name and argument ("percentile:99.5" has one), if it works for the scheme.

    Raises UnknownName, InvalidArgument, CalibrationRefused.
    """
    name, colon, text = str(calibration).partition(":")
    if name not in METHODS:
        near = get_close_matches(name, METHODS, n=1, cutoff=0.0)[0]
        raise UnknownName(
            what="calibration", got=calibration, known=", ".join(METHODS), nearest=near
        )
    argument = _argument(name, text) if colon else None
    if scheme.grouped:
        missing = "which element is in which group is in the tensor, and there is none yet"
        fix = "Leave out grouped; such tensors come from files"
        raise CalibrationRefused(calibration=name, scheme=str(scheme), reason=missing, fix=fix)
    reason = METHODS[name][1](scheme)
    if reason is not None:
        fix = "Use minmax" if METHODS["minmax"][1](scheme) is None else "Pass scales="
        raise CalibrationRefused(calibration=name, scheme=str(scheme), reason=reason, fix=fix)
    return name, argument


def _argument(name: str, text: str) -> float:
    wanted = "a number above 0 and at most 100, as in 'percentile:99.9'"
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if name != "percentile" or not 0 < number <= 100:
        if name != "percentile":
            wanted = f"{name!r} alone: only percentile takes a number"
        raise InvalidArgument(name="calibration", wanted=wanted, got=f"{name}:{text}")
    return number


def quantize(
    x: Array,
    scheme: QuantScheme,
    calibration: str,
    *,
    params: Params | None = None,
    table: Array | None = None,
    nonfinite: str = "raise",
) -> QTensor:
    """Quantize ``x`` (stored order): calibrate unless ``params`` are given, then encode."""
    if params is None:
        name, argument = check(calibration, scheme)
        params = METHODS[name][0](x, scheme, table, nonfinite, argument)
    return standard.quantize(x, scheme, params, nonfinite=nonfinite)
