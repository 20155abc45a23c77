"""fake_quantize: its values are those of quantizing, its gradients those of the papers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import polyquant as pq
from polyquant.torch import fake_quantize

SCHEMES = (
    "q8f/row:f32",
    "q4s/8:f16",
    "nf4",
    "mxfp4",
    "e4m3/tensor:f32",
    "e2m1/8:ue4m3/tensor:f32",
    "u4/8:f16-zero:u4",
    "u4/8:bf16+bias:f32",
    "u4[nf4]/8:(u8[dynamic8u]/256:f32)",
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_are_those_of_quantizing(scheme: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 21).to(dtype).requires_grad_()
    made = fake_quantize(x, scheme)
    assert made.dtype == dtype and torch.equal(made, pq.quantize(x, scheme).dequantize(dtype))
    (found,) = torch.autograd.grad(made.sum(), x)
    assert found.dtype == dtype and set(found.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("scheme", ["q4s/8:f32", "q8s/row:f32", "e2m1/8:f32", "u4[nf4]/8:f32"])
def test_what_calibration_covers_has_a_gradient(scheme: str) -> None:
    x = torch.randn(64, 24, requires_grad=True)
    (found,) = torch.autograd.grad(fake_quantize(x, scheme).sum(), x)
    assert torch.equal(found, torch.ones_like(x))


def test_the_gradient_ends_where_the_range_ends() -> None:
    ends = torch.tensor([[-7.0, 7.0, -7.01, 7.01, 6.9, -100.0, 0.0, 100.0]])
    scale = torch.tensor([[0.37]])
    x = (ends * scale).requires_grad_()
    wanted = torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]])
    (found,) = torch.autograd.grad(fake_quantize(x, "q4s/8:f32", scales=scale).sum(), x)
    assert torch.equal(found, wanted)
    options = {"scales": scale, "offsets": torch.tensor([[-7.0 * 0.37]])}
    (found,) = torch.autograd.grad(fake_quantize(x, "u4/8:f32+bias:f32", **options).sum(), x)
    # 0 .. 15 steps from -7: up to 8.
    assert torch.equal(found, torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]]))


def test_a_dead_block_passes_zeros_alone() -> None:
    x = torch.tensor([[0.0, 1e-3, 0.0, 0.0]], requires_grad=True)
    made = fake_quantize(x, "q4s/4:f32", scales=torch.zeros(1, 1))
    (found,) = torch.autograd.grad(made.sum(), x)
    assert torch.equal(made, torch.zeros(1, 4))
    assert torch.equal(found, torch.tensor([[1.0, 0.0, 1.0, 1.0]]))


def _blocks(x: Tensor) -> Tensor:
    return x.reshape(3, 2, 8)


def test_learned_scales_have_the_gradient_of_lsq() -> None:
    x, seed = torch.randn(3, 16, requires_grad=True), torch.randn(3, 16)
    scales = (torch.rand(3, 2) * 0.2 + 0.05).requires_grad_()
    made = fake_quantize(x, "q4s/8:f32", scales=scales)
    of_x, of_scales = torch.autograd.grad(made, (x, scales), seed)
    v = _blocks(x.detach()) / scales.detach()[..., None]
    inside, code = v.abs() <= 7, v.clamp(-7, 7).round()
    assert not inside.all()
    terms = torch.where(inside, code - v, code)
    torch.testing.assert_close(of_scales, (_blocks(seed) * terms).sum(-1))
    torch.testing.assert_close(of_x, seed * inside.reshape(3, 16))
    half = fake_quantize(x, "q4s/8:f32", scales=scales, gradient_scale=0.5)
    torch.testing.assert_close(torch.autograd.grad(half, scales, seed)[0], of_scales / 2)


def test_learned_offsets_have_the_gradient_of_lsq_plus() -> None:
    x, seed = torch.randn(3, 16), torch.randn(3, 16)
    scales = torch.full((3, 2), 0.1)
    for scheme, sign in (("u4/8:f32+bias:f32", 1.0), ("u4/8:f32-zero:f32", -0.1)):
        start = torch.full((3, 2), -0.7 if "bias" in scheme else 7.0).requires_grad_()
        made = fake_quantize(x, scheme, scales=scales, offsets=start)
        (found,) = torch.autograd.grad(made, start, seed)
        outside = (x < -0.7) | (x > 0.8)
        torch.testing.assert_close(found, (sign * _blocks(seed * outside)).sum(-1))


def test_a_learned_table_has_the_scale_of_every_value() -> None:
    x, seed = torch.randn(3, 16), torch.randn(3, 16)
    table = torch.linspace(-1, 1, 4).requires_grad_()
    scales = torch.rand(3, 2) + 0.5
    made = fake_quantize(x, "u2[custom]/8:f32", scales=scales, table=table)
    (found,) = torch.autograd.grad(made, table, seed)
    codes = pq.quantize(x, "u2[custom]/8:f32", scales=scales, table=table.detach()).codes()
    weights = (_blocks(seed) * scales[..., None]).reshape(-1)
    wanted = torch.zeros(4).index_add(0, codes.reshape(-1).int(), weights)
    torch.testing.assert_close(found, wanted)


def test_one_number_for_scales_and_pairs() -> None:
    x = torch.randn(3, 16)
    scale = torch.tensor(0.1, requires_grad=True)
    (found,) = torch.autograd.grad(fake_quantize(x, "q4s/tensor:f32", scales=scale).sum(), scale)
    assert found.shape == () and found.isfinite()
    scheme, pair = "e2m1/8:ue4m3/tensor:f32", (torch.rand(3, 2), torch.tensor(0.5))
    assert torch.equal(
        fake_quantize(x, scheme, scales=pair), pq.quantize(x, scheme, scales=pair).dequantize()
    )
    with pytest.raises(pq.errors.InvalidArgument, match="not a pair"):
        fake_quantize(x, scheme, scales=(pair[0].requires_grad_(), pair[1]))


def test_under_torch_func_and_torch_compile() -> None:
    scheme = "q4s/8:f32"
    x, scales = torch.randn(3, 16), torch.rand(3, 2) * 0.2 + 0.05

    def loss(x: Tensor, s: Tensor) -> Tensor:
        return fake_quantize(x, scheme, scales=s).square().sum()

    given = (x.clone().requires_grad_(), scales.clone().requires_grad_())
    wanted = torch.autograd.grad(loss(*given), given)
    found = torch.func.grad(loss, argnums=(0, 1))(x, scales)
    torch.testing.assert_close(found, wanted)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*given), given), wanted)


def test_a_regression_trains_with_4_bits() -> None:
    x = torch.randn(256, 8)
    y = x @ torch.randn(8, 2) + 0.01 * torch.randn(256, 2)
    layer = nn.Linear(8, 2)
    scales = nn.Parameter(torch.full((2, 1), 0.1))
    optimizer = torch.optim.Adam([*layer.parameters(), scales], lr=0.03)
    losses = []
    for _ in range(150):
        weight = fake_quantize(layer.weight, "q4s/8:f32", scales=scales)
        loss = (nn.functional.linear(x, weight, layer.bias) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    q = pq.quantize(layer.weight, "q4s/8:f32", scales=scales.detach())
    final = (pq.linear(x, q, layer.bias) - y).square().mean()
    assert final < 0.05 * losses[0]
