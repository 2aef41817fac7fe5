"""The loss and the gradients of a sequence that is cut, against the same on one device.

float64 throughout: sums over ranks differ from one device's by rounding order only, a few 1e-16 a term; 1e-13 leaves
room for the tens of terms here and none for a wrong weight.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from cp_styles import Checks
from cp_styles.batch import global_loss, global_token_count, sum_gradients
from cp_styles.collectives import GradScale, gather, split
from cp_styles.collectives.notes import ReplicatedGathers
from cp_styles.comm.agreement import WIDTH
from cp_styles.comm.group_state import state_of
from cp_styles.testing import CommunicationTrace, MemoryTrace, run_ranks
from tests.gpu_tensors import gpus
from tests.oracle import error
from tests.ranks.attention_case import cp_mesh, on_every_rank, refused

VOCABULARY, LENGTH = 11, 14


class Model(nn.Module):
    """Position by position, so that the loss and the gradients are all there is to compare."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCABULARY, 8, dtype=torch.float64, generator=generator))
        self.out = nn.Parameter(torch.randn(8, VOCABULARY, dtype=torch.float64, generator=generator))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.table[tokens]) @ self.out


def test_losses_of_low_precision_are_summed_in_float32():
    """4096 ones in bfloat16 add up to 256 when each addition is rounded to bfloat16."""

    def loss_of(rank):
        group = dist.group.WORLD
        labels = torch.zeros(4096, dtype=torch.int64)
        return global_loss(torch.ones(4096, dtype=torch.bfloat16), global_token_count(labels, group), group)

    assert [(loss.item(), loss.dtype) for loss in run_ranks(loss_of, 2)] == [(1.0, torch.float32)] * 2


def test_a_gradient_that_only_some_ranks_have_is_agreed_on():
    def grads(rank):
        first, second, nobody = (nn.Parameter(torch.zeros(4)) for _ in range(3))
        first.grad = torch.full((4,), float(rank + 1))
        if rank == 1:
            second.grad = torch.full((4,), 5.0)
        with CommunicationTrace() as trace:
            sum_gradients([first, second, nobody], dist.group.WORLD)
        return first.grad.tolist(), second.grad.tolist(), nobody.grad, dict(trace.calls)

    # What they are; what they have, and one bucket.
    calls = {"all_gather": 1, "all_reduce": 2}
    assert run_ranks(grads, 3) == [([6.0] * 4, [5.0] * 4, None, calls)] * 3


def test_gradients_travel_in_buckets_of_one_dtype():
    def calls(rank):
        parameters = [nn.Parameter(torch.zeros(256)) for _ in range(6)]
        parameters[3:4] = [nn.Parameter(torch.zeros(256, dtype=torch.float64)), nn.Parameter(torch.zeros(()))]
        generator = torch.Generator().manual_seed(rank)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameters[0].grad = torch.randn(512, generator=generator)[::2]  # strided: written through, not replaced
        given = [parameter.grad.clone() for parameter in parameters]
        views = [parameter.grad for parameter in parameters]
        with CommunicationTrace() as trace:
            sum_gradients(parameters, dist.group.WORLD, bucket_bytes=2048)
        assert all(parameter.grad is view for parameter, view in zip(parameters, views, strict=True))
        return given, views, trace.events

    ranks = run_ranks(calls, 2)
    for index, summed in enumerate(ranks[0][1]):
        assert torch.equal(summed, ranks[0][0][index] + ranks[1][0][index])
        assert torch.equal(summed, ranks[1][1][index])
    # Four integers; then float32: 256 + 256, 256 + a scalar, 256 + 256; then float64: 256.
    sums = [("all_reduce", size) for size in (2048, 1028, 2048, 2048)]
    assert ranks[0][2] == [("all_gather", 8 * WIDTH), *sums]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_extra_memory_is_one_bucket_in_the_dtype_of_the_sum(dtype: torch.dtype):
    """One bucket here, because a thread of the backend may hold the one before for a moment longer."""

    def peak(rank: int) -> int:
        parameters = [nn.Parameter(torch.zeros(2**15, dtype=dtype)) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with MemoryTrace() as trace:
            sum_gradients(parameters, dist.group.WORLD, bucket_bytes=2**16 * dtype.itemsize)
        return trace.peak

    for size in run_ranks(peak, 2):
        assert 2**16 * 4 <= size < 1.05 * 2**16 * 4  # and the numbers by which ranks agree


@pytest.mark.parametrize(("reduce_dtype", "wire"), [(None, 4), (torch.bfloat16, 2), (torch.float64, 8)])
def test_low_precision_gradients_are_summed_in_float32(reduce_dtype, wire: int):
    """And rounded once; summed in bfloat16, where one asks for that, each addition rounds."""
    shares = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).bfloat16()

    def sums(rank):
        parameter = nn.Parameter(torch.zeros(512, dtype=torch.bfloat16))
        parameter.grad = shares[rank].clone()
        with CommunicationTrace() as trace:
            sum_gradients([parameter], dist.group.WORLD, reduce_dtype=reduce_dtype)
        assert trace.events[-1] == ("all_reduce", 2 * 512 * wire * 3 // 4)
        return parameter.grad

    once = shares.double().sum(0).bfloat16()
    for summed in run_ranks(sums, 4):
        assert summed.dtype == torch.bfloat16
        # float32 sums lie exactly between two bfloat16 numbers now and then, and fall to the other side of them.
        assert ((summed != once).sum() <= 2) == (reduce_dtype != torch.bfloat16)


def test_dtensor_parameters_are_summed_by_their_local_tensors_in_the_placements_of_the_parameter():
    """One cp rank has a partial gradient, as sequence-parallel norms do, the other has none yet."""

    def grads(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        cut = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh["tp"], [Shard(0)]))
        norm = nn.Parameter(distribute_tensor(torch.zeros(3), mesh["tp"], [Replicate()]))
        cut.grad = distribute_tensor(torch.arange(8.0).view(4, 2), mesh["tp"], [Shard(0)])
        if mesh["cp"].get_local_rank() == 1:
            norm.grad = DTensor.from_local(torch.ones(3), mesh["tp"], [Partial()])
        sum_gradients([cut, norm], mesh["cp"])
        assert norm.grad.placements == (Replicate(),)
        return cut.grad.full_tensor(), norm.grad.to_local()

    for cut, norm in run_ranks(grads, 4):
        assert torch.equal(cut, 2 * torch.arange(8.0).view(4, 2))
        assert norm.tolist() == [2.0] * 3


def test_ranks_with_different_parameters_fail_on_every_rank():
    def more_of_them(rank: int, mesh: DeviceMesh) -> None:
        sum_gradients([nn.Parameter(torch.zeros(2)) for _ in range(rank + 1)], mesh)

    refused(more_of_them, "disagree on the number of parameters")
    refused(lambda rank, mesh: sum_gradients([nn.Parameter(torch.zeros(2 + rank))], mesh), "disagree on their shapes")


def test_sparse_gradients_are_refused():
    """Of one rank too, where another has none or a dense one."""

    def sparse(rank: int, mesh: DeviceMesh) -> None:
        embedding = nn.Embedding(5, 2, sparse=rank == 1)
        embedding(torch.tensor([1, 3])).sum().backward()
        sum_gradients(embedding, mesh)

    refused(sparse, r"shape \(5, 2\) is sparse", (NotImplementedError, ValueError))


def test_parameters_that_live_on_the_group_are_refused():
    def spread(*_) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh["cp"], [Replicate()]))
        try:
            sum_gradients([parameter.requires_grad_(False)], mesh["cp"])
        except ValueError:
            raise AssertionError("a frozen parameter has nothing to sum, so nothing to refuse") from None
        sum_gradients([parameter.requires_grad_(True)], mesh["cp"])

    refused(spread, "has several of these ranks", ranks=4)


@on_every_rank(1)
def test_a_group_is_one_group_and_a_loss_is_whole():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("cp", "tp"))
    with pytest.raises(ValueError, match=r'needs a 1-D mesh.*mesh\["cp"\]'):
        global_token_count(torch.zeros(1), mesh)
    with pytest.raises(TypeError, match=r"needs a 1-D DeviceMesh, .* or a process group, got str"):
        global_token_count(torch.zeros(1), "cp")
    with pytest.raises(ValueError, match=r"redistribute them to Replicate\(\) first"):
        global_loss(DTensor.from_local(torch.ones(1), mesh["tp"], [Partial()]), 1, mesh["cp"])


@pytest.mark.parametrize("since", ["nothing", "zero_grad", "zeros", "another backward", "over other ranks"])
def test_summed_twice(since: str):
    """A sum of sums, also of sums to which a backward has added, is refused; a gradient of the next step, or a sum over
    another axis, is not."""

    def on(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        layer = nn.Linear(3, 2)
        layer(torch.ones(1, 3)).sum().backward()
        sum_gradients(layer, mesh["cp"])
        if since in ("zero_grad", "zeros"):
            layer.zero_grad(set_to_none=since == "zero_grad")
        if since not in ("nothing", "over other ranks"):
            layer(torch.ones(1, 3)).sum().backward()
        try:
            sum_gradients(layer, mesh["dp" if since == "over other ranks" else "cp"])
        except ValueError as error:
            return str(error)
        return "summed"

    refused = since in ("nothing", "another backward")
    for text in run_ranks(on, 4):
        assert ("is already summed over some of them" if refused else "summed") in text
        assert (text == "summed") != refused


@pytest.mark.parametrize("scale", GradScale)
def test_gradients_in_front_of_a_split(scale: GradScale):
    """They are whole on every rank, and refused; with GradScale.DOWN the sum over ranks is that of one device."""
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    whole = Model()
    torch.tanh(whole.table[tokens] @ whole.out).square().sum().backward()

    def on(rank: int) -> float:
        group, own = cp_mesh(2), Model()
        for _ in range(2):  # another step
            own.zero_grad()
            hidden = split(own.table[tokens] * 1.0, 1, group, grad_scale=scale)
            torch.tanh(hidden @ own.out).square().sum().backward()
            if scale is not GradScale.DOWN:
                with pytest.raises(
                    ValueError, match=r"already summed over some of them, by the backward of collectives"
                ):
                    sum_gradients(own, group)
                sum_gradients([own.out], group)
            else:
                sum_gradients(own, group)
        by = 2 if scale is GradScale.UP else 1
        return max(error(own.table.grad, by * whole.table.grad), error(own.out.grad, whole.out.grad))

    assert max(run_ranks(on, 2)) < 1e-13


@on_every_rank(2)
def test_gradients_between_a_gather_and_a_split_are_shares():
    """What a rank's part went through before it was gathered and split again is not whole."""
    x = torch.ones(1, 4, 3, dtype=torch.float64)
    group, layer = cp_mesh(2), nn.Linear(3, 3).double()
    again = split(gather(layer(x), 1, group, reduce_gradients=False), 1, group)
    again.square().sum().backward()
    sum_gradients(layer, group)


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")
@pytest.mark.parametrize("way", ["its loss divided by the ranks", "global_loss"])
def test_the_loss_of_alst(way: str):
    """As the row of Migration says. The backward of torch's all_gather sums over the ranks, and sum_gradients again."""
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(LENGTH) > LENGTH - 4, -100)  # other counts on the ranks
    whole = Model()
    expected = F.cross_entropy(whole(tokens).flatten(0, 1), labels.flatten())
    expected.backward()

    def on(rank: int) -> float:
        mesh, own = cp_mesh(2), Model()
        logits, mine = own(tokens.chunk(2, 1)[rank]).flatten(0, 1), labels.chunk(2, 1)[rank].flatten()
        if way == "global_loss":
            loss = global_loss(F.cross_entropy(logits, mine, reduction="sum"), global_token_count(mine, mesh), mesh)
            loss.backward()
        else:
            mean, count = F.cross_entropy(logits, mine), (mine != -100).sum()
            means, counts = (dist_functional.all_gather(x, group=mesh.get_group()) for x in (mean, count))
            loss = sum(each * many for each, many in zip(means, counts, strict=True)) / sum(counts)
            (loss / mesh.size()).backward()
        sum_gradients(own, mesh)
        pairs = zip(own.parameters(), whole.parameters(), strict=True)
        return max(error(loss.detach(), expected.detach()), *(error(mine.grad, one.grad) for mine, one in pairs))

    assert max(run_ranks(on, 2)) < 1e-13


class Tower(nn.Module):
    """Layers in front of a gather, and a head behind it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name in ("front", "head"):
            layer = nn.Linear(4, 4).double()
            for parameter in layer.parameters():
                parameter.data.normal_(generator=generator)
            self.add_module(name, layer)


TOWER_INPUT = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def checkpointed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def loss_behind_a_gather(m: Tower, mesh: DeviceMesh | None, recipe: str) -> torch.Tensor:
    """The loss of ``recipe``; of one process without a mesh. Its share, if the recipe divides it."""
    ranks = 1 if mesh is None else mesh.size()

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x if mesh is None else x.chunk(ranks, 1)[mesh.get_local_rank()]

    def gathered(x: torch.Tensor, **options) -> torch.Tensor:
        return x if mesh is None else gather(x, 1, mesh, **options)

    x = m.front(cut(TOWER_INPUT))
    if recipe == "no parameter behind":  # equal shares of the bias in front of the gather: 1 for each token
        return gathered(x, reduce_gradients=False).sum()
    if recipe == "two towers":
        return sum(gathered(tower(cut(TOWER_INPUT)), reduce_gradients=False).sum() for tower in (m.front, m.head))
    if recipe == "in a reentrant checkpoint":
        x = checkpointed(m.front, cut(TOWER_INPUT).detach().requires_grad_())
        return gathered(x, reduce_gradients=False).sum()
    if recipe == "up":
        whole = gathered(x, reduce_gradients=False, grad_scale=GradScale.UP)
        return m.head(whole).square().sum() / ranks
    if recipe == "in front of a split":
        whole = m.front(TOWER_INPUT)
        x = whole if mesh is None else split(whole, 1, mesh, grad_scale=GradScale.DOWN)
        return gathered(x.tanh(), reduce_gradients=False).square().sum()
    if recipe == "two gathers":
        pooled = m.head(gathered(x, reduce_gradients=True).mean(1)).square().sum() / ranks
        return gathered(x, reduce_gradients=False).square().sum() + pooled
    if recipe == "as the error says":
        return m.head(gathered(x, reduce_gradients=True)).tanh().square().sum() / ranks
    assert recipe == "whole"
    return m.head(gathered(x, reduce_gradients=False)).tanh().square().sum()


REFUSED_BEHIND = "the gradients of 2 parameters, of shapes [(4, 4), (4,)], are the same on all ranks"


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("first", [1, 2], ids="step {}".format)
def test_parameters_behind_a_gather_that_are_whole(first: int, backwards: int):
    """In the first step, also with accumulation; and in the second, after one without a parameter there."""

    def on(rank: int) -> str:
        mesh, own = cp_mesh(2), Tower()
        for step in range(1, first + 1):
            own.zero_grad()
            for _ in range(backwards):
                loss_behind_a_gather(own, mesh, "whole" if step == first else "no parameter behind").backward()
            if step < first:
                sum_gradients(own, mesh)
        sum_gradients([], mesh)
        with pytest.raises(ValueError, match="behind a gather with reduce_gradients=False") as refused:
            sum_gradients(own, mesh)
        sum_gradients(own.front, mesh)  # those in front of it are shares
        return str(refused.value)

    for text in run_ranks(on, 2):
        assert REFUSED_BEHIND in text


@pytest.mark.parametrize(
    "recipe",
    [
        "as the error says",
        "no parameter behind",
        "two towers",
        "in a reentrant checkpoint",
        "up",
        "in front of a split",
        "two gathers",
    ],
)
def test_gradients_behind_a_gather_that_are_shares(recipe: str):
    """Ranks have equal gradients of some parameters in all of these, and the sum is exact."""
    whole = Tower()
    loss_behind_a_gather(whole, None, recipe).backward()

    def on(rank: int) -> float:
        mesh, own = cp_mesh(2), Tower()
        for _ in range(2):
            own.zero_grad()
            loss_behind_a_gather(own, mesh, recipe).backward()
            sum_gradients(own, mesh)
        pairs = zip(own.parameters(), whole.parameters(), strict=True)
        return max(error(mine.grad, one.grad) for mine, one in pairs if one.grad is not None)

    assert max(run_ranks(on, 2)) < 1e-13


@on_every_rank(2)
def test_an_overflow_behind_a_gather_is_no_whole_gradient():
    """A GradScaler skips such a step, in which all ranks have the same infinities."""
    mesh, own = cp_mesh(2), Tower()
    (loss_behind_a_gather(own, mesh, "whole") * torch.inf).backward()
    sum_gradients(own, mesh)


@on_every_rank(2)
def test_gathers_of_a_program_that_never_sums():
    """Another reducer may sum. What is noted of its gathers stays small."""
    mesh = cp_mesh(2)
    gathers = state_of(mesh.get_group()).get_or_create(ReplicatedGathers)
    kept = []
    for _ in range(400):
        kept.append(torch.ones(1, 1, requires_grad=True))  # a leaf of its own in each
        gather(kept[-1] * 1, 1, mesh, reduce_gradients=False, checks=Checks(agreement=False)).sum().backward()
    assert len(gathers.in_front) < 300
    assert not gathers.compared


def test_a_count_of_this_rank_alone_is_refused():
    """The mean of each rank's own tokens; or averaged_over on one rank only. The others must hear of it."""
    wrong = {
        "count": lambda rank: {"token_count": torch.tensor(3 + rank)},
        "host": lambda rank: {"token_count": 3 + rank},
        "averaged": lambda rank: {"token_count": 6, "averaged_over": 1 + rank},
    }
    for options in wrong.values():
        act = lambda rank, mesh, of=options: global_loss(torch.ones(3), mesh=mesh, **of(rank))  # noqa: E731
        refused(act, "divide by different numbers")
    words = r"token_count of shape \(2,\) is not one number"
    refused(lambda _, mesh: global_loss(torch.ones(3), torch.ones(2), mesh), words)


def test_losses_of_other_dtypes_on_some_ranks():
    """A rank without tokens makes a zero of its own, in a model of float64."""

    def on(rank):
        losses = torch.full((3,), 0.1, dtype=torch.float64, requires_grad=True) if rank else torch.zeros(())
        loss = global_loss(losses, 3, dist.group.WORLD)
        if rank:
            loss.backward()
            assert torch.equal(losses.grad, torch.full((3,), 1 / 3, dtype=torch.float64))
        return loss

    first, second = run_ranks(on, 2)
    assert (first.dtype, second.dtype) == (torch.float32, torch.float64)
    assert error(second, torch.tensor(0.1, dtype=torch.float64)) < 1e-15  # the rounding of three additions
    assert first == second.float()


def test_a_label_below_zero_is_no_class():
    def act(rank: int, mesh: DeviceMesh) -> None:
        global_token_count(torch.tensor([3, -1 if rank else 2, -100]), mesh)

    refused(act, "labels below 0 that are not ignore_index=-100")

    def remedies(rank):
        labels = torch.tensor([3, -1 if rank else 2, -1])
        counts = [global_token_count(labels, dist.group.WORLD, ignore_index=-1)]
        counts.append(global_token_count(labels.masked_fill(labels < 0, -100), dist.group.WORLD))
        return [count.item() for count in counts]

    assert run_ranks(remedies, 2) == [[3, 3]] * 2


def test_labels_of_unsigned_dtypes_are_counted():
    """uint8 compares 156 and -100 as equal."""
    labels = torch.tensor([156, 3], dtype=torch.uint8)
    assert [int(x) for x in run_ranks(lambda rank: global_token_count(labels, dist.group.WORLD), 2)] == [4, 4]


def test_on_a_gpu_the_host_waits_for_the_first_checks():
    """Later results are not finite."""

    def on(rank: int, right_first: bool) -> list[torch.Tensor]:
        group = dist.group.WORLD
        labels = torch.tensor([3, -1, -100]).to("cuda", non_blocking=True)
        right = torch.tensor([3, 5, -100]).to("cuda", non_blocking=True)
        weight = torch.ones(3).to("cuda", non_blocking=True).requires_grad_()
        if not right_first:
            with pytest.raises(ValueError, match="global_token_count: there are labels below 0"):
                global_token_count(labels, group)
            with pytest.raises(ValueError, match=r"global_loss: the ranks of .* divide by different numbers"):
                global_loss(weight * 1.0, 3 + rank, group)
        counts = [global_token_count(right, group), global_token_count(labels, group)]
        losses = [global_loss(weight * 1.0, 3, group), global_loss(weight * 1.0, 3 + rank, group)]
        losses[1].backward()
        return [x.inner for x in (*counts, *losses, weight.grad)]

    for right_first in (False, True):
        with gpus(waits=["cp_styles.batch.losses.on_host"]) as gpu:
            for four, none, two, odd, grad in run_ranks(partial(on, right_first=right_first), 2):
                assert (four.item(), none.item(), two.item()) == (4, 0, 2.0)
                assert odd.isnan()
                assert grad.isnan().all()
        assert gpu.waits == 2 * 2  # of a count and a loss on each rank


def test_ranks_that_reduce_otherwise():
    def act(rank: int, mesh: DeviceMesh, **options) -> None:
        parameter = nn.Parameter(torch.zeros(4))
        parameter.grad = torch.full((4,), 1.0 + rank)
        sum_gradients([parameter], mesh, **(options if rank else {}))

    for options in ({"bucket_bytes": 8}, {"reduce_dtype": torch.float64}):
        words = rf"disagree on {next(iter(options))}: ranks \[1\] differ from rank 0 \(rank 0: "
        refused(partial(act, **options), words)
