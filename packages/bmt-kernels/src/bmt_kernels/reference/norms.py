"""Sums of powers in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_kernels.reference.overflow import has_inf_or_nan


@torch.no_grad()
def power_sum(
    tensors: Sequence[Tensor], norm_type: float = 2.0, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """See `bmt_kernels.power_sum`."""
    if out is None:
        device = tensors[0].device if tensors else "cpu"
        out = torch.zeros((), device=device), torch.zeros((), dtype=torch.float64, device=device)
    found_inf, total = out
    has_inf_or_nan(tensors, found_inf)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        magnitudes = tensor.abs().double()
        if math.isinf(norm_type):
            total.copy_(torch.maximum(total, magnitudes.amax()))
        else:
            total.add_((magnitudes**norm_type).sum())
    return out
