"""What the page on training says to do around the attention: each of its examples is exact."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.data import DataLoader

from cp_styles import (
    BatchSharder,
    ModuleContextParallel,
    SequenceScope,
    contiguous,
    parallelize_module,
    sum_gradients,
)
from cp_styles.batch import next_token_labels
from cp_styles.collectives import gather
from cp_styles.testing import run_ranks
from cp_styles.verify import VerificationError, verify
from tests.covering import at_night
from tests.oracle import error, randn
from tests.pages import example
from tests.ranks.attention_case import EXACT, cp_mesh
from tests.tiny_lm import LanguageModel, language_model

RANKS, BATCH, LENGTH, WIDTH, WORDS, PICTURE = 2, 2, 32, 16, 64, 63


class Language(LanguageModel):
    """``around``: what runs between the embeddings and the attention."""

    def __init__(self, around: Callable[..., torch.Tensor]) -> None:
        super().__init__(WORDS, LENGTH, WIDTH)
        self.patch, self.around = nn.Linear(12, WIDTH), around

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.logits(self.around(self, self.embed(tokens), tokens, **more), positions)


def language(around: Callable[..., torch.Tensor]) -> Language:
    torch.manual_seed(0)
    return Language(around).double()


TOKENS = torch.randint(WORDS - 1, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def trained(model: Language, loss: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return loss.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def of_one(model: Language, tokens: torch.Tensor, labels: torch.Tensor, **more: Any) -> Any:
    """A step of one process. ``labels`` as the tokens, not yet shifted."""
    one = copy.deepcopy(model)
    logits = one(tokens, torch.arange(LENGTH), **more)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return trained(one, loss)


def apart(found: Any, wanted: Any) -> float:
    assert found[1].keys() == wanted[1].keys()
    return max(error(found[0], wanted[0]), *(error(found[1][name], grad) for name, grad in wanted[1].items()))


def by_order(m: Language, x: torch.Tensor, tokens: torch.Tensor, pixels: torch.Tensor, number: Any = None):
    """The features of all pictures in the place of their tokens, in order; by ``number`` as the page says."""
    features, here = m.patch(pixels), tokens == PICTURE
    if number is None:
        return x.masked_scatter(here[..., None], features)
    names = {"x": x, "features": features, "number": number, "tokens": tokens, "PICTURE": PICTURE}
    exec(example("features by number").split("# in the model")[1].split("\n", 1)[1], names)
    return names["x"]


def test_pictures_in_the_place_of_their_tokens():
    tokens = TOKENS.clone()
    for row, first in ((0, 2), (0, 20), (1, 9), (1, 15)):
        tokens[row, first : first + 4] = PICTURE
    labels, pixels, model = tokens.masked_fill(tokens == PICTURE, -100), randn(3, 16, 12), language(by_order)
    wanted = of_one(model, tokens, labels, pixels=pixels)

    def on(rank: int) -> float:
        mesh, mine = cp_mesh(RANKS), copy.deepcopy(model)
        parallelize_module(mine, mesh, ModuleContextParallel())
        names: dict[str, Any] = {"tokens": tokens, "labels": labels, "PICTURE": PICTURE}
        names |= {"BatchSharder": BatchSharder, "mesh": mesh}
        exec(example("features by number").split("# in the model")[0], names)
        batch = names["batch"]
        loss = batch.loss(mine(batch.tokens, batch.positions, pixels=pixels, number=batch["number"]))
        loss.backward()
        names["sharder"].sum_gradients(mine)
        return apart(trained(mine, loss), wanted)

    assert max(run_ranks(on, RANKS)) < EXACT


CLIP = (4, 5, 6)  # frames, rows and columns of tokens


def window_of_each_token(shift: int) -> torch.Tensor:
    """Windows of 2 x 2 x 3 tokens, ragged at the edges, from ``shift`` before the first token on."""
    t, h, w = torch.meshgrid(*map(torch.arange, CLIP), indexing="ij")
    return (((t + shift) // 2) * 100 + ((h + shift) // 2) * 10 + (w + shift) // 3).flatten()


class Windows(nn.Module):
    """Attention within windows; ``way``: of the page, or as one process may compute it."""

    def __init__(self, shift: int, way: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.window, self.way = window_of_each_token(shift), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.way == "as the page says":
            names = {"q": q, "k": k, "v": v, "S": len(self.window), "device": "cpu"}
            names |= {"window_of_each_token": self.window}
            names |= {"create_block_mask": create_block_mask}
            exec(example("windows"), names)
            return names["out"]
        out, mine = torch.zeros_like(q), self.window[: q.shape[2]]
        for number in mine.unique():
            rows = (mine == number).nonzero().flatten()
            out = out.index_copy(2, rows, F.scaled_dot_product_attention(*(x[:, :, rows] for x in (q, k, v))))
        return out


def clip(way: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Windows(0, way), Windows(1, way)).double()


def step_of_clip(model: nn.Module, video: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    layout = contiguous(video.shape[1], mesh.size())
    out = gather(model(layout.shard(video, 1, mesh.get_local_rank())), 1, mesh, layout=layout, reduce_gradients=True)
    loss = out.square().mean()
    (loss / mesh.size()).backward()
    sum_gradients(model, mesh)
    return loss


VIDEO = randn(5, 1, 120, 16)


def test_windows_of_a_video():
    """Shifted windows, ragged at the edges, on one process window by window."""
    one, model = clip("by windows"), clip("as the page says")
    loss = one(VIDEO).square().mean()
    loss.backward()

    def on(rank: int) -> float:
        mesh, mine = cp_mesh(3), copy.deepcopy(model)
        parallelize_module(mine, mesh, ModuleContextParallel(layout=contiguous(120, 3)))
        found = step_of_clip(mine, VIDEO, mesh).detach()
        pairs = zip(mine.parameters(), one.parameters(), strict=True)
        return max(error(found, loss.detach()), *(error(x.grad, y.grad) for x, y in pairs))

    assert max(run_ranks(on, 3)) < EXACT


@pytest.mark.parametrize("layout", [contiguous(120, 2), *at_night(contiguous)], ids=["a layout", "a balancer"])
def test_windows_of_a_part(layout: Any):
    """An error with a layout object; else verify finds them."""
    model = clip("by windows")

    def on(rank: int) -> None:
        mesh, mine = cp_mesh(2), copy.deepcopy(model)
        parallelize_module(mine, mesh, ModuleContextParallel(layout=layout))
        if layout is not contiguous:
            with pytest.raises(ValueError, match=r"the layout cuts 120 positions, the ranks .* hold 24 together"):
                step_of_clip(mine, VIDEO, mesh)
        else:
            with pytest.raises(VerificationError):
                verify(mine, mesh, VIDEO, step_of_clip)

    run_ranks(on, 2)


def with_noise(m: Language, x: torch.Tensor, tokens: torch.Tensor, layout: Any = None, rank: int = 0) -> torch.Tensor:
    names = {"torch": torch, "B": BATCH, "S": LENGTH, "D": WIDTH, "x": x, "seed": 3, "number_of_the_step": 1}
    names |= {"layout": contiguous(LENGTH, 1) if layout is None else layout, "rank": rank}
    exec(example("random numbers"), names)
    return names["x"]


def test_noise_that_is_drawn_for_the_whole_sequence():
    model = language(with_noise)
    wanted = of_one(model, TOKENS, TOKENS)

    def on(rank: int) -> float:
        mesh, mine = cp_mesh(RANKS), copy.deepcopy(model)
        parallelize_module(mine, mesh, ModuleContextParallel())
        sharder = BatchSharder(mesh)
        batch = sharder(TOKENS)
        loss = batch.loss(mine(batch.tokens, batch.positions, layout=batch.layout, rank=rank))
        loss.backward()
        sharder.sum_gradients(mine)
        return apart(trained(mine, loss), wanted)

    assert max(run_ranks(on, RANKS)) < EXACT


def test_numbers_by_position():
    """The noise of two ranks is the noise of one, and the model has no other dropout."""

    def on(rank: int, ranks: int) -> torch.Tensor:
        layout = contiguous(LENGTH, ranks)
        names: dict[str, Any] = {"torch": torch, "mesh": init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))}
        names |= {"seed": 3, "number_of_the_step": 1, "x": layout.shard(torch.zeros(BATCH, LENGTH, WIDTH), 1, rank)}
        names["model"] = torch.nn.Sequential(torch.nn.Dropout(0.1))
        with SequenceScope(layout):
            exec(example("dropout by position"), names)
        assert not isinstance(names["model"][0], torch.nn.Dropout)
        return names["noise"]

    one = run_ranks(on, 1, 1)[0]
    assert (torch.cat(run_ranks(on, 2, 2, may_seed=True), 1) - one).norm() < 1e-6 * one.norm()  # float32


def test_a_seed_for_the_dropout_of_each_rank():
    """Other numbers along cp, and the same along tp, which holds the same tokens; one order of the samples."""
    lock = threading.Lock()  # ranks are threads here, with one generator: each seeds and draws in its turn

    def on(rank: int) -> tuple[list[int], list[int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        names: dict[str, Any] = {"torch": torch, "DataLoader": DataLoader, "dataset": range(16), "seed": 3}
        with lock:
            exec(example("dropout"), names | {"mesh": mesh}, out := {})
            return F.dropout(torch.ones(64)).tolist(), [int(x) for x in out["loader"]]

    (first, order), (first_tp, *_), (second, _), (second_tp, *_) = run_ranks(on, 4, may_seed=True)
    assert (first, second) == (first_tp, second_tp)
    assert first != second
    assert all(other == order for _, other in run_ranks(on, 4, may_seed=True))
    assert order != list(range(16))


class Float8(nn.Linear):
    """Rounds its input to float8, with one scale for the whole tensor; ``delayed``: with that of the step before."""

    group: Any = None

    def __init__(self, *sizes: int, delayed: bool) -> None:
        super().__init__(*sizes)
        self.register_buffer("amax", torch.tensor(1.0))
        self.delayed = delayed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            largest = x.detach().abs().amax()
        else:
            names = {"torch": torch, "x": x, "group": self.group}
            exec(example("scale"), names)
            largest = names["largest"]
        used = self.amax.clone() if self.delayed else largest
        self.amax.copy_(largest)
        rounded = (x.detach() * 448 / used).to(torch.float8_e4m3fn).to(x.dtype) / 448 * used
        return super().forward(x + (rounded - x.detach()))


def scaled(m: Language, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("delayed", [False, True])
def test_the_scale_of_a_whole_tensor(delayed: bool):
    model = language(scaled)
    model.qkv = Float8(WIDTH, 3 * WIDTH, delayed=delayed).double()
    one = copy.deepcopy(model)
    for tokens in (TOKENS, TOKENS.flip(1)):  # two steps
        one.zero_grad()
        logits = one(tokens, torch.arange(LENGTH))
        loss = F.cross_entropy(logits.flatten(0, 1), next_token_labels(tokens).flatten())
        loss.backward()
    wanted = trained(one, loss)

    def step(model: Language, tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        sharder = BatchSharder(mesh)
        batch = sharder(tokens)
        loss = batch.loss(model(batch.tokens, batch.positions))
        loss.backward()
        sharder.sum_gradients(model)
        return loss

    def on(rank: int) -> float:
        mesh, mine = cp_mesh(RANKS), copy.deepcopy(model)
        mine.qkv.group = mesh.get_group()
        parallelize_module(mine, mesh, ModuleContextParallel())
        verify(mine, mesh, TOKENS, step)
        for tokens in (TOKENS, TOKENS.flip(1)):
            mine.zero_grad()
            loss = step(mine, tokens, mesh)
        return apart(trained(mine, loss), wanted)

    assert max(run_ranks(on, RANKS)) < EXACT


def sharded(one: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy of ``one``, by FSDP2 over cp, and by a plan over tp if there is one."""
    model = copy.deepcopy(one)
    if "tp" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
    parallelize_module(model, mesh["cp"], ModuleContextParallel())
    fully_shard(model, mesh=mesh["cp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def run_steps(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = BatchSharder(mesh["cp"], averaged_over=mesh["cp"].size())((TOKENS + step) % WORDS)
        loss = batch.loss(model(batch.tokens, batch.positions))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def of_one_process(steps: int) -> list[float]:
    model, losses = language_model(WORDS, LENGTH, WIDTH), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        tokens = (TOKENS + step) % WORDS
        loss = F.cross_entropy(model(tokens, torch.arange(LENGTH))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_checkpoint_that_other_ranks_go_on_with(tmp_path):
    """Two ranks on cp and two on tp, then three on cp."""
    one = language_model(WORDS, LENGTH, WIDTH)

    def run(rank: int, shape: tuple[int, ...], steps: range) -> list[float]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cp", "tp")[: len(shape)])
        model, optimizer = sharded(one, mesh)
        names: dict[str, Any] = {"model": model, "optimizer": optimizer}
        exec(example("checkpoint"), names)
        if steps.start:
            for parameter in model.parameters():
                parameter.detach().zero_()  # what is right afterwards was loaded
            names["resume"](tmp_path)
        losses = run_steps(model, optimizer, mesh, steps)
        if not steps.start:
            names["save"](tmp_path)
        return losses

    wanted = of_one_process(4)
    for losses in run_ranks(run, 4, (2, 2), range(2)):
        assert losses == pytest.approx(wanted[:2], abs=1e-11)
    for losses in run_ranks(run, 3, (3,), range(2, 4)):
        assert losses == pytest.approx(wanted[2:], abs=1e-11)


def test_clipping_by_mesh():
    """The gradients of one process, whose norm is clipped to 1."""
    one = language_model(WORDS, LENGTH, WIDTH)
    loss = F.cross_entropy(one(TOKENS, torch.arange(LENGTH))[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()) * 9
    plain = copy.deepcopy(one)
    loss.backward()
    assert torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0) > 1

    def on(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        model, _ = sharded(plain, mesh)
        batch = BatchSharder(mesh["cp"], averaged_over=2)(TOKENS)
        (batch.loss(model(batch.tokens, batch.positions)) * 9).backward()
        with pytest.raises(RuntimeError, match="must have the same mesh"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        exec(example("clip by mesh"), {"model": model, "torch": torch})
        found = {name: x.grad.full_tensor() for name, x in model.named_parameters()}
        return max(error(found[name], x.grad) for name, x in one.named_parameters())

    assert max(run_ranks(on, 4)) < EXACT
