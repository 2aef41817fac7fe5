"""ParallelStyles for parallelize_module. On a composed mesh each style takes its own axis."""

from cp_styles.styles.attention import AttentionContextParallel
from cp_styles.styles.module import ModuleContextParallel
from cp_styles.styles.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from cp_styles.styles.sequence import SequenceParallel
from cp_styles.styles.tensor_parallel import ColwiseParallel, RowwiseParallel

__all__ = [
    "AttentionContextParallel",
    "ColwiseParallel",
    "ModuleContextParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]
