"""Every private torch name this package touches, renamed once, with the versions in which it was seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def sdpa_handlers() -> dict[Any, Callable[..., Any]]:
    """The dict of per-op handlers DTensor reads at every dispatch. Seen: 2.11, 2.12, 2.13, 2.14, 2.15."""
    return DTensor._op_dispatcher._custom_op_handlers  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def thread_local_world() -> Iterator[None]:
    """Give every thread its own torch.distributed world while inside, so that threads can be ranks.

    Names seen in 2.11, 2.12, 2.13, 2.14, 2.15. Only for tests and notebooks.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threads

    world = threads._install_threaded_pg()
    if not hasattr(world, "comms"):  # 2.11: destroy_process_group reads it, the threads' world lacks it
        world.comms = []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threads._uninstall_threaded_pg()


def process_group_of(op_argument: Any) -> dist.ProcessGroup | None:
    """The process group inside an argument of a c10d op, or None. Seen: 2.11 to 2.15 (``ProcessGroup.unbox``)."""
    if isinstance(op_argument, torch.ScriptObject):
        with contextlib.suppress(RuntimeError):
            return dist.ProcessGroup.unbox(op_argument)
    return None
