"""Quantizing the layers of a module where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from polyquant import calibrate, ops
from polyquant.errors import (
    AlreadyQuantized,
    InvalidArgument,
    NothingMatches,
    PolyquantError,
    UnsupportedArray,
)
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme
from polyquant.torch.modules import QEmbedding, QLinear, QParameter, check_embedding
from polyquant.tree import select

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Options(NamedTuple):
    scheme: QuantScheme
    calibration: str
    activations: QuantScheme | None


def quantize_(
    module: nn.Module,
    scheme: QuantScheme | str,
    *,
    include: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str | None = None,
    calibration: str = "minmax",
    activations: QuantScheme | str | None = None,
) -> nn.Module:
    """Replace the linear layers in ``module`` by QLinear, in place; returns ``module``.

    Layers are named by their path ("encoder.layer.0.query"). Of class ``nn.Linear`` itself alone:
    subclasses, such as the ``out_proj`` of ``nn.MultiheadAttention``, have a weight that others
    read, and stay. Layers that share a weight share one QParameter afterwards; an ``nn.Embedding``
    tied to a layer that is quantized comes along. Either everything is replaced or, where
    something is refused, nothing.

    Args:
        include: glob patterns of the layers to quantize; by default every ``nn.Linear``. An
            ``nn.Embedding`` is quantized where its whole name is given.
        exclude: glob patterns of layers to leave alone.
        calibration: as in pq.quantize.
        activations: a scheme to quantize the inputs of the linear layers with, at every call.

    Raises:
        NothingMatches, AlreadyQuantized, UnsupportedArray (on the meta device), InvalidArgument
        (a tied layer is left out, or has hooks that would be lost), and what pq.quantize refuses.
    """
    if not isinstance(module, nn.Module) or type(module) in (nn.Linear, nn.Embedding, QLinear):
        wanted = "a module that holds layers; for one layer there is QLinear.from_linear"
        raise InvalidArgument(name="module", wanted=wanted, got=module)
    made = as_scheme(scheme)
    calibrate.check(calibration, made)
    entering = None if activations is None else as_scheme(activations)
    layers = _layers(module, () if include is None else include, () if exclude is None else exclude)
    replaced = _quantized(layers, _Options(made, calibration, entering))
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if id(child) in replaced:
                setattr(parent, name, replaced[id(child)])
    return module


def _layers(module: nn.Module, include: Any, exclude: Any) -> dict[str, nn.Module]:
    """The layers to replace by name, tied ones too, each checked."""
    kinds = (nn.Linear, nn.Embedding, QLinear, QEmbedding)
    every = dict(module.named_modules(remove_duplicate=False))
    layers = {name: layer for name, layer in every.items() if type(layer) in kinds}
    named = {include} if isinstance(include, str) else set(include)
    names = [
        name
        for name, layer in layers.items()
        if not isinstance(layer, nn.Embedding | QEmbedding) or name in named
    ]
    kept = select(list(layers), (), exclude)
    chosen = [name for name in select(names, include) if name in kept]
    if not chosen:
        examples = ", ".join(list(every)[1:4]) or "(there are none)"
        facts = {"patterns": list(named) or ["*"], "count": len(layers), "examples": examples}
        raise NothingMatches(what="Among the linear layers, the patterns", **facts)
    chosen += _tied(every, chosen, set(layers) - set(kept))
    for name in chosen:
        _check_layer(name, layers[name])
    return {name: layers[name] for name in chosen}


def _tied(every: dict[str, nn.Module], chosen: list[str], spared: set[str]) -> list[str]:
    """The layers outside of ``chosen`` that share a weight with one in it."""
    weights = {id(getattr(every[name], "weight", None)): name for name in chosen}
    found = []
    for name, layer in every.items():
        if name in chosen:
            continue
        for held, parameter in layer._parameters.items():
            partner = weights.get(id(parameter))
            if parameter is None or partner is None or every[partner] is layer:
                continue
            if name in spared or type(layer) not in (nn.Linear, nn.Embedding) or held != "weight":
                wanted = f"patterns that keep {partner} and {name} together: they share one weight"
                if name not in spared:
                    wanted = f"without {partner}: {name}, which is no plain layer, has its weight"
                raise InvalidArgument(name="include", wanted=wanted, got=partner)
            found.append(name)
    return found


def _check_layer(name: str, layer: Any) -> None:
    if isinstance(layer, QLinear | QEmbedding):
        raise AlreadyQuantized(role=name, scheme=layer.weight.text)
    if isinstance(layer, nn.Embedding):
        check_embedding(name, layer)
    if any(getattr(layer, hooks, None) for hooks in _HOOKS) or "forward" in vars(layer):
        wanted = "without hooks, which would be lost: quantize first, then register them"
        raise InvalidArgument(name=name, wanted=wanted, got=layer)
    weight = layer._parameters.get("weight")
    if weight is None:
        wanted = "a layer whose weight is a parameter (not one that is computed)"
        raise InvalidArgument(name=name, wanted=wanted, got=layer)
    if weight.device.type == "meta":
        got = "on torch's meta device, which has none"
        fix = "Load the weights first, then quantize"
        raise UnsupportedArray(role=f"{name}.weight", got=got, fix=fix)


def _quantized(layers: dict[str, nn.Module], options: _Options) -> dict[int, nn.Module]:
    """The new layer of every old one, by its identity; one QParameter for each weight."""
    shared: dict[int, QParameter] = {}
    replaced: dict[int, nn.Module] = {}
    for name, layer in layers.items():
        weight: Any = layer.weight
        if id(weight) not in shared:
            shared[id(weight)] = _quantize(name, weight, options)
        if id(layer) not in replaced:
            new = _new_layer(layer, shared[id(weight)], options)
            replaced[id(layer)] = new.train(layer.training)
    return replaced


def _quantize(name: str, weight: Tensor, options: _Options) -> QParameter:
    try:
        q = ops.quantize(weight, options.scheme, calibration=options.calibration)
    except PolyquantError as error:
        error.add_note(f"The tensor is the weight of {name}; no layer was changed.")
        raise
    return QParameter(q, weight.dtype)


def _new_layer(layer: Any, weight: QParameter, options: _Options) -> nn.Module:
    if isinstance(layer, nn.Embedding):
        return QEmbedding(weight, padding_idx=layer.padding_idx)
    return QLinear.from_parameter(weight, layer.bias, activations=options.activations)
