"""Faults that were found by attack: each test is the smallest input that showed one."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant as pq
from devices import needs, put
from polyquant.errors import NegativeInput

TINY = 2.0**-126


# -- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", ["-zero:u8", "-zero:f16", "-zero:f32"])
def test_the_zero_point_of_the_smallest_scale(offset: str, device: str) -> None:
    # The scale is 2^-127, a subnormal float32: -min / scale is 254 by exact exponent arithmetic.
    x = np.asarray([-127 * TINY, 0, TINY / 2, -TINY], np.float32)
    q = pq.quantize(put(x, device), f"u8/4:ue8m0{offset}").to("numpy")
    assert q.scales.tolist() == [0]
    assert q.offsets.tolist() == [254]
    assert q.codes().tolist() == [0, 254, 254, 252]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_codes_without_a_sign_take_zeros_and_subnormals(dtype: str, device: str) -> None:
    x = np.asarray([0.0, -0.0, -1e-40, 1.0], dtype)
    for scheme in ("u4/4:f32", "u8[dynamic8u]/4:f32"):
        q = pq.quantize(put(x, device), scheme).to("numpy")
        assert q.dequantize().tolist() == [0, 0, 0, 1]


def test_a_table_without_negative_entries_refuses_negative_numbers(device: str) -> None:
    x = put(np.asarray([0.5, -1.0], np.float32), device)
    with pytest.raises(NegativeInput, match=r"first at index \(1,\).*'q8s/2:f32'"):
        pq.quantize(x, "u8[dynamic8u]/2:f32")
    with pytest.raises(NegativeInput):
        pq.quantize(x, "u2[custom]/2:f32", table=[0, 1, 2, 3])
    pq.quantize(x, "u2[custom]/2:f32", table=[0, 1, 2, -3])


def test_a_negative_scale_makes_a_table_without_negative_entries_hold_them() -> None:
    x = np.asarray([-1.0, -3.0], np.float32)
    q = pq.quantize(x, "u2[custom]/2:f32", table=[0, 1, 2, 3], calibration="signed_max")
    assert q.dequantize().tolist() == [-1, -3]


# -- under jax.jit ----------------------------------------------------------------------------


@needs("jax")
@pytest.mark.parametrize("scheme", ["mxfp4", "q4s/8:f16", "u4/8:ue8m0-zero:u4"])
def test_weights_that_a_jitted_function_closes_over(scheme: str) -> None:
    # What is computed of known arrays inside jit cannot be looked at either.
    import jax

    w = jax.numpy.linspace(-1.0, 1.0, 32).reshape(4, 8)
    q = pq.quantize(w, scheme)
    inside, outside = jax.jit(lambda: (pq.quantize(w, scheme).dequantize(), q.dequantize()))()
    assert inside.tolist() == outside.tolist() == q.dequantize().tolist()
