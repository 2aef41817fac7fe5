"""What users of other packages reported of theirs, tried here."""

from __future__ import annotations

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from cp_styles import (
    BatchSharder,
    Causal,
    context_attention,
    contiguous,
    head_tail,
    parallelize_module,
    sum_gradients,
)
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from cp_styles.testing import RankError, run_ranks
from cp_styles.torch_api import context_parallel
from tests.first_hours import nanogpt
from tests.oracle import error, randn
from tests.pages import example
from tests.ranks.attention_case import EXACT, Problem, cp_mesh, run_attention
from tests.ranks.doors import test_module_sinks
from tests.tiny_lm import LanguageModel, language_model

PROBLEM = Problem(length=13)
HELD = partial(F.scaled_dot_product_attention, is_causal=True)


class Held(nn.Module):
    def forward(self, query, key, value):
        return HELD(query, key, value)


@pytest.mark.parametrize("style", [AttentionContextParallel, ModuleContextParallel])
def test_a_function_held_since_import_and_deterministic_algorithms(style):
    def on(rank: int) -> float:
        core = parallelize_module(Held(), cp_mesh(2), style())
        return max(run_attention(core, PROBLEM, rank, 2))

    torch.use_deterministic_algorithms(True)  # of the process: before there are threads
    try:
        assert max(run_ranks(on, 2)) < EXACT
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*no attention, mixer or collective of this package ran")
@pytest.mark.parametrize("labelled", [range(2), range(0)], ids=["rank 0 alone", "none"])
def test_ranks_without_labels(labelled: range):
    """The mean is over those that there are; without any it is nan on all ranks, as on one device."""
    tokens = torch.arange(13).view(1, 13) % 7
    labels = torch.where(torch.isin(torch.arange(13), torch.tensor([*labelled, -1]) + 1), tokens, -100)
    table = nn.Embedding(7, 7).double()
    table.weight.data = randn(0, 7, 7)
    one = copy.deepcopy(table)
    expected = F.cross_entropy(one(tokens)[0, :-1], labels[0, 1:])
    expected.backward()

    def on(rank: int) -> None:
        mine, sharder = copy.deepcopy(table), BatchSharder(cp_mesh(2), layout=contiguous)
        batch = sharder({"input_ids": tokens, "labels": labels})
        loss = batch.loss(mine(batch.tokens))
        loss.backward()
        sharder.sum_gradients(mine)
        if labelled:
            assert max(error(loss.detach(), expected.detach()), error(mine.weight.grad, one.weight.grad)) < EXACT
        else:
            assert bool(loss.isnan()) is bool(expected.isnan()) is True

    run_ranks(on, 2)


class Fused(nanogpt.GPT):
    """Its head and its loss are one function, a chunk at a time: the logits of all tokens never exist at once."""

    def hidden(self, tokens, positions):
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens, positions, targets=None):
        return self.loss(self.hidden(tokens, positions), tokens.roll(-1, 1) if targets is None else targets)

    def loss(self, x, targets):
        losses = []
        for part, chosen in zip(x.flatten(0, 1).split(5), targets.flatten().split(5), strict=True):
            logits = self.head(part)
            losses.append((logits.logsumexp(1) - logits.gather(1, chosen[:, None])[:, 0]).sum())
        return torch.stack(losses).sum()


@pytest.mark.parametrize("door", ["module", "block", "block, its loss outside", "block, its backward behind it"])
def test_a_fused_loss_that_rolls_its_ids(door: str):
    """Exact with targets that were rolled before the cut."""
    torch.manual_seed(0)
    one, tokens = Fused().double(), torch.arange(24).view(2, 12) * 5 % 11
    model = copy.deepcopy(one)
    expected = one(tokens, torch.arange(12))
    expected.backward()

    def on(_rank: int) -> float:
        mine, mesh = copy.deepcopy(model), cp_mesh(2)
        if door == "module":
            parallelize_module(mine, mesh, ModuleContextParallel())
            batch = BatchSharder(mesh, seq_dims={"targets": 1})({"input_ids": tokens, "targets": tokens.roll(-1, 1)})
            loss = mine(batch.tokens, batch.positions, batch["targets"])
            loss.backward()
        else:
            buffers = [tokens.clone(), torch.arange(12), tokens.roll(-1, 1)]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 0, 1]):
                part, positions, targets = buffers
                if door == "block, its loss outside":
                    loss = mine.loss(mine.hidden(part, positions), targets)
                else:
                    loss = mine(part, positions, targets)
                if door != "block, its backward behind it":
                    loss.backward()
            if door == "block, its backward behind it":
                loss.backward()
        sum_gradients(mine, mesh)
        torch.distributed.all_reduce(total := loss.detach(), group=mesh.get_group())
        pairs = zip(mine.parameters(), one.parameters(), strict=True)
        return max(error(total, expected.detach()), *(error(x.grad, y.grad) for x, y in pairs))

    assert max(run_ranks(on, 2)) < EXACT


def test_clipped_gradients_of_sinks_over_two_axes():
    """The norm is that of all heads' sinks: they are DTensors on tp, as the weights beside them."""
    x, cotangent, heads = randn(50, 2, 13, 12), randn(51, 2, 13, 12), ("q", "k", "v")

    class Layer(nn.Module):
        def __init__(self, core: nn.Module) -> None:
            super().__init__()
            self.core, self.sinks, self.o = core, nn.Parameter(randn(0, 4)), nn.Linear(12, 12)
            self.q, self.k, self.v = (nn.Linear(12, 12) for _ in heads)
            for seed, each in enumerate(self.parameters()):
                each.data = randn(seed, *each.shape) * each.shape[-1] ** -0.5

        def forward(self, x):
            q, k, v = (getattr(self, name)(x).unflatten(-1, (-1, 3)).transpose(1, 2) for name in heads)
            return self.o(self.core(q, k, v, self.sinks).transpose(1, 2).flatten(2))

    one = Layer(test_module_sinks.DenseCore())
    one(x).backward(cotangent)
    expected = nn.utils.clip_grad_norm_(one.parameters(), 0.1)

    def on(_rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        mine, layout, rank = Layer(test_module_sinks.Core()), head_tail(13, 2), mesh["cp"].get_local_rank()
        plan = dict.fromkeys(heads, ColwiseParallel()) | {"o": RowwiseParallel()}
        parallelize_module(mine, mesh["tp"], plan)
        mine.sinks = nn.Parameter(distribute_tensor(mine.sinks.data, mesh["tp"], [Shard(0)]))
        parallelize_module(mine, mesh["cp"], ModuleContextParallel(sink_name="sinks"))
        mine(layout.shard(x, 1, rank)).backward(layout.shard(cotangent, 1, rank))
        sum_gradients(mine, mesh["cp"])
        norm = nn.utils.clip_grad_norm_(mine.parameters(), 0.1)
        pairs = [
            (norm, expected),
            *((a.grad, b.grad) for a, b in zip(mine.parameters(), one.parameters(), strict=True)),
        ]
        return max(error(a.full_tensor(), b) for a, b in pairs)

    assert max(run_ranks(on, 4)) < EXACT


PASSES = 3


def seen_in_passes(length: int, passes: int) -> torch.Tensor:
    """Of the first pass a token sees all keys up to its own, and of later ones its own."""
    own = torch.eye(length, dtype=torch.bool)
    return torch.cat([own if number else torch.ones_like(own).tril() for number in range(passes)], 1)


class Drafts(nn.Module):
    """A head that drafts several tokens: in each pass it attends to the keys of all passes so far."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(7, 16), nn.Linear(16, 48), nn.Linear(16, 7)
        self.attend = attend

    def forward(self, tokens):
        x, keys, values, logits = self.embed(tokens), [], [], []
        for _ in range(PASSES):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            keys, values = [*keys, k], [*values, v]
            x = x + self.attend(q, keys, values).transpose(1, 2).flatten(2)
            logits.append(self.head(x))
        return sum(logits)


def attend_to_passes(q, keys, values):
    mask = seen_in_passes(21, len(keys))
    return F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask)


def test_keys_of_several_passes():
    """Refused where they are concatenated before a mask, in modules and blocks, and exact as the page says."""
    code = example("keys of several passes")
    torch.manual_seed(0)
    one, tokens = Drafts(attend_to_passes).double(), torch.randint(7, (2, 21))

    def trained(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
        loss.backward()
        return loss.detach()

    def on(rank: int, how: str):
        mesh, layout = cp_mesh(2), head_tail(21, 2)
        part = layout.shard(tokens, 1, rank)

        def as_on_the_page(q, keys, values):
            names = {"torch": torch, "context_attention": context_attention, "Causal": Causal}
            names |= {"q": q, "keys": keys, "values": values, "mesh": mesh, "layout": layout}
            exec(code, names)
            return names["out"]

        mine = Drafts(attend_to_passes if how != "page" else as_on_the_page).double()
        mine.load_state_dict(one.state_dict())
        if how == "style":
            parallelize_module(mine, mesh, ModuleContextParallel())
        with context_parallel(mesh, layout=layout) if how == "block" else contextlib.nullcontext():
            trained(mine, part)
        sum_gradients(mine, mesh)
        return {name: x.grad for name, x in mine.named_parameters()}

    trained(one, tokens)
    for grads in run_ranks(partial(on, how="page"), 2):
        assert max(error(grads[name], x.grad) for name, x in one.named_parameters()) < EXACT
    for how in ("style", "block"):
        with pytest.raises(RankError, match=r"(?s)rank 0: .*are 2 times as long.*rank 1: .*are 2 times as long"):
            run_ranks(partial(on, how=how), 2)


@pytest.mark.parametrize("dim", [2, -2])
def test_keys_that_are_concatenated_and_no_passes(dim: int):
    """Without a mask the order of keys is of no account; and of a cross-attention's keys nothing is concatenated."""
    q, first, second = randn(0, 1, 2, 12, 8), randn(1, 1, 2, 12, 8), randn(2, 1, 2, 12, 8)
    layout, mask = head_tail(12, 2), torch.ones(12, 24, dtype=torch.bool).tril(3)

    class Attends(nn.Module):
        def forward(self, q, keys, mask):
            return F.scaled_dot_product_attention(q, keys, keys, attn_mask=mask)

    def on(rank: int) -> float:
        core = parallelize_module(Attends(), cp_mesh(2), ModuleContextParallel(verified=True))
        part = layout.shard(q, 2, rank)
        keys = torch.cat([layout.shard(x, 2, rank).requires_grad_() for x in (first, second)], dim)
        whole = torch.cat([first, second], 2)
        found = [core(part, keys, None)]
        wanted = [F.scaled_dot_product_attention(q, whole, whole)]
        found.append(core(part, head_tail(24, 2).shard(whole, 2, rank).requires_grad_(), mask))
        wanted.append(F.scaled_dot_product_attention(q, whole, whole, attn_mask=mask))
        with pytest.raises(NotImplementedError, match="2 times as long"):
            core(part, keys, mask)
        return max(error(x, layout.shard(y, 2, rank)) for x, y in zip(found, wanted, strict=True))

    assert max(run_ranks(on, 2)) < EXACT


def test_an_evaluation_over_other_ranks():
    """Training over two ranks beside a data parallel axis, and an evaluation over all four, by a second model on the
    same memory, as the error of a second style says."""
    whole, training, held_out = language_model(7), torch.randint(7, (2, 20)), torch.randint(7, (1, 29))

    def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def on(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        everyone = mesh["dp", "cp"]._flatten("all")
        model, evaluated, found = copy.deepcopy(whole), LanguageModel(7).double(), []
        parallelize_module(model, mesh["cp"], ModuleContextParallel(verified=True))
        with pytest.raises(ValueError, match=r"second model on the same memory, .*assign=True\), and apply it to that"):
            parallelize_module(model, everyone, ModuleContextParallel())
        evaluated.load_state_dict(model.state_dict(), assign=True)
        parallelize_module(evaluated, everyone, ModuleContextParallel())
        cut, cut_all = BatchSharder(mesh["cp"], loss_mesh=everyone), BatchSharder(everyone)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            batch = cut(training[mesh["dp"].get_local_rank()][None])
            loss = batch.loss(model(batch.tokens))
            loss.backward()
            cut.sum_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                part = cut_all(held_out)
                found += [loss.item(), part.loss(evaluated(part.tokens)).item()]
        return found

    wanted, optimizer = [], torch.optim.SGD(whole.parameters(), lr=0.5)
    original = copy.deepcopy(whole.state_dict())
    for _ in range(3):
        loss = loss_of(whole, training)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted += [loss.item(), loss_of(whole, held_out).item()]
    whole.load_state_dict(original)
    for found in run_ranks(on, 4):
        assert error(torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)) < EXACT
