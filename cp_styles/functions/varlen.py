"""varlen_attn under context parallelism: packed documents, with the cu_seqlens of the whole pack, on any device.

Shapes: T local tokens of the pack, H query heads, G key/value heads, D head dim, E value head dim, N documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.compat import never_compiled, without_dispatch_modes
from cp_styles._lib.contents import Contents
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.engine.binding import Binding, binding_of_call, refuse_unknown
from cp_styles.engine.custom_ops import attend, check_local, check_plain
from cp_styles.kernels import Kernel
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.masks import Documents, Full, Mask, SlidingWindow
from cp_styles.strategies import Ring, Strategy

# The operator that torch.nn.attention.varlen.varlen_attn, a Python function, calls; and all operators of its kind.
VARLEN_OPERATOR = "_varlen_attn"
VARLEN_OPERATORS = frozenset((VARLEN_OPERATOR, "_varlen_attn_out"))


def context_varlen_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGE: torch.Tensor,
    mesh: MeshOrGroup,
    cu_seqlens: torch.Tensor | Sequence[int],
    *,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    return_lse: bool = False,
    mask: Mask | None = None,
    layout: SequenceLayout | Balancer | None = None,
    strategy: Strategy | None = None,
    kernel: Kernel | None = None,
    checks: Checks = CHECKS,
) -> Any:
    """Attention within packed documents. This rank holds a part of the pack; the result equals the result on one
    device.

    Shapes: T local tokens of the pack, H query heads, G key/value heads, D head dim, E value head dim, N documents.
    Query, key and value share one floating-point dtype and one device, CPU or CUDA.

    Args:
        q_THD: local query, cut by ``layout`` along the pack.
        k_TGD: local key, cut in the same way. H is a multiple of G (GQA); only the G heads are sent.
        v_TGE: local value.
        mesh: the ranks that share the pack: a 1-D mesh, (mesh, axis name), or a process group.
        cu_seqlens: cumulative lengths of the documents of the *whole* pack: ``[0, n0, n0 + n1, ...]``, N + 1 integers,
            the same on all ranks. :func:`~cp_styles.per_document_head_tail` balances causal work for them. A tensor
            may be filled again for each call. On a GPU a change that its version does not show is an error at a later
            call: see :mod:`cp_styles._lib.contents`.
        window_size: number of positions before and after its own that a query attends to; -1 is no bound. (-1, 0) is
            causal.
        scale: factor of the logits; default 1/sqrt(D).
        return_lse: also return the logsumexp.
        mask: a mask of this package, in addition to the documents.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, whose mask then applies too; without a scope ``head_tail``.
        strategy: how keys and values get to the queries; default ``Ring()``.
        kernel: computes the tiles; default the fastest of torch's kernels that can.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        ``out_THE``, or with ``return_lse`` ``(out_THE, lse_HT)``, which is differentiable.

    Communication: one agreement of the ranks (:class:`~cp_styles.Checks`), then the strategy's, for documents
    that several ranks share.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, if the input of one is bad or the ranks differ.

    Example::

        layout = per_document_head_tail(1000, mesh.size(), documents=[300, 10, 690])
        q, k, v = (layout.shard(whole[0].transpose(0, 1), 0, mesh.get_local_rank()) for whole in qkv)  # [1000, 8, 64]
        out = context_varlen_attention(q, k, v, mesh, [0, 300, 310, 1000], window_size=(-1, 0), layout=layout)
    """
    name = "context_varlen_attention"
    binding = binding_of_call(name, mesh, strategy or Ring(), layout, mask or Full(), kernel, checks=checks)

    def make_mask() -> Mask:
        return _make_mask(name, cu_seqlens, window_size)

    out, lse = _attend_packed(binding, (q_THD, k_TGD, v_TGE), make_mask, scale, return_lse)
    return (out, lse) if return_lse else out


def varlen_operator(
    binding: Binding,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = True,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    backend: int | None = None,
    *others: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch's operator, with its arguments. Returns ``(out_THE, lse_HT, rng state)``.

    ``max_q`` and ``max_k``, by which a kernel chooses its grid, and ``backend`` are not used.
    """
    name = binding.name

    def make_mask() -> Mask:
        if seqused_k is not None or block_table is not None:
            raise NotImplementedError(
                f"{name}: varlen_attn with a cache of keys (seqused_k, block_table) is not supported under context "
                "parallelism: a cache is for inference; call it outside"
            )
        refuse_unknown(name, "varlen_attn", {str(at): value for at, value in enumerate(others, 14)} | named)
        if num_splits is not None:
            raise NotImplementedError(
                f"{name}: num_splits={num_splits} makes sums bitwise equal in any batch, but under context parallelism "
                "sums depend on the layout; leave it out"
            )
        if cu_seq_k is None or (cu_seq_k is not cu_seq_q and not torch.equal(cu_seq_k, cu_seq_q)):
            raise NotImplementedError(
                f"{name}: varlen_attn with other documents for keys than for queries (cu_seq_k is not cu_seq_q) is not "
                "supported under context parallelism; for cross-attention call scaled_dot_product_attention for each "
                "document"
            )
        window = (-1, -1) if window_size is None else (int(window_size[0]), int(window_size[1]))
        return _make_mask(name, cu_seq_q, (window[0], 0) if is_causal else window)

    out, lse = _attend_packed(binding, (query, key, value), make_mask, scale, True)
    assert lse is not None
    return out, lse, torch.zeros(2, dtype=torch.uint64, device=out.device)  # the rng state, which only dropout reads


def _make_mask(name: str, cu_seqlens: torch.Tensor | Sequence[int], window_size: tuple[int, int]) -> Mask:
    documents = _read_documents(cu_seqlens)
    if len(window_size) != 2 or min(window_size) < -1:
        raise ValueError(f"{name}: window_size must be (before, after), with -1 for no bound, got {window_size}")
    left, right = (None if size == -1 else size for size in window_size)
    return documents if left is right is None else documents & SlidingWindow(left, right)


def _read_documents(cu_seqlens: torch.Tensor | Sequence[int]) -> Documents:
    """The documents of ``cu_seqlens``. Every layer gets the same tensor, and reading it from a GPU makes the host wait.
    So a tensor is read again only if it holds other numbers, see :class:`~cp_styles._lib.contents.Contents`."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.is_inference():
        return Documents.from_cu_seqlens(cu_seqlens)
    facts = facts_about(cu_seqlens)
    contents, documents = facts.get(Documents, (None, None))
    if contents is None or not contents.are_in(cu_seqlens, f"cu_seqlens of shape {tuple(cu_seqlens.shape)}"):
        contents, documents = facts[Documents] = Contents(cu_seqlens), Documents.from_cu_seqlens(cu_seqlens)
    return documents


@never_compiled
def _attend_packed(
    binding: Binding,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    make_mask: Callable[[], Mask],
    scale: float | None,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v = tensors
    batched = _add_batch_dim(q), _add_batch_dim(k), _add_batch_dim(v)
    with binding.telling(), without_dispatch_modes():
        for label, tensor in zip(("query", "key", "value"), tensors, strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.ndim != 3:
                check_plain(binding.name, tensors)
                raise ValueError(
                    f"{binding.name}: {label} must have 3 dims (tokens, heads, head dim), got {tuple(tensor.shape)}"
                )
        check_local(binding.name, batched)
        binding = binding.with_mask(make_mask())
    out, lse, _ = attend(binding, batched, scale=scale, wants_lse=wants_lse, casts=False)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0) if wants_lse else None


def _add_batch_dim(pack_THD: Any) -> Any:
    """[1, H, T, D]. Other objects than a pack are returned as they are, and refused later."""
    if not isinstance(pack_THD, torch.Tensor) or pack_THD.ndim != 3:
        return pack_THD
    return pack_THD.transpose(0, 1).unsqueeze(0)
