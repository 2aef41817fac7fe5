"""A model with a style runs as without it, on tokens that each rank has alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from cp_styles import BackboneContextParallel, BatchSharder, ModuleContextParallel, sum_gradients
from cp_styles.integrations.transformers import on_this_rank
from cp_styles.mixers import context_roll
from cp_styles.testing import run_ranks
from cp_styles.verify import verify
from tests.clients.hugging_face import NAME, VOCABULARY, StayDouble, causal_lm, config_of, gradients, tiny, under_style
from tests.clients.test_mixers import model_of
from tests.covering import at_night
from tests.oracle import error

STYLES = [ModuleContextParallel, BackboneContextParallel]


def prompts_of(rank: int) -> dict[str, torch.Tensor]:
    """Tokens of lengths of its own, with padding on the left."""
    ids = torch.randint(3, VOCABULARY, (2, 8 + 3 * rank), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens by a cache of transformers' own, and logits."""
    given = prompts_of(rank)
    with torch.no_grad(), StayDouble():
        tokens = model.generate(**given, do_sample=False, max_new_tokens=6, use_cache=True, pad_token_id=0)
        return tokens, model(**given).logits


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def with_style(model: Any, style: Any) -> Any:
    return under_style(model, 2, style())[1]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", *at_night("mistral", "gpt_oss", "gpt2", "mixtral")])
def test_ranks_generate_from_prompts_of_their_own(style: Any, model_type: str):
    check_generation(tiny(causal_lm, config_of(model_type, num_hidden_layers=2)).eval(), style)


@pytest.mark.parametrize("model_type", ["lfm2", *at_night("recurrent_gemma", "falcon_h1")])
def test_layers_with_states_generate(model_type: str):
    check_generation(model_of(model_type, use_cache=True).eval(), ModuleContextParallel)


def check_generation(model: Any, style: Any) -> None:
    def main(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = with_style(model, style)
        with on_this_rank(mine):
            return generated(mine, rank)

    for rank, (tokens, logits) in enumerate(run_ranks(main, 2)):
        wanted, wanted_logits = generated(model, rank)
        assert torch.equal(tokens, wanted)
        assert torch.equal(logits, wanted_logits)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("fails", [False, True])
def test_the_style_is_back_after_it(style: Any, fails: bool):
    """Also after an error, and for the attention of the model."""
    model = tiny(causal_lm, config_of("llama", num_hidden_layers=2))
    tokens = prompts_of(0)["input_ids"]
    with StayDouble():
        next_token_loss(model(tokens).logits, tokens).backward()

    def main(rank: int) -> dict[str, torch.Tensor]:
        mine = with_style(model, style)
        with pytest.raises(KeyError) if fails else torch.no_grad(), on_this_rank(mine):
            with torch.no_grad():
                mine(**prompts_of(rank))
            if fails:
                raise KeyError
        assert mine.config._attn_implementation == NAME
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        sharder = BatchSharder(mesh)
        with StayDouble():
            if style is ModuleContextParallel:
                batch = sharder(tokens)
                batch.loss(mine(batch.tokens, position_ids=batch.positions[None]).logits).backward()
            else:
                next_token_loss(mine(tokens).logits, tokens).backward()
        sum_gradients(mine, mesh)
        return gradients(mine)

    for found in run_ranks(main, 2):
        for name, gradient in gradients(model).items():
            assert error(found[name], gradient) < 1e-12


@pytest.mark.parametrize("style", STYLES)
def test_inside_of_another_one(style: Any):
    """The inner one ends, and the outer one goes on. A copy that is made inside is off as long as the model is."""
    model = tiny(causal_lm, config_of("llama", num_hidden_layers=2)).eval()

    def main(rank: int) -> list[torch.Tensor]:
        mine = with_style(model, style)
        with on_this_rank(mine):
            with on_this_rank(mine):
                generated(mine, rank)
            return [generated(each, rank)[1] for each in (mine, copy.deepcopy(mine))]

    for rank, found in enumerate(run_ranks(main, 2)):
        assert all(torch.equal(logits, generated(model, rank)[1]) for logits in found)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["module", "in place"])
def test_compiled(way: str):
    model = tiny(causal_lm, config_of("llama", num_hidden_layers=1)).eval().float()
    torch.compiler.reset()

    def main(rank: int) -> torch.Tensor:
        mine: Any = with_style(model, ModuleContextParallel)
        compiled = torch.compile(mine, backend="eager") if way == "module" else mine
        if way == "in place":
            mine.compile(backend="eager")
        with on_this_rank(mine), torch.no_grad():
            return compiled(**prompts_of(rank)).logits

    for rank, found in enumerate(run_ranks(main, 2)):
        with torch.no_grad():
            assert error(found, model(**prompts_of(rank)).logits) < 1e-6


@pytest.mark.parametrize("style", STYLES)
def test_functions_over_the_ranks_have_this_rank_alone(style: Any):
    """A module of the user that calls a function of this package over the ranks of the style."""
    model = tiny(causal_lm, config_of("llama", num_hidden_layers=1)).eval()

    class Rolled(torch.nn.Module):
        mesh: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.roll(1, 1) if self.mesh is None else context_roll(x, 1, 1, self.mesh)

    model.model.norm = torch.nn.Sequential(model.model.norm, Rolled())

    def main(rank: int) -> torch.Tensor:
        mine = with_style(model, style)
        mine.model.norm[1].mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        with on_this_rank(mine), torch.no_grad(), StayDouble():
            return mine(**prompts_of(rank)).logits

    for rank, found in enumerate(run_ranks(main, 2)):
        with torch.no_grad(), StayDouble():
            assert error(found, model(**prompts_of(rank)).logits) < 1e-12


@pytest.mark.parametrize("style", STYLES)
def test_without_gradients(style: Any):
    model = tiny(causal_lm, config_of("llama", num_hidden_layers=2))

    def main(rank: int) -> bool:
        mine = with_style(model, style)
        with on_this_rank(mine):
            return mine(**prompts_of(rank)).logits.requires_grad

    assert run_ranks(main, 2) == [False, False]


@pytest.mark.parametrize("style", STYLES)
def test_a_step_that_generates_is_verified(style: Any):
    """Tokens that the model makes itself, in the step with all ranks and in the step with one rank."""
    model, prompts = tiny(causal_lm, config_of("llama", num_hidden_layers=2)).eval(), prompts_of(0)["input_ids"]

    def step(model: Any, batch: dict[str, torch.Tensor], mesh: Any) -> torch.Tensor:
        with StayDouble():
            with on_this_rank(model):
                tokens = model.generate(**batch, do_sample=False, max_new_tokens=6, use_cache=True, pad_token_id=0)
            sharder = BatchSharder(mesh)
            if style is ModuleContextParallel:
                part = sharder(tokens)
                loss = part.loss(model(**part.inputs).logits)
            else:
                loss = next_token_loss(model(tokens).logits, tokens)
        loss.backward()
        sum_gradients(model, mesh)
        return loss

    def main(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        mine = with_style(model, style)
        return verify(mine, mesh, {"input_ids": prompts}, step).line

    assert "equal to one device" in run_ranks(main, 2)[0]


def test_a_model_without_a_style():
    model = tiny(causal_lm, config_of("llama", num_hidden_layers=2))
    with pytest.raises(ValueError, match="call it as it is"), on_this_rank(model):
        pass
