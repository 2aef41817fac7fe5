"""Strategy x mask x layout x kernel x heads x dtype x ranks x length, generated, against the float64 oracle.

What the grid covers is held by the first test, as numbers in tutorials/support.md; see parity_grid.py for how its rows
are chosen.
"""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from cp_styles.functions.attention import context_attention
from cp_styles.testing import run_ranks
from tests.cuda_ops import cuda_ops_on_cpu
from tests.oracle import attend_and_differentiate, attention_inputs, error, expected_attention
from tests.ranks.attention_case import EXACT, Core, cp_mesh, parallel
from tests.ranks.parity_grid import BATCHES, KERNELS, RANKS, STRATEGIES, Row, coverage, grid, missing_pairs, whole_grid

# Low precision against one device on the same rounded inputs, for each of out, dq, dk, dv: error within RATIO of its
# error plus FLOOR times the dtype's epsilon, half a rounding: a merge rounds once more than one device does.
RATIO, FLOOR = 1.5, 0.25


def test_what_the_grid_covers():
    """Every two values of any two axes meet, but two ranks of heads in an odd number of ranks; the page shows it."""
    assert missing_pairs() == set()
    page = (Path(__file__).parents[3] / "tutorials/support.md").read_text()
    (shown,) = re.findall(r"<!-- grid -->\n(.*?)\n<!-- end of grid -->", page, re.DOTALL)
    assert shown == coverage(), "put what python -m tests.ranks.parity_grid prints into tutorials/support.md"


@cache
def problem(mask: str, heads: tuple[int, int], dtype: torch.dtype, length: int):
    """Whole inputs and cotangent, the oracle's results, and in low precision the errors of one device's attention."""
    row = Row("ring", mask, "contiguous", "flash", heads, dtype, 1, length)
    value = row.value()
    shape = {"length": length, "batch": BATCHES[length], "heads": heads[0], "kv_heads": heads[1], "dim": 8}
    inputs, cotangent = attention_inputs(dtype=dtype, **shape)
    bias = None if value.bias is None else value.bias.double()
    expected = expected_attention(inputs, cotangent, value.sees, bias=bias)
    if dtype == torch.float64:
        return inputs, cotangent, expected, [0.0] * 4
    given = value.sees
    if value.bias is not None:
        given = value.bias if value.sees is None else value.bias.masked_fill(~value.sees, float("-inf"))
    given = given.expand(BATCHES[length], heads[0], length, length)  # fused attention takes no mask of three dims
    one = partial(F.scaled_dot_product_attention, attn_mask=given, enable_gqa=True)
    alone = attend_and_differentiate(one, inputs, cotangent)
    return inputs, cotangent, expected, [error(*pair) for pair in zip(alone, expected, strict=True)]


def attempt(row: Row, index: int, rank: int, mesh) -> list[torch.Tensor]:
    """``[out, dq, dk, dv]`` of a row on a rank; every third row goes through the module's door."""
    inputs, cotangent, _, _ = problem(row.mask, row.heads, row.dtype, row.length)
    layout = row.cut()
    options = {
        "strategy": STRATEGIES[row.strategy],
        "layout": layout,
        "mask": row.value().mask,
        "kernel": KERNELS[row.kernel],
    }
    if index % 3:
        attend = partial(context_attention, mesh=mesh, **options)
    else:
        attend = parallel(Core(causal=False), mesh, **options)
    try:
        return attend_and_differentiate(
            attend, [layout.shard(x, 2, rank) for x in inputs], layout.shard(cotangent, 2, rank)
        )
    except Exception as failure:
        raise AssertionError(f"{row}: {failure}") from failure


def check(of_grid: tuple[Row, ...], ranks: int) -> None:
    """The rows on so many ranks."""
    rows = [(index, row) for index, row in enumerate(of_grid) if row.ranks == ranks]
    for _, row in rows:
        problem(row.mask, row.heads, row.dtype, row.length)  # once, and not once a rank

    def on(rank: int):
        mesh = cp_mesh(ranks)
        return [attempt(row, index, rank, mesh) for index, row in rows]

    wrong = []
    with cuda_ops_on_cpu():
        found = run_ranks(on, ranks)
    for (_, row), *parts in zip(rows, *found, strict=True):
        _, _, expected, alone = problem(row.mask, row.heads, row.dtype, row.length)
        layout, slack = row.cut(), 0.0 if row.dtype == torch.float64 else FLOOR * torch.finfo(row.dtype).eps
        for what, wanted, mine, by_rank in zip(
            ("out", "dq", "dk", "dv"), expected, alone, zip(*parts, strict=True), strict=True
        ):
            assert {part.dtype for part in by_rank} == {row.dtype}
            off = error(layout.unshard(by_rank, 2), wanted)
            if not off <= (EXACT if row.dtype == torch.float64 else RATIO * mine + slack):  # NaN is wrong too
                wrong.append(f"{what} {off:.2e}, alone {mine:.2e}: {row}")
    assert not wrong, f"{len(wrong)} wrong, such as\n" + "\n".join(wrong[:12])


@pytest.mark.parametrize("ranks", RANKS)
def test_grid(ranks: int):
    check(grid(), ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", RANKS)
def test_every_strategy_mask_and_layout(ranks: int):
    check(whole_grid(), ranks)
