"""examples/jax_transformer.py: that it trains, and that its model is the model."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq

jax = pytest.importorskip("jax", reason="jax is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax_transformer.py"
TEXTS = [
    "A cat sits on the mat.",
    "A kitten lies on a rug that somebody knotted by hand a very long time ago.",
    "The stock market fell.",
]


@pytest.fixture(scope="module")
def example() -> Any:
    for name in ("torch", "transformers", "optax"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    import demo

    if demo.find_model() is None:
        pytest.skip(f"the package {demo.PACKAGE} is not installed")
    import jax_transformer

    return jax_transformer


@pytest.fixture(scope="module")
def loaded(example: Any) -> tuple[Any, Any, Any]:
    params, config = example.load()
    return params, example.quantize(params), config


def test_the_model_in_jax_is_the_model_in_torch(example: Any, loaded: tuple[Any, Any, Any]) -> None:
    import encoder
    import torch

    params, _, config = loaded
    model, tokenizer = encoder.load_encoder()
    with torch.no_grad():
        wanted = encoder.embed(model, encoder.tokenize(tokenizer, TEXTS))
    found = jax.jit(lambda p, t: example.embed(p, None, t, config))(params, example.tokenize(TEXTS))
    np.testing.assert_allclose(np.asarray(found), wanted.numpy(), rtol=0, atol=1e-5)


def test_a_scan_over_stacked_layers_is_the_layers_with_dequantized_weights(
    example: Any, loaded: tuple[Any, Any, Any]
) -> None:
    _, quantized, config = loaded
    layers = quantized["layers"]
    assert layers["up"]["weight"].shape == (6, 1536, 384)
    assert sum(pq.is_quantized(layers[name]["weight"]) for name in example.LINEAR) == 6
    first = example.unstacked(layers)[0]["up"]["weight"]
    assert first.scheme == pq.scheme(example.SCHEME) and first.shape == (1536, 384)
    values = [pq.dequantize_tree(layer) for layer in example.unstacked(layers)]
    plain = pq.dequantize_tree(quantized | {"layers": None}) | {"layers": example.stacked(values)}
    run = jax.jit(lambda params, tokens: example.embed(params, None, tokens, config))
    tokens = example.tokenize(TEXTS)
    found, wanted = run(quantized, tokens), run(plain, tokens)
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=0, atol=1e-5)
    jaxpr = str(jax.make_jaxpr(lambda p, t: example.embed(p, None, t, config))(quantized, tokens))
    assert len(re.findall(r"= scan\[", jaxpr)) == 1 and "length=6" in jaxpr


def test_adapters_over_quantized_layers_lower_the_loss(example: Any) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(found) for found in re.findall(r"step .* loss (.*)", done.stdout)]
    assert len(losses) == 2 and losses[1] < 0.6 * losses[0]
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"In 20 steps the loss fell from \d\.\d+ to \d\.\d+\.", last)


def test_a_loss_that_rises_is_a_failed_program(example: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["jax_transformer.py"])
    monkeypatch.setattr(example, "train", lambda *_: [1.0 + i for i in range(50)])
    assert example.main() == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("Failed: the loss went from ")
