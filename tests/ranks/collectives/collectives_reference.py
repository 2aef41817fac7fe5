"""What the tests of the collectives share: whole tensors cut by hand, and the two inner products of an adjoint."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from cp_styles.testing import run_ranks
from tests.oracle import randn

RANKS = st.integers(1, 5)
# Few worlds are started for each property: shapes are drawn so that empty parts, one element and remainders are common.
SIZE = st.integers(0, 7)


@st.composite
def cut(draw: st.DrawFn, ranks: int, most: int = 4) -> tuple[int, ...]:
    """Sizes of the parts of a dim, some of them empty."""
    return tuple(draw(st.lists(st.integers(0, most), min_size=ranks, max_size=ranks)))


def parts(whole: torch.Tensor, sizes: tuple[int, ...], dim: int) -> list[torch.Tensor]:
    return list(whole.split(list(sizes), dim))


def adjoint_gap(
    fn: Callable[..., tuple[torch.Tensor, ...] | torch.Tensor],
    inputs: list[list[torch.Tensor]],
    *,
    replicated_in: bool = False,
    replicated_out: bool = False,
) -> float:
    """|<A* g, dx> - <g, A dx>| over the product of the norms, for the map of all ranks together.

    A replicated side is one tensor, not one a rank: it is counted on rank 0, and its g is the same everywhere.
    """

    def rank_main(rank: int) -> tuple[float, float, float]:
        xs = [x.clone().requires_grad_() for x in inputs[rank]]
        dxs = [randn(100 + index + (0 if replicated_in else 10 * rank), *x.shape) for index, x in enumerate(xs)]
        ys, image = fn(*xs), fn(*dxs)
        ys = ys if isinstance(ys, tuple) else (ys,)
        image = image if isinstance(image, tuple) else (image,)
        gs = [randn(200 + index + (0 if replicated_out else 10 * rank), *y.shape) for index, y in enumerate(ys)]
        grads = torch.autograd.grad(ys, xs, gs)
        left = sum(float((grad * dx).sum()) for grad, dx in zip(grads, dxs, strict=True))
        right = sum(float((g * y).sum()) for g, y in zip(gs, image, strict=True))
        size = sum(float(t.norm()) for t in (*grads, *dxs, *gs, *image))
        return (
            left if not replicated_in or rank == 0 else 0.0,
            right if not replicated_out or rank == 0 else 0.0,
            size,
        )

    results = run_ranks(rank_main, len(inputs))
    left, right, size = (sum(column) for column in zip(*results, strict=True))
    return abs(left - right) / max(size, 1.0)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
