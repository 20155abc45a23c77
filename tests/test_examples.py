"""The examples that train and compile a real model, and that the model is what it should be."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import polyquant as pq

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[1] / "examples"
SCHEMES = ("q8s-row", "q4s-32", "nf4", "mxfp4", "nvfp4")


@pytest.fixture(scope="module")
def encoder() -> Any:
    """examples/encoder.py; transformers takes seconds to import, and so is imported here."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    import demo

    if demo.find_model() is None:
        pytest.skip(f"the package {demo.PACKAGE} is not installed")
    import encoder

    return encoder


@pytest.fixture(scope="module")
def loaded(encoder: Any) -> tuple[Any, Any]:
    return encoder.load_encoder()


@pytest.fixture(scope="module")
def batch(encoder: Any, loaded: tuple[Any, Any]) -> Any:
    texts = [sentence.text for sentence in encoder.evenly(encoder.sentences(), 8)]
    return encoder.tokenize(loaded[1], texts)


def _run(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints, which ends well and with a sentence."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.rstrip().endswith(".")
    return found.stdout.splitlines()


# -- the model and its sentences ------------------------------------------------------------------


def test_the_sentences_are_many_and_read_like_sentences(encoder: Any) -> None:
    found = encoder.sentences()
    texts = [sentence.text for sentence in found]
    assert len(texts) >= 500 and len(set(texts)) == len(texts)
    assert all(40 <= len(text) <= 200 and len(text.split()) >= 7 for text in texts)
    assert all(text[0].isupper() and text[-1] == "." for text in texts)
    assert not any(mark in text for text in texts for mark in ("  ", "*", '"', "::=", ">>>", "\n"))
    assert encoder.sentences() == found
    chosen = encoder.evenly(found, 256)
    assert len(set(chosen)) == 256 and chosen[0] == found[0]


def test_a_sentence_has_one_embedding_alone_or_padded(
    encoder: Any, loaded: tuple[Any, Any]
) -> None:
    model, tokenizer = loaded
    texts = [
        "A cat sits on the mat.",
        "A kitten lies on a rug that somebody knotted by hand a very long time ago.",
        "The stock market fell.",
    ]
    with torch.no_grad():
        together = encoder.embed(model, encoder.tokenize(tokenizer, texts))
        alone = torch.cat([encoder.embed(model, encoder.tokenize(tokenizer, [t])) for t in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(3))
    cosines = together @ together.T
    assert cosines[0, 1] > cosines[0, 2] + 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_model_is_the_model_with_dequantized_weights(
    encoder: Any, loaded: tuple[Any, Any], batch: Any, scheme: str
) -> None:
    from polyquant.torch import QLinear, quantize_

    model = loaded[0]
    ours, dequantized = copy.deepcopy(model), copy.deepcopy(model)
    assert quantize_(ours, scheme) is ours
    assert sum(isinstance(layer, QLinear) for layer in ours.modules()) == 36
    for layer in dequantized.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = pq.quantize(layer.weight.data, scheme).dequantize()
    with torch.no_grad():
        found, wanted, plain = (encoder.embed(m, batch) for m in (ours, dequantized, model))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert (found - plain).abs().max() > 1e-3


# -- examples/finetune.py -------------------------------------------------------------------------


def test_fine_tuning_lowers_the_loss_and_keeps_the_base(encoder: Any) -> None:
    text = _run("finetune.py")
    losses = [float(found[1]) for line in text if (found := re.search(r"step .* loss (.*)", line))]
    assert len(losses) == 5 and losses[-1] < 0.7 * losses[0]
    assert text[-1].startswith("In 50 steps the loss fell from ")
    assert text[-1].endswith("not a byte of the quantized model has changed.")


def test_fine_tuning_that_goes_wrong_is_a_failed_program(
    encoder: Any, monkeypatch: Any, capsys: Any
) -> None:
    import finetune

    def rises(*_: Any) -> list[float]:
        return [1.0 + i for i in range(20)]

    def changes_the_base(model: Any, *_: Any) -> list[float]:
        next(iter(model.state_dict().values())).view(-1)[0] += 1
        return [20.0 - i for i in range(20)]

    monkeypatch.setattr(sys, "argv", ["finetune.py"])
    for train, said in ((rises, "5.500 to 15.500, base the same"), (changes_the_base, "base not")):
        monkeypatch.setattr(finetune, "train", train)
        assert finetune.main() == 1
        assert said in capsys.readouterr().out


def test_the_base_is_all_that_is_not_trained(encoder: Any) -> None:
    import finetune

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    before = finetune.base_bytes(model)
    model[0].bias.data += 1
    assert finetune.base_bytes(model) == before
    model[0].weight.data[0, 0] += 1
    changed = finetune.base_bytes(model)
    model[1].running_mean += 1
    assert len({before, changed, finetune.base_bytes(model)}) == 3


# -- examples/compile.py --------------------------------------------------------------------------


def test_one_compiled_graph_serves_every_batch(encoder: Any) -> None:
    text = _run("compile.py")
    assert len([line for line in text if re.match(r" ?\d+ sentences of \d+ tokens", line)]) == 4
    assert text[-1].startswith("One graph served batches of 2, 3, 8, 16 sentences")
