"""What it takes to cut a BlockMask for a rank: python tests/benchmarks/block_mask.py [--seq-len 16384 --ranks 8 ...].

Packed documents, causal inside. torch makes the BlockMask of the whole sequence, which the user has anyway; ours looks
into it once, and makes each rank's plan from it. Beside it what torch would take to make the local mask of one rank,
whose queries are a part and whose keys are the whole sequence, from the mask_mod again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles import FlexMask, head_tail
from cp_styles.plan import make_plan

T = TypeVar("T")


def timed(what: str, make: Callable[[], T]) -> T:
    start = time.perf_counter()
    made = make()
    print(f"{what:<72}{(time.perf_counter() - start) * 1e3:>10.1f} ms", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--documents", type=int, default=28)
    args = parser.parse_args()
    length, ranks = args.seq_len, args.ranks
    if length % ranks or not 0 < args.documents < length:
        parser.error("--seq-len must be a multiple of --ranks, and more than --documents, of which there must be one")
    generator = torch.Generator().manual_seed(0)
    starts = torch.randperm(length - 1, generator=generator)[: args.documents - 1] + 1
    document = torch.zeros(length, dtype=torch.int64).index_fill_(0, starts, 1).cumsum(0)
    layout = head_tail(length, ranks)
    positions = layout.positions(0, torch.device("cpu"))

    def causal_documents(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])

    def of_rank_0(b, h, q_idx, kv_idx):
        return causal_documents(b, h, positions[q_idx], kv_idx)

    print(f"{length} tokens, {args.documents} documents, {ranks} ranks, head_tail, torch {torch.__version__}, CPU")
    block_mask = timed(
        "torch: create_block_mask of the whole sequence",
        lambda: create_block_mask(causal_documents, None, None, length, length, device="cpu"),
    )
    timed(
        "torch: create_block_mask of one rank's queries",
        lambda: create_block_mask(of_rank_0, None, None, length // ranks, length, device="cpu"),
    )
    mask = timed("ours: a look into the BlockMask", lambda: FlexMask(block_mask))
    for what in ("ours: the plan of one rank", "ours: the same again"):
        timed(what, lambda: make_plan(layout, layout, mask, 0))
    plans = timed("ours: the plans of all ranks", lambda: [make_plan(layout, layout, mask, r) for r in range(ranks)])
    tiles = [tile for plan in plans for part in plan.parts for tile in part.tiles]
    needed = sum(plan.received_rows for plan in plans)
    print(f"tiles of all ranks: {len(tiles)}; rows of keys that travel: {needed} of {length * (ranks - 1)}")


if __name__ == "__main__":
    main()
