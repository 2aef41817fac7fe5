"""Batches with new documents, masks, scopes and lengths leave nothing behind but what the cache of plans holds."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial
from itertools import accumulate
from random import Random

import torch
import torch.distributed as dist

from cp_styles import (
    AllGather,
    Causal,
    Documents,
    Ring,
    SequenceScope,
    SlidingWindow,
    Ulysses,
    by_work,
    context_attention,
    context_varlen_attention,
    head_tail,
    per_document_head_tail,
    striped,
)
from cp_styles.engine.binding import get_bindings
from cp_styles.layouts.balancers import layout_made_by
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from tests.leaks import empty_caches
from tests.ranks.attention_case import Core, cp_mesh, parallel

STRATEGIES = Ring(), Ring(keep=0), AllGather(), Ulysses()


def test_what_is_left_of_batches():
    """Objects of this package's classes, without the cache of plans, and the latest bindings of functions' calls."""

    def on(rank: int) -> list[Counter[str]]:
        mesh, draw, left = cp_mesh(2), Random(0), []
        styled = [parallel(Core(), mesh, strategy=strategy) for strategy in STRATEGIES]

        def step(which: int) -> None:
            lengths = tuple(draw.randrange(1, 20) for _ in range(draw.randrange(2, 6)))
            length, documents = sum(lengths), Documents(lengths)
            balancer = (
                head_tail,
                partial(striped, block=draw.randrange(1, 4)),
                partial(per_document_head_tail, documents=lengths),
                partial(by_work, mask=documents & Causal()),
            )[which]
            layout = layout_made_by(balancer, length, 2)
            q, k, v = (torch.ones(1, 2, layout.lengths[rank], 4, requires_grad=True) for _ in range(3))
            mask = documents & SlidingWindow(draw.randrange(1, 9))
            with SequenceScope(layout, mask=mask):
                outs = [styled[which](q, k, v)]
            causal = mask & Causal()
            outs.append(context_attention(q, k, v, mesh, mask=causal, layout=layout, strategy=STRATEGIES[which]))
            with context_parallel(mesh, layout=layout):
                outs.append(Core()(q, k, v))
            pack = [x[0].transpose(0, 1) for x in (q, k, v)]
            edges = [*accumulate(lengths, initial=0)]
            outs.append(context_varlen_attention(pack[0], pack[1], pack[2], mesh, edges, layout=layout))
            torch.stack([out.sum() for out in outs]).sum().backward()

        for index in range(8 * 2 + 1):
            if index % 8 == 0:
                get_bindings(mesh.get_group()).clear()
            dist.barrier()
            if index % 8 == 0 and rank == 0:
                empty_caches()
                gc.collect()
                found = (type(each) for each in gc.get_objects())
                left.append(Counter(each.__qualname__ for each in found if each.__module__.startswith("cp_styles")))
            dist.barrier()
            step(index % 4)
        return left

    _, *left = run_ranks(on, 2)[0]
    assert left[-1] - left[0] == Counter(), left[-1] - left[0]
