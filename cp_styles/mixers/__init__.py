"""Token mixers other than attention, over a sharded sequence: recurrences, state-space models, convolutions.

It imports _lib, collectives, comm, engine, functions, intercept, kernels, layouts, masks and plan. Begin with
`roll.py`.

Each function calls the user's own kernel with the rows or states that it needs from other ranks. The messages are
derived from (layout, documents), for any layout:

::

    context_causal_conv1d    the W - 1 rows before each fragment, from the ranks that hold them
    context_recurrence       the affine map of the state over each fragment, composed in order; or all tokens
                             of a part of the channels, for kernels without an initial state
    context_roll             the rows that other positions hold: torch.roll, for multi-token prediction
    context_halo             the rows around each part, for a module that looks at a few tokens: n-grams
    context_rand, _randn     random numbers that do not depend on the number of ranks; context_dropout, replace_dropout
    context_windows          blocks of tokens, each on the rank that has its last token
    context_select           the small keys of an indexer, and the selected keys: sparse attention of DeepSeek-V3.2
    selected_keys            which keys, or blocks of keys, an indexer has selected for each group of heads: NSA, MoBA
    query_rows               a bias that each query computes, for the score_mod of a FlexAttention
"""

from cp_styles.mixers.by_channels import Channels
from cp_styles.mixers.convolution import context_causal_conv1d
from cp_styles.mixers.halo import context_halo
from cp_styles.mixers.query_rows import QueryRows, query_rows
from cp_styles.mixers.randomness import (
    DropoutByPosition,
    context_dropout,
    context_rand,
    context_randn,
    derive_seed,
    replace_dropout,
)
from cp_styles.mixers.recurrence import Recurrence, context_recurrence
from cp_styles.mixers.roll import context_roll
from cp_styles.mixers.selection import SelectedKeys, context_select, selected_keys, selected_weights
from cp_styles.mixers.windows import context_windows, window_layout

__all__ = [
    "Channels",
    "DropoutByPosition",
    "QueryRows",
    "Recurrence",
    "SelectedKeys",
    "context_causal_conv1d",
    "context_dropout",
    "context_halo",
    "context_rand",
    "context_randn",
    "context_recurrence",
    "context_roll",
    "context_select",
    "context_windows",
    "derive_seed",
    "query_rows",
    "replace_dropout",
    "selected_keys",
    "selected_weights",
    "window_layout",
]
