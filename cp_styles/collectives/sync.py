"""Send samples and objects of one rank to all ranks of a group."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cp_styles._compat import resolve_group
from cp_styles.collectives.inputs import leaves, map_leaves
from cp_styles.collectives.peers import Group, Peers, peers_of
from cp_styles.comm.point_to_point import collective

T = TypeVar("T")


def sync_inputs(sample: T, group: Group, *, device: torch.device | str | None = None) -> Iterator[T]:
    """Iterate over the samples of all ranks, in rank order. Every rank gets the same samples.

    This is for data-parallel loaders under sequence parallelism: the whole group works on the sample of one rank at a
    time. While it computes with one sample, the next one is being sent::

        for sample in sync_inputs(next(loader), group, device="cuda"):
            loss = step(slice_inputs(sample, 1, group))

    Args:
        sample: nested dicts, lists and tuples of tensors and plain values. Structure, values, shapes and dtypes may
            differ between ranks. The tensors that are returned have no gradients.
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None. With None it yields ``sample`` itself.
        device: tensors are moved there before they are sent, and arrive there. The group must have a backend for it
            (``"cuda"`` for NCCL). None: the kind of device that each tensor is on.

    Returns:
        An iterator over as many samples as the group has ranks. Two of them exist at a time. Every rank must take all
        of them. The sample of this rank has its own tensors, not copies.

    Communication, when called: one ``all_gather_object`` of structure, plain values, shapes and dtypes. torch pickles
    them, so plain values can be anything. It also *unpickles what the other ranks sent: use it among ranks that you
    trust*, like every object collective of torch. Then one broadcast for each non-empty tensor, as raw bytes, which are
    not pickled.

    Raises:
        ValueError: on every rank, if one has a tensor that is not plain and dense, or a value that cannot be pickled.
    """
    peers = peers_of(group)
    if peers.size == 1:
        return iter([sample])
    tensors: list[torch.Tensor] = []

    def pack() -> Any:
        return map_leaves(lambda path, leaf: _take_out(path, leaf, device, tensors), sample)

    skeletons = _share(lambda value: _all_gather_object(value, peers), pack, f"the sample of rank {peers.rank}")
    return _iterate(skeletons, tensors, peers)


def sync_object(value: T, group: Group, *, src: int = 0) -> T:
    """The ``value`` of rank ``src``, on every rank.

    Args:
        value: anything that can be pickled. Only the value of rank ``src`` is used.
        group: ProcessGroup, 1-D DeviceMesh, (mesh, axis name), or None. With None it returns ``value``.
        src: a rank *of the group*, not a global rank.

    Returns:
        ``value`` itself on rank ``src``, a copy elsewhere.

    Communication: two broadcasts (``torch.distributed.broadcast_object_list``). It *unpickles what rank src sent: use
    it among ranks that you trust*.

    Raises:
        ValueError: ``src`` is not a rank of the group; or, on every rank, the value cannot be pickled.
    """
    peers = peers_of(group)
    if not 0 <= src < peers.size:
        raise ValueError(f"src={src} is not a rank of a group of {peers.size}")
    if peers.size == 1:
        return value

    def broadcast(shared: Any) -> list[Any]:
        box = [shared]
        with collective(resolve_group(peers.name), "sync_object", *_OF_PICKLE):
            dist.broadcast_object_list(box, group=resolve_group(peers.name), group_src=src)
        return box

    return _share(broadcast, lambda: value if peers.rank == src else None, f"the object of rank {src}")[0]


@dataclass(frozen=True)
class _Slot:
    """Replaces a tensor in a sample that is sent; holds what is needed to allocate it."""

    shape: torch.Size
    dtype: torch.dtype
    device_type: str

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device_type)


@dataclass(frozen=True)
class _Failure:
    """Is sent instead of a value that a rank cannot send."""

    message: str


def _take_out(path: str, leaf: Any, device: torch.device | str | None, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, DTensor) or leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
        raise ValueError(
            f"{path or 'the sample'} is a {type(leaf).__name__}, not a plain dense tensor: pass local, dense ones"
        )
    tensor = leaf.detach() if device is None else leaf.detach().to(device, non_blocking=True)
    tensors.append(tensor)
    return _Slot(tensor.shape, tensor.dtype, tensor.device.type)


_OF_PICKLE = ValueError, TypeError, AttributeError, pickle.PicklingError


def _share(communicate: Callable[[Any], list[Any]], pack: Callable[[], Any], what: str) -> list[Any]:
    """``communicate(pack())``. If one rank cannot pack or pickle its value, all ranks raise."""
    error = None
    try:
        received = communicate(pack())
    except _OF_PICKLE as caught:
        # torch pickles before it sends, so nothing was sent yet, and the other ranks wait for this one.
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
    with collective(resolve_group(peers.name), "cp_styles.collectives", *_OF_PICKLE):
        dist.all_gather_object(gathered, value, group=resolve_group(peers.name))
    return gathered


def _iterate(skeletons: list[Any], local_tensors: list[torch.Tensor], peers: Peers) -> Iterator[Any]:
    coming = _start_broadcast(0, skeletons[0], local_tensors, peers)
    for rank, skeleton in enumerate(skeletons):
        tensors, works = coming
        if rank + 1 < peers.size:
            coming = _start_broadcast(rank + 1, skeletons[rank + 1], local_tensors, peers)
        with collective(resolve_group(peers.name), "sync_inputs"):
            for work in works:
                work.wait()
        arrived = iter(tensors)
        yield map_leaves(lambda _, leaf, arrived=arrived: next(arrived) if isinstance(leaf, _Slot) else leaf, skeleton)


def _start_broadcast(
    src: int, skeleton: Any, local_tensors: list[torch.Tensor], peers: Peers
) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Start to send the tensors of rank ``src``, as raw bytes: NCCL does not support all dtypes (not int16)."""
    slots = [leaf for _, leaf in leaves(skeleton) if isinstance(leaf, _Slot)]
    tensors = local_tensors if peers.rank == src else [slot.empty() for slot in slots]
    group, works = resolve_group(peers.name), []
    with collective(group, "sync_inputs"):
        for tensor in tensors:
            if tensor.numel():
                wire = tensor.contiguous().view(-1).view(torch.uint8)
                works.append(dist.broadcast(wire, group=group, group_src=src, async_op=True))
    return tensors, works
