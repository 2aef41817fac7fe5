"""The mask function that transformers calls for each kind of layer: it recognizes the parts of a mask.

Shapes: B batch, L tokens of this rank, S whole sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from cp_styles._lib.compat import uncompiled, without_function_modes
from cp_styles._lib.troubleshooting import see
from cp_styles.checks.transformers_models import option_of
from cp_styles.collectives import gather
from cp_styles.comm.agreement import Meeting, StatusRow, start_status
from cp_styles.comm.checks import Checks
from cp_styles.engine.binding import Binding
from cp_styles.engine.scope import open_entries
from cp_styles.functions.decode import cache_argument
from cp_styles.integrations.transformers.caches import EncoderKeys, TransformersCache, past_of
from cp_styles.intercept.function_mode import AttentionCalls
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import Causal, Chunked, Documents, Full, Mask, PerRow, SlidingWindow, WithBlocks
from cp_styles.masks.algebra import UNBOUNDED, KeyRange
from cp_styles.masks.tree import find_tree


@uncompiled
@torch.no_grad()
def make_mask(
    batch_size: int,
    q_length: int,
    q_offset: int | torch.Tensor = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> WholeMask:
    """The mask function of transformers: ``mask_function`` and ``attention_mask`` as a mask of the whole sequence.

    ``attention_mask`` is [B, S] of the *whole* sequence; or this rank's shard if it is True everywhere. ``q_offset`` is
    the number of tokens in a cache: 0, or the length of a cache of :func:`prefill`.

    Communication: one all-gather of some integers; and one of position ids, if any rank's position ids are not the
    positions of one sequence.
    """
    calls = AttentionCalls.current()
    if calls is None:  # in front of the blocks, where a BackboneContextParallel leaves the sequence whole
        return _make_whole_mask(batch_size, q_length, int(q_offset), mask_function, attention_mask, config)
    past, encoder = past_of(calls.inputs)
    with without_function_modes():
        if past is not None and past.prefilled:
            mask, padding, length = _make_mask_of_new(calls, past, encoder, q_length, mask_function, attention_mask)
            return WholeMask(mask, padding, batch_size, length)
        of_call = (batch_size, q_length, int(q_offset)), mask_function, attention_mask, config
        mask, padding, length = _make_prompt_mask(calls, *of_call)
    whole_mask = WholeMask(mask, padding, batch_size, length)
    if padding is not None or mask not in (Full(), Causal()):
        calls.forward_state.layer_mask = whole_mask
    return whole_mask


class _ComputesWithMaskError(NotImplementedError, AttributeError):
    """Also an AttributeError, because models call hasattr on masks."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"this model computes with its attention mask ({what}): its attention is written in plain operations and "
            "knows no attention interface of transformers (RemBERT, MPT, Mvp, TrOCR and LED for example), so each rank "
            "would attend to its own tokens. It cannot be context parallel without a change of its code: let its "
            "attention call scaled_dot_product_attention"
        )


class WholeMask(BlockMask):
    """A mask of the whole sequence that a model passes to its layers.

    It is a BlockMask, because models pass only tensors and BlockMasks on unchanged. ``padding`` is bool [B, 1, 1, S],
    True for keys to attend to; None if there is no padding.
    """

    def __init__(self, mask: Mask, padding: torch.Tensor | None, batch: int, length: int) -> None:
        self.mask = mask
        self.padding = padding
        self.seq_lengths = length, length
        self._batch = batch

    @property
    def shape(self) -> tuple[int, int, int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(rows of the batch, 1, queries, keys), of the whole sequence."""
        return self._batch, 1, *self.seq_lengths

    def to(self, *args: Any, **kwargs: Any) -> WholeMask:  # pyright: ignore[reportIncompatibleMethodOverride]
        """This mask, for any ``args`` and ``kwargs``: its positions are on the host."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Raises for attributes of tensors, with which a model would compute."""
        if name == "dtype":
            return self[0]
        if hasattr(torch.Tensor, name):
            raise _ComputesWithMaskError(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __getitem__(self, index: Any) -> BlockMask:
        """This mask, if ``index`` keeps all of it. Head 0 is all heads, to which one mask is given."""
        parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
        whole = [_keeps_all(part, size) for part, size in zip(parts, self.shape, strict=False)]
        if len(whole) == len(parts) and all(whole[:1] + whole[2:]) and (all(whole) or parts[1] == 0):
            return self
        raise NotImplementedError(
            f"this model cuts its attention mask itself ({index}), and here the mask is of the whole sequence: it is "
            "not supported through transformers' attention interface. If logits_to_keep=n asks for it, as in Gemma 4, "
            "leave that out, or give it as a tensor of positions"
        )

    def __and__(self, selected: Mask) -> WholeMask:
        """This mask with the keys that an indexer has selected."""
        return WholeMask(self.mask & selected, self.padding, self._batch, self.seq_lengths[0])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _ComputesWithMaskError(func.__name__)

    def __repr__(self) -> str:
        padding = None if self.padding is None else tuple(self.padding.shape)
        return f"WholeMask({self.mask!r}, padding={padding}, shape={self.shape})"

    __str__ = __repr__


def _keeps_all(part: Any, size: int) -> bool:
    """Whether an index of one dim keeps all of it."""
    return isinstance(part, slice) and part.indices(size) == (0, size, 1)


@dataclass
class _MaskPieces:
    """The parts of a mask function.

    Attributes:
        masks: masks that do not depend on rows or documents.
        chunk: size of chunks, counted from each row's first token that is not left padding, or in each document.
        documents: the number of the document of each token [B, L], if transformers has found more than one.
        widened: masks in addition to which each token sees its own block.
        blocks: for each row, or for all, the first position and the end of each block. Empty: no blocks.
        numbered: the number of tokens of which it is known whether they are in a block.
        unpacked: the error of packed documents; empty if there is none.
    """

    masks: list[Mask]
    chunk: int | None = None
    documents: torch.Tensor | None = None
    widened: Sequence[Mask] = ()
    blocks: Sequence[tuple[tuple[int, int], ...]] = ()
    numbered: int = 0
    unpacked: str = ""

    @property
    def packed(self) -> bool:
        return self.documents is not None

    @property
    def causal(self) -> bool:
        return Causal() in (*self.masks, *self.widened)

    @property
    def unmasked(self) -> bool:
        """Whether every token sees every key, but for padding and documents, as in cross-attention."""
        return not (self.masks or self.widened) and self.chunk is None


def require_active_calls(what: str, config: Any = None) -> AttentionCalls:
    calls = AttentionCalls.current()
    if calls is None:
        masks = import_module("transformers.masking_utils")
        word = cache_argument(inspect.signature(masks.create_causal_mask).parameters)
        ready = "" if config is None else _describe_ready_masks(config)
        ready = ready and f"; if its language model has it, give the model {ready}"
        raise RuntimeError(
            f"a model asks for {what} with attn_implementation of cp_styles, outside of a ModuleContextParallel: apply "
            f"the style to the model (parallelize_module(model, mesh, ModuleContextParallel())){ready}. Or choose "
            'attn_implementation="sdpa" for one device; models that were made of one config object share it, so each '
            f"needs a copy.deepcopy(config). generate() with a static cache: give it {word}=prefill(model, input_ids)"
        )
    return calls


def _describe_ready_masks(config: Any) -> str:
    """The form of a user's masks that a model takes: one mask for all layers, or one for each kind of layer."""
    kinds, window = sorted(set(getattr(config, "layer_types", None) or ())), option_of(config, "sliding_window")
    tensor = "boolean tensor [B, 1, S, S] of the whole sequence"
    within = f", the mask & (query - key < {window}) for layers with a window" if window else ""
    if len(kinds) < 2:
        return f"attention_mask as a {tensor}{within}"
    return (
        f"attention_mask as a dict with a {tensor} for each kind of its layers, {kinds}{within} (a tensor alone would "
        "be the mask of all layers, without their windows)"
    )


def _parse_mask_function(mask_function: Callable[..., Any], name: str, config: Any = None) -> _MaskPieces:
    """The parts of a mask function of transformers.masking_utils, by the names of its functions and their closures."""
    pieces = _MaskPieces([])
    for function, in_documents in _conjuncts(mask_function):
        closure = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
        what = function.__qualname__.split(".")[0] if function.__module__ == "transformers.masking_utils" else ""
        if what == "causal_mask_function":
            pieces.masks.append(Causal())
        elif what == "bidirectional_mask_function":
            pass
        elif what == "sliding_window_overlay":
            window = closure["sliding_window"]
            # 0 if the configuration disables the window. No layer uses this mask then: it hides everything.
            pieces.masks.append(SlidingWindow(window - 1, None) if window > 0 else KeyRange(0, 0))
        elif what == "sliding_window_bidirectional_overlay":
            pieces.masks.append(SlidingWindow(closure["sliding_window"], closure["sliding_window"]))
        elif what == "chunked_overlay":
            pieces.chunk = closure["chunk_size"]
        elif what == "packed_sequence_mask_function":
            pieces.documents = closure["packed_sequence_mask"]
        elif what == "or_masks" and (ids := _find_block_ids(function)) is not None:
            inner = _parse_mask_function(closure["mask_functions"][0], name, config)
            blocks = None
            if inner.causal and inner.chunk is None and not (inner.packed or inner.blocks or pieces.blocks):
                blocks = _find_blocks(ids)
            if blocks is None:
                raise NotImplementedError(
                    f"{name}: in the mask of this model tokens of one block see each other, and the block has a gap, "
                    "as several pictures that see each other (Molmo 2), or no causal mask is joined to it: that is no "
                    f"interval of keys for each query. Give the model its masks ready, {_describe_ready_masks(config)}"
                )
            pieces.widened, pieces.blocks, pieces.numbered = inner.masks, blocks, ids.shape[1]
            if in_documents:
                pieces.unpacked = (
                    f"{name}: in packed documents transformers finds the tokens of a picture, which see each other, by "
                    "positions within documents, where other tokens are. Give the model its masks ready, "
                    f"{_describe_ready_masks(config)}"
                )
        else:
            raise NotImplementedError(
                f"{name}: the mask of this model has a piece {function.__module__}.{function.__qualname__} that is not "
                "known, and it cannot be evaluated on this rank's part alone. Give the model its masks ready, "
                f"{_describe_ready_masks(config)}"
            )
    return pieces


def _conjuncts(function: Callable[..., Any], in_documents: bool = False) -> Iterator[tuple[Any, bool]]:
    """The mask functions that ``function`` combines by "and", each with whether it is given positions in documents."""
    what = getattr(function, "__qualname__", "").split(".")[0]
    closure = inspect.getclosurevars(function).nonlocals if what in _COMBINED else {}
    if what == "and_masks":
        for part in closure["mask_functions"]:
            yield from _conjuncts(part, in_documents)
    elif what == "remap_positions_for_packed_sequence":
        yield from _conjuncts(closure["mask_function"], True)
    elif what == "or_masks" and (ids := _find_block_ids(function)) is not None and bool((ids < 0).all()):
        yield from _conjuncts(closure["mask_functions"][0], in_documents)
    else:
        yield function, in_documents


_COMBINED = "and_masks", "or_masks", "remap_positions_for_packed_sequence"


def _find_block_ids(function: Callable[..., Any]) -> torch.Tensor | None:
    """The number of the block of each token, if ``function`` is a mask or tokens of one block. None for others."""
    if getattr(function, "__qualname__", "").split(".")[0] != "or_masks":
        return None
    _, *others = inspect.getclosurevars(function).nonlocals["mask_functions"]
    if [getattr(each, "__qualname__", "").split(".")[0] for each in others] != ["blockwise_overlay"]:
        return None
    return inspect.getclosurevars(others[0]).nonlocals["block_sequence_ids"]


def _find_blocks(ids_BS: torch.Tensor) -> list[tuple[tuple[int, int], ...]] | None:
    """For each row, the first position and the end of the tokens of each number; -1 is none. None if the
    tokens of a number are not consecutive."""
    rows = list[tuple[tuple[int, int], ...]]()
    for row in ids_BS.cpu():
        ids, lengths = row.unique_consecutive(return_counts=True)
        ends, inside = lengths.cumsum(0), ids >= 0
        if ids[inside].unique().numel() < int(inside.sum()):
            return None
        rows.append(tuple(zip((ends - lengths)[inside].tolist(), ends[inside].tolist(), strict=True)))
    return rows


def _for_rows(rows: Sequence[Mask]) -> Mask:
    """The mask of a batch with a mask for each row."""
    return rows[0] if all(row == rows[0] for row in rows) else PerRow(tuple(rows))


# The mask, the padding that the mask does not contain, and the length of the whole sequence.
_MaskPaddingLength = tuple[Mask, torch.Tensor | None, int]


# Flags of a rank's row in the meeting: properties of its positions and of its padding. Above them is the number of
# tokens whose blocks it was given.
_AS_LAID_OUT, _PACKED, _JUMPS, _MASKED, _FROM_ZERO = 1, 2, 4, 8, 16


_FLAGS = 5


def _make_prompt_mask(
    calls: AttentionCalls,
    sizes: tuple[int, int, int],
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
    config: Any,
) -> _MaskPaddingLength:
    """The mask of sharded tokens. ``sizes``: rows of the batch, tokens of this rank, tokens of a cache."""
    binding, (batch, length, offset) = calls.binding, sizes
    name, group = binding.name, binding.group
    pieces = _MaskPieces([])
    positions_BL: torch.Tensor | None = None

    def build() -> StatusRow:
        nonlocal pieces, positions_BL
        if offset:
            raise NotImplementedError(
                f"{name}: the model is asked to go on after {offset} tokens of a cache that does not know how it "
                "is cut over the ranks: decode with the cache that prefill(model, input_ids) of "
                "cp_styles.integrations.transformers returns"
            )
        pieces = _parse_mask_function(mask_function, name, config)
        flags = _MASKED * (attention_mask is not None and not bool(attention_mask.all()))
        if attention_mask is None and pieces.causal:
            inputs = (calls.inputs.get(name) for name in ("decoder_position_ids", "position_ids"))
            candidates = (_find_text_positions(x, batch, length) for x in inputs)
            positions_BL = next((x for x in candidates if x is not None), None)
        if positions_BL is None and pieces.packed:
            raise ValueError(
                f"{name}: transformers has found packed documents in position ids that the model has made itself, from "
                "this rank's part: give the model position_ids of this rank's tokens (layout.positions(rank))"
            )
        guess = 0
        if positions_BL is not None:
            device = positions_BL.device
            whole, layout = _infer_length(binding, length)
            laid_out = False
            if layout is not None:
                laid_out = bool((positions_BL == _expected_positions(binding, layout, device)).all())
            flags |= _AS_LAID_OUT * laid_out
            counted_BL = torch.arange(length, device=device) + (positions_BL[:, :1] == 1).long()
            flags |= _FROM_ZERO * bool((positions_BL == counted_BL).all())
            flags |= _JUMPS * bool((positions_BL.diff(dim=1) != 1).any())
            guess = whole << 1 | 1  # the whole length for which _AS_LAID_OUT was tested
        flags |= _PACKED * pieces.packed | pieces.numbered << _FLAGS
        width = 0 if attention_mask is None else attention_mask.shape[1]
        return StatusRow(q_length=length, kv_length=width, numbers=(guess, flags))

    rows = start_status(build, Meeting.MASK, name, binding.axis, group)()
    whole = sum(row.q_length for row in rows)
    guesses, flags = rows.columns.numbers
    if numbered := {flag >> _FLAGS for flag in flags} - {0, whole}:
        raise ValueError(
            f"{name}: tokens of one picture see each other, and which tokens these are was given for {min(numbered)} "
            f"of {whole} tokens: give every rank token_type_ids or mm_token_type_ids of the whole sequence, "
            'BatchSharder(mesh, seq_dims={"token_type_ids": None}); or apply the style to the language model alone, '
            f"with cut_inputs_of{see('Pictures among the tokens')}"
        )
    if any(flag & _MASKED for flag in flags):
        _refuse_partial_padding(name, attention_mask, [row.kv_length for row in rows], length, whole, pieces)
    else:
        attention_mask = None
    documents, tree = None, find_tree(binding.mask)
    laid_out = all(flag & _AS_LAID_OUT for flag in flags) and {guess >> 1 for guess in guesses} == {whole}
    if positions_BL is not None and all(guesses) and not laid_out:
        if tree is not None and tree.length == whole:  # the attention refuses a tree of another length
            raise ValueError(f"{name}: {_NOT_IN_ROLLOUTS}, each rank its part, as BatchSharder does")
        layout, lengths = binding.layout_for(whole), [row.q_length for row in rows]
        if tuple(lengths) != layout.lengths:
            raise ValueError(
                f"{name}: the ranks hold {lengths} positions, but the layout gives them {list(layout.lengths)}: cut "
                "the inputs with the layout that the attention uses"
            )
        positions_BS = gather(
            positions_BL, 1, group, reduce_gradients=False, layout=layout, checks=Checks(agreement=False)
        ).cpu()
        alone = len(rows) > 1 and all(flag & _FROM_ZERO for flag in flags)
        packed, jumps = (any(flag & kind for flag in flags) for kind in (_PACKED, _JUMPS))
        known = [row.documents for row in binding.mask.rows]
        documents = _find_documents(name, positions_BS, alone, packed, jumps, known)
    return *_build_mask(pieces, documents, attention_mask, whole), whole


_NOT_IN_ROLLOUTS = (
    "position_ids are not the positions in the rollouts of the Tree that a SequenceScope or a style has as its mask: "
    "give tree.position_ids"
)


def _expected_positions(binding: Binding, layout: SequenceLayout, device: torch.device) -> torch.Tensor:
    """The positions of this rank's tokens: in the sequence, or in the rollouts of a tree."""
    positions, tree = layout.positions(binding.group.rank(), device), find_tree(binding.mask)
    return positions if tree is None or tree.length != layout.length else tree.position_ids.to(device)[positions]


def _make_whole_mask(
    batch: int,
    length: int,
    offset: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
    config: Any,
) -> WholeMask:
    """The mask of a whole sequence, outside of modules with a style. No communication. If the sequence was a part, the
    attention raises."""
    name = "a mask outside of context-parallel modules"
    if offset:
        raise NotImplementedError(
            f"{name}: the model goes on after {offset} tokens of a cache: decode without the style"
        )
    pieces, documents = _parse_mask_function(mask_function, name, config), None
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask = None
    tree = find_tree(*(entry.scope.mask for entry in open_entries.get() if not entry.ended))
    if tree is not None and attention_mask is None and pieces.causal:
        # transformers numbers the runs of positions, and takes each for a document.
        runs = (tree.position_ids.diff(prepend=tree.position_ids.new_zeros(1) - 1) != 1).cumsum(0)
        found = runs.new_zeros(length) if pieces.documents is None else pieces.documents.cpu()
        if tree.length == length and bool((found != runs).any()):
            raise ValueError(f"{name}: {_NOT_IN_ROLLOUTS}")
    elif pieces.documents is not None and attention_mask is None:
        edges = torch.nn.functional.pad(pieces.documents.cpu().diff(dim=1) != 0, (1, 1), value=True)
        documents = [tuple(row.nonzero().flatten().diff().tolist()) for row in edges]
    mask, padding = _build_mask(pieces, documents, attention_mask, length)
    if attention_mask is not None and padding is None:
        mask = mask & Documents((length,))  # ranges of keys name no length
    return WholeMask(mask, padding, batch, length)


def _make_mask_of_new(
    calls: AttentionCalls,
    past: TransformersCache,
    encoder: EncoderKeys | None,
    length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None,
) -> _MaskPaddingLength:
    """The mask of tokens that follow a prefilled prompt. No communication: the inputs are equal on all ranks."""
    name, whole = calls.binding.name, past.get_seq_length() + length
    pieces = _parse_mask_function(mask_function, name)
    if pieces.blocks:
        raise NotImplementedError(
            f"{name}: tokens of one picture see each other, and prefill has run the prompt without pictures: generate "
            "without context parallelism"
        )
    crosses = encoder is not None and pieces.unmasked
    if encoder is not None and crosses:
        whole = encoder.prompt.length
        attention_mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    if attention_mask is not None and attention_mask.shape[1] != whole:
        raise ValueError(
            f"{name}: attention_mask of shape {tuple(attention_mask.shape)}, where the prompt and the new tokens, "
            f"or the encoder's, are {whole}: give the mask of all of them"
        )
    if not crosses:
        past.check_padding(attention_mask)
    return *_build_mask(pieces, None, attention_mask, whole), whole


def _find_text_positions(ids: Any, batch: int, length: int) -> torch.Tensor | None:
    """The position ids [B, L] in which transformers searches documents, from the argument of the model. None if it has
    another shape."""
    if not isinstance(ids, torch.Tensor):
        return None
    if ids.ndim == 3 and ids.shape[0] == 4:  # text, time, height and width
        ids = ids[0]
    if ids.ndim == 1:
        ids = ids.unsqueeze(0)
    if ids.ndim != 2 or ids.shape[1] != length or ids.shape[0] not in (1, batch):
        return None
    return ids.expand(batch, length)


def _infer_length(binding: Binding, length: int) -> tuple[int, SequenceLayout | None]:
    """The probable length of the whole sequence, and its layout if that gives this rank ``length`` tokens."""
    if isinstance(binding.layout, SequenceLayout):
        whole = binding.layout.length
    else:
        lengths = {q: whole for (q, _), (whole, _) in binding.forwards.lengths.items()}
        whole = lengths.get(length, length * binding.group.size())
    try:
        layout = binding.layout_for(whole)
    except Exception:  # a balancer may refuse this length, which is a guess
        return whole, None
    return whole, layout if layout.lengths[binding.group.rank()] == length else None


def _find_documents(
    name: str, positions_BS: torch.Tensor, alone: bool, packed: bool, jumps: bool, known: list[tuple[int, ...] | None]
) -> list[tuple[int, ...]] | None:
    """The lengths of the documents in each row: documents begin where positions restart. None: one document a row.

    ``known``: the documents of the mask of the scope or the style, for each row or for all rows.
    """
    begins = positions_BS.diff(dim=1) != 1
    if not begins.any():
        return None
    edges = torch.nn.functional.pad(begins, (1, 1), value=True)  # before the first token, and behind the last
    found = [tuple(row.nonzero().flatten().diff().tolist()) for row in edges]
    if found == (known if len(known) > 1 else known * len(found)):  # such as one whole document on each rank
        return found
    if alone:
        raise ValueError(
            f"{name}: on every rank position_ids count from 0 or 1 to the end of its part, as if no other rank had "
            "a part: give each rank the positions of its own tokens, layout.positions(rank)"
        )
    first_BS = (positions_BS[:, :1] == 1).long().expand_as(begins)  # all documents of a row may begin at 1
    starts, first = positions_BS[:, 1:][begins], first_BS[begins]
    if (wrong := (starts != 0) & (starts != first)).any():
        odd = int(starts[wrong][0])
        raise ValueError(
            f"{name}: position_ids neither count on nor restart in the order of the sequence (one goes on at "
            f"{odd}): cut them with the layout that the attention uses, layout.shard or layout.positions(rank). Tokens "
            f"that a wrapper puts in front must be there before the cut{see('Tokens in front of a part')}"
        )
    if not packed:
        if jumps:  # transformers does not separate documents in this call: the model has a cache
            return None
        raise ValueError(
            f"{name}: position_ids restart where a rank's part begins, and nowhere else, so it is not known whether "
            "transformers separates these documents: give them as a SequenceScope's mask, and count positions on"
        )
    return found


def _refuse_partial_padding(
    name: str, attention_mask: torch.Tensor | None, widths: list[int], length: int, whole: int, pieces: _MaskPieces
) -> None:
    """Raise for padding that does not cover the whole sequence. The attention checks keys of another sequence."""
    others = pieces.unmasked and len(set(widths)) == 1 and widths[0] != length
    if others or all(width == whole for width in widths):
        return
    shape = None if attention_mask is None else tuple(attention_mask.shape)
    raise ValueError(
        f"{name}: attention_mask of shape {shape} marks padding, and this rank holds {length} of {whole} tokens: give "
        f"every rank the mask of the whole sequence, [B, {whole}], which is no buffer of a context_parallel block"
    )


def _build_mask(
    pieces: _MaskPieces, documents: list[tuple[int, ...]] | None, attention_mask: torch.Tensor | None, length: int
) -> tuple[Mask, torch.Tensor | None]:
    """The mask, and the padding [B, 1, 1, S] that the mask cannot express."""
    common = reduce(Mask.__and__, pieces.masks, Full())
    if pieces.blocks:
        inner = reduce(Mask.__and__, pieces.widened)
        of_rows = [WithBlocks(inner, blocks, pieces.numbered) if blocks else inner for blocks in pieces.blocks]
        common = common & _for_rows(of_rows)
    chunk, padding = pieces.chunk, None
    rows: list[Mask] = []
    if documents is not None and pieces.unpacked:
        raise NotImplementedError(pieces.unpacked)
    if documents is not None:
        rows = [Documents(lengths if chunk is None else _split_into_chunks(lengths, chunk)) for lengths in documents]
    elif attention_mask is not None:
        present = attention_mask.cpu()
        first = present.int().argmax(1).tolist()
        ranges = [(low, low + count) for low, count in zip(first, present.sum(1).tolist(), strict=True)]
        without_gaps = all(bool(row[low:stop].all()) for row, (low, stop) in zip(present, ranges, strict=True))
        if without_gaps and common.parts:
            # Without padding on the right, one mask for any length: each new token then has an equal mask.
            rows = [KeyRange(low, UNBOUNDED if stop == length else stop) for low, stop in ranges]
        else:
            padding = attention_mask[:, None, None, :]
        if chunk is not None:
            lengths = [[*([low] if low else []), length - low] for low in first]
            chunks = [Documents(_split_into_chunks(of_row, chunk)) for of_row in lengths]
            rows = [row & mask for row, mask in zip(rows, chunks, strict=True)] if rows else list(chunks)
    elif chunk is not None:
        rows = [Chunked(chunk)]
    return common & _for_rows(rows) if rows else common, padding


def _split_into_chunks(lengths: Any, size: int) -> tuple[int, ...]:
    """Split each length into chunks of ``size``; the last chunk may be smaller."""
    return tuple(min(size, length - start) for length in lengths for start in range(0, length, size))
