"""The configuration of an attention on a mesh axis, and what follows from it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from cp_styles._lib.bounded_cache import LatestEntries, is_value
from cp_styles._lib.checksum import fingerprint
from cp_styles._lib.compat import call_when_destroyed, uncompiled
from cp_styles._lib.troubleshooting import see
from cp_styles.collectives.replicas import LocalItems
from cp_styles.comm.agreement import plain, tell_peers, telling
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.group_state import Forwards, GroupState, state_of
from cp_styles.comm.groups import MeshOrGroup, Role, axis_and_group, state_if_simple
from cp_styles.engine.config import AttentionConfig, ConfigInGraph, config_in_graph
from cp_styles.engine.observers import ModelObserver, RankChecks
from cp_styles.engine.scope import ScopeHistory, SequenceScope, all_open_entries, open_entries
from cp_styles.kernels import Kernel
from cp_styles.kernels.choice_by_tile import kernel_for_tiles
from cp_styles.layouts import Balancer, SequenceLayout, head_tail
from cp_styles.layouts.balancers import describe_cut, layout_made_by, layout_of_one
from cp_styles.layouts.layout import refuse_other_cut
from cp_styles.masks import Causal, Dense, Mask
from cp_styles.strategies import Attention, Ring, Strategy, strategy_on

Cuts: TypeAlias = tuple[SequenceLayout, SequenceLayout]
"""The layouts of queries and of keys."""


@dataclass
class ForwardState(ScopeHistory):
    """State of one module forward, and the history of the scopes of the module or block.

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
        was_scoped: see :class:`~cp_styles.engine.scope.ScopeHistory`.
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
    was_scoped: bool = False


@dataclass(frozen=True, eq=False)
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
        kv_layout: the layout of keys that number another sequence than the queries, or the balancer that makes it.
            None: ``layout`` cuts both.
        heads: the range of query heads in a call, if other axes cut the heads; otherwise None.
        mask_shape: the (batch, heads) that a mask of the call must fit, if other axes cut them; otherwise None.
        forward_state: state of the module's forward. An error is raised if its attention was not reached.
        checks: what the ranks check of each other.
        model: observes the model that has the attention; None for functions.
        site: the number of the module among the modules of its style, whose names may be equal; 0 for functions.
        has_layout: with a history: the user gave the layout, which a scope must have too. Otherwise a scope's applies.
        history: of the scopes around its calls; None if no scope applies to it, or applies further.
        resolved: this configuration with the layouts of its latest calls, by these and by the lengths.
        hashes: of the facts of its latest calls.
    """

    name: str
    axis: str
    group: dist.ProcessGroup
    strategy: Strategy
    layout: SequenceLayout | Balancer
    mask: Mask
    kernel: Kernel | None = None
    kv_layout: SequenceLayout | Balancer | None = None
    heads: tuple[int, int] | None = None
    mask_shape: tuple[int, int] | None = None
    forward_state: ForwardState = field(default_factory=ForwardState, repr=False)
    checks: Checks = field(default=CHECKS, repr=False)
    model: ModelObserver | None = field(default=None, repr=False)
    site: int = field(default=0, repr=False)
    has_layout: bool = field(default=True, repr=False)
    history: ScopeHistory | None = field(default=None, repr=False)
    resolved: LatestEntries[Cuts | tuple[int, int], Resolved] = field(
        init=False, default_factory=LatestEntries, repr=False
    )
    hashes: LatestEntries[Any, int] = field(init=False, default_factory=LatestEntries, repr=False)
    _variants: LatestEntries[Any, Binding] = field(  # few, because a mask may hold a tensor
        init=False, default_factory=partial(LatestEntries, 8), repr=False
    )
    # One binding for each scope, not for each call, so that cached results live as long as the scope.
    _by_scope: WeakKeyDictionary[SequenceScope, Binding] = field(
        init=False, default_factory=WeakKeyDictionary, repr=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise TypeError(f"{self.name}: strategy must be a Strategy object such as Ring(), got {self.strategy!r}")
        for name, layout in self._named_layouts:
            if not isinstance(layout, SequenceLayout) and not callable(layout):
                raise TypeError(
                    f"{self.name}: {name} must be a SequenceLayout or a function (length, ranks) -> SequenceLayout, "
                    f"such as head_tail, got {layout!r}"
                )
        if not isinstance(self.mask, Mask):
            raise TypeError(f"{self.name}: mask must be a Mask object such as Causal(), got {self.mask!r}")
        if self.role.alone:  # strategy and layout were made for the ranks that this rank replaces
            object.__setattr__(self, "strategy", Ring())
            for name, layout in self._named_layouts:
                object.__setattr__(self, name, layout_of_one(layout))
        object.__setattr__(self, "strategy", strategy_on(self.strategy, self.group.size(), self.mask))
        if not isinstance(self.checks, Checks):
            raise TypeError(f"{self.name}: checks must be a Checks object such as Checks(), got {self.checks!r}")
        self.group_state.get_or_create(LocalItems).update(dict.fromkeys(self.checks.local))
        if self.kernel is not None and not isinstance(self.kernel, Kernel):
            raise TypeError(f"{self.name}: kernel must be a Kernel object or None, got {self.kernel!r}")
        for name, layout in self._named_layouts:
            if isinstance(layout, SequenceLayout) and layout.ranks != self.group.size():
                raise ValueError(
                    f"{self.name}: the {name} cuts the sequence for {layout.ranks} ranks, mesh axis {self.axis!r} has "
                    f"{self.group.size()}: make it for the ranks that share the sequence, or give a balancer "
                    "(head_tail)"
                )

    @property
    def _named_layouts(self) -> list[tuple[str, SequenceLayout | Balancer]]:
        return [("layout", self.layout), *([] if self.kv_layout is None else [("kv_layout", self.kv_layout)])]

    @property
    def layouts(self) -> tuple[SequenceLayout | Balancer, ...]:
        """:attr:`layout`, and :attr:`kv_layout` if there is one."""
        return tuple(layout for _, layout in self._named_layouts)

    def layout_for(self, length: int, *, of_keys: bool = False) -> SequenceLayout:
        """The layout of a sequence of ``length`` positions: of keys, or of queries."""
        layout = self.layouts[-1] if of_keys else self.layout
        if not isinstance(layout, SequenceLayout):
            return layout_made_by(layout, length, self.group.size())
        if layout.length != length:
            remedy = (
                "build the layout for this length, or give a balancer such as head_tail. Attention along another dim "
                "than the tokens needs no style"
            )
            if length == layout.length * self.group.size():
                remedy = "it seems that each was given the whole sequence: cut it with layout.shard"
            raise ValueError(
                f"{self.name}: the layout cuts {layout.length} positions, the ranks of mesh axis {self.axis!r} hold "
                f"{length} together; {remedy}{see('A layout of another length')}"
            )
        return layout

    @property
    def group_name(self) -> str:
        """The name of :attr:`group`."""
        return self.group.group_name

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        """The binding of a copied module. Its state, its model and the parameters that may differ are of the copy."""
        checks = replace(self.checks, local=copy.deepcopy(self.checks.local, memo))
        own: dict[str, Any] = {"forward_state": ForwardState(), "model": copy.deepcopy(self.model, memo)}
        own["history"] = self.history and own["forward_state"]
        copied = memo[id(self)] = replace(self, checks=checks, **own)
        return copied

    def with_scopes(self, *, has_layout: bool) -> Binding:
        """This binding with the scopes around its calls. Cached."""
        key, options = ("scopes", has_layout), {"has_layout": has_layout, "history": self.forward_state}
        return self._variants.get(key) or self._variants.put(key, replace(self, **options))

    @property
    def unscoped(self) -> Binding:
        """This binding, over the stand-in for its group if there is one."""
        role = self.role
        if role.stand_in is None:
            return self
        return role.objects.get(self) or role.objects.setdefault(self, replace(self, group=role.stand_in))

    def now(self) -> tuple[Binding, SequenceScope | None]:
        """The binding for a call at this moment, and the scope that applies.

        Raises:
            RuntimeError: on every rank, in a recomputation without its scope.
            ValueError: on every rank, if the user gave the module another layout than the scope.
        """
        if self.history is None:
            return self, None
        unscoped = self if self.role.stand_in is None else self.unscoped
        if not (open_entries.get() or all_open_entries or self.history.was_scoped):
            return unscoped, None
        with unscoped.telling():
            scope = self.history.find_scope(self.name, self.axis, unscoped.layout if self.has_layout else None)
        if scope is None:
            return unscoped, None
        if scope not in unscoped._by_scope:
            unscoped._by_scope[scope] = unscoped.bind_scope(scope.layout, scope.mask)
        return unscoped._by_scope[scope], scope

    def bind_scope(self, layout: SequenceLayout, mask: Mask) -> Binding:
        """The binding under a scope with this layout and mask."""
        return replace(self, layout=layout, mask=self.mask & mask, history=None)

    @cached_property
    def in_graph(self) -> tuple[ConfigInGraph, Binding]:
        """The configuration for the calls of a style or block in a graph, and the binding of these calls.

        If the configuration has no value, the op raises the error.
        """
        where = self.name, self.axis, self.group.group_name
        parts = self.strategy, self.layout, self.mask, self.kernel, self.kv_layout
        try:
            in_graph = config_in_graph(*where, *parts, checks=self.checks, has_layout=self.has_layout, has_owner=True)
        except TypeError as error:
            problem = f"under torch.compile {error}"
            config = AttentionConfig(*where, (), True, False, self.has_layout, True, problem)
            in_graph = ConfigInGraph(config, None)
        # Equal configurations, such as the layers of a model, share a binding. Graphs count no calls.
        copied = replace(self, forward_state=ForwardState(), site=0)
        bindings = self.group_state.get_or_create(BindingsInGraphs)
        return in_graph, bindings.setdefault(in_graph.config, copied)

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

    def with_keys(self, layout: SequenceLayout, mask: Mask, strategy: Strategy) -> Binding:
        """This binding for keys of another sequence. Cached, as by :meth:`with_mask`."""
        key = layout, strategy
        of_keys = self._variants.get(key)
        if of_keys is None:
            of_keys = self._variants.put(key, replace(self, kv_layout=layout, strategy=strategy))
        return of_keys.with_mask(mask)

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

    def cuts(self, lengths: tuple[int, int]) -> Cuts:
        """The layouts of queries and of keys for these global lengths."""
        first = self.layout_for(lengths[0])
        same = self.kv_layout is None and lengths[1] == lengths[0]
        return first, first if same else self.layout_for(lengths[1], of_keys=True)

    def with_layouts(self, cuts: Cuts) -> Resolved:
        """This configuration with these layouts. Cached."""
        # It holds a copy of the binding: a cycle of references would keep the group and its connections alive.
        return self.resolved.get(cuts) or self.resolved.put(cuts, Resolved(replace(self), cuts))

    @cached_property
    def with_fixed_layouts(self) -> Resolved | None:
        """This configuration with its layouts, if these are no balancers."""
        first, last = self.layouts[0], self.layouts[-1]
        if isinstance(first, SequenceLayout) and isinstance(last, SequenceLayout):
            return self.with_layouts((first, last))
        return None

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """A context that tells the other ranks of an error that leaves it."""
        return telling(self.name, self.group, agrees=self.checks.agreement)

    @uncompiled
    def tell_peers(self, error: BaseException) -> None:
        """Tell the other ranks of an error that this rank raises: :func:`~cp_styles.comm.agreement.tell_peers`."""
        tell_peers(self.name, self.group, error, agrees=self.checks.agreement)

    def refuse_other_cut(
        self,
        cut_tensors: Sequence[tuple[torch.Tensor, SequenceLayout]],
        q_length: int | None = None,
        *,
        side: int | None = None,
    ) -> None:
        """Raise ValueError for tensors that another layout cut.

        ``q_length`` is the number of local queries. With it, raise also for shards of this length from a layout for
        another number of ranks. ``side``: 0 for queries, -1 for keys and values; None for tensors of either.
        """
        sides = self.layouts if side is None else self.layouts[side:][:1]
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
            made = [x if isinstance(x, SequenceLayout) else layout_made_by(x, cut.length, cut.ranks) for x in sides]
            if cut not in made:
                refuse_other_cut(self.name, (tensor,), made[0], plain(sides[0]))

    def facts(self) -> dict[str, Any]:
        """The configuration that ranks compare, by name."""
        contents = self.mask.content, 0 if self.kernel is None else self.kernel.content
        return {
            "strategy": self.strategy,
            "layout": describe_cut(self.layout),
            "kv_layout": None if self.kv_layout is None else describe_cut(self.kv_layout),
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
    def forwards(self) -> Forwards:
        return self.group_state.get_or_create(Forwards)

    @cached_property
    def role(self) -> Role:
        return self.group_state.get_or_create(Role)

    @cached_property
    def rank_checks(self) -> RankChecks:
        return self.group_state.get_or_create(RankChecks)

    @cached_property
    def mask_kinds(self) -> frozenset[type[Mask]]:
        """The classes of the parts of the mask. Full is no part."""
        return frozenset(map(type, self.mask.parts))

    @cached_property
    def mask_may_change(self) -> bool:
        """Whether a part of the mask has a check of tensors that may be changed in place."""
        return any(type(part).check_unchanged is not Mask.check_unchanged for part in self.mask.parts)

    @cached_property
    def separates(self) -> bool:
        """Whether the mask, or a score_mod, may keep the documents of a pack apart."""
        return self.mask.separates or (self.kernel is not None and self.kernel.positional)

    @cached_property
    def fingerprint(self) -> int:
        """A hash of :meth:`facts`."""
        return fingerprint(list(map(plain, self.facts().values())))


@dataclass(eq=False)
class Resolved:
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
        if attn_mask is not None or self.binding.role.planted is not None:
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
        if binding.mask.crosses and binding.kv_layout is None:
            raise ValueError(
                f"{binding.name}: {binding.mask!r} numbers the keys of another sequence: pass the layout of these keys "
                "as kv_layout="
            )
        crosses = kv_length != q_length or binding.kv_layout is not None
        if crosses and (is_causal or binding.mask.positional):
            what = "is_causal=True" if is_causal else repr(binding.mask)
            raise ValueError(
                f"{binding.name}: {what} with {q_length} queries and {kv_length} keys: positions of the two sequences "
                "do not correspond. Cross-attention takes no positional mask; pass is_causal=False, or a mask over "
                "numbers of keys, as Shifted and EndedWindows"
            )
        mask = binding.mask & Causal() if is_causal else binding.mask
        try:
            mask = mask if attn_mask is None else mask & Dense(attn_mask)
            _check_shapes(q, k, v, k.shape[3] if binding.kernel is None else binding.kernel.dims(k, v)[0])
            shape = binding.mask_shape or (q.shape[0], q.shape[1])
            mask.check((*shape, q_length, kv_length))
            mask = mask.for_heads(shape[1])
        except ValueError as error:
            raise ValueError(f"{binding.name}: {error}") from None
        if (planted := binding.role.planted) is not None:
            mask = planted.mask(mask, q_length, kv_length)
        if scale is None:
            scale = 1.0 / math.sqrt(q.shape[-1])
        try:
            kernel = kernel_for_tiles(tensors, named=binding.kernel)
        except NotImplementedError as error:
            raise NotImplementedError(f"{binding.name}: {error}") from None
        return Attention(binding.group, *self.cuts, mask, kernel, scale, binding.heads)


class BindingsInGraphs(WeakValueDictionary[AttentionConfig, Binding]):
    """The bindings of compiled graphs over a group, by configuration. An entry lives as long as its style or block."""

    # They are in the state of the group, so that a graph never finds a new group with the name of a destroyed one.


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


def binding_of_call(
    name: str,
    mesh: MeshOrGroup,
    strategy: Strategy,
    layout: SequenceLayout | Balancer | None,
    mask: Mask,
    kernel: Kernel | None = None,
    kv_layout: SequenceLayout | Balancer | None = None,
    *,
    checks: Checks,
) -> Binding:
    """The binding of a function's call. Equal arguments return the same binding, with its cached results.

    Without a ``layout``, layout and mask of the scope around the call apply; without a scope, head_tail. Errors are
    the errors of :func:`~cp_styles.comm.groups.axis_and_group`, of a Binding and of a scope.
    """
    known = state_if_simple(mesh)
    if known is not None:
        known.turn.begin()
    if layout is None:
        layout = head_tail
        was_scoped = known is not None and known.get_or_create(ScopeHistory).was_scoped
        if was_scoped or open_entries.get() or all_open_entries:
            _, group = axis_and_group(name, mesh)
            state = state_of(group)  # after a call with the mesh of a group, its state has the name of the axis
            with telling(name, group):  # this rank may be the only one without its scope
                scope = state.get_or_create(ScopeHistory).find_scope(name, state.operations.axis, None)
                layout, mask = (layout, mask) if scope is None else (scope.layout, mask & scope.mask)
    key = name, mesh, strategy, layout, mask, kernel, kv_layout, checks
    latest = None if known is None else known.objects.get(LatestBindings)
    try:
        if latest is not None and key in latest:
            latest.move_to_end(key)
            return latest[key]
    except TypeError:  # an unhashable argument of a wrong type: the Binding below raises
        pass
    axis, group = axis_and_group(name, mesh)
    with telling(name, group):  # this rank's argument may be the only wrong one
        binding = Binding(name, axis, group, strategy, layout, mask, kernel, kv_layout, checks=checks)
    # No cache keeps tensors and modules alive that a mask, a kernel or ``checks`` may hold.
    if mask.pattern == mask and is_value(kernel) and not checks.local:
        get_bindings(group).put(key, binding)
    return binding


def refuse_options(
    name: str, q: torch.Tensor, k: torch.Tensor, dropout_p: float, enable_gqa: bool, others: Mapping[str, Any]
) -> None:
    """Raise for options of scaled_dot_product_attention that the engine does not have. ``others``: by names that this
    package does not know."""
    if dropout_p:
        refuse_dropout(name, dropout_p)
    if others:
        refuse_unknown(name, "scaled_dot_product_attention", others)
    if q.shape[1] != k.shape[1]:
        refuse_grouped(name, q.shape[1], k.shape[1], enable_gqa)


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
