"""The configuration of an attention on a mesh axis, and the agreement of all ranks before a call."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from cp_styles._compat import call_when_destroyed, graph_task_id, running_modules, uncompiled
from cp_styles.bounded_cache import LatestEntries
from cp_styles.checksum import fingerprint
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
    tell_peers,
    telling,
)
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.group_state import GroupState, state_of
from cp_styles.comm.point_to_point import gather_numbers
from cp_styles.contents import raise_what_was_found, running_comparisons
from cp_styles.engine.observers import CheckedCall, ModelObserver, RankChecks
from cp_styles.kernels import Kernel
from cp_styles.kernels.choice_by_tile import kernel_for_tiles
from cp_styles.layout import (
    Balancer,
    SequenceLayout,
    describe_cut,
    find_cuts,
    is_deterministic,
    layout_made_by,
    layout_of_one,
    refuse_other_cut,
)
from cp_styles.mask import Causal, Dense, Mask
from cp_styles.mask.dense import digest
from cp_styles.strategies import Attention, Ring, Strategy, strategy_on
from cp_styles.troubleshooting import see

_SEQ_DIM = 2  # of query, key and value [B, H, S, D]
Cuts: TypeAlias = tuple[SequenceLayout, SequenceLayout]
"""The layouts of queries and of keys."""


@dataclass
class ForwardState:
    """State of one module forward.

    Attributes:
        calls: number of attention ops that have run.
        functions: whether a function of this package has run over the same ranks, in addition to these ops.
        running: whether the forward runs now. False while torch.compile traces it.
        module_call: the module of the forward with the arguments of its call; empty outside of a forward.
        inputs: these arguments by parameter name; None until they are read.
        cuts: the arguments that a layout has cut, each with its layout.
        layer_mask: a mask other than causal that an integration has made for the layers of this forward.
        path: the path of the innermost module that runs, below the module that has the style.
        sequences: the lengths of more sequences that a layout has cut.
        mixing: whether a mixer of this package calls its kernel, with all the rows that it needs.
        model: observes the model that calls attention in a block.
    """

    calls: int = 0
    functions: bool = False
    running: bool = False
    module_call: tuple[Any, ...] = ()
    inputs: dict[str, Any] | None = field(default_factory=dict)
    cuts: Sequence[tuple[torch.Tensor, SequenceLayout]] = ()
    layer_mask: Any = None
    path: str = ""
    sequences: Collection[int] = ()
    mixing: bool = False
    model: ModelObserver | None = None


@dataclass(frozen=True)
class Binding:
    """The configuration of context-parallel attention on one mesh axis, without the arguments of a call.

    Attributes:
        name: name of the module or function, for messages.
        axis: name of the mesh axis, for messages.
        group: the ranks that share the sequence.
        strategy: how keys and values get to the queries.
        layout: the layout, or the balancer that makes it from (length, ranks).
        mask: which keys each query attends to, in addition to ``is_causal`` of the call.
        kernel: computes the tiles that it can, see :func:`~cp_styles.kernels.choice_by_tile.kernel_for_tiles`. None
            prefers the fused kernel of the call.
        heads: the range of query heads in a call, if other axes cut the heads; otherwise None.
        mask_shape: the (batch, heads) that a mask of the call must fit, if other axes cut them; otherwise None.
        forward_state: state of the module's forward. An error is raised if its attention was not reached.
        checks: what the ranks check of each other.
        model: observes the model that has the attention; None for functions.
        site: the number of the module among the modules of its style, whose names may be equal; 0 for functions.
        in_graphs: the results of :func:`~cp_styles.engine.custom_ops.make_graph_config`, by whether the user gave a
            layout, each with the binding that runs in graphs.
    """

    name: str
    axis: str
    group: dist.ProcessGroup
    strategy: Strategy
    layout: SequenceLayout | Balancer
    mask: Mask
    kernel: Kernel | None = None
    heads: tuple[int, int] | None = None
    mask_shape: tuple[int, int] | None = None
    forward_state: ForwardState = field(default_factory=ForwardState, compare=False, repr=False)
    checks: Checks = field(default=CHECKS, compare=False, repr=False)
    model: ModelObserver | None = field(default=None, compare=False, repr=False)
    site: int = field(default=0, compare=False, repr=False)
    in_graphs: dict[bool, Any] = field(init=False, default_factory=dict, compare=False, repr=False)
    _calls: LatestEntries[Cuts | tuple[int, int], ResolvedCall] = field(
        init=False, default_factory=LatestEntries, compare=False, repr=False
    )
    _hashes: LatestEntries[Any, int] = field(init=False, default_factory=LatestEntries, compare=False, repr=False)
    _variants: LatestEntries[Any, Binding] = field(  # few, because a mask may hold a tensor
        init=False, default_factory=partial(LatestEntries, 8), compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise TypeError(f"{self.name}: strategy must be a Strategy object such as Ring(), got {self.strategy!r}")
        if not isinstance(self.layout, SequenceLayout) and not callable(self.layout):
            raise TypeError(
                f"{self.name}: layout must be a SequenceLayout or a function (length, ranks) -> SequenceLayout such as "
                f"head_tail, got {self.layout!r}"
            )
        if not isinstance(self.mask, Mask):
            raise TypeError(f"{self.name}: mask must be a Mask object such as Causal(), got {self.mask!r}")
        if self.group_state.alone:  # strategy and layout were made for the ranks that this rank replaces
            object.__setattr__(self, "strategy", Ring())
            object.__setattr__(self, "layout", layout_of_one(self.layout))
        object.__setattr__(self, "strategy", strategy_on(self.strategy, self.group.size(), self.mask))
        if not isinstance(self.checks, Checks):
            raise TypeError(f"{self.name}: checks must be a Checks object such as Checks(), got {self.checks!r}")
        self.group_state.learn(self.checks)
        if self.kernel is not None and not isinstance(self.kernel, Kernel):
            raise TypeError(f"{self.name}: kernel must be a Kernel object or None, got {self.kernel!r}")
        if isinstance(self.layout, SequenceLayout) and self.layout.ranks != self.group.size():
            raise ValueError(
                f"{self.name}: the layout cuts the sequence for {self.layout.ranks} ranks, mesh axis {self.axis!r} has "
                f"{self.group.size()}: make it for the ranks that share the sequence, or give a balancer (head_tail)"
            )

    def layout_for(self, length: int) -> SequenceLayout:
        """The layout of a sequence of ``length`` positions."""
        if not isinstance(self.layout, SequenceLayout):
            return layout_made_by(self.layout, length, self.group.size())
        if self.layout.length != length:
            remedy = (
                "build the layout for this length, or give a balancer such as head_tail. Attention along another dim "
                "than the tokens needs no style"
            )
            if length == self.layout.length * self.group.size():
                remedy = "it seems that each was given the whole sequence: cut it with layout.shard"
            raise ValueError(
                f"{self.name}: the layout cuts {self.layout.length} positions, the ranks of mesh axis {self.axis!r} "
                f"hold {length} together; {remedy}{see('A layout of another length')}"
            )
        return self.layout

    @property
    def group_name(self) -> str:
        """The name of :attr:`group`."""
        return self.group.group_name

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        """The binding of a copied module. Its state, its model and the parameters that may differ are of the copy."""
        checks = replace(self.checks, local=copy.deepcopy(self.checks.local, memo))
        model = copy.deepcopy(self.model, memo)
        copied = memo[id(self)] = replace(self, forward_state=ForwardState(), checks=checks, model=model)
        return copied

    def resolve(self) -> tuple[Binding, None]:
        """This binding without a scope, like :meth:`~cp_styles.engine.scope.ScopedBinding.resolve`."""
        return self, None

    def without_kept_keys(self) -> Binding:
        """This binding with a strategy that keeps no received keys for the backward. Cached."""
        strategy = self.strategy.without_kept_keys()
        return self._variants.get(strategy) or self._variants.put(strategy, replace(self, strategy=strategy))

    def with_heads(self, heads: tuple[int, int], mask_shape: tuple[int, int]) -> Binding:
        """This binding for a range of the heads. Cached."""
        key = heads, mask_shape
        return self._variants.get(key) or self._variants.put(key, replace(self, heads=heads, mask_shape=mask_shape))

    def with_kernel(self, kernel: Kernel) -> Binding:
        """This binding with another kernel. Cached."""
        return self._variants.get(kernel) or self._variants.put(kernel, replace(self, kernel=kernel))

    def with_mask(self, source: Any, mask_of: Callable[[Any], Mask] | None = None) -> Binding:
        """This binding with an additional mask, ``source`` or ``mask_of(source)``. Cached, so that layers share it."""
        if mask_of is None and not source.parts:
            return self
        key = source, mask_of
        binding = self._variants.get(key)
        if binding is None:
            mask = self.mask & (source if mask_of is None else mask_of(source))
            binding = replace(self, mask=mask)
            if mask.only_for is None:  # keys are selected anew for each call, and take memory
                self._variants.put(key, binding)
        return binding

    def agree(
        self,
        tensors: Sequence[torch.Tensor],
        call: Mapping[str, Any],
        keep: bool,
        attn_mask: torch.Tensor | None = None,
    ) -> ResolvedCall:
        """Compare one call on all ranks, and return it with its layouts. Call it in an Operation that ``meets``.

        Args:
            tensors: local query, key and value [B, H, S, D].
            call: the remaining arguments of the call by name (``is_causal``, ``scale``).
            keep: whether a backward of the call may follow.
            attn_mask: the mask of the call for the whole sequence.

        Communication: one all-gather (see :func:`~cp_styles.comm.agreement.start_status`). A second all-gather compares
        the layouts of a balancer that is not a function of this package. Another all-gather follows if parameters
        differ.

        Raises :class:`~cp_styles.checks.gradient_watch.UnreducedGradientsError` if the ranks' parameters differ.
        """
        layout, rank = self.layout, self.group.rank()
        fixed = layout if isinstance(layout, SequenceLayout) else None
        where = self.name, self.axis, self.group
        checked = where, self.checks, tensors, self.model or self.forward_state.model, keep
        agreement = _AttentionAgreement(*checked, binding=self, attn_mask=attn_mask, call=call)
        operations = self.group_state.operations
        operations.check = start_status(
            agreement.row,
            Meeting.ATTENTION,
            *where,
            agrees=self.checks.agreement,
            assumed=None if fixed is None else partial(_assume_equal_calls, fixed, rank),
            path=self.forward_state.path,
            state=self.group_state,
            judge=agreement.judge,
        )
        q, k, v = tensors
        length = None if fixed is None else fixed.lengths[rank]
        if attn_mask is None and q.shape[_SEQ_DIM] == k.shape[_SEQ_DIM] == v.shape[_SEQ_DIM] == length:
            return self.call_with_fixed_layout  # see [Note: agreement without waiting] in agreement.py
        operations.run_deferred_check()
        assert agreement.resolved is not None
        return agreement.resolved

    def cuts(self, lengths: tuple[int, int]) -> Cuts:
        """The layouts of queries and of keys for these global lengths."""
        first = self.layout_for(lengths[0])
        return first, first if lengths[1] == lengths[0] else self.layout_for(lengths[1])

    def call_with(self, cuts: Cuts) -> ResolvedCall:
        """The call of this configuration with these layouts. Cached."""
        # The call holds a copy of the binding: a cycle of references would keep the group and its connections alive.
        return self._calls.get(cuts) or self._calls.put(cuts, ResolvedCall(replace(self), cuts))

    @cached_property
    def call_with_fixed_layout(self) -> ResolvedCall:
        """The call with the layout of this binding, which is a SequenceLayout."""
        assert isinstance(self.layout, SequenceLayout)
        return self.call_with((self.layout, self.layout))

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """A context that tells the other ranks of an error that leaves it."""
        return telling(self.name, self.group, agrees=self.checks.agreement)

    @uncompiled
    def tell_peers(self, error: BaseException) -> None:
        """Tell the other ranks of an error that this rank raises: :func:`~cp_styles.comm.agreement.tell_peers`."""
        tell_peers(self.name, self.group, error, agrees=self.checks.agreement)

    def refuse_other_cut(
        self, cut_tensors: Sequence[tuple[torch.Tensor, SequenceLayout]], q_length: int | None = None
    ) -> None:
        """Raise ValueError for tensors that another layout cut.

        ``q_length`` is the number of local queries. With it, raise also for shards of this length from a layout for
        another number of ranks.
        """
        # Lengths do not show another layout, because most layouts have equal lengths.
        for tensor, cut in cut_tensors:
            if cut.ranks != self.group.size():
                # A tensor of another length may be right: a rank's tokens may be cut once more over another axis.
                if q_length in tensor.shape and q_length in cut.lengths:
                    raise ValueError(
                        f"{self.name}: an input of shape {tuple(tensor.shape)} was cut with a layout for {cut.ranks} "
                        f"ranks, mesh axis {self.axis!r} has {self.group.size()}, so positions of other ranks would be "
                        "missing or there twice: make the layout for the ranks that share the sequence, such as "
                        f"head_tail(length, mesh[{self.axis!r}].size())"
                        f"{see('A tensor that was cut with another layout')}"
                    )
                continue
            layout = self.layout if isinstance(self.layout, SequenceLayout) else self.layout_for(cut.length)
            refuse_other_cut(self.name, (tensor,), layout, plain(self.layout))

    def facts(self) -> dict[str, Any]:
        """The configuration that ranks compare, by name."""
        contents = self.mask.content, 0 if self.kernel is None else self.kernel.content
        return {
            "strategy": self.strategy,
            "layout": describe_cut(self.layout),
            "mask": self.mask,
            "the contents of the mask": contents[0],
            "kernel": self.kernel,
            "the contents of the kernel": contents[1],
            "agreement": self.checks.agreement,
        }

    @cached_property
    def group_state(self) -> GroupState:
        return state_of(self.group)

    @cached_property
    def rank_checks(self) -> RankChecks:
        return self.group_state.get_or_create(RankChecks)

    @cached_property
    def mask_kinds(self) -> frozenset[type[Mask]]:
        """The classes of the parts of the mask. Full is no part."""
        return frozenset(map(type, self.mask.parts))

    @cached_property
    def separates(self) -> bool:
        """Whether the mask, or a score_mod, may keep the documents of a pack apart."""
        return self.mask.separates or (self.kernel is not None and self.kernel.positional)

    @cached_property
    def _fingerprint(self) -> int:
        return fingerprint(list(map(plain, self.facts().values())))


@dataclass(eq=False)
class ResolvedCall:
    """A configuration, and the layouts of queries and of keys on which the ranks have agreed for it."""

    binding: Binding
    cuts: Cuts
    serial: int = field(init=False, default_factory=itertools.count(1).__next__)
    _attentions: LatestEntries[tuple[Any, ...], Attention] = field(
        init=False, default_factory=LatestEntries, repr=False
    )

    @cached_property
    def lengths(self) -> tuple[int, int]:
        """The global numbers of queries and keys."""
        return self.cuts[0].length, self.cuts[1].length

    @cached_property
    def lengths_by_rank(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The numbers of queries on each rank, and the numbers of keys."""
        return self.cuts[0].lengths, self.cuts[1].lengths

    def attention(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        is_causal: bool,
        scale: float | None,
        attn_mask: torch.Tensor | None = None,
    ) -> Attention:
        """The attention of this call, for its local query, key and value [B, H, S, D]. Cached. No communication.

        ``attn_mask`` is the mask of the call, for the whole sequence, in the order of positions. Errors do not depend
        on the rank, so every rank raises them.
        """
        if attn_mask is not None or self.binding.group_state.planted is not None:
            return self._attention(tensors, attn_mask, is_causal, scale)
        q, k, v = tensors
        key = q.shape, k.shape, v.shape, q.dtype, q.device, is_causal, scale
        attention = self._attentions.get(key)
        if attention is None:
            try:
                attention = self._attentions.put(key, self._attention(tensors, None, is_causal, scale))
            except Exception:
                # Ranks that disagree may be the cause. The deferred check then raises their error first.
                self.binding.group_state.operations.run_deferred_check()
                raise
        return attention

    def _attention(
        self, tensors: Sequence[torch.Tensor], attn_mask: torch.Tensor | None, is_causal: bool, scale: float | None
    ) -> Attention:
        q, k, v = tensors
        binding, (q_length, kv_length) = self.binding, self.lengths
        if kv_length != q_length and (is_causal or binding.mask.positional):
            what = "is_causal=True" if is_causal else repr(binding.mask)
            raise ValueError(
                f"{binding.name}: {what} with {q_length} queries and {kv_length} keys: positions of the two sequences "
                "do not correspond. Cross-attention takes no positional mask; pass is_causal=False"
            )
        mask = binding.mask & Causal() if is_causal else binding.mask
        try:
            mask = mask if attn_mask is None else mask & Dense(attn_mask)
            _check_shapes(q, k, v, k.shape[3] if binding.kernel is None else binding.kernel.dims(k, v)[0])
            mask.check((*(binding.mask_shape or (q.shape[0], q.shape[1])), q_length, kv_length))
        except ValueError as error:
            raise ValueError(f"{binding.name}: {error}") from None
        if (planted := binding.group_state.planted) is not None:
            mask = planted.mask(mask, q_length, kv_length)
        if scale is None:
            scale = 1.0 / math.sqrt(q.shape[-1])
        try:
            kernel = kernel_for_tiles(tensors, named=binding.kernel)
        except NotImplementedError as error:
            raise NotImplementedError(f"{binding.name}: {error}") from None
        return Attention(binding.group, *self.cuts, mask, kernel, scale, binding.heads)


@dataclass(slots=True, eq=False, kw_only=True)
class _AttentionAgreement(CheckedCall):
    """The agreement of all ranks before one attention: this rank's row, and the comparison of the rows of all ranks.

    See :meth:`Binding.agree` for the fields.
    """

    # A class and not a closure: the traceback of an error would keep a closure, and with it the process group, alive.

    binding: Binding
    attn_mask: torch.Tensor | None
    call: Mapping[str, Any]
    dtypes: Sequence[torch.dtype] = ()
    resolved: ResolvedCall | None = None

    def row(self) -> StatusRow:
        """This rank's row. Raises if this rank refuses the call."""
        binding, call, (q, k, v), dim = self.binding, self.call, self.tensors, _SEQ_DIM
        forward_state = binding.forward_state
        if running_comparisons.get():
            raise_what_was_found()
        binding.mask.check_unchanged()
        if cut_tensors := find_cuts(self.tensors):
            binding.refuse_other_cut(cut_tensors, q.shape[dim])
        if forward_state.cuts:
            of_other_ranks = [cut for cut in forward_state.cuts if cut[1].ranks != binding.group.size()]
            binding.refuse_other_cut(of_other_ranks, q.shape[dim])
            if q.shape[0] > 1 and binding.group.size() > 1:
                _refuse_other_dims(binding, forward_state.cuts, q, k)
        elif forward_state.calls == 1 and call.get("is_causal"):
            self.orders = graph_task_id() < 0
        if v.shape[dim] != k.shape[dim]:
            raise ValueError(f"{binding.name}: key and value have different lengths: {k.shape[dim]} and {v.shape[dim]}")
        contents = None if self.attn_mask is None else _describe_mask(self.attn_mask)
        self.dtypes = q.dtype, k.dtype, v.dtype
        model = binding.model or forward_state.model
        if model is not None and binding.group.size() > 1 and graph_task_id() < 0:
            place, causal = (binding.site, forward_state.path, forward_state.calls), bool(call.get("is_causal"))
            masks = binding.mask_kinds.union([Causal] * causal, [Dense] * (self.attn_mask is not None))
            model.attends(self, place, masks, forward_state.module_call)
        which = zlib.crc32(f"{binding.site} {forward_state.path}".encode()) if binding.site else 0
        facts = (
            *(q.shape[:dim], k.shape[:dim], v.shape[:dim], q.shape[-1], k.shape[-1], v.shape[-1], *self.dtypes),
            *(contents, binding._fingerprint, *call, *call.values(), self.trains),
            *map(type, call.values()),  # 1 and 1.0 are equal, and have other hashes
        )
        numbers = []
        for check in binding.rank_checks:  # not a comprehension: an error's traceback would keep its captured objects
            numbers.append(check.number(self) if binding.checks.agreement else 0)
        return StatusRow(
            q.shape[dim],
            k.shape[dim],
            place=pack_call_number(which, forward_state.calls),
            facts=binding._hashes.get(facts) or binding._hashes.put(facts, fingerprint(facts)),
            numbers=tuple(numbers),
        )

    def judge(self, rows: StatusRows) -> None:
        """Compare the rows of all ranks."""
        binding = self.binding
        columns = rows.columns
        lengths = sum(columns.q_length), sum(columns.kv_length)
        call = binding._calls.get(lengths)
        has_lengths = call is not None and call.lengths_by_rank == (columns.q_length, columns.kv_length)
        if call is None or not (has_lengths and rows.equal and self.attn_mask is None):
            call = self._compare_rows(rows, lengths)
        local, state = (self.tensors[0].shape[_SEQ_DIM], self.tensors[1].shape[_SEQ_DIM]), binding.group_state
        if state.lengths.get(local) != lengths:
            state.lengths.put(local, lengths)
        if binding.checks.agreement:
            for check, numbers in zip(binding.rank_checks, columns.numbers, strict=True):
                check.judge(numbers, self)
        if graph_task_id() < 0:
            state.thread, state.forward_open = threading.get_ident(), True  # in this order for other threads
        state.operations.forwards += binding.group.size() > 1
        if self.attn_mask is not None or binding.separates:
            state.separated = state.operations.forwards
        if self.trains and binding.model is not None and binding.model not in state.training:
            binding.model.forward_begins(state)
        self.resolved = call

    def _compare_rows(self, rows: StatusRows, lengths: tuple[int, int]) -> ResolvedCall:
        """Raise unless the rows of all ranks fit together. Returns the call."""
        binding, attn_mask = self.binding, self.attn_mask
        problem = "" if attn_mask is None else _explain_local_mask(attn_mask, rows)
        compare(rows, self.where, self.facts, problem and f". {problem}")
        if problem:
            raise ValueError(f"{binding.name}: {problem}")  # on every rank, because their masks are equal
        self._refuse_joined_keys(rows)
        cuts = agree_on_layouts(self.where, binding.layout, binding.layout_for, lengths, binding.checks.agreement)
        for layout, local_lengths in zip(cuts, (rows.columns.q_length, rows.columns.kv_length), strict=True):
            if layout.lengths != local_lengths:
                raise ValueError(
                    f"{binding.name}: the ranks of mesh axis {binding.axis!r} hold {list(local_lengths)} positions, "
                    f"but the layout {plain(binding.layout)} gives them {list(layout.lengths)} of "
                    f"{sum(local_lengths)}: cut the inputs with the layout of the attention (layout.shard), or give "
                    f"the attention the layout they were cut with{see('Inputs that were cut in another way')}"
                )
        call = binding.call_with(cuts)
        if isinstance(binding.layout, SequenceLayout) or is_deterministic(binding.layout):
            binding._calls.put(lengths, call)
        return call

    def _refuse_joined_keys(self, rows: StatusRows) -> None:
        """Raise, on every rank, for keys that each rank has joined from its parts of several pieces.

        Communication: one all-gather of a number, if the keys are several times as long as the queries on every rank.
        """
        # Heads that draft tokens, and caches of earlier pieces, keep such keys. On every rank they are as many times as
        # long as the queries, which keys of one other sequence are too where the lengths divide.
        binding = self.binding
        queries, keys = rows.columns.q_length, rows.columns.kv_length
        pieces = sum(keys) // max(sum(queries), 1) if len(rows) > 1 else 1  # one rank has the pieces one after another
        if pieces < 2 or any(pieces * q != k for q, k in zip(queries, keys, strict=True)) or graph_task_id() >= 0:
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
                "Lay them out by SequenceLayout.from_chunks. Keys of one other sequence: cut it by layout.shard, and "
                f"give the part to a module. Or give layout= a function that looks up the layout of {sum(keys)} tokens"
                f"{see('Keys of several pieces')}"
            )

    def facts(self) -> dict[str, Any]:
        """The properties of the call that must be equal on all ranks, by name."""
        mask = None if self.attn_mask is None else _describe_mask(self.attn_mask)
        shapes = [(*x.shape[:_SEQ_DIM], "L", x.shape[-1]) for x in self.tensors]
        inputs = {"shape": shapes, "dtype": self.dtypes, "attn_mask": mask}
        return inputs | self.binding.facts() | dict(self.call) | {_MAY_TRAIN: self.trains}


def agree_on_layouts(
    where: Caller,
    layout: SequenceLayout | Balancer,
    layout_for: Callable[[int], SequenceLayout],
    lengths: tuple[int, int],
    agreement: bool,
) -> Cuts:
    """The layouts of queries and keys for these global ``lengths``, equal on all ranks.

    Communication: one all-gather of a row, if the layout comes from a balancer that is not a function of this package.
    """
    cuts = ()

    def make_layouts() -> tuple[dict[str, Any], StatusRow]:
        nonlocal cuts
        first = layout_for(lengths[0])
        cuts = first, first if lengths[1] == lengths[0] else layout_for(lengths[1])
        return {"layout": tuple(cut.chunks for cut in cuts)} if may_differ else {}, StatusRow()

    # Facts of the call compare a SequenceLayout and functions of this package by value. The results of a user's own
    # function may differ, also from call to call. So it is called once for a call, and the ranks compare its results.
    may_differ = agreement and not isinstance(layout, SequenceLayout) and not is_deterministic(layout)
    agree_on_facts(make_layouts, Meeting.LAYOUT, where) if may_differ else make_layouts()
    assert cuts
    return cuts


class LatestBindings(LatestEntries[Any, Any]):
    """The latest bindings of functions' calls and of compiled graphs over a group.

    Bindings hold the group, with its connections and threads. So the entries are dropped when the group is destroyed.
    """


def get_bindings(group: dist.ProcessGroup) -> LatestBindings:
    objects = state_of(group).objects
    bindings = objects.get(LatestBindings)
    if bindings is None:
        bindings = objects[LatestBindings] = LatestBindings(64)
        call_when_destroyed(group, bindings.clear)
    return bindings


def _assume_equal_calls(layout: SequenceLayout, rank: int, row: StatusRow) -> list[StatusRow]:
    """Assume that every rank sends this rank's row, with the length that the layout gives it."""
    rows = [row._replace(q_length=length, kv_length=length) for length in layout.lengths]
    return [*rows[:rank], row, *rows[rank + 1 :]]


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


def refuse_dropout(name: str, dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError(
            f"{name}: dropout_p={dropout_p} is not supported: the random numbers of the ranks would have to equal "
            "the numbers of one device. Set dropout to 0, or apply it after the attention"
            f"{see('Dropout in the attention')}"
        )


def refuse_unknown(name: str, function: str, arguments: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for arguments of a later torch than this package knows, unless they are None."""
    if any(value is not None for value in arguments.values()):
        raise NotImplementedError(f"{name}: {function} with an unknown argument: {dict(arguments)}; leave it out")


def refuse_grouped(name: str, heads: int, kv_heads: int, enable_gqa: bool) -> None:
    """Raise ValueError for fewer key heads than query heads without ``enable_gqa``, unless one key head broadcasts."""
    if heads != kv_heads and kv_heads != 1 and not enable_gqa:
        raise ValueError(f"{name}: {heads} query heads and {kv_heads} key/value heads need enable_gqa=True")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dim: int) -> None:
    """Raise ValueError unless the shapes [B, H, S, D] fit without broadcasting. ``dim``: D of the keys."""
    # An empty shard would broadcast silently.
    batches, heads = ([x.shape[dim] for x in (q, k, v)] for dim in (0, 1))
    if len(set(batches)) > 1:
        raise ValueError(f"query, key and value have batches of {batches[0]}, {batches[1]} and {batches[2]}")
    if heads[1] != heads[2]:
        raise ValueError(f"there are {heads[1]} key heads and {heads[2]} value heads")
    if heads[1] == 0 or heads[0] % heads[1]:
        raise ValueError(
            f"{heads[0]} query heads are not a multiple of {heads[1]} key/value heads{see('Heads that do not fit')}"
        )
    if q.shape[3] != dim:
        raise ValueError(f"the head dims of query and key differ: {q.shape[3]} and {dim}")


def _describe_mask(mask: torch.Tensor) -> Any:
    return tuple(mask.shape), mask.dtype, digest(mask)
