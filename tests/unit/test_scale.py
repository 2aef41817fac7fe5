"""The tutorial's command at scale, on few positions."""

from __future__ import annotations

import pytest

from cp_styles import imbalance
from tutorials import scale


def test_what_a_ring_sends_by_mask():
    """Causal: the keys of all other ranks. A window: a halo."""
    length, ranks, row = 32 * scale.K, 8, scale.SHAPES.kv_row
    sent = {}
    for what, (mask, layout) in scale.cases(length, ranks).items():
        assert 1.0 <= imbalance(layout, mask) < 1.2
        found = scale.made(scale.strategies(ranks)["Ring(keep=0)"], layout, mask)
        sent[what] = found.sent("forward") / row
    assert sent["causal, head-tail"] <= (ranks - 1) * length // ranks
    assert sent["window of 4K, contiguous"] == 4 * scale.K - 1
    assert sent["documents, per document"] < sent["causal, head-tail"]


@pytest.mark.nightly
def test_twice_the_ranks_hold_twice_the_sequence():
    """More, because parameters are cut over more ranks; an all-gather holds the keys of all."""
    pytest.importorskip("transformers", reason="an extra: pip install .[clients]")
    few, many = ({name: scale.longest(name, ranks) for name in scale.strategies(ranks)} for ranks in (8, 16))
    for name in few:
        assert 2 < many[name] / few[name] < 2.3
    assert few["Ring(keep=0)"] == 960 * scale.K
