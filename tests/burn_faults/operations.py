"""Faults of layout and of other operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyquant as pq
from burn_faults.terms import HOST, JAX, TORCH, Here, Raises, Table, Works, X
from devices import assert_same_bits, host
from polyquant.qtensor import validate


def product_of_floats(here: Here) -> None:
    y = here.ones(32, 5)
    assert_same_bits(host(pq.matmul(here.x, y)), host(here.x @ y))


def two_levels_in_a_product(here: Here) -> None:
    q = here.quantized("nvfp4")
    wanted = X @ host(q.dequantize()).T
    for left in (here.x, q):
        wanted = (X if left is not q else host(q.dequantize())) @ host(q.dequantize()).T
        np.testing.assert_allclose(host(left @ q.T), wanted, rtol=1e-5, atol=1e-5)
        made = pq.linear(left, q, here.ones(4))
        np.testing.assert_allclose(host(made), wanted + 1, rtol=1e-5, atol=1e-5)


def checkpointing(here: Here) -> None:
    from torch.utils.checkpoint import checkpoint

    q, gradients = here.q, []
    for reentrant in (True, False):
        x = here.tracked
        checkpoint(pq.linear, x, q, use_reentrant=reentrant).square().sum().backward()
        gradients.append(x.grad)
    x = here.tracked
    pq.linear(x, q).square().sum().backward()
    for gradient in gradients:
        assert_same_bits(host(gradient), host(x.grad))


def jax_refuses(here: Here) -> None:
    import jax.numpy as jnp

    with pytest.raises(TypeError, match="QTensor"):
        jnp.linalg.qr(here.q)


def nothing_is_tracked(here: Here) -> None:
    q = here.q
    assert not q.data.requires_grad
    assert not pq.matmul(here.x, q.T).requires_grad
    assert pq.matmul(here.tracked, q.T).requires_grad


def _torch(path: str, here: Here, *operands: Any) -> Any:
    import torch

    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name)
    return found(*(operands or (here.q,)))


def _tensors(here: Here) -> list[pq.QTensor]:
    """Tensors of many kinds of blocks and widths, on lines that fill no word."""
    x = here.x[:, :30]
    schemes = (
        "q4s/8:f16",
        "q2s/row:f32",
        "q8s/3:f16",
        "e2m1/16:ue4m3/tensor:f32",
        "q4s/tensor:f32",
    )
    return [pq.quantize(x, scheme) for scheme in (*schemes, "nf4", "q8s/2x8:f32", "q4f/3x7:f16")]


def _exact(made: Any, wanted: Any, like: pq.QTensor) -> None:
    """A tensor that is quantized still, with the values that the same step gives of floats."""
    assert isinstance(made, pq.QTensor)
    assert made.scheme.value is like.scheme.value
    validate(made)  # as many scales as blocks, of their types
    assert_same_bits(host(made.dequantize()), np.ascontiguousarray(wanted))


def flip(here: Here) -> None:
    for q in _tensors(here):
        for axis in (None, 0, 1, -1, (0, 1)):
            _exact(q.flip(axis), np.flip(host(q.dequantize()), axis), q)


def expand_blocks(here: Here) -> None:
    for q in _tensors(here):
        wanted = np.broadcast_to(host(q.dequantize()), (3, 4, 30))
        _exact(q.expand((3, 4, 30)), wanted, q)
        line = np.broadcast_to(host(q.dequantize())[1:2], (5, 30))
        _exact(q[1:2].expand((5, 30)), line, q)


def _reshape(here: Here, *shapes: tuple[int, ...]) -> None:
    for q in _tensors(here):
        for shape in shapes:
            _exact(q.reshape(shape), host(q.dequantize()).reshape(shape), q)


def raw_slice(here: Here) -> None:
    for q in _tensors(here):
        for key in (1, slice(1, 3), (slice(None), slice(5, 29, 3)), (slice(None, None, -2), 7)):
            _exact(q[key], host(q.dequantize())[key], q)


def kind_of_a_product(here: Here) -> None:
    q, x = here.q, here.ones(32, 5)
    for left, right in ((q, q.T), (q, x), (x.T, q.T)):
        floats = pq.matmul(left, right)
        assert not pq.is_quantized(floats)
        with pq.propagation("propagate"):
            again = pq.matmul(left, right)
        assert again.to_data() == pq.quantize(floats, q.scheme).to_data()
        with pq.propagation("inhibit"):
            assert_same_bits(host(pq.matmul(left, right)), host(floats))


OPERATIONS: Table = {
    "flip": (Works(flip),),
    "expand-to-another-shape": (
        Raises(
            "shape-mismatch",
            lambda here: here.q.expand((3, 32)),
            "only an axis of extent 1 can be repeated",
            "the shapes (4, 32) and (3, 32)",
        ),
    ),
    "expand-blocks": (Works(expand_blocks),),
    "reshape-part-words": (Works(lambda here: _reshape(here, (8, 15), (24, 5), (40, 3), (3, 40))),),
    "reshape-wide-blocks": (Works(lambda here: _reshape(here, (2, 2, 30), (4, 5, 6), (1, 4, 30))),),
    "reshape-across-blocks": (
        Works(lambda here: _reshape(here, (60, 2), (120,), (2, 60), (10, 12))),
    ),
    "raw-slice": (Works(raw_slice),),
    "kind-of-a-product": (Works(kind_of_a_product),),
    "permute-axes": (
        Raises(
            "invalid-axes",
            lambda here: here.q.permute(0),
            "the 2 axes of a tensor of shape (4, 32)",
            "(0,) does not fit",
            "a permutation names all",
        ),
        Raises(
            "invalid-axes",
            lambda here: here.q.permute(0, 0),
            "the 2 axes of a tensor of shape (4, 32)",
            "(0, 0) does not fit",
            "named once at most",
        ),
    ),
    "product-of-floats": (Works(product_of_floats),),
    "two-levels-in-a-product": (Works(two_levels_in_a_product),),
    "factorizations": (
        *(
            Raises(
                "unsupported-function",
                lambda here, name=name: getattr(np.linalg, name)(here.q),
                "Supported on a QTensor",
                f"numpy.linalg.{name} has no form",
                "call it on q.dequantize()",
                HOST,
            )
            for name in ("qr", "det")
        ),
        *(
            Raises(
                "unsupported-function",
                lambda here, name=name: _torch(f"linalg.{name}", here),
                "Supported on a QTensor",
                f"torch.linalg.{name} has no form",
                "call it on q.dequantize()",
                TORCH,
            )
            for name in ("lu", "qr", "det", "lu_factor")
        ),
        Works(jax_refuses, JAX),
    ),
    "checkpointing": (Works(checkpointing, TORCH),),
    "backward": (
        Raises(
            "unsupported-function",
            lambda here: _torch("autograd.backward", here),
            "Supported on a QTensor",
            "torch.autograd.backward has no form",
            "call it on q.dequantize()",
            TORCH,
        ),
        Raises(
            "unsupported-function",
            lambda here: _torch(
                "autograd.grad", here, pq.linear(here.tracked, here.q).sum(), here.q
            ),
            "Supported on a QTensor",
            "torch.autograd.grad has no form",
            "call it on q.dequantize()",
            TORCH,
        ),
        Works(nothing_is_tracked, TORCH),
    ),
}
