"""The operations in plain PyTorch: the specification of the compiled kernels, and what serves without them.

They take the same arguments as the public functions and check none of them. The element-wise compiled kernels do the
same fp32 operations in the same order, so that their results have the same bits; sums over many elements agree to
rounding.
"""

from bmt_kernels.reference.adam import adam_step
from bmt_kernels.reference.cross_entropy import (
    cross_entropy_gradient,
    cross_entropy_losses,
    cross_entropy_statistics,
)
from bmt_kernels.reference.overflow import has_inf_or_nan

__all__ = [
    "adam_step",
    "cross_entropy_gradient",
    "cross_entropy_losses",
    "cross_entropy_statistics",
    "has_inf_or_nan",
]
