"""Joint attention: a text that is whole on every rank, and an image that is cut. Exact, or refused by name."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import gelu, scaled_dot_product_attention

from cp_styles import (
    AttentionContextParallel,
    ModuleContextParallel,
    Ulysses,
    context_attention,
    contiguous,
    flex_attention,
    head_tail,
    striped,
    sum_gradients,
)
from cp_styles.functions.joint_layout import JointLayout
from cp_styles.testing import RankError, run_ranks
from tests.covering import sampled
from tests.oracle import attention_inputs, error, expected_attention, randn
from tests.ranks.attention_case import every_rank_raises

# float64 sums in another order give 1e-15 a layer; a text that counts once too often gives 1e-1.
EXACT = 1e-12
HEADS, DIM, IMAGE, BATCH = 4, 16, 23, 2


class Block(nn.Module):
    """Two streams with weights of their own, one attention; then one stream of both, as in Flux."""

    def __init__(self, text_first: bool) -> None:
        super().__init__()
        self.text_first = text_first
        self.image, self.text, self.both = (nn.Linear(DIM, 3 * DIM, dtype=torch.float64) for _ in range(3))
        self.image_out, self.text_out, self.both_out = (nn.Linear(DIM, DIM, dtype=torch.float64) for _ in range(3))

    def joint(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return torch.cat((text, image) if self.text_first else (image, text), 1)

    def apart(self, both: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = both[:, :length] if self.text_first else both[:, both.shape[1] - length :]
        return (both[:, length:] if self.text_first else both[:, : both.shape[1] - length]), text

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in qkv.chunk(3, -1))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = text.shape[1]
        found = self.apart(self.attend(self.joint(self.image(image), self.text(text))), length)
        image, text = image + gelu(self.image_out(found[0])), text + gelu(self.text_out(found[1]))
        both = self.joint(image, text)
        return self.apart(both + self.both_out(self.attend(self.both(both))), length)


class Model(nn.Module):
    def __init__(self, text_first: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(text_first) for _ in range(2))
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(randn(seed, *parameter.shape) * 0.2)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            image, text = block(image, text)
        return image, text


@sampled(
    1, ranks=[3, 2], text=[5, 2, 1], text_first=[True, False], layout=[head_tail, contiguous, striped], of_text=[1, 0]
)
def test_a_model_of_text_and_image(ranks: int, text: int, text_first: bool, layout: Any, of_text: int):
    """Output, and gradients of image, text and weights, also with a loss of the text, which one rank counts."""
    model, given = Model(text_first), (randn(90, BATCH, IMAGE, DIM), randn(91, BATCH, text, DIM))
    cotangents = randn(92, BATCH, IMAGE, DIM), randn(93, BATCH, text, DIM) * of_text

    def step(model: nn.Module, inputs: Any, grads: Any) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = model(*leaves)
        torch.autograd.backward(out, list(grads))
        return [*(x.detach() for x in out), *(x.grad for x in leaves)]

    def on(rank: int) -> tuple[list[torch.Tensor], list[Any]]:
        mesh, mine = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), copy.deepcopy(model)
        whole = {"prefix" if text_first else "suffix": text}
        parallelize_module(mine, mesh, ModuleContextParallel(layout=JointLayout(**whole, rest=layout)))
        cut = layout(IMAGE, ranks)
        parts = [cut.shard(x, 1, rank) for x in (given[0], cotangents[0])]
        found = step(mine, (parts[0], given[1]), (parts[1], cotangents[1] * (rank == 0)))
        sum_gradients(mine, mesh)
        return found, [x.grad for x in mine.parameters()]

    found = run_ranks(on, ranks)
    wanted = step(model, given, cotangents)
    parts = [list(each) for each in zip(*(tensors for tensors, _ in found), strict=True)]
    cut = layout(IMAGE, ranks)
    mine = [cut.unshard(parts[0], 1), parts[1][-1], cut.unshard(parts[2], 1), sum(parts[3])]
    assert max(map(error, mine, wanted)) < EXACT
    pairs = zip(found[-1][1], model.parameters(), strict=True)
    assert max(error(theirs, x.grad) for theirs, x in pairs if x.grad is not None and x.grad.norm()) < EXACT


def test_the_function():
    """With both ends whole on every rank, and another strategy."""
    (q, k, v), grad = attention_inputs(length=IMAGE, heads=HEADS, kv_heads=2)
    joint, inner = JointLayout(prefix=3, suffix=4, rest=head_tail), head_tail(IMAGE - 7, 2)

    def held(x: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.cat((x[:, :, :3], inner.shard(x[:, :, 3:-4], 2, rank), x[:, :, -4:]), 2)

    def on(rank: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        leaves = [held(x, rank).clone().requires_grad_() for x in (q, k, v)]
        out = context_attention(*leaves, mesh, layout=joint, strategy=Ulysses())
        once = held(grad, rank).clone()
        if rank:
            once[:, :, :3] = once[:, :, -4:] = 0
        out.backward(once)
        return [out.detach(), *(x.grad for x in leaves)]

    both = run_ranks(on, 2)
    for index, wanted in enumerate(expected_attention([q, k, v], grad)):
        first, second = (found[index] for found in both)
        ends = (first[:, :, :3], first[:, :, -4:])
        if index:  # gradients are shares
            ends = (ends[0] + second[:, :, :3], ends[1] + second[:, :, -4:])
        middle = inner.unshard([x[:, :, 3:-4] for x in (first, second)], 2)
        assert error(torch.cat((ends[0], middle, ends[1]), 2), wanted) < EXACT


class Call(nn.Module):
    """Calls a function on what it is given."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


CASES: dict[str, tuple[str, Any, int, Any]] = {
    # what it says; the function; how many keys there are; the layout
    "no text at all": ("tokens differ between the ranks", scaled_dot_product_attention, 8, JointLayout(prefix=3)),
    "a text at the other end": ("the last 3 tokens differ", scaled_dot_product_attention, 8, JointLayout(suffix=3)),
    "fewer tokens than the text": ("attends to itself, with 9", scaled_dot_product_attention, 8, JointLayout(9)),
    "keys of another sequence": ("attends to itself", scaled_dot_product_attention, 5, JointLayout(prefix=3)),
    "flex_attention": ("is for scaled_dot_product_attention", flex_attention, 8, JointLayout(prefix=3)),
    "a layout of another length": (
        "the layout cuts 99 tokens",
        scaled_dot_product_attention,
        8,
        JointLayout(prefix=3, rest=head_tail(99, 2)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str):
    words, function, keys, layout = CASES[case]

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        module = parallelize_module(Call(function), mesh, ModuleContextParallel(layout=layout))
        q, k, v = (randn(10 * rank + seed, 1, HEADS, size, 8) for seed, size in enumerate((8, keys, keys)))
        if case != "no text at all":
            q[:, :, :3], k[:, :, :3], v[:, :, :3] = 1.0, 2.0, 3.0
        module(q, k, v)

    with every_rank_raises(words):
        run_ranks(on, 2)


def test_other_doors_refuse_it():
    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        style: Any = AttentionContextParallel
        with pytest.raises(TypeError, match="layout must be a SequenceLayout or a function"):
            parallelize_module(Call(None), mesh, style(layout=JointLayout(prefix=3)))

    run_ranks(on, 2)
    for wrong in ({}, {"prefix": -1}, {"prefix": 2, "suffix": -1}):
        with pytest.raises(ValueError, match="the number of tokens that are whole"):
            JointLayout(**wrong)
    with pytest.raises(TypeError, match="rest must be"):
        JointLayout(prefix=1, rest=3)  # pyright: ignore[reportArgumentType]


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x, context, mask=None):
        q = self.q(x).unflatten(-1, (2, 8)).transpose(1, 2)
        k, v = self.kv(context).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class ImageAndText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.cross_attention = Cross(), Cross()

    def forward(self, image, text, mask):
        return self.cross_attention(self.self_attention(image, image), text, mask)


@pytest.mark.parametrize("plan", [None, "self_attention"], ids=["whole model", "self-attention"])
def test_cross_attention_to_a_padded_text_that_each_rank_has(plan):
    """Refused with the remedy, and exact with it; nothing is sent for the text."""
    torch.manual_seed(0)
    model, image, text = ImageAndText().double(), randn(0, 2, 13, 16), randn(1, 2, 5, 16)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1] * 5], dtype=torch.bool)[:, None, None]
    alone, layout = copy.deepcopy(model), head_tail(13, 2)
    expected = alone(image, text, mask)
    expected.square().sum().backward()

    def on(rank: int):
        mine, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        style = ModuleContextParallel()
        parallelize_module(mine, mesh, style if plan is None else {plan: style})
        out = mine(layout.shard(image, 1, rank), text, mask)
        out.square().sum().backward()
        sum_gradients(mine, mesh)
        return out.detach(), [parameter.grad for parameter in mine.parameters()]

    if plan is None:
        for each in run_ranks(on, 2, return_errors=True):
            assert 'See "A mask of one part"' in str(each)
        return
    outs, grads = zip(*run_ranks(on, 2), strict=True)
    pairs = [(layout.unshard(outs, 1), expected.detach())]
    pairs += [(grad, parameter.grad) for grad, parameter in zip(grads[0], alone.parameters(), strict=True)]
    assert max(error(*pair) for pair in pairs) < EXACT


UNCUT = r"the 23 tokens besides the text are the same on all ranks.*no style"


@pytest.mark.parametrize("before", [0, 5], ids=["at once", "behind five right steps"])
@pytest.mark.parametrize("use", ["training", "sampling", "a copy"])
def test_an_image_that_nobody_cut(use: str, before: int):
    """Refused on every rank, in training (at the forwards number 1, 2, 4, ...), and at once in the first sampling and
    of a copy, which are counted by themselves."""
    image, text, cut = randn(90, BATCH, IMAGE, DIM), randn(91, BATCH, 5, DIM), head_tail(IMAGE, 3)

    def on(rank: int) -> None:
        mesh, mine = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",)), Model(True)
        parallelize_module(mine, mesh, ModuleContextParallel(layout=JointLayout(prefix=5), verified=True))
        for _ in range(before):
            mine(cut.shard(image, 1, rank), text)[0].sum().backward()
        mine = copy.deepcopy(mine) if use == "a copy" else mine
        with torch.set_grad_enabled(use != "sampling"):
            for _ in range(1 + before):
                mine(image, text)

    with every_rank_raises(UNCUT, 3) as caught:
        run_ranks(on, 3)
    assert len({*map(str, caught.value.errors.values())}) == 1


class Dropping(nn.Module):
    def forward(self, x: torch.Tensor, dropout_p: float) -> torch.Tensor:
        return scaled_dot_product_attention(x, x, x, dropout_p=dropout_p)


def test_after_an_error_of_one_rank_the_ranks_look_at_the_same_calls():
    """They compare tokens, which communicates, in the calls number 1, 2, 4 and 8, and a refused call counts on all."""

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        style = ModuleContextParallel(layout=JointLayout(prefix=2), verified=True)
        module = parallelize_module(Dropping(), mesh, style)
        x = torch.cat((randn(0, 1, HEADS, 2, DIM), randn(1 + rank, 1, HEADS, 3, DIM)), 2)
        with pytest.raises(ValueError if rank else NotImplementedError):
            module(x, 0.0 if rank else 0.1)
        wanted = module(x, 0.0)
        for _ in range(8):
            assert torch.equal(module(x, 0.0), wanted)

    run_ranks(on, 2, timeout_seconds=60.0)


def test_an_image_that_nobody_cut_by_the_function():
    image = randn(90, BATCH, HEADS, IMAGE + 5, DIM)

    def on(rank: int) -> None:
        context_attention(image, image, image, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), layout=JOINT)

    with pytest.raises(RankError, match=UNCUT):
        run_ranks(on, 2)


JOINT = JointLayout(prefix=5)


@pytest.mark.parametrize("uncut", [False, True])
def test_a_pattern_whose_parts_are_equal(uncut: bool):
    """By its length, a layout tells it from an image that nobody has cut."""
    text, part = randn(2, 1, 2, 5, 4).double(), randn(3, 1, 2, 6, 4).double()
    whole = torch.cat((text, part, part), 2)

    def on(rank: int, joint: JointLayout) -> float:
        x = whole if uncut else torch.cat((text, part), 2)
        out = context_attention(x, x, x, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), layout=joint)
        return error(out, wanted[:, :, :11])

    wanted = scaled_dot_product_attention(whole, whole, whole)
    with pytest.raises(RankError, match=r"If parts are equal, .* rest=layout"):
        run_ranks(partial(on, joint=JOINT), 2)
    known = JointLayout(prefix=5, rest=contiguous(12, 2))
    if not uncut:
        assert max(run_ranks(partial(on, joint=known), 2)) < EXACT
        return
    with pytest.raises(RankError, match="the layout"):
        run_ranks(partial(on, joint=known), 2)


@pytest.mark.parametrize("rest", ["one token", "equal tokens", "none", "other parts that begin alike"])
def test_equal_parts_that_are_right(rest: str):
    """As in a warm-up; and images whose first tokens are alike."""
    whole = {"one token": randn(1, 1, 1, 1, 4), "equal tokens": torch.ones(1, 1, 6, 4), "none": torch.zeros(1, 1, 0, 4)}
    text = randn(2, 1, 1, 5, 4)

    def on(rank: int) -> None:
        mine = whole.get(rest, randn(3, 1, 1, 6, 4)).double().clone()
        if rest == "other parts that begin alike":
            mine[:, :, -1] += rank
        x = torch.cat((text, mine), 2)
        context_attention(x, x, x, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), layout=JOINT)

    run_ranks(on, 2)
