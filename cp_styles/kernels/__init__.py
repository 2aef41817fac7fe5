"""Kernels: the attention of one tile on one device, forward and backward.

It imports _lib. Begin with `base.py`.
"""

from cp_styles.kernels.base import Kernel
from cp_styles.kernels.flex import FlexKernel
from cp_styles.kernels.flex_compiled import CompiledFlexKernel
from cp_styles.kernels.reference import ReferenceKernel
from cp_styles.kernels.sdpa import SdpaKernel, VarlenKernel

__all__ = [
    "CompiledFlexKernel",
    "FlexKernel",
    "Kernel",
    "ReferenceKernel",
    "SdpaKernel",
    "VarlenKernel",
]
