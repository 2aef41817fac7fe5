"""Attention of diffusers over a text that is whole on every rank and an image that is cut: Flux, SD3, Wan."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")
pytest.importorskip("diffusers", reason="an extra: pip install .[diffusion]")

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import ModuleContextParallel, head_tail, parallelize_module, sum_gradients
from cp_styles.joint_layout import JointLayout
from cp_styles.testing import run_ranks
from tests.clients.hugging_face import StayDouble, gradients, largest_error, tiny
from tests.oracle import randn

pytestmark = pytest.mark.nightly  # importing models of diffusers takes ten seconds
EXACT = 1e-10  # float64 sums in another order give 1e-15 a layer; a text that counts twice 1e-1
BATCH, TEXT, IMAGE, DIM = 2, 5, 21, 32


def step(model: nn.Module, inputs: Mapping[str, Any], cotangent: torch.Tensor, image: int) -> torch.Tensor:
    """The loss of the image, after its backward; ``image``: which of the model's results it is."""
    with StayDouble():
        out = model(**inputs)
    loss = ((out if isinstance(out, torch.Tensor) else out[image]) * cotangent).sum()
    loss.backward()
    return loss.detach()


def check(model: nn.Module, plan: Any, inputs: dict[str, Any], cut: dict[str, int], image: int = 0) -> None:
    """Loss and gradients on 3 ranks equal those of one process. ``cut``: the dim of each input that is cut."""
    cotangent = randn(99, BATCH, IMAGE, DIM)

    def on(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mesh, mine, layout = (
            init_device_mesh("cpu", (3,), mesh_dim_names=("cp",)),
            copy.deepcopy(model),
            head_tail(IMAGE, 3),
        )
        parallelize_module(mine, mesh, plan)
        parts = {name: layout.shard(inputs[name], dim, rank) for name, dim in cut.items()}
        loss = step(mine, inputs | parts, layout.shard(cotangent, 1, rank), image)
        sum_gradients(mine, mesh)
        return loss, gradients(mine)

    found = run_ranks(on, 3)
    one = copy.deepcopy(model)
    wanted = step(one, inputs, cotangent, image), gradients(one)
    assert largest_error((torch.stack([loss for loss, _ in found]).sum(), found[0][1]), wanted) < EXACT


class Plain:
    """What :func:`tiny` asks of a configuration."""


def test_flux():
    """The whole model: blocks with two streams and with one."""
    from diffusers import FluxTransformer2DModel

    sizes = {"in_channels": DIM, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8}
    sizes |= {"num_attention_heads": 4, "joint_attention_dim": 16, "pooled_projection_dim": 12}
    model = tiny(lambda _: FluxTransformer2DModel(**sizes, axes_dims_rope=(2, 2, 4)), Plain())
    inputs = {"hidden_states": randn(1, BATCH, IMAGE, DIM), "encoder_hidden_states": randn(2, BATCH, TEXT, 16)}
    inputs |= {"pooled_projections": randn(3, BATCH, 12), "timestep": torch.tensor([0.3, 0.7], dtype=torch.float64)}
    inputs |= {"img_ids": randn(4, IMAGE, 3).abs() * 5, "txt_ids": torch.zeros(TEXT, 3, dtype=torch.float64)}
    plan = ModuleContextParallel(layout=JointLayout(prefix=TEXT))
    check(model, plan, inputs | {"return_dict": False}, {"hidden_states": 1, "img_ids": 0})


@pytest.mark.parametrize("dual", [False, True])
def test_stable_diffusion_3(dual: bool):
    """A block, whose text comes last; with a second attention of the image alone, which is cut as usual."""
    from diffusers.models.attention import JointTransformerBlock

    model = tiny(lambda _: JointTransformerBlock(DIM, 4, 8, qk_norm="rms_norm", use_dual_attention=dual), Plain())
    inputs = {"hidden_states": randn(1, BATCH, IMAGE, DIM), "encoder_hidden_states": randn(2, BATCH, TEXT, DIM)}
    inputs |= {"temb": randn(3, BATCH, DIM)}
    plan = {"attn": ModuleContextParallel(layout=JointLayout(suffix=TEXT))}
    check(model, plan | ({"attn2": ModuleContextParallel()} if dual else {}), inputs, {"hidden_states": 1}, image=1)


def test_wan():
    """A block: attention of the image, and of the image to the text. Keys that every rank has count alike."""
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    model = tiny(lambda _: WanTransformerBlock(DIM, 48, 4, cross_attn_norm=True), Plain())
    inputs = {"hidden_states": randn(1, BATCH, IMAGE, DIM), "encoder_hidden_states": randn(2, BATCH, TEXT, DIM)}
    inputs |= {"temb": randn(3, BATCH, 6, DIM), "rotary_emb": None}
    check(model, ModuleContextParallel(), inputs, {"hidden_states": 1})
