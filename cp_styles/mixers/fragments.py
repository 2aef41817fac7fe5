"""What each rank holds of a sequence of documents: its fragments, and which rows they need of other ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from cp_styles._compat import dispatch_modes
from cp_styles.bounded_cache import remembered
from cp_styles.collectives.peers import Facts, Peers, peers_of, rows_agreed
from cp_styles.comm.agreement import Agreement, NoAgreement
from cp_styles.comm.groups import GroupOrMesh, axis_and_group
from cp_styles.engine.gradient_watch import RAISE, GradientCheck, watch_of
from cp_styles.engine.run import listener
from cp_styles.engine.scope import open_scope
from cp_styles.layout import Balancer, Chunk, SequenceLayout, head_tail, layout_made_by
from cp_styles.mask import All, Documents, Mask, PerRow
from cp_styles.troubleshooting import see

Packed: TypeAlias = Documents | tuple[int, ...] | list[int] | None
"""The lengths of the documents of the whole sequence. None: those of the SequenceScope around the call, or one."""


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


def fragments_of(layout: SequenceLayout, documents: tuple[int, ...]) -> tuple[Fragment, ...]:
    """Those of all ranks, in the order of positions."""
    edges = list(accumulate(documents, initial=0))
    chunks = []
    for rank, own in enumerate(layout.chunks):
        row = 0
        for start, stop in own:
            chunks.append((start, stop, rank, row))
            row += stop - start
    found, document = [], 0
    for start, stop, rank, row in sorted(chunks):
        low = start
        while low < stop:
            while edges[document + 1] <= low:
                document += 1
            high = min(stop, edges[document + 1])
            rows = row + low - start, row + high - start
            found.append(Fragment(rank, rows, low, low == edges[document], high == edges[document + 1]))
            low = high
    return tuple(found)


@dataclass(frozen=True)
class RowExchange:
    """Which rows a rank sends, and where those that it receives go.

    Attributes:
        slots: number of slots.
        sent: for each peer, the local rows that it needs.
        received: for each peer, the slots that its rows go to.
        crosses: whether any rank needs a row of another one.
    """

    slots: int
    sent: tuple[torch.Tensor, ...]
    received: tuple[torch.Tensor, ...]
    crosses: bool


def row_exchange(
    layout: SequenceLayout, needs: list[tuple[torch.Tensor, torch.Tensor]], slots: int, rank: int
) -> RowExchange:
    """``needs`` has for each rank the positions that it needs, and the slots that they go to."""
    holder, row = (torch.empty(layout.length, dtype=torch.int64, device="cpu") for _ in range(2))
    for peer in range(layout.ranks):
        positions = layout.positions(peer, "cpu")
        holder[positions], row[positions] = peer, torch.arange(len(positions), device="cpu")
    sent = tuple(row[needed[holder[needed] == rank]] for needed, _ in needs)
    needed, into = needs[rank]
    received = tuple(into[holder[needed] == peer] for peer in range(layout.ranks))
    crosses = any(bool((holder[needed] != peer).any()) for peer, (needed, _) in enumerate(needs))
    return RowExchange(slots, sent, received, crosses)


@remembered
def rows_before(
    layout: SequenceLayout, documents: tuple[int, ...], width: int, rank: int
) -> tuple[RowExchange, list[int]]:
    """What ``rank`` sends and receives if each position needs the ``width`` positions of its document before it, and
    the rows of each of its fragments. Each has ``width`` slots, empty where the document begins later. A rank without
    tokens has one fragment without rows."""
    edges, fragments = torch.tensor((0, *accumulate(documents)), device="cpu"), fragments_of(layout, documents)
    needs = [_needs([each for each in fragments if each.rank == peer], edges, width) for peer in range(layout.ranks)]
    sizes = [each.rows[1] - each.rows[0] for each in fragments if each.rank == rank] or [0]
    return row_exchange(layout, needs, len(sizes) * width, rank), sizes


def _needs(own: list[Fragment], edges: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions that a rank needs before its fragments, and the slots that they go to."""
    starts = torch.tensor([each.start for each in own], dtype=torch.int64, device="cpu")[:, None]
    positions = starts + torch.arange(-width, 0, device="cpu")
    begins = edges[torch.searchsorted(edges, starts, right=True) - 1]
    there = (positions >= begins).flatten()
    return positions.flatten()[there], torch.nonzero(there).flatten()


def documents_in(mask: Mask) -> Documents | PerRow | None:
    """The documents that a mask separates; None for one."""
    parts = mask.parts if isinstance(mask, All) else (mask,)
    found: Any = [each for each in parts if isinstance(each, Documents)]
    if isinstance(mask, PerRow):
        rows = [documents_in(each) for each in mask.masks]
        known = [each for each in rows if isinstance(each, Documents)]
        if known:
            length = sum(known[0].lengths)
            return PerRow(tuple(each if isinstance(each, Documents) else Documents((length,)) for each in rows))
    if len(found) > 1:
        edges = sorted({edge for each in found for edge in accumulate(each.lengths)})
        return Documents(tuple(high - low for low, high in zip((0, *edges), edges, strict=False)))
    return found[0] if found else None


class MixerCall(NamedTuple):
    """A call on which the ranks have agreed. ``kind`` is "rows", "states" or "channels"; ``sizes`` are its shapes."""

    kind: str
    cut: Cut
    sizes: dict[str, Any]

    def tell(self) -> None:
        if (listens := listener.get()) is not None:
            listens(self)


Described: TypeAlias = tuple[Sequence[torch.Tensor], int, dict[str, Any]]
"""A rank's tensors of a call, the dim of the sequence in them, and what else must be the same on all ranks."""


@dataclass(frozen=True)
class CutSequence:
    """The sequence of a call, before the ranks have agreed on it.

    Attributes:
        name: what is called, for messages.
        axis: name of the mesh axis, for messages.
        group: the ranks that share it.
        layout: the layout, or the balancer that makes it.
        documents: its documents, or what says so; None for one.
        compares: whether the ranks compare their calls.
        gradient_check: what to do if their parameters differ.
        refuse: raises for errors that only this rank may see.
    """

    name: str
    axis: str
    group: dist.ProcessGroup
    layout: SequenceLayout | Balancer
    documents: Packed | PerRow
    compares: bool = True
    gradient_check: GradientCheck = RAISE
    refuse: Callable[[], None] | None = None

    @classmethod
    def of_call(
        cls,
        name: str,
        group: GroupOrMesh,
        layout: SequenceLayout | Balancer | None,
        documents: Packed,
        agreement: Agreement,
        gradient_check: GradientCheck,
    ) -> CutSequence:
        """That of a function's arguments, or of the scope around its call."""
        axis, process_group = axis_and_group(name, group)
        scope = open_scope(axis) if layout is None else None
        found = documents_in(scope.mask) if scope is not None and documents is None else documents
        layout = (head_tail if scope is None else scope.layout) if layout is None else layout
        watch_of(process_group).leave_out(gradient_check.local)
        compares = not isinstance(agreement, NoAgreement)
        return cls(name, axis, process_group, layout, found, compares, gradient_check)

    def packed_by(self, kwargs: dict[str, Any]) -> CutSequence:
        """This one, with the documents that the arguments of a kernel say. They are taken out of ``kwargs``."""
        ends = [kwargs.pop(name, None) for name in ("cu_seqlens", "cu_seqlens_cpu")]
        ids, _ = kwargs.pop("seq_idx", None), kwargs.pop("chunk_indices", None)  # which are those of cu_seqlens
        given = next((each for each in ends if each is not None), None)
        if given is None and ids is None:
            return self
        if given is not None:
            found = Documents.from_cu_seqlens(given)
        else:
            found = Documents.from_ids(ids[0] if ids.ndim == 2 and bool((ids == ids[:1]).all()) else ids)
        return replace(self, documents=found)

    def followed(self, run: Callable[[CutSequence], Any], tensors: Sequence[torch.Tensor], dim: int) -> Any:
        """``run(self)``. A TokenFlow takes its first result for the tokens that ``tensors`` have along
        ``dim``, and do not look at how a kernel computes it."""
        flow: Any = next((mode for mode in dispatch_modes() if hasattr(mode, "mixed_before")), None)
        given = [x for x in tensors if isinstance(x, torch.Tensor) and -x.ndim <= dim < x.ndim]
        if flow is None or len(given) < len(tensors) or not given:  # errors of the arguments come later
            return run(self)
        mixed = flow.mixed_before(tensors, dim)

        def refuse() -> None:
            if self.refuse is not None:
                self.refuse()
            if mixed is not None:
                raise NotImplementedError(f"{self.name}: {mixed}")

        with flow.paused():
            out = run(replace(self, refuse=refuse))
        flow.attended(out[0] if isinstance(out, tuple) else out, tensors, dim)
        return out

    def agreed(self, describe: Callable[[], Described]) -> Cut:
        """How it is cut, once all ranks know that their calls fit together.

        Args:
            describe: checks this rank's arguments.

        Communication: one all-gather of some integers, if they compare.
        """
        name, layout, documents, peers = self.name, self.layout, self.documents, peers_of(self.group)
        fixed, watch = layout if isinstance(layout, SequenceLayout) else None, watch_of(self.group)

        def facts() -> Facts:
            if self.refuse is not None:
                self.refuse()
            tensors, dim, same = describe()
            if isinstance(documents, PerRow):
                raise NotImplementedError(
                    f"{name}: each row of the batch has documents of its own: pass one row in a call, or pack all rows "
                    "into one"
                )
            if not self.compares and fixed is None:
                raise ValueError(f"{name}: NoAgreement() needs the lengths of all ranks: give it a SequenceLayout")
            length = tensors[0].shape[dim]
            if any(x.shape[dim] != length for x in tensors):
                raise ValueError(f"{name}: tensors of {[x.shape[dim] for x in tensors]} tokens in one call")
            own = (peers.size, (length,))
            if fixed is not None and (fixed.ranks, fixed.lengths[peers.rank : peers.rank + 1]) != own:
                raise ValueError(
                    f"{name}: the layout cuts {fixed.length} positions for {fixed.ranks} ranks, {list(fixed.lengths)}, "
                    f"but rank {peers.rank} of the {peers.size} of mesh axis {self.axis!r} has {length}: cut the "
                    "inputs with the layout of the call (layout.shard), or open a SequenceScope with it around the call"
                    f"{see('A layout of another length')}"
                )
            said: dict[str, Any] = {
                "shape": [[size for at, size in enumerate(x.shape) if at != dim % x.ndim] for x in tensors],
                "dtype": [str(x.dtype).removeprefix("torch.") for x in tensors],
                "requires_grad": torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
                "layout": fixed if fixed is not None else getattr(layout, "__qualname__", "a balancer"),
                "documents": None if documents is None else lengths_of(documents),
            }
            return Facts(said | same, length, watch.look(tensors, self.group) if self.compares else 0)

        rows = rows_agreed(peers, name, facts, self.compares)
        finding = watch.compare([row.watch for row in rows], name, self.axis, self.group)
        if finding is not None:
            watch.tell(finding, self.gradient_check, name, self.axis, self.group)
        lengths = tuple(row.q_length for row in rows) if fixed is None else fixed.lengths
        whole = sum(lengths)
        made = layout if isinstance(layout, SequenceLayout) else layout_made_by(layout, whole, peers.size)
        if made.lengths != lengths:
            raise ValueError(
                f"{name}: the ranks of mesh axis {self.axis!r} hold {list(lengths)} positions, but the layout gives "
                f"them {list(made.lengths)}: cut the inputs with the layout of the call (layout.shard), or pass layout="
                f"{see('Inputs that were cut in another way')}"
            )
        assert not isinstance(documents, PerRow)
        sizes = (whole,) if documents is None else lengths_of(documents)
        if sum(sizes) != whole:
            raise ValueError(
                f"{name}: documents of {sum(sizes)} positions in a sequence of {whole}: pass the lengths of the "
                "documents of the whole sequence, the same on all ranks"
            )
        return Cut(peers, made, sizes)


def lengths_of(documents: Documents | Iterable[int]) -> tuple[int, ...]:
    return documents.lengths if isinstance(documents, Documents) else tuple(int(size) for size in documents)


def arguments_of(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    bound = inspect.signature(kernel).bind(*args, **kwargs)
    return {name: value for name, value in bound.arguments.items() if name != "kwargs"} | bound.kwargs


def refuse_arguments(name: str, given: dict[str, Any], unsupported: Sequence[str]) -> None:
    used = [at for at in unsupported if given.get(at) is not None and given[at] is not False]
    if used:
        raise NotImplementedError(f"{name}: {', '.join(used)} is not supported: leave it out, or use_cache=False")
