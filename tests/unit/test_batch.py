"""Labels, positions and shards of whole sequences: exact integers, so every comparison is equality."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_styles.batch import IGNORE_INDEX, chunked_token_losses, document_positions, next_token_labels, shard_batch
from cp_styles.layouts import contiguous, head_tail
from cp_styles.testing import MemoryTrace
from tests.oracle import error, randn

X = IGNORE_INDEX


def ids_of(lengths: list[int]) -> torch.Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def test_labels_stop_where_a_document_stops():
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]])
    assert next_token_labels(tokens).tolist() == [[11, 12, 13, 14, 15, X]]
    ids = ids_of([3, 1, 2])
    assert next_token_labels(tokens, document_ids=ids).tolist() == [[11, 12, X, X, 15, X]]
    assert next_token_labels(tokens, document_ids=ids, shift=2).tolist() == [[12, X, X, X, X, X]]
    assert next_token_labels(tokens, shift=6).tolist() == [[X] * 6]


def test_rows_have_their_own_documents():
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    ids = torch.tensor([[0, 0, 1], [0, 1, 1]])
    assert next_token_labels(tokens, document_ids=ids).tolist() == [[2, X, X], [X, 6, X]]


def test_a_document_is_a_run_so_ids_may_come_back():
    """A shift over a whole document must not find the same id behind it."""
    tokens = torch.arange(5)
    assert next_token_labels(tokens, document_ids=torch.tensor([7, 7, 3, 7, 7]), shift=3).tolist() == [X] * 5


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    shift=st.integers(1, 4),
    seq_dim=st.sampled_from([0, 1, 2, -1, -2, -3]),
)
def test_labels_and_positions_against_a_loop_over_documents(lengths, shift, seq_dim):
    expected_labels, expected_positions, start = [], [], 0
    for size in lengths:
        document = list(range(start, start + size))
        expected_labels += [*document[shift:], *[X] * min(shift, size)]
        expected_positions += range(size)
        start += size
    shape = [1, 1, 1]
    shape[seq_dim] = start
    ids, tokens = ids_of(lengths).view(shape), torch.arange(start).view(shape)
    labels = next_token_labels(tokens, document_ids=ids, shift=shift, seq_dim=seq_dim)
    positions = document_positions(ids, seq_dim=seq_dim)
    assert labels.shape == positions.shape == tokens.shape
    assert labels.flatten().tolist() == expected_labels
    assert positions.flatten().tolist() == expected_positions


@pytest.mark.parametrize("balancer", [contiguous, head_tail])
@pytest.mark.parametrize(("length", "ranks"), [(16, 4), (10, 3), (3, 4)])
def test_labels_cut_with_the_tokens_are_right_at_shard_boundaries(balancer, length, ranks):
    tokens = torch.randint(0, 1000, (2, length))
    labels = next_token_labels(tokens)
    layout = balancer(length, ranks)
    for rank in range(ranks):
        batch = {"tokens": tokens, "labels": labels}
        mine = shard_batch(batch, layout, rank, seq_dims={"tokens": 1, "labels": -1})
        for column, position in enumerate(layout.positions(rank).tolist()):
            after = tokens[:, position + 1].tolist() if position + 1 < length else [X, X]
            assert mine["labels"][:, column].tolist() == after


def test_every_entry_is_cut_where_it_is_told_and_no_other():
    length = 6
    layout = head_tail(length, 2)
    whole = {
        "position_ids": torch.randn(3, length, length),  # [3, B, S] with B as long as S: nothing to guess from
        "hidden": torch.randn(1, length, 4),
        "image": torch.randn(length, 5),
    }
    seq_dims = {"position_ids": 2, "hidden": -2, "image": None, "absent": 1}
    parts = [shard_batch(whole, layout, rank, seq_dims=seq_dims) for rank in range(2)]
    assert [part["position_ids"].shape for part in parts] == [(3, length, own) for own in layout.lengths]
    assert torch.equal(layout.unshard([part["position_ids"] for part in parts], 2), whole["position_ids"])
    assert torch.equal(layout.unshard([part["hidden"] for part in parts], 1), whole["hidden"])
    assert parts[0]["image"] is whole["image"]
    assert set(parts[0]) == set(whole)


def test_entries_are_padded_where_a_fill_is_given():
    layout, length = head_tail(10, 3), 7
    whole = {
        "tokens": torch.arange(2 * length).view(2, length),
        "labels": torch.arange(length).view(1, length),
        "present": torch.ones(2, length, dtype=torch.bool),
        "position_ids": torch.randn(3, 2, length),
        "weights": torch.randn(2, 10),  # as long as the layout already
        "cu_seqlens": torch.tensor([0, 3, 7]),
    }
    seq_dims = {"tokens": 1, "labels": -1, "present": 1, "position_ids": 2, "weights": 1, "cu_seqlens": None}
    fill = {"tokens": 5, "labels": -100, "present": False, "position_ids": 0, "weights": 1.0, "absent": 1}
    parts = [shard_batch(whole, layout, rank, seq_dims=seq_dims, fill=fill) for rank in range(3)]
    for name, dim in seq_dims.items():
        if dim is None:
            assert all(part[name] is whole[name] for part in parts)
            continue
        joined = layout.unshard([part[name] for part in parts], dim)
        assert joined.dtype == whole[name].dtype
        assert torch.equal(joined.narrow(dim, 0, whole[name].shape[dim]), whole[name])
        padding = joined.narrow(dim, whole[name].shape[dim], 10 - whole[name].shape[dim])
        assert (padding == fill[name]).all()
    with pytest.raises(TypeError, match=r'"tokens" is a list, and only tensors can be cut'):
        shard_batch(whole | {"tokens": [1] * 10}, layout, 0, seq_dims=seq_dims, fill=fill)
    with pytest.raises(ValueError, match=r'fill\["cu_seqlens"\] is given, and .* stays whole'):
        shard_batch(whole, layout, 0, seq_dims=seq_dims, fill=fill | {"cu_seqlens": 10})
    for fill in (None, {"labels": -100}):
        with pytest.raises(ValueError, match=r'"tokens" of shape \(2, 7\) is not 10 long .* with fill\["tokens"\]'):
            shard_batch(whole, layout, 0, seq_dims=seq_dims, fill=fill)
    with pytest.raises(ValueError, match=r'"tokens" of shape \(2, 7\) is not 6 long'):
        shard_batch({"tokens": whole["tokens"]}, contiguous(6, 2), 0, seq_dims=seq_dims, fill={"tokens": 0})


def test_what_is_wrong_is_named():
    layout = contiguous(6, 2)
    tokens = torch.arange(6).view(1, 6)
    with pytest.raises(ValueError, match=r"which dim of \['mask'\] is the sequence"):
        shard_batch({"tokens": tokens, "mask": tokens}, layout, 0, seq_dims={"tokens": 1})
    for dim in (0, 2, -3):
        with pytest.raises(ValueError, match=rf'"tokens" of shape \(1, 6\) is not 6 long at dim {dim}.*correct'):
            shard_batch({"tokens": tokens}, layout, 0, seq_dims={"tokens": dim})
    with pytest.raises(ValueError, match="at least 1, got 0"):
        next_token_labels(tokens, shift=0)
    with pytest.raises(ValueError, match=r"\(5,\) do not broadcast to tokens \(1, 6\)"):
        next_token_labels(tokens, document_ids=torch.zeros(5))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.2, "z_loss": 0.5}]
)
@pytest.mark.parametrize("split", [(0, 14), (0, 5, 14), (0, 0, 14)])
def test_chunks_of_parts_sum_to_the_loss_of_the_whole(split, options, weighted):
    """Parts of ranks, one perhaps without tokens, in chunks of 4."""
    hidden, weight, bias = randn(0, 1, 14, 6), randn(1, 11, 6), randn(2, 11)
    labels = torch.randint(11, (1, 14), generator=torch.Generator().manual_seed(0))
    labels[0, [3, 9]] = IGNORE_INDEX
    factors = randn(3, 1, 14).abs() if weighted else None
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*leaves)
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    logp = logits.log_softmax(-1)
    picked = -logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    each = (1 - smoothing) * picked - smoothing * logp.mean(-1) + z_loss * logits.logsumexp(-1) ** 2
    each = each * (labels != IGNORE_INDEX) * (1.0 if factors is None else factors)
    wanted = [each.sum(), *torch.autograd.grad(each.sum(), leaves)]

    total, again = 0, [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    for start, end in pairwise(split):
        part = slice(start, end)
        total = total + chunked_token_losses(
            again[0][:, part],
            again[1],
            labels[:, part],
            bias_V=again[2],
            token_weights_BL=None if factors is None else factors[:, part],
            chunk_tokens=4,
            **options,
        )
    for found, each in zip([total, *torch.autograd.grad(total, again)], wanted, strict=True):
        assert error(found, each) < 1e-12


def test_the_logits_of_all_tokens_never_exist_at_once():
    tokens, width, vocabulary, chunk = 512, 4, 64, 16
    hidden, weight = (randn(seed, size, width).requires_grad_() for seed, size in enumerate((tokens, vocabulary)))
    labels = torch.zeros(tokens, dtype=torch.int64)
    with MemoryTrace() as trace:
        chunked_token_losses(hidden, weight, labels, chunk_tokens=chunk).backward()
    # The gradients of the hidden states, a few of their size while they are put together, and some chunks of logits.
    assert trace.peak < 8 * (4 * tokens * width + 6 * chunk * vocabulary) < 8 * tokens * vocabulary / 2
    with pytest.raises(ValueError, match=r"labels_BL of shape \(511,\)"):
        chunked_token_losses(hidden, weight, labels[1:])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.bool, torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [None, torch.tensor([0, 0, 1, 1])])
def test_labels_of_any_dtype_hold_ignore_index(dtype, ids):
    tokens = torch.tensor([[1, 0, 1, 1]])
    expected = next_token_labels(tokens, document_ids=ids)
    labels = next_token_labels(tokens.to(dtype), document_ids=ids)
    assert torch.equal(labels.long(), expected)
    assert labels.dtype == (dtype if dtype in (torch.int8, torch.int32) else torch.int64)


def test_tokens_that_cannot_be_shifted():
    with pytest.raises(TypeError, match=r"tokens must be integers, got torch\.float32"):
        next_token_labels(torch.ones(3))
    for tokens, dim in ((torch.arange(3), 3), (torch.tensor(3), -1)):
        with pytest.raises(ValueError, match=f"have no dim {dim}"):
            next_token_labels(tokens, seq_dim=dim)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [(torch.uint8, -100), (torch.int8, -129), (torch.bool, 2), (torch.int64, 0.5), (torch.float16, 1e6)],
)
def test_padding_that_the_dtype_cannot_hold_is_refused(dtype, fill):
    entry = {"labels": torch.zeros(3, dtype=dtype)}
    with pytest.raises(ValueError, match=rf'"labels" of dtype {dtype} is padded with {fill}, which it cannot hold'):
        shard_batch(entry, head_tail(4, 2), 0, seq_dims={"labels": 0}, fill={"labels": fill})


@pytest.mark.parametrize(("dtype", "fill"), [(torch.bool, True), (torch.uint8, 255), (torch.float16, float("-inf"))])
def test_padding_that_it_can_hold(dtype, fill):
    entry = {"mask": torch.zeros(3, dtype=dtype)}
    part = shard_batch(entry, head_tail(4, 2), 0, seq_dims={"mask": 0}, fill={"mask": fill})["mask"]
    assert part.tolist() == [0, fill]
