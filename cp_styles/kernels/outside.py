"""The check of the first results of kernels from outside of this package."""

from __future__ import annotations

from typing import Any

import torch

from cp_styles.bounded_cache import facts_about


def check_first_result(kernel: Any, phase: str, *tensors: torch.Tensor, **options: Any) -> Any:
    """Call ``kernel.forward`` or ``kernel.backward``. Raises TypeError for a result that is not what the
    :class:`~cp_styles.kernels.Kernel` of a tile returns. A right one is noted, and not checked again."""
    found = getattr(kernel, phase)(*tensors, **options)
    q, k, v = tensors[:3] if phase == "forward" else tensors[1:4]
    wanted = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    if phase == "forward":
        wanted = {"out": (*q.shape[:3], kernel.dims(k, v)[1]), "lse": q.shape[:3]}
    sums = torch.float32, torch.float64
    fits = isinstance(found, tuple | list) and len(found) == len(wanted)
    for (name, shape), x in zip(wanted.items(), found if fits else (), strict=False):
        fits = fits and isinstance(x, torch.Tensor) and (x.shape, x.device) == (shape, q.device)
        fits = fits and x.is_floating_point() and (name != "lse" or x.dtype in sums)
    if not fits:
        each = found if isinstance(found, tuple | list) else (found,)
        texts = [f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else x for x in each]
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in wanted.items())
        raise TypeError(
            f"{type(kernel).__name__}.{phase} returned {texts}, and must return {shapes} on {q.device}, in floating "
            "point, and a logsumexp in float32 or float64: see the docstring of cp_styles.kernels.Kernel"
        )
    facts_about(kernel)[phase] = True
    return found
