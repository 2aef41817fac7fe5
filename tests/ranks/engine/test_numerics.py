"""Logits and inputs that break naive softmax merging, and errors that must not grow with the number of ranks.

Everything is held to one device's attention on the same rounded inputs: finite, and no further from float64.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from operator import le

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest

from cp_styles.functions.attention import context_attention
from cp_styles.functions.flex import context_flex_attention
from cp_styles.kernels import ReferenceKernel
from cp_styles.kernels.merge import accumulation_dtype
from cp_styles.kernels.sdpa import CPU_FLASH
from cp_styles.layouts import contiguous, head_tail
from cp_styles.masks import Causal, Dense, Documents, Mask
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.testing import run_ranks
from tests.covering import at_night, sampled
from tests.oracle import attend_and_differentiate, attention_inputs, error, expected_attention, randn
from tests.ranks.attention_case import EXACT, Core, cp_mesh

STRATEGIES = (Ring(), Ring(keep=0), AllGather(), Ulysses(), Ulysses(size=2))
NAMES = ("out", "dq", "dk", "dv")


def gathered(inputs, cotangent, ranks: int, settings) -> list[list[torch.Tensor]]:
    """For each of ``settings``, (layout, options): the whole ``[out, dq, dk, dv]``."""

    def on(rank: int):
        mesh = cp_mesh(ranks)
        return [
            attend_and_differentiate(
                partial(context_attention, mesh=mesh, layout=layout, **options),
                [layout.shard(x, 2, rank) for x in inputs],
                layout.shard(cotangent, 2, rank),
            )
            for layout, options in settings
        ]

    by_setting = zip(*run_ranks(on, ranks), strict=True)
    return [
        [layout.unshard(parts, 2) for parts in zip(*by_rank, strict=True)]
        for (layout, _), by_rank in zip(settings, by_setting, strict=True)
    ]


def errors_of(found, expected) -> list[float]:
    return [error(*pair) for pair in zip(found, expected, strict=True)]


def tril(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@sampled(1, dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16], kernel=[CPU_FLASH, ReferenceKernel()])
def test_logits_of_ten_thousand(dtype: torch.dtype, kernel):
    """exp overflows in every dtype from 89 (float32) or 710 (float64) on; tiles of very different size are merged.

    With logits that large the softmax picks one key a query, and gradients of queries come from near ties alone. The
    bound is three times one device's error, by torch's attention or by the kernel alone (measured: 2.6 for dq in
    float16, whose delta is made from a rounded out), and the accumulation dtype's rounding of such a logit, which is a
    relative error of its weight.
    """
    length, ranks = 64, 4
    inputs, cotangent = attention_inputs(length=length, batch=1, dtype=dtype)
    inputs[0] *= 1e4
    wanted = expected_attention(inputs, cotangent, tril(length))
    largest = float((inputs[0].double() @ inputs[1].double().mT).abs().max()) * 8**-0.5
    assert largest > 1e4
    rounding = largest * torch.finfo(accumulation_dtype(dtype)).eps
    one = errors_of(attend_and_differentiate(Core(), inputs, cotangent), wanted)
    (by_kernel,) = gathered(inputs, cotangent, 1, [(contiguous(length, 1), {"mask": Causal(), "kernel": kernel})])
    one = [max(pair) for pair in zip(one, errors_of(by_kernel, wanted), strict=True)]
    settings = [
        (balancer(length, ranks), {"mask": Causal(), "strategy": strategy, "kernel": kernel})
        for strategy, balancer in product(STRATEGIES, (contiguous, head_tail))
    ]
    for found in gathered(inputs, cotangent, ranks, settings):
        assert all(bool(x.isfinite().all()) for x in found)
        for name, mine, alone in zip(NAMES, errors_of(found, wanted), one, strict=True):
            assert mine <= 3 * alone + rounding, name


@sampled(1, dtype=[torch.float64, torch.float16, torch.float32], strategy=STRATEGIES)
def test_tiles_and_rows_that_see_nothing(dtype: torch.dtype, strategy):
    """Tiles that a dense mask hides entirely: alone, before and after a tile with keys; and rows without keys."""
    length, ranks = 24, 4
    inputs, cotangent = attention_inputs(length=length, kv_heads=2, dtype=dtype)
    inputs[0] *= 100.0  # so that a wrong "empty" logsumexp would not drown
    sees = {
        "own keys only": torch.block_diag(*[torch.ones(6, 6)] * 4).bool(),
        "others' keys only": ~torch.block_diag(*[torch.ones(6, 6)] * 4).bool(),
        "last rank's keys only": torch.arange(length).expand(length, length) >= 18,
        "one key": torch.arange(length).expand(length, length) == 7,
        "nothing": torch.zeros(length, length, dtype=torch.bool),
        "every other row": (torch.arange(length) % 2 == 0)[:, None].expand(length, length),
    }
    masks: list[Mask] = [Dense(allowed) for allowed in sees.values()]
    settings = [(contiguous(length, ranks), {"mask": mask, "strategy": strategy}) for mask in masks]
    for (name, allowed), found in zip(sees.items(), gathered(inputs, cotangent, ranks, settings), strict=True):
        wanted = expected_attention(inputs, cotangent, allowed)
        assert all(bool(x.isfinite().all()) for x in found), name
        dead = ~allowed.any(1)
        assert not found[0][:, :, dead].any(), "rows that see nothing are zero, exactly"
        assert not found[1][:, :, dead].any()
        # Rounding of logits of some hundreds, a relative error of their weights; float16 rounds the results too.
        bound = EXACT if dtype == torch.float64 else 500 * torch.finfo(torch.float32).eps
        bound += 20 * torch.finfo(dtype).eps if dtype == torch.float16 else 0.0
        # Who sees one key has dq = dk = 0, and what is left is rounding of terms as large as the query.
        scales = [max(x, inputs[0].double(), key=torch.norm) if 1 <= i < 3 else x for i, x in enumerate(wanted)]
        for mine, one, scale in zip(found, wanted, scales, strict=True):
            assert error(mine, one, whole=scale) < bound, name


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_float16_inputs_whose_products_overflow(strategy):
    """Query and key of 200 and head dim 64: q . k is up to 2.6e6, beyond float16's 65504 before it is scaled."""
    length, ranks = 32, 4
    inputs, cotangent = attention_inputs(length=length, dim=64, batch=1, dtype=torch.float16)
    inputs = [inputs[0].sign() * 200, inputs[1].sign() * 200, inputs[2]]
    assert not torch.isfinite(inputs[0] @ inputs[1].mT).all()
    wanted = expected_attention(inputs, cotangent, tril(length))
    one = errors_of(attend_and_differentiate(Core(), inputs, cotangent), wanted)
    settings = [(head_tail(length, ranks), {"mask": Causal(), "strategy": strategy})]
    (found,) = gathered(inputs, cotangent, ranks, settings)
    assert all(bool(x.isfinite().all()) for x in found)
    for name, mine, alone in zip(NAMES, errors_of(found, wanted), one, strict=True):
        assert mine <= 1.5 * alone + torch.finfo(torch.float16).eps, name


@pytest.mark.parametrize("strategy", [Ring(), Ulysses(size=2), *at_night(Ring(keep=0), AllGather())], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, *at_night(torch.float32, torch.float16)])
def test_the_error_does_not_grow_with_the_ring(dtype: torch.dtype, strategy):
    """ring-flash-attention#42: the forward looked fine, and the backward's error grew with every hop.

    Each of out, dq, dk and dv at 8 ranks has at most 1.15 times the error it has at 2 ranks: sums in another
    order, and no more, for a plain and a packed causal mask. A gradient rounded to bfloat16 once a hop would have
    sqrt(8 / 2) = 2 times.
    """
    length, documents = 512, (100, 1, 200, 211)
    inputs, cotangent = attention_inputs(length=length, dim=16, batch=1, kv_heads=2, dtype=dtype)
    ids = torch.arange(4).repeat_interleave(torch.tensor(documents))
    for mask, sees in (
        (Causal(), tril(length)),
        (Causal() & Documents(documents), tril(length) & (ids[:, None] == ids)),
    ):
        wanted = expected_attention(inputs, cotangent, sees)
        few, many = (
            errors_of(*gathered(inputs, cotangent, ranks, [(head_tail(length, ranks), options)]), wanted)
            for options in ({"mask": mask, "strategy": strategy},)
            for ranks in (2, 8)
        )
        for name, two, eight in zip(NAMES, few, many, strict=True):
            assert eight <= 1.15 * two + 1e-8, (name, two, eight)


def test_values_of_very_different_size_on_the_ranks():
    """One rank's values are 1e30, in float32: nothing but those who see them may notice."""
    length, ranks = 16, 4
    inputs, cotangent = attention_inputs(length=length, batch=1, dtype=torch.float32)
    inputs[2][:, :, 12:] *= 1e30
    cotangent[:, :, 12:] *= 1e-30
    wanted = expected_attention(inputs, cotangent, tril(length))
    settings = [(contiguous(length, ranks), {"mask": Causal(), "strategy": s}) for s in STRATEGIES]
    for found in gathered(inputs, cotangent, ranks, settings):
        assert error(found[0][:, :, :12], wanted[0][:, :, :12]) < 1e-6  # float32: 6e-8 an operation
        assert max(errors_of(found, wanted)) < 1e-5


MASKED = {
    "rows": lambda fill: torch.zeros(10, 10, dtype=torch.float64).index_fill(0, torch.tensor([0, 1, 2, 9]), fill),
    "left padding": lambda fill: left_padded(fill),
    "two heads": lambda fill: torch.where(randn(5, 1, 4, 10, 1) > 0.5, fill, randn(6, 1, 4, 10, 10)),
    "two numbers": lambda fill: fill * torch.where(randn(7, 10, 10) > 0, 1.0, 0.5).index_fill(1, torch.tensor(8), 1.0),
    "rows that see zeros of the future": lambda fill: torch.full((10, 10), fill, dtype=torch.float64).triu(-2),
    "above": lambda fill: torch.zeros(10, 10, dtype=torch.float64).index_fill(0, torch.tensor([4]), -fill),
    "keys": lambda fill: fill * torch.ones(2, 1, 1, 10).double().index_fill(3, torch.tensor([3, 5, 8]), 0.5),
}


def left_padded(fill: float) -> torch.Tensor:
    """As Hugging Face makes it: causal, and the first rows of the batch's second sequence are padding."""
    hidden = torch.ones(2, 1, 10, 10, dtype=torch.bool).triu(1)
    hidden[1, :, :, :4] = True
    return torch.zeros(2, 1, 10, 10, dtype=torch.float64).masked_fill(hidden, fill)


def least(mask: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    """The same mask by what its rows have at most, in float64: for real numbers, the same softmax."""
    mask = mask.double().masked_fill(~sees, float("-inf"))
    return mask - mask.amax(-1, keepdim=True)


@sampled(1, dtype=[torch.float64, torch.float32, torch.bfloat16], name=list(MASKED), part=range(4))
def test_rows_that_are_masked_throughout_with_numbers(dtype: torch.dtype, name: str, part: int):
    """Where a logsumexp would have no digits left for the number of keys, the rows are what one device makes of them.

    One device is torch's plain attention: its fused one's backward goes by such a logsumexp, and is wrong by the number
    of keys. Where the number leaves digits for the logits, the wanted result is that of real numbers, to which one
    device comes less near.
    """
    wide = accumulation_dtype(dtype)
    causal = name == "rows that see zeros of the future"
    sees = tril(10) if causal else torch.ones(10, 10, dtype=torch.bool)
    inputs, cotangent = attention_inputs(length=10, dtype=dtype)
    settings, wants = [], []
    for index, fill in enumerate((torch.finfo(dtype).min, -1e9, -3e4, -300.0)):
        mask = MASKED[name](fill).to(dtype)

        def plainly(*tensors: torch.Tensor, mask: torch.Tensor = mask) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(
                    *tensors, attn_mask=mask.masked_fill(~sees, float("-inf")).to(tensors[0].dtype)
                )

        if abs(fill) * torch.finfo(wide).eps > 64:  # the number's neighbours are further away than any logit here
            wanted = attend_and_differentiate(plainly, [x.to(wide) for x in inputs], cotangent.to(wide))
        else:
            wanted = expected_attention(inputs, cotangent, bias=least(mask, sees))
        one = errors_of(attend_and_differentiate(plainly, inputs, cotangent), wanted)
        if dtype == torch.bfloat16:  # whose fused backward starts from a rounded out
            usual = least(mask, sees)
            fused = partial(F.scaled_dot_product_attention, attn_mask=usual.to(dtype))
            found = attend_and_differentiate(fused, inputs, cotangent)
            one = list(map(max, one, errors_of(found, expected_attention(inputs, cotangent, bias=usual))))
        ways = [(3, strategy, None) for strategy in STRATEGIES[:4]]
        ways += [(4, Ulysses(size=2), None), (1, Ring(), None), (3, Ring(), ReferenceKernel())]
        # Some ways for each number, and the others with another number or mask.
        for ranks, strategy, kernel in ways[(list(MASKED).index(name) + index + part) % 4 :: 4]:
            attended = Dense(mask) & Causal() if causal else Dense(mask)
            options = {"mask": attended, "strategy": strategy, "kernel": kernel}
            settings.append((ranks, (contiguous(10, ranks), options)))
            wants.append((fill, strategy, ranks, wanted, one))
    results: dict[int, list] = {}
    for ranks in {size for size, _ in settings}:
        results[ranks] = gathered(inputs, cotangent, ranks, [setting for size, setting in settings if size == ranks])
    for fill, strategy, ranks, wanted, one in wants:
        errors = errors_of(results[ranks].pop(0), wanted)
        # Low precision: at most 1.1 times one device's error. float32: 6e-8 an operation, in sums of 10 terms.
        bounds = [EXACT if dtype == torch.float64 else 1e-6 + 1.1 * x * (dtype == torch.bfloat16) for x in one]
        assert all(map(le, errors, bounds)), (fill, strategy, ranks, errors, bounds)


def test_sinks_and_the_logsumexp_of_such_rows():
    inputs, cotangent = attention_inputs(length=10)
    layout = contiguous(10, 3)
    for fill in (-1e9, -1e300):
        mask, sink = MASKED["rows"](fill), torch.tensor([0.5, -2.0, 1.0, fill], dtype=torch.float64)
        leaves = [x.clone().requires_grad_() for x in (*inputs, sink)]
        logits = leaves[0] @ leaves[1].mT * 8**-0.5
        # The sink is a key of value 0.
        logits = torch.cat((logits + mask, leaves[3][:, None, None].expand(2, 4, 10, 1)), -1)
        top = logits.detach().amax(-1, keepdim=True)
        weights = torch.softmax(logits - top, -1)[..., :-1]
        wanted = [weights @ leaves[2], torch.logsumexp((logits - top)[..., :-1], -1) + top.squeeze(-1)]
        wanted += torch.autograd.grad(wanted[0], leaves, cotangent)

        def on(rank: int, mask=mask, sink=sink):
            mesh = cp_mesh(3)
            own = [layout.shard(x, 2, rank).clone().requires_grad_() for x in inputs]
            own_sink = sink.clone().requires_grad_()
            out = context_attention(*own, mesh, mask=Dense(mask), layout=contiguous, sink_H=own_sink)
            *grads, dsink = torch.autograd.grad(out, [*own, own_sink], layout.shard(cotangent, 2, rank))
            _, aux = context_flex_attention(
                *own, mesh, mask=Dense(mask), layout=contiguous, return_aux=AuxRequest(lse=True)
            )
            return [out.detach(), aux.lse.detach(), *grads, dsink]

        *found, dsinks = zip(*run_ranks(on, 3), strict=True)
        whole = [layout.unshard(list(parts), 2) for parts in found] + [sum(dsinks)]
        lse, wanted_lse = whole.pop(1), wanted.pop(1)
        assert ((lse - wanted_lse) / wanted_lse).abs().max() < EXACT
        # Beside -1e9 a float64 has digits to 1e-7, and the logits of the last head's sink are of that size.
        bound = 1e-7 if fill == -1e9 else EXACT
        assert all(error(mine, one) < bound for mine, one in zip(whole, wanted, strict=True)), fill
