"""One call of an attention, and the agreement of all ranks before it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from cp_styles._lib.checksum import fingerprint
from cp_styles._lib.compat import graph_task_id, running_modules
from cp_styles._lib.contents import raise_what_was_found, running_comparisons
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.agreement import (
    Caller,
    Meeting,
    StatusRow,
    StatusRows,
    agree_on_facts,
    compare,
    pack_call_number,
    plain,
    start_status,
)
from cp_styles.comm.point_to_point import gather_numbers
from cp_styles.engine.binding import Binding, Resolved
from cp_styles.engine.observers import CheckedCall
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.layouts.balancers import may_vary
from cp_styles.layouts.layout import find_cuts
from cp_styles.masks import Causal, Dense
from cp_styles.masks.dense import digest

_SEQ_DIM = 2  # of query, key and value [B, H, S, D]
AnyLayouts = TypeVar("AnyLayouts", bound=tuple[SequenceLayout, ...])


@dataclass(slots=True, eq=False, kw_only=True)
class Call(CheckedCall):
    """One attention of this rank, on which all ranks agree before it.

    Attributes:
        tensors: local query, key and value [B, H, S, D].
        binding: the binding under the scope that applies.
        attn_mask: the mask of the call for the whole sequence.
        arguments: the remaining arguments of the call by name (``is_causal``, ``scale``), which must be equal.
        resolved: the result of the agreement.
    """

    # A class and not a closure: the traceback of an error would keep a closure, and with it the process group, alive.

    binding: Binding
    attn_mask: torch.Tensor | None
    arguments: Mapping[str, Any]
    dtypes: Sequence[torch.dtype] = ()
    resolved: Resolved | None = None

    def meet(self) -> Resolved:
        """Compare the call on all ranks, and return its configuration with the layouts. Call it in an Operation that
        ``meets``.

        Communication: one all-gather (see :func:`~cp_styles.comm.agreement.start_status`). A second all-gather compares
        the layouts of a balancer that is not a function of this package. Another all-gather follows if parameters
        differ.

        Raises :class:`~cp_styles.checks.gradient_watch.UnreducedGradientsError` if the ranks' parameters differ.
        """
        binding, (q, k, v) = self.binding, self.tensors
        rank, fixed = binding.group.rank(), binding.with_fixed_layouts
        operations = binding.group_state.operations
        operations.check = start_status(
            self.row,
            Meeting.ATTENTION,
            *self.where,
            agrees=self.checks.agreement,
            assumed=None if fixed is None else partial(_assume_equal_calls, fixed.lengths_by_rank, rank),
            path=binding.forward_state.path,
            state=binding.group_state,
            judge=self.judge,
        )
        if fixed is not None and self.attn_mask is None:
            lengths, rows = (q.shape[_SEQ_DIM], k.shape[_SEQ_DIM]), fixed.lengths_by_rank
            if lengths == (rows[0][rank], rows[1][rank]) and v.shape[_SEQ_DIM] == lengths[1]:
                return fixed  # see [Note: agreement without waiting] in agreement.py
        operations.run_deferred_check()
        assert self.resolved is not None
        return self.resolved

    def row(self) -> StatusRow:
        """This rank's row. Raises if this rank refuses the call."""
        binding, arguments, (q, k, v), dim = self.binding, self.arguments, self.tensors, _SEQ_DIM
        forward_state = binding.forward_state
        if running_comparisons.get():
            raise_what_was_found()
        if binding.mask_may_change:
            binding.mask.check_unchanged()
        if cut_tensors := find_cuts(self.tensors):
            for cut in cut_tensors:
                binding.refuse_other_cut([cut], q.shape[dim], side=0 if cut[0] is q else -1)
        if forward_state.cuts:
            of_other_ranks = [cut for cut in forward_state.cuts if cut[1].ranks != binding.group.size()]
            binding.refuse_other_cut(of_other_ranks, q.shape[dim])
            if q.shape[0] > 1 and binding.group.size() > 1:
                _refuse_other_dims(binding, forward_state.cuts, q, k)
        elif forward_state.calls == 1 and arguments.get("is_causal"):
            self.orders = graph_task_id() < 0
        if v.shape[dim] != k.shape[dim]:
            raise ValueError(f"{binding.name}: key and value have different lengths: {k.shape[dim]} and {v.shape[dim]}")
        contents = None if self.attn_mask is None else _describe_mask(self.attn_mask)
        self.dtypes = q.dtype, k.dtype, v.dtype
        model = binding.model or forward_state.model
        if model is not None and binding.group.size() > 1 and graph_task_id() < 0:
            place, causal = (binding.site, forward_state.path, forward_state.calls), bool(arguments.get("is_causal"))
            masks = binding.mask_kinds.union([Causal] * causal, [Dense] * (self.attn_mask is not None))
            model.attends(self, place, masks, forward_state.module_call)
        which = zlib.crc32(f"{binding.site} {forward_state.path}".encode()) if binding.site else 0
        facts = (
            *(q.shape[:dim], k.shape[:dim], v.shape[:dim], q.shape[-1], k.shape[-1], v.shape[-1], *self.dtypes),
            *(contents, binding.fingerprint, *arguments, *arguments.values(), self.trains),
            *map(type, arguments.values()),  # 1 and 1.0 are equal, and have other hashes
        )
        numbers = []
        for check in binding.rank_checks:  # not a comprehension: an error's traceback would keep its captured objects
            numbers.append(check.number(self) if binding.checks.agreement else 0)
        return StatusRow(
            q.shape[dim],
            k.shape[dim],
            place=pack_call_number(which, forward_state.calls),
            facts=binding.hashes.get(facts) or binding.hashes.put(facts, fingerprint(facts)),
            numbers=tuple(numbers),
        )

    def judge(self, rows: StatusRows) -> None:
        """Compare the rows of all ranks."""
        binding = self.binding
        columns = rows.columns
        lengths = sum(columns.q_length), sum(columns.kv_length)
        resolved = binding.resolved.get(lengths)
        has_lengths = resolved is not None and resolved.lengths_by_rank == (columns.q_length, columns.kv_length)
        if resolved is None or not (has_lengths and rows.equal and self.attn_mask is None):
            resolved = self._compare_rows(rows, lengths)
        local, forwards = (self.tensors[0].shape[_SEQ_DIM], self.tensors[1].shape[_SEQ_DIM]), binding.forwards
        if forwards.lengths.get(local) != lengths:
            forwards.lengths.put(local, lengths)
        if binding.checks.agreement:
            for check, numbers in zip(binding.rank_checks, columns.numbers, strict=True):
                check.judge(numbers, self)
        if graph_task_id() < 0:
            forwards.thread, forwards.open = threading.get_ident(), True  # in this order for other threads
        binding.group_state.operations.forwards += binding.group.size() > 1
        if self.attn_mask is not None or binding.separates:
            forwards.separated = binding.group_state.operations.forwards
        if self.trains and binding.model is not None and binding.model not in forwards.training:
            binding.model.forward_begins(forwards)
        self.resolved = resolved

    def _compare_rows(self, rows: StatusRows, lengths: tuple[int, int]) -> Resolved:
        """Raise unless the rows of all ranks fit together. Returns the configuration with the layouts."""
        binding, attn_mask = self.binding, self.attn_mask
        problem = "" if attn_mask is None else _explain_local_mask(attn_mask, rows)
        compare(rows, self.where, self.facts, problem and f". {problem}")
        if problem:
            raise ValueError(f"{binding.name}: {problem}")  # on every rank, because their masks are equal
        self._refuse_joined_keys(rows)
        given = binding.layouts
        cuts = agree_on_layouts(self.where, given, partial(binding.cuts, lengths), binding.checks.agreement)
        of_ranks = rows.columns.q_length, rows.columns.kv_length
        for layout, source, local_lengths in zip(cuts, (given[0], given[-1]), of_ranks, strict=True):
            if layout.lengths != local_lengths:
                raise ValueError(
                    f"{binding.name}: the ranks of mesh axis {binding.axis!r} hold {list(local_lengths)} positions, "
                    f"but the layout {plain(source)} gives them {list(layout.lengths)} of "
                    f"{sum(local_lengths)}: cut the inputs with the layout of the attention (layout.shard), or give "
                    f"the attention the layout they were cut with{see('Inputs that were cut in another way')}"
                )
        resolved = binding.with_layouts(cuts)
        if not any(map(may_vary, given)):
            binding.resolved.put(lengths, resolved)
        return resolved

    def _refuse_joined_keys(self, rows: StatusRows) -> None:
        """Raise, on every rank, for keys that each rank has joined from its parts of several pieces.

        Communication: one all-gather of a number, if the keys are several times as long as the queries on every rank.
        """
        # Heads that draft tokens, and caches of earlier pieces, keep such keys. On every rank they are as many times as
        # long as the queries, which keys of one other sequence are too where the lengths divide.
        binding = self.binding
        queries, keys = rows.columns.q_length, rows.columns.kv_length
        pieces = sum(keys) // max(sum(queries), 1) if len(rows) > 1 else 1  # one rank has the pieces one after another
        fits = pieces > 1 and all(pieces * q == k for q, k in zip(queries, keys, strict=True))
        if not fits or binding.kv_layout is not None or graph_task_id() >= 0:
            return  # a recomputation has no arguments of a module, and its first run was looked at
        masked = self.attn_mask is not None or binding.mask.has_bias
        if not (masked or (binding.kernel is not None and binding.kernel.positional)):
            return
        inputs = itertools.chain(*((*args, *kwargs.values()) for _, args, kwargs in running_modules()))
        lengths = {cut.length for _, cut in (*binding.forward_state.cuts, *find_cuts((*self.tensors, *inputs)))}
        # A user's function that holds a layout of this length returns the same object again.
        cut, wanted = binding.layout, (sum(keys), len(rows))
        with contextlib.suppress(Exception):
            if not isinstance(cut, SequenceLayout) and (made := cut(*wanted)) is cut(*wanted):
                lengths.add(made.length)
        is_marked = int(sum(keys) in lengths or sum(keys) in binding.forward_state.sequences)
        # A mark that one rank has lost, as in a broadcast, is on another one.
        marks = gather_numbers([is_marked], binding.group) if binding.checks.agreement else [[is_marked]]
        if not any(map(any, marks)):
            raise NotImplementedError(
                f"{binding.name}: the keys are {pieces} times as long as the queries on every rank, and no input is a "
                f"part of {sum(keys)} tokens: parts of {pieces} pieces seem joined, and the mask has another order. "
                "Give functions and AttentionContextParallel kv_layout=join_layouts(layout, layout), or the layout "
                f"of the keys; whole models layout= a function that looks up the layout of {sum(keys)} tokens"
                f"{see('Keys of several pieces')}"
            )

    def facts(self) -> dict[str, Any]:
        """The properties of the call that must be equal on all ranks, by name."""
        mask = None if self.attn_mask is None else _describe_mask(self.attn_mask)
        shapes = [(*x.shape[:_SEQ_DIM], "L", x.shape[-1]) for x in self.tensors]
        inputs = {"shape": shapes, "dtype": self.dtypes, "attn_mask": mask}
        return inputs | self.binding.facts() | dict(self.arguments) | {_MAY_TRAIN: self.trains}


def agree_on_layouts(
    where: Caller,
    layouts: Sequence[SequenceLayout | Balancer],
    make: Callable[[], AnyLayouts],
    agreement: bool,
) -> AnyLayouts:
    """The layouts that ``make`` returns by ``layouts``, equal on all ranks.

    Communication: one all-gather of a row, if one comes from a balancer that is not a function of this package.
    """
    made: list[AnyLayouts] = []

    def make_layouts() -> tuple[dict[str, Any], StatusRow]:
        made.append(make())
        return {"layout": tuple(cut.chunks for cut in made[0])} if may_differ else {}, StatusRow()

    # Facts of the call compare a SequenceLayout and functions of this package by value. The results of a user's own
    # function may differ, also from call to call. So it is called once for a call, and the ranks compare its results.
    may_differ = agreement and any(map(may_vary, layouts))
    agree_on_facts(make_layouts, Meeting.LAYOUT, where) if may_differ else make_layouts()
    return made[0]


def _assume_equal_calls(lengths: Sequence[Sequence[int]], rank: int, row: Sequence[int]) -> list[Sequence[int]]:
    """Assume that every rank sends this rank's row, with the lengths that the layouts give it."""
    rows: list[Sequence[int]] = [(*both, *row[2:]) for both in zip(*lengths, strict=True)]
    rows[rank] = row
    return rows


def _refuse_other_dims(
    binding: Binding, cuts: Sequence[tuple[torch.Tensor, SequenceLayout]], q: torch.Tensor, k: torch.Tensor
) -> None:
    """Raise for attention whose batch has the tokens: along another dim, of another length, which nothing has cut."""
    parts = {cut.lengths[binding.group.rank()] for _, cut in cuts}
    if not parts.isdisjoint((q.shape[_SEQ_DIM], k.shape[_SEQ_DIM])):
        return  # along the tokens of one of the inputs
    for x, cut in cuts:
        rows = cut.lengths[binding.group.rank()]
        tokens = x.shape[0] * rows if x.ndim > 1 and x.shape[1] == rows else 0
        if rows > 1 and tokens and q.shape[0] % tokens == 0:
            raise ValueError(
                f"{binding.name}: attention over {k.shape[_SEQ_DIM]} positions, with a batch of {q.shape[0]}, in which "
                f"are the {rows} tokens of each row on this rank: it attends along another dim than the tokens (over "
                "layers, in space or in time), which nothing has cut. Leave the style off this module, and give it to "
                f"the modules that attend over tokens{see('Attention along another dim')}"
            )


def _explain_local_mask(attn_mask: torch.Tensor, rows: StatusRows) -> str:
    """The text of an error for a mask of the size of some rank's shard; empty for other masks."""
    lengths = rows.columns.kv_length, rows.columns.q_length
    sizes = zip(reversed(attn_mask.shape), ("keys", "queries"), lengths, strict=False)
    problem = next((f"{size} {side}" for size, side, local in sizes if 1 < size != sum(local) and size in local), "")
    return problem and (
        f"attn_mask of shape {tuple(attn_mask.shape)} is made for the {problem} of one rank's part. Pass the mask of "
        f"the whole sequence, here of {sum(lengths[0])} keys, the same on all ranks and no buffer of a block, or give "
        "the style a mask= (Causal(), SlidingWindow(...)). A model of transformers makes it with "
        "attn_implementation=register_attention(). Keys that are whole on each rank, as a text, need no style"
        f"{see('A mask of one part')}"
    )


_MAY_TRAIN = "whether a backward may follow, which all ranks run or none (under no_grad, or no input requires grad)"


def _describe_mask(mask: torch.Tensor) -> Any:
    return tuple(mask.shape), mask.dtype, digest(mask)
