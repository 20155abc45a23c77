"""Calibration: each method against numbers calculated by hand, and each library alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import polyquant as pq
from devices import assert_same_parts, host, needs, put
from polyquant import errors
from strategies import Case, cases, share

METHODS = ("minmax", "absmean", "mse", "percentile:90", "signed_max", "mx_floor")

# Awkward values are too small for some scale types, and are meant to be.
pytestmark = pytest.mark.filterwarnings("ignore::polyquant.errors.DeadBlocksWarning")


def scales(x: Any, scheme: str, **how: Any) -> Any:
    return pq.quantize(np.asarray(x, np.float32), scheme, **how).scales


# -- by hand ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "alpha", "wanted"),
    [
        ("q8s/4:f32", 127.0, 1.0),
        ("q8f/4:f32", 127.5, 1.0),
        ("q4s/4:f32", 14.0, 2.0),
        ("q4f/4:f32", 15.0, 2.0),
        ("e2m1/4:f32", 3.0, 0.5),
        ("e4m3/4:f32", 896.0, 2.0),
        ("e5m2/4:f32", 57344.0, 1.0),
        ("u4[nf4]/4:f32", 5.0, 5.0),
        ("u4[iq4_nl]/4:f32", 254.0, 2.0),
        ("u4/4:f32", 30.0, 2.0),
    ],
)
def test_minmax(scheme: str, alpha: float, wanted: float) -> None:
    np.testing.assert_array_equal(scales([alpha, 0, alpha / 2, 1], scheme), [wanted])


def test_minmax_with_a_bias() -> None:
    q = pq.quantize(np.asarray([-1, 0, 6.5, 2], np.float32), "u4/4:f32+bias:f32")
    np.testing.assert_array_equal(q.scales, [0.5])
    np.testing.assert_array_equal(q.offsets, [-1])
    np.testing.assert_array_equal(q.codes(), [0, 2, 15, 6])


def test_minmax_with_a_zero_point() -> None:
    q = pq.quantize(np.asarray([-1, 0, 6.5, 2], np.float32), "u4/4:f32-zero:u4")
    np.testing.assert_array_equal(q.scales, [0.5])
    np.testing.assert_array_equal(q.offsets, [2])
    np.testing.assert_array_equal(q.codes(), [0, 2, 15, 6])


def test_a_zero_points_range_holds_zero() -> None:
    q = pq.quantize(np.asarray([3, 7.5], np.float32), "u4/2:f32-zero:u4")
    np.testing.assert_array_equal(q.scales, [0.5])
    np.testing.assert_array_equal(q.offsets, [0])


def test_two_levels() -> None:
    """Block scales 448 and 1 of 6 (largest 2688/6 = 448): tensor scale 1, then 1/6 rounded up."""
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16] = 2688.0, 1.0
    q = pq.quantize(x, "nvfp4")
    assert float(q.tensor_scale) == 1.0
    np.testing.assert_array_equal(q.scales, [[0x7E, 0x23]])  # 448; 0.171875 = 1.375 * 2^-3


def test_scales_round_up_never_down() -> None:
    assert scales([127 * 1.0001, 0], "q8s/2:f16")[0] == np.float16(1.001)
    assert scales([127 * 2.5, 0], "q8s/2:ue8m0")[0] == 129  # 4.0


def test_absmean() -> None:
    """BitNet b1.58: the range is -+ mean |x| = 2, and q2s holds -1..1."""
    q = pq.quantize(np.asarray([1, -2, 3, -2], np.float32), "q2s/tensor:f32", calibration="absmean")
    np.testing.assert_array_equal(q.scales, [2])
    np.testing.assert_array_equal(q.codes(), [0, -1, 1, -1])


def test_percentile_is_the_nearest_rank() -> None:
    x = np.arange(1, 11)  # 90 % of ten values: the ninth
    np.testing.assert_array_equal(scales(x * 127, "q8s/row:f32", calibration="percentile:90"), [9])
    np.testing.assert_array_equal(
        scales(x * 127, "q8s/row:f32", calibration="percentile:100"), [10]
    )
    np.testing.assert_array_equal(scales(x * 127, "q8s/row:f32", calibration="percentile"), [10])


def test_percentile_with_an_offset_cuts_both_ends() -> None:
    q = pq.quantize(
        np.arange(1, 11, dtype=np.float32), "u8/row:f32+bias:f32", calibration="percentile:90"
    )
    np.testing.assert_array_equal(q.offsets, [2])
    assert float(q.scales[0]) == np.float32(7) / np.float32(255)


@pytest.mark.parametrize("extreme", [-8.0, 8.0])
def test_signed_max_puts_the_extreme_on_the_lowest_code(extreme: float) -> None:
    """ggml's Q4_0: d = extreme / -8."""
    x = np.asarray([extreme, 1, -3, 2], np.float32)
    q = pq.quantize(x, "q4f/4:f16", calibration="signed_max")
    np.testing.assert_array_equal(q.scales, [-extreme / 8])
    assert q.codes()[0] == -8
    assert q.dequantize()[0] == extreme


@pytest.mark.parametrize(
    ("alpha", "byte"),
    [
        (1.0, 125),
        (np.asarray(0x3FFFFFFF, np.uint32).view(np.float32), 125),  # just below 2: floor is 0
        (2.0, 126),
        (6.0, 127),
        (7.99, 127),
        (8.0, 128),
        (2.0**-126, 0),
        (2.0**-124, 1),
        (0.0, 0),
        (2.0**127, 252),
    ],
)
def test_mx_floor(alpha: float, byte: int) -> None:
    """OCP MX v1.0, section 6.3: floor(log2 amax) - 2 for e2m1, as a biased exponent."""
    x = np.asarray([alpha, 0], np.float32)
    assert scales(x, "e2m1/2:ue8m0", calibration="mx_floor")[0] == byte


def test_mx_floor_of_every_exponent() -> None:
    exponents = np.arange(-126, 128)
    x = np.ldexp(np.float32(1.75), exponents).astype(np.float32)
    found = scales(x, "e4m3/1:ue8m0", calibration="mx_floor")
    np.testing.assert_array_equal(found, np.clip(exponents - 8 + 127, 0, 254))


# -- mse and kmeans ---------------------------------------------------------------------------


def squared_errors(q: pq.QTensor, x: Any, width: int) -> Any:
    error = (q.dequantize("float64") - x.astype(np.float64)) ** 2
    return error.reshape(-1, width).sum(axis=1)


@pytest.mark.parametrize(
    "scheme", ["q4s/32:f32", "q2s/32:f16", "u4[nf4]/32:f32", "e2m1/32:ue8m0", "u3/32:f32+bias:f32"]
)
@pytest.mark.parametrize("family", ["normal", "laplace", "outliers", "constant", "zeros"])
def test_mse_is_never_worse_than_minmax(scheme: str, family: str) -> None:
    rng = np.random.default_rng(5)
    x = {
        "normal": rng.normal(size=(8, 64)),
        "laplace": rng.laplace(size=(8, 64)),
        "outliers": np.where(rng.random((8, 64)) < 0.05, 30.0, rng.normal(size=(8, 64))),
        "constant": np.full((8, 64), 0.3),
        "zeros": np.zeros((8, 64)),
    }[family].astype(np.float32)
    best = squared_errors(pq.quantize(x, scheme, calibration="mse"), x, 32)
    plain = squared_errors(pq.quantize(x, scheme), x, 32)
    assert (best <= plain).all()


def test_mse_gains_where_it_can() -> None:
    x = np.random.default_rng(6).laplace(size=(16, 128)).astype(np.float32)
    best = squared_errors(pq.quantize(x, "q3s/128:f32", calibration="mse"), x, 128).sum()
    plain = squared_errors(pq.quantize(x, "q3s/128:f32"), x, 128).sum()
    assert best < 0.8 * plain


def test_kmeans_is_deterministic_and_beats_nf4_on_laplace() -> None:
    x = np.random.default_rng(7).laplace(size=(64, 256)).astype(np.float32)
    fitted = [pq.quantize(x, "u4[custom]/64:f32", table="kmeans") for _ in range(2)]
    assert fitted[0].to_data() == fitted[1].to_data()
    table = fitted[0].table
    assert table.dtype == np.float32
    assert (np.diff(table) >= 0).all()
    named = pq.quantize(x, "nf4")
    assert squared_errors(fitted[0], x, 64).sum() < squared_errors(named, x, 64).sum()


@pytest.mark.parametrize("values", [np.zeros(8), np.full(8, 3.0), np.zeros(0)])
def test_kmeans_of_little(values: Any) -> None:
    x = values.astype(np.float32)
    q = pq.quantize(x, "u2[custom]/4:f32", table="kmeans")
    np.testing.assert_array_equal(q.dequantize(), x)


# -- every library alike ----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_libraries_calibrate_alike(device: str, method: str) -> None:
    scheme = "e2m1/32:ue8m0" if method == "mx_floor" else "q4f/32:f16"
    x = np.random.default_rng(8).laplace(size=(3, 70)).astype(np.float32)
    wanted = pq.quantize(x, scheme, calibration=method)
    assert_same_parts(pq.quantize(put(x, device), scheme, calibration=method), wanted)


def test_libraries_fit_alike(device: str) -> None:
    x = np.random.default_rng(9).normal(size=(3, 70)).astype(np.float32)
    wanted = pq.quantize(x, "u3[custom]/16:f16", table="kmeans")
    got = pq.quantize(put(x, device), "u3[custom]/16:f16", table="kmeans")
    np.testing.assert_array_equal(host(got.table), wanted.table)
    assert_same_parts(got, wanted)


@needs("torch")
@settings(max_examples=share(0.2))
@given(case=cases(limit=300))
def test_random_schemes_calibrate_alike(case: Case) -> None:
    for method in METHODS:
        try:
            wanted = pq.quantize(case.values, case.scheme, table=case.table, calibration=method)
        except errors.CalibrationRefused:
            continue
        there = put(case.values, "torch:cpu")
        got = pq.quantize(there, case.scheme, table=case.table, calibration=method)
        assert_same_parts(got, wanted)


# -- scales of the caller's own, and refusals -------------------------------------------------


def test_scales_of_ones_own() -> None:
    x = np.asarray([[3.0, -1.2, 40.0, 0.4]], np.float32)
    q = pq.quantize(x, "q4s/2:f16", scales=np.asarray([[0.5, 10.0]]))
    np.testing.assert_array_equal(q.scales, [[0.5, 10.0]])
    np.testing.assert_array_equal(q.codes(), [[6, -2, 4, 0]])
    assert pq.quantize(x, "q8s/tensor:f32", scales=2.0).codes()[0, 0] == 2  # 1.5 to even


def test_offsets_of_ones_own() -> None:
    x = np.asarray([[1.0, 2.0]], np.float32)
    q = pq.quantize(x, "u4/2:f32-zero:u4", scales=[[0.5]], offsets=[[3]])
    np.testing.assert_array_equal(q.codes(), [[5, 7]])
    np.testing.assert_array_equal(q.dequantize(), x)


def test_a_tensor_scale_of_ones_own() -> None:
    x = np.ones((1, 16), np.float32)
    q = pq.quantize(x, "nvfp4", scales=(np.asarray([[1.0]]), 0.25))
    assert float(q.tensor_scale) == 0.25
    np.testing.assert_array_equal(q.dequantize(), x)


@pytest.mark.parametrize(
    ("scheme", "how", "error"),
    [
        ("q4s", {"calibration": "minmx"}, errors.UnknownName),
        ("q4s", {"calibration": "percentile:0"}, errors.InvalidArgument),
        ("q4s", {"calibration": "percentile:x"}, errors.InvalidArgument),
        ("q4s", {"calibration": "mse:3"}, errors.InvalidArgument),
        ("q4s", {"calibration": "mx_floor"}, errors.CalibrationRefused),
        ("nvfp4", {"calibration": "absmean"}, errors.CalibrationRefused),
        ("u4", {"calibration": "signed_max"}, errors.CalibrationRefused),
        ("mxfp4", {"calibration": "signed_max"}, errors.CalibrationRefused),
        ("q4s/32:f32/tensor:f32", {}, errors.CalibrationRefused),
        ("q4s", {"scales": [[1.0]]}, errors.ScaleShape),
        ("q4s", {"scales": -np.ones((2, 2))}, errors.InvalidScale),
        ("q4s", {"scales": np.full((2, 2), np.nan)}, errors.InvalidScale),
        ("q4s", {"scales": (np.ones((2, 2)), 1.0)}, errors.ScaleArgument),
        ("q4s", {"offsets": np.ones((2, 2))}, errors.ScaleArgument),
        ("q4s", {"table": np.ones(16)}, errors.TableSuperfluous),
        ("nf4", {"table": np.ones(16)}, errors.TableSuperfluous),
        ("u4[custom]", {}, errors.TableMissing),
        ("u4[custom]", {"table": np.ones(15)}, errors.TableLength),
        ("u4[custom]", {"table": np.zeros(16)}, errors.TableInvalid),
        ("u4[custom]", {"table": np.full(16, np.nan)}, errors.TableInvalid),
        ("u4[custom]", {"table": "kmedians"}, errors.InvalidArgument),
        ("q4s", {"nonfinite": "ignore"}, errors.InvalidArgument),
    ],
)
def test_refusals(scheme: str, how: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        pq.quantize(np.ones((2, 64), np.float32), scheme, **how)


def test_values_that_are_no_numbers(device: str) -> None:
    x = np.ones((2, 64), np.float32)
    x[1, 3], x[1, 5] = np.nan, np.inf
    with pytest.raises(errors.NonFiniteInput) as caught:
        pq.quantize(put(x, device), "q4s")
    assert (caught.value.facts["count"], caught.value.facts["index"]) == (2, (1, 3))
    q = pq.quantize(put(x, device), "q4s", nonfinite="saturate")
    values = host(q.dequantize())
    assert values[1, 3] == 0
    assert values[1, 5] == values.max()


def test_negative_numbers_for_unsigned_codes(device: str) -> None:
    x = np.asarray([1.0, -2.0], np.float32)
    with pytest.raises(errors.NegativeInput, match="q4s"):
        pq.quantize(put(x, device), "u4")


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64])
def test_only_floats_are_quantized(dtype: Any) -> None:
    with pytest.raises(errors.NotFloat):
        pq.quantize(np.ones((2, 2), dtype), "q4s")


def test_quantizing_twice_is_refused() -> None:
    with pytest.raises(errors.AlreadyQuantized):
        pq.quantize(pq.quantize(np.ones((2, 32), np.float32), "q4s"), "q4s")


@needs("jax")
@pytest.mark.parametrize("method", ["mse", "percentile", "absmean"])
def test_methods_that_look_are_refused_under_a_tracer(method: str) -> None:
    import jax

    with pytest.raises(errors.TracedCalibration, match=method):
        jax.jit(lambda x: pq.quantize(x, "q4s", calibration=method))(np.ones((2, 32), np.float32))
