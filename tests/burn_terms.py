"""From Burn's terms to ours: the schemes, inputs and operands of a case, and its tolerance."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import numpy as np

import polyquant as pq
from devices import host, put
from polyquant import codec, standard
from polyquant.values import ScaleDtype, scale_grid

Case = dict[str, Any]
Host = np.ndarray[Any, Any]
F32 = np.float32

_STORES = MappingProxyType(
    {"Native": "native", "PackedU32": "packed_u32", "PackedNative": "packed_native"}
)


def scheme_of(fields: Case) -> pq.QuantScheme:
    """Neither level set is one f32 scale for the tensor, as in Burn."""
    block, tensor_scale = fields["block_scale"], fields["tensor_scale"]
    levels: Case = {"block": None, "scale": (tensor_scale or "F32").lower()}
    if block is not None:
        levels = {
            "block": tuple(block["size"]),
            "scale": block["dtype"].lower(),
            "tensor_scale": tensor_scale and tensor_scale.lower(),
        }
    return pq.QuantScheme(
        fields["value"].lower(),
        mode=fields["mode"].lower(),
        store=_STORES[fields["store"]],
        **levels,
    )


def values_of(case: Case) -> Host:
    """The input as float32 (float64 where the case says so), generated where it must be."""
    generator = case.get("input_gen")
    if generator is None:
        numbers = np.asarray([float(x) for x in case["input"]])
    elif "arange" in generator:
        numbers = np.arange(*generator["arange"]) / generator.get("div", 1)
    else:
        numbers = _lcg_normal(math.prod(case["shape"])) * F32(case.get("std", 1.0))
        if "first_samples" in case:
            assert numbers[:8].tolist() == case["first_samples"]
    wide = case["args"].get("input_dtype") == "F64"
    with np.errstate(over="ignore"):  # beyond float32 is infinity
        return numbers.reshape(case["shape"]).astype(np.float64 if wide else F32)


def _lcg_normal(count: int) -> Host:
    """The cosine branch of Box and Muller over a linear congruential generator, in float32."""
    state, made = 2685821657736338717, []

    def uniform() -> np.float32:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return F32((F32(state >> 40) + F32(0.5)) / F32(2**24))

    for _ in range(count):
        first, second = uniform(), uniform()
        radius = np.sqrt(F32(-2.0) * np.log(first))
        made.append(radius * np.cos(F32(2 * math.pi) * second))
    return np.asarray(made, F32)


def assert_close(got: Any, case: Case, expected: Any = None, tolerance: Any = None) -> None:
    """Burn's rule: equal, or apart by less than ``max(abs, rel * larger magnitude)``."""
    wanted = np.asarray(case["expected"] if expected is None else expected, np.float64)
    limits = tolerance or case["tolerance"]
    found = np.asarray(got, np.float64).reshape(-1)
    wanted = wanted.reshape(-1)
    assert found.shape == wanted.shape
    with np.errstate(invalid="ignore"):  # of infinities
        larger = np.maximum(np.abs(found), np.abs(wanted))
        apart = np.abs(found - wanted)
        limit = np.maximum(limits["abs"], limits["rel"] * larger)
        good = (found == wanted) | (apart < limit)
    at = np.flatnonzero(~good)
    assert not at.size, f"at {at[:4]}: {found[at[:4]]}, not {wanted[at[:4]]}"


def assert_f32(got: Any, wanted: Any) -> None:
    """Equal float32 numbers, the sign of zero included."""
    found, numbers = np.asarray(got, F32).reshape(-1), np.asarray(wanted, F32).reshape(-1)
    np.testing.assert_array_equal(found, numbers)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(numbers))


def scale_numbers(q: pq.QTensor) -> Host:
    """The stored scales as float32 numbers."""
    return numbers_of_scales(host(q.scales), q.scheme.scale)


def numbers_of_scales(stored: Host, dtype: Any) -> Host:
    is_byte = ScaleDtype(dtype).storage == "uint8"
    return scale_grid(dtype)[stored] if is_byte else stored.astype(F32)


def rounded_up(x: Any, dtype: ScaleDtype, device: str) -> Host:
    """Numbers rounded up to a scale type: stored, and read back."""
    with np.errstate(all="ignore"):  # as quantize has it
        return numbers_of_scales(host(standard.as_stored(put(x, device), dtype)), dtype)


def tensor_of(case: Case, codes: Any, device: str, shape: Any = None) -> pq.QTensor:
    """A tensor of integer codes and the case's scales, by way of the bytes."""
    scheme, shape = scheme_of(case["scheme"]), tuple(shape or case["shape"])
    fields = np.asarray(codes).astype(np.int16) & (2**scheme.bits - 1)
    lines = fields.astype(np.uint8).reshape(shape)
    return from_bytes(case, codec.pack(np, lines, scheme.value, scheme.store), device, shape)


def from_bytes(case: Case, packed: Host, device: str, shape: tuple[int, ...]) -> pq.QTensor:
    scheme, args = scheme_of(case["scheme"]), case["args"]
    ideal = np.asarray(args["scales"], F32)
    run = [packed.tobytes(), standard.as_stored(ideal, ScaleDtype(scheme.scale)).tobytes()]
    if args.get("global") is not None:
        run.append(F32(args["global"]).tobytes())
    if "table" in args:
        run.append(np.asarray(args["table"], F32).tobytes())
    data = pq.TensorData(b"".join(run), shape, scheme, tuple(range(len(shape))))
    return pq.from_data(data, device)
