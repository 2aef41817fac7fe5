"""torch's context-parallel API: lengths, buffers of all kinds, and torch's own settings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention_by_name

from cp_styles import Ring, Ulysses, contiguous, head_tail, striped
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.testing import RankError, run_ranks
from cp_styles.torch_api import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    set_rotate_method,
)
from tests.covering import sampled
from tests.oracle import dense_attention, error, randn
from tests.ranks.attention_case import EXACT, Core, Problem, cp_mesh, on_every_rank, run_attention

RANKS = 2


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_the_backend_of_one_device(backend):
    """It is not that of tiles, which are ours (pytorch#147793)."""
    problem = Problem(length=16, kv_heads=2)

    def rank_main(rank):
        with set_rotate_method("alltoall"), context_parallel(cp_mesh(RANKS)) as block:
            assert block.strategy == Ring()
            return max(run_attention(Core(), problem, rank, RANKS))

    with sdpa_kernel(backend):  # of the process: threads that set and restored it would leave it anyhow
        found = run_ranks(rank_main, RANKS)
    assert max(found) < EXACT


@sampled(1, length=[1, 2, 3, 7, 16, 33], ranks=[1, 2, 3, 4], when=["inside", "after"])
def test_any_length_and_leaves_as_buffers(length, ranks, when):
    """Short sequences (pytorch#159706), lengths that do not divide, buffers that require grad, which torch refuses."""
    problem = Problem(length=length, causal=length % 2 == 1)  # pytorch#141429: not causal, under load balancing

    def rank_main(rank):
        mesh = cp_mesh(ranks)
        q, k, v = (x.clone().requires_grad_() for x in problem.inputs)
        cotangent = problem.cotangent.clone()
        alive = (q * 2).sum()  # a graph of the wholes, made before
        with context_parallel(
            mesh, buffers=[q, k, v, cotangent], buffer_seq_dims=[2, -2, 2, 2], no_restore_buffers={cotangent}
        ):
            assert q.shape[2] == head_tail(length, ranks).lengths[rank]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)
            if when == "inside":
                torch.autograd.backward(out, cotangent)
        if when == "after":
            out.backward(cotangent)
        found = context_parallel_unshard(mesh, [out, q.grad, k.grad, v.grad], [2] * 4)
        assert not any(x.requires_grad for x in found)
        assert all(torch.equal(x, whole) for x, whole in zip((q, k, v), problem.inputs, strict=True))
        q.grad = None
        alive.backward()
        assert torch.equal(q.grad, torch.full_like(q, 2.0))
        return max(error(mine, whole) for mine, whole in zip(found, problem.expected, strict=True))

    assert max(run_ranks(rank_main, ranks)) < EXACT


@pytest.mark.parametrize("door", ["module", "name", "torch._C._nn", "operator"])
@on_every_rank(RANKS)
def test_no_buffers_and_any_import(mesh, door):
    """pytorch#159634; the layout follows from what the ranks hold together."""
    attend = {
        "module": F.scaled_dot_product_attention,
        "name": attention_by_name,
        "torch._C._nn": torch._C._nn.scaled_dot_product_attention,
        "operator": torch.ops.aten.scaled_dot_product_attention,
    }[door]
    problems = [Problem(length=length, causal=False, kv_length=kv) for length, kv in ((5, None), (12, None), (6, 10))]
    errors = []
    with context_parallel(mesh):
        for problem in problems:
            parts = context_parallel_shard(mesh, problem.inputs, [2] * 3)
            (out,) = context_parallel_unshard(mesh, [attend(*parts)], [2])
            errors.append(error(out, problem.expected[0]))
    assert torch.equal(attend(*problems[0].inputs), F.scaled_dot_product_attention(*problems[0].inputs))
    return max(errors)


@on_every_rank(RANKS)
def test_a_result_is_cut_by_context_parallel_shard(mesh, rank: int):
    """It is differentiable: the gradient of what the result was computed from is this rank's share."""
    x = randn(0, 10, 3).requires_grad_()
    (part,) = context_parallel_shard(mesh, [x * 2], [0], head_tail)
    part.square().sum().backward()
    dist.all_reduce(x.grad)
    return error(x.grad, 8 * x)


@pytest.mark.filterwarnings("ignore:.*no attention was called inside")
@on_every_rank(RANKS)
def test_buffers_of_all_kinds(mesh, rank: int):
    length = 10
    layout = head_tail(length, RANKS)
    base = randn(0, 3, length + 4, 6)
    own = base.clone()
    views = [own[:, :length], own[:, 2 : length + 2], own.transpose(0, 1)[:length]]  # of one storage
    expanded = torch.arange(length).expand(3, length)  # position ids, as models make them
    flags, empty = torch.arange(length) > 4, torch.empty(0, length)
    twice = torch.arange(length)
    everything = [*views, expanded, flags, empty, twice, twice]
    dims = [1, 1, 0, 1, 0, 1, 0, -1]
    whole = [x.clone() for x in everything]
    with context_parallel(mesh, buffers=everything, buffer_seq_dims=dims) as block:
        assert block.layout == layout
        for x, saved, dim in zip(everything, whole, dims, strict=True):
            assert torch.equal(x, layout.shard(saved, dim, rank))
        assert torch.equal(own, base)  # what the views are of is not theirs to change
        views[0].mul_(2)
        expanded.add_(1)
        twice.zero_()
        assert torch.equal(own, base)
    assert all(torch.equal(x, saved) for x, saved in zip(everything, whole, strict=True))
    assert torch.equal(own, base)
    own.add_(1)
    assert torch.equal(views[0], base[:, :length] + 1)  # and views of it they still are
    assert all(not hasattr(x, "_cp_styles_cut") for x in everything)


@pytest.mark.filterwarnings("ignore:.*no attention was called inside")
@pytest.mark.parametrize("a_view", [False, True])
def test_a_buffer_that_is_computed_in_place(a_view):
    """Inside, it is what it was computed to be; then it is what it was, and where autograd cannot, an error says so."""
    whole = randn(0, 8, 3)

    def rank_main(rank):
        buffer, weight = whole.clone(), torch.ones(3, dtype=whole.dtype, requires_grad=True)
        buffer = buffer[:] if a_view else buffer
        with context_parallel(cp_mesh(RANKS), buffers=[buffer], buffer_seq_dims=[0]):
            buffer.mul_(weight)
            (buffer * buffer).sum().backward()
        assert torch.equal(buffer, whole)
        assert not buffer.requires_grad
        part = head_tail(8, RANKS).shard(whole, 0, rank)
        return error(weight.grad, (2 * part * part).sum(0))

    if a_view:
        with pytest.raises(RankError, match="a view, was changed in place by a computation with gradient"):
            run_ranks(rank_main, RANKS)
    else:
        assert max(run_ranks(rank_main, RANKS)) < EXACT


@pytest.mark.filterwarnings("ignore:.*no attention was called inside")
@on_every_rank(RANKS)
def test_a_buffer_that_was_filled_again_is_a_whole_one(mesh, rank: int):
    """One tensor for all batches, which the data loader resizes and fills."""
    batches = torch.arange(10).view(1, 10), torch.arange(7).view(1, 7)
    ids = batches[0].clone()
    for whole in batches:
        ids.resize_(whole.shape).copy_(whole)
        with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1], no_restore_buffers=[ids]):
            assert torch.equal(ids, head_tail(whole.shape[1], RANKS).shard(whole, 1, rank))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@on_every_rank(RANKS)
def test_inference_leaves_buffers_that_can_be_trained_with(mesh, mode):
    problem = Problem(length=9)
    q, k, v = (x.clone() for x in problem.inputs)
    with mode(), context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    (out,) = context_parallel_unshard(mesh, [out], [2])
    (q.requires_grad_() * k).sum().backward()
    assert torch.equal(q.grad, problem.inputs[1])
    return error(out, problem.expected[0])


@on_every_rank(4)
def test_a_composed_mesh_by_its_axis():
    """The block of one axis is found by functions that are handed a fresh slice of the mesh."""
    problem = Problem(length=9)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    q, k, v = (x.clone() for x in problem.inputs)
    with context_parallel(mesh["cp"], buffers=[q, k, v], buffer_seq_dims=[2] * 3, layout=contiguous):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        (out,) = context_parallel_unshard(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"], [out], [2])
    return error(out, problem.expected[0])


@on_every_rank(RANKS)
def test_sequences_of_several_lengths_are_said_to_be_such(mesh):
    """Cross-attention: each length is cut on its own. Otherwise a long table would be cut for another one."""
    problem = Problem(length=7, kv_length=12, causal=False)
    q, k, v = (x.clone() for x in problem.inputs)
    with (
        pytest.raises(ValueError, match=r"have \[7, 12, 12\] positions.*table\[:length\].*layout=head_tail"),
        context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3),
    ):
        pass
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3, layout=head_tail):
        out = F.scaled_dot_product_attention(q, k, v)
        (out,) = context_parallel_unshard(mesh, [out], [2])
    return error(out, problem.expected[0])


def test_equal_blocks_share_a_binding_and_count_their_own_calls():
    def rank_main(rank):
        mesh, x, seen = cp_mesh(RANKS), randn(rank, 1, 2, 4, 8), []

        def attend():
            F.scaled_dot_product_attention(x, x, x, is_causal=True)
            mode = AttentionCalls.current()
            assert mode is not None
            seen.append((mode.forward_state.calls, mode.binding))

        for _ in range(2):
            with context_parallel(mesh, layout=contiguous):
                attend()
                with context_parallel(mesh, layout=contiguous):
                    attend()
                    attend()
                attend()
        return [count for count, _ in seen], all(binding is seen[0][1] for _, binding in seen)

    assert run_ranks(rank_main, RANKS) == [([1, 1, 2, 2] * 2, True)] * RANKS


@on_every_rank(RANKS)
def test_the_cut_belongs_to_the_call(mesh):
    """Whatever cuts, one balancer in all three functions; and pytorch's: sharding a batch flips no switch."""
    problem, length = Problem(length=12), 12
    errors = []
    for cut in (head_tail(length, RANKS), head_tail, contiguous, striped, contiguous(length, RANKS)):
        parts = context_parallel_shard(mesh, {"q": problem.inputs[0], "kv": problem.inputs[1]}, {"q": 2, "kv": 2}, cut)
        _ = context_parallel_shard(mesh, [problem.inputs[2]], [2], contiguous)  # another one's, in between
        with context_parallel(mesh, layout=cut, strategy=Ulysses(), mask=None):
            out = F.scaled_dot_product_attention(parts["q"], parts["kv"], parts["kv"], is_causal=True)
            (inside,) = context_parallel_unshard(mesh, [out], [2])
        (outside,) = context_parallel_unshard(mesh, [out], [2], cut)
        assert torch.equal(inside, outside)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        q, k, _ = problem.inputs
        errors.append(error(inside, dense_attention(q, k, k, mask)))
        with pytest.raises(ValueError, match="pass the same layout as load_balancer="):
            context_parallel_unshard(mesh, [out], [2])
    with context_parallel(mesh):
        pass
    context_parallel_unshard(mesh, [out], [2])
    return max(errors)


def test_torchs_switch_of_the_balance(monkeypatch):
    """A program that has switched it off counts on contiguous parts. What a block has cut is put together by that."""
    theirs = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    problem = Problem(length=11)

    def rank_main(rank):
        mesh, q = cp_mesh(RANKS), problem.inputs[0].clone()
        dist.barrier()
        monkeypatch.setattr(theirs._cp_options, "enable_load_balance", False)
        dist.barrier()
        with context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]):
            assert torch.equal(q, contiguous(11, RANKS).shard(problem.inputs[0], 2, rank))
            out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        dist.barrier()
        monkeypatch.setattr(theirs._cp_options, "enable_load_balance", True)
        (whole,) = context_parallel_unshard(mesh, [out], [2])
        mask = torch.ones(11, 11, dtype=torch.bool).tril()
        return error(whole, dense_attention(q, q, q, mask))

    assert max(run_ranks(rank_main, RANKS)) < EXACT


def test_an_in_place_change_of_what_the_backward_needs_is_noticed():
    def rank_main(rank):
        x, weight = torch.ones(8), torch.ones(4, requires_grad=True)
        with context_parallel(cp_mesh(RANKS), buffers=[x], buffer_seq_dims=[0]):
            out = x * weight
            x.add_(1)
            out.sum().backward()

    with pytest.raises(RankError, match="modified by an in-place operation"):
        run_ranks(rank_main, RANKS)
