"""The one place that knows how torch versions differ in what this package calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the single-tensor collectives and deprecates the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def point_to_point(group: dist.ProcessGroup) -> tuple[Any, Any]:
    """The unwrapped ``send`` and ``recv`` of a process group: ``f([tensor], group_rank, tag) -> Work``."""
    return group.send, group.recv


def increment_version(tensors: list[Tensor]) -> None:
    """Tell autograd that ``tensors`` were written by code that torch did not see."""
    bump = torch.autograd.graph.increment_version
    try:
        bump(tensors)
    except (TypeError, AttributeError):  # torch < 2.7 takes one tensor at a time
        for tensor in tensors:
            bump(tensor)
