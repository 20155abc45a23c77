"""Layers whose weight is quantized, and the module that holds its bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyquant import ops
from polyquant.arrays import backend
from polyquant.data import check_description
from polyquant.data import parts as stored_parts
from polyquant.errors import InvalidArgument, StateMismatch
from polyquant.ops.propagation import propagates
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme
from polyquant.torch import library  # noqa: F401  (the layers call its ops)
from polyquant.torch.operands import Operand, bytes_of, tensor_of

#: Version of the description that a state dict holds. A change of what a field means raises it.
VERSION = 1
_PARTS = ("data", "scales", "tensor_scale", "offsets", "table", "groups")


class QParameter(nn.Module):
    """The bytes of a QTensor as parameters, and what they mean.

    Every stored array is a uint8 parameter that takes no gradient (scales, tensor scale and table
    too, as their bytes), so that ``.half()``, mixed precision and sharding cannot change a number;
    arrays that are quantized themselves are QParameters of their own. A state dict also holds the
    ``description`` (scheme, shape, axes), so that a tensor of another scheme is refused.

    Args:
        q: a QTensor of torch's.
        dtype: what ``dtype`` says: that of the float weight it stands for. It follows ``.to``.
    """

    description: Tensor
    _kept: tuple[list[tuple[int, int]], QTensor] | None = None

    def __init__(self, q: QTensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if not isinstance(q, QTensor) or not q.device.startswith("torch:"):
            raise InvalidArgument(name="q", wanted="a QTensor on a device of torch's", got=q)
        self._describe(q.scheme, q.shape, q.axes)
        for name in _PARTS:
            part = getattr(q, name)
            if isinstance(part, QTensor):
                self.add_module(name, QParameter(part, dtype))
            elif part is not None:
                held = nn.Parameter(bytes_of(part.detach()), requires_grad=False)
                self.register_parameter(name, held)
        self.register_buffer("description", self._description().to(q.data.device))
        self.dtype = dtype

    @classmethod
    def empty(
        cls,
        scheme: QuantScheme | str,
        shape: tuple[int, ...],
        *,
        device: Any = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> QParameter:
        """Room for a tensor whose bytes come later, from a state dict."""
        made = as_scheme(scheme)
        arrays = [
            torch.zeros(part.shape, dtype=getattr(torch, part.dtype), device=device)
            for part in stored_parts(made, shape)
        ]
        return cls(tensor_of(arrays, made, shape, range(len(shape))), dtype)

    def _describe(self, scheme: QuantScheme, shape: Any, axes: Any) -> None:
        check_description(scheme, shape, axes)
        self.text, self.extents, self.axes = str(scheme), list(shape), list(axes)

    def _description(self) -> Tensor:
        fields = {"version": VERSION, "shape": self.extents, "axes": self.axes}
        text = json.dumps({**fields, "scheme": self.scheme.to_json()}, sort_keys=True)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    # -- the tensor -----------------------------------------------------------------------------

    def parts(self) -> list[Tensor]:
        """The bytes of the stored arrays in their order, which is what custom ops take."""
        found: list[Tensor] = []
        for name in _PARTS:
            held = self._parameters.get(name)
            if held is not None:
                found.append(held)
            elif name in self._modules:
                inner: Any = self._modules[name]
                found += inner.parts()
        return found

    @property
    def operand(self) -> Operand:
        """What custom ops take."""
        return Operand(self.parts(), self.text, self.extents, self.axes)

    @property
    def qtensor(self) -> QTensor:
        """The QTensor of these bytes, which it shares."""
        return tensor_of(self.parts(), self.scheme, self.extents, self.axes)

    def kept(self) -> QTensor:
        """``qtensor``, and the same one until its bytes lie elsewhere or were written: what kernels
        prepare for a tensor is kept with it."""
        parts = self.parts()
        if any(part.is_inference() for part in parts):  # which do not count how often
            return self.qtensor
        seen = [(part.data_ptr(), part._version) for part in parts]
        if self._kept is None or self._kept[0] != seen:
            self._kept = seen, self.qtensor
        return self._kept[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    @property
    def scheme(self) -> QuantScheme:
        """What the codes mean."""
        return as_scheme(self.text)

    @property
    def shape(self) -> torch.Size:
        """The logical shape of the weight."""
        return torch.Size(self.extents)

    @property
    def device(self) -> torch.device:
        """Where the bytes lie."""
        found: torch.device = self._parameters["data"].device
        return found

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, by default in ``self.dtype``."""
        made: Tensor = self.qtensor.dequantize(dtype or self.dtype)
        return made

    def extra_repr(self) -> str:
        return f"{self.text!r}, shape={tuple(self.extents)}"

    def _apply(self, fn: Any, recurse: bool = True) -> QParameter:
        """What ``.to`` and ``.half()`` call: the bytes move, and ``dtype`` is what it would be."""
        super()._apply(fn, recurse)
        self._kept = None
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    # -- state dicts ----------------------------------------------------------------------------

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self._check_state(state_dict, prefix)
        self._kept = None
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _check_state(self, state: Mapping[str, Any], prefix: str) -> None:
        found = state.get(f"{prefix}description")
        if isinstance(found, Tensor) and not torch.equal(found.cpu(), self._description()):
            name = prefix.removesuffix(".")
            raise StateMismatch(name=name, wanted=self.in_words(), got=_in_words(found))

    def in_words(self) -> str:
        """The tensor in words, for messages."""
        return f"a {self.text} tensor of shape {tuple(self.extents)}"


def _in_words(description: Tensor) -> str:
    """What a description says, in words; of a broken one that it is none."""
    try:
        fields = json.loads(bytes(description.cpu().tolist()))
        scheme = QuantScheme.from_json(fields["scheme"])
        return f"a {scheme} tensor of shape {tuple(fields['shape'])}, axes {tuple(fields['axes'])}"
    except (ValueError, TypeError, KeyError):
        return "a description that this version cannot read"


# -- layers -----------------------------------------------------------------------------------


def _is_plain(*arrays: Any) -> bool:
    """Whether nothing of torch's must see a layer as one op: no gradient, no transformation."""
    if torch.compiler.is_compiling() or propagates():
        return False
    watches = backend("torch").is_transformed
    return all(each is None or (isinstance(each, Tensor) and not watches(each)) for each in arrays)


class _Layer(nn.Module):
    """A layer that refuses the state of its float counterpart by name."""

    weight: QParameter

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        found = state_dict.get(f"{prefix}weight")
        if isinstance(found, Tensor):
            facts = {"wanted": self.weight.in_words(), "got": f"a {found.dtype} array"}
            raise StateMismatch(name=f"{prefix}weight", **facts)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class QLinear(_Layer):
    """``x @ weight.mT + bias`` with a quantized weight of shape (out_features, in_features).

    The result has the dtype of ``x``. The weight takes no gradient; ``x`` and ``bias`` do.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``, whose initial
            numbers it has; on the device "meta" it has none, and waits for a state dict.
        scheme: a QuantScheme, a preset's name or a text form.
        activations: a scheme to quantize ``x`` with, at every call; its gradient passes straight
            through.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        scheme: QuantScheme | str = "q4s",
        activations: QuantScheme | str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        source = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        kind = source.weight.dtype
        if source.weight.device.type == "meta":
            weight = QParameter.empty(scheme, (out_features, in_features), dtype=kind)
        else:
            weight = QParameter(ops.quantize(source.weight, scheme), kind)
        self._hold(weight, source.bias, activations)

    def _hold(self, weight: QParameter, bias: Tensor | None, activations: Any) -> None:
        if len(weight.extents) != 2:
            wanted = "a weight of two axes, (out_features, in_features)"
            raise InvalidArgument(name="weight", wanted=wanted, got=tuple(weight.extents))
        self.out_features, self.in_features = weight.extents
        self.weight = weight
        self.activations = "" if activations is None else str(as_scheme(activations))
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias, requires_grad=bias.requires_grad)
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scheme: QuantScheme | str,
        *,
        calibration: str = "minmax",
        activations: QuantScheme | str | None = None,
    ) -> QLinear:
        """The layer with the weight of ``linear`` quantized, and its bias. Raises as quantize."""
        q = ops.quantize(linear.weight, scheme, calibration=calibration)
        weight = QParameter(q, linear.weight.dtype)
        return cls.from_parameter(weight, linear.bias, activations=activations)

    @classmethod
    def from_qtensor(
        cls,
        q: QTensor,
        bias: Tensor | None = None,
        *,
        activations: QuantScheme | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> QLinear:
        """The layer of a weight that is quantized already."""
        return cls.from_parameter(QParameter(q, dtype), bias, activations=activations)

    @classmethod
    def from_parameter(
        cls,
        weight: QParameter,
        bias: Tensor | None = None,
        *,
        activations: QuantScheme | str | None = None,
    ) -> QLinear:
        """The layer that shares ``weight`` with others: tied."""
        made = cls.__new__(cls)
        super(QLinear, made).__init__()
        made._hold(weight, bias, activations)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape (..., in_features) to (..., out_features)."""
        weight, activations = self.weight, self.activations
        if _is_plain(x, self.bias, weight.data):
            found: Tensor = ops.linear(x, weight.kept(), self.bias, activations=activations or None)
            return found
        made: Tensor = torch.ops.polyquant.linear(
            x, weight.parts(), weight.text, weight.extents, weight.axes, self.bias, activations
        )
        return made

    def extra_repr(self) -> str:
        more = f", activations={self.activations!r}" if self.activations else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.weight.text!r}{more}"
        )


class QEmbedding(_Layer):
    """Rows of a quantized table of shape (num_embeddings, embedding_dim), in ``weight.dtype``."""

    def __init__(self, weight: QParameter, *, padding_idx: int | None = None) -> None:
        super().__init__()
        if len(weight.extents) != 2:
            wanted = "a weight of two axes, (num_embeddings, embedding_dim)"
            raise InvalidArgument(name="weight", wanted=wanted, got=tuple(weight.extents))
        self.num_embeddings, self.embedding_dim = weight.extents
        self.padding_idx = padding_idx
        self.weight = weight

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, scheme: QuantScheme | str, *, calibration: str = "minmax"
    ) -> QEmbedding:
        """The layer with the weight of ``embedding`` quantized. Raises as quantize."""
        check_embedding("embedding", embedding)
        q = ops.quantize(embedding.weight, scheme, calibration=calibration)
        weight = QParameter(q, embedding.weight.dtype)
        return cls(weight, padding_idx=embedding.padding_idx)

    def forward(self, indices: Tensor) -> Tensor:
        """``indices`` of any shape to (..., embedding_dim)."""
        weight = self.weight
        made: Tensor = torch.ops.polyquant.embedding(
            indices, weight.parts(), weight.text, weight.extents, weight.axes, weight.dtype
        )
        return made

    def extra_repr(self) -> str:
        more = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        sizes = f"{self.num_embeddings}, {self.embedding_dim}"
        return f"{sizes}{more}, scheme={self.weight.text!r}"


def check_embedding(name: str, embedding: nn.Embedding) -> None:
    """Refuse an Embedding that changes its weight as it runs. Raises InvalidArgument."""
    if embedding.max_norm is not None:
        wanted = "without max_norm, which changes the weight as it is read"
        raise InvalidArgument(name=name, wanted=wanted, got=embedding)
