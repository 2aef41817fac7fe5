"""Samples that live on one rank each, made known to the whole group one after another."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cp_styles._compat import resolve_group
from cp_styles.collectives._group import Group, Peers, peers_of
from cp_styles.collectives._tree import leaves, map_leaves

T = TypeVar("T")


def sync_inputs(sample: T, group: Group, *, device: torch.device | str | None = None) -> Iterator[T]:
    """Each rank has its own sample; iterate over all of them, in rank order, the same on every rank.

    For data-parallel loaders under sequence parallelism: the group works on one rank's sample at a time, together.
    While it computes with one, the next one is already on its way::

        for sample in sync_inputs(next(loader), group, device="cuda"):
            loss = step(slice_inputs(sample, 1, group))

    Args:
        sample: dicts, lists and tuples, nested, of tensors and plain values; structure, values, shapes and dtypes are
            this rank's own. Tensors are data: they come out without gradients.
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None, for which it yields ``sample`` itself.
        device: where tensors are moved before they are sent, and where they arrive; one that the group has a backend
            for (``"cuda"`` for NCCL). None: the kind of device each tensor is on.

    Returns:
        An iterator over as many samples as the group has ranks. Two of them exist at a time. Every rank must take all
        of them. What comes from this rank are its own tensors, not copies.

    Communicates, when called, one ``all_gather_object``: structure, plain values, shapes and dtypes; torch pickles
    them, so that plain values can be anything, and *unpickles what the peers sent: use it among ranks you trust*, as
    any torch object collective. Then one broadcast of each non-empty tensor, as raw bytes: nothing of those is pickled.

    Raises:
        ValueError: on every rank, when one has a tensor that is not plain and dense, or a value that cannot be pickled.
    """
    peers = peers_of(group)
    if peers.size == 1:
        return iter([sample])
    own: list[torch.Tensor] = []

    def pack() -> Any:
        return map_leaves(lambda path, leaf: _take_out(path, leaf, device, own), sample)

    skeletons = _share(lambda value: _all_gather_object(value, peers), pack, f"the sample of rank {peers.rank}")
    return _iterate(skeletons, own, peers)


def sync_object(value: T, group: Group, *, src: int = 0) -> T:
    """The ``value`` of one rank, on every rank.

    Args:
        value: anything that can be pickled; only the one of rank ``src`` matters.
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None, for which it returns ``value``.
        src: the rank *in the group* whose value it is.

    Returns:
        ``value`` itself on rank ``src``, elsewhere a copy of it.

    Communicates two broadcasts: ``torch.distributed.broadcast_object_list``, which pickles. It *unpickles what rank
    src sent: use it among ranks you trust*.

    Raises:
        ValueError: when ``src`` is not a rank of the group; on every rank, when the value cannot be pickled.
    """
    peers = peers_of(group)
    if not 0 <= src < peers.size:
        raise ValueError(f"src={src} is not a rank of a group of {peers.size}")
    if peers.size == 1:
        return value

    def broadcast(shared: Any) -> list[Any]:
        box = [shared]
        dist.broadcast_object_list(box, group=resolve_group(peers.name), group_src=src)
        return box

    return _share(broadcast, lambda: value if peers.rank == src else None, f"the object of rank {src}")[0]


@dataclass(frozen=True)
class _Slot:
    """Stands where a tensor was."""

    shape: torch.Size
    dtype: torch.dtype
    device_type: str

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device_type)


@dataclass(frozen=True)
class _Failure:
    """Goes out instead of what a rank could not send."""

    message: str


def _take_out(path: str, leaf: Any, device: torch.device | str | None, own: list[torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, DTensor) or leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
        raise ValueError(
            f"{path or 'the sample'} is a {type(leaf).__name__}, not a plain dense tensor: pass local, dense ones"
        )
    tensor = leaf.detach() if device is None else leaf.detach().to(device, non_blocking=True)
    own.append(tensor)
    return _Slot(tensor.shape, tensor.dtype, tensor.device.type)


def _share(communicate: Callable[[Any], list[Any]], pack: Callable[[], Any], what: str) -> list[Any]:
    """``communicate(pack())``; what cannot be packed or pickled raises on all ranks."""
    error = None
    try:
        received = communicate(pack())
    except (ValueError, TypeError, AttributeError, pickle.PicklingError) as caught:
        # Raised before anything was sent: torch pickles first. The peers wait for this rank.
        error = ValueError(f"{what} cannot be sent: {caught}")
        received = communicate(_Failure(str(error)))
    if error is not None:
        raise error
    failures = [value.message for value in received if isinstance(value, _Failure)]
    if failures:
        raise ValueError("\n".join(failures))
    return received


def _all_gather_object(value: Any, peers: Peers) -> list[Any]:
    gathered: list[Any] = [None] * peers.size
    dist.all_gather_object(gathered, value, group=resolve_group(peers.name))
    return gathered


def _iterate(skeletons: list[Any], own: list[torch.Tensor], peers: Peers) -> Iterator[Any]:
    coming = _start_broadcast(0, skeletons[0], own, peers)
    for rank, skeleton in enumerate(skeletons):
        tensors, works = coming
        if rank + 1 < peers.size:
            coming = _start_broadcast(rank + 1, skeletons[rank + 1], own, peers)
        for work in works:
            work.wait()
        arrived = iter(tensors)
        yield map_leaves(lambda _, leaf, arrived=arrived: next(arrived) if isinstance(leaf, _Slot) else leaf, skeleton)


def _start_broadcast(
    src: int, skeleton: Any, own: list[torch.Tensor], peers: Peers
) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Start sending the tensors of rank ``src``: raw bytes, because NCCL does not know every dtype (int16, say)."""
    slots = [leaf for _, leaf in leaves(skeleton) if isinstance(leaf, _Slot)]
    tensors = own if peers.rank == src else [slot.empty() for slot in slots]
    group, works = resolve_group(peers.name), []
    for tensor in tensors:
        if tensor.numel():
            wire = tensor.contiguous().view(-1).view(torch.uint8)
            works.append(dist.broadcast(wire, group=group, group_src=src, async_op=True))
    return tensors, works
