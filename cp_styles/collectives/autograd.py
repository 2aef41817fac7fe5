"""Autograd for linear maps that have an adjoint: a Function for all of them, and two half Functions for overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from cp_styles._lib.compat import is_traced, resolve_group
from cp_styles.collectives.exchange import Exchange, StartedExchange, Tensors
from cp_styles.collectives.notes import ReplicatedGathers, Summed, note_loss, note_summed
from cp_styles.collectives.peers import Peers
from cp_styles.collectives.rows import Rows
from cp_styles.comm.agreement import Meeting, StatusRow, pack_call_number, start_status
from cp_styles.comm.group_state import state_of
from cp_styles.comm.point_to_point import Operation

T = TypeVar("T")
U = TypeVar("U")


class LinearMap(Protocol):
    """A map from local tensors to local tensors. It is linear in the tensors of all ranks of the group together."""

    @property
    def peers(self) -> Peers: ...

    def __call__(self, *tensors: torch.Tensor) -> Tensors: ...

    def adjoint(self) -> LinearMap: ...


def differentiable(op: LinearMap, *tensors: torch.Tensor, check: bool) -> Tensors:
    """``op(*tensors)``. Its backward is ``op.adjoint()``, also for higher derivatives.

    ``check``: before a backward that communicates, the ranks check that all run the backward of the same forward.
    """
    if op.peers.size == 1:
        return tensors
    return _Apply.apply(op, check, *tensors)


class _Apply(torch.autograd.Function):
    """forward: op; backward: its adjoint. The backward communicates, so every rank must run it."""

    # The signature is not (ctx, op, *tensors). Where no gradient is needed, torch.compile (seen: 2.11, 2.13) takes a
    # call with one argument more than the signature has parameters for a forward without ctx, and drops ctx.
    @staticmethod
    def forward(*ctx_op_check_tensors: Any) -> Tensors:
        ctx, op, check, *tensors = ctx_op_check_tensors
        ctx.op, ctx.check = op, check
        if is_traced():
            return op(*tensors)
        ctx.number = _number_forward(op.peers)
        return _run_operation(op, op, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        adjoint = ctx.op.adjoint()
        if ctx.check and not is_traced() and not getattr(adjoint, "cuts", False):
            _agree_on_backward(adjoint.peers, ctx.number)
        return None, None, *_Apply.apply(adjoint, ctx.check, *grads)


def _number_forward(peers: Peers) -> int:
    operations = state_of(resolve_group(peers.name)).operations
    operations.collectives += 1
    return operations.collectives


def _agree_on_backward(peers: Peers, number: int) -> None:
    """Check that all ranks start the backward of forward ``number``. Communication: one all-gather of some integers.

    Raises:
        ValueError: on every rank, if the ranks are not all at this backward.
    """
    group = resolve_group(peers.name)
    where = Meeting.COLLECTIVE_BACKWARD, "cp_styles.collectives", state_of(group).operations.axis, group
    start_status(lambda: StatusRow(place=pack_call_number(number, 0)), *where)()


def _run_operation(op: LinearMap, part: Callable[..., T], *arguments: Any) -> T:
    """Run ``part``, the communication of ``op`` or a half of it: see [Note: operations] in group_state.py."""
    with Operation(resolve_group(op.peers.name)):
        return part(*arguments)


def note_replicated_gradients(part: torch.Tensor, x: torch.Tensor, peers: Peers) -> None:
    """In the backward of ``part``, this rank's part of ``x``, note that the parameters behind ``x`` get whole gradients
    on every rank."""
    if peers.size == 1 or is_traced() or part.grad_fn is None:
        return
    behind = x.grad_fn
    note = Summed(tuple(dist.get_process_group_ranks(resolve_group(peers.name))), "the backward of collectives.split")

    def mark(*grads: Any) -> None:
        # Behind communication the gradients may be shares, so only leaves in front of it are noted.
        for leaf in [x] if behind is None else _find_local_leaves(behind):
            _note_once(leaf, note)

    part.grad_fn.register_hook(mark)


def note_gather(whole: torch.Tensor, part: torch.Tensor, peers: Peers, *, reduced: bool) -> None:
    """Note the backward of a gather of ``part`` for ``sum_gradients``: see :class:`ReplicatedGathers`.

    ``reduced``: the gradient of the gather is summed over the ranks.
    """
    if peers.size == 1 or is_traced() or whole.grad_fn is None:
        return
    group, behind = resolve_group(peers.name), part.grad_fn
    note_loss(group)  # losses of whole sequences, as in preference training
    gathers = state_of(group).get_or_create(ReplicatedGathers)

    def leaves() -> list[torch.Tensor] | None:
        if reduced:  # ranks may have equal gradients and be right: the gradients of a loss that was divided by P
            return None
        return [part] if behind is None else _list_leaves(behind)

    whole.grad_fn.register_hook(lambda *grads: gathers.note(leaves))


def _list_leaves(node: Any) -> list[torch.Tensor] | None:
    """The leaves from which a tensor was computed on this rank; None if reentrant checkpoints hide some."""
    nodes = list(walk_graph(node))
    if any(node.name() == "CheckpointFunctionBackward" for node in nodes):
        return None
    return [leaf for node in nodes if isinstance(leaf := getattr(node, "variable", None), torch.Tensor)]


def _note_once(leaf: torch.Tensor, note: Summed) -> None:
    def apply(leaf: torch.Tensor) -> None:
        handle.remove()
        note_summed(leaf, note)

    handle = leaf.register_post_accumulate_grad_hook(apply)


def _find_local_leaves(node: Any) -> Iterator[torch.Tensor]:
    """The leaves from which a tensor was computed without communication."""
    for reached in walk_graph(node, _COMM_NODES):
        if isinstance(leaf := getattr(reached, "variable", None), torch.Tensor):
            yield leaf


def walk_graph(node: Any, last: tuple[str, ...] = ()) -> Iterator[Any]:
    """``node`` and all nodes to which its backward leads, up to nodes whose names contain an entry of ``last``."""
    waiting, visited = [node], {node}
    while waiting:
        node = waiting.pop()
        yield node
        if not any(part in node.name() for part in last):
            following = dict.fromkeys(after for after, _ in node.next_functions if after not in visited)
            following.pop(None, None)
            visited.update(following)
            waiting.extend(following)  # in an order that is the same on all ranks


# Parts of the names of autograd's nodes: the Functions of this file, our ops, and DTensor's conversions.
_COMM_NODES = (
    "_ApplyBackward",
    "_SendBackward",
    "_ReceiveBackward",
    "cp_styles",
    "TorchTensor",
    "Redistribute",
)


class Pending(Generic[T]):
    """The result of an exchange that is still running. This rank can do other work meanwhile, in forward and backward.

    Collectives with ``async_op=True`` return it.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        """``finish`` waits, and returns the result."""
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None

    def wait(self) -> T:
        """Return the result. Every rank must call this. A second call returns the same result."""
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result  # pyright: ignore[reportReturnType]

    def then(self, last: Callable[[T], U]) -> Pending[U]:
        """A Pending whose result is ``last(result)``."""
        return Pending(lambda: last(self.wait()))


def start(op: Exchange, *tensors: torch.Tensor, check: bool) -> Pending[Tensors]:
    """``differentiable(op, *tensors)`` in two halves: this call sends, ``wait()`` receives.

    In the backward, the node of ``wait()`` sends the gradients and the node of this call receives them. Meanwhile
    autograd runs the nodes that were created between the two calls. First derivatives only.
    """
    if op.peers.size == 1 or is_traced():  # the compiler schedules the waits itself
        result = differentiable(op, *tensors, check=check)
        return Pending(lambda: result)
    running = _AsyncExchange(op, check)
    token = _Send.apply(running, *tensors)
    return Pending(lambda: _Receive.apply(running, token))


class _AsyncExchange:
    """State that the two halves share. A token tensor without elements connects their nodes in the autograd graph."""

    def __init__(self, op: Exchange, check: bool) -> None:
        self.op, self.check = op, check
        self.number = _number_forward(op.peers)
        self.forward: StartedExchange | None = None
        self.backward: StartedExchange | None = None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: _AsyncExchange, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.running = running
        running.forward = _run_operation(running.op, running.op.start, *tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _token: torch.Tensor) -> tuple[Any, ...]:
        started, ctx.running.backward = ctx.running.backward, None
        adjoint = ctx.running.op.adjoint()
        return None, *_run_operation(adjoint, adjoint.finish, started)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: _AsyncExchange, token: torch.Tensor) -> Tensors:
        ctx.running = running
        started, running.forward = running.forward, None
        assert started is not None
        return _run_operation(running.op, running.op.finish, started)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        running, adjoint = ctx.running, ctx.running.op.adjoint()
        if running.check:
            _agree_on_backward(adjoint.peers, running.number)
        running.backward = _run_operation(adjoint, adjoint.start, *grads)
        return None, grads[0].new_empty(0)


class Replicated(NamedTuple):
    """Sharded -> replicated: an all-gather. Its result, and the gradient of the result, are the same on all ranks.

    ``cuts``: the adjoint. Each rank takes its rows, and nothing is sent.
    """

    gather: Exchange
    cuts: bool = False

    @property
    def peers(self) -> Peers:
        return self.gather.peers

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        if not self.cuts:
            return self.gather(*tensors)
        return tuple(self.gather.rows.layout.part(x, self.gather.row_dim, self.peers.rank) for x in tensors)

    def adjoint(self) -> Replicated:
        return self._replace(cuts=not self.cuts)


def gather_exchange(peers: Peers, dim: int, ndim: int, rows: Rows) -> Exchange:
    """The exchange that gathers ``dim`` of a tensor of ``ndim`` dims. The caller adds a last dim of one column."""
    return Exchange(peers, dim, ndim, rows, (((0, 1),) * peers.size,))


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """forward: x; backward: the gradient times ``factor``."""
    return x if factor == 1 else _ScaleGradient.apply(x, factor)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def keep_in_graph(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Identity on x. Its backward also runs the backward of ``others``, with zero gradients, so that a rank that uses
    no result of an exchange still takes part in its communication."""
    return _KeepInGraph.apply(x, *others)


class _KeepInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        # A checkpoint ends a recomputation where it has all saved tensors, and begins none where nothing is saved. With
        # one saved tensor every rank recomputes, so that the exchanges before are run again on all ranks.
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.others]
        return grad, *(zero if needed else None for zero, needed in zip(zeros, ctx.needs_input_grad[1:], strict=True))
