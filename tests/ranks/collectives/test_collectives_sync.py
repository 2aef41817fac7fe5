"""sync_inputs: every rank gets equal bits of each sample, and the next is sent while one is used."""

from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_styles.collectives import sync_inputs
from cp_styles.collectives.sync import leaves
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.oracle import randn
from tests.ranks.attention_case import on_every_rank, refused
from tests.ranks.collectives.collectives_reference import world

Point = namedtuple("Point", "x y")

TENSORS = st.builds(
    lambda shape, dtype, seed: randn(seed, *shape).mul(9).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.complex64, torch.float8_e5m2]),
    st.integers(0, 99),
)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just(torch.Size([2])))
SAMPLES = st.recursive(
    st.one_of(TENSORS, PLAIN),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", 3]), inner, max_size=3),
        st.builds(Point, inner, inner),
    ),
    max_leaves=6,
)


def same(left, right) -> bool:
    """Equal in structure, types, dtypes and bits."""
    pairs = list(zip(leaves(left), leaves(right), strict=True))
    if [path for (path, _), _ in pairs] != [path for _, (path, _) in pairs]:
        return False
    for (_, x), (_, y) in pairs:
        if isinstance(x, torch.Tensor):
            if x.dtype != y.dtype or x.shape != y.shape:
                return False
            if not torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (x, y))):
                return False
        elif type(x) is not type(y) or x != y:
            return False
    return True


def nbytes(sample) -> int:
    return sum(x.numel() * x.element_size() for _, x in leaves(sample) if isinstance(x, torch.Tensor))


@settings(max_examples=15, deadline=None)
@given(samples=st.integers(1, 4).flatmap(lambda ranks: st.lists(SAMPLES, min_size=ranks, max_size=ranks)))
def test_every_rank_sees_every_sample(samples):
    def main(rank):
        incoming = sync_inputs(samples[rank], world())
        with CommunicationTrace() as trace:
            seen = list(incoming)
        # Only this rank's own tensors leave it, once for each other rank.
        assert trace.sent_bytes == nbytes(samples[rank]) * (len(samples) - 1)
        return seen

    for seen in run_ranks(main, len(samples)):
        assert len(seen) == len(samples)
        assert all(same(x, y) for x, y in zip(seen, samples, strict=True))


def test_the_next_sample_travels_while_this_one_is_in_use(monkeypatch):
    log: list[list[str]] = [[], []]
    broadcast = dist.broadcast

    def logged(tensor, **kwargs):
        log[kwargs["group"].rank()].append(f"start {kwargs['group_src']}")
        assert kwargs["async_op"]
        return broadcast(tensor, **kwargs)

    monkeypatch.setattr(dist, "broadcast", logged)

    def main(rank):
        for index, sample in enumerate(sync_inputs(torch.full((3,), float(rank)), world())):
            log[rank].append(f"use {index}")
            assert sample.eq(index).all()

    run_ranks(main, 2)
    assert log[0] == log[1] == ["start 0", "start 1", "use 0", "use 1"]


@pytest.mark.parametrize("device", [None, "cpu"])
@on_every_rank(3)
def test_samples_are_data_without_gradients_and_need_not_be_contiguous(rank: int, device):
    own = randn(rank, 3, 4).t().requires_grad_()
    for index, sample in enumerate(sync_inputs({"x": own}, world(), device=device)):
        assert not sample["x"].requires_grad
        assert torch.equal(sample["x"], randn(index, 3, 4).t())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.eye(2).to_sparse(), r"the sample of rank 1 cannot be sent: \['x'\] is a Tensor, not a plain dense"),
        (lambda: None, "the sample of rank 1 cannot be sent: .*pickle"),
    ],
    ids=["sparse", "lambda"],
)
def test_what_one_rank_cannot_send_raises_on_all(bad, message):
    refused(lambda rank, mesh: sync_inputs({"x": bad if rank == 1 else torch.ones(2)}, mesh), message, ranks=3)


def test_no_group_is_the_identity():
    sample = {"x": torch.ones(2)}
    assert [got is sample for got in sync_inputs(sample, None)] == [True]
