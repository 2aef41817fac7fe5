"""Random numbers by global position: equal on any number of ranks.

A number is a function of the seed, the position of its token in the whole sequence, and its place in the token (row of
the batch, feature). So a rank draws the numbers of its own tokens alone, and they are the numbers that one device would
draw for these tokens. The function is the counter-based generator SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). It
needs no state, so checkpoints and a job that goes on draw equal numbers again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import nn

from cp_styles._lib.compat import uncompiled
from cp_styles._lib.introspect import matches
from cp_styles._lib.troubleshooting import see
from cp_styles.collectives.peers import check_dim
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.groups import MeshOrGroup
from cp_styles.layouts import Balancer, SequenceLayout
from cp_styles.mixers.fragments import CallFacts, CutSequence

# Numbers that are made at a time. Each takes some temporary integers of 8 bytes.
_NUMBERS = 2**22
# The constants of SplitMix64 as signed integers.
_GOLDEN, _FIRST, _SECOND = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@uncompiled
def context_rand(
    x: torch.Tensor,
    seq_dim: int,
    mesh: MeshOrGroup,
    *,
    seed: int | None = None,
    layout: SequenceLayout | Balancer | None = None,
    generator: torch.Generator | None = None,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """Uniform numbers from [0, 1) for this rank's tokens: ``torch.rand_like(x)`` by global position.

    Args:
        x: a tensor of this rank's tokens, floating point; CPU or CUDA. Its values are not used.
        seq_dim: the dim of the sequence in ``x``.
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        seed: an integer, equal on all ranks. Calls with one seed draw equal numbers: see :func:`derive_seed`. Default:
            drawn from torch's generator of the CPU at each call. Give all ranks one ``torch.manual_seed``, and let them
            draw equally often. A checkpoint restores this generator, and so draws equal numbers again.
        layout: the layout, or the balancer that makes it. Default: the layout of the :class:`~cp_styles.SequenceScope`
            around the call, else of the style or block; without one ``head_tail``.
        generator: a generator of the CPU from which the seed is drawn in place of torch's own. A recomputation does
            not restore it.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`.

    Returns:
        A tensor like ``x``, whose values do not depend on the layout and on the number of ranks.

    Communication: one all-gather of some integers.

    Raises:
        ValueError, TypeError: on every rank, if any rank's input is invalid or the ranks, or their seeds, differ.

    Example::

        u_BLC = context_rand(x_BLC, 1, mesh, seed=derive_seed((0, step, layer)), layout=layout)
    """
    return _draw("context_rand", x, seq_dim, mesh, seed, layout, generator, checks)


@uncompiled
def context_randn(
    x: torch.Tensor,
    seq_dim: int,
    mesh: MeshOrGroup,
    *,
    seed: int | None = None,
    layout: SequenceLayout | Balancer | None = None,
    generator: torch.Generator | None = None,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """Normal numbers for this rank's tokens: ``torch.randn_like(x)`` by global position, by Box and Muller's method.

    Arguments, result, communication and errors are as in :func:`context_rand`. CPU and CUDA differ by rounding.

    Example::

        noisy_BLC = x_BLC + 0.1 * context_randn(x_BLC, 1, mesh, seed=step, layout=layout)
    """
    return _draw("context_randn", x, seq_dim, mesh, seed, layout, generator, checks, normal=True)


@uncompiled
def context_dropout(
    x: torch.Tensor,
    p: float,
    seq_dim: int,
    mesh: MeshOrGroup,
    *,
    seed: int | None = None,
    training: bool = True,
    layout: SequenceLayout | Balancer | None = None,
    generator: torch.Generator | None = None,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """Dropout that drops the same features of the same tokens on any number of ranks.

    Args:
        x: this rank's tokens, floating point; CPU or CUDA.
        p: the probability of a zero; other features are divided by 1 - p.
        training: False returns ``x``, without communication.
        seq_dim, mesh, seed, layout, generator, checks: as in :func:`context_rand`.

    Communication, errors: as :func:`context_rand`. The backward sends nothing.

    Example::

        y_BLC = context_dropout(x_BLC, 0.1, 1, mesh, seed=derive_seed((0, step, layer)), layout=layout)
    """
    if not training:
        return x
    # In float32 also for x in 16 bits, whose steps are as large as some p.
    numbers = _draw("context_dropout", x, seq_dim, mesh, seed, layout, generator, checks, p=p, dtype=torch.float32)
    return torch.where(numbers >= p, x / (1 - p) if p < 1 else x * 0.0, 0.0)


class DropoutByPosition(nn.Module):
    """``nn.Dropout`` by :func:`context_dropout`, which :func:`replace_dropout` puts into a model.

    ``drop(x, p, training=)`` is the function. It is no method, because a copy of the model keeps it.
    """

    def __init__(self, p: float, drop: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.p, self._drop = p, drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._drop(x, self.p, training=self.training and self.p > 0)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def replace_dropout(
    model: nn.Module,
    mesh: MeshOrGroup,
    *,
    seq_dim: int = 1,
    names: Sequence[str] = (),
    layout: SequenceLayout | Balancer | None = None,
    generator: torch.Generator | None = None,
    checks: Checks = CHECKS,
) -> list[str]:
    """Let each ``nn.Dropout`` of a model draw by global position, so that it trains equally on any number of ranks.

    ::

        torch.manual_seed(0)  # the same on all ranks
        replace_dropout(model, mesh)
        parallelize_module(model, mesh, ModuleContextParallel())

    On one device take a mesh of one rank. Calls of ``F.dropout`` stay as they are. Dropout inside of an attention is
    refused. In front of the blocks of a :class:`~cp_styles.BackboneContextParallel` and behind them tokens are whole:
    name the dropouts of its blocks alone.

    Args:
        model: the model. Its modules are replaced in place; parameters and ``state_dict`` do not change.
        mesh, layout, generator, checks: as in :func:`context_rand`.
        seq_dim: the dim of the sequence in the inputs of the dropouts.
        names: names of modules, with patterns as in a plan: "layers.*.dropout". Default: all.

    Returns:
        The names of the replaced modules.

    Communication: none here. Each dropout of a training forward has one all-gather of some integers.

    Raises:
        ValueError: no ``nn.Dropout`` has such a name.
    """

    def drop(x: torch.Tensor, p: float, *, training: bool) -> torch.Tensor:
        options = {"training": training, "layout": layout, "generator": generator, "checks": checks}
        return context_dropout(x, p, seq_dim, mesh, **options)

    replaced = []
    for path, parent in [*model.named_modules(remove_duplicate=False)]:
        for name, child in [*parent.named_children()]:
            full = f"{path}.{name}" if path else name
            if type(child) is nn.Dropout and (not names or any(matches(full, pattern) for pattern in names)):
                setattr(parent, name, DropoutByPosition(child.p, drop))
                replaced.append(full)
    if not replaced:
        which = f" with a name in {list(names)}" if names else ""
        raise ValueError(
            f"replace_dropout: {type(model).__name__} has no nn.Dropout{which}: print the names with "
            "model.named_modules(). Calls of F.dropout stay as they are: call context_dropout of cp_styles.mixers "
            f"there{see('Dropout that is no module')}"
        )
    return replaced


def derive_seed(numbers: Sequence[int]) -> int:
    """A seed for :func:`context_rand` and its relatives from any integers, such as (seed, step, layer).

    Other numbers, or another order, give unrelated draws. No communication.

    Example::

        seed = derive_seed((1234, step, layer))
    """
    state = torch.zeros(1, dtype=torch.int64, device="cpu")
    for number in numbers:
        state = _mix(state * _GOLDEN + (number + 2**63) % 2**64 - 2**63 + _FIRST)
    return int(state)


def _draw(
    name: str,
    x: torch.Tensor,
    seq_dim: int,
    mesh: MeshOrGroup,
    seed: int | None,
    layout: SequenceLayout | Balancer | None,
    generator: torch.Generator | None,
    checks: Checks,
    *,
    p: float = 0.0,
    normal: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    sequence = CutSequence.from_call(name, mesh, layout, (), checks)
    if seed is None:
        seed = int(torch.randint(2**62, (1,), device="cpu", generator=generator))

    def describe() -> CallFacts:
        check_dim(x, seq_dim, "seq_dim")
        if not x.is_floating_point():
            raise TypeError(f"{name}: random numbers need a floating-point tensor, got {x.dtype}")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"{name}: seed={seed!r} must be an integer, equal on all ranks")
        if not 0 <= p <= 1:
            raise ValueError(f"{name}: p={p} must be a probability, from 0 to 1")
        return [x], seq_dim, {"the seed": seed, "p": p, "seq_dim": seq_dim}

    with torch.no_grad(), sequence.compared_call(describe) as cut:
        dim = seq_dim % x.ndim
        positions = cut.layout.positions(cut.peers.rank, x.device)
        numbers = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
        inner, outer = prod(x.shape[dim + 1 :]), prod(x.shape[:dim])
        rows = numbers.view(outer, len(positions), inner)
        step = max(1, _NUMBERS // max(outer * inner, 1))
        for start in range(0, len(positions), step):
            # The place of each number in the tensor of the whole sequence.
            own = positions[start : start + step, None] * inner + torch.arange(inner, device=x.device)
            index = own + torch.arange(outer, device=x.device)[:, None, None] * (cut.layout.length * inner)
            drawn = _uniform(index, derive_seed((seed, 0)))
            if normal:
                radius, angle = (
                    (-2 * torch.log1p(-drawn)).sqrt_(),
                    2 * math.pi * _uniform(index, derive_seed((seed, 1))),
                )
                rows[:, start : start + step] = radius * angle.cos_()
            else:
                rows[:, start : start + step] = _round_down(drawn, numbers.dtype)
        return numbers


def _round_down(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` from [0, 1) to the precision of ``dtype``, never to 1."""
    steps = 2.0 / torch.finfo(dtype).eps
    return torch.floor(x * steps) / steps


def _uniform(index: torch.Tensor, seed: int) -> torch.Tensor:
    """The numbers of SplitMix64 at ``index``, int64, as float64 from [0, 1)."""
    z = _mix(index * _GOLDEN + seed)
    return (z >> 11 & (2**53 - 1)).double() * 2.0**-53


def _mix(z: torch.Tensor) -> torch.Tensor:
    # Products of integers overflow, as the method needs. ``>>`` keeps the sign, and the method shifts zeros in.
    z = (z ^ (z >> 30 & (2**34 - 1))) * _FIRST
    z = (z ^ (z >> 27 & (2**37 - 1))) * _SECOND
    return z ^ (z >> 31 & (2**33 - 1))
