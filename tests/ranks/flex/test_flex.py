"""FlexAttention of the whole sequence on ranks: out, logsumexp and gradients against a dense oracle; wires; doors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention.flex_attention as flex_module
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.utils.checkpoint import checkpoint

import cp_styles
from cp_styles import flex_attention
from cp_styles._lib.compat import passes_flex_attention
from cp_styles.engine.scope import SequenceScope
from cp_styles.functions.flex import context_flex_attention
from cp_styles.layouts import by_work, contiguous, head_tail
from cp_styles.masks import Causal, Documents, SlidingWindow
from cp_styles.masks.block_mask import FlexMask
from cp_styles.plan import make_plan
from cp_styles.strategies import Ring
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from cp_styles.testing import CommunicationTrace, run_ranks
from cp_styles.torch_api import context_parallel
from tests.cases import Case, judge
from tests.oracle import randn
from tests.ranks import flex_case as case
from tests.ranks.attention_case import EXACT, cp_mesh, refused
from tests.ranks.flex_case import DOCUMENTS, FlexProblem

LENGTH = sum(DOCUMENTS)
MASKS = {
    "28 documents": {"mask_mod": case.both(case.causal, case.of_documents(DOCUMENTS)), "block": (32, 8)},
    "sinks and window": {"mask_mod": case.sinks_and_window},
}


@cache
def problem(mask: str) -> FlexProblem:
    return FlexProblem(**MASKS[mask], length=LENGTH)


def by_function(q, k, v, *, layout, strategy=None, **options):
    aux = AuxRequest(lse=True)
    out, found = context_flex_attention(
        q, k, v, dist.group.WORLD, layout=layout, strategy=strategy, return_aux=aux, **options
    )
    assert found.max_scores is None
    return out, found.lse


def test_queries_some_at_a_time(monkeypatch):
    """As large tiles are worked on, whose logits would not fit into memory."""
    monkeypatch.setattr("cp_styles.kernels.flex._LOGITS", 2 * 4 * 30 * 7)
    for mask in ("causal", "bool HLM"):
        by = {"door": "flex", "mask": mask, "masked_by": "call", "heads": (4, 2), "score": "relative bias", "lse": True}
        verdict = judge(Case(**by, length=LENGTH, batch=2))
        assert verdict.kind == "exact", verdict.words


def test_only_what_the_plan_says_travels():
    """Forward and backward, in bytes: the plan's rows, and their gradients home."""
    whole = problem("28 documents")
    assert whole.block_mask is not None
    mask = FlexMask(whole.block_mask)
    for layout in (contiguous(LENGTH, 4), head_tail(LENGTH, 4)):
        plans = [make_plan(layout, layout, mask, rank) for rank in range(4)]
        documents = Documents(DOCUMENTS) & Causal()
        assert plans == [make_plan(layout, layout, documents, rank) for rank in range(4)]

        def rank_main(rank: int, layout=layout):
            attend = lambda *args, **options: by_function(*args, layout=layout, strategy=Ring(keep=3), **options)  # noqa: E731
            with CommunicationTrace() as trace:
                whole.run(attend, layout, rank)
            return sum(size for name, size in trace.events if name == "send")

        row = 2 * 2 * (8 + 8) * 8  # batch x heads x (key + value) x float64
        received = sum(plan.received_rows for plan in plans)
        assert sum(run_ranks(rank_main, 4)) == 2 * received * row
    assert sum(make_plan(*[contiguous(LENGTH, 4)] * 2, mask, rank).received_rows for rank in range(4)) < 20


class Attention(nn.Module):
    """As models have it: the function, however they got hold of it, somewhere inside."""

    def __init__(self, attend: Callable[..., Any] | None = flex_attention) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q, k, v, **options):
        return (self.attend or cp_styles.flex_attention)(q, k, v, **options)


class Around(nn.Module):
    def __init__(self, core: Attention, checkpointed: bool = False) -> None:
        super().__init__()
        self.core, self.checkpointed = core, checkpointed

    def forward(self, *args, **options):
        if self.checkpointed:
            return checkpoint(self.core, *args, use_reentrant=False, **options)
        return self.core(*args, **options)


@pytest.mark.parametrize("how", ["by name", "by attribute", "checkpointed", "return_lse"])
def test_inside_a_module(how: str):
    layout = head_tail(LENGTH, 2)
    whole = problem("sinks and window")

    def rank_main(rank: int):
        module = Attention(None if how == "by attribute" else flex_attention)
        module = Around(module, checkpointed=True) if how == "checkpointed" else module
        parallelize_module(module, cp_mesh(2), ModuleContextParallel(layout=layout))

        def attend(*args, **options):
            if how == "return_lse":
                return module(*args, return_lse=True, **options)
            out, aux = module(*args, return_aux=AuxRequest(lse=True), **options)
            return out, aux.lse

        return whole.run(attend, layout, rank)

    assert max(whole.errors(run_ranks(rank_main, 2), layout)) < EXACT


def test_plain_calls_inside_and_outside():
    """Without gradients and logsumexp, without a BlockMask; and torch's own function afterwards, as it ever was."""
    q, k, v = (randn(seed, 1, 2, 32, 8, dtype=torch.float32) for seed in range(3))
    block_mask = create_block_mask(case.causal, None, None, 32, 32, device="cpu")
    alone = [flex_attention(q, k, v, block_mask=mask) for mask in (None, block_mask)]

    def rank_main(rank: int):
        layout = contiguous(32, 2)
        module = parallelize_module(Attention(), cp_mesh(2), ModuleContextParallel(layout=layout))
        own = [layout.shard(x, 2, rank) for x in (q, k, v)]
        with torch.no_grad():
            return [module(*own, block_mask=mask) for mask in (None, block_mask)]

    for whole, *parts in zip(alone, *run_ranks(rank_main, 2), strict=True):
        torch.testing.assert_close(torch.cat(parts, 2), whole)
    again = [flex_attention(q, k, v, block_mask=mask) for mask in (None, block_mask)]
    for before, after in zip(alone, again, strict=True):
        assert torch.equal(before, after)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(q.requires_grad_(), k, v)


def test_under_a_scope_and_beside_a_mask():
    lengths = (40, LENGTH - 40)
    whole = FlexProblem(case.both(case.sinks_and_window, case.of_documents(lengths), case.window(50)), length=LENGTH)
    inside = create_block_mask(case.sinks_and_window, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    layout = by_work(LENGTH, 3, mask=FlexMask(inside) & Documents(lengths))

    def rank_main(rank: int):
        module = parallelize_module(Attention(), cp_mesh(3), ModuleContextParallel(mask=SlidingWindow(49, 0)))

        def attend(*args, block_mask, **options):
            with SequenceScope(layout, mask=Documents(lengths)):
                return module(*args, block_mask=inside, return_lse=True, **options)

        return whole.run(attend, layout, rank)

    assert max(whole.errors(run_ranks(rank_main, 3), layout)) < EXACT


def plus_one(score, b, h, q, kv):
    return score + 1


def plus_two(score, b, h, q, kv):
    return score + 2


def plus(number: float, inner: bool = False):
    def score_mod(score, b, h, q, kv):
        return score + number

    def of_it(score, b, h, q, kv):
        return score_mod(score, b, h, q, kv)

    return of_it if inner else score_mod


LOCAL = create_block_mask(case.causal, None, None, LENGTH // 2, LENGTH // 2, device="cpu")
WHOLE = create_block_mask(case.causal, None, None, LENGTH, LENGTH, device="cpu")
OTHER = create_block_mask(case.sinks_and_window, None, None, LENGTH, LENGTH, device="cpu")
REFUSED = {
    "a rank's BlockMask": ({"block_mask": LOCAL}, "takes the lengths of the whole sequence, not of a rank's"),
    "other BlockMasks": (lambda rank: {"block_mask": (WHOLE, OTHER)[rank]}, "disagree on mask: "),
    "other scores": (lambda rank: {"score_mod": (plus_one, plus_two)[rank]}, "disagree on kernel"),
    "other numbers in scores of one name": (
        lambda rank: {"score_mod": plus((1.0, 2.0)[rank])},
        "disagree on the contents of the kernel",
    ),
    "other numbers in what scores call": (
        lambda rank: {"score_mod": plus((1.0, 2.0)[rank], inner=True)},
        "disagree on the contents of the kernel",
    ),
    "BACKEND": ({"kernel_options": {"BACKEND": "FLASH"}}, "BACKEND='FLASH' asks for a kernel"),
    "both": ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, "return_lse"),
    "one rank alone": (lambda rank: {"kernel_options": {"BACKEND": "FLASH"} if rank else None}, "BACKEND='FLASH' asks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str):
    given, message = REFUSED[name]
    q, k, v = (randn(seed, 1, 2, LENGTH // 2, 8) for seed in range(3))

    def act(rank: int, mesh: DeviceMesh) -> None:
        options = given(rank) if callable(given) else given
        module = parallelize_module(Attention(), mesh, ModuleContextParallel(layout=contiguous))
        module(q, k, v, **options)

    refused(act, message, (ValueError, NotImplementedError))


def test_it_is_called_as_torchs_is():
    ours, torchs = (
        inspect.signature(each).parameters.values() for each in (flex_attention, flex_module.flex_attention)
    )
    ours = [x for x in ours if x.name != "others"]  # what a later torch adds is refused by name
    assert [(x.name, x.kind, x.default) for x in ours] == [(x.name, x.kind, x.default) for x in torchs]


def behind(door: str, mesh: DeviceMesh, module: nn.Module):
    if door == "module":
        return parallelize_module(module, mesh, ModuleContextParallel(layout=contiguous))
    return context_parallel(mesh, layout=contiguous)(module)


TORCHS = {
    "a BlockMask of the whole": {"block_mask": WHOLE},  # torch would advise to make one for the rank's length
    "a rank's BlockMask": {"block_mask": LOCAL},
    "with gradients": {},  # torch would say that CPU has no backward
    "its operator is reached": {},
}


@pytest.mark.parametrize(("door", "how"), [(("module", "block")[at % 2], how) for at, how in enumerate(TORCHS)])
def test_torchs_own_function_is_refused(door: str, how: str, monkeypatch):
    """And this package's function in its place, which the error names, is exact: test_inside_a_module."""
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", "operator" in how)
    parts = [randn(seed, 1, 2, LENGTH // 2, 8).requires_grad_(how == "with gradients") for seed in range(3)]

    def act(_: int, mesh: DeviceMesh) -> None:
        behind(door, mesh, Around(Attention(flex_module.flex_attention)))(*parts, **TORCHS[how])

    named = r"^Around \(ModuleContextParallel over" if door == "module" else r"^context_parallel \(over"
    remedy = "write `from cp_styles import flex_attention` in place of torch's import"
    refused(act, f"(?s){named}.*{remedy}", NotImplementedError)


def test_all_ranks_hear_of_one_that_calls_torchs():
    parts = [randn(seed, 1, 2, LENGTH // 2, 8) for seed in range(3)]

    def rank_main(rank: int):
        behind("module", cp_mesh(2), Attention(flex_module.flex_attention if rank else flex_attention))(*parts)

    first, second = run_ranks(rank_main, 2, return_errors=True)
    assert "ranks [1] of mesh axis 'cp' have failed" in str(first), first
    assert "from cp_styles import flex_attention" in str(second), second


def test_torchs_function_as_a_kernel_is_no_call_of_a_model():
    """A compiled tile calls it, inside of the engine. Its errors there stay as they are."""

    def engine():
        flex_module.flex_attention(randn(0, 1, 2, 8, 4), randn(0, 1, 2, 8, 4), randn(0, 1, 3, 8, 4))

    with pytest.raises(Exception) as raised:
        engine()
    assert not passes_flex_attention(raised.value, but=engine)
    assert passes_flex_attention(raised.value, but=print_nothing)


def print_nothing():
    pass


def test_an_error_of_a_score_mod_stays_as_it_is():
    parts = [randn(seed, 1, 2, LENGTH // 2, 8) for seed in range(3)]

    def fails(score, b, h, q_idx, kv_idx):
        raise ZeroDivisionError("a score")

    refused(lambda _, mesh: behind("module", mesh, Attention())(*parts, score_mod=fails), "a score", ZeroDivisionError)


def test_dtensors_are_no_input():
    """Inside AttentionContextParallel all tensors are DTensors, which torch's operators do not take."""
    q, k, v = (randn(seed, 1, 2, 16, 8) for seed in range(3))

    def act(_: int, mesh: DeviceMesh) -> None:
        module = parallelize_module(Attention(), mesh, AttentionContextParallel())
        module(*(distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)))

    refused(act, "use ModuleContextParallel, or call context_flex_attention", NotImplementedError)
