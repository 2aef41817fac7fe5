"""Split the inputs of a model over the ranks, and gather its outputs: split and gather of nested structures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from cp_styles.collectives.peers import Facts, Group, consult, peers_of
from cp_styles.collectives.rows import Layout
from cp_styles.collectives.split_gather import GradScale, gather, split
from cp_styles.comm.agreement import StatusRow


def slice_inputs(
    inputs: Any,
    dim: int | Mapping[str, int],
    group: Group,
    *,
    layout: Layout = None,
    fill: float | Mapping[str, float] = 0,
    grad_scale: GradScale = GradScale.NONE,
    check: bool = True,
) -> Any:
    """This rank's part of every tensor in ``inputs``, which is the same on all ranks.

    ::

        forward:   R      -> S(dim)      nothing is sent
        backward:  S(dim) -> R           all-gather of the gradient of each floating-point tensor

        batch = slice_inputs(batch, 1, group, layout=Padded(length), fill={"tokens": pad, "labels": -100})

    Args:
        inputs: a tensor, or dicts, lists and tuples of tensors. Other values are kept.
        dim: the dim to cut; or, if ``inputs`` is a dict, a mapping from keys to dims. Keys without a dim stay whole.
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None.
        layout: how the dim is cut, see :func:`split`. With :class:`Padded`, all shards have one size.
        fill: the value of the padding with :class:`Padded`, or a mapping from the keys of ``inputs`` to it (others: 0).
        grad_scale: see :class:`GradScale`.
        check: see :func:`all_to_all`.

    Returns:
        The same structure. Tensors are views of the inputs if nothing is padded and this rank's part is one range.

    Communication: for each tensor that of :func:`split`, and one small all-gather for ``check``.

    Raises:
        ValueError, TypeError: as :func:`split`; also if ranks have different keys.
    """

    one = partial(split, group=group, layout=layout, grad_scale=grad_scale, check=check)
    return _map_tensors("slice_inputs", one, inputs, dim, fill, group, check)


def gather_outputs(
    outputs: Any,
    dim: int | Mapping[str, int],
    group: Group,
    *,
    reduce_gradients: bool,
    layout: Layout = None,
    grad_scale: GradScale = GradScale.NONE,
    check: bool = True,
) -> Any:
    """Gather every tensor in ``outputs`` from the ranks' parts, without padding: the inverse of :func:`slice_inputs`.

    ::

        forward:   S(dim) -> R           all-gather of each tensor
        backward:  R or P(sum) -> S(dim) as in gather

    Args:
        outputs: a tensor, or dicts, lists and tuples of tensors. Other values are kept.
        dim: the dim to gather; or, if ``outputs`` is a dict, a mapping from keys to dims. Other keys are kept.
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None.
        reduce_gradients: True if the ranks compute different things with the result: see :func:`gather`.
        layout: how the dim is cut; the layout that was given to :func:`slice_inputs`.
        grad_scale: see :class:`GradScale`.
        check: see :func:`all_to_all`.

    Returns:
        The same structure.

    Communication: for each tensor that of :func:`gather`, and one small all-gather for ``check``.

    Raises:
        ValueError, TypeError: as :func:`gather`; also if ranks have different keys.
    """

    options = {"group": group, "layout": layout, "grad_scale": grad_scale, "check": check}
    one = partial(gather, reduce_gradients=reduce_gradients, **options)
    return _map_tensors("gather_outputs", one, outputs, dim, None, group, check)


def _map_tensors(
    call: str,
    one: Callable[..., torch.Tensor],
    tree: Any,
    dim: int | Mapping[str, int],
    fill: float | Mapping[str, float] | None,
    group: Group,
    check: bool,
) -> Any:
    """``one(tensor, dim, fill=)`` for each tensor that has a dim, in the same order on all ranks. None: no fill."""

    def describe() -> Facts:
        if (isinstance(dim, Mapping) or isinstance(fill, Mapping)) and not isinstance(tree, Mapping):
            raise TypeError(f"dim and fill by key need a dict of tensors, got {type(tree).__name__}: pass one number")
        missing = [key for key in dim if key not in tree] if isinstance(dim, Mapping) else []
        if missing:
            raise ValueError(f"dim names the keys {missing}, but there are only {list(tree)}")
        return {"tensors": [path for path, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]}, StatusRow()

    consult(peers_of(group), call, describe, check)
    branches = tree if isinstance(tree, Mapping) else {"": tree}
    dims = dim if isinstance(dim, Mapping) else dict.fromkeys(branches, dim)
    results = dict(branches)
    for key in [key for key in branches if key in dims]:
        value = fill.get(key, 0) if isinstance(fill, Mapping) else fill
        options, mapped = {} if value is None else {"fill": value}, []
        # Not a function in this one: an error's traceback would keep what it captures, and so the group.
        for _, leaf in leaves(branches[key]):
            mapped.append(one(leaf, dims[key], **options) if isinstance(leaf, torch.Tensor) else leaf)
        remaining = iter(mapped)
        results[key] = map_leaves(lambda *_, remaining=remaining: next(remaining), branches[key])
    return results if isinstance(tree, Mapping) else results[""]


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
