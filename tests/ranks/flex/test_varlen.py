"""varlen_attn under context parallelism: packed documents by cu_seqlens of the whole pack, against a dense oracle."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import varlen
from torch.nn.attention.varlen import varlen_attn

from cp_styles.functions.varlen import context_varlen_attention
from cp_styles.layouts import contiguous, head_tail
from cp_styles.masks import Causal, Documents
from cp_styles.plan import make_plan
from cp_styles.styles import ModuleContextParallel
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.ranks.attention_case import EXACT, cp_mesh, refused
from tests.ranks.flex_case import as_pack, pack_of

LENGTHS = (20, 1, 9, 31)
TOTAL = sum(LENGTHS)
# An empty document is one that a batch of fixed size pads with.
CU = torch.tensor([0, 20, 21, 21, 30, 61], dtype=torch.int32)


class Packed(nn.Module):
    """Torch's function, imported by name or not, somewhere inside."""

    def __init__(self, by_name: bool = True) -> None:
        super().__init__()
        self.by_name = by_name

    def forward(self, q, k, v, *args, **options):
        attend = varlen_attn if self.by_name else varlen.varlen_attn
        return attend(q, k, v, *args, **options)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Packed()

    def forward(self, *args, **options):
        return self.inner(*args, **options)


@pytest.mark.parametrize(("how", "window"), [("by name", (-1, 0)), ("by attribute", (3, 2)), ("nested", (-1, -1))])
def test_torch_s_own_inside_a_module(window: tuple[int, int], how: str):
    knows_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    problem, layout = pack_of(LENGTHS, window), head_tail(TOTAL, 2)

    def rank_main(rank: int):
        module = Nested() if how == "nested" else Packed(how == "by name")
        parallelize_module(module, cp_mesh(2), ModuleContextParallel(layout=layout))

        def attend(*args):
            options = {"enable_gqa": True} if knows_gqa else {}
            options["return_aux"] = varlen.AuxRequest(lse=True)
            return module(*args, CU, CU.clone(), 31, 31, window_size=window, **options)

        return problem.run(as_pack(attend), layout, rank)

    assert max(problem.errors(run_ranks(rank_main, 2), layout)) < EXACT


def test_rows_stay_within_documents():
    problem, layout = pack_of(LENGTHS, (-1, 0)), contiguous(TOTAL, 3)

    def rank_main(rank: int):
        def attend(*args):
            options = {"window_size": (-1, 0), "return_lse": True, "layout": layout}
            return context_varlen_attention(*args, dist.group.WORLD, CU, **options)

        with CommunicationTrace() as trace:
            problem.run(as_pack(attend), layout, rank)
        return sum(size for name, size in trace.events if name == "send")

    plans = [make_plan(layout, layout, Documents(LENGTHS) & Causal(), rank) for rank in range(3)]
    row = 2 * (8 + 8) * 8  # heads x (key + value) x float64, and as much back
    assert sum(run_ranks(rank_main, 3)) == 2 * row * sum(plan.received_rows for plan in plans)


OTHER = torch.tensor([0, 30, 61], dtype=torch.int32)
REFUSED = {
    "other documents for keys": ((CU, OTHER, 31, 31), {}, "cu_seq_k is not cu_seq_q"),
    "a rank's own documents": ((OTHER // 2,) * 2 + (31, 31), {}, "the mask was made for 30 positions"),
    "documents that differ between ranks": (lambda rank: ((CU, OTHER)[rank],) * 2 + (31, 31), {}, "disagree on"),
    "a cache": ((CU, CU, 31, 31), {"seqused_k": torch.tensor([1])}, "cache of keys"),
    "splits": ((CU, CU, 31, 31), {"num_splits": 1}, "num_splits=1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str):
    args, options, message = REFUSED[name]
    if not set(options) <= set(inspect.signature(varlen_attn).parameters):
        pytest.skip("this torch has no such argument")
    layout = head_tail(TOTAL, 2)

    def act(rank: int, mesh) -> None:
        module = parallelize_module(Packed(), mesh, ModuleContextParallel(layout=layout))
        q = torch.zeros(layout.lengths[rank], 2, 8)
        module(q, q, q, *(args(rank) if callable(args) else args), **options)

    refused(act, message, (ValueError, NotImplementedError))
