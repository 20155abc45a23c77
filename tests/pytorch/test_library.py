"""The custom ops as torch.library checks them: schema, derivative, fake, tracing with any sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import polyquant as pq
from polyquant.torch import library
from polyquant.torch.operands import bytes_of, operand_of, tensor_of

OPS = torch.ops.polyquant
SCHEMES = ("q4s/5:f16", "e2m1/8:ue4m3/tensor:f32", "u4[nf4]/8:(u8[dynamic8u]/256:f32)")


def _weight(scheme: str, *, tracked: bool = False) -> Any:
    q = pq.quantize(torch.randn(6, 16), scheme)
    for part in q.parts().values():
        part.requires_grad_(tracked and part.is_floating_point())
    return operand_of(q)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


#: Op -> arguments for it, of a scheme.
ARGUMENTS: dict[str, Callable[[str], Sequence[tuple[Any, ...]]]] = {
    "dequantize": lambda scheme: (
        (*_weight(scheme, tracked=True).mT.arguments(), torch.float16),
        (*_weight(scheme).arguments(), torch.float32),
    ),
    "dequantize_backward": lambda scheme: (
        (torch.randn(6, 16), *_weight(scheme).arguments(), _floats(scheme)),
    ),
    "matmul": lambda scheme: (
        (*operand_of(_x(2, 3, 16)).arguments(), *_weight(scheme).mT.arguments(), torch.float32),
        (*_weight(scheme, tracked=True).arguments(), *operand_of(_x(16)).arguments(), torch.half),
        (*_weight(scheme).arguments(), *_weight("q8s/row:f32").mT.arguments(), torch.float32),
    ),
    "linear": lambda scheme: (
        (_x(2, 16), *_weight(scheme, tracked=True).arguments(), _x(6), ""),
        (_x(16), *_weight(scheme).arguments(), None, "q8s/row:f32"),
    ),
    "quantize": lambda scheme: ((_x(3, 16), scheme, *library.MINMAX),),
    "embedding": lambda scheme: (
        (torch.tensor([[0, 5], [2, 2]]), *_weight(scheme, tracked=True).arguments(), torch.half),
    ),
    "straight_through": lambda scheme: (
        (_x(6, 16), *_weight(scheme).arguments(), None, None, None, 1.0),
    ),
    "straight_through_backward": lambda scheme: (
        (torch.randn(6, 16), torch.randn(6, 16), *_weight(scheme).arguments()),
    ),
}


def _floats(scheme: str) -> list[int]:
    return [i for i, p in enumerate(_weight(scheme).parts) if p.is_floating_point()]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_ops_pass_opcheck(name: str, scheme: str) -> None:
    torch.manual_seed(0)
    for arguments in ARGUMENTS[name](scheme):
        torch.library.opcheck(getattr(OPS, name).default, arguments)


def test_opcheck_sees_every_op() -> None:
    every = torch._C._dispatch_get_all_op_names()
    ours = {name.partition("::")[2] for name in every if name.startswith("polyquant::")}
    assert ours == set(ARGUMENTS)


@pytest.mark.parametrize("scheme", [*SCHEMES, "q8s/tensor:f32", "u4/8:bf16+bias:f16", "mxfp4"])
def test_parts_and_their_bytes_make_the_same_tensor(scheme: str) -> None:
    q = pq.quantize(torch.randn(6, 16), scheme).T
    given = operand_of(q)
    for parts in (given.parts, [bytes_of(part) for part in given.parts]):
        made = tensor_of(parts, q.scheme, q.shape, q.axes)
        assert made.to_data() == q.to_data()
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), bytes_of(given.parts[1]).flatten()])
    unaligned = shifted[1:].reshape(bytes_of(given.parts[1]).shape)
    parts = [given.parts[0], unaligned, *given.parts[2:]]
    assert tensor_of(parts, q.scheme, q.shape, q.axes).to_data() == q.to_data()


def test_ops_refuse_what_the_operations_refuse() -> None:
    weight = _weight("q4s/5:f16").arguments()
    with pytest.raises(pq.errors.ShapeMismatch, match="inner extents"):
        OPS.linear(torch.randn(2, 15), *weight, None, "")
    with pytest.raises(pq.errors.ShapeMismatch, match="bias"):
        OPS.linear(torch.randn(2, 16), *weight, torch.zeros(5), "")
    with pytest.raises(pq.errors.NotFloat):
        OPS.linear(torch.ones(2, 16, dtype=torch.int32), *weight, None, "")
    with pytest.raises(pq.errors.DeviceMismatch, match="torch:meta"):
        OPS.linear(torch.randn(2, 16, device="meta"), *weight, None, "")
    with pytest.raises(pq.errors.InvalidIndex):
        OPS.embedding(torch.tensor([6]), *weight, torch.float32)
    with pytest.raises(pq.errors.InvalidIndex):
        OPS.embedding(torch.tensor([-1]), *weight, torch.float32)
