"""A new token over a cache cut over ranks, and the prefill, beside one process: python tests/benchmarks/decode.py [-h].

One process a rank with one thread, gloo. 8 query heads of 64 and 2 key heads in float32, no gradients. The ranks append
a token to a ``KVCache`` and attend with ``context_decode``. One process joins the token to all keys, as a model's cache
does, and calls torch's attention; and once more with keys that are there already. While one process measures, the
others wait. In the prefill, ``context_attention`` with ``Ring()`` and one process attend to a whole prompt.

    ms      median of the slowest rank; the two take turns
    ratio   of the medians: below 1, the ranks are faster
    moved   bytes that a rank sends for a token
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cp_styles import Causal, context_attention, contiguous, head_tail
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.testing import CommunicationTrace

HEADS, KV_HEADS, DIM = 8, 2, 64


def drawn(heads: int, rows: int) -> torch.Tensor:
    return torch.randn(1, heads, rows, DIM, generator=torch.Generator().manual_seed(rows))


def in_turns(calls: dict[str, Callable[[], object]], rounds: int, alone: set[str]) -> dict[str, float]:
    """The median time of each, of the slowest rank; rank 0 makes those of ``alone``."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 2):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            if name not in alone or dist.get_rank() == 0:
                call()
            spent = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times[name] += [1e3 * spent.item()] * (index >= 2)
    return {name: statistics.median(spent) for name, spent in times.items()}


def tokens(keys: int, rounds: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = contiguous(keys, ranks)
    part = drawn(KV_HEADS, layout.lengths[rank])
    cache = KVCache(dist.group.WORLD, layout, part, part)
    new, query = drawn(KV_HEADS, 1), drawn(HEADS, 1)
    whole = [drawn(KV_HEADS, keys) if rank == 0 else new] * 2

    def cut() -> None:
        cache.append(new, new)
        context_decode(query, cache)

    def joined() -> None:
        k, v = (torch.cat((x, new), 2) for x in whole)
        F.scaled_dot_product_attention(query, k, v, enable_gqa=True)

    def there() -> None:
        F.scaled_dot_product_attention(query, *whole, enable_gqa=True)

    with CommunicationTrace() as trace:
        cut()
    times = in_turns({"cut": cut, "joined": joined, "there": there}, rounds, {"joined", "there"})
    if rank == 0:
        ms = [times[name] for name in ("cut", "joined", "there")]
        cells = [f"{keys:,}", *(f"{x:.2f}" for x in ms), *(f"{ms[0] / x:.2f}" for x in ms[1:]), f"{trace.sent_bytes:,}"]
        print("|", " | ".join(cells), "|", flush=True)


def prefill(length: int, rounds: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = head_tail(length, ranks)
    whole = [drawn(heads, length) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    part = [layout.shard(x, 2, rank).contiguous() for x in whole]

    def cut() -> None:
        context_attention(*part, dist.group.WORLD, layout=layout, mask=Causal())

    def one() -> None:
        F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)

    times = in_turns({"cut": cut, "one": one}, rounds, {"one"})
    if rank == 0:
        ms = times["cut"], times["one"]
        print(f"| {length:,} | {ms[0]:.0f} | {ms[1]:.0f} | {ms[0] / ms[1]:.2f} |", flush=True)


@torch.no_grad()
def work(rank: int, options: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    ranks = options.ranks
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")

    def header(*names: str) -> None:
        if rank == 0:
            print("\n| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|", flush=True)

    header("keys", f"{ranks} ranks: ms", "one process, joining: ms", "keys there: ms", "ratio", "ratio", "sent: bytes")
    for keys in options.keys:
        tokens(keys, options.rounds)
    header("prompt", f"{ranks} ranks: ms", "one process: ms", "ratio")
    for length in options.prompts:
        prefill(length, max(options.rounds // 8, 3))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keys", type=int, nargs="+", default=[8 * 1024, 64 * 1024, 512 * 1024])
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    port = 20000 + os.getpid() % 20000
    torch.multiprocessing.start_processes(work, (options, port), options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
