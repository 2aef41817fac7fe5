"""Trees of sequences with shared prefixes, as of several rollouts of one prompt: each prefix is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import index

import torch

from cp_styles._lib.device_copies import DeviceTables
from cp_styles.masks.algebra import UNBOUNDED, Mask
from cp_styles.masks.bands import PrefixLM, SlidingWindow, WithBlocks


@dataclass(frozen=True)
class Tree(Mask):
    """The nodes of trees, one after another: a token attends to its own node causally, and to all of its ancestors.

    A node is a range of tokens, such as a prompt, or a turn of one rollout. A *rollout* is the path from a root to a
    leaf. Its tokens see what they see in a sequence of their own, and a prefix that rollouts share is computed once.

    A plan has a band for each level of the tree: a node whose parent ends where it begins is on the level of its
    parent, and any other child one level below. Order nodes depth first, the longest branch of each node first: then
    tiles are rectangles and causal triangles of as many tokens as possible.

    ``Tree(...) & SlidingWindow(n)`` counts the window along each rollout. ``& Causal()`` changes nothing. Masks whose
    tokens see later ones (PrefixLM, pictures) and chunks are refused. Other masks are of positions in the sequence.

    Args:
        lengths: the number of tokens of each node, in the order of the sequence.
        parents: for each node the index of its parent, which comes before it; -1 for a root. Several roots are several
            trees.
        left: a token attends to at most so many tokens of its rollout before its own. None: to all.

    Raises:
        TypeError: lengths or parents are not integers.
        ValueError: there is no node, or not one parent for each; a length is below 1; a parent is not -1 or an earlier
            node; ``left`` is negative.
        NotImplementedError: in ``&``: a mask that counts chunks, or lets tokens see later ones.

    Example::

        tree = Tree((3, 2, 2), (-1, 0, 0))  # a prompt of 3 tokens, and two rollouts of 2 tokens
        assert tree.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 4]
        assert tree.predecessors.tolist() == [-1, 0, 1, 2, 3, 2, 5]
        assert [tree.tokens(rollout).tolist() for rollout in range(2)] == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]
        assert tree.weights(torch.tensor([0.5, 2.0])).tolist() == [2.5, 2.5, 2.5, 0.5, 0.5, 2.0, 2.0]
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    left: int | None = None
    _starts: tuple[int, ...] = field(init=False, compare=False, repr=False)
    _depths: tuple[int, ...] = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("lengths", "parents"):
            object.__setattr__(self, name, _integers(name, getattr(self, name)))
        lengths, parents = self.lengths, self.parents
        if not lengths or len(lengths) != len(parents):
            raise ValueError(
                f"Tree: {len(lengths)} lengths and {len(parents)} parents: give both for each node, and one node at "
                "least; -1 is the parent of a root"
            )
        if min(lengths) < 1:
            node = lengths.index(min(lengths))
            raise ValueError(
                f"Tree: node {node} has {lengths[node]} tokens, and a node has at least 1: leave it out, and give its "
                "children its parent"
            )
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(
                    f"Tree: the parent of node {node} is {parent}, and a parent is an earlier node, or -1 for a root: "
                    "put each node behind its parent, in the sequence and in lengths"
                )
        if self.left is not None and self.left < 0:
            raise ValueError(f"Tree: left must be >= 0 or None, got {self.left}: 0 is a token alone")
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + lengths[parent])
        object.__setattr__(self, "_starts", tuple(accumulate(lengths, initial=0))[:-1])
        object.__setattr__(self, "_depths", tuple(depths))
        object.__setattr__(self, "_hash", hash((lengths, parents, self.left)))

    @cached_property
    def bands(self) -> tuple[Level, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        # For each level of a node's path the keys, and how many positions fewer than in the sequence the query and
        # these keys are away from each other in the rollout.
        paths: list[list[tuple[int, int, int]]] = []
        ends = tuple(accumulate(self.lengths))
        for node, parent in enumerate(self.parents):
            start, stop, offset = self._starts[node], ends[node], self._depths[node] - self._starts[node]
            path = [] if parent < 0 else paths[parent]
            if parent >= 0 and parent == node - 1:
                paths.append([*path[:-1], (path[-1][0], stop, offset)])
            else:
                paths.append([*path, (start, stop, offset)])
        count = max(map(len, paths))
        rows = [[*path, *[(0, 0, 0)] * (count - len(path))] for path in paths]
        tables_3LN = torch.tensor(rows, dtype=torch.int64, device="cpu").permute(2, 1, 0)
        own_N = torch.tensor([path[-1][2] for path in paths], dtype=torch.int64, device="cpu")
        first_LN, stop_LN, shift_LN = tables_3LN[0], tables_3LN[1], own_N - tables_3LN[2]
        levels = zip(first_LN.contiguous(), stop_LN.contiguous(), shift_LN.contiguous(), strict=True)
        ends_N = torch.tensor(ends, dtype=torch.int64, device="cpu")
        return tuple(Level(self, level, DeviceTables(ends_N, *tables)) for level, tables in enumerate(levels))

    def __hash__(self) -> int:
        return self._hash

    @property
    def length(self) -> int:
        return sum(self.lengths)

    local = property(lambda self: self.left is not None)  # pyright: ignore[reportAssignmentType]

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """The position of each token in its rollouts, from 0 at the root: int64 ``[S]`` on the host. Cut it with the
        tokens."""
        depths = torch.tensor(self._depths, device="cpu") - torch.tensor(self._starts, device="cpu")
        return torch.arange(self.length, device="cpu") + depths.repeat_interleave(self._sizes)

    @cached_property
    def predecessors(self) -> torch.Tensor:
        """The index of the token before each token in its rollouts, whose logits predict it: int64 ``[S]`` on the host.
        -1 for the first token of a root."""
        before = torch.arange(-1, self.length - 1, device="cpu")
        last = [-1 if parent < 0 else self._starts[parent] + self.lengths[parent] - 1 for parent in self.parents]
        before[list(self._starts)] = torch.tensor(last, device="cpu")
        return before

    @cached_property
    def rollouts(self) -> tuple[int, ...]:
        """The last node of each rollout: the leaves, in the order of the sequence."""
        return tuple(sorted(set(range(len(self.lengths))) - set(self.parents)))

    def tokens(self, rollout: int) -> torch.Tensor:
        """The indices of the tokens of a rollout, given its number in :attr:`rollouts`: int64 on the host."""
        ranges, node = [], self.rollouts[rollout]
        while node >= 0:
            ranges.append(torch.arange(self._starts[node], self._starts[node] + self.lengths[node], device="cpu"))
            node = self.parents[node]
        return torch.cat(ranges[::-1])

    def weights(self, weights_R: torch.Tensor) -> torch.Tensor:
        """For each token the sum of the weights of the rollouts through it: ``[S]``, as ``weights_R`` in dtype and
        device.

        The sum of losses of tokens with these weights is the sum of the losses of the rollouts, each with its weight.
        Ones count a shared token once for each rollout.

        Raises:
            ValueError: there is not one weight for each rollout.
        """
        if weights_R.shape != (len(self.rollouts),):
            raise ValueError(
                f"Tree.weights: weights of shape {tuple(weights_R.shape)} for {len(self.rollouts)} rollouts: give one "
                "for each leaf, in the order of the sequence"
            )
        of_nodes = [weights_R.new_zeros(()) for _ in self.lengths]
        for node, weight in zip(self.rollouts, weights_R, strict=True):
            of_nodes[node] = weight
        for node in reversed(range(len(self.lengths))):
            if (parent := self.parents[node]) >= 0:
                of_nodes[parent] = of_nodes[parent] + of_nodes[node]
        return torch.stack(of_nodes).repeat_interleave(self._sizes.to(weights_R.device))

    @property
    def _sizes(self) -> torch.Tensor:
        return torch.tensor(self.lengths, device="cpu")

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The interval that contains the keys of all bands.
        first, stop = zip(*(band.bounds(q_positions_L) for band in self.bands), strict=True)
        first = [low.where(low < high, UNBOUNDED) for low, high in zip(first, stop, strict=True)]
        return torch.stack(first).amin(0), q_positions_L + 1

    def joined(self, parts: tuple[Mask, ...]) -> tuple[Mask, ...]:
        left, others = self.left, []
        for part in parts:
            if isinstance(part, SlidingWindow):
                left = part.left if left is None else left if part.left is None else min(left, part.left)
            elif isinstance(part, Tree):
                others += [part] * (part is not self)
            elif part.local or isinstance(part, (PrefixLM, WithBlocks)) or getattr(part, "prefixes", None):
                raise NotImplementedError(
                    f"a Tree and {part!r} were combined: a token of a tree sees no later token, and its distances are "
                    "along its rollout, not in the sequence. Give the rollouts one by one to layers with such a mask"
                )
            else:
                others.append(part)
        return (*others, self if left == self.left else Tree(self.lengths, self.parents, left))


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(index, values))
    except TypeError as error:
        raise TypeError(f"Tree: {name} are integers, one for each node, got {values!r}: {error}") from None


@dataclass(frozen=True)
class Level(Mask):
    """The keys of one level of a :class:`Tree`: the bands of a tree.

    Attributes:
        tree: the tree.
        number: the number of the level.
    """

    tree: Tree
    number: int
    # For each node its end; the first key and the end of the keys of its tokens; how much nearer they are.
    _tables: DeviceTables = field(compare=False, repr=False)

    @property
    def length(self) -> int:
        return self.tree.length

    def bounds(self, q_positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ends, first, stop, shift = self._tables.on(q_positions_L.device)
        node = torch.bucketize(q_positions_L, ends, right=True)
        low, high = first[node], torch.minimum(q_positions_L + 1, stop[node])
        if self.tree.left is not None:
            low = torch.maximum(low, q_positions_L + shift[node] - self.tree.left)
        return low, high

    def breaks(self, length: int) -> torch.Tensor:
        ends, first, _, shift = self._tables.host
        return ends if self.tree.left is None else torch.cat((ends, first - shift + self.tree.left))


def find_tree(*masks: Mask) -> Tree | None:
    """The first tree in masks, also in the masks of rows of the batch; None without one."""
    parts = (part for mask in masks for row in mask.rows for part in row.parts)
    return next((part for part in parts if isinstance(part, Tree)), None)
