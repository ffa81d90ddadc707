"""The places where PyTorch versions differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_version: Any = torch.__version__  # a TorchVersion


def _find_increment_version() -> Callable[[Sequence[Tensor]], None]:
    one_or_many = getattr(torch.autograd.graph, "increment_version", None)
    if one_or_many is None:
        return lambda tensors: None
    try:
        one_or_many(())
    except (TypeError, AttributeError):  # this version takes one tensor at a time

        def each(tensors: Sequence[Tensor]) -> None:
            for tensor in tensors:
                one_or_many(tensor)

        return each
    return one_or_many


keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
"""Whether the backward that is running keeps the graph for another one; True if torch cannot say."""


def adds_products_in_fp32(dtype: torch.dtype) -> bool:
    """Whether ``torch.addmm`` on CUDA adds a product of matrices of this half-precision dtype to sums in fp32.

    Before torch 2.10 its ``out_dtype`` wants the sums in the dtype of the matrices. 2.11 was tried.
    """
    if _version < (2, 11) or torch.version.hip is not None:
        return False
    accumulates_in_fp16 = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    return not (dtype is torch.float16 and accumulates_in_fp16)


def cuda_driver_version() -> tuple[int, int]:
    """The newest CUDA that the driver serves: (12, 4), say; (0, 0) where there is none, or PyTorch has no CUDA."""
    ask: Callable[[], int] = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)
    number = ask()
    return number // 1000, number % 1000 // 10


increment_version = _find_increment_version()
"""Tells autograd that tensors were written to behind its back."""


def weights_written(params: Sequence[Tensor], masters: Sequence[Tensor | None] | None) -> None:
    """:func:`increment_version` of parameters and their masters."""
    increment_version([*params, *(master for master in masters or () if master is not None)])
