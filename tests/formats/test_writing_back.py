"""Files of other tools are written back to the same bytes, and those tools read what we write."""

from __future__ import annotations

import importlib.util
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import polyquant as pq
from peers import Host, assert_same, decoded, fixture, names
from polyquant.errors import CorruptData, InvalidName, UnsupportedDtype
from polyquant.formats import WRITERS, TensorInfo
from polyquant.formats.bitsandbytes import VARIANTS
from polyquant.models import resumable
from polyquant.models.conversion import plan
from polyquant.models.targets import target_of

#: Files that are not written as they were: an older packing, or layouts that the writer packs
#: instead. Their values are the same.
OTHER_BYTES = {
    "compressed-tensors/pack_w3_g128_sym_old": "whole fields a word",
    "compressed-tensors/int_w8a8_channel": "a byte a code",
    "compressed-tensors/int_w8a8_channel_asym": "a byte a code",
    "compressed-tensors/naive_w8_g64": "a byte a code",
}
#: Files whose formats are read alone.
READ_ALONE = {
    "gptq/w6_g64_planar_gptq_p",
    "compressed-tensors/float_fp8_block128_ragged",
    "compressed-tensors/float_fp8_channel",
    "compressed-tensors/float_fp8_tensor",
    "compressed-tensors/mxfp6_a16",
    "compressed-tensors/mxfp8_a16",
}
WRITABLE = names("bitsandbytes", "gptq", "compressed-tensors", "mlx")


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def write(format: str, path: Path, tensors: dict[str, Any], metadata: Any = None) -> Any:
    """Write tensors, and the config.json that other tools look for."""
    module = import_module(WRITERS[format])
    plan = [TensorInfo.of(name, tensor) for name, tensor in tensors.items()]
    with module.open_writer(path, plan, metadata or {}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return writer.config


def arrays(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def raw(tensor: Any) -> Any:
    import torch

    return tensor.dtype, tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("name", WRITABLE)
def test_tensors_are_written_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    made = fixture(name)
    path = tmp_path / "out.safetensors"
    with made.open() as ck:
        tensors = {tensor: ck[tensor] for tensor in ck}
        if name in READ_ALONE:
            with pytest.raises(UnsupportedDtype):
                write(made.format, path, tensors)
            return
        write(made.format, path, tensors, ck.metadata)
    old, new = arrays(made.path), arrays(path)
    differs = {n for n in old.keys() | new.keys() if n not in old or n not in new}
    differs |= {n for n in old.keys() & new.keys() if raw(old[n]) != raw(new[n])}
    assert bool(differs) == (name in OTHER_BYTES), differs
    with pq.open_checkpoint(path) as again:  # by its own metadata, without a config
        assert again.format == made.format
        for tensor, wanted in tensors.items():
            np.testing.assert_array_equal(decoded(again[tensor]), decoded(wanted))


# -- read by the tools themselves -------------------------------------------------------------

VALUES = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)


@needs("bitsandbytes")
@pytest.mark.parametrize("scheme", ["nf4", "fp4", "u4[nf4]/64:(u8[dynamic8]/64x*:f32+bias:f32)"])
def test_bitsandbytes_reads_what_we_write(scheme: str, tmp_path: Path) -> None:
    import torch
    from bitsandbytes.functional import QuantState, dequantize_4bit

    q = pq.quantize(VALUES, scheme)
    if q.scheme.offset is None and isinstance(q.scheme.scale, pq.QuantScheme):
        bias = np.full_like(q.scales.offsets, 0.25)
        q = q._replace(scales=q.scales._replace(offsets=bias))
    write("bitsandbytes", tmp_path / "x.safetensors", {"l.weight": q})
    stored = arrays(tmp_path / "x.safetensors")
    state = {name: tensor for name, tensor in stored.items() if name != "l.weight"}
    made = dequantize_4bit(
        stored["l.weight"], QuantState.from_dict(state, device=torch.device("cpu"))
    )
    np.testing.assert_array_equal(made.float().numpy(), q.dequantize())


@needs("bitsandbytes")
@pytest.mark.parametrize(
    "shape", [(64, 1024), (50, 100), (3, 77), (2, 16, 256), (2, 64, 256), (3, 5, 64)]
)
def test_double_quantization_is_that_of_bitsandbytes(shape: Any, tmp_path: Path) -> None:
    """Its codes, outer maxima and offset; maxima are the nearest, which its own are not always."""
    import torch
    from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit

    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    q = target_of("bitsandbytes:nf4-double").quantize(
        x, pq.scheme(VARIANTS["nf4-double"]), "minmax"
    )
    write("bitsandbytes", tmp_path / "x.safetensors", {"l.weight": q})
    stored = arrays(tmp_path / "x.safetensors")
    state = {name: tensor for name, tensor in stored.items() if name != "l.weight"}
    read = QuantState.from_dict(state, device=torch.device("cpu"))
    made = dequantize_4bit(stored["l.weight"], read).float().numpy()
    np.testing.assert_array_equal(made, q.dequantize())
    packed, own = quantize_4bit(torch.tensor(x), compress_statistics=True, quant_type="nf4")
    assert torch.equal(stored["l.weight"], packed)
    torch.testing.assert_close(read.state2.absmax, own.state2.absmax, rtol=1e-6, atol=0.0)
    assert read.offset.item() == pytest.approx(own.offset.item(), rel=1e-6)
    assert (read.absmax != own.absmax).float().mean() < 0.05
    theirs = dequantize_4bit(packed, own).numpy()
    assert np.linalg.norm(made - x) <= 1.001 * np.linalg.norm(theirs - x)
    with pq.open_checkpoint(tmp_path / "x.safetensors") as ck:
        assert_same(ck["l.weight"], made)


@needs("compressed_tensors")
@pytest.mark.parametrize(
    "scheme",
    [
        *("q4f/128:f32", "q4s/32:f32", "q3f/64:f32", "q8f/row:f32", "u4/64:f32-zero:u4"),
        *("q4f/tensor:f32", "u4/tensor:f32-zero:u4", "u8/tensor:f32-zero:u8"),
        *("u8/row:f32-zero:u8", "e2m1/32:ue8m0", "e2m1/16:ue4m3/tensor:divisor.f32"),
    ],
)
def test_compressed_tensors_reads_what_we_write(scheme: str, tmp_path: Path) -> None:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    q = pq.quantize(VALUES, scheme)
    config = write("compressed-tensors", tmp_path / "x.safetensors", {"l.weight": q})
    stored = arrays(tmp_path / "x.safetensors")
    group = config["config_groups"]["group_0"]
    args = QuantizationArgs.model_validate(group["weights"])
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    given = {name.removeprefix("l."): tensor for name, tensor in stored.items()}
    scheme_of_tool = QuantizationScheme(targets=["Linear"], weights=args)
    made = compressor.decompress(given, scheme_of_tool)["weight"]
    wanted = torch.tensor(q.dequantize()).to(made.dtype).float().numpy()
    np.testing.assert_array_equal(made.float().numpy(), wanted)
    with pq.open_checkpoint(tmp_path / "x.safetensors") as ck:
        assert_same(ck["l.weight"], q.dequantize())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small model, saved in the folder ``name_or_path``."""
    transformers = pytest.importorskip("transformers", reason="no transformers")
    import torch

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, vocab_size=64, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config).eval()
    model.name_or_path = str(tmp_path_factory.mktemp("llama"))
    model.save_pretrained(model.name_or_path)
    return model


def converted(llama: Any, to: str, folder: Path) -> dict[str, Host]:
    """The model's folder converted to another; the values that it then has, which it gets too."""
    import torch

    source, target = resumable.Source(Path(llama.name_or_path)), target_of(to)
    with source.open() as ck:
        steps = plan(ck, target, exclude=["*embed*", "lm_head*"], requantize=True)
    resumable.run(source, target, folder / "model.safetensors", steps)
    with pq.open_checkpoint(folder) as ck:
        assert ck.format == target.format
        assert sum(scheme is not None for scheme in ck.schemes().values()) == 14
        values = {name: decoded(ck[name]) for name in ck}
    llama.load_state_dict({name: torch.tensor(array) for name, array in values.items()})
    return values


def logits(model: Any) -> Host:
    import torch

    with torch.no_grad():
        made: Host = model(torch.arange(12)[None]).logits.numpy()
    return made


@needs("compressed_tensors")
@pytest.mark.filterwarnings("ignore")  # of the libraries' own code
def test_transformers_loads_compressed_tensors(llama: Any, tmp_path: Path) -> None:
    """A small model converted as a whole: the same logits as with the dequantized weights."""
    import torch
    from transformers import AutoModelForCausalLM

    converted(llama, "compressed-tensors:w4a16", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    np.testing.assert_array_equal(logits(loaded), logits(llama))


@needs("bitsandbytes")
@pytest.mark.parametrize("variant", ["nf4", "nf4-double"])
@pytest.mark.filterwarnings("ignore")  # of the libraries' own code
def test_transformers_loads_bitsandbytes(variant: str, llama: Any, tmp_path: Path) -> None:
    """The same weights; its products on a CPU are in bfloat16."""
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM

    values = converted(llama, f"bitsandbytes:{variant}", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    layers = {name: m for name, m in loaded.named_modules() if isinstance(m, Linear4bit)}
    assert len(layers) == 14
    for name, layer in layers.items():
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        np.testing.assert_array_equal(weight.float().numpy(), values[f"{name}.weight"])
    got, wanted = logits(loaded), logits(llama)
    assert np.abs(got - wanted).max() < 0.02 * np.abs(wanted).max()


@needs("mlx_lm")
@pytest.mark.parametrize(("variant", "bound"), [("4bit", 0.02), ("mxfp4", 1e-5), ("nvfp4", 1e-5)])
def test_mlx_lm_loads_a_folder(variant: str, bound: float, llama: Any, tmp_path: Path) -> None:
    """The same logits; under scales in bfloat16, so are its products."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    converted(llama, f"mlx:{variant}", tmp_path)
    loaded, _ = load_model(tmp_path)
    made = np.asarray(loaded(mx.arange(12)[None]).astype(mx.float32))
    wanted = logits(llama)
    assert np.abs(made - wanted).max() < bound * np.abs(wanted).max()


@needs("mlx")
@pytest.mark.parametrize(
    "scheme",
    [f"u{bits}/64:f32+bias:f32" for bits in (2, 3, 4, 5, 6, 8)]
    + ["e2m1/32:ue8m0", "e4m3/32:ue8m0", "e2m1/16:ue4m3"],
)
def test_mlx_reads_what_we_write(scheme: str, tmp_path: Path) -> None:
    import mlx.core as mx

    q = pq.quantize(VALUES, scheme)
    config = write("mlx", tmp_path / "x.safetensors", {"l.weight": q})
    stored = mx.load(str(tmp_path / "x.safetensors"))
    facts = {key: config[key] for key in ("group_size", "bits", "mode")}
    made = mx.dequantize(
        stored["l.weight"], stored["l.scales"], stored.get("l.biases"), dtype=mx.float32, **facts
    )
    np.testing.assert_array_equal(np.asarray(made), q.dequantize())


def test_gptq_by_hand(tmp_path: Path) -> None:
    """The fields of a layer unpacked as the format's page has them, without our reader."""
    for scheme in ("u4/128:f16-zero:u4", "q4s/32:f16", "u8/64:f16-zero:u8"):
        q = pq.quantize(VALUES, scheme)
        config = write("gptq", tmp_path / "x.safetensors", {"l.weight": q})
        stored = {
            name: tensor.numpy() for name, tensor in arrays(tmp_path / "x.safetensors").items()
        }
        bits, size = config["bits"], config["group_size"]
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        mask = np.uint32(2**bits - 1)
        words = stored["l.qweight"].view(np.uint32)[:, None, :] >> shifts[:, None] & mask
        zeros = stored["l.qzeros"].view(np.uint32)[..., None] >> shifts & mask
        groups = stored["l.g_idx"]
        assert (groups == np.arange(256) // size).all() and config["checkpoint_format"] == "gptq_v2"
        codes = words.reshape(256, 64).astype(np.float32)
        zero = zeros.reshape(-1, 64).astype(np.float32)[groups]
        made = (codes - zero) * stored["l.scales"].astype(np.float32)[groups]
        np.testing.assert_array_equal(made.T, q.dequantize())


# -- what does not fit ------------------------------------------------------------------------

REFUSED = [
    ("bitsandbytes", "q4s/32:f16", "l.weight"),
    ("bitsandbytes", "u4[nf4]/row:f32", "l.weight"),
    ("bitsandbytes", "nf4-double", "l.weight"),
    ("gptq", "nf4", "l.weight"),
    ("gptq", "q4s/32:f16", "other"),
    ("gptq", "e4m3/row:f32", "l.weight"),
    ("compressed-tensors", "nvfp4", "l.weight"),
    ("compressed-tensors", "nf4", "l.weight"),
    ("compressed-tensors", "q4s/2x16:f16", "l.weight"),
    ("mlx", "q4s/32:f16", "l.weight"),
    ("mlx", "u4/16:f16+bias:f16", "l.weight"),
    ("mlx", "u4/32:f16+bias:f32", "l.weight"),
]


@pytest.mark.parametrize(("format", "scheme", "name"), REFUSED)
def test_schemes_that_a_format_lacks(format: str, scheme: str, name: str, tmp_path: Path) -> None:
    q = pq.quantize(VALUES, scheme)
    with pytest.raises((UnsupportedDtype, InvalidName)):
        write(format, tmp_path / "x.safetensors", {name: q})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("format", "scheme"),
    [
        ("mlx", "u4/64:f32+bias:f32"),
        ("mlx", "e2m1/32:ue8m0"),
        ("compressed-tensors", "q4f/128:f32"),
        ("compressed-tensors", "e2m1/16:ue4m3/tensor:divisor.f32"),
    ],
)
def test_groups_that_the_ends_of_rows_cut(format: str, scheme: str, tmp_path: Path) -> None:
    """Which the tools themselves refuse to read."""
    q = pq.quantize(VALUES[:, :200], scheme)
    with pytest.raises(UnsupportedDtype, match="are cut at the ends of rows of 200"):
        write(format, tmp_path / "x.safetensors", {"l.weight": q})


def test_layers_that_one_file_cannot_hold(tmp_path: Path) -> None:
    tensors = {"a.weight": pq.quantize(VALUES, "q4s/32:f16")}
    tensors["b.weight"] = pq.quantize(VALUES, "q8s/32:f16")
    with pytest.raises(UnsupportedDtype, match="one number of bits"):
        write("gptq", tmp_path / "x.safetensors", tensors)
    config = write("compressed-tensors", tmp_path / "x.safetensors", tensors)
    assert [g["targets"] for g in config["config_groups"].values()] == [["a"], ["b"]]
    with pq.open_checkpoint(tmp_path / "x.safetensors") as ck:
        for name, q in tensors.items():
            assert_same(ck[name], q.dequantize())
    clash = {"a.weight": tensors["a.weight"], "a.qweight": np.ones(3, np.float32)}
    with pytest.raises(InvalidName, match="another"):
        write("gptq", tmp_path / "x.safetensors", clash)


def test_maxima_of_several_offsets(tmp_path: Path) -> None:
    q = pq.quantize(VALUES, "u4[nf4]/64:(u8[dynamic8]/64x*:f32+bias:f32)")
    offsets = np.concatenate([q.scales.offsets, q.scales.offsets + 1])
    tall = pq.quantize(np.concatenate([VALUES, VALUES]), q.scheme)
    tall = tall._replace(scales=tall.scales._replace(offsets=offsets))
    with pytest.raises(CorruptData, match="several offsets"):
        write("bitsandbytes", tmp_path / "x.safetensors", {"l.weight": tall})
    assert not list(tmp_path.iterdir())


HOSTILE_METADATA = [
    *("{", "[]", "3", '{"types": 3, "tensors": [], "param_ids": 1, "scalars": "x", "dtypes": 2}'),
    '{"l.weight": {"state": "{", "storage": "X"}, "types": {"general.alignment": "u32"}}',
    '{"l.weight": {"state": 3}, "param_ids": {"l.weight": -1}, "dtypes": {"norm": {"Bool": 1}}}',
    '{"l.weight": [], "scalars": {"a": {"Int": 99999999999999999999999}}, "version": "x"}',
    '{"types": {"a": "u33", "b": "array:array"}, "order": 3}',
]


@pytest.mark.parametrize("text", HOSTILE_METADATA)
@pytest.mark.parametrize(
    ("format", "scheme"),
    [("gguf", "q4f/32:f16"), ("burnpack", "q8s/32:f16"), ("bitsandbytes", "nf4")],
)
def test_metadata_that_lie(text: str, format: str, scheme: str, tmp_path: Path) -> None:
    """What a file kept for writing back may be anything: it is ignored, or refused."""
    tensors = {"l.weight": pq.quantize(VALUES, scheme), "norm": VALUES[0]}
    for more in ({}, {"general.alignment": "0"}, {"general.alignment": "x"}, {"a": "1", "b": "[]"}):
        path = tmp_path / {"gguf": "x.gguf", "burnpack": "x.bpk"}.get(format, "x.safetensors")
        try:
            write(format, path, tensors, {format: text} | more)
        except InvalidName:
            continue
        with pq.open_checkpoint(path) as ck:
            assert_same(ck["l.weight"], tensors["l.weight"].dequantize())


def test_overrides_of_mlx(tmp_path: Path) -> None:
    tensors = {
        "a.weight": pq.quantize(VALUES, "u4/64:f16+bias:f16"),
        "b.weight": pq.quantize(VALUES, "u4/64:f16+bias:f16"),
        "c.weight": pq.quantize(VALUES, "e2m1/32:ue8m0"),
        "norm": np.ones(4, np.float16),
    }
    config = write("mlx", tmp_path / "x.safetensors", tensors)
    assert config["bits"] == 4 and config["c"]["mode"] == "mxfp4" and "b" not in config
    with pq.open_checkpoint(tmp_path / "x.safetensors") as ck:
        assert json.loads(ck.metadata["quantization_config"]) == config
        for name, tensor in tensors.items():
            assert_same(ck[name], decoded(tensor))
