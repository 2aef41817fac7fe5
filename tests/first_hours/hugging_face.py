"""A training loop of transformers: the model is given labels, and makes the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_styles import BatchSharder, ModuleContextParallel, parallelize_module

REFUSAL = r"batch\.loss\(model\(\*\*batch\.inputs\)\.logits\)"
TOKENS = torch.arange(26).view(2, 13) % 11


def model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    # GPT-2 computes in the dtype of its parameters. Others convert norms to float32, also in float64.
    config = transformers.GPT2Config(
        vocab_size=11,
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    config._attn_implementation = "sdpa"
    return transformers.GPT2LMHeadModel(config).double()


def alone(model: nn.Module) -> torch.Tensor:
    logits = model(input_ids=TOKENS).logits  # with labels=TOKENS the loss would be in float32
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    loss.backward()
    return loss


def before(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, ModuleContextParallel())
    batch = BatchSharder(mesh)({"input_ids": TOKENS, "labels": TOKENS})
    model(**batch).loss.backward()


def after(model: nn.Module, mesh: DeviceMesh) -> torch.Tensor:
    from cp_styles.integrations.transformers import register_attention

    model.set_attn_implementation(register_attention())
    parallelize_module(model, mesh, ModuleContextParallel())
    sharder = BatchSharder(mesh)
    batch = sharder({"input_ids": TOKENS, "labels": TOKENS})
    loss = batch.loss(model(**batch.inputs).logits)
    loss.backward()
    sharder.sum_gradients(model)
    return loss
