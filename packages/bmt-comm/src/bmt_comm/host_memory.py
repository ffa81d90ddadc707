"""Page-locked host memory, for H2D and D2H copies by the GPU itself."""

from __future__ import annotations

import torch
from torch import Tensor


def page_locked(numel: int, dtype: torch.dtype) -> Tensor:
    """A vector in page-locked host memory, to be kept for long; its values are undefined.

    With ``bmt_kernels`` it takes as many bytes as needed, and the memory is released with the vector. PyTorch's own
    ``pin_memory=True`` takes the next power of two of bytes, and caches freed memory for the next vector of that size.

    Raises:
        RuntimeError: CUDA cannot lock the memory.
    """
    try:
        import bmt_kernels
    except ImportError:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    return bmt_kernels.pinned_zeros(numel * dtype.itemsize, torch.uint8).view(dtype)
