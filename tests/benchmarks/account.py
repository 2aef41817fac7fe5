"""The work of the host for one attention on a GPU, counted on a CPU: python tests/benchmarks/account.py

One rank of several runs alone, forward and backward, as on a GPU: rows are gathered by an index, messages go in
batches, tiles of cuDNN come first, and a merge is one launch. Kernels allocate what the CUDA ops of torch allocate and
compute nothing, and messages carry nothing. So sizes, schedules, calls and messages are exact, and there are no times.
The agreement of the ranks is left out: see agreement.py.

    calls      of Python functions and of C functions that Python calls (sys.setprofile), by the place of the caller:
               a file of this package, or torch
    ops        of torch, by kind. At top level: no op of torch calls them
    messages   received, and batches

The harness is tests/replay.py. Its functions stand for C functions, and count as one call. --peers counts the calls and
ops of torch's ring, and of ring-flash-attention and yunchang where they can be imported, in the same way: see peers.py.
Not collected by pytest; tests/unit/test_account.py holds the numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

import cp_styles
from cp_styles import Causal, Checks, context_attention
from cp_styles.comm import point_to_point
from cp_styles.engine import binding
from cp_styles.kernels import ReferenceKernel
from cp_styles.kernels.choice_by_tile import ByTile
from cp_styles.kernels.merge import Merge
from cp_styles.kernels.sdpa import CUDA_CUDNN_PREFERRED, CUDA_EFFICIENT, CUDA_FLASH
from cp_styles.layouts import head_tail
from cp_styles.strategies import Strategy, moving_kv

sys.path.append(str(Path(__file__).parents[2]))
from tests import replay
from tests.benchmarks.peers import peers
from tests.cuda_ops import on_cpu
from tests.replay import Transport
from tests.tables import STRATEGIES

PACKAGE, TESTS = str(Path(cp_styles.__file__).parent), str(Path(__file__).parents[1])
HEADS, KV_HEADS, DIM = 32, 8, 128
SHOWN = ["ring", "all-gather", "Ulysses", "Ulysses x ring"]


@dataclass(frozen=True)
class Launch(Merge):
    """Takes the arguments of a launch, and launches nothing."""

    def __call__(self, out_BHLE, lse_BHL, new_out_BHLE, new_lse_BHL, index=None):
        index = None if index is None else index.contiguous()
        _launch(index, *out_BHLE.stride(), *lse_BHL.stride(), *new_out_BHLE.stride(), *new_lse_BHL.stride())


def _launch(*_: Any) -> None:
    """In place of Triton's."""


FLASH, EFFICIENT = (replace(on_cpu(kernel), merge=Launch()) for kernel in (CUDA_FLASH, CUDA_EFFICIENT))
CUDNN = replace(on_cpu(CUDA_CUDNN_PREFERRED), merge=Launch(), gates=())
KERNELS = ByTile((CUDNN, FLASH, EFFICIENT, ReferenceKernel()), (EFFICIENT, ReferenceKernel()))


@contextlib.contextmanager
def ops_that_allocate() -> Iterator[None]:
    """Attention ops of CUDA on a CPU. Results have the memory order of the CUDA ops, and any values."""
    like, none, seed = torch.empty_like, torch.empty(0), torch.empty((), dtype=torch.int64)

    def lse(q: torch.Tensor, *size: int) -> torch.Tensor:
        return q.new_empty(size or q.shape[:3], dtype=torch.float32)

    def gradients(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **options: Any):
        return like(q), like(k), like(v)

    def flash(q: torch.Tensor, k: torch.Tensor, *_: Any, scale: float | None = None):
        return like(q), lse(q), none, none, q.shape[2], k.shape[2], seed, none, none

    def cudnn(q: torch.Tensor, k: torch.Tensor, *_: Any, scale: float | None = None):
        return like(q), lse(q, *q.shape[:3], 1), none, none, q.shape[2], k.shape[2], seed, seed, none

    def on_cpu(q: torch.Tensor, k: torch.Tensor, *_: Any, **options: Any):  # of peers
        return like(q), lse(q)

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cuts: torch.Tensor | None, *_: Any, **options: Any):
        size = (q.shape[0], q.shape[2], q.shape[1]) if cuts is None else (q.shape[-2], q.shape[0])
        return like(q), lse(q, *size), none, none, none

    library = torch.library.Library("aten", "IMPL")
    try:
        for name, forward in (("flash", flash), ("cudnn", cudnn), ("flash", on_cpu)):
            name = f"_scaled_dot_product_{name}_attention" + "_for_cpu" * (forward is on_cpu)
            with warnings.catch_warnings(action="ignore"):  # of an op that is there
                library.impl(name, forward, "CPU")
                library.impl(f"{name}_backward", gradients, "CPU")
        library.impl("_flash_attention_forward", varlen, "CPU")
        library.impl("_flash_attention_backward", gradients, "CPU")
        yield
    finally:
        library._destroy()


def _messages_of(received: Any, sent: Any, to_receive: list[int], to_send: list[int], rank: int) -> list[Any]:
    """The messages of an all-to-all, without operations of torch."""
    sides = (True, sent, to_send), (False, received, to_receive)
    return [(kind, peer, x) for kind, x, sizes in sides for peer, size in enumerate(sizes) if size and peer != rank]


class Counted(Transport):
    """Messages without contents."""

    received = batches = 0

    def filled(self, channel, tensor):
        self.received += 1

    def _start_batch(self, group, device):
        self.batches += 1
        return super()._start_batch(group, device)


class Calls(Counter[str]):
    """Counts calls while it is entered, by the file of the caller."""

    def __enter__(self) -> Calls:
        sys.setprofile(self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    def _hear(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            # A function of tests/ stands for a C function, a call of its caller.
            self[_place(frame.f_back if _is_harness(frame) else frame)] += 1
        elif event == "c_call" and argument is not sys.setprofile:
            self[_place(frame)] += 1


class CallsAnywhere(Calls):
    """Counts calls under one key."""

    def _hear(self, frame: FrameType, event: str, argument: Any) -> None:
        caller = frame.f_back if event == "call" and _is_harness(frame) else frame
        if event in ("call", "c_call") and caller is not None and not _is_harness(caller):
            self[""] += argument is not sys.setprofile


def _place(frame: FrameType | None) -> str:
    """The file of this package that is nearest above, "torch" behind torch.distributed, or "tests"."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return file[len(PACKAGE) + 1 : -len(".py")]
        if "torch/distributed/" in file:
            return "torch.distributed"
        if _is_harness(frame):
            return "tests"
        frame = frame.f_back
    return "tests"


def _is_harness(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(TESTS) and frame.f_code not in _PART_OF_THE_PATH


_PART_OF_THE_PATH = {Launch.__call__.__code__, _launch.__code__}

_NAMES = {
    "view": "view transpose slice select as_strided split split_with_sizes permute expand unsqueeze squeeze narrow "
    "flatten unflatten reshape t movedim unbind chunk alias detach _reshape_alias _unsafe_view contiguous to view_as",
    "copy": "copy_ index_select cat clone index_copy_ _to_copy",
    "alloc": "empty empty_like empty_strided new_empty zeros zero_ fill_ full new_zeros",
}
KINDS = {f"aten::{name}": kind for kind, names in _NAMES.items() for name in names.split()}


class Ops(NamedTuple):
    """By kind. ``top``: no op of torch calls them."""

    top: Counter[str]
    every: Counter[str]


def count_ops(run: Callable[[], object]) -> Ops:
    found = Ops(Counter(), Counter())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        run()
    for event in trace.events() or ():
        if event.name.startswith("aten::"):
            kind = "attention" if "attention" in event.name else KINDS.get(event.name, "math")
            found.every[kind] += 1
            above = event.cpu_parent
            while above is not None and not above.name.startswith("aten::"):
                above = above.cpu_parent
            found.top[kind] += above is None
    return found


def of_peer(name: str, ranks: int, rows: int) -> tuple[int, Ops]:
    """The calls and ops of a peer, as :func:`account` counts them. KeyError: it cannot be made here."""
    transport, rank = Counted(), 3 if ranks > 2 else 0
    with ops_that_allocate(), transport.world(rank, ranks):
        peer = peers(name)[0][name]
        leaves = [torch.zeros(1, rows, heads, DIM, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        leaves = [(x if peer.rows_first else x.transpose(1, 2)).requires_grad_() for x in leaves]
        grad = torch.zeros_like(leaves[0])

        def both() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(peer.attend(*leaves), leaves, grad)

        for _ in range(2):
            both()
        with CallsAnywhere() as calls:
            both()
        return calls[""], count_ops(both)


class Account(NamedTuple):
    """``calls``: by file. ``forward``: calls of a forward alone."""

    calls: Counter[str]
    forward: int
    ops: Ops
    received: int
    batches: int


def account(strategy: Strategy, ranks: int, rows: int) -> Account:
    """The account of rank 3, or of rank 0 of two, with so many ``rows`` of a causal sequence that head_tail cuts."""
    transport = Counted()
    rank = min(3, ranks - 1) if ranks > 2 else 0
    shapes = [(1, rows, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    leaves = [torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for shape in shapes]
    grad, layout, checks = torch.zeros_like(leaves[0]), head_tail(rows * ranks, ranks), Checks(agreement=False)

    def forward() -> torch.Tensor:
        return context_attention(
            *leaves, dist.group.WORLD, mask=Causal(), layout=layout, strategy=strategy, checks=checks
        )

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, grad)

    with (
        ops_that_allocate(),
        transport.world(rank, ranks),
        patch.object(binding, "kernel_for_tiles", lambda tensors, named=None: KERNELS),
        patch.object(point_to_point, "makes_batches", lambda group, device: True),
        patch.object(replay, "messages_of", _messages_of),
        # An attribute that is always true, and takes any value, without a call of Python.
        patch.object(moving_kv._Run, "by_index", property(operator.truth, operator.is_), create=True),
        patch.object(moving_kv, "open_group", lambda group, device: None),
    ):
        for _ in range(2):
            both()
        transport.received = transport.batches = 0
        with Calls() as calls:
            both()
        received, batches = transport.received, transport.batches
        with Calls() as of_forward:
            forward()
        ops = count_ops(both)
    del calls["tests"], of_forward["tests"]
    return Account(calls, of_forward.total(), ops, received, batches)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("strategies", nargs="*", default=SHOWN, metavar="STRATEGY", help=", ".join(STRATEGIES))
    options.add_argument("--ranks", type=int, nargs="*", default=[8, 2])
    options.add_argument("--rows", type=int, default=4096, help="of a rank")
    options.add_argument("--peers", action="store_true", help="count the calls of other packages too")
    options.add_argument("--files", action="store_true", help="print the calls by the file of their caller")
    chosen = options.parse_args()
    if unknown := set(chosen.strategies) - STRATEGIES.keys():
        options.error(f"no strategy {', '.join(unknown)}: one of {', '.join(STRATEGIES)}")
    torch.set_num_threads(1)
    print(f"{chosen.rows} rows of a rank, {HEADS} heads of {DIM} and {KV_HEADS} of keys, bfloat16, causal, head_tail")
    print("\n| strategy | ranks | calls | of the forward | ops at top level | ops | received | batches |")
    print("|---|---|---|---|---|---|---|---|")
    by_file: dict[str, Counter[str]] = {}
    for ranks in chosen.ranks:
        for name in chosen.strategies:
            it = account(STRATEGIES[name], ranks, chosen.rows)
            kinds = ", ".join(f"{count} {kind}" for kind, count in it.ops.top.most_common())
            print(
                f"| {name} | {ranks} | {it.calls.total():,} | {it.forward:,} | {it.ops.top.total()} ({kinds}) "
                f"| {it.ops.every.total()} | {it.received} | {it.batches} |",
                flush=True,
            )
            by_file[f"{name}, {ranks} ranks"] = it.calls
        for name in peers()[0] if chosen.peers else ():
            calls, ops = of_peer(name, ranks, chosen.rows)
            kinds = ", ".join(f"{count} {kind}" for kind, count in ops.top.most_common())
            print(
                f"| {name} | {ranks} | {calls:,} | | {ops.top.total()} ({kinds}) | {ops.every.total()} | | |",
                flush=True,
            )
    for name, calls in by_file.items() if chosen.files else ():
        print(f"\n{name}:")
        for file, count in calls.most_common():
            print(f"{count:6} {file}")


if __name__ == "__main__":
    main()
