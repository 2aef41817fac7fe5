"""Models of transformers with keys for groups of tokens: windows (DeepSeek-V4), blocks (Qwen4-exp), pools (GLM5-next).

The oracle is their own code on one process, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import (
    AllGather,
    Causal,
    Documents,
    ModuleContextParallel,
    Ring,
    SequenceLayout,
    SequenceScope,
    Ulysses,
    contiguous,
    head_tail,
    parallelize_module,
    striped,
)
from cp_styles.layouts import Balancer
from cp_styles.mixers import compressed
from cp_styles.testing import CommunicationTrace, RankError, run_ranks
from tests.clients.hugging_face import (
    LENGTH,
    StayDouble,
    batch_of,
    checkpoint_layers,
    error_of,
    nearly_all_on_one,
    on_ranks,
    positions_of,
    prefilled,
    tokens_of,
    under_style,
)
from tests.clients.sweep import EAGER, tiny_of
from tests.clients.test_query_biases import MODELS as QUERY_BIASES
from tests.covering import sampled
from tests.ranks.attention_case import every_rank_raises

pytestmark = pytest.mark.skipif("dory" not in transformers.CONFIG_MAPPING, reason="transformers 5.24")

# float64 sums in another order give 1e-14; one window too many or too few gives 1e-3 and more.
EXACT = 1e-10
MODELS = "deepseek_v4", "qwen4_exp_text", "glm5_next_text", "minimax_m3_vl_text"


def own_code(model_type: str) -> str:
    """The implementation of the oracle."""
    return "eager" if model_type in EAGER else "dense"


@sampled(
    2,
    model_type=MODELS,
    length=[3, 7, 20, 37],
    ranks=[1, 2, 3],
    layout=[head_tail, contiguous, striped, nearly_all_on_one],
    strategy=[Ring(), Ring(keep=0), AllGather(), Ulysses()],
    checkpointed=[False, True],
)
def test_exact(model_type: str, length: int, ranks: int, layout: Balancer, strategy: Any, checkpointed: bool):
    """Lengths without a window, and that are no multiple of one; ranks without windows; equal scores of an indexer."""
    if isinstance(strategy, Ulysses) and (model_type != "deepseek_v4" or ranks == 3):
        strategy = Ring()  # selected keys of its tokens, and heads that three ranks do not divide
    model = tiny_of(model_type)
    if checkpointed:
        checkpoint_layers(model)
    style = {"layout": layout, "strategy": strategy}
    assert error_of(model, length, own_code(model_type), ranks=ranks, balancer=layout, style=style) < EXACT


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sequence_without_windows_of_a_layer(ranks: int):
    """Five tokens with windows of three and six: parameters of the latter have no gradient, as on one device."""
    assert error_of(tiny_of("deepseek_v4"), 5, "eager", ranks=ranks) < EXACT


@pytest.mark.parametrize("model_type", MODELS)
def test_an_indexer_token_by_token(model_type: str, monkeypatch):
    monkeypatch.setattr(compressed, "_SCORES", 1)
    assert error_of(tiny_of(model_type), LENGTH, own_code(model_type)) < EXACT


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "padding": (
        lambda: {
            "whole": {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long).index_fill_(1, torch.tensor(0), 0)}
        },
        "makes groups of consecutive tokens",
    ),
    "packed documents": (
        lambda: {"scope": lambda layout: SequenceScope(layout, mask=Documents((12, LENGTH - 12)))},
        "makes groups of consecutive tokens",
    ),
    "a mask of the part": (lambda: {"implementation": "eager"}, "register_attention"),
}


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("case", WRONG)
def test_refused(model_type: str, case: str):
    options, words = WRONG[case]
    (inputs, labels), model = batch_of(), tiny_of(model_type)
    with every_rank_raises(words):
        on_ranks(model, inputs, labels, **options())


def test_an_error_leaves_no_windows_behind():
    """A refusal of the attention, behind the compressor: the next forward must not find its windows."""
    kind = {"num_hidden_layers": 1, "layer_types": ["heavily_compressed_attention"]}
    model = tiny_of("deepseek_v4", attention_dropout=0.5, **kind)

    def on(rank: int) -> list[str]:
        _, mine = under_style(model, 2, ModuleContextParallel(layout=head_tail))
        layout = head_tail(LENGTH, 2)
        with StayDouble(), pytest.raises(NotImplementedError, match=r"dropout_p=0\.5"):
            mine(input_ids=layout.shard(tokens_of(), 1, rank), position_ids=layout.shard(positions_of(), 1, rank))
        return [path for path, module in mine.named_modules() if "_context_windows" in vars(module)]

    assert run_ranks(on, 2) == [[], []]


def test_a_mask_of_the_style_is_refused():
    with pytest.raises(RankError, match=r"of which Causal\(\) says nothing: leave mask= out.*\n.*leave mask= out"):
        on_ranks(tiny_of("deepseek_v4"), *batch_of(), style={"layout": head_tail, "mask": Causal()})


@pytest.mark.parametrize("model_type", [*MODELS, *QUERY_BIASES])
def test_a_prefill_is_refused(model_type: str):
    with every_rank_raises("generate on each rank alone", each=True):
        prefilled(tiny_of(model_type).eval())


@pytest.mark.parametrize("model_type", [name for name in MODELS if name != "glm5_next_text"])  # it has no head
def test_a_copy_from_before_the_style_generates(model_type: str):
    """The remedy of the page, with the weights that the ranks have trained."""
    model = tiny_of(model_type).eval()
    with StayDouble():
        wanted = model.generate(tokens_of(), max_new_tokens=3, do_sample=False)

    def on(rank: int) -> torch.Tensor:
        mine = copy.deepcopy(model)
        alone = copy.deepcopy(mine)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        parallelize_module(mine, mesh, ModuleContextParallel(layout=head_tail))
        alone.load_state_dict(mine.state_dict())
        with StayDouble():
            return alone.generate(tokens_of(), max_new_tokens=3, do_sample=False)

    assert all(torch.equal(found, wanted) for found in run_ranks(on, 2))


def test_what_windows_send():
    """Each window of 6 tokens is one row, and projected rows travel where a window begins on another rank."""
    kind = "heavily_compressed_attention"
    model, tokens = tiny_of("deepseek_v4", num_hidden_layers=1, layer_types=[kind]), tokens_of(36)
    head_dim, batch = model.config.head_dim, len(tokens)

    def on(rank: int) -> list[tuple[str, int]]:
        layout = SequenceLayout.from_chunks([[(0, 20)], [(20, 36)]])
        _, mine = under_style(model, 2, ModuleContextParallel(layout=layout, strategy=AllGather(), verified=True))
        parts = {"input_ids": layout.shard(tokens, 1, rank), "position_ids": layout.shard(positions_of(36), 1, rank)}
        with StayDouble(), torch.no_grad(), CommunicationTrace() as trace:
            mine(**parts)
        return [event for event in trace.events if event[0] != "all_gather"]

    row = batch * head_dim * 8
    first, second = run_ranks(on, 2)
    # Window 3 has the tokens 18 to 23, so rank 1 makes its key. Rank 0 sends two rows of keys and gates; a window of
    # attention, 4 rows of k and v; and the keys of its 3 windows. Rank 1 sends no rows, and no query sees its windows.
    near = min(model.config.sliding_window - 1, 20)
    assert first == [("all_to_all", 2 * 2 * row), ("send", 2 * near * row), ("send", 2 * 3 * row)]
    assert second == [("all_to_all", 0)]
