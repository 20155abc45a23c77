"""Quantizing by compiled kernels: every stored bit is the definition's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import assert_same_parts, needs
from native_cases import BFLOAT16, FEW, SCHEMES, fits, floats
from polyquant import calibrate, standard
from polyquant.backends.native import quantizing

FURTHER = (
    *("q8s/row:f16", "q8s/row:bf16", "e4m3/32:ue4m3", "e2m1/32:bf16", "u4/row:f16", "u8/32:f16"),
    *("u4[nf4]/64:f32@native", "u5/2x3:f16-zero:u5", "e5m2/tensor:f32", "u4[custom]/16:f16"),
    *("q4s/64:f32@packed_native", "u1[custom]/8:f16", "u8/row:bf16+bias:bf16", "e3m2/32:f32"),
    *("q4s/600:f16", "q8s/3x1:f32", "u8[dynamic8u]/64:f16", "q2f/16:f16", "u3/32:ue8m0-zero:bf16"),
)
SHAPES = ((3, 33), (5, 64), (17, 130), (2, 3, 70), (1, 1), (40,), (), (7, 1100), (0, 5), (5, 0))


def table(scheme: pq.QuantScheme) -> Any:
    if scheme.table == "custom":
        return np.linspace(-1, 2, 2**scheme.bits).astype(np.float32)
    return standard.named_constant(np.zeros(1, np.float32), scheme)


def sided(x: Any, scheme: pq.QuantScheme) -> Any:
    """Magnitudes, where a scheme has no negative numbers."""
    one_sided = scheme.table in (None, "dynamic8u") and scheme.offset is None
    return abs(x) if scheme.value[0] == "u" and one_sided else x


def check(x: Any, text: str, method: str = "minmax", nonfinite: str = "raise") -> None:
    scheme = pq.scheme(text)
    x = sided(x, scheme)
    given = {"table": table(scheme), "nonfinite": nonfinite}
    with np.errstate(all="ignore"):
        wanted = calibrate.quantize(np.array(x, order="C"), scheme, method, **given)
        got = quantizing.quantize(x, scheme, method, **given)
    try:
        assert_same_parts(got, wanted)
    except AssertionError as error:
        raise AssertionError(f"{text} {x.shape} {x.dtype} {x.strides} {method}: {error}") from None


def ranged(shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Numbers of every size: usual, over the whole range of float32, tied, tiny, none."""
    x = floats(shape, 1)
    powers = np.random.default_rng(2).integers(-38, 38, shape)
    yield "normal", x
    yield "huge ranges", (np.clip(x, -3, 3) * 10.0**powers).astype(np.float32)
    yield (
        "rows of all sizes",
        x * (10.0 ** (powers[..., :1] if shape else powers)).astype(np.float32),
    )
    yield "halves", np.round(x * 2) / 2
    yield "subnormal", x * np.float32(1e-39)
    yield "small", x * np.float32(3e-38)
    yield "zero", -np.zeros_like(x)
    yield "float16", x.astype(np.float16)
    yield "bfloat16", x.astype(BFLOAT16)


@pytest.mark.parametrize("text", (*SCHEMES, *FURTHER))
def test_every_scheme(target: str, text: str) -> None:
    for shape in SHAPES:
        if fits(text, shape):
            for _, x in ranged(shape):
                check(x, text)


@pytest.mark.parametrize("text", FEW)
def test_every_extent(target: str, text: str) -> None:
    for extent in range(1, 71):
        check(floats((3, extent), 3), text)
        check(floats((extent, 33), 3), text)


@pytest.mark.parametrize("text", (*FEW, "q8f-row", "nvfp4", "q4s-tensor", "u4/64:f32-zero:f16"))
def test_every_stride(target: str, text: str) -> None:
    wide = floats((90, 330), 4)
    for kind in (np.float32, np.float16, BFLOAT16):
        a = wide.astype(kind)
        read_only = a[:20, :70].copy()
        read_only.flags.writeable = False
        for x in (
            *(a[:20, :70].T, np.asfortranarray(a[:37, :70]), a[::3, ::3], a[::-1, ::-1]),
            *(a[:, 1:200], a[3:4], a[:, 5:6], read_only, np.broadcast_to(a[:1], (9, 330))),
            *(np.broadcast_to(a[:9, :1], (9, 70)), a[:16, :64].reshape(4, 4, 64).swapaxes(0, 2)),
            *(a[:20, :70].reshape(2, 10, 70)[:, ::2], a[0], a[0, ::2], a[:, 0]),
        ):
            if fits(text, x.shape):
                check(x, text)


@pytest.mark.parametrize("offset", range(1, 16))
def test_every_misalignment(target: str, offset: int) -> None:
    for kind in (np.float32, np.float16):
        x = floats((5, 70), 5, kind)
        for start in (offset, offset * x.itemsize):
            room = np.zeros(x.nbytes + 64, np.uint8)
            moved = room[start : start + x.nbytes].view(kind).reshape(x.shape)
            moved[...] = x
            check(moved, "q4s")
            check(moved, "u4/64:f32-zero:f16")


def test_foreign_byte_orders(target: str) -> None:
    for kind in (">f4", ">f2"):
        x = floats((5, 70), 5).astype(kind)
        got, wanted = pq.quantize(x, "q4s"), pq.quantize(x.astype(kind[1:]), "q4s")
        assert_same_parts(got, wanted)


@pytest.mark.parametrize("text", (*SCHEMES, *FURTHER))
def test_no_numbers_saturate(target: str, text: str) -> None:
    for shape in ((3, 33), (7, 130), (2, 600)):
        x = floats(shape, 6)
        x.flat[0], x.flat[-1], x.flat[7], x.flat[40] = np.nan, np.inf, -np.inf, -np.nan
        x[-1, :] = np.where(np.arange(shape[1]) % 2, np.nan, np.inf)
        for turned in (x, np.asfortranarray(x)):
            check(turned, text, nonfinite="saturate")
        with np.errstate(all="ignore"):
            check(x.astype(np.float16), text, nonfinite="saturate")


@pytest.mark.parametrize("method", ["absmean", "mse", "percentile", "signed_max", "mx_floor"])
def test_every_calibration(target: str, method: str) -> None:
    count = 0
    for text in (*SCHEMES, *FURTHER):
        try:
            calibrate.check(method, pq.scheme(text))
        except pq.errors.CalibrationRefused:
            continue
        count += 1
        check(floats((5, 96), 7), text, method)
    assert count


def test_what_is_not_finite_is_found_wherever_it_is(target: str) -> None:
    for shape in ((1, 1), (3, 70), (2, 600), (5, 513)):
        for at in {0, np.prod(shape) // 2, np.prod(shape) - 1}:
            for bad in (np.nan, np.inf, -np.inf):
                for kind in (np.float32, np.float16, BFLOAT16):
                    x = floats(shape, 8, kind)
                    assert quantizing.all_finite(x, pq.arrays.backend("numpy"))
                    x.flat[int(at)] = bad
                    for view in (x, np.asfortranarray(x), x[::-1]):
                        assert quantizing.all_finite(view, pq.arrays.backend("numpy")) is False
                        with pytest.raises(pq.errors.NonFiniteInput):
                            pq.quantize(view, "q4s")


def test_the_largest_numbers_are_finite(target: str) -> None:
    """Their sum is not."""
    x = np.full((4, 64), np.finfo(np.float32).max, np.float32)
    assert quantizing.all_finite(x, pq.arrays.backend("numpy"))
    check(x, "q4s")
    check(-x, "mxfp4")


@needs("torch")
def test_torch_tensors_are_quantized_alike(target: str) -> None:
    import torch

    x = floats((20, 70), 9)
    there = torch.from_numpy(x)
    for text in FEW:
        for a, b in ((x, there), (x.T, there.T), (x[:, ::2], there[:, ::2])):
            assert_same_parts(pq.quantize(b, text), pq.quantize(a, text))
        half = there.to(torch.bfloat16)
        assert_same_parts(pq.quantize(half, text), pq.quantize(x.astype(BFLOAT16), text))


@needs("torch")
def test_negated_views_of_torch_are_negated(target: str) -> None:
    import torch

    x = torch.from_numpy(floats((5, 64), 10))
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg()
    assert_same_parts(pq.quantize(negated, "q4s"), pq.quantize(-x, "q4s"))


def test_activations_beyond_2_31_elements(target: str, tmp_path: Any) -> None:
    """Lines, and numbers of a line, that lie 2^31 elements apart in a file of zeros."""
    apart = 2**31 + 24
    room = np.memmap(tmp_path / "x", np.float16, "w+", shape=(3, apart))
    for x in (room[:, :70], room[:, :40].T):
        x[...] = floats(x.shape, 11, np.float16)
        check(x, "q4s")
        check(x, "u4/64:f32-zero:f16")
