"""context_attention: context-parallel attention as a function of local tensors, without modules and DTensor."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cp_styles._lib.compat import is_traced
from cp_styles.comm.agreement import telling
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup, axis_and_group
from cp_styles.engine.binding import binding_of_call
from cp_styles.engine.config import config_in_graph
from cp_styles.engine.custom_ops import attend, check_local, check_plain, tell_of_call
from cp_styles.functions.joint_layout import JointLayout, attend_jointly, refuse_graphs
from cp_styles.kernels import Kernel
from cp_styles.layouts import Balancer, SequenceLayout, head_tail
from cp_styles.masks import Full, Mask
from cp_styles.strategies import Ring, Strategy

# Created once, because torch.compile cannot create objects of these classes while it traces.
_RING, _FULL = Ring(), Full()


def context_attention(
    q_BHLD: torch.Tensor,
    k_BGMD: torch.Tensor,
    v_BGME: torch.Tensor,
    mesh: MeshOrGroup,
    *,
    mask: Mask | None = None,
    layout: SequenceLayout | Balancer | JointLayout | None = None,
    kv_layout: SequenceLayout | Balancer | None = None,
    strategy: Strategy | None = None,
    kernel: Kernel | None = None,
    scale: float | None = None,
    sink_H: torch.Tensor | None = None,
    seq_dim: int = 2,
    return_lse: bool = False,
    checks: Checks = CHECKS,
) -> Any:
    """Attention over a sequence of which this rank holds a part. The result equals the result on one device.

    Shapes: B batch, H query heads, G key/value heads, L local queries, M local keys, D head dim, E value head dim.
    Query, key and value share one floating-point dtype and one device, CPU or CUDA.

    Args:
        q_BHLD: local query, cut by ``layout``.
        k_BGMD: local key, cut by ``kv_layout``, or in the same way. H is a multiple of G (GQA); only the G heads are
            sent.
        v_BGME: local value.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        mask: which keys each query attends to, in global positions. Default: all.
        layout: the layout, or the balancer that makes it; or a
            :class:`~cp_styles.functions.joint_layout.JointLayout`, with which some tokens are whole on every rank.
            Default: the layout of the :class:`~cp_styles.SequenceScope` around the call, whose mask then applies too;
            without a scope ``head_tail``.
        kv_layout: the layout of keys of another sequence than the queries, or the balancer that makes it. ``mask`` is
            then over the numbers of keys: see :class:`~cp_styles.masks.Shifted` and
            :class:`~cp_styles.masks.EndedWindows`. Default: ``layout`` cuts both.
        strategy: how keys and values get to the queries; default ``Ring()``. Its docstring gives the bytes.
        kernel: computes the tiles; default the fastest of torch's kernels that can. If it takes no masks, tiles with an
            explicit mask go to another kernel: see :func:`~cp_styles.kernels.choice_by_tile.kernel_for_tiles`.
        scale: factor of the logits; default 1/sqrt(D).
        sink_H: attention sinks: one learned logit for each query head, which takes part in every softmax and adds
            nothing to the output. Equal on all ranks. Its gradient is this rank's share: sum it over the group,
            as for any parameter.
        seq_dim: 1 for tensors ``[B, L, H, D]``, as in flash-attn, DeepSpeed-Ulysses and yunchang. The output has the
            same order of dims.
        return_lse: also return the logsumexp. Not with sinks, with a JointLayout, or in a compiled graph.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        ``out_BHLE`` of the local queries, in their dtype. With ``return_lse`` ``(out_BHLE, lse_BHL)``; lse has the
        natural logarithm, -inf for queries without keys, and is differentiable.

    Communication: one agreement of the ranks (:class:`~cp_styles.Checks`), then the strategy's. Backward: the
    strategy's.

    Under torch.compile: one opaque op forward and one backward. Make ``mask``, ``layout``, ``strategy`` and ``kernel``
    outside of the compiled function. Changing one of them recompiles; changing lengths or values does not.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, if the input of one is bad or the ranks differ.

    Example::

        layout = head_tail(1000, mesh.size())
        q, k, v = (layout.shard(whole, 2, mesh.get_local_rank()) for whole in qkv)  # each [1, 8, 1000, 64]
        out = context_attention(q, k, v, mesh, mask=Causal(), layout=layout)
    """
    name, strategy, mask = "context_attention", strategy or _RING, mask or _FULL
    joint = layout if isinstance(layout, JointLayout) else None
    traced = is_traced()
    cut = layout.balancer if isinstance(layout, JointLayout) else layout
    if traced:
        axis, group = axis_and_group(name, mesh)
        if checks.local:
            raise NotImplementedError(
                f"{name}: torch.compile cannot take Checks(local=...) into a graph: apply a style with it, or "
                "call this function once outside of the compiled code"
            )
        how = strategy, head_tail if cut is None else cut, mask, kernel, kv_layout
        source = config_in_graph(name, axis, group.group_name, *how, checks=checks, has_layout=cut is not None)
    else:
        source = binding_of_call(name, mesh, strategy, cut, mask, kernel, kv_layout, checks=checks)
        group = source.group
    tensors, problem = (q_BHLD, k_BGMD, v_BGME), ""
    try:
        if seq_dim not in (1, 2):
            raise ValueError(f"{name}: seq_dim={seq_dim} must be 2, for tensors [B, H, L, D], or 1, for [B, L, H, D]")
        if joint is not None and kv_layout is not None:
            raise NotImplementedError(
                f"{name}: a JointLayout lays out keys with queries: pass kv_layout= with a layout or a balancer"
            )
        if return_lse and (sink_H is not None or joint is not None or traced):
            raise NotImplementedError(
                f"{name}: return_lse=True is not supported with sink_H=, with a JointLayout, or inside of torch.compile"
            )
        if seq_dim == 1:
            tensors = _swap_seq_and_heads(q_BHLD), _swap_seq_and_heads(k_BGMD), _swap_seq_and_heads(v_BGME)
        (check_plain if traced else check_local)(name, tensors, sink_H=sink_H)
    except Exception as error:
        problem = tell_of_call(source, error)
        if not traced:
            raise
    options = {"scale": scale, "sink_H": sink_H, "problem": problem}
    if joint is None:
        out, lse, _ = attend(source, tensors, **options, wants_lse=return_lse)
    else:
        refuse_graphs(name, traced=traced)
        lse = None
        with telling(name, group, agrees=checks.agreement):
            out = attend_jointly(joint, name, group, tensors, partial(attend, source, **options))
    out = _swap_seq_and_heads(out) if seq_dim == 1 else out
    return (out, lse) if return_lse else out


def _swap_seq_and_heads(x: torch.Tensor) -> torch.Tensor:
    # check_local refuses other objects and other numbers of dims.
    return x.transpose(1, 2) if isinstance(x, torch.Tensor) and not x.is_nested and x.ndim == 4 else x
