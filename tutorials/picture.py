"""Pictures of context parallelism: who holds, attends, computes and sends what, and how a training went.

Every ``draw_*`` fills axes of the caller, so they work in notebooks, in scripts and without a screen.
``python tutorials/picture.py`` draws the picture of the README again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Polygon, Rectangle

from cp_styles.layouts import SequenceLayout, contiguous, head_tail
from cp_styles.masks import Causal, Mask
from cp_styles.plan import Plan, attended_pairs, imbalance, make_plan
from cp_styles.plan.tiles import Cover

# Okabe and Ito's colours without their black and yellow, told apart by all common kinds of colour vision.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_IDLE = "0.93"
# Dots a side of an attention picture; a sequence is sampled down to this.
_DOTS = 128


def colour(rank: int) -> str:
    """The colour of a rank. There are six colours, so pictures also show the number of the rank."""
    return PALETTE[rank % len(PALETTE)]


def owners(layout: SequenceLayout) -> torch.Tensor:
    """Which rank holds each position: int64 ``[length]``."""
    return layout.unshard([torch.full((size,), rank) for rank, size in enumerate(layout.lengths)], 0)


def attended(layout: SequenceLayout, mask: Mask, queries: torch.Tensor) -> torch.Tensor:
    """For some queries and every key: the key's owner, or -1 where the mask forbids. ``[L, S]``, keys sampled."""
    keys = _sampled(torch.arange(layout.length), _DOTS)
    seen, bias = mask.allowed(queries, keys), mask.bias(queries, keys)
    if bias is not None:  # of a mask that is no band; it may differ between rows and heads, of which any may see a key
        seen = seen & (bias > float("-inf")).reshape(-1, *bias.shape[-2:]).any(0)
    return owners(layout)[keys].expand(len(queries), -1).where(seen, -1)


def draw_holders(axes: Axes, layouts: Mapping[str, SequenceLayout]) -> None:
    """One bar a layout, cut where it cuts: the colour, and the number inside, are those of the rank that holds it."""
    for row, layout in enumerate(layouts.values()):
        for rank, own in enumerate(layout.chunks):
            for start, stop in own:
                axes.barh(row, stop - start, left=start, color=colour(rank), edgecolor="white", height=0.75)
                if stop - start > layout.length / 40:
                    axes.text((start + stop) / 2, row, str(rank), ha="center", va="center", color=_ink(rank))
    axes.set_yticks(range(len(layouts)), list(layouts))
    axes.set(xlim=(0, max(layout.length for layout in layouts.values())), xlabel="position in the sequence")
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def draw_plan(figure: FigureBase, layout: SequenceLayout, mask: Mask) -> None:
    """What every rank (downwards) computes in every step of a ring (to the right); squares as :func:`draw_part`."""
    ranks = layout.ranks
    panels = figure.subplots(ranks, ranks, squeeze=False)
    for rank in range(ranks):
        plan = make_plan(layout, layout, mask, rank)
        for step in range(ranks):
            draw_part(panels[rank, step], plan, layout, (rank - step) % ranks)
        panels[rank, 0].set_ylabel(f"rank {rank}")
        panels[0, rank].set_title(f"step {rank}", fontsize=9)


def draw_part(axes: Axes, plan: Plan, layout: SequenceLayout, source: int) -> None:
    """What one rank computes with one source's keys: local queries downwards, the source's local keys to the right.

    Tinted: the keys that are needed, and so travel. Filled: one shape a kernel call, a rectangle where all queries see
    all keys, a triangle where it is causal, hatched where it gets an explicit mask.
    """
    part, queries, keys = plan.parts[source], layout.lengths[plan.rank], layout.lengths[source]
    axes.set(xlim=(0, keys), ylim=(queries, 0), xticks=[], yticks=[])
    if not part.tiles:
        axes.set_facecolor(_IDLE)
        axes.text(keys / 2, queries / 2, "nothing", ha="center", va="center", color="0.4", fontsize=8)
        return
    for start, stop in part.rows:
        axes.axvspan(start, stop, color=colour(source), alpha=0.2, linewidth=0)
    arrived = [row for start, stop in part.rows for row in range(start, stop)]
    for tile in part.tiles:
        top, bottom = tile.q
        for offset, left, width in _runs(arrived[slice(*tile.kv)]):
            right = left + width
            if tile.cover is Cover.CAUSAL:
                edges = [(left, top + offset), (right, top + offset + width), (right, bottom), (left, bottom)]
            else:
                edges = [(left, top), (right, top), (right, bottom), (left, bottom)]
            explicit = tile.cover is Cover.PARTIAL
            axes.add_patch(
                Polygon(
                    edges,
                    facecolor=(*to_rgb(colour(source)), 0.55 if explicit else 1.0),
                    edgecolor="white",
                    linewidth=0.8,
                    hatch="////" if explicit else None,
                )
            )
    label = axes.text(0.96, 0.93, f"KV of {source}", transform=axes.transAxes, ha="right", va="top", fontsize=7)
    label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5})


def draw_work(axes: Axes, layouts: Mapping[str, SequenceLayout], mask: Mask) -> None:
    """Every rank's share of the attention, in units of the mean: the slowest rank is what all wait for."""
    width = 0.8 / len(layouts)
    for index, (name, layout) in enumerate(layouts.items()):
        work = torch.tensor([attended_pairs(layout, layout, mask, rank) for rank in range(layout.ranks)]).double()
        places = [rank + (index - (len(layouts) - 1) / 2) * width for rank in range(layout.ranks)]
        label = f"{name}: slowest {imbalance(layout, mask):.2f}"
        axes.bar(places, (work / work.mean()).tolist(), width * 0.92, color=PALETTE[index], label=label)
    axes.axhline(1, color="0.3", linewidth=1, linestyle="--")
    axes.set_xticks(range(layout.ranks), [f"rank {rank}" for rank in range(layout.ranks)])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="upper left", frameon=False)


def draw_mask(axes: Axes, layout: SequenceLayout, mask: Mask) -> None:
    """The whole mask, queries downwards and keys to the right, coloured by the rank that holds the key."""
    _draw_owners(axes, layout, attended(layout, mask, _sampled(torch.arange(layout.length), _DOTS)))
    axes.set(xlabel="keys", ylabel="queries")


def draw_travel(axes: Axes, layout: SequenceLayout, mask: Mask) -> None:
    """How many rows of keys and values each rank gets from each other one; its own stay where they are."""
    plans = [make_plan(layout, layout, mask, rank) for rank in range(layout.ranks)]
    rows = torch.tensor([[part.count * (part.source != plan.rank) for part in plan.parts] for plan in plans])
    axes.imshow(rows.numpy(), cmap="Blues", vmin=0, vmax=max(layout.lengths))
    for rank in range(layout.ranks):
        for source in range(layout.ranks):
            if rank == source:
                axes.add_patch(Rectangle((source - 0.5, rank - 0.5), 1, 1, facecolor=_IDLE))
            else:
                ink = "white" if rows[rank, source] > 0.55 * max(layout.lengths) else "black"
                axes.text(source, rank, int(rows[rank, source]), ha="center", va="center", color=ink, fontsize=9)
    axes.set_xticks(range(layout.ranks))
    axes.set_yticks(range(layout.ranks))
    axes.set(xlabel="from rank", ylabel="to rank")


def draw_attention(axes: Axes, layout: SequenceLayout, mask: Mask, rank: int) -> None:
    """One rank's queries, in the order it holds them, against all keys, coloured by who holds the key."""
    picture = attended(layout, mask, _sampled(layout.positions(rank), _DOTS // layout.ranks))
    _draw_owners(axes, layout, picture)
    axes.set_ylabel(f"queries of\ncp rank {rank}", fontsize=8)
    share = float((picture >= 0).double().mean())
    axes.set_title(f"attends to {share:.0%} of the square", fontsize=8)


def save_picture(
    path: Path,
    losses: Sequence[float],
    reference: Sequence[float] | None,
    layout: SequenceLayout,
    mask: Mask,
    title: str,
) -> None:
    """Write the PNG: on the left the loss curves, on the right one attention picture a cp rank."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    steps = range(1, len(losses) + 1)
    if reference is not None:
        axes.plot(steps, reference, color="0.7", linewidth=5, label="one process")
    axes.plot(steps, losses, color="black", linewidth=1, label=title)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="The same training" if reference else "The training")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    rows = right.subplots(layout.ranks, 1, squeeze=False)
    for rank in range(layout.ranks):
        draw_attention(rows[rank, 0], layout, mask, rank)
    rows[-1, 0].set_xlabel("keys of the whole sequence, coloured by the cp rank that holds them", fontsize=8)
    right.suptitle("Who attends to whom, in the last step", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def save_overview(path: Path, length: int = 1024, ranks: int = 4) -> None:
    """Write the picture of the README: who holds a sequence, what its causal attention needs, and each rank's work."""
    layouts = {"contiguous": contiguous(length, ranks), "head_tail": head_tail(length, ranks)}
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    holders, mask, work = figure.subplots(1, 3, width_ratios=(1.25, 1, 1.25))
    draw_holders(holders, layouts)
    holders.set_title("1. Each rank holds a part\nof the sequence", fontsize=10)
    draw_mask(mask, layouts["contiguous"], Causal())
    mask.set_box_aspect(1)
    borders = [start for own in layouts["contiguous"].chunks for start, _ in own][1:]
    for border in borders:
        mask.axhline(border / length * _DOTS - 0.5, color="black", linewidth=1)
    mask.set_yticks([(rank + 0.5) * _DOTS / ranks for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    mask.set(ylabel="", xlabel="keys, in the colour of their rank")
    mask.set_title("2. Its queries need keys\nof other ranks (contiguous)", fontsize=10)
    draw_work(work, layouts, Causal())
    for bars, grey in zip(work.containers, ("0.75", "0.3"), strict=True):  # colours are ranks in this picture
        for bar in bars:
            bar.set_facecolor(grey)
    work.set_ylim(0, 2.6)  # room for the legend
    work.legend(fontsize=8, loc="upper left", frameon=False)
    work.set_title("3. The layout balances the work\n(1 = the mean of all ranks)", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def save_longest(path: Path, found: Mapping[str, Mapping[int, int]], title: str) -> None:
    """Write the PNG: the longest sequence by the number of ranks that share it, a line a strategy; by markers too."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    sizes = sorted({size for lengths in found.values() for size in lengths})
    alone = max(lengths[sizes[0]] for lengths in found.values() if sizes[0] in lengths)
    proportion = [alone * size // sizes[0] for size in sizes]
    axes.plot(sizes, proportion, color="0.8", linewidth=7, label="in proportion", solid_capstyle="round")
    for index, (name, lengths) in enumerate(found.items()):
        style = {"marker": "os^Dv"[index % 5], "linestyle": ("-", "--", ":", "-.")[index % 4]}
        label = f"{name}: {lengths[max(lengths)]:,}"
        axes.plot(lengths.keys(), lengths.values(), color=colour(index), label=label, markerfacecolor="none", **style)
    axes.set_xscale("log", base=2), axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_yticks(proportion, [f"{length:,}" for length in proportion])
    axes.minorticks_off()
    axes.set(xlabel="ranks that share the sequence (cp)", ylabel="tokens (logarithmic)", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _draw_owners(axes: Axes, layout: SequenceLayout, picture: torch.Tensor) -> None:
    colours = ListedColormap(["white", *map(colour, range(layout.ranks))])
    axes.imshow(picture.numpy(), cmap=colours, vmin=-1, vmax=layout.ranks - 1, aspect="auto", interpolation="nearest")
    axes.set_xticks([]), axes.set_yticks([])


def _sampled(positions: torch.Tensor, most: int) -> torch.Tensor:
    return positions[torch.linspace(0, len(positions) - 1, min(max(most, 1), len(positions))).long()]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(offset, first number, length) of every maximal run of successive numbers."""
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield start, numbers[start], index - start
            start = index


def _ink(rank: int) -> str:
    """Black or white, whichever is read more easily on the colour of the rank."""
    red, green, blue = to_rgb(colour(rank))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


if __name__ == "__main__":
    save_overview(Path(__file__).with_name("context_parallelism.png"))
