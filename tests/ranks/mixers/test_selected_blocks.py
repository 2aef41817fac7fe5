"""Keys, and blocks of keys, that each group of heads selects: against one process, their pairs, bytes and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from cp_styles import (
    AllGather,
    Causal,
    Dense,
    Full,
    PerRow,
    Ring,
    SlidingWindow,
    context_attention,
    contiguous,
    head_tail,
    striped,
)
from cp_styles.explain import explain_calls
from cp_styles.kernels import ReferenceKernel
from cp_styles.kernels import selected as kernel_file
from cp_styles.kernels.selected import SelectedKernel
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import EndedWindows, Mask
from cp_styles.mixers import selected_keys
from cp_styles.mixers import selection as selection_file
from cp_styles.plan import selected as plan_file
from cp_styles.strategies import moving_kv
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.covering import sampled
from tests.gpu_tensors import gpus, put, read
from tests.oracle import dense_attention, error, randn
from tests.ranks.attention_case import cp_mesh, refused
from tests.ranks.mixers.test_selection import LargestResult

EXACT = 1e-12  # float64 sums in another order give 1e-15; one key too many or too few gives 1e-2 and more
WAYS = {"gathers": (0.0, 0.0), "hides": (1e9, 0.0)}  # costs of a gathered pair
BATCH, DIM = 2, 8


class Chosen(NamedTuple):
    """Numbers of blocks [B, G, S, K], -1 for none, and the keys that they are: [B, G, S, S]."""

    numbers: torch.Tensor
    keys: torch.Tensor


def choose(length: int, rows: int, groups: int, count: int, block: int, seed: int = 0) -> Chosen:
    """A third of the numbers are none, some are drawn twice, and the first queries have none at all."""
    blocks, generator = -(-length // block), torch.Generator().manual_seed(seed)
    numbers = torch.randint(-blocks // 2, blocks, (rows, groups, length, count), generator=generator).clamp(min=-1)
    numbers[:, :, :3] = -1
    found = torch.zeros(rows, groups, length, blocks + 1, dtype=torch.bool).scatter_(-1, numbers % (blocks + 1), True)
    return Chosen(numbers, found[..., :blocks].repeat_interleave(block, -1)[..., :length])


def band_of(mask: Mask, length: int) -> torch.Tensor:
    at = torch.arange(length)
    rows = mask.masks if isinstance(mask, PerRow) else (mask,)
    tensors = [part.tensor for row in rows for part in row.parts if isinstance(part, Dense)]
    allowed = torch.stack([row.allowed(at, at) for row in rows])[:, None]
    return allowed if not tensors else allowed & tensors[0]


def inputs_of(heads: tuple[int, int], length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [
        randn(at, BATCH, count, length, DIM, dtype=dtype) for at, count in enumerate((heads[0], heads[1], heads[1]))
    ]


def on_one(inputs: Sequence[torch.Tensor], sees: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of a loss of output and logsumexp."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    q, k, _ = leaves
    sees = sees.repeat_interleave(q.shape[1] // sees.shape[1], 1)
    out = dense_attention(*leaves, sees)
    logits = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * DIM**-0.5).masked_fill(~sees, -torch.inf)
    lse = logits.logsumexp(-1)
    loss = (out * randn(9, *out.shape)).sum() + torch.where(lse > -torch.inf, lse, 0).sum()
    return [out.detach(), *torch.autograd.grad(loss, leaves)]


def on_ranks(
    inputs: Sequence[torch.Tensor],
    chosen: torch.Tensor,
    mask: Mask,
    layout: SequenceLayout,
    block: int,
    **options: Any,
) -> list[torch.Tensor]:
    def main(rank: int) -> list[torch.Tensor]:
        mesh = cp_mesh(layout.ranks)
        leaves = [layout.shard(x, 2, rank).clone().requires_grad_() for x in inputs]
        selected = selected_keys(layout.shard(chosen, 2, rank), mesh, block=block, layout=layout)
        out, lse = context_attention(*leaves, mesh, mask=mask & selected, layout=layout, return_lse=True, **options)
        cotangent = layout.shard(randn(9, *inputs[0].shape), 2, rank)
        ((out * cotangent).sum() + torch.where(lse > -torch.inf, lse, 0).sum()).backward()
        return [out.detach(), *(x.grad for x in leaves)]

    return [layout.unshard(list(parts), 2) for parts in zip(*run_ranks(main, layout.ranks), strict=True)]


def worst(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    return max(map(error, found, wanted))


MASKS = {
    "all": Full(),
    "causal": Causal(),
    "window": SlidingWindow(11, 2),
    "rows": PerRow((Causal(), SlidingWindow(4, None))),
}


@sampled(
    2,
    heads=[(4, 2), (4, 4), (6, 1), (12, 4)],
    groups=["one", "key heads", "query heads", "6 or 2"],
    block=[1, 3, 8],
    cut=[head_tail, contiguous, striped],
    ranks=[1, 2, 3],
    strategy=[Ring(), Ring(keep=0), AllGather()],
    mask=list(MASKS),
    rows=[1, BATCH],
    way=list(WAYS),
)
def test_any_choice(heads, groups: str, block: int, cut, ranks: int, strategy, mask: str, rows: int, way, monkeypatch):
    monkeypatch.setattr(plan_file, "_COSTS", {"cpu": WAYS[way]})
    count = {"one": 1, "key heads": heads[1], "query heads": heads[0], "6 or 2": 6 if heads[0] % 6 == 0 else 2}[groups]
    length, inputs = 46, inputs_of(heads, 46)
    chosen = choose(length, rows, count, 3, block)
    wanted = on_one(inputs, chosen.keys & band_of(MASKS[mask], length))
    found = on_ranks(inputs, chosen.numbers, MASKS[mask], cut(length, ranks), block, strategy=strategy)
    assert worst(found, wanted) < EXACT


@pytest.mark.parametrize("block", [1, 4])
def test_many_ranges(block: int, monkeypatch):
    """Several ranges of queries in each tile, and several ranges of numbers that are counted."""
    monkeypatch.setattr(plan_file, "_COSTS", {"cpu": WAYS["gathers"]})
    monkeypatch.setattr(kernel_file, "_GATHERED", {"cpu": 300})
    monkeypatch.setattr(selection_file, "_SCORES", 100)
    inputs, chosen = inputs_of((4, 2), 150), choose(150, 2, 2, 5, block)
    wanted = on_one(inputs, chosen.keys & band_of(Causal(), 150))
    assert worst(on_ranks(inputs, chosen.numbers, Causal(), head_tail(150, 3), block), wanted) < EXACT


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_blocks_of_keys_of_another_sequence(ranks: int, ended: bool, monkeypatch):
    """Keys of windows of three tokens, in blocks of two."""
    monkeypatch.setattr(plan_file, "_COSTS", {"cpu": WAYS["gathers"]})
    cut, of_keys, band = head_tail(46, ranks), striped(15, ranks), EndedWindows(3) if ended else Full()
    q, (k, v) = inputs_of((4, 2), 46)[0], inputs_of((2, 2), 15)[1:]
    numbers = torch.randint(-3, 8, (1, 2, 46, 4), generator=torch.Generator().manual_seed(0)).clamp(min=-1)
    sees = (numbers[..., None] == torch.arange(15) // 2).any(-2) & band.allowed(torch.arange(46), torch.arange(15))
    wanted = dense_attention(q, k, v, sees.repeat_interleave(2, 1))

    def main(rank: int) -> torch.Tensor:
        options = {"layout": cut, "kv_layout": of_keys}
        mask = band & selected_keys(cut.shard(numbers, 2, rank), cp_mesh(ranks), block=2, **options)
        parts = [each.shard(x, 2, rank) for each, x in zip((cut, of_keys, of_keys), (q, k, v), strict=True)]
        return context_attention(*parts, cp_mesh(ranks), mask=mask, **options)

    assert error(cut.unshard(run_ranks(main, ranks), 2), wanted) < EXACT


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_sinks_and_ranges_of_heads_without_a_backward(groups: int, way: str, monkeypatch):
    """A forward without a backward takes one key head after another."""
    monkeypatch.setattr(plan_file, "_COSTS", {"cpu": WAYS[way]})
    monkeypatch.setattr(moving_kv, "_MAX_ARRIVAL_BYTES", 1)
    inputs, chosen, layout = inputs_of((4, 2), 40), choose(40, 2, groups, 3, 2), head_tail(40, 2)
    sink_H = randn(7, 4)
    sees = (chosen.keys & band_of(Causal(), 40)).repeat_interleave(4 // groups, 1)
    wanted = dense_attention(*inputs, sees, sink_H=sink_H)

    def main(rank: int) -> torch.Tensor:
        parts = [layout.shard(x, 2, rank) for x in inputs]
        selected = selected_keys(layout.shard(chosen.numbers, 2, rank), cp_mesh(2), block=2, layout=layout)
        return context_attention(*parts, cp_mesh(2), mask=Causal() & selected, layout=layout, sink_H=sink_H)

    assert error(layout.unshard(run_ranks(main, 2), 2), wanted) < EXACT


@pytest.mark.parametrize("holes", [True, False])
def test_masks_that_are_no_bands_hide(holes: bool, monkeypatch):
    """Also two choices at once: a query attends to keys of both."""
    monkeypatch.setattr(plan_file, "_COSTS", {"cpu": WAYS["gathers"]})
    inputs, first, second = inputs_of((4, 2), 30), choose(30, 2, 4, 4, 3), choose(30, 1, 2, 9, 2, seed=1)
    layout = striped(30, 2)
    dense = Dense(randn(5, 1, 4, 30, 30) > -0.5)
    sees = dense.tensor if holes else second.keys.repeat_interleave(2, 1)
    wanted = on_one(inputs, first.keys & sees & band_of(Causal(), 30))

    def main(rank: int) -> torch.Tensor:
        parts = [layout.shard(x, 2, rank) for x in inputs]
        own = (layout.shard(x.numbers, 2, rank) for x in (first, second))
        masks = [selected_keys(x, cp_mesh(2), block=block, layout=layout) for x, block in zip(own, (3, 2), strict=True)]
        mask = Causal() & masks[0] & (dense if holes else masks[1])
        return context_attention(*parts, cp_mesh(2), mask=mask, layout=layout)

    assert error(layout.unshard(run_ranks(main, 2), 2), wanted[0]) < EXACT


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype, ranks: int, monkeypatch):
    """Gathered keys are computed in float32. A tile rounds once more than one device: twice its error, as elsewhere."""
    monkeypatch.setattr(plan_file, "_COSTS", {"cpu": WAYS["gathers"]})
    low, chosen, layout = inputs_of((4, 2), 64, dtype), choose(64, 1, 2, 3, 4), head_tail(64, ranks)
    block = torch.arange(64) // 4  # without their own, some queries had no keys, which is NaN on one device
    own = torch.cat((chosen.numbers, block[:, None].expand(1, 2, -1, -1)), -1)
    sees = (chosen.keys | (block[:, None] == block)) & band_of(Causal(), 64)
    leaves = [x.clone().requires_grad_() for x in low]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=sees.repeat_interleave(2, 1), enable_gqa=True)
    (one,) = torch.autograd.grad((out.float() * randn(9, *out.shape)).sum(), leaves[:1])

    def main(rank: int) -> list[torch.Tensor]:
        parts = [layout.shard(x, 2, rank).clone().requires_grad_() for x in low]
        selected = selected_keys(layout.shard(own, 2, rank), cp_mesh(ranks), block=4, layout=layout)
        found = context_attention(*parts, cp_mesh(ranks), mask=Causal() & selected, layout=layout)
        (found.float() * layout.shard(randn(9, *out.shape), 2, rank)).sum().backward()
        return [found.detach(), parts[0].grad]

    found = [layout.unshard(list(x), 2) for x in zip(*run_ranks(main, ranks), strict=True)]
    exact = [x.double().requires_grad_() for x in low]
    wanted = dense_attention(*exact, sees.repeat_interleave(2, 1))
    (grad,) = torch.autograd.grad((wanted * randn(9, *out.shape)).sum(), exact[:1])
    assert error(found[0], wanted) < 2 * error(out, wanted)
    assert error(found[1], grad) < 2 * error(one, grad)


# -- pairs, bytes and memory --


@sampled(1, block=[1, 16], ranks=[1, 4])
def test_no_other_pairs_are_computed(block: int, ranks: int, monkeypatch):
    """At most 4 / 3 of the selected pairs, in the calls of the kernel and as explain counts them; no masked tile."""
    length, layout, (heads, groups) = 2048, head_tail(2048, ranks), (4, 2)
    numbers = torch.rand(1, groups, length, -(-length // block), generator=torch.Generator().manual_seed(0))
    numbers = numbers.topk(64 // block, -1).indices  # blocks lie within the parts of ranks
    inputs, counted = [randn(at, 1, x, length, 4, dtype=torch.float32) for at, x in enumerate((4, 2, 2))], []
    logits = SelectedKernel._logits

    def count(q_NRD, keys_NWD, *rest):
        counted.append(q_NRD.shape[0] * q_NRD.shape[1] * keys_NWD.shape[1])
        return logits(q_NRD, keys_NWD, *rest)

    monkeypatch.setattr(SelectedKernel, "_logits", staticmethod(count))

    def main(rank: int) -> list[Any]:
        leaves = [layout.shard(x, 2, rank).clone().requires_grad_() for x in inputs]
        mask = selected_keys(layout.shard(numbers, 2, rank), cp_mesh(ranks), block=block, layout=layout)
        with explain_calls() as explanations:
            context_attention(*leaves, cp_mesh(ranks), mask=mask, layout=layout).sum().backward()
        (run,) = explanations[0].runs.values()
        return [[(call.cover, call.pairs) for call in phase.calls] for phase in (run.forward, run.backward)]

    found = run_ranks(main, ranks)
    selected = heads * length * 64
    for phase in zip(*found, strict=True):
        calls = [call for of_rank in phase for call in of_rank]
        assert {cover for cover, _ in calls} == {"selected"}
        assert selected <= sum(pairs for _, pairs in calls) <= 4 / 3 * selected
    explained = sum(pairs for of_rank in found for phase in of_rank for _, pairs in phase)
    assert sum(counted) == 2 * explained  # explain runs the kernel once more, without data


def test_close_to_all_keys_are_hidden():
    """They are no fewer pairs, and gathering takes time. So do kernels that are not of this package."""

    class Own(ReferenceKernel):
        pass

    def covers(count: int, kernel: Any) -> set[str]:
        def main(rank: int) -> set[str]:
            numbers = torch.rand(1, 512, 512, generator=torch.Generator().manual_seed(0)).topk(count, -1).indices
            mask = Causal() & selected_keys(numbers, cp_mesh(1))
            with explain_calls() as explanations:
                context_attention(*(randn(at, 1, 2, 512, 4) for at in range(3)), cp_mesh(1), mask=mask, kernel=kernel)
            (run,) = explanations[0].runs.values()
            return {call.cover for call in run.forward.calls}

        return run_ranks(main, 1)[0]

    assert covers(400, None) == covers(4, Own()) == {"partial"}
    assert covers(4, None) == covers(4, ReferenceKernel()) == {"selected"}


def test_only_rows_that_some_head_has_selected_travel():
    """Every query selects block 0 for its first heads, and for its last heads block 5 of 8, both of 2 keys."""
    length, layout = 16, contiguous(16, 4)
    numbers = torch.tensor([0, 5])[None, :, None, None].expand(1, 2, length, 1)

    def main(rank: int) -> tuple[int, int]:
        parts = [layout.shard(x, 2, rank) for x in inputs_of((4, 2), length)]
        own = layout.shard(numbers, 2, rank).contiguous()
        with CommunicationTrace() as trace:
            mask = selected_keys(own, cp_mesh(4), block=2, layout=layout)
        flags = sum(size for name, size in trace.events if name == "all_to_all")
        with CommunicationTrace() as trace:
            context_attention(*parts, cp_mesh(4), mask=mask, layout=layout)
        return flags, sum(size for name, size in trace.events if name == "send")

    row = BATCH * 2 * 2 * DIM * 8  # with both key heads
    flags, keys = zip(*run_ranks(main, 4), strict=True)
    assert list(flags) == [12] * 4  # a byte for each key of another rank
    assert list(keys) == [6 * row, 0, 6 * row, 0]  # the keys 0 and 1, and the keys 10 and 11, to three ranks


def test_no_mask_of_heads_and_no_list_of_keys(monkeypatch):
    """Neither rows times keys, nor rows times keys of blocks; the mode sees what the kernel gathers."""
    monkeypatch.setattr(plan_file, "_COSTS", {"cpu": WAYS["gathers"]})
    monkeypatch.setattr(kernel_file, "_GATHERED", {"cpu": 2**16})
    length, block, count, largest = 3000, 100, 4, LargestResult()
    leaves = [randn(at, 1, 2, length, 4).requires_grad_() for at in range(3)]
    numbers = torch.randint(0, 30, (1, 2, length, count), generator=torch.Generator().manual_seed(0))
    for name in ("forward", "backward"):
        run = getattr(SelectedKernel, name)

        def watched(*tensors, run=run, **options):
            with largest:
                return run(*tensors, **options)

        monkeypatch.setattr(SelectedKernel, name, watched)

    def main(rank: int) -> int:
        with largest:
            mask = Causal() & selected_keys(numbers, cp_mesh(1), block=block)
        context_attention(*leaves, cp_mesh(1), mask=mask).sum().backward()
        return largest.numel

    listed = 2 * length * count * block
    assert 2**14 < run_ranks(main, 1)[0] < listed / 8


@pytest.mark.parametrize("block", [1, 4])
def test_the_host_waits_for_the_device_once(block: int, monkeypatch):
    """As it makes the plan. No tile makes it wait."""
    monkeypatch.setattr(plan_file, "_COSTS_ON_GPU", WAYS["gathers"])
    layout, inputs, chosen = head_tail(48, 2), inputs_of((4, 2), 48), choose(48, 1, 2, 3, block)
    wanted = on_one(inputs, chosen.keys & band_of(Causal(), 48))

    def main(rank: int) -> torch.Tensor:
        leaves = [put(layout.shard(x, 2, rank).clone()).requires_grad_() for x in inputs]
        own = put(layout.shard(chosen.numbers, 2, rank))
        mask = Causal() & selected_keys(own, dist.group.WORLD, block=block, layout=layout)
        out = context_attention(*leaves, dist.group.WORLD, mask=mask, layout=layout, kernel=ReferenceKernel())
        out.backward(put(torch.ones_like(read(out))))
        return read(out)

    with gpus(waits=["cp_styles.mixers.selection._read_on_host"]) as gpu:
        out = layout.unshard(run_ranks(main, 2), 2)
    assert error(out, wanted[0]) < EXACT
    assert gpu.waits == 2  # one on each rank


# -- errors --


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": 3}, "keys were selected for 3 groups of heads, the attention has 4 query heads: give one choice"),
        ({"block": 0}, "block=0 must be the number of keys of a block, at least 1"),
        ({"block": lambda rank: 3 + rank}, r"disagree on block: ranks \[1\] differ from rank 0"),
        ({"groups": lambda rank: 1 + rank}, "disagree on"),
        ({"largest": 4}, "blocks of 3 keys outside the sequence of 12 tokens: pass blocks of 3 keys in the whole"),
    ],
)
def test_refused_on_every_rank(change: dict[str, Any], words: str):
    layout, inputs = head_tail(12, 2), inputs_of((4, 2), 12)

    def act(rank: int, mesh: Any) -> None:
        options = {"groups": 2, "block": 3, "largest": 3} | change
        groups, block, largest = (x(rank) if callable(x) else x for x in options.values())
        own = torch.full((1, groups, 6, 2), largest)
        mask = selected_keys(own, mesh, block=block, layout=layout)
        context_attention(*(layout.shard(x, 2, rank) for x in inputs), mesh, mask=mask, layout=layout)

    refused(act, words, (ValueError, TypeError))
