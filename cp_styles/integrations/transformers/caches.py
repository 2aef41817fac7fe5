"""A sharded ``Cache`` of transformers: see :func:`~cp_styles.integrations.transformers.prefill`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

from cp_styles._lib.troubleshooting import see
from cp_styles.engine.binding import Binding
from cp_styles.functions.decode import GENERATE_ALONE, LayerCaches, find_cache
from cp_styles.integrations.layers import rows_at_end
from cp_styles.layouts import SequenceLayout
from cp_styles.masks import Mask


class TransformersCache(LayerCaches):
    """The methods of a ``Cache`` of transformers, for caches that are sharded over the ranks."""

    is_compileable = False
    is_initialized = True
    offloading = False
    layer_class_to_replicate = None

    def __init__(self, binding: Binding, prompt: SequenceLayout, padding_BS: torch.Tensor | None = None) -> None:
        super().__init__(binding.group, prompt)
        self.name = binding.name
        self.keeps_all = False
        self.states: dict[tuple[int, int], Any] = {}
        self._padding_BS = padding_BS
        self._padding_checked = False

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()} positions on {self.prompt.ranks} ranks)"

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.batch_size
        if self.prefilled and rows not in (-1, key_states.shape[0]):
            raise ValueError(
                f"{self.name}: new tokens of {key_states.shape[0]} rows, but the prompt of this cache had {rows}: for "
                "num_beams=n or num_return_sequences=n call cache.batch_repeat_interleave(n) before generate()"
                f"{see('Rows that a cache does not have')}"
            )
        return self.add(key_states, value_states, layer_idx)

    # States of convolutions and recurrences are equal on all ranks, and stored as in transformers.

    def _linear_state(self, layer_idx: int, state_idx: int) -> Any:
        layer = import_module("transformers.cache_utils").LinearAttentionLayer
        return self.states.setdefault((layer_idx, state_idx), layer())

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **kwargs: Any
    ) -> torch.Tensor:
        state, sizes = self._linear_state(layer_idx, state_idx), {"conv_kernel_size": conv_kernel_size}
        if self.prefilled:
            return state.update_conv_state(conv_states, **sizes)
        state.update_conv_state(rows_at_end(conv_states, conv_kernel_size), **sizes)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        return self._linear_state(layer_idx, state_idx).update_recurrent_state(recurrent_states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state = self._linear_state(layer_idx, state_idx)
        return state.conv_states[0] if state.has_previous_state[0] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state = self._linear_state(layer_idx, state_idx)
        return state.recurrent_states[0] if state.has_previous_state[0] else None

    @property
    def is_croppable(self) -> bool:
        return not self.states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of positions on all ranks; 0 before and during the prefill, which begins at position 0."""
        if not self.prefilled:
            return 0
        if not self.caches and (self.states or self.prompt.length):
            raise NotImplementedError(
                f"{self.name}: a model without attention, or without a cache among its arguments, does not say how "
                f"long it is, and generate() would run the prompt again: {GENERATE_ALONE}"
            )
        cache = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        cache = cache or next(iter(self.caches), None)
        return self.prompt.length if cache is None else cache.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.layers)  # get_seq_length counts all positions, also those outside of a window

    is_linear = is_dummy = is_sliding

    @property
    def batch_size(self) -> int:
        return next((cache.keys.shape[0] for cache in self.caches), -1)

    def reset(self) -> None:
        raise NotImplementedError(f"{self.name}: this cache belongs to its prompt: call prefill again for another one")

    def offload(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{self.name}: a cache that is cut over the ranks is not offloaded")

    prefetch = early_initialization = offload

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        for cache in self.caches:
            cache.select_rows(beam_idx)
        for state in self.states.values():
            state.reorder_cache(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))
        if self.tokens_BS is not None:
            self.tokens_BS = self.tokens_BS.repeat_interleave(repeats, 0)
        if self._padding_BS is not None:
            self._padding_BS = self._padding_BS.repeat_interleave(repeats, 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens."""
        if self.states:
            raise NotImplementedError(f"{self.name}: a state does not go back to earlier tokens: prefill anew")
        for cache in self.caches:
            cache.crop(cache.length - abs(tokens_to_remove))

    def activate_past_recording(self) -> None:
        """Also keep positions outside of windows, because ``crop`` may be called."""
        self.keeps_all = True

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.keeps_all

    def attended(self, layer: int | None, mask: Mask) -> None:
        """Free the positions to which no later token attends, after an attention of ``layer`` with ``mask``."""
        cache = None if layer is None or layer >= len(self.layers) else self.layers[layer]
        if cache is None or self.keeps_all or not cache.length or mask.has_bias:
            return
        last = torch.tensor([cache.length - 1], device="cpu")
        cache.forget(min(int(row.bounds(last)[0]) for row in mask.rows))

    def check_padding(self, attention_mask: torch.Tensor | None) -> None:
        """Raise before the first new token, on every rank, unless the padding equals the padding of the prefill."""
        if self._padding_checked:
            return
        self._padding_checked = True
        padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
        both = [x[:, : self.prompt.length] for x in (padding, self._padding_BS) if x is not None]
        if len(both) == 1 or (both and not torch.equal(*both)):
            raise ValueError(
                f"{self.name}: the prompt was prefilled with another attention_mask than it is decoded with. "
                "generate() makes one from padding tokens by itself: give prefill and generate() the same "
                "attention_mask"
                f"{see('A prompt with another attention_mask')}"
            )


class EncoderKeys(TransformersCache):
    """This rank's keys and values of an encoder's output, for the cross-attention of a decoder."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.prompt.length if layer_idx < len(self.layers) else 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.prefilled = False
        self.add(key_states, value_states, layer_idx)
        self.prefilled = True
        cache = self.layers[layer_idx]
        assert cache is not None
        return cache.keys, cache.values


def past_of(inputs: Mapping[str, Any]) -> tuple[TransformersCache | None, EncoderKeys | None]:
    """The caches among a model's inputs: for its own tokens, and for an encoder's tokens. None for other caches."""
    past = find_cache(inputs)
    cache, encoder = getattr(past, "self_attention_cache", past), getattr(past, "cross_attention_cache", None)
    return (
        cache if isinstance(cache, TransformersCache) else None,
        encoder if isinstance(encoder, EncoderKeys) else None,
    )


def cache_class(base: type[TransformersCache]) -> Callable[..., Any]:
    """A subclass of ``ours`` and of transformers' ``Cache``, which this file does not import."""
    bases = base, import_module("transformers").Cache
    known = next((subclass for subclass in base.__subclasses__() if subclass.__bases__ == bases), None)
    return known or type(f"ContextParallel{base.__name__}", bases, {})


def encoder_keys(binding: Binding, encoded: SequenceLayout) -> Any:
    """An :class:`EncoderKeys`, whose class ignores arguments: some models create further objects of this class."""
    base: Any = cache_class(EncoderKeys)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, binding, encoded)

    return type(base.__name__, (base,), {"__init__": init})()
