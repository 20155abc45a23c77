"""Faults of devices and operands."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np

import polyquant as pq
from burn_faults.terms import (
    EVERYWHERE,
    F32,
    HOST,
    JAX,
    TORCH,
    TWO_LEVELS,
    Here,
    Raises,
    Table,
    Works,
    X,
)
from devices import assert_same_bits, assert_same_parts, host, put


def _tracked_scales(here: Here) -> pq.QTensor:
    q = here.quantized("q4s/16:f32")
    scales = q.scales.clone().requires_grad_()
    return pq.QTensor(q.scheme, q.shape, q.data, scales, device=q.device)


def _traced_to_host(here: Here) -> Any:
    import jax

    return jax.jit(lambda x: pq.quantize(x, "q4s/16:f16").to("numpy").scales)(here.x)


def _missing_library(here: Here) -> None:
    """In a process of its own, as where JAX is not installed; the error comes back pickled."""
    code = f"""
import pickle, sys
import numpy as np
import polyquant as pq

sys.modules["jax"] = None
try:
    pq.quantize(np.ones((4, 32), np.float32), "q4s").to("jax:cpu")
except pq.errors.BackendMissing as error:
    open({str(here.folder / "error")!r}, "wb").write(pickle.dumps(error))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    raise pickle.loads((here.folder / "error").read_bytes())


def tracked_parts(here: Here) -> None:
    q = _tracked_scales(here)
    plain = here.quantized("q4s/16:f32")
    assert q.dequantize().requires_grad
    assert_same_bits(host(q.dequantize().detach()), host(plain.dequantize()))
    assert q.to_data() == plain.to_data()
    assert_same_parts(q.to("numpy"), plain)


def every_op_on_torch(here: Here) -> None:
    """One operation of each kind; that all of them agree is the business of other tests."""
    q, on_numpy = here.q, pq.quantize(X, "q4s/16:f16")
    assert q.to_data() == on_numpy.to_data()
    assert_same_bits(host(q.dequantize()), on_numpy.dequantize())
    for made, wanted in (
        (pq.matmul(here.x, q.T), pq.matmul(X, on_numpy.T)),
        (q + q, on_numpy + on_numpy),
        (pq.ops.exp(q), pq.ops.exp(on_numpy)),
        (q < here.x, on_numpy < X),
        (q.sum(axis=1), on_numpy.sum(axis=1)),
        (pq.ops.argmax(q, axis=1), pq.ops.argmax(on_numpy, axis=1)),
        (pq.ops.sort(q), pq.ops.sort(on_numpy)),
        (pq.ops.cumsum(q, 1), pq.ops.cumsum(on_numpy, 1)),
        (q.reshape(8, 16)[1:, ::2].dequantize(), on_numpy.reshape(8, 16)[1:, ::2].dequantize()),
    ):
        np.testing.assert_allclose(host(made), wanted, rtol=1e-5, atol=1e-5)


def to_another_process(here: Here) -> None:
    for scheme in ("q4s/16:f16", "nf4", "nvfp4"):
        q = here.quantized(scheme)
        assert_same_parts(pickle.loads(pickle.dumps(q)), q)
        sent = pickle.loads(pickle.dumps(q.to_data()))
        assert_same_parts(pq.from_data(sent, here.device), q)


DEVICES: Table = {
    "two-libraries": (
        Raises(
            "backend-mismatch",
            lambda here: pq.matmul(here.q, here.q.to(here.elsewhere).T),
            "one library",
            "b is a q4s/16:f16 QTensor of shape (32, 4)",
            "call b.to(",
        ),
        Raises(
            "backend-mismatch",
            lambda here: pq.matmul(here.x, here.q.to(here.elsewhere).T),
            "one library",
            "a is a float32 array of shape (4, 32)",
            "call b.to(",
        ),
        Raises(
            "backend-mismatch",
            lambda here: pq.matmul(here.q, put(X.T, here.elsewhere)),
            "one library",
            "b is a float32 array of shape (32, 4)",
            "call a.to(",
        ),
        Raises(
            "backend-mismatch",
            lambda here: here.q + here.q.to(here.elsewhere),
            "one library",
            "b is a q4s/16:f16 QTensor of shape (4, 32)",
            "call b.to(",
        ),
        Raises(
            "backend-mismatch",
            lambda here: pq.ops.concat([here.q, here.q.to(here.elsewhere)]),
            "one library",
            "tensor 1 is on",
            "call tensors[1].to(",
        ),
        Raises(
            "device-mismatch",
            lambda here: pq.linear(here.x, here.q.to("torch:meta")),
            "one device",
            "on torch:meta",
            "call weight.to('torch:cpu')",
            TORCH,
        ),
        Raises(
            "backend-mismatch",
            lambda here: pq.ops.take(here.q, put(np.asarray([1, 2]), here.elsewhere), 0),
            "one library",
            "the index is a int64 array of shape (2,)",
            "or pass a list or a NumPy array",
            HOST,
        ),
    ),
    "tracked-float-elsewhere": (
        Raises(
            "backend-mismatch",
            lambda here: pq.matmul(here.tracked, here.q.to("numpy").T),
            "one library",
            "on torch:cpu",
            "call b.to('torch:cpu')",
            TORCH,
        ),
        Raises(
            "backend-mismatch",
            lambda here: pq.matmul(here.q.to("numpy"), here.tracked.T),
            "one library",
            "on torch:cpu",
            "call a.to('torch:cpu')",
            TORCH,
        ),
    ),
    "scales-elsewhere": (
        Raises(
            "backend-mismatch",
            lambda here: here.given(put(np.ones((4, 2), F32), here.elsewhere)),
            "one library",
            "scales is a float32 array of shape (4, 2)",
            "bring scales to",
        ),
        Raises(
            "backend-mismatch",
            lambda here: pq.quantize(here.tracked, TWO_LEVELS, scales=np.ones((4, 2), F32)),
            "one library",
            "scales is a float32 array of shape (4, 2) on numpy",
            "bring scales to 'torch:cpu'",
            TORCH,
        ),
    ),
    "tensor-scale-elsewhere": (
        Raises(
            "backend-mismatch",
            lambda here: here.given((here.ones(4, 2), put(np.ones((), F32), here.elsewhere))),
            "one library",
            "tensor scale is a float32 array of shape ()",
            "bring tensor scale to",
        ),
    ),
    "autodiff-device": (
        Raises(
            "unknown-device",
            lambda here: here.q.to(f"autodiff:{here.device}"),
            "Usable here: numpy",
            "'autodiff",
            "begins with no backend's name",
        ),
    ),
    "unknown-device": (
        Raises(
            "unknown-device",
            lambda here: here.q.to("wgpu:0"),
            "Usable here: numpy",
            "'wgpu",
            "begins with no backend's name",
        ),
        Raises(
            "backend-missing", _missing_library, "'jax'", "None in sys.modules", "pip install", HOST
        ),
    ),
    "host-readback": (
        Raises(
            "unsupported-array",
            _traced_to_host,
            "plain values",
            "traced",
            "outside of the traced function",
            JAX,
        ),
        Raises(
            "unsupported-array",
            lambda here: here.q.to("torch:meta").to("numpy"),
            "plain values",
            "meta",
            "",
            TORCH,
        ),
    ),
    "tracked-parts": (Works(tracked_parts, TORCH),),
    "float-for-quantized": (
        Raises(
            "invalid-argument",
            lambda here: pq.explain("dequantize", here.x),
            "must be a QTensor",
            "what came is",
        ),
        Raises(
            "invalid-argument",
            lambda here: pq.measure(here.x, here.x),
            "must be a QTensor",
            "what came is",
        ),
        Raises(
            "invalid-argument",
            lambda here: pq.ops.reshape(here.x, (32, 4)),
            "must be a QTensor",
            "what came is",
            "take reshape of its own library",
        ),
    ),
    "quantized-for-float": (
        Raises(
            "already-quantized",
            lambda here: pq.quantize(here.q, "q8s"),
            "x must be a float array",
            "quantized as q4s/16:f16",
            ".dequantize() first",
        ),
        Raises(
            "already-quantized",
            lambda here: pq.linear(here.x, here.q, pq.quantize(here.ones(4), "q8s/2:f16")),
            "bias must be a float array",
            "quantized as q8s/2:f16",
            ".dequantize() first",
        ),
        Raises(
            "already-quantized",
            lambda here: pq.measure(here.q, here.q),
            "x must be a float array",
            "quantized as q4s/16:f16",
            ".dequantize() first",
        ),
    ),
    "scheme-of-a-dtype": (
        Raises(
            "unknown-scheme",
            lambda here: pq.scheme("float32"),
            "a value type (q8f, q8s",
            "'float32' is not a scheme",
            "listed by pq.presets()",
            HOST,
        ),
    ),
    "every-op-on-torch": (Works(every_op_on_torch, TORCH),),
    "to-another-process": (Works(to_another_process, EVERYWHERE),),
}
