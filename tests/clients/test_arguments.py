"""The arguments that models of transformers give to the attention that is registered: each is known, or is refused."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cp_styles import ModuleContextParallel, head_tail
from cp_styles.integrations.transformers.attention import attention_function
from cp_styles.testing import run_ranks
from tests.clients.hugging_face import LENGTH, causal_lm, config_of, positions_of, tiny, tokens_of, under_style
from tests.ranks.attention_case import every_rank_raises


def known() -> set[str]:
    """The parameters of the attention that its body reads."""
    body = ast.parse(textwrap.dedent(inspect.getsource(attention_function)))
    read = {name.id for name in ast.walk(body) if isinstance(name, ast.Name)}
    return read & set(inspect.signature(attention_function).parameters)


# They tell what the attention is told by its mask already, or ask for weights, which no fused attention returns.
WITHOUT_EFFECT = {
    "sliding_window",
    "position_ids",
    "output_attentions",
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    "deterministic",  # of flash attention: the order of its sums
}


def calls_of(function: str, text: str) -> Iterator[ast.Call]:
    """The calls of a function of this name in a module, which is not parsed as a whole: that takes ten times longer."""
    for found in re.finditer(rf"\b{function}\(", text):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        with contextlib.suppress(SyntaxError):  # of a definition
            call = ast.parse(textwrap.dedent(text[found.start() : end]), mode="eval").body
            assert isinstance(call, ast.Call)
            yield call


def arguments_by_name() -> dict[str, set[str]]:
    """The keyword arguments at calls of attention functions, with the models that give them."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        for call in calls_of("attention_interface", path.read_text()):
            for keyword in call.keywords:
                if keyword.arg is not None:
                    found[keyword.arg].add(path.parent.name)
    return found


def test_each_argument_of_a_model_is_known():
    """An argument that nobody reads would be a model that trains wrongly without a word."""
    found = arguments_by_name()
    assert {"scaling", "s_aux", "block_indices"} <= set(found) or "dory" not in transformers.CONFIG_MAPPING
    assert {name: sorted(models) for name, models in found.items() if name not in known() | WITHOUT_EFFECT} == {}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("block_indices", "attends to keys that an unknown indexer has selected"),
        ("sinks", "gives its attention sinks= of each query"),
    ],
)
def test_keys_or_sinks_of_each_query_are_refused(argument: str, words: str):
    """As MiniMax M3 and Inkling 2 give them."""
    model: Any = tiny(causal_lm, config_of("llama"))

    def on(rank: int) -> None:
        _, mine = under_style(model, 2, ModuleContextParallel(layout=head_tail))
        layout = head_tail(LENGTH, 2)
        parts = [layout.shard(x, 1, rank) for x in (tokens_of(), positions_of())]
        mine(input_ids=parts[0], position_ids=parts[1], **{argument: torch.zeros(1)})

    with every_rank_raises(words, each=True):
        run_ranks(on, 2)
