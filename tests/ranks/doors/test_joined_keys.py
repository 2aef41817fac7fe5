"""Keys that each rank joins from its parts of several pieces, under a mask: refused however they are joined, and exact
as the page says. Keys of one other sequence, which may be as many times as long, are exact."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AttentionContextParallel,
    Causal,
    ModuleContextParallel,
    SequenceScope,
    context_attention,
    context_flex_attention,
    contiguous,
    head_tail,
    parallelize_module,
    striped,
    sum_gradients,
)
from cp_styles.layouts import join_layouts
from cp_styles.masks import Dense
from cp_styles.testing import RankError, run_ranks
from cp_styles.torch_api import context_parallel
from tests.covering import sampled
from tests.oracle import error, randn
from tests.pages import example
from tests.ranks.attention_case import EXACT, cp_mesh

LENGTH, WIDTH = 9, 4


def by_buffer(*parts: torch.Tensor) -> torch.Tensor:
    joined = torch.empty(*parts[0].shape[:2], sum(x.shape[2] for x in parts), WIDTH, dtype=parts[0].dtype)
    at = 0
    for part in parts:
        joined[:, :, at : at + part.shape[2]] = part
        at += part.shape[2]
    return joined


JOINS: dict[str, Callable[..., torch.Tensor]] = {
    "cat": lambda *parts: torch.cat(parts, 2),
    "a copy": lambda *parts: torch.cat(parts, 2).clone(),
    "detached": lambda *parts: torch.cat(parts, 2).detach(),
    "stack": lambda *parts: torch.stack(parts, 2).flatten(2, 3),
    "a buffer": by_buffer,
}


class Core(nn.Module):
    def forward(self, query, key, value, attn_mask):
        return F.scaled_dot_product_attention(query, key, value, attn_mask)


def attends(door: str, mesh: Any, layout: Any, mask: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The attention of a program: one that a style or a block sees, or a function."""
    if door == "core":
        return parallelize_module(Core(), mesh, AttentionContextParallel(layout=layout))
    options: dict[str, Any] = {"mesh": mesh, "layout": layout}
    if door == "function":
        return lambda q, k, v, _: context_attention(q, k, v, mask=Dense(mask), **options)
    if door == "score_mod":

        def hide(score, b, h, i, j):
            return torch.where(mask[i, j], score, -torch.inf)

        return lambda q, k, v, _: context_flex_attention(q, k, v, score_mod=hide, **options)
    return F.scaled_dot_product_attention


class Pieces(nn.Module):
    """Queries of the last piece, [B, H, L, D], and keys of all."""

    def __init__(self, join: Callable[..., torch.Tensor], attend: Any = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.join, self.inner, self.attend = join, nn.Identity(), attend

    def forward(self, *pieces, mask):
        pieces = [self.inner(x) for x in pieces]
        keys = self.join(*pieces)
        return self.attend(pieces[-1], keys, keys, mask)


@sampled(
    2,
    join=list(JOINS),
    door=["module", "scope", "block", "buffers", "mask of the style", "core", "function", "score_mod"],
    layout=[contiguous, head_tail, striped],
    pieces=[2, 3],
    grad=[True, False],
)
def test_joined_keys_are_refused(join: str, door: str, layout: Any, pieces: int, grad: bool):
    ranks = 3 if pieces == 2 else 2
    inputs = [randn(index, 1, 2, LENGTH, WIDTH) for index in range(pieces)]
    mask = torch.arange(pieces * LENGTH)[None].expand(LENGTH, -1) > 3

    def on(rank: int) -> None:
        mesh, cut = cp_mesh(ranks), layout(LENGTH, ranks)
        model = Pieces(JOINS[join], attends(door, mesh, layout, mask))
        parts = [(x.clone() if door == "buffers" else cut.shard(x, 2, rank)).requires_grad_(grad) for x in inputs]
        if door in ("module", "scope", "mask of the style"):
            own = Dense(mask) if door == "mask of the style" else None
            parallelize_module(model, mesh, ModuleContextParallel(layout=layout, mask=own))
        around: Any = SequenceScope(cut) if door == "scope" else contextlib.nullcontext()
        if door == "block":
            around = context_parallel(mesh, layout=layout)
        if door == "buffers":
            around = context_parallel(mesh, layout=layout, buffers=parts, buffer_seq_dims=[2] * pieces)
        with torch.set_grad_enabled(grad), around:
            model(*parts, mask=None if door == "mask of the style" else mask)

    with pytest.raises(RankError) as caught:
        run_ranks(on, ranks)
    texts = {str(told) for told in caught.value.errors.values()}
    assert len(texts) == 1
    assert f"are {pieces} times as long as the queries on every rank" in texts.pop() or door == "scope"
    assert len(caught.value.errors) == ranks


class Cross(nn.Module):
    """Tokens attend to a sequence that is a whole number of times as long, of which a mask leaves out some."""

    def __init__(self, checkpointed: bool, attend: Any = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.query, self.key, self.checkpointed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), checkpointed
        self.attend = attend

    def attend_to(self, x, memory, mask):
        keys = self.key(memory)
        return self.attend(self.query(x), keys, keys, mask)

    def forward(self, x, memory, mask):
        if self.checkpointed:
            return checkpoint(self.attend_to, x, memory, mask, use_reentrant=False)
        return self.attend_to(x, memory, mask)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("door", ["module", "block", "buffers", "core", "function", "score_mod"])
def test_keys_of_one_longer_sequence_are_exact(door: str, checkpointed: bool):
    """With lengths that divide, so that each rank has twice as many keys as queries."""
    x, memory, mask = randn(0, 1, 2, 8, WIDTH), randn(1, 1, 2, 16, WIDTH), torch.arange(16)[None].expand(8, -1) > 3
    torch.manual_seed(0)
    one = Cross(False).double()
    one(x, memory, mask).square().sum().backward()
    weights = one.state_dict()

    def on(rank: int) -> float:
        mesh = cp_mesh(2)
        model = Cross(checkpointed, attends(door, mesh, contiguous, mask)).double()
        model.load_state_dict(weights)
        parts: Any = [each.clone() for each in (x, memory)]
        if door != "buffers":
            parts = [contiguous(each.shape[2], 2).shard(each, 2, rank) for each in parts]
        if door == "module":
            parallelize_module(model, mesh, ModuleContextParallel(layout=contiguous, verified=True))
        buffers = {"buffers": parts, "buffer_seq_dims": [2, 2]} if door == "buffers" else {}
        around: Any = contextlib.nullcontext()
        if door in ("block", "buffers"):
            around = context_parallel(mesh, layout=contiguous, verified=True, **buffers)
        with around:
            model(*parts, mask).square().sum().backward()
        sum_gradients(model, mesh)
        return max(error(a.grad, b.grad) for a, b in zip(model.parameters(), one.parameters(), strict=True))

    assert max(run_ranks(on, 2)) < EXACT


@pytest.mark.parametrize("keys", ["of one sequence", "joined"])
def test_a_function_tells_the_layout_of_the_keys(keys: str):
    """As the page says, where no module is given a part: without it, both are refused."""
    x, memory, mask = randn(0, 1, 2, 8, WIDTH), randn(1, 1, 2, 16, WIDTH), torch.arange(16)[None].expand(8, -1) > 3
    wanted = F.scaled_dot_product_attention(x, memory, memory, mask)
    first = contiguous(8, 2)
    second = join_layouts(first, first) if keys == "joined" else contiguous(16, 2)

    def on(rank: int) -> float:
        mesh, q, k = cp_mesh(2), first.shard(x, 2, rank), second.shard(memory, 2, rank) + 0
        with pytest.raises(NotImplementedError, match="layout= a function that looks up the layout of 16"):
            context_attention(q, k, k, mesh, mask=Dense(mask), layout=contiguous)
        with pytest.raises(NotImplementedError, match="2 times as long"):  # any length is no known length
            context_attention(q, k, k, mesh, mask=Dense(mask), layout=lambda length, ranks: contiguous(length, ranks))
        names: dict[str, Any] = {
            "second": first,
            "keys": second,
            "mesh": mesh,
            "mask": Dense(mask),
            "q": q,
            "k": k,
            "v": k,
        }
        names["context_attention"] = context_attention
        exec(example("keys with a layout of their own"), names)
        exec(example("keys of a known length"), names)
        part, found = first.shard(wanted, 2, rank), [names["out"]]
        for told in ({"layout": names["look_up"]}, {"layout": first, "kv_layout": second}):
            found.append(parallelize_module(Core(), mesh, AttentionContextParallel(**told))(q, k, k, mask))
        if keys == "of one sequence":  # marked inputs need no function
            marked = second.shard(memory, 2, rank)
            core = parallelize_module(Core(), mesh, AttentionContextParallel(layout=contiguous))
            found.append(core(q, marked, marked, mask))
        return max(error(each, part) for each in found)

    assert max(run_ranks(on, 2)) < EXACT


@pytest.mark.parametrize("lengths", [(12, 20), (13, 21)])
def test_the_page_lays_them_out(lengths: tuple[int, int]):
    code = example("keys of several pieces")
    whole = [[randn(10 * n + i, 1, 2, length, WIDTH) for i in range(3)] for n, length in enumerate(lengths)]
    joined = [torch.cat(parts, 2) for parts in zip(*whole, strict=True)]
    wanted = F.scaled_dot_product_attention(*joined, is_causal=True)

    def on(rank: int) -> float:
        names: dict[str, Any] = {"torch": torch, "join_layouts": join_layouts, "mesh": cp_mesh(2)}
        names |= {"context_attention": context_attention, "mask": Causal()}
        names["first"], names["second"] = (head_tail(length, 2) for length in lengths)
        cuts = names["first"], names["second"]
        parts = [[cut.shard(x, 2, rank) for x in piece] for cut, piece in zip(cuts, whole, strict=True)]
        names["queries"], names["keys"], names["values"] = zip(*parts, strict=True)
        exec(code, names)
        return error(names["out"], names["layout"].shard(wanted, 2, rank))

    assert max(run_ranks(on, 2)) < EXACT


@pytest.mark.parametrize("memory", ["the same", "longer"])
def test_a_mark_that_some_ranks_have_lost(memory: str):
    """Rank 0 has cut the sequence and sent the remaining ranks their parts, as a program with one reader does."""
    x, longer = randn(0, 1, 2, 8, WIDTH), randn(1, 1, 2, 16, WIDTH)
    keys = longer if memory == "longer" else x
    mask = torch.arange(keys.shape[2])[None].expand(8, -1) > 3
    one = Cross(False).double()
    wanted = one(x, keys, mask).detach()

    def on(rank: int) -> torch.Tensor:
        mine = parallelize_module(copy.deepcopy(one), cp_mesh(2), ModuleContextParallel(layout=contiguous))
        parts = [contiguous(whole.shape[2], 2).shard(whole, 2, rank) for whole in (x, keys)]
        return mine(*(part if rank == 0 else part.clone() for part in parts), mask).detach()

    assert error(contiguous(8, 2).unshard(run_ranks(on, 2), 2), wanted) < EXACT


@pytest.mark.parametrize("join", JOINS)
def test_one_rank_joins_pieces_as_one_device_does(join: str):
    """Its keys are in the order of the mask. verify compares with such a rank."""
    inputs = [randn(index, 1, 2, LENGTH, WIDTH) for index in range(2)]
    mask = torch.arange(2 * LENGTH)[None].expand(LENGTH, -1) > 3
    wanted = Pieces(JOINS[join])(*inputs, mask=mask)

    def on(rank: int) -> torch.Tensor:
        return parallelize_module(Pieces(JOINS[join]), cp_mesh(1), ModuleContextParallel())(*inputs, mask=mask)

    assert error(run_ranks(on, 1)[0], wanted) < EXACT
