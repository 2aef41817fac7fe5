"""Memory of one attention on a rank, ours beside peers: python tests/benchmarks/memory.py [--ranks 2 4 8 ...].

Bytes of tensors, counted by storage, beside the inputs and the output's gradient, in units of u, the bytes of one
rank's queries; the most of any rank. Ranks are threads of this process. The numbers are those of the tensors alone:
the same on every machine. Peers run where they can be imported, see peers.py; in 16 bits their tiles are in 16 bits,
because torch's op for CPU takes these.

    alone     the most in a forward without a backward
    kept      alive between forward and backward
    backward  the most in the backward

A second table shows what a layer of a model of four keeps between forward and backward: query, key, value, what it
adds to its input, and its attention, under no checkpoint, under one, and under a selective one (save_attention).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from peers import peers
from torch.utils.checkpoint import checkpoint

from cp_styles import AllGather, Causal, Ring, Ulysses, context_attention, contiguous, head_tail, save_attention
from cp_styles.layouts import Balancer
from cp_styles.strategies import Strategy
from cp_styles.testing import MemoryTrace, run_ranks

OURS: dict[str, tuple[Strategy, Balancer]] = {
    "Ring()": (Ring(), head_tail),
    "Ring(keep=0)": (Ring(keep=0), head_tail),
    "Ring(keep=64)": (Ring(keep=64), head_tail),
    "AllGather()": (AllGather(), head_tail),
    "Ulysses()": (Ulysses(), contiguous),
    "Ulysses(size=2)": (Ulysses(size=2), contiguous),
}
LAYERS = 4


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    args = parser.parse_args()
    for ranks in args.ranks:
        if ranks < 2 or args.seq_len % (2 * ranks):
            parser.error(f"--seq-len {args.seq_len} is not a multiple of twice --ranks {ranks}, or that is below 2")
    if args.heads % args.kv_heads:
        parser.error("--heads must be a multiple of --kv-heads")
    return args


def inputs(args: argparse.Namespace, ranks: int) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient, [B, S, H, D] in memory, as projections leave them."""
    heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    shapes = [(1, args.seq_len // ranks, count, args.head_dim) for count in heads]
    return [torch.ones(shape, dtype=getattr(torch, args.dtype)).transpose(1, 2) for shape in shapes]


def one_attention(attend: Callable[..., torch.Tensor], args: argparse.Namespace, ranks: int) -> list[float]:
    def on(rank: int) -> list[int]:
        *leaves, grad = inputs(args, ranks)
        with torch.no_grad(), MemoryTrace() as trace:
            attend(*leaves)
        found = [trace.peak]
        leaves = [x.requires_grad_() for x in leaves]
        with MemoryTrace() as trace:
            out = attend(*leaves)
            found.append(trace.live)
            trace.reset()
            out.backward(grad)
        return [size / leaves[0].nbytes for size in (*found, trace.peak)]

    return [max(sizes) for sizes in zip(*run_ranks(on, ranks), strict=True)]


def a_layer(attend: Callable[..., torch.Tensor], args: argparse.Namespace, ranks: int, how: str) -> float:
    """What one of the layers keeps."""
    contexts = save_attention()

    def layer(x: torch.Tensor) -> torch.Tensor:
        kv = x[:, : args.kv_heads]
        return x + attend(x * 0.5, kv * 0.5, kv * 2.0)

    def on(rank: int) -> int:
        first = inputs(args, ranks)[0].requires_grad_()
        with MemoryTrace() as trace:
            x = first
            for _ in range(LAYERS):
                if how == "none":
                    x = layer(x)
                elif how == "checkpoint":
                    x = checkpoint(layer, x, use_reentrant=False)
                else:
                    x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            kept = trace.live / LAYERS
            x.sum().backward()
        return kept / first.nbytes

    return max(run_ranks(on, ranks))


def main() -> None:
    args = parse()
    print(
        f"torch {torch.__version__}, B=1 H={args.heads}:{args.kv_heads} D={args.head_dim} S={args.seq_len} causal "
        f"{args.dtype}, in units of one rank's queries"
    )
    print(f"{'':<28}{'ranks':>6}{'alone':>8}{'kept':>8}{'backward':>10}")

    def ours(strategy: Strategy, layout: Balancer) -> Callable[..., torch.Tensor]:
        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            return context_attention(*qkv, dist.group.WORLD, strategy=strategy, layout=layout, mask=Causal())

        return attend

    def of_peer(name: str) -> Callable[..., torch.Tensor]:
        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            peer = peers(name)[0][name]  # of this thread, which is a rank
            if not peer.rows_first:
                return peer.attend(*qkv)
            q, k, v = (x.transpose(1, 2) for x in qkv)
            return peer.attend(q, k, v).transpose(1, 2)

        return attend

    found, missing = peers()
    contenders = {name: ours(*chosen) for name, chosen in OURS.items()} | {name: of_peer(name) for name in found}
    for name, attend in contenders.items():
        for ranks in args.ranks:
            try:
                alone, kept, backward = one_attention(attend, args, ranks)
            except Exception as error:  # another version of torch, or heads that it does not take
                if name in OURS:
                    raise
                print(f"{name:<28}{ranks:>6}  does not run here: {type(error).__name__}")
                continue
            print(f"{name:<28}{ranks:>6}{alone:>8.2f}{kept:>8.2f}{backward:>10.2f}", flush=True)
    for name, reason in missing.items():
        print(f"{name:<28}does not run here: {reason}")
    print("kept by a layer of four, its own query, key, value and sum included")
    print(f"{'':<18}{'ranks':>6}{'none':>8}{'checkpoint':>12}{'selective':>11}")
    for name, (strategy, layout) in OURS.items():
        for ranks in args.ranks:
            sizes = [a_layer(ours(strategy, layout), args, ranks, how) for how in ("none", "checkpoint", "selective")]
            print(f"{name:<18}{ranks:>6}{sizes[0]:>8.2f}{sizes[1]:>12.2f}{sizes[2]:>11.2f}", flush=True)


if __name__ == "__main__":
    main()
