"""Kernels that mix the tokens of each channel separately: each rank computes a part of the channels, for all tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from cp_styles.collectives.autograd import differentiable, gather_exchange, keep_in_graph
from cp_styles.collectives.heads import head_exchange
from cp_styles.collectives.rows import contiguous_rows
from cp_styles.mixers.fragments import (
    CallFacts,
    Cut,
    CutSequence,
    bind_arguments,
    refuse_arguments,
    requires_grad_by_name,
)


@dataclass(frozen=True)
class Channels:
    """The arguments of a kernel that computes each of C channels of L tokens separately, from a zero state.

    Attributes:
        cut: names of tensors [B, C, L, ...]; the output has the shape of the first.
        shared: names of tensors [B, N, L] that every channel needs.
        parameters: names of tensors with the channels along their first dim.
        wants: name of the flag for a second result: a final state [B, C, N], N as in ``shared``.
        seq_dim: the dim of the tokens; with 1 tensors are [B, L, C, ...].
        left_out: arguments that must be None or False, such as an initial state.
    """

    cut: tuple[str, ...]
    shared: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    wants: str = "return_last_state"
    seq_dim: int = 2
    left_out: tuple[str, ...] = ()


def by_channels(
    sequence: CutSequence, kernel: Callable[..., Any], how: Channels, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Call ``kernel`` with all tokens of this rank's channels, document by document.

    Communication: see :func:`~cp_styles.mixers.context_recurrence`.
    """
    name, named = sequence.name, {}

    def describe() -> CallFacts:
        named.update(bind_arguments(kernel, args, kwargs))
        tensors = [named[at] for at in (*how.cut, *how.shared) if named.get(at) is not None]
        if not tensors or any(x.ndim < 3 for x in tensors):
            raise ValueError(f"{name}: {how.cut} must be [B, C, L] and {how.shared} [B, N, L]")
        refuse_arguments(name, named, how.left_out)
        return tensors, how.seq_dim, {how.wants: bool(named.get(how.wants)), **requires_grad_by_name(named.values())}

    with sequence.with_documents_from(kwargs).compared_call(describe) as cut:
        ran = None if cut.whole else _run_on_channels(cut, kernel, how, named, check=sequence.checks.agreement)
    if ran is None:
        return kernel(*args, **kwargs)
    out, last = ran
    return keep_in_graph(out) if last is None else (keep_in_graph(out), last)


def _run_on_channels(
    cut: Cut, kernel: Callable[..., Any], how: Channels, named: dict[str, Any], *, check: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The outputs, and the last state if it is wanted. ``named``: the arguments by name."""
    dim = how.seq_dim

    def swap_channels(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2) if dim == 2 else x

    parts, shared = ([at for at in names if named.get(at) is not None] for names in (how.cut, how.shared))
    first, states, wants = named[parts[0]], [named[at].shape[3 - dim] for at in shared], bool(named.get(how.wants))
    count, wide = first.shape[3 - dim], torch.promote_types(first.dtype, torch.float32)
    exchange = partial(head_exchange, cut.peers, layout=cut.layout, seq_dim=1, heads_dim=2)
    to_channels = exchange([count] * len(parts) + [1] * len(shared))
    # [B, L, C, ...] and [B, L, 1, N]: a shared tensor is one column that every rank needs.
    tensors = [swap_channels(named[at]).unsqueeze(3 if at in parts else 2).flatten(3) for at in (*parts, *shared)]
    whole = dict(zip((*parts, *shared), differentiable(to_channels, *tensors, check=check), strict=True))
    whole |= {at: whole[at].reshape(*whole[at].shape[:3], *named[at].shape[3:]) for at in parts}
    whole |= {at: whole[at].flatten(2) for at in shared}
    whole = {at: swap_channels(x) for at, x in whole.items()}
    low, high = to_channels.columns[0][cut.peers.rank]
    others = {at: x for at, x in named.items() if at not in whole}
    parameters = {at: others.pop(at) for at in how.parameters if others.get(at) is not None}
    if low == high:  # fewer channels than ranks
        out = keep_in_graph(whole[parts[0]], *whole.values(), *parameters.values())
        final = keep_in_graph(out.new_zeros(*out.shape[:2], *states[:1]), out)
    else:
        others |= {at: x.narrow(0, low, high - low) for at, x in parameters.items()}
        spans = list(zip(accumulate(cut.documents, initial=0), cut.documents, strict=False))
        runs = [kernel(**{at: x.narrow(dim, *span) for at, x in whole.items()}, **others) for span in spans]
        runs, final = ([out for out, _ in runs], runs[-1][1]) if wants else (runs, runs[0])
        out = torch.cat(runs, dim) if len(runs) > 1 else runs[0]
    to_tokens = exchange([count]).adjoint()
    out = differentiable(to_tokens, swap_channels(out).unsqueeze(3).flatten(3), check=check)[0]
    out = swap_channels(out.reshape(*out.shape[:3], *first.shape[3:]))
    if not wants:
        return out, None
    rows = contiguous_rows([high - low for low, high in to_channels.columns[0]])
    gathers = gather_exchange(cut.peers, 1, final.ndim, rows)
    return out, differentiable(gathers, final.to(wide).unsqueeze(-1), check=check)[0].squeeze(-1)
