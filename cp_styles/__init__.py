"""Context parallelism as ParallelStyles for parallelize_module: exact or loud."""

import sys
from typing import Any

from cp_styles.batch import global_loss, global_token_count, next_token_labels, sum_gradients
from cp_styles.batch.packs import pack_samples, whole_documents
from cp_styles.batch.sharder import BatchSharder, MeanOfMeansWarning
from cp_styles.checks.gradient_watch import UnreducedGradientsError, UnreducedGradientsWarning
from cp_styles.checks.proof import UnprovedPathWarning, UnverifiedModelWarning
from cp_styles.comm.checks import Checks
from cp_styles.comm.point_to_point import TransferError
from cp_styles.engine.checkpoint import save_attention
from cp_styles.engine.scope import SequenceScope
from cp_styles.functions.attention import context_attention
from cp_styles.functions.flex import context_flex_attention
from cp_styles.functions.latent import context_latent_attention
from cp_styles.functions.max_scores import context_max_scores
from cp_styles.functions.varlen import context_varlen_attention
from cp_styles.integrations import layers as _layers  # noqa: F401 - fills LAYER_CHANGES of styles/module.py
from cp_styles.intercept.flex_attention import flex_attention
from cp_styles.layouts import SequenceLayout, by_work, contiguous, head_tail, per_document_head_tail, striped
from cp_styles.masks import Causal, Chunked, Dense, Documents, Full, Mask, PerRow, PrefixLM, SlidingWindow, Tree
from cp_styles.masks.block_mask import FlexMask
from cp_styles.plan import imbalance
from cp_styles.strategies import AllGather, Ring, Ulysses
from cp_styles.styles import (
    AttentionContextParallel,
    BackboneContextParallel,
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
    "BackboneContextParallel",
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
    "Tree",
    "Ulysses",
    "UnprovedPathWarning",
    "UnreducedGradientsError",
    "UnreducedGradientsWarning",
    "UnverifiedModelWarning",
    "by_work",
    "context_attention",
    "context_flex_attention",
    "context_latent_attention",
    "context_max_scores",
    "context_varlen_attention",
    "contiguous",
    "flex_attention",
    "global_loss",
    "global_token_count",
    "head_tail",
    "imbalance",
    "next_token_labels",
    "pack_samples",
    "parallelize_module",
    "per_document_head_tail",
    "save_attention",
    "striped",
    "sum_gradients",
    "whole_documents",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"cp_styles has no {name!r}. The page Migration lists the names of earlier releases",
        name=name,
        obj=sys.modules[__name__],
    )
