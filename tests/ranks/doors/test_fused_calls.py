"""AttentionContextParallel computes all calls that one device computes, for any kernel that torch would choose."""

from __future__ import annotations

import contextlib
import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import AttentionContextParallel, ModuleContextParallel, SequenceLayout, contiguous
from cp_styles._lib.compat import in_process_store
from cp_styles.testing import RankError, run_ranks
from tests.doors import EACH, LENGTH, cut_contiguously
from tests.oracle import attend_and_differentiate, attention_inputs, dense_attention, randn
from tests.ranks.attention_case import EXACT, Core, Problem, cp_mesh

STYLES = [AttentionContextParallel, ModuleContextParallel]


class Attend(nn.Module):
    def __init__(self, how=F.scaled_dot_product_attention, **options) -> None:
        super().__init__()
        self.how, self.options = how, options

    def forward(self, query, key, value):
        return self.how(query, key, value, **self.options)


def found_and_wanted(style, inputs, cotangent, layout: SequenceLayout, module: nn.Module, wanted, **options):
    def on(rank: int):
        parallel = parallelize_module(copy.deepcopy(module), cp_mesh(layout.ranks), style(layout=layout, **options))
        own = [layout.shard(x, 2, rank) for x in inputs]
        with torch.inference_mode():
            inferred = parallel(*own).clone()
        found = attend_and_differentiate(parallel, own, layout.shard(cotangent, 2, rank))
        assert torch.equal(inferred, found[0])
        return found

    results = [layout.unshard(list(parts), 2) for parts in zip(*run_ranks(on, layout.ranks), strict=True)]
    return zip(results, attend_and_differentiate(wanted, inputs, cotangent), strict=True)


LAYOUTS = {
    "uneven": contiguous(LENGTH, 3),
    "a rank without tokens": SequenceLayout.from_chunks([[(0, 5)], [], [(5, LENGTH)]]),
}


@pytest.mark.parametrize("style", STYLES)
def test_an_empty_batch(style):
    empty = [torch.zeros(0, 4, LENGTH, 8, dtype=torch.float64)] * 3
    pairs = found_and_wanted(style, empty, empty[0], LAYOUTS["uneven"], Attend(is_causal=True), dense_attention)
    assert all(found.shape == wanted.shape for found, wanted in pairs)


@pytest.mark.parametrize("style", STYLES)
def test_unequal_value_heads_are_refused(style):
    """One device would repeat the one key head for each value head. Here only key and value heads both of one are."""
    (query, key, value), _ = attention_inputs(length=LENGTH)
    layout = LAYOUTS["uneven"]

    def refused(tensors, **options) -> str:
        def on(rank: int) -> None:
            module = parallelize_module(Attend(**options), cp_mesh(3), style(layout=layout))
            module(*(layout.shard(x, 2, rank) for x in tensors))

        with pytest.raises(RankError) as caught:
            run_ranks(on, 3)
        return str(caught.value)

    text = refused([query, key[:, :2], value[:, :2]])
    assert text.count("4 query heads and 2 key/value heads need enable_gqa=True") == 3, text
    for options in ({}, {"enable_gqa": True}):
        text = refused([query, key[:, :1], value], **options)
        assert text.count("there are 1 key heads and 4 value heads") == 3, text


# -- changed in place between forward and backward --

CHANGED = ("query", "key", "value", "out")


def backward_after(door: str, changed: str, *, around=contextlib.nullcontext) -> torch.Tensor:
    """All gradients, where one of the call's tensors is multiplied by 3 before the backward."""
    inputs, cotangent = attention_inputs(length=LENGTH, batch=1)
    layout = contiguous(LENGTH, 2)

    def on(rank: int):
        mesh = cp_mesh(2)
        leaves = [layout.shard(x, 2, rank).clone().requires_grad_() for x in inputs]
        tensors = dict(zip(CHANGED, ((x * 2.0).mul_(0.5) for x in leaves), strict=False))
        with around():
            out = cut_contiguously(door, mesh, *tensors.values())
        tensors["out"] = out
        if changed:
            with torch.no_grad():
                tensors[changed].mul_(3.0)
        return torch.stack(torch.autograd.grad(tensors["out"], leaves, layout.shard(cotangent, 2, rank)))

    return torch.cat(run_ranks(on, 2), 3)


@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("door", EACH)
def test_what_was_changed_in_place_has_no_gradient(door: str, changed: str):
    with pytest.raises(RankError) as caught:
        backward_after(door, changed)
    # Of results torch itself says so, before there is a backward.
    found = re.findall("modified by an inplace operation|view and its base or another view", str(caught.value))
    assert len(found) == 2, str(caught.value)


@pytest.mark.parametrize("changed", CHANGED[:3])
def test_what_may_be_changed_in_place(changed: str):
    """What the backward reads from elsewhere, as after an offload."""
    wanted = backward_after("style", "")
    copies = partial(torch.autograd.graph.saved_tensors_hooks, torch.clone, lambda x: x)
    assert torch.equal(backward_after("style", changed, around=copies), wanted)


# -- what stands around a call --


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("style", STYLES)
def test_anomaly_detection(style):
    """It looks for NaN in gradients, which are DTensors: it finds one, and its absence. It is the process'."""
    inputs, cotangent = attention_inputs(length=LENGTH)
    layout = LAYOUTS["uneven"]

    def on(rank: int) -> None:
        module = parallelize_module(Attend(is_causal=True), cp_mesh(3), style(layout=layout))
        own, grad = [layout.shard(x, 2, rank) for x in inputs], layout.shard(cotangent, 2, rank)
        found = attend_and_differentiate(module, own, grad)
        assert all(bool(x.isfinite().all()) for x in found)
        with pytest.raises(RuntimeError, match="returned nan values"):
            attend_and_differentiate(module, own, torch.full_like(grad, float("nan")))

    with torch.autograd.detect_anomaly():
        run_ranks(on, 3)


@pytest.mark.parametrize("layout", [contiguous, contiguous(LENGTH, 2)], ids=["balancer", "layout"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("before", [False, True])
def test_a_world_that_has_ended(style, layout, before: bool):
    """``before``: the style has attended in it. A new module with the groups of a new world is exact."""
    store, problem = in_process_store(), Problem(length=LENGTH)

    def in_a_new_world(rank: int) -> float:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        attend = parallelize_module(Core(), cp_mesh(2), style(layout=layout))
        leaves, cotangent = problem.shard(layout, rank, 2)
        out = attend(*leaves)
        out.backward(cotangent)
        return max(problem.errors([out, *(leaf.grad for leaf in leaves)], layout, rank, 2))

    assert max(run_ranks(in_a_new_world, 2)) < EXACT

    def on(rank: int) -> None:
        module = parallelize_module(Attend(), cp_mesh(2), style(layout=layout))
        own = [randn(0, 1, 2, contiguous(LENGTH, 2).lengths[rank], 8)] * 3
        if before:
            module(*own)
            dist.barrier()
        dist.destroy_process_group()
        module(*own)

    with pytest.raises(RankError) as caught:
        run_ranks(on, 2)
    assert str(caught.value).count("was destroyed (destroy_process_group): apply the style to a new module") == 2
