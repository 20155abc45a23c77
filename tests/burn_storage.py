"""Runs Burn's cases of schemes, scales, quantizing, bytes, minifloats and accuracy.

A function takes the case and a device and asserts. The table at the end says which runs what.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

import polyquant as pq
from burn_terms import (
    F32,
    Case,
    Host,
    assert_close,
    assert_f32,
    from_bytes,
    numbers_of_scales,
    rounded_up,
    scale_numbers,
    scheme_of,
    tensor_of,
    values_of,
)
from devices import host, put
from polyquant import codec, standard
from polyquant.data import data_size_bytes, parts
from polyquant.values import (
    QuantStore,
    QuantValue,
    ScaleDtype,
    decode_table,
    host_float,
    scale_grid,
)

#: Cases where Burn rounds exact ties away from zero and polyquant to even: one code apart.
TIES = frozenset({"flex-q8f-dynamic", "packed-slice-with-step-rows"})

# -- schemes and blocks -----------------------------------------------------------------------


def _block(extents: list[int]) -> pq.QuantScheme:
    return pq.QuantScheme("q8s", block=tuple(extents))


def block_equal(case: Case, device: str) -> None:
    args = case["args"]
    assert (_block(args["a"]) == _block(args["b"])) is case["expected"]


def block_dim_vec(case: Case, device: str) -> None:
    args = case["args"]
    assert list(_block(args["block"]).block_extents((999,) * args["rank"])) == case["expected"]


def block_canonical(case: Case, device: str) -> None:
    assert list(_block(case["args"]["block"]).block or ()) == case["expected"]


def num_blocks(case: Case, device: str) -> None:
    args = case["args"]
    assert list(_block(args["block"]).scale_shape(args["shape"])) == case["expected"]


def swap_block_dims(case: Case, device: str) -> None:
    """A permuted tensor keeps its scheme; its scales in logical order are the expected blocks'."""
    args = case["args"]
    axes = list(range(args["rank"]))
    if "axes" in args:
        axes = args["axes"]
    else:
        axes[args["dim0"]], axes[args["dim1"]] = axes[args["dim1"]], axes[args["dim0"]]
    scheme = _block(args["block"])
    extents = scheme.block_extents((999,) * args["rank"])
    shape = tuple(e * n for e, n in zip(extents, (2, 3, 5), strict=False))
    x = np.arange(math.prod(shape), dtype=F32).reshape(shape)
    q = pq.quantize(put(x, device), scheme).permute(axes)
    grid = q.to_logical(q.scales)
    assert tuple(grid.shape) == _block(case["expected"]).scale_shape(q.shape)
    assert _block(case["expected"]).block == tuple(case["expected"])


def scheme_properties(case: Case, device: str) -> None:
    scheme, wanted = scheme_of(case["scheme"]), case["expected"]
    whole = scheme.block is None
    tensor_scale = scheme.scale if whole else scheme.tensor_scale
    assert tensor_scale == (wanted["tensor_scale"] and wanted["tensor_scale"].lower())
    assert scheme.block == (wanted["block_size"] and tuple(wanted["block_size"]))
    assert scheme.scale == wanted["scale_dtype"].lower()
    assert scheme.num_levels == wanted["num_levels"]


def value_properties(case: Case, device: str) -> None:
    """Burn calls symmetric the integers whose range is; the letter says so here."""
    for name, wanted in case["expected"].items():
        value = QuantValue(name.lower())
        assert (value.bits, *value.range) == (wanted["bits"], wanted["min"], wanted["max"])
        assert value.endswith("s") == wanted["is_symmetric"]


def check_scale_bindings(case: Case, device: str) -> None:
    names = [part.name for part in parts(scheme_of(case["scheme"]), (2, 64))]
    assert len(set(names) & {"scales", "tensor_scale"}) == case["args"]["bindings"]


def check_table(case: Case, device: str) -> None:
    scheme = scheme_of(case["scheme"])
    x = put(np.linspace(-1, 1, 64, dtype=F32).reshape(2, 32), device)
    table = np.linspace(-1, 1, 2**scheme.bits, dtype=F32) if case["args"]["table"] else None
    assert (host(pq.quantize(x, scheme, table=table).dequantize()) != 0).any()


# -- scales and calibration -------------------------------------------------------------------


def scale_round_up(case: Case, device: str) -> None:
    dtype = ScaleDtype(case["args"]["dtype"].lower())
    with np.errstate(over="ignore"):
        x = np.asarray(case["input"]).astype(F32)
    got = rounded_up(x, dtype, device)
    assert_f32(got, case["expected"])
    finite = x <= dtype.max
    assert (got[finite] >= x[finite]).all()
    assert_f32(rounded_up(got, dtype, device), got)


def scale_round_up_defined(case: Case, device: str) -> None:
    for name, defined in case["expected"].items():
        assert defined
        dtype = ScaleDtype(name.lower())
        x = np.asarray(case["input"], F32)
        assert rounded_up(x, dtype, device) >= x


def scale_grid_constants(case: Case, device: str) -> None:
    for name, wanted in case["expected"].items():
        dtype = ScaleDtype(name.lower())
        numbers = scale_grid(dtype)
        digits = wanted["significand_digits"]
        assert numbers[-1] == wanted["max"] == dtype.max
        assert ((numbers >= 1) & (numbers < 2)).sum() == 2 ** (digits - 1)
        if wanted["min_normal"] is not None:
            assert numbers[1] == wanted["subnormal_spacing"]
            assert numbers[2 ** (digits - 1)] == wanted["min_normal"]


def quantizable(case: Case, device: str) -> None:
    scheme_fields, refused = case["scheme"], False
    x = np.linspace(-3, 3, 16, dtype=F32)
    try:
        q = pq.quantize(put(x, device), scheme_of(scheme_fields))
        assert np.abs(host(q.dequantize()) - x).max() < 0.05
    except pq.errors.PolyquantError:
        refused = True
    assert refused is not case["expected"]


def backend_supports(case: Case, device: str) -> None:
    assert bool(pq.supports("numpy", scheme_of(case["scheme"]))) is case["expected"]


def compute_range(case: Case, device: str) -> None:
    scheme, x = scheme_of(case["scheme"]), put(values_of(case), device)
    if case["args"]["calibration"] == "MinMax":
        low, high = (
            host(standard.reduce_blocks(x, scheme, kind, nonfinite="raise"))
            for kind in ("min", "max")
        )
    else:
        q = pq.quantize(x, scheme, calibration="absmean")
        high = scale_numbers(q) * F32(scheme.value.half_range)
        low = -high
    # The case's rank is that of the tensor for blocks, and 1 for the whole tensor.
    assert list(high.shape) == case["expected_shape"] or scheme.block is None
    wanted = {name: np.asarray(numbers, F32) for name, numbers in case["expected"].items()}
    assert_close(low, case, wanted["min"])
    assert_close(high, case, wanted["max"])


def compute_q_params(case: Case, device: str) -> None:
    scheme, wanted = scheme_of(case["scheme"]), case["expected"]
    low, high = (put(np.asarray(case["args"][name], F32), device) for name in ("min", "max"))
    ideal = standard.ideal_scale(scheme, low, high, None)
    if scheme.num_levels == 1:
        assert_close(host(ideal), case, wanted["scales"])
        return
    stored, tensor_scale = standard.store_scales(ideal, scheme)
    blocks = numbers_of_scales(host(stored), scheme.scale)
    level = host(tensor_scale)
    if "global" in wanted:
        assert_f32(level, wanted["global"])
        assert_f32(blocks, wanted["scales"])
        return
    assert_f32(level, case["derived"]["global"])
    assert blocks.max() == wanted["max_scale"]
    assert_close(host(ideal), case, wanted["scale_times_global"])
    # Stored block scales are rounded up: at most one step of UE4M3, an eighth, above.
    ratio = blocks * level / np.asarray(wanted["scale_times_global"], F32)
    assert ((ratio > 1 - 1e-6) & (ratio < 1.125)).all()


# -- quantize ---------------------------------------------------------------------------------


def quantize(case: Case, device: str) -> None:
    """Codes, and where stated scales and decoded values; any two stores hold the same codes."""
    scheme, args = scheme_of(case["scheme"]), case["args"]
    x = put(values_of(case), device)
    q = pq.quantize(x, scheme, scales=_given(args, scheme, case["shape"], device))
    codes = host(q.codes())
    expected = case["expected"]
    if expected == {"derived_in_checker": True}:
        expected = _exact_codes(values_of(case), scheme.block, top=127)
    off = np.abs(codes.reshape(-1).astype(int) - np.asarray(expected).reshape(-1))
    assert off.max(initial=0) <= (1 if case["id"] in TIES else 0)
    if case.get("expected_scales") is not None:
        limits = case.get("scales_tolerance", {"rel": 1e-7, "abs": 0.0})
        assert_close(scale_numbers(q), case, case["expected_scales"], limits)
    if "dequantize_expected" in case:
        limits = case["dequantize_tolerance"]
        assert_close(host(q.dequantize()), case, case["dequantize_expected"], limits)
    for store in QuantStore:
        other = pq.quantize(
            x, scheme.with_store(store), scales=_given(args, scheme, q.shape, device)
        )
        np.testing.assert_array_equal(host(other.codes()), codes)


def _given(args: Case, scheme: pq.QuantScheme, shape: Any, device: str) -> Any:
    if "scales" not in args:
        return None
    grid = put(np.asarray(args["scales"], F32).reshape(scheme.scale_shape(shape)), device)
    return grid if args.get("global") is None else (grid, args["global"])


def _exact_codes(x: Host, block: Any, *, top: int) -> Host:
    """Codes of one-axis blocks in float64: none of the case's quotients is a tie."""
    lines = x.astype(np.float64).reshape(*x.shape[:-1], -1, block[-1])
    largest = np.abs(lines).max(axis=-1, keepdims=True)
    return np.rint(lines * top / largest).astype(int)


def quantize_from_range(case: Case, device: str) -> None:
    args, scheme = case["args"], scheme_of(case["scheme"])
    ends = (np.full(scheme.scale_shape(case["shape"]), args[k], F32) for k in ("alpha", "beta"))
    scales = standard.ideal_scale(scheme, *ends, None)
    quantize(case | {"args": {"scales": scales.tolist()}}, device)


def dynamic_scale(case: Case, device: str) -> None:
    q = pq.quantize(put(values_of(case), device), scheme_of(case["scheme"]))
    assert_f32(scale_numbers(q), case["expected"])
    exact = np.asarray([case["args"]["exact_f32_scale"]], F32)
    assert scale_numbers(q) > exact
    assert_f32(scale_numbers(q), rounded_up(exact, ScaleDtype(q.scheme.scale), device))


def quantize_dequantize(case: Case, device: str) -> None:
    """In the order that the case states; the result is always the input's shape."""
    scheme, args = scheme_of(case["scheme"]), case["args"]
    source = values_of(case)
    x = _Steps(put(source, device), scheme, args)
    if args.get("tracked") and device.startswith("torch"):
        x.array.requires_grad_()
    for step in _steps(args.get("order", "quantize,dequantize")):
        x.take(step)
    assert not getattr(x.array, "requires_grad", False)  # quantizing detaches
    got = host(x.array)
    assert got.dtype == {"F64": "float64", "F16": "float16"}.get(
        args.get("output_dtype"), "float32"
    )
    expected = case["expected"]
    assert_close(got, case, source if expected == {"same_as": "input"} else expected)
    if "expected_scales" in case:
        q = pq.quantize(put(source, device), scheme)
        assert_close(scale_numbers(q), case, case["expected_scales"], case["scales_tolerance"])


def _steps(order: str) -> list[str]:
    """Split at the commas outside of brackets."""
    depth, made = 0, [""]
    for char in order:
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            made.append("")
        else:
            made[-1] += char
    return made


class _Steps:
    """An array, or its quantized form, on its way through a case's steps."""

    def __init__(self, array: Any, scheme: pq.QuantScheme, args: Case) -> None:
        self.array, self.scheme, self.args = array, scheme, args

    def take(self, step: str) -> None:
        if step == "quantize":
            given = _given(self.args, self.scheme, self.array.shape, pq.device_of(self.array) or "")
            self.array = pq.quantize(self.array, self.scheme, scales=given)
        elif step == "dequantize":
            kind = {"F64": "float64", "F16": "float16"}.get(self.args.get("output_dtype", ""))
            self.array = self.array.dequantize(kind)
        else:
            axes = list(range(len(self.array.shape)))
            axes = axes[::-1] if step == "transpose" else json.loads(step.removeprefix("permute"))
            if isinstance(self.array, pq.QTensor):
                self.array = self.array.permute(axes)
            else:
                self.array = standard.namespace(self.array).permute_dims(self.array, tuple(axes))


def quantize_dequantize_given(case: Case, device: str) -> None:
    """With scales of the case's own; the sign of zero counts where the case is exact."""
    q = _Steps(put(values_of(case), device), scheme_of(case["scheme"]), case["args"])
    q.take("quantize")
    q.take("dequantize")
    assert_close(host(q.array), case)
    if case["tolerance"] == {"rel": 0.0, "abs": 0.0}:
        assert_f32(host(q.array), case["expected"])


def quantize_permute_dequantize(case: Case, device: str) -> None:
    q = pq.quantize(put(values_of(case), device), scheme_of(case["scheme"]))
    got = host(q.permute(case["args"]["axes"]).dequantize())
    assert list(got.shape) == case["expected_shape"]
    assert_close(got, case)
    np.testing.assert_array_equal(got, host(q.dequantize()).transpose(case["args"]["axes"]))


def quantize_bytes_dequantize(case: Case, device: str) -> None:
    q = pq.quantize(put(values_of(case), device), scheme_of(case["scheme"]))
    back = pq.from_data(q.to_data(), device)
    assert_f32(host(q.dequantize()), case["expected"])
    assert_f32(host(back.dequantize()), case["expected"])
    derived = case["derived"]
    np.testing.assert_array_equal(host(back.codes()).reshape(-1), derived["values"])
    assert_f32(scale_numbers(back), derived["scales"])
    assert_f32(host(back.tensor_scale), derived["global"])


def dequantize(case: Case, device: str) -> None:
    args = case["args"]
    q = tensor_of(case, args["values"], device)
    np.testing.assert_array_equal(host(q.codes()).reshape(-1), args["values"])
    assert_close(host(q.dequantize()), case)


# -- packing and bytes ------------------------------------------------------------------------


def pack_u32(case: Case, device: str) -> None:
    value = QuantValue(f"q{case['args']['bits']}f")
    fields = (np.asarray(case["input"]) & (2**value.bits - 1)).astype(np.uint8)
    namespace = standard.namespace(put(fields, device))
    packed = host(codec.pack(namespace, put(fields, device), value, QuantStore.PACKED_U32))
    assert packed.view("<u4").tolist() == case["expected"]


def unpack_u32(case: Case, device: str) -> None:
    args = case["args"]
    value = QuantValue(f"q{args['bits']}f")
    words = put(np.asarray(case["input"], "<u4").view(np.uint8), device)
    xp = standard.namespace(words)
    fields = host(codec.unpack(xp, words, args["numel"], value, QuantStore.PACKED_U32))
    assert fields.astype(np.int8).tolist() == case["expected"]


def decode_packed(case: Case, device: str) -> None:
    words = np.asarray(case["input"], "<u4").view(np.uint8)
    q = from_bytes(case, words, device, tuple(case["expected_shape"]))
    assert_f32(host(q.dequantize()), case["expected"])


def quantized_data_round_trip(case: Case, device: str) -> None:
    q = tensor_of(case, case["input"], device)
    wanted = case["expected"]
    data = q.to_data()
    assert data.bytes.hex() == case["derived"]["bytes_hex"]
    assert len(data.bytes) == case["derived"]["byte_len"] == q.nbytes
    back = pq.from_data(data, device)
    assert host(back.codes()).reshape(-1).tolist() == wanted["values"]
    assert_f32(scale_numbers(back), wanted["scales"])
    if wanted["global"] is None:
        assert back.tensor_scale is None
    else:
        assert_f32(host(back.tensor_scale), wanted["global"])


def quantized_data(case: Case, device: str) -> None:
    tensor_of(case, case["input"], device)


def quantized_data_len(case: Case, device: str) -> None:
    assert data_size_bytes(scheme_of(case["scheme"]), case["shape"]) == case["expected"]


def scale_encode_decode(case: Case, device: str) -> None:
    dtype = ScaleDtype(case["args"]["dtype"].lower())
    stored = host(standard.as_stored(put(np.asarray(case["input"], F32), device), dtype))
    if dtype.storage != "uint8":
        stored = stored.astype(host_float(dtype))
    assert_f32(numbers_of_scales(stored, dtype), case["expected"])
    assert stored.tobytes().hex() == case["derived"]["bytes_hex"]


def scale_encoded_len(case: Case, device: str) -> None:
    assert (
        ScaleDtype(case["args"]["dtype"].lower()).size_bytes * len(case["input"])
        == case["expected"]
    )


def tensor_data_cast(case: Case, device: str) -> None:
    """Float bytes under a quantized scheme: there is no cast, and the length gives it away."""
    raw = np.asarray(case["input"], F32).tobytes()
    pq.TensorData(raw, tuple(case["shape"]), scheme_of(case["scheme"]), (0,))


# -- minifloats -------------------------------------------------------------------------------


def minifloat_cast(case: Case, device: str) -> None:
    scheme = pq.QuantScheme(case["args"]["format"].lower(), block=None, scale="f32")
    q = pq.quantize(put(np.asarray(case["input"], F32), device), scheme, scales=1.0)
    assert_f32(host(q.dequantize()), case["expected"])


def minifloat_decode(case: Case, device: str) -> None:
    table = decode_table(QuantValue(case["args"]["format"].lower()))
    assert_f32(table[case["input"]], case["expected"])


def minifloat_nan_codes(case: Case, device: str) -> None:
    table = decode_table(QuantValue(case["args"]["format"].lower()))
    assert np.flatnonzero(np.isnan(table)).tolist() == case["expected"]


# -- accuracy ---------------------------------------------------------------------------------


def _error(x: Host, scheme: pq.QuantScheme, device: str, order: int) -> float:
    """The relative error of a round trip in the 1- or 2-norm, in float64."""
    back = host(pq.quantize(put(x, device), scheme).dequantize()).astype(np.float64)
    wide = x.astype(np.float64)
    norm = np.linalg.norm((back - wide).reshape(-1), order)
    return float(norm / np.linalg.norm(wide.reshape(-1), order))


def relative_l1_error(case: Case, device: str) -> None:
    scheme, args = scheme_of(case["scheme"]), case["args"]
    big, one_level = values_of(case), scheme_of(args["one_level_scheme"])
    small = big * F32(args["small_factor"])
    got = {
        "big_two_level": _error(big, scheme, device, 1),
        "small_two_level": _error(small, scheme, device, 1),
        "small_one_level": _error(small, one_level, device, 1),
    }
    _assert_errors(got, case["expected"])
    two = got["small_two_level"]
    assert abs(two - got["big_two_level"]) / got["big_two_level"] < 0.2
    assert got["small_one_level"] > 2 * two


def relative_frobenius_error(case: Case, device: str) -> None:
    x = values_of(case | {"std": case["input_gen"]["std"]})
    scheme = scheme_of(case["scheme"])
    got = {
        name: _error(x, scheme.per_block(scheme.block or (), name.lower()), device, 2)
        for name in case["expected"]
    }
    _assert_errors(got, case["expected"])
    for relation in case["assertions"]:
        assert _RELATIONS[relation](got), relation


#: What Burn's tests assert of the errors, as they say it.
_RELATIONS: MappingProxyType[str, Callable[[dict[str, float]], bool]] = MappingProxyType(
    {
        "UE4M3 > 2*F32": lambda e: e["UE4M3"] > 2 * e["F32"],
        "UE4M3 > F32": lambda e: e["UE4M3"] > e["F32"],
        "UE4M3 < 1.3*F32": lambda e: e["UE4M3"] < 1.3 * e["F32"],
        "abs(F16-F32)/F32 < 0.20": lambda e: abs(e["F16"] - e["F32"]) / e["F32"] < 0.20,
    }
)


def _assert_errors(got: dict[str, float], wanted: dict[str, float]) -> None:
    """The codes agree; the last digits of a sum in another order need not."""
    for name, error in wanted.items():
        np.testing.assert_allclose(got[name], error, rtol=1e-6, err_msg=name)


def accuracy_report(case: Case, device: str) -> None:
    noise = values_of(case)
    for row in case["expected"]["rows"]:
        levels, _, second = row["levels"].partition("+")
        scheme = pq.QuantScheme(
            "q8s",
            block=None if levels == "tensor" else (int(levels.removeprefix("block")),),
            scale=row["scale_dtype"].lower(),
            tensor_scale=second or None,
        )
        x = noise * F32(row["std"])
        assert_close([_error(x, scheme, device, 2)], case, [row["relative_error"]])
        q = pq.quantize(put(x, device), scheme)
        assert q.bits_per_element == row["bits_per_element"]


#: Operation of a case -> what runs it.
OPS: MappingProxyType[str, Callable[[Case, str], None]] = MappingProxyType(
    {
        "accuracy_report": accuracy_report,
        "backend_supports": backend_supports,
        "block_canonical": block_canonical,
        "block_dim_vec": block_dim_vec,
        "block_equal": block_equal,
        "check_scale_bindings": check_scale_bindings,
        "check_table": check_table,
        "compute_q_params": compute_q_params,
        "compute_range": compute_range,
        "decode_packed": decode_packed,
        "dequantize": dequantize,
        "dynamic_scale": dynamic_scale,
        "minifloat_cast": minifloat_cast,
        "minifloat_decode": minifloat_decode,
        "minifloat_nan_codes": minifloat_nan_codes,
        "num_blocks": num_blocks,
        "pack_u32": pack_u32,
        "permute_block_dims": swap_block_dims,
        "quantizable": quantizable,
        "quantize": quantize,
        "quantize_dequantize": quantize_dequantize,
        "quantize_dequantize_given": quantize_dequantize_given,
        "quantize_dynamic": quantize,
        "quantize_from_range": quantize_from_range,
        "quantize_into_data_from_data_dequantize": quantize_bytes_dequantize,
        "quantize_permute_dequantize": quantize_permute_dequantize,
        "quantized_data": quantized_data,
        "quantized_data_len": quantized_data_len,
        "quantized_data_round_trip": quantized_data_round_trip,
        "relative_frobenius_error": relative_frobenius_error,
        "relative_l1_error": relative_l1_error,
        "scale_encode_decode": scale_encode_decode,
        "scale_encoded_len": scale_encoded_len,
        "scale_grid": scale_grid_constants,
        "scale_round_up": scale_round_up,
        "scale_round_up_defined": scale_round_up_defined,
        "scheme_properties": scheme_properties,
        "swap_block_dims": swap_block_dims,
        "tensor_data_cast": tensor_data_cast,
        "unpack_u32": unpack_u32,
        "value_properties": value_properties,
    }
)

#: Operations that touch no array, so that one run is enough.
WITHOUT_ARRAYS = frozenset(
    {
        "backend_supports",
        "block_canonical",
        "block_dim_vec",
        "block_equal",
        "check_scale_bindings",
        "minifloat_decode",
        "minifloat_nan_codes",
        "num_blocks",
        "quantized_data_len",
        "scale_encoded_len",
        "scale_grid",
        "scheme_properties",
        "tensor_data_cast",
        "value_properties",
    }
)
