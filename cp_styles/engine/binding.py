"""What an attention is bound to, and the agreement of all ranks on what they are about to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from cp_styles._compat import current_graph_task
from cp_styles.comm.agreement import (
    BACKWARD_MAY_COME,
    MAY_WARN,
    Meeting,
    RankStatus,
    Rows,
    StatusRow,
    compare,
    exchange_status,
    fingerprint,
    ledger_of,
    offer_refusal,
    plain,
)
from cp_styles.engine.gradient_watch import ParameterWatch, watch_of
from cp_styles.engine.mesh_axes import OtherAxes
from cp_styles.kernels import Kernel, kernel_for_tiles
from cp_styles.kernels.autocast import attended_dtype
from cp_styles.layout import (
    Balancer,
    SequenceLayout,
    SeveralLayouts,
    cut_with,
    layout_made_by,
    other_cuts_around,
    warn_of_other_cuts,
)
from cp_styles.mask import Causal, Dense, Full, Mask, PerRow, digest
from cp_styles.strategies import Attention, PerRowStrategy, Strategy

# Attentions of a binding that are kept, with what strategies have derived for them.
_MOST_ATTENTIONS = 16


@dataclass
class Tally:
    """What one forward of a module has come to.

    Attributes:
        calls: how many attention ops its binding has served.
        deferred_agreement: the :meth:`Binding.agree` that was put off until the first of them, as a function of
            ``refuse`` and ``call``; None where the ranks have agreed.
    """

    calls: int = 0
    deferred_agreement: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Binding:
    """One configuration of context-parallel attention on one mesh axis; everything that is not in the call itself.

    Attributes:
        name: whose attention this is, for messages: a module's name, or the function's.
        axis: name of the mesh axis, for messages.
        group: the ranks that share the sequence.
        strategy: how queries, keys and values meet.
        layout: the cut itself, or the balancer that makes it from (length, ranks).
        mask: who attends to whom, beside what the call says with ``is_causal``.
        kernel: computes the tiles it can, see :func:`~cp_styles.kernels.kernel_for_tiles`; None prefers the fused
            kernel of the call.
        lengths: global numbers of queries and of keys of the call, once its ranks have agreed on them.
        other_axes: the axes beside ``axis`` on which the call's tensors are DTensors, None for none.
        tally: what the forward has come to, so that a module whose attention was never reached can be told so.
        watch: notices parameters that nobody reduces over the group; None takes the group's own, for callers that
            bind anew at every call.
        asked: what the calls so far say of their plans, beside layout and mask: (is_causal, the kernel's small_tiles).
            Bindings that are replaced from this one share it.
    """

    name: str
    axis: str
    group: dist.ProcessGroup
    strategy: Strategy
    layout: SequenceLayout | Balancer
    mask: Mask
    kernel: Kernel | None = None
    lengths: tuple[int, int] | None = None
    other_axes: OtherAxes | None = None
    tally: Tally = field(default_factory=Tally, compare=False, repr=False)
    watch: ParameterWatch | None = field(default=None, compare=False, repr=False)
    asked: set[tuple[bool, bool]] = field(default_factory=set, compare=False, repr=False)
    _attentions: dict[tuple[Any, ...], Attention] = field(init=False, default_factory=dict, compare=False, repr=False)
    _lean: Binding | None = field(init=False, default=None, compare=False, repr=False)
    _settlements: dict[tuple[SequenceLayout, SequenceLayout], Binding] = field(
        init=False, default_factory=dict, compare=False, repr=False
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
        if isinstance(self.mask, PerRow) and not isinstance(self.strategy, PerRowStrategy):
            object.__setattr__(self, "strategy", PerRowStrategy(self.strategy))
        if self.kernel is not None and not isinstance(self.kernel, Kernel):
            raise TypeError(f"{self.name}: kernel must be a Kernel object or None, got {self.kernel!r}")
        if isinstance(self.layout, SequenceLayout) and self.layout.ranks != self.group.size():
            raise ValueError(
                f"{self.name}: the layout cuts the sequence for {self.layout.ranks} ranks, mesh axis {self.axis!r} has "
                f"{self.group.size()}"
            )

    def layout_for(self, length: int) -> SequenceLayout:
        """The cut of a sequence of ``length`` positions."""
        if not isinstance(self.layout, SequenceLayout):
            return layout_made_by(self.layout, length, self.group.size())
        if self.layout.length != length:
            raise ValueError(
                f"{self.name}: the layout cuts {self.layout.length} positions, the ranks of mesh axis {self.axis!r} "
                f"hold {length} together; build the layout for this length, or give a balancer such as head_tail"
            )
        return self.layout

    def attention(
        self,
        q_length: int,
        kv_length: int,
        tensors: Sequence[torch.Tensor],
        *,
        is_causal: bool,
        scale: float | None,
        attn_mask: torch.Tensor | None = None,
        preferred: Kernel | None = None,
        heads: tuple[int, int] | None = None,
        whole: tuple[int, int] | None = None,
    ) -> Attention:
        """The attention of one call, from its *global* lengths and its local query, key and value [B, H, S, D].

        ``attn_mask`` is the call's own, of the whole sequence, in the order of positions. Where the tensors are part of
        a larger batch, or of more heads, ``heads`` says which query heads, and ``whole`` the (batch, heads) for which a
        mask must be.

        Raises the same errors on every rank, because nothing here depends on the rank. Communicates nothing. A call
        like one of the last ones gets the same object.
        """
        said = {"is_causal": is_causal, "scale": scale, "preferred": preferred, "heads": heads, "whole": whole}
        if attn_mask is not None:
            return self._attention(q_length, kv_length, tensors, attn_mask, **said)
        like = *(x.shape for x in tensors), tensors[0].dtype, tensors[0].device
        key = q_length, kv_length, like, *said.values()
        found = self._attentions.get(key)
        if found is None:
            if len(self._attentions) >= _MOST_ATTENTIONS:
                self._attentions.clear()
            found = self._attentions[key] = self._attention(q_length, kv_length, tensors, None, **said)
        return found

    def _attention(
        self,
        q_length: int,
        kv_length: int,
        tensors: Sequence[torch.Tensor],
        attn_mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
        preferred: Kernel | None,
        heads: tuple[int, int] | None,
        whole: tuple[int, int] | None,
    ) -> Attention:
        q, k, v = tensors
        q_layout = self.layout_for(q_length)
        kv_layout = q_layout if kv_length == q_length else self._layout_of_keys(q_length, kv_length, is_causal)
        mask = self.mask & Causal() if is_causal else self.mask
        try:
            mask = mask if attn_mask is None else mask & Dense(attn_mask)
            _check_shapes(q, k, v)
            mask.check((*(whole or (q.shape[0], q.shape[1])), q_length, kv_length))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        if scale is None:
            scale = 1.0 / math.sqrt(q.shape[-1])
        try:
            kernel = kernel_for_tiles(tensors, named=self.kernel, preferred=preferred)
        except NotImplementedError as error:
            raise NotImplementedError(f"{self.name}: {error}") from None
        self.asked.add((is_causal, kernel.small_tiles))
        return Attention(self.group, q_layout, kv_layout, mask, kernel, scale, heads)

    def keeping_nothing(self) -> Binding:
        """This binding, with a strategy that keeps no received keys for the backward; the same one every time."""
        if self._lean is None:
            object.__setattr__(self, "_lean", replace(self, strategy=self.strategy.keeping_nothing()))
        assert self._lean is not None
        return self._lean

    def prepare(self) -> None:
        """Make the plans of calls like those so far, so that they find them; no communication."""
        assert isinstance(self.layout, SequenceLayout)  # a scope's
        for is_causal, small_tiles in self.asked:
            mask = self.mask & Causal() if is_causal else self.mask
            self.strategy.prepare(self.layout, self.layout, mask, self.group.rank(), small_tiles=small_tiles)

    def _layout_of_keys(self, q_length: int, kv_length: int, is_causal: bool) -> SequenceLayout:
        if is_causal or not isinstance(self.mask, Full):
            what = "is_causal=True" if is_causal else repr(self.mask)
            raise ValueError(
                f"{self.name}: {what} with {q_length} queries and {kv_length} keys: positions of the two sequences do "
                "not correspond. Cross-attention takes no positional mask here; pass is_causal=False"
            )
        if isinstance(self.layout, SequenceLayout):
            raise ValueError(
                f"{self.name}: one layout of {self.layout.length} positions cannot cut {q_length} queries and "
                f"{kv_length} keys; give a balancer such as contiguous"
            )
        return self.layout_for(kv_length)

    def known_lengths(
        self, refuse: Callable[[], None], tensors: Sequence[torch.Tensor], seq_dim: int
    ) -> tuple[int, int] | None:
        """What :meth:`agree` would return, where that is sure without asking: then it may wait for the call.

        A balancer must be told the length, and a rank that sees something wrong must say so now. No communication.
        """
        if not isinstance(self.layout, SequenceLayout):
            return None
        try:
            refuse()
            self.refuse_other_cut(tensors)
        except Exception:  # whatever it is, the others are to hear of it
            return None
        own = self.layout.lengths[self.group.rank()]
        fits = all(x.shape[seq_dim] == own for x in tensors)
        return (self.layout.length, self.layout.length) if fits else None

    def agree(
        self,
        refuse: Callable[[], None],
        tensors: Sequence[torch.Tensor],
        seq_dim: int,
        attn_mask: torch.Tensor | None = None,
        call: Mapping[str, Any] | None = None,
        keep: bool = False,
        refused: RankStatus = RankStatus.BAD_INPUTS,
    ) -> Binding:
        """What this becomes for one call, with its ``lengths``, once all ranks are known to have inputs that fit
        together: a balancer is asked for its layout here and not again, in the call's backward neither.

        ``refuse`` raises for what this rank alone may see. Then one all-gather (see
        :func:`~cp_styles.comm.agreement.exchange_status`) makes one rank's problem every rank's error, instead of a
        hang. A second one follows where some rank could not guess the global lengths from its own, as it can where
        parts are equal or were of these lengths before; and one where a rank has something to warn of.

        Args:
            refuse: raises on bad local input.
            tensors: local query, key and value, 4-D once ``refuse`` has returned.
            seq_dim: their sequence dim, of any sign.
            attn_mask: the call's own mask of the whole sequence, where it is known already.
            call: what else the call says, by name (``is_causal``, ``scale``), where that is known already.
            keep: whether a backward of the call may come, where the call is known.
            refused: what the others are to hear if ``refuse`` raises.

        Warns :class:`~cp_styles.engine.gradient_watch.UnreducedGradientsWarning` when the ranks' parameters have come
        apart, and :class:`~cp_styles.layout.LayoutMismatchWarning` when tokens seem to be cut with another layout.
        """
        watch, ranks, ledger = self.watch or watch_of(self.group), self.group.size(), ledger_of(self.group)
        layouts: dict[int, SequenceLayout] = {}  # a balancer may take its time, and may say something else next time

        def layout_for(length: int) -> SequenceLayout:
            if length not in layouts:
                layouts[length] = self.layout_for(length)
            return layouts[length]

        def cuts(whole: tuple[int, int]) -> tuple[SequenceLayout, SequenceLayout]:
            return layout_for(whole[0]), layout_for(whole[1])

        def build() -> StatusRow:
            refuse()
            self.refuse_other_cut(tensors)
            self._refuse_other_values(tensors, seq_dim)
            own = tensors[0].shape[seq_dim], tensors[1].shape[seq_dim]
            guess = ledger.lengths.get(own, (own[0] * ranks, own[1] * ranks))
            if isinstance(self.layout, SequenceLayout):
                guess = self.layout.length, self.layout.length
            try:
                layout = _number_of(cuts(guess))
            except Exception:  # of a length that may not be the call's
                guess, layout = (0, 0), 0
            may_warn = other_cuts_around(layout_for, ranks)
            return StatusRow(
                RankStatus.GOOD_INPUTS if call is None else RankStatus.GOOD_CALL,
                place=self.tally.calls,
                q_length=own[0],
                kv_length=own[1],
                guessed=_packed(guess),
                layout=layout,
                inputs=fingerprint(
                    [*(_other_sizes(x, seq_dim) for x in tensors), *map(attended_dtype, tensors), _contents(attn_mask)]
                ),
                config=self._print,
                call=fingerprint([call]) if call else 0,
                watch=watch.look(tensors, self.group),
                flags=BACKWARD_MAY_COME * keep + MAY_WARN * may_warn,
            )

        where = self.name, self.axis
        ledger.engaged = True
        rows = exchange_status(build, Meeting.ATTENTION, *where, self.group, refused)
        self._compare(rows, tensors, call or {})
        whole = sum(row.q_length for row in rows), sum(row.kv_length for row in rows)
        layout_rows = rows
        if any(row.guessed != _packed(whole) for row in rows):

            def build_layout() -> StatusRow:
                return StatusRow(layout=_number_of(cuts(whole)))

            layout_rows = exchange_status(build_layout, Meeting.LAYOUT, *where, self.group)
        if len({row.status for row in rows}) == 1:
            compare(layout_rows, "layout", *where, _NAMED, self._text)
        self._compare_lengths(rows, cuts(whole))
        # A rank that did not get to its call was not asked about it: what it has instead of a call is told first.
        compare(rows, "config", *where, _NAMED, self._text)
        _compare_keep(rows, keep, *where)
        ledger.remember((tensors[0].shape[seq_dim], tensors[1].shape[seq_dim]), whole)
        self._warn(rows, watch, layouts[whole[0]])
        self._begun(call is not None)
        return self._settled(whole, cuts(whole))

    def _warn(self, rows: Rows, watch: ParameterWatch, layout: SequenceLayout) -> None:
        """A warning may be an error where the user says so: then it must be one that all ranks hear of."""
        found = watch.compare([row.watch for row in rows], self.name, self.axis, self.group)
        if found is None and not any(row.flags & MAY_WARN for row in rows):
            return

        def warn() -> StatusRow:
            if found is not None:
                watch.tell(found)
            warn_of_other_cuts(layout, self.name)
            return StatusRow()

        exchange_status(warn, Meeting.WARNING, self.name, self.axis, self.group)

    def _begun(self, engaged: bool) -> None:
        """An attention starts here, and ends with :meth:`finished`."""
        ledger = ledger_of(self.group)
        ledger.engaged, ledger.backward_began = engaged, False
        ledger.forward_open = ledger.forward_open or current_graph_task() is None

    def finished(self) -> None:
        """The forward of the attention that was agreed on has ended: an error from here on is not the attention's."""
        ledger_of(self.group).engaged = False

    def _settled(self, lengths: tuple[int, int], cuts: tuple[SequenceLayout, SequenceLayout]) -> Binding:
        """This binding with layouts in the place of a balancer; the same one for the same layouts."""
        found = self._settlements.get(cuts)
        if found is None:
            if len(self._settlements) >= _MOST_ATTENTIONS:
                self._settlements.clear()
            layout = cuts[0] if cuts[0] == cuts[1] else SeveralLayouts(cuts)
            found = self._settlements[cuts] = replace(self, layout=layout, lengths=lengths)
        return found

    def agree_on_call(
        self,
        refuse: Callable[[], None],
        is_causal: bool,
        scale: float | None,
        attn_mask: torch.Tensor | None,
        keep: bool,
    ) -> None:
        """Raise on every rank unless all of them call their attention alike: for a call inside a module.

        Modules that look at their own part do not, ``is_causal=query.shape[2] > 1`` where one rank has one token.
        ``refuse`` raises for what this rank alone may see; ``keep``: a backward may come. Communication: that of an
        :meth:`agree` that is deferred_agreement; one all-gather after it.
        """
        deferred_agreement, self.tally.deferred_agreement = self.tally.deferred_agreement, None
        if deferred_agreement is not None:
            call = {"is_causal": is_causal, "scale": scale, "attn_mask": _contents(attn_mask)}
            deferred_agreement(refuse, call=call, keep=keep, refused=RankStatus.NO_CALL)
            return

        def build() -> StatusRow:
            refuse()
            return StatusRow(
                RankStatus.GOOD_CALL,
                place=self.tally.calls,
                call=fingerprint([is_causal, scale, _contents(attn_mask)]),
                flags=BACKWARD_MAY_COME * keep,
            )

        where = self.name, self.axis
        ledger_of(self.group).engaged = True
        rows = exchange_status(build, Meeting.CALL, *where, self.group, RankStatus.NO_CALL)

        def mine() -> str:
            mask = "none" if attn_mask is None else f"one of shape {tuple(attn_mask.shape)}"
            return (
                f"is_causal={is_causal}, scale={scale}, attn_mask {mask}. What a module decides by the length of its "
                "input must not depend on a rank's part, and a mask is the whole sequence's, the same on all ranks"
            )

        compare(rows, "call", *where, "the call of the attention inside", mine)
        _compare_keep(rows, keep, *where)
        self._begun(True)

    def refuse(self, problem: Exception) -> NoReturn:
        """Raise ``problem``, once the ranks that are about to :meth:`agree` have heard that there is one."""
        self.agree(partial(_raise, problem), (), 0)
        raise problem

    def refuse_call(self) -> None:
        """Let the ranks that have called their attention, or are about to, hear that this one will not."""
        offer_refusal(self.name, self.axis, self.group)

    def refuse_other_cut(self, tensors: Sequence[torch.Tensor]) -> None:
        """Layouts mostly give equal lengths, so a wrong one shows in nothing but wrong results, and here."""
        for tensor in tensors:
            cut = cut_with(tensor)
            if cut is None or cut.ranks != self.group.size():
                continue
            if isinstance(self.layout, SequenceLayout) and self.layout.length != cut.length:
                continue  # another sequence; what is attended to is compared with the layout's lengths
            if cut != self.layout_for(cut.length):
                raise ValueError(
                    f"{self.name}: an input of shape {tuple(tensor.shape)} was cut with another layout than the "
                    f"attention uses ({plain(self.layout)}); cut and attend with the same one: layout= of the style, "
                    "or a SequenceScope around both"
                )

    def _refuse_other_values(self, tensors: Sequence[torch.Tensor], seq_dim: int) -> None:
        keys, values = tensors[1].shape[seq_dim], tensors[2].shape[seq_dim]
        if keys != values:
            raise ValueError(f"{self.name}: key and value have different lengths: {keys} and {values}")

    def _compare(self, rows: Rows, tensors: Sequence[torch.Tensor], call: Mapping[str, Any]) -> None:
        """Raise unless the ranks' numbers are those of inputs that fit together."""

        def shapes() -> list[Any]:
            return [(tuple(x.shape), str(attended_dtype(x))) for x in tensors]

        def settings() -> str:
            return ", ".join([self._text(), *(f"{name}={value}" for name, value in call.items())])

        where = self.name, self.axis
        compare(rows, "inputs", *where, "shape (beside the sequence), dtype or attn_mask", shapes)
        if len({row.status for row in rows}) == 1:
            named = _NAMED + (f" (or {', '.join(call)} of the call)" if call else "")
            compare(rows, "config", *where, named, settings)
            compare(rows, "call", *where, named, settings)

    def _compare_lengths(self, rows: Rows, cuts: tuple[SequenceLayout, SequenceLayout]) -> None:
        for layout, lengths in zip(
            cuts, zip(*((row.q_length, row.kv_length) for row in rows), strict=True), strict=True
        ):
            if layout.lengths != lengths:
                raise ValueError(
                    f"{self.name}: the ranks of mesh axis {self.axis!r} hold {list(lengths)} positions, but the layout "
                    f"{plain(self.layout)} gives them {list(layout.lengths)} of {sum(lengths)}: cut the inputs with "
                    "the layout the attention uses (layout.shard), or give the attention the layout they were cut with"
                )

    def _text(self) -> str:
        return ", ".join(plain(part) for part in (self.strategy, self.layout, self.mask, self.kernel))

    @cached_property
    def _print(self) -> int:
        # Of a balancer only that it is one: what it says is compared.
        cut = plain(self.layout) if isinstance(self.layout, SequenceLayout) else "balancer"
        texts = [plain(part) for part in (self.strategy, self.mask, self.kernel)]
        return fingerprint([cut, *texts, self.mask.content, 0 if self.kernel is None else self.kernel.content])


_NAMED = "strategy, layout, mask or kernel"


def _number_of(cuts: tuple[SequenceLayout, SequenceLayout]) -> int:
    """Python hashes tuples of integers, which is what layouts hash, alike in every process."""
    return hash(tuple(map(hash, cuts)))


def _packed(lengths: tuple[int, int]) -> int:
    return lengths[0] << 31 | lengths[1]


def _compare_keep(rows: Rows, keep: bool, name: str, axis: str) -> None:
    """The backward of one rank would wait for the others' share."""
    keeps = [row.flags & BACKWARD_MAY_COME for row in rows if row.status == RankStatus.GOOD_CALL]
    if len(set(keeps)) > 1:
        odd = [rank for rank, row in enumerate(rows) if not row.flags & BACKWARD_MAY_COME]
        raise ValueError(
            f"{name}: a backward may come on some ranks of mesh axis {axis!r} and not on others: ranks {odd} attend "
            f"under no_grad, or with inputs none of which requires grad; here one {'may' if keep else 'may not'} come. "
            "Every rank has a share of every gradient: run the forward with gradients on all ranks, or on none"
        )


def _raise(problem: Exception) -> NoReturn:
    raise problem


def refuse_dropout(name: str, dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError(
            f"{name}: dropout_p={dropout_p}: each rank's random numbers would have to be those of one device. Set "
            "dropout to 0, or apply it after the attention"
        )


def refuse_grouped(name: str, heads: int, kv_heads: int, enable_gqa: bool) -> None:
    """As torch does; what reaches its fused ops has passed this already."""
    if heads != kv_heads and not enable_gqa:
        raise ValueError(f"{name}: {heads} query heads and {kv_heads} key/value heads need enable_gqa=True")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Of [B, H, S, D]: no broadcasting here, because a part of the sequence may be empty and would not notice."""
    batches, heads = ([x.shape[dim] for x in (q, k, v)] for dim in (0, 1))
    if len(set(batches)) > 1:
        raise ValueError(f"query, key and value have batches of {batches[0]}, {batches[1]} and {batches[2]}")
    if heads[1] != heads[2]:
        raise ValueError(f"there are {heads[1]} key heads and {heads[2]} value heads")
    if heads[1] == 0 or heads[0] % heads[1]:
        raise ValueError(f"{heads[0]} query heads are not a multiple of {heads[1]} key/value heads")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"the head dims of query and key differ: {q.shape[3]} and {k.shape[3]}")


def _other_sizes(tensor: torch.Tensor, seq_dim: int) -> tuple[int, ...]:
    sizes = list(tensor.shape)
    del sizes[seq_dim]
    return tuple(sizes)


def _contents(mask: torch.Tensor | None) -> Any:
    return None if mask is None else (tuple(mask.shape), mask.dtype, digest(mask))
