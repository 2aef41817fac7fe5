"""Recurrences with a matrix as their state, over a sharded sequence: ranks send the state after each fragment.

[Note: affine maps] Over a fragment the state changes by an affine map, ``S_out = M S_in + S_ext``, which depends on
this fragment alone. The kernel itself computes the map: from a zero state it ends with ``S_ext``, and with zero values
it ends with M times its initial state. The ranks compose the maps of the fragments before each fragment, see [Note:
doubling] in doubling.py, and run their kernels from the received states.

A kernel without an initial state that computes each channel separately runs on all tokens of a part of the channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cp_styles._lib.compat import uncompiled
from cp_styles.collectives.autograd import keep_in_graph
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.layouts.ranges import Chunk
from cp_styles.mixers.by_channels import Channels, by_channels
from cp_styles.mixers.convolution import exchange_rows
from cp_styles.mixers.doubling import plan_exchanges
from cp_styles.mixers.fragments import (
    CallFacts,
    Cut,
    CutSequence,
    Fragment,
    Packed,
    RowExchange,
    bind_arguments,
    mark_mixing,
    refuse_arguments,
    requires_grad_by_name,
)


@dataclass(frozen=True)
class Recurrence:
    """The arguments of a kernel with tensors [B, L, ...] of L tokens, and a state [B, H, K, V].

    The kernel computes ``S_t = A_t S_{t-1} + k_t v_t``, where ``A_t`` does not depend on the values, and outputs that
    are linear in ``S_t``. It returns the outputs, and with ``wants`` also the state after the last token.

    Attributes:
        value: names that its argument v [B, L, H, V] may have.
        key: names of an argument whose last dim is K.
        state: name of its initial state; None is zeros.
        wants: name of the flag for a second result, the final state.
        transposed: its states are [B, H, V, K], as in kernels that are called with state_v_first=True.
        diagonal: ``A_t`` is diagonal, or a number for each head. Ranks send its K numbers, and not K * K.
        left_out: arguments that change the outputs only. Runs for the map of a state are without them; if the kernel
            must be given one with a column for each of v, it gets its first column for all.
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
    # From flash-linear-attention, and plain functions of transformers that replace them.
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
    """``kernel`` for a sharded sequence. Its results equal the results on one device.

    For gated delta rules, KDA, gated linear attention, Mamba-2 (SSD): ``S_t = A_t S_{t-1} + k_t v_t``,
    ``out_t = q_t S_t``. The returned function is called like ``kernel``, with this rank's tokens. The initial state is
    the state before the whole sequence, equal on all ranks. The final state is the state after the last token, on every
    rank. ``cu_seqlens`` and ``seq_idx`` are for the whole sequence; the kernel is called for each document. With one
    rank and one document it is called as it is.

    A fragment in the middle of a document is run twice, first for its map of the state, with K more columns of values
    (or with one column, if the recurrence is diagonal). See [Note: affine maps] in mixers/recurrence.py.

    :class:`Channels` describes kernels that compute each channel separately and take no initial state, such as
    Mamba-1's ``selective_scan_fn``. For these, ranks exchange tokens for channels, as Ulysses does for heads. The
    number of ranks need not divide the number of channels.

    Args:
        kernel: the function, such as FLA's ``chunk_gated_delta_rule``. It must be differentiable in its initial state.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        recurrence: the arguments of the kernel. Default: looked up by the kernel's name.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, else of the style or block; without one ``head_tail``. Contiguous shards have the
            fewest fragments.
        documents: lengths of the packed documents of the whole sequence. Default: from ``cu_seqlens``,
            ``seq_idx``, or the scope's mask; without any, one document.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        A function with the arguments and results of ``kernel``. Gradients of parameters and initial states are this
        rank's share: sum them over the group.

    Communication of a call: one all-gather of some integers; for N fragments of a document 1 + log2(N - 1) all-to-alls,
    in which the map of a fragment is sent to one rank, ``B H K (V + K)`` numbers (``B H K (V + 1)`` if it is diagonal),
    or its state, ``B H K V``, in float32 or wider. None if no document crosses ranks. The backward sends the
    same, in the other direction, and ranks compare before each. By channels: one all-to-all, in which a rank sends each
    peer its tokens of the peer's channels and of the shared inputs, and one of the output. The backward sends the same.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, if any rank's input is invalid or the ranks differ.

    Example::

        scan = context_recurrence(chunk_gated_delta_rule, mesh, layout=layout)
        out_BLHV, _ = scan(q_BLHK, k_BLHK, v_BLHV, g=g_BLH, beta=beta_BLH)
    """
    name = getattr(kernel, "__name__", type(kernel).__name__)
    how = KNOWN.get(name) if recurrence is None else recurrence
    if how is None:
        raise ValueError(
            f"context_recurrence: it is not known how {name} takes its arguments: pass recurrence=Recurrence(...), or "
            "Channels(...) for a kernel without an initial state that computes each channel separately"
        )

    def scan(*args: Any, **kwargs: Any) -> Any:
        sequence = CutSequence.from_call(f"context_recurrence({name})", mesh, layout, documents, checks)
        return run_recurrence(sequence, kernel, how, *args, **kwargs)

    return uncompiled(scan)


@mark_mixing()
def run_recurrence(
    sequence: CutSequence, kernel: Callable[..., Any], how: Recurrence | Channels, *args: Any, **kwargs: Any
) -> Any:
    """:func:`context_recurrence` over a CutSequence, with the arguments of ``kernel``."""
    if isinstance(how, Channels):
        return by_channels(sequence, kernel, how, args, kwargs)
    call: Any = None

    def describe() -> CallFacts:
        nonlocal call
        call = _KernelCall(kernel, sequence.name, how, args, kwargs)
        state = call.initial
        state_facts = state is not None and [list(state.shape), state.requires_grad]
        facts = {how.wants: call.wants, how.state: state_facts, **requires_grad_by_name(call.tensors())}
        return list(call.cut.values()), 1, facts

    with sequence.with_documents_from(kwargs).compared_call(describe) as cut:
        ran = None if cut.whole else _exchange_states(call, cut, check=sequence.checks.agreement)
    if ran is None:
        return kernel(*args, **kwargs)
    out, final = _run_remaining(call, *ran)
    # Kernels of FLA always return two results, kernels of mamba-ssm with the flag ``wants``.
    return (out, final) if call.wants or not how.transposed else out


# Arguments for another direction, another sharding, decays of values, and further results.
_UNSUPPORTED = ("reverse", "head_first", "cp_context", "gv", "return_intermediate_states", "return_varlen_states")


class _KernelCall:
    """The arguments of a kernel by name, and runs of the kernel on some tokens. ``cut``: the tensors of tokens."""

    def __init__(
        self, kernel: Callable[..., Any], name: str, how: Recurrence, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        named = bind_arguments(kernel, args, kwargs)
        refuse_arguments(name, named, _UNSUPPORTED)
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
        """All tensors that may get gradients."""
        arguments = (*self.cut.values(), self.initial, *self.others.values())
        return [x for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def run(self, rows: Chunk, state: torch.Tensor | None, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and final state of some rows. States are [B, H, K, V]. ``changed``: replaces arguments."""
        part = {at: x.narrow(1, rows[0], rows[1] - rows[0]) for at, x in (self.cut | changed).items() if x is not None}
        others = {at: x for at, x in self.others.items() if at not in changed}
        state = state.mT.contiguous() if state is not None and self.transposed else state
        out, final = self.kernel(**part, **others, **{self.how.state: state, self.how.wants: True})
        return out, (final.mT if self.transposed else final).to(self.wide)

    def affine_map(self, rows: Chunk) -> torch.Tensor:
        """``[S_ext | M]`` of some rows, with one column for M if it is diagonal: [B, H, K, V + K or 1]."""
        batch, heads, keys, _ = self.shape
        like, zeros = {"dtype": self.wide, "device": self.value.device}, self.value.new_zeros(())
        tokens = self.value.shape[:3]
        if self.how.diagonal:
            ones = torch.ones(batch, heads, keys, 1, **like)
            _, factor = self.run(rows, ones, **self._left_out(1), **{self._value: zeros.expand(*tokens, 1)})
            return torch.cat((self.run(rows, None)[1], factor), -1)
        both = torch.cat((self.value, zeros.expand(*tokens, keys)), -1)
        begin = torch.eye(keys, **like).expand(batch, heads, keys, keys)
        begin = torch.cat((torch.zeros(*self.shape, **like), begin), -1)
        return self.run(rows, begin, **self._left_out(both.shape[-1]), **{self._value: both})[1]

    def _left_out(self, columns: int) -> dict[str, torch.Tensor | None]:
        """Stand-ins for arguments that change the outputs only, for values of another number of columns:
        nothing, or of an argument that the kernel must be given, as many columns."""
        changed = dict.fromkeys(self.how.left_out)
        parameters = inspect.signature(self.kernel).parameters
        for at in self.how.left_out:
            if at in parameters and parameters[at].default is inspect.Parameter.empty:
                x = self.cut.get(at)
                if x is None or x.shape[-1] != self.shape[3]:
                    del changed[at]
                else:
                    changed[at] = x[..., :1].expand(*x.shape[:-1], columns)
        return changed

    def compose(self, before: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
        """``[S_ext | M]`` of fragments together with the maps ``before`` them, which are zeros before a document."""
        width = self.shape[3]
        outside, factor = maps[..., :width], maps[..., width:]
        through = factor * before if self.how.diagonal else factor @ before
        return through + torch.nn.functional.pad(outside, (0, maps.shape[-1] - width))


def _exchange_states(
    call: _KernelCall, cut: Cut, *, check: bool
) -> tuple[dict[Fragment, torch.Tensor | None], torch.Tensor | None]:
    """This rank's fragments, with outputs of the fragments in which a document begins; and the states before the
    remaining fragments, with the final state last if it is wanted. None if no state is exchanged."""
    outs: dict[Fragment, torch.Tensor | None] = {}
    maps: list[torch.Tensor] = []
    batch, heads, keys, width = call.shape
    columns = width + (1 if call.how.diagonal else keys)
    fragments, mapped, exchanges = plan_exchanges(cut.layout, cut.documents, call.wants, width, columns, cut.peers.rank)
    for fragment in fragments:
        outs[fragment] = None
        if fragment.first:
            state = call.initial if fragment.start == 0 else None
            state = state.mT if state is not None and call.transposed else state
            outs[fragment], final = call.run(fragment.rows, state)
            if fragment in mapped:
                maps.append(torch.nn.functional.pad(final, (0, columns - width)))
        elif fragment in mapped:
            maps.append(call.affine_map(fragment.rows))
    if not exchanges:
        return outs, None

    def pass_on(x_NBHKC: torch.Tensor, exchange: RowExchange, width: int) -> torch.Tensor:
        rows = exchange_rows(cut.peers, exchange, x_NBHKC.movedim(-1, 1).flatten(0, 1), 0, check=check)
        return rows.unflatten(0, (len(rows) // width, width)).movedim(1, -1).contiguous()

    composed = torch.stack(maps) if maps else call.value.new_zeros(0, batch, heads, keys, columns, dtype=call.wide)
    # Every rank must take part in the backward, even if it sends or uses no map.
    composed = keep_in_graph(composed, *call.tensors())
    for exchange in exchanges[:-1]:
        composed = call.compose(pass_on(composed, exchange, columns), composed)
    return outs, pass_on(composed, exchanges[-1], width)


def _run_remaining(
    call: _KernelCall, outs: dict[Fragment, torch.Tensor | None], states: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The outputs of all fragments, and the final state."""
    waiting = [fragment for fragment, out in outs.items() if out is None]
    for fragment, state in zip(waiting, () if states is None else states, strict=False):
        outs[fragment] = call.run(fragment.rows, state)[0]
    parts: Any = list(outs.values())
    out = torch.cat(parts, 1) if len(parts) > 1 else parts[0] if parts else keep_in_graph(call.value, *call.tensors())
    if states is None:
        # On one process the initial state has a gradient. A reducer waits for it on every rank.
        state = None if any(fragment.start == 0 for fragment in outs) else call.initial
        return keep_in_graph(out, *([] if state is None else [state])), None
    return keep_in_graph(out, states), None if not call.wants else states[-1].mT if call.transposed else states[-1]
