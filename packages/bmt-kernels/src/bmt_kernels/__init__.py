"""Fused kernels on PyTorch tensors: compiled for CPU (SIMD) and CUDA, with plain PyTorch beside them."""

from bmt_kernels._version import __version__
from bmt_kernels.adam import adam_step
from bmt_kernels.info import BuildInfo, build_info
from bmt_kernels.offload import OffloadPipeline, OffloadRow, pinned_zeros
from bmt_kernels.overflow import has_inf_or_nan

__all__ = [
    "BuildInfo",
    "OffloadPipeline",
    "OffloadRow",
    "__version__",
    "adam_step",
    "build_info",
    "has_inf_or_nan",
    "pinned_zeros",
]
