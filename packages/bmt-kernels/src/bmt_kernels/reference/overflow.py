"""The overflow check in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def has_inf_or_nan(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """See `bmt_kernels.has_inf_or_nan`."""
    if out is None:
        out = torch.zeros((), dtype=torch.float32, device=tensors[0].device if tensors else "cpu")
    for tensor in tensors:
        has_nonfinite = tensor.isfinite().all().logical_not()
        out.copy_(torch.maximum(out, has_nonfinite.to(torch.float32)))
    return out
