"""Decoding: new tokens, the same on all ranks, attend to keys and values that are cut over the ranks.

After the prefill of a prompt each rank has the keys and values of its part, and keeps them in a :class:`KVCache`. Every
rank then computes the same new token. Each rank attends with it to the keys that the rank holds, and
:func:`context_decode` merges these partial results. So no rank ever holds the keys of the whole sequence::

    cache = KVCache(mesh, layout, k, v)              # keys and values of this rank's part of the prompt
    for _ in range(new_tokens):
        cache.append(k_new, v_new)                   # on every rank; one rank keeps each key
        out = context_decode(q_new, cache)           # the same on all ranks

Shapes: B batch, H query heads, G key/value heads, L new tokens, M keys of this rank, S positions of all ranks, D head
dim, E value head dim, P ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cp_styles._lib.checksum import device_checksum, digest
from cp_styles._lib.compat import uncompiled, without_dispatch_modes, without_function_modes
from cp_styles._lib.device_copies import DeviceTables, Later, tensor_on
from cp_styles._lib.troubleshooting import see
from cp_styles.comm.agreement import Meeting, StatusRow, agree_on_facts, plain, tell_peers
from cp_styles.comm.checks import CHECKS, Checks
from cp_styles.comm.group_state import state_of
from cp_styles.comm.groups import MeshOrGroup, Role, axis_and_group
from cp_styles.comm.point_to_point import Operation, collective
from cp_styles.engine.custom_ops import modes_entered
from cp_styles.kernels import FlexKernel, Kernel
from cp_styles.kernels.autocast import cast_for_attention
from cp_styles.kernels.base import TilePositions, tile_function
from cp_styles.kernels.choice_by_tile import kernel_for_tiles
from cp_styles.kernels.flex import ScoreMod
from cp_styles.kernels.merge import EMPTY_LSE, accumulation_dtype, apply_sink, merge_all
from cp_styles.layouts import SequenceLayout
from cp_styles.layouts.layout import refuse_other_cut
from cp_styles.masks import Causal, Mask
from cp_styles.masks.dense import check_plain_mask

__all__ = ["KVCache", "context_decode"]


class _BoundToGroup:
    """Base of caches: a ``copy.deepcopy`` has tensors of its own, and the same process group. No communication."""

    group: dist.ProcessGroup

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.group)] = self.group
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin


class KVCache(_BoundToGroup):
    """Keys and values of one attention. Each rank of a group holds a part of them.

    The keys of the prompt are on the ranks that the layout of the prompt names. Rank p modulo P keeps the keys and
    values of a new position p, so all parts grow at the same rate. Every rank can compute which rank holds which
    position, so this class never communicates. ``copy.deepcopy(cache)`` is an independent cache of the same positions.

    Args:
        mesh: the ranks that share the sequence: a 1-D mesh, (mesh, axis name), or a process group.
        layout: the layout with which the prompt was cut; a layout of 0 positions if there is no prompt.
        k_BGMD: this rank's keys of the prompt, with rotary positions applied if the model has them. They are copied.
        v_BGME: this rank's values of the prompt.

    Attributes:
        prompt: the layout of the prompt.
        length: number of positions of all ranks together.

    Memory: this rank's keys and values, and room for an eighth more. When the room is full, the cache is copied to
    larger memory, and for that time there are two copies.

    Raises:
        ValueError, TypeError: on this rank, and at the next call over the group on the remaining ranks.

    Example: see :func:`context_decode`.
    """

    def __init__(
        self,
        mesh: MeshOrGroup,
        layout: SequenceLayout,
        k_BGMD: torch.Tensor,
        v_BGME: torch.Tensor,
    ) -> None:
        self.axis, self.group = axis_and_group("KVCache", mesh)
        self._rank, self._ranks = self.group.rank(), self.group.size()
        if not isinstance(layout, SequenceLayout):
            self._refuse(TypeError(f"KVCache: layout must be the SequenceLayout of the prompt, got {layout!r}"))
        shapes = [tuple(x.shape) for x in (k_BGMD, v_BGME)]
        if layout.ranks != self._ranks or any(
            len(shape) != 4 or shape[2] != layout.lengths[self._rank] for shape in shapes
        ):
            self._refuse(
                ValueError(
                    f"KVCache: key and value of shapes {shapes}, but the layout gives rank {self._rank} of "
                    f"{self._ranks} {layout.lengths} positions: pass [B, G, M, D] of this rank's part of the prompt"
                )
            )
        try:
            refuse_other_cut("KVCache", (k_BGMD, v_BGME), layout, plain(layout))
        except ValueError as error:
            self._refuse(error)
        self.prompt = layout
        self._prompt_positions = DeviceTables(layout.positions(self._rank, "cpu"))
        self.length = layout.length
        self._kv = [x.detach().clone(memory_format=torch.contiguous_format) for x in (k_BGMD, v_BGME)]
        self._used_rows = k_BGMD.shape[2]  # rows of _kv that are keys and values; the rest is room for more
        self._first_needed = 0  # no later query attends to positions before this one
        self._freed_rows = 0  # this rank's first keys, which _kv does not store any more
        # On a GPU: whether the ranks' last queries differed. The next call reads it, so that the host need not wait.
        self._pending_check: Callable[[], int] | None = None

    @property
    def keys(self) -> torch.Tensor:
        """This rank's keys [B, G, M, D], ascending by position. A view: :func:`cache_of` finds this cache by it."""
        return self._view_used(self._kv[0])

    @property
    def values(self) -> torch.Tensor:
        """This rank's values [B, G, M, E]."""
        return self._view_used(self._kv[1])

    @property
    def nbytes(self) -> int:
        """Memory of keys and values on this rank."""
        return sum(x.untyped_storage().nbytes() for x in self._kv)

    def positions(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The global positions of :attr:`keys`: int64 [M] on ``device``."""
        first = self._first_new_position()
        new = torch.arange(first, max(first, self.length), self._ranks, device=device)
        return torch.cat((*self._prompt_positions.on(new.device), new))[self._freed_rows + self._count_unused() :]

    def append(self, k_BGLD: torch.Tensor, v_BGLE: torch.Tensor) -> None:
        """Add the keys and values of the next L positions. Every rank makes the same call. No communication.

        Args:
            k_BGLD: keys of the new positions, the same on all ranks. This rank keeps the keys of its own positions.
            v_BGLE: their values.

        Raises:
            ValueError: on this rank, and at the next call over the group on the remaining ranks: batch, heads, head
                dims or dtype differ from the prompt.
        """
        new, stored = ([(*x.shape[:2], x.shape[3], x.dtype) for x in pair] for pair in ((k_BGLD, v_BGLE), self._kv))
        if new != stored or k_BGLD.shape[2] != v_BGLE.shape[2]:
            self._refuse(
                ValueError(
                    f"KVCache: new keys and values of shapes {tuple(k_BGLD.shape)} and {tuple(v_BGLE.shape)} in "
                    f"{k_BGLD.dtype}, where the prompt's are {tuple(self.keys.shape)} and {tuple(self.values.shape)} "
                    f"in {self._kv[0].dtype}: batch, heads, head dims and dtype must be the prompt's"
                )
            )
        # Position p is on rank p modulo P: every P-th of the new ones, from this rank's first.
        local_rows = slice((self._rank - self.length) % self._ranks, None, self._ranks)
        parts = [x.detach()[:, :, local_rows] for x in (k_BGLD, v_BGLE)]
        self.length += k_BGLD.shape[2]
        if rows := parts[0].shape[2]:
            # torch refuses to write to a tensor of inference mode outside of that mode, so copy it first.
            frozen = self._kv[0].is_inference() and not torch.is_inference_mode_enabled()
            if frozen or self._used_rows + rows > self._kv[0].shape[2]:
                self._reallocate(self._count_unused(), rows + (self._used_rows + rows) // 8)
            for stored, part in zip(self._kv, parts, strict=True):
                stored[:, :, self._used_rows : self._used_rows + rows] = part
            self._used_rows += rows

    def crop(self, length: int) -> None:
        """Remove the positions from ``length`` on. Every rank makes the same call. No communication.

        Raises:
            ValueError: on this rank, and at the next call over the group on the remaining ranks: ``length`` is larger
                than :attr:`length`, or smaller than the prompt, whose positions cannot be removed.
        """
        if not self.prompt.length <= length <= self.length:
            self._refuse(
                ValueError(
                    f"KVCache: cannot crop {self.length} positions to {length}: the {self.prompt.length} positions "
                    "of the prompt cannot be removed. Prefill the shorter prompt anew"
                )
            )
        self.length = length
        self._used_rows = max(self._count_before(length) - self._freed_rows, 0)

    def forget(self, position: int) -> None:
        """Free the keys and values of all positions before ``position``, such as positions behind a sliding window.

        A later attention that needs them is an error. No communication.
        """
        self._first_needed = max(self._first_needed, min(position, self.length))
        unused = self._count_unused()
        # Copy only when half of the rows are free: then the copies cost at most as much as the appends.
        if 2 * unused >= self._used_rows > 0:
            self._reallocate(unused)

    def select_rows(self, index_B: torch.Tensor) -> None:
        """Reorder the batch: row b becomes the former row ``index_B[b]``, as in beam search. No communication.

        Every rank makes the same call.
        """
        self._kv = [x.index_select(0, index_B.to(x.device)) for x in self._kv]

    def _reallocate(self, first: int, room: int = 0) -> None:
        """Copy the rows from ``first`` on to new memory with ``room`` for more, and free the rows before ``first``."""
        rows, self._used_rows = slice(first, self._used_rows), self._used_rows - first
        for index, x in enumerate(self._kv):
            self._kv[index] = x.new_empty(*x.shape[:2], self._used_rows + room, x.shape[3])
            self._kv[index][:, :, : self._used_rows] = x[:, :, rows]
        self._freed_rows += first

    def _view_used(self, tensor: torch.Tensor) -> torch.Tensor:
        view = tensor[:, :, self._count_unused() : self._used_rows]
        setattr(view, _CACHE, self)
        return view

    def _first_new_position(self) -> int:
        """The first position after the prompt that this rank keeps."""
        return self.prompt.length + (self._rank - self.prompt.length) % self._ranks

    def _count_before(self, position: Any) -> Any:
        """The number of this rank's positions before ``position``, an int or a tensor of them. Freed ones count."""
        if isinstance(position, int):
            return int(self._count_before(torch.tensor(position, device="cpu")))
        new = position - self._first_new_position() + self._ranks - 1
        return torch.searchsorted(self._prompt_positions.host[0], position) + (new // self._ranks).clamp(min=0)

    def _count_unused(self) -> int:
        """The number of stored rows at the beginning that no later query needs."""
        return max(self._count_before(self._first_needed) - self._freed_rows, 0)

    def _find_rows(self, lo: torch.Tensor, hi: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of :attr:`keys` with positions ``lo`` to ``hi - 1``: the first one, and one past the last."""
        start = self._freed_rows + self._count_unused()
        first, stop = (self._count_before(x.clamp(max=self.length)) - start for x in (lo, hi))
        first = first.clamp(min=0)
        return first, torch.maximum(first, stop)

    def _refuse(self, problem: Exception) -> None:
        tell_peers("KVCache", self.group, problem)
        raise problem


_CACHE = "_cp_styles_cache"


def cache_of(tensor: torch.Tensor) -> KVCache | None:
    """The cache whose ``keys`` or ``values`` this tensor object is. None for tensors that were computed from it."""
    return getattr(tensor, _CACHE, None)


# Names of the cache among the arguments of a forward. transformers 5.24 renamed it to the first; it takes the older
# names until 6, with a warning.
# A remedy of errors about a cache that is not of this package.
GENERATE_ALONE = (
    "generate on each rank alone, in a block `with on_this_rank(model):` of cp_styles.integrations.transformers"
)
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


def find_cache(inputs: Mapping[str, Any]) -> Any:
    """The cache among the inputs of a model, or None."""
    return next((inputs[word] for word in CACHE_ARGUMENTS if inputs.get(word) is not None), None)


def find_layer_caches(inputs: Mapping[str, Any]) -> LayerCaches | None:
    """The cache of this package among the inputs of a model, or None. For a decoder, the cache of its own tokens."""
    cache = find_cache(inputs)
    cache = getattr(cache, "self_attention_cache", cache)  # its second half has the keys of an encoder
    return cache if isinstance(cache, LayerCaches) else None


def cache_argument(names: Collection[str]) -> str:
    """The name of the cache among the names of a function's arguments."""
    return next((word for word in CACHE_ARGUMENTS if word in names), CACHE_ARGUMENTS[0])


class LayerCaches(_BoundToGroup):
    """The :class:`KVCache` of each attention of a model, by layer number. Integrations of other libraries extend it.

    ``copy.deepcopy`` of a cache after a prompt is the cache of that prompt for another continuation.

    Attributes:
        layers: the cache of each layer; None for layers that have attended to nothing yet.
        prompt: the layout of the prompt.
        prefilled: whether the forward of the prompt is over.
        tokens_BS: the tokens of the prompt, the same on all ranks, if they are known.
        last_position: the largest position of the prompt.
    """

    def __init__(self, group: dist.ProcessGroup, prompt: SequenceLayout) -> None:
        self.group = group
        self.prompt = prompt
        self.prefilled = False
        self.tokens_BS: torch.Tensor | None = None
        self.last_position = prompt.length - 1
        self.layers: list[KVCache | None] = []

    def add(self, k_BGLD: torch.Tensor, v_BGLE: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values that a layer has computed, of this rank's part of the prompt or of new tokens.

        Returns the keys and values to attend to: in the prefill the arguments, later all that this rank holds.
        """
        self.layers += [None] * (layer + 1 - len(self.layers))
        cache = self.layers[layer]
        if not self.prefilled:
            self.layers[layer] = KVCache(self.group, self.prompt, k_BGLD, v_BGLE)
            return k_BGLD, v_BGLE
        if cache is None:  # no prefill has created it
            assert not self.prompt.length
            cache = self.layers[layer] = KVCache(self.group, self.prompt, k_BGLD[:, :, :0], v_BGLE[:, :, :0])
        cache.append(k_BGLD, v_BGLE)
        return cache.keys, cache.values

    @property
    def caches(self) -> list[KVCache]:
        return [cache for cache in self.layers if cache is not None]


def context_decode(
    q_BHLD: torch.Tensor,
    cache: KVCache,
    *,
    mask: Mask | None = None,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    sink_H: torch.Tensor | None = None,
    kernel: Kernel | None = None,
    checks: Checks = CHECKS,
) -> torch.Tensor:
    """Attention of queries that are the same on all ranks, over a cache that is cut over the ranks. The result equals
    the result on one device.

    Shapes: B batch, H query heads, L new tokens, S positions of all ranks, D head dim, E value head dim, P ranks. Any
    floating-point dtype, CPU or CUDA.

    Args:
        q_BHLD: the queries of the last L positions of the cache. Append the keys of these positions first.
        cache: keys and values.
        mask: which keys each query attends to. Default: ``Causal()``. ``Full()`` for queries of another sequence, as
            in cross-attention. A mask of bands, which may differ between rows (``PerRow``).
        attn_mask: bool, broadcastable to [B, H, L, S], True where a key is attended to, in addition to ``mask``: the
            padding [B, 1, 1, S] for example.
        scale: factor of the logits; default 1/sqrt(D).
        sink_H: attention sinks: one logit for each query head, the same on all ranks.
        kernel: computes a rank's part; default the fastest of torch's kernels that can.
        checks: what the ranks check of each other: :class:`~cp_styles.Checks`. Without ``agreement`` only the queries
            and the length of the cache are compared, with the results. Parameters are not compared.

    Returns:
        ``out_BHLE``, the same bits on all ranks, because they merge the same parts in the same order.

    Communication: one agreement of the ranks (:class:`~cp_styles.Checks`), then one all-gather of B H L (E + 1)
    numbers of each rank, in float32 (float64 for float64), and a checksum of 8 bytes. A rank sends them P - 1 times.
    There is no backward.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, if the input of one is bad or the ranks differ. Also
            if the queries differ, for example after ranks have sampled different tokens. On a GPU the host does not
            wait for this comparison, and the error comes at the next call with this cache.

    Example::

        layout = head_tail(1000, mesh.size())
        _, k, v = (layout.shard(whole, 2, mesh.get_local_rank()) for whole in qkv)  # each [1, 8, 1000, 64]
        cache = KVCache(mesh, layout, k, v)
        cache.append(k_new, v_new)  # [1, 8, 1, 64], the same on all ranks
        out = context_decode(q_new, cache)
    """
    call = DecodeCall(mask or Causal(), attn_mask, scale, sink_H, kernel=kernel, checks=checks)
    for mode in modes_entered.get():
        mode.note_function(cache.group.group_name)
    return decode("context_decode", q_BHLD, cache, call)


@dataclass(frozen=True)
class DecodeCall:
    """The arguments of :func:`context_decode`, except the query and the cache, and further ones for integrations.

    Attributes:
        score_mod: as flex_attention takes it.
        equal_number: one more number that must be the same on all ranks.
        expanded: the keys and values of this rank, if the cache stores latents from which they are computed, position
            by position.
    """

    mask: Mask
    attn_mask: torch.Tensor | None = None
    scale: float | None = None
    sink_H: torch.Tensor | None = None
    score_mod: ScoreMod | None = None
    kernel: Kernel | None = None
    checks: Checks = CHECKS
    equal_number: int = 0
    expanded: tuple[torch.Tensor, torch.Tensor] | None = None


@uncompiled
def decode(name: str, q_BHLD: torch.Tensor, cache: KVCache, call: DecodeCall) -> torch.Tensor:
    """:func:`context_decode` with the arguments of integrations. ``name`` is for messages."""
    kv = (cache.keys, cache.values) if call.expanded is None else call.expanded
    with without_function_modes():
        _compare_calls(name, q_BHLD, kv, cache, call)
    with torch.no_grad(), without_function_modes():
        # After the comparison errors of these two types are equal on all ranks, so no rank need notify its peers.
        with Operation(cache.group, common=(ValueError, NotImplementedError)):
            if cache._pending_check is not None:
                _refuse_differences(name, cache, cache._pending_check())
            q, k, v = cast_for_attention((q_BHLD, *kv))
            scale = 1.0 / math.sqrt(q.shape[-1]) if call.scale is None else call.scale
            kernel = call.kernel if call.score_mod is None else FlexKernel(call.score_mod)
            tile = kernel_for_tiles((q, k, v), named=kernel)
            with without_dispatch_modes():
                planted, mask = state_of(cache.group).get_or_create(Role).planted, call.mask
                mask = mask if planted is None else planted.mask(mask, cache.length, cache.length)
                columns, bias = _find_visible_keys(name, cache, mask, call.attn_mask, q)
            out, lse = _compute_part(tile, q, k, v, cache, columns, bias, scale)
            alone = cache.group.size() == 1
            parts = None if alone else _gather_parts(name, out, lse, cache, q_BHLD, call.equal_number)
        if parts is not None:
            outs, lses, numbers = parts
            cache._pending_check = Later((numbers != numbers[:1]).any().long())
            if q.device.type == "cpu":
                _refuse_differences(name, cache, cache._pending_check())
            out, lse = merge_all(outs, lses)
        if call.sink_H is not None:
            out = apply_sink(out, lse, call.sink_H)
        return out.to(q.dtype)


def _compare_calls(
    name: str, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], cache: KVCache, call: DecodeCall
) -> None:
    """Raise on every rank unless all ranks make the same call."""

    def describe() -> tuple[dict[str, Any], StatusRow]:
        _check_call(name, q, kv[0], cache, call)
        facts: dict[str, Any] = {
            "how many positions the cache has": cache.length,
            "how many positions the cache has freed": cache._first_needed,
            "scale": call.scale,
        }
        for what, x in {"the query": q, "attn_mask": call.attn_mask, "sink": call.sink_H}.items():
            # The values of the query travel with the parts, where the host need not wait for them.
            facts[what] = None if x is None else (tuple(x.shape), x.dtype, 0 if x is q else digest(x))
        facts["the cache"] = [(*x.shape[:2], x.shape[3], x.dtype) for x in kv]
        facts["the mask"], facts["the contents of the mask"] = call.mask, call.mask.content
        facts["kernel"], facts["score_mod"] = call.kernel, call.score_mod
        return facts, StatusRow()

    ranks = cache.group.size()
    options: dict[str, Any] = {"agrees": call.checks.agreement, "assumed": lambda mine: [mine] * ranks}
    agree_on_facts(describe, Meeting.DECODE, (name, cache.axis, cache.group), **options)


def _check_call(name: str, q: torch.Tensor, keys: torch.Tensor, cache: KVCache, call: DecodeCall) -> None:
    """Raise for arguments of this rank that are not supported."""
    mask, attn_mask = call.mask, call.attn_mask
    tensors = [x for x in (q, attn_mask, call.sink_H) if x is not None]
    if not all(isinstance(x, torch.Tensor) for x in tensors) or any(isinstance(x, DTensor) for x in tensors):
        raise TypeError(
            f"{name}: query, attn_mask and sink of a new token must be plain tensors, the same on all ranks"
        )
    if q.ndim != 4 or q.shape[0] != keys.shape[0] or q.shape[3] != keys.shape[3] or q.shape[1] % keys.shape[1]:
        raise ValueError(
            f"{name}: a query of shape {tuple(q.shape)} does not fit a cache whose keys have the shape "
            f"{tuple(keys.shape)}: it is [B, H, L, D], with H a multiple of the cache's heads"
        )
    if q.dtype != keys.dtype and len({x.dtype for x in cast_for_attention((q, keys))}) > 1:
        raise ValueError(f"{name}: a query in {q.dtype} and a cache in {keys.dtype}: both must have one dtype")
    if q.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name}: decoding has no backward: call it under torch.no_grad()")
    if not isinstance(mask, Mask):
        raise TypeError(f"{name}: mask must be a Mask object such as Causal(), got {mask!r}")
    if not q.shape[2] or (q.shape[2] > cache.length and mask.parts):
        raise ValueError(f"{name}: {q.shape[2]} queries, but the cache has {cache.length} positions: append them first")
    if mask.has_bias or any(len(row.bands) > 1 for row in mask.rows):
        raise NotImplementedError(
            f"{name}: {mask!r} is not one interval of keys for each query, as decoding needs: pass a boolean attn_mask"
        )
    mask.check_unchanged()
    shape = q.shape[0], q.shape[1], q.shape[2], cache.length
    try:
        mask.check(shape)
        if attn_mask is not None:
            check_plain_mask(attn_mask)
            if attn_mask.dtype != torch.bool or attn_mask.ndim != 4 or attn_mask.shape[3] != cache.length:
                raise ValueError("it must be boolean, with one column for each position")
            torch.broadcast_shapes(attn_mask.shape, shape)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name}: mask {mask!r} or attn_mask of shape {None if attn_mask is None else tuple(attn_mask.shape)} does "
            f"not fit {shape} (batch, heads, queries, positions of the cache): {error}"
        ) from None


def _find_visible_keys(
    name: str, cache: KVCache, mask: Mask, attn_mask: torch.Tensor | None, q: torch.Tensor
) -> tuple[slice, torch.Tensor | None]:
    """The range of this rank's keys to which some query attends, and a bias that hides the remaining keys in it, None
    if there are none. The bias has 4 dims that broadcast to [B, H, L, M]."""
    queries = torch.arange(cache.length - q.shape[2], cache.length, device="cpu")
    lo, hi = (torch.stack(side) for side in zip(*(row.bounds(queries) for row in mask.rows), strict=True))
    has_keys = lo < hi.clamp(max=cache.length)
    if bool((has_keys & (lo < cache._first_needed)).any()):
        raise ValueError(
            f"{name}: a query attends to positions before {cache._first_needed}, whose keys this cache has freed. "
            "Their window was over; the call has another mask, or crop has removed positions. Prefill anew"
        )
    first, stop = cache._find_rows(lo, torch.maximum(lo, hi))
    columns = slice(int(first.min()), max(int(stop.max()), int(first.min())))
    hidden: torch.Tensor | None = None
    # A kernel without a bias is faster, and most tokens attend to one range of keys.
    if bool((first != columns.start).any()) or bool((stop != columns.stop).any()):
        row_M = torch.arange(columns.start, columns.stop, device=q.device)
        first, stop = (tensor_on(q.device, x)[:, None, :, None] for x in (first, stop))
        hidden = (row_M < first) | (row_M >= stop)
    if attn_mask is not None:
        masked = ~attn_mask.index_select(-1, cache.positions(attn_mask.device)[columns])
        hidden = masked if hidden is None else hidden | masked
    if hidden is None:
        return columns, None
    return columns, torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))


def _compute_part(
    tile: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    columns: slice,
    bias: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out_BHLE, lse_BHL)`` over this rank's keys, in the accumulation dtype."""
    wide = accumulation_dtype(q.dtype)
    if columns.start == columns.stop or not q.shape[0]:
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
        return out, torch.full(q.shape[:3], EMPTY_LSE, dtype=wide, device=q.device)
    dtype = tile.tile_dtype(q.dtype) if cache.group.size() > 1 else q.dtype
    tensors = [x.to(dtype) for x in (q, k[:, :, columns], v[:, :, columns])]
    options: dict[str, Any] = {"causal": False, "bias": None if bias is None else bias.to(dtype), "scale": scale}
    if tile.positional:
        queries = torch.arange(cache.length - q.shape[2], cache.length, device=q.device)
        options["where"] = TilePositions(queries, cache.positions(q.device)[columns], 0)
    out, lse = tile_function(tile, "forward")(*tensors, **options)
    return out.to(wide), lse.to(wide)


def _gather_parts(
    name: str, out: torch.Tensor, lse: torch.Tensor, cache: KVCache, q: torch.Tensor, equal_number: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out_PBHLE, lse_PBHL)`` of all ranks, and one number of each rank: the numbers differ if the calls do."""
    # One message: the checksum travels as numbers of the dtype of the parts, which nothing computes with.
    number = (device_checksum(q) + (cache.length * 0x9E3779B97F4A7C1 + equal_number) % 2**62).reshape(1)
    part_N = torch.cat((out.flatten(), lse.flatten(), number.view(out.dtype)))
    parts_PN = part_N.new_empty(cache.group.size(), part_N.numel())
    with collective(cache.group, name):
        dist.all_gather(list(parts_PN.unbind()), part_N, group=cache.group)
    outs, lses, numbers = parts_PN.split([out.numel(), lse.numel(), part_N.numel() - out.numel() - lse.numel()], 1)
    return outs.view(-1, *out.shape), lses.view(-1, *lse.shape), numbers.contiguous().view(torch.int64)


def _refuse_differences(name: str, cache: KVCache, different: int) -> None:
    if different:  # equal on every rank, because all ranks have gathered the same numbers
        raise ValueError(
            f"{name}: the ranks of mesh axis {cache.axis!r} decode different tokens: their queries, the lengths of "
            "their caches or their random states differ. Give all ranks the same prompt and weights, choose tokens in "
            "the same way, and before sampling call torch.manual_seed with one seed on all ranks"
            f"{see('Ranks that decode different tokens')}"
        )
