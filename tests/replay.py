"""All ranks of an attention in turn, in one process on one device: python tests/replay.py [--time].

    python tests/replay.py [--out replay.jsonl] [--total 150]     every strategy and mask against dense float64
    python tests/replay.py --time [--out time.jsonl]              one rank of P, and torch's attention on one device
    python tests/replay.py --profile [--out profile.jsonl]        the same rank: where the host's time goes
    python tests/replay.py --only "causal bfloat16 P=8"           cases whose names begin so
    python tests/replay.py --time --set cp_styles.kernels.packing.FEW_ROWS=0   as before, with this constant of a module
    python tests/replay.py --stand-ins                            on a CPU: the kernels of tests/cuda_ops.py
    python tests/replay.py --dry-run                              the names of the cases

No second GPU is needed, because no message travels: a rank's messages are recorded, and a later pass over the ranks
receives them. So real kernels, streams and threads of autograd are compared with one device for any number of ranks. On
a CPU all of it runs in float64, where rounding explains 1e-12. tests/records has what it wrote on a GPU.

``--time`` fills each receive with random numbers of the right size. So it shows kernels, merges, copies and the host,
and no transfers and no agreement of ranks. The lines of a case:

torch      ms of torch's attention on the rows of one rank, forward and with its backward
times      ms of the device and of the host until the call returns; the share of ideal, P x torch / ours
launches   kernels and copies of one forward and backward, and their ms on the device, by class; "memcpy" has the
           "messages" that are received
memory     the peak over the inputs, and the prediction of explain, in Q: the bytes of this rank's queries
waits      whether the host waits for the device: see tests/gpu_record.py

``--profile`` has other lines: "profile f" of a forward and "profile f+b" of a forward and backward, see host_profile in
tests/gpu_record.py. The functions of this file are messages in place of NCCL's.

A line of JSON for each is written to ``--out`` at once. The exit status is 1 if one is bad.
"""

# ruff: noqa: E402 - the clock of --total starts before torch is imported

from __future__ import annotations

import time

BEGUN = time.monotonic()

import argparse
import contextlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from cp_styles import AllGather, Causal, Checks, Documents, Full, Mask, Ring, SlidingWindow, Ulysses, context_attention
from cp_styles.comm import point_to_point
from cp_styles.comm.point_to_point import move_batch
from cp_styles.explain import Explanation, explain
from cp_styles.kernels import Kernel
from cp_styles.kernels.choice_by_tile import ByTile, kernel_for_tiles
from cp_styles.kernels.merge import FUSED_MERGE, TORCH_MERGE, Merge
from cp_styles.layouts import head_tail
from cp_styles.strategies import Strategy
from tests.cuda_ops import DEFAULT, cuda_ops_on_cpu
from tests.gpu_record import (
    Check,
    Found,
    Record,
    SideStream,
    device_is_lost,
    hardware,
    host_profile,
    judge,
    launches,
    messages_of,
    peak_bytes,
    run_checks,
    timed,
    waits,
)
from tests.oracle import attend_and_differentiate, attention_inputs, error, expected_attention

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
Channel = tuple[tuple[int, ...], int, int]
"""The ranks of a group, sender and receiver, all counted in the world. The messages of a channel have an order."""


# -- messages --


class Transport:
    """The messages of a rank that runs alone. A subclass defines :meth:`sent` and :meth:`filled`.

    Messages move on a stream of their own. ``wait`` makes the current stream wait for it, as NCCL's does.
    """

    def __init__(self) -> None:
        self._side, self._batch = SideStream(), contextlib.ExitStack()
        self._rank = 0
        self._channels: dict[tuple[Any, ...], Channel] = {}

    def sent(self, channel: Channel, tensor: torch.Tensor) -> None:
        """``tensor`` is sent over ``channel``."""

    def filled(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Write the next message of ``channel`` to ``tensor``."""

    @contextlib.contextmanager
    def world(self, rank: int, ranks: int) -> Iterator[None]:
        """The process is ``rank`` of ``ranks``. Messages in batches (CUDA) and single ones (CPU) come here."""
        self._rank = rank
        self._channels.clear()
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())

        def send(group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Transport:
            self._send(group, *tensors, peer)
            return self

        def recv(group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Transport:
            self._receive(group, *tensors, peer)
            return self

        batches: dict[str, Any] = {
            "start_batch": self._start_batch,
            "makes_batches": lambda group, device: device.type == "cuda",
        }

        def alltoall_base(group: dist.ProcessGroup, received: Any, sent: Any, *call: Any) -> Transport:
            *sizes, _ = call
            with self._side.context():
                for is_sent, peer, tensor in messages_of(received, sent, *sizes, group.rank()):
                    (self._send if is_sent else self._receive)(group, tensor, peer)
            return self

        try:
            with (
                patch.multiple(point_to_point, move_batch=move_batch, **batches),
                patch.multiple(dist.ProcessGroup, send=send, recv=recv, alltoall_base=alltoall_base),
            ):
                yield
        finally:
            dist.destroy_process_group()

    def wait(self, *_: Any) -> bool:
        self._side.join()
        return True

    def _start_batch(self, group: dist.ProcessGroup, device: torch.device) -> Callable[[], Transport]:
        self._batch.enter_context(self._side.context())  # once, as NCCL's stream waits once for a batch
        return self._end_batch

    def _end_batch(self) -> Transport:
        self._batch.close()
        return self

    def _send(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int) -> None:
        self.sent(self._channel(group, None, peer), tensor)

    def _receive(self, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int) -> None:
        self.filled(self._channel(group, peer, None), tensor)

    def _channel(self, group: dist.ProcessGroup, sender: int | None, receiver: int | None) -> Channel:
        """None is this rank."""
        key = group, sender, receiver
        if key not in self._channels:
            members = tuple(dist.get_process_group_ranks(group))
            ends = (self._rank if peer is None else members[peer] for peer in (sender, receiver))
            self._channels[key] = (members, *ends)  # pyright: ignore[reportArgumentType]
        return self._channels[key]


class Recorded(Transport):
    """Each receive gets what the same message carried one pass earlier, and nan in the first pass.

    [Note: passes] A message is right one pass after the messages that it is computed from. A ring and an all-gather
    send keys, then gradients of keys, which depend on received keys: all receives are right in the third pass. Ulysses
    sends heads, then the output and gradients of heads: three passes. A hybrid runs a ring between the two exchanges of
    Ulysses: five passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[Channel, list[torch.Tensor]] = {}
        self._now: dict[Channel, list[torch.Tensor]] = defaultdict(list)
        self._received: Counter[Channel] = Counter()

    def next_pass(self) -> None:
        """The messages of this pass are received in the next one."""
        self._before, self._now = self._now, defaultdict(list)
        self._received.clear()

    def sent(self, channel: Channel, tensor: torch.Tensor) -> None:
        self._now[channel].append(tensor.clone())

    def filled(self, channel: Channel, tensor: torch.Tensor) -> None:
        number = self._received[channel]
        self._received[channel] += 1
        if channel in self._before:
            tensor.copy_(self._before[channel][number])
        else:
            tensor.fill_(torch.nan)


class RandomNumbers(Transport):
    """Each receive gets random numbers from one pool for each dtype. Nothing is kept of what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self._pools: dict[torch.dtype, torch.Tensor] = {}
        self.received = 0

    def filled(self, channel: Channel, tensor: torch.Tensor) -> None:
        pool = self._pools.get(tensor.dtype)
        if pool is None or pool.numel() < tensor.numel():
            pool = self._pools[tensor.dtype] = torch.randn(tensor.numel(), device=tensor.device).to(tensor.dtype)
        tensor.copy_(pool[: tensor.numel()].view(tensor.shape))
        self.received += 1


# -- exact --


class Way(NamedTuple):
    """A strategy, and the passes after which all messages are right: see [Note: passes]."""

    strategy: Strategy
    passes: int


MOVING_KEYS = {"ring": Way(Ring(), 3), "ring keep=0": Way(Ring(keep=0), 3), "all-gather": Way(AllGather(), 3)}
WAYS = MOVING_KEYS | {"ulysses": Way(Ulysses(), 3), "hybrid": Way(Ulysses(size=2), 5)}


class Problem(NamedTuple):
    """One attention over ``rows`` positions a rank. ``heads``: of queries and of keys."""

    mask: str
    dtype: torch.dtype
    ranks: int
    rows: int
    heads: tuple[int, int]
    dim: int
    ways: dict[str, Way] = WAYS

    @property
    def name(self) -> str:
        shape = f"rows={self.rows} {self.heads[0]}:{self.heads[1]} D={self.dim}"
        return f"{self.mask} {str(self.dtype)[6:]} P={self.ranks} {shape}"

    @property
    def length(self) -> int:
        return self.ranks * self.rows

    def masks(self) -> tuple[Mask, torch.Tensor]:
        """The mask, and the same as booleans ``[length, length]`` on the device."""
        at = torch.arange(self.length, device=DEVICE)
        causal, window = at[:, None] >= at, self.length // 5
        # One document goes over several ranks, one has five tokens, and one ends the sequence.
        sizes = (self.length // 3, 5, self.length - self.length // 3 - 12, 7)
        ids = torch.repeat_interleave(torch.arange(4, device=DEVICE), torch.tensor(sizes, device=DEVICE))
        return {
            "causal": (Causal(), causal),
            "window": (SlidingWindow(window, 0), causal & (at[:, None] - at <= window)),
            "documents": (Documents(sizes) & Causal(), causal & (ids[:, None] == ids)),
            "full": (Full(), torch.ones_like(causal)),
        }[self.mask]


def problems() -> Iterator[Problem]:
    """The most telling first. Short tiles are packed. Tiles of 2,560 rows are for cuDNN, which takes multiples of 128.
    A backward by groups of heads needs ``--set cp_styles.strategies.schedule._LEAST_BLOCKS=20``."""
    short, long = (((8, 2), 128), ((16, 16), 64)), (((4, 1), 128), ((4, 4), 128))
    tiny = (((4, 2), 8), ((8, 8), 8))
    low = torch.bfloat16
    sizes = [
        *((low, 8, 256, *shape, WAYS) for shape in short),
        *((low, 4, 2560, *shape, MOVING_KEYS) for shape in long),
        *((dtype, 8, 256, *shape, WAYS) for dtype in (torch.float32, torch.float16) for shape in short),
    ]
    if not CUDA:
        sizes = [(torch.float64, ranks, 16, *shape, WAYS) for ranks in (4, 8) for shape in tiny]
    for dtype, ranks, rows, heads, dim, ways in sizes:
        for mask in ("causal", "window", "documents", "full"):
            yield Problem(mask, dtype, ranks, rows, heads, dim, ways)


def results_of_ranks(
    problem: Problem, way: Way, tensors: list[torch.Tensor], kernel: Kernel | None, messages: Recorded
) -> list[torch.Tensor]:
    """``[out, dq, dk, dv]`` of all ranks, put together. ``tensors``: the full query, key, value and gradient of out."""
    layout, (mask, _) = head_tail(problem.length, problem.ranks), problem.masks()
    options = {"mask": mask, "layout": layout, "strategy": way.strategy, "kernel": kernel}
    found: list[list[torch.Tensor]] = []
    for _ in range(way.passes):
        messages.next_pass()
        found = []
        for rank in range(problem.ranks):
            parts = [layout.shard(x, 2, rank) for x in tensors]
            with messages.world(rank, problem.ranks):
                attend = partial(context_attention, mesh=dist.group.WORLD, checks=Checks(agreement=False), **options)
                found.append(attend_and_differentiate(attend, parts[:3], parts[3]))
    return [layout.unshard(list(parts), 2) for parts in zip(*found, strict=True)]


def exact(
    problem: Problem, kernel: Kernel | None = None, transport: Callable[[], Recorded] = Recorded
) -> Iterator[Check]:
    """Each strategy of a problem against dense attention in float64 on the device."""

    @cache
    def reference() -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        inputs, grad = attention_inputs(
            length=problem.length, batch=1, heads=problem.heads[0], kv_heads=problem.heads[1], dim=problem.dim,
            dtype=problem.dtype,
        )  # fmt: skip
        inputs, grad = [x.to(DEVICE) for x in inputs], grad.to(DEVICE)
        return inputs, grad, expected_attention(inputs, grad, problem.masks()[1])

    def compare(way: Way) -> Found:
        inputs, grad, expected = reference()
        found = results_of_ranks(problem, way, [*inputs, grad], kernel, transport())
        line = judge([error(x, wanted) for x, wanted in zip(found, expected, strict=True)], problem.dtype)
        if way is WAYS["ulysses"] and problem.mask in ("causal", "full"):
            options = {"is_causal": problem.mask == "causal", "enable_gqa": True}
            attend = partial(F.scaled_dot_product_attention, **options)
            one, again = (attend_and_differentiate(attend, inputs, grad) for _ in range(2))
            line["bits of torch's"] = [torch.equal(x, y) for x, y in zip(found, one, strict=True)]
            line["torch's bits again"] = [torch.equal(x, y) for x, y in zip(again, one, strict=True)]
        return line

    for name, way in problem.ways.items():
        yield name, partial(compare, way)


# -- times --


MERGES: dict[str, Merge | None] = {"": None, "torch's merge": TORCH_MERGE}
"""How tiles are merged, by name; None: as the package chooses. The first setting is timed with each."""


class Setting(NamedTuple):
    """One rank of an attention that is timed. ``flash``: torch and the package run without cuDNN. ``merge``: a name in
    MERGES."""

    mask: str
    ranks: int
    rank: int
    rows: int
    heads: tuple[int, int]
    dim: int = 128
    flash: bool = False
    merge: str = ""

    @property
    def name(self) -> str:
        heads, kernels = f"{self.heads[0]}:{self.heads[1]}", " flash" * self.flash
        merge = f" {self.merge}" if self.merge else ""
        return f"time {self.mask} P={self.ranks} rank={self.rank} rows={self.rows} {heads}{kernels}{merge}"

    @property
    def length(self) -> int:
        return self.ranks * self.rows

    def of_package(self) -> Mask:
        window, size = min(4096, self.length // 4), self.length // 50
        # A last document of what is left: so some of them lie on two ranks.
        documents = Documents((size,) * (self.length // size) + (self.length % size,) * (self.length % size > 0))
        masks = {"causal": Causal(), "window": SlidingWindow(window - 1, 0), "documents": documents & Causal()}
        return masks[self.mask]

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        """Torch and the package choose among these kernels."""
        without = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(without) if self.flash else contextlib.nullcontext():
            yield

    def named(self, kernel: Kernel | None, tensors: list[torch.Tensor]) -> Kernel | None:
        """``kernel``, or the first one for such tensors if a merge must be named with it."""
        if (merge := MERGES[self.merge]) is None:
            return kernel
        line = kernel or kernel_for_tiles(tensors)
        return replace(line.plain[0] if isinstance(line, ByTile) else line, merge=merge)  # pyright: ignore


def settings(*, cuda: bool = CUDA) -> Iterator[Setting]:
    """The most telling first: it is the published shape of ring-flash-attention's zigzag."""
    grouped, multi_head = (32, 8), (32, 32)
    if not cuda:
        yield from (Setting("causal", 4, 1, 64, grouped, 8, merge=merge) for merge in MERGES)
        yield Setting("window", 4, 1, 64, grouped, 8)
        return
    for merge in MERGES:
        yield Setting("causal", 8, 3, 8192, grouped, merge=merge)
    yield Setting("causal", 8, 3, 8192, grouped, flash=True)
    for rows, heads in ((4096, grouped), (1024, grouped), (8192, multi_head), (4096, multi_head), (1024, multi_head)):
        yield Setting("causal", 8, 3, rows, heads)
    yield Setting("window", 8, 3, 8192, grouped)
    yield Setting("documents", 8, 3, 8192, grouped)
    yield Setting("causal", 2, 0, 8192, grouped)
    for rows, heads in ((4096, grouped), (4096, multi_head)):
        yield Setting("causal", 8, 3, rows, heads, flash=True)
    yield Setting("causal", 8, 3, 32768, grouped)


STRATEGIES: dict[str, Strategy] = {"ring": Ring(), "ulysses": Ulysses()}
"""The strategies that are timed."""


def explanation(
    setting: Setting, strategy: Strategy, *, dtype: torch.dtype, device: str, **options: Any
) -> Explanation:
    """What explain predicts for the rank of a setting. ``options``: more arguments of explain."""
    heads, kv_heads = setting.heads
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": setting.dim, "dtype": dtype, "device": device}
    ranks = {"ranks": setting.ranks, "rank": setting.rank}
    return explain(setting.length, mask=setting.of_package(), strategy=strategy, **ranks, **shape, **options)


def times(setting: Setting, kernel: Kernel | None = None, *, profile: bool = False) -> Iterator[Check]:
    """The cost of one rank, for a ring and for Ulysses, and of torch's attention on the rows of this rank. ``profile``:
    profiles of the host in place of all of it."""
    dtype = torch.bfloat16 if CUDA else torch.float32
    repeats = 7 if setting.rows <= 8192 else 2
    heads, kv_heads = setting.heads
    # [B, L, H, D] in memory, as projections leave them.
    *leaves, grad = (
        torch.randn(1, setting.rows, count, setting.dim, dtype=dtype, device=DEVICE).transpose(1, 2)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    for leaf in leaves:
        leaf.requires_grad_()
    baseline: Found = {}
    messages = RandomNumbers()

    def both(attend: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attend(), leaves, grad)

    def clock(attend: Callable[[], torch.Tensor]) -> Found:
        forward, full = timed(attend, repeats), timed(partial(both, attend), repeats)
        return {f"{key} {phase}": found[key] for phase, found in (("f", forward), ("f+b", full)) for key in found}

    def time_torch() -> Found:
        # A rank has rows x (P x rows) / 2 pairs of queries and keys: P times the pairs of its own rows.
        with setting.kernels():
            baseline.update(clock(partial(F.scaled_dot_product_attention, *leaves, is_causal=True, enable_gqa=True)))
        return baseline | {"note": f"{baseline['ms f+b']:.2f} ms"}

    def on_rank(strategy: Strategy, measure: Callable[[Callable[[], torch.Tensor]], Found]) -> Found:
        layout = head_tail(setting.length, setting.ranks)
        options = {"mask": setting.of_package(), "layout": layout, "strategy": strategy}
        with setting.kernels(), messages.world(setting.rank, setting.ranks):
            options["kernel"] = setting.named(kernel, leaves)
            attend = partial(context_attention, *leaves, dist.group.WORLD, checks=Checks(agreement=False), **options)
            both(attend), both(attend)  # plans are made, and the calls that may wait for the device are over
            return measure(attend)

    def measure_times(attend: Callable[[], torch.Tensor]) -> Found:
        found = clock(attend)
        note = f"{found['ms f+b']:.2f} ms, host {found['host ms f+b']:.2f}"
        if baseline:
            shares = {phase: setting.ranks * baseline[f"ms {phase}"] / found[f"ms {phase}"] for phase in ("f", "f+b")}
            found |= {f"share of ideal {phase}": round(share, 3) for phase, share in shares.items()}
            note += f", share of ideal {shares['f']:.3f} f, {shares['f+b']:.3f} f+b"
        return found | {"note": note}

    def measure_launches(attend: Callable[[], torch.Tensor]) -> Found:
        before = messages.received
        found = launches(partial(both, attend))
        counts = ", ".join(f"{kind} {count} ({ms:.2f} ms)" for kind, (count, ms) in found.items())
        note = f"{sum(count for count, _ in found.values())}: {counts}"
        return {"launches": found, "messages": messages.received - before, "note": note}

    def measure_memory(attend: Callable[[], torch.Tensor], strategy: Strategy) -> Found:
        plan = explanation(setting, strategy, dtype=dtype, device=DEVICE, kernel=kernel)
        run, unit = plan.runs[setting.rank], leaves[0].nbytes
        phase = max(run.forward, run.backward, key=lambda phase: phase.peak)
        found = {"peak Q": peak_bytes(partial(both, attend)) / unit, "formula Q": phase.peak / unit}
        found = {key: round(value, 3) for key, value in found.items()}
        parts = {what: round(size / unit, 3) for what, size in phase.parts.items()}
        return found | {"parts Q": parts, "note": f"peak {found['peak Q']} Q, formula {found['formula Q']} Q"}

    def measure_waits(attend: Callable[[], torch.Tensor]) -> Found:
        found = waits(partial(both, attend))
        return found | {"note": "; ".join(found["warnings"]) or f"returned first: {found['returned first']}"}

    if (
        setting.mask == "causal" and not profile
    ):  # for a window or documents torch computes more tiles than the mask needs
        yield "torch", time_torch
    for name, strategy in STRATEGIES.items():
        measures: dict[str, Callable[[Callable[[], torch.Tensor]], Found]] = {
            "times": measure_times,
            "launches": measure_launches,
            "memory": partial(measure_memory, strategy=strategy),
            "waits": measure_waits,
        }
        if profile:
            measures = {
                "profile f": host_profile,
                "profile f+b": lambda attend: host_profile(partial(both, attend)),
            }
        for what, measure in measures.items():
            yield f"{name} {what}", partial(on_rank, strategy, measure)


# -- the command --


def cases(*, timed: bool, profile: bool, kernel: Kernel | None) -> dict[str, Callable[[], Iterator[Check]]]:
    """The checks of each case, by its name."""
    if timed or profile:
        return {setting.name: partial(times, setting, kernel, profile=profile) for setting in settings()}
    return {problem.name: partial(exact, problem, kernel) for problem in problems()}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--time", action="store_true", help="times of one rank, and of torch's attention")
    made.add_argument("--profile", action="store_true", help="the host's time in these settings")
    made.add_argument("--out", type=Path, help="where the record goes")
    made.add_argument("--only", nargs="+", default=[""], help="cases whose names begin so")
    made.add_argument("--total", type=float, default=1e9, help="seconds, imports included, after which nothing begins")
    made.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="constants of modules in this run")
    made.add_argument("--stand-ins", action="store_true", help="on a CPU: the kernels of tests/cuda_ops.py")
    made.add_argument("--dry-run", action="store_true", help="print the cases")
    return made


def main() -> int:
    options = parser().parse_args()
    if options.stand_ins and CUDA:
        print("--stand-ins is for a machine without a GPU: leave it out")
        return 2
    every = cases(timed=options.time, profile=options.profile, kernel=DEFAULT if options.stand_ins else None)
    chosen = {name: checks for name, checks in every.items() if name.startswith(tuple(options.only))}
    if options.dry_run:
        for name in chosen:
            print(json.dumps({"case": name}))
        return 0
    record, lost = Record(options.out), False
    tiles = [torch.zeros(1, 1, 1, 1, device=DEVICE) for _ in range(2)]
    constants = {name: int(value) for name, _, value in (entry.partition("=") for entry in options.set)}
    record.write(hardware() | {"fused merge": FUSED_MERGE.takes(*tiles)} | ({"set": constants} if constants else {}))
    with contextlib.ExitStack() as stack:
        for name, value in constants.items():  # before any schedule is made, because schedules are cached
            stack.enter_context(patch(name, value))
        if options.stand_ins:
            stack.enter_context(cuda_ops_on_cpu())
        for name, checks in chosen.items():
            lines = run_checks(name, checks())
            while not lost and time.monotonic() - BEGUN < options.total:
                line = next(lines, None)
                if line is None:
                    break
                record.write(line)
                lost = "error" in line and device_is_lost()
            else:
                record.unfinished += 1
    return record.close()


if __name__ == "__main__":
    sys.exit(main())
