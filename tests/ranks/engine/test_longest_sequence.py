"""The command that finds the longest sequence within a memory limit: its search and its measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import Ring, Ulysses, head_tail
from cp_styles.comm.agreement import WIDTH
from cp_styles.strategies import Strategy
from cp_styles.testing import run_ranks
from tutorials.llama import LlamaConfig


@pytest.fixture
def command(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tutorials")
    import longest_sequence

    return longest_sequence


GROWTH = {
    "straight": lambda length: 3000 + 17 * length,
    "bent": lambda length: 3000 + 17 * length + length**2 // 50,
    "in steps": lambda length: 100 * (30 + length // 5),
    "flat, then steep": lambda length: max(3000, 90 * length),
}


@pytest.mark.parametrize("limit", [2000, 3000, 9000, 100_000])
@pytest.mark.parametrize("guess", [0, 40, 30_000])
@pytest.mark.parametrize("name", GROWTH)
def test_the_longest_that_fits_is_found(command, name, guess, limit):
    grows, calls = GROWTH[name], []

    def measure(length: int) -> int:
        calls.append(length)
        return grows(length)

    fits = [length for length in range(8, 30_000, 8) if grows(length) <= limit]
    assert command.longest(measure, limit, 8, guess) == (max(fits) if fits else 0)
    assert len(set(calls)) == len(calls) <= 25, calls


# The tiles of 1, 2 and 4 times as many are not computed in ranges of rows, which take more memory: see CpuFlashKernel.
TOKENS = 352
CONFIG = LlamaConfig(64, width=64, layers=2, heads=4, kv_heads=4, hidden=64)


def growth(command, strategy: Strategy) -> dict[int, int]:
    """Bytes on a rank by the number of ranks that share a sequence, each of which has TOKENS of it."""

    def job(rank: int) -> dict[int, int]:
        found = {}
        for cp in (1, 2, 4):
            mesh = init_device_mesh("cpu", (4 // cp, cp), mesh_dim_names=("dp", "cp"))
            # Twice, because on a busy machine a thread of gloo's may hold a message while the next is made.
            found[cp] = min(command.step_bytes(CONFIG, strategy, mesh, head_tail(TOKENS * cp, cp)) for _ in range(2))
        return found

    return run_ranks(job, 4)[0]


# In float32, of one layer and one rank.
Q_BYTES, K_BYTES = 4 * TOKENS * CONFIG.width, 2 * 4 * TOKENS * CONFIG.width
# A thread of gloo's may hold for a moment longer what was sent last: the loss (4 bytes), or the integers by which ranks
# agree before an attention, WIDTH a rank (416 bytes on four). At most one of each in every layer.
NUMBERS = 4 + CONFIG.layers * 4 * (WIDTH + 1) * 8


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        (Ring(), K_BYTES),
        pytest.param(Ring(keep=0), 0, marks=pytest.mark.nightly),
        pytest.param(Ulysses(), 2 * Q_BYTES + K_BYTES, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_four_ranks_hold_twice_the_sequence_of_two(command, strategy, kept):
    held = growth(command, strategy)
    assert abs(held[4] - held[2]) <= NUMBERS
    assert held[2] - held[1] <= CONFIG.layers * kept + NUMBERS  # what several ranks keep, and one does not


@pytest.mark.nightly
def test_what_does_not_shrink_is_seen(command):
    kept = growth(command, Ring(keep=3))
    # Keys and values of two more ranks, those of all layers.
    assert abs(kept[4] - kept[2] - CONFIG.layers * 2 * K_BYTES) <= NUMBERS
