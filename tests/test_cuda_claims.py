"""What is claimed of the kernels of NVIDIA GPUs beside their numbers: sizes, strides, repetition.

Everything here needs a GPU. More than 2^31 elements take up to 12 GB of it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from polyquant import conform

torch = pytest.importorskip("torch")
from cuda_products import MMA, conversions, floats, products, quantized  # noqa: E402 (torch may be missing)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def _error(y: Any, a: Any, b: Any) -> str:
    """What is wrong with ``y = a @ b``; quantized operands are decoded."""
    sides = [x.dequantize("float64") if pq.is_quantized(x) else x.double() for x in (a, b)]
    host = pq.arrays.backend("torch").to_host(y)
    kind = str(y.dtype).removeprefix("torch.")
    return conform.product_error(host, *(side.cpu().numpy() for side in sides), kind, kind)


# -- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["q4s-32", "nf4-double", "nvfp4"])
def test_a_weight_of_more_than_two_to_the_31_elements(scheme: str) -> None:
    n, k = 66000, 32768
    x = floats(n, k)
    q = pq.quantize(x, scheme)
    assert q.size > 2**31
    ends = (slice(0, 40), slice(n - 40, n))
    values = q.dequantize("bfloat16")
    for rows in ends:
        part = q[rows]
        assert torch.equal(values[rows], part.dequantize("bfloat16"))
        if scheme != "nvfp4":  # whose tensor scale is of all rows
            assert torch.equal(part.codes(), pq.quantize(x[rows], scheme).codes())
    del x, values
    at = torch.tensor([0, n - 1, 65536, 65535], device="cuda")
    assert torch.equal(pq.ops.embedding(at, q), torch.stack([q[int(i)].dequantize() for i in at]))
    for m in (1, 9, 40):
        given = floats(m, k, seed=m)
        y = pq.matmul(given, q.mT, kernel=MMA)
        for rows in ends:
            assert not _error(y[:, rows], given, q[rows].mT)


@pytest.mark.parametrize("kernel", [MMA, "torch.triton.cublas"])
def test_a_product_of_more_than_two_to_the_31_elements(kernel: str) -> None:
    m, n, k = 4096, 525000, 64
    x, q = floats(m, k), quantized("q4s-32", n, k)
    y = pq.matmul(x, q.mT, kernel=kernel)
    assert y.numel() > 2**31
    for rows, columns in ((slice(0, 70), slice(0, 70)), (slice(m - 70, m), slice(n - 70, n))):
        assert not _error(y[rows, columns], x[rows], q[columns].mT)
    middle = slice(2**31 // n, 2**31 // n + 2)
    assert not _error(y[middle, ::1001], x[middle], q[::1001].mT)


def test_rows_of_more_than_two_to_the_31_elements() -> None:
    q = quantized("q4s-32", 1000, 4096)
    at = torch.arange(530000, device="cuda") % 1000
    rows = pq.ops.embedding(at, q)
    if rows.dtype is torch.float32:
        rows = rows[-2000:]
    assert torch.equal(rows[-1000:], q.dequantize(rows.dtype))


@pytest.mark.parametrize("scheme", ["q4s-32", "nf4", "q8s-row"])
def test_empty_operands(scheme: str) -> None:
    for m, n, k in ((0, 40, 64), (3, 0, 64), (3, 40, 0), (0, 0, 0)):
        q = quantized(scheme, n, k)
        y = pq.matmul(floats(m, k), q.mT)
        assert y.shape == (m, n)
        assert not y.any()
        assert q.dequantize("bfloat16").shape == (n, k)
    batches = quantized(scheme, 0, 40, 64)
    assert pq.matmul(floats(0, 2, 64), batches.mT).shape == (0, 2, 40)


@pytest.mark.parametrize("scheme", ["nf4", "u4/32:f16-zero:u4"])
def test_every_number_of_rows_up_to_300(scheme: str) -> None:
    q = quantized(scheme, 72, 160)
    values = q.dequantize("float32")
    x = floats(300, 160)
    exact = (x.double() @ values.double().T).cpu().numpy()
    size = (x.double().abs() @ values.double().abs().T).cpu().numpy()
    for m in range(1, 301):
        y = pq.matmul(x[:m], q.mT).double().cpu().numpy()
        bound = 8 * np.sqrt(160) * 2.0**-8 * size[:m] + 2.0**-8 * np.abs(exact[:m])
        assert (np.abs(y - exact[:m]) <= bound).all(), m


# -- strides ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["in, out", "out, in"])
def test_batches_of_stride_zero(order: str) -> None:
    for m in (1, 9, 40, 100):
        stack = quantized("q4s-32", 3, 96, 160)
        weight = stack.mT if order == "out, in" else stack
        x = floats(1, m, weight.shape[-2]).expand(3, m, -1)
        assert not _error(pq.matmul(x, weight), x, weight)
        one = quantized("q4s-32", 96, 160)
        one = one.mT if order == "out, in" else one
        for view in (x, x[:, :1].expand(3, m, -1)):
            assert not _error(pq.matmul(view, one), view, one)
        wide = one.expand(3, *one.shape)
        assert not _error(pq.matmul(x, wide), x, wide)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_views_whose_sign_is_a_flag(kind: Any) -> None:
    weight = quantized("q4s-32", 96, 160).mT
    one = torch.complex(*torch.randn(2, 1, device="cuda")).conj().imag
    for x in (one, *(torch._neg_view(floats(m, 160, kind=kind)) for m in (1, 9, 40))):
        assert x.is_neg() and x.is_contiguous()
        if x is not one:
            assert torch.equal(pq.matmul(x, weight), pq.matmul(x.clone(), weight))
        for scheme in ("q4s-32", "q8s-tensor"):
            wanted = pq.quantize(x.clone(), scheme).to("numpy")
            assert not conform._parts_differ(pq.quantize(x, scheme), wanted)


# -- repetition -------------------------------------------------------------------------------


def test_results_do_not_move_between_runs() -> None:
    for name, call in (products() | conversions()).items():
        first = call()
        for _ in range(50):
            assert torch.equal(call(), first), name


def test_two_streams_at_once() -> None:
    calls = list((products() | conversions()).values())
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(5):
        found: list[list[Any]] = [[], []]
        for place in range(len(calls)):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found[i].append(calls[place - i]())
        torch.cuda.synchronize()
        for i in range(2):
            for place, y in enumerate(found[i]):
                assert torch.equal(y, expected[place - i])


@pytest.mark.parametrize("scheme", ["q4s-32", "nf4", "fp8-row"])
@pytest.mark.parametrize("m", [1, 9, 40, 200])
def test_a_chain_of_products(m: int, scheme: str) -> None:
    """Each begins while the one before, which writes its rows, still runs."""
    weights = [pq.quantize(floats(1024, 1024, seed=i) / 32, scheme).mT for i in range(3)]
    _assert_chain(lambda x, i: pq.matmul(x, weights[i % 3]), floats(m, 1024))


@pytest.mark.parametrize(
    ("activations", "scheme"),
    [("q8s-row", "q8s-row"), ("q8s-32", "q4s-32"), ("e4m3/1x128:f32", "fp8-128x128")],
)
@pytest.mark.parametrize("m", [4, 130])
def test_a_chain_of_quantized_rows(m: int, activations: str, scheme: str) -> None:
    weights = [pq.quantize(floats(1024, 1024, seed=i) / 32, scheme).mT for i in range(3)]

    def step(x: Any, i: int) -> Any:
        rows = pq.quantize(x, activations, nonfinite="saturate")  # waits for nothing
        return pq.matmul(rows, weights[i % 3], out_dtype="bfloat16")

    _assert_chain(step, floats(m, 1024))


def _assert_chain(step: Callable[[Any, int], Any], x: Any) -> None:
    """Steps that follow each other give what they give one by one, each waited for."""

    def chain(*, waits: bool) -> Any:
        y = x
        for i in range(24):
            y = step(y, i)
            if waits:
                torch.cuda.synchronize()
        return y

    expected = chain(waits=True)
    assert expected.float().std() > 0.1
    for _ in range(20):
        assert torch.equal(chain(waits=False), expected)
    graph, y = _captured(lambda: chain(waits=False))
    for _ in range(5):
        graph.replay()
        assert torch.equal(y, expected)


def test_the_first_product_on_each_stream_waits(monkeypatch: Any) -> None:
    """For what may have written the weight: only later ones read it before they wait."""
    from polyquant.backends.torch.cuda import nvrtc

    seen, real = [], nvrtc._enqueue

    def note(*launch: Any) -> Any:
        seen.append(launch[-1])
        return real(*launch)

    monkeypatch.setattr(nvrtc, "_enqueue", note)
    for x in (floats(9, 512), quantized("q8s-row", 130, 512)):
        weight = quantized("q8s-row", 256, 512).mT
        seen.clear()
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                for _ in range(2):
                    pq.matmul(x, weight)
        with _capture(torch.cuda.CUDAGraph()):
            pq.matmul(x, weight)
        assert seen == [False, True, False, True, True]


def test_two_threads_at_once() -> None:
    def work(seed: int) -> None:
        x = floats(300, 1056, seed=seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(20):
                m = (1, 9, 40, 200)[i % 4]
                q = pq.quantize(x[:257] * (i + 1), ("q4s-32", "nf4", "nvfp4")[i % 3])
                y = pq.matmul(x[:m], q.mT)
                assert not _error(y, x[:m], q.mT)
                assert torch.equal(y, pq.matmul(x[:m], q.mT))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, seed) for seed in (1, 2)]:
            done.result()


# -- graphs and torch.compile -----------------------------------------------------------------


def _captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of a call that ran before, and its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with _capture(graph):
        made = call()
    return graph, made


def _capture(graph: Any) -> Any:
    """Puts calls of this thread into a graph.

    By default a call of any thread that CUDA does not allow meanwhile would end it: one of JAX's,
    which looks for devices here too, makes such calls every few seconds.
    """
    return torch.cuda.graph(graph, capture_error_mode="thread_local")


@pytest.mark.parametrize("scheme", ["q4s-32", "nf4-double", "nvfp4", "fp8-128x128", "q8s-row"])
def test_quantizing_in_a_graph(scheme: str) -> None:
    x = floats(256, 384)
    graph, q = _captured(lambda: pq.quantize(x, scheme))
    x.copy_(floats(256, 384, seed=7) * 3)
    graph.replay()
    assert not conform._parts_differ(q, pq.quantize(x, scheme).to("numpy"))
    x[3, 5] = float("nan")
    graph.replay()
    wanted = pq.quantize(x, scheme, nonfinite="saturate")
    assert not conform._parts_differ(q, wanted.to("numpy"))


@pytest.mark.parametrize("activations", ["q8s-row", "fp8-row"])
def test_activations_quantized_in_a_graph(activations: str) -> None:
    weight = quantized(activations, 256, 512)
    for m in (4, 130):
        x = floats(m, 512)
        graph, y = _captured(lambda x=x: pq.linear(x, weight, activations=activations))
        x.copy_(floats(m, 512, seed=5))
        graph.replay()
        assert torch.equal(y, pq.linear(x, weight, activations=activations))


@pytest.mark.parametrize("scheme", ["q4s-32", "nf4-double", "fp8-128x128"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_custom_ops_compiled(scheme: str) -> None:
    x, weight = floats(256, 384), quantized(scheme, 256, 384)

    def model(x: Any) -> Any:
        return pq.linear(x, weight), pq.quantize(x, scheme).dequantize()

    expected, made = model(x), torch.compile(model, fullgraph=True)(x)
    assert all(map(torch.equal, made, expected))
    x[2, 2] = float("inf")
    with pytest.raises(pq.errors.NonFiniteInput):
        model(x)
