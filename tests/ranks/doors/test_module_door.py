"""ModuleContextParallel: models that call scaled_dot_product_attention somewhere inside, and their errors."""

from __future__ import annotations

import copy
from functools import cache, partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

from cp_styles import context_attention
from cp_styles._lib.compat import function_modes
from cp_styles.batch import sum_gradients
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.layouts import contiguous, head_tail
from cp_styles.masks import Full
from cp_styles.mixers import context_roll
from cp_styles.styles import ModuleContextParallel
from cp_styles.testing import run_ranks
from tests.doors import door
from tests.oracle import dense_attention, error, filled, randn
from tests.ranks.attention_case import EXACT, cp_mesh, on_every_rank
from tests.ranks.leak_scene import RANKS, Scene, refusals

WIDTH, HEADS, KV_HEADS, LENGTH = 12, 4, 2, 13


def by_attribute(*args, **kwargs):
    return F.scaled_dot_product_attention(*args, **kwargs)


def by_oracle(query, key, value, *, is_causal, enable_gqa):
    length = query.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return dense_attention(query, key, value, mask)


class SelfAttention(nn.Module):
    """As models have it: hidden states in and out, the projections its own. ``attend`` is how it got the function."""

    def __init__(self, attend=imported_by_name) -> None:
        super().__init__()
        self.attend = attend
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x):
        query, key, value = (
            project(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        return self.o(self.attend(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


def test_dropout_of_a_transformer_layer_is_refused():
    """Its default, in training."""

    def call(s: Scene):
        layer = Holder(lambda m, q, k, v: m.held[0](q[:, 0]), nn.TransformerEncoderLayer(8, 2, dtype=torch.float64))
        styled(layer, s.mesh)(*s.leaves()[0])

    assert "dropout_p=0.1" in refusals(call)


class Layer(nn.Module):
    def __init__(self, attend) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), SelfAttention(attend)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    """Two layers; the first gets the function by name, the second by attribute. ``ckpt`` wraps them."""

    def __init__(self, *, attends=(imported_by_name, by_attribute), ckpt=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attend) for attend in attends)
        self.ckpt = ckpt
        filled(self, 0.4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.ckpt is None else self.ckpt(layer, x)
        return x


TOKENS, COTANGENT = randn(50, 2, LENGTH, WIDTH), randn(51, 2, LENGTH, WIDTH)
REENTRANT = partial(checkpoint, use_reentrant=True)
NOT_REENTRANT = partial(checkpoint, use_reentrant=False)


@cache
def expected():
    """``(out, dx, parameter gradients)`` of one process."""
    model = Model(attends=[by_oracle] * 2)
    leaf = TOKENS.clone().requires_grad_()
    out = model(leaf)
    out.backward(COTANGENT)
    return out.detach(), leaf.grad, {name: p.grad for name, p in model.named_parameters()}


def styled(model: nn.Module, mesh, **style) -> nn.Module:
    return parallelize_module(model, mesh, ModuleContextParallel(**style))


def check(model: nn.Module, mesh, rank: int) -> None:
    """Forward and backward of a styled model are one process'."""
    layout = head_tail(LENGTH, RANKS)
    out_wanted, dx_wanted, grads_wanted = expected()
    model.zero_grad()
    leaf = layout.shard(TOKENS, 1, rank).clone().requires_grad_()
    out = model(leaf)
    out.backward(layout.shard(COTANGENT, 1, rank))
    sum_gradients(model, mesh)
    assert error(out, layout.shard(out_wanted, 1, rank)) < EXACT
    assert error(leaf.grad, layout.shard(dx_wanted, 1, rank)) < EXACT
    for name, parameter in model.named_parameters():
        assert error(parameter.grad, grads_wanted[name]) < EXACT, name


def outside_is_untouched() -> None:
    """Attention on other tensors, by both names of the function, equals that of one device."""
    inputs = [randn(index, 1, 2, 5, 4) for index in range(3)]
    wanted = dense_attention(*inputs)
    for attend in (imported_by_name, by_attribute):
        assert error(attend(*inputs), wanted) < EXACT


def on_ranks(act):
    """A test of ``act(mesh, rank)`` on all ranks, with attention outside untouched afterwards."""

    def test() -> None:
        def on(rank: int) -> None:
            act(cp_mesh(RANKS), rank)
            outside_is_untouched()

        expected()
        run_ranks(on, RANKS)

    test.__name__, test.__doc__ = act.__name__, act.__doc__
    return test


class AgainByItself(torch.autograd.Function):
    """A checkpoint that is not torch's: it is not known what its backward runs."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        out.backward(grad)
        return None, x.grad


@on_ranks
def test_a_checkpoint_that_is_not_torchs(mesh, rank):
    """Around a layer, which it calls again, it is right. Inside of a layer it is refused. So is not what is only
    without gradients."""
    check(styled(Model(ckpt=lambda layer, x: AgainByItself.apply(layer, x)), mesh), mesh, rank)
    x = head_tail(LENGTH, RANKS).shard(TOKENS, 1, rank).clone().requires_grad_()

    class Inside(nn.Module):
        def forward(self, x):
            return AgainByItself.apply(lambda x: imported_by_name(*[x[:, None]] * 3), x)

    with pytest.raises(NotImplementedError, match=r"AgainByItselfBackward, an autograd\.Function"):
        styled(Inside(), mesh)(x)

    class Frozen(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                frozen = imported_by_name(*[x[:, None]] * 3)[:, 0]
            return x * frozen

    wanted = TOKENS.clone() * imported_by_name(*[TOKENS[:, None]] * 3)[:, 0]
    assert error(styled(Frozen(), mesh)(x), head_tail(LENGTH, RANKS).shard(wanted, 1, rank)) < EXACT


@on_ranks
def test_a_forward_of_its_own(mesh, rank):
    """It would hide the style's. What is inside such a module's parent runs under the parent's."""
    model = Model()
    forward = model.forward
    model.forward = lambda *args: forward(*args)
    with pytest.raises(ValueError, match="the attribute `forward` of the module itself was set"):
        styled(model, mesh)
    del model.forward
    layer = model.layers[0]
    inner = layer.forward
    layer.forward = lambda *args: inner(*args)
    check(styled(model, mesh), mesh, rank)


# -- what stays as it was --


@pytest.mark.parametrize("ckpt", [None, REENTRANT, NOT_REENTRANT], ids=["plain", "reentrant", "not reentrant"])
def test_however_deep_a_call_is_it_passes_one_mode(ckpt):
    """Every torch function in the module passes those that are entered; modules in modules enter the same one."""
    seen = []

    def spy(*args, **kwargs):
        seen.append(sum(isinstance(mode, AttentionCalls) for mode in function_modes()))
        return imported_by_name(*args, **kwargs)

    def on(rank: int) -> None:
        check(styled(Model(attends=(spy, spy), ckpt=ckpt), mesh := cp_mesh(RANKS)), mesh, rank)

    expected()
    run_ranks(on, RANKS)
    assert len(seen) == RANKS * 2 * (1 if ckpt is None else 2)
    assert set(seen) == {1}


@on_ranks
def test_names_and_classes(mesh, rank):
    plain, model = Model(), Model()
    styled(model, mesh)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    for mine, was in zip(model.modules(), plain.modules(), strict=True):
        assert isinstance(mine, type(was))
        assert type(mine).__qualname__ == type(was).__qualname__
    assert repr(model) == repr(plain)
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("name", ["function", "latents", "flex", "score_mod", "varlen"])
@on_every_rank(RANKS)
def test_functions_alone(name: str, rank: int, mesh):
    """A model whose attention calls functions of the package has the style, and its checks."""
    attend = door(name, mesh, length=LENGTH)
    check(styled(Model(attends=[lambda *qkv, **_: attend(*qkv)] * 2), mesh), mesh, rank)


@on_every_rank(RANKS)
def test_a_function_alone_in_a_graph(rank: int, mesh):
    attend = door("function", mesh)
    model = styled(Model(attends=[lambda *qkv, **_: attend(*qkv)] * 2), mesh)
    model.compile(backend="eager", fullgraph=True)
    check(model, mesh, rank)


@pytest.mark.parametrize(
    ("what", "over"),
    [*product(["attention", "decoding", "a mixer"], ["the ranks", "others"]), ("torch's attention", "the ranks")],
)
def test_other_functions_alone(what: str, over: str):
    """They count, like torch's attention, if they run over the ranks of the style, and in their forward alone."""

    def act(mesh, layout, m, q, k, v):
        if what == "torch's attention":
            return imported_by_name(q, k, v)
        if what == "a mixer":
            return context_roll(q, 1, 2, mesh, layout=layout)
        if what == "decoding":
            return context_decode(torch.ones_like(q[:, :, :1]), KVCache(mesh, layout, k, v))
        return context_attention(q, k, v, mesh, layout=layout)

    def on(rank: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("cp", "other"))
        layout = head_tail(LENGTH, RANKS)
        parts = [layout.shard(randn(seed, 1, 2, LENGTH, 4), 2, rank) for seed in range(3)]
        mine, cut = mesh["cp"], layout
        if over == "others":
            mine, cut = mesh["other"], contiguous(parts[0].shape[2], 1)
            parts = [x.clone() for x in parts]
        model = styled(Holder(partial(act, mine, cut)), mesh["cp"])
        with torch.no_grad():
            model(*parts)
            model.act = lambda m, q, k, v: q
            with pytest.raises(NotImplementedError, match="no scaled_dot_product_attention was called inside"):
                model(*parts)

    errors = run_ranks(on, RANKS, return_errors=True)
    if over == "the ranks":
        assert errors == [None] * RANKS
    else:
        assert all("no scaled_dot_product_attention was called inside" in str(error) for error in errors)


# -- what raises --


class Holder(nn.Module):
    """A module whose forward is given."""

    def __init__(self, act, *children: nn.Module) -> None:
        super().__init__()
        self.act, self.held = act, nn.ModuleList(children)

    def forward(self, query, key, value):
        return self.act(self, query, key, value)


MHA = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
BIASED = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, dtype=torch.float64)


@pytest.mark.parametrize(
    ("act", "children", "message"),
    [
        (lambda m, q, k, v: q, (), "no scaled_dot_product_attention was called inside"),
        (lambda m, q, k, v: m.held[0](q[:, 0], q[:, 0], q[:, 0])[0], (MHA,), "call it with need_weights=False"),
        (lambda m, q, k, v: m.held[0](*[q[:, 0]] * 3, need_weights=False)[0], (BIASED,), "make it without"),
        (lambda m, q, k, v: imported_by_name(q, k, v, dropout_p=0.1, enable_gqa=True), (), "dropout_p=0.1"),
        (lambda m, q, k, v: imported_by_name(q, k, v, torch.ones(1, 4), enable_gqa=True), (), "the whole sequence"),
        (lambda m, q, k, v: imported_by_name(q, k, v), (), "need enable_gqa=True"),
    ],
    ids=["no attention", "weights of MultiheadAttention", "its own keys", "dropout", "attn_mask", "gqa"],
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_what_is_refused(act, children, message: str, mode: str):
    def call(s: Scene):
        module = Holder(act, *(copy.deepcopy(child) for child in children)).train(mode == "train")
        with torch.set_grad_enabled(mode == "train"):
            styled(module, s.mesh, mask=Full())(*s.leaves()[0])

    assert message in refusals(call)
