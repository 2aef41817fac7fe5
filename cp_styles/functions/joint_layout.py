"""Joint attention: some tokens, such as a text, are replicated on every rank, and the rest, such as an image, is cut.

Shapes: B batch, H heads, L local tokens, D head dim, T replicated tokens, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.troubleshooting import see
from cp_styles.collectives import gather
from cp_styles.comm.checks import Checks
from cp_styles.comm.point_to_point import Operation, collective
from cp_styles.layouts import Balancer, SequenceLayout, contiguous, head_tail

__all__ = ["JointLayout"]

Tensors: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class JointLayout:
    """The first ``prefix`` and the last ``suffix`` tokens of each rank are replicated: the same on all ranks. The rest
    is cut.

    For attention over a text and an image together (Flux: ``prefix``, Stable Diffusion 3: ``suffix``), where every rank
    computes the whole text stream, and its part of the image. Give this layout to ``context_attention`` or
    ``ModuleContextParallel`` as ``layout=``. In the attention the text counts once: each rank takes a share of the rows
    of the text. The shares of the result are gathered, so that every rank has the whole text again.

    The gradients of the text's inputs, and of parameters in the text stream, are each rank's share: sum them over the
    ranks, like all gradients. A loss of the text itself must be counted on one rank only.

    Positions of masks count prefix, cut tokens and suffix, in this order.

    Attributes:
        prefix: number of replicated tokens at the beginning.
        suffix: number of replicated tokens at the end.
        rest: the layout of the remaining tokens, or its balancer. Inputs are cut with it. Give a layout where the
            parts of the ranks may be equal, as of a pattern: a balancer takes these for tokens that nobody has cut.

    Communication, in addition to the attention: an all-gather of the result of the text, T H D numbers. Each rank sends
    its share P - 1 times. And one all-gather of 21 numbers, by which the ranks check that the text is the same, and the
    rest is not.
    Backward: a reduce-scatter of the text.

    Raises:
        ValueError: no token is replicated, or a number is negative; at a call, on every rank, if the text is not the
            same on all ranks, or the rest is.
        TypeError: ``rest`` is neither a layout nor a balancer.

    Example::

        style = ModuleContextParallel(layout=JointLayout(prefix=77))  # 77 tokens of text, then this rank's part
    """

    prefix: int = 0
    suffix: int = 0
    rest: SequenceLayout | Balancer = head_tail

    def __post_init__(self) -> None:
        if min(self.prefix, self.suffix) < 0 or self.prefix + self.suffix == 0:
            raise ValueError(f"JointLayout takes the number of tokens that are whole on every rank, got {self!r}")
        if not isinstance(self.rest, SequenceLayout) and not callable(self.rest):
            raise TypeError(f"JointLayout: rest must be a SequenceLayout or a balancer, got {self.rest!r}")

    @cached_property
    def balancer(self) -> Balancer:
        """The balancer of all tokens, each counted once: the layout of the tokens that :meth:`cut` returns."""
        # Cached, because bindings and graphs are found by the balancer, and two partials are never equal.
        return partial(make_joint_layout, prefix=self.prefix, suffix=self.suffix, rest=self.rest)

    def check(self, name: str, tensors: Tensors) -> None:
        """Raise ValueError for ``tensors``, query, key and value [B, H, L, D], that are too short or differ in length.

        ``name`` is for the message.
        """
        lengths = [x.shape[2] for x in tensors]
        if len(set(lengths)) > 1 or lengths[0] < self.prefix + self.suffix:
            raise ValueError(
                f"{name}: query, key and value of {lengths} tokens under {self!r}, which is for one sequence that "
                f"attends to itself, with {self.prefix + self.suffix} tokens that are whole on every rank"
            )

    def cut(self, x_BHLD: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """The tokens of ``x_BHLD`` that ``rank`` of ``ranks`` takes: its share of replicated tokens, and the rest."""
        (first, stop), (after, end) = (_token_range(size, rank, ranks) for size in (self.prefix, self.suffix))
        last = x_BHLD.shape[2] - self.suffix
        ranges = ((first, stop), (self.prefix, last), (last + after, last + end))
        return torch.cat([x_BHLD[:, :, start:end] for start, end in ranges], 2)

    def whole(self, out_BHLE: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The inverse of :meth:`cut` for the result ``out_BHLE``. Communication over ``group``: an all-gather of the
        shares of the text."""
        rank, ranks = group.rank(), group.size()
        (first, stop), (after, end) = (_token_range(size, rank, ranks) for size in (self.prefix, self.suffix))
        begin, last = stop - first, out_BHLE.shape[2] - (end - after)
        share = torch.cat((out_BHLE[:, :, :begin], out_BHLE[:, :, last:]), 2)
        layout = SequenceLayout.from_chunks(
            (_token_range(self.prefix, peer, ranks), _token_range(self.suffix, peer, ranks, self.prefix))
            for peer in range(ranks)
        )
        # The attention before has compared the calls of the ranks.
        text = gather(share, 2, group, reduce_gradients=True, layout=layout, checks=Checks(agreement=False))
        return torch.cat((text[:, :, : self.prefix], out_BHLE[:, :, begin:last], text[:, :, self.prefix :]), 2)


def refuse_graphs(name: str, *, traced: bool) -> None:
    """Raise NotImplementedError if torch.compile traces the call."""
    if traced:
        raise NotImplementedError(f"{name}: a JointLayout is not supported under torch.compile")


def attend_jointly(
    joint: JointLayout,
    name: str,
    group: dist.ProcessGroup,
    tensors: Tensors,
    attend: Callable[..., tuple[torch.Tensor, ...]],
    *,
    look: bool = True,
) -> torch.Tensor:
    """Call ``attend`` with each rank's share of ``tensors``, query, key and value [B, H, S, D].

    ``look``: compare the tokens of the ranks. On a GPU the host waits for them.
    """
    rank, ranks = group.rank(), group.size()
    joint.check(name, tensors)
    q, k, v = (joint.cut(x, rank, ranks) for x in tensors)
    out, *_ = attend((q, k, v))
    if look and ranks > 1:  # after the attention, whose agreement has found that no rank has a problem
        _compare_tokens(joint, name, tensors[1].detach(), group)
    with Operation(group):
        return joint.whole(out, group)


def make_joint_layout(
    length: int, ranks: int, *, prefix: int, suffix: int, rest: SequenceLayout | Balancer
) -> SequenceLayout:
    """A layout that shares replicated tokens among the ranks, and cuts the tokens between them as ``rest`` does."""
    size = length - prefix - suffix
    cut = rest if isinstance(rest, SequenceLayout) else rest(size, ranks)
    if cut.length != size or cut.ranks != ranks:
        raise ValueError(
            f"JointLayout: the layout cuts {cut.length} tokens for {cut.ranks} ranks, but {ranks} ranks hold {size} "
            f"in addition to the {prefix + suffix} that are whole on every rank"
        )
    layout = SequenceLayout.from_chunks(
        [
            _token_range(prefix, rank, ranks),
            *((prefix + start, prefix + stop) for start, stop in cut.chunks[rank]),
            _token_range(suffix, rank, ranks, prefix + size),
        ]
        for rank in range(ranks)
    )
    facts_about(layout)[JointLayout] = cut  # verify reads it, to compare the rows that are cut
    return layout


def _token_range(size: int, rank: int, ranks: int, begin: int = 0) -> tuple[int, int]:
    """The positions of a rank's share of ``size`` tokens, which begin at the position ``begin``."""
    chunks = contiguous(size, ranks).chunks[rank]
    start, stop = chunks[0] if chunks else (0, 0)
    return begin + start, begin + stop


_NUMBERS = 21  # of keys: 4 of each of two rows of the text and of three rows of the rest, and the length of the rest


def _compare_tokens(joint: JointLayout, name: str, k_BHLD: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Raise, on every rank, if the replicated tokens differ between ranks, or the remaining ones do not."""
    length, rest = k_BHLD.shape[2], k_BHLD.shape[2] - joint.prefix - joint.suffix
    at = [0, joint.prefix - 1] if joint.prefix else [-joint.suffix, -1]
    at += [joint.prefix + place for place in (0, rest // 2, rest - 1)] if rest else []
    with collective(group, name):
        row_N = torch.zeros(_NUMBERS, dtype=torch.float64, device=k_BHLD.device)
        sample = k_BHLD[:1, 0, (torch.tensor(at, device="cpu") % length).to(k_BHLD.device), :4].flatten()
        row_N[: sample.numel()] = sample  # fewer numbers if the batch is empty or D is below 4
        row_N[-1] = rest
        parts_PN = row_N.new_empty(group.size(), _NUMBERS)
        dist.all_gather(list(parts_PN.unbind()), row_N, group=group)
    width = min(k_BHLD.shape[3], 4)
    text_PN, rest_PN = parts_PN[:, : 2 * width], parts_PN[:, 2 * width :]
    rows_3D = rest_PN[0, : 3 * width].view(3, width)
    # Ranks may round differently, so 5 % are allowed. Keys of different tokens differ by more.
    differs = (text_PN - text_PN[:1]).abs().amax() > 0.05 * text_PN.abs().amax()
    # Equal tokens, as in a warm-up, are right on all ranks. Lengths that differ do so by 1 at least.
    size = rest_PN[:, :-1].abs().amax().clamp(max=50)
    uncut = (rest_PN - rest_PN[:1]).abs().amax() <= 0.01 * size
    uncut &= (rows_3D - rows_3D[:1]).abs().amax() > 0.05 * size
    differs, uncut = torch.stack((differs, uncut)).tolist()
    # A layout of a known length has been held against the ranks' lengths, so each rank has its own part.
    if uncut and not differs and not isinstance(joint.rest, SequenceLayout):
        raise ValueError(
            f"{name}: the {rest} tokens besides the text are the same on all ranks, but each must have its own part. "
            "Cut them in training, in sampling and for an EMA model, layout.shard(tokens, 1, rank), or run the whole "
            "sequence on one device, with a copy of the model that has no style. If parts are equal, as of a pattern, "
            f"give JointLayout the layout of their length, rest=layout{see('A batch that nobody has cut')}"
        )
    if differs:
        raise ValueError(
            f"{name}: the first {joint.prefix} and the last {joint.suffix} tokens differ between the ranks, but with "
            f"{joint!r} they must be the same. Give every rank the whole text, and apply the style only to modules "
            "whose attention has it"
            f"{see('A text that is not the same on all ranks')}"
        )
