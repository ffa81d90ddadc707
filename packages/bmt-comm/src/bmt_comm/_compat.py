"""The one place that knows how torch versions differ in what this package calls."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# torch 2.13 renamed the single-tensor collectives and deprecates the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
