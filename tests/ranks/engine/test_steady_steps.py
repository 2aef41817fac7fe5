"""A step of lengths that were seen before plans nothing, and copies no table of numbers to the device. On tensors that
say they are on a GPU: see tests/gpu_tensors.py."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cp_styles import Causal, Documents, SlidingWindow, context_attention, contiguous, head_tail
from cp_styles._lib import bounded_cache
from cp_styles._lib.bounded_cache import another_cache
from cp_styles._lib.device_copies import DeviceTables, numbers_on
from cp_styles.collectives import seq_to_heads
from cp_styles.comm.checks import CHECKS
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.mixers import Recurrence, context_causal_conv1d, context_recurrence, context_roll
from cp_styles.mixers.convolution import last_rows
from cp_styles.mixers.fragments import CutSequence
from cp_styles.mixers.roll import roll_exchange
from cp_styles.styles.mesh_axes import select_key_heads
from cp_styles.testing import run_ranks
from tests.gpu_tensors import DEVICE, device_ops, gpus, put, read
from tests.oracle import dense_attention, error, randn
from tests.ranks.engine.test_gpu_rules import MASKED
from tests.ranks.mixers.kernels import chunk_gla

LENGTH, RANKS = 24, 3
LAYOUT, DOCUMENTS = head_tail(LENGTH, RANKS), (7, 1, 16)


def rolls(fill: float | None, documents: tuple[int, ...] | None, x: torch.Tensor) -> torch.Tensor:
    return context_roll(x, -2, 1, dist.group.WORLD, fill=fill, documents=documents, layout=LAYOUT)


def convolution(x: torch.Tensor) -> torch.Tensor:
    """With one fragment a rank: in the backward of a split autograd makes zeros of the host for these stand-ins."""
    options = {"width": 4, "seq_dim": 1, "layout": contiguous(LENGTH, RANKS)}
    return context_causal_conv1d(lambda x: x * 2.0, x, dist.group.WORLD, **options)


def end(x: torch.Tensor) -> torch.Tensor:
    sequence = CutSequence.from_call("the end", dist.group.WORLD, LAYOUT, DOCUMENTS, CHECKS)
    return last_rows(sequence, x, 1, 3)


def recurrence(x: torch.Tensor) -> torch.Tensor:
    scan = context_recurrence(
        chunk_gla, dist.group.WORLD, layout=LAYOUT, recurrence=Recurrence(diagonal=True), documents=DOCUMENTS
    )
    q = x.unflatten(2, (2, 3))
    return scan(q, q, q, -q.square())[0]


def heads(x: torch.Tensor) -> torch.Tensor:
    """Rank 1 has query heads 1 and 2 of 4, which share key heads as 1 to 2."""
    q = x[:, :, None].expand(-1, -1, 12, -1).contiguous()
    k = q[:, :, :4].contiguous()
    parts = seq_to_heads((q, k), dist.group.WORLD, seq_dim=1, heads_dim=2, layout=LAYOUT)
    return torch.cat(parts, 2)


def share_of_heads(x: torch.Tensor) -> torch.Tensor:
    return select_key_heads(x[:, None].expand(-1, 3, -1, -1), (0, 0, 1), 1)


def masked(documents: Documents, x: torch.Tensor) -> torch.Tensor:
    """With explicit masks, whose bounds are read at each tile."""
    q = x[:, None, :, :8].contiguous()
    options = {"mask": documents & SlidingWindow(6, 0), "kernel": MASKED, "layout": LAYOUT}
    return context_attention(q, q, q, dist.group.WORLD, **options)


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "roll": partial(rolls, None, None),
    "roll of documents, filled": partial(rolls, -3.0, DOCUMENTS),
    "convolution": convolution,
    "last rows": end,
    "recurrence": recurrence,
    "heads": heads,
    "share of heads": share_of_heads,
    "documents with explicit masks": partial(masked, Documents(DOCUMENTS)),
    "prefixes with explicit masks": partial(masked, Documents(DOCUMENTS, (3, 1, 5))),
}


@pytest.fixture
def plans(monkeypatch) -> threading.local:
    """``made``: how many results this thread has made that are remembered, once it is set."""
    counted, constants = threading.local(), bounded_cache.as_constants

    def counting() -> Any:
        if hasattr(counted, "made"):
            counted.made += 1
        return constants()

    monkeypatch.setattr(bounded_cache, "as_constants", counting)
    return counted


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_second_step_makes_nothing_again(call: Callable[[torch.Tensor], torch.Tensor], plans):
    whole = randn(0, 1, LENGTH, 6 if call is recurrence else 8)

    def on(rank: int) -> list[tuple[int, int]]:
        def step() -> tuple[int, int]:
            x = put(LAYOUT.shard(whole, 1, rank).clone().requires_grad_())
            plans.made = 0
            with device_ops() as ops:
                out = call(x)
                out.backward(put(randn(1, *out.shape)))
            return plans.made, ops["upload"]

        with another_cache():  # of this rank
            return [step() for _ in range(3)]

    with gpus():
        for first, *later in run_ranks(on, RANKS):
            assert max(first) > 0 or call in (heads, masked)
            assert later == [(0, 0)] * 2


def test_decoding_copies_positions_once(monkeypatch):
    # Tensors here are a subclass.
    monkeypatch.setattr("cp_styles.functions.decode.check_plain_mask", lambda tensor: None)
    whole, seen = randn(0, 1, 2, LENGTH + 4, 8), torch.ones(1, 1, 1, LENGTH + 4, dtype=torch.bool)
    seen[..., 5] = False

    def on(rank: int) -> tuple[list[int], torch.Tensor]:
        prompt = put(LAYOUT.shard(whole[:, :, :LENGTH], 2, rank))
        cache, uploads, out = KVCache(dist.group.WORLD, LAYOUT, prompt, prompt), [], prompt
        for length in range(LENGTH + 1, LENGTH + 5):
            new = put(whole[:, :, length - 1 : length])
            cache.append(new, new)
            with device_ops() as ops:
                out = context_decode(new, cache, mask=Causal(), attn_mask=put(seen[..., :length]), kernel=MASKED)
            uploads.append(ops["upload"])
            cache._pending_check = None  # it waits for a number of the step before, as a model does for its token
            assert torch.equal(read(cache.positions(DEVICE)), cache.positions())
        return uploads, read(out)

    with gpus(waits=["cp_styles._lib.checksum.checksum"]):  # of each new mask
        found = run_ranks(on, RANKS)
    wanted = dense_attention(whole[:, :, -1:], whole, whole, seen)
    for (first, *later), out in found:
        assert (first, later) == (1, [0, 0, 0])
        assert error(out, wanted) < 1e-12


@pytest.mark.parametrize("mode", ["inference", "operators", "no_grad"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_first_call_in_another_mode(mode: str, ranks: int):
    """What is remembered of it takes part in training, whose results are those of a first call."""
    whole, cotangent, layout = randn(0, 1, LENGTH, 8), randn(1, 1, LENGTH, 8), contiguous(LENGTH, ranks)
    calls = (
        lambda x: context_roll(x, -2, 1, dist.group.WORLD, fill=-3.0, layout=layout),
        lambda x: context_causal_conv1d(lambda x: x * 2.0, x, dist.group.WORLD, width=4, seq_dim=1, layout=layout),
        lambda x: x.index_select(2, numbers_on(x.device, (0, 0, 1, 2, 3, 4, 5, 6))),
    )
    modes = {"inference": torch.inference_mode, "operators": Operators, "no_grad": torch.no_grad}

    def on(rank: int, first: bool) -> list[torch.Tensor]:
        results = []
        with another_cache():
            for call in calls:
                if first:
                    with modes[mode]():
                        call(layout.shard(whole, 1, rank))
                x = layout.shard(whole, 1, rank).clone().requires_grad_()
                out = call(x)
                out.backward(layout.shard(cotangent, 1, rank))
                results += [out.detach(), x.grad]
        return results

    for mine, wanted in zip(*(run_ranks(on, ranks, first) for first in (True, False)), strict=True):
        assert all(map(torch.equal, mine, wanted))


class Operators(TorchDispatchMode):
    """As those that count, or keep results for a recomputation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket is not torch.ops.aten.repeat_interleave, "the plan"
        return func(*args, **(kwargs or {}))


def test_fake_tensors_are_not_remembered():
    with another_cache(), FakeTensorMode():
        exchange, empty = roll_exchange(LAYOUT, (LENGTH,), -1, False, 0)
    tables = (*exchange.rows.host, *empty.host)
    assert all(type(x) is torch.Tensor for x in tables)
    again, _ = roll_exchange(LAYOUT, (LENGTH,), -1, False, 0)
    assert all(map(torch.equal, exchange.rows.host, again.rows.host))


def test_tables_of_devices(monkeypatch):
    """One copy for each stream, of the latest few; none in what is pickled, and none in a graph that is captured."""
    tables, stream = DeviceTables(torch.arange(4), torch.arange(2)), 1
    assert tables.on(torch.device("cpu")) is tables.host
    meta = torch.device("meta")
    first = tables.on(meta)
    assert all(map(lambda x, y: x is y, first, tables.on(meta)))
    assert [x.shape for x in first] == [(4,), (2,)]
    for other in (copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        assert not other._copies
        assert all(map(torch.equal, other.host, tables.host))
    with gpus():
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream == 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(stream))
        copies = {}
        for stream in (1, 2, 1):
            copies.setdefault(stream, tables.on(DEVICE))
            assert tables.on(DEVICE) is copies[stream]
        assert copies[1] is not copies[2]
        stream = 0
        assert tables.on(DEVICE) is not tables.on(DEVICE)
        for stream in range(3, 9):  # noqa: B007 - the current stream
            tables.on(DEVICE)
        assert len(tables._copies) == 4


class Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number
