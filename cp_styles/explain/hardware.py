"""The figures of a machine from which times of attention are predicted, and the prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from cp_styles.explain.events import KernelCall, MemoryOp, Phase, Transfer, WaitEvent

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """The figures of one kind of machine. ``H100``, ``H200``, ``A100`` and ``CPU`` are presets with their sources.

    A kernel call takes ``kernel_floor + flops / rate`` seconds. The rate of a tile with n queries is
    ``flops * n / (n + half_rows)``, and in a backward ``backward_rate`` times as much. In a causal tile each query
    computes ``masked_keys_per_query`` keys that the mask hides. Other operations take
    ``op_floor + bytes / copy_bandwidth``, and matrix products among them, which expand latents, also
    ``operations / (flops * cudnn_rate)``. A message takes ``latency + bytes / bandwidth`` of its link.

    ``dataclasses.replace(H100, bandwidth=...)`` describes another machine.

    Attributes:
        name: name of the machine, for messages.
        flops: floating-point operations a second of the attention kernel with long tiles in its forward.
        cudnn_rate: rate of cuDNN's kernel over ``flops``, for calls of that kernel.
        backward_rate: rate of the backward over the rate of the forward.
        half_rows: queries of a tile at which the rate is half of ``flops``.
        masked_keys_per_query: hidden keys that each query of a causal tile computes, because kernels compute whole
            blocks of keys; at most all keys of the tile.
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
        source: the sources of the figures.

    Raises:
        ValueError: a rate or bandwidth is not above 0, or another figure is negative.
    """

    name: str
    flops: float
    backward_rate: float
    half_rows: float
    masked_keys_per_query: float
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
        for field in ("half_rows", "masked_keys_per_query", "kernel_floor", "op_floor", "latency", "far_latency"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"Hardware {field} must be 0 or above, got {getattr(self, field)}")

    def kernel_seconds(self, call: KernelCall) -> float:
        """Predicted time of one kernel call, ``call``, in seconds."""
        rows = max((tile[3] for tile in call.tiles), default=1)
        rate = self.flops * rows / (rows + self.half_rows) * (self.backward_rate if call.backward else 1.0)
        rate *= self.cudnn_rate if "cudnn" in call.kernel else 1.0
        flops = float(call.flops)
        if call.edges:
            masked = sum(b * h * n * min(self.masked_keys_per_query, (n - 1) / 2) for b, h, _, n, _ in call.tiles)
            flops *= 1 + call.edges * masked / max(call.pairs, 1)
        return self.kernel_floor + flops / rate

    def link(self, rank: int, peer: int) -> tuple[str, float, float]:
        """The link between ``rank`` and ``peer``: its name, its bandwidth and its latency."""
        if rank // self.node_ranks == peer // self.node_ranks:
            return "near", self.bandwidth, self.latency
        return "far", self.far_bandwidth, self.far_latency


H100 = Hardware(
    name="H100",
    flops=376e12,
    backward_rate=0.85,
    half_rows=350,
    masked_keys_per_query=0.0,
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
        "backward, launches, far latency: assumed; masked keys: part of the rate, so 0; agreement of the ranks: not "
        "measured, left out; cuDNN: the least of the 1.7 to 2.3 times of FlashAttention 2 that are published for "
        "training shapes (transformers, pull request 48163)"
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
    masked_keys_per_query=516,
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
    masked_keys_per_query=256,
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
        "set by hand for a thread a rank on a server's core, float32, gloo over loopback; masked keys: torch's kernel "
        "computes blocks of 512 keys"
    ),
)
"""A thread of a server's CPU for each rank, float32, gloo on one machine. Set by hand."""
MACHINES = {"h100": H100, "h200": H200, "a100": A100, "cpu": CPU}


class Seconds(NamedTuple):
    """Predicted time of a forward or backward on one rank.

    Attributes:
        total: the sum.
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
    """Predicted time of one phase of ``rank``, if its peers are never late."""
    # A link carries one message after another in each direction, from the moment when the rank starts them. Without
    # hardware.overlap the rank spends the time of a message when it waits for it.
    now = copies = hardware.call_floor
    kernels = exposed = 0.0
    free: dict[tuple[str, bool], float] = {}
    ends: list[float] = []
    for event in phase.events:
        if isinstance(event, KernelCall):
            spent = hardware.kernel_seconds(event)
            now, kernels = now + spent, kernels + spent
        elif isinstance(event, MemoryOp):
            spent = hardware.op_floor + event.nbytes / hardware.copy_bandwidth
            spent += event.flops / (hardware.flops * hardware.cudnn_rate)
            now, copies = now + spent, copies + spent
        elif isinstance(event, Transfer):
            link, bandwidth, latency = hardware.link(rank, event.peer)
            lane = link, event.outgoing
            free[lane] = max(free.get(lane, 0.0), now) + event.nbytes / bandwidth
            if hardware.overlap:
                ends.append(free[lane] + latency)
            else:  # the rank moves the bytes itself, both directions at once
                ends.append(-(latency + event.nbytes / bandwidth) if not event.outgoing else 0.0)
        elif isinstance(event, WaitEvent):
            end = ends[event.transfer]
            spent = max(0.0, end - now) if hardware.overlap else -end
            now, exposed = now + spent, exposed + spent
    return Seconds(now, kernels, exposed, copies)
