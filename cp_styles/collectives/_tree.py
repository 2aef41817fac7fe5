"""Nested dicts, lists and tuples, as batches and model outputs use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def map_leaves(fn: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """``tree`` with every leaf replaced by ``fn(path, leaf)``. A path looks like ``['pixels'][0]``.

    Mappings become dicts; lists, tuples and named tuples keep their type. Everything else is a leaf.
    """
    if isinstance(tree, Mapping):
        return {key: map_leaves(fn, value, f"{path}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        named = tree._asdict()  # pyright: ignore[reportAttributeAccessIssue]
        return type(tree)(*(map_leaves(fn, value, f"{path}.{key}") for key, value in named.items()))
    if type(tree) in (list, tuple):  # subclasses such as torch.Size are values
        return type(tree)(map_leaves(fn, value, f"{path}[{index}]") for index, value in enumerate(tree))
    return fn(path, tree)


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """Every (path, leaf), in the order of :func:`map_leaves`."""
    result: list[tuple[str, Any]] = []
    map_leaves(lambda path, leaf: result.append((path, leaf)), tree)
    return result
