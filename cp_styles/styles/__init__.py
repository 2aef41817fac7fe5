"""ParallelStyles for parallelize_module: attention modules, whole models, blocks with a head, tensor parallelism. On a
composed mesh each style takes its own axis.

It imports _lib, batch, checks, collectives, comm, engine, functions, intercept, kernels, layouts, masks, mixers and
strategies. Begin with `module.py`.
"""

from cp_styles.styles.attention import AttentionContextParallel
from cp_styles.styles.backbone import BackboneContextParallel
from cp_styles.styles.module import ModuleContextParallel
from cp_styles.styles.parallelize import parallelize_module
from cp_styles.styles.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "AttentionContextParallel",
    "BackboneContextParallel",
    "ColwiseParallel",
    "ModuleContextParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "parallelize_module",
]
