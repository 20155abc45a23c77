"""Derivatives: of float operands against numerical ones, of scales, offsets and tables against an
explicit formula in float64; and that each of torch's transformations of a product agrees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import polyquant as pq
from polyquant.scheme import OffsetKind
from polyquant.torch import QLinear
from polyquant.values import QuantMode, QuantValue, decode_table

SCHEMES = (
    "q8s/row:f32",
    "q4s/8:f16",
    "nf4",
    "mxfp4",
    "e2m1/8:ue4m3/tensor:f32",
    "u4/8:f16-zero:u4",
    "u4/8:bf16+bias:f32",
    "u4[nf4]/8:(u8[dynamic8u]/256:f32)",
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _wide(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


# -- the float operand ------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_float_operands_have_both_derivatives(scheme: str) -> None:
    q = pq.quantize(torch.randn(3, 16), scheme)

    def products(x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return x @ q.T, q @ x.mT, functional.linear(x, q, bias), pq.linear(x, q, bias)

    given = (_wide(2, 16), _wide(3))
    assert torch.autograd.gradcheck(products, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(products, given, fast_mode=True)


BATCHED = pq.quantize(torch.linspace(-1, 1, 96).reshape(2, 1, 3, 16), "q4s/8:f16")
VECTOR = pq.quantize(torch.linspace(-1, 2, 16), "q8s/tensor:f32")

#: Shape of the float operand, and a product with it: batched, broadcast, vectors, both sides.
PRODUCTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "batch on the left": ((4, 5, 16), lambda x: x @ BATCHED.mT),
    "batch on the right": ((5, 16, 2), lambda x: BATCHED @ x),
    "broadcast rows": ((1, 1, 1, 16), lambda x: x @ BATCHED.mT),
    "broadcast batch": ((1, 16, 2), lambda x: BATCHED @ x),
    "vector on the left": ((16,), lambda x: x @ BATCHED.mT),
    "vector on the right": ((16,), lambda x: BATCHED @ x),
    "with a vector": ((3, 16), lambda x: x @ VECTOR),
    "batch with a vector": ((2, 16, 3), lambda x: VECTOR @ x),
    "two vectors": ((16,), lambda x: x @ VECTOR),
    "two vectors, turned": ((16,), lambda x: VECTOR @ x),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_of_every_rank_have_both_derivatives(case: str) -> None:
    shape, product = PRODUCTS[case]
    assert torch.autograd.gradcheck(product, _wide(*shape), fast_mode=True)
    assert torch.autograd.gradgradcheck(product, _wide(*shape), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_have_the_dtype_of_what_they_are_of(dtype: torch.dtype) -> None:
    q = pq.quantize(torch.randn(3, 16), "nf4")
    x = torch.randn(2, 16, dtype=dtype, requires_grad=True)
    bias = torch.randn(3, requires_grad=True)
    y = pq.linear(x, q, bias)
    seed = torch.randn_like(y)
    of_x, of_bias = torch.autograd.grad(y, (x, bias), seed)
    assert (y.dtype, of_x.dtype, of_bias.dtype) == (dtype, dtype, torch.float32)
    values = q.dequantize()
    torch.testing.assert_close(of_x, (seed.float() @ values).to(dtype))
    torch.testing.assert_close(of_bias, seed.float().sum(0))


def test_backward_keeps_the_parts_and_no_dequantized_weight() -> None:
    q = pq.quantize(torch.randn(64, 128), "q4s/32:f16")
    x = torch.randn(2, 128, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = functional.linear(x, q) + x @ q.T
    y.sum().backward()
    assert kept and sum(t.nbytes for t in kept) == 2 * q.nbytes


def test_a_plain_call_and_a_tracked_one_of_the_same_shapes_do_not_mix() -> None:
    q = pq.quantize(torch.randn(3, 16), "nf4")
    x = torch.randn(2, 16)
    plain = pq.matmul(x, q.T)
    tracked = pq.matmul(x.requires_grad_(), q.T)
    assert not plain.requires_grad and tracked.requires_grad and torch.equal(plain, tracked)
    with torch.no_grad():
        assert not pq.matmul(x, q.T).requires_grad
    assert pq.matmul(x, q.T).requires_grad


def test_a_remembered_linear_sees_what_watches_now() -> None:
    q, x = pq.quantize(torch.randn(3, 16), "nf4"), torch.randn(2, 16)
    bias = torch.randn(3)
    plain = [pq.linear(x, q, bias) for _ in range(2)]
    assert torch.equal(*plain) and not plain[0].requires_grad
    batched = torch.func.vmap(lambda line: pq.linear(line, q, bias))(x)
    torch.testing.assert_close(batched, plain[0])
    tracked = pq.linear(x, q, bias.clone().requires_grad_())
    assert tracked.requires_grad and torch.equal(tracked, plain[0])
    assert pq.linear(x.clone().requires_grad_(), q, bias).requires_grad
    assert not pq.linear(x, q, bias).requires_grad
    q.scales.requires_grad_()
    assert pq.linear(x, q, bias).requires_grad and pq.matmul(x, q.mT).requires_grad
    with torch.no_grad():
        assert not pq.linear(x, q, bias).requires_grad


def test_which_kernel_runs_depends_on_what_watches() -> None:
    q = pq.quantize(torch.randn(16, 3), "nf4")
    x = torch.randn(2, 16)
    plain = pq.explain("matmul", x, q)
    assert plain.kernel == "native.matmul"
    reason = "the operands are plain: nothing to differentiate, trace or batch"
    assert plain.reasons[0] == ("torch.transforms.matmul", reason)
    x.requires_grad_()
    assert pq.explain("matmul", x, q).kernel == "torch.transforms.matmul"
    with torch.no_grad():
        assert pq.explain("matmul", x, q).kernel == "native.matmul"
    q.scales.requires_grad_()
    assert q.requires_grad and pq.explain("dequantize", q).kernel == "torch.transforms.dequantize"
    assert not q.detach().requires_grad


def test_quantizing_a_tracked_tensor_detaches() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    for scheme in SCHEMES:
        q = pq.quantize(x, scheme)
        assert not any(part.requires_grad for part in q.parts().values())
        assert not q.dequantize().requires_grad


@pytest.mark.parametrize("shape", [(16,), (2, 16), (2, 3, 16)])
def test_quantized_activations_pass_their_gradient_straight_through(shape: tuple[int, ...]) -> None:
    q = pq.quantize(torch.randn(3, 16), "q4s/8:f16")
    q.scales.requires_grad_()
    x = torch.randn(shape, requires_grad=True)
    y = pq.linear(x, q, activations="q8s/row:f32")
    assert torch.equal(y, pq.linear(x.detach(), q.detach(), activations="q8s/row:f32"))
    seed = torch.randn_like(y)
    of_x, of_scales = torch.autograd.grad(y, (x, q.scales), seed)
    torch.testing.assert_close(of_x, seed @ q.detach().dequantize())
    entering = pq.quantize(x, "q8s/row:f32").dequantize().reshape(-1, 16)
    dense = seed.reshape(-1, 3).T @ entering
    wanted = (dense * q.codes()).reshape(3, 2, 8).sum(-1)
    torch.testing.assert_close(of_scales, wanted.half(), rtol=2e-3, atol=2e-3)


def test_autocast_does_not_round_what_enters() -> None:
    q = pq.quantize(torch.randn(8, 16), "q4s/8:f16")
    x, other = torch.randn(4, 16), pq.quantize(torch.randn(4, 16), "q8s/row:f32")
    wanted = [x @ q.T, pq.linear(x, q), pq.matmul(other, q.T)]
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.linear(x, x).dtype == torch.bfloat16
        found = [x @ q.T, pq.linear(x, q), pq.matmul(other, q.T)]
        tracked = x.clone().requires_grad_() @ q.T
    for got, want in zip([*found, tracked], [*wanted, wanted[0]], strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, want)


# -- scales, offsets, tables ------------------------------------------------------------------

TRACKED = (
    "q8s/row:f32",
    "q4s/8:f16",
    "q4s/5:bf16",
    "q2s/3x4:f32",
    "u4[custom]/8:f32",
    "e2m1/8:ue4m3/tensor:f32",
    "u4/8:f32-zero:f32",
    "u4/8:f16+bias:f16",
)


def _explicit(q: pq.QTensor, wide: dict[str, Tensor]) -> Tensor:
    """The values by NUMERICS' formula in float64, of float64 copies of the tracked parts."""
    codes, scheme = q.codes(), q.scheme
    if scheme.mode is QuantMode.LOOKUP:
        numbers = wide["table"][codes.long()]
    elif scheme.value.is_float:
        numbers = torch.from_numpy(decode_table(scheme.value)).double()[codes.long()]
    else:
        numbers = codes.double()

    def full(grid: Tensor) -> Tensor:
        extents = scheme.block_extents(q.shape)
        for axis, extent in enumerate(extents):
            grid = grid.repeat_interleave(extent, axis).narrow(axis, 0, q.shape[axis])
        return grid

    scales = wide.get("scales")
    if scales is None:
        grid = torch.from_numpy(decode_table(QuantValue.E4M3)).double()[q.scales.long()]
        scales = grid * wide["tensor_scale"]
    is_zero = scheme.offset is not None and scheme.offset.kind is OffsetKind.ZERO_POINT
    is_bias = scheme.offset is not None and not is_zero
    values = (numbers - full(wide["offsets"]) if is_zero else numbers) * full(scales)
    return values + full(wide["offsets"]) if is_bias else values


@pytest.mark.parametrize("scheme", TRACKED)
def test_tracked_parts_have_the_gradients_of_the_formula(scheme: str) -> None:
    table = torch.linspace(-1, 1, 16) if "custom" in scheme else None
    q = pq.quantize(torch.randn(5, 16), scheme, table=table)
    floats = {name: part for name, part in q.parts().items() if part.is_floating_point()}
    for part in floats.values():
        part.requires_grad_()
    wide = {name: part.detach().double().requires_grad_() for name, part in floats.items()}
    x, bias = torch.randn(3, 16, requires_grad=True), torch.randn(5, requires_grad=True)
    seed = torch.randn(3, 5)
    y = x.detach().double() @ _explicit(q, wide).T
    wanted = torch.autograd.grad(y, list(wide.values()), seed.double())
    products = (
        lambda: x @ q.T,
        lambda: (q @ x.T).T,
        lambda: pq.linear(x, q, bias),
        lambda: x @ q.dequantize().T,
        lambda: functional.linear(x, q),
    )
    for product in products:
        found = torch.autograd.grad(product(), list(floats.values()), seed)
        for name, got, want in zip(floats, found, wanted, strict=True):
            assert got.dtype == floats[name].dtype, name
            bound = 4 * torch.finfo(got.dtype).eps
            torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound * 30, msg=name)


def test_a_bias_an_entry_and_a_scale_of_zero_have_gradients() -> None:
    q = pq.quantize(torch.zeros(2, 8), "u4/8:f32+bias:f32")
    q.offsets.requires_grad_()
    (of_bias,) = torch.autograd.grad(q.dequantize().sum(), q.offsets)
    assert torch.equal(of_bias, torch.full((2, 1), 8.0))
    x = torch.tensor([[0.0, 1.0, -1.0, 0.0]])
    q = pq.quantize(x, "u2[custom]/4:f32", table=[-1.0, 0.0, 0.5, 1.0])
    q.table.requires_grad_()
    (of_table,) = torch.autograd.grad(q.dequantize().sum(), q.table)
    assert torch.equal(of_table, torch.tensor([1.0, 2.0, 0.0, 1.0]))


def test_nested_scales_have_gradients() -> None:
    q = pq.quantize(torch.randn(4, 16), "u4[nf4]/8:(u8[dynamic8u]/256:f32)")
    inner = q.scales.scales.requires_grad_()
    values = q.detach().dequantize()
    (found,) = torch.autograd.grad(q.dequantize(), inner, torch.ones(4, 16))
    # The values are linear in the one scale of the scales of a row.
    torch.testing.assert_close((found * inner.detach()).sum(), values.sum())


def test_second_derivatives_with_tracked_scales() -> None:
    q = pq.quantize(torch.randn(3, 16), "q8s/row:f32")
    scales = q.scales.requires_grad_()
    x = torch.randn(2, 16, requires_grad=True)
    of_scales, of_x = torch.autograd.grad((x @ q.T).square().sum(), (scales, x), create_graph=True)
    found = torch.autograd.grad(of_scales.sum() + of_x.sum(), (x, scales))
    codes = q.codes().float()
    other, again = x.detach().requires_grad_(), scales.detach().requires_grad_()
    y = (other @ (codes * again).T).square().sum()
    first = torch.autograd.grad(y, (again, other), create_graph=True)
    wanted = torch.autograd.grad(first[0].sum() + first[1].sum(), (other, again))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# -- torch.func -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PRODUCTS)
def test_batches_and_derivatives_of_torch_func(case: str) -> None:
    shape, product = PRODUCTS[case]
    batch = torch.randn(3, *shape)

    def loss(x: Tensor) -> Tensor:
        return product(x).sin().sum()

    torch.testing.assert_close(torch.vmap(product)(batch), torch.stack([*map(product, batch)]))
    last = torch.vmap(product, in_dims=-1, out_dims=-1)(batch.movedim(0, -1))
    torch.testing.assert_close(last, torch.stack([*map(product, batch)], dim=-1))
    x = batch[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    grad = torch.func.grad(loss)
    torch.testing.assert_close(grad(batch[0]), first.detach())
    torch.testing.assert_close(torch.func.grad(lambda y: grad(y).sum())(batch[0]), second)
    torch.testing.assert_close(torch.vmap(grad)(batch)[0], first.detach())
    summed = torch.func.grad(lambda y: torch.vmap(loss)(y).sum())(batch)
    torch.testing.assert_close(summed[0], first.detach())


def test_quantizing_inside_of_a_batch_sees_one_of_the_batch() -> None:
    q = pq.quantize(torch.randn(3, 16), "q4s/8:f16")
    batch = torch.randn(4, 2, 16) * torch.tensor([1.0, 10.0, 0.1, 3.0]).reshape(4, 1, 1)
    activations = "q8s/tensor:f32"

    def whole(x: Tensor) -> Tensor:
        return pq.linear(x, q, activations=activations)

    def by_hand(x: Tensor) -> Tensor:
        return pq.matmul(pq.quantize(x, activations), q.T)

    wanted = torch.stack([*map(whole, batch)])
    assert torch.equal(torch.vmap(whole)(batch), wanted)
    torch.testing.assert_close(torch.vmap(by_hand)(batch), wanted)


def test_a_batch_of_scales() -> None:
    q = pq.quantize(torch.randn(3, 16), "q4s/8:f32")
    x, bias, scales = torch.randn(2, 16), torch.randn(5, 3), torch.rand(5, 3, 2)

    def ensemble(s: Tensor, b: Tensor) -> Tensor:
        return pq.linear(x, q._replace(scales=s), b)

    wanted = torch.stack([ensemble(s, b) for s, b in zip(scales, bias, strict=True)])
    torch.testing.assert_close(torch.vmap(ensemble)(scales, bias), wanted)


def test_gradients_of_scales_for_each_of_a_batch() -> None:
    q = pq.quantize(torch.randn(3, 16), "q4s/8:f32")
    batch = torch.randn(4, 16)

    def loss(scales: Tensor, x: Tensor) -> Tensor:
        return (x @ q._replace(scales=scales).T).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(q.scales, batch)
    wanted = torch.stack([torch.func.grad(loss)(q.scales, x) for x in batch])
    torch.testing.assert_close(found, wanted)
    codes, blocks = q.codes().reshape(3, 2, 8).float(), batch.reshape(4, 2, 8)
    y = torch.einsum("bgk,ngk,ng->bn", blocks, codes, q.scales)
    by_hand = torch.einsum("bn,bgk,ngk->bng", 2 * y, blocks, codes)
    torch.testing.assert_close(found, by_hand, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_derivatives_in_forward_mode_are_refused_not_lost() -> None:
    q = pq.quantize(torch.randn(3, 16), "nf4")
    x = torch.randn(2, 16)
    with pytest.raises(NotImplementedError, match="must implement the jvp"):
        torch.func.jvp(lambda y: y @ q.T, (x,), (x,))
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, 2 * x)
        with pytest.raises(NotImplementedError, match="must implement the jvp"):
            QLinear.from_qtensor(q)(dual)
        with pytest.raises(NotImplementedError, match="must implement the jvp"):
            functional.linear(dual, q)
