"""Point-to-point exchange between the ranks of a group, and agreement on what they are about to do."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_styles._compat import is_traced, resolve_group


class TransferError(RuntimeError):
    """A transfer with another rank failed: that rank is gone, or was not there within the group's timeout."""


# For whom a group is in use, for messages; of a part of a group, the group.
_users: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def note_user(group: dist.ProcessGroup, user: str) -> None:
    """Have errors of transfers in ``group``, and in parts of it, name ``user``."""
    _users[group] = user
    for part in _parts.get(group, {}).values():
        _users[part] = user


class Pending:
    """Transfers under way. Keeps its tensors alive; :meth:`wait` before reading what was received.

    ``peers`` are the ranks of ``group`` at the other end, one a work, or all of them where works are joined.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        tensors: Sequence[torch.Tensor],
        peers: Sequence[int] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._works = works
        self._tensors = tensors
        self._peers = peers
        self._group = group

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self._works

    def wait(self) -> None:
        """Wait for all transfers: the host for gloo, the current stream for NCCL. Waiting again does nothing.

        Raises:
            TransferError: when one failed. The others are not waited for: they may be with ranks that wait themselves.
        """
        for index, work in enumerate(self._works):
            if work is not None:
                try:
                    work.wait()
                except RuntimeError as error:
                    peers = self._peers[index : index + 1] if len(self._works) == len(self._peers) else self._peers
                    raise _failed(error, peers, self._group) from error
        self._works, self._tensors = (), ()


def _failed(error: RuntimeError, peers: Sequence[int], group: dist.ProcessGroup | None) -> TransferError:
    """The transport's error as one that says who was at the other end, and for whom."""
    user = "attention" if group is None else _users.get(group, "attention")
    ranks = list(peers) if group is None else [dist.get_global_rank(group, peer) for peer in peers]
    return TransferError(
        f"{user}: a transfer with rank {', '.join(map(str, ranks))} (of all processes) failed: that rank is gone, "
        f"or was not there in time; its own log says why. The transport says: {error}"
    )


def exchange(
    sends: Sequence[tuple[int, torch.Tensor]],
    receives: Sequence[tuple[int, torch.Tensor]],
    group: dist.ProcessGroup | None,
) -> Pending:
    """Start sending and receiving contiguous tensors, all at once; peers are ranks *of the group*.

    Communication: one send a pair in ``sends``, one receive a pair in ``receives``; bytes are the tensors' own. Between
    two ranks messages arrive in the order in which they were sent. Empty tensors do not travel: both sides know
    the plan, so both leave them out.
    """
    if group is not None and all(tensor.is_cpu for _, tensor in (*receives, *sends)):
        # The same without a list of ops, whose making costs more than sending small messages does; a backend for CPUs
        # has nothing to join. Sends come first: gloo's own thread then moves the data, when it hears of the receive.
        # The other way round this one would, with a lock that the other needs for what arrives, and polls for.
        receives, sends = ([(peer, x) for peer, x in pairs if x.numel()] for pairs in (receives, sends))
        works, peers = [], [peer for peer, _ in (*sends, *receives)]
        for call, pairs in ((group.send, sends), (group.recv, receives)):
            for peer, tensor in pairs:
                try:
                    works.append(call([tensor], peer, 0))
                except RuntimeError as error:
                    raise _failed(error, (peer,), group) from error
        return Pending(works, [tensor for _, tensor in (*receives, *sends)], peers, group)
    ops = [
        dist.P2POp(call, tensor, group=group, group_peer=peer)
        for call, pairs in ((dist.irecv, receives), (dist.isend, sends))
        for peer, tensor in pairs
        if tensor.numel()
    ]
    peers = [peer for peer, tensor in (*receives, *sends) if tensor.numel()]
    try:
        works = dist.batch_isend_irecv(ops) if ops else []
    except RuntimeError as error:
        raise _failed(error, peers, group) from error
    return Pending(works, [op.tensor for op in ops], peers, group)


def gather_numbers(numbers: Sequence[int], group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """Every rank's row of int64 numbers, on every rank, in group order.

    This is how one rank's problem becomes every rank's error. Communication: one all-gather of ``len(numbers)`` int64
    a rank; on the host where the group has a CPU backend, else on the device, which waits for it.
    """
    refuse_destroyed(group)
    if group.size() == 1:
        return [tuple(numbers)]
    mine = _row(numbers, group)
    return [tuple(row) for row in torch.ops.cp_styles.gather_numbers(mine, group.group_name).tolist()]


def offer_numbers(numbers: Sequence[int], group: dist.ProcessGroup, seconds: float) -> None:
    """:func:`gather_numbers` for a rank that has failed: it reads nothing, and waits for the others so long at most."""
    mine = _row(numbers, group)
    rows = mine.new_empty(group.size(), mine.numel())
    with contextlib.suppress(RuntimeError):  # the failure on its way up says more
        work = dist.all_gather(list(rows), mine, group=group, async_op=True)
        if work is not None:
            work.wait(timedelta(seconds=seconds))


def _row(numbers: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    device = torch.device("cpu") if has_cpu_backend(group) else torch.device("cuda", torch.cuda.current_device())
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def refuse_destroyed(group: dist.ProcessGroup) -> None:
    """Raise RuntimeError where a group is used after its end. No communication."""
    try:
        dist.get_backend(group)
    except (KeyError, TypeError, ValueError, RuntimeError, AssertionError):  # what torch makes of a group it has not
        raise RuntimeError(
            "the process group over which this attention is context parallel was destroyed (destroy_process_group): "
            "apply the style to a new module, or call the attention, with a mesh of the new process groups"
        ) from None


# An op, so that a selective checkpoint can keep what it returned and its recomputation need not ask again.
torch.library.define(
    "cp_styles::gather_numbers", "(Tensor mine, str group_name) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


@torch.library.impl("cp_styles::gather_numbers", "CompositeExplicitAutograd")
def _gather_numbers(mine: torch.Tensor, group_name: str) -> torch.Tensor:
    group = resolve_group(group_name)
    rows = mine.new_empty(group.size(), mine.numel())
    dist.all_gather(list(rows), mine, group=group)
    return rows


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether small host tensors can be exchanged in this group without the device."""
    return "cpu" in dist.get_backend_config(group)


def group_in_order(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of a 1-D mesh, whose ranks have the same places in both.

    Raises:
        ValueError: on every rank, where the mesh has them in another order: a rank would have the part of the sequence
            of its place in the one for DTensor and for get_local_rank(), and of that in the other for who communicates.
    """
    group = mesh.get_group()
    if is_traced():  # which knows no contents of a mesh
        return group
    ranks, known = mesh.mesh.tolist(), dist.get_process_group_ranks(group)
    if ranks != known:
        raise ValueError(
            f"mesh axis {mesh.mesh_dim_names} has the ranks {ranks}, in another order than its process group, {known}: "
            f"make the mesh with ranks that ascend along the axis of the sequence"
        )
    return group


def shares_ranks(mesh: DeviceMesh, group: dist.ProcessGroup) -> bool:
    """Whether some axis of ``mesh`` spreads over more than one rank of ``group``. No communication."""
    ranks = set(dist.get_process_group_ranks(group))
    return any(
        len(ranks.intersection(dist.get_process_group_ranks(mesh.get_group(axis)))) > 1 for axis in range(mesh.ndim)
    )


# The parts of a group, by their ranks; never the group itself, which would then keep itself alive.
_parts: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def split_group(
    group: dist.ProcessGroup | None, size: int
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """``(neighbours, strangers)``: the group's rank is (r // size, r % size); the ranks that share the first part, and
    those that share the second. None stands for a group of one.

    Made once a group and size. Communication, the first time: the set-up of up to P process groups, which all ranks of
    the group have to reach, but nobody else.
    """
    if group is None or group.size() == 1:
        return None, None
    members, rank = dist.get_process_group_ranks(group), group.rank()
    first = rank - rank % size
    neighbours, strangers = members[first : first + size], members[rank % size :: size]
    return _part_of(neighbours, group, members), _part_of(strangers, group, members)


def _part_of(ranks: list[int], group: dist.ProcessGroup, members: list[int]) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if ranks == members:
        return group
    parts = _parts.setdefault(group, {})
    if tuple(ranks) not in parts:
        made = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)  # an int stands for "not a member", which this rank is
        parts[tuple(ranks)] = made
        _users[made] = _users.get(group, "attention")
    return parts[tuple(ranks)]
