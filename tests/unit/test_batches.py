"""Messages of one exchange in batches: each once, few operations in each, and no rank's batch needs two of a peer."""

from collections import defaultdict
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from cp_styles.comm.point_to_point import MOST_OPERATIONS, Message, cut_batches, exchange
from tests.gpu_tensors import BreaksRule, Nccl

# For each pair of ranks, sender and receiver, the sizes of its messages in order.
Table = list[list[list[int]]]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    ranks, most = draw(st.integers(2, 9)), draw(st.integers(0, 5))
    sizes = st.lists(st.integers(0, 2), max_size=most)
    return [[draw(sizes) for _ in range(ranks)] for _ in range(ranks)]


def batches_of_all(table: Table, most: int, cut: Any = cut_batches) -> list[list[list[Message]]]:
    """Of each rank. The number in a message says which one of the table it is."""
    numbers, ranks = count(), range(len(table))
    messages = [[[torch.full((size,), next(numbers)) for size in sizes] for sizes in row] for row in table]
    found = []
    for rank in ranks:
        sends = [(peer, x) for peer in ranks for x in messages[rank][peer] if len(x)]
        receives = [(peer, x) for peer in ranks for x in messages[peer][rank] if len(x)]
        both = [*((False, *pair) for pair in receives), *((True, *pair) for pair in sends)]
        batches = cut([message[:2] for message in both], rank, len(table), most)
        found.append([[both[index] for index in batch] for batch in batches])
    return found


def check(batches: list[list[list[Message]]], table: Table, most: int) -> None:
    ranks, log = range(len(table)), Nccl()
    sent, received = ([defaultdict(list) for _ in ranks] for _ in range(2))
    ends: dict[int, dict[bool, tuple[int, int]]] = defaultdict(dict)  # by message: its batch on either side
    for rank in ranks:
        log.logs[tuple(ranks)][rank].append(("all-reduce",))
        for index, batch in enumerate(batches[rank]):
            assert 0 < len(batch) <= most
            for is_sent, peer, x in batch:
                number = int(x[0])
                (sent if is_sent else received)[rank][peer].append((number, len(x)))
                assert is_sent not in ends[number]
                ends[number][is_sent] = rank, index
            entries = tuple(("send" if is_sent else "recv", peer, len(x)) for is_sent, peer, x in batch)
            log.logs[tuple(ranks)][rank].append(("batch", entries))
    for rank in ranks:
        for peer in ranks:
            assert [size for _, size in sent[rank][peer]] == [size for size in table[rank][peer] if size]
            assert sent[rank][peer] == received[peer][rank] == sorted(sent[rank][peer])
    log.verify()
    # Batches that messages connect, over any number of ranks, are at most one of each rank.
    together: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for message in ends.values():
        joined = set().union(*(together.get(end, {end}) for end in message.values()))
        together |= dict.fromkeys(joined, joined)
    for joined in together.values():
        assert len({rank for rank, _ in joined}) == len(joined)


@given(tables(), st.integers(4, 17))
def test_each_message_is_in_one_batch_and_batches_match(table: Table, most: int):
    check(batches_of_all(table, most), table, most)


@pytest.mark.parametrize("ranks", [65, 66, 129, 130, 300])
@pytest.mark.parametrize("messages", [1, 2])
def test_an_exchange_of_all_ranks(ranks: int, messages: int):
    """One batch for up to 65 ranks; no more operations than the limit for any number."""
    for rank in (0, ranks // 2, ranks - 1):
        peers = [peer for peer in range(ranks) if peer != rank for _ in range(messages)]
        both = [(is_sent, peer) for is_sent in (False, True) for peer in peers]
        sizes = [len(batch) for batch in cut_batches(both, rank, ranks, MOST_OPERATIONS)]
        assert sum(sizes) == 2 * len(peers)
        assert max(sizes) <= MOST_OPERATIONS == 256
        assert len(sizes) == -(-(ranks - 1) // 64)


def naive(messages: list[Message], rank: int, ranks: int, most: int) -> list[range]:
    """What must not be done: each rank's list is cut where the limit is reached."""
    return [range(first, min(first + most, len(messages))) for first in range(0, len(messages), most)]


def test_a_cut_by_place_is_noticed():
    table = [[[1] if peer != rank else [] for peer in range(8)] for rank in range(8)]
    with pytest.raises(BreaksRule, match="wait for each other"):
        check(batches_of_all(table, 4, naive), table, 4)


@pytest.mark.parametrize("batches", [True, False])
def test_messages_make_the_calls_of_torch(monkeypatch, batches: bool):
    """They are the calls of dist.batch_isend_irecv, and on a backend without batches the same single messages."""
    calls: list[tuple[Any, ...]] = []
    for name in ("send", "recv", "_start_coalescing", "_end_coalescing"):

        def call(group: dist.ProcessGroup, *args: Any, name: str = name) -> str:
            calls.append((name, *args))
            return f"work {len(calls)}"

        monkeypatch.setattr(dist.ProcessGroup, name, call)
    backend = SimpleNamespace(supports_coalescing=batches)
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: backend)
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        tag = 2**29  # of the first operation
        x, y, z = (torch.zeros(size) for size in (1, 2, 3))
        kinds = [(dist.isend, 2, y), (dist.isend, 0, z), (dist.irecv, 0, x)]
        ops = [dist.P2POp(kind, tensor, group=group, group_peer=peer, tag=tag) for kind, peer, tensor in kinds]
        works, wanted = dist.batch_isend_irecv(ops), calls[:]
        calls.clear()
        pending = exchange([(2, y), (0, z)], [(0, x)], group)
    finally:
        dist.destroy_process_group()
    assert len(pending.works) == len(works) == (1 if batches else 3)
    assert repr(calls) == repr(wanted)
    assert len(calls) == (5 if batches else 3)
