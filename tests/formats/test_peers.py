"""Files of other tools: the values are those tools' own, and what a file declares decides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from peers import FOLDERS, assert_rounded, assert_same, decoded, fixture, names
from polyquant.errors import CorruptData, InvalidHeader, UnknownFormat, UnsupportedDtype

LAYERS = [name for name in FOLDERS if name != "gguf"]


@pytest.mark.parametrize("name", names(*LAYERS))
def test_values_are_those_of_the_tool(name: str) -> None:
    made = fixture(name)
    expected = made.expected()
    with made.open() as ck:
        assert ck.format == made.format
        for tensor, wanted in expected.items():
            if tensor.endswith(("_f32", "_padded", "_effective", ".hf_layout")):
                continue
            exact = expected.get(f"{tensor}_f32")
            narrow = made.narrow(tensor)
            assert ck.info(tensor).scheme is not None
            assert ck[tensor].shape == wanted.shape
            if exact is not None:
                assert_same(ck[tensor], exact)
            elif narrow is not None and name.partition("/")[0] != "torchao":
                assert_rounded(ck[tensor], wanted, narrow)
            elif narrow is not None:  # rounds operands or results as it likes
                scale = np.abs(wanted).max(axis=-1, keepdims=True)
                assert (np.abs(decoded(ck[tensor]) - wanted) <= 2.0**-7 * scale).all()
            else:
                assert_same(ck[tensor], wanted)


@pytest.mark.parametrize("name", names(*LAYERS))
def test_infos_are_told_without_reading(name: str) -> None:
    with fixture(name).open() as ck:
        for tensor in ck:
            info = ck.info(tensor)
            assert info.shape == tuple(ck[tensor].shape)
            assert info.scheme == getattr(ck[tensor], "scheme", None)
        stored = sum(ck.info(tensor).nbytes for tensor in ck)
        assert stored <= fixture(name).path.stat().st_size


@pytest.mark.parametrize("name", names(*FOLDERS))
def test_the_same_numbers_in_torch_and_in_parts(name: str) -> None:
    """What files hold moves to another library bit by bit, and its views are exact."""
    with fixture(name).open() as ck:
        for tensor in list(ck)[:3]:
            q = ck[tensor]
            if isinstance(q, pq.QTensor):
                values = q.dequantize()
                there = ck.read(tensor, "torch:cpu")
                np.testing.assert_array_equal(there.dequantize().numpy(), values)
                assert there.to("numpy").to_data() == q.to_data()
                np.testing.assert_array_equal(q[1:3].dequantize(), values[1:3])
                np.testing.assert_array_equal(q.mT.dequantize(), values.swapaxes(-1, -2))


@pytest.mark.parametrize("name", ["gptq/w4_g32_desc_act_v1", "hqq/b3_g32_axis0", "gguf/q4_k"])
def test_the_same_numbers_in_jax(name: str) -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    if names("gguf")[0] == "":
        pytest.skip("no fixtures")
    with fixture(name).open() as ck:
        tensor = next(n for n in ck if ck.info(n).scheme is not None)
        there = ck.read(tensor, "jax:cpu:0")
        np.testing.assert_array_equal(np.asarray(there.dequantize()), ck[tensor].dequantize())


def test_experts_transposed_and_effective_weights() -> None:
    experts = fixture(names("gpt-oss-mxfp4")[1])
    expected = experts.expected()
    with experts.open() as ck:
        for name in ck:
            np.testing.assert_array_equal(decoded(ck[name].mT), expected[f"{name}.hf_layout"])
    awq = fixture("modelopt/int4_awq_g128")
    with awq.open() as ck:
        for name, wanted in awq.expected().items():
            if name.endswith("_effective"):
                base = name.removesuffix("_effective")
                scale = ck[base.replace(".weight", ".pre_quant_scale")]
                np.testing.assert_array_equal(decoded(ck[base]) * scale, wanted)


# -- recognising ------------------------------------------------------------------------------


def folder_of(name: str, tmp_path: Path, config: Any) -> Path:
    made = fixture(name)
    shutil.copy(made.path, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", ["gptq/w4_g64_asym_v1", "awq/gemm_g128", "mlx/mxfp4", "fp8"])
def test_a_model_folder(name: str, tmp_path: Path) -> None:
    name = "deepseek-fp8/v3_f32_scale" if name == "fp8" else name
    made = fixture(name) if names("gptq")[0] != "" else pytest.skip("no fixtures")
    with pq.open_checkpoint(folder_of(name, tmp_path, made.config)) as ck:
        assert ck.format == made.format
        kept = json.loads(ck.metadata["quantization_config"])
        assert kept == (made.config.get("quantization") or made.config["quantization_config"])


QUANTIZED = [
    "gptq/w4_g64_asym_v1",
    "awq/gemm_g128",
    "compressed-tensors/nvfp4_a16",
    "gpt-oss-mxfp4/experts",
    "modelopt/nvfp4",
    "deepseek-fp8/v3_f32_scale",
    "bitnet/bitlinear_divides_by_scale",
]


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_without_a_config_are_no_guess(name: str, tmp_path: Path) -> None:
    if names("gptq")[0] == "":
        pytest.skip("no fixtures")
    folder = folder_of(name, tmp_path, None)
    with pytest.raises(UnknownFormat, match=r"looks like a part of a quantized weight.*config="):
        pq.open_checkpoint(folder)
    with pq.open_checkpoint(folder, format="safetensors") as ck:
        assert set(ck.schemes().values()) == {None}


def test_files_that_declare_two_formats(tmp_path: Path) -> None:
    if names("gptq")[0] == "":
        pytest.skip("no fixtures")
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}
    folder = folder_of("bitsandbytes/nf4_bs64", tmp_path, config)
    with pytest.raises(UnknownFormat, match=r"bitsandbytes and gptq; format= says"):
        pq.open_checkpoint(folder)
    with pq.open_checkpoint(folder, format="bitsandbytes") as ck:
        assert ck.format == "bitsandbytes"


def test_methods_that_are_not_known(tmp_path: Path) -> None:
    if names("gptq")[0] == "":
        pytest.skip("no fixtures")
    folder = folder_of(QUANTIZED[0], tmp_path, {"quantization_config": {"quant_method": "quip"}})
    with pytest.raises(UnknownFormat, match="quip"):
        pq.open_checkpoint(folder)


def test_i2_s_needs_to_be_told() -> None:
    if names("gptq")[0] == "":
        pytest.skip("no fixtures")
    with pytest.raises(UnsupportedDtype, match=r"only its writer knows.*x86-rows"):
        pq.open_checkpoint(fixture("bitnet/gguf_i2_s").path)


def test_groups_without_a_shape_keep_the_shape_of_the_groups() -> None:
    if names("gptq")[0] == "":
        pytest.skip("no fixtures")
    made = fixture("quanto/qint4")
    with pq.open_checkpoint(made.path) as ck:  # the map lies beside it
        for name, wanted in made.expected().items():
            assert_same(ck[name], wanted.reshape(-1, 128))
    with pytest.raises(InvalidHeader, match="shapes"):
        config = {"weights": "qint4"}
        path = fixture("quanto/qint4_axis_last_g16_zeropoint").path
        pq.open_checkpoint(path, config=config, format="quanto")


# -- contradictions ---------------------------------------------------------------------------

CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], type[Exception]]] = {
    "other bits": ("gptq/w4_g64_asym_v1", {"bits": 8}, InvalidHeader),
    "other groups": ("gptq/w4_g64_asym_v1", {"group_size": 32}, InvalidHeader),
    "no bits": ("gptq/w4_g64_asym_v1", {"bits": None}, InvalidHeader),
    "a new version": ("gptq/w4_g64_asym_v1", {"checkpoint_format": "gptq_v9"}, UnsupportedDtype),
    "no pattern": ("gptq/w4_g64_asym_v1", {"dynamic": {"(": {}}}, InvalidHeader),
    "modules of other bits": (
        "gptq/w4_g64_asym_v1",
        {"dynamic": {r"+:.*real_c": {"bits": 8}}},
        InvalidHeader,
    ),
    "another layout": ("awq/gemm_g128", {"version": "gemv"}, InvalidHeader),
    "an unknown layout": ("awq/gemm_g128", {"version": "exllama"}, UnsupportedDtype),
    "no groups": ("compressed-tensors/nvfp4_a16", {"config_groups": {}}, InvalidHeader),
    "another algorithm": ("modelopt/nvfp4", {"quant_algo": "FP8"}, InvalidHeader),
    "an unknown algorithm": ("modelopt/nvfp4", {"quant_algo": "W1"}, UnsupportedDtype),
    "other squares": ("deepseek-fp8/v3_f32_scale", {"weight_block_size": [64, 64]}, InvalidHeader),
    "no squares": ("deepseek-fp8/v3_f32_scale", {"weight_block_size": None}, InvalidHeader),
    "a class": ("bitnet/bitlinear_divides_by_scale", {"linear_class": "x"}, UnsupportedDtype),
    "fewer bits": ("hf-gemma/int4", {"num_bits": 3}, UnsupportedDtype),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_configs_that_contradict_the_file(what: str) -> None:
    if names("gptq")[0] == "":
        pytest.skip("no fixtures")
    name, change, error = CONTRADICTIONS[what]
    made = fixture(name)
    config = {"quantization_config": made.meta["quantization_config"] | change}
    with pytest.raises(error):
        pq.open_checkpoint(made.path, config=config)


def test_modules_with_facts_of_their_own() -> None:
    if names("gptq")[0] == "":
        pytest.skip("no fixtures")
    made = fixture("gptq/w4_g64_asym_v1")
    dynamic = {"-:.*head": {}, r"+:.*(nasty|real_c)": {"bits": 4, "group_size": 64}, ".*": {}}
    wrong = {"bits": 8, "group_size": 32, "dynamic": dynamic}
    config = {"quantization_config": made.meta["quantization_config"] | wrong}
    with pq.open_checkpoint(made.path, config=config) as ck:
        for name, wanted in made.expected().items():
            assert_same(ck[name], wanted)


def save_by_hand(path: Path, tensors: dict[str, Any]) -> Path:
    import torch
    from safetensors.torch import save_file

    save_file({name: torch.as_tensor(tensor) for name, tensor in tensors.items()}, path)
    return path


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1)])
def test_fp8_of_one_scale_or_one_a_row(shape: Any, tmp_path: Path) -> None:
    import torch

    weight = torch.arange(-12, 12).reshape(3, 8).to(torch.float8_e4m3fn)
    scale = torch.arange(1, 1 + int(np.prod(shape, dtype=int))).float().reshape(shape) / 3
    path = save_by_hand(tmp_path / "x.safetensors", {"a.weight": weight, "a.weight_scale": scale})
    with pq.open_checkpoint(path, config={"quant_method": "fbgemm_fp8"}) as ck:
        wanted = weight.float() * (scale if scale.ndim != 1 else scale[:, None])
        np.testing.assert_array_equal(ck["a.weight"].dequantize(), wanted.numpy())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.filterwarnings("ignore")  # of transformers' own code
def test_embeddings_of_gemma(bits: int, tmp_path: Path) -> None:
    """The layers of transformers themselves, of random bytes, as it dequantizes them."""
    gemma = pytest.importorskip("transformers.integrations.gemma_quant", reason="no transformers")
    import torch

    torch.manual_seed(0)
    table = gemma.QuantizedEmbedding(6, 64, num_bits=bits, output_dtype=torch.float32)
    layer = gemma.QuantizedLinear(64, 6, bias=False, num_bits=bits)
    scales = torch.rand(6, 4), torch.rand(6, 1)
    codes = [
        torch.randint(0, 256, tuple(stored.shape), dtype=torch.uint8).view(stored.dtype)
        for stored in (table.embedding_quantized, layer.weight)
    ]
    tensors = {
        "t.embedding_quantized": codes[0],
        "t.embedding_scale": scales[0],
        "l.weight": codes[1],
        "l.weight_scale": scales[1],
    }
    path = save_by_hand(tmp_path / "x.safetensors", tensors)
    config = {"quant_method": "gemma", "module_quant_configs": {"[tl]": {"num_bits": bits}}}
    wanted = table._dequantize_weights(codes[0], scales[0])
    with pq.open_checkpoint(path, config=config) as ck:
        np.testing.assert_array_equal(ck["t.weight"].dequantize(), wanted.detach().numpy())
        layer.weight.data, layer.weight_scale.data = codes[1], scales[1]
        linear = layer._dequantize_weights(torch.float32)
        np.testing.assert_array_equal(ck["l.weight"].dequantize(), linear.detach().numpy())


def test_hqq_of_1_58_bits(tmp_path: Path) -> None:
    if names("hqq")[0] == "":
        pytest.skip("no fixtures")
    made = fixture("hqq/b2_g16_axis1_f16")
    with pq.open_checkpoint(made.path, format="safetensors") as raw:
        tensors = {name: np.array(raw[name]) for name in raw}
    for name in tensors:
        if name.endswith(".nbits"):
            tensors[name] = np.asarray(1.58, np.float32)
    path = save_by_hand(tmp_path / "x.safetensors", tensors)
    with made.open() as wanted, pq.open_checkpoint(path) as ck:
        for name in made.expected():
            assert ck[name].to_data() == wanted[name].to_data()


def test_a_map_that_is_not_used(tmp_path: Path) -> None:
    if names("compressed-tensors")[0] == "":
        pytest.skip("no fixtures")
    made = fixture("compressed-tensors/pack_w4_g128_sym")
    with pq.open_checkpoint(made.path, format="safetensors") as raw:
        tensors = {name: np.array(raw[name]) for name in raw}
    layers = {name.removesuffix(".weight_packed") for name in tensors if "packed" in name}
    for layer in layers:
        columns = int(tensors[f"{layer}.weight_shape"][1])
        tensors[f"{layer}.weight_g_idx"] = np.full(columns, -1, np.int32)
    path = save_by_hand(tmp_path / "x.safetensors", tensors)
    with pq.open_checkpoint(path, config=made.config) as ck:
        for name, wanted in made.expected().items():
            assert not ck.info(name).scheme.grouped
            assert_same(ck[name], wanted)


def test_codes_that_mean_nothing(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    tensors = {
        "a.weight": np.full((1, 8), 0xFF, np.uint8),
        "a.weight_scale": np.ones(1, np.float32),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    config = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    ck = pq.open_checkpoint(tmp_path / "x.safetensors", config=config)
    with pytest.raises(CorruptData, match="not ternary"):
        ck["a.weight"]
