"""An explanation as a figure; needs matplotlib.

``explanation`` is an ``Explanation``, which is drawn by these functions and so cannot be imported here.
"""

from __future__ import annotations

from typing import Any


def plot(explanation: Any, path: str | None = None) -> Any:
    """The mask by owner; and by rank: the share of work, bytes sent, memory by what it is for."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 8), layout="constrained")
    heat, work, sent, memory = figure.subplots(2, 2).flat
    rows, columns, lines = explanation.heatmap
    shown = heat.imshow(lines, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    figure.colorbar(shown, ax=heat, label="share of the pairs")
    places = range(0, len(rows), max(1, len(rows) // 8))
    heat.set(title="mask by owner: what queries see of keys", xlabel="keys of rank", ylabel="queries of rank")
    heat.set_yticks(places, [str(rows[place]) for place in places])
    places = range(0, len(columns), max(1, len(columns) // 8))
    heat.set_xticks(places, [str(columns[place][0]) for place in places])
    ranks = [str(rank) for rank in explanation.runs]
    mean = sum(explanation.work.values()) / len(explanation.work) or 1
    work.bar(ranks, [pairs / mean for pairs in explanation.work.values()], color="#2171b5")
    work.axhline(1, color="black", linewidth=0.8)
    work.set(title=f"work / mean work, busiest {explanation.imbalance:.3f}", xlabel="rank")
    phases = [("forward", "#6baed6"), ("backward", "#08519c")]
    below = [0.0] * len(ranks)
    for name, color in phases:
        sizes = [sum(getattr(run, name).sent.values()) / 2**20 for run in explanation.runs.values()]
        sent.bar(ranks, sizes, bottom=below, color=color, label=name)
        below = [x + y for x, y in zip(below, sizes, strict=True)]
    sent.set(title="sent by each rank", xlabel="rank", ylabel="MiB")
    sent.margins(y=0.25)
    sent.legend(ncols=2)
    below = [0.0] * len(ranks)
    for name in dict.fromkeys(part for run in explanation.runs.values() for part in run.backward.parts):
        sizes = [run.backward.parts.get(name, 0) / 2**20 for run in explanation.runs.values()]
        memory.bar(ranks, sizes, bottom=below, label=name)
        below = [x + y for x, y in zip(below, sizes, strict=True)]
    memory.set(title="peak of the backward, beside inputs", xlabel="rank", ylabel="MiB")
    memory.margins(y=0.35)
    memory.legend(fontsize="small", ncols=2)
    ranks_and_mask = f"{explanation.ranks} ranks, {str(explanation.mask)[:60]}"
    figure.suptitle(f"{explanation.strategy}, {explanation.layout.length:,} positions on {ranks_and_mask}")
    if path is not None:
        figure.savefig(path, dpi=100)
    return figure
