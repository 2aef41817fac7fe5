"""The forwards over a group, for the losses and backwards after them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from cp_styles._lib.bounded_cache import LatestEntries


class Forwards:
    """The attention and mixers of a sequence that is split over a group, for the losses and backwards after them."""

    def __init__(self) -> None:
        # The number of modules to which each style was applied over the group.
        self.modules: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # Global numbers of queries and keys, by the local numbers, in the latest call with these.
        self.lengths: LatestEntries[tuple[int, int], tuple[int, int]] = LatestEntries(256)
        self.open = False  # the ranks have agreed on forwards since the last meeting for a backward
        self.thread = 0  # has run the latest forward; 0 before the first one
        self.separated = 0  # the number of the last forward whose mask may separate the documents of a pack
        # Proofs of the models whose attention has run, for a backward, since the last loss or backward.
        self.training: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self.trained: WeakSet[Any] = WeakSet()  # the same, since the last sum of a sharder
        self.loss_groups: set[str] = set()  # names of groups with losses of the sequence: see batch/forwards.py
