"""torch.compile and torch.export: whole graphs, any batch, the same results as without."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import polyquant as pq
from polyquant.torch import QLinear, fake_quantize, lora_, quantize_

SCHEMES = ("q8s/row:f32", "nf4", "u4/32:f16-zero:u4", "u4[nf4]/32:(u8[dynamic8u]/256:f32)")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


def _model() -> Any:
    layers = nn.Embedding(10, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)
    return quantize_(nn.Sequential(*layers), "nf4", include=["0", "1", "3"])


# -- modules ----------------------------------------------------------------------------------


def test_a_model_is_one_graph_for_every_batch() -> None:
    model = _model()
    found = torch._dynamo.explain(model)(torch.arange(8).reshape(2, 4))
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for batch in (2, 3, 5, 7):
        indices = torch.randint(0, 10, (batch, 4))
        torch.testing.assert_close(compiled(indices), model(indices))
    assert counter.frame_count == 2  # the first size, then any


def test_a_training_step_with_adapters_compiles() -> None:
    model = lora_(_model(), rank=2)
    with torch.no_grad():
        model[1].lora_b.normal_()
    indices = torch.randint(0, 10, (3, 4))
    results = []
    for call in (model, _compiled(model, dynamic=True)):
        model.zero_grad()
        call(indices).sin().sum().backward()
        results.append([model[1].lora_a.grad, model[1].lora_b.grad, model[3].lora_b.grad])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain)


def test_a_layer_with_quantized_activations_compiles_for_any_batch() -> None:
    layer = QLinear(32, 8, scheme="q4s/32:f16", activations="q8s/row:f32")
    compiled = _compiled(layer, dynamic=True)
    for batch in (3, 5):
        x = torch.randn(batch, 32, requires_grad=True)
        assert torch.equal(compiled(x), layer(x))
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.ones(batch, 8) @ layer.weight.dequantize())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_with_inductor() -> None:
    layer = QLinear(32, 8, scheme="nf4")
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(3, 32)
    torch.testing.assert_close(compiled(x), layer(x))


# -- QTensors as they are ---------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tensors_of_the_surrounding_code(scheme: str) -> None:
    q, bias = pq.quantize(torch.randn(64, 64), scheme), torch.randn(64)
    wide = pq.scheme(scheme)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        entering = pq.quantize(x, "q8s/row:f32")
        return (
            x @ q.T,
            torch.matmul(x, q),
            torch.matmul(q, x.T),
            functional.linear(x, q, bias=bias),
            functional.embedding(torch.tensor([[3, 0]]), q),
            pq.matmul(x, q, out_dtype="float16"),
            pq.linear(x, q, bias, activations="q8s/row:f32"),
            q.dequantize("bfloat16"),
            pq.quantize(x, wide).dequantize(),
            pq.matmul(entering, q.mT),
            fake_quantize(x, scheme),
        )

    x = torch.randn(4, 64)
    for got, want in zip(_compiled(function)(x), function(x), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_scales_of_ones_own_and_tables_for_any_batch() -> None:
    table = torch.linspace(-1, 1, 16)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (
            pq.quantize(x, "q4s/tensor:f32", scales=0.1).dequantize(),
            pq.quantize(x, "u4[custom]/16:f32", table=table, calibration="minmax").dequantize(),
            pq.quantize(x, "u2[custom]/16:f32", table="kmeans").dequantize(),
            pq.quantize(x, "q4s/16:f32", calibration="mse").dequantize(),
        )

    compiled = _compiled(function, dynamic=True)
    for batch in (3, 4):
        x = torch.randn(batch, 32)
        for got, want in zip(compiled(x), function(x), strict=True):
            assert torch.equal(got, want)


def test_tracked_scales_compile() -> None:
    q = pq.quantize(torch.randn(8, 32), "u4/32:f32+bias:f32")
    x = torch.randn(3, 32)

    def loss(scales: Tensor, offsets: Tensor) -> Tensor:
        weight = q._replace(scales=scales, offsets=offsets)
        return (functional.linear(x, weight) + weight.dequantize().sum()).sin().sum()

    given = [part.clone().requires_grad_() for part in (q.scales, q.offsets)]
    wanted = torch.autograd.grad(loss(*given), given)
    found = torch.autograd.grad(_compiled(loss)(*given), given)
    torch.testing.assert_close(found, wanted)


def test_transformed_functions_compile() -> None:
    q = pq.quantize(torch.randn(8, 32), "nf4")

    def loss(x: Tensor) -> Tensor:
        return (x @ q.T).sin().sum()

    batch = torch.randn(3, 32)
    each = torch.vmap(torch.func.grad(loss))
    torch.testing.assert_close(_compiled(each)(batch), each(batch))


@pytest.mark.parametrize(
    ("function", "slug"),
    [
        (lambda x, q: torch.add(x, q), "unsupported-function"),
        (lambda x, q: q @ x.T, "unsupported-function"),  # comes as x.T @ q
        (lambda x, q: torch.cat([x] * 16) @ q, "unsupported-function"),
        (lambda x, q: pq.matmul(x, q, kernel="definition.matmul"), "invalid-argument"),
        (lambda x, q: x[:, :3] @ q, "shape-mismatch"),
        (lambda x, q: pq.linear(x.int(), q), "not-float"),
    ],
)
def test_what_cannot_be_is_refused_in_the_words_of_the_catalogue(
    function: Callable[..., Any], slug: str
) -> None:
    q = pq.quantize(torch.randn(32, 32), "nf4")
    with pytest.raises(Exception, match=slug):
        _compiled(lambda x: function(x, q))(torch.randn(2, 32))


# -- export -----------------------------------------------------------------------------------


def test_export_for_any_batch() -> None:
    model = _model().eval()
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(model, (torch.arange(8).reshape(2, 4),), dynamic_shapes=(batch,))
    ops = {str(node.target) for node in program.graph.nodes if "polyquant" in str(node.target)}
    assert ops == {"polyquant.embedding.default", "polyquant.linear.default"}
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for count in (1, 5):
        indices = torch.randint(0, 10, (count, 4))
        torch.testing.assert_close(loaded(indices), model(indices))


@pytest.mark.parametrize("strict", [True, False])
def test_export_of_a_product_with_a_tensor(strict: bool) -> None:
    q = pq.quantize(torch.randn(8, 32), "nf4")

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            entering = pq.quantize(x, "q8s/row:f32")
            made: Tensor = entering.dequantize() @ q.T + (q @ x.T).T
            return made

    x = torch.randn(3, 32)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(Product(), (x,), dynamic_shapes=(batch,), strict=strict)
    for other in (x, torch.randn(5, 32)):
        torch.testing.assert_close(program.module()(other), Product()(other))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of shapes
def test_torch_jit_trace_records_the_product_and_not_its_result() -> None:
    q, bias = pq.quantize(torch.randn(3, 16), "nf4"), torch.randn(3)
    x, other = torch.randn(2, 16), torch.randn(2, 16)

    def both(x: torch.Tensor) -> torch.Tensor:
        return pq.linear(x, q, bias) + pq.matmul(x, q.mT)

    wanted = both(other), both(x)  # remembered as plain products
    traced = torch.jit.trace(both, (x,))
    torch.testing.assert_close((traced(other), traced(x)), wanted)
