"""What is wrong around the attention calls under a ModuleContextParallel: an error on every rank, and no false one."""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from cp_styles.comm.checks import Checks
from cp_styles.engine.scope import SequenceScope
from cp_styles.functions.decode import LayerCaches
from cp_styles.integrations.transformers import register_attention
from cp_styles.layouts import contiguous, head_tail
from cp_styles.masks import Documents, SlidingWindow
from cp_styles.mixers import Channels, context_causal_conv1d, context_recurrence
from cp_styles.styles import ColwiseParallel, ModuleContextParallel
from cp_styles.styles import parallelize_module as checked
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, cp_mesh, on_every_rank
from tests.tiny_lm import SelfAttention

WIDTH, LENGTH, RANKS = 8, 12, 2


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


class Mlp(nn.Module):
    """By token, flattened, with an experts' index: none of it mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.router = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        flat = x.flatten(0, 1)
        chosen = self.router(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for expert in range(2):
            (index,) = torch.where(chosen == expert)
            out = out.index_add(0, index, self.down(self.up(flat[index]).relu() * (1 + expert)))
        return out.view_as(x)


class Model(nn.Module):
    """``layers`` after a norm and an attention."""

    def __init__(self, *layers: nn.Module, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.attention = Norm(), SelfAttention(WIDTH)
        self.layers = nn.ModuleList(layers)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x


def on(rank: int, model: nn.Module, *args, layout=contiguous, mode=torch.enable_grad, **options):
    mesh, mine = cp_mesh(RANKS), copy.deepcopy(model)
    parallelize_module(mine, mesh, ModuleContextParallel(layout=layout, **options))
    parts = [layout(x.shape[1], RANKS).shard(x, 1, rank) for x in args]
    with mode():
        return mine(*parts)


def refused(model: nn.Module, *args: torch.Tensor, words: str, **options) -> None:
    """Every rank raises, and some rank says why."""
    errors = run_ranks(lambda rank: on(rank, model, *args, **options), RANKS, return_errors=True)
    assert all(isinstance(error, ValueError | NotImplementedError) for error in errors), errors
    assert any(re.search(words, str(error)) for error in errors), errors


X = randn(0, 2, LENGTH, WIDTH)


class Inner(nn.Module):
    """A layer of torch that mixes tokens, over [B, C, L] or, for a recurrence, [B, L, C]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0] if isinstance(self.inner, nn.RNNBase) else self.inner(x.mT).mT


MIXING = {
    "RNN": lambda: nn.RNN(WIDTH, WIDTH, batch_first=True),
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "GRU": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "Conv1d": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "BatchNorm1d": lambda: nn.BatchNorm1d(WIDTH),
    "BatchNorm1d, without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False).eval(),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(WIDTH),
    "AvgPool1d": lambda: nn.AvgPool1d(3, 1, 1),
    "MaxPool1d": lambda: nn.MaxPool1d(3, 1, 1),
    "AdaptiveAvgPool1d": lambda: nn.AdaptiveAvgPool1d(1),
    "AdaptiveMaxPool1d": lambda: nn.AdaptiveMaxPool1d(1),
}


@pytest.mark.parametrize("what", MIXING)
def test_layers_whose_class_mixes_tokens(what: str):
    """Refused on every rank, also in a copy; not where there is one rank, and not in ``local``."""
    model, kind = Model(Mlp(), Inner(MIXING[what]())).double(), what.split(",")[0]

    def act(rank: int, ranks: int, **options) -> torch.Tensor:
        layout, mine = contiguous(LENGTH, ranks), copy.deepcopy(model)
        mesh = cp_mesh(ranks)
        mine = copy.deepcopy(parallelize_module(mine, mesh, ModuleContextParallel(layout=contiguous, **options)))
        return mine(layout.shard(X, 1, rank)).detach()

    errors = run_ranks(lambda rank: act(rank, RANKS), RANKS, return_errors=True)
    by = "context_roll.*fill=0.0" if kind == "Conv1d" else "context_causal_conv1d"  # the convolution looks both ways
    words = rf"layers\.1\.inner \({kind}\) carries values .*{by}.* local=\['layers\.1\.inner'\]"
    assert all(isinstance(each, NotImplementedError) and re.search(words, str(each)) for each in errors), errors
    if kind != "SyncBatchNorm":  # which torch has for GPUs alone
        wanted = copy.deepcopy(model)(X).detach()
        assert error(run_ranks(lambda rank: act(rank, 1), 1)[0], wanted) < EXACT
        run_ranks(lambda rank: act(rank, RANKS, local="layers.*.inner"), RANKS)


def test_a_rank_alone_that_calls_a_layer_that_mixes():
    """The others, which attend already, hear of it."""

    class Routed(Model):
        def forward(self, x):
            return self.attention(self.layers[0](x) if bool(x[0, 0, 0] == X[0, LENGTH // RANKS, 0]) else x)

    errors = run_ranks(lambda rank: on(rank, Routed(Inner(MIXING["GRU"]())).double(), X), RANKS, return_errors=True)
    assert "ranks [1] of mesh axis 'cp' have failed" in str(errors[0]), errors
    assert "layers.0.inner (GRU) carries values" in str(errors[1]), errors


def test_layers_that_do_not_mix():
    """One tap, statistics that are known, and what is called outside of the model's forward, on whole tokens."""
    model = Model(Inner(nn.Conv1d(WIDTH, WIDTH, 1)), Inner(nn.BatchNorm1d(WIDTH)), Inner(MIXING["LSTM"]())).double()
    model.layers[1].eval()
    before = model.layers.pop(2)
    wanted = model(before(X)).detach()
    model.before = before

    def act(rank: int) -> torch.Tensor:
        mine, layout = copy.deepcopy(model), contiguous(LENGTH, RANKS)
        parallelize_module(mine, cp_mesh(RANKS), ModuleContextParallel(layout=contiguous))
        x = mine.before.inner(X)[0]
        out = mine(layout.shard(x, 1, rank)).detach()
        mine.layers[1].train()
        with pytest.raises(NotImplementedError, match=r"layers\.1\.inner \(BatchNorm1d\)"):
            mine(layout.shard(x, 1, rank))
        return out

    assert error(contiguous(LENGTH, RANKS).unshard(run_ranks(act, RANKS), 1), wanted) < EXACT


def test_layers_that_mix_new_tokens_after_a_prompt():
    """These are whole on every rank."""

    class Cached(Model):
        def forward(self, x, past_key_values=None):
            return super().forward(x)

    model = Cached(Inner(MIXING["Conv1d"]())).double()

    def act(rank: int, prefilled: bool) -> None:
        mesh = cp_mesh(RANKS)
        mine = parallelize_module(copy.deepcopy(model), mesh, ModuleContextParallel())
        cache = LayerCaches(mesh.get_group(), contiguous(LENGTH, RANKS))
        cache.prefilled = prefilled
        mine(X[:, rank : rank + 6], past_key_values=cache)  # this cache holds nothing, so they are attended to as parts

    assert "layers.0.inner (Conv1d) carries values" in errors_of(act, prefilled=False)
    run_ranks(lambda rank: act(rank, True), RANKS)


def test_local_names_modules():
    model = Model(*(Inner(MIXING["Conv1d"]()) for _ in range(2))).double()
    for allowed in (["layers.*.inner"], ["layers"], ["layers.0", "layers.1"]):
        run_ranks(lambda rank, allowed=allowed: on(rank, model, X, local=allowed), RANKS)
    refused(model, X, words=r"layers\.1\.inner \(Conv1d\)", local=["layers.0"])
    for pattern in ("layer", "*.inner"):  # as in a plan, * stands for no dot
        refused(model, X, words=rf"local=\['{re.escape(pattern)}'\] names no module", local=["layers", pattern])


class InMixers(Model):
    """Layers that mix tokens, which mixers call."""

    def __init__(self, mesh=None) -> None:
        super().__init__()
        self.conv, self.pool, self.mesh = nn.Conv1d(WIDTH, WIDTH, 3, padding=2), nn.AvgPool1d(2, 1, 1), mesh

    def forward(self, x):
        conv = lambda x: self.conv(x)[..., : x.shape[-1]]  # noqa: E731
        pool = lambda x: self.pool(x)[..., : x.shape[-1]]  # noqa: E731
        if self.mesh is None:
            return super().forward(x + pool(conv(x.mT)).mT)
        y = context_causal_conv1d(conv, x.mT, self.mesh, width=3)
        return super().forward(x + context_recurrence(pool, self.mesh, recurrence=Channels(cut=("x",)))(y).mT)


def test_layers_that_mixers_call():
    model, layout = InMixers().double(), head_tail(LENGTH, RANKS)
    wanted = model(X).detach()

    def act(rank: int) -> torch.Tensor:
        mine = copy.deepcopy(model)
        mine.mesh = cp_mesh(RANKS)
        parallelize_module(mine, mine.mesh, ModuleContextParallel())
        out = mine(layout.shard(X, 1, rank)).detach()
        mine.mesh = None
        with pytest.raises(NotImplementedError, match=r"conv \(Conv1d\) carries values"):
            mine(layout.shard(X, 1, rank))
        return out

    assert error(layout.unshard(run_ranks(act, RANKS), 1), wanted) < EXACT


class Positioned(Model):
    """As models of transformers are called."""

    loss_function = None

    def forward(
        self, x, position_ids=None, labels=None, shift_labels=None, num_items_in_batch=None, past_key_values=None
    ):
        return super().forward(x)


POSITIONS = torch.arange(LENGTH).unsqueeze(0)
POSITIONED = Positioned().double()


def call(of: nn.Module | None = None, **changes) -> Any:
    """A model that is given this rank's positions, and what else ``changes`` say; None for left out."""

    def act(rank: int, layout=contiguous, scope=None, **options):
        cut = layout(LENGTH, RANKS)
        mine = copy.deepcopy(POSITIONED if of is None else of)
        parallelize_module(mine, cp_mesh(RANKS), ModuleContextParallel(**options))
        given = {"position_ids": cut.positions(rank).unsqueeze(0)} | changes
        given = {name: value for name, value in given.items() if value is not None}
        with SequenceScope(cut, mask=scope):
            return mine(cut.shard(X, 1, rank), **given)

    return act


def errors_of(act: Any, **options) -> str:
    errors = run_ranks(lambda rank: act(rank, **options), RANKS, return_errors=True)
    assert all(isinstance(error, ValueError | NotImplementedError) for error in errors), errors
    return "\n".join(map(str, errors))


def test_positions():
    run_ranks(call(), RANKS)
    assert "Positioned takes position_ids and was given none" in errors_of(call(position_ids=None))
    local = call(position_ids=POSITIONS[:, : LENGTH // RANKS])
    assert "position_ids count from 0 to 5 on this rank, whose part of the sequence begins at 6" in errors_of(local)

    assert "begins at 3" in errors_of(local, layout=head_tail)
    documents = Documents((LENGTH // RANKS,) * RANKS)
    run_ranks(lambda rank: local(rank, scope=documents), RANKS)
    run_ranks(lambda rank: local(rank, checks=Checks(inputs=False)), RANKS)


class OfPatches(Positioned):
    """As Gemma 4 and LUKE are called: with positions of other things than the tokens."""

    def forward(
        self,
        x,
        position_ids=None,
        image_position_ids=None,
        video_position_ids=None,
        pixel_position_ids=None,
        entity_position_ids=None,
        visual_pos_masks=None,
    ):
        return super().forward(x, position_ids)


def test_positions_of_other_things_than_tokens():
    model, names = OfPatches().double(), list(inspect.signature(OfPatches.forward).parameters)[3:]
    run_ranks(call(of=model), RANKS)
    from_0 = POSITIONS[:, : LENGTH // RANKS]
    run_ranks(call(of=model, **dict.fromkeys(names, from_0)), RANKS)
    assert "OfPatches takes position_ids and was given none" in errors_of(call(of=model, position_ids=None))


def test_labels():
    labels = torch.zeros(2, LENGTH // RANKS, dtype=torch.int64)
    assert "labels would be shifted after the cut" in errors_of(call(labels=labels))
    assert "a mean of the ranks' means is another number" in errors_of(call(labels=labels, shift_labels=labels))
    run_ranks(call(labels=labels, shift_labels=labels, num_items_in_batch=7), RANKS)


class WithHead(nn.Module):
    """A model inside of the model, as transformers has it."""

    loss_function = None

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = Inside(Mlp()), nn.Linear(WIDTH, 3)

    def forward(self, input_ids, position_ids=None, labels=None):
        return self.head(self.model(input_ids, position_ids))


class Inside(Model):
    def forward(self, input_ids, position_ids=None):
        return super().forward(input_ids + 0 if position_ids is None else input_ids + position_ids[..., None])


@pytest.mark.parametrize("how", [lambda model: model.forward, lambda model: lambda x, p: model.head(model.model(x, p))])
def test_a_model_that_is_not_called_itself(how):
    """No hook of the style runs where its forward, or a model inside of it, is called."""
    torch.manual_seed(0)
    model, cut = WithHead().double(), head_tail(LENGTH, RANKS)

    def act(rank: int, *positions: torch.Tensor | None, **options) -> torch.Tensor:
        mine = copy.deepcopy(model)
        parallelize_module(mine, cp_mesh(RANKS), ModuleContextParallel(**options))
        for each in positions:
            out = how(mine)(cut.shard(X, 1, rank), None if each is None else cut.shard(each, 1, rank))
        return out.detach()

    wanted = model(X, POSITIONS).detach()
    found = run_ranks(lambda rank: act(rank, POSITIONS, POSITIONS), RANKS)
    assert error(cut.unshard(found, 1), wanted) < 1e-12
    assert "takes position_ids and was given none" in errors_of(lambda rank: act(rank, POSITIONS, None))
    local = torch.arange(LENGTH // RANKS).repeat(RANKS)[None]
    local = cut.unshard([local[:, : LENGTH // RANKS]] * RANKS, 1)
    assert "count from 0 to 5 on this rank" in errors_of(lambda rank: act(rank, local))
    run_ranks(lambda rank: act(rank, None, checks=Checks(inputs=False)), RANKS)


def test_parts_that_are_called_alone():
    """Of a model inside labels are no matter; of a layer, positions are not; and neither needs an attention."""
    model = WithHead().double()

    def act(rank: int) -> None:
        mine = copy.deepcopy(model)
        parallelize_module(mine, cp_mesh(RANKS), ModuleContextParallel())
        x = head_tail(LENGTH, RANKS).shard(X, 1, rank)
        y = mine.model.layers[0](mine.model.norm(x))
        out = mine.model.attention(y).sum()
        out.backward()
        with pytest.raises(ValueError, match="labels would be shifted after the cut"):
            mine.forward(x, position_ids=head_tail(LENGTH, RANKS).positions(rank)[None], labels=x[..., 0])
        copy.deepcopy(mine.model.layers[0])(x)

    run_ranks(act, RANKS)


class Wrapper(nn.Module):
    """As adapters and trainers have it: it says nothing of its arguments."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class NamedWrapper(Wrapper):
    def forward(self, x, labels=None, **kwargs):
        return self.inner(x, labels=labels, **kwargs)


class Knowing(Wrapper):
    """It gives the model its positions itself."""

    def forward(self, x):
        return self.inner(x, position_ids=x[..., 0])


@pytest.mark.parametrize("wrap", [Wrapper, NamedWrapper, lambda model: NamedWrapper(Wrapper(model))])
def test_a_wrapper_does_not_hide_what_the_model_takes(wrap):
    """Its arguments are the model's, by name or in the model's order."""
    labels, model = torch.zeros(2, LENGTH, dtype=torch.int64), wrap(POSITIONED)

    def act(rank: int, *positional: str, **given: torch.Tensor) -> torch.Tensor:
        cut, mine = contiguous(LENGTH, RANKS), copy.deepcopy(model)
        parallelize_module(mine, cp_mesh(RANKS), ModuleContextParallel(layout=contiguous))
        parts = {name: cut.shard(value, 1, rank) for name, value in given.items()}
        return mine(cut.shard(X, 1, rank), *(parts.pop(name) for name in positional), **parts)

    run_ranks(lambda rank: act(rank, position_ids=POSITIONS), RANKS)
    assert "takes position_ids and was given none" in errors_of(act)
    refusal = errors_of(lambda rank: act(rank, position_ids=POSITIONS, labels=labels))
    assert "labels would be shifted after the cut" in refusal
    if wrap is Wrapper:
        run_ranks(lambda rank: act(rank, "position_ids", position_ids=POSITIONS), RANKS)
    windowed = wrap(Windowed("sdpa")).double()
    errors = run_ranks(lambda rank: on_windowed(rank, windowed), RANKS, return_errors=True)
    assert any("sliding_window=8" in str(error) for error in errors), errors


def on_windowed(rank: int, model: nn.Module) -> torch.Tensor:
    mine = copy.deepcopy(model)
    parallelize_module(mine, cp_mesh(RANKS), ModuleContextParallel(layout=contiguous))
    return mine(contiguous(LENGTH, RANKS).shard(X, 1, rank))


def test_a_module_that_gives_positions_itself():
    run_ranks(lambda rank: on(rank, Knowing(POSITIONED), X), RANKS)


class TakesPositions(Model):
    def forward(self, x, pos):
        return super().forward(x + pos[0, :, None])


TAKES_POSITIONS = TakesPositions().double()


def test_positions_under_another_name():
    model = TAKES_POSITIONS
    run_ranks(lambda rank: on(rank, model, X, POSITIONS), RANKS)
    # What each rank would count by itself, of its part, and of the whole sequence where it was not cut.
    local = torch.arange(LENGTH // RANKS).repeat(RANKS).unsqueeze(0)
    refused(model, X, local, words="pos count from 0 to 5 on this rank, whose part of the sequence begins at 6")
    uncut = (torch.cat([x] * RANKS, 1) for x in (X, POSITIONS))
    refused(model, *uncut, words="pos count from 0 to 11 on this rank, whose part of the sequence begins at 12")


class WithText(Model):
    def forward(self, x, text, text_pos):
        return super().forward(x) + text.sum() + text_pos.sum()


def test_positions_of_a_text_that_every_rank_has():
    """They are no part of the layout."""
    model, text, cut = WithText().double(), randn(3, 2, 5, WIDTH), contiguous(LENGTH, RANKS)

    def act(rank: int) -> torch.Tensor:
        mine = parallelize_module(copy.deepcopy(model), cp_mesh(RANKS), ModuleContextParallel(layout=cut))
        return mine(cut.shard(X, 1, rank), text, torch.arange(5)[None]).detach()

    wanted = model(X, text, torch.arange(5)[None]).detach()
    assert error(cut.unshard(run_ranks(act, RANKS), 1), wanted) < EXACT


@dataclass
class Config:
    _attn_implementation: str
    sliding_window: int = 8


class Windowed(Model):
    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.config = Config(implementation)

    def forward(self, input_ids, labels=None):
        return super().forward(input_ids)


def test_windows_that_a_model_would_make_from_a_part():
    words = "sliding_window=8, .* this rank's part of the tokens. .*register_att"
    refused(Windowed("sdpa").double(), X, words=words)
    for model, options in (
        (Windowed("context_parallel"), {}),
        (Windowed("sdpa"), {"mask": SlidingWindow(7)}),
    ):
        model.double()  # before there are threads, which share it
        run_ranks(lambda rank, model=model, options=options: on(rank, model, X, **options), RANKS)


def test_the_signature_is_the_modules_own():
    """Who looks for a parameter's name, as trainers do, finds it."""

    def names(rank: int) -> list[str]:
        mine = Positioned()
        parallelize_module(mine, cp_mesh(RANKS), ModuleContextParallel())
        return list(inspect.signature(mine.forward).parameters)

    assert run_ranks(names, RANKS)[0][:2] == ["x", "position_ids"]


@pytest.mark.parametrize("door", ["style", "block", "registered"])
def test_one_remedy_for_all_that_is_missing(door: str):
    """Positions, labels, and their count: each error names what makes all of them."""

    class WithLoss(nn.Module):
        loss_function = None

        def forward(self, input_ids, position_ids=None, labels=None, shift_labels=None, num_items_in_batch=None):
            x = input_ids[:, None, :, None].double()
            return F.scaled_dot_product_attention(x, x, x)

    def model() -> nn.Module:
        if door != "registered":
            return WithLoss()
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register_attention())

    one = model()

    def on(rank: int, **given: torch.Tensor) -> None:
        mine, mesh = copy.deepcopy(one), cp_mesh(RANKS)
        tokens = torch.zeros(1, 6, dtype=torch.int64)
        if door == "block":
            with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
                mine(input_ids=tokens, **given)
        else:
            parallelize_module(mine, mesh, ModuleContextParallel())
            mine(input_ids=tokens, **given)

    labels = torch.zeros(1, 6 if door != "block" else 3, dtype=torch.int64)
    for given, words in (
        ({}, r"Pass position_ids=.*\*\*batch.inputs of BatchSharder.*ContextParallelTrainer"),
        ({"labels": labels}, r"labels would be shifted.*BatchSharder\(mesh\)\(batch\).*ContextParallelTrainer"),
        ({"labels": labels, "shift_labels": labels}, r"mean of the ranks' means.*BatchSharder"),
    ):
        for each in run_ranks(lambda rank, given=given: on(rank, **given), RANKS, return_errors=True):
            assert re.search(words, str(each)), each


def test_a_mask_of_this_ranks_keys():
    class Masks(Model):
        def forward(self, x):
            q = k = v = x.unsqueeze(1)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model = Masks().double()
    words = r"attn_mask of shape \({0}, {0}\) is made for the {0} keys of one rank's part\. .* here of {1} keys"
    refused(model, X, words=words.format(6, 12))
    refused(model, randn(0, 2, 11, WIDTH), words=words.format(6, 11))  # another mask on the rank of 5 tokens


def test_a_cache_with_tokens_in_it():
    cache = SimpleNamespace(get_seq_length=lambda: 5)
    assert "with a cache of 5 tokens" in errors_of(call(past_key_values=cache))
    run_ranks(call(past_key_values=SimpleNamespace(get_seq_length=lambda: 0)), RANKS)


@on_every_rank(RANKS)
def test_a_plan_whose_path_matches_nothing(mesh):
    """torch warns only."""
    model = Model(Mlp(), Mlp())
    checked(model, mesh, {"attention": ModuleContextParallel(), "layers.*.up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"match no module: 'atention' \(near: attention.*\); 'layers\.\*\.gate'"):
        checked(Model(), mesh, {"atention": ModuleContextParallel(), "layers.*.gate": ColwiseParallel()})
