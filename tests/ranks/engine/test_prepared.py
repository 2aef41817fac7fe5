"""Steps that are prepared once: k and v as they lie in memory, kernels that are bound, and when they are bound anew."""

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from cp_styles.functions.attention import context_attention
from cp_styles.kernels import Kernel, ReferenceKernel
from cp_styles.kernels.base import bind_tile
from cp_styles.kernels.sdpa import CPU_FLASH, CUDA_CUDNN_PREFERRED, CpuFlashKernel
from cp_styles.layouts import contiguous, head_tail, striped
from cp_styles.masks import Causal
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.strategies.base import ResidualPlaces
from cp_styles.strategies.schedule import make_schedule
from cp_styles.testing import run_ranks
from tests.benchmarks import figures
from tests.covering import rows_at_night, sampled
from tests.cuda_ops import ON_GPU
from tests.oracle import allowed
from tests.ranks.attention_case import EXACT, Problem, run_attention
from tests.ranks.engine.test_gpu_rules import MASKS, on_gpus, sees


@pytest.fixture
def in_two_messages(monkeypatch):
    """Each block is sent in two messages, k and v, as a large block is."""
    monkeypatch.setattr("cp_styles.strategies.schedule._MOST_JOINED", 0)
    make_schedule.cache_clear()
    yield
    make_schedule.cache_clear()


def errors_of(problem: Problem, ranks: int, *, by_rows: bool = False, layout: Any = head_tail, **options: Any) -> float:
    """The largest error of all ranks. ``by_rows``: tensors are [B, L, H, D] in memory, as a projection makes them."""

    def on(rank: int) -> float:
        leaves, cotangent = problem.shard(layout, rank, ranks)
        if by_rows:
            leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
        out = context_attention(*leaves, dist.group.WORLD, layout=layout, **options)
        out.backward(cotangent)
        return max(problem.errors([out, *(x.grad for x in leaves)], layout, rank, ranks))

    return max(run_ranks(on, ranks))


@sampled(
    2,
    strategy=[Ring(), Ring(keep=0), Ring(keep=9), AllGather(), AllGather(keep=0), Ulysses(size=2)],
    mask=["causal", "window", "documents"],
    layout=[contiguous, head_tail, striped],
    batch=[1, 2],
    by_rows=[True, False],
)
def test_keys_as_they_lie(in_two_messages, strategy, mask: str, layout, batch: int, by_rows: bool):
    length = 64
    problem = Problem(length=length, batch=batch, kv_heads=2, heads=4, mask=allowed(sees(mask), length, length))
    options = {"strategy": strategy, "mask": MASKS[mask], "layout": layout, "by_rows": by_rows}
    assert errors_of(problem, 4, **options) < EXACT


@sampled(1, strategy=[Ring(), Ring(keep=0), AllGather(), Ulysses(size=2)], mask=["causal", "window", "documents"])
def test_keys_as_they_lie_on_a_gpu(in_two_messages, strategy, mask: str):
    """By the rules of NCCL: no message changes before it is sent, and no tensor is read before it has come."""
    length = 64
    problem = Problem(length=length, batch=1, kv_heads=2, heads=4, mask=allowed(sees(mask), length, length))
    worst, _ = on_gpus(problem, 4, strategy=strategy, mask=MASKS[mask], kernel=ON_GPU)
    assert worst < EXACT


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("Ring()", "12.0 / 5.8 / 14.5 / 8.3"), *rows_at_night(("Ring(keep=0)", "9.6 / 5.5 / 13.5 / 8.0"))],
)
def test_the_peaks_of_large_blocks(in_two_messages, name: str, wanted: str):
    assert " / ".join(figures.peak(name, *shape, 8) for shape in figures.MEMORY_SHAPES) == wanted
    assert wanted in (Path(figures.__file__).parents[2] / "tutorials/performance.md").read_text()


def test_keys_that_lie_in_rows_are_not_copied(in_two_messages):
    """The messages are the memory of k and v."""
    block = (
        make_schedule(*(head_tail(32, 2),) * 2, Causal(), 0, False, False, False, ((1,),), 0, *((1, 4, 16, 8),) * 3, 1)
        .forward[1]
        .sends[0][1]
    )
    k, v = (torch.randn(1, 16, 4, 8).transpose(1, 2) for _ in range(2))
    for message, tensor in zip(block.pack(k, v, None), (k, v), strict=True):
        assert message.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


class OfThread(threading.local):
    """The state of a rank, which is a thread."""

    allows, tiles = True, 0


NOW = OfThread()


@dataclass(frozen=True)
class Switched(ReferenceKernel):
    """Takes tiles while it is allowed to, and says that this may change."""

    takes_all = False

    def switches(self):
        return (NOW.allows,)

    def takes(self, q_BHLD, k_BGMD, v_BGME, *, causal, biased):
        return NOW.allows

    def forward(self, q_BHLD, k_BGMD, v_BGME, **options):
        NOW.tiles += 1
        return super().forward(q_BHLD, k_BGMD, v_BGME, **options)


def test_a_kernel_is_bound_anew_when_a_switch_changes():
    problem = Problem(length=24)

    def on(rank: int) -> tuple[list[int], float]:
        options = {"layout": head_tail, "mask": Causal(), "strategy": Ring(), "kernel": Switched()}
        attend, counts, worst = partial(context_attention, mesh=dist.group.WORLD, **options), [], 0.0
        for NOW.allows in (True, True, False, True):
            NOW.tiles = 0
            worst = max(worst, *run_attention(attend, problem, rank, 2))
            counts.append(NOW.tiles)
        return counts, worst

    for counts, worst in run_ranks(on, 2):
        assert worst < EXACT
        assert counts[0] == counts[1] == counts[3] > counts[2] == 0


def test_the_switches_of_cudnn():
    """Each setting of torch on which its gates depend."""
    seen = {CUDA_CUDNN_PREFERRED.switches()}
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        seen.add(CUDA_CUDNN_PREFERRED.switches())
        torch.use_deterministic_algorithms(True)
        seen.add(CUDA_CUDNN_PREFERRED.switches())
    finally:
        torch.use_deterministic_algorithms(False)
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        seen.add(CUDA_CUDNN_PREFERRED.switches())
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert len(seen) == 4
    assert CPU_FLASH.switches() == ()


class OwnForward(CpuFlashKernel):
    """A user's subclass of a kernel that is bound."""

    called: ClassVar[list[str]] = []

    def forward(self, q_BHLD, k_BGMD, v_BGME, **options):
        self.called.append("forward")
        return super().forward(q_BHLD, k_BGMD, v_BGME, **options)


def test_a_subclass_with_its_own_forward_is_asked():
    OwnForward.called.clear()
    assert errors_of(Problem(length=24), 2, mask=Causal(), kernel=OwnForward(**vars(CPU_FLASH))) < EXACT
    assert len(OwnForward.called) >= 4


@pytest.mark.parametrize("kernel", [CPU_FLASH, ReferenceKernel()], ids=lambda kernel: type(kernel).__name__)
def test_a_bound_kernel_computes_what_its_phases_do(kernel: Kernel):
    """Scales of 0 and below count too, and short causal tiles of a CPU."""
    for length, scale in ((6, 0.3), (6, -0.3), (6, 0.0), (400, 0.3)):
        q, k, v, grad = (torch.randn(1, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
        options = {"causal": True, "scale": scale}
        out, lse = kernel.forward(q, k, v, bias=None, **options)
        forward, backward = (bind_tile(kernel, phase, (q, k, v), **options) for phase in ("forward", "backward"))
        for _ in range(2):
            for found, wanted in zip(forward.run(forward.queries((q,)), k, v), (out, lse), strict=True):
                assert torch.equal(found, wanted)
            found = backward.run(backward.queries((grad, q, out, lse)), k, v)
            for x, y in zip(found, kernel.backward(grad, q, k, v, out, lse, bias=None, **options), strict=True):
                assert torch.equal(x, y)


def test_a_residual_at_any_offset():
    """A hook of saved tensors may return one, whose kept keys a kernel would load in aligned pieces."""
    places = ResidualPlaces([((2, 3), torch.float32), ((0, 4), torch.float64), ((5,), torch.bfloat16)])
    (size,), dtype = places.spec
    residual = torch.empty(size, dtype=dtype)
    whole, _, part = places.views(residual)
    whole.copy_(torch.randn(2, 3))
    part.copy_(torch.randn(5))
    elsewhere = torch.empty(size + 8, dtype=dtype)[8:].copy_(residual)
    found = places.views(elsewhere)
    assert [tuple(x.shape) for x in found] == [(2, 3), (0, 4), (5,)]
    assert torch.equal(found[0], whole)
    assert torch.equal(found[2], part)
    assert all(x.storage_offset() * x.element_size() % 64 == 0 for x in found)
