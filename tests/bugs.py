"""What the tests of other libraries' faults share: kinds of scheme, places, and bounds.

The faults are in test_bug_layouts.py (views and strides), test_bug_sizes.py (sizes that are not
nice) and test_bug_cases.py (numbers and codes).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from computations import compare
from devices import DEVICES, assert_same_bits, host
from moves import MAKERS, move, seeded
from polyquant import standard
from polyquant.codec import pack
from polyquant.qtensor import validate

Host = np.ndarray[Any, Any]
F32 = np.float32

#: Where cases run: NumPy and torch. jax, which compiles anew for every shape, joins where compilers
#: go wrong in their own ways; that all libraries agree to the bit is another test's business.
PLACES = [d for d in DEVICES if d in ("numpy", "torch:cpu")]
JAX = [d for d in DEVICES if d.startswith("jax")]

everywhere = pytest.mark.parametrize("place", PLACES)
with_jax = pytest.mark.parametrize("place", PLACES + JAX)

#: One scheme of every kind of code, scale, block, offset, nesting and store.
KINDS = (
    "q8s/tensor:f32",
    "q8s/row:f32",
    "q8f/32:bf16@native",
    "q4s/32:f16",
    "q2s/16:f32@packed_native",
    "q3s/8:f16",
    "q5f/2x16:f16",
    "u4/32:f16+bias:f16",
    "u4/32:f16-zero:u4",
    "u8/16:f32-zero:f16",
    "e4m3/*x16:ue8m0",
    "e5m2/4x4:f32",
    "e2m3/32:ue8m0",
    "e2m1/16:ue4m3/tensor:f32",
    "q8s/2x16:f16/tensor:f32",
    "u4[nf4]/64:f32",
    "nf4-double",
    "iq4_nl",
)
every_kind = pytest.mark.parametrize("kind", KINDS)
#: Those that run every computation, which starts from the same decoded values in all of them.
COMPUTING = frozenset({"q8s/tensor:f32", "q4s/32:f16", "e5m2/4x4:f32", "nf4-double"})


def noise(*shape: int, seed: int = 1, std: float = 1.0) -> Host:
    return (np.random.default_rng(seed).normal(size=shape) * std).astype(F32)


def transposed(array: Any) -> Any:
    """All axes reversed, without a copy, in any library."""
    return standard.namespace(array).permute_dims(array, tuple(reversed(range(len(array.shape)))))


def relative_error(x: Host, q: pq.QTensor) -> float:
    wide = x.astype(np.float64)
    back = host(q.dequantize()).astype(np.float64)
    return float(np.linalg.norm(back - wide) / np.linalg.norm(wide))


def tensor(
    kind: str, codes: Any, scales: Any, place: str = "numpy", offsets: Any = None
) -> pq.QTensor:
    """A tensor of given codes, scales and offsets, made without quantizing anything."""
    scheme = pq.scheme(kind)
    codes = np.asarray(codes)
    grid = scheme.scale_shape(codes.shape)
    fields = (codes.astype(np.int16) & (2**scheme.bits - 1)).astype(np.uint8)
    stored = standard.as_stored(np.broadcast_to(np.asarray(scales, F32), grid), scheme.scale)
    made = pq.QTensor(
        scheme,
        codes.shape,
        pack(np, fields, scheme.value, scheme.store),
        stored,
        offsets=None if offsets is None else np.broadcast_to(offsets, grid).copy(),
        device="numpy",
    )
    return made.to(place)


def bound(a: Host, b: Host, unit: float = 2.0**-24) -> Host:
    """The contract's bound of a product, per element, before the rounding of the result."""
    return 8 * math.sqrt(a.shape[-1]) * unit * (np.abs(a, dtype=float) @ np.abs(b, dtype=float))


def assert_product(got: Any, a: Host, b: Host) -> None:
    """Within the bound of the float64 product of the same operands."""
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    assert tuple(got.shape) == wanted.shape
    assert (np.abs(host(got) - wanted) <= bound(a, b) + np.abs(wanted) * 2.0**-24).all()


def assert_view(got: pq.QTensor, wanted: Host, words: str = "") -> None:
    """A sound QTensor with exactly these values."""
    validate(got)
    assert got.shape == wanted.shape, words
    assert_same_bits(host(got.dequantize()), np.array(wanted, order="C"), words)


def check_moves(q: pq.QTensor, seeds: Iterable[int]) -> None:
    """Views of every sort, with arguments of the seeds, are those of the decoded values."""
    values = host(q.dequantize())
    for name, seed in itertools.product(MAKERS, seeds):
        made = move(name, q.shape, seeded(seed))
        if made is not None:
            assert_view(made.ours(q), made.numpy(values), made.words)


def check_computations(q: pq.QTensor, kind: str, place: str) -> None:
    """Computations of every sort, for the kinds that run them."""
    if kind in COMPUTING:
        compare(q, place)
