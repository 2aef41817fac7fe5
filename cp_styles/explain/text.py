"""An explanation as plain text: ASCII, aligned, less than 100 columns.

``Any`` stands for ``Explanation``, because an import of the class would be a cycle.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from cp_styles.explain.events import KernelCall, Transfer
from cp_styles.verify.report import format_table

_WIDTH = 99
_STEPS = 10


def format_bytes(size: float) -> str:
    """Bytes with a unit: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def format_seconds(value: float) -> str:
    """A time with a unit: 1.50 ms."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def format_ranges(values: Sequence[int]) -> str:
    """Numbers as a short text: 0-3 5."""
    ranges: list[list[int]] = []
    for value in sorted(values):
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges]
    return " ".join(shown[:6]) + (" ..." if len(shown) > 6 else "")


def format_explanation(explanation: Any) -> str:
    """The whole text of an explanation, in sections."""
    return "\n".join(line[:_WIDTH] for part in _format_sections(explanation) for line in (*part, ""))


def _format_sections(explanation: Any) -> Iterator[list[str]]:
    shapes = explanation.shapes
    lengths = f"{explanation.layout.length:,}"
    if explanation.kv_layout.length != explanation.layout.length:
        lengths += f" queries and {explanation.kv_layout.length:,} keys"
    yield [
        f"{explanation.strategy}: {lengths} positions on {explanation.ranks} ranks, {str(explanation.mask)[:50]}",
        f"  batch {shapes.batch}, heads {shapes.heads}:{shapes.kv_heads}, head dims {shapes.head_dim} and "
        f"{shapes.value_dim}, {str(shapes.dtype).removeprefix('torch.')} on {shapes.device.type}",
        *_format_latent(shapes),
    ]
    over_all = explanation.layout_imbalance
    all_ranks = "" if over_all is None else f"; of all ranks, by the layout: {over_all:.3f}"
    yield [
        "ranks",
        *format_table([["rank", "tokens", "share of work", "positions"], *_format_ranks(explanation)]),
        f"  work of the busiest rank / mean, of these ranks: {explanation.imbalance:.3f}{all_ranks}",
    ]
    if explanation.hardware is not None:
        yield _format_times(explanation)
    for phase in ("forward", "backward"):
        yield _format_steps(explanation, explanation.busiest, phase)
    yield _format_peers(explanation)
    yield _format_memory(explanation)
    yield ["kernels", *wrap_entries(_format_kernels(explanation))]


def _format_latent(shapes: Any) -> Iterator[str]:
    if shapes.latent is not None:
        latent, heads = shapes.kv_row, shapes._replace(latent=None).kv_row
        names = " + ".join(map(str, shapes.latent))
        yield f"  latents of {names} numbers travel: {format_bytes(latent)} a row, {format_bytes(heads)} as heads"


def _format_ranks(explanation: Any) -> Iterator[list[str]]:
    total = sum(explanation.work.values()) or 1
    for rank in explanation.runs:
        chunks = explanation.layout.chunks[rank]
        shown = " ".join(f"[{start}, {stop})" for start, stop in chunks[:2])
        shown += f" +{len(chunks) - 2}" if len(chunks) > 2 else ""
        share = explanation.work[rank] / total * (len(explanation.runs) / explanation.ranks)
        yield [str(rank), f"{explanation.layout.lengths[rank]:,}", f"{share:.2%}", shown]


def _format_times(explanation: Any) -> list[str]:
    rows = [["", "total", "kernels", "exposed messages", "other operations"]]
    for name, times in zip(("forward", "backward"), explanation.seconds, strict=True):
        rows.append([name, *map(format_seconds, times)])
    return [f"predicted times of the slowest rank on {explanation.hardware.name}", *format_table(rows)]


def _format_steps(explanation: Any, rank: int, phase: str) -> list[str]:
    steps: list[tuple[list[Transfer], list[KernelCall]]] = [([], [])]  # from one start of messages to the next
    for event in getattr(explanation.runs[rank], phase).events:
        if isinstance(event, Transfer):
            if steps[-1][1]:
                steps.append(([], []))
            steps[-1][0].append(event)
        elif isinstance(event, KernelCall):
            steps[-1][1].append(event)
    rows = [["step", "sends", "to", "receives", "from", "kernel calls", "pairs"]]
    for index, (transfers, calls) in enumerate(steps[:_STEPS]):
        cells = [str(index)]
        for outgoing in (True, False):
            lane = [transfer for transfer in transfers if transfer.outgoing == outgoing]
            cells += [format_bytes(sum(x.nbytes for x in lane)), format_ranges([*{x.peer for x in lane}]) or "-"]
        rows.append([*cells, str(len(calls)), f"{sum(call.pairs for call in calls):,}"])
    more = [f"  ... {len(steps) - _STEPS} more steps"] if len(steps) > _STEPS else []
    return [f"{phase} of rank {rank}, step by step", *format_table(rows), *more]


def _format_peers(explanation: Any) -> list[str]:
    rows = [["rank", "sends forward", "receives", "sends backward", "receives", "rows from others", "peers"]]
    node = explanation.node_ranks
    has_nodes = node < explanation.ranks
    rows[0] += ["far"] * has_nodes
    for rank, run in explanation.runs.items():
        sent = run.forward.sent + run.backward.sent
        far = format_bytes(sum(size for peer, size in sent.items() if peer // node != rank // node))
        sizes = [sum(x.values()) for x in (run.forward.sent, run.forward.received, run.backward.sent)]
        sizes.append(sum(run.backward.received.values()))
        peers = Counter(run.forward.sent) + run.forward.received
        plan_rows = "-" if not explanation.shapes.kv_row else f"{sizes[1] / explanation.shapes.kv_row:,.0f}"
        rows.append(
            [str(rank), *map(format_bytes, sizes), plan_rows, format_ranges(list(peers)) or "-", *([far] * has_nodes)]
        )
    lines = ["bytes to and from other ranks (a row: one position's key and value)", *format_table(rows)]
    advice = f"; Ulysses(inner=Ring(), size={node}) exchanges heads inside of a node"
    advice = "" if "Ulysses" in str(explanation.strategy) else advice
    return [*lines, *([f"  far: to other nodes of {node} ranks{advice}"] if has_nodes else [])]


def _format_memory(explanation: Any) -> list[str]:
    shapes = explanation.shapes
    rank = max(explanation.runs, key=lambda rank: explanation.runs[rank].backward.peak)
    run, queries, keys = explanation.runs[rank], explanation.layout.lengths[rank], explanation.kv_layout.lengths[rank]
    inputs = explanation.kept_inputs(rank)
    parts: dict[str, tuple[int, ...]] = {
        "query, key, value (the caller's)": (queries * shapes.query_row + keys * shapes.kv_row, inputs, inputs),
        "gradient of the output (the caller's)": (0, 0, queries * shapes.row_bytes(shapes.heads, shapes.value_dim)),
    }
    columns = run.forward.parts, run.forward.live_at_end, run.backward.parts
    for name in dict.fromkeys(name for column in columns for name in column):
        parts[name] = tuple(column.get(name, 0) for column in columns)
    rows = [["", "forward", "between", "backward"]]
    rows += [[name, *map(format_bytes, sizes)] for name, sizes in parts.items()]
    rows.append(["together", *(format_bytes(sum(column)) for column in zip(*parts.values(), strict=True))])
    return [f"memory of rank {rank} at its peaks, and between forward and backward", *format_table(rows)]


def _format_kernels(explanation: Any) -> Iterator[tuple[str, str]]:
    flash = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    for name, count in explanation.kernel_calls.items():
        active = f". Flash attention is {flash}" if flash and "flash" in name else ""
        yield name, f"{count} calls on {len(explanation.runs)} ranks{active}"


def wrap_entries(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Lines of names and their texts, wrapped."""
    for name, text in entries:
        yield from textwrap.wrap(f"{name}: {text}", _WIDTH - 2, initial_indent="  ", subsequent_indent="      ")
