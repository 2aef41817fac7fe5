"""Packs over all ranks against fixed degrees of context parallelism, one process a rank: packs.py [--help].

The samples of a step are the same for all three, and so are loss and gradients, which the first round compares. Times
mean something with a core for each rank:

    packs     pack_samples over all ranks, cut by whole_documents
    cp        the degree is the number of ranks: each sample is cut head-tail over all ranks, in turn
    dp        the degree is 1: each rank trains on whole samples, the longest to the rank with the fewest tokens

    tokens/s     of all ranks, median over rounds, which interleave the three; a round ends when its slowest rank does
    packs / x    median over rounds of the paired ratio of times
    bytes        sent by all ranks for the attention of a step, in messages
    imbalance    most work, and most tokens, of a rank over the mean

--picture FILE draws which rank has which tokens (PNG; needs matplotlib).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import (
    BatchSharder,
    Causal,
    Documents,
    ModuleContextParallel,
    head_tail,
    imbalance,
    next_token_labels,
    pack_samples,
    parallelize_module,
    sum_gradients,
    whole_documents,
)
from cp_styles.testing import CommunicationTrace

MIXES: dict[str, Callable[[random.Random], list[int]]] = {
    "all short": lambda draw: [draw.randint(32, 160) for _ in range(32)],
    "all long": lambda draw: [draw.randint(900, 1100) for _ in range(3)],
    "as in fine-tuning": lambda draw: [min(1536, int(draw.lognormvariate(4.6, 1.0)) + 8) for _ in range(24)],
}
WORDS, WIDTH, HEADS, LAYERS = 512, 128, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(2048, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model_of() -> Model:
    torch.manual_seed(0)
    return Model()


def fewest_tokens_first(lengths: list[int], ranks: int) -> list[int]:
    """The rank of each sample, whole."""
    holder, tokens = [0] * len(lengths), [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        holder[index] = min(range(ranks), key=tokens.__getitem__)
        tokens[holder[index]] += lengths[index]
    return holder


class Contender:
    """A model, and its step with the samples of all ranks. ``count`` is the number of labels."""

    def __init__(self, name: str, mesh: Any) -> None:
        self.name, self.mesh, self.model = name, mesh, model_of()
        if name != "dp":
            parallelize_module(self.model, mesh, ModuleContextParallel(verified=True))
        self.sharder = BatchSharder(mesh, layout=whole_documents if name == "packs" else head_tail)

    def step(self, samples: list[torch.Tensor], count: int) -> torch.Tensor:
        self.model.zero_grad()
        rank, ranks, loss = self.mesh.get_local_rank(), self.mesh.size(), torch.zeros(())
        if self.name == "dp":
            holder = fewest_tokens_first([*map(len, samples)], ranks)
            for x in (x[None] for x, each in zip(samples, holder, strict=True) if each == rank):
                logits = self.model(x, torch.arange(x.shape[1]))
                losses = nn.functional.cross_entropy(logits[0], next_token_labels(x)[0], reduction="sum")
                (losses / count).backward()
                loss += losses.detach() / count
            dist.all_reduce(loss, group=self.mesh.get_group())
            sum_gradients(self.model, self.mesh)
            return loss
        if self.name == "packs":
            own = [x for at, x in enumerate(samples) if at % ranks == rank]  # as loaders share them out
            batches = [self.sharder(pack) for pack in pack_samples(own, self.mesh)]
        else:
            batches = [self.sharder(x[None]) for x in samples]
        for batch in batches:
            with batch.scope():
                logits = self.model(batch.tokens, batch["position_ids"])
            part = batch.loss(logits, token_count=count)
            part.backward()
            loss += part.detach()
        self.sharder.sum_gradients(self.model)
        return loss


def shares(name: str, lengths: list[int], ranks: int) -> tuple[float, float]:
    """Most work, and most tokens, of a rank over the mean."""
    if name == "cp":
        return 1.0, 1.0  # up to a few tokens
    if name == "packs":
        layout = whole_documents(sum(lengths), ranks, documents=lengths)
        return imbalance(layout, Causal() & Documents(lengths)), max(layout.lengths) * ranks / sum(lengths)
    holder = fewest_tokens_first(lengths, ranks)
    of_ranks = [[size for size, each in zip(lengths, holder, strict=True) if each == rank] for rank in range(ranks)]
    works = [sum(size * (size + 1) for size in sizes) for sizes in of_ranks]
    return max(works) * ranks / sum(works), max(map(sum, of_ranks)) * ranks / sum(lengths)


def work(rank: int, args: argparse.Namespace, port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("all",))
    contenders = [Contender(name, mesh) for name in ("packs", "cp", "dp")]
    if rank == 0:
        print(f"torch {torch.__version__}, {args.ranks} ranks x 1 thread, gloo, {args.rounds} rounds")
        print(f"{'':22}{'tokens/s':>10}{'packs / x':>11}{'bytes':>12}{'imbalance':>14}")
    for mix, draw in MIXES.items():
        generator, lengths = torch.Generator().manual_seed(0), draw(random.Random(0))
        samples = [torch.randint(0, WORDS, (size,), generator=generator) for size in lengths]
        count = sum(lengths) - len(lengths)
        times: dict[str, list[float]] = {each.name: [] for each in contenders}
        sent, results = {}, {}
        for number in range(args.rounds + 1):
            for each in contenders:
                dist.barrier()
                with CommunicationTrace() if number == 0 else open(os.devnull) as trace:
                    before = time.perf_counter()
                    loss = each.step(samples, count)
                    dist.barrier()
                if number:
                    times[each.name].append(time.perf_counter() - before)
                    continue
                sent[each.name] = torch.tensor(sum(n for name, n in trace.events if name == "send"))
                dist.all_reduce(sent[each.name])
                results[each.name] = torch.cat([loss[None], *(x.grad.flatten() for x in each.model.parameters())])
            if rank == 0:
                print(f"{mix}: round {number}/{args.rounds}", end="\r", flush=True)
        for each in contenders:
            off = float((results[each.name] - results["dp"]).norm() / results["dp"].norm())
            assert off < 1e-4, f"{each.name} differs from dp by {off}"  # of float32 sums in another order
            took = times[each.name]
            speed = sum(lengths) / statistics.median(took)
            ratio = statistics.median(x / y for x, y in zip(times["packs"], took, strict=True))
            of_work, of_tokens = shares(each.name, lengths, args.ranks)
            if rank == 0:
                sizes = f"{of_work:.2f} / {of_tokens:.2f}"
                print(f"{mix:17} {each.name:5}{speed:9,.0f}{ratio:11.2f}{int(sent[each.name]):12,}{sizes:>14}")
    dist.destroy_process_group()


def picture(path: Path, ranks: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(MIXES), 1, figsize=(8, 1.6 * len(MIXES)), squeeze=False, layout="constrained")
    for (mix, draw), panel in zip(MIXES.items(), panels[:, 0], strict=True):
        lengths = draw(random.Random(0))
        layout = whole_documents(sum(lengths), ranks, documents=lengths)
        edges = torch.tensor(lengths).cumsum(0)
        for rank, chunks in enumerate(layout.chunks):
            at = 0
            for start, stop in chunks:
                while start < stop:  # one bar for each document
                    document = int(torch.searchsorted(edges, start, right=True))
                    size = min(stop, int(edges[document])) - start
                    panel.barh(rank, size, left=at, color=f"C{document % 10}", edgecolor="white", linewidth=0.4)
                    at, start = at + size, start + size
        panel.set(title=f"{mix}: {len(lengths)} samples", yticks=range(ranks), ylabel="rank")
        panel.invert_yaxis()
    panels[-1, 0].set_xlabel("tokens of the rank; each color is a sample")
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the layouts instead of timing")
    arguments = parser.parse_args()
    if arguments.picture:
        picture(arguments.picture, arguments.ranks)
    else:
        torch.multiprocessing.start_processes(
            work, args=(arguments, 20000 + os.getpid() % 20000), nprocs=arguments.ranks, start_method="spawn"
        )
