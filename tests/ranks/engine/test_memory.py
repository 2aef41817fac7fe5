"""The exact memory of attention: bytes in the forward, from forward to backward, and in the backward.

Counted by storage, beside the inputs and the output's gradient, in units of u, the bytes of one rank's queries: the
same numbers on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline

from cp_styles import (
    AllGather,
    Causal,
    Documents,
    Ring,
    SlidingWindow,
    Ulysses,
    context_attention,
    contiguous,
    head_tail,
)
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.strategies import moving_kv
from cp_styles.testing import MemoryTrace, run_ranks
from tests.covering import sampled
from tests.doors import causal_blocks, door
from tests.ranks.attention_case import Core, cp_mesh

pytestmark = pytest.mark.usefixtures("large_blocks")

HEADS, DIM = 8, 64
ROWS = 32  # a rank's
# What the op says to its backward beside tensors, and the padding of the logsumexp: bytes.
CALL = 128


def tensors(rows: int, kv_heads: int = HEADS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient, [B, S, H, D] in memory, as projections leave them."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [torch.randn(1, rows, h, DIM, generator=generator).to(dtype).transpose(1, 2) for h in heads]


def measured(attend: Callable[..., torch.Tensor], rows: int, *shape: Any) -> tuple[float, ...]:
    """Peak of a forward without a backward, what is kept (the output too), and the peak of the backward, in u."""
    *inputs, cotangent = tensors(rows, *shape)
    inputs = [x + dist.get_rank() for x in inputs]  # equal tokens on all ranks would be refused
    unit = inputs[0].nbytes
    with torch.no_grad():
        attend(*inputs)  # tables of plans, which caches keep, are made now
        with MemoryTrace() as trace:
            attend(*inputs)
    alone = trace.peak
    inputs = [x.requires_grad_() for x in inputs]
    with MemoryTrace() as trace:
        out = attend(*inputs)
        kept = trace.live
        trace.reset()
        out.backward(cotangent)
    # The agreement of the ranks, some hundred bytes.
    return tuple(round(size / unit, 2) for size in (alone, kept, trace.peak))


def of_ranks(ranks: int, **options: Any) -> tuple[float, ...]:
    """The most of any rank."""
    length = options.pop("length", ROWS * ranks)
    layout = options.pop("layout", head_tail)
    shape = options.pop("kv_heads", HEADS), options.pop("dtype", torch.float32)

    def on(rank: int):
        attend = partial(context_attention, mesh=dist.group.WORLD, layout=layout, **options)
        return measured(attend, layout(length, ranks).lengths[rank], *shape)

    return tuple(max(sizes) for sizes in zip(*run_ranks(on, ranks), strict=True))


def test_what_strategies_hold():
    """Causal attention of one length a rank, the most of any rank: without a backward, kept, and in the backward.

    The forward: output 1, keys and values of the own part, of the one at hand and of the one to come. Kept: output,
    logsumexp, and what ``keep`` says. The backward: see [Note: memory] in moving_kv.py and the strategies' docstrings.
    """
    shown = []
    for name, strategy, layout in (
        ("Ring(keep=0)", Ring(keep=0), head_tail),
        ("Ring()", Ring(), head_tail),
        ("Ring(keep=64)", Ring(keep=64), head_tail),
        ("AllGather()", AllGather(), head_tail),
        ("Ulysses()", Ulysses(), head_tail),
        ("Ulysses(size=2)", Ulysses(size=2), head_tail),
    ):
        for ranks in (1, 2, 4, 8):
            if ranks > 1 or "size" not in name:
                sizes = of_ranks(ranks, strategy=strategy, layout=layout, mask=Causal())
                shown.append(f"{name:<16}{ranks}  " + "".join(f"{size:7.2f}" for size in sizes))
    assert_expected_inline(
        "\n".join(shown),
        """\
Ring(keep=0)    1     1.02   1.02   4.02
Ring(keep=0)    2     4.02   1.02   8.52
Ring(keep=0)    4     7.54   1.02  11.64
Ring(keep=0)    8     7.54   1.02  11.64
Ring()          1     1.02   1.02   4.02
Ring()          2     4.02   3.02   9.52
Ring()          4     7.54   3.02  12.14
Ring()          8     7.54   3.02  12.64
Ring(keep=64)   1     1.02   1.02   4.02
Ring(keep=64)   2     4.02   3.02   9.52
Ring(keep=64)   4     7.54   7.02  15.02
Ring(keep=64)   8     7.54  15.02  23.02
AllGather()     1     1.02   1.02   4.02
AllGather()     2     4.02   3.02   9.52
AllGather()     4     9.02   3.02  13.02
AllGather()     8    17.02   3.02  21.02
Ulysses()       1     1.02   1.02   4.02
Ulysses()       2     6.00   5.02  11.02
Ulysses()       4     6.00   5.02  11.02
Ulysses()       8     6.00   5.02  11.02
Ulysses(size=2) 2     6.00   5.02  11.02
Ulysses(size=2) 4     7.02   7.02  14.52
Ulysses(size=2) 8    10.54   7.02  17.14""",
    )


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "size"),
    [(2, 2, 6.02), *(pytest.param(*row, marks=pytest.mark.nightly) for row in ((4, 8, 9.02), (4, 2, 7.02)))],
)
def test_ulysses_holds_less_if_its_gradients_are_large(ranks: int, kv_heads: int, size: float):
    """In a backward: output, residual and three gradients, and one more: a gradient that is on its way. Above, they are
    packed into one message."""
    rows = 2**21 // (4 * HEADS * DIM)
    options = {"mask": Causal(), "length": rows * ranks, "layout": contiguous, "kv_heads": kv_heads}
    assert of_ranks(ranks, strategy=Ulysses(), **options)[2] == size


@pytest.mark.parametrize(
    ("strategy", "ranks", "expected"),
    [
        pytest.param(Ring(), 2, (6.04, 12.53, 3.79, 7.78, 6.09, 12.03, 5.34, 6.28), marks=pytest.mark.nightly),
        (Ring(), 4, (8.78, 15.78, 4.28, 8.03, 10.09, 14.78, 6.34, 6.66)),
        pytest.param(AllGather(), 4, (11.04, 15.53, 5.04, 7.78, 10.09, 15.03, 6.34, 7.16), marks=pytest.mark.nightly),
        pytest.param(Ulysses(), 4, (6.00, 11.03, 4.00, 8.03, 6.00, 11.03, 4.00, 8.03), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_what_strategies_hold_in_16_bits(strategy, ranks: int, expected: tuple[float, ...]):
    """A forward without a backward and a backward in bfloat16, for 8 and 2 key heads: with tiles in float32, as on CPU,
    and then with tiles in bfloat16, as on CUDA.

    Sums in float32 take 2 u for queries, and 4 u or 1 u for keys. What else is wide is that of some heads.
    """
    sizes: list[float] = []
    for kernel, kv_heads in product((None, replace(CPU_FLASH, wide_tiles=False)), (8, 2)):
        options = {"kernel": kernel, "kv_heads": kv_heads, "mask": Causal(), "dtype": torch.bfloat16}
        alone, _, backward = of_ranks(ranks, strategy=strategy, length=128 * ranks, **options)
        sizes += [alone, backward]
    assert tuple(sizes) == expected


@pytest.mark.parametrize(("strategy", "kv_heads", "sizes"), [(Ring(), 8, (2.63, 2.0)), (AllGather(), 2, (3.31, 2.16))])
def test_a_forward_without_a_backward_attends_by_turns(
    strategy, kv_heads: int, sizes: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
):
    """Two key heads' messages of 4 ranks at once, and one's. Each has rows of 2 x 64 numbers of 4 bytes."""
    for at_once, size in zip((2, 1), sizes, strict=True):
        together = 3 if isinstance(strategy, AllGather) else 1
        monkeypatch.setattr(moving_kv, "_MAX_ARRIVAL_BYTES", at_once * together * ROWS * 2 * DIM * 4)
        assert of_ranks(4, strategy=strategy, kv_heads=kv_heads, mask=Causal())[0] == size


@pytest.mark.nightly  # by day, test_what_strategies_hold has the figures of 4 and of 8 ranks
@pytest.mark.parametrize(("strategy", "few"), [(Ring(), 8), (Ulysses(inner=Ring(), size=2), 16)], ids=str)
def test_memory_shrinks_as_ranks_are_added(strategy, few: int):
    """For one length, the bytes of a rank times the ranks do not grow, once a rank in the middle of a ring
    has a round in which it gets and sends all rows."""
    sizes = [of_ranks(ranks, strategy=strategy, mask=Causal(), length=1024) for ranks in (few, 2 * few)]
    for fewer, more in zip(*sizes, strict=True):
        assert more <= fewer * 1.01, sizes  # the agreement of the ranks


CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": Causal()},
    "window": {"mask": SlidingWindow(40)},
    "documents": {"mask": Documents((97, 13, 7, 50, 89)) & Causal()},
    "uneven": {"mask": Causal(), "length": 251},
    "sinks": {"mask": Causal(), "sink_H": torch.zeros(HEADS)},
}


@sampled(1, case=list(CASES), ranks=[8, 4])
def test_a_ring_holds_no_more_under_other_masks(case: str, ranks: int):
    """8 u in a forward without a backward, 13 u in a backward."""
    options = {"length": 256, **CASES[case]}
    # Positions and masks of tiles, of up to 32 x 32 pairs here, are as large as 2 of 8 heads' queries in float32.
    alone, _, backward = of_ranks(ranks, strategy=Ring(), **options)
    assert (alone <= 8, backward <= 13) == (True, True), (alone, backward)


@pytest.mark.parametrize("name", ["style", "block", "flex", "varlen"])
def test_doors_hold_no_more(name: str):
    ranks, length = 4, 128
    options = {"flex": {"block_mask": causal_blocks(length)}, "block": {"core": Core(), "strategy": Ring()}}

    def on(rank: int):
        return measured(door(name, cp_mesh(ranks), length=length, **options.get(name, {})), ROWS)

    alone, _, backward = (max(sizes) for sizes in zip(*run_ranks(on, ranks), strict=True))
    assert (alone <= 8, backward <= 13) == (True, True), (alone, backward)
