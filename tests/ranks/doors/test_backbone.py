"""Models with whole inputs and outputs, whose blocks alone are cut: exact by one line, without a factor, or refused."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    AllGather,
    BackboneContextParallel,
    Causal,
    Checks,
    ColwiseParallel,
    ModuleContextParallel,
    RowwiseParallel,
    Ulysses,
    contiguous,
    head_tail,
    parallelize_module,
    striped,
    sum_gradients,
)
from cp_styles.functions.joint_layout import JointLayout
from cp_styles.layouts import Balancer
from cp_styles.mixers import replace_dropout
from cp_styles.testing import CommunicationTrace, RankError, run_ranks
from cp_styles.verify import VerificationError, verify
from tests.covering import at_night, sampled
from tests.oracle import error, randn
from tests.pages import example
from tests.ranks.attention_case import EXACT, cp_mesh
from tests.tiny_lm import SelfAttention

WIDTH, CLASSES, PATCHES = 8, 3, 16
PICTURES, TARGETS = randn(0, 2, 3, 16, 16), torch.tensor([0, 2])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = SelfAttention(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, angles: Any = None, time: Any = None) -> torch.Tensor:
        x = x if angles is None else x * angles["cos"]
        x = x if time is None else x + time[:, None]
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Encoder(nn.Module):
    """An encoder of pictures: 16 patches behind a class token, causal attention, and its own loss if it has targets.

    The class token is added behind the blocks too: a parameter with uses on both sides.
    """

    def __init__(self, angles: Any = None) -> None:
        super().__init__()
        self.patch, self.start = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, PATCHES + 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.angles = angles

    def forward(self, pictures: torch.Tensor, targets: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.run(self.embed(pictures))
        x += 1  # in place, as on one device
        x = self.norm(x)
        logits = self.head((x[:, -1] + x.mean(1) + self.start[0]).tanh())
        return {"logits": logits} | ({} if targets is None else {"loss": F.cross_entropy(logits, targets)})

    def embed(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.patch(pictures).flatten(2).mT
        return torch.cat([self.start.expand(len(x), -1, -1), x], 1) + self.places

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.angles is None else block(x, **self.angles)
        return x


def encoder(**options: Any) -> Encoder:
    torch.manual_seed(0)
    return Encoder(**options).double()


def step(model: Any, pictures: torch.Tensor = PICTURES) -> torch.Tensor:
    """The model's own loss, and one of its logits: both have gradients."""
    out = model(pictures, TARGETS)
    loss = out["loss"] + (out["logits"] * randn(3, *out["logits"].shape)).sum()
    loss.backward()
    return loss.detach()


Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def result(loss: torch.Tensor, model: nn.Module) -> Result:
    grads = {name.removeprefix("module."): x.grad for name, x in model.named_parameters() if x.grad is not None}
    return loss, {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in grads.items()}


def off(found: Result, model: Any, **options: Any) -> float:
    """The error against one process."""
    one = copy.deepcopy(model)
    wanted = result(step(one, **options), one)
    assert found[1].keys() == wanted[1].keys()
    return max(error(found[0], wanted[0]), *(error(found[1][name], x) for name, x in wanted[1].items()))


def of_gradients(grads: dict[str, torch.Tensor], one: nn.Module) -> float:
    """The largest error against the gradients of a model."""
    return max(error(grads[name], x.grad) for name, x in one.named_parameters() if x.grad is not None)


def errors_of(on: Callable[[int], Any], ranks: int = 2) -> str:
    with pytest.raises(RankError) as found:
        run_ranks(on, ranks)
    assert found.value.errors.keys() == {*range(ranks)}
    return str(found.value)


# How a model with the style is trained. Each returns what runs a step; the gradients are then whole.
def summed(model: Any, mesh: Any) -> torch.Tensor:
    loss = step(model)
    sum_gradients(model, mesh)
    return loss


def trained(rank: int, model: Any, ranks: int = 2, way: Callable[[Any, Any], torch.Tensor] = summed, **options: Any):
    """The result of a copy of the model under the style, on this rank."""
    mesh, mine = cp_mesh(ranks), copy.deepcopy(model)
    parallelize_module(mine, mesh, BackboneContextParallel(**options))
    return result(way(mine, mesh), mine)


def largest_error(model: Any, ranks: int = 2, *args: Any, **options: Any) -> float:
    """The largest error of any rank against one process."""
    return max(off(found, model) for found in run_ranks(partial(trained, **options), ranks, model, ranks, *args))


def by_ddp(model: Any, mesh: Any) -> torch.Tensor:
    return step(DistributedDataParallel(model, process_group=mesh.get_group()))


def around_ddp(model: Any, mesh: Any) -> torch.Tensor:
    return step(torch.compile(DistributedDataParallel(model, process_group=mesh.get_group()), backend="aot_eager"))


def by_fsdp(model: Any, mesh: Any) -> torch.Tensor:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return step(model)


def compiled(model: Any, mesh: Any) -> torch.Tensor:
    loss = step(torch.compile(model, backend="aot_eager"))
    sum_gradients(model, mesh)
    return loss


def checkpointed(model: Any, mesh: Any) -> torch.Tensor:
    """The blocks, whose hooks run again with them."""
    model.run = lambda x: [x := checkpoint(block, x, use_reentrant=False) for block in model.blocks][-1]
    return summed(model, mesh)


def checkpointed_whole(model: Any, mesh: Any) -> torch.Tensor:
    def forward(pictures: torch.Tensor, targets: torch.Tensor) -> Any:
        return checkpoint(model, pictures, targets, use_reentrant=False)

    loss = step(forward)
    sum_gradients(model, mesh)
    return loss


def of_a_copy(model: Any, mesh: Any) -> torch.Tensor:
    copied = copy.deepcopy(model)
    loss = step(copied)
    sum_gradients(copied, mesh)
    for x, y in zip(model.parameters(), copied.parameters(), strict=True):
        x.grad = y.grad
    return loss


def accumulated(model: Any, mesh: Any) -> torch.Tensor:
    """Each row is a batch: the model's mean is over one, and the sum of logits has two terms."""
    ddp = DistributedDataParallel(model, process_group=mesh.get_group())
    with ddp.no_sync():
        step(ddp)
    for x in model.parameters():
        assert x.grad is not None
        x.grad *= 0.5
    loss = step(ddp)
    for x in model.parameters():
        x.grad = x.grad / 1.5 if x.grad is not None else None
    return loss


WAYS = [summed, by_ddp, by_fsdp, compiled, around_ddp, checkpointed, checkpointed_whole, of_a_copy, accumulated]
STYLES = {
    "ring": ModuleContextParallel(layout=contiguous),
    "all-gather": ModuleContextParallel(layout=head_tail, strategy=AllGather()),
    "ulysses": ModuleContextParallel(layout=striped, strategy=Ulysses(), mask=Causal()),
    "default": None,
}


@sampled(1, way=WAYS, style=list(STYLES), ranks=[2, 3, 4])
def test_each_way_to_train(way: Callable[[Any, Any], torch.Tensor], style: str, ranks: int):
    """17 tokens, which no number of ranks divides. No loss is divided, and nothing is said about the reducer."""
    assert largest_error(encoder(), ranks, way, style=STYLES[style]) < EXACT


@pytest.mark.parametrize("reducer", ["sum_gradients", "FSDP2", *at_night("DDP")])
def test_with_data_parallel_ranks(reducer: str):
    """Two replicas of two ranks, each with a picture of its own: the mean of their losses."""
    model = encoder()

    def on(rank: int) -> Result:
        mesh, mine = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), copy.deepcopy(model)
        parallelize_module(mine, mesh, BackboneContextParallel())
        row = mesh["dp"].get_local_rank()
        both, called = mesh["dp", "cp"]._flatten("both"), mine
        if reducer == "FSDP2":
            fully_shard(mine, mesh=both)
        if reducer == "DDP":
            called = DistributedDataParallel(mine, process_group=both.get_group())
        logits = called(PICTURES[row : row + 1])["logits"]
        loss = F.cross_entropy(logits, TARGETS[row : row + 1])
        if reducer == "sum_gradients":
            (loss / 2).backward()
            sum_gradients(mine, both)
        else:
            loss.backward()
        return result(loss.detach(), mine)

    one = copy.deepcopy(model)
    F.cross_entropy(one(PICTURES)["logits"], TARGETS).backward()
    for _, grads in run_ranks(on, 4):
        assert of_gradients(grads, one) < EXACT


def test_with_tensor_parallel_ranks():
    model = encoder()
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}

    def on(rank: int) -> Result:
        mesh, mine = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")), copy.deepcopy(model)
        torch_parallel.parallelize_module(mine, mesh["tp"], plan)
        parallelize_module(mine, mesh["cp"], BackboneContextParallel())
        return result(summed(mine, mesh["cp"]), mine)

    assert max(off(found, model) for found in run_ranks(on, 4)) < EXACT


def test_outputs_that_are_dtensors():
    """A head whose classes are cut over tp."""
    torch.manual_seed(0)
    model = encoder()
    model.head = nn.Linear(WIDTH, 4).double()
    plan = {"head": ColwiseParallel(use_local_output=False)}

    def on(rank: int) -> Result:
        mesh, mine = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")), copy.deepcopy(model)
        torch_parallel.parallelize_module(mine, mesh["tp"], plan)
        parallelize_module(mine, mesh["cp"], BackboneContextParallel())
        logits = mine(PICTURES)["logits"]
        loss = F.cross_entropy(logits.full_tensor(), TARGETS)
        loss.backward()
        sum_gradients(mine, mesh["cp"])
        return result(loss.detach(), mine)

    one = copy.deepcopy(model)
    F.cross_entropy(one(PICTURES)["logits"], TARGETS).backward()
    for _, grads in run_ranks(on, 4):
        assert of_gradients(grads, one) < EXACT


class Dropping(nn.Module):
    """A block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.drop = Block(), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.block(x))


def test_dropout_by_position():
    """In the blocks it is equal on any number of ranks. Outside of them tokens are whole, and it is refused."""
    model = encoder()
    model.blocks = nn.ModuleList(Dropping() for _ in range(2)).double()
    model.patch = nn.Sequential(model.patch, nn.Dropout(0.1))
    model.patch[1].eval()  # threads share the generator of a plain dropout

    def on(rank: int, ranks: int, *names: str) -> Result:
        mesh, mine = cp_mesh(ranks), copy.deepcopy(model)
        replace_dropout(mine, mesh, names=names, generator=torch.Generator().manual_seed(3))
        parallelize_module(mine, mesh, BackboneContextParallel(ModuleContextParallel(verified=True)))
        return result(summed(mine, mesh), mine)

    ((loss, wanted),) = run_ranks(on, 1, 1, "blocks.*.drop")
    for found, gradients in run_ranks(on, 3, 3, "blocks.*.drop"):
        assert error(found, loss) < EXACT
        assert max(error(gradients[name], x) for name, x in wanted.items()) < EXACT
    text = errors_of(lambda rank: on(rank, 2))
    assert text.count("['patch.1'] draw by position (replace_dropout) outside of the blocks") == 2


def test_frozen_blocks():
    """A linear probe: no attention has gradients, and DDP still averages the gradients of the head."""
    model = encoder()
    for block in (model.patch, model.blocks):
        block.requires_grad_(False)
    model.start.requires_grad_(False)
    model.places.requires_grad_(False)

    for way in (summed, by_ddp, by_fsdp):
        assert largest_error(model, 2, way) < EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, *at_night(torch.float16)])
def test_low_precision(dtype: torch.dtype):
    """No further from float64 than one device in the same dtype."""
    model = encoder()
    pictures = PICTURES.to(dtype)

    def on(rank: int) -> Result:
        mesh, mine = cp_mesh(2), copy.deepcopy(model).to(dtype)
        parallelize_module(mine, mesh, BackboneContextParallel())
        loss = mine(pictures, TARGETS)["loss"]
        loss.backward()
        sum_gradients(mine, mesh)
        return result(loss.detach(), mine)

    exact, one = copy.deepcopy(model), copy.deepcopy(model).to(dtype)
    for each, x in ((exact, pictures.double()), (one, pictures)):
        each(x, TARGETS)["loss"].backward()
    largest = max(float(x.grad.norm()) for x in exact.parameters() if x.grad is not None)
    for _, grads in run_ranks(on, 2):
        for name, x in exact.named_parameters():
            assert x.grad is not None
            alone = dict(one.named_parameters())[name].grad
            assert alone is not None
            floor = 1e-2 * largest
            assert (grads[name].double() - x.grad).norm() < 2 * (alone.double() - x.grad).norm() + floor


class Reentrant(nn.Module):
    """A whole model in a checkpoint whose first run has no gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.model(x)["logits"], pictures, use_reentrant=True)


@pytest.mark.parametrize("reduced", [True, False])
def test_a_reentrant_checkpoint_around_the_model(reduced: bool):
    """The recomputation runs in a backward, outside of the DDP module."""
    model = encoder()

    def run(called: Any) -> torch.Tensor:
        loss = F.cross_entropy(called(PICTURES.clone().requires_grad_()), TARGETS)
        loss.backward()
        return loss.detach()

    def on(rank: int) -> Result:
        mesh, mine = cp_mesh(2), copy.deepcopy(model)
        parallelize_module(mine, mesh, BackboneContextParallel())
        called = Reentrant(mine)
        loss = run(DistributedDataParallel(called, process_group=mesh.get_group()) if reduced else called)
        if not reduced:
            sum_gradients(mine, mesh)
        return result(loss, mine)

    one = copy.deepcopy(model)
    loss = run(lambda x: one(x)["logits"])
    for found, grads in run_ranks(on, 2):
        assert error(found, loss) < EXACT
        assert of_gradients(grads, one) < EXACT


def test_gradients_of_inputs_are_shares():
    model, inputs = encoder(), PICTURES.clone().requires_grad_()
    step(copy.deepcopy(model), inputs)

    def on(rank: int) -> torch.Tensor:
        mesh, mine, x = cp_mesh(2), copy.deepcopy(model), PICTURES.clone().requires_grad_()
        parallelize_module(mine, mesh, BackboneContextParallel())
        step(mine, x)
        assert x.grad is not None
        return x.grad

    assert inputs.grad is not None
    assert error(sum(run_ranks(on, 2)), inputs.grad) < EXACT


def test_a_loss_that_is_changed_in_place():
    model = encoder()

    def on(rank: int) -> Result:
        mesh, mine = cp_mesh(2), copy.deepcopy(model)
        parallelize_module(mine, mesh, BackboneContextParallel())
        out = mine(PICTURES, TARGETS)
        loss = out["loss"]
        loss *= 4
        loss /= 4
        out["logits"] *= 1
        loss += (out["logits"] * randn(3, *out["logits"].shape)).sum()
        loss.backward()
        sum_gradients(mine, mesh)
        return result(loss.detach(), mine)

    assert max(off(found, model) for found in run_ranks(on, 2)) < EXACT


class Chosen(Encoder):
    """Returns the hidden states between the blocks too."""

    def forward(self, pictures: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.embed(pictures)
        states = [x := block(x) for block in self.blocks]
        return {"loss": self.head(x[:, 0]).square().sum(), "logits": torch.stack([x[:, :2] for x in states[-1:]])} | {
            f"state {at}": x for at, x in enumerate(states)
        }


def test_hidden_states_between_the_blocks_are_gathered():
    torch.manual_seed(0)
    model = Chosen().double()

    def trained(mine: Any) -> Result:
        out = mine(PICTURES)
        loss = sum(((x * randn(at, *x.shape)).sum() for at, x in enumerate(out.values())), torch.zeros(()))
        loss.backward()
        return result(loss.detach(), mine)

    def on(rank: int) -> Result:
        mesh, mine = cp_mesh(3), copy.deepcopy(model)
        parallelize_module(mine, mesh, BackboneContextParallel())
        loss, _ = trained(mine)
        sum_gradients(mine, mesh)
        return result(loss, mine)

    wanted = trained(copy.deepcopy(model))
    for loss, grads in run_ranks(on, 3):
        assert error(loss, wanted[0]) < EXACT
        assert max(error(grads[name], x) for name, x in wanted[1].items()) < EXACT


def test_arguments_of_blocks():
    """Tables along the sequence, in a dict, and a number for all tokens: refused by default, exact with their dims."""
    model = encoder(angles={"angles": {"cos": randn(5, PATCHES + 1, WIDTH)}, "time": randn(6, 2, WIDTH)})

    text = errors_of(partial(trained, model=model))
    assert "blocks is given angles of shape (17, 8), whose sequence dim is not known: give seq_dims=" in text
    dims = {"angles": 0, "time": None}
    assert largest_error(model, seq_dims=dims) < EXACT
    wrong = errors_of(partial(trained, model=model, seq_dims=dims | {"time": 0}))
    assert "is given time with 2 rows for 17 tokens" in wrong


class Between(Encoder):
    """``makes`` gives each block what it multiplies its hidden states with: of the block's number, of the hidden states
    that there are, and of the positions that are made in front of the loop. ``call`` runs a block."""

    makes: Callable[[int, list[torch.Tensor], torch.Tensor], torch.Tensor]
    call: Callable[..., torch.Tensor]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        once, states = count(x), [x]
        for at, block in enumerate(self.blocks):
            states.append(self.call(at, block, states[-1], self.makes(at, states, once)))
        return states[-1]


def count(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1])[:, None]


def call_block(at: int, block: Any, x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    return block(x, {"cos": cos})


def between(makes: Any, call: Any = call_block) -> Between:
    torch.manual_seed(0)
    model = Between().double()
    model.makes, model.call = makes, call
    return model


RIGHT = {
    "once": lambda at, states, once: once / 9,
    "of hidden states": lambda at, states, once: states[max(0, at - 1)].tanh(),
    "an output of a block": lambda at, states, once: states[max(0, at - 1)],
    "a detached output of a block": lambda at, states, once: states[max(0, at - 1)].detach(),
}
MADE_IN_THE_LOOP = {
    "integers": lambda at, states, once: count(states[-1]),
    "angles": lambda at, states, once: count(states[-1]).cos(),
    "of detached hidden states": lambda at, states, once: states[max(0, at - 1)].detach().tanh(),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("makes", RIGHT)
def test_positions_between_the_blocks(makes: str, reentrant: bool | None):
    """Made once, in front of the loop, they are cut for each block. Hidden states go from block to block."""

    def call(at: int, block: Any, x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        if reentrant is None or at:
            return call_block(at, block, x, cos)
        return checkpoint(call_block, at, block, x, cos, use_reentrant=reentrant)

    model = between(RIGHT[makes], call)

    def on(rank: int) -> Result:
        mesh, mine = cp_mesh(3), copy.deepcopy(model)
        parallelize_module(mine, mesh, BackboneContextParallel(seq_dims={"angles": -2}))
        found = result(summed(mine, mesh), mine)
        with torch.no_grad():
            assert error(mine(PICTURES)["logits"], wanted) < EXACT
        return found

    with torch.no_grad():
        wanted = copy.deepcopy(model)(PICTURES)["logits"]
    assert max(off(found, model) for found in run_ranks(on, 3)) < EXACT


def test_a_table_that_is_filled_again_for_each_block():
    """By .data, which raises no version."""

    def flip(at: int, states: list[torch.Tensor], once: torch.Tensor) -> torch.Tensor:
        once.data.copy_(once.flip(0))
        return once

    model = between(flip)
    with torch.no_grad():
        wanted = copy.deepcopy(model)(PICTURES)["logits"]

    def on(rank: int) -> float:
        with torch.no_grad():
            mine = parallelize_module(copy.deepcopy(model), cp_mesh(3), BackboneContextParallel(seq_dims={"angles": 0}))
            return error(mine(PICTURES)["logits"], wanted)

    assert max(run_ranks(on, 3)) < EXACT


@pytest.mark.parametrize("makes", MADE_IN_THE_LOOP)
def test_positions_that_are_made_in_the_loop(makes: str):
    """Without gradients floats may come from hidden states; integers are refused there too."""
    model, style = between(MADE_IN_THE_LOOP[makes]), BackboneContextParallel(seq_dims={"angles": -2})

    def on(rank: int, grad: bool) -> None:
        with torch.set_grad_enabled(grad):
            parallelize_module(copy.deepcopy(model), cp_mesh(2), style)(PICTURES)

    for grad in {True, makes != "integers"}:
        text = errors_of(partial(on, grad=grad))
        assert re.search(
            r"given angles of shape \([\d, ]*(8|9), \d+\), which was made between the blocks, for this", text
        )
        assert 'from the whole sequence, and give seq_dims={"angles": -2}' in text
        assert "computed from detached hidden states, hand these to the block, which computes it" in text


class Computing(Block):
    """A block that computes what it multiplies with, as the error says."""

    def forward(self, x: torch.Tensor, angles: Any = None) -> torch.Tensor:
        return super().forward(x, {"cos": angles["cos"].tanh()})


def test_detached_hidden_states_are_handed_to_the_block():
    model = between(RIGHT["a detached output of a block"])
    model.blocks = nn.ModuleList(Computing() for _ in range(3)).double()

    assert largest_error(model, seq_dims={"angles": -2}) < EXACT


class Reading(Block):
    """A block that reads a text, and hands it on as ``encoder_hidden_states``."""

    def forward(self, x: torch.Tensor, encoder_hidden_states: torch.Tensor) -> Any:
        q, kv = x[:, None], encoder_hidden_states[:, None]
        read = F.scaled_dot_product_attention(q, kv, kv)[:, 0]
        return super().forward(x + read), encoder_hidden_states.tanh()


class ReadingEncoder(Encoder):
    def __init__(self, length: int, *, hands_on: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reading() for _ in range(3))
        self.text, self.hands_on = nn.Parameter(torch.randn(2, length, WIDTH)), hands_on

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x, text = x[:, 1:], self.text
        for block in self.blocks:
            x, after = block(x, text)
            text = after if self.hands_on else text
        return x


@pytest.mark.parametrize("hands_on", [True, False])
@pytest.mark.parametrize("length", [PATCHES // 2, 9])
def test_a_text_of_a_parts_length(length: int, hands_on: bool):
    """A text of 8 tokens is cut for each block although parts of the 16 patches have 8; what a block returns is not."""
    torch.manual_seed(0)
    assert largest_error(ReadingEncoder(length, hands_on=hands_on).double()) < EXACT


def test_a_dim_that_an_argument_does_not_have():
    model, style = encoder(angles={"time": randn(6, 17)}), BackboneContextParallel(seq_dims={"time": 1})
    text = errors_of(lambda rank: parallelize_module(copy.deepcopy(model), cp_mesh(2), style)(PICTURES))
    assert 'given time of shape (17,), which has no dim 1: give seq_dims={"time": 0}' in text


class Staged(Encoder):
    """Blocks in a list of lists, the last of which is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(3))
        del self.blocks

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for stage in list(self.stages)[:2]:
            for block in stage:
                x = block(x)
        return x


class Unnamed(nn.Module):
    """Attention that no name shows."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.mix(x)[:, None]
        return x + F.scaled_dot_product_attention(q, q, q)[:, 0]


def test_blocks_that_are_named():
    torch.manual_seed(0)
    staged, unnamed = Staged().double(), encoder()
    unnamed.blocks = nn.ModuleList(Unnamed() for _ in range(2)).double()

    def refused(model: Any, **options: Any) -> str:
        return errors_of(partial(trained, model=model, **options))

    assert "first argument of stages, argument 0, must be hidden states" not in refused(staged)
    for blocks in (("stages.0", "stages.1"), "stages.*", "stages.1", "stages.0.1"):
        assert largest_error(staged, blocks=blocks) < EXACT
    assert "the model has not run the last block of ['stages.2']" in refused(staged, blocks="stages.2")
    assert "no list of blocks with attention was found among its lists ['blocks']" in refused(unnamed)
    assert largest_error(unnamed, blocks="blocks") < EXACT
    assert "blocks='layers' names no module" in refused(unnamed, blocks="layers")


class Skipping(Encoder):
    """``order``: the numbers of the blocks that run."""

    order: tuple[int, ...] = ()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for at in self.order:
            x = self.blocks[at](x)
        return x


@pytest.mark.parametrize(
    ("order", "words"), [((1, 2), "which are no part that its first block was given"), ((0, 1), "has not run the last")]
)
def test_blocks_that_are_left_out(order: tuple[int, ...], words: str):
    torch.manual_seed(0)
    model = Skipping().double()
    model.order = order
    style = BackboneContextParallel()
    text = errors_of(lambda rank: step(parallelize_module(copy.deepcopy(model), cp_mesh(2), style)))
    assert words in text


class Pooling(Encoder):
    """Fewer tokens behind the first block, or another thing than hidden states."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x[:, ::2]))


def test_blocks_that_keep_no_tokens():
    torch.manual_seed(0)
    model, style = Pooling().double(), BackboneContextParallel()
    text = errors_of(lambda rank: step(parallelize_module(copy.deepcopy(model), cp_mesh(2), style)))
    assert "which are no part that its first block was given" in text


def by_forward(model: Any, rank: int) -> None:
    model.forward(PICTURES)


def by_its_blocks(model: Any, rank: int) -> None:
    model.run(model.embed(PICTURES))


def with_other_targets(model: Any, rank: int) -> None:
    model(PICTURES, TARGETS + rank)


def with_other_types(model: Any, rank: int) -> None:
    model(PICTURES, None if rank else TARGETS)


def in_turn(model: Any, rank: int) -> None:
    model(model(PICTURES)["logits"].sum() * PICTURES)


def of_its_own_row(model: Any, rank: int) -> None:
    F.cross_entropy(model(PICTURES)["logits"][rank, None], TARGETS[rank, None]).backward()


def on_one_rank_without_gradients(model: Any, rank: int) -> None:
    with torch.no_grad() if rank else contextlib.nullcontext():
        model(PICTURES)


def with_a_head_that_fails(model: Any, rank: int) -> None:
    if rank:
        model.head.register_forward_hook(lambda *_: 1 / 0)
    step(model)


def with_an_embedding_that_fails(model: Any, rank: int) -> None:
    if rank:
        model.patch.register_forward_hook(lambda *_: 1 / 0)
    step(model)


def with_a_part_of_fsdp(model: Any, rank: int) -> None:
    fully_shard(model.blocks[0], mesh=cp_mesh(2))
    step(model)


def with_a_factor_of_fsdp(model: Any, rank: int) -> None:
    fully_shard(model, mesh=cp_mesh(2)).set_gradient_divide_factor(1.0)
    step(model)


def with_three_tokens(model: Any, rank: int) -> None:
    model.embed = lambda pictures: model.patch(pictures).flatten(2).mT[:, :3]
    step(model)


def in_one_graph(model: Any, rank: int) -> None:
    step(torch.compile(model, fullgraph=True, backend="aot_eager"))


REFUSED = {
    by_forward: "blocks runs outside of a call of the model",
    by_its_blocks: "blocks runs outside of a call of the model",
    with_other_targets: "disagree on the input targets",
    with_other_types: "disagree on the input targets",
    in_turn: "an input was computed from an output of a model with this style",
    of_its_own_row: "the gradients of an output differ between the ranks",
    on_one_rank_without_gradients: "disagree on whether a backward may follow",
    with_a_head_that_fails: "have failed",
    with_an_embedding_that_fails: "have failed",
    with_a_part_of_fsdp: "FSDP2 averages gradients over 2 ranks of a sequence, but not the gradients of",
    with_a_factor_of_fsdp: "set_gradient_divide_factor replaces the mean",
    with_three_tokens: "3 tokens are too few for 2 ranks, each of which needs two",
    in_one_graph: "compile without fullgraph=True, or compile the blocks",
}


@pytest.mark.parametrize("use", REFUSED, ids=lambda use: use.__name__)
def test_uses_that_are_refused(use: Callable[[Any, int], None]):
    torch.compiler.reset()  # graphs of other tests would be at their limit, behind which nothing is compiled
    model = encoder()
    text = errors_of(
        lambda rank: use(parallelize_module(copy.deepcopy(model), cp_mesh(2), BackboneContextParallel()), rank)
    )
    assert REFUSED[use] in text


class Returning(Encoder):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, pictures: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        return self.kind(**super().forward(pictures, targets))


class OwnDict(dict[str, Any]): ...


class InSlots:
    __slots__ = "held"

    def __init__(self, **outputs: Any) -> None:
        self.held = [outputs]


def in_own_list(**outputs: Any) -> Any:
    return type("OwnList", (list,), {})(outputs.values())


def in_objects(**outputs: Any) -> Any:
    return SimpleNamespace(inner=SimpleNamespace(found=[InSlots(**outputs)]))


def later(**outputs: Any) -> Any:
    def method() -> Any:
        return outputs

    return method


KINDS = {"SimpleNamespace": in_objects, "OwnDict": OwnDict, "InSlots": InSlots, "OwnList": in_own_list}
KINDS |= {"generator": lambda **outputs: (x for x in outputs.values()), "function": later}
KINDS |= {"partial": lambda **outputs: partial(max, outputs)}
KINDS |= {"OwnDict of much": lambda **outputs: OwnDict(outputs=outputs, much=[[] for _ in range(11_000)])}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("agreement", [True, False])
def test_outputs_that_torch_does_not_open(agreement: bool, kind: str):
    torch.manual_seed(0)
    model = Returning(KINDS[kind]).double()
    style = ModuleContextParallel(layout=contiguous(17, 2), checks=Checks(agreement=agreement))

    def on(rank: int) -> None:
        parallelize_module(copy.deepcopy(model), cp_mesh(2), BackboneContextParallel(style))(PICTURES)

    assert f"returns a {kind.split()[0]}, whose tensors would get whole gradients" in errors_of(on)


def test_losses_that_differ():
    """The remedy: all ranks take the whole loss. Without gradients, blocks run outside of a call of the model too."""

    def way(mine: Any, mesh: Any) -> torch.Tensor:
        with torch.no_grad():
            assert error(mine.run(mine.embed(PICTURES)), model.run(model.embed(PICTURES))) < EXACT
        return summed(mine, mesh)

    model = encoder()
    assert largest_error(model, 2, way) < EXACT


def test_a_head_outside_of_the_model():
    """Its gradients are whole on every rank: sum_gradients refuses them, and they are exact without a sum."""
    torch.manual_seed(0)
    head, one = nn.Linear(CLASSES, 2).double(), encoder()

    def run(mine: Any, last: Any) -> None:
        (last(mine(PICTURES)["logits"]) * randn(4, 2, 2)).sum().backward()

    def on(rank: int) -> float:
        mesh, mine, last = cp_mesh(2), copy.deepcopy(one), copy.deepcopy(head)
        parallelize_module(mine, mesh, BackboneContextParallel())
        run(mine, last)
        with pytest.raises(ValueError, match="A head behind a BackboneContextParallel belongs into the model"):
            sum_gradients([*mine.parameters(), *last.parameters()], mesh)
        sum_gradients(mine, mesh)
        found = [*mine.parameters(), *last.parameters()]
        pairs = zip(found, (x for each in wanted for x in each.parameters()), strict=True)
        return max(error(x.grad, y.grad) for x, y in pairs if x.grad is not None and y.grad is not None)

    wanted = copy.deepcopy(one), copy.deepcopy(head)
    run(*wanted)
    assert max(run_ranks(on, 2)) < EXACT


def test_styles_that_are_refused():
    joint = ModuleContextParallel(layout=JointLayout(3))
    for style in (joint, "cp"):
        with pytest.raises(TypeError, match="style is a ModuleContextParallel without a JointLayout"):
            BackboneContextParallel(style)  # pyright: ignore[reportArgumentType]

    one = encoder()

    def twice(rank: int) -> None:
        model = parallelize_module(copy.deepcopy(one), cp_mesh(2), BackboneContextParallel())
        parallelize_module(model, cp_mesh(2), BackboneContextParallel())

    assert "has context-parallel modules already" in errors_of(twice)


@pytest.mark.parametrize("agreement", [True, False])
def test_bytes(agreement: bool):
    """Hidden states once in each direction, in addition to the attention: 8 or 9 rows of 17, of 2 x 8 numbers."""
    model, style = encoder(), ModuleContextParallel(layout=contiguous(17, 2), checks=Checks(agreement=agreement))

    def on(rank: int) -> tuple[int, ...]:
        mesh, mine, sent = cp_mesh(2), copy.deepcopy(model), []
        parallelize_module(mine, mesh, BackboneContextParallel(style))
        with CommunicationTrace() as forward:
            loss = mine(PICTURES)["logits"].sum()
        with CommunicationTrace() as backward:
            loss.backward()
        for trace in (forward, backward):
            sent.append(sum(size for name, size in trace.events if "all_to_all" in name))
        return *sent, 9 - rank

    for forward, backward, rows in run_ranks(on, 2):
        assert forward == rows * 2 * WIDTH * 8  # own rows, to the other rank
        assert backward == (17 - rows) * 2 * WIDTH * 8  # gradients of its rows


def test_verify():
    """Proves the step of the page, by all reducers, and notices a loss that is divided, a sum that is forgotten and one
    that is made twice."""
    model = encoder()

    def on(rank: int, act: Callable[[Any, Any], torch.Tensor], prepare: Any = None) -> None:
        mesh, mine = cp_mesh(2), copy.deepcopy(model)
        parallelize_module(mine, mesh, BackboneContextParallel())
        mine = mine if prepare is None else prepare(mine, mesh)
        verify(mine, mesh, PICTURES, lambda model, batch, mesh: act(model, mesh), tolerance=1e-10)

    def divided(model: Any, mesh: Any) -> torch.Tensor:
        loss = model(PICTURES, TARGETS)["loss"]
        (loss / mesh.size()).backward()
        sum_gradients(model, mesh)
        return loss

    def sharded(model: Any, mesh: Any) -> Any:
        fully_shard(model, mesh=mesh)
        return model

    def reduced(model: Any, mesh: Any) -> Any:
        return DistributedDataParallel(model, process_group=mesh.get_group())

    run_ranks(on, 2, summed)
    run_ranks(on, 2, lambda model, mesh: step(model), sharded)
    run_ranks(on, 2, lambda model, mesh: step(model), reduced)
    for wrong, words in (
        (divided, r"are 0\.5\s+times\s+the\s+gradients"),
        (lambda model, mesh: step(model), "unreduced"),
    ):
        with pytest.raises(RankError, match=words) as found:
            run_ranks(on, 2, wrong)
        assert all(isinstance(each, VerificationError) for each in found.value.errors.values())


@pytest.mark.parametrize("ranks", [2, *at_night(3)])
def test_the_example_of_the_page(ranks: int):
    model = encoder()

    def on(rank: int) -> Result:
        names: dict[str, Any] = {"classifier": copy.deepcopy(model), "mesh": cp_mesh(ranks)}
        names["loss_of"] = lambda out, classes: F.cross_entropy(out["logits"], classes)
        exec(example("pooled"), names)
        batch = {"tokens": PICTURES, "classes": TARGETS}
        verify(names["classifier"], names["mesh"], batch, names["step"], tolerance=1e-10)
        return result(names["step"](names["classifier"], batch, names["mesh"]).detach(), names["classifier"])

    one = copy.deepcopy(model)
    loss = F.cross_entropy(one(PICTURES)["logits"], TARGETS)
    loss.backward()
    for found, grads in run_ranks(on, ranks):
        assert error(found, loss.detach()) < EXACT
        assert of_gradients(grads, one) < EXACT


@pytest.mark.parametrize("inside", [True, False])
def test_dropout_of_a_head_gives_the_mean_of_the_losses(inside: bool):
    """Ranks that drop other features: the gradients of the mean of their losses, which the model or a user takes."""
    model = encoder()
    masks = (torch.rand(2, 2, CLASSES, generator=torch.Generator().manual_seed(0)) < 0.5).double() * 2

    def on(rank: int) -> Result:
        mesh, mine = cp_mesh(2), copy.deepcopy(model)
        mine.head.register_forward_hook(lambda module, args, x: x * masks[rank])
        parallelize_module(mine, mesh, BackboneContextParallel())
        out = mine(PICTURES, TARGETS)
        loss = out["loss"] if inside else F.cross_entropy(out["logits"], TARGETS)
        loss.backward()
        sum_gradients(mine, mesh)
        return result(loss.detach(), mine)

    one = copy.deepcopy(model)
    plain = one(PICTURES)["logits"]
    (F.cross_entropy(plain * masks[0], TARGETS) / 2 + F.cross_entropy(plain * masks[1], TARGETS) / 2).backward()
    for _, grads in run_ranks(on, 2):
        assert of_gradients(grads, one) < EXACT


class Texts(nn.Module):
    """Blocks in checkpoints, which are given a table of their tokens, [S, D] in dim 0; the mean over tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks, self.how = nn.ModuleList(Block() for _ in range(2)), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = {"cos": randn(4, x.shape[1], WIDTH)}
        for block in self.blocks:
            x = checkpoint(block, x, angles, use_reentrant=self.how == "reentrant")
        return x.mean(1)


def some_part_is_equal(ranks: int, layout: Balancer, more: tuple[int, int], **_: Any) -> bool:
    parts = (layout(4 * ranks + each, ranks).lengths for each in more)
    return any(first == second for first, second in zip(*parts, strict=True))


@sampled(
    1,
    some_part_is_equal,
    how=["", "reentrant", "to the end"],
    ranks=[2, 3],
    layout=[contiguous, head_tail, striped],
    more=[*itertools.permutations(range(4), 2)],
)
def test_two_lengths_before_a_backward(how: str, ranks: int, layout: Balancer, more: tuple[int, int]):
    """As of a chosen and a rejected answer: each checkpoint recomputes with the length of its own forward."""
    lengths = [4 * ranks + each for each in more]
    inputs = [randn(length, 2, length, WIDTH) for length in lengths]
    torch.manual_seed(0)
    model = Texts(how).double()

    def train(mine: nn.Module) -> Result:
        stops = torch.utils.checkpoint.set_checkpoint_early_stop(how != "to the end")
        with stops:
            first, second = (mine(x.clone().requires_grad_()) for x in inputs)
            loss = (first * second.tanh()).sum()
        loss.backward()
        return result(loss.detach(), mine)

    one = copy.deepcopy(model)
    train(one)

    def on(rank: int) -> float:
        mesh, mine = cp_mesh(ranks), copy.deepcopy(model)
        style = BackboneContextParallel(ModuleContextParallel(layout=layout), seq_dims={"angles": 0})
        parallelize_module(mine, mesh, style)
        train(mine)
        sum_gradients(mine, mesh)
        return max(error(a.grad, b.grad) for a, b in zip(mine.parameters(), one.parameters(), strict=True))

    assert max(run_ranks(on, ranks)) < EXACT
