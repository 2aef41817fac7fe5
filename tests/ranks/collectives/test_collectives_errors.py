"""An error of one rank raises on every rank, names the rank and the remedy, and no rank waits for a timeout."""

import re
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cp_styles import Checks
from cp_styles.collectives import (
    Padded,
    all_to_all,
    gather,
    heads_to_seq,
    reduce_scatter,
    seq_to_heads,
    split,
)
from cp_styles.collectives.peers import check_dim, compare_calls, get_peers
from cp_styles.comm.agreement import WIDTH, StatusRow
from cp_styles.layouts import head_tail
from cp_styles.testing import CommunicationTrace, run_ranks
from tests.oracle import randn
from tests.ranks.attention_case import on_every_rank, refused
from tests.ranks.collectives.collectives_reference import world

X = torch.zeros(4, 6, 8)
Q = torch.zeros(1, 4, 6, 2)

# A right call of each function, and calls of rank 1 that are wrong, or differ from the right one of the others.
summed = partial(gather, reduce_gradients=True)
RIGHT = {
    "all_to_all": lambda g: all_to_all(X, 1, 0, g),
    "summed": lambda g: summed(X, 0, g),
    "heads_to_seq": lambda g: heads_to_seq(Q, g, heads=12),
    "reduce_scatter": lambda g: reduce_scatter(X, 0, g),
    "seq_to_heads": lambda g: seq_to_heads(Q, g),
    "split": lambda g: split(X, 0, g),
}
WRONG = {
    r"scatter_dim=3 is not a dim of a tensor of shape \(4, 6, 8\)": lambda g: all_to_all(X, 3, 0, g),
    "both dim 0 of .*must differ": lambda g: all_to_all(X, 0, -3, g),
    r"\(3, 2, 2\) add up to 7, but dim 1 of .* has 6": lambda g: all_to_all(X, 1, 0, g, scatter_sizes=[3, 2, 2]),
    r"give rank 1 3, but dim 0 of its \(4, 6, 8\) has 4": lambda g: all_to_all(X, 1, 0, g, gather_sizes=[4, 3, 4]),
    r"one size >= 0 for each of the 3 ranks, got \(3, 3\)": lambda g: all_to_all(X, 1, 0, g, scatter_sizes=[3, 3]),
    "expected a tensor, got list": lambda g: split([1, 2], 0, g),
    r"disagree on dims: .*rank 0: \(1, 0\), rank 1: \(2, 0\)": lambda g: all_to_all(X, 2, 0, g),
    r"disagree on shape of tensor 0: .*rank 0: \(1, 4, 'any', 2\), rank 1: \(2, 4, 'any', 2\)": lambda g: seq_to_heads(
        Q.expand(2, -1, -1, -1), g
    ),
    "disagree on dtype: .*rank 0: torch.float32, rank 1: torch.bfloat16": lambda g: summed(X.bfloat16(), 0, g),
    "disagree on requires_grad: .*rank 1: True": lambda g: reduce_scatter(X.clone().requires_grad_(), 0, g),
    "disagree on reduce_gradients": lambda g: summed(X, 0, g, reduce_gradients=False),
    "disagree on layout: .*rank 0: None, rank 1: 4 positions on 3 ranks": lambda g: split(
        X, 0, g, layout=head_tail(4, 3)
    ),
    "the layout is for 2 ranks, the group has 3: build it for 3": lambda g: split(X, 1, g, layout=head_tail(6, 2)),
    "cuts 7 positions, but dim 2 .* has 6: build": lambda g: heads_to_seq(Q, g, layout=head_tail(7, 3)),
    "gives rank 1 8 positions, but dim 2 .* has 6": lambda g: seq_to_heads(Q, g, layout=Padded(24)),
    "str is not a layout: pass a SequenceLayout": lambda g: summed(X, 0, g, layout="even"),
    "grad_scale must be GradScale.NONE, .*got 'up'": lambda g: split(X, 0, g, grad_scale="up"),
    "4 query heads cannot share 3 key/value heads": lambda g: seq_to_heads((Q, Q[:, :3]), g),
    "one message needs one dtype and the same sizes": lambda g: seq_to_heads((Q, Q.double()), g),
    "got no tensors": lambda g: seq_to_heads((), g),
    "rank 1 has 3 heads .* its share of 12 on 3 ranks is 4": lambda g: heads_to_seq(Q[:, :3], g, heads=12),
    "seq_dim and heads_dim are both dim 1": lambda g: seq_to_heads(Q, g, seq_dim=1),
    r"dtype torch\.uint8 cannot hold fill=-100": lambda g: split(X.byte(), 0, g, layout=Padded(4), fill=-100),
}


@pytest.mark.parametrize("text", WRONG)
def test_every_rank_raises_what_one_did_wrong(text: str):
    wrong, began = WRONG[text], time.monotonic()
    right = next(call for name, call in RIGHT.items() if name in wrong.__code__.co_names)
    errors = run_ranks(lambda rank: (wrong if rank == 1 else right)(world()), 3, return_errors=True)
    assert time.monotonic() - began < 60, "a rank waited for its peers"
    of_1 = errors[1]
    assert isinstance(of_1, ValueError | TypeError), of_1
    assert re.search(f"(?s){text}", str(of_1))
    for error in (errors[0], errors[2]):
        assert isinstance(error, ValueError)
        told = f"have failed, .*; rank 1: {type(of_1).__name__}: {re.escape(str(of_1)[:300])}"
        assert str(error) == str(of_1) if "disagree on" in str(of_1) else re.search(told, str(error))


def test_ranks_that_call_different_functions():
    words = r"disagree on call: ranks \[1\] differ .*\(rank 0: reduce_scatter, rank 1: gather, rank 2: reduce_scatter\)"
    refused(lambda rank, mesh: RIGHT["summed" if rank == 1 else "reduce_scatter"](mesh), words, ranks=3)


def test_the_check_is_one_small_all_gather_and_can_be_left_out():
    def main(rank):
        with CommunicationTrace() as checked:
            split(X, 0, world())
        with CommunicationTrace() as unchecked:
            split(X, 0, world(), checks=Checks(agreement=False))
        with pytest.raises(ValueError, match="scatter_dim=9"):  # this rank's own arguments are checked even so
            all_to_all(X, 9, 0, world(), checks=Checks(agreement=False))
        return checked.events, unchecked.events

    assert run_ranks(main, 2) == [([("all_gather", 8 * WIDTH)], [])] * 2


def test_long_facts_are_compared_by_a_digest():
    """What differs lies far behind what fits into the message."""

    def act(rank: int, mesh) -> None:
        compare_calls(get_peers(mesh), "split", lambda: ({"layout": (1000,) * 100 + (rank,)}, StatusRow()), check=True)

    refused(act, r"disagree on layout: .*rank 0: \(1000, .*crc .*rank 1: \(1000, .*crc")


@on_every_rank(2)
def test_groups_that_are_none(rank: int):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match=r"needs a 1-D mesh, got axes \('dp', 'cp'\): pass mesh\[\"cp\"\]"):
        split(X, 0, mesh)
    with pytest.raises(ValueError, match=r"axes \('dp', 'cp'\), not 'tp'"):
        split(X, 0, (mesh, "tp"))
    for bad in (("cp", mesh), (mesh, 0)):
        with pytest.raises(
            TypeError, match=r"needs a 1-D DeviceMesh, \(mesh, axis name\) or a process group, got tuple"
        ):
            split(X, 0, bad)
    with pytest.raises(TypeError, match=r"needs a 1-D DeviceMesh, .* or a process group, got str"):
        split(X, 0, "cp")
    other = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            split(X, 0, other)


@on_every_rank(2)
def test_dtensors_are_refused_with_the_way_out():
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(X, mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"got a DTensor .*x.to_local\(\)"):
        split(x, 0, mesh)


def test_scalars_have_no_dims():
    with pytest.raises(ValueError, match=r"dim=0 is not a dim of a tensor of shape \(\)"):
        check_dim(randn(0), 0, "dim")
