"""Quantizing what holds many arrays: state dicts, nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from typing import Any

from polyquant.arrays import FLOAT_DTYPES, describe, dtype_name, find_backend
from polyquant.errors import InvalidArgument, NothingMatches, UnsupportedTree
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
        tree: dicts, lists, tuples (named ones too) and arrays, nested as they come. Leaves are
            named by their dotted path ("encoder.layer.0.weight").
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
    return _rebuild(tree, "", made, chosen, calibration)


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


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """The named children of a container; None for a leaf."""
    if isinstance(tree, Mapping):
        return [(str(key), item) for key, item in tree.items()]
    if isinstance(tree, list | tuple):
        names = getattr(tree, "_fields", range(len(tree)))
        return [(str(name), item) for name, item in zip(names, tree, strict=True)]
    return None


def _leaves(tree: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted name; ``above`` are the containers that hold this one."""
    children = _children(tree)
    if children is not None and id(tree) in above:
        raise UnsupportedTree(path=path, got="one of the containers that it lies in")
    if children is None:
        is_plain = tree is None or isinstance(tree, bool | int | float | str | QTensor)
        if not is_plain and find_backend(tree) is None:
            raise UnsupportedTree(path=path or "The tree", got=describe(tree))
        yield path, tree
        return
    for name, item in children:
        yield from _leaves(item, f"{path}.{name}" if path else name, (*above, id(tree)))


def _is_float(leaf: Any) -> bool:
    return (
        not isinstance(leaf, QTensor)
        and find_backend(leaf) is not None
        and dtype_name(leaf) in FLOAT_DTYPES
    )


def _rebuild(tree: Any, path: str, scheme: QuantScheme, chosen: set[str], calibration: str) -> Any:
    children = _children(tree)
    if children is None:
        return quantize(tree, scheme, calibration=calibration) if path in chosen else tree
    made = [
        _rebuild(item, f"{path}.{name}" if path else name, scheme, chosen, calibration)
        for name, item in children
    ]
    if isinstance(tree, MutableMapping):  # a copy keeps a default factory or module metadata
        changed = copy(tree)
        changed.update(zip(tree, made, strict=True))
        return changed
    if isinstance(tree, Mapping):
        return dict(zip(tree, made, strict=True))
    return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
