"""One small training, alone and under every composition: on threads and on processes.

A composition is a function of the model's making: it takes this rank and returns a ``Training``. What all have in
common: float64, two layers, sequences of 46 cut unevenly, labels that are missing more often in some parts than in
others. So a reducer that averages, or a mean of means, cannot be right by accident.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from cp_styles.batch import global_loss, global_token_count, next_token_labels, shard_batch, sum_gradients
from cp_styles.layouts import SequenceLayout
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from cp_styles.testing import CommunicationTrace
from tests.device import DEVICE, there
from tests.oracle import randn
from tutorials.llama import Llama, LlamaConfig, parallel_plan, rotary_table

CONFIG = LlamaConfig(40, width=32, layers=2, heads=4, kv_heads=2, hidden=48)
ROWS, LENGTH, RANKS, STEPS = 4, 46, 4, 2

# Uneven, but in pairs of tokens: tensor parallelism cuts what a rank holds once more.
LAYOUTS = {
    1: SequenceLayout.from_chunks([[(0, 46)]]),
    2: SequenceLayout.from_chunks([[(0, 10), (30, 46)], [(10, 30)]]),
    4: SequenceLayout.from_chunks([[(0, 6), (40, 46)], [(6, 20)], [(20, 28)], [(28, 40)]]),
}
SEQ_DIMS = {"tokens": 1, "labels": 1}


def new_model(dtype: torch.dtype = torch.float64, layers: int = CONFIG.layers) -> Llama:
    """The same everywhere, without the random generator that threads share."""
    model = Llama(replace(CONFIG, layers=layers)).to(dtype)
    for index, parameter in enumerate(model.parameters()):
        drawn = randn(index, *parameter.shape)
        parameter.data = (drawn * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + drawn / 10).to(dtype)
    return model.to(DEVICE)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = next_token_labels(tokens)
    labels[0, :25] = labels[1, 12:14] = -100
    return {"tokens": there(tokens), "labels": there(labels)}


@dataclass
class Training:
    """``backward(batch)`` returns the loss and leaves the whole gradient; ``named`` are the parameters to compare.
    ``step`` is the same for verify, over ``mesh``."""

    backward: Callable[[dict[str, torch.Tensor]], torch.Tensor]
    model: nn.Module
    step: Callable[[nn.Module, dict[str, torch.Tensor], DeviceMesh], torch.Tensor] | None = None
    mesh: DeviceMesh | None = None
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)

    def run(self, steps: int) -> Training:
        """AdamW steps; keeps the losses, the first step's gradients, and what the second step sent."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        for step in range(steps):
            with CommunicationTrace() as trace:
                self.losses.append(self.backward(batch_of(step)).item())
            if step == 0:
                self.gradients = {name: whole(parameter.grad) for name, parameter in self.named()}
            if step == 1:  # the first sets groups up and looks at parameters
                self.calls = trace.events
            optimizer.step()
            optimizer.zero_grad()
        return self

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name.removeprefix("module."), parameter) for name, parameter in self.model.named_parameters()]

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: whole(parameter) for name, parameter in self.named()}

    def counted(self) -> str:
        """What the second step sent, for ``assert_expected_inline``; of the attention's messages, the bytes."""
        sizes: dict[str, list[int]] = {}
        for name, size in sorted(self.calls):
            sizes.setdefault(name, []).append(size)
        return "\n".join(
            f"{name}: " + ("" if name == "send" else f"{len(each)} calls, ") + f"{sum(each)} bytes"
            for name, each in sizes.items()
        )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@cache
def alone(steps: int, layers: int = CONFIG.layers) -> Training:
    """One process."""
    model = new_model(layers=layers)

    def backward(batch):
        loss = F.cross_entropy(
            model(batch["tokens"], torch.arange(LENGTH, device=DEVICE)).flatten(0, 1), batch["labels"].flatten()
        )
        loss.backward()
        return loss

    return Training(backward, model).run(steps)


def rows_of(batch: dict[str, torch.Tensor], mesh: DeviceMesh | None) -> dict[str, torch.Tensor]:
    """Whole sequences, dealt to the data-parallel ranks of ``mesh``."""
    if mesh is None:
        return batch
    return {name: rows.chunk(mesh.size())[mesh.get_local_rank()] for name, rows in batch.items()}


def token_losses(model: nn.Module, batch: dict[str, torch.Tensor], cp: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed losses of this rank's part, and its labels."""
    layout, rank = LAYOUTS[cp.size()], cp.get_local_rank()
    mine = shard_batch(batch, layout, rank, seq_dims=SEQ_DIMS)
    logits = model(mine["tokens"], layout.positions(rank, DEVICE))
    return F.cross_entropy(logits.flatten(0, 1), mine["labels"].flatten(), reduction="sum"), mine["labels"]


def axis(mesh: DeviceMesh, name: str) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh[name]


def dp_with_cp(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp", "cp"]._flatten("dp_cp")


def training(
    model: nn.Module,
    mesh: DeviceMesh,
    over: Callable[[DeviceMesh], DeviceMesh] = dp_with_cp,
    *,
    averaged_over: Callable[[DeviceMesh], int] = lambda mesh: 1,
    sum_over: Callable[[DeviceMesh], DeviceMesh] | None = None,
) -> Training:
    """The step of all compositions: they differ in who averages and who sums, over what axes of the mesh."""

    def step(model: nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
        dp = mesh["dp"] if "dp" in (mesh.mesh_dim_names or ()) else None
        losses, labels = token_losses(model, rows_of(batch, dp), axis(mesh, "cp"))
        count = global_token_count(labels, over(mesh))
        loss = global_loss(losses, count, over(mesh), averaged_over=averaged_over(mesh))
        loss.backward()
        if sum_over is not None:
            sum_gradients(model, sum_over(mesh))
        return loss

    return Training(partial(step, model, mesh=mesh), model, step, mesh)


def cp_plan(cp: int) -> dict[str, AttentionContextParallel]:
    return {"layers.*.attention.core": AttentionContextParallel(layout=LAYOUTS[cp])}


def shard(model: nn.Module, mesh: DeviceMesh, **options) -> nn.Module:
    """FSDP2 as it is commonly applied: every layer, then the rest."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def dp_cp() -> DeviceMesh:
    """dp 2 x cp 2."""
    return init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "cp"))


def one_cp() -> DeviceMesh:
    return init_device_mesh(DEVICE.type, (RANKS,), mesh_dim_names=("cp",))


def cp_of(mesh: DeviceMesh) -> DeviceMesh:
    return axis(mesh, "cp")


def by_sum_gradients() -> Training:
    mesh = dp_cp()
    model = parallelize_module(new_model(), mesh["cp"], cp_plan(2))
    return training(model, mesh, sum_over=dp_with_cp)


def by_fsdp_over_dp_cp() -> Training:
    mesh = dp_cp()
    model = shard(parallelize_module(new_model(), mesh["cp"], cp_plan(2)), dp_with_cp(mesh))
    return training(model, mesh, averaged_over=DeviceMesh.size)


def by_fsdp_over_cp() -> Training:
    cp = one_cp()
    model = shard(parallelize_module(new_model(), cp, ModuleContextParallel(layout=LAYOUTS[4])), cp)
    return training(model, cp, cp_of, averaged_over=DeviceMesh.size)


def by_ddp_over_cp() -> Training:
    cp = one_cp()
    model = parallelize_module(new_model(), cp, cp_plan(4))
    model = DistributedDataParallel(model, process_group=cp.get_group())
    return training(model, cp, cp_of, averaged_over=DeviceMesh.size)


def by_hsdp() -> Training:
    mesh = dp_cp()
    model = shard(parallelize_module(new_model(), mesh["cp"], cp_plan(2)), mesh["dp", "cp"])
    return training(model, mesh, averaged_over=DeviceMesh.size)


def by_fsdp_over_dp_and_sum_gradients_over_cp() -> Training:
    mesh = dp_cp()
    model = shard(parallelize_module(new_model(), mesh["cp"], cp_plan(2)), mesh["dp"])
    return training(model, mesh, averaged_over=lambda mesh: mesh["dp"].size(), sum_over=cp_of)


def by_fsdp_over_cp_with_tp() -> Training:
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("cp", "tp"))
    attention = AttentionContextParallel(layout=LAYOUTS[2])
    model = shard(parallelize_module(new_model(), mesh, parallel_plan(attention)), mesh["cp"])
    return training(model, mesh, cp_of, averaged_over=lambda mesh: mesh["cp"].size())


class Stage(nn.Module):
    """Some layers of a model, with what stands before the first or after the last; parameters keep their names."""

    def __init__(self, model: Llama, layers: range, positions: torch.Tensor) -> None:
        super().__init__()
        self.config, self.positions = model.config, positions
        if layers.start == 0:
            self.embed = model.embed
        self.layers = nn.ModuleDict({str(index): model.layers[index] for index in layers})
        if layers.stop == len(model.layers):
            self.norm, self.out = model.norm, model.out

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(x) if hasattr(self, "embed") else x
        positions = self.positions if positions is None else positions
        table = rotary_table(positions, self.config.head_dim, self.config.rope_base, x.dtype)
        for layer in self.layers.values():
            x = layer(x, table)
        return self.out(self.norm(x)) if hasattr(self, "out") else x


def by_pipeline() -> Training:
    """Two stages of one layer, each over cp; a micro-batch a row, so that two are under way in every stage."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "cp"))
    pp, index = mesh["pp"], mesh["pp"].get_local_rank()
    model = parallelize_module(new_model(), mesh["cp"], cp_plan(2))
    part = Stage(model, range(index, index + 1), torch.empty(0))
    # A schedule keeps the lengths of its first step: one for each number of ranks, as verify has two.
    schedules: dict[int, Schedule1F1B] = {}
    counts: dict[int, torch.Tensor] = {}

    def step(part: nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
        cp = mesh["cp"]
        layout, rank = LAYOUTS[cp.size()], cp.get_local_rank()
        mine = shard_batch(batch, layout, rank, seq_dims=SEQ_DIMS)
        part.positions = layout.positions(rank, DEVICE)
        counts[cp.size()] = global_token_count(mine["labels"], cp) if index else torch.tensor(0, device=DEVICE)

        def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return global_loss(losses, counts[cp.size()], cp)

        if cp.size() not in schedules:
            stage = PipelineStage(part, index, 2, DEVICE, group=pp.get_group())
            # Not the schedule's division by the number of micro-batches: the losses are shares of one mean already.
            schedules[cp.size()] = Schedule1F1B(stage, ROWS, loss_fn=loss_of, scale_grads=False)
        schedule = schedules[cp.size()]
        losses: list[torch.Tensor] = []
        if index == 0:
            schedule.step(mine["tokens"])
        else:
            schedule.step(target=mine["labels"], losses=losses)
        sum_gradients(part, cp)
        loss = sum(losses, torch.zeros((), dtype=torch.float64, device=DEVICE)).detach()
        torch.distributed.all_reduce(loss, group=pp.get_group())  # for the comparison: only the last stage knows it
        return loss

    return Training(partial(step, part, mesh=mesh), part, step, mesh)


COMPOSITIONS = (
    by_sum_gradients,
    by_fsdp_over_dp_cp,
    by_fsdp_over_cp,
    by_ddp_over_cp,
    by_hsdp,
    by_fsdp_over_dp_and_sum_gradients_over_cp,
    by_fsdp_over_cp_with_tp,
    by_pipeline,
)
