"""Send the samples of all ranks to all ranks of a group, one by one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cp_styles._lib.compat import resolve_group
from cp_styles.collectives.peers import CallSignature, Group, Peers, compare_calls, get_peers
from cp_styles.comm.agreement import StatusRow
from cp_styles.comm.point_to_point import collective

T = TypeVar("T")


def sync_inputs(sample: T, mesh: Group, *, device: torch.device | str | None = None) -> Iterator[T]:
    """Iterate over the samples of all ranks, in rank order. Every rank gets the same samples.

    This is for data-parallel loaders under sequence parallelism: the whole group works on the sample of one rank at a
    time. While it computes with one sample, the next one is being sent::

        for sample in sync_inputs(next(loader), mesh, device="cuda"):
            loss = step(split(sample["tokens"], 1, mesh))

    Args:
        sample: nested dicts, lists and tuples of tensors and plain values. Structure, values, shapes and dtypes may
            differ between ranks. The tensors that are returned have no gradients.
        mesh: see :mod:`cp_styles.collectives`. With None it yields ``sample`` itself.
        device: tensors are moved to it before they are sent, and arrive on it. The group must have a backend for it
            (``"cuda"`` for NCCL). None: the device type of each tensor.

    Returns:
        An iterator over as many samples as the group has ranks. Two of them exist at a time. Every rank must take all
        of them. The sample of this rank has its own tensors, not copies.

    Communication, when called: one agreement of the ranks (:class:`~cp_styles.Checks`), and one
    ``all_gather_object`` of structure, plain values, shapes and dtypes. torch pickles them, so plain values can be
    anything. It also *unpickles messages of all ranks: use it among ranks that you trust*, like every object collective
    of torch. Then one broadcast for each non-empty tensor, as raw bytes, which are not pickled.

    Raises:
        ValueError: on every rank, if one has a tensor that is not plain and dense, or a value that cannot be pickled.
    """
    peers = get_peers(mesh)
    if peers.size == 1:
        return iter([sample])
    tensors: list[torch.Tensor] = []

    skeletons: list[Any] = [None] * peers.size

    def describe() -> CallSignature:
        try:
            skeleton = map_leaves(lambda path, leaf: _extract_tensor(path, leaf, device, tensors), sample)
            pickle.dumps(skeleton)  # all_gather_object will do it where no rank can notify its peers
        except (ValueError, TypeError, AttributeError, pickle.PicklingError) as error:
            raise ValueError(f"the sample of rank {peers.rank} cannot be sent: {error}") from None
        skeletons[peers.rank] = skeleton
        return {}, StatusRow()

    compare_calls(peers, "sync_inputs", describe, check=True)  # else a rank that cannot send leaves its peers waiting
    group = resolve_group(peers.name)
    with collective(group, "cp_styles.collectives"):
        dist.all_gather_object(skeletons, skeletons[peers.rank], group=group)
    return _iterate(skeletons, tensors, peers)


@dataclass(frozen=True)
class _Slot:
    """Replaces a tensor in a sample that is sent; holds what is needed to allocate it."""

    shape: torch.Size
    dtype: torch.dtype
    device_type: str

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device_type)


def _extract_tensor(path: str, leaf: Any, device: torch.device | str | None, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, DTensor) or leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
        raise ValueError(
            f"{path or 'the sample'} is a {type(leaf).__name__}, not a plain dense tensor: pass local, dense ones"
        )
    tensor = leaf.detach() if device is None else leaf.detach().to(device, non_blocking=True)
    tensors.append(tensor)
    return _Slot(tensor.shape, tensor.dtype, tensor.device.type)


def _iterate(skeletons: list[Any], local_tensors: list[torch.Tensor], peers: Peers) -> Iterator[Any]:
    following = _start_broadcast(0, skeletons[0], local_tensors, peers)
    for rank, skeleton in enumerate(skeletons):
        tensors, works = following
        if rank + 1 < peers.size:
            following = _start_broadcast(rank + 1, skeletons[rank + 1], local_tensors, peers)
        with collective(resolve_group(peers.name), "sync_inputs"):
            for work in works:
                work.wait()
        received = iter(tensors)
        yield map_leaves(lambda _, leaf, queue=received: next(queue) if isinstance(leaf, _Slot) else leaf, skeleton)


def _start_broadcast(
    src: int, skeleton: Any, local_tensors: list[torch.Tensor], peers: Peers
) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Start to broadcast the tensors of rank ``src``."""
    slots = [leaf for _, leaf in leaves(skeleton) if isinstance(leaf, _Slot)]
    tensors = local_tensors if peers.rank == src else [slot.empty() for slot in slots]
    group, works = resolve_group(peers.name), []
    with collective(group, "sync_inputs"):
        for tensor in tensors:
            if tensor.numel():
                wire = tensor.contiguous().view(-1).view(torch.uint8)  # NCCL does not support all dtypes, such as int16
                works.append(dist.broadcast(wire, group=group, group_src=src, async_op=True))
    return tensors, works


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
