"""Kernels: the attention of one tile on one device, forward and backward."""

from cp_styles.kernels.base import Kernel, Where
from cp_styles.kernels.choice_by_tile import kernel_for_tiles
from cp_styles.kernels.flex import FlexKernel
from cp_styles.kernels.flex_compiled import CompiledFlexKernel
from cp_styles.kernels.reference import ReferenceKernel
from cp_styles.kernels.sdpa import (
    CPU_FLASH,
    CUDA_CUDNN,
    CUDA_CUDNN_PREFERRED,
    CUDA_EFFICIENT,
    CUDA_EFFICIENT_FLOAT32,
    CUDA_FLASH,
    SDPA_KERNELS,
    SdpaKernel,
    VarlenKernel,
)

__all__ = [
    "CPU_FLASH",
    "CUDA_CUDNN",
    "CUDA_CUDNN_PREFERRED",
    "CUDA_EFFICIENT",
    "CUDA_EFFICIENT_FLOAT32",
    "CUDA_FLASH",
    "SDPA_KERNELS",
    "CompiledFlexKernel",
    "FlexKernel",
    "Kernel",
    "ReferenceKernel",
    "SdpaKernel",
    "VarlenKernel",
    "Where",
    "kernel_for_tiles",
]
