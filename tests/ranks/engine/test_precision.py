"""Autocast, low-precision parameters, gradient scaling, and forwards without gradients: as on one device.

Low precision cannot be exact, so it is held to the ratio rule: our error against the float64 model is at most 1.1 times
the error of one device under the same setting. Errors are those of all logits together, and of the gradients of all
parameters together; of thousands of numbers each, so that chance in the rounding cancels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles.batch import global_loss, global_token_count, sum_gradients
from cp_styles.functions.attention import context_attention
from cp_styles.kernels import ReferenceKernel
from cp_styles.layouts import contiguous
from cp_styles.masks import Causal
from cp_styles.strategies import AllGather, Ulysses
from cp_styles.styles import AttentionContextParallel, ModuleContextParallel
from cp_styles.testing import run_ranks
from tests.covering import at_night, sampled
from tests.oracle import dense_attention, error, randn
from tests.ranks.attention_case import Core, cp_mesh
from tests.ranks.composition import LAYOUTS, LENGTH, batch_of, new_model, shard, token_losses, whole
from tutorials.llama import parallel_plan

RATIO = 1.1


class Setting:
    """How a training is run, on one device or several: the dtype of the parameters, autocast around the forward."""

    def __init__(self, parameters: torch.dtype, autocast: torch.dtype | None = None) -> None:
        self.parameters, self.autocast = parameters, autocast

    def forward(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast)


FULL = Setting(torch.float64)
SETTINGS = {
    "float32": Setting(torch.float32),
    "autocast bfloat16": Setting(torch.float32, torch.bfloat16),
    "autocast float16": Setting(torch.float32, torch.float16),
    "parameters bfloat16": Setting(torch.bfloat16),
    "parameters bfloat16, autocast bfloat16": Setting(torch.bfloat16, torch.bfloat16),
}
STYLES: dict[str, Callable[[], dict]] = {
    "AttentionContextParallel": lambda: {"layers.*.attention.core": AttentionContextParallel(layout=LAYOUTS[2])},
    "ModuleContextParallel": lambda: {"layers.*": ModuleContextParallel(layout=LAYOUTS[2])},
    "reference kernel": lambda: {
        "layers.*.attention": ModuleContextParallel(layout=LAYOUTS[2], kernel=ReferenceKernel())
    },
    "AllGather": lambda: {"layers.*.attention.core": AttentionContextParallel(layout=LAYOUTS[2], strategy=AllGather())},
    "Ulysses": lambda: {"layers.*.attention": ModuleContextParallel(layout=LAYOUTS[2], strategy=Ulysses())},
}


def flat(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients])


@cache
def alone(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """``(logits, gradients)`` of one device."""
    model, batch = new_model(setting.parameters), batch_of(0)
    with setting.forward():
        logits = model(batch["tokens"], torch.arange(LENGTH))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
    loss.backward()
    return logits.detach(), flat([parameter.grad for parameter in model.parameters()])


def assert_as_good_as_one_device(found: tuple[torch.Tensor, torch.Tensor], setting: Setting) -> None:
    for what, ours, theirs, exact in zip(("logits", "gradients"), found, alone(setting), alone(FULL), strict=True):
        ratio = error(ours, exact) / error(theirs, exact)
        assert ratio < RATIO, f"{what}: {error(ours, exact):.2e}, one device {error(theirs, exact):.2e}"


def step_of(model: nn.Module, cp: DeviceMesh, setting: Setting, *, averaged_over: int = 1) -> torch.Tensor:
    """Forward and backward; the whole logits, put together again."""
    seen: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda module, args, out: seen.append(out))
    with setting.forward():
        losses, labels = token_losses(lambda *args: model(*args).float(), batch_of(0), cp)
    hook.remove()
    global_loss(losses, global_token_count(labels, cp), cp, averaged_over=averaged_over).backward()
    parts = [torch.empty(0)] * cp.size()
    torch.distributed.all_gather_object(parts, seen[0].detach(), group=cp.get_group())
    return LAYOUTS[cp.size()].unshard(parts, 1)


@sampled(1, of=list(SETTINGS), style=list(STYLES))
def test_low_precision_is_as_good_as_one_device(of: str, style: str):
    setting, plan = SETTINGS[of], STYLES[style]

    def on(rank: int):
        cp = cp_mesh(2)
        model = parallelize_module(new_model(setting.parameters), cp, plan())
        logits = step_of(model, cp, setting)
        sum_gradients(model, cp)
        assert {parameter.grad.dtype for parameter in model.parameters()} == {setting.parameters}
        return logits, flat([parameter.grad for parameter in model.parameters()])

    for found in run_ranks(on, 2):
        assert found[0].dtype == alone(setting)[0].dtype
        assert_as_good_as_one_device(found, setting)


def test_under_tensor_parallelism():
    """Autocast meets DTensors twice: those of tp, and those of the sequence."""
    setting = SETTINGS["autocast bfloat16"]

    def on(rank: int):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        attention = AttentionContextParallel(layout=LAYOUTS[2])
        model = parallelize_module(new_model(setting.parameters), mesh, parallel_plan(attention))
        logits = step_of(model, mesh["cp"], setting)
        sum_gradients(model, mesh["cp"])
        return logits, flat([whole(parameter.grad) for parameter in model.parameters()])

    for found in run_ranks(on, 4):
        assert_as_good_as_one_device(found, setting)


def test_fsdp_with_low_precision_parameters_and_float32_reductions():
    """float32 parameters, computed with in bfloat16; shares of gradients are bfloat16, their sum is float32.

    One device under this setting: the same model in bfloat16. It rounds its gradients once, each rank its share.
    """
    setting = SETTINGS["parameters bfloat16"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def on(rank: int):
        cp = cp_mesh(2)
        plan = {"layers.*.attention.core": AttentionContextParallel(layout=LAYOUTS[2])}
        model = shard(parallelize_module(new_model(torch.float32), cp, plan), cp, mp_policy=policy)
        logits = step_of(model, cp, setting, averaged_over=2)
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        return logits, flat([whole(parameter.grad) for parameter in model.parameters()])

    for found in run_ranks(on, 2):
        assert_as_good_as_one_device(found, setting)


def attend_by_function(mesh: DeviceMesh) -> Callable[..., torch.Tensor]:
    return lambda *qkv: context_attention(*qkv, mesh, mask=Causal(), layout=contiguous, kernel=ReferenceKernel())


def attend_by_style(mesh: DeviceMesh, **style) -> Callable[..., torch.Tensor]:
    return parallelize_module(Core(), mesh, AttentionContextParallel(layout=contiguous, **style))


DOORS = {"function": attend_by_function, "style": attend_by_style}


@pytest.mark.parametrize("attend", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("backward_too", [False, True], ids=["forward", "forward and backward"])
def test_dtypes_under_autocast(attend, backward_too: bool):
    """What scaled_dot_product_attention does there: mixed inputs are cast, float64 stays, gradients come in their
    inputs' dtypes; and a backward under autocast is no other."""
    mixed = [randn(index, 1, 2, 8, 16) for index in range(3)]
    dtypes = (torch.float32, torch.float32, torch.bfloat16)

    def on(rank: int):
        attention = attend(cp_mesh(2))
        own = [x[:, :, 4 * rank : 4 * rank + 4] for x in mixed]
        leaves = [x.to(dtype).requires_grad_() for x, dtype in zip(own, dtypes, strict=True)]
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(*leaves)
            assert attention(*own).dtype == torch.float64
            if backward_too:
                out.sum().backward()
        if not backward_too:
            out.sum().backward()
        assert out.dtype == torch.bfloat16
        assert tuple(leaf.grad.dtype for leaf in leaves) == dtypes
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    parts = run_ranks(on, 2)
    leaves = [x.requires_grad_() for x in mixed]
    exact = dense_attention(*leaves, torch.ones(8, 8, dtype=torch.bool).tril())
    exact.sum().backward()
    single = [x.detach().to(dtype).requires_grad_() for x, dtype in zip(mixed, dtypes, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        out = F.scaled_dot_product_attention(*single, is_causal=True)
    out.sum().backward()
    wanted = [exact.detach(), *(leaf.grad for leaf in leaves)]
    theirs = [out.detach(), *(leaf.grad for leaf in single)]
    for index, (one, best) in enumerate(zip(theirs, wanted, strict=True)):
        ours = torch.cat([part[index] for part in parts], 2)
        assert error(ours, best) < RATIO * error(one, best) + 1e-7


# -- gradient scaling --


def scaled_training(model: nn.Module, backward, scaler: torch.amp.GradScaler, *, steps: int = 3) -> list[float]:
    """SGD steps with a scaled loss; the second one overflows. Returns the scale after every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for step in range(steps):
        backward(step)
        if step == 1:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def spoil(model: nn.Module) -> None:
    """One infinity in one parameter's gradient, on the first rank only, where there are several."""
    gradient = next(model.parameters()).grad
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        local.view(-1)[0] = float("inf")


@pytest.mark.parametrize("reducer", ["sum_gradients", "FSDP2", *at_night("sum_gradients and tp")])
def test_gradient_scaler(reducer: str):
    """Scales up to the same step are the same, an overflow on one rank is skipped by all, and what is left is as good
    as one device's."""
    setting = SETTINGS["autocast float16"]

    def alone_with(setting: Setting) -> tuple[list[float], torch.Tensor]:
        model, scaler = new_model(setting.parameters), torch.amp.GradScaler("cpu", init_scale=2.0**8)

        def backward(step: int) -> None:
            batch = batch_of(step)
            with setting.forward():
                logits = model(batch["tokens"], torch.arange(LENGTH))
            scaler.scale(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())).backward()

        return scaled_training(model, backward, scaler), flat([p.detach() for p in model.parameters()])

    def on(rank: int) -> tuple[list[float], torch.Tensor]:
        mesh = init_device_mesh(
            "cpu", (2, 2) if "tp" in reducer else (2,), mesh_dim_names=("cp", "tp")[: 1 + ("tp" in reducer)]
        )
        cp = mesh["cp"]
        attention = AttentionContextParallel(layout=LAYOUTS[2])
        plan = parallel_plan(attention) if "tp" in reducer else {"layers.*.attention.core": attention}
        model = parallelize_module(new_model(setting.parameters), mesh, plan)
        if reducer == "FSDP2":
            shard(model, cp)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

        def backward(step: int) -> None:
            with setting.forward():
                losses, labels = token_losses(lambda *args: model(*args).float(), batch_of(step), cp)
            averaged_over = 2 if reducer == "FSDP2" else 1
            loss = global_loss(losses, global_token_count(labels, cp), cp, averaged_over=averaged_over)
            scaler.scale(loss).backward()
            if reducer == "FSDP2":
                return
            if step == 1:
                spoil(model)  # before the sum, which brings it to everybody
            sum_gradients(model, cp)

        return scaled_training(model, backward, scaler), flat([whole(p) for p in model.parameters()])

    scales, parameters = alone_with(setting)
    assert scales == [256.0, 128.0, 128.0]
    best = alone_with(FULL)[1]
    for found_scales, found in run_ranks(on, 4 if "tp" in reducer else 2):
        assert found_scales == scales
        assert error(found, best) < RATIO * error(parameters, best)
