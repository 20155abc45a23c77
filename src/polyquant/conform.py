"""The conformance suite: does a device keep the numerical contract?

Every kernel of the device, pinned in turn, against the definition run by NumPy: quantizing gives
the same codes and stored parts, bit for bit; dequantizing the same values, bit for bit; a product
stays within the bound of the contract's section 6; what travels to the device and back is the same.
A kernel is left out only where its own ``why_not`` says so. Inputs are seeded: two runs check the
same numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from polyquant.arrays import (
    Array,
    Backend,
    HostArray,
    backend_of_device,
    device_kind,
    held_dtypes,
    namespace,
)
from polyquant.arrays import dtype as dtype_of
from polyquant.dispatch import choose, kernels, one_operand_problem
from polyquant.errors import DeadBlocksWarning, InvalidArgument, KernelRefused, NoKernel
from polyquant.kernel import Kernel, Problem
from polyquant.ops import matmul, quantize
from polyquant.presets import PRESETS
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme
from polyquant.tables import CUSTOM, named_table
from polyquant.values import QuantMode, QuantValue

#: Beside the presets: every value type, scale type, kind of offset, nesting, level, store, block.
_VALUES = tuple(f"{value}/32:f16" for value in QuantValue)
_SCALES = ("q4s/16:f32", "q4s/16:bf16", "q4s/16:ue8m0", "q4s/16:ue4m3", "e2m1/16:f16/tensor:f32")
_TABLES = (
    "u8[dynamic8]/64:f32",
    "u8[dynamic8u]/64:f16",
    "u4[iq4_nl]/32:ue4m3/tensor:f32",
    "u1[custom]/8:f16",
    "u3[custom]/16:bf16",
    "u4[custom]/row:f32",
)
_OFFSETS = (
    "u4/32:f16+bias:f16",
    "u5/32:f32+bias:f32",
    "u8/row:bf16+bias:bf16",
    "u4/32:f16-zero:u4",
    "u8/row:f32-zero:u8",
    "u2/32:f16-zero:f16",
    "u4/32:f16-zero:f32",
    "u3/32:ue8m0-zero:bf16",
)
_NESTED = (
    "q4s/16:(q8s/32:f16)",
    "u4[nf4]/32:(e4m3/row:f32)",
    "u4/32:(u6/8:f16)+bias:(q6s/8:f16)",
)
_STORES = tuple(
    f"{text}@{store}"
    for text in ("q4s/32:f16", "q3s/16:f16", "e2m3/32:ue8m0", "u4[nf4]/64:f32", "u5/32:f16-zero:u5")
    for store in ("packed_native", "native")
)
_BLOCKS = (
    "q8s/2x16:f16",
    "q4s/4x8:f32",
    "e4m3/3x5:f32",
    "q4f/*x1:f16",
    "q8s/*x*:f32",
    "q4s/7:f16",
    "q8s/1:f32",
    "q5f/2x3x4:f16",
)
_FURTHER = (*_VALUES, *_SCALES, *_TABLES, *_OFFSETS, *_NESTED, *_STORES, *_BLOCKS)
#: One of each kind.
_QUICK = (
    "q8s-tensor",
    "int8",
    "q4s-32",
    "fp8-128x128",
    "mxfp4",
    "mxfp6-e3m2",
    "mxfp8",
    "nvfp4",
    "nf4",
    "nf4-double",
    "iq4_nl",
    "ternary",
    "q3s/16:f16@packed_native",
    "u4/32:f16+bias:f16",
    "u4/32:f16-zero:u4",
    "u4/32:(u6/8:f16)+bias:(q6s/8:f16)",
    "u3[custom]/16:bf16",
    "q8s/2x16:f16@native",
)

#: Shapes that are quantized: whole and short blocks, one element, odd lengths, batches, nothing.
_SHAPES = ((3, 70), (1, 1), (33,), (2, 3, 40), (16, 128), (0, 8), (4, 0))
#: One shape for all that is quick, since JAX compiles every operation for every shape.
_QUICK_SHAPE = (33, 70)
#: (m, n, k) of products: one row, odd extents, and extents that fast kernels take.
_PRODUCTS = ((1, 128, 256), (2, 48, 70), (5, 33, 65), (16, 64, 128), (70, 96, 512))
_QUICK_PRODUCTS = ((1, *_QUICK_SHAPE), (5, *_QUICK_SHAPE))
_DTYPES = ("float32", "float16", "bfloat16", "float64")
#: Unit roundoffs: 2^-(bits of the significand).
_ROUNDOFF = MappingProxyType(
    {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
)
_SMALLEST = MappingProxyType(
    {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-126}
)


class Result(NamedTuple):
    """One check: its section, the scheme, what was checked, and what went wrong where it failed."""

    name: str
    scheme: str
    what: str
    passed: bool
    detail: str
    kernel: str


class Summary(NamedTuple):
    """Section -> (passed, failed), and the checks that failed."""

    counts: dict[str, tuple[int, int]]
    failures: tuple[Result, ...]

    def __str__(self) -> str:
        lines = [
            f"{name}: {good} passed, {bad} failed" for name, (good, bad) in self.counts.items()
        ]
        lines += [f"  {r.name} {r.scheme} {r.what} {r.kernel}: {r.detail}" for r in self.failures]
        return "\n".join(lines)


class _Place(NamedTuple):
    """The device that is checked."""

    owner: Backend
    device: str
    dtypes: tuple[str, ...]

    def put(self, array: HostArray) -> Array:
        return self.owner.from_host(np.array(array), self.device)

    def kernels(self, op: str) -> list[Kernel]:
        found = kernels(self.owner.name, device_kind(self.device))
        return [kernel for kernel in found if kernel.op == op]


class _Input(NamedTuple):
    """Values to quantize, with the table of a custom lookup."""

    what: str
    values: HostArray
    scheme: QuantScheme
    table: HostArray | None

    def reference(self) -> QTensor:
        """The definition's answer, by NumPy."""
        return self.quantized(self.values, "definition.quantize")

    def quantized(self, x: Array, kernel: str | None = None) -> QTensor:
        """``x`` under the scheme; awkward values lose blocks, and are meant to."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeadBlocksWarning)
            return quantize(x, self.scheme, table=self.table, kernel=kernel)


def checks(
    device: str,
    *,
    quick: bool = False,
    schemes: Iterable[QuantScheme | str] = (),
    jobs: int = 1,
) -> Iterator[Result]:
    """Run the suite on a device ("torch:cuda:0"), yielding each result as it is known.

    ``quick`` takes fewer schemes and sizes; ``schemes``, where there are any, stand in place of the
    suite's own. ``jobs`` processes share the schemes; the results and their order are the same. (A
    script that asks for several does so under ``if __name__ == "__main__"``.) Raises UnknownScheme,
    UnknownDevice, BackendMissing, InvalidArgument, and NoKernel for a device that declines
    everything, of which nothing could be said.
    """
    if not isinstance(jobs, int) or jobs < 1:
        raise InvalidArgument(name="jobs", wanted="at least 1", got=jobs)
    chosen = [as_scheme(s) for s in schemes or (_QUICK if quick else (*PRESETS, *_FURTHER))]
    owner, device = backend_of_device(device)
    choose(owner.name, Problem("dequantize", device_kind(device), as_scheme("q4s")))
    held = held_dtypes(namespace(owner.from_host(np.zeros(1, np.float32), device)))
    dtypes = tuple(name for name in _DTYPES if name in held)
    if jobs == 1:
        for scheme in chosen:
            yield from _checks_of(scheme, _Place(owner, device, dtypes), quick=quick)
        return
    # New processes: a copy of this one could not use what a library has opened of a GPU.
    with ProcessPoolExecutor(min(jobs, len(chosen)), get_context("spawn")) as pool:
        asked = [pool.submit(_listed, str(scheme), device, dtypes, quick) for scheme in chosen]
        try:
            for each in asked:
                yield from each.result()
        finally:
            for each in asked:  # whoever stops early, or is stopped, waits for no more than began
                each.cancel()


def _listed(scheme: str, device: str, dtypes: tuple[str, ...], quick: bool) -> list[Result]:
    place = _Place(backend_of_device(device)[0], device, dtypes)
    return list(_checks_of(as_scheme(scheme), place, quick=quick))


def _checks_of(scheme: QuantScheme, place: _Place, *, quick: bool) -> Iterator[Result]:
    for given in _inputs(scheme, place.dtypes, quick=quick):
        wanted = given.reference()
        yield from _quantize_checks(place, given, wanted)
        kinds = ("float32",) if quick and given.what[:6] != "normal" else place.dtypes
        yield from _dequantize_checks(place, given, wanted, kinds)
        yield _transfer_check(place, given, wanted)
    yield from _layout_checks(place, scheme, quick=quick)
    yield from _product_checks(place, scheme, quick=quick)


def summary(results: Iterable[Result]) -> Summary:
    """Counts by section, and the failures."""
    counts: dict[str, tuple[int, int]] = {}
    failures = []
    for result in results:
        good, bad = counts.get(result.name, (0, 0))
        counts[result.name] = (good + result.passed, bad + (not result.passed))
        if not result.passed:
            failures.append(result)
    return Summary(counts, tuple(failures))


# -- what is quantized ------------------------------------------------------------------------


def _inputs(scheme: QuantScheme, dtypes: tuple[str, ...], *, quick: bool) -> Iterator[_Input]:
    """Normal numbers in every dtype, then awkward ones in float32, then awkward shapes."""
    shapes: list[tuple[int, ...]] = [s for s in _SHAPES if len(s) >= _rank(scheme)]
    if quick or not shapes:
        shapes = [_quick_shape(scheme)]
    first = shapes[0]
    for kind in dtypes:
        yield _input(scheme, first, "normal", kind)
    for what in _MAKERS:
        if what != "normal":
            yield _input(scheme, first, what, "float32")
    for shape in shapes[1:]:
        yield _input(scheme, shape, "normal", "float32")


def _input(scheme: QuantScheme, shape: tuple[int, ...], what: str, kind: str) -> _Input:
    rng = np.random.default_rng([len(str(scheme)), *shape])
    values = _MAKERS[what](rng, shape)
    table = _table(scheme)
    if not _is_signed(scheme, table):
        values = np.abs(values)
    return _Input(f"{what} {kind} {shape}", _rounded(values, kind), scheme, table)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> HostArray:
    return rng.normal(size=shape)


def _wide(rng: np.random.Generator, shape: tuple[int, ...]) -> HostArray:
    """Every exponent that float32 has, its subnormal ones too."""
    return np.ldexp(rng.uniform(0.5, 1, shape), rng.integers(-148, 120, shape)) * _sign(rng, shape)


def _blockwise(rng: np.random.Generator, shape: tuple[int, ...]) -> HostArray:
    """One magnitude a row, from subnormal to near the end."""
    rows = np.ldexp(1.0, rng.integers(-140, 120, (*shape[:-1], 1)))
    return rng.normal(size=shape) * rows


def _zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> HostArray:
    """Zeros of both signs, and a few numbers."""
    return np.where(rng.random(shape) < 0.05, rng.normal(size=shape), 0.0) * _sign(rng, shape)


def _subnormal(rng: np.random.Generator, shape: tuple[int, ...]) -> HostArray:
    """Numbers around the smallest normal float32."""
    return rng.normal(size=shape) * 2.0**-125


def _huge(rng: np.random.Generator, shape: tuple[int, ...]) -> HostArray:
    return np.clip(rng.normal(size=shape), -3, 3) * 1e38


def _ties(rng: np.random.Generator, shape: tuple[int, ...]) -> HostArray:
    """Halves, with an extreme that makes scales whole or nearly so."""
    values = rng.integers(-15, 16, shape) / 2.0
    values[..., :1] = 127.0
    return values


def _sign(rng: np.random.Generator, shape: tuple[int, ...]) -> HostArray:
    return np.where(rng.random(shape) < 0.5, -1.0, 1.0)


#: What is quantized: name -> how it is made.
_MAKERS: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], HostArray]] = (
    MappingProxyType(
        {
            "normal": _normal,
            "wide": _wide,
            "blockwise": _blockwise,
            "zeros": _zeros,
            "subnormal": _subnormal,
            "huge": _huge,
            "ties": _ties,
        }
    )
)


def _rounded(values: HostArray, kind: str) -> HostArray:
    return values.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)


def _table(scheme: QuantScheme) -> HostArray | None:
    """Entries for a custom table: uneven, unsorted, with one repeated."""
    if scheme.table != CUSTOM:
        return None
    count = 2**scheme.bits
    table = np.sin(np.arange(count) * 2.4 + 0.3).astype(np.float32) * 3
    table[count // 2] = table[0] if count > 2 else -table[0]
    return table


def _is_signed(scheme: QuantScheme, table: HostArray | None) -> bool:
    """Whether the codes, or the entries that they look up, hold negative numbers."""
    if scheme.mode is QuantMode.LOOKUP:
        entries = named_table(str(scheme.table)) if table is None else table
        return bool(entries.min() < 0)
    return scheme.mode is QuantMode.AFFINE or scheme.value.is_signed


def _rank(scheme: QuantScheme) -> int:
    return 0 if scheme.block is None else len(scheme.block)


def _quick_shape(scheme: QuantScheme) -> tuple[int, ...]:
    more = _rank(scheme) - 2
    return _QUICK_SHAPE if more <= 0 else ((2,) * more + (4, 35))


# -- quantize, dequantize, transfer -----------------------------------------------------------


def _quantize_checks(place: _Place, given: _Input, wanted: QTensor) -> Iterator[Result]:
    there = place.put(given.values)
    for kernel in place.kernels("quantize"):
        try:
            q = given.quantized(there, kernel.name)
        except KernelRefused:
            continue
        detail = _parts_differ(q, wanted)
        yield _result("quantize", given.scheme, given.what, detail, kernel)


def _dequantize_checks(
    place: _Place, given: _Input, wanted: QTensor, kinds: tuple[str, ...]
) -> Iterator[Result]:
    q = wanted.to(place.device)
    problem = one_operand_problem("dequantize", q, q.device)
    xp = namespace(q.data)
    for kernel in place.kernels("dequantize"):
        if kernel.why_not(problem) is not None:
            continue
        for kind in kinds:
            with np.errstate(all="ignore"):
                values = kernel.run(q, dtype_of(xp, kind))
            detail = _differ(place.owner.to_host(values), wanted.dequantize(kind), "the values")
            what = f"{given.what} to {kind}"
            yield _result("dequantize", given.scheme, what, detail, kernel)


def _transfer_check(place: _Place, given: _Input, wanted: QTensor) -> Result:
    there = wanted.to(place.device)
    detail = _parts_differ(there, wanted) or _parts_differ(there.to("numpy"), wanted)
    if not detail and there.to_data() != wanted.to_data():
        detail = "the host forms differ"
    return _result("transfer", given.scheme, given.what, detail)


def _parts_differ(got: QTensor, wanted: QTensor) -> str:
    """What differs between the stored arrays of two tensors, or nothing."""
    mine, asked = got.to("numpy").parts(), wanted.parts()
    if mine.keys() != asked.keys():
        return f"its parts are {sorted(mine)}, not {sorted(asked)}"
    return next(filter(None, (_differ(mine[name], asked[name], name) for name in asked)), "")


def _differ(got: HostArray, wanted: HostArray, what: str) -> str:
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return f"{what}: {got.dtype} {got.shape}, not {wanted.dtype} {wanted.shape}"
    differs = np.flatnonzero(_bits(got) != _bits(wanted))
    if differs.size == 0:
        return ""
    at = int(differs[0])
    mine, asked = got.reshape(-1)[at], wanted.reshape(-1)[at]
    return (
        f"{what}: {differs.size} of {got.size} differ, the first at {at}: {mine!r}, not {asked!r}"
    )


def _bits(array: HostArray) -> HostArray:
    """The bits, flat; every NaN counts as one, since its payload is the machine's choice."""
    flat = np.array(array).reshape(-1)
    if flat.dtype.kind not in "iub":
        flat = np.where(np.isnan(flat), np.asarray(np.nan, flat.dtype), flat)
    return flat.view(f"u{flat.dtype.itemsize}")


def _result(
    name: str, scheme: QuantScheme, what: str, detail: str, kernel: Kernel | None = None
) -> Result:
    return Result(name, str(scheme), what, not detail, detail, kernel.name if kernel else "")


# -- layouts ----------------------------------------------------------------------------------


def _layout_checks(place: _Place, scheme: QuantScheme, *, quick: bool) -> Iterator[Result]:
    """Views of the device's arrays quantize like copies; permuted tensors dequantize permuted."""
    shape = _quick_shape(scheme)
    given = _input(scheme, shape, "normal", "float32")
    views = list(_views(place, given.values))
    if not quick:
        views.append(_sliced(place, given.values))
    for what, host, there in views:
        try:
            got = given.quantized(there)
        except NoKernel:
            break
        yield _result("layout", scheme, what, _parts_differ(got, given.quantized(host)))
    wanted = given.reference()
    there = wanted.to(place.device)
    for what in ("T", "mT"):
        try:
            values = place.owner.to_host(getattr(there, what).dequantize())
        except NoKernel:
            break
        axes = tuple(getattr(wanted, what).axes)
        detail = _differ(values, np.transpose(wanted.dequantize(), axes), "the values")
        yield _result("layout", scheme, f"{what} of a tensor", detail)


def _views(place: _Place, values: HostArray) -> Iterator[tuple[str, HostArray, Array]]:
    """(name, contiguous host values, a view on the device that holds the same)."""
    axes = tuple(reversed(range(values.ndim)))
    turned = place.put(np.ascontiguousarray(np.transpose(values, axes)))
    xp = namespace(turned)
    yield "transposed", values, xp.permute_dims(turned, axes)
    wide = np.repeat(values, 2, axis=-1)
    wide[..., 1::2] = 9.0
    yield "strided", values, place.put(wide)[..., ::2]
    row = values[:1]
    yield (
        "broadcast",
        np.ascontiguousarray(np.broadcast_to(row, values.shape)),
        xp.broadcast_to(place.put(row), values.shape),
    )


def _sliced(place: _Place, values: HostArray) -> tuple[str, HostArray, Array]:
    there = place.put(values)[1:, ..., 1:]
    return "sliced", np.ascontiguousarray(values[1:, ..., 1:]), there


# -- products ---------------------------------------------------------------------------------


class _Operand(NamedTuple):
    """One side of a product: on the device, and its exact values as float64."""

    there: Any
    values: HostArray


def _product_checks(place: _Place, scheme: QuantScheme, *, quick: bool) -> Iterator[Result]:
    """Every matmul kernel on x @ w.mT, x @ w, w @ x, batches, and both sides quantized."""
    sizes = _QUICK_PRODUCTS if quick else _PRODUCTS
    lead = (1,) * max(0, _rank(scheme) - 2)
    for m, n, k in sizes:
        weight = _weight(place, scheme, (*lead, n, k))
        turned = _Operand(weight.there.mT, np.swapaxes(weight.values, -1, -2))
        for kind in place.dtypes:
            x = _float(place, (m, k), kind)
            yield from _products(place, scheme, f"{kind} ({m}, {k}) x w.mT", x, turned, kind)
    m, *shape = sizes[-1]
    yield from _other_orders(place, scheme, (*lead, *shape), m)


def _other_orders(
    place: _Place, scheme: QuantScheme, shape: tuple[int, ...], m: int
) -> Iterator[Result]:
    k, n = shape[-2:]
    kind = "float32"
    weight = _weight(place, scheme, shape)
    x = _float(place, (m, k), kind)
    yield from _products(place, scheme, f"{kind} ({m}, {k}) x w", x, weight, kind)
    after = _float(place, (n, m), kind)
    yield from _products(place, scheme, f"{kind} w x ({n}, {m})", weight, after, kind)
    vector = _float(place, (k,), kind)
    yield from _products(place, scheme, f"{kind} ({k},) x w", vector, weight, kind)
    batch = _float(place, (2, 3, k), kind)
    yield from _products(place, scheme, f"{kind} (2, 3, {k}) x w", batch, weight, kind)
    turned = _Operand(weight.there.mT, np.swapaxes(weight.values, -1, -2))
    for result in (kind, "bfloat16")[: 1 + ("bfloat16" in place.dtypes)]:
        what = f"quantized ({k}, {n}) x w.mT to {result}"
        yield from _products(place, scheme, what, weight, turned, result)
    empty = _float(place, (0, k), kind)
    yield from _products(place, scheme, f"{kind} (0, {k}) x w", empty, weight, kind)


def _weight(place: _Place, scheme: QuantScheme, shape: tuple[int, ...]) -> _Operand:
    q = _input(scheme, shape, "normal", "float32").reference()
    return _Operand(q.to(place.device), q.dequantize("float64"))


def _float(place: _Place, shape: tuple[int, ...], kind: str) -> _Operand:
    values = _rounded(np.random.default_rng([9, *shape]).normal(size=shape), kind)
    return _Operand(place.put(values), values.astype(np.float64))


def _products(
    place: _Place, scheme: QuantScheme, what: str, a: _Operand, b: _Operand, kind: str
) -> Iterator[Result]:
    for kernel in place.kernels("matmul"):
        try:
            y = matmul(a.there, b.there, out_dtype=kind, kernel=kernel.name)
        except KernelRefused:
            continue
        entering = "float32" if kernel.name.startswith("definition") else kernel.entering or kind
        detail = product_error(place.owner.to_host(y), a.values, b.values, kind, entering)
        yield _result("matmul", scheme, what, detail, kernel)


def product_error(y: HostArray, a: HostArray, b: HostArray, kind: str, entering: str) -> str:
    """What is wrong with ``y = a @ b``, or nothing where it keeps the contract's bound.

    ``a``, ``b``: the dequantized operands, exact in float64. ``kind``: the dtype of the float
    operand and of the result. ``entering``: the narrowest in which operands may enter the
    multiplier. The bound is ``8 * sqrt(k) * u * (|a| @ |b|)`` and one rounding of the result, with
    ``u`` the unit roundoff of the narrower of float32 and ``entering``.
    """
    wanted = a @ b
    if y.shape != wanted.shape or y.dtype != np.dtype(_rounded(wanted[:0], kind).dtype):
        return f"the result is {y.dtype} {y.shape}, not {kind} {wanted.shape}"
    roundoff = max(_ROUNDOFF["float32"], _ROUNDOFF[entering])
    bound = 8 * math.sqrt(a.shape[-1]) * roundoff * (np.abs(a) @ np.abs(b))
    bound = bound + _ROUNDOFF[kind] * np.abs(wanted) + _SMALLEST[kind]
    error = np.abs(y.astype(np.float64) - wanted)
    beyond = ~(error <= bound)  # NaN is beyond every bound
    if not beyond.any():
        return ""
    at = tuple(int(i) for i in np.unravel_index(np.argmax(error / bound), error.shape))
    ratio = float(error[at] / bound[at])
    count = int(beyond.sum())
    return f"{count} of {error.size} beyond the bound, the worst {ratio:.3g} times it at {at}"
