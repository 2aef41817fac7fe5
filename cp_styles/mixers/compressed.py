"""Keys that a model compresses from windows of tokens, as DeepSeek-V4 does, over a sharded sequence.

Such a layer has a compressor, which makes one key of each complete window, and may have an indexer, which selects some
of these keys for each query. Both run the model's own code. It keeps its rows in a cache, for which a stand-in is given
to it here: it exchanges rows of windows between ranks, and replaces this rank's keys by the keys of all ranks.

Shapes: B batch, L local tokens, n local windows, T windows of the whole sequence, K selected windows of a query.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from cp_styles._lib.bounded_cache import facts_about, remembered
from cp_styles._lib.device_copies import DeviceTables
from cp_styles.collectives import gather
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import EndedWindows, Mask
from cp_styles.mixers.convolution import exchange_rows
from cp_styles.mixers.fragments import Cut, CutSequence, RowExchange, row_exchange
from cp_styles.mixers.selection import select_by_layer, selected_keys
from cp_styles.mixers.windows import context_windows, window_layout
from cp_styles.plan.selected import Selected

_WINDOWS = "_context_windows"
# The largest number of scores of an indexer that are in memory at a time.
_SCORES = 2**24


class KeysOfWindows(NamedTuple):
    """The keys that a compressor has put behind the keys of this rank's tokens, and how to attend to them.

    Attributes:
        count: their number on this rank.
        layout: their layout.
        mask: which of them each query attends to.
    """

    count: int
    layout: SequenceLayout
    mask: Mask


def take_windows(module: nn.Module) -> KeysOfWindows | None:
    """The keys that the compressor of an attention has made in this forward. None for attentions without one."""
    compressor = getattr(module, "compressor", None)
    return None if compressor is None else vars(compressor).pop(_WINDOWS, None)


def compress(
    sequence: CutSequence, plain: Callable[..., Any], compressor: Any, x_BLC: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """One key for each window of this rank, [B, 1, n, D], by the compressor's own forward ``plain``.

    ``others``: its remaining arguments of this rank's tokens. The masks are noted for :func:`take_windows`.
    Communication: one all-to-all of projected rows, of windows that begin on another rank. An indexer communicates as
    :func:`select_windows` and :func:`~cp_styles.mixers.selected_keys` do.
    """
    size, indexer = compressor.compress_rate, getattr(compressor, "indexer", None)
    with sequence.compared_call(lambda: ([x_BLC], 1, {"size": size})) as cut:
        windows = window_layout(cut.layout, size)
        keys_BnD = _own_keys(cut, sequence, plain, compressor, x_BLC, *others)
    # Rows that end no window are in no graph on one device, so parameters keep None for a gradient.
    keys_BnD = keys_BnD if windows.length else keys_BnD.detach()
    mask: Mask = EndedWindows(size)
    if indexer is not None and windows.length:
        chosen_BLK = indexer(x_BLC, *others, None, 0)
        options = {"layout": cut.layout, "kv_layout": windows, "checks": sequence.checks}
        mask = mask & selected_keys(chosen_BLK, sequence.group, **options)
    vars(compressor)[_WINDOWS] = KeysOfWindows(keys_BnD.shape[1], windows, mask)
    return keys_BnD.unsqueeze(1)


@torch.no_grad()
def select_windows(
    sequence: CutSequence, plain: Callable[..., Any], indexer: Any, x_BLC: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """The numbers of the windows that each query of this rank selects, [B, L, K], by the indexer's own ``plain``.

    The small keys of all windows are on every rank, and topk gets as many scores as on one device. It has no gradient.
    Communication: one all-to-all as in :func:`compress`, and an all-gather of the small keys.
    """
    with sequence.compared_call(lambda: ([x_BLC], 1, {"size": indexer.compress_rate})) as cut:
        own_BnD = _own_keys(cut, sequence, plain, indexer, x_BLC, *others)
    layout = window_layout(cut.layout, indexer.compress_rate)
    options: dict[str, Any] = {"reduce_gradients": False, "layout": layout, "checks": sequence.checks}
    cache = _KeysOfAllRanks(gather(own_BnD, 1, sequence.group, **options))
    parts = _ranges(indexer.num_heads * layout.length, x_BLC, *others)
    return torch.cat([plain(indexer, *part, cache, 0) for part in parts], 1)


@torch.no_grad()
def select_blocks(
    sequence: CutSequence,
    indexer: Any,
    x_BLC: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    rotate: Callable[..., torch.Tensor],
) -> Selected:
    """The keys that the indexer of Qwen4-exp selects: tokens of the best blocks, and of the block that has not ended.

    The key of a block is the mean of its tokens' keys, at the position of the first one. ``rotary``: cosines and sines
    of this rank's tokens; ``rotate`` the model's function that applies them. It has no gradient. Communication: as
    :func:`~cp_styles.mixers.context_windows` and :func:`~cp_styles.mixers.selected_keys`, and an all-gather of a key
    for each block.
    """
    size, dim, most = indexer.compress_ratio, indexer.index_head_dim, indexer.block_topk
    options: dict[str, Any] = {"layout": sequence.layout, "checks": sequence.checks}
    q, k = indexer.index_qk_proj(x_BLC).unflatten(-1, (-1, dim)).tensor_split((indexer.index_n_heads,), 2)
    dtype, (cos, sin) = k.dtype, (x.expand(len(x_BLC), -1, -1) for x in rotary)  # under autocast these are wider
    q = rotate(indexer.q_layernorm(q), cos=cos, sin=sin, unsqueeze_dim=2)
    # Another rank may have the first token of a block: its cosines travel with the keys.
    with sequence.compared_call(lambda: ([x_BLC], 1, {"size": size})) as cut:
        layout, at = cut.layout, cut.layout.positions(cut.peers.rank, x_BLC.device)
    blocks = context_windows(torch.cat((k[:, :, 0], cos, sin), -1), sequence.group, size=size, **options)
    k, cos, sin = blocks.split((dim, cos.shape[-1], sin.shape[-1]), -1)
    k = indexer.k_layernorm(k.float().mean(2).to(dtype))
    k = rotate(k.unsqueeze(2), cos=cos[:, :, 0], sin=sin[:, :, 0], unsqueeze_dim=2)[:, :, 0]
    of_blocks: dict[str, Any] = options | {"layout": window_layout(layout, size)}
    k_BTD = gather(k, 1, sequence.group, reduce_gradients=False, **of_blocks).float()

    ended_L = (at + 1) // size
    chosen_BLK = torch.full((*x_BLC.shape[:2], most), -1, dtype=torch.int32, device=x_BLC.device)
    # Scores are often equal, 0 after the relu, and the number of scores decides which of these topk takes. It gets the
    # scores of the blocks that have ended, as on one device.
    for count in ended_L[ended_L > 0].unique().tolist():
        rows = torch.nonzero(ended_L == count).flatten()
        scores = torch.einsum("blhd,btd->blth", q[:, rows].float(), k_BTD[:, :count]).relu().sum(3) / math.sqrt(dim)
        best = scores.topk(min(most, count), -1).indices
        chosen_BLK[:, rows, : best.shape[-1]] = best.int()
    inside, at = torch.arange(size, dtype=torch.int32, device=x_BLC.device), at.int()
    tokens = (chosen_BLK[..., None] * size + inside).masked_fill(chosen_BLK[..., None] < 0, -1).flatten(-2)
    tail = ended_L.int()[:, None] * size + inside[:-1]
    tail = tail.masked_fill(tail > at[:, None], -1).expand(len(tokens), -1, -1)
    return selected_keys(torch.cat((tokens, tail), -1), sequence.group, **options)


@torch.no_grad()
def select_by_states(
    sequence: CutSequence,
    run: Callable[..., torch.Tensor],
    x_BLC: torch.Tensor,
    *others: torch.Tensor,
    heads: int,
    dim: int = 1,
    block: int = 1,
) -> torch.Tensor:
    """The keys, or blocks of keys, that an indexer selects for this rank's tokens, with its cached states of all ranks.

    :func:`~cp_styles.mixers.selection.mask_of_layer` gives their mask. Communication: an all-gather of a small state
    for each token, and as :func:`~cp_styles.mixers.selected_keys`.

    Args:
        sequence: the sequence of the call.
        run: ``run(cache, positions_l, x_BlC, *others)`` is the indexer's own code for l of this rank's tokens.
        x_BLC: this rank's tokens.
        others: the remaining tensors [B, L, ...] of this rank's tokens.
        heads: the number of heads of the indexer, all of which are scored at once.
        dim: the dim of the tokens, in the states and in what it selects.
        block: the number of keys in a block.
    """
    with sequence.compared_call(lambda: ([x_BLC], 1, {})) as cut:
        layout, positions = cut.layout, cut.layout.positions(cut.peers.rank, x_BLC.device)
    options: dict[str, Any] = {"layout": layout, "checks": sequence.checks}
    own = _taken(partial(run, _StandIn(), positions, x_BLC, *others))
    cache = _StatesOfAllRanks(gather(own, dim, sequence.group, reduce_gradients=False, **options))
    parts = _ranges(heads * layout.length, x_BLC, *others, positions.expand(len(x_BLC), -1))
    chosen = torch.cat([run(cache, at[0], *part) for *part, at in parts], dim)
    facts_about(chosen)[select_by_layer] = selected_keys(chosen.clone(), sequence.group, block=block, **options)
    return chosen


def _ranges(scores: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Ranges of this rank's tokens, each of which has ``scores``, so that few are in memory at a time."""
    step = max(_SCORES // max(len(tensors[0]) * scores, 1), 1)
    return zip(*(x.split(step, 1) for x in tensors), strict=True)


def _own_keys(
    cut: Cut, sequence: CutSequence, plain: Callable[..., Any], module: Any, *of_tokens: torch.Tensor
) -> torch.Tensor:
    cache = _RowsOfWindows(cut, module, sequence.checks.agreement)
    return _taken(partial(plain, module, *of_tokens, cache, 0))


def _taken(run: Callable[[], Any]) -> torch.Tensor:
    """The rows that a module puts into a stand-in for its cache."""
    try:
        run()
    except _Taken as taken:
        return taken.rows
    raise AssertionError("the module puts rows into its cache")


class _Taken(Exception):
    """Ends the code of a module: what follows needs the rows of all ranks."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows


class _StandIn:
    """Stands for the cache of a model, and for the cache of each layer."""

    @property
    def layers(self) -> _StandIn:
        return self

    def __getitem__(self, layer: int) -> _StandIn:
        return self

    def update_overlap_state(self, *args: Any) -> tuple[None, None]:
        """No window is in front of these rows."""
        return None, None

    def update_indexer(self, states_BLC: torch.Tensor, layer: int) -> torch.Tensor:
        raise _Taken(states_BLC)

    def update_index(self, keys_B1LD: torch.Tensor) -> torch.Tensor:
        raise _Taken(keys_B1LD)


class _StatesOfAllRanks(_StandIn):
    """Gives an indexer the states, or the keys, of all tokens."""

    def __init__(self, states: torch.Tensor) -> None:
        self.keys = states

    def get_seq_length(self) -> int:
        return self.keys.shape[1]

    def update_indexer(self, states_BLC: torch.Tensor, layer: int) -> torch.Tensor:
        return self.keys

    def update_index(self, keys_B1LD: torch.Tensor) -> torch.Tensor:
        return self.keys


class AtPositions:
    """An indexer of GLM5-next for queries at these positions, which it takes for the last ones of the sequence."""

    def __init__(self, indexer: Any, positions_L: torch.Tensor) -> None:
        self._indexer, self._positions_L = indexer, positions_L

    def __getattr__(self, name: str) -> Any:
        return getattr(self._indexer, name)

    def get_visible_tokens(self, valid_keys: torch.Tensor, q_length: int, current_length: int) -> torch.Tensor:
        keys = torch.arange(valid_keys.shape[1], device=valid_keys.device)
        return (keys <= self._positions_L[:, None]) & valid_keys[:, None]


class _RowsOfWindows(_StandIn):
    """Gives a compressor the rows of the windows of this rank, which must end its forward by their keys."""

    def __init__(self, cut: Cut, module: Any, check: bool) -> None:
        self._cut, self._size, self._dim, self._check = cut, module.compress_rate, module.head_dim, check

    def store_compression_weights(
        self, name: str, kv_BLC: torch.Tensor, gate_BLC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of windows, their gates, and what the number of a window lacks to the position of its first row."""
        # Projected rows have fewer numbers than the hidden states.
        both, peers = torch.cat((kv_BLC, gate_BLC), -1), self._cut.peers
        # Two series of keys: the first one is of the window behind.
        overlap = kv_BLC.shape[-1] > self._dim
        exchange, tables = _windows_in_a_row(self._cut.layout, self._size, peers.rank, overlap)
        kv, gate = exchange_rows(peers, exchange, both, 1, check=self._check).split(kv_BLC.shape[-1], -1)
        numbers, self._own = tables.on(kv.device)
        if not len(numbers):  # every rank takes part in the backward of the exchange
            raise _Taken(kv[..., : self._dim])
        return kv, gate, (numbers - torch.arange(len(numbers), device=kv.device)) * self._size

    def update_compressor_states(self, name: str, keys_BnD: torch.Tensor) -> torch.Tensor:
        is_all = len(self._own) == keys_BnD.shape[1]
        raise _Taken(keys_BnD if is_all else keys_BnD.index_select(1, self._own))


class _KeysOfAllRanks(_StandIn):
    """Gives an indexer no rows to compress, and the keys of all windows."""

    def __init__(self, keys_BTD: torch.Tensor) -> None:
        self._keys_BTD = keys_BTD

    def store_compression_weights(
        self, name: str, kv_BLC: torch.Tensor, gate_BLC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        return kv_BLC[:, :0], gate_BLC[:, :0], 0

    def update_compressor_states(self, name: str, keys_BnD: torch.Tensor) -> torch.Tensor:
        return self._keys_BTD


@remembered(16)
def _windows_in_a_row(layout: SequenceLayout, size: int, rank: int, overlap: bool) -> tuple[RowExchange, DeviceTables]:
    """The exchange of the rows of the windows of ``rank``; the numbers of windows, and the indices of its own.

    ``overlap``: a window depends on the window before it, which is in front of each chunk.
    """
    numbers_of, needs = [], []
    for chunks in window_layout(layout, size).chunks:
        pieces = [torch.arange(max(start - overlap, 0), stop, device="cpu") for start, stop in chunks]
        numbers_of.append(torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device="cpu"))
        positions = (numbers_of[-1][:, None] * size + torch.arange(size, device="cpu")).flatten()
        needs.append((positions, torch.arange(len(positions), device="cpu")))
    numbers, own = numbers_of[rank], window_layout(layout, size).positions(rank, "cpu")
    tables = DeviceTables(numbers, torch.nonzero(torch.isin(numbers, own)).flatten())
    return row_exchange(layout, needs, len(needs[rank][0]), rank), tables
