"""DPO, GRPO and a reward model by the lines of the page: exact in float64. What trainers do instead is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import logsigmoid

from cp_styles import (
    BackboneContextParallel,
    ModuleContextParallel,
    SequenceScope,
    Tree,
    head_tail,
    parallelize_module,
)
from cp_styles.integrations.trainers import ContextParallelTrainer
from cp_styles.testing import RankError, run_ranks
from cp_styles.verify import verify
from tests.clients.hugging_face import (
    NAME,
    StayDouble,
    causal_lm,
    config_of,
    gradients,
    largest_error,
    tiny,
    tokens_of,
    under_style,
)
from tests.clients.test_mixers import MODELS
from tests.clients.test_transformers import EXACT
from tests.oracle import error, randn
from tests.pages import example
from tests.ranks.attention_case import every_rank_raises

PROMPT = 6


def models(number: int) -> list[Any]:
    """Of other weights each."""
    made = [tiny(causal_lm, config_of("llama", num_hidden_layers=2)) for _ in range(number)]
    for index, model in enumerate(made):
        for parameter in model.parameters():
            parameter.data *= 1 + index / 7
    return made


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: x.detach() for name, x in model.named_parameters()}


def log_probs(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[B, S - 1], by one process, 0 where there is no label."""
    logs = model(tokens).logits[:, :-1].log_softmax(-1)
    return logs.gather(2, tokens[:, 1:, None])[..., 0] * (labels[:, 1:] != -100)


def on_a_rank(names: dict[str, Any], code: str, ranks: int = 2) -> dict[str, Any]:
    """The code of the page with copies of these names; models among them get the style."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    mine = copy.deepcopy(names) | {"mesh": mesh, "torch": torch, "copy": copy}
    for model in (each for each in mine.values() if isinstance(each, torch.nn.Module)):
        model.set_attn_implementation(NAME)
        parallelize_module(model, mesh, ModuleContextParallel())
    if "model" in mine:
        mine["optimizer"] = torch.optim.SGD(mine["model"].parameters(), lr=0.1)
    with StayDouble():
        exec(example("log-probabilities") + code, mine)
    return mine


def on_ranks(names: dict[str, Any], code: str) -> list[dict[str, Any]]:
    # The page's GRPO seeds for generate(), which draws nothing here.
    return run_ranks(lambda _: on_a_rank(names, code), 2, may_seed=True)


def test_dpo():
    model, reference = models(2)
    one, beta, pairs = copy.deepcopy(model), 0.3, []
    for seed, stop in ((0, 21), (1, 17)):  # of two lengths
        tokens = tokens_of(stop, seed)
        labels = tokens.masked_fill(torch.arange(stop) < PROMPT, -100)
        labels[1, -3:] = -100
        pairs.append({"input_ids": tokens, "labels": labels})
    with StayDouble():
        good, bad = ([log_probs(m, *pair.values()).sum(1) for m in (one, reference)] for pair in pairs)
    loss = -logsigmoid(beta * (good[0] - bad[0] - (good[1] - bad[1]).detach())).mean()
    loss.backward()
    names = {"model": model, "reference": reference, "beta": beta, "chosen": pairs[0], "rejected": pairs[1]}
    for found in on_ranks(names, example("dpo")):
        assert (
            largest_error((found["loss"].detach(), gradients(found["model"])), (loss.detach(), gradients(one))) < EXACT
        )


def test_log_probabilities_of_packs():
    """Samples of several lengths on each rank. One rank has none in the second pack."""
    (model,) = models(1)
    one, lengths = copy.deepcopy(model), [[5, 9, 12, 3], [11]]
    samples = [[tokens_of(length, seed=length + rank)[0] for length in each] for rank, each in enumerate(lengths)]
    advantages = [randn(1, 4).tolist(), randn(2, 1).tolist()]
    total = torch.zeros((), dtype=torch.float64)
    with StayDouble():
        for each, factors in zip(samples, advantages, strict=True):
            for tokens, factor in zip(each, factors, strict=True):
                total = total + factor * log_probs(one, tokens[None], tokens[None]).exp().sum()
    total.backward()

    def on(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("both",))
        mine = copy.deepcopy(model)
        mine.set_attn_implementation(NAME)
        parallelize_module(mine, mesh, ModuleContextParallel())
        losses: list[torch.Tensor] = []

        def loss_of(found: torch.Tensor, index: int) -> torch.Tensor:
            losses.append(advantages[rank][index] * found[:-1].exp().sum())
            return losses[-1]

        names = {"model": mine, "both": mesh, "samples": samples[rank], "most": 14, "loss_of": loss_of}
        with StayDouble():
            exec(example("packed log-probabilities"), names)
        assert len(losses) == len(samples[rank])
        return torch.stack(losses).detach().sum(), gradients(mine)

    found = run_ranks(on, 2)
    loss = torch.stack([each for each, _ in found]).sum()
    for _, each in found:
        assert largest_error((loss, each), (total.detach(), gradients(one))) < EXACT


def test_a_reward_model():
    """Pairs of two lengths, with padding at the end."""
    config = config_of("llama", num_hidden_layers=2, num_labels=1, pad_token_id=0)
    model, pairs = tiny(transformers.LlamaForSequenceClassification, config), []
    for seed, length in ((0, 21), (1, 17)):
        tokens = tokens_of(length, seed).clamp_min(1)
        tokens[1, -3:] = 0
        pairs.append({"input_ids": tokens, "attention_mask": (tokens != 0).long()})
    one = copy.deepcopy(model)
    with StayDouble():
        good, bad = (one(**pair).logits for pair in pairs)
    loss = -logsigmoid(good - bad).mean()
    loss.backward()

    def on(rank: int) -> Any:
        mesh, mine = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), copy.deepcopy(model)
        mine.set_attn_implementation(NAME)
        names: dict[str, Any] = {"model": mine, "mesh": mesh, "chosen": pairs[0], "rejected": pairs[1]}
        with StayDouble():
            exec(example("reward"), names)
        return names["loss"].detach(), gradients(mine)

    for found in run_ranks(on, 2):
        assert largest_error(found, (loss.detach(), gradients(one))) < EXACT


def grpo_alone(
    one: Any, rollout: Callable[[], torch.Tensor], advantages_of: Callable[..., torch.Tensor], batches: int
) -> list[torch.Tensor]:
    """The losses of the page's loop, of two updates for each rollout, by one process."""
    losses, optimizer = [], torch.optim.SGD(one.parameters(), lr=0.1)
    for _ in range(batches):
        tokens = rollout()
        advantages = advantages_of(tokens)
        labels = tokens.masked_fill(torch.arange(tokens.shape[1]) < PROMPT, -100)
        old = None
        for _ in range(2):
            with StayDouble():
                new = log_probs(one, tokens, labels)
            old = new.detach() if old is None else old
            ratio = (new - old).exp()
            gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
            loss = -(gain * (labels[:, 1:] != -100)).sum() / (labels[:, 1:] != -100).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses


def test_grpo():
    """Two updates of one rollout, whose second has ratios that are not 1; and the next rollout sees what they did."""
    (model,) = models(1)
    prompts, advantages = tokens_of(PROMPT), torch.tensor([1.5, -0.5], dtype=torch.float64)
    completed = [torch.cat((prompts, tokens_of(21 - PROMPT, seed)), 1) for seed in (3, 4)]

    class Given(type(model)):
        """Its completions are given: a library's would draw from the threads' one generator."""

        def generate(self, given: torch.Tensor, **_: Any) -> torch.Tensor:
            self(given)  # on this rank
            return next(self.pending)

    model.__class__ = Given
    names = {"model": model, "batches": [prompts] * 2, "seed": 0, "new_tokens": 15, "updates": 2}
    names |= {"advantages_of": lambda tokens: advantages}
    one = copy.deepcopy(model)
    model.pending = iter(completed)
    losses = grpo_alone(one, iter(completed).__next__, names["advantages_of"], 2)
    assert losses[0] != losses[1]
    for found in on_ranks(names, example("grpo")):
        trained = parameters_of(found["model"])
        assert largest_error((found["loss"].detach(), trained), (losses[-1], parameters_of(one))) < EXACT


@pytest.mark.parametrize("other", ["completion_mask", "attention_mask"], ids=["preferences", "rewards"])
def test_trainers_of_such_losses_are_refused(other: str):
    (model,) = models(1)

    class Preferences:
        model_accepts_loss_kwargs, accelerator = False, SimpleNamespace()

        def __init__(self, model: Any) -> None:
            self.model = model

        def compute_loss(self, *_: Any, **__: Any) -> None:
            raise AssertionError("not reached")

    class Long(ContextParallelTrainer, Preferences): ...  # pyright: ignore[reportGeneralTypeIssues]

    def on(rank: int) -> None:
        _, mine = under_style(model, 2)
        Long(mine).compute_loss(mine, {"input_ids": tokens_of(), other: tokens_of()})

    with every_rank_raises(rf"no labels but \['input_ids', '{other}'\]: .* Apply BackboneContextParallel in place"):
        run_ranks(on, 2)


# A prompt, a rollout that branches twice, another rollout, and a prompt with two rollouts.
TREE = Tree((9, 4, 3, 5, 6, 4, 2, 3), (-1, 0, 1, 1, 0, -1, 5, 5))


def tree_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels of the rollouts, and advantages of both signs."""
    tokens = tokens_of(TREE.length)[:1]
    node = torch.arange(8).repeat_interleave(torch.tensor(TREE.lengths))
    labels = tokens.masked_fill((node == 0) | (node == 5), -100)
    return tokens, labels, randn(5, len(TREE.rollouts))


def one_by_one(model: Any, tokens: torch.Tensor, labels: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """The loss of one process: each rollout is a sequence of its own. The divisor counts each label once."""
    total = torch.zeros((), dtype=torch.float64)
    for number, advantage in enumerate(advantages):
        mine = TREE.tokens(number)
        with StayDouble():
            total = total - advantage * log_probs(model, tokens[:, mine], labels[:, mine]).sum()
    return total / (labels != -100).sum()


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_tree_of_rollouts(kind: str, ranks: int):
    """Windows of 5 tokens, of all layers or some, count along each rollout."""
    model = tiny(causal_lm, config_of(kind, num_hidden_layers=2))
    tokens, labels, advantages = tree_batch()
    one, names = copy.deepcopy(model), {"model": model, "tokens": tokens, "labels": labels, "advantages": advantages}
    names |= {"lengths": TREE.lengths, "parents": TREE.parents}
    loss = one_by_one(one, tokens, labels, advantages)
    loss.backward()
    for found in run_ranks(lambda _: on_a_rank(names, example("tree"), ranks), ranks):
        mine = found["loss"].detach(), gradients(found["model"])
        assert largest_error(mine, (loss.detach(), gradients(one))) < EXACT


@pytest.mark.parametrize("code", [("", ""), ("[:, batch.rows]", "[:, batch.rows.sort().values]")], ids=["page", "rows"])
def test_verify_proves_the_lines_of_the_page(code: tuple[str, str]):
    """And finds rows of logits in another order than their labels."""
    (model,), (tokens, labels, advantages) = models(1), tree_batch()
    line = example("tree").replace(*code) if code[0] else example("tree")

    def step(model: Any, batch: dict[str, Any], mesh: Any) -> torch.Tensor:
        names = batch | {"model": model, "mesh": mesh, "lengths": TREE.lengths, "parents": TREE.parents}
        exec(line, names)
        return names["loss"]

    def on(rank: int) -> None:
        mesh, mine = under_style(model, 2)
        with StayDouble():
            verify(mine, mesh, {"tokens": tokens, "labels": labels, "advantages": advantages}, step)

    if not code[0]:
        run_ranks(on, 2)
        return
    with pytest.raises(RankError, match="labels, weights or the loss itself"):
        run_ranks(on, 2)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            'positions = batch["position_ids"]',
            "positions = batch.positions[None]",
            r"position_ids are not .* of the Tree .* give tree.position_ids, each rank its part",
        ),
        ("with batch.scope():", "if True:", "position_ids neither count on nor restart in the order of the sequence"),
    ],
    ids=["positions", "scope"],
)
def test_positions_that_are_not_in_the_rollouts(right: str, wrong: str, message: str):
    names = dict(zip(("model", "tokens", "labels", "advantages"), (models(1)[0], *tree_batch()), strict=True))
    names |= {"lengths": TREE.lengths, "parents": TREE.parents, "head_tail": head_tail}
    code = example("tree").replace(right, wrong).replace("partial(by_work, mask=tree)", "head_tail")
    with every_rank_raises(message):
        run_ranks(lambda _: on_a_rank(names, code), 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tree_around_a_backbone(ranks: int):
    """Whole batches: transformers would take each run of positions for a document."""
    (model,), (tokens, *_) = models(1), tree_batch()

    def on(rank: int, positions: torch.Tensor) -> torch.Tensor:
        _, mine = under_style(model, ranks, BackboneContextParallel())
        with StayDouble(), torch.no_grad(), SequenceScope(head_tail(TREE.length, ranks), mask=TREE):
            return mine(tokens, position_ids=positions[None]).logits

    expected = torch.empty(1, TREE.length, model.config.vocab_size, dtype=torch.float64)
    for number in range(len(TREE.rollouts)):
        mine = TREE.tokens(number)
        with StayDouble(), torch.no_grad():
            expected[:, mine] = model(tokens[:, mine]).logits
    for found in run_ranks(on, ranks, TREE.position_ids):
        assert error(found, expected) < EXACT
    with every_rank_raises(r"position_ids are not the positions in the rollouts of the Tree", ranks):
        run_ranks(on, ranks, torch.arange(TREE.length))


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next", "lfm2"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_states_do_not_branch(kind: str, ranks: int):
    """A recurrence alone, one next to attention, and a short convolution; also with one rank, as in verify."""
    model = tiny(causal_lm, config_of(kind, **{"num_hidden_layers": 2, **MODELS[kind]}))
    tokens, labels, advantages = tree_batch()
    names = {"model": model, "tokens": tokens, "labels": labels, "advantages": advantages}
    names |= {"lengths": TREE.lengths, "parents": TREE.parents}
    code = example("tree")
    code = code.replace(", position_ids=positions", "") if kind == "mamba2" else code
    with every_rank_raises(r"a Tree around a recurrence, .* Give this model whole rollouts", ranks):
        run_ranks(lambda _: on_a_rank(names, code, ranks), ranks)
