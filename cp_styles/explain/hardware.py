"""The figures of a machine from which times of attention are predicted, and the prediction."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from cp_styles.comm.groups import GroupOrMesh, axis_and_group
from cp_styles.comm.point_to_point import exchange, open_group
from cp_styles.explain.rehearsal_group import Transfer, Waited
from cp_styles.explain.rehearse import Copied, KernelCall, Phase, Shapes, kernel_of
from cp_styles.functions.attention import context_attention
from cp_styles.layout import contiguous
from cp_styles.mask import Full
from cp_styles.strategies import Ring

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """The figures of one kind of machine. ``H100``, ``H200``, ``A100`` and ``CPU`` are such figures with their sources.

    A kernel takes ``kernel_floor + flops / rate`` seconds for each call, where the rate of a tile with n queries is
    ``flops * n / (n + half_rows)``, and in a backward ``backward_rate`` of that. In a causal tile each query computes
    ``beyond_diagonal`` keys that it does not attend to. Other operations take ``op_floor + bytes / copy_bandwidth``. A
    message takes ``latency + bytes / bandwidth`` of its link.

    Attributes:
        name: name of the machine, for messages.
        flops: floating-point operations a second of the attention kernel with long tiles in its forward.
        cudnn_rate: rate of cuDNN's kernel over that, where it is what computes.
        backward_rate: rate of the backward over that of the forward.
        half_rows: queries of a tile at which the rate is half of ``flops``.
        beyond_diagonal: keys beyond the diagonal that each query of a causal tile computes, because kernels compute
            whole blocks of keys; at most all keys of the tile.
        kernel_floor: seconds of a kernel call without work.
        copy_bandwidth: bytes a second that other operations read and write.
        op_floor: seconds of another operation without work.
        call_floor: seconds of a forward or of a backward without work: the ranks' agreement, and Python.
        bandwidth: bytes a second that a rank sends in one direction to ranks of its node.
        latency: seconds of a message without bytes between ranks of one node.
        far_bandwidth, far_latency: the same between nodes.
        node_ranks: number of ranks in a node.
        memory: bytes of a device.
        overlap: whether messages travel while kernels run.
        device: device type, which decides the kernels.
        source: where the figures come from.

    Raises:
        ValueError: a rate or bandwidth is not above 0, or another figure is negative.
    """

    name: str
    flops: float
    backward_rate: float
    half_rows: float
    beyond_diagonal: float
    kernel_floor: float
    copy_bandwidth: float
    op_floor: float
    call_floor: float
    bandwidth: float
    latency: float
    far_bandwidth: float
    far_latency: float
    node_ranks: int
    memory: int
    overlap: bool
    device: str
    source: str
    cudnn_rate: float = 1.0

    def __post_init__(self) -> None:
        rates = "flops", "cudnn_rate", "backward_rate", "copy_bandwidth", "bandwidth", "far_bandwidth"
        for field in (*rates, "node_ranks", "memory"):
            if not getattr(self, field) > 0:
                raise ValueError(f"Hardware {field} must be above 0, got {getattr(self, field)}")
        for field in ("half_rows", "beyond_diagonal", "kernel_floor", "op_floor", "latency", "far_latency"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"Hardware {field} must be 0 or above, got {getattr(self, field)}")

    def kernel_seconds(self, call: KernelCall) -> float:
        """Predicted time of one kernel call, ``call``, in seconds."""
        rows = max((tile[3] for tile in call.tiles), default=1)
        rate = self.flops * rows / (rows + self.half_rows) * (self.backward_rate if call.backward else 1.0)
        rate *= self.cudnn_rate if "cudnn" in call.kernel else 1.0
        flops = float(call.flops)
        if call.edges:
            beyond = sum(b * heads * n * min(self.beyond_diagonal, (n - 1) / 2) for b, heads, _, n, _ in call.tiles)
            flops *= 1 + call.edges * beyond / max(call.pairs, 1)
        return self.kernel_floor + flops / rate

    def link(self, rank: int, peer: int) -> tuple[str, float, float]:
        """The link between ``rank`` and ``peer``: its name, its bandwidth and its latency."""
        if rank // self.node_ranks == peer // self.node_ranks:
            return "near", self.bandwidth, self.latency
        return "far", self.far_bandwidth, self.far_latency

    @staticmethod
    def measure(group: GroupOrMesh | None = None, *, dtype: torch.dtype = torch.float32) -> Hardware:
        """The figures of this machine, measured in some seconds, for ``dtype``. The same on all ranks of ``group``.

        Kernels and copies are timed on the accelerator, or on the CPU with the threads that torch has, on all ranks at
        once, which share the machine. Messages are timed between the first two ranks of ``group``, and ``call_floor``
        by calls with one query a rank. Without a group, those figures are the ones of ``CPU`` or ``H100``. A 1-D mesh
        is as good as its group.

        Communication: messages between two ranks, two broadcasts of the figures of rank 0, and small attentions.
        """
        if group is not None:
            _, group = axis_and_group("Hardware.measure", group)
        device = torch.accelerator.current_accelerator() if torch.cuda.is_available() else None
        device = device or torch.device("cpu")
        preset = H100 if device.type == "cuda" else CPU
        measured = _measured(preset, device, dtype)
        if group is None or group.size() == 1:
            return measured
        open_group(group, device)
        if group.rank() < 2:
            latency, bandwidth = _measured_link(group, device)
            measured = replace(measured, latency=latency, bandwidth=bandwidth)
        measured = _of_first(measured, group, device)
        return _of_first(replace(measured, call_floor=_least_call(group, device, dtype, measured)), group, device)


def _of_first(hardware: Hardware, group: dist.ProcessGroup, device: torch.device) -> Hardware:
    figures = [hardware]
    dist.broadcast_object_list(figures, src=dist.get_global_rank(group, 0), group=group, device=device)
    return figures[0]


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    def once() -> float:
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(repeats))


def _measured(preset: Hardware, device: torch.device, dtype: torch.dtype) -> Hardware:
    heads, dim = 8, 64 if device.type == "cpu" else 128
    kernel = kernel_of(Shapes(heads, heads, dim, dim, dtype, device), None)

    def times(rows: int, causal: bool = False) -> tuple[float, float]:
        q, k, v, grad = (torch.randn(1, rows, heads, dim, device=device, dtype=dtype).transpose(1, 2) for _ in range(4))
        options = {"causal": causal, "bias": None, "scale": dim**-0.5}
        out, lse = kernel.forward(q, k, v, **options)
        forward = _seconds(lambda: kernel.forward(q, k, v, **options), device)
        return forward, _seconds(lambda: kernel.backward(grad, q, k, v, out, lse, **options), device)

    long = 1024 if device.type == "cpu" else 16384
    (tiny, _), (small, _), (large, large_backward), causal = times(1), times(long // 8), times(long), times(long, True)
    flops = 4.0 * heads * dim * long**2
    floor = min(tiny, 0.9 * small)
    rate, small_rate = flops / (large - floor), flops / 64 / (small - floor)
    # rate(n) = r n / (n + h), from its values at n and at n / 8.
    half = max(0.0, long * (rate / small_rate - 1) / (8 - rate / small_rate)) if rate / small_rate < 8 else float(long)
    # Heads out of rows, in pieces that are freed together: on CPU much of the time is taking fresh memory.
    pieces = torch.zeros(8, 1024, 8, 64, device=device)
    copied = _seconds(lambda: [piece.transpose(0, 1).contiguous() for piece in pieces], device)
    little = _seconds(lambda: pieces[0, :1] + 1.0, device)
    return replace(
        preset,
        name=f"measured on {device.type}",
        flops=rate * (long + half) / long,
        backward_rate=2.5 * (large - floor) / max(large_backward - floor, 1e-9),
        half_rows=half,
        beyond_diagonal=min(max(0.0, sum(causal) / (large + large_backward) - 0.5), 0.5) * long,
        kernel_floor=floor,
        copy_bandwidth=2 * pieces.nbytes / max(copied - 8 * little, 1e-9),
        op_floor=little,
        source="Hardware.measure()",
    )


def _measured_link(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Latency and bandwidth between the first two ranks of the group."""
    peer = 1 - group.rank()

    def swap(size: int) -> float:
        sent, received = torch.zeros(2, size, device=device)
        return _seconds(lambda: exchange([(peer, sent)], [(peer, received)], group).wait(), device, 7)

    latency, size = swap(1), 2**21
    return latency, 4 * size / max(swap(size) - latency, 1e-9)


def _least_call(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, hardware: Hardware) -> float:
    """Seconds of a forward or a backward with one query a rank, beside kernels and messages."""
    ranks = group.size()
    q, k, v, grad = (torch.randn(1, 8, 1, 64, device=device, dtype=dtype) for _ in range(4))

    def run() -> None:
        inputs = (x.detach().requires_grad_() for x in (q, k, v))
        context_attention(*inputs, group=group, mask=Full(), strategy=Ring(), layout=contiguous).backward(grad)

    once = _seconds(run, device, 31) / 2
    return max(0.0, once - ranks * hardware.kernel_floor - (ranks - 1) * hardware.latency)


H100 = Hardware(
    name="H100",
    flops=376e12,
    backward_rate=0.85,
    half_rows=350,
    beyond_diagonal=0.0,
    kernel_floor=60e-6,
    copy_bandwidth=2.6e12,
    op_floor=4e-6,
    call_floor=0.0,
    bandwidth=368e9,
    latency=56e-6,
    far_bandwidth=40e9,
    far_latency=30e-6,
    node_ranks=8,
    memory=80 * GIB,
    overlap=True,
    device="cuda",
    source=(
        "kernel: published table of FlashAttention varlen (hao-ai-lab/distca, compute-attn-H100.psv); link: published "
        "NCCL all-gather over 8 (distca, nccl_perf.csv); far link: 400 Gbit/s a GPU at 80 %; HBM: 3.35 TB/s at 78 %; "
        "backward, launches, far latency: assumed; keys beyond the diagonal: not known apart from the "
        "rate, 0; agreement of the ranks: not measured, left out; cuDNN: the least of the 1.7 to 2.3 times of "
        "FlashAttention 2 that are published for training shapes (transformers, pull request 48163)"
    ),
    cudnn_rate=1.7,
)
"""NVIDIA H100, 80 GB, 8 in a machine with NVLink, 400 Gbit/s a GPU between machines; bfloat16. Published figures."""
H200 = replace(
    H100,
    name="H200",
    flops=359e12,
    cudnn_rate=1.74,
    backward_rate=0.89,
    beyond_diagonal=516,
    copy_bandwidth=3.7e12,
    memory=143155 * 2**20,
    source=(
        "kernels: fitted on tiles of 8K and 32K rows that were timed on one H200 (tests/records/h200/gpu.jsonl, "
        "tests/benchmarks/on_gpu.py); memory: the same record; HBM: the data sheet's 4.8 TB/s at 78 %; floors and "
        "links: as H100"
    ),
)
"""NVIDIA H200, 8 in a machine with NVLink; bfloat16. Kernels as measured on one, with torch 2.11 and cuDNN 9.19."""
A100 = replace(
    H100,
    name="A100",
    flops=190e12,
    copy_bandwidth=1.6e12,
    bandwidth=180e9,
    latency=24e-6,
    far_bandwidth=20e9,
    source=(
        "kernel: 61 % of the data sheet's 312 TFLOP/s; link: published all-to-all over 4 (distca): 128 MB in 557 us; "
        "HBM: 2.04 TB/s at 78 %; far link: 200 Gbit/s at 80 %; the rest as H100, but for cuDNN"
    ),
    cudnn_rate=1.0,
)
"""NVIDIA A100, 80 GB, 8 in a machine with NVLink, 200 Gbit/s a GPU between machines; bfloat16. Published figures."""
CPU = Hardware(
    name="CPU",
    flops=55e9,
    backward_rate=0.9,
    half_rows=24,
    beyond_diagonal=256,
    kernel_floor=40e-6,
    copy_bandwidth=6e9,
    op_floor=6e-6,
    call_floor=1.5e-3,
    bandwidth=1.4e9,
    latency=150e-6,
    far_bandwidth=1.4e9,
    far_latency=150e-6,
    node_ranks=2**20,
    memory=8 * GIB,
    overlap=False,
    device="cpu",
    source=(
        "set by hand for a thread a rank on a server's core, float32, gloo over loopback; measure() is better. Keys "
        "beyond the diagonal: torch's kernel computes blocks of 512 keys"
    ),
)
"""A thread of a server's CPU for each rank, float32, gloo on one machine. Set by hand: prefer ``Hardware.measure``."""
MACHINES = {"h100": H100, "h200": H200, "a100": A100, "cpu": CPU}


class Seconds(NamedTuple):
    """Time of a forward or backward on one rank.

    Attributes:
        total: all of it.
        kernels: inside the attention kernels.
        exposed: waiting for messages while nothing is computed.
        copies: packing, merging, the ranks' agreement and other operations.
    """

    total: float
    kernels: float
    exposed: float
    copies: float

    def __add__(self, other: Seconds) -> Seconds:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Seconds(*map(sum, zip(self, other, strict=True)))


def seconds_of(phase: Phase, rank: int, hardware: Hardware) -> Seconds:
    """Time of one phase, if the other ranks are never late.

    A link carries one message after another in each direction, from the moment when the rank starts them. Where
    messages do not travel beside kernels, the rank spends their time when it waits for them.
    """
    now = copies = hardware.call_floor
    kernels = exposed = 0.0
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
