"""Models of Hugging Face's transformers under :class:`~cp_styles.styles.ModuleContextParallel`.

It imports _lib, checks, collectives, comm, engine, functions, intercept, layouts, masks, mixers, strategies, styles and
verify. Begin with `registration.py`.

transformers calls registered functions for the attention of its models and for their masks: :func:`register_attention`
registers the functions of this folder. The mask function is called with this rank's lengths, for each kind of layer. It
does not evaluate the mask, but recognizes its parts (causal, a window, chunks, documents, padding), and returns a
:class:`~cp_styles.masks.Mask` of the whole sequence. A mask with other parts is refused.

Written for transformers 5.
"""

from cp_styles.integrations.transformers.generation import encode, on_this_rank, prefill
from cp_styles.integrations.transformers.inputs import cut_inputs_of, position_ids_of
from cp_styles.integrations.transformers.registration import register_attention, send_latents

__all__ = [
    "cut_inputs_of",
    "encode",
    "on_this_rank",
    "position_ids_of",
    "prefill",
    "register_attention",
    "send_latents",
]
