"""Fused kernels on PyTorch tensors: compiled for CPU (SIMD) and CUDA, with plain PyTorch beside them."""

from bmt_kernels._version import __version__
from bmt_kernels.adam import adam_step
from bmt_kernels.adam8bit import adam8bit_step
from bmt_kernels.cross_entropy import cross_entropy, parallel_cross_entropy
from bmt_kernels.factored import (
    factored_residual_square_sums,
    factored_square_sums,
    factored_update,
    factored_update_square_sum,
)
from bmt_kernels.factored_averages import factored_averages, factored_totals
from bmt_kernels.info import BuildInfo, build_info
from bmt_kernels.lamb import lamb_moments, lamb_update
from bmt_kernels.linear_cross_entropy import linear_cross_entropy, parallel_linear_cross_entropy
from bmt_kernels.messages import SharedMemoryMessages
from bmt_kernels.norms import PowerSum, power_sum, square_sums
from bmt_kernels.offload import OffloadPipeline, OffloadRow, pinned_zeros
from bmt_kernels.overflow import has_inf_or_nan
from bmt_kernels.packing import pack_blocks, unpack_blocks
from bmt_kernels.quantize import dequantize_blockwise, quantize_blockwise
from bmt_kernels.reference.quantize import dynamic_map
from bmt_kernels.rounding import round_stochastically
from bmt_kernels.shared_memory import SharedMemoryExchange

__all__ = [
    "BuildInfo",
    "OffloadPipeline",
    "OffloadRow",
    "PowerSum",
    "SharedMemoryExchange",
    "SharedMemoryMessages",
    "__version__",
    "adam8bit_step",
    "adam_step",
    "build_info",
    "cross_entropy",
    "dequantize_blockwise",
    "dynamic_map",
    "factored_averages",
    "factored_residual_square_sums",
    "factored_square_sums",
    "factored_totals",
    "factored_update",
    "factored_update_square_sum",
    "has_inf_or_nan",
    "lamb_moments",
    "lamb_update",
    "linear_cross_entropy",
    "pack_blocks",
    "parallel_cross_entropy",
    "parallel_linear_cross_entropy",
    "pinned_zeros",
    "power_sum",
    "quantize_blockwise",
    "round_stochastically",
    "square_sums",
    "unpack_blocks",
]
