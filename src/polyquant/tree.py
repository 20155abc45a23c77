"""Quantizing what holds many arrays: state dicts, nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from polyquant.arrays import FLOAT_DTYPES, describe, dtype_name, find_backend
from polyquant.errors import NothingMatches, UnsupportedTree
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
        include: glob patterns of the names to quantize. By default every float array with two axes
            or more; with ``include``, every float array that matches.
        exclude: glob patterns of names to leave alone.
        calibration: as in quantize.

    Raises NothingMatches for a pattern that selects nothing, UnsupportedTree, and as quantize.
    """
    made = as_scheme(scheme)
    leaves = dict(_leaves(tree, ""))
    floats = [name for name, leaf in leaves.items() if _is_float(leaf)]
    if not include:
        floats = [name for name in floats if len(leaves[name].shape) >= 2]
    chosen = set(select(floats, include, exclude))
    return _rebuild(tree, "", made, chosen, calibration)


def select(
    names: Sequence[str], include: Sequence[str] | str = (), exclude: Sequence[str] | str = ()
) -> list[str]:
    """The names that match a pattern of ``include`` (all, if empty) and none of ``exclude``.

    Patterns are globs over the whole name, case-sensitive. Raises NothingMatches for a pattern
    that matches no name.
    """
    wanted = [include] if isinstance(include, str) else list(include)
    unwanted = [exclude] if isinstance(exclude, str) else list(exclude)
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


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """The named children of a container; None for a leaf."""
    if isinstance(tree, Mapping):
        return [(str(key), item) for key, item in tree.items()]
    if isinstance(tree, list | tuple):
        names = getattr(tree, "_fields", range(len(tree)))
        return [(str(name), item) for name, item in zip(names, tree, strict=True)]
    return None


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = _children(tree)
    if children is None:
        is_plain = tree is None or isinstance(tree, bool | int | float | str | QTensor)
        if not is_plain and find_backend(tree) is None:
            raise UnsupportedTree(path=path or "The tree", got=describe(tree))
        yield path, tree
        return
    for name, item in children:
        yield from _leaves(item, f"{path}.{name}" if path else name)


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
    if isinstance(tree, Mapping):
        return type(tree)(zip(tree, made, strict=True))  # type: ignore[call-arg]
    return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
