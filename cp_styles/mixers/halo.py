"""Modules whose output at a token depends on a few tokens around it: they run on each part with the rows around it."""

from __future__ import annotations

import functools
import inspect
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cp_styles._lib.bounded_cache import remembered
from cp_styles._lib.compat import tensors_in, tree_leaves, tree_map, tree_map_only, uncompiled
from cp_styles._lib.introspect import input_names
from cp_styles._lib.subclassing import UnpicklableMixin, insert_mixin
from cp_styles.collectives.peers import check_dim
from cp_styles.comm.agreement import telling
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import MeshOrGroup, axis_and_group
from cp_styles.functions.decode import CACHE_ARGUMENTS, find_cache
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.mixers.convolution import exchange_rows
from cp_styles.mixers.fragments import (
    CallFacts,
    Cut,
    CutSequence,
    Packed,
    RowExchange,
    mark_mixing,
    row_exchange,
    split_fragments,
)

_HALOS = "_context_halos"
_REASON = "a module with a halo runs outside of torch.compile's graphs: compile without fullgraph=True"
# Arguments and results that hold no tokens: equal for each part.
_PLAIN = type(None), bool, int, float, complex, str, torch.dtype, torch.device


def context_halo(
    module: nn.Module,
    mesh: MeshOrGroup,
    *,
    reach: int | tuple[int, int],
    seq_dim: int = 1,
    whole: Sequence[str] = (),
    layout: SequenceLayout | Balancer | None = None,
    documents: Packed = None,
    checks: Checks = CHECKS,
) -> RemovableHandle:
    """Let a module whose output at a token depends on the tokens near it run over a sharded sequence, unchanged.

    Such modules are hashes and embeddings of n-grams, dilated convolutions, and projections with short convolutions
    inside. Each call of the module gets parts of documents, each with the ``reach`` rows in front of it and behind it.
    Outputs of these rows are dropped. At the ends of a document there are fewer rows, and the module pads as on one
    device. All ranks call it equally often: once, or up to the number of documents on a rank. A rank with fewer parts
    gives it one more row, whose output it drops. With one rank and one document the module runs as it is.

    A reach that is too small gives other results than one device, without an error:
    :func:`~cp_styles.verify.verify` finds it. A larger one costs time and bytes.

    Args:
        module: its class is changed, as by a style. A copy has the halo too; pickling is refused.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        reach: how many tokens in front of a token its output depends on; (in front, behind) for modules that look both
            ways. A convolution of W taps that is causal: (W - 1) * dilation. Reaches of layers in a row add up.
        seq_dim: the dim of the sequence in all tensors of arguments and results, 1 for [B, L, ...], -1 for [B, C, L].
            Tensors may be nested in lists, tuples and dicts, and of any dtype: ids travel without a gradient.
        whole: names of arguments that have no tokens, which each call gets as they are.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, else of the style or block; without one ``head_tail``.
        documents: lengths of the packed documents of the whole sequence, which are independent. Default: the documents
            of the scope's mask; without one, one document.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        A handle: ``handle.remove()`` removes the halo. Gradients of rows go back to the ranks that hold them; gradients
        of parameters are this rank's share.

    Communication: of a call, one all-gather of some integers, and for each tensor one all-to-all of at most the rows in
    reach of each part of a document on a rank, and of one row for a rank without tokens. The backward sends their
    gradients. Here none.

    Raises:
        ValueError: here, for a reach below 0, and for a module that has a halo, or has or is in a module with one. At
            a call, on every rank, for a tensor without this rank's tokens, and for other inputs than
            :func:`context_causal_conv1d` takes.
        TypeError: here, for a reach that is no number or pair. At a call, for objects that may hold tokens.
        NotImplementedError: here, for TorchScript. At a call, for attention or another mixer inside of the module, and
            for a cache.

    Example::

        context_halo(model.ngrams, mesh, reach=2)  # trigrams of ids
    """
    name = f"context_halo of {type(module).__name__}"
    axis_and_group(name, mesh)
    ends = (reach, 0) if isinstance(reach, int) else reach
    if not isinstance(ends, tuple) or [type(end) for end in ends] != [int, int]:
        raise TypeError(f"{name}: reach={reach!r} must be a number of tokens, or a pair: (in front, behind)")
    if min(ends) < 0:
        raise ValueError(f"{name}: reach={reach!r} must be at least 0: tokens behind are reach=(0, n)")
    if isinstance(module, torch.jit.ScriptModule):
        raise NotImplementedError(f"{name}: TorchScript calls no Python: give the module before scripting")
    if "forward" in vars(module):
        raise ValueError(
            f"{name}: the attribute `forward` of the module itself was set, as by torch.compile(module). It hides the "
            "forward of the class: call context_halo first, or give the module inside"
        )
    inside = [path or "itself" for path, child in module.named_modules() if reach_of(child) is not None]
    if inside:
        raise ValueError(
            f"{name}: it has a halo already ({inside[0]}): give one halo, with the sum of the reaches, or call "
            "remove() of the first handle"
        )
    whole = (whole,) if isinstance(whole, str) else tuple(whole)
    known = inspect.signature(module.forward).parameters
    if any(each not in known for each in whole) and all(each.kind.name != "VAR_KEYWORD" for each in known.values()):
        raise ValueError(f"{name}: whole={list(whole)} must be names of arguments of its forward, {list(known)}")
    halos: dict[int, Halo] = vars(module).setdefault(_HALOS, OrderedDict())
    handle = RemovableHandle(halos)
    halos[handle.id] = Halo(name, mesh, ends, seq_dim, whole, layout, documents, checks)
    if not isinstance(module, _RunsWithHalo):  # the class stays when a handle is removed
        insert_mixin(module, _RunsWithHalo, _forward_with_halo)
    return handle


def reach_of(module: nn.Module) -> tuple[int, int] | None:
    """The reach of a module with a halo, (in front, behind); None for other modules."""
    halos: dict[int, Halo] = getattr(module, _HALOS, None) or {}
    return next((halo.reach for halo in halos.values()), None)


class _RunsWithHalo(UnpicklableMixin):
    """Mixin before the class of a module with a halo."""


def _forward_with_halo(cls: type[nn.Module]) -> dict[str, Any]:
    plain = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        halos: dict[int, Halo] = getattr(self, _HALOS)
        if not halos:
            return plain(self, *args, **kwargs)
        (halo,) = halos.values()
        return halo.run(functools.partial(plain, self), input_names(self), args, kwargs)

    return {"forward": functools.wraps(plain)(uncompiled(forward, _REASON))}


@dataclass(frozen=True, eq=False)
class Halo:
    """The arguments of one call of :func:`context_halo`; ``reach`` is (in front, behind)."""

    name: str
    mesh: MeshOrGroup
    reach: tuple[int, int]
    seq_dim: int
    whole: tuple[str, ...]
    layout: SequenceLayout | Balancer | None
    documents: Packed
    checks: Checks

    def __deepcopy__(self, memo: dict[int, Any]) -> Halo:
        return self  # a copy of the model runs on the same ranks

    def run(
        self, plain: Callable[..., Any], names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The output of ``plain`` for this rank's tokens. ``names`` are the names of its arguments."""
        _, group = axis_and_group(self.name, self.mesh)
        sequence = CutSequence.from_call(self.name, self.mesh, self.layout, self.documents, self.checks)
        calls = AttentionCalls.current()
        calls = calls if calls is not None and calls.unscoped.group == group else None
        if calls is not None:
            calls.begin_call()  # it counts as context parallel, and a recomputation enters the mode again
        labels = [*names[: len(args)], *(f"argument {at}" for at in range(len(names), len(args))), *kwargs]
        # A model of transformers may make a cache in each forward, which nobody reads.
        dropped = () if calls is None else CACHE_ARGUMENTS
        values = [None if label in dropped else x for label, x in zip(labels, [*args, *kwargs.values()], strict=True)]
        of_tokens = [None if label in self.whole else x for label, x in zip(labels, values, strict=True)]

        def describe() -> CallFacts:
            if group.size() > 1:
                self._refuse_cache(calls)
            return self._check(labels, of_tokens), self.seq_dim, {"reach": self.reach, "seq_dim": self.seq_dim}

        with mark_mixing(), telling(self.name, group, agrees=self.checks.agreement):
            with sequence.compared_call(describe) as cut:
                plan, rows = None, []
                if not cut.whole:
                    plan = halo_plan(cut.layout, cut.documents, self.reach, cut.peers.rank)
                    rows = [self._rows_of_calls(cut, plan, x) for x in tensors_in(of_tokens)]
            if plan is None:
                return plain(*args, **kwargs)
            self._refuse_cache(calls)
            operations, outputs = state_of(group).operations, []
            if cut.peers.size > 1:
                operations.check = self._refuse_messages  # it runs before a message of a function inside of the module
            try:
                for parts, *rows_of_call in zip(plan.calls, *rows, strict=True):
                    filled = _replace_tensors(of_tokens, rows_of_call)
                    given = [
                        x if label in self.whole else y for label, x, y in zip(labels, values, filled, strict=True)
                    ]
                    out = plain(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
                    outputs.append(tree_map(functools.partial(self._own_rows, parts), out))
            finally:
                operations.check = None
        leaves = iter([self._join(each) for each in zip(*map(tree_leaves, outputs), strict=True)])
        return tree_map(lambda _: next(leaves), outputs[0])

    def _check(self, labels: Sequence[str], of_tokens: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors of this rank's tokens."""
        lengths: dict[str, int | None] = {}
        for label, x in zip(labels, of_tokens, strict=True):
            for leaf in tree_leaves(x):
                if isinstance(leaf, torch.Tensor):
                    has_dim = -leaf.ndim <= self.seq_dim < leaf.ndim
                    lengths[f"{label} {tuple(leaf.shape)}"] = leaf.shape[self.seq_dim] if has_dim else None
                elif not isinstance(leaf, _PLAIN):
                    raise TypeError(f"{self.name}: {label} has {_described(leaf)}{_REMEDY}")
        if not lengths or None in lengths.values() or len(set(lengths.values())) > 1:
            raise ValueError(
                f"{self.name}: dim {self.seq_dim} of each tensor must be this rank's tokens, but its arguments are "
                f"{', '.join(lengths) or 'no tensors'}{_REMEDY}"
            )
        tensors = tensors_in(of_tokens)
        for x in tensors:
            check_dim(x, self.seq_dim, "seq_dim")  # refuses DTensors
        return tensors

    def _refuse_cache(self, calls: AttentionCalls | None) -> None:
        if calls is not None and find_cache(calls.inputs) is not None:
            raise NotImplementedError(
                f"{self.name}: the model was given a cache, which keeps no rows for the halo of new tokens: leave it "
                "out, or use_cache=False, and call the model with all tokens"
            )

    def _refuse_messages(self) -> None:
        raise NotImplementedError(
            f"{self.name}: the module calls attention, or another function that communicates between the ranks, and "
            "would give it the rows of its halo too: give context_halo a module inside of it that does not"
        )

    def _rows_of_calls(self, cut: Cut, plan: HaloPlan, x: torch.Tensor) -> list[torch.Tensor]:
        """The rows of a tensor for each call of the module. Communication: one all-to-all."""
        dim, parts = self.seq_dim % x.ndim, [part for call in plan.calls for part in call]
        slots = exchange_rows(cut.peers, plan.exchange, x, dim, check=self.checks.agreement)
        around = slots.split([count for part in parts for count in (part.front, part.behind)], dim)
        own = x.split([part.own for part in parts], dim)
        pieces = iter([*zip(around[::2], own, around[1::2], strict=True)])
        return [torch.cat([piece for _ in call for piece in next(pieces)], dim) for call in plan.calls]

    def _own_rows(self, parts: Sequence[Part], x: Any) -> Any:
        """A result of one call without the rows of the halo, if it is a tensor."""
        if not isinstance(x, torch.Tensor):
            if isinstance(x, _PLAIN):
                return x
            raise TypeError(f"{self.name}: the module returned {_described(x)}: let it return tensors")
        rows = sum(map(sum, parts))
        if not -x.ndim <= self.seq_dim < x.ndim or x.shape[self.seq_dim] != rows:
            raise ValueError(
                f"{self.name}: the module returned a tensor of shape {tuple(x.shape)} for {rows} tokens in dim "
                f"{self.seq_dim}: it must return an output for each token, without its padding. Give context_halo the "
                "module around it, which cuts its padding off, and compute sums over tokens outside"
            )
        ends = accumulate(map(sum, parts), initial=0)
        # Callers may change the result in place, which autograd forbids for the results of a split.
        own = [x.narrow(self.seq_dim, end + part.front, part.own) for end, part in zip(ends, parts, strict=False)]
        return self._join(own)

    def _join(self, results: Sequence[Any]) -> Any:
        """The results of all calls for one tensor, in the order of the calls."""
        first = results[0]
        if len(results) == 1 or not isinstance(first, torch.Tensor):
            return first
        return torch.cat([*results], self.seq_dim % first.ndim)


_REMEDY = (
    ". Give it tensors of this rank's tokens, if need be in lists and dicts; name arguments without tokens in whole=; "
    "give another dim of the sequence by seq_dim="
)


def _described(x: Any) -> str:
    return f"an object of {type(x).__name__}, which may hold tokens, and it is not known how to cut them"


def _replace_tensors(tree: Any, tensors: Iterable[torch.Tensor]) -> Any:
    following = iter(tensors)
    return tree_map_only(torch.Tensor, lambda _: next(following), tree)


class Part(NamedTuple):
    """Numbers of rows: of one part of a document on a rank, and around it."""

    front: int
    own: int
    behind: int


class HaloPlan(NamedTuple):
    """The exchange of the rows around the parts of a rank, and for each call of the module its parts."""

    exchange: RowExchange
    calls: tuple[tuple[Part, ...], ...]


@remembered(16)
def halo_plan(layout: SequenceLayout, documents: tuple[int, ...], reach: tuple[int, int], rank: int) -> HaloPlan:
    """The plan of ``rank``. A part joins the call of the part before it where both have all rows in reach between.

    All ranks have equally many calls: parameters inside of the module may be sharded over them. Further calls get the
    first row of the sequence, and keep none.
    """
    edges, fragments = [*accumulate(documents, initial=0)], split_fragments(layout, documents)
    positions: list[list[int]] = [[] for _ in range(layout.ranks)]
    calls: list[list[tuple[Part, ...]]] = [[] for _ in range(layout.ranks)]
    for peer in range(layout.ranks):
        for _, (row, last_row), start, *_ in sorted(each for each in fragments if each.rank == peer):
            stop, document = start + last_row - row, bisect_right(edges, start)
            front, behind = min(reach[0], start - edges[document - 1]), min(reach[1], edges[document] - stop)
            positions[peer] += [*range(start - front, start), *range(stop, stop + behind)]
            part, before = Part(front, stop - start, behind), calls[peer][-1:]
            # At an end of a document the module pads.
            joins = before and front == reach[0] and before[0][-1].behind == reach[1]
            calls[peer][-1:] = [(*before[0], part)] if joins else [*before, (part,)]
    first, most = min(layout.length, 1), max(1, *map(len, calls))
    for peer in range(layout.ranks):
        missing = most - len(calls[peer])
        positions[peer] += [0] * (missing * first)
        calls[peer] += [(Part(first, 0, 0),)] * missing
    rows = [torch.tensor(each, dtype=torch.int64, device="cpu") for each in positions]
    needs = [(each, torch.arange(len(each), device="cpu")) for each in rows]
    return HaloPlan(row_exchange(layout, needs, len(rows[rank]), rank), tuple(calls[rank]))
