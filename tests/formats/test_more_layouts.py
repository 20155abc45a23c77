"""Layouts that no file of another tool shows here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import polyquant as pq
from layouts import (
    MIXED,
    RNG,
    SPARSE,
    int4_file,
    save_all,
    save_experts,
    save_sparse,
    sparse_arrays,
)
from polyquant.errors import CorruptData, InvalidHeader, UnsupportedDtype

# -- torchao ----------------------------------------------------------------------------------


def test_int4_of_torchao(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for zero, scheme in ((1.0, "u4[signed4]/32:bf16+bias:bf16"), (0.0, "q4f/32:bf16")):
        wanted = int4_file(path, zero=zero)
        with pq.open_checkpoint(path) as ck:
            assert ck.format == "torchao" and set(ck) == {"m.weight", "m._weight_act_pre_scale"}
            assert str(ck.info("m.weight").scheme) == scheme
            np.testing.assert_array_equal(ck["m.weight"].dequantize(), wanted)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"shape": [2, 6, 63]}, "its codes"),
        ({"shape": None}, "its codes"),
        ({"block_size": [1, 1, 16]}, "must be F32 or F16 or BF16 of 2x4x6"),
        ({"block_size": [1, 32]}, "block_size"),
    ],
)
def test_int4_of_torchao_that_lies(change: Any, match: str, tmp_path: Path) -> None:
    int4_file(tmp_path / "x.safetensors", **change)
    with pytest.raises(InvalidHeader, match=match):
        pq.open_checkpoint(tmp_path / "x.safetensors")


@pytest.mark.parametrize("kind", ["Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor"])
def test_layouts_of_single_devices(kind: str, tmp_path: Path) -> None:
    int4_file(tmp_path / "x.safetensors", kind)
    with pytest.raises(UnsupportedDtype, match=f"{kind}.*save it as an Int4Tensor"):
        pq.open_checkpoint(tmp_path / "x.safetensors")


# -- compressed-tensors -----------------------------------------------------------------------


def test_sparse_weights(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    dense, codes, scales = save_sparse(path)
    with pq.open_checkpoint(path, config=SPARSE) as ck:
        assert set(ck) == {"a.weight", "b.weight"}
        assert ck.info("a.weight").nbytes == dense.nbytes
        np.testing.assert_array_equal(ck["a.weight"], dense)
        wanted = codes.astype(np.float32) * scales
        np.testing.assert_array_equal(ck["b.weight"].dequantize(), wanted)
        pq.save(tmp_path / "y.safetensors", dict(ck))
    structured = SPARSE | {"sparsity_config": {"format": "sparse-24-bitmask"}, "config_groups": {}}
    values = np.ones((4, 8), np.float32) * (np.arange(8) % 4 < 2)
    made = sparse_arrays("a", values) | {"a.compressed": np.ones((4, 4), np.float32)}
    del made["a.row_offsets"]
    save_file(made | {"a.shape": np.asarray([[4], [8]])}, path)
    with pq.open_checkpoint(path, config=structured) as ck:
        np.testing.assert_array_equal(ck["a.weight"], values)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"a.shape": np.asarray([6, 44])}, InvalidHeader, "no bit for"),
        ({"a.shape": np.asarray([-6, 36])}, InvalidHeader, "no bit for"),
        ({"a.shape": np.asarray([2**40, 2**20])}, InvalidHeader, "no bit for"),
        ({"a.weight": np.ones((6, 36), np.float32)}, InvalidHeader, "two tensors would"),
        ({"a.compressed": np.ones(3, np.float32)}, CorruptData, "and 3 are stored"),
        ({"b.compressed": np.ones(3, np.float64)}, UnsupportedDtype, "F64"),
    ],
)
def test_sparse_weights_that_lie(change: Any, error: Any, match: str, tmp_path: Path) -> None:
    save_sparse(tmp_path / "x.safetensors", **change)
    with pytest.raises(error, match=match):
        dict(pq.open_checkpoint(tmp_path / "x.safetensors", config=SPARSE))


@pytest.mark.parametrize(
    "change",
    [
        {"sparsity_config": {"format": "sparse-coo"}},
        {"sparsity_config": {"format": ["dense"]}},
        {"format": "marlin-24", "sparsity_config": None},
    ],
)
def test_sparse_formats_that_are_not_read(change: Any, tmp_path: Path) -> None:
    save_sparse(tmp_path / "x.safetensors")
    with pytest.raises(UnsupportedDtype, match="sparse-bitmask"):
        pq.open_checkpoint(tmp_path / "x.safetensors", config=SPARSE | change)


# -- ModelOpt ---------------------------------------------------------------------------------


def test_experts_and_mixed_precisions_of_modelopt(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    wanted = save_experts(path)
    with pq.open_checkpoint(path, config=MIXED) as ck:
        assert ck.info("m.experts.up").shape == (3, 32, 24)
        assert ck.info("m.experts.up").axes == ck["m.experts.up"].axes == (0, 2, 1)
        for name, values in wanted.items():
            np.testing.assert_array_equal(ck[name].dequantize(), values)
        assert ck["m.experts.up_input_scale"] == 1


def test_experts_of_one_scale(tmp_path: Path) -> None:
    codes = RNG.normal(size=(3, 32, 24)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.asarray(0.3, np.float32)
    change = {"m.experts.up": codes, "m.experts.up_weight_scale": scale}
    save_experts(tmp_path / "x.safetensors", **change)
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    with pq.open_checkpoint(tmp_path / "x.safetensors", config=config) as ck:
        wanted = codes.astype(np.float32) * scale
        np.testing.assert_array_equal(ck["m.experts.up"].dequantize(), wanted)


def test_groups_that_only_the_file_beside_tells(tmp_path: Path) -> None:
    codes = RNG.integers(0, 256, (4, 32), np.uint8)
    arrays = {"l.weight": codes, "l.weight_scale_2": np.asarray(1, np.float32)}
    scales = np.ones((4, 2), ml_dtypes.float8_e4m3fn)
    save_all(arrays | {"l.weight_scale": scales}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidHeader, match="must be F8_E4M3 of 4x4"):
        pq.open_checkpoint(tmp_path)
    own = {"quantization": {"quant_algo": "W4A8_NVFP4_FP8", "group_size": 32}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    with pq.open_checkpoint(tmp_path) as ck:
        assert str(ck.info("l.weight").scheme) == "e2m1/32:ue4m3/tensor:f32"


F8_OF_OTHER_AXES = np.ones((3, 16, 2), ml_dtypes.float8_e4m3fn)
OTHER = {"m.experts": {"quant_algo": "MXFP8"}, "m.q": {"quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("change", "layers", "error", "match"),
    [
        ({}, {}, InvalidHeader, "say nothing of"),
        ({}, [1], InvalidHeader, "say nothing of"),
        ({}, OTHER, UnsupportedDtype, "stacked experts in MXFP8"),
        ({"_weight_scale": F8_OF_OTHER_AXES}, None, InvalidHeader, "must be F8_E4M3 of 3x2x24"),
        ({"_weight_scale_2": np.ones(3, np.float32)}, None, InvalidHeader, "is not one number"),
    ],
)
def test_experts_that_lie(change: Any, layers: Any, error: Any, match: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_experts(path, **{f"m.experts.up{suffix}": array for suffix, array in change.items()})
    config = MIXED if layers is None else MIXED | {"quantized_layers": layers}
    with pytest.raises(error, match=match):
        pq.open_checkpoint(path, config=config)


# -- fp8 --------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "weight_block_size": [8, 16]}


def test_stacks_of_experts_in_squares(tmp_path: Path) -> None:
    """The last squares of a line are cut, as those of single weights may be."""
    codes = RNG.normal(size=(3, 24, 40)).astype(ml_dtypes.float8_e4m3fn)
    scales = RNG.random((3, 3, 3), np.float32)
    path = tmp_path / "x.safetensors"
    save_all({"m.experts.up": codes, "m.experts.up_scale_inv": scales}, path)
    wide = np.repeat(np.repeat(scales, 8, axis=1), 16, axis=2)[:, :24, :40]
    with pq.open_checkpoint(path, config=FP8) as ck:
        assert str(ck.info("m.experts.up").scheme) == "e4m3/8x16:f32"
        np.testing.assert_array_equal(
            ck["m.experts.up"].dequantize(), codes.astype(np.float32) * wide
        )


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_inverse_scale(shape: Any, tmp_path: Path) -> None:
    codes = RNG.normal(size=(6, 8)).astype(ml_dtypes.float8_e4m3fn)
    arrays = {"l.weight": codes, "l.weight_scale_inv": np.full(shape, 0.3, np.float32)}
    save_all(arrays, tmp_path / "x.safetensors")
    with pq.open_checkpoint(tmp_path / "x.safetensors", config={"quant_method": "fp8"}) as ck:
        wanted = codes.astype(np.float32) * np.float32(0.3)
        np.testing.assert_array_equal(ck["l.weight"].dequantize(), wanted)


@pytest.mark.parametrize(
    ("arrays", "error", "match"),
    [
        ({"m.up": (4, 8)}, InvalidHeader, "'m.up' has no scales"),
        ({"m.weight": (8,), "m.weight_scale": ()}, UnsupportedDtype, "1 axes"),
        ({"m.up": (2, 8, 16), "m.up_scale_inv": (2, 2, 1)}, InvalidHeader, "of 2x1x1 in fp8"),
        ({"m.weight": (8, 16), "m.weight_scale": (4,)}, InvalidHeader, "of 8x1 in fp8"),
    ],
)
def test_fp8_that_lies(arrays: Any, error: Any, match: str, tmp_path: Path) -> None:
    kinds = {name: np.float32 if "scale" in name else ml_dtypes.float8_e4m3fn for name in arrays}
    made = {name: np.ones(shape, kinds[name]) for name, shape in arrays.items()}
    save_all(made, tmp_path / "x.safetensors")
    with pytest.raises(error, match=match):
        pq.open_checkpoint(tmp_path / "x.safetensors", config=FP8)
