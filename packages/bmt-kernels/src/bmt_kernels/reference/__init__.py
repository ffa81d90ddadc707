"""The operations in plain PyTorch: the specification of the compiled kernels, and what serves without them.

They take the same arguments as the public functions and check none of them. The element-wise compiled kernels do the
same fp32 operations in the same order, so that their results have the same bits; sums over many elements agree to
rounding.
"""

from bmt_kernels.reference.adam import adam_step
from bmt_kernels.reference.adam8bit import adam8bit_step
from bmt_kernels.reference.cross_entropy import (
    cross_entropy_gradient,
    cross_entropy_losses,
    cross_entropy_statistics,
)
from bmt_kernels.reference.factored import (
    factored_residual_square_sums,
    factored_square_sums,
    factored_update,
    factored_update_square_sum,
)
from bmt_kernels.reference.lamb import lamb_moments, lamb_update
from bmt_kernels.reference.norms import power_sum
from bmt_kernels.reference.overflow import has_inf_or_nan
from bmt_kernels.reference.packing import pack_blocks, unpack_blocks
from bmt_kernels.reference.quantize import dequantize_blockwise, dynamic_map, quantize_blockwise
from bmt_kernels.reference.rounding import round_stochastically

__all__ = [
    "adam8bit_step",
    "adam_step",
    "cross_entropy_gradient",
    "cross_entropy_losses",
    "cross_entropy_statistics",
    "dequantize_blockwise",
    "dynamic_map",
    "factored_residual_square_sums",
    "factored_square_sums",
    "factored_update",
    "factored_update_square_sum",
    "has_inf_or_nan",
    "lamb_moments",
    "lamb_update",
    "pack_blocks",
    "power_sum",
    "quantize_blockwise",
    "round_stochastically",
    "unpack_blocks",
]
