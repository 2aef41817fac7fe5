"""The setting of test_leaks.py: one problem, modules that solve it, and checks that must pass after any event."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles.engine.custom_ops import modes_entered
from cp_styles.functions.attention import context_attention
from cp_styles.layouts import Balancer, contiguous, head_tail
from cp_styles.masks import Causal
from cp_styles.strategies import AllGather, Ring
from cp_styles.styles import AttentionContextParallel
from cp_styles.testing import run_ranks
from tests.oracle import attend_and_differentiate, error
from tests.ranks.attention_case import EXACT, Core, Problem, cp_mesh, parallel, run_attention

RANKS = 3  # a ring with a transfer under way while another one is worked on


class Stop(BaseException):
    """What no ``except Exception`` catches: KeyboardInterrupt, SystemExit."""


class Oops(RuntimeError):
    """A mistake in a user's model."""


class Probe(Core):
    """A core that lets a test act inside its forward: before and after its attention."""

    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    attend: Callable[..., torch.Tensor] | None = None
    layout: Balancer

    def forward(self, query, key, value):
        if self.before:
            self.before()
        out = (self.attend or super().forward)(query, key, value)
        if self.after:
            self.after()
        return out


def attention_of(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def raising(error: BaseException) -> Callable[..., None]:
    def act(*_):
        raise error

    return act


class Scene:
    """One rank's view. Every method that attends is called on all ranks alike."""

    problem = Problem(length=13, kv_heads=2)
    local = Problem(length=7, heads=6, kv_heads=3)  # attended to by everybody alone, outside; heads for three ranks

    def __init__(self, rank: int, barrier: threading.Barrier) -> None:
        self.rank, self._barrier = rank, barrier
        self.mesh = cp_mesh(RANKS)
        self.other_mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        self.probes: list[Probe] = []

    def probe(self, door: type = AttentionContextParallel, **style) -> Probe:
        """A parallel module; it is used again, undisturbed, when the scenario is over."""
        self.probes.append(parallelize_module(Probe(), self.mesh, door(**style)))
        self.probes[-1].layout = style.get("layout", head_tail)
        return self.probes[-1]

    def leaves(self, layout=head_tail) -> tuple[list[torch.Tensor], torch.Tensor]:
        """This rank's query, key and value, and its part of the cotangent."""
        return self.problem.shard(layout, self.rank, RANKS)

    def check(self, found: list[torch.Tensor], layout=head_tail) -> None:
        """``[out, dq, dk, dv]`` are one device's."""
        errors = self.problem.errors([x.detach() for x in found], layout, self.rank, RANKS)
        assert max(errors) < EXACT, errors

    def run(self, attend: Callable[..., torch.Tensor], layout=head_tail) -> None:
        """A forward and a backward that are one device's."""
        assert max(run_attention(attend, self.problem, self.rank, RANKS, layout=layout)) < EXACT

    def once(self, act: Callable[[], None]) -> None:
        """Do what changes the process, which the ranks share, on one of them while the others wait."""
        self._barrier.wait()
        if self.rank == 0:
            act()
        self._barrier.wait()

    @torch.enable_grad()  # hooks of a backward run without
    def outside(self) -> None:
        """SDPA of plain tensors, and of DTensors on another mesh (grouped heads cut by tensor parallelism), which is
        torch's alone."""
        self.outside_plain()
        local = self.local
        shards = [distribute_tensor(x, self.other_mesh, [Shard(1)]).requires_grad_() for x in local.inputs]
        try:
            out = attention_of(*shards)
        except NotImplementedError as problem:  # torch may have no rule for it on CPU
            if "sharding strategy" not in str(problem):
                raise
            return
        assert out.placements == (Shard(1),)
        grads = torch.autograd.grad(out, shards, distribute_tensor(local.cotangent, self.other_mesh, [Shard(1)]))
        for mine, whole in zip((out, *grads), local.expected, strict=True):
            assert error(mine.full_tensor(), whole) < EXACT

    def outside_plain(self) -> None:
        found = attend_and_differentiate(attention_of, self.local.inputs, self.local.cotangent)
        for mine, whole in zip(found, self.local.expected, strict=True):
            assert error(mine, whole) < EXACT

    def all_is_well(self) -> None:
        """After whatever happened: outside exact, the modules of the scene exact, a new one exact, no mode entered."""
        self.outside()
        for probe in self.probes:
            probe.before = probe.after = probe.attend = None
            self.run(probe, probe.layout)
        self.run(parallel(Core(), self.mesh, strategy=AllGather(), layout=contiguous), contiguous)
        self.run(parallel(Core(), self.mesh, strategy=Ring(keep=0)))
        assert modes_entered.get() == ()


def scenario(act: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of what happens on one rank: attention outside is exact before, and all is well after."""

    @functools.wraps(act)
    def test(**parameters) -> None:
        barrier = threading.Barrier(RANKS)

        def on(rank: int) -> None:
            try:
                scene = Scene(rank, barrier)
                scene.outside_plain()
                act(scene, **parameters)
                scene.all_is_well()
            except BaseException:
                barrier.abort()
                raise

        run_ranks(on, RANKS)

    _, *parameters = inspect.signature(act).parameters.values()
    test.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return test


class Even(Scene):
    """Equal parts: DTensor's own ops, which refused calls may reach, go wrong on some ranks where parts differ."""

    problem = Problem(length=12, kv_heads=2)


def refusals(act: Callable[[Scene], object]) -> str:
    """What every rank says when ``act`` is refused; right afterwards, a good call on the same group is exact.

    One text where all ranks say the same, else a line a rank. Anything but a deliberate refusal, the timeout of a rank
    that was left waiting above all, fails.
    """
    barrier = threading.Barrier(RANKS)

    def on(rank: int) -> str:
        stage = Even(rank, barrier)
        text = None
        try:
            act(stage)
        except (TypeError, ValueError, RuntimeError) as error:
            if type(error) is RuntimeError and not getattr(error, "__notes__", None):
                raise  # a collective that timed out, or a failure that nobody explained
            text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        assert text, "nothing was refused"
        stage.run(parallel(Core(), stage.mesh))
        stage.run(lambda *qkv: context_attention(*qkv, stage.mesh, mask=Causal(), strategy=AllGather()))
        stage.outside()
        return text

    texts = run_ranks(on, RANKS)
    return texts[0] if len(set(texts)) == 1 else "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
