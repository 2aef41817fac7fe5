"""Packs of the samples of all data-parallel ranks, so that the degree of context parallelism follows the samples.

Each rank, or each group of ranks that load the same, has samples of its own. :func:`pack_samples` joins them into one
sequence of documents, and :func:`whole_documents` cuts it: a short sample stays on one rank, which sends nothing for
it, and a long sample is cut over as many ranks as its work needs.

Shapes: n tokens of a sample, S tokens of a pack.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from cp_styles._lib.checksum import fingerprint
from cp_styles.batch.sharder import describe_content
from cp_styles.collectives import gather
from cp_styles.comm.agreement import TEXT_BYTES, Meeting, StatusRow, agree_on_facts, gather_texts
from cp_styles.comm.groups import MeshOrGroup, axis_and_group
from cp_styles.layouts import SequenceLayout, per_document_head_tail
from cp_styles.layouts.ranges import Chunk, even_sizes, join_ranges, ranges_of

Sample: TypeAlias = torch.Tensor | Mapping[str, torch.Tensor]
"""The tokens [n] of a sample, or its entries [n, ...] by name: ``input_ids``, ``labels`` and others."""

# The most work of a rank, and the most tokens, over the mean, for which documents stay whole.
_WORK, _TOKENS = 1.05, 1.1

# The largest number of pairs of a document and a rank that are looked at, in less than a second. A pack that needs
# more, of thousands of documents for hundreds of ranks, has the layout of per_document_head_tail.
_MOST_PAIRS = 2**22


def whole_documents(length: int, ranks: int, *, documents: Sequence[int], most: int | None = None) -> SequenceLayout:
    """Keep documents whole on one rank, and cut as few as the balance needs over as few ranks as it needs.

    No rank then has more than 1.05 times the mean causal work, nor more than 1.1 times the mean tokens. Documents go to
    the rank with the least of both, the largest first (Graham, 1969). Documents that are too large for a rank are cut
    head-tail; then, while a rank has too much, its largest piece of a document is cut over one rank more. Where that
    does not balance, as with a few tokens for each rank, the layout is :func:`~cp_styles.per_document_head_tail`.

    ``BatchSharder(mesh, layout=whole_documents)`` gives it the documents of each batch.

    Args:
        length: number of positions; the sum of ``documents``.
        ranks: number of ranks.
        documents: lengths of the packed documents, in order.
        most: the largest number of tokens of a rank; of no meaning for one rank. None: 1.1 times the mean.

    Raises:
        ValueError: ``documents`` do not add up to ``length``, or ``most`` is too small for ``length``.

    Example::

        layout = whole_documents(1000, 4, documents=[250, 245, 255, 250])
        assert sorted(layout.lengths) == [245, 250, 250, 255]
    """
    if ranks == 1:  # such as the one rank of verify, in place of all
        most = None
    if most is not None and most * ranks < length:
        raise ValueError(f"whole_documents: {ranks} ranks of at most {most} tokens hold fewer than {length}")
    fallback = per_document_head_tail(length, ranks, documents=documents)  # it checks the lengths
    if not length:
        return fallback
    tokens = _TOKENS * length / ranks
    limits = _WORK * sum(map(_work, documents)) / ranks, tokens if most is None else min(tokens, most)
    least = (ceil(max(_work(size) / limits[0], size / limits[1])) for size in documents)
    degrees = [max(min(count, size, ranks), 1) for count, size in zip(least, documents, strict=True)]
    for _ in range(min(64, max(1, _MOST_PAIRS // (len(documents) * ranks)))):
        held, over = _place(documents, degrees, ranks, limits)
        worst = max(range(ranks), key=over.__getitem__)
        if over[worst] <= 1:
            found = SequenceLayout.from_chunks(_cut(documents, degrees, held))
            # Pieces are rounded to whole tokens.
            return found if most is None or max(found.lengths) <= most else fallback
        movable = [document for document, _ in held[worst] if degrees[document] < min(ranks, documents[document])]
        if not movable:
            break
        degrees[max(movable, key=lambda document: documents[document] / degrees[document])] += 1
    return fallback


def _place(
    documents: Sequence[int], degrees: Sequence[int], ranks: int, limits: tuple[float, float]
) -> tuple[list[list[tuple[int, int]]], list[float]]:
    """The (document, piece) pairs of each rank, and how much of its limits of work and tokens it has: 1 is full."""
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    used = [(0.0, 0.0)] * ranks
    shares = [
        (_work(size) / degree / limits[0], size / degree / limits[1])
        for size, degree in zip(documents, degrees, strict=True)
    ]
    for document in sorted(range(len(shares)), key=shares.__getitem__, reverse=True):
        work, tokens = shares[document]
        with_it = [max(own_work + work, own_tokens + tokens) for own_work, own_tokens in used]
        # Pieces of one document go to as many ranks.
        chosen = heapq.nsmallest(degrees[document], range(ranks), with_it.__getitem__)
        for piece, rank in enumerate(chosen):
            held[rank].append((document, piece))
            used[rank] = used[rank][0] + work, used[rank][1] + tokens
    return held, [max(of_rank) for of_rank in used]


def _work(size: int) -> int:
    """Twice the causal work of a document."""
    return size * (size + 1)


def _cut(
    documents: Sequence[int], degrees: Sequence[int], held: Sequence[Sequence[tuple[int, int]]]
) -> list[list[Chunk]]:
    """The chunks of each rank. Piece i of a document that is cut over n ranks has the parts i and 2 n - 1 - i."""
    starts = [0, *accumulate(documents)]

    def chunks(document: int, piece: int) -> list[Chunk]:
        parts = ranges_of(even_sizes(documents[document], 2 * degrees[document]))
        first = starts[document]
        return [(first + start, first + stop) for start, stop in (parts[piece], parts[-1 - piece])]

    return [join_ranges(chunk for pair in sorted(pairs) for chunk in chunks(*pair)) for pairs in held]


class Pack(dict[str, torch.Tensor]):
    """Samples of all ranks in one row, equal on all ranks: a batch for :class:`~cp_styles.BatchSharder`.

    Its entries are the entries of the samples, [1, S, ...], and ``document_ids`` [1, S].

    Attributes:
        lengths: the number of tokens of each sample of the pack.
    """

    def __init__(self, entries: Mapping[str, torch.Tensor], lengths: tuple[int, ...], own: Mapping[int, int]) -> None:
        super().__init__(entries)
        self.lengths, self._own = lengths, own

    def own(self, whole: torch.Tensor) -> dict[int, torch.Tensor]:
        """The parts [n, ...] of ``whole`` [1, S, ...] that belong to this rank's samples, by their places in the list
        that this rank gave. :meth:`~cp_styles.BatchSharder.whole_of` makes the whole from the parts of the ranks.

        ::

            for index, losses in pack.own(sharder.whole_of(losses_BL, pack)).items():
                log(samples[index], losses.mean())
        """
        parts = whole[0].split(self.lengths)
        return {index: parts[at] for at, index in self._own.items()}


def pack_samples(
    samples: Sequence[Sample], mesh: MeshOrGroup, *, copies: MeshOrGroup | None = None, most: int | None = None
) -> list[Pack]:
    """Join the samples of all ranks into packs, the same on all ranks, in the order of the ranks and their lists.

    Args:
        samples: this rank's samples, of which some ranks may have none: tokens [n], which are their own labels, or
            entries [n, ...] by name. All samples have the same entries.
        mesh: the ranks that share each pack: a 1-D mesh, (mesh, axis name), or a process group. With data and context
            parallelism both axes: ``mesh["dp", "cp"]._flatten("dp_cp")``.
        copies: the ranks that have loaded the same samples, ``mesh["cp"]``. None: each rank has its own.
        most: the largest number of tokens of a rank. Samples that do not fit make a further pack. Give the layout the
            same number: ``partial(whole_documents, most=most)``. None: one pack.

    Returns:
        The packs: micro-batches of one step. Divide their losses by the tokens of all of them, as in the example.

    Communication: one agreement of the ranks, and all-gathers of a text of 4 KiB, of the lengths, and of each entry.
    The host waits for the device once, for the lengths; with ``copies`` also for the contents of the samples.

    Raises:
        ValueError, TypeError: on every rank, if no rank has samples, if samples have other entries or lengths, if
            ``copies`` differ, or if a sample is longer than all ranks can hold.

    Example::

        samples = [torch.arange(5), torch.arange(3)]  # of this rank
        (pack,) = pack_samples(samples, mesh)
        batch = BatchSharder(mesh, layout=whole_documents)(pack)
        assert pack.lengths[:2] == (5, 3)
    """
    name = "pack_samples"
    axis, group = axis_and_group(name, mesh)
    entries: list[dict[str, torch.Tensor]] = []
    text = ""

    def describe() -> tuple[dict[str, Any], StatusRow]:
        nonlocal text
        entries.extend(_entries(name, samples))
        text = _describe(name, entries, group, copies)
        return {"most": most, "copies": copies is None}, StatusRow()

    agree_on_facts(describe, Meeting.BATCH, (name, axis, group))
    leaders, kinds = _compare(name, [json.loads(text) for text in gather_texts(text, group)])
    leader = leaders[group.rank()]
    given = entries if leader == group.rank() else []
    first = entries[0] if entries else _like(kinds)

    def of_all(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        return gather(torch.cat([like[:0], *parts]), 0, group, reduce_gradients=False)

    sizes = first["input_ids"].new_tensor([len(x["input_ids"]) for x in given], dtype=torch.int64)
    counts = sizes.new_tensor([len(given)])
    lengths, of_ranks = (of_all([x], x).tolist() for x in (sizes, counts))
    whole = {key: of_all([x[key] for x in given], first[key])[None] for key in sorted(first)}
    before = sum(of_ranks[:leader])
    own = range(before, before + of_ranks[leader])
    packs = []
    for start, stop in _split(name, lengths, None if most is None else most * group.size()):
        part = slice(sum(lengths[:start]), sum(lengths[:stop]))
        of_pack = tuple(lengths[start:stop])
        ids = torch.arange(stop - start, device=sizes.device).repeat_interleave(sizes.new_tensor(of_pack))
        indices = {at - start: at - before for at in own if start <= at < stop}
        packs.append(
            Pack({key: x[:, part] for key, x in whole.items()} | {"document_ids": ids[None]}, of_pack, indices)
        )
    return packs


def _entries(name: str, samples: Sequence[Sample]) -> list[dict[str, torch.Tensor]]:
    """The entries of each sample, after checks."""
    if isinstance(samples, (torch.Tensor, Mapping)):
        raise ValueError(f"{name}: samples must be a list of this rank's samples, got {_shown(samples)}")
    found: list[dict[str, torch.Tensor]] = []
    for index, sample in enumerate(samples):
        entries = dict(sample) if isinstance(sample, Mapping) else {"input_ids": sample, "labels": sample}
        tokens = entries.get("input_ids")
        if not all(isinstance(x, torch.Tensor) and x.ndim for x in entries.values()) or tokens is None:
            raise TypeError(
                f"{name}: sample {index} must be tokens [n], or tensors [n, ...] by name with input_ids, got "
                f"{_shown(sample)}"
            )
        if "document_ids" in entries or "position_ids" in entries:
            raise ValueError(
                f"{name}: sample {index} has document_ids or position_ids, which the pack makes: leave them"
            )
        if any(len(x) != len(tokens) for x in entries.values()) or not len(tokens):
            sizes = {key: len(x) for key, x in entries.items()}
            raise ValueError(f"{name}: the entries of sample {index} have {sizes} tokens: give each of them as many")
        kinds = [{key: (x.dtype, x.shape[1:]) for key, x in each.items()} for each in (entries, *found[:1])]
        if kinds[0] != kinds[-1]:
            raise ValueError(
                f"{name}: sample {index} has {kinds[0]}, and sample 0 {kinds[-1]}: give all the same entries"
            )
        found.append(entries)
    return found


def _describe(
    name: str, entries: Sequence[Mapping[str, torch.Tensor]], group: dist.ProcessGroup, copies: MeshOrGroup | None
) -> str:
    """A text for all ranks: the rank of ``group`` whose samples count for this rank, which is the first of its
    copies; a hash of the samples, if there are copies; and the entries of a sample, empty without samples."""
    leader, content = group.rank(), 0
    if copies is not None:
        leader = dist.get_group_rank(group, dist.get_global_rank(axis_and_group(name, copies)[1], 0))
        content = fingerprint(describe_content(list(entries)))
    first = entries[0] if entries else {}
    kinds = {key: [str(x.dtype), [*x.shape[1:]], x.device.type] for key, x in sorted(first.items())}
    text = json.dumps([leader, content, kinds])
    if len(text) > TEXT_BYTES:
        raise ValueError(f"{name}: {len(kinds)} entries are too many to compare: give samples fewer entries")
    return text


def _compare(name: str, ranks: Sequence[tuple[int, int, dict[str, Any]]]) -> tuple[list[int], dict[str, Any]]:
    """The leader of each rank, and the entries of a sample. ``ranks``: what each rank has described."""
    kinds = [(rank, kind) for rank, (_, _, kind) in enumerate(ranks) if kind]
    if not kinds:
        raise ValueError(f"{name}: no rank has samples: at the end of the data, end the loop on all ranks")
    first, expected = kinds[0]
    for rank, kind in kinds:
        if kind != expected:
            raise ValueError(
                f"{name}: the samples of rank {rank} have {kind}, and of rank {first} {expected}: give all samples the "
                "same entries"
            )
    for rank, (leader, content, _) in enumerate(ranks):
        if content != ranks[leader][1]:
            raise ValueError(
                f"{name}: ranks {leader} and {rank} are copies, and have loaded other samples: give both the same, or "
                "leave copies= out, for ranks with samples of their own"
            )
    return [leader for leader, *_ in ranks], expected


def _like(kinds: Mapping[str, tuple[str, list[int], str]]) -> dict[str, torch.Tensor]:
    """A sample of no tokens with these entries."""
    return {
        key: torch.empty(0, *trailing, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        for key, (dtype, trailing, device) in kinds.items()
    }


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{ {key: type(x).__name__ for key, x in value.items()} }"
    return f"a {type(value).__name__}"


def _split(name: str, lengths: Sequence[int], room: int | None) -> list[Chunk]:
    """The samples of each pack, in order, with at most ``room`` tokens."""
    if room is None:
        return [(0, len(lengths))]
    ends, tokens = [0], 0
    for index, size in enumerate(lengths):
        if size > room:
            raise ValueError(
                f"{name}: a sample of {size} tokens is longer than the {room} that all ranks can hold: cut it, leave "
                "it out, or raise most="
            )
        if tokens + size > room:
            ends.append(index)
            tokens = 0
        tokens += size
    return [*zip(ends, [*ends[1:], len(lengths)], strict=True)]
