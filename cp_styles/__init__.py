"""Context parallelism as ParallelStyles for parallelize_module: exact or loud."""

from typing import NoReturn

from cp_styles.batch import (
    chunked_token_losses,
    document_positions,
    global_loss,
    global_token_count,
    next_token_labels,
    shard_batch,
    sum_gradients,
)
from cp_styles.batch_sharder import BatchSharder
from cp_styles.comm.agreement import EveryCall, NoAgreement
from cp_styles.engine.checkpoint import save_attention
from cp_styles.engine.gradient_watch import GradientCheck, UnreducedGradientsError, UnreducedGradientsWarning
from cp_styles.engine.scope import SequenceScope
from cp_styles.functions.attention import context_attention
from cp_styles.functions.decode import KVCache, context_decode
from cp_styles.functions.flex import context_flex_attention
from cp_styles.functions.joint_layout import JointLayout
from cp_styles.functions.varlen import context_varlen_attention
from cp_styles.kernels import Kernel, ReferenceKernel
from cp_styles.layout import (
    SequenceLayout,
    by_work,
    contiguous,
    head_tail,
    per_document_head_tail,
    striped,
)
from cp_styles.mask import Causal, Chunked, Dense, Documents, Full, Mask, PerRow, PrefixLM, SlidingWindow
from cp_styles.mask.block_mask import FlexMask
from cp_styles.plan import imbalance
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
    parallelize_module,
)
from cp_styles.torch_api import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    set_rotate_method,
)
from cp_styles.torch_api.balancers import HeadTailLoadBalancer, PerDocumentHeadTailLoadBalancer, PTRRLoadBalancer

__all__ = [
    "AllGather",
    "AttentionContextParallel",
    "BatchSharder",
    "Causal",
    "Chunked",
    "ColwiseParallel",
    "Dense",
    "Documents",
    "EveryCall",
    "FlexMask",
    "Full",
    "GradientCheck",
    "HeadTailLoadBalancer",
    "JointLayout",
    "KVCache",
    "Kernel",
    "Mask",
    "ModuleContextParallel",
    "NoAgreement",
    "PTRRLoadBalancer",
    "PerDocumentHeadTailLoadBalancer",
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
    "UnreducedGradientsError",
    "UnreducedGradientsWarning",
    "by_work",
    "chunked_token_losses",
    "context_attention",
    "context_decode",
    "context_flex_attention",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "context_varlen_attention",
    "contiguous",
    "document_positions",
    "global_loss",
    "global_token_count",
    "head_tail",
    "imbalance",
    "next_token_labels",
    "parallelize_module",
    "per_document_head_tail",
    "save_attention",
    "set_rotate_method",
    "shard_batch",
    "striped",
    "sum_gradients",
]

# What a release before this one had, and what to write instead. For one release.
_REMOVED = {
    "LayoutMismatchWarning": "there is nothing to filter. Tensors that another layout cut are refused where they are "
    "inputs of the attention, or of a model with ModuleContextParallel",
    "NewCalls": "leave agreement= out, which compares every call in some 0.4 ms, or give NoAgreement()",
}


def __getattr__(name: str) -> NoReturn:
    if name in _REMOVED:  # an AttributeError would lose its text in "from cp_styles import ..."
        raise ImportError(f"cp_styles.{name} was removed: {_REMOVED[name]}. See the page Migration")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
