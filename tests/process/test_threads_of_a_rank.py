"""Two threads of each rank, each with its own model and its own group over the same ranks: two trainings at a time.

In processes: on ranks that are threads, another thread would belong to none of them.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles import BatchSharder, ModuleContextParallel, global_token_count, parallelize_module
from cp_styles.comm.group_state import Forwards, state_of
from tests.oracle import error, filled
from tests.process.several import Program, in_a_world
from tests.ranks.attention_case import EXACT
from tests.tiny_lm import LanguageModel

pytestmark = pytest.mark.process

RANKS, STEPS, WORDS = 2, 12, 17
TOKENS = [torch.randint(WORDS, (2, length), generator=torch.Generator().manual_seed(length)) for length in (12, 9, 15)]


def new_model() -> nn.Module:
    return filled(LanguageModel(WORDS, width=8).double())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def alone(tokens: torch.Tensor) -> list[torch.Tensor]:
    model = new_model()
    nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return gradients(model)


@in_a_world
def run_threads(folder: Path) -> None:
    wanted: list[Any] = [alone(tokens) for tokens in TOKENS]
    found: dict[str, Any] = {}
    groups = [dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=30)) for _ in range(2)]
    meshes = [DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",)) for group in groups]
    models: list[Any] = [parallelize_module(new_model(), mesh, ModuleContextParallel(verified=True)) for mesh in meshes]

    def forward(index: int) -> torch.Tensor:
        return models[index](BatchSharder(meshes[index])(TOKENS[0]).tokens)

    def train(index: int) -> float:
        sharder, model, worst = BatchSharder(meshes[index]), models[index], 0.0
        for step in range(STEPS):
            batch = sharder(TOKENS[step % len(TOKENS)])
            batch.loss(model(batch.tokens)).backward()
            sharder.sum_gradients(model)
            pairs = zip(gradients(model), wanted[step % len(TOKENS)], strict=True)
            worst = max(worst, *(error(*pair) for pair in pairs))
        return worst

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        # The first one has an open forward. The second one counts tokens, then once more behind a forward of its own.
        first.submit(forward, 0).result()
        for act in (lambda: None, lambda: forward(1)):
            second.submit(act).result()
            second.submit(global_token_count, TOKENS[0], meshes[1]).result()
            found.setdefault("is open", []).append(state_of(groups[0]).get_or_create(Forwards).open)
        first.submit(global_token_count, TOKENS[0], meshes[0]).result()
        found["is open"].append(state_of(groups[0]).get_or_create(Forwards).open)
        trained = first.submit(train, 0), second.submit(train, 1)
        found["errors"] = [each.result(100) for each in trained]
    (folder / f"threads {dist.get_rank()}.json").write_text(json.dumps(found))


def new_mesh(name: str) -> DeviceMesh:
    group: Any = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=30))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))


@in_a_world
def run_losses(folder: Path) -> None:
    """The loss is over another group than attention. Then two such trainings at a time."""
    wanted: list[Any] = [alone(tokens) for tokens in TOKENS]
    meshes, losses = ([new_mesh(name) for _ in range(5)] for name in ("cp", "all"))
    models: list[Any] = [parallelize_module(new_model(), mesh, ModuleContextParallel(verified=True)) for mesh in meshes]

    def train(index: int, do: Any = lambda f, *args: f(*args), before: bool = False) -> float:
        sharder, model, worst = BatchSharder(meshes[index], loss_mesh=losses[index]), models[index], 0.0
        for step in range(STEPS):
            batch = do(sharder, TOKENS[step % len(TOKENS)])
            count = batch.token_count() if before else None
            batch.loss(do(model, batch.tokens), token_count=count).backward()
            sharder.sum_gradients(model)
            pairs = zip(gradients(model), wanted[step % len(TOKENS)], strict=True)
            worst = max(worst, *(error(*pair) for pair in pairs))
        return worst

    found = []
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        # The forward is in another thread than the loss: on one rank, and then on both.
        elsewhere = lambda f, *args: first.submit(f, *args).result()  # noqa: E731
        part = TOKENS[0].tensor_split(RANKS, 1)[dist.get_rank()]
        if dist.get_rank():
            with ThreadPoolExecutor(1) as third:
                third.submit(models[4], part).result()
        else:
            models[4](part)
        found.append(float(global_token_count(part, losses[4]) - TOKENS[0].numel()))  # no sharder says whose loss it is
        found += [train(0, elsewhere)] if dist.get_rank() else [train(0)]
        found.append(train(1, elsewhere))
        trained = first.submit(train, 2, before=True), second.submit(train, 3, before=True)
        found += [each.result(100) for each in trained]
    (folder / f"losses {dist.get_rank()}.json").write_text(json.dumps(found))


PROGRAMS = {
    "threads of a rank": Program(RANKS, run_threads, first=2),
    "losses in other threads": Program(RANKS, run_losses, first=2),
}


def test_two_threads_train_two_models(on_processes):
    """Neither waits for a meeting of the other, and the gradients of both are exact."""
    finished = on_processes["threads of a rank"]
    assert finished.statuses == [0] * RANKS, finished.said
    for rank in range(RANKS):
        found = json.loads((finished.folder / f"threads {rank}.json").read_text())
        assert found["is open"] == [True, True, False]
        assert max(found["errors"]) < EXACT


def test_a_forward_in_another_thread_than_its_loss(on_processes):
    """Ranks whose threads differ meet all the same, and two trainings at a time do not meet each other."""
    finished = on_processes["losses in other threads"]
    assert finished.statuses == [0] * RANKS, finished.said
    for rank in range(RANKS):
        found = json.loads((finished.folder / f"losses {rank}.json").read_text())
        assert len(found) == 5
        assert max(found) < EXACT
