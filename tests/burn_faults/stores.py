"""Faults of codes, scales, stores and the host form."""

from __future__ import annotations

import numpy as np

import polyquant as pq
from burn_faults.terms import (
    EVERYWHERE,
    F32,
    HOST,
    TWO_LEVELS,
    Here,
    Raises,
    Table,
    Works,
    X,
)
from devices import assert_same_bits, assert_same_parts, host, put


def _same_codes_in_every_store(here: Here, *schemes: str) -> None:
    """Codes and values are those of the packed store, at a length that fills no word."""
    x = here.x[:, :29]
    for scheme in schemes:
        packed = pq.quantize(x, scheme)
        assert np.abs(host(packed.dequantize()) - X[:, :29]).max() < 0.4
        for store in pq.QuantStore:
            q = pq.quantize(x, pq.scheme(scheme).with_store(store))
            assert_same_bits(host(q.codes()), host(packed.codes()))
            assert_same_bits(host(q.dequantize()), host(packed.dequantize()))
            again = pq.from_data(q.to_data(), here.device)
            assert_same_bits(host(again.dequantize()), host(q.dequantize()))


def native_below_8_bits(here: Here) -> None:
    _same_codes_in_every_store(here, "q4s/8:f32", "q4f/8:f32", "q2s/8:f32", "e2m1/8:f32")
    q = here.quantized("q2s/8:f32@native")
    assert tuple(q.data.shape) == (4, 32)


def packed_native(here: Here) -> None:
    _same_codes_in_every_store(here, "q8s/8:f32", "q4s/8:f32", "q3s/8:f32", "e3m2/8:f32")
    assert tuple(here.quantized("q3s/8:f32@packed_native").data.shape) == (4, 12)


def line_of_part_words(here: Here) -> None:
    q = pq.quantize(here.x[:, :29], "q4s/8:f32")
    assert tuple(q.data.shape) == (4, 16)
    assert tuple(q.codes().shape) == (4, 29)


def packed_along_another_axis(here: Here) -> None:
    q = here.q
    assert_same_bits(host(q.T.codes()), host(q.codes()).T)
    assert_same_bits(host(q.T.dequantize()), host(q.dequantize()).T)
    assert pq.from_data(q.T.to_data(), here.device).axes == (1, 0)


def unpack_minifloats(here: Here) -> None:
    _same_codes_in_every_store(here, "e2m1/8:f32", "e2m3/8:f32", "e3m2/8:f32", "e4m3/8:f32")
    alone = pq.quantize(here.x[0, :1], "e2m1/8:f32@packed_native")
    assert host(alone.codes()).tolist() == [0b1111]


def ue8m0(here: Here) -> None:
    q = here.given(0.3 * here.ones(4, 2), "q4s/16:ue8m0")
    assert set(host(q.scales).reshape(-1).tolist()) == {126}  # 2^-1
    codes = host(pq.from_data(q.to_data(), here.device).codes())
    assert_same_bits(host(q.dequantize()), codes.astype(F32) / 2)


def scale_grids(here: Here) -> None:
    numbers = np.asarray([[0.3, 1e-30], [0.5, 7.0], [1.0, 3.9], [2.0, 1e30]], F32)
    kept = here.given(put(numbers, here.device), "q4s/16:f32")
    assert_same_bits(host(kept.scales), numbers)
    powers = here.given(put(numbers, here.device), "q4s/16:ue8m0")
    exponents = np.ceil(np.log2(numbers.astype(np.float64))).astype(int)
    assert_same_bits(host(powers.scales), (exponents + 127).astype(np.uint8))


def one_scale_a_position(here: Here) -> None:
    blocks, level = np.asarray([[1, 2], [3, 4], [5, 6], [7, 8]], F32), F32(0.125)
    q = here.given((put(blocks, here.device), put(level, here.device)))
    wanted = host(q.codes()).astype(F32) * np.repeat(blocks, 16, axis=1) * level
    assert_same_bits(host(q.dequantize()), wanted)
    assert np.abs(wanted - np.clip(X, -7, 7)).max() <= 0.5


def _set_an_item(here: Here) -> None:
    here.q[0] = 1.0  # type: ignore[index]


def assign(here: Here) -> None:
    q = here.q
    wanted = host(q.dequantize()).copy()
    wanted[0] = 3.0
    assert_same_bits(host(pq.ops.assign(q, 0, 3.0)), wanted)
    assert q.to_data() == here.q.to_data()


def lookup_stores(here: Here) -> None:
    _same_codes_in_every_store(here, "u4[nf4]/8:f32", "u8[dynamic8]/8:f32")


def lookup_from_data(here: Here) -> None:
    for scheme, table in (("nf4", None), ("u3[custom]/16:f16", np.linspace(-1, 1, 8))):
        q = pq.quantize(here.x, scheme, table=table)
        again = pq.from_data(q.to_data(), here.device)
        assert_same_parts(again, q)
        assert_same_bits(host(again.dequantize()), host(q.dequantize()))


def schemes_from_data(here: Here) -> None:
    for scheme in pq.presets().values():
        q = pq.quantize(here.x, scheme)
        assert_same_parts(pq.from_data(q.to_data(), here.device), q)


def transactions(here: Here) -> None:
    tensors = {"q": here.q, "x": here.x, "n": pq.quantize(X, "nf4")}
    path = here.folder / "all.safetensors"
    pq.save(path, tensors)
    found = pq.load(path)
    assert found["q"].to_data() == here.q.to_data()
    assert_same_bits(found["x"], X)
    assert found["n"].to_data() == tensors["n"].to_data()


def printing(here: Here) -> None:
    q = here.quantized("nvfp4")
    assert "e2m1/16:ue4m3/tensor:f32" in repr(q)
    assert str(q) == repr(q)
    assert "e2m1/16:ue4m3/tensor:f32" in repr(q.to_data())


def iterating(here: Here) -> None:
    for scheme in ("nvfp4", "nf4"):
        q = here.quantized(scheme)
        for row, wanted in zip(q, host(q.dequantize()), strict=True):
            assert_same_bits(host(row.dequantize()), wanted)
        assert len(list(q.codes())) == len(q) == 4


def comparing_with_plain(here: Here) -> None:
    data = here.q.to_data()
    for plain in (here.x, X, X.tobytes(), data.bytes, None):
        assert (data == plain) is False
        assert (plain == data) is False


def comparing_schemes(here: Here) -> None:
    data = here.q.to_data()
    assert data == here.q.to_data()
    for scheme in (
        "q4f/16:f16",
        "q4s/16:bf16",
        "q4s/2x8:f16",
        "u4[nf4]/16:f16",
        "e2m1/16:f16",
        "q4s/16:f16@packed_native",
    ):
        other = pq.scheme(scheme)
        assert data != pq.TensorData(
            data.bytes.ljust(pq.quantize(X, other).nbytes), data.shape, other
        )
    assert data != pq.TensorData(data.bytes, (32, 4), data.scheme, (1, 0))


def _data(run: bytes, scheme: str = "q4s/16:f16") -> pq.TensorData:
    return pq.TensorData(run, (4, 32), pq.scheme(scheme))


STORES: Table = {
    "lookup-stores": (Works(lookup_stores),),
    "lookup-from-data": (Works(lookup_from_data),),
    "native-below-8-bits": (Works(native_below_8_bits),),
    "packed-native": (Works(packed_native),),
    "line-of-part-words": (Works(line_of_part_words),),
    "packed-along-another-axis": (Works(packed_along_another_axis),),
    "unpack-minifloats": (Works(unpack_minifloats),),
    "ue8m0": (Works(ue8m0),),
    "scale-grids": (Works(scale_grids),),
    "minifloat-dtype": (
        Raises(
            "unsupported-dtype",
            lambda here: here.quantized("nvfp4").dequantize("e2m1"),
            "Known: ",
            "cannot be 'e2m1'",
        ),
    ),
    "one-scale-a-position": (Works(one_scale_a_position),),
    "write-through": (
        Raises("immutable", _set_an_item, "does not change", "cannot be set", "Make a new one"),
        Raises(
            "immutable",
            lambda here: setattr(here.q, "data", here.q.data),
            "does not change",
            "'data' cannot be set",
            "Make a new one",
        ),
        Raises(
            "unsupported-function",
            lambda here: np.copyto(here.q, X),  # type: ignore[call-overload]
            "Supported on a QTensor",
            "numpy.copyto has no form",
            "call it on q.dequantize()",
            HOST,
        ),
        Raises(
            "unsupported-function",
            lambda here: np.add(X, X, out=here.q),  # type: ignore[call-overload]
            "Supported on a QTensor: numpy.add(x1, x2)",
            "numpy.add with out= has no form",
            "call it on q.dequantize()",
            HOST,
        ),
        Works(assign),
    ),
    "number-of-values": (
        Raises(
            "data-length",
            lambda here: _data(bytes(4 * 15 + 2 * 8)),
            "exactly 80 bytes",
            "76 came",
            places=HOST,
        ),
    ),
    "bytes-too-short": tuple(
        Raises(
            "data-length",
            lambda here, length=length: _data(bytes(length), TWO_LEVELS),
            "exactly 76 bytes",
            f"{length} came",
            places=HOST,
        )
        for length in (75, 70, 60, 0)
    ),
    "levels-of-bytes": (
        Raises(
            "data-length",
            lambda here: _data(bytes(72), TWO_LEVELS),
            "exactly 76 bytes",
            "72 came",
            places=HOST,
        ),
        Raises(
            "data-length",
            lambda here: _data(bytes(76), "q4s/16:ue4m3"),
            "exactly 72 bytes",
            "76 came",
            places=HOST,
        ),
    ),
    "bytes-of-another-type": (
        Raises(
            "invalid-argument",
            lambda here: _data(X),  # type: ignore[arg-type]
            "bytes must be bytes",
            "what came is array([[",
            places=HOST,
        ),
    ),
    "codes-of-another-type": (
        Raises(
            "invalid-tensor",
            lambda here: here.rebuilt(data=here.ones(4, 16)),
            "must be uint8",
            "what came is float32",
        ),
    ),
    "no-scales": (
        Raises(
            "invalid-tensor",
            lambda here: here.rebuilt(scales=None),
            "scales of a q4s/16:ue4m3/tensor:f32 tensor of shape (4, 32) must be an array",
            "what came is nothing",
        ),
    ),
    "levels-of-parts": (
        Raises(
            "invalid-tensor",
            lambda here: here.rebuilt(tensor_scale=None),
            "tensor_scale of a q4s/16:ue4m3/tensor:f32 tensor of shape (4, 32) must be an array",
            "what came is nothing",
        ),
        Raises(
            "invalid-tensor",
            lambda here: pq.QTensor(
                here.q.scheme,
                here.q.shape,
                here.q.data,
                here.q.scales,
                tensor_scale=here.ones(),
                device=here.device,
            ),
            "left out: the scheme has none",
            "what came is an array",
        ),
    ),
    "from-an-array": (
        Raises(
            "invalid-argument",
            lambda here: pq.from_data(here.x, here.device),
            "must be a TensorData",
            "what came is",
            "such as q.to_data() gives",
        ),
    ),
    "schemes-from-data": (Works(schemes_from_data),),
    "transactions": (Works(transactions, EVERYWHERE),),
    "printing": (Works(printing, EVERYWHERE),),
    "iterating": (Works(iterating),),
    "casting": tuple(
        Raises(
            "unsupported-dtype",
            lambda here, dtype=dtype: here.q.dequantize(dtype),
            "Known: float",
            f"cannot be '{dtype}'",
        )
        for dtype in ("int8", "q8s", "bool")
    ),
    "comparing-with-plain": (Works(comparing_with_plain, EVERYWHERE),),
    "comparing-schemes": (Works(comparing_schemes, HOST),),
}
