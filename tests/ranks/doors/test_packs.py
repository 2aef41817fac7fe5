"""Packs over dp x cp: the samples of all ranks in one sequence, trained as on one device."""

from __future__ import annotations

import copy
import random
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import (
    AllGather,
    BatchSharder,
    Causal,
    ModuleContextParallel,
    Ring,
    Ulysses,
    context_attention,
    head_tail,
    next_token_labels,
    pack_samples,
    parallelize_module,
    per_document_head_tail,
    whole_documents,
)
from cp_styles.testing import CommunicationTrace, RankError, run_ranks
from tests.covering import sampled
from tests.oracle import error
from tests.pages import example
from tests.ranks.attention_case import EXACT, cp_mesh, every_rank_raises
from tests.tiny_lm import gradients, language_model

LONGEST, WORDS = 64, 40
# The lengths of the samples of four ranks.
DRAWN = {
    "short": [[5, 3, 4], [6, 2], [4, 4, 3], [7, 3]],
    "one long": [[40], [3, 5], [2], [4, 4, 1]],
    "long": [[30], [33], [29], [31]],
    "mixed": [[1, 12, 30], [7, 7], [19], [2, 3, 4, 5]],
    "few": [[9], [], [12], []],
}


def samples_of(rank: int, lengths: list[int]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randint(1, WORDS, (size,), generator=draw) for size in lengths]


def losses_of(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def trained_alone(model: nn.Module, samples: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The mean loss, after its backward, and the losses of the tokens of each sample."""
    rows, count = [], 0
    for tokens in samples:
        labels = next_token_labels(tokens[None])
        rows.append(losses_of(model(tokens[None], torch.arange(len(tokens))), labels, "none"))
        count += int((labels != -100).sum())
    loss = torch.cat(rows).sum() / count
    loss.backward()
    return loss.detach(), [row.detach() for row in rows]


@sampled(
    2,
    drawn=DRAWN,
    shape=[(2, 2), (4, 1), (1, 4)],
    copies=[False, True],
    most=[None, 12, 40],
    layout=[whole_documents, per_document_head_tail, head_tail],
    strategy=[Ring(), AllGather(), Ulysses()],
)
def test_a_step_is_the_step_of_one_device(
    drawn: str, shape: tuple[int, int], copies: bool, most: int | None, layout: Any, strategy: Any
):
    """Samples of each rank, or of each dp rank; in one pack, or in several, of at most so many tokens on a rank."""
    lengths = DRAWN[drawn]
    if most is not None:
        most = max(most, -(-max(chain(*lengths)) // 4))
    owners = range(shape[0]) if copies else range(4)
    lists = [samples_of(rank, lengths[rank]) for rank in owners]
    model = language_model(WORDS, LONGEST)
    alone = copy.deepcopy(model)
    wanted, rows = trained_alone(alone, [*chain(*lists)])

    def on(rank: int) -> tuple[float, float, float, list[tuple[int, ...]]]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        both, mine = mesh["dp", "cp"]._flatten("dp_cp"), copy.deepcopy(model)
        own = mesh["dp"].get_local_rank() if copies else rank
        parallelize_module(mine, both, ModuleContextParallel(strategy=strategy, verified=True))
        cut = partial(layout, most=most) if layout is whole_documents else layout
        sharder = BatchSharder(both, layout=cut)
        packs = pack_samples(lists[own], both, copies=mesh["cp"] if copies else None, most=most)
        assert [*chain(*(pack.lengths for pack in packs))] == [*map(len, chain(*lists))]  # each sample once
        batches = [sharder(pack) for pack in packs]
        count, total, worst, seen = sum(batch.token_count() for batch in batches), 0.0, 0.0, set()
        for pack, batch in zip(packs, batches, strict=True):
            with batch.scope():
                logits = mine(batch.tokens, batch["position_ids"])
            loss = batch.loss(logits, token_count=count)
            loss.backward()
            total = total + loss.detach()
            of_rank = losses_of(logits, batch["shift_labels"], "none")[None]
            before = sum(len(samples) for samples in lists[:own])
            for index, of_sample in pack.own(sharder.whole_of(of_rank, pack)).items():
                worst = max(worst, error(of_sample, rows[before + index]))
                seen.add(index)
        sharder.sum_gradients(mine)
        assert seen == set(range(len(lists[own])))
        return (
            error(total, wanted),
            error(gradients(mine), gradients(alone)),
            worst,
            [x.layout.lengths for x in batches],
        )

    found = run_ranks(on, 4)
    assert max(max(each[:3]) for each in found) < EXACT
    if most is not None and layout is not head_tail:
        assert max(max(sizes) for sizes in found[0][3]) <= most


@pytest.mark.parametrize("drawn", DRAWN)
def test_the_loop_of_the_page(drawn: str):
    """With its verify. Each rank has samples of other lengths."""
    lists = [samples_of(rank, lengths) for rank, lengths in enumerate(DRAWN[drawn])]
    model = language_model(WORDS, LONGEST)
    alone = copy.deepcopy(model)
    wanted, _ = trained_alone(alone, [*chain(*lists)])

    def on(rank: int) -> tuple[float, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        scope: dict[str, Any] = {"model": copy.deepcopy(model), "mesh": mesh, "loader": iter([lists[rank]])}
        exec(example("packs"), scope)
        return error(scope["loss"], wanted), error(gradients(scope["model"]), gradients(alone))

    assert max(map(max, run_ranks(on, 4))) < EXACT


def test_bytes_where_every_sample_fits_a_rank():
    """Nothing is sent for the attention of short samples but the agreement."""
    draw = random.Random(0)
    lists = [samples_of(rank, [draw.randint(20, 40) for _ in range(12)]) for rank in range(4)]

    def on(rank: int, layout: Any) -> tuple[int, int]:
        (pack,) = pack_samples(lists[rank], cp_mesh(4))
        batch = BatchSharder(cp_mesh(4), layout=layout)(pack)
        q = torch.randn(1, 2, batch.tokens.shape[1], 8, requires_grad=True)
        with CommunicationTrace() as trace, batch.scope():
            context_attention(q, q, q, cp_mesh(4), mask=Causal()).sum().backward()
        agreed = sum(size for name, size in trace.events if name == "all_gather")
        return trace.sent_bytes - agreed, agreed

    whole = run_ranks(partial(on, layout=whole_documents), 4)
    cut = run_ranks(partial(on, layout=head_tail), 4)
    assert [sent for sent, _ in whole] == [0] * 4
    assert [agreed for _, agreed in whole] == [agreed for _, agreed in cut]
    assert min(sent for sent, _ in cut) > 3_000


WRONG = {
    "none": ([[], []], "no rank has samples"),
    "a tensor": ([torch.ones(2, 3)] * 2, "samples must be a list of this rank's samples, got a Tensor"),
    "no tokens": ([[{"labels": torch.ones(3)}]] * 2, "sample 0 must be tokens"),
    "a text": ([["text"]] * 2, "sample 0 must be tokens"),
    "lengths": (
        [[{"input_ids": torch.ones(3), "labels": torch.ones(4)}]] * 2,
        "have .*'input_ids': 3, 'labels': 4.* tokens",
    ),
    "empty": ([[torch.ones(0)]] * 2, "'input_ids': 0.* tokens"),
    "kinds": ([[torch.ones(3), {"input_ids": torch.ones(3)}]] * 2, "sample 1 has"),
    "ranks": (
        [[torch.ones(3)], [torch.ones(3).long()]],
        "samples of rank 1 have .*int64.*, and of rank 0 .*float32",
    ),
    "ids": ([[{"input_ids": torch.ones(3), "document_ids": torch.ones(3)}]] * 2, "which the pack makes: leave them"),
    "long": ([[torch.ones(30)]] * 2, "a sample of 30 tokens is longer than the 20 that all ranks can hold"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_samples_are_refused_on_every_rank(case: str):
    lists, words = WRONG[case]
    with every_rank_raises(f"(?s){words}"):
        run_ranks(lambda rank: pack_samples(lists[rank], cp_mesh(2), most=10), 2)


@pytest.mark.parametrize("odd", [[3], [0, 1, 2, 3]], ids=["on one rank", "everywhere"])
def test_copies_that_differ_are_refused(odd: list[int]):
    """On every rank, also of the copies that are equal."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        samples = samples_of(rank if rank in odd else 7, [3])
        pack_samples(samples, mesh["dp", "cp"]._flatten("dp_cp"), copies=mesh["cp"])

    words = f"ranks {odd[0] // 2 * 2} and {odd[0] // 2 * 2 + 1} are copies, and have loaded other samples"
    with pytest.raises(RankError, match=words) as caught:
        run_ranks(on, 4)
    assert [type(caught.value.errors[rank]) for rank in range(4)] == [ValueError] * 4


def test_entries_that_are_too_many_to_compare():
    sample = {f"a name of some length {index}": torch.ones(3) for index in range(100)} | {"input_ids": torch.ones(3)}
    with every_rank_raises("101 entries are too many to compare"):
        run_ranks(lambda rank: pack_samples([sample] if rank else [], cp_mesh(2)), 2)


def test_entries_keep_their_order_and_their_dims():
    def on(rank: int) -> Any:
        samples = [
            {"input_ids": x, "labels": x, "weights": x.double(), "pixels": torch.stack([x, -x], 1)}
            for x in samples_of(rank, [2 + rank, 1])
        ]
        (pack,) = pack_samples(samples, cp_mesh(3))
        assert set(pack.own(pack["pixels"])) == {0, 1}
        assert all(torch.equal(pack.own(pack["pixels"])[index], samples[index]["pixels"]) for index in (0, 1))
        return dict(pack), pack.lengths

    found = run_ranks(on, 3)
    whole = torch.cat([x for rank in range(3) for x in samples_of(rank, [2 + rank, 1])])
    for pack, lengths in found:
        assert torch.equal(pack["input_ids"], whole[None])
        assert torch.equal(pack["weights"], whole[None].double())
        assert torch.equal(pack["pixels"], torch.stack([whole, -whole], 1)[None])
        assert lengths == (2, 1, 3, 1, 4, 1)
        assert pack["document_ids"].tolist() == [[index for index, size in enumerate(lengths) for _ in range(size)]]


def test_a_layout_of_documents_that_differ_by_row_is_refused():
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])

    def on(rank: int) -> None:
        batch = {"input_ids": torch.ones(2, 4).long(), "document_ids": ids}
        BatchSharder(cp_mesh(2), layout=per_document_head_tail)(batch)

    with every_rank_raises("document_ids differ from row to row: pack all samples into one row"):
        run_ranks(on, 2)


def test_a_batch_without_documents_is_one():
    def on(rank: int) -> Any:
        return BatchSharder(cp_mesh(2), layout=per_document_head_tail)(torch.arange(8)[None]).layout

    assert run_ranks(on, 2) == [head_tail(8, 2)] * 2
