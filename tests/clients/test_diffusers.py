"""Attention of diffusers over a text that is whole on every rank and an image that is cut: Flux, SD3, Wan."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: pip install .[clients]")
pytest.importorskip("diffusers", reason="an extra: pip install .[diffusion]")

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cp_styles import ModuleContextParallel, head_tail, parallelize_module, sum_gradients
from cp_styles.functions.joint_layout import JointLayout
from cp_styles.testing import run_ranks
from tests.clients.hugging_face import StayDouble, gradients, largest_error, tiny
from tests.oracle import randn
from tests.pages import example

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
    model, inputs, _ = flux(TEXT, IMAGE)
    inputs |= {"encoder_hidden_states": randn(2, BATCH, TEXT, 16), "return_dict": False}
    plan = ModuleContextParallel(layout=JointLayout(prefix=TEXT))
    check(model, plan, inputs, {"hidden_states": 1, "img_ids": 0})


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


TIMES = torch.tensor([0.3, 0.7], dtype=torch.float64)


def flux(text: int, image: int) -> tuple[nn.Module, dict[str, Any], list[str]]:
    from diffusers import FluxTransformer2DModel

    sizes = {"in_channels": DIM, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8}
    sizes |= {"num_attention_heads": 4, "joint_attention_dim": 16, "pooled_projection_dim": 12}
    model = tiny(lambda _: FluxTransformer2DModel(**sizes, axes_dims_rope=(2, 2, 4)), Plain())
    inputs = {"hidden_states": randn(1, BATCH, image, DIM), "pooled_projections": randn(3, BATCH, 12)}
    inputs |= {"img_ids": randn(4, image, 3).abs() * 5, "txt_ids": torch.zeros(text, 3, dtype=torch.float64)}
    return model, inputs | {"timestep": TIMES}, ["transformer_blocks.*.attn", "single_transformer_blocks.*.attn"]


def wan(text: int, image: int) -> tuple[nn.Module, dict[str, Any], list[str]]:
    from diffusers import WanTransformer3DModel

    sizes = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2}
    sizes |= {"text_dim": 16, "freq_dim": 16, "ffn_dim": 48, "rope_max_seq_len": 32}
    model = tiny(lambda _: WanTransformer3DModel(**sizes), Plain())
    return model, {"hidden_states": randn(1, BATCH, 4, image // 2, 2, 4), "timestep": TIMES}, ["blocks.*.attn1"]


def qwen(text: int, image: int) -> tuple[nn.Module, dict[str, Any], list[str]]:
    from diffusers import QwenImageTransformer2DModel

    sizes = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8}
    sizes |= {"num_attention_heads": 4, "joint_attention_dim": 16}
    model = tiny(lambda _: QwenImageTransformer2DModel(**sizes, axes_dims_rope=(4, 2, 2)), Plain())
    inputs = {"hidden_states": randn(1, BATCH, image, 16), "img_shapes": [[(1, 2, image // 2)]] * BATCH}
    return model, inputs | {"timestep": TIMES}, ["transformer_blocks.*.attn"]


def ltx(text: int, image: int) -> tuple[nn.Module, dict[str, Any], list[str]]:
    from diffusers import LTXVideoTransformer3DModel

    sizes = {"in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
    sizes |= {"cross_attention_dim": DIM, "caption_channels": 16}
    model = tiny(lambda _: LTXVideoTransformer3DModel(**sizes), Plain())
    inputs = {"hidden_states": randn(1, BATCH, image, 8), "num_frames": 2, "height": 2, "width": image // 4}
    mask = torch.arange(text) < torch.tensor([[text], [text - 2]])
    return model, inputs | {"timestep": TIMES, "encoder_attention_mask": mask}, ["transformer_blocks.*.attn1"]


PLAN = "apply_context_parallel(model, config, model._cp_plan)\n"


def by_the_page(rank: int, model: nn.Module, inputs: Any, attentions: list[str], **changes: str) -> Any:
    code = example("diffusers")
    for old, new in changes.items():
        code = code.replace(old, new)
    names = {"model": copy.deepcopy(model), "inputs": inputs, "attentions": attentions, "rank": rank, "ranks": 2}
    names |= {"torch": torch, "init_device_mesh": init_device_mesh, "device": "cpu", "loss_of": loss_of}
    with StayDouble():
        exec(code, names)
    return names["loss"].detach(), gradients(names["model"])


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out * randn(9, *out.shape)).sum()


@pytest.mark.parametrize("kind", [flux, wan, qwen, ltx])
def test_the_plan_of_the_model(kind: Any):
    """Where the model says that it is cut, by the lines of the page; a text that is cut too, but for Wan and LTX."""
    model, inputs, attentions = kind(6, 24)
    inputs |= {"encoder_hidden_states": randn(2, BATCH, 6, 16)}
    one = copy.deepcopy(model)
    with StayDouble():
        wanted = loss_of(one(**inputs, return_dict=False)[0])
    wanted.backward()
    changes = {PLAN: example("ltx")} if kind is ltx else {}
    for found in run_ranks(lambda rank: by_the_page(rank, model, inputs, attentions, **changes), 2):
        assert largest_error(found, (wanted.detach(), gradients(one))) < EXACT


def test_plans_that_are_refused():
    model, inputs, attentions = qwen(6, 24)
    texts = [{"encoder_hidden_states": randn(2, BATCH, n, 16)} for n in (6, 5)]
    mask = {"encoder_hidden_states_mask": torch.ones(BATCH, 6).bool()}
    anything = {"ulysses_degree=ranks": "ulysses_degree=ranks, ulysses_anything=True"}
    # What enable_parallelism does beside the hooks, which needs a device that is no CPU.
    exchanged = "for x in model.modules(): setattr(getattr(x, 'processor', None) or x, '_parallel_config', both)"
    exchanged = f"from diffusers import ParallelConfig\nboth = ParallelConfig(config)\n{exchanged}\nstyle ="
    for more, changes, words in (
        (texts[0], {"style =": exchanged}, "attention inside TemplatedUlyssesAttention"),
        (texts[0] | mask, {}, r"attn_mask of shape \(2, 1, 1, 15\) is made for the 15 keys of one rank's part"),
        (texts[1] | {"hidden_states": randn(1, BATCH, 25, 16), "img_shapes": [[(1, 5, 5)]] * BATCH}, anything, "hold"),
    ):
        errors = run_ranks(
            lambda rank, more=more, changes=changes: by_the_page(rank, model, inputs | more, attentions, **changes),
            2,
            return_errors=True,
        )
        assert all(re.search(words, str(each)) for each in errors), errors
