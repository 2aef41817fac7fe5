"""How long a rank takes: its events walked one by one, messages beside kernels where the machine can do that."""

from __future__ import annotations

from typing import NamedTuple

from cp_styles.comm.rehearsal import Transfer, Waited
from cp_styles.explain.hardware import Hardware
from cp_styles.explain.rehearse import Copied, KernelCall, Phase


class Seconds(NamedTuple):
    """Time of a forward or backward on one rank.

    Attributes:
        total: all of it.
        kernels: inside the attention kernels.
        exposed: waiting for messages while nothing is computed.
        copies: packing, merging and other operations.
    """

    total: float
    kernels: float
    exposed: float
    copies: float

    def __add__(self, other: Seconds) -> Seconds:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Seconds(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def seconds_of(phase: Phase, rank: int, hardware: Hardware) -> Seconds:
    """Time of one phase, if the other ranks are never late.

    A link carries one message after another in each direction, from the moment when the rank starts them. Where
    messages do not travel beside kernels, the rank spends their time when it waits for them.
    """
    now = kernels = exposed = copies = 0.0
    free: dict[tuple[str, bool], float] = {}
    ends: list[float] = []
    for event in phase.events:
        if isinstance(event, KernelCall):
            spent = hardware.kernel_seconds(event)
            now, kernels = now + spent, kernels + spent
        elif isinstance(event, Copied):
            spent = hardware.op_floor + event.nbytes / hardware.copy_bandwidth
            now, copies = now + spent, copies + spent
        elif isinstance(event, Transfer):
            link, bandwidth, latency = hardware.link(rank, event.peer)
            way = link, event.outgoing
            free[way] = max(free.get(way, 0.0), now) + event.nbytes / bandwidth
            if hardware.overlap:
                ends.append(free[way] + latency)
            else:  # the rank moves the bytes itself; both ways at once
                ends.append(-(latency + event.nbytes / bandwidth) if not event.outgoing else 0.0)
        elif isinstance(event, Waited):
            end = ends[event.transfer]
            spent = max(0.0, end - now) if hardware.overlap else -end
            now, exposed = now + spent, exposed + spent
    return Seconds(now, kernels, exposed, copies)
