"""The picture of a run: the loss against one process, and which rank attends to whose keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, on machines without a screen too

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from cp_styles.layout import SequenceLayout
from cp_styles.mask import Causal, Mask

# Dots a side of an attention picture; a sequence is sampled down to this.
_DOTS = 128


def owners(layout: SequenceLayout) -> torch.Tensor:
    """Which rank holds each position: int64 ``[length]``."""
    return layout.unshard([torch.full((size,), rank) for rank, size in enumerate(layout.lengths)], 0)


def attended(layout: SequenceLayout, mask: Mask, rank: int) -> torch.Tensor:
    """For the queries of ``rank`` and every key: the key's owner, or -1 where the mask forbids. ``[L, S]``, sampled."""
    keys = torch.linspace(0, layout.length - 1, min(_DOTS, layout.length)).long()
    queries = layout.positions(rank)
    queries = queries[torch.linspace(0, len(queries) - 1, min(_DOTS // layout.ranks, len(queries))).long()]
    return owners(layout)[keys].expand(len(queries), -1).where(mask.allowed(queries, keys), -1)


def draw_attention(axes: Axes, layout: SequenceLayout, mask: Mask, rank: int) -> None:
    """One rank's queries, in the order it holds them, against all keys, coloured by who holds the key."""
    colours = ListedColormap(["white", *plt.get_cmap("tab10").colors[: layout.ranks]])
    picture = attended(layout, mask, rank)
    axes.imshow(picture, cmap=colours, vmin=-1, vmax=layout.ranks - 1, aspect="auto", interpolation="nearest")
    axes.set_xticks([]), axes.set_yticks([])
    axes.set_ylabel(f"queries of\ncp rank {rank}", fontsize=8)
    share = float((picture >= 0).double().mean())
    axes.set_title(f"attends to {share:.0%} of the square", fontsize=8)


def save_picture(
    path: Path, losses: Sequence[float], reference: Sequence[float], layout: SequenceLayout, title: str
) -> None:
    """Write the PNG: on the left the two loss curves, on the right one attention picture a cp rank."""
    figure = plt.figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, reference, color="0.7", linewidth=5, label="one process")
    axes.plot(steps, losses, color="black", linewidth=1, label=title)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="The same training")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    rows = right.subplots(layout.ranks, 1, squeeze=False)
    for rank in range(layout.ranks):
        draw_attention(rows[rank, 0], layout, Causal(), rank)
    rows[-1, 0].set_xlabel("keys of the whole sequence, coloured by the cp rank that holds them", fontsize=8)
    right.suptitle("Who attends to whom (causal)", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
