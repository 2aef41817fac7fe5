"""Fragments: consecutive positions of one document on one rank. Which rows they need from other ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.compat import function_modes
from cp_styles._lib.device_copies import DeviceTables
from cp_styles._lib.troubleshooting import see
from cp_styles.collectives.peers import CallSignature, Peers, exchange_rows, get_peers
from cp_styles.collectives.replicas import LocalItems
from cp_styles.comm.agreement import StatusRow, StatusRows, plain, short, telling
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.group_state import Forwards, state_of
from cp_styles.comm.groups import MeshOrGroup, Role, axis_and_group
from cp_styles.comm.point_to_point import Operation
from cp_styles.engine.call import agree_on_layouts
from cp_styles.engine.observers import CheckedCall, RankChecks, mixer_listener
from cp_styles.engine.scope import ScopeHistory
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.layouts import Balancer, SequenceLayout, head_tail
from cp_styles.layouts.balancers import describe_cut, layout_made_by, layout_of_one
from cp_styles.layouts.layout import find_cuts, refuse_other_cut
from cp_styles.layouts.ranges import Chunk
from cp_styles.masks import Documents, Mask, PerRow
from cp_styles.masks.tree import find_tree

Packed: TypeAlias = Documents | tuple[int, ...] | list[int] | None
"""The lengths of the documents of the whole sequence. None: the documents of the SequenceScope around the call, or
one."""


# The arguments of kernels that have documents: their ends, and a number for each token.
DOCUMENT_ARGUMENTS = "cu_seqlens", "cu_seqlens_cpu", "seq_idx"


class Fragment(NamedTuple):
    """Consecutive positions of one document that one rank holds.

    Attributes:
        rank: the rank that holds it.
        rows: its local rows, half-open.
        start: its first position.
        first, last: whether its document begins, or ends, with it.
    """

    rank: int
    rows: Chunk
    start: int
    first: bool
    last: bool


class Cut(NamedTuple):
    """How the sequence of one call is cut.

    Attributes:
        peers: the ranks that share it.
        layout: which positions each of them holds.
        documents: the lengths of its documents.
    """

    peers: Peers
    layout: SequenceLayout
    documents: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether this rank has all tokens, of one document: the caller's kernel is called as on one device."""
        return self.peers.size == len(self.documents) == 1


@contextmanager
def mark_mixing() -> Iterator[None]:
    """Mark, for the modules around, that a mixer calls its kernel with all rows that the kernel needs."""
    states = [mode.unscoped.forward_state for mode in function_modes() if isinstance(mode, AttentionCalls)]
    before = [state.mixing for state in states]
    for state in states:
        state.mixing = True
    try:
        yield
    finally:
        for state, mixing_before in zip(states, before, strict=True):
            state.mixing = mixing_before


def split_fragments(layout: SequenceLayout, documents: tuple[int, ...]) -> tuple[Fragment, ...]:
    """The fragments of all ranks, in the order of positions."""
    edges = list(accumulate(documents, initial=0))
    chunks = []
    for rank, rank_chunks in enumerate(layout.chunks):
        row = 0
        for start, stop in rank_chunks:
            chunks.append((start, stop, rank, row))
            row += stop - start
    fragments, document = [], 0
    for start, stop, rank, row in sorted(chunks):
        low = start
        while low < stop:
            while edges[document + 1] <= low:
                document += 1
            high = min(stop, edges[document + 1])
            rows = row + low - start, row + high - start
            fragments.append(Fragment(rank, rows, low, low == edges[document], high == edges[document + 1]))
            low = high
    return tuple(fragments)


@dataclass(frozen=True, eq=False)
class RowExchange:
    """The rows that a rank sends, and the slots that it receives rows into.

    Attributes:
        slots: number of slots.
        sent: for each peer, how many local rows it needs.
        received: for each peer, how many of its rows this rank needs.
        rows: the local rows that are sent, and the slots of the received rows, peer by peer.
        crosses: whether any rank needs a row of another rank.
    """

    slots: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    rows: DeviceTables
    crosses: bool


def row_exchange(
    layout: SequenceLayout, needs: list[tuple[torch.Tensor, torch.Tensor]], slots: int, rank: int
) -> RowExchange:
    """The exchange of ``rank``. ``needs``: for each rank, the positions that it needs, and their slots."""
    holder, row = (torch.empty(layout.length, dtype=torch.int64, device="cpu") for _ in range(2))
    for peer in range(layout.ranks):
        positions = layout.positions(peer, "cpu")
        holder[positions], row[positions] = peer, torch.arange(len(positions), device="cpu")
    sent = [row[needed[holder[needed] == rank]] for needed, _ in needs]
    needed, into = needs[rank]
    received = [into[holder[needed] == peer] for peer in range(layout.ranks)]
    crosses = any(bool((holder[needed] != peer).any()) for peer, (needed, _) in enumerate(needs))
    rows = DeviceTables(torch.cat(sent), torch.cat(received))
    return RowExchange(slots, tuple(map(len, sent)), tuple(map(len, received)), rows, crosses)


@remembered(16)
def rows_before(
    layout: SequenceLayout, documents: tuple[int, ...], width: int, rank: int
) -> tuple[RowExchange, list[int]]:
    """The exchange of ``rank`` if each position needs the ``width`` positions of its document before it, and the number
    of rows of each of its fragments. Each fragment has ``width`` slots; slots before the document are empty."""
    edges, fragments = torch.tensor((0, *accumulate(documents)), device="cpu"), split_fragments(layout, documents)
    needs = []
    for peer in range(layout.ranks):
        starts = torch.tensor([f.start for f in fragments if f.rank == peer], dtype=torch.int64, device="cpu")[:, None]
        positions = starts + torch.arange(-width, 0, device="cpu")
        in_document = (positions >= edges[torch.searchsorted(edges, starts, right=True) - 1]).flatten()
        needs.append((positions.flatten()[in_document], torch.nonzero(in_document).flatten()))
    sizes = [stop - start for start, stop in (f.rows for f in fragments if f.rank == rank)]
    # Kernels refuse tensors without tokens: a rank without tokens has one empty fragment, with at least one slot.
    return row_exchange(layout, needs, len(sizes) * width if sizes else max(width, 1), rank), sizes or [0]


def find_documents(name: str, mask: Mask) -> Documents | PerRow | None:
    """The documents that a mask separates; None for one. Raises NotImplementedError for a tree."""
    if find_tree(mask) is not None:
        raise NotImplementedError(
            f"{name}: a Tree around a recurrence, a convolution or a roll: states go from token to token of the "
            "sequence, and would go from one branch into the next. Give this model whole rollouts, packed as "
            "documents: SequenceScope(layout, mask=Documents(lengths))"
        )
    rows = [row.documents for row in mask.rows]
    length = next((sum(lengths) for lengths in rows if lengths is not None), None)
    if length is None:
        return None
    found = tuple(Documents((length,) if lengths is None else lengths) for lengths in rows)
    return PerRow(found) if len(rows) > 1 else found[0]


CallFacts: TypeAlias = tuple[Sequence[torch.Tensor], int, dict[str, Any]]
"""A rank's tensors of a call, the dim of the sequence in them, and further facts that must be equal on all ranks."""


@dataclass(frozen=True)
class CutSequence:
    """The sequence of a call, before the ranks have agreed on it.

    Attributes:
        name: what is called, for messages.
        axis: name of the mesh axis, for messages.
        group: the ranks that share it.
        layout: the layout, or the balancer that makes it.
        documents: lengths of its documents, or a mask of documents. None: one document.
        checks: what the ranks check of each other.
        packed: the documents as arguments of a kernel: cu_seqlens, and an id for each token.
    """

    name: str
    axis: str
    group: dist.ProcessGroup
    layout: SequenceLayout | Balancer
    documents: Packed | PerRow
    checks: Checks = CHECKS
    packed: tuple[Any, Any] = (None, None)

    @classmethod
    def from_call(
        cls,
        name: str,
        mesh: MeshOrGroup,
        layout: SequenceLayout | Balancer | None,
        documents: Packed,
        checks: Checks,
    ) -> CutSequence:
        """The cut sequence of a function's arguments, or of the scope around its call."""
        _, group = axis_and_group(name, mesh)
        state, scope = state_of(group), None
        axis = state.operations.axis  # known for a group too, if a call before had its mesh
        state.turn.begin()
        with telling(name, group, agrees=checks.agreement):
            if layout is None or documents is None:
                scope = state.get_or_create(ScopeHistory).find_scope(name, axis, layout)
            masked = find_documents(name, scope.mask) if scope is not None and documents is None else documents
            around = [mode for mode in function_modes() if isinstance(mode, AttentionCalls)]
            for mode in around:
                mode.note_function(group.group_name)
                if documents is None:
                    find_documents(name, mode.unscoped.mask)  # for its refusal alone
        default = around[-1].unscoped.layout if around and around[-1].unscoped.group == group else head_tail
        layout = (default if scope is None else scope.layout) if layout is None else layout
        state.get_or_create(LocalItems).update(dict.fromkeys(checks.local))
        made = cls(name, axis, group, layout, masked, checks)
        return replace(made, layout=made.of_these_ranks(layout))

    def of_these_ranks(self, layout: Any) -> Any:
        """``layout``, or where one rank stands in for all of them its layout of one rank."""
        return layout_of_one(layout) if state_of(self.group).get_or_create(Role).alone else layout

    def with_documents_from(self, kwargs: dict[str, Any]) -> CutSequence:
        """This sequence with the documents in the arguments of a kernel, which are removed from ``kwargs``."""
        *ends, ids = (kwargs.pop(name, None) for name in DOCUMENT_ARGUMENTS)
        kwargs.pop("chunk_indices", None)  # it repeats cu_seqlens
        edges = next((edges for edges in ends if edges is not None), None)
        return self if edges is None and ids is None else replace(self, packed=(edges, ids))

    def document_lengths(self) -> tuple[int, ...] | None:
        """The lengths of the documents. None: one document."""
        sources, (edges, ids) = [self.documents], self.packed
        if edges is not None:
            sources.append(Documents.from_cu_seqlens(edges))
        elif ids is not None:
            sources.append(Documents.from_ids(ids[0] if ids.ndim == 2 and bool((ids == ids[:1]).all()) else ids))
        if any(isinstance(each, PerRow) for each in sources):
            raise NotImplementedError(
                f"{self.name}: each row of the batch has documents of its own: pass one row in a call, or pack all "
                "rows into one"
            )
        lengths = [document_lengths(each) for each in sources if each is not None and not isinstance(each, PerRow)]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"{self.name}: documents= or the SequenceScope says {short(lengths[0])}, cu_seqlens or seq_idx says "
                f"{short(lengths[1])}: give the same documents, or leave one out"
            )
        return lengths[0] if lengths else None

    @contextmanager
    def compared_call(self, describe: Callable[[], CallFacts]) -> Iterator[Cut]:
        """Compare the calls of the ranks, then run the ``with``, in which ranks wait for messages of each other.

        Args:
            describe: checks this rank's arguments.

        Communication: one all-gather of some integers, if the ranks compare.
        """
        state = state_of(self.group)
        cut = self._agree(describe)
        if (listener := mixer_listener.get()) is not None:
            listener(self.group, cut.layout)
        with Operation(self.group, state):
            yield cut

    def _agree(self, describe: Callable[[], CallFacts]) -> Cut:
        name, layout, peers, state = self.name, self.layout, get_peers(self.group), state_of(self.group)
        fixed, where = layout if isinstance(layout, SequenceLayout) else None, (name, self.axis, self.group)
        documents: tuple[int, ...] | None = None
        rank_checks, checked_call = state.get_or_create(RankChecks), CheckedCall(where, self.checks, ())

        def layout_for(length: int) -> SequenceLayout:
            return layout if isinstance(layout, SequenceLayout) else layout_made_by(layout, length, peers.size)

        def facts() -> CallSignature:
            nonlocal documents
            documents = self.document_lengths()
            tensors, dim, same = describe()
            if not self.checks.agreement and fixed is None:
                raise ValueError(
                    f"{name}: Checks(agreement=False) needs the lengths of all ranks: give it a SequenceLayout"
                )
            length = tensors[0].shape[dim]
            if any(x.shape[dim] != length for x in tensors):
                raise ValueError(f"{name}: tensors of {[x.shape[dim] for x in tensors]} tokens in one call")
            for x, cut in find_cuts(tensors):
                if cut.ranks == peers.size:
                    refuse_other_cut(name, (x,), layout_for(cut.length), plain(layout))
            of_rank = None if fixed is None else (fixed.ranks, fixed.lengths[peers.rank : peers.rank + 1])
            if fixed is not None and of_rank != (peers.size, (length,)):
                raise ValueError(
                    f"{name}: the layout cuts {fixed.length} positions for {fixed.ranks} ranks, {list(fixed.lengths)}, "
                    f"but rank {peers.rank} of the {peers.size} of mesh axis {self.axis!r} has {length}: cut the "
                    "inputs with the layout of the call (layout.shard), or open a SequenceScope with it around the call"
                    f"{see('A layout of another length')}"
                )
            call: dict[str, Any] = {
                "shape": [[size for at, size in enumerate(x.shape) if at != dim % x.ndim] for x in tensors],
                "dtype": [str(x.dtype).removeprefix("torch.") for x in tensors],
                **requires_grad_by_name(tensors),
                "layout": describe_cut(layout),
                "documents": documents,
            }
            checked_call.tensors = tensors
            numbers = tuple([check.number(checked_call) for check in rank_checks]) if self.checks.agreement else (0, 0)
            return call | same, StatusRow(q_length=length, numbers=numbers)

        rows = exchange_rows(peers, name, facts, self.checks.agreement)
        if isinstance(rows, StatusRows):
            for check, numbers in zip(rank_checks, rows.columns.numbers, strict=True):
                check.judge(numbers, checked_call)
        lengths = tuple(row.q_length for row in rows) if fixed is None else fixed.lengths
        whole = sum(lengths)
        (cut,) = agree_on_layouts(where, (layout,), lambda: (layout_for(whole),), isinstance(rows, StatusRows))
        state.get_or_create(Forwards).lengths.put((lengths[peers.rank], lengths[peers.rank]), (whole, whole))
        if cut.lengths != lengths:
            raise ValueError(
                f"{name}: the ranks of mesh axis {self.axis!r} hold {list(lengths)} positions, but the layout gives "
                f"them {list(cut.lengths)}: cut the inputs with the layout of the call (layout.shard), or pass layout="
                f"{see('Inputs that were cut in another way')}"
            )
        sizes = documents or (whole,)
        if sum(sizes) != whole:
            raise ValueError(
                f"{name}: documents of {sum(sizes)} positions in a sequence of {whole}: pass the lengths of the "
                "documents of the whole sequence, the same on all ranks"
            )
        planted = state.get_or_create(Role).planted
        return Cut(peers, cut, sizes if planted is None else planted.documents(sizes))


def requires_grad_by_name(arguments: Iterable[Any]) -> dict[str, bool]:
    """Whether a backward may follow, as a fact of a call."""
    needed = any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)
    return {"requires_grad": torch.is_grad_enabled() and needed}


def document_lengths(documents: Documents | Iterable[int]) -> tuple[int, ...]:
    """The lengths of the documents, as a tuple."""
    return documents.lengths if isinstance(documents, Documents) else tuple(int(size) for size in documents)


def bind_arguments(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    bound = inspect.signature(kernel).bind(*args, **kwargs)
    known = bound.signature.parameters
    return {name: x for name, x in bound.arguments.items() if known[name].kind.name != "VAR_KEYWORD"} | bound.kwargs


def refuse_arguments(name: str, arguments: dict[str, Any], unsupported: Sequence[str]) -> None:
    used = [at for at in unsupported if arguments.get(at) is not None and arguments[at] is not False]
    if used:
        raise NotImplementedError(f"{name}: {', '.join(used)} is not supported: leave it out, or use_cache=False")
