"""How an op becomes torch's: its schema, kernel, fake, derivative and rule for batches.

``torch.library.custom_op`` would do all of it but one: its derivative does not run under
torch.func.grad. This one does, as the built-in ops' do: at every level of torch.func the op is
recorded and then dispatched again, to the next level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

_LIBRARY = torch.library.Library("polyquant", "DEF")
_NOTHING = nullcontext()

Keep = Callable[[Any, Sequence[Any], Any], None]
Backward = Callable[..., tuple[Any, ...]]


def register(
    name: str, run: Callable[..., Any], fake: Callable[..., Any], keep: Keep, backward: Backward
) -> Any:
    """Define ``torch.ops.polyquant.<name>`` with the annotations of ``run`` as its schema.

    Args:
        run: the kernel, for every device. What it returns shares no memory with its arguments.
        fake: shapes, dtypes and strides of the result, without numbers.
        keep: ``keep(context, arguments, result)`` saves what the derivative needs.
        backward: ``backward(context, *gradients)`` gives one gradient for each argument, a list
            for a list of tensors; ``context.needs`` says which are asked for, in the same form.
    """
    _LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()))
    _LIBRARY.impl(name, torch._disable_dynamo(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"polyquant::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.polyquant, name)
    _LIBRARY.impl(name, _tracked(op, keep, backward), "Autograd")
    return op


def register_batches(name: str, rule: Callable[..., Any]) -> None:
    """What torch.vmap does with an op: ``rule(info, dims, *arguments)``, as in torch.library."""
    torch.library.register_vmap(f"polyquant::{name}", rule, lib=_LIBRARY)


def _tracked(op: Any, keep: Keep, backward: Backward) -> Callable[..., Any]:
    """The kernel that autograd runs first: it records the op where an argument is tracked."""

    def forward(ctx: Any, counts: Sequence[int], *flat: Any) -> Any:
        arguments = _nested(flat, counts)
        # Grad mode is off here, but the next level of torch.func must record the op as well.
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            made = op(*arguments)
        ctx.counts = counts
        keep(ctx, arguments, made)
        return made if isinstance(made, Tensor) else tuple(made)

    def backward_of(ctx: Any, *gradients: Any) -> Any:
        ctx.needs = _nested(ctx.needs_input_grad[1:], ctx.counts)
        return None, *_flat(backward(ctx, *gradients), ctx.counts)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_of)}
    function: Any = type(f"polyquant_{op.__name__}", (_SingleLevelFunction,), methods)

    def kernel(*arguments: Any) -> Any:
        counts = [len(x) if _is_tensors(x) else -1 for x in arguments]
        flat = _flat(arguments, counts)
        is_tracked = any(isinstance(x, Tensor) and x.requires_grad for x in flat)
        # Forward mode is refused by torch itself, which misses a jvp then.
        if not (is_tracked and torch.is_grad_enabled()) and forward_ad._current_level < 0:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*arguments)
        is_within = torch._C._functorch.peek_interpreter_stack() is not None
        with enable_single_level_autograd_function() if is_within else _NOTHING:
            made = function.apply(counts, *flat)
        return made if isinstance(made, Tensor) else list(made)

    return kernel


def _is_tensors(x: Any) -> bool:
    return isinstance(x, list | tuple) and bool(x) and isinstance(x[0], Tensor)


def _flat(arguments: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Arguments with those in lists of tensors among them; -1 counts one that is no list.

    None stands for a list of Nones.
    """
    found: list[Any] = []
    for x, count in zip(arguments, counts, strict=True):
        inner = [None] * count if x is None else x
        found += [x] if count < 0 else inner
    return found


def _nested(flat: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    found: list[Any] = []
    at = 0
    for count in counts:
        found.append(flat[at] if count < 0 else list(flat[at : at + count]))
        at += abs(count)
    return found
