"""No state leaks from a context-parallel module, after errors, checkpoints, nesting and so on.

Each scenario is one way in which a switch thrown by hooks is left on, or is off when a backward needs it. Before it,
in the middle where it says so, and after it, attention outside is exact, and so is attention inside.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cp_styles.layouts import contiguous, head_tail
from cp_styles.strategies import AllGather
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from tests.covering import sampled
from tests.oracle import error
from tests.ranks.attention_case import EXACT
from tests.ranks.leak_scene import RANKS, Oops, Scene, Stop, attention_of, raising, scenario

# -- things that raise --


PLACES = ["before", "after", "a later pre-hook", "a hook", "the output's gradient", "an input's", "the attention's"]


@sampled(1, place=PLACES, door=[AttentionContextParallel, ModuleContextParallel], failure=[Oops, Stop])
@scenario
def test_an_exception(s: Scene, place: str, door: type, failure: type[BaseException]) -> None:
    probe, fail, handles = s.probe(door), raising(failure()), []
    leaves, cotangent = s.leaves()
    if place in ("before", "after"):
        setattr(probe, place, fail)
    elif place == "a later pre-hook":
        handles.append(probe.register_forward_pre_hook(fail))
    elif place == "a hook":
        handles.append(probe.register_forward_hook(fail))
    elif place == "the attention's":

        def attend(query, key, value):
            out = attention_of(query, key, value)
            handles.append(out.register_hook(fail))
            return out

        probe.attend = attend
    outs: list[torch.Tensor] = []

    def step() -> None:
        outs.append(probe(*leaves))
        if place in ("the output's gradient", "an input's"):
            handles.append((outs[0] if place == "the output's gradient" else leaves[0]).register_hook(fail))
        torch.autograd.grad(outs[0], leaves, cotangent, retain_graph=True)

    with pytest.raises(failure) as caught:
        step()
    if place == "after":
        assert not getattr(caught.value, "__notes__", None)  # the attention was reached: nothing to explain
    s.outside()
    for handle in handles:
        handle.remove()
    for out in outs:
        s.check([out, *torch.autograd.grad(out, leaves, cotangent)])


# -- without gradients, or with few of them --


@scenario
def test_no_grad_and_inference_mode(s: Scene) -> None:
    probe = s.probe()
    expected = head_tail(13, RANKS).shard(s.problem.expected[0], 2, s.rank)
    for mode in (torch.no_grad, torch.inference_mode):
        leaves, _ = s.leaves()
        with mode():
            out = probe(*leaves)
            assert error(out, expected) < EXACT
            fresh = probe(*(x.detach() * 1 for x in leaves))  # tensors made inside the mode
            assert error(fresh, expected) < EXACT
        assert not out.requires_grad


@scenario
def test_an_input_that_nothing_depends_on(s: Scene) -> None:
    """The three inputs share a node of autograd. One that gets no gradient leaves the others theirs."""
    probe, twice = s.probe(), s.probe()
    probe.attend = lambda query, key, value: attention_of(query, key, key)
    leaves, cotangent = s.leaves()
    found = torch.autograd.grad(probe(*leaves), leaves, cotangent, allow_unused=True)
    expected = torch.autograd.grad(twice(*leaves[:2], leaves[1].clone()), leaves[:2], cotangent)
    assert found[2] is None
    assert max(map(error, found[:2], expected)) < EXACT


# -- more than one forward, or backward --


@scenario
def test_nested_modules(s: Scene) -> None:
    """One module's forward runs in the middle of another one's."""
    outer, inner = s.probe(), s.probe(strategy=AllGather(), layout=contiguous)
    outer.before = outer.after = partial(s.run, inner, contiguous)
    s.run(outer)


@scenario
def test_nested_modules_that_hand_their_inputs_on(s: Scene) -> None:
    """The style on a module and on a module in it: refused by name, on every rank."""
    outer, inner = s.probe(), s.probe()
    outer.attend = lambda *qkv: inner(*qkv)
    with pytest.raises(ValueError, match="query is a DTensor on mesh axes"):
        outer(*s.leaves()[0])
