"""Named tables against the files of the tools that own them, to the bit, and what they decode.

The numbers come from bitsandbytes 0.50.2 and ggml 0.15.3: golden/tables.json holds one block of
each, and where the larger fixtures lie beside the repository they are read too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import assert_same_bits, host, put
from polyquant.codec import pack
from polyquant.tables import named_table
from polyquant.values import TINY

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tables.json").read_text("utf-8"))
FIXTURES = Path(__file__).parents[2] / "shared" / "fixtures"
BITSANDBYTES = sorted((FIXTURES / "bitsandbytes").glob("*4*/packed.safetensors"))
IQ4_NL = FIXTURES / "gguf" / "iq4_nl"

needs_fixtures = pytest.mark.skipif(
    not BITSANDBYTES, reason="the fixtures of other tools do not lie beside the repository"
)


def _numbers(text: str, dtype: str = "<f4") -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes.fromhex(text), dtype)


def _read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a safetensors file; bfloat16 as the bytes that it stands for here."""
    from safetensors import safe_open

    with safe_open(path, "torch") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    raw = {
        k: v.view(_uint8()) if str(v.dtype).endswith("bfloat16") else v for k, v in found.items()
    }
    return {name: tensor.numpy() for name, tensor in raw.items()}


def _uint8() -> Any:
    import torch

    return torch.uint8


def _layers(path: Path) -> list[tuple[str, str]]:
    return sorted(
        (path.parent.name, name.removesuffix(".absmax"))
        for name in _read(path)
        if name.endswith(".weight.absmax")
    )


def _high_nibble_first(data: np.ndarray[Any, Any], shape: tuple[int, ...]) -> Any:
    codes = np.stack([data >> 4, data & 15], axis=-1).reshape(-1)
    return codes[: np.prod(shape)].reshape(shape)


def _tensor(scheme: pq.QuantScheme, codes: Any, scales: Any, device: str = "numpy") -> pq.QTensor:
    """A QTensor made by hand of codes and stored scales."""
    shape = codes.shape
    data = pack(np, codes.astype(np.uint8), scheme.value, scheme.store)
    return pq.QTensor(
        scheme,
        shape,
        put(data, device),
        put(scales.reshape(scheme.scale_shape(shape)), device),
        table=put(named_table(str(scheme.table)), device),
        device=device,
    )


# -- tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nf4", "fp4", "dynamic8"])
def test_table_is_that_of_bitsandbytes(name: str) -> None:
    assert_same_bits(named_table(name), _numbers(GOLDEN[name]["table"]), name)


@needs_fixtures
@pytest.mark.parametrize("path", BITSANDBYTES, ids=lambda path: path.parent.name)
def test_every_table_in_a_bitsandbytes_file(path: Path) -> None:
    found = {name: t for name, t in _read(path).items() if name.endswith("quant_map")}
    assert found
    for name, table in found.items():
        is_nested = name.endswith("nested_quant_map")
        wanted = named_table("dynamic8" if is_nested else path.parent.name[:3])
        assert_same_bits(wanted, table, name)


def test_unsigned_dynamic_table_is_built_as_the_signed_one() -> None:
    """The positive half of the signed map is every decade of the unsigned one at half the count."""
    signed, unsigned = named_table("dynamic8"), named_table("dynamic8u")
    assert unsigned.size == 256 and unsigned[0] == 0.0 and unsigned[-1] == 1.0
    assert (np.diff(unsigned) > 0).all()
    # Decade e of the signed map has 2^e fractions, as decade e - 1 of the unsigned one has.
    for exponent in range(1, 7):
        low, high = np.float32(10.0 ** (exponent - 7)), np.float32(10.0 ** (exponent - 6))
        fine = signed[(signed > low) & (signed < high)]
        assert fine.size == 2**exponent
        coarse = unsigned[(unsigned > low / 10) & (unsigned < low)]
        assert coarse.size == 2**exponent
        np.testing.assert_allclose(coarse * 10, fine, rtol=3e-7)


def test_iq4_nl_is_the_table_of_ggml() -> None:
    """From ggml's table kvalues_iq4nl."""
    wanted = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    assert named_table("iq4_nl").tolist() == wanted


@pytest.mark.parametrize("name", ["nf4", "fp4", "af4", "iq4_nl", "dynamic8", "dynamic8u"])
def test_tables_are_read_only(name: str) -> None:
    with pytest.raises(ValueError, match="read-only"):
        named_table(name)[0] = 0


# -- bitsandbytes, 4 bits ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_one_block_of_bitsandbytes(kind: str, device: str) -> None:
    """Decoding its codes gives its values; quantizing its source gives its scale and its values.

    FP4 has two codes for zero, 0 and 8, both +0: bitsandbytes keeps a sign there, polyquant takes
    the lower code. Every other code is equal.
    """
    facts = {key: _numbers(text) for key, text in GOLDEN[kind].items() if key != "packed"}
    codes = _high_nibble_first(_numbers(GOLDEN[kind]["packed"], "u1"), (1, 64))
    scheme = pq.scheme(f"u4[{kind}]/64:f32")
    decoded = host(_tensor(scheme, codes, facts["absmax"], device).dequantize())
    assert_same_bits(decoded, facts["decoded"].reshape(1, 64))
    q = pq.quantize(put(facts["source"].reshape(1, 64), device), scheme)
    assert_same_bits(host(q.scales), facts["absmax"].reshape(1, 1))
    assert_same_bits(host(q.dequantize()), decoded)
    assert set(codes[host(q.codes()) != codes]) <= ({8} if kind == "fp4" else set())


LAYERS = [
    pytest.param(path, layer, id=f"{variant}-{layer}")
    for path in BITSANDBYTES
    for variant, layer in _layers(path)
    if "ragged" not in variant  # blocks that cross rows have no plain form
]


def _scales(packed: dict[str, Any], layer: str) -> np.ndarray[Any, Any]:
    """The absmax of every block; a nested one through a QTensor of looked-up 8-bit codes."""
    absmax = packed[f"{layer}.absmax"]
    if f"{layer}.nested_absmax" not in packed:
        return absmax
    state = next(v for k, v in packed.items() if k.startswith(f"{layer}.quant_state"))
    facts = json.loads(state.tobytes())
    inner = pq.scheme(f"u8[dynamic8]/{facts['nested_blocksize']}:f32")
    nested = _tensor(inner, absmax, packed[f"{layer}.nested_absmax"])
    return nested.dequantize() + np.float32(facts["nested_offset"])


@needs_fixtures
@pytest.mark.parametrize(("path", "layer"), LAYERS)
def test_decode_layers_of_bitsandbytes(path: Path, layer: str) -> None:
    """Bit for bit, but for two kinds of zero.

    What it decodes to subnormals counts as zero here; and FP4's code 8 is +0 in the table of its
    files, which is used here, while its own kernels give -0.
    """
    packed = _read(path)
    wanted = _read(path.with_name("expected.safetensors"))[layer]
    codes = _high_nibble_first(packed[layer].reshape(-1), wanted.shape)
    scales = _scales(packed, layer)
    block = wanted.size // scales.size
    scheme = pq.scheme(f"u4[{path.parent.name[:3]}]/{block}:f32")
    got = _tensor(scheme, codes, scales).dequantize()
    subnormal = (np.abs(wanted) < TINY) & (wanted != 0)
    second_zero = (codes == 8) & (path.parent.name[:3] == "fp4")
    zero = subnormal | second_zero
    assert_same_bits(got[~zero], wanted[~zero])
    assert (got[zero] == 0).all() and (wanted[second_zero & ~subnormal] == 0).all()
    assert "nasty" in layer or not subnormal.any()


@needs_fixtures
@pytest.mark.parametrize(("path", "layer"), [p for p in LAYERS if "nested" not in str(p.id)])
def test_quantize_as_bitsandbytes_does(path: Path, layer: str) -> None:
    """The same absmax and the same values from the original weights.

    Codes differ in two places only, both of the value zero: FP4's second zero (code 8), and blocks
    whose absmax is subnormal, which are zero blocks here.
    """
    import ml_dtypes

    kind = path.parent.name[:3]
    packed = _read(path)
    source = _read(FIXTURES / "weights" / "weights.safetensors")[layer.split(".")[-2]]
    if "bf16" in path.parent.name:
        source = source.astype(ml_dtypes.bfloat16)
    absmax = packed[f"{layer}.absmax"]
    q = pq.quantize(source, f"u4[{kind}]/{source.size // absmax.size}:f32")
    normal = (absmax >= TINY) | (absmax == 0)
    assert_same_bits(q.scales.reshape(-1)[normal], absmax[normal])
    assert (q.scales.reshape(-1)[~normal] == 0).all()
    codes = _high_nibble_first(packed[layer].reshape(-1), source.shape)
    blocks = np.repeat(normal, source.size // absmax.size).reshape(source.shape)
    differs = (q.codes() != codes) & blocks
    assert set(codes[differs]) <= ({8} if kind == "fp4" else set())
    assert (q.codes()[differs] == 0).all()


# -- ggml, IQ4_NL -----------------------------------------------------------------------------


def _iq4_nl(blocks: np.ndarray[Any, Any], shape: tuple[int, ...], device: str) -> pq.QTensor:
    """ggml's blocks: an f16 scale, then 16 bytes whose low nibbles are the first 16 codes."""
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2")
    codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return _tensor(pq.scheme("iq4_nl"), codes.reshape(shape), scales, device)


def test_one_block_of_iq4_nl(device: str) -> None:
    blocks = _numbers(GOLDEN["iq4_nl"]["block"], "u1").reshape(1, 18)
    got = host(_iq4_nl(blocks, (1, 32), device).dequantize())
    assert_same_bits(got, _numbers(GOLDEN["iq4_nl"]["decoded"]).reshape(1, 32))


@pytest.mark.skipif(not IQ4_NL.is_dir(), reason="the fixtures of ggml do not lie beside the repo")
def test_decode_layers_of_iq4_nl() -> None:
    """Two tensors, which fill the file's last 5760 bytes."""
    wanted = _read(IQ4_NL / "expected.safetensors")
    real, nasty = wanted["blk.0.real_c.weight"], wanted["blk.0.nasty.weight"]
    raw = (IQ4_NL / "packed.gguf").read_bytes()[-(real.size + nasty.size) // 32 * 18 :]
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, 18)
    count = real.size // 32
    for part, values in ((blocks[:count], real), (blocks[count:], nasty)):
        got = _iq4_nl(part, values.shape, "numpy").dequantize()
        np.testing.assert_array_equal(got, values)  # ggml's sign of zero is its own
