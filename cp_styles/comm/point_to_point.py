"""Point-to-point exchange between the ranks of a group, the all-gather of a row of numbers, and parts of a group."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
import torch.distributed as dist

from cp_styles._lib.compat import (
    ASYNC_ALL_TO_ALL,
    connect_gloo,
    cpu_backend_of,
    dispatch_modes_entered,
    exchange_texts,
    let_profilers_record,
    make_part_of_group,
    makes_batches,
    resolve_group,
    start_batch,
    without_dispatch_modes,
    without_torch_func,
)
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.group_state import GroupState, Operations, register_part, state_of


class TransferError(RuntimeError):
    """A transfer with another rank failed: that rank has ended, or did not take part within the group's timeout.

    The process groups cannot be used any more. For guarantees see the page "When a rank fails".
    """


Message: TypeAlias = tuple[bool, int, torch.Tensor]
"""Whether it is sent, the peer, and the tensor."""


@dataclass(eq=False, slots=True)
class PendingTransfers:
    """Running transfers. Call :meth:`wait` before you read the tensors of ``messages``, which live until then.

    There is one work for each message, unless works are joined.
    """

    works: Sequence[dist.Work | None]
    messages: Sequence[Message]
    group: dist.ProcessGroup | None

    def wait(self) -> None:
        """Wait for all transfers: on the host for gloo, on the current stream for NCCL. A second call does nothing.

        Raises:
            TransferError: a transfer failed. There is no wait for the remaining transfers: their ranks may wait too.
        """
        # Receives come last in the list and are waited for first: gloo ends a receive at once when its rank has ended.
        # It forgets a send that is partly written, and a wait for a large message would end with the group's timeout.
        for index, work in reversed([*enumerate(self.works)]):
            if work is not None:
                try:
                    work.wait()
                except RuntimeError as error:
                    joined = len(self.works) != len(self.messages)
                    messages = self.messages if joined else self.messages[index : index + 1]
                    raise transfer_error(error, [peer for _, peer, _ in messages], self.group) from error
        self.works, self.messages = (), ()


@dataclass(eq=False)
class Operation:
    """The messages of one operation over a group, as a context: see [Note: operations] in group_state.py.

    ``state``: the state of the group, if the caller has checked that it is not aborted. ``backward_of``: in a backward,
    the number of its forward; 0 in a forward. ``common``: errors that the other ranks raise too. ``meets``: the ranks
    agree inside of the context, by a deferred check.
    """

    group: dist.ProcessGroup
    state: GroupState | None = None
    backward_of: int = 0
    common: tuple[type[Exception], ...] = ()
    meets: bool = field(default=False, kw_only=True)

    def __enter__(self) -> None:
        self._state = self.state or check_not_aborted(self.group)
        operations = self._state.operations
        self._outer = operations.agreed
        operations.backward_of, operations.agreed = self.backward_of, not self.meets
        operations.unmet = bool(self.backward_of) and not self.meets

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        operations = self._state.operations
        try:
            if error is None and operations.check is None:
                return
            interrupted = error is not None and not isinstance(error, Exception)
            if interrupted:
                operations.check = None  # the check holds the group, whose connections must end
            operations.run_deferred_check()  # raises if the ranks disagree, which may be the cause
            if error is not None and (interrupted or (operations.agreed and self._state.turn.must_tell(error))):
                if not isinstance(error, self.common):
                    abort_group(self.group, error)
                self._state.turn.note_known(error)
        finally:
            operations.agreed = self._outer


def check_not_aborted(group: dist.ProcessGroup, user: str = "") -> GroupState:
    """The state of a group. Raises TransferError if this rank has left an operation over it half way."""
    state = state_of(group)
    operations = state.operations
    if operations.broken:
        refuse_destroyed(group)
        raise TransferError(
            f"{operations.name_of(user or operations.user)}: this rank has left an operation of the ranks half way, by "
            f"{operations.broken}. The others were not given what it owed them, so the ranks of this group cannot go "
            "on together: end the job, or destroy the process groups on all ranks and make new ones"
            f"{see('A rank that has left half way')}"
        )
    return state


def abort_group(group: dist.ProcessGroup, error: BaseException) -> None:
    """End the connections of a group and its parts: all ranks that wait for this one get an error at once."""
    state = state_of(group)
    if state.operations.broken or group.size() == 1:
        return
    state.operations.broken = f"{type(error).__name__}: {error}"[:200]
    for member in (group, *state.parts.values()):
        gloo = state_of(member).host
        with contextlib.suppress(RuntimeError, TypeError):  # the group was destroyed
            gloo = gloo or cpu_backend_of(member, "gloo")
        if gloo:
            end_connections(gloo)


def transfer_error(
    error: RuntimeError, peers: Sequence[int], group: dist.ProcessGroup | None, user: str = ""
) -> TransferError:
    """A TransferError for an error of the transport. It names this rank, the other ranks and the user of the group."""
    operations = Operations() if group is None else state_of(group).operations
    ranks = peers if group is None else [dist.get_global_rank(group, peer) for peer in peers if peer != group.rank()]
    late = "timed out" in str(error).lower()  # gloo; else the connection was ended
    why = "that rank did not take part in time" if late else "that rank has ended, or left an operation by an error"
    return TransferError(
        f"{operations.name_of(user or operations.user)}: on rank {dist.get_rank()}, a transfer with rank "
        f"{', '.join(map(str, ranks))} (of all processes) failed: {why}; its log has the reason"
        f"{see('A rank that has ended')}. Error of the transport: {error}"
    )


@contextlib.contextmanager
def collective(group: dist.ProcessGroup, user: str, *common: type[Exception]) -> Iterator[None]:
    """A context for a collective of torch over a group. ``user`` is the function that calls it, for messages.

    ``common`` are errors that the other ranks raise too, or that are reported later. After any other error they get a
    TransferError at once.

    Raises:
        TransferError: for an error of the transport.
    """
    check_not_aborted(group, user).operations.run_deferred_check()
    try:
        yield
    except common:
        raise
    except BaseException as error:
        abort_group(group, error)
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            raise transfer_error(error, range(group.size()), group, user) from error
        raise


def exchange(
    sends: Sequence[tuple[int, torch.Tensor]],
    receives: Sequence[tuple[int, torch.Tensor]],
    group: dist.ProcessGroup | None,
    state: GroupState | None = None,
) -> PendingTransfers:
    """Start to send and receive contiguous tensors, all at once. The numbers in the pairs are ranks *of the group*.

    Communication: one send for each pair in ``sends``, one receive for each pair in ``receives``. Between two ranks,
    messages arrive in the order of sending. Empty tensors are skipped on both sides. Over NCCL the messages are one
    batch, or several batches if they are many: see :func:`cut_batches`. A deferred check of the ranks,
    ``Operations.check``, runs first. ``state``: the state of the group, if the caller has it.
    """
    if group is None:  # of one rank, which has no messages
        return PendingTransfers((), (), None)
    state = state or state_of(group)
    operations = state.operations
    if operations.check is not None:
        operations.run_deferred_check()
    operation = 2 * operations.backward_of + 1 if operations.backward_of else 2 * operations.forwards
    works, tag = [], _TAG_OF_TENSORS + operation % _TAG_OF_TENSORS
    # Sends come first, so that gloo's own thread moves the data when it gets the receive. In the reverse order this
    # thread would move the data, and hold a lock for which gloo's thread polls.
    sent = [(True, *pair) for pair in sends if 0 not in pair[1].shape]
    messages = [*sent, *[(False, *pair) for pair in receives if 0 not in pair[1].shape]]
    if not messages or not makes_batches(group, messages[0][2].device):
        for is_sent, peer, tensor in messages:
            try:
                works.append((group.send if is_sent else group.recv)([tensor], peer, tag))
            except RuntimeError as error:
                raise transfer_error(error, (peer,), group) from error
    else:
        peers = tuple([message[:2] for message in messages])
        batches = state.batches.get(peers)
        if batches is None:
            batches = state.batches.put(peers, cut_batches(peers, group.rank(), group.size(), MOST_OPERATIONS))
        for batch in batches:
            try:
                works.append(move_batch([messages[index] for index in batch], group, tag))
            except RuntimeError as error:
                raise transfer_error(error, [peer for _, peer, _ in messages], group) from error
    return PendingTransfers(works, messages, group)


MOST_OPERATIONS = 256
"""The largest number of sends and receives in one batch."""
# NCCL splits a larger group into launches by its own budget. Ranks may split at different operations, so that a send
# waits for a receive of a later launch. The number is the limit that https://github.com/pytorch/pytorch/issues/174288
# and its pull request 174942 propose. Not run on a GPU.

# Messages from one rank to another that stay in one batch. Gradients are two messages, of keys and of values.
_MESSAGES_OF_PAIR = 2


def cut_batches(messages: Sequence[tuple[bool, int]], rank: int, ranks: int, most: int) -> list[list[int]]:
    """The indices of the messages (is_sent, peer) in each batch, which has at most so many operations."""
    # A rank's batches run one by one, so the operations of one batch must not need two batches of a peer. The batch of
    # a message depends on numbers that its sender and its receiver share: the number of ranks, the distance from sender
    # to receiver, and the number of earlier messages from this sender to this receiver. So both put the message into
    # the batch of the same number. All messages of batch n are between batches n, and these can end without any batch
    # of a higher number. Hence all batches end: number 0 first, then number 1, and so on. The number of all messages of
    # a rank plays no role, because it differs between ranks.
    #
    # The size: for each distance, a rank has one receiver and one sender, and a batch has _MESSAGES_OF_PAIR of each.
    distances = max(most // (2 * _MESSAGES_OF_PAIR), 1)
    batches: dict[tuple[int, int], list[int]] = {}
    before = Counter[tuple[bool, int]]()
    for index, (is_sent, peer) in enumerate(messages):
        distance = (peer - rank if is_sent else rank - peer) % ranks
        number = before[is_sent, peer] // _MESSAGES_OF_PAIR, (distance - 1) % ranks // distances
        before[is_sent, peer] += 1
        batches.setdefault(number, []).append(index)
    return [batches[number] for number in sorted(batches)]


def move_batch(batch: Sequence[Message], group: dist.ProcessGroup, tag: int) -> dist.Work:
    """Start the messages of a batch at once."""
    # As dist.batch_isend_irecv, whose objects take more than 20 calls for each message.
    end = start_batch(group, batch[0][2].device)
    for is_sent, peer, tensor in batch:
        (group.send if is_sent else group.recv)([tensor], peer, tag)
    return end()


MOST_OVER_GLOO = 2**18  # bytes of the largest block of an all-to-all


def has_all_to_all(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> bool:
    """Whether one call moves the blocks of all ranks: over NCCL, and over gloo if the largest has few ``nbytes``.

    ``nbytes`` must be equal on all ranks. A dry run says by ``runs_on`` which device it predicts. Gloo's all-to-all has
    no tag: it would mix two backwards that ranks without agreement run in another order.
    """
    predicted = getattr(group, "runs_on", None)
    if makes_batches(group, device) if predicted is None else predicted.type == "cuda":
        return 2 * group.size() <= MOST_OPERATIONS
    over_gloo = predicted or (
        device.type == "cpu" and cpu_backend_of(group, "gloo") and not state_of(group).operations.unmet
    )
    return bool(over_gloo) and nbytes <= MOST_OVER_GLOO


def post_all_to_all(
    received: torch.Tensor, sent: torch.Tensor, sizes: tuple[list[int], list[int]], group: dist.ProcessGroup
) -> PendingTransfers:
    """Start an all-to-all of flat buffers, with a block of these ``sizes`` for each rank, after a deferred check."""
    state_of(group).operations.run_deferred_check()
    try:
        # As dist.all_to_all_single, without its checks.
        work = group.alltoall_base(received, sent, *sizes, ASYNC_ALL_TO_ALL)
    except RuntimeError as error:
        raise transfer_error(error, range(group.size()), group) from error
    return PendingTransfers([work], [(True, peer, sent) for peer in range(group.size())], group)


def open_group(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Set up a group on a device, before the first :func:`exchange` over it. All its ranks must call this.

    Communication: one all-reduce of one number, the first time.
    """
    # NCCL sets up a group in its first operation, in which all ranks must take part. A rank whose plan has no messages
    # takes no part in a batch, so its peers would wait forever.
    if group is None or group.size() == 1 or state_of(group).opened or not makes_batches(group, device):
        return
    with collective(group, state_of(group).operations.user):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    state_of(group).opened = True


# -- the all-gather of a row of numbers --

# The number of numbers in a row of the agreement.
WIDTH = 9
# Tags of rows start here, after the tags of keys, values and gradients. Users count from 0.
_FIRST_TAG, _TAGS, _TAG_OF_TENSORS = 2**30, 2**30, 2**29
# The reason of a rank that has failed: its size, and its tag, which no row has before 2**30 - 2 rows.
_REASON_BYTES, _REASON_TAG = 1024, _FIRST_TAG + _TAGS - 2


def end_connections(gloo: Any) -> None:
    """End all connections of a gloo backend. Waits of other ranks for this rank raise at once."""
    # Gloo ends its connections when a wait times out: see unbound_buffer.cc, ``signalException``. Such a wait needs a
    # live connection, and a peer may have ended its own. So this function waits for every peer.
    never, rank = torch.empty(1, device="cpu"), gloo.rank()
    for distance in range(1, gloo.size()):
        with contextlib.suppress(RuntimeError):
            gloo.recv([never], (rank + distance) % gloo.size(), _FIRST_TAG + _TAGS - 1).wait(timedelta(milliseconds=1))


Posted: TypeAlias = dist.Work | RuntimeError
"""A posted message, or the error of posting it. The error affects one peer only."""


class _Gather(NamedTuple):
    """The messages of one gather. ``receives`` are keyed by rank, and may be posted before the gather starts."""

    rows: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    sends: list[Posted]
    receives: dict[int, Posted]


# [Note: direct messages] Gloo runs an all-gather in its own thread, in 2 (P - 1) messages, one after the other. Direct
# messages are posted by the calling thread, all at once. They take 0.10 ms instead of 0.23 ms on 2 ranks, 0.8 instead
# of 3.2 on 4, 1.9 instead of 11 on 8, and 97 instead of 168 on 64, if the ranks share 2 processor cores. A gather also
# posts the receives of the next gather. So a row arrives before its receiver waits for it, and the last rank does not
# wait.
#
# [Note: numbered gathers] All ranks count the gathers over a group, also gathers that they leave unread. The number is
# in the tag of each message, so an unread row is never mixed up with a row of a later gather. Two ranks exchange
# messages in the order of posting. So when a gather is complete, all earlier gathers are. Their buffers are kept until
# then: gloo stops reading from a rank whose message has lost its buffer.
class Mailbox:
    """Runs the gathers of a group. ``gloo`` is a backend between its ranks."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._shape = gloo.size(), WIDTH
        self._rank = gloo.rank()
        self._peers = [(self._rank + distance) % gloo.size() for distance in range(1, gloo.size())]
        self._gathers: dict[int, _Gather] = {}
        self._started = 0

    def start(self, row: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Send ``row`` to all peers. Returns the number of the gather, and the rows of all ranks, valid after ``wait``.

        It never fails: :meth:`wait` returns the rank that cannot be reached.
        """
        number, gathers = self._started, self._gathers
        for each in (number, number + 1):
            if each not in gathers:
                with torch.inference_mode(False):  # a checkpoint may keep the rows, and needs their version
                    rows = torch.empty(self._shape, dtype=torch.int64, device="cpu")
                gathers[each] = _Gather(rows, rows.unbind(), [], {})
        gathers[number].parts[self._rank].copy_(row)
        self._started = number + 1
        let_profilers_record(False)  # receives of the next row may outlive a profiler
        try:
            # Post messages of the previous row too: an interrupt may have left some out, for which peers wait.
            for of_row in (number - 1, number):
                if (current := gathers.get(of_row)) is None:
                    continue
                # The message, and the request for the next row, go to a peer together and wake it once.
                for peer in self._peers[len(current.sends) :]:
                    for received in (of_row, of_row + 1):
                        gather, tag = gathers[received], _FIRST_TAG + received % _TAGS
                        if peer not in gather.receives:
                            try:
                                gather.receives[peer] = self._gloo.recv([gather.parts[peer]], peer, tag)
                            except RuntimeError as error:
                                gather.receives[peer] = error.with_traceback(None)
                    try:
                        sent = self._gloo.send([current.parts[self._rank]], peer, _FIRST_TAG + of_row % _TAGS)
                        current.sends.append(sent)
                    except RuntimeError as error:
                        current.sends.append(error.with_traceback(None))
        finally:
            let_profilers_record(True)
        return number, gathers[number].rows

    def wait(self, number: int) -> tuple[int, RuntimeError] | None:
        """Wait until all rows of the gather have arrived. Returns the rank of a row that cannot arrive, and the error.

        The error is returned without its traceback, which would keep the connections open.
        """
        gather = self._gathers.get(number)
        if gather is None:  # a later gather is complete
            return None
        for peer in reversed(self._peers):
            posted = gather.receives[peer]
            if isinstance(posted, RuntimeError):
                return peer, posted
            try:
                posted.wait()
            except RuntimeError as error:
                return peer, error.with_traceback(None)
        # A rank posts the receive of this rank's row before it sends its own. So the sends will be written. They are
        # kept without a wait, because a wait of gloo may not end if the peer has ended since.
        for old in list(self._gathers):
            if old < number:
                self._gathers.pop(old, None)
        return None

    def send_text(self, text: str, peers: Sequence[int]) -> None:
        """Send a text of at most _REASON_BYTES to ``peers``, which call :meth:`read_text`. Waits until they have it."""
        data = [*text.encode(errors="replace").ljust(_REASON_BYTES)[:_REASON_BYTES]]
        message = torch.tensor(data, dtype=torch.uint8, device="cpu")
        for sent in [self._gloo.send([message], peer, _REASON_TAG) for peer in peers]:
            sent.wait()

    def read_text(self, peer: int) -> str:
        """The text that a peer sends."""
        message = torch.empty(_REASON_BYTES, dtype=torch.uint8, device="cpu")
        self._gloo.recv([message], peer, _REASON_TAG).wait()
        return bytes(message.tolist()).decode(errors="replace").rstrip()


def gather_numbers(numbers: Sequence[int], group: dist.ProcessGroup) -> Sequence[Sequence[int]]:
    """The rows of int64 numbers of all ranks, on every rank, in group order.

    Communication: one all-gather of ``len(numbers)`` int64 from each rank. It runs on the host: over the CPU backend of
    the group, or over an additional gloo group, which the first call sets up. Over gloo, rows of ``WIDTH`` numbers are
    direct messages, see [Note: direct messages]. Without gloo it runs on the device, and the host waits.
    """
    check_not_aborted(group)
    return start_numbers(numbers, group)()


def start_numbers(
    numbers: Sequence[int], group: dist.ProcessGroup, state: GroupState | None = None
) -> Callable[[], Sequence[Sequence[int]]]:
    """Start :func:`gather_numbers` over a group that is not aborted. ``state`` is its state, if the caller has it.

    The result, a function, waits for the other ranks, and returns the rows.

    Raises:
        TransferError: by the result, if a direct message fails. Other all-gathers raise torch's RuntimeError.
    """
    refuse_destroyed(group)
    if group.size() == 1:
        return lambda: [numbers]
    with without_torch_func():  # torch.func would wrap the rows, and the attribute _STARTED would be lost
        row = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if not dispatch_modes_entered():
            return partial(_read_rows, *_start_gather(row, group, state or state_of(group)))
        # An op, so that a selective checkpoint can keep its result, and the recomputation does not communicate.
        rows = torch.ops.cp_styles.gather_numbers.default(row, group.group_name)
        return partial(_read_rows, rows, vars(rows).pop(_STARTED, None))


def _read_rows(rows: torch.Tensor, started: dist.Work | _StartedGather | None) -> Sequence[Sequence[int]]:
    """Wait for the rows and read them. No wait for rows that a checkpoint has kept."""
    if isinstance(started, _StartedGather):
        group, mailbox = started.group(), started.mailbox()
        assert mailbox is not None  # a caller that waits for rows holds the group
        missing = mailbox.wait(started.number)
        del mailbox  # otherwise the traceback of the error would keep the connections
        if missing is not None:
            peer, error = missing
            raise transfer_error(error, (peer,), group) from error
    elif started is not None:
        started.wait()
    return rows.tolist()


def offer_numbers(
    numbers: Sequence[int],
    group: dist.ProcessGroup,
    seconds: float,
    then: Callable[[Mailbox, Sequence[Sequence[int]]], object],
) -> None:
    """:func:`gather_numbers` for a rank that has failed. It waits at most ``seconds``.

    ``then`` is called with the mailbox and the rows of all ranks when they arrive, possibly later, in another thread.
    """
    state, patience = state_of(group), timedelta(seconds=seconds)
    if state.operations.broken:  # peers have an error already
        return
    with contextlib.suppress(RuntimeError), without_torch_func(), without_dispatch_modes():  # the first error is better
        row = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        rows, started = _start_gather(row, group, state, patience)
        if isinstance(started, _StartedGather):
            # In a thread, because gloo ends all connections of a group when a wait times out.
            mailbox, number = state.mailbox, started.number

            def finish() -> None:
                if mailbox.wait(number) is None:
                    then(mailbox, rows.tolist())

            waiting = threading.Thread(target=finish, daemon=True)
            waiting.start()
            waiting.join(seconds)
        elif started is not None:
            started.wait(patience)


class _StartedGather(NamedTuple):
    """A started gather of a mailbox; other gathers have a ``dist.Work``."""

    # Weak, because the rows have this object as an attribute, and the mailbox has the rows.

    number: int
    group: ref[dist.ProcessGroup]
    mailbox: ref[Mailbox]


def _start_gather(
    row: torch.Tensor, group: dist.ProcessGroup, state: GroupState, patience: timedelta | None = None
) -> tuple[torch.Tensor, dist.Work | _StartedGather | None]:
    """Start an all-gather of a row of int64 on the host. Returns the rows, and the work to wait for before reading.

    ``patience`` limits the time to open connections.
    """
    if state.mailbox == "new":
        gloo = cpu_backend_of(group, "gloo") if has_cpu_backend(group) else _connect_host_gloo(group, state, patience)
        state.mailbox = Mailbox(gloo) if gloo else None
    if state.mailbox is not None and row.numel() == WIDTH:
        number, rows = state.mailbox.start(row)
        return rows, _StartedGather(number, ref(group), ref(state.mailbox))
    host = group if has_cpu_backend(group) else state.host
    if not host:
        row = row.to(torch.device("cuda", torch.cuda.current_device()), non_blocking=True)
    rows = row.new_empty(group.size(), row.numel())
    parts = list(rows.unbind())
    if not host:
        return rows, dist.all_gather(parts, row, group=group, async_op=True)
    # Not dist.all_gather, whose checks take as long as a copy.
    return rows, host.allgather([parts], [row])


def _connect_host_gloo(group: dist.ProcessGroup, state: GroupState, patience: timedelta | None) -> Any:
    """Gloo for a group without a CPU backend. False, with a warning on every rank, if it does not connect all ranks."""
    if not dist.is_gloo_available():
        return False
    try:
        # Ranks may arrive minutes after each other. Once all have arrived, they connect at once or never. The first
        # connection is a trial with a short timeout, because gloo uses the timeout of a connection for its messages.
        exchange_texts(group, "cp_styles/arrival", "", patience)
        trial, failure = None, ""
        try:
            trial = connect_gloo(group, "cp_styles/trial", _TO_CONNECT)
        except RuntimeError as error:
            failure = f"rank {dist.get_rank()}: {error}"
        failures = [text for text in exchange_texts(group, "cp_styles/trials", failure, patience) if text]
        del trial  # not earlier, because other ranks were connecting to it
        state.host = not failures and connect_gloo(group, "cp_styles", patience)
    except RuntimeError as error:
        raise transfer_error(error, range(group.size()), group) from error
    if failures:
        warnings.warn(
            f"{state.operations.name_of(state.operations.user)}: gloo does not connect the ranks of a group without a "
            "CPU backend. So they agree over NCCL, and the host waits for the device before each attention. Set "
            "GLOO_SOCKET_IFNAME to the network interface between the machines, or use init_process_group('cpu:gloo,"
            f"cuda:nccl'){see('Machines that gloo does not connect')}. Errors on {len(failures)} ranks: {failures[0]}",
            stacklevel=2,
        )
    return state.host


_TO_CONNECT = timedelta(seconds=60)


def refuse_destroyed(group: dist.ProcessGroup) -> None:
    """Raise RuntimeError if the group was destroyed. No communication."""
    try:
        dist.get_backend(group)
    except (KeyError, TypeError, ValueError, RuntimeError, AssertionError):  # torch's errors for an unknown group
        raise destroyed_error() from None


def destroyed_error() -> RuntimeError:
    return RuntimeError(
        "the process group over which this attention is context parallel was destroyed (destroy_process_group): "
        "apply the style to a new module, or call the attention, with a mesh of the new process groups"
        f"{see('A process group that was destroyed')}"
    )


def group_of_name(name: str) -> dist.ProcessGroup:
    """The group of this name. Raises RuntimeError if it was destroyed."""
    try:
        return resolve_group(name)
    except RuntimeError:
        raise destroyed_error() from None


# The attribute of the op's result that holds the work to wait for.
_STARTED = "_cp_styles_started"
torch.library.define(
    "cp_styles::gather_numbers", "(Tensor row, str group_name) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


@torch.library.impl("cp_styles::gather_numbers", "CompositeExplicitAutograd")
def _gather_numbers(row: torch.Tensor, group_name: str) -> torch.Tensor:
    group = resolve_group(group_name)
    rows, started = _start_gather(row, group, state_of(group))
    setattr(rows, _STARTED, started)
    return rows


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether the group can exchange host tensors."""
    return "cpu" in dist.get_backend_config(group)


def split_group(
    group: dist.ProcessGroup | None, size: int
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Two parts of ``group`` for two levels: rank r is (r // size, r % size).

    Returns the group of ranks with equal ``r // size`` (neighbours), and the group of ranks with equal ``r % size``.
    None is a group of one rank. Parts are cached. Communication, the first time: the set-up of up to P process groups,
    in which exactly the ranks of ``group`` take part.
    """
    if group is None or group.size() == 1:
        return None, None
    rank = group.rank()
    first = rank - rank % size
    state_of(group).operations.run_deferred_check()  # agree before the ranks set up parts
    members = dist.get_process_group_ranks(group)
    name = f"{group.group_name}.cp_styles.{size}"
    return (
        _make_part(members[first : first + size], group, members, f"{name}.neighbours{rank // size}"),
        _make_part(members[rank % size :: size], group, members, f"{name}.across{rank % size}"),
    )


def _make_part(ranks: list[int], group: dist.ProcessGroup, members: list[int], name: str) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if ranks == members:
        return group
    parts = state_of(group).parts
    if tuple(ranks) not in parts:
        part = parts[tuple(ranks)] = make_part_of_group(group, ranks, name)
        register_part(part, group)
    return parts[tuple(ranks)]
