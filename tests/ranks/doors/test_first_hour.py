"""Mistakes of a first hour: each is an error, or a warning, of every rank; and its remedy is exact."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AttentionContextParallel,
    BatchSharder,
    MeanOfMeansWarning,
    ModuleContextParallel,
    context_attention,
    contiguous,
    global_loss,
    global_token_count,
    head_tail,
    sum_gradients,
)
from cp_styles.collectives import gather
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from cp_styles.verify import VerificationError, verify
from tests.covering import at_night, sampled
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, Core, cp_mesh

VOCABULARY, WIDTH, LENGTH = 32, 16, 24
TOKENS = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.core = Core()

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(self.core(q, k, v).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """nanoGPT in small: a table of positions as long as its block, logits, and the loss if it is given targets."""

    def __init__(self, block: int = LENGTH) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(block, WIDTH)
        self.norm, self.attention, self.head = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, VOCABULARY)
        self.double()
        for seed, parameter in enumerate(self.parameters()):  # ranks are threads, which share torch's generator
            parameter.data = randn(seed, *parameter.shape) / 3

    def forward(self, tokens, targets=None, pos=None):
        pos = torch.arange(tokens.shape[1]) if pos is None else pos
        x = self.tokens(tokens) + self.places(pos)
        logits = self.head(x + self.attention(self.norm(x)))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_core(model: GPT, mesh: DeviceMesh) -> Callable[..., Any]:
    return parallelize_module(model, mesh, {"attention.core": AttentionContextParallel()})


def by_module(model: GPT, mesh: DeviceMesh) -> Callable[..., Any]:
    return parallelize_module(model, mesh, ModuleContextParallel())


def by_block(model: GPT, mesh: DeviceMesh) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any):
        with context_parallel(mesh):
            return model(*args, **kwargs)

    return forward


DOORS = [by_core, by_module, by_block]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    full = {name: x.grad for name, x in model.named_parameters()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in full.items() if x is not None}


def expected() -> dict[str, torch.Tensor]:
    model = GPT()
    model(INPUTS, TARGETS).backward()
    return gradients(model)


def off(model: nn.Module) -> float:
    """The largest error of a gradient against one device. Those of key biases are rounding alone, so not counted."""
    found, right = gradients(model), expected()
    assert found.keys() == right.keys()
    return max(error(found[name], right[name]) for name in right if right[name].norm() > 1e-10)


def a_step(model: nn.Module, mesh: DeviceMesh, forward: Callable[..., Any], **options: Any) -> BatchSharder:
    """The loss of a batch that is cut, and its backward."""
    sharder = BatchSharder(mesh, **options)
    batch = sharder({"input_ids": INPUTS, "shift_labels": TARGETS})
    batch.loss(forward(batch.tokens, pos=batch.positions)).backward()
    return sharder


class TestAWholeBatch:
    @sampled(1, door=DOORS, block=[LENGTH, 2 * LENGTH], evaluates=[False, True])
    def test_is_refused_in_training_and_in_evaluation(self, door, block: int, evaluates: bool):
        def on(rank: int) -> float:
            mesh = cp_mesh(2)
            model = GPT(block)
            forward = door(model, mesh)
            if evaluates:  # as nanoGPT's estimate_loss, after steps of a right training: their third forward
                for _ in range(2):
                    a_step(model, mesh, forward).sum_gradients(model)
                    right = 0.0 if block != LENGTH else off(model)
                    model.zero_grad()
                    assert right < EXACT
            with torch.set_grad_enabled(not evaluates):
                forward(INPUTS, TARGETS)
            return 0.0

        for found in run_ranks(on, 2, return_errors=True):
            assert isinstance(found, ValueError)
            assert "all ranks of mesh axis 'cp' were given the same tokens" in str(found)

    @pytest.mark.parametrize("door", DOORS)
    def test_of_equal_tokens_is_no_batch(self, door):
        """A warm-up with zeros, of a model without positions."""

        def on(rank: int) -> None:
            model = GPT()
            model.places.weight.data.zero_()
            door(model, cp_mesh(2))(torch.zeros(1, 8, dtype=torch.int64))

        run_ranks(on, 2)

    def test_that_a_layout_has_cut_may_repeat_itself(self):
        def on(rank: int) -> None:
            mesh = cp_mesh(2)
            model = parallelize_module(GPT(), mesh, ModuleContextParallel(layout=contiguous))
            model.places.weight.data.zero_()
            batch = BatchSharder(mesh, layout=contiguous)(INPUTS.repeat(1, 2))
            model(batch.tokens, pos=torch.zeros(LENGTH, dtype=torch.int64))

        run_ranks(on, 2)

    @pytest.mark.parametrize("causal", [False, True])
    def test_of_a_text_beside_an_image_is_right(self, causal: bool):
        """Attention without an order, over copies of one text: each copy gets what one text would."""

        class Refiner(nn.Module):
            def forward(self, x):
                return F.scaled_dot_product_attention(x, x, x, is_causal=causal)

        x = torch.randn(1, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

        def on(rank: int) -> float:
            return error(parallelize_module(Refiner(), cp_mesh(2), ModuleContextParallel())(x), Refiner()(x))

        found = run_ranks(on, 2, return_errors=True)
        assert all(isinstance(each, ValueError) if causal else each < EXACT for each in found)


class TestAReducerThatAverages:
    def shard(self, model: nn.Module, mesh: DeviceMesh, reducer: str) -> Callable[..., Any]:
        if reducer == "DDP":
            return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
        for layer in [model.attention] if "layers" in reducer else []:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    @sampled(1, reducer=["FSDP2", "FSDP2 of layers", "DDP"], door=[by_core, by_module])
    def test_without_averaged_over_is_refused_and_with_it_exact(self, reducer: str, door):
        def on(rank: int, **options: Any) -> float:
            mesh = cp_mesh(2)
            model = GPT()
            door(model, mesh)
            forward = self.shard(model, mesh, reducer)
            a_step(model, mesh, forward, **options)
            return off(model)

        for found in run_ranks(on, 2, return_errors=True):
            assert isinstance(found, ValueError)
            assert (
                f"{'DistributedDataParallel' if reducer == 'DDP' else 'FSDP2'} averages gradients over 2 of them"
                in str(found)
            )
            assert "averaged_over=2" in str(found)
        assert max(run_ranks(partial(on, averaged_over=2), 2)) < EXACT

    # The axes of the reducer, axes of the loss, averaged_over; and the words of the error.
    RECIPES = (
        (("cp",), ("cp",), 2, ""),
        (("dp", "cp"), ("dp_cp",), 4, ""),  # HSDP
        (("dp_cp",), ("dp_cp",), 4, ""),
        (("dp",), ("dp_cp",), 2, ""),  # and sum_gradients over cp
        (("dp_cp",), ("dp_cp",), 1, ""),  # a reducer that was told to sum
        (("dp_cp",), ("cp",), 2, ""),  # the mean of the means of dp
        (("dp_cp",), ("cp",), 4, "averaged_over=4, and {} averages gradients over 2 of these ranks"),
        (("dp_cp",), ("dp_cp",), 2, "averaged_over=2, and {} averages gradients over 4 of these ranks"),
        (("cp",), ("dp_cp",), 3, "averaged_over=3, and {} averages gradients over 2 of these ranks"),
    )

    @pytest.mark.parametrize("reducer", ["FSDP2", "DDP"])
    @pytest.mark.parametrize("recipe", RECIPES, ids=str)
    def test_averaged_over_is_held_against_the_reducer(self, recipe, reducer: str):
        axes, loss, averaged_over, words = recipe
        if reducer == "DDP" and len(axes) == 2:
            pytest.skip("DDP takes one group")

        def on(rank: int) -> None:
            mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), GPT()
            both = mesh["dp", "cp"]._flatten("dp_cp")
            forward = self.shard(by_module(model, mesh["cp"]), both if "dp_cp" in axes else mesh[axes], reducer)
            loss_mesh = both if loss == ("dp_cp",) else mesh["cp"]
            a_step(model, mesh["cp"], forward, averaged_over=averaged_over, loss_mesh=loss_mesh)

        if not words:
            run_ranks(on, 4)
            return
        found = run_ranks(on, 4, return_errors=True)
        name = "DistributedDataParallel" if reducer == "DDP" else reducer
        assert all(words.format(name) in str(each) for each in found), found

    def test_a_divisor_of_the_user_is_left_to_the_user(self):
        """FSDP2 that divides by 2 in place of 4 ranks."""

        def on(rank: int) -> None:
            mesh, model = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)), GPT().double()
            forward = self.shard(by_module(model, mesh), mesh, "FSDP2")
            forward.set_gradient_divide_factor(2.0)
            part = BatchSharder(mesh, averaged_over=2)({"input_ids": INPUTS, "shift_labels": TARGETS})
            part.loss(forward(part.tokens, pos=part.positions))

        run_ranks(on, 4)

    @sampled(1, door=DOORS, loss=["global", "own"], given=["the reducer", "the model", "a parameter"])
    def test_a_sum_after_ddp_is_refused(self, door, loss: str, given: str):
        """In the second step, after a right sum without DDP. A checkpoint runs the attention again outside of DDP."""

        def on(rank: int) -> None:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
            both, model = mesh["dp", "cp"]._flatten("dp_cp"), GPT()
            model.attention.forward = partial(checkpoint, model.attention.forward, use_reentrant=False)
            a_step(model, mesh["cp"], door(model, mesh["cp"])).sum_gradients(model)
            model.zero_grad()
            ddp = nn.parallel.DistributedDataParallel(model, process_group=both.get_group())
            forward = ddp if door is not by_block else by_block(ddp, mesh["cp"])
            if loss == "global":
                a_step(model, mesh["cp"], forward, averaged_over=2)
            else:
                layout = head_tail(LENGTH, 2)
                part, pos = layout.shard(INPUTS, 1, rank % 2), layout.positions(rank % 2)
                forward(part, layout.shard(TARGETS, 1, rank % 2), pos=pos).backward()
            sums = {"the reducer": ddp, "the model": model, "a parameter": [model.head.weight]}
            sum_gradients(sums[given], mesh["cp"])

        for found in run_ranks(on, 4, return_errors=True):
            assert isinstance(found, ValueError)
            assert "DistributedDataParallel averages the gradients of these parameters over [" in str(found)
            assert "averaged_over=4" in str(found)

    @sampled(1, case=["no_sync", "without it since", "over dp", "a head outside of it", "ignored"], door=DOORS)
    def test_a_sum_of_what_ddp_has_not_reduced_is_exact(self, door, case: str):
        def on(rank: int) -> float:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
            cp, model, ddp_of = mesh["cp"], GPT(), nn.parallel.DistributedDataParallel
            group = mesh["dp"].get_group() if case == "over dp" else cp.get_group()
            alone = door(model, cp)
            if case == "a head outside of it":
                model.attention = ddp_of(model.attention, process_group=group)
                forward = alone
            else:
                if case == "ignored":
                    ignored = [name for name, _ in model.named_parameters() if not name.startswith("norm")]
                    ddp_of._set_params_and_buffers_to_ignore_for_model(model, ignored)
                ddp = ddp_of(model, process_group=group)
                forward = ddp if door is not by_block else by_block(ddp, cp)
            if case in ("no_sync", "without it since"):  # a step that DDP reduces, and whose loss is the user's
                layout = head_tail(LENGTH, 2)
                part, pos = layout.shard(INPUTS, 1, rank % 2), layout.positions(rank % 2)
                forward(part, layout.shard(TARGETS, 1, rank % 2), pos=pos).backward()
                model.zero_grad()
            with ddp.no_sync() if case == "no_sync" else contextlib.nullcontext():
                a_step(model, cp, alone if case == "without it since" else forward, averaged_over=1)
            averaged = {"a head outside of it": "attention.", "ignored": "norm."}.get(case, "none")
            sum_gradients([x for name, x in model.named_parameters() if not name.startswith(averaged)], cp)
            for name, x in model.named_parameters():
                x.grad = x.grad * 2 if name.startswith(averaged) else x.grad
            found = {name.replace("module.", ""): x for name, x in gradients(model).items()}
            right = expected()
            assert found.keys() == right.keys()
            return max(error(found[name], right[name]) for name in right if right[name].norm() > 1e-10)

        assert max(run_ranks(on, 4)) < EXACT

    def test_a_sum_after_ddp_around_functions_is_found_by_verify(self):
        class Function(nn.Module):
            def forward(self, query, key, value):
                return context_attention(query, key, value, self.mesh)

        def step(model, batch, mesh):
            sharder = BatchSharder(mesh, averaged_over=mesh.size())
            part = sharder(batch)
            loss = part.loss(model(part.tokens, pos=part.positions))
            loss.backward()
            sum_gradients(model, mesh)
            return loss

        def on(rank: int) -> None:
            mesh, model = cp_mesh(2), GPT()
            model.attention.core = Function()
            model.attention.core.mesh = mesh
            ddp = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
            verify(ddp, mesh, {"input_ids": INPUTS, "shift_labels": TARGETS}, step)

        for found in run_ranks(on, 2, return_errors=True):
            assert isinstance(found, VerificationError)
            assert "are 2 times the gradients of one process" in str(found)

    def test_over_another_axis_is_no_matter(self):
        """FSDP2 over dp averages the losses of replicas: each is the mean over the tokens of one sequence."""

        def on(rank: int) -> float:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
            model = GPT()
            by_module(model, mesh["cp"])
            fully_shard(model, mesh=mesh["dp"])
            a_step(model, mesh["cp"], model).sum_gradients(model)
            return off(model)

        assert max(run_ranks(on, 4)) < EXACT

    def test_of_another_model_is_no_matter(self):
        def on(rank: int) -> float:
            mesh = cp_mesh(2)
            other, model = GPT(), GPT()
            by_module(other, mesh)
            fully_shard(other, mesh=mesh)
            a_step(other, mesh, other, averaged_over=2)
            by_module(model, mesh)
            a_step(model, mesh, model).sum_gradients(model)
            return off(model)

        assert max(run_ranks(on, 2)) < EXACT

    def test_whose_factor_somebody_has_set_is_told_by_a_one(self):
        def on(rank: int) -> float:
            mesh = cp_mesh(2)
            model = GPT()
            by_module(model, mesh)
            fully_shard(model, mesh=mesh).set_gradient_divide_factor(1.0)
            a_step(model, mesh, model, averaged_over=1)
            return off(model)

        assert max(run_ranks(on, 2)) < EXACT


class TestAMeanOfMeans:
    def said(self, act: Callable[[GPT, DeviceMesh], object], *, verified: bool = False) -> list[str]:
        def on(rank: int) -> None:
            mesh = cp_mesh(2)
            model = GPT()
            parallelize_module(model, mesh, ModuleContextParallel(verified=verified))
            act(model, mesh)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_ranks(on, 2)
        return [str(warning.message) for warning in caught if issubclass(warning.category, MeanOfMeansWarning)]

    def own(self, model: GPT, mesh: DeviceMesh) -> None:
        sharder = BatchSharder(mesh)
        for _ in range(2):
            batch = sharder({"input_ids": INPUTS, "shift_labels": TARGETS})
            model(batch.tokens, batch["shift_labels"], pos=batch.positions).backward()
            sharder.sum_gradients(model)
            model.zero_grad()

    def test_is_told_once(self):
        said = self.said(self.own)
        assert len(said) == 1
        assert "gradients are 2 times too large" in said[0]

    def test_of_a_model_that_was_verified_is_none(self):
        assert self.said(self.own, verified=True) == []

    @pytest.mark.parametrize(
        ("lengths", "lines"),
        [
            ([LENGTH], ["had equally many tokens and labels, so a mean of the ranks' means would not be seen"]),
            ([LENGTH - 1], [""]),
            ([LENGTH, LENGTH - 1], ["had equally many tokens and labels", ""]),
            ([LENGTH - 1, LENGTH], ["", "had equally many tokens and labels"]),
        ],
    )
    def test_stays_after_a_proof_that_could_not_see_it(self, lengths: list[int], lines: list[str]):
        """A step that is right, and takes its mean by itself. A later proof adds what an earlier one did not see."""

        def step(model: nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh) -> None:
            sharder = BatchSharder(mesh)
            part = sharder(batch)
            logits, labels = model(part.tokens, pos=part.positions), part["shift_labels"]
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (losses / batch["input_ids"].numel()).backward()
            sharder.sum_gradients(model)

        def act(model: GPT, mesh: DeviceMesh) -> None:
            for length, line in zip(lengths, lines, strict=True):
                batch = {"input_ids": INPUTS[:, :length], "shift_labels": TARGETS[:, :length]}
                report = verify(model, mesh, batch, step)
                assert line in report.line
                assert bool(report.unseen) == bool(line)
            step(model, {"input_ids": INPUTS, "shift_labels": TARGETS}, mesh)

        assert len(self.said(act)) == (lengths == [LENGTH])

    @pytest.mark.parametrize("loss", ["batch.loss", "global_loss", "token_count", "two sums of one count", "gather"])
    def test_is_none_where_the_loss_is_one_of_all(self, loss: str):
        def act(model: GPT, mesh: DeviceMesh) -> None:
            sharder = BatchSharder(mesh)
            batch = sharder({"input_ids": INPUTS, "shift_labels": TARGETS})
            logits = model(batch.tokens, pos=batch.positions)
            labels = batch["shift_labels"]
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            if loss == "global_loss":
                global_loss(losses, global_token_count(labels, mesh), mesh).backward()
            elif loss == "gather":
                gather(losses[None] / labels.numel() / 2, 0, mesh, reduce_gradients=False).sum().backward()
            elif loss.endswith("count"):
                (losses / batch.token_count()).backward()
            else:
                batch.loss(logits).backward()
            several = loss.startswith("two")
            for parameters in [model.attention.parameters(), model.head.parameters()] if several else [model]:
                sharder.sum_gradients(parameters)
            assert several or off(model) < EXACT

        assert self.said(act) == []

    def test_that_is_an_error_on_one_rank_is_one_on_every_rank(self):
        def on(rank: int) -> None:
            mesh = cp_mesh(2)
            self.own(by_module(GPT(), mesh), mesh)

        with warnings.catch_warnings():
            warnings.simplefilter("error", MeanOfMeansWarning)
            first, second = run_ranks(on, 2, return_errors=True)
        assert isinstance(first, MeanOfMeansWarning)
        assert isinstance(second, ValueError)


@pytest.mark.parametrize("call", ["loss", "count"])
def test_what_one_rank_logs_alone_is_heard_at_once(call: str):
    """The remaining ranks go on to their next batch."""

    def on(rank: int) -> None:
        mesh = cp_mesh(2)
        model = by_module(GPT(), mesh)
        sharder = BatchSharder(mesh)
        for step in range(2):
            batch = sharder({"input_ids": INPUTS, "shift_labels": TARGETS})
            logits = model(batch.tokens, pos=batch.positions)
            batch.loss(logits).backward()
            sharder.sum_gradients(model)
            if step == 0 and rank == 0:
                batch.loss(logits.detach()) if call == "loss" else batch.token_count()

    for found in run_ranks(on, 2, return_errors=True):
        assert isinstance(found, ValueError)
        assert "not at the same place: rank 0 is through with the forward" in str(found)
        assert "rank 1 is cutting a batch" in str(found)


@pytest.mark.parametrize("flattened", [False, True])
def test_ranks_that_attended_elsewhere_meanwhile_make_a_loss_with_the_rest(flattened: bool):
    """Two of four evaluate a copy of the model over a mesh of their own; the batches' tokens are counted after it."""

    def on(rank: int) -> float:
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("cp", "dp"))
        some = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "cp"))["cp"]
        cp, over = mesh["cp"], mesh["cp", "dp"]._flatten("all") if flattened else None
        model, copied = by_module(GPT(), cp), by_module(GPT(), some)
        for _ in range(2):
            sharder = a_step(model, cp, model, loss_mesh=over)
            sharder.sum_gradients(model)
            model.zero_grad()
            if rank < 2:
                with torch.no_grad():
                    batch = BatchSharder(some)({"input_ids": INPUTS})
                    copied(batch.tokens, pos=batch.positions)
            sharder({"input_ids": INPUTS, "shift_labels": TARGETS}).token_count()
        a_step(model, cp, model, loss_mesh=over).sum_gradients(model)
        return off(model)

    assert max(run_ranks(on, 4)) < EXACT


@pytest.mark.parametrize("value", ["batch.loss", "its own"])
def test_a_loop_that_ends_early_ends_on_all_ranks(value: str):
    """By a condition as the page has it: every rank makes as many steps."""

    def on(rank: int) -> int:
        mesh = cp_mesh(2)
        model = by_module(GPT(), mesh)
        sharder, optimizer = BatchSharder(mesh), torch.optim.SGD(model.parameters(), lr=0.5)
        losses: list[float] = []
        while True:
            batch = sharder({"input_ids": INPUTS, "shift_labels": TARGETS})
            logits = model(batch.tokens, pos=batch.positions)
            loss = batch.loss(logits)
            loss.backward()
            sharder.sum_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            stop = loss.detach()
            if value == "its own":
                stop = F.cross_entropy(logits.detach().flatten(0, 1), batch["shift_labels"].flatten())
                dist.all_reduce(stop, group=mesh.get_group())
            losses.append(stop.item())
            if losses[-1] < 0.8 * losses[0]:
                return len(losses)

    first, second = run_ranks(on, 2)
    assert first == second > 1


@pytest.mark.parametrize("styled", [False, True])
def test_a_style_that_is_forgotten_is_told_once(styled: bool, recwarn):
    def on(_rank: int) -> None:
        mesh, model = cp_mesh(2), GPT()
        forward = by_module(model, mesh) if styled else model
        sharder = BatchSharder(mesh)
        for _ in range(2):
            batch = sharder({"input_ids": INPUTS, "shift_labels": TARGETS})
            batch.loss(forward(batch.tokens, pos=batch.positions)).backward()
            sharder.sum_gradients(model)
            model.zero_grad()

    run_ranks(on, 2)
    texts = [str(each.message) for each in recwarn if "ran over its ranks" in str(each.message)]
    assert len(texts) == (0 if styled else 1), texts
    assert styled or "parallelize_module(model, mesh, ModuleContextParallel())" in texts[0]


class TestMoreProcessesThanTheMesh:
    @pytest.mark.parametrize(
        "call",
        [
            lambda mesh: parallelize_module(GPT(), mesh, ModuleContextParallel()),
            lambda mesh: by_core(GPT(), mesh),
            BatchSharder,
            lambda mesh: sum_gradients(nn.Linear(2, 2), mesh),
            lambda mesh: context_attention(*[torch.ones(1, 2, 4, 8)] * 3, mesh),
            lambda mesh: by_block(GPT(), mesh)(INPUTS),
        ],
        ids=["module", "style", "sharder", "sum", "function", "block"],
    )
    def test_is_an_error_on_each_rank_that_is_not_in_it(self, call):
        def on(rank: int) -> None:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
            if rank > 1:
                call(mesh)

        found = run_ranks(on, 4, return_errors=True)
        for rank in (2, 3):
            assert isinstance(found[rank], ValueError)
            assert f"rank {rank} is not in the mesh of ranks [0, 1]" in str(found[rank])

    def test_ranks_outside_of_the_mesh_leave_the_call_out(self):
        def on(rank: int) -> float:
            mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), GPT()
            if mesh.get_coordinate() is None:
                return 0.0
            a_step(model, mesh, by_module(model, mesh)).sum_gradients(model)
            return off(model)

        assert max(run_ranks(on, 4)) < EXACT


@pytest.mark.parametrize("length", [LENGTH - 2, *at_night(LENGTH, LENGTH - 3)])
def test_lengths_that_torchs_sequence_parallelism_does_not_divide(length: int):
    """torch takes parts for equal, and gloo would end the process. Padding as the error says is exact."""
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **dict.fromkeys(["attention.q", "attention.k", "attention.v"], ColwiseParallel()),
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }

    class Plain(GPT):
        def forward(self, tokens, pos=None):
            x = self.tokens(tokens)
            return self.head(x + self.attention(self.norm(x)))

    def on(rank: int, **options: Any) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        model = parallelize_module(Plain(), mesh["tp"], plan)
        parallelize_module(model, mesh, ModuleContextParallel())
        batch = BatchSharder(mesh["cp"], **options)({"input_ids": INPUTS[:, :length]} | _labels(length))
        return batch.loss(model(batch.tokens)).item()

    one = F.cross_entropy(Plain()(INPUTS[:, :length]).flatten(0, 1), TARGETS[:, :length].flatten()).item()
    if length == LENGTH:
        assert run_ranks(on, 4) == pytest.approx([one] * 4, rel=EXACT)
        return
    found = run_ranks(on, 4, return_errors=True)
    assert all(isinstance(each, ValueError) for each in found)
    assert "with SequenceParallel of torch) gets a part of 11 tokens, which 2 tensor-parallel ranks" in str(found)
    assert run_ranks(partial(on, pad_to_multiple_of=8), 4) == pytest.approx([one] * 4, rel=EXACT)


def _labels(length: int) -> dict[str, torch.Tensor]:
    return {"shift_labels": TARGETS[:, :length]}
