"""Differences between PyTorch versions."""

from __future__ import annotations

from typing import Any

import torch

try:
    import torch.distributed._symmetric_memory as _symmetric_memory  # defines the operations, on every platform
except ImportError:
    _symmetric_memory = None  # type: ignore[assignment]

HAS_SYMMETRIC_MEMORY: bool = _symmetric_memory is not None and hasattr(torch.ops.symm_mem, "fused_all_gather_matmul")

# Whether the operation returns the gathered operand on request only. Older versions always return it.
TAKES_RETURN_A: bool = HAS_SYMMETRIC_MEMORY and "return_A" in str(
    torch.ops.symm_mem.fused_all_gather_matmul.default._schema
)


def enable_symmetric_memory(group_name: str) -> None:
    """Prepare a process group, if this version of PyTorch needs that."""
    enable: Any = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None and not hasattr(enable, "__deprecated__"):
        enable(group_name)


def fused_all_gather_matmul(*arguments: Any, return_A: bool) -> Any:
    options = {"return_A": return_A} if TAKES_RETURN_A else {}
    return torch.ops.symm_mem.fused_all_gather_matmul(*arguments, **options)


def fused_matmul_reduce_scatter(*arguments: Any) -> Any:
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(*arguments)
