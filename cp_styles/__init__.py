"""Context parallelism as ParallelStyles for parallelize_module: exact or loud."""

from cp_styles.batch import (
    document_positions,
    global_loss,
    global_token_count,
    next_token_labels,
    shard_batch,
    sum_gradients,
)
from cp_styles.functional import context_attention
from cp_styles.kernels import Kernel, ReferenceKernel
from cp_styles.layout import SequenceLayout, by_work, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.mask import Causal, Chunked, Dense, Documents, Full, Mask, PerRow, PrefixLM, SlidingWindow
from cp_styles.plan import imbalance
from cp_styles.scope import SequenceScope
from cp_styles.strategies import AllGather, Ring, Strategy, Ulysses
from cp_styles.styles import (
    AttentionContextParallel,
    ColwiseParallel,
    ModuleContextParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from cp_styles.unreduced import UnreducedGradientsWarning

__all__ = [
    "AllGather",
    "AttentionContextParallel",
    "Causal",
    "Chunked",
    "ColwiseParallel",
    "Dense",
    "Documents",
    "Full",
    "Kernel",
    "Mask",
    "ModuleContextParallel",
    "PerRow",
    "PrefixLM",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReferenceKernel",
    "Ring",
    "RowwiseParallel",
    "SequenceLayout",
    "SequenceParallel",
    "SequenceScope",
    "SlidingWindow",
    "Strategy",
    "Ulysses",
    "UnreducedGradientsWarning",
    "by_work",
    "context_attention",
    "contiguous",
    "document_positions",
    "global_loss",
    "global_token_count",
    "head_tail",
    "imbalance",
    "next_token_labels",
    "per_document_head_tail",
    "shard_batch",
    "striped",
    "sum_gradients",
]
