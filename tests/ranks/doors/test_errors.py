"""Bad input raises an error with a remedy on every rank. Nothing hangs, and a correct call works right after.

"Every rank" is what matters: a rank that raises alone leaves the others waiting for its keys.
"""

from __future__ import annotations

import copy
import re
import textwrap
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from cp_styles.batch import sum_gradients
from cp_styles.comm.checks import Checks
from cp_styles.functions.attention import context_attention
from cp_styles.layouts import contiguous, head_tail
from cp_styles.masks import Causal, Dense, Documents, SlidingWindow
from cp_styles.strategies import Ring
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel, parallelize_module
from cp_styles.testing import run_ranks
from tests.doors import door
from tests.oracle import VANISHING, error, randn
from tests.ranks.attention_case import EXACT, Core, Projected, cp_mesh, on_every_rank, parallel
from tests.ranks.leak_scene import RANKS, Scene, attention_of, refusals


def wrapped(text: str) -> str:
    """Messages are one line; the expected texts below are not."""
    return "\n".join(textwrap.fill(line, 110) for line in text.splitlines())


class Calls(nn.Module):
    """A module whose attention is whatever a test says, with the arguments modules have."""

    def __init__(self, attend=attention_of) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, query, key, value, attention_mask=None, dropout_p=0.0, **extra):
        return self.attend(query, key, value)


def call(attend=attention_of, style=None, **arguments):
    """What ``refusals`` needs: a module with this attention is called with these arguments beside q, k and v."""

    def act(s: Scene):
        return parallel(Calls(attend), s.mesh, **(style or {}))(*s.leaves()[0], **arguments)

    return act


# -- when the style is applied --


class Nothing(nn.Module):
    def forward(self, hidden_states):
        return hidden_states


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda s: AttentionContextParallel()._apply(Core(), "cuda"),
            "needs a DeviceMesh, got str: call init_device_mesh",
        ),
        (lambda s: AttentionContextParallel()._apply(Core(), dist.group.WORLD), "needs a DeviceMesh, got ProcessGroup"),
        (
            lambda s: parallel(Core(), init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))),
            "works on the mesh axis \"cp\", but the mesh has axes ('dp', 'tp'): name one of them \"cp\"",
        ),
        (lambda s: parallel(Core(), init_device_mesh("cpu", (1, 3))), "but the mesh has 2 axes without names"),
        (
            lambda s: parallel(Core(), s.mesh, strategy="ring"),
            "strategy must be a Strategy object such as Ring(), got",
        ),
        (lambda s: parallel(Core(), s.mesh, strategy=Ring), "strategy must be a Strategy object such as Ring()"),
        (lambda s: parallel(Core(), s.mesh, layout="zigzag"), "layout must be a SequenceLayout or a function"),
        (
            lambda s: parallel(Core(), s.mesh, mask="causal"),
            "mask must be a Mask object such as Causal(), got",
        ),
        (lambda s: parallel(Core(), s.mesh, kernel="flash"), "kernel must be a Kernel object or None, got 'flash'"),
        (lambda s: parallel(Core(), s.mesh, seq_dim=3), "seq_dim must be 2 ([B, H, S, D]) or 1 ([B, S, H, D]), got 3"),
        (
            lambda s: parallel(Core(), s.mesh, layout=head_tail(16, 4)),
            "the layout cuts the sequence for 4 ranks, mesh axis 'cp' has 3",
        ),
        (lambda s: parallel(Nothing(), s.mesh), "for modules whose forward takes query, key and value; Nothing takes"),
        (
            lambda s: parallel(parallel(Core(), s.mesh), s.mesh),
            "Core is context parallel already: apply AttentionContextParallel to a module once",
        ),
        (lambda s: context_attention(*s.leaves()[0], "cp"), "or a process group, got str"),
        (
            lambda s: context_attention(*s.leaves()[0], init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "cp"))),
            "needs a 1-D mesh, got axes ('dp', 'cp'): pass mesh[\"cp\"]",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_can_be_seen_when_it_is_applied(act, message: str):
    text = refusals(act)
    assert message in text
    assert "rank 0" not in text  # the same on all


# -- arguments of the call --


def test_dropout():
    inside = partial(F.scaled_dot_product_attention, dropout_p=0.1, is_causal=True, enable_gqa=True)
    assert_expected_inline(
        wrapped(refusals(call(inside))),
        """\
NotImplementedError: Calls (AttentionContextParallel over mesh axis 'cp'): dropout_p=0.1 is not supported: the
random numbers of the ranks would have to equal the numbers of one device. Set dropout to 0, or apply it after
the attention. See "Dropout in the attention" in tutorials/troubleshooting.md""",
    )


def test_masks_of_the_call():
    mask = torch.ones(12, 12, dtype=torch.bool)
    assert_expected_inline(
        wrapped(refusals(call(attention_mask=mask))),
        """\
NotImplementedError: Calls (AttentionContextParallel over mesh axis 'cp'): got a tensor 'attention_mask' of
shape (12, 12) in addition to query, key and value. Only an attn_mask of the whole sequence is supported;
apply other tensors outside of the module""",
    )
    assert "got a tensor 'bias'" in refusals(call(bias=mask))  # prime-rl#3397: swallowed by **kwargs


def test_arguments_that_do_not_fit_the_module():
    assert "missing a required argument: 'value'" in refusals(lambda s: parallel(Core(), s.mesh)(*s.leaves()[0][:2]))

    def one_alone(s: Scene):
        leaves = s.leaves()[0]
        parallel(Core(), s.mesh)(*(leaves[:2] if s.rank == 1 else leaves))

    text = refusals(one_alone)
    assert "rank 1: TypeError: Core (AttentionContextParallel over mesh axis 'cp'): missing a required argument" in text
    assert "rank 2: ValueError: Core (AttentionContextParallel over mesh axis 'cp'): ranks [1] of mesh" in text


# -- DTensors --


def test_dtensors_that_are_not_this_sequence():
    def on(mesh: str, placement):
        def act(s: Scene):
            leaves = s.leaves()[0]
            target = s.mesh if mesh == "cp" else s.other_mesh
            leaves[0] = DTensor.from_local(leaves[0], target, [placement], run_check=False)
            parallel(Core(), s.mesh)(*leaves)

        return act

    assert_expected_inline(
        wrapped(refusals(on("tp", Shard(2)))),
        """\
ValueError: Core (AttentionContextParallel over mesh axis 'cp'): query is a DTensor on mesh axes ('tp',) with
(Shard(dim=2),); expected a local tensor, or a DTensor on ('cp',) with Shard(2), because the style was given
the 1-D mesh ('cp',): for DTensors on other axes pass the composed mesh to parallelize_module, or let the
style before this one return local tensors (use_local_output=True). See "DTensors on other axes" in
tutorials/troubleshooting.md""",
    )
    for placement in (Replicate(), Shard(1)):
        assert f"with ({placement!r},); expected a local tensor" in refusals(on("cp", placement))


def test_the_function_takes_local_tensors():
    def act(s: Scene):
        leaves = s.leaves()[0]
        leaves[1] = DTensor.from_local(leaves[1], s.mesh, [Shard(2)], run_check=False)
        context_attention(*leaves, s.mesh)

    assert "key is a DTensor; pass this rank's part, tensor.to_local(). torch's own context_parallel" in refusals(act)


# -- shapes and lengths --


def test_lengths_that_the_layout_cannot_cut():
    assert_expected_inline(
        wrapped(refusals(call(style={"layout": head_tail(13, RANKS)}))),
        """\
ValueError: Calls (AttentionContextParallel over mesh axis 'cp'): the layout cuts 13 positions, the ranks of
mesh axis 'cp' hold 12 together; build the layout for this length, or give a balancer such as head_tail.
Attention along another dim than the tokens needs no style. See "A layout of another length" in
tutorials/troubleshooting.md""",
    )

    assert "each was given the whole sequence: cut it" in refusals(call(style={"layout": head_tail(4, RANKS)}))

    def cut_otherwise(s: Scene):
        parallel(Core(), s.mesh, layout=lambda length, ranks: contiguous(length - 3, ranks))(*s.leaves()[0])

    assert re.search("must cut 12 positions for 3 ranks, and .* returned one for 9 ", refusals(cut_otherwise))

    def other_lengths(s: Scene):
        leaves = [x.narrow(2, 0, x.shape[2] - (s.rank == 0)) for x in s.leaves()[0]]
        leaves = [torch.cat((x, x[:, :, :1]), 2) if s.rank == 2 else x for x in leaves]
        parallel(Core(), s.mesh, layout=contiguous)(*leaves)

    assert_expected_inline(
        wrapped(refusals(other_lengths)),
        """\
ValueError: Core (AttentionContextParallel over mesh axis 'cp'): the ranks of mesh axis 'cp' hold [3, 4, 5]
positions, but the layout contiguous gives them [4, 4, 4] of 12: cut the inputs with the layout of the
attention (layout.shard), or give the attention the layout they were cut with. See "Inputs that were cut in
another way" in tutorials/troubleshooting.md""",
    )


def test_masks_of_another_shape():
    for mask, message in (
        (Documents((6, 7)), "the mask was made for 13 positions, the sequence has 12"),
        (Causal() & Documents((7, 7)), "the mask was made for 14 positions, the sequence has 12"),
        (Dense(torch.ones(11, 12)), "shape (11, 12) does not broadcast to [B, H, S_q, S_kv] = [2, 4, 12, 12]"),
        (Dense(torch.ones(3, 1, 12, 12)), "shape (3, 1, 12, 12) does not broadcast to [B, H, S_q, S_kv]"),
    ):
        by_function = refusals(lambda s, mask=mask: context_attention(*s.leaves()[0], s.mesh, mask=mask))
        by_style = refusals(lambda s, mask=mask: parallel(Core(), s.mesh, mask=mask)(*s.leaves()[0]))
        for text in (by_function, by_style):
            assert message in text
            assert "rank 0" not in text


def test_causal_cross_attention():
    def act(s: Scene):
        query, key, value = s.leaves()[0]
        more = [torch.cat((x, x), 2) for x in (key, value)]
        parallel(Core(), s.mesh)(query, *more)

    assert_expected_inline(
        wrapped(refusals(act)),
        """\
ValueError: Core (AttentionContextParallel over mesh axis 'cp'): is_causal=True with 12 queries and 24 keys:
positions of the two sequences do not correspond. Cross-attention takes no positional mask; pass
is_causal=False, or a mask over numbers of keys, as Shifted and EndedWindows""",
    )

    def window(s: Scene):
        query, key, value = s.leaves(contiguous)[0]
        layout = contiguous
        keys = layout(7, RANKS).lengths[s.rank]
        cut = [x.narrow(2, 0, keys) for x in (key, value)]
        context_attention(query, *cut, s.mesh, mask=SlidingWindow(3), layout=layout)

    assert "SlidingWindow(left=3, right=0) with 12 queries and 7 keys" in refusals(window)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 4, 8), (2, 2, 8), (2, 3, 8)), "2 key heads and 3 value heads"),
        (((2, 4, 8), (2, 3, 8), (2, 3, 8)), "4 query heads are not a multiple of 3 key/value heads"),
        (((2, 4, 8), (1, 4, 8), (1, 4, 8)), "query, key and value have batches of 2, 1 and 1"),
        (((2, 4, 8), (2, 4, 6), (2, 4, 6)), "the head dims of query and key differ: 8 and 6"),
    ],
)
def test_shapes_that_do_not_fit_together(shapes, message: str):
    """On every rank, though one of them has no tokens: 2 positions on 3 ranks."""

    def act(s: Scene):
        rows = contiguous(2, RANKS).lengths[s.rank]
        tensors = [randn(0, batch, heads, rows, dim) for batch, heads, dim in shapes]
        context_attention(*tensors, s.mesh, layout=contiguous)

    text = refusals(act)
    assert message in text
    assert "rank 0" not in text


def test_values_of_another_length_than_keys():
    def act(s: Scene):
        query, key, value = s.leaves()[0]
        context_attention(query, key, value[:, :, 1:], s.mesh)

    assert "key and value have different lengths: 4 and 3" in refusals(act)


# -- ranks that differ --


TRACERS = {
    "torch.export": lambda module, inputs: torch.export.export(module, inputs),
    "torch.jit.trace": lambda module, inputs: torch.jit.trace(module, inputs, check_trace=False),
    "make_fx": lambda module, inputs: make_fx(module)(*inputs),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("style", [AttentionContextParallel, ModuleContextParallel])
@on_every_rank(2)
def test_a_graph_without_the_other_ranks_is_not_traced(mesh, rank: int, style, tracer: str):
    """On one thread alone, because tracers change what threads share; the error needs no other rank."""
    module = parallelize_module(Core(), mesh, style())
    if rank == 0:
        inputs = tuple(randn(seed, 1, 2, 4, 4) for seed in range(3))
        with pytest.raises(NotImplementedError, match=f"{tracer} records the operators of one process"):
            TRACERS[tracer](module, inputs)


# -- what the module does --


def gathered(query, key, value):
    return attention_of(*(x.redistribute(placements=[Replicate()]) for x in (query, key, value)))


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (gathered, "nothing may gather the sequence inside"),
        (lambda q, k, v: attention_of(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), "check seq_dim"),
        (lambda q, k, v: attention_of(q, k, v).sum(2), "the module reduced or gathered the sequence dim"),
        (lambda q, k, v: attention_of(q, k, v).mean(), "the module reduced or gathered the sequence dim"),
        (lambda q, k, v: attention_of(q, k, v).redistribute(placements=[Replicate()]), "nothing may gather"),
        (lambda q, k, v: v * 2, "no scaled_dot_product_attention was called inside"),
        (lambda q, k, v: attention_of(q, k.full_tensor(), v.full_tensor()), "nothing may gather the sequence inside"),
        (lambda q, k, v: attention_of(q[0], k[0], v[0])[None], "called with a query of 3 dims, "),
    ],
    ids=["gathered", "transposed", "summed", "averaged", "gathered after", "no attention", "own gather", "three dims"],
)
def test_modules_that_do_something_else(attend, message: str):
    assert message in refusals(call(attend))


def test_a_module_that_does_more_than_attend():
    """The style of a core is refused there. On its core it is exact, and so is the style of a whole module."""
    layout, x = head_tail(13, 2), randn(0, 2, 13, 10)
    one = Projected(Core())
    one(x).square().sum().backward()

    def on(rank: int, plan: Any) -> float:
        model = parallelize_module(Projected(Core()), cp_mesh(2), plan)
        model(layout.shard(x, 1, rank)).square().sum().backward()
        sum_gradients(model, cp_mesh(2))
        pairs = zip(model.parameters(), one.parameters(), strict=True)
        return max(error(mine.grad, each.grad) for mine, each in pairs if each.grad.norm() > VANISHING)

    for found in run_ranks(partial(on, plan=AttentionContextParallel()), 2, return_errors=True):
        assert "AttentionContextParallel is for modules whose forward takes query, key and value" in str(found)
    for plan in ({"core": AttentionContextParallel()}, ModuleContextParallel()):
        assert max(run_ranks(partial(on, plan=plan), 2)) < EXACT


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def forward(self, q, k, v):
        return self.core(q, k, v)


def _both_styles(mesh):
    module = _Inner()
    parallelize_module(module, mesh, {"core": AttentionContextParallel()})
    return parallelize_module(module, mesh, ModuleContextParallel())


def test_one_style_inside_of_another():
    def on(rank: int) -> None:
        _both_styles(cp_mesh(2))(*torch.zeros(3, 1, 2, 4, 8))

    errors = run_ranks(on, 2, return_errors=True)
    words = "a module inside has AttentionContextParallel, .*: apply one of the two"
    assert all(re.search(words, str(error)) for error in errors), errors


def _jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1).contiguous(), torch.tensor([0, 4]))


class Plain(nn.Module):
    """Reads no shape of its inputs."""

    def forward(self, *tensors):
        return F.scaled_dot_product_attention(*tensors)


DOORS: dict[str, dict[str, Any]] = {
    "function": {},
    "block": {"core": F.scaled_dot_product_attention},  # not a module's code, which would read a shape that is none
    "module": {"core": Plain(), "checks": Checks(inputs=False)},
    "style": {},
}
ODD = {
    "2 dims": (lambda x: x[0, 0], r"query must have 4 dims .*, got \(4, 8\)"),
    "jagged": (_jagged, r"nested tensor: pack the documents .*SequenceScope"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0]]), r"nested tensor: pack the documents .*SequenceScope"),
    "sparse": (lambda x: x.to_sparse(), r"has the layout torch.sparse_coo: pass query.to_dense\(\)"),
    "int16": (lambda x: x.to(torch.int16), "must share one floating-point dtype .*torch.int16"),
}
ODD_QUERY = {
    "another dtype": (lambda x: x.double(), "query, key and value must share one floating-point dtype"),
    "another device": (lambda x: x.to("meta"), "and one device, got"),
}
NO_TENSOR = {
    "None": (lambda x: None, "query must be a tensor, got NoneType"),
    "a text": (lambda x: "query", "query must be a tensor, got str"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("odd", "name"), [*product(ODD | ODD_QUERY, DOORS), *product(NO_TENSOR, ("function", "style"))]
)
def test_one_rank_has_a_query_that_no_attention_takes(odd: str, name: str):
    """Key and value are as odd for the rows of ODD, and right for further ones."""
    change, words = (ODD | ODD_QUERY | NO_TENSOR)[odd]

    def on(rank: int):
        attend = door(name, cp_mesh(2), **copy.deepcopy(DOORS[name]))
        query, *others = torch.zeros(3, 1, 2, 4, 8)
        if rank == 1:
            query, others = change(query), [change(x) if odd in ODD else x for x in others]
        attend(query, *others)

    other, own = run_ranks(on, 2, return_errors=True)
    assert re.search(words, str(own)), own
    assert re.search(rf"ranks \[1\] of mesh axis 'cp' have failed.*{words}", str(other)), other


# -- options --


def test_sinks_of_another_shape_are_refused():
    for shape in ((2,), (1, 4), ()):
        text = refusals(lambda s, shape=shape: context_attention(*s.leaves()[0], s.mesh, sink_H=torch.zeros(shape)))
        assert "sink_H must be one logit for each of 4 query heads" in text


def test_what_is_not_there_is_refused_by_name():
    """prime-rl#3397: an argument swallowed by **kwargs. Nothing here takes any, so a softcap is a TypeError at once."""

    def softcap(s: Scene):
        context_attention(*s.leaves()[0], s.mesh, softcap=30.0)

    def dropout(s: Scene):
        context_attention(*s.leaves()[0], s.mesh, dropout_p=0.1)

    assert "unexpected keyword argument 'softcap'" in refusals(softcap)
    assert "unexpected keyword argument 'dropout_p'" in refusals(dropout)

    class Swallowing(Core):
        def forward(self, query, key, value, **kwargs):
            return super().forward(query, key, value)

    def s_aux(s: Scene):
        parallel(Swallowing(), s.mesh)(*s.leaves()[0], s_aux=torch.zeros(4))

    assert "got a tensor 's_aux' of shape (4,) in addition to query, key and value" in refusals(s_aux)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_dim": 3}, "seq_dim=3 must be 2"),
        ({"return_lse": True, "sink_H": torch.zeros(2)}, "return_lse=True is not"),
    ],
)
def test_what_one_rank_alone_asks_for(options, words: str):
    def on(rank: int):
        x = torch.zeros(1, 2, 4, 8)
        context_attention(x, x, x, cp_mesh(2), **(options if rank else {}))

    other, own = run_ranks(on, 2, return_errors=True)
    assert words in str(own)
    assert "ranks [1] of mesh axis 'cp' have failed" in str(other)
