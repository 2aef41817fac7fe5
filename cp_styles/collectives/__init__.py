"""Sequence-parallel collectives."""

from cp_styles.collectives._autograd import Pending, differentiable
from cp_styles.collectives._exchange import Exchange
from cp_styles.collectives._group import Group
from cp_styles.collectives._rows import Layout, Padded
from cp_styles.collectives.all_to_all import all_to_all
from cp_styles.collectives.heads import head_exchange, head_ranges, heads_to_seq, seq_to_heads
from cp_styles.collectives.inputs import gather_outputs, slice_inputs
from cp_styles.collectives.layouts import nested_layout, per_document_layout
from cp_styles.collectives.split_gather import GradScale, gather, reduce_scatter, split
from cp_styles.collectives.sync import sync_inputs, sync_object

__all__ = [
    "Exchange",
    "GradScale",
    "Group",
    "Layout",
    "Padded",
    "Pending",
    "all_to_all",
    "differentiable",
    "gather",
    "gather_outputs",
    "head_exchange",
    "head_ranges",
    "heads_to_seq",
    "nested_layout",
    "per_document_layout",
    "reduce_scatter",
    "seq_to_heads",
    "slice_inputs",
    "split",
    "sync_inputs",
    "sync_object",
]
