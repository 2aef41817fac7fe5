"""torch's own attention modules under ModuleContextParallel: nn.MultiheadAttention and the layers of nn.Transformer.

float64, against the same module on one process; the tolerance is that of sums in another order.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles.batch import sum_gradients
from cp_styles.layouts import contiguous, head_tail
from cp_styles.styles import ModuleContextParallel
from cp_styles.testing import run_ranks
from tests.oracle import error, randn
from tests.ranks.attention_case import EXACT, cp_mesh

WIDTH, HEADS, LENGTH, MEMORY, BATCH, RANKS = 8, 2, 11, 7, 2, 2
PADDING = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
PADDING[1, 8:] = True
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
BIAS = randn(5, LENGTH, LENGTH)
PER_HEAD = randn(6, BATCH * HEADS, LENGTH, LENGTH)

ENCODER: Any = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}


class Block(nn.Module):
    """As vision transformers have it: a norm, attention, and a part by token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        return x + self.mlp(x + y)


class Other(nn.Module):
    """Query, key and value from one input, in widths of their own; the sequence is the first dim."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        dims = self.attention.embed_dim, self.attention.kdim, self.attention.vdim
        self.into = nn.ModuleList(nn.Linear(WIDTH, dim) for dim in dims)

    def forward(self, x, attn_mask=None, batch=True):
        inputs = [into(x).transpose(0, 1) for into in self.into]
        inputs = inputs if batch else [y[:, 0] for y in inputs]
        out, _ = self.attention(*inputs, need_weights=False, attn_mask=attn_mask)
        return out.transpose(0, 1) if batch else out.expand(BATCH, -1, -1)


class ByFunction(Other):
    """Calls torch's function itself: nn.MultiheadAttention makes numbers of a boolean mask before it does."""

    def forward(self, x):
        x, own = x.transpose(0, 1), self.attention
        weights = own.in_proj_weight, own.in_proj_bias, None, None, False, 0.0, own.out_proj.weight, own.out_proj.bias
        options = {"need_weights": False, "attn_mask": CAUSAL}
        return F.multi_head_attention_forward(x, x, x, WIDTH, HEADS, *weights, **options)[0].transpose(0, 1)


CASES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "block": (Block(), {}),
    "projections of their own": (Other(kdim=6, vdim=5, bias=False), {"attn_mask": BIAS}),
    "packed projections": (Other(), {"attn_mask": PER_HEAD}),
    "without batch": (Other(), {"batch": False}),
    "a boolean mask": (ByFunction(), {}),
    "encoder layer": (nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **ENCODER), {}),
    "padding": (nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **ENCODER), {"src_key_padding_mask": PADDING}),
    "mask and padding": (
        nn.TransformerEncoderLayer(WIDTH, HEADS, 16, norm_first=True, **ENCODER),
        {"src_mask": CAUSAL, "src_key_padding_mask": PADDING},
    ),
    "causal": (nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **ENCODER), {"src_mask": CAUSAL, "is_causal": True}),
    "causal, padding": (
        nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **ENCODER),
        {"src_mask": CAUSAL, "is_causal": True, "src_key_padding_mask": PADDING},
    ),
    "encoder": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **ENCODER), 2, enable_nested_tensor=False),
        {"mask": CAUSAL},
    ),
    "nested tensors": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **ENCODER), 2),
        {"src_key_padding_mask": PADDING},
    ),
}


def filled(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model).double()
    for index, parameter in enumerate(model.parameters()):
        parameter.data = randn(100 + index, *parameter.shape) * 0.4
    return model


def step(model: nn.Module, inputs: list[torch.Tensor], cotangent: torch.Tensor, options: Any) -> list[torch.Tensor]:
    """The output and, where there are gradients, those of inputs and parameters."""
    leaves = [x.clone().requires_grad_(torch.is_grad_enabled()) for x in inputs]
    out = model(*leaves, **options)
    if not torch.is_grad_enabled():
        return [out]
    out.backward(cotangent)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [x.grad for x in model.parameters() if x.grad is not None]


def compare(model: nn.Module, lengths: list[int], options: dict[str, Any], *, layout, grad: bool = True) -> None:
    inputs = [randn(index, BATCH, length, WIDTH) for index, length in enumerate(lengths)]
    cotangent = randn(9, BATCH, lengths[0], WIDTH)
    one = copy.deepcopy(model)
    with torch.set_grad_enabled(grad):
        wanted = step(one, inputs, cotangent, options)

    def on(rank: int) -> float:
        mesh, mine = cp_mesh(RANKS), copy.deepcopy(model)
        parallelize_module(mine, mesh, ModuleContextParallel(layout=layout))

        def cut(x: torch.Tensor) -> torch.Tensor:
            return layout(x.shape[1], RANKS).shard(x, 1, rank)

        with torch.set_grad_enabled(grad):
            mine_alone = {name: cut(x) for name, x in options.items() if name == "present"}
            found = step(mine, [cut(x) for x in inputs], cut(cotangent), options | mine_alone)
        if grad:
            sum_gradients(mine, mesh)
        pairs = [(a, cut(b)) for a, b in zip(found, wanted, strict=True)]
        pairs += list(zip(gradients(mine), gradients(one), strict=True))
        return max(error(*pair) for pair in pairs)

    assert max(run_ranks(on, RANKS)) < EXACT


@pytest.mark.parametrize("case", CASES)
def test_exact(case: str):
    model, options = CASES[case]
    compare(filled(model), [LENGTH], options, layout=head_tail)


class OfTokens(nn.Module):
    """The encoder's output, and 0 where there is padding: there torch's nested tensors have none."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x, present, src_key_padding_mask):
        return self.encoder(x, src_key_padding_mask=src_key_padding_mask) * present


@pytest.mark.parametrize("case", ["block", "causal", "padding", "nested tensors"])
def test_in_eval_without_gradients(case: str):
    """Where one device takes torch's fused inference path, and tensors without padding."""
    model, options = CASES[case]
    if case == "nested tensors":
        options = options | {"present": (~PADDING).unsqueeze(-1)}
        model = OfTokens(model)
    compare(filled(model).eval(), [LENGTH], options, layout=head_tail, grad=False)


def test_a_decoder_with_its_memory():
    model = filled(nn.TransformerDecoderLayer(WIDTH, HEADS, 16, **ENCODER))
    options = {"tgt_mask": CAUSAL, "tgt_is_causal": True, "memory_key_padding_mask": PADDING[:, -MEMORY:]}
    compare(model, [LENGTH, MEMORY], options, layout=contiguous)


def test_a_causal_mask_of_this_ranks_length_is_known_as_causal():
    """nn.TransformerEncoder compares a mask with the causal one of its own length, and passes is_causal on."""
    model = filled(CASES["encoder"][0])
    whole = CAUSAL[:10, :10]
    x, cotangent = randn(0, BATCH, 10, WIDTH), randn(9, BATCH, 10, WIDTH)
    wanted = step(copy.deepcopy(model), [x], cotangent, {"mask": whole})

    def on(rank: int) -> float:
        mine, layout = copy.deepcopy(model), contiguous(10, RANKS)
        parallelize_module(mine, cp_mesh(RANKS), ModuleContextParallel(layout=contiguous))
        parts = [layout.shard(each, 1, rank) for each in (x, cotangent)]
        found = step(mine, parts[:1], parts[1], {"mask": whole[:5, :5]})
        return max(error(a, layout.shard(b, 1, rank)) for a, b in zip(found, wanted, strict=True))

    assert max(run_ranks(on, RANKS)) < EXACT


@pytest.mark.parametrize("heads", [4, 1])
def test_one_key_head_for_all_query_heads(heads: int):
    """Broadcast by torch without enable_gqa, as Falcon's attention has it."""

    class MultiQuery(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, heads * 2 + 4)

        def forward(self, x):
            q, k, v = self.project(x).split((heads * 2, 2, 2), -1)
            q = q.unflatten(-1, (heads, 2)).transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k.unsqueeze(1), v.unsqueeze(1), is_causal=True)
            return F.pad(out.transpose(1, 2).flatten(2), (0, WIDTH - 2 * heads))

    compare(filled(MultiQuery()), [LENGTH], {}, layout=head_tail)
