"""Ranks with different configurations or calls: an error on all ranks, which says which ranks differ and in what."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cp_styles import flex_attention
from cp_styles.collectives import all_to_all
from cp_styles.functions.attention import context_attention
from cp_styles.functions.flex import context_flex_attention
from cp_styles.layouts import contiguous, head_tail, per_document_head_tail
from cp_styles.masks import Causal
from cp_styles.strategies import Ulysses
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from cp_styles.testing import run_ranks
from cp_styles.torch_api import context_parallel
from tests import cases
from tests.cases import Case, sensible
from tests.covering import sampled
from tests.doors import DOORS, EACH, cut_contiguously, door
from tests.oracle import randn
from tests.ranks.attention_case import EXACT, Core, Problem, on_every_rank, parallel, refused, run_attention
from tests.ranks.leak_scene import RANKS, Even, Scene, refusals

LENGTH = Even.problem.inputs[0].shape[2]


STYLES = {"module": ModuleContextParallel, "style": AttentionContextParallel}


LAYOUTS = {"balancer": contiguous, "layout": contiguous(LENGTH, RANKS)}


class Odd(NamedTuple):
    """A difference of one of three ranks: (rank, field, value). The fields of all, which doors, and the error."""

    odd: tuple[int, str, Any]
    words: str
    needs: str = "keys"
    fields: Mapping[str, Any] = MappingProxyType({})


OTHERS, SECOND = r": ranks \[1, 2\] differ from rank 0 ", r": ranks \[1\] differ from rank 0 "
# tests/fuzz.py combines these with everything else.
ODD = {
    "scale": Odd((0, "scale", 0.5), f"scale{OTHERS}.rank 0: 0.5, rank 1: "),
    "is_causal": Odd((0, "mask", "full"), f"is_causal{OTHERS}.rank 0: False, rank 1: ", "sdpa",
                     {"mask": "is_causal", "masked_by": "call"}),
    "a mask": Odd((1, "mask", "window"), f"mask{SECOND}.rank 0: Causal", fields={"mask": "causal"}),
    "a strategy": Odd((1, "strategy", "all-gather"), f"strategy{SECOND}.rank 0: Ring"),
    "a shape": Odd((1, "heads", (3, 3)), f"shape{SECOND}"),
    "autocast": Odd((1, "autocast", True), f"dtype{SECOND}.*float32.*, rank 1: .*bfloat16", "autocast",
                    {"dtype": "float32"}),
    "a layout": Odd((1, "layout", "striped"), f"layout{SECOND}"),
    "a balancer alone": Odd((1, "balancer", True), "layout: .*rank 1: contiguous", fields={"balancer": False}),
    "no balancer": Odd((0, "balancer", False), "layout: .*rank 1: contiguous", fields={"balancer": True}),
    "no sink": Odd((0, "sink", None), f"sink{OTHERS}", "sink", {"sink": 1.0}),
    "another sink": Odd((0, "sink", -inf), f"sink{OTHERS}", "sink", {"sink": 1.0}),
    "a score function": Odd((1, "score", "softcap"), f"kernel{SECOND}", "scores", {"score": "alibi"}),
}  # fmt: skip


def is_of_door(name: str, way: str, **_: object) -> bool:
    return ODD[name].needs in DOORS[way].takes


@sampled(1, where=is_of_door, name=list(ODD), way=["module", "style", "function", "flex"], balancer=[False, True])
def test_one_rank_has_one_thing_different(name: str, way: str, balancer: bool):
    """All ranks say who differs in what, and a good call on the same group is exact right afterwards."""
    odd, words, _, fields = ODD[name]
    good = Case(**({"door": way, "ranks": RANKS, "length": 12, "heads": (6, 3), "balancer": balancer} | dict(fields)))
    assert sensible(good) == good

    def on(rank: int):
        with pytest.raises(ValueError, match="disagree on (the contents of the )?" + words):
            cases.run_rank(rank, replace(good, odd=odd))
        return cases.run_rank(rank, good)

    assert cases.compared(good, run_ranks(on, RANKS)).kind == "exact"


class Layers(nn.Module):
    """Layers of one class, of which a forward leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Core() for _ in range(3))

    def forward(self, x, without: int):
        for index, layer in enumerate(self.layers):
            if index != without:
                x = layer(x, x, x)
        return x


OF_LAYERS = {
    "model": (ModuleContextParallel, ""),
    "module": (ModuleContextParallel, "layers.*"),
    "style": (AttentionContextParallel, "layers.*"),
}


@sampled(1, which=list(OF_LAYERS), steps=[0, 3])
def test_ranks_that_leave_out_different_layers(which: str, steps: int):
    """As many calls, of equal shapes. The ranks say which module calls: its path, and its number under its style."""
    layout = contiguous(6, 2)

    def act(rank: int, mesh: DeviceMesh) -> None:
        style, path = OF_LAYERS[which]
        model = Layers()
        model = parallelize_module(model, mesh, {path: style(layout=layout)} if path else style(layout=layout))
        x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
        for _ in range(steps):
            model(x, -1).sum().backward()
        model(x, rank).sum().backward()

    refused(act, "are not at the same place: .* in module")


class Failing(nn.Module):
    """Does not get to its attention, or not to one that is context parallel."""

    alone: Callable[..., torch.Tensor] | None = None

    def forward(self, query, key, value):
        attend = self.alone or partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        return attend(query, key, value)


def fails(*tensors):
    raise ValueError("my own mistake")


ALONE = {
    "dropout": (
        partial(F.scaled_dot_product_attention, dropout_p=0.1, enable_gqa=True),
        "dropout_p=0.1 is not supported: the random numbers of the ranks",
    ),
    "no attention": (lambda q, k, v: v * 2.0, "no scaled_dot_product_attention was called inside"),
    "own exception": (fails, "my own mistake"),
    "a mask of another length": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(LENGTH + 1, LENGTH + 1) > 0, enable_gqa=True
        ),
        "disagree on",
    ),
}


@sampled(2, what=list(ALONE), door=list(STYLES), layout=list(LAYOUTS))
def test_one_rank_alone_does_not_attend(what: str, door: str, layout: str):
    """The others would wait for its keys."""
    alone, message = ALONE[what]

    def act(s: Scene):
        module = parallelize_module(Failing(), s.mesh, STYLES[door](layout=LAYOUTS[layout]))
        module.alone = alone if s.rank == 1 else None
        module(*s.leaves(contiguous)[0])

    text = refusals(act)
    if message == "disagree on":  # it is compared before anybody refuses it
        assert re.search("disagree on .*ranks .1. differ", text)
        return
    lines = {line[:6]: line for line in text.splitlines() if line.startswith("rank ")}
    assert message in lines["rank 1"]
    for line in (lines["rank 0"], lines["rank 2"]):
        assert "ranks [1] of mesh axis 'cp' have failed" in line
        assert message in line


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("door", STYLES)
def test_a_module_attends_another_number_of_times(door: str, layout: str):
    class Loop(nn.Module):
        def forward(self, query, key, value):
            for _ in range(self.times):
                query = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return query

    def act(s: Scene):
        module = parallelize_module(Loop(), s.mesh, STYLES[door](layout=LAYOUTS[layout]))
        module.times = 2 - (s.rank == 0)
        leaves = s.leaves(contiguous)[0]
        with torch.no_grad():
            for _ in range(2):
                module(*leaves)

    text = refusals(act)
    assert "are not at the same place: rank 0 is about to attend" in text
    assert "rank 1 is about to attend (call 2 of its module's forward)" in text


class Odd(Exception):
    """An error that the package does not know."""


class FlexCore(nn.Module):
    def forward(self, query, key, value):
        return flex_attention(query, key, value, score_mod=self.score_mod, enable_gqa=True)


@sampled(
    1,
    door=["flex", "flex in a module", "balancer", "module"],
    error=[KeyError("mine"), Odd("mine"), IndexError("mine"), UserWarning("mine")],
)
def test_whatever_one_rank_raises_the_others_hear_of(door: str, error: Exception):
    def fail(*_):
        raise error

    def on(rank: int):
        def cut(length: int, ranks: int):
            return fail() if rank == 1 else head_tail(length, ranks)

        s = Even(rank, threading.Barrier(1))
        leaves = s.leaves()[0]
        score_mod = fail if rank == 1 else lambda score, *_: score
        try:
            if door == "flex":
                context_flex_attention(*leaves, s.mesh, enable_gqa=True, score_mod=score_mod)
            elif door == "flex in a module":
                module = parallelize_module(FlexCore(), s.mesh, ModuleContextParallel())
                module.score_mod = score_mod
                module(*leaves)
            elif door == "balancer":
                context_attention(*leaves, s.mesh, layout=cut)
            else:
                module = parallelize_module(Failing(), s.mesh, ModuleContextParallel())
                module.alone = fail if rank == 1 else None
                module(*leaves)
        finally:
            s.run(parallel(Core(), s.mesh))

    first, second, third = run_ranks(on, RANKS, return_errors=True)
    assert (type(second), str(second)) == (type(error), str(error))
    for other in (first, third):
        assert isinstance(other, ValueError)
        assert "ranks [1] of mesh axis 'cp' have failed" in str(other)


@pytest.mark.parametrize("name", EACH[2:])
@pytest.mark.parametrize(
    "wrong",
    [{"strategy": Ulysses(size=2)}, {"strategy": "ring"}, {"layout": 7}, {"layout": head_tail(12, 2)}],
    ids=["two of three ranks", "a text", "a number", "for two ranks"],
)
def test_one_rank_is_given_a_wrong_argument(name: str, wrong):
    """Two does not divide three ranks. The others hear of it at once, and the group can be used."""

    def on(rank: int):
        s = Even(rank, threading.Barrier(1))
        try:
            door(name, s.mesh, **(wrong if rank == 1 else {}))(*s.leaves()[0])
        finally:
            s.run(parallel(Core(), s.mesh))

    first, second, third = run_ranks(on, RANKS, return_errors=True)
    assert isinstance(second, ValueError | TypeError)
    for other in (first, third):
        assert "ranks [1] of mesh axis 'cp' have failed" in str(other)


def test_one_rank_attends_where_the_others_recompute():
    """The same call of the same module, with other inputs: no rank may take the first one for the second."""

    def act(rank: int, mesh: DeviceMesh) -> None:
        core, (leaves, cotangent) = parallel(Core(), mesh), Even.problem.shard(head_tail, rank, RANKS)
        out = checkpoint(core, *leaves, use_reentrant=False)
        (core(*(2 * x for x in leaves)) if rank == 1 else out).backward(cotangent)

    words = r"rank 0 is about to attend \(call 1 of its module's forward\) again, in a backward"
    refused(act, words, ranks=RANKS)


class Catches(nn.Module):
    """Goes on without its attention where this is refused."""

    dropout = 0.0

    def forward(self, query, key, value):
        try:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, enable_gqa=True)
        except NotImplementedError:
            return query


@pytest.mark.parametrize("style", STYLES.values())
def test_one_rank_catches_the_refusal_of_its_call(style: type):
    """No hook sees the error, and the remaining ranks hear of it all the same."""

    def on(rank: int):
        s = Even(rank, threading.Barrier(1))
        module = parallelize_module(Catches(), s.mesh, style())
        module.dropout = 0.1 * (rank == 1)
        module(*s.leaves()[0])

    first, second, third = run_ranks(on, RANKS, return_errors=True)
    assert second is None
    for other in (first, third):
        assert "ranks [1] of mesh axis 'cp' have failed" in str(other)


@pytest.mark.parametrize("place", ["before", "after"])
def test_one_rank_fails_inside_a_block(place: str):
    def act(s: Scene):
        leaves = s.leaves()[0]
        with context_parallel(s.mesh):
            if place == "after":
                Core()(*leaves)
            if s.rank == 1:
                raise ValueError("my own mistake")
            Core()(*leaves)

    first, second, third = refusals(act).splitlines()
    assert "my own mistake" in second
    assert "ranks [1] of mesh axis 'cp' have failed" in first
    assert "ranks [1] of mesh axis 'cp' have failed" in third


def cut_by(documents: list[int]):
    return lambda length, ranks: per_document_head_tail(length, ranks, documents=documents)


@pytest.mark.parametrize("name", [*STYLES, "function"])
def test_balancers_of_one_name_that_cut_differently(name: str):
    """Compared is what they say: of equal lengths here, but not the same positions."""
    pairs = [cut_by([6, 6]), cut_by([12])]
    assert pairs[0](LENGTH, RANKS).lengths == pairs[1](LENGTH, RANKS).lengths

    def act(s: Scene):
        layout = pairs[s.rank == 1]
        door(name, s.mesh, layout=layout)(*(x * 1 for x in s.leaves(layout)[0]))

    assert re.search(r"disagree on layout: ranks \[1\] differ from rank 0 .*\(\(0, 2\), \(10, 12\)\)", refusals(act))


@on_every_rank(RANKS)
def test_functions_that_cut_alike(rank: int):
    """What ranks compare of functions of a user are the layouts that they make."""

    def of_rank(length: int, ranks: int):
        return head_tail(length, ranks)

    s = Even(rank, threading.Barrier(1))
    s.run(parallel(Core(), s.mesh, layout=of_rank if rank else cut_by([LENGTH])))


def mask_mods(rank: int):
    """Of the same first, last and number of keys a row."""
    hidden = 1 + (rank == 1)
    return lambda b, h, q_idx, kv_idx: kv_idx % 4 != hidden


def score_mods(kind: str, rank: int):
    """The same code, which reads other values on rank 1."""
    value = 1.0 + (rank == 1)
    if kind == "tensor":
        table = torch.full((4,), value)
        return lambda score, b, h, q_idx, kv_idx: score * table[h]
    if kind == "partial":
        return partial(lambda score, b, h, q_idx, kv_idx, factor: score * factor, factor=value)
    return lambda score, *_: score * value


@pytest.mark.parametrize("kind", ["mask_mod", "tensor", "partial", "closure"])
def test_ranks_whose_flex_functions_read_other_values(kind: str):
    def act(s: Scene):
        leaves = s.leaves()[0]
        options = {}
        if kind == "mask_mod":
            size = {"Q_LEN": LENGTH, "KV_LEN": LENGTH, "BLOCK_SIZE": LENGTH, "device": "cpu"}
            options["block_mask"] = create_block_mask(mask_mods(s.rank), None, None, **size)
        else:
            options["score_mod"] = score_mods(kind, s.rank)
        context_flex_attention(*leaves, s.mesh, enable_gqa=True, **options)

    what = {"mask_mod": "the contents of the mask", "partial": "kernel"}.get(kind, "the contents of the kernel")
    assert f"disagree on {what}: ranks [1] differ from rank 0" in refusals(act)


MESHES = {name: partial(cut_contiguously, name) for name in EACH} | {
    "a collective": lambda mesh, *_: all_to_all(torch.zeros(2, 2), 0, 1, mesh)
}


@pytest.mark.parametrize("door", MESHES)
def test_a_composed_mesh_in_another_order_on_some_ranks(door: str):
    """A rank's place in the mesh says which part is its own, its place in the group who sends it what. Ranks 0 and 2
    are in order, 3 and 1 are not: all refuse."""
    ready = threading.Barrier(4)

    def act(*_: Any) -> None:
        mesh = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("cp", "tp"))
        ready.wait(20)  # a rank that ends while another one still connects to it leaves that one waiting for ever
        MESHES[door](mesh["cp"], *(randn(seed, 1, 2, 4, 8) for seed in range(3)))

    refused(act, r"has the ranks \[3, 1\], in another order than its process group, \[1, 3\]", ranks=4)


DOCUMENTS = ([4, 8], [6, 6], [8, 4])


@pytest.mark.parametrize("late", [False, True], ids=["backward at once", "backward after the next batch"])
@pytest.mark.parametrize("name", [*STYLES, "function", "block"])
@on_every_rank(RANKS)
def test_a_balancer_that_reads_the_batch(rank: int, name: str, late: bool):
    """It is asked for every batch, and not again in a backward, when it may be the next batch's already."""
    s, batch = Even(rank, threading.Barrier(1)), {}

    def cut(length: int, ranks: int):
        return per_document_head_tail(length, ranks, documents=batch["documents"])

    attend = door(name, s.mesh, layout=cut)
    runs = []
    for batch["documents"] in DOCUMENTS:
        layout = cut(LENGTH, RANKS)
        leaves, cotangent = s.problem.shard(layout, rank, RANKS)
        runs.append((layout, leaves, attend(*leaves), cotangent))
        if not late:
            runs[-1][2].backward(cotangent)
    for layout, leaves, out, cotangent in reversed(runs):
        if late:
            out.backward(cotangent)
        s.check([out, *(leaf.grad for leaf in leaves)], layout)


@pytest.mark.parametrize("others", [[0, 1, 2], [3]], ids=str)
def test_ranks_in_different_numbers_of_groups(others: list[int]):
    """No disagreement. But torch names a new group by how many groups a rank is in, or has made, and ranks with
    different names for one group would wait for each other."""
    problem = Problem(length=32, heads=4)

    def on(rank: int) -> list[float]:
        if rank in others:
            dist.new_group(others, use_local_synchronization=True)
        attend = partial(context_attention, mesh=dist.group.WORLD, strategy=Ulysses(size=2), mask=Causal())
        return run_attention(attend, problem, rank, 4)

    assert max(map(max, run_ranks(on, 4))) < EXACT


@pytest.mark.parametrize("name", ["flex", "varlen"])
@on_every_rank(2)
def test_ranks_with_other_dtypes_under_an_autocast_that_does_not_concern_them(mesh, rank: int, name: str):
    """flex_attention and varlen_attn take tensors as they are. Messages of other sizes would end the process."""
    dtype = (torch.float32, torch.bfloat16)[rank]
    q, k, v = (torch.randn(1, 2, 8, 16, dtype=dtype) for _ in range(3))
    attend = door(name, mesh, length=16, layout=contiguous)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="disagree on dtype"):
        attend(q, k, v)
