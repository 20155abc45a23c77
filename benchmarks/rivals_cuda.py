"""Other libraries' products on an NVIDIA GPU, where they are installed, on weights of their own.

Each rival is a function (n, k) -> list of products, ``x -> x @ w.T``, one for each copy of a weight
that is read from memory each time. What a library cannot do is left out of the table, with its
words in ``failures``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

PLACE = torch.device("cuda:0")
Product = Callable[[torch.Tensor], torch.Tensor]
#: What a library raises where it cannot.
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, ImportError, OSError)


def copies_of(nbytes: int) -> int:
    """Copies of so many bytes that none is found in a cache: 240 MB, 24 at most."""
    return min(24, max(4, -(-240_000_000 // nbytes)))


def tinygemm(n: int, k: int) -> list[Product]:
    """torch's own int4 kernel, blocks of 32."""
    codes = torch.randint(0, 256, (n, k // 2), device=PLACE, dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    grid = torch.randn(k // 32, n, 2, device=PLACE).to(torch.bfloat16)
    product = torch.ops.aten._weight_int4pack_mm
    pairs = [(packed.clone(), grid.clone()) for _ in range(copies_of(packed.nbytes + grid.nbytes))]
    return [lambda x, p=p, g=g: product(x, p, 32, g) for p, g in pairs]


def humming(**weight: Any) -> Callable[[int, int], list[Product]]:
    """humming-kernels' layer of that weight configuration, tiles of its own choice."""

    def made(n: int, k: int) -> list[Product]:
        from humming.layer import HummingLayer

        w = torch.randn(n, k, device=PLACE).to(torch.bfloat16)
        layers = []
        for _ in range(copies_of(n * k // 2)):
            layer = HummingLayer(n, k, weight_config=weight, torch_dtype=torch.bfloat16).cuda()
            layer.load_from_unquantized(w)
            layer.transform()
            layers.append(layer)
        return layers

    return made


def bitsandbytes(n: int, k: int) -> list[Product]:
    """bitsandbytes' NF4, blocks of 64, float32 scales."""
    import bitsandbytes as bnb

    w = torch.randn(n, k, device=PLACE).to(torch.bfloat16)
    made = [
        bnb.functional.quantize_4bit(w, blocksize=64, quant_type="nf4")
        for _ in range(copies_of(n * k // 2))
    ]
    return [lambda x, p=p, s=s: bnb.matmul_4bit(x, p.t(), quant_state=s) for p, s in made]


def gemlite(n: int, k: int) -> list[Product]:
    """gemlite's int4 in blocks of 64 with zero points."""
    from gemlite.helper import A16W4_HQQ_INT

    codes = torch.randint(0, 16, (n, k), device=PLACE, dtype=torch.uint8)
    scales = torch.rand(n, k // 64, device=PLACE).to(torch.bfloat16)
    maker = A16W4_HQQ_INT(device=str(PLACE), dtype=torch.bfloat16)
    zeros = torch.full_like(scales, 8)
    return [maker.from_weights(codes, scales, zeros) for _ in range(copies_of(n * k // 2))]


_FEW = (1, 2, 4, 16, 64, 128, 256)
_ALL = (*_FEW, 512, 2048, 4096)
#: By the scheme that they are compared with: name, package, maker, rows of x worth the time
#: (gemlite compiles for 5 to 12 s at each).
RIVALS: dict[str, list[tuple[str, str, Callable[[int, int], list[Product]], tuple[int, ...]]]] = {
    "q4s-32": [
        ("tinygemm", "torch", tinygemm, _FEW),
        ("gemlite", "gemlite", gemlite, (1, 16, 64)),
        ("humming", "humming", humming(dtype="int4", group_size=32), _ALL),
    ],
    "nf4": [("bitsandbytes", "bitsandbytes", bitsandbytes, _ALL)],
    "mxfp4": [
        (
            "humming",
            "humming",
            humming(dtype="float4e2m1", group_size=32, scale_dtype="float8e8m0"),
            _ALL,
        )
    ],
    "q8s-row": [("humming", "humming", humming(dtype="int8"), _ALL)],
    "fp8-row": [("humming", "humming", humming(dtype="float8e4m3"), _ALL)],
    "q2s/64:f16": [("humming", "humming", humming(dtype="int2", group_size=64), _ALL)],
}


def products(
    scheme: str, n: int, k: int, failures: dict[str, str]
) -> dict[str, tuple[list[Product], tuple[int, ...]]]:
    """Each rival of a scheme: its products, one a copy, and the rows of x worth the time."""
    found = {}
    for name, package, maker, rows in RIVALS.get(scheme, ()):
        if find_spec(package) is None:
            failures[name] = "not installed"
            continue
        try:
            found[name] = maker(n, k), rows
        except FAILURES as error:
            failures[f"{name} {scheme} {n}x{k}"] = words(error)
    return found


def of_pair(left: str, a: Any, weights: list[Any]) -> dict[str, list[Callable[[], Any]]]:
    """Torch's own product of the codes of two quantized operands, by its name."""
    if left not in ("fp8-tensor", "fp8-row", "e4m3/1x128:f32", "q8s-row"):
        return {}
    if weights[0].scheme.value != a.scheme.value:
        return {}
    name = "_int_mm" if left == "q8s-row" else "_scaled_mm"
    return {name: [_torch_product(left, a, w) for w in weights]}


def words(error: Exception) -> str:
    """A rival's own, where it cannot."""
    return f"{type(error).__name__}: {error}"[:200]


def _torch_product(left: str, a: Any, w: Any) -> Callable[[], Any]:
    """``a @ w`` by torch, of the same codes; scales as torch wants them (int8: none)."""
    if left == "q8s-row":
        x, b = a.data.view(torch.int8), w.data.view(torch.int8).mT
        return lambda: torch._int_mm(x, b)
    x, b = a.data.view(torch.float8_e4m3fn), w.data.view(torch.float8_e4m3fn).mT
    one = torch.ones((), device=PLACE)
    scales = (one, one)
    if left == "fp8-row":
        scales = (a.scales.reshape(-1, 1).float(), w.scales.reshape(1, -1).float())
    elif left != "fp8-tensor":  # lines of x beside each other; (k / 128, n / 128) of the weight
        scales = (a.scales.mT.contiguous().mT, w.scales.contiguous().mT)
    return lambda: torch._scaled_mm(x, b, *scales, out_dtype=torch.bfloat16)
