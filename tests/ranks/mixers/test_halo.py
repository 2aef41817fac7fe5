"""Modules that look at a few tokens, over any cut: against one process in float64, and the bytes that travel."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from cp_styles import (
    Causal,
    Documents,
    ModuleContextParallel,
    SequenceScope,
    context_attention,
    contiguous,
    head_tail,
    parallelize_module,
    sum_gradients,
)
from cp_styles.layouts import SequenceLayout, striped
from cp_styles.mixers import context_halo, context_roll
from cp_styles.mixers.halo import halo_plan
from cp_styles.testing import CommunicationTrace, run_ranks
from cp_styles.torch_api import context_parallel
from cp_styles.verify import VerificationError, verify
from tests.covering import sampled
from tests.layouts import packs
from tests.oracle import error, randn
from tests.ranks.attention_case import cp_mesh, refused

WIDTH, WORDS = 4, 11
# Sums of a few products in float64; a row too many or too few gives 1e-2 and more.
EXACT = 1e-13


class Dilated(nn.Module):
    """A causal convolution of 3 taps with dilation 2, behind a shift by one. Rows before the first repeat it."""

    reach, seq_dim = 5, 1

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, dilation=2)

    def forward(self, x_BLC):
        x_BLC = torch.cat((x_BLC[:, :1], x_BLC[:, :-1]), 1)
        return F.silu(self.conv(F.pad(x_BLC.mT, (4, 0), mode="replicate"))).mT


class TwoSided(nn.Conv1d):
    """A convolution that looks one token back and two ahead, over [B, C, L]."""

    reach, seq_dim = (1, 2), -1

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, 4)

    def forward(self, x_BCL):
        return super().forward(F.pad(x_BCL, (1, 2)))


class NGrams(nn.Module):
    """An embedding of hashed trigrams of ids."""

    reach, seq_dim = 2, 1

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids_BL):
        before, two_before = (F.pad(ids_BL, (shift, 0))[:, :-shift] for shift in (1, 2))
        return self.table((ids_BL * 7 + before * 3 + two_before) % WORDS)


class Many(nn.Module):
    """Several tensors by position, by keyword and in a tuple; arguments without tokens; several results."""

    reach, seq_dim = 1, 1

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = (nn.Parameter(torch.randn(rows, WIDTH)) for rows in (1, WORDS))

    def forward(self, x_BLC, pair, scale=1.0, *, ids_BL, table_WC, nothing=None):
        y_BLC, mask_BL = pair
        late = F.pad(x_BLC * self.weight + table_WC[ids_BL] * mask_BL[..., None], (0, 0, 1, 0))[:, :-1]
        return {"late": late * scale, "ids": F.pad(ids_BL, (1, 0))[:, :-1]}, [y_BLC + late.sin(), nothing, 3]


def call(module: Any, *tokens: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a module returns."""
    if not isinstance(module, Many):
        return [module(*tokens)]
    x, y, ids, mask = tokens
    first, (second, nothing, three) = module(x, (y, mask), 0.5, ids_BL=ids, table_WC=module.table)
    assert (nothing, three) == (None, 3)
    return [first["late"], first["ids"], second]


def drawn(kind: type[nn.Module], length: int) -> tuple[Any, list[torch.Tensor]]:
    """A module in float64, and its tensors of tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = kind().double()
        ids = torch.randint(WORDS, (2, length))
    if kind is NGrams:
        return module, [ids]
    if kind is TwoSided:
        return module, [randn(0, 2, WIDTH, length)]
    x, y = randn(0, 2, length, WIDTH), randn(1, 2, length, WIDTH)
    return module, [x, y, ids, ids > 3] if kind is Many else [x]


def leaves_of(tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone().requires_grad_(x.is_floating_point()) for x in tokens]


def on_one(module: Any, tokens: list[torch.Tensor], documents):
    """Outputs, their cotangents, gradients of tokens and of parameters on one process, document by document."""
    leaves, dim = leaves_of(tokens), module.seq_dim
    parts = zip(*(x.split(documents, dim) for x in leaves), strict=True)
    outs = [torch.cat(each, dim) for each in zip(*(call(module, *part) for part in parts), strict=True)]
    cotangents = [randn(9 + at, *out.shape) for at, out in enumerate(outs)]
    return outs, cotangents, *gradients(module, leaves, outs, cotangents)


def gradients(module: Any, leaves: list[torch.Tensor], outs, cotangents):
    of_tokens, parameters = [x for x in leaves if x.requires_grad], [*module.parameters()]
    pairs = [(out, grad) for out, grad in zip(outs, cotangents, strict=True) if out.requires_grad]
    from_outs, with_cotangents = zip(*pairs, strict=True)
    found = torch.autograd.grad(from_outs, [*of_tokens, *parameters], with_cotangents)
    return found[: len(of_tokens)], found[len(of_tokens) :]


def on_ranks(module: Any, layout: SequenceLayout, tokens: list[torch.Tensor], documents, cotangents, reach=None):
    """The same on ranks: parts put together, gradients of parameters summed. And for each rank the bytes it sent, and
    the lengths with which the module was called."""
    dim = module.seq_dim

    def main(rank: int):
        mesh = cp_mesh(layout.ranks)
        mine, lengths, plain = copy.deepcopy(module), [], type(module).forward

        class Counted(type(module)):
            @functools.wraps(plain)
            def forward(self, *args, **kwargs):
                lengths.append(args[0].shape[dim])
                return plain(self, *args, **kwargs)

        mine.__class__ = Counted
        whole = "table_WC" if isinstance(mine, Many) else ()
        options = {"seq_dim": dim, "whole": whole, "layout": layout, "documents": documents}
        context_halo(mine, mesh, reach=module.reach if reach is None else reach, **options)
        leaves = leaves_of([layout.shard(x, dim, rank) for x in tokens])
        with CommunicationTrace() as trace:
            outs = call(mine, *leaves)
        sent = sum(size for name, size in trace.events if name.startswith("all_to_all"))
        found = gradients(mine, leaves, outs, [layout.shard(each, dim, rank) for each in cotangents])
        for out in outs:
            if out.is_floating_point():
                out.mul_(1.0)  # as a model may: no view that cannot be changed
        return [out.detach() for out in outs], *found, sent, lengths

    outs, of_tokens, of_parameters, sent, lengths = zip(*run_ranks(main, layout.ranks), strict=True)
    joined = [[layout.unshard(each, dim) for each in zip(*parts, strict=True)] for parts in (outs, of_tokens)]
    return *joined, [sum(each) for each in zip(*of_parameters, strict=True)], sent, lengths


def largest_error(found, wanted) -> float:
    pairs = [pair for each in zip(found, wanted, strict=True) for pair in zip(*each, strict=True)]
    return max(error(one.double(), other.double()) for one, other in pairs)


def check(kind: type[nn.Module], layout: SequenceLayout, documents) -> None:
    module, tokens = drawn(kind, layout.length)
    outs, cotangents, *wanted = on_one(module, tokens, documents)
    *found, _, _ = on_ranks(module, layout, tokens, documents, cotangents)
    assert largest_error(found, [outs, *wanted]) < EXACT


KINDS = [Dilated, TwoSided, NGrams, Many]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(KINDS), packs())
def test_any_cut(kind, pack):
    check(kind, *pack)


@sampled(
    2,
    kind=KINDS,
    balancer=[contiguous, head_tail, striped],
    pack=[(1, (13,)), (1, (4, 9)), (2, (13,)), (3, (7, 1, 5)), (3, (2,))],
)
def test_each_layout(kind, balancer, pack: tuple[int, tuple[int, ...]]):
    """With parts that are shorter than the reach, and ranks without tokens."""
    ranks, documents = pack
    check(kind, balancer(sum(documents), ranks), documents)


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_less_is_another_result(kind):
    """So the tests see rows that are missing, on each side."""
    module, tokens = drawn(kind, 12)
    outs, cotangents, *wanted = on_one(module, tokens, (12,))
    front, behind = (module.reach, 0) if isinstance(module.reach, int) else module.reach
    for reach in [(front - 1, behind), *([(front, behind - 1)] if behind else [])]:
        *found, _, _ = on_ranks(module, contiguous(12, 2), tokens, None, cotangents, reach)
        assert largest_error(found[:1], [outs]) > 1e-2
    *found, _, _ = on_ranks(module, contiguous(12, 2), tokens, None, cotangents, (front + 2, behind + 1))
    assert largest_error(found, [outs, *wanted]) < EXACT


def test_bytes_and_calls():
    """2 rows of 8 bytes for each row of the batch from the rank before; ids need none back. A rank's parts are one
    call, but for documents that begin or end."""
    module, tokens = drawn(NGrams, 12)
    _, cotangents, *_ = on_one(module, tokens, (12,))
    *_, sent, lengths = on_ranks(module, contiguous(12, 3), tokens, None, cotangents)
    assert (sent, lengths) == ((32, 32, 0), ([4], [6], [6]))
    *_, sent, lengths = on_ranks(module, contiguous(12, 3), tokens, (4, 8), cotangents)
    assert (sent, lengths) == ((0, 32, 0), ([4], [4], [6]))
    *_, lengths = on_ranks(module, head_tail(12, 3), tokens, (12,), cotangents)
    assert lengths == ([6], [8], [6])  # 2 + (2 + 2), (2 + 2) + (2 + 2), 2 + 4
    *_, lengths = on_ranks(module, contiguous(12, 2), tokens, (2, 2, 8), cotangents)
    assert lengths == ([2, 2, 2], [8, 1, 1])  # as many calls on all ranks
    *_, sent, lengths = on_ranks(module, contiguous(2, 3), [tokens[0][:, :2]], None, [cotangents[0][:, :2]])
    assert lengths == ([1], [2], [1])  # the last rank has no token, and computes the first


# In a model.


class Model(nn.Module):
    """A layer that looks at a few tokens, and attention."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.out, self.again = layer, nn.Linear(WIDTH, WIDTH), False

    def forward(self, x_BLC):
        mixed = (lambda x: self.layer(x.mT).mT) if isinstance(self.layer, nn.Conv1d) else self.layer
        mixed = checkpoint(mixed, x_BLC, use_reentrant=False) if self.again else mixed(x_BLC)
        q = (x_BLC + mixed)[:, None]
        return self.out(F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0])


X, COTANGENT = randn(0, 2, 13, WIDTH), randn(1, 2, 13, WIDTH)


def drawn_model(kind: type[nn.Module]) -> Model:
    return Model(drawn(kind, 1)[0]).double()


def in_style(mine: Any, mesh: Any, *, halo_first: bool = True) -> Any:
    steps = [
        partial(context_halo, mine.layer, mesh, reach=mine.layer.reach, seq_dim=mine.layer.seq_dim),
        partial(parallelize_module, mine, mesh, ModuleContextParallel(layout=contiguous)),
    ]
    for step in steps if halo_first else steps[::-1]:
        step()
    return mine


def check_model(kind: type[nn.Module], run: Callable[[Any, Any, torch.Tensor], tuple[Any, torch.Tensor]]) -> None:
    """``run(model, mesh, part)`` returns the model that has run, and its output."""
    model, layout = drawn_model(kind), contiguous(13, 2)
    whole = X.clone().requires_grad_()
    wanted = [model(whole), *torch.autograd.grad(model(whole), [whole, *model.parameters()], COTANGENT)]

    def main(rank: int):
        part = layout.shard(X, 1, rank).clone().requires_grad_()
        mine, out = run(copy.deepcopy(model), cp_mesh(2), part)
        found = torch.autograd.grad(out, [part, *mine.parameters()], layout.shard(COTANGENT, 1, rank))
        return [out.detach(), found[0]], found[1:]

    parts, grads = zip(*run_ranks(main, 2), strict=True)
    found = [layout.unshard(each, 1) for each in zip(*parts, strict=True)]
    found += [sum(each) for each in zip(*grads, strict=True)]
    assert max(map(error, found, wanted)) < EXACT


@pytest.mark.parametrize("kind", [Dilated, TwoSided])
@pytest.mark.parametrize("halo_first", [True, False])
def test_a_style_around_it(kind, halo_first: bool):
    """Whichever comes first; the layout is the style's. A convolution of torch with a halo is not refused."""

    def run(mine: Any, mesh: Any, part: torch.Tensor):
        mine = in_style(mine, mesh, halo_first=halo_first)
        return mine, mine(part)

    check_model(kind, run)


def plain_convolution() -> nn.Module:
    """A layer of torch, which a style leaves as it is."""
    layer: Any = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
    layer.reach, layer.seq_dim = (1, 1), -1
    return layer


@pytest.mark.parametrize("kind", [Dilated, plain_convolution])
def test_a_copy_in_a_checkpoint(kind):
    """A recomputation has the layout of the style too."""

    def run(mine: Any, mesh: Any, part: torch.Tensor):
        mine = copy.deepcopy(in_style(mine, mesh))
        mine.again = True
        return mine, mine(part)

    check_model(kind, run)


def test_a_block_around_it():
    def run(mine: Any, mesh: Any, part: torch.Tensor):
        context_halo(mine.layer, mesh, reach=mine.layer.reach)
        with context_parallel(mesh, layout=contiguous):
            return mine, mine(part)

    check_model(Dilated, run)


def test_torch_compile():
    """Its graph breaks at the module."""

    def run(mine: Any, mesh: Any, part: torch.Tensor):
        mine = in_style(mine, mesh)
        return mine, torch.compile(mine, backend="aot_eager")(part)

    check_model(Dilated, run)


def test_a_graph_that_may_not_break_is_refused():
    def act(rank: int, mesh: Any) -> None:
        mine = drawn(Dilated, 1)[0]
        context_halo(mine, mesh, reach=mine.reach)
        torch.compile(mine, backend="eager", fullgraph=True)(X)

    refused(act, "a module with a halo runs outside of torch.compile's graphs", Exception, ranks=1)


def test_documents_of_a_scope():
    module, (x,) = drawn(Dilated, 13)
    layout, (out,) = head_tail(13, 2), on_one(module, [x], (4, 9))[0]

    def main(rank: int):
        mine, mesh = copy.deepcopy(module), cp_mesh(2)
        context_halo(mine, mesh, reach=mine.reach)
        with SequenceScope(layout, mask=Causal() & Documents((4, 9))):
            return mine(layout.shard(x, 1, rank)).detach()

    assert error(layout.unshard(run_ranks(main, 2), 1), out) < EXACT


def test_the_handle_removes_it():
    """Then the module computes with its own tokens, as before, and may get another halo."""

    def main(rank: int):
        mine, mesh = drawn(Dilated, 1)[0], cp_mesh(2)
        part, layout = head_tail(13, 2).shard(X, 1, rank), head_tail
        alone = mine(part)
        options = {"reach": mine.reach, "layout": layout}
        handle = context_halo(mine, mesh, **options)
        with_halo, twin = mine(part), copy.deepcopy(mine)
        handle.remove()
        assert torch.equal(mine(part), alone)
        assert torch.equal(twin(part), with_halo)
        assert list(mine.state_dict()) == list(twin.state_dict()) == list(drawn(Dilated, 1)[0].state_dict())
        parallelize_module(mine, mesh, ModuleContextParallel(layout=layout))
        context_halo(mine, mesh, reach=mine.reach)
        return float((mine(part) - with_halo).detach().norm())

    assert max(run_ranks(main, 2)) < EXACT


# verify.


def proof(reach: Any, kind: type[nn.Module] = Dilated) -> Any:
    model = drawn_model(kind)

    def step(mine: Any, x: torch.Tensor, mesh: Any):
        layout = contiguous(x.shape[1], mesh.size())
        mine(layout.shard(x, 1, mesh.get_local_rank())).square().sum().backward()
        sum_gradients(mine, mesh)

    def main(rank: int):
        mine, mesh = copy.deepcopy(model), cp_mesh(2)
        context_halo(mine.layer, mesh, reach=reach, seq_dim=mine.layer.seq_dim)
        parallelize_module(mine, mesh, ModuleContextParallel(layout=contiguous))
        return verify(mine, mesh, X, step)

    return run_ranks(main, 2, return_errors=True)[0]


def test_verify_proves_it_with_a_planted_mistake():
    assert "equal to one device" in str(proof(5))


@pytest.mark.parametrize(
    ("kind", "reach", "front", "behind"), [(Dilated, 4, 4, 0), (TwoSided, (1, 1), 1, 1), (TwoSided, (0, 2), 0, 2)]
)
def test_verify_names_a_reach_that_is_too_small(kind, reach, front: int, behind: int):
    found = proof(reach, kind)
    assert isinstance(found, VerificationError)
    words = " ".join(str(found).split())
    assert f"layer ({kind.__name__}): its output depends on more tokens than its halo has, {front} in" in words
    assert f"and {behind} behind it: give context_halo a larger reach=" in words


# Refused.


class Attends(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.mesh = how, None

    def forward(self, x_BLC):
        q = x_BLC[:, None]
        if self.how == "roll":
            return context_roll(x_BLC, 1, 1, self.mesh, fill=0.0)
        if self.how == "function":
            return context_attention(q, q, q, self.mesh)[:, 0]
        return F.scaled_dot_product_attention(q, q, q)[:, 0]


@pytest.mark.parametrize("how", ["roll", "function", "style"])
def test_messages_inside_are_refused(how: str):
    """With two ranks and head_tail, rows with the halo are as many as two parts of a longer sequence."""
    model = Model(Attends(how)).double()

    def main(rank: int):
        mine, mesh = copy.deepcopy(model), cp_mesh(2)
        mine.layer.mesh = mesh
        context_halo(mine.layer, mesh, reach=1)
        parallelize_module(mine, mesh, ModuleContextParallel())
        part = head_tail(8, 2).shard(X[:, :8], 1, rank)
        with pytest.raises(NotImplementedError, match="the module calls attention, or another function"):
            mine(part)
        mine.layer = nn.Identity()
        return mine(part)  # nothing is left switched on

    run_ranks(main, 2)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"reach": -1}, ValueError, "reach=-1 must be at least 0"),
        ({"reach": (1, -1)}, ValueError, "must be at least 0"),
        ({"reach": 1.5}, TypeError, "a number of tokens, or a pair"),
        ({"reach": (1, 2, 3)}, TypeError, "a number of tokens, or a pair"),
        ({"reach": True}, TypeError, "a number of tokens, or a pair"),
        ({"reach": 1, "whole": "table"}, ValueError, r"whole=\['table'\] must be names of arguments .*x_BLC"),
    ],
)
def test_options_that_are_refused(options, kind, words: str):
    refused(lambda rank, mesh: context_halo(Dilated(), mesh, **options), words, kind)


def test_a_second_halo_is_refused():
    def act(rank: int, mesh: Any) -> None:
        mine = Model(Dilated())
        context_halo(mine.layer, mesh, reach=5)
        context_halo(copy.deepcopy(mine.layer), mesh, reach=5)

    refused(act, "has a halo already .itself.: give one halo")

    def around(rank: int, mesh: Any) -> None:
        mine = Model(Dilated())
        context_halo(mine.layer, mesh, reach=5)
        context_halo(mine, mesh, reach=5)

    refused(around, "has a halo already .layer.")


def test_modules_that_are_refused():
    refused(lambda _, mesh: context_halo(torch.compile(Dilated()), mesh, reach=5), "torch.compile.*first")

    def pickled(rank: int, mesh: Any) -> None:
        mine = Dilated()
        context_halo(mine, mesh, reach=5)
        pickle.dumps(mine)

    refused(pickled, "cannot be pickled", TypeError)


class Returns(nn.Module):
    def __init__(self, what: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x, y=None):
        return self.what(x)


def call_with_halo(mesh: Any, what: Callable[[torch.Tensor], Any], *more: Any, reach: int = 1, layout=None) -> None:
    mine = Returns(what)
    context_halo(mine, mesh, reach=reach, layout=layout)
    mine(torch.ones(1, 4, 3), *more)


def itself(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        (lambda x: x[:, 1:], ValueError, "must return an output for each token"),
        (lambda x: x.sum(), ValueError, "must return an output for each token"),
        (lambda x: iter([x]), TypeError, "returned an object of list_iterator"),
    ],
)
def test_results_that_are_refused(what, kind, words: str):
    refused(lambda _, mesh: call_with_halo(mesh, what), words, kind)


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        (torch.ones(1, 3, 2), ValueError, r"y \(1, 3, 2\). Give it tensors of this rank's tokens.* whole="),
        (torch.ones(3), ValueError, r"y \(3,\). Give it"),
        (object(), TypeError, "y has an object of object"),
    ],
)
@pytest.mark.parametrize("wrong", [(0, 1), (1,)])
def test_arguments_that_are_refused(more, kind, words: str, wrong):
    """On every rank, if only one has them."""
    act = lambda rank, mesh: call_with_halo(mesh, itself, more if rank in wrong else None)  # noqa: E731
    refused(act, words, (kind, ValueError))


def test_tokens_of_another_cut_are_refused():
    act = lambda _, mesh: call_with_halo(mesh, itself, layout=contiguous(9, 2))  # noqa: E731
    refused(act, "cuts 9 positions for 2 ranks")


def test_ranks_with_other_reaches():
    refused(lambda rank, mesh: call_with_halo(mesh, itself, reach=1 + rank), "disagree on reach")


def test_an_error_of_the_module_on_one_rank_reaches_every_rank():
    def act(rank: int, mesh: Any) -> None:
        call_with_halo(mesh, lambda x: x if rank else x.no_such_name)
        context_roll(torch.ones(1, 4, 3), 1, 1, mesh)

    own, other = run_ranks(lambda rank: act(rank, cp_mesh(2)), 2, return_errors=True)
    assert isinstance(own, AttributeError)
    assert "no_such_name" in str(other)


@pytest.mark.parametrize("documents", [(5, 3), (1, 1, 1, 5), (2, 2, 2, 2), (8,)])
@pytest.mark.parametrize("reach", [(2, 0), (1, 1)])
def test_all_ranks_call_the_module_equally_often(documents: tuple[int, ...], reach: tuple[int, int]):
    """FSDP gathers the parameters inside of a module at each call, on all ranks."""
    for layout in (contiguous(8, 2), head_tail(8, 2), contiguous(8, 3)):
        assert len({len(halo_plan(layout, documents, reach, rank).calls) for rank in range(layout.ranks)}) == 1


def test_a_sharded_module_of_several_documents():
    """Rank 0 has one part, and rank 1 the end of its document and a further one."""
    torch.manual_seed(0)
    whole, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Dilated()).double(), randn(1, 1, 8, WIDTH)
    parts = x.split((5, 3), 1)
    wanted = torch.cat([whole(part) for part in parts], 1)
    wanted.square().sum().backward()

    def on(rank: int) -> float:
        mesh = cp_mesh(2)
        mine = copy.deepcopy(whole)
        mine.zero_grad()
        fully_shard(mine[0], mesh=mesh)
        layout = contiguous(8, 2)
        context_halo(mine, mesh, reach=Dilated.reach, layout=layout, documents=(5, 3))
        out = mine(layout.shard(x, 1, rank))
        out.square().sum().backward()
        grad = mine[0].weight.grad.full_tensor() * 2  # FSDP averages
        return max(error(out.detach(), layout.shard(wanted.detach(), 1, rank)), error(grad, whole[0].weight.grad))

    assert max(run_ranks(on, 2)) < EXACT
