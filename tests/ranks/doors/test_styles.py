"""torch's tensor and sequence styles on their own axis of a composed mesh.

float64: differences to one device come from the order in which tp and cp sum, some 1e-16 a term; 1e-13 is far above
that and far below what a gradient counted twice, or a bias added twice, would do.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import AttentionContextParallel, ModuleContextParallel, head_tail, styles
from cp_styles.testing import run_ranks
from tests.ranks.attention_case import Core, Problem, on_every_rank

VOCABULARY, WIDTH, LENGTH = 12, 8, 8
NAMES = [  # the styles that torch has too
    name for name in styles.__all__ if name in parallel.__all__ and inspect.isclass(getattr(styles, name))
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Position by position: what cp cuts needs no communication, and everything else is tp's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.out = nn.Linear(WIDTH, VOCABULARY)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, tokens):
        return self.out(self.block(self.embed(tokens)))


def plan_of(namespace, **axis):
    """The plan, with the styles of ``namespace``; every one of the six is in it."""
    s = {name: getattr(namespace, name) for name in NAMES}
    return {
        "embed": s["RowwiseParallel"](input_layouts=Replicate(), output_layouts=Shard(1), **axis),
        "block": s["PrepareModuleInputOutput"](
            input_layouts=Shard(1),
            desired_input_layouts=Shard(1),
            output_layouts=Shard(1),
            desired_output_layouts=Shard(1),
            use_local_output=False,
            **axis,
        ),
        "block.norm": s["SequenceParallel"](**axis),
        "block.up": s["ColwiseParallel"](input_layouts=Shard(1), **axis),
        "block.down": s["RowwiseParallel"](output_layouts=Shard(1), use_local_output=False, **axis),
        "out": s["ColwiseParallel"](input_layouts=Shard(1), use_local_output=False, **axis),
        "": s["PrepareModuleInput"](input_layouts=Replicate(), desired_input_layouts=Replicate(), **axis),
    } | {"o*": s["PrepareModuleOutput"](output_layouts=Shard(-1), desired_output_layouts=Replicate(), **axis)}


def whole_batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    return tokens, torch.randn(2, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)


def run(mesh, plan, tokens, cotangent):
    model = parallelize_module(Model(), mesh, plan)
    out = model(tokens)
    out.backward(cotangent)
    return model, out.detach()


def gradients(model):
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in model.named_parameters()
    }


def test_a_1d_mesh_of_any_name_is_torchs():
    """Bit by bit: the same classes run the same code."""
    tokens, cotangent = whole_batch()

    def both(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("anything",))
        runs = [run(mesh, plan_of(namespace), tokens, cotangent) for namespace in (styles, parallel)]
        return [{"out": out, **gradients(model)} for model, out in runs]

    for ours, torchs in run_ranks(both, 2):
        assert ours.keys() == torchs.keys()
        assert all(torch.equal(ours[name], torchs[name]) for name in torchs)


def test_the_axis_may_have_another_name():
    tokens, cotangent = whole_batch()

    def placements(rank):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "model"))
        model, _ = run(mesh, plan_of(styles, mesh_axis="model"), tokens, cotangent)
        return {p.device_mesh.mesh_dim_names for p in model.parameters()}

    assert run_ranks(placements, 2) == [{("model",)}] * 2


def test_src_data_rank_reaches_torch():
    """None keeps every rank's own data, where the default broadcasts that of the axis's first rank."""

    def first_weight(rank, source):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("cp", "tp"))
        linear = nn.Linear(2, 2, bias=False)
        nn.init.constant_(linear.weight, rank)
        styles.parallelize_module(linear, mesh, styles.ColwiseParallel(), src_data_rank=source)
        return linear.weight.to_local().unique().tolist()

    assert run_ranks(first_weight, 2, None) == [[0], [1]]
    assert run_ranks(first_weight, 2, 0) == [[0], [0]]


@on_every_rank(1)
def test_errors_name_the_style_the_axes_and_the_remedy():
    linear = nn.Linear(2, 2)
    for make, text in (
        (lambda: init_device_mesh("cpu", (1, 1), mesh_dim_names=("cp", "dp")), r"has axes \('cp', 'dp'\)"),
        (lambda: init_device_mesh("cpu", (1, 1)), "has 2 axes without names"),
    ):
        with pytest.raises(ValueError, match=rf'^ColwiseParallel on Linear .* axis "tp".*{text}.*mesh_axis='):
            parallelize_module(linear, make(), {"": styles.ColwiseParallel()})
    for name in NAMES:
        with pytest.raises(TypeError, match=rf"^{name} on Linear needs a DeviceMesh, got str: call init_device"):
            parallelize_module(linear, "cpu", style_of(name))
    assert not linear._forward_pre_hooks
    assert isinstance(linear.weight, nn.Parameter)


def style_of(name, **arguments):
    """The style with any value for the arguments that torch's requires."""
    required = {
        parameter: Replicate()
        for parameter, of in inspect.signature(getattr(parallel, name)).parameters.items()
        if of.default is inspect.Parameter.empty
    }
    return getattr(styles, name)(**required, **arguments)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_torchs(name):
    assert isinstance(style_of(name), getattr(parallel, name))
    assert "mesh_axis='x')" in repr(style_of(name, mesh_axis="x"))
    assert "mesh_axis='tp')" in repr(style_of(name))
    with pytest.raises(TypeError, match=f"{name}.*unexpected keyword argument 'layouts'"):
        style_of(name, layouts=Replicate())


@pytest.mark.parametrize("style", [AttentionContextParallel, ModuleContextParallel])
@on_every_rank(2)
def test_a_forward_that_is_set_after_the_style(mesh, rank: int, style):
    """The style is in the class of the module, whose forward an attribute hides: the attention would be local."""
    core = parallelize_module(Core(), mesh, style(layout=head_tail))
    core.forward = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    leaves, _ = Problem(length=12, kv_heads=2).shard(head_tail, rank, 2)
    with pytest.raises(NotImplementedError, match=r"was not called by Python code|nothing was context parallel"):
        core(*leaves)
