"""context_latent_attention: multi-head latent attention whose latents travel between ranks, in place of its heads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cp_styles._lib.compat import is_traced
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup, axis_and_group
from cp_styles.engine.binding import binding_of_call
from cp_styles.engine.config import config_in_graph
from cp_styles.engine.custom_ops import attend, check_local, check_plain
from cp_styles.kernels import Kernel
from cp_styles.kernels.autocast import cast_for_attention
from cp_styles.kernels.latent import LatentKernel
from cp_styles.layouts import Balancer, SequenceLayout, head_tail
from cp_styles.masks import Full, Mask
from cp_styles.strategies import Ring, Strategy

# Created once, because torch.compile cannot create objects of these classes while it traces.
_RING, _FULL = Ring(), Full()


def context_latent_attention(
    q_BHLD: torch.Tensor,
    latent_BMR: torch.Tensor,
    rot_BMr: torch.Tensor,
    weight_NR: torch.Tensor,
    mesh: MeshOrGroup,
    *,
    mask: Mask | None = None,
    layout: SequenceLayout | Balancer | None = None,
    strategy: Strategy | None = None,
    kernel: Kernel | None = None,
    scale: float | None = None,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """Multi-head latent attention (MLA) over a sequence of which this rank holds a part. The latents travel.

    Head h has the keys ``[latent @ W_k[h].T, rot]`` and the values ``latent @ W_v[h].T``. Each rank sends its latents
    and rotary keys, R + r numbers a position (576 in DeepSeek-V3), where
    :func:`~cp_styles.context_attention` sends the keys and values of all heads, H (D + E) numbers (40,960). The
    receiver expands them, and repeats this in the backward. So each rank expands all latents that its queries need, not
    only its own. ``explain(..., latent_dim=R, rotary_dim=r)`` has the bytes and the predicted times of both.

    Shapes: B batch, H query heads, L local queries, M local keys, R dim of a latent, r rotary dims, D head dim of
    queries and keys, E head dim of values, N = H (D - r + E). All tensors share one floating-point dtype and one
    device, CPU or CUDA.

    Args:
        q_BHLD: local query, cut by ``layout``. The last r dims of a head are the rotary ones.
        latent_BMR: local latents, after their norm.
        rot_BMr: the rotary part of the local keys, with positions applied. All heads share it.
        weight_NR: the weight of the linear layer that expands latents (``kv_b_proj.weight``): for each head first the
            D - r rows of its keys, then the E rows of its values. Equal on all ranks. Its gradient is this rank's
            share: sum it over the group, as for any parameter.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        mask: which keys each query attends to, in global positions. Default: all.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, whose mask then applies too; without a scope ``head_tail``.
        strategy: how latents get to the queries, or with :class:`~cp_styles.Ulysses` queries to the latents of all
            ranks; default ``Ring()``.
        kernel: computes the tiles of expanded keys; default the fastest of torch's kernels that can.
        scale: factor of the logits; default 1/sqrt(D).
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        ``out_BHLE`` of the local queries, in their dtype.

    Communication: one agreement of the ranks (:class:`~cp_styles.Checks`), then the strategy's, with one head of R + r
    numbers in place of keys and values. Backward: the strategy's.

    Memory: the strategy's, and expanded keys and values of some heads: see
    :class:`~cp_styles.kernels.latent.LatentKernel`. The backward keeps latents, and no expanded keys.

    Source: DeepSeek-V2 (2024), multi-head latent attention.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, if the input of one is bad or the ranks differ.

    Example::

        layout, rank = head_tail(1000, mesh.size()), mesh.get_local_rank()
        q = layout.shard(torch.randn(1, 8, 1000, 24), 2, rank)
        latent, rot = (layout.shard(torch.randn(1, 1000, dim), 1, rank) for dim in (32, 8))
        weight = torch.randn(8 * (16 + 16), 32)  # 16 dims without positions and 16 dims of values for each head
        out = context_latent_attention(q, latent, rot, weight, mesh, mask=Causal(), layout=layout)  # [1, 8, 500, 16]
    """
    name, strategy, mask = "context_latent_attention", strategy or _RING, mask or _FULL
    call = LatentCall(q_BHLD, latent_BMR, rot_BMr, weight_NR)
    if not is_traced():
        binding = binding_of_call(name, mesh, strategy, layout, mask, kernel, checks=checks)
        with binding.telling():
            call.check(name)
            tensors, learned = call.arguments()
            check_local(name, tensors)
        return attend(binding.with_kernel(call.make_kernel(kernel)), tensors, scale=scale, learned=learned)[0]
    axis, group = axis_and_group(name, mesh)
    tensors, learned, problem, how = (q_BHLD,) * 3, None, "", (strategy, head_tail if layout is None else layout, mask)
    try:
        call.check(name)
        if checks.local:
            raise NotImplementedError(
                f"{name}: torch.compile cannot take Checks(local=...) into a graph: call this function once outside of "
                "the compiled code"
            )
        tensors, learned = call.arguments()
        kernel = call.make_kernel(kernel)
    except Exception as error:  # the op raises it on every rank. torch.compile cannot trace str(error)
        problem = error.args[0]
    config = config_in_graph(name, axis, group.group_name, *how, kernel, checks=checks, has_layout=layout is not None)
    return attend(config, tensors, scale=scale, learned=learned, problem=problem)[0]


class NotedLatent(NamedTuple):
    """The latents that a linear layer has expanded, for the next attention: a fact about the layer."""

    latent: torch.Tensor
    expanded: torch.Tensor


class LatentCall(NamedTuple):
    """The tensors of a call, as in :func:`context_latent_attention`."""

    q_BHLD: torch.Tensor
    latent_BMR: torch.Tensor
    rot_BMr: torch.Tensor
    weight_NR: torch.Tensor

    def make_kernel(self, kernel: Kernel | None) -> LatentKernel:
        """The kernel that expands these latents, for tiles of ``kernel``."""
        latent_dim, nope_dim = self.latent_BMR.shape[2], self.q_BHLD.shape[3] - self.rot_BMr.shape[2]
        return LatentKernel(latent_dim, nope_dim, self.weight_NR.shape[0] // self.q_BHLD.shape[1] - nope_dim, kernel)

    def arguments(self) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """The tensors, and the tensor that the kernel learns, for :func:`~cp_styles.engine.custom_ops.attend`."""
        q, latent, rot, weight = cast_for_attention(self)
        return (q, latent.unsqueeze(1), rot.unsqueeze(1)), weight.reshape(-1)

    def check(self, name: str) -> None:
        """Raise for tensors of this rank that do not fit."""
        check_plain(name, self, ("query", "latent", "rotary key", "weight"))
        q, latent, rot, weight = self
        if (q.ndim, latent.ndim, rot.ndim, weight.ndim) != (4, 3, 3, 2):
            raise ValueError(
                f"{name}: pass q [B, H, L, D], latent [B, M, R], rot [B, M, r] and weight [H (D - r + E), R], got "
                f"{[tuple(x.shape) for x in self]}"
            )
        if latent.shape[:2] != rot.shape[:2]:
            raise ValueError(
                f"{name}: latent and rot are of different tokens, {tuple(latent.shape)} and {tuple(rot.shape)}: cut "
                "both with the layout of the attention"
            )
        (heads, _, dim), (rows, columns), rotary_dim = q.shape[1:], weight.shape, rot.shape[2]
        value_dim = rows // max(heads, 1) - (dim - rotary_dim)
        if latent.shape[2] != columns or not heads or rows % heads or value_dim < 1 or rotary_dim > dim:
            raise ValueError(
                f"{name}: a weight of shape {tuple(weight.shape)} does not expand latents of {latent.shape[2]} numbers "
                f"to {heads} heads whose queries have {dim} dims, {rotary_dim} of them rotary: it needs {heads} x "
                f"({dim} - {rotary_dim} + E) rows, for E dims of values, and {latent.shape[2]} columns"
            )
        if weight.dtype != latent.dtype and len({x.dtype for x in cast_for_attention((weight, latent))}) > 1:
            raise ValueError(
                f"{name}: the weight has {weight.dtype} and the latents have {latent.dtype}: pass "
                "weight.to(latent.dtype), or call it under torch.autocast"
            )
