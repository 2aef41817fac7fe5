"""Random orders of tests, which all workers of xdist must draw alike."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.repeat import pytest_collection_modifyitems


def ordered(seed: int | None) -> list[tuple[str, int]]:
    items: Any = [SimpleNamespace(path=Path(name), number=number) for name in "abcdefg" for number in range(5)]
    config: Any = SimpleNamespace(getoption={"order": seed}.get)
    random.seed()  # the state of another generator does not matter
    pytest_collection_modifyitems(config, items)
    return [(item.path.name, item.number) for item in items]


def test_an_order_is_of_its_seed_and_keeps_files_together():
    plain = ordered(None)
    assert plain == sorted(plain)
    assert ordered(3) == ordered(3) != ordered(4)
    assert sorted(ordered(3)) == plain
    assert ordered(3) != plain
    names = [name for name, _ in ordered(3)]
    assert sum(one != following for one, following in pairwise(names)) == 6
