"""Low-rank adapters over quantized layers: what is trained when the base is frozen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyquant.errors import InvalidArgument
from polyquant.torch.modules import QLinear
from polyquant.tree import select


class LoRALinear(nn.Module):
    """``base(x) + (alpha / rank) * x @ lora_a.mT @ lora_b.mT`` (LoRA, arXiv:2106.09685).

    ``lora_a`` of shape (rank, in_features) starts as ``nn.Linear``'s weight does, ``lora_b`` of
    shape (out_features, rank) as zeros: at first the layer is its base.
    """

    def __init__(
        self, base: QLinear, rank: int = 8, alpha: float = 16, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise InvalidArgument(name="rank", wanted="a whole number of at least 1", got=rank)
        self.base = base
        self.scaling = alpha / rank
        place = {"device": base.weight.device, "dtype": dtype or base.weight.dtype}
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, **place))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, **place))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape (..., in_features) to (..., out_features), in the dtype of ``x``."""
        made: Tensor = self.base(x)
        inner = functional.linear(x.to(self.lora_a.dtype), self.lora_a)
        return made + (functional.linear(inner, self.lora_b) * self.scaling).to(made.dtype)

    def extra_repr(self) -> str:
        return f"rank={self.lora_a.shape[0]}, scaling={self.scaling:g}"


def lora_(
    module: nn.Module,
    rank: int = 8,
    alpha: float = 16,
    include: Sequence[str] | str | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Wrap the QLinear layers of ``module`` with adapters, in place, and freeze all the rest.

    Args:
        rank, alpha: the adapter's rank, and ``alpha / rank`` is what its result is scaled by.
        include: glob patterns of the layers' names; by default every QLinear.
        dtype: of the adapters; by default that of the weight each layer stands for.

    Raises NothingMatches, InvalidArgument.
    """
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, QLinear) and not name.endswith(".base")
    }
    chosen = select(list(layers), () if include is None else include)
    if not chosen:
        wanted = "a module that holds QLinear layers: call quantize_ first"
        raise InvalidArgument(name="module", wanted=wanted, got=type(module).__name__)
    wrapped = {
        id(layers[name]): LoRALinear(layers[name], rank, alpha, dtype=dtype) for name in chosen
    }
    module.requires_grad_(False)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if id(child) in wrapped:
                setattr(parent, name, wrapped[id(child)])
    return module


def lora_state(module: nn.Module) -> dict[str, Tensor]:
    """The adapters' part of ``module.state_dict()``, to be loaded with ``strict=False``."""
    return {
        name: tensor
        for name, tensor in module.state_dict().items()
        if name.rpartition(".")[2] in ("lora_a", "lora_b")
    }
