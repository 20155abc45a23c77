"""Quantizing what holds many arrays: state dicts, dicts, lists and tuples, modules of JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, NamedTuple

from polyquant.arrays import FLOAT_DTYPES, describe, dtype_name, find_backend
from polyquant.errors import (
    InvalidArgument,
    InvalidName,
    NothingMatches,
    ShapeMismatch,
    TensorNotFound,
    UnsupportedTree,
)
from polyquant.ops import quantize
from polyquant.qtensor import QTensor
from polyquant.scheme import QuantScheme
from polyquant.scheme import scheme as as_scheme


def quantize_tree(
    tree: Any,
    scheme: QuantScheme | str,
    *,
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
    calibration: str = "minmax",
) -> Any:
    """The same tree with its weights quantized; everything else is the same object as before.

    Args:
        tree: dicts, lists, tuples (named ones too) and arrays, nested as they come; and what JAX
            knows as pytrees, such as modules of Equinox and of Flax NNX and their states, which may
            have leaves that are no arrays. Leaves are named by their dotted path
            ("encoder.layer.0.weight"). An array that is there twice is quantized once.
        include: glob patterns of the names to quantize; by default all. They select float arrays
            with two axes or more; an array with fewer is quantized where its whole name is given.
        exclude: glob patterns of names to leave alone.
        calibration: as in quantize.

    Raises NothingMatches for a pattern that selects nothing, UnsupportedTree, and as quantize.
    """
    made = as_scheme(scheme)
    ranks = {
        name: len(leaf.shape) if _is_float(leaf) else None for name, leaf in _leaves(tree, "", ())
    }
    chosen = set(select_weights(ranks, include, exclude))
    tied: dict[int, QTensor] = {}

    def quantized(name: str, leaf: Any) -> Any:
        if name not in chosen:
            return leaf
        if id(leaf) not in tied:
            tied[id(leaf)] = quantize(leaf, made, calibration=calibration)
        return tied[id(leaf)]

    return _rebuild(tree, "", quantized)


def dequantize_tree(tree: Any, dtype: Any = None) -> Any:
    """The same tree with the values of its QTensors in their place; all else stays.

    Code that knows nothing of QTensors runs on it: under ``jax.jit``, where the values may be
    passing ones, ``dequantize_tree(module)(x)`` is a module's call.

    Args:
        tree: as in quantize_tree.
        dtype: as in QTensor.dequantize.

    Raises UnsupportedTree, UnsupportedDtype.
    """
    for _ in _leaves(tree, "", ()):  # refuses what is no tree, and what would never end
        pass
    return _rebuild(tree, "", lambda _, x: x.dequantize(dtype) if isinstance(x, QTensor) else x)


def flatten_tree(tree: Any) -> dict[str, Any]:
    """The arrays and QTensors of a tree by their dotted names: what pq.save takes.

    Raises UnsupportedTree, and InvalidName where two have one name.
    """
    found: dict[str, Any] = {}
    for name, leaf in _leaves(tree, "", (), holds_anything=True):
        if _has_shape(leaf):
            if name in found:
                raise InvalidName(name=name, reason="two leaves of the tree have that name")
            found[name] = leaf
    return found


def unflatten_tree(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """The same tree with other arrays and QTensors of the same names and shapes.

    Args:
        tree: as in quantize_tree; its arrays may be any that have a shape, such as those that
            jax.eval_shape gives. What is no array stays.
        tensors: all that flatten_tree names, such as pq.load gives.

    Raises TensorNotFound, ShapeMismatch, InvalidArgument for a name that the tree does not have.
    """
    named = flatten_tree(tree)
    unknown = sorted(set(tensors) - set(named))
    if unknown:
        raise InvalidArgument(name="tensors", wanted="names of the tree's arrays", got=unknown)
    for name, leaf in named.items():
        if name not in tensors:
            near = get_close_matches(name, list(tensors), n=3, cutoff=0.0)
            raise TensorNotFound(path="tensors", name=name, nearest=", ".join(near) or "none")
        shape, got = tuple(leaf.shape), tuple(tensors[name].shape)
        if shape != got:
            reason = f"{name} has the first shape in the tree, and the second came"
            raise ShapeMismatch(op="unflatten_tree", left=shape, right=got, reason=reason)
    return _rebuild(tree, "", lambda name, x: tensors[name] if _has_shape(x) else x)


def _has_shape(leaf: Any) -> bool:
    return isinstance(leaf, QTensor) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def select_weights(
    ranks: Mapping[str, int | None],
    include: Sequence[str] | str = (),
    exclude: Sequence[str] | str = (),
) -> list[str]:
    """The names to quantize, of name -> number of axes (None for no floats): see quantize_tree.

    Raises NothingMatches, InvalidArgument.
    """
    exact = _patterns("include", include)
    names = select(list(ranks), include, exclude)
    return [n for n in names if ranks[n] is not None and ((ranks[n] or 0) >= 2 or n in exact)]


def select(
    names: Sequence[str], include: Sequence[str] | str = (), exclude: Sequence[str] | str = ()
) -> list[str]:
    """The names that match a pattern of ``include`` (all, if empty) and none of ``exclude``.

    Patterns are globs over the whole name, case-sensitive. Raises NothingMatches for a pattern
    that matches no name, InvalidArgument for one that is no text.
    """
    wanted, unwanted = _patterns("include", include), _patterns("exclude", exclude)
    for what, patterns in (("Include patterns", wanted), ("Exclude patterns", unwanted)):
        idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
        if idle:
            examples = ", ".join(names[:3]) or "(there are none)"
            raise NothingMatches(what=what, patterns=idle, count=len(names), examples=examples)
    return [
        name
        for name in names
        if (not wanted or any(fnmatchcase(name, p) for p in wanted))
        and not any(fnmatchcase(name, p) for p in unwanted)
    ]


def _patterns(name: str, given: Any) -> list[str]:
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list | tuple) or not all(isinstance(p, str) for p in found):
        raise InvalidArgument(name=name, wanted="a glob pattern, or a list of them", got=given)
    return list(found)


class _Container(NamedTuple):
    """The named children of a container, and what makes it anew of others in their place."""

    children: list[tuple[str, Any]]
    closed: Callable[[list[Any]], Any]
    holds_anything: bool = False  # JAX's own may have leaves that are no arrays, such as functions


def _opened(tree: Any) -> _Container | None:
    """One level of a container; None for a leaf."""
    if tree is None or isinstance(tree, QTensor) or find_backend(tree) is not None:
        return None
    if isinstance(tree, list | tuple):
        names = getattr(tree, "_fields", range(len(tree)))
        children = [(str(name), item) for name, item in zip(names, tree, strict=True)]
        is_named = hasattr(tree, "_fields")
        return _Container(
            children, lambda made: type(tree)(*made) if is_named else type(tree)(made)
        )
    if "jax" in sys.modules and not isinstance(tree, dict):
        containers = import_module("polyquant.backends.jax.containers")
        found = containers.opened(tree)
        if found is not None:
            return _Container(found.children, found.closed, holds_anything=True)
    if not isinstance(tree, Mapping):
        return None

    def closed(made: list[Any]) -> Any:
        if not isinstance(tree, MutableMapping):
            return dict(zip(tree, made, strict=True))
        changed = copy(tree)  # which keeps a default factory or module metadata
        changed.update(zip(tree, made, strict=True))
        return changed

    return _Container([(str(key), item) for key, item in tree.items()], closed)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _leaves(
    tree: Any, path: str, above: tuple[int, ...], *, holds_anything: bool = False
) -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted name; ``above`` are the containers that hold this one."""
    node = _opened(tree)
    if node is not None and id(tree) in above:
        raise UnsupportedTree(path=path, got="one of the containers that it lies in")
    if node is None:
        is_plain = tree is None or isinstance(tree, bool | int | float | str | QTensor)
        if not is_plain and not holds_anything and find_backend(tree) is None:
            raise UnsupportedTree(path=path or "The tree", got=describe(tree))
        yield path, tree
        return
    lenient = holds_anything or node.holds_anything
    for name, item in node.children:
        below = (*above, id(tree))
        yield from _leaves(item, _joined(path, name), below, holds_anything=lenient)


def _is_float(leaf: Any) -> bool:
    return (
        not isinstance(leaf, QTensor)
        and find_backend(leaf) is not None
        and dtype_name(leaf) in FLOAT_DTYPES
    )


def _rebuild(tree: Any, path: str, made: Callable[[str, Any], Any]) -> Any:
    """The tree with ``made(name, leaf)`` in place of every leaf."""
    node = _opened(tree)
    if node is None:
        return made(path, tree)
    return node.closed([_rebuild(item, _joined(path, name), made) for name, item in node.children])
