"""context_max_scores: the largest attention score of each query and head, over the keys of all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from cp_styles._lib.compat import never_compiled, without_dispatch_modes
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.engine.binding import Binding, binding_of_call
from cp_styles.engine.custom_ops import attend, check_local
from cp_styles.kernels.flex import FlexKernel
from cp_styles.kernels.max_scores import MaxScores
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.masks import Full, Mask
from cp_styles.strategies import Ring, Strategy


@never_compiled
def context_max_scores(
    q_BHLD: torch.Tensor,
    k_BGMD: torch.Tensor,
    mesh: MeshOrGroup,
    *,
    mask: Mask | None = None,
    layout: SequenceLayout | Balancer | None = None,
    kv_layout: SequenceLayout | Balancer | None = None,
    strategy: Strategy | None = None,
    scale: float | None = None,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """The largest score q k^T scale of each query and head, over the keys of all ranks, as QK-clip needs it.

    The result is of this rank's queries. For the largest score of a head, take the maximum over the ranks too, by one
    all-reduce of H numbers, as the example does. There each rank has a token.

    Shapes: B batch, H query heads, G key heads, L local queries, M local keys, D head dim. Query and key share one
    floating-point dtype and one device, CPU or CUDA.

    Args:
        q_BHLD: local query, cut by ``layout``, with positions applied.
        k_BGMD: local key, cut by ``kv_layout``, or in the same way. H is a multiple of G (GQA).
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        mask: which keys each query attends to, in global positions. An additive mask is a part of the scores, in
            the dtype of the inputs. Default: all.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, whose mask then applies too; without a scope ``head_tail``.
        kv_layout: the layout of keys of another sequence than the queries, or the balancer that makes it, as in
            :func:`~cp_styles.context_attention`. Default: ``layout`` cuts both.
        strategy: how keys get to the queries; default ``Ring()``. Received keys are not kept.
        scale: factor of the scores; default 1/sqrt(D).
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        ``max_BHL`` of the local queries: -inf for queries without keys. In float32, or in float64 for float64 inputs:
        products of inputs in 16 bits are not rounded. It has no gradient.

    Communication: one agreement of the ranks (:class:`~cp_styles.Checks`), then the strategy's forward, with keys alone
    in place of keys and values. :class:`~cp_styles.Ulysses` also sends queries and the result.

    Memory: the strategy's, and blocks of 2**23 scores, never the scores of a whole tile. A mask with gaps, or a dense
    mask, is in memory for a tile, as in attention.

    Under torch.compile the graph breaks here.

    Source: Kimi K2 (2025), MuonClip.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, if the input of one is bad or the ranks differ.

    Example::

        layout = head_tail(1000, mesh.size())
        q, k, v = (layout.shard(whole, 2, mesh.get_local_rank()) for whole in qkv)  # each [1, 8, 1000, 64]
        max_BHL = context_max_scores(q, k, mesh, mask=Causal(), layout=layout)  # [1, 8, 500]
        max_H = max_BHL.amax((0, 2))
        torch.distributed.all_reduce(max_H, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
    """
    name = "context_max_scores"
    binding = binding_of_call(name, mesh, strategy or Ring(), layout, mask or Full(), None, kv_layout, checks=checks)
    with binding.telling(), without_dispatch_modes():
        check_local(name, (q_BHLD, k_BGMD, k_BGMD))
    return max_scores(binding, q_BHLD, k_BGMD, scale=scale)


def max_scores(
    binding: Binding,
    q_BHLD: torch.Tensor,
    k_BGMD: torch.Tensor,
    *,
    scale: float | None,
    modified: FlexKernel | None = None,
    casts: bool = True,
) -> torch.Tensor:
    """``max_BHL`` for a binding, see :func:`context_max_scores`. ``modified``: computes scores with a score_mod."""
    binding = binding.without_kept_keys()
    # A score_mod has tensors of this call, and is not cached.
    binding = binding.with_kernel(MaxScores()) if modified is None else replace(binding, kernel=MaxScores(modified))
    with torch.no_grad():
        return attend(binding, (q_BHLD, k_BGMD, k_BGMD[..., :0]), scale=scale, wants_lse=True, casts=casts)[1]
