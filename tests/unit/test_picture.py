"""The pictures show what the layout, the mask and the plan say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="pictures need pip install -e '.[train]' or '.[notebook]'")

import matplotlib.image
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch.nn.attention.flex_attention import create_block_mask

from cp_styles import Causal, Dense, Documents, FlexMask, SlidingWindow, contiguous, head_tail, per_document_head_tail
from cp_styles.plan import attended_pairs, make_plan
from cp_styles.plan.tiles import Cover

LENGTH, RANKS = 1000, 3
DOCUMENTS = (430, 120, 260, 190)
LAYOUTS = {
    "contiguous": contiguous(LENGTH, RANKS),
    "head_tail": head_tail(LENGTH, RANKS),
    "per_document": per_document_head_tail(LENGTH, RANKS, documents=DOCUMENTS),
}
MASKS = [Causal(), Causal() & SlidingWindow(95, 0), Causal() & Documents(DOCUMENTS)]


@pytest.fixture
def picture(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tutorials")
    import picture

    return picture


def test_bars_are_the_chunks_in_the_colour_of_their_rank(picture):
    axes = Figure().subplots()
    picture.draw_holders(axes, LAYOUTS)
    drawn = [(bar.get_x(), bar.get_x() + bar.get_width(), to_hex(bar.get_facecolor()).upper()) for bar in axes.patches]
    chunks = [
        (start, stop, picture.colour(rank))
        for layout in LAYOUTS.values()
        for rank, own in enumerate(layout.chunks)
        for start, stop in own
    ]
    assert drawn == chunks


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_squares_of_a_plan_hold_its_tiles(picture, name, mask):
    layout, figure = LAYOUTS[name], Figure()
    picture.draw_plan(figure, layout, mask)
    squares = iter(figure.axes)
    for rank in range(RANKS):
        plan = make_plan(layout, layout, mask, rank)
        for step in range(RANKS):
            square, source = next(squares), (rank - step) % RANKS
            tiles = [patch for patch in square.patches if patch.get_edgecolor() == (1, 1, 1, 1)]
            colours = {to_hex(patch.get_facecolor()).upper() for patch in tiles}
            part = plan.parts[source]
            assert [text.get_text() for text in square.texts] == [f"KV of {source}" if part.tiles else "nothing"]
            assert colours <= {picture.colour(source)}
            # What is filled: all of FULL, half of CAUSAL, and of PARTIAL the block that is computed.
            area = sum(_area(patch.get_xy()) for patch in tiles)
            computed = sum(
                (tile.q[1] - tile.q[0]) * (tile.kv[1] - tile.kv[0]) / (2 if tile.cover is Cover.CAUSAL else 1)
                for tile in part.tiles
            )
            assert area == pytest.approx(computed)
            hatched = any(patch.get_hatch() for patch in tiles)
            assert hatched == any(tile.cover is Cover.PARTIAL for tile in part.tiles)


def _area(corners) -> float:
    """Of a polygon, by the shoelace formula."""
    x, y = torch.as_tensor(corners).T
    return float((x * y.roll(-1) - y * x.roll(-1)).sum().abs() / 2)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_bars_of_work_are_the_pairs_of_each_rank(picture, mask):
    axes = Figure().subplots()
    picture.draw_work(axes, LAYOUTS, mask)
    heights = [bar.get_height() for bar in axes.patches]
    work = [attended_pairs(layout, layout, mask, rank) for layout in LAYOUTS.values() for rank in range(RANKS)]
    mean = sum(work[:RANKS]) / RANKS  # the same pairs, whatever the layout
    assert heights == pytest.approx([pairs / mean for pairs in work])


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_of_travel_are_the_rows_of_the_plan(picture, name, mask):
    axes, layout = Figure().subplots(), LAYOUTS[name]
    picture.draw_travel(axes, layout, mask)
    written = {text.get_position(): int(text.get_text()) for text in axes.texts}
    for rank in range(RANKS):
        parts = make_plan(layout, layout, mask, rank).parts
        for source in range(RANKS):
            assert written.get((source, rank)) == (None if source == rank else parts[source].count)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_mask_is_coloured_by_the_owner_of_the_key(picture, mask):
    layout = head_tail(64, RANKS) if not isinstance(mask.length, int) else LAYOUTS["head_tail"]
    axes = Figure().subplots()
    picture.draw_mask(axes, layout, mask)
    (image,) = axes.images
    shown = torch.tensor(image.get_array().data)
    keys = torch.linspace(0, layout.length - 1, len(shown)).long()
    holders = torch.empty(layout.length, dtype=torch.int64)
    for rank in range(RANKS):
        holders[layout.positions(rank)] = rank
    assert torch.equal(shown >= 0, mask.allowed(keys, keys))
    assert torch.equal(shown[shown >= 0], holders[keys].expand_as(shown)[shown >= 0])


def test_a_mask_that_is_no_band(picture):
    """A BlockMask, a Dense mask and both, against the question that they answer."""

    def stripes(b, h, q, kv):
        return (q >= kv) & ((q - kv) % 5 < 2)

    layout, at = LAYOUTS["head_tail"], torch.arange(LAYOUTS["head_tail"].length)
    flex = FlexMask(create_block_mask(stripes, None, None, len(at), len(at), device="cpu", BLOCK_SIZE=16))
    odd = (at[:, None] + at) % 3 != 0
    pairs = stripes(0, 0, at[:, None], at)
    for mask, expected in ((flex, pairs), (Dense(odd), odd), (flex & Dense(odd.expand(2, 1, -1, -1)), pairs & odd)):
        axes = Figure().subplots()
        picture.draw_mask(axes, layout, mask)
        shown = torch.tensor(axes.images[0].get_array().data) >= 0
        sampled = torch.linspace(0, layout.length - 1, len(shown)).long()
        assert torch.equal(shown, expected[sampled][:, sampled])


def test_the_picture_of_the_readme(picture, tmp_path):
    """Drawn again as the README shows it, in the size in which the README has it."""
    picture.save_overview(tmp_path / "drawn.png")
    drawn, kept = (
        matplotlib.image.imread(path)
        for path in (tmp_path / "drawn.png", Path(picture.__file__).with_name("context_parallelism.png"))
    )
    assert drawn.shape == kept.shape
    # Not equal: another version of matplotlib draws letters and edges a little differently.
    assert abs(drawn - kept).mean() < 0.01
