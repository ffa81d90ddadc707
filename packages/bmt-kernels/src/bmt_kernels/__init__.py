"""Fused kernels on PyTorch tensors: compiled for CPU (SIMD) and CUDA, with plain PyTorch beside them."""

from bmt_kernels._version import __version__
from bmt_kernels.adam import adam_step
from bmt_kernels.cross_entropy import cross_entropy, parallel_cross_entropy
from bmt_kernels.info import BuildInfo, build_info
from bmt_kernels.linear_cross_entropy import linear_cross_entropy, parallel_linear_cross_entropy
from bmt_kernels.overflow import has_inf_or_nan

__all__ = [
    "BuildInfo",
    "__version__",
    "adam_step",
    "build_info",
    "cross_entropy",
    "has_inf_or_nan",
    "linear_cross_entropy",
    "parallel_cross_entropy",
    "parallel_linear_cross_entropy",
]
