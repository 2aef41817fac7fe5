"""One softmax over the keys of several attentions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_styles.kernels.merge import EMPTY_LSE


def join_attentions(
    *parts: tuple[torch.Tensor, torch.Tensor], sink_H: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over the keys of several attentions of the same queries, and over attention sinks.

    A query attends to keys of several sequences, each with its mask and layout: the tokens near it and the windows that
    were compressed, as in DeepSeek-V4. No communication. Differentiable in all arguments.

    Args:
        parts: ``(out_BHLE, lse_BHL)`` of each attention, as ``context_attention(..., return_lse=True)`` returns them.
        sink_H: one logit for each query head, which takes part in every softmax and adds nothing to the output. Its
            gradient is this rank's share: sum it over the group, as for any parameter.

    Returns:
        ``(out_BHLE, lse_BHL)``: the output in the dtype of the first part, 0 for queries without keys, and the
        logsumexp over all keys and the sink.

    Raises:
        ValueError: there is no part, or shapes do not fit together.

    Example::

        attend = partial(context_attention, q, mesh=mesh, layout=layout, return_lse=True)
        near = attend(k, v, mask=SlidingWindow(127))
        far = attend(k_windows, v_windows, mask=EndedWindows(4), kv_layout=window_layout(layout, 4))
        out, _ = join_attentions(near, far)
    """
    if not parts:
        raise ValueError("join_attentions: pass (out, lse) of at least one attention")
    lses = [lse for _, lse in parts]
    shapes = [(tuple(out.shape[:3]), out.shape[3:], tuple(lse.shape)) for out, lse in parts]
    if any(shape != (shapes[0][2], shapes[0][1], shapes[0][2]) for shape in shapes):
        raise ValueError(
            f"join_attentions: outputs and logsumexps of shapes {[(tuple(x.shape), tuple(y.shape)) for x, y in parts]} "
            "are not of the same queries: each out is [B, H, L, E] and each lse [B, H, L]"
        )
    if sink_H is not None:
        if tuple(sink_H.shape) != (lses[0].shape[1],):
            raise ValueError(
                f"join_attentions: sink_H must be one logit for each of {lses[0].shape[1]} query heads, got "
                f"{tuple(sink_H.shape)}"
            )
        lses.append(sink_H[:, None].to(lses[0].dtype).expand_as(lses[0]))
    lses_PBHL = torch.stack(lses)
    # Without keys all weights are 0, and so are the gradients: nothing divides by 0 or subtracts infinities.
    level_BHL = lses_PBHL.detach().amax(0).clamp(min=EMPTY_LSE)
    weights_PBHL = (lses_PBHL - level_BHL).exp()
    total_BHL = weights_PBHL.sum(0)
    is_empty = total_BHL == 0
    share_PBHL = weights_PBHL / total_BHL.masked_fill(is_empty, 1.0)
    lse_BHL = level_BHL + total_BHL.masked_fill(is_empty, 1.0).log()
    return _weighted_sum([out for out, _ in parts], share_PBHL), lse_BHL.masked_fill(is_empty, float("-inf"))


def _weighted_sum(outs: Sequence[torch.Tensor], share_PBHL: torch.Tensor) -> torch.Tensor:
    total = outs[0].to(share_PBHL.dtype) * share_PBHL[0].unsqueeze(-1)
    for out, share_BHL in zip(outs[1:], share_PBHL[1:], strict=False):
        total = total + out.to(share_PBHL.dtype) * share_BHL.unsqueeze(-1)
    return total.to(outs[0].dtype)
