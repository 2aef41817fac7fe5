"""Labels, positions and shards of a whole batch, before it is cut. No communication."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cp_styles._lib.dtypes import holds
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import Tree

IGNORE_INDEX = -100
"""The label of a token without a target: the default ``ignore_index`` of ``torch.nn.functional.cross_entropy``."""


def next_token_labels(
    tokens: torch.Tensor,
    *,
    document_ids: torch.Tensor | None = None,
    shift: int = 1,
    seq_dim: int = -1,
    ignore_index: int = IGNORE_INDEX,
) -> torch.Tensor:
    """Labels for the *whole* sequence: for each token, the token ``shift`` positions later. Shard them with the tokens.

    Labels that are shifted after sharding are wrong at every shard boundary: the next token is on another rank.

    Args:
        tokens: integers of any dtype, with the whole sequence along ``seq_dim``.
        document_ids: integers that broadcast to ``tokens``; a run of equal ids along ``seq_dim`` is a document. None:
            the sequence is one document. Ids from lengths of documents:
            ``torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))``.
        shift: 1 for next-token prediction, 2 and more for multi-token prediction.
        seq_dim: the dim of ``tokens`` that is the sequence.
        ignore_index: the label where the document or the sequence ends before the target.

    Returns:
        Labels in the shape and dtype of ``tokens``; in int64 if the dtype cannot hold ``ignore_index``, such as uint8.
        No communication.

    Raises:
        TypeError: tokens are not integers.
        ValueError: ``shift`` is below 1, ``tokens`` have no dim ``seq_dim``, or ``document_ids`` do not broadcast to
            ``tokens``.

    Example::

        labels = next_token_labels(torch.tensor([5, 6, 7, 8]), document_ids=torch.tensor([0, 0, 1, 1]))
        assert labels.tolist() == [6, -100, 8, -100]
    """
    if shift < 1:
        raise ValueError(f"shift is the number of tokens that the label is ahead; it must be at least 1, got {shift}")
    if tokens.dtype.is_floating_point or tokens.dtype.is_complex:
        raise TypeError(f"next_token_labels: tokens must be integers, got {tokens.dtype}")
    if not -tokens.ndim <= seq_dim < tokens.ndim:
        raise ValueError(
            f"next_token_labels: tokens of shape {tuple(tokens.shape)} have no dim {seq_dim}: give seq_dim="
        )
    tokens = tokens if holds(tokens.dtype, ignore_index) else tokens.long()
    labels = torch.full_like(tokens, ignore_index)
    length = tokens.shape[seq_dim] - shift  # number of tokens with a target
    if length <= 0:
        return labels
    ahead = tokens.narrow(seq_dim, shift, length)
    if document_ids is not None:
        starts = _document_starts(_broadcast_ids(document_ids, tokens), seq_dim)
        same = starts.narrow(seq_dim, shift, length) == starts.narrow(seq_dim, 0, length)
        ahead = ahead.where(same, ignore_index)
    labels.narrow(seq_dim, 0, length).copy_(ahead)
    return labels


def document_positions(document_ids: torch.Tensor, *, seq_dim: int = -1) -> torch.Tensor:
    """Positions that restart at 0 in every document, for the *whole* sequence. Shard them with the tokens.

    For positions that count through the whole sequence, use ``layout.positions(rank)`` instead.

    Args:
        document_ids: integers; a run of equal ids along ``seq_dim`` is a document.
        seq_dim: the dim of ``document_ids`` that is the sequence.

    Returns:
        int64, in the shape of ``document_ids``. No communication.

    Example::

        assert document_positions(torch.tensor([0, 0, 1, 1, 1])).tolist() == [0, 1, 0, 1, 2]
    """
    return _index_along(document_ids, seq_dim) - _document_starts(document_ids, seq_dim)


def predicted_tokens(tree: Tree, layout: SequenceLayout, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens of a tree the logits of ``rank`` predict: the last token of a shared prefix predicts several.

    Each token but the first of each root is predicted once, on the rank that holds the token before it in its rollouts.

    Args:
        tree: the tree of the whole sequence.
        layout: the layout of the attention.
        rank: the rank within the cp group.

    Returns:
        Two int64 ``[N]`` on the host: rows of this rank, and the index of the token that each predicts, ascending. No
        communication.

    Raises:
        ValueError: tree and layout are for different lengths.

    Example::

        tree = Tree((3, 2, 2), (-1, 0, 0))
        rows, tokens = predicted_tokens(tree, contiguous(7, 2), 0)  # rank 0 holds the tokens 0 to 3
        assert (rows.tolist(), tokens.tolist()) == ([0, 1, 2, 3, 2], [1, 2, 3, 4, 5])
    """
    if tree.length != layout.length:
        raise ValueError(
            f"predicted_tokens: the tree has {tree.length} tokens, the layout cuts {layout.length}: make both for the "
            "whole sequence, with its padding as a further root"
        )
    held, before = layout.positions(rank, "cpu"), tree.predecessors
    row_S = torch.full((tree.length + 1,), -1, device="cpu")  # the entry behind the last belongs to -1, no token
    row_S[held] = torch.arange(len(held), device="cpu")
    tokens = torch.nonzero(row_S[before] >= 0).flatten()
    return row_S[before[tokens]], tokens


def shard_batch(
    batch: Mapping[str, torch.Tensor],
    layout: SequenceLayout,
    rank: int,
    *,
    seq_dims: Mapping[str, int | None],
    fill: Mapping[str, float] | None = None,
) -> dict[str, torch.Tensor]:
    """The shard of ``rank`` of every entry of a batch.

    Args:
        batch: whole tensors by name.
        layout: the layout of the attention. If it is longer than an entry, the entry is padded.
        rank: the rank within the cp group.
        seq_dims: the sequence dim of each entry of ``batch``. None: the entry stays whole, such as cu_seqlens or a mask
            of the whole sequence. Dims are not guessed: position ids of shape [3, B, S] have the sequence at dim 2, and
            B may equal S. Further names are ignored.
        fill: for entries that may be shorter than the layout, the value to pad them with at the end:
            ``{"tokens": pad_token_id, "labels": -100, "positions": 0}``. Causal attention does not attend to padding
            after its tokens; other attention needs a mask that hides it, and Documents a further document.

    Returns:
        A dict with the same names. Each tensor has ``layout.lengths[rank]`` in place of the whole length. No
        communication. To get whole results again, with the padding at the end, use ``layout.unshard`` with the shards
        of all ranks, or :func:`cp_styles.collectives.gather` with this layout.

    Raises:
        TypeError: an entry with a sequence dim is not a tensor.
        ValueError: an entry is missing in ``seq_dims``, is longer than the layout, or is shorter and has no ``fill``; a
            ``fill`` is given for an entry that stays whole, or does not fit its dtype; the layout has no such ``rank``.

    Example::

        layout, batch = head_tail(10, 2), {"tokens": torch.arange(10)[None]}
        part = shard_batch(batch, layout, 1, seq_dims={"tokens": 1})
        assert part["tokens"].tolist() == [[3, 4, 5, 6, 7]]
    """
    unnamed = [name for name in batch if name not in seq_dims]
    if unnamed:
        raise ValueError(
            f"seq_dims does not say which dim of {unnamed} is the sequence: "
            "give the dim, or None for an entry that every rank needs whole"
        )
    fill, parts = fill or {}, {}
    for name, whole in batch.items():
        dim = seq_dims[name]
        if dim is None:
            if name in fill:
                raise ValueError(f'fill["{name}"] is given, and seq_dims["{name}"] is None: it stays whole as it is')
            parts[name] = whole
            continue
        if not isinstance(whole, torch.Tensor):
            raise TypeError(
                f'"{name}" is a {type(whole).__name__}, and only tensors can be cut: make one of it (torch.tensor), or '
                f'say seq_dims["{name}"]=None if every rank needs it whole'
            )
        fits = -whole.ndim <= dim < whole.ndim
        if fits and whole.shape[dim] < layout.length and name in fill:
            whole = pad_at_end(name, whole, dim, layout.length - whole.shape[dim], fill[name])
        if not fits or whole.shape[dim] != layout.length:
            raise ValueError(
                f'"{name}" of shape {tuple(whole.shape)} is not {layout.length} long at dim {dim}, where the layout '
                f'cuts: correct seq_dims["{name}"], build the layout for this length, or pad a shorter one before '
                f'(shard_batch does, with fill["{name}"])'
            )
        parts[name] = layout.shard(whole, dim, rank)
    return parts


def pad_at_end(name: str, x: torch.Tensor, dim: int, padding: int, fill: float) -> torch.Tensor:
    """``x`` with ``padding`` more positions at the end of ``dim``. A copy."""
    if not holds(x.dtype, fill):
        raise ValueError(
            f'"{name}" of dtype {x.dtype} is padded with {fill}, which it cannot hold: give it another dtype, such as '
            f'batch["{name}"].long(), or another value'
        )
    shape = list(x.shape)
    shape[dim] = padding
    return torch.cat((x, x.new_full(shape, fill)), dim)


def _broadcast_ids(document_ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    try:
        return document_ids.expand_as(tokens)
    except RuntimeError:
        raise ValueError(
            f"document_ids of shape {tuple(document_ids.shape)} do not broadcast to tokens {tuple(tokens.shape)}: "
            "give one id for each token, or one for each position if all rows share them"
        ) from None


def _index_along(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    shape = [1] * tensor.ndim
    shape[dim] = -1
    return torch.arange(tensor.shape[dim], device=tensor.device).view(shape).expand_as(tensor)


def _document_starts(document_ids: torch.Tensor, seq_dim: int) -> torch.Tensor:
    """The position at which the document of each token begins: int64."""
    index = _index_along(document_ids, seq_dim)
    if document_ids.shape[seq_dim] < 2:
        return index
    begins = document_ids.diff(dim=seq_dim) != 0
    starts = torch.zeros_like(index)
    starts.narrow(seq_dim, 1, begins.shape[seq_dim]).copy_(index.narrow(seq_dim, 1, begins.shape[seq_dim]) * begins)
    return starts.cummax(seq_dim).values
