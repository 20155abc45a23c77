"""Containers that JAX knows (modules, states): taken apart and put together, a level at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

#: What a variable of Flax calls its array. One that holds no more adds nothing to a name.
_VALUE = "value"


class Opened(NamedTuple):
    """The named children of a container, and what makes it anew of others in their place."""

    children: list[tuple[str, Any]]
    closed: Callable[[Sequence[Any]], Any]


def opened(node: Any) -> Opened | None:
    """One level of a registered pytree; None for what is a leaf to JAX.

    The only child of a node has no name where it is the node's value, as in a Flax variable.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if jax.tree_util.treedef_is_leaf(structure) and len(found) == 1 and not found[0][0]:
        return None
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found]
    if names == [_VALUE]:
        names = [""]
    children = [(name, child) for name, (_, child) in zip(names, found, strict=True)]
    return Opened(children, structure.unflatten)
