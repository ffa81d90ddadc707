"""Sums of squares of the tensors that a rule works on."""

from __future__ import annotations

import torch
from torch import Tensor

import bmt_kernels


def square_sums(tensors: list[Tensor]) -> Tensor:
    """The sum of squares of each tensor: fp32, of shape (len(tensors),), on their device."""
    if tensors[0].device.type == "cuda":  # in one launch
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).square()
    return torch.stack([bmt_kernels.power_sum([t]).total for t in tensors]).float()
