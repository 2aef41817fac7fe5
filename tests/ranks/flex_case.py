"""FlexAttention problems over a whole sequence, by a dense oracle that shares nothing with the package or with torch's
own: mask_mod and score_mod are asked about every pair at once, in plain float64 operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_styles.layouts import SequenceLayout
from tests.oracle import error, randn

# 28 documents, as torch's own test has them, and of all lengths: of one row in a row, and rows of a rank that are the
# end of one and the start of the next.
DOCUMENTS = (1, 2, 3, 9, 1, 1, 14, 2, 2, 5, 8, 1, 3, 4, 2, 6, 1, 1, 1, 2, 7, 3, 1, 2, 2, 1, 4, 6)

Found = Sequence[torch.Tensor]
"""``[out, lse, dq, dk, dv, *gradients of what is learned]``."""


def pairs(batch: int, heads: int, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    """b, h, q and kv of every pair, broadcastable to [B, H, L, M]."""
    sizes = (batch, heads, queries, keys)
    return tuple(torch.arange(size).view([-1 if at == dim else 1 for at in range(4)]) for dim, size in enumerate(sizes))


@dataclass
class FlexProblem:
    """One attention. ``score_mod`` is given the learned tensors first: ``(learned, score, b, h, q, kv)``."""

    mask_mod: Callable[..., torch.Tensor] | None = None
    score_mod: Callable[..., torch.Tensor] | None = None
    learned: tuple[torch.Tensor, ...] = ()
    length: int = 60
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    scale: float | None = None
    block: int | tuple[int, int] = 16
    mask_batch: int | None = None
    mask_heads: int | None = None
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        shape = (self.batch, self.heads, self.length, self.dim)
        kv_shape = (self.batch, self.kv_heads, self.length, self.dim)
        self.inputs = [randn(seed, *sizes, dtype=self.dtype) for seed, sizes in enumerate((shape, kv_shape, kv_shape))]
        self.cotangents = [randn(10, *shape, dtype=self.dtype), randn(11, *shape[:3], dtype=torch.float64)]
        self.block_mask: BlockMask | None = None
        if self.mask_mod is not None:
            sizes = (self.mask_batch, self.mask_heads, self.length, self.length)
            self.block_mask = create_block_mask(self.mask_mod, *sizes, device="cpu", BLOCK_SIZE=self.block)
        self.expected = self._expected()

    def _expected(self) -> list[torch.Tensor]:
        q, k, v, *learned = (x.detach().double().requires_grad_() for x in (*self.inputs, *self.learned))
        share = self.heads // self.kv_heads
        logits = q @ k.repeat_interleave(share, 1).mT * (self.dim**-0.5 if self.scale is None else self.scale)
        where = pairs(*logits.shape)
        if self.score_mod is not None:
            logits = self.score_mod(learned, logits, *where)
        if self.mask_mod is not None:
            logits = logits.masked_fill(~self.mask_mod(*where), float("-inf"))
        dead = (logits == float("-inf")).all(-1, keepdim=True)
        lse = torch.logsumexp(logits.masked_fill(dead, 0.0), -1).masked_fill(dead.squeeze(-1), float("-inf"))
        weights = torch.softmax(logits.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
        out = weights @ v.repeat_interleave(share, 1)
        loss = (out * self.cotangents[0]).sum() + (lse.masked_fill(dead.squeeze(-1), 0.0) * self.cotangents[1]).sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, [q, k, v, *learned])]

    def run(self, attend: Callable[..., tuple], layout: SequenceLayout, rank: int) -> list[torch.Tensor]:
        """What this rank finds; ``attend(q, k, v, **options of flex_attention)`` returns ``(out, lse)``."""
        q, k, v = leaves = [layout.shard(x, 2, rank).clone().requires_grad_() for x in self.inputs]
        learned = [x.clone().requires_grad_() for x in self.learned]
        options = {"block_mask": self.block_mask, "scale": self.scale, "enable_gqa": self.heads != self.kv_heads}
        if self.score_mod is not None:
            score_mod = self.score_mod
            options["score_mod"] = lambda score, b, h, q_idx, kv_idx: score_mod(learned, score, b, h, q_idx, kv_idx)
        out, lse = attend(q, k, v, **options)
        cotangent, lse_cotangent = (layout.shard(x, 2, rank) for x in self.cotangents)
        seen = lse.detach() > float("-inf")
        ((out * cotangent).sum() + (lse.where(seen, 0.0) * lse_cotangent.to(lse.dtype)).sum()).backward()
        return [out.detach(), lse.detach(), *(x.grad for x in leaves), *(x.grad for x in learned)]  # pyright: ignore

    def errors(self, found: Sequence[Found], layout: SequenceLayout) -> list[float]:
        """Norm-relative, of every rank's results put together; gradients of what is learned are summed."""
        whole = [layout.unshard([own[index] for own in found], 2) for index in range(5)]
        whole += [sum(own[index] for own in found) for index in range(5, 5 + len(self.learned))]
        errors = []
        for mine, wanted in zip(whole, self.expected, strict=True):
            dead = wanted == float("-inf")
            assert torch.equal(mine == float("-inf"), dead)
            errors.append(error(mine.masked_fill(dead, 0.0), wanted.masked_fill(dead, 0.0)))
        return errors


# -- masks --


def causal(b, h, q, kv):
    return q >= kv


def of_documents(lengths: Sequence[int]) -> Callable[..., torch.Tensor]:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return lambda b, h, q, kv: ids[q] == ids[kv]


def both(*mods: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def mask_mod(b, h, q, kv):
        allowed = mods[0](b, h, q, kv)
        for mod in mods[1:]:
            allowed = allowed & mod(b, h, q, kv)
        return allowed

    return mask_mod


def window(size: int) -> Callable[..., torch.Tensor]:
    return lambda b, h, q, kv: (q - kv < size) & (q >= kv)


def sinks_and_window(b, h, q, kv):
    """No band: the first positions, and the last few before the query."""
    return (q >= kv) & ((kv < 3) | (q - kv < 7))


# -- packs --


def pack_of(lengths: Sequence[int], window: tuple[int, int], **shape: int) -> FlexProblem:
    """One row of documents, in which a query sees so many keys on its left and on its right; -1 for all."""
    (left, right), same = window, of_documents(lengths)

    def mask_mod(b, h, q, kv):
        allowed = same(b, h, q, kv)
        allowed = allowed & (q - kv <= left) if left >= 0 else allowed
        return allowed & (kv - q <= right) if right >= 0 else allowed

    return FlexProblem(mask_mod, length=sum(lengths), batch=1, **shape)


def as_pack(attend: Callable[..., tuple]) -> Callable[..., tuple]:
    """``attend`` of [T, H, D] for a caller with [1, H, T, D]; the options of flex_attention are not passed on."""

    def run(q, k, v, **_):
        out, lse = attend(*(x.squeeze(0).transpose(0, 1) for x in (q, k, v)))
        return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)

    return run


# -- score_mods --


def alibi(learned, score, b, h, q, kv):
    return score - (q - kv).abs() * 2.0 ** -(h + 1.0)


def relative_bias(learned, score, b, h, q, kv):
    (table,) = learned
    return score + table[h, q - kv + table.shape[1] // 2]


def softcap(learned, score, b, h, q, kv):
    return 2.0 * torch.tanh(score / 2.0)


def learned_softcap(learned, score, b, h, q, kv):
    cap, slopes = learned
    return cap * torch.tanh(score / cap) + slopes[h] * (q - kv) + 0.1 * b


def biased_softcap(learned, score, b, h, q, kv):
    table, slopes = learned
    return 2.0 * torch.tanh(score / 2.0) + table[h, q - kv + table.shape[1] // 2] + slopes[h] * (q - kv)


def own_mask(learned, score, b, h, q, kv):
    """A score_mod that masks, and leaves some queries nothing."""
    return torch.where((q >= kv) & (q % 5 != 2), score, float("-inf"))
