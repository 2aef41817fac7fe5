"""Ranks that were given different things to do: an error on all of them, that says who differs and in what."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles.functional import context_attention
from cp_styles.layout import contiguous, head_tail
from cp_styles.mask import Causal
from cp_styles.strategies import AllGather, Ring
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from tests.ranks.attention_case import Core, parallel, plain
from tests.ranks.leak_scene import RANKS, Even, Scene, refusals

LENGTH = Even.problem.inputs[0].shape[2]


@pytest.mark.parametrize("door", ["style", "function"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x[:1],
            "dtype or attn_mask: ranks [2] differ from rank 0; here it is",
        ),
        (lambda x: x[..., :6], "disagree on shape (beside the sequence), dtype or attn_mask: ranks [2] differ"),
        (lambda x: x.float(), "disagree on shape (beside the sequence), dtype or attn_mask: ranks [2] differ"),
        (lambda x: torch.cat((x, x), 2), "positions, but the layout head_tail gives them"),
    ],
)
def test_ranks_that_disagree_in_shape_or_dtype(door: str, change, message: str):
    def act(s: Scene):
        leaves = [change(x) if s.rank == 2 else x for x in s.leaves()[0]]
        attend = parallel(Core(), s.mesh) if door == "style" else partial(context_attention, group=s.mesh)
        attend(*leaves)

    assert message in refusals(act)


@pytest.mark.parametrize(
    "options",
    [{"strategy": AllGather()}, {"strategy": Ring(keep_kv=False)}, {"layout": contiguous}, {"mask": Causal()}],
    ids=plain,
)
@pytest.mark.parametrize("door", ["style", "function"])
def test_ranks_that_disagree_in_what_to_do(door: str, options: dict):
    def act(s: Scene):
        mine = options if s.rank == 0 else {}
        leaves = [x.narrow(2, 0, 4) for x in s.leaves(head_tail)[0]]  # equal parts, so that only the options differ
        if door == "style":
            parallel(Core(causal=False), s.mesh, **mine)(*leaves)
        else:
            context_attention(*leaves, s.mesh, **mine)

    lines = refusals(act).splitlines()
    assert len(lines) == RANKS  # each names its own
    for line in lines:
        assert re.search(
            r"disagree on strategy, layout, mask or kernel.*: ranks \[1, 2\] differ from rank 0; here it is", line
        )


STYLES = {"module": ModuleContextParallel, "style": AttentionContextParallel}


class Calls(nn.Module):
    """Calls attention with options that a test sets, of its own on each rank."""

    options: dict

    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **self.options)


# Where the layout itself is given, ranks agree once, at the call; a balancer is told the length before.
LAYOUTS = {"balancer": contiguous, "layout": contiguous(LENGTH, RANKS)}


def calling(door: str, layout: str, **option):
    """What ``refusals`` needs: rank 0 calls attention with an option that the others do not give."""

    def act(s: Scene):
        module = parallelize_module(Calls(), s.mesh, STYLES[door](layout=LAYOUTS[layout]))
        module.options = option if s.rank == 0 else {}
        module(*s.leaves(contiguous)[0])

    return act


@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("door", STYLES)
@pytest.mark.parametrize(("option", "said"), [({"is_causal": True}, "is_causal=True"), ({"scale": 0.5}, "scale=0.5")])
def test_ranks_that_disagree_in_the_call(option: dict, said: str, door: str, layout: str, no_grad: bool):
    """A module may decide by what it sees of the sequence, where ranks do not see the same."""

    def act(s: Scene):
        with torch.inference_mode() if no_grad else nullcontext():
            calling(door, layout, **option)(s)

    first, *others = refusals(act).splitlines()
    assert "ranks [1, 2] differ from rank 0" in first
    assert said in first
    assert all("is_causal=False, scale=None" in line for line in others)


class Failing(nn.Module):
    """Does not get to its attention, or not to one that is context parallel."""

    alone: Callable[..., torch.Tensor] | None = None

    def forward(self, query, key, value):
        attend = self.alone or partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        return attend(query, key, value)


def fails(*tensors):
    raise ValueError("my own mistake")


@pytest.mark.parametrize(
    ("alone", "message"),
    [
        (
            partial(F.scaled_dot_product_attention, dropout_p=0.1, enable_gqa=True),
            "nothing may gather the sequence inside",
        ),
        (lambda q, k, v: v * 2.0, "no fused attention op was reached inside the module"),
        (fails, "my own mistake"),
        (
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, attn_mask=torch.ones(LENGTH + 1, LENGTH + 1) > 0, enable_gqa=True
            ),
            "nothing may gather the sequence",
        ),
    ],
    ids=["dropout", "no attention", "own exception", "a mask of another length"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_alone_does_not_attend(alone, message: str, layout: str):
    """The others would wait for its keys."""

    def act(s: Scene):
        module = parallelize_module(Failing(), s.mesh, AttentionContextParallel(layout=LAYOUTS[layout]))
        module.alone = alone if s.rank == 1 else None
        module(*s.leaves(contiguous)[0])

    lines = {line[:6]: line for line in refusals(act).splitlines() if line.startswith("rank ")}
    assert message in lines["rank 1"]
    for line in (lines["rank 0"], lines["rank 2"]):
        assert "ranks [1] of mesh axis 'cp' refused the attention inside (their own error says why)" in line


@pytest.mark.parametrize(
    ("change", "mine", "others"),
    [
        (lambda x: x.int(), "must share one floating-point dtype", "ranks [1] of mesh axis 'cp' refused their inputs"),
        (lambda x: x[:, :, 1:], "hold 11 together", "hold 11 together"),
        (lambda x: x.float(), "ranks [1] differ from rank 0", "ranks [1] differ from rank 0"),
        (lambda x: x[:1], "ranks [1] differ from rank 0", "ranks [1] differ from rank 0"),
    ],
    ids=["refused", "length", "dtype", "batch"],
)
def test_one_rank_has_other_inputs_where_the_layout_is_given(change, mine: str, others: str):
    """Nobody asks before the call then; a rank that sees that its inputs are wrong does not get there."""

    def act(s: Scene):
        module = parallelize_module(Calls(), s.mesh, AttentionContextParallel(layout=LAYOUTS["layout"]))
        module.options = {}
        module(*(change(x) if s.rank == 1 else x for x in s.leaves(contiguous)[0]))

    said = refusals(act).splitlines()
    first, second, third = said * RANKS if len(said) == 1 else said
    assert mine in second
    assert others in first
    assert others in third


@pytest.mark.parametrize("named", [0, 1])
def test_only_one_rank_is_given_the_layout(named: int):
    """It agrees at its call, the others before it: they meet all the same."""

    def act(s: Scene):
        layout = LAYOUTS["layout" if s.rank == named else "balancer"]
        module = parallelize_module(Calls(), s.mesh, AttentionContextParallel(layout=layout))
        module.options = {}
        module(*s.leaves(contiguous)[0])

    lines = refusals(act).splitlines()
    assert len(lines) == RANKS
    assert all("disagree on strategy, layout, mask or kernel" in line for line in lines)
