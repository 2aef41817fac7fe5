"""Bytes and times of a gated delta rule over ranks: python tests/benchmarks/mixers.py [--lengths 4096] [--ranks 2 4].

By states: ``context_recurrence``, with contiguous parts and with head-tail. By heads: an all-to-all that gives each
rank all tokens of a part of the heads, and one back. The kernel is transformers' plain one, in chunks of 64. Bytes are
those that a rank sends in a forward, the same on every machine; a backward sends as many. Times are those of a forward
and a backward, the least of three. Ranks are threads with one core each, so more ranks than cores show nothing.

Maps of states are composed by doubling: with 32 heads of 128 the busiest of 8 ranks sends 13 MB in 4 rounds. An
all-gather of maps would send 29 MB, and a ring of states 2 MB in 7 rounds that wait for each other. On 64 ranks these
are 25, 264 and 2 MB.

At the end, the milliseconds for which the host plans a roll by one over 8 ranks, at the first call and at the second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import normalize, softplus
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from cp_styles import contiguous, head_tail
from cp_styles._lib.bounded_cache import another_cache
from cp_styles.collectives import heads_to_seq, seq_to_heads
from cp_styles.layouts import SequenceLayout
from cp_styles.mixers import context_recurrence
from cp_styles.mixers.roll import roll_exchange
from cp_styles.testing import CommunicationTrace, run_ranks


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    return parser.parse_args()


def inputs(args: argparse.Namespace, length: int) -> list[torch.Tensor]:
    """q, k, v, g, beta."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, length, args.heads, args.head_dim)] * 3 + [(1, length, args.heads)] * 2
    q, k, v, g, beta = (torch.randn(shape, generator=generator) for shape in shapes)
    return [normalize(q, dim=-1), normalize(k, dim=-1), v, -softplus(g), beta.sigmoid()]


def by_heads(q, k, v, g, beta) -> torch.Tensor:
    group = dist.group.WORLD
    whole = [seq_to_heads(x.flatten(3), group, seq_dim=1, heads_dim=2) for x in (q, k, v)]
    gates = [seq_to_heads(x[..., None], group, seq_dim=1, heads_dim=2)[..., 0] for x in (g, beta)]
    out = torch_chunk_gated_delta_rule(*whole, *gates)[0]
    return heads_to_seq(out, group, seq_dim=1, heads_dim=2)


def measured(run: Callable[..., torch.Tensor], parts: list[torch.Tensor]) -> tuple[int, float]:
    """Bytes of a forward, and the seconds of a forward and a backward."""
    times = []
    for _ in range(3):
        leaves = [x.clone().requires_grad_() for x in parts]
        if dist.get_world_size() > 1:
            dist.barrier()
        began = time.perf_counter()
        with CommunicationTrace() as trace:
            out = run(*leaves)
        sent = sum(size for _, size in trace.events)
        out.sum().backward()
        times.append(time.perf_counter() - began)
    return sent, min(times)


def alone(*given: torch.Tensor) -> torch.Tensor:
    return torch_chunk_gated_delta_rule(*given)[0]


def on_rank(rank: int, name: str, layout: SequenceLayout, whole: list[torch.Tensor]) -> tuple[int, float]:
    parts = [layout.shard(x, 1, rank) for x in whole]
    if name in ("heads", "alone"):
        return measured(by_heads if name == "heads" else alone, parts)
    scan = context_recurrence(torch_chunk_gated_delta_rule, dist.group.WORLD, layout=layout)
    return measured(lambda *given: scan(*given)[0], parts)


def planning(length: int, ranks: int = 8) -> tuple[float, float]:
    """Milliseconds of the first and of the second call of a roll's plan."""
    layout, times = head_tail(length, ranks), []
    with another_cache():
        for _ in range(2):
            began = time.perf_counter()
            roll_exchange(layout, (length,), -1, True, 0)
            times.append(1e3 * (time.perf_counter() - began))
    return times[0], times[1]


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    print(f"{'tokens':>8} {'ranks':>5}   {'how':<22} {'MB sent':>8} {'seconds':>8}")
    for length in args.lengths:
        whole = inputs(args, length)
        for ranks in args.ranks:
            cuts = {"states, contiguous": contiguous, "states, head_tail": head_tail, "heads": contiguous}
            for name, balancer in cuts.items() if ranks > 1 else [("alone", contiguous)]:
                layout = balancer(length, ranks)
                on = partial(on_rank, name=name, layout=layout, whole=whole)
                found = run_ranks(on, ranks, timeout_seconds=600.0)
                sent, seconds = (max(each) for each in zip(*found, strict=True))
                print(f"{length:>8} {ranks:>5}   {name:<22} {sent / 1e6:>8.3f} {seconds:>8.3f}", flush=True)
    for length in (2**15, 2**17, 2**20):
        first, second = planning(length)
        print(f"{length:>8}     8   plan of a roll: {first:.3f} ms at the first call, {second:.3f} ms at the second")


if __name__ == "__main__":
    main()
