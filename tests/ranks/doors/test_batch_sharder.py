"""BatchSharder and share_batches, without the libraries whose batches they are for."""

import contextlib
import copy
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles import (
    BatchSharder,
    Documents,
    ModuleContextParallel,
    SequenceScope,
    SlidingWindow,
    Tree,
    contiguous,
    flex_attention,
    head_tail,
    next_token_labels,
    parallelize_module,
)
from cp_styles.batch import document_positions
from cp_styles.batch import sharder as module_of_sharder
from cp_styles.integrations.trainers import share_batches
from cp_styles.mixers import context_roll
from cp_styles.testing import RankError, run_ranks
from tests.oracle import error, randn
from tests.pages import example
from tests.ranks.attention_case import EXACT, cp_mesh, every_rank_raises
from tests.tiny_lm import LanguageModel, gradients, language_model

LENGTH, ROWS = 13, 2
TOKENS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) + 5
LABELS = TOKENS.masked_fill(TOKENS % 3 == 0, -100)
ONES = torch.ones_like(TOKENS)


def cut(batch: Any, ranks: int = 3, **options: Any) -> list[dict[str, Any]]:
    return run_ranks(lambda rank: BatchSharder(cp_mesh(ranks), **options)(copy.copy(batch)), ranks)


def whole(parts: list[dict[str, Any]], name: str, layout: Any = None) -> torch.Tensor:
    layout = layout or head_tail(sum(part["input_ids"].shape[1] for part in parts), len(parts))
    return layout.unshard([part[name] for part in parts], -1)


def test_labels_are_shifted_before_the_cut_and_positions_are_of_the_whole():
    parts = cut({"input_ids": TOKENS, "labels": LABELS, "attention_mask": ONES, "use_cache": False})
    assert torch.equal(whole(parts, "input_ids"), TOKENS)
    assert torch.equal(whole(parts, "labels"), LABELS)
    shifted = torch.cat((LABELS[:, 1:], torch.full((ROWS, 1), -100)), 1)
    assert torch.equal(whole(parts, "shift_labels"), shifted)
    assert torch.equal(whole(parts, "position_ids"), torch.arange(LENGTH).expand(ROWS, -1))
    assert all("attention_mask" not in part and part["use_cache"] is False for part in parts)
    assert all(x.is_contiguous() for part in parts for x in part.values() if isinstance(x, torch.Tensor))


def test_what_a_batch_has_already_is_cut_as_it_is():
    packed = torch.cat((torch.arange(5), torch.arange(8))).expand(ROWS, -1)
    spaces = torch.stack([packed, packed // 2, packed % 3])
    given = {"input_ids": TOKENS, "labels": LABELS, "shift_labels": TOKENS, "position_ids": packed}
    parts = cut(given | {"attention_mask": ONES}, layout=contiguous)
    found = contiguous(LENGTH, 3)
    assert torch.equal(whole(parts, "shift_labels", found), TOKENS)
    assert torch.equal(whole(parts, "position_ids", found), packed)
    assert all(torch.equal(part["attention_mask"], ONES) for part in parts)  # it says that nothing is packed
    parts = cut({"inputs_embeds": TOKENS[..., None].double(), "position_ids": spaces, "labels": LABELS}, shift=False)
    assert [part["position_ids"].shape[:2] for part in parts] == [(3, ROWS)] * 3
    assert all("shift_labels" not in part for part in parts)


@pytest.mark.parametrize("fixed", [False, True])
def test_padding_on_request(fixed: bool):
    options: dict[str, Any] = {"layout": head_tail(16, 2)} if fixed else {"pad_to_multiple_of": 8}
    mask = torch.arange(16) < LENGTH
    for given in ({}, {"attention_mask": ONES}):
        parts = cut({"input_ids": TOKENS, "labels": LABELS} | given, 2, pad_token_id=1, **options)
        assert torch.equal(whole(parts, "input_ids")[:, LENGTH:], torch.ones(ROWS, 3, dtype=torch.int64))
        assert (whole(parts, "shift_labels")[:, LENGTH - 1 :] == -100).all()
        assert all(torch.equal(part["attention_mask"], mask.long().expand(ROWS, -1)) for part in parts)
    packed = torch.arange(LENGTH).expand(ROWS, -1)
    parts = cut({"input_ids": TOKENS, "position_ids": packed}, 2, **options)  # the padding is a document of its own
    assert whole(parts, "position_ids")[0, LENGTH:].tolist() == [0, 1, 2]
    assert all("attention_mask" not in part for part in parts)


IDS = torch.tensor([[0] * 4 + [1] * 9, [3] * 11 + [5] * 2])


class Documented(nn.Module):
    """Attention of a user that is given its documents in a call, or only causal."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.embed, self.head = way, nn.Embedding(40, 8), nn.Linear(8, 40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)[:, None]
        same = IDS[:, None, :, None] == IDS[:, None, None]
        if self.way == "BlockMask":
            mask = create_block_mask(lambda b, h, q, k: same[b, 0, q, k] & (q >= k), ROWS, None, LENGTH, LENGTH, "cpu")
            x = flex_attention(x, x, x, block_mask=mask)
        elif self.way == "attn_mask":
            x = F.scaled_dot_product_attention(x, x, x, same.tril())
        else:
            x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.head(x[:, 0])


@pytest.mark.parametrize("way", ["no scope", "scope", "style", "BlockMask", "attn_mask", "one document", "window"])
def test_documents_without_a_scope(way: str):
    """Refused where all attention has joined them; other programs, in which something keeps them apart, go on."""
    model, ids = Documented(way).double(), IDS * (way != "one document")
    masks = {"style": Documents.from_ids(IDS), "window": SlidingWindow(3, 0)}

    def on(rank: int, loss: str, batches: int = 1) -> None:
        mine = copy.deepcopy(model)
        parallelize_module(mine, cp_mesh(2), ModuleContextParallel(mask=masks.get(way), verified=True))
        sharder = BatchSharder(cp_mesh(2), pad_to_multiple_of=1 if way in ("BlockMask", "attn_mask", "style") else 4)
        for at in range(2 * batches):
            batch = sharder({"input_ids": TOKENS, "labels": TOKENS, "document_ids": ids})
            with batch.scope() if way == "scope" else contextlib.nullcontext():
                logits = mine(batch.tokens)
            if loss == "its own":
                batch.loss(logits).backward()
            else:
                F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum").backward()
            if at % batches == batches - 1:
                sharder.sum_gradients(mine)
                mine.zero_grad()

    for loss, batches in (("its own", 1), ("another", 1), ("another", 2)):
        if way in ("no scope", "window"):
            with every_rank_raises("no attention that has run since kept documents apart"):
                run_ranks(on, 2, loss, batches)
        else:
            run_ranks(on, 2, loss, batches)


TREE = Tree((4, 2, 3, 4), (-1, 0, 1, 0))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_tree_has_labels_where_the_tokens_before_them_are(ranks: int, padding: int):
    weights = torch.arange(TOKENS.numel()).view(ROWS, LENGTH) / 4
    given = {"input_ids": TOKENS, "labels": LABELS, "weights": weights, "tree": TREE}
    parts = cut(given, ranks, shifted=["weights"], pad_to_multiple_of=16 if padding else 1)
    assert torch.equal(whole(parts, "input_ids")[:, :LENGTH], TOKENS)
    positions = [*TREE.position_ids.tolist(), *range(padding)]
    assert whole(parts, "position_ids")[1].tolist() == positions
    held, found = head_tail(LENGTH + padding, ranks), []
    for rank, part in enumerate(parts):
        assert "tree" not in part
        before = held.positions(rank)[part.rows]
        for at, token in enumerate(before.tolist()):
            after = [int(x) for x in torch.nonzero(TREE.predecessors == token)]
            same = before.tolist()[:at].count(token)  # earlier rows of this token
            if token < LENGTH:
                assert part["shift_labels"][:, at].tolist() == LABELS[:, after[same]].tolist()
                assert part["weights"][:, at].tolist() == weights[:, after[same]].tolist()
                found.append(after[same])
            else:
                assert part["shift_labels"][:, at].tolist() == [-100] * ROWS
    assert sorted(found) == list(range(1, LENGTH))


def test_the_loss_of_a_tree_is_the_mean_over_its_labels():
    """Each label once; the logits have a row for each token of a rank, as without a tree."""
    logits = randn(3, ROWS, LENGTH, 40)
    expected = F.cross_entropy(
        logits[:, TREE.predecessors[1:]].flatten(0, 1), LABELS[:, 1:].flatten(), ignore_index=-100
    )

    def on(rank: int) -> torch.Tensor:
        batch = BatchSharder(cp_mesh(3))({"input_ids": TOKENS, "labels": LABELS, "tree": TREE})
        return batch.loss(batch.layout.shard(logits, 1, rank))

    for found in run_ranks(on, 3):
        assert error(found, expected) < EXACT


@pytest.mark.parametrize(
    ("entries", "options", "message"),
    [
        ({"tree": Tree((4, 4), (-1, 0))}, {}, r"must be a Tree of the 13 tokens of a row, .* into one row, as several"),
        ({"tree": (4, 9)}, {}, r'batch\["tree"\] is \(4, 9\), and must be a Tree'),
        ({"document_ids": ONES}, {}, r"a tree and \['document_ids'\]: leave them out. Documents are roots"),
        ({"shift_labels": TOKENS}, {}, r"a tree and \['shift_labels'\]: leave them out"),
        ({}, {"shift": False}, r"shift=False and a tree with labels: leave shift= out"),
        ({}, {"predicted": 2}, r"predicted=2 and a tree: the token after the next differs by rollout"),
    ],
)
def test_what_does_not_go_with_a_tree(entries: dict[str, Any], options: dict[str, Any], message: str):
    with every_rank_raises(message):
        cut({"input_ids": TOKENS, "labels": TOKENS, "tree": TREE} | entries, 2, **options)


def test_other_trees_on_the_ranks():
    def on(rank: int) -> None:
        tree = Tree((3, 2, 2, 6), (-1, 0, 0, 1 + rank))  # positions are equal
        BatchSharder(cp_mesh(2))({"input_ids": TOKENS, "labels": TOKENS, "tree": tree})

    with pytest.raises(RankError, match=r"disagree on the samples \(tree\)"):
        run_ranks(on, 2)


@pytest.mark.parametrize("scoped", [False, True])
def test_a_tree_without_a_scope(scoped: bool):
    """Refused, as documents that all attention has joined."""
    model = Documented("no scope").double()

    def on(rank: int) -> None:
        mine = parallelize_module(copy.deepcopy(model), cp_mesh(2), ModuleContextParallel(verified=True))
        sharder = BatchSharder(cp_mesh(2))
        batch = sharder({"input_ids": TOKENS, "labels": TOKENS, "tree": TREE})
        with batch.scope() if scoped else contextlib.nullcontext():
            logits = mine(batch.tokens)
        batch.loss(logits).backward()
        sharder.sum_gradients(mine)

    if scoped:
        run_ranks(on, 2)
        return
    with every_rank_raises(r"has document_ids or a tree, and no attention .* kept documents apart"):
        run_ranks(on, 2)


@pytest.mark.parametrize("way", ["scope", "style"])
def test_functions_that_carry_a_state_refuse_a_tree(way: str):
    def on(rank: int) -> None:
        layout, mesh = contiguous(LENGTH, 2), cp_mesh(2)
        part = layout.shard(TOKENS, 1, rank)
        if way == "scope":
            with SequenceScope(layout, mask=TREE):
                context_roll(part, 1, 1, mesh)
        else:
            model = Rolling()
            parallelize_module(model, mesh, ModuleContextParallel(mask=TREE, layout=layout, verified=True))
            model(part, mesh)

    with every_rank_raises(r"context_roll: a Tree around a recurrence, a convolution or a roll"):
        run_ranks(on, 2)


class Rolling(nn.Module):
    def forward(self, tokens, mesh):
        return context_roll(tokens, 1, 1, mesh)


@pytest.mark.parametrize("way", ["cut ahead", "padding"])
def test_documents_that_need_no_scope(way: str):
    """A batch with documents that has not run yet; and padding with a number of its own behind a document."""
    model = Documented("no scope").double()
    ids = torch.where(torch.arange(TOKENS.shape[1]) < TOKENS.shape[1] - 3, 0, 1).expand_as(TOKENS).contiguous()
    plain, packed = {"input_ids": TOKENS, "labels": TOKENS}, {"document_ids": IDS if way == "cut ahead" else ids}
    packed |= {"input_ids": TOKENS, "labels": TOKENS if way == "cut ahead" else TOKENS.masked_fill(ids > 0, -100)}

    def on(rank: int) -> None:
        mine = parallelize_module(copy.deepcopy(model), cp_mesh(2), ModuleContextParallel(verified=True))
        sharder = BatchSharder(cp_mesh(2))
        batch, ahead = sharder(packed if way == "padding" else plain), sharder(packed)
        batch.loss(mine(batch.tokens)).backward()
        sharder.sum_gradients(mine)
        mine.zero_grad()
        with ahead.scope():
            logits = mine(ahead.tokens)
        ahead.loss(logits).backward()
        sharder.sum_gradients(mine)

    run_ranks(on, 2)


WEIGHTS = TOKENS / 7.0


@pytest.mark.parametrize("fixed", [False, True])
def test_entries_that_belong_to_labels(fixed: bool):
    """Moved as the labels are, also in front of padding; with labels that are next tokens already they stay."""
    options: dict[str, Any] = {"layout": head_tail(16, 3)} if fixed else {}
    batch = {"input_ids": TOKENS, "labels": LABELS, "weights": WEIGHTS}
    parts = cut(batch, shifted=["weights"], **options)
    moved = torch.cat((WEIGHTS[:, 1:], torch.zeros(ROWS, 1)), 1)
    assert torch.equal(whole(parts, "weights")[:, :LENGTH], moved)
    assert torch.equal(whole(parts, "labels")[:, :LENGTH], LABELS)
    parts = cut(batch | {"shift_labels": LABELS}, shifted=["weights"])
    assert torch.equal(whole(parts, "weights"), WEIGHTS)
    with pytest.raises(RankError, match="shift=False moves none"):
        cut(batch, shifted=["weights"], shift=False)


def test_floats_that_may_belong_to_labels_warn():
    batch = {"input_ids": TOKENS, "labels": LABELS, "weights": WEIGHTS, "of_tokens": WEIGHTS[..., None]}
    dims = {"weights": 1, "of_tokens": 1}
    with pytest.warns(UserWarning, match=r"\['weights'\] have the shape of the labels"):
        cut(batch, seq_dims=dims)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"shifted": ()}, {"shift": False}, {"shifted": ["weights"]}):
            cut(batch, seq_dims=dims, **options)
        cut(batch | {"shift_labels": LABELS}, seq_dims=dims)
        with pytest.raises(RankError, match="have the shape of the labels") as found:
            cut(batch, seq_dims=dims)
    assert len(found.value.errors) == 3


def test_positions_of_embeddings_alone():
    parts = cut({"inputs_embeds": TOKENS[..., None].double(), "labels": LABELS}, 2)
    assert torch.equal(head_tail(LENGTH, 2).unshard([part.positions for part in parts], 0), torch.arange(LENGTH))
    with pytest.raises(ValueError, match=r"tokens: the batch has inputs_embeds in place of input_ids: give the model"):
        _ = parts[0].tokens


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("has_labels", [False, True])
def test_a_step_is_that_of_one_process(packed: bool, has_labels: bool):
    model = language_model(40, LENGTH)
    alone, labels = copy.deepcopy(model), LABELS if has_labels else TOKENS
    same = IDS[:, :, None] == IDS[:, None]
    mask = (same if packed else torch.ones_like(same)).tril()[:, None]
    positions = document_positions(IDS) if packed else torch.arange(LENGTH)
    shifted = next_token_labels(labels, document_ids=IDS if packed else None)
    expected = nn.functional.cross_entropy(alone(TOKENS, positions, mask).flatten(0, 1), shifted.flatten())
    expected.backward()

    def on(rank: int) -> float:
        mine, mesh = copy.deepcopy(model), cp_mesh(3)
        parallelize_module(mine, mesh, ModuleContextParallel())
        sharder = BatchSharder(mesh)
        whole = {"input_ids": TOKENS, "labels": labels} | ({"document_ids": IDS} if packed else {})
        batch = sharder(whole if packed or has_labels else TOKENS)
        with batch.scope():
            logits = mine(batch.tokens, batch["position_ids"] if packed else batch.positions)
        loss = batch.loss(logits)
        loss.backward()
        sharder.sum_gradients(mine)
        assert "document_ids" not in batch  # which model(**batch) would be given
        if packed:
            assert torch.equal(batch["document_ids"], batch.layout.shard(IDS, 1, rank))
        return max(error(loss.detach(), expected.detach()), error(gradients(mine), gradients(alone)))

    assert max(run_ranks(on, 3)) < EXACT


@pytest.mark.parametrize("options", [{"predicted": 0}, {"predicted": 2, "shift": False}])
def test_how_many_tokens_are_predicted(options: dict[str, Any]):
    parts = run_ranks(lambda rank: BatchSharder(cp_mesh(2), predicted=2, pad_to_multiple_of=8)(TOKENS), 2)
    assert (whole(parts, "shift_labels_2")[:, LENGTH - 2 :] == -100).all()
    with pytest.raises(RankError, match=r"predicted=[02] must be the number of next tokens"):
        run_ranks(lambda rank: BatchSharder(cp_mesh(2), **options), 2)


class TwoAhead(LanguageModel):
    """Predicts the token after the next one too, from the next token's embedding, as DeepSeek-V3 does."""

    def __init__(self) -> None:
        super().__init__(40, LENGTH)
        self.second = nn.Linear(56, 40)

    def forward(self, tokens, positions, roll):
        logits = super().forward(tokens, positions)
        return logits, self.second(torch.cat((logits, roll(self.embed(tokens))), -1))


def test_tokens_two_ahead():
    torch.manual_seed(0)
    model = TwoAhead().double()
    alone = copy.deepcopy(model)
    both = alone(TOKENS, torch.arange(LENGTH), lambda x: x.roll(-1, 1))
    one, two = (
        nn.functional.cross_entropy(logits.flatten(0, 1), next_token_labels(LABELS, shift=ahead).flatten())
        for ahead, logits in enumerate(both, 1)
    )
    expected = one + 0.3 * two
    expected.backward()
    code = example("two ahead")

    def on(rank: int) -> float:
        mine, mesh = copy.deepcopy(model), cp_mesh(3)
        parallelize_module(mine, mesh, ModuleContextParallel())
        names: dict[str, Any] = {"BatchSharder": BatchSharder, "mesh": mesh}
        names["tokens"] = {"input_ids": TOKENS, "labels": LABELS}
        names["model"] = partial(mine, roll=lambda x: context_roll(x, -1, 1, mesh))
        exec(code, names)
        loss, batch = names["loss"], names["batch"]
        loss.backward()
        names["sharder"].sum_gradients(mine)
        assert list(batch.inputs) == ["input_ids", "position_ids"]
        with pytest.raises(ValueError, match=r"no labels of the token 3 ahead.*predicted=3"):
            batch.loss(names["second"], ahead=3)
        return max(error(loss.detach(), expected.detach()), error(gradients(mine), gradients(alone)))

    assert max(run_ranks(on, 3)) < EXACT


def test_batches_that_are_accumulated_over_two_axes():
    """Two micro-batches with other numbers of labels, rows over dp, and a reducer that averages over all ranks."""
    model, batches = language_model(40, LENGTH), [(TOKENS, TOKENS), (TOKENS.flip(1), LABELS)]
    alone = copy.deepcopy(model)
    losses = [
        nn.functional.cross_entropy(
            alone(tokens, torch.arange(LENGTH)).flatten(0, 1), next_token_labels(labels).flatten(), reduction="sum"
        )
        for tokens, labels in batches
    ]
    count = sum((next_token_labels(labels) != -100).sum() for _, labels in batches)
    (sum(losses) / count).backward()

    def on(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        row = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
        mine, both = copy.deepcopy(model), mesh["dp", "cp"]._flatten("dp_cp")
        parallelize_module(mine, mesh["cp"], ModuleContextParallel())
        sharder = BatchSharder(mesh["cp"], loss_mesh=both, averaged_over=4)
        parts = [sharder({"input_ids": tokens[row], "labels": labels[row]}) for tokens, labels in batches]
        count = sum(part.token_count() for part in parts)
        for part in parts:
            part.loss(mine(part.tokens, part.positions), token_count=count).backward()
        with pytest.raises(ValueError, match="averaged_over=4 means that DDP or FSDP2 reduces"):
            sharder.sum_gradients(mine)
        found = gradients(mine)
        dist.all_reduce(found, group=both.get_group())
        return error(found / 4, gradients(alone))

    assert max(run_ranks(on, 4)) < EXACT


def test_a_loss_of_16_bit_logits_is_taken_in_float32():
    def on(rank: int) -> tuple[torch.Tensor, Any]:
        batch = BatchSharder(cp_mesh(2))(TOKENS)
        logits = torch.randn(ROWS, batch.tokens.shape[1], 40, generator=torch.Generator().manual_seed(rank))
        for odd in (logits[:, 1:], logits[0]):
            with pytest.raises(ValueError, match=r"not one row for each of this rank's tokens \(2, "):
                batch.loss(odd)
        with pytest.raises(TypeError, match=r"got tuple: take them out of what the model returns"):
            batch.loss((logits, None))  # pyright: ignore[reportArgumentType]
        half = logits.bfloat16()
        assert batch.inputs.keys() == {"input_ids", "position_ids"}
        return batch.loss(half), batch.loss(half.float())

    assert all(torch.equal(*pair) and pair[0].dtype == torch.float32 for pair in run_ranks(on, 2))


def test_documents_and_padding():
    """The padding is a document of its own, so that no mask of padding is needed."""

    def on(rank: int) -> Any:
        batch = BatchSharder(cp_mesh(2), pad_to_multiple_of=8)({"input_ids": TOKENS, "document_ids": IDS[:1]})
        with pytest.raises(ValueError, match="the batch has no labels"):
            batch.token_count()
        return batch, batch.scope().mask

    parts, masks = zip(*run_ranks(on, 2), strict=True)
    assert masks == (Documents((4, 9, 3)),) * 2
    assert whole(parts, "position_ids")[1].tolist() == [*range(4), *range(9), *range(3)]
    assert "attention_mask" not in parts[0]
    assert "document_ids of (2, 12)" in refusal_of(lambda _: {"input_ids": TOKENS, "document_ids": IDS[:, 1:]})
    assert "ranks [1]" in refusal_of(lambda rank: {"input_ids": TOKENS, "document_ids": IDS + (rank == IDS)})


def refused(words: str, batches: list[Any], **options: Any) -> None:
    """An error on every rank; one of them says why."""
    ranks = len(batches)
    with every_rank_raises(words, ranks) as found:
        run_ranks(lambda rank: BatchSharder(cp_mesh(ranks), **options)(batches[rank]), ranks)
    assert all(isinstance(error, ValueError) for error in found.value.errors.values())


def test_other_samples_are_every_ranks_error():
    good = {"input_ids": TOKENS, "labels": LABELS}
    other = TOKENS.clone()
    other[1, 4] += 1
    refused(r"disagree on the samples \(input_ids\): ranks \[2\] differ", [good, good, good | {"input_ids": other}])
    refused(r"disagree on the samples \(.*: ranks \[1\] differ", [good, good | {"labels": other}])
    refused(
        r"disagree on the samples \(.*: ranks \[1\] differ", [good, {"input_ids": TOKENS[:1], "labels": LABELS[:1]}]
    )
    swapped = {"input_ids": LABELS, "labels": TOKENS}
    refused(r"disagree on the samples \(.*: ranks \[1\] differ", [good, swapped])


def test_batches_that_cannot_be_cut():
    good = {"input_ids": TOKENS}
    refused(
        r"the batch needs input_ids \[B, S\] or inputs_embeds, and has \['pixel_values'\]",
        [good, {"pixel_values": TOKENS}],
    )
    refused(r"labels of shape \(2,\) are not one for each of 13 tokens", [good | {"labels": TOKENS[:, 0]}] * 2)
    refused(r"the sequence dim of \['weights'\] is not known", [good | {"weights": TOKENS}] * 2)
    parts = cut(good | {"weights": TOKENS}, seq_dims={"weights": 1})
    assert torch.equal(whole(parts, "weights"), TOKENS)

    def fails(samples: Any) -> Any:
        raise KeyError("text")

    with every_rank_raises("text"):
        run_ranks(lambda rank: BatchSharder(cp_mesh(2), positions=fails if rank else torch.ones_like)(good), 2)


def refusal_of(batch_of: Any, **options: Any) -> str:
    """What rank 0 says of batches that ``batch_of(rank)`` makes; all ranks must refuse."""

    def on(rank: int) -> None:
        BatchSharder(cp_mesh(2), **options)(batch_of(rank))

    errors = run_ranks(on, 2, return_errors=True)
    assert all(isinstance(error, ValueError) for error in errors), errors
    return str(errors[0])


NESTED = {
    "a dict": lambda rank: {"pixels": torch.full((2, 3), float(rank))},
    "a list": lambda rank: [torch.zeros(2), torch.full((2,), rank)],
    "numbers": lambda rank: [1, 2.5, (rank, "a")],
    "text": lambda rank: f"image {rank}",
    "numpy": lambda rank: torch.full((2,), rank).numpy(),
    "types": lambda rank: [1, "1"][rank],
    "order": lambda rank: [(1, 2), (2, 1)][rank],
}


@pytest.mark.parametrize("kind", NESTED)
def test_entries_that_are_no_tensors_are_compared(kind: str):
    entry = NESTED[kind]
    assert "ranks [1]" in refusal_of(lambda rank: {"input_ids": TOKENS, "images": entry(rank)})
    for rank, part in enumerate(cut({"input_ids": TOKENS, "images": (same := entry(0))}, 2)):
        assert part["images"] is same, rank


def test_objects_are_not_compared_by_where_they_are():
    run_ranks(lambda _: BatchSharder(cp_mesh(2))({"input_ids": TOKENS, "tag": [object()]}), 2)


def test_lists_and_masks_by_kind_of_layer():
    lists = {"input_ids": TOKENS, "labels": LABELS.tolist()}
    assert 'batch["labels"] is a list, and must be a tensor: torch.tensor(...)' in refusal_of(lambda _: lists)
    assert 'batch["attention_mask"] is a list' in refusal_of(lambda _: {"input_ids": TOKENS, "attention_mask": [1]})
    assert refusal_of(lambda _: {"input_ids": TOKENS.tolist()}).count('batch["input_ids"] is a list') == 1
    cut({"input_ids": TOKENS, "labels": torch.tensor(LABELS.tolist())}, 2)  # as the error says
    masks = {"full_attention": torch.ones(ROWS, 1, LENGTH, LENGTH).tril()}
    assert all(part["attention_mask"] is masks for part in cut({"input_ids": TOKENS, "attention_mask": masks}, 2))
    padded = refusal_of(lambda _: {"input_ids": TOKENS, "attention_mask": masks}, pad_to_multiple_of=8)
    assert "attention_mask that is a dict cannot be padded" in padded
    other = {"full_attention": torch.ones(ROWS, 1, LENGTH, LENGTH)}
    assert "ranks [1]" in refusal_of(lambda rank: {"input_ids": TOKENS, "attention_mask": other if rank else masks})


def test_rows_in_another_order_are_other_samples():
    rows = TOKENS[[0, 1, 1, 0]]
    assert "ranks [1]" in refusal_of(lambda rank: {"input_ids": rows[[1, 0, 0, 1]] if rank else rows[:]})


def test_a_layout_for_another_number_of_ranks():
    text = refusal_of(lambda _: {"input_ids": TOKENS}, layout=head_tail(LENGTH, 4))
    assert "the layout cuts the sequence for 4 ranks, mesh axis 'cp' has 2" in text
    longer = refusal_of(lambda _: {"input_ids": TOKENS}, layout=head_tail(LENGTH - 2, 2))
    assert f"the layout cuts {LENGTH - 2} positions, the batch has {LENGTH} tokens: give layout=head_tail" in longer


@pytest.mark.parametrize("options", [{}, {"shift": False}])
def test_labels_below_zero_are_no_classes(options: dict[str, Any]):
    labels = LABELS.masked_fill(LABELS < 0, -1)
    text = refusal_of(lambda _: {"input_ids": TOKENS, "labels": labels}, **options)
    assert "labels has values below 0 that are not -100" in text
    cut({"input_ids": TOKENS, "labels": labels.masked_fill(labels < 0, -100)}, 2, **options)
    cut({"input_ids": TOKENS, "labels": -TOKENS.double()}, 2, shift=False)  # targets of a regression


def test_tokens_of_small_dtypes():
    tokens, labels = TOKENS.to(torch.uint8), LABELS.to(torch.int8)
    parts = cut({"input_ids": tokens, "labels": tokens}, 2)
    assert whole(parts, "shift_labels")[:, -1].tolist() == [-100] * ROWS
    padded = cut({"input_ids": tokens, "labels": labels}, 2, pad_to_multiple_of=8)
    assert (whole(padded, "labels")[:, LENGTH:] == -100).all()
    text = refusal_of(lambda _: {"input_ids": tokens, "labels": tokens}, pad_to_multiple_of=8)
    assert '"labels" of dtype torch.uint8 is padded with -100' in text


def test_a_worker_process_cannot_compare(monkeypatch):
    monkeypatch.setattr(module_of_sharder, "get_worker_info", object)
    with pytest.raises(RankError, match="in a worker process of a DataLoader"):
        cut({"input_ids": TOKENS})


def test_results_are_put_together_without_the_padding():
    def on(rank: int) -> torch.Tensor:
        sharder = BatchSharder(cp_mesh(3), pad_to_multiple_of=8)
        part = sharder({"input_ids": TOKENS})
        return sharder.whole_of(part["input_ids"].double(), {"input_ids": TOKENS})

    assert all(torch.equal(each, TOKENS.double()) for each in run_ranks(on, 3))


def test_the_function_for_nemo():
    code = example("nemo")

    def on(rank: int) -> dict[str, Any]:
        names = {"BatchSharder": BatchSharder, "contextlib": contextlib}
        exec(code, names)
        context, part = names["shard_batch"](cp_mesh(2), None, {"input_ids": TOKENS}, loss_mask=ONES.cumsum(1))
        with context():
            return part

    parts = run_ranks(on, 2)
    assert torch.equal(whole(parts, "loss_mask"), ONES.cumsum(1))
    assert torch.equal(whole(parts, "input_ids"), TOKENS)


def test_share_batches():
    def loader(processes: int) -> Any:
        sampler = SimpleNamespace(num_processes=processes, process_index=3, even_batches=True)
        return SimpleNamespace(batch_sampler=sampler, dataset=[])

    def on(rank: int) -> list[Any]:
        shared = [share_batches(loader(4), num_replicas=2, rank=1), share_batches(loader(4), num_replicas=1, rank=0)]
        share_batches(shared[0], num_replicas=2, rank=1)  # again
        for odd in (loader(1), SimpleNamespace(batch_sampler=None, dataset=[])):
            with pytest.raises(ValueError, match="is not a loader that accelerate shares among 4"):
                share_batches(odd, num_replicas=2, rank=0)
        return [vars(each.batch_sampler) for each in shared]

    two, one = run_ranks(on, 4)[0]
    assert two == {"num_processes": 2, "process_index": 1, "even_batches": True}
    assert one == {"num_processes": 1, "process_index": 0, "even_batches": False}


class Pooling(nn.Module):
    """As a classifier of transformers: a dict with logits of sequences; or with the balance of its experts."""

    def __init__(self, **output: Any) -> None:
        super().__init__()
        self.output = output

    def loss_function(self) -> None: ...

    def forward(self, input_ids, position_ids=None, labels=None, shift_labels=None, num_items_in_batch=None):
        q = input_ids[:, None, :, None].double().expand(-1, 2, -1, 8)
        out = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return {"logits": out.transpose(1, 2).flatten(2)} | self.output


def forward(model: nn.Module, **changes: Any) -> Any:
    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        mine = parallelize_module(copy.deepcopy(model), mesh, ModuleContextParallel())
        part = BatchSharder(mesh)({"input_ids": TOKENS, "labels": LABELS})
        mine(**part | {name: value(rank) for name, value in changes.items()})

    return run_ranks(on, 2, return_errors=True)


def test_results_of_a_part_are_refused():
    count = lambda rank: 7  # noqa: E731
    assert forward(Pooling(), num_items_in_batch=count) == [None, None]
    errors = forward(Pooling(aux_loss=torch.zeros(())), num_items_in_batch=count)
    assert all("the balance of experts on this rank's tokens alone" in str(each) for each in errors)


def test_labels_that_are_shifted_already():
    """As programs have them that cut x and y out of one text."""
    text = torch.arange(26).view(2, 13) * 5 % 11
    x, y = text[:, :-1], text[:, 1:].clone()
    minus_one = y.clone()
    minus_one[0, 3] = -1  # nanoGPT's label for no label

    def on(rank: int) -> torch.Tensor:
        sharder = BatchSharder(cp_mesh(2))
        for batch, words in (
            ({"x": x, "y": y}, '"shift_labels": y'),
            ({"input_ids": x, "labels": y}, "shifted once more"),
            ({"input_ids": x, "labels": minus_one}, r'"shift_labels": labels.masked_fill\(labels < 0, -100\)'),
        ):
            with pytest.raises(ValueError, match=words):
                sharder(batch)
        sharder({"input_ids": x, "labels": x})
        part = sharder({"input_ids": x, "shift_labels": y})
        assert torch.equal(part["shift_labels"], part.layout.shard(y, 1, rank))
        return part["shift_labels"]

    assert run_ranks(on, 2)[0].numel() == 12


class Bidirectional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)

    def forward(self, tokens):
        x = self.table(tokens)[:, None]
        return F.scaled_dot_product_attention(x, x, x)[:, 0] @ self.table.weight.T


def test_padding_beside_attention_that_is_not_causal():
    """The documents of the batch hide it, in its scope."""
    model, tokens = Bidirectional().double(), torch.arange(22).view(2, 11) * 5 % 11
    model.table.weight.data = randn(0, 11, 8)
    one = copy.deepcopy(model)
    F.cross_entropy(one(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    def on(rank: int) -> float:
        mesh, mine = cp_mesh(2), copy.deepcopy(model)
        parallelize_module(mine, mesh, ModuleContextParallel())
        sharder = BatchSharder(mesh, pad_to_multiple_of=8)
        batch = sharder({"input_ids": tokens, "labels": tokens, "document_ids": torch.zeros(11, dtype=torch.int64)})
        with batch.scope():
            logits = mine(batch.tokens)
        batch.loss(logits).backward()
        sharder.sum_gradients(mine)
        return error(mine.table.weight.grad, one.table.weight.grad)

    assert max(run_ranks(on, 2)) < EXACT


class PositionTable(nn.Embedding):
    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(torch.arange(tokens.shape[1]) if position_ids is None else position_ids)


class WithTable(nn.Module):
    """A model of the user's own that takes tokens, and whose table of positions is like a table of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.attention = nn.Embedding(40, 8), PositionTable(64, 8), Documented("no scope")

    def forward(self, input_ids: torch.Tensor, pos: torch.Tensor | None = None) -> torch.Tensor:
        return (
            self.tokens(input_ids) + self.places(input_ids, position_ids=pos) + 0 * self.attention(input_ids)[..., :8]
        )


def test_positions_of_a_document_that_begins_with_a_part():
    """They count from 0 by right, and are not taken for a count of the model's."""
    tokens, ids = torch.arange(20)[None] % 40, torch.arange(20)[None] // 10
    model = WithTable().double()
    wanted = model.tokens(tokens) + model.places(tokens, torch.arange(20)[None] % 10)

    def on(rank: int) -> torch.Tensor:
        mine = parallelize_module(copy.deepcopy(model), cp_mesh(2), ModuleContextParallel(layout=contiguous))
        batch = BatchSharder(cp_mesh(2), layout=contiguous)(
            {"input_ids": tokens, "labels": tokens, "document_ids": ids}
        )
        with batch.scope(), torch.no_grad():
            return mine(batch["input_ids"], batch["position_ids"])

    assert error(torch.cat(run_ranks(on, 2), 1), wanted.detach()) < EXACT
