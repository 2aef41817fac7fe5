"""The check of the results of kernels from outside of this package."""

from __future__ import annotations

from typing import Any

import torch

from cp_styles.kernels.merge import accumulation_dtype


def check_result(kernel: Any, phase: str, *tensors: torch.Tensor, **options: Any) -> Any:
    """Call ``kernel.forward`` or ``kernel.backward``. Raises TypeError for a result that is not what the
    :class:`~cp_styles.kernels.Kernel` of a tile returns, in shape, dtype or device. Values are not looked at."""
    found = getattr(kernel, phase)(*tensors, **options)
    q, k, v = tensors[:3] if phase == "forward" else tensors[1:4]
    wanted = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    if phase == "forward":
        wanted = {"out": (*q.shape[:3], kernel.dims(k, v)[1]), "lse": q.shape[:3]}
    sums = accumulation_dtype(q.dtype)
    wide = [x for x in (q.dtype, torch.float32, torch.float64) if x.itemsize >= q.dtype.itemsize]
    fits = isinstance(found, tuple | list) and len(found) == len(wanted)
    for (name, shape), x in zip(wanted.items(), found if fits else (), strict=False):
        fits = fits and isinstance(x, torch.Tensor) and (x.shape, x.device) == (shape, q.device)
        fits = fits and x.dtype in ([sums] if name == "lse" else wide)
    if not fits:
        each = found if isinstance(found, tuple | list) else (found,)
        texts = [f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, torch.Tensor) else x for x in each]
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in wanted.items())
        lse = f", and the logsumexp in {sums}" if phase == "forward" else ""
        raise TypeError(
            f"{type(kernel).__name__}.{phase} returned {texts}, and must return {shapes} on {q.device}, in {q.dtype} "
            f"as the tile or wider{lse}: see the docstring of cp_styles.kernels.Kernel"
        )
    return found
