"""An error of one rank raises on every rank, names the rank and the remedy, and no rank waits for a timeout."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cp_styles.collectives import (
    Padded,
    all_to_all,
    gather,
    gather_outputs,
    heads_to_seq,
    reduce_scatter,
    seq_to_heads,
    slice_inputs,
    split,
)
from cp_styles.collectives.peers import Facts, consult, dim_of, peers_of
from cp_styles.comm.agreement import WIDTH
from cp_styles.layout import head_tail
from cp_styles.testing import CommunicationTrace, RankError, run_ranks
from tests.ranks.collectives.collectives_reference import randn, world

X = torch.zeros(4, 6, 8)
Q = torch.zeros(1, 4, 6, 2)

ON_RANK_1 = {
    # name: (call on rank 1, call on the other ranks, pattern on rank 1, pattern on the others)
    "bad dim": (
        lambda g: all_to_all(X, 3, 0, g),
        lambda g: all_to_all(X, 1, 0, g),
        r"scatter_dim=3 is not a dim of a tensor of shape \(4, 6, 8\)",
        r"other ranks .* raised\nrank 1: ValueError: scatter_dim=3",
    ),
    "equal dims": (
        lambda g: all_to_all(X, 0, -3, g),
        lambda g: all_to_all(X, 1, 0, g),
        "both dim 0 of .*must differ",
        "rank 1: ValueError: .*must differ",
    ),
    "scatter_sizes that do not add up": (
        lambda g: all_to_all(X, 1, 0, g, scatter_sizes=[3, 2, 2]),
        lambda g: all_to_all(X, 1, 0, g, scatter_sizes=[3, 2, 1]),
        r"\(3, 2, 2\) add up to 7, but dim 1 of \(4, 6, 8\) has 6",
        "rank 1: ValueError: scatter_sizes",
    ),
    "gather_sizes of another rank": (
        lambda g: all_to_all(X, 1, 0, g, gather_sizes=[4, 3, 4]),
        lambda g: all_to_all(X, 1, 0, g, gather_sizes=[4, 3, 4]),
        r"give rank 1 3, but dim 0 of its \(4, 6, 8\) has 4",
        "rank 1: ValueError: gather_sizes",
    ),
    "sizes for another number of ranks": (
        lambda g: all_to_all(X, 1, 0, g, scatter_sizes=[3, 3]),
        lambda g: all_to_all(X, 1, 0, g),
        r"one size >= 0 for each of the 3 ranks, got \(3, 3\)",
        "rank 1: ValueError: .*for each of the 3 ranks",
    ),
    "not a tensor": (
        lambda g: split([1, 2], 0, g),
        lambda g: split(X, 0, g),
        "expected a tensor, got list",
        "rank 1: TypeError: expected a tensor",
    ),
    "other dims": (
        lambda g: all_to_all(X, 0, 1, g),
        lambda g: all_to_all(X, 0, 2, g),
        "needs the same .* on every rank",
        "needs the same .*rank 0: .*rank 1: ",
    ),
    "other shape": (
        lambda g: seq_to_heads(torch.zeros(2, 4, 6, 2), g),
        lambda g: seq_to_heads(Q, g),
        r"the same shape .*rank 0: \(1, 4, 'any', 2\), rank 1: \(2, 4, 'any', 2\)",
        "the same shape",
    ),
    "other dtype": (
        lambda g: gather(X.bfloat16(), 0, g, reduce_gradients=True),
        lambda g: gather(X, 0, g, reduce_gradients=True),
        "the same dtype .*rank 0: torch.float32, rank 1: torch.bfloat16",
        "the same dtype",
    ),
    "requires grad on one rank only": (
        lambda g: reduce_scatter(X.clone().requires_grad_(), 0, g),
        lambda g: reduce_scatter(X, 0, g),
        "the same requires_grad .*rank 1: True",
        "the same requires_grad",
    ),
    "another gradient": (
        lambda g: gather(X, 0, g, reduce_gradients=True),
        lambda g: gather(X, 0, g, reduce_gradients=False),
        "the same reduce_gradients",
        "the same reduce_gradients",
    ),
    "another layout": (
        lambda g: split(X, 1, g, layout=head_tail(6, 3)),
        lambda g: split(X, 1, g),
        "the same layout .*rank 0: None, rank 1: 6 positions on 3 ranks",
        "the same layout",
    ),
    "another function": (
        lambda g: gather(X, 1, g, reduce_gradients=True),
        lambda g: reduce_scatter(X, 1, g),
        "the same call .*rank 0: reduce_scatter, rank 1: gather, rank 2: reduce_scatter",
        "the same call",
    ),
    "a layout for other ranks": (
        lambda g: split(X, 1, g, layout=head_tail(6, 2)),
        lambda g: split(X, 1, g, layout=head_tail(6, 3)),
        "the layout is for 2 ranks, the group has 3: build it for 3",
        "rank 1: ValueError: the layout is for 2 ranks",
    ),
    "a layout of another length": (
        lambda g: heads_to_seq(Q, g, layout=head_tail(7, 3)),
        lambda g: heads_to_seq(Q, g, layout=head_tail(6, 3)),
        "cuts 7 positions, but dim 2 .* has 6: build the layout for 6",
        "rank 1: ValueError: the layout cuts 7",
    ),
    "a shard that is not the layout's": (
        lambda g: seq_to_heads(Q, g, layout=Padded(24)),
        lambda g: seq_to_heads(Q, g, layout=Padded(18)),
        "gives rank 1 8 positions, but dim 2 .* has 6",
        "rank 1: ValueError: the layout gives rank 1 8",
    ),
    "not a layout": (
        lambda g: gather(X, 0, g, layout="even", reduce_gradients=True),
        lambda g: gather(X, 0, g, reduce_gradients=True),
        "str does not say how a dim is cut: pass a SequenceLayout",
        "rank 1: TypeError: str does not say",
    ),
    "not a grad scale": (
        lambda g: split(X, 0, g, grad_scale="up"),
        lambda g: split(X, 0, g),
        "grad_scale must be GradScale.NONE, .*got 'up'",
        "rank 1: TypeError: grad_scale",
    ),
    "heads that do not divide": (
        lambda g: seq_to_heads((Q, Q[:, :3]), g),
        lambda g: seq_to_heads((Q, Q), g),
        "4 query heads cannot share 3 key/value heads",
        "rank 1: ValueError: 4 query heads",
    ),
    "tensors that do not fit together": (
        lambda g: seq_to_heads((Q, Q.double()), g),
        lambda g: seq_to_heads((Q, Q), g),
        "one message needs one dtype and the same sizes",
        "rank 1: ValueError: one message",
    ),
    "no tensors": (
        lambda g: seq_to_heads((), g),
        lambda g: seq_to_heads(Q, g),
        "got no tensors",
        "rank 1: ValueError: seq_to_heads got no tensors",
    ),
    "not its share of the heads": (
        lambda g: heads_to_seq(Q[:, :3], g, heads=12),
        lambda g: heads_to_seq(Q, g, heads=12),
        "rank 1 has 3 heads .* its share of 12 on 3 ranks is 4",
        "rank 1: ValueError: rank 1 has 3 heads",
    ),
    "seq and head dim the same": (
        lambda g: seq_to_heads(Q, g, seq_dim=1),
        lambda g: seq_to_heads(Q, g),
        "seq_dim and head_dim are both dim 1",
        "rank 1: ValueError: seq_dim and head_dim",
    ),
    "other keys": (
        lambda g: gather_outputs({"x": X, "y": X}, 0, g, reduce_gradients=True),
        lambda g: gather_outputs({"x": X}, 0, g, reduce_gradients=True),
        r"the same tensors .*rank 1: \[\"\['x'\]\", \"\['y'\]\"\]",
        "the same tensors",
    ),
    "a dim for a key that is not there": (
        lambda g: slice_inputs({"x": X}, {"z": 0}, g),
        lambda g: slice_inputs({"x": X}, {"x": 0}, g),
        r"dim names the keys \['z'\], but there are only \['x'\]",
        "rank 1: ValueError: dim names",
    ),
    "filling that the dtype cannot hold": (
        lambda g: slice_inputs({"x": X.byte()}, {"x": 2}, g, layout=Padded(8), fill={"x": -100}),
        lambda g: slice_inputs({"x": X.byte()}, {"x": 2}, g, layout=Padded(8), fill={"x": 0}),
        r"dtype torch\.uint8 cannot hold fill=-100",
        "rank 1: ValueError: a tensor of dtype torch.uint8",
    ),
    "dims by key without keys": (
        lambda g: slice_inputs([X], {"x": 0}, g),
        lambda g: slice_inputs({"x": X}, {"x": 0}, g),
        "dim and fill by key need a dict of tensors, got list",
        "rank 1: TypeError: dim and fill",
    ),
}


@pytest.mark.parametrize("name", ON_RANK_1)
def test_every_rank_raises_what_one_did_wrong(name):
    wrong, right, on_it, on_others = ON_RANK_1[name]
    began = time.monotonic()
    errors = run_ranks(lambda rank: (wrong if rank == 1 else right)(world()), 3, return_errors=True, timeout_seconds=20)
    assert time.monotonic() - began < 15, "a rank waited for its peers"
    for rank, error in enumerate(errors):
        assert isinstance(error, (ValueError, TypeError)), error
        with pytest.raises((ValueError, TypeError), match="(?s)" + (on_it if rank == 1 else on_others)):
            raise error


def test_the_check_is_one_small_all_gather_and_can_be_left_out():
    def main(rank):
        with CommunicationTrace() as checked:
            split(X, 0, world())
        with CommunicationTrace() as unchecked:
            split(X, 0, world(), check=False)
        with pytest.raises(ValueError, match="scatter_dim=9"):  # this rank's own arguments are checked even so
            all_to_all(X, 9, 0, world(), check=False)
        return checked.events, unchecked.events

    assert run_ranks(main, 2) == [([("all_gather", 8 * WIDTH)], [])] * 2


def test_long_facts_are_compared_by_a_digest():
    """What differs lies far behind what fits into the message."""

    def main(rank):
        consult(peers_of(world()), "split", lambda: Facts({"layout": (1000,) * 100 + (rank,)}), check=True)

    with pytest.raises(RankError, match=r"the same layout .*rank 0: \(1000, .*crc .*rank 1: \(1000, .*crc"):
        run_ranks(main, 2)


def test_groups_that_are_none():
    def main(rank):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
        with pytest.raises(ValueError, match=r"needs a 1-D mesh, got axes \('dp', 'cp'\): pass mesh\[\"cp\"\]"):
            split(X, 0, mesh)
        with pytest.raises(ValueError, match=r"axes \('dp', 'cp'\), not 'tp'"):
            split(X, 0, (mesh, "tp"))
        for bad in (("cp", mesh), (mesh, 0)):
            with pytest.raises(TypeError, match="is not a group: pass a process group"):
                split(X, 0, bad)
        with pytest.raises(TypeError, match="needs a process group or a 1-D DeviceMesh, got str"):
            split(X, 0, "cp")
        other = dist.new_group([0])
        if rank == 1:
            with pytest.raises(ValueError, match="this rank is not in the group"):
                split(X, 0, other)

    run_ranks(main, 2)


def test_dtensors_are_refused_with_the_way_out():
    def main(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(X, mesh, [Shard(0)])
        with pytest.raises(TypeError, match=r"got a DTensor .*x.to_local\(\)"):
            split(x, 0, mesh)

    run_ranks(main, 2)


def test_scalars_have_no_dims():
    with pytest.raises(ValueError, match=r"dim=0 is not a dim of a tensor of shape \(\)"):
        dim_of(randn((), 0), 0, "dim")
