"""The device of the ranks of a test: the CPU, or with ``CP_STYLES_TEST_DEVICE=cuda`` one GPU that all ranks share.

    CP_STYLES_TEST_DEVICE=cuda python tests/fuzz.py --seconds 60
    CP_STYLES_TEST_DEVICE=cuda python tests/mixers.py --seconds 30
    CP_STYLES_TEST_DEVICE=cuda python -m tests.wrong_programs
    CP_STYLES_TEST_DEVICE=cuda python -m tests.clients.sweep llama qwen3

Gloo sends no memory of a GPU, and NCCL refuses a second rank on a device. So messages and collectives go over the host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from cp_styles import testing
from cp_styles.comm import point_to_point
from cp_styles.comm.point_to_point import Message
from tests.gpu_record import SideStream, messages_of

DEVICE = torch.device(os.environ.get("CP_STYLES_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type == "cuda"
_COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "all_gather", "all_to_all", "all_to_all_single"),
    *("all_gather_into_tensor", "reduce_scatter_tensor"),
)


def there(x: Any) -> Any:
    """``x`` on the device of the ranks; its floating-point tensors stay leaves."""
    if not ON_GPU or not isinstance(x, torch.Tensor):
        return x
    return x.detach().to(DEVICE).requires_grad_(x.requires_grad)


def here(x: Any) -> Any:
    """``x`` on the host."""
    return x.detach().cpu() if ON_GPU and isinstance(x, torch.Tensor) else x


class Staged:
    """The messages of a batch over the host: gloo sends no memory of a GPU. Unlike the wait of NCCL, ``wait`` holds the
    host until the messages have come. Kernels that read them wait on the stream."""

    def __init__(self, batch: Sequence[Message], group: dist.ProcessGroup, tag: int) -> None:
        self.side, self.received, self.works = SideStream(), [], []
        pinned = torch.cuda.is_available()
        hosts = [torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for *_, x in batch]
        with self.side.context():
            for (is_sent, _, tensor), host in zip(batch, hosts, strict=True):
                if is_sent:
                    host.copy_(tensor, non_blocking=True)
        if self.side.stream is not None:
            self.side.stream.synchronize()
        for (is_sent, peer, tensor), host in zip(batch, hosts, strict=True):
            self.works.append((group.send if is_sent else group.recv)([host], peer, tag))
            if not is_sent:
                self.received.append((tensor, host))
        self.hosts = hosts

    def wait(self, *_: Any) -> bool:
        for work in self.works:
            work.wait()
        with self.side.context():
            for tensor, host in self.received:
                tensor.copy_(host, non_blocking=True)
        self.side.join()
        return True


def _all_to_all(group: dist.ProcessGroup, received: torch.Tensor, sent: torch.Tensor, *call: Any) -> Staged:
    *sizes, _ = call
    return Staged(messages_of(received, sent, *sizes, group.rank()), group, 0)


class _Done:
    """The work of a collective that has ended."""

    def wait(self, *_: Any) -> bool:
        return True


def _over_the_host(real: Callable[..., Any], back: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def run(*args: Any, async_op: bool = False, **options: Any) -> Any:
        hosts: list[tuple[torch.Tensor, torch.Tensor]] = []

        def host_of(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.device.type == "cpu":
                return x
            hosts.append((x, back(x)))
            return hosts[-1][1]

        given, named = tree_map(host_of, args), tree_map(host_of, options)
        if not hosts:
            return real(*args, async_op=async_op, **options)
        real(*given, **named)
        for tensor, host in hosts:
            tensor.detach().copy_(host, non_blocking=True)
        return _Done() if async_op else None

    return run


@contextlib.contextmanager
def messages_over_the_host(back: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu) -> Iterator[None]:
    """Batches of messages and collectives go over the host. ``back`` copies a tensor to it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(point_to_point, "makes_batches", lambda group, device: device.type == "cuda"))
        stack.enter_context(patch.object(point_to_point, "move_batch", Staged))
        stack.enter_context(patch.object(dist.ProcessGroup, "alltoall_base", _all_to_all))
        for name in _COLLECTIVES:
            stack.enter_context(patch.object(dist, name, _over_the_host(getattr(dist, name), back)))
        yield


@contextlib.contextmanager
def functional_over_the_host() -> Iterator[None]:
    """Functional collectives of tensors of a GPU go over the host."""
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")
    ops = torch.ops._c10d_functional

    def run(name: str, x: torch.Tensor, *options: Any) -> torch.Tensor:
        return ops.wait_tensor(getattr(ops, name)(x.cpu(), *options)).to(x.device)

    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        for name in names:
            library.impl(name, partial(run, name), "CUDA")
        yield


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """``cp_styles.testing.run_ranks`` with ranks that compute on :data:`DEVICE`."""
    if not ON_GPU:
        return testing.run_ranks(fn, world_size, *args, **options)

    def on_rank(rank: int, *args: Any) -> Any:
        torch.cuda.set_device(0)
        # All ranks of this process would share autograd's one thread of the device, and a rank waits for other ranks.
        with torch.autograd.set_multithreading_enabled(False):
            return fn(rank, *args)

    torch.linalg.inv(torch.eye(2, device=DEVICE))  # sets up what threads may not set up at once
    seconds = options.pop("timeout_seconds", 300.0)
    real = dist.init_process_group

    def begin(backend: str, **options: Any) -> None:
        # A DeviceMesh makes groups of NCCL if the backend of the world is "gloo" alone.
        real("cpu:gloo,cuda:gloo", **options)

    with messages_over_the_host(), functional_over_the_host(), patch.object(dist, "init_process_group", begin):
        return testing.run_ranks(on_rank, world_size, *args, timeout_seconds=max(seconds, 30.0), **options)
