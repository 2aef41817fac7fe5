"""Measures rounding errors of a model in low precision.

Two exact computations differ, because they round different partial results. The norm of the difference depends on the
model, so it is measured: one step runs with a relative error of up to one unit in the last place in all outputs of
modules and in their gradients, and is compared with the step without these errors.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cp_styles._lib.bounded_cache import facts_about
from cp_styles._lib.compat import is_in_torch_func, tree_map
from cp_styles.functions.latent import NotedLatent
from cp_styles.verify.record import Key, Outputs

TOLERANCE = 1e-4
"""The tolerance for float32: hundreds of units, as sums over tokens round, and far below a wrong row or key. Rounding
that needs more is measured."""


def unit_of(tensor: torch.Tensor) -> float:
    """The distance between 1 and the next number in the precision of the computation of ``tensor``."""
    if not tensor.is_floating_point():
        return 0.0
    unit = torch.finfo(tensor.dtype).eps
    low = tensor.device.type == "cuda" and tensor.dtype == torch.float32
    # TensorFloat-32 has a mantissa of 10 bits.
    return 2.0**-10 if low and torch.get_float32_matmul_precision() != "highest" else unit


def unit_of_all(tensors: Iterable[torch.Tensor | None]) -> float:
    """The largest :func:`unit_of` of the tensors."""
    return max((unit_of(x) for x in tensors if x is not None), default=0.0)


def tolerance_for(unit: float) -> float:
    """The largest error that counts as rounding, relative to a norm, where ``unit`` is the largest unit."""
    # Models of transformers in float64 compute norms, routers and indexers in float32.
    return 1e-5 if unit < torch.finfo(torch.float32).eps else max(TOLERANCE, 2 * unit)


class Perturbed(Outputs):
    """Keeps outputs, and changes outputs in low precision and their gradients by up to one unit in the last place."""

    def end(self, key: Key, module: nn.Module, output: Any) -> Any:
        number = itertools.count()

        def perturb(value: Any) -> Any:
            if NotedLatent in facts_about(module):
                return value  # latents travel, and the attention compares this output with its keys
            if not isinstance(value, torch.Tensor) or tolerance_for(unit_of(value)) <= TOLERANCE:
                return value
            if isinstance(value, DTensor) or is_in_torch_func(value):  # the latter in vmap
                return value
            return _Perturb.apply(value, zlib.crc32(repr((key, next(number))).encode()))

        output = tree_map(perturb, output)
        super().end(key, module, output)
        return output


class _Perturb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seed: int) -> torch.Tensor:
        ctx.seed = seed
        return _add_noise(x, seed)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _add_noise(grad, ctx.seed + 1), None


def _add_noise(x: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator(x.device).manual_seed(seed)
    factors = torch.rand(x.shape, generator=generator, device=x.device).mul_(2).sub_(1).mul_(unit_of(x)).add_(1)
    return (x.float() * factors).to(x.dtype)
