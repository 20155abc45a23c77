"""Files that other tools made, with the values that those tools decode: tests compare with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import polyquant as pq
from polyquant.files.assemble import numbers_of

FIXTURES = Path(__file__).parents[2] / "shared" / "fixtures"
Host = np.ndarray[Any, Any]

#: Folder of files -> the format's name here.
FOLDERS = {
    "gguf": "gguf",
    "bitsandbytes": "bitsandbytes",
    "gptq": "gptq",
    "awq": "awq",
    "compressed-tensors": "compressed-tensors",
    "gpt-oss-mxfp4": "gpt-oss",
    "modelopt": "modelopt",
    "deepseek-fp8": "fp8",
    "mlx": "mlx",
    "hf-metal": "mlx",
    "hqq": "hqq",
    "quanto": "quanto",
    "torchao": "torchao",
    "bitnet": "bitnet",
    "hf-gemma": "gemma",
}
#: What a file alone does not say, and its config would not either.
_SAID_BESIDES: dict[str, dict[str, Any]] = {
    "bitnet/gguf_i2_s": {"i2_s": "x86"},
    "bitnet/gguf_i2_s_4rows_layout": {"i2_s": "x86-rows"},
    "quanto/qint4_axis_last_g16_zeropoint": {"weights": "qint4"},
}
_NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class Fixture(NamedTuple):
    """One file of another tool: its path, its config, and what its tool says of it."""

    name: str
    path: Path
    meta: dict[str, Any]

    @property
    def format(self) -> str:
        return "gguf" if self.path.suffix == ".gguf" else FOLDERS[self.name.partition("/")[0]]

    @property
    def config(self) -> Any:
        """The config as a model has it, and the shapes that two formats leave to the model."""
        found = dict(self.meta.get("config_json") or {})
        quantization = self.meta.get("quantization_config")
        if quantization and not found:
            found["quantization_config"] = quantization
        shapes = {name.removesuffix(".weight"): layer["shape"] for name, layer in self.layers}
        found["shapes"] = {f"{name}.weight": shape for name, shape in shapes.items()}
        return found | _SAID_BESIDES.get(self.name, {})

    @property
    def layers(self) -> list[tuple[str, Any]]:
        return list(self.meta.get("layers", {}).items())

    def open(self) -> pq.Checkpoint:
        named = "axis_last" in self.name  # of which nothing says what it is
        config = None if self.format == "gguf" and "bitnet" not in self.name else self.config
        return pq.open_checkpoint(self.path, config=config, format=self.format if named else None)

    def expected(self) -> dict[str, Host]:
        """Name -> the values that the other tool decodes (float32)."""
        with safe_open(self.path.parent / "expected.safetensors", framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def narrow(self, tensor: str) -> Any:
        """The dtype that the tool computes in, where it is narrower than float32."""
        layers = dict(self.layers)
        layer = layers.get(tensor) or layers.get(tensor.removesuffix(".weight")) or {}
        said = layer.get("peer_result_dtype") or self.meta["compute_dtype"]
        return _NARROW.get(str(said).removeprefix("torch."))


def fixture(name: str) -> Fixture:
    folder = FIXTURES / name
    meta = json.loads((folder / "meta.json").read_text())
    return Fixture(name, folder / meta["packed_file"], meta)


def names(*folders: str) -> list[Any]:
    """The fixtures of these folders as parameters of a test; one skip where there are none."""
    found = sorted(p.parent for f in folders for p in FIXTURES.glob(f"{f}/*/meta.json"))
    if not found:
        reason = "the files of other tools are not on this machine"
        return [pytest.param("", marks=pytest.mark.skip(reason=reason))]
    return [folder.relative_to(FIXTURES).as_posix() for folder in found]


def decoded(tensor: Any) -> Host:
    """Values as float32."""
    host = tensor.dequantize() if isinstance(tensor, pq.QTensor) else tensor
    return np.asarray(host).astype(np.float32)


def assert_same(tensor: Any, wanted: Host) -> None:
    """Bit-equal but for the sign of zero; subnormal numbers are zero here by contract."""
    if isinstance(tensor, pq.QTensor):
        wanted = np.where(np.abs(wanted) < np.finfo(np.float32).tiny, 0.0, wanted)
    np.testing.assert_array_equal(decoded(tensor), wanted)


def assert_rounded(tensor: pq.QTensor, wanted: Host, narrow: Any) -> None:
    """Equal to what a tool computes in a narrow dtype: after one rounding, or step by step.

    With an offset tools round twice, so the same two steps are taken from the stored numbers.
    """
    if tensor.scheme.offset is None:
        got = tensor.dequantize().astype(narrow)
        wanted = np.where(np.abs(wanted) < np.finfo(np.float32).tiny, 0.0, wanted)
        np.testing.assert_array_equal(got.astype(np.float32), wanted)
        return
    numbers = numbers_of(tensor)
    parts = [numbers[name] for name in ("codes", "scales", "offsets")]
    per_group = parts[0].size // parts[1].size
    shape = (*parts[1].shape, per_group)
    codes = parts[0].reshape(shape).astype(narrow)
    scales, offsets = (p[..., None].astype(narrow) for p in parts[1:])
    if tensor.scheme.offset.kind == "bias":
        got = codes * scales + offsets
    else:
        got = (codes - offsets) * scales
    np.testing.assert_array_equal(got.reshape(tensor.shape).astype(np.float32), wanted)
    unit = float(ml_dtypes.finfo(narrow).eps) / 2
    steps = np.abs(codes.astype(np.float32) * scales.astype(np.float32)).reshape(tensor.shape)
    error = np.abs(tensor.dequantize() - wanted)
    subnormal = float(np.finfo(np.float32).tiny)
    assert (error <= unit * (1.01 * steps + 2.01 * np.abs(wanted)) + subnormal).all()
