"""Recurrences with a matrix as their state, over a sequence that is cut: the state of each fragment's end is passed on.

[Note: affine maps] Over a fragment the state changes by an affine map, ``S_out = M S_in + S_ext``. It does not depend
on the values of other fragments. The kernel itself gives it: from a zero state it ends with ``S_ext``, and with zero
values it ends with M times the state that it began with. The ranks compose the maps of the fragments before each
one, see [Note: doubling] in doubling.py, and run their kernels from the states that come in.

A kernel without an initial state that computes each channel for itself runs on all tokens of a part of the channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cp_styles._compat import uncompiled
from cp_styles.collectives.autograd import keep_in_graph
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.layout import Balancer, Chunk, SequenceLayout
from cp_styles.mixers.by_channels import Channels, by_channels
from cp_styles.mixers.convolution import exchanged
from cp_styles.mixers.doubling import exchanges_of
from cp_styles.mixers.fragments import (
    Cut,
    CutSequence,
    Described,
    Fragment,
    Packed,
    RowExchange,
    arguments_of,
    mixing,
    refuse_arguments,
    requires_grad_by_name,
)


@dataclass(frozen=True)
class Recurrence:
    """How a kernel takes its arguments: tensors [B, L, ...] of L tokens, and a state [B, H, K, V] for each head.

    The kernel computes ``S_t = A_t S_{t-1} + k_t v_t``, where ``A_t`` does not depend on the values, and outputs that
    are linear in ``S_t``. It returns the outputs, and with ``wants`` the state after the last token too.

    Attributes:
        value: names that its argument v [B, L, H, V] may have.
        key: names of an argument whose last dim is K.
        state: name of its initial state; None is zeros.
        wants: name of the flag with which it also returns the final state.
        transposed: its states are [B, H, V, K], as in kernels that are called with state_v_first=True.
        diagonal: ``A_t`` is diagonal, or a number for each head. K numbers are sent of it, not K K.
        left_out: arguments that add to the outputs only.
    """

    value: tuple[str, ...] = ("v", "value")
    key: tuple[str, ...] = ("k", "key")
    state: str = "initial_state"
    wants: str = "output_final_state"
    transposed: bool = False
    diagonal: bool = False
    left_out: tuple[str, ...] = ()


_DELTA_RULE, _DECAY = Recurrence(), Recurrence(diagonal=True)
_SSD = Recurrence(
    ("x", "hidden_states"), ("B",), "initial_states", "return_final_states", True, True, left_out=("D", "z")
)
_SELECTIVE_SCAN = Channels(
    cut=("u", "delta", "hidden_states", "dt", "z"), shared=("B", "C"), parameters=("A", "D", "delta_bias")
)
WKV = Channels(cut=("value", "key"), parameters=("time_decay", "time_first"), seq_dim=1, left_out=("state",))
KNOWN: dict[str, Recurrence | Channels] = {
    # From flash-linear-attention, and the plain functions of transformers in their place.
    **dict.fromkeys(("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), _DELTA_RULE),
    **dict.fromkeys(("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"), _DELTA_RULE),
    **dict.fromkeys(("chunk_delta_rule", "fused_recurrent_delta_rule"), _DELTA_RULE),
    **dict.fromkeys(("chunk_kda", "fused_recurrent_kda"), _DELTA_RULE),
    **dict.fromkeys(("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), _DELTA_RULE),
    **dict.fromkeys(
        ("chunk_gla", "fused_recurrent_gla", "chunk_simple_gla", "chunk_retention", "chunk_lightning_attn"), _DECAY
    ),
    # From mamba-ssm and transformers.
    **dict.fromkeys(("mamba_chunk_scan_combined", "mamba2_chunk_scan"), _SSD),
    **dict.fromkeys(("selective_scan_fn", "mamba_selective_scan"), _SELECTIVE_SCAN),
}
"""The kernels whose arguments are known, by name."""


def context_recurrence(
    kernel: Callable[..., Any],
    mesh: MeshOrGroup,
    *,
    recurrence: Recurrence | Channels | None = None,
    layout: SequenceLayout | Balancer | None = None,
    documents: Packed = None,
    checks: Checks = CHECKS,
) -> Callable[..., Any]:
    """``kernel`` for a sequence of which this rank holds a part. Its results equal the results on one device.

    For gated delta rules, KDA, gated linear attention, Mamba-2 (SSD): ``S_t = A_t S_{t-1} + k_t v_t``,
    ``out_t = q_t S_t``. The result is called like ``kernel``, with this rank's tokens. An initial state is the state
    before the whole sequence, and the same on all ranks. A final state is the state after its last token, on every
    rank. ``cu_seqlens`` and ``seq_idx`` are for the whole sequence; the kernel is called for each document.

    A fragment in the middle of a document is run twice, first for its map of the state, with values of K columns more
    (or K times one column if the recurrence is diagonal). See [Note: affine maps] in mixers/recurrence.py.

    Kernels that compute each channel for itself and take no initial state, such as Mamba-1's ``selective_scan_fn``, are
    described by :class:`Channels`. For these, ranks exchange tokens for channels, as Ulysses does for heads. The number
    of ranks need not divide the number of channels.

    Args:
        kernel: the function, such as FLA's ``chunk_gated_delta_rule``. It must be differentiable in its initial state.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        recurrence: how it takes its arguments. Default: looked up by its name, if it is known.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, else of the style or block; without one ``head_tail``. Contiguous parts have the fewest
            fragments.
        documents: lengths of the packed documents of the whole sequence. Default: from ``cu_seqlens``,
            ``seq_idx``, or the scope's mask; without any, one document.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        A function with the arguments and results of ``kernel``. Gradients of parameters and initial states are this
        rank's share: sum them over the group.

    Communication of a call: one all-gather of some integers; for N fragments of a document 1 + log2(N - 1) all-to-alls,
    in which a fragment's map goes to one other rank, ``B H K (V + K)`` numbers (``B H K (V + 1)`` if the recurrence is
    diagonal), or its state, ``B H K V``, in float32 or wider. None if no document crosses ranks. The backward sends the
    same, in the other direction, and ranks compare before each. By channels: one all-to-all, in which a rank sends each
    peer its tokens of the peer's channels and of the shared inputs, and one of the output. The backward sends the same.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, if the input of one is bad or the ranks differ.

    Example::

        scan = context_recurrence(chunk_gated_delta_rule, mesh, layout=layout)
        out_BLHV, _ = scan(q_BLHK, k_BLHK, v_BLHV, g=g_BLH, beta=beta_BLH)
    """
    name = getattr(kernel, "__name__", type(kernel).__name__)
    how = KNOWN.get(name) if recurrence is None else recurrence
    if how is None:
        raise ValueError(
            f"context_recurrence: it is not known how {name} takes its arguments: pass recurrence=Recurrence(...), or "
            "Channels(...) for a kernel without an initial state that computes each channel for itself"
        )

    def scan(*args: Any, **kwargs: Any) -> Any:
        called = f"context_recurrence({name})"
        sequence = CutSequence.of_call(called, mesh, layout, documents, checks)
        return run_recurrence(sequence, kernel, how, *args, **kwargs)

    return uncompiled(scan)


@mixing()
def run_recurrence(
    sequence: CutSequence, kernel: Callable[..., Any], how: Recurrence | Channels, *args: Any, **kwargs: Any
) -> Any:
    """:func:`context_recurrence` of a sequence, called with the arguments of ``kernel``."""
    if isinstance(how, Channels):
        return by_channels(sequence, kernel, how, args, kwargs)
    call: Any = None

    def describe() -> Described:
        nonlocal call
        call = _KernelCall(kernel, sequence.name, how, args, kwargs)
        state = call.initial
        begins = state is not None and [list(state.shape), state.requires_grad]
        return (
            list(call.cut.values()),
            1,
            {how.wants: call.wants, how.state: begins, **requires_grad_by_name(call.tensors())},
        )

    with sequence.with_documents_from(kwargs).compared_call(describe) as cut:
        outs, states = _states(call, cut, check=sequence.checks.agreement)
    out, final = _outputs(call, outs, states)
    # Kernels of FLA always return two, kernels of mamba-ssm if they are asked for it.
    return (out, final) if call.wants or not how.transposed else out


# Another direction, another cut, decays of values, and further results.
_OF_ONE_DEVICE = ("reverse", "head_first", "cp_context", "gv", "return_intermediate_states", "return_varlen_states")


class _KernelCall:
    """The arguments of a kernel by name, with the arguments of tokens in a dict of their own; and runs of it on some
    tokens."""

    def __init__(
        self, kernel: Callable[..., Any], name: str, how: Recurrence, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        named = arguments_of(kernel, args, kwargs)
        refuse_arguments(name, named, _OF_ONE_DEVICE)
        self.kernel, self.how, self.transposed = kernel, how, how.transposed or bool(named.get("state_v_first"))
        self.initial = named.pop(how.state, None)
        self.wants = bool(named.pop(how.wants, False))
        value, key = (next((name for name in names if name in named), None) for names in (how.value, how.key))
        if value is None or key is None:
            raise TypeError(f"{name}: it has no arguments {how.value} and {how.key}: pass them by name")
        self._value = value
        self.cut = {at: x for at, x in named.items() if isinstance(x, torch.Tensor) and x.ndim > 2}
        self.others = {at: x for at, x in named.items() if at not in self.cut}
        for at, x in self.cut.items():
            if x.shape[1] != self.value.shape[1]:
                raise ValueError(f"{name}: {at} {tuple(x.shape)} must have the tokens of {value} along dim 1")
        batch, _, heads, width = self.value.shape
        self.shape = batch, heads, named[key].shape[-1], width
        self.wide = torch.promote_types(self.value.dtype, torch.float32)
        if self.initial is not None and len(self.initial) != batch:
            raise ValueError(f"{name}: {how.state} {tuple(self.initial.shape)} must have one state for each row of v")

    @property
    def value(self) -> torch.Tensor:
        return self.cut[self._value]

    def tensors(self) -> list[torch.Tensor]:
        """All that gradients may flow to."""
        arguments = (*self.cut.values(), self.initial, *self.others.values())
        return [x for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def run(self, rows: Chunk, state: torch.Tensor | None, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and final state of some rows, from a state, both [B, H, K, V]. ``changed``: other arguments."""
        part = {at: x.narrow(1, rows[0], rows[1] - rows[0]) for at, x in (self.cut | changed).items() if x is not None}
        others = {at: x for at, x in self.others.items() if at not in changed}
        state = state.mT.contiguous() if state is not None and self.transposed else state
        out, final = self.kernel(**part, **others, **{self.how.state: state, self.how.wants: True})
        return out, (final.mT if self.transposed else final).to(self.wide)

    def map_of(self, rows: Chunk) -> torch.Tensor:
        """``[S_ext | M]`` of some rows, with one column for M if it is diagonal: [B, H, K, V + K or 1]."""
        batch, heads, keys, _ = self.shape
        like, zeros = {"dtype": self.wide, "device": self.value.device}, self.value.new_zeros(())
        tokens = self.value.shape[:3]
        if self.how.diagonal:
            left_out = dict.fromkeys(self.how.left_out)
            ones = torch.ones(batch, heads, keys, 1, **like)
            _, factor = self.run(rows, ones, **left_out, **{self._value: zeros.expand(*tokens, 1)})
            return torch.cat((self.run(rows, None)[1], factor), -1)
        both = torch.cat((self.value, zeros.expand(*tokens, keys)), -1)
        begin = torch.eye(keys, **like).expand(batch, heads, keys, keys)
        begin = torch.cat((torch.zeros(*self.shape, **like), begin), -1)
        return self.run(rows, begin, **{self._value: both})[1]

    def after(self, before: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
        """``[S_ext | M]`` of fragments and of what is before them; zeros for nothing before a document's first."""
        width = self.shape[3]
        outside, factor = maps[..., :width], maps[..., width:]
        through = factor * before if self.how.diagonal else factor @ before
        return through + torch.nn.functional.pad(outside, (0, maps.shape[-1] - width))


def _states(
    call: _KernelCall, cut: Cut, *, check: bool
) -> tuple[dict[Fragment, torch.Tensor | None], torch.Tensor | None]:
    """This rank's fragments, with the outputs of the fragments in which a document begins. The states before the
    remaining fragments, and the last one of all if it is wanted; None if no state is passed on."""
    outs: dict[Fragment, torch.Tensor | None] = {}
    maps: list[torch.Tensor] = []
    batch, heads, keys, width = call.shape
    columns = width + (1 if call.how.diagonal else keys)
    fragments, mapped, exchanges = exchanges_of(cut.layout, cut.documents, call.wants, width, columns, cut.peers.rank)
    for fragment in fragments:
        outs[fragment] = None
        if fragment.first:
            state = call.initial if fragment.start == 0 else None
            state = state.mT if state is not None and call.transposed else state
            outs[fragment], final = call.run(fragment.rows, state)
            if fragment in mapped:
                maps.append(torch.nn.functional.pad(final, (0, columns - width)))
        elif fragment in mapped:
            maps.append(call.map_of(fragment.rows))
    if not exchanges:
        return outs, None

    def passed(x_NBHKC: torch.Tensor, exchange: RowExchange, width: int) -> torch.Tensor:
        rows = exchanged(cut.peers, exchange, x_NBHKC.movedim(-1, 1).flatten(0, 1), 0, check=check)
        return rows.unflatten(0, (len(rows) // width, width)).movedim(1, -1).contiguous()

    composed = torch.stack(maps) if maps else call.value.new_zeros(0, batch, heads, keys, columns, dtype=call.wide)
    # Every rank takes part in the backward, whether it gives maps or uses them.
    composed = keep_in_graph(composed, *call.tensors())
    for exchange in exchanges[:-1]:
        composed = call.after(passed(composed, exchange, columns), composed)
    return outs, passed(composed, exchanges[-1], width)


def _outputs(
    call: _KernelCall, outs: dict[Fragment, torch.Tensor | None], states: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The outputs of all fragments, and the last state."""
    waiting = [fragment for fragment, out in outs.items() if out is None]
    for fragment, state in zip(waiting, () if states is None else states, strict=False):
        outs[fragment] = call.run(fragment.rows, state)[0]
    parts: Any = list(outs.values())
    out = torch.cat(parts, 1) if len(parts) > 1 else parts[0] if parts else keep_in_graph(call.value, *call.tensors())
    if states is None:
        return keep_in_graph(out), None
    return keep_in_graph(out, states), None if not call.wants else states[-1].mT if call.transposed else states[-1]
