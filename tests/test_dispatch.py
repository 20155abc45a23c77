"""Dispatch: one device for all operands, the best kernel that can, and refusals that explain."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from devices import DEVICES, MISSING, put
from polyquant import arrays, dispatch, errors
from polyquant.kernel import Kernel, Problem, bucket
from polyquant.ops import products

PAIRS = [(a, b) for a in DEVICES for b in DEVICES if a != b]


def floats(shape: tuple[int, ...], device: str = "numpy") -> Any:
    return put(np.random.default_rng(0).normal(size=shape).astype(np.float32), device)


def weight(device: str = "numpy", scheme: str = "q4s") -> pq.QTensor:
    return pq.quantize(floats((16, 64)), scheme).to(device)


# -- one device -------------------------------------------------------------------------------


def test_device_of(device: str) -> None:
    assert pq.device_of(floats((2,), device)) == device
    assert pq.device_of(weight(device)) == device


@pytest.mark.parametrize("number", [1, 1.5, True, 2j])
def test_numbers_have_no_device(number: Any) -> None:
    assert pq.device_of(number) is None


@pytest.mark.parametrize("thing", [[1.0], "x", None, {"a": 1}, object()])
def test_other_things_are_refused(thing: Any) -> None:
    with pytest.raises(errors.NotAnArray):
        pq.device_of(thing)


def assert_names_both(error: errors.PolyquantError, fix: str, *words: str) -> None:
    for word in (*words, fix):
        assert word in str(error), f"{word!r} is not in: {error}"


def mismatch(a: str, b: str) -> type[errors.PolyquantError]:
    same = a.partition(":")[0] == b.partition(":")[0]
    return errors.DeviceMismatch if same else errors.BackendMismatch


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_mix_is_refused_before_any_work(a: str, b: str) -> None:
    x, q = floats((3, 64), a), weight(b)
    words = ("float32", "(3, 64)", "q4s/32:f16", f"on {a}", f"on {b}")
    with pytest.raises(mismatch(a, b)) as caught:
        pq.matmul(x, q.T)
    assert_names_both(caught.value, f"call b.to({a!r})", "a is", "b is", *words)
    with pytest.raises(mismatch(a, b)) as caught:
        pq.matmul(q, floats((64, 3), a))
    assert_names_both(caught.value, f"call a.to({a!r})", f"on {a}", f"on {b}")
    with pytest.raises(mismatch(a, b)) as caught:
        pq.matmul(weight(a), q.T)
    assert_names_both(caught.value, f"call b.to({a!r})", f"on {a}", f"on {b}", "QTensor")
    with pytest.raises(mismatch(a, b)) as caught:
        pq.linear(x, q)
    assert_names_both(caught.value, f"call weight.to({a!r})", "linear", "x is", "weight is")


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_a_bias_of_another_library_is_refused(a: str, b: str) -> None:
    with pytest.raises(mismatch(a, b)) as caught:
        pq.linear(floats((3, 64), a), weight(a), floats((16,), b))
    assert_names_both(caught.value, "bring bias to", "x is", "bias is", f"on {a}", f"on {b}")


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_scales_of_another_library_are_refused(a: str, b: str) -> None:
    with pytest.raises(mismatch(a, b)) as caught:
        pq.quantize(floats((3, 64), a), "q8s/row:f32", scales=put(np.ones((3, 1), np.float32), b))
    assert_names_both(caught.value, "bring scales to", "x is", "scales is", f"on {a}", f"on {b}")


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_operator_is_refused_alike(a: str, b: str) -> None:
    with pytest.raises((errors.BackendMismatch, errors.DeviceMismatch)):
        weight(a) @ floats((64, 3), b)


def test_the_call_that_mends_it_mends_it() -> None:
    for a, b in PAIRS:
        y = pq.matmul(floats((3, 64), a), weight(b).to(a).T)
        assert tuple(y.shape) == (3, 16)


def test_same_backend(device: str) -> None:
    assert pq.same_backend(weight(device), floats((2,), device))
    assert not pq.same_backend(weight(device), floats((2,), DEVICES[device == DEVICES[0]]))


# -- kernels ----------------------------------------------------------------------------------


def _refusing(reason: str | None) -> Any:
    return lambda problem: reason


def _never(*operands: Any, **keywords: Any) -> Any:
    raise AssertionError("only the chosen kernel runs")


def _answer(*operands: Any, **keywords: Any) -> str:
    return "fast"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put kernels in front of NumPy's, best first, for one test."""

    def install(*found: Kernel, keep: bool = True) -> None:
        real = dispatch.kernels.__wrapped__("numpy", "cpu")
        table = (*found, *(real if keep else ()))
        monkeypatch.setattr(dispatch, "kernels", lambda backend, kind: table)
        _forget()

    yield install
    _forget()


def _forget() -> None:
    """Choices are remembered for good, since kernels do not change while a program runs."""
    dispatch.choose.cache_clear()
    products.plans().clear()


def test_the_best_kernel_that_can_runs(fake: Any) -> None:
    x, w = floats((1, 64)), weight().T
    fake(
        Kernel("numpy.best.matmul", "matmul", _refusing("it needs more than one row"), _never),
        Kernel("numpy.other.quantize", "quantize", _refusing(None), _never),
        Kernel("numpy.good.matmul", "matmul", _refusing(None), _answer),
        Kernel("numpy.late.matmul", "matmul", _refusing(None), _never),
    )
    assert pq.matmul(x, w) == "fast"
    found = pq.explain("matmul", x, w)
    assert found.kernel == "numpy.good.matmul"
    assert found.reasons == (("numpy.best.matmul", "it needs more than one row"),)
    assert "not numpy.best.matmul: it needs more than one row" in str(found)


def test_no_kernel_lists_every_reason(fake: Any) -> None:
    x, w = floats((1, 64)), weight().T
    fake(
        Kernel("numpy.one.matmul", "matmul", _refusing("reason one"), _never),
        Kernel("numpy.two.matmul", "matmul", _refusing("reason two"), _never),
        keep=False,
    )
    with pytest.raises(errors.NoKernel) as caught:
        pq.matmul(x, w)
    text = str(caught.value)
    assert text.index("numpy.one.matmul: reason one") < text.index("numpy.two.matmul: reason two")
    answer = pq.supports("numpy", "q4s")
    assert not answer
    assert answer.reason == "numpy.one.matmul: reason one; numpy.two.matmul: reason two"


def test_a_pinned_kernel_runs_or_is_refused(fake: Any) -> None:
    fake(Kernel("numpy.one.matmul", "matmul", _refusing("it is closed"), _never))
    x, w = floats((1, 64)), weight().T
    pinned = pq.matmul(x, w, kernel="definition.matmul")
    np.testing.assert_array_equal(pinned, x @ w.dequantize())
    with pytest.raises(errors.KernelRefused, match=r"it is closed.*never falls back"):
        pq.matmul(x, w, kernel="numpy.one.matmul")
    with pytest.raises(errors.KernelRefused, match=r"known: numpy\.one.*definition\.matmul"):
        pq.matmul(x, w, kernel="numpy.none.matmul")
    with pytest.raises(errors.KernelRefused, match=r"definition\.quantize"):
        pq.quantize(x, "q4s", kernel="numpy.none.quantize")


def test_an_error_while_running_is_not_hidden(fake: Any) -> None:
    def fails(*operands: Any) -> Any:
        raise ZeroDivisionError

    fake(Kernel("numpy.one.matmul", "matmul", _refusing(None), fails))
    with pytest.raises(ZeroDivisionError):
        pq.matmul(floats((1, 64)), weight().T)


def test_choosing_is_cached(fake: Any) -> None:
    asked: list[Problem] = []

    def why_not(problem: Problem) -> str | None:
        asked.append(problem)
        return None

    fake(Kernel("numpy.one.matmul", "matmul", why_not, _answer))
    for rows in (5, 6, 8):  # one bucket
        pq.matmul(floats((rows, 64)), weight().T)
    assert len(asked) == 1
    pq.matmul(floats((9, 64)), weight().T)
    assert [problem.m for problem in asked] == [8, 16]


def test_buckets() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)] == [0, 1, 2, 4, 4, 8, 64, 128]


def test_problems_state_the_facts() -> None:
    problem = dispatch.matmul_problem(floats((3, 64)), weight().T, "numpy")
    assert (problem.m, problem.n, problem.k) == (4, 16, 64)
    assert problem.layout == (None, (1, 0))
    assert str(problem) == "matmul of float32 x q4s/32:f16 on cpu, m<=4 n<=16 k<=64"
    assert hash(problem) == hash(dispatch.matmul_problem(floats((4, 64)), weight().T, "numpy"))
    kinds = ("bfloat16", np.dtype("float16"), np.float16, "float32", None)
    both = [dispatch.matmul_problem(weight(), weight().T, "numpy", kind) for kind in kinds]
    assert [each.result for each in both] == ["bfloat16", "float16", "float16", "", ""]
    assert str(both[1]).endswith("k<=64, float16")
    assert dispatch.matmul_problem(floats((3, 64)), weight().T, "numpy", "float16").result == ""


def test_products_to_a_dtype_are_remembered_apart() -> None:
    x, w = floats((3, 64)), weight().T
    made = {kind: pq.matmul(x, w, out_dtype=kind).dtype for kind in (None, "float16", np.float64)}
    again = {kind: pq.matmul(x, w, out_dtype=kind).dtype for kind in made}
    assert made == again == {None: "float32", "float16": "float16", np.float64: "float64"}
    with pytest.raises(pq.errors.PolyquantError):
        pq.matmul(x, w, out_dtype=["float32"])


# -- explain, supports, devices ---------------------------------------------------------------


def test_explain_runs_nothing(device: str) -> None:
    x, q = floats((3, 64), device), weight(device)
    assert pq.explain("matmul", x, q.T).kernel
    assert pq.explain("linear", x, q).kernel == pq.explain("matmul", x, q.mT).kernel
    assert pq.explain("matmul", q, q.T, out_dtype="bfloat16").problem.result == "bfloat16"
    for junk in ("int8", ["float32"]):
        with pytest.raises(errors.UnsupportedDtype):
            pq.explain("matmul", x, q.T, out_dtype=junk)
    assert pq.explain("quantize", x).kernel
    assert pq.explain("dequantize", q).kernel
    assert "runs " in str(pq.explain("dequantize", q))
    assert pq.explain("embedding", pq.ops.argsort(x), q).kernel


@pytest.mark.parametrize(
    ("op", "operands", "error"),
    [
        ("mul", 2, errors.UnknownName),
        ("matmul", 1, errors.InvalidArgument),
        ("dequantize", 0, errors.InvalidArgument),
        ("embedding", 2, errors.InvalidArgument),
    ],
)
def test_explain_refuses(op: str, operands: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        pq.explain(op, *[floats((4, 4))] * operands)


@pytest.mark.parametrize("op", ["matmul", "quantize", "dequantize", "embedding"])
def test_supports_every_preset(device: str, op: str) -> None:
    for name in pq.presets():
        answer = pq.supports(device, name, op)
        assert answer
        assert answer.kernel
        assert answer.kernel in answer.reason


def test_supports_answers_for_a_missing_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "BACKENDS", {"nowhere": "polyquant.backends.nowhere"})
    arrays.backend.cache_clear()
    answer = pq.supports("nowhere:cpu", "q4s")
    arrays.backend.cache_clear()
    assert not answer
    assert "pip install 'polyquant[nowhere]'" in answer.reason


@pytest.mark.parametrize("wrong", ["cuda", "numpy:gpu", "torch:cuda:99", "jax:cpu:99", 7])
def test_devices_that_are_not_there(wrong: Any) -> None:
    name = str(wrong).partition(":")[0]
    if name in MISSING:
        pytest.skip(f"{name} is not usable: {MISSING[name]}")
    with pytest.raises(errors.UnknownDevice):
        pq.supports(wrong, "q4s")


def test_devices_lists_every_backend() -> None:
    found = pq.devices()
    names = {info.name.partition(":")[0] for info in found}
    assert names == set(arrays.BACKENDS)
    assert all(info.note for info in found)
    assert any(info.name == "numpy" and info.usable for info in found)
    assert str(found[0]).startswith("numpy: usable")


# -- import -----------------------------------------------------------------------------------

LOADS = """
import sys
import numpy, ml_dtypes, array_api_compat
import polyquant
print([name for name in ("torch", "jax", "matplotlib", "typer", "rich") if name in sys.modules])
x = numpy.ones((2, 64), dtype="float32")
x @ polyquant.quantize(x, "nf4").T
print([name for name in ("torch", "jax") if name in sys.modules])
"""


def test_import_loads_no_other_library() -> None:
    run = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "[]"]
