"""What TokenFlow says of a computation is what changing one token at a time shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cp_styles.intercept.token_flow import TokenFlow
from tests.oracle import randn

BATCH, LENGTH, WIDTH = 2, 6, 8
TOKEN = torch.arange(LENGTH)
X = randn(0, BATCH, LENGTH, WIDTH)
W = randn(1, WIDTH, WIDTH)
TABLE = randn(2, 64, WIDTH)
CLASSES = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 5 % WIDTH
ZEROS = nn.Parameter(torch.zeros(64, WIDTH, dtype=torch.float64))


def layer(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return module.double()


def classes(x):
    return x.argmax(-1)


def following(x):
    return classes(x).roll(-1, 1)


def heads(x):
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


def plain_attention(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


def by_loop(x):
    state, out = torch.zeros_like(x[:, 0]), []
    for token in x.unbind(1):
        state = 0.5 * state + token
        out.append(state)
    return torch.stack(out, 1)


def backwards(x):
    return by_loop(x.flip(1)).flip(1)


def into_a_buffer(x):
    out, state = torch.empty_like(x), x.new_zeros(BATCH, WIDTH)
    for token in range(LENGTH):
        state = 0.5 * state + x[:, token]
        out[:, token] = state
    return out


def by_row_into_a_buffer(x):
    out = torch.empty_like(x)
    for token in range(LENGTH):
        out[:, token] = x[:, token] @ W
    return out


def top_one(flat):
    return (flat @ W[:, :3]).argmax(-1)


def experts_by_index(x):
    flat, out = x.flatten(0, 1), torch.zeros(BATCH * LENGTH, WIDTH, dtype=x.dtype)
    chosen = top_one(flat)
    for expert in range(3):
        (rows,) = torch.where(chosen == expert)
        out.index_add_(0, rows, flat[rows] @ W * (1 + expert))
    return out.view_as(x)


def an_expert_of_one_token(x):
    flat, out = x.flatten(0, 1), torch.zeros(BATCH * LENGTH, WIDTH, dtype=x.dtype)
    for rows in (torch.arange(1), torch.arange(1, 2), torch.arange(2, BATCH * LENGTH)):
        out.index_add_(0, rows, flat[rows] @ W)
    return out.view_as(x)


def experts_sorted(x):
    flat = x.flatten(0, 1)
    order = top_one(flat).argsort(stable=True)
    sorted_rows = flat[order] @ W
    return torch.empty_like(sorted_rows).index_copy_(0, order, sorted_rows).view_as(x)


def experts_by_mask(x):
    flat = x.flatten(0, 1)
    chosen, out = top_one(flat), torch.zeros_like(flat)
    for expert in range(3):
        mask = chosen == expert
        out[mask] = flat[mask] @ W * (1 + expert)
    return out.view_as(x)


def experts_two_each(x):
    flat = x.flatten(0, 1)
    weights, chosen = (flat @ W[:, :3]).softmax(-1).topk(2, -1)
    rows = torch.arange(len(flat)).repeat_interleave(2)
    order = chosen.flatten().argsort(stable=True)
    out = (flat[rows[order]] @ W) * weights.flatten()[order, None]
    back = torch.empty_like(out)
    back[order] = out
    return back.view(-1, 2, WIDTH).sum(1).view_as(x)


def experts_scattered(x):
    flat = x.flatten(0, 1)
    weights, chosen = (flat @ W[:, :3]).topk(2, -1)
    full = torch.full((len(flat), 3), -torch.inf, dtype=x.dtype).scatter_(1, chosen, weights).softmax(-1)
    out = torch.einsum("te,tde->td", full, torch.stack([flat @ W, flat, flat.sin()], -1))
    return out.view_as(x)


def experts_of_all(x):
    """Every token through every expert, weighted: no routing at all."""
    flat = x.flatten(0, 1)
    each = torch.bmm(flat.expand(3, -1, -1), W.expand(3, -1, -1)).view(3, BATCH, LENGTH, WIDTH)
    weights = (flat @ W[:, :3]).softmax(-1).T.reshape(3, BATCH, LENGTH, 1)
    return (each * weights).sum(0)


def tokens_that_an_expert_chooses(x):
    flat, out = x.flatten(0, 1), torch.zeros(BATCH * LENGTH, WIDTH, dtype=x.dtype)
    for expert in range(3):
        rows = (flat @ W[:, expert]).topk(LENGTH).indices.sort().values
        out.index_add_(0, rows, flat.index_select(0, rows) if expert else flat[rows])
    return out.view_as(x)


def rotary(x):
    angles = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH, 1) * 0.1
    cut = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(cut * torch.polar(torch.ones_like(angles, dtype=x.dtype), angles.double())).flatten(-2)


def centred_then_shifted(x):
    return F.pad(x, (0, 0, 1, -1)) + x


def with_statistics_in_place(x):
    x = x.clone()
    x[:, :, 0].sub_(x[:, :, 0].mean(1, keepdim=True))
    return x


def a_slot_in_place(x):
    x = x.clone()
    x[:, :, 0] = x[:, :, 1].sin()
    x[..., 2:4].mul_(2)
    return x


def by_vmap(x):
    return torch.vmap(lambda row: row @ W - row.mean())(x.flatten(0, 1)).view_as(x)


BILINEAR = layer(nn.Bilinear(WIDTH, WIDTH, WIDTH))
CONVOLUTION = {size: layer(nn.Conv1d(WIDTH, WIDTH, size, padding=size // 2)) for size in (1, 3)}
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # By token.
    "linear": layer(nn.Linear(WIDTH, WIDTH)),
    "layer norm": layer(nn.LayerNorm(WIDTH)),
    "root mean square norm": layer(nn.RMSNorm(WIDTH)),
    "group norm of flattened tokens": lambda x: layer(nn.GroupNorm(2, WIDTH))(x.flatten(0, 1)).view_as(x),
    "convolution of width 1": lambda x: CONVOLUTION[1](x.mT).mT,
    "convolution over features": lambda x: layer(nn.Conv1d(1, 1, 3, padding=1))(x.reshape(-1, 1, WIDTH)).view_as(x),
    "softmax of features": lambda x: x.softmax(-1),
    "sorted features": lambda x: x.sort(-1).values,
    "cumulative features": lambda x: x.cumsum(-1),
    "gated": lambda x: F.glu(torch.cat((x, x @ W), -1), -1),
    "heads and back": lambda x: joined(heads(x) * 2),
    "experts by index": experts_by_index,
    "an expert of one token": an_expert_of_one_token,
    "experts sorted": experts_sorted,
    "experts by mask": experts_by_mask,
    "two experts each": experts_two_each,
    "experts scattered": experts_scattered,
    "all experts": experts_of_all,
    "rotary": rotary,
    "learned slots": lambda x: plain_attention(x, TABLE[:LENGTH], TABLE[:LENGTH]),
    "attention among the heads of a token": lambda x: joined(
        plain_attention(*[heads(x).transpose(1, 2)] * 3).transpose(1, 2)
    ),
    "into a buffer, by token": by_row_into_a_buffer,
    "a slot in place": a_slot_in_place,
    "by vmap": by_vmap,
    "flipped twice": lambda x: (x.flip(1) @ W).flip(1),
    "padded and cut": lambda x: F.pad(x, (0, 0, 2, 1))[:, 2:-1],
    "joined and split": lambda x: torch.cat((x.new_ones(BATCH, 1, WIDTH), x), 1).split((1, LENGTH), 1)[1] * 2,
    "one hot": lambda x: F.one_hot(x.argmax(-1), WIDTH).double() + x,
    "log-probabilities of classes": lambda x: x.log_softmax(-1).gather(-1, CLASSES[..., None]),
    "the same by indices": lambda x: x[torch.arange(BATCH)[:, None], TOKEN, CLASSES][..., None],
    "cross entropy": lambda x: F.cross_entropy(x.mT, CLASSES, reduction="none")[..., None],
    "dropout of none": lambda x: F.dropout(x, 0.0),
    "checkpointed": lambda x: checkpoint(layer(nn.Linear(WIDTH, WIDTH)), x, use_reentrant=False),
    "fourier of features": lambda x: torch.fft.rfft(x, dim=-1).abs(),
    "a norm in eval": lambda x: layer(nn.BatchNorm1d(WIDTH)).eval()(x.mT).mT,
    "complex numbers of two": lambda x: torch.view_as_real(torch.complex(x, x @ W)).flatten(2),
    "bilinear of a token": lambda x: BILINEAR(x, x),
    "buckets": lambda x: F.embedding(torch.bucketize(x[..., 0], TOKEN.double()), TABLE),
    # From token to token. Classes by ids that were shifted in here are those of other tokens.
    "log-probabilities of the next": lambda x: x.log_softmax(-1).gather(-1, following(x)[..., None]),
    "the same of the next by indices": lambda x: x[torch.arange(BATCH)[:, None], TOKEN, following(x)][..., None],
    "cross entropy of the next": lambda x: F.cross_entropy(x.mT, following(x), reduction="none")[..., None],
    "its sum": lambda x: F.cross_entropy(x[:, 1:].flatten(0, 1), classes(x)[:, :-1].flatten(), reduction="sum") + x,
    "embeddings of the next": lambda x: F.embedding(following(x), TABLE),
    "a hash of two ids": lambda x: F.embedding((classes(x) * 7 ^ F.pad(classes(x), (1, -1))) % 64, TABLE) + x,
    "mean of complex numbers": lambda x: x + torch.complex(x, x).mean(1, keepdim=True).real,
    "mean of bilinear": lambda x: x + BILINEAR(x, x).mean(1, keepdim=True),
    "mean of buckets": lambda x: x + torch.bucketize(x, TOKEN.double()).double().mean(1, keepdim=True),
    "mean of magnitudes in place": lambda x: x + (x * 1).abs_().mean(1, keepdim=True),
    "bag of ids": lambda x: x + F.embedding_bag(classes(x), TABLE)[:, None],
    "place among those that differ": lambda x: x + TABLE[classes(x).unique(return_inverse=True)[1]],
    "how often": lambda x: x * classes(x).flatten().bincount(minlength=WIDTH)[classes(x)][..., None],
    "singular values": lambda x: x + torch.linalg.svdvals(x)[:, :1, None],
    "centred": lambda x: x - x.mean(1, keepdim=True),
    "softmax of tokens": lambda x: x.softmax(1),
    "cumulative tokens": lambda x: x.cumsum(1),
    "sorted tokens": lambda x: x.sort(1).values,
    "convolution of width 3": lambda x: CONVOLUTION[3](x.mT).mT,
    "causal convolution": lambda x: layer(nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH))(x.mT)[..., :-2].mT,
    "group norm": lambda x: layer(nn.GroupNorm(2, WIDTH))(x.mT).mT,
    "instance norm": lambda x: layer(nn.InstanceNorm1d(WIDTH))(x.mT).mT,
    "batch norm": lambda x: layer(nn.BatchNorm1d(WIDTH))(x.mT).mT,
    "norm of tokens and features": layer(nn.LayerNorm((LENGTH, WIDTH))),
    "pooling": lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "pooling of maxima": lambda x: F.max_pool1d(x.mT, 3, 1, 1).mT,
    "fourier of tokens": lambda x: torch.fft.fft(x, dim=1).real,
    "recurrence": by_loop,
    "recurrence backwards": backwards,
    "recurrence into a buffer": into_a_buffer,
    "gated recurrence": lambda x: layer(nn.GRU(WIDTH, WIDTH, batch_first=True))(x)[0],
    "memory": lambda x: layer(nn.LSTM(WIDTH, WIDTH, batch_first=True)).float()(x.float())[0].double(),
    "attention": lambda x: plain_attention(x, x @ W, x),
    "linear attention": lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).cumsum(1).sum(-1),
    "linear attention by product": lambda x: x @ (x.mT @ x),
    "einsum": lambda x: torch.einsum("blm,bmd->bld", torch.einsum("bld,bmd->blm", x, x), x),
    "mixer": lambda x: (x.mT @ randn(5, LENGTH, LENGTH)).mT,
    "shifted": lambda x: torch.cat((x[:, 1:], x[:, :1]), 1),
    "shifted and padded": lambda x: F.pad(x, (0, 0, 1, -1)),
    "shifted and added": centred_then_shifted,
    "rolled": lambda x: x + x.roll(1, 1),
    "tokens that an expert chooses": tokens_that_an_expert_chooses,
    "tokens gathered by rank": lambda x: x.gather(1, x.topk(3, 1).indices.sort(1).values.repeat(1, 2, 1)),
    "differences": lambda x: torch.diff(x, dim=1, prepend=x[:, :1]),
    "distances": lambda x: torch.cdist(x, x) @ x,
    "its last token": lambda x: x + x[:, -1:],
    "its largest token": lambda x: x * x.amax(1, keepdim=True),
    "statistics in place": with_statistics_in_place,
    "in a window": lambda x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1),
    "interpolated": lambda x: F.interpolate(x.mT, scale_factor=2, mode="linear")[..., :LENGTH].mT,
}


def changes(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether some token's output depends on another token's input."""
    with torch.no_grad():
        before = function(X.clone())
        for token in range(LENGTH):
            other = X.clone()
            other[:, token] *= -1.3
            differ = (function(other) != before).movedim(1, 0).flatten(1).any(1)
            if bool(differ[token != TOKEN].any()):
                return True
    return False


def follow(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, mode=nullcontext):
    flow = TokenFlow(LENGTH)
    with mode():
        x = x.clone()
        with flow:
            flow.seed([(x, 1)])
            out = function(x)
            return flow.problem_of_outputs(out, surely_tokens=True), flow, out


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_mixes_tokens_or_does_not(name: str, mode):
    problem, _, _ = follow(FUNCTIONS[name], X, mode)
    assert (problem is not None) == changes(FUNCTIONS[name]), problem


@pytest.mark.parametrize("name", ["linear", "experts by index", "recurrence", "convolution of width 3"])
def test_with_gradients_nothing_changes(name: str):
    function, x = FUNCTIONS[name], X.clone().requires_grad_()
    found = []
    for way in (function, lambda x: follow(function, x)[2]):
        out = way(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        found.append((out, gradient))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_other_modes_do_not_notice():
    """Operators are counted as often, and random numbers are those without it."""
    found = []
    for flow in (nullcontext(), TokenFlow(LENGTH)):
        torch.manual_seed(0)
        with FlopCounterMode(display=False) as counter, flow:
            if isinstance(flow, TokenFlow):
                flow.seed([(X, 1)])
            out = F.dropout(experts_by_index(X) @ W, 0.5)
        found.append((counter.get_flop_counts(), out, torch.get_rng_state()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][2], found[1][2])


PLACED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "first rows of a table": (lambda x: x + TABLE[: x.shape[1]], True),
    "of a batch of tables": (lambda x: x + TABLE[None, : x.shape[1], :] * 0.5, True),
    "looked up by a range": (lambda x: x + F.embedding(torch.arange(x.shape[1]), TABLE), True),
    "with an offset, as some models have it": (lambda x: x + TABLE[torch.arange(x.shape[1]) + 2], True),
    "angles": (lambda x: x * torch.outer(torch.arange(x.shape[1]).double(), TABLE[0]).cos(), True),
    "counted by a list": (lambda x: x + TABLE[torch.tensor(list(range(x.shape[1])))], True),
    "counted by numpy": (lambda x: x + TABLE[torch.from_numpy(np.arange(x.shape[1]))[None]], True),
    "sums of ones": (lambda x: x + TABLE[torch.ones(x.shape[:2], dtype=torch.int64).cumsum(1)], True),
    "parts of a line": (lambda x: x * torch.linspace(0, 1, x.shape[1])[:, None], True),
    "a table that is trained": (lambda x: x + ZEROS[: x.shape[1]], True),
    "of which all rows are alike so far": (lambda x: x * (torch.arange(x.shape[1]) / 64).floor()[:, None], False),
    "positions of its own": (lambda x: x + TABLE[torch.arange(x.shape[1]) + LENGTH], False),
    "a range that begins elsewhere": (lambda x: x + TABLE[torch.arange(LENGTH, 2 * LENGTH)], False),
    "rows further on": (lambda x: x + TABLE[LENGTH : 2 * LENGTH], False),
    "a table of features": (lambda x: x + TABLE[:, :LENGTH].sum(1)[:WIDTH], False),
    "as many features": (lambda x: x[..., :LENGTH] * TABLE[0, :LENGTH], False),
    "ones": (lambda x: x * torch.ones(64)[: x.shape[1], None], False),
    "rows that take part in nothing": (lambda x: x + 0 * len(TABLE[: x.shape[1]]), False),
    "a mask of distances": (lambda x: x + (TOKEN[:, None] > torch.arange(x.shape[1])).sum() * 0, False),
}


@pytest.mark.parametrize("name", PLACED)
def test_what_depends_on_the_place_in_a_part(name: str):
    function, counts = PLACED[name]
    flow = TokenFlow(LENGTH, lambda length: [TOKEN + length])
    with flow:
        flow.seed([(X, 1)])
        problem = flow.problem_of_outputs(function(X), surely_tokens=True)
    assert (problem is not None) == counts, problem
    assert problem is None or problem.kind == "counted"
    # Where the part is the first one, nothing is wrong.
    flow = TokenFlow(LENGTH)
    with flow:
        flow.seed([(X, 1)])
        assert flow.problem_of_outputs(function(X), surely_tokens=True) is None


class Kernel(torch.autograd.Function):
    """As those in Triton are called: memory is made by torch, and written by something that is not torch."""

    @staticmethod
    def forward(ctx, x, make, write):
        out = make(x)
        write(out.numpy(), x.detach().numpy())
        return out

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError


def cumulative(out, x):
    out[...] = x.cumsum(1)


def by_kernel(make, write=cumulative):
    return lambda x: Kernel.apply(x, make, write) @ W


OUTSIDE = {
    "empty": by_kernel(torch.empty_like),
    "empty of a shape": by_kernel(lambda x: torch.empty(x.shape, dtype=x.dtype)),
    "empty with strides": by_kernel(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)),
    "zeros": by_kernel(torch.zeros_like),
    "seen as another shape": by_kernel(lambda x: x.new_empty(BATCH * LENGTH * WIDTH).view_as(x)),
    "without an operator after it": lambda x: Kernel.apply(x, torch.empty_like, cumulative),
    "one row": lambda x: x + by_kernel(lambda x: x.new_empty(BATCH, WIDTH), lambda out, x: None)(x)[:, None],
}


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_kernel_outside_of_torch(name: str, mode):
    """What it makes of tokens is not known, even if it does not mix them."""
    problem, flow, _ = follow(OUTSIDE[name], X, mode)
    assert problem is not None
    assert "were computed by a kernel, which is no operator of torch's own" in flow.words(problem)
    assert "test_token_flow.py" in problem.where.line


BESIDE = {
    "filled": lambda x: torch.empty_like(x).fill_(2.0) * x,
    "random": lambda x: x.new_empty(BATCH, 1, 1).bernoulli_(0.5) * x,
    "copied into": lambda x: torch.empty_like(x).copy_(x),
    "an output": lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
    "not read": lambda x: torch.baddbmm(torch.empty_like(x), x, W.expand(BATCH, -1, -1), beta=0),
    "of which only the shape is used": lambda x: torch.ones_like(torch.empty_like(x)) * x,
    "zeros that stay zeros": lambda x: x + torch.zeros_like(x),
    "added to zeros": lambda x: torch.zeros_like(x).add_(x),
    "scattered into zeros": lambda x: torch.zeros_like(x).scatter_(2, torch.ones_like(x).long(), x),
    "of numpy": lambda x: x * torch.from_numpy(TABLE[0].numpy()),
}


@pytest.mark.parametrize("name", BESIDE)
def test_memory_that_operators_write(name: str):
    assert follow(BESIDE[name], X)[0] is None


def test_operators_of_other_libraries():
    @torch.library.custom_op("cp_styles_test::own", mutates_args=())
    def own(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)

    @torch.library.custom_op("cp_styles_test::write", mutates_args=("out",))
    def write(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x.cumsum(1))

    def written(x):
        out = torch.empty_like(x)
        write(x, out)
        return out

    for function, name in ((own, "own"), (written, "write")):
        problem, flow, _ = follow(lambda x, function=function: function(x) * 2, X)
        assert f"were computed by cp_styles_test::{name}, which is no operator of torch's own" in flow.words(problem)
    problem, _, _ = follow(lambda x: x * own(TABLE)[:LENGTH].cos().sum(), X)  # it is given no tokens
    assert problem is None


def test_a_loss_of_mixed_tokens():
    """They were elements of tokens before they were summed: the model's own loss is no less wrong."""
    for function, wrong in (
        (lambda x: (x - x.mean(1, keepdim=True)).square().sum(), True),
        (lambda x: plain_attention(x, x, x).sum(), True),
        (lambda x: (x @ W).square().mean(), False),
        (lambda x: x.sum() / x.square().sum(), False),
    ):
        assert (follow(function, X)[0] is not None) == wrong


def test_sums_for_a_loss_and_statistics_are_no_error():
    """They have no tokens any more."""

    def function(x):
        load = (x @ W[:, :3]).softmax(-1).mean((0, 1))
        return {"out": x @ W, "loss": x.square().mean(), "load": load, "pooled": x.mean(1) @ W}

    assert follow(function, X)[0] is None


POOLED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "mean": (lambda x: x.mean(1) @ W, True),
    "largest": (lambda x: x.amax(1), True),
    "sum": (lambda x: x.sum(1), True),
    "scores": (lambda x: (x.mean(1) @ W)[:, 0], True),
    "first token": (lambda x: x[:, 0] @ W, True),
    "last token": (lambda x: x[:, [-1]] @ W, True),
    "chosen tokens": (lambda x: x[torch.arange(BATCH), x.sum(-1).argmax(1)] @ W, True),
    "all but the last": (lambda x: x[:, :-1] @ W, True),
    "sums by sequence": (lambda x: x.square().sum((1, 2)), False),
    "a loss": (lambda x: x.square().mean(), False),
    "by feature": (lambda x: x.mean((0, 1)), False),
}


@pytest.mark.parametrize("name", POOLED)
def test_results_of_a_part_for_each_sequence(name: str):
    function, wrong = POOLED[name]
    problem = follow(function, X)[0]
    assert (problem is not None) == wrong
    assert problem is None or problem.kind == "pooled"


def test_an_attention_over_some_of_the_tokens():
    for some, wrong in ((X[:, None, :2], True), (X[:, None, ::2], True), (X[:, None], False), (W[None, None], False)):
        flow = TokenFlow(LENGTH)
        with flow:
            flow.seed([(X, 1)])
            assert (flow.mixed_before([some * 1]) is not None) == wrong
    flow = TokenFlow(LENGTH)
    with flow:
        flow.seed([(X, 1), (shorter := X[:, :4].clone(), 1)])  # another sequence
        assert flow.mixed_before([shorter[:, None] * 1]) is None


BY_TOKEN = X.reshape(BATCH * LENGTH, 1, 4, 2)
DIMS_OF_AN_ATTENTION: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str | None]] = {
    "tokens": (lambda x: heads(x), None),
    "features of a token": (lambda x: x.reshape(BY_TOKEN.shape), "across"),
    "the same beside a learned one": (lambda x: F.pad(x.reshape(BY_TOKEN.shape), (0, 0, 1, 0)), "across"),
    "heads of a token": (lambda x: x.unflatten(-1, (2, 4)), "across"),
    "as many features of a token as tokens": (lambda x: x[..., :LENGTH, None].expand(-1, -1, -1, 2), "across"),
    "channels": (lambda x: x.mT.unsqueeze(1), "mixed"),
    "as many channels as tokens": (lambda x: x.mT[:, None, :LENGTH], "mixed"),
    "one token": (lambda x: x[:, None, :1], None),
    "frames, one patch after another": (lambda x: x.view(BATCH, LENGTH, 2, 4).transpose(1, 2), None),
    "frames whose patches are sequences": (lambda x: x.view(BATCH, LENGTH, 2, 4).mT.reshape(-1, 1, LENGTH, 2), None),
    "no tokens": (lambda x: TABLE[:BATCH, None, None], None),
}


@pytest.mark.parametrize("name", DIMS_OF_AN_ATTENTION)
def test_attention_along_another_dim_than_that_of_the_tokens(name: str):
    function, kind = DIMS_OF_AN_ATTENTION[name]
    flow = TokenFlow(LENGTH, looks_at_readers=True)
    with flow:
        flow.seed([(X, 1)])
        words = flow.mixed_before([function(X)])
    assert ("along a dim that is not that of" in str(words)) == (kind == "across"), words
    assert ("the product of query and key computes values from" in str(words)) == (kind == "mixed"), words
    assert (words is None) == (kind is None), words
    flow = TokenFlow(LENGTH)  # where the dim of the tokens is a guess, it may be that of a batch
    with flow:
        flow.seed([(X, 1)])
        assert not re.search("along a dim that is|the product of", str(flow.mixed_before([function(X)])))


def test_rows_beside_the_tokens_of_an_attention():
    """Learned ones, but not those of which it is not known whether they are cut, as a text of another argument."""
    other = randn(4, BATCH, 2, WIDTH)
    learned, padding = W[:LENGTH].expand(BATCH, LENGTH, WIDTH), X.new_zeros(BATCH, 2, WIDTH)
    for rows, wrong in ((learned, True), (padding, True), (other, False)):
        flow = TokenFlow(LENGTH)
        with flow:
            flow.seed([(X, 1), (other, None)])
            keys = heads(torch.cat((rows, X), 1) @ W)
            assert (flow.mixed_before([keys]) is not None) == wrong
            assert flow.mixed_before([keys], joint=True) is None


def test_a_large_result_takes_no_memory():
    """Of logits, what is kept is as small as the tokens are many."""
    x, head = randn(3, BATCH, LENGTH, WIDTH).float(), torch.zeros(50_000, WIDTH)
    _, flow, logits = follow(lambda x: F.linear(x, head) * 2, x)
    tokens = flow.label_of(logits).tokens
    assert logits.shape == (BATCH, LENGTH, 50_000)
    assert tokens is not None
    assert tokens.shape == (1, LENGTH, 1)


def shifted_into_zeros(x):
    before = torch.zeros_like(x)
    before[:, 1:] = x[:, :-1]
    return x + before


def neighbours(x):
    return (torch.arange(x.shape[1]) - 1).clamp(min=0)[None, :, None].expand(x.shape)


def summed_by_pair(x):
    pairs = (torch.arange(x.shape[1]) // 2)[None, :, None].expand(x.shape)
    return torch.zeros_like(x).scatter_add(1, pairs, x).gather(1, pairs)


def every_other_feature_in_place(x):
    out = torch.empty_like(x)
    out[..., ::2], out[..., 1::2] = x[..., ::2] * 2, x[..., 1::2]
    out[..., :64] *= 3
    return out


LARGE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "shifted into zeros": (shifted_into_zeros, True),
    "gathered": (lambda x: x + x.gather(1, neighbours(x)), True),
    "taken": (lambda x: x + x.take_along_dim(neighbours(x)[..., :1], 1), True),
    "summed by pair": (summed_by_pair, True),
    "mean pooling": (lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT, True),
    "max pooling": (lambda x: F.max_pool1d(x.mT, 3, 1, 1).mT, True),
    "interpolated": (lambda x: F.interpolate(F.avg_pool1d(x.mT, 2), size=x.shape[1]).mT, True),
    "every other feature in place": (every_other_feature_in_place, False),
    "gathered where it is": (lambda x: x.gather(1, torch.arange(x.shape[1])[None, :, None].expand(x.shape)), False),
    "negative ones removed": (lambda x: x.clone().masked_fill_(x < 0, 0.0), False),
    "blocks of features": (lambda x: (x.view(-1, 32) * 2).view_as(x), False),
    "heads as rows": (lambda x: F.layer_norm(x.view(-1, 64), (64,)).view_as(x), False),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_tensor_is_followed_as_a_small_one(name: str):
    """What is kept is as small as the tokens are many, and so is what is looked at."""
    function, wrong = LARGE[name]
    for length, width in ((24, 64), (2100, 4096)):
        x, flow = torch.randn(2, length, width), TokenFlow(length)
        with torch.no_grad(), flow:
            flow.seed([(x, 1)])
            out = function(x)
            assert (flow.mixed_before([out.unsqueeze(1)]) is not None) == wrong, length
            assert flow.label_of(out).tokens is None or flow.label_of(out).tokens.shape == (1, length, 1) or wrong
