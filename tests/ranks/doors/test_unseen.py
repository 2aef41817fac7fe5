"""Attention that is called without Python raises an error if it can be detected. It would be local to each rank."""

from __future__ import annotations

import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import ModuleContextParallel, SequenceLayout, contiguous, head_tail
from cp_styles.collectives import gather
from cp_styles.testing import RankError, run_ranks
from cp_styles.torch_api import context_parallel
from tests.covering import sampled
from tests.oracle import attention_inputs, error, randn
from tests.ranks.attention_case import EXACT, cp_mesh, on_every_rank

LENGTH = 12

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated, and used all the same

    @torch.jit.script
    def scripted(query, key, value):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    @torch.jit.script
    def harmless(x):
        return torch.nn.functional.gelu(x)

    class Attend(nn.Module):
        def forward(self, query, key, value):
            return F.scaled_dot_product_attention(query, key, value)

    scripted_module = torch.jit.script(Attend())

hidden = [scripted]  # where nobody looks for it


class Named(nn.Module):
    def forward(self, *tensors):
        return scripted(*tensors).sum() + F.scaled_dot_product_attention(*tensors).sum()


class Hidden(nn.Module):
    def forward(self, *tensors):
        seen = F.scaled_dot_product_attention(*tensors).transpose(1, 2).flatten(2)
        return harmless(hidden[0](*tensors)) * seen


class Below(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = scripted_module

    def forward(self, *tensors):
        return self.below(*tensors)


class Fine(nn.Module):
    def forward(self, *tensors):
        return harmless(F.scaled_dot_product_attention(*tensors))


def results(act, ranks: int = 2):
    inputs, _ = attention_inputs(length=LENGTH, batch=1)
    layout = contiguous(LENGTH, ranks)

    def on(rank: int):
        tensors = [layout.shard(x, 2, rank).clone().requires_grad_() for x in inputs]
        # What came before the module is not its: the rank's own, on purpose perhaps.
        tensors[0] = scripted_module(*tensors)
        return act(cp_mesh(ranks), *tensors)

    return run_ranks(on, ranks)


def by_module(module: nn.Module, mesh, *tensors):
    return parallelize_module(module, mesh, ModuleContextParallel(layout=contiguous))(*tensors)


def by_block(module: nn.Module, mesh, *tensors):
    with context_parallel(mesh, layout=contiguous):
        return module(*tensors).sum()


@pytest.mark.parametrize(
    ("door", "module", "message"),
    [
        (by_module, Named, "scripted is TorchScript with attention in it"),
        (by_module, Below, "RecursiveScriptModule is TorchScript with attention in it"),
        (by_module, Hidden, "was not intercepted, and saw this rank's part alone: TorchScript"),
        (by_block, Named, "was not intercepted, and saw this rank's part alone: TorchScript"),
        (by_block, Hidden, "was not intercepted, and saw this rank's part alone: TorchScript"),
        (by_block, Below, "was not intercepted, and saw this rank's part alone: TorchScript"),
    ],
)
def test_torchscript(door, module, message: str):
    with pytest.raises(RankError) as caught:
        results(lambda *args: door(module(), *args))
    assert str(caught.value).count(message) == 2, str(caught.value)


@pytest.mark.parametrize("door", [by_module, by_block])
def test_torchscript_without_attention(door):
    results(lambda *args: door(Fine(), *args))


def product(query, key, value, **how):
    """Attention as it is often written out."""
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if how.get("masked"):
        length = query.shape[-2]
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, how.get("dropout", 0.0)) @ value


class Beside(nn.Module):
    """Another computation beside an attention call."""

    def __init__(self, act) -> None:
        super().__init__()
        self.act = act

    def forward(self, query, key, value):
        x = F.scaled_dot_product_attention(query, key, value)
        return self.act(x, *(each * 1.0 for each in (query, key, value))).flatten(1).sum(1)


PLAIN = {
    "as it is": lambda x, q, k, v: product(q, k, v),
    "masked": lambda x, q, k, v: product(q, k, v, masked=True),
    "with dropout": lambda x, q, k, v: product(q, k, v, dropout=0.1),
    "of what the call gave": lambda x, q, k, v: product(x * 2, x * 3, x),
    "einsum": lambda x, q, k, v: torch.einsum("bhlm,bhmd->bhld", torch.einsum("bhld,bhmd->bhlm", q, k).softmax(-1), v),
    "one head": lambda x, q, k, v: product(q[0, 0], k[0, 0], v[0, 0])[None],
}


@pytest.mark.parametrize("door", [by_module, by_block])
@pytest.mark.parametrize("how", PLAIN)
def test_attention_in_plain_ops(door, how: str):
    """Beside a call that is seen, it would be local to each rank."""
    with pytest.raises(RankError) as caught:
        results(lambda *args: door(Beside(PLAIN[how]), *args))
    assert (
        len(re.findall("carries values from token to token without an attention call: b?mm at", str(caught.value))) == 2
    )


def test_attention_in_plain_ops_that_one_rank_cannot_see():
    """A rank with one token hears of it from the others."""
    inputs, _ = attention_inputs(length=4, batch=1)
    layout = SequenceLayout.from_chunks([[(0, 3)], [(3, 4)]])

    def on(rank: int):
        model = nn.Sequential(Beside(PLAIN["of what the call gave"]))
        parallelize_module(model, cp_mesh(2), {"0": ModuleContextParallel(layout=layout)})
        tensors = [layout.shard(x, 2, rank).clone().requires_grad_() for x in inputs]
        model[0](*tensors).sum().backward()

    with pytest.raises(RankError) as caught:
        run_ranks(on, 2, timeout_seconds=20)
    assert "0: NotImplementedError: Beside" in str(caught.value)
    assert "ranks [0] of mesh axis 'cp' refused the attention inside" in str(caught.value)


def slots(*shape: int) -> nn.Parameter:
    return nn.Parameter(randn(7, *shape))


# On this rank 6 tokens, and 6 of everything else that can be mistaken for them.
FINE = {
    "a router over 6 experts": lambda x, q, k, v: (q @ slots(4, 8, 6)).softmax(-1) @ slots(4, 6, 8),
    "a router's linear": lambda x, q, k, v: F.linear(q[0, 0], slots(6, 8)).softmax(-1)[None] @ slots(6, 8),
    "6 learned slots": lambda x, q, k, v: product(q, *(F.layer_norm(slots(4, 6, 8), (8,)) for _ in range(2))),
    "6 other things at each token": lambda x, q, k, v: product(
        *(F.linear(each.transpose(1, 2), slots(48, 8)).view(1, 6, 4, 6, 8) for each in (q, k, v))
    ),
    "a softmax of features": lambda x, q, k, v: q.softmax(-1) * v,
    "products without a softmax": lambda x, q, k, v: q @ slots(4, 8, 6) @ slots(4, 6, 8),
}


@pytest.mark.parametrize("door", [by_module, by_block])
@pytest.mark.parametrize("how", FINE)
def test_what_is_no_attention(door, how: str):
    """By shapes alone it might be."""
    results(lambda *args: door(Beside(FINE[how]), *args))


def plainly(q, k, v):
    return torch.softmax(q @ k.mT / 2, -1) @ v


def by_functions(q, k, v):
    weights = F.softmax(torch.matmul(q, k.mT), dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, 0.0), v)


@pytest.mark.parametrize("attend", [plainly, by_functions])
@pytest.mark.parametrize("cut", ["buffers", "shard"])
@on_every_rank(2, timeout_seconds=20)
def test_a_block_in_which_all_attention_is_in_plain_ops(mesh, rank: int, attend, cut: str):
    """Without gradients too, and not in the first block only."""
    layout, whole = head_tail(9, 2), randn(0, 1, 2, 9, 3)
    for _ in range(2):
        x = whole.clone() if cut == "buffers" else layout.shard(whole, 2, rank)
        given = {"buffers": [x], "buffer_seq_dims": [2]} if cut == "buffers" else {}
        with (
            torch.no_grad(),
            pytest.raises(NotImplementedError, match="carries values from token to token without an attention call"),
            context_parallel(mesh, **given),
        ):
            attend(x, x, x)


@pytest.mark.parametrize("before", [False, True], ids=["never any", "after attention"])
def test_blocks_without_attention(before: bool, recwarn):
    """A loss, a router, attention over heads: right. If there never was attention, there is a warning."""
    logits, labels = randn(0, 1, 8, 5), torch.arange(8)[None] % 5

    def on(rank: int) -> None:
        mesh, given, wanted = cp_mesh(2), logits.clone(), labels.clone()
        if before:
            with context_parallel(mesh):
                F.scaled_dot_product_attention(*[randn(3, 1, 2, 4, 4)] * 3)
        with context_parallel(mesh, buffers=[given, wanted], buffer_seq_dims=[1, 1]), torch.no_grad():
            F.cross_entropy(given.flatten(0, 1), wanted.flatten())
            torch.softmax(given[0] @ randn(1, 5, 4), -1) @ randn(2, 4, 3)  # as many experts as tokens
            heads = given[:, :, None, :].expand(-1, -1, 4, -1)
            torch.softmax(heads @ heads.mT, -1) @ heads

    run_ranks(on, 2, timeout_seconds=20)
    texts = [str(each.message) for each in recwarn if "no attention was called inside" in str(each.message)]
    assert bool(texts) is not before


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("mixes", [False, True])
def test_a_layer_that_mixes_tokens_in_a_block(mixes: bool, gradients: bool):
    whole = randn(0, 1, 8, 4)

    def model(x):
        if mixes:
            x = F.conv1d(x.mT, randn(1, 4, 4, 3), padding=1).mT
        return F.scaled_dot_product_attention(*[F.layer_norm(x, [4])[:, None]] * 3)

    def on(rank: int) -> torch.Tensor:
        x = whole.clone()
        with torch.set_grad_enabled(gradients), context_parallel(cp_mesh(2), buffers=[x], buffer_seq_dims=[1]):
            return model(x)

    if mixes:
        with pytest.raises(RankError, match=r"(?s)rank 0: NotImpl.* convolution at .*rank 1: NotImplementedError"):
            run_ranks(on, 2, timeout_seconds=20)
    else:
        assert error(head_tail(8, 2).unshard(run_ranks(on, 2, timeout_seconds=20), 2), model(whole)) < EXACT


@pytest.mark.parametrize("named", [False, True])
def test_a_table_whose_first_rows_a_model_takes_in_a_block(named: bool):
    """Refused; exact with its rows of the whole sequence among the buffers, as the error says."""
    whole, table = randn(0, 1, 8, 4), randn(1, 64, 4)

    def model(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = (x + table[: x.shape[1]])[:, None]
        return F.scaled_dot_product_attention(x, x, x)

    def on(rank: int) -> torch.Tensor:
        x, rows = whole.clone(), table.clone()
        buffers = [x, rows[:8]] if named else [x]
        with context_parallel(cp_mesh(2), buffers=buffers, buffer_seq_dims=[1, 0][: len(buffers)]):
            return model(x, buffers[-1] if named else rows)

    if named:
        assert error(head_tail(8, 2).unshard(run_ranks(on, 2, timeout_seconds=20), 2), model(whole, table)) < EXACT
        return
    with pytest.raises(RankError, match=r"name the table in its buffers") as caught:
        run_ranks(on, 2, timeout_seconds=20)
    assert caught.value.errors.keys() == {0, 1}


class Last(nn.Module):
    """What follows the last attention of a model: ``act``."""

    def __init__(self, act) -> None:
        super().__init__()
        self.act = act

    def forward(self, x):
        heads = x[:, None]
        return self.act(F.scaled_dot_product_attention(heads, heads, heads)[:, 0])


TABLE = randn(5, 64, 4)
AROUND = {
    "convolution behind": (lambda x: F.conv1d(x.mT, randn(1, 4, 4, 3), padding=1).mT, "convolution at"),
    "statistics behind": (lambda x: x - x.mean(1, keepdim=True), "mean at"),
    "rows of a table": (lambda x: x + TABLE[: x.shape[1]], "takes the first 4 rows of a table of 64 at"),
    "counted": (lambda x: x * torch.arange(x.shape[1])[:, None].cos(), "makes the numbers 0 to 3 inside at"),
    "TorchScript behind": (lambda x: hidden[0](*[x[:, None]] * 3), "TorchScript calls operators without Python"),
    "nothing": (lambda x: F.layer_norm(x, [4]), None),
}


@sampled(1, how=AROUND, blocks=[1, 2, (3, 4), (5, 6)], gradients=[True, False])
def test_behind_the_last_attention_of_a_block(how: str, gradients: bool, blocks: int | tuple[int, int]):
    """Found where the loss reads it: in the first block over these ranks, the second, the fourth. A model that is new
    in one between them is found in the next one."""
    act, words = AROUND[how]
    whole, labels = randn(0, 1, 8, 4), torch.arange(8)[None] % 4
    first, last = blocks if isinstance(blocks, tuple) else (blocks, blocks)
    entered = [0, 0]

    def on(rank: int) -> torch.Tensor:
        mesh, losses, good, bad = cp_mesh(2), [], Last(torch.tanh), Last(act)
        for number in range(1, last + 1):
            entered[rank] = number
            x, wanted = whole.clone(), labels.clone()
            model = bad if number >= first else good
            cut = context_parallel(mesh, buffers=[x, wanted], buffer_seq_dims=[1, 1])
            with torch.set_grad_enabled(gradients), cut:
                logits = model(x)
                count = (wanted >= 0).sum()
                dist.all_reduce(count)
                losses.append((F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none") / count).sum())
        return losses[-1].detach()

    if words is None:
        wanted = F.cross_entropy(Last(act)(whole).flatten(0, 1), labels.flatten())
        assert error(sum(run_ranks(on, 2, timeout_seconds=20)), wanted) < EXACT
        return
    with pytest.raises(RankError) as caught:
        run_ranks(on, 2, timeout_seconds=20)
    errors = list(caught.value.errors.values())
    assert all(isinstance(each, NotImplementedError) for each in errors)
    assert words in str(errors[1])
    assert entered == [last, last]


class Choosing(Last):
    """A classifier: ``choose`` gives one row for each sequence. ``all_of`` gathers the hidden states."""

    def __init__(self, act, choose, *, has_loss: bool = False) -> None:
        super().__init__(act)
        self.choose, self.has_loss = choose, has_loss

    def forward(self, x, all_of=lambda x: x, logits_to_keep=0):
        logits = self.choose(all_of(super().forward(x)))
        return F.cross_entropy(logits, CLASSES) if self.has_loss else logits


CLASSES = torch.arange(2)
CHOICES = {
    "first": lambda x: x[:, 0],
    "last": lambda x: x[:, -1:].flatten(1),
    "largest": lambda x: x[CLASSES, x.sum(-1).argmax(1)],
    "gathered": lambda x: x.gather(1, x.sum(-1).argmax(1)[:, None, None].expand(-1, 1, 4))[:, 0],
}


@pytest.mark.parametrize("how", CHOICES)
def test_a_classifier_that_chooses_a_token_in_a_block(how: str):
    """Refused, with the loss in the model and behind it, and exact as the error says."""
    whole = randn(0, 2, 8, 4)

    def on(rank: int, has_loss: bool = False, remedy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        mesh, x, weight = cp_mesh(2), whole.clone(), randn(1, 4, 4).requires_grad_()
        all_of = partial(gather, dim=1, group=mesh, layout=head_tail(8, 2), reduce_gradients=True)
        model = Choosing(lambda x: x @ weight, CHOICES[how], has_loss=has_loss)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            out = model(x, all_of) if remedy else model(x)
            loss = (out if has_loss else F.cross_entropy(out, CLASSES)) / mesh.size()
            loss.backward()
        dist.all_reduce(weight.grad)
        return loss.detach() * mesh.size(), weight.grad

    for has_loss in (False, True):
        errors = run_ranks(partial(on, has_loss=has_loss), 2, timeout_seconds=20, return_errors=True)
        for each in errors:
            assert re.search(r"but which it has chosen at \S+test_unseen.py:\d+: it has pooled them", str(each)), errors
    weight = randn(1, 4, 4).requires_grad_()
    wanted = F.cross_entropy(Choosing(lambda x: x @ weight, CHOICES[how])(whole), CLASSES)
    wanted.backward()
    for loss, gradient in run_ranks(partial(on, remedy=True), 2, timeout_seconds=20):
        assert error(loss, wanted.detach()) < EXACT
        assert error(gradient, weight.grad) < EXACT


def of_chunks(size: int, head, x: torch.Tensor) -> torch.Tensor:
    return sum(head(x[:, at : at + size]).square().sum() for at in range(0, x.shape[1], size))


class Row(nn.Module):
    def forward(self, x):
        return x[:, 0]


NO_CHOICES = {
    "row by row": lambda model, x: of_chunks(1, nn.Identity(), model(x)),
    "a head for each chunk": lambda model, x: of_chunks(3, nn.Sequential(nn.Tanh()), model(x)),
    "a row that is printed": lambda model, x: float(model(x)[:, -1].square().sum()),
    "logits that are asked for": lambda model, x: Choosing(torch.tanh, CHOICES["last"])(x, logits_to_keep=1).sum(),
    "chunks in the model": lambda model, x: Choosing(torch.tanh, lambda x: of_chunks(3, torch.tanh, x))(x).sum(),
    "rows in the model": lambda model, x: Choosing(torch.tanh, lambda x: of_chunks(1, torch.tanh, x))(x).sum(),
    "rows whose labels count": lambda model, x: Choosing(torch.tanh, lambda x: x[MASK])(x).square().sum(),
    "stacked again": lambda model, x: Choosing(
        torch.tanh, lambda x: torch.stack([x[:, token].sin() for token in range(4)], 1)
    )(x)[:, 0].sum(),
    "no batch": lambda model, x: Choosing(torch.tanh, lambda x: x.flatten(0, 1)[:2])(x).square().sum(),
    "a row of a row": lambda model, x: Row()(model(x)[:, :1]).square().sum(),
    "features": lambda model, x: Choosing(torch.tanh, lambda x: x[..., :2])(x).square().sum(),
}
MASK = torch.tensor([[False, True, False, False], [False, False, False, True]])


@pytest.mark.parametrize("how", NO_CHOICES)
@on_every_rank(2, timeout_seconds=20)
def test_rows_of_tokens_that_are_no_classifier(mesh, rank: int, how: str):
    x = randn(0, 2, 8, 4)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        NO_CHOICES[how](Last(torch.tanh), x)
