"""Attention that is called without Python raises an error if it can be detected. It would be local to each rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.overrides import handle_torch_function

from cp_styles import AttentionContextParallel, ModuleContextParallel, contiguous, flex_attention
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.testing import RankError, run_ranks
from cp_styles.torch_api import context_parallel
from tests.oracle import attention_inputs, randn
from tests.ranks.attention_case import cp_mesh, every_rank_raises

LENGTH = 12

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated, and used all the same

    @torch.jit.script
    def scripted(query, key, value):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)

    @torch.jit.script
    def harmless(x):
        return torch.nn.functional.gelu(x)

    class Attend(nn.Module):
        def forward(self, query, key, value):
            return F.scaled_dot_product_attention(query, key, value)

    scripted_module = torch.jit.script(Attend())


class Named(nn.Module):
    def forward(self, *tensors):
        return scripted(*tensors).sum() + F.scaled_dot_product_attention(*tensors).sum()


class Below(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = scripted_module

    def forward(self, *tensors):
        return self.below(*tensors)


class Fine(nn.Module):
    def forward(self, *tensors):
        return harmless(F.scaled_dot_product_attention(*tensors))


def results(act, ranks: int = 2):
    inputs, _ = attention_inputs(length=LENGTH, batch=1)
    layout = contiguous(LENGTH, ranks)

    def on(rank: int):
        tensors = [layout.shard(x, 2, rank).clone().requires_grad_() for x in inputs]
        # What came before the module is not its: the rank's own, on purpose perhaps.
        tensors[0] = scripted_module(*tensors)
        return act(cp_mesh(ranks), *tensors)

    return run_ranks(on, ranks)


def by_module(module: nn.Module, mesh, *tensors):
    return parallelize_module(module, mesh, ModuleContextParallel(layout=contiguous))(*tensors)


def by_block(module: nn.Module, mesh, *tensors):
    with context_parallel(mesh, layout=contiguous):
        return module(*tensors).sum()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Named, "scripted is TorchScript with attention in it"),
        (Below, "RecursiveScriptModule is TorchScript with attention in it"),
    ],
)
def test_torchscript(module, message: str):
    with pytest.raises(RankError) as caught:
        results(lambda *args: by_module(module(), *args))
    assert str(caught.value).count(message) == 2, str(caught.value)


@pytest.mark.parametrize("door", [by_module, by_block])
def test_torchscript_without_attention(door):
    results(lambda *args: door(Fine(), *args))


@pytest.mark.parametrize("before", [False, True], ids=["never any", "after attention"])
def test_blocks_without_attention(before: bool, recwarn):
    """A loss, a router, attention over heads: right. If there never was attention, there is a warning."""
    logits, labels = randn(0, 1, 8, 5), torch.arange(8)[None] % 5

    def on(rank: int) -> None:
        mesh, given, wanted = cp_mesh(2), logits.clone(), labels.clone()
        if before:
            with context_parallel(mesh):
                F.scaled_dot_product_attention(*[randn(3, 1, 2, 4, 4)] * 3)
        with context_parallel(mesh, buffers=[given, wanted], buffer_seq_dims=[1, 1]), torch.no_grad():
            F.cross_entropy(given.flatten(0, 1), wanted.flatten())
            torch.softmax(given[0] @ randn(1, 5, 4), -1) @ randn(2, 4, 3)  # as many experts as tokens
            heads = given[:, :, None, :].expand(-1, -1, 4, -1)
            torch.softmax(heads @ heads.mT, -1) @ heads

    run_ranks(on, 2)
    texts = [str(each.message) for each in recwarn if "no attention was called inside" in str(each.message)]
    assert bool(texts) is not before


class Residuals(nn.Module):
    """Attention over tokens, or over the layers of each token, as attention residuals have it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = Tokens(), Layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(self.layers([x, x * 2, x + 1]))


class Tokens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q)[:, 0]


class Layers(nn.Module):
    def forward(self, states: list[torch.Tensor]) -> torch.Tensor:
        x = torch.stack(states, 2).flatten(0, 1)[:, None]
        return F.scaled_dot_product_attention(x[:, :, :1], x, x)[:, 0, 0].view(states[0].shape)


def test_attention_along_another_dim():
    """A style on the model would join the layers of different tokens. On the attention over tokens it is exact."""
    x, layout = randn(0, 2, 10, 4), contiguous(10, 2)
    wanted = Residuals()(x)

    def on(rank: int, plan: Any) -> torch.Tensor:
        return parallelize_module(Residuals(), cp_mesh(2), plan)(layout.shard(x, 1, rank))

    with pytest.raises(RankError, match=r"attention over 3 positions, with a batch of 10, in which are the 5") as error:
        run_ranks(on, 2, ModuleContextParallel(layout=contiguous))
    assert str(error.value).count("it attends along another dim than the tokens") == 2
    with pytest.raises(RankError, match="Attention along another dim than the tokens needs no style"):
        run_ranks(lambda rank: parallelize_module(Layers(), cp_mesh(2), ModuleContextParallel(layout=layout))([x]), 2)
    found = run_ranks(on, 2, {"tokens": ModuleContextParallel(layout=contiguous)})
    assert torch.allclose(layout.unshard(found, 1), wanted, atol=1e-12, rtol=0)

    def alone(rank: int) -> torch.Tensor:
        model = parallelize_module(Residuals(), cp_mesh(1), ModuleContextParallel(layout=contiguous))
        return model(contiguous(10, 1).shard(x, 1, 0))

    assert torch.allclose(run_ranks(alone, 1)[0], wanted, atol=1e-12, rtol=0)  # one rank has all tokens of each layer


@pytest.mark.parametrize("batch", [1, 5, 10])
def test_attention_that_shortens_its_tokens(batch: int):
    """Fewer tokens than were cut, in a batch that is no multiple of them, go on."""
    x, layout = randn(0, batch, 12, 4), contiguous(12, 2)

    class Shorter(Tokens):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:, ::2])

    def on(rank: int) -> torch.Tensor:
        return parallelize_module(Shorter(), cp_mesh(2), ModuleContextParallel(layout=contiguous))(
            layout.shard(x, 1, rank)
        )

    assert torch.allclose(contiguous(6, 2).unshard(run_ranks(on, 2), 1), Tokens()(x[:, ::2]), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("function", "style"),
    [
        *((name, ModuleContextParallel) for name in ("scaled_dot_product_attention", "flex_attention", "varlen_attn")),
        ("scaled_dot_product_attention", AttentionContextParallel),
    ],
)
@pytest.mark.parametrize("softcap", [30.0, None])
def test_arguments_of_a_later_torch(function: str, style: Any, softcap: float | None):
    """Refused on every rank, by name. None is no argument."""

    class Core(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
            if function == "flex_attention":
                return flex_attention(query, key, value, softcap=softcap)
            if function == "varlen_attn":
                calls = AttentionCalls.current()
                assert calls is not None
                pack, ends = query[0].transpose(0, 1), torch.tensor([0, 10], dtype=torch.int32)
                return calls._attend_varlen(pack, pack, pack, ends, ends, 10, 10, softcap=softcap)
            inputs = query, key, value
            return handle_torch_function(F.scaled_dot_product_attention, inputs, *inputs, softcap=softcap)

    def on(rank: int) -> None:
        core = parallelize_module(Core(), cp_mesh(2), style(layout=contiguous))
        core(*[contiguous(10, 2).shard(randn(0, 1, 2, 10, 4), 2, rank)] * 3)

    if softcap is None:
        run_ranks(on, 2)
        return
    with every_rank_raises(f"{function} with an unknown argument: {{'softcap': 30.0}}; leave"):
        run_ranks(on, 2)


@pytest.mark.parametrize("padding", [1, "same", 2, 0])
def test_convolutions_by_where_they_look(padding: Any):
    """A convolution that looks both ways is not sent to a function for causal ones."""

    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.tokens = nn.Conv1d(4, 4, 3, padding=padding).double(), Tokens()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tokens(self.conv(x.mT).mT)

    def on(rank: int) -> None:
        model = parallelize_module(Convolved(), cp_mesh(2), ModuleContextParallel(layout=contiguous))
        model(contiguous(10, 2).shard(randn(0, 1, 10, 4), 1, rank))

    with pytest.raises(RankError, match="carries values from token to token") as found:
        run_ranks(on, 2)
    both = padding in (1, "same")
    assert ("It looks both ways: give its taps the tokens of context_roll(" in str(found.value)) == both
    assert ("context_causal_conv1d" in str(found.value)) != both


@pytest.mark.parametrize(("queries", "passages"), [((2, 8), (8, 12)), ((1, 16), (16, 24))])
def test_two_inputs_of_which_one_has_a_batch_of_the_length_of_the_other(queries: Any, passages: Any):
    """A bi-encoder with as many passages as a query has tokens on a rank: it attends along the tokens of each."""
    given = randn(0, *queries, 4), randn(1, *passages, 4)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Tokens()

        def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
            return [self.encoder(x) for x in inputs]

    def on(rank: int) -> list[torch.Tensor]:
        model = parallelize_module(Both(), cp_mesh(2), ModuleContextParallel(layout=contiguous))
        return model(*(contiguous(x.shape[1], 2).shard(x, 1, rank) for x in given))

    parts = zip(*run_ranks(on, 2), strict=True)
    for x, both, wanted in zip(given, parts, Both()(*given), strict=True):
        assert torch.allclose(contiguous(x.shape[1], 2).unshard(list(both), 1), wanted, atol=1e-12, rtol=0)
