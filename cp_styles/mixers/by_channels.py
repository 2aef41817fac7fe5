"""Kernels that mix the tokens of each channel for itself: each rank has all tokens of a part of the channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from cp_styles._compat import uncompiled
from cp_styles.collectives.autograd import differentiable, tied
from cp_styles.collectives.heads import head_exchange
from cp_styles.comm.agreement import EVERY_CALL, Agreement
from cp_styles.comm.groups import GroupOrMesh
from cp_styles.engine.gradient_watch import RAISE, GradientCheck
from cp_styles.layout import Balancer, SequenceLayout
from cp_styles.mixers.fragments import Cut, CutSequence, Packed, arguments_of


@dataclass(frozen=True)
class Channels:
    """How a kernel takes its arguments: C channels of L tokens.

    Attributes:
        cut: names of tensors [B, C, L]; the output is one too.
        shared: names of tensors [B, N, L] that all channels need.
        parameters: names of tensors with the channels along their first dim.
        wants: name of the flag with which it also returns a final state, which is not supported.
    """

    cut: tuple[str, ...]
    shared: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    wants: str = "return_last_state"


_SELECTIVE_SCAN = Channels(
    cut=("u", "delta", "hidden_states", "dt", "z"), shared=("B", "C"), parameters=("A", "D", "delta_bias")
)
KNOWN: dict[str, Channels] = dict.fromkeys(("selective_scan_fn", "mamba_selective_scan"), _SELECTIVE_SCAN)
"""The kernels whose arguments are known, by name."""


def context_by_channels(
    kernel: Callable[..., Any],
    group: GroupOrMesh,
    *,
    channels: Channels | None = None,
    layout: SequenceLayout | Balancer | None = None,
    documents: Packed = None,
    agreement: Agreement = EVERY_CALL,
    gradient_check: GradientCheck = RAISE,
) -> Callable[..., Any]:
    """``kernel`` for a sequence of which this rank holds a part. Its results equal those of one device.

    For kernels that compute each channel for itself, such as Mamba-1's selective scan,
    ``S_t = exp(dt A) S_{t-1} + dt B u``, which takes no initial state. Ranks exchange tokens for channels, as Ulysses
    does for heads, and each runs the kernel on all tokens of its channels, document by document. The number of ranks
    need not divide that of the channels. The result is called like ``kernel``, with this rank's tokens.

    Args:
        kernel: the function, such as mamba-ssm's ``selective_scan_fn``.
        group: the ranks that share the sequence: a process group or a 1-D mesh.
        channels: how it takes its arguments. Default: that of its name, if it is known.
        layout: the layout, or the balancer that makes it. Default: that of the :class:`~cp_styles.SequenceScope`
            around the call; without one ``head_tail``.
        documents: lengths of the packed documents of the whole sequence. Default: those of ``cu_seqlens``, of
            ``seq_idx``, or of the scope's mask; without any, one document.
        agreement: how often the ranks agree on their calls, see :class:`~cp_styles.EveryCall`.
        gradient_check: what to do if gradients were not reduced over the group, so that the ranks' parameters differ:
            :class:`~cp_styles.GradientCheck`. Default: an error.

    Returns:
        A function with the arguments and the result of ``kernel``. Gradients of parameters are this rank's share: sum
        them over the group.

    Communication of a call: one all-gather of some integers; one all-to-all, in which a rank sends each other one its
    tokens of that one's channels, and of what is shared; one all-to-all of the output. The backward sends the same.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, if the input of one is bad or the ranks differ.

    Example::

        scan = context_by_channels(selective_scan_fn, mesh, layout=layout)
        out_BCL = scan(u_BCL, delta_BCL, A_CN, B_BNL, C_BNL, D_C, z=z_BCL, delta_softplus=True)
    """
    name = getattr(kernel, "__name__", type(kernel).__name__)
    how = KNOWN.get(name) if channels is None else channels
    if how is None:
        raise ValueError(f"context_by_channels: it is not known how {name} takes its arguments: pass channels=")
    sequence = CutSequence.of_call(f"context_by_channels({name})", group, layout, documents, agreement, gradient_check)
    return partial(scanned_by_channels, sequence, kernel, how)


@uncompiled
def scanned_by_channels(
    sequence: CutSequence, kernel: Callable[..., Any], how: Channels, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """:func:`context_by_channels` of a sequence, called with the arguments of ``kernel``."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim > 2]
    return sequence.followed(lambda sequence: _by_channels(sequence, kernel, how, args, kwargs), tensors, 2)


def _by_channels(
    sequence: CutSequence, kernel: Callable[..., Any], how: Channels, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    sequence, name, named = sequence.packed_by(kwargs), sequence.name, {}

    def describe() -> tuple[list[torch.Tensor], int]:
        named.update(arguments_of(kernel, args, kwargs))
        if named.pop(how.wants, False):
            raise NotImplementedError(f"{name}: final states are not supported: leave out {how.wants}")
        tensors = [named[at] for at in (*how.cut, *how.shared) if named.get(at) is not None]
        if not tensors or any(x.ndim != 3 for x in tensors):
            raise ValueError(f"{name}: {how.cut} must be [B, C, L] and {how.shared} [B, N, L]")
        return tensors, 2

    return _scanned(kernel, how, named, sequence.agreed(describe), check=sequence.compares)


def _scanned(
    kernel: Callable[..., Any], how: Channels, named: dict[str, Any], cut: Cut, *, check: bool
) -> torch.Tensor:
    own, shared = ([at for at in names if named.get(at) is not None] for names in (how.cut, how.shared))
    count, rank = named[own[0]].shape[1], cut.peers.rank
    where = {"seq_sizes": cut.layout, "seq_dim": 1, "head_dim": 2}
    there = head_exchange(cut.peers, heads=[count] * len(own) + [1] * len(shared), **where)
    # [B, L, C, 1] and [B, L, 1, N]: what is shared is one column that every rank needs.
    tensors = [named[at].transpose(1, 2).unsqueeze(3 if at in own else 2) for at in (*own, *shared)]
    whole = differentiable(there, *tensors, check=check)
    low, high = there.columns[0][rank]
    given = {at: x.squeeze(3 if at in own else 2).transpose(1, 2) for at, x in zip((*own, *shared), whole, strict=True)}
    others = {at: x for at, x in named.items() if at not in given}
    parameters = {at: others.pop(at) for at in how.parameters if others.get(at) is not None}
    if low == high:  # fewer channels than ranks
        out = tied(given[own[0]], *given.values(), *parameters.values())
    else:
        others |= {at: x.narrow(0, low, high - low) for at, x in parameters.items()}
        spans = list(pairwise(accumulate(cut.documents, initial=0)))
        runs = [kernel(**{at: x[..., start:stop] for at, x in given.items()}, **others) for start, stop in spans]
        out = torch.cat(runs, 2) if len(runs) > 1 else runs[0]
    home = head_exchange(cut.peers, heads=[count], **where).adjoint()
    return differentiable(home, out.transpose(1, 2).unsqueeze(3), check=check)[0].squeeze(3).transpose(1, 2)
