"""Compositions, decoding, selected keys and random numbers on ranks that share one device: see tests/device.py.

    CP_STYLES_TEST_DEVICE=cuda python -m tests.on_device
    CP_STYLES_TEST_DEVICE=cuda python -m tests.on_device decode "selected keys"

Each is compared with one process in float64. Prints a line for each, and the number of exact ones and of others.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import (
    BackboneContextParallel,
    Causal,
    ModuleContextParallel,
    context_attention,
    context_latent_attention,
    contiguous,
    head_tail,
    parallelize_module,
    sum_gradients,
)
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.mixers import context_dropout, context_rand, context_randn, context_select, selected_weights
from tests.device import DEVICE, ON_GPU, here, run_ranks, there
from tests.oracle import dense_attention, error, randn
from tests.ranks import composition

EXACT = 1e-11  # float64 sums in another order give 1e-15; two steps of AdamW multiply it
LENGTH, RANKS = 48, 3


def composed(make: Callable[[], composition.Training]) -> float:
    """The loss and the gradients of a step against one process."""

    def on(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        found = make().run(2)
        return found.losses, {name: here(x) for name, x in found.gradients.items()}

    wanted = composition.alone(2)
    found = run_ranks(on, 4)
    losses = error(torch.tensor(found[0][0]), torch.tensor(wanted.losses))
    gradients = [x for _, each in found for x in each.items()]  # a stage of a pipeline has a part of them
    return max(losses, *(error(x, here(wanted.gradients[name])) for name, x in gradients))


def decoded() -> float:
    """A prompt, then six tokens, with grouped heads."""
    q, k, v = (randn(at, 2, heads, LENGTH + 6, 16) for at, heads in enumerate((4, 2, 2)))

    def on(rank: int) -> list[torch.Tensor]:
        mesh, layout = init_device_mesh(DEVICE.type, (RANKS,), mesh_dim_names=("cp",)), head_tail(LENGTH, RANKS)
        cache = KVCache(mesh, layout, *(there(layout.shard(x[:, :, :LENGTH], 2, rank)) for x in (k, v)))
        found = []
        for at in range(LENGTH, LENGTH + 6):
            new = [there(x[:, :, at : at + 1]) for x in (q, k, v)]
            cache.append(*new[1:])
            found.append(here(context_decode(new[0], cache, mask=Causal())))
        return found

    wanted = [
        dense_attention(q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1]) for at in range(LENGTH, LENGTH + 6)
    ]
    return max(error(x, y) for found in run_ranks(on, RANKS) for x, y in zip(found, wanted, strict=True))


def selected() -> float:
    """Output, target of the indexer, and gradients of attention and indexer."""
    shapes = [(4, LENGTH, 8), (2, LENGTH, 8), (2, LENGTH, 8), (3, LENGTH, 5), (LENGTH, 5), (3, LENGTH), (4, LENGTH, 8)]
    *inputs, cotangent = (randn(at, 2, *shape) for at, shape in enumerate(shapes))
    dims, allowed = (2, 2, 2, 2, 1, 2), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    inputs[3:5] = [x.abs() for x in inputs[3:5]]  # scores of 0 would be equal, and topk may take any of equal ones
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v, index_q, index_k, weights = leaves
    scores = ((index_q @ index_k[:, None].mT * 5**-0.5).relu() * weights[..., None]).sum(1)
    scores, positions = scores.masked_fill(~allowed, -torch.inf).topk(6)
    mask = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool).scatter_(-1, positions, True) & allowed
    out = dense_attention(q, k, v, mask[:, None])
    logits = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    target = logits.masked_fill(~mask[:, None], -torch.inf).softmax(-1).mean(1).gather(-1, positions).detach()
    gradients = torch.autograd.grad((out * cotangent).sum() + scores[scores > -torch.inf].sum(), leaves)
    wanted = [out.detach(), target.masked_fill(scores == -torch.inf, 0), *gradients]

    def on(rank: int) -> list[torch.Tensor]:
        mesh, layout = init_device_mesh(DEVICE.type, (RANKS,), mesh_dim_names=("cp",)), head_tail(LENGTH, RANKS)
        parts = [
            there(layout.shard(x, dim, rank).clone()).requires_grad_() for x, dim in zip(inputs, dims, strict=True)
        ]
        q, k, v, *indexer = parts
        selected = context_select(*indexer, mesh, top_k=6, mask=Causal(), layout=layout)
        options = {"mask": Causal() & selected.mask, "layout": layout, "return_lse": True}
        out, lse = context_attention(q, k, v, mesh, **options)
        target = selected_weights(q, k, lse.detach(), selected, mesh)
        scores = selected.scores_BLK
        ((out * there(layout.shard(cotangent, 2, rank))).sum() + scores[scores > -torch.inf].sum()).backward()
        return [here(x) for x in (out, target, *(x.grad for x in parts))]

    together = zip(*run_ranks(on, RANKS), strict=True)
    layout = head_tail(LENGTH, RANKS)
    found = [layout.unshard(list(parts), dim) for parts, dim in zip(together, (2, 1, *dims), strict=True)]
    return max(error(x, y) for x, y in zip(found, wanted, strict=True))


def drawn() -> float:
    """The numbers of three ranks on the device, against one rank on the CPU."""
    x = randn(0, 2, LENGTH, 5)
    calls = [context_rand, context_randn, partial(context_dropout, p=0.3)]

    def on(rank: int, ranks: int, device: torch.device) -> list[torch.Tensor]:
        mesh, layout = init_device_mesh(device.type, (ranks,), mesh_dim_names=("cp",)), contiguous(LENGTH, ranks)
        part = layout.shard(x, 1, rank).to(device)
        return [here(call(part, seq_dim=1, mesh=mesh, layout=layout, seed=3)) for call in calls]

    wanted = run_ranks(on, 1, 1, torch.device("cpu"))[0]
    found = [torch.cat(parts, 1) for parts in zip(*run_ranks(on, RANKS, RANKS, DEVICE), strict=True)]
    return max(error(a, b) for a, b in zip(found, wanted, strict=True))


def expanded() -> float:
    """Latents that travel, against the attention of expanded heads: output and all gradients."""
    shapes = ((2, 4, LENGTH, 12), (2, LENGTH, 16), (2, LENGTH, 4), (4 * (8 + 8), 16))
    *inputs, cotangent = (randn(at, *shape) for at, shape in enumerate((*shapes, (2, 4, LENGTH, 8))))
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, latent, rot, weight = leaves
    nope, v = (latent @ weight.mT).unflatten(-1, (4, 16)).transpose(1, 2).split(8, -1)
    k = torch.cat((nope, rot[:, None].expand(-1, 4, -1, -1)), -1)
    out = dense_attention(q, k, v, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]

    def on(rank: int) -> list[torch.Tensor]:
        mesh, layout = init_device_mesh(DEVICE.type, (RANKS,), mesh_dim_names=("cp",)), head_tail(LENGTH, RANKS)
        own = [layout.shard(x, dim, rank).clone() for x, dim in zip(inputs, (2, 1, 1), strict=False)]
        leaves = [there(x).requires_grad_() for x in (*own, weight.detach().clone())]
        out = context_latent_attention(*leaves, mesh, mask=Causal(), layout=layout)
        out.backward(there(layout.shard(cotangent, 2, rank)))
        return [here(x) for x in (out, *(x.grad for x in leaves))]

    *parts, shares = zip(*run_ranks(on, RANKS), strict=True)
    layout = head_tail(LENGTH, RANKS)
    found = [layout.unshard(list(of_ranks), dim) for of_ranks, dim in zip(parts, (2, 2, 1, 1), strict=True)]
    return max(error(x, y) for x, y in zip((*found, sum(shares)), wanted, strict=True))


class Classifier(nn.Module):
    """Pools its tokens."""

    def __init__(self) -> None:
        super().__init__()
        options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, **options) for _ in range(2))
        self.head = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def pooled() -> float:
    """The output and the gradients of a classifier that is given whole inputs."""
    torch.manual_seed(0)
    one, x, cotangent = Classifier(), randn(0, 2, LENGTH, 8), randn(1, 2, 3)
    out = one(x)
    wanted = [out.detach(), *torch.autograd.grad(out, [*one.parameters()], cotangent)]

    def on(rank: int) -> list[torch.Tensor]:
        mesh, mine = init_device_mesh(DEVICE.type, (RANKS,), mesh_dim_names=("cp",)), copy.deepcopy(one).to(DEVICE)
        parallelize_module(mine, mesh, BackboneContextParallel(ModuleContextParallel(verified=True)))
        out = mine(there(x))
        out.backward(there(cotangent))
        sum_gradients(mine, mesh)
        return [here(y) for y in (out, *(p.grad for p in mine.parameters()))]

    return max(error(y, z) for found in run_ranks(on, RANKS) for y, z in zip(found, wanted, strict=True))


def checks() -> Iterator[tuple[str, Callable[[], float]]]:
    for make in composition.COMPOSITIONS:
        if ON_GPU and make is composition.by_pipeline:
            continue  # its stages send tensors of the GPU by messages of their own
        yield make.__name__.removeprefix("by_").replace("_", " "), partial(composed, make)
    others = {
        "decode": decoded,
        "selected keys": selected,
        "random numbers": drawn,
        "latents": expanded,
        "pooled": pooled,
    }
    yield from others.items()


def main(names: list[str]) -> int:
    counts = Counter[str]()
    for name, check in checks():
        if names and name not in names:
            continue
        try:
            off = check()
            verdict = "exact" if off < EXACT else "wrong"
            print(f"{verdict:8} {name}: {off:.1e}", flush=True)
        except Exception as problem:  # of any kind: one line, and the next
            verdict = "error"
            print(f"{verdict:8} {name}: {type(problem).__name__}: {' '.join(str(problem).split())[:400]}", flush=True)
        counts[verdict] += 1
    print(f"{counts['exact']} exact, {counts['wrong'] + counts['error']} others")
    return counts["wrong"] + counts["error"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
