"""The tables of the pages against the command that prints them: tests/benchmarks/figures.py."""

from __future__ import annotations

import math
import re
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch

from cp_styles.comm.agreement import WIDTH
from cp_styles.explain import H200
from tests.benchmarks import figures
from tests.covering import at_night, sampled
from tutorials import scale

ROOT = Path(__file__).parents[3]
Row = tuple[str, ...]


@cache
def on_page(name: str) -> tuple[Row, ...]:
    """The rows of the table of the pages, or of the records of GPUs, that has this name, its head first."""
    pattern = rf"<!-- figures: {name} -->\n\n(\|.*?)\n(?!\|)"
    (table,) = (
        found
        for page in (*(ROOT / "tutorials").glob("*.md"), ROOT / "tests/records/README.md")
        for found in re.findall(pattern, page.read_text(), re.DOTALL)
    )
    head, _, *rows = (tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines())
    return head, *rows


def test_each_table_has_a_page():
    for name in figures.TABLES.keys() - {"published"}:
        assert len(on_page(name)) > 3


@sampled(1, name=list(figures.MEMORY_STRATEGIES), shape=list(figures.MEMORY_SHAPES), ranks=list(figures.MEMORY_RANKS))
def test_memory(name: str, shape: tuple[str, int], ranks: int):
    rows = {row[0].strip("`"): row[1:] for row in on_page("memory")[1:]}
    cell = rows[name][figures.MEMORY_SHAPES.index(shape)].split(" / ")[figures.MEMORY_RANKS.index(ranks)]
    assert cell == figures.peak(name, *shape, ranks)


def test_plans():
    """But for the times."""
    rows = {row[:3]: row[3:5] for row in on_page("plans")[1:]}
    for sequence, name, make_layout, mask in figures.planning.cases():
        layout = make_layout()
        told = rows.pop((sequence, name, f"{layout.ranks:,}"), None)
        if told is not None:
            made = figures.planning.exact(layout, mask)
            assert told == (f"{made.tiles:,}", f"{made.imbalance:.3f}")
    assert not rows


@pytest.fixture
def cpu_build(monkeypatch):
    """As the page was made, by a torch without cuDNN, whose kernels allocate other memory."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)


def test_scale(cpu_build):
    """The first rows: causal attention on 8 ranks."""
    for shown, row in zip(on_page("scale"), islice(scale.rows(), 4), strict=False):
        assert shown[:-1] == row[:-1]
        # MiB: torch's versions differ by some bytes, which may be those that round.
        assert shown == row or abs(int(shown[-1].replace(",", "")) - int(row[-1].replace(",", ""))) <= 1


_MEASURED = "gpu-exact", "gpu-bits", "gpu-programs", "gpu-shares", "gpu-changes", "gpu-launches", "gpu-host"


@pytest.mark.parametrize("names", [_MEASURED, ("gpu-summary", "gpu-peaks", "gpu-predicted")])
def test_what_a_gpu_has_recorded(names: tuple[str, ...]):
    for name in names:
        assert [tuple(cell.replace("%", " %") for cell in row) for row in figures.TABLES[name]()] == list(on_page(name))


def test_the_errors_that_a_gpu_has_recorded():
    """The sentence on gpus.md: the largest errors of a strategy, and of torch's kernel, by dtype."""
    page = " ".join((ROOT / "tutorials/gpus.md").read_text().split())
    rows = list(figures.TABLES["gpu-exact"]())
    strategies = [max(cells, key=float) for cells in zip(*(row[2:] for row in rows if " ranks" in row[0]), strict=True)]
    (kernel,) = (row[2:] for row in rows if row[0] == "torch's kernel")
    bfloat16, float16, float32 = strategies
    assert f"was {bfloat16} in bfloat16, {float16} in float16 and {float32} in float32" in page
    assert "had {}, {} and {}.".format(*kernel) in page


def test_the_peaks_that_a_gpu_has_recorded():
    """Of every setting, with cuDNN and without. torch's allocator splits no block for a rest of up to 1 MiB
    (kSmallSize in CUDACachingAllocator.cpp), and at most three of the blocks at a peak had one. A pack is predicted
    with the most that its documents may be padded by."""
    for times in figures.on_gpu.BEFORE, figures.on_gpu.NOW:
        for setting in figures.on_gpu.timed(times):
            for name in figures.on_gpu.STRATEGIES:
                measured, predicted = figures.on_gpu.peaks_of(times, setting, name)
                assert all(-0.3 <= (peak - predicted) / 2**20 < 3.1 for peak in measured), (times.name, setting.name)


def test_no_peak_grows():
    """Over the engine that was recorded: a ring sends k and v as they lie, and gradients without a copy in 16 bits."""
    for (times, case, name), then in figures.on_gpu.predictions().items():
        if times == figures.on_gpu.NOW.name:
            now = figures.on_gpu.predict(figures.on_gpu.NOW, figures.on_gpu.SETTINGS[case], name)
            assert now["peak"] <= then["peak"] + 16, (case, name)  # a bound kernel keeps two numbers for its op
            if case == "time causal P=8 rank=3 rows=4096 32:32":
                assert round(now["peak"] / 2**20) == {"ring": 689, "ulysses": 353}[name]  # a ring had 848


def test_the_figures_of_h200_are_fitted():
    """On the record's tiles; rounded to three digits."""
    fitted = figures.on_gpu.fit()
    for name in figures.on_gpu.FITTED:
        assert getattr(H200, name) == pytest.approx(getattr(fitted, name), rel=5e-3), name
    assert max(abs(math.log(H200.kernel_seconds(call) / seconds)) for call, seconds in figures.on_gpu.tiles()) < 0.05
    machine, _ = figures.on_gpu.record("h200/gpu")
    assert machine["memory MB"] * 2**20 == H200.memory


@pytest.mark.parametrize("name", at_night("scale", "longest"))
def test_all_rows(name: str, cpu_build):
    """The page has some rows of the command's, in its order."""
    left = iter(list(figures.TABLES[name]()))
    assert [row for row in on_page(name) if row not in left] == []


@pytest.mark.parametrize("name", at_night("published"))
def test_how_far_predictions_are_off(name: str, cpu_build):
    """The sentence: of the tables that nothing was fitted on, the least and the largest median error."""
    *tables, (_, pairs, *_) = list(figures.TABLES[name]())[1:]
    medians = [int(median.rstrip("%")) for table, _, median, _ in tables if "fitted" not in table]
    page = " ".join((ROOT / "tutorials/performance.md").read_text().split())
    assert f"median errors are {min(medians)} to {max(medians)} %, and {pairs} pairs are in the right order" in page
    assert len(medians) == 6


def test_the_agreement_is_as_many_integers_as_docstrings_say():
    for path in (ROOT / "cp_styles").rglob("*.py"):
        for number in re.findall(r"all-gather of (\d+)\s+integers", path.read_text()):
            assert int(number) == WIDTH, path
