"""Heads of transformers that need the whole sequence, and encoders of pictures: exact by the lines of the page."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")

import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.dinov3_vit import modeling_dinov3_vit

from cp_styles import (
    BackboneContextParallel,
    BatchSharder,
    ModuleContextParallel,
    contiguous,
    parallelize_module,
    sum_gradients,
)
from cp_styles.testing import RankError, run_ranks
from tests.clients import sweep_heads
from tests.clients.hugging_face import (
    NAME,
    StayDouble,
    config_of,
    gradients,
    largest_error,
    positions_of,
    tiny,
    tokens_of,
    under_style,
)
from tests.clients.sweep_heads import EXACT, KINDS, alone, of_kind, on_ranks, trained
from tests.covering import at_night
from tests.pages import example
from tests.ranks.attention_case import every_rank_raises

# The types of each kind that are exact, of transformers 5.24; the first ones are run by default.
SAMPLE = {
    "classes": ["llama", "gpt2", "gemma3_text", "bert", "modernbert", "qwen3_next", "bart"],
    "tokens": ["roberta", "t5"],
    "answers": ["qwen3"],
    "choices": ["bert"],
    "sentences": ["bert"],
    "masked": ["modernbert"],
    "bodies": ["esm"],
    "images": ["beit", "dinov2_with_registers"],
    "vision": ["siglip_vision_model", "deit"],
}
LEAST = {"classes": 80, "tokens": 66, "answers": 25, "choices": 14, "sentences": 3}
LEAST |= {"masked": 24, "bodies": 25, "images": 10, "vision": 16}
ROWS = [(kind, model_type) for kind, names in SAMPLE.items() for model_type in names]


def case(kind: str, model_type: str) -> tuple[Any, dict[str, Any]]:
    return tiny(KINDS[kind].auto.from_config, of_kind(kind, model_type)).eval(), KINDS[kind].batch()


@pytest.mark.parametrize(("kind", "model_type"), ROWS)
@pytest.mark.parametrize("ranks", [2, *at_night(3, 4)])
def test_exact(kind: str, model_type: str, ranks: int):
    state, details = sweep_heads.verdict(kind, model_type, ranks)
    assert state == "exact", details


def test_classes_under_the_other_style():
    """A class for each sequence is no label of tokens: the error names the style that test_exact runs."""
    model, batch = case("classes", "bert")

    def on(rank: int) -> None:
        mesh, mine = under_style(model, 2)
        mine(**BatchSharder(mesh)({"input_ids": batch["input_ids"]}).inputs, labels=torch.zeros(2, dtype=torch.int64))

    with pytest.raises(RankError, match=r"(?s)rank 0: .*a class for each sequence.* BackboneContextParallel.*rank 1: "):
        run_ranks(on, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_all_types(kind: str, capsys: pytest.CaptureFixture[str]):
    assert sweep_heads.main(["--kind", kind]) == 0
    exact = re.findall(r"^\S+ +exact", capsys.readouterr().out, re.MULTILINE)
    assert len(exact) >= LEAST[kind]


def test_the_example_of_the_page():
    made, rest = example("heads").split("parallelize_module(model", 1)
    model, batch = case("classes", "mistral")

    def on(rank: int) -> Any:
        names: dict[str, Any] = {"config": copy.deepcopy(model.config), "batch": batch}
        names |= {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))}
        exec(made, names)
        names["model"].double().eval().load_state_dict(model.state_dict())
        with StayDouble():
            exec(f"parallelize_module(model{rest}", names)
        return names["loss"].detach(), gradients(names["model"])

    for found in run_ranks(on, 2):
        assert largest_error(found, alone(model, batch)) < EXACT


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["mistral", *at_night("bert", "modernbert")])
def test_other_implementations(model_type: str, implementation: str):
    """Masks are made of the whole sequence, windows too. Attention in plain operations fails, and says why."""
    model, batch = case("classes", model_type)
    if implementation == "sdpa":
        found = on_ranks(model, batch, implementation="sdpa")
        assert max(largest_error(each, alone(model, batch)) for each in found) < EXACT
        return
    with pytest.raises(RankError) as error:
        on_ranks(model, batch, implementation="eager")
    assert error.value.errors.keys() == {0, 1}
    notes = [note for each in error.value.errors.values() for note in getattr(each, "__notes__", ())]
    assert any("Attention in plain operations cannot be context parallel" in note for note in notes)


def test_packed_documents_and_hidden_states():
    """Positions that restart separate documents, which differ from row to row. All hidden states are whole."""
    model, batch = case("classes", "llama")
    positions = positions_of().clone()
    positions[0, 8:] -= 8
    positions[1, 13:] -= 13
    batch = {"input_ids": tokens_of(), "position_ids": positions, "labels": batch["labels"]}

    def of_states(mine: Any) -> Any:
        with StayDouble():
            out = mine(**batch, output_hidden_states=True)
        assert len(out.hidden_states) == 3
        (out.loss + sum((x**2).sum() for x in out.hidden_states)).backward()
        return out.loss.detach(), gradients(mine)

    def on(rank: int) -> Any:
        mesh, mine = under_style(model, 2, BackboneContextParallel())
        loss, _ = of_states(mine)
        sum_gradients(mine, mesh)
        return loss, gradients(mine)

    wanted = of_states(copy.deepcopy(model))
    together = alone(model, {name: x for name, x in batch.items() if name != "position_ids"})
    assert largest_error(wanted, together) > 1e-3
    for found in run_ranks(on, 2):
        assert largest_error(found, wanted) < EXACT


@pytest.mark.parametrize("model_type", ["bart", *at_night("t5")])
def test_a_decoder_of_another_length(model_type: str):
    """Each layer of the decoder attends to the encoder's tokens, which are cut by a layout of their own."""
    model, batch = case("bodies", "bart")[0], KINDS["bodies"].batch()
    if model_type == "t5":
        model = tiny(transformers.AutoModel.from_config, config_of("t5")).eval()
    batch["decoder_input_ids"] = tokens_of(13, seed=4)
    wanted = alone(model, batch)
    assert max(largest_error(found, wanted) for found in on_ranks(model, batch, 3)) < EXACT


class Embedder(nn.Module):
    """Embeddings of sentences: the mean over tokens that are no padding, in code of a user."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.project = body, nn.Linear(32, 8).double()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(hidden.dtype)
        return self.project((hidden * weights).sum(1) / weights.sum(1))


def test_embeddings_of_sentences():
    """Two calls, of other lengths, in one loss of similarities."""
    torch.manual_seed(0)
    model, batch = Embedder(case("bodies", "bert")[0]), KINDS["bodies"].batch()
    other = {name: x[:, :15].flip(0) for name, x in batch.items()}

    def step(mine: Any) -> Any:
        with StayDouble():
            a, b = (nn.functional.normalize(mine(**each), dim=1) for each in (batch, other))
            loss = nn.functional.cross_entropy(a @ b.T * 5, torch.arange(2))
        loss.backward()
        return loss.detach(), gradients(mine)

    def on(rank: int) -> Any:
        mesh, mine = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), copy.deepcopy(model)
        mine.body.set_attn_implementation(NAME)
        parallelize_module(mine, mesh, BackboneContextParallel())
        loss, _ = step(mine)
        sum_gradients(mine, mesh)
        return loss, gradients(mine)

    wanted = step(copy.deepcopy(model))
    for found in run_ranks(on, 2):
        assert largest_error(found, wanted) < EXACT


def cut(model: Any, mesh: Any) -> None:
    model(**BatchSharder(mesh)({"input_ids": tokens_of()}).inputs)


def generated(model: Any, mesh: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    assert model.generate(tokens_of(), use_cache=False, **options).shape == (2, 23)  # the whole prefix each time
    model.generate(tokens_of(), use_cache=True, **options)


def with_experts(model: Any, mesh: Any) -> None:
    model(input_ids=tokens_of(), labels=tokens_of(), output_router_logits=True)


REFUSED = {
    cut: "is given the same whole batch, which nothing cuts",
    generated: "is given a cache, whose keys would be parts",
    with_experts: "returns an aux_loss",
}


@pytest.mark.parametrize("use", REFUSED, ids=lambda use: use.__name__)
def test_uses_that_are_refused(use: Any):
    config = config_of("mixtral" if use is with_experts else "llama")
    model = tiny(transformers.AutoModelForCausalLM.from_config, config).eval()

    def on(rank: int) -> None:
        mesh, mine = under_style(model, 2, BackboneContextParallel())
        use(mine, mesh)

    with every_rank_raises(REFUSED[use]):
        run_ranks(on, 2)


def test_rotary_embeddings_without_registers(monkeypatch: pytest.MonkeyPatch):
    """Refused, unless it is known where the rows of a block begin, as in DINOv3."""
    monkeypatch.setattr(modeling_dinov3_vit, "apply_rotary_pos_emb", None)
    config = transformers.AutoConfig.for_model("dinov3_vit", **sweep_heads.SIGHT)
    model = tiny(transformers.AutoModel.from_config, config).eval()
    with pytest.raises(RankError, match=r"position_embeddings with 16 rows for \d+ tokens, as rotary"):
        on_ranks(model, KINDS["vision"].batch(), 2, "sdpa", ModuleContextParallel(layout=contiguous))


def test_a_model_of_one_rank():
    """A mesh of one rank changes nothing."""
    model, batch = case("classes", "llama")

    def on(rank: int) -> Any:
        _, mine = under_style(model, 1, BackboneContextParallel())
        return trained(mine, batch)

    assert largest_error(run_ranks(on, 1)[0], alone(model, batch)) < EXACT
