"""The demo: on a tiny model with the names of the real one, and on the real one where it is."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

import polyquant as pq

pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
HIDDEN, WIDE = 64, 160


def _demo() -> Any:
    spec = importlib.util.spec_from_file_location("polyquant_demo", ROOT / "examples" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


demo = _demo()


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    draw = np.random.default_rng(0).standard_normal
    shapes = {
        "embeddings.word_embeddings.weight": (200, HIDDEN),
        "embeddings.position_embeddings.weight": (48, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm.weight": (HIDDEN,),
        "embeddings.LayerNorm.bias": (HIDDEN,),
        f"{demo.QUERY}.weight": (HIDDEN, HIDDEN),
        f"{demo.UP}.weight": (WIDE, HIDDEN),
        f"{demo.UP}.bias": (WIDE,),
        f"{demo.DOWN}.weight": (HIDDEN, WIDE),
    }
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file({name: draw(shape).astype(np.float32) for name, shape in shapes.items()}, path)
    return path


def _run(model: Path) -> tuple[bool, str]:
    text = io.StringIO()
    passed = demo.run(model, Console(file=text, width=100))
    return passed, text.getvalue()


def test_all_checks_pass(model: Path) -> None:
    passed, text = _run(model)
    assert passed and "FAILED" not in text
    assert text.count("6 of 6 tensors") == 2 * len(demo.SCHEMES)
    assert "polyquant.errors.BackendMismatch: matmul needs both operands in one library" in text
    for scheme in demo.SCHEMES:
        assert f"{scheme} in NumPy and in torch" in text


def test_a_changed_bit_fails(model: Path, tmp_path: Path) -> None:
    path = demo.quantize_with(model, "q4s-32", tmp_path).path
    here, there = pq.load(path), pq.load(path, device="torch:cpu")
    assert all(check.passed for check in demo.check_bits(here, there))
    there[f"{demo.QUERY}.weight"].data[0, 0] ^= 1
    assert not any(check.passed for check in demo.check_bits(here, there))
    assert not any(check.passed for check in demo.check_bits({}, {}))


def test_a_wrong_product_fails(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    path = demo.quantize_with(model, "q8s-32", tmp_path).path
    here, there = pq.load(path), pq.load(path, device="torch:cpu")
    x = demo.activations(model)
    assert all(check.passed for check in demo.check_products(x, here, there))
    right = pq.matmul
    monkeypatch.setattr(pq, "matmul", lambda a, b: right(a, b) * 1.001)
    assert not any(check.passed for check in demo.check_products(x, here, there))


def test_activations_are_the_model_s_embeddings(model: Path) -> None:
    x = demo.activations(model, tokens=16)
    assert x.shape == (16, HIDDEN) and x.dtype == np.float32
    with pq.open_checkpoint(model) as checkpoint:
        weight, bias = (checkpoint[f"embeddings.LayerNorm.{part}"] for part in ("weight", "bias"))
        plain = (x - bias) / weight
    np.testing.assert_allclose(plain.mean(axis=-1), 0, atol=1e-4)
    np.testing.assert_allclose(plain.std(axis=-1), 1, atol=1e-3)


def test_a_missing_model_is_one_sentence(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "no-such-package-at-all")
    assert demo.main() == 2
    assert capsys.readouterr().out == f"The demo needs a model; install it with: {demo.INSTALL}\n"


def test_a_failed_check_is_a_failed_program(monkeypatch: Any, model: Path) -> None:
    monkeypatch.setattr(demo, "find_model", lambda: model)
    monkeypatch.setattr(demo, "run", lambda path, console: False)
    assert demo.main() == 1


def test_the_real_model() -> None:
    if demo.find_model() is None:
        pytest.skip(f"the package {demo.PACKAGE} is not installed")
    command = [sys.executable, str(ROOT / "examples" / "demo.py")]
    settings = os.environ | {"COLUMNS": "80"}
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "FAILED" not in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 80
    assert found.stdout.rstrip().endswith(".")
