"""The attn_mask of scaled_dot_product_attention: for the whole sequence, in the order of positions, all doors."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from cp_styles import (
    AttentionContextParallel,
    Causal,
    Dense,
    ModuleContextParallel,
    PerRow,
    Ring,
    context_attention,
    head_tail,
)
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from tests.oracle import error, expected_attention
from tests.ranks.attention_case import EXACT

RANKS, BATCH, HEADS, LENGTH = 3, 2, 3, 17
LAYOUT = head_tail(LENGTH, RANKS)
SDPA = nn.functional.scaled_dot_product_attention


class Passed(nn.Module):
    """The mask comes as an argument of the module."""

    def forward(self, q, k, v, attn_mask=None):
        return SDPA(q, k, v, attn_mask=attn_mask)


class Held(nn.Module):
    """The mask is the module's own."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v):
        return SDPA(q, k, v, attn_mask=self.mask)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, HEADS, LENGTH, 4, generator=generator, dtype=torch.float64) for _ in range(4)]


def one_device(mask):
    *inputs, grad = tensors()
    if mask.dtype == torch.bool:
        return expected_attention(inputs, grad, mask)
    return expected_attention(inputs, grad, bias=mask)


def passed(mask, mesh, strategy):
    core = parallelize_module(Passed(), mesh, AttentionContextParallel(strategy=strategy))
    return lambda q, k, v: core(q, k, v, attn_mask=mask)


def held(mask, mesh, strategy):
    return parallelize_module(Held(mask), mesh, AttentionContextParallel(strategy=strategy))


def module(mask, mesh, strategy):
    return parallelize_module(Held(mask), mesh, ModuleContextParallel(strategy=strategy))


@pytest.mark.parametrize("door", [passed, held, module])
def test_this_ranks_part_of_a_mask_is_refused(door):
    def body(rank):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
        local = [LAYOUT.shard(x, 2, rank) for x in tensors()[:3]]
        own = torch.ones(LAYOUT.lengths[0], LAYOUT.lengths[0], dtype=torch.bool)
        return door(own, mesh, Ring())(*local)

    errors = run_ranks(body, RANKS, return_errors=True)
    assert all(isinstance(error, (ValueError, RuntimeError)) for error in errors)


@pytest.mark.parametrize("additive", [False, True])
def test_masks_that_differ_in_one_place_are_every_ranks_error(additive):
    """As the call's, the style's and under PerRow: attention would be of neither mask. They were equal before."""

    def body(rank):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.float64 if additive else torch.bool)
        q, k, v = (LAYOUT.shard(x, 2, rank) for x in tensors()[:3])
        passed(mask, mesh, Ring())(q, k, v)
        mask[-1, 3], said = rank != 1, []
        for door in (passed, held, module):
            with pytest.raises(ValueError) as caught:
                door(mask, mesh, Ring())(q, k, v)
            said.append(str(caught.value))
        with pytest.raises(ValueError) as caught:
            context_attention(q, k, v, mesh, mask=PerRow((Causal() & Dense(mask),) * q.shape[0]), layout=LAYOUT)
        return [*said, str(caught.value)]

    for said in run_ranks(body, RANKS):
        assert all("disagree on" in text and "mask" in text for text in said), said


def test_a_mask_that_wants_a_gradient_is_refused():
    def body(rank):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
        mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)
        return passed(mask, mesh, Ring())(*(LAYOUT.shard(x, 2, rank) for x in tensors()[:3]))

    errors = run_ranks(body, RANKS, return_errors=True)
    assert all(isinstance(error, NotImplementedError) and "detach() the mask" in str(error) for error in errors)


def test_a_mask_inside_the_module_fits_parts_of_any_size():
    """Torch would compare it with the size that DTensor was told, which is not the whole sequence's."""
    length = 13
    layout = head_tail(length, RANKS)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, length, 4, generator=generator, dtype=torch.float64) for _ in range(3)]

    def body(rank):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
        local = [layout.shard(x, 2, rank) for x in whole]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        given = passed(mask, mesh, Ring())(*local)
        return given, held(mask, mesh, Ring())(*local)

    results = run_ranks(body, RANKS)
    assert all(torch.equal(*pair) for pair in results)
    expected = SDPA(*whole, is_causal=True)
    assert error(layout.unshard([given for given, _ in results], 2), expected) < EXACT


class MadeInside(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, q, k, v):
        return SDPA(q, k, v, attn_mask=self.make(q.shape[2], k.shape[2]))


def with_block(mesh, module, *tensors):
    with context_parallel(mesh, layout=LAYOUT):
        return module(*tensors)


def with_style(style, mesh, module, *tensors):
    return parallelize_module(module, mesh, style(layout=LAYOUT))(*tensors)


STYLES = {
    "block": with_block,
    "module": partial(with_style, ModuleContextParallel),
    "style": partial(with_style, AttentionContextParallel),
}


@pytest.mark.parametrize(("dim", "what"), [(2, "queries"), (3, "keys")])
def test_a_mask_among_the_buffers_of_a_block(dim, what):
    """On the rank with the other part the same, also where both ranks' parts are equal."""
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool)

    def on(rank):
        x, mine = torch.ones(1, 1, 12, 4), mask.clone()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        with context_parallel(mesh, buffers=[x, mine], buffer_seq_dims=[2, dim]):
            SDPA(x, x, x, attn_mask=mine)

    for each in run_ranks(on, 2, return_errors=True):
        assert re.search(rf"made for the 6 {what} of one rank's part\. .* and no buffer of a block", str(each))


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("door", STYLES.values(), ids=STYLES)
def test_torchs_causal_bias_is_causal(door, make):
    """Made for the call's lengths or for the whole sequence, it is is_causal=True, as on one device."""
    q, k, v, grad = tensors()
    wanted = one_device(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    ways = [lambda: (Held(make(LENGTH, LENGTH)),), lambda: (MadeInside(make),)]
    if door is not with_block:
        ways.append(lambda: (Passed(), make(LENGTH, LENGTH)))

    def on(rank: int):
        mesh, found = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",)), []
        for way in ways:
            module, *mask = way()
            leaves = [LAYOUT.shard(x, 2, rank).requires_grad_() for x in (q, k, v)]
            out = door(mesh, module, *leaves, *mask)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, LAYOUT.shard(grad, 2, rank))])
        return found

    for each in zip(*run_ranks(on, RANKS), strict=True):
        for parts, whole in zip(zip(*each, strict=True), wanted, strict=True):
            assert error(LAYOUT.unshard(parts, 2), whole) < EXACT


class Masks(torch.Tensor):
    """A subclass that is no more than its values, as torchvision has one."""


@pytest.mark.parametrize(
    "mask", [causal_lower_right(3, LENGTH), torch.ones(LENGTH, LENGTH).as_subclass(Masks)], ids=type
)
def test_other_subclasses_of_tensor_are_refused(mask):
    """Everywhere, on every rank: what they are need not be what torch's operators read from them."""
    words = "LOWER_RIGHT for 3 queries and 17 keys|must be a plain torch.Tensor, got .*Masks"

    def one_key(mesh, *tensors):
        cache = KVCache(mesh, LAYOUT, *tensors[1:])
        return context_decode(torch.zeros(BATCH, HEADS, 1, 4, dtype=torch.float64), cache, attn_mask=mask)

    def in_a_block_of_heads(mesh, *tensors):
        attend = nn.MultiheadAttention(4, 1).double()
        module = parallelize_module(attend, mesh, ModuleContextParallel(layout=LAYOUT))
        x = tensors[0][:, 0].transpose(0, 1)
        return module(x, x, x, attn_mask=mask, need_weights=False)

    held = [lambda mesh, *tensors, door=door: door(mesh, Held(mask), *tensors) for door in STYLES.values()]
    passed = [
        lambda mesh, *tensors, door=door: door(mesh, Passed(), *tensors, mask) for door in list(STYLES.values())[1:]
    ]

    def on(rank: int, way):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
        return way(mesh, *(LAYOUT.shard(x, 2, rank) for x in tensors()[:3]))

    for way in (*held, *passed, one_key, in_a_block_of_heads):
        errors = run_ranks(on, RANKS, way, return_errors=True)
        assert all(isinstance(each, TypeError) and re.search(words, str(each)) for each in errors), (way, errors)
    with pytest.raises(TypeError, match=words):
        Dense(mask)
