"""Predicted times, and the parts of a report that do not come from the events of a dry run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cp_styles import Causal, Full, Ring, SlidingWindow, Ulysses, contiguous, head_tail, imbalance
from cp_styles.explain import CPU, H100, explain
from cp_styles.explain.events import KernelCall, MemoryOp, Phase, Transfer, WaitEvent
from cp_styles.explain.hardware import Seconds, seconds_of
from cp_styles.explain.text import format_bytes
from cp_styles.kernels.sdpa import CUDA_CUDNN, CUDA_FLASH
from tests.covering import sampled

# Kernels of a second, and links that carry a number of bytes in as many seconds and have a latency of half a second.
CALL = KernelCall("flash", False, "full", ((1, 1, 1, 8, 8),), (16, 16), 4)
MACHINE = replace(
    CPU,
    flops=float(CALL.flops),
    half_rows=0.0,
    masked_keys_per_query=0.0,
    kernel_floor=0.0,
    call_floor=0.0,
    op_floor=0.0,
    copy_bandwidth=1.0,
    bandwidth=1.0,
    latency=0.5,
    far_bandwidth=0.25,
    far_latency=1.0,
    node_ranks=2,
    overlap=True,
)
SENT, RECEIVED, FAR = Transfer(1, 1, True), Transfer(1, 1, False), Transfer(2, 1, True)

MODEL = {"ranks": 4, "heads": 4, "head_dim": 16, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("events", "overlap", "expected"),
    [
        ([CALL, MemoryOp(2)], True, Seconds(3, 1, 0, 2)),
        # A message behind another one of its direction; the other direction is free.
        ([SENT, SENT, RECEIVED, WaitEvent(2)], True, Seconds(1.5, 0, 1.5, 0)),
        ([SENT, SENT, RECEIVED, WaitEvent(2), WaitEvent(1)], True, Seconds(2.5, 0, 2.5, 0)),
        # During a kernel; started after it; and on a machine where no message travels during a kernel.
        ([RECEIVED, CALL, WaitEvent(0)], True, Seconds(1.5, 1, 0.5, 0)),
        ([CALL, RECEIVED, WaitEvent(0)], True, Seconds(2.5, 1, 1.5, 0)),
        ([SENT, RECEIVED, CALL, WaitEvent(0), WaitEvent(1)], False, Seconds(2.5, 1, 1.5, 0)),
        # Between nodes: another link.
        ([SENT, FAR, WaitEvent(1)], True, Seconds(5, 0, 5, 0)),
        ([FAR, CALL, CALL, CALL, CALL, CALL, CALL, WaitEvent(0)], True, Seconds(6, 6, 0, 0)),
    ],
)
def test_events_take_their_time(events, overlap: bool, expected: Seconds):
    assert seconds_of(Phase(events), 0, replace(MACHINE, overlap=overlap)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("cover", "masked", "expected"),
    [
        ("full", 3.0, 1.0),
        ("causal", 0.0, 36 / 64),  # of 8 x 8 pairs, those up to the diagonal
        ("causal", 3.0, (36 + 8 * 3) / 64),
        ("causal", 256.0, 1.0),  # never more than the whole tile
    ],
)
def test_causal_tiles_compute_hidden_keys(cover: str, masked: float, expected: float):
    machine = replace(MACHINE, masked_keys_per_query=masked)
    assert machine.kernel_seconds(CALL._replace(cover=cover)) == pytest.approx(expected)


def test_a_call_has_a_floor_in_both_directions():
    layout = head_tail(64, 4)
    low, high = (
        explain(64, layout=layout, hardware=replace(CPU, call_floor=floor), **MODEL).seconds for floor in (0.0, 0.5)
    )
    for without, with_it in zip(low, high, strict=True):
        assert with_it.total - without.total == pytest.approx(0.5)
        assert with_it.kernels == pytest.approx(without.kernels)


@pytest.mark.parametrize(("size", "ranks"), [(None, 1), (2, 2)])
def test_ranks_that_exchange_heads_share_their_work(size: int | None, ranks: int):
    made = explain(256, strategy=Ulysses(size=size), layout=contiguous, **MODEL)
    assert made.layout_imbalance == pytest.approx(imbalance(contiguous(256, ranks), Causal()))


LLAMA = {"ranks": 4, "heads": 8, "kv_heads": 2, "head_dim": 64}


def test_cudnn_has_a_rate_of_its_own():
    flash, cudnn = (CALL._replace(kernel=f"_scaled_dot_product_{name}_attention") for name in ("flash", "cudnn"))
    times = [H100.kernel_seconds(call) - H100.kernel_floor for call in (flash, cudnn)]
    assert times[0] == pytest.approx(H100.cudnn_rate * times[1], rel=1e-6)
    named = explain(65536, **LLAMA, kernel=CUDA_CUDNN, hardware=H100)
    assert named.seconds < explain(65536, **LLAMA, kernel=CUDA_FLASH, hardware=H100).seconds
    with pytest.raises(ValueError, match="cudnn_rate must be above 0"):
        replace(H100, cudnn_rate=0.0)


def test_the_flash_attention_that_is_active_is_named():
    """FA3 and FA4 replace the implementation of torch's operators."""
    attention = torch.nn.attention
    attention.register_flash_attention_impl("FA of a test", register_fn=lambda: SimpleNamespace(remove=lambda: None))
    shape = {"ranks": 2, "heads": 2, "head_dim": 64, "mask": Causal(), "kernel": CUDA_FLASH}
    try:
        attention.activate_flash_attention_impl("FA of a test")
        named = " ".join(str(explain(4096, **shape)).split())
    finally:
        attention.restore_flash_attention_impl()
    assert "flash_attention: 4 calls on 2 ranks. Flash attention is FA of a test" in named
    assert "Flash attention is" not in str(explain(4096, **shape))


@pytest.mark.parametrize(("nodes", "far"), [(4, None), (2, 2), (1, 3)])
def test_bytes_between_nodes(nodes: int, far: int | None, monkeypatch):
    """Of the machine that is named, else of torchrun's: from a rank as many to each other one, with full attention."""
    options = LLAMA | {"mask": Full(), "layout": contiguous, "strategy": Ring(keep=0)}
    found = explain(8192, **options, hardware=replace(H100, node_ranks=nodes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(nodes))
    for explanation in (found, explain(8192, **options)):
        assert explanation.node_ranks == nodes
        text = str(explanation)
        assert (f"far: to other nodes of {nodes} ranks; Ulysses(inner=Ring(), size={nodes})" in text) == bool(far)
    run = found.runs[0]
    sent = sum((run.forward.sent + run.backward.sent).values())
    rows = [line.split() for line in str(found).split("bytes to and from")[1].splitlines() if line.startswith("  0 ")]
    assert far is None or rows[0][-2:] == format_bytes(sent * far / 3).split()


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
def test_what_a_cuda_kernel_allocates_inside_is_counted(dtype: torch.dtype, kernel: str):
    """In float32: dq and a number for each of 512 rows of 8 heads; flash: dk and dv for each query head."""
    found = explain(2048, **LLAMA | {"dtype": dtype}, layout=contiguous, mask=Full(), strategy=Ring(keep=0))
    inside = found.runs[0].backward.parts["inside of kernels"]
    assert inside == 4 * 8 * 512 * 65 + (2 * 8 * 512 * 128 if kernel == "flash" else 0)
    on_cpu = explain(2048, **LLAMA | {"dtype": dtype}, device="cpu")
    assert not any("inside" in part for part in on_cpu.runs[0].backward.parts)


@sampled(1, layout=[contiguous, head_tail], mask=[Causal(), SlidingWindow(100)])
def test_a_sample_of_many_ranks_has_the_slowest(layout, mask):
    """Which ranks a report of 24 ranks runs: they take as long, and hold as much, as any. Times of near ranks differ by
    a few messages."""
    options = MODEL | {"ranks": 24, "layout": layout, "mask": mask, "hardware": H100}
    sample = explain(24 * 64, **options)
    of_each = [explain(24 * 64, rank=rank, **options) for rank in range(24)]
    assert len(sample.runs) <= 5
    assert sample.peak_memory == max(each.peak_memory for each in of_each)
    for found, times in zip(sample.seconds, zip(*(each.seconds for each in of_each), strict=True), strict=True):
        assert found.total == pytest.approx(max(times).total, rel=0.1)
