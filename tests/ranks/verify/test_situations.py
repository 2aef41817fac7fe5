"""A proof says in which situations it was made: the first run of a model in another one warns, once."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    BatchSharder,
    Causal,
    ModuleContextParallel,
    UnprovedPathWarning,
    UnverifiedModelWarning,
    parallelize_module,
)
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from cp_styles.verify import verify
from tests.covering import at_night
from tests.ranks.attention_case import cp_mesh, every_rank_raises
from tests.ranks.training_scene import attended
from tests.tiny_lm import LanguageModel

WORDS, LENGTH = 32, 22
DOCUMENTS = torch.tensor([[0] * 9 + [1] * (LENGTH - 9)])


class Layers(nn.Module):
    """A language model of two blocks, with an argument that is mostly not given."""

    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = LanguageModel(WORDS).double(), LanguageModel(WORDS).double()

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first.embed(tokens) if scale is None else self.first.embed(tokens) * scale
        attention = self.first.attention
        x = x + (checkpoint(attention, x, use_reentrant=False) if self.checkpoints else attention(x))
        return self.second.logits(x, None)


def tokens_of(length: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (1, length), generator=torch.Generator().manual_seed(length))


def batch_of(length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens_of(length), "labels": tokens_of(length)}


def step(
    model: nn.Module,
    batch: Any,
    mesh: Any,
    *,
    around: Callable[[Any], Any] = lambda sharded: nullcontext(),
    forwards: int = 1,
    backwards: int = 1,
    **options: Any,
) -> torch.Tensor:
    sharder, total = BatchSharder(mesh), torch.zeros((), dtype=torch.float64)
    for _ in range(backwards):
        sharded = sharder(batch)
        with around(sharded):
            losses = [sharded.loss(model(sharded.tokens, **options)) for _ in range(forwards)]
        loss = torch.stack(losses).sum()
        loss.backward()
        total += loss.detach()
    sharder.sum_gradients(model)
    return total


def after(change: Callable[[nn.Module], Any], model: nn.Module, batch: Any, mesh: Any, **options: Any) -> torch.Tensor:
    """A step with a changed model, which is as before at the end."""
    flags = [(module, module.training) for module in model.modules()]
    trains = [(x, x.requires_grad) for x in model.parameters()]
    change(model)
    try:
        return step(model, batch, mesh, **options)
    finally:
        model.double()
        for module, training in flags:
            module.training = training
        for x, requires_grad in trains:
            x.requires_grad_(requires_grad)


def evaluate(model: nn.Module, batch: Any, mesh: Any) -> torch.Tensor:
    model.eval()
    sharded = BatchSharder(mesh)(batch)
    with torch.no_grad():
        loss = sharded.loss(model(sharded.tokens))
    model.train()
    return loss


def accumulate(model: nn.Module, batch: Any, mesh: Any) -> torch.Tensor:
    return step(model, batch, mesh, backwards=2)


BATCH = batch_of(LENGTH)
PACKED = BATCH | {"document_ids": DOCUMENTS}
SITUATIONS: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "evaluation": (evaluate, BATCH, r": the model in eval mode\."),
    "a part in eval mode": (
        partial(after, lambda model: model.second.eval()),
        BATCH,
        r": second, second\.att.* in eval",
    ),
    "documents": (partial(step, around=lambda sharded: sharded.scope()), PACKED, r": attention with .*Documents"),
    "another dtype": (partial(after, lambda model: model.float()), BATCH, r": attention in torch\.float32\."),
    "an argument": (partial(step, scale=torch.ones(())), BATCH, r": Layers\.forward with scale\."),
    "two forwards": (partial(step, forwards=2), BATCH, r": several forwards before a backward\."),
    "accumulation": (accumulate, BATCH, r": a backward that adds to the gradients of an earlier one\."),
    "a parameter": (
        partial(after, lambda model: model.first.head.requires_grad_(True)),
        BATCH,
        r": gradients of first\.head\.weight, first\.head\.bias\.",
    ),
    "long": (
        step,
        batch_of(8 * LENGTH + 4),
        r": a part more than 4 times longer than the 22 tokens that were proved\.",
    ),
    "short": (step, batch_of(4), r": a part .* 4 times shorter than the 11 tokens that were proved\."),
}

AGAIN = "evaluation", "documents", "an argument", "long", "short"  # by day


def made() -> nn.Module:
    torch.manual_seed(0)
    model = Layers()
    model.first.head.requires_grad_(False)  # not used
    model.second.embed.requires_grad_(False)
    return model


MODEL = made()


def styled(mesh: Any) -> nn.Module:
    return parallelize_module(copy.deepcopy(MODEL), mesh, ModuleContextParallel())


def said(act: Callable[[int], Any], ranks: int = 2) -> list[str]:
    """The warnings of this package about proofs while ``act`` runs on ranks."""
    with warnings.catch_warnings(record=True) as caught:  # in all threads
        warnings.simplefilter("always")
        run_ranks(act, ranks)
    return [str(x.message) for x in caught if issubclass(x.category, UnprovedPathWarning | UnverifiedModelWarning)]


def steps(model: nn.Module, mesh: Any, *acts: tuple[Callable[..., Any], Any]) -> None:
    """Steps of an optimizer."""
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], 1e-3)
    for act, batch in acts:
        act(model, batch, mesh)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def run_in(name: str, rank: int, *, proves: bool) -> None:
    """Steps in this situation and outside of it, after a proof of steps outside of it, and one in it if ``proves``."""
    (act, batch, _), mesh = SITUATIONS[name], cp_mesh(2)
    model = styled(mesh)
    verify(model, mesh, BATCH, step)
    if proves:
        verify(model, mesh, batch, act)
    # A new look at flags comes with the forwards 1, 2, 4, ...
    steps(model, mesh, (step, BATCH), (act, batch), (step, BATCH), (act, batch), (act, batch))


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_that_was_not_proved_warns_once(name):
    (text,) = said(partial(run_in, name, proves=False))
    assert text.startswith("Layers runs as no step of it was compared with one device")
    assert re.search(SITUATIONS[name][2], text), text


@pytest.mark.parametrize("name", [*AGAIN, *at_night(*(name for name in SITUATIONS if name not in AGAIN))])
def test_a_second_proof_adds_to_the_first(name):
    assert said(partial(run_in, name, proves=True)) == []


def test_a_part_that_blocks_of_tokens_do_not_divide_warns_once():
    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = styled(mesh)
        verify(model, mesh, batch_of(32), step)
        steps(model, mesh, *((step, batch_of(length)) for length in (64, 24, 56, 24)))

    (text,) = said(on)
    assert ": a part whose length is no multiple of 16, as all that were proved." in text


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_odd_number_of_tokens_proves_all_lengths_near_it(ranks):
    """On three ranks the part of the first one has an even number of tokens. It does not warn of an odd one."""

    def on(rank: int) -> None:
        mesh = cp_mesh(ranks)
        model = styled(mesh)
        verify(model, mesh, batch_of(29), step)
        steps(model, mesh, *((step, batch_of(length)) for length in range(28, 36)))

    assert said(on, ranks) == []


def test_training_proves_no_length():
    """Each batch is less than 4 times longer than the batch before it."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = styled(mesh)
        verify(model, mesh, batch_of(13), step)
        steps(model, mesh, *((step, batch_of(length)) for length in (40, 120, 300, 301)))

    (text,) = said(on)
    assert "longer than the 13 tokens that were proved." in text


WAYS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "as it is": lambda model, mesh: model,
    "checkpointed": lambda model, mesh: (setattr(model, "checkpoints", True), model)[1],
    "compiled": lambda model, mesh: torch.compile(model, backend="aot_eager"),
    "compiled in place": lambda model, mesh: (model.compile(backend="aot_eager"), model)[1],
    "FSDP2": lambda model, mesh: fully_shard(model, mesh=mesh),
    "DDP": lambda model, mesh: DistributedDataParallel(model, process_group=mesh.get_group()),
    "a copy": lambda model, mesh: copy.deepcopy(model),
}


@pytest.mark.parametrize(
    "way", [way for way in WAYS if "compiled" not in way] + at_night("compiled", "compiled in place")
)
def test_a_training_as_it_was_proved_says_nothing(way):
    """Ten steps of several lengths, after a proof of each of the two functions."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = styled(mesh)
        model = WAYS[way](model, mesh) if way != "a copy" else model

        def act(model: nn.Module, batch: Any, mesh: Any) -> Any:
            if way in ("FSDP2", "DDP"):
                sharded = BatchSharder(mesh, averaged_over=mesh.size())(batch)
                loss = sharded.loss(model(sharded.tokens))
                return loss.backward() or loss
            return step(model, batch, mesh)

        verify(model, mesh, BATCH, act)
        verify(model, mesh, BATCH, evaluate)
        model = WAYS[way](model, mesh) if way == "a copy" else model
        for length in (22, 21, 100, 44, 30, 22, 22, 12, 9, 40):
            steps(model, mesh, (act, batch_of(length)))
            evaluate(model, BATCH, mesh)

    assert said(on) == []


def test_a_warning_that_is_an_error_is_one_on_every_rank():
    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = styled(mesh)
        verify(model, mesh, BATCH, step)
        evaluate(model, BATCH, mesh)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovedPathWarning)
        with every_rank_raises("the model in eval mode"):
            run_ranks(on, 2)


@pytest.mark.parametrize("door", ["style", "module", "block"])
def test_a_model_that_is_only_evaluated_warns_once(door):
    def on(rank: int, **options: Any) -> None:
        model = attended(door, cp_mesh(2), **options).eval()
        with torch.no_grad():
            for _ in range(2):
                model(torch.ones(1, 4, 10, dtype=torch.float64))

    (text,) = said(on)
    assert "runs context parallel, and no step of it was compared with one device" in text
    assert said(partial(on, verified=True)) == []


def test_a_model_in_a_block():
    """Blocks know the model that runs: its modes, parameters and masks."""

    def act(model: nn.Module, batch: torch.Tensor, mesh: Any, mask: Any = None) -> None:
        tokens = batch.clone()
        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1], **({} if mask is None else {"mask": mask})):
            model(tokens).square().sum().backward()

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = copy.deepcopy(MODEL)

        def summed(model: nn.Module, batch: torch.Tensor, mesh: Any, **options: Any) -> None:
            act(model, batch, mesh, **options)
            BatchSharder(mesh).sum_gradients(model)

        verify(model, mesh, BATCH["input_ids"], summed)
        steps(model, mesh, (summed, BATCH["input_ids"]), (summed, tokens_of(2 * LENGTH)))
        model.second.eval()
        steps(model, mesh, *[(summed, BATCH["input_ids"])] * 2)
        steps(model, mesh, *[(partial(summed, mask=Causal()), BATCH["input_ids"])] * 2)

    texts = said(on)
    assert len(texts) == 1
    assert ": second, second.attention in eval mode." in texts[0]
