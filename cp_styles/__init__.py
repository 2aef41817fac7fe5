"""Context parallelism as ParallelStyles for parallelize_module: exact or loud."""

import importlib
import warnings
from typing import Any

from cp_styles.batch import global_loss, global_token_count, next_token_labels, sum_gradients
from cp_styles.batch_sharder import BatchSharder, MeanOfMeansWarning
from cp_styles.comm.point_to_point import TransferError
from cp_styles.engine.checkpoint import save_attention
from cp_styles.engine.checks import Checks
from cp_styles.engine.gradient_watch import UnreducedGradientsError, UnreducedGradientsWarning
from cp_styles.engine.proof import UnverifiedModelWarning
from cp_styles.engine.scope import SequenceScope
from cp_styles.functions.attention import context_attention
from cp_styles.functions.flex import context_flex_attention
from cp_styles.functions.varlen import context_varlen_attention
from cp_styles.layout import SequenceLayout, by_work, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.mask import Causal, Chunked, Dense, Documents, Full, Mask, PerRow, PrefixLM, SlidingWindow
from cp_styles.mask.block_mask import FlexMask
from cp_styles.plan import imbalance
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.styles import (
    AttentionContextParallel,
    ColwiseParallel,
    ModuleContextParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = [
    "AllGather",
    "AttentionContextParallel",
    "BatchSharder",
    "Causal",
    "Checks",
    "Chunked",
    "ColwiseParallel",
    "Dense",
    "Documents",
    "FlexMask",
    "Full",
    "Mask",
    "MeanOfMeansWarning",
    "ModuleContextParallel",
    "PerRow",
    "PrefixLM",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Ring",
    "RowwiseParallel",
    "SequenceLayout",
    "SequenceParallel",
    "SequenceScope",
    "SlidingWindow",
    "TransferError",
    "Ulysses",
    "UnreducedGradientsError",
    "UnreducedGradientsWarning",
    "UnverifiedModelWarning",
    "by_work",
    "context_attention",
    "context_flex_attention",
    "context_varlen_attention",
    "contiguous",
    "global_loss",
    "global_token_count",
    "head_tail",
    "imbalance",
    "next_token_labels",
    "parallelize_module",
    "per_document_head_tail",
    "save_attention",
    "striped",
    "sum_gradients",
]

# What a release before this one had here, and where it is now. For one release.
_MOVED = {
    "JointLayout": "cp_styles.joint_layout",
    "KVCache": "cp_styles.decoding",
    "Kernel": "cp_styles.kernels",
    "ReferenceKernel": "cp_styles.kernels",
    "Strategy": "cp_styles.strategies",
    "chunked_token_losses": "cp_styles.batch",
    "context_decode": "cp_styles.decoding",
    "context_parallel": "cp_styles.torch_api",
    "context_parallel_shard": "cp_styles.torch_api",
    "context_parallel_unshard": "cp_styles.torch_api",
    "document_positions": "cp_styles.batch",
    "set_rotate_method": "cp_styles.torch_api",
    "shard_batch": "cp_styles.batch",
}
# What it had, and what to write instead.
_REMOVED = {
    "HeadTailLoadBalancer": "head_tail(seq_length, world_size) is the layout",
    "PTRRLoadBalancer": "by_work(length, world_size, mask=FlexMask.per_row(block_mask)) is the layout",
    "PerDocumentHeadTailLoadBalancer": "per_document_head_tail(length, world_size, documents=lengths) is the layout",
    "EveryCall": "leave agreement= out: it is the default",
    "GradientCheck": "write checks=Checks(only_warn=..., local=...) for gradient_check=GradientCheck(...)",
    "LayoutMismatchWarning": "there is nothing to filter. Tensors that another layout cut are refused where they are "
    "inputs of the attention, or of a model with ModuleContextParallel",
    "NewCalls": "leave agreement= out, which compares every call, or write checks=Checks(agreement=False)",
    "NoAgreement": "write checks=Checks(agreement=False) for agreement=NoAgreement()",
}


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        warnings.warn(
            f"cp_styles.{name} is in {_MOVED[name]} now: from {_MOVED[name]} import {name}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(_MOVED[name]), name)
    if name in _REMOVED:  # an AttributeError would lose its text in "from cp_styles import ..."
        raise ImportError(f"cp_styles.{name} was removed: {_REMOVED[name]}. See the page Migration")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
