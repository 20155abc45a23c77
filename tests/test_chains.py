"""Chains of views on a quantized tensor are the same chains on its values, to the bit.

After a chain the tensor still computes: a product and arithmetic of what came out are those of the
values that came out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

import polyquant as pq
from devices import assert_same_bits, host, needs, put
from moves import MAKERS, move
from polyquant import ops
from polyquant.errors import LayoutRefused
from polyquant.qtensor import validate
from strategies import Case, Host, cases, share

F32 = np.float32


def _quantized(case: Case, place: str) -> pq.QTensor:
    with np.errstate(all="ignore"):
        x = put(case.values, place)
        return pq.quantize(x, case.scheme, table=case.table)


def _check_chain(data: st.DataObject, case: Case, place: str) -> None:
    q = _quantized(case, place)
    values = host(q.dequantize())
    for _ in range(data.draw(st.integers(2, 6), "length")):
        name = data.draw(st.sampled_from(sorted(MAKERS)), "move")
        made = move(name, q.shape, lambda n: data.draw(st.integers(0, n - 1)))
        if made is None:
            continue
        note(f"{q!r} .{made.words}")
        after = made.numpy(values)
        if q.ndim and not after.ndim and _has_two_levels(q.scheme):
            with pytest.raises(LayoutRefused, match="a single number has no blocks"):
                made.ours(q)
            continue
        q, values = made.ours(q), after
        validate(q)
        assert q.shape == values.shape
        assert_same_bits(host(q.dequantize()), np.array(values), made.words)
    _check_compute(q, values, place)
    _check_product(q, values, place)


def _has_two_levels(scheme: pq.QuantScheme) -> bool:
    """Whether a tensor scale, here or of quantized scales, asks for blocks and so for an axis."""
    inner = (scheme.scale, scheme.offset and scheme.offset.dtype)
    nested = any(_has_two_levels(part) for part in inner if isinstance(part, pq.QuantScheme))
    return scheme.tensor_scale is not None or nested


def _check_compute(q: pq.QTensor, values: Host, place: str) -> None:
    """Element by element, and down to places, where no order of a sum has a say."""
    other = np.random.default_rng(values.size).normal(size=values.shape).astype(F32)
    with np.errstate(all="ignore"):
        assert_same_bits(host(ops.add(q, put(other, place))), values + other, "add")
        assert_same_bits(host(ops.greater(q, 0)), np.asarray(values > 0), "greater")
        if values.ndim and values.shape[-1]:
            wanted = np.max(values, axis=-1)
            np.testing.assert_array_equal(host(ops.max(q, axis=-1)), wanted)


def _check_product(q: pq.QTensor, values: Host, place: str) -> None:
    """Within the bound of the contract; of values that float32 sums cannot overflow."""
    if values.ndim < 1 or (np.abs(values) > 1e15).any():
        return
    x = np.random.default_rng(values.size).normal(size=(3, values.shape[-1])).astype(F32)
    got = host(pq.matmul(put(x, place), q.mT if q.ndim > 1 else q))
    wide = values.astype(np.float64)
    wide = np.swapaxes(wide, -1, -2) if wide.ndim > 1 else wide
    wanted, spread = x @ wide, np.abs(x) @ np.abs(wide)
    assert got.shape == wanted.shape
    limit = 8 * np.sqrt(x.shape[-1]) * 2.0**-24 * spread + np.abs(wanted) * 2.0**-24
    assert (np.abs(got - wanted) <= limit + 2.0**-126).all()


@given(case=cases(limit=400), data=st.data())
@settings(max_examples=share(0.6, nightly=0.4))
def test_chain(case: Case, data: Any) -> None:
    _check_chain(data, case, "numpy")


@needs("torch")
@given(case=cases(limit=400), data=st.data())
@settings(max_examples=share(0.6, nightly=0.4))
def test_chain_in_torch(case: Case, data: Any) -> None:
    _check_chain(data, case, "torch:cpu")
