"""Rows that each rank has alone, computed by all ranks in turns: losses and gradients of data-parallel ranks."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cp_styles import (
    BackboneContextParallel,
    ModuleContextParallel,
    Ulysses,
    contiguous,
    parallelize_module,
    sum_gradients,
)
from cp_styles.comm.groups import group_now
from cp_styles.integrations.rollouts import OwnRows, rows_of_ranks
from cp_styles.integrations.trainers import ContextParallelTrainer
from cp_styles.testing import RankError, run_ranks
from tests.oracle import error
from tests.ranks.attention_case import EXACT, cp_mesh
from tests.tiny_lm import SelfAttention

WORDS, LONGEST, COMPLETION = 30, 24, 5


class Outputs(NamedTuple):
    log_probs: torch.Tensor
    entropy: torch.Tensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x)


class Policy(nn.Module):
    """Log-probabilities [B, S - 1] of the labels, or [B, L] of labels that are shifted, as TRL's fused head gives."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, WORDS)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: int | None = None,
        fused_lm_head: bool = False,
    ) -> Outputs:
        positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        x = self.embed(input_ids) + self.place(positions)
        for layer in self.layers:
            x = layer(x)
        found = torch.log_softmax(self.head(x), -1)
        if shift_labels is None:
            assert labels is not None
            found, shift_labels = found[:, :-1], labels[:, 1:]
        taken = -F.cross_entropy(found.transpose(1, 2), shift_labels, reduction="none")
        return Outputs(log_probs=taken, entropy=-(found.exp() * found).sum(-1) * (shift_labels != -100))


class Rollouts:
    """The methods of a trainer as TRL's, for rows that are given. ``reference`` takes the log-probabilities too."""

    loss_is_scaled_for_ga, is_deepspeed_enabled, aux_loss_enabled = False, False, False
    current_gradient_accumulation_steps, max_completion_length, eval_dataset = 2, COMPLETION, None

    def __init__(self, model: nn.Module, reference: nn.Module, rewards: Any = None) -> None:
        self.model = self.model_wrapped = model
        self.reference, self.reward_funcs = reference, [rewards]
        self.args = SimpleNamespace(device=torch.device("cpu"))
        model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=WORDS))  # pyright: ignore
        backward = SimpleNamespace(no_sync=lambda model: nullcontext(), is_fsdp2=False)
        self.accelerator = SimpleNamespace(**vars(backward), backward=lambda loss: loss.backward())

    def compute_loss_context_manager(self) -> Any:
        return nullcontext()

    def get_batch_samples(self, batches: Any, count: int, device: Any) -> Any:
        return batches, None

    def get_train_dataloader(self) -> str:
        return "a loader"

    def _generate(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(ids, labels=ids).log_probs

    def _calculate_rewards(self, ids: torch.Tensor) -> Any:
        return self.reward_funcs[0](input_ids=ids)

    def _generate_and_score_completions(self, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mask = torch.ones_like(rows["input_ids"])
        with torch.no_grad():
            before, *_ = self._get_per_token_logps_and_entropies(self.reference, rows["input_ids"], mask, COMPLETION, 1)
        return rows | {"before": before}

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, mask: Any, kept: int, size: int | None = None, *, compute_entropy: bool = False
    ) -> Any:
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-kept] = -100
        found = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return found.log_probs[:, -kept:], found.entropy[:, -kept:] if compute_entropy else None, None

    def compute_loss(self, model: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = torch.ones_like(rows["input_ids"])
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            model, rows["input_ids"], mask, COMPLETION, compute_entropy=True
        )
        gains = (logps - rows["before"]).exp() * rows["advantages"][:, None]
        return -(gains.sum(1) / COMPLETION).mean() - 0.1 * entropies.mean()


class Long(ContextParallelTrainer, Rollouts): ...


def rows_on(rank: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(WORDS, (2, 13 + 4 * rank), generator=draw)
    return {"input_ids": ids, "advantages": torch.randn(2, generator=draw, dtype=torch.float64)}


def policies() -> tuple[Policy, Policy]:
    torch.manual_seed(0)
    return Policy().double(), Policy().double()


def one_step(trainer: Any, rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = trainer.compute_loss(trainer.model, trainer._generate_and_score_completions(rows_on(rank)))
    (loss / trainer.current_gradient_accumulation_steps).backward()
    return loss.detach(), [parameter.grad for parameter in trainer.model.parameters()]


STYLES = [
    ModuleContextParallel(),
    ModuleContextParallel(layout=contiguous, strategy=Ulysses()),
    BackboneContextParallel(),
]


@pytest.mark.parametrize("style", STYLES, ids=["ring", "ulysses", "backbone"])
@pytest.mark.parametrize("styled_reference", [True, False])
def test_turns(style: Any, styled_reference: bool):
    """Each rank has the loss of its rows, and the mean of the gradients is the gradient of the mean of the losses."""
    model, reference = policies()
    plain = Rollouts(copy.deepcopy(model), reference)
    wanted = [one_step(plain, rank)[0] for rank in range(2)]  # adds to the gradients

    def main(rank: int, world: int = 2) -> Any:
        mine, before = copy.deepcopy((model, reference))
        parallelize_module(mine, cp_mesh(world), copy.copy(style))
        if styled_reference:
            parallelize_module(before, cp_mesh(world), copy.copy(style))
        return one_step(Long(mine, before), rank)

    found = run_ranks(main, 2)
    for (loss, _), expected in zip(found, wanted, strict=True):
        assert error(loss, expected) < EXACT
    # A reducer takes the mean over the ranks. BackboneContextParallel sees that none is here, and gives shares.
    reduced = 1 if isinstance(style, BackboneContextParallel) else 2
    for index, parameter in enumerate(plain.model.parameters()):
        assert parameter.grad is not None
        assert (
            error(torch.stack([gradients[index] for _, gradients in found]).sum(0) / reduced, parameter.grad / 2)
            < EXACT
        )


@pytest.mark.parametrize("style", STYLES[::2], ids=["ring", "backbone"])
def test_few_tokens(style: Any):
    """One prompt token and one of a completion, on 4 ranks."""
    model, reference = policies()
    rows = {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 2, dtype=torch.int64)}

    def main(rank: int) -> Any:
        mine = copy.deepcopy(model)
        parallelize_module(mine, cp_mesh(4), copy.copy(style))
        with torch.no_grad():
            return Long(mine, reference)._get_per_token_logps_and_entropies(mine, *rows.values(), 1)[0]

    with torch.no_grad():
        wanted = Rollouts(model, reference)._get_per_token_logps_and_entropies(model, *rows.values(), 1)[0]
    assert all(error(found, wanted) < EXACT for found in run_ranks(main, 4))


def test_a_rank_generates_alone():
    """From prompts of its own, with the style."""
    model, reference = policies()

    def main(rank: int) -> torch.Tensor:
        mine = copy.deepcopy(model)
        parallelize_module(mine, cp_mesh(2), ModuleContextParallel())
        return Long(mine, reference)._generate(rows_on(rank)["input_ids"])

    for rank, found in enumerate(run_ranks(main, 2)):
        assert error(found, Rollouts(model, reference)._generate(rows_on(rank)["input_ids"])) < EXACT


class Scorer(Policy):
    """A number [B] for each row."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[:, -1, 0]


def test_a_reward_model_with_a_style_scores_rows_of_each_rank():
    model, _ = policies()
    torch.manual_seed(1)
    scorer = Scorer().double()

    def main(rank: int) -> tuple[torch.Tensor, bool]:
        mine, scoring = copy.deepcopy((model, scorer))
        for each, style in ((mine, ModuleContextParallel()), (scoring, BackboneContextParallel())):
            parallelize_module(each, cp_mesh(2), style)
        trainer = Long(mine, mine, scoring)
        with torch.no_grad():
            return trainer._calculate_rewards(rows_on(rank)["input_ids"]), isinstance(trainer.reward_funcs[0], OwnRows)

    for rank, (found, is_left) in enumerate(run_ranks(main, 2)):
        assert error(found, scorer(rows_on(rank)["input_ids"]).detach()) < EXACT
        assert not is_left


def shift(module: nn.Module, args: Any, x: torch.Tensor) -> torch.Tensor:
    return x + F.pad(x, (0, 0, 1, -1))


@pytest.mark.parametrize("shifts", [False, True])
def test_log_probabilities_are_proved(shifts: bool):
    """Before the first step, in random tokens. A model that shifts tokens is refused."""
    model, reference = policies()

    def main(rank: int) -> int:
        mine, proofs, group = copy.deepcopy(model), list[Any](), cp_mesh(2).get_group()
        parallelize_module(mine, cp_mesh(2), ModuleContextParallel())
        if shifts:
            mine.place.register_forward_hook(shift)
        trainer = Long(mine, reference)

        def backward(loss: torch.Tensor) -> None:  # with the mean over the ranks that a reducer takes
            (loss / group_now(group).size()).backward()
            sum_gradients(mine, group)

        trainer.accelerator.backward = backward
        vars(trainer)["_groups"] = [[0, 1]]  # found under a lock: two threads would wait for each other
        prove = trainer._prove
        trainer._prove = lambda *args: proofs.append(prove(*args))  # pyright: ignore
        for _ in range(2):
            trainer.get_batch_samples([{"prompt": "none"}], 1, None)
        return len(proofs)

    with pytest.raises(RankError, match="carries values from token to token") if shifts else nullcontext():
        assert run_ranks(main, 2) == [1, 1]


ROWS = {"a": torch.arange(6).reshape(2, 3), "b": torch.tensor(2.5), "c": torch.tensor([True, False])}


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_of_ranks(ranks: int):
    """Rows of any shapes and dtypes, also none."""

    def rows(rank: int) -> dict[str, torch.Tensor]:
        own = {"a": ROWS["a"][:, rank:], "b": ROWS["b"] + rank, "c": ROWS["c"][:rank]}
        return own | {"d": torch.full((rank, 2), float(rank), dtype=torch.bfloat16)}

    def main(rank: int) -> Any:
        return rows_of_ranks("rows", rows(rank), cp_mesh(ranks).get_group())

    for found in run_ranks(main, ranks):
        assert len(found) == ranks
        for rank, each in enumerate(found):
            assert each.keys() == rows(rank).keys()
            for name, x in rows(rank).items():
                assert each[name].dtype == x.dtype
                assert torch.equal(each[name], x)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pictures": [1, 2]}, "pictures is a list, and only tensors go to the ranks"),
        ({"more": torch.zeros(1)}, "the entries"),
        ({"b": torch.tensor(1)}, "the entries"),
        ({f"more {index}": torch.zeros(1) for index in range(2000)}, "are too many to compare"),
    ],
)
def test_rows_that_are_refused_on_all_ranks(change: dict[str, Any], words: str):
    def main(rank: int) -> Any:
        return rows_of_ranks("rows", ROWS | (change if rank else {}), cp_mesh(2).get_group())

    errors = run_ranks(main, 2, return_errors=True)
    assert all(isinstance(each, Exception) for each in errors)
    assert any(words in str(each) for each in errors)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile"),
        ({"use_adaptive_entropy": True}, "set entropy_coef"),
        ({"aux_loss_enabled": True}, "set router_aux_loss_coef=0.0"),
        ({"is_deepspeed_enabled": True}, "use DDP or FSDP2"),
        ({"loss_is_scaled_for_ga": None}, r"of trl 1\.16"),
    ],
)
def test_options_that_need_all_rows_in_one_step(option: dict[str, Any], words: str):
    model, reference = policies()

    def main(rank: int) -> str:
        mine = copy.deepcopy(model)
        parallelize_module(mine, cp_mesh(2), ModuleContextParallel())
        trainer = Long(mine, reference)
        assert trainer.get_train_dataloader() == "a loader"
        vars(trainer).update(option)
        with pytest.raises(NotImplementedError, match=words) as refused:
            trainer.get_train_dataloader()
        return str(refused.value)

    assert len(set(run_ranks(main, 2))) == 1


def test_a_model_without_a_style():
    model, reference = policies()
    trainer: Any = Long(model, reference)
    trainer.accelerator.parallelism_config = None
    with pytest.raises(ValueError, match="apply the style before"):
        trainer.get_train_dataloader()


def test_a_head_without_log_probabilities():
    model, reference = policies()

    def main(rank: int) -> None:
        mine = copy.deepcopy(model)
        parallelize_module(mine, cp_mesh(2), ModuleContextParallel())
        mine.register_forward_hook(lambda module, args, found: found.log_probs)
        Long(mine, reference).compute_loss(mine, rows_on(rank) | {"before": torch.zeros(2, COMPLETION)})

    with pytest.raises(RankError, match=r"Install trl 1\.16 or later"):
        run_ranks(main, 2)
