"""Two pipeline stages under 1F1B, each over cp, with a scope for each micro-batch. Without: composition.by_pipeline."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from cp_styles.batch import global_loss, global_token_count, next_token_labels, sum_gradients
from cp_styles.engine.scope import SequenceScope
from cp_styles.layouts import per_document_head_tail
from cp_styles.masks import Documents
from cp_styles.styles import AttentionContextParallel
from cp_styles.testing import run_ranks
from tests.oracle import dense_attention, error
from tests.ranks.composition import LENGTH, ROWS, Stage, batch_of, new_model
from tests.ranks.engine.test_gradients_over_cp import EXACT

# One row of the batch a micro-batch, each packed in its own way.
DOCUMENTS = ([20, 26], [46], [2, 40, 4], [10, 12, 14, 10])
IDS = torch.stack([torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) for sizes in DOCUMENTS])


class OwnScope(nn.Module):
    """A stage that is told which micro-batch it gets, and opens that one's scope around it.

    A scope around ``schedule.step`` would be all micro-batches'. The number comes to every stage as a keyword argument
    of the step, which the schedule cuts like any input.
    """

    def __init__(self, part: Stage, scopes: list[SequenceScope], rank: int, *, recompute: bool) -> None:
        super().__init__()
        self.part, self.scopes, self.rank, self.recompute = part, scopes, rank, recompute

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        scope = self.scopes[int(which)]
        positions = scope.layout.positions(self.rank)
        with scope:
            if not self.recompute:
                return self.part(x, positions)
            return checkpoint(self.part, x, positions, use_reentrant=False, context_fn=scope.for_checkpoint)


class OneDevice(nn.Module):
    """Attention by the oracle, within documents."""

    def forward(self, query, key, value):
        positions = torch.arange(LENGTH)
        same = IDS[self.row][:, None] == IDS[self.row][None, :]
        return dense_attention(query, key, value, same & (positions[None, :] <= positions[:, None]))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_scope_a_micro_batch(recompute: bool):
    tokens = batch_of(0)["tokens"]
    labels = next_token_labels(tokens, document_ids=IDS)

    model = new_model()
    core = model.layers[0].attention.core = model.layers[1].attention.core = OneDevice()
    logits = []
    for core.row in range(ROWS):
        logits.append(model(tokens[core.row : core.row + 1], torch.arange(LENGTH)))
    wanted = F.cross_entropy(torch.cat(logits).flatten(0, 1), labels.flatten())
    wanted.backward()

    def on(rank: int):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
        pp, cp = mesh["pp"], mesh["cp"]
        index, own = pp.get_local_rank(), cp.get_local_rank()
        scopes = [
            SequenceScope(per_document_head_tail(LENGTH, 2, documents=sizes), mask=Documents(tuple(sizes)))
            for sizes in DOCUMENTS
        ]
        assert {scope.layout.lengths for scope in scopes} == {(23, 23)}  # stages send equal shapes
        mine = [
            torch.cat([scope.layout.shard(x[row : row + 1], 1, own) for row, scope in enumerate(scopes)])
            for x in (tokens, labels)
        ]
        count = global_token_count(mine[1], cp)

        def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return global_loss(losses, count, cp)

        parallel = parallelize_module(new_model(), cp, {"layers.*.attention.core": AttentionContextParallel()})
        part = Stage(parallel, range(index, index + 1), torch.empty(0))
        stage = PipelineStage(
            OwnScope(part, scopes, own, recompute=recompute), index, 2, torch.device("cpu"), group=pp.get_group()
        )
        schedule = Schedule1F1B(stage, ROWS, loss_fn=loss_of, scale_grads=False)
        losses: list[torch.Tensor] = []
        which = torch.arange(ROWS)
        if index == 0:
            schedule.step(mine[0], which=which)
        else:
            schedule.step(target=mine[1], losses=losses, which=which)
        sum_gradients(part, cp)
        return losses, {name: parameter.grad for name, parameter in part.named_parameters()}

    named = dict(model.named_parameters())
    seen: set[str] = set()
    for losses, gradients in run_ranks(on, 4):
        if losses:
            assert abs((sum(losses) - wanted).item()) < EXACT
        for name, gradient in gradients.items():
            assert error(gradient, named[name].grad) < EXACT
        seen |= gradients.keys()
    assert seen == named.keys()
