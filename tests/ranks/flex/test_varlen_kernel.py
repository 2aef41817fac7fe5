"""A kernel that takes many tiles in one call, through the engine: torch's CUDA varlen flash, of which there is only a
stand-in under the same schema here (see :mod:`tests.varlen_op`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch

from cp_styles.functions.attention import context_attention
from cp_styles.functions.varlen import context_varlen_attention
from cp_styles.kernels import VarlenKernel
from cp_styles.layouts import contiguous, head_tail, per_document_head_tail, striped
from cp_styles.masks import Causal, Documents, PerRow, SlidingWindow
from cp_styles.plan import make_plan
from cp_styles.plan.tiles import Cover
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.strategies.moving_kv import MovingKV
from cp_styles.testing import run_ranks
from tests.covering import plain, sampled
from tests.oracle import document_of
from tests.ranks.attention_case import EXACT, Problem, cp_mesh, run_attention
from tests.ranks.flex_case import DOCUMENTS, as_pack, pack_of
from tests.varlen_op import ALONE, PACKED, STAND_IN, Ops, varlen_ops_on_cpu

# Short and long ones, on both sides of the plan's shortest run (32 rows); empty ones are none.
LENGTHS = (40, 3, 70, 1, 35, 5, 33, 64)
STRATEGIES = [
    (Ring(), 2),
    (Ring(keep=0), 3),
    (AllGather(), 4),
    (AllGather(keep=0), 2),
    (Ulysses(), 2),
    (Ulysses(inner=AllGather(), size=2), 4),
]


def within(lengths: tuple[int, ...], causal: bool) -> torch.Tensor:
    """Which pairs are in one document: [S, S]."""
    ids = torch.tensor([document_of(lengths)(position) for position in range(sum(lengths))])
    same = ids[:, None] == ids[None]
    return same.tril() if causal else same


def attended(problem: Problem, ranks: int, **options) -> tuple[list[float], list[Counter]]:
    """The largest errors of each rank, and the attention ops that it called."""

    def on(rank: int):
        attend = partial(context_attention, mesh=cp_mesh(ranks), **{"kernel": STAND_IN} | options)
        with Ops() as ops:
            errors = run_attention(attend, problem, rank, ranks, layout=options["layout"])
        return max(errors), ops.counts

    with varlen_ops_on_cpu():
        errors, counts = zip(*run_ranks(on, ranks), strict=True)
    return list(errors), list(counts)


@sampled(1, way=STRATEGIES, causal=[True, False], layout=[contiguous, head_tail])
def test_documents_are_attended_as_on_one_device(way, causal: bool, layout):
    """Grouped heads and a batch of 2, which the pack holds one after the other."""
    strategy, ranks = way
    problem = Problem(length=sum(LENGTHS), kv_heads=2, mask=within(LENGTHS, causal), scale=0.3)
    mask = Documents(LENGTHS) & Causal() if causal else Documents(LENGTHS)
    errors, counts = attended(problem, ranks, strategy=strategy, mask=mask, layout=layout, scale=0.3)
    assert max(errors) < EXACT
    assert any(count[PACKED[0]] for count in counts)
    assert [count[PACKED[0]] for count in counts] == [count[PACKED[1]] for count in counts]


@pytest.mark.parametrize("strategy", [Ring(), AllGather()], ids=plain)
def test_28_documents_are_a_call_for_each_source(strategy):
    """Each document in 8 chunks, as torch's own balancer for documents cuts them: on each of 4 ranks 28 causal tiles of
    its own keys, and 28 full ones of each other rank's."""
    documents = tuple(8 * length for length in DOCUMENTS)
    layout = per_document_head_tail(sum(documents), 4, documents=documents, cut_all=True)
    mask = Documents(documents) & Causal()
    for rank in range(4):
        parts = make_plan(layout, layout, mask, rank, small_tiles=True).parts
        covers = [{tile.cover for tile in part.tiles} for part in parts]
        assert covers == [{Cover.CAUSAL if source == rank else Cover.FULL} for source in range(4)]
        assert sum(len(part.tiles) for part in parts) == 4 * 28
    problem = Problem(length=sum(documents), batch=1, heads=2, kv_heads=1, mask=within(documents, True))
    errors, counts = attended(problem, 4, strategy=strategy, mask=mask, layout=layout)
    assert max(errors) < EXACT
    packed = dict.fromkeys(PACKED, 4)
    assert counts == [{"cp_styles::attention": 1, "cp_styles::attention_backward": 1, **packed}] * 4


@dataclass(frozen=True)
class Maskless(VarlenKernel):
    """Takes no mask, as flash on CUDA does not."""

    windows: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]
    takes_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]

    def forward(self, *tensors, bias, **options):
        assert bias is None
        return super().forward(*tensors, bias=bias, **options)

    def backward(self, *tensors, bias, **options):
        assert bias is None
        return super().backward(*tensors, bias=bias, **options)


MASKLESS = Maskless(STAND_IN.name, STAND_IN.device_type, STAND_IN.dtypes)


class OneByOne(VarlenKernel):
    """A tile a call."""

    def forward(self, *tensors, pack=None, **options):
        run = partial(super().forward, **options)
        return run(*tensors) if pack is None else pack.one_by_one(run, tensors, 0)

    def backward(self, *tensors, pack=None, **options):
        run = partial(super().backward, **options)
        return run(*tensors) if pack is None else pack.one_by_one(run, tensors, 1)


@pytest.mark.parametrize("strategy", [Ring(), Ulysses(size=2)], ids=plain)
def test_short_documents_need_no_mask(strategy):
    """What joins them under one would send the whole pack, on CUDA, to a kernel that takes masks."""
    problem = Problem(length=sum(DOCUMENTS), mask=within(DOCUMENTS, True))
    options = {"strategy": strategy, "layout": head_tail, "kernel": MASKLESS}
    errors, counts = attended(problem, 4, mask=Documents(DOCUMENTS) & Causal(), **options)
    assert max(errors) < EXACT
    assert all(count[PACKED[0]] for count in counts)
    rows = (DOCUMENTS, DOCUMENTS[::-1])
    problem = Problem(length=sum(DOCUMENTS), mask=torch.stack([within(row, True) for row in rows])[:, None])
    errors, _ = attended(problem, 4, mask=PerRow(tuple(Documents(row) & Causal() for row in rows)), **options)
    assert max(errors) < EXACT


@pytest.mark.parametrize("strategy", [Ring(), AllGather(), Ulysses()], ids=plain)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_tiles_with_a_mask_go_to_a_kernel_that_takes_masks(strategy, dtype: torch.dtype):
    """Only those: in the same round, what needs no mask goes to the kernel that was named, in one pack."""
    mask, near = Documents(LENGTHS) & SlidingWindow(45, 0), within(LENGTHS, True).triu(-45)  # of documents up to 70
    problem = Problem(length=sum(LENGTHS), kv_heads=2, mask=near, dtype=dtype)
    options = {"strategy": strategy, "mask": mask, "layout": contiguous}
    errors, counts = attended(problem, 2, kernel=MASKLESS, **options)
    assert [count[PACKED[0]] for count in counts] == [1, 1]  # the causal tiles of the own keys
    assert any(count[ALONE[0]] for count in counts)
    # Low precision: the house's bound, against the same without the named kernel.
    bound = EXACT if dtype == torch.float64 else 1.1 * max(attended(problem, 2, kernel=STAND_IN, **options)[0])
    assert max(errors) <= bound


class WithWindows(Maskless):
    windows: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]


WINDOWS = {
    "causal": (SlidingWindow(45, 0), (45, 0)),
    "both sides": (SlidingWindow(30, 20), (30, 20)),
    "short": (SlidingWindow(3, 0), (3, 0)),
}


@sampled(1, way=STRATEGIES, window=WINDOWS, layout=[contiguous, head_tail, striped], documents=[True, False])
def test_windows_need_no_mask(way, window: str, layout, documents: bool):
    """Equal to one device, and runs of rows are calls with a window. How many, test_plan says for longer ones."""
    (strategy, ranks), (mask, (before, after)) = way, WINDOWS[window]
    length = sum(LENGTHS)
    near = torch.ones(length, length, dtype=torch.bool).tril(after).triu(-before)
    if documents:
        mask, near = Documents(LENGTHS) & mask, near & within(LENGTHS, False)
    problem = Problem(length=length, kv_heads=2, mask=near, scale=0.3)
    kernel = WithWindows(STAND_IN.name, STAND_IN.device_type, STAND_IN.dtypes)
    options = {"strategy": strategy, "mask": mask, "layout": layout, "kernel": kernel, "scale": 0.3}
    errors, counts = attended(problem, ranks, **options)
    assert max(errors) < EXACT
    # Which runs are bands, the plan says: short ones may be joined under a mask. Ulysses has plans of other layouts.
    cut = layout(length, ranks)
    for rank, count in enumerate(counts if isinstance(strategy, MovingKV) else ()):
        plan = make_plan(cut, cut, mask, rank, small_tiles=kernel.small_tiles, windows=True)
        bands = any(tile.cover is Cover.BAND for part in plan.parts for tile in part.tiles)
        assert count[PACKED[0]] or not bands
    # The longest runs of a rank, of a few dozen rows, are bands somewhere, but for stripes and documents.
    assert documents or layout is striped or any(count[PACKED[0]] for count in counts)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0)])
def test_the_function_with_gradients_of_its_logsumexp(window: tuple[int, int], monkeypatch):
    """By the kernel that a call finds for itself, as on CUDA it finds flash."""
    monkeypatch.setattr("cp_styles.kernels.choice_by_tile.SDPA_KERNELS", (STAND_IN,))
    problem, ranks = pack_of(LENGTHS, window), 3
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    for layout in (contiguous(sum(LENGTHS), ranks), per_document_head_tail(sum(LENGTHS), ranks, documents=LENGTHS)):

        def rank_main(rank: int, layout=layout):
            options = {"window_size": window, "return_lse": True, "layout": layout}
            attend = as_pack(lambda *qkv: context_varlen_attention(*qkv, cp_mesh(ranks), cu, **options))
            return problem.run(attend, layout, rank)

        with varlen_ops_on_cpu():
            found = run_ranks(rank_main, ranks)
        assert max(problem.errors(found, layout)) < EXACT


def test_low_precision_is_as_good_as_tile_by_tile():
    """The op returns low precision, as it does for a tile alone, so packing adds nothing to the error."""
    problem = Problem(length=sum(LENGTHS), kv_heads=2, mask=within(LENGTHS, True), dtype=torch.bfloat16)
    options = {"strategy": AllGather(), "mask": Documents(LENGTHS) & Causal(), "layout": contiguous}
    packed, counts = attended(problem, 2, **options)
    single = OneByOne(STAND_IN.name, STAND_IN.device_type, STAND_IN.dtypes)
    one_by_one, more = attended(problem, 2, kernel=single, **options)
    assert sum(count[ALONE[0]] for count in more) > sum(count[ALONE[0]] for count in counts)
    # The house's bound for low precision against low precision.
    assert max(packed) <= 1.1 * max(one_by_one)
