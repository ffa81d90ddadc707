"""Host memory that a GPU copies from and to without the host's help."""

from __future__ import annotations

import torch
from torch import Tensor


def page_locked(numel: int, dtype: torch.dtype) -> Tensor:
    """A vector in page-locked host memory, to be kept for long; what is in it does not matter.

    With ``bmt_kernels`` it takes what is needed, and is given back when the vector is gone. PyTorch's own
    ``pin_memory=True`` takes the next power of two of bytes, and keeps what was freed for the next one of that size.

    Raises:
        RuntimeError: CUDA cannot lock the memory.
    """
    try:
        import bmt_kernels
    except ImportError:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    return bmt_kernels.pinned_zeros(numel * dtype.itemsize, torch.uint8).view(dtype)
