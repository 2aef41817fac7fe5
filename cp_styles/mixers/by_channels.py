"""Kernels that mix the tokens of each channel for itself: each rank has all tokens of a part of the channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch

from cp_styles.collectives.autograd import differentiable, gather_exchange, tied
from cp_styles.collectives.heads import head_exchange
from cp_styles.collectives.rows import Rows
from cp_styles.mixers.fragments import CutSequence, Described, MixerCall, arguments_of


@dataclass(frozen=True)
class Channels:
    """How a kernel takes its arguments that computes each of C channels for itself, of L tokens, from a zero state.

    Attributes:
        cut: names of tensors [B, C, L]; the output is one too.
        shared: names of tensors [B, N, L] that all channels need.
        parameters: names of tensors with the channels along their first dim.
        wants: name of the flag with which it also returns a final state [B, C, N], N as in ``shared``.
    """

    cut: tuple[str, ...]
    shared: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    wants: str = "return_last_state"


def by_channels(
    sequence: CutSequence, kernel: Callable[..., Any], how: Channels, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A call of ``kernel`` with all tokens of this rank's channels, document by document.

    Communication: see :func:`~cp_styles.mixers.context_recurrence`.
    """
    sequence, name, named = sequence.packed_by(kwargs), sequence.name, {}

    def describe() -> Described:
        named.update(arguments_of(kernel, args, kwargs))
        tensors = [named[at] for at in (*how.cut, *how.shared) if named.get(at) is not None]
        if not tensors or any(x.ndim != 3 for x in tensors):
            raise ValueError(f"{name}: {how.cut} must be [B, C, L] and {how.shared} [B, N, L]")
        return tensors, 2, {"wants": bool(named.get(how.wants))}

    cut, check = sequence.agreed(describe), sequence.compares
    own, shared = ([at for at in names if named.get(at) is not None] for names in (how.cut, how.shared))
    first, states, wants = named[own[0]], [named[at].shape[1] for at in shared], bool(named.get(how.wants))
    count, wide = first.shape[1], torch.promote_types(first.dtype, torch.float32)
    item = len(first) * first.element_size()
    sizes = {"channels": count, "item": item, "tensors": len(own), "shared": item * sum(states)}
    last = wants * len(first) * prod(states[:1]) * wide.itemsize
    MixerCall("channels", cut, sizes | {"final": last}).tell()
    exchange = partial(head_exchange, cut.peers, layout=cut.layout, seq_dim=1, head_dim=2)
    there = exchange([count] * len(own) + [1] * len(shared))
    # [B, L, C, 1] and [B, L, 1, N]: what is shared is one column that every rank needs.
    tensors = [named[at].transpose(1, 2).unsqueeze(3 if at in own else 2) for at in (*own, *shared)]
    whole = differentiable(there, *tensors, check=check)
    low, high = there.columns[0][cut.peers.rank]
    given = {at: x.squeeze(3 if at in own else 2).transpose(1, 2) for at, x in zip((*own, *shared), whole, strict=True)}
    others = {at: x for at, x in named.items() if at not in given}
    parameters = {at: others.pop(at) for at in how.parameters if others.get(at) is not None}
    if low == high:  # fewer channels than ranks
        out = tied(given[own[0]], *given.values(), *parameters.values())
        final = tied(out.new_zeros(*out.shape[:2], *states[:1]), out)
    else:
        others |= {at: x.narrow(0, low, high - low) for at, x in parameters.items()}
        spans = list(pairwise(accumulate(cut.documents, initial=0)))
        runs = [kernel(**{at: x[..., start:stop] for at, x in given.items()}, **others) for start, stop in spans]
        runs, final = ([out for out, _ in runs], runs[-1][1]) if wants else (runs, runs[0])
        out = torch.cat(runs, 2) if len(runs) > 1 else runs[0]
    home = exchange([count]).adjoint()
    out = differentiable(home, out.transpose(1, 2).unsqueeze(3), check=check)[0].squeeze(3).transpose(1, 2)
    if not wants:
        return out
    rows = Rows(tuple(((low, high),) for low, high in there.columns[0]))
    gathers = gather_exchange(cut.peers, 1, final.ndim, rows)
    return out, differentiable(gathers, final.to(wide).unsqueeze(-1), check=check)[0].squeeze(-1)
