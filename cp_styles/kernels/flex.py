"""FlexAttention's score_mod, forward and backward, in plain torch ops for any device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.checksum import digest, fingerprint, version_of
from cp_styles._lib.compat import with_derivatives, without_function_modes
from cp_styles._lib.introspect import ReplacementMode, describe_code
from cp_styles.kernels.autocast import without_autocast
from cp_styles.kernels.base import Kernel, TilePositions
from cp_styles.kernels.merge import EMPTY_LSE, accumulation_dtype
from cp_styles.kernels.reference import matmul

ScoreMod = Callable[..., torch.Tensor]

# Number of logits that are computed at a time, with a few temporaries of this size.
_LOGITS = 2**23


@dataclass(frozen=True)
class FlexKernel(Kernel):
    """softmax(score_mod(q k^T scale, batch, head, query, key)) v, with positions of the whole sequence.

    Logits are materialized for some queries at a time, in the accumulation dtype. score_mod gets logits in this dtype.
    As in torch, it is called on scalars under vmap, and autograd computes its derivatives.

    Attributes:
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``.
        learned: the tensors that score_mod reads and that require grad.
        read: the tensors that score_mod reads, with their versions. Ranks compare them, and the backward checks them.
        shares: sums of the gradients of ``learned`` over the tiles of a backward.
    """

    score_mod: ScoreMod
    learned: tuple[torch.Tensor, ...] = field(default=(), repr=False, compare=False)
    read: tuple[tuple[torch.Tensor, int], ...] = field(default=(), repr=False, compare=False)
    shares: tuple[torch.Tensor, ...] = field(default=(), repr=False, compare=False)
    positional: ClassVar[bool] = True

    @property
    def content(self):
        digests = (digest(tensor) for tensor, _ in self.read if _for_queries(tensor) is None)
        return fingerprint([describe_code(self.score_mod), *digests])

    @property
    def only_for(self):
        return tuple(dict.fromkeys(filter(None, (_for_queries(tensor) for tensor, _ in self.read))))

    def with_learned(self, learned, *, backward):
        if not backward:
            return self, ()
        for tensor, version in self.read:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that the score_mod of flex_attention reads was changed "
                    "in place between forward and backward: change a copy of it, or run the backward first"
                )
        shares = tuple(map(torch.zeros_like, self.learned))
        return replace(self, shares=shares), shares

    def forward(self, q_BHLD, k_BGMD, v_BGME, *, causal, bias, scale, where: TilePositions):
        tile = _Tile(self, q_BHLD, k_BGMD, v_BGME, causal, bias, scale, where)
        with context_of_user_code(q_BHLD.device):
            outs, lses = zip(*map(tile.forward, tile.chunks()), strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def backward(
        self, grad_BHLE, q_BHLD, k_BGMD, v_BGME, out_BHLE, lse_BHL, *, causal, bias, scale, where: TilePositions
    ):
        tile = _Tile(self, q_BHLD, k_BGMD, v_BGME, causal, bias, scale, where)
        grad, out, lse = [x.to(tile.dtype) for x in (grad_BHLE, out_BHLE, lse_BHL)]
        dq, dk, dv = [], torch.zeros_like(tile.k), torch.zeros_like(tile.v)
        with context_of_user_code(q_BHLD.device):
            for rows in tile.chunks():
                dlogits, p, dvalues = tile.backward(rows, grad[:, :, rows], out[:, :, rows], lse[:, :, rows])
                for share, dvalue in zip(self.shares, dvalues, strict=True):
                    share += dvalue
                dq.append(matmul(dlogits, tile.k))
                dk += matmul(dlogits.mT, tile.q[:, :, rows])
                dv += matmul(p.mT, grad[:, :, rows])
        groups = k_BGMD.shape[1]
        return torch.cat(dq, 2), *(x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))

    def max_scores(
        self,
        q_BHLD: torch.Tensor,
        k_BGMD: torch.Tensor,
        *,
        causal: bool,
        bias: torch.Tensor | None,
        scale: float,
        where: TilePositions,
    ) -> torch.Tensor:
        """The largest score of each query in a tile [B, H, L], in the accumulation dtype; -inf without keys."""
        tile = _Tile(self, q_BHLD, k_BGMD, k_BGMD[..., :0], causal, bias, scale, where)
        with context_of_user_code(q_BHLD.device), torch.no_grad():
            return torch.cat([tile.max_scores(rows) for rows in tile.chunks()], 2)

    def check(self, q_BHLD, k_BGMD, v_BGME, *, biased):
        pass

    def tile_dtype(self, dtype):
        return accumulation_dtype(dtype)


def note_rows_of_queries(tensor: torch.Tensor, only_for: Hashable) -> None:
    """Note that ``tensor`` is of the queries of one rank: see ``Kernel.only_for``. Ranks do not compare it."""
    facts_about(tensor)[note_rows_of_queries] = only_for


def _for_queries(tensor: torch.Tensor) -> Any:
    return facts_about(tensor).get(note_rows_of_queries)


@contextlib.contextmanager
def context_of_user_code(device: torch.device) -> Iterator[None]:
    """A context for a user's code inside of an op: with derivatives, without the autocast and modes around the op."""
    with without_autocast(device), without_function_modes(), with_derivatives():
        yield


class _Tile:
    def __init__(
        self, kernel: FlexKernel, q, k, v, causal: bool, bias: torch.Tensor | None, scale: float, where: TilePositions
    ):
        self.dtype = accumulation_dtype(q.dtype)
        share = q.shape[1] // k.shape[1]
        self.q = q.to(self.dtype)
        self.k, self.v = (x.to(self.dtype).repeat_interleave(share, 1) for x in (k, v))
        self._kernel, self._causal, self._scale, self._where = kernel, causal, scale, where
        # [B, H, L, M], or dims of size 1 that broadcast.
        self._bias = None if bias is None else bias[(None,) * (4 - bias.ndim)].to(self.dtype)
        mod = kernel.score_mod
        for axis in (4, 3, 2, 1):
            mod = torch.vmap(mod, in_dims=(0, *(0 if argument == axis else None for argument in (1, 2, 3, 4))))
        self._mod = mod

    def chunks(self) -> Iterator[slice]:
        batch, heads, queries, _ = self.q.shape
        step = max(1, _LOGITS // max(batch * heads * self.k.shape[2], 1))
        for start in range(0, queries, step):
            yield slice(start, min(start + step, queries))

    def logits(self, rows: slice) -> torch.Tensor:
        return (matmul(self.q[:, :, rows], self.k.mT) * self._scale).detach()

    def forward(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """``(out, lse)`` of some queries."""
        scores, masked = self.scores(rows, self.logits(rows))
        lse = torch.logsumexp(scores.masked_fill(masked, float("-inf")), -1)
        lse = lse.masked_fill(lse == float("-inf"), EMPTY_LSE)
        return matmul(torch.exp(scores - lse.unsqueeze(-1)).masked_fill(masked, 0.0), self.v), lse

    def max_scores(self, rows: slice) -> torch.Tensor:
        """The largest score of some queries; -inf without keys."""
        scores, masked = self.scores(rows, self.logits(rows))
        return scores.masked_fill(masked, float("-inf")).amax(-1)

    def backward(
        self, rows: slice, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Gradients of q k^T, probabilities, and gradients of the tensors that score_mod learns, for some queries."""
        kernel = self._kernel
        with torch.enable_grad():
            logits = self.logits(rows).requires_grad_()
            # Copies replace the learned tensors, whose autograd hooks must not run for the gradients of a tile.
            values = [tensor.detach().requires_grad_() for tensor in kernel.learned]
            copies = {id(tensor): value for tensor, value in zip(kernel.learned, values, strict=True)}
            with ReplacementMode(copies) if copies else contextlib.nullcontext():
                scores, masked = self.scores(rows, logits)
        p = torch.exp(scores.detach() - lse.unsqueeze(-1)).masked_fill(masked, 0.0)
        ds = p * (matmul(grad, self.v.mT) - (grad * out).sum(-1, keepdim=True))
        dlogits, *dvalues = _pull_back(scores, [logits, *values], ds)
        return dlogits.masked_fill(masked, 0.0) * self._scale, p, dvalues

    def scores(self, rows: slice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The modified logits, and whether each is masked (bool, broadcastable)."""
        device, (batch, heads, queries, keys) = logits.device, logits.shape
        b = torch.arange(batch, device=device)
        h = torch.arange(self._where.head, self._where.head + heads, device=device)
        scores = self._mod(logits, b, h, self._where.q_L[rows], self._where.kv_M).to(self.dtype)
        masked = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
        if self._causal:
            masked = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + rows.start)[None, None]
        if self._bias is not None:
            bias = self._bias if self._bias.shape[2] == 1 else self._bias[:, :, rows]
            masked = masked | (bias == float("-inf"))
            scores = scores + bias.masked_fill(bias == float("-inf"), 0.0)
        return scores, masked


def _pull_back(result: torch.Tensor, inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Vector-Jacobian products, with zeros for inputs that do not affect the result."""
    if not result.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    return list(torch.autograd.grad(result, inputs, grad, allow_unused=True, materialize_grads=True))
